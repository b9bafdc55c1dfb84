"""Pliant inside Lightning. Needs `pip install 'pliant[lightning]'`.

trainer = Trainer(callbacks=[PliantCallback(recipes.pliant(time=0.5))])
trainer.fit(model, loader)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError as error:
        raise ImportError(
            f"pliant.integrations.lightning needs Lightning ({error}): pip install 'pliant[lightning]'"
        ) from error

from pliant.integrations.checks import check_holds, check_policy
from pliant.planning.policy import Policy
from pliant.runtime.ranks import unwrapped
from pliant.session.session import Session

_TRAINERS = {"accumulate": "accumulate_grad_batches", "clip": "gradient_clip_val", "scaler": "precision"}


class PliantCallback(Callback):  # type: ignore[misc]
    """Trains only what the policy chooses, in Lightning's automatic optimization.

    `options` are those of `Session`, such as `log`, `engine` or `profile`. While `fit` runs, and after it, the attribute
    `session` is the session itself. Its state is part of Lightning's checkpoints, so a resumed run goes on with the same
    selection.
    """

    def __init__(self, policy: Policy, **options: Any) -> None:
        check_policy(policy)
        given = next((name for name in options if name in _TRAINERS), None)
        if given is not None:
            raise ValueError(f"{given}=… is Lightning's to say: use Trainer({_TRAINERS[given]}=…).")
        self.policy, self._options = policy, options
        self.session: Session | None = None
        self._saved: Mapping[str, Any] | None = None  # of a checkpoint, until the session is there

    # ------------------------------------------------------------ the run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot work, before the first step."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "this LightningModule optimizes by hand, where a callback cannot tell steps apart. Open a Session in it: "
                "call session.before_step(batch) in training_step, before your own forward pass."
            )
        if len(trainer.strategy.optimizers) != 1:
            raise ValueError(f"{len(trainer.strategy.optimizers)} optimizers, but a session works with one. Return one.")
        check_holds(unwrapped(trainer.strategy.model)[0], trainer.strategy.optimizers[0])
        self.session = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Choose when due, at the first batch of an optimizer step."""
        window = trainer.accumulate_grad_batches
        if batch_idx % window:
            return
        if self.session is None:
            self.session = self._open(trainer, pl_module)
        left = trainer.num_training_batches - batch_idx
        self.session.before_step((batch, batch_idx), method="training_step", batches=int(min(window, left)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self.session is not None:  # Lightning's backward runs inside the optimizer's step
            self.session.check_gradients()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()

    def _open(self, trainer: Trainer, pl_module: LightningModule) -> Session:
        takes = len(inspect.signature(pl_module.training_step).parameters)
        scaler = getattr(trainer.precision_plugin, "scaler", None)

        def loss(_: Any, given: tuple[Any, int]) -> torch.Tensor:
            """What Lightning minimises, to measure and to score with."""
            with trainer.precision_plugin.train_step_context(), _unlogged(pl_module):
                out = pl_module.training_step(*given[:takes])
            value = out["loss"] if isinstance(out, Mapping) else out
            if not isinstance(value, torch.Tensor):
                raise ValueError("training_step returned no loss for the batch that is to be measured: start with another one.")
            return value

        known = {
            "accumulate": trainer.accumulate_grad_batches,
            "clip": max(trainer.gradient_clip_val or 0.0, 0.0) or None,  # none where it is not more than 0
            "scaler": scaler if isinstance(scaler, torch.amp.GradScaler) else None,
            "steps_per_epoch": _whole(trainer.num_training_batches / trainer.accumulate_grad_batches),
            "total_steps": _whole(trainer.estimated_stepping_batches),
            "undo": False,
        }
        optimizer = trainer.strategy.optimizers[0]
        session = Session(trainer.strategy.model, optimizer, loss, self.policy, **{**known, **self._options})
        if self._saved is not None:
            session.load_state_dict(self._saved)
            self._saved = None
        return session

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        if self.session is None:
            return dict(self._saved or {})
        return self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None


def _whole(steps: float) -> int | None:
    return math.ceil(steps) if math.isfinite(steps) and steps > 0 else None


@contextmanager
def _unlogged(pl_module: LightningModule) -> Iterator[None]:
    """What the module logs inside is not of a training step, and goes nowhere."""
    for name in ("log", "log_dict"):
        object.__setattr__(pl_module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(pl_module, name)
