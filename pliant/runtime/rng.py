"""Every random generator's state, and the way back to it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


def rng_states() -> dict[str, Any]:
    """Every random state that training may draw from, in plain types and tensors."""
    name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def check_rng_states(states: Mapping[str, Any]) -> None:
    """A ValueError unless `set_rng_states` can put these states back; tried on generators of its own."""
    try:
        version, internal, gauss = states["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        np.random.RandomState().set_state(_numpy(states["numpy"]))
        torch.Generator().set_state(states["cpu"])
        for device, each in enumerate(_of_gpus(states)):
            torch.Generator(f"cuda:{device}").set_state(each)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"its random states are damaged ({error!r}).") from error


def _numpy(state: Any) -> Any:
    name, keys, position, has_gauss, cached = state
    return name, keys.numpy().astype(np.uint32), position, has_gauss, cached


def _of_gpus(states: Mapping[str, Any]) -> list[torch.Tensor]:
    """The saved states of those GPUs that are here too."""
    here = torch.cuda.device_count() if "cuda" in states and torch.cuda.is_available() else 0
    return list(states["cuda"])[:here] if here else []


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Put the random states back."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_numpy(states["numpy"]))
    torch.set_rng_state(states["cpu"])
    for device, each in enumerate(_of_gpus(states)):
        torch.cuda.set_rng_state(each, device)
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def keeps_rng_states() -> Iterator[None]:
    """What is drawn inside is as if it had not been drawn."""
    states = rng_states()
    try:
        yield
    finally:
        set_rng_states(states)


def seed_(seed: int) -> None:
    """Every generator starts from this seed. (`torch.manual_seed` would also seed a GPU that is not in use yet.)"""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def is_same(a: Any, b: Any) -> bool:
    """Whether two random states are the same: then nothing was drawn between them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)
