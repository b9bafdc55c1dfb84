"""Packed image sets: JPEG bytes of square images, labels and a split (0 train, 1 validation, 2 test) in one .npz file."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from pliant.data import Split

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's weights expect it


def folder(given: Path | None) -> Path:
    """Where data and weights lie: `--data`, else $PLIANT_DATA."""
    found = given or (Path(os.environ["PLIANT_DATA"]) if os.environ.get("PLIANT_DATA") else None)
    if found is None or not found.is_dir():
        what = f"{found} is no folder" if found else "none was given"
        raise SystemExit(
            f"this benchmark needs a folder with data and weights, and {what}: give --data DIR or set PLIANT_DATA."
        )
    return found


def need(path: Path) -> Path:
    if not path.exists():
        raise SystemExit(f"missing: {path.name} (looked in {path.parent.name}/ of the data folder).")
    return path


def read(path: Path, pixels: int, device: str, validation: float = 0.2, seed: int = 0) -> tuple[dict[str, Split], int]:
    """The three splits as normalised tensors, and the number of classes. Validation is cut from train where there is none."""
    from PIL import Image

    with np.load(need(path)) as file:
        data, offset, label, split = file["data"], file["offset"], file["label"].astype(np.int64), file["split"].copy()
        classes = len(file["classes"])
    if not (split == 1).any():
        rng = np.random.default_rng(seed)
        for k in range(classes):  # the same share of every class
            mine = np.flatnonzero((split == 0) & (label == k))
            split[rng.permutation(mine)[: round(validation * len(mine))]] = 1
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))
    out = {}
    for name, number in (("train", 0), ("validation", 1), ("test", 2)):
        at = np.flatnonzero(split == number)
        raw = [np.asarray(Image.open(io.BytesIO(data[offset[i] : offset[i + 1]].tobytes())).convert("RGB")) for i in at]
        images = torch.from_numpy(np.stack(raw)).permute(0, 3, 1, 2).to(device).float() / 255
        if images.shape[-1] != pixels:
            images = F.interpolate(images, size=(pixels, pixels), mode="bilinear", antialias=True)
        out[name] = Split((images - mean) / std, torch.from_numpy(label[at]).to(device))
    return out, classes
