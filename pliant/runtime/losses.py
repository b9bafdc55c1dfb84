"""Losses without labels, of logits (samples × classes): for data without labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """The mean entropy of the predictions: it is low if they are certain. TENT, arXiv 2006.10726.

    >>> round(float(entropy(torch.zeros(3, 4))), 4)  # of four classes, none is likelier
    1.3863
    """
    _check(logits)
    logs = logits.log_softmax(1)
    return -(logs.exp() * logs).sum(1).mean()


def pseudo_labels(logits: torch.Tensor, sure: float = 0.0) -> torch.Tensor:
    """Cross-entropy with the model's own predictions as labels, over samples predicted with at least the probability `sure`.

    If there is no such sample, the loss is zero. Lee, "Pseudo-Label", 2013.
    """
    _check(logits)
    if not 0 <= sure <= 1:
        raise ValueError(f"pseudo_labels(sure={sure}): must be a probability, from 0 to 1.")
    best = logits.detach().softmax(1).max(1)
    losses = F.cross_entropy(logits, best.indices, reduction="none")
    counts = (best.values >= sure).to(losses.dtype)
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def _check(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(f"logits of shape {tuple(logits.shape)}: losses without labels need samples × classes, two or more.")
