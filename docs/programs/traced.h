// Runs a part of a program under the emulator's trace (csrc/simt/trace.h) and prints what it recorded.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>

namespace traced {

struct Buffer {
  const char* name;
  const void* begin;
  size_t bytes;
};

// Prints, a line each, sums over the grid and the accesses of block 0:
//   count DID SPACE ARRAY WIDTH INSTRUCTIONS LANES SECTORS WAVEFRONTS
//   event DID SPACE ARRAY WIDTH SECTORS WAVEFRONTS LANE:OFFSET...
//   barriers N
//   operation NAME N
void run(std::initializer_list<Buffer> buffers, const std::function<void()>& part);

}  // namespace traced
