"""What a step costs: closed forms, and what really runs and is really kept when parameters are frozen."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO, Case, adamw, failing, fingerprint, mid_training, sgd

from pliant import Mode, Part, Profile, ProfileMismatch, Unit, measure
from pliant.cost import node_timing as passes
from pliant.cost import step_timing as trial
from pliant.cost.optimizer_sizes import optimizer_sizes, state_sizes
from pliant.cost.profile import Charge, ChargeKind
from pliant.engine.kernels import prices as kernel_prices
from pliant.graph.backward import read, trainable, walk
from pliant.runtime import batches
from pliant.runtime import sandbox as sandbox_module
from pliant.runtime.batchnorm import BatchNormModes, NormRule
from pliant.runtime.clock import Watch
from pliant.runtime.memory import LiveBytes, StandIns
from pliant.runtime.optimizer_step import Update
from pliant.runtime.sandbox import sandbox
from pliant.runtime.trainable import apply_

every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
shapes_vary = settings(derandomize=True, deadline=None, max_examples=40)


def whole(*names: str) -> list[Unit]:
    return [Unit(name, (Part(name),)) for name in names]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def counted(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor] = mean_square) -> Profile:
    return measure.counted(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch)


def selections(model: nn.Module, case: Case, several: int = 4) -> list[list[str]]:
    """All, each alone (a few of them), and some at random."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and name not in case.unused]
    draw = random.Random(case.name)
    alone = [[name] for name in draw.sample(names, min(len(names), 8))]
    return [names, *alone, *(draw.sample(names, draw.randint(1, len(names))) for _ in range(several))]


# ---------------------------------------------------------------- a clock that counts what really runs


def products(name: str, args: Sequence[Any], out: Any) -> float:
    """Multiply-accumulates of one operation of a forward or backward pass."""
    if name in ("mm", "bmm"):
        return args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "baddbmm"):
        return args[1].numel() * args[2].shape[-1]
    if name == "convolution":
        x, weight, transposed = args[0], args[1], args[6]
        return (x if transposed else out).numel() * weight[0].numel()
    if name == "convolution_backward":
        grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
        return (x if transposed else grad).numel() * weight[0].numel() * (mask[0] + mask[1])
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return 2 * args[0].numel() * args[1].shape[-2]
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return 5 * args[1].numel() * args[2].shape[-2]
    return 0


class Clock(TorchDispatchMode):
    """Stands still but for the operations that have a price."""

    def __init__(self, price: Callable[[str, Sequence[Any], Any], float] = products) -> None:
        super().__init__()
        self.now = 0.0
        self.price = price

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.now += self.price(func._overloadpacket.__name__, args, out)
        return out


@contextmanager
def on_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Clock]:
    with monkeypatch.context() as patch, clock:
        patch.setattr(Watch, "mark", lambda self: clock.now)
        patch.setattr(Watch, "seconds", lambda self, start, end: end - start)
        yield clock


def really_runs(model: nn.Module, loss: Any, batch: Any, chosen: Collection[str], clock: Clock | None = None) -> float:
    """Price of a plain step's forward and backward pass with just the chosen parameters trainable."""
    with sandbox(model, train=chosen), clock or Clock() as clock:
        start = clock.now
        loss(model, batch).backward()
        return clock.now - start


# ---------------------------------------------------------------- counted: multiply-accumulates


def test_three_linear_layers_by_hand() -> None:
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in ((5, 7), (7, 3), (3, 4))))
    first, second, third = 6 * 5 * 7, 6 * 7 * 3, 6 * 3 * 4
    forward = first + second + third
    profile = counted(model, torch.randn(6, 5))
    assert profile.base.macs == forward
    assert profile.cost([]).macs == forward
    assert profile.cost(whole("2.weight")).macs == forward + third  # its own dW
    assert profile.cost(whole("1.weight")).macs == forward + third + second
    assert profile.cost(whole("0.weight")).macs == forward + third + second + first  # every dX between, its own dW
    assert profile.cost(whole("0.weight", "2.weight")).macs == forward + 2 * third + second + first
    assert profile.full.macs == forward + 2 * third + 2 * second + first


def test_small_parameters_cost_one_per_element_of_the_output() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 4))
    profile = counted(model, torch.randn(6, 5))
    forward = 6 * (5 * 7 + 7 * 4)
    assert profile.cost(whole("2.bias")).macs == forward + 6 * 4
    assert profile.cost(whole("1.weight")).macs == forward + 6 * 7 * 4 + 6 * 7
    assert profile.cost(whole("1.weight", "1.bias")).macs == forward + 6 * 7 * 4 + 2 * 6 * 7
    assert profile.cost(whole("0.bias")).macs == forward + 6 * 7 * 4 + 6 * 7 + 6 * 7  # the norm's dX, its own dW


@shapes_vary
@given(st.data())
def test_convolutions_of_every_kind(data: st.DataObject) -> None:
    """Grouped, depthwise, strided, dilated, padded and transposed: dX and dW cost what forward does."""
    draw = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    groups, transposed, bias = draw(1, 2, 3), draw(False, True), draw(False, True)
    i, o = groups * draw(1, 2), groups * draw(1, 2, 3)
    kernel, stride, dilation, padding = (draw(1, 2, 3), draw(1, 2)), draw(1, 2), draw(1, 2), draw(0, 1)
    n, size = draw(1, 2, 4), (draw(7, 8), draw(7, 9))
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    conv = kind(i, o, kernel, stride, padding, groups=groups, bias=bias, dilation=dilation)
    model = nn.Sequential(nn.Conv2d(2, i, 1, bias=False), conv)
    x = torch.randn(n, 2, *size)

    reads = [dilation * (k - 1) + 1 for k in kernel]
    small = [(s + 2 * padding - r) // stride + 1 for s, r in zip(size, reads, strict=True)]  # of an ordinary convolution
    large = [(s - 1) * stride - 2 * padding + r for s, r in zip(size, reads, strict=True)]  # of a transposed one
    outputs = n * o * int(np.prod(large if transposed else small))
    windows = n * int(np.prod(size if transposed else small))
    macs = windows * i * o // groups * int(np.prod(kernel))
    before = n * int(np.prod(size)) * 2 * i

    profile = counted(model, x)
    assert profile.base.macs == macs + before
    assert profile.cost(whole("1.weight")).macs == 2 * macs + before
    assert profile.cost(whole("0.weight")).macs == 2 * macs + 2 * before
    assert profile.cost(whole("0.weight", "1.weight")).macs == 3 * macs + 2 * before
    if bias:
        assert profile.cost(whole("1.bias")).macs == macs + before + outputs
    for chosen in (["1.weight"], ["0.weight"], ["0.weight", "1.weight"]):
        assert profile.cost(whole(*chosen)).macs == really_runs(model, mean_square, x, chosen)


@shapes_vary
@given(lead=st.lists(st.integers(1, 4), min_size=1, max_size=3), i=st.integers(1, 6), o=st.integers(1, 6))
def test_linear_layers_on_any_leading_shape(lead: list[int], i: int, o: int) -> None:
    model, x = nn.Sequential(nn.Linear(3, i, bias=False), nn.Linear(i, o, bias=False)), torch.randn(*lead, 3)
    first, second = int(np.prod(lead)) * 3 * i, int(np.prod(lead)) * i * o
    profile = counted(model, x)
    assert profile.full.macs == 2 * first + 3 * second
    assert profile.cost(whole("1.weight")).macs == first + 2 * second


class Attention(nn.Module):
    """Attention from its products, or as torch's one call."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        else:
            mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return self.o(mixed)


@pytest.mark.parametrize("fused", [False, True])
def test_attention(fused: bool) -> None:
    model, x = Attention(fused), torch.randn(6, 5, 8)
    linear, product = 6 * 5 * 8 * 8, 6 * 5 * 5 * 8
    backward = (5 if fused else 4) * product  # the fused one makes its scores again
    profile = counted(model, x)
    assert profile.base.macs == 4 * linear + 2 * product
    assert profile.cost(whole("o.weight")).macs == 5 * linear + 2 * product
    assert profile.cost(whole("q.weight", "k.weight", "v.weight")).macs == 8 * linear + 2 * product + backward
    assert profile.full.macs == really_runs(model, mean_square, x, profile.params)


@pytest.mark.parametrize("chosen", ["q.weight", "k.weight", "v.weight"])
def test_one_side_of_attention(chosen: str) -> None:
    model, x = Attention(fused=False), torch.randn(6, 5, 8)
    profile = counted(model, x)
    assert profile.cost(whole(chosen)).macs == really_runs(model, mean_square, x, [chosen])
    assert counted_kept(profile, [chosen]) == really_kept(model, mean_square, x, [chosen])


def test_a_model_may_be_one_layer() -> None:
    profile = counted(nn.Linear(5, 4), torch.randn(6, 5))
    assert profile.base.macs == 120
    assert profile.full.macs == 120 + 120 + 24


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 4), lambda: nn.Conv1d(5, 4, 1)], ids=["linear", "convolution"])
def test_a_bias_is_cheap_where_the_user_froze_the_weight(make: Callable[[], nn.Module]) -> None:
    model = make()
    model.weight.requires_grad_(False)
    x = torch.randn(6, 5) if isinstance(model, nn.Linear) else torch.randn(6, 5, 1)
    profile = counted(model, x)
    assert profile.cost(whole("bias")).macs - profile.base.macs == 6 * 4


def test_unused_parameters_cost_nothing() -> None:
    model, loss, batch = ZOO["unused"].make()
    profile = counted(model, batch, loss)
    assert profile.cost(whole("spare.weight", "spare.bias")) == profile.base


def test_what_cannot_be_counted_is_named() -> None:
    profile = counted(nn.LSTM(5, 6), torch.randn(3, 6, 5), lambda model, x: model(x)[0].square().mean())
    assert profile.uncounted or profile.base.macs >= 3 * 6 * 4 * 6 * (5 + 6)


# ---------------------------------------------------------------- what runs follows the selection


def gradients_at(live: Sequence[Any], value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> dict[int, tuple[Any, ...]]:
    """For each node that runs, the gradients that it computes (None: not asked for)."""
    made: dict[int, tuple[Any, ...]] = {}
    handles = [node.register_hook(lambda grads, _, i=i: made.__setitem__(i, grads)) for i, node in enumerate(live)]
    torch.autograd.grad(value, inputs, retain_graph=True)
    for handle in handles:
        handle.remove()
    return made


@pytest.mark.parametrize("case", [c for name, c in ZOO.items() if name != "custom"], ids=lambda c: c.name)
def test_nodes_compute_just_the_gradients_that_the_selection_needs(case: Case) -> None:
    """Each charge against a hook on its node: dW only of what is chosen, dX only where something chosen lies behind."""
    model, loss, batch = case.make()
    with sandbox(model):
        graph = read(model, loss, batch)
        value = loss(model, batch)
        live, params = walk(value), dict(model.named_parameters())
        index = {node: i for i, node in enumerate(live)}
        for chosen in selections(model, case):
            runs = [False] * len(live)
            for i, node in reversed(list(enumerate(graph.nodes))):
                runs[i] = any(p in chosen for p in node.params) or any(runs[j] for j in node.data)
            made = gradients_at(live, value, [params[name] for name in chosen])
            assert sorted(made) == [i for i, run in enumerate(runs) if run], chosen
            for i, grads in made.items():
                for (behind, _), grad in zip(live[i].next_functions, grads, strict=True):
                    if behind in index and graph.nodes[i].op != "Cat":  # whose gradients are views
                        assert (grad is not None) == runs[index[behind]], (chosen, graph.nodes[i])


@every_case
def test_cost_never_falls_when_more_is_chosen(case: Case) -> None:
    model, loss, batch = case.make()
    profile = counted(model, batch, loss)
    chosen: list[Unit] = []
    last = profile.base
    for unit in whole(*profile.params):
        chosen.append(unit)
        cost = profile.cost(chosen)
        assert cost.macs >= last.macs and cost.bytes >= last.bytes
        last = cost
    assert last == profile.full


# ---------------------------------------------------------------- counted: bytes


class Kept:
    """One tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def really_kept(model: nn.Module, loss: Any, batch: Any, chosen: Collection[str], norm: NormRule = "chosen") -> int:
    """Bytes alive for backward after a forward pass with just the chosen parameters trainable; each storage once."""
    among = trainable(model)
    standing = [*model.parameters(), *model.buffers(), *batches.tensors(batch)]
    known = {tensor.untyped_storage()._cdata for tensor in standing}
    packed: list[weakref.ref[Kept]] = []

    def pack(tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        packed.append(weakref.ref(kept))
        return kept

    with sandbox(model, train=chosen), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        BatchNormModes(model, norm).hold_(among, chosen)
        value = loss(model, batch)
        storages = [ref().tensor.untyped_storage() for ref in packed if ref() is not None]
        del value
    return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in known}.values())


def counted_kept(profile: Profile, chosen: Collection[str]) -> int:
    """The bytes that a selection keeps for backward."""
    return profile.kept(whole(*chosen))


def bytes_of(profile: Profile, kind: ChargeKind, chosen: Collection[str]) -> int:
    """The bytes of one kind that a selection needs at some time of the step."""
    return sum(charge.cost.bytes for charge in profile.due(whole(*chosen)) if charge.kind is kind)


@pytest.mark.parametrize("case", [c for name, c in ZOO.items() if name != "checkpointed"])
def test_kept_bytes_are_what_autograd_keeps(case: Case) -> None:
    model, loss, batch = case.make()
    profile = counted(model, batch, loss)
    for chosen in selections(model, case, several=8):
        assert counted_kept(profile, chosen) == really_kept(model, loss, batch, chosen), chosen


@pytest.mark.parametrize(
    "norm",
    ["chosen", "frozen", "as-is"],
)
@pytest.mark.parametrize("name", ["conv_net", "branches"])
def test_a_norm_at_rest_keeps_no_statistics(name: str, norm: NormRule) -> None:
    model, loss, batch = ZOO[name].make()
    profile = measure.counted(model, sgd(model), loss, batch, norm=norm)
    for chosen in selections(model, ZOO[name]):
        assert counted_kept(profile, chosen) == really_kept(model, loss, batch, chosen, norm), chosen


@pytest.mark.parametrize(
    "chosen",
    [
        ["middle.weight"],
        ["middle.bias"],
        ["stem.bias"],
        ["stem.weight", "head.bias"],
        ["head.bias"],
        ["head.weight"],
    ],
    ids=" ".join,
)
def test_a_checkpoint_keeps_its_input_for_its_own_part_and_what_lies_behind(chosen: list[str]) -> None:
    """Its hooks take over from those of `really_kept`, so every piece of memory is followed here."""
    model, loss, batch = ZOO["checkpointed"].make()
    profile = counted(model, batch, loss)
    apply_(trainable(model), sgd(model), chosen)
    assert counted_kept(profile, chosen) == measure.kept_bytes(model, loss, batch)


@every_case
def test_kept_bytes_of_the_model_as_it_is(case: Case) -> None:
    model, loss, batch = case.make()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert measure.kept_bytes(model, loss, batch) == really_kept(model, loss, batch, names)
    assert measure.kept_bytes(model, loss, batch) == counted_kept(counted(model, batch, loss), names)


INPLACE = {"ReLU": nn.ReLU, "ReLU6": nn.ReLU6, "Hardswish": nn.Hardswish, "SiLU": nn.SiLU, "LeakyReLU": nn.LeakyReLU}


@pytest.mark.parametrize("kind", INPLACE)
def test_in_place_activations_keep_what_they_need(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(5, 4), INPLACE[kind](inplace=True), nn.Linear(4, 3)), torch.randn(6, 5)
    assert counted_kept(counted(model, x), ["0.weight"]) == really_kept(model, mean_square, x, ["0.weight"])


@pytest.mark.parametrize("chosen", ["0.weight", "1.weight", "2.weight"])
def test_casts_of_autocast_are_kept_for_the_input_gradient(chosen: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    model, x = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(6, 5)
    assert counted_kept(counted(model, x, loss), [chosen]) == really_kept(model, loss, x, [chosen])


def test_a_linear_layer_with_one_input_keeps_it_for_its_weight() -> None:
    model, x = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 4)), torch.randn(6, 5)
    assert counted_kept(counted(model, x), ["1.weight"]) == really_kept(model, mean_square, x, ["1.weight"])


def test_a_tensor_that_two_nodes_keep_counts_once() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.a(x) + self.b(x)

    profile = counted(Fork(), torch.randn(6, 5))
    one, both = (counted_kept(profile, names) for names in (["a.weight"], ["a.weight", "b.weight"]))
    assert one == both == 6 * 5 * 4 + 6 * 4 * 4  # their input, and what the squared loss keeps


def test_what_a_dead_end_kept_is_not_kept() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.aside, self.head = nn.Linear(5, 5), nn.Linear(5, 64), nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            self.aside(x).exp().square()  # nobody asks for it
            return self.head(x)

    model, x = Aside(), torch.randn(6, 5)
    profile = counted(model, x)
    for chosen in (["stem.weight"], ["head.weight"], ["stem.weight", "head.weight"]):
        assert counted_kept(profile, chosen) == really_kept(model, mean_square, x, chosen)


def test_what_a_dead_end_of_the_same_kind_kept_is_not_kept() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x) * x[:, :4]
        y * torch.ones(6, 4)  # nobody asks for it
        return y.mean()

    model, x = nn.Linear(5, 4), torch.randn(6, 5)
    assert measure.kept_bytes(model, loss, x) == really_kept(model, loss, x, ["weight", "bias"])


@pytest.mark.parametrize(
    ("make", "per_byte", "per_tensor"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
        (lambda p: torch.optim.AdamW(p), 2, 4),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3, 4),
        (lambda p: torch.optim.RMSprop(p, centered=True), 2, 4),
    ],
    ids=["SGD", "momentum", "AdamW", "amsgrad", "centered RMSprop"],
)
def test_gradients_and_optimizer_state(make: Any, per_byte: int, per_tensor: int) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    profile = measure.counted(model, make(model.parameters()), mean_square, x)
    for chosen in (["0.weight"], ["1.bias"], ["0.bias", "1.weight"]):
        size = sum(model.get_parameter(name).numel() * 4 for name in chosen)
        assert bytes_of(profile, ChargeKind.GRADIENT, chosen) == size
        assert bytes_of(profile, ChargeKind.OPTIMIZER, chosen) == per_byte * size + per_tensor * len(chosen)
        at_once = really_kept(model, mean_square, x, chosen) + (1 + per_byte) * size + per_tensor * len(chosen)
        assert profile.cost(whole(*chosen)).bytes <= at_once, "a peak is never more than all of it together"


def test_a_parameter_outside_the_optimizer_has_a_gradient_but_no_state() -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    profile = measure.counted(model, torch.optim.AdamW(model[1].parameters()), mean_square, x)
    assert bytes_of(profile, ChargeKind.GRADIENT, ["0.bias"]) == 7 * 4
    assert bytes_of(profile, ChargeKind.OPTIMIZER, ["0.bias"]) == 0
    assert bytes_of(profile, ChargeKind.OPTIMIZER, ["1.bias"]) == 2 * 4 * 4 + 4


@pytest.mark.parametrize("foreach", [False, True])
def test_the_optimizers_scratch_memory_is_tried_out(foreach: bool) -> None:
    """AdamW makes tensors like the parameter on its way, for one after the other or (foreach) for all at once."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    sizes = optimizer_sizes(torch.optim.AdamW(model.parameters(), foreach=foreach), trainable(model))
    assert sizes["together"] == foreach
    for name, param in model.named_parameters():
        assert sizes["state"][name] == 2 * param.numel() * 4 + 4
        assert param.numel() * 4 <= sizes["scratch"][name] <= 2 * param.numel() * 4 + 64


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop])
@pytest.mark.parametrize("more", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_optimizers_state_is_known_without_the_memory_of_large_ones(kind: Any, more: dict[str, Any]) -> None:
    if "fused" in more and kind is torch.optim.Rprop:
        more = {}  # it has no such way
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 5))
    optimizer = kind(model.parameters(), lr=0.1, **more, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    with LiveBytes(torch.device("cpu")) as live:
        found = state_sizes(optimizer, trainable(model))
    assert found == optimizer_sizes(optimizer, trainable(model))["state"]
    assert "fused" in more or live.peak < 300 * 300 * 4


@pytest.mark.parametrize("sizes", [state_sizes, optimizer_sizes])
def test_an_optimizer_that_draws_random_numbers_is_tried_without_a_trace(sizes: Callable[..., Any]) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["noise"] = torch.randn_like(param)

    model = nn.Linear(8, 2)
    before = torch.get_rng_state()
    assert sizes(Noisy(model.parameters(), lr=0.1), trainable(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_outside_the_optimizer_have_no_sizes() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4))
    sizes = optimizer_sizes(torch.optim.AdamW(model[1].parameters()), trainable(model))
    assert set(sizes["state"]) == set(sizes["scratch"]) == {"1.weight", "1.bias"}


# ---------------------------------------------------------------- the peak of a step, every piece of memory followed


def peaks(case: Case, choices: Sequence[Collection[str]]) -> Iterator[tuple[Any, int, int, int]]:
    """For each choice, as a session would apply it: the bytes that a profile predicts, those of a real step, its peak."""
    model, loss, batch = case.make()
    optimizer, among, norms = sgd(model), trainable(model), BatchNormModes(model, "chosen")
    profile = measure.timed(model, optimizer, loss, batch, repeats=1)
    for chosen in choices:
        apply_(among, optimizer, chosen)
        norms.hold_(among, chosen)
        peak, alone = measure.peak_bytes(model, optimizer, loss, batch)
        kept = measure.kept_bytes(model, loss, batch)
        assert profile.kept(whole(*chosen)) == pytest.approx(kept, rel=0.01), chosen
        yield chosen, profile.cost(whole(*chosen)).bytes, peak - alone, peak


# Where prediction and peak differ by more than a tenth, by how much at most, and why. docs/limits.md says it too.
PEAKS_BEYOND = {
    "custom": 0.2,  # over: the weight's gradient, which a function written in Python computes unasked, is counted twice
    "branches": 0.25,  # over: gradients that wait for another branch are counted although that branch does not train
    "functional": 0.25,  # over: likewise
    "transformer": 0.12,  # under: what a frame holds on to in the forward pass, and nobody reads again, is taken for freed
    "two_inputs": 0.12,  # under: the loss itself is not counted during the backward pass, and mse_loss leaves a large one
}


@every_case
def test_seconds_can_be_measured_where_nothing_is_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And cost the same bytes and MACs, and leave no trace either."""
    model, optimizer, loss, batch = mid_training(case)
    plain = measure.timed(model, optimizer, loss, batch, repeats=1)
    before = fingerprint(model, optimizer)
    monkeypatch.setattr("pliant.runtime.memory._SMALL", 1)
    with StandIns(model):
        thin = measure.timed(model, optimizer, loss, batch, repeats=1)
    assert fingerprint(model, optimizer) == before
    assert [(c.kind, c.name, c.params, c.via) for c in thin.charges] == [
        (c.kind, c.name, c.params, c.via) for c in plain.charges
    ]
    for k in range(len(plain.params)):
        mine, other = (profile.cost(whole(*plain.params[k:])) for profile in (thin, plain))
        assert (mine.bytes, mine.macs) == (other.bytes, other.macs)
        assert mine.seconds > 0


class Inverts(torch.autograd.Function):
    """Its backward pass cannot go without the values."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        Inverts.seen.append(bool(x.any()))
        if not x.any():
            raise ValueError("there is nothing to invert")
        return grad


def test_a_backward_pass_that_needs_values_has_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(Inverts.apply(self.first(x)))  # type: ignore[no-untyped-call]

    torch.manual_seed(0)
    model, batch = Net(), torch.randn(128, 64)
    Inverts.seen.clear()
    with torch.autograd.set_detect_anomaly(True):
        profile = measure.sparing(measure.timed)(model, sgd(model), mean_square, batch, repeats=1)
        assert torch.is_anomaly_enabled()
    assert profile.full.seconds > 0
    assert not Inverts.seen[0] and all(Inverts.seen[1:])
    with pytest.raises(ValueError, match="at least 1"):
        measure.sparing(measure.timed)(model, sgd(model), mean_square, batch, repeats=0)


@pytest.mark.parametrize("case", ZOO.values())
def test_the_peak_of_any_selection_is_that_of_the_real_step(case: Case) -> None:
    for chosen, predicted, real, peak in peaks(case, selections(case.make()[0], case)):
        assert abs(predicted - real) <= PEAKS_BEYOND.get(case.name, 0.1) * peak, (chosen, predicted, real)


@pytest.mark.parametrize("case", ZOO.values())
def test_the_peak_of_a_full_step_is_that_of_the_real_step(case: Case) -> None:
    names = [name for name in trainable(case.make()[0]) if name not in case.unused]
    for _, predicted, real, peak in peaks(case, [names]):
        assert abs(predicted - real) <= (0.12 if case.name == "custom" else 0.1) * peak, (predicted, real)


@pytest.mark.parametrize("case", ZOO.values())
def test_the_peak_of_the_head_alone_is_that_of_the_real_step(case: Case) -> None:
    for _, predicted, real, peak in peaks(case, [case.head]):
        assert abs(predicted - real) <= 0.1 * peak, (predicted, real)


def test_gradients_that_accumulate_stand_all_along() -> None:
    """Where everything is highest in the forward pass, that is all that a second batch adds."""
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)), torch.randn(64, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, two = (measure.counted(model, optimizer, mean_square, x, update=Update(accumulate=n)) for n in (1, 2))
    for chosen in (["2.bias"], ["0.weight"], list(one.params)):
        size = sum(model.get_parameter(name).numel() * 4 for name in chosen)
        assert one.cost(whole(*chosen)).bytes <= two.cost(whole(*chosen)).bytes <= one.cost(whole(*chosen)).bytes + size
        assert two.kept(whole(*chosen)) == one.kept(whole(*chosen)), "each batch is kept for itself"
        assert two.cost(whole(*chosen)).macs == 2 * one.cost(whole(*chosen)).macs
    assert two.cost(whole("0.weight")).bytes > one.cost(whole("0.weight")).bytes


# ---------------------------------------------------------------- timed, on a clock that we wind ourselves


@every_case
def test_predicted_seconds_are_those_of_the_real_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every selection's cost, from a few timed passes, against a real step with everything else frozen."""
    model, loss, batch = case.make()
    with on_clock(monkeypatch, Clock()):
        profile = measure.timed(model, sgd(model), loss, batch, repeats=2)
    assert profile.coverage == pytest.approx(1)
    for chosen in selections(model, case):
        assert profile.cost(whole(*chosen)).seconds == pytest.approx(really_runs(model, loss, batch, chosen)), chosen
    for predicted, fastest, slowest in profile.checks:
        assert predicted == pytest.approx(fastest) and fastest == slowest


def work(profile: Profile) -> list[Charge]:
    """All charges but those that hold nothing but the bytes that were seen while a node or the optimizer ran."""
    return [c for c in profile.charges if c.live is None or c.kind not in (ChargeKind.INPUT_GRAD, ChargeKind.SCRATCH)]


@pytest.mark.parametrize("case", [c for name, c in ZOO.items() if name != "checkpointed"], ids=lambda c: c.name)
def test_counted_products_are_those_that_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge by charge: on a clock that ticks once per MAC, seconds and MACs of a product are the same number."""
    model, loss, batch = case.make()
    with on_clock(monkeypatch, Clock()):
        seconds = measure.timed(model, sgd(model), loss, batch, repeats=1)
    macs = measure.counted(model, sgd(model), loss, batch)
    assert seconds.base.seconds == pytest.approx(macs.base.macs)
    timed, counted = work(seconds), work(macs)
    assert [(charge.kind, charge.name) for charge in timed] == [(charge.kind, charge.name) for charge in counted]
    for charge, known in zip(timed, counted, strict=True):
        op = charge.name.split(" ")[0]
        if charge.kind is ChargeKind.FORWARD:  # seconds of the forward pass are shared out, not measured by operation
            continue
        if charge.cost.seconds > 1e-3 or (charge.kind is ChargeKind.INPUT_GRAD and op in ("Mm", "Addmm", "Convolution")):
            assert charge.cost.seconds == pytest.approx(known.cost.macs), charge.name


class TiedWithBias(nn.Module):
    """A language model's usual head: the embedding's matrix, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


def test_a_tied_weight_does_not_make_a_bias_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = TiedWithBias(), torch.arange(6)
    with on_clock(monkeypatch, Clock()):
        profile = measure.timed(model, sgd(model), mean_square, ids, repeats=1)
    assert profile.cost(whole("out.bias")).seconds == pytest.approx(really_runs(model, mean_square, ids, ["out.bias"]))


def norm_price(name: str, args: Sequence[Any], out: Any) -> float:
    """Input gradient 10; either parameter makes a pass of 5 necessary, beside 1 for the scale and 2 for the shift."""
    if name != "native_batch_norm_backward":
        return 100.0 if name == "native_batch_norm" else 0.0
    to_input, to_scale, to_shift = args[9]
    return 10 * to_input + 5 * (to_scale or to_shift) + to_scale + 2 * to_shift


def test_two_parameters_of_a_node_share_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), torch.randn(6, 3, 4, 4)
    with on_clock(monkeypatch, Clock(norm_price)):
        profile = measure.timed(model, sgd(model), mean_square, x, repeats=2)
    prices = {
        (): 100,
        ("1.weight",): 106,
        ("1.bias",): 107,
        ("1.weight", "1.bias"): 108,
        ("0.weight",): 110,
        ("0.weight", "1.bias"): 117,
        ("0.weight", "1.weight", "1.bias"): 118,
    }
    assert {chosen: profile.cost(whole(*chosen)).seconds for chosen in prices} == pytest.approx(prices)
    assert all(prices[c] == really_runs(model, mean_square, x, c, Clock(norm_price)) for c in prices if c)


def test_whole_steps_train_no_norm_without_the_layer_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PyTorch ends the process, where a group norm runs channels-last on a CPU."""
    blocks = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))]
    model, reaches_the_input = nn.Sequential(*blocks, nn.Conv2d(4, 4, 1)), []

    def price(name: str, args: Sequence[Any], out: Any) -> float:
        if name != "native_group_norm_backward":
            return 0.0
        reaches_the_input.append(args[-1][0])
        return 100 * args[-1][1]  # so half of the cost ends at a scale

    with on_clock(monkeypatch, Clock(price)):
        measure.timed(model, sgd(model), mean_square, torch.randn(2, 4, 4, 4))
    assert reaches_the_input and all(reaches_the_input)


def test_the_fastest_of_several_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of pass finds the device undisturbed once: the second of three, here."""
    model, x = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 4)), torch.randn(6, 5)
    with on_clock(monkeypatch, Clock()):
        steady = measure.timed(model, sgd(model), mean_square, x, repeats=2)
    steps = len(steady.checks)
    slower = [
        9,
        5,
        5,
        1,
        7,
        9,
        9,
    ]  # the graph is read; nodes are timed (at first twice); bytes are counted, twice
    slower += [3] * steps + [1] * steps + [2] * (steps - 1) + [6]  # whole steps, in turn
    slower += [4] * steps  # and another turn, since one of them differs much from the others
    run = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal run
        run += 1
        return mean_square(model, x)

    with on_clock(monkeypatch, Clock(lambda *op: products(*op) * slower[run - 1])):
        disturbed = measure.timed(model, sgd(model), loss, x, repeats=3)
    assert run == len(slower)
    assert (disturbed.base, disturbed.charges) == (steady.base, steady.charges)
    slowest = [4.0] * (steps - 1) + [6.0]
    assert [(fast, slow / fast) for _, fast, slow in disturbed.checks] == [
        (fast, slow) for (_, fast, _), slow in zip(steady.checks, slowest, strict=True)
    ]


def test_work_that_no_hook_sees_is_spread_over_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microsecond per MAC, and ten per node that are spent where no hook looks: whole steps tell."""
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    clock, backward = Clock(lambda *op: products(*op) * 1e-6), Update.gradients

    def unseen(self: Update, value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Any:
        clock.now += 10e-6 * len(walk(value))
        return backward(self, value, inputs)

    monkeypatch.setattr(Update, "gradients", unseen)
    with on_clock(monkeypatch, clock):
        profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    nodes = {("1.bias",): 3, ("0.weight",): 6, profile.params: 6}  # mean, square, two products, a transpose each
    for chosen, count in nodes.items():
        seen = really_runs(model, mean_square, x, chosen) * 1e-6
        assert profile.cost(whole(*chosen)).seconds == pytest.approx(seen + count * 10e-6, rel=0.02), chosen
    seen = really_runs(model, mean_square, x, profile.params) * 1e-6 - profile.base.seconds
    assert profile.coverage == pytest.approx(seen / (seen + 60e-6), rel=0.02)
    for predicted, fastest, _ in profile.checks:
        assert predicted == pytest.approx(fastest, rel=0.01)


def test_the_optimizer_is_priced_by_tensor_and_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    clock, step = Clock(lambda *_: 0.0), sandbox_module.scratch_step

    def priced_step(like: torch.optim.Optimizer) -> None:
        step(like)
        mine = [p for group in like.param_groups for p in group["params"] if p.grad is not None]
        clock.now += 7 + 30 * len(mine) + 0.5 * sum(p.numel() * 4 for p in mine)

    monkeypatch.setattr(sandbox_module, "scratch_step", priced_step)
    with on_clock(monkeypatch, clock):
        profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    assert profile.base.seconds == pytest.approx(7)
    for chosen in (["0.weight"], ["1.bias"], ["0.weight", "1.bias"], list(profile.params)):
        numbers = sum(model.get_parameter(name).numel() for name in chosen)
        assert profile.cost(whole(*chosen)).seconds == pytest.approx(7 + 30 * len(chosen) + 0.5 * 4 * numbers)


def test_prices_are_of_steps_as_they_run_and_shares_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are twice as fast inside of `around()`, also in backward, and an engine that spares four fifths of what lies
    before the first trained layer."""
    model, x, speed, is_inside = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))), torch.randn(5, 6), 1.0, False
    clock = Clock(lambda *op: products(*op) * speed)
    layer = 5 * 6 * 6.0  # MACs

    @contextmanager
    def around() -> Iterator[None]:
        nonlocal speed, is_inside
        speed, is_inside = 0.5, True
        yield
        is_inside = False

    def ready(batch: torch.Tensor) -> Callable[[], torch.Tensor]:
        frozen = next(i for i in range(6) if any(param.requires_grad for param in model[i].parameters()))

        def forward() -> torch.Tensor:
            with around():
                value = mean_square(model, batch)
            clock.now -= (0.5 - 0.2) * frozen * layer
            return value

        return forward

    def timed(self: Watch, work: Callable[[], Any], lead: float = 0.0) -> Any:
        nonlocal speed
        speed = speed if is_inside else 1.0
        start = clock.now
        result = work()
        return clock.now - start, result

    with on_clock(monkeypatch, clock):
        monkeypatch.setattr(Watch, "time", timed)
        profile = measure.timed(model, sgd(model), mean_square, x, around=around, ready=ready)
    speed = 1.0
    assert profile.full.seconds == pytest.approx(really_runs(model, mean_square, x, profile.params)), "a plain step"
    as_run = profile.on(Mode(prefix=True))
    assert as_run.full == profile.full and profile.on(Mode()).spared == 0 < as_run.spared == profile.prefix_saves
    for first in range(6):
        chosen = [name for i in range(first, 6) for name in (f"{i}.weight", f"{i}.bias")]
        plain = really_runs(model, mean_square, x, chosen)
        real = 0.2 * first * layer + 0.5 * (plain - first * layer)
        assert as_run.cost(whole(*chosen)).seconds == pytest.approx(real, rel=0.08), first


@pytest.mark.parametrize("batches", [1, 3])
def test_a_plain_full_step_takes_all_its_batches_and_one_update(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = norm_net()
    clock, step = Clock(moving_price), sandbox_module.scratch_step

    def priced_step(like: torch.optim.Optimizer) -> None:
        step(like)
        clock.now += 1000

    monkeypatch.setattr(sandbox_module, "scratch_step", priced_step)
    with on_clock(monkeypatch, clock):
        profile = measure.timed(model, sgd(model), mean_square, x, norm="frozen", update=Update(accumulate=batches))
    moving = really_runs(model, mean_square, x, profile.params, Clock(moving_price))
    assert profile.full.seconds == pytest.approx(batches * moving + 1000)


def moving_price(name: str, args: Sequence[Any], out: Any) -> float:
    """A norm that moves its statistics takes 100, one at rest 10; a product what it multiplies."""
    return (100.0 if args[5] else 10.0) if name == "native_batch_norm" else products(name, args, out)


def norm_net() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), torch.randn(6, 3, 4, 4)


@pytest.mark.parametrize("norm", ["chosen", "frozen", "as-is"])
def test_norms_that_are_not_chosen_are_timed_at_rest(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = norm_net()
    with on_clock(monkeypatch, Clock(moving_price)):
        profile = measure.timed(model, sgd(model), mean_square, x, norm=norm, repeats=1)
    for chosen in (["2.weight"], ["0.weight"], ["1.bias"], ["0.weight", "1.weight"], list(profile.params)):
        with sandbox(model):
            norms = BatchNormModes(model, norm)
            norms.hold_(profile.params, chosen)
            real = really_runs(model, mean_square, x, chosen, Clock(moving_price))
        assert profile.cost(whole(*chosen)).seconds == pytest.approx(real), chosen
    moving = really_runs(model, mean_square, x, profile.params, Clock(moving_price))
    assert profile.full.seconds == pytest.approx(moving), "a full step is a plain one, in which norms move"
    assert (profile.plain is not None) == (norm == "frozen")
    assert profile.origin["norms"] == norm


def test_a_full_step_beside_a_run_does_not_write_to_statistics() -> None:
    """Else the engine would make everything again that it has derived from them, and the steps after it would take longer."""
    model, x = norm_net()
    for _ in range(2):
        mean_square(model, x).backward()
    before = [(name, buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()]
    step = measure.FullStep(model, sgd(model), mean_square, dict(model.named_parameters()), Watch(torch.device("cpu")))
    assert step.seconds(x) > 0
    for (name, buffer, value, version), (_, now) in zip(before, model.named_buffers(), strict=True):
        assert now is buffer and buffer._version == version and torch.equal(buffer, value), name
    mean_square(model, x)
    assert int(model[1].num_batches_tracked) == 3


def test_seconds_multiply_with_the_batches_of_a_step_but_the_optimizer_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    clock, step = Clock(), sandbox_module.scratch_step

    def priced_step(like: torch.optim.Optimizer) -> None:
        step(like)
        clock.now += 50 * sum(p.grad is not None for group in like.param_groups for p in group["params"])

    monkeypatch.setattr(sandbox_module, "scratch_step", priced_step)
    with on_clock(monkeypatch, clock):
        profile = measure.timed(model, sgd(model), mean_square, x, update=Update(accumulate=3), repeats=1)
    for chosen in (["1.bias"], ["0.weight", "1.weight"]):
        real = 3 * really_runs(model, mean_square, x, chosen) + 50 * len(chosen)
        assert profile.cost(whole(*chosen)).seconds == pytest.approx(real)
    assert profile.origin["accumulate"] == 3


# ---------------------------------------------------------------- parts that are scaled to whole steps


def some_parts(seed: int, steps: int) -> np.ndarray:
    """Milliseconds of five parts in whole steps of growing depth, and the nodes that run."""
    rng = np.random.default_rng(seed)
    parts = np.cumsum(rng.uniform(0.1e-3, 2e-3, (steps, 6)), axis=0)
    parts[:, 0], parts[:, 5] = rng.uniform(2e-3, 5e-3), np.arange(10, 10 + 7 * steps, 7)
    return parts


@pytest.mark.parametrize("trust", [0.1, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_parts_that_add_up_stay_as_they_are(seed: int, trust: float) -> None:
    parts, right = some_parts(seed, 4), np.array([1.0] * 5 + [5e-6])
    assert trial._scales(parts, parts @ right, trust) == pytest.approx(right)


@pytest.mark.parametrize("seed", range(5))
def test_parts_that_are_off_are_found_out_by_enough_whole_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = rng.uniform(1e-3, 5e-3, (200, 6)) * np.array([1, 1, 1, 1, 1, 1e4])
    off = np.array([*rng.uniform(0.8, 1.25, 5), rng.uniform(0, 2e-5)])
    assert trial._scales(parts, parts @ off, trust=10.0)[:5] == pytest.approx(off[:5], rel=1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_scaled_parts_add_up_to_the_whole_steps_even_if_they_are_few(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = some_parts(seed, 4)
    measured = parts @ np.array([*rng.uniform(0.9, 1.1, 5), rng.uniform(0, 2e-5)])
    assert parts @ trial._scales(parts, measured, trust=0.1) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_noise_in_the_whole_steps_pulls_the_parts_only_a_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts, right = some_parts(seed, 4), np.array([1.0] * 5 + [5e-6])
    found = trial._scales(parts, parts @ right * rng.normal(1, 0.01, 4), trust=0.1)
    assert np.all(np.abs(found[:5] - 1) < 0.1) and np.all(found >= 0)


def test_whole_steps_that_contradict_their_parts_are_weighed_quietly() -> None:
    """A real, disturbed measurement: more trained in less time."""
    parts = np.array([[179.7e-6, 4.6e-6, 56.8e-6, 36.8e-6, 0, 5], [179.7e-6, 21.8e-6, 105.6e-6, 41.8e-6, 0, 9]])
    found = trial._scales(parts, np.array([480.4e-6, 379.4e-6]), trust=0.1)
    assert np.all(np.isfinite(found)) and np.all(found >= 0)
    assert found[4] == pytest.approx(1), "of norms nothing was heard"


def test_scales_are_never_negative() -> None:
    """Whole steps that are far faster than their parts."""
    parts = some_parts(0, 4)
    assert np.all(trial._scales(parts, parts[:, 0] * np.array([1.0, 0.5, 0.2, 0.1]), trust=0.5) >= 0)


class Program(nn.Module):
    """A list of (operation, source, other source); layers may be used again, and everything made is summed in the end."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.layers, self.norms = (
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(4) for _ in range(2)),
        )
        self.scale, self.steps = nn.Parameter(torch.ones(4)), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for op, i, j in self.steps:
            a, b = made[i % len(made)], made[j % len(made)]
            if op == "layer":
                made.append(self.layers[j % 2](a))
            elif op == "norm":
                made.append(self.norms[j % 2](a))
            elif op == "scale":
                made.append(a * self.scale)
            elif op == "product":
                made.append(a * b)
            elif op == "attention":
                made.append(torch.softmax(a @ b.transpose(1, 2), -1) @ a)
            else:
                made.append(F.relu6(a + b, inplace=True))
        return sum(made) * self.scale


@shapes_vary
@given(st.data())
def test_random_programs_cost_what_they_cost(data: st.DataObject) -> None:
    """Seconds on a clock of products (and one for the loss), and kept bytes, for a random selection of a random program."""

    def price(name: str, args: Sequence[Any], out: Any) -> float:
        return products(name, args, out) + (name == "mean")

    op = st.sampled_from(["layer", "norm", "scale", "product", "attention", "activation"])
    steps = data.draw(st.lists(st.tuples(op, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7))
    torch.manual_seed(0)
    model, x = Program(steps), torch.randn(2, 3, 4)
    with pytest.MonkeyPatch.context() as monkeypatch, on_clock(monkeypatch, Clock(price)):
        profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    used = [name for name in profile.params if profile.cost(whole(name)) != profile.base]
    chosen = sorted(data.draw(st.sets(st.sampled_from(used), min_size=1)))
    real = really_runs(model, mean_square, x, chosen, Clock(price))
    assert profile.cost(whole(*chosen)).seconds == pytest.approx(real, abs=1e-3)
    assert counted_kept(profile, chosen) == really_kept(model, mean_square, x, chosen)


# ---------------------------------------------------------------- timed, on the real clock: structure only


@every_case
def test_timed_has_the_charges_of_counted(case: Case) -> None:
    model, loss, batch = case.make()
    timed, counted = (make(model, adamw(model), loss, batch) for make in (measure.timed, measure.counted))

    def known_from_shapes(profile: Profile) -> list[Any]:
        held = (ChargeKind.KEPT, ChargeKind.GRADIENT, ChargeKind.OPTIMIZER)
        return [
            (
                (c.kind, c.node, c.name, c.lean),
                c.cost.macs,
                c.cost.bytes if c.kind in held else 0,
                c.params,
                [(profile.charges[j].kind, profile.charges[j].node) for j in c.via],
            )
            for c in work(profile)
        ]

    assert known_from_shapes(timed) == known_from_shapes(counted)
    assert (timed.head, timed.uncounted, timed.base.macs) == (counted.head, counted.uncounted, counted.base.macs)
    assert timed.base.seconds > 0 and all(charge.cost.seconds >= 0 for charge in timed.charges)
    assert timed.full.seconds >= timed.base.seconds
    assert timed.coverage is not None and 0 < timed.coverage <= 1
    assert counted.full.seconds == 0 and counted.coverage is None


@pytest.mark.parametrize("make", [measure.timed, measure.counted])
@every_case
def test_nothing_in_a_profile_is_negative(case: Case, make: Callable[..., Profile]) -> None:
    model, loss, batch = case.make()
    profile = make(model, adamw(model), loss, batch, update=Update(clip=1.0, accumulate=2))
    for cost in (profile.base, *(charge.cost for charge in profile.charges)):
        assert cost.seconds >= 0 and cost.bytes >= 0 and cost.macs >= 0
    assert min(profile.moments) >= 0
    assert all(fastest <= slowest and predicted > 0 for predicted, fastest, slowest in profile.checks)


@every_case
def test_together_costs_no_less_than_alone_and_no_more_than_the_sum(case: Case) -> None:
    model, loss, batch = case.make()
    profile = measure.timed(model, sgd(model), loss, batch, repeats=1)
    graph = read(model, loss, batch)
    for node in graph.nodes:
        if len(node.params) == 2:
            a, b = ({name} for name in node.params)
            alone_a, alone_b, both = (profile.cost(whole(*s)).seconds - profile.base.seconds for s in (a, b, a | b))
            assert max(alone_a, alone_b) <= both + 1e-12 and both <= alone_a + alone_b + 1e-12


class Changing(nn.Module):
    """Runs its layer once more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(5, 5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        for _ in range(self.times):
            x = self.layer(x)
        return x


class Experts(nn.Module):
    """Takes turns between two layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.times = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return self.experts[self.times % 2](x)


@pytest.mark.parametrize("make", [Changing, Experts])
def test_a_graph_that_changes_from_run_to_run_cannot_be_timed(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"graph changes from run to run.*measure\.counted"):
        measure.timed(model, sgd(model), mean_square, torch.randn(6, 5))


def test_timed_needs_a_pass() -> None:
    model = nn.Linear(5, 4)
    with pytest.raises(ValueError, match="repeats=0"):
        measure.timed(model, sgd(model), mean_square, torch.randn(6, 5), repeats=0)


def test_a_frozen_model_cannot_be_measured() -> None:
    model = nn.Linear(5, 4).requires_grad_(False)
    for make in (measure.timed, measure.counted):
        with pytest.raises(ValueError, match="no trainable parameter"):
            make(model, sgd(model), mean_square, torch.randn(6, 5))


# ---------------------------------------------------------------- where a profile holds


def test_a_profile_holds_where_it_was_taken(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    profile = counted(model, x)
    profile.save(tmp_path / "profile.json")
    here = measure.origin(model, x)
    assert Profile.load(tmp_path / "profile.json", here) == profile
    with pytest.raises(ProfileMismatch, match="batch '6×5'; the model now runs at batch '3×5'"):
        Profile.load(tmp_path / "profile.json", measure.origin(model, x[:3]))
    with pytest.raises(ProfileMismatch, match=r"device 'cpu: .*the model now runs at device 'cuda: tiny'"):
        profile.check_origin({**here, "device": "cuda: tiny"})
    with pytest.raises(ProfileMismatch, match="threads"):
        profile.check_origin({**here, "threads": here["threads"] + 1})
    with pytest.raises(ProfileMismatch, match="model"):
        profile.check_origin(measure.origin(model[0], x))
    with pytest.raises(ProfileMismatch, match="dtype"):
        profile.check_origin(measure.origin(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)).double(), x))
    profile.check_origin({**here, "device": "cuda: tiny"}, allow_mismatch=True)


def test_freezing_by_the_user_is_another_model() -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), torch.randn(6, 5)
    profile = counted(model, x)
    model[0].requires_grad_(False)
    with pytest.raises(ProfileMismatch, match="model"):
        profile.check_origin(measure.origin(model, x))


def test_another_resolution_is_another_batch() -> None:
    model = nn.Conv2d(3, 4, 3)
    profile = counted(model, torch.randn(6, 3, 8, 8))
    with pytest.raises(ProfileMismatch, match="batch"):
        profile.check_origin(measure.origin(model, torch.randn(6, 3, 32, 32)))


# ---------------------------------------------------------------- no trace


MEASURES: dict[str, Callable[..., Any]] = {
    "counted": measure.counted,
    "timed": lambda *args: measure.timed(*args, repeats=2),
    "timed, clipped and accumulated": lambda *args: measure.timed(
        *args, update=Update(clip=1.0, accumulate=2), norm="frozen", repeats=1
    ),
    "kept_bytes": lambda model, optimizer, loss, batch: measure.kept_bytes(model, loss, batch),
    "peak_bytes": measure.peak_bytes,
}


@pytest.mark.parametrize("make", MEASURES)
@every_case
def test_measuring_leaves_no_trace(case: Case, make: str) -> None:
    model, optimizer, loss, batch = mid_training(case)
    grads = [param.grad for param in model.parameters()]
    before = fingerprint(model, optimizer)
    MEASURES[make](model, optimizer, loss, batch)
    assert fingerprint(model, optimizer) == before
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("make", MEASURES)
def test_parameters_of_the_loss_itself_get_no_gradient(make: str) -> None:
    model, scale = nn.Linear(5, 4), nn.Parameter(torch.ones(()))
    MEASURES[make](model, sgd(model), lambda m, x: (m(x) * scale).square().mean(), torch.randn(6, 5))
    assert scale.grad is None


@pytest.mark.parametrize(
    ("make", "at_call"), [("counted", 1), ("kept_bytes", 1), ("peak_bytes", 3), ("timed", 1), ("timed", 3), ("timed", 9)]
)
@pytest.mark.parametrize("name", ["conv_net", "transformer", "checkpointed"])
def test_a_loss_that_raises_leaves_no_trace(name: str, make: str, at_call: int) -> None:
    model, optimizer, loss, batch = mid_training(ZOO[name])
    before = fingerprint(model, optimizer)
    with pytest.raises(RuntimeError, match="midway"):
        MEASURES[make](model, optimizer, failing(loss, at_call), batch)
    assert fingerprint(model, optimizer) == before


# ---------------------------------------------------------------- small parts


@shapes_vary
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_least_squares_that_stay_positive_are_scipys(unknowns: int, more: int, seed: int) -> None:
    from scipy.optimize import nnls

    draw = np.random.default_rng(seed)
    rows, values = draw.normal(size=(unknowns + more, unknowns)), draw.normal(size=unknowns + more)
    assert trial._least_squares(rows, values) == pytest.approx(nnls(rows, values)[0], abs=1e-9)


def test_a_gpu_waits_until_it_never_has_to() -> None:
    """Issued in 1 ms each (1.3 and a mark's 0.02 when disturbed); the second computes for long, so that all are there."""
    issued = {2: 1e-3, 0: 1e-3, 1: 1e-3}
    assert passes._lead(issued, {}) == pytest.approx(3 * 1.32e-3)
    assert passes._lead(issued, {0: 1.0}) == pytest.approx(2 * 1.32e-3)
    assert passes._lead(issued, {2: 1.0}) == pytest.approx(1.32e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_small_step_waits_for_launches_on_cuda() -> None:
    """Captured it takes the GPU's own time, by far the smaller part."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)), nn.Linear(16, 2)).cuda()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 16, device="cuda")
    profile = measure.timed(model, optimizer, lambda model, x: model(x).square().mean(), batch)
    everything = [profile.everything]
    captured = profile.on(Mode(graphs=True)).cost(everything)
    assert 0 < captured.seconds < 0.7 * profile.cost(everything).seconds
    assert captured.bytes == profile.cost(everything).bytes


@pytest.mark.parametrize("last", [False, True])
def test_prices_of_captured_steps_count_on_kernels_for_norms_that_those_can_serve(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = torch.channels_last if last else torch.contiguous_format
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)).to(memory_format=form)
    batch = torch.randn(4, 3, 5, 5).contiguous(memory_format=form)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    params = dict(model.named_parameters())
    how = model, loss, batch, read(model, loss, batch), params, BatchNormModes(model, "chosen")
    mine = passes.NodeTiming(*how, prices=kernel_prices.PRICES)
    assert mine._served() == set()  # no GPU
    monkeypatch.setattr(mine.watch, "cuda", True)
    monkeypatch.setattr(kernel_prices, "find_spec", lambda name: None)
    assert mine._served() == set()  # no Triton
    monkeypatch.setattr(kernel_prices, "find_spec", lambda name: object())
    assert not passes.NodeTiming(*how)._served(), "without a declared kernel there is none"
    assert mine._served() == ({"1"} if last else set())  # six channels are not a multiple of eight
    assert not any(module._forward_pre_hooks for module in model.modules())
