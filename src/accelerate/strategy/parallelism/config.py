"""``ParallelismConfig``: the sizes of the named dimensions of a device mesh.

The names of the dimensions are those of the public package, and so is their order: neighbouring ranks, which
share a machine, meet in the dimensions that talk most.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import SettingError, UnknownNameError, WorldError
from accelerate.core.setting import describe_fields, load_fields
from accelerate.core.torch_internals import require
from accelerate.core.value_types import PositiveInt
from accelerate.strategy.launch_settings.parallelism import (
    ContextParallelSettings,
    MeshSettings,
    SequenceParallelSettings,
)
from accelerate.world.mesh_layout import DIMENSIONS, MeshLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Dimensions of the data, from outside to inside; then those of one copy of the model.
_DATA, _OTHER = ("dp_replicate", "dp_shard"), ("tp", "cp", "sp", "pp")


@check_arguments
@describe_fields
@dataclass
class TorchContextParallelConfig(ContextParallelSettings):
    """The options of context parallelism: how processes exchange keys and values.

    Attributes:
        cut: whether loaders give parts of sequences: all (True), or all by the names of keys and the
            dimensions of their tokens: ``{"tokens": 1}``. By default they give whole sequences, which
            ``maybe_context_parallel`` shards.

    Raises:
        UnknownNameError: another word.
    """

    cut: bool | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        load_fields(self)


@check_arguments
@dataclass
class TorchTensorParallelConfig:
    """The options of tensor parallelism.

    Attributes:
        enable_async_tp: overlap exchanges with products of matrices. Nothing does it here yet, and that is
            said: torch can only in compiled models, on devices that reach each other's memory.
        plan: names of modules, in which ``*`` stands for any text, and how they are shared: ``"colwise"``,
            ``"rowwise"``, ``"colwise_rep"``, ``"rowwise_rep"``, ``"sequence_parallel"``, ``"replicate"``,
            ``"replicated_with_grad_allreduce"``, or a ``ParallelStyle`` of torch. It is joined with the plan
            of a model that has one.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = None


@check_arguments
@describe_fields
@dataclass
class DeepSpeedSequenceParallelConfig(SequenceParallelSettings):
    """The options of Ulysses sequence parallelism (arXiv:2309.14509).

    Attributes:
        cut: which loaders give parts of sequences: those that are prepared together with a model (None), all,
            none, or all, by the names of keys and the dimensions of their tokens: ``{"tokens": 1}``.

    Raises:
        SettingError: sequences are equally long, and nothing says how long.
    """

    cut: bool | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        load_fields(self)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise SettingError(
                "sp_seq_length_is_variable is false, but nothing says how long sequences are",
                fix="give sp_seq_length, or leave sp_seq_length_is_variable out",
            )


@check_arguments
@dataclass
class TorchTensorParallelPlugin:
    """The older way to ask for tensor parallelism; ``ParallelismConfig(tp_size=...)`` says the same.

    Attributes:
        tp_size: processes that share each layer.
        torch_device_mesh: a mesh with a dimension ``tp`` that exists already.
    """

    tp_size: PositiveInt = 1
    torch_device_mesh: Any = None


@check_arguments
@dataclass
class PipelineParallelConfig:
    """Pipeline options: ``ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(...))``.

    Attributes:
        num_microbatches: the number of micro-batches of a batch; None takes twice as many as stages.
            More of them leave smaller bubbles, and each is smaller.
        schedule: ``"gpipe"``: all micro-batches forward, then all backward; the loss may be anything,
            anywhere.
            ``"1f1b"``: forwards and backwards alternate, which keeps fewer activations; the loss must be in
            the model, or ``loss_fn``. ``"interleaved"``: the same with several stages on each process.
        split_points: names of the first module of every stage but the first; ``"auto"`` makes the stages even
            in bytes.
        no_split_module_classes: class names of modules that ``"auto"`` does not open; None takes what the
            model itself says (``_no_split_modules``).
        on_all_stages: names of small modules that every process has: those that several stages call, or whose
            weights are used outside of them.
        stages_per_process: stages on each process, for ``"interleaved"``.
        loss_fn: for ``"1f1b"`` and a model that gives outputs: takes them and the keyword ``target`` of the
            call, gives the mean loss. The call gives the loss; in evaluation without a target, the output.
        items: for the same schedules: takes the arguments of the model for one chunk, gives how many items
            its loss is the mean of, where chunks differ in that.
    """

    num_microbatches: PositiveInt | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    split_points: str | list[str] = "auto"
    no_split_module_classes: list[str] | None = None
    on_all_stages: list[str] = field(default_factory=list)
    stages_per_process: PositiveInt = 1
    loss_fn: Callable[..., Any] | None = None
    items: Callable[..., Any] | None = None

    def settle(self, processes: int) -> None:
        """Fill in defaults, and refuse options that do not go together.

        Args:
            processes: how many have the stages of one model.

        Raises:
            SettingError: too few chunks or stages.
        """
        if isinstance(self.split_points, str) and self.split_points != "auto":
            self.split_points = [self.split_points]
        if self.schedule == "interleaved" and self.stages_per_process == 1:
            self.stages_per_process = 2
        if self.schedule != "interleaved" and self.stages_per_process != 1:
            raise SettingError(
                f"stages_per_process={self.stages_per_process} with schedule={self.schedule!r}",
                why="with it each process has one stage",
                fix="schedule='interleaved', or leave stages_per_process out",
            )
        stages = processes * self.stages_per_process
        if self.num_microbatches is None:
            self.num_microbatches = 2 * stages
        least = 1 if self.schedule == "gpipe" else stages
        if self.num_microbatches < least:
            raise SettingError(
                f"num_microbatches={self.num_microbatches} is too few for {stages} stages and "
                f"schedule={self.schedule!r}",
                fix=f"give {least} or more",
            )
        if self.schedule == "interleaved" and self.num_microbatches % processes:
            raise SettingError(
                f"num_microbatches={self.num_microbatches} is no multiple of the {processes} processes",
                why="an interleaved schedule sends one chunk for each process before the next stage begins",
                fix=f"num_microbatches={-(-self.num_microbatches // processes) * processes}",
            )


@check_arguments
@describe_fields
@dataclass(repr=False)
class ParallelismConfig(MeshSettings):
    """The sizes of the mesh dimensions; their product is the world size.

    A field that is None takes its variable, then its default.

    Attributes:
        tp_handler, cp_handler, sp_handler, pp_handler: options of one dimension.

    Raises:
        SettingError: a size is no positive number, or two dimensions exclude each other.
    """

    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_handler: PipelineParallelConfig | None = None
    device_mesh: Any = field(default=None, init=False, compare=False)
    _plane: Any = field(default=None, init=False, compare=False, repr=False)
    _made_in: Any = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        load_fields(self)
        if self.cp_enabled and self.sp_enabled:
            raise SettingError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} exclude each other",
                why="both share out the tokens of a sequence",
                fix="set one of them to 1",
            )
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_enabled and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        if self.pp_enabled and self.pp_handler is None:
            self.pp_handler = PipelineParallelConfig()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the mesh, which belongs to these processes."""
        return {**vars(self), "device_mesh": None, "_plane": None, "_made_in": None}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}_size={size}" for name, size in self._sizes.items() if size > 1)
        return f"ParallelismConfig({sizes})"

    @property
    def _sizes(self) -> dict[str, int]:
        """The size of every dimension: one dict, to which programs add dimensions of their own."""
        # A config that 1.x has pickled has no pp_size, and not this dict.
        sizes = vars(self).setdefault("_size_by_name", dict.fromkeys((*_DATA, *_OTHER), 1))
        sizes.update({name: getattr(self, f"{name}_size", None) or size for name, size in sizes.items()})
        return sizes

    @_sizes.setter
    def _sizes(self, sizes: dict[str, int]) -> None:
        self._size_by_name = sizes

    def layout(self) -> MeshLayout:
        """Return the sizes as a ``Layout``."""
        return MeshLayout(**{degree: getattr(self, f"{name}_size") for degree, name in DIMENSIONS.items()})

    def fits(self, size: int) -> None:
        """Refuse another world size.

        Raises:
            WorldError: the sizes in the user's words, and two ways to make them fit.
        """
        labels = {degree: f"{name}_size" for degree, name in DIMENSIONS.items()}
        self.layout().check(size, labels)

    def to_json(self) -> str:
        """The sizes as JSON."""
        return json.dumps({f"{name}_size": size for name, size in self._sizes.items()})

    # --- sizes

    @property
    def total_size(self) -> int:
        """The number of processes in the mesh."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of processes that read different samples."""
        return self._product(_DATA)

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that read the same samples."""
        return self._product(_OTHER)

    @property
    def shards(self) -> int:
        """The number of processes that shard one replica: context and sequence parallel ranks too."""
        return self._product(("dp_shard", "cp", "sp"))

    def _product(self, names: tuple[str, ...]) -> int:
        product = 1
        for name in names:
            product *= self._sizes[name]
        return product

    def _is_enabled(self, name: str) -> bool:
        return self._sizes[name] > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return whether the model is replicated."""
        return self._is_enabled("dp_replicate")

    @property
    def dp_shard_enabled(self) -> bool:
        """Return whether parameters are sharded over data parallel ranks."""
        return self._is_enabled("dp_shard")

    @property
    def tp_enabled(self) -> bool:
        """Return whether tensor parallelism is on."""
        return self._is_enabled("tp")

    @property
    def cp_enabled(self) -> bool:
        """Return whether context parallelism is on."""
        return self._is_enabled("cp")

    @property
    def sp_enabled(self) -> bool:
        """Return whether Ulysses sequence parallelism is on."""
        return self._is_enabled("sp")

    @property
    def pp_enabled(self) -> bool:
        """Return whether pipeline parallelism is on."""
        return self._is_enabled("pp")

    # --- names of dimensions

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions with more than one process, data parallel first."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """The active dimensions along which samples differ."""
        return [name for name in _DATA if self._is_enabled(name)]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active dimensions along which samples are the same."""
        return [name for name in _OTHER if self._is_enabled(name)]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The active dimensions over which parameters are sharded: context parallel too."""
        return [name for name in ("dp_shard", "cp") if self._is_enabled(name)]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active dimensions over which losses are averaged."""
        return [name for name in (*_DATA, "cp") if self._is_enabled(name)]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that sharding takes: copies, then ``dp_shard_cp``."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    # --- the mesh

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the dimensions with more than one process, outermost first."""
        pairs = [(name, self._sizes[name]) for name in DIMENSIONS.values() if self._is_enabled(name)]
        return tuple(name for name, _ in pairs), tuple(size for _, size in pairs)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh; None where every size is 1. All processes must call it.

        Besides its dimensions it knows the joined ones: ``dp``, ``dp_shard_cp`` and ``dp_cp``.

        Args:
            device_type: torch's type of the device.

        Raises:
            WorldError: the product of the sizes is not the number of processes.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        names, sizes = self._get_mesh()
        if not names:
            return None
        if dist.is_initialized():
            self.fits(dist.get_world_size())
        require("device meshes")
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        # Context and sequence parallel too.
        sharding = [name for name in ("dp_shard", "cp", "sp") if self._is_enabled(name)]
        joined = {"dp": self.dp_dim_names, "dp_shard_cp": sharding, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joined.items():
            if parts:
                mesh[tuple(parts)]._flatten(name)
        self.device_mesh, self._plane = mesh, None
        self._made_in = weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else None
        return mesh

    def plane(self, device_type: str) -> DeviceMesh:
        """Return the mesh for sharding parameters: data and sequence dimensions are one.

        Its dimensions are ``dp_replicate``, where there are copies; ``dp_shard_cp``, or ``dp_shard`` where no
        sequences are shared, of one process perhaps; and ``tp`` and ``pp``, where they are. All processes
        must call it.
        """
        from torch.distributed.device_mesh import init_device_mesh

        mesh = self.get_device_mesh(device_type)
        if mesh is not None and self.shards == self._sizes["dp_shard"] > 1:
            return mesh
        if self._plane is None:
            names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
            sizes = {
                "dp_shard_cp": self.shards,
                **{name: self._sizes[name] for name in names if name in self._sizes},
            }
            active = [name for name in names if sizes[name] > 1 or name == "dp_shard_cp"]
            shape = tuple(sizes[name] for name in active)
            self._plane = init_device_mesh(device_type, shape, mesh_dim_names=tuple(active))
        return self._plane

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh; build it if there is none yet.

        Raises:
            WorldError: there is none, and nothing says for which device.
        """
        import torch.distributed as dist

        # The world may be closed in which it was built.
        is_over = self._made_in is not None and self._made_in() is not dist.group.WORLD
        if self.device_mesh is None or is_over:
            if device_type is None:
                raise WorldError(
                    "there is no mesh yet",
                    fix="get_device_mesh(accelerator.device.type)",
                )
            return self.build_device_mesh(device_type)
        return self.device_mesh

    def _set_size(self, parallelism: str, size: int) -> None:
        """Change one size: ``"tp"``, ``"dp_shard"`` ...

        Raises:
            UnknownNameError: there is no such dimension.
        """
        if parallelism not in self._sizes:
            raise UnknownNameError("dimension", parallelism, self._sizes)
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Refuse an ``Accelerator`` of another world size.

        Raises:
            WorldError: it has another number.
        """
        self.fits(accelerator.num_processes)
