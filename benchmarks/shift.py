"""Networks that adapt to whatever changed: the input, the features, the labels or the weights.

    python benchmarks/shift.py --data DIR --device cuda --jobs 15    # the table of record: Pets, MobileNetV2; resumable
    python benchmarks/shift.py --data DIR --device cuda --by time    # shares of measured time in place of MACs
    python benchmarks/shift.py --data DIR --quick                    # three shifts, a few images: a minute or two on a CPU

A network is tuned on a set of images, then one thing changes (`shift_data.py`), and it adapts to some labelled images of the
new world. Every arm (`shift_arms.py`) takes the same number of steps on the same batches: SGD with momentum (or AdamW) and a
cosine schedule. Seed 0 runs at every learning rate, and the rate with the best validation accuracy is that of the other seeds;
with `--every-rate`, `head` and `pliant` run all of them. All arms but the first two are a `Session` with the default
`norm="auto"`, unless their recipe has its own rule. Tables, of test accuracies:

    arms × shifts         their means, and the worst of the differences to the better of `nothing` and `head`
    pliant less …         the difference of the means over shifts, with its 95 % interval over seeds (Student's t)
    the best other arm    for each shift that of the best mean validation accuracy, at the cost of `pliant`'s share or less
    every rate            `head` and `pliant`, and the worst difference to the better of `nothing` and `head` at that rate

Cost is what the plan says of a step in MACs, over a full step. Seconds include measuring, probing and choosing, but no
evaluation; they are those of runs side by side unless `--jobs 1`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import itertools
import math
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import packed
import record
import shift_arms as arms
import shift_data as worlds
import torch
import torch.nn.functional as F
import transfer_tasks as tasks
from scipy.stats import t as student
from torch import Tensor, nn
from training import accuracy, clock
from transfer import prepare

from pliant import PliantError, Session

RATES = {"sgd": (0.001, 0.003, 0.01), "adamw": (0.0001, 0.0003, 0.001)}
BEGUN = time.monotonic()
QUICK_SHIFTS = ("contrast", "permuted", "noised")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def cell(shift: str, arm: str, lr: float, seed: int, setting: dict[str, Any], cache: str) -> dict[str, Any]:
    """One run: accuracies, cost and seconds. `failed` says why an arm could not run."""
    device, kept = setting["device"], Path(cache)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # what captured steps of the last run held
    task = worlds.world(setting["network"], setting["set"], shift, setting["per_class"], seed, setting, kept)
    model = worlds.network(setting["network"], setting["set"], shift, task.classes, setting, kept).to(device)
    out: dict[str, Any] = {"shift": shift, "arm": arm, "lr": lr, "seed": seed}
    size, total = min(setting["batch"], len(task.train)), setting["steps"]
    begun, session = clock(device), None
    try:
        if arm == "statistics":
            statistics_(model, (batch for (batch, _), _ in task.batches(size, seed, 0)))
        elif arm != "nothing":
            session = train(model, arm, lr, seed, task, size, total, setting)
        out["seconds"] = clock(device) - begun
        if session is not None:
            selection = session.selection
            out |= {"cost": selection.cost.macs / selection.full.macs, "spent": session.spent, "ran": session.engine}
            out["chosen"] = sorted({".".join(unit.name.split(".")[:2]) for unit in selection.units})
            session.close()
        out["validation"] = accuracy(model, tasks.pieces(task, task.validation))
        out["test"] = accuracy(model, tasks.pieces(task, task.test))
        return out
    except PliantError as error:
        return out | {"failed": str(error)}


def train(
    model: nn.Module, arm: str, lr: float, seed: int, task: tasks.Task, size: int, total: int, setting: dict[str, Any]
) -> Session:
    """All steps of one run."""
    policy = arms.policy(arm, model, seed, setting["by"], total)
    params, is_sgd = model.parameters(), setting["optimizer"] == "sgd"
    optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9) if is_sgd else torch.optim.AdamW(params, lr=lr)
    session = Session(model, optimizer, loss, policy, total_steps=total)
    batches = itertools.chain.from_iterable(task.batches(size, seed, epoch) for epoch in itertools.count())
    for step, (batch, _) in enumerate(itertools.islice(batches, total)):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / total)) / 2
        session.step(batch)
    return session


def statistics_(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of every batch norm by the mean of those of these batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
    model.train()
    with torch.no_grad():
        for inputs in batches:
            model(inputs)


# ---------------------------------------------------------------- which cells


def key(c: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(c[name] for name in ("shift", "arm", "lr", "seed"))


def wanted(args: argparse.Namespace, done: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The cells that can run now: seed 0 of every rate, then the other seeds at the best rate."""
    known, out = {key(c) for c in done}, []
    for shift, arm in itertools.product(args.shifts, args.arms):
        rates = args.rates[:1] if arm in arms.UNTRAINED else args.rates
        out += [(shift, arm, lr, 0) for lr in rates]
        if all((shift, arm, lr, 0) in known for lr in rates):
            lr = best(done, shift, arm)
            every = args.every_rate and (arm == "head" or arm.startswith("pliant "))
            out += [(shift, arm, rate, seed) for rate in rates for seed in range(1, args.seeds) if every or rate == lr]
    return sorted((one for one in out if one not in known), key=lambda one: one[3])


def best(done: list[dict[str, Any]], shift: str, arm: str) -> float | None:
    """The rate with the best validation accuracy of seed 0."""
    ran = [c for c in done if c["shift"] == shift and c["arm"] == arm and c["seed"] == 0 and "test" in c]
    return max(ran, key=lambda c: c["validation"])["lr"] if ran else None


# ---------------------------------------------------------------- tables


def scores(done: list[dict[str, Any]], shift: str, arm: str, on: str = "test") -> dict[int, float]:
    """Accuracy in percent by seed, at the rate that was picked."""
    lr = best(done, shift, arm)
    return {c["seed"]: 100 * c[on] for c in done if (c["shift"], c["arm"], c["lr"]) == (shift, arm, lr) and "test" in c}


def table(done: list[dict[str, Any]]) -> str:
    """Arms × shifts, the mean over shifts, and the worst case; then the differences, and every rate."""
    shifts = [shift for shift in worlds.SHIFTS if any(c["shift"] == shift for c in done)]
    names = sorted({c["arm"] for c in done}, key=lambda arm: (arms.MAIN.index(arm) if arm in arms.MAIN else 99, arm))
    means = {(arm, shift): fmean(found.values()) for arm in names for shift in shifts if (found := scores(done, shift, arm))}
    rows = ["| arm | cost | " + " | ".join(shifts) + " | mean | worst |", "|---" * (len(shifts) + 4) + "|"]
    for arm in names:
        costs = [c["cost"] for c in done if c["arm"] == arm and "cost" in c]
        here = [means.get((arm, shift)) for shift in shifts]
        floors = [max(means.get((other, shift), -math.inf) for other in ("nothing", "head")) for shift in shifts]
        is_whole = all(value is not None for value in here) and all(map(math.isfinite, floors))
        known = [value for value in here if value is not None]
        worst = min((value - floor for value, floor in zip(known, floors, strict=False)), default=0.0)
        ends = (f"{fmean(known):.1f}", f"{worst:+.1f}") if is_whole else ("–", "–")
        cells = [f"{value:.1f}" if value is not None else "–" for value in here]
        rows.append(f"| {arm} | {f'{fmean(costs):.2f}' if costs else '–'} | {' | '.join((*cells, *ends))} |")
    parts = "\n".join(rows) + "\n", differences(done, shifts, names), rivals(done, shifts, names), by_rate(done, shifts)
    return "\n".join(parts)


def by_rate(done: list[dict[str, Any]], shifts: list[str]) -> str:
    """`pliant` and `head` at each rate, mean of the seeds: where a part that is too large for a rate would collapse."""
    rows = ["| arm, rate | seeds | " + " | ".join(shifts) + " | worst |", "|---" * (len(shifts) + 3) + "|"]
    found: dict[tuple[str, str, float], list[float]] = {}
    for c in done:
        if "test" in c:
            found.setdefault((c["shift"], c["arm"], c["lr"]), []).append(100 * c["test"])
    means = {one: fmean(values) for one, values in found.items()}
    idle = {shift: value for (shift, arm, _), value in means.items() if arm == "nothing"}
    for arm in [arm for arm in dict.fromkeys(c["arm"] for c in done) if arm == "head" or arm.startswith("pliant")]:
        for lr in sorted({c["lr"] for c in done if c["arm"] == arm}):
            seeds = {len(found.get((shift, arm, lr), ())) for shift in shifts}
            cells = (f"{means[shift, arm, lr]:.1f}" if (shift, arm, lr) in means else "–" for shift in shifts)
            off = [
                means[shift, arm, lr] - max(means[shift, "head", lr], idle.get(shift, 0.0))
                for shift in shifts
                if (shift, arm, lr) in means and (shift, "head", lr) in means
            ]
            rows.append(
                f"| {arm}, {lr} | {'–'.join(str(one) for one in sorted({min(seeds), max(seeds)}))} | {' | '.join(cells)} | "
                f"{f'{min(off):+.1f}' if off else '–'} |"
            )
    return "\n".join(rows) + "\n"


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    many = len(values)
    return fmean(values), float(student.ppf(0.975, many - 1)) * stdev(values) / many**0.5 if many > 1 else math.inf


def differences(done: list[dict[str, Any]], shifts: list[str], names: list[str]) -> str:
    """`pliant` less each arm: the mean over shifts of each seed, and its 95 % interval over seeds."""
    rows = ["| pliant less … | mean difference | 95 % interval | seeds |", "|---|---|---|---|"]
    for ours in (arm for arm in names if arm.startswith("pliant ")):
        for other in names:
            both = [(scores(done, shift, ours), scores(done, shift, other)) for shift in shifts]
            seeds = set.intersection(*({*mine} & {*theirs} for mine, theirs in both)) if other != ours and both else set()
            if len(seeds) > 1:
                mean, half = interval([fmean(mine[seed] - theirs[seed] for mine, theirs in both) for seed in seeds])
                rows.append(f"| {ours} less {other} | {mean:+.1f} | {mean - half:+.1f} to {mean + half:+.1f} | {len(seeds)} |")
    return "\n".join(rows) + "\n"


def rivals(done: list[dict[str, Any]], shifts: list[str], names: list[str]) -> str:
    """`pliant` on each shift less the best other arm of its share or less."""
    rows = ["| share | shift | best other arm | difference | 95 % interval | seeds |", "|---|---|---|---|---|---|"]
    costs = {arm: fmean([c["cost"] for c in done if c["arm"] == arm and "cost" in c] or [0.0]) for arm in names}
    for ours in (arm for arm in names if arm.startswith("pliant ")):
        share = float(ours.split()[1])
        able = [arm for arm in names if not arm.startswith("pliant ") and costs[arm] <= share + 0.005]
        for shift in shifts:
            mine = scores(done, shift, ours)
            judged = {arm: found for arm in able if (found := scores(done, shift, arm, "validation"))}
            if not mine or not judged:
                continue
            best_arm = max(judged, key=lambda arm: fmean(judged[arm].values()))
            theirs = scores(done, shift, best_arm)
            off = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
            if not off:
                continue
            mean, half = interval(off)
            between = f"{mean - half:+.1f} to {mean + half:+.1f}" if math.isfinite(half) else "–"
            rows.append(f"| {share:g} | {shift} | {best_arm} | {mean:+.1f} | {between} | {len(off)} |")
    return "\n".join(rows) + "\n"


# ---------------------------------------------------------------- main


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    tasks.FOLDER[0] = packed.folder(args.data)
    arms.check(args.arms)
    cache = args.cache or Path(os.environ.get("TMPDIR", "/tmp")) / "pliant_shift"
    names = ("device", "network", "set", "optimizer", "by", "per_class", "steps", "batch")
    names += ("pixels", "classes", "images", "source_epochs")
    setting = {name: getattr(args, name) for name in names}
    cache = cache / "_".join(str(setting[name]) for name in ("pixels", "classes", "images", "source_epochs"))
    out = record.out(args, f"shift{'_time' if args.by == 'time' else ''}")
    done = record.load(out, setting)
    for shift in {"permuted", *args.shifts} & {"permuted", "subclasses"}:  # once, before workers need them
        worlds.tuned(args.network, args.set, shift, setting, cache)
    broken: set[tuple[Any, ...]] = set()
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), prepare, (tasks.FOLDER[0],)) if args.jobs > 1 else None
    saved = time.monotonic()

    def add(one: tuple[Any, ...], found: Any) -> None:
        nonlocal saved
        try:
            done.append(found())
        except Exception:
            broken.add(one)
            traceback.print_exc()
            return
        if time.monotonic() - saved > 5:
            saved = time.monotonic()
            record.save(out, setting, done, table(done))

    while (todo := [one for one in wanted(args, done) if one not in broken]) and not late(args):
        print(f"{time.monotonic() - BEGUN:.0f} s: {len(done)} cells are done, {len(todo)} can run now", flush=True)
        if pool is None:
            for one in todo:
                if not late(args):
                    add(one, lambda one=one: cell(*one, setting, str(cache)))
            continue
        futures = {pool.submit(cell, *one, setting, str(cache)): one for one in todo}
        for future in as_completed(futures):
            if not future.cancelled():
                add(futures[future], future.result)
            if late(args):
                for other in futures:
                    other.cancel()
    if pool is not None:
        pool.shutdown()
    record.save(out, setting, done, table(done))
    print(table(done))
    if broken:
        raise SystemExit(f"{len(broken)} cells ended with an error, {' '.join(map(str, min(broken)))} among them: see above.")


def late(args: argparse.Namespace) -> bool:
    return time.monotonic() - BEGUN > args.seconds


def parsed() -> argparse.Namespace:
    parser = record.options(__doc__)
    packed.option(parser)
    parser.add_argument("--network", choices=("mobilenet_v2", "efficientnet_lite0"), default="mobilenet_v2")
    parser.add_argument("--set", choices=("pets", "cub", "gtsrb"), default="pets")
    parser.add_argument("--shifts", nargs="+", choices=worlds.SHIFTS, default=None)
    parser.add_argument("--arms", nargs="+", default=None, help="names, like 'last 0.6' (the main grid)")
    parser.add_argument("--by", choices=("macs", "time"), default="macs", help="what shares are of")
    parser.add_argument("--per-class", type=int, default=5, help="labelled images of each class after the shift")
    parser.add_argument("--seeds", type=int, default=None, help="(3)")
    parser.add_argument("--optimizer", choices=tuple(RATES), default="sgd", help="SGD with momentum, or AdamW")
    parser.add_argument("--rates", type=float, nargs="+", default=None, help=f"learning rates to try ({RATES})")
    parser.add_argument("--every-rate", action="store_true", help="all seeds of head and pliant at every rate")
    parser.add_argument("--steps", type=int, default=None, help="(300)")
    parser.add_argument("--batch", type=int, default=None, help="(32)")
    parser.add_argument("--pixels", type=int, default=None, help="per side (128)")
    parser.add_argument("--classes", type=int, default=None, help="the first classes of a set: how many")
    parser.add_argument(
        "--images", type=int, default=None, help="most test images of each class; four times as many for training"
    )
    parser.add_argument("--source-epochs", type=int, default=None, help="of tuning before the shift (12)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this time")
    parser.add_argument("--cache", type=Path, default=None, help="folder for decoded images and tuned networks")
    args = parser.parse_args()
    if args.quick:
        small = {"shifts": list(QUICK_SHIFTS), "arms": list(arms.QUICK), "seeds": 1, "rates": [0.01], "steps": 15}
        small |= {"batch": 16, "pixels": 64, "classes": 8, "images": 10, "source_epochs": 3}
        for name, value in small.items():
            setattr(args, name, getattr(args, name) or value)
    args.shifts, args.arms = args.shifts or list(worlds.SHIFTS), args.arms or list(arms.MAIN)
    args.seeds, args.rates, args.steps = args.seeds or 3, args.rates or list(RATES[args.optimizer]), args.steps or 300
    args.batch, args.pixels, args.source_epochs = args.batch or 32, args.pixels or 128, args.source_epochs or 12
    return args


if __name__ == "__main__":
    main()
