"""Codecs inside DiLoCo, weights, overlap, stragglers."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from ft_core.diloco.diloco import DiLoCo
from ft_core.diloco.fragments import split
from ft_core.manager import WorldSizeMode
from tests.ft_core.diloco import reference
from tests.ft_core.diloco.members import Trainer, check_states, make_members, run_all
from tests.ft_core.diloco.reference import Reference, network
from tests.harness.cluster import lighthouse, replicas
from tests.harness.waiting import PATIENCE_S


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8"])
def test_codecs_in_diloco(codec: str, error_feedback: bool) -> None:
    """Three members, streaming: bitwise equal global state, and close to what is exact."""
    inner_steps = 48
    with lighthouse(all_join=True) as server:
        trainers = make_members(
            server,
            [DiLoCo] * 3,
            sync_every=8,
            fragments=2,
            fragment_sync_delay=1,
            codec=codec,
            error_feedback=error_feedback,
        )
        run_all(trainers, inner_steps)
    check_states(trainers)
    run = Reference([0, 1, 2], [f.names for f in split(network(), 2)])
    step = 0
    for inner in range(1, inner_steps + 1):
        for member in run.members.values():
            run.inner_step(member)
        if inner % 4 == 3:
            run.launch(step % 2)
        if inner % 4 == 0:
            run.apply(step % 2)
            step += 1
    shared, start = dict(run.model.named_parameters()), dict(network().named_parameters())
    for name, value in trainers[0].globals().items():
        moved = (shared[name] - start[name]).detach().norm() + 1e-12
        off = (value - shared[name]).detach().norm()
        assert off < (0.5 if codec == "int4" else 0.2) * moved + 1e-9, name
    for trainer in trainers:
        assert trainer.loop.stats.committed == step
        assert trainer.loop.stats.discarded == 0
        assert trainer.loop.stats.bytes_sent > 0
        assert trainer.loop.stats.divergence > 0


def test_weights_by_samples() -> None:
    """Members with 1, 2 and 5 samples an inner step: the mean is theirs, not the members'."""
    samples = [1, 2, 5]
    with lighthouse(all_join=True) as server:
        trainers = make_members(server, [DiLoCo] * 3, sync_every=4, weighted="samples")

        def script(trainer: Trainer) -> None:
            for _ in range(40):
                trainer.loop.add_samples(samples[trainer.number])
                trainer.inner_step()

        run_all(trainers, script)
    run = Reference([0, 1, 2], [f.names for f in split(network(), None)])
    for inner in range(1, 41):
        for member in run.members.values():
            run.inner_step(member)
        if inner % 4 == 0:
            run.launch(0)
            run.weights = {n: float(samples[n]) for n in run.members}
            run.apply(0)
    for name, value in trainers[0].globals().items():
        expected = dict(run.model.named_parameters())[name].detach()
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_communication_hides_behind_inner_steps(codec: str | None) -> None:
    """In the overlap the collectives end although no member waits for them yet."""
    with lighthouse(all_join=True) as server:
        trainers = make_members(
            server,
            [DiLoCo] * 2,
            sync_every=4,
            fragment_sync_delay=2,
            codec=codec,
            error_feedback=codec is not None,
        )

        def script(trainer: Trainer) -> None:
            try:
                with trainer.loop as loop:
                    for _ in range(3):
                        trainer.inner_step()
                    for future in loop._sent.futures:  # launched after the second
                        ended = threading.Event()
                        future.add_done_callback(lambda _, ended=ended: ended.set())
                        assert ended.wait(PATIENCE_S)
                    trainer.inner_step()
            finally:
                trainer.close()

        replicas(*[lambda t=t: script(t) for t in trainers])
    for trainer in trainers:
        stats = trainer.loop.stats
        assert stats.committed == 1
        assert 0 < stats.hidden_s == stats.communication_s
    check_states(trainers)


def test_a_straggler_is_left_out_and_its_window_counts_later() -> None:
    """Member 2 stays in an inner step past the timeout: 0 and 1 commit without it. Back, it heals,
    and its drift is put on the new global parameters."""
    limit = {"timeout": timedelta(seconds=1.5), "connect_timeout": timedelta(seconds=20)}
    left_out, healed = threading.Event(), threading.Event()

    def backward(model: nn.Module, member: int, inner: int) -> None:
        if member == 2 and inner == 5:
            assert left_out.wait(PATIENCE_S)
            watched.append(drift(trainers[2]))
        reference.backward(model, member, inner)

    def drift(trainer: Trainer) -> dict[str, torch.Tensor]:
        held, local = trainer.globals(), trainer.parameters()
        return {name: value - local[name] for name, value in held.items()}

    def load(trainer: Trainer) -> None:
        before = trainer.loop._load_healed

        def loaded(state: dict[str, Any]) -> None:
            before(state)
            watched.append(drift(trainer))
            healed.set()

        trainer.manager.register_state_dict_fn(DiLoCo.KEY, loaded, trainer.loop._served)

    watched: list[dict[str, torch.Tensor]] = []
    with lighthouse(timeout_s=1.5) as server:
        trainers = make_members(
            server, [DiLoCo] * 3, sync_every=4, keep_windows=True, backward=backward, manager=limit
        )
        load(trainers[2])

        def fast(trainer: Trainer) -> None:
            try:
                with trainer.loop:
                    while trainer.loop.stats.committed < 3:
                        trainer.inner_step()
                    left_out.set()
                    while not healed.is_set():
                        trainer.inner_step()
                    end = trainer.manager.current_step() + 3
                    while trainer.manager.current_step() < end:
                        trainer.inner_step()
            finally:
                trainer.close()

        def slow(trainer: Trainer) -> None:
            try:
                with trainer.loop:
                    while not healed.is_set():
                        trainer.inner_step()
                    end = trainer.loop.stats.committed + 2
                    while trainer.loop.stats.committed < end:
                        trainer.inner_step()
            finally:
                trainer.close()

        replicas(lambda: fast(trainers[0]), lambda: fast(trainers[1]), lambda: slow(trainers[2]))
    check_states(trainers)
    before, after = watched[:2]
    assert any(bool(d.abs().sum() > 0) for d in before.values())
    changed = [name for name in before if not torch.allclose(before[name], after[name])]
    # It went on with its inner step before it healed: the drift is the kept one and that step's.
    for name in changed:
        assert (before[name] - after[name]).abs().max() < 0.05, name
    assert trainers[0].loop.stats.discarded >= 1
    assert trainers[0].loop.stats.void == 0


def test_spares_add_nothing_and_follow() -> None:
    with lighthouse(all_join=True) as server:
        trainers = make_members(
            server,
            [DiLoCo] * 3,
            sync_every=4,
            manager={"min_replica_size": 2, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES},
        )
        run_all(trainers, 40)
    check_states(trainers)
    run = Reference([0, 1, 2], [f.names for f in split(network(), None)])
    for inner in range(1, 41):
        for member in run.members.values():
            run.inner_step(member)
        if inner % 4 == 0:
            run.launch(0, [0, 1])
            run.apply(0)
    for name, value in trainers[2].globals().items():
        assert torch.equal(value, dict(run.model.named_parameters())[name]), name


def test_a_graceful_leave_ends_with_an_outer_step() -> None:
    """Member 1 says that it leaves; its next outer step counts, the ones after are without it."""
    with lighthouse(all_join=True) as server:
        trainers = make_members(server, [DiLoCo] * 2, sync_every=4)

        def script(trainer: Trainer) -> None:
            for inner in range(20):
                if trainer.number == 1 and inner == 6:
                    trainer.manager.leave_after_step()
                trainer.inner_step()
            assert trainer.loop.sync() is (trainer.number == 0)

        run_all(trainers, script)
    assert [t.loop.stats.committed for t in trainers] == [6, 2]
    assert [t.loop.stats.discarded for t in trainers] == [0, 0]
    run = Reference([0, 1], [f.names for f in split(network(), None)])
    for inner in range(1, 21):
        for member in run.members.values():
            run.inner_step(member)
        if inner % 4 == 0:
            run.launch(0, [0, 1] if inner <= 8 else [0])
            run.apply(0)
    run.launch(0, [0])
    run.apply(0)
    for name, value in trainers[0].globals().items():
        assert torch.equal(value, dict(run.model.named_parameters())[name]), name


def test_sync_is_a_whole_window_now() -> None:
    with lighthouse(all_join=True) as server:
        trainers = make_members(
            server, [DiLoCo] * 2, sync_every=9, fragments=3, fragment_sync_delay=1
        )

        def script(trainer: Trainer) -> None:
            for _ in range(5):  # the second fragment is on its way
                trainer.inner_step()
            assert trainer.loop.sync()

        run_all(trainers, script)
    for trainer in trainers:
        assert trainer.manager.current_step() == 1 + 1 + 3
        for name, value in trainer.globals().items():
            assert torch.equal(value, trainers[0].globals()[name])
            assert torch.equal(value, trainer.parameters()[name])


def test_an_exception_in_the_loop_drops_what_is_on_its_way() -> None:
    """Member 1 raises in the overlap: it is back at the global parameters, and 0 goes on. What was
    on its way 0 commits alone, if it has arrived before the other is gone, and discards if not."""
    with lighthouse(all_join=True) as server:
        trainers = make_members(server, [DiLoCo] * 2, sync_every=4, fragment_sync_delay=1)

        def script(trainer: Trainer) -> None:
            try:
                with trainer.loop:
                    for inner in range(12):
                        if trainer.number == 1 and inner == 7:
                            raise KeyError("data")
                        trainer.inner_step()
            finally:
                trainer.close()

        def raising() -> None:
            with pytest.raises(KeyError):
                script(trainers[1])

        replicas(lambda: script(trainers[0]), raising)
    stats = trainers[0].loop.stats
    assert (stats.committed, stats.discarded) in ((2, 1), (3, 0))
    assert trainers[1].loop.stats.committed == 1
    for name, value in trainers[1].globals().items():
        assert torch.equal(value, trainers[1].parameters()[name])
