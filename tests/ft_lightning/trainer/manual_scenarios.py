"""Scenarios (see `scenarios.py`) of gradients that are used where they were not computed.

One backward for several updates, gradients that are kept over batches, a step that the user takes
apart from its closure: when such a step is discarded, what is computed again must come to the same
gradients. And epochs and validations that come before such a step's end.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ft_lightning.shared.step_collectives import reduce_in_step
from ft_lightning.trainer import driver
from tests.ft_lightning.trainer.scenarios import Net, Place, Result, Trace, fit


class Shared(Net):
    """Two optimizers on one loss, by hand, in windows of three batches.

    | batch | backward passes | updates |
    |---|---|---|
    | first | one | both, each clipped by itself |
    | second | one | the first; the other's gradients are kept |
    | third | two, one of them without sync | the first, then the other twice on the same gradients |
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.automatic_optimization = False
        # No running statistics: a forward that is repeated leaves no trace.
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def on_train_start(self) -> None:
        super().on_train_start()
        self.inject_at_votes()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        if batch_idx % 3 == 2:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
        loss = self.loss(batch)
        self.update(first, loss)
        if batch_idx % 3 != 1:
            self.update(second)
            if batch_idx % 3 == 2:
                self.update(second)
            second.zero_grad()
        self.log("train", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)

    def update(self, optimizer: Any, loss: Any = None) -> None:
        if loss is not None:
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.01)
        second = torch.optim.SGD(self.net[1:].parameters(), lr=0.05, momentum=0.5)
        return [first, second]


def shared(place: Place) -> Result:
    trace = Trace()
    trainer = place.trainer(trace, unused=True)
    fit(trainer, Shared(place))
    return trace.result(trainer)


class ByHand(Net):
    """An own `optimizer_step` that calls the closure itself, changes gradients, and steps then."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        def scaled() -> Any:
            loss = closure()
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5 + batch_idx
            return loss

        if batch_idx % 2:
            optimizer.step(closure=scaled)
        else:
            scaled()
            optimizer.step()


def by_hand(place: Place) -> Result:
    trace = Trace()
    trainer = place.trainer(trace, gradient_clip_val=0.5)
    fit(trainer, ByHand(place))
    return trace.result(trainer)


def rest_left_out(place: Place) -> Result:
    """`on_train_batch_start` ends an epoch before a batch for which a step has begun."""

    class LeavesOut(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 7 and self.current_epoch else None

    trace = Trace()
    trainer = place.trainer(trace, max_epochs=3)
    fit(trainer, LeavesOut(place))
    return trace.result(trainer)


def window_left_out(place: Place) -> Result:
    """The same within a window of accumulated batches, in which something was reduced. `place.inject`: the reduction
    of its only batch has reached the other group, and fails in this one."""

    class LeavesOut(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 and self.current_epoch == 1 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            with patch.object(driver, "reduce_in_step", self.torn):
                self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def torn(self, *args: Any) -> Any:
            reduced = reduce_in_step(*args)
            self.inject()
            return reduced

    trace = Trace()
    trainer = place.trainer(trace, max_epochs=3, accumulate_grad_batches=4)
    fit(trainer, LeavesOut(place))
    return trace.result(trainer)


def seldom(place: Place) -> Result:
    """By hand, an update in each fifth batch: neither a validation nor the epoch's end follows on one."""

    class Seldom(Net):
        def __init__(self, place: Place) -> None:
            super().__init__(place)
            self.automatic_optimization = False
            # No running statistics: they would be each process's own in a window.
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.inject()
            optimizer = self.optimizers()
            loss = self.loss(batch)
            self.log("train", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
            if batch_idx % 5 == 4:
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    trace = Trace()
    trainer = place.trainer(trace, max_epochs=3, val_check_interval=4)
    fit(trainer, Seldom(place))
    return trace.result(trainer)


def contrastive(place: Place) -> Result:
    """Each sample is to be like itself, and unlike those of both groups, through which gradients flow. `place.inject`:
    the peer has reduced these, and they fail in this group; the weight behind them has its own by then."""

    class Contrastive(Net):
        def __init__(self, place: Place) -> None:
            super().__init__(place)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            mine = nn.functional.normalize(self.net(batch[0]), dim=-1)
            rows = self.all_gather(mine, sync_grads=True)
            rows.register_hook(lambda _: self.inject())
            labels = torch.arange(len(mine)) + len(mine) * place.rank
            likeness = self.scale * mine @ rows.flatten(0, 1).T
            loss = nn.functional.cross_entropy(likeness, labels)
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

    trace = Trace()
    trainer = place.trainer(trace)
    fit(trainer, Contrastive(place))
    return trace.result(trainer)


class LooksAround(torch.optim.SGD):
    """Evaluates the loss twice a step, as SAM and its like do: at the weights, and up the slope from there."""

    def step(self, closure: Any = None) -> Any:
        weights = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            slopes = [0.05 * p.grad / (p.grad.norm() + 1e-8) for p in weights]
            torch._foreach_add_(weights, slopes)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(weights, slopes)
        super().step()
        return loss


def sharpness(place: Place) -> Result:
    """An optimizer that evaluates the loss twice."""

    class Sharp(Net):
        def configure_optimizers(self) -> Any:
            return LooksAround(self.parameters(), lr=0.1, momentum=0.9)

    trace = Trace()
    trainer = place.trainer(trace)
    fit(trainer, Sharp(place))
    result = trace.result(trainer)
    return {**result, "runs": result["runs"][::2]}


SCENARIOS = {
    f.__name__: f
    for f in (shared, by_hand, rest_left_out, window_left_out, seldom, contrastive, sharpness)
}
