"""Whole training runs on each engine, everything included: EfficientNet-Lite0 with ImageNet weights on handwritten digits.

    python benchmarks/end_to_end.py                       # an hour on one CPU thread; resumable
    python benchmarks/end_to_end.py --device cuda         # some minutes on a GPU
    python benchmarks/end_to_end.py --quick               # a few steps of a few ways, one seed: about a minute

For each seed, every way starts from the same weights and sees the same batches in the same order: those of a DataLoader over
the training split, without the last incomplete batch. SGD with momentum, clipped gradients. But for `full`, all train the same:
the last quarter of the parameter tensors, head included. `full, eager` and `plain freezing` are loops as anyone writes them:
`requires_grad` as chosen, norms at rest where nothing is chosen. All others are `Session.step` on the engine that is named,
with `recipes.only` (`full, graphs`: `recipes.full`). `cache`: the dataset is wrapped by `data.with_ids`, so that a batch of
samples that were all seen before takes its features from the cache, in the memory of the device; `from cache` is the share of
samples that did, the first epoch included. What is timed, after one plain full step on a copy to warm up:

    start clock; freeze, or open the session; for every epoch and batch: load, move to the device, step; stop clock

So the total holds loading, profiling, choosing, recording, racing, capturing and filling the cache. It leaves out reading the
weights and testing. CPU: CPU time of one thread. GPU: synchronised wall time. `profiling + choosing` is of `session.spent`, by
the clock on the wall. Steps alone: the median over the run, by CPU time or CUDA events.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import record
import torch
from digits import CLIP, loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import accuracy, clock

from pliant import Session, recipes
from pliant.apps import data
from pliant.apps.models import efficientnet_lite0
from pliant.engine.prefix.feature_cache import Features
from pliant.graph.backward import trainable
from pliant.runtime.batchnorm import BatchNormModes
from pliant.runtime.clock import Watch
from pliant.runtime.trainable import apply_

FULL, FREEZING = "full, eager", "plain freezing"  # the references
ON_CPU = (FULL, FREEZING, "plain", "prefix", "prefix, cache", "auto", "auto, cache")
ON_CUDA = (*ON_CPU, "full, graphs", "graphs", "prefix+graphs", "prefix+graphs, cache")
QUICK = (FULL, FREEZING, "prefix, cache", "auto")
SHARE = 0.25  # of the parameter tensors


def start(seed: int, classes: int, device: str, lr: float) -> tuple[nn.Module, torch.optim.SGD]:
    """As in digits.py."""
    torch.manual_seed(seed)
    model = efficientnet_lite0(classes, pretrained=True).to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # the 0.01 of ImageNet training would need hundreds of steps to follow
    return model, sgd(model, lr)


def sgd(model: nn.Module, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Sequence[str]) -> Callable[..., torch.Tensor]:
    params = trainable(model)
    apply_(params, optimizer, chosen)
    BatchNormModes(model, "chosen").hold_(params, chosen)

    def step(batch: Any, ids: Any = None) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return value.detach()

    return step


def cell(way: str, seed: int, digits: data.Digits, setting: dict[str, Any]) -> dict[str, Any]:
    """Train once this way: seconds in all and of a step, accuracy, and what the session tells."""
    device, lr, samples = setting["device"], setting["lr"], setting["samples"]
    model, optimizer = start(seed, digits.classes, device, lr)
    names = list(trainable(model))
    chosen = names if way.startswith("full") else names[int(len(names) * (1 - SHARE)) :]
    engine, cached = way.removeprefix("full, ").removesuffix(", cache"), way.endswith(", cache")
    dataset: Any = TensorDataset(digits.train.images[:samples], digits.train.labels[:samples])
    if cached:
        dataset = data.with_ids(dataset)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, setting["batch"], shuffle=True, drop_last=True, generator=order)
    features = Features("2GB", device=device) if cached else None
    spare = copy.deepcopy(model)
    first = digits.train.images[: setting["batch"]].to(device), digits.train.labels[: setting["batch"]].to(device)
    plain_loop(spare, sgd(spare, lr), names)(first)  # warm up
    session, losses, spans, watch = None, [], [], Watch(torch.device(device))
    begun = clock(device)
    if way in (FULL, FREEZING):
        step = plain_loop(model, optimizer, chosen)
    else:
        policy = recipes.full() if chosen == names else recipes.only(*chosen)
        session = Session(model, optimizer, loss, policy, engine=engine, norm="chosen", clip=CLIP, cache=features)
        step = session.step
    for _ in range(setting["epochs"]):
        for loaded in loader:
            batch = tuple(part.to(device) for part in loaded)
            before = watch.mark()
            losses.append(step(batch, data.ids_of(loaded)))
            spans.append((before, watch.mark()))
    total = clock(device) - begun
    out: dict[str, Any] = {
        "way": way,
        "seed": seed,
        "seconds_total": total,
        "seconds_step": statistics.median(watch.seconds(*span) for span in spans),
        "loss": float(torch.stack(losses).mean()),
        "test": accuracy(model, data.Split(digits.test.images.to(device), digits.test.labels.to(device))),
        "steps": len(losses),
    }
    if features is not None:
        out["cache"] = {"hits": features.hits, "misses": features.misses, "bytes": features.bytes}
    if session is not None:
        out |= {"spent": session.spent, "ran": session.engine, "why_not": dict(session.why_not)}
        session.close()
    return out


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds, the range of accuracies, and totals as shares of both references."""
    runs = {way: [c for c in cells if c["way"] == way] for way in dict.fromkeys(c["way"] for c in cells)}
    total = {way: statistics.mean(c["seconds_total"] for c in some) for way, some in runs.items()}
    lines = [
        "| way | seeds | total | of full, eager | of plain freezing | profiling + choosing | median step | test accuracy "
        "| mean loss | from cache | ran on |",
        "|" + "---|" * 11,
    ]
    for way, some in runs.items():
        test = [100 * c["test"] for c in some]
        shares = [f"{total[way] / total[other]:.2f}×" if other in total else "" for other in (FULL, FREEZING)]
        aside = [c["spent"]["profiling"] + c["spent"]["choosing"] for c in some if "spent" in c]
        found = [c["cache"]["hits"] / (c["cache"]["hits"] + c["cache"]["misses"]) for c in some if "cache" in c]
        row = [
            way,
            str(len(some)),
            f"{total[way]:.1f} s",
            *shares,
            f"{statistics.mean(aside):.2f} s" if aside else "",
            f"{statistics.mean(c['seconds_step'] for c in some) * 1e3:.1f} ms",
            f"{statistics.mean(test):.1f} ({min(test):.1f}–{max(test):.1f})",
            f"{statistics.mean(c['loss'] for c in some):.5f}",
            f"{statistics.mean(found):.0%}" if found else "",
            ", ".join(dict.fromkeys(c["ran"] for c in some if "ran" in c)),
        ]
        lines.append(f"| {' | '.join(row)} |")
    reasons = {f"- {c['way']}, {what}: {why}": None for c in cells for what, why in c.get("why_not", {}).items()}
    return "\n".join([*lines, *(["", "Not done:", "", *reasons] if reasons else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000, help="of the training split, the first so many")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1, help="the best of digits.py for `full` and `last`")
    parser.add_argument("--ways", nargs="+", default=None, help="just these, or others, like 'lean+prefix'")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.epochs, args.seeds, args.samples = 3, 1, 96
    out = args.out or record.place("end_to_end_quick" if args.quick else "end_to_end", args.device)
    setting = {k: getattr(args, k) for k in ("device", "epochs", "samples", "batch", "size", "lr")}
    setting |= {"clip": CLIP, "chosen": f"the last {SHARE:.0%} of the parameter tensors"}
    done = record.load(out, setting)
    digits = data.digits(args.size)
    for seed in range(args.seeds):
        for way in args.ways or (QUICK if args.quick else ON_CUDA if args.device == "cuda" else ON_CPU):
            if not any((c["way"], c["seed"]) == (way, seed) for c in done):
                done.append(cell(way, seed, digits, setting))
                record.save(out, setting, done, table(done))
                print(f"seed {seed}, {way:20} {done[-1]['seconds_total']:.1f} s, test {done[-1]['test']:.3f}", flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
