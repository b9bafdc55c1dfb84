"""Training on a machine that may be taken away: every step after a restart is the one that would have come next.

    python examples/preemptible.py --state run.pt     # start it again and again, until it says "done"

SIGTERM and Ctrl-C save after the current step. A machine that disappears without a word loses at most `--every` steps.
"""

import argparse
import signal
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pliant import Session, recipes


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on the step alone, so a resumed run sees the same batches."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, x.cumsum(1).sin()


def run(state: Path, steps: int, every: int, taken_at: int | None = None) -> bool:
    """Train up to `steps`, or until the machine is taken away; returns whether it is done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stop = False

    def on_signal(*_: object) -> None:
        nonlocal stop
        stop = True

    before = {which: signal.signal(which, on_signal) for which in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Session(model, optimizer, loss, recipes.pliant(macs=0.7), total_steps=steps) as session:
            if state.exists():
                session.load(state)  # model, optimizer, selection, measurements, random states
                print(f"goes on after step {session.progress.step}")
            while session.progress.step < steps and not stop:
                value = session.step(batch_of(session.progress.step))
                if session.progress.step == taken_at:
                    signal.raise_signal(signal.SIGTERM)
                if stop or session.progress.step % every == 0 or session.progress.step == steps:
                    session.save(state)  # written aside, then renamed: never half a file
            print(f"{'saved at' if stop else 'done at'} step {session.progress.step}, loss {value:.4f}")
        return not stop
    finally:
        for which, old in before.items():
            signal.signal(which, old)


parser = argparse.ArgumentParser()
parser.add_argument("--state", type=Path, default=Path("run.pt"))
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--every", type=int, default=100)
parser.add_argument("--quick", action="store_true", help="a short run that is taken away once")
options = parser.parse_args()

if options.quick:
    with tempfile.TemporaryDirectory() as place:
        for taken_at in (15, None):
            run(Path(place, "run.pt"), 40, 10, taken_at)
else:
    run(options.state, options.steps, options.every)
