"""HealServer and fetch over real sockets, in one process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any

import pytest
import torch
import zmq

from ft_core.config import JobOptions
from ft_core.heal import NEXT, HealDenied, HealError, HealKey, HealProgress, HealServer, bulk, fetch
from ft_core.heal import protocol as wire
from ft_core.heal.protocol import Chunk
from ft_core.heal.same_host import host_identity
from ft_core.heal.snapshot import Outlet
from ft_core.heal.target import DEFAULT_CHUNK_BYTES
from ft_core.heal.transfer_plan import WINDOW
from ft_core.heal.transport import HealAddress, reading_socket, serving_endpoint
from ft_core.launch.rank_group import free_port
from tests.ft_core.heal.support import KEY, FaultyLink, raw, same, soon, state
from tests.harness.waiting import PATIENCE_S, until
from tests.lighthouse.support import await_frame

MakeServer = Callable[..., HealServer]
SMALL_CHUNKS = 1 << 20
"""So that there are many, and a state is never on its way as a whole."""
both_paths = pytest.mark.parametrize("same_host", [False, True], ids=["tcp", "memory"])


@both_paths
@pytest.mark.parametrize("copy", [True, False], ids=["snapshot", "live"])
@pytest.mark.parametrize("sources", [1, 3])
def test_round_trip(make_server: MakeServer, same_host: bool, copy: bool, sources: int) -> None:
    tree = state(24)
    servers = [make_server() for _ in range(sources)]
    for server in servers:
        server.publish(KEY, tree, copy=copy)
    addresses = [server.address for server in servers]
    back, stats = fetch(
        addresses, KEY, deadline=soon(), same_host=same_host, chunk_bytes=SMALL_CHUNKS
    )
    assert same(back, tree)
    assert stats.bytes == sum(stats.source_bytes.values()) >= 24 << 20
    assert stats.same_host_bytes == (stats.bytes if same_host else 0)
    assert not stats.failed_sources


@both_paths
def test_in_place(make_server: MakeServer, same_host: bool) -> None:
    tree, mine = state(8), state(8, seed=1)
    server = make_server()
    server.publish(KEY, tree)
    pointers = {name: t.data_ptr() for name, t in mine.items() if isinstance(t, torch.Tensor)}
    back, _ = fetch([server.address], KEY, into=mine, deadline=soon(), same_host=same_host)
    for name, pointer in pointers.items():
        assert back[name] is mine[name]
        assert back[name].data_ptr() == pointer
    assert same(back, tree)


class LeapingClock:
    """As `time`, for a process that is stopped now and then."""

    def __init__(self) -> None:
        self.stopped_s = 0.0
        self.perf_counter = time.perf_counter

    def monotonic(self) -> float:
        return time.monotonic() + self.stopped_s


def test_what_has_come_before_the_deadline_is_read(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target was stopped past its deadline, with all bytes of the state in its kernel."""
    clock = LeapingClock()
    monkeypatch.setattr("ft_core.heal.target.time", clock)

    def stopped() -> Any:
        clock.stopped_s += 2 * PATIENCE_S
        return state(0, seed=1)

    server = make_server()
    server.publish(KEY, state(0))
    back, _ = fetch([server.address], KEY, into=stopped, deadline=soon(), same_host=False)
    assert same(back, state(0))


def test_the_own_state_is_whole_until_the_first_byte(make_server: MakeServer) -> None:
    """A source that refuses, or that dies after it has described its state, has torn nothing."""
    asked: list[str] = []

    def mine(why: str) -> Callable[[], Any]:
        return lambda: asked.append(why) or state(8, seed=1)  # type: ignore[func-returns-value]

    def dies(_: HealProgress) -> None:
        raise RuntimeError("the source is gone")

    server, strict = make_server(), make_server(options=JobOptions(name="r0", token="secret"))
    for one in (server, strict):
        one.publish(KEY, state(8))
    with pytest.raises(HealError):
        fetch([strict.address], KEY, into=mine("refused"), deadline=soon())
    with pytest.raises(RuntimeError):
        fetch([server.address], KEY, into=mine("described"), deadline=soon(), progress=dies)
    assert asked == []
    back, _ = fetch([server.address], KEY, into=mine("received"), deadline=soon())
    assert asked == ["received"]
    assert same(back, state(8))


def test_a_state_without_tensors(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(KEY, {"epoch": 3, "names": ["a", None]})
    back, stats = fetch([server.address], KEY, deadline=soon())
    assert back == {"epoch": 3, "names": ["a", None]}
    assert stats.bytes == 0


def test_many_small_tensors_and_odd_sizes(make_server: MakeServer) -> None:
    tree = {i: torch.full((i % 7,), float(i)) for i in range(3000)}
    tree[9999] = torch.arange((1 << 20) + 3, dtype=torch.uint8)
    server = make_server()
    server.publish(KEY, tree)
    back, _ = fetch([server.address], KEY, deadline=soon(), chunk_bytes=64 << 10)
    assert same(back, tree)


def test_the_snapshot_does_not_follow_the_training(make_server: MakeServer) -> None:
    tree = state(8)
    expected = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
    server = make_server()
    server.publish(KEY, tree)
    tree["w0"].add_(1)
    tree["small"].add_(1)
    back, _ = fetch([server.address], KEY, deadline=soon())
    assert same(back, expected)


def test_progress_is_told_and_may_end_the_fetch(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(KEY, state(16))
    seen: list[HealProgress] = []
    _, stats = fetch([server.address], KEY, deadline=soon(), progress=seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total == stats.bytes
    assert seen[0].sources == 1

    def stop(_: HealProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch([server.address], KEY, deadline=soon(), progress=stop)


def test_a_publication_that_comes_late_is_waited_for(make_server: MakeServer) -> None:
    server = make_server()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, [server.address], KEY, deadline=soon())
        until(lambda: server.stats().opened == 1)
        server.publish(HealKey(KEY.step - 1, "older"), {"epoch": 0})
        server.publish(KEY, {"epoch": 1})
        assert reading.result()[0] == {"epoch": 1}


def test_republished_after_retirement(make_server: MakeServer) -> None:
    """A discarded step: the same version is served again to the next target, which may be early."""
    server = make_server()
    server.publish(KEY, {"epoch": 1})
    server.retire()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, [server.address], KEY, deadline=soon())
        until(lambda: server.stats().opened == 1)
        server.publish(KEY, {"epoch": 1})
        assert reading.result()[0] == {"epoch": 1}


def test_a_retired_version_is_gone(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(KEY, {"epoch": 1})
    server.retire("the step was committed")
    with pytest.raises(HealError, match="is gone: the step was committed"):
        fetch([server.address], KEY, deadline=soon())


def test_a_version_that_the_source_has_passed_is_gone_at_once(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(HealKey(KEY.step + 1, "next"), {"epoch": 1})
    with pytest.raises(
        HealError, match=r"is gone: the source is at \(step 8, lineage next\)"
    ) as caught:
        fetch([server.address], KEY, deadline=soon())
    assert "the deadline passed" not in str(caught.value)


def test_retired_in_mid_transfer(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(KEY, state(64))

    def retire(progress: HealProgress) -> None:
        if progress.bytes_done:
            server.retire("the source trained on")

    with pytest.raises(HealError, match=r"with \d+ of \d+ chunks missing.*the source trained on"):
        fetch(
            [server.address],
            KEY,
            deadline=soon(),
            same_host=False,
            progress=retire,
            chunk_bytes=SMALL_CHUNKS,
        )


def test_one_source_retires_and_the_others_finish(make_server: MakeServer) -> None:
    tree = state(64)
    first, second = make_server(), make_server()
    first.publish(KEY, tree)
    second.publish(KEY, tree)

    def retire(progress: HealProgress) -> None:
        if progress.bytes_done:
            first.retire()

    back, stats = fetch(
        [first.address, second.address],
        KEY,
        deadline=soon(),
        same_host=False,
        progress=retire,
        chunk_bytes=SMALL_CHUNKS,
    )
    assert same(back, tree)
    assert set(stats.failed_sources) <= {first.address}  # the news may come after the last chunk
    assert stats.source_bytes[first.address] <= 2 * WINDOW * SMALL_CHUNKS


def test_the_deadline_names_every_source(make_server: MakeServer) -> None:
    server, other = make_server(), make_server()
    start = time.monotonic()
    with pytest.raises(HealError) as caught:
        fetch([server.address, other.address], KEY, deadline=start + 0.3)
    assert time.monotonic() >= start + 0.3
    text = str(caught.value)
    assert "step 7, lineage abc" in text
    assert "the deadline passed" in text
    assert text.count("not published there yet") == 2


def test_no_process_listens() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(HealError, match="no source is left.*the process seems to be gone"):
        fetch([address], KEY, deadline=soon())


def test_no_address() -> None:
    with pytest.raises(HealError, match="not an address"):
        fetch(["nonsense"], KEY, deadline=soon())
    with pytest.raises(ValueError, match="at least one healthy member"):
        fetch([], KEY, deadline=soon())
    with pytest.raises(ValueError, match="from 64 KiB to 64 MiB"):
        fetch(["tcp://127.0.0.1:1"], KEY, deadline=soon(), chunk_bytes=1)


def test_token(make_server: MakeServer) -> None:
    server = make_server(options=JobOptions(name="r0", token="right"))
    server.publish(KEY, {"epoch": 1})
    for token in ("", "wrong"):
        with pytest.raises(HealDenied, match="refused: wrong token; set the same heal token"):
            fetch(
                [server.address], KEY, deadline=soon(), options=JobOptions(name="r0", token=token)
            )
    right = JobOptions(name="r0", token="right")
    assert fetch([server.address], KEY, deadline=soon(), options=right)[0] == {"epoch": 1}
    assert server.stats().refused == 2


def test_too_many_clients(make_server: MakeServer) -> None:
    server = make_server(max_clients=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, [server.address], KEY, deadline=soon())
        until(lambda: server.stats().opened == 1)
        with pytest.raises(HealError, match="it serves 1 readers already") as busy:
            fetch([server.address], KEY, deadline=soon())
        assert not isinstance(busy.value, HealDenied), "another try may succeed"
        server.publish(KEY, {})
        waiting.result()
    until(lambda: server.stats().finished == 1)
    fetch([server.address], KEY, deadline=soon())  # the place is free again


def test_unknown_object_leaves_nothing_published(make_server: MakeServer) -> None:
    server = make_server()
    with pytest.raises(HealError, match=r"state_dict\['f'\] is a "):
        server.publish(KEY, {"f": object()})
    with pytest.raises(HealError, match="not published there yet"):
        fetch([server.address], KEY, deadline=soon(0.1))


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "192.0.2.1", "no.such.host.invalid"])
def test_bad_hosts(host: str) -> None:
    with pytest.raises(ValueError, match=r"address of"):
        HealServer(host=host)


def test_a_server_whose_port_for_bytes_can_not_be_bound_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the name of its host did not resolve the second time, it waited for its own socket."""

    def fails(host: str, port: int) -> None:
        raise ValueError(f"{host} does not resolve")

    with monkeypatch.context() as broken:
        broken.setattr(bulk, "resolve", fails)
        with pytest.raises(ValueError, match="Cannot serve heals on 127.0.0.1: .* not resolve"):
            HealServer(host="127.0.0.1")


def test_closed_server_says_so(make_server: MakeServer) -> None:
    server = make_server()
    server.close()
    server.close()
    with pytest.raises(ValueError, match="closed; make a new one"):
        server.publish(KEY, {})


class TestLive:
    """copy=False: the trainer's own memory is served until freeze."""

    def test_freeze_with_nothing_live_costs_nothing(self, make_server: MakeServer) -> None:
        server = make_server()
        assert server.freeze() == 0.0
        server.publish(KEY, state(8))
        assert server.freeze() == 0.0

    def test_freeze_without_readers_copies_nothing_and_retires(
        self, make_server: MakeServer
    ) -> None:
        server = make_server()
        server.publish(KEY, state(64), copy=False)
        server.freeze()
        with pytest.raises(HealError, match="the source trained on"):
            fetch([server.address], KEY, deadline=soon())

    @both_paths
    def test_freeze_keeps_it_for_readers_still_expected(
        self, make_server: MakeServer, same_host: bool
    ) -> None:
        tree, expected = state(16), state(16)
        server = make_server()
        server.publish(KEY, tree, copy=False, expected_targets=1)
        assert server.freeze() > 0
        tree["w0"].add_(1)
        back, stats = fetch([server.address], KEY, deadline=soon(), same_host=same_host)
        assert same(back, expected)
        assert stats.same_host_bytes == (stats.bytes if same_host else 0)

    @both_paths
    def test_training_on_in_mid_transfer(self, make_server: MakeServer, same_host: bool) -> None:
        tree, expected = state(64), state(64)
        server = make_server()
        server.publish(KEY, tree, copy=False)
        trained: list[float] = []

        def train(progress: HealProgress) -> None:
            if progress.bytes_done and not trained:
                trained.append(server.freeze())
                for value in tree.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()

        back, stats = fetch(
            [server.address],
            KEY,
            deadline=soon(),
            same_host=same_host,
            progress=train,
            chunk_bytes=SMALL_CHUNKS,
        )
        assert trained
        assert same(back, expected)
        assert stats.corrupted == 0


def _flip(*offsets: int) -> Callable[[int, bytearray], bytearray]:
    """An edit that flips one bit at each of these offsets of the stream."""

    def edit(start: int, data: bytearray) -> bytearray:
        for offset in offsets:
            if start <= offset < start + len(data):
                data[offset - start] ^= 1
        return data

    return edit


def _dammed(opened: threading.Event) -> Callable[[int, bytearray], bytearray]:
    """An edit that lets a little through, and the rest when `opened`."""

    def edit(start: int, data: bytearray) -> bytearray:
        if start + len(data) > 3 << 20:
            opened.wait(PATIENCE_S)
        return data

    return edit


def _then_publish(server: HealServer, tree: Any) -> Callable[[HealProgress], None]:
    """Publish there once the other source has answered, so that both surely take part."""

    def progress(seen: HealProgress) -> None:
        if not server.stats().published:
            server.publish(KEY, tree)

    return progress


def test_a_transfer_that_can_not_end_in_time_is_given_up_long_before(
    make_server: MakeServer,
) -> None:
    """Peers wait for it in their collectives."""
    server = make_server()
    server.publish(KEY, state(64))
    over = threading.Event()

    def throttle(_: int, data: bytearray) -> bytearray:
        over.wait(len(data) / 1e4)  # 10 kB/s: it would take two hours
        return data

    with FaultyLink(server.address, throttle) as link:
        with pytest.raises(HealError, match=r"too slow, the rest would take \d+ s"):
            fetch([link.address], KEY, deadline=soon(90), same_host=False, chunk_bytes=1 << 16)
        over.set()


def test_a_transfer_that_falls_silent_is_given_up_long_before(make_server: MakeServer) -> None:
    """The link is fast, and then nothing comes any more, while the connection stays up."""
    server = make_server()
    server.publish(KEY, state(64))
    over, passed = threading.Event(), [0]

    def dam(_: int, data: bytearray) -> bytearray:
        passed[0] += len(data)
        if passed[0] > 60 << 20:
            over.wait(PATIENCE_S)
        return data

    with FaultyLink(server.address, dam) as link:
        # On a machine that is very slow all of it may have been too slow before.
        with pytest.raises(HealError, match=r"(fallen silent|too slow).* chunks missing"):
            fetch([link.address], KEY, deadline=soon(40), same_host=False)
        over.set()


class TestFaults:
    """What a network, or a source, may do."""

    def test_a_corrupted_chunk_is_fetched_again(self, make_server: MakeServer) -> None:
        tree = state(32)
        server = make_server()
        server.publish(KEY, tree)
        with FaultyLink(server.address, _flip(DEFAULT_CHUNK_BYTES // 2)) as link:
            back, stats = fetch([link.address], KEY, deadline=soon(), same_host=False)
        assert same(back, tree)
        assert stats.corrupted == 1
        assert stats.retries >= 1

    def test_corrupted_twice_ends_the_heal(self, make_server: MakeServer) -> None:
        server = make_server()
        server.publish(KEY, {"w": torch.zeros(1 << 19, dtype=torch.uint8), "v": torch.zeros(9)})
        offsets = [200_000 + i * (1 << 18) for i in range(20)]
        with FaultyLink(server.address, _flip(*offsets)) as link:
            with pytest.raises(HealError, match=r"came corrupted twice \(from tcp://"):
                fetch([link.address], KEY, deadline=soon(), same_host=False)

    def test_a_slow_source_costs_its_stripes(self, make_server: MakeServer) -> None:
        tree = state(128)
        fast, slow = make_server(), make_server()
        slow.publish(KEY, tree)
        pace = threading.Event()

        def throttle(_: int, data: bytearray) -> bytearray:
            pace.wait(len(data) / 4e6)  # 4 MB/s: alone it would take 32 s
            return data

        with FaultyLink(slow.address, throttle) as link:
            try:
                back, stats = fetch(
                    [link.address, fast.address],
                    KEY,
                    deadline=soon(),
                    same_host=False,
                    progress=_then_publish(fast, tree),
                )
            finally:
                pace.set()
        assert same(back, tree)
        assert stats.source_bytes[fast.address] > 100 << 20

    def test_a_source_that_falls_silent_costs_its_stripes(self, make_server: MakeServer) -> None:
        tree = state(64)
        good, silent = make_server(), make_server()
        silent.publish(KEY, tree)
        resume, one = threading.Event(), threading.Lock()

        def hang(offset: int, data: bytearray) -> bytearray:
            if offset > 1 << 20:
                with one:
                    if not good.stats().published:  # it owes a stripe by now
                        good.publish(KEY, tree)
                resume.wait(PATIENCE_S)
            return data

        with FaultyLink(silent.address, hang) as link:
            try:
                back, stats = fetch(
                    [link.address, good.address], KEY, deadline=soon(), same_host=False
                )
            finally:
                resume.set()
        assert same(back, tree)
        assert stats.retries > 0

    def test_a_broken_connection_is_made_again(self, make_server: MakeServer) -> None:
        tree = state(64)
        server = make_server()
        server.publish(KEY, tree)
        cuts: list[int] = []

        def cut(offset: int, data: bytearray) -> bytearray:
            if offset > 8 << 20 and not cuts:
                cuts.append(offset)
                raise OSError("cut")
            return data

        with FaultyLink(server.address, cut) as link:
            back, stats = fetch([link.address], KEY, deadline=soon(), same_host=False)
        assert cuts
        assert same(back, tree)
        assert stats.retries > 0

    def test_a_source_with_other_shapes_is_left_out(self, make_server: MakeServer) -> None:
        good, diverged = make_server(), make_server()
        good.publish(KEY, state(16))

        def diverge(progress: HealProgress) -> None:
            if not progress.bytes_done:  # the good one has just told the shapes
                diverged.publish(KEY, state(8))
                good.retire()

        with pytest.raises(HealError, match="its tensors differ in shape or dtype under the same"):
            fetch([diverged.address, good.address], KEY, deadline=soon(), progress=diverge)

    def test_a_reader_that_stops_reading_delays_no_other(self, make_server: MakeServer) -> None:
        """A target that asks for everything and reads nothing; publish stays quick."""
        tree = state(64)
        server = make_server()
        server.publish(KEY, tree)
        asking = threading.Event()

        def stand_still(_: HealProgress) -> None:
            asking.set()
            assert go_on.wait(PATIENCE_S)

        go_on = threading.Event()
        with ThreadPoolExecutor(1) as pool, FaultyLink(server.address, _dammed(go_on)) as link:
            try:
                idle = pool.submit(
                    fetch,
                    [link.address],
                    KEY,
                    deadline=soon(),
                    same_host=False,
                    progress=stand_still,
                )
                assert asking.wait(PATIENCE_S)
                other, _ = fetch([server.address], KEY, deadline=soon(), same_host=False)
                assert same(other, tree)
                newer, changed = HealKey(8, "x"), state(64, seed=5)
                server.publish(newer, changed)  # into the same memory, without waiting
                other, _ = fetch([server.address], newer, deadline=soon(), same_host=False)
                assert same(other, changed)
            finally:
                go_on.set()
            with pytest.raises(HealError, match="is gone"):
                idle.result(PATIENCE_S)


class TestGarbage:
    """Whatever arrives on the port, the server drops it, counts it, and serves on."""

    def _send(self, server: HealServer, frames: list[bytes]) -> None:
        context = zmq.Context()
        address = HealAddress.parse(server.address)
        with reading_socket(context, address) as dealer:
            dealer.connect(address.where)
            dealer.send_multipart(frames)
            dealer.close(linger=1000)
        context.term()

    @pytest.mark.parametrize(
        "frames",
        [
            [b"junk"],
            [b""],
            [b"a", b"b"],
            [wire.requests.encode(wire.Done())],
            [wire.requests.encode(wire.Confirm((0,), ()))],
            [os.urandom(1000)],
        ],
    )
    def test_dropped_and_counted(self, make_server: MakeServer, frames: list[bytes]) -> None:
        server = make_server()
        server.publish(KEY, {"epoch": 1})
        self._send(server, frames)
        until(lambda: server.stats().dropped == 1)
        assert fetch([server.address], KEY, deadline=soon())[0] == {"epoch": 1}

    def test_a_huge_frame_closes_the_connection(self, make_server: MakeServer) -> None:
        server = make_server()
        server.publish(KEY, {"epoch": 1})
        context = zmq.Context()
        address = HealAddress.parse(server.address)
        dealer = reading_socket(context, address)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            dealer.connect(address.where)
            dealer.send(bytes(wire.MAX_REQUEST_BYTES + 1))
            assert monitor.poll(5000)
        finally:
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close()
            context.term()
        assert server.stats().dropped == 0
        assert fetch([server.address], KEY, deadline=soon())[0] == {"epoch": 1}

    @pytest.mark.parametrize("kind", ["junk", "valid", "manifest"])
    def test_a_source_that_talks_nonsense_is_left(self, make_server: MakeServer, kind: str) -> None:
        reply = {
            "junk": [b"junk"],
            "valid": [wire.replies.encode(wire.ValidReply((0,), (1,)))],
            "manifest": [
                wire.replies.encode(wire.ManifestReply(1, "other", b"", bytes(16), 0, (), ())),
                b"x",
            ],
        }[kind]
        good = make_server()
        context = zmq.Context()
        liar, where = serving_endpoint(context, "127.0.0.1", 0, "word", 1)
        addresses = [str(HealAddress(where, 1, "word")), good.address]

        def lie() -> None:
            peer, _ = await_frame(liar)
            if len(reply) == 1:
                liar.send([peer], reply[0])
            else:
                liar.send_payload(peer, *reply)
            good.publish(KEY, {"epoch": 1})

        try:
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(fetch, addresses, KEY, deadline=soon())
                lie()
                tree, stats = reading.result()
        finally:
            liar.close()
            context.term()
        assert tree == {"epoch": 1}
        assert set(stats.failed_sources) <= {addresses[0]}


def test_a_snapshots_memory_is_used_for_the_next_one(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(KEY, state(12))
    buffer = server._publication._buffers[0]  # type: ignore[union-attr]
    assert buffer.nbytes >= 12 << 20
    server.publish(HealKey(8, "y"), state(12))
    assert server._publication._buffers[0] is buffer  # type: ignore[union-attr]


def test_no_descriptors_are_left(make_server: MakeServer) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    server = make_server()
    server.publish(KEY, state(8))
    fetch([server.address], KEY, deadline=soon())
    before = count()
    for _ in range(5):
        fetch([server.address], KEY, deadline=soon())
    until(lambda: count() <= before)


def test_a_reader_of_the_last_version_that_ends_late_is_not_taken_for_one_of_this(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source did not keep what the reader that is still to come lacks."""
    server, receive = make_server(), HealServer._receive
    server.publish(KEY, state(12), copy=False, expected_targets=1)
    ends, late, goes_on = (threading.Event() for _ in range(3))

    def slow(self: HealServer) -> bool:
        if ends.is_set():
            late.set()
            goes_on.wait(PATIENCE_S)
        return receive(self)

    monkeypatch.setattr(HealServer, "_receive", slow)
    fetch([server.address], KEY, deadline=soon(), progress=lambda seen: _set_at_its_end(seen, ends))
    assert late.wait(PATIENCE_S)
    key = HealKey(KEY.step + 1, "next")
    server.publish(key, state(12), copy=False, expected_targets=1)
    goes_on.set()
    until(lambda: server.stats().finished == 1, "its end to be read")
    server.freeze()
    assert same(fetch([server.address], key, deadline=soon())[0], state(12))


def test_one_that_comes_back_does_not_count_for_another(make_server: MakeServer) -> None:
    """Two targets lose their connections; it isn't known which of them is the first to be back."""
    tree, server = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(3)}, make_server()
    server.publish(KEY, tree, copy=False, expected_targets=2)
    address, host = HealAddress.parse(server.address), host_identity()
    opening = wire.requests.encode(wire.Open("", *astuple(KEY), 4 << 20, PATIENCE_S, host))
    with zmq.Context() as context, ExitStack() as stack:

        def opened(lacks: int) -> zmq.Socket[bytes]:
            """A target that lacks one chunk."""
            reader = stack.enter_context(reading_socket(context, address))
            reader.connect(address.where)
            reader.send(opening)
            reader.recv_multipart()
            reader.send(wire.requests.encode(wire.Confirm((), (lacks, lacks + 1))))
            reader.recv()
            return reader

        readers = [opened(lacks) for lacks in (0, 2)]
        for number, reader in enumerate(readers):
            reader.close()
            until(lambda gone=number + 1: len(server._away) == gone)  # type: ignore[misc]
        opened(0)
        server.freeze()
        tree["w2"].zero_()
        kept = server._publication.read(Chunk(8 << 20, 4 << 20), Outlet())  # type: ignore[union-attr]
        assert kept is not None
        assert b"".join(kept.parts) == raw(torch.full((1 << 20,), 2.0))


def _set_at_its_end(seen: HealProgress, ends: threading.Event) -> None:
    if seen.bytes_done == seen.bytes_total:
        ends.set()


def test_a_version_has_its_observer_from_the_moment_in_which_it_is_published(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's thread may be late to begin with it."""
    server, begins, start = make_server(), threading.Event(), HealServer._start

    def late(*each: Any) -> None:
        begins.wait(PATIENCE_S)
        start(*each)

    monkeypatch.setattr(HealServer, "_start", late)
    with ThreadPoolExecutor(1) as pool:
        observer = pool.submit(fetch, [server.address], NEXT, deadline=soon())
        until(lambda: server.observed_from is not None, "the observer")
        assert server.quiet
        server.publish(KEY, state(1), shown=True)
        quiet = server.quiet
        begins.set()
        assert not quiet
        observer.result()
    until(lambda: server.quiet, "its end")


def test_what_is_shown_to_observers_is_not_given_to_members(make_server: MakeServer) -> None:
    """It has another form, also where it is the version for which a member asks."""
    server, shown = make_server(), {"packed": torch.ones(3)}
    server.publish(KEY, shown, shown=True)
    with ThreadPoolExecutor(2) as pool:
        member = pool.submit(fetch, [server.address], KEY, deadline=soon())
        observer = pool.submit(fetch, [server.address], NEXT, deadline=soon())
        assert list(observer.result()[0]) == ["packed"]
        assert not member.done()
        server.publish(KEY, state(1))
        assert same(member.result()[0], state(1))
        late = pool.submit(fetch, [server.address], NEXT, deadline=soon())
        until(lambda: server.observed_from is not None, "an observer that is left waiting")
        server.publish(KEY, shown, shown=True)
        assert list(late.result()[0]) == ["packed"]
