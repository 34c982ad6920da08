"""What a process takes from its peers' state."""

from __future__ import annotations

import torch
from torch import nn

from ft_accelerate.runtime.peer_state import load_optimizer, moments


def test_moments_keep_their_type_and_have_one_order() -> None:
    """torch gives loaded moments the type of their parameters."""

    def made() -> torch.optim.Optimizer:
        parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))]
        return torch.optim.AdamW(parameters)

    source, target = made(), made()
    for number, parameter in enumerate(source.param_groups[0]["params"]):
        source.state[parameter] = {
            "step": torch.tensor(4.0),
            "exp_avg_sq": torch.full(parameter.shape, 1 / 3 + number),
            "exp_avg": torch.full(parameter.shape, 1 / 7 + number),
        }
    assert moments([target]) == []
    load_optimizer(target, source.state_dict())
    theirs, mine = moments([source]), moments([target])
    assert len(mine) == 6
    for one, other in zip(theirs, mine, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)
