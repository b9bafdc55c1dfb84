"""Toy models that are adversarial on purpose. Each case builds a fresh model, its loss and a batch, the same every time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    """`head` is what the head must be found to be; `unused` and `frozen` are what can never be scored."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    head: tuple[str, ...]
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def make(self, seed: int = 0) -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
        torch.manual_seed(seed)
        model = self.build()
        torch.manual_seed(seed + 1)
        return model, self.loss, self.batch()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of all that a probe could leave behind: weights, buffers, gradients, optimizer, random states, modes, hooks."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}{value.requires_grad}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                digest.update(repr(key).encode())
                feed(entry)
        elif isinstance(value, (list, tuple)):
            digest.update(str(len(value)).encode())
            for entry in value:
                feed(entry)
        elif isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        else:
            digest.update(repr(value).encode())

    for name, param in model.named_parameters():
        feed([name, param, param.grad, len(param._backward_hooks or ()), len(param._post_accumulate_grad_hooks or ())])
    feed(dict(model.named_buffers()))
    for name, module in model.named_modules():
        feed([name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks)])
    feed(optimizer.state_dict())
    feed([torch.get_rng_state(), np.random.get_state(), random.getstate()])
    return digest.hexdigest()


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))


def _vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 5), torch.randint(0, 4, (6,))


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


class WithUnused(nn.Module):
    """A multi-layer perceptron with a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(5, 7), nn.Linear(3, 3), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.first(x)))


def conv_net() -> nn.Module:
    """Convolution, norm, in-place activation, depthwise and grouped convolution, dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(inplace=True),
        nn.Conv2d(8, 12, 1, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(12, 4),
    )


class Thrice(nn.Module):
    """One module that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.out(x)


class Tied(nn.Module):
    """Integer inputs; the embedding is the output matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(F.gelu(self.mix(self.embed(ids)))))


def _tokens() -> torch.Tensor:
    return torch.randint(0, 11, (6, 4))


def _next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


class Block(nn.Module):
    """A residual block whose shortcut has weights of its own, and a concatenation behind it."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)
        self.shortcut = nn.Conv2d(i, o, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)) + self.shortcut(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, 4), Block(4, 4)])
        self.side = nn.Conv2d(4, 2, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        both = torch.cat([self.blocks[1](x), self.side(x)], dim=1)
        return self.head(both.mean((2, 3)))


class Misordered(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a_last, self.b_first, self.c_middle = nn.Linear(6, 4), nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a_last(F.relu(self.c_middle(F.relu(self.b_first(x)))))


class Functional(nn.Module):
    """Bare parameters: transposed, sliced, viewed and cast on their way; a temperature on the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 6) * 0.3)
        self.shift = nn.Parameter(torch.randn(8) * 0.1)
        self.v = nn.Parameter((torch.randn(24) * 0.3).double())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(F.linear(x, self.w.t()) + self.shift[:6])
        return (hidden @ self.v.float().view(6, 4)) * self.scale


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Dict in, object out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(1, 6, 8) * 0.1)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(2))
        self.norm, self.classifier = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        x = self.embed(ids) + self.position[:, : ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.classifier(self.norm(x).mean(1)), hidden=x)


def _dict_tokens() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 11, (6, 4)), "label": torch.randint(0, 3, (6,))}


def _dict_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).logits, batch["label"])


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    target: torch.Tensor


class TwoInputs(nn.Module):
    """Two inputs, tuple out, and a part that the user froze."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.join = nn.Linear(5, 4), nn.Linear(3, 4), nn.Linear(8, 2)
        self.left.requires_grad_(False)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([torch.tanh(self.left(left)), torch.tanh(self.right(right))], dim=1)
        return self.join(both), both


def _pair() -> Pair:
    return Pair(torch.randn(6, 5), torch.randn(6, 3), torch.randn(6, 2))


def _pair_loss(model: nn.Module, batch: Pair) -> torch.Tensor:
    return F.mse_loss(model(batch.left, batch.right)[0], batch.target)


class Checkpointed(nn.Module):
    """Recomputes its middle in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = checkpoint(lambda t: F.gelu(self.middle(t)), x, use_reentrant=False)
        return self.head(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return 2 * x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return 2 * grad @ w.t(), 2 * x.t() @ grad


class Custom(nn.Module):
    """An autograd function written by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 6), nn.Linear(6, 4)
        self.w = nn.Parameter(torch.randn(6, 6) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(Double.apply(torch.tanh(self.before(x)), self.w))


ZOO = {
    case.name: case
    for case in (
        Case("unused", WithUnused, _vectors, _classify, ("last.bias", "last.weight"), ("spare.weight", "spare.bias")),
        Case("conv_net", conv_net, _images, _classify, ("10.bias", "10.weight")),
        Case("thrice", Thrice, _vectors, _classify, ("out.bias", "out.weight")),
        Case("tied", Tied, _tokens, _next_token, ("norm.weight", "norm.bias")),
        Case("branches", Branches, _images, _classify, ("head.bias", "head.weight")),
        Case("misordered", Misordered, _vectors, _classify, ("a_last.bias", "a_last.weight")),
        Case("functional", Functional, _vectors, _classify, ("scale", "v")),
        Case("transformer", Transformer, _dict_tokens, _dict_loss, ("classifier.bias", "classifier.weight")),
        Case("two_inputs", TwoInputs, _pair, _pair_loss, ("join.bias", "join.weight"), (), ("left.weight", "left.bias")),
        Case("checkpointed", Checkpointed, _vectors, _classify, ("head.bias", "head.weight")),
        Case("custom", Custom, _vectors, _classify, ("after.bias", "after.weight")),
    )
}


def mid_training(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """A model in training mode with a used optimizer and gradients that stand."""
    model, loss, batch = case.make()
    optimizer = adamw(model.train())
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    loss(model, batch).backward()
    random.seed(3)
    np.random.seed(4)
    return model, optimizer, loss, batch


def failing(loss: Callable[[nn.Module, Any], torch.Tensor], at_call: int) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The loss, until its n-th call makes a mess of modes, flags and random states and raises."""
    calls = 0

    def fail(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value = loss(model, batch)
        if calls < at_call:
            return value
        model.eval().requires_grad_(False)
        random.random(), np.random.rand(), torch.rand(1)
        raise RuntimeError("midway")

    return fail
