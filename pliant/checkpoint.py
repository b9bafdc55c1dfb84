"""One file from which a run goes on as if it had never stopped: model, optimizer, scaler, session, random states."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pliant.apply import rng_states, set_rng_states
from pliant.types import write_aside


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    session: Mapping[str, Any],
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
        },
        content,
    )
    write_aside(path, content.getvalue())


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> dict[str, Any]:
    """Fill model, optimizer, scaler and random states from a file; returns the session's state."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a whole checkpoint: {error}") from error
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if scaler is not None and saved["scaler"] is not None:
        scaler.load_state_dict(saved["scaler"])
    set_rng_states(saved["random"])
    session: dict[str, Any] = saved["session"]
    return session
