"""The private names of torch that this package uses: one table, by subject.

Every entry has the versions that have it, the files that use it, and what happens where it is missing. A
newer torch than any that was tried is looked at once, when a subject is set up: ``require`` refuses it if a
name is gone for which there is no other way, before anything fails in the middle of a training.

``tests/laws/test_torch_internals.py`` reads every name on the running torch, and finds what has no entry.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from accelerate.core.errors import FeatureNotBuiltError

TESTED = ("2.6", "2.8", "2.10", "2.13", "2.15")  # versions of torch that `make test-torch` runs
# Subjects that every ``Accelerator`` may need.
COMMON = (
    *("process groups", "tables of modules", "data loaders", "checkpoint files"),
    *("fused operations on lists of tensors", "loss scaling and schedulers", "hooks of parameters"),
    "changes of tensors",
)
REFUSED = ""  # there is no other way: a torch without the name is refused


@dataclass(frozen=True)
class TorchName:
    """A private name of torch.

    Attributes:
        module: the module that has it.
        path: ``Class.attribute``, or a name of the module; empty for the module itself.
        versions: the versions that have it, as a PEP 440 specifier; empty: all.
    """

    module: str
    path: str
    versions: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}" if self.path else self.module

    def is_expected(self, torch_version: str) -> bool:
        """Return whether that version of torch has the name."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return Version(Version(torch_version).base_version) in SpecifierSet(self.versions)

    def exists(self) -> bool:
        """Return whether the installed torch has the name; an attribute that a method sets counts."""
        try:
            value: Any = importlib.import_module(self.module)
        except ImportError:
            return False
        for part in self.path.split(".") if self.path else ():
            if hasattr(value, part):
                value = getattr(value, part)
            else:
                return isinstance(value, type) and part in _attributes(value)
        return True


@functools.cache
def _attributes(kind: type) -> frozenset[str]:
    """Return the attributes of instances that a class annotates or its methods set."""
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        names.update(vars(base).get("__annotations__", ()))
        for member in vars(base).values():
            function = getattr(member, "fget", None) or getattr(member, "__wrapped__", member)
            if isinstance(function, FunctionType):
                instructions = dis.get_instructions(function)
                names.update(each.argval for each in instructions if each.opname == "STORE_ATTR")
    return frozenset(names)


@dataclass(frozen=True)
class Internals:
    """Private names of torch for one subject.

    Attributes:
        subject: what they are for.
        files: the files of this package that use them; folders end in ``/``.
        names: module -> names in it, each with the versions that have it if those are not all.
        without: what happens where one is missing; ``REFUSED`` if ``require`` refuses that torch.
    """

    subject: str
    files: tuple[str, ...]
    names: Mapping[str, str]
    without: str = REFUSED

    def __iter__(self) -> Iterator[TorchName]:
        for module, names in self.names.items():
            for name in names.split() or [""]:
                at = next((place for place, sign in enumerate(name) if sign in "<>=!"), len(name))
                yield TorchName(module, name[:at], name[at:])


_FSDP2 = "torch.distributed.fsdp._fully_shard"
_PIPELINE = "torch.distributed.pipelining"
_MODULE = "torch.nn.modules.module"

INTERNALS = (
    Internals(
        "FSDP2",
        ("strategy/sharding/", "strategy/fsdp.py", "strategy/parallelism/pipeline/stage.py"),
        {
            "torch.distributed.fsdp": "FSDPModule._get_fsdp_state",
            f"{_FSDP2}._fsdp_state": "FSDPState._mp_policy FSDPState._pre_forward FSDPState._post_forward "
            "FSDPState._training_state FSDPState._pre_backward FSDPState._register_pre_backward_hook",
            f"{_FSDP2}._fsdp_param_group": "FSDPParamGroup.fsdp_params FSDPParamGroup.reduce_grads "
            "FSDPParamGroup.device FSDPParamGroup._reshard_after_forward FSDPParamGroup.post_backward "
            "FSDPParamGroup.wait_for_unshard",
            "torch": "_C._current_graph_task_id autograd.Variable._execution_engine",
            f"{_FSDP2}._fsdp_param": "FSDPParam.sharded_param FSDPParam._unsharded_param "
            "FSDPParam._orig_size FSDPParam._module_info FSDPParam.fsdp_placement FSDPParam.offload_to_cpu "
            "FSDPParam.padded_sharded_param_size FSDPParam.device FSDPParam.pin_memory "
            "FSDPParam.to_sharded_dtensor FSDPParam._sharded_param_data FSDPParam.reset_sharded_param "
            "FSDPParam._get_grad_inner_tensor FSDPParam._param_fqn",
        },
    ),
    Internals(
        "FSDP2: where a version keeps parameter groups and unreduced gradients",
        ("strategy/sharding/grads.py", "strategy/sharding/fsdp2_options.py"),
        {
            f"{_FSDP2}._fsdp_state": "FSDPState._fsdp_param_group FSDPState._fsdp_param_groups>=2.12",
            f"{_FSDP2}._fsdp_param_group": "FSDPParamGroup._init_mp_dtypes FSDPParamGroup._orig_dtype<2.15",
            f"{_FSDP2}._fsdp_param": "FSDPParam.unsharded_accumulated_grad "
            "FSDPParam.unsharded_grad_dtype>=2.15 FSDPParam._tp_spec<2.12 "
            "FSDPParam._unsharded_dtensor_spec>=2.12",
        },
        "each has the other's place in the other versions",
    ),
    Internals(
        "FSDP1",
        ("strategy/fsdp1/", "strategy/sharding/sharding_layout.py"),
        {
            "torch.distributed.fsdp": "FullyShardedDataParallel._handle "
            "FullyShardedDataParallel._fsdp_wrapped_module FullyShardedDataParallel._named_members "
            "ShardingStrategy._HYBRID_SHARD_ZERO2",
            "torch.distributed.fsdp._runtime_utils": "_lazy_init _reshard",
            "torch.distributed.fsdp._flat_param": "FlatParamHandle.flat_param "
            "FlatParamHandle.uses_sharded_strategy FlatParamHandle.rank FlatParamHandle.world_size "
            "FlatParamHandle.process_group FlatParamHandle.device FlatParamHandle._use_orig_params "
            "FlatParamHandle.needs_unshard FlatParamHandle.prepare_gradient_for_backward "
            "FlatParameter._post_backward_hook_state FlatParamHandle._reset_flat_param_grad_info_if_needed "
            "FlatParameter._sharded_size FlatParameter._params FlatParameter._local_shard "
            "FlatParameter._full_param_padded FlatParameter._shared_param_infos "
            "FlatParameter._numels_with_padding FlatParameter._is_padding_mask FlatParameter._param_infos "
            "FlatParameter._shapes FlatParameter._unpadded_unsharded_size FlatParameter._is_grad_none_mask "
            "FlatParamHandle.prepare_gradient_for_optim FlatParamHandle._offload_params "
            "FlatParameter._saved_grad_shard FlatParameter._post_backward_called",
            "torch.distributed.fsdp.wrap": "_Policy._run_policy",
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "CheckpointWrapper",
        },
    ),
    Internals(
        "activation checkpointing",
        ("strategy/sharding/",),
        {"torch.distributed._composable.checkpoint_activation": "checkpoint _no_hook"},
    ),
    Internals(
        "DDP",
        ("strategy/ddp.py", "strategy/protocol/replicated_module.py"),
        {
            "torch.nn.parallel": "DistributedDataParallel._pre_forward "
            "DistributedDataParallel._post_forward DistributedDataParallel._active_ddp_module "
            "DistributedDataParallel._get_ddp_logging_data DistributedDataParallel._comm_hooks "
            "DistributedDataParallel._check_reducer_finalized "
            "DistributedDataParallel._static_graph_delay_allreduce_enqueued",
            "torch.utils._pytree": "tree_leaves",
        },
    ),
    Internals(
        "pipeline parallelism",
        ("strategy/parallelism/pipeline/",),
        {
            f"{_PIPELINE}.stage": "_PipelineStageBase.bwd_cache _PipelineStageBase.args_recv_info "
            "_PipelineStageBase.has_backward _PipelineStageBase.is_last "
            "_PipelineStageBase.get_fwd_recv_ops _PipelineStageBase.get_fwd_send_ops "
            "_PipelineStageBase.get_bwd_recv_ops _PipelineStageBase.get_bwd_send_ops "
            "_PipelineStageBase.forward_one_chunk _PipelineStageBase.backward_one_chunk "
            "_PipelineStageBase._retrieve_recv_grads "
            "_PipelineStageBase.clear_runtime_states",
            f"{_PIPELINE}.schedules": "Schedule1F1B._stage ScheduleInterleaved1F1B._stages",
            "torch": "_C._autograd._top_saved_tensors_default_hooks>=2.8",
            "torch.utils.checkpoint": "_checkpoint_hook",
        },
    ),
    Internals(
        "pipeline parallelism: how the receive buffers are made",
        ("strategy/parallelism/pipeline/stage.py",),
        {
            f"{_PIPELINE}.stage": "PipelineStage._inference_mode>=2.12 PipelineStage._prepare_forward_infra "
            "PipelineStage._prepare_backward_infra PipelineStage._get_grad_send_meta>=2.13",
            f"{_PIPELINE}._utils": "InferenceMode>=2.12",
        },
        "older versions have one way to make them",
    ),
    Internals(
        "collectives with gradients",
        ("strategy/parallelism/context/",),
        {
            "torch.distributed._functional_collectives": "all_to_all_single_autograd "
            "all_gather_tensor_autograd"
        },
    ),
    Internals(
        "ring attention",
        ("strategy/parallelism/context/context_parallel.py",),
        {
            "torch.distributed.tensor.experimental._context_parallel._attention": "_cp_options>=2.10 "
            "_templated_ring_attention>=2.10 _templated_ring_attention_backward>=2.10",
            "torch.distributed.tensor.experimental._attention": "_cp_options",
            "torch": "_C._dispatch_has_kernel_for_dispatch_key _C._dispatch_key_for_device "
            "ops.aten._fused_sdp_choice ops.aten._scaled_dot_product_cudnn_attention "
            "ops.aten._scaled_dot_product_efficient_attention "
            "ops.aten._scaled_dot_product_flash_attention "
            "ops.aten._scaled_dot_product_flash_attention_for_cpu",
        },
        'keys and values are all-gathered, and `"alltoall"` is refused with what to choose',
    ),
    Internals(
        "process groups",
        ("world/", "check/run.py"),
        {
            "torch.distributed.distributed_c10d": "_get_default_store _set_pg_timeout _world",
            "torch.distributed": "ProcessGroup._get_backend ProcessGroup._device_types "
            "ProcessGroup._allgather_base",
            "torch._C._distributed_c10d": "Backend._get_sequence_number_for_group Backend.Options._timeout",
        },
    ),
    Internals(
        "fake process group",
        ("facade/dry_run.py",),
        {"torch.testing._internal.distributed.fake_pg": "FakeStore"},
    ),
    Internals(
        "device meshes",
        ("strategy/parallelism/config.py",),
        {"torch.distributed.device_mesh": "DeviceMesh._flatten"},
    ),
    Internals(
        "distributed tensors",
        (
            "checkpoint/sharded_state.py",
            "precision/float8/torchao.py",
            "strategy/sharding/initial_weights.py",
        ),
        {"torch.distributed.tensor": "DTensor._spec DTensor._local_tensor"},
    ),
    Internals(
        "index of sharded checkpoints",
        ("checkpoint/dcp_files.py",),
        {
            "torch.distributed.checkpoint.filesystem": "_StorageInfo",
            "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
            "torch.distributed._shard.sharded_tensor.metadata": "",
            "torch.serialization": "_get_layout",
            "torch": "_C.PyTorchFileReader",
        },
    ),
    Internals(
        "checkpoint files",
        ("checkpoint/", "strategy/"),
        {
            "torch._utils": "_rebuild_tensor_v2 _rebuild_parameter",
            "torch.storage": "_LegacyStorage",
            "torch": "UntypedStorage._new_with_weak_ptr UntypedStorage._cdata "
            "_C._storage_Use_Count _has_compatible_shallow_copy_type",
            "torch.utils._python_dispatch": "is_traceable_wrapper_subclass TorchDispatchMode",
            _MODULE: "_IncompatibleKeys Module._load_from_state_dict Module._save_to_state_dict "
            "Module._load_state_dict_pre_hooks Module._load_state_dict_post_hooks "
            "Module._state_dict_hooks Module._state_dict_pre_hooks Module._register_state_dict_hook",
        },
    ),
    Internals(
        "fake tensors",
        ("checkpoint/lazy_weights.py", "facade/estimate/", "offload/", "strategy/parallelism/pipeline/"),
        {
            "torch": "UntypedStorage._cdata",
            "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
            "torch.utils._python_dispatch": "TorchDispatchMode",
            "torch.utils._pytree": "tree_map_only",
        },
    ),
    Internals(
        "where the data of fake tensors is in their file",
        ("checkpoint/lazy_weights.py",),
        {"torch": "UntypedStorage._checkpoint_offset>=2.7"},
        "the file is mapped, and read as it is used",
    ),
    Internals(
        "tensors that are offloaded",
        ("offload/",),
        {
            "torch": "Tensor._make_wrapper_subclass Tensor._make_subclass _C._disabled_torch_function_impl "
            "_C._dispatch_has_kernel_for_dispatch_key ops.aten._to_copy.default._schema "
            "_C._autograd._top_saved_tensors_default_hooks>=2.8 _C._current_graph_task_id "
            "_C._autograd._saved_tensors_hooks_is_enabled "
            "_C._swap_tensor_impl autograd.Variable._execution_engine",
            "torch._utils": "_rebuild_parameter",
            "torch.utils._pytree": "tree_leaves tree_map_only",
            "torch._compile": "_disable_dynamo",
        },
    ),
    Internals(
        "compilation",
        (
            *("facade/", "offload/dispatch_hook.py", "precision/autocast.py"),
            *("checkpoint/model_tensors.py", "launch/notebook/fork_server.py"),
        ),
        {
            "torch": "_dynamo.config.disable _dynamo.config.suppress_errors",
            "torch._dynamo.utils": "counters get_compilation_metrics",
            "torch._dynamo.trace_rules": "add",
            "torch._dynamo.eval_frame": "OptimizedModule._orig_mod cached_backends "
            "_TorchDynamoContext._torchdynamo_orig_callable",
            "torch._C._dynamo.eval_frame": "get_eval_frame_callback",
            _MODULE: "Module._compiled_call_impl",
        },
    ),
    Internals(
        "autocast in a graph",
        ("precision/autocast.py",),
        {
            "torch._dynamo.symbolic_convert": "InstructionTranslator.current_tx",
            "torch._dynamo.variables.ctx_manager": "AutocastModeVariable.create",
            "torch._dynamo.exc": "SkipFrame",
        },
        "the hooks of autocast run around the compiled forward, which is a graph of its own",
    ),
    Internals(
        "export",
        ("offload/pipeline/inference_stages.py",),
        {"torch._export.utils": "_compiling_state_context>=2.8"},
        "a model that asks `torch.compiler.is_exporting` may take another branch than in the trace",
    ),
    Internals(
        "tables of modules",
        ("",),
        {
            _MODULE: "Module._parameters Module._buffers Module._modules Module._non_persistent_buffers_set "
            "Module._forward_hooks Module._forward_pre_hooks Module._forward_hooks_always_called "
            "Module._apply"
        },
    ),
    Internals(
        "hooks of parameters",
        (
            "strategy/sharding/fsdp2_sharder.py",
            "strategy/protocol/gradient_sync.py",
            "strategy/parallelism/tensor/module_sharder.py",
        ),
        {"torch": "Tensor._backward_hooks Tensor._post_accumulate_grad_hooks"},
    ),
    Internals(
        "changes of tensors",
        ("facade/", "precision/float8/torchao.py", "strategy/protocol/replicated_buffers.py"),
        {"torch": "Tensor._version"},
    ),
    Internals(
        "fused operations on lists of tensors",
        ("facade/loss_weighting.py", "strategy/protocol/gradient_sync.py"),
        {"torch": "_foreach_mul_"},
    ),
    Internals(
        "loss scaling and schedulers",
        ("precision/loss_scaling.py", "facade/scheduler.py"),
        {
            "torch.amp": "GradScaler._found_inf_per_device GradScaler._maybe_opt_step "
            "GradScaler._per_optimizer_states",
            "torch.optim.lr_scheduler": "LRScheduler._step_count SequentialLR._milestones",
        },
    ),
    Internals(
        "data loaders",
        ("data/",),
        {
            "torch.utils.data": "DataLoader._get_iterator RandomSampler._num_samples",
            "torch.utils.data.dataloader": "_InfiniteConstantSampler",
        },
    ),
    Internals(
        "heartbeats of a rendezvous",
        ("launch/elastic/rendezvous.py",),
        {
            "torch.distributed.elastic.rendezvous.dynamic_rendezvous": (
                "DynamicRendezvousHandler._state_holder _BackendRendezvousStateHolder._sanitize"
            )
        },
        "machines whose clocks differ by more than 15 s do not find each other",
    ),
    Internals(
        "categories of memory in a profile",
        ("watch/memory_report.py",),
        {
            "torch.profiler": "profile._memory_profile",
            "torch.profiler._memory_profiler": "_CATEGORY_TO_INDEX MemoryProfileTimeline._coalesce_timeline",
        },
        "all memory is shown as other",
    ),
)


@functools.cache
def accepts(function: Any, parameter: str) -> bool:
    """Return whether a function of the installed torch has a parameter by that name."""
    return parameter in inspect.signature(function).parameters


@functools.cache
def is_available(subject: str) -> bool:
    """Return whether the installed torch has all private names of a subject."""
    return all(name.exists() for each in INTERNALS if each.subject == subject for name in each)


def require(*subjects: str) -> None:
    """Refuse a torch that is newer than any tried one and lacks a private name of ``subjects``.

    Raises:
        FeatureNotBuiltError: it does.
    """
    torch_version: str = importlib.import_module("torch").__version__
    if tuple(map(int, torch_version.split(".")[:2])) <= tuple(map(int, TESTED[-1].split("."))):
        return
    missing = [
        str(name)
        for each in INTERNALS
        if each.subject in subjects and each.without == REFUSED
        for name in each
        if name.is_expected(torch_version) and not name.exists()
    ]
    if missing:
        raise FeatureNotBuiltError(
            f"torch {torch_version} has no {', '.join(missing)} any more ({', '.join(subjects)})",
            why=f"this version of accelerate was made for torch {TESTED[0]} to {TESTED[-1]}",
            fix=f"pip install 'torch<={TESTED[-1]}.*', or a newer accelerate",
        )
