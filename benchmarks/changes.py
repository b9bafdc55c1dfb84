"""What a change of the selection costs, and whether many changes use up memory.

    python benchmarks/changes.py                   # some minutes on one CPU thread
    python benchmarks/changes.py --device cuda     # half a minute on a GPU
    python benchmarks/changes.py --quick           # one network, forty changes: less than a minute

A session re-selects every six steps. First it trains the last quarter, half and three quarters of the units in turn; later ten
random selections in turn, more than it remembers, so that each is new again. For each round:

    for 6 steps: start clock; session.step(batch); stop clock
    cost of the change = sum of the 6 − 6 · (median of the last 3) − seconds that `session.spent` counts as choosing

A new selection is recorded or captured. `seen before` is a later round of one of the last few. Memory after each round is
compared with that after the second round of the same selection, since the first one creates optimizer state.

CPU: CPU time of one thread, resident memory of the process. GPU: synchronised wall time, allocated and reserved bytes.
`session.spent` is wall time, so no other work may run on the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import statistics
from pathlib import Path
from typing import Any

import nets
import numpy as np
import record
import torch
from step import NETWORKS, build, loss_on
from training import seconds_of, sgd

from pliant import Policy, Session, measure, schedule, score, solve, units

STEPS = 6  # per round: one eager, one captured, four replayed
SHARES = (0.25, 0.5, 0.75)
EARLY = 5 * len(SHARES)  # rounds
RANDOM = 10  # selections


def turns(problem: solve.Problem) -> solve.Mask:
    """A solver: the last quarter, half and three quarters in turn; later, random selections in turn."""
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
            before = session.spent["choosing"]
            taken = [seconds_of(lambda: session.step(batch), device) for _ in range(STEPS)]
            chosen = session.spent["choosing"] - before
            cost = sum(taken) - STEPS * statistics.median(taken[-3:]) - chosen
            if 0 < turn < EARLY:  # the very first round pays for the start of the process
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
        "| network | batch | engine | new selection | seen before | choosing | changes | most memory | most growth |",
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
    """The most that memory after a round of a selection exceeds that after its second round."""
    by_choice = [[row[kind] for row in rows[RANDOM + k :: RANDOM]] for k in range(RANDOM)]
    return max(now - several[0] for several in by_choice for now in several)


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--engine", default=None, help="(prefix, or prefix+graphs on a GPU)")
    parser.add_argument("--batch", type=int, default=None, help="samples per step (8, or 32 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="per side (64, or 224 on a GPU)")
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mobilenet_v2", "resnet50", "vit_tiny"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.changes, args.networks = min(args.changes, 40), ["mobilenet_v2"]
    cuda = args.device == "cuda"
    setting = {
        "device": args.device,
        "engine": args.engine or ("prefix+graphs" if cuda else "prefix"),
        "pixels": args.pixels or (224 if cuda else 64),
        "changes": args.changes,
        "steps": STEPS,
    }
    out = record.out(args, "changes")
    done = record.load(out, setting)
    for name in args.networks:
        if not any(c["network"] == name for c in done):
            done.append(cell(name, args.batch or (32 if cuda else 8), setting))
            record.save(out, setting, done, table(done))
            print(table(done[-1:]), flush=True)


if __name__ == "__main__":
    main()
