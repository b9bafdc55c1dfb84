"""Few images of a new task, one small network, inside 1 MB: what each method makes of them, from the same start.

    python benchmarks/fewshot.py --data DIR --device cuda --jobs 12   # an hour and more on a GPU; resumable
    python benchmarks/fewshot.py --data DIR --quick                   # one network, a small task, a few methods: minutes

A task has 5–50 classes and a few images of each, drawn as Meta-Dataset does (`fewshot.Sampling`), from a domain that is not the
source. Every method begins with the same weights: those of ImageNet, or those after practising tasks of the source (40 kinds of
birds, `fewshot.meta_train`): "meta 100 0.001" after a hundred tasks at that learning rate. Each takes the same number of steps
of SGD, on the same changed copies of the support images, against prototypes of the support set; then query images are
classified by the nearest prototype. Each method has one learning rate for all domains, as a device has: the best of four on
other tasks of the same domains (images may be the same) and of the source. With `own rate` behind a name, each task has its
own, by how alike its classes look (`fewshot.rate_for`), and nothing is tuned. Methods:

    none            nothing trains
    full            every convolution
    last layer      the convolution before the mean
    bias            every bias: what TinyTL trains beside its side branches
    sparse update   a fixed choice of layers and input channels, made once, on the source: MIT's scheme
    lora            rank 4 beside every 1×1 convolution
    random          channels by lot inside the budget of tinytrain
    tinytrain       the paper's choice; exact: ours under the same budget; half: exact with half of the MACs; depthwise too:
                    exact among all layers, with depthwise filters
    pliant          exact, depthwise too, by the update gain of `recipes.pliant` in place of Fisher information

From `random` on all keep inside 1 MB beyond inference and 0.15 of a full backward pass's MACs. Accuracies do not hang on how
many images a pass holds (gradients gather over the whole support set), so runs use large ones. What one image at a time takes
up is what `fewshot_costs.py` measures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import math
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import fewshot_methods as shared
import packed
import record
import torch
from torch import nn

from pliant.apps import fewshot
from pliant.apps.data import images
from pliant.engine.prefix.feature_cache import Features

IMAGENET, PRACTISED = "imagenet", "meta 100 0.001"  # starts
RATES = (0.001, 0.004, 0.016, 0.064)
TUNING_TASKS = 4  # per domain and rate
SAVE_SECONDS = 10.0
CACHE_BYTES = "8GB"
MAIN = "mcunet"
TASKS = {MAIN: 60}  # per domain; 30 for the others
QUICK = ("none", "full", "tinytrain", "tinytrain, exact")
PUBLISHED = {  # average accuracy over nine domains, with a start that differs between methods: arXiv 2307.09988, table 1
    "mcunet": {"none": 44.5, "full": 66.9, "last layer": 54.6, "bias": 66.1, "sparse update": 64.3, "tinytrain": 69.3},
    "mobilenet_v2_0.35": {"none": 51.7, "full": 62.7, "last layer": 58.1, "bias": 62.1, "sparse update": 64.0}
    | {"tinytrain": 65.6},
    "proxyless_0.3": {"none": 51.1, "full": 65.0, "last layer": 57.0, "bias": 63.7, "sparse update": 64.7, "tinytrain": 68.3},
}


def task_of(domain: str, number: int, setting: dict[str, Any]) -> fewshot.Episode:
    """A task by its number; those below zero are for tuning."""
    sampling = fewshot.Sampling(ways=tuple(setting["ways"]), support=setting["support"])
    name = shared.SOURCE if domain == "source" else shared.DOMAINS[domain]
    return sampling.draw(shared.domain(name), seed=int(number < 0), number=abs(number))


Job = tuple[str, str, str, int]  # backbone, start, domain, task
Rate = float | Literal["auto"]  # auto: by the task


def several(
    job: Job, methods: dict[str, tuple[Rate, ...]], setting: dict[str, Any], until: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One task, some methods with some learning rates each: what came of it, and with which methods it went wrong.

    One process takes all methods of a task: for a support set of another size, CUDA's libraries look for kernels anew, which
    takes longer than training. What was not begun `until` a moment is left out.
    """
    out: list[dict[str, Any]] = []
    wrong: dict[str, str] = {}
    for method, rates in methods.items():
        try:
            for one in cells(*job, method, rates, setting, until):
                out.append(one)
        except Exception:
            wrong[method] = traceback.format_exc()
    return out, wrong


def cells(
    backbone: str,
    begin: str,
    domain: str,
    number: int,
    method: str,
    rates: tuple[Rate, ...],
    setting: dict[str, Any],
    until: float = math.inf,
) -> Iterator[dict[str, Any]]:
    """One task, one method, some learning rates: the accuracy of each on the queries, and what was chosen, the same for all."""
    if time.time() > until:
        return
    device = setting["device"]
    net, scale = started(backbone, None if begin == IMAGENET else meta_file(backbone, begin, setting), device)
    task = task_of(domain, number, setting)
    support, query, since = on(task.support, device), on(task.query, device), time.perf_counter()
    net, policy = shared.ready(method, net, support)
    choosing = time.perf_counter() - since
    for lr in rates:
        if time.time() > until:
            break
        since = time.perf_counter()
        adapted = fewshot.adapt(
            net,
            support,
            policy=policy,
            steps=setting["steps"] if policy is not None else 0,
            lr=lr,
            batch=setting["batch"],
            query=query,
            scale=scale,
            engine="prefix",  # the same gradients whatever the engine; this one need not be raced against others
            cache=Features(CACHE_BYTES, device=device),  # of the support set, for prototypes
            seed=abs(number),
        )
        if adapted.predictions is None:
            raise SystemExit("no prediction was made.")
        units = adapted.selection.units if adapted.selection is not None else ()
        groups = Counter(unit.name.split("[")[0] for unit in units if "[" in unit.name)  # of channels, by layer
        right = (adapted.predictions == task.query.labels.cpu()).float().mean()
        yield {
            "backbone": backbone,
            "start": begin,
            "domain": domain,
            "task": number,
            "method": method,
            "lr": lr,
            "rate": adapted.lr,
            "accuracy": float(right),
            "ways": len(task.support.classes),
            "support": len(task.support),
            "chosen": dict(groups),
            "seconds": choosing + time.perf_counter() - since,
        }


@cache
def started(backbone: str, meta: Path | None, device: str) -> tuple[nn.Module, float]:
    """The network that tasks begin with, once for a process: each trains a copy of it."""
    net, scale = shared.start(backbone, meta)
    return net.to(device), scale


def on(some: images.ImageSet, device: str) -> images.ImageSet:
    return replace(some, images=some.images.to(device), labels=some.labels.to(device))


def practice(begin: str) -> tuple[int, float]:
    """The tasks and the learning rate of a start.

    >>> practice("meta 100 0.001")
    (100, 0.001)
    """
    kind, *numbers = begin.split()
    if kind != "meta" or len(numbers) != 2:
        raise SystemExit(f"no start {begin!r}: there are {IMAGENET!r}, and 'meta' with a number of tasks and a learning rate.")
    return int(numbers[0]), float(numbers[1])


def meta_file(backbone: str, begin: str, setting: dict[str, Any]) -> Path:
    """Weights after practising on the source; made when they are first asked for."""
    episodes, lr = practice(begin)
    path = Path(setting["work"]) / f"{backbone}_after_{episodes}_at_{lr:g}.safetensors"
    if not path.exists():
        net, _ = shared.start(backbone)
        path.parent.mkdir(parents=True, exist_ok=True)
        source = on(shared.domain(shared.SOURCE), setting["device"])
        fewshot.meta_train(
            net.to(setting["device"]), source, episodes=episodes, lr=lr, out=path, resume=Path(f"{path}.state").exists()
        )
    return path


# ---------------------------------------------------------------- which cells


def key(c: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(c[name] for name in ("backbone", "start", "domain", "task", "method", "lr"))


def wanted(
    args: argparse.Namespace, done: list[dict[str, Any]], wrong: Collection[tuple[Job, str]] = ()
) -> dict[Job, dict[str, tuple[Rate, ...]]]:
    """What can run now, as `several` takes it: what tells a method's rate, and all tasks of methods whose rate is known.

    What went `wrong` once is not tried again.
    """
    out = []
    tasks = {backbone: range(args.tasks or TASKS.get(backbone, 30)) for backbone in args.backbones}
    for backbone, begin, method in itertools.product(args.backbones, args.starts, args.methods):
        rate = rate_of(done, backbone, begin, method, args)
        if rate is None:
            tuning = itertools.product(("source", *args.domains), range(-1, -1 - args.tuning, -1), args.rates)
            out += [(backbone, begin, domain, n, method, lr) for domain, n, lr in tuning]
        else:
            out += [(backbone, begin, domain, n, method, rate) for n in tasks[backbone] for domain in args.domains]
    known = {key(c) for c in done}
    jobs: dict[Job, dict[str, tuple[Rate, ...]]] = {}
    for *job, method, lr in sorted((one for one in out if one not in known), key=lambda one: one[3]):  # all get on alike
        if (tuple(job), method) not in wrong:
            methods = jobs.setdefault(tuple(job), {})
            methods[method] = (*methods.get(method, ()), lr)
    return jobs


def rate_of(done: list[dict[str, Any]], backbone: str, begin: str, method: str, args: argparse.Namespace) -> Rate | None:
    """The rate of a method; None while not all that tells it was tried."""
    if method.endswith(shared.OWN):
        return "auto"
    if method == "none" or len(args.rates) == 1:
        return args.rates[0]
    mine = [c for c in done if (c["backbone"], c["start"], c["method"]) == (backbone, begin, method) and c["task"] < 0]
    enough = len({key(c) for c in mine}) >= (1 + len(args.domains)) * len(args.rates) * args.tuning
    return best(mine) if enough else None


def best(tuning: list[dict[str, Any]]) -> float:
    """The rate with the best mean over all domains' tasks for tuning."""
    found: dict[float, list[float]] = {}
    for c in tuning:
        found.setdefault(c["lr"], []).append(c["accuracy"])
    return max(sorted(found), key=lambda lr: statistics.mean(found[lr]))


# ---------------------------------------------------------------- tables


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: mean accuracy and its 95 % interval by domain, and over all domains; beside it the paper's.

    Tasks differ more than methods do, and every method has the same ones: `against` another one is the mean of the differences
    task by task, with an interval of its own.
    """
    tuning, cells = [c for c in cells if c["task"] < 0], at_best(cells)
    lines = _together(cells)
    for backbone, begin in dict.fromkeys((c["backbone"], c["start"]) for c in cells):
        mine = [c for c in cells if (c["backbone"], c["start"]) == (backbone, begin)]
        domains = [name for name in shared.DOMAINS if any(c["domain"] == name for c in mine)]
        tasks = sorted(Counter((c["domain"], c["method"]) for c in mine).values())
        number = f"{tasks[0]}–{tasks[-1]}" if tasks[0] < tasks[-1] else f"{tasks[0]}"
        lines += [
            f"### {backbone}, from {begin}, {number} tasks per domain",
            "",
            f"| method | {' | '.join(domains)} | all domains | against full | against exact | the paper, other domains |",
            "|" + "---|" * (len(domains) + 5),
        ]
        for method in [name for name in shared.NAMES if any(c["method"] == name for c in mine)]:
            runs = [c for c in mine if c["method"] == method]
            by_domain = [[100 * c["accuracy"] for c in runs if c["domain"] == d] for d in domains]
            row = [_interval(some) for some in by_domain]
            row.append(_over_domains(by_domain))
            for other in ("full", "tinytrain, exact"):
                pairs = _over(other, mine, method, domains)
                row.append("" if method == other or not all(pairs) else _over_domains(pairs, "+"))
            lines.append(f"| {method} | {' | '.join(row)} | {PUBLISHED[backbone].get(method, '')} |")
        lines += ["", *_rates(tuning, backbone, begin), ""]
    return "\n".join(lines)


def _together(cells: list[dict[str, Any]]) -> list[str]:
    """Markdown: what methods are ahead of full training, for each network and start, and the mean of those."""
    begun = list(dict.fromkeys((c["backbone"], c["start"]) for c in cells))
    ahead = {
        one: {row[0]: row[1:] for row in over_full([c for c in cells if (c["backbone"], c["start"]) == one])} for one in begun
    }
    if len(begun) < 2 or not all(ahead.values()):
        return []
    titles = [f"{backbone}, {begin}" for backbone, begin in begun]
    lines = ["### Points over full training", "", f"| method | {' | '.join(titles)} | mean |", "|" + "---|" * (len(begun) + 2)]
    for method in [name for name in shared.NAMES if any(name in rows for rows in ahead.values())]:
        found = [rows.get(method) for rows in ahead.values()]
        row = ["" if one is None else f"{one[0]:+.1f} ± {one[1]:.1f}" for one in found]
        mean = "" if None in found else f"{statistics.mean(one[0] for one in found if one is not None):+.1f}"
        lines.append(f"| {method} | {' | '.join(row)} | {mean} |")
    return [*lines, ""]


def _over(other: str, cells: list[dict[str, Any]], method: str, domains: list[str]) -> list[list[float]]:
    """For each domain the points of accuracy over another method, task by task."""
    there = {(c["domain"], c["task"]): c["accuracy"] for c in cells if c["method"] == other}
    runs = [c for c in cells if c["method"] == method]
    return [
        [100 * (c["accuracy"] - there[d, c["task"]]) for c in runs if c["domain"] == d and (d, c["task"]) in there]
        for d in domains
    ]


def over_full(cells: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Methods, their mean over domains of what they are ahead of full training, and half of its 95 % interval."""
    domains = list(dict.fromkeys(c["domain"] for c in cells))
    found = {name: _over("full", cells, name, domains) for name in dict.fromkeys(c["method"] for c in cells) if name != "full"}
    return [(name, *_mean_and_half(pairs)) for name, pairs in found.items() if min(map(len, pairs)) > 1]


def at_best(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tasks that every method of a start has had, each at the rate of its method.

    Others are of a run that is not over, or were run at other rates, before there was more to tell one by.
    """
    tuning: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for c in cells:
        if c["task"] < 0:
            tuning.setdefault((c["backbone"], c["start"], c["method"]), []).append(c)
    rates = {method: best(some) for method, some in tuning.items()}
    mine = [c for c in cells if c["task"] >= 0 and c["lr"] == rates.get((c["backbone"], c["start"], c["method"]), c["lr"])]
    methods: dict[tuple[str, str], dict[str, set[tuple[str, int]]]] = {}
    for c in mine:
        methods.setdefault((c["backbone"], c["start"]), {}).setdefault(c["method"], set()).add((c["domain"], c["task"]))
    common = {begin: set.intersection(*had.values()) for begin, had in methods.items()}
    return [c for c in mine if (c["domain"], c["task"]) in common[c["backbone"], c["start"]]]


def _rates(tuning: list[dict[str, Any]], backbone: str, begin: str) -> list[str]:
    """Markdown: how each rate did on the tasks for tuning, all domains and the source together, and which was taken."""
    mine = [c for c in tuning if (c["backbone"], c["start"]) == (backbone, begin)]
    rates = sorted({c["lr"] for c in mine})
    if not rates:
        return []
    lines = [
        f"| on tasks for tuning | {' | '.join(f'{lr:g}' for lr in rates)} | tasks | taken |",
        "|" + "---|" * (len(rates) + 3),
    ]
    for method in [name for name in shared.NAMES if any(c["method"] == name for c in mine)]:
        tried = [c for c in mine if c["method"] == method]
        row = [[100 * c["accuracy"] for c in tried if c["lr"] == lr] for lr in rates]
        means = " | ".join(f"{statistics.mean(some):.1f}" if some else "" for some in row)
        lines.append(f"| {method} | {means} | {min(map(len, row))} | {best(tried):g} |")
    return lines


def _interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{statistics.mean(values):.1f} ± {1.96 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


def _over_domains(by_domain: list[list[float]], sign: str = "") -> str:
    """The mean over domains; its interval is that of the mean of their means."""
    if min(map(len, by_domain)) < 2:
        return f"{statistics.mean(statistics.mean(some) for some in by_domain if some):{sign}.1f}"
    mean, half = _mean_and_half(by_domain)
    return f"{mean:{sign}.1f} ± {half:.1f}"


def _mean_and_half(by_domain: list[list[float]]) -> tuple[float, float]:
    spread = math.sqrt(sum(statistics.variance(some) / len(some) for some in by_domain)) / len(by_domain)
    return statistics.mean(map(statistics.mean, by_domain)), 1.96 * spread


# ---------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="folder with data and weights (or $PLIANT_DATA)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--backbones", nargs="+", choices=list(shared.BACKBONES), default=list(shared.BACKBONES))
    parser.add_argument("--starts", nargs="+", default=[IMAGENET, PRACTISED], help="imagenet, or like 'meta 100 0.001'")
    parser.add_argument("--domains", nargs="+", choices=list(shared.DOMAINS), default=list(shared.DOMAINS))
    parser.add_argument("--methods", nargs="+", choices=list(shared.NAMES), default=list(shared.METHODS))
    parser.add_argument("--tasks", type=int, default=None, help="per domain (60 for mcunet, 30 for the others)")
    parser.add_argument("--tuning", type=int, default=TUNING_TASKS, help="tasks of each domain per learning rate")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=None, help="images in a pass (50, or 500 on a GPU)")
    parser.add_argument("--ways", type=int, nargs=2, default=[5, 50])
    parser.add_argument("--support", type=int, default=500, help="images to learn from, at most")
    parser.add_argument("--work", type=Path, default=None, help="where weights after practising are kept")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shared.FOLDER[0] = packed.folder(args.data)
    if args.quick:
        args.backbones, args.starts, args.domains, args.methods = [MAIN], [IMAGENET], ["gtsrb"], list(QUICK)
        args.tasks, args.rates, args.steps, args.ways, args.support = 1, [0.02], 5, [5, 5], 25
    out = args.out or record.place("fewshot_quick" if args.quick else "fewshot", args.device)
    setting = {name: getattr(args, name) for name in ("device", "steps", "ways", "support")}
    setting["batch"] = args.batch or (500 if args.device == "cuda" else 50)
    here = {**setting, "work": str(args.work or out.parent / "weights")}
    done, saved = record.load(out, setting), time.monotonic()
    until, wrong = time.time() + args.seconds, set[tuple[Job, str]]()
    for backbone, begin in itertools.product(args.backbones, args.starts):
        if begin != IMAGENET:
            meta_file(backbone, begin, here)
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), prepare, (shared.FOLDER[0],)) as pool:
        while (todo := wanted(args, done, wrong)) and time.time() < until:
            number = sum(len(rates) for methods in todo.values() for rates in methods.values())
            print(f"{len(done)} cells are done, {number} can run now", flush=True)
            running = {pool.submit(several, job, methods, here, until): job for job, methods in todo.items()}
            for future in as_completed(running):
                found, failed = future.result()
                wrong |= {(running[future], method) for method in failed}
                for method, why in failed.items():
                    print(f"{running[future]}, {method}: {why}", flush=True)
                for c in found:
                    done.append(c)
                    print(f"{' '.join(map(str, key(c)))}: {c['accuracy']:.3f}", flush=True)
                if time.monotonic() - saved > SAVE_SECONDS:
                    record.save(out, setting, done, table(done))
                    saved = time.monotonic()
    record.save(out, setting, done, table(done))
    print(table(done))
    if wrong:
        raise SystemExit(f"{len(wrong)} times a method ended with an error, and was not tried again there: see above.")


def prepare(folder: Path) -> None:
    """What a process needs before its first cell."""
    torch.set_num_threads(1)
    shared.FOLDER[0] = folder


if __name__ == "__main__":
    main()
