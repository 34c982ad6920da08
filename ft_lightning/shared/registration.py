"""Registers "ft_ddp" with Lightning's strategy registries, whenever those are imported.

Lightning has one registry per namespace (four with Fabric's) and no entry point for strategies. A
registry that is imported already gets the name at once, any other right after its module has run.
What is registered is a factory: the strategy itself (and ft_core, ZeroMQ) is imported when a
Trainer or a Fabric asks for it. Nothing here imports Lightning.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from ft_core.launch.import_hook import when_imported

NAME = "ft_ddp"
DESCRIPTION = "DDP over replica groups that may die and come back while the others train on"

UNUSED = "ft_ddp_find_unused_parameters_true"
"""As with stock DDP: the name says the option."""

SHARDED = "ft_fsdp"

NAMES = {
    NAME: ("FTDDPStrategy", DESCRIPTION),
    UNUSED: ("FTDDPStrategy", "ft_ddp for models of which a forward leaves out parameters"),
    SHARDED: ("FTFSDPStrategy", "FSDP2 and TP in replica groups that may die and come back"),
    "ft_local_sgd": ("FTLocalSGDStrategy", "Replica groups that average their parameters at times"),
    "ft_diloco": ("FTDiLoCoStrategy", "Replica groups with an outer optimizer, for slow links"),
}
"""Name -> (class in the modules below, description)."""

REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "ft_lightning.pytorch"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "ft_lightning.pl"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "ft_lightning.fabric"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "ft_lightning.fabric_lf"),
}
"""Module that holds a registry -> (the registry's name, our module with strategies for it)."""

COMMAND_LINES = {
    "lightning.pytorch.cli": "ft_lightning.pytorch",
    "pytorch_lightning.cli": "ft_lightning.pl",
}
"""LightningCLI finds classes by their short names only if they are imported."""


started_with: list[str] = []
started_in = ""
"""Arguments and folder with which this process runs its script, which may change both. Others run the script
from its first line."""


def note_start() -> None:
    """Remember them. For a process that was forked from one that has imported this: when it has its own."""
    global started_in
    started_with[:] = sys.argv
    with contextlib.suppress(FileNotFoundError):
        started_in = os.getcwd()


note_start()


def install() -> None:
    """Register in every registry that is imported, and in the others when they are. Idempotent."""
    for module_name, register_there in _REGISTER.items():
        when_imported(module_name, register_there)
    for module_name, load in _LOAD.items():
        when_imported(module_name, load)


def preferred_module() -> str:
    """Which of our modules fits: the namespace that is imported, else one that is installed.

    Raises ImportError if there is no Lightning at all.
    """
    for module_name, (_, home) in REGISTRIES.items():
        if module_name in sys.modules:
            return home
    for module_name, (_, home) in REGISTRIES.items():
        if importlib.util.find_spec(module_name.partition(".")[0]) is not None:
            return home
    raise ImportError("ft_lightning needs Lightning: pip install lightning")


def _factory(home: str, class_name: str) -> Callable[..., Any]:
    def create(**options: Any) -> Any:
        return getattr(importlib.import_module(home), class_name)(**options)

    return create


def _register_there(attribute: str, home: str, module: ModuleType) -> None:
    registry: Any = getattr(module, attribute)
    for name, (class_name, description) in NAMES.items():
        if name not in registry:
            options = {"find_unused_parameters": True} if name == UNUSED else {}
            create = _factory(home, class_name)
            registry.register(name, create, description=description, **options)


def _load(home: str, module: ModuleType) -> None:
    importlib.import_module(home)


# One object each, so that a second `install` changes nothing.
_REGISTER = {name: partial(_register_there, *where) for name, where in REGISTRIES.items()}
_LOAD = {name: partial(_load, home) for name, home in COMMAND_LINES.items()}
