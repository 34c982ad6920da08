"""A Trainer's training data, and where it is in them.

Two objects of Lightning get a subclass of their own class while a fit lasts. `Batches.release`
undoes both:

- the data fetcher calls `at_boundary` before it fetches. There a step begins and a replica group
  heals: counters are whole, and batch, batch index and "last batch" that Lightning computes next
  are already those of the healed position. (At `on_train_batch_start` they would be stale.)
- the sampler of batches can be told to leave out the first n, which costs index arithmetic only,
  whatever sampler or batch sampler the user chose; or which batches to give (`validation.py`).

Reads and writes attributes of Lightning 2.5 and 2.6 that are not public. `counters.check_counters` says in one
sentence if they have moved.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

import torch
from torch.utils.data import DataLoader

from ft_core.heal.random_numbers import RandomNumbers, unchanged
from ft_core.manager import Manager
from ft_lightning.shared.draws import Draws, begin_pass, bring, is_stream, state_of, travelling
from ft_lightning.shared.epoch_rest import Origin, batches_left, goes_on, read_so_far
from ft_lightning.shared.world_of_torch import sharding_sampler
from ft_lightning.trainer.counters import batches_done, epochs_done
from lighthouse.files import machine_lock

log = logging.getLogger("ft_lightning")


def adopt(instance: Any, methods: Callable[[type], dict[str, Any]]) -> None:
    """Give `instance` a subclass of its class with `methods(class)` in it.

    One base and no slots, since an instance may change its class only if the layout stays.
    """
    cls = type(instance)
    namespace = {"__module__": cls.__module__, "__slots__": (), "_ft_original": cls}
    instance.__class__ = type(cls.__name__, (cls,), {**namespace, **methods(cls)})


def adopted(instance: Any) -> bool:
    """Whether `adopt` has changed the class of `instance`."""
    return "_ft_original" in vars(type(instance))


def release(instance: Any, *attributes: str) -> None:
    """Undo `adopt` and remove `attributes`. Does nothing if it was not adopted."""
    if adopted(instance):
        instance.__class__ = type(instance)._ft_original
        for name in attributes:
            vars(instance).pop(name, None)


class _Sampler:
    """In the place of a (batch) sampler that has no subclass of its own: a list, or a range."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def _placing(cls: Any) -> dict[str, Any]:
    """A (batch) sampler whose next iteration leaves out `_ft_skip` items, or gives `_ft_chosen`."""

    def __iter__(self: Any) -> Iterator[Any]:
        if self._ft_chosen is not None:
            return iter(self._ft_chosen)
        return _later(self, self._ft_draws.follow(lambda: cls.__iter__(self)))

    return {"__iter__": __iter__, "_ft_skip": 0, "_ft_chosen": None}


def _later(sampler: Any, items: Iterator[Any]) -> Iterator[Any]:
    # Not before the first item is asked for: a loader with workers makes two iterators, and uses the second.
    skip, sampler._ft_skip = sampler._ft_skip, 0
    yield from islice(items, skip, None)


def _announcing(
    at_boundary: Callable[[], None], fetched: Callable[[bool], None]
) -> Callable[[Any], dict[str, Any]]:
    """A data fetcher that calls `at_boundary` before it fetches, and `fetched(there was a batch)` after."""

    def methods(cls: Any) -> dict[str, Any]:
        def __next__(self: Any) -> Any:
            try:
                at_boundary()
            except StopIteration as error:
                # Lightning would take it for the end of the epoch and go on in silence.
                raise RuntimeError("StopIteration at a step's boundary") from error
            try:
                batch = cls.__next__(self)
            except StopIteration:
                fetched(False)
                raise
            fetched(True)
            return batch

        return {"__next__": __next__}

    return methods


def _asking(
    refuse: Callable[[], None], asks: Callable[[], None]
) -> Callable[[Any], dict[str, Any]]:
    """A loop that calls `refuse()` before it looks whether it is to run at all, and `asks()` before it asks for
    loaders."""

    def methods(cls: Any) -> dict[str, Any]:
        def skip(self: Any) -> bool:
            refuse()
            skips: bool = cls.skip.__get__(self)
            return skips

        def setup_data(self: Any) -> None:
            if self._combined_loader is None or self._should_reload_train_dl:
                asks()
            cls.setup_data(self)

        return {"skip": property(skip), "setup_data": setup_data}

    return methods


class Batches:
    """The training data of one fit. `set_sampler_epoch(loader, epoch)` is Lightning's own."""

    def __init__(self, set_sampler_epoch: Callable[[Any, int], None]) -> None:
        self.at_boundary: Callable[[], None] = lambda: None
        """Called before a batch is fetched. The driver sets it."""
        self.set_sampler_epoch = set_sampler_epoch
        # By id, and no longer than Lightning has them: each epoch may have loaders, and with them data, of its own.
        self._samplers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._adopted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._given: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Loaders that have been given a sampler in place of theirs."""
        self._marked: list[Any] = []
        self._drawn: list[Any] = []  # as far as the orders of samplers are drawn at the mark
        self._ahead: tuple[tuple[int, int], list[Any]] = (0, 0), []
        """A place, (epoch, batch), and the states of the streams there: of those of unknown length, from which a batch
        is fetched in advance, the place behind that; of all, where they were brought to, which not all say themselves
        before their next sample is asked for."""
        self._warned = False
        self._has_data = False  # a batch was fetched in this fit
        self.numbers = RandomNumbers()
        self.origin = Origin()
        """Of the epoch in the middle of which this fit was resumed with other batches."""
        self._resumes = False
        self._kept: list[Any] = []
        """The states of the streams with which it was saved."""
        self.known_length = True
        """Whether the epoch under way ends after a number of batches that Lightning knows."""
        self.has_streams = False
        """Whether a training loader has no sampler: its place is noted by `mark`."""
        self.asked_with: Any = None
        """With `reload_dataloaders_every_n_epochs`: what `kept` gave before the training loaders were asked for."""

    def begin_fit(self, trainer: Any, kept: Callable[[Any], Any]) -> None:
        """No loader was asked for yet. `kept(trainer)`: what decides which loaders there are."""

        def asks() -> None:
            if trainer.reload_dataloaders_every_n_epochs:
                self.asked_with = kept(trainer)

        self.adopt(trainer.fit_loop, _asking(lambda: self._refuse_nothing(trainer), asks))

    def adopt_loader(self, loader: Any) -> None:
        """Make a data loader's position choosable."""
        sampler: Any = self.index_sampler(loader)
        if sampler is None:
            self.has_streams = True
        elif not adopted(sampler):
            try:
                adopt(sampler, _placing)
            except TypeError:
                name = "sampler" if loader.batch_sampler is None else "batch_sampler"
                vars(loader)[name] = sampler = _Sampler(sampler)
                self._given[id(loader)] = loader
                adopt(sampler, _placing)
            sampler._ft_draws = Draws(sampler)
            self._samplers[id(sampler)] = sampler

    def begin_epoch(self, trainer: Any) -> None:
        """Have `at_boundary` called before each batch of this epoch's fetcher, which is not used yet."""
        for loader in trainer.fit_loop._combined_loader.flattened:
            begin_pass(loader)
        fetcher = trainer.fit_loop._data_fetcher
        if hasattr(fetcher, "iterator_wrapper"):
            raise ValueError(
                "ft_ddp does not support training_step(self, dataloader_iter): a step begins where "
                "Lightning fetches a batch; take (self, batch, batch_idx)"
            )
        if not adopted(fetcher):

            def before_it() -> None:
                self.at_boundary()
                self.fetches(trainer)

            self.adopt(fetcher, _announcing(before_it, lambda there: self._fetched(trainer, there)))

    def _fetched(self, trainer: Any, there: bool) -> None:
        if there or self._has_data:
            self._has_data = True
        elif not trainer.fit_loop.epoch_loop.restarting:  # else it may be at its epoch's end
            self._refuse_no_data(trainer)

    def _refuse_nothing(self, trainer: Any) -> None:
        """The loaders are there, and have a length of 0 perhaps."""
        if trainer.fit_loop.max_batches == 0:
            self._refuse_no_data(trainer)

    @staticmethod
    def _refuse_no_data(trainer: Any) -> None:
        """Raises RuntimeError if this rank is one of several: its epochs would end at once, while its peers train,
        and with its last one they would hear that the training is over."""
        scope = trainer.strategy.scope
        if scope.world_size > 1:
            raise RuntimeError(
                f"the training data of rank {scope.rank} has no batch, and each of the {scope.world_size} ranks "
                "needs one for each step: divide the data so that each rank has a part of it"
            ) from None

    def adopt(self, instance: Any, methods: Callable[[type], dict[str, Any]]) -> None:
        """Give `instance` a subclass of its own class, until `release`."""
        adopt(instance, methods)
        self._adopted[id(instance)] = instance

    def mark(self, trainer: Any) -> None:
        """A step (or window of batches) begins: note how far the streams and random numbers are.

        Only streams have a state. Other loaders are placed by index in the order that their sampler has drawn, or not
        at all.
        """
        self.numbers.mark()
        if any(sampler._ft_draws.counts for sampler in self._samplers.values()):
            self._drawn = self._orders_now(trainer)
        if self.has_streams:
            self._marked = self._states_before_next(trainer)

    def _states_before_next(self, trainer: Any) -> list[Any]:
        if self._resumes:  # it goes there when it has a quorum, in which peers may ask already
            return self._kept
        place, states = self._ahead
        if states and place == (epochs_done(trainer), batches_done(trainer)):
            return states
        return [] if self._is_ahead(trainer) else self._states_now(trainer)

    def fetches(self, trainer: Any) -> None:
        """A batch is fetched now, at a boundary."""
        if self.has_streams and self._is_ahead(trainer):
            after = epochs_done(trainer), batches_done(trainer) + 1
            self._ahead = after, self._states_now(trainer)

    @staticmethod
    def _is_ahead(trainer: Any) -> bool:
        """Whether Lightning has fetched a batch in advance, to know which is the last one."""
        return bool(getattr(trainer.fit_loop._data_fetcher, "batches", ()))

    def _states_now(self, trainer: Any) -> list[Any]:
        return [state_of(loader) for loader in trainer.fit_loop._combined_loader.flattened]

    def states(self, trainer: Any, *, mark: bool) -> list[Any]:
        """For each loader, the state that places a peer's loader at the mark; None: it has none.

        `mark`: set the mark here first.
        """
        if mark:
            self.mark(trainer)
        self._marked = [travelling(state) for state in self._marked]
        return [drawn or state for drawn, state in zip_longest(self._drawn, self._marked)]

    def _orders_now(self, trainer: Any) -> list[Any]:
        samplers = map(self.index_sampler, trainer.fit_loop._combined_loader.flattened)
        return [None if sampler is None else sampler._ft_draws.state() for sampler in samplers]

    def jump(self, trainer: Any, states: Sequence[Any] = ()) -> None:
        """Make the next batch that is fetched the one at which the loops' counters stand.

        `states`: of a peer that is there, or empty.
        """
        fit_loop = trainer.fit_loop
        done, epoch = batches_done(trainer), epochs_done(trainer)
        origin = self.origin.of(epoch)
        loaders, mode = fit_loop._combined_loader.flattened, fit_loop._combined_loader._mode
        self._marked, self._resumes = list(states), False
        if states:
            self._drawn = []
        self._ahead = (epoch, done), list(states)
        chosen, drawn = [], []
        for loader, state in zip_longest(loaders, states[: len(loaders)]):
            self.set_sampler_epoch(loader, epoch)
            sampler = self.index_sampler(loader)
            if sampler is not None and origin != Origin(epoch):
                sampler._ft_chosen = batches_left(loader, origin)[done - origin.batch :]
                chosen.append(sampler)
            elif sampler is not None:
                sampler._ft_skip = _read_of(loader, done, mode)
                over = done > len(loader) and mode == "max_size"
                if over:  # its order is drawn, to its end
                    sampler._ft_chosen, sampler._ft_skip = [], 0
                    chosen.append(sampler)
                draws, own = sampler._ft_draws, sampler._ft_draws.state()
                draws.take(state or own, ended=False)
                drawn.append((draws, state or own, over))
            elif not bring(loader, state):
                begin_pass(loader)
                if done:
                    self._warn_unplaceable(loader)
        fetcher = fit_loop._data_fetcher
        with unchanged():  # torch seeds workers, and the sampler draws an order, as it had before
            iter(fetcher)
        for sampler in chosen:  # the loader's iterator has asked it
            sampler._ft_chosen = None
        fetcher.fetched += done
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length
        if fetcher.done:  # this epoch asks for no item, and the next one begins at its first
            for sampler in self._samplers.values():
                sampler._ft_skip = 0
        for draws, state, over in drawn:
            not_drawn_yet = state and torch.equal(*state)
            if over or fetcher.done or not_drawn_yet:
                draws.take(state, ended=True)
            draws.begun()

    # ------------------------------------------------------------------ resumed within an epoch

    def read_so_far(self, trainer: Any) -> dict[str, Any]:
        """For a checkpoint: what `resume` needs to know of the epoch under way."""
        combined = trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        only = loaders[0] if len(loaders) == 1 else None
        read: dict[str, Any] = read_so_far(only, self.origin.of(epochs_done(trainer)))
        if self.has_streams and combined is not None:
            read["streams"] = [travelling(s) for s in self._states_before_next(trainer)]
        return read

    def resume(self, trainer: Any, before: dict[str, Any], *, same_world: bool) -> bool:
        """A fit begins with loaded counters: let the epoch go on with the samples that were not read.
        False: it can't be said which these are. Call it before the loops go on.

        `before`: what `read_so_far` returned when that checkpoint was saved; or nothing.
        """
        fit_loop = trainer.fit_loop
        loop, loaders = fit_loop.epoch_loop, fit_loop._combined_loader.flattened
        progress, epoch = loop.batch_progress, epochs_done(trainer)
        done = progress.current.completed + loop.restarted_on_train_batch_end
        if not fit_loop.restarted_mid_epoch or progress.is_last_batch or not done:
            return True
        # A loader with a state of its own was given that by Lightning.
        if any(self.index_sampler(x) is None or hasattr(x, "load_state_dict") for x in loaders):
            self._kept = before.get("streams", []) if same_world else []
            self._resumes = bool(self._kept) and all(map(is_stream, loaders))
            for loader in [] if self._resumes else loaders:
                if is_stream(loader) and not hasattr(loader, "load_state_dict"):
                    self._warn_unplaceable(loader)
            return same_world
        only = loaders[0] if len(loaders) == 1 else None
        found = goes_on(only, before, epoch=epoch, done=done, same_world=same_world)
        if found is None:
            return False
        origin, number = found
        if number != done and number >= trainer.num_training_batches:
            return False
        self.origin, self._resumes = origin, True
        for name in ("ready", "started", "processed", "completed") if number != done else ():
            setattr(progress.current, name, getattr(progress.current, name) + number - done)
        return True

    def begin(self, trainer: Any) -> None:
        """The first batch of a step is about to be fetched."""
        if self._resumes:  # and no peer's place was taken
            self.jump(trainer, self._kept)
        self.known_length = trainer.fit_loop._data_fetcher.length is not None
        self.mark(trainer)

    @staticmethod
    def end_epoch(trainer: Any) -> None:
        """The batch at hand is the last one of its epoch."""
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        trainer.fit_loop._data_fetcher.done = True

    def release(self) -> None:
        """Give everything that was adopted its own class back."""
        for sampler in self._samplers.values():
            release(sampler, "_ft_skip", "_ft_chosen", "_ft_draws")
        for instance in self._adopted.values():
            release(instance)
        for loader in self._given.values():
            its = vars(loader)
            its.update({name: each.items for name, each in its.items() if type(each) is _Sampler})
        for each in (self._samplers, self._adopted, self._given):
            each.clear()

    @staticmethod
    def index_sampler(loader: object) -> Any | None:
        """What chooses the (batches of) samples of `loader`; None: nothing that can be asked."""
        if not isinstance(loader, DataLoader) or is_stream(loader):
            return None
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler

    def _warn_unplaceable(self, loader: object) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the data of %s continues where this process's own iterator starts: "
                "an iterable has no position to restore, so some samples are seen twice or not at "
                "all in this epoch",
                type(loader).__name__,
            )


def _read_of(loader: Any, done: int, mode: str) -> int:
    """How many batches of one of several loaders were read in an epoch of which `done` batches are.

    `mode`: of Lightning's `CombinedLoader`. A shorter one has ended ("max_size"), or started over. That it does when
    it is asked for the next batch, and draws another order then.
    """
    if mode == "max_size" or not done:
        return min(done, len(loader))
    return (done - 1) % len(loader) + 1 if len(loader) else 0


# ---------------------------------------------------------------- hot spares


class DataShare:
    """Which share of the training data this replica group reads in one fit: `FTDDPStrategy(spares=k)`.

    N + k groups have N shares (`ft_core.replica.shares`). `trainer.world_size` and the samplers are those
    of N groups. A spare reads a share, too, whose batches do not count. When it is given the share of one
    that is gone, that has happened with a commit, or with an attempt that too few were left to commit:

    | when it is known | what the group does |
    |---|---|
    | before the first batch of a step is fetched | its samplers go to the other share, and its loaders to the batch at hand |
    | when a discarded step is tried again | it abandons the step's batches, and fetches those of its share; its peers wait with their kept gradients |
    | between two steps of a batch (manual optimization) | the rest of the batch is of the share that it has read so far |

    What it has logged for an epoch's mean as a spare is dropped: another group's mean has those batches.
    The share is `strategy.share`. The loop's thread.
    """

    def __init__(self, trainer: Any, manager: Manager, batches: Batches) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._is_spare = False

    def changes(self) -> bool:
        """Whether this group contributes to the step under way, and reads a share other than its own."""
        part = self._manager.step.part
        given = None if part is None else part.share
        return given is not None and given != self._trainer.strategy.share

    def follow(self) -> None:
        """The first batch of a step is about to be fetched: let it be of this group's share."""
        part = self._manager.step.part
        if part is None:
            return  # the attempt has failed already: the next one tells
        was_spare, self._is_spare = self._is_spare, part.share is None
        if part.share is None:
            return
        if was_spare:
            self._trainer.fit_loop.epoch_loop._results.reset()
        if self.changes():
            strategy = self._trainer.strategy
            strategy.share = part.share
            place = strategy.distributed_sampler_kwargs
            for loader in self._trainer.fit_loop._combined_loader.flattened:
                sampler = sharding_sampler(loader, place["num_replicas"])
                if sampler is not None:
                    sampler.rank = place["rank"]
            self._batches.jump(self._trainer)


def check_loader(loader: Any, shards: int) -> None:
    """Raise ValueError for training data of which a hot spare could not take over a share."""
    if Batches.index_sampler(loader) is None or sharding_sampler(loader, shards) is None:
        raise ValueError(
            "spares needs training data of which a group can take over another one's share: DataLoaders "
            "over map-style datasets, with the DistributedSampler that Lightning puts into them; "
            f"{type(loader).__name__} has none, so set spares=0"
        )


class Preparing:
    """Has the `prepare_data` of `owners` (a module, a datamodule, or None) run in one process of this machine and
    user at a time, for those with the same `subject`. Until `release()`.

    Only while it runs: ranks of a group wait for each other before and after it, and some of them may be on
    other machines. A lock that is held there would hold up ranks that others wait for.
    """

    def __init__(self, subject: str = "", *owners: Any) -> None:
        self._subject = subject
        self._owners = [owner for owner in owners if owner is not None]
        for owner in self._owners:
            owner.prepare_data = self._alone(owner)

    def _alone(self, owner: Any) -> Callable[[], None]:
        prepare = owner.prepare_data

        @functools.wraps(prepare)  # Lightning asks whether it is overridden
        def prepare_data() -> None:
            vars(owner).pop("prepare_data", None)  # it may pickle its owner
            with machine_lock("ft_lightning", self._subject):
                prepare()

        return prepare_data

    def release(self) -> None:
        """Idempotent."""
        for owner in self._owners:
            vars(owner).pop("prepare_data", None)
