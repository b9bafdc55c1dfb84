"""What an adaptation to a few images takes: memory and MACs one image at a time, and the time of a whole task.

    python benchmarks/fewshot_costs.py --data DIR            # half an hour on one CPU thread; resumable
    python benchmarks/fewshot_costs.py --data DIR --quick    # one network, a few methods: some minutes

Methods, networks and domains are those of `fewshot.py`. Memory: the most that lives at any moment of a whole adaptation, the
choice included (reading the graph, Fisher information of the whole support set, planning), less the most that lives while the
same network classifies one image without gradients. Every tensor is followed; parameters do not count. MACs: of the products of
matrices, the convolutions and the biases that really ran, in a step beyond those of its forward passes, per image, and as a
share of what `full` takes. Both with one image in a pass.

Time: CPU time of one thread for one whole task (`--steps` steps over the support set), choosing included, after a small task
that imports what is imported when it is first used. `full` is plain PyTorch. `cache`: the changed copies of the support images
are drawn from `--views` fixed ones, and what lies before the first chosen layer is computed once for each. With a meter
(`pliant.runtime.energy`), joules of the task as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fewshot_methods as shared
import packed
import record
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pliant import Policy, energy
from pliant.apps import fewshot
from pliant.apps.data import images
from pliant.apps.fewshot.views import Views
from pliant.runtime.memory import Live

QUICK = ("full", "bias", "tinytrain, exact")
CACHED = {"engine": "prefix", "cache": "1GB"}
TIMED = {"full": {}, "tinytrain": {}, "tinytrain, exact": {}}
TIMED |= {"tinytrain, exact, cache": CACHED, "tinytrain, exact, half, cache": CACHED}
CPU = torch.device("cpu")


class Macs(TorchDispatchMode):
    """Counts the multiply-accumulates of what runs, as `measure.counted` does: a bias costs one per element of its output."""

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
    """One image at a time, on the weights themselves, so that no copy of them is seen."""
    return fewshot.adapt(net, support, policy=policy, steps=steps if policy is not None else 0, batch=1, in_place=True)


def task_of(ways: int, support: int) -> fewshot.Episode:
    """Of the first tasks that are drawn, the one with the most images to learn from."""
    sampling, signs = fewshot.Sampling(ways=(ways, ways), support=support), shared.domain(shared.DOMAINS["gtsrb"])
    return max((sampling.draw(signs, seed=0, number=number) for number in range(20)), key=lambda task: len(task.support))


def cost_cell(backbone: str, method: str) -> dict[str, Any]:
    net, _ = shared.start(backbone)
    support, policy = task_of(5, 20).support, shared.METHODS[method](net)  # what is chosen offline costs nothing here
    if method == "lora":
        net = shared.with_low_rank(net)
    model = fewshot.Prototypes(copy.deepcopy(net)).eval()
    views = Views(support, 1, net.pixel_stats)
    model.fit_(((x, y) for x, y, _ in views), len(support.classes))
    with Live(CPU) as alone, torch.no_grad():
        model(next(iter(views))[0])
    macs = []
    with Macs() as counter, torch.no_grad():
        model(next(iter(views))[0])
    forward = counter.total
    for steps in (2, 3):
        with Macs() as counter:
            adapt(copy.deepcopy(net), support, policy, steps)
        macs.append(counter.total)
    spare = copy.deepcopy(net)
    with Live(CPU) as live:
        adapted = adapt(spare, support, policy, 2)
    per_image = (macs[1] - macs[0]) / len(support) - 2 * forward  # a prototype and a loss
    return {
        "kind": "cost",
        "backbone": backbone,
        "method": method,
        "inference": alone.peak,
        "peak": live.peak,
        "told": adapted.memory_bytes,
        "forward_macs": forward,
        "backward_macs": max(per_image, 0.0),
        "chosen": 0 if adapted.selection is None else len(adapted.selection.units),
    }


def time_cell(backbone: str, way: str, setting: dict[str, Any]) -> dict[str, Any]:
    method = way.removesuffix(", cache")
    how: dict[str, Any] = {"engine": "plain"} if method == "full" else TIMED[way] or {"engine": "auto"}
    how = {**how, "batch": setting["batch"], "views": setting["views"]}

    def adapt(support: images.ImageSet, steps: int) -> tuple[float, float]:
        """CPU seconds until what trains is chosen, and in all."""
        net, _ = shared.start(backbone)
        begun = time.thread_time()
        net, policy = shared.ready(method, net, support)
        choosing = time.thread_time() - begun
        fewshot.adapt(net, support, policy=policy, steps=steps, **how)
        return choosing, time.thread_time() - begun

    adapt(task_of(5, 10).support, 3)  # the first one of a process imports modules
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
                f"### {backbone}: inference takes {size:.2f} MB and {macs:.1f} MMAC",
                "",
                "| method | memory beyond inference | backward MMAC per image | of full |",
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
                f"| one task, {times[0]['support']} images | CPU seconds | of these choosing | full over this |"
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="folder with data and weights (or $PLIANT_DATA)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backbones", nargs="+", choices=list(shared.BACKBONES), default=list(shared.BACKBONES))
    parser.add_argument("--methods", nargs="+", choices=list(shared.METHODS), default=list(shared.METHODS))
    parser.add_argument("--support", type=int, default=80)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=20, help="images in a pass where time is measured")
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shared.FOLDER[0] = packed.folder(args.data)
    if args.quick:
        args.backbones, args.methods, args.support, args.steps = ["mcunet"], list(QUICK), 20, 10
    out = args.out or record.place("fewshot_costs_quick" if args.quick else "fewshot_costs")
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
