"""Files of a run: one from which it goes on as if it had never stopped (model, optimizer, scaler, session, random states), and
one that holds just what changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pliant import __version__
from pliant.core import schema
from pliant.core.schema import Either
from pliant.runtime.files import write_aside
from pliant.runtime.rng import check_rng_states, rng_states, set_rng_states
from pliant.runtime.sealed import load_archive, save_archive, seal_tensors

_SHAPE = {
    "model": {str: Any},
    "optimizer": {"state": dict, "param_groups": [{"params": [int]}]},
    "scaler": Either(None, dict),
    "session": dict,
    "random": dict,
    "beside": Any,
}


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    session: Mapping[str, Any],
    beside: Any = None,
) -> None:
    """Write aside, then rename: the file is the old one or the new one, never half of one."""
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "session": dict(session),
        "random": rng_states(),
        "beside": beside,
    }
    save_archive(path, parts)


def save_delta(path: str | os.PathLike[str], changed: Mapping[str, torch.Tensor], step: int) -> None:
    """What changed, by state-dict name, as safetensors."""
    save_tensors(path, changed, {"format": "pliant.delta/1", "step": str(step)})


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    """Tensors by name as safetensors, with what is to be known about them; tensors that share memory are saved one by one."""
    from safetensors.torch import save as as_bytes

    whole = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    write_aside(path, seal_tensors(as_bytes(whole, {**about, "pliant": __version__})))


def read(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> dict[str, Any]:
    """A whole checkpoint of this model, optimizer and scaler, or an error; nothing is changed yet."""
    name = os.fspath(path)
    try:
        saved: dict[str, Any] = load_archive(path)
        schema.check(_SHAPE, saved, "checkpoint")
    except ValueError as error:
        raise ValueError(f"{name!r} is not a whole checkpoint that Session.save wrote: {error}") from error
    try:
        _check_model(saved["model"], model)
        _check_optimizer(saved["optimizer"], optimizer)
        if scaler is not None and scaler.is_enabled() and saved["scaler"]:
            schema.check(dict.fromkeys(scaler.state_dict(), schema.NUMBER), saved["scaler"], "scaler")
        check_rng_states(saved["random"])
    except ValueError as error:
        raise ValueError(f"{name!r} does not fit: {error}") from error
    return saved


def _check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    there, here = ({name: _kind(value) for name, value in state.items()} for state in (saved, model.state_dict()))
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            raise ValueError(
                f"it is of another model: {name!r} is {there.get(name, 'not there')}, here {here.get(name, 'not there')}."
            )


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"


def _check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Groups as they are here; state of parameters that are there, in tensors that fit them for optimizers of torch."""
    groups, now = saved["param_groups"], optimizer.state_dict()["param_groups"]
    counts = [[len(group["params"]) for group in each] for each in (groups, now)]
    if counts[0] != counts[1]:
        raise ValueError(f"it is of another optimizer: it has groups of {counts[0]} parameters, not {counts[1]}.")
    for there, here in zip(groups, now, strict=True):
        for key, value in here.items():
            if key not in there and key not in optimizer.defaults:  # a scheduler has added it
                continue
            if key not in there or not _alike(there[key], value):
                raise ValueError(f"it is of another optimizer: its {key!r} is {there.get(key)!r}, not like {value!r} here.")
    params = dict(
        zip(
            (number for group in groups for number in group["params"]),
            (param for group in optimizer.param_groups for param in group["params"]),
            strict=True,
        )
    )
    known = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)
    for number, state in saved["state"].items():
        if not isinstance(state, dict) or number not in params:
            raise ValueError(f"its optimizer state {number!r} is of no parameter.")
        for key, value in state.items():
            if known and isinstance(value, torch.Tensor) and not _broadcasts(value.shape, params[number].shape):
                raise ValueError(
                    f"its optimizer state {key!r} of shape {tuple(value.shape)} does not fit a parameter of shape "
                    f"{tuple(params[number].shape)}."
                )


def _alike(a: Any, b: Any) -> bool:
    """Whether two settings are of one kind. A setting may be None, a number or a tensor of one number alike."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    kinds = [
        int if value is None or isinstance(value, (bool, int, float)) or _is_number(value) else type(value) for value in (a, b)
    ]
    return kinds[0] is kinds[1] or a is None or b is None


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(mine in (1, its) for mine, its in zip(reversed(shape), reversed(to), strict=False))


def fill_(
    saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> None:
    """Give model, optimizer, scaler and random states what a checkpoint holds."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if scaler is not None and saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])
    set_rng_states(saved["random"])
