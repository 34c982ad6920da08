"""The walker itself: what it must see, or the other tests here would pass on anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import source, test_layers, test_sizes

TEXT = '''"""A thing. PURE."""
from __future__ import annotations
import os.path
from . import sibling
from ..other import name
if TYPE_CHECKING:
    import torch
def f():
    import zmq
    def g():
        pass
class C:
    async def h(self):
        return 1
X = os.environ["X"]
def late(y=os.getenv("Y")):
    os.environ["not"] = "at import"
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> source.Module:
    path = tmp_path / "pkg" / "sub" / "thing.py"
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    monkeypatch.setattr(source, "REPO", tmp_path)
    return source.Module(path)


def test_imports_are_found_wherever_they_are(module: source.Module) -> None:
    found = {(i.module, i.lazy) for i in module.imports()}
    assert found == {
        ("__future__.annotations", False),
        ("os.path", False),
        ("pkg.sub.sibling", False),
        ("pkg.other.name", False),
        ("torch", True),
        ("zmq", True),
    }


def test_functions_are_measured(module: source.Module) -> None:
    assert dict(module.functions()) == {
        "pkg.sub.thing.f": 4,
        "pkg.sub.thing.f.g": 2,
        "pkg.sub.thing.C.h": 2,
        "pkg.sub.thing.late": 2,
    }


def test_claims_are_read(module: source.Module) -> None:
    assert (module.name, module.package, module.is_pure) == ("pkg.sub.thing", "pkg", True)


def test_reads_at_import_are_told_from_later_ones(
    module: source.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_layers, "modules", lambda *_: [module])
    with pytest.raises(AssertionError, match=r"thing:15 environ.*thing:16 getenv"):
        test_layers.test_nothing_happens_at_import("pkg")
    with pytest.raises(AssertionError, match=r"os\.path at line 3"):
        test_layers.test_pure_modules_touch_nothing("pkg.sub.thing")


def test_the_ratchet_turns_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "sizes.toml"
    listed.write_text('[files]\n"big.py" = 500\n"tamed.py" = 450\n"gone.py" = 450\n')
    monkeypatch.setattr(test_sizes, "LIST", listed)
    actual = {"small.py": 400, "big.py": 500, "tamed.py": 390, "new.py": 401}
    said = test_sizes._check("files", 400, actual)
    assert [line.split()[0] for line in said] == ["new.py", "tamed.py", "gone.py"]
    assert "big.py has 501" in test_sizes._check("files", 400, {**actual, "big.py": 501})[0]
