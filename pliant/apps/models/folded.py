"""Three backbones for microcontrollers: inverted-residual networks whose batch norms are folded into their convolutions.

Folded means convolution and bias without batch norm: there are no statistics, so a batch of one image works. Input is
float NCHW, each pixel x in 0…255 normalised as (x/255 − 0.5) / 0.5. Trained at 128×128; any size from 32 up works.

Lin et al., "On-Device Training Under 256KB Memory", 2022, whose weights are the ones that `load_folded` reads; MCUNet, 2020;
Sandler et al., "MobileNetV2", 2018; Cai et al., "ProxylessNAS", 2019.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.core import schema
from pliant.runtime.sealed import check_tensors

FOLDED_PIXEL_STATS = (0.5, 0.5)
"""Mean and standard deviation of pixels in 0…1, the same for all three channels."""

STEM = 16  # channels before the first block
_TABLE = {"stem": [int], "blocks": [(int, int, int, int, int, bool, bool)], "feat": int, "classes": int}

BlockRow = tuple[int, int, int, int]  # kernel, stride, channels inside, channels out

# fmt: off
MCUNET_5FPS: tuple[BlockRow, ...] = (
    (3, 1, 16, 8),
    (3, 2, 32, 16), (3, 1, 48, 16),
    (7, 2, 48, 24), (3, 1, 120, 24),
    (3, 2, 120, 40), (7, 1, 160, 40), (5, 1, 160, 48), (3, 1, 144, 48), (3, 1, 192, 48),
    (7, 2, 240, 96), (5, 1, 384, 96), (5, 1, 384, 96), (3, 1, 576, 160),
)
MOBILENET_V2_035: tuple[BlockRow, ...] = (
    (3, 1, 16, 8),
    (3, 2, 48, 8), (3, 1, 48, 8),
    (3, 2, 48, 16), (3, 1, 96, 16), (3, 1, 96, 16),
    (3, 2, 96, 24), (3, 1, 144, 24), (3, 1, 144, 24), (3, 1, 144, 24), (3, 1, 144, 32), (3, 1, 192, 32), (3, 1, 192, 32),
    (3, 2, 192, 56), (3, 1, 336, 56), (3, 1, 336, 56), (3, 1, 336, 112),
)
PROXYLESS_03: tuple[BlockRow, ...] = (
    (3, 1, 16, 8),
    (5, 2, 24, 16), (3, 1, 48, 16),
    (7, 2, 48, 16), (3, 1, 48, 16), (5, 1, 48, 16), (5, 1, 48, 16),
    (7, 2, 96, 24), (5, 1, 72, 24), (5, 1, 72, 24), (5, 1, 72, 24),
    (5, 1, 144, 32), (5, 1, 96, 32), (5, 1, 96, 32), (5, 1, 96, 32),
    (7, 2, 192, 64), (7, 1, 384, 64), (7, 1, 192, 64), (7, 1, 192, 64), (7, 1, 384, 96),
)
# fmt: on

LAYERS = {"pw": "expand", "dw": "depthwise", "pl": "project"}  # of a block: names in the weight file → names in this module


def mcunet_5fps(classes: int = 1000, pretrained: bool = False) -> FoldedNet:
    """MCUNet for five frames a second on a microcontroller: 0.47 million parameters beside the classifier; random weights."""
    return _random("mcunet_5fps", MCUNET_5FPS, classes, pretrained)


def mobilenet_v2_035(classes: int = 1000, pretrained: bool = False) -> FoldedNet:
    """MobileNetV2 with 0.35 of its channels and no wide last layer: 0.24 million parameters beside the classifier; random."""
    return _random("mobilenet_v2_035", MOBILENET_V2_035, classes, pretrained)


def proxyless_03(classes: int = 1000, pretrained: bool = False) -> FoldedNet:
    """ProxylessNAS (mobile) with 0.3 of its channels: 0.33 million parameters beside the classifier; random weights."""
    return _random("proxyless_03", PROXYLESS_03, classes, pretrained)


def _random(name: str, rows: Sequence[BlockRow], classes: int, pretrained: bool) -> FoldedNet:
    if pretrained:
        raise ValueError(f"{name} comes without weights: give a weight file (.safetensors) instead of the name.")
    return FoldedNet(rows, classes)


class FoldedNet(nn.Module):
    """A stem, inverted-residual blocks from a table of rows, and a linear classifier on the mean of their output.

    >>> import torch
    >>> model = FoldedNet(MCUNET_5FPS, classes=10)
    >>> model.embed(torch.zeros(2, 3, 64, 64)).shape, model(torch.zeros(2, 3, 64, 64)).shape
    (torch.Size([2, 160]), torch.Size([2, 10]))
    """

    pixel_stats = FOLDED_PIXEL_STATS

    def __init__(self, rows: Sequence[BlockRow], classes: int = 1000, stem: int = STEM) -> None:
        super().__init__()
        self.stem = _conv(3, stem, kernel=3, stride=2, gain=2.0)
        blocks, channels = [], stem
        for kernel, stride, wide, out in rows:
            blocks.append(FoldedBlock(channels, wide, out, kernel, stride))
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.classifier = _classifier(channels, classes)

    def embed(self, images: Tensor) -> Tensor:
        """Images → one vector of features each."""
        return self.blocks(F.relu6(self.stem(images))).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Images → logits."""
        return self.classifier(self.embed(images))

    @property
    def arch(self) -> dict[str, Any]:
        """The table of blocks as weight files store it."""
        blocks = [block.arch for block in self.blocks if isinstance(block, FoldedBlock)]
        stem = [self.stem.in_channels, self.stem.out_channels, self.stem.kernel_size[0], self.stem.stride[0]]
        return {"stem": stem, "blocks": blocks, "feat": self.classifier.in_features, "classes": self.classifier.out_features}


class FoldedBlock(nn.Module):
    """Expand (1×1), depthwise (k×k), project (1×1); added to the input if the shapes agree."""

    def __init__(self, channels: int, wide: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.expand = _conv(channels, wide, gain=2.0) if wide != channels else None
        self.depthwise = _conv(wide, wide, kernel, stride, groups=wide, gain=2.0)
        self.project = _conv(wide, out)
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.residual else y

    @property
    def arch(self) -> list[int | bool]:
        conv = self.depthwise if self.expand is None else self.expand
        size = [conv.in_channels, self.depthwise.out_channels, self.project.out_channels]
        return [*size, self.depthwise.kernel_size[0], self.depthwise.stride[0], self.expand is not None, self.residual]


def _conv(channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, gain: float = 1.0) -> nn.Conv2d:
    """A convolution whose random weights preserve the variance of its input; `gain` is 2 before a ReLU."""
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups)
    nn.init.normal_(conv.weight, std=math.sqrt(gain * groups / (kernel * kernel * channels)))
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def _classifier(features: int, classes: int) -> nn.Linear:
    linear = nn.Linear(features, classes)
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    return linear


def load_folded(path: str | os.PathLike[str]) -> FoldedNet:
    """The network in a safetensors file: the table of blocks is in its metadata; the weights are floats, or int8 with one scale
    per output channel."""
    state, metadata = read_weights(path)
    if "arch" not in metadata:
        raise ValueError(
            f"{os.fspath(path)!r} holds no table of blocks ('arch' in its metadata), so it is not a folded network."
        )
    return folded(metadata["arch"], state, path)


def folded(arch: str, state: Mapping[str, Tensor], path: str | os.PathLike[str], classes: int | None = None) -> FoldedNet:
    """The network of an architecture in JSON with these weights, which come from the file `path`. With another number of
    `classes` the classifier is new."""
    saved = {_renamed(name): value for name, value in state.items()}
    try:
        table = json.loads(arch)
        schema.check(_TABLE, table, "arch")
        rows = [(kernel, stride, wide, out) for _, wide, out, kernel, stride, _, _ in table["blocks"]]
        with torch.device("meta"):  # it may be of any size
            sketch = FoldedNet(rows, table["classes"], stem=table["stem"][1])
    except (ValueError, IndexError, RuntimeError, ZeroDivisionError, RecursionError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)!r} has no table of blocks that can be read: {error}") from error
    if sketch.arch != table:
        raise ValueError(
            f"{os.fspath(path)!r} holds another kind of network: its blocks are not inverted-residual blocks like these."
        )
    shapes = {name: value.shape for name, value in sketch.state_dict().items()}
    if shapes != {name: value.shape for name, value in saved.items()}:
        raise ValueError(f"the weights in {os.fspath(path)!r} do not fit its table of blocks.")
    model = FoldedNet(rows, table["classes"], stem=table["stem"][1])
    model.load_state_dict(saved)
    if classes is not None and classes != table["classes"]:
        model.classifier = _classifier(table["feat"], classes)
    return model


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata; an int8 tensor with a `.scale` becomes float32."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = Path(path).read_bytes()
        held, metadata = load(content), check_tensors(content)
    except FileNotFoundError:
        raise ValueError(f"no file {os.fspath(path)!r}: give a weight file (.safetensors).") from None
    except OSError as error:
        raise ValueError(f"{os.fspath(path)!r} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a whole safetensors file: {error}. Copy it again.") from error
    scales = {name for name in held if name.endswith(".scale") and name.removesuffix(".scale") in held}
    out = {}
    for name in sorted(set(held) - scales):
        value = held[name]
        if f"{name}.scale" in scales:
            value = value.float() * held[f"{name}.scale"].float().reshape(-1, *[1] * (value.dim() - 1))
        out[name] = value
    return out, metadata


def _renamed(name: str) -> str:
    """The name in this module of a tensor in a weight file.

    >>> _renamed("blocks.3.pw.bias")
    'blocks.3.expand.bias'
    """
    return ".".join(LAYERS.get(word, word) for word in name.split("."))
