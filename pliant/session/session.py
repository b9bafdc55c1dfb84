"""`Session`: the one object that a user holds. Measures once, chooses when due, applies, steps, logs, resumes, restores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn

from pliant.core.budget import Budget, Progress
from pliant.cost.measure import timed
from pliant.cost.profile import Profile
from pliant.engine.engine import Engine
from pliant.engine.prefix.feature_cache import Features
from pliant.planning.policy import Policy
from pliant.runtime.batches import Loss, Pieces
from pliant.runtime.batchnorm import BatchNormModes, NormRule
from pliant.runtime.clock import Watch
from pliant.runtime.optimizer_step import OnNan, Update
from pliant.runtime.ranks import Ranks, unwrapped
from pliant.runtime.sample_ids import ids_of
from pliant.runtime.torch_internals import without_dynamo
from pliant.session import arguments, changes, checkpoint, own_loop, resume
from pliant.session.controller import Controller
from pliant.session.delta import Undo
from pliant.session.fit import fit
from pliant.session.loop import Loop
from pliant.session.norms import Norms
from pliant.session.readings import Readings
from pliant.session.run_log import RunLog

_OPEN: WeakKeyDictionary[nn.Module, ref[Session]] = WeakKeyDictionary()  # a model has one session at a time


class Session(Readings):
    """Trains chosen layers of your model inside a budget. The model is not wrapped.

    >>> import torch, torch.nn.functional as F
    >>> from pliant import Session, recipes
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loss(model, batch):
    ...     x, y = batch
    ...     return F.cross_entropy(model(x), y)
    >>> batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> with Session(model, optimizer, loss, recipes.head()) as session:
    ...     value = session.step(batch)
    ...     [unit.name for unit in session.selection.units]
    ['2.weight', '2.bias']

    `step` does forward, backward and the optimizer's step. In your own loop, call `before_step(batch)` once per optimizer step
    instead. Leaving the `with` block (or `close()`) restores `requires_grad` flags and modes. So does opening another session
    on the same model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        policy: Policy,
        *,
        engine: str = "auto",
        norm: NormRule = "auto",
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        on_nan: OnNan | None = None,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        cache: Features | str | int | None = None,
        probe: Pieces | None = None,
        prefix: str | None = None,
        prefix_dtype: torch.dtype | None = None,
        log: str | os.PathLike[str] | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        allow_mismatch: bool = False,
        undo: bool = True,
        correct: bool = True,
        clock: Watch | None = None,
    ) -> None:
        """`model` may be wrapped in DistributedDataParallel, or sharded by `fully_shard`. `policy` is what a recipe returns.

        - `engine`: how steps run, such as "plain" or "lean". "auto" follows one fixed rule.
        - `norm`: which batch norms use batch statistics: those of chosen layers ("chosen"), none ("frozen"), or as the
          modules' modes say ("as-is"). "auto" is the rule of the recipe. If it has none, it is "chosen", but without norms that
          see few values per channel in a batch, if batches are like the pretraining data. It also replaces running statistics
          that do not fit the first batches, and after the last of `total_steps` those that lag behind the weights.
        - `clip`, `scaler`, `accumulate`: gradient clipping by norm, a GradScaler, and batches per optimizer step.
        - `on_nan`: a step with gradients that are not finite is skipped ("skip"), an error ("raise") or taken ("ignore"). By
          default it is skipped on the CPU. Elsewhere it is taken, since to check would make every step wait for the device.
        - `steps_per_epoch`, `total_steps`: optimizer steps of an epoch and of the run. `fit` knows them.
        - `cache`: bytes for the outputs of frozen layers, kept by sample id, such as "2GB"; or a `Features`.
        - `probe`: batches on which units are scored, instead of the current one.
        - `prefix_dtype`: that of the frozen layers before the first trained one.
        - `prefix`: with "int8", those layers run in int8 on ONNX Runtime, calibrated on the first batches.
        - `log`: the file of the run log.
        - `profile`: a saved profile to use instead of measuring. Without it, one that an earlier run kept is used (unless
          `PLIANT_PROFILES=off`). `allow_mismatch` accepts one from other conditions.
        - `undo`: keep what `delta` and `rollback` need: a copy of every parameter that was chosen.
        - `correct`: change the selection if measured steps miss the time or memory that was asked. Without it, selections
          depend on the profile and the seed alone.
        - `clock`: replaces the device's clock in a simulation.
        """
        arguments.check(model, optimizer, loss, policy)
        lengths = arguments.steps("steps_per_epoch", steps_per_epoch), arguments.steps("total_steps", total_steps)
        features, in_int8 = arguments.features(cache), arguments.in_int8(model, prefix, prefix_dtype, engine)
        pieces = arguments.pieces(probe)
        arguments.check_dtype(prefix_dtype)
        model, ddp = unwrapped(model)
        changes.check_cost_is_known(optimizer, policy.budget)
        ranks = Ranks.of(model, ddp)
        changes.check_processes(ranks, policy.budget, policy.cost is timed and profile is None)
        arguments.check_alone(model, [one for one, held in _OPEN.items() if (its := held()) is not None and not its._closed])
        known = ranks.first(lambda: Profile.load(profile) if isinstance(profile, (str, os.PathLike)) else profile)
        self.model, self.loss, self.update = model, loss, Update(clip, scaler, accumulate, on_nan)
        arguments.check_engine(engine)
        if model in _OPEN and (earlier := _OPEN[model]()) is not None:  # only now: what is refused leaves it open
            earlier.close()
        arguments.check_hooks(model)
        self._engine = Engine(model, loss, optimizer, self.update, engine, features, prefix_dtype, ranks, in_int8)
        self._engine.settle(policy.budget)
        self._controller = Controller(policy, known, check=not allow_mismatch, correct=correct)
        copies = Undo(model, optimizer) if undo and not ranks.shards else None
        modes = BatchNormModes(model, policy.norm if norm == "auto" else norm)
        norms, log_file = Norms(modes, ranks), RunLog(log if ranks.is_first else None)
        parts = self._engine, self._controller, norms, self.update, log_file, copies, pieces, clock, ranks
        self._loop = Loop(model, loss, *parts)
        self._loop.steps_per_epoch, self._loop.total_steps = lengths
        self._closed: bool = False
        self._close = finalize(self, self._loop.close)  # also where nobody closes it
        self._close.atexit = False
        _OPEN[model] = ref(self)

    # ------------------------------------------------------------ what may be set

    @property
    def steps_per_epoch(self) -> int | None:
        """The optimizer steps of an epoch, if known."""
        return self._loop.steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        self._loop.steps_per_epoch = arguments.steps("steps_per_epoch", steps)

    @property
    def total_steps(self) -> int | None:
        """The optimizer steps of the run, if known."""
        return self._loop.total_steps

    @total_steps.setter
    def total_steps(self, steps: int | None) -> None:
        self._loop.total_steps = arguments.steps("total_steps", steps)

    @property
    def log(self) -> str | os.PathLike[str] | None:
        """The file of the run log. Another one may be set: later lines go there."""
        return self._loop.log.path

    @log.setter
    def log(self, path: str | os.PathLike[str] | None) -> None:
        self._loop.log.move(path)

    @property
    def budget(self) -> Budget:
        """What a step may cost. May be set at any moment. If it cannot be kept, `BudgetError` is raised and the old one stays.

        Before the first step nothing is measured yet, so the first step raises the error.
        """
        return self.policy.budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._check_open()
        if not isinstance(budget, Budget):
            raise TypeError(f"budget={budget!r} is not a Budget: write Budget(time=0.5).")
        changes.change_budget(self._loop, budget)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer. Another one may be set if it holds what is chosen; units are then scored again."""
        return self._engine.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_open()
        changes.use_optimizer(self._loop, optimizer)

    # ------------------------------------------------------------ steps

    @without_dynamo
    def step(self, batch: Any, ids: Any = None) -> torch.Tensor:
        """Forward, backward and (every `accumulate` calls) the optimizer's step. Returns the loss, detached.

        `ids` name the samples of the batch for the feature cache, if there is one; without them, the batch may carry its own
        (`pliant.with_ids`).
        """
        self._check_open()
        if self._engine.features is not None:
            ids = ids_of(batch) if ids is None else ids
        return self._loop.step(batch, ids)

    @without_dynamo
    def before_step(self, batch: Any, *, method: str = "forward", batches: int | None = None) -> None:
        """Measure (once), choose (when due) and apply; your own forward, backward and optimizer step follow.

        Call it once per optimizer step, before its first batch. `method` is the method of the model that you call. `batches`
        is the number of batches of this step, if it is not `accumulate`; its time is then not compared with other steps.
        """
        self._check_open()
        own_loop.before_step(self._loop, batch, method, batches)

    def check_gradients(self) -> None:
        """Raise if DDP processes hold different gradients. Steps call it themselves; closures of optimizers must call it."""
        self._loop.check_gradients()

    @without_dynamo
    def backward(
        self,
        batch: Any,
        loss: Callable[[Any], torch.Tensor] | None = None,
        backward: Callable[..., None] | None = None,
        *,
        first: bool = True,
    ) -> torch.Tensor:
        """Forward and backward of one batch, for a loop whose optimizer step is not the session's. Returns the loss, detached.

        The `first` batch of an optimizer step measures and chooses when due. Pass `first=False` for the others, whose
        gradients are added. `loss(batch)` replaces the session's loss, and `backward(loss)` replaces `loss.backward()`
        (`accelerator.backward`, for example). Clip, step and clear gradients afterwards.
        """
        self._check_open()
        return own_loop.backward(self._loop, batch, loss, backward, first)

    def estimate_norms(self, batches: Iterable[Any]) -> None:
        """Replace the running statistics of batch norms by the mean over these batches. Only forward passes are run.

        With `norm="auto"` a session does this by itself if its first batches do not fit the statistics, or if they lag behind
        the weights after the last of `total_steps`. `rollback` brings the old ones back.
        """
        self._check_open()
        self._loop.note(self._loop.norms.estimate(partial(self.loss, self.model, batch) for batch in batches))
        self._loop.beginning.keep_buffers()

    def fit(self, loader: Any, epochs: int, on_step: Callable[[Progress, torch.Tensor], None] | None = None) -> list[float]:
        """Train up to epoch `epochs`, counted from the session's first step. A resumed session goes on where it stopped.

        Returns the mean loss of each epoch that it ran. A loader without a length, such as that of an `IterableDataset`, is
        read to its end in every epoch, or up to `steps_per_epoch` if that is known.
        """
        return fit(self._loop, self.step, loader, epochs, on_step)

    def compute(self, function: Loss, batch: Any, ids: Any = None) -> torch.Tensor:
        """function(model, batch), detached, with the feature cache if there is one: to look at outputs between steps."""
        self._check_open()
        if not self.caches:
            with torch.no_grad():
                return function(self.model, batch)
        return self._engine.compute(function, batch, ids_of(batch) if ids is None else ids)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed, and the model is no longer changed by it. Open a new Session.")

    # ------------------------------------------------------------ save, resume, undo, leave

    def state_dict(self) -> dict[str, Any]:
        """The state of the session, in plain types. Model, optimizer and random states are not in it: see `save`."""
        return resume.state_of(self._loop)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: same values, same selection, same measurements, and the budget that was saved."""
        self._check_open()
        resume.check(self._loop, state)
        resume.load_into(self._loop, state)

    def save(self, path: str | os.PathLike[str], beside: Any = None) -> None:
        """Save model, optimizer, scaler, session and random states in one file, which is written completely or not at all.

        `beside` is anything of your own to save with them, made of tensors and plain types. `load` returns it.
        """
        state = self.state_dict()
        self._loop.log.flush()  # a checkpoint is never ahead of the log
        checkpoint.save(path, self.model, self.optimizer, self.update.scaler, state, beside)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a file that `save` wrote, as if the run had never stopped. Returns what was saved `beside`.

        A file that is damaged, or of another model, optimizer or recipe, is refused before anything changes.
        """
        self._check_open()
        saved = checkpoint.read(path, self.model, self.optimizer, self.update.scaler)
        resume.check(self._loop, saved["session"])
        checkpoint.fill_(saved, self.model, self.optimizer, self.update.scaler)
        resume.load_into(self._loop, saved["session"])
        return saved.get("beside")

    def delta(self, path: str | os.PathLike[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors that differ from the start, by state-dict name; with `path` also as a safetensors file.

        `model.load_state_dict(load_file(path), strict=False)` applies it to a copy of the model as it was at the start.
        """
        changed = self._undoable().changed()
        if path is not None:
            checkpoint.save_delta(path, changed, self._loop.steps)
        return changed

    def rollback(self) -> None:
        """Weights, buffers and optimizer state as they were at the start. The session goes on from there."""
        self._undoable().rollback_()
        self.optimizer.zero_grad(set_to_none=True)
        changes.forget(self._loop)

    def _undoable(self) -> Undo:
        if self._loop.undo is None:
            raise RuntimeError(
                "this session keeps no copies for delta and rollback. Open it with undo=True (not with FSDP2). A run that was "
                "begun without them has none after a resume either."
            )
        return self._loop.undo

    def close(self) -> None:
        """Restore trainable flags and modes as they were found. Weights stay as trained."""
        if not self._closed:
            self._closed = True
            self._close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a session cannot be copied or pickled: it belongs to one model and one optimizer. Use session.save(path), and "
            "load(path) in a session on a new model."
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
