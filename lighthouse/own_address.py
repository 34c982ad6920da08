"""Which of this machine's addresses others should use to reach it.

The machine's own host name is never asked: it may resolve to nothing, to a loopback address or to
the wrong network.
"""

from __future__ import annotations

import socket
import struct
from urllib.parse import urlparse

_SIOCGIFADDR = 0x8915
_FAR_HOSTS = ("192.0.2.1", "2001:db8::1")
"""Reserved for documentation: routed like any far host, owned by none."""


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, as URLs need it; any other host unchanged."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def outgoing_address(towards: str | None = None, *, prefer_ipv6: bool = False) -> str:
    """The local address that packets to the host `towards` leave from; sends nothing.

    Without `towards` the default route decides, that of `prefer_ipv6` first. With no route at all:
    127.0.0.1, which is right for tests and single machines and useless elsewhere. Raises
    `ValueError` when `towards` does not resolve.
    """
    far = _FAR_HOSTS[::-1] if prefer_ipv6 else _FAR_HOSTS
    for host in [towards] if towards else far:
        try:
            candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except socket.gaierror as error:
            raise ValueError(f"the host {host!r} does not resolve ({error}); check it") from error
        for family, kind, protocol, _, address in candidates:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)  # a datagram socket: picks the route, no packet leaves
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    return "127.0.0.1"


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
        with open("/proc/net/if_inet6") as table:
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
    try:
        return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ValueError(f"the hostname {hostname!r} does not resolve ({error})") from error


def advertised_host(lighthouse: str, interface: str = "") -> str:
    """The IP address at which other members reach this process.

    `interface` (a name such as "eth1", or an IP address) wins; else the address of the interface
    that routes to the lighthouse. Raises ValueError if there is no such interface, or it has no
    address.
    """
    if interface:
        try:
            socket.inet_aton(interface)
        except OSError:
            return interface_address(interface)
        return interface
    try:
        return outgoing_address(urlparse(lighthouse).hostname or "127.0.0.1")
    except ValueError:
        return "127.0.0.1"  # the connection to the lighthouse fails, and says why
