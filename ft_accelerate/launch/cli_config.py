"""`ft-accelerate config`: the questionnaire, or one command line with all the answers.

Without a flag it asks on the terminal. With one (other than `--config_file`) it asks nothing:
what is not said keeps its default. A config file that is there keeps all that it says, and gets
the section; else a new one is written.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ft_accelerate.launch.launch_hooks import add_flags, problem
from ft_accelerate.plugin.config import SECTION, SWITCH, argument_name, layout, read_section
from ft_accelerate.plugin.options import field_names

_HARDWARE = ("num_processes", "num_machines", "machine_rank", "main_process_ip",
             "main_process_port", "mixed_precision", "cpu")  # fmt: skip


def main(argv: list[str]) -> int:
    """Write the config file; returns the exit code. Raises ValueError for a wrong answer."""
    from accelerate.commands.config import config as stock
    from accelerate.commands.config import config_args

    parser = _parser()
    args = parser.parse_args(argv)
    path = args.config_file or config_args.default_config_file
    there = os.path.isfile(path)
    if problem():
        raise ValueError(problem())
    answers = {
        name: getattr(args, name)
        for name in (*_HARDWARE, SWITCH, *map(argument_name, field_names()))
        if getattr(args, name) is not None
    }
    if there:
        config = config_args.load_config_from_file(path)
        if not hasattr(config, SECTION):
            raise ValueError(f"{path} is for Amazon SageMaker, where there is no fault tolerance")
    if answers:
        config = _answered(config if there else _new(config_args, answers), answers)
    elif there:
        from ft_accelerate.plugin.questions import ask_after

        print(f"Adding to the configuration at {path}.")
        config = ask_after(config)
    else:
        config = stock.get_user_input()
    _save(config, path)
    print(f"accelerate configuration saved at {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    from accelerate.commands.utils import CustomArgumentParser

    parser: argparse.ArgumentParser = CustomArgumentParser(
        "ft-accelerate config", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument(
        "--config_file", default=None, help="Where the file is; default: Accelerate's own place."
    )
    hardware = parser.add_argument_group("Hardware Selection Arguments")
    for name, kind, text in (
        ("num_processes", int, "The total number of processes, over all machines."),
        ("num_machines", int, "The total number of machines."),
        ("machine_rank", int, "The rank of this machine."),
        ("main_process_ip", str, "The address of the machine of rank 0."),
        ("main_process_port", int, "The port to use on the machine of rank 0."),
    ):
        hardware.add_argument(f"--{name}", type=kind, default=None, help=text)
    hardware.add_argument(
        "--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"],
        help="Whether to use mixed precision.",
    )  # fmt: skip
    hardware.add_argument("--cpu", default=None, action="store_true", help="Train on the CPU.")
    add_flags(parser)
    return parser


def _new(config_args: Any, answers: dict[str, Any]) -> Any:
    """A configuration from Accelerate's defaults."""
    processes = answers.get("num_processes", 1)
    on_cpu = bool(answers.get("cpu"))
    kind = "NO" if processes == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    return config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type=kind,
        mixed_precision="no",
        use_cpu=on_cpu,
        debug=False,
        num_processes=processes,
    )


def _answered(config: Any, answers: dict[str, Any]) -> Any:
    for name in _HARDWARE:
        if name in answers:
            setattr(config, "use_cpu" if name == "cpu" else name, answers[name])
    section = dict(getattr(config, SECTION) or {})
    section.setdefault(SWITCH, True)
    section.update({k: v for k, v in answers.items() if k not in _HARDWARE})
    setattr(config, SECTION, read_section(section))
    layout(  # says what does not fit together
        num_processes=max(1, config.num_processes),
        num_machines=config.num_machines,
        machine_rank=config.machine_rank,
        group_size=section.get(argument_name("group_size"), 0),
        num_replica_groups=section.get(argument_name("num_replica_groups")),
        replica_group_id=section.get(argument_name("replica_group_id")),
    )
    return config


def _save(config: Any, path: str) -> None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    if path.endswith(".json"):
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
