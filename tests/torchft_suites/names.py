"""`ft_core.compat.torchft` in place of torchft, and what only torchft's tests need beside it.

A name that it does not know can be imported, and a test that uses it is skipped with the name as the reason. Test
modules (`..._test`, `_test`) come from the folder of the installed torchft.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.futures import Future

from ft_core import process_group
from ft_core.compat import torchft


class _MissingType(type):
    """Any use of a class that does not exist here skips the test."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise SkipTest(f"{cls.__module__}.{cls.__name__} does not exist here")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def missing(module: str, name: str) -> type:
    """What stands for a name of torchft's that is not served."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingType(name, (), {"__module__": module})


class DummyWork(torch.distributed._Work):
    """A work that is done, with `value` as its result."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(value)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[object]:
        return self._future


def configured_by_store(group: type) -> type:
    """`group`, which can also be configured as in torchft: by a store through which ranks meet."""

    ids: dict[int, int] = {}

    def configure(self: Any, *args: Any) -> None:
        if not isinstance(args[0], str):
            group.configure(self, *args)
            return
        ids[id(self)] = ids.get(id(self), 0) + 1
        where, _, rank, world_size = args[:4]
        address, _, prefix = where.partition("/")
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=self.timeout_s)
        store = PrefixStore(prefix, TCPStore(host, int(port), is_master=False, timeout=timeout))
        store.set(f"address/{rank}", self.address())
        others = [store.get(f"address/{each}") for each in range(world_size)]
        group.configure(self, ids[id(self)], rank, others, timeout.total_seconds())

    return type(group.__name__, (group,), {"configure": configure})


class Manager(torchft.TorchftManager):
    """Shows its state in torchft's layout, in which each fragment of DiLoCo has an entry of its own."""

    diloco: DiLoCo | None = None

    def _manager_state_dict(self) -> dict[str, Any]:
        assert self.diloco is not None
        outer = self.diloco.state_dict()
        parts = {
            f"StreamingDiLoCoFragment_{number}": {
                "original_parameters": {
                    name.removeprefix(f"{number}."): value
                    for name, value in outer["parameters"].items()
                    if name.startswith(f"{number}.")
                },
                "outer_optimizer": outer["outer_optimizer"],
            }
            for number in range(self.diloco.fragment_count)
        }
        return {"user": parts, "torchft": self.state_dict()}

    def should_commit(self, *args: Any, **options: Any) -> bool:
        """torchft counts a vote without a step of its own, with which a test sets its step number."""
        if not self.step.underway:
            self.start_quorum()
        return super().should_commit(*args, **options)


class DiLoCo(torchft.TorchftDiLoCo):
    """Tells its manager of itself."""

    def __init__(self, manager: Any, model_fragments: list[nn.Module], *args: Any, **options: Any):
        manager.diloco, self.fragment_count = self, len(model_fragments)
        super().__init__(manager, model_fragments, *args, **options)


REPLACED = {
    "torchft": {"Manager": Manager},
    "torchft._torchft": {"LighthouseServer": torchft.LighthouseServer},
    "torchft.manager": {"Manager": Manager},
    "torchft.local_sgd": {"DiLoCo": DiLoCo},
    "torchft.process_group": {
        group.__name__: configured_by_store(group)
        for group in (process_group.ProcessGroupGloo, process_group.ProcessGroupNCCL)
    },
    "torchft.work": {"_DummyWork": DummyWork},
    "torchft.checkpointing._rwlock": {},
}
"""Module of torchft: names of it that only its tests need, or need to be different."""


def expand(cases: Iterable[Any]) -> Callable[[Callable[..., None]], None]:
    """`parameterized.expand`: one test for each row of arguments, in the class that is being defined."""
    namespace = inspect.currentframe().f_back.f_locals  # type: ignore[union-attr]
    rows = [row if isinstance(row, tuple) else (row,) for row in cases]

    def decorate(test: Callable[..., None]) -> None:
        for number, row in enumerate(rows):
            label = f"_{row[0]}" if isinstance(row[0], str) else ""

            def case(self: Any, _row: tuple[Any, ...] = row) -> None:
                test(self, *_row)

            namespace[f"{test.__name__}_{number}{label}"] = case

    return decorate


def folder() -> Path | None:
    """torchft's modules: of the checkout that TORCHFT_SOURCE names, or installed; None: there are none."""
    if source := os.environ.get("TORCHFT_SOURCE"):
        return Path(source) / "torchft"
    spec = importlib.util.find_spec("torchft")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def install() -> None:
    """Put the adapter in place of torchft. For a process of its own."""
    where = folder()
    assert where is not None, "torchft is not installed"
    torchft.install()
    for name, values in REPLACED.items():
        sys.modules.setdefault(name, types.ModuleType(name)).__dict__.update(values)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchft."):
            module.__dict__["__getattr__"] = partial(missing, name)
    for name in ("torchft", "torchft.checkpointing"):
        sys.modules[name].__path__ = [str(where.joinpath(*name.split(".")[1:]))]
    if importlib.util.find_spec("parameterized") is None:
        known = types.ModuleType("parameterized")
        known.parameterized = types.SimpleNamespace(expand=expand)  # type: ignore[attr-defined]
        sys.modules["parameterized"] = known
