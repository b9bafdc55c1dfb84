"""A few small backbones, written to be read, and the way from a name to a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from pliant.models.efficientnet_lite import NORM, EfficientNetLite0, efficientnet_lite0

__all__ = ["BUILT_IN", "NORM", "EfficientNetLite0", "efficientnet_lite0", "load"]

BUILT_IN: dict[str, Callable[[], nn.Module]] = {"efficientnet_lite0": efficientnet_lite0}


def load(name: str) -> nn.Module:
    """A model by the name of a built-in one, or what `package.module:factory` returns. Weights are the factory's business.

    >>> type(load("efficientnet_lite0")).__name__
    'EfficientNetLite0'
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    where, colon, factory = name.partition(":")
    if not colon:
        raise ValueError(f"no model {name!r}: give one of {', '.join(BUILT_IN)}, or package.module:factory.")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    module = importlib.import_module(where)
    if not hasattr(module, factory):
        raise ValueError(f"{where!r} has no {factory!r}: name a function or class without required arguments.")
    model = getattr(module, factory)()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch.nn.Module.")
    return model
