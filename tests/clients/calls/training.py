"""The Accelerator, its optimizer, its scheduler: attributes, defaults, return values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from tests.clients.probe import Probe

PROPERTIES = (
    "device_placement rng_types step_scheduler_with_optimizer split_batches dispatch_batches "
    "even_batches use_seedable_sampler non_blocking use_stateful_dataloader num_processes process_index "
    "local_process_index is_main_process is_local_main_process is_last_process device distributed_type "
    "multi_device use_distributed mixed_precision native_amp scaler optimizer_step_was_skipped "
    "sync_gradients gradient_accumulation_steps project_dir logging_dir save_iteration is_fsdp2 "
    "parallelism_config torch_device_mesh deepspeed_plugin fp8_backend should_save_model "
    "is_composable_parallelism_enabled trackers log_with step fp8_enabled has_fp8_handler "
    "has_lomo_optimizer flag_tensor ddp_handler scaler_handler autocast_handler init_handler "
    "profile_handler fp8_recipe_handler te_recipe_handler ao_recipe_handler msamp_recipe_handler "
    "delayed_fp8_autocast deepspeed_engine_wrapped _models _optimizers _schedulers _dataloaders "
    "_custom_objects data_parallel_rank data_parallel_shard_rank tensor_parallel_rank "
    "pipeline_parallel_rank context_parallel_rank project_configuration dataloader_config "
    "nothing_like_this"
)


class Net(nn.Module):
    """One layer, with an attribute and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.note = "mine"

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def fresh(**given: Any) -> Accelerator:
    """An Accelerator on the CPU, as if none had been before."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **given)


def objects(size: int = 8, batch: int = 2) -> tuple[Any, Any, Any, Any]:
    """A model, its optimizer and scheduler, and a loader."""
    set_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = TensorDataset(torch.arange(size * 2.0).reshape(size, 2), torch.arange(float(size)))
    return model, optimizer, scheduler, DataLoader(data, batch_size=batch)


def accelerator(folder: Path) -> dict[str, Any]:
    """Properties of a fresh one, with several arguments; what its methods return; what it refuses."""
    probe = Probe()
    probe.values("default", fresh(), PROPERTIES)
    for name, given in {
        "steps": {"gradient_accumulation_steps": 4},
        "plugin": {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
        "split": {"dataloader_config": DataLoaderConfiguration(split_batches=True, even_batches=False)},
        "bf16": {"mixed_precision": "bf16"},
        "dirs": {"project_dir": "p"},
        "rng": {"rng_types": ["torch"], "step_scheduler_with_optimizer": False, "device_placement": False},
    }.items():
        probe.values(name, fresh(**given), PROPERTIES)
    for name, given in {
        "precision": {"mixed_precision": "fp12"},
        "two plugins": {
            "gradient_accumulation_steps": 2,
            "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
        },
        "split_batches": {"split_batches": True},
        "handler twice": {"kwargs_handlers": [GradientAccumulationPlugin(), GradientAccumulationPlugin()]},
        "no handler": {"kwargs_handlers": [3]},
        "unknown": {"nothing_like_this": 1},
        "dynamo twice": {"dynamo_backend": "eager", "dynamo_plugin": 3},
        "fp16 on a CPU": {"mixed_precision": "fp16"},
    }.items():
        probe(f"Accelerator({name})", lambda given=given: fresh(**given).gradient_accumulation_steps)
    _methods(probe, folder)
    return probe.notes


def _methods(probe: Probe, folder: Path) -> None:
    acc = fresh()
    rank = acc.process_index
    model, optimizer, scheduler, loader = objects()
    probe("prepare nothing", acc.prepare)
    probe("prepare None", acc.prepare, None)
    probe("prepare a number", acc.prepare, 3)
    probe("prepare kinds", lambda: [type(x).__name__ for x in acc.prepare(optimizer, loader, scheduler)])
    probe("prepare type", lambda: type(acc.prepare(model, loader)).__name__)
    probe("prepare one", lambda: acc.prepare(loader) is acc.prepare(loader))
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
        probe(f"after prepare {name}", lambda name=name: len(getattr(acc, name)))
    probe("unwrap", lambda: acc.unwrap_model(acc.prepare(model)) is model)
    probe("unwrap plain", lambda: acc.unwrap_model(model) is model)
    probe("unwrap keep", lambda: acc.unwrap_model(model, keep_torch_compile=False) is model)
    probe("isinstance", lambda: isinstance(acc.unwrap_model(acc.prepare_model(model)), Net))
    probe("evaluation mode", lambda: acc.prepare_model(Net(), evaluation_mode=True))
    probe("get_state_dict", lambda: sorted(acc.get_state_dict(acc.prepare(model))))
    probe("get_state_dict wrapped", lambda: type(acc.get_state_dict(model, unwrap=False)).__name__)
    probe("gather", acc.gather, torch.ones(1) * rank)
    probe("gather_for_metrics", acc.gather_for_metrics, torch.ones(2) * rank)
    probe("gather_for_metrics objects", acc.gather_for_metrics, ["a", rank], use_gather_object=True)
    probe("gather_for_metrics strings", acc.gather_for_metrics, ["a"])
    probe("reduce", acc.reduce, torch.ones(1))
    probe("pad", acc.pad_across_processes, torch.ones(1 + rank, 1))
    probe("trigger before", acc.check_trigger)
    probe("set_trigger", acc.set_trigger if rank == 0 else lambda: None)
    probe("trigger after", acc.check_trigger)
    probe("trigger again", acc.check_trigger)
    probe("wait", acc.wait_for_everyone)
    probe("print", acc.print, "text")
    probe("split list", lambda: _split(acc, [1, 2, 3]))
    probe("split tuple", lambda: _split(acc, (1, 2, 3)))
    probe("split tensor", lambda: _split(acc, torch.arange(5)))
    probe("split dict", lambda: _split(acc, {"a": [1, 2, 3], "b": torch.arange(3)}))
    probe("split text", lambda: _split(acc, "abc"))
    probe("split padded", lambda: _split(acc, [1, 2, 3], apply_padding=True))
    probe("split number", lambda: _split(acc, 3))
    for name in ("on_main_process", "on_local_main_process", "on_last_process"):
        probe(name, lambda name=name: getattr(acc, name)(lambda: "ran")())
    probe("on_process", lambda: acc.on_process(lambda: "ran", process_index=0)())
    probe(
        "on_process as a decorator",
        lambda: acc.on_process(process_index=acc.num_processes - 1)(lambda: "ran")(),
    )
    probe("on_local_process", lambda: acc.on_local_process(lambda: "ran", local_process_index=0)())
    probe("first", lambda: _inside(acc.main_process_first()))
    probe("local first", lambda: _inside(acc.local_main_process_first()))
    probe("autocast", lambda: _inside(acc.autocast()))
    probe("context parallel", lambda: _inside(acc.maybe_context_parallel()))
    probe("verify_device_map", acc.verify_device_map, model)
    probe("register", acc.register_for_checkpointing, 3)
    probe("register scheduler", acc.register_for_checkpointing, scheduler)
    probe("hook", acc.register_save_state_pre_hook, lambda *_: None)
    probe("load hook", acc.register_load_state_pre_hook, lambda *_: None)
    probe("load nothing", acc.load_state, str(folder / "no"))
    probe("load unnamed", acc.load_state)
    probe("tracker", acc.get_tracker, "nothing")
    probe("skip 0", lambda: type(acc.skip_first_batches(loader, 0)).__name__)
    probe("skip", lambda: [b[0].tolist() for b in acc.skip_first_batches(loader, 2)])
    probe("free_memory", acc.free_memory)
    probe("free objects", acc.free_memory, Net(), [1])
    probe("after free", lambda: [len(acc._models), len(acc._optimizers), len(acc._dataloaders), acc.step])
    probe("clear", acc.clear, Net())
    probe("getattr", getattr, acc, "nothing_like_this")


def _split(acc: Accelerator, items: Any, **given: Any) -> Any:
    with acc.split_between_processes(items, **given) as mine:
        return mine


def _inside(context: Any) -> Any:
    with context as value:
        return value


def loop(folder: Path) -> dict[str, Any]:
    """A loop with accumulation: sync flags, steps, rates, norms, gradients."""
    probe = Probe()
    for steps, size in ((1, 8), (2, 8), (2, 12)):
        acc = fresh(gradient_accumulation_steps=steps)
        model, optimizer, scheduler, loader = acc.prepare(*objects(size))
        rows = []
        for x, y in loader:
            with acc.accumulate(model):
                loss = (model(x)[:, 0] - y).square().mean()
                acc.backward(loss)
                norm = acc.clip_grad_norm_(model.parameters(), 1.0) if acc.sync_gradients else None
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rows.append(
                [acc.sync_gradients, round(float(loss), 4), None if norm is None else round(float(norm), 4),
                 round(scheduler.get_last_lr()[0], 6), acc.step, acc.optimizer_step_was_skipped,
                 acc.gradient_state.end_of_dataloader, acc.gradient_state.remainder]
            )  # fmt: skip
        probe(f"loop {steps} {size}", lambda rows=rows: rows)
        probe(
            f"weights {steps} {size}",
            lambda model=model: [round(p.sum().item(), 4) for p in model.parameters()],
        )
        probe(
            f"clip kind {steps} {size}",
            lambda acc=acc, model=model: type(acc.clip_grad_norm_(model.parameters(), 1.0)).__name__,
        )
    probe("clip value", lambda: acc.clip_grad_value_(model.parameters(), 1.0))
    probe("no_sync", lambda: _inside(acc.no_sync(model)))
    probe("no_sync plain", lambda: _inside(acc.no_sync(Net())))
    probe("trigger_sync", lambda: _inside(acc.trigger_sync_in_backward(model)))
    probe("unscale", acc.unscale_gradients)
    probe("accumulate", lambda: _inside(acc.accumulate(model)))
    probe("accumulate nothing", lambda: _inside(acc.accumulate()))
    probe("backward kwargs", lambda: acc.backward(model(x).sum(), retain_graph=True))
    return probe.notes


def wrappers(folder: Path) -> dict[str, Any]:
    """The prepared optimizer and scheduler, and the gradient state."""
    probe = Probe()
    acc = fresh()
    model, optimizer, scheduler, _ = acc.prepare(*objects())
    names = "optimizer scaler accelerator_state gradient_state device_placement step_was_skipped state"
    probe.values("optimizer", optimizer, names)
    probe.values("optimizer", optimizer, "param_groups defaults _is_overflow _is_accelerate_prepared no_such")
    probe("optimizer is one", isinstance, optimizer, torch.optim.Optimizer)
    probe("optimizer state", lambda: sorted(optimizer.state_dict()))
    probe("optimizer step", optimizer.step)
    probe("optimizer closure", optimizer.step, lambda: torch.tensor(2.0))
    probe("optimizer zero", optimizer.zero_grad)
    probe("optimizer zero none", lambda: optimizer.zero_grad(set_to_none=False))
    probe("optimizer train", optimizer.train)
    probe("optimizer eval", optimizer.eval)
    probe("optimizer add", optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(1))]})
    probe("optimizer groups", lambda: len(optimizer.param_groups))
    probe("optimizer load", lambda: optimizer.load_state_dict(optimizer.state_dict()))
    probe("optimizer twice", lambda: acc.prepare(optimizer) is optimizer)
    probe(
        "optimizer alone", lambda: AcceleratedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))
    )
    probe.values(
        "scheduler",
        scheduler,
        "scheduler optimizers split_batches step_with_optimizer gradient_state base_lrs last_epoch no_such",
    )
    probe("scheduler lr", scheduler.get_last_lr)
    probe("scheduler step", scheduler.step)
    probe("scheduler lr after", scheduler.get_last_lr)
    probe("scheduler state", lambda: sorted(scheduler.state_dict()))
    probe("scheduler load", lambda: scheduler.load_state_dict(scheduler.state_dict()))
    probe("scheduler print", scheduler.print_lr)
    probe("scheduler get_lr", scheduler.get_lr)
    probe("scheduler is one", isinstance, scheduler, torch.optim.lr_scheduler.LRScheduler)
    probe("scheduler alone", lambda: AcceleratedScheduler(scheduler.scheduler, optimizer).optimizers)
    probe("prepared twice", lambda: acc.prepare(acc.prepare(model)) is acc.prepare(model))
    probe("model mark", lambda: model._is_accelerate_prepared)
    probe("state type", lambda: type(AcceleratorState()).__name__)
    probe("partial", lambda: PartialState().num_processes)
    return probe.notes


JOBS = {"accelerator": accelerator, "loop": loop, "wrappers": wrappers}
