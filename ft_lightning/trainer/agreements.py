"""Agreements between steps: at the end of a validation, and of an epoch.

An agreement is a step of the manager without an update: a quorum, perhaps a gather of what each
member contributes, a vote. It is repeated until it is committed, so that all members have the same
result or none has; a peer that dies costs a further attempt. Fewer than `min_replicas`
participants may commit it, since it changes no state.

Replica groups join where a batch begins, not in the middle of Lightning's hooks. So the votes before
agreements keep newcomers waiting (`Manager.should_commit(admits=False)`): the one on the last step
of a batch on which agreements follow, and those on all agreements but the last one. Where that could
not be foreseen (a time limit, an early stop), or too few are left without a newcomer, it is admitted
at an agreement. Its peers send it that instead of a state: it contributes nothing and joins again. A
group that finds at an agreement that it is behind continues alone to the next batch, and heals there.

Where a strategy has no hook, two callbacks of ours make the agreements. Lightning calls callbacks
that decide by an epoch's metrics (EarlyStopping and checkpoints) after all others and after the
module's own `on_train_epoch_end`. It tells them by their class, so ours have such a class, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ft_lightning.trainer import logged_totals
from ft_lightning.trainer.decisions import Decisions
from ft_lightning.trainer.leader import SkippedHooks

Gathered = tuple[list[Any], int | None]
"""What each participant contributed, in the order of ranks; and the rank of this group (None: it is a
hot spare)."""
Round = Callable[[bytes | None, bool], tuple[list[bytes], int | None] | None]


class Rounds:
    """What is agreed at the ends of validations and epochs. The loop's thread."""

    def __init__(
        self,
        trainer: Any,
        decisions: Decisions,
        round_of: Round | None,
        settled: Callable[[], object] = lambda: None,
    ) -> None:
        """`round_of(mine, last)`: one round, see `StepDriver.round`; None: no agreements. `settled()` is called
        when all members have come past the callbacks that save."""
        self._trainer, self._decisions, self._round = trainer, decisions, round_of
        self._settled = settled
        self.divided = False
        """Whether the validation under way is divided: then its members meet to tally."""

    @property
    def off(self) -> bool:
        """Whether each group decides for itself here."""
        trainer = self._trainer
        if self._round is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return True
        # The window with which one stream ends may be longer in another group, which then validates at another batch.
        endless = trainer.num_training_batches == float("inf")
        by_batches = isinstance(trainer.val_check_batch, int)
        return endless and by_batches and trainer.accumulate_grad_batches > 1

    def follow(self) -> bool:
        """Whether agreements follow on the batch at hand, as far as that is known before its step is
        committed."""
        if self.off:
            return False
        fit_loop = self._trainer.fit_loop
        due: bool = fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)
        return due or self._epoch_ends

    @property
    def _epoch_ends(self) -> bool:
        loop = self._trainer.fit_loop
        ends: bool = loop.epoch_loop.batch_progress.is_last_batch
        # Else it goes on till `min_epochs` and `min_steps`.
        return ends or (self._trainer.should_stop and loop._can_stop_early)

    def meet(self, *, tally: bool = False) -> None:
        """A validation's batches are done, nothing is logged: make sure that the leader lives."""
        if self._round is not None and not self.off and self.divided == tally:
            self._round(None, False)

    def gather(self, mine: Any, *, last: bool = False) -> Gathered | None:
        """Exchange plain values and tensors with all members. None: there is no agreement here.
        `last`: a batch follows."""
        if self._round is None or self.off:
            return None
        result = self._round(logged_totals.pack(mine), last)
        if result is None:
            return None
        return [logged_totals.unpack(packed) for packed in result[0]], result[1]

    def validation_metrics(self) -> None:
        """A validation's metrics are complete, and no callback has acted on them: take the first
        member's."""
        if not self.off:
            self._agree(lambda result: False)

    def epoch_metrics(self) -> None:
        """An epoch's metrics are complete, and no callback has acted on them: those to be
        synchronized are summed up, the others are the first member's."""
        if not self.off:
            self._agree(lambda result: result.meta.sync.should or not result.is_tensor)

    def shared_metrics(self, known: set[str]) -> None:
        """As `epoch_metrics`, at a sharded validation's end. `known`: those summed up already."""
        results = self._trainer._results
        new = {id(result) for key, result in results.items() if key not in known}
        self._agree(lambda r: id(r) in new and r.is_tensor and r.meta.sync.should)

    def stop(self, *, in_epoch: bool) -> None:
        """Callbacks have acted on the metrics: stop if any member wishes to. `in_epoch`: those of a
        validation, else of an epoch."""
        last = not (in_epoch and self._epoch_ends)
        result = self.gather(bool(self._decisions.stop_wished), last=last)
        if result is not None:
            self._decisions.agree_to_stop(any(result[0]))
            self._settled()

    def _agree(self, summed: Callable[[Any], bool]) -> None:
        """Replace what callbacks and schedulers see by values that are equal in all groups.

        Those with `summed(result)` are reduced over what each participant has seen (torchmetrics
        objects: over their states). All other numbers are the first member's.
        """
        trainer, results = self._trainer, self._trainer._results or {}
        numbers = {k: v for k, v in trainer.callback_metrics.items() if v.numel() == 1}
        objects = {
            key: logged_totals.states(result.value, {})
            for key, result in results.items()
            if not result.is_tensor
            and not result.has_reset
            and result.meta.on_epoch
            and summed(result)
        }
        mine: dict[str, dict[str, Any]] = {
            "first": {name: float(value) for name, value in numbers.items()},
            "rows": logged_totals.rows(results, lambda r: r.is_tensor and summed(r)),
            "objects": objects,
        }
        gathered = self.gather(mine)
        if gathered is None:
            return
        members = gathered[0]
        for name, value in members[0]["first"].items():
            if name in numbers:
                self._adopt(name, torch.full_like(numbers[name], value))
        for key in mine["rows"]:
            same = [member["rows"][key] for member in members if key in member["rows"]]
            results[key]._computed = logged_totals.total(same).to(results[key].value.device)
        for key in objects:
            metric = results[key].value
            with logged_totals.shared(
                metric, [member["objects"].get(key, {}) for member in members]
            ):
                results[key]._computed = metric.compute()

    def _adopt(self, name: str, agreed: torch.Tensor) -> None:
        self._trainer._logger_connector._callback_metrics[name] = agreed
        for metric in (self._trainer._results or {}).values():
            if metric._computed is not None and name in _names(metric.meta):
                metric._computed = agreed


def _names(meta: Any) -> tuple[str, ...]:
    return meta.name, meta.forked_name(False)


# ---------------------------------------------------------------------- where they happen


def make_callbacks(
    early_stopping: type,
    begin_epoch: Callable[[], None],
    rounds: Rounds,
    decisions: Decisions,
    skipped: SkippedHooks,
) -> tuple[Any, Any]:
    """(one to be the first in the Trainer's list, one to be the last).

    `early_stopping`: the class of the Lightning that is used. `begin_epoch()`: called before the
    data fetcher of a new epoch is used. `skipped`: told of the hooks that begin and end.
    """

    def first_epoch_start(self: Any, trainer: Any, module: Any) -> None:
        begin_epoch()

    def first_validation_epoch_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.meet()

    def first_validation_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.validation_metrics()

    def first_epoch_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.epoch_metrics()

    def last_validation_end(self: Any, trainer: Any, module: Any) -> None:
        decisions.validated()
        rounds.stop(in_epoch=True)

    def last_epoch_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.stop(in_epoch=False)

    first = {
        "on_train_epoch_start": first_epoch_start,
        "on_validation_epoch_end": first_validation_epoch_end,
        "on_validation_end": first_validation_end,
        "on_train_epoch_end": first_epoch_end,
    }
    last = {
        "on_train_epoch_start": first_epoch_start,  # a callback may have made another fetcher
        "on_validation_end": last_validation_end,
        "on_train_epoch_end": last_epoch_end,
    }
    first = skipped.watching(first)
    return _callback("First", early_stopping, first), _callback("Last", early_stopping, last)


def _callback(name: str, base: type, hooks: dict[str, Any]) -> Any:
    """An instance of `base` without its behaviour: no monitor, no state."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def state(self: Any) -> dict[str, Any]:
        return {}

    members = {
        "_ft_internal": True,
        "__init__": nothing,
        "monitor": None,
        "state_key": f"ft_lightning.{name}",
        "setup": nothing,
        "state_dict": state,
        "load_state_dict": nothing,
        "on_validation_end": nothing,
        "on_train_epoch_end": nothing,
        **hooks,
    }
    return type(f"_FT{name}", (base,), members)()
