"""Are costs predicted well, and is a budget kept over a run? Random selections, and the mean step of runs with a time budget.

    python benchmarks/budget.py                    # forty minutes on one CPU thread; resumable
    python benchmarks/budget.py --device cuda      # some minutes on a GPU
    python benchmarks/budget.py --device cuda --engine graphs --batch 32 --asked 0.2 0.3     # captured steps, small batches
    python benchmarks/budget.py --quick            # two networks, a few selections: about two minutes

For each network:

    profile = measure.timed(model, optimizer, loss, batch)
    for each random selection of tensors: profile.cost(selection) against a plain step, its kept bytes and its peak
    for each share that is asked for: a run of `recipes.elastic_trainer(time=share)`; a long one of `recipes.pliant`

Selections are the last tensors, scattered ones, or scattered ones among the last. What is timed:

    optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()

CPU: CPU time of one thread. A selection and a full step take turns, and the ratio of the fastest of each is compared. GPU:
synchronised wall time, medians. With `--engine graphs` a selection is timed as captured steps of a session.

In runs, the mean of all steps counts, as the session measured them. After every twelve steps a second copy takes full steps, of
which the first is not counted. The share of a run is its mean step over their mean: work beside the run slows both. The last
column says how far they are from the full step that was profiled. `turns.py` compares single steps instead. Bytes are beyond
parameters and batch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import nets
import numpy as np
import record
import torch
from training import choice_of, clock, freeze_, last_share, plain_step, seconds_of, sgd

from pliant import Policy, Profile, Session, Unit, measure, recipes, schedule, units

ASKED = (0.4, 0.5, 0.7)
QUICK = ("mobilenet_v2", "text_encoder")
# Samples per step. On a GPU enough to keep it busy, so that it does not wait for launches.
CPU_BATCH = {"text_encoder": 4}
GPU_BATCH = {"text_encoder": 384, "vit_tiny": 256, "mobilenet_v2, checkpointed": 384}
# PyTorch cannot train a layer norm's shift without its scale on CUDA when it has more than 65,536 rows.
BY_LAYER = ("convnext",)
WARM = 4  # steps: by then a step is captured


class Step:
    """A plain training step of one network, timed."""

    def __init__(self, model: torch.nn.Module, batch: Any, device: str) -> None:
        self.model, self.batch, self.device = model, batch, device
        self.optimizer = sgd(model)
        self.params = last_share(model, 1.0)

    def __call__(self) -> float:
        return seconds_of(lambda: plain_step(self.model, self.optimizer, nets.loss, self.batch), self.device)


def selections(all_units: tuple[Unit, ...], count: int, seed: int) -> list[tuple[Unit, ...]]:
    """The last units, scattered units, and scattered ones among the last, in turn."""
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
    start = clock(step.device)
    profile = measure.timed(step.model, step.optimizer, nets.loss, step.batch)
    profiling = (clock(step.device) - start) / full
    kind = units.layers() if by_layer else units.tensors()
    _, all_units = choice_of(replace(recipes.full(), units=kind), step.model, nets.loss, step.batch)
    rows = []
    for chosen in selections(all_units, setting["selections"], seed=0):
        names = {param for unit in chosen for param in unit.params}
        cost = profile.cost(chosen)
        predicted = cost.seconds
        if setting["engine"] == "graphs":
            predicted, seconds = captured(step, names, profile, setting["repeats"])
        elif step.device == "cuda":
            freeze_(step.model, names)
            step()
            seconds = statistics.median(step() for _ in range(setting["repeats"]))
        else:
            mine, whole = [], []
            for _ in range(setting["repeats"]):
                for taken, what in ((mine, names), (whole, step.params)):
                    freeze_(step.model, what)
                    taken.append(step())
            seconds = min(mine) / min(whole) * profile.full.seconds
        freeze_(step.model, names)
        kept = measure.kept_bytes(step.model, nets.loss, step.batch)
        peak, alone = measure.peak_bytes(step.model, step.optimizer, nets.loss, step.batch)
        rows.append(
            {
                "units": len(chosen),
                "share": predicted / profile.full.seconds,
                "seconds": predicted,
                "measured_seconds": seconds,
                "kept": profile.kept(chosen),
                "measured_kept": kept,
                "peak": cost.bytes + max(profile.moments),
                "measured_peak": peak,
                "measured_inference": alone,
            }
        )
    freeze_(step.model, step.params)
    return {"profiling_steps": profiling, "full_seconds": full, "coverage": profile.coverage, "selections": rows}


def captured(step: Step, names: set[str], profile: Profile, repeats: int) -> tuple[float, float]:
    """Seconds of a session's captured step that trains these parameters: predicted, and measured."""
    freeze_(step.model, step.params)  # a session chooses from what is trainable
    model = copy.deepcopy(step.model)
    policy = replace(recipes.only(*sorted(names)), cost=measure.timed)
    with Session(model, sgd(model), nets.loss, policy, engine="graphs", profile=profile) as session:
        taken = [seconds_of(lambda: session.step(step.batch), "cuda") for _ in range(WARM + repeats)]
        return session.rounds[-1].predicted, statistics.median(taken[WARM:])


def asked_and_measured(step: Step, policy: Policy, steps: int, engine: str) -> dict[str, Any]:
    """One run: the mean of its steps as the session measured them, and full steps of a second copy in between."""
    twin = Step(copy.deepcopy(step.model), step.batch, step.device)
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
        out["runs"].append(asked_and_measured(step, recipes.pliant(time=0.5, head_first=0), setting["long"], engine))
    return out


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: errors of predictions, then the mean step of runs."""

    def errors(c: dict[str, Any], key: str) -> np.ndarray[Any, Any]:
        return np.array([abs(s[key] / s[f"measured_{key}"] - 1) for s in c["selections"] if s[f"measured_{key}"]])

    lines = [
        "| network | batch | full step | error of seconds, median / 90 % | error of kept bytes, most "
        "| error of the peak, 90 % / most | profiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        seconds, kept, peak = (errors(c, key) for key in ("seconds", "kept", "peak"))
        lines.append(
            f"| {c['network']} | {c['batch']} | {c['full_seconds'] * 1e3:.1f} ms "
            f"| {np.median(seconds):.1%} / {np.quantile(seconds, 0.9):.1%} | {kept.max():.2%} "
            f"| {np.quantile(peak, 0.9):.1%} / {peak.max():.1%} | {c['profiling_steps']:.1f} full steps |"
        )
    lines += [
        "",
        "| run | asked | first prediction | share of full steps beside it | error | selections | time choosing "
        "| full steps: beside it / profiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        for run in c["runs"]:
            share = run["mean_step"] / run["full_now_over_full_at_the_start"]
            lines.append(
                f"| {c['network']}, {run['recipe']}, {run['steps']} steps | {run['asked']:.2f} | {run['first_selection']:.3f} "
                f"| {share:.3f} | {share / run['asked'] - 1:+.1%} | {run['selections']} "
                f"| {run['choosing']:.1%} | {run['full_now_over_full_at_the_start']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--batch", type=int, default=None, help="samples per step (8, or 192 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="per side (64, or 224 on a GPU)")
    parser.add_argument("--selections", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="per run")
    parser.add_argument("--long", type=int, default=None, help="steps of the long run")
    parser.add_argument("--engine", default="plain", help="of the runs; with 'graphs' predictions are of captured steps too")
    parser.add_argument("--asked", type=float, nargs="+", default=None, help="shares of a plain full step's time (0.4 0.5 0.7)")
    parser.add_argument("--networks", nargs="+", choices=list(nets.NETS), default=None, help="just these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.selections, args.steps, args.long, args.pixels, args.networks = 6, 30, 0, 32, args.networks or list(QUICK)
    args.long = (2000 if args.device == "cuda" else 1000) if args.long is None else args.long
    args.batch = args.batch or (192 if args.device == "cuda" else 8)
    args.pixels = args.pixels or (224 if args.device == "cuda" else 64)
    setting = {k: getattr(args, k) for k in ("device", "engine", "batch", "pixels", "selections", "repeats", "steps", "long")}
    setting |= {"asked": args.asked} if args.asked else {}
    out = record.out(args, "budget_graphs" if args.engine == "graphs" else "budget")
    done = record.load(out, setting)
    if args.device == "cuda":  # the first measurement of a process loads kernels
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
