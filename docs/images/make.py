"""Draws the pictures of the documents from short runs on handwritten digits.

python docs/images/make.py [FOLDER]        # the runs stay in FOLDER; default: runs/report

`what-trained.svg` needs nothing else. The screenshots of the report need Playwright and Chromium and are skipped without them.
"""

from __future__ import annotations

import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
import torch.nn.functional as F
from torch import nn

from pliant import Policy, Session, data, models, recipes, report, runlog, schedule

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


def train(folder: Path, policy: Policy, correct: bool = True) -> None:
    """One run of `STEPS` steps, evaluated every 20 steps."""
    digits, log = data.digits(SIZE), folder / "run.jsonl"
    torch.manual_seed(0)
    model = models.efficientnet_lite0(digits.classes, pretrained=True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = list(islice(data.batches(digits.train, BATCH, seed=0), STEPS))
    small = data.Split(digits.test.images[:300], digits.test.labels[:300])
    with Session(model, optimizer, loss, policy, clip=1.0, log=log, total_steps=STEPS, correct=correct) as session:
        evaluate(model, small, 0, log)
        for number, batch in enumerate(batches, 1):
            session.step(batch)
            if number % 20 == 0:
                evaluate(model, small, number, log)


# ---------------------------------------------------------------- layers × steps


LEFT, TOP, ROW, COLUMN = 196, 44, 7, 5  # pixels: margins, the height of a layer and the width of a step
INK, QUIET, FILL = "#1f2937", "#6b7280", "#0b5c8f"


def what_trained(log: Path, out: Path) -> None:
    """An SVG with a row for each layer, a column for each step, and a bar wherever the layer was trained."""
    lines = list(runlog.read(log))
    names = [*next(line for line in lines if line["event"] == "start")["units"]][::-1]  # the input first
    rounds: list[dict[str, Any]] = [line for line in lines if line["event"] == "round"]
    steps = max(line["step"] for line in lines if line["event"] == "step")
    width, height = LEFT + steps * COLUMN + 24, TOP + len(names) * ROW + 46
    bottom = TOP + len(names) * ROW
    shapes = [f'<rect width="{width}" height="{height}" fill="white"/>', _text(LEFT, 24, "Layers that were trained", 15, INK)]
    for k in range(len(names)):
        shapes.append(_box(LEFT, TOP + k * ROW, steps * COLUMN, ROW - 1, "#f3f4f6"))
    for now, later in zip(rounds, [*rounds[1:], {"step": steps}], strict=True):
        chosen = {unit["name"] for unit in now["units"]}
        wide = (later["step"] - now["step"]) * COLUMN
        for k in (k for k, name in enumerate(names) if name in chosen and wide):
            shapes.append(_box(LEFT + now["step"] * COLUMN, TOP + k * ROW, wide, ROW - 1, FILL))
    for now in rounds[1:]:
        x = LEFT + now["step"] * COLUMN
        shapes.append(f'<path d="M{x} {TOP - 4}V{bottom + 2}" stroke="white" stroke-width="2"/>')
    shown = 0
    for k, name in enumerate(names):
        if k in (0, len(names) - 1) or (k - shown >= 6 and len(names) - k > 4):
            shapes.append(_text(LEFT - 10, TOP + k * ROW + 7, name, 11, QUIET, "end"))
            shown = k
    for step in range(0, steps + 1, 20):
        shapes.append(_text(LEFT + step * COLUMN, bottom + 18, str(step), 11, QUIET, "middle"))
    shapes.append(_text(LEFT + steps * COLUMN / 2, bottom + 36, "optimizer step", 12, INK, "middle"))
    shapes.append(_text(LEFT - 10, 24, "layer", 12, INK, "end"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    )
    title = f"<title>{len(names)} layers, {steps} steps: a bar where a layer was trained</title>"
    out.write_text("\n".join([head, title, *shapes, "</svg>", ""]), encoding="utf-8")


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _text(x: float, y: float, words: str, size: int, fill: str, anchor: str = "start") -> str:
    font = f'font-family="system-ui, sans-serif" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {font}>{escape(words)}</text>'


# ---------------------------------------------------------------- screenshots


def photograph(
    page: Path, name: str, width: int, height: int, dark: bool = False, scale: float = 1.0, at: str = "", hover: str = ""
) -> None:
    """What a window of this size shows, scrolled to the element `at`, with the pointer on `hover`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        scheme = "dark" if dark else "light"
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale)
        tab.goto(page.absolute().as_uri())
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
    picture = folder / "picture"
    if not (picture / "run.jsonl").exists():
        train(picture, recipes.pliant(time=0.5, when=often, head_first=0), correct=False)  # no corrections
    what_trained(picture / "run.jsonl", HERE / "what-trained.svg")
    runs = {
        "pliant-0.5": recipes.pliant(time=0.5, memory="30MB", when=often, head_first=0),
        "full": recipes.full(),
        "head": recipes.head(),
    }
    if shutil.which("chromium") is None:
        print("No Chromium here: the screenshots of the report stay as they are.")
        return
    for name, policy in runs.items():
        if not (folder / name / "run.jsonl").exists():
            train(folder / name, policy)
    one, all_ = folder / "one.html", folder / "all.html"
    one.write_text(report.page([report.load(folder / "pliant-0.5")]), encoding="utf-8")
    all_.write_text(report.page([report.load(folder / name) for name in sorted(runs)]), encoding="utf-8")
    cell = ".map tbody tr:nth-last-child(8) td:nth-child(4)"
    photograph(one, "report-light.png", 1100, 1240)
    photograph(one, "report-dark.png", 1100, 1420, dark=True, at="section:has(.map)", hover=cell)
    photograph(one, "report-phone.png", 400, 1000, scale=1.5)
    photograph(all_, "report-compare.png", 1100, 720)


if __name__ == "__main__":
    main()
