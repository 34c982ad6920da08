"""Worker processes as forks of a process that has imported the frameworks once.

Importing torch takes two seconds of a core and Lightning six; a fork takes some milliseconds. Each
pytest process has one fork server for each set of frameworks, started when it is first needed. The
server that has imported torch is forked to become each of the others:

    worker = start("lightning", [str(script), "argument"], env=env, stdout=file)

`Worker` behaves as subprocess.Popen does: pid, exit code and signals are those of the real process.
A test of what comes before torch is imported, such as its entry points, starts its process cold, by
sys.executable.

This file is also the server (`python -m tests.harness.workers MODULE ...`). It reads a request a line and
answers with a line. It stays single-threaded, since a fork copies only the thread that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.harness.leaks import fork_servers
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SERVER = ("-m", "tests.harness.workers")
FRAMEWORKS = {
    "torch": (
        "torch._dynamo",
        "ft_core.manager",
        "ft_core.ddp",
        "ft_core.diloco.diloco",
        "ft_core.collectives.sharded",
        "ft_core.optimizer",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.run",
        "torch.distributed.tensor.parallel",
        "torch.utils.serialization",
        "torchdata.stateful_dataloader",
        "torchmetrics",
        "sklearn.datasets",
        "encodings.idna",  # by the first connection to a host with a name
    ),
    "lightning": (
        "lightning.pytorch",
        "lightning.fabric",
        "ft_lightning.pytorch",
        "ft_lightning.fabric_lightning",
        "omegaconf",
    ),
    "accelerate": ("accelerate.commands.launch", "datasets", "ft_accelerate.install"),
    "transformers": ("transformers.trainer", "trl", "ft_accelerate.install"),
}
"""What a server has imported, the others on top of torch's: also what a worker would import when it first
uses it, which took most of the time of a short one. None of it starts a thread or reads what
a test puts into the environment. torch's has what takes long of all of them: a test of how a framework
is imported, and what that does, forks there."""
NOT_INHERITED = ("FT_", "TORCHFT_", "ACCELERATE_", "PL_", "LT_", "REPLICA_", "NUM_REPLICA")

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Environment of the servers: no import may start a thread."""
PLACES = ("REPLICA_GROUP_ID", "ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID")
"""Variables by which our launchers tell a process its place: it starts no others."""
MODES = (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND)
"""Of standard streams, which are opened anew: each process has a position of its own."""
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def search_path() -> str:
    """Of a server: this tree, then where else the tests find modules (packages that are not installed)."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(ROOT), *(path for path in known if path not in ("", str(ROOT)))])


_servers: dict[str, Server] = {}
_starting = threading.Lock()


def start(
    framework: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path = ROOT,
    stdin: int | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    supervises: bool = True,
) -> Worker:
    """Start `command` (a script, `-m` and a module or `-c` and a text, and arguments) where
    `framework` is imported.

    `env` is its whole environment. Standard streams are given as to subprocess.Popen. `supervises`: it
    may start Python, which shall be a fork, too; to be ready for it takes a tenth of a second of a core.
    """
    with _starting:
        if "torch" not in _servers:
            _servers["torch"] = Server(FRAMEWORKS["torch"])
        if framework not in _servers:
            _servers[framework] = Server(FRAMEWORKS[framework], fork_of=_servers["torch"])
        server = _servers[framework]
    return Worker(server, command, env, cwd, stdin, stdout, stderr, supervises=supervises)


def run(
    framework: str, command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Start `command` and wait for its end; as subprocess.run that captures the output as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        worker = start(framework, command, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            code = worker.wait(PATIENCE_S)
        finally:
            worker.end()
        said = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return subprocess.CompletedProcess(list(command), code, *said)


def close() -> None:
    """End all servers, torch's last, and with them every worker that still runs."""
    while _servers:
        _servers.popitem()[1].close()


class Worker:
    """A forked process; as subprocess.Popen of a child."""

    def __init__(
        self,
        server: Server,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | Path,
        stdin: int | None,
        stdout: IO[bytes] | int | None,
        stderr: IO[bytes] | int | None,
        *,
        supervises: bool,
    ) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self._server, self._lock = server, threading.Lock()
        streams, theirs = {}, []
        if stdin == subprocess.PIPE:
            streams[0], ours = os.pipe()
            theirs.append(streams[0])
            self.stdin = os.fdopen(ours, "wb", buffering=0)
        if stdout == subprocess.PIPE:
            ours, streams[1] = os.pipe()
            theirs.append(streams[1])
            self.stdout = os.fdopen(ours, "rb")
        elif stdout is not None:
            streams[1] = stdout if isinstance(stdout, int) else stdout.fileno()
        if stderr == subprocess.STDOUT:
            streams[2] = streams[1]
        elif stderr is not None:
            streams[2] = stderr if isinstance(stderr, int) else stderr.fileno()
        self.pid: int = server.ask(
            argv=self.args,
            env=dict(env),
            cwd=str(cwd),
            streams=list(streams.items()),
            adopted=False,
            session=True,
            process_group=None,
            supervises=supervises,
        )
        for end in theirs:
            os.close(end)

    def poll(self) -> int | None:
        """The exit code, None as long as the process runs; negative for a signal."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.ask(pid=self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until the process has ended; its exit code. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                if not ended.poll(None if timeout is None else timeout * 1000):
                    assert timeout is not None
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Nothing if the process has ended. Until its exit code is asked for, its id is its own."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill it, wait for its end and close its streams."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()


class Server:
    """One fork server, of this process's. Any thread may use it."""

    def __init__(self, modules: Sequence[str], *, fork_of: Server | None = None) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
        self._home = tempfile.TemporaryDirectory()
        env = {**kept, **SETTINGS, "PYTHONPATH": search_path(), "HF_HOME": self._home.name}
        command, pipe = [*SERVER, *modules], subprocess.PIPE
        self._process: subprocess.Popen[bytes] | Worker
        if fork_of is None:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env=env,
                cwd=ROOT,
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,  # Ctrl-C is for pytest, at whose end this one ends
            )
        else:
            self._process = Worker(fork_of, command, env, ROOT, pipe, pipe, None, supervises=False)
        self._lock = threading.Lock()
        fork_servers.add(self._process.pid)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"of": os.getpid(), **request}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"a fork server is gone: {self._process.args!r}"
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._home.cleanup()
        fork_servers.discard(self._process.pid)


# ---------------------------------------------------------------------- the server's side


def serve(requests: IO[bytes], answers: IO[bytes]) -> dict[str, Any] | None:
    """Fork for each request until there are no more, then return None. In the forked processes,
    return the request."""
    running: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if "argv" not in request:
            found, status = os.waitpid(request["pid"], os.WNOHANG)
            running.discard(found)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = _fork(request)
            if answer == 0:
                requests.close()
                answers.close()
                return request  # type: ignore[no-any-return]
            if not request["adopted"] and not _is_server(request):
                running.add(answer)
        answers.write(json.dumps(answer).encode() + b"\n")
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return None


def _is_server(request: Mapping[str, Any]) -> bool:
    """It ends by itself, when pytest has: it then kills what it has forked."""
    return tuple(request["argv"][:2]) == SERVER


def _fork(request: Mapping[str, Any]) -> int:
    """Fork; the child has the streams that were asked for, and is the asking process's own child
    if that adopts it."""
    opened: dict[int, int] = {}
    for number, theirs in request["streams"]:
        if theirs not in opened:  # one that is given twice keeps one position
            mode = _access(request["of"], theirs) if number > 2 else MODES[number]
            opened[theirs] = _away(os.open(f"/proc/{request['of']}/fd/{theirs}", mode))
    told, tell = os.pipe()
    pid = os.fork()
    if pid and request["adopted"]:
        os.waitpid(pid, 0)
        pid = int(os.read(told, 20))
    elif request["adopted"]:
        between, pid = os.getpid(), os.fork()
        if pid:  # with our end the child becomes that of the nearest process that adopts
            os.write(tell, b"%d" % pid)
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
    os.close(told)
    os.close(tell)
    if pid == 0:
        for number, theirs in request["streams"]:
            os.dup2(opened[theirs], number)
    for descriptor in opened.values():
        os.close(descriptor)
    return pid


def _access(pid: int, descriptor: int) -> int:
    """The mode in which a process has opened a descriptor."""
    lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()
    (flags,) = (line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE


def _away(descriptor: int) -> int:
    """The same file at a number that no stream of a child needs."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(descriptor)
    return high


def become(request: Mapping[str, Any]) -> None:
    """Be the process that was asked for."""
    if request["session"]:
        os.setsid()
    elif request["process_group"] is not None:
        os.setpgid(0, request["process_group"])
    if request["supervises"]:
        again = _fork_children()
        if again is not None:
            become(again)
            return
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for stream in (sys.stdout, sys.stderr):  # with PYTHONUNBUFFERED lines of two processes mix
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.orig_argv = [sys.executable, *request["argv"]]
    first, *rest = request["argv"]
    name = rest[0].rpartition(".")[2] if first == "-m" else Path(first).stem
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)  # its command line is the server's
    if first == "-m":
        sys.argv[:], sys.path[0] = ["-m", *rest[1:]], request["cwd"]
    elif first == "-c":
        sys.argv[:], sys.path[0] = ["-c", *rest[1:]], ""
    else:
        sys.argv[:], sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
    if "ft_lightning" in sys.modules:
        sys.modules["ft_lightning.shared.registration"].note_start()
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(first, run_name="__main__")


def _fork_children() -> dict[str, Any] | None:
    """Let this process's children be forks, too, where subprocess.Popen would start Python.

    A process that supervises others has threads by the time at which it starts them. So what forks
    is a copy of this one, made now. Its forks become orphans at once and are adopted by this
    process: they are its children in every respect. Returns their request in them, None here.
    """
    theirs, requests = map(_away, os.pipe())
    answers, ours = map(_away, os.pipe())
    if os.fork() == 0:
        os.close(requests)
        os.close(answers)
        request = serve(os.fdopen(theirs, "rb"), os.fdopen(ours, "wb", buffering=0))
        if request is None:  # the process that supervises has ended
            os._exit(0)
        return request
    os.close(theirs)
    os.close(ours)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _Children(os.fdopen(requests, "wb", buffering=0), os.fdopen(answers, "rb")).replace()
    return None


class _Children:
    """Starts children of this process by asking for forks."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers, self._lock = requests, answers, threading.Lock()
        self._signature = inspect.signature(subprocess.Popen._execute_child)
        self._cold = subprocess.Popen._execute_child

    def replace(self) -> None:
        children = self

        def execute(popen: Any, *args: Any, **kwargs: Any) -> None:
            given = children._signature.bind(popen, *args, **kwargs).arguments
            command = given["args"]
            if given["preexec_fn"] or not _may_be_forked(command):
                children._cold(popen, *args, **kwargs)
            else:
                children._fork(popen, given)

        execute.__signature__ = self._signature  # type: ignore[attr-defined]
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]

    def _fork(self, popen: Any, given: Mapping[str, Any]) -> None:
        names = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
        streams = [(number, given[name]) for name, number in names if given[name] != -1]
        argv, env = _arguments(given["args"]), os.environ if given["env"] is None else given["env"]
        launches = argv[0] == "-m" and argv[1] != "ft_accelerate.run"  # which is the script
        request = {
            "argv": argv,
            "env": dict(env),
            "cwd": os.fsdecode(given["cwd"] or os.getcwd()),
            "streams": [*streams, *((number, number) for number in given["pass_fds"])],
            "of": os.getpid(),
            "adopted": True,
            "session": given["start_new_session"],
            "process_group": None if given["process_group"] == -1 else given["process_group"],
            "supervises": launches or env.keys().isdisjoint(PLACES),
        }
        with self._lock:
            self._requests.write(json.dumps(request).encode() + b"\n")
            popen.pid = json.loads(self._answers.readline())
        popen._child_created = True
        streams_of = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(given[name] for name in streams_of))


def _may_be_forked(command: Any) -> bool:
    """Python with a script, or with a module that is not the lighthouse's (which is light) nor the
    template of warm starts (which is to import by itself)."""
    if isinstance(command, str | bytes) or command[0] != sys.executable:
        return False
    first, *rest = _arguments(command)
    if first == "-m":
        return not rest[0].startswith(("lighthouse", "ft_core.launch.warm"))
    return not first.startswith("-")


def _arguments(command: Sequence[str | bytes]) -> list[str]:
    """Python's, without the one that says that it shall not buffer."""
    words = [os.fsdecode(word) for word in command[1:]]
    return words[1:] if words[:1] == ["-u"] else words


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _exit(code: int) -> None:
    """End as the interpreter does, short of taking down what was imported, which takes seconds
    (`tests/ft_core/process_group/ending.py` is about that)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def forked(modules: Sequence[str]) -> dict[str, Any] | None:
    """Import `modules` and serve. The request that this process, a fork by now, was made for; None
    in the server, when there are no more."""
    gc.disable()  # it would take a sixth of the imports' time
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # trl may not be
            importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"an import of {modules} has started {threads - 1} threads"
    requests = os.fdopen(_away(os.dup(0)), "rb")
    answers = os.fdopen(_away(os.dup(1)), "wb", buffering=0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    # torch's take down its operators: a fifth of a short worker's time.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # so that a collection in a child does not copy what all share
    gc.enable()
    request = serve(requests, answers)
    if request is None or not _is_server(request):
        return request
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    return forked(request["argv"][2:])


def main(modules: Sequence[str]) -> None:
    request, code = forked(modules), 0
    try:
        if request is not None:
            become(request)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        sys.last_value = error  # as Python does, whose exit hooks tell an error by it
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    atexit.register(close)
