// Current device, streams, events, generators, and the hooks through which torch asks for them.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#if !SIM_TORCH_AT_LEAST(9)
#include <ATen/core/GeneratorForPrivateuseone.h>
#endif

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

namespace sim {
namespace {

std::atomic<int> count{2};
thread_local c10::DeviceIndex current = 0;

// ----------------------------------------------------------------------------------------------- forks

std::atomic<bool> used{false}, forked{false};

// ---------------------------------------------------------------------------------- streams and events

std::atomic<c10::StreamId> next_stream{1};  // 0 is the default stream
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};

struct Event {
  std::chrono::steady_clock::time_point recorded;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count); }

  c10::Device getDevice() const override { return {kSim, current}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  static c10::Stream stream(c10::StreamId id, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), id);
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream(current_streams[with_index(device).index()], device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(0, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(next_stream++, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    auto before = getStream(to.device());
    current_streams[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new Event;
    static_cast<Event*>(*event)->recorded = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded before their distance is known");
    auto distance = static_cast<Event*>(to)->recorded - static_cast<Event*>(from)->recorded;
    return std::chrono::duration<double, std::milli>(distance).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ------------------------------------------------------------------------------------------ generators

// A generator of this device. A CPU generator makes its numbers, so that the same seed gives the same
// numbers on the CPU, and its state is the CPU generator's.
struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  static c10::DeviceType device_type() { return kSim; }

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override { return new SimGenerator(device().index(), host.clone()); }

  at::Generator host;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<SimGenerator>(index < 0 ? current : index);
}
#if !SIM_TORCH_AT_LEAST(9)
REGISTER_GENERATOR_PRIVATEUSE1(new_generator)  // these versions do not ask the hooks
#endif

// ----------------------------------------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { initialize(); }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return used; }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }

  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Device getDeviceFromPtr(void* pointer) const override { return device_of(pointer); }

  // Storage.resize_: the new memory keeps what fits of the old.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = device_allocator()->allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes()))
      std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

Hooks hooks;

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, [] { forked = forked || used; });
  return true;
}();

}  // namespace

int device_count() { return count; }

// torch starts one backward thread per device at the first backward pass: from then on the number may only
// go down.
void set_device_count(int wanted) {
  TORCH_CHECK(0 <= wanted && wanted <= kMaxDevices, "sim can have 0 to ", kMaxDevices, " devices, not ", wanted);
  count = wanted;
}

c10::DeviceIndex current_device() { return current; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      0 <= index && index < count, "invalid device index ", int(index), ": sim has ", count.load(), " devices");
  current = index;
}

c10::Device with_index(c10::Device device) { return device.has_index() ? device : c10::Device(kSim, current); }

bool initialized() { return used; }
bool in_bad_fork() { return forked; }

void initialize() {
  TORCH_CHECK(
      !forked,
      "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the "
      "'spawn' start method");
  used = true;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto& all = *[] {
    auto* made = new std::array<at::Generator, kMaxDevices>;
    for (int i = 0; i < kMaxDevices; i++)
      (*made)[i] = at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(i));
    return made;
  }();
  auto wanted = index < 0 ? current : index;
  TORCH_CHECK(wanted < count, "sim has ", count.load(), " devices, no device ", int(wanted));
  return all[wanted];
}

at::Generator host_generator(const at::Generator& generator) {
  return at::check_generator<SimGenerator>(generator)->host;
}

}  // namespace sim
