"""What a probe says a unit is worth, against steps that are really taken and sums that are written out."""

from __future__ import annotations

import copy
import math
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from zoo import ZOO, Case, adamw, failing, fingerprint, mid_training, sgd

from pliant import Part, ProbeError, Unit, score, units
from pliant.graph.backward import read
from pliant.runtime import batches
from pliant.runtime.sandbox import sandbox

Loss = Callable[[nn.Module, Any], torch.Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]
every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
GAIN = score.update_gain()


def tensors_of(model: nn.Module) -> list[Unit]:
    return [Unit(name, (Part(name),)) for name, param in model.named_parameters() if param.requires_grad]


def probe(signal: score.Signal, model: nn.Module, optimizer: Any, loss: Loss, batch: Any, **more: Any) -> dict[str, float]:
    """Values by name; of every tensor unless units are given."""
    found = score.probe(signal, model, optimizer, loss, batch, more.pop("units", tensors_of(model)), **more)
    return {unit.name: value for unit, value in found.items()}


def gradients(model: nn.Module, loss: Loss, batch: Any) -> dict[str, torch.Tensor]:
    """A plain backward pass, seen from outside; zeros where the loss does not reach."""
    with sandbox(model):
        loss(model, batch).backward()
        named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def fresh_updates(model: nn.Module, make: Make, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a new optimizer's real step does to a copy of the model that has these gradients."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.grad = grads[name].clone() if name in grads else None
    optimizer.step()
    return {name: param.detach() - before[name] for name, param in model.named_parameters()}


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() * b.detach().double()).sum())


def gains(model: nn.Module, make: Make, loss: Loss, batch: Any) -> dict[str, float]:
    """−Σ g·Δw, the long way."""
    grads = gradients(model, loss, batch)
    updates = fresh_updates(model, make, grads)
    return {name: -dot(grads[name], updates[name]) for name in grads}


def close(values: dict[str, float], rel: float = 1e-4) -> Any:
    return pytest.approx(values, rel=rel, abs=1e-9)


# ---------------------------------------------------------------- update gain

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "weight decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1),
    "maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True),
    "one by one": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, initial_accumulator_value=0.1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "groups": lambda m: torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(m.parameters())], lr=1.0),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_update_gain_is_that_of_a_real_fresh_step(make: Make) -> None:
    model, loss, batch = ZOO["branches"].make()
    assert probe(GAIN, model, make(model), loss, batch) == close(gains(model, make, loss, batch))


@pytest.mark.parametrize("make", [sgd, adamw])
@every_case
def test_update_gain_on_every_model(case: Case, make: Make) -> None:
    """Dropout too: a probe draws what the next step would draw."""
    model, loss, batch = case.make()
    assert probe(GAIN, model, make(model), loss, batch) == close(gains(model, make, loss, batch))


@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_optimizers_own_state_does_not_matter(make: Make) -> None:
    model, loss, batch = ZOO["misordered"].make()
    start = copy.deepcopy(model.state_dict())
    optimizer = make(model)
    before = probe(GAIN, model, optimizer, loss, batch)
    for _ in range(5):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    model.load_state_dict(start)
    assert len(optimizer.state) > 0
    assert probe(GAIN, model, optimizer, loss, batch) == before


def test_a_scheduler_sets_the_rate_and_does_not_see_the_probe() -> None:
    model, loss, batch = ZOO["misordered"].make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = probe(GAIN, model, optimizer, loss, batch)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert probe(GAIN, model, optimizer, loss, batch) == before
    with pytest.warns(UserWarning, match=r"`lr_scheduler\.step\(\)` before `optimizer\.step\(\)`"):
        schedule.step()  # it was told of no step
    after = probe(GAIN, model, optimizer, loss, batch)
    assert after == close({name: value / 2 for name, value in before.items()})


def test_a_warm_up_that_begins_at_zero_scores_by_the_rate_that_it_leads_to() -> None:
    model, loss, batch = next(iter(ZOO.values())).make()
    optimizer = adamw(model)
    values = probe(GAIN, model, optimizer, loss, batch)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert probe(GAIN, model, optimizer, loss, batch) == values and any(value > 0 for value in values.values())
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_step_hooks_of_the_optimizer_do_not_fire() -> None:
    model, loss, batch = ZOO["misordered"].make()
    optimizer, fired = adamw(model), []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    probe(score.update_gain(), model, optimizer, loss, batch)
    assert not fired
    optimizer.step()
    assert fired == ["before", "after"]


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_step_hooks_for_all_optimizers_do_not_fire(register: Callable[..., Any]) -> None:
    model, loss, batch = ZOO["misordered"].make()
    fired: list[int] = []
    handle = register(lambda *_: fired.append(1))
    try:
        probe(GAIN, model, adamw(model), loss, batch)
    finally:
        handle.remove()
    assert not fired


def test_a_parameter_that_the_optimizer_does_not_hold_gains_nothing() -> None:
    model, loss, batch = ZOO["misordered"].make()
    optimizer = torch.optim.SGD(model.a_last.parameters(), lr=0.1)
    values = probe(GAIN, model, optimizer, loss, batch)
    assert {name for name, value in values.items() if value} == {"a_last.weight", "a_last.bias"}
    assert all(probe(score.grad_norm(), model, optimizer, loss, batch).values())


def test_lbfgs_is_refused() -> None:
    model, loss, batch = ZOO["misordered"].make()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = fingerprint(model, optimizer)
    with pytest.raises(ValueError, match="LBFGS makes its update from a closure"):
        probe(GAIN, model, optimizer, loss, batch)
    assert fingerprint(model, optimizer) == before
    assert all(probe(score.grad_norm(), model, optimizer, loss, batch).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_updates_are_not_rounded_away(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.LayerNorm(8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-7), lambda m, b: m(b).square().mean()
    norms = probe(score.grad_norm(), model, optimizer, loss, x)
    assert probe(GAIN, model, optimizer, loss, x)["weight"] == pytest.approx(1e-7 * norms["weight"], rel=0.02)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(i=st.integers(1, 6), o=st.integers(1, 6), n=st.integers(1, 9), lr=st.floats(1e-3, 1.0))
def test_plain_sgd_gains_rate_times_squared_gradient(i: int, o: int, n: int, lr: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(i, o).double(), torch.randn(n, i).double()
    loss = lambda m, b: m(b).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    norms = probe(score.grad_norm(), model, optimizer, loss, x)
    assert probe(GAIN, model, optimizer, loss, x) == pytest.approx({k: lr * v for k, v in norms.items()}, rel=1e-2, abs=1e-6)


# ---------------------------------------------------------------- scaling, streaming


@pytest.mark.parametrize("signal", [GAIN, score.grad_norm(), score.fisher()], ids=lambda s: s.name)
def test_a_scaled_loss_gives_the_same_values(signal: score.Signal) -> None:
    model, loss, batch = ZOO["branches"].make()
    values = probe(signal, model, adamw(model), loss, batch)
    assert probe(signal, model, adamw(model), loss, batch, scale=1024.0) == close(values)


def held(model: nn.Module, run: Callable[[], Any]) -> list[int]:
    """Bytes of gradients that are alive, each time that a new one appears on a parameter."""
    alive: list[weakref.ref[torch.Tensor]] = []
    amounts: list[int] = []

    def on_grad(param: torch.Tensor) -> None:
        alive.append(weakref.ref(param.grad))
        amounts.append(sum(ref().numel() * 4 for ref in alive if ref() is not None))

    handles = [param.register_post_accumulate_grad_hook(on_grad) for param in model.parameters()]
    run()
    for handle in handles:
        handle.remove()
    assert not any(ref() is not None for ref in alive)
    return amounts


@pytest.mark.parametrize("signal", [GAIN, score.grad_norm()], ids=lambda s: s.name)
def test_gradients_stream(signal: score.Signal) -> None:
    """At most one gradient stands at a time, and none afterwards."""
    model, loss, batch = ZOO["branches"].make()
    largest = max(param.numel() * 4 for param in model.parameters())
    amounts = held(model, lambda: probe(signal, model, sgd(model), loss, batch))
    assert len(amounts) == len(list(model.parameters()))
    assert max(amounts) == largest
    assert all(param.grad is None for param in model.parameters())


def test_fisher_computes_hardly_a_gradient_of_a_parameter() -> None:
    """What it reads are gradients of outputs: beside them comes the smallest gradient of each module that is the first."""
    model, loss, batch = ZOO["branches"].make()
    first = model.blocks[0].conv.weight, model.blocks[0].shortcut.bias
    amounts = held(model, lambda: probe(score.fisher(), model, sgd(model), loss, batch))
    assert sorted(amounts) == sorted(4 * param.numel() for param in first)
    assert all(param.grad is None for param in model.parameters())


def test_sparse_gradients_are_worth_what_dense_ones_are() -> None:
    def make(sparse: bool) -> dict[str, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
        ids, y = torch.tensor([[1, 1], [2, 3], [1, 5], [0, 0]]), torch.tensor([0, 1, 2, 0])
        loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])  # noqa: E731
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {
            **probe(score.grad_norm(), model, optimizer, loss, (ids, y)),
            **probe(GAIN, model, optimizer, loss, (ids, y)),
        }

    assert make(sparse=True) == close(make(sparse=False))


# ---------------------------------------------------------------- law 7: worths add up

SIGNALS: dict[str, score.Signal] = {
    "update_gain": GAIN,
    "fisher": score.fisher(),
    "grad_norm": score.grad_norm(),
    "weight_norm": score.weight_norm(),
    "nearness": score.nearness(),
    "random": score.random(),
}


def graph_of(case: Case) -> Any:
    model, loss, batch = case.make()
    with sandbox(model):
        return read(model, loss, batch)


@pytest.mark.parametrize("signal", SIGNALS)
@every_case
def test_a_layer_is_worth_the_sum_of_its_tensors(case: Case, signal: str) -> None:
    model, loss, batch = case.make()
    layers = units.layers()(graph_of(case))
    singles = [Unit(param, (Part(param),)) for layer in layers for param in layer.params]
    by_layer = probe(SIGNALS[signal], model, adamw(model), loss, batch, units=layers)
    by_tensor = probe(SIGNALS[signal], model, adamw(model), loss, batch, units=singles)
    sums = {layer.name: sum(by_tensor[param] for param in layer.params) for layer in layers}
    assert by_layer == close(sums, rel=1e-9)


def by_index(model: nn.Module, name: str, dim: int) -> list[Unit]:
    size = model.get_parameter(name).shape[dim]
    return [Unit(f"{name}:{i}", (Part(name, dim, (i,)),)) for i in range(size)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_tensor_is_worth_the_sum_of_its_channels(signal: str, dim: int) -> None:
    model, loss, batch = ZOO["conv_net"].make()
    for name in ("0.weight", "3.weight", "6.weight", "10.weight"):  # full, depthwise and grouped convolutions, a linear layer
        channels = by_index(model, name, dim)
        pairs = [Unit("even", (Part(name, dim, tuple(range(0, len(channels), 2))),))]
        one = [Unit(name, (Part(name),))]
        values = probe(SIGNALS[signal], model, adamw(model), loss, batch, units=[*channels, *pairs, *one])
        assert values[name] == pytest.approx(sum(values[c.name] for c in channels), rel=1e-5)
        assert values["even"] == pytest.approx(sum(values[c.name] for c in channels[::2]), rel=1e-5)


def test_what_a_signal_does_not_tell_apart_is_spread_evenly() -> None:
    model, loss, batch = ZOO["misordered"].make()
    for signal in (score.nearness(), score.random(), score.fisher()):
        values = set(probe(signal, model, sgd(model), loss, batch, units=by_index(model, "c_middle.weight", 1)).values())
        assert len(values) == 1 and min(values) > 0  # a potential belongs to outputs, also where there are as many inputs


def test_channels_of_an_embedding_have_a_potential() -> None:
    model, loss, batch = ZOO["tied"].make()
    assert sum(probe(score.fisher(), model, sgd(model), loss, batch, units=by_index(model, "embed.weight", 0)).values()) > 0


# ---------------------------------------------------------------- Fisher potential


def outputs(model: nn.Module, loss: Loss, batch: Any) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(activation, gradient) at each use of each module with parameters, from a copy that works on nothing in place."""
    model = copy.deepcopy(model)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "inplace"):
            module.inplace = False
        if module._parameters:
            module.register_forward_hook(
                lambda _, __, out, name=name: (out.retain_grad(), seen.setdefault(name, []).append(out))[1]
            )
    loss(model, batch).backward()
    # What a checkpoint computes again has no gradient of its own.
    return {name: [(out.detach(), out.grad) for out in outs if out.grad is not None] for name, outs in seen.items()}


def potentials(uses: Sequence[tuple[torch.Tensor, torch.Tensor]], channels_first: bool) -> list[float]:
    """Δ_o = 1/(2N) Σ_n (Σ_d a·g)², one sample, one channel and one use at a time."""
    samples = uses[0][0].shape[0]
    dim = 1 if channels_first else uses[0][0].dim() - 1
    out = []
    for o in range(uses[0][0].shape[dim]):
        total = 0.0
        for n in range(samples):
            total += sum(dot(a.select(dim, o)[n], g.select(dim, o)[n]) for a, g in uses) ** 2
        out.append(total / (2 * samples))
    return out


@pytest.mark.parametrize("name", ["conv_net", "branches", "thrice", "misordered", "unused", "checkpointed"])
def test_fisher_equals_the_slow_sum(name: str) -> None:
    model, loss, batch = ZOO[name].make()
    values = probe(score.fisher(), model, sgd(model), loss, batch)
    expected = dict.fromkeys(values, 0.0)
    with sandbox(model):
        found = outputs(model, loss, batch)
    for module, uses in found.items():
        first = next(n for n, _ in model.get_submodule(module).named_parameters())
        kind = model.get_submodule(module)
        expected[f"{module}.{first}"] = sum(potentials(uses, isinstance(kind, (nn.Conv2d, nn.BatchNorm2d))))
    assert values == close(expected)


def test_fisher_by_channel_on_tokens_and_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.SiLU(inplace=True), nn.Linear(4, 3))
    x, y = torch.randn(6, 2, 5), torch.randint(0, 3, (6,))
    loss = lambda m, b: F.cross_entropy(m(b[0]).mean(1), b[1])  # noqa: E731
    found = outputs(model, loss, (x, y))
    for module in ("0", "1", "3"):
        values = probe(score.fisher(), model, sgd(model), loss, (x, y), units=by_index(model, f"{module}.weight", 0))
        assert list(values.values()) == pytest.approx(potentials(found[module], channels_first=False), rel=1e-4)


def test_fisher_of_a_batch_is_that_of_its_samples() -> None:
    """Without batch statistics each sample's gradient is its own, so samples may be run one by one."""
    model, loss, (x, y) = ZOO["conv_net"].make()
    model.eval()
    values = probe(score.fisher(), model, sgd(model), loss, (x, y), units=by_index(model, "6.weight", 0))
    expected = np.zeros(12)
    for n in range(6):
        ((a, g),) = outputs(model, lambda m, b: loss(m, b) / 6, (x[n : n + 1], y[n : n + 1]))["6"]
        expected += (a[0] * g[0]).sum((1, 2)).square().double().numpy() / 12
    assert list(values.values()) == pytest.approx(expected, rel=1e-4)


def by_weight(model: nn.Module, loss: Loss, batch: Any, name: str) -> float:
    """The potential of a parameter from w·g over the whole batch."""
    product = model.get_parameter(name).detach() * gradients(model, loss, batch)[name]
    rows = product.reshape(product.shape[0] if product.dim() else 1, -1).sum(1)
    return float(rows.square().sum()) / (2 * batches.size(batch) ** 2)


def test_a_module_that_is_bypassed_is_judged_by_its_weights() -> None:
    model, loss, batch = ZOO["transformer"].make()
    values = probe(score.fisher(), model, sgd(model), loss, batch)
    name = "layers.0.attention.out_proj.weight"  # attention reads it without calling the module
    assert values[name] == pytest.approx(by_weight(model, loss, batch, name), rel=1e-4)


@pytest.mark.parametrize(("case", "name"), [("functional", "v"), ("transformer", "position"), ("custom", "w")])
def test_bare_parameters_of_a_larger_module_are_judged_by_themselves(case: str, name: str) -> None:
    model, loss, batch = ZOO[case].make()
    assert probe(score.fisher(), model, sgd(model), loss, batch)[name] == pytest.approx(
        by_weight(model, loss, batch, name), rel=1e-4
    )


# ---------------------------------------------------------------- the other signals


@every_case
def test_gradient_norm(case: Case) -> None:
    model, loss, batch = case.make()
    expected = {name: dot(grad, grad) for name, grad in gradients(model, loss, batch).items()}
    assert probe(score.grad_norm(), model, sgd(model), loss, batch) == close(expected)


def never(model: nn.Module, batch: Any) -> torch.Tensor:
    raise AssertionError("the loss ran")


@every_case
def test_signals_that_look_at_no_data_run_nothing(case: Case) -> None:
    model, _, _ = case.make()
    values = probe(score.weight_norm(), model, sgd(model), never, None)
    assert values == close({u.name: dot(model.get_parameter(u.name), model.get_parameter(u.name)) for u in tensors_of(model)})
    probe(score.nearness(), model, sgd(model), never, None)
    probe(score.random(), model, sgd(model), never, None)


@every_case
def test_nearness_falls_with_depth(case: Case) -> None:
    model, loss, batch = case.make()
    values = list(probe(score.nearness(), model, sgd(model), loss, batch, units=units.tensors()(graph_of(case))).values())
    assert values == pytest.approx([1 / (1 + i) for i in range(len(values))])


def test_random_hangs_on_seed_and_round_and_on_nothing_else() -> None:
    model, loss, batch = ZOO["branches"].make()

    def draw(**more: int) -> dict[str, float]:
        return probe(score.random(), model, sgd(model), loss, batch, **more)

    first = draw(seed=1, round=2)
    torch.rand(3), np.random.rand(3), random.random()
    assert draw(seed=1, round=2) == first
    assert all(0 <= value < 1 for value in first.values()) and len(set(first.values())) == len(first)
    for other in (draw(seed=1, round=3), draw(seed=2, round=2)):
        assert all(other[name] != value for name, value in first.items())


def test_unused_parameters_are_worth_nothing() -> None:
    model, loss, batch = ZOO["unused"].make()
    for signal in (GAIN, score.fisher(), score.grad_norm()):
        values = probe(signal, model, adamw(model), loss, batch)
        assert values["spare.weight"] == values["spare.bias"] == 0 and values["last.weight"] != 0


# ---------------------------------------------------------------- a signal of one's own


def test_a_new_signal_takes_a_dozen_lines() -> None:
    """How much the update changes the weights, relative to their size: Σ Δw² / Σ w²."""

    def worth(seen: score.Seen) -> torch.Tensor:
        update = seen.update()
        return update.square() / seen.weight.square().sum().clamp_min(1e-12)

    relative_change = score.Signal("relative_change", worth)

    model, loss, batch = ZOO["misordered"].make()
    updates = fresh_updates(model, adamw, gradients(model, loss, batch))
    expected = {name: dot(u, u) / dot(p := model.get_parameter(name), p) for name, u in updates.items()}
    assert probe(relative_change, model, adamw(model), loss, batch) == close(expected)


def test_a_signal_sees_what_its_needs_ask_for() -> None:
    model, loss, batch = ZOO["misordered"].make()
    seen: dict[str, score.Seen] = {}

    def worth(what: score.Seen) -> torch.Tensor:
        seen[what.name] = what
        return torch.zeros(1)

    order = [unit.name for unit in units.tensors()(graph_of(ZOO["misordered"]))]
    listed = [Unit(name, (Part(name),)) for name in order]
    for needs in ("nothing", "gradient", "activation"):
        seen.clear()
        probe(score.Signal("look", worth, needs=needs), model, sgd(model), loss, batch, units=listed)
        assert all(not what.weight.requires_grad for what in seen.values())
        assert all(what.depth == order.index(name) for name, what in seen.items())
        assert all((what.grad is not None) == (what.update is not None) == (needs == "gradient") for what in seen.values())
        assert all((what.potential is not None) == (needs == "activation") for what in seen.values())


# ---------------------------------------------------------------- watching


def test_watching_gives_the_squared_norm_of_the_gradients_that_stand() -> None:
    case = ZOO["branches"]
    model, loss, batch = case.make()
    layers = units.layers()(graph_of(case))
    norms = probe(score.grad_norm(), model, sgd(model), loss, batch, units=layers)
    loss(model, batch).backward()
    optimizer = adamw(model)
    before = fingerprint(model, optimizer)
    assert score.watch(dict(model.named_parameters()), layers) == close(norms)
    assert fingerprint(model, optimizer) == before


def test_without_gradients_there_is_nothing_to_watch() -> None:
    model, loss, batch = ZOO["misordered"].make()
    params = dict(model.named_parameters())
    assert score.watch(params, tensors_of(model)) == {}
    loss(model, batch).backward()
    model.b_first.weight.grad = None
    assert score.watch(params, tensors_of(model))["b_first.weight"] == 0


# ---------------------------------------------------------------- numbers that are none


class Poisoned(nn.Module):
    """Finite loss; the gradient of `poison` is not a number, or infinite."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.first, self.last, self.poison = nn.Linear(5, 6), nn.Linear(6, 4), nn.Parameter(torch.zeros(3))
        self.strength = strength

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) + self.poison.sqrt().sum() * torch.tensor([self.strength, 0, 0, 0])


@pytest.mark.parametrize("signal", [GAIN, score.grad_norm()], ids=["gain", "norm"])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("strength", [0.0, 1.0], ids=["not a number", "infinite"])
def test_a_gradient_that_is_no_number_spoils_its_own_unit_only(signal: score.Signal, make: Make, strength: float) -> None:
    model, (x, y) = Poisoned(strength), (torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1]))
    values = probe(signal, model, make(model), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y))
    assert {name for name, value in values.items() if not math.isfinite(value)} == {"poison"}
    assert math.isnan(values["poison"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "signal", [s for n, s in SIGNALS.items() if n not in ("weight_norm", "nearness", "random")], ids=lambda s: s.name
)
def test_a_loss_that_is_no_number_is_an_error(signal: score.Signal, bad: float) -> None:
    model, loss, batch = ZOO["conv_net"].make()
    optimizer = sgd(model)
    before = fingerprint(model, optimizer)
    with pytest.raises(ProbeError, match=f"the loss of the probe batch is {bad}"):
        probe(signal, model, optimizer, lambda m, b: loss(m, b) * bad, batch)
    assert fingerprint(model, optimizer) == before


# ---------------------------------------------------------------- no trace


@pytest.mark.parametrize("signal", SIGNALS.values(), ids=SIGNALS.keys())
@every_case
def test_probing_leaves_no_trace(case: Case, signal: score.Signal) -> None:
    model, optimizer, loss, batch = mid_training(case)
    grads = [param.grad for param in model.parameters()]
    before = fingerprint(model, optimizer)
    probe(signal, model, optimizer, loss, batch)
    assert fingerprint(model, optimizer) == before
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("signal", [GAIN, score.fisher()], ids=["gain", "fisher"])
@pytest.mark.parametrize("name", ["conv_net", "transformer", "checkpointed"])
def test_a_loss_that_raises_leaves_no_trace(name: str, signal: score.Signal) -> None:
    model, optimizer, loss, batch = mid_training(ZOO[name])
    before = fingerprint(model, optimizer)
    with pytest.raises(RuntimeError, match="midway"):
        probe(signal, model, optimizer, failing(loss, 1), batch)
    assert fingerprint(model, optimizer) == before


def test_a_signal_that_raises_leaves_no_trace() -> None:
    def worth(seen: score.Seen) -> torch.Tensor:
        raise RuntimeError("midway")

    for needs in ("gradient", "activation"):
        model, optimizer, loss, batch = mid_training(ZOO["conv_net"])
        before = fingerprint(model, optimizer)
        with pytest.raises(RuntimeError, match="midway"):
            probe(score.Signal("broken", worth, needs=needs), model, optimizer, loss, batch)
        assert fingerprint(model, optimizer) == before


def test_only_what_is_asked_for_is_probed() -> None:
    """A unit near the loss needs no gradient further down."""
    model, loss, batch = ZOO["misordered"].make()
    ran: list[str] = []
    handles = [p.register_post_accumulate_grad_hook(lambda _, n=n: ran.append(n)) for n, p in model.named_parameters()]
    one = [Unit("head", (Part("a_last.weight"), Part("a_last.bias")))]
    assert probe(GAIN, model, sgd(model), loss, batch, units=one)["head"] > 0
    assert set(ran) == {"a_last.weight", "a_last.bias"}
    for handle in handles:
        handle.remove()


# ---------------------------------------------------------------- less usual traces


class Making(nn.Module):
    """A buffer that is None until the first forward pass, and one that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean(0)
        self.register_buffer("late", x.amax(0))
        return self.layer(x)


def test_buffers_that_the_probe_made_are_gone() -> None:
    model = Making()
    probe(score.grad_norm(), model, sgd(model), lambda m, x: m(x).square().mean(), torch.randn(6, 5))
    assert model.mean is None and not hasattr(model, "late")


def test_an_expanded_buffer_is_no_obstacle() -> None:
    model = nn.Linear(5, 4)
    model.register_buffer("position", torch.arange(3).expand(2, -1))
    assert probe(score.grad_norm(), model, sgd(model), lambda m, x: m(x).square().mean(), torch.randn(6, 5))["weight"] > 0


@pytest.mark.parametrize("signal", [GAIN, score.fisher()], ids=["gain", "fisher"])
def test_parameters_of_the_loss_itself_get_no_gradient(signal: score.Signal) -> None:
    model, scale = nn.Linear(5, 4), nn.Parameter(torch.ones(()))
    probe(signal, model, sgd(model), lambda m, x: (m(x) * scale).square().mean(), torch.randn(6, 5))
    assert scale.grad is None


class Complex(nn.Module):
    """A complex weight, held as it is or as pairs of real numbers."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        pairs = torch.linspace(-1, 1, 24, dtype=torch.float64).sin().reshape(4, 3, 2)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.w = nn.Parameter(torch.view_as_complex(pairs).clone() if is_complex else pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w if self.w.is_complex() else torch.view_as_complex(self.w)
        return (torch.tanh(self.first(x)).to(w.dtype) @ w).abs().square() + (x.to(w.dtype) @ w[:, :1]).imag


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("signal", [GAIN, score.grad_norm(), score.weight_norm(), score.fisher()], ids=lambda s: s.name)
def test_a_complex_parameter_is_worth_as_much_as_its_real_and_imaginary_parts(signal: score.Signal, make: Make) -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, 4, dtype=torch.float64)
    values = [
        probe(signal, model, make(model), lambda m, x: m(x).square().mean(), batch) for model in (Complex(True), Complex(False))
    ]
    assert values[0]["w"] > 0
    assert values[0] == pytest.approx(values[1], rel=1e-5)
