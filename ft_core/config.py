"""Options of ft_core that environment variables may fill: the one place that reads the env.

Arguments beat environment variables. The names are torchft's where it has one.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlparse

ENV_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
ENV_REPLICA_GROUP = "REPLICA_GROUP_ID"
ENV_NUM_GROUPS = "NUM_REPLICA_GROUPS"
ENV_JOB = "FT_JOB_ID"
ENV_INTERFACE = "FT_INTERFACE"
ENV_EVENTS = "FT_EVENT_LOG"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealOptions:
    """How states travel from one member to another. All members of a job choose alike.

    Attributes:
        port: where this rank's heal server listens; 0: any free port.
        token: shared secret; a heal server refuses readers that name another one.
        allow_objects: let states hold arbitrary Python objects, which travel by pickle: only on a
            network that you trust.
    """

    port: int = 0
    token: str = field(default="", repr=False)
    allow_objects: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be from 0 (any free port) to 65535, got {self.port}")


DEFAULT_HEAL = HealOptions()
"""Any port, no token, plain values and tensors only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnv:
    """What the launcher says about this process.

    Attributes:
        lighthouse: address of the lighthouse, or "" (start a local one).
        name: what the replica group is called; stable over restarts.
        num_groups: how many replica groups the job is meant to have; 0: not said.
        job_id: keeps two jobs on one lighthouse apart.
        group_rank, group_world_size: of this process in its replica group.
        master_addr, master_port: of the group's own rendezvous store ("" and 0: none).
        interface: network interface or IP address to advertise; "": the one that routes to the
            lighthouse.
        event_log: file for telemetry events (JSON lines); "": none.
    """

    lighthouse: str = ""
    name: str = ""
    num_groups: int = 0
    job_id: str = "default"
    group_rank: int = 0
    group_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    interface: str = ""
    event_log: str = ""

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> ReplicaEnv:
        """From the environment. Raises ValueError on a variable that is not what it should be."""
        env = os.environ if env is None else env
        return cls(
            lighthouse=env.get(ENV_LIGHTHOUSE, ""),
            name=env.get(ENV_REPLICA_GROUP, ""),
            num_groups=_int(env, ENV_NUM_GROUPS, 0),
            job_id=env.get(ENV_JOB, "") or "default",
            group_rank=_int(env, "RANK", 0),
            group_world_size=_int(env, "WORLD_SIZE", 1),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=_int(env, "MASTER_PORT", 0),
            interface=env.get(ENV_INTERFACE, ""),
            event_log=env.get(ENV_EVENTS, ""),
        )


def _int(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be a number, got {text!r}") from None


def new_replica_id(name: str) -> str:
    """`name:incarnation`; never the same twice."""
    return f"{name}:{uuid.uuid4().hex[:12]}"


def default_name() -> str:
    """A name for a replica group that was given none."""
    return f"{socket.gethostname()}-{os.getpid()}"


def advertised_host(lighthouse: str, interface: str = "") -> str:
    """IP address under which peers reach this process.

    `interface` (a name such as "eth1", or an IP address) wins; else the address of the interface
    that routes to the lighthouse. Never the host name: it may resolve to the wrong network.
    Raises ValueError if `interface` has no IPv4 address here.
    """
    if interface:
        return _interface_address(interface)
    host = urlparse(lighthouse).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # UDP: no packet leaves, only a route is looked up
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
        return address


def _interface_address(interface: str) -> str:
    try:
        socket.inet_aton(interface)
        return interface
    except OSError:
        pass
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, packed)[20:24])
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"interface {interface!r} has no IPv4 address here; there are {names}"
            ) from None
