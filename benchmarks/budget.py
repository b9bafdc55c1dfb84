"""Is a budget kept? Predicted and measured steps and bytes of random selections, and the mean step of runs with a budget.

    python benchmarks/budget.py                    # forty minutes on one CPU thread; resumable
    python benchmarks/budget.py --device cuda      # some minutes on a GPU
    python benchmarks/budget.py --device cuda --engine graphs --batch 32 --asked 0.2 0.3     # captured steps, small batches
    python benchmarks/budget.py --quick            # two networks, a few selections: about two minutes

For each network: one profile (`measure.timed`); random selections of tensors (suffixes, scattered ones, scattered suffixes);
then, for each asked share of a plain full step's time, one run of `recipes.elastic_trainer` (which spends what it is given)
with the closed loop, and a long run of `recipes.pliant` at its default schedule. What is timed:

    optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()

CPU: CPU time of one thread. A selection and a full step take turns; the fastest of each count, and errors are errors of their
ratio. GPU: synchronised wall time, absolute; medians for selections. In runs, the mean of all steps counts against the full
step that the session measured at its start, which is what a share means. Every twelve steps are followed by full steps of a
twin, the first of them not counted (it finds none of its weights in the caches): where other work disturbs the machine, their
mean tells by how much. With `--engine graphs`, selections are captured steps of a session, against what the profile says of
those. Bytes: every tensor followed (CPU), the allocator (GPU); beyond parameters and batch.
"""

from __future__ import annotations

import os

from pliant import Mode

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import random
import statistics
import time
from pathlib import Path
from typing import Any

import nets
import numpy as np
import record
import torch
from training import clock

from pliant import Policy, Session, Unit, measure, recipes, schedule, units
from pliant.graph.backward import read, trainable
from pliant.runtime.batchnorm import Norms
from pliant.runtime.sandbox import sandbox
from pliant.runtime.trainable import apply_

ASKED = (0.4, 0.5, 0.7)
QUICK = ("mobilenet_v2", "text_encoder")
# Samples per step. On a GPU so many that it is busy with them, not with waiting for launches.
CPU_BATCH = {"text_encoder": 4}
GPU_BATCH = {"text_encoder": 384, "vit_tiny": 256, "mobilenet_v2, checkpointed": 384}
# PyTorch cannot train a layer norm's shift without its scale on CUDA when it has more than 65,536 rows.
BY_LAYER = ("convnext",)
WARM = 4  # steps until one is captured, and one more


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


class Step:
    """A plain training step of one network, timed."""

    def __init__(self, model: torch.nn.Module, batch: Any, device: str) -> None:
        self.model, self.batch, self.cuda = model, batch, device == "cuda"
        self.optimizer = sgd(model)
        self.params, self.norms = trainable(model), Norms(model, "chosen")

    def clock(self) -> float:
        return clock("cuda" if self.cuda else "cpu")

    def choose(self, chosen: set[str]) -> None:
        apply_(self.params, self.optimizer, chosen)
        self.norms.hold_(self.params, chosen)

    def __call__(self) -> float:
        start = self.clock()
        self.optimizer.zero_grad()
        nets.loss(self.model, self.batch).backward()
        self.optimizer.step()
        return self.clock() - start


def selections(all_units: tuple[Unit, ...], count: int, seed: int) -> list[tuple[Unit, ...]]:
    """Suffixes, scattered tensors, and scattered tensors of a suffix, in turn."""
    rng = random.Random(seed)
    out = []
    for k in range(count):
        depth = rng.randrange(1, len(all_units) + 1) if k % 3 != 1 else len(all_units)
        share = 1.0 if k % 3 == 0 else rng.choice([0.05, 0.2, 0.5])
        out.append(tuple(u for u in all_units[:depth] if rng.random() < share) or all_units[:1])
    return out


def predicted_and_measured(step: Step, setting: dict[str, Any], by_layer: bool) -> dict[str, Any]:
    for _ in range(3):
        step()
    full = statistics.median(step() for _ in range(3))
    start = step.clock()
    captures = setting["engine"] == "graphs"
    profile = measure.timed(step.model, step.optimizer, nets.loss, step.batch)
    profiling = (step.clock() - start) / full
    with sandbox(step.model):
        graph = read(step.model, nets.loss, step.batch)
    rows = []
    for chosen in selections((units.layers() if by_layer else units.tensors())(graph), setting["selections"], seed=0):
        names = {param for unit in chosen for param in unit.params}
        mine, whole = [], []
        if captures:
            seconds = captured(step, names, setting["repeats"])
        elif step.cuda:
            step.choose(names)
            step()
            mine = [step() for _ in range(setting["repeats"])]
            seconds = statistics.median(mine)
        else:
            for _ in range(setting["repeats"]):
                for taken, what in ((mine, names), (whole, set(step.params))):
                    step.choose(what)
                    taken.append(step())
            seconds = min(mine) / min(whole) * profile.full.seconds
        step.choose(names)
        kept = measure.kept_bytes(step.model, nets.loss, step.batch)
        peak, alone = measure.peak_bytes(step.model, step.optimizer, nets.loss, step.batch)
        cost = profile.cost(chosen) if not captures else profile.on(Mode(graphs=True)).cost(chosen)
        rows.append(
            {
                "units": len(chosen),
                "share": cost.seconds / profile.full.seconds,
                "seconds": cost.seconds,
                "measured_seconds": seconds,
                "kept": profile.kept(chosen),
                "measured_kept": kept,
                "peak": cost.bytes + max(profile.moments),
                "measured_peak": peak,
                "measured_inference": alone,
            }
        )
    step.choose(set(step.params))
    return {"profiling_steps": profiling, "full_seconds": full, "coverage": profile.coverage, "selections": rows}


def captured(step: Step, names: set[str], repeats: int) -> float:
    """Seconds of a session's step that trains these parameters, once it is captured."""
    step.choose(set(step.params))  # what a session may choose from
    model = copy.deepcopy(step.model)
    taken = []
    with Session(model, sgd(model), nets.loss, recipes.only(*sorted(names)), engine="graphs") as session:
        for _ in range(WARM + repeats):
            start = clock("cuda")
            session.step(step.batch)
            taken.append(clock("cuda") - start)
    return statistics.median(taken[WARM:])


def asked_and_measured(step: Step, policy: Policy, steps: int, engine: str) -> dict[str, Any]:
    """One run with the closed loop: the mean of all its steps, as the session saw them, against full steps beside them."""
    twin = Step(copy.deepcopy(step.model), step.batch, "cuda" if step.cuda else "cpu")
    twin()
    full: list[float] = []
    aside = 0.0
    with Session(step.model, step.optimizer, nets.loss, policy, engine=engine, total_steps=steps) as session:
        for n in range(steps):
            session.step(step.batch)
            if n % 12 == 11:
                start = time.monotonic()
                full += [twin() for _ in range(4)][1:]
                aside += time.monotonic() - start
        rounds, spent = session.rounds, session.spent
        predicted = session.profile.full.seconds
    mean = sum(r.seconds for r in rounds) / sum(r.steps for r in rounds)
    return {
        "recipe": policy.name,
        "asked": policy.budget.time,
        "steps": steps,
        "mean_step": mean / predicted,
        "first_selection": rounds[0].predicted / rounds[0].full,
        "selections": len(rounds),
        "choosing": spent["choosing"] / (spent["all"] - spent["profiling"] - aside),
        "full_now_over_full_at_the_start": statistics.mean(full) / predicted,
        "rounds": [str(r) for r in rounds],
    }


def cell(name: str, setting: dict[str, Any]) -> dict[str, Any]:
    device = setting["device"]
    torch.manual_seed(0)
    usual = {} if setting["engine"] == "graphs" else GPU_BATCH if device == "cuda" else CPU_BATCH
    size = usual.get(name, setting["batch"])
    model = nets.build(name, setting["pixels"]).to(device)
    step = Step(model, nets.batch(name, size, setting["pixels"], device), device)
    out = {"network": name, "batch": size, **predicted_and_measured(step, setting, name in BY_LAYER)}
    by_layer, once = name in BY_LAYER, schedule.once()
    recipe = recipes.elastic_layers if by_layer else recipes.elastic_trainer
    engine = setting["engine"]
    out["runs"] = [
        asked_and_measured(step, recipe(time=asked, when=once), setting["steps"], engine)
        for asked in setting.get("asked", ASKED)
    ]
    if name == "mobilenet_v2" and setting["long"]:
        out["runs"].append(asked_and_measured(step, recipes.pliant(time=0.5), setting["long"], engine))
    return out


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: errors of prediction, then the mean step of runs."""

    def errors(c: dict[str, Any], key: str) -> np.ndarray[Any, Any]:
        return np.array([abs(s[key] / s[f"measured_{key}"] - 1) for s in c["selections"] if s[f"measured_{key}"]])

    lines = [
        "| network | batch | full step | seconds off, median / 90 % | kept off, most | peak off, 90 % / most | profiling |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for c in cells:
        seconds, kept, peak = (errors(c, key) for key in ("seconds", "kept", "peak"))
        lines.append(
            f"| {c['network']} | {c['batch']} | {c['full_seconds'] * 1e3:.1f} ms "
            f"| {np.median(seconds):.1%} / {np.quantile(seconds, 0.9):.1%} | {kept.max():.2%} "
            f"| {np.quantile(peak, 0.9):.1%} / {peak.max():.1%} | {c['profiling_steps']:.1f} full steps |"
        )
    lines += [
        "",
        "| run | asked | predicted first | mean step | off | selections | choosing, of the run | full steps meanwhile |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for c in cells:
        for run in c["runs"]:
            lines.append(
                f"| {c['network']}, {run['recipe']}, {run['steps']} steps | {run['asked']:.2f} | {run['first_selection']:.3f} "
                f"| {run['mean_step']:.3f} | {run['mean_step'] / run['asked'] - 1:+.1%} | {run['selections']} "
                f"| {run['choosing']:.1%} | {run['full_now_over_full_at_the_start']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=None, help="samples per step (8, or 192 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="per side (64, or 224 on a GPU)")
    parser.add_argument("--selections", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--long", type=int, default=None, help="steps of the run that tells what choosing costs")
    parser.add_argument("--engine", default="plain", help="that runs the steps; predictions are of plain ones, or of 'graphs'")
    parser.add_argument("--asked", type=float, nargs="+", default=None, help="shares of a plain full step's time (0.4 0.5 0.7)")
    parser.add_argument("--networks", nargs="+", choices=list(nets.NETS), default=None, help="just these")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.selections, args.steps, args.long, args.pixels, args.networks = 6, 30, 0, 32, args.networks or list(QUICK)
    args.long = (2000 if args.device == "cuda" else 1000) if args.long is None else args.long
    args.batch = args.batch or (192 if args.device == "cuda" else 8)
    args.pixels = args.pixels or (224 if args.device == "cuda" else 64)
    setting = {k: getattr(args, k) for k in ("device", "engine", "batch", "pixels", "selections", "repeats", "steps", "long")}
    setting |= {"asked": args.asked} if args.asked else {}
    kind = "_quick" if args.quick else "_graphs" if args.engine == "graphs" else ""
    out = args.out or record.place(f"budget{kind}", args.device)
    done = record.load(out, setting)
    if args.device == "cuda":  # what a process does for the first time loads kernels
        first = Step(nets.build("mobilenet_v2", 64).cuda(), nets.batch("mobilenet_v2", 8, 64, "cuda"), "cuda")
        measure.timed(first.model, first.optimizer, nets.loss, first.batch)
    for name in args.networks or nets.NETS:
        if all(c["network"] != name for c in done):
            done.append(cell(name, setting))
            record.save(out, setting, done, table(done))
            print(f"{name}: done", flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
