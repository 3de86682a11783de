// The torch.distributed back end "simccl": collectives of sim tensors through another back end on the CPU.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

c10::intrusive_ptr<c10d::Backend> make_simccl(const c10::intrusive_ptr<c10d::Backend>& carrier);

}  // namespace sim
