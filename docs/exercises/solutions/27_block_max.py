"""Two barriers: all numbers are written before any is read, and each level is done before the next begins."""

KERNEL = """
__global__ void block_max(float* out, const float* in) {
  SHARED_ARRAY(float, scratch, [64]);
  const int t = threadIdx.x;
  scratch[t] = in[blockIdx.x * 64 + t];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (t < half) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = scratch[0];
}
"""
