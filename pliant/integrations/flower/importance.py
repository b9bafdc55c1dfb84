"""What a parameter is worth to the whole fleet: how far the global model moved it, blended with what a client sees itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pliant.signals import Seen, Signal


def of_change(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor], rate: float) -> dict[str, float]:
    """Σ (w_new − w_old)² / rate of each tensor: the global importance of FedEL, arXiv 2509.16902.

    >>> of_change({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 1.0])}, rate=0.5)
    {'w': 2.0}
    """
    if not rate > 0:
        raise ValueError(f"rate={rate}: the learning rate of the clients is more than 0.")
    return {name: float((new[name].double() - was.double()).square().sum()) / rate for name, was in old.items()}


def blended(local: Signal, server: Mapping[str, float], beta: float) -> Signal:
    """β · local + (1 − β) · the server's value of each parameter; the local signal alone where the server knows nothing."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: the share of the local values, from 0 to 1.")
    if not server or beta == 1:
        return local

    def worth(seen: Seen) -> torch.Tensor:
        return (beta * local.worth(seen).sum() + (1 - beta) * server.get(seen.name, 0.0)).reshape(1)

    if beta == 0:
        return Signal("the fleet's", lambda seen: torch.tensor([server.get(seen.name, 0.0)]), needs="nothing")
    return Signal(f"{local.name} and the fleet's", worth, local.needs)
