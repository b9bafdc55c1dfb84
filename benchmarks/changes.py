"""What a change of selection costs, and whether many of them leave anything behind.

    python benchmarks/changes.py                   # some minutes on one CPU thread
    python benchmarks/changes.py --device cuda     # half a minute on a GPU
    python benchmarks/changes.py --quick           # one network, forty changes: less than a minute

A session trains the last quarter, half and three quarters of a net in turn, some steps each. What a round's steps take
more than the median of its last three is what the change costs, beside `choosing`, which the session counts itself (planning
by a recipe, here without a probe). A new selection is recorded or captured; `back to one` is a later round of one of the last
few. Then ten random selections follow each other around and around, more than are remembered, so that each is new again. What
is held after a round is compared with what was held after the second round of the same selection (the first makes state).

CPU: CPU time of one thread; memory is what the process holds (RSS). GPU: synchronised wall time; allocated and reserved bytes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import statistics
from pathlib import Path
from typing import Any

import nets
import numpy as np
import record
import torch
from step import NETWORKS, build, loss_on, sgd
from training import clock

from pliant import Policy, Session, measure, schedule, score, units
from pliant.planning.solve import Mask, Problem

STEPS = 6  # of a round: one eager, one captured, four replayed
SHARES = (0.25, 0.5, 0.75)
EARLY = 5 * len(SHARES)  # rounds
RANDOM = 10  # choices


def turns(problem: Problem) -> Mask:
    """The last quarter, half and three quarters in turn; later, random choices in turn."""
    count = len(problem.names)
    if problem.round < EARLY:
        return np.arange(count) < count * SHARES[problem.round % len(SHARES)]
    draw = np.random.default_rng((problem.round - EARLY) % RANDOM)
    return (draw.random(count) < 0.5) & (np.arange(count) < count / 2) | problem.always


def held(device: str) -> dict[str, int]:
    if device == "cuda":
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE")}


def cell(name: str, size: int, setting: dict[str, Any]) -> dict[str, Any]:
    device = setting["device"]
    torch.manual_seed(0)
    model = build(name, setting["pixels"]).to(device)
    batch = nets.batch(name, size, setting["pixels"], device)
    policy = Policy(units.layers(), score.nearness(), measure.counted, turns, schedule.every(steps=STEPS), name="turns")
    new, again, choosing, memory = [], [], [], []
    with Session(model, sgd(model), loss_on(device), policy, engine=setting["engine"]) as session:
        for turn in range(EARLY + setting["changes"]):
            taken, chosen = [], session.spent["choosing"]
            for _ in range(STEPS):
                start = clock(device)
                session.step(batch)
                taken.append(clock(device) - start)
            chosen = session.spent["choosing"] - chosen
            cost = sum(taken) - STEPS * statistics.median(taken[-3:]) - chosen
            if 0 < turn < EARLY:  # a process does some things once
                (new if turn < len(SHARES) else again).append(cost)
                choosing.append(chosen)
            elif turn >= EARLY:
                gc.collect()
                memory.append(held(device))
        engine, notes = session.engine, dict(session.why_not)
    costs = {"new": new, "again": again, "choosing": choosing, "held": memory}
    return {"network": name, "batch": size, "ran": engine, "why_not": notes, **costs}


def table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| network | batch | ran on | a new selection | back to one | choosing | changes | held at most | grown at most |",
        "|" + "---|" * 9,
    ]
    for c in cells:
        most = ", ".join(f"{kind} {max(row[kind] for row in c['held']) / 1e6:.1f} MB" for kind in c["held"][0])
        grown = ", ".join(f"{kind} {_grown(c['held'], kind) / 1e6:.1f} MB" for kind in c["held"][0])
        lines.append(
            f"| {c['network']} | {c['batch']} | {c['ran']} | {1e3 * max(c['new']):.0f} ms | {_several(c['again'])} "
            f"| {_several(c['choosing'])} | {len(c['held'])} | {most} | {grown} |"
        )
    return "\n".join(lines) + "\n"


def _several(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms (at most {1e3 * max(seconds):.1f})"


def _grown(rows: list[dict[str, int]], kind: str) -> int:
    """How much more was held after a round of some selection than after its second round, at most."""
    by_choice = [[row[kind] for row in rows[RANDOM + k :: RANDOM]] for k in range(RANDOM)]
    return max(now - several[0] for several in by_choice for now in several)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default=None, help="(prefix, or prefix+graphs on a GPU)")
    parser.add_argument("--batch", type=int, default=None, help="samples per step (8, or 32 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="per side (64, or 224 on a GPU)")
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mobilenet_v2", "resnet50", "vit_tiny"])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.changes, args.networks = 40, ["mobilenet_v2"]
    cuda = args.device == "cuda"
    setting = {
        "device": args.device,
        "engine": args.engine or ("prefix+graphs" if cuda else "prefix"),
        "pixels": args.pixels or (224 if cuda else 64),
        "changes": args.changes,
        "steps": STEPS,
    }
    out = args.out or record.place("changes_quick" if args.quick else "changes", args.device)
    done = record.load(out, setting)
    for name in args.networks:
        if not any(c["network"] == name for c in done):
            done.append(cell(name, args.batch or (32 if cuda else 8), setting))
            record.save(out, setting, done, table(done))
            print(table(done[-1:]), flush=True)


if __name__ == "__main__":
    main()
