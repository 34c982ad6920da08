"""Bad input at run time: one sentence each, before training starts. In this process, without peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate.data_loader
import accelerate.launchers
import pytest
import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ParallelismConfig,
)
from accelerate.state import PartialState
from accelerate.utils import DDPCommunicationHookType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from ft_accelerate import DiLoCo, FaultToleranceKwargs, LocalSGD
from ft_accelerate.install import install, uninstall
from ft_accelerate.options import ENV_USE
from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime.models import FaultTolerantModel
from tests.ft_accelerate.harness import forget_accelerate


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two replica groups, of which this process is one; it never joins the other."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if name.endswith("SIZE") else "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(ENV_USE, "true")
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_NUM_REPLICA_GROUPS", "2")
    install()
    yield
    uninstall()
    forget_accelerate()
    if dist.is_initialized():
        dist.destroy_process_group()


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def test_the_world_is_all_replica_groups() -> None:
    mine = accelerator()
    assert (mine.num_processes, mine.process_index, mine.use_distributed) == (2, 0, True)
    assert PartialState().num_processes == 2
    assert mine.is_main_process


@pytest.mark.parametrize(
    ("switch", "name"),
    [("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")],
)
def test_plugins_that_spread_one_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, switch: str, name: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{switch}", "true")
    with pytest.raises(ValueError, match=f"cannot be combined with {name}.*leave out {name}"):
        accelerator()


def test_fsdp_that_does_not_lie_within_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="takes FSDP2, whose shards lie within a replica group"):
        accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    with pytest.raises(ValueError, match="there is one process in each: set dp_shard_size"):
        accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_a_parallelism_config_without_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be combined with ParallelismConfig"):
        accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))


def test_communication_hooks_are_refused() -> None:
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(ValueError, match="one communication hook only: leave out comm_hook"):
        accelerator(kwargs_handlers=[kwargs])


def test_a_static_graph_is_refused_with_what_takes_its_place() -> None:
    mine = accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    with pytest.raises(ValueError, match="leave it out, or set find_unused_parameters=True if"):
        mine.prepare(torch.nn.Linear(2, 1))


def test_what_is_unfrozen_and_would_not_be_averaged_is_refused() -> None:
    """Frozen when the model is prepared. One that no optimizer trains may get gradients, and so may one that was
    frozen later."""
    mine = accelerator()
    net = torch.nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    model, optimizer = mine.prepare(net, torch.optim.SGD([net.weight], lr=1.0))
    model(torch.ones(1, 2))
    for parameter in net.parameters():
        parameter.requires_grad_(True)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.add_param_group({"params": [net.bias]})
    with model.no_sync():  # as LocalSGD
        optimizer.step()
    with pytest.raises(
        ValueError, match=r"^bias: frozen when the model was prepared, and trained now"
    ):
        optimizer.step()
    net.bias.grad = None
    optimizer.step()


def test_what_is_in_no_prepared_model_and_would_not_be_averaged_is_refused() -> None:
    """Plain Accelerate trains it in each process by itself. What is registered heals, and the script may average it."""
    mine = accelerator()
    net, head, scale = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    everything = [*net.parameters(), *head.parameters(), *scale.parameters()]
    mine.register_for_checkpointing(scale)
    optimizer = mine.prepare(torch.optim.SGD(everything, lr=1.0))
    scale.weight.grad = torch.ones(1, 1)
    with pytest.raises(
        ValueError, match=r"1 parameters \(of shapes \[1, 1\]\) that are in no model"
    ):
        optimizer.step()  # no model is prepared, without which nothing heals
    scale.weight.grad = None
    net.weight.grad = torch.ones(2, 2)
    with pytest.raises(
        ValueError, match=r"1 parameters \(of shapes \[2, 2\]\) that are in no model"
    ):
        optimizer.step()
    model = mine.prepare(net)
    scale.weight.grad = torch.ones(1, 1)
    model(torch.ones(1, 2))
    optimizer.step()
    head.bias.grad = torch.ones(1)
    with pytest.raises(
        ValueError, match=r"1 parameters \(of shapes \[1\]\) that are in no model.*prepare"
    ):
        optimizer.step()


def test_a_model_that_is_trained_without_its_wrapper_is_refused() -> None:
    """`model.module.loss(batch)` averages nothing, under plain Accelerate, too. LocalSGD averages parameters."""
    mine = accelerator()
    net = torch.nn.Linear(2, 1)
    model, optimizer = mine.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    optimizer.step()  # no gradients, nothing to average
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.module(torch.ones(1, 2)).sum().backward()
    with model.no_sync():
        optimizer.step()
    with pytest.raises(ValueError, match="never called.*Call what accelerator.prepare returned"):
        optimizer.step()
    model(torch.ones(1, 2))
    optimizer.step()


def test_a_model_may_be_trained_in_eval_mode() -> None:
    """Without dropout, with fixed running statistics: its gradients are averaged as always."""
    mine = accelerator()
    net = torch.nn.Linear(2, 1)
    model, optimizer = mine.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    model.eval()
    model(torch.ones(1, 2))
    net.weight.grad = torch.ones(1, 2)
    optimizer.step()


def test_a_model_may_be_trained_as_a_part_of_another() -> None:
    """Whose forward averages the part's gradients, too."""
    mine = accelerator()
    part, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*part.parameters(), *head.parameters()], lr=1.0)
    wrapped, whole, optimizer = mine.prepare(part, torch.nn.Sequential(part, head), optimizer)
    assert isinstance(wrapped, FaultTolerantModel)
    part.weight.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="never called"):
        optimizer.step()
    whole(torch.ones(1, 2))
    optimizer.step()


def test_what_came_into_a_prepared_model_later_is_refused() -> None:
    """An adapter, a new head: its gradients are not averaged, under plain Accelerate, too."""
    mine = accelerator()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model, optimizer = mine.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    net.append(torch.nn.Linear(2, 1))
    optimizer.add_param_group({"params": list(net[1].parameters())})
    model(torch.ones(1, 2))
    net[0].weight.grad = torch.ones(2, 2)
    optimizer.step()
    net[1].weight.grad = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"shapes \[1, 2\].* or came into it later.*prepare"):
        optimizer.step()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_may_be_prepared_for_evaluations_first(precision: str) -> None:
    """As transformers' Trainer does, if it evaluates before it trains."""
    mine = accelerator(mixed_precision=precision)
    net = torch.nn.Linear(2, 1)
    forward = net.forward
    assert mine.prepare_model(net, evaluation_mode=True) is net
    model, optimizer = mine.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    assert isinstance(model, FaultTolerantModel)
    assert mine._models == [net]  # once; Accelerate has it unwrapped
    assert mine.prepare(model) is model
    assert mine.unwrap_model(model, keep_fp32_wrapper=False).forward == forward
    model(torch.ones(1, 2))
    net.weight.grad = torch.ones(1, 2)
    optimizer.step()


def test_a_scaler_of_the_script_s_own_that_would_not_heal_is_refused() -> None:
    """A process that comes back would scale its gradients by another factor than its peers."""
    mine = accelerator()
    model = mine.prepare(torch.nn.Linear(2, 1))
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    loss = model(torch.ones(1, 2)).sum()
    assert off.scale(loss) is loss
    with pytest.raises(ValueError, match="not registered.*register_for_checkpointing\\(scaler\\)"):
        scaler.scale(loss)
    mine.register_for_checkpointing(scaler)
    assert scaler.scale(loss).item() == loss.item() * scaler.get_scale()


def test_reading_for_all_in_one_process_is_refused() -> None:
    mine = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(ValueError, match="dispatch_batches=True has one process read for all"):
        mine.prepare(DataLoader([1, 2, 3]))


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({}, [[0, 1], [4, 5], [8, 9], [12, 0]]),
        ({"dispatch_batches": False}, [[0, 1], [2, 3], [4, 5], [6, 7], [8]]),
    ],
)
def test_a_stream_of_several_shards_is_divided_as_in_plain_accelerate(
    settings: dict[str, bool], read: list[list[int]]
) -> None:
    """By batches, as if one process read it for all. Shards may be unequal: then an evaluation ended with an error,
    and a process that came back was where its peers are, and not where it had been."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(13))}).to_iterable_dataset(num_shards=3)
    mine = accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    for _ in range(2):
        loader = mine.prepare(DataLoader(stream, batch_size=2))
        assert [batch["x"].tolist() for batch in loader.base_dataloader] == read


def uneven(**settings: Any) -> tuple[Accelerator, Any, Any]:
    """Prepared: a model, and 3 batches for two processes, or (split) two processes' 8, 8 and 1."""
    mine = accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False, **settings))
    size = 16 if settings else 8
    loader = DataLoader([torch.ones(2)] * (2 * size + 1), batch_size=size)
    return mine, *mine.prepare(torch.nn.Linear(2, 1), loader)


@pytest.mark.parametrize("settings", [{}, {"split_batches": True}])
def test_training_on_unequal_numbers_of_batches_is_refused(settings: dict[str, bool]) -> None:
    """The process that has more would compute its last gradients alone."""
    _, model, loader = uneven(**settings)
    model.train()
    with pytest.raises(ValueError, match="even_batches=False gives this process another number of"):
        next(iter(loader))


def test_join_uneven_inputs_makes_them_equal() -> None:
    mine, model, loader = uneven()
    with mine.join_uneven_inputs([model], even_batches=False):
        assert loader.batch_sampler.even_batches
        shares = [len(share_of(loader, index)) for index in range(2)]
    assert shares == [2, 2]
    assert not loader.batch_sampler.even_batches


def share_of(loader: Any, index: int) -> list[Any]:
    loader.batch_sampler.process_index = index
    return list(loader.batch_sampler)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "barrier"])
def test_the_script_s_own_collectives_are_refused(name: str) -> None:
    accelerator()
    arguments = {"broadcast": (torch.ones(1), 0), "barrier": ()}.get(name, (torch.ones(1),))
    with pytest.raises(RuntimeError, match=f"torch.distributed.{name} reaches this process only"):
        getattr(dist, name)(*arguments)


def test_collectives_through_which_gradients_pass_are_refused() -> None:
    accelerator()
    from torch.distributed import nn as with_gradients

    for module in (with_gradients, with_gradients.functional):
        with pytest.raises(RuntimeError, match="distributed.nn.all_gather reaches this process"):
            module.all_gather(torch.ones(1))


def test_collectives_with_a_group_of_one_s_own_are_left_alone() -> None:
    accelerator()
    value, group = torch.ones(1), dist.new_group([0])
    dist.all_reduce(value, group=group)
    assert value.item() == 1
    from torch.distributed import nn as with_gradients

    (row,) = with_gradients.all_gather(value, group)
    assert row.item() == 1


def test_scripts_and_samplers_are_told_of_all_processes() -> None:
    """Samplers of libraries, which ask torch, gave each process all of the data."""
    accelerator()
    index = processes.current().process_index
    assert (dist.get_world_size(), dist.get_rank()) == (2, index)
    sampler = torch.utils.data.DistributedSampler(range(8), shuffle=False)
    assert list(sampler) == [index, index + 2, index + 4, index + 6]
    assert dist.get_world_size(dist.new_group([0])) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"codec": "int3"}, "codec must be None or one of int8, int4, fp8"),
        ({"error_feedback": True}, "nothing to correct without a codec"),
        ({"fragment_sync_delay": 4, "fragments": 2}, "must be smaller than the 4 inner steps"),
        ({"fragments": 9}, "fragments=9 is not possible"),
        ({"fragment_update_alpha": 2}, "from 0 to 1, got 2"),
        ({"outer_lr": 0}, "outer_lr must be positive"),
        ({"weighted": "samples"}, "nothing to weigh under Accelerate"),
        ({"keep_windows": False}, "no window is ever dropped"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1"),
    ],
)
def test_options_of_diloco_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    mine = accelerator()
    model = mine.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=sentence):
        DiLoCo(mine, model, 8, **options)


@pytest.mark.parametrize("kind", ["stream", "not prepared", "stateful", "local_sgd"])
def test_what_a_hot_spare_could_not_take_over_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_NUM_REPLICA_GROUPS", "3")
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_SPARES", "1")
    if kind == "stateful":
        pytest.importorskip("torchdata")
    settings = DataLoaderConfiguration(use_stateful_dataloader=kind == "stateful")
    mine = accelerator(dataloader_config=settings)
    assert (mine.num_processes, mine.process_index) == (2, 0)
    data = DataLoader(Stream() if kind == "stream" else [torch.ones(2)] * 8, batch_size=2)
    model = torch.nn.Linear(2, 1)
    model = mine.prepare(model)
    loader = data if kind == "not prepared" else mine.prepare(data)
    if kind == "local_sgd":
        with pytest.raises(ValueError, match="leave out LocalSGD and DiLoCo"):
            LocalSGD(accelerator=mine, model=model, local_sgd_steps=2).__enter__()
        return
    with pytest.raises(ValueError, match="fault_tolerance_spares needs training data"):
        for batch in loader:
            mine.backward(model(batch).sum())


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2)] * 8)


def test_groups_of_another_size_than_was_started_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_GROUP_SIZE", "2")
    with pytest.raises(ValueError, match="group_size is 2, but this process was started as one of"):
        accelerator()
    monkeypatch.delenv("ACCELERATE_FAULT_TOLERANCE_GROUP_SIZE")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="4 processes needs MASTER_ADDR and MASTER_PORT"):
        accelerator()


@pytest.mark.parametrize("home", [accelerate, accelerate.launchers])
@pytest.mark.parametrize("name", ["notebook_launcher", "debug_launcher"])
def test_a_notebook_s_launcher_is_refused(home: Any, name: str) -> None:
    """Where a script imports it from, with the function that it runs. Without a number, it is two."""
    for count in ({"num_processes": 2}, {}):
        with pytest.raises(ValueError, match=f"{name} ends all of its processes when one"):
            getattr(home, name)(print, **count)


def test_options_in_the_code_that_debug_launcher_runs_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher can't know of them. Its processes then waited for each other for ever."""
    monkeypatch.delenv(ENV_USE)
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    with pytest.raises(ValueError, match="debug_launcher ends all of its processes when one"):
        accelerator(kwargs_handlers=[FaultToleranceKwargs()])


def test_options_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_USE)
    monkeypatch.setenv("WORLD_SIZE", "1")
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="PartialState was used before"):
        accelerator(kwargs_handlers=[FaultToleranceKwargs()])


def test_options_in_code_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_USE)
    accelerator(kwargs_handlers=[FaultToleranceKwargs(num_replica_groups=3, replica_group_id=2)])
    assert (PartialState().num_processes, PartialState().process_index) == (3, 2)
    with pytest.raises(ValueError, match="other options than this"):
        accelerator(kwargs_handlers=[FaultToleranceKwargs(num_replica_groups=4)])


def test_without_the_switch_accelerate_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_USE)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    mine = accelerator()
    loader = mine.prepare(DataLoader([1, 2, 3]))
    assert processes.active() is None
    assert [int(x) for x in loader] == [1, 2, 3]
    assert mine.gather(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: delattr(c, "begin"), "DataLoaderShard.begin is not there"),
        (lambda c: setattr(c, "__iter__", lambda it: None), "takes no 'self'"),
    ],
)
def test_a_seam_that_has_moved_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, sentence: str
) -> None:
    uninstall()

    class Moved:
        def begin(self) -> None: ...

        def end(self) -> None: ...

        def __iter__(self) -> None: ...

    change(Moved)
    monkeypatch.setattr(accelerate.data_loader, "DataLoaderShard", Moved)
    said = f"does not know accelerate .*{sentence}.*train without fault tolerance"
    with pytest.raises(RuntimeError, match=said):
        install()


def test_uninstalled_accelerate_has_its_own_code_back() -> None:
    uninstall()
    shard = accelerate.data_loader.DataLoaderShard.__iter__
    assert shard.__module__ == "accelerate.data_loader"
    assert shard.__code__.co_filename.endswith("data_loader.py")
    assert accelerate.utils.operations.torch is torch


def test_a_search_for_hyperparameters_is_refused() -> None:
    """transformers tells the other processes of a trial past Accelerate: each trained with its own learning rate."""
    transformers = pytest.importorskip("transformers")
    accelerator()
    with pytest.raises(ValueError, match="start each trial as a job of its own"):
        transformers.Trainer.hyperparameter_search(object())
