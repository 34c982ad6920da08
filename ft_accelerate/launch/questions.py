"""The questions of `accelerate config` on fault tolerance, in its look and with its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ft_accelerate.launch.groups import default_group_size
from ft_accelerate.options import SWITCH, argument_name, default_of, parse, read_section

KINDS = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Accelerate's distributed types for which there is fault tolerance."""


def ask_after(config: Any) -> Any:
    """`config`, an answered `ClusterConfig`, with the section that the user wants, if any."""
    kind = getattr(config.distributed_type, "value", config.distributed_type)
    others = (config.deepspeed_config, config.megatron_lm_config, config.mpirun_config)
    if kind in KINDS and not any(others):
        config.fault_tolerance_config = ask(
            num_processes=config.num_processes, num_machines=config.num_machines
        )
    return config


def ask(*, num_processes: int, num_machines: int) -> dict[str, Any]:
    """Ask on the terminal; returns the section, empty if fault tolerance is not wanted."""
    if not _yes("Do you want to train fault-tolerantly, in replica groups that may fail and come "
                "back while the others train on? [yes/NO]: ", False):  # fmt: skip
        return {}
    section: dict[str, Any] = {SWITCH: True}
    here = max(1, num_processes // num_machines)
    usual = default_group_size(here, num_machines)
    each = "one" if usual == 1 else "all of a machine"
    size = _field(
        f"How many processes should one replica group have ({each}: what fails together, or "
        f"what is restarted together)? [{usual}]: ",
        lambda text: _divides(parse("group_size", text, "it"), here),
        usual,
        f"Please enter a number that divides the {here} process(es) of a machine.",
    )
    section[argument_name("group_size")] = size
    groups = max(1, num_processes // size)
    section[argument_name("min_replicas")] = _field(
        f"What is the smallest number of replica groups to train with (there are {groups})? [1]: ",
        lambda text: _between(parse("min_replicas", text, "it"), 1, groups),
        1,
        f"Please enter a number from 1 to {groups}.",
    )
    if _yes("Do you want to use a lighthouse that runs already (if not, the launcher of the first "
            "machine runs one)? [yes/NO]: ", False):  # fmt: skip
        section[argument_name("lighthouse")] = _field(
            "What is the address of the lighthouse (tcp://host:port)? ",
            _address,
            None,
            "Please enter an address such as tcp://10.0.0.1:29510.",
        )
    timeout_s = default_of("timeout_s")
    section[argument_name("timeout_s")] = _field(
        f"After how many seconds should a replica group that hangs be evicted? [{timeout_s:g}]: ",
        _reader("timeout_s"),
        timeout_s,
        "Please enter a number.",
    )
    restarts = _field(
        "How often within an hour may a replica group that died be restarted? [no limit]: ",
        lambda text: _reader("max_restarts")(text) if text else None,
        None,
        "Please enter a number.",
    )
    if restarts is not None:
        section[argument_name("max_restarts")] = restarts
    section[argument_name("commit")] = _commit()
    _ask_more(section, most_spares=groups - section[argument_name("min_replicas")])
    return read_section(section)


def _commit() -> str:
    from accelerate.commands.config.config_utils import _ask_options

    chosen: str = _ask_options(
        "How should a step be committed?",
        ["by all replica groups together (quorum)", "by each replica group alone (group)"],
        lambda i: ("quorum", "group")[int(i)],
    )
    return chosen


def _ask_more(section: dict[str, Any], *, most_spares: int) -> None:
    if not _yes("Do you want to set the job's name, its token and other options? [yes/NO]: ",
                False):  # fmt: skip
        return
    spares = 0
    if most_spares:
        spares = _field(
            "How many of the replica groups should be hot spares, which take over from one that dies? [0]: ",
            lambda text: _between(parse("spares", text, "it"), 0, most_spares),
            0,
            f"Please enter a number from 0 to {most_spares}.",
        )
    if spares:
        section[argument_name("spares")] = spares
    for name, question, default in (
        ("job_id", "What is the job's name on the lighthouse? [default]: ", "default"),
        ("token", "Which shared secret must a process name to fetch a state? [none]: ", ""),
    ):
        answer = _field(question, str, default, "")
        if answer != default:
            section[argument_name(name)] = answer
    quorum_s = _field(
        "How many seconds may a replica group wait for a quorum (0: without limit)? [0]: ",
        lambda text: _between(parse("quorum_timeout_s", text, "it"), 0, float("inf")),
        0.0,
        "Please enter a number of seconds.",
    )
    if quorum_s:
        section[argument_name("quorum_timeout_s")] = quorum_s
    if _yes("May states hold arbitrary Python objects (pickle: only on a network that you trust)? "
            "[yes/NO]: ", False):  # fmt: skip
        section[argument_name("heal_allow_objects")] = True


def _field(question: str, read: Callable[[str], Any], default: Any, error: str) -> Any:
    from accelerate.commands.config.config_utils import _ask_field

    return _ask_field(question, read, default=default, error_message=error)


def _yes(question: str, default: bool) -> bool:
    from accelerate.commands.config.config_utils import _convert_yes_no_to_bool

    return bool(_field(question, _convert_yes_no_to_bool, default, "Please enter yes or no."))


def _reader(name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return read_section({name: text})[argument_name(name)]

    return read


def _between(value: Any, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise ValueError
    return value


def _divides(value: int, whole: int) -> int:
    if value < 1 or whole % value:
        raise ValueError
    return value


def _address(text: str) -> str:
    if not text.startswith("tcp://"):
        raise ValueError
    return text
