"""Does it work on models that we did not write? Architectures of timm, torchvision, transformers, peft and
segmentation_models_pytorch, and parts of PyTorch that are no plain layers.

    python benchmarks/foreign.py                         # every row, one process each, about an hour; resumable
    python benchmarks/foreign.py --quick                 # a handful: about a minute
    python benchmarks/foreign.py --only transformers/gpt2 'timm/*'
    python benchmarks/foreign.py --again                 # rows that did not pass, once more

Needs those packages (`pip install '.[zoo]' timm torchvision segmentation_models_pytorch`), but no network: weights are
random and inputs small. A row passes if all of these hold:

| check | what |
|---|---|
| time | six steps of `recipes.pliant(time=0.5)`: more than the head is chosen, less than everything, and chosen again |
| memory | the same with `memory=0.3`, on the lean engine, or with the reason why not |
| resume | saved after half of the steps: a fresh model that loads the file ends with the same weights, bit for bit |
| engines | plain, lean, prefix and lean+prefix: each step equals one of plain autograd, in float64 if the model can |
| restored | after `close`, flags, modes and hooks are as before, and a plain step equals that of a fresh model |
| quiet | no warning that a plain step does not give too |
| recipes | the rows in `foreign_models.TEN` also run other recipes |

Where the forward pass alone takes more than the budget, the session refuses it and names a floor. Then one step runs at that
floor, and the rest halfway between it and a full step.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fnmatch
import importlib.metadata
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from foreign_models import DIFFERENTIATE, ROWS, TEN, Case, Row, declare_torchvision, lacks_operators
from pliant.runlog import read as read_log
from torch import nn

from pliant import Budget, BudgetError, Policy, Session, measure, recipes, schedule, score, solve, units

STEPS, EVERY = 6, 2  # steps of a run, and steps between two selections
TIME, MEMORY = 0.5, 0.3
RESOURCES = {"time": "seconds", "memory": "bytes", "macs": "macs"}  # limits, and what a cost calls them
ENGINES = ("plain", "lean", "prefix", "lean+prefix")
RATE = 2.0**-6
CLOSE = 1e-6  # of the largest gradient: some models compute parts in float32 whatever their weights are
CLOSE_IN_FLOAT32 = 1e-3  # for models that cannot run in float64
LIMIT = 300  # seconds of a row
QUICK = (
    "torch/LSTM",
    "torch/weight_norm",
    "timm/mobilenetv2_035",
    "transformers/llama",
    "peft/lora-llama",
    "torchvision/resnet18",
)
PACKAGES = ("timm", "torchvision", "transformers", "peft", "segmentation_models_pytorch")
OTHER_RECIPES: dict[str, Callable[[], Policy]] = {
    "elastic_trainer": lambda: recipes.elastic_trainer(TIME, when=schedule.every(steps=EVERY)),
    "green_trainer": lambda: recipes.green_trainer(TIME, when=schedule.every(steps=EVERY)),
    "lisa": lambda: recipes.lisa(layers=1, steps=EVERY),
    "badam": lambda: recipes.badam(steps=EVERY),
    "last": lambda: recipes.last(TIME),
}


class Failed(Exception):
    """A check that does not hold."""


# ---------------------------------------------------------------- a model and its copies


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)


def plain_step(case: Case, model: nn.Module, chosen: Collection[str] | None = None) -> None:
    """One step of plain PyTorch, of all parameters or of those that are chosen: what a session's is compared with."""
    model.zero_grad(set_to_none=True)
    case.loss(model, case.batch).backward()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.grad is not None and (chosen is None or name in chosen):
                param.sub_(param.grad, alpha=RATE)


def in_double(case: Case) -> Case:
    """The same case in float64."""

    def double(part: Any) -> Any:
        if torch.is_tensor(part):
            return part.double() if part.is_floating_point() else part
        if isinstance(part, dict):
            return {key: double(value) for key, value in part.items()}
        return type(part)(map(double, part)) if isinstance(part, (list, tuple)) else part

    return Case(case.model.double(), double(case.batch), case.loss)


def random_states() -> Any:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_states(states: Any) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, copied."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def fill_(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(wanted[name])


def outside(model: nn.Module) -> dict[str, Any]:
    """What a session must leave as it was found."""
    modules = {name: (type(m), m.training) for name, m in model.named_modules()}
    params = {
        name: (id(p), p.requires_grad, len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ()))
        for name, p in model.named_parameters()
    }
    return {**modules, **{f"parameter {name}": value for name, value in params.items()}}


def _hooks(module: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return [len(getattr(module, kind, ())) for kind in kinds]


# ---------------------------------------------------------------- checks


def first_step(session: Session, batch: Any, found: dict[str, Any], differentiates: bool = False) -> None:
    """Begin. A budget below the floor is refused, and the floor that the error names must then be kept.

    Where nothing but the head fits into the budget, the steps after the first one get half of what is left. A head that takes
    more than half of the backward pass is a failure, unless the loss differentiates: then it must.
    """
    limits = {kind: getattr(session.budget, kind) for kind in RESOURCES if getattr(session.budget, kind) is not None}
    if not limits:
        session.step(batch)
        return
    [(kind, asked)], name = limits.items(), RESOURCES[next(iter(limits))]
    try:
        session.step(batch)
    except BudgetError as error:
        named = re.search(rf"Use {kind}>=([0-9.]+)", str(error))
        if named is None:
            raise
        found["floor"] = float(named[1])
        session.budget = Budget(**{kind: found["floor"]})
        session.step(batch)
    profile = session.profile
    full, forward = getattr(profile.full, name), getattr(profile.base, name)
    head = [unit for unit in session.units if not set(profile.head).isdisjoint(unit.params)]
    others = [unit for unit in session.units if unit not in head and profile.due([unit])]
    if min((getattr(profile.cost([*head, unit]), name) for unit in others), default=full) > asked * full:
        found["floor"] = found.get("floor", getattr(profile.cost(head), name) / full)
        session.budget = Budget(**{kind: (1 + found["floor"]) / 2})
    found["forward"] = forward / full
    if kind == "time" and not differentiates and found.get("floor", 0) > max(TIME, (1 + forward / full) / 2):
        raise Failed(f"the floor is {found['floor']:.2f}, the forward pass {forward / full:.2f}: the head is most of the rest")


def judge(session: Session, chosen: list[frozenset[str]], again: bool = True) -> None:
    """More than the head, less than everything, chosen again."""
    everything = {param for unit in session.units for param in unit.params}
    head = set(session.profile.head)
    if any(params >= everything for params in chosen):
        raise Failed(f"everything is chosen ({len(everything)} parameters)")
    if not any(params - head for params in chosen):
        raise Failed(f"only the head is ever chosen ({len(head)} of {len(everything)} parameters)")
    if again and session.selection.round < 1:
        raise Failed("nothing is chosen again")


def limited(row: Row, kind: str, found: dict[str, Any]) -> dict[str, str]:
    """Six steps inside a budget; saved in the middle, and gone on with from there by a fresh model. Reasons by check."""
    case = row.build()
    limit = {kind: TIME if kind == "time" else MEMORY}
    policy = recipes.pliant(**limit, when=schedule.every(steps=EVERY), head_first=0)
    policy = replace(policy, signal=score.update_gain())  # from one batch: six steps are too few to compare several
    before = outside(case.model)
    with tempfile.TemporaryDirectory() as folder:
        saved, log = Path(folder, "run.pt"), Path(folder, "run.jsonl")
        with Session(case.model, sgd(case.model), case.loss, policy, correct=False, log=log) as session:
            chosen = steps(session, case, found, saved)
            out = {kind: reason(lambda: judge(session, chosen))}
            if kind == "memory" and "lean" not in session.engine and "lean" not in session.why_not:
                out[kind] = f"runs on the {session.engine} engine: {session.why_not}"
            found["chosen"] = f"{len(session.selection.units)} of {len(session.units)}"
            found["notes"] = sorted({line["text"] for line in read_log(log) if line["event"] == "note"})
            ended = values(case.model)
        out[f"{kind}, restored"] = reason(lambda: is_restored(row, case, before))
        out[f"{kind}, resumed"] = reason(lambda: goes_on(row, policy, saved, ended, chosen))
    return out


def steps(session: Session, case: Case, found: dict[str, Any], saved: Path | None = None) -> list[frozenset[str]]:
    """Six steps, saved in the middle: losses are finite, and what is not chosen does not move. Returns what was chosen."""
    chosen: list[frozenset[str]] = []
    everything = frozenset(name for name, _ in case.model.named_parameters())
    for step in range(STEPS):
        if saved is not None and step == STEPS // 2:
            session.save(saved)
        was = values(case.model)
        if step == 0:
            first_step(session, case.batch, found, case.loss in DIFFERENTIATE)
            continue
        loss = session.step(case.batch)
        chosen.append(frozenset(session.selection.params))
        if not torch.isfinite(loss).all():
            raise Failed(f"the loss is {float(loss)}")
        is_same(case.model, was, everything - chosen[-1])
    return chosen


def is_same(model: nn.Module, was: dict[str, torch.Tensor], names: frozenset[str]) -> None:
    """Parameters that are not chosen are untouched."""
    for name, param in model.named_parameters():
        if name in names and not torch.equal(_bits(param), _bits(was[name])):
            raise Failed(f"{name} is not chosen, and has moved")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach())


def goes_on(row: Row, policy: Policy, saved: Path, ended: dict[str, torch.Tensor], chosen: list[frozenset[str]]) -> None:
    """A fresh model that loads the file ends where the first one did."""
    case = row.build(seed=1)
    batch = row.build().batch
    with Session(case.model, sgd(case.model), case.loss, policy, correct=False) as session:
        session.load(saved)
        again = []
        for _ in range(STEPS // 2):
            session.step(batch)
            again.append(frozenset(session.selection.params))
        if again != chosen[-len(again) :]:
            raise Failed("the resumed run chooses something else")
        now = values(case.model)
        differ = [name for name in ended if not torch.equal(_bits(ended[name]), _bits(now[name]))]
        if differ:
            raise Failed(f"{len(differ)} of {len(now)} tensors differ after resuming, the first is {differ[0]}")


def is_restored(row: Row, case: Case, before: dict[str, Any]) -> None:
    """Flags and modes are as before; hooks, attributes and a plain step are those of a fresh model.

    Some models add hooks and attributes in their first forward pass, so that these are compared after it.
    """
    after = outside(case.model)
    differ = [name for name in before if before[name] != after.get(name)] + [name for name in after if name not in before]
    if differ:
        raise Failed(f"{differ[0]!r} was {before.get(differ[0])} and is {after.get(differ[0])}")
    fresh = row.build()
    if {name: b.shape for name, b in fresh.model.named_buffers()} != {n: b.shape for n, b in case.model.named_buffers()}:
        plain_step(fresh, fresh.model)  # a model that makes buffers in its first pass
    fill_(fresh.model, values(case.model))
    states = random_states()
    plain_step(case, case.model)
    set_random_states(states)
    plain_step(fresh, fresh.model)
    attributes = [
        {name: (sorted(m.__dict__), _hooks(m)) for name, m in model.named_modules()} for model in (case.model, fresh.model)
    ]
    if attributes[0] != attributes[1]:
        raise Failed("after close, modules hold other attributes or hooks than those of a fresh model")
    here, there = values(case.model), values(fresh.model)
    moved = [name for name in here if not torch.equal(_bits(here[name]), _bits(there[name]))]
    if moved:
        raise Failed(f"after close, a plain step of {moved[0]} is not that of a fresh model")


def agrees(row: Row, engine: str, found: dict[str, Any], cast: Callable[[Case], Case] = in_double) -> None:
    """Each step of this engine equals one of plain autograd that trains the same parameters, in float64."""
    case, twin = cast(row.build()), cast(row.build()).model
    words = units.layers(), score.random(), measure.counted, solve.sample(3), schedule.every(steps=EVERY)
    worst = 0.0
    with Session(case.model, sgd(case.model), case.loss, Policy(*words, name="random"), engine=engine) as session:
        for _ in range(2 * EVERY):
            was, states = values(case.model), random_states()
            session.step(case.batch)
            after = random_states()
            fill_(twin, was)
            for mine, other in zip(case.model.modules(), twin.modules(), strict=True):
                other.training = mine.training
            set_random_states(states)
            plain_step(case, twin, session.selection.params)
            set_random_states(after)
            is_same(case.model, was, frozenset(dict(case.model.named_parameters())) - frozenset(session.selection.params))
            worst = max(worst, distance(values(case.model), values(twin), was))
        found.setdefault("notes", {}).update({f"{engine}: {key}": why for key, why in session.why_not.items()})
        if session.engine != engine and not session.why_not:
            raise Failed(f"runs on {session.engine}, and does not say why")
    found.setdefault("error", {})[engine] = worst
    if not worst <= (CLOSE if cast is in_double else CLOSE_IN_FLOAT32):
        raise Failed(f"differs from plain autograd by {worst:.1e} of the largest change")


def distance(mine: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], was: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest change that plain PyTorch made."""
    names = [name for name, tensor in was.items() if tensor.is_floating_point() or tensor.is_complex()]
    change = max((_bits(plain[name]) - _bits(was[name])).abs().max().item() for name in names if was[name].numel())
    apart = max((_bits(mine[name]) - _bits(plain[name])).abs().max().item() for name in names if was[name].numel())
    return apart / change if change else float("inf")


def follows(row: Row, name: str, found: dict[str, Any]) -> None:
    """Another recipe: six steps, nothing moves that is not chosen."""
    case = row.build()
    with Session(case.model, sgd(case.model), case.loss, OTHER_RECIPES[name](), correct=False) as session:
        chosen = steps(session, case, found)
        judge(session, chosen, again=name != "last")


# ---------------------------------------------------------------- one row


def reason(check: Callable[[], None]) -> str:
    """Empty if it holds, else why it does not."""
    try:
        check()
    except Failed as failed:
        return str(failed)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "pliant" in Path(f.filename).parts[-4:-1]]
        last = own[-1] if own else f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} [{last}]"
    return ""


@contextmanager
def _heard(into: set[str]) -> Iterator[None]:
    """Warnings, by their text."""
    with warnings.catch_warnings(record=True) as several:
        warnings.simplefilter("always")
        yield
    into |= {f"{one.category.__name__}: {' '.join(str(one.message).split())[:160]}" for one in several}


def check(row: Row) -> dict[str, Any]:
    """Every check of a row: reasons by check, empty where it holds, and what was seen."""
    usual, leaked, seen, cast = set[str](), set[str](), dict[str, Any](), in_double
    with _heard(usual):
        case = row.build()
        for _ in range(2):
            plain_step(case, case.model)
        case = in_double(row.build())
        if without_double := reason(lambda: plain_step(case, case.model)):
            cast, seen["float32"] = (lambda case: case), without_double
    reasons: dict[str, str] = {}
    with _heard(leaked):
        for kind in ("time", "memory"):
            seen[kind] = {}
            reasons[kind] = reason(lambda kind=kind: reasons.update(limited(row, kind, seen[kind]))) or reasons.get(kind, "")
        seen["engines"] = {}
        for engine in ENGINES:
            reasons[engine] = reason(lambda engine=engine: agrees(row, engine, seen["engines"], cast))
        if row.name in TEN:
            for name in OTHER_RECIPES:
                seen[name] = {}
                reasons[name] = reason(lambda name=name: follows(row, name, seen[name]))
    reasons["quiet"] = "; ".join(sorted(leaked - usual))
    return {"reasons": {name: reason for name, reason in reasons.items() if reason}, "checks": list(reasons), "seen": seen}


def started(name: str, folder: Path) -> tuple[multiprocessing.Process, float]:
    """One row in a process of its own, so that a crash or a hang is a row and not the end."""
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(name, folder / name.replace("/", " ")), daemon=True
    )
    process.start()
    return process, time.monotonic()


def _child(name: str, path: Path) -> None:
    with open(f"{path}.err", "w") as stream:
        os.dup2(stream.fileno(), 2)
        os.dup2(stream.fileno(), 1)
        torch.set_num_threads(1)
        answer = json.dumps(check(ROWS[name]))
    path.write_text(answer)


def result(name: str, process: multiprocessing.Process, seconds: float, folder: Path) -> dict[str, Any]:
    """What the process found, or how it ended."""
    path = folder / name.replace("/", " ")
    if path.exists():
        found = json.loads(path.read_text())
    elif process.exitcode is None:
        process.kill()
        found = {"reasons": {"process": f"no end within {LIMIT} s"}}
    else:
        last = (Path(f"{path}.err").read_text().strip().splitlines() or [""])[-1]
        found = {"reasons": {"process": f"ended with {process.exitcode}: {last[:300]}"}}
    process.join()
    return {"row": name, **found, "seconds": round(seconds, 1), "commit": record.where()["commit"]}


def run(names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
    """Rows as they end, `jobs` at once. Packages are imported once, here."""
    declare_torchvision()
    for package in PACKAGES:
        importlib.import_module(package)
    waiting, running = list(names), dict[str, tuple[multiprocessing.Process, float]]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                if ROWS[name].missing and lacks_operators():
                    yield {"row": name, "left out": ROWS[name].missing}
                else:
                    running[name] = started(name, folder)
            wait([process.sentinel for process, _ in running.values()], timeout=1)
            for name, (process, start) in list(running.items()):
                seconds = time.monotonic() - start
                if process.exitcode is not None or seconds > LIMIT:
                    del running[name]
                    yield result(name, process, seconds, folder)


# ---------------------------------------------------------------- the table


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: counts by package, what does not work and why, and every row."""
    ran = [c for c in cells if "left out" not in c]
    passed = {c["row"] for c in ran if not c["reasons"]}
    lines = ["### By package", "", "| package | rows | pass every check |", "|---|---|---|"]
    for package, count in Counter(c["row"].split("/")[0] for c in ran).items():
        lines.append(f"| {package} | {count} | {sum(name.startswith(package + '/') for name in passed)} |")
    lines += [f"| all | {len(ran)} | {len(passed)} ({100 * len(passed) / max(len(ran), 1):.1f} %) |", ""]
    lines += ["### What does not work", "", "| row | check | why |", "|---|---|---|"]
    for c in ran:
        lines += [f"| {c['row']} | {name} | {_cell(reason)} |" for name, reason in c["reasons"].items()]
    lines += [f"| {c['row']} | – | left out: {c['left out']}; run it on a GPU machine |" for c in cells if "left out" in c]
    lines += [
        "",
        "### Every row",
        "",
        "| row | result | time floor | chosen of its layers (time) | (memory) |",
        "|---|---|---|---|---|",
    ]
    for c in ran:
        seen = c.get("seen", {})
        timed, memory = seen.get("time", {}), seen.get("memory", {})
        floor = f"{timed['floor']:.2f}" if "floor" in timed else "–"
        result = "pass" if not c["reasons"] else "fails: " + ", ".join(c["reasons"])
        lines.append(f"| {c['row']} | {result} | {floor} | {timed.get('chosen', '–')} | {memory.get('chosen', '–')} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    parser = record.options(__doc__, device=False)
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME", help="rows by name; '*' stands for anything")
    parser.add_argument("--again", action="store_true", help="run rows that did not pass once more")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    args = parser.parse_args()
    names = list(QUICK if args.quick else ROWS)
    if args.only:
        names = [name for name in ROWS if any(fnmatch.fnmatchcase(name, glob) for glob in args.only)]
        if not names:
            raise SystemExit(f"no row is called {' or '.join(args.only)}. Rows: {', '.join(ROWS)}.")
    path = record.out(args, "foreign")
    setting = {"time": TIME, "memory": MEMORY, "steps": STEPS, **{name: importlib.metadata.version(name) for name in PACKAGES}}
    known = {one["row"]: one for one in record.load(path, setting)}
    due = [n for n in names if n not in known or args.only or (args.again and known[n].get("reasons"))]

    for one in run(due, args.jobs):
        known[one["row"]] = one
        cells = [known[n] for n in ROWS if n in known]
        record.save(path, setting, cells, table(cells))
        state = one.get("left out") or "; ".join(f"{name}: {why}" for name, why in one["reasons"].items()) or "pass"
        print(f"{one['row']:36} {one.get('seconds', 0):6.1f} s  {state[:300]}", flush=True)
    return int(any(known[n].get("reasons") for n in names if n in known))


if __name__ == "__main__":
    sys.exit(main())
