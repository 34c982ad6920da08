"""`ft-accelerate test`: train in replica groups, kill one, and compare what came out.

Two short trainings: one without a fault, one in which a replica group is killed in the middle, is
started again and heals. Both must end on the same step, and all groups of a training with the same
weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ft_accelerate.options import environment_of_another_job
from ft_core.environment import Supervision

SCRIPT = Path(__file__)
"""Run as a script, this file is what is trained."""
TIMEOUT_S = 300.0
EPOCHS = 4
EXAMPLES = 256

Result = dict[str, Any]


def main(argv: list[str]) -> int:
    """Run it, print a table; 0 if all is as it should be."""
    parser = argparse.ArgumentParser("ft-accelerate test", description=__doc__)
    parser.add_argument("--config_file", default=None, help="A config file to take options from.")
    parser.add_argument("--num_processes", type=int, default=2, help="How many replica groups.")
    args = parser.parse_args(argv)
    if args.num_processes < 2:
        raise ValueError(
            f"--num_processes must be at least 2, got {args.num_processes}: a replica group that "
            "is alone has no other to heal from"
        )
    rows, problems = [], []
    for title, kill_group in (("no fault", -1), ("one killed", args.num_processes - 1)):
        print(f"ft-accelerate test: {title} ...", flush=True)
        start = time.monotonic()
        results, problem = _train(args, kill_group)
        rows.append((title, results, time.monotonic() - start))
        problems += [
            f"{title}: {text}" for text in [problem, *_judge(results, args, kill_group)] if text
        ]
    _table(rows)
    for text in problems:
        print(f"ft-accelerate test: {text}", file=sys.stderr)
    if problems:
        return 1
    print("Test is a success! You are ready for your fault-tolerant training!")
    return 0


def _train(args: argparse.Namespace, kill_group: int) -> tuple[list[Result], str]:
    """The groups' results, and what went wrong with the launcher."""
    with tempfile.TemporaryDirectory(prefix="ft-accelerate-test-") as folder:
        command = [sys.executable, "-m", "ft_accelerate.launch.command", "launch"]
        if args.config_file:
            command += ["--config_file", args.config_file]
        command += [
            "--num_processes",
            str(args.num_processes),
            "--num_machines",
            "1",
            "--fault_tolerance_group_size",
            "1",
            "--fault_tolerance_min_replicas",
            str(args.num_processes),
            str(SCRIPT),
            folder,
            str(kill_group),
            "1",
        ]
        env = environment_of_another_job()  # one that is under way keeps its lighthouse to itself
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return [], f"not done after {TIMEOUT_S:g} s"
        problem = ""
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            problem = f"the launcher ended with exit code {done.returncode}"
        return [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))], problem


def _judge(results: list[Result], args: argparse.Namespace, kill_group: int) -> list[str]:
    """What is wrong with them."""
    if len(results) != args.num_processes:
        return [f"{len(results)} of {args.num_processes} replica groups came to the end"]
    wrong = []
    for name in ("weights", "steps", "loss"):
        values = {result[name] for result in results}
        if len(values) > 1:
            wrong.append(f"the replica groups differ in their {name}: {sorted(values)}")
    lives = [result["lives"] for result in results]
    expected = [2 if group == kill_group else 1 for group in range(args.num_processes)]
    if lives != expected:
        wrong.append(f"processes were started {lives} times, where {expected} was meant")
    return wrong


def _table(rows: list[tuple[str, list[Result], float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("training", "replica group", "started", "steps", "loss", "weights", "seconds")
    for title, results, wall_s in rows:
        for result in results:
            table.add_row(
                title,
                str(result["group"]),
                str(result["lives"]),
                str(result["steps"]),
                f"{result['loss']:.6f}",
                result["weights"],
                f"{wall_s:.1f}",
            )
    Console().print(table)


def train(folder: Path, kill_group: int, kill_epoch: int) -> None:
    """What is trained: a raw Accelerate loop, as users write them.

    Only the ends are the test's: one process ends itself in the middle of an epoch, and the weights
    are hashed when all is done.
    """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator()
    torch.manual_seed(0)
    inputs = torch.randn(EXAMPLES, 16)
    targets = inputs @ torch.randn(16, 4)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group, life = accelerator.process_index, Supervision.read().restarts
    total, mean = 0, 0.0
    for epoch in range(EPOCHS):
        for batch, (x, y) in enumerate(loader):
            if (group, life, epoch, batch) == (kill_group, 0, kill_epoch, len(loader) // 2):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += 1
        mean = float(accelerator.gather(loss.detach().reshape(1)).mean())
    digest = hashlib.sha256()
    for _, tensor in sorted(accelerator.unwrap_model(model).state_dict().items()):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    found = {
        "group": group,
        "steps": total,
        "loss": mean,
        "lives": life + 1,
        "weights": digest.hexdigest()[:12],
        "local_main": accelerator.is_local_main_process,
    }
    (folder / f"{group}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
