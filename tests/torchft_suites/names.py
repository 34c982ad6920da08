"""The import adapter: `torchft` and its modules, with this project's classes under torchft's names.

A name that does not exist here becomes a `Missing`: importing it works, and a test that uses it is skipped with the
name as the reason. Test modules (`..._test`, `_test`) come from the folder of the installed torchft.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.futures import Future

import ft_core
from ft_core import process_group
from ft_core.diloco.local_sgd import extract_local_tensor
from lighthouse import LighthouseServer as OurLighthouseServer


class _MissingType(type):
    """Any use of a class that does not exist here skips the test."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise SkipTest(f"{cls.__module__}.{cls.__name__} does not exist here")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def missing(module: str, name: str) -> type:
    return _MissingType(name, (), {"__module__": module})


class LighthouseServer(OurLighthouseServer):
    """torchft's arguments. There is no tick, and the heartbeat is a part of the timeouts."""

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        super().__init__(bind, min_replicas=min_replicas, join_timeout_ms=join_timeout_ms)


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


class Manager(ft_core.Manager):
    """Shows its state in torchft's layout, in which each fragment of DiLoCo has an entry of its own."""

    diloco: DiLoCo | None = None

    def leave_model_out(self) -> None:
        """A model that drifts is no part of the manager's state here: `OuterLoop` refuses it."""
        self.set_state_dict_fns(lambda state: None, dict)

    def _manager_state_dict(self) -> dict[str, Any]:
        assert self.diloco is not None
        outer = self.diloco.state_dict()
        parts = {
            f"StreamingDiLoCoFragment_{number}": {
                "original_parameters": {
                    name: value
                    for name, value in outer["parameters"].items()
                    if name.partition(".")[0] == str(number)
                },
                "outer_optimizer": outer["outer_optimizer"],
            }
            for number in range(self.diloco.fragment_count)
        }
        return {"user": parts, "torchft": self.state_dict()}


class LocalSGD(ft_core.LocalSGD):
    """Takes a manager whose state holds the model."""

    def __init__(self, manager: Manager, *args: Any, **kwargs: Any) -> None:
        manager.leave_model_out()
        super().__init__(manager, *args, **kwargs)


class DiLoCo(ft_core.DiLoCo):
    """torchft 0.2.0's form: a list of fragments, each with an outer optimizer of its own."""

    def __init__(
        self,
        manager: Any,
        model_fragments: list[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: Any,
        sync_every: int,
        backup_device: torch.device | None = None,
        **options: Any,
    ) -> None:
        manager.leave_model_out()
        manager.diloco, self.fragment_count = self, len(model_fragments)
        outer = outer_optimizer if isinstance(outer_optimizer, list) else [outer_optimizer]
        groups = [group for each in outer for group in each.param_groups]
        joint = type(outer[0])([dict(group) for group in groups])
        options.pop("use_bucketization", None)
        options.pop("bucket_cap_mb", None)
        super().__init__(
            manager,
            nn.ModuleList(model_fragments),
            inner_optimizer,
            joint,
            sync_every,
            backup_device=backup_device,
            fragments=model_fragments if len(model_fragments) > 1 else None,
            **options,
        )


def _ours() -> dict[str, dict[str, Any]]:
    """Module of torchft: its names, and what they are here."""
    groups = {
        name: getattr(process_group, name)
        for name in (
            "ErrorSwallowingProcessGroupWrapper",
            "FakeProcessGroupWrapper",
            "ManagedProcessGroup",
            "ProcessGroup",
            "ProcessGroupDummy",
            "ProcessGroupWrapper",
        )
    }
    for name in ("ProcessGroupGloo", "ProcessGroupNCCL"):
        groups[name] = configured_by_store(getattr(process_group, name))
    return {
        "torchft": {name: getattr(ft_core, name) for name in ft_core.__all__},
        "torchft._torchft": {"LighthouseServer": LighthouseServer},
        "torchft.coordination": {"LighthouseServer": LighthouseServer},
        "torchft.manager": {
            "Manager": Manager,
            "WorldSizeMode": ft_core.WorldSizeMode,
        },
        "torchft.ddp": {
            "DistributedDataParallel": ft_core.DistributedDataParallel,
            "PureDistributedDataParallel": ft_core.PureDistributedDataParallel,
        },
        "torchft.local_sgd": {
            "DiLoCo": DiLoCo,
            "LocalSGD": LocalSGD,
            "extract_local_tensor": extract_local_tensor,
        },
        "torchft.optim": {"OptimizerWrapper": ft_core.OptimizerWrapper},
        "torchft.data": {"DistributedSampler": ft_core.DistributedSampler},
        "torchft.process_group": groups,
        "torchft.work": {"_DummyWork": DummyWork},
        "torchft.checkpointing": {},
        "torchft.checkpointing._rwlock": {},
        "torchft.checkpointing.transport": {},
    }


class Stand(types.ModuleType):
    """One module of torchft."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = missing(self.__name__, name)
        setattr(self, name, value)
        return value


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
    """Where torchft is installed; None: it is not."""
    spec = importlib.util.find_spec("torchft")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def install() -> None:
    """Put the adapter in place of torchft. For a process of its own."""
    where = folder()
    assert where is not None, "torchft is not installed"
    for name, values in _ours().items():
        module = Stand(name)
        module.__dict__.update(values)
        if name in ("torchft", "torchft.checkpointing"):
            module.__path__ = [str(where.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    if importlib.util.find_spec("parameterized") is None:
        known = types.ModuleType("parameterized")
        known.parameterized = types.SimpleNamespace(expand=expand)  # type: ignore[attr-defined]
        sys.modules["parameterized"] = known
