"""`executorch`: a model, a batch and a choice in; a program that trains that choice on a device out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pliant.core.budget import Budget, Limit
from pliant.core.errors import BudgetError
from pliant.core.types import Cost, Selection
from pliant.cost.measure import counted
from pliant.export.device.check import check
from pliant.export.device.choose import Candidate, choose
from pliant.export.device.errors import ExportError
from pliant.export.device.facts import FACTS, INDEX, PROGRAM, Facts
from pliant.export.device.footprint import footprint, split_
from pliant.export.device.joint import joint
from pliant.export.device.lower import lower
from pliant.export.device.prepare import check_modes, prepared
from pliant.export.device.rewrites import shrink_
from pliant.planning.policy import Policy
from pliant.runtime.batches import Loss, Pieces
from pliant.runtime.files import write_aside

Choice = Selection | Policy
RATE = 1e-4  # steps of one image without clipping: ten times this lowered accuracy (docs/notebook.md)
_ATTEMPTS = 3  # where the planner leaves gaps, the same is asked for in correspondingly less


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a classifier; a batch is (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def executorch(
    model: nn.Module,
    batch: Any,
    choice: Choice | Mapping[str, Choice],
    out: str | os.PathLike[str],
    *,
    loss: Loss = cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
    memory: Limit = None,
    int8: bool = False,
    probe: Pieces | None = None,
) -> Facts | dict[str, Facts]:
    """Write a program that trains exactly the chosen parameters with ExecuTorch, and a small JSON file about it.

    `batch` fixes the shapes of a step. `choice` is a selection, or a policy that makes one: its `memory` (or `memory=` here)
    limits the program's planned mutable memory, which is the arena with activations, gradients and the weights that change.
    `optimizer` is an SGD, whose settings the device uses (default: a learning rate of 0.0001). `int8` stores frozen weights in
    8 bits. `probe` are batches on which a policy scores units, in place of the one at hand. With several choices by name, `out`
    becomes a bundle: a folder for each, and an index.

    The program is held against eager PyTorch before anything is written. The model is not changed.
    """
    if isinstance(choice, Mapping):
        how = loss, optimizer, memory, int8, probe
        return _bundle({name: built(model, batch, one, *how) for name, one in _named(choice).items()}, Path(out))
    facts, program = built(model, batch, choice, loss, optimizer, memory, int8, probe)
    folder = Path(out)
    write_aside(folder / PROGRAM, program)
    write_aside(folder / FACTS, facts.dumps())
    return facts


def built(
    model: nn.Module,
    batch: Any,
    choice: Choice,
    loss: Loss = cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
    memory: Limit = None,
    int8: bool = False,
    probe: Pieces | None = None,
) -> tuple[Facts, bytes]:
    """The program and what is known of it; nothing is written."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE) if optimizer is None else optimizer
    sgd = _settings(optimizer)
    check_modes(model)
    _check_on_cpu(model)
    limit = _limit(choice, memory)
    asked = limit
    for attempt in range(_ATTEMPTS):
        found, graphs, pieces = _candidate(model, batch, choice, loss, optimizer, asked, bool(sgd["momentum"]), int8, probe)
        lowered = lower(found.graph)
        step, trained = prepared(model, loss, batch, found.selection.parts, int8)
        state = _state_bytes(found.selection, model) if sgd["momentum"] else 0
        planned = lowered.memory.planned + state
        if limit is None or planned <= limit:
            break
        if attempt == _ATTEMPTS - 1 or isinstance(choice, Selection):
            raise BudgetError(
                f"memory={limit:,} bytes: the program of {len(found.selection.units)} units takes {planned:,} (fullest at "
                f"{lowered.memory.operator}). Raise the limit, or choose less."
            )
        asked = int((asked or limit) - 1.1 * (planned - limit))
    difference = check(lowered.program, found.graph, step.model if int8 else model, loss, batch, trained)
    cost, full = _macs(model, optimizer, loss, batch, found.selection)
    report = lowered.memory.to_json()
    report["planned"], report["held"] = planned, {**report["held"], **({"optimizer state": state} if state else {})}
    shapes = tuple(tuple(spec.shape) for spec in step(*step.inputs))
    inputs = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in step.inputs)
    size = len(lowered.program)
    known = Facts(trained, inputs, shapes, report, cost, full, size, lowered.operators, sgd, difference, graphs, pieces, int8)
    return known, lowered.program


def _candidate(
    model: nn.Module,
    batch: Any,
    choice: Choice,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    limit: int | None,
    momentum: bool,
    int8: bool,
    probe: Pieces | None,
) -> tuple[Candidate, int, dict[str, int]]:
    """The selection to export with its graph, how many graphs were made, and what is computed in pieces."""
    pieces: dict[int, dict[str, int]] = {}

    def graph_of(selection: Selection) -> tuple[Any, int]:
        if not selection.parts:
            raise ExportError("the selection is empty: there is nothing to train. Choose at least one unit.")
        step, _ = prepared(model, loss, batch, selection.parts, int8)
        program = joint(step)
        shrink_(program)
        state = _state_bytes(selection, model) if momentum else 0
        pieces[id(program)] = split_(program, limit - state) if limit is not None else {}
        return program, footprint(program) + state

    if isinstance(choice, Selection):
        return (found := Candidate(choice, *graph_of(choice))), 1, pieces[id(found.graph)]
    found, graphs = choose(model, optimizer, loss, batch, choice, limit, graph_of, probe)
    return found, graphs, pieces[id(found.graph)]


def _limit(choice: Choice, memory: Limit) -> int | None:
    if isinstance(choice, Policy):
        budget = choice.budget
        for kind in ("time", "energy"):
            if getattr(budget, kind) is not None:
                raise ExportError(
                    f"{kind}={getattr(budget, kind)!r} would be measured here, not on the device. Give memory= or macs=."
                )
        memory = budget.memory if memory is None else memory
    if memory is None:
        return None
    if callable(memory) or isinstance(memory, float):
        raise ExportError(f"memory={memory!r}: the memory of a program is an amount, like '1MB'.")
    return int(Budget(memory=memory).limits(Cost(bytes=1))["bytes"])


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The settings of ExecuTorch's SGD."""
    if type(optimizer) is not torch.optim.SGD:
        raise ExportError(
            f"{type(optimizer).__name__} cannot run on the device: ExecuTorch trains with SGD. Give a torch.optim.SGD."
        )
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    settings = [{name: group[name] for name in names} for group in optimizer.param_groups]
    if any(one != settings[0] for one in settings) or any(group["maximize"] for group in optimizer.param_groups):
        raise ExportError("the device has one SGD for all parameters, which minimises: give one without groups that differ.")
    return {name: bool(value) if name == "nesterov" else float(value) for name, value in settings[0].items()}


def _check_on_cpu(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.device.type != "cpu" or param.dtype != torch.float32:
            raise ExportError(
                f"{name!r} is {param.dtype} on {param.device}: export a float32 model on the CPU (model.float().cpu())."
            )


def _state_bytes(selection: Selection, model: nn.Module) -> int:
    """What momentum takes: as much as the weights that change."""
    params = dict(model.named_parameters())
    size = 0
    for part in set(selection.parts):
        shape = params[part.param].shape
        share = 1.0 if part.dim is None or part.index is None else len(part.index) / shape[part.dim]
        size += int(params[part.param].numel() * share) * 4
    return size


def _macs(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, chosen: Selection) -> tuple[int, int]:
    profile = counted(model, optimizer, loss, batch, norm="frozen")
    cost: Cost = profile.cost(chosen.units)
    return cost.macs, profile.full.macs


def _named(choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
    for name in choices:
        if not name or name != Path(name).name or name.startswith("."):
            raise ExportError(f"{name!r} cannot name a program of a bundle: it becomes a folder. Use letters and digits.")
    return choices


def _bundle(done: Mapping[str, tuple[Facts, bytes]], out: Path) -> dict[str, Facts]:
    """One program per choice, and an index with their sizes. All are made before the first is written."""
    index = {}
    for name, (facts, program) in done.items():
        write_aside(out / name / PROGRAM, program)
        write_aside(out / name / FACTS, facts.dumps())
        index[name] = {
            "program": f"{name}/{PROGRAM}",
            "planned_bytes": facts.planned,
            "program_bytes": facts.program_bytes,
            "macs": facts.macs,
            "trains": len(facts.trains),
            # the programs that can take over what this one has learned: all of it trains there too
            "goes_on_in": sorted(other for other in done if other != name and _is_within(facts, done[other][0])),
        }
    write_aside(out / INDEX, json.dumps({"format": "pliant.device-bundle/1", "programs": index}, indent=1).encode())
    return {name: facts for name, (facts, _) in done.items()}


def _is_within(one: Facts, other: Facts) -> bool:
    return {(t.name, t.index) for t in one.trains} <= {(t.name, t.index) for t in other.trains}
