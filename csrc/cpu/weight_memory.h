// Memory for weights, which every step reads from end to end.
//
// The processor looks up an address for every page that it enters, and in a virtual machine each look-up walks two page
// tables. 2 MB pages make it 512 times rarer: reading 512 MB on two cores of a Zen 5 server went from 26 to 43 GB/s.
// A matrix is smaller than such a page, so matrices share regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace twinfer::cpu {

// `bytes` at a multiple of 64. Nobody writes behind them. Throws std::bad_alloc.
std::shared_ptr<uint8_t> allocate_weights(size_t bytes);

}  // namespace twinfer::cpu
