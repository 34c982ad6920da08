"""Puts fault tolerance into Accelerate's classes, in place, and takes it out again.

`SEAMS` has each name of Accelerate that we lean on, and what stands there instead. A process that is
not told to be fault tolerant runs Accelerate's own code through all of this.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import KwargsHandler, extract_model_from_parallel
from torch import nn

from ft_accelerate import seams
from ft_accelerate.options import (
    FaultTolerancePlugin,
    as_one_process,
    is_enabled,
    refuse_excluded,
    refuse_notebooks,
)
from ft_accelerate.runtime import (
    accelerate_trackers,
    batch_size,
    group_shards,
    loaders,
    periodic,
    succession,
    trainer,
)
from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime import world_collectives as world
from ft_accelerate.runtime.checkpoints import named, save_again, save_whole
from ft_accelerate.runtime.divided_data import (
    divided_by_batches,
    index_sampler,
    read_counted,
    whether_to_know_shards,
)
from ft_accelerate.runtime.models import FaultTolerantModel
from ft_accelerate.runtime.process import is_main, saves, unless_catching_up, while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import EARLY, Phase
from ft_accelerate.seams import Seam, around
from ft_core.launch.import_hook import when_imported
from ft_core.step import update

log = logging.getLogger("ft_accelerate")

KNOWN = "accelerate 1.11 to 1.15"


def install() -> None:
    """Replace the names; idempotent. Raises RuntimeError if this Accelerate is not a known one."""
    seams.put(SEAMS, KNOWN)
    trainer.watch()
    succession.watch()
    when_imported("torchmetrics.metric", _on_metrics)
    when_imported("torch.distributed.nn", _on_collectives_with_gradients)
    when_imported("sentence_transformers.util.distributed", _on_embeddings)


def uninstall() -> None:
    """Give Accelerate its own code back, and leave the quorum."""
    processes.forget()
    seams.take_out((*SEAMS, *METRICS, *COLLECTIVES_WITH_GRADIENTS, *EMBEDDINGS))


@dataclass
class FaultToleranceKwargs(FaultTolerancePlugin, KwargsHandler):
    """
    Use this object in your [`~accelerate.Accelerator`] to train fault-tolerantly. Its fields are
    those of [`~ft_accelerate.FaultTolerancePlugin`]; what is not passed comes from the environment.

    Creating one is what makes `Accelerator` know it.

    Example:

    ```python
    from accelerate import Accelerator
    from ft_accelerate import FaultToleranceKwargs

    accelerator = Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])
    ```
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        install()


# ---------------------------------------------------------------------- what modules see as torch


def _over_quorum(_: Any) -> Any:
    return world.torch_proxy(world.FUNCTIONS)


def _on_metrics(module: ModuleType) -> None:
    if not any(seam.moved() for seam in METRICS):
        seams.put(METRICS, "another torchmetrics")


def _on_collectives_with_gradients(module: ModuleType) -> None:
    seams.put(COLLECTIVES_WITH_GRADIENTS, "another torch")


def _on_embeddings(module: ModuleType) -> None:
    if not any(seam.moved() for seam in EMBEDDINGS):
        seams.put(EMBEDDINGS, "another sentence_transformers")


def _with_our_rank(dist: Any) -> Any:
    return world.TorchProxy(dist, get_rank=world.get_rank, all_reduce=world.all_reduce)


def _with_our_world(dist: Any) -> Any:
    return world.TorchProxy(dist, get_rank=world.get_rank, get_world_size=world.get_world_size)


def _with_our_model(_: Any) -> Any:
    return world.torch_proxy(world.FUNCTIONS, DistributedDataParallel=_Model)


def _with_healed_seeds(_: Any) -> Any:
    return world.torch_proxy({"broadcast": world.broadcast_seeds})


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
        runtime = processes.current()
        trains_already = runtime.manager is not None
        model = runtime.wrap(module, **kwargs)
        if trains_already:
            world.make_alike(module)
        return model


# ---------------------------------------------------------------------- which processes are there


@around
def _init_state(original: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:
    runtime = processes.activate()
    if runtime is not None:
        as_one_process()
        cpu = cpu or not torch.cuda.is_available()
    original(self, cpu, **kwargs)
    if runtime is not None and self.device.type == "cpu":
        # Where a group sees its own GPUs alone, it is the number of one of these, as scripts take it to be.
        self.local_process_index = runtime.group_ranks.local_process_index
    group_shards.mark(self)


@while_active
def _is_local_main_process(runtime: Runtime, original: Any, self: Any) -> bool:
    if leads := runtime.local_leader:
        runtime.own_writes.may_begin()
    return leads


@while_active
def _main_process_first(runtime: Runtime, original: Any, self: Any) -> Any:
    if runtime.ready or runtime.startup.together():
        return original(self)
    return runtime.startup.one_at_a_time()


@around
def _launch_from_notebook(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(function, *args, **kwargs).arguments
    if is_enabled() and given.get("num_processes") != 1:
        refuse_notebooks(original.__name__)
    return original(function, *args, **kwargs)


# ---------------------------------------------------------------------- Accelerator


@around
def _init_accelerator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    signature = inspect.signature(original)
    given = signature.bind(self, *args, **kwargs).arguments
    handlers = list(given.get("kwargs_handlers") or [])
    ours = [h for h in handlers if isinstance(h, FaultTolerancePlugin)]
    if len(ours) > 1:
        raise ValueError("You can only pass one FaultToleranceKwargs in kwargs_handlers.")
    if ours:
        processes.activate_with(ours[0], state_exists=bool(PartialState._shared_state))
        given["kwargs_handlers"] = [h for h in handlers if h not in ours]
    runtime = processes.activate()
    if runtime is not None:
        _refuse_others(given)
        group_shards.choose(runtime, given.get("fsdp_plugin"), given.get("parallelism_config"))
    bound = inspect.BoundArguments(signature, given)  # type: ignore[arg-type]
    original(*bound.args, **bound.kwargs)
    if runtime is not None:
        _refuse_unspread(self, runtime)
        runtime.adopt(self)
        _warn_of_a_newer_version(runtime)


_warned: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _warn_of_a_newer_version(runtime: Runtime) -> None:
    if runtime.group_ranks.number == 0 and runtime not in _warned and (text := seams.newer(KNOWN)):
        _warned.add(runtime)
        log.warning("%s", text)


def _refuse_others(given: dict[str, Any]) -> None:
    refuse_excluded(given, in_environment=True)
    for handler in given.get("kwargs_handlers") or []:
        hook = getattr(handler, "comm_hook", None)
        if hook is not None and getattr(hook, "value", "no") != "no":
            raise ValueError(
                "fault tolerance averages gradients itself, and DistributedDataParallel takes one "
                "communication hook only: leave out comm_hook"
            )


def _refuse_unspread(accelerator: Any, runtime: Runtime) -> None:
    if accelerator.num_processes != runtime.num_processes:
        raise ValueError(
            f"Accelerate sees {accelerator.num_processes} processes where there are "
            f"{runtime.num_processes} in all replica groups ({accelerator.distributed_type}): fault "
            "tolerance trains on CPUs and CUDA devices"
        )


@while_active
def _prepare_model(
    runtime: Runtime,
    original: Any,
    self: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """A model that was prepared for evaluations, and then for training: Accelerate returns it as it is, so that
    each process would train weights of its own. Here it is prepared anew. One that was prepared for training is
    returned as it is, also by Accelerate 1.11, which marks none that this method has prepared."""
    listed = any(known is model for known in self._models)
    if runtime.prepared.knows(model):
        if not listed:
            self._models.append(model)
        return model
    if getattr(model, "_is_accelerate_prepared", listed) and not evaluation_mode:
        self._models = [known for known in self._models if known is not model]
        model = extract_model_from_parallel(model, keep_fp32_wrapper=False)
        model._is_accelerate_prepared = False
    return original(self, model, device_placement, evaluation_mode)


@while_active
def _prepare_data_loader(
    runtime: Runtime, original: Any, self: Any, data_loader: Any, *args: Any, **kwargs: Any
) -> Any:
    config = self.dataloader_config
    asked = config.dispatch_batches
    if asked:
        raise ValueError(
            "dispatch_batches=True has one process read for all, which fault tolerance can't rely "
            "on: leave it out, so that each process reads its own batches"
        )
    config.dispatch_batches = False
    before = loaders.before_preparing(data_loader)
    try:
        with nullcontext() if asked is False else divided_by_batches():
            made = original(self, data_loader, *args, **kwargs)
    finally:
        config.dispatch_batches = asked
    loaders.prepared(runtime, made, before)
    return made


@while_active
@contextmanager
def _join_uneven_inputs(
    runtime: Runtime, original: Any, self: Any, joinables: Any, even_batches: Any = None
) -> Iterator[Any]:
    log.warning(
        "join_uneven_inputs joins nothing under fault tolerance: within it all processes get the same "
        "number of batches (even_batches=True)"
    )
    samplers = [each for each in map(index_sampler, self._dataloaders) if each is not None]
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = True
    try:
        yield joinables
    finally:
        for sampler, even in zip(samplers, before, strict=True):
            sampler.even_batches = even


@while_active
def _pad_across_processes(
    runtime: Runtime, original: Any, self: Any, tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        return original(self, tensor, *args, **kwargs)
    except RuntimeError:
        if runtime.live and runtime.contributes:
            raise
        return tensor  # longer than its peers' tensors: it does not count for them yet


@while_active
def _save_state(
    runtime: Runtime, original: Any, self: Any, output_dir: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if runtime.live:
        final = named(self, output_dir, runtime.saved)

        def write(save: Any) -> Any:
            written = save(original, runtime.group_ranks, self, final, *args, **kwargs)
            if runtime.leader:
                runtime.saved.remember(written)
            return written

        return runtime.saves.save(lambda: write(save_whole), lambda: write(save_again))
    settings = self.project_configuration
    if settings.automatic_checkpoint_naming:
        self.wait_for_everyone()  # as the original does
        settings.iteration += runtime.live  # its peers stood in this, and count on now
    return None  # they have saved at this place, or do so now


@while_active
def _end_training(runtime: Runtime, original: Any, self: Any) -> Any:
    accelerate_trackers.finish(self)
    result = original(self)
    if runtime.ends_early():
        runtime.close()
        raise SystemExit(f"ft_accelerate: {EARLY}")
    runtime.close(finished=True)
    return result


def _has_no_gradients(accelerator: Any, runtime: Runtime) -> bool:
    """Whether the script runs through its past, where none is computed. With fp16 the scaler counts
    along."""
    return runtime.position.phase is Phase.FAST_FORWARD and accelerator.scaler is None


@while_active
def _backward(runtime: Runtime, original: Any, self: Any, loss: Any, **kwargs: Any) -> None:
    from_memory = runtime.position.remembers
    if not _has_no_gradients(self, runtime):
        runtime.means.before_backward()
        original(self, loss, **kwargs)
    if from_memory:
        runtime.prepared.fill_gradients(loss if runtime.position.follows_inputs else None)


@while_active
def _autograd_grad(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`, with which scripts make a penalty of gradients. What models return from memory does not
    depend on inputs and parameters: zeros, where torch would raise."""
    if not runtime.position.remembers:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given.get("allow_unused"):
        return original(*args, **kwargs)
    ends, asked = (  # `model.parameters()` can be read once
        (given[name],) if isinstance(given[name], torch.Tensor) else tuple(given[name])
        for name in ("outputs", "inputs")
    )
    is_graph = all(each.requires_grad for each in asked) and any(o.requires_grad for o in ends)
    given |= {"outputs": ends, "inputs": asked, "allow_unused": True}
    found = original(**given) if is_graph else (None,) * len(asked)
    return tuple(
        torch.zeros_like(each, requires_grad=given.get("create_graph", False))
        if gradient is None
        else gradient
        for each, gradient in zip(asked, found, strict=True)
    )


@while_active
@contextmanager
def _trigger_sync(runtime: Runtime, original: Any, model: Any) -> Iterator[None]:
    """Within it a backward synchronizes whose forward was in `no_sync`. In its past a process leaves that backward
    out: torch would be left waiting for it, and average in the next one."""
    with nullcontext() if runtime.position.remembers else original(model):
        yield


@while_active
def _check_trigger(runtime: Runtime, original: Any, self: Any) -> Any:
    """In its past a process has its peers' answer, and what it has set itself, by losses that are not real, is over."""
    found = original(self)
    if not runtime.live:
        self.flag_tensor = None
    return found


@while_active
def _clip_grad_norm(
    runtime: Runtime, original: Any, self: Any, parameters: Any, *args: Any, **kwargs: Any
) -> Any:
    if _has_no_gradients(self, runtime):
        return torch.zeros((), device=self.device)
    norm = original(self, parameters, *args, **kwargs)
    # A DTensor is a part of a norm, in each rank another one.
    counts = runtime.position.measured(norm if type(norm) is torch.Tensor else None)
    return norm if counts is None else counts.to(norm.device)


@while_active
def _zero_grad(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if runtime.position.phase is not Phase.FAST_FORWARD:
        original(self, *args, **kwargs)
        runtime.means.zeroed()


@while_active
def _zero_module(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A script may drop gradients by its model, wrapped or not."""
    original(self, *args, **kwargs)
    runtime.means.zeroed()


@while_active
def _optimizer_step(runtime: Runtime, original: Any, self: Any, closure: Any = None) -> Any:
    if not self.gradient_state.sync_gradients:
        return original(self, closure)
    if not runtime.live:
        runtime.step_left_out()
        self._is_overflow = False
        if self.scaler is not None:
            self.scaler.update(self.scaler.get_scale())  # forgets what was unscaled
        return None
    if closure is not None:
        raise ValueError(
            "an optimizer that evaluates a closure reduces gradients several times a step, which "
            "fault tolerance can't vote on: use another optimizer"
        )
    if runtime.reducer.busy:
        runtime.reducer.check_complete()
    if runtime.num_processes > 1:
        runtime.prepared.refuse_unaveraged(self.optimizer)
    step = partial(original, self, closure)
    if runtime.manager is None:
        step()
    else:
        update(runtime.manager, step, partial(batch_size.begins_anew, runtime))
    runtime.position.step_taken()
    runtime.means.stepped(self.optimizer)
    return None


@while_active
def _scheduler_step(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`AcceleratedScheduler.step`: also where the script computes once more what its peers have done, since it may
    decide by the rate. They have its state."""
    if runtime.live or runtime.position.replays:
        return original(self, *args, **kwargs)
    return None


# ---------------------------------------------------------------------- a GradScaler of the script's own
# It heals with what is registered for checkpointing. In the script's past there is no gradient in which it could
# look for infinities, and what it would decide is decided: its scale stays that of the peers.

NOT_REGISTERED = (
    "this GradScaler is not registered, so a process that comes back would scale by another factor than its "
    "peers: call accelerator.register_for_checkpointing(scaler) before the first training batch, or let "
    'Accelerator(mixed_precision="fp16") scale'
)


@while_active
def _scaler_scale(runtime: Runtime, original: Any, self: Any, outputs: Any) -> Any:
    """`GradScaler.scale`. Raises ValueError if a process that comes back would not have this scaler's state."""
    if self.is_enabled() and runtime.ready:
        prepared = runtime.prepared
        own = (accelerator.scaler for accelerator in prepared.accelerators.values())
        if not any(self is known for known in (*own, *prepared.registered)):
            raise ValueError(NOT_REGISTERED)
    return original(self, outputs)


@while_active
def _scaler_unscale(runtime: Runtime, original: Any, self: Any, optimizer: Any) -> None:
    """`GradScaler.unscale_`."""
    if runtime.position.phase is not Phase.FAST_FORWARD:
        original(self, optimizer)


@while_active
def _scaler_step(
    runtime: Runtime, original: Any, self: Any, optimizer: Any, *args: Any, **kw: Any
) -> Any:
    """`GradScaler.step`. In the past the optimizer leaves out its step by itself, and counts it."""
    return original(self, optimizer, *args, **kw) if runtime.live else optimizer.step(*args, **kw)


@while_active
def _scaler_update(runtime: Runtime, original: Any, self: Any, new_scale: Any = None) -> None:
    """`GradScaler.update`. In the past it forgets what was unscaled."""
    if new_scale is None and not runtime.live:
        new_scale = self.get_scale()
    original(self, new_scale)


SEAMS = (
    *seams.table(
        {
            "accelerate.state": (
                ("PartialState.__init__", ("self", "cpu"), _init_state),
                ("PartialState.is_main_process", (), is_main),
                ("PartialState.is_local_main_process", (), _is_local_main_process),
                ("PartialState.main_process_first", ("self",), _main_process_first),
                ("PartialState.local_main_process_first", ("self",), _main_process_first),
                ("torch", (), _over_quorum),
            ),
            "accelerate.utils.operations": (
                ("torch", (), _over_quorum),
                ("_gpu_gather", ("tensor",)),
            ),
            "accelerate.utils.random": (("torch", (), _with_healed_seeds),),
            "accelerate.accelerator": (
                ("torch", (), _with_our_model),
                ("Accelerator.__init__", ("self", "kwargs_handlers"), _init_accelerator),
                ("Accelerator.prepare_model", ("self", "model"), _prepare_model),
                ("Accelerator._prepare_fsdp2", ("self",), group_shards.prepare),
                ("Accelerator._prepare_device_mesh", ("self",), group_shards.mesh_of_loaders),
                ("Accelerator.prepare_data_loader", ("self", "data_loader"), _prepare_data_loader),
                ("Accelerator.join_uneven_inputs", ("self", "joinables"), _join_uneven_inputs),
                ("Accelerator.pad_across_processes", ("self", "tensor"), _pad_across_processes),
                ("Accelerator.backward", ("self", "loss"), _backward),
                ("Accelerator.trigger_sync_in_backward", ("model",), _trigger_sync),
                ("Accelerator.clip_grad_norm_", ("self", "parameters"), _clip_grad_norm),
                ("Accelerator.check_trigger", ("self",), _check_trigger),
                ("Accelerator.save_state", ("self", "output_dir"), _save_state),
                *(
                    (name, ("fsdp_plugin", "accelerator"), replace)
                    for name, replace in group_shards.CHECKPOINTS.items()
                ),
                ("Accelerator.save_model", ("self", "model", "save_directory"), saves),
                ("Accelerator.save", ("self", "obj", "f"), saves),
                ("Accelerator.init_trackers", (), accelerate_trackers.init_trackers),
                ("Accelerator.log", (), accelerate_trackers.log_row),
                ("Accelerator.get_tracker", (), accelerate_trackers.get_tracker),
                ("Accelerator.end_training", ("self",), _end_training),
            ),
            "accelerate.utils.fsdp_utils": (
                ("fsdp2_load_full_state_dict", ("accelerator",), group_shards.load_full_state_dict),
            ),
            "accelerate.parallelism_config": (
                (
                    "ParallelismConfig.build_device_mesh",
                    ("device_type",),
                    group_shards.build_device_mesh,
                ),
                ("ParallelismConfig.fsdp_dim_names", (), group_shards.fsdp_dim_names),
            ),
            "accelerate.local_sgd": (
                ("LocalSGD.__enter__", ("self",), while_active(periodic.enter)),
                ("LocalSGD.__exit__", ("self",), while_active(periodic.leave)),
                ("LocalSGD._sync_and_avg_model_params", ("self",), while_active(periodic.average)),
            ),
            "accelerate.optimizer": (
                ("AcceleratedOptimizer.step", ("self", "closure"), _optimizer_step),
                ("AcceleratedOptimizer.zero_grad", ("self",), _zero_grad),
                # Schedule-free optimizers move the weights: those of the peers are moved already.
                ("AcceleratedOptimizer.train", ("self",), unless_catching_up),
                ("AcceleratedOptimizer.eval", ("self",), unless_catching_up),
            ),
            "accelerate.tracking": (
                ("PartialState", (), accelerate_trackers.state_of_trackers),
                ("on_main_process", ("function",)),
            ),
            "accelerate.scheduler": (("AcceleratedScheduler.step", ("self",), _scheduler_step),),
            "accelerate.data_loader": (
                ("is_datasets_available", (), around(whether_to_know_shards)),
                ("DataLoaderShard.__iter__", ("self",), while_active(loaders.iterate)),
                ("DataLoaderShard.begin", ("self",)),
                ("DataLoaderShard.end", ("self",)),
                ("BatchSamplerShard.__iter__", ("self",), around(loaders.skip_batches)),
                ("IterableDatasetShard.__iter__", ("self",), around(read_counted)),
            ),
            "torch.autograd": (("grad", ("outputs", "inputs", "allow_unused"), _autograd_grad),),
            "torch.nn.modules.module": (("Module.zero_grad", ("self",), _zero_module),),
            "torch.amp.grad_scaler": (
                ("GradScaler.scale", ("self", "outputs"), _scaler_scale),
                ("GradScaler.unscale_", ("self", "optimizer"), _scaler_unscale),
                ("GradScaler.step", ("self", "optimizer"), _scaler_step),
                ("GradScaler.update", ("self", "new_scale"), _scaler_update),
            ),
            "torch.distributed": (
                *(
                    (name, (), functools.partial(world.refuse_own_use, name))
                    for name in world.INSTEAD
                ),
                ("get_world_size", ("group",), functools.partial(world.tell_all, "get_world_size")),
                ("get_rank", ("group",), functools.partial(world.tell_all, "get_rank")),
            ),
            "torch.utils.data.distributed": (("dist", (), _with_our_world),),
        }
    ),
    *(
        Seam(module, name, ("function",), _launch_from_notebook)
        for module in ("accelerate.launchers", "accelerate")
        for name in ("notebook_launcher", "debug_launcher")
    ),
    *(
        Seam(module, "find_executable_batch_size", ("function",), batch_size.search)
        for module in ("accelerate.utils.memory", "accelerate.utils", "accelerate")
    ),
)
"""All that we lean on by name, and what takes its place."""

METRICS = tuple(
    Seam(module, "gather_all_tensors", ("result", "group"), while_active(world.gather_all_tensors))
    for module in ("torchmetrics.utilities.distributed", "torchmetrics.metric")
)
"""With which `compute()` of torchmetrics reaches all processes, as it does by default."""

COLLECTIVES_WITH_GRADIENTS = tuple(
    Seam(module, name, (), functools.partial(world.refuse_with_gradients, name))
    for module in ("torch.distributed.nn.functional", "torch.distributed.nn")
    for name in world.WITH_GRADIENTS
)

EMBEDDINGS = seams.table(
    {
        "sentence_transformers.util.distributed": (
            ("dist", (), _with_our_rank),
            ("get_rank",),
            ("all_gather", ("tensor", "with_grad"), while_active(world.gather_embeddings)),
        )
    }
)
"""With which `gather_across_devices=True` of sentence-transformers' losses reaches all processes. Its evaluators
see one process: each evaluates by itself. Where a version has other names, its gather is refused."""
