"""One training process: its manager, its place, its steps and operations.

    loader asks for a batch   `at_fetch`: a window begins; join, heal, serve others
    backward                  `gate`: gradients are averaged while backward goes on; when it has
                              ended the step is voted on, and tried again until it is committed
    gather, reduce, ...       `operation`: a step of its own, voted on and tried again like those
    optimizer.step            local: its gradients are committed already

So when the optimizer steps nothing can go wrong any more: a raw loop never sees a discarded step.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_map

from ft_accelerate import state as states
from ft_accelerate.course import Course, Iteration, Phase
from ft_accelerate.exchange import Diverged, Exchange, Kind
from ft_accelerate.gate import Gate
from ft_accelerate.models import FaultTolerantModel
from ft_accelerate.options import FaultTolerancePlugin, Supervision
from ft_core.config import ReplicaEnv
from ft_core.errors import QuorumUnavailable
from ft_core.manager import Manager
from ft_core.supervisor import die_with, report_joined
from ft_core.telemetry import JsonlSink
from lighthouse.messages import TORN

log = logging.getLogger("ft_accelerate")

FAR_BATCHES = 400
"""A script that has more to catch up leaves the quorum meanwhile, so that nobody waits for it."""
UNREACHABLE_PAUSE_S = 0.05


class Runtime:
    """Fault tolerance of one process. The loop's thread, but where said otherwise."""

    def __init__(self, options: FaultTolerancePlugin, supervision: Supervision) -> None:
        self.options, self._supervision = options, supervision
        self.slots = options.num_replica_groups
        self.slot = options.replica_group_id
        self.course = Course()
        self.gate = Gate(self._begin_gradients, self._fail)
        self.manager: Manager | None = None
        self.attempts_discarded = 0
        self.contributes = True
        """Whether this process's values count in the current step: it is not only healing."""
        self._accelerators: list[weakref.ref[Any]] = []
        self._models: list[weakref.ref[FaultTolerantModel]] = []
        self._open = False
        self._at = "fetch"
        self._joined = False
        self._closed = False
        self._leader = self.slot == 0 and supervision.restarts == 0
        self._healed: dict[str, Any] | None = None
        self.serve_copies = False
        """Whether the state changes between the steps that are voted on (LocalSGD)."""
        self.on_live: list[Callable[[], None]] = []
        """Called when the script stands where its peers' stood when they sent their state."""
        self._failure: Exception | None = None
        self._skipping = False
        self._starting = 0
        self._owes_report = True
        event_log = ReplicaEnv.read().event_log
        self._sink = JsonlSink(Path(event_log), name=str(self.slot)) if event_log else None
        if self._sink is not None:
            self.gate.telemetry.add_sink(self._sink)
        if supervision.pid:
            die_with(supervision.pid)
        atexit.register(self.close)

    # ------------------------------------------------------------------ who is there

    @property
    def leader(self) -> bool:
        """Whether this process is the main one: the first of those that take part."""
        return self._leader and self.course.phase is Phase.LIVE

    @property
    def live(self) -> bool:
        """Whether the script's work counts."""
        return self.course.phase is Phase.LIVE

    @property
    def ready(self) -> bool:
        """Whether there is something to train: from then on operations reach over the quorum."""
        return any(ref() is not None for ref in self._models) and not self._closed

    @property
    def participants(self) -> int:
        """Replica groups that contribute to the current (or last) step; 0 before the first."""
        if self.manager is None or not self._joined:
            return 0
        try:
            return self.manager.num_participants()
        except QuorumUnavailable:
            return 0

    def adopt(self, accelerator: Any) -> None:
        """Heal this accelerator's objects; the last one made is it."""
        self._accelerators.append(weakref.ref(accelerator))

    @property
    def accelerator(self) -> Any:
        for ref in reversed(self._accelerators):
            found = ref()
            if found is not None:
                return found
        raise RuntimeError("no Accelerator was created")

    def wrap(self, module: Any, **kwargs: Any) -> FaultTolerantModel:
        """What `prepare_model` uses in place of DistributedDataParallel."""
        model = FaultTolerantModel(
            self.gate,
            module,
            is_ghost=lambda: self.course.work_is_ghost,
            on_ghost_backward=self._ghost_backward,
            **kwargs,
        )
        self._models.append(weakref.ref(model))
        return model

    def models(self) -> list[FaultTolerantModel]:
        return [model for ref in self._models if (model := ref()) is not None]

    def training(self) -> bool:
        """Whether the script is about to train: a prepared model is in training mode."""
        return any(model.training for model in self.models())

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Before training nobody is joined to anybody: let one process of this machine in."""
        job = hashlib.blake2b(self.options.job_id.encode(), digest_size=6).hexdigest()
        path = Path(tempfile.gettempdir()) / f"ft_accelerate-{os.getuid()}-{job}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------ a batch is asked for

    def at_fetch(self, loader: Any, iteration: Iteration) -> None:
        """Before the next batch: where windows begin, and where one that is behind arrives."""
        course = self.course
        while True:
            if course.phase is Phase.GHOST:
                if not course.arrive(iteration):
                    return
                self._arrived(iteration)
                if self.manager is None:
                    self._join("fetch")
                    continue
            self._settle()
            exhausted = iteration.yielded and loader.end_of_dataloader
            if course.phase is not Phase.LIVE or exhausted or not self.ready:
                return
            if not self.training():
                return
            course.open_window(iteration)
            if self._open:
                return
            self._begin("fetch")
            if course.phase is Phase.LIVE:
                return

    def _arrived(self, iteration: Iteration) -> None:
        """The script stands where its peers' window began: forget what it did as a ghost."""
        self._restore(models=True)
        for optimizer in self.accelerator._optimizers:
            optimizer.optimizer.zero_grad()

    def _settle(self) -> None:
        """Go live if it is time."""
        models = self.course.work_is_ghost
        target = self.course.target
        if self.course.settle():
            assert target is not None
            self._restore(models=models or target.at == "fetch")
            self._healed = None
            for arrived in self.on_live:
                arrived()
            states.reseed(torch.initial_seed(), self.slot, target.events)
            log.info("live at event %s of the script", target.events)

    def _restore(self, *, models: bool) -> None:
        if self._healed is not None:
            states.restore(self.accelerator, self._healed, models=models)

    # ------------------------------------------------------------------ gradients

    def _begin_gradients(self) -> bool:
        """First bucket of a backward pass (autograd's thread): whether to reduce."""
        Variable._execution_engine.queue_callback(self._queue_finish)
        self._settle()
        self._skipping = True
        if self.course.grad_is_done:
            return False
        self._skipping = False
        self._begin("grad")
        if self.course.grad_is_done:
            self._skipping = True
            return False
        self._agree(Kind.GRADIENTS)
        return True

    def _queue_finish(self) -> None:
        # The reducer's own callback, which copies averages to the gradients, stands before it.
        Variable._execution_engine.queue_callback(self._finish_gradients)

    def _finish_gradients(self) -> None:
        """Backward is over: vote, and try again until the step is committed."""
        try:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._skipping:
                if self.course.phase is Phase.REPLAY:
                    self.course.replay_grad()
                return
            self._check_complete()
            kept = [(model, model.keep_buffers()) for model in self.models()]
            while not self._vote():
                self._begin("grad")
                if self.course.grad_is_done:
                    if self.course.phase is Phase.REPLAY:
                        self.course.replay_grad()
                    return
                if self._agree(Kind.GRADIENTS):
                    self.gate.again()
                    for model, buffers in kept:
                        model.send_buffers_again(buffers)
            self.course.graded()
        finally:
            self._skipping = False
            self.gate.over()

    def _check_complete(self) -> None:
        if any(model.unfinished() for model in self.models()):
            raise RuntimeError(
                "backward did not reach all parameters, so that gradients are missing: pass "
                "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] to "
                "Accelerator"
            )

    def check_gradients(self) -> None:
        """Before an optimizer steps: backward has left nothing half done."""
        if self.gate.busy:
            self._check_complete()

    def _ghost_backward(self) -> None:
        if self.course.phase is Phase.REPLAY and self.course.grad_is_done:
            self.course.replay_grad()

    def _fail(self, error: Exception) -> None:
        """Told when backward returns: raised in the reducer's hook it would end the process."""
        if self._failure is None:
            self._failure = error

    # ------------------------------------------------------------------ operations

    def operation(
        self,
        kind: Kind,
        attempt: Callable[[Exchange, Callable[..., Any]], Any],
        alone: Callable[[], Any],
        size: Callable[[Any], int] = lambda result: 0,
        *,
        keep: bool = True,
    ) -> Any:
        """One operation over the quorum, tried again until it is committed.

        `attempt(exchange, agree)` does it in an open attempt; what it returns counts if the
        attempt commits. `alone()` answers where this process has nobody to ask. `size(result)`
        in bytes; `keep` False: those who come back get `alone()`, since it is in their state.
        """
        course = self.course
        if not self.ready:
            return alone()
        while True:
            self._settle()
            if course.op_is_done:
                if course.phase is Phase.GHOST:
                    return alone()
                result = course.replay_op()
                return alone() if result is None else result
            self._begin("op")
            self._settle()
            if course.op_is_done:
                continue
            result = self._attempt(kind, attempt)
            if self._vote():
                course.log(result if keep else None, size(result) if keep else 0)
                return result

    def _attempt(self, kind: Kind, attempt: Callable[..., Any]) -> Any:
        def agree(nbytes: int = 0, shape: Any = ()) -> Any:
            return self._agree(kind, nbytes, shape)

        manager = self._manager
        if manager.errored() is not None:
            return None
        try:
            return attempt(Exchange(manager, self.slot, self.slots, self._device), agree)
        except ValueError:
            self.close()
            raise

    def _agree(self, kind: Kind, nbytes: int = 0, shape: Any = ()) -> Any:
        exchange = Exchange(self._manager, self.slot, self.slots, self._device)
        try:
            return exchange.agree(kind, self.course.events, self.course.agreed, nbytes, shape)
        except Diverged:
            self.close()  # the others go on without this process
            raise

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    # ------------------------------------------------------------------ the attempt

    def _begin(self, at: str) -> None:
        """Open an attempt, unless one is open: be in a quorum, heal, serve."""
        if self.manager is None:
            self._join(at)
            return
        if self._open:
            return
        self._start(at)

    def _vote(self) -> bool:
        committed = self._manager.should_commit()
        self._open = False
        self.attempts_discarded += not committed
        return committed

    def _start(self, at: str) -> None:
        self._at = at
        manager, self._starting = self._manager, threading.get_ident()
        try:
            manager.start_quorum()
        finally:
            self._starting = 0
        self._open = self._joined = True
        try:
            rank = manager.participating_rank()
            self._leader, self.contributes = rank == 0, rank is not None
        except QuorumUnavailable:
            return  # the attempt has failed already; its vote tells
        if self._owes_report:
            self._owes_report = False
            report_joined(os.environ, self._supervision.child)

    def _join(self, at: str) -> None:
        """Join (again) and learn where the others are; stay if that place is near."""
        first = not self._joined
        while True:
            self._connect(behind=not first)
            self._start(at)
            target = self.course.target
            if target is None or self.course.phase is Phase.LIVE:
                return
            if not target.reachable:
                self._leave()
                time.sleep(UNREACHABLE_PAUSE_S)
                first = False
                continue
            if self.course.distance > FAR_BATCHES:
                log.info("about %s batches behind: catching up first", self.course.distance)
                self._leave()
            return

    def _connect(self, *, behind: bool) -> None:
        options = self.options
        manager = Manager(
            _process_group(self._device, options.timeout_s),
            min_replica_size=options.min_replicas,
            use_async_quorum=False,
            timeout=timedelta(seconds=options.timeout_s),
            quorum_timeout=_seconds(options.quorum_timeout_s),
            rank=0,
            world_size=1,
            lighthouse_addr=options.lighthouse or None,
            replica_id=str(options.replica_group_id),
            job_id=options.job_id,
            expected_replicas=options.num_replica_groups,
            commit=options.commit,
            heal_allow_objects=options.heal_allow_objects,
            token=options.token,
        )
        manager.set_state_dict_fns(self._load, self._dump)
        self.gate.attach(manager)
        # A state that is on its way to its peers' is nobody's source (lighthouse.messages.TORN).
        lineage = f"{TORN}{uuid.uuid4().hex[:12]}" if behind else states.lineage_of_start(
            self.accelerator, allow_objects=options.heal_allow_objects
        )  # fmt: skip
        manager.load_state_dict({"step": 0, "batches_committed": 0, "lineage": lineage})
        self.manager = manager

    def _leave(self) -> None:
        manager, self.manager, self._open = self.manager, None, False
        self.gate.detach()
        if manager is not None:
            manager.shutdown()

    @property
    def _manager(self) -> Manager:
        if self.manager is None:
            raise RuntimeError("this process has left its quorum")
        return self.manager

    def close(self) -> None:
        """Leave for good; the others go on at once. Twice is once."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._leave()
        if self._sink is not None:
            self._sink.close()

    # ------------------------------------------------------------------ heal

    def _dump(self) -> dict[str, Any]:
        if threading.get_ident() != self._starting:  # the heal's thread asks where to receive
            return states.places(self.accelerator)
        state = states.dump(self.accelerator, self.course.describe(self._at))
        return tree_map(_copied, state) if self.serve_copies else state

    def _load(self, state: dict[str, Any]) -> None:
        """Take a peer's state, and set out for its place. Called inside `start_quorum`."""
        self._healed = state
        states.restore(self.accelerator, state, models=True)
        target = states.target_in(state)
        self.course.relocate(target)
        log.info(
            "healed; the others are in pass %s over the loaders, batch %s", *(target.window or (0, 0))
        )


def _process_group(device: torch.device, timeout_s: float) -> Any:
    from ft_core import process_group

    if device.type == "cuda":
        return process_group.ProcessGroupNCCL(timeout_s)  # type: ignore[attr-defined]
    if device.type == "cpu":
        return process_group.ProcessGroupGloo(timeout_s)
    raise ValueError(f"fault tolerance trains on cpu and cuda, not on {device.type}")


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)
