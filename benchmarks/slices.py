"""What a quarter of a layer's channels costs: the time of its weight gradient, and the bytes of gradient and optimizer state.

    python benchmarks/slices.py        # half a minute on one CPU thread

Backward passes without an input gradient, over a layer by itself: the whole weight by plain autograd against the first quarter
of its output or input channels as a slice. CPU time of one thread, the fastest of several, both sides taking turns. State is
that of SGD with momentum.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn
from training import clock

from pliant import Part
from pliant.engine.slices.slices import Sliced, Slices

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv 3×3, 64 → 64, 56²": (nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 56, 56)),
    "conv 3×3, 256 → 256, 14²": (nn.Conv2d(256, 256, 3, padding=1, bias=False), (8, 256, 14, 14)),
    "conv 1×1, 24 → 144, 56²": (nn.Conv2d(24, 144, 1, bias=False), (8, 24, 56, 56)),
    "conv 1×1, 96 → 576, 14²": (nn.Conv2d(96, 576, 1, bias=False), (32, 96, 14, 14)),
    "conv 1×1, 320 → 1280, 7²": (nn.Conv2d(320, 1280, 1, bias=False), (32, 320, 7, 7)),
    "depthwise 3×3, 144, 56²": (nn.Conv2d(144, 144, 3, padding=1, groups=144, bias=False), (8, 144, 56, 56)),
    "linear, 384 → 1536": (nn.Linear(384, 1536, bias=False), (512, 384)),
}


def run(layer: nn.Module, inputs: torch.Tensor, slices: Slices | None) -> tuple[float, torch.optim.Optimizer]:
    """Seconds of backward; a step follows, so that there is state to look at."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    if slices is None:
        out = layer(inputs)
    else:
        with Sliced(slices):
            out = layer(inputs)
    grad = torch.ones_like(out)
    start = clock("cpu")
    out.backward(grad)
    seconds = clock("cpu") - start
    if slices is None:
        optimizer.step()
        layer.zero_grad()
    else:
        with slices.swapped_in(optimizer):
            optimizer.step()
        slices.zero_grad()
    return seconds, optimizer


def cell(name: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    inputs, weight = torch.randn(shape), layer.weight
    dims = {"out": 0, "in": 1} if weight.shape[1] > 1 else {"out": 0}
    taken: dict[str, list[float]] = {"whole": [], **{axis: [] for axis in dims}}
    state = {}
    for _ in range(repeats):
        for way in taken:
            weight.requires_grad_(way == "whole")
            slices = None
            if way != "whole":
                dim = dims[way]
                slices = Slices({"weight": weight}, [Part("weight", dim, tuple(range(weight.shape[dim] // 4)))])
            seconds, optimizer = run(layer, inputs, slices)
            taken[way].append(seconds)
            held = optimizer.state[weight] if slices is None else slices.state_dict()["weight"]["state"]
            state[way] = 2 * sum(t.numel() * t.element_size() for t in held.values() if isinstance(t, torch.Tensor))
    return {"layer": name, "seconds": {way: min(t) for way, t in taken.items()}, "gradient_and_state": state}


def table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| layer | dW, whole | a quarter of the outputs | of the inputs | gradient + state of a quarter |",
        "|---|---|---|---|---|",
    ]
    for c in cells:
        whole = c["seconds"]["whole"]
        share = [f"{c['seconds'][axis] / whole:.2f}×" if axis in c["seconds"] else "" for axis in ("out", "in")]
        size = max(c["gradient_and_state"][axis] for axis in c["seconds"] if axis != "whole") / c["gradient_and_state"]["whole"]
        lines.append(f"| {c['layer']} | {whole * 1e3:.1f} ms | {share[0]} | {share[1]} | {size:.3f}× |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 3 if args.quick else args.repeats
    cells = [cell(name, repeats) for name in LAYERS]
    out = args.out or record.place("slices_quick" if args.quick else "slices", "cpu")
    record.save(out, {"device": "cpu", "repeats": repeats}, cells, table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
