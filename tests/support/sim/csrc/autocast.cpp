// torch.autocast("sim"): the operator lists are torch's own, the ones its other accelerators use.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

// torch's macros name what they need as one does inside this namespace.
namespace at::autocast {
namespace {

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

// Its input is a probability, which half precision cannot hold near 0 and 1.
Tensor banned_binary_cross_entropy(
    const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy is unsafe to autocast, since its input is a probability: use "
      "binary_cross_entropy_with_logits on the logits");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  m.impl("binary_cross_entropy", &banned_binary_cross_entropy);
}

}  // namespace
}  // namespace at::autocast
