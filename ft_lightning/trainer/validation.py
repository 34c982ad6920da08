"""Validation divided over the replica groups: `FTDDPStrategy(validation="sharded")`.

A validation set is a list of batches, numbered from 0, equal in all replica groups. Members of a
quorum divide it so that each batch counts exactly once, also if members die:

1. *Begin.* An agreement (a step without an update, `agreements.py`) is committed. All participants
   know the same list of missing batches (at first: all), their number n and their rank among them.
   Member k of n takes the missing batches at places k, k + n, k + 2n, ... of that list.
2. *Compute.* Each member adds the results of its share to what it holds. What it holds is the sum
   over a set of batches that it knows by number: what it has *done*.
3. *Tally.* In another agreement each member shows what it has done and what it holds. Batches that
   no participant has done are missing: they are shared out as in 1, and 2 and 3 follow again.
4. *Final.* None is missing: the result is the sum over what all hold, and all have it, as all have
   seen the same and add in the order of ranks.

Why each batch counts once. No member computes a batch that a committed agreement did not give it,
and a committed agreement gives a batch to one member: so what members have done never overlaps. An
agreement that is not committed changes nothing and is repeated. A member that dies before the tally
takes what it holds along: its batches are in no set, so they are missing. One that dies after it
has been counted.

A group that joins meanwhile contributes nothing to agreements (no rank, nothing done), nor does a hot
spare: it takes the results of the others. One that
fell behind (evicted, and back) is no longer in any agreement: it computes what it has not done,
alone, so that what it holds is the whole set, and heals at the next batch.

It ends: each tally that finds batches missing has lost a member since the agreement before it.

Lightning's validation loop gets a subclass of its own class while a fit lasts:

- before its loaders start, a round agrees on the batches there are (index lists of the samplers:
  the same on all, or nothing is divided) and on the shares;
- its data fetcher gives this group's share, then tallies with the others, and gives what is found
  missing like any other batch. So hooks, logging and `validation_step` see nothing new;
- when none is missing, `self.log`'s numbers and torchmetrics objects show what all have (numbers
  that a hook logs apart from batches: the first member's), before Lightning reads them. They do so
  until the validation has ended, also in the user's `on_validation_epoch_end`.

What that hook computes from values that `validation_step` has stored itself covers this group's
share only. If it logs such a number with `sync_dist=True`, the mean (or sum, ...) over the members
is taken, each counting once, as under `ddp`.

DataLoaders over map-style datasets are divided, one or several in sequence, when the quorum decides
steps. Each group validates everything else as a whole, which a warning says.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgpack
from torch.utils.data import DataLoader

from ft_lightning.trainer import logged_totals
from ft_lightning.trainer.agreements import Rounds
from ft_lightning.trainer.batches import Batches, adopt
from ft_lightning.trainer.counters import epochs_done

log = logging.getLogger("ft_lightning")

BATCH_HOOKS = ("validation_step", "on_validation_batch_start", "on_validation_batch_end")


def share(missing: Sequence[int], rank: int | None, members: int) -> list[int]:
    """The batches out of `missing` that member `rank` of `members` takes, in order; None: none of them.

    As even as can be: shares differ by one batch at most. May be empty.
    """
    if rank is None:
        return []
    assert 0 <= rank < members
    return list(missing[rank::members])


def batches_missing(batches: int, done: Sequence[Iterable[int]]) -> list[int]:
    """Batches out of `batches` that no set in `done` (one per member) holds, in order.

    The sets must not overlap, and hold nothing else: AssertionError.
    """
    left, counted = set(range(batches)), 0
    for own in done:
        numbers = set(own)
        counted += len(numbers)
        left -= numbers
    assert batches - len(left) == counted, "a batch was validated by two, or is none of the set"
    return sorted(left)


class Validation:
    """The sharded validations of one fit. The loop's thread."""

    def __init__(self, trainer: Any, rounds: Rounds, batches: Batches) -> None:
        self._trainer, self._rounds, self._batches = trainer, rounds, batches
        self._loop = trainer.fit_loop.epoch_loop.val_loop
        self._running = False  # inside `_EvaluationLoop.run`
        self._places: list[tuple[int, int]] = []  # of each batch of the set: loader, index in it
        self._indices: list[list[Any]] = []  # of each loader: what its sampler gives
        self._todo: deque[int] = deque()
        self._done: list[int] = []
        self._alone = False
        self._counts: dict[str, int] | None = None
        self._unshare: Callable[[], None] | None = None
        self._made: list[str] = []
        self._complete_keys: set[str] = set()
        self._warned = False
        self.active = False
        """Whether the validation under way is divided."""
        batches.adopt(self._loop, _dividing(self))

    # ------------------------------------------------------------------ the loop's calls

    def run(self, run: Callable[[], Any]) -> Any:
        """Run a whole validation."""
        self._running = True
        try:
            return run()
        finally:
            self._end()

    def begin(self) -> None:
        """The loaders exist and are not read yet: agree on the shares."""
        if not self._running or self._trainer.sanity_checking:
            return
        if self._rounds.off:
            self._warn()
            return
        indices = self._index_lists()
        mine = b"" if indices is None else _digest(indices)
        result = self._rounds.gather(mine)
        if result is None:
            return
        members, rank = result
        if indices is None or any(theirs != members[0] for theirs in members):
            self._warn()
            return
        self.active = self._rounds.divided = True
        self._indices = indices
        self._places = [(i, j) for i, each in enumerate(indices) for j in range(len(each))]
        self._take(range(len(self._places)), rank, len(members))

    def begun(self) -> None:
        """The data fetcher exists."""
        fetcher = self._loop._data_fetcher
        if not self.active:
            return
        if hasattr(fetcher, "iterator_wrapper"):
            raise ValueError(
                'validation="sharded" does not support validation_step(self, dataloader_iter): '
                "take (self, batch, batch_idx)"
            )
        adopt(fetcher, _fetching(self))

    def next(self, fetcher: Any) -> Any:
        """The next batch of this group's share. Raises StopIteration when none is missing."""
        if self._counts is None:  # hooks at the start have made their resets
            self._counts = logged_totals.counts(self._module)
        while not self._todo:
            if not self._tally():
                fetcher.done = True
                raise StopIteration
            iter(fetcher)
        fetcher._start_profiler()
        try:
            batch = next(fetcher.iterator)[0]
        finally:
            fetcher._stop_profiler()
        number = self._todo.popleft()
        self._done.append(number)
        loader, index = self._places[number]
        return batch, index, loader

    def epoch_end(self) -> None:
        """The user's hooks have logged what they computed of a whole validation."""
        if self.active:
            self._rounds.shared_metrics(self._complete_keys)

    # ------------------------------------------------------------------ shares

    def _take(self, missing: Any, rank: int | None, members: int) -> None:
        """This group's share of `missing` comes next."""
        self._todo.extend(share(missing, rank, members))
        chosen: list[list[Any]] = [[] for _ in self._indices]
        for number in self._todo:
            loader, index = self._places[number]
            chosen[loader].append(self._indices[loader][index])
        for sampler, items in zip(self._samplers(), chosen, strict=True):
            sampler._ft_chosen = items

    def _tally(self) -> bool:
        """This group's share is done: whether anything is left to do (or to wait for)."""
        total = len(self._places)
        if not self._alone:
            self._rounds.meet(tally=True)
            mine = {"done": self._done, **self._gathered()}
            result = self._rounds.gather(mine)
            if result is not None:
                members, rank = result
                missing = batches_missing(total, [member["done"] for member in members])
                if missing:
                    log.info(
                        "validation: %s batches of groups that left are done again", len(missing)
                    )
                    self._take(missing, rank, len(members))
                    return True
                self._put(members)
        if self._alone or result is None:
            missing = batches_missing(total, [self._done])
            if missing:
                log.warning("left behind in a validation: this group does the rest alone")
                self._alone = True
                self._take(missing, 0, 1)
                return True
        self._complete()
        return False

    def _gathered(self) -> dict[str, Any]:
        assert self._counts is not None
        return {
            "rows": logged_totals.rows(self._results, lambda result: True),
            "states": logged_totals.states(self._module, self._counts),
        }

    def _put(self, members: list[Any]) -> None:
        """Show Lightning what all members have."""
        self._unshare = logged_totals.share(self._module, [m["states"] for m in members])
        rows = [member["rows"] for member in members]
        self._made = logged_totals.put(
            self._results, self._module, rows, lambda row: row["fx"].split(".")[0] in BATCH_HOOKS
        )

    def _complete(self) -> None:
        """Make the loop's own counters those of the whole set."""
        loop, connector = self._loop, self._trainer._logger_connector
        loop._has_run = True
        others = len(self._places) - len(self._done)
        for part in (loop.batch_progress.total, loop.batch_progress.current):
            for name in ("ready", "started", "processed", "completed"):
                setattr(part, name, getattr(part, name) + others)
        loop.batch_progress.is_last_batch = True
        for number in set(range(len(self._places))) - set(self._done):
            loop._seen_batches_per_dataloader[self._places[number][0]] += 1
        # The outputs of all loaders but the last, which the loop stores next.
        connector.epoch_end_reached()
        loop._logged_outputs = []
        several = len(self._indices) > 1
        for index in range(len(self._indices) - 1):
            self._results.dataloader_idx = index
            loop._logged_outputs.append(connector.update_eval_epoch_metrics())
        self._results.dataloader_idx = len(self._indices) - 1 if several else None
        self._complete_keys = {key for key, r in self._results.items() if not r.has_reset}

    def _end(self) -> None:
        self._running = self.active = self._alone = self._rounds.divided = False
        self._counts = None
        self._todo.clear()
        self._done = []
        for sampler in self._samplers() if self._indices else ():
            sampler._ft_chosen = None
        self._places, self._indices = [], []
        if self._unshare is not None:
            self._unshare()
            self._unshare = None
        for key in self._made:
            self._loop._results.pop(key, None)
        self._made = []

    # ------------------------------------------------------------------ what can be divided

    def _index_lists(self) -> list[list[Any]] | None:
        """What each loader's sampler gives in this validation; None: they cannot be divided."""
        combined = self._loop._combined_loader
        if combined._mode != "sequential":
            return None
        if any(type(loader).__iter__ is not DataLoader.__iter__ for loader in combined.flattened):
            return None
        found: list[list[Any]] = []
        for loader, limit in zip(combined.flattened, self._loop.max_batches, strict=True):
            self._batches.adopt_loader(loader)
            self._batches.set_sampler_epoch(loader, epochs_done(self._trainer))
            sampler = self._batches.index_sampler(loader)
            if sampler is None:
                return None
            found.append(list(islice(sampler, None if limit == float("inf") else int(limit))))
        return found

    def _samplers(self) -> list[Any]:
        return [self._batches.index_sampler(x) for x in self._loop._combined_loader.flattened]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                'validation="sharded": this validation is not divided, each replica group does '
                "all of it: only DataLoaders over map-style datasets can be, one or several in "
                "sequence, whose samplers give the same indices in all groups, and where groups take "
                "each step together (not with DiLoCo and LocalSGD)"
            )

    @property
    def _module(self) -> Any:
        return self._trainer.lightning_module

    @property
    def _results(self) -> Any:
        return self._loop._results


def _digest(indices: list[list[Any]]) -> bytes:
    packed: bytes = msgpack.packb(indices, default=repr)
    return hashlib.blake2b(packed, digest_size=16).digest()


def _dividing(validation: Validation) -> Callable[[Any], dict[str, Any]]:
    """Lightning's validation loop that asks `validation` for its batches."""

    def methods(cls: Any) -> dict[str, Any]:
        def run(self: Any) -> Any:
            return validation.run(lambda: cls.run(self))

        def reset(self: Any) -> None:
            validation.begin()
            cls.reset(self)
            validation.begun()

        def _on_evaluation_epoch_end(self: Any) -> None:
            cls._on_evaluation_epoch_end(self)
            validation.epoch_end()

        members = (run, reset, _on_evaluation_epoch_end)
        return {member.__name__: member for member in members}

    return methods


def _fetching(validation: Validation) -> Callable[[Any], dict[str, Any]]:
    """A data fetcher that gives this group's batches."""

    def methods(cls: Any) -> dict[str, Any]:
        def __next__(self: Any) -> Any:
            return validation.next(self)

        return {"__next__": __next__}

    return methods
