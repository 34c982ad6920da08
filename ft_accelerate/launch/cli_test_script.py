"""What `ft-accelerate test` trains: a raw Accelerate loop, as users write them.

Only the end of each epoch is the test's: the process says where it is, one of them ends itself in
the middle, and the weights are hashed when all is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
EXAMPLES = 256


def main(folder: Path, kill_group: int, kill_epoch: int) -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    inputs = torch.randn(EXAMPLES, 16)
    targets = inputs @ torch.randn(16, 4)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group, life = accelerator.process_index, _life()
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
        "group": group, "steps": total, "loss": mean, "lives": life + 1,
        "weights": digest.hexdigest()[:12], "local_main": accelerator.is_local_main_process,
    }  # fmt: skip
    (folder / f"{group}.json").write_text(json.dumps(found))


def _life() -> int:
    from ft_accelerate.plugin.options import Supervision

    return Supervision.from_env().restarts


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
