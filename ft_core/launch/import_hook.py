"""Call a function when a module has been imported, without importing it.

    when_imported("json.tool", lambda module: print(module))

For code that must act on a module that the user's code may import later. A finder in front of
`sys.meta_path` sees the import, lets the other finders find the module, and has its loader call back
after the module has run. The finder finds nothing itself, and is installed only while a callback
waits. Standard library only: this runs while torch itself is being imported.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

log = logging.getLogger("ft_core")

_lock = threading.Lock()
_waiting: dict[str, list[Callback]] = {}


def newer_than_tested(module: ModuleType, tested: str, whose: str) -> str:
    """A sentence, if a framework is newer than the last version that `whose` package was tested with; else
    "". `tested`: "1.15"; its patch releases count as tested."""
    version = str(getattr(module, "__version__", ""))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found <= tuple(int(part) for part in tested.split(".")):
        return ""
    return (
        f"{module.__name__} {version} is newer than what {whose} was tested with ({tested}); the names in "
        f"it that {whose} leans on are there"
    )


def when_imported(module_name: str, callback: Callback) -> None:
    """Call `callback(module)` once `module_name` (dotted, absolute) has run to its end.

    At once if it has already; else in the thread that imports it, before its `import` statement
    returns. A module that is half way through its import is waited for too. An import that fails
    does not count; the next attempt does. Registering the same callback for a module again does
    nothing. An exception of the callback is logged and not raised in the importing code.

    Any thread. No lock is held while the callback runs, except Python's own on the module. Blocks
    while another thread imports the module, as an `import` of it would.
    """
    with _lock:
        callbacks = _waiting.setdefault(module_name, [])
        if callback not in callbacks:
            callbacks.append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    # After the finder is in place: an import that it was too late to see is under way or done.
    if module_name not in sys.modules:
        _let_others_import(module_name)
    module = sys.modules.get(module_name)
    if module is None:
        return
    spec = getattr(module, "__spec__", None)
    if getattr(spec, "_initializing", False) and _watch(spec):
        return
    if sys.modules.get(module_name) is module:
        _imported(module, module_name)


def cancel(module_name: str, callback: Callback) -> bool:
    """Forget a callback; returns whether it was still waiting. Any thread."""
    with _lock:
        callbacks = _waiting.get(module_name, [])
        if callback not in callbacks:
            return False
        callbacks.remove(callback)
        if not callbacks:
            del _waiting[module_name]
        _tear_down_if_idle()
        return True


def _imported(module: ModuleType, name: str = "") -> None:
    """`module` has run: call what waits for it, each once."""
    name = name or module.__name__
    with _lock:
        callbacks = _waiting.pop(name, [])
        _tear_down_if_idle()
    for callback in callbacks:
        try:
            callback(module)
        except Exception:
            log.warning("what waited for the import of %s failed", name, exc_info=True)


def _tear_down_if_idle() -> None:
    if not _waiting:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(_finder)


class _Finder(MetaPathFinder):
    """Notices imports of modules that a callback waits for. Finds nothing itself."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder may ask all finders in turn, and thus this one again.
        if fullname not in _waiting or getattr(self._asking, "name", None) == fullname:
            return None
        outer = getattr(self._asking, "name", None)
        self._asking.name = fullname
        try:
            spec = self._ask_others(fullname, path, target)
        finally:
            self._asking.name = outer
        if spec is not None and hasattr(spec.loader, "exec_module"):
            assert spec.loader is not None
            spec.loader = _Notifier(spec.loader)
        return spec

    def _ask_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                return spec
        return None


_finder = _Finder()


class _Notifier(Loader):
    """Runs a module with its own loader, then tells. Steps out of the way before the module runs:
    neither the module nor its spec knows about it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for users of `find_spec` that do not import

    def get_code(self, name: str) -> Any:
        """What `python -m` runs as `__main__`. Nothing would be told of that, nor does it use what callbacks
        have put into the module: so `main` of the module itself is run, where it has one."""
        if not hasattr(importlib.import_module(name), "main"):
            return self._loader.get_code(name)  # type: ignore[attr-defined]
        return compile(f"import sys\nfrom {name} import main\nsys.exit(main())", name, "exec")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # A module may replace itself in sys.modules.
        _imported(sys.modules.get(spec.name, module), spec.name)


def _let_others_import(module_name: str) -> None:
    """Return when no other thread is importing the module.

    Takes Python's own lock on the module's name, as `import` does: it is reentrant, and it detects
    two threads that would wait for each other.
    """
    wait = getattr(importlib._bootstrap, "_lock_unlock_module", None)  # type: ignore[attr-defined]
    if wait is not None:
        wait(module_name)


def _watch(spec: Any) -> bool:
    """Notice the end of an import that began before the finder was installed.

    Python marks a spec while its module runs and removes the mark afterwards, whether the import
    succeeded or not. There is no public way to observe that, so the spec gets a class that does.
    Returns False where that is impossible; the module counts as imported then.
    """
    cls = type(spec)
    original = getattr(cls, "_ft_original", cls)

    def read(self: Any) -> Any:
        return vars(self).get("_initializing", False)

    def write(self: Any, value: Any) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = original
            module = sys.modules.get(self.name)
            if module is not None:  # else it failed, and the callbacks go on waiting
                _imported(module, self.name)

    namespace = {"__slots__": (), "_initializing": property(read, write), "_ft_original": cls}
    if cls is original:
        try:
            spec.__class__ = type(cls.__name__, (cls,), namespace)
        except TypeError:
            return False
    if spec._initializing:
        return True
    # It ended in another thread just now, perhaps before the class was in place.
    spec.__class__ = original
    return False
