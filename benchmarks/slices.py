"""What a quarter of a layer's channels costs: the time of its weight gradient, and the bytes of gradient and optimizer state.

    python benchmarks/slices.py           # half a minute on one CPU thread
    python benchmarks/slices.py --quick   # fewer repeats

A model of one layer. Trained are the whole weight in plain PyTorch, or the first quarter of its output or input channels by a
session. What is timed, in turn, by the CPU time of one thread (the fastest counts):

    session.before_step(inputs); output = layer(inputs)
    start clock; output.backward(gradient); stop clock
    optimizer.step()                                        # SGD with momentum, whose state is counted

No gradient of the input is computed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
from collections.abc import Collection
from typing import Any

import record
import torch
from meter import state_bytes, tensor_bytes
from torch import nn
from training import seconds_of, sgd

from pliant import Part, Policy, Session, Unit, measure, score, solve

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv 3×3, 64 → 64, 56²": (nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 56, 56)),
    "conv 3×3, 256 → 256, 14²": (nn.Conv2d(256, 256, 3, padding=1, bias=False), (8, 256, 14, 14)),
    "conv 1×1, 24 → 144, 56²": (nn.Conv2d(24, 144, 1, bias=False), (8, 24, 56, 56)),
    "conv 1×1, 96 → 576, 14²": (nn.Conv2d(96, 576, 1, bias=False), (32, 96, 14, 14)),
    "conv 1×1, 320 → 1280, 7²": (nn.Conv2d(320, 1280, 1, bias=False), (32, 320, 7, 7)),
    "depthwise 3×3, 144, 56²": (nn.Conv2d(144, 144, 3, padding=1, groups=144, bias=False), (8, 144, 56, 56)),
    "linear, 384 → 1536": (nn.Linear(384, 1536, bias=False), (512, 384)),
}


def quarter(model: nn.Module, chosen: Collection[str], dim: int = 0) -> Policy:
    """Trains the first quarter of the channels of each chosen convolution and linear layer, and other chosen tensors whole."""
    layers = {name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.weight.shape[dim] >= 4}
    parts = []
    for name, param in model.named_parameters():
        if name in chosen:
            layer, _, kind = name.rpartition(".")
            sliced = layer in layers and name.removesuffix(kind) + "weight" in chosen
            parts.append(Part(name, dim, tuple(range(param.shape[dim] // 4))) if sliced else Part(name))
    made = tuple(Unit(part.param, (part,)) for part in parts)
    name = "a quarter of the channels"
    return Policy(lambda graph: made, score.nearness(), measure.counted, solve.fixed("*"), head=False, name=name)


class Way:
    """One way to train a copy of a layer: whole, or a quarter of the channels along a dimension."""

    def __init__(self, layer: nn.Module, inputs: torch.Tensor, dim: int | None) -> None:
        self.layer, self.inputs = copy.deepcopy(layer), inputs
        self.optimizer = sgd(self.layer)
        self.session: Session | None = None
        if dim is not None:
            policy = quarter(self.layer, ("weight",), dim)
            self.session = Session(self.layer, self.optimizer, _sum, policy, engine="plain", undo=False)
        self.seconds: list[float] = []

    def step(self) -> None:
        """One step; the seconds of its backward pass are kept."""
        self.optimizer.zero_grad()
        if self.session is not None:
            self.session.before_step(self.inputs)
        output = self.layer(self.inputs)
        gradient = torch.ones_like(output)
        self.seconds.append(seconds_of(lambda: output.backward(gradient), "cpu"))
        self.optimizer.step()

    def gradient_and_state(self) -> int:
        """Bytes. The gradient is as large as the momentum."""
        sliced = self.session.state_dict()["slices"] if self.session is not None else {}
        return 2 * (state_bytes(self.optimizer) + tensor_bytes(sliced))


def _sum(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def cell(name: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    inputs = torch.randn(shape)
    dims = {"whole": None, "out": 0, "in": 1} if layer.weight.shape[1] > 1 else {"whole": None, "out": 0}
    ways = {way: Way(layer, inputs, dim) for way, dim in dims.items()}
    for _ in range(repeats):
        for way in ways.values():
            way.step()
    sizes = {name: way.gradient_and_state() for name, way in ways.items()}
    return {"layer": name, "seconds": {name: min(way.seconds) for name, way in ways.items()}, "gradient_and_state": sizes}


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of the whole weight gradient; a quarter as a share of that."""
    lines = [
        "| layer | whole weight gradient | quarter of the outputs | quarter of the inputs | gradient + state of a quarter |",
        "|---|---|---|---|---|",
    ]
    for c in cells:
        whole = c["seconds"]["whole"]
        share = [f"{c['seconds'][axis] / whole:.2f}×" if axis in c["seconds"] else "" for axis in ("out", "in")]
        size = max(c["gradient_and_state"][axis] for axis in c["seconds"] if axis != "whole") / c["gradient_and_state"]["whole"]
        lines.append(f"| {c['layer']} | {whole * 1e3:.1f} ms | {share[0]} | {share[1]} | {size:.3f}× |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = record.options(__doc__, device=False)
    parser.add_argument("--repeats", type=int, default=None, help="steps of each way (15)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    repeats = args.repeats or (3 if args.quick else 15)
    cells = [cell(name, repeats) for name in LAYERS]
    record.save(record.out(args, "slices"), {"device": "cpu", "repeats": repeats}, cells, table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
