"""Files of a run: one from which it goes on as if it had never stopped (model, optimizer, scaler, session, random states), and
one that holds just what changed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from pliant import __version__
from pliant.core.types import Selection, Unit
from pliant.runtime.files import write_aside
from pliant.runtime.rng import rng_states, set_rng_states

FORMAT = "pliant.session/10"
_PARTS = ("model", "optimizer", "session", "random")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    session: Mapping[str, Any],
    beside: Any = None,
) -> None:
    """Write aside, then rename: the file is the old one or the new one, never half of one."""
    content = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "session": dict(session),
            "random": rng_states(),
            "beside": beside,
        },
        content,
    )
    write_aside(path, content.getvalue())


def save_delta(path: str | os.PathLike[str], changed: Mapping[str, torch.Tensor], step: int) -> None:
    """What changed, by state-dict name, as safetensors."""
    save_tensors(path, changed, {"format": "pliant.delta/1", "step": str(step)})


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    """Tensors by name as safetensors, with what is to be known about them; tensors that share memory are saved one by one."""
    from safetensors.torch import save as as_bytes

    whole = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    write_aside(path, in_order(as_bytes(whole, {**about, "pliant": __version__})))


def in_order(content: bytes) -> bytes:
    """A safetensors file with its metadata in order, which else differs from process to process: the same tensors, the same
    bytes."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + content[start:]


def read(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole checkpoint of this model and optimizer, or an error; nothing is changed yet."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes its reader stumble in any way
        raise ValueError(f"{os.fspath(path)!r} is not a whole checkpoint that Session.save wrote.") from error
    if not isinstance(saved, dict) or any(not isinstance(saved.get(key), dict) for key in _PARTS) or "scaler" not in saved:
        raise ValueError(f"{os.fspath(path)!r} is not a checkpoint that Session.save wrote.")
    there = {name: tuple(t.shape) for name, t in saved["model"].items() if isinstance(t, torch.Tensor)}
    here = {name: tuple(t.shape) for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    if there != here:
        name = next(n for n in {**there, **here} if there.get(n) != here.get(n))
        raise ValueError(
            f"{os.fspath(path)!r} is of another model: {name!r} is {there.get(name)} there, {here.get(name)} here."
        )
    try:
        groups = [[len(g["params"]) for g in o["param_groups"]] for o in (saved["optimizer"], optimizer.state_dict())]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged: it does not say what its optimizer steps.") from error
    if groups[0] != groups[1]:
        raise ValueError(
            f"{os.fspath(path)!r} is of another optimizer: it has groups of {groups[0]} parameters, not {groups[1]}."
        )
    return saved


def fill_(
    saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> None:
    """Give model, optimizer, scaler and random states what a checkpoint holds."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if scaler is not None and saved["scaler"] is not None:
        scaler.load_state_dict(saved["scaler"])
    set_rng_states(saved["random"])


def check_state(state: Mapping[str, Any], policy: str, params: Collection[str]) -> Selection | None:
    """Refuse a session's state that is of another format, recipe or model; gives the selection that it holds."""
    if state.get("format") != FORMAT:
        raise ValueError(f"not the state of a Pliant session: format is {state.get('format')!r}, expected {FORMAT!r}.")
    if state["policy"] != policy:
        raise ValueError(f"this state is of the recipe {state['policy']!r}; this session runs {policy!r}.")
    known = {param for unit in state["units"] for param in Unit.from_json(unit).params}
    missing = sorted(known - set(params))
    if missing:
        raise ValueError(f"this state is of another model: it knows {missing[0]!r}, which is not trainable here.")
    return Selection.from_json(state["selection"]) if state["selection"] else None
