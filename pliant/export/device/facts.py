"""What is known of an exported program, as a small JSON file beside it, and the way of a delta back into PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pliant.export.device.errors import ExportError
from pliant.export.device.step import Trained
from pliant.session.checkpoint import save_tensors

FORMAT = "pliant.device/1"
DELTA = "pliant.device-delta/1"
PROGRAM, FACTS, INDEX = "model.pte", "model.json", "index.json"


@dataclass(frozen=True)
class Facts:
    """What trains, what goes in and comes out, and what a step costs on the device."""

    trains: tuple[Trained, ...]
    inputs: tuple[tuple[tuple[int, ...], str], ...]  # shape and type of each
    outputs: tuple[tuple[int, ...], ...]  # shapes; the first is the loss
    memory: dict[str, Any]  # planned bytes, and what they hold at the fullest moment
    macs: int
    full_macs: int
    program_bytes: int
    operators: tuple[str, ...]
    sgd: dict[str, float]
    difference: float  # the largest of a gradient from PyTorch's, relative
    graphs: int  # joint graphs that were made to find the selection
    pieces: dict[str, int]
    int8: bool

    @property
    def planned(self) -> int:
        return int(self.memory["planned"])

    def lines(self) -> list[str]:
        """Where the bytes go, for people."""
        held = sorted(self.memory["held"].items(), key=lambda item: -item[1])
        out = [f"planned memory: {self.planned:,} bytes (fullest at {self.memory['operator']}); file: {self.program_bytes:,}"]
        out += [f"  {kind}: {size:,}" for kind, size in held if size]
        return [*out, f"MACs of a step: {self.macs:,}, of full training {self.full_macs:,}"]

    def dumps(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Facts:
        """From a file or the folder that holds it. Nothing in it is executed."""
        file = Path(path) / FACTS if Path(path).is_dir() else Path(path)
        try:
            data = json.loads(file.read_text())
            if data.pop("format") != FORMAT:
                raise KeyError("format")
            trains = tuple(
                Trained(
                    one["name"],
                    one["program_name"],
                    tuple(one["shape"]),
                    one["dim"],
                    None if one["index"] is None else tuple(one["index"]),
                )
                for one in data.pop("trains")
            )
            inputs = tuple((tuple(shape), str(kind)) for shape, kind in data.pop("inputs"))
            outputs = tuple(tuple(shape) for shape in data.pop("outputs"))
            return cls(trains, inputs, outputs, operators=tuple(data.pop("operators")), **data)
        except OSError as error:
            raise ExportError(f"{os.fspath(path)!r} holds no exported program: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExportError(f"{os.fspath(file)!r} does not describe an exported program (format {FORMAT}).") from error


def save_delta(path: str | os.PathLike[str], weights: Mapping[str, torch.Tensor], facts: Facts) -> None:
    """Weights that were trained on the device, by name of the parameter. Of a sliced one, the slice."""
    slices = {one.name: [one.dim, list(one.index)] for one in facts.trains if one.index is not None}
    save_tensors(path, weights, {"format": DELTA, "slices": json.dumps(slices)})


def read_delta(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, list[int]]]]:
    """The tensors of a delta, and dim and index of those that are slices."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        if about.get("format") != DELTA:
            raise ValueError("format")
        slices = {name: (int(dim), [int(i) for i in index]) for name, (dim, index) in json.loads(about["slices"]).items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{os.fspath(path)!r} is not a delta of an exported program: {error}.") from error
    return tensors, slices


def apply_delta_(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Write what a device has learned into the model. Returns the names of the parameters that changed."""
    tensors, slices = read_delta(path)
    params = dict(model.named_parameters())
    for name, value in tensors.items():
        have = params.get(name)
        expected = None if have is None else list(have.shape)
        if expected is not None and name in slices:
            dim, index = slices[name]
            fits = dim < len(expected) and all(0 <= i < expected[dim] for i in index)
            expected = [*expected[:dim], len(index), *expected[dim + 1 :]] if fits else None
        if expected != list(value.shape):
            raise ExportError(
                f"the delta has a {name!r} of shape {tuple(value.shape)}, which this model has not. Another model?"
            )
    with torch.no_grad():
        for name, value in tensors.items():
            if name in slices:
                dim, index = slices[name]
                params[name].index_copy_(dim, torch.tensor(index, device=params[name].device), value.to(params[name]))
            else:
                params[name].copy_(value)
    return list(tensors)
