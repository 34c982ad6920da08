"""Checks of the process groups: members meet, reduce, are revoked, die and come late."""

from __future__ import annotations

import threading
import time

from benchmarks.gpu.place import CONNECT_S, Member, Place, meet
from ft_core.errors import UnderCapture

FREE_S = 0.2
_LATE_S = 0.5
"""After which an attempt that does not end is revoked, where one does not end."""
_QUEUED = 24
"""All-reduces of such an attempt: links break among them. An abort takes the longer the more are queued: with
64 it took seconds beside ten processes on one GPU."""
Answer = tuple[bool, str]
"""Of an attempt at a step: whether all sums are right, and the error with which it would be discarded."""
Answered = tuple[str, str, bool | None]
"""Of a check: what was measured, its bar, and whether it holds; None: there is no bar."""


def attempt(
    member: Member,
    tensors: int = 4,
    after_s: float = 0.0,
    revoked_after_s: float = 60.0,
    cut_after_s: float | None = None,
) -> Answer:
    """A step of so many all-reduces, up to where its vote would be cast. It is revoked if it takes too
    long, as the control thread does."""
    time.sleep(after_s)
    timers = [threading.Timer(revoked_after_s, revoke, (member,))]
    if cut_after_s is not None:
        timers.append(threading.Timer(cut_after_s, member.place.cut))
    held = [
        member.place.full(member.index, member.place.elements, member.rank + 1.0)
        for _ in range(tensors)
    ]
    for timer in timers:
        timer.start()
    error: object = None
    try:
        for work in [member.group.allreduce([tensor]) for tensor in held]:
            work.wait()
    except RuntimeError as caught:
        error = caught
    error = member.group.settle() or error or member.group.errored()
    for timer in timers:
        timer.cancel()
        timer.join()
    expected = member.members * (member.members + 1) / 2
    return all(bool((one == expected).all()) for one in held), str(error or "")


def alone(member: Member, quorum_id: int = 1) -> None:
    """Configure a quorum of this member only."""
    member.configure(quorum_id, 0, [member.address()])


def revoke(member: Member) -> None:
    member.group.revoke(RuntimeError("it takes too long"))


def revoked_in_flight(member: Member, after_s: float) -> float:
    """Start an all-reduce that no other member joins, and revoke it `after_s` seconds later, from another thread as a
    manager does: the abort of the last communicator may wait for this one's kernel, and the launch for that abort.
    Returns the seconds from there until the device was free; infinity if the step would have been committed."""
    began = 0.0

    def revoke_later() -> None:
        nonlocal began
        time.sleep(after_s)
        began = time.monotonic()
        member.group.revoke(RuntimeError("on purpose"))

    revoking = threading.Thread(target=revoke_later)
    revoking.start()
    member.group.allreduce([member.place.full(member.index, member.place.elements, 1.0)])
    revoking.join()
    error = member.group.settle()
    member.place.synchronize()
    return float("inf") if error is None else time.monotonic() - began


def on_a_side_stream(member: Member, addresses: list[bytes], count: int) -> int:
    """All-reduces of Gloo on a stream that is late: how many results were wrong."""
    group = member.kept.pop("gloo")
    group.configure(1, member.index, addresses, CONNECT_S)
    tensor, wrong = member.place.full(member.index, member.place.elements // 2, 0.0), 0
    for number in range(count):
        with member.place.aside():
            tensor.fill_(number + member.index)
            group.allreduce([tensor]).wait()
            copy = tensor.clone()
            tensor.fill_(-1)
            wrong += not bool((copy == 2 * number + 1).all())
    group.shutdown()
    return wrong


def gloo_address(member: Member) -> bytes:
    member.kept["gloo"] = member.place.gloo(30.0)
    address: bytes = member.kept["gloo"].address()
    return address


# ---------------------------------------------------------------- the checks


def one_rank(place: Place) -> Answered:
    member, count, right, slowest = Member(place, 0, 30.0), place.rounds, 0, 0.0
    for quorum_id in range(1, count + 1):
        alone(member, quorum_id)
        right += attempt(member, 1) == (True, "")
        began = time.monotonic()
        revoke(member)
        place.synchronize()
        slowest = max(slowest, time.monotonic() - began)
    member.close()
    bar = f"{count} of {count}; {FREE_S} s"
    return (
        f"{right} right sums; revoked within {slowest:.3f} s",
        bar,
        right == count and slowest <= FREE_S,
    )


def sums(place: Place, ranks: int) -> Answered:
    wrong, count = 0, place.rounds
    with place.crew(ranks, 30.0) as crew:
        for quorum_id in (1, 2):
            meet(crew, quorum_id)
            for _ in range(count // 2):
                calls = [crew.call(rank, attempt) for rank in range(ranks)]
                wrong += sum(call.result() != (True, "") for call in calls)
    return f"{wrong} wrong of {count // 2 * 2 * ranks}", "0", wrong == 0


def revokes_in_flight(place: Place) -> Answered:
    count, took = max(1, place.rounds // 2), []
    with place.crew(2, 30.0) as crew:
        for quorum_id in range(1, count + 1):
            meet(crew, quorum_id)
            took.append(crew.call(0, revoked_in_flight, 0.02).result())
    measured = f"{count} revoked, the slowest stream free after {max(took):.3f} s"
    return measured, f"all discarded; {FREE_S} s", max(took) <= FREE_S


def deaths(place: Place) -> Answered:
    wrong, failed, count = 0, 0, max(1, place.rounds // 5)
    with place.crew(1 + count, 30.0) as crew:
        # All at once: a process takes seconds to start, and its NCCL to connect for the first time.
        for call in [crew.call(1 + number, alone) for number in range(count)]:
            call.result()
        for number in range(count):
            victim = 1 + number
            meet(crew, 2 + number, (0, victim))
            calls = [crew.call(index, attempt, _QUEUED, 0.0, _LATE_S) for index in (0, victim)]
            time.sleep(0.005 * number)
            crew.kill(victim)
            right, error = calls[0].result()
            wrong += not right and not error
            failed += bool(error)
    return f"{wrong} wrong sums committed; {failed} of {count} steps discarded", "0", wrong == 0


def cut_links(place: Place) -> Answered:
    wrong, failed, count = 0, 0, max(1, place.rounds // 5)
    with place.crew(2, 30.0) as crew:
        for number in range(count):
            meet(crew, 1 + number)
            after_s = 0.005 * number
            calls = [
                crew.call(0, attempt, _QUEUED, 0.0, _LATE_S),
                crew.call(1, attempt, _QUEUED, 0.0, _LATE_S, after_s),
            ]
            answers = [call.result() for call in calls]
            wrong += sum(not right and not error for right, error in answers)
            failed += any(error for _, error in answers)
    measured = f"{wrong} wrong sums committed; {failed} of {count} steps discarded"
    return measured, "0 committed, some discarded", wrong == 0 and failed > 0


def late_peer(place: Place) -> Answered:
    limit_s = 0.02 * place.rounds
    with place.crew(2, limit_s) as crew:
        meet(crew, 1)
        calls = [crew.call(0, attempt, 1), crew.call(1, attempt, 1, 3 * limit_s)]
        answers = [call.result() for call in calls]
    wrong = sum(not right and not error for right, error in answers)
    measured = f"{wrong} wrong sums committed; said: {answers[0][1][:80]}"
    return measured, "0, and an error", wrong == 0 and bool(answers[0][1])


def gloo_on_a_side_stream(place: Place) -> Answered:
    count = 10 * place.rounds
    with place.crew(2, 30.0) as crew:
        addresses = [crew.call(rank, gloo_address).result() for rank in range(2)]
        calls = [crew.call(rank, on_a_side_stream, addresses, count) for rank in range(2)]
        wrong = max(call.result() for call in calls)
    return f"{wrong} wrong of {count}", "0", wrong == 0


def captured(place: Place) -> Answered:
    """A collective is refused, and a helper thread that asks for an event meanwhile disturbs nothing."""
    member, asked = Member(place, 0, 30.0), threading.Event()
    alone(member)
    said, tensor = "nothing", place.full(0, 8, 1.0)
    member.group.allreduce([tensor])

    def ask() -> None:
        if member.group.under_way is not None:
            asked.set()

    control = threading.Thread(target=ask, name="ft-control")
    try:
        with place.capture():
            control.start()
            control.join()
            member.group.allreduce([tensor])
    except UnderCapture as error:
        said = str(error)
    member.close()
    good = "graph is captured" in said and asked.is_set()
    return said, "refused with a sentence, while another thread asks", good


def leave_open(member: Member) -> None:
    member.kept["left open"] = True


def ends(place: Place) -> Answered:
    """Processes end as usual after their collectives, also the one that does not close its group."""
    with place.crew(2, 30.0) as crew:
        meet(crew, 1)
        calls = [crew.call(rank, attempt) for rank in range(2)]
        right = all(call.result() == (True, "") for call in calls)
        crew.call(1, leave_open).result()
    measured = f"exit statuses {', '.join(map(str, crew.codes))}" + (
        "" if right else "; WRONG SUMS"
    )
    return measured, "0", right and crew.codes == [0, 0]
