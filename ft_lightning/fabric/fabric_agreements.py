"""What a Fabric is told about ranks, and how far its collectives reach.

`world_size` and `global_rank` are those of the configured replica groups, as for a Trainer.
`all_reduce`, `all_gather` and `barrier` are agreements of their own.

In a training under way (in a step, after it, in a validation, at an epoch's end) each call is an
agreement: a step of the manager's without an update, repeated until it is committed, so that all
members have the result or none has. A call within a step (between a batch's fetch and its backward)
uses the attempt that is open. Members run the same script, so they come to the same calls in the
same order. Before data move, members say which call it is (gradients, once after each change of the quorum). If
they differ, those raise that have come back since the others began; if none has, all raise.

A replica group that comes back in a validation waits for the next batch, outside of the quorum. If it
is in it already, or its peers need it, it adds nothing to an agreement and goes on waiting. A group without which the others went on has its own value from there to its next batch,
where it heals. Before the first batch, and where members need not be at the same place (data that
Fabric does not know, iterables, per-group commit), nothing is sent: the result is this process's
value.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ft_core.collectives.agreement import agree, exchange_headers
from ft_core.collectives.retry import RetryableReducer
from ft_lightning.fabric.loop_position import ALIKE, Where, Window
from ft_lightning.shared.launch_env import leave_torchrun
from ft_lightning.shared.step_collectives import (
    CopyRanks,
    end_step_as_stranger,
    gather_in_step,
    reduce_in_step,
)
from ft_lightning.shared.strategy_base import StrategyBase

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object

log = logging.getLogger("ft_lightning")

_PATIENCE = 4
"""Timeouts that a peer may be late at a round. The lighthouse evicts one that hangs before that."""

Call = tuple[str, str, list[int], str]
"""What is called: its name, dtype, shape, and how it reduces. Plain values: it travels."""

COMPARED_STEPS = 64
"""In one step of so many a backward pass is compared, also where its quorum has seen one."""
UNKNOWN = (-1, -1)
"""In place of a batch that is not compared."""
NAMES = ("backward", "all_reduce", "all_gather", "barrier", "save")
ELSEWHERE = (
    "this replica group is at batch {} of its pass over the data, and the others are at batch {}, so it goes on there: "
    "leave out the same batches in all of them"
)
BACKWARD: Call = ("backward", "", [], "")


class FabricAgreementsMixin(StrategyBase, _Base):
    """The part of the strategy that answers questions about ranks, and reduces."""

    _window: Window
    _reducer: RetryableReducer | None
    _open = _lost = False
    _ranks = CopyRanks()
    """Of this replica group, for what is to reach all ranks of all groups."""
    _where: Where | None = None
    """Where a quorum is asked for; None: nowhere."""
    _round_of: Call | None = None
    _visit: Call | None = None
    _warned = False
    _votes = 0
    """Committed since the batch began."""
    _together = 0
    """Committed since this process began, or came back."""
    _raised = 0
    """Backward passes that have raised since the last commit."""
    _strays: str = ""
    """Why this group is to leave out the batch at hand: its peers are at another one; "": they are not."""
    _ahead = False
    """Whether that comes before this group's."""

    def _prepare(self) -> None:
        super()._prepare()
        self._before_rounds: set[int] = set()
        """After this many votes of a batch a round last followed: a group that joins there can't heal."""

    # ------------------------------------------------------------------ ranks

    @property
    def local_rank(self) -> int:
        """Number of the process's device on this machine: 0 prints (`fabric.print`)."""
        return self._scope.device if self._scope else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data are divided over `world_size` processes."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def is_in_step(self) -> bool:
        return self._open

    def _set_world_ranks(self) -> None:
        """Called by Fabric's connector when the Fabric is made."""
        if self._scope is None:
            leave_torchrun()
            self._find_scope(self._num_nodes)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Within the replica group: from its rank number `src`."""
        return obj if self._scope is None else self._in_group.broadcast(obj, src)

    # ------------------------------------------------------------------ what Fabric calls

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the participants, in place."""
        if not isinstance(tensor, Tensor):
            return tensor
        with torch.no_grad():
            name = _name_of(reduce_op)
            part = self._ranks.reduced(tensor, name)
            result = self._round("all_reduce", part, name)
            if result is None:
                result = part
            return result if tensor.requires_grad else tensor.copy_(result)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As `all_reduce`: a row for each rank, of which those of a group that is away are copies of another's; one row
        where it reaches no other process, and no further dimension if there is only one replica group."""
        if sync_grads and tensor.requires_grad and self._meets():
            raise ValueError(
                "fabric.all_gather can't send gradients back to other replica groups: gather detached tensors "
                "(self.all_gather of a LightningModule under a Trainer sends them)"
            )
        with torch.no_grad():
            rows = self._ranks.gather(tensor)
            result = self._round("all_gather", rows, "")
        if result is not None:
            return result.flatten(0, 1)
        if self._is_alone:
            return tensor
        # In a pass whose results are discarded, user code expects rows of other processes.
        groups = self._row[1] if self._window.local else 1
        return rows.expand(groups, *rows.shape).flatten(0, 1)

    @property
    def _row(self) -> tuple[int, int]:
        return self._ranks.place(self.global_rank, self.world_size)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """An agreement; before the first batch only the ranks of this replica group wait for each
        other.

        A process that does not come within a few timeouts is left behind.
        """
        met = self._round("barrier", torch.zeros(1), "sum")
        if met is None and self._scope is not None:
            self._in_group.barrier()

    # ------------------------------------------------------------------ rounds

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=_PATIENCE * self._options.timeout_s)

    @property
    def _is_alone(self) -> bool:
        """Whether the job is to have no other process."""
        return self._scope is None or self._scope.num_groups * self._scope.group_size == 1

    def _aligned(self) -> bool:
        """Whether members are at the same place of their scripts."""
        raise NotImplementedError

    def _batch(self) -> tuple[int, int]:
        """The number of the batch at hand in its pass, and of the pass; `UNKNOWN` where members may be at unlike ones."""
        raise NotImplementedError

    def _in_pass(self) -> bool:
        """Whether the loop is in a pass over training data, where a group may join in a batch."""
        raise NotImplementedError

    def _attempt(self, where: Where) -> None:
        """Be in a quorum. For a round: sets `_lost` if this group is behind."""
        raise NotImplementedError

    def _follow_quorum(self) -> None:
        """Call `_on_quorum` if this process's part in the quorum has changed."""
        raise NotImplementedError

    def _meets(self) -> bool:
        """Whether a round is possible here."""
        manager = self._manager
        if manager is None or not self._votes_each_step or self._is_alone:
            return False
        if self._window.local or manager.left():
            return False
        if self._open:
            return True
        if self._lost or manager.last_outcome() is None:
            return False  # peers may be training, and this group has just come back
        return self._options.commit == "quorum" and self._aligned()

    def _round(self, name: str, tensor: Tensor, op: str) -> Tensor | None:
        """The common result; None: nothing is sent, and this process's value counts."""
        known = self._window.answer(name)
        if known is not None:
            return known.to(tensor.device, copy=True)
        self._window.agreed()
        if self._reducer is not None and self._options.commit == "quorum":
            self._reducer.before_forward()  # a backward has raised, and the loop has caught it
        if not self._meets():
            self._warn(name)
            return None
        manager = self._manager
        assert manager is not None
        self._round_of = (name, str(tensor.dtype).partition(".")[2], list(tensor.shape), op)
        call = self._round_of
        if self._open and self._options.commit == "group":
            return self._agreed(name, self._exchange(call, tensor))  # with the step's own vote
        self._lost = not self._open and manager.is_healing()  # evicted, and let in again
        if self._lost:
            return None
        try:
            agreed = agree(
                lambda: self._exchange(call, tensor),
                begin=self._begin_round,
                vote=self._vote_on_round,
                is_behind=lambda: self._lost or manager.is_healing(),
            )
        finally:
            self._where = self._round_of = None
        if agreed is None:
            self._open, self._lost = False, True
            manager.rejoin("fell behind between steps")
            return None
        return self._agreed(name, agreed.result)

    def _begin_round(self) -> None:
        """Within a step its attempt is the first. A group that joins before the vote is told."""
        if self._open:
            self._where = Where.ROUND
        else:
            self._before_rounds.add(self._votes)
            self._attempt(Where.ROUND)

    def _may_heal_next(self) -> bool:
        """Whether the attempt after this vote is one in which a group could heal, as far as the batches
        before it tell."""
        return self._votes + 1 not in self._before_rounds

    def _vote_on_round(self) -> bool:
        manager = self._manager
        assert manager is not None
        put_back = None if self._reducer is None else self._reducer.keep_buffers()
        # Between the updates of a batch a group may heal, and in a validation it can't.
        admits = self._in_pass() and self._may_heal_next()
        committed = manager.should_commit(self._patience, no_update=True, admits=admits)
        self._voted(committed)
        self._where, self._open = None, False
        if committed:
            self._follow_quorum()
        if not committed and put_back is not None:
            put_back()  # the discard has undone the forward's statistics
        return committed

    def _voted(self, committed: bool) -> None:
        """A step or an agreement has ended."""
        self._votes += committed
        self._together += committed
        if committed:
            self._raised = 0

    def _exchange(self, call: Call, tensor: Tensor) -> Tensor:
        """The collectives of a round; this process's value, if they fail. Raises as `_all_call`."""
        manager = self._manager
        assert manager is not None
        name, _, _, op = call
        row, rows = self._row
        mine = tensor.expand(rows, *tensor.shape) if name == "all_gather" else tensor
        if not self._all_call(call) or name == "barrier":
            return mine
        if name == "all_gather":
            result = gather_in_step(manager, tensor, row, rows)
        else:
            result = reduce_in_step(manager, tensor.clone(), op)
        return result if manager.errored() is None else mine

    def _all_call(self, call: Call, *, computes: bool = False) -> bool:
        """Whether all members have called this; False: the attempt has failed, and is repeated. `computes`: a
        backward pass is under way, and may raise.

        Members whose collectives do not match wait for each other, and try again for ever. If they
        have called different things, those raise RuntimeError, and leave the quorum, that have taken part in fewer
        commits than others; all do if those with most differ among themselves. In a backward pass of another batch than
        the most's, or the first one's, a group goes on at theirs (`_strays`). A loop may catch what
        its backward raises, in all of them: one that is late for that meets the others at their next call.
        """
        manager = self._manager
        assert manager is not None
        batch, number = self._batch() if call is BACKWARD else UNKNOWN
        mine = [NAMES.index(call[0]), _number(repr(call)), self._window.place.agreements, batch]
        known = self._together, self._raised, int(computes), number
        heard = exchange_headers(manager.step, [*mine, *known])
        if heard is None:
            return False
        said = [header[:5] for header in heard]
        most = max((together for *_, together in said), default=0)
        at = Counter(tuple(called) for *called, together in said if together == most)
        if len({called[:3] for called in at}) == 1:  # some have left out a batch
            at = Counter(at.most_common(1)[0][:1])
        right = set(at)
        if all(tuple(called) in right for *called, _ in said) and len(right) == 1:
            return True
        if any(late[6] and late[5] < other[5] for late in heard for other in heard):
            manager.report_error(RuntimeError("a backward pass has raised, and another one may"))
            return False
        if all(called[:3] == mine[:3] for called in (*heard, *map(list, right))):
            there = next(header for header in heard if tuple(header[:4]) in right)
            self._compare_batches(mine[3], number, there[3], there[7])
            return False
        if right == {tuple(mine)}:
            manager.report_error(RuntimeError("another replica group has called something else"))
            return False
        if manager.participating_rank() is None:
            return False
        others = {NAMES[called[0]] for *called, _ in said if called != mine}
        if len(right) > 1:  # all raise: none leaves before the others have heard
            manager.should_commit(self._patience, no_update=True)
        self._open = False
        manager.rejoin("called something other than its peers")
        raise RuntimeError(
            f"this replica group called fabric.{call[0]}, and other replica groups called something else "
            f"(fabric.{', fabric.'.join(sorted(others))}), or with a tensor of another shape or type: {ALIKE}"
        )

    def _compare_batches(self, batch: int, number: int, theirs: int, their_number: int) -> None:
        """Some members are at another batch than those that are right, who have begun `theirs`."""
        assert self._manager is not None
        self._manager.report_error(RuntimeError("replica groups are at unlike batches"))
        if batch != theirs:
            self._ahead = (number, batch) > (their_number, theirs)
            self._strays = ELSEWHERE.format(batch, theirs)

    def _agreed(self, name: str, result: Tensor) -> Tensor:
        if self._in_pass():
            self._window.results.append((name, result.clone()))
        return result

    def _sit_in(self, call: Call) -> None:
        """Peers are in a round: contribute nothing to it, and join again."""
        self._visit = None
        _, dtype, shape, _ = call
        empty = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.root_device)
        manager = self._manager
        assert manager is not None
        self._exchange(call, empty)
        end_step_as_stranger(manager)
        self._visit = None  # again, if the quorum has changed meanwhile
        manager.rejoin("joined while its peers were between steps", join_now=True)

    def _warn(self, name: str) -> None:
        """Warn once, where the result is not what stock Fabric would give."""
        manager = self._manager
        if self._warned or name == "barrier" or self._is_alone or not self._votes_each_step:
            return
        trained = manager is not None and manager.last_outcome() is not None
        if self._window.local or self._lost or (trained and manager is not None and manager.left()):
            return  # it comes again, or this group has no peers at this place
        self._warned = True
        why = (
            "before the first batch"
            if not trained
            else "where replica groups need not be at the same place"
        )
        log.warning(
            "fabric.%s was called outside of a step, %s: it gives this replica group's own value. "
            "Call it after fetching a batch, and set up all data with "
            "fabric.setup_dataloaders (and use_distributed_sampler=False for validation data, "
            "which each group then sees as a whole)",
            name,
            why,
        )


def _name_of(op: Any) -> str:
    """The name that `reduce_in_step` has for it."""
    if op is None:
        return "mean"
    if isinstance(op, str):
        return op.lower()
    known = {ReduceOp.AVG: "mean", ReduceOp.SUM: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}
    return next((name for each, name in known.items() if op == each), "product")


def _number(text: str) -> int:
    """A text as a number of 56 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
