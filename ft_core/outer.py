"""The outer loop: what LocalSGD and DiLoCo do between a member's inner steps.

A context manager around a training loop. A hook counts the inner optimizer's steps; at the ends of
slots (`ft_core.diloco_schedule`) a fragment is *launched* (its values are sent) and *applied*
(awaited, voted on, stepped). One outer step is one step of the manager: the attempt is opened when
the slot begins, so that the quorum is there before it is needed and joiners are served the global
state while the others compute; it is bound to the quorum at the launch, and voted on when it is
applied. What may go wrong, and what then becomes of a window, is in docs/diloco_protocol.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ft_core.diloco_schedule import Event, Schedule
from ft_core.fragments import Flat, Fragment, describe, local_part
from ft_core.global_state import GlobalState
from ft_core.process_group import ProcessGroupError
from ft_core.quantized import attempt_failed, bind, participation_of
from ft_core.world import WorldSizeMode

if TYPE_CHECKING:
    from ft_core.manager import Manager

log = logging.getLogger("ft_core")

BIND_TRIES = 3
RELAUNCHES = 2
"""So many times is a kept window sent again at once when its outer step was discarded."""


@dataclass(slots=True)
class OuterStats:
    """Sums since the start of this process; any thread may read.

    Attributes:
        committed, discarded: outer steps (of one fragment each).
        void: outer steps to which this member contributed nothing because its own window was bad.
        bytes_sent: by this member, for outer steps.
        communication_s: from each launch until its collectives were over.
        hidden_s: how much of that the loop did not wait for.
        divergence: of the last committed outer step: root mean square over the participants of
            the distance between their parameters and the mean of those (Euclidean norm).
    """

    committed: int = 0
    discarded: int = 0
    void: int = 0
    bytes_sent: int = 0
    communication_s: float = 0.0
    hidden_s: float = 0.0
    divergence: float = 0.0


@dataclass(slots=True)
class Flight:
    """A fragment on its way, from launch to apply."""

    fragment: Fragment
    values: Flat
    meta: Tensor  # fp64: sum of weights, sum of weighted squared norms of the deltas
    participating: bool
    means: Flat | None = None  # floating buffers
    bytes: Tensor | None = None  # of the other buffers: the first participant's
    futures: list[Future[Any]] = field(default_factory=list)
    residuals: list[Any] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0


class OuterLoop(ABC):
    """See the module's docstring; the public classes are `LocalSGD` and `DiLoCo`.

    Thread: the training loop's.
    """

    KEY: ClassVar[str]
    """Of its part of the manager's state."""

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        inner_optimizer: Optimizer,
        schedule: Schedule,
        fragments: Sequence[Fragment],
        outer_optimizer: Optimizer | None,
        *,
        weighted: bool | str,
        bucket_bytes: int,
        keep_windows: bool,
        settings: str,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        if weighted not in (False, True, "steps", "samples"):
            raise ValueError(
                f'weighted must be False, True (or "steps") or "samples", got {weighted!r}'
            )
        if manager._weighted:
            raise ValueError(
                f"give weighted to {type(self).__name__}, not to the Manager: an outer step's mean "
                "is over windows, not over batches"
            )
        self._manager, self._model, self._inner = manager, model, inner_optimizer
        self._schedule, self._fragments = schedule, list(fragments)
        self._weighted: bool | str = "steps" if weighted is True else weighted
        self._bucket_bytes, self._keep = bucket_bytes, keep_windows
        self._state = GlobalState(
            model, self._fragments, outer_optimizer,
            backup_device=backup_device, pin_memory=pin_memory,
        )  # fmt: skip
        self._hook: Any = None
        self._open = False  # an attempt is under way
        self._loaded = False  # the state came from a peer or a checkpoint
        self._settled = False  # this process has stood at the quorum's position
        self._healed_now = False  # ... and was brought there in this attempt
        self._uncounted_lost: set[int] = set()  # fragments whose last launch has no known end
        self._local_step = 0
        self._window = [0.0] * len(self._fragments)  # inner steps or samples since the last apply
        self._void: set[int] = set()
        self._flight: Flight | None = None
        self._loop_thread = threading.get_ident()
        self.stats = OuterStats()
        manager.register_schema(
            self.KEY,
            f"{describe(self._fragments, model)}, sync_every={schedule.sync_every}, "
            f"delay={schedule.delay}, weighted={self._weighted}, bucket_bytes={bucket_bytes}, "
            f"keep_windows={keep_windows}{settings}",
        )
        manager.register_state_dict_fn(self.KEY, self._load_healed, self._served)

    # ------------------------------------------------------------------ for the training loop

    def __enter__(self) -> Self:
        """Join the quorum (with a synchronous one: heal, too), and watch the inner optimizer.

        Raises as `Manager.start_quorum`; ValueError if the manager's own state holds the model.
        """
        if self._hook is not None:
            raise RuntimeError(f"this {type(self).__name__} is entered already")
        if not self._settled and not self._loaded:
            self._state.snapshot()  # the model may have been filled since construction
            self._refuse_drifting_state()
        if not self._open:
            self._begin()
        self._hook = self._inner.register_step_post_hook(self._after_inner_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching. An outer step under way is brought to its end; on an error it is dropped,
        and the model returns to the global parameters."""
        self._hook.remove()
        self._hook = None
        if error is None:
            if self._flight is not None:
                self._apply()
            return
        if self._flight is not None:
            self._manager.report_error(RuntimeError(f"the training loop raised {error!r}"))
            self._flight = None
            self._open = False
        self._state.restore_all()
        self._forget_windows()

    def sync(self) -> bool:
        """Have the outer steps of one whole window now, wherever the slots stand, and wait.

        All members must call it at the same place. Whether all of them were committed.
        """
        if self._hook is None:
            raise RuntimeError(f"sync() works inside `with {type(self).__name__}(...)` only")
        committed = True
        if self._flight is not None:
            committed = self._apply()
        for _ in self._fragments:
            self._launch()
            committed = self._apply() and committed
        return committed

    def add_samples(self, samples: int) -> None:
        """Count samples of the inner step under way, with weighted="samples"; before its step."""
        if self._weighted != "samples":
            raise ValueError('add_samples needs weighted="samples" on all members')
        if samples < 0:
            raise ValueError(f"samples must not be negative, got {samples}")
        self._window = [count + samples for count in self._window]

    @property
    def local_step(self) -> int:
        """Inner steps since the slot began."""
        return self._local_step

    @local_step.setter
    def local_step(self, steps: int) -> None:
        # For a member that has taken over a peer's place in the data, too.
        self._local_step = steps

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: the global parameters and buffers, and the outer optimizer's state.

        Goes with `manager.state_dict()`. The unfinished window is no part of it.
        """
        return self._state.state_dict(copy=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint, into the model too; before the first `with`.

        Raises RuntimeError later, ValueError if it is another model's.
        """
        if self._settled or self._open:
            raise RuntimeError("load_state_dict must be called before the first outer step begins")
        self._state.load_state_dict(state)
        self._state.restore_all()
        self._loaded = True

    # ------------------------------------------------------------------ what the algorithms differ in

    @abstractmethod
    def _contribution(self, fragment: Fragment, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this member gives to the mean, for each parameter."""

    @abstractmethod
    def _outer_update(self, fragment: Fragment, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make `means` of the contributions the fragment's new global parameters, in the model and
        in `_state`. Returns the mean delta that they amount to, for the statistics."""

    def _reduce(self, flight: Flight, weight: float) -> None:
        """Start the reduction of the flight's values."""
        for bucket in flight.values.buckets():
            flight.futures.append(self._manager.allreduce(bucket, reduce_op=ReduceOp.SUM))
            self.stats.bytes_sent += self._ring_bytes(bucket.nbytes)

    def _committed(self, flight: Flight) -> None:
        """The flight's outer step was committed."""

    # ------------------------------------------------------------------ inner steps

    def _after_inner_step(self, *_: Any) -> None:
        self._local_step += 1
        if self._weighted != "samples":
            self._window = [count + 1 for count in self._window]
        self._void.clear()
        due = self._schedule.due(self._manager.current_step(), self._local_step)
        if Event.LAUNCH in due:
            self._launch()
        if Event.APPLY in due:
            self._apply()
        elif self._flight is None and self._manager.errored() is None:
            if attempt_failed(self._manager):
                # The members changed in a way that this attempt can't follow (a peer must heal
                # from this state, or this member must). Nothing was reduced: nothing is lost.
                self._restart()

    def _begin(self) -> None:
        """Open an attempt: the slot begins."""
        self._loop_thread = threading.get_ident()
        self._local_step = 0
        self._healed_now = False
        self._open = True
        self._manager.start_quorum()

    def _restart(self) -> None:
        """Open another attempt in the same slot; this one has failed before its launch."""
        self._manager.should_commit()
        self._open = True
        self._manager.start_quorum()

    # ------------------------------------------------------------------ launch

    def _launch(self) -> None:
        """Send the scheduled fragment. Never fails: `_apply` finds out."""
        if self._flight is not None:
            return
        manager, bad = self._manager, ""
        if manager.errored() is not None:
            bad = str(manager.errored())
            self._give_up_window(bad)
            self._restart()
        for _ in range(BIND_TRIES):
            fragment = self._scheduled(manager.current_step())
            deltas = self._state.deltas(fragment)
            squared = _squared(deltas)
            if not math.isfinite(squared):
                bad = "parameters are not finite"
                self._give_up_window(bad)
                deltas, squared = self._state.deltas(fragment), 0.0
            step = bind(manager)
            if step is not None:
                break
            self._restart()
        else:
            return
        if bad and manager._options.group_world_size > 1:
            # The other ranks of the group know nothing of it, and would contribute.
            manager.report_error(RuntimeError(f"a rank's window was dropped: {bad}"))
        part = participation_of(manager)
        if not manager.is_healing():
            self._settled = True
            self._uncounted_lost.clear()
        actual = self._scheduled(step)
        if actual is not fragment:  # behind, so that it contributes nothing anyhow
            fragment, deltas, squared = actual, self._state.deltas(actual), 0.0
        self._send(fragment, deltas, squared, participating=part.rank is not None)

    def _scheduled(self, step: int) -> Fragment:
        return self._fragments[self._schedule.fragment_of(step)]

    @torch.no_grad()
    def _send(
        self, fragment: Fragment, deltas: Sequence[Tensor], squared: float, *, participating: bool
    ) -> None:
        weight = self._weight(fragment)
        contribution = self._contribution(fragment, deltas)
        values = Flat(contribution, self._bucket_bytes, self._wire_device())
        for view, tensor in zip(values.views, contribution, strict=True):
            if weight == 1.0:
                view.copy_(tensor)
            elif weight:
                view.copy_(tensor).mul_(weight)
        device = next(iter(values.parts.values())).device
        meta = torch.tensor([weight, weight * squared], dtype=torch.float64, device=device)
        flight = Flight(fragment, values, meta, participating, began_s=time.monotonic())
        self._flight = flight
        self._uncounted_lost.add(fragment.index)
        flight.futures.append(self._manager.allreduce(meta, reduce_op=ReduceOp.SUM))
        if fragment.index == len(self._fragments) - 1:
            self._send_buffers(flight, weight)
        self._reduce(flight, weight)
        for future in flight.futures:
            future.add_done_callback(lambda _: _mark_end(flight))

    def _weight(self, fragment: Fragment) -> float:
        """This member's share of the mean: 1, or how much work its window holds."""
        if fragment.index in self._void:
            return 0.0
        if not self._weighted:
            return 1.0
        count = self._window[fragment.index]
        return count / self._schedule.sync_every if self._weighted == "steps" else count

    def _send_buffers(self, flight: Flight, weight: float) -> None:
        """Floating buffers are averaged like parameters; of others the first participant's count."""
        buffers = self._state.buffers()
        device = self._wire_device()
        floating = [b for b in buffers if b.is_floating_point() or b.is_complex()]
        others = [b for b in buffers if not (b.is_floating_point() or b.is_complex())]
        if floating:
            flight.means = Flat(floating, self._bucket_bytes, device)
            for view, buffer in zip(flight.means.views, floating, strict=True):
                if weight:
                    view.copy_(buffer).mul_(weight)
            for bucket in flight.means.buckets():
                flight.futures.append(self._manager.allreduce(bucket, reduce_op=ReduceOp.SUM))
                self.stats.bytes_sent += self._ring_bytes(bucket.nbytes)
        if others:
            flight.bytes = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in others])
            flight.bytes = flight.bytes.to(device or flight.bytes.device)
            if participation_of(self._manager).rank != 0:
                flight.bytes.zero_()
            flight.futures.append(self._manager.allreduce(flight.bytes, reduce_op=ReduceOp.SUM))
            self.stats.bytes_sent += self._ring_bytes(flight.bytes.nbytes)

    def _wire_device(self) -> torch.device | None:
        """Where values must lie to travel; None: where they are."""
        return torch.device("cpu") if "gloo" in self._manager._pg.getBackendName() else None

    def _ring_bytes(self, nbytes: int) -> int:
        """What one member sends in a ring all-reduce of so many bytes."""
        members = participation_of(self._manager).replica_world_size
        return 2 * (members - 1) * nbytes // members

    # ------------------------------------------------------------------ apply

    def _apply(self) -> bool:
        """End the outer step under way, and begin the next slot. Whether it was committed."""
        committed = self._settle()
        if not committed and self._keep:
            for _ in range(RELAUNCHES):
                self._begin()
                self._launch()
                committed = self._settle()
                if committed:
                    break
        self._begin()
        return committed

    def _settle(self) -> bool:
        flight, manager = self._flight, self._manager
        if flight is not None:
            waiting_s = time.monotonic()
            for future in flight.futures:
                future.wait()
            self._count_time(flight, time.monotonic() - waiting_s)
            if manager.errored() is None and not float(flight.meta[0]) > 0:
                manager.report_error(RuntimeError("no member contributed to the outer step"))
        try:
            committed = self._vote()
        except BaseException:
            self._flight, self._open = None, False
            self._state.restore_all()
            self._forget_windows()
            raise
        self._flight, self._open = None, False
        if not committed:
            self._discard(flight)
            return False
        assert flight is not None  # a step that was not bound is not committed
        self._finish(flight)
        self.stats.committed += 1
        return True

    def _vote(self) -> bool:
        return self._manager.should_commit()

    def _finish(self, flight: Flight) -> None:
        """The outer step was committed: the same computation in all members."""
        fragment, total = flight.fragment, float(flight.meta[0])
        kept = None
        if self._healed_now and self._keep and not self._is_spare():
            kept = self._state.deltas(fragment)  # it could not contribute yet: it will
        means = [view.div_(total) for view in flight.values.views]
        mean_deltas = self._outer_update(fragment, means)
        squared = float(flight.meta[1]) / total - _squared(mean_deltas)
        self.stats.divergence = math.sqrt(max(0.0, squared))
        self._take_buffers(flight, total)
        self._uncounted_lost.discard(fragment.index)
        self._settled = True
        if kept is not None:
            self._state.rebase(fragment, kept)
        else:
            self._window[fragment.index] = 0.0
        self._committed(flight)

    @torch.no_grad()
    def _take_buffers(self, flight: Flight, total: float) -> None:
        if flight.means is None and flight.bytes is None:
            return
        buffers = self._state.buffers()
        if flight.means is not None:
            floating = [b for b in buffers if b.is_floating_point() or b.is_complex()]
            for buffer, view in zip(floating, flight.means.views, strict=True):
                buffer.copy_(view.div_(total))
        if flight.bytes is not None:
            start = 0
            for buffer in buffers:
                if not (buffer.is_floating_point() or buffer.is_complex()):
                    piece = flight.bytes[start : start + buffer.nbytes].clone()
                    buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))
                    start += buffer.nbytes
        self._state.take_buffers()

    def _discard(self, flight: Flight | None) -> None:
        """The outer step was discarded."""
        self.stats.discarded += 1
        error = self._manager.errored()
        own = error is not None and not isinstance(error, ProcessGroupError)
        if own and flight is not None:
            self._give_up_window(str(error))
        elif flight is not None and not self._keep:
            self._state.restore(flight.fragment)
            self._window[flight.fragment.index] = 0.0
            if flight.fragment.index == len(self._fragments) - 1:
                self._state.restore_buffers()

    def _give_up_window(self, why: str) -> None:
        """This member's own work is no good: all of it returns to the global state."""
        log.warning("the window is dropped, and the model returns to the global parameters: %s", why)
        self._state.restore_all()
        self._forget_windows()
        self._void.update(range(len(self._fragments)))
        self.stats.void += 1
        _drop_bad_state(self._inner)

    def _forget_windows(self) -> None:
        self._window = [0.0] * len(self._fragments)

    def _count_time(self, flight: Flight, waited_s: float) -> None:
        took_s = max(0.0, flight.ended_s - flight.began_s)
        self.stats.communication_s += took_s
        self.stats.hidden_s += max(0.0, took_s - waited_s)

    def _is_spare(self) -> bool:
        return self._manager._mode is WorldSizeMode.FIXED_WITH_SPARES

    # ------------------------------------------------------------------ heal

    def _served(self) -> dict[str, Any]:
        """For healing peers, and for the digest of the start."""
        # The heal thread asks for memory to receive into. A window that is to be kept is measured
        # from the present global parameters, which must survive that.
        own = self._keep and self._settled and threading.get_ident() != self._loop_thread
        return self._state.state_dict(copy=own)

    def _load_healed(self, state: dict[str, Any]) -> None:
        """A peer's global state has arrived. The window goes on from there, or is dropped.

        Dropped, if it may have been counted already: it was sent in an outer step of which this
        member never heard the end. Kept only with `keep_windows`, by a member that had a state of
        the quorum's before.
        """
        keep = self._keep and self._settled and not self._is_spare()
        kept = {
            f.index: self._state.deltas(f)
            for f in self._fragments
            if keep and f.index not in self._uncounted_lost
        }
        self._state.load_state_dict(state)
        self._state.restore_buffers()
        for fragment in self._fragments:
            if fragment.index in kept:
                self._state.rebase(fragment, kept[fragment.index])
            else:
                self._state.restore(fragment)
                self._window[fragment.index] = 0.0
        self._uncounted_lost.clear()
        self._loaded = self._healed_now = True

    def _refuse_drifting_state(self) -> None:
        """What the manager serves must be equal in all members; the model and its optimizer drift."""
        own = {local_part(p).untyped_storage().data_ptr() for p in self._model.parameters()}
        for held in self._inner.state.values():
            own |= {
                local_part(t).untyped_storage().data_ptr()
                for t in tree_leaves(held)
                if isinstance(t, Tensor)
            }
        own.discard(0)
        for key, (_, save) in self._manager._state_fns.items():
            if key == self.KEY:
                continue
            for leaf in tree_leaves(save()):
                if isinstance(leaf, Tensor) and local_part(leaf).untyped_storage().data_ptr() in own:
                    raise ValueError(
                        f"the manager's state {key!r} holds tensors of the model or its optimizer, "
                        f"which differ among members between outer steps: leave them out, "
                        f"{type(self).__name__} serves the global parameters itself"
                    )


def _squared(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all of them together."""
    return sum(float(torch.linalg.vector_norm(t, dtype=_wide(t))) ** 2 for t in tensors)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _mark_end(flight: Flight) -> None:
    flight.ended_s = max(flight.ended_s, time.monotonic())


def _drop_bad_state(optimizer: Optimizer) -> None:
    """Forget the inner optimizer's state of parameters for which it is not finite.

    Else its moments would spoil every window to come. What is finite is kept: running estimates,
    taken near the parameters that the model returns to.
    """
    for parameter, state in list(optimizer.state.items()):
        tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor)]
        if not all(bool(torch.isfinite(local_part(t)).all()) for t in tensors):
            del optimizer.state[parameter]
