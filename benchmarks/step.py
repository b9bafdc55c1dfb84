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
trained layer from its cache, which is on the device. On a GPU all ways use bfloat16 autocast, and channels-last for images.

The ways take turns. CPU: CPU time of one thread (wall time of several), the fastest step of each. GPU: synchronised wall time,
medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
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
    engine, _, cache = way.partition(", ")
    full = len(chosen) == len(list(model.parameters()))
    policy = recipes.full() if full else recipes.only(*chosen)
    features = Features("8GB", device=batch[0].device) if cache else None
    mine = Session(model, sgd(model), loss, policy, engine=engine, cache=features)
    ids = list(range(len(batch[1]))) if cache else None
    return mine, lambda: mine.step(batch, ids)


def chosen_of(choice: str, model: nn.Module) -> list[str]:
    if choice == "last quarter":
        return last_share(model, 0.25)
    half = last_share(model, 0.5)
    params = dict(model.named_parameters())
    return half if choice == "last half" else [name for name in half if params[name].dim() > 1][::-5]


def taken_by(step: Callable[[], Any], setting: dict[str, Any]) -> float:
    if setting.get("threads", 1) == 1:
        return seconds_of(step, setting["device"])
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def plain_of(seconds: dict[str, float]) -> float:
    """Plain freezing in the faster of its layouts."""
    return min(taken for way, taken in seconds.items() if way.startswith("plain freezing"))


def cell(name: str, size: int, choice: str, setting: dict[str, Any]) -> dict[str, Any]:
    device = setting["device"]
    torch.manual_seed(0)
    model = build(name, setting["pixels"]).to(device)
    batch = nets.batch(name, size, setting["pixels"], device)
    if device == "cuda" and batch[0].dim() == 4:
        model = model.to(memory_format=torch.channels_last)
        batch = batch[0].to(memory_format=torch.channels_last), batch[1]
    loss, everything, chosen = loss_on(device), last_share(model, 1.0), chosen_of(choice, model)
    steps: dict[str, Callable[[], Any]] = {
        "full, eager": plain_loop(copy.deepcopy(model), batch, loss, everything),
        "plain freezing": plain_loop(copy.deepcopy(model), batch, loss, chosen),
    }
    if device == "cpu" and batch[0].dim() == 4:
        other = copy.deepcopy(model).to(memory_format=torch.channels_last)
        images = batch[0].to(memory_format=torch.channels_last)
        steps["plain freezing, channels-last"] = plain_loop(other, (images, batch[1]), loss, chosen)
    sessions = {}
    if device == "cuda":
        sessions["full, graphs"], steps["full, graphs"] = session(copy.deepcopy(model), batch, loss, everything, "graphs")
    for way in setting["ways"]:
        sessions[way], steps[way] = session(copy.deepcopy(model), batch, loss, chosen, way)
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for way, step in steps.items():
        for _ in range(WARM if way in sessions else 3):
            step()
    for _ in range(setting["repeats"]):
        for way, step in steps.items():
            row = [taken_by(step, setting) for _ in range(setting["in_a_row"])]
            taken[way].append(row[-1])  # by then the processor's caches hold this way's data
    seconds = {way: typical(several, device) for way, several in taken.items()}
    ran = {way: mine.engine for way, mine in sessions.items()}
    notes = {way: dict(mine.why_not) for way, mine in sessions.items()}
    for mine in sessions.values():
        mine.close()
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
    parser.add_argument("--ways", nargs="+", default=None, help="engines to try, like 'prefix, cache' or 'lean+graphs'")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
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
        setting |= {"threads": args.threads, "onnxruntime": find_spec("onnxruntime") is not None}
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
