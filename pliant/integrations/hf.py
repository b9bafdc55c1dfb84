"""Pliant inside Hugging Face Trainer and Accelerate loops. Needs `pip install 'pliant[hf]'`.

trainer = PliantTrainer(model, args, train_dataset=data, policy=recipes.pliant(time=0.5))
trainer.train()
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        f"pliant.integrations.hf needs transformers and accelerate ({error}): pip install 'pliant[hf]'"
    ) from error

from pliant.integrations.checks import check_holds, check_not_wrapped, check_policy
from pliant.planning.policy import Policy
from pliant.runtime.batches import Loss
from pliant.runtime.ranks import unwrapped
from pliant.runtime.sealed import load_archive, save_archive
from pliant.session.session import Session

FILE = "pliant.pt"  # beside Trainer's own files in a checkpoint
_TRAINERS = {"accumulate": "gradient_accumulation_steps", "clip": "max_grad_norm", "scaler": "fp16", "total_steps": "max_steps"}


class PliantMixin:
    """Makes any Trainer train only what the policy chooses: `class MyTrainer(PliantMixin, SFTTrainer): ...`.

    `session` holds options of `Session`, such as `log`, `engine` or `profile`. While `train` runs, and after it, the attribute
    `session` is the session itself. Everything else is Trainer's: loss, accumulation, clipping, precision, schedule, evaluation
    and checkpoints. A checkpoint has one file more, from which a resumed run goes on with the same selection.
    """

    def __init__(self, *args: Any, policy: Policy, session: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        check_policy(policy)
        given = next((name for name in session or () if name in _TRAINERS), None)
        if given is not None:
            raise ValueError(f"session={{{given!r}: …}} is Trainer's to say: use TrainingArguments({_TRAINERS[given]}=…).")
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module):
            check_not_wrapped(model)
        super().__init__(*args, **kwargs)
        if getattr(self, "is_deepspeed_enabled", False):
            raise ValueError(
                "DeepSpeed takes over gradients and the optimizer's step, so no selection can be applied. Use DDP or FSDP2."
            )
        self.policy, self._options = policy, dict(session or {})
        self.session: Session | None = None
        self._begins, self._items = True, None
        self._checkpoint: str | None = None

    # ------------------------------------------------------------ steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Choose when due, at the first batch of an optimizer step; the rest is Trainer's own."""
        if self._begins:
            inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
            self._items = num_items_in_batch
            model.train()
            if self.session is None:
                self.session = self._open(model)
            batches = getattr(self, "current_gradient_accumulation_steps", None)
            self.session.before_step(inputs, batches=batches)
        self._begins = bool(self.accelerator.sync_gradients)  # type: ignore[attr-defined]
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    def _open(self, model: nn.Module) -> Session:
        args, accelerator = self.args, self.accelerator  # type: ignore[attr-defined]
        session = open_session(
            accelerator,
            model,
            self.optimizer,  # type: ignore[attr-defined]
            self._loss,
            self.policy,
            accumulate=args.gradient_accumulation_steps,
            clip=max(args.max_grad_norm or 0.0, 0.0) or None,  # none where it is not more than 0
            total_steps=self.state.max_steps,  # type: ignore[attr-defined]
            **{"steps_per_epoch": self._steps_per_epoch(), **self._options},
        )
        if self._checkpoint is not None:
            _load(session, Path(self._checkpoint))
        return session

    def _loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """What Trainer minimises, to measure and to score with."""
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            loss: torch.Tensor = self.compute_loss(model, dict(inputs), num_items_in_batch=self._items)  # type: ignore[attr-defined]
        return loss

    def _steps_per_epoch(self) -> int | None:
        try:
            batches = len(self.callback_handler.train_dataloader)  # type: ignore[attr-defined]
        except TypeError:  # a stream
            return None
        return max(-(-batches // self.args.gradient_accumulation_steps), 1)  # type: ignore[attr-defined]

    # ------------------------------------------------------------ the run

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own. Afterwards every parameter is as trainable as it was before."""
        self._begins, self._checkpoint, self.session = True, None, None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self.session is not None:
                self.session.close()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self.session is not None:  # training begins anew, with smaller batches (auto_find_batch_size)
            self.session.close()
        self._begins, self._checkpoint, self.session = True, checkpoint, None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.session is not None:
            state = self.session.state_dict()  # in all processes: a step that ends with it may need them
            if self.args.should_save:  # type: ignore[attr-defined]
                save_archive(Path(output_dir) / FILE, {"session": state})

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's own, with what is chosen and what a step takes."""
        if self.session is not None and "loss" in logs:
            logs = {**logs, **_figures(self.session)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class PliantTrainer(PliantMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that trains only what the policy chooses. See `PliantMixin`."""


class PliantAccelerate:
    """Forward and backward of a plain Accelerate loop. Make it after `accelerator.prepare`.

        pliant = PliantAccelerate(accelerator, model, optimizer, loss, recipes.pliant(time=0.5))
        for batch in loader:
            with accelerator.accumulate(model):
                value = pliant.backward(batch)
                optimizer.step()
                optimizer.zero_grad()
        pliant.close()

    `loss(model, batch)` returns a scalar. `session` is the session behind it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        loss: Loss,
        policy: Policy,
        **options: Any,
    ) -> None:
        """`options` are those of `Session`."""
        steps = accelerator.gradient_accumulation_steps
        if options.setdefault("accumulate", steps) != steps:
            raise ValueError(
                f"accumulate={options['accumulate']}, but the Accelerator has gradient_accumulation_steps={steps}: leave "
                f"accumulate out."
            )
        self._accelerator, self._begins = accelerator, True
        self._model, self._loss = model, loss
        self.session = open_session(accelerator, model, optimizer, loss, policy, **options)

    def backward(self, batch: Any) -> torch.Tensor:
        """Forward and backward of one batch, inside of `accelerator.accumulate(model)`. Returns the loss, detached."""
        accelerator, first = self._accelerator, self._begins
        is_last = accelerator.sync_gradients
        if (
            first
            and is_last
            and accelerator.gradient_accumulation_steps > 1
            and not accelerator.gradient_state.end_of_dataloader
        ):
            raise RuntimeError(
                f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, but every batch is an optimizer step: "
                f"call backward inside of `with accelerator.accumulate(model):`."
            )
        value = self.session.backward(batch, lambda batch: self._loss(self._model, batch), accelerator.backward, first=first)
        self._begins = is_last
        return value

    def close(self) -> None:
        """Restore trainable flags and modes as they were found."""
        self.session.close()

    def __enter__(self) -> PliantAccelerate:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_session(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loss: Loss, policy: Policy, **options: Any
) -> Session:
    """A session on what `accelerator.prepare` returned."""
    if str(accelerator.distributed_type).endswith(("DEEPSPEED", "MEGATRON_LM")):
        raise ValueError(f"{accelerator.distributed_type} takes over the optimizer's step: use DDP or FSDP2.")
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__}, not one that accelerator.prepare returned: prepare the model and "
            f"its optimizer together, then open the session."
        )
    model = _ready(model)
    inner = optimizer.optimizer
    check_holds(unwrapped(model)[0], inner)
    scaler = getattr(accelerator, "scaler", None)
    scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
    return Session(model, inner, loss, policy, scaler=scaler, **{"undo": False, **options})


def _ready(model: nn.Module) -> nn.Module:
    """The model itself, or the DDP around it; what `torch.compile` has wrapped runs compiled in Trainer's own steps."""
    while not isinstance(model, DistributedDataParallel) and isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model._orig_mod  # type: ignore[assignment]
    return model


def _load(session: Session, folder: Path) -> None:
    """Go on from a checkpoint of Trainer."""
    file = folder / FILE
    if not file.is_file():
        warnings.warn(f"{folder} has no {FILE}: it was written without Pliant, which measures and chooses anew.", stacklevel=2)
        return
    try:
        saved = load_archive(file)
        session.load_state_dict(saved["session"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(file)!r} does not fit this run: {error}") from error


def _figures(session: Session) -> dict[str, float]:
    """What is logged beside Trainer's own figures."""
    try:
        selection = session.selection
    except RuntimeError:  # nothing is chosen yet
        return {}
    figures: dict[str, float] = {"pliant/round": selection.round, "pliant/chosen": len(selection.units)}
    measured, full = session.measured_seconds, session.profile.full.seconds
    if measured is not None:
        figures["pliant/step_seconds"] = measured
        if full:
            figures["pliant/share"] = measured / full
    return figures
