"""Which of this machine's addresses others should use to reach it.

The machine's own host name is never asked: it may resolve to nothing, to a loopback address or to
the wrong network.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from typing import Any

from lighthouse.config import normalize_address, split_address

log = logging.getLogger("lighthouse")

CONNECT_S = 1.0
"""How long each of several addresses of one name has to accept a connection."""
_SIOCGIFADDR = 0x8915
_FAR_HOSTS = ("192.0.2.1", "2001:db8::1")
"""Reserved for documentation: routed like any far host, owned by none."""


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, as URLs need it; any other host unchanged."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def outgoing_address(towards: str | None = None, *, prefer_ipv6: bool = False) -> str:
    """The local address that packets to the host `towards` leave from; sends nothing.

    Without `towards` the default route decides, that of `prefer_ipv6` first. On a machine without
    one (its network leads nowhere else) it is the address of the first interface that has one. A machine
    without a network uses 127.0.0.1, and says so in the log: others can't reach it. Raises
    `ValueError` when `towards` does not resolve, or has no route from here.
    """
    far = _FAR_HOSTS[::-1] if prefer_ipv6 else _FAR_HOSTS
    for host in [towards] if towards else far:
        for family, kind, protocol, _, address in resolve(host, 9, socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)  # a datagram socket: picks the route, no packet leaves
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    if towards:
        raise ValueError(f"this machine has no route to {towards!r}: check address and interface")
    for _, interface in socket.if_nameindex():
        try:
            found = interface_address(interface)
        except ValueError:
            continue
        if not is_loopback(found):
            return found
    log.warning("this machine has no network: it uses 127.0.0.1, which others can't reach")
    return "127.0.0.1"


def resolve(host: str, port: int, kind: int = socket.SOCK_STREAM) -> list[tuple[Any, ...]]:
    """The addresses of `host`, as socket.getaddrinfo gives them. Raises ValueError for none."""
    try:
        return list(socket.getaddrinfo(host, port, type=kind))
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f"the host {host!r} does not resolve ({error}); check it") from error


def address_that_answers(address: str) -> str:
    """`address` ("tcp://host:port"), with the address of the host's that accepts a connection.

    A name with one address is left as it is, so that it may move. So is one of which no address
    answers yet. Blocks for up to `CONNECT_S` for each address. Raises ValueError if the name does
    not resolve.
    """
    host, port = split_address(address)
    found = dict.fromkeys(entry[4][0] for entry in resolve(host, port))
    if len(found) < 2:
        return address
    for each in found:
        try:
            socket.create_connection((each, port), CONNECT_S).close()
        except OSError:
            continue
        return f"tcp://{bracketed(str(each))}:{port}"
    return address


def uses_ipv6(address: str) -> bool:
    """Whether the host of "tcp://host:port" has only IPv6 addresses. False if it does not resolve."""
    host, port = split_address(address)
    if host == "*":
        return False
    try:
        return all(entry[0] == socket.AF_INET6 for entry in resolve(host, port))
    except ValueError:
        return False


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface (else its first IPv6 one); Linux only.

    Raises `ValueError` when there is no such interface or it has no address.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            pass
    try:
        with open("/proc/thread-self/net/if_inet6") as table:
            for line in table:
                fields = line.split()
                if fields[5] == interface and fields[3] != "20":  # 20: link-local, needs a scope
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
    except FileNotFoundError:
        pass
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(f"the interface {interface!r} has no address; interfaces here: {known}")


def choose_address(hostname: str | None, interface: str | None) -> str:
    """The address to bind and to advertise: the option given, else the outgoing one."""
    if hostname is not None and interface is not None:
        raise ValueError("give hostname or interface, not both")
    if interface is not None:
        return interface_address(interface)
    if hostname is None:
        return outgoing_address()
    return str(resolve(hostname, 0)[0][4][0])


def advertised_host(lighthouse: str, interface: str = "", answers: str = "") -> str:
    """The IP address at which other members reach this process.

    `interface` (a name such as "eth1", or an IP address) wins; else the address of the interface
    that routes to the lighthouse, at `answers` of its addresses (`address_that_answers`). Where its name is
    this machine's and means the loopback interface here (Debian's 127.0.1.1), other machines know it by another
    address: it is the one of `outgoing_address`. Raises ValueError if there is no such interface, it has no
    address, or the lighthouse's host does not resolve.
    """
    if interface:
        try:
            ipaddress.ip_address(interface)
        except ValueError:
            return interface_address(interface)
        return interface
    name = split_address(normalize_address(lighthouse))[0]
    found = outgoing_address(split_address(answers)[0] if answers else name)
    if means_this_machine_only(name, found):
        return outgoing_address(prefer_ipv6=":" in found)
    return found


def means_this_machine_only(name: str, found: str) -> bool:
    """Whether a name that other machines know, too, is a loopback address here: `found` is what it resolves to."""
    return is_loopback(found) and name != "localhost" and not is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
