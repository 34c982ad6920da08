"""python benchmarks/warm_start.py [--only lightning transformers] [--json FILE]

How long a killed replica group is away, cold and warm: from SIGKILL to the first step that its new
process and all others have contributed to. And what the template of warm starts costs.

lightning: `examples/survive_kill.py`, three groups, steps of 50 ms and a little.
transformers: `examples/transformers_trainer.py` under `accelerate launch`, two groups; the pause of the
supervisor is part of it. The victim has trained for more than 5 s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import arguments, report

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from survive_kill import proportional_mib  # noqa: E402  (an example is no package)

PATIENCE_S = 150.0
TRAINED_S = 6.0
Figures = dict[str, float | None]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    rows, figures = [], {}
    for name in options.only:
        measured: dict[str, Figures] = {}
        for way, switch in (("cold", "0"), ("warm", "1")):
            env = {**os.environ, "FT_WARM_START": switch, "OMP_NUM_THREADS": "1"}
            with tempfile.TemporaryDirectory() as folder:
                measured[way] = CASES[name](Path(folder), env)
        cold_s, warm_s = (measured[way]["back_s"] for way in ("cold", "warm"))
        ratio = "-" if not cold_s or not warm_s else f"{cold_s / warm_s:.1f}"
        template = measured["warm"]["template_mib"]
        shown = [f"{value:.2f}" if value else "-" for value in (cold_s, warm_s)]
        rows.append((name, *shown, ratio, f"{template:.0f}" if template else "-"))
        figures[name] = measured
    columns = ("case", "cold, s", "warm, s", "ratio", "template, MiB (Pss)")
    title = "From SIGKILL to the next step that counts"
    report(title, columns, rows, figures, options.json)


def lightning(folder: Path, env: dict[str, str]) -> Figures:
    """The example measures itself."""
    command = [sys.executable, str(EXAMPLES / "survive_kill.py"), "--steps", "500"]
    ended = subprocess.run(
        [*command, "--kill-at", "140", "--out", str(folder)],
        env=env,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise SystemExit(ended.stdout[-3000:] + ended.stderr[-3000:])
    said = json.loads((folder / "summary.json").read_text())
    back_ms = next(row["back_ms"] for row in said["groups"] if row["back_ms"])
    return {"back_s": back_ms / 1e3, "template_mib": said["template_mib"]}


def transformers(folder: Path, env: dict[str, str]) -> Figures:
    log = folder / "events.jsonl"
    env = {**env, "FT_EVENT_LOG": str(log), "TQDM_DISABLE": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    script = [str(EXAMPLES / "transformers_trainer.py"), "--output_dir", str(folder / "out")]
    command = [*launch, "--config_file", str(EXAMPLES / "ft.yaml"), *script, "--epochs", "500"]
    with (folder / "said.txt").open("wb") as said:
        launcher = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
    try:
        began = _await(lambda: next(_counting(log, 0.0), None))
        template = None
        if env["FT_WARM_START"] != "0":
            template = _await(lambda: next(_children(launcher.pid, "warm starts, ready"), None))
        time.sleep(max(0.0, began + TRAINED_S - time.time()))
        memory = proportional_mib(template) if template else None
        victim = list(_children(launcher.pid, "ft_accelerate.run"))[-1]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        back = _await(lambda: next(_counting(log, killed + 0.02), None))
        return {"back_s": back - killed, "template_mib": memory}
    except TimeoutError:
        raise SystemExit((folder / "said.txt").read_text()[-3000:]) from None
    finally:
        launcher.kill()
        launcher.wait()


def _counting(log: Path, after: float) -> Iterator[float]:
    """Times of the commits of replica group 1, with both groups, after `after`."""
    for line in log.read_text().splitlines() if log.exists() else []:
        event: dict[str, Any] = json.loads(line) if line.endswith("}") else {"kind": ""}
        if event["kind"] == "commit" and event["name"] == "1" and event["participants"] == 2:
            if event["t"] > after:
                yield event["t"]


def _children(pid: int, word: str) -> Iterator[int]:
    """Children of a process, in the order of their start, that have `word` in their command line."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if word in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
                yield int(child)


def _await(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return found


CASES: dict[str, Callable[[Path, dict[str, str]], Figures]] = {
    "lightning": lightning,
    "transformers": transformers,
}

if __name__ == "__main__":
    main()
