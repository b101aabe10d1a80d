"""A butterfly: after step d every lane holds the sum of the lanes that differ from it in the bits of d and above."""

KERNEL = """
__global__ void warp_sum(float* out, const float* in) {
  float x = in[threadIdx.x];
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  out[threadIdx.x] = x;
}
"""
