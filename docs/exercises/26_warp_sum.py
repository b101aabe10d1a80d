"""Sum up a warp without shared memory.

The 32 threads of a warp can read each other's registers: __shfl_xor_sync(0xffffffff, x, d) gives the x of the lane
whose number differs in the bits of d. Five such steps, and every lane holds the sum of all. Write the kernel: each
thread has one number, in[thread], and the block is one warp; every thread writes the sum to out[its number]. It is
compiled with the emulator and run on this machine.
"""

HINTS = (
    "for (int d = 16; d > 0; d /= 2) x += ...",
    "All 32 lanes must take part in every shuffle: no `if` around it.",
)

KERNEL = """
__global__ void warp_sum(float* out, const float* in) {
  float x = in[threadIdx.x];
  // five shuffles here
  out[threadIdx.x] = x;
}
"""
