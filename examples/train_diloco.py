# Shell 1:  lighthouse
# Shell 2:  export TORCHFT_LIGHTHOUSE=tcp://localhost:29510 NUM_REPLICA_GROUPS=2
#           REPLICA_GROUP_ID=0 python examples/train_diloco.py
# Shell 3:  the same with REPLICA_GROUP_ID=1
#
# The two communicate every 20 steps. Kill one with kill -9 and start it again: the other loses
# nothing, the new one copies the global parameters and joins at the next outer step. Streaming
# DiLoCo that sends int4: --fragments 2 --delay 3 --codec int4. (On one machine it also works
# without TORCHFT_LIGHTHOUSE.)
"""DiLoCo: replica groups train on their own and average every --sync-every steps."""

import argparse
import hashlib
import os
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from ft_core import DistributedSampler, Manager, ProcessGroupGloo
from ft_core.diloco.diloco import DiLoCo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--outer-steps", type=int, default=40)
parser.add_argument("--sync-every", type=int, default=20, help="inner steps in a window (H)")
parser.add_argument("--fragments", type=int, default=1)
parser.add_argument("--delay", type=int, default=0, help="inner steps to hide behind (tau)")
parser.add_argument("--codec", choices=["int8", "int4", "fp8"])
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--pace-s", type=float, default=0.0, help="a step takes at least this long")
args = parser.parse_args()

# ---- data: 1,797 images of 8 x 8 pixels, one shard for each replica group
group = int(os.environ.get("REPLICA_GROUP_ID", 0))
groups = int(os.environ.get("NUM_REPLICA_GROUPS", 1))
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
sampler = DistributedSampler(train, group, groups, group_rank=0, num_replicas=1, drop_last=True)
loader = torch.utils.data.DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)


def batches():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


# ---- model, and the two optimizers: the inner one steps each batch, the outer one each window
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
inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
manager = Manager(pg=ProcessGroupGloo(), use_async_quorum=False)
diloco = DiLoCo(
    manager,
    net,
    inner,
    outer,
    args.sync_every,
    fragments=args.fragments,
    fragment_sync_delay=args.delay,
    codec=args.codec,
)

# ---- training: a plain loop; only the last step of each window waits for other groups
outer_steps = 0
try:
    with diloco:
        for x, y in batches():
            began = time.perf_counter()
            inner.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            inner.step()  # counts; at the end of a window: a quorum, the average, a vote
            if manager.current_step() != outer_steps:
                outer_steps = manager.current_step()
                outcome = manager.last_outcome()  # None: healed, no vote yet
                participants = outcome.participants if outcome else manager.num_participants()
                print(
                    f"outer step {outer_steps} loss {loss.item():.3f} participants {participants}",
                    flush=True,
                )
            if outer_steps >= args.outer_steps:
                diloco.sync()  # all fragments once more: global parameters everywhere
                break
            time.sleep(max(0.0, began + args.pace_s - time.perf_counter()))
finally:
    manager.shutdown(finished=outer_steps >= args.outer_steps)

with torch.no_grad():
    net.eval()
    accuracy = (net(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
weights = hashlib.sha256(b"".join(t.numpy().tobytes() for t in net.state_dict().values()))
print(
    f"done: accuracy {accuracy:.3f}, sent {diloco.stats.bytes_sent} bytes, "
    f"weights {weights.hexdigest()[:16]}",
    flush=True,
)
