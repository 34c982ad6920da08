"""Every public class, function, method and property says what it does."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import Module, modules

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, list[ast.ClassDef]]


def _classes(of: list[Module]) -> Classes:
    found = defaultdict(list)
    for module in of:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return dict(found)


def _bases(node: ast.ClassDef) -> Iterator[str]:
    """Last names of the bases: `Generic[T]` is "Generic", `torch.nn.Module` is "Module"."""
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        yield inner.attr if isinstance(inner, ast.Attribute) else ast.unparse(inner)


def _overrides(node: ast.ClassDef, method: str, classes: Classes) -> bool:
    """Whether a base of ours documents `method`, or the frameworks may: a base is theirs."""
    for base in set(_bases(node)) - {node.name, "object", "ABC", "Protocol", "Generic"}:
        if base not in classes:
            return True
        for inner in classes[base]:
            of_base = [n for n in inner.body if isinstance(n, Definition) and n.name == method]
            if any(map(ast.get_docstring, of_base)) or _overrides(inner, method, classes):
                return True
    return False


def _is_setter(node: Definition) -> bool:
    return any(ast.unparse(d).endswith((".setter", "overload")) for d in node.decorator_list)


def _has_docstring(node: Definition) -> bool:
    """In its place, or as `__doc__ = Other.__doc__`."""
    given = any(isinstance(n, ast.Assign) and "__doc__" in ast.unparse(n) for n in node.body)
    return given or ast.get_docstring(node) is not None


def _undocumented(tree: ast.Module | ast.ClassDef, classes: Classes) -> Iterator[str]:
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_") or _is_setter(node):
            continue
        override = isinstance(tree, ast.ClassDef) and _overrides(tree, node.name, classes)
        if not _has_docstring(node) and not override:
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in _undocumented(node, classes))


def test_every_public_definition_has_a_docstring() -> None:
    """A setter has its getter's, and an override that of the method of the base class."""
    classes = _classes(modules())
    assert not [
        f"{module.name}.{name}"
        for module in modules()
        for name in _undocumented(module.tree, classes)
    ]


TEXT = '''
def silent(): pass
def said():
    """Says it."""
    def inner(): pass
def _private(): pass
class Base(Protocol):
    """Is one."""
    def known(self):
        """Is known."""
    def new(self): ...
class Middle(Base): __doc__ = Base.__doc__
class Silent(Middle):
    def known(self): pass
    @property
    def own(self): pass
    @own.setter
    def own(self, value): pass
class Stock(torch.nn.Module):
    """Of a framework."""
    def forward(self): pass
class _Private:
    def method(self): pass
'''


def test_what_has_none_is_found(tmp_path: Path) -> None:
    path = tmp_path / "thing.py"
    path.write_text(TEXT)
    module = Module(path)
    found = set(_undocumented(module.tree, _classes([module])))
    assert found == {"silent", "Base.new", "Silent", "Silent.own"}
