"""TinyTrain's parts: the Fisher potential, in pieces or whole; the score; and the budget, measured on what really ran."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import bars
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pliant import Budget, BudgetError, Mode, Session, measure, recipes, score, solve, units
from pliant.apps import models
from pliant.apps.data.images import ImageSet
from pliant.apps.fewshot import Augment, Prototypes, adapt
from pliant.apps.fewshot.views import Views
from pliant.apps.models import FoldedNet
from pliant.graph.backward import read
from pliant.planning.solve import Problem
from pliant.runtime.memory import LiveBytes
from pliant.runtime.sandbox import sandbox

SMALL = ((3, 1, 16, 8), (5, 2, 24, 12), (3, 1, 36, 12))


def task(seed: int = 0, samples: int = 6) -> tuple[Prototypes, Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    model = Prototypes(FoldedNet(SMALL, classes=2)).double().eval()
    model.log_scale.requires_grad_(False)
    batch = torch.randn(samples, 3, 16, 16).double(), torch.arange(samples) % 3
    model.fit_([batch], classes=3)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return model, loss, batch


def channels_of(model: nn.Module, loss: Any, batch: Any, **how: Any) -> Any:
    return units.channels(**how)(read(model, loss, batch))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# ---------------------------------------------------------------- the Fisher potential


def slow_potentials(model: Prototypes, loss: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Δ_o = 1/(2N) Σ_n (Σ_d a·g)², one sample after the other, g of the mean loss of all."""
    out: dict[str, torch.Tensor] = {}
    samples = len(batch[0])
    for n in range(samples):
        seen: dict[str, torch.Tensor] = {}

        def keep(name: str, seen: dict[str, torch.Tensor] = seen) -> Any:
            def hook(_: Any, __: Any, out: torch.Tensor) -> None:
                seen[name] = out
                out.retain_grad()

            return hook

        named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
        handles = [module.register_forward_hook(keep(name)) for name, module in named]
        (loss(model, tuple(part[n : n + 1] for part in batch)) / samples).backward()
        for handle in handles:
            handle.remove()
        for name, output in seen.items():
            assert output.grad is not None
            per_channel = (output.detach() * output.grad).sum((0, 2, 3))
            out[name] = out.get(name, torch.zeros(())) + per_channel.square() / (2 * samples)
        model.zero_grad()
    return out


def test_the_fisher_potential_equals_a_slow_loop_over_samples() -> None:
    model, loss, batch = task()
    found = score.probe(score.fisher(), model, sgd(model), loss, batch, channels_of(model, loss, batch, group=3))
    slow = slow_potentials(model, loss, batch)
    for unit, value in found.items():
        layer, part = unit.name.partition("[")[0], unit.parts[0]
        if layer in slow:
            assert part.index is not None
            assert value == pytest.approx(float(slow[layer][list(part.index)].sum()))
    assert sum(value > 0 for value in found.values()) > 20


@pytest.mark.parametrize("cuts", [[1] * 6, [2, 2, 2], [6]])
def test_in_pieces_it_is_that_of_the_whole(cuts: list[int]) -> None:
    model, loss, batch = task()
    several = channels_of(model, loss, batch)
    whole = score.probe(score.fisher(), model, sgd(model), loss, batch, several)
    pieces = list(zip(*(part.split(cuts) for part in batch), strict=True))
    found = score.probe(score.fisher(), model, sgd(model), loss, None, several, pieces=pieces)
    assert list(found.values()) == pytest.approx(list(whole.values()))


def test_pieces_of_unequal_size_count_by_their_share() -> None:
    model, _, batch = task()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels, share = batch
        return share * F.cross_entropy(model(images), labels)

    cuts = [4, 2]
    pieces = [(x, y, torch.tensor(len(x) * 2 / 6).double()) for x, y in zip(*(part.split(cuts) for part in batch), strict=True)]
    several = channels_of(model, loss, pieces[0])
    whole = score.probe(score.fisher(), model, sgd(model), loss, (*batch, torch.tensor(1.0)), several)
    found = score.probe(score.fisher(), model, sgd(model), loss, None, several, pieces=pieces)
    assert list(found.values()) == pytest.approx(list(whole.values()))


def test_of_what_no_module_shows_pieces_add_up_too() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    torch.manual_seed(0)
    model, batch = Bare().double(), (torch.randn(6, 4).double(), torch.randn(6, 3).double())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    several = units.tensors()(read(model, loss, batch))
    whole = score.probe(score.fisher(), model, sgd(model), loss, batch, several)
    pieces = list(zip(*(part.split(2) for part in batch), strict=True))
    found = score.probe(score.fisher(), model, sgd(model), loss, None, several, pieces=pieces)
    assert list(found.values()) == pytest.approx(list(whole.values()))


@pytest.mark.parametrize("signal", [score.update_gain(), score.grad_norm()], ids=lambda s: s.name)
def test_other_signals_are_the_mean_over_pieces(signal: score.Signal) -> None:
    model, loss, batch = task(samples=8)
    several = channels_of(model, loss, batch)
    pieces = list(zip(*(part.split(4) for part in batch), strict=True))
    each = [score.probe(signal, model, sgd(model), loss, piece, several) for piece in pieces]
    found = score.probe(signal, model, sgd(model), loss, None, several, pieces=pieces)
    expected = [sum(values[unit] for values in each) / len(each) for unit in several]
    assert list(found.values()) == pytest.approx(expected, abs=1e-12)


def test_windows_and_pieces_together_change_nothing_and_leave_no_trace() -> None:
    model, loss, batch = task()
    several, optimizer = channels_of(model, loss, batch), sgd(model)
    whole = score.probe(score.fisher(), model, optimizer, loss, batch, several)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    names = list(dict.fromkeys(param for unit in several for param in unit.params))
    windows = [names[:7], names[7:12], names[12:]]
    pieces = list(zip(*(part.split(1) for part in batch), strict=True))
    found = score.probe(score.fisher(), model, optimizer, loss, None, several, windows=windows, pieces=pieces)
    assert list(found.values()) == pytest.approx(list(whole.values()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters()) and not optimizer.state
    assert torch.equal(torch.get_rng_state(), rng)


# ---------------------------------------------------------------- score, cost, recipe


def problem(values: list[float], **more: Any) -> Problem:
    count = len(values)
    names = tuple(f"layer{i}" for i in range(count))
    return Problem(
        names, np.array(values), np.eye(count, dtype=bool), np.ones((1, count)), np.array([1.0]), np.zeros(count, bool), **more
    )


def test_the_score_weighs_value_against_size() -> None:
    """s = P / ((params / most) · (MACs / most)): by hand 1/(1·1), 2/(1·0.5), 3/(0.1·1)."""
    sizes = {"elements": np.array([100.0, 100.0, 10.0]), "macs": np.array([1000.0, 500.0, 1000.0])}
    chosen = solve.greedy(by="score")(problem([1.0, 2.0, 3.0], **sizes))
    assert chosen.tolist() == [False, False, True]
    chosen = solve.greedy(by="score")(problem([30.0, 2.0, 0.2], **sizes))
    assert chosen.tolist() == [True, False, False]
    with pytest.raises(ValueError, match="elements and macs"):
        solve.greedy(by="score")(problem([1.0, 2.0]))


def test_what_a_unit_is_by_itself_is_read_off_the_profile() -> None:
    model, loss, batch = task(samples=1)
    profile = measure.counted(model, sgd(model), loss, batch)
    several = channels_of(model, loss, batch, group=8)
    elements, macs = profile.sizes(several)
    params = dict(model.named_parameters())
    for unit, size, work in zip(several, elements, macs, strict=True):
        layer = unit.name.partition("[")[0]
        weight, positions = params[f"{layer}.weight"], 64 if layer in ("backbone.stem", "backbone.blocks.0.project") else None
        share = len(unit.parts[0].index or ()) / len(weight)
        assert size == pytest.approx(share * (weight.numel() + len(weight)))
        if positions is not None:
            assert work == pytest.approx(share * positions * (weight.numel() + len(weight)))


def test_shares_of_macs_are_those_of_the_backward_pass() -> None:
    model, loss, batch = task()
    whole, back = (cost(model, sgd(model), loss, batch) for cost in (measure.counted, measure.backward))
    assert back.base.macs == 0 and back.full.macs == whole.full.macs - whole.base.macs
    assert back.full.bytes == whole.full.bytes
    some = channels_of(model, loss, batch)[:3]
    for cached in (False, True):
        assert back.on(Mode(prefix=cached, cached=cached)).cost(some).macs == whole.cost(some).macs - whole.base.macs


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("axis", ["out", "in"])
def test_the_recipe_works_in_any_session(axis: Any, exact: bool) -> None:
    torch.manual_seed(0)
    model = FoldedNet(SMALL, classes=3)
    batch = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    policy = recipes.tinytrain(memory="200KB", macs=0.3, axis=axis, exact=exact, head=True)
    with Session(model, sgd(model), loss, policy) as session:
        for _ in range(2):
            session.step(batch)
        selection = session.selection
        assert selection.cost.bytes <= 200e3 and selection.share("macs") <= 0.3
        assert session.rounds[-1].measured_bytes is not None and session.rounds[-1].measured_bytes <= 200e3
    names = {unit.name.partition("[")[0] for unit in selection.units}
    assert "classifier" in names and len(names) > 1
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= selection.params and "classifier.weight" in changed


def test_exact_is_never_worth_less_among_the_same_channels() -> None:
    model, loss, batch = task()
    several = channels_of(model, loss, batch)
    values = score.probe(score.fisher(), model, sgd(model), loss, batch, several)
    profile = measure.backward(model, sgd(model), loss, batch).on(Mode(lean=True))

    def worth(macs: float, exact: bool) -> float:
        from pliant import plan

        return plan(recipes.tinytrain(memory="300KB", macs=macs, exact=exact), profile, values).value

    for macs in (0.1, 0.2, 0.4):
        assert worth(macs, exact=True) >= worth(macs, exact=False) * (1 - 1e-3)  # its gap


def test_exact_chooses_among_dense_layers() -> None:
    """A depthwise layer has the potential of the one before it once more."""
    model, loss, batch = task()
    with sandbox(model):
        graph = read(model, loss, batch)
    of = {exact: {unit.name.split("[")[0] for unit in recipes.tinytrain(exact=exact).units(graph)} for exact in (False, True)}
    left_out = {name: model.get_submodule(name) for name in of[False] - of[True]}
    assert left_out and all(isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels for layer in left_out.values())
    assert all(getattr(model.get_submodule(name), "groups", 1) == 1 for name in of[True])


def test_a_budget_that_nothing_fits_names_the_floor() -> None:
    with pytest.raises(BudgetError, match="below the floor"):
        adapt(FoldedNet(SMALL), bars(3, 2), steps=1, budget=Budget(memory="1MB", macs=1e-5))


def test_the_probe_looks_no_deeper_than_the_budget_pays() -> None:
    torch.manual_seed(0)
    model, support = FoldedNet(SMALL), bars(3, 2)
    found = adapt(model, support, steps=1, policy=recipes.tinytrain(memory=None, macs=0.2)).selection
    assert found is not None
    assert found.values["backbone.stem[out 0:8]"] == 0.0  # the way there takes more MACs than a step may
    assert found.values["backbone.blocks.2.project[out 0:8]"] > 0.0


# ---------------------------------------------------------------- the budget, measured on what ran


class BackwardMacs(TorchDispatchMode):
    """Counts the multiply-accumulates of backward passes from the operations that run, by the shapes they run on.

    Convolutions: as many for each gradient as the forward pass of these shapes takes. Products of matrices: m·k·n. Elementwise
    products and sums count too, one for each element: gradients of some depthwise convolutions and of biases are computed that
    way, and whatever else they are can only make the count too high.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() < 0:
            return out
        name = func.overloadpacket.__name__
        if name == "convolution_backward":
            grad, weight, wanted = args[0], args[2], args[-1]
            self.total += grad.numel() * (weight[0].numel() * sum(wanted[:2]) + wanted[2])
        elif name == "convolution":
            self.total += out.numel() * args[1][0].numel()
        elif name in ("mm", "bmm", "addmm", "addmm_"):
            self.total += out.numel() * args[-2].shape[-1]
        elif name in ("mul", "mul_"):
            self.total += out.numel()
        elif name == "sum":
            self.total += args[0].numel()
        return out


def full_backward_macs(backbone: nn.Module, support: ImageSet) -> int:
    """Of one image, all parameters, by plain autograd."""
    model = Prototypes(copy.deepcopy(backbone)).eval()
    piece, labels, _ = next(iter(Views(support, 1, models.FOLDED_PIXEL_STATS)))
    model.fit_([(piece, labels)], len(support.classes))
    value = F.cross_entropy(model(piece), labels)
    with BackwardMacs() as counted:
        value.backward()
    return counted.total


def inference_peak(backbone: nn.Module, support: ImageSet) -> int:
    """Of the same images through the same network, one at a time, without gradients."""
    model = Prototypes(backbone).eval()
    with LiveBytes(torch.device("cpu")) as live, torch.no_grad():
        live.forget()
        views = Views(support, 1, models.FOLDED_PIXEL_STATS, Augment())
        model.fit_(((images, labels) for images, labels, _ in views), len(support.classes))
        return live.peak


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "exact"), [("mcunet_5fps", False), ("mobilenet_v2_035", True), ("proxyless_03", True)])
def test_a_whole_adaptation_stays_inside_a_megabyte_and_its_macs(name: str, exact: bool, one_thread: None) -> None:
    """Batch 1, 128²: graph, profile, probe, choice, prototypes, steps and predictions, every piece of memory followed."""
    torch.manual_seed(0)
    backbone = models.load(name, classes=2)
    support = bars(3, 1, size=128)
    inference = inference_peak(backbone, support)
    full = full_backward_macs(backbone, support)
    gc.collect()
    steps, per_step = 2, list[int]()
    with LiveBytes(torch.device("cpu")) as live, BackwardMacs() as macs:
        live.forget()

        def tell(step: int, loss: float) -> None:
            per_step.append(macs.total)

        policy = recipes.tinytrain(memory="1MB", macs=0.15, exact=exact)
        found = adapt(backbone, support, policy=policy, steps=steps, batch=1, query=support, in_place=True, on_step=tell)
    assert live.peak - inference <= 1e6
    assert found.memory_bytes is not None and found.memory_bytes <= 1e6
    second = (per_step[1] - per_step[0]) / len(support)  # the first step holds the probe
    assert 0.14 < second / full <= 0.1501  # what the loss itself multiplies, a few hundred, has no price
    assert found.selection is not None and len(found.selection.units) > 5
    assert found.predictions is not None and len(found.predictions) == len(support)


# ---------------------------------------------------------------- what sessions learned for this


def test_a_session_probes_on_what_it_is_given() -> None:
    model, loss, batch = task()
    pieces = list(zip(*(part.split(2) for part in batch), strict=True))
    policy = recipes.tinytrain(memory=None, macs=1.0)
    several = channels_of(model, loss, pieces[0])
    expected = score.probe(score.fisher(), model, sgd(model), loss, None, several, pieces=pieces)
    with Session(model, sgd(model), loss, policy, probe=pieces, engine="plain") as session:
        session.step(pieces[2])
        assert dict(session.selection.values) == pytest.approx({unit.name: value for unit, value in expected.items()})


@pytest.mark.parametrize("cache", [None, "10MB"])
def test_a_session_computes_what_the_model_does(cache: str | None) -> None:
    model, loss, batch = task()

    def features(model: Any, batch: Any) -> torch.Tensor:
        return model.embed(batch[0])

    ids = list(range(len(batch[0])))
    with Session(model, sgd(model), loss, recipes.tinytrain(memory=None, macs=0.2), cache=cache) as session:
        for _ in range(3):
            session.step(batch, ids=ids)
            for _ in range(2):
                found = session.compute(features, batch, ids=ids)
                with torch.no_grad():
                    torch.testing.assert_close(found, features(model, batch))
                assert not found.requires_grad
        assert session.caches == (cache is not None)
