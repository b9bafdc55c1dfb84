"""Two processes with FSDP2 on a CPU: `torchrun --nproc-per-node 2 examples/fsdp.py`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from pliant import Session, measure, recipes


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def some_batch():
    return torch.randn(16, 16), torch.randint(0, 4, (16,))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
profile = measure.timed(model, torch.optim.AdamW(model.parameters()), loss, some_batch())  # before parameters are spread
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # afterwards

torch.manual_seed(dist.get_rank())
with Session(model, optimizer, loss, recipes.pliant(time=1.0), profile=profile) as session:
    for _ in range(20):
        session.step(some_batch())
    print(f"process {dist.get_rank()} chose: {', '.join(unit.name for unit in session.selection.units)}\n", end="", flush=True)
dist.destroy_process_group()
