"""How much memory training needs beyond inference, and how long a step takes, when the same selection runs in different ways.

    python benchmarks/memory.py                    # about an hour on one CPU thread; resumable
    python benchmarks/memory.py --device cuda      # some minutes on a GPU
    python benchmarks/memory.py --quick            # two small networks at 64²: about a minute
    python benchmarks/memory.py --limits 64MB 16MB # sessions with a memory budget: is it kept?
    python benchmarks/memory.py --resident         # the same by the operating system's count; each cell in its own process

For each network, batch and selection, every way to run it has its own copy of the network and takes the same step:

    optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()     # SGD with momentum, after a first step

| way | what it does |
|---|---|
| full | trains everything |
| gradient masks | computes every gradient, and zeroes those that are not chosen before the optimizer runs |
| plain freezing | `requires_grad_(False)`; frozen batch norms use running statistics (`--norm frozen`: all of them do) |
| checkpointing | plain freezing, with every block under `torch.utils.checkpoint` |
| lean | `Session.step` with `recipes.only(…)` and `engine="lean"` |
| lean, a quarter of the channels | the same, with a quarter of each chosen layer: less work, so not a comparison of speed |

Kept: what is alive after the forward pass and was not before it, without the loss. Peak: the most that is alive during a step,
optimizer state included, less the peak of an inference pass over the same batch (no gradients, evaluation mode). Parameters and
the batch do not count. On a CPU every tensor is followed, which does not see scratch memory inside a kernel; in brackets is the
same difference as PyTorch's allocator reports it, which sees most of it. On a GPU the allocator counts. The resident set of the
process is not reported: ways that share a process, as they must to share a clock, cannot be told apart by it. With `--resident`
each cell has a process of its own (benchmarks/resident.py).

Time: the ways take turns. CPU: CPU time of one thread, the fastest step. GPU: synchronised wall time, medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import gc
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import nets
import record
import resident
import torch
from meter import LiveBytes, allocated_peak, state_bytes, tensor_bytes
from slices import quarter
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import choice_of, freeze_, plain_step, seconds_of, sgd, typical

from pliant import Budget, BudgetError, Policy, Session, measure, recipes, score, solve, units

QUICK = ("mobilenet_v2_0.35", "mcunet")
PLAIN = "plain freezing"
SLICES = "lean, a quarter of the channels"

# ---------------------------------------------------------------- selections: a model and a batch → names of parameters


def _params(policy: Policy, model: nn.Module, batch: Any) -> set[str]:
    return set(choice_of(policy, model, nets.loss, batch)[0].params)


def biases(model: nn.Module, batch: Any) -> set[str]:
    """Every bias (those of norms too), and the head."""
    return _params(recipes.bias(), model, batch)


def norm_and_bias(model: nn.Module, batch: Any) -> set[str]:
    """The scales of norms too."""
    return biases(model, batch) | _params(recipes.norm(), model, batch)


def last_quarter(model: nn.Module, batch: Any) -> set[str]:
    """The quarter of the layers that is nearest the loss."""
    _, layers = choice_of(replace(recipes.full(), units=units.layers()), model, nets.loss, batch)
    return {name for unit in layers[: -(-len(layers) // 4)] for name in unit.params}


def tinytrain_like(model: nn.Module, batch: Any) -> set[str]:
    """The convolutions that expand the last seven inverted residual blocks, the last convolution and the classifier."""
    blocks = {f"{name}.": None for name, module in model.named_modules() if isinstance(module, nets.InvertedResidual)}
    names = [name for name, _ in model.named_parameters()]
    expand = [name for name in names if name.removesuffix("conv.0.0.weight") in blocks]
    last = max(int(name.split(".")[1]) for name in names if name.startswith("features."))
    return {*expand[-7:], f"features.{last}.0.weight", *_params(recipes.head(), model, batch)}


SELECTIONS: dict[str, Callable[[nn.Module, Any], set[str]]] = {
    "biases": biases,
    "norm+bias": norm_and_bias,
    "last quarter": last_quarter,
    "tinytrain-like": tinytrain_like,
}
ONLY = {"tinytrain-like": ("mobilenet_v2_0.35",)}  # a selection that does not fit every network

# ---------------------------------------------------------------- ways: plain loops, and sessions


def full(model: nn.Module, chosen: Collection[str], norm: Any) -> None:
    """Everything trains as it is."""


def masks(model: nn.Module, chosen: Collection[str], norm: Any) -> None:
    def zero(param: torch.Tensor) -> None:
        if param.grad is not None:
            param.grad.zero_()

    for name, param in model.named_parameters():
        if name not in chosen:
            param.register_post_accumulate_grad_hook(zero)


def checkpointed(model: nn.Module, chosen: Collection[str], norm: Any) -> None:
    freeze_(model, chosen, norm)
    for stack in model.children():
        if isinstance(stack, nn.Sequential):
            for block in stack:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)


LOOPS: dict[str, Callable[[nn.Module, Collection[str], Any], None]] = {  # each prepares a model for a plain loop
    "full": full,
    "gradient masks": masks,
    PLAIN: freeze_,
    "checkpointing": checkpointed,
}
SESSIONS: dict[str, Callable[[nn.Module, Collection[str]], Policy]] = {
    "lean": lambda model, chosen: recipes.only(*sorted(chosen)),
    SLICES: quarter,
}
WAYS = (*LOOPS, *SESSIONS)

# ---------------------------------------------------------------- measuring


class Run:
    """One way to train one selection, on a copy of the model."""

    def __init__(self, way: str, model: nn.Module, chosen: Collection[str], batch: Any, setting: dict[str, Any]) -> None:
        self.model, self.batch, self.device = copy.deepcopy(model), batch, setting["device"]
        self.optimizer, self.session = sgd(self.model), None
        self.seconds: list[float] = []
        self.meter: LiveBytes | None = None
        self.kept = 0
        if way in LOOPS:
            LOOPS[way](self.model, chosen, setting["norm"])
        else:
            policy = SESSIONS[way](self.model, chosen)
            self.session = Session(
                self.model, self.optimizer, self.loss, policy, engine="lean", norm=setting["norm"], undo=False
            )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss; while there is a meter, it also reads what the forward pass keeps."""
        if self.meter is None:
            return nets.loss(model, batch)
        before = self.meter.bytes
        value = nets.loss(model, batch)
        self.kept = self.meter.bytes - before - value.untyped_storage().nbytes()
        return value

    def step(self) -> None:
        if self.session is not None:
            self.session.step(self.batch)
        else:
            plain_step(self.model, self.optimizer, self.loss, self.batch)

    def measured(self) -> dict[str, Any]:
        """Bytes kept, the peak and the optimizer's state; and the seconds of this step, which the meter makes slower."""
        gc.collect()
        with LiveBytes(self.device) as meter:
            self.step()  # creates the optimizer's state
            self.optimizer.zero_grad()
            meter.reset_peak()
            self.meter = meter
            seconds = seconds_of(self.step, self.device)
            self.meter = None
            peak = meter.peak
        sliced = self.session.state_dict()["slices"] if self.session is not None else None
        state = state_bytes(self.optimizer) + tensor_bytes(sliced)
        self.optimizer.zero_grad()
        allocated = state + allocated_peak(self.step) if self.device == "cpu" else peak
        return {"kept": self.kept, "peak": peak, "allocated": allocated, "state": state, "seconds_seen": seconds}

    def turn(self, steps: int) -> None:
        self.seconds += [seconds_of(self.step, self.device) for _ in range(steps)]


def inference_peak(model: nn.Module, batch: Any, device: str) -> tuple[int, int]:
    """The peak with every tensor followed, and as the CPU allocator reports it."""
    model = copy.deepcopy(model).eval()
    peak = measure.inference_bytes(model, nets.loss, batch)
    with torch.no_grad():
        return peak, allocated_peak(partial(nets.loss, model, batch)) if device == "cpu" else peak


def settle_(model: nn.Module, batch: Any) -> None:
    """Give batch norms the statistics of a batch: with the initial ones signals fade, and CPUs are slow with tiny numbers."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in norms:
        module.momentum = 1.0
    with torch.no_grad():
        nets.loss(model, batch)
    for module in norms:
        module.momentum = 0.1


def cell(name: str, size: int, selection: str, ways: Collection[str], setting: dict[str, Any]) -> dict[str, Any]:
    device, cuda = setting["device"], setting["device"] == "cuda"
    torch.manual_seed(0)
    model = nets.build(name, setting["pixels"]).to(device)
    few = nets.batch(name, 8, setting["pixels"], device)
    settle_(model, few)
    chosen = SELECTIONS[selection](model, few)
    batch = nets.batch(name, size, setting["pixels"], device)
    if cuda:  # the first step of a process loads kernels and allocates workspaces
        Run("full", model, chosen, batch, setting).step()
    inference, allocated = inference_peak(model, batch, device)
    runs, rows = {}, {}
    for way in ways:
        runs[way] = Run(way, model, chosen, batch, setting)
        rows[way] = runs[way].measured()
        rows[way]["beyond"] = rows[way]["peak"] - inference
        rows[way]["beyond_allocated"] = rows[way]["allocated"] - allocated
    longest = max(row["seconds_seen"] for row in rows.values())
    steps = 8 if cuda else max(1, min(5, int(0.2 / longest)))
    turns = setting["repeats"] if cuda else max(2, min(setting["repeats"], int(6 / longest)))
    for _ in range(turns):
        for run in runs.values():
            if cuda:  # the first step of a turn finds the caches full of another way's data
                run.step()
            run.turn(steps)
    for way, run in runs.items():
        rows[way]["seconds"] = typical(run.seconds, device)
        rows[way]["steps"] = len(run.seconds)
    params = dict(model.named_parameters())
    return {
        "network": name,
        "batch": size,
        "selection": selection,
        "tensors": len(chosen),
        "of_tensors": len(params),
        "trained": sum(params[p].numel() for p in chosen),
        "parameters": sum(p.numel() for p in params.values()),
        "inference": inference,
        "inference_allocated": allocated,
        "ways": rows,
    }


def by_layer(limit: str) -> Policy:
    """Layers by update gain: the default recipe."""
    return recipes.pliant(memory=limit, head_first=0)


def by_channel(limit: str) -> Policy:
    """Input channels by Fisher information, layers first."""
    solver = solve.within_layers(solve.knapsack())
    return Policy(units.channels("in"), score.fisher(), measure.counted, solver, budget=Budget(memory=limit))


CHOOSERS = {"layers": by_layer, "channels": by_channel}


def limited(name: str, size: int, limit: str, chooser: str, setting: dict[str, Any]) -> dict[str, Any]:
    """The measured peak of a session with a memory limit: of a step that probes and chooses, and of one that does not."""
    device = setting["device"]
    torch.manual_seed(0)
    model = nets.build(name, setting["pixels"]).to(device)
    batch = nets.batch(name, size, setting["pixels"], device)
    settle_(model, batch)
    inference, _ = inference_peak(model, batch, device)
    optimizer = sgd(model)
    row: dict[str, Any] = {"network": name, "batch": size, "limit": limit, "chooses": chooser, "inference": inference}
    try:
        with (
            Session(model, optimizer, nets.loss, CHOOSERS[chooser](limit), undo=False) as session,
            LiveBytes(device) as meter,
        ):
            session.step(batch)  # reads the graph too, which the limit does not cover
            session.optimizer = optimizer  # asks for another probe
            for kind in ("choosing", "training"):
                meter.reset_peak()
                session.step(batch)
                row[kind] = meter.peak - inference
            row |= {"units": len(session.selection.units), "of_units": len(session.units)}
            row |= {"predicted": session.selection.cost.bytes, "full": session.profile.full.bytes}
    except BudgetError as error:
        row["refused"] = str(error)
    return row


def limits_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the limit, and what was predicted and measured beyond inference."""
    lines = ["| network | batch | limit | full step | predicted | step that chooses | other step | chosen |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in rows:
        start = f"| {r['network']} | {r['batch']} | {r['limit']} "
        if "refused" in r:
            lines.append(start + f"| refused: {r['refused']} |||||")
            continue
        amounts = " | ".join(f"{r[key] / 1e6:.2f} MB" for key in ("full", "predicted", "choosing", "training"))
        lines.append(start + f"| {amounts} | {r['units']} of {r['of_units']} {r['chooses']} |")
    return "\n".join(lines) + "\n"


def table(cells: list[dict[str, Any]], device: str) -> str:
    """Markdown: for each network a table of selections and ways, batches side by side."""
    lines: list[str] = []
    for name in dict.fromkeys(c["network"] for c in cells):
        mine = [c for c in cells if c["network"] == name]
        sizes = sorted({c["batch"] for c in mine})
        alone = ", ".join(f"{next(c['inference'] for c in mine if c['batch'] == s) / 1e6:.1f} MB at batch {s}" for s in sizes)
        times = "ms (× plain freezing)" if device == "cuda" else "time × plain freezing"
        what = f"kept MB / peak MB / {times}" if device == "cuda" else f"kept MB / peak MB (allocated) / {times}"
        lines += [f"### {name}: {mine[0]['parameters'] / 1e6:.2f} M parameters; inference: {alone}", ""]
        lines.append("| selection | way | optimizer state MB | " + " | ".join(f"batch {s}: {what}" for s in sizes) + " |")
        lines.append("|---|---|---|" + "---|" * len(sizes))
        for selection in SELECTIONS:
            of = {c["batch"]: c for c in mine if c["selection"] == selection}
            for way in (w for w in WAYS if any(w in c["ways"] for c in of.values())):
                c = next(c for c in of.values() if way in c["ways"])
                share = f"{selection} ({c['tensors']} tensors, {c['trained'] / c['parameters']:.1%})"
                columns = " | ".join(_column(of[s]["ways"], way, device) if s in of else "" for s in sizes)
                lines.append(f"| {share} | {way} | {c['ways'][way]['state'] / 1e6:.2f} | {columns} |")
        lines.append("")
    return "\n".join(lines)


def _column(rows: dict[str, dict[str, Any]], way: str, device: str) -> str:
    if way not in rows:
        return ""
    row, ratio = rows[way], rows[way]["seconds"] / rows[PLAIN]["seconds"]
    kept, peak, allocated = (row[key] / 1e6 for key in ("kept", "beyond", "beyond_allocated"))
    if device == "cuda":
        return f"{kept:.2f} / {peak:.2f} / {row['seconds'] * 1e3:.2f} ({ratio:.2f})"
    return f"{kept:.2f} / {peak:.2f} ({allocated:.2f}) / {ratio:.2f}"


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--pixels", type=int, default=None, help="per side (128, or 224 on a GPU)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way; two where a step takes seconds")
    parser.add_argument("--norm", choices=("chosen", "frozen"), default="chosen", help="batch norms that use batch statistics")
    parser.add_argument("--networks", nargs="+", choices=list(nets.MEMORY_NETS), default=None)
    parser.add_argument("--batches", nargs="+", type=int, default=None, help="samples per step (1 8 32)")
    parser.add_argument("--selections", nargs="+", choices=list(SELECTIONS), default=list(SELECTIONS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help=f"{PLAIN} always runs too")
    parser.add_argument("--limits", nargs="+", default=None, help="instead: sessions with memory=… (64MB 0.2 …)")
    parser.add_argument("--chooses", choices=list(CHOOSERS), default="layers", help="what those sessions choose")
    parser.add_argument("--resident", action="store_true", help="instead: the peak resident memory of whole processes")
    parser.add_argument("--steps", type=int, default=10, help="of a process (--resident)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.pixels, args.repeats = args.pixels or 64, 2
        args.networks, args.batches = args.networks or list(QUICK), args.batches or [1, 8]
    args.pixels = args.pixels or (224 if args.device == "cuda" else 128)
    setting = {k: getattr(args, k) for k in ("device", "pixels", "repeats", "norm")}
    if args.resident:
        setting = {"pixels": args.pixels, "steps": args.steps}
        out = record.out(args, "resident")
        rows = record.load(out, setting)
        for cell in resident.QUICK if args.quick else resident.FULL:
            if not any({"time": None, **cell}.items() <= row.items() for row in rows):
                rows.append(resident.measured({"time": None, **cell, **setting}))
                record.save(out, setting, rows, resident.table(rows))
        print(resident.table(rows))
        return
    if args.limits:
        out = args.out or record.place("memory_limits", args.device)
        rows = record.load(out, setting)
        for name in args.networks or nets.MEMORY_NETS:
            for size in args.batches or (8,):
                for limit in args.limits:
                    key = {"network": name, "batch": size, "limit": limit, "chooses": args.chooses}
                    if not any(all(r[k] == v for k, v in key.items()) for r in rows):
                        rows.append(limited(name, size, limit, args.chooses, setting))
                        record.save(out, setting, rows, limits_table(rows))
        print(limits_table(rows))
        return
    ways = [way for way in WAYS if way in args.ways or way == PLAIN]
    out = record.out(args, "memory")
    done = record.load(out, setting)
    for name in args.networks or nets.MEMORY_NETS:
        for selection in args.selections:
            for size in args.batches or (1, 8, 32):
                key = {"network": name, "batch": size, "selection": selection}
                old = [c for c in done if all(c[k] == v for k, v in key.items())]
                if name not in ONLY.get(selection, (name,)) or (old and set(ways) <= set(old[0]["ways"])):
                    continue
                missing = [way for way in WAYS if way in ways or (old and way in old[0]["ways"])]
                done = [c for c in done if c not in old] + [cell(name, size, selection, missing, setting)]
                record.save(out, setting, done, table(done, args.device))
                print(f"{name}, {selection}, batch {size}: done", flush=True)
    print(table(done, args.device))


if __name__ == "__main__":
    main()
