"""Find the missing barriers.

This kernel takes the maximum of 64 numbers a block by a tree in shared memory. It gives the right answer when the
threads run in the order of their numbers, and a wrong one in others. Mend it. (SHARED_ARRAY(float, a, [64]) is this
project's spelling of __shared__ float a[64].)
"""

HINTS = (
    "Who reads scratch[t + half], and when was it written? By another thread.",
    "A barrier belongs behind the first write, and behind every level of the tree.",
    "Every thread of the block must reach every __syncthreads: keep it out of the `if`.",
)

KERNEL = """
__global__ void block_max(float* out, const float* in) {
  SHARED_ARRAY(float, scratch, [64]);
  const int t = threadIdx.x;
  scratch[t] = in[blockIdx.x * 64 + t];
  for (int half = 32; half > 0; half /= 2) {
    if (t < half) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
  }
  if (t == 0) out[blockIdx.x] = scratch[0];
}
"""
