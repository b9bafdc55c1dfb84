"""What a fleet asks of its server and links: seconds and memory per update, bytes per message, deadlines by the wall clock.

    python benchmarks/fleet_server.py           # about ten minutes; resumable; bytes of messages need pliant[flower]
    python benchmarks/fleet_server.py --quick

What is timed:

    update     check one client's update (names, shapes, finite, norm), add it to the sum: CPU time of one thread, fastest of 5
    deadline   `train_round` of examples/fleet with a deadline on the wall clock; late is a round that ends after it

The plan for large fleets multiplies these by the clients of a round. What one client sends back is the mean of `pliant` in the
results of `benchmarks/fleets.py`, as a share of the model.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record
import torch

from pliant.integrations.flower import (
    Ability,
    Choice,
    Mean,
    Profiles,
    Task,
    Update,
    ability,
    norm_of,
    refusal,
    to_json,
    train_round,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))

from fleet import data, model
from fleet.settings import Setting

SIZES = {"examples/fleet": 28_000, "MobileNetV2": 3_500_000, "25 million parameters": 25_000_000}
DEVICES = (10**4, 10**5, 10**6)
CHOICES: dict[Choice, str] = {"all": "everything (`fewer_steps`)", "pace": "by value (`pliant`)"}
PLAN = {10**4: 1_000, 10**5: 1_000, 10**6: 10_000}  # devices → clients in a round


def update_cost(parameters: int, tries: int) -> dict[str, Any]:
    """Seconds and bytes that one full update takes on the server."""
    held = {f"{i}": torch.randn(parameters // 20) for i in range(20)}
    update = Update("one", {name: tensor + 0.01 for name, tensor in held.items()}, 1.0)
    mean, norm, taken = Mean(held), norm_of(held), []
    for _ in range(tries):
        start = time.thread_time()
        if refusal(update, held, norm=norm) is None:
            mean.add(update)
        taken.append(time.thread_time() - start)
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    return {"kind": "update", "bytes": size, "seconds": min(taken), "held_bytes": 3 * size}  # the model, and sums of 8 bytes


def wire(task: Task, profiles: Profiles, setting: Setting) -> dict[str, Any]:
    """Bytes of a reply as Flower sends it: the content of every object in it."""
    from flwr.app import MetricRecord, RecordDict

    from pliant.integrations.flower import packed

    trained = train_round(local(setting, 3), task, profiles)
    content = RecordDict(
        {"arrays": packed(trained.tensors), "metrics": MetricRecord({"num-examples": trained.examples, **trained.metrics})}
    )
    seen: dict[str, int] = {}

    def walk(thing: Any) -> None:
        seen[thing.object_id] = len(thing.deflate())
        for child in (thing.children or {}).values():
            walk(child)

    walk(content)
    return {
        "kind": "wire",
        "trained": trained.metrics["trained-bytes"],
        "sent": sum(seen.values()),
        "tensors": len(trained.tensors),
    }


def local(setting: Setting, client: int) -> Any:
    held = data.load(setting.task)
    mine = data.split(held.labels, setting.clients, setting.alpha, setting.seed)[client]
    how = {"rate": setting.rate, "batch": setting.batch, "steps": setting.steps}
    return model.local(model.net(held, setting.seed), held, mine, **how)


def deadlines(profiles: Profiles, setting: Setting, share: float, rounds: int, choose: Choice) -> dict[str, Any]:
    """How often a client ends after a deadline of such a share of its full round, by the wall clock of this machine."""
    late, over, steps, moved = 0, [], 0.0, 0.0
    for number in range(rounds):
        client = local(setting, number % setting.clients)
        seconds = share * setting.steps * profiles.of(client).full.seconds
        start = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        values = dict.fromkeys(start, 1.0) if number else {}  # the server has none before the first round
        task = Task(setting.steps, seconds, choose=choose, importance=values, beta=0.0, seed=number)
        trained = train_round(client, task, profiles)
        late += trained.metrics["seconds"] > seconds
        over.append(trained.metrics["seconds"] / seconds)
        steps += trained.metrics["steps"] / rounds
        change = norm_of({name: tensor - start[name] for name, tensor in trained.tensors.items()})
        moved = max(moved, change / norm_of(start))
    return {
        "kind": "deadline",
        "choose": choose,
        "share": share,
        "rounds": rounds,
        "late": late,
        "longest": max(over),
        "steps": steps,
        "moved": moved,
    }


def words(able: Ability, model_names: list[str]) -> dict[str, Any]:
    """Bytes of what is said beside tensors: what a client can do, and a task with the values of the whole fleet."""
    task = Task(10, 1.0, choose="pace", importance=dict.fromkeys(model_names, 1 / 3), beta=0.0)
    return {"kind": "words", "ability": len(to_json(able)), "task": len(to_json(task))}


def plan(cells: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a round of a large fleet needs."""
    runs = [c for c in simulated if c["method"] == "pliant"]
    share = sum(c["bytes_back"] / c["bytes_down"] for c in runs) / len(runs)
    said = next(c for c in cells if c["kind"] == "words")
    updates = dict(zip(SIZES, (c for c in cells if c["kind"] == "update"), strict=False))
    return [
        {
            "kind": "plan",
            "devices": devices,
            "clients": clients,
            "model": name,
            "sent": clients * share * update["bytes"],
            "received": clients * (update["bytes"] + said["task"]),
            "seconds": clients * update["seconds"],
            "held": update["held_bytes"],
            "known": devices * said["ability"],
        }
        for devices, clients in PLAN.items()
        for name, update in updates.items()
    ]


def table(cells: list[dict[str, Any]]) -> str:
    lines = ["| model | one update | check and add it | server holds | " + " | ".join(f"{n:,} devices" for n in DEVICES) + " |"]
    lines += ["|---" * (4 + len(DEVICES)) + "|"]
    updates = [c for c in cells if c["kind"] == "update"]
    for name, c in zip(SIZES, updates, strict=False):
        times = " | ".join(f"{n * c['seconds']:,.0f} s, {n * c['bytes'] / 1e9:,.0f} GB" for n in DEVICES)
        seconds, held = c["seconds"] * 1e3, c["held_bytes"] / 1e6
        lines.append(f"| {name} | {c['bytes'] / 1e6:.1f} MB | {seconds:.3g} ms | {held:.1f} MB | {times} |")
    sent = [c for c in cells if c["kind"] == "wire"]
    if sent:
        lines += ["", "| tensors trained | their bytes | message | more than them |", "|---|---|---|---|"]
        for c in sent:
            more = c["sent"] - c["trained"]
            lines.append(f"| {c['tensors']} | {c['trained']:,.0f} | {c['sent']:,} | {more:,.0f} |")
    late = [c for c in cells if c["kind"] == "deadline"]
    if late:
        lines += [
            "",
            "| trains | deadline, of a full round | rounds | late | longest, of the deadline | steps | most change |",
            "|---" * 7 + "|",
        ]
        for c in late:
            rate = f"{c['late']} ({100 * c['late'] / c['rounds']:.1f} %)"
            lines.append(
                f"| {CHOICES[c.get('choose', 'all')]} | {c['share']:g} | {c['rounds']} | {rate} "
                f"| {c['longest']:.2f} | {c['steps']:.0f} | {c['moved']:.2f} |"
            )
    said = [c for c in cells if c["kind"] == "words"]
    for c in said:
        lines += ["", f"What a client can do is {c['ability']:,} bytes of text, a task with the fleet's values {c['task']:,}."]
    planned = [c for c in cells if c["kind"] == "plan"]
    if planned:
        heads = (
            "devices",
            "clients in a round",
            "model",
            "they send",
            "they receive",
            "check and add",
            "server holds",
            "abilities",
        )
        lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for c in planned:
            sizes = f"{c['sent'] / 1e9:,.1f} GB | {c['received'] / 1e9:,.1f} GB | {c['seconds']:,.1f} s"
            holds = f"{c['held'] / 1e6:,.1f} MB | {c['known'] / 1e6:,.0f} MB"
            lines.append(f"| {c['devices']:,} | {c['clients']:,} | {c['model']} | {sizes} | {holds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = record.options(__doc__, device=False)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out, base, profiles = record.out(args, "fleet_server"), Setting(steps=400), Profiles()
    setting = {"rounds": 2 if args.quick else 40, "tries": 2 if args.quick else 5}
    cells = [c for c in record.load(out, setting) if c["kind"] not in ("words", "plan")]
    done = {c["kind"] for c in cells}
    able = ability(local(base, 0), profiles)
    if "update" not in done:
        cells += [update_cost(parameters, setting["tries"]) for parameters in list(SIZES.values())[: 2 if args.quick else 3]]
    if "wire" not in done and find_spec("flwr") is not None:
        last = len(able.blocks) - 1
        cells += [wire(Task(2, params=able.params(first, last)), profiles, base) for first in (0, 3, last)]
    for choose in CHOICES:
        if not any(c["kind"] == "deadline" and c.get("choose", "all") == choose for c in cells):
            cells += [deadlines(profiles, base, share, setting["rounds"], choose) for share in (1.0, 0.5, 0.25)]
    cells.append(words(able, list(model.net(data.load(base.task), 0).state_dict())))
    cells += plan(cells, record.cells(record.RESULTS / "fleet_digits_cpu.json"))
    record.save(out, setting, cells, table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
