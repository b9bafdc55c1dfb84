"""Logs of other programs beside a run's own: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pliant.apps.optional import needed
from pliant.apps.run_folder import Folder
from pliant.apps.train.options import OnStatus, Options, Status


@contextmanager
def other_logs(options: Options, folder: Folder) -> Iterator[list[OnStatus]]:
    """A listener for each log that `log_to` asks for."""
    opened: list[Any] = []
    try:
        for name in dict.fromkeys(options.log_to.split(",")) if options.log_to is not None else ():
            opened.append(_tensorboard(folder) if name == "tensorboard" else _wandb(options, folder))
        yield [write for write, _ in opened]
    finally:
        for _, close in opened:
            close()


def _scalars(status: Status) -> dict[str, float]:
    out: dict[str, float] = {}
    if status.loss is not None:
        out["loss/train"] = status.loss
    if status.evaluated:
        out["accuracy/validation"] = status.accuracy
    if status.share is not None:
        out["step/share_of_full"] = status.share
    if status.trained:
        out["step/units_trained"] = sum(status.trained)
    return out


def _tensorboard(folder: Folder) -> tuple[OnStatus, Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard is not installed. Run: pip install 'pliant[tensorboard]'", name="tensorboard") from error
    writer: Any = SummaryWriter(os.fspath(folder.path))

    def write(status: Status) -> None:
        for name, value in _scalars(status).items():
            writer.add_scalar(name, value, status.step)

    return write, writer.close


def _wandb(options: Options, folder: Folder) -> tuple[OnStatus, Any]:
    """WANDB_MODE, WANDB_PROJECT and the other variables of wandb say where its log goes."""
    wandb = needed("wandb", "wandb", "--log-to wandb")
    project = os.environ.get("WANDB_PROJECT", "pliant")
    run = wandb.init(project=project, name=folder.path.name, dir=os.fspath(folder.path), config=options.to_json())

    def write(status: Status) -> None:
        run.log(_scalars(status), step=status.step)

    return write, run.finish
