"""Modes of batch norms: each uses the statistics of the batch, or its running statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import nn

from pliant.runtime.norm_statistics import LOOKS, NormStatistics, distance
from pliant.runtime.sandbox import sandbox
from pliant.runtime.torch_internals import BatchNormBase, NormBase

NormRule = Literal["auto", "chosen", "frozen", "as-is"]
ENOUGH = 500  # values of a channel in a batch: with statistics of fewer a norm trains worse than with those it has
STRANGE = 0.4  # |log| of the ratio of a batch's variances and those of before: photographs are below, drawings above it
_FORGOTTEN = 0.01  # of what running statistics began with


def in_eights(values: torch.Tensor) -> bool:
    """Whether images are channels-last in memory, with a multiple of eight channels: inputs of the custom norm kernel."""
    is_last = values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
    return is_last and values.shape[1] % 8 == 0


@dataclass
class BatchNormModes:
    """Keeps norms with running statistics in the mode that the choice asks for, and knows the mode that the user wants.

    A norm whose parameters are not chosen uses its running statistics, whatever `model.train()` says. With "auto" so does one
    that is chosen but sees too few values for good statistics (`settle_`), unless training is plain. The user's wish is the
    mode of the module where that is not the one set here, or the mode that the whole model was switched to.
    """

    model: nn.Module
    rule: NormRule = "chosen"
    _norms: dict[str, nn.Module] = field(default_factory=dict)
    _own: dict[str, list[str]] = field(default_factory=dict)  # the names of each norm's parameters
    _wanted: dict[str, bool] = field(default_factory=dict)
    _set: dict[str, bool] = field(default_factory=dict)
    _whole: bool = True
    _plain: bool = False  # everything trains, and nothing limits it
    _frozen: frozenset[str] | None = None  # those that "auto" keeps on running statistics; None before it is settled

    def __post_init__(self) -> None:
        if self.rule not in ("auto", "chosen", "frozen", "as-is"):
            raise ValueError(f"norm={self.rule!r}: choose 'auto', 'chosen', 'frozen' or 'as-is'.")
        names = {id(param): name for name, param in self.model.named_parameters()}  # a tied parameter has one name
        for name, module in self.model.named_modules():
            if isinstance(module, NormBase) and module.track_running_stats and module.running_mean is not None:
                self._norms[name] = module
                self._own[name] = [names[id(param)] for param in module._parameters.values() if param is not None]
                self._wanted[name] = module.training
        self._whole = self.model.training

    def settle_(self, run: Callable[[], Any], priced: str | None = None) -> str | None:
        """Decide what "auto" means from one forward pass, `run`, that leaves no trace. A norm keeps its running statistics
        where the batch has fewer than `ENOUGH` values per channel, if the batch resembles those statistics, in the median over
        norms. Where a profile has `priced` steps by a rule already, that rule stays. Returns what the log should say.

        A new norm has no statistics yet: it does not count, and uses batch statistics when it is chosen.
        """
        if self.is_settled:
            return None
        learned = self._learned()
        if priced == "frozen":
            self._frozen = frozenset(learned)
            return None
        seen = _shown(self.model, learned.values(), run) if learned else {}
        resembles = bool(seen) and median(strangeness for _, strangeness in seen.values()) < STRANGE
        few = (name for name, norm in learned.items() if norm in seen and seen[norm][0] < ENOUGH)
        self._frozen = frozenset(few if resembles else ())
        if priced == "chosen" and self.priced == "frozen":
            self._frozen = frozenset()
        if not self._frozen:
            return None
        some = f"{len(self._frozen)} of {len(self._norms)} norms"
        return (
            f"{some} keep their running statistics even when chosen (unless everything trains without a budget): a batch has "
            f"fewer than {ENOUGH} values per channel there"
        )

    def _learned(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self._norms.items() if _has_learned(module)}

    @property
    def has_any(self) -> bool:
        """Whether there are norms whose mode is held."""
        return bool(self._norms) and self.rule != "as-is"

    @property
    def is_settled(self) -> bool:
        return self.rule != "auto" or self._frozen is not None

    def unsettle_(self) -> None:
        """Forget what was settled, since no step was taken with that batch."""
        self._frozen = None

    @property
    def priced(self) -> NormRule:
        """The rule to price steps by: what "auto" means here, or the more expensive rule where norms differ."""
        if self.rule != "auto":
            return self.rule
        return "frozen" if self._frozen and self._frozen.issuperset(self._norms) else "chosen"

    def state(self) -> list[str] | None:
        """What was settled, in plain types."""
        return None if self._frozen is None else sorted(self._frozen)

    def load(self, state: list[str] | None) -> None:
        self._frozen = None if state is None else frozenset(state)

    def statistics(self) -> NormStatistics:
        """The running statistics that may be re-estimated: with "auto" those that were learned, of norms that may train."""
        norms = {name: norm for name, norm in self._learned().items() if self._wanted[name]}
        return NormStatistics(self.model, norms, looks=0 if self.rule == "auto" else LOOKS)

    def trained(self) -> dict[str, nn.Module]:
        """With "auto", the batch norms that use batch statistics now: their running statistics lag behind the weights."""
        if self.rule != "auto" or self._plain:
            return {}
        return {name: norm for name, norm in self._norms.items() if self._set.get(name) and isinstance(norm, BatchNormBase)}

    def hold_(self, among: Collection[str], chosen: Collection[str], limited: bool = True) -> None:
        """Set every norm's mode for this choice. Call before each forward pass.

        Where everything is chosen and nothing is `limited`, training is plain, and "auto" changes no norm.
        """
        if self.rule == "as-is":
            return
        self._listen()
        everything = len(chosen) == len(among)
        self._plain = everything and not limited
        frozen = self._frozen if self.rule == "auto" and not self._plain else None
        for name, module in self._norms.items():
            candidates = [p for p in self._own[name] if p in among]
            # A norm without parameters to choose goes along only when the whole model trains.
            along = any(p in chosen for p in candidates) if candidates else everything
            mode = self._wanted[name] and along and self.rule != "frozen" and not (frozen and name in frozen)
            self._set[name] = mode
            if module.training != mode:  # setting an attribute of a module is slow
                module.training = mode

    def release_(self) -> None:
        """Give every norm the mode that the user wants."""
        self._listen()
        for name, module in self._norms.items():
            module.training = self._wanted[name]
        self._set.clear()

    def _listen(self) -> None:
        switched = self.model.training != self._whole
        self._whole = self.model.training
        for name, module in self._norms.items():
            if name not in self._set or module.training != self._set[name]:
                self._wanted[name] = module.training
            elif switched:
                self._wanted[name] = self._whole


def _has_learned(norm: nn.Module) -> bool:
    """Whether the running statistics of a batch norm no longer depend on their initial values. Statistics that were loaded
    without a batch count are taken as learned. SyncBatchNorm sees the batches of all processes, which is enough values."""
    if not isinstance(norm, BatchNormBase) or isinstance(norm, nn.SyncBatchNorm):
        return False
    if norm.running_mean is None or norm.running_var is None:
        return False
    is_new = bool((norm.running_mean == 0).all() & (norm.running_var == 1).all())
    batches = int(norm.num_batches_tracked) if norm.num_batches_tracked is not None else 0
    left = (1 - (norm.momentum or 1.0)) ** batches if batches else 0.0  # of what it began with
    return not is_new and left < _FORGOTTEN


def _shown(model: nn.Module, norms: Collection[nn.Module], run: Callable[[], Any]) -> dict[nn.Module, tuple[float, float]]:
    """For each norm that one forward pass runs: its values per channel, and how far their variances are from the running ones.
    Empty where the pass fails before it has run all norms."""
    seen: dict[nn.Module, tuple[float, torch.Tensor]] = {}

    def on_input(norm: nn.Module, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        values = input.numel() / max(input.shape[1], 1)
        if norm not in seen or values < seen[norm][0]:  # of several calls, that with the fewest
            seen[norm] = values, distance(cast("NormBase", norm), input)

    hooks = [norm.register_forward_pre_hook(on_input, with_kwargs=True) for norm in norms]
    try:
        with sandbox(model), torch.no_grad():
            for norm in norms:
                norm.training = False
            run()
    except Exception:  # a loss that needs gradients, or an error that the first step will raise again
        seen = seen if len(seen) == len(norms) else {}
    finally:
        for hook in hooks:
            hook.remove()
    return {norm: (values, float(strangeness)) for norm, (values, strangeness) in seen.items()}
