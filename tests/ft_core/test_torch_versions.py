"""The oldest torch is the same wherever it is said; DDP's arguments and `native` with this torch."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ft_core.ddp import DistributedDataParallel, refuse_arguments
from ft_core.process_group import ProcessGroupGloo, native_reconfigure_available
from ft_core.process_group.torch_versions import OLDEST, native_or_not
from tests.harness.thread_quorum import ThreadQuorum

ROOT = Path(__file__).resolve().parents[2]
SAID = ".".join(map(str, OLDEST))


def test_the_oldest_is_the_same_wherever_it_is_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={SAID}" in project["dependencies"]
    assert f"torch {SAID} and later" in (ROOT / "README.md").read_text()
    assert f"torch=={SAID}.*" in (ROOT / "CONTRIBUTING.md").read_text()
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST


@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_both_names_of_the_argument_are_taken_with_every_torch(name: str) -> None:
    refuse_arguments({name: False})
    DistributedDataParallel(ThreadQuorum(1).members[0], nn.BatchNorm1d(2), **{name: False})


def test_torch_leaves_buffers_alone_and_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model = DistributedDataParallel(ThreadQuorum(1).members[0], nn.BatchNorm1d(2))
    assert not model.will_sync_module_buffers()


def test_native_is_taken_where_it_is_there_and_refused_where_it_is_not() -> None:
    assert native_or_not(None, True, "it") and not native_or_not(None, False, "it")
    assert native_or_not(True, True, "it") and not native_or_not(False, True, "it")
    sentence = f"torch {torch.__version__} has no it (2.14 and later have it): drop native"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        native_or_not(True, False, "it")


@pytest.mark.skipif(native_reconfigure_available(), reason="this torch has what is refused")
def test_a_gloo_group_refuses_what_this_torch_lacks() -> None:
    with pytest.raises(ValueError, match="has no native reconfiguration"):
        ProcessGroupGloo(native=True)
