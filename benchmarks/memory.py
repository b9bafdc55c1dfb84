"""How much training needs beyond inference, and how long a step takes, when the same selection runs in different ways.

    python benchmarks/memory.py                    # about an hour on one CPU thread; resumable
    python benchmarks/memory.py --device cuda      # some minutes on a GPU
    python benchmarks/memory.py --quick            # two small networks at 64²: about a minute
    python benchmarks/memory.py --limits 64MB 16MB # sessions with a memory budget: is it kept?

Per network, batch and selection, every way of running it has a copy of the network to itself and takes the same plain step:

    optimizer.zero_grad(); forward(); backward(); optimizer.step()        # SGD with momentum, whose state is already there

Ways: `full` trains everything; `gradient masks` compute every gradient and zero those not chosen, before the optimizer;
`plain freezing` is requires_grad=False and norms at rest where nothing is chosen (`--norm frozen`: everywhere); `checkpointing`
is the same with every block under torch.utils.checkpoint; `lean` the same with the forward pass under `Lean`; with a quarter of
the channels, just that much of each chosen convolution and linear layer trains: less work, and so no comparison of speed.

Kept: what lives after the forward pass beyond what lived before it. Peak: the most that lives during a step, optimizer state
included, less the peak of an inference pass over the same batch (no gradients, eval mode). Parameters and the batch do not
count. CPU: every tensor followed, which does not see scratch memory inside a kernel; in brackets the same difference as
PyTorch's allocator reports it, which sees most of it, in training and in inference. GPU: the allocator, which sees it. The
process's resident set is not reported: it is one high-water mark for all that a process ever did, and freed memory stays in it
as long as malloc likes, so ways that run in one process, as they must to share a clock, cannot be told apart by it.

Time: the ways take turns. CPU: CPU time of one thread, the fastest of each. GPU: synchronised wall time, medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import gc
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import nets
import record
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from training import clock

from pliant import Budget, BudgetError, Part, Policy, Session, measure, recipes, score, solve, units
from pliant.engine.lean.lean import Lean
from pliant.engine.slices.slices import Slices
from pliant.graph.backward import Graph, read, trainable
from pliant.runtime.batchnorm import BatchNormModes, NormRule
from pliant.runtime.memory import LiveBytes, storage
from pliant.runtime.sandbox import sandbox

QUICK = ("mobilenet_v2_0.35", "mcunet")
PLAIN = "plain freezing"
SLICES = "lean, a quarter of the channels"

# ---------------------------------------------------------------- selections: a graph → names of parameters


def biases(graph: Graph) -> set[str]:
    """Every bias and norm shift, beside the head."""
    return {name for name in graph.params if name.endswith("bias")} | set(graph.head)


def norm_and_bias(graph: Graph) -> set[str]:
    """The scales of norms too."""
    return biases(graph) | {name for unit in units.norms()(graph) for name in unit.params}


def last_quarter(graph: Graph) -> set[str]:
    """The quarter of the layers that is nearest the loss."""
    layers = units.layers()(graph)
    return {name for unit in layers[: -(-len(layers) // 4)] for name in unit.params}


def tinytrain_like(graph: Graph) -> set[str]:
    """The convolutions that expand the last seven inverted residual blocks, the last convolution and the classifier."""
    expand = [name for name in graph.params if name.endswith("conv.0.0.weight") and graph.modules[name[:-16]] in BLOCK]
    last = max(int(name.split(".")[1]) for name in graph.params if name.startswith("features."))
    return {*expand[-7:], f"features.{last}.0.weight", *graph.head}


BLOCK = ("InvertedResidual",)
SELECTIONS: dict[str, Callable[[Graph], set[str]]] = {
    "biases": biases,
    "norm+bias": norm_and_bias,
    "last quarter": last_quarter,
    "tinytrain-like": tinytrain_like,
}
ONLY = {"tinytrain-like": ("mobilenet_v2_0.35",)}  # a selection that fits not every network

# ---------------------------------------------------------------- ways: a model made ready → how its forward pass runs

Forward = Callable[[Any], torch.Tensor]
Way = Callable[[nn.Module, Collection[str], NormRule], Forward]


def full(model: nn.Module, chosen: Collection[str], norm: NormRule) -> Forward:
    return partial(nets.loss, model)


def masks(model: nn.Module, chosen: Collection[str], norm: NormRule) -> Forward:
    def zero(param: torch.Tensor) -> None:
        if param.grad is not None:
            param.grad.zero_()

    for name, param in model.named_parameters():
        if name not in chosen:
            param.register_post_accumulate_grad_hook(zero)
    return partial(nets.loss, model)


def plain(model: nn.Module, chosen: Collection[str], norm: NormRule) -> Forward:
    params = trainable(model)
    for name, param in params.items():
        param.requires_grad_(name in chosen)
    BatchNormModes(model, norm).hold_(params, chosen)
    return partial(nets.loss, model)


def checkpointed(model: nn.Module, chosen: Collection[str], norm: NormRule) -> Forward:
    forward = plain(model, chosen, norm)
    for stack in model.children():
        if isinstance(stack, nn.Sequential):
            for block in stack:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return forward


def lean(model: nn.Module, chosen: Collection[str], norm: NormRule) -> Forward:
    forward = plain(model, chosen, norm)

    def under_lean(batch: Any) -> torch.Tensor:
        with Lean():
            return forward(batch)

    return under_lean


class Quarter:
    """Under `Lean`, with the first quarter of the output channels of every chosen convolution and linear layer alone."""

    def __init__(self, model: nn.Module, chosen: Collection[str], norm: NormRule) -> None:
        self._forward = plain(model, chosen, norm)
        params = dict(model.named_parameters())
        layers = [name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and len(m.weight) >= 4]
        mine = [f"{name}.{kind}" for name in layers for kind in ("weight", "bias") if f"{name}.weight" in chosen]
        self.slices = Slices(params, [Part(n, 0, tuple(range(len(params[n]) // 4))) for n in mine if n in chosen])

    def __call__(self, batch: Any) -> torch.Tensor:
        with Lean(self.slices):
            return self._forward(batch)


WAYS: dict[str, Way] = {
    "full": full,
    "gradient masks": masks,
    PLAIN: plain,
    "checkpointing": checkpointed,
    "lean": lean,
    SLICES: Quarter,
}

# ---------------------------------------------------------------- measuring


class Run:
    """One way of training one selection, on a copy of the model."""

    def __init__(self, way: Way, model: nn.Module, chosen: Collection[str], batch: Any, setting: dict[str, Any]) -> None:
        self.model, self.batch, self.device = copy.deepcopy(model), batch, setting["device"]
        self.forward = way(self.model, chosen, setting["norm"])
        self.slices: Slices | None = getattr(self.forward, "slices", None)
        sliced = self.slices.parts if self.slices is not None else {}
        mine = [param for name, param in self.model.named_parameters() if param.requires_grad or name in sliced]
        self.optimizer = torch.optim.SGD(mine, lr=1e-4, momentum=0.9)
        self.seconds: list[float] = []

    def step(self) -> None:
        self.zero_grad()
        self.forward(self.batch).backward()
        self.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.slices is not None:
            self.slices.zero_grad()

    def update(self) -> None:
        with self.slices.swapped_in(self.optimizer) if self.slices is not None else nullcontext():
            self.optimizer.step()

    def measured(self) -> dict[str, Any]:
        """Bytes kept, the peak, the optimizer's state; and the seconds that it took to see, which are not its own."""
        gc.collect()
        with LiveBytes(torch.device(self.device)) as live:
            self.step()  # makes the optimizer's state
            start = clock(self.device)
            self.zero_grad()
            live.forget()
            before = live.bytes
            value = self.forward(self.batch)
            kept = live.bytes - before - storage(value)[1]
            value.backward()
            self.update()
            peak, seconds = live.peak, clock(self.device) - start
        held = list(self.optimizer.state.values())
        if self.slices is not None:
            held += [saved["state"] for saved in self.slices.state_dict().values()]
        state = sum(t.numel() * t.element_size() for s in held for t in s.values() if isinstance(t, torch.Tensor))
        self.zero_grad()
        allocated = state + allocated_peak(self.step) if self.device == "cpu" else peak
        return {"kept": kept, "peak": peak, "allocated": allocated, "state": state, "seconds_seen": seconds}

    def turn(self, steps: int) -> None:
        for _ in range(steps):
            start = clock(self.device)
            self.step()
            self.seconds.append(clock(self.device) - start)


def inference_peak(model: nn.Module, batch: Any, device: str) -> tuple[int, int]:
    """Of every tensor followed, and as the allocator reports it."""
    with sandbox(model), torch.no_grad():
        model.eval()
        with LiveBytes(torch.device(device)) as live:
            live.forget()
            nets.loss(model, batch)
            peak = live.peak
        return peak, allocated_peak(partial(nets.loss, model, batch)) if device == "cpu" else peak


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler, when it starts and stops, says so on the standard error stream, whatever its log level."""
    sys.stderr.flush()
    stream, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stream, 2)
        os.close(stream)
        os.close(nowhere)


def allocated_peak(run: Callable[[], Any]) -> int:
    """The most that the CPU's allocator had given out at a time, beyond what it had at the start."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(changes), default=0)


def settle_(model: nn.Module, batch: Any) -> None:
    """Give norms the statistics of a batch: at their first ones signals fade, and a CPU is slow with numbers next to zero."""
    moving = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in moving:
        module.momentum = 1.0
    with torch.no_grad():
        nets.loss(model, batch)
    for module in moving:
        module.momentum = 0.1


def cell(name: str, size: int, selection: str, ways: Collection[str], setting: dict[str, Any]) -> dict[str, Any]:
    device, cuda = setting["device"], setting["device"] == "cuda"
    torch.manual_seed(0)
    model = nets.build(name, setting["pixels"]).to(device)
    few = nets.batch(name, 8, setting["pixels"], device)
    settle_(model, few)
    with sandbox(model):
        graph = read(model, nets.loss, few)
    chosen = SELECTIONS[selection](graph)
    batch = nets.batch(name, size, setting["pixels"], device)
    if cuda:  # what a process does for the first time loads kernels and makes workspaces
        Run(full, model, chosen, batch, setting).step()
    inference, allocated = inference_peak(model, batch, device)
    runs, rows = {}, {}
    for way in ways:
        runs[way] = Run(WAYS[way], model, chosen, batch, setting)
        rows[way] = runs[way].measured()
        rows[way]["beyond"] = rows[way]["peak"] - inference
        rows[way]["beyond_allocated"] = rows[way]["allocated"] - allocated
    long = max(row["seconds_seen"] for row in rows.values())
    steps = 8 if cuda else max(1, min(5, int(0.2 / long)))
    turns = setting["repeats"] if cuda else max(2, min(setting["repeats"], int(6 / long)))
    for _ in range(turns):
        for run in runs.values():
            if cuda:  # the first after another's finds the caches full of that one's
                run.step()
            run.turn(steps)
    for way, run in runs.items():
        rows[way]["seconds"] = (statistics.median if cuda else min)(run.seconds)
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
    return recipes.pliant(memory=limit)


def by_channel(limit: str) -> Policy:
    """Input channels by Fisher information, layers first."""
    solver = solve.within_layers(solve.knapsack())
    return Policy(units.channels("in"), score.fisher(), measure.counted, solver, budget=Budget(memory=limit))


CHOOSERS = {"layers": by_layer, "channels": by_channel}


def limited(name: str, size: int, limit: str, chooser: str, setting: dict[str, Any]) -> dict[str, Any]:
    """The measured peak of a session whose memory is limited: of a step that probes and chooses, and of plain ones."""
    device = setting["device"]
    torch.manual_seed(0)
    model = nets.build(name, setting["pixels"]).to(device)
    batch = nets.batch(name, size, setting["pixels"], device)
    settle_(model, batch)
    inference, _ = inference_peak(model, batch, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    row: dict[str, Any] = {"network": name, "batch": size, "limit": limit, "chooses": chooser, "inference": inference}
    try:
        with (
            Session(model, optimizer, nets.loss, CHOOSERS[chooser](limit), undo=False) as session,
            LiveBytes(torch.device(device)) as live,
        ):
            session.step(batch)  # reads the graph too, which the limit does not hold for
            session.optimizer = optimizer  # probes again
            for kind in ("choosing", "training"):
                live.forget()
                session.step(batch)
                row[kind] = live.peak - inference
            row |= {"units": len(session.selection.units), "of_units": len(session.units)}
            row |= {"predicted": session.selection.cost.bytes, "full": session.profile.full.bytes}
    except BudgetError as error:
        row["refused"] = str(error)
    return row


def limits_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was allowed and what was measured."""
    lines = ["| network | batch | limit | full step | predicted | a step that chooses | a step | chosen |"]
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
        what = "kept MB / peak MB / ms (× plain)" if device == "cuda" else "kept MB / peak MB (allocated) / time × plain"
        lines += [f"### {name}: {mine[0]['parameters'] / 1e6:.2f} M parameters; inference: {alone}", ""]
        lines.append("| selection | way | state MB | " + " | ".join(f"batch {s}: {what}" for s in sizes) + " |")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pixels", type=int, default=None, help="per side (128, or 224 on a GPU)")
    parser.add_argument("--repeats", type=int, default=5, help="turns that the ways take; two where a step takes seconds")
    parser.add_argument("--norm", choices=("chosen", "frozen"), default="chosen", help="which norms move when freezing")
    parser.add_argument("--networks", nargs="+", choices=list(nets.MEMORY_NETS), default=None)
    parser.add_argument("--batches", nargs="+", type=int, default=None, help="samples per step (1 8 32)")
    parser.add_argument("--selections", nargs="+", choices=list(SELECTIONS), default=list(SELECTIONS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help=f"{PLAIN} always runs too")
    parser.add_argument("--limits", nargs="+", default=None, help="sessions with memory=… instead (64MB 0.2 …): is it kept?")
    parser.add_argument("--chooses", choices=list(CHOOSERS), default="layers", help="what such sessions choose")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.pixels, args.repeats = args.pixels or 64, 2
        args.networks, args.batches = args.networks or list(QUICK), args.batches or [1, 8]
    args.pixels = args.pixels or (224 if args.device == "cuda" else 128)
    setting = {k: getattr(args, k) for k in ("device", "pixels", "repeats", "norm")}
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
    out = args.out or record.place("memory_quick" if args.quick else "memory", args.device)
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
