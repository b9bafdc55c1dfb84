"""Fleets on a simulated clock: accuracy against time and bytes, for every method from the same start.

    python benchmarks/fleets.py                       # digits, 20 clients, three seeds: half an hour on a CPU; resumable
    python benchmarks/fleets.py --task signs --data DIR
    python benchmarks/fleets.py --quick               # two methods, one seed, a few rounds: about a minute

Clients and server are those of `examples/fleet`, in one process. The devices of a fleet are one, two, three and four times as
slow as this machine. A step takes what a measured profile says, times that factor, times a random one per round (`jitter`).
What is timed:

    round     the slowest of its clients, from the task to the last step; a probe counts as a full step
    FedAvg    runs `rounds` rounds; the others until half of FedAvg's time is over
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import record
import torch

from pliant import Profile
from pliant.integrations.flower import METHODS, Profiles

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))

from fleet.settings import Setting
from fleet.simulate import run

PLAIN = "fedavg"
HALF = 0.5  # of FedAvg's time


def profiles_of(folder: Path) -> Profiles:
    """What was measured for these runs before, so that a run that was interrupted goes on with the same prices."""
    known = {path.stem: Profile.load(path) for path in sorted(folder.glob("*.json"))}
    return Profiles({None if name == "whole" else int(name): profile for name, profile in known.items()})


def keep(profiles: Profiles, folder: Path) -> None:
    for exit, profile in profiles.by_exit.items():
        path = folder / f"{'whole' if exit is None else exit}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(path)


def cell(setting: Setting, profiles: Profiles, seconds: float | None) -> dict[str, Any]:
    """One run: its curve and its totals."""
    start = time.process_time()
    rows = run(setting, profiles, seconds)
    took = sum(row["took"] for row in rows[1:])
    return {
        "method": setting.method,
        "alpha": setting.alpha,
        "clients": setting.clients,
        "seed": setting.seed,
        "dropout": setting.dropout,
        "clock": [round(row["clock"], 5) for row in rows],
        "accuracy": [round(row["accuracy"], 5) for row in rows],
        "took": took,
        "late": sum(row["late"] for row in rows[1:]),
        "bytes_back": sum(row["bytes_back"] for row in rows[1:]) / max(took, 1),
        "refused": sum(len(row["refused"]) for row in rows[1:]),
        "share": statistics.mean(row["share"] for row in rows[1:]),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and the two before it."""
    return [statistics.mean(values[max(i - 2, 0) : i + 1]) for i in range(len(values))]


def at(cell: dict[str, Any], seconds: float) -> float:
    """The accuracy after so many seconds."""
    reached = [a for t, a in zip(cell["clock"], smooth(cell["accuracy"]), strict=True) if t <= seconds * (1 + 1e-9)]
    return reached[-1]


def time_to(cell: dict[str, Any], accuracy: float) -> float | None:
    """The seconds until this accuracy is reached; None where it is not."""
    curve = zip(cell["clock"], smooth(cell["accuracy"]), strict=True)
    return next((t for t, a in curve if a >= accuracy), None)


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: one row per method, for each split of the data."""
    lines = []
    kinds = dict.fromkeys((c["alpha"], c["clients"], c["dropout"]) for c in cells)
    for alpha, clients, dropout in kinds:
        here = [c for c in cells if (c["alpha"], c["clients"], c["dropout"]) == (alpha, clients, dropout)]
        full = {c["seed"]: c for c in here if c["method"] == PLAIN}
        drops = f", {dropout:.0%} of client rounds lost" if dropout else ""
        lines += [
            f"**{clients} clients, Dirichlet {alpha:g}{drops}**",
            "",
            "| method | accuracy at half of FedAvg's time | time to FedAvg's final accuracy | late | sent back | seeds |",
            "|---|---|---|---|---|---|",
        ]
        for method in dict.fromkeys(c["method"] for c in here):
            runs = [c for c in here if c["method"] == method and c["seed"] in full]
            if not runs:
                continue
            halves = [100 * at(c, HALF * full[c["seed"]]["clock"][-1]) for c in runs]
            goals = [smooth(full[c["seed"]]["accuracy"])[-1] for c in runs]
            times = [time_to(c, goal) for c, goal in zip(runs, goals, strict=True)]
            own = [time_to(full[c["seed"]], goal) or 0.0 for c, goal in zip(runs, goals, strict=True)]
            shares = [t / o for t, o in zip(times, own, strict=True) if t is not None]
            late = 100 * sum(c["late"] for c in runs) / max(sum(c["took"] for c in runs), 1)
            reached = (
                f"{statistics.mean(shares):.2f} ({min(shares):.2f}–{max(shares):.2f})"
                if len(shares) == len(runs)
                else (f"reached in {len(shares)} of {len(runs)} runs")
            )
            final = f" (ends at {100 * statistics.mean(goals):.1f})" if method == PLAIN else ""
            lines.append(
                f"| {method} | {statistics.mean(halves):.1f} ({min(halves):.1f}–{max(halves):.1f}){final} | {reached} "
                f"| {late:.1f} % | {statistics.mean(c['bytes_back'] for c in runs) / 1e3:.0f} kB | {len(runs)} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = record.options(__doc__, device=False)
    parser.add_argument("--task", default="digits", choices=["digits", "signs", "birds", "spoken"])
    parser.add_argument("--data", default="", help="the folder of signs, birds and spoken digits")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10, help="of FedAvg")
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.rounds, args.seeds, args.methods = 3, 1, [PLAIN, "pliant"]
    out = record.out(args, f"fleet_{args.task}")
    what = {"task": args.task, "data": args.data, "clients": args.clients, "rounds": args.rounds, "rate": args.rate}
    base = replace(Setting(), **what, dropout=args.dropout)
    varied = ("method", "seed", "alpha", "data", "state", "clients", "dropout", "rounds")
    setting = {name: value for name, value in asdict(base).items() if name not in varied}
    done = record.load(out, setting)
    folder = Path("build") / "fleet_profiles" / args.task
    profiles = profiles_of(folder)
    for alpha in args.alphas:
        for seed in range(args.seeds):
            for method in dict.fromkeys([PLAIN, *args.methods]):
                key = {"method": method, "alpha": alpha, "clients": args.clients, "dropout": args.dropout, "seed": seed}

                def find(**changed: Any) -> dict[str, Any] | None:
                    wanted = key | changed  # noqa: B023
                    return next((c for c in done if wanted.items() <= c.items()), None)

                if find() is not None:
                    continue
                full = find(method=PLAIN)
                seconds = HALF * full["clock"][-1] if full is not None else None
                done.append(cell(replace(base, method=method, alpha=alpha, seed=seed), profiles, seconds))
                keep(profiles, folder)
                record.save(out, setting, done, table(done))
                ended = smooth(done[-1]["accuracy"])[-1]
                print(f"alpha {alpha:g}, seed {seed}, {method:16}: {ended:.3f} after {done[-1]['clock'][-1]:.2f} s", flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
