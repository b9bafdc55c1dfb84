"""A device on a battery: what a step may take changes by the hour, while the run goes on.

python examples/battery.py             # by the clock of this machine
python examples/battery.py --quick     # an hour passes every ten steps
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from pliant import Budget, Session, recipes

NIGHT, EVENING, DAY = 1.0, 0.8, 0.6  # shares of a full step: at night it is plugged in


def share(hour: int) -> float:
    """What a step may take at this hour."""
    return NIGHT if hour < 6 or hour >= 22 else EVENING if hour >= 18 else DAY


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5000)
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(64, 256)
batch = x, x[:, :8].sin()
steps, hour = 60 if options.quick else options.steps, 0
now: Callable[[int], int] = (lambda step: 17 + step // 10) if options.quick else (lambda step: time.localtime().tm_hour)

with Session(model, optimizer, loss, recipes.pliant(time=share(now(0))), total_steps=steps) as session:
    for step in range(steps):
        if share(now(step)) != session.budget.time:
            session.budget = Budget(time=share(now(step)))  # the next step chooses for it
        value = session.step(batch)
        if now(step) != hour or step == 0:
            hour = now(step)
            units = f"{len(session.selection.units)} of {len(session.units)} layers"
            print(f"{hour:02d}:00 time={session.budget.time}: trains {units}, {session.selection.share():.2f} of a full step")
print(session)
