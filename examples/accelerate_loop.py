"""A loop of Accelerate with accumulation: `python examples/accelerate_loop.py`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pliant import recipes
from pliant.integrations.hf import PliantAccelerate


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,))), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with PliantAccelerate(accelerator, model, optimizer, loss, recipes.pliant(macs=0.7)) as pliant:
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                value = pliant.backward(batch)
                optimizer.step()
                optimizer.zero_grad()
    print("chosen:", ", ".join(unit.name for unit in pliant.session.selection.units), "loss:", round(float(value), 3))
