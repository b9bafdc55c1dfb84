"""Whole layers against single tensors: the time to reach the same accuracy on traffic signs.

    python benchmarks/layers_vs_tensors.py --data DIR                   # some forty minutes on one CPU thread; resumable
    python benchmarks/layers_vs_tensors.py --data DIR --device cuda     # some minutes on a GPU
    python benchmarks/layers_vs_tensors.py --data DIR --quick           # one seed, one epoch: a minute or two

MobileNetV2 with ImageNet weights on GTSRB (43 signs, 32 training images each). Full fine-tuning, `elastic_trainer` (tensors)
and `elastic_layers`: each at the learning rate that is best on the validation split (seed 0), then for all seeds and budgets.
What is timed, by CPU time of one thread or synchronised wall time on a GPU:

    for every epoch: start clock; for every batch: session.step(batch); stop clock; validate

So time includes profiling, scoring and choosing. The first target is the final validation accuracy of full training less one
point, mean over seeds. The second one, for each seed, is the final validation accuracy of tensors.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
from pathlib import Path
from typing import Any

import nets
import numpy as np
import packed
import record
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from training import accuracy, clock, in_pieces, plain_step, sgd

from pliant import Policy, Session, data, images, recipes, schedule

METHODS = ("full", "elastic_trainer", "elastic_layers")
CLIP = 1.0
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's weights expect it
STORED = 64  # side of an image in the file


def signs(path: Path, pixels: int, device: str) -> tuple[dict[str, data.Split], int]:
    """The three splits as normalised tensors, and the number of classes.

    They are those of the recorded results, so `ImageSet.splits` is not used: a random fifth of every class is the validation
    split. Images are enlarged as floats, and are channels-last.
    """
    found = images.packed(path, STORED)
    split, labels, rng = np.array(found.split), found.labels.numpy(), np.random.default_rng(0)
    for label in range(len(found.classes)):
        mine = np.flatnonzero((split == images.TRAIN) & (labels == label))
        split[rng.permutation(mine)[: round(0.2 * len(mine))]] = images.VALIDATION
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))
    out = {}
    for name, kind in (("train", images.TRAIN), ("validation", images.VALIDATION), ("test", images.TEST)):
        part = found.select(torch.from_numpy(split == kind))
        shown = part.images.to(device, memory_format=torch.channels_last).float() / 255
        if pixels != STORED:
            shown = F.interpolate(shown, size=(pixels, pixels), mode="bilinear", antialias=True)
        out[name] = data.Split((shown - mean) / std, part.labels.to(device))
    return out, len(found.classes)


def policy(method: str, time_share: float, epochs_between: int) -> Policy:
    when = schedule.every(epochs=epochs_between)
    return {"elastic_trainer": recipes.elastic_trainer, "elastic_layers": recipes.elastic_layers}[method](time_share, when=when)


def cell(
    method: str, share: float, lr: float, seed: int, splits: Any, classes: int, weights: Path, setting: Any
) -> dict[str, Any]:
    """One run: validation accuracy and seconds so far after each epoch."""
    device, batch, epochs = setting["device"], setting["batch"], setting["epochs"]
    torch.manual_seed(seed)
    model = nets.MobileNetV2(classes)
    model.load_state_dict({k: v.float() for k, v in load_file(weights).items()}, strict=False)
    model.to(device)
    optimizer = sgd(model, lr)
    per_epoch = len(splits["train"]) // batch
    total = epochs * per_epoch
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    stream = data.batches(splits["train"], batch, seed=seed)
    curve, spent = [], 0.0
    warm = torch.randn(2, 3, setting["pixels"], setting["pixels"], device=device)
    model.eval()(warm)  # the first call of a process loads kernels
    model.train()

    def epoch(step: Any) -> None:
        nonlocal spent
        start = clock(device)
        for _ in range(per_epoch):
            step(next(stream))
            cosine.step()
        spent += clock(device) - start
        curve.append([spent, accuracy(model, in_pieces(splits["validation"].images, splits["validation"].labels))])

    said: dict[str, Any] = {}
    if method == "full":
        for _ in range(epochs):
            epoch(lambda pair: plain_step(model, optimizer, nets.loss, pair, CLIP))
    else:
        chosen = policy(method, share, setting["epochs_between"])
        with Session(model, optimizer, nets.loss, chosen, clip=CLIP, steps_per_epoch=per_epoch, total_steps=total) as session:
            for _ in range(epochs):
                epoch(session.step)
            steps = sum(r.steps for r in session.rounds)
            said["mean_step"] = sum(r.seconds for r in session.rounds) / steps / session.profile.full.seconds
            said["units"] = len(session.selection.units)
    test = accuracy(model, in_pieces(splits["test"].images, splits["test"].labels))
    return {"method": method, "time": share, "lr": lr, "seed": seed, "curve": curve, "test": test, **said}


def seconds_to(run: dict[str, Any], target: float) -> float | None:
    return next((seconds for seconds, reached in run["curve"] if reached >= target), None)


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: accuracy with its range over seeds, time of the whole run, and time to the target."""
    final = [c for c in cells if c.get("final")]
    full = [c for c in final if c["method"] == "full"]
    if not full:
        return "(not finished)\n"
    target = statistics.mean(c["curve"][-1][1] for c in full) - 0.01
    whole = {c["seed"]: c["curve"][-1][0] for c in full}
    lines = [
        f"Target: {target:.1%} on the validation split.",
        "",
        "| method | asked | mean step / full step | test accuracy | whole run / full | time to the target | learning rate |",
        "|---|---|---|---|---|---|---|",
    ]
    reached: dict[tuple[str, float], dict[int, float]] = {}
    for key in dict.fromkeys((c["method"], c["time"]) for c in final):
        runs = [c for c in final if (c["method"], c["time"]) == key]
        test = [100 * c["test"] for c in runs]
        took = [c["curve"][-1][0] / whole[c["seed"]] for c in runs if c["seed"] in whole]
        to = {c["seed"]: s for c in runs if (s := seconds_to(c, target)) is not None}
        if len(to) == len(runs):
            reached[key] = to
        step = f"{statistics.mean(c['mean_step'] for c in runs):.2f}" if "mean_step" in runs[0] else "1"
        asked = "" if key[0] == "full" else key[1]
        when = f"{statistics.mean(to.values()):.1f} s" if len(to) == len(runs) else f"{len(to)} of {len(runs)} runs reach it"
        lines.append(
            f"| {key[0]} | {asked} | {step} | {statistics.mean(test):.1f} ({min(test):.1f}–{max(test):.1f}) "
            f"| {statistics.mean(took):.2f}× | {when} | {runs[0]['lr']:g} |"
        )

    lines += [
        "",
        "Time that layers save, for each seed, until they reach the final accuracy of tensors:",
        "",
    ]
    for share in sorted({c["time"] for c in final if c["method"] != "full"}):
        layers = {c["seed"]: c for c in final if (c["method"], c["time"]) == ("elastic_layers", share)}
        tensors = {c["seed"]: c for c in final if (c["method"], c["time"]) == ("elastic_trainer", share)}
        pairs = [(layers[seed], tensors[seed]) for seed in tensors if seed in layers]
        saved = []
        for mine, other in pairs:
            same = other["curve"][-1][1]
            reached_at, took = seconds_to(mine, same), seconds_to(other, same)
            if reached_at is not None and took is not None:
                saved.append(1 - reached_at / took)
        if saved:
            lines.append(
                f"- asked {share}: {statistics.mean(saved):.0%} of the time saved ({min(saved):.0%} to {max(saved):.0%}; "
                f"{len(saved)} of {len(pairs)} seeds reach it)"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = record.options(__doc__)
    packed.option(parser)
    parser.add_argument("--epochs", type=int, default=None, help="(6, or 20 on a GPU)")
    parser.add_argument("--batch", type=int, default=None, help="(16, or 64 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="(64, or 128 on a GPU)")
    parser.add_argument("--epochs-between", type=int, default=3, help="epochs between two selections")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budgets", type=float, nargs="+", default=None, help="(0.5, or 0.5 0.6 0.7 on a GPU)")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--lrs-from", type=Path, default=None, help="results whose best learning rates to use, without tuning")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gpu = args.device == "cuda"
    if args.quick:
        args.epochs, args.seeds, args.lrs, args.budgets = args.epochs or 1, 1, [0.03], [0.5]
    args.epochs = args.epochs or (20 if gpu else 6)
    args.batch = args.batch or (64 if gpu else 16)
    args.pixels = args.pixels or (128 if gpu else 64)
    args.budgets = args.budgets or ([0.5, 0.6, 0.7] if gpu else [0.5])
    where = packed.folder(args.data)
    weights = packed.need(where / "weights" / "mobilenetv2_fp16.safetensors")
    splits, classes = signs(packed.need(where / "gtsrb43_64.npz"), args.pixels, args.device)
    setting = {k: getattr(args, k) for k in ("device", "epochs", "batch", "pixels", "epochs_between", "lrs")}
    out = record.out(args, "layers_vs_tensors")
    done = record.load(out, setting)
    known = record.cells(args.lrs_from) if args.lrs_from else done

    def ensure(method: str, share: float, lr: float, seed: int, final: bool = False) -> dict[str, Any]:
        key = (method, share, lr, seed)
        run = next((c for c in done if (c["method"], c["time"], c["lr"], c["seed"]) == key), None)
        if run is None:
            run = cell(method, share, lr, seed, splits, classes, weights, setting)
            done.append(run)
        run["final"] = run.get("final", False) or final
        record.save(out, setting, done, table(done))
        print(f"{method} {share} lr {lr:g} seed {seed}: validation {run['curve'][-1][1]:.3f}", flush=True)
        return run

    for method in METHODS:
        middle = 1.0 if method == "full" else args.budgets[len(args.budgets) // 2]
        if not args.lrs_from:
            for lr in args.lrs:
                ensure(method, middle, lr, 0)
        tried = [c for c in known if c["method"] == method and c["seed"] == 0]
        best = max(tried, key=lambda c: c["curve"][-1][1])["lr"]
        for share in [1.0] if method == "full" else args.budgets:
            for seed in range(args.seeds):
                ensure(method, share, best, seed, final=True)
    print(table(done))


if __name__ == "__main__":
    main()
