"""What the processes of a job share of a transformers' Trainer, besides Accelerate's objects.

A Trainer counts steps, and keeps results in variables, that an operation of Accelerate does not reach. A
process that comes back takes them from its peers at two places: with the step that they are in what that
step's row is made of, as it was when the step began; and with the operation that they wait in all of it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import weakref
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ft_accelerate.runtime.loaders import passed, peers_have_passed
from ft_accelerate.runtime.models import FollowsTheScript

TOKENS, RESULTS = "_total_train_tokens", "_metrics"
"""What TRL's trainers make their rows of: a total, and lists of results since the last row, by mode and name."""


class SharedTrainerState(FollowsTheScript):
    """A Trainer's state besides Accelerate's objects, as plain data. The loop's thread only.

    A peer's state is kept until this process has arrived at the peer's position, and loaded then: in
    between, Trainer counts the steps that it fast-forwards through.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer: weakref.ref[Any] = weakref.ref(trainer)
        self.peers_state: dict[str, Any] = {}
        """Until this process has arrived at their position; then empty."""
        self.best_step: int | None = None
        """Whose evaluation was the best so far. Trainer's own knows it not always: with transformers 4.57 not
        under `save_strategy="best"`."""
        self.arrived_with: dict[str, Any] = {}
        """Trainer's state, as this process has found it where it has arrived last."""
        self._evaluated: list[str] = []
        """Data of which peers have begun an evaluation, by the names that Trainer keeps their loaders by."""
        self._begun: dict[str, Any] = {}
        self._decisions: dict[str, Any] = {"step": None, "events": []}
        """After a step: what was decided at each event on results, in order."""
        self._events: Counter[str] = Counter()
        """How often each has come with this step, also in a past."""

    def begin_step(self) -> None:
        """A step begins, with what its row will be made of. In a step that the peers have done, with theirs:
        where they are, this has been changed by the step, and by its row."""
        trainer = self._trainer()
        if trainer is None:
            return
        scheduler = trainer.lr_scheduler
        if begun := self.peers_state.get("begun"):
            trainer._globalstep_last_logged = begun["last_logged"]
            trainer._total_loss_scalar = begun["total_loss"]
            # With which Trainer saves: if there is one, it has the processes wait for each other.
            trainer.state.best_global_step = begun["best"]
            if begun["scheduler"] is not None:
                scheduler.load_state_dict(copy.deepcopy(begun["scheduler"]))
        self._begun = {
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "best": trainer.state.best_global_step,
            "scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        }

    def decided(self, event: str, control: Any) -> None:
        """The callbacks have heard of this event on results, and decided whether to stop, evaluate and save."""
        self._heard(event)
        self._decisions["events"].append([event, control.state()["args"]])

    def decide_as_peers(self, event: str, control: Any) -> None:
        """Results are not told to the callbacks of a process that runs through its past. What these have decided
        in its peers at this event, in a step that they have not left yet."""
        count, theirs = self._heard(event), self.peers_state.get("decisions", {})
        if theirs.get("step") != self._decisions["step"]:
            return
        said = [decision for name, decision in theirs["events"] if name == event]
        if count <= len(said):
            vars(control).update(said[count - 1])

    def _heard(self, event: str) -> int:
        """How often it has come with this step."""
        trainer = self._trainer()
        step = None if trainer is None else int(trainer.state.global_step)
        if self._decisions["step"] != step:
            self._decisions, self._events = {"step": step, "events": []}, Counter()
        self._events[event] += 1
        return self._events[event]

    def evaluates(self, name: str, loader: Any) -> None:
        """Trainer is about to begin a pass over this loader, which it keeps by `name` if its workers stay."""
        if name in self._evaluated:
            peers_have_passed(loader)

    def state_dict(self) -> dict[str, Any]:
        """Plain data; empty once the Trainer is gone. Raises TypeError for what Trainer could not save either."""
        trainer = self._trainer()
        if trainer is None:  # it was collected, its accelerator was not
            return {}
        scheduler = trainer.lr_scheduler
        callbacks = (
            _in_json([type(c).__name__, c.state()], f"the state of {type(c).__name__}")
            for c in _exportable(trainer)
        )
        return {
            "callbacks": f"[{', '.join(callbacks)}]",
            "state": _in_json(dataclasses.asdict(trainer.state), "Trainer's state (a logged row)"),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "rates": _rates(trainer),
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "best_step": self.best_step,
            "begun": self._begun,
            "decisions": self._decisions,
            "evaluated": sorted({*self._evaluated, *_evaluated(trainer)}),
            "counted": _counted(trainer),
            "flos": trainer.current_flos,  # an int at 0, which travels as a different tensor from 0.0
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a peer's state until this process has arrived at its position."""
        self.peers_state = state

    def is_past(self, state: dict[str, Any], *, told: bool) -> bool:
        """Epochs are counted anew from the checkpoint with which it begins: one about which
        nothing is told can't be found."""
        trainer = self._trainer()
        step = 0 if trainer is None else int(trainer.state.global_step)
        return step > json.loads(state["state"])["global_step"] if told else step > 0

    def arrive(self) -> None:
        """This process has arrived at its peer's position: load the peer's state."""
        trainer, found, self.peers_state = self._trainer(), self.peers_state, {}
        if trainer is None or not found:
            return
        mine = trainer.state
        self.best_step = found.get("best_step")  # none in what an older version has kept
        self._begun = found.get("begun", {})
        self._evaluated = found.get("evaluated", [])
        self._decisions = copy.deepcopy(found.get("decisions", self._decisions))
        self.arrived_with = json.loads(found["state"])
        for name, value in self.arrived_with.items():
            if not name.startswith("is_"):  # whether this process is the first, and such
                setattr(mine, name, value)
        states = json.loads(found["callbacks"])
        for callback in _exportable(trainer):
            for place, (name, state) in enumerate(states):
                if name == type(callback).__name__:
                    vars(callback).update({**state["args"], **state["attributes"]})
                    del states[place]
                    break
        if trainer.lr_scheduler is not None and found["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(found["scheduler"])
        for group, rate in zip(trainer.optimizer.param_groups, found["rates"], strict=False):
            group["lr"] = rate
        if hasattr(trainer, "_tr_loss"):  # a variable of the loop's before transformers 5
            trainer._tr_loss.fill_(found["loss"])
        trainer._total_loss_scalar = found["total_loss"]
        trainer._globalstep_last_logged = found["last_logged"]
        trainer.current_flos = found["flos"]
        _count_as(trainer, found.get("counted", ""))


_of: MutableMapping[Any, SharedTrainerState] = WeakIdKeyDictionary()
"""By identity: a Trainer may be a dataclass (TRL has some), which has no hash."""


def share(trainer: Any) -> SharedTrainerState:
    """Begin a training of `trainer`."""
    _of[trainer] = _of[trainer.callback_handler] = shared = SharedTrainerState(trainer)
    return shared


def shared_by(owner: Any) -> SharedTrainerState | None:
    """That of a Trainer, or of its `CallbackHandler`; None: it has not trained here."""
    return _of.get(owner)


def _exportable(trainer: Any) -> list[Any]:
    from transformers.trainer_callback import ExportableState

    all_ = [*trainer.callback_handler.callbacks, trainer.control]
    return [callback for callback in all_ if isinstance(callback, ExportableState)]


def _in_json(value: Any, name: str) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise TypeError(
            f"{name} can neither travel to a process that comes back nor be in a checkpoint of Trainer: "
            f"{error}. Make it numbers, texts, lists and dicts"
        ) from None


def _evaluated(trainer: Any) -> list[str]:
    """Of which data this process has begun an evaluation, with workers that stay."""
    loaders = getattr(trainer, "_eval_dataloaders", {})
    return [name for name, loader in loaders.items() if passed(loader)]


def _counted(trainer: Any) -> str:
    """What TRL's trainers count by themselves; "" where these names are something else."""
    results = getattr(trainer, RESULTS, {})
    if not isinstance(results, dict) or not all(isinstance(by, dict) for by in results.values()):
        return ""
    try:
        return json.dumps([getattr(trainer, TOKENS, None), results])
    except TypeError:
        return ""


def _count_as(trainer: Any, counted: str) -> None:
    """Count on as a peer. In place: the script may hold a list, and waits for what it appends."""
    if not counted or not _counted(trainer):
        return
    tokens, results = json.loads(counted)
    if hasattr(trainer, TOKENS):
        setattr(trainer, TOKENS, tokens)
    for mode, theirs in results.items():
        mine = getattr(trainer, RESULTS).setdefault(mode, {})
        for name in mine.keys() - theirs.keys():
            del mine[name]
        for name, values in theirs.items():
            mine.setdefault(name, [])[:] = values


def _rates(trainer: Any) -> list[float]:
    if trainer.optimizer is None:
        return []
    return [float(group["lr"]) for group in trainer.optimizer.param_groups]
