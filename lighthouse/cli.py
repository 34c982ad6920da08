"""The command `lighthouse`: start one, or ask or tell one that runs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lighthouse import __version__
from lighthouse.client import LighthouseClient
from lighthouse.config import LighthouseConfig, Timeouts, normalize_address
from lighthouse.errors import LighthouseError
from lighthouse.files import write_out
from lighthouse.keeper import SIGNAL_LOOK_S, keep_running, patiently
from lighthouse.machine.job import Note
from lighthouse.server import LighthouseServer
from lighthouse.wire.messages import JobKey, printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

DEFAULT_BIND = "tcp://127.0.0.1:29510"
DEFAULT_ADDRESS = "tcp://127.0.0.1:29510"
_DEFAULT_JOB = JobKey()

_TIMEOUT_HELP = {
    "heartbeat_timeout_s": (
        "timeout / 100, 0.3 to 5",
        "A host that is silent for this long is gone.",
    ),
    "heartbeat_s": ("heartbeat timeout / 3", "How often hosts prove that they are alive."),
    "join_timeout_s": (
        "timeout / 12, at least 0.5",
        "How long the first quorum, and a restarted lighthouse, waits for stragglers.",
    ),
    "step_timeout_s": (
        "timeout",
        "After a step's first vote, members that have not voted are evicted.",
    ),
    "revoke_timeout_s": ("timeout / 6", "After a revoke, members that have not voted are evicted."),
    "heal_timeout_s": ("timeout / 2", "Members that heal for longer than this are evicted."),
    "connect_timeout_s": ("timeout", "How long a replica group looks for the lighthouse."),
    "resend_s": ("timeout / 60, 0.2 to 2", "An unanswered request is sent again after this."),
}


def _timeout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (derived, text) in reversed(_TIMEOUT_HELP.items()):
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        command = click.option(
            flag, name, type=float, metavar="SECONDS", help=f"{text}  [derived: {derived}]"
        )(command)
    return command


@click.group(
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "token_normalize_func": lambda word: word.replace("_", "-"),  # torchft's --min_replicas
    },
)
@click.option(
    "--bind",
    default=DEFAULT_BIND,
    metavar="ADDRESS",
    help="Where to listen; port 0 means any free one. tcp://0.0.0.0:29510 lets other machines in.",
)
@click.option(
    "--min-replicas",
    default=1,
    type=int,
    metavar="N",
    help="No quorum forms with fewer replica groups.",
)
@click.option(
    "--expected-replicas",
    default=0,
    type=int,
    metavar="N",
    help="The first quorum waits for this many (0, not known: until the join timeout).",
)
@click.option(
    "--go-on-after",
    "go_on_after_s",
    type=float,
    metavar="SECONDS",
    help="It waits no longer than this for those that are expected and do not come.  [default: it does]",
)
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    type=float,
    metavar="SECONDS",
    help="How long one step's communication may take; all below derive from it.",
)
@_timeout_options
@click.option(
    "--state-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the members of each job's last quorum here over a restart.",
)
@click.option("--web", metavar="HOST:PORT", help="Also show a status page (JSON: /status).")
@click.option("--quiet", is_flag=True, help="Print quorum changes only.")
@click.version_option(__version__, package_name="lighthouse", message="lighthouse %(version)s")
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Start a lighthouse: it decides which replica groups train together.

    The first line it prints is the address that replica groups need. It ends with exit code 0
    on SIGTERM and Ctrl-C; it may be killed and started again at any moment, no step is lost.
    Its work is done in a child process, which is started again if it ends by itself.
    """
    if context.invoked_subcommand is None:
        code = keep_running(lambda address, tell: _serve(address, tell, **options))
        raise SystemExit(code)


def _serve(
    address: str,
    tell: Callable[[str], None],
    *,
    bind: str,
    min_replicas: int,
    expected_replicas: int,
    go_on_after_s: float | None,
    timeout_s: float,
    state_file: Path | None,
    web: str | None,
    quiet: bool,
    **timeouts: float | None,
) -> int:
    """Serve until told to end; returns 0. `address`: of the process before; empty: none was."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = LighthouseConfig(
            min_replicas=min_replicas,
            expected_replicas=expected_replicas,
            go_on_after_s=math.inf if go_on_after_s is None else go_on_after_s,
            timeouts=Timeouts.derive(timeout_s, **timeouts),
        )
        web_address = _page_address(web) if web else None
        lines = _Lines(quiet)
        server = patiently(
            lambda: LighthouseServer(
                address or bind, config=config, state_file=state_file, on_note=lines.note
            )
        )
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(error.strerror)
    with server, contextlib.ExitStack() as pages:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda _signum, _frame: server.request_stop())
        page = None
        if web_address is not None:
            from lighthouse.web import StatusPage  # http.server is not needed otherwise

            try:
                page = pages.enter_context(
                    patiently(lambda: StatusPage(web_address, server.status))
                )
            except OSError as error:
                _fail(f"can't show the status page on {web} ({error.strerror}): choose another")
        tell(server.bound)  # first: once the line is out, a death must lead to a new start
        lines.start("" if address else f"lighthouse listening on {server.address()}")
        if page is not None:
            lines.say(f"status page on {page.url}")
        try:
            while not server.join(SIGNAL_LOOK_S):
                pass
        except RuntimeError as error:
            _fail(str(error), code=1)
    return 0


class _Lines:
    """What is printed: the address first, then one line per quorum change. Any thread."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._started = threading.Event()

    def start(self, line: str) -> None:
        """Print the first line, if any, unstamped; only then do notes follow."""
        if line:
            print(line, flush=True)
        self._started.set()

    def say(self, line: str) -> None:
        """Print a line, stamped with the time of day."""
        # In one piece: the process that keeps this one speaks here, too.
        write_out(sys.stdout, f"{time.strftime('%H:%M:%S')} {line}\n")

    def note(self, note: Note) -> None:
        """Called by the server's thread."""
        if self._quiet and not note.quorum:
            return
        self._started.wait()
        job = note.job
        where = "" if job == _DEFAULT_JOB else f"[{job.job_id}/{job.room_id}] "
        self.say(f"{where}{printable(note.text)}")


_address = click.option("--address", default=DEFAULT_ADDRESS, help="Where the lighthouse listens.")
_timeout = click.option(
    "--timeout",
    "timeout_s",
    default=5.0,
    type=float,
    metavar="SECONDS",
    help="How long to wait for its answer.",
)


@contextlib.contextmanager
def _asking(address: str, timeout_s: float) -> Iterator[LighthouseClient]:
    """A client; what fails within ends the command with a sentence."""
    try:
        with LighthouseClient(address, timeout_s=timeout_s) as client:
            yield client
    except ValueError as error:
        _fail(str(error))
    except LighthouseError as error:
        _fail(str(error), code=1)


@main.command()
@_address
@_timeout
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def status(address: str, timeout_s: float, as_json: bool) -> None:
    """Show the jobs of a running lighthouse: members, waiting replica groups, and why."""
    with _asking(address, timeout_s) as client:
        answer = client.status()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(answer)


@main.command(name="declare-dead")
@click.argument("member")
@click.option("--job", default=_DEFAULT_JOB.job_id, metavar="ID", help="The job's id (FT_JOB_ID).")
@_address
@_timeout
def declare_dead(member: str, job: str, address: str, timeout_s: float) -> None:
    """Tell a running lighthouse that a replica group is dead, or will not come.

    MEMBER is its name, or the replica_id of one of its processes: a job waits for it no longer. Make
    sure first that no process of it runs; one that the lighthouse can see is not accepted.
    """
    with _asking(address, timeout_s) as client:
        accepted, text = client.declare_dead(member, job_id=job)
    if not accepted:
        _fail(text, code=1)
    click.echo(text)


@click.command(context_settings={"show_default": True})
@click.option("--bind", default="0.0.0.0:29510", help="Where to listen; all interfaces.")
@click.option("--min_replicas", required=True, help="No quorum forms with fewer replica groups.")
@click.option("--join_timeout_ms", type=float, help="As `lighthouse --join-timeout`.")
@click.option("--heartbeat_timeout_ms", type=float, help="As `lighthouse --heartbeat-timeout`.")
@click.option("--quorum_tick_ms", type=float, help="Has no effect: nothing is polled.")
def torchft_main(
    bind: str,
    min_replicas: str,
    join_timeout_ms: float | None,
    heartbeat_timeout_ms: float | None,
    quorum_tick_ms: float | None,
) -> None:
    """The command `lighthouse` with the options of torchft's."""
    words = ["--bind", bind, "--min-replicas", min_replicas]
    if join_timeout_ms is not None:
        words += ["--join-timeout", str(join_timeout_ms / 1000)]
    if heartbeat_timeout_ms is not None:
        words += ["--heartbeat-timeout", str(heartbeat_timeout_ms / 1000)]
    main(words, prog_name="lighthouse")


def show(answer: dict[str, Any]) -> None:
    """Print a status as tables."""
    from rich.console import Console  # 0.1 s that only this command needs

    console = Console(markup=False, highlight=False)
    server = answer["server"]
    console.print(
        _plain(
            f"lighthouse {server['address']}: {_many(server['connections'], 'connection')},"
            f" {_many(len(answer['jobs']), 'job')}"
        )
    )
    for job in answer["jobs"]:
        console.print(_table_of(job))


def _many(number: int, noun: str) -> str:
    """ "1 job", "2 jobs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table_of(job: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(
        title=_plain(f"{job['job_id']}/{job['room_id']}: {job['state']}, step {job['step']}"),
        caption=_plain(f"{job['reason']}; {job['commits']} committed, {job['discards']} discarded"),
    )
    for column in ("rank", "replica group", "replica_id", "state"):
        table.add_column(column)
    for rank, member in enumerate(job["members"]):
        state = member["gone"] and f"gone: {member['gone']}"
        state = state or ("healing" if member["healing"] else "")
        state = state or ("voted" if member["voted"] else "training")
        names = (_plain(text) for text in (member["name"], member["replica_id"], state))
        table.add_row(str(rank), *names)
    for name in job["waiting"]:
        table.add_row("-", _plain(name), "", "waiting")
    if job.get("left_off"):
        table.add_row("-", f"and {job['left_off']} more", "", "")
    return table


def _plain(text: str) -> Text:
    """`text` of some process for the terminal: neither markup nor control characters count."""
    from rich.text import Text

    return Text(printable(text))


def _page_address(web: str) -> str:
    """`web` as an address to bind. Raises ValueError that names the option: the command has two addresses."""
    try:
        return normalize_address(web, to_connect=False)
    except ValueError:
        raise ValueError(f"--web {web!r} is no HOST:PORT: write it as 0.0.0.0:8080") from None


def _fail(sentence: str | None, code: int = 2) -> NoReturn:
    click.echo(f"lighthouse: {sentence}", err=True)
    raise SystemExit(code)
