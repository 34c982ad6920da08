"""Jobs that were given no id meet at their lighthouse: what tells them apart, or tells a person."""

from __future__ import annotations

import logging

import pytest

from tests.harness.cluster import Replica, lighthouse, replicas


@pytest.mark.parametrize(
    ("job_id", "expected", "why"),
    [
        (None, 1, ", which is more than the 1 expected"),
        (None, 0, ""),  # nothing says how many there are to be
        (None, 2, None),
        ("mine", 1, None),
    ],
)
def test_members_that_may_be_of_another_job_are_warned_of(
    job_id: str | None, expected: int, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ft_core"), lighthouse(expected_replicas=2) as server:

        def run(name: str) -> None:
            options = {"job_id": job_id, "expected_replicas": expected, "min_replica_size": 2}
            replica = Replica(server, name, **options)
            replica.run_to(3)
            replica.close()

        replicas(lambda: run("a"), lambda: run("b"))
    said = [record.getMessage() for record in caplog.records if "FT_JOB_ID" in record.getMessage()]
    assert len(said) == (0 if why is None else 2), "one from each"
    assert all(f"they are a, b{why}. If they" in text for text in said)


def test_a_process_without_number_and_job_is_told_with_which_it_trains(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_core.shell.data_plane.default_name", lambda: "host-1")
    with caplog.at_level(logging.WARNING, "ft_core"), lighthouse(expected_replicas=2) as server:

        def run(name: str) -> None:
            replica = Replica(server, name, min_replica_size=2, expected_replicas=2)
            replica.run_to(2)
            replica.close()

        replicas(lambda: run("host-1"), lambda: run("host-2"))
    said = [record.getMessage() for record in caplog.records if "FT_JOB_ID" in record.getMessage()]
    assert len(said) == 1
    assert "they are host-1, host-2." in said[0]
