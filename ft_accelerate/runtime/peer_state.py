"""What a process that comes back takes from its peers: all that `save_state` would save, and more.

Models, optimizers, schedulers, scaler, registered objects, generators and seeds of the data loaders'
samplers, states of stateful loaders, the number of the next checkpoint. And what was where the window began (`Begun`).
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ft_accelerate.runtime.divided_data import (
    drawn_before_fetch,
    generator_of,
    is_stateful,
    seeded_sampler,
)
from ft_accelerate.runtime.models import FollowsTheScript
from ft_accelerate.runtime.script_position import Iteration, Target
from ft_core.heal import digest
from ft_core.heal.changed import ChangedInStep
from ft_core.heal.random_numbers import RandomNumbers
from ft_core.heal.shardings import local_part

Accelerators = Mapping[int, Any]
"""Those of a script that live, by their numbers in the order in which they were made."""


def dump(
    accelerators: Accelerators, target: Target | None, *, models: bool = True
) -> dict[str, Any]:
    """The state as it is, and the place it belongs to. Tensors are the live ones. `models` False:
    without models and optimizers."""
    state: dict[str, Any] = {
        "accelerators": {str(n): _dump_one(each) for n, each in accelerators.items()}
    }
    if not models:
        for each in state["accelerators"].values():
            each.update({key: [None] * len(each[key]) for key in ("models", "optimizers")})
    if target is not None:
        state["place"] = {f.name: getattr(target, f.name) for f in fields(Target)}
    return state


def _dump_one(accelerator: Any) -> dict[str, Any]:
    return {
        **_places_of_one(accelerator),
        "schedulers": [s.state_dict() for s in accelerator._schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "custom": [o.state_dict() for o in accelerator._custom_objects],
        "save_iteration": accelerator.project_configuration.iteration,
        "generators": [g.get_state() for g in _generators_of_one(accelerator)],
        "seeds": [s.initial_seed for s in _seeded(accelerator)],
        "loaders": [loader.dl_state_dict for loader in _stateful(accelerator)],
    }


def places(accelerators: Accelerators) -> dict[str, Any]:
    """The tensors into which a state may be received. Any thread, while the loop waits."""
    return {"accelerators": {str(n): _places_of_one(each) for n, each in accelerators.items()}}


def _places_of_one(accelerator: Any) -> dict[str, Any]:
    return {
        "models": [_unwrapped(m).state_dict() for m in accelerator._models],
        "optimizers": [o.optimizer.state_dict() for o in accelerator._optimizers],
    }


def target_in(state: dict[str, Any]) -> Target:
    """The place that came with a state."""
    place = dict(state["place"])
    for name in ("window", "ops", "active", "begun_before", "trainings"):
        if place[name] is not None:
            place[name] = tuple(place[name])
    place["active"] = tuple((seq, done, generator) for seq, done, generator in place["active"])
    return Target(**place)


def restore(
    accelerators: Accelerators,
    state: dict[str, Any],
    *,
    models: bool,
    arrived: bool = True,
    decisive: bool = True,
) -> None:
    """Put a dumped state in place; it stays usable for another call.

    An accelerator that is not in the state keeps what it has: the peers' one is gone. `models` False:
    not parameters and moments, which a graph under way may refer to. `arrived` False: the script is on
    its way to the state's place, and may add parameter groups to its optimizers before it is there; of
    those that it lacks nothing is loaded. And by what it decides there it has not decided yet: that is as it was where
    the window began. `decisive` False: not that (registered objects, schedulers, hyperparameters), which is of the
    script's own place. Raises RuntimeError if the script has prepared other things than its peers' scripts.
    """
    for number, accelerator in accelerators.items():
        if (its := state["accelerators"].get(str(number))) is not None:
            if arrived:
                _refuse_other_groups(accelerator, its)
            _restore_one(accelerator, its, models=models, decisive=decisive)
    if decisive and not arrived:
        begin_again(accelerators, state)


def _refuse_other_groups(accelerator: Any, state: dict[str, Any]) -> None:
    for optimizer, values in zip(accelerator._optimizers, state["optimizers"], strict=False):
        mine = len(optimizer.optimizer.param_groups)
        if values is not None and mine != (theirs := len(values["param_groups"])):
            raise RuntimeError(
                f"an optimizer of this process has {mine} parameter groups, that of its peers has "
                f"{theirs}: let the same values decide everywhere when a group is added, and register "
                "objects that hold such values with accelerator.register_for_checkpointing"
            )


def _restore_one(accelerator: Any, state: dict[str, Any], *, models: bool, decisive: bool) -> None:
    for name, mine in (
        ("models", accelerator._models),
        ("optimizers", accelerator._optimizers),
        ("schedulers", accelerator._schedulers),
        ("custom", accelerator._custom_objects),
    ):
        if len(mine) != len(state[name]):
            what = "objects registered for checkpointing" if name == "custom" else name
            raise RuntimeError(
                f"this process has {len(mine)} {what}, its peers have {len(state[name])}: prepare "
                "and register everything before the first training batch is asked for"
            )
    own = None if decisive else _rates(accelerator)
    if models:
        for model, values in zip(accelerator._models, state["models"], strict=True):
            _copy_into(_unwrapped(model), values)
        for optimizer, values in zip(accelerator._optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer.optimizer, values)
    else:
        for optimizer, values in zip(accelerator._optimizers, state["optimizers"], strict=True):
            if values is not None and _lacks_moments(optimizer.optimizer, values):
                load_optimizer(optimizer.optimizer, values)
            elif values is not None:
                _load_rates(optimizer.optimizer, values["param_groups"])
    if own is not None:
        _put_rates(accelerator, own)
    for scheduler, values in zip(accelerator._schedulers, state["schedulers"], strict=True):
        if decisive:
            scheduler.load_state_dict(copy.deepcopy(values))
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(copy.deepcopy(state["scaler"]))
    for thing, values in zip(accelerator._custom_objects, state["custom"], strict=True):
        if decisive or isinstance(thing, FollowsTheScript):
            thing.load_state_dict(copy.deepcopy(values))
    accelerator.project_configuration.iteration = state["save_iteration"]
    for generator, value in zip(_generators_of_one(accelerator), state["generators"], strict=False):
        generator.set_state(value)
    for sampler, seed in zip(_seeded(accelerator), state["seeds"], strict=False):
        sampler.initial_seed = seed
    for loader, values in zip(_stateful(accelerator), state["loaders"], strict=False):
        # What `save_state` writes; the position itself is in `ScriptPosition`.
        loader.dl_state_dict = values


def _load_rates(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """The hyperparameters: a scheduler sets them in a replay, too."""
    for mine, theirs in zip(optimizer.param_groups, groups, strict=False):
        mine.update(_hyperparameters(theirs))


def _rates(accelerator: Any) -> list[list[dict[str, Any]]]:
    """The hyperparameters of each optimizer's groups, copied."""
    return [list(map(_hyperparameters, o.optimizer.param_groups)) for o in accelerator._optimizers]


_FIXED = (float, int, str, tuple)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """A copy. Of values that do not change there is none: there may be hundreds of groups, at each window's begin."""
    return {
        name: value if value is None or isinstance(value, _FIXED) else copy.deepcopy(value)
        for name, value in group.items()
        if name != "params"
    }


def _put_rates(accelerator: Any, rates: list[list[dict[str, Any]]]) -> None:
    for optimizer, groups in zip(accelerator._optimizers, rates, strict=False):
        _load_rates(optimizer.optimizer, groups)


def _lacks_moments(optimizer: Any, values: dict[str, Any]) -> bool:
    """Whether the script has added a parameter group since the state was first loaded."""
    return any(
        number in values["state"] and parameter not in optimizer.state
        for mine, theirs in zip(optimizer.param_groups, values["param_groups"], strict=False)
        for parameter, number in zip(mine["params"], theirs["params"], strict=False)
    )


def load_optimizer(optimizer: Any, values: dict[str, Any]) -> None:
    """As `load_state_dict`, but each tensor keeps the type that it has there: torch gives it that of its
    parameter, and moments in float32 of parameters in bfloat16 would not be the peers'. And parameter
    groups that this optimizer lacks are left out."""
    groups = values["param_groups"][: len(optimizer.param_groups)]
    numbers = [n for group in groups for n in group["params"]]
    state = {n: values["state"][n] for n in numbers if n in values["state"]}
    optimizer.load_state_dict({**values, "state": state, "param_groups": groups})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        mine = optimizer.state.get(parameter, {})
        for name, value in values["state"].get(number, {}).items():
            held = mine.get(name)
            if isinstance(value, Tensor) and isinstance(held, Tensor) and held.dtype != value.dtype:
                mine[name] = value.detach().clone().to(held.device)


def moments(optimizers: Iterable[Any]) -> list[Tensor]:
    """The tensors of these optimizers' states, in an order that is the same in all processes."""
    return [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]


def take_start(
    accelerators: Accelerators, active: Iterable[Iteration], state: dict[str, Any], models: bool
) -> None:
    """Begin with a dumped `state`. A pass over data that is under way takes over its shuffling, too."""
    mine = generators(accelerators)
    before = [generator.get_state() for generator in mine]
    restore(accelerators, state, models=models)
    for iteration in active:
        for generator, old in zip(mine, before, strict=True):
            known = iteration.generator_state
            if known is not None and torch.equal(known, old):
                iteration.generator_state = generator.get_state()


def lineage_of_start(accelerators: Accelerators, *, allow_objects: bool) -> str:
    """Name of the state in which a run starts; equal for replica groups that start alike."""
    state = dump(accelerators, None)
    for each in state["accelerators"].values():
        each.pop("custom")  # may rightly differ (paths, clocks), and may hold anything
    return f"start-{digest(state, allow_objects=allow_objects)}"


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A dumped state in memory of its own."""
    own: dict[str, Any] = tree_map_only(Tensor, lambda t: t.detach().clone(), state)
    return own


LARGEST_KEPT = 64 * 1024
"""Bytes of a registered object's state, pickled, that is kept as it was where the window began."""


class _Pickler(pickle.Pickler):
    """In C but for tensors: a list of thousands of losses takes microseconds, where `deepcopy` takes milliseconds."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):  # a mean of losses may have a graph
            return value.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class Begun:
    """What was where the window began, with which a process that comes back is led there, and computes it once more:
    torch's random numbers, parameters that the script changes itself, what it has registered, schedulers and hyperparameters. Of these its peers' values
    are further, and would have it decide otherwise than they have decided: whether a loss is the best, say, whether it
    stops, and so which operations follow. A large one (an average of weights) decides about nothing, and is not kept.

    A process that its script has seeded otherwise than its peers, and that was led through its past, is seeded anew
    when it has come to them: else it would draw once more what it drew at its start. The loop's thread only.
    """

    def __init__(self, accelerators: Callable[[], Accelerators]) -> None:
        self._numbers = RandomNumbers()
        self._drawn: Tensor | None = None
        """What the random numbers were where the window's first batch was read."""
        self._peers_drawn: Tensor | None = None
        self.changed = ChangedInStep()
        self.weights = Weights(accelerators)
        self._lack_draws = False
        self._decisive: dict[str, dict[str, list[Any]]] = {}
        self._large: set[tuple[int, int]] = set()

    def mark(self, accelerators: Accelerators, loader: Any = None) -> None:
        """A window begins, with a batch of this loader."""
        self._numbers.mark()
        self._drawn = None if loader is None else drawn_before_fetch(loader)
        self.changed.forget()
        self._mark_decisive(accelerators)

    def computes(self, accelerators: Accelerators) -> None:
        """The script is about to compute a batch. Until the window's first one other processes' weights may come."""
        if not self.changed.begun:
            self.changed.begin(_models(accelerators))

    def _mark_decisive(self, accelerators: Accelerators) -> None:
        self._decisive = {
            str(n): {
                "custom": [self._kept((n, i), o) for i, o in enumerate(each._custom_objects)],
                "schedulers": [copy.deepcopy(s.state_dict()) for s in each._schedulers],
                "rates": _rates(each),
            }
            for n, each in accelerators.items()
        }

    def _kept(self, place: tuple[int, int], thing: Any) -> bytes:
        """Its state, pickled; b"": it is not kept."""
        if place in self._large or isinstance(thing, FollowsTheScript):
            return b""
        state, kept = thing.state_dict(), io.BytesIO()
        try:
            _Pickler(kept).dump(state)
        except Exception:
            # An object in it has no copy, for any reason; nor does it travel, as is said.
            return b""
        if kept.tell() > LARGEST_KEPT:
            self._large.add(place)
            return b""
        return kept.getvalue()

    def marked(self) -> dict[str, Any]:
        """For a peer that comes to this window. Plain values, as in the rest of a state."""
        begun = {number: dict(kept) for number, kept in self._decisive.items()}
        for kept in begun.values():
            kept["custom"] = [pickle.loads(each) if each else None for each in kept["custom"]]
        return {"numbers": self._numbers.marked(), "drawn": self._drawn, "begun": begun}

    def add_to(self, state: dict[str, Any], *, drifts: bool) -> None:
        """What a peer needs that comes to the window. `drifts`: optimizers update models between the steps that are voted
        on, and in its past the peer leaves that out. So it takes them as they are."""
        state.update(self.marked())
        if drifts:
            return
        for each in state["accelerators"].values():
            each["models"] = self.changed.before(each["models"])

    def relocated(self, *, remembers: bool) -> None:
        """A peer's state was taken. `remembers`: the script runs through a past in which it draws nothing, or less."""
        self._lack_draws |= remembers
        self.changed.forget()

    def arrive(self, accelerators: Accelerators, state: dict[str, Any]) -> None:
        """The script stands where the window of its peers, who have dumped `state`, began."""
        self.draw_as(state)
        begin_again(accelerators, state)
        self._mark_decisive(accelerators)
        self.changed.begin(_models(accelerators))

    def draw_as(self, state: dict[str, Any]) -> None:
        """Draw from here on what the peers, who have dumped `state`, have drawn from their mark on."""
        if self._numbers.take(state["numbers"]):
            self._numbers.put_back()
            self._peers_drawn = state["drawn"]
            self._lack_draws = False

    def drawn_before_fetch(self) -> Tensor | None:
        """The peers' random numbers where they had read the first batch of the window to which this process has
        come; once."""
        drawn, self._peers_drawn = self._peers_drawn, None
        return drawn

    def go_live(self, *numbers: int) -> None:
        """`numbers`: which no other process or moment has."""
        if self._lack_draws:
            reseed(torch.initial_seed(), *numbers)
            self._lack_draws = False


def begin_again(accelerators: Accelerators, state: dict[str, Any]) -> None:
    """Put in place by what a script decides, as it was where the window of its peers, who have dumped `state`, began."""
    for number, accelerator in accelerators.items():
        its = state["accelerators"].get(str(number), {}).get("custom", ())
        begun = state.get("begun", {}).get(str(number), {})
        both = zip_longest(its, begun.get("custom", ())[: len(its)])
        for thing, (now, then) in zip(accelerator._custom_objects, both, strict=False):
            if not isinstance(thing, FollowsTheScript):
                thing.load_state_dict(copy.deepcopy(now if then is None else then))
        for scheduler, values in zip(
            accelerator._schedulers, begun.get("schedulers", ()), strict=False
        ):
            scheduler.load_state_dict(copy.deepcopy(values))
        _put_rates(accelerator, begun.get("rates", []))


class Weights:
    """Whether a script changes its models on its way to its peers, as by `load_state_dict`: they were received in
    place, so there is no other copy of them. The loop's thread only."""

    def __init__(self, accelerators: Callable[[], Accelerators]) -> None:
        self._accelerators, self._healed = accelerators, ""

    def note(self) -> None:
        """They are the peers'. Later calls count for nothing until `changed` was asked."""
        self._healed = self._healed or self._digest()

    def changed(self) -> bool:
        """Whether they are no more what they were at `note`, if that was called."""
        healed, self._healed = self._healed, ""
        return bool(healed) and healed != self._digest()

    def _digest(self) -> str:
        models = [model for each in self._accelerators().values() for model in each._models]
        return digest([[*model.parameters(), *model.buffers()] for model in models])


def reseed(*numbers: int) -> None:
    """Seed the global generators of this process, from numbers that no other process or moment has."""
    seed = np.random.SeedSequence([n % (1 << 63) for n in numbers]).generate_state(1, np.uint64)[0]
    random.seed(int(seed))
    np.random.seed(int(seed) % (1 << 32))
    torch.manual_seed(int(seed) % (1 << 63))


def generators(accelerators: Accelerators) -> list[torch.Generator]:
    """The generators of all prepared loaders' samplers, in the order of preparation."""
    return [found for each in accelerators.values() for found in _generators_of_one(each)]


def _generators_of_one(accelerator: Any) -> list[torch.Generator]:
    """Each once."""
    found: list[torch.Generator] = []
    for loader in accelerator._dataloaders:
        generator = generator_of(loader)
        if generator is not None and all(generator is not g for g in found):
            found.append(generator)
    return found


def _seeded(accelerator: Any) -> list[SeedableRandomSampler]:
    samplers = [seeded_sampler(loader) for loader in accelerator._dataloaders]
    return [sampler for sampler in samplers if sampler is not None]


def _stateful(accelerator: Any) -> list[Any]:
    return [loader for loader in accelerator._dataloaders if is_stateful(loader)]


def _models(accelerators: Accelerators) -> dict[str, torch.nn.Module]:
    return {
        f"{number}.{i}.": _unwrapped(model)
        for number, each in accelerators.items()
        for i, model in enumerate(each._models)
    }


def _unwrapped(model: Any) -> Any:
    """Without torch.compile's and DistributedDataParallel's wrappers, which prefix names."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "module", model) if hasattr(model, "reducer") else model


@torch.no_grad()
def _copy_into(module: Any, values: dict[str, Any]) -> None:
    """As `load_state_dict`, but a graph that was built before may still run backward."""
    mine = module.state_dict()
    if mine.keys() != values.keys():
        module.load_state_dict(values)  # raises with torch's own message on what is missing
    for name, value in values.items():
        held = mine[name]
        if isinstance(held, Tensor):
            here, there = local_part(held), local_part(value)
            if here.data_ptr() != there.data_ptr() or here.device != there.device:
                here.data.copy_(there)
        else:
            module.load_state_dict({name: value}, strict=False)
