"""Folders in layers, no circles, and one name for one thing: what docs/architecture.md promises."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import Module, imports_of_ours, modules

LAYERS = [
    "lighthouse.errors",
    "lighthouse.config",
    "lighthouse.files",
    "lighthouse.wire",
    "lighthouse.machine",
    "lighthouse",
    "ft_core.environment",
    "ft_core.errors",
    "ft_core.telemetry",
    "ft_core.replica",
    "ft_core.config",
    "ft_core.launch",
    "ft_core.process_group",
    "ft_core.heal",
    "ft_core.shell",
    "ft_core.step",
    "ft_core.collectives",
    "ft_core",
    "ft_core.diloco",
    "ft_core.compat",
    "ft_lightning.shared",
    "ft_lightning.trainer",
    "ft_lightning.fabric",
    "ft_lightning.diloco",
    "ft_lightning",
    "ft_accelerate.seams",
    "ft_accelerate.options",
    "ft_accelerate.runtime",
    "ft_accelerate.launch",
    "ft_accelerate",
]
"""A folder's modules import those of folders before it, and each other. A module at the top of a package
that folders use stands here by itself."""

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")


@cache
def exceptions(kind: str) -> dict[str, str]:
    """What may break a rule -> why."""
    found: dict[str, str] = tomllib.loads(EXCEPTIONS.read_text()).get(kind, {})
    return found


def _held(kind: str, broken: set[str]) -> list[str]:
    """What breaks the rule `kind` without being listed, and what is listed and keeps it."""
    listed = set(exceptions(kind))
    unlisted = [f"{what}" for what in sorted(broken - listed)]
    return unlisted + [
        f"{what}: keeps the rule by now, take it off the list" for what in sorted(listed - broken)
    ]


def _folder(module: str) -> str:
    """The layer of a module."""
    return max((f for f in LAYERS if module == f or module.startswith(f + ".")), key=len)


def test_folders_import_only_what_is_below_them() -> None:
    order = {folder: number for number, folder in enumerate(LAYERS)}
    broken = {
        f"{module.name} -> {target}"
        for module in modules()
        if not module.is_package
        for target in imports_of_ours(module)
        if order[_folder(target)] > order[_folder(module.name)]
    }
    assert not _held("upward", broken)


def _circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components of more than one module (Tarjan, SIAM J. Comput. 1, 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        number[node] = low[node] = len(number)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in number:
                yield from visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], number[target])
        if low[node] == number[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                yield sorted(component)

    for node in sorted(graph):
        if node not in number:
            yield from visit(node)


def test_no_circles_of_imports() -> None:
    """At run time, inside functions and under TYPE_CHECKING. A package's `__init__` only names."""
    graph = {m.name: set(imports_of_ours(m)) for m in modules() if not m.is_package}
    assert not _held("circles", {" ".join(circle) for circle in _circles(graph)})


def test_no_two_classes_of_one_name() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    assert not _held("classes", {name for name, where in places.items() if len(where) > 1})


def test_no_module_name_twice() -> None:
    places = defaultdict(list)
    for module in modules():
        if module.path.stem not in ("__init__", "__main__", "errors", "config"):
            places[module.path.stem].append(module.name)
    assert not _held("modules", {name for name, where in places.items() if len(where) > 1})


def test_the_top_of_the_core_stays_small() -> None:
    """What a training loop calls, and what all folders need; the rest is in a folder."""
    top = [m.name for m in modules("ft_core") if not m.is_package and m.name.count(".") == 1]
    assert len(top) <= 11, top


def test_nothing_is_kept_from_the_formatter() -> None:
    assert not [
        f"{module.name}: {line.strip()}"
        for module in modules()
        for line in module.text.splitlines()
        if re.search(r"# fmt: (skip|off)", line)
    ]


def test_a_short_file_has_a_reason() -> None:
    """A reader opens each file: one of fewer than 60 lines belongs to its neighbour."""
    broken = {
        module.name
        for module in modules()
        if module.path.stem not in ("__init__", "__main__", "errors")
        and len(module.text.splitlines()) < 60
    }
    assert not _held("short", broken)


def _private_names(tree: ast.Module) -> set[str]:
    """Names with one underscore that a module defines: functions, classes, attributes."""
    found = set()
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        if name.startswith("_") and not name.startswith("__"):
            found.add(name)
    return found


def _of_others(module: Module) -> Iterator[str]:
    """Private names that a module reads off something that is not itself."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
            if not own and not isinstance(node.value, ast.Call) and not node.attr.startswith("__"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "lighthouse",
            "ft_core",
            "ft_lightning",
            "ft_accelerate",
        ):
            yield from (
                a.name for a in node.names if a.name.startswith("_") and a.name != "__version__"
            )


def test_no_module_uses_anothers_private_names() -> None:
    """A name that another of our modules defines and this one does not; the frameworks' own
    private names are another matter (tests of their seams watch those)."""
    defined = {module.name: _private_names(module.tree) for module in modules()}
    ours = set().union(*defined.values())
    framework = set(exceptions("of_frameworks"))
    broken = {
        f"{module.name} {name}"
        for module in modules()
        for name in set(_of_others(module)) - framework
        if name in ours - defined[module.name]
    }
    assert not _held("private", broken)


# ---------------------------------------------------------------- the rules see what they must


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}
    assert list(_circles(graph)) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("self._x + cls._y + super()._z", set()),
        ("other._x", {"_x"}),
        ("self.other._x", {"_x"}),
        ("from ft_core.manager import _answered", {"_answered"}),
        ("from torch import _C", set()),
    ],
)
def test_private_uses_are_found(text: str, found: set[str], tmp_path: Path) -> None:
    path = tmp_path / "thing.py"
    path.write_text(text)
    assert set(_of_others(Module(path))) == found


def test_a_list_of_exceptions_may_only_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.exceptions", lambda kind: {"known": "why", "tamed": "why"})
    assert _held("any", {"known", "new"}) == [
        "new",
        "tamed: keeps the rule by now, take it off the list",
    ]
