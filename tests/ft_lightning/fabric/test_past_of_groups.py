"""A loop over `range`, in replica groups of several processes: all of one run through their past together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_lightning.fabric.test_averaged_gradients import weights

pytestmark = pytest.mark.process

SCRIPT = """
import hashlib, os, signal, sys, time
from pathlib import Path
import torch
from lightning.fabric import Fabric
from ft_lightning.fabric import {strategy}

torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=4, strategy={strategy}(min_replicas=2, {options}))
fabric.launch()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
net = fabric.setup_module(net)
adam = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), 0.01))
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4))
first, rank, waits = os.environ["FT_RESTARTS"] == "0", fabric.global_rank, Path(sys.argv[1], "waits")

class Late:
    def state_dict(self):
        return {{}}

    def load_state_dict(self, state):
        while rank == 3 and not waits.exists():
            time.sleep(0.01)

fabric.strategy.register("late", Late())
group, barrier = fabric.strategy._in_group, fabric.strategy._in_group.barrier
if rank == 2 and not first:
    group.barrier = lambda **options: (waits.touch(), barrier(**options))
for epoch in range(4):
    for number, (batch,) in enumerate(loader):
        fabric.backward(net(batch).square().mean())
        adam.step()
        adam.zero_grad()
        if (rank, epoch, number) == (3, 2, 1) and first and "dies" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
    fabric.barrier()
tensors = [getattr(p, "to_local", lambda: p)().detach() for p in net.parameters()]
digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
Path(sys.argv[1], str(rank)).write_text(digest)
"""


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("FTDDPStrategy", "group_size=2"),
        ("FTFSDPStrategy", "num_replica_groups=2, data_parallel_size=2"),
    ],
)
def test_the_first_that_has_healed_waits_for_the_others_before_the_group_leaves(
    tmp_path: Path, strategy: str, options: str
) -> None:
    """The other ones waited for the next quorum then, and it for them, in the first collective of its past: for ever."""
    script = SCRIPT.format(strategy=strategy, options=options)
    ends = weights(tmp_path, script, 4, ["dies"])
    assert ends["killed"] == ends["whole"]
    assert ends["whole"][:2] == ends["whole"][2:]
