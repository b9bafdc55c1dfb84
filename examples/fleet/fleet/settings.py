"""What a simulated fleet looks like: one place for the Flower app and for `fleet.simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Setting:
    """One simulated fleet. There are four kinds of devices: one like this machine, the others up to `slowest` times slower."""

    method: str = "pliant"
    task: str = "digits"
    data: str = ""  # the folder of signs, birds and spoken digits
    clients: int = 20
    share: float = 1.0  # of the clients, drawn anew for each round, take part in it
    rounds: int = 28
    alpha: float = 0.1  # of the Dirichlet distribution that splits the data
    steps: int = 10  # of a whole local round
    batch: int = 16
    rate: float = 0.3
    slowest: float = 4.0
    jitter: float = 0.1  # how much the speed of a device differs from round to round
    dropout: float = 0.0  # the share of client rounds that end without an answer
    seed: int = 0
    state: str = ""  # the file of the server's state: a restarted server goes on from there

    def slowdown(self, client: int) -> float:
        return 1 + (client % 4) * (self.slowest - 1) / 3

    def seed_of(self, client: int, number: int) -> int:
        """The same random numbers for a client's round, whatever else happens."""
        return int(np.random.default_rng([self.seed, client, number]).integers(2**31))

    def drops_out(self, client: int, number: int) -> bool:
        return bool(np.random.default_rng([self.seed, client, number, 1]).random() < self.dropout)


def setting_of(config: Mapping[str, Any]) -> Setting:
    """The setting of a run's configuration."""
    kinds = {field.name: type(field.default) for field in fields(Setting)}
    return Setting(**{name: kinds[name](config[name]) for name in kinds if name in config})
