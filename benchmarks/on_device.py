"""Training through exported ExecuTorch programs: planned memory, measured memory, time, and whether it equals PyTorch.

    python benchmarks/on_device.py --data DIR            # about forty minutes on one CPU thread; resumable
    python benchmarks/on_device.py --data DIR --quick    # one network, two methods

Each network gets a classifier of class means, and learns traffic signs from a few images, one image per step:

    program = pliant.export.executorch(network, batch, policy, …)      # gradients are held against PyTorch before it is written
    trained = pliant.export.run_device(…, steps=40)                    # another process; memory is measured from outside
    plain   = 40 steps of torch.optim.SGD on the same parameters and images

`planned` is the planner's mutable memory: arena, gradients and weights that change. `measured` is the anonymous memory of the
process beyond that of the same process with the program loaded and idle; `resident` adds pages of files (code and frozen
weights, mapped from disk). `weights off` is the largest difference from the plain run, relative to the largest weight of each
tensor. Seconds are CPU time of one thread with ExecuTorch's portable kernels.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packed
import record
import torch
import torch.nn.functional as F
from nets import MobileNetV2
from torch import Tensor, nn

from pliant import Policy, images, models, recipes
from pliant.export import Facts, Job, apply_delta_, executorch, run_device

NETS = {
    "mobilenet_v2_0.35": ("weights/mbv2_w0.35_int8.safetensors", 128, "1MB"),
    "mcunet": ("weights/mcunet_5fps_int8.safetensors", 128, "1MB"),
    "proxyless_0.3": ("weights/proxyless_w0.3_int8.safetensors", 128, "1MB"),
    "efficientnet_lite0": ("", 64, "4MB"),
    "mobilenet_v2": ("weights/mobilenetv2_fp16.safetensors", 64, "4MB"),
}
METHODS: dict[str, Callable[[str], tuple[Policy, bool]]] = {
    "tinytrain": lambda memory: (recipes.tinytrain(memory=memory, macs=0.3, head=True), False),
    "head": lambda memory: (recipes.head(), False),
    "full": lambda memory: (recipes.full(), False),
    "tinytrain, int8 frozen": lambda memory: (recipes.tinytrain(memory=memory, macs=0.3, head=True), True),
}
LARGE = ("efficientnet_lite0", "mobilenet_v2")  # held against PyTorch only, in the chosen part
TASK, CLASSES, TESTED, LR = "fewshot/gtsrb_64.npz", 5, 10, 5e-4


def main() -> None:
    parser = record.options(__doc__, device=False)
    packed.option(parser)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = packed.folder(args.data)
    torch.set_num_threads(1)
    setting = {"steps": args.steps, "seed": args.seed, "task": TASK, "classes": CLASSES, "lr": LR, "quick": args.quick}
    path = record.out(args, "on_device")
    cells = record.load(path, setting)
    done = {(cell["network"], cell["method"]) for cell in cells}
    wanted = [(network, method) for method in METHODS for network in NETS if network not in LARGE or method == "tinytrain"]
    for network, method in wanted[:: len(wanted) - 1] if args.quick else wanted:
        if (network, method) not in done:
            cells.append(cell(folder, network, method, args.steps, args.seed))
            cells.sort(key=lambda one: wanted.index((one["network"], one["method"])))
            record.save(path, setting, cells, table(cells))
            print(network, method, flush=True)


def cell(folder: Path, network: str, method: str, steps: int, seed: int) -> dict[str, Any]:
    file, size, memory = NETS[network]
    net, train, test = task(folder, file, size, seed)
    policy, int8 = METHODS[method](memory)
    one = train[0][:1], train[1][:1]
    pieces = [(train[0][i : i + 1], train[1][i : i + 1]) for i in range(len(train[1]))]
    with tempfile.TemporaryDirectory() as place:
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        facts = executorch(net, one, policy, place, optimizer=optimizer, int8=int8, probe=pieces)
        assert isinstance(facts, Facts)
        for name, (x, y) in {"train": train, "test": test}.items():
            np.savez(f"{place}/{name}.npz", x=x.numpy(), y=y.numpy())
        delta = f"{place}/delta.safetensors"
        job = Job(place, f"{place}/train.npz", f"{place}/test.npz", steps=steps, seed=seed, out=delta, before=False)
        trained = run_device(job)
        back = copy.deepcopy(net)
        apply_delta_(back, delta)
    plain = plain_run(net, facts, train, steps, seed)
    off = [(a - plain[name]).abs().max() / plain[name].abs().max() for name, a in back.named_parameters() if name in plain]
    held = copy.deepcopy(net)
    held.load_state_dict(plain, strict=False)
    return {
        "network": network,
        "method": method,
        "asked": memory if policy.budget.memory is not None else None,
        "planned": facts.planned,
        "held": facts.memory["held"],
        "fullest_at": facts.memory["operator"],
        "measured": trained.anonymous,
        "resident": trained.resident,
        "program": facts.program_bytes,
        "graphs": facts.graphs,
        "pieces": facts.pieces,
        "tensors": len(facts.trains),
        "macs": facts.macs / facts.full_macs,
        "gradients_off": facts.difference,
        "weights_off": float(max(off).detach()),
        "before": accuracy(net, test),
        "device": trained.after,
        "pytorch": accuracy(held, test),
        "seconds": trained.seconds,
    }


def task(folder: Path, file: str, size: int, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The network with a classifier of class means, and images to train and to test on."""
    made = {"": lambda: models.efficientnet_lite0(pretrained=True), "mobilenetv2": lambda: _mobilenet_v2(folder / file)}
    make = made.get(Path(file).name.partition("_")[0], lambda: models.load(str(packed.need(folder / file))))
    net: nn.Module = make().eval()
    found = images.packed(packed.need(folder / TASK), 64)
    chosen = np.random.default_rng(seed).choice(len(found.classes), CLASSES, replace=False)
    train, test = [], []
    for new, label in enumerate(chosen.tolist()):
        mine = found.select(found.labels == label)
        is_test = mine.split == 2 if mine.split is not None else torch.arange(len(mine)) >= len(mine) // 2
        for into, mask, most in ((train, ~is_test, None), (test, is_test, TESTED)):
            pixels = mine.images[mask][:most].float() / 255
            pixels = F.interpolate(pixels, size=(size, size), mode="bilinear") if size != 64 else pixels
            into.append((pixels, torch.full((len(pixels),), new)))
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in net.pixel_stats)  # type: ignore[union-attr]
    sets = [tuple(torch.cat(part) for part in zip(*one, strict=True)) for one in (train, test)]
    (x, y), (u, v) = (((pixels - mean) / std, labels) for pixels, labels in sets)
    with torch.no_grad():
        features = torch.cat([net.embed(x[i : i + 8]) for i in range(0, len(x), 8)])  # type: ignore[operator]
    return with_means(net, features, y), (x.contiguous(), y), (u.contiguous(), v)


class _MobileNetV2(MobileNetV2):
    """MobileNetV2 1.0 with the interface of the small backbones."""

    pixel_stats = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def embed(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))


def _mobilenet_v2(path: Path) -> nn.Module:
    net = _MobileNetV2()
    weights = models.read_weights(packed.need(path))[0]
    net.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    return net


def with_means(net: nn.Module, features: Tensor, labels: Tensor) -> nn.Module:
    """The network with a linear classifier that takes the nearest class mean."""
    means = torch.stack([features[labels == c].mean(0) for c in range(CLASSES)])
    scale = 2.0 / torch.pdist(means).square().mean()
    head = nn.Linear(means.shape[1], CLASSES)
    with torch.no_grad():
        head.weight.copy_(scale * means)
        head.bias.copy_(-scale * means.square().sum(1) / 2)
    return Classifier(net, head).eval()


class Classifier(nn.Module):
    def __init__(self, net: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.net, self.head = net, head
        for name in ("classifier", "fc", "_fc"):  # that of another task
            if hasattr(net, name):
                setattr(net, name, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net.embed(x))  # type: ignore[operator]


def plain_run(net: nn.Module, facts: Facts, train: tuple[Tensor, Tensor], steps: int, seed: int) -> dict[str, Tensor]:
    """The same steps in plain PyTorch: the same images in the same order. Of a sliced parameter, the slice moves."""
    model = copy.deepcopy(net)
    params = dict(model.named_parameters())
    chosen = {one.name: one for one in facts.trains}
    for name, param in params.items():
        param.requires_grad_(name in chosen)
    x, y = train
    order = [i for epoch in range(-(-steps // len(y))) for i in np.random.default_rng([seed, epoch]).permutation(len(y))]
    for i in order[:steps]:
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        for one, grad in zip(chosen.values(), torch.autograd.grad(loss, [params[name] for name in chosen]), strict=True):
            with torch.no_grad():
                if one.dim is None or one.index is None:
                    params[one.name] -= LR * grad
                else:
                    index = torch.tensor(one.index)
                    params[one.name].index_add_(one.dim, index, -LR * grad.index_select(one.dim, index))
    return {name: params[name].detach() for name in chosen}


@torch.no_grad()
def accuracy(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    found = torch.cat([net(test[0][i : i + 1]).argmax(1) for i in range(len(test[1]))])
    return float((found == test[1]).float().mean())


def table(cells: list[dict[str, Any]]) -> str:
    head = (
        *("network", "method", "asked", "planned bytes", "measured", "resident", "program", "graphs", "trained tensors"),
        *("MACs of full", "gradients off", "weights off", "accuracy before", "device", "PyTorch", "s per step"),
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for c in cells:
        row = (
            c["network"],
            c["method"],
            c["asked"] or "–",
            *(f"{c[name]:,}" if c[name] is not None else "–" for name in ("planned", "measured", "resident", "program")),
            *(c["graphs"], c["tensors"], f"{c['macs']:.2f}", f"{c['gradients_off']:.0e}", f"{c['weights_off']:.0e}"),
            *(f"{100 * c[name]:.1f}" for name in ("before", "device", "pytorch")),
            f"{c['seconds']:.2f}",
        )
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
