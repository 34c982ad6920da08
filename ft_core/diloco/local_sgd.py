"""LocalSGD: members train by themselves and average their parameters every so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ft_core.diloco.fragments import DEFAULT_BUCKET_BYTES, Fragment, local_part, split
from ft_core.diloco.global_state import GlobalState
from ft_core.diloco.outer_loop import OuterLoop
from ft_core.diloco.outer_step import OuterStep
from ft_core.diloco.schedule import Schedule

if TYPE_CHECKING:
    from ft_core.manager import Manager


def extract_local_tensor(t: Tensor) -> Tensor:
    """A copy of `t`, without gradient; of a DTensor, a copy of its local part."""
    return local_part(t).clone()


class ParameterMean(OuterStep):
    """The parameters become the participants' mean. Needs no global parameters of its own."""

    def contribution(self, fragment: Fragment, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        return [local_part(p) for p in fragment.parameters]

    def mean_deltas(self, fragment: Fragment, means: Sequence[Tensor]) -> Sequence[Tensor]:
        assert self.state is not None
        olds = self.state.of(fragment)
        return [old.to(mean.device) - mean for old, mean in zip(olds, means, strict=True)]

    @torch.no_grad()
    def update(self, fragment: Fragment, means: Sequence[Tensor]) -> None:
        """x_{t+1} = 1/K sum_k x_t^k, for t + 1 in the synchronization indices (algorithm 1)."""
        for p, mean in zip(fragment.parameters, means, strict=True):
            local_part(p).copy_(mean)
        if self.state is not None:
            self.state.take(fragment)


class LocalSGD(OuterLoop):
    """Fault-tolerant LocalSGD (arXiv 1805.09767, algorithm 1).

        with LocalSGD(manager, model, optimizer, sync_every=8):
            for batch in batches:
                optimizer.zero_grad()
                loss(model(batch)).backward()
                optimizer.step()      # every 8th: the parameters become the members' mean

    A window whose sync fails is discarded: the parameters return to the last mean. The model and
    its optimizer must not be in the manager's own state. A healing member gets the last mean from
    here, and keeps an optimizer state of its own.

    Args:
        manager: its steps are the syncs.
        model: trainable parameters are averaged; persistent buffers too (integers: the first
            participant's).
        optimizer: its `step` is an inner step.
        sync_every: inner steps between two syncs.
        weighted: True or "steps": the mean is weighted by each member's inner steps in the window.
            "samples": by what `add_samples` has counted.
        bucket_bytes: of one all-reduce.
        keep_windows: True: a window whose sync was discarded through another member's fault is
            kept, and contributes to the next one. False: it is dropped, as documented for torchft.

    All settings must be equal in all members: checked when they join.
    """

    KEY = "local_sgd"

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        *,
        weighted: bool | str = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        keep_windows: bool = False,
    ) -> None:
        fragments = split(model, None)
        state = GlobalState(model, fragments, None)
        super().__init__(
            manager,
            ParameterMean(model, fragments, state, bucket_bytes),
            optimizer,
            Schedule(sync_every),
            weighted=weighted,
            keep_windows=keep_windows,
            settings="",
        )
