"""The prefix in int8 on the real ONNX Runtime: how near to float32 it is, and when float32 runs instead. `make test-extras`."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runtimes import Small, small, taught
from torch import nn

from pliant import Features, Session, recipes
from pliant.engine.kernels.arm import processor as arm
from pliant.engine.prefix import int8, prefix_model, runtimes
from pliant.engine.prefix.int8 import SAMPLES, Int8, distance
from pliant.engine.prefix.prefix import Prefix
from pliant.engine.prefix.prefix_model import InferenceRuntime, PrefixModel

pytest.importorskip("onnxruntime")
WAITS = "float32 until it is calibrated on the first 32 samples"


@pytest.fixture(autouse=True)
def no_runtime() -> None:
    """Here it is used."""


@pytest.fixture(params=[True, False], ids=["float32 on the runtime", "float32 in PyTorch"])
def in_float32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where the prefix runs while it is not in int8: on the runtime, or in PyTorch with custom kernels."""
    monkeypatch.setattr(prefix_model, "has_small_convolutions", lambda model: request.param)
    monkeypatch.setattr(arm, "SLOW_HERE", not request.param)
    return bool(request.param)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batches(count: int, size: int = 8, seed: int = 1) -> list[torch.Tensor]:
    return list(torch.randn(count, size, 3, 12, 12, generator=torch.Generator().manual_seed(seed)))


def opened(model: nn.Module, **how: Any) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Session(model, optimizer, loss, recipes.only("last.*", "head.*"), norm="chosen", **how)


def train(model: nn.Module, data: list[torch.Tensor], **how: Any) -> tuple[Session, dict[str, torch.Tensor]]:
    with opened(model, **how) as session:
        for batch in data:
            session.step(batch)
    return session, {name: value.clone() for name, value in model.state_dict().items()}


def models_of(session: Session) -> list[PrefixModel]:
    return [plan.on_runtime for plan in session._engine._prefix._programs.values() if plan.on_runtime is not None]


def quantised(body: nn.Module, data: list[torch.Tensor]) -> tuple[Prefix, PrefixModel]:
    """The prefix `body`, in int8, after these batches and one more pass."""
    model = nn.Sequential(body.eval().requires_grad_(False), Scale())
    prefix = Prefix(model, runtime=InferenceRuntime(runtimes.installed(), Int8()))
    for batch in [*data, data[0], data[1]]:
        prefix.run(lambda batch=batch: loss(model, batch), batch)  # type: ignore[misc]
    (plan,) = prefix._programs.values()
    assert prefix.why_not(True) == {} and plan.on_runtime.calibration is not None
    return prefix, plan.on_runtime


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


# ------------------------------------------------------------ how near it is


def test_one_layer_is_within_the_rounding_of_its_parts() -> None:
    """A value is off by at most half a step of each input, of each weight and of the output."""
    torch.manual_seed(0)
    layer, data = nn.Conv2d(4, 6, 1), [torch.randn(8, 4, 5, 5) for _ in range(5)]
    prefix, model = quantised(layer, data)
    seen = torch.cat(data[: SAMPLES // 8])
    plan = next(iter(prefix._programs.values()))
    weight, bias = layer.weight.detach().flatten(1), layer.bias.detach()
    step_in = (max(seen.max().item(), 0.0) - min(seen.min().item(), 0.0)) / 255
    steps_weight = weight.abs().amax(1) / 127
    made = layer(seen).detach()
    step_out = (made.max() - made.min()).item() / 255
    for batch in data[: SAMPLES // 8]:
        (found,) = model.run(plan, [batch])
        wanted = layer(batch).detach()
        per_pixel = batch.abs().sum(1, keepdim=True) * steps_weight.view(-1, 1, 1) / 2
        per_channel = weight.abs().sum(1) * step_in / 2 + steps_weight * step_in * 4 / 4 + steps_weight * step_in / 2
        bound = per_pixel + per_channel.view(-1, 1, 1) + step_out / 2
        off = (found - wanted).abs()
        assert bool((off <= 1.001 * bound).all()) and off.max() > 0.2 * step_out
    assert bias.abs().max() > 0


def test_features_of_several_layers_are_near() -> None:
    model, data = small().eval(), batches(6)
    prefix, runs = quantised(Whole(model), data)
    plan = next(iter(prefix._programs.values()))
    fresh = batches(1, seed=7)[0]
    off = distance(runs.run(plan, [fresh]), (model.features(fresh).detach(),))
    assert 1e-3 < off < 0.05


class Whole(nn.Module):
    def __init__(self, model: Small) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.features(x)


def test_layers_of_a_transformer_are_quantised() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 12), nn.LayerNorm(12))
    data = batches(6)
    prefix, runs = quantised(body, data)
    off = distance(runs.run(next(iter(prefix._programs.values())), [data[5]]), (body(data[5]).detach(),))
    assert 1e-3 < off < 0.05


def test_training_learns_as_in_float32() -> None:
    """The last losses of int8 and float32 differ less than those of different seeds."""

    def last_loss(seed: int, prefix: str | None) -> float:
        loss, session = taught(seed, prefix=prefix)
        assert any(model.calibration is not None for model in models_of(session)) == (prefix == "int8")
        return loss

    exact = torch.tensor([last_loss(seed, None) for seed in range(3)])
    ours = torch.tensor([last_loss(seed, "int8") for seed in range(3)])
    assert exact.mean() < 0.9  # it has learned something
    assert (ours - exact).abs().max() < 0.5 * exact.std()


# ------------------------------------------------------------ when it is used


def test_it_is_off_by_default() -> None:
    session, ours = train(small(), batches(8))
    assert [model.calibration for model in models_of(session)] == [None] and session.why_not == {}
    _, same = train(small(), batches(8), prefix=None)
    torch.testing.assert_close(ours, same, rtol=0, atol=0)


def test_steps_are_those_of_float32_until_it_is_calibrated(in_float32: bool) -> None:
    data, one, other = batches(6), small(), small()
    with opened(one, prefix="int8") as session:
        for step, batch in enumerate(data[:4]):
            session.step(batch)
            assert session.why_not == {"int8": WAITS}, step
    with opened(other) as plain:
        for batch in data[:4]:
            plain.step(batch)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    session, ours = train(small(), data, prefix="int8")
    _, exact = train(small(), data)
    assert session.why_not == {} and session.engine == "prefix"
    assert [model.calibration is not None for model in models_of(session)] == [True]
    name = "last.0.weight"
    moved, off = exact[name] - small().state_dict()[name], exact[name] - ours[name]
    assert 0 < off.norm() < 0.05 * moved.norm()


def test_a_first_batch_that_is_large_enough_is_measured_in_float32() -> None:
    data = batches(4, size=SAMPLES)
    with opened(small(), prefix="int8") as session:
        session.step(data[0])
        assert session.why_not == {"int8": WAITS}
        session.step(data[1])
        assert session.why_not == {} and [model.calibration is not None for model in models_of(session)] == [True]


def test_batches_of_other_sizes_share_one_model_and_new_weights_make_a_new_one() -> None:
    model, runtime = small().eval(), InferenceRuntime(runtimes.installed(), Int8())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    prefix = Prefix(model, runtime=runtime)

    def run(batch: torch.Tensor) -> None:
        prefix.run(lambda: loss(model, batch), batch)

    for batch in [*batches(6), *batches(3, size=5, seed=4)]:
        run(batch)
    made = [plan.on_runtime for plan in prefix._programs.values()]
    assert len(made) == 2 and made[0].loaded is made[1].loaded and made[0].calibration == made[1].calibration is not None
    model.stem[1].running_mean.add_(0.5)
    for batch in batches(3, seed=5):
        run(batch)
    assert next(reversed(prefix._programs.values())).on_runtime.loaded is not made[0].loaded


# ------------------------------------------------------------ when it is not


def test_where_quantisation_fails_float32_runs(in_float32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> bytes:
        raise ValueError("no such operator\nand more")

    monkeypatch.setattr(int8, "quantised", fails)
    session, ours = train(small(), batches(8), prefix="int8")
    _, exact = train(small(), batches(8))
    assert session.why_not == {"int8": "ONNX Runtime cannot quantise it: ValueError: no such operator"}
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)  # one pass wrote the model, in PyTorch
    assert session.engine == "prefix" and [model.calibration for model in models_of(session)] == [None] * in_float32


def test_features_that_are_far_from_float32_are_not_used(in_float32: bool) -> None:
    """The first batches are a thousand times as large as the others, so that the others become 0."""
    data, ends = [*(1000 * batch for batch in batches(4)), *batches(4, seed=3)], []
    for prefix in ("int8", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        with Session(model, optimizer, loss, recipes.only("1.*"), prefix=prefix) as session:
            losses = [session.step(batch) for batch in data]
        ends.append((session.why_not, torch.stack(losses)))
    assert ends[0][0] == {"int8": "it would be off by 100%, and at most 50% is accepted"} and ends[1][0] == {}
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-5, atol=1e-6)


def test_where_memory_is_limited_it_is_left_out_and_told() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Session(model, optimizer, loss, recipes.pliant(memory="1MB"), prefix="int8") as session:
        session.step(batches(1)[0])
        assert session.engine == "lean"
        assert session.why_not["runtime"] == "the limit on memory does not count what an inference runtime holds"


# ------------------------------------------------------------ cache, checkpoints, traces


def test_the_cache_holds_features_of_one_kind(in_float32: bool) -> None:
    data, features = batches(8), Features("1MB")
    ids = [list(range(8 * i, 8 * i + 8)) for i in range(len(data))]
    model = small()
    with opened(model, prefix="int8", cache=features) as session:
        for batch, names in zip(data, ids, strict=True):
            session.step(batch, names)
        stored = [sample for names in ids for sample in names if features.get([sample], "cpu") is not None]
        assert stored == [sample for names in ids[5:] for sample in names]  # the first in float32, one to write the model
        (plan,) = session._engine._prefix._programs.values()
        for batch, names in zip(data[5:], ids[5:], strict=True):
            (rows,) = features.get(names, "cpu")
            assert torch.equal(rows, plan.on_runtime.run(plan, [batch])[0])
            exact = model.features(batch).detach()
            assert not torch.equal(rows, exact) and distance([rows], [exact]) < 0.1
        hits = features.hits
        for batch, names in zip(data, ids, strict=True):
            session.step(batch, names)
        assert features.stored == 64 and features.hits == hits + 24 and session.engine == "prefix, cache"


def test_a_cache_of_features_in_float32_does_not_serve_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where quantisation fails, rows are in float32; where it then works, they are not found."""
    real, features, data = int8.quantised, Features("1MB"), batches(8)
    ids = [list(range(8 * i, 8 * i + 8)) for i in range(len(data))]

    def fails(*given: Any) -> bytes:
        raise ValueError("not today")

    with opened(small(), prefix="int8", cache=features) as session:
        monkeypatch.setattr(int8, "quantised", fails)
        for batch, names in zip(data, ids, strict=True):
            session.step(batch, names)
        assert len(features) >= 16 and session.why_not["int8"].endswith("not today")
        (rows,) = features.get(ids[7], "cpu")
        torch.testing.assert_close(rows, session.model.features(data[7]).detach(), rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(int8, "quantised", real)
        session._engine.forget()
        for batch, names in zip(data[:3], ids[:3], strict=True):
            session.step(batch, names)
        assert session.why_not == {} and features.get(ids[7], "cpu") is None


def test_a_checkpoint_holds_no_model_and_goes_on_in_either_type(tmp_path: Path) -> None:
    data, path = batches(8), tmp_path / "run.pt"
    with opened(small(), prefix="int8") as session:
        for batch in data:
            session.step(batch)
        session.save(path)
        held = session.state_dict()
    with opened(small()) as plain:
        plain.step(data[0])
        assert held.keys() == plain.state_dict().keys()
        plain.load(path)
        plain.step(data[0])
    with opened(small(), prefix="int8") as again:
        again.step(data[0])
        again.load(path)
        assert again.progress.step == 8
        for batch in data[:6]:
            again.step(batch)
        assert again.why_not == {} and any(model.calibration is not None for model in models_of(again))


def test_quantising_leaves_no_trace(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root, model, data = logging.getLogger(), Whole(small()), batches(6)
    with torch.no_grad():
        model.model.stem[0].weight[0] = 1e-9  # ONNX Runtime warns of such a channel
    monkeypatch.setattr(root, "handlers", [])
    state = torch.random.get_rng_state()
    quantised(model, data)
    assert root.handlers == [] and torch.equal(torch.random.get_rng_state(), state)
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


class Token(nn.Module):
    """What is put beside a batch is written into the model, with as many rows as the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.token, self.head = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.first(x)], 1)
        return self.head(tokens.relu().mean(1))


def test_a_smaller_last_batch_is_in_int8_too() -> None:
    torch.manual_seed(0)
    model = Token()
    data = [torch.randn(8, 4, 6) for _ in range(7)] + [torch.randn(5, 4, 6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Session(model, optimizer, loss, recipes.only("head.*"), prefix="int8") as session:
        for batch in [*data, *data, *data]:
            session.step(batch)
        assert session.engine == "prefix" and session.why_not == {}
        made = models_of(session)
        assert len(made) == 2 and len({model.calibration for model in made}) == 1


def test_what_is_computed_beside_steps_calibrates_nothing() -> None:
    with opened(small(), prefix="int8") as session:
        session.step(batches(1)[0])
        for batch in batches(8, seed=7):
            session.compute(lambda model, x: model(x), batch)
        session.step(batches(2)[1])
        assert session.why_not == {"int8": WAITS}
