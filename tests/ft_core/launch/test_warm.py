"""Warm starts: a process that is forked from the template is one that was started cold."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_core.launch.rank_group import group_command
from ft_core.launch.warm import learn
from ft_core.launch.warm.learn import ENV_REPORT, OUR_ROOT
from ft_core.launch.warm.orders import Started
from ft_core.launch.warm.starter import WarmStarter, warm_starts
from tests.harness.waiting import PATIENCE_S, gone, until

LIBRARY = "VALUE = 'first'\n"
REPORT = "from ft_core.launch.warm.learn import report; report()\n"
LOOK = '''
"""What a process is."""
import sys
loaded = sorted({"tinylib", "mine", "user_lib"} & set(sys.modules))
import gc, json, os, resource, signal, threading, multiprocessing, tinylib
def streams():
    for each in (sys.stdin, sys.stdout, sys.stderr):
        yield each.name, each.fileno(), each.isatty(), each.encoding, each.errors, each.line_buffering
def signals():
    for each in signal.valid_signals():
        yield int(each), str(signal.getsignal(each))
def status(name):
    return next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]
def descriptors():
    held = {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")}
    return {n: (w, os.get_inheritable(int(n))) for n, w in held.items() if w.partition(":")[0] != f"/proc/{os.getpid()}/fd"}
limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
main = sys.modules["__main__"]
said = {
    "arguments": sys.argv[:], "all arguments": sys.orig_argv[:], "module path": sys.path[:],
    "file": __file__, "name": __name__, "doc": __doc__, "package": __package__,
    "spec": getattr(__spec__, "name", None), "cached": __cached__, "loader": type(__loader__).__name__,
    "annotations": __annotations__, "it is main": main.__dict__ is globals(), "globals": sorted(globals()),
    "cwd": os.getcwd(), "umask": status("Umask"), "group": os.getpgrp() == os.getpid(), "session": os.getsid(0),
    "parent": os.getppid(), "environment": {k: v for k, v in os.environ.items() if k != "REPORT"},
    "streams": list(streams()), "descriptors": descriptors(), "signals": list(signals()),
    "blocked": status("SigBlk"), "ignored": status("SigIgn"), "caught": status("SigCgt"),
    "limits": [resource.getrlimit(getattr(resource, each)) for each in limits], "nice": os.nice(0),
    "affinity": sorted(os.sched_getaffinity(0)), "threads": len(os.listdir("/proc/self/task")),
    "command": open("/proc/self/cmdline").read().rstrip("\\0"), "short": open("/proc/self/comm").read(),
    "thread": threading.main_thread().native_id == os.getpid() and threading.main_thread() is threading.current_thread(),
    "flags": str(sys.flags), "warnings": sys.warnoptions, "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace()],
    "multiprocessing": [multiprocessing.current_process().name, multiprocessing.parent_process()],
    "collector": gc.isenabled(), "recursion": sys.getrecursionlimit(), "depth": 0,
}
'''.replace('"REPORT"', repr(ENV_REPORT))


class Bench:
    """A folder with scripts and a library of its own, and a starter for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, folder / "lib" / "site-packages" / "tinylib.py"
        self.library.parent.mkdir(parents=True)
        self.library.write_text(LIBRARY)
        path = [str(OUR_ROOT), str(self.library.parent)]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self.starter = WarmStarter(answer_s=PATIENCE_S)

    def script(self, text: str, name: str = "script.py") -> list[str]:
        """The command that runs it."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return [sys.executable, str(path)]

    def teach(self, text: str = "import tinylib") -> None:
        """The first process, which has committed a step; then wait for the template."""
        self.first(text)
        assert self.starter.wait_ready(PATIENCE_S)

    def first(self, text: str) -> None:
        process = self.start(self.script(text + "\n" + REPORT, "first.py"))
        assert process.wait(PATIENCE_S) == 0
        assert not process.warm

    def start(self, command: list[str], **options: Any) -> Started:
        return self.starter.popen(command, **{"env": self.env, **options})

    def run(self, command: list[str], *, warm: bool, **options: Any) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a process."""
        options = {"env": self.env, **options, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process: Any
        if warm:
            process = self.starter.popen(command, text=True, **options)
            assert process.warm
        else:
            process = subprocess.Popen(command, text=True, **options)
        with process:
            out, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, errors

    def cold(self, command: list[str], **options: Any) -> str:
        """What a process prints that must not be forked."""
        options = {"env": self.env, **options}
        with self.starter.popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
            assert not process.warm
            said = process.communicate(timeout=PATIENCE_S)[0]
        return str(said)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.starter.close()


# ---------------------------------------------------------------- the same process


@pytest.mark.parametrize("own_group", [True, False])
@pytest.mark.parametrize("as_module", [True, False])
def test_a_replacement_is_what_a_cold_start_is(
    bench: Bench, as_module: bool, own_group: bool
) -> None:
    bench.teach()
    command = bench.script(LOOK + "print(json.dumps([loaded, said], default=str))")
    if as_module:
        bench.env["PYTHONPATH"] += os.pathsep + str(bench.folder)
        command = [sys.executable, "-m", "script"]
        bench.starter.close()
        bench.starter = WarmStarter(answer_s=PATIENCE_S)
        bench.teach()
    env = {**bench.env, "FT_NUMBER": "2", "REPLICA_GROUP_ID": "1"}
    read, write = os.pipe()
    options = {
        "env": env,
        "pass_fds": [write],
        "process_group": 0 if own_group else -1,
        "umask": 0o27 if own_group else -1,
    }
    found = [
        bench.run([*command, "a", "b c", ""], warm=warm, stdin=read, **options)
        for warm in (False, True)
    ]
    os.close(read)
    os.close(write)
    assert [each[::2] for each in found] == [(0, ""), (0, "")]
    (_, cold), (before, warm) = (json.loads(each[1]) for each in found)
    assert before == ["tinylib"]
    for said in (cold, warm):  # pipes of their own
        for number in ("1", "2"):
            said["descriptors"][number][0] = said["descriptors"][number][0].partition(":")[0]
    assert warm == cold


HEARS = "signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Of a script that SIGINT is to end: a shell starts commands in the background with SIGINT ignored."""
ENDS = {
    "regular": "print('done', tinylib.VALUE)",
    "exit code": "sys.exit(3)",
    "exit text": "sys.exit('a sentence')",
    "at once": "os._exit(4)",
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "error": "def f():\n    raise ValueError('x')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('y')",
    "interrupt": "raise KeyboardInterrupt",
    "ctrl-c": f"{HEARS}; os.kill(os.getpid(), signal.SIGINT); time.sleep(600)",
    "syntax": "x = = 1",
    "encoding": "\N{LATIN SMALL LETTER E WITH ACUTE} = 1; print(ascii(dir()[0]))",
    "hook": "sys.excepthook = lambda *seen: print(seen[0], seen[2].tb_lineno)\nraise ValueError",
    "hook exits": "def hook(*seen):\n    os._exit(7)\nsys.excepthook = hook\nraise ValueError",
    "at exit": "import atexit\natexit.register(print, 'bye')\nraise ValueError",
    "thread": "threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
    "warning": "import warnings\nwarnings.warn('old')",
    "child": "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)",
    "fork": "p = os.fork()\nif p:\n    print(os.waitpid(p, 0)[1])\nelse:\n    sys.exit(5)",
}


def test_it_ends_as_a_cold_start_does(bench: Bench) -> None:
    """Exit code, and each line that is printed, tracebacks among them."""
    bench.teach()
    imports = "import os, signal, subprocess, sys, threading, time, tinylib\n"
    for name, body in ENDS.items():
        command = bench.script("")
        Path(command[1]).write_bytes((imports + body).encode(errors="surrogateescape"))
        found = [bench.run(command, warm=warm) for warm in (False, True)]
        assert found[0] == found[1], name


def test_what_libraries_hold_is_freed_at_the_end(bench: Bench) -> None:
    """In a cycle, too. Some bindings print a report of leaks where it is not."""
    bench.library.write_text(
        "import os\nclass Held:\n    def __del__(self, write=os.write):\n        write(1, b'freed')\n"
        "HELD = Held()\nHELD.itself = HELD\n"
    )
    bench.teach()
    command = bench.script("import tinylib")
    assert [bench.run(command, warm=warm)[1] for warm in (False, True)] == ["freed", "freed"]


def test_it_is_a_child_that_signals_reach(bench: Bench) -> None:
    bench.teach()
    # Not `signal.pause`: a signal that arrives just before it is called would not end it.
    wait = "while True:\n    time.sleep(0.01)"
    command = bench.script(f"import signal, time\n{HEARS}\nprint('here', flush=True)\n{wait}")
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        with bench.start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.warm
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == -number


def test_what_imports_have_set_is_there_again(bench: Bench) -> None:
    """Variables and a signal handler: the replacement's import does not run."""
    bench.library.write_text(
        "import os, signal\n"
        "os.environ['TINY'] = 'set'\nos.environ.pop('GIVEN', None)\n"
        "signal.signal(signal.SIGUSR1, lambda *seen: print('handled', flush=True))\n"
    )
    bench.env["GIVEN"] = "yes"
    bench.teach()
    command = bench.script(
        "import os, signal, tinylib\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(os.environ['TINY'], 'GIVEN' in os.environ)"
    )
    found = [bench.run(command, warm=warm) for warm in (False, True)]
    assert found == [(0, "handled\nset False\n", "")] * 2


TORCH = """
import json, os, random, sys
loaded = "torch" in sys.modules
import numpy, torch, zmq
from torch import distributed as dist
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor([index ** 2, index])
if __name__ == "__main__":
    said = {"drawn": [random.random(), numpy.random.rand(), torch.rand(()).item(), torch.initial_seed()]}
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Squares(), 4, num_workers=1, multiprocessing_context=method)
        said[method] = [batch.sum().item() for batch in loader]
    torch.set_num_threads(2)
    ones = torch.ones(600, 600)
    said["threads"] = [(ones @ ones).sum().item(), numpy.ones((300, 300)).dot(numpy.ones((300, 300))).sum()]
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce(ones)
    said["gloo"] = ones.sum().item()
    dist.destroy_process_group()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(f"tcp://127.0.0.1:{port}")
        push.send(b"yes")
        said["zmq"] = pull.recv().decode()
    from ft_core.launch.warm.learn import report
    report()
    print(json.dumps([loaded, said]))
"""


def test_torch_works_in_a_replacement(bench: Bench) -> None:
    """Its loaders' processes, threads and groups; and each process draws numbers of its own."""
    command = bench.script(TORCH, "trains.py")
    lives = []
    for warm in (False, True, True):
        with bench.start(command, stdout=subprocess.PIPE) as process:
            assert process.warm == warm
            lives.append(json.loads(process.communicate(timeout=PATIENCE_S)[0]))
        assert bench.starter.wait_ready(PATIENCE_S)
    assert [loaded for loaded, _ in lives] == [False, True, True]
    drawn = [said.pop("drawn") for _, said in lives]
    assert all(len(set(each)) == 3 for each in zip(*drawn, strict=True)), drawn
    assert lives[0][1] == lives[1][1] == lives[2][1]
    assert lives[0][1]["zmq"] == "yes"


# ---------------------------------------------------------------- what is imported anew


def test_the_users_own_modules_are_imported_anew(bench: Bench) -> None:
    (bench.folder / "mine.py").write_text("VALUE = 1\n")
    bench.teach("import tinylib, mine")
    script = "import sys\nprint('tinylib' in sys.modules, 'mine' in sys.modules)\nimport mine\nprint(mine.VALUE, {})"
    assert bench.run(bench.script(script.format("'a'")), warm=True)[1] == "True False\n1 a\n"
    (bench.folder / "mine.py").write_text("VALUE = 22\n")
    assert bench.run(bench.script(script.format("'bb'")), warm=True)[1] == "True False\n22 bb\n"


def test_a_library_that_was_changed_is_imported_anew(bench: Bench) -> None:
    bench.teach()
    command = bench.script("import tinylib; print(tinylib.VALUE)")
    assert bench.run(command, warm=True)[1] == "first\n"
    before = bench.starter.template_pid
    bench.library.write_text("VALUE = 'second one'\n")
    assert bench.cold(command) == "second one\n"
    until(lambda: bench.starter.template_pid not in (0, before), "another template")
    assert bench.starter.wait_ready(PATIENCE_S)
    assert bench.run(command, warm=True)[1] == "second one\n"


def test_a_library_that_was_installed_since_is_seen(bench: Bench) -> None:
    bench.teach()
    (bench.library.parent / "other.py").write_text("VALUE = 3\n")
    assert bench.cold(bench.script("import other; print(other.VALUE)")) == "3\n"


def test_a_module_beside_the_script_that_hides_a_library(bench: Bench) -> None:
    bench.teach()
    command = bench.script("import tinylib; print(tinylib.VALUE)")
    (bench.folder / "tinylib.py").write_text("VALUE = 'mine'\n")
    assert bench.cold(command) == "mine\n"


def test_another_environment_is_a_cold_start(bench: Bench) -> None:
    """But for what a launcher sets for each process."""
    bench.teach()
    command = bench.script(
        "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['RANK'])"
    )
    given = {**bench.env, "OMP_NUM_THREADS": "1", "RANK": "3"}
    assert bench.run(command, warm=True, env={**bench.env, "RANK": "3"})[1].endswith(" 3\n")
    assert bench.cold(command, env={**given, "OMP_NUM_THREADS": "7"}) == "7 3\n"
    assert bench.cold(command, env={**given, "NEW": "1"}) == "1 3\n"


def test_another_limit_is_a_cold_start(bench: Bench) -> None:
    bench.teach()
    command = bench.script("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert bench.cold(command) == f"{soft - 1}\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert bench.run(command, warm=True)[1] == f"{soft}\n"


def test_what_a_fork_can_not_do_is_a_cold_start(bench: Bench) -> None:
    bench.teach()
    command = bench.script("print('here')")
    bench.cold([sys.executable, "-c", "print('here')"])
    bench.cold([sys.executable, "-u", *command[1:]])
    bench.cold(["/bin/echo", "here"])
    bench.cold(command, cwd="/")
    bench.cold(command, preexec_fn=lambda: None)
    assert bench.run(command, warm=True)[1] == "here\n"


def test_a_report_is_made_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader's patience is short, and on a busy machine to list the modules takes seconds."""
    name = f"ft-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()

        def loaded() -> list[tuple[str, str]]:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.setblocking(True)
            return [("tinylib", "here")]

        monkeypatch.setattr(learn, "loaded", loaded)
        monkeypatch.setenv(ENV_REPORT, name)
        learn.report.__wrapped__()
        assert learn.receive(listener)["modules"] == [["tinylib", "here"]]


# ---------------------------------------------------------------- what makes forks unsafe


UNSAFE = {
    "a thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a process": (
        "import os, signal\nfrom ft_core.launch.supervisor import die_with\nparent = os.getpid()\n"
        "if os.fork() == 0:\n    die_with(parent)\n    signal.pause()"
    ),
    "CUDA": "class cuda:\n    is_initialized = staticmethod(lambda: True)",
    "a module": "import user_lib",
    "a module of the script's": "import user_lib",
}


@pytest.mark.parametrize("what", UNSAFE)
def test_imports_that_make_forks_unsafe(
    bench: Bench, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (bench.folder / "user").mkdir()
    (bench.folder / "user" / "user_lib.py").write_text("")
    bench.env["PYTHONPATH"] += os.pathsep + str(bench.folder / "user")
    name = "torch" if what == "CUDA" else "tinylib"
    library = bench.library.with_name(f"{name}.py")
    # Only in a template: what it starts is not to outlive the test.
    library.write_text("import sys\nif 'ft_core.launch.warm.template' in sys.modules:\n")
    with library.open("a") as file:
        file.write(textwrap.indent(UNSAFE[what], "    ") + "\n")
    with caplog.at_level("DEBUG", logger="ft_core"):
        bench.first(f"import {name}" + (", user_lib" if what == "a module of the script's" else ""))
        until(lambda: "no warm starts: " in caplog.text, "the template's refusal")
    assert {
        "a thread": "an import has started a thread",
        "a process": "an import has started a process",
        "CUDA": "an import has initialized CUDA",
    }.get(what, "an import has loaded user_lib, which is no library") in caplog.text
    assert bench.cold(bench.script("print('here')")) == "here\n"


def test_a_script_that_sets_what_libraries_read_at_import(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="ft_core"):
        bench.first("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport tinylib")
        until(lambda: "no warm starts: " in caplog.text, "the template's refusal")
    assert "the script changes OMP_NUM_THREADS" in caplog.text


# ---------------------------------------------------------------- deaths


def test_a_template_that_is_killed_is_replaced(bench: Bench) -> None:
    bench.teach()
    command = bench.script("import sys; print('tinylib' in sys.modules)")
    before = bench.starter.template_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: gone(before), "the template's end")
    first = bench.start(command, stdout=subprocess.DEVNULL)
    assert first.wait(PATIENCE_S) == 0
    until(lambda: bench.starter.template_pid not in (0, before), "another template")
    assert bench.starter.wait_ready(PATIENCE_S)
    assert bench.run(command, warm=True)[1] == "True\n"


def test_a_template_that_is_stopped_costs_a_cold_start(bench: Bench) -> None:
    """It is killed, and what it may have forked by then does not begin."""
    bench.teach()
    before = bench.starter.template_pid
    os.kill(before, signal.SIGSTOP)
    impatient = bench.starter
    impatient._answer_s = 0.05
    assert bench.cold(bench.script("print('here')")) == "here\n"
    until(lambda: gone(before), "the template's end")


def test_where_no_keeper_can_be_started_processes_are_started_cold(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No threads are left. No process was started, then or later, and the end of the supervisor failed."""
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == "ft-warm":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        assert bench.cold(bench.script("print('here')")) == "here\n"
        bench.starter.close()
    bench.starter = WarmStarter(answer_s=PATIENCE_S)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        assert bench.cold(bench.script("print('here')")) == "here\n"
    bench.teach()


def test_a_template_that_can_not_be_started_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No processes are left for a moment. It ended the thread that keeps templates."""
    works, failed = subprocess.Popen, threading.Event()

    def popen(*words: Any, **options: Any) -> Any:
        if threading.current_thread().name == "ft-warm" and not failed.is_set():
            failed.set()
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return works(*words, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    bench.teach()
    assert failed.is_set()


def test_template_and_replacement_end_with_the_supervisor(bench: Bench) -> None:
    first = bench.script("import tinylib\n" + REPORT, "first.py")
    child = bench.script(
        "import os, signal, sys, tinylib\nfrom ft_core.launch.supervisor import die_with\n"
        "die_with(os.getppid())\nprint(os.getpid(), flush=True)\nsignal.pause()",
        "child.py",
    )
    supervisor = bench.script(
        f"""
        import signal, sys
        from ft_core.launch.warm.starter import WarmStarter
        starter = WarmStarter(answer_s={PATIENCE_S})
        assert starter.popen({first}).wait() == 0
        assert starter.wait_ready({PATIENCE_S})
        print(starter.template_pid, flush=True)
        assert starter.popen({child}).warm
        signal.pause()
        """,
        "supervisor.py",
    )
    with subprocess.Popen(supervisor, env=bench.env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        until(lambda: all(map(gone, pids)), "the ends of template and replacement")


# ---------------------------------------------------------------- supervisors


RANK = """
import os, sys
warm = "tinylib" in sys.modules
import tinylib
from ft_core.launch.board import slot
said = (sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"],
        os.getppid() == int(os.environ["FT_SUPERVISOR"]), warm, len(os.listdir("/proc/self/task")))
os.write(1, f"{said}\\n".encode())  # in one piece, between those of the other rank
if os.environ["FT_LIFE"] == "0":
    from ft_core.launch.warm.learn import report
    report()
elif os.environ["RANK"] == "1":
    sys.exit(9)
else:
    import signal
    signal.pause()
"""


def test_the_ranks_of_a_group_are_forked_too(bench: Bench) -> None:
    """Of the second life; rank 0 waits for ever, and is killed when rank 1 fails."""
    command = group_command([*bench.script(RANK), "a"], 2)
    env = bench.env
    lives = []
    for life in (0, 1):
        process = bench.start(
            command, env={**env, "FT_LIFE": str(life)}, stdout=subprocess.PIPE, process_group=0
        )
        with process:
            lives.append((process.warm, sorted(process.communicate()[0].decode().splitlines())))
        assert process.returncode == (0, 9)[life]
        assert bench.starter.wait_ready(PATIENCE_S)
    for warm, life in zip((False, True), lives, strict=True):
        said = [str((["a"], rank, "2", True, warm, 1)) for rank in ("0", "1")]
        assert life == (warm, said)


TOLD_TOO_EARLY = """
import os, signal, sys
from ft_core.launch.warm import replacement

if len(sys.argv) > 1:
    print("it goes on", flush=True)
    sys.exit(0)

take = replacement._take

def told_to_end(*given):
    os.kill(os.getpid(), signal.SIGTERM)
    take(*given)

replacement._take = told_to_end
signal.signal(signal.SIGTERM, lambda *seen: print("the parent's handler", flush=True))
rank = replacement.spawn([sys.executable, __file__, "rank"], env=os.environ, pass_fds=())
print(rank.warm, rank.wait(), signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
"""


def test_a_signal_that_comes_while_a_rank_is_forked_is_the_ranks_own(bench: Bench) -> None:
    """Its parent's handler had it, in the new process: that went on."""
    bench.teach()
    code, out, errors = bench.run(bench.script(TOLD_TOO_EARLY), warm=True)
    assert (code, out.splitlines(), errors) == (0, ["True -15 set()"], "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_supervisor_forks_what_it_starts_again(tmp_path: Path, fails: bool) -> None:
    """But for one that failed when it was forked."""
    bench = Bench(tmp_path)
    bench.starter.close()
    child = bench.script(
        """
        import os, pathlib, sys, time
        warm = "tinylib" in sys.modules
        if warm and sys.argv[2] == "True":
            sys.exit(1)
        import tinylib
        from ft_core.launch.board import slot
        from ft_core.launch.supervisor import die_with
        from ft_core.launch.warm.learn import report
        die_with(os.getppid())
        slot().join()
        slot().committed(1)
        report()
        index, life = os.environ["FT_INDEX"], os.environ["FT_RESTARTS"]
        log = pathlib.Path(sys.argv[1])
        (log / f"{index}.{life}.part").write_text(f"{os.getpid()} {warm}")
        (log / f"{index}.{life}.part").rename(log / f"{index}.{life}")
        while not (log / "over").exists():
            time.sleep(0.02)
        """
    )
    parent = bench.script(
        f"""
        import os, pathlib, sys, threading
        from ft_core.launch.supervisor import supervise
        from ft_core.launch.warm.starter import warm_starts
        starter = warm_starts(True)
        def tell():
            starter.wait_ready({PATIENCE_S})
            pathlib.Path(sys.argv[1], "ready").write_text("")
        threading.Thread(target=tell, daemon=True).start()
        def environment(index):
            return {{**os.environ, "FT_INDEX": str(index)}}
        sys.exit(supervise({child} + sys.argv[1:], environment, count=2, min_alive=1,
                           max_restarts=None, warm=starter))
        """,
        "parent.py",
    )
    env = {**bench.env, "FT_WARM_START": "1"}
    with subprocess.Popen([*parent, str(tmp_path), str(fails)], env=env) as process:
        until(lambda: (tmp_path / "ready").exists() and (tmp_path / "1.0").exists(), "the template")
        pid, warm = (tmp_path / "1.0").read_text().split()
        assert warm == "False"
        os.kill(int(pid), signal.SIGKILL)
        last = tmp_path / ("1.2" if fails else "1.1")
        until(last.exists, "the last life")
        (tmp_path / "over").write_text("")
        assert process.wait(PATIENCE_S) == 0
    assert last.read_text().split()[1] == str(not fails)


@pytest.mark.parametrize("said", ["0", "false", " OFF "])
def test_it_can_be_switched_off(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_WARM_START", "1")
    starter = warm_starts(True)
    assert starter is not None
    starter.close()
    assert warm_starts(False) is None
    monkeypatch.setenv("FT_WARM_START", said)
    assert warm_starts(True) is None
