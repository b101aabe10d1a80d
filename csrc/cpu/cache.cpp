#include <cstring>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace twinfer::cpu {

void reshape_and_cache(const CacheWrite& args, int threads) {
  const size_t bytes = static_cast<size_t>(args.row_size) * sizeof(float);
  parallel_rows(args.num_tokens, 2 * args.row_size, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = args.slot_mapping[t] * args.row_size;
      std::memcpy(args.k_cache + row, args.key[t], bytes);
      std::memcpy(args.v_cache + row, args.value[t], bytes);
    }
  });
}

void swap_blocks(const SwapBlocks& args, int threads) {
  const size_t bytes = static_cast<size_t>(args.block_floats) * sizeof(float);
  parallel_rows(args.num_pairs, args.block_floats, threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t from = args.block_mapping[2 * p], to = args.block_mapping[2 * p + 1];
      if (args.source + from * args.block_floats == args.target + to * args.block_floats) continue;
      std::memcpy(args.target + to * args.block_floats, args.source + from * args.block_floats, bytes);
    }
  });
}

}  // namespace twinfer::cpu
