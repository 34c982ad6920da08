"""`when_imported`: with real modules, found by Python's own finders."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from ft_core.launch import import_hook
from ft_core.launch.import_hook import cancel, when_imported

numbers = itertools.count()
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module and returns its name, which has not been used before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # Where the package is installed, its entry points wait for modules in this very process.
    waiting = dict(import_hook._waiting)
    import_hook._waiting.clear()
    before = list(sys.meta_path)
    if installed():
        sys.meta_path.remove(import_hook._finder)
    finders = list(sys.meta_path)

    def make(text: str = "value = 1\n") -> str:
        name = f"hooked_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    yield make
    for name in [n for n in sys.modules if n.startswith("hooked_")]:
        del sys.modules[name]
    left, still = list(sys.meta_path), dict(import_hook._waiting)
    sys.meta_path[:] = before
    import_hook._waiting.clear()
    import_hook._waiting.update(waiting)
    assert left == finders, "the finder was left behind"
    assert not still


def installed() -> bool:
    return import_hook._finder in sys.meta_path


def test_called_after_the_module_has_run(write: Write) -> None:
    name, seen = write(), []
    when_imported(name, lambda module: seen.append((module.__name__, module.value)))
    assert installed()
    assert not seen
    module = importlib.import_module(name)
    assert seen == [(name, 1)]
    assert not installed(), "torn down when nothing is left to wait for"
    # No trace in the module.
    assert type(module.__loader__) is SourceFileLoader
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    importlib.reload(module)
    assert len(seen) == 1


def test_called_at_once_if_it_is_there(write: Write) -> None:
    seen: list[str] = []
    when_imported("json", lambda module: seen.append(module.__name__))
    assert seen == ["json"]
    assert not installed()


def test_submodule_of_a_package(write: Write, tmp_path: Path) -> None:
    package = write()
    (tmp_path / f"{package}.py").unlink()
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("from . import inner\n")
    (tmp_path / package / "inner.py").write_text("value = 2\n")
    seen: list[str] = []
    when_imported(f"{package}.inner", lambda module: seen.append(module.__name__))
    when_imported(package, lambda module: seen.append(module.__name__))
    importlib.import_module(package)
    assert seen == [f"{package}.inner", package]


def test_several_callbacks_and_one_twice(write: Write) -> None:
    name, seen = write(), []

    def first(module: ModuleType) -> None:
        seen.append(1)

    when_imported(name, first)
    when_imported(name, first)
    when_imported(name, lambda module: seen.append(2))
    importlib.import_module(name)
    assert seen == [1, 2]


def test_callback_that_raises_is_logged_and_the_others_are_called(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    name, seen = write(), []

    def broken(module: ModuleType) -> None:
        raise ValueError("mine")

    when_imported(name, broken)
    when_imported(name, lambda module: seen.append(1))
    assert importlib.import_module(name).value == 1
    assert seen == [1]
    assert f"waited for the import of {name}" in caplog.text
    assert "ValueError: mine" in caplog.text


def test_failed_import_does_not_count(write: Write, tmp_path: Path) -> None:
    name, seen = write("raise RuntimeError('broken')\n"), []
    when_imported(name, lambda module: seen.append(module.value))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(name)
    assert not seen
    (tmp_path / f"{name}.py").write_text("value = 'good, and longer than before'\n")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert seen == ["good, and longer than before"]


HALF = """
import sys
sys.hooked_ask(__name__)
after = 5
{end}
"""


@pytest.mark.parametrize("fails", [False, True])
def test_module_that_is_half_imported(
    write: Write, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Asked for from within its own import, before the finder could have seen it."""
    name, seen = write(HALF.format(end="1 / 0" if fails else "")), []

    def callback(module: ModuleType) -> None:
        seen.append(module.after)

    def ask(wanted: str) -> None:
        when_imported(wanted, callback)
        when_imported(wanted, callback)
        assert not seen

    monkeypatch.setattr(sys, "hooked_ask", ask, raising=False)
    if fails:
        with pytest.raises(ZeroDivisionError):
            importlib.import_module(name)
        assert not seen
        assert cancel(name, callback)
        return
    module = importlib.import_module(name)
    assert seen == [5]
    assert type(module.__spec__) is ModuleSpec


def test_found_is_not_imported(write: Write) -> None:
    name, seen = write(), []
    when_imported(name, lambda module: seen.append(1))
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    assert "value = 1" in spec.loader.get_source(name)  # type: ignore[attr-defined]
    assert not seen
    importlib.import_module(name)
    assert seen == [1]


def test_modules_found_by_other_finders_than_pythons(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation has a finder of its own; and one that asks all others in turn."""
    name, seen = "hooked_elsewhere", []
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / f"{name}.py").write_text("value = 3\n")

    class Editable:
        def find_spec(self, fullname: str, path: object, target: object = None) -> object:
            if fullname != name:
                return None
            assert importlib.util.find_spec(fullname) is None, "asks again; must not recurse"
            return PathFinder.find_spec(fullname, [str(tmp_path / "hidden")])

    asked = []

    class Guarded(Editable):
        def find_spec(self, fullname: str, path: object, target: object = None) -> object:
            if fullname in asked:
                return None
            asked.append(fullname)
            return super().find_spec(fullname, path, target)

    when_imported(name, lambda module: seen.append(module.value))
    guarded = Guarded()
    sys.meta_path.append(guarded)
    try:
        importlib.import_module(name)
    finally:
        sys.meta_path.remove(guarded)
    assert seen == [3]


def test_cancelled(write: Write) -> None:
    name, seen = write(), []

    def callback(module: ModuleType) -> None:
        seen.append(1)

    when_imported(name, callback)
    assert cancel(name, callback)
    assert not cancel(name, callback)
    assert not installed()
    importlib.import_module(name)
    assert not seen


def test_threads_that_wait_and_import_at_once(write: Write) -> None:
    """Whoever comes first: each callback is called exactly once, and after the module has run."""
    for _ in range(30):
        name = write("import time\ntime.sleep(0.001)\nvalue = 1\n")
        seen: list[int] = []
        start = threading.Barrier(4)

        def wait(
            name: str = name, seen: list[int] = seen, start: threading.Barrier = start
        ) -> None:
            start.wait(10)
            when_imported(name, lambda module: seen.append(module.value))

        def load(name: str = name, start: threading.Barrier = start) -> None:
            start.wait(10)
            importlib.import_module(name)

        threads = [threading.Thread(target=target) for target in (wait, load, wait, load)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert seen == [1, 1]


def test_a_module_that_python_runs_has_what_callbacks_put_into_it(write: Write) -> None:
    """`python -m` does not import it."""
    name = write(
        "def main(): return told\n\ntold = 1\nif __name__ == '__main__': raise SystemExit(main())\n"
    )
    when_imported(name, lambda module: setattr(module, "told", 2))
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 2


def test_one_without_a_main_runs_as_it_is(write: Write) -> None:
    name, seen = write("ran = __name__\n"), []
    when_imported(name, seen.append)
    assert runpy.run_module(name, run_name="__main__")["ran"] == "__main__"
    assert len(seen) == 1
