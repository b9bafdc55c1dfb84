"""Two processes with DDP on a CPU: `torchrun --nproc-per-node 2 examples/ddp.py`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pliant import Session, recipes


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights everywhere; DDP would also send them
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp = DistributedDataParallel(model, find_unused_parameters=True)

torch.manual_seed(dist.get_rank())  # other batches
with Session(ddp, optimizer, loss, recipes.pliant(macs=0.7)) as session:
    for _ in range(20):
        session.step((torch.randn(16, 16), torch.randint(0, 4, (16,))))
    print(f"process {dist.get_rank()} chose: {', '.join(unit.name for unit in session.selection.units)}\n", end="", flush=True)
dist.destroy_process_group()
