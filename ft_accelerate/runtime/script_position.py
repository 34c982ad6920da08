"""Where the script is, and how a process that comes back gets there. PURE: no torch, no IO.

All replica groups run the same script, so they issue the same *events* in the same order: gradient
steps (a backward pass that synchronizes) and operations (gather, reduce, broadcast, barriers). The
script's own variables can't be healed. Instead, the script of a process that is
behind runs through its past quickly, with the work taken out, until it is where its peers are:

    fast-forward
             loaders yield one and the same batch again and again, as often as the peers' did,
             models return a remembered output, optimizers and schedulers do nothing, operations
             answer at once. Loop indices, step counters and epochs come out right.
    replay   the script is in the same *window* as its peers: it computes on its own data, since what
             comes after may need it (a GAN's fake batch on its way to both updates). Operations that
             the peers have done since the window began are answered with what they got, and
             gradients that they have stepped on are dropped.
    live     it takes part: from the event on at which its peers stood.

A script, or a framework, that tells where each epoch begins (`begin_epoch`) has a shorter way: it enters
its peers' epoch (`entry`, `enter`) and skips what they have read of their window's pass, whatever lies
before.

A script may search for a batch size, and begin anew with a smaller one where it runs out of memory (`begin_try`).
Which sizes those are is the same in all processes, and so is the number of the try. So a script whose peers
have given up its size does so, too (`refuse_size`), until it tries theirs, and counts passes from where they began it.

A window begins where a training batch is asked for after an optimizer has stepped, and spans all
batches over which gradients are accumulated. A script that has caught an exception in place of a step
is in an older window than its peers, which it learns when it takes their state. A place is (number of the loader iteration in order of
beginning, batches that it had yielded before).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

MAX_LOGGED_BYTES = 256 * 1024 * 1024
"""Limit on the results of one window's operations that are kept for processes that come back in it."""

UNKNOWN = -1
"""In place of a batch that is not compared: passes over a stream may end at unlike batches in the processes."""

COMPUTED_GRADS = 8
"""Gradient steps before the peers' place that a script without prepared loaders computes again."""

CAUGHT = "this process ends, since its script has caught an error and goes on, after which it can't train: {}"
EARLY = (
    "this process came back, and its script ended before it was where its peers are, so nothing of this "
    "life counts: values that decide when a script ends (early stopping) must come from small results of "
    "operations (gather), or be in an object that is registered with accelerator.register_for_checkpointing, and an "
    "evaluation over prepared loaders in the main process alone needs a wait_for_everyone behind it"
)

ANOTHER_PATH = (
    "this process came back, but its script took another path than its peers' ({}): let the same values decide about "
    "loops and calls everywhere, and register objects that hold such values with "
    "accelerator.register_for_checkpointing"
)

LATER = (
    "its peers are in a later training of the script (they have prepared more models, or called "
    "Trainer.train more often). What was trained before can't be trained again without them, so they go "
    "on alone if min_replicas lets them. Let a script train once, or prepare all models before the first "
    "training batch"
)

AT_THE_END = (
    "this process came back with a checkpoint that was saved within the loop at the last batch of an epoch, and goes on "
    "with the next epoch, while its peers are behind that batch, and not there yet: save behind what follows the loop "
    "(an evaluation), or at another batch"
)

Place = tuple[int, int]


class Elsewhere(Exception):
    """Leaves a framework's loop over an epoch, which it enters again at its peers' place."""


class SizeGivenUp(RuntimeError):
    """Leaves a try of a search for a batch size, which takes it for one that ran out of memory."""

    def __init__(self) -> None:
        super().__init__("with this batch size the peers of this process ran out of memory.")


@dataclass(frozen=True, slots=True)
class Search:
    """A search for a batch size.

    Attributes:
        tries: how many sizes have been tried, with the last one.
        iterations: loader iterations begun before the last try.
        batches: those that were asked for before it, as `ScriptPosition.batches`.
    """

    tries: int
    iterations: int
    batches: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """Where an epoch began.

    Attributes:
        number: of the epoch.
        first_pass: number of the first pass over a loader in it.
        counts: what else the loop counts, as it was there.
    """

    number: int
    first_pass: int
    counts: tuple[int, ...] = ()


class Phase(Enum):
    """What the script's work counts for."""

    LIVE = "live"
    FAST_FORWARD = "fast-forward"
    REPLAY = "replay"


@dataclass(slots=True)
class Iteration:
    """One pass over a loader."""

    seq: int
    yielded: int = 0
    """With those that the script has left out (`skip_first_batches`), of which there are `left_out`."""
    generator_state: Any = None
    """Of the loader's generator when this pass began; None: it has none."""
    left_out: int = 0
    length: int | None = None
    """None: its loader has none."""

    @property
    def begun(self) -> bool:
        """Whether it has yielded a batch."""
        return self.yielded > self.left_out


@dataclass(frozen=True, slots=True)
class Target:
    """Where a peer's script is.

    Attributes:
        window: place at which its window began; None: before the first training batch.
        ops: (what, result) of the operations since then, in order; None: the result was not kept.
        grads: gradient steps committed since then.
        active: (seq, yielded, generator state) of the loader iterations under way, and of those that were since the
            window began: their last batches may have to be read again.
        iterations: loader iterations begun.
        lengths: batches of finished iterations whose loader has no length.
        events: events since the beginning.
        at: what it is about to do: "fetch", "op" or "grad".
        pending: gradients are averaged, but no optimizer has stepped on them yet.
        begun: see `ScriptPosition.begun`.
        batches: see `ScriptPosition.batches`.
        epochs: those that the script has told of, back to that of the window, as `Epoch`'s fields.
        norms: of the window's gradients, as the script has asked for them.
        searches: those for a batch size, in the order of their beginning, as `Search`'s fields.
        begun_before: passes of `active` of which it had read a batch when its window began.
        trainings: passes in which windows have begun.
    """

    window: Place | None
    ops: tuple[Any, ...]
    grads: int
    active: tuple[tuple[int, int, Any], ...]
    iterations: int
    lengths: dict[int, int]
    events: int
    at: str
    pending: bool = False
    begun: int = 0
    batches: int = 0
    epochs: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    norms: tuple[Any, ...] = ()
    searches: tuple[tuple[int, int, int], ...] = ()
    begun_before: tuple[int, ...] = ()
    trainings: tuple[int, ...] = ()


@dataclass(slots=True)
class ScriptPosition:
    """The place of one process's script. The loop's thread only."""

    phase: Phase = Phase.LIVE
    iterations: int = 0
    active: list[Iteration] = field(default_factory=list)
    ended: list[Iteration] = field(default_factory=list)
    """Those that have a generator, and are over since the window began."""
    lengths: dict[int, int] = field(default_factory=dict)
    events: int = 0
    agreed: int = 0
    """Events that this process has done together with others since it came (back)."""
    missed: int = 0
    """Events that this script was led past: what it keeps in its own variables lacks them."""
    window: Place | None = None
    stepped: bool = True
    ops: list[Any] = field(default_factory=list)
    grads: int = 0
    norms: list[Any] = field(default_factory=list)
    computed: bool = False
    """Whether a model has begun a forward for training in the window."""
    left_out: bool = False
    """Whether one has raised, or the script has dropped all gradients behind it."""
    target: Target | None = None
    pending: bool = False
    begun: int = 0
    """Models that the script has prepared for training, and trainings of a Trainer that it has begun."""
    batch: int = UNKNOWN
    """Of training data, that the script has asked for last: its number in its pass."""
    batches: int = 0
    """Of all loaders, that the script has asked for, or would have."""
    generator_states: dict[int, Any] = field(default_factory=dict)
    """Of passes that peers have under way, or had in their window, at their beginning."""
    begun_before: tuple[int, ...] = ()  # as the peers' `Target.begun_before`
    trainings: list[int] = field(default_factory=list)
    """Passes in which windows have begun."""
    epochs: list[Epoch] = field(default_factory=list)
    """Those that the script has told of, back to that of the window."""
    searches: list[Search] = field(default_factory=list)
    """Those for a batch size, in the order of their beginning."""
    tries: bool = False
    """Whether the script is within a search for a batch size."""
    leaves: int | None = None
    """The pass whose loop `Elsewhere` leaves, and may enter in its middle; None: none. UNKNOWN: it comes, behind what
    the script does between two epochs (an evaluation in a callback), where none may be entered."""
    follows_inputs: bool = False
    """Whether a model that answers from memory was called with an input that has a gradient."""
    backward_counts: bool = False
    """Whether a backward through such a model is under way, at whose end a gradient step is counted."""
    _raised: tuple[int, int] = (0, 0)
    """An event, and the backward passes that have raised since."""
    _ended: int | None = None
    """The pass of which the script has loaded the end."""
    _first: Iteration | None = None
    """The script's first pass, if that lies behind `_ended`."""
    _left_at: int = 0
    _logged_bytes: int = 0
    _unstepped: tuple[Place, int, int, int] | None = None
    """Where the window would have begun if an optimizer had stepped on the gradients that are averaged,
    and the operations, gradient steps and norms of the window until there."""

    @property
    def live(self) -> bool:
        """Whether the script's work counts."""
        return self.phase is Phase.LIVE

    # ------------------------------------------------------------------ loaders

    @property
    def in_loop(self) -> bool:
        """Whether the loop runs that `Elsewhere` leaves."""
        return self.leaves not in (None, UNKNOWN)

    @property
    def _resumes_in(self) -> Iteration | None:
        """The first pass under way, without those of training that are over, though not closed (`under_way`)."""
        before = 0 if self.window is None else self.window[0]
        left = [i for i in self.active if i.seq >= before or i.yielded != i.length]
        return left[0] if left else None

    @property
    def resumes_at(self) -> int:
        """The first pass of a script that resumes from what is saved here."""
        iteration = self._resumes_in
        return self.iterations if iteration is None else iteration.seq

    @property
    def resumes_behind(self) -> bool:
        """Whether all of that pass was read."""
        iteration = self._resumes_in
        return iteration is not None and iteration.yielded == iteration.length

    def resume_at(self, seq: int, *, behind: bool = False) -> None:
        """What the script has loaded was saved there, or `behind` that pass's last batch: one that leaves nothing out
        goes on with the next one of training. Counts before its first pass only."""
        if self.iterations == 0 and self.live:
            self.iterations = seq
            self._ended = seq if behind else None

    def _after_ended(self) -> int:
        """The next pass of training: how many lie between (evaluations) only peers know."""
        assert self._ended is not None
        if self.target is None or self.target.window is None:
            return self._ended + 1
        later = [seq for seq in self.target.trainings if seq > self._ended]
        return min(later, default=self._ended + 1)

    def begin(self, generator_state: Any, left_out: int = 0) -> Iteration:
        """A loader iteration begins."""
        follows = self._ended == self.iterations and not left_out
        number = self._after_ended() if follows else self.iterations
        iteration = Iteration(number, left_out, generator_state, left_out)
        self._first = iteration if follows else self._first
        self.iterations = number + 1
        self.active.append(iteration)
        return iteration

    def asked(self, iteration: Iteration) -> bool:
        """A training batch is asked for. Returns whether it is not the first one of this pass."""
        self.batch = UNKNOWN if iteration.length is None else iteration.yielded
        return iteration.begun

    def finish(self, iteration: Iteration, *, has_length: bool) -> None:
        """It is over, or was abandoned."""
        if iteration in self.active:
            self.active.remove(iteration)
            if self.window is not None and iteration.generator_state is not None:
                self.ended.append(iteration)
        if not has_length:
            self.lengths[iteration.seq] = iteration.yielded

    @property
    def under_way(self) -> int:
        """The first pass that is not over; UNKNOWN: none. One whose iterator something holds (Trainer's loop over an
        epoch, in the traceback of an error of communication) is not closed in this process, and is over all the same:
        one before that of the window, or one of which all was read, with another behind it."""
        first = 0 if self.window is None else self.window[0]
        passes = [iteration for iteration in self.active if iteration.seq >= first]
        read_on = [iteration for iteration in passes if iteration.yielded != iteration.length]
        return (read_on or passes[-1:])[0].seq if passes else UNKNOWN

    def align(self, passes: int, under_way: int) -> None:
        """At this event one process has begun `passes`, the fewest, and one is in `under_way`, the lowest. What is more
        here was made in this process alone (an evaluation in the main process). One that comes back does not
        make it, so it counts for nothing."""
        extra = self.under_way - under_way if under_way != UNKNOWN else 0
        if extra > 0:
            self._renumber(self.under_way, extra)
        if extra > 0 or self.iterations > passes:
            own = under_way if extra > 0 else passes
            self.lengths = {seq: length for seq, length in self.lengths.items() if seq < own}
        if self.iterations > passes:
            self._renumber(self.iterations, self.iterations - passes)
            self.iterations = passes

    def _renumber(self, first: int, extra: int) -> None:
        """The pass `first`, begun or not, and later ones have so much lower numbers."""

        def number(seq: int) -> int:
            return seq - extra if seq >= first else seq

        for iteration in self.active:
            iteration.seq = number(iteration.seq)
        self.trainings = [number(seq) for seq in self.trainings]
        self.epochs = [replace(epoch, first_pass=number(epoch.first_pass)) for epoch in self.epochs]
        if self.window is not None:
            self.window = number(self.window[0]), self.window[1]
        if self.leaves is not None:
            self.leaves = number(self.leaves)

    def trains_in(self, iteration: Iteration) -> bool:
        """Whether this pass is one of training, though the model is not in training mode: scripts, and Trainer with
        FSDP2, evaluate within an epoch, and put it back behind the next batch."""
        seq, batch = self.window or (None, 0)
        return seq == iteration.seq and (self.stepped or batch == iteration.yielded)

    def open_window(self, iteration: Iteration) -> bool:
        """A training batch is asked for: a new window begins if an optimizer has stepped. Whether it does."""
        place, begins = (iteration.seq, iteration.yielded), self.stepped
        if begins:
            self._begin_window(place)
        elif self.pending and self._unstepped is None:
            self._unstepped = place, len(self.ops), self.grads, len(self.norms)
        return begins

    def _begin_window(self, window: Place) -> None:
        self.window, self._unstepped, self.computed, self.left_out = window, None, False, False
        self.ops, self.grads, self.norms, self.stepped, self._logged_bytes = [], 0, [], False, 0
        self.ended = []
        if not self.trainings or self.trainings[-1] < window[0]:
            self.trainings.append(window[0])

    # ------------------------------------------------------------------ events

    def log(self, what: str, result: Any, nbytes: int) -> None:
        """An operation is done: keep its result for processes that come back in this window."""
        self.events += 1
        self.agreed += 1
        self._logged_bytes += nbytes
        self.ops.append((what, result if self._logged_bytes <= MAX_LOGGED_BYTES else None))

    def backward_raised(self) -> None:
        """A backward pass that was to average gradients has raised."""
        self._raised = self.events, self.raised + 1

    @property
    def raised(self) -> int:
        """How many have since the last event."""
        event, count = self._raised
        return count if event == self.events else 0

    def graded(self) -> None:
        """A gradient step is committed."""
        self.events += 1
        self.agreed += 1
        self.grads += 1
        self.pending = True

    def measured(self, norm: Any) -> Any:
        """The script asks for the norm of its gradients. Returns that of the peers, where they have asked for it
        here: of a step that they have done, this process has gradients of its own data only."""
        if self.window is None or self.phase is Phase.FAST_FORWARD:
            return norm
        if self.target is not None and len(self.norms) < len(self.target.norms):
            norm = self.target.norms[len(self.norms)]
        self.norms.append(norm)
        return norm

    def step_taken(self) -> None:
        """An optimizer has stepped, or would have; or the script has dropped what it would have stepped on."""
        self.stepped, self.pending = True, False

    def in_words(self) -> str:
        """The place of the window, or of the peers'; "" before the first one. Any thread."""
        window = self.window if self.target is None else self.target.window
        if window is None:
            return ""
        number, batch = window
        return f"batch {batch + 1:,} of pass {number + 1:,} over the data"

    def describe(self, at: str) -> Target:
        """For a peer that must come here."""
        passes = (*self.ended, *self.active)
        active = tuple((i.seq, i.yielded, i.generator_state) for i in passes)
        return Target(
            self.window,
            tuple(self.ops),
            self.grads,
            active,
            self.iterations,
            dict(self.lengths),
            self.events,
            at,
            self.pending,
            self.begun,
            self.batches,
            tuple((e.number, e.first_pass, e.counts) for e in self.epochs),
            tuple(self.norms),
            tuple((s.tries, s.iterations, s.batches) for s in self.searches),
            tuple(i.seq for i in passes if self.window and (i.seq, i.left_out) < self.window),
            tuple(self.trainings),
        )

    # ------------------------------------------------------------------ searches for a batch size

    def begin_try(self, *, again: bool) -> None:
        """A search for a batch size tries its first size; `again`: its next one, since the last ran out of memory."""
        number = len(self.searches) - again
        tries = self.searches.pop().tries + 1 if again else 1
        known = () if self.target is None else self.target.searches[number : number + 1]
        if known and known[0][0] == tries:
            _, self.iterations, self.batches = known[0]
        self.searches.append(Search(tries, self.iterations, self.batches))
        if again:
            # Of the last try nothing is under way any more, and nothing goes on from its gradients.
            self.window, self.pending, self._unstepped = None, False, None
            self.ops, self.grads, self.norms, self.stepped, self._logged_bytes = [], 0, [], True, 0
            self.active.clear()
            self.ended = []
            if self.target is not None:
                self.relocate(self.target)

    @property
    def at_beginning(self) -> bool:
        """Whether this script, which is behind, and its peers are before the first window (of this try)."""
        return self.phase is Phase.REPLAY and self.window is None

    def is_given_up(self, target: Target) -> bool:
        """Whether the peers, at `target`, have tried the batch size with which this script trains, and a later one."""
        number = len(self.searches)
        if not 0 < number <= len(target.searches):
            return False
        return self.searches[-1].tries < target.searches[number - 1][0]

    def is_in_past_of(self, target: Target) -> bool:
        """Whether the peers are in a later training, to which this script has no way. With another batch size
        it has one if they ask a prepared loader for their batches."""
        if self.is_given_up(target):
            return target.window is None and target.grads > 0
        return target.begun > self.begun

    def refuse_size(self) -> None:
        """Raise `SizeGivenUp` if the peers have given up this script's batch size."""
        if self.given_up:
            raise SizeGivenUp

    @property
    def given_up(self) -> bool:
        """Whether they have, and this script is on its way to their size."""
        return self.target is not None and self.is_given_up(self.target)

    # ------------------------------------------------------------------ coming back

    def relocate(self, target: Target) -> None:
        """The state is now that of a peer at `target`: get the script there."""
        if self.live:
            self._left_at = self.events
        self.target, self.agreed, self.begun_before = target, 0, target.begun_before
        self.trainings = list(target.trainings)
        if self._first is not None and self._first in self.active:
            self._first.seq = self._after_ended()
            self.iterations = self._first.seq + 1
        self.lengths = {**target.lengths, **self.lengths}
        self.generator_states = {seq: state for seq, _, state in target.active}
        if self._unstepped is not None and self._unstepped[0] == target.window:
            self.window, ops, grads, norms = self._unstepped
            self.ops, self.grads, self._unstepped = self.ops[ops:], self.grads - grads, None
            self.norms = self.norms[norms:]
        same = target.window == self.window and not self.given_up
        self.phase = Phase.REPLAY if same else Phase.FAST_FORWARD

    def begin_epoch(self, number: int, *counts: int) -> None:
        """The script, which can enter any epoch, begins this one."""
        while len(self.epochs) > 1 and self.window and self.epochs[1].first_pass <= self.window[0]:
            del self.epochs[0]
        self.epochs.append(Epoch(number, self.iterations, counts))

    @property
    def entry(self) -> Epoch | None:
        """The epoch in which this script, which is behind, meets its peers; None: they have not told."""
        target = self.target
        if self.phase is not Phase.FAST_FORWARD or target is None or target.window is None:
            return None
        if self.given_up:
            return None
        begun = [epoch for epoch in target.epochs if epoch[1] <= target.window[0]]
        if not begun or (self.in_loop and begun[-1][1] != target.window[0]):
            return None
        return Epoch(begun[-1][0], begun[-1][1], tuple(begun[-1][2]))

    def enter(self, epoch: Epoch) -> int:
        """The script is at the beginning of its peers' epoch. Returns the number of batches that they
        have read in their window's pass."""
        assert self.target is not None and self.target.window is not None
        self.iterations = epoch.first_pass
        return self.target.window[1]

    def leap(self, iteration: Iteration) -> bool:
        """A batch is asked for in an epoch that the script has told of: skip what the peers have read.

        True: batches were skipped. Raises `Elsewhere` where that leaves the loop.
        """
        if self.entry is None or self.leaves == UNKNOWN:
            return False
        assert self.target is not None and self.target.window is not None
        seq, batch = self.target.window
        if iteration.seq == self.leaves:
            if iteration.seq < seq or (iteration.seq == seq and iteration.yielded != batch):
                raise Elsewhere
        elif iteration.seq == seq and iteration.yielded < batch:
            iteration.yielded = batch
            return True
        return False

    @property
    def distance(self) -> int:
        """About how many batches are still to be run through; 0: at the place.

        Of a script that asks no prepared loader: gradient steps.
        """
        target = self.target
        if target is None:
            return 0
        if self.phase is Phase.REPLAY:
            return max(0, target.grads - self.grads) if target.window is None else 0
        if target.window is None:
            return 0
        if self.entry is not None:
            return 1
        here = self.active[-1] if self.active else None
        if here is not None and here.seq == target.window[0]:
            return max(1, target.window[1] - here.yielded)
        return max(1, target.batches - self.batches)

    @property
    def batches_done(self) -> int:
        """What `distance` counts, as far as it is done."""
        return self.grads if self.all_is_one_window else self.batches

    @property
    def all_is_one_window(self) -> bool:
        """Whether the peers' script has not asked a prepared loader for training data."""
        return self.target is not None and self.target.window is None

    @property
    def replays(self) -> bool:
        """Whether the script computes what its peers have done, as they did."""
        return self.phase is Phase.REPLAY and not self.remembers

    @property
    def remembers(self) -> bool:
        """Whether models answer from memory.

        Also in the replay of a script that asks no prepared loader for its batches: all of its past is
        one window. Its last steps are computed, since what follows may need them.
        """
        if self.phase is Phase.FAST_FORWARD:
            return True
        return self.all_is_one_window and self.distance > COMPUTED_GRADS

    def arrive(self, iteration: Iteration) -> bool:
        """A script that fast-forwards asks for a batch; True: this is where the peers' window began.

        Raises RuntimeError if the script can't get there any more.
        """
        target = self.target
        if self.phase is not Phase.FAST_FORWARD or target is None or target.window is None:
            return False
        if self.leaves == UNKNOWN:
            return False
        seq, batch = target.window
        if (iteration.seq, iteration.yielded) != (seq, batch):
            if iteration.seq > seq and all(i.seq != seq for i in self.active):
                here = (
                    f"it begins pass {iteration.seq} over its data loaders, they are in pass {seq}"
                )
                raise RuntimeError(ANOTHER_PATH.format(here) if self._ended is None else AT_THE_END)
            return False
        self._begin_window(target.window)
        self.events = target.events - len(target.ops) - target.grads
        self.phase, self.pending = Phase.REPLAY, False
        return True

    def replay_op(self, what: str) -> Any:
        """The result that the peers got at this place, or None if it was not kept. Raises RuntimeError if it is not
        that of `what`, to which this script has come."""
        target = self.target
        assert self.phase is Phase.REPLAY and target is not None
        result = None
        if len(self.ops) < len(target.ops):
            theirs, result = target.ops[len(self.ops)]
            if theirs != what:
                raise RuntimeError(
                    ANOTHER_PATH.format(f"it comes to {what}, they came to {theirs}")
                )
        self.events += 1
        self.ops.append((what, result))
        return result

    def replay_grad(self) -> None:
        """A backward pass is over: count its gradient step if the peers have done it."""
        if self.phase is Phase.REPLAY and self.grad_is_done:
            self.events += 1
            self.grads += 1
            self.pending = self.target is not None and self.target.pending and not self.grad_is_done

    @property
    def grad_is_done(self) -> bool:
        """Whether the gradient step that the script is about to do was done by the peers."""
        if self.phase is Phase.FAST_FORWARD:
            return True
        return self.target is not None and self.grads < self.target.grads

    @property
    def op_is_done(self) -> bool:
        """Whether the operation that the script is about to do was done by the peers."""
        if self.phase is Phase.FAST_FORWARD:
            return True
        return self.target is not None and len(self.ops) < len(self.target.ops)

    def settle(self, at: str) -> bool:
        """Before an event or a batch (`at`, see `Target`): go live if the peers have done no more than this script.
        Peers that are at an event have used the batches before it: their schedulers and registered objects count them.

        True: it has gone live just now.
        """
        if self.target is None or self.op_is_done or self.grad_is_done:
            return False
        if at == "fetch" and self.target.at != "fetch":
            return False
        self.missed += max(0, self.target.events - self._left_at)
        self.phase, self.events, self.batches = Phase.LIVE, self.target.events, self.target.batches
        # One that has entered an epoch has begun no pass before its place in it.
        if self.target.epochs:
            self.iterations = max(self.iterations, self.target.iterations)
        self.target = None
        return True
