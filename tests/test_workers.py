"""Forked workers are processes like those that subprocess.Popen starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness.leaks import Snapshot, leaks_since
from tests.harness.workers import Worker, run, start

TELL = """
import json, os, signal, sys, threading
assert len(os.listdir("/proc/self/task")) == 1
mine = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(),
        "word": os.environ.get("WORD"), "group": os.getpgrp() == os.getpid(), "pid": os.getpid(),
        "torch": "torch" in sys.modules, "home": "HOME" in os.environ}
print(json.dumps(mine), flush=True)
class Mine: pass
import pickle; pickle.dumps(Mine())
line = sys.stdin.readline().strip()
print("error", file=sys.stderr)
if line == "fail":
    raise ValueError("asked to")
if line:
    sys.exit(int(line))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    return path


def started(script: Path, *argv: str, stderr: int = subprocess.STDOUT, **env: str) -> Worker:
    pipe = subprocess.PIPE
    command = [str(script), *argv]
    return start(
        "torch", command, env=env, cwd=script.parent, stdin=pipe, stdout=pipe, stderr=stderr
    )


def closed(worker: Worker) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.close()
    worker.stdout.close()


@pytest.mark.parametrize(
    ("line", "code", "said"), [("", 0, ""), ("7", 7, ""), ("fail", 1, "asked to")]
)
def test_a_script_runs_as_python_runs_it(script: Path, line: str, code: int, said: str) -> None:
    worker = started(script, "--x", "1", WORD="here")
    assert worker.stdin is not None and worker.stdout is not None
    told = json.loads(worker.stdout.readline())
    assert worker.poll() is None
    assert told == {
        "argv": [str(script), "--x", "1"],
        "name": "__main__",
        "path": str(script.parent),
        "cwd": str(script.parent),
        "word": "here",
        "group": True,
        "pid": worker.pid,
        "torch": True,
        "home": False,
    }
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.01)
    worker.stdin.write(f"{line}\n".encode())
    rest = worker.stdout.read().decode()
    assert worker.wait(30) == worker.poll() == worker.returncode == code
    assert rest.startswith("error\n") and said in rest
    closed(worker)


SAY = """
import sys, __main__
frameworks = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate")
print(sys.argv, __name__, hasattr(__main__, "__file__"), sys.path[0] == "")
print([name for name in frameworks if name in sys.modules])
"""


def test_a_text_runs_as_python_runs_it_and_torchs_server_has_no_framework() -> None:
    done = run("torch", ["-c", SAY, "--x"], env=os.environ)
    assert done.stdout.splitlines() == ["['-c', '--x'] __main__ False True", "[]"], done.stderr


LAUNCH = """
import os, signal, subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
read, write = os.pipe()
open("child.py", "w").write(
    "import os, sys\\n"
    "print('child', 'torch' in sys.modules, os.getppid(), flush=True)\\n"
    "os.write(int(sys.argv[1]), b'told'), sys.stdin.read(), sys.exit(3)\\n"
)
children = [
    subprocess.Popen([sys.executable, "child.py", str(write)], pass_fds=(write,),
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    for _ in range(2)
]
said = [child.stdout.readline().decode().split() for child in children]
assert said == [["child", "True", str(os.getpid())]] * 2, said
assert [os.getpgid(child.pid) for child in children] == [child.pid for child in children]
assert os.read(read, 4) == os.read(read, 4) == b"told"
children[0].kill()
assert children[0].communicate() == (b"", None)
assert children[0].returncode == -signal.SIGKILL
assert children[1].communicate() == (b"", None)
assert children[1].returncode == 3
print("first", flush=True)
subprocess.run([sys.executable, "-c", "print('second')"], check=True)
open("tell.py", "w").write("print('third')")
subprocess.run([sys.executable, "tell.py"], check=True)
print("fourth", file=sys.stderr)
"""


def test_processes_that_it_starts_are_forks_too_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(LAUNCH)
    with (tmp_path / "output").open("wb") as output:
        worker = start(
            "torch",
            ["launch.py"],
            env=os.environ,
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    code = worker.wait(60)
    said = (tmp_path / "output").read_text()
    assert (code, said) == (0, "first\nsecond\nthird\nfourth\n"), said


def test_signals_reach_it_and_its_end_is_seen(script: Path) -> None:
    worker = started(script)
    assert worker.stdout is not None and worker.stdout.readline()
    worker.send_signal(signal.SIGSTOP)
    assert worker.poll() is None
    worker.kill()
    assert worker.wait(30) == -signal.SIGKILL
    worker.terminate()  # nothing: it is gone
    closed(worker)


def test_one_that_is_left_behind_is_a_leak(script: Path) -> None:
    closed(first := started(script))
    first.wait(30)
    before = Snapshot.take()
    worker = started(script)
    assert worker.stdout is not None and worker.stdout.readline()
    (found,) = leaks_since(before, grace_s=0.0)
    assert f"child process {worker.pid} is left over" in found
    worker.kill()
    worker.wait(30)
    closed(worker)
    assert leaks_since(before) == []
