"""``ParallelismConfig``: how many processes share what, as named dimensions of one mesh.

The names of the dimensions are those of the public package, and so is their order: neighbouring ranks, which
share a machine, meet in the dimensions that talk most.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import SettingError, UnknownNameError, WorldError
from accelerate.core.setting import load
from accelerate.strategy.parallelism.pipeline_options import PipelineParallelConfig
from accelerate.strategy.settings.parallelism import ParallelismSettings
from accelerate.world.layout import DIMENSIONS, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STRATEGIES = ("allgather", "alltoall")
# Dimensions of the data, from outside to inside; then those of one copy of the model.
_DATA, _OTHER = ("dp_replicate", "dp_shard"), ("tp", "cp", "sp", "pp")


@dataclass
class TorchContextParallelConfig:
    """How processes that share a sequence see each other's keys and values.

    Attributes:
        cp_comm_strategy: ``"allgather"``: each gathers those of all; ``"alltoall"``: they go around a ring
            (``PARALLELISM_CONFIG_CP_COMM_STRATEGY``, allgather).
        cut: which loaders give parts of sequences: those that are prepared together with a model (None), all,
            none, or all, by the names of keys and the dimensions of their tokens: ``{"tokens": 1}``.

    Raises:
        UnknownNameError: another word.
    """

    cp_comm_strategy: str | None = None
    cut: bool | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        found = load(ParallelismSettings).value.parallelism_config_cp_comm_strategy
        self.cp_comm_strategy = self.cp_comm_strategy or found or "allgather"
        if self.cp_comm_strategy not in STRATEGIES:
            raise UnknownNameError("cp_comm_strategy", self.cp_comm_strategy, STRATEGIES)


@dataclass
class TorchTensorParallelConfig:
    """How layers are shared.

    Attributes:
        enable_async_tp: overlap exchanges with products of matrices. Nothing does it here yet, and that is
            said: torch can only in compiled models, on devices that reach each other's memory.
        plan: names of modules, in which ``*`` stands for any text, and how they are shared: ``"colwise"``,
            ``"rowwise"``, ``"colwise_rep"``, ``"rowwise_rep"``, ``"sequence_parallel"``, ``"replicate"``, or
            a ``ParallelStyle`` of torch. It is joined with the plan of a model that has one.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = None


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How sequences are shared around attention, head by head (Ulysses, arXiv:2309.14509).

    Attributes:
        sp_seq_length: tokens of every sequence, where they are equally long
            (``PARALLELISM_CONFIG_SP_SEQ_LENGTH``).
        sp_seq_length_is_variable: they are not (``PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE``, True).
        sp_attn_implementation: name of the attention in transformers
            (``PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION``).
        cut: as for ``TorchContextParallelConfig``.

    Raises:
        SettingError: sequences are equally long, and nothing says how long.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None
    cut: bool | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        found = load(ParallelismSettings).value
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = found.parallelism_config_sp_seq_length_is_variable is not False
        if self.sp_seq_length is None:
            self.sp_seq_length = found.parallelism_config_sp_seq_length
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = found.parallelism_config_sp_attn_implementation
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise SettingError(
                "sp_seq_length_is_variable is false, but nothing says how long sequences are",
                fix="give sp_seq_length, or leave sp_seq_length_is_variable out",
            )


@dataclass
class TorchTensorParallelPlugin:
    """The older way to ask for tensor parallelism; ``ParallelismConfig(tp_size=...)`` says the same.

    Attributes:
        tp_size: processes that share each layer.
        torch_device_mesh: a mesh with a dimension ``tp`` that exists already.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass(repr=False)
class ParallelismConfig:
    """How many processes share what; the product of all is the number of processes.

    A field that is None takes its variable (``PARALLELISM_CONFIG_TP_SIZE`` ...), then 1.

    Attributes:
        dp_replicate_size: copies of the model that see different data.
        dp_shard_size: processes that share one copy's parameters, gradients and optimizer, and see different
            data.
        tp_size: processes that share each layer.
        cp_size: processes that share each sequence, around attention over all keys.
        cp_backend: ``"torch"``.
        sp_size: processes that share each sequence, head by head.
        sp_backend: ``"deepspeed"``, after whose Ulysses it works.
        tp_handler, cp_handler, sp_handler: options of one dimension.
        pp_size: stages of layers, one after another.
        pp_handler: options of these.

    Raises:
        SettingError: a size is no positive number, or two dimensions exclude each other.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Any = None
    sp_size: int | None = None
    sp_backend: Any = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineParallelConfig | None = None
    device_mesh: Any = field(default=None, init=False, compare=False)
    _plane: Any = field(default=None, init=False, compare=False, repr=False)
    _made_in: Any = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        found = load(ParallelismSettings).value
        for name in DIMENSIONS.values():
            if getattr(self, f"{name}_size") is None:
                setattr(self, f"{name}_size", getattr(found, f"parallelism_config_{name}_size") or 1)
        self.cp_backend = self.cp_backend or found.parallelism_config_cp_backend or "torch"
        self.sp_backend = self.sp_backend or found.parallelism_config_sp_backend or "deepspeed"
        for name, choices in (("cp_backend", ("torch",)), ("sp_backend", ("deepspeed",))):
            if getattr(self, name) not in choices:
                raise UnknownNameError(name, str(getattr(self, name)), choices)
        for name, size in self._sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise SettingError(f"{name}_size is {size!r}", fix=f"give 1 or more; {name}_size=1 is off")
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
        """Without the mesh, which is of these processes."""
        return {**vars(self), "device_mesh": None, "_plane": None, "_made_in": None}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}_size={size}" for name, size in self._sizes.items() if size > 1)
        return f"ParallelismConfig({sizes})"

    @property
    def _sizes(self) -> dict[str, int]:
        """Size of every dimension, outermost first."""
        return {name: getattr(self, f"{name}_size") for name in DIMENSIONS.values()}

    def layout(self) -> Layout:
        """The same as degrees of a layout."""
        return Layout(**{degree: getattr(self, f"{name}_size") for degree, name in DIMENSIONS.items()})

    def fits(self, size: int) -> None:
        """Refuses a world of another number of processes.

        Raises:
            WorldError: the sizes in the user's words, and two ways to make them fit.
        """
        words = {degree: f"{name}_size" for degree, name in DIMENSIONS.items()}
        self.layout().check(size, words)

    def to_json(self) -> str:
        """The sizes as JSON."""
        return json.dumps({f"{name}_size": size for name, size in self._sizes.items()})

    # --- sizes

    @property
    def total_size(self) -> int:
        """Processes in all."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Processes that see different data."""
        return self._product(_DATA)

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that share the same data."""
        return self._product(_OTHER)

    @property
    def shards(self) -> int:
        """Processes that share one copy's parameters: those of a sequence do, too."""
        return self._product(("dp_shard", "cp", "sp"))

    def _product(self, names: tuple[str, ...]) -> int:
        product = 1
        for name in names:
            product *= self._sizes[name]
        return product

    def _enabled(self, name: str) -> bool:
        return self._sizes[name] > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self._enabled("dp_replicate")

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return self._enabled("dp_shard")

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are shared."""
        return self._enabled("tp")

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are shared around attention over all keys."""
        return self._enabled("cp")

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are shared head by head."""
        return self._enabled("sp")

    @property
    def pp_enabled(self) -> bool:
        """Whether layers are stages."""
        return self._enabled("pp")

    # --- names of dimensions

    @property
    def active_mesh_dims(self) -> list[str]:
        """Those with more than one process, data first."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """Those along which data differ."""
        return [name for name in _DATA if self._enabled(name)]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Those along which data are the same."""
        return [name for name in _OTHER if self._enabled(name)]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Those over which parameters are sharded: processes of a sequence share them too."""
        return [name for name in ("dp_shard", "cp") if self._enabled(name)]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Those over which losses are averaged."""
        return [name for name in (*_DATA, "cp") if self._enabled(name)]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that sharding takes: copies, then ``dp_shard_cp``."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    # --- the mesh

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the dimensions with more than one process, outermost first."""
        pairs = [(name, size) for name, size in self._sizes.items() if size > 1]
        return tuple(name for name, _ in pairs), tuple(size for _, size in pairs)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Makes the mesh; None where every size is 1. All processes must call it.

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
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        joined = {"dp": self.dp_dim_names, "dp_shard_cp": self._sharding, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joined.items():
            if parts:
                mesh[tuple(parts)]._flatten(name)
        self.device_mesh, self._plane = mesh, None
        self._made_in = weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else None
        return mesh

    def plane(self, device_type: str) -> DeviceMesh:
        """The processes as those see them that share parameters: data and sequences are one dimension.

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

    @property
    def _sharding(self) -> list[str]:
        """The dimensions that are joined to ``dp_shard_cp``: those of shared sequences too."""
        return [name for name in ("dp_shard", "cp", "sp") if self._enabled(name)]

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh, made if there is none yet.

        Raises:
            WorldError: there is none, and nothing says for which device.
        """
        if self.device_mesh is None or self._is_over():
            if device_type is None:
                raise WorldError(
                    "there is no mesh yet",
                    fix="get_device_mesh(accelerator.device.type)",
                )
            return self.build_device_mesh(device_type)
        return self.device_mesh

    def _is_over(self) -> bool:
        """Whether the world is no more in which the mesh was made here."""
        import torch.distributed as dist

        made_in = self._made_in
        return made_in is not None and made_in() is not dist.group.WORLD

    def _set_size(self, parallelism: str, size: int) -> None:
        """Changes one size: ``"tp"``, ``"dp_shard"`` ...

        Raises:
            UnknownNameError: there is no such dimension.
        """
        if parallelism not in self._sizes:
            raise UnknownNameError("dimension", parallelism, self._sizes)
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Refuses an ``Accelerator`` of another number of processes.

        Raises:
            WorldError: it has another number.
        """
        self.fits(accelerator.num_processes)
