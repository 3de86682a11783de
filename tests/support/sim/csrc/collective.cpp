// The torch.distributed back end "simccl": collectives of sim tensors through another back end on the CPU.
//
// Device memory is host memory, so nothing is copied: the carrier (gloo) works on host views of the device
// tensors, asynchronously as it always does. What comes back speaks of the device tensors again.
#include "collective.h"

#include "sim.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace sim {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors)
    views.push_back(host_view(tensor));
  return views;
}

std::vector<Tensors> host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& list : lists)
    views.push_back(host(list));
  return views;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

// The carrier's work, with the device tensors as its result.
class SimWork final : public c10d::Work {
 public:
  SimWork(WorkPtr work, Tensors outputs)
      : Work(-1, work->retrieveOpType()), work_(std::move(work)), outputs_(std::move(outputs)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  void synchronize() override { work_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  void abort() override { work_->abort(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
  Tensors result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    return work_->getFuture()->then(
        [outputs = outputs_](c10::ivalue::Future& done) {
          if (done.hasError())
            std::rethrow_exception(done.exception_ptr());
          return c10::IValue(outputs);
        },
        type);
  }

 private:
  WorkPtr work_;
  Tensors outputs_;
};

WorkPtr finished(const Tensors& outputs) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(outputs));
  return c10d::Work::create_from_future(future);
}

class SimCCL final : public c10d::Backend {
 public:
  explicit SimCCL(c10::intrusive_ptr<Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()), carrier_(std::move(carrier)) {}

  const std::string getBackendName() const override { return "simccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = host(tensors);
    return track(carrier_->broadcast(views, options), tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reducing(options, tensors, [&](const auto& plain) {
      auto views = host(tensors);
      return carrier_->allreduce(views, plain);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reducing(options, tensors, [&](const auto& plain) {
      auto views = host(tensors);
      return carrier_->allreduce_coalesced(views, plain);
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reducing(options, tensors, [&](const auto& plain) {
      auto views = host(tensors);
      return carrier_->reduce(views, plain);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return track(carrier_->allgather(out, in, options), flat(outputs));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = host_view(output), in = host_view(input);
    return track(carrier_->_allgather_base(out, in, options), {output});
  }

  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return track(carrier_->allgather_coalesced(out, in, options), flat(outputs));
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = host(outputs), in = host(inputs);
    return track(carrier_->allgather_into_tensor_coalesced(out, in, options), outputs);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return track(carrier_->gather(out, in, options), flat(outputs));
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return track(carrier_->scatter(out, in, options), outputs);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return reducing(options, outputs, [&](const auto& plain) {
      auto out = host(outputs);
      auto in = host(inputs);
      return carrier_->reduce_scatter(out, in, plain);
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reducing(options, {output}, [&](const auto& plain) {
      auto out = host_view(output), in = host_view(input);
      return carrier_->_reduce_scatter_base(out, in, plain);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return reducing(options, outputs, [&](const auto& plain) {
      auto out = host(outputs), in = host(inputs);
      return carrier_->reduce_scatter_tensor_coalesced(out, in, plain);
    });
  }

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto out = host_view(output), in = host_view(input);
    return track(carrier_->alltoall_base(out, in, output_sizes, input_sizes, options), {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto out = host(outputs), in = host(inputs);
    return track(carrier_->alltoall(out, in, options), outputs);
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto views = host(tensors);
    return track(carrier_->send(views, to, tag), {});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto views = host(tensors);
    return track(carrier_->recv(views, from, tag), tensors);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto views = host(tensors);
    return track(carrier_->recvAnysource(views, tag), tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device_ids.clear();
    plain.device.reset();
    return track(carrier_->barrier(plain), {});
  }

  void setSequenceNumberForGroup() override { carrier_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return carrier_->getSequenceNumberForGroup(); }
#if SIM_TORCH_AT_LEAST(9)
  void setTimeout(std::chrono::milliseconds timeout) override { carrier_->setTimeout(timeout); }
  void abort() override { carrier_->abort(); }
  void shutdown() override { carrier_->shutdown(); }
#endif

 private:
  static WorkPtr track(WorkPtr work, Tensors outputs) {
    return c10::make_intrusive<SimWork>(std::move(work), std::move(outputs));
  }

  // The collectives of accelerators can average and gloo cannot: sum, then divide, before returning.
  template <typename Options, typename Run>
  WorkPtr reducing(const Options& options, const Tensors& outputs, Run run) {
    if (options.reduceOp != c10d::ReduceOp::AVG)
      return track(run(options), outputs);
    auto plain = options;
    plain.reduceOp = c10d::ReduceOp::SUM;
    run(plain)->wait();
    for (const auto& output : outputs)
      host_view(output).div_(getSize());
    return finished(outputs);
  }

  c10::intrusive_ptr<Backend> carrier_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_simccl(const c10::intrusive_ptr<c10d::Backend>& carrier) {
  return c10::make_intrusive<SimCCL>(carrier);
}

}  // namespace sim
