// The packed product and the embedding on random types, shapes, strides and thread counts, each against a scalar sum in
// float64. tests/kernels/test_sanitizers.py builds this with the address and undefined-behaviour sanitizers: buffers
// have exactly the size that the kernel may touch, so that one element too far is reported.
//
// Usage: linear_shapes CASES. TWINFER_ISA forces an instruction set. Exit status 1 and a line for the first wrong sum.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cpu/kernels.h"

namespace {

using namespace twinfer::cpu;

struct Matrix {
  WeightType type;
  int64_t rows;
  std::vector<uint8_t> stored;
};

// Random bytes are valid quants; 16-bit scales and numbers must not be infinite or NaN, so their exponents stay small.
Matrix random_matrix(std::mt19937& random, int64_t rows, int64_t depth, WeightType type) {
  const WeightFormat& format = format_of(type);
  const int64_t num_bytes = rows * (depth / format.block_depth) * format.block_bytes;
  Matrix matrix{type, rows, std::vector<uint8_t>(static_cast<size_t>(num_bytes))};
  for (size_t i = 0; i < matrix.stored.size(); ++i) matrix.stored[i] = static_cast<uint8_t>(random());
  for (size_t block = 0; block < matrix.stored.size(); block += static_cast<size_t>(format.block_bytes)) {
    const auto last = static_cast<size_t>(format.block_bytes) - 1;
    if (type == WeightType::kF32) matrix.stored[block + last] = 0x3c;  // about 0.01
    if (type == WeightType::kBF16) matrix.stored[block + last] = 0xbc;
    if (type == WeightType::kF16 || format.block_depth > 1) matrix.stored[block + 1] = 0x24;
    if (type == WeightType::kQ4_1) matrix.stored[block + 3] = 0xa4;
  }
  return matrix;
}

std::vector<float> random_floats(std::mt19937& random, int64_t count) {
  std::vector<float> floats(static_cast<size_t>(count));
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (float& x : floats) x = uniform(random);
  return floats;
}

bool run_case(std::mt19937& random, Isa isa) {
  const int64_t depth = 32 * static_cast<int64_t>(1 + random() % 12);
  std::vector<Matrix> matrices;
  std::vector<PackedMatrix::Part> parts;
  for (size_t i = 0; i < 1 + random() % 3; ++i) {
    const auto rows = static_cast<int64_t>(1 + random() % 150);
    matrices.push_back(random_matrix(random, rows, depth, static_cast<WeightType>(random() % 6)));
  }
  for (const Matrix& m : matrices) {
    const auto row_bytes = static_cast<int64_t>(m.stored.size()) / m.rows;
    parts.push_back({m.type, m.stored.data(), row_bytes, m.rows});
  }
  const int threads = static_cast<int>(1 + random() % 4);
  const PackedMatrix weight(parts, depth, tile_columns(isa), threads);
  const int64_t outputs = weight.out_features();
  const auto tokens = static_cast<int64_t>(random() % 4 == 0 ? 1 + random() % 450 : 1 + random() % 40);
  const std::vector<float> x = random_floats(random, tokens * depth), bias = random_floats(random, outputs);
  std::vector<float> out(static_cast<size_t>(tokens * outputs));
  const std::vector<float> cache(1 << 14);
  ContextLines contexts(threads);
  for (unsigned i = 0; i < 20; ++i) {
    contexts.add(static_cast<int>(i) % threads, kLineFloats * (random() % 512), 1 + random() % 400);
  }
  const ReadAhead ahead{&contexts, cache.data(), cache.data(), 0.25, 1, &weight, false};
  linear({{out.data(), outputs}, {x.data(), depth}, &weight, bias.data(), tokens, ahead}, isa, threads);

  std::vector<int32_t> ids(static_cast<size_t>(outputs));
  for (int64_t f = 0; f < outputs; ++f) ids[static_cast<size_t>(f)] = static_cast<int32_t>(f);
  std::vector<float> rows(static_cast<size_t>(outputs * depth));
  embedding({{rows.data(), depth}, ids.data(), &weight, outputs}, threads);

  for (int64_t t = 0; t < tokens; t += 1 + tokens / 8) {
    for (int64_t f = 0; f < outputs; ++f) {
      double sum = bias[static_cast<size_t>(f)], magnitude = std::abs(sum);
      for (int64_t k = 0; k < depth; ++k) {
        const double term = double{x[static_cast<size_t>(t * depth + k)]} * rows[static_cast<size_t>(f * depth + k)];
        sum += term;
        magnitude += std::abs(term);
      }
      const float got = out[static_cast<size_t>(t * outputs + f)];
      if (std::abs(got - sum) <= 1e-6 * magnitude) continue;  // float32 rounds at 6e-8
      std::printf("row %lld, output %lld of [%lld, %lld] x [%lld, %lld]: %.9g, expected %.9g\n",
                  static_cast<long long>(t), static_cast<long long>(f), static_cast<long long>(tokens),
                  static_cast<long long>(depth), static_cast<long long>(outputs), static_cast<long long>(depth),
                  double{got}, sum);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CASES\n", argv[0]);
    return 2;
  }
  const Isa isa = active_isa();
  const int cases = std::atoi(argv[1]);
  for (int i = 0; i < cases; ++i) {
    std::mt19937 random(static_cast<unsigned>(i));
    if (!run_case(random, isa)) return 1;
  }
  std::printf("%d cases, %s\n", cases, isa_name(isa));
  return 0;
}
