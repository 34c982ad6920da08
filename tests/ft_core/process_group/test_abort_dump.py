"""What aborted collectives leave in FT_ABORT_DUMPS, in a process of its own: torch reads its variable once."""

from __future__ import annotations

import os
import pickle
import textwrap
from pathlib import Path

import pytest

from ft_core.process_group.work import AbortDump
from tests.harness.workers import run

SCRIPT = """
    import threading
    import torch
    from ft_core import ProcessGroupGloo

    there = threading.Event()

    def waits_for_a_peer_that_does_not_come(work):
        there.set()
        try:
            work.wait()
        except RuntimeError as error:
            print(error)

    groups = [ProcessGroupGloo(60, hostname="127.0.0.1") for _ in range(2)]
    addresses = [group.address() for group in groups]
    others = threading.Thread(target=groups[1].configure, args=(0, 1, addresses, 30))
    others.start()
    groups[0].configure(0, 0, addresses, 30)
    others.join()
    work = groups[0].allreduce([torch.ones(3)])
    waiting = threading.Thread(target=waits_for_a_peer_that_does_not_come, args=(work,))
    waiting.start()
    there.wait()
    groups[0].revoke(RuntimeError("a member was lost"))
    waiting.join()
    for group in groups:
        group.shutdown()  # nothing is in flight any more: no further dump
"""


def test_stacks_and_the_flight_recorder_of_an_aborted_collective(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    env = os.environ | {"FT_ABORT_DUMPS": str(folder), "TORCH_FR_BUFFER_SIZE": "100"}
    done = run("torch", ["-c", textwrap.dedent(SCRIPT)], env=env)
    assert "a member was lost" in done.stdout, done.stderr
    text, record = folder.glob("*.txt"), folder.glob("*.fr")
    said = next(text).read_text()
    assert "a member was lost" in said.splitlines()[0]
    assert "in revoke" in said and "in waits_for_a_peer_that_does_not_come" in said
    entries = pickle.loads(next(record).read_bytes())["entries"]
    assert [entry["profiling_name"] for entry in entries] == ["gloo:all_reduce"]
    assert list(text) == list(record) == []


def test_without_the_variable_nothing_is_written(tmp_path: Path) -> None:
    env = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    env.pop("FT_ABORT_DUMPS", None)
    done = run("torch", ["-c", textwrap.dedent(SCRIPT)], env=env, cwd=tmp_path)
    assert "a member was lost" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cant_be_made_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    AbortDump(str(file)).write(3, RuntimeError("why"))
    assert "no dump of the aborted collectives of quorum 3" in caplog.text


def test_a_disk_is_not_filled(tmp_path: Path) -> None:
    dump = AbortDump(str(tmp_path))
    for quorum in (*range(30), *range(30)):
        dump.write(quorum, RuntimeError("why"))
    assert len(list(tmp_path.iterdir())) == 20
