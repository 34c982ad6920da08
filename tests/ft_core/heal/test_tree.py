"""pack and unpack: what travels comes out equal, what cannot is refused by name."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import sys
import types
import uuid
import zoneinfo
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from ft_core.heal import HealDenied, HealError, UnsupportedObjectError, digest, pack, unpack
from ft_core.heal.format import Manifest, byte_view, pack_node, unpack_node
from ft_core.heal.objects import DTYPES
from tests.ft_core.heal.support import same


class Colour(enum.Enum):
    RED = 1


class Shade(enum.StrEnum):
    DARK = "dark"


class Way(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Best:
    score: float
    weights: Any = None
    seen: list[Any] = dataclasses.field(default_factory=list)
    changes: int = 0

    def __post_init__(self) -> None:
        self.changes += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    of: Best | None = None


@dataclasses.dataclass
class Reduced:
    value: int

    def __reduce__(self) -> Any:
        return Reduced, (0,)


@dataclasses.dataclass
class AlsoDict(dict[str, int]):
    value: int = 0


class Point(NamedTuple):
    x: int
    y: Any


class Settings(argparse.Namespace):
    pass


def travel(tree: Any, into: Any = None, **options: bool) -> Any:
    manifest, tensors = pack(tree, **options)
    return unpack(manifest, [copied(t) for t in tensors], into=into, **options)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """By bytes, as the transport does: not every dtype has a clone()."""
    plain = tensor.contiguous()
    target = torch.empty(plain.shape, dtype=plain.dtype)
    byte_view(target).copy_(byte_view(plain))
    return target


floats = st.floats(allow_nan=True) | st.sampled_from([0.0, -0.0, float("inf")])
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 100, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64]),
    st.integers(0, 9),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**90), 2**90)
    | floats
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | tensors
    | st.frozensets(st.integers(), max_size=3)
    | st.timedeltas()
    | st.datetimes()
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(collections.deque)
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_comes_back_equal(tree: Any) -> None:
    back = travel(tree)
    assert same(tree, back)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    try:
        numbers = torch.arange(64, dtype=torch.uint8) % (2 if dtype is torch.bool else 64)
        tensor = numbers.repeat(dtype.itemsize).view(dtype)
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"this torch makes no tensors of {name}")
    back = travel({"x": tensor, "grid": tensor.reshape(8, 8)})
    assert back["x"].dtype == dtype
    assert torch.equal(back["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert back["grid"].shape == (8, 8)


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        torch.device("cuda", 1),
        torch.bfloat16,
        np.arange(6.0).reshape(2, 3),
        np.zeros((0, 3), np.int8),
        np.array(4),
        np.float32(1.5),
        np.array(["ab", "c"]),
        collections.Counter("aab"),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], maxlen=3),
        bytearray(b"xy"),
        b"z" * 200_000,
        "\ud800",
        range(1, 9, 2),
        slice(1, None),
        pathlib.Path("/a/b"),
        pathlib.PureWindowsPath("c:/x"),
        datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        frozenset({1, (2, 3)}),
        {(1, None): {True: 0.5}},
        2**200,
        torch.empty(0, 3),
        torch.tensor(5),
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_of_libraries(value: Any) -> None:
    back = travel({"v": value})["v"]
    assert type(back) is type(value)
    assert same(value, back)
    if isinstance(value, collections.deque):
        assert back.maxlen == value.maxlen
    if isinstance(value, collections.defaultdict):
        assert back.default_factory is value.default_factory


def test_views_travel_by_contents() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "t": base.t(),
        "row": base[1],
        "one": base[:1, 0],  # its stride is 4
        "every": base[:, ::2],
        "wide": torch.ones(1).expand(5),
        "conj": torch.complex(base, base).conj(),
        "neg": torch.complex(base, base).conj().imag,
        "param": torch.nn.Parameter(base),
    }
    back = travel(tree)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor.detach()), name


def test_a_tensor_lies_in_memory_as_its_source_does() -> None:
    """A product of matrices rounds by that: an optimizer that keeps some (SOAP, Shampoo) went on otherwise than its
    peers."""
    rotation = torch.linalg.qr(torch.randn(6, 6))[0]
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {
        "rotation": rotation,
        "again": rotation,
        "images": images,
        "gaps": torch.randn(6, 6)[:, ::2],
    }
    assert not rotation.is_contiguous()
    found = travel(tree)
    assert same(found, tree)
    for name in ("rotation", "images"):
        assert found[name].stride() == tree[name].stride()
    assert found["again"] is found["rotation"]
    assert found["gaps"].is_contiguous()
    torch.testing.assert_close(found["images"] + 0, images, rtol=0, atol=0)


def test_empty_numpy_strings_travel() -> None:
    """Their dtype has no size: a state that held one was refused by every process that came back."""
    back = travel({"name": np.str_(""), "tag": np.bytes_(b""), "full": np.str_("a")})
    assert back == {"name": "", "tag": b"", "full": "a"}
    assert [type(each) for each in back.values()] == [np.str_, np.bytes_, np.str_]


def test_tied_tensors_stay_tied() -> None:
    weight = torch.randn(4)
    back = travel({"a": weight, "b": weight, "c": weight.clone()})
    assert back["a"] is back["b"]
    assert back["c"] is not back["a"]


def test_layer_versions_of_a_state_dict_travel() -> None:
    original = torch.nn.BatchNorm1d(3).state_dict()
    back = travel(original)
    assert back._metadata == original._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"callbacks": {"X": [Custom(1)]}}, r"state_dict\['callbacks'\]\['X'\]\[0\] is a .*Custom"),
        ({"f": lambda: 0}, r"state_dict\['f'\] is a builtins.function"),
        ({"b": Best(1.0, Custom(1))}, r"state_dict\['b'\]\.weights is a .*Custom"),
        ({"r": Reduced(1)}, r"state_dict\['r'\] is a .*Reduced"),
        ({"d": AlsoDict(1)}, r"state_dict\['d'\] is a .*AlsoDict"),
        ((1, object()), r"state_dict\[1\] is a builtins.object"),
        ({"n": np.array([object()])}, r"state_dict\['n'\] is a numpy.ndarray"),
        ({"d": collections.defaultdict(lambda: 0)}, r"state_dict\['d'\] is a .*defaultdict"),
    ],
)
def test_unknown_objects_are_refused_by_name(tree: Any, path: str) -> None:
    with pytest.raises(UnsupportedObjectError, match=path) as caught:
        pack(tree)
    assert "allow_objects=True" in str(caught.value)
    assert "pickle: trusted networks only" in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, HealError)


def test_objects_travel_where_both_sides_allow_it() -> None:
    manifest, tensors = pack({"c": Custom(3)}, allow_objects=True)
    assert unpack(manifest, tensors, allow_objects=True) == {"c": Custom(3)}
    with pytest.raises(HealError, match="allow_objects=True here too"):
        unpack(manifest, tensors)


def test_what_pickle_refuses_is_named_too() -> None:
    with pytest.raises(UnsupportedObjectError, match=r"state_dict\['f'\].*cannot be pickled"):
        pack({"f": lambda: 0}, allow_objects=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
    ],
    ids=["quantized", "sparse", "meta"],
)
def test_tensors_without_plain_bytes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedObjectError, match=r"state_dict\['w'\] is a .*cannot travel"):
        pack({"w": tensor})


def test_cycles_and_depth_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedObjectError, match="contains itself"):
        pack(loop)
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(UnsupportedObjectError, match="nested deeper"):
        pack(deep)


def test_tensor_keys_are_refused() -> None:
    with pytest.raises(UnsupportedObjectError, match="uses a tensor as a key"):
        pack({torch.ones(1): 1})


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Shade.DARK,
        Way.LEFT | Way.RIGHT,
        Best(0.5, seen=[Frozen("a"), Point(1, (2, 3))]),
        Frozen("b", Best(1.0)),
        Point(1, Point(2, None)),
        argparse.Namespace(lr=0.1, layers=[1, 2]),
        types.SimpleNamespace(a=1, b={"c": Colour.RED}),
        Settings(seed=1),
        datetime.datetime(2026, 1, 2, 3, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.time(1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        datetime.UTC,
        zoneinfo.ZoneInfo("Europe/Berlin"),
        decimal.Decimal("1.10"),
        uuid.UUID(int=7),
    ],
    ids=repr,
)
def test_values_of_classes_travel_without_an_option(value: Any) -> None:
    back = travel({"v": value, Point(1, 2): [value]})
    assert back == {"v": value, Point(1, 2): [value]}
    assert type(back["v"]) is type(value)
    assert digest({"v": back["v"]}) == digest({"v": value})


def test_configurations_of_omegaconf_travel() -> None:
    """As Hydra's applications put them into a checkpoint's hyperparameters."""
    omegaconf = pytest.importorskip("omegaconf")
    create = omegaconf.OmegaConf.create
    sent = create({"lr": 1e-3, "name": "1e-3", "layers": [1, {"wide": None}], "again": "${lr}"})
    omegaconf.OmegaConf.set_struct(sent, True)
    for value in (sent, sent.layers, create([1, "a"])):
        back = travel({"v": value})["v"]
        assert back == value and type(back) is type(value)
        assert digest({"v": back}) == digest({"v": value})
    back = travel(sent)
    assert omegaconf.OmegaConf.to_yaml(back) == omegaconf.OmegaConf.to_yaml(sent)
    with pytest.raises(omegaconf.errors.ConfigAttributeError):
        back.unknown = 1
    for other in (omegaconf.OmegaConf.structured(Best),):
        with pytest.raises(
            UnsupportedObjectError, match=r"\['v'\] is a omegaconf.*heal_allow_objects"
        ):
            travel({"v": other})


def test_an_object_is_made_without_its_own_code() -> None:
    sent = Best(1.0)
    assert sent.changes == 1, "its __post_init__ counts"
    sent.extra = "not a field"  # type: ignore[attr-defined]
    back = travel(sent)
    assert (back.changes, back.extra) == (1, "not a field")


def test_tensors_in_an_object_are_received_in_place() -> None:
    mine = {"b": Best(0.0, torch.zeros(3)), "p": Point(0, torch.zeros(2))}
    places = mine["b"].weights, mine["p"].y
    back = travel({"b": Best(1.0, torch.ones(3)), "p": Point(1, torch.ones(2))}, into=mine)
    assert back["b"].weights is places[0] and back["p"].y is places[1]
    assert torch.equal(places[0], torch.ones(3)) and torch.equal(places[1], torch.ones(2))


@pytest.mark.parametrize("value", [Best(1.0), Point(1, 2), Colour.RED], ids=repr)
@pytest.mark.parametrize("found", [None, Custom], ids=["none", "another"])
def test_a_class_that_the_target_does_not_have_is_named(
    value: Any, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, tensors = pack([value])
    name = type(value).__qualname__
    if found is None:
        monkeypatch.delattr(sys.modules[__name__], name)
    else:
        monkeypatch.setattr(sys.modules[__name__], name, found)
    with pytest.raises(HealDenied, match=rf"test_tree\.{name}, which"):
        unpack(manifest, tensors)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x94\x01\xa6little\x90\x91\xa1?"])
def test_broken_manifests_are_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(HealError):
        unpack(data, [])


def test_a_manifest_names_each_kind_of_tensor_once() -> None:
    """What is checked, packed and hashed is a kind, however many tensors are of it."""
    tree = {f"w{i}": torch.full((3,), float(i)) for i in range(100)}
    manifest, tensors = pack({**tree, "n": torch.tensor(7)})
    kinds, kind_of = unpack_node(manifest)[2:4]
    assert kinds == [["float32", [3]], ["int64", []]]
    assert kind_of == [0] * 100 + [1]
    assert same(unpack(manifest, tensors), {**tree, "n": torch.tensor(7)})


@pytest.mark.parametrize("kind_of", [[1], [-1], [0.5], ["0"], 0, None])
def test_a_tensor_of_no_kind_is_a_broken_manifest(kind_of: Any) -> None:
    version, byteorder, kinds, _, node = unpack_node(pack([torch.ones(2)])[0])
    with pytest.raises(HealError):
        Manifest(pack_node([version, byteorder, kinds, kind_of, node]))


def test_views_that_begin_at_one_address_are_told_apart() -> None:
    whole = torch.arange(6.0)
    square = whole[:4].view(2, 2)
    tree = {
        "a": whole,
        "b": whole[:4],
        "c": square,
        "d": square.t(),
        "e": whole[:0],
        "f": whole[:0],
        "g": whole[:4],
    }
    _, tensors = pack(tree)
    assert [tuple(each.shape) for each in tensors] == [(6,), (4,), (2, 2), (2, 2), (0,), (0,)]
    assert same(travel(tree), tree)


@given(st.binary(max_size=40), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_damaged_manifests_never_raise_anything_else(junk: bytes, at: int, byte: int) -> None:
    manifest, tensors = pack({"a": torch.ones(3), "b": [1, (2.0, "x"), {1}], "t": torch.Size([1])})
    damaged = bytearray(manifest)
    damaged[at % len(damaged)] = byte
    for data in (junk, bytes(damaged)):
        try:
            unpack(data, tensors)
        except (HealError, ValueError):
            pass  # ValueError: another number of tensors than given


class TestInto:
    """Receiving into the target's own tree."""

    def test_equal_tensors_are_filled_in_place(self) -> None:
        mine: dict[str, Any] = {
            "w": torch.zeros(2, 3),
            "n": [torch.zeros(4, dtype=torch.int64)],
            "x": 1,
        }
        back = travel({"w": torch.ones(2, 3), "n": [torch.arange(4)], "x": 2}, into=mine)
        assert back["w"] is mine["w"]
        assert back["n"][0] is mine["n"][0]
        assert torch.equal(mine["w"], torch.ones(2, 3))
        assert torch.equal(mine["n"][0], torch.arange(4))
        assert back["x"] == 2

    def test_other_shapes_and_dtypes_get_memory_of_their_own(self) -> None:
        mine: dict[str, Any] = {
            "w": torch.zeros(3),
            "v": torch.zeros(2, dtype=torch.float64),
            "u": 5,
        }
        back = travel({"w": torch.ones(2), "v": torch.ones(2), "u": torch.ones(1)}, into=mine)
        assert torch.equal(back["w"], torch.ones(2))
        assert back["v"].dtype == torch.float32
        assert torch.equal(mine["w"], torch.zeros(3))

    def test_strided_tensors_are_filled(self) -> None:
        base = torch.zeros(3, 2)
        back = travel({"w": torch.arange(6.0).reshape(2, 3)}, into={"w": base.t()})
        assert torch.equal(base.t(), torch.arange(6.0).reshape(2, 3))
        assert back["w"].data_ptr() == base.data_ptr()

    def test_expanded_tensors_are_replaced(self) -> None:
        mine = torch.zeros(1).expand(3)
        back = travel({"w": torch.arange(3.0)}, into={"w": mine})
        assert torch.equal(back["w"], torch.arange(3.0))

    def test_tied_here_but_not_there(self) -> None:
        shared = torch.zeros(3)
        source = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
        back = travel(source, into={"a": shared, "b": shared})
        assert torch.equal(back["a"], source["a"])
        assert torch.equal(back["b"], source["b"])

    def test_tied_there_but_not_here(self) -> None:
        shared = torch.arange(3.0)
        mine: dict[str, Any] = {"a": torch.zeros(3), "b": torch.zeros(3)}
        back = travel({"a": shared, "b": shared}, into=mine)
        assert back["a"] is mine["a"]
        assert back["b"] is mine["b"]
        assert torch.equal(mine["b"], shared)

    def test_parameters_keep_their_identity(self) -> None:
        mine = torch.nn.Parameter(torch.zeros(3))
        back = travel({"p": torch.nn.Parameter(torch.ones(3))}, into={"p": mine})
        assert back["p"] is mine
        assert torch.equal(mine.detach(), torch.ones(3))
        assert mine.requires_grad

    @pytest.fixture(scope="class")
    def dtensors_in_use(self) -> None:
        """torch keeps the group (and its socket) of the first DTensor that a process makes."""
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (1,)), [Replicate()])
        dist.destroy_process_group()

    def test_sharded_tensors_travel_by_their_local_part(self, dtensors_in_use: None) -> None:
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            theirs = DTensor.from_local(torch.arange(6.0), mesh, [Replicate()])
            mine = DTensor.from_local(torch.zeros(6), mesh, [Replicate()])
            back = travel({"w": theirs}, into={"w": mine})
            assert back["w"] is mine
            assert torch.equal(mine.to_local(), torch.arange(6.0))
            assert digest({"w": mine}) == digest({"w": theirs})
            with pytest.raises(HealError, match=r"global shape \[6\]; pass into="):
                travel({"w": theirs})
            with pytest.raises(HealError, match="pass into="):
                travel({"w": theirs}, into={"w": torch.zeros(6)})
        finally:
            dist.destroy_process_group()

    def test_a_sharded_tensor_without_a_place_is_made_on_a_mesh_that_is_alike(
        self, dtensors_in_use: None
    ) -> None:
        """A fresh optimizer has no moments to receive into; the parameters say how they are sharded."""
        from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))

            def tensor(value: float, *shape: int, placement: Any = None) -> Any:
                local = torch.full(shape, value)
                return DTensor.from_local(local, mesh, [placement or Shard(0)])

            theirs, mine = tensor(1.0, 4, 3), tensor(0.0, 4, 3)
            moments = {0: {"step": torch.tensor(2.0), "exp_avg": tensor(3.0, 4, 3)}}
            back = travel({"w": theirs, "o": moments}, into={"w": mine, "o": {}})
            assert back["w"] is mine
            made = back["o"][0]["exp_avg"]
            assert (made.device_mesh, made.placements) == (mesh, mine.placements)
            assert made.shape == (4, 3) and made.stride() == (3, 1)
            assert torch.equal(made.to_local(), torch.full((4, 3), 3.0))
            with pytest.raises(HealError, match="sharded alike"):
                travel({"w": theirs, "m": tensor(1.0, 4, placement=Replicate())}, into={"w": mine})
            for other in (tensor(0.0, 5, 3), tensor(0.0, 4, 3, placement=Shard(1))):
                with pytest.raises(
                    HealDenied, match=r"sharded in another way: .* \[4, 3\] .*Shard"
                ):
                    travel({"w": theirs}, into={"w": other})
        finally:
            dist.destroy_process_group()

    def test_pickles_do_not_run_while_places_are_matched(self) -> None:
        manifest, tensors = pack({"c": Custom(1), "w": torch.ones(1)}, allow_objects=True)
        with pytest.raises(HealError, match="allow_objects=True here too"):
            unpack(manifest, tensors, into={"c": None, "w": torch.zeros(1)})
