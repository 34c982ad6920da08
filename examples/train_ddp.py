# Shell 1:  lighthouse
# Shell 2:  export TORCHFT_LIGHTHOUSE=tcp://localhost:29510 NUM_REPLICA_GROUPS=2
#           REPLICA_GROUP_ID=0 torchrun --nproc_per_node 1 --master_port 29600 examples/train_ddp.py
# Shell 3:  the same with REPLICA_GROUP_ID=1 and --master_port 29601
#
# Kill one with Ctrl-\ or kill -9 and start it again: the other continues, the new one copies its
# state and joins. (On one machine it also works without torchrun and TORCHFT_LIGHTHOUSE.)
"""Fault-tolerant data-parallel training of a small convolutional network on handwritten digits."""

import argparse
import hashlib
import os
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from ft_core import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--spares", type=int, default=0, help="so many of the groups are hot spares")
parser.add_argument("--pace-s", type=float, default=0.0, help="a step takes at least this long")
args = parser.parse_args()

# ---- data: 1,797 images of 8 x 8 pixels, one shard a replica group, none for a spare
group = int(os.environ.get("REPLICA_GROUP_ID", 0))
shares = int(os.environ.get("NUM_REPLICA_GROUPS", 1)) - args.spares  # of the data
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
share = min(group, shares - 1)
sampler = DistributedSampler(train, share, shares, group_rank=0, num_replicas=1, drop_last=True)
batches_an_epoch = sampler.num_samples // args.batch_size


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step follow from its number: a discarded step's are not lost."""
    epoch, number = divmod(step, batches_an_epoch)
    sampler.set_epoch(epoch)
    chosen = list(sampler)[number * args.batch_size : (number + 1) * args.batch_size]
    return images[chosen], labels[chosen]


# ---- model; replica groups may start with different weights: the manager makes them equal
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 16, 10),
)


def state_dict() -> dict:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def load_state_dict(state: dict) -> None:
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    use_async_quorum=args.spares == 0,
    spares=args.spares,
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))

# ---- training
try:
    while manager.current_step() < args.steps:
        began = time.perf_counter()
        optimizer.zero_grad()  # begins a step: joins a quorum
        step = manager.current_step()
        if args.spares and (mine := manager.data_share()) not in (None, share):
            share = mine  # until then this spare has computed for nothing, to be current
            sampler.take_share(share)
            print(f"step {step}: takes over share {share}", flush=True)
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # gradients are averaged meanwhile
        optimizer.step()  # votes; updates the parameters if all voted yes
        if optimizer.step_was_skipped:
            print(f"step {step} discarded: {manager.last_outcome().reason}", flush=True)
        elif step % 10 == 0:
            participants = manager.last_outcome().participants
            print(f"step {step} loss {loss.item():.3f} participants {participants}", flush=True)
        time.sleep(max(0.0, began + args.pace_s - time.perf_counter()))
finally:
    manager.shutdown(finished=manager.current_step() >= args.steps)

with torch.no_grad():
    net.eval()
    accuracy = (net(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
weights = hashlib.sha256(b"".join(t.numpy().tobytes() for t in net.state_dict().values()))
print(f"done: accuracy {accuracy:.3f}, weights {weights.hexdigest()[:16]}", flush=True)
