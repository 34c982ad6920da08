"""Members of a DiLoCo or LocalSGD run as threads, with a real lighthouse, Gloo and ZeroMQ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ft_core.diloco.diloco import DiLoCo, LocalSGD
from lighthouse.server import LighthouseServer
from tests.ft_core.diloco import reference
from tests.harness import cluster


class Trainer:
    """One member: a model, its optimizers, a manager and the algorithm.

    `kind`: DiLoCo or LocalSGD; `options`: the algorithm's; `manager`: the Manager's.
    """

    def __init__(
        self,
        address: str,
        number: int,
        kind: type[DiLoCo] | type[LocalSGD],
        *,
        expected: int = 0,
        model: nn.Module | None = None,
        sync_every: int = 4,
        backward: Callable[[nn.Module, int, int], None] = reference.backward,
        manager: dict[str, Any] | None = None,
        outer: Callable[[nn.Module], torch.optim.Optimizer] = reference.outer_optimizer,
        **options: Any,
    ) -> None:
        self.number, self.inner = number, 0
        self.history: dict[tuple[int, str], str] = {}
        self.model = reference.network() if model is None else model
        self.optimizer = reference.inner_optimizer(self.model)
        self._backward = backward
        given = {"expected_replicas": expected, **(manager or {})}
        self.manager = cluster.manager(address, f"r{number}", **given)
        if issubclass(kind, DiLoCo):
            self.outer_optimizer = outer(self.model)
            self.loop: Any = kind(
                self.manager,
                self.model,
                self.optimizer,
                self.outer_optimizer,
                sync_every,
                **options,
            )
        else:
            self.loop = kind(self.manager, self.model, self.optimizer, sync_every, **options)

    def inner_step(self) -> None:
        self._backward(self.model, self.number, self.inner)
        self.inner += 1
        self.optimizer.step()
        position = self.manager.state_dict()
        self.history[position["step"], position["lineage"]] = digest(self.globals())

    def run(self, script: int | Callable[[Trainer], object]) -> None:
        """`script` inside `with`, or so many inner steps; then the end of this member."""
        try:
            with self.loop:
                if callable(script):
                    script(self)
                else:
                    for _ in range(script):
                        self.inner_step()
        finally:
            self.close()  # an error must not leave the others waiting

    def close(self) -> None:
        self.manager.shutdown()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def globals(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.loop.state_dict()["parameters"]
        return found


def make_members(server: LighthouseServer, kinds: Sequence[Any], **options: Any) -> list[Trainer]:
    """All of a job; `options`: as `Trainer`'s."""
    expected, address = len(kinds), server.address()
    return [Trainer(address, i, kind, expected=expected, **options) for i, kind in enumerate(kinds)]


def run_all(trainers: Iterable[Trainer], script: int | Callable[[Trainer], object]) -> None:
    """`Trainer.run` of each, in a thread of its own."""
    cluster.replicas(*[partial(trainer.run, script) for trainer in trainers])


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of all bits."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        found.update(
            name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def check_states(trainers: Iterable[Trainer]) -> None:
    """S3: an equal (step, lineage) was an equal global state, in all members at all times."""
    known: dict[tuple[int, str], str] = {}
    shared = 0
    for trainer in trainers:
        for position, found in trainer.history.items():
            shared += position in known
            assert known.setdefault(position, found) == found, position
    assert shared, "the members had no state in common"


def failing(kind: Any, when: Callable[[int], bool]) -> Any:
    """`kind`, but the loop reports an error before its n-th vote (0, 1, ...) if `when(n)`."""

    class Failing(kind):  # type: ignore[misc]
        votes = 0

        def _vote(self) -> bool:
            n, self.votes = self.votes, self.votes + 1
            if when(n):
                self._manager.report_error(ValueError("injected"))
            return bool(super()._vote())

    Failing.__name__ = kind.__name__
    return Failing
