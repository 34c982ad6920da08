"""Several processes save in one folder at the same moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ft_accelerate.runtime.checkpoint_folders import FOLDER, publish


@pytest.mark.parametrize("is_main", [True, False])
def test_the_folder_goes_while_it_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    """Another process has finished, and removes the folder, which is empty: it used to be an error."""
    root, scandir, removed = tmp_path / FOLDER, os.scandir, []

    def late(path: Any = ".") -> Any:
        if str(path) == str(root) and not list(scandir(path)):
            root.rmdir()
            removed.append(path)
        return scandir(path)

    def write(draft: Path) -> Path:
        (draft / "random_states_0.pkl").write_text("mine")
        return draft

    monkeypatch.setattr(os, "scandir", late)
    root.mkdir()
    (tmp_path / "state").mkdir()
    assert publish(tmp_path / "state", root, 0, write, lambda: is_main) == is_main
    assert removed
    assert (tmp_path / "state" / "random_states_0.pkl").read_text() == "mine"
    assert not root.exists()
