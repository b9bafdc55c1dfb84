"""The same clients and the same server in one process, without a network: `python -m fleet.simulate --method pliant`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from fleet import data, model

from pliant.integrations.flower import METHODS, Federation, Profiles, Reply, SimulatedClock, ability, train_round


@dataclass(frozen=True)
class Setting:
    """One simulated fleet. Device i takes `1 + (i % 4) · (slowest − 1) / 3` times as long for a step as this one."""

    method: str = "pliant"
    data: str = "digits"
    folder: str | None = None
    clients: int = 20
    rounds: int = 40
    alpha: float = 0.1
    steps: int = 20
    batch: int = 16
    rate: float = 0.05
    slowest: float = 4.0
    jitter: float = 0.1
    dropout: float = 0.0  # the share of client rounds that end without an answer
    seed: int = 0

    def slowdown(self, client: int) -> float:
        return 1 + (client % 4) * (self.slowest - 1) / 3


def run(
    setting: Setting,
    profiles: Profiles,
    seconds: float | None = None,
    path: str | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the rounds, or as many as begin before so many seconds of the simulated clock. One dict per round."""
    held = data.load(setting.data, setting.folder)
    parts = data.split(held.labels, setting.clients, setting.alpha, setting.seed)
    net = model.net(held, setting.seed)
    how = {"rate": setting.rate, "batch": setting.batch, "steps": setting.steps}

    def local(client: int) -> Any:
        return model.local(net, held, parts[client], **how, slowdown=setting.slowdown(client))

    fleet = Federation(net.state_dict(), METHODS[setting.method](), rate=setting.rate, seed=setting.seed, path=path)
    names = {f"{client:03}": client for client in range(setting.clients)}
    for name, client in names.items():
        if name not in fleet.abilities:
            fleet.learn(name, ability(local(client), profiles))
    rows = [{"round": 0, "clock": 0.0, "accuracy": data.accuracy(_filled(net, fleet), held)}]
    clock = 0.0
    while fleet.round < setting.rounds if seconds is None else clock < seconds:
        tasks, replies = fleet.tasks(names), []
        chance = np.random.default_rng([setting.seed, fleet.round, 1])
        for name, task in tasks.items():
            noise = SimulatedClock(setting.jitter, int(chance.integers(2**31)))
            if chance.random() < setting.dropout:
                replies.append(Reply(name, error="it dropped out"))
                continue
            _filled(net, fleet)
            trained = train_round(local(names[name]), task, profiles, noise)
            metrics = {"num-examples": trained.examples, **trained.metrics}
            replies.append(Reply(name, trained.tensors, metrics, trained.chosen))
        report = fleet.finish(tasks, replies)
        clock += report.seconds
        shares = [reply.metrics["share"] for reply in replies if reply.metrics]
        row = {**asdict(report), "clock": clock, "accuracy": data.accuracy(_filled(net, fleet), held), "asked": len(tasks)}
        rows.append(row | {"share": float(np.mean(shares)) if shares else 0.0, "refused": dict(report.refused)})
        if on_round is not None:
            on_round(rows[-1])
    return rows


def _filled(net: torch.nn.Module, fleet: Federation) -> torch.nn.Module:
    net.load_state_dict(fleet.model)
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in asdict(Setting()).items():
        parser.add_argument(f"--{name}", type=str if value is None else type(value), default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = replace(Setting(), **vars(args))

    def show(row: dict[str, Any]) -> None:
        print(
            f"round {row['round']:3} | clock {row['clock']:8.2f} s | accuracy {row['accuracy']:.3f} | loss {row['loss']:.3f} | "
            f"{row['took']}/{row['asked']} clients, {row['late']} late | {row['bytes_back'] / 1e3:.0f} kB back",
            flush=True,
        )

    run(setting, Profiles(), on_round=show)


if __name__ == "__main__":
    main()
