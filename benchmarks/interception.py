"""What it takes of Python to keep less for a function that clips: the lean engine against the least that PyTorch has for it.

    python benchmarks/interception.py                  # half a minute on one CPU thread
    python benchmarks/interception.py --device cuda    # the host of a GPU that waits for launches

Chains of depthwise 1×1 convolutions on tiny images, all of them trained, so that what a step takes is launching: without
anything between them, with ReLU6 in place as PyTorch runs it (which copies what it clips), with ReLU6 on the lean engine (which
does not), and as a `torch.autograd.Function` that keeps its result and does nothing else: no rule could take less. All four in
turn; of each the median, by function. CPU: CPU time of one thread; CUDA: synchronised wall time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn
from training import clock

from pliant.engine.lean.lean import Lean
from pliant.engine.lean.places import Places

CHANNELS, PIXELS, IMAGES = 8, 4, 2
_clip_ = torch.ops.aten.hardtanh_.default
_between = torch.ops.aten.hardtanh_backward.default


class Clip(torch.autograd.Function):
    """Clips in place and keeps the result: what goes back passes where that lies between the bounds."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(values)
        ctx.save_for_backward(values)
        return _clip_(values, 0.0, 6.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _between(grad, *ctx.saved_tensors, 0.0, 6.0)


class ByFunction(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Clip.apply(values)


def chain(count: int, between: Callable[[], nn.Module] | None) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers.append(nn.Conv2d(CHANNELS, CHANNELS, 1, groups=CHANNELS))
        if between is not None:
            layers.append(between())
    return nn.Sequential(*layers, nn.Conv2d(CHANNELS, CHANNELS, 1))


def passes(model: nn.Module, images: torch.Tensor, lean: bool) -> Callable[[], tuple[float, float]]:
    places = Places(model) if lean else None
    device = images.device.type

    def once() -> tuple[float, float]:
        begun = clock(device)
        with Lean(places=places, choice=0) if places is not None else nullcontext():
            value = model(images).sum()
        forward = clock(device)
        value.backward()
        return forward - begun, clock(device) - forward

    return once


def cells(setting: dict[str, Any]) -> list[dict[str, Any]]:
    device, count = setting["device"], setting["functions"]
    torch.manual_seed(0)
    images = torch.randn(IMAGES, CHANNELS, PIXELS, PIXELS, device=device)
    relu6 = chain(count, lambda: nn.ReLU6(inplace=True)).to(device)
    ways = {
        "nothing between": passes(chain(count, None).to(device), images, lean=False),
        "ReLU6": passes(relu6, images, lean=False),
        "ReLU6, lean": passes(relu6, images, lean=True),
        "ReLU6 as a Function": passes(chain(count, ByFunction).to(device), images, lean=False),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(setting["repeats"] + 10):
        for way, once in ways.items():
            seconds = once()
            if turn >= 10:
                taken[way].append(seconds)
    return [
        {
            "way": way,
            "forward": statistics.median(forward for forward, _ in several) / count,
            "backward": statistics.median(backward for _, backward in several) / count,
        }
        for way, several in taken.items()
    ]


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: microseconds of a convolution and the function behind it; in brackets what the function adds to that."""
    lines = ["| a convolution and | forward µs | backward µs | both |", "|---|---|---|---|"]
    bare = cells[0]
    for c in cells:
        both = {part: c["forward"] + c["backward"] if part == "both" else c[part] for part in ("forward", "backward", "both")}
        less = {part: bare["forward"] + bare["backward"] if part == "both" else bare[part] for part in both}
        row = (
            f"{1e6 * both[part]:.0f}" + (f" (+{1e6 * (both[part] - less[part]):.0f})" if c is not bare else "") for part in both
        )
        lines.append(f"| {c['way']} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = {"device": args.device, "functions": 20, "repeats": 30 if args.quick else 300}
    out = args.out or record.place("interception_quick" if args.quick else "interception", args.device)
    found = cells(setting)
    record.save(out, setting, found, table(found))
    print(table(found))


if __name__ == "__main__":
    main()
