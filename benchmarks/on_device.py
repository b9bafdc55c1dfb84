"""Training through exported ExecuTorch programs: planned memory, measured memory, time, and whether it equals PyTorch.

    python benchmarks/on_device.py --data DIR            # about an hour on one CPU thread; resumable
    python benchmarks/on_device.py --data DIR --quick    # one network, two methods

Each network gets a classifier of class means, and learns traffic signs from a few images, one image per step:

    program = pliant.export.executorch(network, batch, policy, …)      # gradients are held against PyTorch before it is written
    lr      = of four rates, the one with which plain PyTorch is best on the validation images
              (by accuracy; of equals, the one with the lowest loss)
    trained = pliant.export.run_device(…, steps=40, lr=lr)             # another process; memory is measured from outside
    plain   = 40 steps of torch.optim.SGD on the same parameters and images
    shaken  = the same with every input changed by 1e-6 of itself, at random, three times

The ten classes are drawn with the seed, of 43. Of each, four images train, spread over the first sixteen training images of the
file. Ten others, spread over its last twenty, are for validation: photographs of other signs. The last ten test images are
used once, when training is over; the first ten were seen while this benchmark was written.

`planned` is the planner's mutable memory: arena, gradients and weights that change. `measured` is the anonymous memory of the
process beyond that of the same process with the program loaded and idle; `resident` adds pages of files (code and frozen
weights, mapped from disk). `weights off` is the largest difference from the plain run, relative to the largest weight of each
tensor; `weights moved` is how far that run went. `PyTorch against itself` is the difference of the shaken runs from it, the
largest of the three: where it is as large, training itself magnifies rounding, and the program is not to blame.
Seconds are CPU time of one thread with ExecuTorch's portable kernels.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import tempfile
from collections.abc import Callable, Iterator
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
    "full": lambda memory: (recipes.full(), False),
    "head": lambda memory: (recipes.head(), False),
    "tinytrain, int8 frozen": lambda memory: (recipes.tinytrain(memory=memory, macs=0.3, head=True), True),
}
LARGE = ("efficientnet_lite0", "mobilenet_v2")  # held against PyTorch only, in the chosen part
TASK, CLASSES = "gtsrb43_64.npz", 10
TRAINED, VALIDATED = slice(0, 16, 4), slice(-20, None, 2)  # of the training images of a class, which are in the order of signs
TESTED = slice(10, None)  # of its 20 test images
RATES = 1e-5, 1e-4, 1e-3, 1e-2
SHAKEN, SHAKES = 1e-6, 3  # relative change of the inputs, and how often

Samples = tuple[Tensor, Tensor]


def main() -> None:
    parser = record.options(__doc__, device=False)
    packed.option(parser)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    folder = packed.folder(args.data)
    torch.set_num_threads(1)
    setting = {
        **{"steps": args.steps, "seed": args.seed, "task": TASK, "classes": f"{CLASSES} of 43, drawn with the seed"},
        "images": "40 to train, 100 other signs of its training split for validation, 100 of its test split used once",
        **{"rates": list(RATES), "rate": "best of PyTorch on the validation images", "quick": args.quick},
    }
    path = record.out(args, "on_device")
    cells = record.load(path, setting)
    done = {(cell["network"], cell["method"]) for cell in cells}
    wanted = [(network, method) for method in METHODS for network in NETS if network not in LARGE or method == "tinytrain"]
    for network, method in wanted[:: len(wanted) - 1] if args.quick else wanted:
        if (network, method) not in done and method in args.methods:
            cells.append(cell(folder, network, method, args.steps, args.seed))
            cells.sort(key=lambda one: wanted.index((one["network"], one["method"])))
            record.save(path, setting, cells, table(cells))
            print(network, method, flush=True)


def cell(folder: Path, network: str, method: str, steps: int, seed: int) -> dict[str, Any]:
    file, size, memory = NETS[network]
    net, train, validation, test = task(folder, file, size, seed)
    policy, int8 = METHODS[method](memory)
    one = train[0][:1], train[1][:1]
    pieces = [(train[0][i : i + 1], train[1][i : i + 1]) for i in range(len(train[1]))]
    with tempfile.TemporaryDirectory() as place:
        facts = executorch(net, one, policy, place, int8=int8, probe=pieces)
        assert isinstance(facts, Facts)
        by_rate = {rate: validated(plain_run(net, facts, train, steps, seed, rate), validation) for rate in RATES}
        lr = max(RATES, key=lambda rate: by_rate[rate])
        for name, (x, y) in {"train": train, "test": test}.items():
            np.savez(f"{place}/{name}.npz", x=x.numpy(), y=y.numpy())
        delta = f"{place}/delta.safetensors"
        job = Job(place, f"{place}/train.npz", f"{place}/test.npz", steps=steps, lr=lr, seed=seed, out=delta, before=False)
        trained = run_device(job)
        back = copy.deepcopy(net)
        apply_delta_(back, delta)
    plain = plain_run(net, facts, train, steps, seed, lr)
    shaken = [plain_run(net, facts, shake(train, turn), steps, seed, lr) for turn in range(SHAKES)]
    names = [part.name for part in facts.trains]
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
        "weights_moved": apart(plain, net, names),
        "weights_off": apart(back, plain, names),
        "pytorch_off": [apart(other, plain, names) for other in shaken],
        "lr": lr,
        "validation": by_rate,
        "before": accuracy(net, test),
        "device": trained.after,
        "pytorch": accuracy(plain, test),
        "shaken": [accuracy(other, test) for other in shaken],
        "seconds": trained.seconds,
    }


def task(folder: Path, file: str, size: int, seed: int) -> tuple[nn.Module, Samples, Samples, Samples]:
    """The network with a classifier of class means, and images to train, to validate and to test with."""
    made = {"": lambda: models.efficientnet_lite0(pretrained=True), "mobilenetv2": lambda: _mobilenet_v2(folder / file)}
    make = made.get(Path(file).name.partition("_")[0], lambda: models.load(str(packed.need(folder / file))))
    net: nn.Module = make().eval()
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in net.pixel_stats)  # type: ignore[union-attr]
    found = images.packed(packed.need(folder / TASK), 64)
    assert found.split is not None
    sets: tuple[list[Samples], ...] = [], [], []
    for new, label in enumerate(np.random.default_rng(seed).choice(len(found.classes), CLASSES, replace=False).tolist()):
        ours, theirs = (found.images[(found.labels == label) & (found.split == kind)] for kind in (0, 2))
        for into, pixels in zip(sets, (ours[TRAINED], ours[VALIDATED], theirs[TESTED]), strict=True):
            scaled = F.interpolate(pixels / 255, size=(size, size), mode="bilinear") if size != 64 else pixels / 255
            into.append(((scaled - mean) / std, torch.full((len(pixels),), new)))
    train, validation, test = (_joined(part) for part in sets)
    x, y = train
    with torch.no_grad():
        features = torch.cat([net.embed(x[i : i + 8]) for i in range(0, len(x), 8)])  # type: ignore[operator]
    return with_means(net, features, y), train, validation, test


def _joined(parts: list[Samples]) -> Samples:
    x, y = zip(*parts, strict=True)
    return torch.cat(x).contiguous(), torch.cat(y)


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


def plain_run(net: nn.Module, facts: Facts, train: Samples, steps: int, seed: int, lr: float) -> nn.Module:
    """The network after the same steps in plain PyTorch: the same images in the same order. Of a sliced parameter, the slice
    moves."""
    model = copy.deepcopy(net)
    params = dict(model.named_parameters())
    chosen = {one.name: one for one in facts.trains}
    for name, param in params.items():
        param.requires_grad_(name in chosen)
    x, y = train
    order = [i for epoch in range(-(-steps // len(y))) for i in np.random.default_rng([seed, epoch]).permutation(len(y))]
    for i in order[:steps]:
        value = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        for one, grad in zip(chosen.values(), torch.autograd.grad(value, [params[name] for name in chosen]), strict=True):
            with torch.no_grad():
                if one.dim is None or one.index is None:
                    params[one.name] -= lr * grad
                else:
                    index = torch.tensor(one.index)
                    params[one.name].index_add_(one.dim, index, -lr * grad.index_select(one.dim, index))
    return model


def shake(samples: Samples, turn: int) -> Samples:
    """The same images, each value changed by about a millionth of itself."""
    x, y = samples
    return x * (1 + SHAKEN * torch.randn(x.shape, generator=torch.Generator().manual_seed(turn))), y


@torch.no_grad()
def apart(net: nn.Module, plain: nn.Module, names: list[str]) -> float:
    """The largest difference of a weight of two networks, relative to the largest weight of its tensor."""
    a, b = dict(net.named_parameters()), dict(plain.named_parameters())
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in names)


@torch.no_grad()
def validated(net: nn.Module, samples: Samples) -> tuple[float, float]:
    """Accuracy, and the loss with a minus: of two, the larger is better."""
    losses = [float(F.cross_entropy(net(x), y)) for x, y in _parts(samples)]
    return accuracy(net, samples), -sum(losses) / len(losses)


@torch.no_grad()
def accuracy(net: nn.Module, test: Samples) -> float:
    return sum(int((net(x).argmax(1) == y).sum()) for x, y in _parts(test)) / len(test[1])


def _parts(samples: Samples) -> Iterator[Samples]:
    return zip(*(part.split(20) for part in samples), strict=True)  # type: ignore[return-value]


def table(cells: list[dict[str, Any]]) -> str:
    head = (
        *("network", "method", "asked", "planned bytes", "measured", "resident", "program", "graphs", "trained tensors"),
        *("MACs of full", "rate", "gradients off", "weights moved", "weights off", "PyTorch against itself", "accuracy before"),
        *("device", "PyTorch", "PyTorch, inputs changed", "s per step"),
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for c in cells:
        row = (
            c["network"],
            c["method"],
            c["asked"] or "–",
            *(f"{c[name]:,}" if c[name] is not None else "–" for name in ("planned", "measured", "resident", "program")),
            *(c["graphs"], c["tensors"], f"{c['macs']:.2f}", f"{c['lr']:g}"),
            *(f"{value:.0e}" for value in (c["gradients_off"], c["weights_moved"], c["weights_off"], max(c["pytorch_off"]))),
            *(f"{100 * c[name]:.1f}" for name in ("before", "device", "pytorch")),
            *(f"{100 * min(c['shaken']):.1f}–{100 * max(c['shaken']):.1f}", f"{c['seconds']:.2f}"),
        )
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
