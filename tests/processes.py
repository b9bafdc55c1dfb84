"""Two gloo processes on the CPU that train one model, and one process with the same global batch: started once for all checks.

Run by `test_processes.py`; every check is a function here, and what it finds is sent back as plain types.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from oracle import on_steady_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pliant import Policy, Session, recipes, schedule

WORLD, STEPS, EVERY, SAMPLES = 2, 30, 5, 8  # samples: of the global batch
OFTEN = schedule.every(steps=EVERY)
RECIPES: dict[str, Callable[[], Policy]] = {
    "full": recipes.full,
    "only": lambda: recipes.only("*1.*", "head*"),
    "last": lambda: recipes.last(time=0.7),
    "pliant": lambda: recipes.pliant(time=0.7, when=OFTEN, head_first=0),
    "default": lambda: recipes.pliant(time=0.7),  # the head first, then layers on trial
    "elastic_trainer": lambda: recipes.elastic_trainer(time=0.65, when=OFTEN),
    "lisa": lambda: recipes.lisa(layers=1, steps=EVERY),
    "tinytrain": lambda: recipes.tinytrain(memory=None, macs=0.65, when=OFTEN),  # channels, which DDP does not know
}


ROWS = [(name, kind) for kind in ("ddp", "fsdp") for name in RECIPES if (name, kind) != ("tinytrain", "fsdp")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    model = Net().double()
    with torch.no_grad():
        model.head.weight.mul_(0.1)  # it begins as a guess
    return model


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def fully_shard(model: nn.Module) -> None:
    from torch.distributed import fsdp  # a second of every test run, unless the processes alone import it

    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # where there is a GPU, it would be that


def batch_no(step: int, rank: int | None = None) -> Any:
    """The global batch of a step, or a rank's share of it."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    y = (x.roll(step // 6, dims=1)[:, :3] * (1 + step // 3)).argmax(1)  # what is to be learned changes, and so do choices
    share = slice(None) if rank is None else slice(rank * SAMPLES // WORLD, (rank + 1) * SAMPLES // WORLD)
    return x[share], y[share]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: rounding must not decide an update. Fused: on shards every single operation is slow to start.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)


def train(name: str, kind: str, rank: int | None, steps: int = STEPS, accumulate: int = 1) -> dict[str, Any]:
    """Weights, and what was chosen, after a run."""
    model, policy = net(), on_steady_device(RECIPES[name]())
    profile = None
    if kind == "fsdp":  # seconds are measured before parameters are spread
        profile = policy.cost(model, adamw(model), loss, batch_no(0, rank))
        fully_shard(model.blocks[0])
        fully_shard(model)
    given: nn.Module = DistributedDataParallel(model, find_unused_parameters=True) if kind == "ddp" else model
    chosen = []
    options: dict[str, Any] = {"correct": False, "engine": "plain", "accumulate": accumulate, "profile": profile}
    options["total_steps"] = steps
    options["allow_mismatch"] = True  # prices are those of a steady device, whatever norms do
    with Session(given, adamw(model), loss, policy, **options) as session:
        for step in range(steps):
            for _ in range(accumulate):
                session.step(batch_no(step, rank))
            chosen.append(sorted(unit.name for unit in session.selection.units))
        names = [(unit.name, unit.params) for unit in session.units]
    return {"weights": gathered(model), "chosen": chosen, "units": names}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, whole."""
    state: dict[str, Any] = model.state_dict()
    return {key: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for key, value in state.items()}


# ---------------------------------------------------------------- DDP in particular


def own_loop(rank: int) -> dict[str, Any]:
    """DDP in the caller's own loop, with accumulation: the session gets the wrapped model, and chooses once per step."""
    model = net()
    ddp, optimizer = DistributedDataParallel(model, find_unused_parameters=True), adamw(model)
    policy = on_steady_device(RECIPES["pliant"]())
    with Session(ddp, optimizer, loss, policy, correct=False, accumulate=2) as session:
        for step in range(12):
            for part in range(2):
                if part == 0:
                    session.before_step(batch_no(step, rank))
                with nullcontext() if part else ddp.no_sync():
                    (loss(ddp, batch_no(step, rank)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def measured(rank: int) -> tuple[list[str], float]:
    """With real clocks, which differ between processes: all of them choose the same, and correct the same."""
    model, policy = net(), recipes.pliant(time=1.0, when=OFTEN)  # less may lie below the floor where other work disturbs
    with Session(DistributedDataParallel(model, find_unused_parameters=True), adamw(model), loss, policy) as session:
        for step in range(25):
            session.step(batch_no(step, rank))
        return [unit.name for unit in session.selection.units], session.profile.full.seconds


def resumed(rank: int) -> bool:
    """Killed and resumed is the same as never stopped, also with several processes."""
    policy = on_steady_device(RECIPES["elastic_trainer"]())
    models = [net(), net()]
    ends = []
    for model, stops in zip(models, (False, True), strict=True):
        optimizer = adamw(model)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        session = Session(ddp, optimizer, loss, policy, correct=False)
        for step in range(13):
            if stops and step == 7:
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
                session.close()
                model, optimizer = net(), None
                optimizer = adamw(model)
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
                session = Session(
                    DistributedDataParallel(model, find_unused_parameters=True), optimizer, loss, policy, correct=False
                )
                session.load_state_dict(state[2])
            session.step(batch_no(step, rank))
        ends.append((model, session.selection.units))
        session.close()
    (a, first), (b, second) = ends
    return first == second and all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# ---------------------------------------------------------------- wrong use: the message, and that no weight has moved


def refused(rank: int, attempt: Callable[[nn.Module], None]) -> tuple[str, bool]:
    model = net()
    before = copy.deepcopy(model.state_dict())
    try:
        attempt(model)
        message = "not refused"
    except (ValueError, RuntimeError) as error:
        message = str(error)
    return message, all(torch.equal(before[name], value) for name, value in gathered(model).items())


def one_step(model: nn.Module, policy: Policy, params: nn.Module, rank: int, **options: Any) -> None:
    with Session(model, adamw(params), loss, policy, **options) as session:
        session.step(batch_no(0, rank))


def frozen_at_wrapping(model: Any, rank: int) -> None:
    """A parameter that was frozen when DDP wrapped the model, and enabled later, is never averaged."""
    model.head.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model.head.requires_grad_(True)
    one_step(ddp, recipes.head(), model, rank)


def not_told_of_ddp(model: nn.Module, rank: int) -> None:
    ddp, optimizer = DistributedDataParallel(model, find_unused_parameters=True), adamw(model)
    with Session(model, optimizer, loss, recipes.head()) as session:
        session.before_step(batch_no(0, rank))
        loss(ddp, batch_no(0, rank)).backward()
        optimizer.step()


def broken_batch(model: nn.Module, rank: int) -> None:
    """The loss of one process alone is not finite: all say so, and none waits for another."""
    x, y = batch_no(0, rank)
    with Session(
        DistributedDataParallel(model, find_unused_parameters=True), adamw(model), loss, RECIPES["pliant"]()
    ) as session:
        session.step((x * (torch.nan if rank else 1.0), y))


def wrong_uses(rank: int) -> dict[str, tuple[str, bool]]:
    def with_ddp(policy: Policy, **flags: Any) -> Callable[[nn.Module], None]:
        return lambda model: one_step(DistributedDataParallel(model, **flags), policy, model, rank)

    def sharded(policy: Policy) -> Callable[[nn.Module], None]:
        def attempt(model: nn.Module) -> None:
            fully_shard(model)
            one_step(model, policy, model, rank)

        return attempt

    both = {"find_unused_parameters": True, "static_graph": True}
    out = {
        "flags": refused(rank, with_ddp(recipes.head())),
        "static": refused(rank, with_ddp(recipes.head(), **both)),
        "full needs no flag": refused(rank, with_ddp(recipes.full())),
        "frozen": refused(rank, lambda model: frozen_at_wrapping(model, rank)),
        "not told": refused(rank, lambda model: not_told_of_ddp(model, rank)),
        "nan": refused(rank, lambda model: broken_batch(model, rank)),
        "energy": refused(rank, with_ddp(recipes.pliant(energy=0.5), find_unused_parameters=True)),
    }
    for name, policy in (("timed", recipes.pliant(time=0.5)), ("memory", recipes.pliant(memory=0.5))):
        message, _ = refused(rank, sharded(policy))
        out[f"sharded {name}"] = message, True
    return out


# ---------------------------------------------------------------- one start for everything


def everything(rank: int) -> dict[str, Any]:
    found: dict[Any, Any] = {(name, kind): train(name, kind, rank) for name, kind in ROWS}
    found["accumulate"] = train("pliant", "ddp", rank, 12, accumulate=2)
    return {
        "trained": found,
        "own loop": own_loop(rank),
        "measured": measured(rank),
        "resumed": resumed(rank),
        "wrong": wrong_uses(rank),
    }


def start(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        result: Any = everything(rank)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group() if isinstance(result, dict) else os._exit(1)


def run(folder: Path) -> list[Any]:
    """What each process found."""
    fresh = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    slow = ["pliant.session.session", "torch.distributed.fsdp", "torch._dynamo"]
    multiprocessing.set_forkserver_preload(slow)  # imported once
    try:
        mp.start_processes(start, (str(folder),), nprocs=WORLD, start_method=fresh)
    except mp.ProcessExitedException as error:
        told = [torch.load(file, weights_only=False) for file in folder.glob("rank*.pt")]
        raise RuntimeError("\n".join(str(one) for one in told if isinstance(one, str))) from error
    return found(folder)


def found(folder: Path) -> list[Any]:
    """The same, once they have run."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]
