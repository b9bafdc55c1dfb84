"""The tables of `transfer.py`: the best learning rate of each method, and its results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from transfer_methods import CAPTURED, FULL, TUNED

Cells = list[dict[str, Any]]
NEAR = 0.05  # of validation accuracy, about two standard errors of a small split: rates this near may be as good
FAILED = -1.0  # as an accuracy
LOSS = 0.003  # of accuracy: a method that comes this near to full training is as good
COLUMNS = ("method", "learning rate", "test accuracy", "steps", "run alone", "/ full", "/ tuned", "/ captured")
TO = f"time to full's accuracy − {100 * LOSS:g}"
COLUMNS += (TO, "peak MB", "later peak MB", "joules", "engine")
BYTES = {"peak MB": "peak_bytes", "later peak MB": "later_peak_bytes"}


def best(cells: Cells, task: str, method: str) -> float | None:
    """The contender with the best mean validation accuracy over the seeds that all contenders have completed."""
    found = {lr: _judged_by_seed(cells, task, method, lr) for lr in contenders(cells, task, method)}
    seeds = set.intersection(*map(set, found.values())) if found else set()
    means = {lr: statistics.mean(by_seed[seed] for seed in seeds) for lr, by_seed in found.items()}
    return max(means, key=lambda lr: means[lr], default=None)


def contenders(cells: Cells, task: str, method: str, rates: Sequence[float] = ()) -> list[float]:
    """The rates that may be a method's best: those near the best one with seed 0.

    Empty while not all of `rates` were tried, or if every run failed.
    """
    tried = dict.fromkeys(c["lr"] for c in cells if (c["task"], c["method"], c["seed"]) == (task, method, 0))
    first = {lr: _judged_by_seed(cells, task, method, lr)[0] for lr in tried}
    top = max(first.values(), default=FAILED)
    return [lr for lr in first if first[lr] >= top - NEAR] if set(rates) <= set(first) and top > FAILED else []


def _judged_by_seed(cells: Cells, task: str, method: str, lr: float) -> dict[int, float]:
    """Validation accuracies; for a repeated seed, the first run that succeeded."""
    mine = [c for c in cells if (c["task"], c["method"], c["lr"]) == (task, method, lr)]
    out = {c["seed"]: c["validation"] for c in reversed(mine) if "failed" not in c}
    return {c["seed"]: FAILED for c in mine} | out


def table(cells: Cells, device: str) -> str:
    """Markdown, a table for each task: test accuracies over seeds, and times of runs that were alone on the machine."""
    lines: list[str] = []
    for task in dict.fromkeys(c["task"] for c in cells):
        mine = [c for c in cells if c["task"] == task]
        rates = {method: best(mine, task, method) for method in dict.fromkeys(c["method"] for c in mine)}
        runs = {method: [c for c in mine if (c["method"], c["lr"]) == (method, lr)] for method, lr in rates.items()}
        whole = {method: [c for c in some if "failed" not in c] for method, some in runs.items()}
        rows = [_row(method, whole, {c["lr"] for c in mine if c["method"] == method}) for method in whole if whole[method]]
        shown = [name for name in COLUMNS if any(row.get(name) for row in rows)]
        lines += [f"### {task}", "", f"| {' | '.join(shown)} |", "|" + "---|" * len(shown)]
        lines += [f"| {' | '.join(row.get(name, '') for name in shown)} |" for row in rows]
        lines += ["", *_notes(mine, whole, device), ""]
    return "\n".join(lines)


def _row(method: str, whole: dict[str, Cells], tried: set[float]) -> dict[str, str]:
    runs = whole[method]
    by_seed = {c["seed"]: c for c in reversed(runs)}  # a repeated run counts once
    test = [100 * c["test"] for c in by_seed.values()]
    lr = runs[0]["lr"]
    edge = {min(tried): " (smallest)", max(tried): " (largest)"}.get(lr, "") if len(tried) > 1 else ""
    out = {
        "method": method,
        "learning rate": f"{lr:g}{edge}",
        "test accuracy": f"{statistics.mean(test):.1f} ({min(test):.1f}–{max(test):.1f}, {len(test)})",
        "steps": str(runs[0]["steps"]),
        "engine": ", ".join(dict.fromkeys(c["ran"] for c in runs if "ran" in c)),
    }
    for name, kind in BYTES.items():
        if any(kind in c for c in runs):
            out[name] = f"{max(c[kind] for c in runs if kind in c) / 1e6:.0f}"
    took, goal = _seconds(whole, method), _goal(whole)
    if took is None:
        return out
    out["run alone"] = f"{took:.1f} s"
    for name, other in (("/ full", FULL), ("/ tuned", TUNED), ("/ captured", CAPTURED)):
        reference = _seconds(whole, other)
        out[name] = f"{took / reference:.2f}" if reference else ""
    if goal is not None:
        curve = [statistics.mean(points) for points in zip(*(_judged(c) for c in by_seed.values()), strict=True)]
        epoch = next((n for n, judged in enumerate(curve) if judged >= goal), None)
        if epoch is None:
            out[TO] = f"no: {100 * max(curve):.1f}"
        else:
            seconds = statistics.mean(c["curve"][epoch][0] for c in _alone(runs))
            reference = _seconds(whole, FULL)
            out[TO] = f"{seconds:.1f} s" + (f" ({seconds / reference:.2f})" if reference else "")
    joules = [c["joules"] for c in _alone(runs) if "joules" in c]
    out["joules"] = f"{statistics.mean(joules):.0f}" if joules else ""
    return out


def _alone(runs: Cells) -> Cells:
    return [c for c in runs if c["beside"] == 0]


def _judged(run: dict[str, Any]) -> list[float]:
    """Validation accuracy after each epoch."""
    return [judged for _, judged, _ in run["curve"]]


def _seconds(whole: dict[str, Cells], method: str) -> float | None:
    """The mean time of runs that were alone on the machine."""
    some = [c["seconds"] for c in _alone(whole.get(method, []))]
    return statistics.mean(some) if some else None


def _goal(whole: dict[str, Cells]) -> float | None:
    """The final validation accuracy of full training, mean over seeds, less `LOSS`."""
    last = {c["seed"]: _judged(c)[-1] for c in whole.get(FULL, [])}
    return statistics.mean(last.values()) - LOSS if last else None


def _notes(mine: Cells, whole: dict[str, Cells], device: str) -> list[str]:
    out = []
    goal = _goal(whole)
    if goal is not None:
        out.append(
            f"`{TO}`: seconds until the mean validation accuracy over seeds is {goal:.1%}, and in brackets over the whole run "
            f"of `{FULL}`; `no`: the best that was reached."
        )
    if device == "cuda":
        later = any("later_peak_bytes" in c for c in mine)
        held = "`later peak MB`: after profiling, with it" if later else "that is in no column"
        out.append(f"`peak MB`: the allocator's peak, without memory that captured steps reserve; {held}.")
    seconds = "CPU time of one thread" if device == "cpu" else "synchronised wall time"
    out.append(f"Accuracies: mean (range, seeds). Time: {seconds}.")
    for what in ("start", "order"):
        known: dict[int, set[int]] = {}
        for c in mine:
            if what in c and "epochs" not in c["method"]:
                known.setdefault(c["seed"], set()).add(c[what])
        odd = [seed for seed, some in known.items() if len(some) > 1]
        if odd:
            out.append(f"NOT COMPARABLE: runs of seed {odd[0]} had more than one {what}.")
    out += list(dict.fromkeys(f"- {c['method']}, lr {c['lr']:g}: {c['failed']}" for c in mine if "failed" in c))
    notes = [line for line in out if not line.startswith("- ")]
    failed = out[len(notes) :]
    return ["\n\n".join(notes), *([""] if failed else []), *failed]
