"""What an adaptation to a few images costs: memory and MACs with one image at a time, and the time of a whole task.

    python benchmarks/fewshot_costs.py --data DIR            # half an hour on one CPU thread; resumable
    python benchmarks/fewshot_costs.py --data DIR --quick    # one network, a few methods: some minutes

Methods, networks and domains are those of `fewshot.py`. With one image per pass:

    memory = peak of fewshot.adapt(…, steps=2) − peak while the same network classifies one image without gradients
    MACs   = (those of 3 steps − those of 2 steps) / images − those of two forward passes

The peak is that of all tensors (parameters do not count), reading the graph, scoring and planning included. MACs are those of
the matrix products, convolutions and biases that really ran. What is timed, by CPU time of one thread:

    start clock; choose; fewshot.adapt(network, support, policy=policy, steps=--steps); stop clock

A small task runs before, since the first one of a process imports modules. `full` is plain PyTorch. `cache`: the changed copies
of the support images are drawn from `--views` fixed ones, and features before the first trained layer are computed once for
each. Where the device has an energy meter (`pliant.energy`), joules of the task as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import fewshot_methods as shared
import packed
import record
import torch
from meter import LiveBytes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pliant import Policy, energy, fewshot, images

QUICK = ("full", "bias", "tinytrain, exact")
CACHED = {"engine": "prefix", "cache": "1GB"}
TIMED = {"full": {}, "tinytrain": {}, "tinytrain, exact": {}}
TIMED |= {"tinytrain, exact, cache": CACHED, "tinytrain, exact, half, cache": CACHED}


class Macs(TorchDispatchMode):
    """Counts the multiply-accumulates that run, as `measure.counted` does: a bias costs one per element of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.total += args[0].numel() * args[1].shape[-1]
        elif name in ("addmm", "addmm_", "baddbmm"):
            self.total += args[1].numel() * args[2].shape[-1]
        elif name == "convolution":
            self.total += out.numel() * args[1][0].numel()
        elif name == "convolution_backward":
            self.total += args[0].numel() * (args[2][0].numel() * (args[10][0] + args[10][1]) + args[10][2])
        elif name == "sum":  # a slice of a bias
            self.total += args[0].numel()
        return out


def adapt(net: nn.Module, support: images.ImageSet, policy: Policy | None, steps: int) -> fewshot.Adapted:
    """One image at a time, in place, so that no copy of the weights is counted."""
    return fewshot.adapt(net, support, policy=policy, steps=steps if policy is not None else 0, batch=1, in_place=True)


def task_of(ways: int, support: int) -> fewshot.Episode:
    """The task with the largest support set among the first twenty."""
    sampling, signs = fewshot.Sampling(ways=(ways, ways), support=support), shared.domain(shared.DOMAINS["gtsrb"])
    return max((sampling.draw(signs, seed=0, number=number) for number in range(20)), key=lambda task: len(task.support))


def cost_cell(backbone: str, method: str) -> dict[str, Any]:
    net, _ = shared.start(backbone)
    support, policy = task_of(5, 20).support, shared.METHODS[method](net)  # what is chosen in advance costs nothing here
    if method == "lora":
        net = shared.with_low_rank(net)
    model = fewshot.Prototypes(copy.deepcopy(net)).eval()
    each = shared.batches(support, 1, net.pixel_stats)
    model.fit_(((x, y) for x, y, _ in each), len(support.classes))
    with LiveBytes("cpu") as alone, torch.no_grad():
        model(shared.batches(support.select(torch.arange(1)), 1, net.pixel_stats)[0][0])
    macs = []
    with Macs() as counter, torch.no_grad():
        model(each[0][0])
    forward = counter.total
    for steps in (2, 3):
        with Macs() as counter:
            adapt(copy.deepcopy(net), support, policy, steps)
        macs.append(counter.total)
    spare = copy.deepcopy(net)
    with LiveBytes("cpu") as live:
        adapted = adapt(spare, support, policy, 2)
    per_image = (macs[1] - macs[0]) / len(support) - 2 * forward  # for a prototype and for a loss
    return {
        "kind": "cost",
        "backbone": backbone,
        "method": method,
        "inference": alone.peak,
        "peak": live.peak,
        "reported": adapted.memory_bytes,
        "forward_macs": forward,
        "backward_macs": max(per_image, 0.0),
        "chosen": 0 if adapted.selection is None else len(adapted.selection.units),
    }


def time_cell(backbone: str, way: str, setting: dict[str, Any]) -> dict[str, Any]:
    method = way.removesuffix(", cache")
    how: dict[str, Any] = {"engine": "plain"} if method == "full" else TIMED[way] or {"engine": "auto"}
    how = {**how, "batch": setting["batch"], "views": setting["views"]}

    def adapt(support: images.ImageSet, steps: int) -> tuple[float, float]:
        """CPU seconds until the selection is made, and in all."""
        net, _ = shared.start(backbone)
        begun = time.thread_time()
        net, policy = shared.ready(method, net, support)
        choosing = time.thread_time() - begun
        fewshot.adapt(net, support, policy=policy, steps=steps, **how)
        return choosing, time.thread_time() - begun

    adapt(task_of(5, 10).support, 3)  # the first task of a process imports modules
    support, meter = task_of(10, setting["support"]).support, energy.meter("cpu")
    with meter or nullcontext():
        choosing, seconds = adapt(support, setting["steps"])
        joules = {} if meter is None else {"joules": meter.joules()}
    found = {"seconds": seconds, "choosing": choosing, "support": len(support), **joules}
    return {"kind": "time", "backbone": backbone, "way": way, **found}


def table(cells: list[dict[str, Any]]) -> str:
    lines = []
    for backbone in dict.fromkeys(c["backbone"] for c in cells):
        costs = [c for c in cells if c["backbone"] == backbone and c["kind"] == "cost"]
        times = [c for c in cells if c["backbone"] == backbone and c["kind"] == "time"]
        full = next((c for c in costs if c["method"] == "full"), None)
        if costs:
            size, macs = costs[0]["inference"] / 1e6, costs[0]["forward_macs"] / 1e6
            lines += [
                f"### {backbone}: inference needs {size:.2f} MB and {macs:.1f} MMAC",
                "",
                "| method | memory beyond inference | backward MMAC per image | / full |",
                "|---|---|---|---|",
            ]
        for c in costs:
            share = f"{c['backward_macs'] / full['backward_macs']:.3f}" if full else ""
            beyond = (c["peak"] - c["inference"]) / 1e6
            lines.append(f"| {c['method']} | {beyond:.2f} MB | {c['backward_macs'] / 1e6:.2f} | {share} |")
        if times:
            slow, metered = next((c["seconds"] for c in times if c["way"] == "full"), None), any("joules" in c for c in times)
            lines += [
                "",
                f"| one task, {times[0]['support']} images | CPU seconds | of these choosing | speed-up over full |"
                + " joules |" * metered,
                "|---|---|---|---|" + "---|" * metered,
            ]
        for c in times:
            ratio = f"{slow / c['seconds']:.1f}×" if slow else ""
            joules = f" {c['joules']:.0f} |" if "joules" in c else ""
            lines.append(f"| {c['way']} | {c['seconds']:.1f} | {c['choosing']:.1f} | {ratio} |{joules}")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = record.options(__doc__, device=False)
    packed.option(parser)
    parser.add_argument("--backbones", nargs="+", choices=list(shared.BACKBONES), default=list(shared.BACKBONES))
    parser.add_argument("--methods", nargs="+", choices=list(shared.METHODS), default=list(shared.METHODS))
    parser.add_argument("--support", type=int, default=80)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=20, help="images per pass where time is measured")
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shared.FOLDER[0] = packed.folder(args.data)
    if args.quick:
        args.backbones, args.methods, args.support, args.steps = ["mcunet"], list(QUICK), 20, 10
    out = record.out(args, "fewshot_costs")
    setting = {"device": "cpu", **{name: getattr(args, name) for name in ("support", "steps", "batch", "views")}}
    done = record.load(out, setting)
    for backbone in args.backbones:
        todo = [(cost_cell, method, ()) for method in args.methods]
        todo += [] if args.no_times else [(time_cell, way, (setting,)) for way in TIMED]
        for run, name, more in todo:
            kind = "cost" if run is cost_cell else "time"
            if not any((c["kind"], c["backbone"], c.get("method", c.get("way"))) == (kind, backbone, name) for c in done):
                done.append(run(backbone, name, *more))
                record.save(out, setting, done, table(done))
                print(done[-1], flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
