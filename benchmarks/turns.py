"""Is a time budget kept? Steps of a session and plain full steps of a second copy, one after the other.

    python benchmarks/turns.py            # seven runs of each row on one CPU thread, about an hour; resumable
    python benchmarks/turns.py --quick    # one run of each recipe on MobileNetV2: about two minutes

Each run builds a network twice. A `Session` trains one inside a share of the time of a full step. Plain PyTorch trains the
other one completely: same weights, layout, batch and optimizer. It has a process of its own, as it would have without Pliant:
inside one process, each would find its memory as the other one left it. A second run finds the profile that the first one has
kept, in a cache folder of their own. What is timed, by the CPU time of one thread:

    for 60 turns:
        start clock; session.step(batch); stop clock
        start clock; optimizer.zero_grad(); loss(twin, batch).backward(); optimizer.step(); stop clock

The step of a run is the lower quartile of the session's steps over the lower quartile of the full steps. Its mean step is the
mean of all steps over the mean full step: with everything, so with what profiling, probing and corrections take. A correction
is a selection after the first one: no schedule asks for one within 60 steps. Every run must be between 15 % below and 8 % above
the share that was asked for, with at most two corrections. Its mean step may be 25 % above in the first run, and 10 % in the
second. The benchmark prints each run that is not, and exits with 1.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import statistics
import sys
import tempfile
from functools import partial
from typing import Any

import nets
import record
import torch
from torch import nn
from training import plain_step, quartile, seconds_of, sgd

from pliant import Session, recipes, schedule

RECIPES = {
    "elastic_trainer": partial(recipes.elastic_trainer, when=schedule.once()),
    "elastic_layers": partial(recipes.elastic_layers, when=schedule.once()),
    "pliant": partial(recipes.pliant, head_first=0),
}
ASKED = {"mobilenet_v2": 0.5, "resnet18": 0.6}  # networks, and the share of a full step's time that is asked for
LEAST, MOST = -0.15, 0.08  # of what was asked
CORRECTIONS = 2  # at most
WHOLE = {"first": 0.25, "second": 0.10}  # of what was asked: so far above it may the mean of all steps be


def cells(network: str, recipe: str, asked: float, run: int, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """A run that measures, and a second one with what it has kept."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PLIANT_PROFILES": "on", "PLIANT_CACHE": folder}
        return [{**cell(network, recipe, asked, run, setting), "begin": begin} for begin in WHOLE]


def made(network: str, run: int, setting: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The network and the batch of a run."""
    torch.manual_seed(run)
    return nets.build(network, setting["pixels"]), nets.batch(network, setting["batch"], setting["pixels"])


def serve(there: Any, network: str, run: int, setting: dict[str, Any]) -> None:
    """Plain full steps in a process of their own: one whenever asked."""
    torch.set_num_threads(1)
    model, batch = made(network, run, setting)
    optimizer = sgd(model)
    there.send(None)
    while there.recv():
        there.send(seconds_of(lambda: plain_step(model, optimizer, nets.loss, batch), "cpu"))


def cell(network: str, recipe: str, asked: float, run: int, setting: dict[str, Any]) -> dict[str, Any]:
    """One run: a session and a plain loop take one step each, in turn."""
    apart = multiprocessing.get_context("spawn")
    pipe, there = apart.Pipe()
    twin = apart.Process(target=serve, args=(there, network, run, setting), daemon=True)
    twin.start()
    model, batch = made(network, run, setting)
    mine: list[float] = []
    full: list[float] = []
    policy = RECIPES[recipe](time=asked)
    pipe.recv()  # ready
    with Session(model, sgd(model), nets.loss, policy, total_steps=setting["steps"]) as session:
        for _ in range(setting["steps"]):
            mine.append(seconds_of(lambda: session.step(batch), "cpu"))
            pipe.send(True)
            full.append(pipe.recv())
        rounds, engine = session.rounds, session.engine
        profile, why_not = session.profile, session.why_not
    pipe.send(False)
    twin.join()
    return {
        "network": network,
        "recipe": recipe,
        "asked": asked,
        "run": run,
        "step": quartile(mine) / quartile(full),
        "mean": statistics.mean(mine) / statistics.mean(full[1:]),
        "corrections": len(rounds) - 1,
        "full_seconds": quartile(full),
        "full_seconds_profiled": profile.full.seconds,
        "first_step": mine[0] / quartile(full),
        "engine": engine,
        "why_not": why_not,
        "rounds": [str(one) for one in rounds],
        "steps": [round(1e3 * seconds, 3) for seconds in mine],
        "full_steps": [round(1e3 * seconds, 3) for seconds in full],
    }


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: one line per network and recipe, runs side by side."""
    lines = [
        "| network | recipe | asked | run | step of each | error of each | error of mean of all steps | corrections | kept |",
        "|" + "---|" * 9,
    ]
    for key in dict.fromkeys((c["network"], c["recipe"], c["asked"], c["begin"]) for c in cells):
        runs = [c for c in cells if (c["network"], c["recipe"], c["asked"], c["begin"]) == key]
        kept = sum(not missed(c) for c in runs)
        columns = (
            ", ".join(f"{c['step']:.2f}" for c in runs),
            ", ".join(f"{_error(c):+.0%}" for c in runs),
            ", ".join(f"{c['mean'] / c['asked'] - 1:+.0%}" for c in runs),
            ", ".join(str(c["corrections"]) for c in runs),
            f"{kept} of {len(runs)}",
        )
        lines.append(f"| {key[0]} | {key[1]} | {key[2]:g} | {key[3]} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _error(cell: dict[str, Any]) -> float:
    return cell["step"] / cell["asked"] - 1


def missed(cell: dict[str, Any]) -> list[str]:
    """Why a run is not accepted."""
    out = []
    if not LEAST <= _error(cell) <= MOST:
        out.append(f"asked {cell['asked']:g}, got {cell['step']:.3f} ({_error(cell):+.1%})")
    if cell["corrections"] > CORRECTIONS:
        out.append(f"{cell['corrections']} corrections")
    if cell["mean"] / cell["asked"] - 1 > WHOLE[cell["begin"]]:
        out.append(f"all steps: {cell['mean'] / cell['asked'] - 1:+.1%}, at most {WHOLE[cell['begin']]:+.0%}")
    return out


def main() -> int:
    parser = record.options(__doc__, device=False)
    parser.add_argument("--runs", type=int, default=None, help="of each row (7)")
    parser.add_argument("--networks", nargs="+", choices=list(ASKED), default=None)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.runs = args.runs or (1 if args.quick else 7)
    args.networks = args.networks or (["mobilenet_v2"] if args.quick else list(ASKED))
    setting = {"device": "cpu", "batch": 8, "pixels": 96, "steps": args.steps, "of each": "a first and a second run"}
    path = record.out(args, "turns")
    done = record.load(path, setting)
    for run in range(args.runs):  # the outer loop: a slow moment of the machine does not hit one row alone
        for network in args.networks:
            for recipe in args.recipes:
                if any((c["network"], c["recipe"], c["run"]) == (network, recipe, run) for c in done):
                    continue
                done += cells(network, recipe, ASKED[network], run, setting)
                record.save(path, setting, done, table(done))
                for c in done[-2:]:
                    said = f"step {c['step']:.3f}, all steps {c['mean']:.3f}, {c['corrections']} corrections"
                    print(f"{network}, {recipe}, {c['begin']} run {run}: {said}", flush=True)
    print(f"\n{table(done)}")
    wrong = [f"{c['network']}, {c['recipe']}, {c['begin']} run {c['run']}: {why}" for c in done for why in missed(c)]
    for line in wrong:
        print("MISSED:", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
