"""Law 8: under the lean engine every operation gives the outputs and gradients of plain autograd, to the last bit.

A batch norm at rest is the one exception: its gradients agree up to rounding.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from instances import laws
from oracle import differences
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pliant.engine.lean import bits, frozen_batchnorm, lean_pass, packed_tensors
from pliant.engine.lean.lean import Lean
from pliant.runtime.memory import LiveBytes

Tensors = dict[str, torch.Tensor]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
no_bf16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without it
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@dataclass(frozen=True)
class Op:
    """One operation: the shapes of its tensors for a batch of n with c channels (even) and s positions a side, and a call."""

    call: Callable[..., torch.Tensor]
    shapes: Callable[[int, int, int], dict[str, tuple[int, ...]]]
    exact: bool = True
    clips: bool = False  # PyTorch clips what is not a number in one way in whole vectors and in another in what is left over


def result(
    call: Callable[..., torch.Tensor], tensors: Tensors, wants: set[str], around: AbstractContextManager[Any], odd: bool = False
) -> dict[str, Any]:
    """What a call gives and the gradients of those of its tensors that want one, if its forward runs inside of `around`."""
    leaves = {name: tensor.detach().requires_grad_(name in wants) for name, tensor in tensors.items()}
    torch.manual_seed(0)
    with around:
        out = call(**leaves)
    torch.manual_seed(1)
    if out.requires_grad:
        grad = torch.randn_like(out)
        out.backward(strewn(grad, 11) if odd else grad)
    return {"out": out.detach(), "grads": {name: leaf.grad for name, leaf in leaves.items()}}


def strewn(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """A copy with what is no ordinary number here and there."""
    flat = tensor.detach().flatten().clone()
    for start, value in enumerate(SPECIAL):
        flat[start::step] = value
    return flat.view(tensor.shape)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out otherwise in memory."""
    if layout == "channels last" and tensor.dim() in (4, 5):
        return tensor.to(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
    if layout == "with gaps":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.mT.contiguous().mT if layout == "turned" and tensor.dim() > 1 else tensor


def close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    rel = {torch.float32: 1e-6, torch.float64: 1e-14}.get(a.dtype, 2**-7)
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=rel, atol=rel * scale, equal_nan=True)


# ---------------------------------------------------------------- operations


def conv(dims: int, transposed: bool = False, depthwise: bool = False, groups: int = 1, kernel: int = 3, **how: Any) -> Op:
    call = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")

    def shapes(n: int, c: int, s: int) -> dict[str, tuple[int, ...]]:
        weight = (c, c // (c if depthwise else groups), *[kernel] * dims)
        return {"input": (n, c, *[s] * dims), "weight": weight, "bias": (c,)}

    return Op(lambda input, weight, bias: call(input, weight, bias, groups=len(bias) if depthwise else groups, **how), shapes)


def same(call: Callable[..., torch.Tensor], dims: int = 2) -> Op:
    """Of one input."""
    return Op(lambda input: call(input), lambda n, c, s: {"input": (n, c, *[s] * dims)})


def in_place(call: Callable[..., Any]) -> Op:
    """Of something that may be written to."""
    return same(lambda input: call(input + 0))


def clips(op: Op) -> Op:
    return replace(op, clips=True)


def norm(call: Callable[..., torch.Tensor], shape: str, bias: bool = True) -> Op:
    def shapes(n: int, c: int, s: int) -> dict[str, tuple[int, ...]]:
        affine = {"channels": (c,), "last": (s,)}[shape]
        return {"input": (n, c, s, s), "weight": affine} | ({"bias": affine} if bias else {})

    return Op(call, shapes)


def at_rest(call: Callable[..., torch.Tensor], dims: int = 2, affine: bool = True) -> Op:
    """A batch norm on statistics that its tensors bring along."""

    def shapes(n: int, c: int, s: int) -> dict[str, tuple[int, ...]]:
        more: dict[str, tuple[int, ...]] = {"weight": (c,), "bias": (c,)} if affine else {}
        return {"input": (n, c, *[s] * dims), **more}

    return Op(call, shapes, exact=False)


def statistics(like: torch.Tensor, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, c, dtype=like.dtype), torch.linspace(0.5, 2, c, dtype=like.dtype)


def pair(call: Callable[..., torch.Tensor], a: str, b: str) -> Op:
    """Of two tensors, with the letters of their sizes."""
    return Op(call, lambda n, c, s: {k: tuple({"n": n, "c": c, "s": s}[x] for x in v) for k, v in (("a", a), ("b", b))})


OPS: dict[str, Op] = {
    "conv1d": conv(1),
    "conv2d": conv(2, padding=1),
    "conv2d, 1 × 1": conv(2, kernel=1),
    "conv2d, strided": conv(2, stride=2, padding=1),
    "conv2d, dilated": conv(2, dilation=2),
    "conv2d, same": conv(2, padding="same"),
    "conv2d, same and even": conv(2, kernel=2, padding="same"),
    "conv2d, grouped": conv(2, groups=2),
    "conv2d, depthwise": conv(2, depthwise=True, padding=1),
    "conv2d, no bias": Op(
        lambda input, weight: F.conv2d(input, weight), lambda n, c, s: {"input": (n, c, s, s), "weight": (3, c, 3, 3)}
    ),
    "conv2d, no batch": Op(
        lambda input, weight: F.conv2d(input[0], weight), lambda n, c, s: {"input": (n, c, s, s), "weight": (3, c, 3, 3)}
    ),
    "conv2d, by name": Op(
        lambda input, weight: F.conv2d(input=input, weight=weight),
        lambda n, c, s: {"input": (n, c, s, s), "weight": (3, c, 3, 3)},
    ),
    "conv3d": conv(3, padding=1),
    "conv1d, transposed": conv(1, transposed=True, stride=2),
    "conv2d, transposed": conv(2, transposed=True, stride=2, padding=1, output_padding=1),
    "conv3d, transposed": conv(3, transposed=True),
    "batch norm": norm(lambda input, weight, bias: F.batch_norm(input, None, None, weight, bias, True), "channels"),
    "batch norm, running": norm(
        lambda input, weight, bias: F.batch_norm(input, *statistics(input, len(bias)), weight, bias, training=True), "channels"
    ),
    "batch norm, not affine": same(lambda input: F.batch_norm(input, None, None, training=True)),
    "batch norm at rest": at_rest(lambda input, weight, bias: F.batch_norm(input, *statistics(input, len(bias)), weight, bias)),
    "batch norm at rest, flat": at_rest(
        lambda input, weight, bias: F.batch_norm(input, *statistics(input, len(bias)), weight, bias), dims=0
    ),
    "batch norm at rest, 3d": at_rest(
        lambda input, weight, bias: F.batch_norm(input, *statistics(input, len(bias)), weight, bias), dims=3
    ),
    "batch norm at rest, not affine": at_rest(
        lambda input: F.batch_norm(input, *statistics(input, input.shape[1]), eps=1e-3), affine=False
    ),
    "layer norm": norm(lambda input, weight, bias: F.layer_norm(input, weight.shape, weight, bias), "last"),
    "layer norm, by name": norm(
        lambda input, weight, bias: torch.layer_norm(input=input, normalized_shape=weight.shape, weight=weight, bias=bias),
        "last",
    ),
    "layer norm, in order": norm(lambda input, weight, bias: torch.layer_norm(input, weight.shape, weight, bias), "last"),
    "layer norm, not affine": same(lambda input: F.layer_norm(input, input.shape[-1:])),
    "group norm": norm(lambda input, weight, bias: F.group_norm(input, 2, weight, bias), "channels"),
    "group norm, in order": norm(lambda input, weight, bias: torch.group_norm(input, 2, weight, bias), "channels"),
    "rms norm": norm(lambda input, weight: F.rms_norm(input, weight.shape, weight), "last", bias=False),
    "relu": same(F.relu),
    "relu, torch": same(torch.relu),
    "relu, method": same(torch.Tensor.relu),
    "relu in place": in_place(lambda input: F.relu(input, inplace=True)),
    "relu in place, torch": in_place(torch.relu_),
    "relu in place, method": in_place(torch.Tensor.relu_),
    "relu6": clips(same(F.relu6)),
    "relu6 in place": clips(in_place(lambda input: F.relu6(input, inplace=True))),
    "hardtanh": clips(same(F.hardtanh)),
    "hardtanh in place": clips(in_place(F.hardtanh_)),
    "hardtanh in place, odd": clips(in_place(lambda input: F.hardtanh(input, -0.3, 0.7, inplace=True))),
    "hardsigmoid": same(F.hardsigmoid),
    "hardsigmoid in place": in_place(lambda input: F.hardsigmoid(input, inplace=True)),
    "leaky relu": same(F.leaky_relu),
    "leaky relu, downwards": same(lambda input: F.leaky_relu(input, -0.5)),
    "leaky relu in place": in_place(lambda input: F.leaky_relu(input, 0.3, inplace=True)),
    "dropout": same(F.dropout),
    "dropout, rarely": same(lambda input: F.dropout(input, 0.1)),
    "dropout, by name": same(lambda input: torch.dropout(input=input, p=0.3, train=True)),
    "dropout at rest": same(lambda input: F.dropout(input, 0.3, training=False)),
    "dropout of nothing": same(lambda input: F.dropout(input, 0.0)),
    "dropout of all": same(lambda input: F.dropout(input, 1.0)),
    "dropout in place": in_place(lambda input: F.dropout(input, 0.3, inplace=True)),
    "max pool 1d": same(lambda input: F.max_pool1d(input, 2), 1),
    "max pool 1d, no channels": same(lambda input: F.max_pool1d(input.flatten(1), 3, 2), 1),
    "max pool 2d": same(lambda input: F.max_pool2d(input, 2)),
    "max pool 2d, overlapping": same(lambda input: F.max_pool2d(input, 3, 1, 1)),
    "max pool 2d, no batch": same(lambda input: F.max_pool2d(input[0], 2)),
    "max pool 3d": same(lambda input: F.max_pool3d(input, 2), 3),
    "avg pool 1d": same(lambda input: F.avg_pool1d(input, 2), 1),
    "avg pool 2d": same(lambda input: F.avg_pool2d(input, 3, 2, 1)),
    "avg pool 2d, by name": same(lambda input: F.avg_pool2d(input=input, kernel_size=2)),
    "avg pool 3d": same(lambda input: F.avg_pool3d(input, 2), 3),
    "adaptive avg pool 1d": same(lambda input: F.adaptive_avg_pool1d(input, 3), 1),
    "adaptive avg pool 2d": same(lambda input: F.adaptive_avg_pool2d(input, (2, 3))),
    "adaptive avg pool 2d to one": same(lambda input: F.adaptive_avg_pool2d(input, 1)),
    "adaptive avg pool 3d": same(lambda input: F.adaptive_avg_pool3d(input, 2), 3),
    "adaptive max pool 2d": same(lambda input: F.adaptive_max_pool2d(input, 2)),
    "linear": Op(F.linear, lambda n, c, s: {"input": (n, s, c), "weight": (s, c), "bias": (s,)}),
    "matmul": pair(lambda a, b: a @ b, "ncs", "sc"),
    "embedding": Op(lambda weight: F.embedding(torch.arange(12) % len(weight), weight), lambda n, c, s: {"weight": (c, s)}),
    "attention": pair(lambda a, b: F.scaled_dot_product_attention(a, b, b), "ncss", "ncss"),
    "attention, causal": pair(lambda a, b: F.scaled_dot_product_attention(a, b, a, is_causal=True), "ncss", "ncss"),
    "softmax": same(lambda input: input.softmax(-1)),
    "gelu": same(F.gelu),
    "silu": same(F.silu),
    "silu in place": in_place(lambda input: F.silu(input, inplace=True)),
    "hardswish": same(F.hardswish),
    "sigmoid": same(torch.sigmoid),
    "residual": pair(lambda a, b: F.relu(a) + F.relu(a + b), "ncs", "ncs"),
    "residual in place": pair(lambda a, b: F.relu((a + b).add_(a), inplace=True), "ncs", "ncs"),
    "cat": pair(lambda a, b: F.relu(torch.cat([a, F.hardsigmoid(b)], 1)), "ncs", "ncs"),
    "product": pair(lambda a, b: a * F.hardsigmoid(b), "ncs", "ncs"),
    "cross entropy": same(lambda input: F.cross_entropy(input, torch.zeros_like(input[:, 0], dtype=torch.int64)), 1),
}


@no_bf16
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")
@pytest.mark.parametrize("name", OPS)
@laws(6)
@given(data=st.data())
def test_law_8_an_operation_gives_the_gradients_of_plain_autograd(name: str, data: st.DataObject) -> None:
    op = OPS[name]
    n, c, s = data.draw(st.integers(1, 3)), 2 * data.draw(st.integers(1, 3)), data.draw(st.integers(5, 9))
    if "norm" in name and "layer" not in name:
        n += 1  # one value for each channel is refused
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    dtype = data.draw(st.sampled_from(dtypes[: 3 if name == "avg pool 3d" else 4]))  # which knows no other
    layout = data.draw(st.sampled_from(["plain", "channels last", "with gaps", "turned"]))
    odd = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shapes = op.shapes(n, c, s)
    tensors = {key: laid_out(4 * torch.randn(shape, dtype=dtype), layout) for key, shape in shapes.items()}
    if odd:
        key = data.draw(st.sampled_from(sorted(tensors)))
        strewn_one = strewn(tensors[key], 7)
        tensors[key] = laid_out(strewn_one.nan_to_num(9.0, math.inf, -math.inf) if op.clips else strewn_one, layout)
    wants = data.draw(st.sets(st.sampled_from(sorted(tensors))))
    if name.startswith("group norm") and wants and layout == "channels last":
        wants.add("input")  # without it PyTorch itself ends the process
    mixed = torch.autocast("cpu", torch.bfloat16) if dtype == torch.float32 and data.draw(st.booleans()) else nullcontext()

    with mixed:
        plain = result(op.call, tensors, wants, nullcontext(), odd)
        piece, small = (
            data.draw(st.sampled_from([8, 64, bits._PIECE])),
            data.draw(st.sampled_from([1, packed_tensors.MIN_MASK_ELEMENTS])),
        )
        norm = patch.object(frozen_batchnorm, "_SMALL_NORM", data.draw(st.sampled_from([0, frozen_batchnorm._SMALL_NORM])))
        with (
            patch.object(bits, "_PIECE", piece),
            patch.object(packed_tensors, "MIN_MASK_ELEMENTS", small),
            norm,
            patch.object(lean_pass, "MIN_MASK_ELEMENTS", small),
        ):
            ours = result(op.call, tensors, wants, Lean(), odd)
    if op.exact or "weight" in wants:
        assert differences(ours, plain) == []
    else:
        assert differences(ours["out"], plain["out"]) == []
        assert [key for key in tensors if not close(ours["grads"][key], plain["grads"][key])] == []


BOUNDS = [
    (-1.0, 1.0),
    (0.0, 6.0),
    (0, 1),
    (0.0, 0.5),
    (0.1, 0.2),
    (-0.1, 0.3),
    (2.0, 3.0),
    (-3.0, -2.0),
    (16384.0, 16384.0 + 2**-9),
    (1, math.inf),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_law_8_a_clipped_value_passes_gradients_between_any_bounds(low: float, high: float, dtype: torch.dtype) -> None:
    edges = torch.tensor([b for b in (low, high) if math.isfinite(b)], dtype=torch.float64).to(dtype)
    up, down = (
        (torch.nextafter(edges, torch.full_like(edges, to)) for to in (1e9, -1e9)) if dtype in FLOATS[:2] else (edges, edges)
    )
    inside = torch.linspace(low, min(high, 1e9), 301, dtype=torch.float64).to(dtype)
    values = torch.cat([edges, up, down, inside, torch.tensor(SPECIAL[1:], dtype=dtype)])
    for inplace in (False, True):

        def call(input: torch.Tensor, inplace: bool = inplace) -> torch.Tensor:
            return F.hardtanh(input + 0, low, high, inplace=inplace)

        runs = [result(call, {"input": values}, {"input"}, around) for around in (nullcontext(), Lean())]
        assert differences(*runs) == []


def test_law_8_a_pool_in_three_dimensions_may_have_small_planes() -> None:
    tensors = {"input": torch.randn(1, 2, 40, 8, 8)}
    runs = [result(lambda input: F.max_pool3d(input, 2), tensors, {"input"}, around) for around in (nullcontext(), Lean())]
    assert differences(*runs) == []


# ---------------------------------------------------------------- models


class Squeeze(nn.Module):
    """A block as in MobileNet V3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.BatchNorm2d(2 * channels)
        self.deep = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.gate, self.back = nn.Conv2d(2 * channels, 2 * channels, 1), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(self.deep(F.relu6(self.norm(self.wide(x)), inplace=True)))
        return x + self.back(y * F.hardsigmoid(self.gate(F.adaptive_avg_pool2d(y, 1))))


class Attends(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True), need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return out if weights is None else out * weights.mean()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.conv(self.relu(self.norm(self.conv(x))))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Conv2d(4, 4, 3), Twice(), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(checkpoint(self.inside, F.relu(self.first(x)), use_reentrant=False), 0.2))


class Hooked(nn.Module):
    """Keeps what its convolution keeps in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3), Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda t: [t.detach().clone()], lambda kept: kept[0]):
            x = F.relu(self.first(x))
        return self.second(x)


def mobile() -> nn.Module:
    stem = nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    return nn.Sequential(*stem, Squeeze(8), Squeeze(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 4))


def resnet_stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Squeeze(8), nn.Flatten())


IMAGES, WORDS = (3, 4, 12, 12), (3, 9, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mobile": (mobile, IMAGES),
    "resnet stem": (resnet_stem, IMAGES),
    "twice": (Twice, IMAGES),
    "checkpointed": (Checkpointed, IMAGES),
    "hooks of its own": (Hooked, IMAGES),
    "attention": (lambda: Attends(False), WORDS),
    "attention with weights": (lambda: Attends(True), WORDS),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), WORDS),
    "encoder, gelu first": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu"),
        WORDS,
    ),
}


@pytest.fixture
def one_path() -> Iterator[None]:
    """Attention at rest that is wholly frozen takes another path, with other rounding, unless something watches functions."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def model_result(model: nn.Module, input: torch.Tensor, around: AbstractContextManager[Any]) -> dict[str, Any]:
    model = copy.deepcopy(model)
    out = result(lambda input: model(input), {"input": input}, {"input"} if input.requires_grad else set(), around)
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {**out, "params": grads, "buffers": dict(model.named_buffers())}


@no_bf16
@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("name", MODELS)
@laws(5)
@given(data=st.data())
def test_law_8_a_model_gets_the_gradients_of_plain_autograd(name: str, data: st.DataObject) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, input = build(), torch.randn(shape)
    names = [key for key, _ in model.named_parameters()]
    wants = data.draw(st.sets(st.sampled_from(names)))
    for key, param in model.named_parameters():
        param.requires_grad_(key in wants)
    model.train(data.draw(st.booleans()))
    rest = data.draw(st.booleans()) or not model.training
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and rest:
            module.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=data.draw(st.booleans())):
        input.requires_grad_(data.draw(st.booleans()) or not wants)
        plain, ours = (model_result(model, input, around) for around in (nullcontext(), Lean()))
    if rest and any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        assert differences(ours["out"], plain["out"]) == []
        for kind in ("grads", "params"):
            assert [key for key in plain[kind] if not near(ours[kind][key], plain[kind][key])] == []
    else:
        assert differences(ours, plain) == []


def near(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """What rounding in one norm leaves of two gradients further down."""
    return (a is None and b is None) or (a is not None and b is not None and bool((a - b).norm() <= 0.02 * b.norm() + 1e-6))


def test_a_mobile_net_is_lean_in_every_function() -> None:
    torch.manual_seed(0)
    model = mobile().requires_grad_(False)
    model[0].bias.requires_grad_(True)
    for training in (True, False):
        model.train(training)
        with Lean() as engine:
            model(torch.randn(IMAGES)).sum().backward()
        assert engine.not_lean == {}


def test_what_keeps_bytes_without_a_rule_is_named() -> None:
    x = torch.randn(2, 4, 16, 16, requires_grad=True)
    with Lean() as engine:
        torch.cdist(x, x + 1)
        F.instance_norm(x)
    assert set(engine.not_lean) == {"cdist", "instance_norm"}
    assert engine.not_lean["instance_norm"] >= x.numel() * x.element_size()


# ---------------------------------------------------------------- what is kept


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def chain() -> nn.Sequential:
    """Frozen but for its first shift, and at rest."""
    torch.manual_seed(0)
    blocks = [m for i in range(3) for m in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*blocks).eval().requires_grad_(False)
    model[0].bias.requires_grad_(True)
    return model


def kept_bytes(model: nn.Module, input: torch.Tensor) -> int:
    """What lives after a forward pass but for its output."""
    with no_collector(), LiveBytes(torch.device("cpu")) as live:
        with Lean():
            out = model(input)
        return live.bytes - out.numel() * out.element_size()


def test_a_frozen_chain_keeps_one_bit_for_each_element_of_a_relu() -> None:
    model, input = chain(), torch.randn(2, 3, 32, 32)
    elements = 2 * 8 * 32 * 32
    assert kept_bytes(model, input) <= 3 * elements / 8 + 1024


def test_a_chosen_weight_keeps_its_input() -> None:
    model, input = chain(), torch.randn(2, 3, 32, 32)
    kept_bytes(model, input)  # the scales of norms at rest stay
    before = kept_bytes(model, input)
    model[3].weight.requires_grad_(True)
    elements = 2 * 8 * 32 * 32
    assert kept_bytes(model, input) == before + 4 * elements - elements // 8  # the ReLU before it needs no bits then


def clipped_then_convolved(activation: nn.Module, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The loss and the weight of a chosen convolution behind an activation, and what lives for the backward pass."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 32, 32, requires_grad=True), torch.randn(8, 8, 1, 1, requires_grad=True)
    with no_collector(), LiveBytes(torch.device("cpu")) as live:
        with Lean(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.conv2d(activation(x + 1), weight).sum()
        return loss, weight, live.bytes


@no_bf16
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.ReLU6(inplace=True)], ids=repr)
def test_a_chosen_weight_and_the_activation_before_it_keep_one_tensor(activation: nn.Module, dtype: torch.dtype | None) -> None:
    elements = 2 * 8 * 32 * 32
    _, _, kept = clipped_then_convolved(activation, dtype)
    if dtype is None:
        assert kept <= 4 * elements + 64
    else:  # which the convolution keeps in another type, and the activation in bits
        assert kept <= 2 * elements + elements // 8 + 1024


CLIPS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.ReLU6(inplace=True),
    nn.Hardtanh(-2, 3),
    nn.Hardtanh(0, 1, inplace=True),
]


@pytest.mark.parametrize("side", [4, 16])
@pytest.mark.parametrize("activation", CLIPS, ids=repr)
def test_law_8_an_activation_before_a_layer(activation: nn.Module, side: int) -> None:
    tensors = {"input": 8 * torch.randn(2, 4, side, side), "weight": torch.randn(4, 4, 1, 1)}
    tensors["input"][0, 0, 0, :4] = torch.tensor([math.inf, -math.inf, 6.0, 0.0])
    for wants in ({"input", "weight"}, {"input"}, {"weight"}):
        runs = [
            result(lambda input, weight: F.conv2d(activation(input + 0), weight), tensors, wants, around)
            for around in (nullcontext(), Lean())
        ]
        assert differences(*runs) == []


def test_a_frozen_norm_holds_no_input() -> None:
    bias = torch.zeros(64, requires_grad=True)
    with no_collector(), Lean():
        x = torch.randn(4, 64) + 1
        seen = weakref.ref(x)
        out = F.layer_norm(x, (64,), None, bias)
        del x
        assert seen() is None
    out.sum().backward()


def test_memory_is_freed_without_a_collector() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.LeakyReLU(), nn.Softmax(1)
    )
    input = torch.randn(2, 3, 16, 16, requires_grad=True)
    for backward in (False, True):
        for training in (True, False):
            model.train(training)
            with no_collector(), LiveBytes(torch.device("cpu")) as live:
                with Lean() as engine:
                    middle = model[:5](input)
                    out = model[5:](middle).exp()
                seen = weakref.ref(middle)
                if backward:
                    out.sum().backward()
                input.grad = None
                model.zero_grad()
                del middle, out, engine
                assert seen() is None
                assert live.bytes <= 8 * 4  # the scale of the norm at rest


# ---------------------------------------------------------------- as plain autograd does it


def test_writing_to_what_is_kept_is_an_error() -> None:
    for around in (nullcontext(), Lean()):
        x = torch.randn(4, requires_grad=True)
        with around:
            y = x.exp()
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("activation", [F.relu, F.relu6])
def test_writing_to_what_two_functions_keep_is_an_error(activation: Callable[..., torch.Tensor]) -> None:
    for around in (nullcontext(), Lean()):
        a, weight = torch.randn(1, 2, 16, 16, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
        with around:
            x = activation(a * 2, inplace=True)
            y = F.conv2d(x, weight)
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("activation", [F.relu, F.relu6, F.hardtanh])
def test_backward_may_come_right_after_an_activation(activation: Callable[..., torch.Tensor], inplace: bool) -> None:
    grads = []
    for around in (nullcontext(), Lean()):
        x = torch.linspace(-8, 8, 512).requires_grad_()
        with around:
            torch.autograd.backward(activation(x * 1, inplace=inplace), torch.ones(512))
        grads.append(x.grad)
    assert differences(*grads) == []


def test_a_weight_that_is_written_to_is_an_error() -> None:
    x, weight = torch.randn(1, 2, 8, 8, requires_grad=True), torch.randn(2, 2, 3, 3)
    with Lean():
        y = F.conv2d(x, weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


TWICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape, convolution": lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3)),
    "shape, channels last": lambda x: F.conv2d(x.to(memory_format=torch.channels_last), torch.ones(2, 2, 3, 3)),
    "shape, pool": lambda x: F.avg_pool2d(x, 2),
    "places": lambda x: F.max_pool2d(x, 2),
    "shape, norm": lambda x: F.layer_norm(torch.ones(2, 2, 16, 16), (16,), None, x[0, 0, 0]),
    "bits, relu": F.relu,
    "bits, relu6": F.relu6,
    "bits, hardtanh": lambda x: F.hardtanh(x, -2.0, 2.0),
    "bits, hardsigmoid": F.hardsigmoid,
    "bits, leaky relu": F.leaky_relu,
    "noise": F.dropout,
    "norm at rest": lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2)),
}
RIGHT_TWICE = ("norm at rest",)  # which needs none of the values that are not kept


@pytest.mark.parametrize("name", TWICE)
def test_to_differentiate_twice_is_an_error_or_right(name: str) -> None:
    def second(around: AbstractContextManager[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(2, 2, 16, 16, requires_grad=True)
        with around:
            y = TWICE[name](x).pow(2).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    if name in RIGHT_TWICE:
        assert close(second(Lean()), second(nullcontext()))
    else:
        with pytest.raises(RuntimeError, match="twice"):
            second(Lean())


def test_a_large_norm_at_rest_is_not_differentiated_twice() -> None:
    x = torch.randn(2, 2, 16, 16, requires_grad=True)
    with patch.object(frozen_batchnorm, "_SMALL_NORM", 0), Lean():
        y = TWICE["norm at rest"](x).pow(2).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_what_is_kept_whole_can_be_differentiated_twice() -> None:
    def second(around: AbstractContextManager[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with around:
            y = F.linear(x, weight).sigmoid().pow(3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), weight)[0]

    assert differences(second(nullcontext()), second(Lean())) == []


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    before = torch._C._len_torch_function_stack()
    with pytest.raises(RuntimeError), Lean():
        F.conv2d(torch.randn(1, 2, 8, 8, requires_grad=True), torch.randn(2, 3, 3, 3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._len_torch_function_stack() == before


def test_a_norm_at_rest_follows_its_weight_and_statistics() -> None:
    weight, mean, var = torch.ones(8), torch.zeros(8), torch.ones(8)

    def grad() -> float:
        x = torch.ones(2, 8, 4, 4, requires_grad=True)
        with Lean():
            F.batch_norm(x, mean, var, weight, eps=0.0).sum().backward()
        assert x.grad is not None
        return x.grad.mean().item()

    assert grad() == pytest.approx(1.0)
    weight.mul_(2)
    assert grad() == pytest.approx(2.0)
    var.mul_(4)
    assert grad() == pytest.approx(1.0)
    weight.data = torch.full((8,), 3.0)
    assert grad() == pytest.approx(1.5)


# ---------------------------------------------------------------- hooks around


@dataclass
class Keeper:
    """Hooks that keep everything under a number."""

    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> int:
        self.seen[len(self.seen)] = tensor.clone()
        return len(self.seen) - 1

    def unpack(self, number: int) -> torch.Tensor:
        self.back.append(number)
        return self.seen[number]


class Around:
    """The lean engine with something around it."""

    def __init__(self, outer: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, Lean()

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def every_kind(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Keeps whole tensors, bits, noise and places."""
    x = F.max_pool2d(F.relu(F.conv2d(input, torch.ones(4, 4, 3, 3))), 2)
    return F.linear(F.dropout(F.leaky_relu(x), 0.3), weight).softmax(-1)


KINDS: Tensors = {"input": torch.linspace(-3, 3, 2 * 4 * 34 * 34).view(2, 4, 34, 34).sin(), "weight": torch.ones(3, 16)}


def test_hooks_around_see_what_is_kept_and_give_it_back() -> None:
    keeper = Keeper()
    plain = result(every_kind, KINDS, set(KINDS), nullcontext())
    ours = result(every_kind, KINDS, set(KINDS), Around(keeper.hooks()))
    assert differences(ours, plain) == []
    assert sorted(keeper.back) == sorted(keeper.seen)  # each once
    kinds = [tensor.dtype for tensor in keeper.seen.values()]
    assert kinds.count(torch.uint8) == 3 and kinds.count(torch.int16) == 1  # relu, leaky relu, dropout; places
    assert {2 * 4 * 16 * 16, 3 * 16} <= {tensor.numel() for tensor in keeper.seen.values()}  # of the linear layer
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("outer", [save_on_cpu, Lean], ids=["save_on_cpu", "lean"])
def test_hooks_of_pytorch_and_our_own_may_lie_around(outer: Callable[[], AbstractContextManager[Any]]) -> None:
    plain = result(every_kind, KINDS, set(KINDS), nullcontext())
    assert differences(result(every_kind, KINDS, set(KINDS), Around(outer())), plain) == []


def test_a_checkpoint_may_lie_around() -> None:
    def inside(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with Lean():
            return every_kind(input, weight)

    def call(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return checkpoint(inside, input, weight, use_reentrant=False)

    plain = result(every_kind, KINDS, set(KINDS), nullcontext())
    assert differences(result(call, KINDS, set(KINDS), nullcontext()), plain) == []


def test_without_a_way_to_see_the_hooks_around_all_else_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    plain = result(every_kind, KINDS, set(KINDS), nullcontext())
    assert differences(result(every_kind, KINDS, set(KINDS), Lean()), plain) == []


# ---------------------------------------------------------------- bits


values = st.lists(st.sampled_from(SPECIAL) | st.floats(-4, 4, width=16), max_size=70)


@laws(60)
@given(
    values,
    st.sampled_from(FLOATS),
    st.sampled_from([-3.0, 0.0]),
    st.sampled_from([3.0, math.inf]),
    st.booleans(),
    st.booleans(),
)
def test_a_bit_says_whether_an_element_lies_within(
    numbers: list[float], dtype: torch.dtype, low: float, high: float, nan: bool, cut: bool
) -> None:
    flat = torch.tensor(numbers, dtype=dtype)
    truth = [nan if math.isnan(x) else x > low and (x < high or high == math.inf) for x in flat.tolist()]
    with patch.object(bits, "_PIECE", 16 if cut else bits._PIECE):
        packed = bits.within(flat, low, high, nan)
        back = bits.unpack(packed, flat.shape, dtype)
    assert packed.dtype == torch.uint8 and len(packed) == -(-len(flat) // 8)
    assert back.dtype == dtype and back.tolist() == [float(x) for x in truth]


@laws(40)
@given(
    st.lists(st.booleans(), max_size=70),
    st.sampled_from([*FLOATS, torch.bool, torch.uint8]),
    st.sampled_from([8, 24, bits._PIECE]),
)
def test_what_is_packed_comes_back(mask: list[bool], dtype: torch.dtype, piece: int) -> None:
    with patch.object(bits, "_PIECE", piece):
        back = bits.unpack(bits.pack(torch.tensor(mask, dtype=torch.bool)), torch.Size((len(mask),)), dtype)
    assert back.dtype == dtype and back.tolist() == mask


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", FLOATS)
def test_cuda_packs_as_a_cpu_does(dtype: torch.dtype) -> None:
    """Sizes and places that kernels are compiled for apart, in turn, so that none runs for another."""
    for count in (0, 1, 9, 16, 48, 8192, 9000, 80_000, 16, 9):
        for skipped in (0, 1):  # what does not begin where memory is aligned
            flat = torch.randn(count + skipped).mul(4).to(dtype)[skipped:]
            flat[::7] = math.nan
            for low, high, nan in ((0.0, 6.0, True), (0.0, math.inf, False), (-3.0, 3.0, False)):
                packed = bits.within(_shifted(flat) if skipped else flat.cuda(), low, high, nan)
                there = bits.within(flat, low, high, nan)  # what fills up the last byte may differ
                for yes, no in ((1.0, 0.0), (0.5, -3.0)):
                    back = bits.unpack(packed, flat.shape, dtype, yes, no)
                    assert torch.equal(back.cpu(), bits.unpack(there, flat.shape, dtype, yes, no))


def _shifted(flat: torch.Tensor) -> torch.Tensor:
    """The same on CUDA, one element behind where its memory begins."""
    return torch.cat([flat[:1], flat] if len(flat) else [flat.new_zeros(1)]).cuda()[1:]


@laws(20)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_every_device_packs_in_the_same_order(mask: list[bool]) -> None:
    bit_values = bits._bit_values(torch.device("cpu"))
    short = [*mask, *[False] * (-len(mask) % 8)]
    by_hand = (torch.tensor(short).view(-1, 8) * bit_values).sum(dim=1, dtype=torch.uint8)
    packed = bits.pack(torch.tensor(mask))
    assert packed.tolist() == by_hand.tolist()
    assert (packed[:, None] & bit_values).ne(0).view(-1)[: len(mask)].tolist() == mask


@pytest.mark.parametrize(
    "clip",
    [
        lambda x: F.relu6(x + 3).div_(6),
        lambda x: F.relu6(x + 3, inplace=True).div_(6),
        lambda x: F.hardtanh(x).mul_(2),
        lambda x: F.relu6(x.mT + 3).div_(6),
        lambda x: F.hardtanh(x, -0.3, 0.7).mul_(2),
        lambda x: torch.cat([F.relu6(part, inplace=True) for part in (x * 2).tensor_split(2, 1)], 1),
    ],
)
@pytest.mark.parametrize("size", [4, 40])
def test_what_was_clipped_may_be_changed(clip: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    """As in hard sigmoids that are written out: PyTorch keeps the input of these functions, not their result."""
    torch.manual_seed(0)
    start = torch.randn(size, size + 2)
    gradients = []
    for around in (nullcontext, Lean):
        x = start.clone().requires_grad_()
        with around():
            value = clip(x * 2).square().sum()
        value.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_gradient_passes_where_a_bound_was_reached(dtype: torch.dtype) -> None:
    clipped = torch.tensor([0.0, 1.0, 5.5, 6.0, math.nan], dtype=dtype)
    out = packed_tensors.below(clipped, clipped._version, 6.0)
    assert out.nan_to_num(9.0).tolist() == [0.0, 1.0, 5.5, 0.0, 9.0]
