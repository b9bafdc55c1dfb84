"""What a change of selection costs, and whether many of them leave anything behind.

    python benchmarks/changes.py                   # some minutes on one CPU thread
    python benchmarks/changes.py --device cuda     # half a minute on a GPU
    python benchmarks/changes.py --quick           # one network, twenty changes: less than a minute

A session trains the last quarter, half and three quarters of a net's layers in turn, a few steps each; choosing itself costs
next to nothing here. What a round's first steps take more than the median of its last three is what the change costs. A new
selection is applied and recorded or captured; `back to one` is a later round of one of the last few. Then as many different
selections follow as are asked for, and the memory that is held after each of their rounds is written down.

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
from pliant.solve import Mask, Problem

STEPS = 6  # of a round: one eager, one captured, four replayed
SHARES = (0.25, 0.5, 0.75)
RETURNS = 4  # rounds of each, after its first


def turns(problem: Problem) -> Mask:
    """The last quarter, half and three quarters in turn; later, another random choice every round."""
    count, early = len(problem.names), len(SHARES) * (1 + RETURNS)
    if problem.round < early:
        return np.arange(count) < count * SHARES[problem.round % len(SHARES)]
    return (problem.rng().random(count) < 0.5) & (np.arange(count) < count / 2) | problem.always


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
    early, new, again, memory = len(SHARES) * (1 + RETURNS), [], [], []
    with Session(model, sgd(model), loss_on(device), policy, engine=setting["engine"]) as session:
        for _ in range(2 * STEPS):  # whatever a process does once
            session.step(batch)
        for turn in range(2, early + setting["changes"]):
            taken = []
            for _ in range(STEPS):
                start = clock(device)
                session.step(batch)
                taken.append(clock(device) - start)
            usual = statistics.median(taken[-3:])
            if turn < early:
                costs = new if turn < len(SHARES) else again
                costs.append(sum(taken) - STEPS * usual)
            else:
                gc.collect()
                memory.append(held(device))
        engine, notes = session.engine, dict(session.why_not)
    return {"network": name, "batch": size, "ran": engine, "why_not": notes, "new": new, "again": again, "held": memory}


def table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| network | batch | ran on | a new selection | back to one | changes | held after the 20th | most afterwards |",
        "|" + "---|" * 8,
    ]
    for c in cells:
        first, later = c["held"][: min(20, len(c["held"]) // 2)], c["held"][min(20, len(c["held"]) // 2) :]
        early = ", ".join(f"{kind} {first[-1][kind] / 1e6:.1f} MB" for kind in first[-1])
        most = ", ".join(f"{kind} {max(row[kind] for row in later) / 1e6:.1f} MB" for kind in later[-1])
        again = sorted(1e3 * seconds for seconds in c["again"])
        lines.append(
            f"| {c['network']} | {c['batch']} | {c['ran']} | {1e3 * max(c['new']):.0f} ms "
            f"| {statistics.median(again):.1f} ms (at most {again[-1]:.1f}) | {len(c['held'])} | {early} | {most} |"
        )
    return "\n".join(lines) + "\n"


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
        args.changes, args.networks = 20, ["mobilenet_v2"]
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
