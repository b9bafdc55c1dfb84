"""The same clients and the same server in one process, without a network: `python -m fleet.simulate --method pliant`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from fleet import data, model
from fleet.settings import Setting
from pliant import BudgetError
from pliant.integrations.flower import METHODS, Federation, Profiles, Reply, SimulatedClock, ability, train_round


def run(
    setting: Setting,
    profiles: Profiles,
    seconds: float | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the rounds, or as many as begin before so many seconds of the simulated clock. One dict per round."""
    held = data.load(setting.task, setting.data)
    parts = data.split(held.labels, setting.clients, setting.alpha, setting.seed)
    net = model.net(held, setting.seed)
    how = {"rate": setting.rate, "batch": setting.batch, "steps": setting.steps}

    def local(client: int) -> Any:
        return model.local(net, held, parts[client], **how, slowdown=setting.slowdown(client))

    fleet = Federation(
        net.state_dict(), METHODS[setting.method](), rate=setting.rate, seed=setting.seed, path=setting.state or None
    )
    names = {f"{client:03}": client for client in range(setting.clients)}
    for name, client in names.items():
        if name not in fleet.abilities:
            fleet.learn(name, ability(local(client), profiles))
    rows = [{"round": 0, "clock": 0.0, "accuracy": data.accuracy(_filled(net, fleet), held)}]
    clock = 0.0
    while fleet.round < setting.rounds if seconds is None else clock < seconds:
        some = max(2, round(setting.share * len(names)))
        drawn = random.Random(f"{setting.seed} {fleet.round}").sample(sorted(names), some)
        tasks, replies = fleet.tasks(drawn), []
        for name, task in tasks.items():
            client, number = names[name], fleet.round + 1
            if setting.drops_out(client, number):
                replies.append(Reply(name, error="it dropped out"))
                continue
            _filled(net, fleet)
            noise = SimulatedClock(setting.jitter, setting.seed_of(client, number))
            try:
                trained = train_round(local(client), task, profiles, noise)
            except BudgetError as error:  # this device is too slow for the task
                replies.append(Reply(name, error=str(error)))
                continue
            metrics = {"num-examples": trained.examples, **trained.metrics}
            replies.append(Reply(name, trained.tensors, metrics, tuple(trained.tensors)))
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
        parser.add_argument(f"--{name}", type=type(value), default=value)
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
