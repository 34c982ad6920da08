"""When a replica group that has died is started again: each row of the policy's table."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ft_core.launch.restarts import (
    AWAY_EXIT_CODE,
    BROKEN_EXIT_CODE,
    UNLIKE_EXIT_CODE,
    Again,
    Death,
    EndJob,
    GiveUp,
    History,
    RestartPolicy,
    Verdict,
)

KILLED, ERROR, CRASHED = -9, 1, -11


class Job:
    """Groups of one machine on a clock of their own."""

    def __init__(self, count: int, policy: RestartPolicy | None = None) -> None:
        self.policy = policy or RestartPolicy()
        self.now = self.commits = 0.0
        self.histories: list[History] = [()] * count
        self.lives: list[bool | None] = [False] * count
        self.kept = -1

    def train(self, seconds: float, *, steps: int = 1) -> None:
        self.now += seconds
        self.commits += steps
        self.lives = [None if life is None else life or steps > 0 for life in self.lives]

    def dies(
        self,
        index: int,
        code: int,
        *,
        step: int = -1,
        trained_s: float = 0.0,
        trained: int | None = None,
    ) -> Verdict:
        """`trained`: None: as `step`."""
        self.lives[index] = None
        trained, commits = step if trained is None else trained, int(self.commits)
        death = Death(self.now, code, step, trained_s, trained, commits, kept=self.kept)
        self.histories[index] = (*self.histories[index], death)
        verdict = self.policy.after(self.histories, index, self.lives)
        if isinstance(verdict, Again):
            remembered = replace(death, level=verdict.level)
            self.histories[index] = (*self.histories[index][:-1], remembered)
        return verdict

    def returns(self, index: int) -> None:
        self.lives[index] = False


def pause(verdict: Verdict) -> float:
    assert isinstance(verdict, Again), verdict
    return verdict.pause_s


def test_the_pause_grows_and_shrinks_with_healthy_time() -> None:
    job, pauses = Job(4), []
    for trained_s in (0, 5, 5, 5, 60, 1e6):
        job.train(5)
        pauses.append(pause(job.dies(1, ERROR, step=int(job.commits), trained_s=trained_s)))
        job.returns(1)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 2.0, 0.0]


@pytest.mark.parametrize("others", [1, 3])
def test_the_first_pause_is_left_out_after_a_life_that_has_trained(others: int) -> None:
    """And only that one: a group that trains for some seconds and dies, again and again, waits."""
    job, pauses = Job(1 + others), []
    for trained_s in (4.9, 5.0, 5.0, 5.0, 60.0, 60.0, 60.0):
        job.train(5)
        pauses.append(pause(job.dies(1, ERROR, step=int(job.commits), trained_s=trained_s)))
        job.returns(1)
    if others == 1:  # few are alive: the pause does not grow
        assert pauses == [0.5, *[0.0] * 6]
    else:
        assert pauses == [0.5, 1.0, 2.0, 4.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("trained_s", [6.0, 4.4, 2.0])
def test_one_that_is_killed_from_outside_and_had_trained_is_started_again_at_once(
    trained_s: float,
) -> None:
    """However often, also by what kills one group every 5 s. What it had to wait for its own failures before
    is not forgotten."""
    job, pauses = Job(4), []
    for code in (ERROR, KILLED, KILLED, KILLED, ERROR):
        job.train(5)
        lived_s = 6.0 if code == ERROR else trained_s
        pauses.append(pause(job.dies(1, code, step=int(job.commits), trained_s=lived_s)))
        job.returns(1)
    assert pauses == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_one_that_is_killed_as_soon_as_it_trains_waits_longer_each_time() -> None:
    """Each return costs the others a heal; one that never stays gives nothing for it."""
    job, pauses = Job(4), []
    for _ in range(4):
        job.train(2)
        pauses.append(pause(job.dies(1, KILLED, step=int(job.commits), trained_s=1.9)))
        job.returns(1)
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_one_that_asks_to_be_started_again_waits_for_the_first_pause() -> None:
    """Whatever its group had to wait for before; and that is not forgotten."""
    job, pauses = Job(4), []
    for code in (ERROR, ERROR, ERROR, BROKEN_EXIT_CODE, BROKEN_EXIT_CODE, ERROR):
        job.train(5)
        pauses.append(pause(job.dies(1, code, step=int(job.commits))))
        job.returns(1)
    assert pauses == [0.5, 1.0, 2.0, 0.5, 0.5, 4.0]


def test_the_pause_has_an_end() -> None:
    job = Job(4)
    for _ in range(9):
        job.train(5)
        verdict = job.dies(1, KILLED, step=int(job.commits))
        job.returns(1)
    assert pause(verdict) == 30.0


@pytest.mark.parametrize(("count", "others"), [(2, 1), (4, 2), (8, 3), (1, 0)])
def test_while_few_are_alive_the_pause_is_short(count: int, others: int) -> None:
    job = Job(count)
    for index in range(others + 1, count):
        job.dies(index, KILLED)
    for _ in range(8):
        job.train(1)
        assert pause(job.dies(0, KILLED, step=int(job.commits))) == 0.5
        job.returns(0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_random_kill_every_few_seconds_does_not_lose_the_run(count: int, seed: int) -> None:
    """Hundreds of deaths, of which each group has many a minute; a start takes longer than the time
    between two kills. Groups are dead for no longer than a start and a short pause."""
    chance, job = random.Random(seed), Job(count)
    starts_at, joined_at = [0.0] * count, [0.0] * count
    start_s = 5.0
    while job.now < 1800.0:
        job.train(4.5, steps=0)
        for index in range(count):
            if job.lives[index] is None and job.now >= starts_at[index]:
                job.lives[index], joined_at[index] = False, starts_at[index] + start_s
        training = [i for i in range(count) if job.lives[i] is not None and joined_at[i] <= job.now]
        if training:
            job.train(0.0, steps=5)
        victim = chance.choice([i for i in range(count) if job.lives[i] is not None] or [-1])
        if victim < 0:
            continue
        trained_s = max(0.0, job.now - joined_at[victim])
        step = int(job.commits) if trained_s else -1
        verdict = job.dies(victim, KILLED, step=step, trained_s=trained_s)
        assert isinstance(verdict, Again), verdict
        starts_at[victim] = job.now + verdict.pause_s
        alive = sum(life is not None for life in job.lives)
        assert verdict.pause_s <= 0.5 or alive > max(1, count // 2)


def test_restarts_are_counted_within_an_hour() -> None:
    job = Job(2, RestartPolicy(max_restarts=3))
    for _ in range(3):
        job.train(10)
        assert isinstance(job.dies(1, KILLED, step=int(job.commits)), Again)
        job.returns(1)
    job.train(3600)
    for _ in range(3):
        job.train(10)
        assert isinstance(job.dies(1, KILLED, step=int(job.commits)), Again)
        job.returns(1)
    job.train(10)
    verdict = job.dies(1, KILLED, step=int(job.commits))
    assert verdict == GiveUp("given up after 3 restarts within 60 minutes")


def test_no_restart_where_none_is_allowed() -> None:
    verdict = Job(2, RestartPolicy(max_restarts=0)).dies(1, KILLED)
    assert verdict == GiveUp("given up after 0 restarts")


def test_there_is_no_limit_while_the_job_makes_progress() -> None:
    job = Job(2)
    for _ in range(1000):
        job.train(1)
        assert isinstance(job.dies(1, ERROR, step=int(job.commits)), Again)
        job.returns(1)


def test_ten_ends_without_a_step_are_too_many() -> None:
    job = Job(2)
    for _ in range(9):
        job.train(1, steps=0)
        assert isinstance(job.dies(1, KILLED), Again)
        job.returns(1)
    verdict = job.dies(1, KILLED)
    assert isinstance(verdict, GiveUp) and "no step between 10 of its ends" in verdict.why


@pytest.mark.parametrize("groups", [1, 3])
def test_one_that_is_refused_for_its_settings_from_the_beginning_is_given_up(groups: int) -> None:
    """Not at the first time: it may be refused for a peer of an earlier job, which is just dead. The only group
    of its machine is no other case, and what it has is no error of its script."""
    job = Job(groups, RestartPolicy(elsewhere=True))
    for _ in range(2):
        job.train(1)
        assert isinstance(job.dies(0, UNLIKE_EXIT_CODE), Again)
        job.returns(0)
    assert job.dies(0, UNLIKE_EXIT_CODE) == GiveUp("not started again: it is refused each time")


def test_one_that_has_trained_and_is_refused_for_its_settings_is_started_again() -> None:
    """Its script has been changed meanwhile, and can be changed back."""
    job = Job(3)
    job.dies(1, KILLED, step=7, trained_s=9.0)
    for _ in range(20):
        job.train(1)
        job.returns(1)
        assert isinstance(job.dies(1, UNLIKE_EXIT_CODE), Again)


@pytest.mark.parametrize("code", [ERROR, CRASHED, -6])
@pytest.mark.parametrize("step", [-1, 57])
@pytest.mark.parametrize("back", [False, True], ids=["dead", "started again already"])
def test_the_same_end_of_all_is_an_error_of_the_script(code: int, step: int, back: bool) -> None:
    """Whatever the race: the first one may have been started again by now."""
    job = Job(3)
    job.train(10, steps=max(0, step))
    for index in (0, 1):
        assert isinstance(job.dies(index, code, step=step), Again)
        if back:
            job.returns(index)
    verdict = job.dies(2, code, step=step)
    where = " at step 57" if step > 0 else ""
    assert verdict == EndJob(f"so have all{where}: an error of the script")


def test_an_end_like_that_of_others_long_ago_is_none_of_the_script() -> None:
    job = Job(2)
    job.dies(0, ERROR, step=3)
    job.returns(0)
    job.train(10)
    assert isinstance(job.dies(1, ERROR, step=3), Again), "the other has trained since"


def test_ends_at_other_steps_or_of_other_kinds_are_none_of_the_script() -> None:
    job = Job(2)
    job.train(5)
    job.dies(0, CRASHED, step=5)
    assert isinstance(job.dies(1, CRASHED, step=6), Again)
    assert isinstance(job.dies(0, -6, step=7), Again)


@pytest.mark.parametrize("leaders", [(0, 0), (0, 1)])
def test_what_fails_in_one_leader_after_the_other_twice_is_an_error_of_the_script(
    leaders: tuple[int, int],
) -> None:
    """A save to a full disk, at step 57. Each has committed that round alone when it leads, so their steps differ."""
    job, verdicts = Job(2), []
    for leader in leaders:
        job.train(60, steps=57)
        for step, index in ((57, leader), (58, 1 - leader)):
            verdicts.append(job.dies(index, ERROR, step=step, trained_s=60))
            job.returns(index)
    assert all(isinstance(verdict, Again) for verdict in verdicts[:3])
    assert verdicts[3] == EndJob("so have all, twice and no step further: an error of the script")


def test_operations_of_a_script_are_no_progress_where_a_save_fails_in_one_leader_after_the_other() -> (
    None
):
    """A Trainer's save to a full disk, behind a gather: each life commits that, and trains no step."""
    job, verdicts = Job(2), []
    job.train(60, steps=57)
    for step, trained in ((57, 57), (59, 57), (61, -1), (63, -1)):
        verdicts.append(job.dies(step // 2 % 2, ERROR, step=step, trained=trained, trained_s=5))
        job.commits += 2
        job.returns(step // 2 % 2)
    assert all(isinstance(verdict, Again) for verdict in verdicts[:3])
    assert verdicts[3] == EndJob("so have all, twice and no step further: an error of the script")


@pytest.mark.parametrize(("code", "further"), [(ERROR, 1), (BROKEN_EXIT_CODE, 0), (KILLED, 0)])
def test_what_comes_further_or_is_not_the_scripts_is_started_again(code: int, further: int) -> None:
    job = Job(2)
    for step in (57, 57 + further):
        job.train(60, steps=57)
        for index in (0, 1):
            assert isinstance(job.dies(index, code, step=step + index, trained_s=60), Again)
            job.returns(index)


def test_all_that_are_killed_from_outside_are_started_again() -> None:
    job = Job(2)
    job.train(5, steps=5)
    for _ in range(4):
        job.train(1)
        for index in (0, 1):
            assert isinstance(job.dies(index, KILLED, step=int(job.commits)), Again)
        job.returns(0)
        job.returns(1)


def test_all_that_are_killed_twice_at_the_same_step_have_run_out_of_memory() -> None:
    job = Job(2)
    verdicts = []
    for _ in range(2):
        job.train(5, steps=57)
        verdicts += [job.dies(index, KILLED, step=57) for index in (0, 1)]
        job.returns(0)
        job.returns(1)
        job.lives = [False, False]
    assert all(isinstance(verdict, Again) for verdict in verdicts[:3])
    assert verdicts[3] == EndJob("so have all at step 57 again: an error of the script")


def test_an_error_while_no_other_is_alive_that_has_not_failed() -> None:
    job = Job(2)
    job.train(5, steps=5)
    assert isinstance(job.dies(0, 2, step=5), Again)
    assert job.dies(1, 1, step=6) == EndJob("no other is alive: an error of the script")
    job = Job(2)
    job.dies(0, KILLED, step=5)
    assert isinstance(job.dies(1, 1, step=6), Again), "the other may be its cause"


def test_where_others_train_elsewhere_an_error_is_the_scripts_the_second_time() -> None:
    job = Job(1, RestartPolicy(elsewhere=True))
    job.train(5, steps=5)
    assert isinstance(job.dies(0, ERROR, step=5), Again)
    job.returns(0)
    assert job.dies(0, ERROR, step=5) == EndJob(
        "so have all at step 5 again: an error of the script"
    )
    job = Job(1, RestartPolicy(elsewhere=True))
    assert isinstance(job.dies(0, ERROR), EndJob), "before it met any other"


def fails(job: Job, code: int, *steps: int) -> list[Verdict]:
    """All groups end with an error, one after the other, and are started again."""
    verdicts = [job.dies(index, code, step=step) for index, step in enumerate(steps)]
    for index in range(len(steps)):
        job.returns(index)
    return verdicts


@pytest.mark.parametrize("code", [ERROR, -6])
def test_all_fail_and_go_on_from_what_is_kept(code: int) -> None:
    """A driver's reset, no memory. What fails at the same step again is the script."""
    job = Job(2)
    job.train(100, steps=57)
    job.kept = 50
    assert all(isinstance(each, Again) for each in fails(job, code, 57, 57))
    job.train(100, steps=7)
    job.kept = 56
    assert fails(job, code, 57, 57)[1] == EndJob(
        "so have all at step 57 again: an error of the script"
    )


def test_all_fail_again_and_again_and_nothing_newer_is_kept() -> None:
    """At steps that differ. Each state that is kept is good for one more try."""
    job = Job(2)
    job.kept = 50
    job.train(100, steps=57)
    assert all(isinstance(each, Again) for each in fails(job, ERROR, 57, 58))
    job.train(100, steps=7)
    job.kept = 60
    assert isinstance(job.dies(1, KILLED, step=62), Again), "that was no error"
    job.returns(1)
    assert all(isinstance(each, Again) for each in fails(job, ERROR, 63, 64))
    job.train(100, steps=7)
    assert fails(job, ERROR, 65, 66)[1] == EndJob("no other is alive: an error of the script")


def test_all_fail_before_they_have_trained_though_something_is_kept() -> None:
    job = Job(2)
    job.kept = 50
    assert isinstance(fails(job, ERROR, -1, -1)[1], EndJob)


def test_the_only_group_may_crash_once() -> None:
    job = Job(1)
    assert isinstance(job.dies(0, CRASHED, step=5), Again)
    job.returns(0)
    assert isinstance(job.dies(0, CRASHED, step=5), EndJob)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_job_ends_when_no_lighthouse_answers_any(elsewhere: bool) -> None:
    """At whatever step each has noticed it. One that alone is cut off is started again."""
    job = Job(3, RestartPolicy(elsewhere=elsewhere))
    job.train(5)
    assert pause(job.dies(1, AWAY_EXIT_CODE, step=7)) == 0.5
    job.returns(1)
    assert pause(job.dies(0, AWAY_EXIT_CODE, step=7)) == 0.5
    assert pause(job.dies(1, AWAY_EXIT_CODE)) >= 0.5
    assert job.dies(2, AWAY_EXIT_CODE, step=8) == EndJob("so have all: no lighthouse answers")
