"""Hosts with IPv6 only, with several addresses, with none; names that would do harm on a terminal."""

from __future__ import annotations

import json
import socket
import urllib.request
from typing import Any

import pytest
import zmq

from lighthouse import own_address
from lighthouse.cli import show
from lighthouse.client import LighthouseClient
from lighthouse.config import LighthouseConfig, split_address
from lighthouse.errors import LighthouseUnavailable
from lighthouse.machine.job import Note
from lighthouse.own_address import advertised_host, outgoing_address
from lighthouse.server import LighthouseServer
from lighthouse.web import StatusPage
from lighthouse.wire.messages import JobKey, Join, printable
from tests.harness import networks
from tests.harness.waiting import PATIENCE_S
from tests.lighthouse.support import FAST, Player, commit_together


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")


@ipv6
def test_a_lighthouse_that_has_ipv6_only(context: zmq.Context[Any]) -> None:
    with LighthouseServer("tcp://[::1]:0", config=LighthouseConfig(timeouts=FAST)) as server:
        assert server.address().startswith("tcp://[::1]:")
        player = Player(server.address(), "a", context)
        player.join(expected_replicas=1)
        player.await_quorum()
        commit_together([player])
        player.close()
        assert advertised_host(server.address()) == "::1"
        with StatusPage("[::1]:0", server.status) as page:
            assert page.url.startswith("http://[::1]:")
            with urllib.request.urlopen(page.url + "status", timeout=PATIENCE_S) as answer:
                assert json.load(answer)["jobs"]


def _names(monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> None:
    """Let these names resolve to these addresses, for Python and (as numbers) for ZeroMQ."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host in hosts:
            return [entry for each in hosts[host] for entry in real(each, *args, **kwargs)]
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_name_with_several_addresses_of_which_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LighthouseServer("tcp://127.0.0.3:0") as server:
        port = split_address(server.address())[1]
        _names(monkeypatch, several=["127.0.0.2", "127.0.0.3"])
        with LighthouseClient(f"tcp://several:{port}", timeout_s=PATIENCE_S) as client:
            assert client.status()["jobs"] == []


def test_a_lighthouse_listens_where_its_host_name_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _names(monkeypatch, here=["127.0.0.2"])  # as /etc/hosts may have this machine's own name
    with LighthouseServer("tcp://localhost:0"), LighthouseServer("tcp://127.0.0.2:0"):
        assert not caplog.messages
    with LighthouseServer("tcp://here:0") as server:
        assert server.address().startswith("tcp://127.0.0.2:")
        assert "leads other machines nowhere: tcp://0.0.0.0:0 listens" in caplog.text
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid' does not resolve"):
        LighthouseServer("tcp://no.such.host.invalid:0")


def test_a_name_that_does_not_resolve_is_said_so() -> None:
    with (
        LighthouseClient("no.such.host.invalid:29510", timeout_s=0.05) as client,
        pytest.raises(LighthouseUnavailable, match=r"'no\.such\.host\.invalid' does not resolve"),
    ):
        client.status()
    with pytest.raises(ValueError, match="does not resolve"):
        advertised_host("tcp://no.such.host.invalid:29510")


def test_an_own_address_is_never_made_up_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoRoute(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError("Network is unreachable")

    monkeypatch.setattr(own_address.socket, "socket", NoRoute)
    monkeypatch.setattr(own_address.socket, "if_nameindex", list)
    with pytest.raises(ValueError, match="no route to '192"):
        outgoing_address("192.0.2.7")
    assert outgoing_address() == "127.0.0.1"
    assert "no network" in caplog.text


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_machine_without_a_default_route_uses_the_network_that_it_has(ipv6: bool) -> None:
    if not networks.available():
        pytest.skip("network namespaces need root and the command ip")
    with networks.networks(1, ipv6=ipv6) as network, network.inside(0) as host:
        assert outgoing_address(prefer_ipv6=ipv6) == host


@pytest.mark.parametrize("addresses", [["127.0.1.1"], ["127.0.0.1", "::1"]], ids=["one", "two"])
def test_a_name_that_means_the_loopback_interface_here_is_not_what_others_are_told(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not networks.available():
        pytest.skip("network namespaces need root and the command ip")
    _names(monkeypatch, here=addresses)  # as /etc/hosts has this machine's own name
    with networks.networks(1) as network, network.inside(0) as host:
        answers = f"tcp://{addresses[0]}:29510"
        assert advertised_host("tcp://here:29510") == host
        assert advertised_host("tcp://here:29510", "", answers) == host
        assert advertised_host("tcp://localhost:29510", "", answers) == "127.0.0.1"
        assert advertised_host(answers) == "127.0.0.1"


def test_an_address_to_advertise_may_be_ipv6() -> None:
    assert advertised_host("tcp://127.0.0.1:1", "fd00::5") == "fd00::5"


EVIL = "a\x1b[2J\x1b]0;owned\x07\r[bold]b[/]\u202e"


def test_names_that_a_terminal_would_obey_are_refused() -> None:
    for fields in ({"name": EVIL}, {"replica_id": EVIL}, {"job": lambda: JobKey(EVIL)}):
        with pytest.raises(ValueError, match="printable"):
            wanted: dict[str, Any] = {"job": JobKey, "name": "a", "replica_id": "a-1", **fields}
            Join(wanted["job"](), wanted["name"], wanted["replica_id"], 0, "init", (b"a",))


def test_texts_of_a_peer_are_harmless_on_the_terminal(
    context: zmq.Context[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[Note] = []
    config = LighthouseConfig(timeouts=FAST)
    with LighthouseServer(config=config, on_note=notes.append) as server:
        players = [Player(server.address(), name, context) for name in ("[red]a[/red]", "b")]
        for each in players:
            each.join(expected_replicas=2)
        for each in players:
            each.await_quorum()
        players[0].vote(ok=False, reason=EVIL)
        players[1].vote()
        passed_on = [each.await_decision().reason for each in players]
        show(server.status())
        for each in players:
            each.close()
    shown = capsys.readouterr().out
    assert "[red]a[/red]" in shown, "markup is shown, not obeyed"
    assert "\x1b]" not in shown
    told = [printable(note.text) for note in notes if "[bold]" in note.text]
    assert told
    assert all(line.isprintable() for line in [*told, *passed_on]), "also in the logs of its peers"
