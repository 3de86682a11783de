// Device memory with a limit, as a caching allocator would account for it, and pinned host memory.
#include "sim.h"

#if SIM_TORCH_AT_LEAST(9)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {
namespace {

constexpr c10::DeviceIndex kPinned = -1;  // stands in `Block::device` for pinned host memory
constexpr size_t kAlignment = 64;

struct Block {
  size_t bytes;
  c10::DeviceIndex device;
};

// Everything that is accounted for, under one lock.
//
// Invariants: `allocated.current` of a device is the sum of its blocks; allocated <= reserved <= capacity,
// except after the capacity was set below what is in use.
struct Ledger {
  std::mutex mutex;
  std::map<const char*, Block> blocks;
  std::array<Memory, kMaxDevices> devices;
  int64_t pinned = 0;

  // The block `pointer` points into, or nullptr. The caller holds the lock.
  const Block* find(const void* pointer) const {
    auto place = static_cast<const char*>(pointer);
    auto next = blocks.upper_bound(place);
    if (next == blocks.begin())
      return nullptr;
    auto& [start, block] = *std::prev(next);
    return place < start + block.bytes ? &block : nullptr;
  }
};

// Never destroyed: tensors that are still alive when the process ends are freed after static objects.
Ledger& ledger() {
  static auto* one = new Ledger;
  return *one;
}

// Takes `bytes` of `index` into account or refuses. The cache is an ideal one: freed bytes stay reserved
// and can serve any later allocation, since nothing is ever fragmented. The caller holds the lock.
void reserve(c10::DeviceIndex index, int64_t bytes) {
  auto& memory = ledger().devices[index];
  if (memory.allocated.current + bytes > memory.capacity) {
    memory.failures++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim:", int(index), " out of memory. Tried to allocate ", bytes,
        " bytes; the device has ", memory.capacity, ", of which ", memory.allocated.current,
        " are in use by tensors.");
  }
  memory.allocated.add(bytes);
  memory.blocks.add(1);
  if (memory.allocated.current > memory.reserved.current)
    memory.reserved.add(memory.allocated.current - memory.reserved.current);
}

c10::DataPtr take(size_t bytes, c10::DeviceIndex index, c10::Device device, c10::DeleterFnPtr deleter) {
  if (bytes == 0)
    return {nullptr, nullptr, deleter, device};
  auto& all = ledger();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (index == kPinned)
    all.pinned += static_cast<int64_t>(bytes);
  else
    reserve(index, static_cast<int64_t>(bytes));
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, kAlignment, bytes) == 0, "the host is out of memory");
  // Fresh memory holds NaN in every floating-point type: whoever reads it before writing it will notice.
  std::memset(pointer, 0xff, bytes);
  all.blocks[static_cast<char*>(pointer)] = {bytes, index};
  return {pointer, pointer, deleter, device};
}

void give_back(void* pointer) {
  if (pointer == nullptr)
    return;
  auto& all = ledger();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto entry = all.blocks.find(static_cast<char*>(pointer));
  TORCH_INTERNAL_ASSERT(entry != all.blocks.end());
  auto [bytes, device] = entry->second;
  if (device == kPinned) {
    all.pinned -= static_cast<int64_t>(bytes);
  } else {
    all.devices[device].allocated.remove(static_cast<int64_t>(bytes));
    all.devices[device].blocks.remove(1);
  }
  all.blocks.erase(entry);
  std::free(pointer);
}

#if SIM_TORCH_AT_LEAST(9)
using DeviceAllocatorBase = c10::DeviceAllocator;
#else
using DeviceAllocatorBase = c10::Allocator;
#endif

struct SimAllocator final : DeviceAllocatorBase {
  c10::DataPtr allocate(size_t bytes) override {
    initialize();
    auto index = current_device();
    auto data = take(bytes, index, c10::Device(kSim, index), &give_back);
    report(data.get(), static_cast<int64_t>(bytes), index);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static void report(void* pointer, int64_t bytes, c10::DeviceIndex index) {
    if (!c10::memoryProfilingEnabled())
      return;
    auto now = memory(index);
    c10::reportMemoryUsageToProfiler(
        pointer, bytes, now.allocated.current, now.reserved.current, c10::Device(kSim, index));
  }

#if SIM_TORCH_AT_LEAST(9)
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // memory is never reused too early
  void resetAccumulatedStats(c10::DeviceIndex index) override { reset_accumulated(index); }
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    auto now = memory(index);
    return {now.capacity - now.reserved.current, now.capacity};
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto now = memory(index);
    auto fill = [](auto& stats, const Gauge& gauge) {
      auto& all = stats[0];  // the first of all, small_pool, large_pool
      all.current = gauge.current;
      all.peak = gauge.peak;
      all.allocated = gauge.added;
      all.freed = gauge.removed;
    };
    c10::CachingDeviceAllocator::DeviceStats stats;
    fill(stats.allocation, now.blocks);
    fill(stats.active, now.blocks);
    fill(stats.allocated_bytes, now.allocated);
    fill(stats.active_bytes, now.allocated);
    fill(stats.requested_bytes, now.allocated);
    fill(stats.reserved_bytes, now.reserved);
    stats.num_ooms = now.failures;
    stats.num_device_alloc = now.blocks.added;
    stats.num_device_free = now.blocks.removed;
    return stats;
  }
#endif
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return take(bytes, kPinned, c10::Device(c10::kCPU), &give_back); }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

SimAllocator device_memory;
PinnedAllocator pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

void check(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < device_count(), "sim has ", device_count(), " devices, no device ", int(index));
}

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

Memory memory(c10::DeviceIndex index) {
  check(index);
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return ledger().devices[index];
}

void set_capacity(c10::DeviceIndex index, int64_t bytes) {
  check(index);
  std::lock_guard<std::mutex> lock(ledger().mutex);
  auto& device = ledger().devices[index];
  device.capacity = bytes;
  auto reserved = std::max(device.allocated.current, std::min(device.reserved.current, bytes));
  device.reserved.remove(device.reserved.current - reserved);
}

void empty_cache() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  for (auto& device : ledger().devices)
    device.reserved.remove(device.reserved.current - device.allocated.current);
}

void reset_peak(c10::DeviceIndex index) {
  check(index);
  std::lock_guard<std::mutex> lock(ledger().mutex);
  auto& device = ledger().devices[index];
  for (auto gauge : {&device.allocated, &device.reserved, &device.blocks})
    gauge->reset_peak();
}

void reset_accumulated(c10::DeviceIndex index) {
  check(index);
  std::lock_guard<std::mutex> lock(ledger().mutex);
  auto& device = ledger().devices[index];
  for (auto gauge : {&device.allocated, &device.reserved, &device.blocks})
    gauge->reset_accumulated();
  device.failures = 0;
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return ledger().pinned;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  auto block = ledger().find(pointer);
  return block != nullptr && block->device == kPinned;
}

c10::Device device_of(const void* pointer) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  auto block = ledger().find(pointer);
  TORCH_CHECK(block != nullptr && block->device != kPinned, "this is no pointer into memory of a sim device");
  return c10::Device(kSim, block->device);
}

}  // namespace sim
