"""Few-shot adaptation: a handful of pictures per thing, and the network knows your things.

Needs: pip install 'pliant[demo,images]'.

Take some pictures of each thing with a webcam, one folder per thing, for example with
`ffmpeg -f v4l2 -i /dev/video0 -frames:v 1 shots/mug/1.jpg`. Then put new ones into another folder:

    python examples/webcam_few_shot.py --shots shots/ --new new/ --memory 1MB
    python examples/webcam_few_shot.py --quick      # small coloured drawings that this file makes
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pliant import fewshot, images, models, recipes


def draw(folder: Path, each: int, seed: int) -> None:
    """Things of three colours at random places, in a noisy room."""
    random = np.random.default_rng(seed)
    for name, colour in {"mug": (200, 60, 50), "plant": (50, 160, 70), "book": (60, 80, 200)}.items():
        (folder / name).mkdir(parents=True)
        for i in range(each):
            picture = random.integers(90, 150, (64, 64, 3), dtype=np.uint8)
            x, y = random.integers(4, 28, 2)
            picture[y : y + 32, x : x + 32] = colour
            Image.fromarray(picture).save(folder / name / f"{i}.png")


parser = argparse.ArgumentParser()
parser.add_argument("--shots", type=Path, help="one folder of pictures per thing")
parser.add_argument("--new", type=Path, help="new pictures, in folders with the same names")
parser.add_argument("--memory", default="1MB", help="what a step may take beyond inference")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as place:
    shots, new = (Path(place, "shots"), Path(place, "new")) if options.quick else (options.shots, options.new)
    if options.quick:
        draw(shots, 3, seed=0)
        draw(new, 2, seed=1)
    if shots is None or new is None:
        parser.error("give --shots and --new, or --quick")
    size, steps = (32, 3) if options.quick else (128, 40)
    torch.manual_seed(0)
    backbone = models.efficientnet_lite0(pretrained=True)
    known, unknown = images.load(shots, size), images.load(new, size)
    policy = recipes.tinytrain(memory=None if options.quick else options.memory, macs=0.3)
    done = fewshot.adapt(backbone, known, policy=policy, steps=steps, query=unknown, pixel_stats=models.PIXEL_STATS)
    names = [unknown.classes[label] for label in unknown.labels]
    for truth, guess in zip(names, done.predictions.tolist(), strict=True):
        print(f"{truth}: taken for {done.classes[guess]}")
