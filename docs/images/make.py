"""Trains three short runs on handwritten digits, writes their reports, and photographs them in Chromium for the documents.

python docs/images/make.py [FOLDER]        # the runs stay in FOLDER, runs/report unless told otherwise
"""

from __future__ import annotations

import shutil
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from playwright.sync_api import sync_playwright
from torch import nn

from pliant import Policy, Session, recipes, schedule
from pliant.apps import data, report
from pliant.apps.layer_report import layer_report
from pliant.apps.models import efficientnet_lite0
from pliant.session import run_log as runlog

HERE = Path(__file__).parent
STEPS, BATCH, SIZE = 120, 16, 32


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@torch.inference_mode()
def evaluate(model: nn.Module, split: data.Split, step: int, log: Path) -> None:
    was = model.training
    model.eval()
    scores = torch.cat([model(images) for images in split.images.split(50)])
    model.train(was)
    hits, value = (scores.argmax(1) == split.labels).float().mean(), F.cross_entropy(scores, split.labels)
    line = {"event": "evaluated", "step": step, "split": "validation", "accuracy": float(hits), "loss": float(value)}
    runlog.append(log, [line])


def train(folder: Path, policy: Policy) -> None:
    """One run of a few hundred steps, evaluated now and then."""
    digits, log = data.digits(SIZE), folder / "run.jsonl"
    torch.manual_seed(0)
    model = efficientnet_lite0(digits.classes, pretrained=True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = list(islice(data.batches(digits.train, BATCH, seed=0), STEPS))
    small = data.Split(digits.test.images[:300], digits.test.labels[:300])
    with Session(model, optimizer, loss, policy, clip=1.0, log=log, total_steps=STEPS) as session:
        evaluate(model, small, 0, log)
        for number, batch in enumerate(batches, 1):
            session.step(batch)
            if number % 20 == 0:
                evaluate(model, small, number, log)
    if policy.name == "pliant":
        found = layer_report(model, optimizer, loss, batches[0])
        runlog.append(log, [{"event": "roofline", **found.to_json()}])


def photograph(
    page: Path, name: str, width: int, height: int, dark: bool = False, scale: float = 1.0, at: str = "", hover: str = ""
) -> None:
    """What a window of this size shows, scrolled to the element `at`, with the pointer on `hover`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        scheme = "dark" if dark else "light"
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale)
        tab.goto(page.as_uri())
        if at:
            tab.locator(at).first.evaluate("e => scrollTo(0, e.getBoundingClientRect().top - 24)")
        if hover:
            tab.locator(hover).first.hover()
        tab.screenshot(path=HERE / name)
        browser.close()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/report")
    often = schedule.every(steps=20)
    runs = {
        "full": recipes.full(),
        "pliant-0.5": recipes.pliant(time=0.5, memory="30MB", when=often),
        "head": recipes.head(),
    }
    for name, policy in runs.items():
        if not (folder / name / "run.jsonl").exists():
            train(folder / name, policy)
    one, all_ = folder / "one.html", folder / "all.html"
    one.write_text(report.page([report.load(folder / "pliant-0.5")]))
    all_.write_text(report.page([report.load(folder / name) for name in runs]))
    cell = ".map tbody tr:nth-last-child(8) td:nth-child(4)"
    photograph(one, "report-light.png", 1100, 1240)
    photograph(one, "report-dark.png", 1100, 1420, dark=True, at="section:has(.map)", hover=cell)
    photograph(one, "report-phone.png", 400, 1000, scale=1.5)
    photograph(all_, "report-compare.png", 1100, 720)


if __name__ == "__main__":
    main()
