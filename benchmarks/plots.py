"""Plots of the committed results: accuracy over time, and few-shot methods minus full training.

    python benchmarks/plots.py                 # docs/images/*.svg from benchmarks/results/*.json
    python benchmarks/plots.py --out build     # elsewhere

Needs matplotlib: pip install 'pliant[bench]'.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import fewshot
import fleets
import record
import transfer_table

from pliant.integrations.flower import METHODS

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
FULL = ("full", "full, tuned", "full, captured")
AT_EQUAL_TIME = ("pliant 0.4", "last 0.4", "random 0.4")
TRANSFER = {  # result file → title (of its first task), unit of time, and the methods to show
    "transfer_arm_cpu": (
        "20 kinds of birds, MobileNetV2, one thread of an ARM CPU",
        "CPU seconds",
        (*FULL, *AT_EQUAL_TIME),
    ),
    "transfer_cub_h200": (
        "200 kinds of birds, MobileNetV2, H200",
        "seconds",
        (*FULL, "pliant 3.2ms", "last 3.2ms", "random 3.2ms", "pliant 4ms, memory 300MB"),
    ),
    "transfer_pets_h200": (
        "37 breeds of cats and dogs, MobileNetV2, H200",
        "seconds",
        (*FULL, "pliant 2.5ms", "last 2.5ms", "pliant 4ms, memory 300MB"),
    ),
    "transfer_gtsrb_h200": ("43 traffic signs, MobileNetV2, H200", "seconds", (*FULL, "pliant 4ms")),
}
FLEETS = {"fleet_digits_cpu": ("digits",), "fleet_data_cpu": ("spoken", "signs", "birds")}
OURS = "#c2410c"


def figure(columns: int = 1, rows: int = 1) -> tuple[Any, Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'pliant[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "pliant", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(rows, columns, figsize=(7 * columns, 3.6 * rows), layout="constrained", squeeze=False)
    return pyplot, fig, axes.ravel()


def over_time(name: str, out: Path) -> None:
    """Validation accuracy after each epoch, mean over seeds, over the training time so far."""
    title, unit, shown = TRANSFER[name]
    cells = [c for c in record.cells(RESULTS / f"{name}.json") if "failed" not in c]
    cells = [c for c in cells if c["task"] == cells[0]["task"]]
    pyplot, fig, (axes,) = figure()
    for method in [method for method in shown if any(c["method"] == method for c in cells)]:
        lr = transfer_table.best(cells, cells[0]["task"], method)
        runs = {c["seed"]: c for c in cells if (c["method"], c["lr"]) == (method, lr) and c["beside"] == 0}
        if not runs:
            continue
        epochs = list(zip(*(c["curve"] for c in runs.values()), strict=True))
        seconds = [statistics.mean(point[0] for point in points) for points in epochs]
        judged = [100 * statistics.mean(point[1] for point in points) for points in epochs]
        style = {"color": OURS, "linewidth": 2.4, "zorder": 3} if method.startswith("pliant") else {"linewidth": 1.2}
        if method.startswith("pliant") and "," in method:
            style["linestyle"] = "--"
        axes.plot(seconds, judged, marker=".", label=f"{method} ({len(runs)})", **style)
    axes.set(xlabel=f"{unit} of training, everything included", ylabel="validation accuracy, %", title=title)
    if name.endswith("h200"):
        axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8)
    save(pyplot, fig, out / f"{name}.svg")


def against_full(out: Path) -> None:
    """Accuracy minus that of full training, task by task, with 95 % intervals of the mean over domains."""
    cells = fewshot.at_best(record.cells(RESULTS / "fewshot_h200.json"))
    starts = list(dict.fromkeys((c["backbone"], c["start"]) for c in cells))
    pyplot, fig, all_axes = figure(2, (len(starts) + 1) // 2)
    for axes, (net, begin) in zip(all_axes, starts, strict=False):
        rows = sorted(
            fewshot.over_full([c for c in cells if (c["backbone"], c["start"]) == (net, begin)]), key=lambda row: row[1]
        )
        methods, means, halves = zip(*rows, strict=True)
        colours = [OURS if "tinytrain" in method or method == "pliant" else "#64748b" for method in methods]
        axes.barh(methods, means, 0.7, xerr=halves, color=colours)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel="percentage points minus full training, task by task", title=f"{net}, from {begin}")
    save(pyplot, fig, out / "fewshot_h200.svg")


def over_rounds(name: str, out: Path) -> None:
    """Accuracy over the simulated clock of fleets, seed 0, every method; the mean of each round and the two before it."""
    fleets_of = {
        (task, alpha, clients): [c for c in cells if (c["alpha"], c["clients"], c["seed"]) == (alpha, clients, 0)]
        for task in FLEETS[name]
        for cells in [record.cells(RESULTS / f"fleet_{task}_cpu.json")]
        for alpha, clients in sorted({(c["alpha"], c["clients"]) for c in cells}, key=lambda kind: (kind[1], kind[0]))
    }
    pyplot, fig, all_axes = figure(2, (len(fleets_of) + 1) // 2)
    colours = {method: f"C{i}" for i, method in enumerate(METHODS)} | {"pliant": OURS}
    for axes, ((task, alpha, clients), cells) in zip(all_axes, fleets_of.items(), strict=False):
        for cell in sorted(cells, key=lambda c: list(METHODS).index(c["method"])):
            ours = {"linewidth": 2.4, "zorder": 3} if cell["method"] == "pliant" else {"linewidth": 1.2}
            judged = [100 * a for a in fleets.smooth(cell["accuracy"])]
            axes.plot(cell["clock"], judged, marker=".", label=cell["method"], color=colours[cell["method"]], **ours)
        title = f"{task}: {clients} clients of four speeds, Dirichlet {alpha:g}"
        axes.set(xlabel="simulated seconds", ylabel="test accuracy, %", title=title)
        axes.legend(frameon=False, fontsize=7)
    for axes in all_axes[len(fleets_of) :]:
        axes.set_axis_off()
    save(pyplot, fig, out / f"{name}.svg")


def save(pyplot: Any, fig: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    fig.savefig(aside, format="svg", metadata={"Date": None})
    aside.replace(path)
    pyplot.close(fig)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args()
    for name in TRANSFER:
        over_time(name, args.out)
    against_full(args.out)
    for name in FLEETS:
        over_rounds(name, args.out)


if __name__ == "__main__":
    main()
