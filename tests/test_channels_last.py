"""Custom kernels for x86-64: channels-last convolutions and chains give PyTorch's results, and step aside where they must."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pliant import Session, recipes
from pliant.engine.kernels import chains, channels_last
from pliant.engine.kernels.arm import processor as arm
from pliant.engine.kernels.switch import Swapped, is_slow_here

NEAR = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def x86_processor(monkeypatch: pytest.MonkeyPatch, no_custom_kernels: None) -> None:
    monkeypatch.setattr(channels_last, "PAYS_HERE", True)
    monkeypatch.setattr(arm, "SLOW_HERE", False)


def norm(width: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(width)
    made.running_mean.normal_(0, 0.3)
    made.running_var.uniform_(0.5, 2.0)
    return made


class Block(nn.Module):
    """An inverted residual block; the code around its chain is the user's own."""

    def __init__(self, width: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        wide = 2 * width
        self.conv = nn.Sequential(
            nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), norm(wide), nn.ReLU6(inplace=True)),
            nn.Sequential(nn.Conv2d(wide, wide, size, stride, size // 2, groups=wide), norm(wide), nn.ReLU(inplace=True)),
            nn.Conv2d(wide, width, 1, bias=False),
            norm(width),
        )
        self.skip = stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.skip else self.conv(x)


class Mobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), norm(8), nn.ReLU6(inplace=True))
        self.blocks = nn.Sequential(Block(8), Block(8, 5, 2), Block(8, 5), Block(8, 3, 2), Block(8))
        self.last = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


def mobile() -> Mobile:
    torch.manual_seed(0)
    return Mobile()


def images(samples: int = 4, side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, side, side), torch.arange(samples) % 4


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    engine: str, chosen: tuple[str, ...], norms: Any = "chosen", make: Callable[[], nn.Module] = mobile, **how: Any
) -> tuple[Session, dict[str, torch.Tensor]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with Session(model, optimizer, classify, recipes.only(*chosen), engine=engine, norm=norms, **how) as session:
        for _ in range(4):
            session.step(images())
    return session, model.state_dict()


# ---------------------------------------------------------------- one convolution


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("side", "outputs", "size", "stride", "padding", "groups"),
    [(5, 6, 1, 1, 0, 1), (1, 6, 1, 1, 0, 1), (4, 6, 1, 2, 0, 1), (1, 4, 3, 1, 1, 4), (2, 4, 3, 1, 1, 4), (3, 4, 3, 2, 1, 4),
     (6, 4, 3, 1, 1, 4), (2, 4, 5, 1, 2, 4), (4, 4, 5, 2, 2, 4), (6, 4, 5, 1, 2, 4), (5, 8, 3, 1, 0, 1), (5, 8, 3, 1, 1, 2)],
)  # fmt: skip
def test_a_convolution_is_pytorchs(
    side: int, outputs: int, size: int, stride: int, padding: int, groups: int, bias: bool, trained: tuple[bool, bool]
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, outputs, size, stride, padding, groups=groups, bias=bias).requires_grad_(trained[1])
    input = torch.randn(3, 4, side, side, requires_grad=trained[0])
    leaves = [input] * trained[0] + [*conv.parameters()] * trained[1]
    plain = conv(input)
    with Swapped():
        ours = conv(input)
    torch.testing.assert_close(ours, plain, **NEAR)
    assert ours.is_contiguous(memory_format=torch.channels_last) and not ours._is_view()
    grad = torch.randn_like(plain)
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, grad) for out in (ours, plain)), **NEAR)


def test_second_derivatives_are_pytorchs() -> None:
    torch.manual_seed(0)
    input = torch.randn(2, 3, 2, 2, requires_grad=True)
    for conv in (nn.Conv2d(3, 5, 1), nn.Conv2d(3, 3, 3, padding=1, groups=3)):
        found = []
        for around in (Swapped, torch.enable_grad):
            with around():
                out = conv(input).square().sum()
            (first,) = torch.autograd.grad(out, input, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [input, conv.weight]))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("model", "pays"),
    [
        (mobile(), True),
        (nn.Conv2d(4, 4, 3), False),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)), True),
        (nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3)), False),  # a dense kernel is slower this way
        (nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_networks_of_small_convolutions_use_them(model: nn.Module, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_slow_here(model) == pays
    monkeypatch.setattr(channels_last, "PAYS_HERE", False)
    assert not is_slow_here(model)


# ---------------------------------------------------------------- chains


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "chosen", [(), ("0.0",), ("1.0.bias",), ("1.1",), ("2",), ("3.bias",), ("0", "2"), ("0", "1", "2", "3")]
)
def test_a_chain_is_its_modules(chosen: tuple[str, ...], training: bool, flows: bool) -> None:
    torch.manual_seed(0)
    module = Block(4).conv.train(training)
    for name, param in module.named_parameters():
        param.requires_grad_(name.startswith(chosen))
    twin, input = copy.deepcopy(module), torch.randn(3, 4, 5, 5, requires_grad=flows)
    links = chains.chain_of(module)
    assert links is not None and len(links) == 3 and chains.serves(links, input)
    ours, plain = chains.run(links, input), twin(input)
    torch.testing.assert_close(ours, plain, **NEAR)
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), **NEAR)
    leaves = [[p for p in one.parameters() if p.requires_grad] + [input] * flows for one in (module, twin)]
    assert ours.requires_grad == bool(leaves[0])
    if leaves[0]:
        grad = torch.randn_like(plain)
        found = [torch.autograd.grad(out, those, grad) for out, those in zip((ours, plain), leaves, strict=True)]
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_new_statistics_are_folded_anew() -> None:
    module = Block(4).conv.eval().requires_grad_(False)
    links, input = chains.chain_of(module), torch.randn(3, 4, 5, 5, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(chains.run(links, input), module(input), **NEAR)
        module[0][1].running_mean.add_(0.5)
        module[2].weight.mul_(1.5)


def test_the_result_may_be_changed_in_place() -> None:
    links = chains.chain_of(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6()))
    out = chains.run(links, torch.randn(2, 4, 3, 3))
    out.add_(1.0).sum().backward()
    assert links[0].conv.weight.grad is not None


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(4, 4, 1), nn.GELU()],
        [nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)],
        [nn.Conv2d(4, 4, 3, padding="same")],
        [nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")],
        [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)],
        [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None)],
        [nn.Conv2d(4, 4, 1), nn.ReLU(), nn.ReLU6()],
        [nn.Conv2d(4, 4, 1).double()],
        [],
    ],
)
def test_what_is_no_chain_runs_as_it_is(layers: list[nn.Module]) -> None:
    assert chains.chain_of(nn.Sequential(*layers)) is None


# ---------------------------------------------------------------- sessions

CHOICES = [("blocks.4.*", "last.*", "head.*"), ("blocks.1.conv.0.0.weight", "blocks.4.conv.2.weight", "head.*"), ("head.*",)]


@pytest.mark.parametrize("norms", ["chosen", "frozen"])
@pytest.mark.parametrize("chosen", CHOICES)
def test_training_is_that_of_plain_autograd(chosen: tuple[str, ...], norms: str) -> None:
    session, ours = train("auto", chosen, norms)
    _, plain = train("plain", chosen, norms)
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)
    assert session.engine == "prefix" and "kernels" not in session.why_not


def test_full_training_is_pytorchs_bit_for_bit() -> None:
    model, plain = mobile(), mobile()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9) for one in (model, plain)]
    with Session(model, optimizers[0], classify, recipes.full()) as session:
        for _ in range(3):
            session.step(images())
            optimizers[1].zero_grad()
            classify(plain, images()).backward()
            optimizers[1].step()
        assert session.engine == "plain"
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_weights_and_optimizer_state_keep_their_layout() -> None:
    session, _ = train("auto", CHOICES[0])
    for param in session.model.parameters():
        assert param.is_contiguous() and (param.grad is None or param.grad.is_contiguous())
        assert all(one.is_contiguous() for one in session.optimizer.state.get(param, {}).values() if one is not None)
    assert not any("forward" in module.__dict__ for module in session.model.modules())


def test_modules_of_a_cached_prefix_are_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, model = [], mobile()
    forward = nn.ReLU6.forward
    monkeypatch.setattr(nn.ReLU6, "forward", lambda self, x: (entered.append(self), forward(self, x))[1])
    nn.ReLU6.forward.__module__ = "torch.nn.modules.activation"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = recipes.only("last.*", "head.*")
    how = {"engine": "prefix", "cache": "1MB", "norm": "chosen"}  # "auto" looks at the first batches in passes of its own
    with Session(model, optimizer, classify, policy, **how) as session:
        for step in range(4):
            entered.clear()
            session.step(images(), ids=[0, 1, 2, 3])
            assert step < 2 or not entered
        model.stem[2] = nn.ReLU6(inplace=True)  # another module: what it does is followed
        session.step(images(), ids=[0, 1, 2, 3])
        assert entered


class Relies(nn.Module):
    """Code that fails with channels-last tensors, or takes them for others."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last, self.head, self.how = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.Linear(96, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.conv(x))
        flat = x.view(len(x), -1) if self.how == "view" else x.as_strided((len(x), 96), (96, 1))
        return self.head(flat)


@pytest.mark.parametrize(
    ("how", "why"), [("view", "fails with channels-last tensors: RuntimeError: view size"), ("strides", "differs")]
)
def test_code_that_relies_on_the_layout_runs_as_it_is(how: str, why: str) -> None:
    model = Relies(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(model, optimizer, classify, recipes.only("last.*", "head.*")) as session:
        value = session.step(images(side=4))
        assert session.engine == "plain" and why in session.why_not["kernels"]
    assert torch.equal(value, classify(Relies(how), images(side=4)))


class Pooled(nn.Module):
    """A network of small convolutions that pools in PyTorch's own way, also inside of a block."""

    def __init__(self, end: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 1)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.end, self.head = end, nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.end(self.last(x * self.squeeze(x))))


def pooled() -> Pooled:
    torch.manual_seed(0)
    return Pooled(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))


def test_pooling_to_one_value_keeps_the_backward_graph() -> None:
    model = pooled()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), classify, recipes.last(time=1.0)) as session:
        session.step(images())  # each node of the graph is timed
    session, ours = train("auto", ("last.*", "head.*"), make=pooled)
    _, plain = train("plain", ("last.*", "head.*"), make=pooled)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert session.engine == "prefix" and "kernels" not in session.why_not


def test_where_the_backward_graph_differs_kernels_step_aside() -> None:
    model = Pooled(nn.Sequential(nn.AvgPool2d(2), nn.Flatten()), 200)  # what is flattened is copied if it is channels-last
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), classify, recipes.last(time=1.0)) as session:
        session.step(images())
        assert "backward graph differs" in session.why_not["kernels"]


def test_a_loss_that_differentiates_is_tried_too() -> None:
    def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        value = classify(model, (inputs, batch[1]))
        (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
        return value + slope.pow(2).sum()

    model, plain = pooled(), pooled()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), penalised, recipes.only("last.*", "head.*")) as session:
        torch.testing.assert_close(session.step(images()), penalised(plain, images()).detach(), rtol=1e-4, atol=1e-5)


def test_rounding_that_batch_statistics_amplify_does_no_harm() -> None:
    """Two values per channel that are nearly the same: their difference is rounding, and a norm makes it 1."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 1), nn.AdaptiveAvgPool2d(1), norm(64), nn.Flatten(), nn.Linear(64, 4)
    )
    with torch.no_grad():
        model[5].weight.mul_(10)
    inputs, labels = images(side=8)
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), classify, recipes.only("5.*")) as session:
        session.step((1000 + 1e-3 * inputs, labels))
        assert "kernels" not in session.why_not


def test_a_loss_that_needs_its_whole_batch_has_the_kernels_too() -> None:
    def whole(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) != 4:
            raise ValueError("four, please")
        return classify(model, batch)

    model = Mobile()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), whole, recipes.only("head.*")) as session:
        session.step(images())
        assert session.engine == "prefix" and not session.why_not


def test_hooks_run() -> None:
    seen: list[str] = []

    def hooked() -> nn.Module:
        model = mobile()
        model.blocks[3].conv[0][0].register_forward_hook(lambda *_: seen.append("forward"))
        model.blocks[4].conv.register_full_backward_hook(lambda *_: seen.append("backward"))
        return model

    train("auto", ("blocks.3.*", "blocks.4.*", "head.*"), make=hooked)
    assert seen.count("forward") >= 4 and seen.count("backward") >= 4


def test_checkpoints_keep_pytorchs_kernels() -> None:
    block, input = Block(4).eval(), torch.randn(2, 4, 6, 6, requires_grad=True)
    plain = torch.autograd.grad(block(input).sum(), input)
    with Swapped():
        out = checkpoint(block, input, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), input), plain, **NEAR)


def test_other_types_run_as_they_are() -> None:
    def double() -> nn.Module:
        return mobile().double()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0].double()), batch[1])

    found = []
    for engine in ("auto", "plain"):
        model = double()
        with Session(
            model, torch.optim.SGD(model.parameters(), lr=0.01), loss, recipes.only("head.*"), engine=engine
        ) as session:
            for _ in range(3):
                session.step(images())
        found.append(model.state_dict())
    torch.testing.assert_close(*found)


def test_arm_keeps_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm, "SLOW_HERE", True)
    with Swapped():
        assert nn.Conv2d(4, 4, 1)(torch.randn(2, 4, 5, 5)).is_contiguous()
