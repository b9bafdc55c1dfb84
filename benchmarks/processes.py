"""Several processes: whether every recipe trains as one process does, and what DDP costs where layers are frozen.

    python benchmarks/processes.py                 # some minutes on two CPU cores
    python benchmarks/processes.py --quick         # two recipes, ten steps: under a minute

Two gloo processes train a small transformer in float64, with DDP and with FSDP2, each on its half of every batch. Another
selection is due every five steps. Prices are measured once, before the processes start, and given to all runs.

    equal         whether the weights of both processes are equal to the last bit
    off by        the largest difference between these weights and those of one process with the whole batches
    selections    how many different ones there were

The second table times steps that train the last half of a larger network: wall time, the ways in turn, the fastest of each.

    find unused   one DDP for the whole run, with find_unused_parameters=True, which is what Pliant asks for
    wrapped anew  another DDP for each selection, over what is trainable; its wrapping is timed by itself
    by hand       no DDP: the gradients of what trains are put together and averaged after backward
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pliant import Policy, Session, measure, recipes, schedule

OFTEN = schedule.every(steps=5)
RECIPES: dict[str, Callable[[], Policy]] = {
    "full": recipes.full,
    "head": recipes.head,
    "only": lambda: recipes.only("*1.*"),
    "bias": recipes.bias,
    "norm": recipes.norm,
    "last": lambda: recipes.last(time=0.8),
    "random": lambda: recipes.random(time=0.8, when=OFTEN),
    "pliant": lambda: recipes.pliant(time=0.8, when=OFTEN),
    "elastic_trainer": lambda: recipes.elastic_trainer(time=0.8, when=OFTEN),
    "elastic_layers": lambda: recipes.elastic_layers(time=0.8, when=OFTEN),
    "green_trainer": lambda: recipes.green_trainer(macs=0.7, when=OFTEN),
    "freeze_out": lambda: recipes.freeze_out(start=0.3, when=OFTEN),
    "lisa": lambda: recipes.lisa(layers=1, steps=5),
    "badam": lambda: recipes.badam(steps=5, order="random"),
    "tinytrain": lambda: recipes.tinytrain(memory=None, macs=0.5, head=True, when=OFTEN),
}
WORLD, SAMPLES = 2, 8
KINDS = ("ddp", "fsdp")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(width: int = 8, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 3))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_no(step: int, rank: int | None = None) -> Any:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    y = (x.roll(step // 10, dims=1)[:, :3] * (1 + step // 5)).argmax(1)
    share = slice(None) if rank is None else slice(rank * SAMPLES // WORLD, (rank + 1) * SAMPLES // WORLD)
    return x[share], y[share]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(name: str, kind: str, rank: int | None, steps: int, profile: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after a run, and how many different selections there were."""
    model, policy = net().double(), RECIPES[name]()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    given: nn.Module = DistributedDataParallel(model, find_unused_parameters=True) if kind == "ddp" else model
    known = profile if policy.cost is measure.timed else None
    seen = set()
    with Session(
        given, adamw(model), loss, policy, engine="plain", correct=False, profile=known, allow_mismatch=True, total_steps=steps
    ) as session:
        for step in range(steps):
            session.step(batch_no(step, rank))
            seen.add(tuple(sorted(unit.name for unit in session.selection.units)))
    state: dict[str, Any] = model.state_dict()
    return {key: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for key, v in state.items()}, len(seen)


def ways(rank: int, steps: int) -> dict[str, float]:
    """Seconds of a step that trains the last half of a network, for each way to average its gradients."""
    batch = torch.randn(32, 4), torch.randint(0, 3, (32,))

    def half(model: nn.Module) -> list[nn.Parameter]:
        params = list(model.parameters())
        for param in params[: len(params) // 2]:
            param.requires_grad_(False)
        return params[len(params) // 2 :]

    once, whole, anew, hand = (net(256, 6) for _ in range(4))
    unused = DistributedDataParallel(once, find_unused_parameters=True)
    trained = {name: half(model) for name, model in (("once", once), ("anew", anew), ("hand", hand))}
    dist.barrier()
    start = time.perf_counter()
    wrapped = DistributedDataParallel(anew)
    wrapping = time.perf_counter() - start
    everything = DistributedDataParallel(whole)
    plain = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in (("whole", whole), ("hand", hand))}
    plain |= {"once": torch.optim.SGD(trained["once"], lr=0.01), "anew": torch.optim.SGD(trained["anew"], lr=0.01)}

    def usual(name: str, model: nn.Module) -> None:
        plain[name].zero_grad()
        loss(model, batch).backward()
        plain[name].step()

    def by_hand() -> None:
        plain["hand"].zero_grad()
        loss(hand, batch).backward()
        grads = [param.grad for param in trained["hand"] if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, (flat / WORLD).split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        plain["hand"].step()

    takes: dict[str, Callable[[], None]] = {
        "everything trained": lambda: usual("whole", everything),
        "find unused": lambda: usual("once", unused),
        "wrapped anew": lambda: usual("anew", wrapped),
        "by hand": by_hand,
    }
    best = dict.fromkeys(takes, float("inf"))
    for _ in range(steps):
        for name, step in takes.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return {**best, "to wrap anew": wrapping}


def work(rank: int, folder: str, names: list[str], steps: int, repeats: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found: dict[Any, Any] = {"ways": ways(rank, repeats)}
    for kind in KINDS:
        for name in names:
            try:
                found[name, kind] = train(name, kind, rank, steps, Path(folder) / "profile.json")
            except ValueError as error:  # refused alike in all processes
                found[name, kind] = str(error)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def table(cells: list[dict[str, Any]]) -> str:
    lines = ["| recipe | | equal | off by | selections |", "|---|---|---|---|---|"]
    for cell in (cell for cell in cells if "recipe" in cell):
        if "refused" in cell:
            lines.append(f"| {cell['recipe']} | {cell['kind']} | refused | {cell['refused']} | – |")
        else:
            equal = "yes" if cell["equal"] else "**no**"
            lines.append(f"| {cell['recipe']} | {cell['kind']} | {equal} | {cell['off']:.1e} | {cell['selections']} |")
    lines += ["", "| gradients averaged | ms a step | of a full step |", "|---|---|---|"]
    ways = next(cell["ways"] for cell in cells if "ways" in cell)
    for name, seconds in ways.items():
        share = "–" if name == "to wrap anew" else f"{seconds / ways['everything trained']:.2f}"
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = record.options(__doc__, device=False).parse_args()
    torch.set_num_threads(1)
    names, steps, repeats = (["pliant", "lisa"], 10, 10) if args.quick else (list(RECIPES), 50, 100)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        model = net().double()
        measure.timed(model, adamw(model), loss, batch_no(0, 0)).save(profile)
        mp.start_processes(work, (folder, names, steps, repeats), nprocs=WORLD, start_method="spawn")
        first, second = (torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(WORLD))
        for name in names:
            alone, _ = train(name, "one", None, steps, profile)
            for kind in KINDS:
                cell: dict[str, Any] = {"recipe": name, "kind": kind}
                if isinstance(first[name, kind], str):
                    cells.append({**cell, "refused": first[name, kind]})
                    continue
                (mine, selections), (other, _) = first[name, kind], second[name, kind]
                equal = all(torch.equal(mine[key], other[key]) for key in mine)
                off = max(float((mine[key] - alone[key]).abs().max()) for key in mine)
                cells.append({**cell, "equal": equal, "off": off, "selections": selections})
    cells.append({"ways": first["ways"]})
    setting = {"processes": WORLD, "steps": steps, "backend": "gloo", "precision": "float64"}
    record.save(record.out(args, "processes"), setting, cells, table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
