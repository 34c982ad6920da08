"""Names of other packages are replaced all or none, and put back. With a package made here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from ft_accelerate.seams import Seam, around, check, newer, put, take_out

KNOWN = "framework 1.0 to 1.4"


class Base:
    def inherited(self) -> str:
        return "inherited"


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function, a copy of it, and a class with a method and a property."""

    class Thing(Base):
        @property
        def size(self) -> int:
            """How large."""
            return 1

    def run(speed: int) -> str:
        return f"at {speed}"

    module: Any = ModuleType("framework")
    module.__version__ = "2.0"
    module.Thing, module.run, module.copy = Thing, run, run
    monkeypatch.setitem(sys.modules, "framework", module)
    return module


@around
def faster(original: Any, speed: int) -> str:
    return f"{original(2 * speed)}, faster"


@around
def larger(original: Any, self: Any) -> Any:
    return original(self) * 10 if not isinstance(original(self), str) else "larger"


def test_functions_methods_and_properties_are_replaced_and_restored(framework: Any) -> None:
    before = framework.run
    seams = (
        Seam("framework", "run", ("speed",), faster),
        Seam("framework", "Thing.size", (), larger),
        Seam("framework", "Thing.inherited", ("self",), larger),
    )
    for _ in range(2):  # idempotent
        put(seams, KNOWN)
        assert framework.run(3) == "at 6, faster"
        assert (framework.Thing().size, framework.Thing().inherited()) == (10, "larger")
        assert framework.Thing.size.__doc__ == "How large."
        assert framework.run.__name__ == "run"
    take_out(seams)
    take_out(seams)
    assert framework.run is before
    assert framework.Thing().size == 1
    assert "inherited" not in vars(framework.Thing)


def test_a_copy_of_a_replaced_name_is_not_replaced_again(framework: Any) -> None:
    first, second = (Seam("framework", name, (), faster) for name in ("run", "copy"))
    put([first], KNOWN)
    framework.copy = framework.run  # as a module does that is imported later
    put([second], KNOWN)
    assert framework.copy(3) == "at 6, faster"
    take_out([first, second])


@pytest.mark.parametrize(
    ("moved", "sentence"),
    [
        (Seam("framework", "walk"), "framework.walk is not there"),
        (Seam("framework", "Thing.age"), "framework.Thing.age is not there"),
        (Seam("no_framework", "run"), "no_framework.run is not there"),
        (Seam("framework", "run", ("speed", "gear")), "framework.run takes no 'gear'"),
        (Seam("framework", "__version__", ("speed",)), "framework.__version__ is not a function"),
    ],
)
def test_one_that_has_moved_is_refused_and_none_is_replaced(
    framework: Any, moved: Seam, sentence: str
) -> None:
    before = framework.run
    with pytest.raises(RuntimeError, match="does not know framework 2.0") as caught:
        put([Seam("framework", "run", (), faster), moved], KNOWN)
    assert sentence in str(caught.value) and "install one of framework 1.0 to 1.4" in str(
        caught.value
    )
    assert framework.run is before
    with pytest.raises(RuntimeError):
        check([moved], KNOWN)


def test_if_one_cannot_be_replaced_the_others_are_restored(framework: Any) -> None:
    def fail(original: Any) -> Any:
        raise LookupError("not today")

    before = framework.run
    with pytest.raises(LookupError):
        put([Seam("framework", "run", (), faster), Seam("framework", "copy", (), fail)], KNOWN)
    assert framework.run is before


def test_a_name_may_be_another_one_in_another_version(framework: Any) -> None:
    here, moved = Seam("framework", "run", ("speed",)), Seam("framework", "Thing.run", ("self",))
    check((Seam("framework", "walk", instead=here),), KNOWN)
    with pytest.raises(RuntimeError, match=r"framework\.walk is not there"):
        check((Seam("framework", "walk", instead=moved),), KNOWN)


@pytest.mark.parametrize(
    ("version", "warned"), [("1.0", False), ("1.4.9", False), ("1.5.0.dev0", True), ("2.0", True)]
)
def test_a_version_that_was_not_tested_is_taken_with_a_warning(
    framework: Any, version: str, warned: bool
) -> None:
    framework.__version__ = version
    put([Seam("framework", "run", ("speed",))], KNOWN)
    told = f"framework {version} is newer than what ft_accelerate was tested with (1.4)"
    assert newer(KNOWN).startswith(told) == warned and bool(newer(KNOWN)) == warned
