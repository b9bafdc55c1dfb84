"""A model as a program of `torch.export`: `torch.export.load(FILE).module()` runs it without Pliant and without its code."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pliant.core.errors import first_line
from pliant.export.checked import Exported, ExportError, Forward, Logits, difference
from pliant.runtime.files import write_aside


def export(
    model: nn.Module, example: Tensor, path: str | os.PathLike[str], about: Mapping[str, str], forward: Forward
) -> Exported:
    """Write the model for batches of any size, checked against PyTorch. `about` goes into its extra file `pliant.json`."""
    whole = Logits(model, forward).eval()
    batch = torch.export.Dim("batch")
    try:
        with torch.no_grad():
            program = torch.export.export(whole, (example,), dynamic_shapes={"inputs": {0: batch}})
    except Exception as error:  # any kind, depending on what the model's code does
        raise ExportError(f"torch.export cannot read this model: {first_line(error)}") from error
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={"pliant.json": json.dumps(dict(about))})
    content.seek(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # PyTorch 2.11, of what it has just read
        again = torch.export.load(content).module()
    worst = difference(lambda some: again(some), whole, example, "the exported program")
    write_aside(path, content.getvalue())
    return Exported(Path(path), worst)
