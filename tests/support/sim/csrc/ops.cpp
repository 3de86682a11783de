// Tensors on the simulated device: making, copying, viewing; every other operator runs on the CPU.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

// ---------------------------------------------------------------------------------------------- making

Tensor empty(
    IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device> device,
    optional<bool>, optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device.value_or(at::Device(kSim))));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device> device, optional<bool>) {
  c10::DeviceGuard guard(with_index(device.value_or(at::Device(kSim))));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef symbolic, optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto bytes = at::detail::computeStorageNbytesContiguous(size, impl->itemsize(), impl->storage_offset());
  if (impl->numel() > 0 && bytes > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  if (format)
    impl->empty_tensor_restride(*format);
  return self;
}

// --------------------------------------------------------------------------------------------- copying

std::mutex traffic_mutex;
Traffic counted;
thread_local bool in_fallback = false;

void count_copy(const Tensor& from, const Tensor& to) {
  if (in_fallback)
    return;
  std::lock_guard<std::mutex> lock(traffic_mutex);
  auto bytes = static_cast<int64_t>(to.nbytes());
  if (from.is_cpu()) {
    counted.to_device++;
    counted.to_device_bytes += bytes;
  } else if (to.is_cpu()) {
    counted.to_host++;
    counted.to_host_bytes += bytes;
  } else if (from.device() != to.device()) {
    counted.between++;
    counted.between_bytes += bytes;
  }
}

// Behind every copy_() with this device at either end; strides, types and broadcasting are the CPU's to do.
Tensor copy_from(const Tensor& from, const Tensor& to, bool /*non_blocking*/) {
  count_copy(from, to);
  host_view(to).copy_(host_view(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes())
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) { return at::_local_scalar_dense(host_view(self)); }

// --------------------------------------------------------------------------------------------- viewing

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {length}, {1});
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(none), 0, {0}, {1});
}

// -------------------------------------------------------------------------------------- everything else

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto maybe = type->cast<c10::OptionalType>())
    type = maybe->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

template <typename Name>
void check_same_device(at::Device one, at::Device other, const Name& op) {
  TORCH_CHECK(
      one == other, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
      other, "! (in ", op, ")");
}

// The device of an operator's tensors, -1 if it has none here. They must lie on one device; only a number may
// come from the CPU, and indices (lists of optional tensors), which other accelerators fetch themselves too.
c10::DeviceIndex common_device(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> values) {
  optional<at::Device> common;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0))
      return;
    check_same_device(common.value_or(tensor.device()), tensor.device(), schema.operator_name());
    common = tensor.device();
  };
  for (const auto& value : values) {
    if (value.isTensor())
      look(value.toTensor());
    else if (value.isTensorList())
      for (const auto& tensor : value.toTensorVector())
        look(tensor);
  }
  return common && common->type() == kSim ? common->index() : -1;
}

// A random operator draws from the generator it is given, else from the default one of its tensors' device,
// and never from the CPU's own: seeding and restoring this device's state must decide what it draws.
void use_device_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceIndex device) {
  const auto& arguments = op.schema().arguments();
  auto first = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  bool found = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!is_generator(arguments[i]))
      continue;
    found = true;
    auto& given = first[static_cast<std::ptrdiff_t>(i)];
    given = host_generator(given.isNone() ? default_generator(device) : given.toGenerator());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      found || !op.hasTag(at::Tag::nondeterministic_seeded), "sim has no kernel for the random operator ",
      op.schema().operator_name(), ", and the CPU's would draw from the CPU's generator");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto device = common_device(op.schema(), torch::jit::last(*stack, op.schema().arguments().size()));
  use_device_generator(op, stack, device);
  struct Inside {
    bool before = std::exchange(in_fallback, true);
    ~Inside() { in_fallback = before; }
  } inside;
  at::native::cpu_fallback(op, stack);
}

// The schema of native_batch_norm does not say that it writes the running statistics, so the fallback would
// lose them; the one of _native_batch_norm_legit says so.
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(
    const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& mean,
    const optional<Tensor>& variance, bool training, double momentum, double eps) {
  if (mean && mean->defined()) {
    Tensor running_mean = *mean, running_variance = *variance;
    return at::_native_batch_norm_legit(
        input, weight, bias, running_mean, running_variance, training, momentum, eps);
  }
  return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
}

// Its schema takes no generator; see use_device_generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true))
    return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

// Attention in its parts: the fused kernels belong to other devices.
int64_t fused_sdp_choice(
    const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool, optional<double>, bool) {
  return 0;  // at::SDPBackend::math
}

optional<Tensor> host_view_if_any(const optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? optional<Tensor>(host_view(*tensor)) : std::nullopt;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  check_same_device(input.device(), weight.device(), "convolution");
  return at::convolution(
             host_view(input), host_view(weight), host_view_if_any(bias), stride, padding, dilation, transposed,
             output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  check_same_device(grad.device(), weight.device(), "convolution_backward");
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      host_view(grad), host_view(input), host_view(weight), IntArrayRef(channels), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  auto back = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// Memory is never reused while work on it is under way, since no work ever is.
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators without a derivative, such as the collectives. Older versions of torch leave this to the device.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1))
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);

  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);

  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_nothing);

  m.impl("native_batch_norm", &native_batch_norm);
  m.impl("native_dropout", &native_dropout);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("record_stream", &record_stream);

  // Left to torch, these are made of their out= variants, which warn about a shape that they gave themselves.
  for (auto loss : {"mse_loss", "smooth_l1_loss", "huber_loss"})
    m.impl(loss, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// host_view hands both bits on to the CPU. Without these, torch would resolve them first: by a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

Tensor host_view(const Tensor& tensor) {
  if (tensor.is_cpu())
    return tensor;
  TORCH_INTERNAL_ASSERT(tensor.device().type() == kSim);
  auto view = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(at::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

Traffic traffic() {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  return counted;
}

void reset_traffic() {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  counted = {};
}

}  // namespace sim
