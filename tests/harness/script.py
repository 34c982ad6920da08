"""What worker scripts share: options, the files that they write, the places at which they wait.

A script is one process of a test. Its only argument is a JSON object of options, which has the log
folder in `log`. What it writes there is read by `tests.harness.runs`: `NAME.started` (its process id),
`NAME.ready` (again, once it trains), `NAME.steps` (a line of JSON for each step), `NAME.end`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


def options_of(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The script's options. Stacks are printed on SIGUSR2, for the test that gives up on it."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    given: dict[str, Any] = json.loads(sys.argv[1])
    assert given.keys() <= defaults.keys(), f"no such options: {given.keys() - defaults.keys()}"
    return {**defaults, **given}


def process_name() -> str:
    """Of this process's files: its number among those of all replica groups."""
    env = os.environ
    group = env.get("REPLICA_GROUP_ID")
    size = int(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS", "1"))
    rank = env.get("RANK", "") if "WORLD_SIZE" in env else env.get("SLURM_PROCID", "")
    if rank and size > 1:
        return str(int(group or 0) * size + int(rank))
    return group or env.get("LOCAL_RANK", "0")


def digest(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> str:
    """Of the bits of all tensors and their names."""
    total = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(dict(tensors).items()):
        total.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def fail_once(optimizer: Any, here: Callable[[], bool], *, half: bool, after: bool = False) -> None:
    """The first update of which `here()` holds raises OutOfMemoryError. `half`: parts of it are done. `after`: at
    its end, for optimizers whose closure computes the step."""
    import torch

    def fail(inner: Any, args: Any, kwargs: Any) -> None:
        if not here():
            return
        handle.remove()
        if half:
            with torch.no_grad():
                inner.param_groups[0]["params"][0].add_(77.0)
        raise torch.OutOfMemoryError("injected")

    hooks = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
    handle = hooks(fail)


def flip_bit(parameter: Any) -> None:
    """Of its first number, one that no rounding of the next updates hides."""
    import torch

    parameter.detach().view(torch.int32).flatten()[0] ^= 1 << 20


class Log:
    """This process's files.

    Args:
        folder: of the test's run.
        name: of this process's files, `process_name()` or the framework's index.
        holds: the places at which it waits. It appends the place to `NAME.holds`, then waits for the
            file `go.PLACE`. The place "life:2" is the start of its second life.
    """

    def __init__(self, folder: str | Path, name: str, holds: Collection[str] = ()) -> None:
        self.folder, self.name, self.holds = Path(folder), name, frozenset(holds)

    def append(self, kind: str, **line: Any) -> None:
        """A line of JSON, with this process's id, to `NAME.KIND`."""
        with (self.folder / f"{self.name}.{kind}").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")

    def step(self, **line: Any) -> None:
        self.append("steps", **line)

    def end(self, **line: Any) -> None:
        (self.folder / f"{self.name}.end").write_text(json.dumps({"pid": os.getpid(), **line}))

    def ready(self) -> None:
        """Say that this life has come to its training."""
        self._add("ready", str(os.getpid()))

    def begin_life(self) -> None:
        """Count this process as a life of its replica; wait if the test holds that life."""
        self._add("started", str(os.getpid()))
        self.at(f"life:{self.life}")

    @property
    def life(self) -> int:
        """This process's number among its replica's, from 1."""
        return len((self.folder / f"{self.name}.started").read_text().split())

    def at(self, place: str) -> None:
        """Wait here if the test says so."""
        if place in self.holds:
            self._add("holds", place)
            parent = os.getppid()
            while not (self.folder / f"go.{place}").exists():
                if os.getppid() != parent:  # the run is over, and no file will come
                    os._exit(0)
                time.sleep(0.02)  # other processes' files announce nothing

    def die_once(self, here: bool) -> None:
        """SIGKILL this process if it is `here`, in its first life."""
        if here and self.life == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def _add(self, kind: str, text: str) -> None:
        with (self.folder / f"{self.name}.{kind}").open("a") as file:
            file.write(f"{text}\n")
