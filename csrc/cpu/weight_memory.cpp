#include "cpu/weight_memory.h"

#include <algorithm>
#include <mutex>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace twinfer::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegionBytes = size_t{64} << 20;  // of addresses: a page takes memory when it is first written
constexpr size_t kCacheLine = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// A region lives until the last matrix in it is gone; what a matrix held is not handed out again.
class Region {
 public:
  explicit Region(size_t bytes) : size_(round_up(bytes, kHugePage)) {
#if defined(MAP_ANONYMOUS)
    mapped_ = size_ + kHugePage;  // room to begin at a multiple of the page
    void* mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(mapping);
    begin_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(memory_), kHugePage));
#if defined(MADV_HUGEPAGE)
    static_cast<void>(madvise(begin_, size_, MADV_HUGEPAGE));  // advice: where it is refused, small pages do
#endif
#else
    begin_ = memory_ = static_cast<uint8_t*>(::operator new[](size_, std::align_val_t{kHugePage}));
#endif
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() {
#if defined(MAP_ANONYMOUS)
    munmap(memory_, mapped_);
#else
    ::operator delete[](memory_, std::align_val_t{kHugePage});
#endif
  }

  // Null if it is full.
  uint8_t* take(size_t bytes) {
    if (size_ - used_ < bytes) return nullptr;
    uint8_t* taken = begin_ + used_;
    used_ += bytes;
    return taken;
  }

 private:
  uint8_t* memory_ = nullptr;
  uint8_t* begin_ = nullptr;
  size_t size_, mapped_ = 0, used_ = 0;
};

}  // namespace

std::shared_ptr<uint8_t> allocate_weights(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Region> open_region;
  const std::lock_guard<std::mutex> lock(mutex);
  bytes = round_up(bytes, kCacheLine);
  std::shared_ptr<Region> region = open_region.lock();
  uint8_t* memory = region ? region->take(bytes) : nullptr;
  if (memory == nullptr) {
    region = std::make_shared<Region>(std::max(bytes, kRegionBytes));
    memory = region->take(bytes);
    open_region = region;
  }
  return {region, memory};
}

}  // namespace twinfer::cpu
