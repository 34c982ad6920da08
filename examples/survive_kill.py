"""python examples/survive_kill.py

Kills a training process and shows that the training continues.

1. Starts a lighthouse and three replica groups, each a process of examples/train_lightning.py.
2. Sends SIGKILL to one of them in mid-run, and restarts it at once: it is forked from a template that has
   imported the libraries, as supervisors do it (FT_WARM_START=0: a new Python process).
3. The survivors continue without it; it comes back, heals from them, and participates again.
4. Prints what each group lost, compares the weights of all groups, and draws the run's timeline.

Exit code 0 only if every process ended well, the killed one healed, and all weights are equal,
bit for bit. Takes one to two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from live_view import View, names_in, summary_table
from run_record import faults_of, summarize

import ft_core
from ft_core.launch.run_record import Life, Run, draw
from ft_core.launch.warm.starter import warm_starts
from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from lighthouse.machine.job import Note

HERE = Path(__file__).resolve().parent
OWN_PACKAGES = str(Path(ft_core.__file__).resolve().parents[1])
"""Of this process: its template imports them, and forks no process that would have others."""
MAX_REASON_CHARS = 90
KILL_AFTER = 1.1
"""When to kill, in step delays after a commit: gradients travel then, and the others lose most."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: its processes end with it
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("result-*.json"):
        old.unlink()
    run = Run()
    view = View(run, options.steps)
    notes = _Notes(view)
    config = LighthouseConfig(
        expected_replicas=options.replicas, timeouts=Timeouts.derive(options.timeout)
    )
    with LighthouseServer(config=config, on_note=notes) as lighthouse:
        view.say(f"lighthouse listening on {lighthouse.address()}")
        demo = Demo(options, run, view, lighthouse.address())
        try:
            in_time = demo.execute()
        finally:
            demo.kill_all()
            view.close()
    run.ended_s = time.time()
    picture = options.out / "timeline.png"
    draw(run, picture)
    rows = summarize(run)
    view.console.print(summary_table(rows, run.committed_steps()))
    figures = {"template_mib": demo.template_mib, "groups": [asdict(row) for row in rows]}
    (options.out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    view.console.print(f"timeline: {picture}")
    faults = faults_of(run) if in_time else [f"not done after {options.limit:g} s"]
    for fault in faults:
        view.console.print(f"[red]FAILED[/red]: {fault}")
    if faults:
        view.console.print(f"what the processes printed is in {options.out}/group-*.txt")
        return 1
    view.console.print("[green]survived[/green]: every replica group holds the same weights")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add("--replicas", type=int, default=3, help="replica groups (at least 2)")
    add("--steps", type=int, default=600, help="optimizer steps of the run")
    add("--kill-at", type=int, help="kill when this step is committed (default: a quarter of all)")
    add("--step-delay", type=float, default=0.05, help="seconds that each step sleeps")
    add("--timeout", type=float, default=30.0, help="of communication, seconds; docs/timeouts.md")
    add("--limit", type=float, default=600.0, help="seconds after which the run has failed")
    add("--out", type=Path, default=Path("out/survive_kill"), help="folder for what is written")
    options = parser.parse_args()
    if options.replicas < 2:
        parser.error("--replicas must be at least 2: one must survive")
    if options.kill_at is None:
        # Early in an epoch: at its end members agree on metrics, and no gradients are reduced.
        options.kill_at = max(1, options.steps // 4)
    return options


class Demo:
    """Starts, kills and restarts the processes. One thread for each process reads its events."""

    def __init__(self, options: argparse.Namespace, run: Run, view: View, lighthouse: str) -> None:
        self._options, self._run, self._view = options, run, view
        self._lighthouse = lighthouse
        self._warm = warm_starts(True)
        self._popen = subprocess.Popen if self._warm is None else self._warm.popen
        self.template_mib: float | None = None
        self._victim = options.replicas - 1
        self._changed = threading.Condition()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []

    def execute(self) -> bool:
        """The whole run; False if it was not over within the limit."""
        deadline = time.monotonic() + self._options.limit
        for group in range(self._options.replicas):
            self._start(group)
        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(self._over, timeout=left):
                return False
        for reader in self._readers:
            reader.join(timeout=max(0.0, deadline - time.monotonic()))
        return not any(reader.is_alive() for reader in self._readers)

    def kill_all(self) -> None:
        """No process outlives the demo."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        if self._warm is not None:
            self._warm.close()

    def _over(self) -> bool:
        return all(life.returncode is not None and not life.killed for life in self._newest())

    def _newest(self) -> list[Life]:
        return [self._run.lives_of(group)[-1] for group in self._run.groups()]

    def _start(self, group: int) -> None:
        """A process, the pipe through which its events come, and the thread that reads them."""
        number = len(self._run.lives_of(group))
        reading, writing = os.pipe()
        env = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES}
        env |= {
            "PYTHONPATH": os.pathsep.join([OWN_PACKAGES, os.environ.get("PYTHONPATH", "")]),
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(self._options.replicas),
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
            "FT_EVENT_LOG": f"/dev/fd/{writing}",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            str(HERE / "train_lightning.py"),
            "--max-steps",
            str(self._options.steps),
            "--step-delay",
            str(self._options.step_delay),
            "--out",
            str(self._result_path(group)),
        ]
        with (self._options.out / f"group-{group}-{number}.txt").open("wb") as output:
            process = self._popen(
                command, env=env, pass_fds=(writing,), stdout=output, stderr=subprocess.STDOUT
            )
        os.close(writing)
        life = Life(group, number, process.pid, time.time())
        with self._changed:
            self._processes[group] = process
            self._run.lives.append(life)
        verb = "started" if number == 0 else "started again"
        self._view.say(f"replica group {group} {verb}: process {process.pid}")
        reader = threading.Thread(
            target=self._read, args=(life, process, reading), name=f"reader-{group}-{number}"
        )
        self._readers.append(reader)
        reader.start()

    def _read(self, life: Life, process: subprocess.Popen[bytes], reading: int) -> None:
        """Reader's thread: until the process is gone."""
        path = self._options.out / f"events-{life.group}-{life.number}.jsonl"
        with open(reading, encoding="utf-8") as lines, path.open("w", encoding="utf-8") as copy:
            for line in lines:
                copy.write(line)
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # a killed process may leave half a line
                life.events.append(event)
                self._look_at(life, process, event)
        returncode = process.wait()
        life.ended_s = self._run.kill_s if life.killed else time.time()
        if returncode == 0:
            life.result = json.loads(self._result_path(life.group).read_text(encoding="utf-8"))
        life.returncode = returncode
        if life.killed:
            self._start(life.group)
        else:
            self._view.say(f"replica group {life.group} ended with code {life.returncode}")
        with self._changed:
            self._changed.notify_all()

    def _result_path(self, group: int) -> Path:
        """Where a process writes the digest of its final weights."""
        return Path(self._options.out / f"result-{group}.json")

    def _may_kill(self, step: int) -> bool:
        """Reader's thread: not while the template is made, unless that takes as long again."""
        if self._warm is not None:
            if not self._warm.wait_ready(0.0) and step < 2 * self._options.kill_at:
                return False
            self.template_mib = proportional_mib(self._warm.template_pid)
        return True

    def _look_at(self, life: Life, process: subprocess.Popen[bytes], event: dict[str, Any]) -> None:
        """Reader's thread: kill the victim at its step, and report the event."""
        kind, say, group = event["kind"], self._view.say, f"replica group {life.group}"
        if kind == "commit":
            due = event["step"] >= self._options.kill_at and self._run.kill_s is None
            if due and life.group == self._victim and self._may_kill(event["step"]):
                time.sleep(self._options.step_delay * KILL_AFTER)
                self._run.victim, self._run.kill_s, life.killed = life.group, time.time(), True
                process.kill()
                say(f"SIGKILL to {group} within step {event['step'] + 1}", "bold red")
            elif event["step"] % 100 == 0:
                loss = life.last("loss")
                with_loss = f", loss {loss['loss']:.4f}" if loss else ""
                committed = f"committed by {event['participants']}{with_loss}"
                say(f"{group}: step {event['step']} {committed}")
        elif kind == "discard":
            say(f"{group}: step {event['step']} discarded: {_short(event['reason'])}", "yellow")
        elif kind == "quorum":
            say(f"{group}: in a quorum with {{{', '.join(names_in(event))}}}")
        elif kind == "heal_start":
            say(f"{group}: heals to step {event['step']}", "yellow")
        elif kind == "heal_done":
            say(
                f"{group}: healed, {event['bytes']:,} bytes in {event['seconds'] * 1e3:.1f} ms",
                "bold green",
            )


def proportional_mib(pid: int) -> float | None:
    """The memory of a process, its shared pages divided by the number of processes that share them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return int(sizes[0]) / 1024 if sizes else None


def _short(reason: str) -> str:
    """The last sentence of a chain of causes; the rest is in the process's own output."""
    line = reason.strip().partition("\n")[0]
    return line if len(line) <= MAX_REASON_CHARS else "... " + line[-MAX_REASON_CHARS:]


class _Notes:
    """Prints the lighthouse's notes. Called by the lighthouse's thread."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __call__(self, note: Note) -> None:
        self._view.say(f"lighthouse: {note.text}", "cyan")


if __name__ == "__main__":
    raise SystemExit(main())
