"""Profiles in the user's cache folder: what was measured once is not measured again under the same conditions.

A kept profile is a file like any other that `Profile.save` writes: JSON with a checksum. Its name is the hash of everything
that the measurement depends on. Whatever is wrong with the folder or a file, the profile is measured, and the log says why.
With `PLIANT_PROFILES=off` in the environment every run measures for itself, and nothing is kept.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pliant import __version__
from pliant.core.budget import Budget
from pliant.core.prices import KernelPrices
from pliant.cost.limited import needs_seconds, within
from pliant.cost.measure import origin, timed
from pliant.cost.profile import Profile
from pliant.graph.backward import Graph, Node
from pliant.graph.saved_tensors import Saves
from pliant.runtime import batches
from pliant.runtime.batches import Around, Loss, Ready
from pliant.runtime.batchnorm import NormRule
from pliant.runtime.files import cache_folder
from pliant.runtime.optimizer_step import Update

_WAY = 4  # of measuring: another number where `measure.timed` finds other prices or bytes than before
_SURELY = 2  # repeats of what is measured again
_MOST = 100  # profiles that are kept: the oldest leave, so that changing batches do not fill a disk
_NAME = re.compile(r"[0-9a-f]{32}\.json")


@dataclass(frozen=True)
class Kept:
    """One file of the cache: its profile, or why it is none."""

    path: Path
    bytes: int
    profile: Profile | None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        about = {"origin": dict(self.profile.origin), "full": asdict(self.profile.full)} if self.profile is not None else {}
        return {"file": self.path.name, "bytes": self.bytes, **about, **({"why_not": self.why_not} if self.why_not else {})}


def recall(
    cost: Callable[..., Profile],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    *,
    spare: Budget | None,
    graph: Graph,
    update: Update,
    norm: NormRule,
    around: Around,
    prices: KernelPrices,
    ready: Ready | None,
    will_do: Callable[[Profile], bool] = lambda profile: True,
) -> tuple[Profile, str | None]:
    """The profile that is kept for these conditions, else a new one by `cost`, which is kept; and what a log should say.

    Seconds that will not do, since a run could not begin with them, are measured again and longer: they may be noise.

    The origin of one from the cache says so (`cached`), and how many seconds it took to measure (`took`). A measurement may
    have to `spare` the memory of a budget; where there is none to spare, bytes are counted from shapes. Only what `timed` finds
    is kept: nothing else takes long, or depends on the device.
    """

    def measured() -> Profile:
        how: dict[str, Any] = {"graph": graph, "update": update, "norm": norm}
        how |= {"around": around, "prices": prices, "ready": ready}
        if spare is not None:
            return within(cost, spare)(model, optimizer, loss, batch, **how)
        if cost is not timed:
            return cost(model, optimizer, loss, batch, **how)
        found = timed(model, optimizer, loss, batch, **how, follow=False)
        return found if will_do(found) else timed(model, optimizer, loss, batch, **how, follow=False, repeats=_SURELY)

    keeps = cost is timed and (spare is None or needs_seconds(model, spare)) and os.environ.get("PLIANT_PROFILES") != "off"
    place = folder() if keeps else None
    if place is None:
        return measured(), None
    now = origin(model, batch, update, norm)
    facts = now, _of_tensors(model, batch), _of_graph(graph), _of_optimizer(model, optimizer), _of_settings()
    step = update.clip is not None, update.scaler is not None, _name(around), prices.of_batch, prices.of_running, _name(ready)
    room = None if spare is None else "changing" if callable(spare.memory) else spare.memory  # decides on how many samples
    key = hashlib.sha256(repr((facts, step, room)).encode()).hexdigest()[:32]
    path = place / f"{key}.json"
    try:
        profile = _checked(Profile.load(path, now), key, graph)
        if will_do(profile):
            return replace(profile, origin={**profile.origin, "cached": True}), None
        why = None
    except FileNotFoundError:
        why = None
    except (OSError, ValueError) as error:
        why = f"the profile in the cache was not used: {error}"
    start = time.monotonic()
    profile = measured()
    about = {"key": key, "name": type(model).__name__, "took": time.monotonic() - start}
    profile = replace(profile, origin={**profile.origin, **about})
    try:
        profile.save(path)
        _forget_oldest(place)
    except OSError as error:
        why = f"the profile was not kept, so the next run measures again: {error}"
    return profile, why


def kept() -> list[Kept]:
    """Every profile in the cache, newest first."""
    found = []
    for path in reversed(_oldest_first(folder())):
        try:
            found.append(Kept(path, path.stat().st_size, Profile.load(path)))
        except (OSError, ValueError) as error:
            found.append(Kept(path, 0, None, str(error)))
    return found


def clear() -> int:
    """Remove every profile from the cache; returns how many there were."""
    paths = _oldest_first(folder())
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def folder() -> Path | None:
    """Where profiles are kept; None where the user has no home."""
    cache = cache_folder()
    return cache / "profiles" if cache is not None else None


def _oldest_first(place: Path | None) -> list[Path]:
    if place is None or not place.is_dir():
        return []
    dated = []
    with os.scandir(place) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # another process has just removed it
                    dated.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(dated)]


def _forget_oldest(place: Path) -> None:
    for path in _oldest_first(place)[:-_MOST]:
        with suppress(OSError):  # another process removes it too
            path.unlink()


def _checked(profile: Profile, key: str, graph: Graph) -> Profile:
    """The same profile; a ValueError where it is another one than its name says, or none that a plan could use."""
    if profile.origin.get("key") != key:
        raise ValueError("it was measured under other conditions than its name says")
    if profile.shapes != dict(graph.shapes) or not set(profile.params) <= set(graph.params):
        raise ValueError("it is of another model")
    seconds = *profile.seconds, *profile.other_seconds, profile.full.seconds, profile.origin.get("took")
    if not all(isinstance(one, (int, float)) and math.isfinite(one) and one >= 0 for one in seconds):
        raise ValueError("it holds seconds that are not numbers of 0 or more")
    return profile


# ---------------------------------------------------------------- what a measurement depends on, beside its origin


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        strides = tuple(tensor.stride())
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors have none
        strides = ()
    return tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.layout, strides


def _of_tensors(model: nn.Module, batch: Any) -> list[Any]:
    return [[_layout(param) for param in model.parameters()], [_layout(tensor) for tensor in batches.tensors(batch)]]


def _of_graph(graph: Graph) -> str:
    """What the backward pass computes and saves, and in which modules.

    Names of storages are left out, since they differ between two readings, and so is how long the program holds each: that is
    for Python's garbage collector to decide.
    """
    text = repr([([_of_node(node) for node in one.nodes], one.forward_macs) for one in graph.readings])
    return hashlib.sha256(f"{text}{sorted(graph.modules.items())}".encode()).hexdigest()


def _of_node(node: Node) -> Node:
    lean = None if node.lean is None else _without_names(node.lean)
    return replace(node, saves=_without_names(node.saves), lean=lean)


def _without_names(saves: Saves) -> Saves:
    return tuple((0, size, wanted) for _, size, wanted in saves)


def _of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Its class, that of an optimizer inside it, and what each group holds and does."""
    index = {id(param): i for i, param in enumerate(model.parameters())}
    inside = [_name(type(one)) for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    groups: list[Any] = []
    for group in optimizer.param_groups:
        settings = {key: _kind(group[key]) for key in sorted(group) if key not in ("params", "lr", "initial_lr")}
        groups.append([[index.get(id(param), -1) for param in group["params"]], settings])
    return [_name(type(optimizer)), inside, groups]


def _kind(value: Any) -> Any:
    """Of a float only whether it is 0 matters: then a term is left out. Whole numbers may be sizes."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value != 0.0
    return [_kind(one) for one in value] if isinstance(value, (tuple, list)) else type(value).__name__


def _of_settings() -> Mapping[str, Any]:
    """The versions and the switches of PyTorch that change how long an operation takes."""
    backends = torch.backends
    return {
        "pliant": [__version__, _WAY],
        "python": platform.python_version(),
        "torch": [torch.__version__, torch.version.cuda, backends.cudnn.version() if torch.cuda.is_available() else None],
        "triton": find_spec("triton") is not None,
        "runtime": [find_spec(name) is not None for name in ("openvino", "onnxruntime", "onnx")],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic],
        "onednn": backends.mkldnn.enabled,
        "matmul": torch.get_float32_matmul_precision(),
        "interop": torch.get_num_interop_threads(),
    }


def _name(what: Any) -> str:
    kind = what if hasattr(what, "__qualname__") else type(what)
    return f"{kind.__module__}.{kind.__qualname__}"
