"""Two networks that are not for images, with the parameter names of their weight files: for sentences and for keywords."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))


class Joined(nn.Module):
    """A linear layer on the residual stream, with a layer norm after the sum."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(y))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(width), Joined(width, width)


class Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


class BertLayer(nn.Module):
    """Attention, then a two-layer perceptron, each followed by a layer norm."""

    def __init__(self, width: int, wide: int, heads: int) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = Attention(width), Dense(width, wide), Joined(wide, width)
        self.heads = heads

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        part = self.attention.self
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (part.query, part.key, part.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        x = self.attention.output(y, x)
        return self.output(F.gelu(self.intermediate.dense(x)), x)


class Embeddings(nn.Module):
    def __init__(self, words: int, places: int, width: int) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(words, width), nn.Embedding(places, width)
        self.token_type_embeddings, self.LayerNorm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        kinds = torch.zeros_like(places)
        x = self.word_embeddings(ids) + self.position_embeddings(places) + self.token_type_embeddings(kinds)
        return self.LayerNorm(x)


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2: six layers of BERT, and the mean over the tokens of a sentence. Token 0 is padding.

    Wang et al., "MiniLM", 2020, arXiv 2002.10957; Reimers and Gurevych, "Sentence-BERT", 2019.
    """

    def __init__(self, words: int, places: int, classes: int, width: int = 384, heads: int = 12, layers: int = 6) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(words, places, width), nn.Module()
        self.encoder.layer = nn.ModuleList(BertLayer(width, 4 * width, heads) for _ in range(layers))
        self.classifier = nn.Linear(width, classes)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids → one feature vector per sentence."""
        words = ids != 0
        x = self.embeddings(ids)
        for layer in self.encoder.layer:
            x = layer(x, words[:, None, None])
        weight = words[..., None].to(x.dtype)
        return (x * weight).sum(1) / weight.sum(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classifier(self.embed(ids))


class KeywordSpotter(nn.Module):
    """DS-CNN as in MLPerf Tiny, with folded norms: 49 × 10 coefficients of a second of sound. Pads like TensorFlow.

    Zhang et al., 2017, arXiv 1711.07128.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 64, (10, 4), 2)
        self.dw = nn.ModuleList(nn.Conv2d(64, 64, 3, 1, 1, groups=64) for _ in range(4))
        self.pw = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(4))
        self.classifier = nn.Linear(64, classes)

    def embed(self, sounds: Tensor) -> Tensor:
        x = F.relu(self.stem(F.pad(sounds, (1, 1, 4, 5))))
        for depthwise, pointwise in zip(self.dw, self.pw, strict=True):
            x = F.relu(pointwise(F.relu(depthwise(x))))
        return x.mean((2, 3))

    def forward(self, sounds: Tensor) -> Tensor:
        return self.classifier(self.embed(sounds))
