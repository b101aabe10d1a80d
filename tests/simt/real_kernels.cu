// Every rung of every operation of csrc/kernels on small ragged shapes in all three types, for the sanitizers to watch.
// `real_kernels OPERATION RUNG SEED` prints "ok" when the values agree with those of the first rung; values against
// NumPy are the business of tests/kernels. `real_kernels --list` prints "OPERATION RUNGS" a line.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "cuda/launchers.h"
#include "kernels/numeric.cuh"

namespace {

using namespace twinfer::device;

// Rounded to T; the same numbers for the same salt.
template <class T>
std::vector<T> numbers(size_t count, unsigned salt) {
  std::vector<T> x(count);
  for (size_t i = 0; i < count; ++i) {
    const unsigned mixed = (static_cast<unsigned>(i) + 1) * 2654435761u + salt * 40503u;
    x[i] = from_float<T>(static_cast<float>(mixed >> 16 & 1023) / 256.0f - 2.0f);
  }
  return x;
}

template <class T>
void append(std::vector<float>& all, const std::vector<T>& x) {
  for (const T& each : x) all.push_back(to_float(each));
}

using Values = std::vector<float>;

// Shapes are small because ThreadSanitizer takes a millisecond for each new CUDA thread, and large enough for several
// blocks, more than one round of a block's threads, and a ragged end. Vectorised rungs want whole vectors in a row.
constexpr int kRows = 2;

std::vector<int> row_sizes(int rung, int vectorised, int longest) {
  return rung == vectorised ? std::vector<int>{longest} : std::vector<int>{longest, 37};
}

template <class T>
Values run_rms_norm(int rung) {
  Values all;
  for (int size : row_sizes(rung, 4, 2056)) {
    const std::vector<T> x = numbers<T>(kRows * size, 1), weight = numbers<T>(size, 2);
    std::vector<T> out(kRows * size), residual = numbers<T>(kRows * size, 3);
    rms_norm<T>({out.data(), x.data(), nullptr, weight.data(), size, size, 0, kRows, size, 1e-5f}, rung, nullptr);
    append(all, out);
    rms_norm<T>({out.data(), x.data(), residual.data(), weight.data(), size, size, size, kRows, size, 1e-5f}, rung,
                nullptr);
    append(all, out);
    append(all, residual);
  }
  return all;
}

template <class T>
Values run_layer_norm(int rung) {
  Values all;
  for (int size : {600, 37}) {
    const std::vector<T> x = numbers<T>(kRows * size, 1), weight = numbers<T>(size, 2), bias = numbers<T>(size, 3);
    std::vector<T> out(kRows * size);
    layer_norm<T>({out.data(), x.data(), weight.data(), bias.data(), size, size, kRows, size, 1e-5f}, rung, nullptr);
    append(all, out);
  }
  return all;
}

template <class T>
Values run_cache_write(int rung) {
  Values all;
  for (int size : row_sizes(rung, 2, 200)) {
    const std::vector<T> key = numbers<T>(kRows * size, 1), value = numbers<T>(kRows * size, 2);
    std::vector<T> k(8 * size), v(8 * size);
    const std::vector<int64_t> slots{6, 3};
    cache_write<T>({key.data(), value.data(), k.data(), v.data(), slots.data(), size, size, kRows, size}, rung,
                   nullptr);
    for (int64_t slot : slots) {
      append(all, std::vector<T>(k.begin() + slot * size, k.begin() + (slot + 1) * size));
      append(all, std::vector<T>(v.begin() + slot * size, v.begin() + (slot + 1) * size));
    }
  }
  return all;
}

template <class T>
Values run_copy_blocks(int rung) {
  Values all;
  for (int size : row_sizes(rung, 2, 200)) {
    std::vector<T> k = numbers<T>(4 * size, 1), v = numbers<T>(4 * size, 2);
    const std::vector<int64_t> pairs{0, 3, 0, 1};
    copy_blocks<T>({k.data(), v.data(), pairs.data(), 2, size}, rung, nullptr);
    append(all, k);
    append(all, v);
  }
  return all;
}

template <class T>
void attend(Values& all, int rung, int heads, int kv_heads, int head_dim, int window, int longest) {
  constexpr int kBlockSize = 16, kSeqs = 2, kMaxBlocks = 18;
  const std::vector<int32_t> lens{longest, 3};
  const int row = heads * head_dim, splits = num_splits(longest);
  std::vector<int32_t> tables(kSeqs * kMaxBlocks, -1);
  int32_t next = 0;
  for (int s = 0; s < kSeqs; ++s) {
    for (int i = 0; i * kBlockSize < lens[s]; ++i) tables[s * kMaxBlocks + i] = next++;
  }
  const size_t cache_size = static_cast<size_t>(next) * kBlockSize * kv_heads * head_dim;
  const std::vector<T> query = numbers<T>(kSeqs * row, 1), k = numbers<T>(cache_size, 2), v = numbers<T>(cache_size, 3);
  std::vector<T> out(kSeqs * row);
  std::vector<float> means(kSeqs * row * splits), largest(kSeqs * heads * splits), sums(largest.size());
  paged_attention<T>({out.data(), query.data(), k.data(), v.data(), tables.data(), lens.data(), row, row, kMaxBlocks,
                      kSeqs, heads, kv_heads, head_dim, kBlockSize, window, 0.125f, means.data(), largest.data(),
                      sums.data(),
                      splits},
                     longest, rung, nullptr);
  append(all, out);
}

// The rung on the tensor cores, the last, leaves out the head dim that it does not take, and float32.
template <class T>
Values run_paged_attention(int rung) {
  Values all;
  if (rung == 6 && sizeof(T) > 2) return run_paged_attention<T>(1);
  attend<T>(all, rung, 3, 1, 64, 0, 270);
  attend<T>(all, rung, 2, 2, 128, 20, 40);
  if (rung < 6) attend<T>(all, rung, 2, 1, 33, 0, 5);
  return all;
}

// A chunk behind cached tokens, a decoded token, a sequence without rows.
template <class T>
void attend_chunks(Values& all, int rung, int heads, int kv_heads, int head_dim, int window) {
  constexpr int kBlockSize = 16, kSeqs = 3, kMaxBlocks = 3;
  const std::vector<int32_t> lens{37, 33, 5}, starts{0, 17, 18, 18};
  const int row = heads * head_dim, tokens = starts[kSeqs], longest = 17;
  std::vector<int32_t> tables(kSeqs * kMaxBlocks, -1);
  int32_t next = 0;
  for (int s = 0; s < kSeqs; ++s) {
    for (int i = 0; i * kBlockSize < lens[s]; ++i) tables[s * kMaxBlocks + i] = next++;
  }
  const size_t cache_size = static_cast<size_t>(next) * kBlockSize * kv_heads * head_dim;
  const std::vector<T> query = numbers<T>(tokens * row, 1), k = numbers<T>(cache_size, 2), v = numbers<T>(cache_size, 3);
  std::vector<T> out(tokens * row);
  prefill_attention<T>({out.data(), query.data(), k.data(), v.data(), tables.data(), starts.data(), lens.data(), row, row,
                        kMaxBlocks, tokens, kSeqs, heads, kv_heads, head_dim, kBlockSize, window, 0.125f},
                       longest, rung, nullptr);
  append(all, out);
}

template <class T>
Values run_prefill_attention(int rung) {
  Values all;
  if (rung == 3 && sizeof(T) > 2) return run_prefill_attention<T>(1);
  attend_chunks<T>(all, rung, 2, 1, 64, 0);
  attend_chunks<T>(all, rung, 1, 1, 128, 20);
  if (rung < 3) attend_chunks<T>(all, rung, 1, 1, 33, 0);
  return all;
}

template <class T>
Values run_silu_mul(int rung) {
  Values all;
  for (int size : row_sizes(rung, 2, 200)) {
    const std::vector<T> gate_up = numbers<T>(kRows * 2 * size, 1);
    std::vector<T> out(kRows * size);
    silu_mul<T>({out.data(), gate_up.data(), size, 2 * size, kRows, size}, rung, nullptr);
    append(all, out);
  }
  return all;
}

template <class T>
Values run_gelu(int rung) {
  Values all;
  for (int size : row_sizes(rung, 2, 200)) {
    const std::vector<T> x = numbers<T>(kRows * size, 1);
    std::vector<T> out(kRows * size);
    gelu<T>({out.data(), x.data(), size, size, kRows, size}, rung, nullptr);
    append(all, out);
  }
  return all;
}

template <class T>
Values run_rotary(int rung) {
  constexpr int kHeadDim = 34, kHeads = 3, kKvHeads = 1;
  std::vector<T> query = numbers<T>(2 * kHeads * kHeadDim, 1), key = numbers<T>(2 * kKvHeads * kHeadDim, 2);
  const std::vector<float> angles = numbers<float>(5 * kHeadDim, 3);
  const std::vector<int64_t> positions{4, 1};
  rotary<T>({positions.data(), query.data(), key.data(), angles.data(), kHeads * kHeadDim, kKvHeads * kHeadDim, 2,
             kHeads, kKvHeads, kHeadDim},
            rung, nullptr);
  Values all;
  append(all, query);
  append(all, key);
  return all;
}

template <class T>
Values run_softmax(int rung) {
  constexpr int kSize = 700;
  const std::vector<T> x = numbers<T>(kRows * kSize, 1);
  std::vector<T> out(kRows * kSize);
  softmax<T>({out.data(), x.data(), kSize, kSize, kRows, kSize}, rung, nullptr);
  Values all;
  append(all, out);
  return all;
}

template <class T>
Values run_argmax(int rung) {
  constexpr int kSize = 700;
  const std::vector<T> x = numbers<T>(kRows * kSize, 1);
  std::vector<int64_t> out(kRows);
  argmax<T>({out.data(), x.data(), kSize, kRows, kSize}, rung, nullptr);
  return Values(out.begin(), out.end());
}

template <class T>
Values run_swap_blocks(int rung) {
  Values all;
  for (int size : row_sizes(rung, 2, 200)) {
    const std::vector<T> source = numbers<T>(3 * size, 1);
    std::vector<T> target = numbers<T>(4 * size, 2);
    const std::vector<int64_t> pairs{2, 1, 2, 3};
    swap_blocks<T>({source.data(), target.data(), pairs.data(), 2, size}, rung, nullptr);
    append(all, target);
  }
  return all;
}

// One type of its own: the words' lower and upper halves, exact as float32.
template <class T>
Values run_philox(int rung) {
  constexpr int kSize = 517, kStride = 520;
  const std::vector<int64_t> seeds{5, -3}, positions{0, 77};
  alignas(16) static int32_t out[kRows * kStride];
  philox({out, seeds.data(), positions.data(), kStride, kRows, kSize}, rung, nullptr);
  Values all;
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kSize; ++i) {
      const auto word = static_cast<uint32_t>(out[row * kStride + i]);
      all.push_back(static_cast<float>(word & 0xffff));
      all.push_back(static_cast<float>(word >> 16));
    }
  }
  return all;
}

// float32 alone. One row has every kind of list, the other none but penalties.
template <class T>
Values run_penalties(int rung) {
  constexpr int kSize = 600;
  std::vector<float> logits = numbers<float>(3 * kSize, 1);
  const std::vector<int64_t> rows{0, 2}, allowed{0, 300, 300}, masked{0, 2, 2}, biased{0, 2, 2}, seen{0, 300, 304};
  std::vector<int32_t> allowed_ids, seen_ids, counts;
  for (int i = 0; i < 300; ++i) allowed_ids.push_back(2 * i), seen_ids.push_back(599 - 2 * i);
  for (int i : {7, 1, 599, 300}) seen_ids.push_back(i);
  for (size_t i = 0; i < seen_ids.size(); ++i) counts.push_back(static_cast<int32_t>(i % 3));
  const std::vector<int32_t> masked_ids{4, 8}, biased_ids{4, 10};
  const std::vector<double> biases{1.5, -2.5}, repetition{1.3, 0.7}, presence{0.4, -0.1}, frequency{0.2, 0.3};
  process_logits({logits.data(), kSize, rows.data(), {allowed.data(), allowed_ids.data()},
                  {masked.data(), masked_ids.data()}, {biased.data(), biased_ids.data()}, biases.data(),
                  {seen.data(), seen_ids.data()}, counts.data(), repetition.data(), presence.data(), frequency.data(),
                  2, kSize},
                 rung, nullptr);
  for (float& x : logits) x = x == -INFINITY ? -1e30f : x;
  return logits;
}

template <class T>
Values run_topk_topp_sample(int rung) {
  constexpr int kSize = 600, kDraws = 4;
  const std::vector<T> logits = numbers<T>(kDraws * kSize, 1);
  const std::vector<double> temperature{0.0, 1.0, 0.8, 1.3}, top_p{1.0, 1.0, 0.6, 0.95}, min_p{0.0, 0.0, 0.0, 0.05};
  const std::vector<int32_t> top_k{0, 0, 0, 50};
  const std::vector<int64_t> seeds{1, 2, 3, 4}, positions{0, 1, 2, 3};
  std::vector<int64_t> out(kDraws);
  sample<T>({logits.data(), kSize, temperature.data(), top_k.data(), top_p.data(), min_p.data(), seeds.data(),
             positions.data(), out.data(), kDraws, kSize},
            rung, nullptr);
  return Values(out.begin(), out.end());
}

struct Operation {
  Values (*float32)(int);
  Values (*float16)(int);
  Values (*bfloat16)(int);
};

#define OPERATION(name) {#name, {run_##name<float>, run_##name<__half>, run_##name<__nv_bfloat16>}}
const std::map<std::string, Operation> kOperations = {
    OPERATION(rms_norm), OPERATION(layer_norm), OPERATION(cache_write), OPERATION(copy_blocks),
    OPERATION(silu_mul), OPERATION(gelu),       OPERATION(rotary),      OPERATION(paged_attention),
    OPERATION(softmax),  OPERATION(argmax),     OPERATION(prefill_attention),
    OPERATION(swap_blocks), OPERATION(philox),  OPERATION(penalties),
    OPERATION(topk_topp_sample),
};

// A vectorised rung leaves the odd row out, which comes last.
bool agree(const Values& first, const Values& other, float tolerance) {
  if (other.empty() || other.size() > first.size()) return false;
  for (size_t i = 0; i < other.size(); ++i) {
    if (!(std::fabs(first[i] - other[i]) <= tolerance * std::fmax(1.0f, std::fabs(first[i])))) {
      std::printf("wrong: number %zu is %g, the first rung has %g\n", i, other[i], first[i]);
      return false;
    }
  }
  return true;
}

int run(const Operation& operation, int rung, uint64_t seed) {
  const struct {
    Values (*call)(int);
    float tolerance;
  } types[] = {{operation.float32, 1e-5f}, {operation.float16, 4e-3f}, {operation.bfloat16, 3e-2f}};
  for (const auto& type : types) {
    twinfer::simt::options().seed = 0;
    const Values first = type.call(1);
    twinfer::simt::options().seed = seed;
    if (!agree(first, type.call(rung), type.tolerance)) return 2;
  }
  std::printf("ok\n");
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count == 2) {
    for (const Ladder& ladder : ladders()) std::printf("%s %zu\n", ladder.operation.c_str(), ladder.rungs.size());
    return 0;
  }
  if (count != 4 || kOperations.count(words[1]) == 0) return 64;
  try {
    return run(kOperations.at(words[1]), std::atoi(words[2]), std::strtoull(words[3], nullptr, 10));
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 3;
  }
}
