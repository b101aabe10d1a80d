#include "simt/trace.h"

#include <algorithm>
#include <cstring>

#include "simt/machine.h"

namespace twinfer::simt {

namespace {

constexpr unsigned kWarp = 32;
constexpr uint32_t kNone = 0xffffffffu;
constexpr uint64_t kSectorBytes = 32;
constexpr unsigned kBankBytes = 4, kBanks = 32;

bool is_access(Did did) { return did <= Did::kAtomic; }
bool ends_epoch(Did did) { return did == Did::kBarrier || did == Did::kWarpOperation; }

template <class F>
void for_each_lane(unsigned mask, F visit) {
  for (; mask != 0; mask &= mask - 1) visit(static_cast<unsigned>(__builtin_ctz(mask)));
}

// Shared memory answers 32 words of 4 bytes at once, one a bank; lanes that want the same word share it. Wider accesses
// are served half a warp (8 bytes) or a quarter (16 bytes) at a time.
unsigned wavefronts_of(const uint64_t* addresses, unsigned mask, unsigned width, unsigned& fewest) {
  const unsigned lanes_at_once = width > 8 ? 8 : width > 4 ? 16 : 32;
  unsigned total = 0;
  fewest = 0;
  for (unsigned first = 0; first < kWarp; first += lanes_at_once) {
    const unsigned group = mask & ((lanes_at_once == 32 ? ~0u : (1u << lanes_at_once) - 1) << first);
    if (group == 0) continue;
    uint64_t words[kWarp];        // 8 lanes of 16 bytes, 16 of 8 or 32 of 4
    unsigned number = 0, in_bank[kBanks] = {}, most = 0;
    for_each_lane(group, [&](unsigned l) {
      for (uint64_t word = addresses[l] / kBankBytes; word * kBankBytes < addresses[l] + width; ++word) {
        words[number++] = word;
      }
    });
    std::sort(words, words + number);
    number = static_cast<unsigned>(std::unique(words, words + number) - words);
    for (unsigned w = 0; w < number; ++w) most = std::max(most, ++in_bank[words[w] % kBanks]);
    total += most;
    ++fewest;
  }
  return total;
}

// Sectors that hold the lanes' bytes, and the fewest that could hold as many distinct ones.
unsigned sectors_of(const uint64_t* addresses, unsigned mask, unsigned width, unsigned& fewest) {
  uint64_t sectors[2 * kWarp], starts[kWarp];
  unsigned touched = 0, number = 0;
  for_each_lane(mask, [&](unsigned l) {
    starts[number++] = addresses[l];
    for (uint64_t s = addresses[l] / kSectorBytes; s * kSectorBytes < addresses[l] + width; ++s) sectors[touched++] = s;
  });
  std::sort(sectors, sectors + touched);
  std::sort(starts, starts + number);
  uint64_t distinct = 0, end = 0;
  for (unsigned i = 0; i < number; ++i) {
    distinct += starts[i] + width - std::max(starts[i], std::min(end, starts[i] + width));
    end = std::max(end, starts[i] + width);
  }
  fewest = static_cast<unsigned>((distinct + kSectorBytes - 1) / kSectorBytes);
  return static_cast<unsigned>(std::unique(sectors, sectors + touched) - sectors);
}

}  // namespace

Trace*& active_trace() {
  thread_local Trace* trace = nullptr;
  return trace;
}

Trace::Trace(std::vector<Named> buffers, uint3 block) : buffers_(std::move(buffers)), kept_block_(block) {}

void Trace::begin_launch(const Shape& shape) {
  const auto index = [](const dim3& d) { return uint3{d.x, d.y, d.z}; };
  launches_.push_back({index(shape.grid), index(shape.block), shape.dynamic_shared, shape.dynamic_shared, 0, 0, 0, {}});
  logs_.resize(size_t{shape.block.x} * shape.block.y * shape.block.z);
}

void Trace::begin_block(uint3 index) {
  keeping_ = index.x == kept_block_.x && index.y == kept_block_.y && index.z == kept_block_.z;
  live_shared_.clear();
  for (Log& log : logs_) log = {};
}

void Trace::end_block() {
  for (unsigned warp = 0; warp * kWarp < logs_.size(); ++warp) end_warp(warp);
  TracedLaunch& launch = launches_.back();
  size_t shared = 0;
  bool dynamic_seen = false;
  for (size_t array : live_shared_) {
    shared += shared_arrays_[array].bytes;
    dynamic_seen = dynamic_seen || shared_arrays_[array].bytes == launch.dynamic_shared;
  }
  launch.shared_bytes = std::max(launch.shared_bytes, shared + (dynamic_seen ? 0 : launch.dynamic_shared));
}

// An array has one entry for all blocks; only its address is the block's own.
void Trace::shared_array(const char* name, void* data, size_t bytes, ValueType type) {
  for (size_t array : live_shared_) {
    if (shared_arrays_[array].begin == reinterpret_cast<uintptr_t>(data)) return;
  }
  const auto known = std::find_if(shared_arrays_.begin(), shared_arrays_.end(), [&](const Named& array) {
    return array.name == name && array.bytes == bytes && array.type == type;
  });
  const auto index = static_cast<size_t>(known - shared_arrays_.begin());
  if (known == shared_arrays_.end()) shared_arrays_.push_back({name, 0, bytes, type});
  shared_arrays_[index].begin = reinterpret_cast<uintptr_t>(data);
  live_shared_.push_back(index);
}

void Trace::name_memory(const char* name, const void* data, size_t bytes, ValueType type) {
  buffers_.push_back({name, reinterpret_cast<uintptr_t>(data), bytes, type});
}

uint32_t Trace::site_of(const void* code) {
  const auto [found, fresh] = site_of_code_.emplace(code, static_cast<uint32_t>(sites_.size()));
  if (fresh) sites_.push_back({code, "", 0, ""});
  return found->second;
}

uint32_t Trace::site_of(const Site& site, const char* name) {
  const auto [found, fresh] = site_of_line_.emplace(std::make_tuple(std::string(site.file), site.line, std::string(name)),
                                                    static_cast<uint32_t>(sites_.size()));
  if (fresh) sites_.push_back({nullptr, site.file, site.line, name});
  return found->second;
}

bool Trace::find(uint64_t address, Space& space, int& array) const {
  const auto holds = [address](const Named& named) { return address - named.begin < named.bytes; };
  for (size_t each : live_shared_) {
    if (!holds(shared_arrays_[each])) continue;
    space = Space::kShared;
    array = static_cast<int>(each);
    return true;
  }
  for (size_t each = 0; each < buffers_.size(); ++each) {
    if (!holds(buffers_[each])) continue;
    space = Space::kGlobal;
    array = static_cast<int>(each);
    return true;
  }
  return false;
}

void Trace::settle(unsigned thread) {
  Log& log = logs_[thread];
  if (!log.pending) return;
  Entry& entry = log.entries.back();
  std::memcpy(entry.bits, reinterpret_cast<const void*>(entry.address), entry.width);
  log.pending = false;
}

void Trace::add(unsigned thread, Entry entry) {
  settle(thread);
  Log& log = logs_[thread];
  log.entries.push_back(entry);
  if (!keeping_ || !is_access(entry.did)) return;
  Space space;
  int array;
  if (!find(entry.address, space, array) || space != Space::kShared) return;
  if (entry.did == Did::kRead) {
    std::memcpy(log.entries.back().bits, reinterpret_cast<const void*>(entry.address), entry.width);
  } else {
    log.pending = true;
  }
}

// Whole structs copied at once are more than one access of at most 16 bytes.
void Trace::access(unsigned thread, const void* code, const void* address, size_t bytes, Did did) {
  const uint32_t site = site_of(code);
  for (size_t done = 0; done < bytes; done += 16) {
    const auto width = static_cast<uint8_t>(std::min<size_t>(16, bytes - done));
    add(thread, {site, did, width, ValueType::kNone, reinterpret_cast<uint64_t>(address) + done, {}});
  }
}

void Trace::access(unsigned thread, const Site& site, const char* name, const void* address, size_t bytes, Did did) {
  add(thread, {site_of(site, name), did, static_cast<uint8_t>(bytes), ValueType::kNone,
               reinterpret_cast<uint64_t>(address), {}});
}

void Trace::barrier(unsigned thread, const Site& site) {
  if (thread == 0) ++launches_.back().barriers;
  add(thread, {site_of(site, "__syncthreads"), Did::kBarrier, 0, ValueType::kNone, 0, {}});
}

void Trace::warp_operation(unsigned thread, const char* name, const Lane& lane, const Site& site) {
  Entry entry{site_of(site, name), Did::kWarpOperation, 0, lane.type, 0, {}};
  if (lane.type != ValueType::kNone) {
    entry.width = 8;
    std::memcpy(entry.bits, lane.in, sizeof(uint64_t));
  }
  add(thread, entry);
}

void Trace::watch(unsigned thread, const char* name, uint64_t bits, ValueType type, const Site& site) {
  if (keeping_) add(thread, {site_of(site, name), Did::kWatch, 8, type, 0, {bits, 0}});
}

// Brings the lanes of a warp together, one epoch after the other: what lies between two barriers or warp operations.
void Trace::end_warp(unsigned warp) {
  const size_t first = size_t{warp} * kWarp, lanes = std::min<size_t>(kWarp, logs_.size() - first);
  std::vector<const Entry*> at(lanes), end(lanes);
  for (size_t l = 0; l < lanes; ++l) {
    at[l] = logs_[first + l].entries.data();
    end[l] = at[l] + logs_[first + l].entries.size();
  }
  for (int phase = 0;;) {
    std::vector<std::pair<const Entry*, const Entry*>> epoch(lanes);
    bool any = false;
    for (size_t l = 0; l < lanes; ++l) {
      const Entry* begin = at[l];
      while (at[l] != end[l]) {
        any = true;
        if (ends_epoch((at[l]++)->did)) break;
      }
      epoch[l] = {begin, at[l]};
    }
    if (!any) return;
    put_together(epoch);
    bool barrier = false;
    for (uint32_t row = rows_[0].next; row != kNone; row = rows_[row].next) {
      finish(rows_[row], warp, phase);
      const Entry& entry = *rows_[row].lanes[__builtin_ctz(rows_[row].mask)];
      barrier = barrier || entry.did == Did::kBarrier;
    }
    phase += barrier;
  }
}

// Row 0 is the head of the list. A row that the lanes before did not have comes after this lane's previous one.
void Trace::put_together(const std::vector<std::pair<const Entry*, const Entry*>>& epoch) {
  rows_.assign(1, Row{kNone, kNone, 0, {}});
  row_of_.clear();
  std::vector<uint32_t> times(sites_.size());
  for (unsigned lane = 0; lane < epoch.size(); ++lane) {
    std::fill(times.begin(), times.end(), 0);
    uint32_t previous = 0;
    for (const Entry* entry = epoch[lane].first; entry != epoch[lane].second; ++entry) {
      const uint64_t key = uint64_t{entry->site} << 32 | times[entry->site]++;
      const auto [found, fresh] = row_of_.emplace(key, static_cast<uint32_t>(rows_.size()));
      const uint32_t row = found->second;
      if (fresh) {
        rows_.push_back(Row{entry->site, rows_[previous].next, 0, {}});
        rows_[previous].next = row;
      }
      rows_[row].mask |= 1u << lane;
      rows_[row].lanes[lane] = entry;
      previous = row;
    }
  }
}

void Trace::finish(const Row& row, unsigned warp, int phase) {
  const Entry& entry = *row.lanes[__builtin_ctz(row.mask)];
  WarpEvent event{static_cast<int>(launches_.size()) - 1, phase, static_cast<int>(warp), entry.did, row.site,
                  entry.width, Space::kNone, 0, 0, 0, {}, entry.type};
  if (is_access(entry.did)) {
    count_access(row, event);
    if (event.space == Space::kNone) return;
  } else {
    event.mask = row.mask;
  }
  if (entry.did == Did::kWarpOperation) {
    ++launches_.back().warp_operations;
    ++launches_.back().operations[sites_[row.site].name];
  }
  if (keeping_) keep(row, event);
}

// Lanes of one instruction may go to different arrays: each is counted by itself.
void Trace::count_access(const Row& row, WarpEvent& event) {
  Space space[kWarp];
  int array[kWarp];
  unsigned left = 0;
  for_each_lane(row.mask, [&](unsigned l) {
    if (find(row.lanes[l]->address, space[l], array[l])) {
      left |= 1u << l;
    } else {
      ++launches_.back().unnamed;
    }
  });
  event.mask = left;
  while (left != 0) {
    const unsigned first = static_cast<unsigned>(__builtin_ctz(left));
    unsigned together = 0;
    for_each_lane(left, [&](unsigned l) {
      if (space[l] == space[first] && array[l] == array[first]) together |= 1u << l;
    });
    count_array(row, together, space[first], array[first], event);
    left &= ~together;
  }
}

void Trace::count_array(const Row& row, unsigned lanes, Space space, int array, WarpEvent& event) {
  uint64_t addresses[kWarp];
  unsigned width = 0;
  for_each_lane(lanes, [&](unsigned l) {
    addresses[l] = row.lanes[l]->address;
    width = std::max<unsigned>(width, row.lanes[l]->width);
  });
  AccessCounts& counts =
      counts_[{static_cast<int>(launches_.size()) - 1, row.site, event.did, space, array, width}];
  const auto number = static_cast<unsigned>(__builtin_popcount(lanes));
  ++counts.instructions;
  counts.lanes += number;
  counts.bytes += uint64_t{number} * width;
  event.space = space;
  unsigned fewest;
  if (space == Space::kGlobal) {
    const unsigned sectors = sectors_of(addresses, lanes, width, fewest);
    counts.sectors += sectors;
    counts.fewest_sectors += fewest;
    event.sectors += sectors;
  } else {
    const unsigned wavefronts = wavefronts_of(addresses, lanes, width, fewest);
    counts.wavefronts += wavefronts;
    counts.fewest_wavefronts += fewest;
    event.wavefronts += wavefronts;
  }
}

void Trace::keep(const Row& row, WarpEvent& event) {
  for_each_lane(event.mask, [&](unsigned l) {
    const Entry& entry = *row.lanes[l];
    WarpEvent::Lane lane{-1, 0, {}};
    Space space = Space::kNone;
    if (is_access(entry.did) && find(entry.address, space, lane.array)) {
      const Named& named = space == Space::kShared ? shared_arrays_[lane.array] : buffers_[lane.array];
      lane.offset = entry.address - named.begin;
      if (space == Space::kShared) event.type = named.type;
    }
    if (space == Space::kShared || (!is_access(entry.did) && entry.type != ValueType::kNone)) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(entry.bits);
      lane.value.assign(bytes, bytes + entry.width);
    }
    event.lanes.push_back(std::move(lane));
  });
  events_.push_back(std::move(event));
}

}  // namespace twinfer::simt
