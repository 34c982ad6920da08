"""Run one seed: a phase under faults, then a phase in which a healthy core must commit again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft_core.replica.events import LeaveAfterStep
from ft_core.replica.status import Stage
from lighthouse.wire.messages import DECLARE_DEAD, FINISHED
from tests.sim.checker import Violation
from tests.sim.cluster import Cluster
from tests.sim.process import Process
from tests.sim.profile import Fault, Profile, profile_of

COMMITS_WANTED = 3
"""Commits that each member of the core must make once faults have stopped."""
ARRIVES_S = 0.1
"""What is under way between the lighthouse and a process has come by then: both know the same quorum."""
TIMES_WOKEN = 2
"""One that hangs can't be declared dead while it is here. It is evicted after it has been in a quorum."""


@dataclass(frozen=True, slots=True)
class Result:
    """What happened in a run that kept its promises."""

    seconds: float
    events: int
    commits: int
    discards: int
    heals: int
    forks: int
    recovered_s: float
    woken: bool  # a quorum whose members all hung had to be woken


def run(
    seed: int | str,
    profile: Profile | None = None,
    *,
    prepare: Callable[[Cluster], None] | None = None,
    tracing: bool = False,
    on_trace: Callable[[list[str]], None] | None = None,
) -> Result:
    """Raises `Violation` (a broken promise) or AssertionError (a broken invariant)."""
    if profile is None:
        assert isinstance(seed, int)
        profile = profile_of(seed)
    cluster = Cluster(seed, profile, tracing=tracing)
    if prepare is not None:
        prepare(cluster)
    try:
        return _run(cluster, profile)
    finally:
        if on_trace is not None:
            on_trace(cluster.trace)


def _run(cluster: Cluster, profile: Profile) -> Result:
    clock = cluster.clock
    clock.at(0.0, cluster.start_lighthouse)
    for slot in profile.slots:
        clock.at(cluster.work_rng.random() * profile.start_spread_s, cluster.spawn, slot)
    for fault in profile.faults:
        clock.at(fault.at_s, strike, cluster, fault)
    clock.run_until(profile.faulty_s)
    core = _calm(cluster)
    began = clock.now
    wanted = {p.replica_id: p.commits + COMMITS_WANTED for p in core}
    cluster.log(f"faults stop; core {sorted(wanted)}")
    done = _live(cluster, core, wanted, began + profile.recovery_s)
    woken = 0
    while not done and woken < TIMES_WOKEN:
        clock.run_until(clock.now + ARRIVES_S)
        if not _wake_lost_jobs(cluster):
            break
        woken += 1
        done = _live(cluster, core, wanted, clock.now + profile.recovery_s)
    if not done:
        behind = sorted(p.replica_id for p in core if p.commits < wanted[p.replica_id])
        stuck = ", ".join(
            f"{p.replica_id} {p.replica.stage.value}/{p.replica.attempt.value} ({p.replica.reason})"
            for p in core
        )
        raise Violation(
            f"L1: {behind} made no {COMMITS_WANTED} commits in {profile.recovery_s:.1f} s: {stuck}"
        )
    checkers = cluster.checkers.values()
    return Result(
        seconds=clock.now,
        events=clock.events,
        commits=sum(c.commits for c in checkers),
        discards=sum(c.discards for c in checkers),
        heals=sum(c.heals for c in checkers),
        forks=sum(c.forks for c in checkers),
        recovered_s=clock.now - began,
        woken=woken > 0,
    )


def _live(cluster: Cluster, core: list[Process], wanted: dict[str, int], until: float) -> bool:
    """Run until every process of the core, or what was started in its place, has its commits."""
    left = [process.slot for process in core]

    def done() -> bool:
        while left:
            process = cluster.process_in(left[-1])
            if process is None:
                return False
            if process.commits < wanted.get(process.replica_id, COMMITS_WANTED):
                return False
            left.pop()
        return True

    return done() or cluster.clock.run_until(until, done)


def _wake_lost_jobs(cluster: Cluster) -> bool:
    """Un-hang jobs all of whose members that hold the state hang, and declare those dead that hang
    while their job waits for them; whether there was one.

    The bound does not cover them; they are rows of "What a job waits for, and what ends it" (docs/protocol.md) that have no limit:
    "the only member that holds the state hangs between two steps", since nothing can tell a loop that hangs from one that
    computes for long, and the state would be lost with it; and those whose reason asks for `declare-dead`.
    """
    found = False
    lighthouses = [host.machine for host in cluster.lighthouses.hosts if host.machine is not None]
    for job in [job for each in lighthouses for job in each.status()["jobs"]]:  # type: ignore[attr-defined]
        processes = _holders(cluster, job)
        if processes and all(p.habits.hung for p in processes):
            found = True
            for process in processes:
                process.unhang()
        if DECLARE_DEAD in job["reason"]:
            for process in [p for p in cluster.running.values() if p.habits.hung]:
                found = True
                cluster.declare_dead(process.job, process.slot)
    return found


def _holders(cluster: Cluster, job: dict[str, Any]) -> list[Process]:
    """Processes that hold the state from which `job`, as its status tells, goes on."""
    if job["state"] == "live":
        living = [m["replica_id"] for m in job["members"] if not m["gone"] and not m["healing"]]
        return [cluster.running[r] for r in living if r in cluster.running]
    key = job["job_id"], job["room_id"]
    here = [p for p in cluster.running.values() if (p.job.job_id, p.job.room_id) == key]
    return [
        p for p in here if p.replica.lineage == job["lineage"] and p.replica.stage is Stage.WAITING
    ]


def _calm(cluster: Cluster) -> list[Process]:
    """End all faults; the core is what lives in jobs with at least `min_replicas`."""
    profile = cluster.profile
    cluster.start_lighthouse()
    cluster.lighthouses.resume()
    for plane in cluster.planes.values():
        plane.mend()
    for process in list(cluster.running.values()):
        _recover(cluster, process)
    crowd = dict.fromkeys(cluster.jobs, 0)
    core = [p for p in cluster.running.values() if not p.left and not p.replica.leaving]
    for process in core:
        crowd[process.job] += not process.habits.hung
    return [
        p
        for p in core
        if crowd[p.job] >= profile.min_replicas
        and not p.habits.hung
        and p.slot not in profile.no_heal
    ]


def _recover(cluster: Cluster, process: Process) -> None:
    habits = process.habits
    habits.heal_failures = habits.configure_failures = habits.error_rate = 0.0
    habits.gives_up = habits.stops_waiting = habits.update_fails = False
    habits.heal_s, habits.configure_s = 0.05, 0.005
    habits.forward_s = cluster.profile.forward_s
    if process.paused:
        _resume(cluster, process)
    if process.link.blocked:
        cluster.network.unblock(process.link)
    # One that stays hung must not hold up the core; but a training that is complete starts anew with all.
    all_needed = any(fault.kind == "finish" for fault in cluster.profile.faults)
    if habits.hung and (cluster.fault_rng.random() < 0.5 or all_needed):
        process.unhang()


# ---------------------------------------------------------------------- faults


def strike(cluster: Cluster, fault: Fault) -> None:
    """Let `fault` happen now."""
    if fault.kind == "lighthouse":
        cluster.lighthouses.crash()
        cluster.clock.after(fault.for_s, cluster.start_lighthouse)
        return
    if fault.kind in _STRIKES_ALL:
        cluster.log(f"fault: {fault.kind} for {fault.for_s:g} s")
        _STRIKES_ALL[fault.kind](cluster, fault.for_s)
        return
    process = cluster.process_in(fault.slot)
    if process is None or process.left:
        return
    cluster.log(f"fault: {fault.kind} {process.replica_id} for {fault.for_s:g} s")
    _STRIKES[fault.kind](cluster, process, fault.for_s)


def _crash(cluster: Cluster, process: Process, for_s: float) -> None:
    cluster.crash(process)
    cluster.clock.after(cluster.profile.restart_s, cluster.spawn, process.slot)


def _pause(cluster: Cluster, process: Process, for_s: float) -> None:
    """SIGSTOP: heartbeats stop, too."""
    if process.paused:
        return
    process.pause()
    limit = cluster.profile.timeouts.heartbeat_timeout_s
    cluster.cut(process, cluster.clock.now + for_s)
    if for_s > limit:
        cluster.clock.after(limit, _silence, cluster, process)
    cluster.clock.after(for_s, _resume, cluster, process)


def _suspend(cluster: Cluster, process: Process, for_s: float) -> None:
    """Its virtual machine: when it goes on, what its timers were set for comes before what it was sent."""
    if not process.paused:
        process.timers_first = True
        _pause(cluster, process, for_s)


def _silence(cluster: Cluster, process: Process) -> None:
    if process.paused:
        cluster.network.break_link(process.link, lighthouse_s=0.0, process_s=0.0)


def _stall(cluster: Cluster, process: Process, for_s: float) -> None:
    """The process does nothing, but its heartbeats go on (the GIL is held)."""
    if not process.paused:
        process.pause()
        cluster.cut(process, cluster.clock.now + for_s)
        cluster.clock.after(for_s, _resume, cluster, process)


def _resume(cluster: Cluster, process: Process) -> None:
    if process.alive and process.paused:
        cluster.cut(process, cluster.clock.now)
        process.resume()


def _partition(cluster: Cluster, process: Process, for_s: float) -> None:
    cluster.cut(process, cluster.clock.now + for_s)
    cluster.network.block(process.link)
    cluster.clock.after(for_s, cluster.network.unblock, process.link)


def _drop(cluster: Cluster, process: Process, for_s: float) -> None:
    """The connection breaks; both sides see it soon, and it comes back at once."""
    rng = cluster.fault_rng
    limit = cluster.profile.timeouts.heartbeat_timeout_s
    cluster.cut(process, cluster.clock.now + 1.5 * limit)
    cluster.network.break_link(
        process.link,
        lighthouse_s=rng.choice((0.001, limit)),
        process_s=rng.choice((0.001, limit)),
    )


def _hang(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.hung = True
    cluster.cut(process, cluster.clock.now + for_s)
    if cluster.fault_rng.random() < 0.7:
        cluster.clock.after(for_s, _unhang, cluster, process)


def _unhang(cluster: Cluster, process: Process) -> None:
    if process.alive and process.habits.hung:
        cluster.cut(process, cluster.clock.now)
        process.unhang()


def _leave(cluster: Cluster, process: Process, for_s: float) -> None:
    cluster.cut(process, cluster.clock.now)
    process.leave("preempted")


def _leave_after_step(cluster: Cluster, process: Process, for_s: float) -> None:
    process.replica.handle(LeaveAfterStep(), 0.0)
    cluster.cut(process, float("inf"))  # what only it holds goes with it
    process.stays_away_s = 2.0


def _false_death_notice(cluster: Cluster, process: Process, for_s: float) -> None:
    cluster.cut(process, cluster.clock.now)
    cluster.death_notice(process.job, process.replica_id, process.place)


def _bad_heal(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.heal_failures = cluster.fault_rng.choice((0.5, 1.0))


def _slow_heal(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.heal_s = cluster.profile.timeouts.heal_timeout_s * for_s


def _bad_configure(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.configure_failures = 0.5


def _slow_configure(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.configure_s = for_s


def _errors(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.error_rate = 0.3


def _slow(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.forward_s = for_s


def _give_up(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.gives_up = True
    cluster.cut(process, cluster.clock.now + for_s)


def _stop_waiting(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.stops_waiting = True


def _update_fails(cluster: Cluster, process: Process, for_s: float) -> None:
    process.habits.update_fails = True
    cluster.cut(process, cluster.clock.now + for_s)


def _flip(cluster: Cluster, process: Process, for_s: float) -> None:
    process.flip()


def _pause_lighthouse(cluster: Cluster, for_s: float) -> None:
    for process in cluster.running.values():
        cluster.cut(process, cluster.clock.now + for_s)
    cluster.lighthouses.pause(0, for_s)


def _suspend_lighthouse(cluster: Cluster, for_s: float) -> None:
    cluster.lighthouses.hosts[0].timers_first = True
    _pause_lighthouse(cluster, for_s)


def _kill_all(cluster: Cluster, for_s: float) -> None:
    """They come back from their checkpoints, which may be of different steps."""
    for process in list(cluster.running.values()):
        _crash(cluster, process, for_s)


def _keeper_dies(cluster: Cluster, for_s: float) -> None:
    for keeper in cluster.keepers:
        keeper.dies()


def _finish(cluster: Cluster, for_s: float) -> None:
    """The training is complete, and all start another one in the same room."""
    cluster.checkpoints.clear()
    _keeper_dies(cluster, for_s)  # the next training is in another room
    for process in list(cluster.running.values()):
        if not process.left:
            cluster.cut(process, float("inf"))  # what only it holds goes with it
            process.leave(FINISHED)


def _cut(cluster: Cluster, process: Process, for_s: float) -> None:
    """No packet gets to (or from, or both) another host for a while; all reach the lighthouse."""
    rng, plane = cluster.fault_rng, process.plane
    others = [slot for slot in cluster.profile.slots if slot != process.slot]
    other = rng.choice(others)
    ways = [(process.slot, other), (other, process.slot)]
    plane.cuts.update(rng.choice((ways[:1], ways[1:], ways)))
    cluster.clock.after(for_s, plane.mend)


_STRIKES: dict[str, Callable[[Cluster, Process, float], None]] = {
    "crash": _crash,
    "pause": _pause,
    "stall": _stall,
    "partition": _partition,
    "drop": _drop,
    "hang": _hang,
    "leave": _leave,
    "leave_after_step": _leave_after_step,
    "false_death_notice": _false_death_notice,
    "bad_heal": _bad_heal,
    "slow_heal": _slow_heal,
    "bad_configure": _bad_configure,
    "slow_configure": _slow_configure,
    "errors": _errors,
    "slow": _slow,
    "give_up": _give_up,
    "cut": _cut,
    "stop_waiting": _stop_waiting,
    "update_fails": _update_fails,
    "suspend": _suspend,
    "flip": _flip,
}
_STRIKES_ALL: dict[str, Callable[[Cluster, float], None]] = {
    "lighthouse_pause": _pause_lighthouse,
    "kill_all": _kill_all,
    "finish": _finish,
    "suspend_lighthouse": _suspend_lighthouse,
    "keeper_dies": _keeper_dies,
}
