"""Slices against plain autograd: the whole gradient, cut to the slice; a twin that trains whole, put back outside the slice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from instances import laws
from torch import nn, optim

from pliant import Part
from pliant.engine.slices.slices import Sliced, Slices
from pliant.graph.backward import trainable
from pliant.runtime.trainable import ELEMENTWISE


def cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    assert part.dim is not None and part.index is not None
    return tensor.detach().index_select(part.dim, torch.tensor(part.index))


def whole_grads(layer: nn.Module, x: torch.Tensor, weights: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Plain autograd on a copy: the output, and gradients by name; that of the input is "input"."""
    twin, x = copy.deepcopy(layer).requires_grad_(), x.detach().requires_grad_()
    out = twin(x)
    (out * (torch.cos(torch.arange(out.numel()).view(out.shape)) if weights is None else weights)).sum().backward()
    grads = {name: param.grad for name, param in twin.named_parameters() if param.grad is not None}
    assert x.grad is not None
    return {"out": out.detach(), "input": x.grad, **grads}


def check_gradients(layer: nn.Module, x: torch.Tensor, parts: Sequence[Part], wants_input: bool = True) -> Slices:
    """The output is the very same, gradients are those of the whole, cut to the slices."""
    expected = whole_grads(layer, x)
    slices = Slices(dict(layer.named_parameters()), parts)
    x = x.detach().requires_grad_(wants_input)
    with Sliced(slices):
        out = layer(x)
    assert torch.equal(out, expected["out"])
    (out * torch.cos(torch.arange(out.numel()).view(out.shape))).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert slices.grads().keys() == slices.parts.keys()
    for name, grad in slices.grads().items():
        torch.testing.assert_close(grad, cut(expected[name], slices.parts[name]), **close)
        assert grad.is_contiguous()
    for name, param in layer.named_parameters():
        assert (param.grad is None) == (name in slices.parts or not param.requires_grad)
        if param.grad is not None:
            torch.testing.assert_close(param.grad, expected[name], **close)
    if wants_input:
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected["input"], **close)
    return slices


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


# ---------------------------------------------------------------- gradients


def some_of(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """One run of neighbours, or scattered positions; never all of them."""
    if draw(st.booleans()):
        start = draw(st.integers(0, count - 1))
        return tuple(range(start, draw(st.integers(start + 1, min(count, start + count - 1)))))
    return tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor, list[Part]]:
    spots = draw(st.integers(1, 3))
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spots - 1]
    groups = draw(st.sampled_from([1, 1, 2, 3, 6]))
    per_in, per_out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    inputs, outputs = groups * per_in, max(groups * per_out, 2 * groups if groups == 1 else groups)
    kernel = draw(st.integers(1, 3))
    stride = draw(st.integers(1, 2))
    padding: Any = draw(st.sampled_from([0, 1, "valid", *(["same"] if stride == 1 else [])]))
    dilation = draw(st.integers(1, 2)) if kernel < 3 else 1
    torch.manual_seed(draw(st.integers(0, 99)))
    layer = kind(inputs, outputs, kernel, stride, padding, dilation, groups, bias=draw(st.booleans()))
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    x = torch.randn(*batch, inputs, *[5] * spots)
    if spots == 2 and batch and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
        layer = layer.to(memory_format=torch.channels_last) if draw(st.booleans()) else layer
    along_inputs = per_in > 1 and draw(st.booleans())
    parts = [Part("weight", 1, some_of(draw, per_in)) if along_inputs else Part("weight", 0, some_of(draw, outputs))]
    if layer.bias is not None and draw(st.booleans()):
        parts.append(Part("bias", 0, some_of(draw, outputs)))
    return layer, x, parts


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # PyTorch's, once in a process
@laws(160)
@given(convolutions(), st.booleans(), st.booleans())
def test_gradients_of_convolutions_are_those_of_the_whole(case: Any, wants_input: bool, by_products: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pliant.engine.slices.sliced_gradients._WIDE_KERNELS_BY_PRODUCTS", by_products)
        check_gradients(*case, wants_input=wants_input)


@st.composite
def linears(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor, list[Part]]:
    inputs, outputs = draw(st.integers(2, 7)), draw(st.integers(2, 7))
    torch.manual_seed(draw(st.integers(0, 99)))
    layer = nn.Linear(inputs, outputs, bias=draw(st.booleans()))
    x = torch.randn(*draw(st.sampled_from([(), (3,), (2, 4)])), inputs)
    dim = draw(st.integers(0, 1))
    parts = [Part("weight", dim, some_of(draw, (outputs, inputs)[dim]))]
    if layer.bias is not None and draw(st.booleans()):
        parts = [*(parts if draw(st.booleans()) else []), Part("bias", 0, some_of(draw, outputs))]
    return layer, x, parts


@laws(60)
@given(linears(), st.booleans())
def test_gradients_of_linear_layers_are_those_of_the_whole(case: Any, wants_input: bool) -> None:
    check_gradients(*case, wants_input=wants_input)


def test_a_frozen_bias_and_a_whole_weight_keep_to_themselves() -> None:
    layer = nn.Conv2d(4, 6, 3)
    layer.bias.requires_grad_(False)  # type: ignore[union-attr]
    check_gradients(layer, torch.randn(2, 4, 6, 6), [Part("weight", 0, (1, 4))])
    check_gradients(nn.Conv2d(4, 6, 3), torch.randn(2, 4, 6, 6), [Part("bias", 0, (1, 4))])


def test_a_layer_that_runs_twice_gathers_both_gradients() -> None:
    layer = nn.Linear(5, 5)
    check_gradients(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(3, 5), [Part("0.weight", 1, (0, 3))])


def test_gradients_of_two_batches_add_up() -> None:
    layer = nn.Conv2d(4, 8, 3)
    one, two = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    weights = torch.randn(2, 8, 4, 4)
    expected = [whole_grads(layer, x, weights)["weight"] for x in (one, two)]
    slices = Slices(trainable(layer), [Part("weight", 0, (0, 1, 5))])
    for x in (one, two):
        with Sliced(slices):
            out = layer(x)
        (out * weights).sum().backward()
    total = cut(expected[0] + expected[1], slices.parts["weight"])
    torch.testing.assert_close(slices.grads()["weight"], total, rtol=1e-4, atol=1e-5)
    slices.zero_grad()
    assert slices.grads() == {}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3), nn.Linear(8, 8)], ids=["convolution", "linear"])
def test_autocast_casts_as_it_does_for_the_whole(layer: nn.Module, dim: int) -> None:
    layer, x = copy.deepcopy(layer), torch.randn(4, 8, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole_grads(layer, x)
        slices = Slices(trainable(layer), [Part("weight", dim, (2, 3, 4)), Part("bias", 0, (1, 7))])
        x.requires_grad_()
        with Sliced(slices):
            out = layer(x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected["out"])
    (out * torch.cos(torch.arange(out.numel()).view(out.shape))).sum().backward()
    for name, grad in slices.grads().items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, cut(expected[name], slices.parts[name]), rtol=2e-2, atol=2e-1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected["input"], rtol=2e-2, atol=2e-2)


def test_without_gradients_functions_run_as_they_are() -> None:
    layer = nn.Linear(4, 4)
    slices = Slices(trainable(layer), [Part("weight", 0, (0,))])
    with torch.no_grad():
        assert slices.call(F.linear, (torch.ones(1, 4), layer.weight, layer.bias)) is None
    assert slices.call(F.linear, (torch.ones(1, 4), torch.ones(4, 4))) is None


def test_gradients_of_gradients_are_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with Sliced(Slices(trainable(layer), [Part("weight", 0, (0,))])):
        out = layer(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---------------------------------------------------------------- what a slice is


def test_parts_of_one_parameter_are_merged() -> None:
    params = trainable(nn.Linear(4, 6))
    parts = [Part("weight", 0, (4, 3)), Part("weight", 0, (0, 3)), Part("bias", 0, (5,))]
    slices = Slices(params, parts)
    assert slices.parts == {"weight": Part("weight", 0, (0, 3, 4)), "bias": Part("bias", 0, (5,))}
    assert not any(param.requires_grad for param in params.values())


def test_what_is_covered_wholly_is_left_to_ordinary_training() -> None:
    params = trainable(nn.Linear(4, 6))
    halves = [Part("weight", 1, (0, 1)), Part("weight", 1, (2, 3)), Part("bias"), Part("bias", 0, (1,))]
    assert len(Slices(params, halves)) == 0
    assert all(param.requires_grad for param in params.values())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part("weight", 0, (0,)), Part("weight", 1, (0,))], r"'weight' is sliced along dims \[0, 1\]"),
        ([Part("weight", 0, (0,)), Part("bias", 0, (6,))], r"'bias' of shape \(6,\) goes beyond its dim 0"),
        ([Part("weight", 0, (0,)), Part("bias", 1, (0,))], "only 0 and 1 are channels"),
        ([Part("weight", 0, (0,)), Part("scale", 0, (0,))], "no trainable parameter of that name"),
    ],
)
def test_a_slice_that_cannot_be_is_refused_before_anything_changes(parts: list[Part], message: str) -> None:
    params = trainable(nn.Linear(4, 6))
    with pytest.raises(ValueError, match=message):
        Slices(params, parts)
    assert all(param.requires_grad for param in params.values())


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: x @ w.T,
        lambda w, x: torch.cat([x, w]),
        lambda w, x: w.square().sum(),
        lambda w, x: F.embedding(x.long(), w),
    ],
    ids=["product", "in a list", "penalty", "embedding"],
)
def test_a_function_without_sliced_gradients_is_refused(use: Callable[..., Any]) -> None:
    layer = nn.Linear(4, 6)
    with (
        Sliced(Slices(trainable(layer), [Part("weight", 0, (0, 1))])),
        pytest.raises(ValueError, match=r"a slice of 'weight' was chosen, and .* uses the parameter"),
    ):
        use(layer.weight, torch.ones(2, 4))


def test_looking_at_a_sliced_parameter_is_no_use_of_it() -> None:
    layer = nn.Linear(4, 6)
    with Sliced(Slices(trainable(layer), [Part("weight", 0, (0, 1))])):
        w = layer.weight
        assert (w.shape, w.dtype, w.dim(), w.numel(), w.device.type) == ((6, 4), torch.float32, 2, 24, "cpu")
        assert torch.zeros_like(w).sum() == 0 and w.detach().sum() == w.data.sum()
        assert (w == w).all()


# ---------------------------------------------------------------- bytes


def test_a_slice_of_inputs_keeps_these_channels_alone() -> None:
    for layer in (nn.Conv2d(16, 8, 3, bias=False), nn.Conv2d(16, 16, 3, groups=16, bias=False)):
        for index in ((4, 5, 6, 7), (0, 3, 8, 9)):
            dim = 1 if layer.groups == 1 else 0
            slices = Slices({"weight": layer.weight}, [Part("weight", dim, index)])
            with kept_bytes() as sizes, Sliced(slices):
                layer(torch.randn(2, 16, 9, 9))
            assert sum(sizes) == 4 * 2 * 4 * 9 * 9
    linear = nn.Linear(16, 8)
    with kept_bytes() as sizes, Sliced(Slices(trainable(linear), [Part("weight", 1, (0, 1)), Part("bias", 0, (0,))])):
        linear(torch.randn(5, 16))
    assert sum(sizes) == 4 * 5 * 2


def test_a_slice_of_a_bias_keeps_no_input() -> None:
    layer = nn.Conv2d(16, 8, 3)
    layer.weight.requires_grad_(False)
    with kept_bytes() as sizes, Sliced(Slices(trainable(layer), [Part("bias", 0, (1,))])):
        layer(torch.randn(2, 16, 9, 9))
    assert sizes == []


@pytest.mark.parametrize("dim", [0, 1])
def test_a_quarter_has_a_quarter_of_gradient_and_state(dim: int) -> None:
    layer = nn.Conv2d(64, 64, 3, bias=False)
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3)
    slices = Slices(trainable(layer), [Part("weight", dim, tuple(range(8, 24)))])
    assert slices.leaves()["weight"].untyped_storage().nbytes() == 4
    with Sliced(slices):
        layer(torch.randn(2, 64, 5, 5)).sum().backward()
    with slices.swapped_in(optimizer):
        optimizer.step()
    state = slices.state_dict()["weight"]["state"]
    held = [*slices.grads().values(), *(value for value in state.values() if isinstance(value, torch.Tensor))]
    whole = 3 * layer.weight.numel() * 4  # gradient and two moments
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) <= 0.26 * whole
    assert layer.weight.grad is None and not optimizer.state


# ---------------------------------------------------------------- optimizers

BUILD: dict[str, Callable[[Any], optim.Optimizer]] = {
    **{kind.__name__: lambda params, kind=kind: kind(params, lr=0.01) for kind in ELEMENTWISE},
    "SGD with momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam with amsgrad": lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adagrad that starts high": lambda params: optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "RMSprop centered": lambda params: optim.RMSprop(params, lr=0.01, centered=True, momentum=0.9),
    "AdamW of many at once": lambda params: optim.AdamW(params, lr=0.01, foreach=True),
    "Adam fused": lambda params: optim.Adam(params, lr=0.01, fused=True),
}
PARTS = (
    Part("0.weight", 0, (2, 3)),
    Part("0.bias", 0, (2, 3)),
    Part("2.weight", 1, (0, 2, 3)),
    Part("3.weight", 0, (0, 5)),
    Part("3.bias", 0, (0, 5)),
    Part("6.weight", 1, (8, 9, 10)),
    Part("6.bias"),
)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, bias=False),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))) for _ in range(count)]


def freeze_rest(model: nn.Module, parts: Sequence[Part]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name in {part.param for part in parts})


def step(model: nn.Module, slices: Slices, optimizer: optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    slices.zero_grad()
    with Sliced(slices):
        loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    with slices.swapped_in(optimizer):
        optimizer.step()


def step_twin(
    model: nn.Module, optimizer: optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], parts: Sequence[Part]
) -> None:
    """Ordinary training; then everything outside the slices is put back."""
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    with torch.no_grad():
        for name, param in model.named_parameters():
            after = param.clone()
            param.copy_(before[name])
            for part in parts:
                if part.param == name and part.dim is not None:
                    index = torch.tensor(part.index)
                    param.index_copy_(part.dim, index, after.index_select(part.dim, index))
                elif part.param == name:
                    param.copy_(after)


@pytest.mark.parametrize("kind", BUILD)
def test_ten_steps_are_those_of_a_twin_that_trains_whole(kind: str) -> None:
    model = small_net()
    twin, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    freeze_rest(model, PARTS)
    mine, theirs = BUILD[kind](model.parameters()), BUILD[kind](twin.parameters())
    slices = Slices(dict(model.named_parameters()), PARTS)
    known = {id(param) for param in mine.state}
    for batch in batches(10):
        step(model, slices, mine, batch)
        step_twin(twin, theirs, batch, PARTS)
    assert {id(param) for param in mine.state} - known <= {id(model[6].bias)}
    assert set(slices.state_dict()) == (set(slices.parts) if kind != "SGD" else set())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, twin.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)
        moved = param != start[name]
        for part in PARTS:
            if part.param == name and part.dim is not None:
                assert cut(moved, part).any()
                moved.index_fill_(part.dim, torch.tensor(part.index), False)
        assert name == "6.bias" or not moved.any(), name


def test_during_the_step_slices_stand_in_their_place_and_afterwards_nothing_is_different() -> None:
    model = small_net()
    freeze_rest(model, PARTS)
    optimizer = optim.Adam([{"params": model[:3].parameters(), "lr": 0.1}, {"params": model[3:].parameters()}])
    slices = Slices(dict(model.named_parameters()), PARTS[:5])
    groups = [list(group["params"]) for group in optimizer.param_groups]
    seen: list[list[tuple[int, ...]]] = []
    optimizer.register_step_pre_hook(
        lambda opt, *_: seen.extend([tuple(p.shape) for p in g["params"]] for g in opt.param_groups)
    )
    step(model, slices, optimizer, batches(1)[0])
    assert seen == [[(2, 3, 3, 3), (2,), (6, 3, 3, 3)], [(2, 1, 3, 3), (2,), (4, 24), (4,)]]
    now = [list(group["params"]) for group in optimizer.param_groups]
    assert [[id(p) for p in params] for params in now] == [[id(p) for p in params] for params in groups]
    assert set(optimizer.state_dict()["state"]) == {5, 6}  # the head, which trains whole


def test_a_run_of_outputs_steps_in_the_memory_of_the_whole() -> None:
    model = small_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    slices = Slices(dict(model.named_parameters()), PARTS[:2])
    with Sliced(slices):
        model(batches(1)[0][0]).sum().backward()
    version = model[0].weight._version
    with slices.swapped_in(optimizer):
        inside = optimizer.param_groups[0]["params"][0]
        assert inside.untyped_storage().data_ptr() == model[0].weight.untyped_storage().data_ptr()
        assert inside.is_leaf and inside.requires_grad and inside.grad is slices.grads()["0.weight"]
        optimizer.step()
    assert model[0].weight._version > version  # autograd would notice


def test_a_step_that_raises_leaves_groups_and_state_as_they_were() -> None:
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    slices = Slices(dict(model.named_parameters()), PARTS[:6])
    step(model, slices, optimizer, batches(1)[0])
    groups = [id(param) for group in optimizer.param_groups for param in group["params"]]
    values, state = copy.deepcopy(model.state_dict()), copy.deepcopy(slices.state_dict())
    with pytest.raises(ZeroDivisionError), slices.swapped_in(optimizer):
        raise ZeroDivisionError
    assert [id(param) for group in optimizer.param_groups for param in group["params"]] == groups
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(slices.state_dict(), state, rtol=0, atol=0)
    assert {id(param) for param in optimizer.state} == {id(model[6].bias)}


def test_a_slice_without_a_gradient_does_not_move() -> None:
    model = small_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    slices, start = Slices(dict(model.named_parameters()), PARTS[:6]), copy.deepcopy(model.state_dict())
    with slices.swapped_in(optimizer):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_clipping_sees_the_slices() -> None:
    model = small_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    slices = Slices(dict(model.named_parameters()), PARTS[:6])
    with Sliced(slices):
        F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    with slices.swapped_in(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        assert len(params) == 7
        nn.utils.clip_grad_norm_(params, 1e-3)
    grads = [*slices.grads().values(), model[6].bias.grad]
    assert torch.stack([grad.norm() for grad in grads if grad is not None]).norm() <= 1.001e-3


class Mine(optim.SGD):
    """May do anything."""


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor, Mine])
def test_other_optimizers_are_refused(kind: Any) -> None:
    model = small_net()
    slices = Slices(dict(model.named_parameters()), PARTS[:2])
    message = rf"{kind.__name__} cannot train slices .* Use one of SGD, Adam, .*units\.layers\(\)"
    with pytest.raises(ValueError, match=message), slices.swapped_in(kind(model.parameters())):
        pass


# ---------------------------------------------------------------- resume, and another choice


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    slices = Slices(dict(model.named_parameters()), PARTS[:6])
    first, second = batches(6)[:3], batches(6)[3:]
    for batch in first:
        step(model, slices, optimizer, batch)
    other = copy.deepcopy(model).requires_grad_()
    resumed_optimizer = optim.Adam(other.parameters(), lr=0.01)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = Slices(dict(other.named_parameters()), PARTS[:6])
    resumed.load_state_dict(copy.deepcopy(slices.state_dict()))
    freeze_rest(other, PARTS[6:])
    for batch in second:
        step(model, slices, optimizer, batch)
    for batch in second:
        step(other, resumed, resumed_optimizer, batch)
    sliced = [part.param for part in PARTS[:6]]
    assert all(torch.equal(model.get_parameter(name), other.get_parameter(name)) for name in sliced)


def test_a_state_of_another_choice_is_refused() -> None:
    model = small_net()
    slices = Slices(dict(model.named_parameters()), PARTS[:1])
    step(model, slices, optim.Adam(model.parameters()), batches(1)[0])
    other = Slices(dict(model.named_parameters()), [Part("0.weight", 0, (2, 4))])
    with pytest.raises(ValueError, match=r"the slice of '0\.weight' that it knows is not chosen here"):
        other.load_state_dict(slices.state_dict())


@pytest.mark.parametrize(("kind", "key"), [("Adam", "exp_avg_sq"), ("Rprop", "step_size"), ("Adagrad that starts high", "sum")])
@pytest.mark.parametrize("dim", [0, 1])
def test_channels_that_stay_keep_their_state_and_new_ones_start_afresh(kind: str, key: str, dim: int) -> None:
    model = small_net()
    params = dict(model.named_parameters())
    optimizer = BUILD[kind](model.parameters())
    old = Slices(params, [Part("2.weight", dim, (0, 1, 4)), Part("0.weight", 0, (0,))])
    for batch in batches(3):
        step(model, old, optimizer, batch)
    new = Slices(params, [Part("2.weight", dim, (1, 2, 4, 5)), Part("3.weight", 0, (0,))])
    new.carry_over(old, optimizer)
    before, after = old.state_dict()["2.weight"]["state"], new.state_dict()["2.weight"]["state"]
    start = {"Adam": 0.0, "Rprop": 0.01, "Adagrad that starts high": 0.5}[kind]
    assert set(new.state_dict()) == {"2.weight"}
    assert float(after["step"]) == 3
    assert after[key].shape[dim] == 4
    torch.testing.assert_close(cut(after[key], Part("", dim, (0, 2))), cut(before[key], Part("", dim, (1, 2))))
    assert (cut(after[key], Part("", dim, (1, 3))) == start).all()
    step(model, new, optimizer, batches(1)[0])
    assert float(new.state_dict()["2.weight"]["state"]["step"]) == 4


def test_a_slice_starts_from_what_the_optimizer_knows_of_the_whole() -> None:
    model = small_net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    none = Slices({}, [])
    step(model, none, optimizer, batches(1)[0])
    whole = copy.deepcopy(optimizer.state[model[0].weight])
    slices = Slices(dict(model.named_parameters()), [Part("0.weight", 0, (1, 3))])
    step(model, slices, optimizer, batches(2)[1])
    state = slices.state_dict()["0.weight"]["state"]
    assert float(state["step"]) == 2
    expected = cut(whole["exp_avg"], Part("", 0, (1, 3))) * 0.9 + slices.grads()["0.weight"] * 0.1
    torch.testing.assert_close(state["exp_avg"], expected)
    torch.testing.assert_close(optimizer.state[model[0].weight], whole, rtol=0, atol=0)
