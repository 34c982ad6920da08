"""What a process takes from its peers' state."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ft_accelerate.runtime.peer_state import Begun, dump, load_optimizer, moments, restore
from ft_accelerate.runtime.trainer_state import SharedTrainerState, share, shared_by


def test_moments_keep_their_type_and_have_one_order() -> None:
    """torch gives loaded moments the type of their parameters."""

    def made() -> torch.optim.Optimizer:
        parameters = [
            nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            nn.Parameter(torch.ones(2)),
        ]
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


@pytest.mark.parametrize("models", [True, False])
def test_a_group_that_the_script_adds_on_its_way_has_its_peers_moments_there(models: bool) -> None:
    """Whether the place is where a window begins, or within one, in which moments stay."""

    def made() -> Any:
        net = nn.Linear(2, 2)
        return SimpleNamespace(
            _models=[net],
            _optimizers=[SimpleNamespace(optimizer=torch.optim.AdamW([net.weight], lr=0.1))],
            _schedulers=[],
            _custom_objects=[],
            _dataloaders=[],
            scaler=None,
            project_configuration=SimpleNamespace(iteration=0),
        )

    def add(accelerator: Any) -> None:
        (model,), (optimizer,) = accelerator._models, accelerator._optimizers
        optimizer.optimizer.add_param_group({"params": [model.bias], "lr": 0.2})

    peer, mine = made(), made()
    add(peer)
    peer._models[0](torch.ones(1, 2)).sum().backward()
    peer._optimizers[0].optimizer.step()
    peer._optimizers[0].optimizer.param_groups[1]["lr"] = 0.3
    state = dump({0: peer}, None)
    restore({0: mine}, state, models=True, arrived=False)
    with pytest.raises(RuntimeError, match="has 1 parameter groups, that of its peers has 2"):
        restore({0: mine}, state, models=models)
    add(mine)
    restore({0: mine}, state, models=models)
    optimizers = [each._optimizers[0].optimizer for each in (peer, mine)]
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.1, 0.3]
    theirs, its = (moments([optimizer]) for optimizer in optimizers)
    assert len(its) == 6
    assert all(torch.equal(one, other) for one, other in zip(theirs, its, strict=True))


def test_rates_that_a_replay_has_set_are_the_peers_again() -> None:
    """A scheduler that is registered, and not prepared, steps in a replay. Parameters stay: a graph may
    refer to them."""

    def made() -> Any:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return SimpleNamespace(
            _models=[net],
            _optimizers=[SimpleNamespace(optimizer=optimizer)],
            _schedulers=[],
            _custom_objects=[plateau],
            _dataloaders=[],
            scaler=None,
            project_configuration=SimpleNamespace(iteration=0),
        )

    peer, mine = made(), made()
    for each in (peer, mine):
        each._custom_objects[0].step(1.0)
    state = dump({0: peer}, None)
    before = [p.clone() for p in mine._models[0].parameters()]
    mine._custom_objects[0].step(2.0)
    assert mine._optimizers[0].optimizer.param_groups[0]["lr"] == 0.05
    restore({0: mine}, state, models=False)
    assert mine._optimizers[0].optimizer.param_groups[0]["lr"] == 0.1
    assert mine._custom_objects[0].num_bad_epochs == 0
    assert all(torch.equal(p, q) for p, q in zip(mine._models[0].parameters(), before, strict=True))


class Stub(SimpleNamespace):
    """Can be referred to weakly."""


def trainer_with(callback: Any) -> Any:
    """What `SharedTrainerState` sees of a Trainer."""
    import transformers
    from transformers.trainer_callback import TrainerState

    return Stub(
        state=TrainerState(),
        callback_handler=SimpleNamespace(callbacks=[callback]),
        control=transformers.TrainerControl(),
        lr_scheduler=None,
        optimizer=None,
        current_flos=0.0,
    )


def test_a_registered_sum_of_losses_may_have_a_graph() -> None:
    """As with plain Accelerate, whose `save_state` writes it. The script ended where its second window began."""
    loss = nn.Linear(2, 1)(torch.ones(2)).sum()
    registered = SimpleNamespace(state_dict=lambda: {"losses": [loss]})
    accelerator = SimpleNamespace(
        _models=[], _custom_objects=[registered], _schedulers=[], _optimizers=[]
    )
    begun = Begun(lambda: {0: accelerator})
    begun.mark({0: accelerator})
    (kept,) = begun.marked()["begun"]["0"]["custom"]
    assert not kept["losses"][0].requires_grad
    assert torch.equal(kept["losses"][0], loss)


def test_what_a_callback_exports_travels_be_it_an_argument_or_an_attribute() -> None:
    """Trainer makes a callback anew from both, from a checkpoint."""
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import ExportableState

    class Counts(transformers.TrainerCallback, ExportableState):
        def __init__(self, steps: int = 0) -> None:
            self.steps, self.epochs = steps, 0

        def state(self) -> dict[str, Any]:
            return {"args": {"steps": self.steps}, "attributes": {"epochs": self.epochs}}

    theirs, mine = Counts(7), Counts(2)
    theirs.epochs = 3
    peer, own = trainer_with(theirs), trainer_with(mine)
    own.optimizer = Stub(param_groups=[])
    arrives = SharedTrainerState(own)
    arrives.load_state_dict(SharedTrainerState(peer).state_dict())
    arrives.arrive()
    assert (mine.steps, mine.epochs) == (7, 3)


def test_what_a_trainer_could_not_save_is_named() -> None:
    """It used to be "Object of type set is not JSON serializable", from our own functions."""
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import ExportableState

    class Seen(transformers.TrainerCallback, ExportableState):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": seen}}

    seen: Any = {1, 2}
    trainer = trainer_with(Seen())
    shared = SharedTrainerState(trainer)
    with pytest.raises(TypeError, match=r"the state of Seen can neither travel .* type set is not"):
        shared.state_dict()
    seen = sorted(seen)
    names = [name for name, _ in json.loads(shared.state_dict()["callbacks"])]
    assert names == ["Seen", "TrainerControl"]
    trainer.state.log_history.append({"loss": torch.zeros(())})
    with pytest.raises(TypeError, match=r"\(a logged row\) .* type Tensor is not"):
        shared.state_dict()


def test_a_trainer_may_have_no_hash() -> None:
    """Nor has a Trainer that is a dataclass, such as TRL's KTOTrainer of `trl.experimental`. Each is told from its equals."""
    one, other = (Stub(callback_handler=Stub(callbacks=[])) for _ in range(2))
    shared = share(one)
    assert one == other
    assert shared_by(one) is shared_by(one.callback_handler) is shared
    assert shared_by(other) is None
