"""What a lighthouse keeps over a restart, in a real file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lighthouse.journal import Journal, read
from lighthouse.wire.messages import JobKey

JOB, OTHER = JobKey("job", "room"), JobKey("job", "other")


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert read(path) == {}
    journal = Journal(path, max_jobs=8)
    for quorum_id in range(1, 200):
        journal.save(JOB, quorum_id, ("a", "b"))
    journal.save(OTHER, 7, ("ü",))
    journal.close()
    journal.close()
    assert read(path) == {JOB: (199, ("a", "b")), OTHER: (7, ("ü",))}
    assert journal.error is None
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    again = Journal(path, max_jobs=8)
    again.close()
    assert again.remembered == read(path)


def test_the_jobs_that_changed_longest_ago_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state.json", max_jobs=2)
    for quorum_id, name in enumerate(["x", "y", "x", "z"]):
        journal.save(JobKey("job", name), quorum_id, ())
    journal.close()
    assert sorted(key.room_id for key in read(journal.path)) == ["x", "z"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": 99, "jobs": []}',
        '{"format": 2}',
        '{"format": 2, "jobs": [{}]}',
        '{"format": 2, "jobs": [{"job_id": "", "room_id": "r", "quorum_id": 1, "members": []}]}',
        '{"format": 2, "jobs": [{"job_id": "j", "room_id": "r", "quorum_id": "1", "members": []}]}',
        '{"format": 2, "jobs": [{"job_id": "j", "room_id": "r", "quorum_id": 1, "members": [1]}]}',
        "\udcff",
    ],
)
def test_a_corrupt_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"state\.json.*delete it"):
        read(path)
    assert path.exists(), "it is a person's to delete"


def test_a_place_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be written"):
        Journal(tmp_path / "missing" / "state.json", max_jobs=8)


def test_a_disk_that_fails_later_ends_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    journal = Journal(directory / "state.json", max_jobs=8)
    (directory / "state.json").unlink()
    directory.rmdir()
    journal.save(JOB, 1, ("a",))
    journal.close()
    assert isinstance(journal.error, FileNotFoundError)
