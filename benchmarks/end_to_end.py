"""Whole training runs on each engine, everything included: EfficientNet-Lite0 with ImageNet weights on handwritten digits.

    python benchmarks/end_to_end.py                       # an hour on one CPU thread; resumable
    python benchmarks/end_to_end.py --device cuda         # some minutes on a GPU
    python benchmarks/end_to_end.py --quick               # a few steps of a few ways, one seed: about a minute

For each seed, every way starts from the same weights and sees the same batches in the same order. All but `full` train the
last quarter of the parameter tensors, head included. SGD with momentum, clipped gradients. What is timed, after one plain full
step on a copy:

    start clock
    freeze by hand (plain freezing), or open a session with `recipes.only` (`full, graphs`: `recipes.full`)
    for every epoch and batch: load, move to the device, step
    stop clock

So the total includes loading, profiling, choosing, recording, capturing and filling the cache, but neither reading the weights
nor testing. Plain freezing sets `requires_grad`, and frozen batch norms use their running statistics. `cache`: the dataset is
wrapped by `with_ids`, and a session may read features of samples that it has seen before from its cache. CPU: CPU time of one
thread. GPU: synchronised wall time. `profiling + choosing` is wall time, from `session.spent`. The median step is by CPU time
or CUDA events.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import statistics
import time
from functools import partial
from typing import Any

import record
import torch
from digits import CLIP, loss, pretrained
from torch.utils.data import DataLoader, TensorDataset
from training import accuracy, clock, freeze_, in_pieces, last_share, plain_step, sgd

from pliant import Session, data, recipes

FULL, FREEZING = "full, eager", "plain freezing"  # the references
ON_CPU = (FULL, FREEZING, "plain", "prefix", "prefix, cache", "auto", "auto, cache")
ON_CUDA = (*ON_CPU, "full, graphs", "graphs", "prefix+graphs", "prefix+graphs, cache")
QUICK = (FULL, FREEZING, "prefix, cache", "auto")
SHARE = 0.25  # of the parameter tensors


def mark(device: str) -> Any:
    """A moment that does not wait for the device."""
    if device != "cuda":
        return time.thread_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds from one mark to another; on a GPU after it has been synchronised."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def cell(way: str, seed: int, digits: data.Digits, setting: dict[str, Any]) -> dict[str, Any]:
    """Train once this way: seconds in all and per step, accuracy, and what the session reports."""
    device, lr, samples = setting["device"], setting["lr"], setting["samples"]
    model = pretrained(seed, digits.classes, device)
    optimizer = sgd(model, lr)
    full = way.startswith("full")
    chosen = last_share(model, 1.0 if full else SHARE)
    engine, cached = way.removeprefix("full, ").removesuffix(", cache"), way.endswith(", cache")
    dataset: Any = TensorDataset(digits.train.images[:samples], digits.train.labels[:samples])
    if cached:
        dataset = data.with_ids(dataset)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, setting["batch"], shuffle=True, drop_last=True, generator=order)
    spare = copy.deepcopy(model)
    first = digits.train.images[: setting["batch"]].to(device), digits.train.labels[: setting["batch"]].to(device)
    plain_step(spare, sgd(spare, lr), loss, first, CLIP)  # warm up
    session, losses, spans = None, [], []
    begun = clock(device)
    if way in (FULL, FREEZING):
        freeze_(model, chosen)
        step = partial(plain_step, model, optimizer, loss, clip=CLIP)
    else:
        policy, cache = recipes.full() if full else recipes.only(*chosen), "2GB" if cached else None
        session = Session(model, optimizer, loss, policy, engine=engine, norm="chosen", clip=CLIP, cache=cache)
        step = session.step
    for _ in range(setting["epochs"]):
        for loaded in loader:
            batch = tuple(part.to(device) for part in loaded)
            ids = {"ids": data.ids_of(loaded)} if cached else {}
            before = mark(device)
            losses.append(step(batch, **ids))
            spans.append((before, mark(device)))
    total = clock(device) - begun
    out: dict[str, Any] = {
        "way": way,
        "seed": seed,
        "seconds_total": total,
        "seconds_step": statistics.median(between(*span) for span in spans),
        "loss": float(torch.stack(losses).mean()),
        "test": accuracy(model, in_pieces(digits.test.images.to(device), digits.test.labels.to(device))),
        "steps": len(losses),
    }
    if session is not None:
        out |= {"spent": session.spent, "ran": session.engine, "why_not": dict(session.why_not), "cached": session.caches}
        session.close()
    return out


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds, the range of accuracies, and totals over those of both references."""
    runs = {way: [c for c in cells if c["way"] == way] for way in dict.fromkeys(c["way"] for c in cells)}
    total = {way: statistics.mean(c["seconds_total"] for c in some) for way, some in runs.items()}
    lines = [
        "| way | seeds | total | / full, eager | / plain freezing | profiling + choosing | median step | test accuracy "
        "| mean loss | read from the cache | engine |",
        "|" + "---|" * 11,
    ]
    for way, some in runs.items():
        test = [100 * c["test"] for c in some]
        shares = [f"{total[way] / total[other]:.2f}×" if other in total else "" for other in (FULL, FREEZING)]
        aside = [c["spent"]["profiling"] + c["spent"]["choosing"] for c in some if "spent" in c]
        cached = {c["cached"] for c in some if "cached" in c}
        row = [
            way,
            str(len(some)),
            f"{total[way]:.1f} s",
            *shares,
            f"{statistics.mean(aside):.2f} s" if aside else "",
            f"{statistics.mean(c['seconds_step'] for c in some) * 1e3:.1f} ms",
            f"{statistics.mean(test):.1f} ({min(test):.1f}–{max(test):.1f})",
            f"{statistics.mean(c['loss'] for c in some):.5f}",
            "yes" if cached == {True} else "in some runs" if True in cached else "",
            ", ".join(dict.fromkeys(c["ran"] for c in some if "ran" in c)),
        ]
        lines.append(f"| {' | '.join(row)} |")
    reasons = {f"- {c['way']}, {what}: {why}": None for c in cells for what, why in c.get("why_not", {}).items()}
    return "\n".join([*lines, *(["", "What an engine did not do, and why:", "", *reasons] if reasons else [])]) + "\n"


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000, help="the first samples of the training split: how many")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1, help="the best one in digits.py for `full` and `last`")
    parser.add_argument("--ways", nargs="+", default=None, help="only these, or others, like 'lean+prefix'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.epochs, args.seeds, args.samples = 3, 1, 96
    out = record.out(args, "end_to_end")
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
