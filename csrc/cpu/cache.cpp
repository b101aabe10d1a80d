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

}  // namespace twinfer::cpu
