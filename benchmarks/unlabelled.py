"""A stream without labels: corruptions come one after another, and the network adapts to each batch as it comes.

    python benchmarks/unlabelled.py --data DIR            # one CPU thread: some minutes; --device cuda
    python benchmarks/unlabelled.py --data DIR --quick    # a few small batches

The network is tuned as in `shift.py`. Every batch is classified once, by the forward pass that also adapts the network (by the
running network for `nothing`), and is never seen again. Errors are over the whole stream, and times are of a batch.

    nothing        the tuned network in evaluation mode
    statistics     batch norms use the statistics of each batch; nothing trains
    tent           `recipes.tent` with `losses.entropy`
    gala           `recipes.gala` with `losses.pseudo_labels`
    all            `recipes.full` with `losses.entropy`
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from statistics import median
from typing import Any

import packed
import record
import shift_data as worlds
import torch
import transfer_tasks as tasks
from torch import Tensor, nn
from training import clock

from pliant import Session, losses, recipes

WAYS = {
    "nothing": None,
    "statistics": None,
    "tent": (recipes.tent, losses.entropy),
    "gala": (recipes.gala, losses.pseudo_labels),
    "all": (recipes.full, losses.entropy),
}


class Unlabelled:
    """A loss that needs no labels, and keeps the predictions of its last batch."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.logits = loss, torch.empty(0)

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        logits = model(images)
        if logits.requires_grad:  # the step itself, which comes after any probe
            self.logits = logits.detach()
        return self.loss(logits)


def stream(setting: dict[str, Any], cache: Path) -> list[tuple[Tensor, Tensor]]:
    """The same images under one corruption after another, in batches."""
    out = []
    for shift in setting["shifts"]:
        task = worlds.world(setting["network"], setting["set"], shift, 1, 0, setting, cache)
        order = torch.randperm(len(task.test), generator=torch.Generator().manual_seed(0))[: setting["many"] * setting["batch"]]
        for some in order.to(task.test.labels.device).split(setting["batch"]):
            out.append((task.shown(task.test.images, some), task.test.labels[some]))
    return out


def run(way: str, lr: float, batches: list[tuple[Tensor, Tensor]], setting: dict[str, Any], cache: Path) -> dict[str, Any]:
    """One way over the whole stream."""
    model = worlds.network(setting["network"], setting["set"], "noise", setting["outputs"], setting, cache)
    model.to(setting["device"]).train(way != "nothing")
    wrong, seconds, session = 0, [], None
    if WAYS[way] is not None:
        recipe, loss = WAYS[way]
        unlabelled = Unlabelled(loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        session = Session(model, optimizer, unlabelled, recipe(), engine="plain", norm="as-is", undo=False)
    for images, labels in batches:
        begun = clock(setting["device"])
        if session is not None:
            session.step(images)
            logits = unlabelled.logits
        else:
            with torch.no_grad():
                logits = model(images)
        seconds.append(clock(setting["device"]) - begun)
        wrong += int((logits.argmax(1) != labels).sum())
    if session is not None:
        session.close()
    error = wrong / sum(len(labels) for _, labels in batches)
    return {"way": way, "batch": setting["batch"], "lr": lr, "error": error, "seconds": median(seconds)}


def table(done: list[dict[str, Any]]) -> str:
    rows = ["| way | batch | rate | online error, percent | ms per batch |", "|---|---|---|---|---|"]
    for c in done:
        rate = "–" if WAYS[c["way"]] is None else c["lr"]
        rows.append(f"| {c['way']} | {c['batch']} | {rate} | {100 * c['error']:.1f} | {1e3 * c['seconds']:.0f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = record.options(__doc__)
    packed.option(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=None, help="sizes (8 32)")
    parser.add_argument("--many", type=int, default=None, help="batches of each corruption (8)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001], help="learning rates")
    parser.add_argument("--cache", type=Path, default=None, help="folder for decoded images and tuned networks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks.FOLDER[0] = packed.folder(args.data)
    setting: dict[str, Any] = {
        "device": args.device,
        "network": "mobilenet_v2",
        "set": "pets",
        "pixels": 64 if args.quick else 128,
    }
    setting |= {
        "classes": 8 if args.quick else None,
        "images": 10 if args.quick else None,
        "source_epochs": 3 if args.quick else 12,
    }
    setting |= {"shifts": ["noise", "contrast", "blur"], "many": args.many or (2 if args.quick else 8)}
    sizes = args.batches or ([8] if args.quick else [8, 32])
    parts = (str(setting[name]) for name in ("pixels", "classes", "images", "source_epochs"))
    cache = (args.cache or Path(os.environ.get("TMPDIR", "/tmp")) / "pliant_shift") / "_".join(parts)
    done: list[dict[str, Any]] = []
    for size in sizes:
        setting["batch"] = size
        setting["outputs"] = worlds.world("mobilenet_v2", "pets", "noise", 1, 0, setting, cache).classes
        batches = stream(setting, cache)
        for way in WAYS:
            for lr in args.rates if WAYS[way] is not None else args.rates[:1]:
                done.append(run(way, lr, batches, setting, cache))
                print(done[-1], flush=True)
    kept = {name: value for name, value in setting.items() if name not in ("batch", "outputs")}
    record.save(record.out(args, "unlabelled"), kept, done, table(done))
    print(table(done))


if __name__ == "__main__":
    main()
