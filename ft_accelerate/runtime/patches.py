"""What stands in Accelerate's place: each name, and the code for it. See `install`."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import accelerate.accelerator as accelerator_module
import accelerate.data_loader as data_loader_module
import accelerate.local_sgd as local_sgd_module
import accelerate.optimizer as optimizer_module
import accelerate.scheduler as scheduler_module
import accelerate.state as state_module
import accelerate.utils.operations as operations_module
import accelerate.utils.random as random_module
import torch
from torch import nn

from ft_accelerate.plugin.options import FaultTolerancePlugin
from ft_accelerate.runtime import periodic as local_sgd
from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime.checkpoint_folders import save_whole
from ft_accelerate.runtime.loaders import Passes, skipping
from ft_accelerate.runtime.models import FaultTolerantModel
from ft_accelerate.runtime.torch_proxy import ddp_proxy, distributed_proxy
from ft_accelerate.runtime.world_collectives import Collectives, nothing_to_synchronize

log = logging.getLogger("ft_accelerate")

Replacement = tuple[Any, str, Any]
Seam = tuple[str, str, tuple[str, ...]]
"""(module, name in it, parameters that it must have)."""
OTHERS = {
    "DEEPSPEED": ("DeepSpeed", ("deepspeed_plugin", "deepspeed_plugins")),
    "FSDP": ("FSDP", ("fsdp_plugin",)),
    "MEGATRON_LM": ("Megatron-LM", ("megatron_lm_plugin",)),
    "PARALLELISM_CONFIG": ("ParallelismConfig", ("parallelism_config", "torch_tp_plugin")),
}


def replacements() -> list[Replacement]:
    """(owner, name, what to put there)."""
    return [*_modules(), *_states(), *_accelerator(), *_steps(), *_local_sgd()]


def _wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Replacement:
    original = inspect.getattr_static(owner, name)
    return owner, name, functools.wraps(original)(make(original))


def check_seams(seams: Sequence[Seam], package: ModuleType, advice: str) -> None:
    """Raise RuntimeError, in one sentence, if a name that we replace has moved in `package`.

    `advice`: the version to install.
    """
    moved = next((text for seam in seams if (text := _moved(*seam))), "")
    if moved:
        name = package.__name__
        raise RuntimeError(
            f"ft_accelerate does not know {name} {package.__version__} ({moved}): install "
            f"{advice}, or train without fault tolerance"
        )


def _moved(module: str, name: str, parameters: Sequence[str]) -> str:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError):
        return f"{module}.{name} is not there"
    if not parameters:
        return ""
    try:
        known = inspect.signature(getattr(found, "__func__", found)).parameters
    except (TypeError, ValueError):
        return f"{module}.{name} is not a function"
    lost = [p for p in parameters if p not in known]
    return f"{module}.{name} takes no {lost[0]!r}" if lost else ""


# ---------------------------------------------------------------------- what modules see as torch


def _modules() -> list[Replacement]:
    world = Collectives(processes.current)
    names = {
        name: getattr(world, name)
        for name in (
            "get_world_size", "get_rank", "init_process_group", "all_gather", "all_reduce",
            "all_gather_into_tensor", "broadcast", "all_gather_object", "broadcast_object_list",
            "barrier",
        )
    }  # fmt: skip

    def seeds(tensor: Any, src: int = 0, group: Any = None) -> None:
        """Before there is anything to heal generators are synchronized; then they heal."""
        beginning = processes.current().beginning
        (world.broadcast if beginning else nothing_to_synchronize)(tensor, src, group)

    over_quorum = distributed_proxy(**names)
    return [
        (operations_module, "torch", over_quorum),
        (state_module, "torch", over_quorum),
        (random_module, "torch", distributed_proxy(broadcast=seeds)),
        (accelerator_module, "torch", ddp_proxy(_Model, **names)),
    ]


class _ModelMeta(type):
    """`isinstance(model, DistributedDataParallel)` in Accelerate means torch's, ours included."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.parallel.DistributedDataParallel)


class _Model(metaclass=_ModelMeta):
    """Accelerate's DistributedDataParallel."""

    def __new__(cls, module: nn.Module, **kwargs: Any) -> FaultTolerantModel:  # type: ignore[misc]
        kwargs = {k: v for k, v in kwargs.items() if v is not None}
        if next(module.parameters()).device.type == "cpu":
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        return processes.current().wrap(module, **kwargs)


# ---------------------------------------------------------------------- which processes are there


def _states() -> list[Replacement]:
    partial = state_module.PartialState
    is_main = inspect.getattr_static(partial, "is_main_process")
    is_local_main = inspect.getattr_static(partial, "is_local_main_process")

    def init(original: Any) -> Any:
        def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
            if processes.activate() is not None:
                processes.as_one_process()
                cpu = cpu or not torch.cuda.is_available()
            original(self, cpu, **kwargs)

        return __init__

    def is_main_process(self: Any) -> bool:
        runtime = processes.active()
        return runtime.leader if runtime is not None else is_main.fget(self)

    def is_local_main_process(self: Any) -> bool:
        runtime = processes.active()
        return runtime.local_leader if runtime is not None else is_local_main.fget(self)

    def first(original: Any) -> Any:
        def main_process_first(self: Any) -> Any:
            runtime = processes.active()
            if runtime is None or runtime.ready or runtime.startup.together():
                return original(self)
            return runtime.one_at_a_time()

        return main_process_first

    return [
        _wrapped(partial, "__init__", init),
        (partial, "is_main_process", property(is_main_process, doc=is_main.__doc__)),
        (partial, "is_local_main_process", property(is_local_main_process)),
        _wrapped(partial, "main_process_first", first),
        _wrapped(partial, "local_main_process_first", first),
    ]


# ---------------------------------------------------------------------- Accelerator


def _accelerator() -> list[Replacement]:
    owner = accelerator_module.Accelerator
    signature = inspect.signature(owner.__init__)

    def init(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            handlers = list(given.get("kwargs_handlers") or [])
            ours = [h for h in handlers if isinstance(h, FaultTolerancePlugin)]
            if len(ours) > 1:
                raise ValueError("You can only pass one FaultToleranceKwargs in kwargs_handlers.")
            if ours:
                exists = bool(state_module.PartialState._shared_state)
                processes.activate_with(ours[0], state_exists=exists)
                given["kwargs_handlers"] = [h for h in handlers if h not in ours]
            runtime = processes.activate()
            if runtime is not None:
                _refuse_others(given)
            bound = inspect.BoundArguments(signature, given)  # type: ignore[arg-type]
            original(*bound.args, **bound.kwargs)
            if runtime is not None:
                _refuse_unspread(self, runtime)
                runtime.adopt(self)

        return __init__

    return [
        _wrapped(owner, "__init__", init),
        _wrapped(owner, "prepare_data_loader", _prepare_data_loader),
        _wrapped(owner, "join_uneven_inputs", _join_uneven_inputs),
        _wrapped(owner, "pad_across_processes", _pad_across_processes),
        _wrapped(owner, "save_state", _save_state),
        _wrapped(owner, "save_model", _unless_catching_up),
        _wrapped(owner, "save", _unless_catching_up),
        _wrapped(owner, "init_trackers", _init_trackers),
        _wrapped(owner, "log", _log),
        _wrapped(owner, "end_training", _end_training),
    ]


def _refuse_others(given: dict[str, Any]) -> None:
    for switch, (name, arguments) in OTHERS.items():
        if processes.uses(switch) or any(given.get(a) is not None for a in arguments):
            raise ValueError(
                f"fault tolerance does not work together with {name}, which spreads one model over "
                f"processes that must all live: leave out {name}, or train without fault tolerance"
            )
    for handler in given.get("kwargs_handlers") or []:
        hook = getattr(handler, "comm_hook", None)
        if hook is not None and getattr(hook, "value", "no") != "no":
            raise ValueError(
                "fault tolerance averages gradients itself, and DistributedDataParallel takes one "
                "communication hook only: leave out comm_hook"
            )


def _refuse_unspread(accelerator: Any, runtime: Any) -> None:
    if accelerator.num_processes != runtime.num_processes:
        raise ValueError(
            f"Accelerate sees {accelerator.num_processes} processes where there are "
            f"{runtime.num_processes} in all replica groups ({accelerator.distributed_type}): fault "
            "tolerance trains on CPUs and CUDA devices"
        )


def _prepare_data_loader(original: Any) -> Any:
    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if processes.active() is not None:
            if self.dispatch_batches:
                raise ValueError(
                    "dispatch_batches=True has one process read for all, which fault tolerance "
                    "can't rely on: leave it out, so that each process reads its own batches"
                )
            self.dataloader_config.dispatch_batches = False
        return original(self, data_loader, *args, **kwargs)

    return prepare_data_loader


def _join_uneven_inputs(original: Any) -> Any:
    def join_uneven_inputs(self: Any, joinables: Any, even_batches: Any = None) -> Any:
        if processes.active() is None:
            return original(self, joinables, even_batches)
        log.warning(
            "join_uneven_inputs does nothing under fault tolerance: all replica groups get the "
            "same number of batches (even_batches)"
        )
        return nullcontext(joinables)

    return join_uneven_inputs


def _pad_across_processes(original: Any) -> Any:
    def pad_across_processes(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is None:
            return original(self, tensor, *args, **kwargs)
        try:
            return original(self, tensor, *args, **kwargs)
        except RuntimeError:
            if runtime.live and runtime.contributes:
                raise
            return tensor  # longer than its peers' tensors: it does not count for them yet

    return pad_across_processes


def _save_state(original: Any) -> Any:
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is None:
            return original(self, output_dir, *args, **kwargs)
        if runtime.live:
            return save_whole(original, self, output_dir, *args, **kwargs)
        settings = self.project_configuration
        if settings.automatic_checkpoint_naming:
            self.wait_for_everyone()  # as the original does
            settings.iteration += runtime.live  # its peers stood in this, and count on now
        return None  # they have saved at this place, or do so now

    return save_state


def _unless_catching_up(original: Any) -> Any:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is not None and not runtime.live:
            return None  # its peers have saved at this place already
        return original(self, *args, **kwargs)

    return save


_waiting: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""Accelerators whose trackers start when their process becomes the main one: Accelerate starts them
in the main process only. If that one dies, the next one starts its own when it first logs."""


def _init_trackers(original: Any) -> Any:
    def init_trackers(self: Any, *args: Any, **kwargs: Any) -> Any:
        if processes.active() is None:
            return original(self, *args, **kwargs)
        if self.is_main_process:
            _waiting.pop(self, None)
            original(self, *args, **kwargs)
        else:
            _waiting[self] = (args, kwargs)
        return None

    return init_trackers


def _log(original: Any) -> Any:
    init_trackers = inspect.getattr_static(accelerator_module.Accelerator, "init_trackers")

    def log_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if processes.active() is not None and self.is_main_process and self in _waiting:
            given, named = _waiting.pop(self)
            init_trackers(self, *given, **named)
        return original(self, *args, **kwargs)

    return log_


def _end_training(original: Any) -> Any:
    def end_training(self: Any) -> Any:
        result = original(self)
        runtime = processes.active()
        if runtime is not None:
            runtime.close(finished=True)
        return result

    return end_training


# ---------------------------------------------------------------------- steps and batches


def _steps() -> list[Replacement]:
    loader = data_loader_module.DataLoaderShard
    sampler = data_loader_module.BatchSamplerShard
    optimizer = optimizer_module.AcceleratedOptimizer
    scheduler = scheduler_module.AcceleratedScheduler

    def passes(original: Any) -> Any:
        replacement = Passes(processes.current, original)

        def __iter__(self: Any) -> Iterator[Any]:
            return original(self) if processes.active() is None else replacement.iterate(self)

        return __iter__

    return [
        _wrapped(loader, "__iter__", passes),
        _wrapped(sampler, "__iter__", skipping),
        _wrapped(optimizer, "step", _optimizer_step),
        _wrapped(scheduler, "step", _scheduler_step),
    ]


def _local_sgd() -> list[Replacement]:
    owner = local_sgd_module.LocalSGD

    def enter(original: Any) -> Any:
        return lambda self: local_sgd.enter(self, functools.partial(original, self))

    def leave(original: Any) -> Any:
        return lambda self, *error: local_sgd.leave(self, functools.partial(original, self), *error)

    def average(original: Any) -> Any:
        return lambda self: local_sgd.average(self, functools.partial(original, self))

    return [
        _wrapped(owner, "__enter__", enter),
        _wrapped(owner, "__exit__", leave),
        _wrapped(owner, "_sync_and_avg_model_params", average),
    ]


def _optimizer_step(original: Any) -> Any:
    def step(self: Any, closure: Any = None) -> Any:
        runtime = processes.active()
        if runtime is None or not self.gradient_state.sync_gradients:
            return original(self, closure)
        if not runtime.live:
            runtime.position.step_taken()
            self._is_overflow = False
            if self.scaler is not None:
                self.scaler.update(self.scaler.get_scale())  # forgets what was unscaled
            return None
        if closure is not None:
            raise ValueError(
                "an optimizer that evaluates a closure reduces gradients several times a step, "
                "which fault tolerance can't vote on: use another optimizer"
            )
        runtime.check_gradients()
        original(self, closure)
        runtime.position.step_taken()
        return None

    return step


def _scheduler_step(original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is not None and not runtime.live:
            return None  # its peers have done this tick; it comes with their state
        return original(self, *args, **kwargs)

    return step
