// What NVIDIA's own occupancy calculator says: lines of "sm threads registers shared_bytes" in, blocks a line out.
#include <cuda_occupancy.h>

#include <climits>
#include <cstdio>

int main() {
  int sm, threads, registers, shared;
  while (std::scanf("%d %d %d %d", &sm, &threads, &registers, &shared) == 4) {
    const size_t kib = 1024, of_multiprocessor = (sm == 80 ? 164 : 228) * kib;
    cudaOccDeviceProp device{};
    device.computeMajor = sm / 10;
    device.computeMinor = sm % 10;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = 2048;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * kib;
    device.sharedMemPerMultiprocessor = of_multiprocessor;
    device.sharedMemPerBlockOptin = of_multiprocessor - kib;
    device.reservedSharedMemPerBlock = kib;
    device.numSms = 1;
    cudaOccFuncAttributes kernel{};
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state{};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result{};
    const cudaOccError status =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    std::printf("%d\n", status == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -static_cast<int>(status));
  }
}
