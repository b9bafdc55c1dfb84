"""Running statistics of batch norms that do not fit the data: noticed, and re-estimated over the first or last batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from pliant.runtime.sandbox import sandbox
from pliant.runtime.torch_internals import NormBase

LOOKS = 5  # batches whose statistics are compared with the running ones, or take their place
FAR = 0.02  # |log| of the ratio of variances, beyond chance, above which running statistics do not fit (docs/notebook.md)
BETTER = 0.1  # share of the loss by which statistics of the batch must be better: tell labels from others, or lower the loss
_MEAN_ERROR = 0.8  # of a normal distribution: the mean of |x| over its standard deviation
A_FEW = 4  # samples: fewer than that differ from any others

Run = Callable[[], Any]  # one forward pass, up to the loss
Statistics = dict[str, torch.Tensor]  # "<norm>.running_mean" and "<norm>.running_var"


def look(model: nn.Module, norms: Mapping[str, nn.Module], run: Run) -> tuple[float, float] | None:
    """The loss of one forward pass with running statistics, and the median over norms of how far the batch is from them
    (`distance`). Leaves no trace. None where it fails before it has run a norm."""
    seen: dict[nn.Module, torch.Tensor] = {}

    def on_input(norm: nn.Module, args: Any, kwargs: Any) -> None:
        seen[norm] = distance(cast("NormBase", norm), args[0] if args else kwargs["input"], by_sample=True)

    hooks = [norm.register_forward_pre_hook(on_input, with_kwargs=True) for norm in norms.values()]
    loss = float("nan")
    try:
        with sandbox(model), torch.no_grad():
            model.eval()  # as in `of_batch`
            loss = _number(run())
    except Exception:  # a loss that needs gradients, or an error that the first step will raise again
        if len(seen) < len(norms):
            return None
    finally:
        for hook in hooks:
            hook.remove()
    return (loss, median(map(float, seen.values()))) if seen else None


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
    values = input.numel() / max(input.shape[1], 1)
    rows = input.float().flatten(2) if input.dim() > 2 else input.float()[..., None]  # (samples, channels, places)
    means = rows.mean(2)
    inside = torch.linalg.vector_norm(rows - means[..., None], dim=2).square() / rows.shape[2]  # `var` takes ten times as long
    each = inside + (means - means.mean(0)).square()  # (samples, channels): squared distance to the mean of all
    variances = each.mean(0)
    ratio = (variances + norm.eps) / (cast("torch.Tensor", norm.running_var).float() + norm.eps)
    chance = torch.tensor((2 / max(values, 1)) ** 0.5, device=input.device)
    if by_sample:
        error = each.std(0) / len(input) ** 0.5 / (variances + norm.eps)
        chance = torch.maximum(chance, _MEAN_ERROR * error.median())
    return ratio.log().abs().median() - chance


@dataclass
class NormStatistics:
    """The running statistics of pretrained batch norms, and whether the first batches say that they must be re-estimated.

    They are, where batches lie far from them (`FAR`) and with statistics of the batch the network tells each sample's label
    better from another sample's (`BETTER`): then the mean over `LOOKS` batches takes their place. What a network does not know,
    as behind a new head or with other labels, no statistics bring back, and it keeps those that it came with.
    """

    model: nn.Module
    norms: Mapping[str, nn.Module]
    looks: int = 0
    distance: float = 0.0  # sum over looks
    replaced: bool = False
    mean: Statistics = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether the coming batch is still to be looked at."""
        return bool(self.norms) and self.looks < LOOKS

    def see_(self, run: Run, other: Run | None) -> str | None:
        """Look at one batch, by forward passes alone. `other` is one in which each sample has another's label, if there is
        such a thing. Returns what the log should say."""
        self.looks += 1
        if self.replaced:
            _, statistics = of_batch(self.model, self.norms, run)
            if statistics:
                self.mean = mean_of(self.mean, statistics, self.looks)
                install_(self.model, self.mean)
            return None
        seen = look(self.model, self.norms, run)
        if seen is None or other is None:
            self.looks = LOOKS
            return None
        loss, far = seen
        self.distance += far
        if self.distance <= FAR * self.looks:
            return None
        differ = f"variances of batches differ from those of norms by a factor of {math.exp(self.distance / self.looks):.2f}"
        loss_of_batch, statistics = of_batch(self.model, self.norms, run)
        elsewhere = look(self.model, self.norms, other)
        gap = elsewhere[0] - loss if elsewhere is not None else float("nan")
        gap_of_batch = of_batch(self.model, self.norms, other)[0] - loss_of_batch
        told = f"with their own statistics labels are told from others by {gap_of_batch:.3g} of loss, before by {gap:.3g}"
        if not gap_of_batch - gap > BETTER * abs(loss):
            self.looks = LOOKS
            return f"norm statistics are kept: {differ}, but {told}"
        self.looks, self.replaced, self.mean = 1, True, statistics
        install_(self.model, self.mean)
        return f"norm statistics are re-estimated over {LOOKS} batches: {differ}, and {told}"

    def catch_up_(self, runs: Sequence[Run]) -> str | None:
        """Replace the running statistics by the mean over these batches, if the first of them says that they lag behind the
        weights: if its variances lie far from them (`FAR`), and its own statistics lower its loss (`BETTER`). Returns what the
        log should say."""
        seen = look(self.model, self.norms, runs[0])
        if seen is None or seen[1] <= FAR or not math.isfinite(seen[0]):
            return None
        loss_of_batch, first = of_batch(self.model, self.norms, runs[0])
        losses = f"the loss of a batch is {loss_of_batch:.3g} with its own, {seen[0]:.3g} with the running ones"
        if not seen[0] - loss_of_batch > BETTER * abs(seen[0]):
            return f"after the last step, norm statistics are kept: {losses}"
        mean, many = self._mean(runs[1:], first, skips=True)
        install_(self.model, mean)
        return f"after the last step, norm statistics are re-estimated over {many} batches: {losses}"

    def estimate_(self, runs: Iterable[Run]) -> int:
        """Replace the running statistics by the mean over these batches, and look no further. Returns how many there were."""
        mean, many = self._mean(runs)
        install_(self.model, mean)
        self.looks, self.replaced, self.mean = LOOKS, many > 0, {}
        return many

    def _mean(self, runs: Iterable[Run], first: Statistics | None = None, skips: bool = False) -> tuple[Statistics, int]:
        """The mean over the statistics of a `first` batch and of these, and over how many. A batch that has none is an error,
        unless `skips`."""
        mean, many = first or {}, 1 if first else 0
        for run in runs:
            _, statistics = of_batch(self.model, self.norms, run)
            if statistics:
                many += 1
                mean = mean_of(mean, statistics, many)
            elif not skips:
                raise ValueError(
                    "the statistics of this batch cannot be computed: the loss fails on it, or a norm has a single value per "
                    "channel. Give larger batches of the kind that the loss takes."
                )
        return mean, many

    def restart_(self) -> None:
        """Begin again: the running statistics are those from before the run."""
        self.load({"looks": 0, "distance": 0.0, "replaced": False, "mean": {}})

    def state(self) -> dict[str, Any]:
        """What was seen so far, in plain types; the mean is kept only while it grows."""
        mean = dict(self.mean) if self.is_due else {}
        return {"looks": self.looks, "distance": self.distance, "replaced": self.replaced, "mean": mean}

    def load(self, state: Mapping[str, Any]) -> None:
        self.looks, self.distance, self.replaced = state["looks"], state["distance"], state["replaced"]
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.mean = {name: values.to(buffers[name].device, copy=True) for name, values in state["mean"].items()}
