"""What `pliant export --to executorch` does: a program that goes on training a run on a device, with samples for it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pliant.apps import models, run_folder, tasks
from pliant.apps.data import Split
from pliant.apps.tasks import TaskError
from pliant.apps.train import Options, load_task
from pliant.apps.trained import Trained
from pliant.export.device.export import RATE, executorch
from pliant.export.device.facts import Facts
from pliant.runtime.files import write_aside

TRAIN, TEST = "train.npz", "test.npz"
_SCORED = 16  # batches on which units are scored


def export_run(
    run: str | os.PathLike[str],
    trained: Trained,
    out: str | os.PathLike[str],
    *,
    recipe: str = "tinytrain",
    memory: str | None = None,
    macs: str | None = None,
    batch: int = 1,
    lr: float = RATE,
    int8: bool = False,
    samples: int = 200,
) -> dict[str, Facts]:
    """Programs for a run's model, one for each of the memory limits (separated by commas), and samples of the run's data.

    One limit writes into `out` itself; several make a bundle, whose programs have the names of their limits.
    """
    if not Path(run).is_dir():
        raise TaskError("a weight file alone does not say what data to choose layers with. Give the folder of the run.")
    options = Options.of({**run_folder.options_of(run)}, f"the run in {os.fspath(run)!r}")
    task = load_task(options)
    model = trained.model.cpu().eval()
    if batch > len(task.train):
        raise TaskError(f"batch={batch} is larger than the training split, which has {len(task.train)} samples.")
    train, test = (_first(split, samples, options.seed) for split in (task.train, task.validation))
    pieces = [(train.inputs[i : i + batch], train.labels[i : i + batch]) for i in range(0, _SCORED * batch, batch)]
    pieces = [piece for piece in pieces if len(piece[1]) == batch]
    limits = [part.strip() for part in memory.split(",")] if memory else [None]
    policies = {limit or "": tasks.policy(recipe, None, limit, macs, options.seed) for limit in limits}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    how = {"loss": _loss, "optimizer": optimizer, "int8": int8, "probe": pieces}
    if len(policies) == 1:
        found = executorch(model, pieces[0], next(iter(policies.values())), out, **how)  # type: ignore[arg-type]
        done = {"": found} if isinstance(found, Facts) else found
    else:
        bundle = executorch(model, pieces[0], policies, out, **how)  # type: ignore[arg-type]
        done = bundle if isinstance(bundle, dict) else {"": bundle}
    for name, split in ((TRAIN, train), (TEST, test)):
        _write(Path(out) / name, split)
    return done


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(models.logits(model, batch[0]), batch[1])


def _first(split: Split, most: int, seed: int) -> Split:
    """Some samples, drawn at random."""
    order = np.random.default_rng(seed).permutation(len(split))[:most]
    return Split(split.inputs[order].cpu().contiguous(), split.labels[order].cpu())


def _write(path: Path, split: Split) -> None:
    file = io.BytesIO()
    np.savez(file, inputs=split.inputs.numpy(), labels=split.labels.numpy())
    write_aside(path, file.getvalue())
