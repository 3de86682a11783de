// The simulated accelerator: what its source files share.
//
//   memory.cpp      device memory with a limit and counters, pinned host memory
//   runtime.cpp     current device, streams, events, generators, and the hooks torch asks them through
//   ops.cpp         tensors on the device: making, copying, viewing, and every other operator by way of the CPU
//   autocast.cpp    which operators run in lower precision under torch.autocast("sim")
//   collective.cpp  the torch.distributed back end "simccl"
//   bindings.cpp    what Python sees of all this
//   sim.cpp         all of them, as one translation unit
//
// "Device memory" is host memory that torch believes to be elsewhere: a CPU kernel never sees it unless
// something here copies it or lends it out (host_view). Work is done when the call returns; streams and
// events exist, and order nothing.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <torch/version.h>

#include <cstdint>

// The oldest torch this builds with is 2.6; newer interfaces are used where they exist. A method that only
// some versions declare virtual is written without `override`.
#define SIM_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;

// ------------------------------------------------------------------------------------------ runtime.cpp

int device_count();
void set_device_count(int count);

// The current device is a property of the thread, as on other accelerators.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// `device` with the current device's index where it has none.
c10::Device with_index(c10::Device device);

// A process that was forked off after its parent had used a device cannot use one.
bool initialized();
bool in_bad_fork();
void initialize();

const at::Generator& default_generator(c10::DeviceIndex index);

// The CPU generator that makes the numbers of a generator of this device.
at::Generator host_generator(const at::Generator& generator);

// ------------------------------------------------------------------------------------------- memory.cpp

// Bytes and calls, counted since the start or since the last reset.
struct Gauge {
  int64_t current = 0, peak = 0, added = 0, removed = 0;

  void add(int64_t amount) {
    current += amount;
    added += amount;
    peak = current > peak ? current : peak;
  }
  void remove(int64_t amount) {
    current -= amount;
    removed += amount;
  }
  void reset_peak() { peak = current; }
  void reset_accumulated() { added = removed = 0; }
};

struct Memory {
  int64_t capacity = int64_t(1) << 30;
  Gauge allocated;  // bytes in live tensors
  Gauge reserved;   // bytes taken from the device: `allocated` plus freed bytes that the cache still holds
  Gauge blocks;     // live allocations
  int64_t failures = 0;  // allocations refused for want of memory
};

// Copies by direction, those a fallback to the CPU makes on its own not counted.
struct Traffic {
  int64_t to_device = 0, to_device_bytes = 0;
  int64_t to_host = 0, to_host_bytes = 0;
  int64_t between = 0, between_bytes = 0;
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

Memory memory(c10::DeviceIndex index);
void set_capacity(c10::DeviceIndex index, int64_t bytes);
void empty_cache();
void reset_peak(c10::DeviceIndex index);
void reset_accumulated(c10::DeviceIndex index);

int64_t pinned_bytes();
bool is_pinned(const void* pointer);
c10::Device device_of(const void* pointer);

// ---------------------------------------------------------------------------------------------- ops.cpp

// The memory of a device tensor as a CPU tensor with the same sizes and strides. It shares the memory and
// keeps it alive. A CPU tensor is returned as it is.
at::Tensor host_view(const at::Tensor& tensor);

Traffic traffic();
void reset_traffic();

}  // namespace sim
