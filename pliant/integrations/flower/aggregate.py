"""What becomes of the clients' updates: refused with a reason, or averaged tensor by tensor over those who trained it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

MOST_CHANGE = 10.0  # times the norm of the whole model: an update that moves further is refused (docs/fleets.md, measured)


@dataclass(frozen=True)
class Update:
    """New values of the tensors that one client trained, and how much they count."""

    client: str
    tensors: Mapping[str, torch.Tensor]
    weight: float


def refusal(
    update: Update, model: Mapping[str, torch.Tensor], most_change: float = MOST_CHANGE, norm: float | None = None
) -> str | None:
    """Why this update must not be taken, or None. What cannot be checked is refused. `norm` is that of the model, if known."""
    weight = update.weight
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight <= 0:
        return f"its weight is {weight!r}: the number of its examples must be more than 0"
    moved = 0.0
    for name, tensor in update.tensors.items():
        if name not in model:
            return f"{name!r} is not a tensor of the model"
        if tensor.shape != model[name].shape:
            return f"{name!r} has shape {tuple(tensor.shape)}, not {tuple(model[name].shape)}"
        if tensor.dtype != model[name].dtype:
            return f"{name!r} is {tensor.dtype}, not {model[name].dtype}"
        moved += _norm(tensor - model[name]) ** 2
        if not math.isfinite(moved):  # so is the sum of squares, if one of them is not
            return f"{name!r} holds numbers that are not finite"
    size = max(norm_of(model) if norm is None else norm, 1.0)  # a model may begin at zero
    if math.sqrt(moved) > most_change * size:
        return f"it moves by {math.sqrt(moved):.3g}, more than {most_change:g} times the norm of the model ({size:.3g})"
    return None


def norm_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """The norm of all tensors together."""
    return math.sqrt(math.fsum(_norm(tensor) ** 2 for tensor in tensors.values()))


def _norm(tensor: torch.Tensor) -> float:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return float(torch.linalg.vector_norm(tensor.double() if whole else tensor, dtype=None if whole else torch.float64))


class Mean:
    """The mean of each tensor over the clients that sent it, by their weights. However many clients: one sum."""

    def __init__(self, model: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._sums: dict[str, torch.Tensor] = {}
        self._weights: dict[str, float] = {}

    def add(self, update: Update) -> None:
        for name, tensor in update.tensors.items():
            change = (tensor.double() - self._model[name].double()) * update.weight
            self._sums[name] = self._sums[name].add_(change) if name in self._sums else change
            self._weights[name] = self._weights.get(name, 0.0) + update.weight

    def result(self) -> dict[str, torch.Tensor]:
        """The new model. What nobody trained stays as it was, to the bit."""
        new = dict(self._model)
        for name, total in self._sums.items():
            mean = self._model[name].double() + total / self._weights[name]
            whole = not self._model[name].dtype.is_floating_point
            new[name] = (mean.round() if whole else mean).to(self._model[name].dtype)
        return new


def aggregate(
    model: Mapping[str, torch.Tensor], updates: Iterable[Update], most_change: float = MOST_CHANGE
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The new model, and by client why its update was refused.

    >>> model = {"w": torch.zeros(2), "b": torch.ones(1)}
    >>> one, two = Update("one", {"w": torch.tensor([3.0, 0.0])}, 1), Update("two", {"b": torch.tensor([float("nan")])}, 1)
    >>> new, refused = aggregate(model, [one, two])
    >>> new["w"].tolist(), new["b"].tolist(), refused
    ([3.0, 0.0], [1.0], {'two': "'b' holds numbers that are not finite"})
    """
    mean, refused, norm = Mean(model), {}, norm_of(model)
    for update in updates:
        reason = refusal(update, model, most_change, norm)
        if reason is not None:
            refused[update.client] = reason
        else:
            mean.add(update)
    return mean.result(), refused
