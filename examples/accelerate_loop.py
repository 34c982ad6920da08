"""accelerate launch --num_processes 3 --use_fault_tolerance examples/accelerate_loop.py

Digits with a plain Accelerate loop. The script contains nothing about fault tolerance: kill any of
the three processes while it runs, and see that the others continue, that it comes back, and that all
end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
parser.add_argument("--epochs", type=int, default=200, help="one takes a fraction of a second")
epochs = parser.parse_args().epochs

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(42)
print(f"process {accelerator.process_index} has pid {os.getpid()}", flush=True)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
ticks = epochs * len(train) // accelerator.gradient_accumulation_steps
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=ticks)
model, optimizer, train, test, scheduler = accelerator.prepare(
    model, optimizer, train, test, scheduler
)

for epoch in range(epochs):
    model.train()
    for x, y in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    right = total = 0
    for x, y in test:
        with torch.no_grad():
            guesses = model(x).argmax(-1)
        guesses, y = accelerator.gather_for_metrics((guesses, y))
        right += int((guesses == y).sum())
        total += len(y)
    accelerator.print(f"epoch {epoch}: {right / total:.1%} of {total} digits are right")

accelerator.wait_for_everyone()
state = accelerator.get_state_dict(model)  # of a sharded model whole, on the first of its processes
weights = hashlib.sha256()
for value in state.values():
    weights.update(value.cpu().numpy().tobytes())
if state:
    print(f"process {accelerator.process_index}: weights {weights.hexdigest()[:16]}", flush=True)
accelerator.end_training()
