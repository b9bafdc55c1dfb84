"""How long one training step takes when the same selection runs on different engines.

    python benchmarks/step.py                      # an hour on one CPU thread; resumable
    python benchmarks/step.py --device cuda        # some minutes on a GPU
    python benchmarks/step.py --quick              # one network, one batch size: about a minute
    python benchmarks/step.py --threads 2          # wall time of two threads

Every way has its own copy of the network. Trained is the last quarter or half of the parameter tensors; or, "with gaps", the
weights of one layer in five of that half. What is timed:

    full, eager; plain freezing    optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()
    all others                     session.step(batch), with the engine that is named

Plain freezing sets `requires_grad`, and frozen batch norms use their running statistics. On a CPU, networks for images also run
plain freezing with the model and the batch channels-last; ratios refer to the faster of the two layouts. Sessions get the model
and the batch in the default layout. `cache`: every batch was seen before, so a session reads the features before the first
trained layer from its cache, which is on the device. `int8`: the prefix is in int8, and already calibrated and quantised. On a
GPU all ways use bfloat16 autocast, and channels-last for images.

The ways take turns. CPU: the fastest step of each, in CPU time of one thread, or wall time (of several, or with --wall where a
system counts CPU time coarsely). Each way is in a process of its own there, since memory that one has freed makes the others
faster. GPU: synchronised wall time, medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import nets
import record
import torch
from torch import nn
from training import freeze_, last_share, plain_step, seconds_of, sgd, typical

from pliant import Features, Session, models, recipes

NETWORKS = ("mobilenet_v2", "efficientnet_lite0", "resnet50", "vit_tiny", "text_encoder")
BATCHES = (4, 8, 32, 64)
CHOICES = ("last quarter", "last half", "one layer in five of the last half")
ON_CPU = ("prefix", "lean", "lean+prefix", "prefix, cache", "auto")
ON_CUDA = ("prefix", "lean", "graphs", "prefix+graphs", "lean+graphs", "prefix+graphs, cache", "auto")
CALIBRATION = 32  # samples of different batches, before a prefix is in int8
WARM = 16  # steps: afterwards everything is recorded or captured


def build(name: str, pixels: int) -> nn.Module:
    return models.efficientnet_lite0(classes=nets.CLASSES) if name == "efficientnet_lite0" else nets.build(name, pixels)


def loss_on(device: str) -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return nets.loss(model, batch)

    return loss if device == "cuda" else nets.loss


def plain_loop(model: nn.Module, batch: Any, loss: Any, chosen: list[str]) -> Callable[[], Any]:
    freeze_(model, chosen)
    return partial(plain_step, model, sgd(model), loss, batch)


def session(model: nn.Module, batch: Any, loss: Any, chosen: list[str], way: str) -> tuple[Session, Callable[[], Any]]:
    engine, _, more = way.partition(", ")
    full = len(chosen) == len(list(model.parameters()))
    policy = recipes.full() if full else recipes.only(*chosen)
    features = Features("8GB", device=batch[0].device) if more == "cache" else None
    mine = Session(model, sgd(model), loss, policy, engine=engine, cache=features, prefix="int8" if more == "int8" else None)
    ids = list(range(len(batch[1]))) if more == "cache" else None
    return mine, lambda: mine.step(batch, ids)


def chosen_of(choice: str, model: nn.Module) -> list[str]:
    if choice == "last quarter":
        return last_share(model, 0.25)
    half = last_share(model, 0.5)
    params = dict(model.named_parameters())
    return half if choice == "last half" else [name for name in half if params[name].dim() > 1][::-5]


def taken_by(step: Callable[[], Any], setting: dict[str, Any]) -> float:
    if setting.get("threads", 1) == 1 and not setting.get("wall"):
        return seconds_of(step, setting["device"])
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def plain_of(seconds: dict[str, float]) -> float:
    """Plain freezing in the faster of its layouts."""
    return min(taken for way, taken in seconds.items() if way.startswith("plain freezing"))


def ways_of(name: str, setting: dict[str, Any]) -> list[str]:
    on_cpu, images = setting["device"] == "cpu", name != "text_encoder"
    layouts = ["plain freezing", "plain freezing, channels-last"] if on_cpu and images else ["plain freezing"]
    return ["full, eager", *layouts, *([] if on_cpu else ["full, graphs"]), *setting["ways"]]


def made(name: str, size: int, choice: str, way: str, setting: dict[str, Any]) -> tuple[Session | None, Callable[[], Any]]:
    """One way with a network of its own, warmed up; and its session, if it has one."""
    device = setting["device"]
    torch.set_num_threads(setting.get("threads", 1))
    torch.manual_seed(0)
    model = build(name, setting["pixels"]).to(device)
    batch = nets.batch(name, size, setting["pixels"], device)
    if batch[0].dim() == 4 and (device == "cuda" or way.endswith("channels-last")):
        model = model.to(memory_format=torch.channels_last)
        batch = batch[0].to(memory_format=torch.channels_last), batch[1]
    loss, chosen = loss_on(device), chosen_of(choice, model) if not way.startswith("full") else last_share(model, 1.0)
    mine: Session | None = None
    if way == "full, eager" or way.startswith("plain freezing"):
        step = plain_loop(model, batch, loss, chosen)
    else:
        mine, step = session(model, batch, loss, chosen, way.removeprefix("full, "))
    if mine is not None and way.endswith("int8"):
        for _ in range(CALIBRATION // size + 2):
            mine.step(nets.batch(name, size, setting["pixels"], device))
    for _ in range(WARM if mine is not None else 3):
        step()
    return mine, step


def in_a_row(step: Callable[[], Any], setting: dict[str, Any]) -> float:
    """Seconds of the last of a few steps: by then the processor's caches hold this way's data."""
    return [taken_by(step, setting) for _ in range(setting["in_a_row"])][-1]


def serve(there: Any, *given: Any) -> None:
    """One way in a process of its own: take steps whenever asked, and say in the end what ran."""
    mine, step = made(*given)
    there.send(None)
    while there.recv():
        there.send(in_a_row(step, given[-1]))
    there.send((mine.engine, dict(mine.why_not)) if mine is not None else None)


def cell(name: str, size: int, choice: str, setting: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    ways = ways_of(name, setting)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    if setting["device"] == "cuda":
        here = {way: made(name, size, choice, way, setting) for way in ways}
        for _ in range(setting["repeats"]):
            for way, (_, step) in here.items():
                taken[way].append(in_a_row(step, setting))
        ends = {way: (mine.engine, dict(mine.why_not)) for way, (mine, _) in here.items() if mine is not None}
    else:
        apart = multiprocessing.get_context("spawn")
        pipes = {}
        for way in ways:
            pipes[way], there = apart.Pipe()
            apart.Process(target=serve, args=(there, name, size, choice, way, setting), daemon=True).start()
            there.close()
            pipes[way].recv()  # ready: one starts after the other
        for _ in range(setting["repeats"]):
            for way, pipe in pipes.items():
                pipe.send(True)
                taken[way].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(False)
        ends = {way: end for way, end in ((way, pipe.recv()) for way, pipe in pipes.items()) if end is not None}
    seconds = {way: typical(several, setting["device"]) for way, several in taken.items()}
    ran, notes = ({way: end[i] for way, end in ends.items()} for i in (0, 1))
    return {"network": name, "batch": size, "chosen": choice, "seconds": seconds, "ran": ran, "why_not": notes}


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds, and in brackets the ratio to plain freezing in the faster layout."""
    ways = list(dict.fromkeys(way for c in cells for way in c["seconds"]))
    lines = [f"| network | batch | trained | {' | '.join(ways)} | auto took |", "|" + "---|" * (len(ways) + 4)]
    for c in cells:
        plain = plain_of(c["seconds"])
        row = [
            f"{c['seconds'][way] * 1e3:.2f} ms ({c['seconds'][way] / plain:.2f})" if way in c["seconds"] else "" for way in ways
        ]
        lines.append(f"| {c['network']} | {c['batch']} | {c['chosen']} | {' | '.join(row)} | {c['ran'].get('auto', '')} |")
    reasons = sorted(
        {f"{c['network']}, {way}: {why}" for c in cells for way, whys in c["why_not"].items() for why in whys.values()}
    )
    if reasons:
        lines += ["", "What an engine did not do, and why:", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--pixels", type=int, default=None, help="per side (128, or 224 on a GPU)")
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=None, help="just these")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument(
        "--ways", nargs="+", default=None, help="engines to try, like 'prefix, cache', 'auto, int8' or 'lean+graphs'"
    )
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--wall", action="store_true", help="wall time instead of CPU time: for machines with nothing else to do"
    )
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if args.quick:
        args.networks, args.batches = args.networks or ["mobilenet_v2"], args.batches or [8]
        args.choices, args.repeats = ["last quarter"], args.repeats or 3
    setting = {
        "device": args.device,
        "pixels": args.pixels or (224 if cuda else 128),
        "repeats": args.repeats or (15 if cuda else 5),
        "in_a_row": 3,
        "ways": args.ways or list(ON_CUDA if cuda else ON_CPU),
    }
    if not cuda:
        setting |= {"threads": args.threads, "apart": True}
        setting["runtime"] = next((name for name in ("openvino", "onnxruntime") if find_spec(name) is not None), None)
        setting |= {"wall": True} if args.wall else {}
    out = record.out(args, "step")
    done = record.load(out, setting)
    known = {(c["network"], c["batch"], c["chosen"]) for c in done}
    for name in args.networks or NETWORKS:
        for size in args.batches or BATCHES:
            for choice in args.choices:
                if (name, size, choice) not in known:
                    done.append(cell(name, size, choice, setting))
                    record.save(out, setting, done, table(done))
                    print(table(done[-1:]), flush=True)


if __name__ == "__main__":
    main()
