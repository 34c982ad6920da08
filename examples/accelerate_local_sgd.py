"""accelerate launch --num_processes 3 --use_fault_tolerance examples/accelerate_local_sgd.py

Digits with LocalSGD: three replica groups train on their own and average every eight steps. Kill any
process: the others average without it, it comes back after the next outer step, and all end with the
same weights. With `ft_accelerate.DiLoCo` in its place (made once, before the epochs) an outer optimizer
takes a step each time.
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

from ft_accelerate import LocalSGD

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
parser.add_argument("--epochs", type=int, default=200, help="one takes a fraction of a second")
epochs = parser.parse_args().epochs

accelerator = Accelerator()
set_seed(42)
print(f"process {accelerator.process_index} has pid {os.getpid()}", flush=True)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for epoch in range(epochs):
    model.train()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local:
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()

    model.eval()
    right = total = 0
    for x, y in test:
        with torch.no_grad():
            guesses = model(x).argmax(-1)
        guesses, y = accelerator.gather_for_metrics((guesses, y))
        right += int((guesses == y).sum())
        total += len(y)
    accelerator.print(f"epoch {epoch}: {right / total:.1%} of {total} digits are right")

weights = hashlib.sha256()
for value in accelerator.unwrap_model(model).state_dict().values():
    weights.update(value.cpu().numpy().tobytes())
print(f"process {accelerator.process_index}: weights {weights.hexdigest()[:16]}", flush=True)
accelerator.end_training()
