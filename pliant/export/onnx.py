"""A model as an ONNX file, by PyTorch's own exporter, checked on ONNX Runtime."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pliant.core.errors import first_line
from pliant.export.checked import Exported, ExportError, Forward, Logits, aside, difference


def export(
    model: nn.Module, example: Tensor, path: str | os.PathLike[str], about: Mapping[str, str], forward: Forward
) -> Exported:
    """Write the model for batches of any size, with the input `input` and the output `logits`.

    It is run by ONNX Runtime and compared with PyTorch before it gets its name. `about` becomes its metadata.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"ONNX needs {package}, which is not installed. Run: pip install 'pliant[onnx]'", name=package
            ) from error
    whole, part = Logits(model, forward).eval(), aside(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        program = _program(whole, example)
        for name, value in about.items():
            program.model.metadata_props[name] = value
        program.save(part, external_data=False)
        worst = difference(lambda some: _run(part, some), whole, example, "the ONNX file")
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    return Exported(Path(path), worst)


def _program(whole: nn.Module, example: Tensor) -> Any:
    before = logging.root.manager.disable
    try:
        logging.disable(logging.WARNING)  # the exporter tells of its own insides
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                whole,
                (example,),
                dynamo=True,
                dynamic_shapes={"inputs": {0: torch.export.Dim("batch")}},
                input_names=["input"],
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:  # any kind, depending on what the model's code does
        raise ExportError(f"PyTorch cannot export this model to ONNX: {first_line(error)}") from error
    finally:
        logging.disable(before)


def _run(path: Path, batch: Tensor) -> Tensor:
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"input": batch.numpy()})[0])
