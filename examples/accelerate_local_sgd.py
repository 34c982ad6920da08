"""accelerate launch --num_processes 3 --use_fault_tolerance examples/accelerate_local_sgd.py

Digits with LocalSGD: three replica groups train on their own and average every eight steps. Kill
any process: the others average without it, and it comes back after the next outer step. With
`ft_accelerate.DiLoCo` in its place (made once, before the epochs) an outer optimizer takes a step
each time.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate import LocalSGD

EPOCHS = 20

accelerator = Accelerator()
set_seed(42)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for epoch in range(EPOCHS):
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

accelerator.end_training()
