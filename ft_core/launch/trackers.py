"""What a process that has just become the leader takes over: trackers, which are opened alongside the
training, and asked how far the leader before had come; and saves, which that may not have made.

MLflow is asked for it, and TensorBoard's files are read. wandb writes a run's records to a local file,
in blocks: what a process had not written when it was killed is lost. Offline that file is all there
is. Needs the tracker, and imports it where it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
"""Records are framed as those of LevelDB's log, in blocks of this many bytes."""
HEADER = struct.Struct("<IHB")
FULL, FIRST, LAST = 1, 2, 4
_EVENT_FILES = "tensorboard.backend.event_processing.event_file_loader"
_IMPORTED_LATE = {
    "tensorboard": ("torch.utils.tensorboard", _EVENT_FILES),
    "wandb": ("wandb", "wandb.apis.public", "wandb.sdk.launch", "wandb.wandb_run"),
    "mlflow": ("mlflow", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store"),
}


def prepare(trackers: Iterable[str]) -> None:
    """Import what the next leader needs to open these: alongside the training, an import makes the loop
    wait for up to a second or more. So before the first quorum."""
    for tracker in trackers:
        for name in _IMPORTED_LATE.get(tracker, ()):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def tensorboard_steps(folder: str) -> dict[str, int] | None:
    """The last step of each scalar in a folder of event files; None: they can't be read. Any thread."""
    try:
        reader = importlib.import_module(_EVENT_FILES)
    except ImportError:  # tensorboardX writes, and there is nothing that reads
        return None
    last: dict[str, int] = {}
    for path in sorted(Path(folder).glob("*tfevents*")):
        for event in reader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                last[value.tag] = max(event.step, last.get(value.tag, 0))
    return last


def mlflow_steps(client: Any, run_id: str) -> dict[str, int]:
    """The last step of each metric of a run, from an `MlflowClient`. Any thread."""
    return {
        name: max(metric.step for metric in client.get_metric_history(run_id, name))
        for name in client.get_run(run_id).data.metrics
    }


def wandb_steps(run: Any, step_name: str) -> dict[str, int]:
    """For each metric of a run that was just resumed, its last value of `step_name`. Any thread.

    Offline wandb counts rows anew in each process. So this run is told to count on, too.
    """
    if not run.offline:  # what the server has
        step = int(run.summary.get(step_name, -1))
        return dict.fromkeys(run.summary.keys(), step)
    last: dict[str, int] = {}
    rows = 0
    for path in sorted(Path(run.dir).parent.parent.glob(f"*-{run.id}/run-{run.id}.wandb")):
        for row in rows_of(path):
            rows = max(rows, int(row.get("_step", -1)) + 1)
            for name in row:
                last[name] = max(int(row.get(step_name, 0)), last.get(name, 0))
    if rows:
        run.log({}, step=rows)
    return last


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in a run's file, up to where it is torn."""
    from wandb.proto import wandb_internal_pb2 as protocol

    for packed in _records(path.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(packed)
        if record.WhichOneof("record_type") == "history":
            yield {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _records(data: bytes) -> Iterator[bytes]:
    at, record = HEADER.size, b""  # after the file's own header
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if not FULL <= kind <= LAST or at + size > len(data):
            return
        record = data[at : at + size] if kind in (FULL, FIRST) else record + data[at : at + size]
        at += size
        if kind in (FULL, LAST):
            yield record


class Opening:
    """Opens something in a thread of its own, which ends when that is open and no call waits.

    It may take seconds until a tracker is there, and all others would wait for that in their next step.
    Calls to it wait meanwhile, and are done in order.

    `call` and `wait` from one thread.

    Args:
        name: of the thread.
        opens: opens it.
        failed: called in that thread with what `opens`, or a call that has waited, has raised. The
            calls that wait are dropped then.
    """

    def __init__(
        self, name: str, opens: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._opens, self._failed = opens, failed
        self._later: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it is open, or has failed, and no call waits any more."""
        return self._over

    @property
    def here(self) -> bool:
        """Whether this is the thread that opens it."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], object]) -> bool:
        """Call `function` in that thread when its turn comes. False: it is `over`, and nothing is called."""
        with self._lock:
            if not self._over:
                self._later.append(function)
            return not self._over

    def wait(self) -> None:
        """Until it is `over`. In that thread itself: not at all."""
        if not self.here:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._opens()
            while (function := self._next()) is not None:
                function()
        except Exception as error:  # a tracker's own errors are of any kind
            with self._lock:
                self._later.clear()
                self._over = True
            self._failed(error)

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._over = not self._later
            return self._later.popleft() if self._later else None


class HeldSaves:
    """What this process saves or removes if the leader has not. The thread that saves."""

    def __init__(self) -> None:
        self.held: list[Callable[[], object]] = []
        """What the leader may not have saved yet."""
        self._older = 0
        """How many of those were held already when `round_ended` was called last."""
        self.makes_up = False
        """Whether it does that now."""

    def hold(self, call: Callable[[], object]) -> None:
        """The leader saves or removes a file now. `call()` does it here, should the leader die in it."""
        self.held.append(call)

    def settled(self) -> None:
        """The leader has voted since, or agreed to something, or this process is about to change the state: it
        has saved."""
        self.held.clear()
        self._older = 0

    def round_ended(self) -> None:
        """An outer step was committed. What was held before the one before it is settled: the leader may have
        contributed to this one before it saved, and a new leader makes up after it."""
        del self.held[: self._older]
        self._older = len(self.held)

    def make_up(self) -> None:
        """This process has become the leader: it does again what the dead one may not have done."""
        held, self.held, self._older, self.makes_up = self.held, [], 0, True
        try:
            for call in held:
                call()
        finally:
            self.makes_up = False
