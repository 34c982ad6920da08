"""What travels: mixed dtypes, sizes and devices of tensors, DTensors, buffers; and bad input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from ft_core.diloco.diloco import DiLoCo, LocalSGD, extract_local_tensor
from ft_core.diloco.fragments import Flat, split
from ft_core.manager import Manager
from ft_core.process_group import ProcessGroupDummy
from tests.ft_core.diloco.members import Trainer
from tests.ft_core.diloco.reference import inner_optimizer, network, outer_optimizer
from tests.harness import cluster
from tests.harness.cluster import lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=8
    ),
    st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_every_element_is_in_exactly_one_bucket(
    tensors: list[tuple[list[int], torch.dtype]], bucket_bytes: int
) -> None:
    made = [torch.randn(shape, dtype=dtype) for shape, dtype in tensors]
    flat = Flat(made, bucket_bytes)
    for view, tensor in zip(flat.views, made, strict=True):
        assert view.shape == tensor.shape and view.dtype == tensor.dtype
        view.copy_(tensor)
    buckets = flat.buckets()
    for bucket in buckets:
        assert bucket.dim() == 1 and bucket.is_contiguous() and not bucket.is_complex()
        assert bucket.nbytes <= max(bucket_bytes, bucket.element_size())
        bucket.add_(1)
    assert sum(b.nbytes for b in buckets) == flat.nbytes == sum(t.nbytes for t in made)
    for view, tensor in zip(flat.views, made, strict=True):
        one = torch.ones((), dtype=tensor.dtype)
        if tensor.is_complex():
            one = one + 1j
        assert torch.equal(view, tensor + one)


class Mixed(nn.Module):
    """Dtypes, a scalar, an empty tensor, one larger than a bucket, one that is not contiguous."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for i, dtype in enumerate(DTYPES):
            setattr(self, f"p{i}", nn.Parameter(torch.full((7, i + 1), value).to(dtype)))
        self.scalar = nn.Parameter(torch.tensor(value))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.large = nn.Parameter(torch.full((50, 10), value).t())


@pytest.mark.parametrize(
    ("codec", "bucket_bytes"),
    [(None, 1), (None, 64), (None, 1 << 20), ("int8", 64), ("int8", 1 << 20)],
)
def test_no_tensor_is_skipped(codec: str | None, bucket_bytes: int) -> None:
    """Each member drifts by its own constant; the outer step takes each element to the mean."""
    drift = [1.0, 3.0]

    def script(index: int) -> nn.Module:
        model = Mixed(8.0)
        manager = thread_manager(server.address(), index, expected=2)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            with DiLoCo(manager, model, inner, outer, 1, bucket_bytes=bucket_bytes, codec=codec):
                while not manager.current_step():  # a window may be discarded on a busy machine
                    for p in model.parameters():
                        p.grad = torch.full_like(p, drift[index])
                    inner.step()
        finally:
            manager.shutdown()
        return model

    with lighthouse() as server:
        models = replicas(lambda: script(0), lambda: script(1))
    for name, p in models[0].named_parameters():
        torch.testing.assert_close(p, torch.full_like(p, 6.0), rtol=0.01, atol=0.01, msg=name)
        assert torch.equal(p, dict(models[1].named_parameters())[name]), name


def thread_manager(address: str, index: int, *, expected: int = 0, **options: Any) -> Manager:
    return cluster.manager(address, f"r{index}", expected_replicas=expected, **options)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("tag", torch.tensor([7]), persistent=True)
        self.register_buffer("scratch", torch.tensor([0.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x)
        return result


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_buffers(kind: Any) -> None:
    """Floating ones become the mean, others the first participant's; others still are local; a
    discarded outer step takes them back."""

    def script(index: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = WithNorm()
        manager = thread_manager(server.address(), index, expected=2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments = [inner, 1] if kind is LocalSGD else [inner, outer_optimizer(model), 1]

        def train(count: int) -> None:
            for _ in range(count):
                model(torch.full((4, 3), float(index + 1)) + torch.randn(4, 3)).sum().backward()
            inner.step()

        found = {}
        try:
            with kind(manager, model, *arguments) as loop:
                train(2 + index)
                found["first"] = {n: b.clone() for n, b in model.named_buffers()}
                held = loop.state_dict()["buffers"]["norm.running_mean"]
                assert torch.equal(held, model.norm.running_mean)
                model(torch.full((4, 3), 9.0))
                assert not torch.equal(held, model.norm.running_mean)
                loop.drop_window("no")
                assert torch.equal(held, model.norm.running_mean)
                assert int(model.norm.num_batches_tracked) == 2
        finally:
            manager.shutdown()
        return found

    with lighthouse() as server:
        zero, one = replicas(lambda: script(0), lambda: script(1))
    assert torch.equal(zero["first"]["norm.running_mean"], one["first"]["norm.running_mean"])
    assert (
        zero["first"]["norm.num_batches_tracked"] == one["first"]["norm.num_batches_tracked"] == 2
    )
    assert 0 < float(zero["first"]["norm.running_mean"][0]) < 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32])
def test_buffers_of_a_dtype_that_no_sum_takes_are_the_first_participants(dtype: Any) -> None:
    """Gloo refused their sum, or torch their mean: no outer step was ever committed."""

    def script(index: int) -> torch.Tensor:
        model = nn.Linear(3, 2)
        model.register_buffer("scale", torch.full((5,), index + 1.0).to(dtype))
        manager = thread_manager(server.address(), index, expected=2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with LocalSGD(manager, model, inner, 1):
                for _ in range(20):  # a window may be discarded on a busy machine
                    model(torch.ones(4, 3)).sum().backward()
                    inner.step()
                    if manager.current_step():
                        break
            assert manager.current_step() == 1
        finally:
            manager.shutdown()
        return model.scale.view(torch.uint8)

    with lighthouse(all_join=True) as server:
        zero, one = replicas(lambda: script(0), lambda: script(1))
    assert torch.equal(zero, one)
    assert torch.equal(zero, torch.ones(5).to(dtype).view(torch.uint8))


def test_dtensors_travel_by_their_local_part() -> None:
    """A mesh of one rank in this process; the other half of each shard is another rank's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        module = nn.Linear(4, 6, bias=False)
        whole = torch.arange(24.0).view(6, 4)
        # Each rank takes its part of `whole`: the fake group of old torch versions moves no bytes.
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(sharded)
        inner = torch.optim.SGD(module.parameters(), lr=1.0)
        outer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        with lighthouse() as server:
            manager = thread_manager(server.address(), 0)
            with DiLoCo(manager, module, inner, outer, 1) as loop:
                for _ in range(2):
                    module.weight.grad = DTensor.from_local(
                        torch.ones(3, 4), mesh, [Shard(0)], run_check=False
                    )
                    inner.step()
                assert loop.stats.committed == 2
            local = extract_local_tensor(module.weight)
            # Steps of 0.5 * 1 and 0.5 * (0.9 + 1).
            torch.testing.assert_close(local, whole[:3] - 0.5 - 0.95)
            state = loop.state_dict()
            assert torch.equal(state["parameters"]["weight"], local)
            assert local.data_ptr() != module.weight.to_local().data_ptr()
            manager.shutdown()
    finally:
        dist.destroy_process_group()


def test_a_member_that_comes_back_heals_the_moments_of_shards() -> None:
    """Its own outer optimizer has none yet, and its global parameters are no DTensors: each heal failed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, joined, found = init_device_mesh("cpu", (2,)), threading.Event(), list[int]()

        def train(address: str, index: int) -> dict[str, Any]:
            module = nn.Linear(4, 6, bias=False)
            whole = torch.full((6, 4), float(index))
            sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(sharded)
            inner = torch.optim.SGD(module.parameters(), lr=1.0)
            outer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
            manager = thread_manager(address, index)

            def step() -> None:
                local = torch.ones(3, 4)
                module.weight.grad = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                inner.step()

            if index:
                assert begun.wait(PATIENCE_S)
            with DiLoCo(manager, module, inner, outer, 1) as loop:
                if index:
                    found.append(manager.current_step())
                    joined.set()
                while not joined.is_set():
                    step()
                    begun.set()
                while manager.current_step() < found[0] + 2:
                    step()
                state = loop.state_dict()
            manager.shutdown()
            return state

        begun = threading.Event()
        with lighthouse() as server:
            address = server.address()
            mine, theirs = replicas(lambda: train(address, 0), lambda: train(address, 1))
        assert found[0] > 0
        for state in (mine, theirs):
            state["outer"] = extract_local_tensor(
                state.pop("outer_optimizer")["state"][0]["momentum_buffer"]
            )
        assert torch.equal(mine["parameters"]["weight"], theirs["parameters"]["weight"])
        assert torch.equal(mine["outer"], theirs["outer"])
    finally:
        dist.destroy_process_group()


def test_extract_local_tensor_copies() -> None:
    p = nn.Parameter(torch.ones(3))
    copy = extract_local_tensor(p)
    assert not copy.requires_grad
    copy.zero_()
    assert torch.equal(p.detach(), torch.ones(3))


def test_int_fragments_are_balanced_and_in_order() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    for count in range(1, 13):
        parts = split(model, count)
        assert len(parts) == count
        names = [n for f in parts for n in f.names]
        assert names == [n for n, _ in model.named_parameters()]
    assert [f.numel for f in split(model, 3)] == [144, 144, 144]


def test_modules_as_fragments_and_tied_parameters_once() -> None:
    model: Any = network()
    # c's weight is b's: c has its bias only if b comes first, and both may name it once.
    parts = split(model, [["b.weight", "b.bias"], ["c.bias", "unused"], model.a, model.head])
    assert [f.names for f in parts] == [
        ("b.weight", "b.bias"),
        ("c.bias", "unused"),
        ("a.weight", "a.bias"),
        ("head.weight", "head.bias"),
    ]
    assert (
        split(model, [["c.weight", "b.bias", "c.bias", "unused"], model.a, model.head])[0].names[0]
        == "b.weight"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_every": 2, "fragments": 3}, "sync_every=2 leaves no inner step to each of 3"),
        ({"fragment_sync_delay": 4}, "fragment_sync_delay=4 must be smaller than the 4"),
        ({"fragment_sync_delay": -1}, "must not be negative"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha must be from 0 to 1, got 1.5"),
        ({"fragment_update_alpha": -0.1}, "fragment_update_alpha must be from 0 to 1"),
        ({"fragments": 0}, "fragments=0 is not possible: the model has 8 trainable"),
        ({"fragments": 99}, "fragments=99 is not possible: the model has 8 trainable"),
        ({"fragments": []}, "fragments must be a number, or a list"),
        ({"fragments": [["a.weight"]]}, "fragments miss 7 parameters, such as 'unused'"),
        ({"fragments": [["a.weight"], ["a.weight"]]}, "'a.weight' is in fragments 0 and 1"),
        ({"fragments": [["b.weight", "c.weight"]]}, "'b.weight' is in fragments 0 and 0"),
        ({"fragments": [["scale"]]}, "fragment 0 names 'scale', which is frozen"),
        ({"fragments": [["nothing"]]}, "'nothing', which is not a parameter of the model"),
        ({"fragments": [nn.Linear(2, 2)]}, "fragment 0 is a module that is not a part"),
        ({"fragments": [nn.ReLU()]}, "fragment 0 has no trainable parameter"),
        ({"codec": "zip"}, "codec must be None or one of int8, int4, fp8"),
        ({"error_feedback": True}, "error_feedback has nothing to correct without a codec"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1"),
        ({"weighted": "often"}, 'weighted must be False, True .or "steps". or "samples"'),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    model = network()
    manager = Manager(ProcessGroupDummy(), rank=0, world_size=1)
    arguments = {"sync_every": 4, **options}
    with pytest.raises(ValueError, match=sentence):
        DiLoCo(manager, model, inner_optimizer(model), outer_optimizer(model), **arguments)
    manager.shutdown()


def test_bad_optimizers_models_and_managers() -> None:
    model: Any = network()
    manager = Manager(ProcessGroupDummy(), rank=0, world_size=1)
    inner = inner_optimizer(model)
    with pytest.raises(ValueError, match="must be two optimizers"):
        DiLoCo(manager, model, inner, inner, 4)
    with pytest.raises(ValueError, match=r"outer_optimizer lacks parameter 'unused'"):
        DiLoCo(manager, model, inner, outer_optimizer(model.a), 4)
    with pytest.raises(ValueError, match="no trainable parameter"):
        LocalSGD(manager, network().requires_grad_(False), inner, 4)
    with pytest.raises(ValueError, match="give weighted to LocalSGD, not to the Manager"):
        LocalSGD(Manager(ProcessGroupDummy(), rank=0, world_size=1, weighted=True), model, inner, 4)
    loop = LocalSGD(manager, model, inner, 4)
    with pytest.raises(RuntimeError, match="inside `with LocalSGD"):
        loop.sync()
    with pytest.raises(ValueError, match="add_samples needs weighted"):
        loop.add_samples(3)
    manager.shutdown()


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_manager_that_would_serve_the_drifting_model_is_refused(what: str) -> None:
    model = network()
    inner = inner_optimizer(model)
    if what == "optimizer":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inner.step()
    held: Any = model if what == "model" else inner
    manager = Manager(
        ProcessGroupDummy(), held.load_state_dict, held.state_dict, rank=0, world_size=1
    )
    with pytest.raises(ValueError, match="manager's state 'default' holds tensors of the model"):
        with LocalSGD(manager, model, inner, 4):
            pass
    manager.shutdown()


def test_settings_of_a_checkpoint() -> None:
    """Global parameters, outer momentum and the manager's position go on where they stopped."""
    with lighthouse() as server:
        first = Trainer(server.address(), 0, DiLoCo, sync_every=3)
        with first.loop:
            for _ in range(7):  # two outer steps, and one inner step that is not part of it
                first.inner_step()
            saved = (first.loop.state_dict(), first.manager.state_dict())
            for _ in range(5):
                first.inner_step()
        first.close()
        second = Trainer(server.address(), 1, DiLoCo, sync_every=3, model=network(seed=5))
        second.loop.load_state_dict(saved[0])
        second.manager.load_state_dict(saved[1])
        assert torch.equal(second.parameters()["a.weight"], saved[0]["parameters"]["a.weight"])
        with second.loop:
            assert second.manager.current_step() == 2
            with pytest.raises(RuntimeError, match="before the first outer step"):
                second.loop.load_state_dict(saved[0])
            with pytest.raises(RuntimeError, match="entered already"):
                second.loop.__enter__()
            for _ in range(3):
                second.inner_step()
            momentum = second.outer_optimizer.state[second.model.get_parameter("a.weight")]
            assert momentum["momentum_buffer"].abs().sum() > 0
        second.close()
        other = nn.Linear(2, 2)
        third = Trainer(server.address(), 2, DiLoCo, model=other)
        with pytest.raises(ValueError, match="the state is another model's: parameter"):
            third.loop.load_state_dict(saved[0])
        third.close()


def test_nothing_is_received_into_the_globals_under_a_window() -> None:
    """With an asynchronous quorum a state arrives while inner steps are computed, and a window that
    is to be kept is measured from the globals until then."""
    model = nn.Linear(600, 600)
    manager = Manager(ProcessGroupDummy(), use_async_quorum=True, rank=0, world_size=1)
    DiLoCo(manager, model, inner_optimizer(model), outer_optimizer(model), 4, keep_windows=True)
    own = torch.ones(1 << 20)
    manager.register_state_dict_fn("own", lambda state: None, lambda: {"t": own})
    manager.state.offer(behind=True)
    assert manager.state._offered is not None
    assert [tensor for tensor in tree_leaves(manager.state._offered) if tensor is not None] == [own]
    manager.shutdown()


def test_what_was_frozen_and_is_trained_now_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    manager = Manager(ProcessGroupDummy(), rank=0, world_size=1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = LocalSGD(manager, model, inner, 4)
    monkeypatch.setattr(loop, "_open_slot", lambda: False)
    with loop:
        model.scale.requires_grad_(True)
        model.scale.grad = torch.ones_like(model.scale)
        with pytest.raises(
            ValueError, match="scale: frozen when LocalSGD was made, and trained now"
        ):
            inner.step()
    manager.shutdown()


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_parameters_that_came_later_are_refused_when_they_were_to_be_sent(
    kind: Any, replaced: bool
) -> None:
    """They were in no fragment: each group trained its own, without a word."""
    name = "weight" if replaced else "extra"
    with lighthouse() as server:
        model = nn.Linear(3, 2)
        manager = thread_manager(server.address(), 0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments = [inner, 2] if kind is LocalSGD else [inner, outer_optimizer(model), 2]
        later = nn.Parameter(torch.ones(2, 3))

        def step() -> None:
            inner.zero_grad()
            (model(torch.ones(4, 3)).sum() + later.sum()).backward()
            inner.step()

        try:
            with pytest.raises(ValueError, match=f"^{name}: in the model since {kind.__name__}"):
                with kind(manager, model, *arguments):
                    step()
                    step()
                    assert manager.current_step() == 1
                    setattr(model, name, later)
                    inner.add_param_group({"params": [later]})
                    step()
                    step()
        finally:
            manager.shutdown()


class WithBuffer(nn.Linear):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(3, 2)
        self.register_buffer("held", buffer)


def backward_all(model: nn.Module, number: int, inner: int) -> None:
    model.zero_grad()
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()


def two_with_a_buffer(address: str, kind: Any, buffer: Callable[[], torch.Tensor]) -> list[Trainer]:
    return [
        Trainer(address, i, kind, expected=2, model=WithBuffer(buffer()), backward=backward_all)
        for i in (0, 1)
    ]


def _other(model: Any, what: str) -> None:
    if what == "dtype":
        model.bfloat16()
    elif what == "shape":
        model.weight.data = torch.ones(2, 5)
    elif what == "gone":
        model.held = None
    else:
        model.held = torch.ones(9)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("what", ["dtype", "shape", "buffer", "gone"])
def test_what_changes_its_form_in_one_member_is_refused_and_the_other_goes_on(
    kind: Any, what: str
) -> None:
    """Gloo ended all processes for a buffer of another size, or all waited for ever."""
    changes = {"buffer": "held", "gone": "held"}.get(what, "weight")

    def script(one: Trainer) -> None:
        for inner in range(16):
            if one.number == 1 and inner == 3:
                _other(one.model, what)
                one.optimizer.state.clear()  # or its moments would not fit
            one.inner_step()

    def train(one: Trainer) -> str:
        try:
            one.run(script)
        except ValueError as error:
            return str(error)
        return f"{one.loop.stats.committed >= 2}"

    with lighthouse(all_join=True) as server:
        both = two_with_a_buffer(server.address(), kind, lambda: torch.ones(2))
        zero, one = replicas(lambda: train(both[0]), lambda: train(both[1]))
    assert zero == "True"
    assert one.split()[1] == f"'{changes}'" and "must stay what it was" in one


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_expanded_buffers_are_averaged(kind: Any, dtype: Any) -> None:
    """The first outer step had raised: torch does not write to expanded tensors."""

    def script(one: Trainer) -> None:
        held: Any = one.model.held
        held[:, 0].copy_(torch.tensor([2 * one.number, 4]))
        for _ in range(4):
            one.inner_step()

    with lighthouse(all_join=True) as server:
        both = two_with_a_buffer(
            server.address(), kind, lambda: torch.zeros(2, 1, dtype=dtype).expand(2, 5)
        )
        replicas(lambda: both[0].run(script), lambda: both[1].run(script))
    first = 1 if dtype.is_floating_point else 0
    for each in both:
        assert each.model.held.tolist() == [[first] * 5, [4] * 5]


def test_lbfgs_is_no_outer_optimizer() -> None:
    """It was a TypeError in the first outer step, which was committed."""
    model = network()
    manager = Manager(ProcessGroupDummy(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="take another outer optimizer"):
        DiLoCo(manager, model, inner_optimizer(model), torch.optim.LBFGS(model.parameters()), 4)
    manager.shutdown()
