"""Real Fabric loops under "ft_diloco": killed, healed, saved, equal at every outer step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_lightning.harness import running

pytestmark = pytest.mark.process
WORKER = Path(__file__).with_name("diloco_fabric_worker.py")
BATCHES = 19  # of one of two replicas in an epoch


def test_killed_healed_and_resumed(tmp_path: Path, lighthouse: str) -> None:
    options = {"sync_every": 10, "fragments": 2, "fragment_sync_delay": 1, "outer_momentum": 0.8}
    epochs = 5
    with running(
        tmp_path / "a", lighthouse, worker=WORKER, strategy_options=options, epochs=epochs,
        holds=["step:33"], die=[1, 13],
    ) as run:  # fmt: skip
        zero, one = run.start(0), run.start(1)
        run.until(lambda: one.poll() is not None, "the death of replica 1")
        run.until_held(0, "step:33")
        again = run.start_again(1)
        run.go("step:33")
        run.wait(zero, again)
    lines, ends = [run.lines(i) for i in (0, 1)], [run.end(i) for i in (0, 1)]
    by_step = {line["outer_step"]: line for line in lines[0]}
    common = [(by_step[x["outer_step"]], x) for x in lines[1] if x["outer_step"] in by_step]
    assert len(common) > 5
    for mine, other in common:
        for key in ("digest", "step", "place", "lr"):
            assert mine[key] == other[key], f"outer step {mine['outer_step']}: {key}"
    healed = [line for line in lines[1] if line["pid"] == again.pid]
    assert healed[0]["step"] > 33
    # The survivor has lost nothing.
    assert ends[0]["trained"] == epochs * BATCHES
    assert all(line["committed"] for line in lines[0])
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["step"] == ends[1]["step"] == epochs * BATCHES
    with running(
        tmp_path / "b", lighthouse, worker=WORKER, strategy_options=options, epochs=epochs + 1,
        load=str(tmp_path / "a" / "saved.ckpt"),
    ) as more:  # fmt: skip
        more.wait(more.start(0), more.start(1))
    assert more.end(0)["digest"] == more.end(1)["digest"] != ends[0]["digest"]
    assert more.lines(0)[0]["outer_step"] == lines[0][-1]["outer_step"] + 1
