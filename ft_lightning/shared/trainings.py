"""Which of its trainings a script is in: a fit, or a loop of a Fabric.

A script may train several times (pretrain and finetune, k-fold, a sweep). Replica groups that train
together must be in the same training, so each training of a job has a room of its own at the
lighthouse. A process that comes back begins with its script's first training. If its peers are in a
later one, it can't repeat the first: they have left it, and nothing of what they train now belongs
to it. It is refused before it trains.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft_core.config import JobOptions
from ft_core.launch import board
from ft_core.shell.local_lighthouse import ensure_local_lighthouse
from lighthouse.client import LighthouseClient
from lighthouse.wire.messages import JobKey

_FIRST = JobKey().room_id
_PREFIX = "training-"

_local = threading.local()


@dataclass
class _Latest:
    """The latest training that has begun in a thread."""

    number: int = 0
    model: Callable[[], Any] = lambda: None
    """What it trains; None: that is not known, or it has ended regularly."""


def next_room(job: JobOptions, model: Any = None) -> str:
    """The room of the training that begins now in this thread, which runs a script of this job.

    That of the latest one, if it has trained `model` and an exception has ended it: the script tries again.
    """
    latest = _latest(job)
    if model is None or latest.model() is not model:
        latest.number += 1
    latest.model = weakref.ref(model) if model is not None else lambda: None
    return _room(latest.number)


def has_ended(job: JobOptions) -> None:
    """The training of `job.room_id` has ended regularly, in this thread."""
    if is_latest(job):
        _latest(job).model = lambda: None


def is_latest(job: JobOptions) -> bool:
    """Whether no later training has begun in this thread than that of `job.room_id`."""
    return job.room_id == _room(_latest(job).number)


def _latest(job: JobOptions) -> _Latest:
    every: dict[tuple[str, str, int], _Latest] = vars(_local).setdefault("latest", {})
    return every.setdefault((job.job_id, job.name, job.group_rank), _Latest())


def _room(number: int) -> str:
    return _FIRST if number == 1 else f"{_PREFIX}{number}"


def over(job: JobOptions) -> str:
    """Why the training of `job.room_id` can't be joined, as a sentence; "": it can.

    Asks the supervisor's board, and the lighthouse, which does not know of peers between two trainings.
    Raises LighthouseUnavailable after the connect timeout.
    """
    mine = number_of(job.room_id)
    if not board.slot().has_passed(mine):
        with _client(job) as client:
            peopled = _peopled(client, job)
            if mine in peopled or not any(number > mine for number in peopled):
                return ""
    return (
        f"this process is at training {mine} of its script, which is over for its peers: it can't be "
        "repeated in part of the replica groups, so they go on without this one. A Trainer's fit is "
        "passed over if its last step was saved; else let a script train once (each with a job id of its "
        "own), or start all groups again"
    )


def has_others(job: JobOptions) -> bool:
    """Whether another replica group is in the training of `job.room_id`, as far as the lighthouse knows.

    Raises LighthouseUnavailable after the connect timeout.
    """
    with _client(job) as client:
        return number_of(job.room_id) in _peopled(client, job)


def _peopled(client: LighthouseClient, job: JobOptions) -> set[int]:
    """The numbers of the trainings of the job in which others are."""
    rooms = [each for each in client.status()["jobs"] if each["job_id"] == job.job_id]
    return {number_of(each["room_id"]) for each in rooms if _others(each, job.name)}


def give_up(job: JobOptions) -> None:
    """Tell the lighthouse that this group will not come, so that its peers do not wait for it."""
    with _client(job) as client:
        client.declare_dead(job.name, job_id=job.job_id)


def _client(job: JobOptions) -> LighthouseClient:
    address = job.lighthouse or ensure_local_lighthouse()
    return LighthouseClient(address, timeout_s=job.timeouts.connect_timeout_s)


def number_of(room: str) -> int:
    """Of a training, from 1; 0: the room is of another kind."""
    if room == _FIRST:
        return 1
    number = room.removeprefix(_PREFIX)
    return int(number) if number != room and number.isdecimal() else 0


def _others(room: dict[str, Any], me: str) -> bool:
    """Whether a replica group besides `me` is there. An earlier life of `me` may be listed still."""
    names = [member["name"] for member in room["members"] if not member["gone"]]
    return any(name != me for name in (*names, *room["waiting"]))
