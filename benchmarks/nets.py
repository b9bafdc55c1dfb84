"""The networks of the benchmarks, in their published shapes; weights are random unless a benchmark loads some.

`build(name, pixels)` returns a network, `batch(name, …)` random inputs and labels for it. `loss` is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 10
WORDS, TOKENS = 8000, 64


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


class InvertedResidual(nn.Module):
    """MobileNetV2's block, with torchvision's parameter names."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inputs * expand
        layers: list[nn.Module] = []
        if expand > 1:
            layers.append(nn.Sequential(_conv(inputs, wide, 1), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)))
        layers.append(nn.Sequential(_conv(wide, wide, 3, stride, wide), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)))
        self.conv = nn.Sequential(*layers, _conv(wide, outputs, 1), nn.BatchNorm2d(outputs))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.skip else self.conv(x)


def _eights(channels: float) -> int:
    """The nearest multiple of 8, but at least nine tenths: how torchvision rounds widths."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


class MobileNetV2(nn.Module):
    """arXiv 1801.04381. `wide` multiplies the number of channels; `recompute` uses activation checkpoints for every block."""

    def __init__(self, classes: int = CLASSES, recompute: bool = False, wide: float = 1.0) -> None:
        super().__init__()
        stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
        width, last = _eights(32 * wide), _eights(1280 * max(1.0, wide))
        features: list[nn.Module] = [nn.Sequential(_conv(3, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU6(inplace=True))]
        for expand, outputs, repeats, stride in stages:
            for i in range(repeats):
                features.append(InvertedResidual(width, _eights(outputs * wide), stride if i == 0 else 1, expand))
                width = _eights(outputs * wide)
        features.append(nn.Sequential(_conv(width, last, 1), nn.BatchNorm2d(last), nn.ReLU6(inplace=True)))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Linear(last, classes)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.features:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.classifier(x.mean((2, 3)))


class FoldedResidual(nn.Module):
    """An inverted residual block as it is deployed: batch norms are folded into convolutions with biases."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inputs * expand
        layers: list[nn.Module] = [nn.Conv2d(inputs, wide, 1), nn.ReLU6(inplace=True)] if expand > 1 else []
        layers += [nn.Conv2d(wide, wide, size, stride, size // 2, groups=wide), nn.ReLU6(inplace=True)]
        self.conv = nn.Sequential(*layers, nn.Conv2d(wide, outputs, 1))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.skip else self.conv(x)


class MCUNet(nn.Module):
    """A network for microcontrollers, like MCUNet (arXiv 2007.10319): narrow, kernels of three sizes, no norms."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        # For each stage: outputs, stride, and for each block the size of its kernel and its expansion.
        stages: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = (
            (8, 1, ((3, 1),)),
            (16, 2, ((7, 3), (3, 6))),
            (24, 2, ((7, 3), (5, 6))),
            (40, 2, ((7, 6), (5, 4), (3, 4))),
            (48, 1, ((5, 5), (5, 4))),
            (96, 2, ((7, 4), (5, 4), (3, 4))),
            (160, 1, ((7, 5),)),
        )
        features: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU6(inplace=True))]
        width = 16
        for outputs, stride, kinds in stages:
            for i, (size, expand) in enumerate(kinds):
                features.append(FoldedResidual(width, outputs, size, stride if i == 0 else 1, expand))
                width = outputs
        features.append(nn.Sequential(nn.Conv2d(width, 320, 1), nn.ReLU6(inplace=True)))
        self.features, self.head = nn.Sequential(*features), nn.Linear(320, classes)
        for module in self.modules():  # without norms, activations vanish with PyTorch's default initialisation
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(y + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """arXiv 1512.03385."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        self.layers = nn.Sequential(*(nn.Sequential(BasicBlock(i, o, s), BasicBlock(o, o, 1)) for i, o, s in widths))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        return self.fc(self.layers(x).mean((2, 3)))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with torchvision's names (and its stride on the second)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """arXiv 1512.03385, with torchvision's names."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for i, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            first = Bottleneck(inputs, width, 2 if i else 1)
            inputs = 4 * width
            setattr(self, f"layer{i + 1}", nn.Sequential(first, *(Bottleneck(inputs, width, 1) for _ in range(depth - 1))))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class TransformerBlock(nn.Module):
    """Layer norm first (as in ViT) or last (as in BERT); fused attention."""

    def __init__(self, width: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class ViT(nn.Module):
    """ViT-tiny: width 192, 12 blocks, 3 heads, patches of 16 (arXiv 2010.11929, 2012.12877)."""

    def __init__(self, pixels: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 192, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 192))
        self.position = nn.Parameter(torch.randn(1, (pixels // 16) ** 2 + 1, 192) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(192, 3, norm_first=True) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class TextEncoder(nn.Module):
    """Six blocks of width 384 with 12 heads over token ids: the shape of MiniLM-L6 (arXiv 2002.10957)."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(WORDS, 384), nn.Embedding(TOKENS, 384), nn.LayerNorm(384)
        self.blocks = nn.Sequential(*(TransformerBlock(384, 12, norm_first=False) for _ in range(6)))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(384, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        return self.head(self.dropout(self.blocks(x).mean(1)))


class ConvNeXtBlock(nn.Module):
    """A wide depthwise convolution, then a two-layer perceptron per pixel, scaled per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.spread(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt's shape (arXiv 2201.03545) at the size of its smallest variant (atto: 40–320 wide, 2-2-6-2 blocks)."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, 4)]
        for i, (width, depth) in enumerate(((40, 2), (80, 2), (160, 6), (320, 2))):
            if i:
                layers += [nn.GroupNorm(1, width // 2), nn.Conv2d(width // 2, width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(320), nn.Linear(320, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))


NETS: dict[str, Callable[[int], nn.Module]] = {
    "mobilenet_v2": lambda pixels: MobileNetV2(),
    "mobilenet_v2, checkpointed": lambda pixels: MobileNetV2(recompute=True),
    "resnet18": lambda pixels: ResNet18(),
    "vit_tiny": lambda pixels: ViT(pixels),
    "text_encoder": lambda pixels: TextEncoder(),
    "convnext": lambda pixels: ConvNeXt(),
}
# The networks of memory.py.
MEMORY_NETS: dict[str, Callable[[int], nn.Module]] = {
    "mobilenet_v2": NETS["mobilenet_v2"],
    "mobilenet_v2_0.35": lambda pixels: MobileNetV2(wide=0.35),
    "mcunet": lambda pixels: MCUNet(),
    "resnet50": lambda pixels: ResNet50(),
    "vit_tiny": NETS["vit_tiny"],
    "text_encoder": NETS["text_encoder"],
}


def build(name: str, pixels: int) -> nn.Module:
    """The network by name, in training mode. Its weights depend only on torch's random state."""
    return (NETS | MEMORY_NETS)[name](pixels)


def batch(name: str, size: int, pixels: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Random images or token ids, and labels."""
    labels = torch.randint(CLASSES, (size,), device=device)
    if name == "text_encoder":
        return torch.randint(WORDS, (size, TOKENS), device=device), labels
    return torch.randn(size, 3, pixels, pixels, device=device), labels


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)
