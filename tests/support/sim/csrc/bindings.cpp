// What Python sees of the simulated accelerator. The module tests/support/sim/runtime.py gives it its shape.
#include "collective.h"
#include "sim.h"

#include <torch/csrc/utils/pybind.h>

namespace {

namespace py = pybind11;
using Index = c10::DeviceIndex;

py::dict as_dict(const sim::Gauge& gauge) {
  using namespace py::literals;
  return py::dict("current"_a = gauge.current, "peak"_a = gauge.peak);
}

py::dict memory(Index index) {
  using namespace py::literals;
  auto now = sim::memory(index);
  return py::dict(
      "capacity"_a = now.capacity, "allocated"_a = as_dict(now.allocated), "reserved"_a = as_dict(now.reserved),
      "blocks"_a = as_dict(now.blocks), "allocations"_a = now.blocks.added, "failures"_a = now.failures);
}

py::dict traffic() {
  using namespace py::literals;
  auto now = sim::traffic();
  return py::dict(
      "to_device"_a = now.to_device, "to_device_bytes"_a = now.to_device_bytes, "to_host"_a = now.to_host,
      "to_host_bytes"_a = now.to_host_bytes, "between"_a = now.between, "between_bytes"_a = now.between_bytes);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &sim::device_count);
  m.def("set_device_count", &sim::set_device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_current_device);
  m.def("initialized", &sim::initialized);
  m.def("initialize", &sim::initialize);
  m.def("in_bad_fork", &sim::in_bad_fork);
  m.def("default_generator", [](Index index) { return sim::default_generator(index); });
  m.def("memory", &memory);
  m.def("set_capacity", &sim::set_capacity);
  m.def("empty_cache", &sim::empty_cache);
  m.def("reset_peak", &sim::reset_peak);
  m.def("reset_accumulated", &sim::reset_accumulated);
  m.def("pinned_bytes", &sim::pinned_bytes);
  m.def("traffic", &traffic);
  m.def("reset_traffic", &sim::reset_traffic);
  m.def("make_simccl", &sim::make_simccl, py::call_guard<py::gil_scoped_release>());
}
