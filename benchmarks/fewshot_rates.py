"""Is a learning rate for each few-shot task worth it? Accuracies at tuned rates, and at the rate of `fewshot.rate_for`.

    python benchmarks/fewshot_rates.py --data DIR           # minutes on one CPU thread; nothing trains
    python benchmarks/fewshot_rates.py --data DIR --quick   # one network, two tasks of each domain

`fewshot.py` tries four learning rates with every method on its tuning tasks. This benchmark reads those results (`--results`),
from ImageNet weights:

    for each tuning task: features of its support set → rate_for(features, classes)       # the default rate of fewshot.adapt
    for each method: mean accuracy over tasks at one rate for all, at each task's own rate, and at each task's best rate

One rate for all is the best one, which methods have in the table of `fewshot.py`. Accuracy between two rates is interpolated on
a logarithmic scale. The best rate of each task is out of reach. `rate_for` was fitted on these very tasks: for others see
`own rate` in `fewshot.py`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import statistics
from pathlib import Path
from typing import Any

import fewshot
import fewshot_methods as shared
import packed
import record
import torch
from fewshot import IMAGENET, key

from pliant import fewshot as few

Tried = dict[tuple[str, int], dict[float, float]]  # domain and task → rate → accuracy


def tried(cells: list[dict[str, Any]], backbone: str, method: str) -> Tried:
    """Accuracies at all four rates, for tasks on which all of them were tried."""
    found: Tried = {}
    for c in {key(c): c for c in cells}.values():
        if (c["backbone"], c["start"], c["method"]) == (backbone, IMAGENET, method) and c["task"] < 0:
            found.setdefault((c["domain"], c["task"]), {})[c["lr"]] = 100 * c["accuracy"]
    return {task: by_rate for task, by_rate in found.items() if len(by_rate) == len(fewshot.RATES)}


def at(by_rate: dict[float, float], rate: float) -> float:
    """The accuracy at a rate, interpolated between those that were tried.

    >>> at({0.001: 40.0, 0.004: 50.0, 0.016: 60.0, 0.064: 30.0}, 0.008)
    55.0
    """
    rates = sorted(by_rate)
    after = next((k for k, one in enumerate(rates) if one >= rate), len(rates) - 1)
    if after == 0 or rates[after] <= rate:
        return by_rate[rates[after]]
    low, high = rates[after - 1], rates[after]
    share = math.log(rate / low) / math.log(high / low)
    return (1 - share) * by_rate[low] + share * by_rate[high]


def own_rate(backbone: str, domain: str, number: int, setting: dict[str, Any]) -> float:
    """The default learning rate of a task."""
    net, _ = fewshot.started(backbone, None, "cpu")
    support = fewshot.task_of(domain, number, setting).support
    with torch.no_grad():
        features = [(net.eval().embed(images), labels) for images, labels, _ in shared.batches(support, 50, net.pixel_stats)]
    return few.rate_for(features, len(support.classes))


def table(cells: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for backbone in dict.fromkeys(c["backbone"] for c in cells):
        mine = [c for c in cells if c["backbone"] == backbone]
        lines += [f"### {backbone}", "", "| domain | rates of its tasks |", "|---|---|"]
        lines += [f"| {domain} | {', '.join(f'{rate:.2g}' for rate in rates)} |" for domain, rates in mine[0]["rates"].items()]
        lines += [
            "",
            "| method | tasks | one rate for all | that rate | own rate of each task | best rate of each task |",
            "|" + "---|" * 6,
        ]
        for c in mine:
            gain = f"{c['own'] - c['one']:+.1f} ± {c['half']:.1f}"
            columns = f"{c['one']:.1f} | {c['rate']:g} | {c['own']:.1f} ({gain}) | {c['each']:.1f}"
            lines.append(f"| {c['method']} | {c['tasks']} | {columns} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = record.options(__doc__, device=False)
    packed.option(parser)
    parser.add_argument("--results", type=Path, default=record.RESULTS / "fewshot_h200.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shared.FOLDER[0] = packed.folder(args.data)
    found, cells = record.cells(args.results), list[dict[str, Any]]()
    setting = {"ways": [5, 50], "support": 500}
    for backbone in list(shared.BACKBONES)[: 1 if args.quick else None]:
        methods = {name: tried(found, backbone, name) for name in shared.METHODS}
        if args.quick:
            methods = {name: {task: of[task] for task in of if task[1] >= -2} for name, of in methods.items()}
        tasks = sorted({task for of in methods.values() for task in of}, key=lambda one: (one[0], -one[1]))
        rates = {task: own_rate(backbone, *task, setting) for task in tasks}
        by_domain: dict[str, list[float]] = {}
        for (domain, _), rate in rates.items():
            by_domain.setdefault(domain, []).append(rate)
        for name, of in methods.items():
            if of:
                means = {rate: statistics.mean(by_rate[rate] for by_rate in of.values()) for rate in fewshot.RATES}
                best = max(means, key=lambda rate: means[rate])
                own = statistics.mean(at(by_rate, rates[task]) for task, by_rate in of.items())
                gains = [at(by_rate, rates[task]) - by_rate[best] for task, by_rate in of.items()]
                half = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
                each = statistics.mean(max(by_rate.values()) for by_rate in of.values())
                cells.append({"backbone": backbone, "method": name, "tasks": len(of), "rate": best, "one": means[best]})
                cells[-1] |= {"own": own, "half": half, "each": each, "rates": by_domain}
    record.save(record.out(args, "fewshot_rates"), {"device": "cpu", "results": args.results.name}, cells, table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
