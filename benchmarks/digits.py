"""EfficientNet-Lite0 with ImageNet weights on handwritten digits: every recipe from the same start, with tuned learning rates.

    python benchmarks/digits.py --device cuda --time 0.7   # tunes learning rates: some minutes on a GPU; resumable
    python benchmarks/digits.py --lrs-from benchmarks/results/digits_h200.json   # half an hour on one CPU thread; resumable
    python benchmarks/digits.py --quick                    # a few steps of a few recipes, one seed: about a minute

For each recipe: one run per learning rate with seed 0 (`random`: three seeds), compared on the validation split. Then one run
per seed at the best rate, and its accuracy on the test split. What is timed:

    total    start clock; open the session; for each batch: session.step(batch); stop clock
    step     after the last step, in turn: session.step(batch), and a plain full step
             optimizer.zero_grad(); loss(model, batch).backward(); clip; optimizer.step()

CPU: CPU time of one thread, the fastest step. GPU: synchronised wall time, the median. `--time` does not change recipes with a
share in their name. A `second run` finds the costs that an earlier one has measured and kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import record
import torch
import torch.nn.functional as F
from training import accuracy, clock, in_pieces, plain_step, seconds_of, sgd, typical

from pliant import Policy, Session, data, measure, models, recipes, schedule

AGAIN = schedule.every(steps=25)
PLAIN, PLAIN_FROZEN_NORMS = "full (plain PyTorch)", "full, norms on running statistics (plain PyTorch)"
METHODS: dict[str, Callable[[float], Policy] | None] = {
    PLAIN: None,
    PLAIN_FROZEN_NORMS: None,
    "pliant": lambda time: recipes.pliant(time=time),
    "pliant 0.3": lambda _: recipes.pliant(time=0.3),
    "pliant 0.2": lambda _: recipes.pliant(time=0.2),
    "elastic_layers": lambda time: recipes.elastic_layers(time=time, when=AGAIN),
    "elastic_trainer": lambda time: recipes.elastic_trainer(time=time, when=AGAIN),
    "last": lambda time: recipes.last(time=time),
    "random": lambda time: recipes.random(time=time, when=AGAIN),
    "norm": lambda time: recipes.norm(),
    "bias": lambda time: recipes.bias(),
    "head": lambda time: recipes.head(),
}
SECOND = ", second run"
METHODS |= {name + SECOND: METHODS[name] for name in ("pliant", "pliant 0.3", "pliant 0.2")}
QUICK = (PLAIN, "pliant", "last")
TUNED_ON = {"random": 3}  # seeds; one for the other recipes, whose selection is not random
CLIP = 1.0  # without it, training on running statistics diverges at most learning rates


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def pretrained(seed: int, classes: int, device: str) -> torch.nn.Module:
    """EfficientNet-Lite0 with ImageNet weights and a new head."""
    torch.manual_seed(seed)
    model = models.efficientnet_lite0(classes, pretrained=True).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.1  # the 0.01 of ImageNet training would need hundreds of steps to adapt
    return model


def cell(name: str, digits: data.Digits, lr: float, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Train one recipe once. Accuracies, seconds in all, and the step against a plain full step in the same run."""
    if not name.endswith(SECOND):
        return run(name, digits, lr, seed, setting)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, PLIANT_PROFILES="on", PLIANT_CACHE=folder):
        run(name, digits, lr, seed, setting | {"steps": 1})
        return run(name, digits, lr, seed, setting)


def run(name: str, digits: data.Digits, lr: float, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    steps, batch, device = setting["steps"], setting["batch"], setting["device"]
    recipe = METHODS[name]
    model = pretrained(seed, digits.classes, device)
    optimizer = sgd(model, lr)
    batches = list(islice(data.batches(digits.train, batch, seed=seed), steps))
    twin = copy.deepcopy(model)
    full_step = partial(plain_step, twin, sgd(twin), loss, clip=CLIP)

    def finish(step: Callable[[Any], Any]) -> dict[str, Any]:
        """What is measured at the end, while the selection is still in force."""
        scores = [accuracy(model, in_pieces(split.images, split.labels)) for split in (digits.validation, digits.test)]
        kept = measure.kept_bytes(model, loss, batches[0])
        mine, reference = alternate(step, full_step, batches, device)
        seconds = {"seconds_step": mine, "seconds_full_step": reference}
        return {"validation": scores[0], "test": scores[1], "kept_bytes": kept, **seconds}

    full_step(batches[0])  # warm up
    start = clock(device)
    if recipe is None:
        for module in model.modules():
            if name == PLAIN_FROZEN_NORMS and isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        step = partial(plain_step, model, optimizer, loss, clip=CLIP)
        for b in batches:
            step(b)
        total = clock(device) - start
        measured, chosen, share = finish(step), "everything", 1.0
    else:
        with Session(model, optimizer, loss, recipe(setting["time"]), clip=CLIP, total_steps=steps) as session:
            for b in batches:
                session.step(b)
            total = clock(device) - start
            measured, share = finish(session.step), session.selection.share()
            chosen = f"{len(session.selection.units)} of {len(session.units)}"
    return {
        "method": name,
        "lr": lr,
        "seed": seed,
        "predicted_share": share,
        "chosen": chosen,
        "seconds_total": total,
        **measured,
    }


def alternate(mine: Any, reference: Any, batches: list[Any], device: str, times: int = 5) -> tuple[float, float]:
    """Seconds of two kinds of steps, taken in turn."""
    taken: tuple[list[float], list[float]] = ([], [])
    for i in range(times):
        for which, step in zip(taken, (mine, reference), strict=True):
            which.append(seconds_of(partial(step, batches[i % len(batches)]), device))
    return typical(taken[0], device), typical(taken[1], device)


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: mean and range over seeds at each method's best learning rate."""
    lines = [
        "| method | test accuracy | step / full step | total time | kept for backward | learning rate |",
        "|---|---|---|---|---|---|",
    ]
    methods = dict.fromkeys(c["method"] for c in cells)
    chosen = {m: [c for c in cells if c["method"] == m and c.get("final")] for m in methods}
    full_total = statistics.mean(c["seconds_total"] for c in chosen[PLAIN]) if chosen.get(PLAIN) else float("nan")
    for method, runs in chosen.items():
        if runs:
            test = [100 * c["test"] for c in runs]
            step = statistics.mean(c["seconds_step"] / c["seconds_full_step"] for c in runs)
            total = statistics.mean(c["seconds_total"] for c in runs)
            kept = statistics.mean(c["kept_bytes"] for c in runs) / 1e6
            lines.append(
                f"| {method} | {statistics.mean(test):.1f} ({min(test):.1f}–{max(test):.1f}) | {step:.2f}× "
                f"| {total:.1f} s ({total / full_total:.2f}×) | {kept:.0f} MB | {runs[0]['lr']:g} |"
            )
    return "\n".join(lines) + "\n"


def best_lr(cells: list[dict[str, Any]], method: str) -> float:
    """The learning rate with the best validation accuracy over the seeds that it was tuned on."""
    tried: dict[float, list[float]] = {}
    for c in cells:
        if c["method"] == method and c["seed"] < TUNED_ON.get(method, 1):
            tried.setdefault(c["lr"], []).append(c["validation"])
    return max(tried, key=lambda lr: statistics.mean(tried[lr])) if tried else float("nan")


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time", type=float, default=0.5, help="time budget of the recipes that take one")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.001, 0.003, 0.01, 0.03, 0.1])
    parser.add_argument("--lrs-from", type=Path, default=None, help="results whose best learning rates to use, without tuning")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=None, help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.steps, args.seeds, args.lrs = 6, 1, [0.03]
    out = record.out(args, "digits")
    setting = {k: getattr(args, k) for k in ("steps", "batch", "size", "device", "time")} | {"clip": CLIP}
    tuned = json.loads(args.lrs_from.read_text())["cells"] if args.lrs_from else None
    done = record.load(out, setting)
    digits = data.digits(args.size)
    if args.device == "cuda":
        digits = data.Digits(
            *(data.Split(s.images.cuda(), s.labels.cuda()) for s in (digits.train, digits.validation, digits.test))
        )

    def ensure(name: str, lr: float, seed: int, final: bool) -> None:
        old = next((c for c in done if (c["method"], c["lr"], c["seed"]) == (name, lr, seed)), None)
        if old is None:
            old = cell(name, digits, lr, seed, setting)
            done.append(old)
        if final:
            old["final"] = True  # at the best learning rate: part of the table
        record.save(out, setting, done, table(done))
        print(f"{name:26} lr {lr:<5g} seed {seed}: validation {old['validation']:.3f}", flush=True)

    for name in args.methods or (QUICK if args.quick else METHODS):
        for lr in [] if tuned else args.lrs:
            for seed in range(TUNED_ON.get(name, 1)):
                ensure(name, lr, seed, final=False)
        for seed in range(args.seeds):
            ensure(name, best_lr(tuned or done, name), seed, final=True)
    print(table(done))


if __name__ == "__main__":
    main()
