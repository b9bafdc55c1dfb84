"""Random changes of training samples, so that a network does not learn them by heart. A seed repeats them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pliant.apps.data.inputs import AudioInputs, ImageInputs, Inputs, TextInputs
from pliant.apps.fewshot.views import RANDOM, Augment

CHOICES = ("none", "light", "flip")
_SHIFT = 0.1  # of the length of a sound
_BAND = 0.15  # of the bands, and of the frames, that are hidden
_WORDS = 0.1  # of a text's tokens that are left out


def augmented(batch: Tensor, inputs: Inputs, how: str, seed: list[int]) -> Tensor:
    """The batch with every sample changed at random: images move and change brightness (and are mirrored, with "flip"), sounds
    move and lose a stretch and some bands, texts lose words. Arrays stay as they are."""
    if how == "none":
        return batch
    random = np.random.default_rng(seed)
    if isinstance(inputs, ImageInputs):
        mean, std = (torch.tensor(part).reshape(-1, 1, 1).to(batch) for part in (inputs.mean, inputs.std))
        numbers = random.random((len(batch), RANDOM))
        return (Augment(flip=how == "flip")((batch * std + mean).clamp(0, 1), numbers) - mean) / std
    if isinstance(inputs, AudioInputs):
        return torch.stack([_changed_sound(one, random) for one in batch])
    if isinstance(inputs, TextInputs):
        dropped = torch.from_numpy(random.random(tuple(batch.shape)) < _WORDS).to(batch.device)
        dropped[:, 0] = False  # a text keeps at least one token; many models begin with one that stands for all
        return torch.where(dropped, torch.full_like(batch, inputs.pad), batch)
    return batch


def _changed_sound(sound: Tensor, random: np.random.Generator) -> Tensor:
    frames = sound.shape[-1]
    by = int(random.integers(-int(_SHIFT * frames), int(_SHIFT * frames) + 1))
    out = torch.zeros_like(sound)
    out[..., max(by, 0) : frames + min(by, 0)] = sound[..., max(-by, 0) : frames - max(by, 0)]
    if sound.dim() > 1:
        bands = sound.shape[-2]
        for size, place in ((bands, -2), (frames, -1)):
            wide = int(random.integers(0, max(int(_BAND * size), 1) + 1))
            start = int(random.integers(0, size - wide + 1))
            out.narrow(place, start, wide).zero_()
    return out
