"""Makes "ft_ddp" known to Lightning's strategy registries, whenever those are imported.

Lightning has one registry a namespace and no entry point for strategies. A registry that is there
gets the name at once; for one that is not, a finder waits for its module and adds the name right
after it has run. What is registered is a factory: the strategy itself (and ft_core, ZeroMQ) is
imported when a Trainer asks for it. Nothing here imports Lightning.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "ft_ddp"
DESCRIPTION = "DDP over replica groups that may die and come back while the others train on"
HOMES = {
    "lightning.pytorch.strategies": "ft_lightning.pytorch",
    "pytorch_lightning.strategies": "ft_lightning.pl",
}
"""Module that holds a registry -> our module with the strategy for it."""


def install() -> None:
    """Register in every registry that is imported, and wait for the others. Twice is once."""
    waiting = {}
    for module_name, home in HOMES.items():
        registry = getattr(sys.modules.get(module_name), "StrategyRegistry", None)
        if registry is None:
            waiting[module_name] = home
        else:
            register(registry, home)
    if waiting and not any(isinstance(finder, _Waiter) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiter(waiting))


def register(registry: Any, home: str) -> None:
    """Add the name to one registry."""
    if NAME not in registry:
        registry.register(NAME, _factory(home), description=DESCRIPTION)


def preferred_module() -> str:
    """Which of our modules fits: the namespace that is imported, else one that is installed.

    Raises ImportError if there is no Lightning at all.
    """
    for module_name, home in HOMES.items():
        if module_name in sys.modules:
            return home
    for module_name, home in HOMES.items():
        if importlib.util.find_spec(module_name.partition(".")[0]) is not None:
            return home
    raise ImportError("ft_lightning needs Lightning: pip install lightning")


def _factory(home: str) -> Callable[..., Any]:
    def create(**options: Any) -> Any:
        return importlib.import_module(home).FTDDPStrategy(**options)

    return create


class _Waiter(MetaPathFinder):
    """Sees the registries' modules being imported. Finds nothing itself."""

    def __init__(self, waiting: dict[str, str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Notifier(spec.loader, self._waiting.pop(fullname))
        return spec


class _Notifier(Loader):
    """Runs a module with its own loader, then registers; steps out of the way afterwards."""

    def __init__(self, loader: Loader, home: str) -> None:
        self._loader, self._home = loader, home

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        registry = getattr(module, "StrategyRegistry", None)
        if registry is not None:
            register(registry, self._home)
