"""python docs/make_demo.py [--from FOLDER]

Makes the picture and the numbers of the demonstration in README.md anew, both from one run of
`examples/survive_kill.py`: on an otherwise idle machine, since README says so. `--from`: of a run that has
written to this folder already.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_tables import ROOT, renew

README, PICTURE = ROOT / "README.md", ROOT / "docs" / "images" / "timeline.png"


def table(groups: list[dict[str, Any]], when: str) -> str:
    """What README shows of a run. `groups`: the rows of its `summary.json`. `when`: date and commit."""
    victim = next(row for row in groups if row["back_ms"] is not None)
    others = [row for row in groups if row is not victim]

    def each(name: str) -> str:
        return " and ".join(f"{row[name]:.0f}" for row in others)

    rows = {
        "lost by the survivors when the last group is killed in the middle of a step": f"{each('lost_ms')} ms",
        "steps discarded": max(row["discarded"] for row in others),
        "start of the new process, forked from a [template](docs/lightning.md#warm-starts), until it asks to join": (
            f"{victim['process_start_ms'] / 1e3:.2f} s"
        ),
        "from the kill to its next step that counts": f"{victim['back_ms'] / 1e3:.2f} s",
        f"heal, {victim['heal_bytes']:,} bytes": f"{victim['heal_ms']:.1f} ms",
        "lost by the survivors in the step in which it joins": f"{each('lost_to_return_ms')} ms",
    }
    head = (
        f"Measured on {when}: {len(groups)} replica groups, steps of {others[0]['step_ms']:.0f} ms (50 ms of "
        'each is a pause), on two\notherwise idle cores. "Lost" is the time between two commits in excess of '
        "a normal step.\n"
    )
    return "\n".join(
        [head, "| | |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--from", type=Path, dest="made", help="the folder of a run")
    made: Path | None = parser.parse_args().made
    with tempfile.TemporaryDirectory() as temporary:
        folder = made or Path(temporary)
        if made is None:
            example = [sys.executable, str(ROOT / "examples" / "survive_kill.py")]
            subprocess.run([*example, "--out", str(folder)], check=True)
        groups = json.loads((folder / "summary.json").read_text())["groups"]
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d} (commit {commit})"
        README.write_text(renew(README.read_text(), "demo", table(groups, when)))
        shutil.copy(folder / "timeline.png", PICTURE)


if __name__ == "__main__":
    main()
