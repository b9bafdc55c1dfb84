"""One client: `make` builds its model and finds its samples; Pliant does the rest."""

from __future__ import annotations

import torch
from flwr.app import Context

from fleet import data, model
from fleet.settings import Setting, setting_of
from pliant.integrations.flower import Local, Profiles, SimulatedClock, client_app

torch.set_num_threads(1)
PROFILES = Profiles()  # measured once for every process


def _who(context: Context) -> tuple[Setting, int]:
    """The fleet, and the number of this client in it."""
    clients = int(context.node_config["num-partitions"])
    return setting_of({**context.run_config, "clients": clients}), int(context.node_config["partition-id"])


def make(context: Context) -> Local:
    setting, client = _who(context)
    held = data.load(setting.task, setting.data)
    mine = data.split(held.labels, setting.clients, setting.alpha, setting.seed)[client]
    how = {"rate": setting.rate, "batch": setting.batch, "steps": setting.steps, "slowdown": setting.slowdown(client)}
    return model.local(model.net(held, setting.seed), held, mine, **how)


def clock(context: Context, number: int) -> SimulatedClock:
    """Every client of this simulation runs on a clock of its own: seconds of its device, not of this machine."""
    setting, client = _who(context)
    if setting.drops_out(client, number):
        raise RuntimeError("this client drops out in mid-round (simulated)")
    return SimulatedClock(setting.jitter, setting.seed_of(client, number))


app = client_app(make, clock=clock, profiles=PROFILES)
