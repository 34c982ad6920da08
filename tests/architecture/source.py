"""The packages' source as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("lighthouse", "ft_core", "ft_lightning", "ft_accelerate")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, and where. `lazy`: inside a function, or for type checkers only."""

    module: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    """A source file of ours."""

    path: Path

    @property
    def name(self) -> str:
        parts = self.path.relative_to(REPO).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        return self.path.stem == "__init__"

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def tree(self) -> ast.Module:
        return _parse(self.path)

    @property
    def is_pure(self) -> bool:
        """Says so in its docstring's first paragraph."""
        docstring = ast.get_docstring(self.tree) or ""
        return "PURE" in docstring.split("\n\n")[0]

    def imports(self) -> list[Import]:
        return list(_imports(self, self.tree, lazy=False))

    def functions(self) -> list[tuple[str, int]]:
        """(qualified name, lines) of each function, decorators left out."""
        return list(_functions(self.tree, self.name))


def imports_of_ours(module: Module) -> set[str]:
    """Names of our modules that `module` imports, wherever it does so."""
    ours = {known.name for known in modules() if not known.is_package}
    found = {
        i.module if i.module in ours else i.module.rpartition(".")[0] for i in module.imports()
    }
    return (found & ours) - {module.name}


def modules(*packages: str) -> list[Module]:
    """All modules of the packages (of all of ours), by path."""
    files = (f for p in packages or PACKAGES for f in (REPO / p).rglob("*.py"))
    return [Module(path) for path in sorted(files)]


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imports(module: Module, node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inner = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            inner = True
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, child)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, lazy)
        else:
            yield from _imports(module, child, inner)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = list(module.path.relative_to(REPO).parts[:-1])
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *filter(None, [node.module])])


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}.{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield name, child.end_lineno - child.lineno + 1
            yield from _functions(child, name)
        else:
            yield from _functions(child, name if isinstance(child, ast.ClassDef) else prefix)
