"""Few images of a new task, a small network, 1 MB of memory: the accuracy of each method from the same start.

    python benchmarks/fewshot.py --data DIR --device cuda --jobs 12   # an hour and more on a GPU; resumable
    python benchmarks/fewshot.py --data DIR --quick                   # one network, a small task, a few methods: minutes

A task has 5–50 classes and a few images of each, sampled as in Meta-Dataset (`fewshot.Sampling`) from a domain that is not the
source. Every method starts from the same weights: those of ImageNet, or those after practising tasks of the source (40 kinds
of birds, `fewshot.meta_train`). "meta 100 0.001" means a hundred tasks at that learning rate. For each task and method:

    fewshot.adapt(network, support, policy=policy, steps=40, lr=rate, query=query)   # SGD on changed copies of the support set
    accuracy = share of query images whose nearest prototype is of the right class

Each method has one learning rate for all domains, as on a device: the best of four on other tasks of the same domains and of
the source. With `own rate` behind a name, each task has its own rate (`fewshot.rate_for`), and nothing is tuned. Methods:

    none            nothing trains
    full            every convolution
    last layer      the last convolution
    bias            every bias: what TinyTL trains beside its side branches
    sparse update   a fixed selection of layers and input channels, made once, on the source: MIT's scheme
    lora            rank 4 beside every 1×1 convolution
    random          random channels inside the budget of tinytrain
    tinytrain       the paper's selection; "exact": the best one under the same budget; "half": exact with half of the MACs;
                    "depthwise too": exact among all layers, with depthwise filters
    pliant          exact, depthwise too, by the update gain instead of Fisher information

From `random` on, all stay inside 1 MB beyond inference and 0.15 of the MACs of a full backward pass. Accuracies do not depend
on how many images a pass holds, because gradients accumulate over the whole support set; so runs use large passes.
`fewshot_costs.py` measures what one image at a time needs.
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

from pliant import fewshot, images

IMAGENET, PRACTISED = "imagenet", "meta 100 0.001"  # the weights that methods start from
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
    """A task by its number; negative numbers are tasks for tuning."""
    sampling = fewshot.Sampling(ways=tuple(setting["ways"]), support=setting["support"])
    name = shared.SOURCE if domain == "source" else shared.DOMAINS[domain]
    return sampling.draw(shared.domain(name), seed=int(number < 0), number=abs(number))


Job = tuple[str, str, str, int]  # backbone, start, domain, task
Rate = float | Literal["auto"]  # auto: set by the task


def several(
    job: Job, methods: dict[str, tuple[Rate, ...]], setting: dict[str, Any], until: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One task, several methods with several learning rates each: the results, and the errors by method.

    One process runs all methods of a task: for every new size of the support set, CUDA's libraries search for kernels again,
    which takes longer than training. Nothing starts after the moment `until`.
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
    """One task, one method, several learning rates: the accuracy of each on the query images, and the common selection."""
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
            engine="prefix",
            cache=CACHE_BYTES,  # features of the support set, for prototypes
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
    """The network that tasks start from, loaded once per process; each task trains a copy."""
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
    """Weights after practising on the source; trained when they are first needed."""
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
    """What can run now, as arguments of `several`: tuning tasks, and all tasks of methods whose rate is known.

    What ended with an error (`wrong`) is not tried again.
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
    todo = sorted((one for one in out if one not in known), key=lambda one: one[3])  # by task: all methods progress evenly
    for *job, method, lr in todo:
        if (tuple(job), method) not in wrong:
            methods = jobs.setdefault(tuple(job), {})
            methods[method] = (*methods.get(method, ()), lr)
    return jobs


def rate_of(done: list[dict[str, Any]], backbone: str, begin: str, method: str, args: argparse.Namespace) -> Rate | None:
    """The learning rate of a method; None while tuning is not complete."""
    if method.endswith(shared.OWN):
        return "auto"
    if method == "none" or len(args.rates) == 1:
        return args.rates[0]
    mine = [c for c in done if (c["backbone"], c["start"], c["method"]) == (backbone, begin, method) and c["task"] < 0]
    enough = len({key(c) for c in mine}) >= (1 + len(args.domains)) * len(args.rates) * args.tuning
    return best(mine) if enough else None


def best(tuning: list[dict[str, Any]]) -> float:
    """The rate with the best mean accuracy over the tuning tasks of all domains."""
    found: dict[float, list[float]] = {}
    for c in tuning:
        found.setdefault(c["lr"], []).append(c["accuracy"])
    return max(sorted(found), key=lambda lr: statistics.mean(found[lr]))


# ---------------------------------------------------------------- tables


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: mean accuracy and its 95 % interval by domain and over all domains, and the paper's figure.

    Tasks differ more than methods do, and every method has the same tasks. So `minus full` is the mean of the differences task
    by task, with its own interval.
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
            f"| method | {' | '.join(domains)} | all domains | minus full | minus exact | the paper, other domains |",
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
    """Markdown: accuracy minus that of full training, for each network and start, and the mean of those."""
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
    """For each domain, the accuracy minus that of another method in percentage points, task by task."""
    there = {(c["domain"], c["task"]): c["accuracy"] for c in cells if c["method"] == other}
    runs = [c for c in cells if c["method"] == method]
    return [
        [100 * (c["accuracy"] - there[d, c["task"]]) for c in runs if c["domain"] == d and (d, c["task"]) in there]
        for d in domains
    ]


def over_full(cells: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Methods, the mean over domains of their accuracy minus that of full training, and half of its 95 % interval."""
    domains = list(dict.fromkeys(c["domain"] for c in cells))
    found = {name: _over("full", cells, name, domains) for name in dict.fromkeys(c["method"] for c in cells) if name != "full"}
    return [(name, *_mean_and_half(pairs)) for name, pairs in found.items() if min(map(len, pairs)) > 1]


def at_best(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tasks that every method of a start has completed, each at the learning rate of its method.

    Other cells are from a run that is not complete, or were run at other rates before tuning was complete.
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
    """Markdown: mean accuracy of each rate on the tuning tasks of all domains and the source, and the rate that is used."""
    mine = [c for c in tuning if (c["backbone"], c["start"]) == (backbone, begin)]
    rates = sorted({c["lr"] for c in mine})
    if not rates:
        return []
    lines = [
        f"| tuning tasks: learning rate | {' | '.join(f'{lr:g}' for lr in rates)} | tasks | used |",
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
    """The mean over domains of their means, with its interval."""
    if min(map(len, by_domain)) < 2:
        return f"{statistics.mean(statistics.mean(some) for some in by_domain if some):{sign}.1f}"
    mean, half = _mean_and_half(by_domain)
    return f"{mean:{sign}.1f} ± {half:.1f}"


def _mean_and_half(by_domain: list[list[float]]) -> tuple[float, float]:
    spread = math.sqrt(sum(statistics.variance(some) / len(some) for some in by_domain)) / len(by_domain)
    return statistics.mean(map(statistics.mean, by_domain)), 1.96 * spread


# ---------------------------------------------------------------- main


def main() -> None:
    parser = record.options(__doc__)
    packed.option(parser)
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this time")
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
    parser.add_argument("--support", type=int, default=500, help="most images in a support set")
    parser.add_argument("--work", type=Path, default=None, help="folder for weights after practising")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shared.FOLDER[0] = packed.folder(args.data)
    if args.quick:
        args.backbones, args.starts, args.domains, args.methods = [MAIN], [IMAGENET], ["gtsrb"], list(QUICK)
        args.tasks, args.rates, args.steps, args.ways, args.support = 1, [0.02], 5, [5, 5], 25
    out = record.out(args, "fewshot")
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
        raise SystemExit(f"{len(wrong)} runs ended with an error and were not repeated: see above.")


def prepare(folder: Path) -> None:
    """Set up a worker process."""
    torch.set_num_threads(1)
    shared.FOLDER[0] = folder


if __name__ == "__main__":
    main()
