"""`ForwardPasses`: how the engine runs a forward pass, in the mode and for the selection of the moment."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from pliant.core.mode import Mode
from pliant.engine.around import around_forward
from pliant.engine.compiled_parts import CompiledParts
from pliant.engine.kernels.switch import CustomKernels, Swapped
from pliant.engine.prefix.prefix import CachedRows, Prefix
from pliant.engine.prefix.prefix_model import Models
from pliant.engine.slices.slices import Slices
from pliant.engine.why_not import News
from pliant.graph.backward import compute_loss
from pliant.runtime.batches import Around, Loss, Ready, map_tensors
from pliant.runtime.ranks import Ranks
from pliant.runtime.sandbox import sandbox


class ForwardPasses:
    """The forward passes of steps, of rehearsals, and of steps that are only measured. `Engine` sets what they depend on."""

    mode: Mode
    slices: Slices | None
    origin: Mapping[str, Any]
    _model: nn.Module
    _loss: Loss
    _ranks: Ranks
    _prefix: Prefix
    _kernels: CustomKernels
    _compiled: CompiledParts
    _news: News
    _chosen: Hashable
    _cuda: bool
    _memory_is_limited: bool
    _is_eager: bool

    def settle(self) -> None:
        raise NotImplementedError

    def _loss_of(self, batch: Any, ids: Any, found: CachedRows | None = None) -> torch.Tensor:
        with self.forward() as inside:
            value = self._forward(batch, ids, found)
        self.after(inside)
        return value

    def compute(self, function: Loss, batch: Any, ids: Any) -> torch.Tensor:
        """function(model, batch), with what needs no gradient from the cache: the same features as steps use."""
        choice = self._sliced, function  # another program than that of the loss
        with torch.enable_grad(), self.forward():  # what needs a gradient shows where the cached part ends
            return self._prefix.run(lambda: function(self._model, batch), batch, ids, choice, calibrates=False).detach()

    def loss_alone(self, batch: Any) -> Any:
        """The loss of a forward pass that no step needs, on the kernels that steps use."""
        with self.around():
            return self._loss(self._model, batch)

    def _forward(self, batch: Any, ids: Any, found: CachedRows | None) -> torch.Tensor:
        forward = partial(compute_loss, self._ranks.ddp or self._model, self._loss, batch)
        if not self.mode.prefix:
            return forward()
        self._set_chains()
        rehearse = partial(self._rehearse, batch, ids) if self._ranks.ddp is None else None  # DDP's own calls come in between
        return self._prefix.run(
            forward, batch, ids, self._sliced, found, self._fuses_norms, rehearse, still_pays=self._still_pays
        )

    def _set_chains(self) -> None:
        """Whether layers after the prefix run as chains."""
        self._prefix.runs_chains = self._swaps and not self.mode.lean and "differentiates" not in self.origin

    def _still_pays(self) -> bool:
        """Whether steps run the prefix as inference also where the runtime does not serve."""
        self.settle()
        return self.mode.prefix

    def _rehearse(self, batch: Any, ids: Any, passes: int = 1) -> None:
        """Passes that leave no trace, so that every step of a selection runs the same way. The first records the program, and
        the next makes what it needs: folded weights, or a model of the runtime."""
        spare = map_tensors(batch, torch.clone)
        with sandbox(self._model):
            forward = partial(compute_loss, self._model, self._loss, spare)
            for _ in range(passes if self._prefix.runtime is None else 2):
                self._prefix.run(forward, spare, ids, self._sliced, fuse_norms=self._fuses_norms)

    @property
    def _sliced(self) -> Hashable:
        """The selection as far as trainable flags do not show it."""
        return self._chosen if self.slices is not None else None

    @property
    def _fuses_norms(self) -> bool:
        """Whether frozen norms run in fused kernels: in captured steps, where Python costs nothing, unless lean packs."""
        return self.mode.graphs and not self.mode.lean and not self._is_eager

    @property
    def _swaps(self) -> bool:
        """Whether custom kernels replace slow convolutions. Plain and lean steps give PyTorch's gradients to the last bit."""
        return self.mode.prefix and self.slices is None and self._kernels.serve

    def forward(self) -> AbstractContextManager[Any]:
        """The context of a forward pass; call `after` with what it gave when the pass is done."""
        return around_forward(self.mode, self.slices, self._swaps, self._compiled.goes_stale)

    def after(self, inside: Any) -> None:
        """Remember what the lean engine could not do."""
        self._news.not_lean |= set(getattr(inside, "not_lean", ()))
        if self.mode.lean and self._compiled.has_scripted:
            self._news.not_lean.add("scripted modules")

    # ------------------------------------------------------------ the network as it was

    @property
    def prefix_models(self) -> Models:
        """The runtime's models that run the prefix of steps like those of now. They hold the weights of now."""
        return self._prefix.models() if self.ready is not None else {}

    def make_prefix_model(self, batch: Any) -> Models:
        """The model for such a batch, made here."""
        if self.ready is None:
            return {}
        with self.forward():
            self._set_chains()
            self._rehearse(batch, None)
        return self._prefix.models(batch)

    def loss_on(self, models: Models, batch: Any) -> torch.Tensor:
        """The loss of a batch whose prefix runs on one of these models, or, where there is none, as the network is now."""
        forward = partial(compute_loss, self._model, self._loss, batch)
        if models:
            with self.forward():
                self._set_chains()
                value = self._prefix.run_on(models, forward, batch)
            if value is not None:
                return value
        with self.around():
            return forward()

    # ------------------------------------------------------------ measured steps

    @property
    def around(self) -> Around:
        """The context that forward passes are measured in: custom kernels, where steps use them."""
        return Swapped if self._swaps and not self.mode.lean else nullcontext

    @property
    def ready(self) -> Ready | None:
        """What makes the forward passes of eager steps on a CPU; None where PyTorch runs them, inside of `around()`."""
        eager = self.mode.prefix and not (self._cuda or self.mode.graphs or self._memory_is_limited)
        serves = eager and self._ranks.is_alone and self.slices is None and self._prefix.dtype is None
        return (self._ready_in_int8 if self._prefix.asks_int8 else self._ready) if serves else None

    def _ready(self, batch: Any) -> Callable[[], torch.Tensor]:
        """The forward pass of a step that trains what is trainable now; its program is recorded here, if it is not known."""
        if not self._prefix.knows(batch, None, self._sliced):
            with self.forward():
                self._rehearse(batch, None)
        if self._prefix.is_refused:
            self.settle()
        return partial(self._loss_of, batch, None)

    def _ready_in_int8(self, batch: Any) -> Callable[[], torch.Tensor]:
        """The same by another name, which tells kept profiles of such sessions from others."""
        return self._ready(batch)
