"""Where a Fabric loop is: in its data, and in the batches of one update.

A user's loop cannot be sent somewhere else; what it iterates over can. A training loader asks for a
boundary before it fetches a batch: there a step begins and a replica group heals. If a heal moves
the loader's place, the loop gets its next batch from there, in the same `for`.

A *window* is the batch (or the accumulated batches) of a Fabric loop's update. Every backward pass
that synchronizes is a step of the quorum: it has a vote of its own, and is tried again from kept
gradients until it is committed (`ft_core.collectives.retry`). A batch may hold several, as a GAN's
does. The loop is the user's and can't be rewound. So a replica group whose peers are in the middle
of a window starts with the window's first batch, and leaves out what its peers have done already.

| | gradients | `optimizer.step()` | collectives |
|---|---|---|---|
| before the place where the peers are | stay local | does nothing | what the peers got |
| from there on | averaged, committed | updates | over the participants |
| void, until the loader fetches a batch | zeros | does nothing | this process's value |

A window is void after this group has healed inside it: what the loop holds belongs to another
place.

A loop over `range` counts its own passes over the data. One that comes back, and has peers in a later pass,
runs through its *past*: outside of the quorum, in a void window, each loader shows it one batch in place of a pass.
It joins again, and heals, where its count is its peers'. `strategy.epochs` goes there at once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

from ft_core.heal.random_numbers import unchanged
from ft_lightning.shared.draws import Draws, begin_pass, bring, is_stream, state_of
from ft_lightning.shared.epoch_rest import (
    Origin,
    batches_left,
    goes_on,
    read_so_far,
    what_is_not_known,
)
from ft_lightning.trainer.batches import adopt, release

log = logging.getLogger("ft_lightning")


Place = tuple[int, int, bool, Any]
"""Of an iteration: its epoch and batch, whether it is under way, and the state of its draws, or of a stream."""


ALIKE = (
    "call the same collectives in the same order in all replica groups, and decide about them by what heals "
    "(strategy.epochs, strategy.batch_idx, what was given to strategy.register)"
)

OF_EACH_PLACE = ("places", "data", "states")
"""In `Progress.state_dict`: lists with an item for each loader."""

_NO_DRAWS = Draws(None)
"""Made here: when Python ends, loaders may die after the names of this module are gone."""


@dataclass(slots=True, eq=False)
class LoaderPlace:
    """The place of one loader. Of one that the script has dropped (it may make one for each epoch), only
    numbers are left.

    Attributes:
        known: what gives the batches, held weakly.
        processes: among how many its data is divided.
        epoch: how often the loader was iterated before, which samplers are seeded with.
        turn: the same by the loop's own count, which no heal changes.
        batch: how many batches of this epoch were given out.
        given: how many batches the iteration under way has given to its loop: what `enumerate` counts.
        at_hand: the number of the last one in its epoch, also after a heal to another place; -1: none.
        active: an iteration is under way.
        exhausted: the last iteration came to the end of the data.
        moved: the iteration under way must continue at another place.
        resumed: the next iteration continues this epoch instead of beginning the next.
        placeable: the loader can go to a place, and its epochs are as long in all processes.
        sampler: the DistributedSampler that divides its data; None: nothing that Fabric knows does.
        origin: how the batches of an epoch are numbered that was resumed with other batches.
        draws: the orders of its sampler, if that has a generator of its own.
        stream: the state with which the next iteration of a stream begins; None: it begins as it would.
        shown: the batch that a loop in its past is shown, if it was read.
    """

    known: weakref.ref[Any] | None = None
    processes: int = 1
    epoch: int = -1
    turn: int = -1
    batch: int = 0
    given: int = 0
    at_hand: int = -1
    active: bool = False
    exhausted: bool = False
    moved: bool = False
    resumed: bool = False
    placeable: bool = True
    sampler: Any = None
    origin: Origin = field(default_factory=Origin)
    draws: Draws = field(default_factory=lambda: Draws(None))
    stream: Any = None
    shown: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, loader: Any, processes: int = 1) -> LoaderPlace:
        """Of a loader that begins."""
        place = cls(processes=processes)
        place.known = weakref.ref(loader, place._dropped)
        return place

    def _dropped(self, _: object) -> None:
        self.known = self.sampler = self.stream = self.shown = None
        self.draws = _NO_DRAWS

    @property
    def loader(self) -> Any:
        """What gives the batches; None: the script has dropped it."""
        return None if self.known is None else self.known()

    @property
    def uncounted(self) -> int:
        """By how much the loop's own count of this epoch's batches is too small."""
        return self.batch - self.given

    @property
    def is_over(self) -> bool:
        """Whether peers have ended the iteration that the loop has begun, by its own count."""
        return self.turn < self.epoch + (not (self.active or self.resumed))

    def begin_counting(self) -> None:
        """The training begins here, where a checkpoint may have brought the loop."""
        self.turn = self.epoch - self.resumed

    def now(self) -> Place:
        """Where `go_to` brings another process's iteration."""
        under_way = self.active or self.resumed
        stream = self.stream
        if stream is None:
            stream = state_of(self.loader, begun=under_way and self.batch > 0)
        return self.epoch, self.batch, under_way, self.draws.state() or stream

    def go_to(self, epoch: int, batch: int, active: bool, data: Any = None) -> None:
        """Go to the place of another process's (or an earlier) iteration. `data`: its draws, or its state of the
        data, if those are a stream that has one."""
        self.resumed = active
        if self.active:
            self.moved = self.moved or (epoch, batch) != (self.epoch, self.batch)
        if self.moved or not self.active:
            if is_stream(self.loader):
                self.stream = data
            else:  # before its first batch an iteration has not drawn its order
                self.draws.take(data, ended=not active or not 0 < batch < len(self.loader))
        self.epoch, self.batch = epoch, batch

    def read_again(self) -> None:
        """From the batch that is asked for next, in another share of the data."""
        self.moved = True
        self.draws.take(self.draws.state(), ended=self.batch == 0)

    def read_so_far(self) -> dict[str, int]:
        """For a `state_dict`: what `resume` needs to know besides the place."""
        origin = self.origin.of(self.epoch)
        return {**read_so_far(self.loader, origin), "processes": self.processes}

    def resume(
        self, epoch: int, batch: int, active: bool, before: dict[str, int], data: Any
    ) -> str:
        """Go to the place of a `state_dict`; a sentence for the user, if it can't be said which samples
        are left of the epoch, else ""."""
        processes = before.get("processes", self.processes)
        same, unknown = processes == self.processes, ""
        found = goes_on(self.loader, before, epoch=epoch, done=batch, same_world=same)
        if found is None and active and batch and self.placeable:
            unknown = what_is_not_known(processes, self.processes, batch)
        origin, number = found or (Origin(epoch), batch)
        self.moved = self.moved or (self.active and origin != self.origin.of(epoch))
        self.origin = origin
        self.go_to(epoch, number, active, data)
        return unknown


class Progress:  # no dataclass: Fabric takes those for collections, and copies them
    """How far a Fabric loop is; heals with the model. Save it with every checkpoint:
    `fabric.save(path, {"model": model, "optimizer": optimizer, "progress": strategy.progress})`.
    Thread: the loop's writes, between two batches; any may read.

    Attributes:
        epoch: epochs that `strategy.epochs` has completed.
        step: committed optimizer steps.
        places: of the loaders, in the order in which they were set up.
        lead: of the loader whose batches are trained on, with which windows begin; None: none was read yet.
        unknown: a sentence, if it can't be said which samples are left of the loaded epoch; else "".
    """

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self.places: list[LoaderPlace] = []
        self.lead: LoaderPlace | None = None
        self.unknown = ""
        self._passed = -1

    def end_epoch(self) -> None:
        """A turn of the loop over `strategy.epochs` is over."""
        self.epoch += 1
        self._passed = -1 if self.lead is None else self.lead.epoch

    def completed(self) -> int:
        """Epochs. One is completed when the pass over its data is: scripts save after that, within the epoch's turn of
        their loop."""
        lead = self.lead
        return self.epoch + (lead is not None and lead.epoch > self._passed and not lead.active)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        places = [[p.epoch, p.batch, int(p.active)] for p in self.places]
        return {
            "epoch": self.completed(),
            "step": self.step,
            "places": places,
            "data": [p.read_so_far() for p in self.places],
            "states": [p.now()[3] for p in self.places],
        }

    def take(self, state: dict[str, Any]) -> None:
        """Go to the place of a peer, which may have set up more loaders since its first batch: for each validation,
        say. Those begin as the script sets them up."""
        mine = len(self.places)
        self.load_state_dict({**state, **{key: state[key][:mine] for key in OF_EACH_PLACE}})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of a `state_dict`. Raises ValueError for another number of loaders."""
        if len(state["places"]) != len(self.places):
            raise ValueError(
                f"the state is of {len(state['places'])} data loaders, and {len(self.places)} are "
                "set up: call fabric.setup_dataloaders before fabric.load, with the same loaders"
            )
        self.epoch, self.step, self._passed = state["epoch"], state["step"], -1
        data = state.get("data") or [{} for _ in self.places]  # of 0.1.0
        states = state.get("states") or [None for _ in self.places]
        said = [
            place.resume(epoch, batch, bool(active), before, its)
            for place, (epoch, batch, active), before, its in zip(
                self.places, state["places"], data, states, strict=True
            )
        ]
        self.unknown = next(filter(None, said), "")


class _PlacedSampler:
    """A (batch) sampler whose iterations leave out the first items, or give `chosen` ones: index
    arithmetic only."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.skip, self.draws = sampler, 0, Draws(sampler)
        self.chosen: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        # Forgets nothing: a loader with workers makes two iterators, and uses the second.
        if self.chosen is None:
            return islice(self.draws.follow(lambda: iter(self._sampler)), self.skip, None)
        return iter(self.chosen)

    def begin_at(self, place: LoaderPlace) -> None:
        """Iterations begin there."""
        self.skip, self.chosen = 0, None
        origin = place.origin.of(place.epoch)
        if origin == Origin(place.epoch):
            self.skip = place.batch
        else:
            self.chosen = batches_left(place.loader, origin)[place.batch - origin.batch :]

    def __len__(self) -> int:
        return len(self._sampler)


def follow(
    loader: Any,
    place: LoaderPlace,
    *,
    boundary: Callable[[], None],
    in_past: Callable[[], bool],
    set_epoch: Callable[[Any, int], None],
) -> None:
    """Make iterations of `loader` follow `place`; `boundary` is called before a batch is fetched. `in_past`: whether
    the iteration that is under way shows one batch, and ends.

    Map-style data is placed by its sampler, which must give the same order for the same epoch. A stream is
    placed by its state. One that has none starts over, and the log says so.
    """
    release(loader, "_ft_sampler")  # it may have been set up before, for another Fabric, say
    placeable = place.placeable = not is_stream(loader)
    sampler = _PlacedSampler(loader._index_sampler) if placeable else None
    if sampler is not None:
        place.draws = sampler.draws
    loader._ft_sampler = sampler  # its class, below, lives until the garbage collector runs

    def methods(cls: Any) -> dict[str, Any]:
        def __iter__(self: Any) -> Iterator[Any]:
            return _batches(self, cls, place, self._ft_sampler, boundary, in_past, set_epoch)

        return {
            "__iter__": __iter__,
            **({"_index_sampler": property(lambda self: self._ft_sampler)} if placeable else {}),
        }

    adopt(loader, methods)


def _batches(
    loader: Any,
    cls: Any,
    place: LoaderPlace,
    sampler: _PlacedSampler | None,
    boundary: Callable[[], None],
    in_past: Callable[[], bool],
    set_epoch: Callable[[Any, int], None],
) -> Iterator[Any]:
    place.turn += 1
    if in_past():
        yield from _shown(loader, cls, place, sampler)
        return
    place.shown = None
    if place.resumed:
        place.resumed, place.moved = False, place.batch > 0
    else:
        place.epoch, place.batch, place.moved = place.epoch + 1, 0, False
        place.draws.begin()
    place.active, place.exhausted, place.given = True, False, 0
    length = len(loader) if sampler is not None else None
    batches: Iterator[Any] | None = None
    over = False
    try:
        while True:
            if length is None or place.batch < length:
                boundary()
                if over := in_past():
                    batches = None
                    yield from _shown(loader, cls, place, sampler)
                    return
            if length is not None and place.batch >= length:
                place.exhausted = True
                return
            if batches is None or place.moved:
                batches = None  # ends the workers of the old one
                set_epoch(loader, place.epoch)
                if sampler is not None:
                    sampler.begin_at(place)
                else:
                    _place_stream(loader, place, cls.__name__)
                place.moved, place.stream = False, None
                # Within an epoch its peers draw nothing here: torch seeds workers, and the sampler draws an order.
                with unchanged() if place.batch else nullcontext():
                    batches = cls.__iter__(loader)
            assert batches is not None
            try:
                batch = next(batches)
            except StopIteration:
                place.exhausted = True
                return
            place.at_hand = place.batch
            place.batch += 1
            place.given += 1
            yield batch
    finally:
        place.active, place.resumed = False, place.resumed and over


def _shown(
    loader: Any, cls: Any, place: LoaderPlace, sampler: _PlacedSampler | None
) -> Iterator[Any]:
    """One batch, if there is any, for a loop in its past. It does not move what the loader draws its orders from;
    a stream goes to its peers' place afterwards."""
    if place.shown is None:
        with unchanged(), place.draws.unchanged():
            if sampler is not None:
                sampler.skip, sampler.chosen = 0, None
            place.shown = tuple(islice(cls.__iter__(loader), 1))
    yield from place.shown


def _place_stream(loader: Any, place: LoaderPlace, name: str) -> None:
    if bring(loader, place.stream):
        return
    begin_pass(loader)
    if place.moved:
        log.warning(
            "the data of %s starts over: an iterable without state_dict and load_state_dict has no position to "
            "go to, so some samples are seen twice or not at all in this epoch",
            name,
        )


# ---------------------------------------------------------------------- the window


class Where(Enum):
    """Where in the loop a quorum is asked for."""

    BOUNDARY = "before a batch"
    BATCH = "in a batch"
    ROUND = "in an agreement"


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """How far the members are in their window; heals with the state.

    Attributes:
        committed: backward passes that were committed.
        passes: calls of `fabric.backward`.
        agreements: collectives since the last commit, or since the window's first batch.
    """

    committed: int = 0
    passes: int = 0
    agreements: int = 0


class Window:
    """The window under way. Thread: the loop's, or autograd's while the loop waits in backward.

    Attributes:
        open: it was begun, and no backward pass has been committed since.
        void: the rest of this pass of the loop counts for nothing.
        arrived: this pass is where the peers are.
        fresh: there are committed gradients for an optimizer.
        place: how far this group is, or (before it has arrived) its peers are.
        results: of the agreements since the window's first batch, (call, result) in their order; heal with
            the state. A group that joins in the middle of a window answers its own calls with them.
    """

    def __init__(self) -> None:
        self.open = self.void = self.fresh = self._uncounted = False
        self.arrived = True
        self.place = WindowPlace()
        self.results: list[tuple[str, Any]] = []
        self._left_out = self._passes = self._answered = 0

    @property
    def muted(self) -> bool:
        """Gradients stay local: they are committed already, or void."""
        return self.void or self._left_out > 0

    @property
    def local(self) -> bool:
        """Collectives stay local: the peers are past them, or will not come to them."""
        return self.void or not self.arrived

    def start_over(self) -> None:
        """The next pass is a new window's."""
        self.place = WindowPlace()
        self.results = []

    def begin(self) -> None:
        """A pass begins with the window's first batch; what `place` says is left out."""
        self._left_out, self._passes, self._answered = self.place.committed, 0, 0
        self.open, self.void, self.fresh = True, False, False
        self.arrived = self.place == WindowPlace()

    def agreed(self) -> None:
        """A collective was called."""
        if self.arrived:
            place = self.place
            self.place = WindowPlace(place.committed, place.passes, place.agreements + 1)

    def answer(self, call: str) -> Any:
        """What the peers got from the call at hand, before this group has come to their place. Raises RuntimeError if
        they have called another one there."""
        if self.arrived or self.void or self._answered == len(self.results):
            return None
        theirs, result = self.results[self._answered]
        if theirs != call:
            raise RuntimeError(
                f"this process came back, and calls fabric.{call} where its peers have called fabric.{theirs}: {ALIKE}"
            )
        self._answered += 1
        return result

    def before_backward(self) -> None:
        """`fabric.backward` is called."""
        if not self.muted and self._passes >= self.place.passes:
            self.arrived = True
        self._passes += 1

    def gradients(self) -> bool:
        """The first gradients of a backward pass: whether they are to be averaged."""
        if self.muted:
            return False
        self.arrived = True
        return True

    def after_backward(self) -> None:
        """`fabric.backward` returns."""
        if self.arrived:
            place = self.place
            self.place = WindowPlace(place.committed, self._passes, place.agreements)

    def committed(self) -> None:
        """A backward pass is committed."""
        self.place = WindowPlace(self.place.committed + 1, self._passes, 0)
        self.open, self.fresh, self._uncounted = False, True, True

    def refused(self) -> None:
        """The gradients of a backward pass have stayed local."""
        self._left_out = max(0, self._left_out - 1)

    def count_update(self) -> bool:
        """An optimizer steps: whether it is the first one since the last commit."""
        first, self._uncounted = self._uncounted, False
        return first

    def break_off(self) -> None:
        """The rest of this pass is void: it does not move the place, which is its peers' if it healed."""
        self.void, self.arrived = True, False
