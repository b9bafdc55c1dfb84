"""Fleets on a simulated clock: accuracy against time and bytes, for every method from the same start.

    python benchmarks/fleets.py --alphas 0.1 1 --clients 20 100 --jobs 8      # digits, three seeds, every method; resumable
    python benchmarks/fleets.py --task signs --data DIR --rates 0.1 0.3 1     # FedAvg's best rate, found on another split
    python benchmarks/fleets.py --quick                                       # two methods, one seed: about a minute

Clients and server are those of `examples/fleet`, in one process. The devices of a fleet are one, two, three and four times as
slow as this machine. A step takes what a measured profile says, times that factor, times a random one per round (`jitter`).
What is timed:

    round     the slowest of its clients, from the task to the last step; a probe counts as a full step
    FedAvg    runs `rounds` rounds; the others until half of FedAvg's time is over

Of more than 20 clients, 20 take part in each round. `--jobs` runs so many fleets at once: the simulated clock does not mind.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import record
import torch

from pliant import Profile
from pliant.integrations.flower import METHODS, Profiles, ability

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))

from fleet import data, model
from fleet.settings import Setting
from fleet.simulate import run

PLAIN = "fedavg"
HALF = 0.5  # of FedAvg's time
IN_ROUND = 20  # clients, at most
OTHER_SEED = 100  # of the split on which a rate is found


def profiles_of(folder: Path) -> Profiles:
    """What was measured for these runs before, so that a run that was interrupted goes on with the same prices."""
    known = {path.stem: Profile.load(path) for path in sorted(folder.glob("*.json"))}
    return Profiles({None if name == "whole" else int(name): profile for name, profile in known.items()})


def measured(setting: Setting, folder: Path) -> None:
    """Profiles of the network with every exit, kept in the folder: every run of a task has the same prices."""
    profiles, held = profiles_of(folder), data.load(setting.task, setting.data)
    how = {"rate": setting.rate, "batch": setting.batch, "steps": setting.steps}
    mine = data.split(held.labels, setting.clients, setting.alpha, setting.seed)[0]
    ability(model.local(model.net(held, setting.seed), held, mine, **how), profiles)
    for exit, profile in profiles.by_exit.items():
        path = folder / f"{'whole' if exit is None else exit}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(path)


def cell(setting: Setting, folder: Path, seconds: float | None) -> dict[str, Any]:
    """One run: its curve and its totals."""
    torch.set_num_threads(1)
    start = time.process_time()
    rows = run(setting, profiles_of(folder), seconds)
    took = sum(row["took"] for row in rows[1:])
    whole = model.net(data.load(setting.task, setting.data), setting.seed).state_dict().values()
    return {
        "method": setting.method,
        "alpha": setting.alpha,
        "clients": setting.clients,
        "seed": setting.seed,
        "dropout": setting.dropout,
        "rate": setting.rate,
        "clock": [round(row["clock"], 5) for row in rows],
        "accuracy": [round(row["accuracy"], 5) for row in rows],
        "took": took,
        "late": sum(row["late"] for row in rows[1:]),
        "bytes_back": sum(row["bytes_back"] for row in rows[1:]) / max(took, 1),
        "bytes_down": sum(tensor.numel() * tensor.element_size() for tensor in whole),
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
    kinds = sorted({(c["alpha"], c["clients"], c["dropout"]) for c in cells if c["seed"] != OTHER_SEED}, key=lambda k: k[1::-1])
    for alpha, clients, dropout in kinds:
        here = [c for c in cells if (c["alpha"], c["clients"], c["dropout"]) == (alpha, clients, dropout)]
        here = sorted((c for c in here if c["seed"] != OTHER_SEED), key=lambda c: list(METHODS).index(c["method"]))
        full = {c["seed"]: c for c in here if c["method"] == PLAIN}
        drops = f", {dropout:.0%} of client rounds lost" if dropout else ""
        drops += f", {IN_ROUND} in each round" if clients > IN_ROUND else ""
        lines += [
            f"**{clients} clients, Dirichlet {alpha:g}{drops}**",
            "",
            "| method | accuracy at half of FedAvg's time | time to its final accuracy | late | sent back | received | runs |",
            "|---|---|---|---|---|---|---|",
        ]
        for method in dict.fromkeys(c["method"] for c in here):
            runs = [c for c in here if c["method"] == method and c["seed"] in full]
            if not runs:
                continue
            halves = [100 * at(c, HALF * full[c["seed"]]["clock"][-1]) for c in runs]
            goals = [smooth(full[c["seed"]]["accuracy"])[-1] for c in runs]
            times = [time_to(c, goal) for c, goal in zip(runs, goals, strict=True)]
            own = [time_to(full[c["seed"]], goal) or 0.0 for c, goal in zip(runs, goals, strict=True)]
            shares = [t / o for t, o in zip(times, own, strict=True) if t is not None and o]
            late = 100 * sum(c["late"] for c in runs) / max(sum(c["took"] for c in runs), 1)
            if not all(own):
                reached = "FedAvg learns nothing"  # it ends no higher than it began
            elif len(shares) == len(runs):
                reached = f"{statistics.mean(shares):.2f} ({min(shares):.2f}–{max(shares):.2f})"
            else:
                reached = f"reached in {len(shares)} of {len(runs)} runs"
            final = f" (ends at {100 * statistics.mean(goals):.1f})" if method == PLAIN else ""
            lines.append(
                f"| {method} | {statistics.mean(halves):.1f} ({min(halves):.1f}–{max(halves):.1f}){final} | {reached} "
                f"| {late:.1f} % | {statistics.mean(c['bytes_back'] for c in runs) / 1e3:.0f} kB "
                f"| {runs[0]['bytes_down'] / 1e3:.0f} kB | {len(runs)} |"
            )
        lines.append("")
    return "\n".join(lines)


def best_rate(cells: list[dict[str, Any]]) -> float:
    """The rate with which FedAvg ended best on the split that is in no table."""
    return float(max((c for c in cells if c["seed"] == OTHER_SEED), key=lambda c: smooth(c["accuracy"])[-1])["rate"])


class Runs:
    """Runs in processes of their own, a few at once. Each is kept as it ends; what an earlier call kept is not run again."""

    def __init__(self, jobs: int, folder: Path, done: list[dict[str, Any]], save: Callable[[], None]) -> None:
        self.pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
        self.folder, self.done, self.save = folder, done, save
        self.waiting: dict[Future[dict[str, Any]], Callable[[dict[str, Any]], None]] = {}

    def add(self, setting: Setting, seconds: float | None, then: Callable[[dict[str, Any]], None] = lambda found: None) -> None:
        names = ("method", "alpha", "clients", "dropout", "seed", "rate")
        key = {name: getattr(setting, name) for name in names}
        known = next((c for c in self.done if key.items() <= c.items()), None)
        if known is not None:
            then(known)
        else:
            self.waiting[self.pool.submit(cell, setting, self.folder, seconds)] = then

    def finish(self) -> None:
        while self.waiting:
            for future in wait(self.waiting, return_when=FIRST_COMPLETED).done:
                then = self.waiting.pop(future)
                if (error := future.exception()) is not None:  # the other runs go on
                    print(f"a run failed: {error}", flush=True)
                    continue
                found = future.result()
                self.done.append(found)
                self.save()
                what = f"{found['clients']} clients, alpha {found['alpha']:g}, seed {found['seed']}, {found['method']:16}"
                print(f"{what}: {smooth(found['accuracy'])[-1]:.3f} after {found['clock'][-1]:.2f} s", flush=True)
                then(found)


def main() -> None:
    parser = record.options(__doc__, device=False)
    parser.add_argument("--task", default="digits", choices=["digits", "signs", "birds", "spoken"])
    parser.add_argument("--data", default="", help="the folder of signs, birds and spoken digits")
    parser.add_argument("--clients", type=int, nargs="+", default=[20])
    parser.add_argument("--rounds", type=int, default=10, help="of FedAvg")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3], help="of several, the one that serves FedAvg best")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seeds, args.methods = 3, 1, [PLAIN, "pliant"]
    out = record.out(args, f"fleet_{args.task}")
    base = replace(Setting(), task=args.task, data=args.data, rounds=args.rounds, dropout=args.dropout, rate=args.rates[0])
    varied = ("method", "seed", "alpha", "data", "state", "clients", "share", "dropout", "rate")
    setting = {name: value for name, value in asdict(base).items() if name not in varied} | {"rates": args.rates}
    done, folder = record.load(out, setting), Path("build") / "fleet_profiles" / args.task
    measured(base, folder)
    runs = Runs(args.jobs, folder, done, lambda: record.save(out, setting, done, table(done)))
    if len(args.rates) > 1 and args.seeds:
        for rate in args.rates:
            runs.add(replace(base, method=PLAIN, alpha=args.alphas[0], seed=OTHER_SEED, rate=rate), None)
        runs.finish()
        base = replace(base, rate=best_rate(done))
    for seed in range(args.seeds):
        for alpha in args.alphas:
            for clients in args.clients:
                fleet = replace(base, alpha=alpha, clients=clients, seed=seed, share=min(IN_ROUND / clients, 1.0))

                def others(full: dict[str, Any], fleet: Setting = fleet) -> None:
                    for method in [method for method in args.methods if method != PLAIN]:
                        runs.add(replace(fleet, method=method), HALF * full["clock"][-1])

                runs.add(replace(fleet, method=PLAIN), None, others)
    runs.finish()
    runs.pool.shutdown()
    print(table(done))


if __name__ == "__main__":
    main()
