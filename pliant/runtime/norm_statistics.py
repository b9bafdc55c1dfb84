"""Running statistics of batch norms that are of another world: noticed, and re-estimated over the first batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from pliant.runtime.sandbox import sandbox
from pliant.runtime.torch_internals import NormBase

LOOKS = 5  # batches whose statistics are compared with the running ones, or take their place
FAR = 0.02  # |log| of the ratio of variances, beyond chance, above which batches are of another world (docs/notebook.md)
LOWER = 0.1  # share of the loss by which statistics of the batch must lower it
_MEAN_ERROR = 0.8  # of a normal distribution: the mean of |x| over its standard deviation
A_FEW = 4  # samples: fewer than that differ from any others

Run = Callable[[], Any]  # one forward pass, up to the loss
Statistics = dict[str, torch.Tensor]  # "<norm>.running_mean" and "<norm>.running_var"


@dataclass(frozen=True)
class Look:
    """What one batch shows: medians over norms, and the loss with either kind of statistics."""

    values: float  # of a channel in the batch
    distance: float  # median over channels of |log(variance of the batch / running variance)|, less what chance makes
    loss: float  # with running statistics
    loss_of_batch: float  # with those of the batch; infinite where it has none
    statistics: Statistics  # of the batch


def look(model: nn.Module, norms: Mapping[str, nn.Module], run: Run) -> Look | None:
    """Two forward passes that leave no trace; None where one fails before it has run a norm.

    The first is with running statistics, the second with those of the batch, each layer seeing what the norms before it give.
    """
    seen: dict[nn.Module, tuple[float, torch.Tensor]] = {}

    def on_input(norm: nn.Module, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        seen[norm] = input.numel() / max(input.shape[1], 1), distance(cast("NormBase", norm), input, by_sample=True)

    hooks = [norm.register_forward_pre_hook(on_input, with_kwargs=True) for norm in norms.values()]
    loss = float("nan")
    try:
        with sandbox(model), torch.no_grad():
            for norm in norms.values():
                norm.training = False
            loss = _number(run())
    except Exception:  # a loss that needs gradients, or an error that the first step will raise again
        if len(seen) < len(norms):
            return None
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        return None
    shown = {name: norm for name, norm in norms.items() if norm in seen}
    loss_of_batch, statistics = of_batch(model, shown, run)
    values, far = median(v for v, _ in seen.values()), median(float(d) for _, d in seen.values())
    return Look(values, far, loss, loss_of_batch, statistics)


def of_batch(model: nn.Module, norms: Mapping[str, nn.Module], run: Run) -> tuple[float, Statistics]:
    """The loss with the statistics of the batch in these norms, and those statistics. Leaves no trace.

    Empty where a norm has a single value per channel, or the loss fails.
    """
    found: Statistics = {}
    momentum = {norm: norm.momentum for norm in norms.values()}
    loss = float("inf")
    try:
        with sandbox(model), torch.no_grad():
            model.eval()  # dropout would add its own scatter
            for norm in norms.values():
                norm.training, norm.momentum = True, 1.0  # type: ignore[assignment]
            loss = _number(run())
            for name, norm in norms.items():
                for kind in ("running_mean", "running_var"):
                    found[f"{name}.{kind}"] = cast("torch.Tensor", getattr(norm, kind)).clone()
    except Exception:
        return float("inf"), {}
    finally:
        for norm, was in momentum.items():
            norm.momentum = was
    return loss, found


def install_(model: nn.Module, statistics: Statistics) -> None:
    """Write these into the norms' running statistics."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, values in statistics.items():
            buffers[name].copy_(values)


def mean_of(old: Statistics, new: Statistics, many: int) -> Statistics:
    """The mean over `many` batches, of which `new` is the last."""
    if many == 1 or old.keys() != new.keys():
        return new
    return {name: old[name] + (values - old[name]) / many for name, values in new.items()}


def _number(loss: Any) -> float:
    return float(loss.detach().float().mean()) if isinstance(loss, torch.Tensor) else float("nan")


def distance(norm: NormBase, input: torch.Tensor, by_sample: bool = False) -> torch.Tensor:
    """The median over channels of |log(variance of the batch / running variance)|, less what chance makes of so few values;
    0 where there are too few samples. Chance is that of independent values, or of how much samples differ (`by_sample`)."""
    if len(input) < A_FEW:
        return torch.zeros(())
    values, input = input.numel() / max(input.shape[1], 1), input.float()
    variances = input.var([d for d in range(input.dim()) if d != 1], correction=0)
    ratio = (variances + norm.eps) / (cast("torch.Tensor", norm.running_var).float() + norm.eps)
    chance = torch.tensor((2 / max(values, 1)) ** 0.5, device=input.device)
    if by_sample:
        mean = input.mean([d for d in range(input.dim()) if d != 1], keepdim=True)
        each = (input - mean).square().flatten(2).mean(2) if input.dim() > 2 else (input - mean).square()  # (samples, channels)
        error = each.std(0) / len(input) ** 0.5 / (variances + norm.eps)
        chance = torch.maximum(chance, _MEAN_ERROR * error.median())
    return ratio.log().abs().median() - chance


@dataclass
class NormStatistics:
    """The running statistics of pretrained batch norms, and whether the first batches say that they must be re-estimated.

    They are re-estimated where batches differ from them (`FAR`) and the statistics of the batch lower the loss by more than
    `LOWER`, over the batches so far: then the mean over the first `LOOKS` batches takes their place. A new head has nothing to
    lower yet, so such a network keeps the statistics that it came with.
    """

    model: nn.Module
    norms: Mapping[str, nn.Module]
    looks: int = 0
    distance: float = 0.0  # these three: sums over looks
    loss: float = 0.0
    loss_of_batch: float = 0.0
    replaced: bool = False
    mean: Statistics = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether the coming batch is still to be looked at."""
        return bool(self.norms) and self.looks < LOOKS

    def see_(self, run: Run) -> str | None:
        """Look at one batch, by forward passes alone. Returns what the log should say."""
        if self.replaced:
            _, statistics = of_batch(self.model, self.norms, run)
        else:
            seen = look(self.model, self.norms, run)
            if seen is None or not seen.statistics:
                self.looks = LOOKS
                return None
            statistics = seen.statistics
            self.distance += seen.distance
            self.loss, self.loss_of_batch = self.loss + seen.loss, self.loss_of_batch + seen.loss_of_batch
        self.looks += 1
        if not statistics:
            return None
        self.mean = mean_of(self.mean, statistics, self.looks)
        is_far = self.distance > FAR * self.looks
        first = not self.replaced
        if first and not (is_far and self.loss - self.loss_of_batch > LOWER * abs(self.loss)):
            return None
        self.replaced = True
        install_(self.model, self.mean)
        means = self.loss / self.looks, self.loss_of_batch / self.looks
        return (
            f"norm statistics are re-estimated over the first {LOOKS} batches: variances differ by a factor of "
            f"{math.exp(self.distance / self.looks):.2f}, and the loss falls from {means[0]:.4g} to {means[1]:.4g} with "
            f"those of the batch"
            if first
            else None
        )

    def estimate_(self, runs: Iterable[Run]) -> int:
        """Replace the running statistics by the mean over these batches, and look no further. Returns how many there were."""
        mean, many = Statistics(), 0
        for run in runs:
            _, statistics = of_batch(self.model, self.norms, run)
            if not statistics:
                raise ValueError(
                    "the statistics of this batch cannot be computed: the loss fails on it, or a norm has a single value per "
                    "channel. Give larger batches of the kind that the loss takes."
                )
            many += 1
            mean = mean_of(mean, statistics, many)
        install_(self.model, mean)
        self.looks, self.replaced, self.mean = LOOKS, many > 0, {}
        return many

    def restart_(self) -> None:
        """Begin again: the running statistics are those from before the run."""
        self.load({"looks": 0, "sums": [0.0, 0.0, 0.0], "replaced": False, "mean": {}})

    def state(self) -> dict[str, Any]:
        """What was seen so far, in plain types; the mean is kept only while it grows."""
        mean = dict(self.mean) if self.is_due else {}
        return {
            "looks": self.looks,
            "sums": [self.distance, self.loss, self.loss_of_batch],
            "replaced": self.replaced,
            "mean": mean,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.looks, self.replaced = state["looks"], state["replaced"]
        self.distance, self.loss, self.loss_of_batch = state["sums"]
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.mean = {name: values.to(buffers[name].device, copy=True) for name, values in state["mean"].items()}
