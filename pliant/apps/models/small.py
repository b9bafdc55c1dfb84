"""Two small networks that start from random weights: one for text, one for sound. They need no download."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

BUCKETS = 1 << 14  # ids of hashed words; 0 is for padding
_WIDE = 64


class TextSmall(nn.Module):
    """A mean of word vectors, then two linear layers. Words are hashed to ids; id 0 is padding."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(BUCKETS, _WIDE, padding_idx=0)
        self.hidden = nn.Linear(_WIDE, _WIDE)
        self.classifier = nn.Linear(_WIDE, classes)

    def forward(self, ids: Tensor) -> Tensor:
        known = (ids != 0).unsqueeze(-1).to(self.words.weight.dtype)
        mean = (self.words(ids) * known).sum(1) / known.sum(1).clamp(min=1)
        return self.classifier(torch.relu(self.hidden(mean)))


class AudioSmall(nn.Module):
    """Four convolutions over a spectrogram (1 × bands × frames), then the mean over all places."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = (1, 16, 32, 64, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, spectrogram: Tensor) -> Tensor:
        return self.classifier(self.features(spectrogram).mean((2, 3)))


def text_small(classes: int = 2, pretrained: bool = False) -> TextSmall:
    """The network for text. There are no pretrained weights."""
    return TextSmall(classes)


def audio_small(classes: int = 2, pretrained: bool = False) -> AudioSmall:
    """The network for sound. There are no pretrained weights."""
    return AudioSmall(classes)


SMALL: dict[str, Callable[..., nn.Module]] = {"text_small": text_small, "audio_small": audio_small}
