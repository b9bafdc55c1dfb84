"""Fleets: federated training on Flower in which each device trains what it has time for. `pip install 'pliant[flower]'`.

`Local` is what a client trains with; `client_app` makes Flower's ClientApp of it, and `Elastic` is the server's strategy.
The rest needs no Flower: `ability` and `train_round` on a client, `Federation` and `METHODS` on a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pliant.integrations.flower.aggregate import Mean, Update, aggregate, norm_of, refusal
from pliant.integrations.flower.client import Local, Profiles, Trained, ability, train_round
from pliant.integrations.flower.clock import SimulatedClock, WallClock, slowed
from pliant.integrations.flower.federation import Federation, Reply, RoundReport
from pliant.integrations.flower.messages import Ability, Choice, Task, to_json
from pliant.integrations.flower.methods import METHODS, Method, Situation

if TYPE_CHECKING:
    from pliant.integrations.flower.apps import Elastic, client_app, packed, unpacked

__all__ = [
    "METHODS",
    "Ability",
    "Choice",
    "Elastic",
    "Federation",
    "Local",
    "Mean",
    "Method",
    "Profiles",
    "Reply",
    "RoundReport",
    "SimulatedClock",
    "Situation",
    "Task",
    "Trained",
    "Update",
    "WallClock",
    "ability",
    "aggregate",
    "client_app",
    "norm_of",
    "packed",
    "refusal",
    "slowed",
    "to_json",
    "train_round",
    "unpacked",
]


def __getattr__(name: str) -> Any:
    if name not in ("Elastic", "client_app", "packed", "unpacked"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pliant.integrations.flower import apps

    return getattr(apps, name)
