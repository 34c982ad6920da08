"""One rank of a replica group in a process of its own, for tests that kill it.

`python -m tests.process.worker RUN_OPTIONS [HELD_PHASE ...]` trains until it is told to stop, and
ends. It writes reports to its standard output and reads commands from its standard input, a JSON
object a line, and ends when that is closed, so that none outlives the tests.

Commands: {"do": "hold", "phase": P, "step": S}, {"do": "watch", "phase": P, "step": S},
{"do": "go"}, {"do": "stop"}. A *held* phase is reported ("at") and then waits for "go"; a *watched*
one is reported and goes on. Both are armed for the first time only that the phase is reached in
step S or later.

Reports: {"kind": K, ...}: began, at, step, event (telemetry), ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

PHASES = (
    "begin",  # between two steps, before start_quorum
    "forward",  # the quorum is there, nothing was reduced
    "allreduce",  # the first of two all-reduces is started, the second is not
    "reducing",  # both are started; the next thing is to wait for them
    "vote",  # both are done, the vote is not cast
    "voting",  # the next thing is the vote
    "publish",  # the state is asked for: a peer is about to heal from it
    "load",  # the healed state has arrived and is being put in place
)
"""Of a plain run; others are in `tests.ft_core.diloco.training` and `tests.ft_core.sharded.training`."""


NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run needs to know. `elements`: floats of the model; `pause_s`: pretended work a step;
    `ballast_bytes`: what else travels in a heal; `stop_at`: steps after which the run ends;
    `network`: of tests.harness.networks, in which it runs; `checkpoints`: where it saves its state
    after each `checkpoint_every` steps; `resume_at`: the step of the one to begin with; `says`: it
    prints what it logs."""

    lighthouse: str
    name: str
    seed: int = 1
    elements: int = 2_048
    ballast_bytes: int = 0
    pause_s: float = 0.002
    timeout_s: float = 20.0
    heartbeat_s: float = 0.3
    expected_replicas: int = 0
    min_replicas: int = 1
    use_async_quorum: bool = False
    commit: str = "quorum"
    rank: int = 0
    world_size: int = 1
    store_addr: str = ""
    store_port: int = 0
    stop_at: int = 0
    network: str = ""
    checkpoints: str = ""
    checkpoint_every: int = 50
    resume_at: int = 0
    says: bool = False
    outer: dict[str, Any] | None = None  # a run of `tests.ft_core.diloco.training` instead
    shards: int = (
        0  # ranks of a group that trains a model of shards (`tests.ft_core.sharded.training`)
    )
    asks_after_forward: bool = False  # of shards: a collective stands between forward and backward


@dataclass(slots=True)
class Shared:
    """What the command thread and the run share, under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    holds: dict[str, int] = field(default_factory=dict)  # phase -> first step
    watches: dict[str, int] = field(default_factory=dict)
    released: int = 0
    stopping: bool = False
    leaving: bool = False


class Reporter:
    """Writes reports; any thread. Library output goes to standard error instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def __call__(self, kind: str, **data: Any) -> None:
        with self._lock:
            self._out.write(json.dumps({"kind": kind, **data}, default=str) + "\n")


class Model:
    """A vector, its momentum, and ballast that only a heal moves."""

    def __init__(self, options: RunOptions) -> None:
        import torch

        generator = torch.Generator().manual_seed(options.seed)
        self.weights = torch.randn(options.elements, generator=generator)
        self.momentum = torch.zeros(options.elements)
        self.ballast = torch.zeros(options.ballast_bytes, dtype=torch.uint8)

    def gradient(self, step: int, contributor: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(1_000 * step + contributor)
        noise = torch.randn(self.weights.shape, generator=generator)
        return self.weights * 0.01 + noise

    def update(self, gradient: Any) -> None:
        self.momentum.mul_(0.9).add_(gradient)
        self.weights.sub_(self.momentum, alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "momentum": self.momentum, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])
        self.momentum.copy_(state["momentum"])
        self.ballast.copy_(state["ballast"])

    def digest(self) -> str:
        both = self.weights.numpy().tobytes() + self.momentum.numpy().tobytes()
        return hashlib.blake2b(both, digest_size=8).hexdigest()


class Checkpoints:
    """Files of one rank, `step.rank.name`: whole or not there. The newest two are kept."""

    def __init__(self, options: RunOptions, manager: Any, model: Model) -> None:
        import torch

        self._options, self._manager, self._model = options, manager, model
        if options.resume_at:
            saved = torch.load(self._path(options.resume_at))
            model.load_state_dict(saved["model"])
            manager.load_state_dict(saved["manager"])

    def save(self) -> None:
        """Save if this step is one of those that are saved."""
        import torch

        options, state = self._options, self._manager.state_dict()
        step, every = state["step"], options.checkpoint_every
        if step % every:
            return
        path = self._path(step)
        whole = {"model": self._model.state_dict(), "manager": state}
        torch.save(whole, f"{path}.new")
        os.replace(f"{path}.new", path)
        self._path(step - 2 * every).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        options = self._options
        return Path(options.checkpoints) / f"{step}.{options.rank}.{options.name}"


class Worker:
    """The run, in the main thread."""

    def __init__(self, report: Reporter, shared: Shared) -> None:
        self._report, self._shared = report, shared
        self._now = 0  # the step that is worked on
        self._save: Callable[[], None] = lambda: None

    def run(self, options: RunOptions) -> None:
        """One life of a replica group (of one of its ranks)."""
        if options.outer is not None:
            from tests.ft_core.diloco.training import train

            train(self, options)
            return
        if options.shards:
            from tests.ft_core.sharded.training import train_shards

            train_shards(self, options)
            return
        from ft_core.manager import Manager
        from ft_core.process_group import ProcessGroupGloo

        model = Model(options)
        limit = timedelta(seconds=options.timeout_s)

        def load(state: dict[str, Any]) -> None:
            self._at("load")
            model.load_state_dict(state)

        def save() -> dict[str, Any]:
            self._at("publish")
            return model.state_dict()

        manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=load,
            state_dict=save,
            min_replica_size=options.min_replicas,
            use_async_quorum=options.use_async_quorum,
            timeout=limit,
            heartbeat_interval=timedelta(seconds=options.heartbeat_s),
            rank=options.rank,
            world_size=options.world_size,
            store_addr=options.store_addr or None,
            store_port=options.store_port or None,
            lighthouse_addr=options.lighthouse,
            replica_id=options.name,
            expected_replicas=options.expected_replicas,
            commit=options.commit,
        )
        manager.register_compared("model", lambda: [model.weights, model.momentum])
        manager.telemetry.add_sink(
            lambda event: self._report("event", event=event.kind, t=event.wall_s, **event.data)
        )
        self._report("began", replica_id=manager.replica_id)
        if options.checkpoints:
            self._save = Checkpoints(options, manager, model).save
        try:
            self._train(manager, model, options)
        finally:
            manager.shutdown()

    def _train(self, manager: Any, model: Model, options: RunOptions) -> None:
        shared = self._shared
        asked_to_leave = False
        while True:
            with shared.changed:
                if options.pause_s:
                    shared.changed.wait_for(lambda: shared.stopping, timeout=options.pause_s)
                if shared.stopping or manager.left():
                    return
            if shared.leaving and not asked_to_leave:
                asked_to_leave = True
                manager.leave_after_step()
            if options.stop_at and manager.current_step() >= options.stop_at:
                return
            self._step(manager, model)

    def _step(self, manager: Any, model: Model) -> None:
        self._now = manager.current_step()
        self._at("begin")
        manager.start_quorum()
        self._now = manager.current_step()  # a heal may have moved it
        self._at("forward")
        gradient = model.gradient(manager.current_step(), manager.participating_rank() or 0)
        middle = len(gradient) // 2
        first = manager.allreduce(gradient[:middle])
        self._at("allreduce")
        second = manager.allreduce(gradient[middle:])
        self._at("reducing")
        first.wait()
        second.wait()
        self._at("vote")
        self._at("voting")
        committed = manager.should_commit()
        if committed:
            model.update(gradient)
            manager.updated()
            self._save()
        outcome = manager.last_outcome()
        state = manager.state_dict()
        self._report(
            "step",
            committed=committed,
            step=state["step"],
            lineage=state["lineage"],
            digest=model.digest(),
            reason=outcome.reason if outcome else "",
        )

    def _at(self, phase: str) -> None:
        """Report the phase if it is armed, and wait if it is held."""
        shared = self._shared
        with shared.changed:
            if shared.watches.get(phase, NEVER) <= self._now:
                del shared.watches[phase]
                self._report("at", phase=phase, step=self._now)
            if shared.holds.get(phase, NEVER) > self._now:
                return
            del shared.holds[phase]
            released = shared.released
            self._report("at", phase=phase, step=self._now)
            shared.changed.wait_for(lambda: shared.released > released)


def obey(shared: Shared) -> None:
    """Command thread: until the input ends, and with it the process."""
    for line in sys.stdin:
        command = json.loads(line)
        with shared.changed:
            what = command.pop("do")
            if what == "hold":
                shared.holds[command["phase"]] = command["step"]
            elif what == "watch":
                shared.watches[command["phase"]] = command["step"]
            elif what == "go":
                shared.released += 1
            elif what == "stop":
                shared.stopping = True
                shared.holds.clear()
                shared.released += 1
            shared.changed.notify_all()
    os._exit(0)


def main(options: str, *holds: str) -> None:
    report, shared = Reporter(), Shared(holds=dict.fromkeys(holds, 0))

    def leave(_signum: int, _frame: object) -> None:
        shared.leaving = True  # no lock: this interrupts whatever holds it

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=obey, args=(shared,), name="commands", daemon=True).start()
    import torch

    torch.set_num_threads(1)
    error = ""
    try:
        given = RunOptions(**json.loads(options))
        if given.says:
            own = f"%(asctime)s {given.name}.{given.rank} {os.getpid()} %(message)s"
            logging.basicConfig(level=logging.INFO, format=own, force=True)
        if given.network:
            from tests.harness.networks import enter

            enter(given.network)  # before a thread opens a socket
        Worker(report, shared).run(given)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        traceback.print_exc()
    report("ended", error=error)


if __name__ == "__main__":
    main(*sys.argv[1:])
