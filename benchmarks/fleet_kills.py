"""Kill −9 of a server or of a client at a random moment: does the federation end as well as one that nobody disturbed?

    python benchmarks/fleet_kills.py            # 10 trials of each kind: about ten minutes; resumable
    python benchmarks/fleet_kills.py --quick    # one trial of each kind

Server and clients are processes of their own and run the code of `examples/fleet`: the digits, four clients. In each trial one
of them is killed at a random moment of the run. A server is started again and goes on from its file; a client is gone for that
round. What is checked: the state is whole, every round is there once, and how the accuracy at the end differs from that of a
run with the same seed that nobody disturbed. How far runs differ by their seed alone is in the first row.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fleets
import numpy as np
import record
import torch

from pliant.integrations.flower import METHODS, Federation, Profiles, Reply, SimulatedClock, ability, train_round

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))

from fleet import data, model
from fleet.settings import Setting

PROCESSES = multiprocessing.get_context("fork")
BASE = Setting(clients=4, rounds=12, alpha=1.0)


def local(setting: Setting, client: int, net: Any) -> Any:
    held = data.load(setting.task)
    mine = data.split(held.labels, setting.clients, setting.alpha, 0)[client]
    how = {"rate": setting.rate, "batch": setting.batch, "steps": setting.steps, "slowdown": setting.slowdown(client)}
    return model.local(net, held, mine, **how)


def train(setting: Setting, profiles: Profiles, client: int, number: int, weights: Any, task: Any, back: Any) -> None:
    """A client's process: one round."""
    net = model.net(data.load(setting.task), setting.seed)
    net.load_state_dict(weights)
    trained = train_round(local(setting, client, net), task, profiles, SimulatedClock(0.1, setting.seed_of(client, number)))
    tensors = {name: tensor.numpy() for name, tensor in trained.tensors.items()}
    try:
        back.send((tensors, {"num-examples": float(trained.examples), **trained.metrics}))
    except BrokenPipeError:  # the server was killed meanwhile
        os._exit(1)


def federation(setting: Setting, path: str) -> Federation:
    start = model.net(data.load(setting.task), setting.seed).state_dict()
    return Federation(start, METHODS[setting.method](), rate=setting.rate, seed=setting.seed, path=path)


def serve(setting: Setting, profiles: Profiles, path: str, pids: Any) -> None:
    """The server's process: goes on from its file until the last round."""
    fleet = federation(setting, path)
    net = model.net(data.load(setting.task), setting.seed)
    names = {str(client): client for client in range(setting.clients)}
    for name, client in names.items():
        fleet.learn(name, ability(local(setting, client, net), profiles))
    while fleet.round < setting.rounds:
        tasks, replies = fleet.tasks(names), []
        for name, task in tasks.items():
            here, there = PROCESSES.Pipe(duplex=False)
            what = setting, profiles, names[name], fleet.round + 1, fleet.model, task, there
            process = PROCESSES.Process(target=train, args=what)
            process.start()
            there.close()
            pids[names[name]] = process.pid
            try:
                tensors, metrics = here.recv()
                found = {key: torch.from_numpy(array) for key, array in tensors.items()}
                replies.append(Reply(name, found, metrics, tuple(found)))
            except EOFError:
                replies.append(Reply(name, error="it was killed"))
            process.join()
            pids[names[name]] = 0
        fleet.finish(tasks, replies)


def outcome(setting: Setting, path: str) -> dict[str, Any]:
    fleet, held = federation(setting, path), data.load(setting.task)
    net = model.net(held, setting.seed)
    net.load_state_dict(fleet.model)
    whole = fleet.round == setting.rounds and [row["round"] for row in fleet.history] == list(range(1, setting.rounds + 1))
    lost = sum(len(row["refused"]) for row in fleet.history)
    return {"accuracy": data.accuracy(net, held), "whole": whole, "lost": lost, "files": len(os.listdir(Path(path).parent))}


def trial(setting: Setting, profiles: Profiles, victim: int | None, moment: float) -> dict[str, Any]:
    """One run; after so many seconds a client (its number) or the server (−1) is killed."""
    with tempfile.TemporaryDirectory() as folder:
        path, pids = str(Path(folder) / "state"), PROCESSES.Array("i", setting.clients)
        server = PROCESSES.Process(target=serve, args=(setting, profiles, path, pids))
        start, killed = time.monotonic(), False
        server.start()
        while server.is_alive():
            if victim is not None and not killed and time.monotonic() - start >= moment:
                pid = server.pid if victim < 0 else pids[victim]
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
                    if victim < 0:
                        server.join()
                        if any(pids):  # the client that worked for it would wait for ever
                            os.kill(max(pids), signal.SIGKILL)
                        pids[:] = [0] * setting.clients
                        server = PROCESSES.Process(target=serve, args=(setting, profiles, path, pids))
                        server.start()
            server.join(0.005)
        return {
            "victim": victim,
            "seed": setting.seed,
            "moment": moment,
            "killed": killed,
            "seconds": time.monotonic() - start,
            **outcome(setting, path),
        }


def table(cells: list[dict[str, Any]]) -> str:
    calm = {c["seed"]: c["accuracy"] for c in cells if c["victim"] is None}
    lines = [
        "| killed | trials | state whole | client rounds lost | accuracy at the end | minus the same seed undisturbed |",
        "|---|---|---|---|---|---|",
    ]
    who = {"nobody": lambda v: v is None, "a client": lambda v: v is not None and v >= 0, "the server": lambda v: v == -1}
    for name, belongs in who.items():
        runs = [c for c in cells if belongs(c["victim"]) and (c["killed"] or c["victim"] is None)]
        if runs:
            found, moved = [100 * c["accuracy"] for c in runs], [100 * (c["accuracy"] - calm[c["seed"]]) for c in runs]
            whole, lost = sum(c["whole"] and c["files"] == 1 for c in runs), sum(c["lost"] for c in runs)
            spread = f"{np.mean(found):.1f} ± {np.std(found):.1f} ({min(found):.1f}–{max(found):.1f})"
            change = f"{np.mean(moved):+.1f} ({min(moved):+.1f} to {max(moved):+.1f})" if name != "nobody" else "–"
            lines.append(f"| {name} | {len(runs)} | {whole} of {len(runs)} | {lost} | {spread} | {change} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = record.options(__doc__, device=False)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = record.out(args, "fleet_kills")
    kinds = {"data", "state", "seed"}
    seeds, trials = (1, 1) if args.quick else (10, 10)
    setting = {name: value for name, value in asdict(BASE).items() if name not in kinds} | {"seeds": seeds, "trials": trials}
    cells = record.load(out, setting)
    folder, rng = Path("build") / "fleet_profiles" / BASE.task, np.random.default_rng(0)
    # In a process of its own: one that has run a backward pass cannot always be forked.
    measuring = multiprocessing.get_context("spawn").Process(target=fleets.measured, args=(BASE, folder))
    measuring.start()
    measuring.join()
    if measuring.exitcode:
        raise SystemExit(f"the network could not be measured; profiles of another machine may be in {folder}: remove them.")
    profiles = fleets.profiles_of(folder)

    def keep(found: dict[str, Any]) -> None:
        cells.append(found)
        record.save(out, setting, cells, table(cells))
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}, flush=True)

    for seed in range(len([c for c in cells if c["victim"] is None]), seeds):
        calm = trial(replace(BASE, seed=seed), profiles, None, 0.0)
        if calm["lost"]:
            raise SystemExit(f"{calm['lost']} client rounds failed though nobody was killed.")
        keep(calm)
    usual = min(c["seconds"] for c in cells if c["victim"] is None)
    for number in range(2 * trials):
        victim, moment = int(rng.integers(BASE.clients)) if number % 2 else -1, float(rng.uniform(0, 0.9 * usual))
        if number >= len([c for c in cells if c["victim"] is not None]):
            keep(trial(replace(BASE, seed=number // 2 % seeds), profiles, victim, moment))
    print(table(cells))


if __name__ == "__main__":
    main()
