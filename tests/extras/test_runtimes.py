"""The prefix on the real inference runtimes: results and gradients are those of plain PyTorch. `make test-extras`."""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant import Session, measure, recipes
from pliant.engine.kernels import chains, channels_last
from pliant.engine.prefix import runtimes
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.prefix import Prefix
from pliant.engine.prefix.prefix_model import InferenceRuntime, PrefixModel
from pliant.engine.prefix.runtimes import Loaded, OnOnnxRuntime, OnOpenVino

if len(runtimes.installed()) < 2:
    pytest.skip("needs pliant[openvino,ort]", allow_module_level=True)
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def no_runtime() -> None:
    """Here they are used."""


@pytest.fixture(autouse=True, params=[OnOpenVino, OnOnnxRuntime], ids=lambda kind: kind.title)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Loaded]:
    monkeypatch.setattr(runtimes, "installed", lambda: (request.param,))
    return request.param  # type: ignore[no-any-return]


class Calls(nn.Module):
    """Frozen calls, then a trained layer."""

    def __init__(self, body: nn.Module | Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body.eval().requires_grad_(False) if isinstance(body, nn.Module) else body
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def runs_alike(model: nn.Module, batch: torch.Tensor, prefix: Prefix, steps: int = 3) -> None:
    """Losses and gradients of a few passes are plain autograd's."""
    chosen = [param for param in model.parameters() if param.requires_grad]
    plain = loss(model, batch)
    wanted = torch.autograd.grad(plain, chosen)
    for _ in range(steps):
        value = prefix.run(lambda: loss(model, batch), batch)
        torch.testing.assert_close(value, plain, **NEAR)
        torch.testing.assert_close(torch.autograd.grad(value, chosen), wanted, **NEAR)


def models_of(prefix: Prefix) -> list[Any]:
    return [plan.on_runtime for plan in prefix._programs.values() if plan.on_runtime is not None]


def norm(width: int, affine: bool = True) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(width, affine=affine)
    made.running_mean.normal_()
    made.running_var.uniform_(0.5, 2.0)
    return made


FUNCTIONS: dict[str, Any] = {
    "convolutions": nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, (3, 1), 1, (1, 0), 1, 4), nn.Conv2d(8, 4, 1)),
    "dilated": nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False),
    "conv1d": lambda x: F.conv1d(x.flatten(2), torch.ones(2, 4, 3), padding=1),
    "batch norm": nn.Sequential(nn.Conv2d(4, 8, 3), norm(8), nn.ReLU6(inplace=True), norm(8, affine=False)),
    "layer norm": nn.LayerNorm((6, 6)),
    "layer norm without weights": nn.LayerNorm(6, elementwise_affine=False),
    "pools": nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2, 1, 1, count_include_pad=False), nn.AdaptiveAvgPool2d(1)),
    "pool to 3": nn.AdaptiveAvgPool2d(3),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "linear": nn.Sequential(nn.Linear(6, 3), nn.Flatten(), nn.Linear(72, 5, bias=False)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x + 1, x * 2),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6).tril().bool()),
    "softmax": lambda x: x.softmax(1),
    "activations": nn.Sequential(
        nn.ReLU(), nn.SiLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.GELU(), nn.GELU("tanh"), nn.ELU(0.5), nn.SELU(), nn.Mish(),
        nn.LeakyReLU(0.2), nn.Tanh(), nn.Sigmoid(), nn.Hardtanh(0.1, 0.6),
    ),
    "arithmetic": lambda x: (2 - (x + 1) * 0.5 - x / 3 + 1 / 2).clamp(min=-1).clamp(max=1.5).add_(1).mul_(x).sub(x),
    "dropout": nn.Sequential(nn.Dropout(0.5), nn.ReLU()),
    "shapes": lambda x: x.permute(0, 2, 3, 1).contiguous().view(-1, 4)[:, :].unsqueeze(1).reshape(4, -1, 4).transpose(1, 2),
    "indices": lambda x: torch.cat([x[:, 0], x[..., 1:5:2, :].flatten(1, 2)[:, -6:], x[:, -1, :3]], 1),
    "split": lambda x: torch.cat([*x.split([1, 3], 1)[::-1], *x.chunk(2, 1)], 1),
    "unbind": lambda x: x.unbind(1)[2] * x.mean((1, 3)).unsqueeze(2) + x.mean(),
}  # fmt: skip


@pytest.mark.parametrize("at_a_time", [runtimes._AT_A_TIME, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_written(kind: type[Loaded], name: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_AT_A_TIME", at_a_time)
    torch.manual_seed(0)
    model, prefix = Calls(copy.deepcopy(FUNCTIONS[name])), Prefix(nn.Identity(), runtime=InferenceRuntime([kind]))
    prefix.model = model
    runs_alike(model, torch.randn(4, 4, 6, 6), prefix)
    assert len(models_of(prefix)) == 1 and "runtime" not in prefix.reasons


ALONE = ("convolutions", "dilated", "batch norm", "pools", "pool to 3", "activations", "arithmetic", "dropout")
TOGETHER: dict[str, Any] = {
    "one constant image": lambda x: x * torch.ones(1, 4, 6, 6) + torch.ones(4, 1, 1),
    "an image for each sample": lambda x: x + torch.arange(4.0).view(4, 1, 1, 1),
    "an image for each sample, clipped": lambda x: x + torch.arange(4.0).view(4, 1, 1, 1).clamp(1, 2),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *TOGETHER])
def test_a_batch_runs_in_pieces_where_samples_do_not_meet(
    kind: type[Loaded], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_AT_A_TIME", 2 * 4 * 36)
    torch.manual_seed(0)
    body = {**FUNCTIONS, **TOGETHER}[name]
    model, prefix = Calls(copy.deepcopy(body)), Prefix(nn.Identity(), runtime=InferenceRuntime([kind]))
    prefix.model = model
    batch = torch.randn(4, 4, 6, 6)
    runs_alike(model, batch, prefix)
    assert models_of(prefix)[0].apart == (name in (*ALONE, "one constant image")) and len(runtimes.pieces([batch])) == 2


def test_token_ids_are_read(kind: type[Loaded]) -> None:
    model = Calls(nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6)))
    prefix = Prefix(model, runtime=InferenceRuntime([kind]))
    runs_alike(model, torch.randint(9, (4, 5)), prefix)
    assert len(models_of(prefix)) == (kind is OnOnnxRuntime)
    if kind is OnOpenVino:
        assert prefix.reasons["runtime"] == "OpenVINO cannot run it: its integers are not PyTorch's"


class Small(nn.Module):
    """Pointwise and grouped convolutions with norms, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), norm(8), nn.ReLU6(inplace=True))
        self.depth = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), norm(8), nn.ReLU6(inplace=True))
        self.point = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), norm(8))
        self.last = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), norm(16), nn.ReLU6(inplace=True))
        self.head = nn.Linear(16, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return x + self.point(self.depth(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.features(x)).mean((2, 3)))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def batches(count: int, size: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(count, size, 3, 12, 12, generator=torch.Generator().manual_seed(1)))


def train(model: nn.Module, engine: str, data: list[torch.Tensor], **how: Any) -> tuple[Session, dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ids = [list(range(len(batch) * i, len(batch) * (i + 1))) for i, batch in enumerate(data)] if "cache" in how else None
    with Session(model, optimizer, loss, recipes.only("last.*", "head.*"), engine=engine, **how) as session:
        for i, batch in enumerate(data * 2):
            session.step(batch, None if ids is None else ids[i % len(data)])
    return session, model.state_dict()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_training_is_that_of_plain_autograd(layout: torch.memory_format) -> None:
    data = [batch.contiguous(memory_format=layout) for batch in batches(4)]
    one, other = small().to(memory_format=layout), small().to(memory_format=layout)
    session, ours = train(one, "auto", data)
    _, plain = train(other, "plain", data)
    torch.testing.assert_close(ours, plain, **NEAR)
    assert session.engine == "prefix" and "runtime" not in session.why_not
    assert len(models_of(session._engine._prefix)) == 1 and session._engine.seconds_per_capture > 0


def test_custom_kernels_run_after_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "PAYS_HERE", True)
    ran, run = [], chains.run
    monkeypatch.setattr(chains, "run", lambda *given: (ran.append(given), run(*given))[1])
    session, ours = train(small(), "auto", batches(4), norm="chosen")
    assert len(ran) >= 6 and len(models_of(session._engine._prefix)) == 1 and session.why_not == {}
    _, plain = train(small(), "plain", batches(4), norm="chosen")
    torch.testing.assert_close(ours, plain, **NEAR)


def test_many_boundaries_leave_nothing_alive(kind: type[Loaded]) -> None:
    model, batch, alive = small().eval(), batches(1)[0], []
    prefix = Prefix(model, runtime=InferenceRuntime([kind]))
    for i in range(36):
        model.requires_grad_(False)
        list(model.parameters())[-1 - i % 12].requires_grad_(True)
        for _ in range(3):
            prefix.run(lambda: loss(model, batch), batch)
        if i % 12 == 11:
            gc.collect()
            alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert len(models_of(prefix)) == 8 and max(alive) <= alive[0] + 3


def test_a_feature_cache_is_filled_by_the_runtime() -> None:
    data = batches(3)
    session, ours = train(small(), "auto", data, cache="1MB", norm="chosen")  # new statistics would empty it
    _, plain = train(small(), "plain", data, norm="chosen")
    torch.testing.assert_close(ours, plain, **NEAR)
    features = session._engine.features
    assert features.stored == 12 and features.hits >= 12 and session.engine == "prefix, cache"
    assert len(models_of(session._engine._prefix)) == 1


def test_batches_of_other_sizes_share_one_session(kind: type[Loaded]) -> None:
    model, runtime = small().eval(), InferenceRuntime([kind])
    model.stem.requires_grad_(False)
    prefix = Prefix(model, runtime=runtime)
    for size in (4, 7, 1):
        runs_alike(model, torch.randn(size, 3, 12, 12), prefix)
    assert len(models_of(prefix)) == 3 and len(runtime._loaded) == 1


def test_new_statistics_and_weights_make_a_new_model(kind: type[Loaded]) -> None:
    model, batch = small().eval(), batches(1)[0]
    model.stem.requires_grad_(False)
    prefix = Prefix(model, runtime=InferenceRuntime([kind]))
    runs_alike(model, batch, prefix)
    before = models_of(prefix)
    model.stem[1].running_mean.add_(0.5)
    runs_alike(model, batch, prefix)
    after = models_of(prefix)
    assert after != before
    with torch.no_grad():
        model.stem[0].weight.mul_(1.5)
    runs_alike(model, batch, prefix)
    assert models_of(prefix) != after


def test_weights_that_change_in_every_step_make_no_model(kind: type[Loaded]) -> None:
    model, batch = small().eval(), batches(1)[0]
    model.stem.requires_grad_(False)
    prefix = Prefix(model, runtime=InferenceRuntime([kind]))
    for _ in range(4):
        runs_alike(model, batch, prefix, steps=1)
        model.stem[1].running_mean.add_(0.1)
    assert not models_of(prefix)


def test_other_threads_make_another_session(kind: type[Loaded]) -> None:
    model, batch = small().eval(), batches(1)[0]
    model.stem.requires_grad_(False)
    prefix, before = Prefix(model, runtime=InferenceRuntime([kind])), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs_alike(model, batch, prefix)
            assert [one.threads for one in models_of(prefix)] == [threads]
    finally:
        torch.set_num_threads(before)


WEIGHT = torch.ones(4, 4, 1, 1)
REFUSED: dict[str, tuple[Any, str]] = {
    "a function": (lambda x: x.cumsum(1), "cumsum is not written as ONNX"),
    "an argument": (lambda x: x.add(x, alpha=2), "add is not written as ONNX with such arguments"),
    "a type": (lambda x: x.double() * 2, "values of float64 on cpu are not written as ONNX"),
    "randomness": (lambda x: F.conv2d(F.dropout(x, 0.5), WEIGHT), "dropout draws random numbers in the prefix"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_there_runs_as_before(kind: type[Loaded], name: str) -> None:
    body, why = REFUSED[name]
    model = Calls(body)
    prefix = Prefix(model, runtime=InferenceRuntime([kind]))
    batch = torch.randn(4, 4, 5, 5)
    for _ in range(3):
        torch.manual_seed(0)
        value = prefix.run(lambda: loss(model, batch), batch)
        torch.manual_seed(0)
        assert torch.equal(value, loss(model, batch))
    assert prefix.reasons["runtime"] == why and not models_of(prefix)


@pytest.mark.parametrize(("engine", "mode"), [("auto", "plain"), ("prefix", "prefix")])
def test_a_session_says_why_not_and_goes_on(
    kind: type[Loaded], engine: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Exception from core.cpp:117:\nno such kernel\nand more")

    monkeypatch.setattr(kind, "__init__", fails)
    session, ours = train(small(), engine, batches(3))
    _, plain = train(small(), "plain", batches(3))
    exact = {"rtol": 0, "atol": 0}  # the first step runs as later ones do, so that a resumed run ends alike
    torch.testing.assert_close(ours, plain, **(exact if mode == "plain" else NEAR))
    assert session.engine == mode
    assert session.why_not["runtime"] == f"{kind.title} cannot run it: RuntimeError: no such kernel"


def test_a_resumed_session_knows_that_the_runtime_does_not_serve(kind: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    """So what it chooses next is priced as in a run that was never stopped."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kind, "__init__", fails)
    session, _ = train(small(), "auto", batches(3))
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with Session(model, optimizer, loss, session.policy) as again:
        again.load_state_dict(session.state_dict())
        assert again.engine == "plain" and again.why_not["runtime"] == session.why_not["runtime"]


def test_shapes_that_always_differ_do_not_cost_a_model_each(kind: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    written, build = list[None](), InferenceRuntime.build
    monkeypatch.setattr(InferenceRuntime, "build", lambda *given: written.append(None) or build(*given))
    shapes = [torch.randn(2, 3, 12 + more, 12) for more in range(10)] * 2
    session, ours = train(small(), "auto", shapes)
    _, plain = train(small(), "plain", shapes)
    torch.testing.assert_close(ours, plain, **NEAR)
    assert len(written) == 8 and "first 8 shapes" in session.why_not["prefix"]


def test_wrong_results_are_not_used(kind: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    run = PrefixModel.run
    monkeypatch.setattr(PrefixModel, "run", lambda *given: tuple(one + 0.01 for one in run(*given)))
    session, ours = train(small(), "auto", batches(2))
    _, plain = train(small(), "plain", batches(2))
    torch.testing.assert_close(ours, plain, **NEAR)
    assert session.why_not["runtime"] == f"the results of {kind.title} differ from those of PyTorch by more than 0.0001"


def test_a_run_that_fails_later_is_told(kind: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small().eval(), batches(1)[0]
    model.stem.requires_grad_(False)
    prefix = Prefix(model, Features("1MB"), runtime=InferenceRuntime([kind]))
    runs_alike(model, batch, prefix)

    def fails(*given: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PrefixModel, "run", fails)
    runs_alike(model, batch, prefix)
    assert prefix.reasons["runtime"] == f"{kind.title} failed: RuntimeError: out of memory"


def test_in_a_loop_of_ones_own_nothing_is_told_of_it() -> None:
    model, batch = small().double(), batches(1)[0].double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Session(model, optimizer, loss, recipes.only("last.*", "head.*")) as session:
        session.step(batch)
        session.step(batch)
        assert session.engine == "plain" and "float64" in session.why_not["runtime"]
        session.before_step(batch)
        loss(model, batch).backward()
        optimizer.step()
        assert "runtime" not in session.why_not


def test_where_memory_is_limited_the_runtime_is_left_out() -> None:
    model, batch = small(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Session(model, optimizer, loss, recipes.pliant(memory="1MB"), engine="lean+prefix") as session:
        for _ in range(3):
            session.step(batch)
        assert session.why_not["runtime"] == "the limit on memory does not count what an inference runtime holds"
        assert not models_of(session._engine._prefix)


def taught(seed: int, **how: Any) -> tuple[float, Session]:
    """The last loss of 200 steps that learn to tell three patterns apart, and their session."""
    patterns = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(2))

    def wrong(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    with Session(model, optimizer, wrong, recipes.only("last.*", "head.*"), **how) as session:
        for _ in range(200):
            labels = torch.randint(3, (8,), generator=draw)
            images = patterns[labels] + torch.randn(8, 3, 12, 12, generator=draw)
            losses.append(float(session.step((images, labels))))
    return sum(losses[-20:]) / 20, session


def test_200_steps_end_within_the_spread_of_seeds() -> None:
    """The last losses of plain training differ between seeds by far more than between PyTorch and the runtime."""

    def last_loss(seed: int, engine: str) -> float:
        loss, session = taught(seed, engine=engine)
        assert session.engine == engine and "runtime" not in session.why_not
        return loss

    plain = torch.tensor([last_loss(seed, "plain") for seed in range(3)])
    ours = torch.tensor([last_loss(seed, "prefix") for seed in range(3)])
    assert plain.mean() < 0.9  # it has learned something
    assert (ours - plain).abs().max() < 0.1 * plain.std()


# ------------------------------------------------------------ two runtimes


@pytest.mark.parametrize("what", ["prepare", "__init__", "run"])
def test_what_one_cannot_run_the_other_does(what: str, kind: type[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ImportError("libtbb.so.12: no such file")

    monkeypatch.setattr(kind, what, fails)
    other = OnOnnxRuntime if kind is OnOpenVino else OnOpenVino
    model = small().eval()
    model.stem.requires_grad_(False)
    alone, both = (Prefix(model, runtime=InferenceRuntime(kinds)) for kinds in ([kind], [kind, other]))
    runs_alike(model, batches(1)[0], alone)
    assert alone.reasons["runtime"] == f"{kind.title} cannot run it: ImportError: libtbb.so.12: no such file"
    runs_alike(model, batches(1)[0], both)
    assert isinstance(models_of(both)[0].loaded, other)


def test_a_value_that_is_not_a_number_is_seen(kind: type[Loaded]) -> None:
    model = Calls(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()))
    prefix, batch = Prefix(model, runtime=InferenceRuntime([kind])), torch.randn(4, 3, 5, 5)
    for value in (0.0, 0.0, 0.0, math.nan, math.inf, 0.0):
        batch[1, 2, 3, 4] = value
        found = prefix.run(lambda: loss(model, batch), batch)
        assert found.isfinite() == math.isfinite(value)
    assert len(models_of(prefix)) == 1


CHILD = """
import os, sys, torch
from pathlib import Path
from torch import nn
from pliant import Session, recipes

def train():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, lambda m, b: m(b).square().mean(), recipes.only("3.*"), engine="prefix") as session:
        for _ in range(4):
            session.step(torch.randn(4, 3, 5, 5))
        (plan,) = session._engine._prefix._programs.values()
        return plan.on_runtime.loaded.title

print(train(), "openvino" in sys.modules, "openvino_telemetry" in sys.modules, (Path.home() / "intel").exists(), flush=True)
if os.fork() == 0:
    print(train(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("kind", [OnOpenVino], indirect=True)
def test_nothing_is_reported_and_a_forked_process_goes_on(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PLIANT_PROFILES": "off"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120)
    assert done.stdout.splitlines() == ["OpenVINO True False False", "ONNX Runtime"]


class Frozen(nn.Module):
    """Convolutions that a runtime serves, a norm, dropout, and a head, which may be a chain."""

    def __init__(self, chain: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 1), nn.ReLU()),
        )
        self.drop = nn.Dropout(0.2)
        norm = nn.BatchNorm2d(4, affine=False)
        norm.running_mean, norm.running_var = torch.rand(4), 0.5 + torch.rand(4)
        self.head = nn.Sequential(nn.Conv2d(8, 4, 1), norm) if chain else nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(x))).mean((2, 3))


def judged_run(
    steps: int, save: Path | None = None, load: Path | None = None, chain: bool = False, at: Any = None
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """A run of the default recipe: its weights, and those of the second head after each step that has one. Before the 13th step
    `at(session, model)` is called."""
    torch.manual_seed(0)
    model = Frozen(chain)
    batches = []
    for k in range(steps):  # the head can learn them
        labels = torch.randint(0, 3, (6 + k % 2,))
        batches.append((torch.randn(len(labels), 3, 17, 17) + F.one_hot(labels, 3)[..., None, None], labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 if chain else 0.05, momentum=0.9)
    policy = replace(recipes.pliant(macs=0.8), cost=measure.counted)
    heads = []
    with Session(model, optimizer, lambda model, b: F.cross_entropy(model(b[0]), b[1]), policy, total_steps=60) as session:
        if load is not None:
            session.load(load)
        for step in range(session._loop.steps, steps):
            if step == 12 and at is not None:
                at(session, model)
            torch.manual_seed(step)
            session.step(batches[step])
            second = session._loop.beginning._second
            heads.append([own.detach().clone() for own in second._copies.values()] if second is not None else [])
        assert "prefix" not in session.why_not
        if save is not None:
            session.save(save)
    return [value.clone() for value in model.state_dict().values()], heads


def alike(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(some, others, strict=True))


def test_the_second_head_trains_on_what_the_runtime_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features are those of the network as it was, though the selection changes its weights."""
    ran, run_on = [], Prefix.run_on
    monkeypatch.setattr(Prefix, "run_on", lambda *how: ran.append(run_on(*how)) or ran[-1])
    weights, heads = judged_run(20)
    assert len(ran) >= 8 and all(value is not None for value in ran)
    monkeypatch.setattr(Prefix, "run_on", lambda *how: None)
    plain, others = judged_run(20)
    assert any(heads) and [len(one) for one in heads] == [len(one) for one in others]
    for one, other in zip(heads, others, strict=True):
        assert all(torch.allclose(a, b, **NEAR) for a, b in zip(one, other, strict=True))
    assert not alike([heads[10]], [heads[-1]])
    assert all(torch.allclose(a, b, **NEAR) for a, b in zip(weights, plain, strict=True))


def change_frozen_(session: Session, model: nn.Module) -> None:
    name = next(name for name, _ in model.named_parameters() if name not in session.selection.params)
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)


@pytest.mark.parametrize("how", ["as it is", "a chain", "a frozen weight is changed"])
def test_a_run_that_is_judged_on_a_runtime_goes_on_as_if_it_had_not_stopped(how: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"chain": how == "a chain", "at": change_frozen_ if "changed" in how else None}
    whole, heads = judged_run(22, **given)
    _, first = judged_run(14, save=tmp_path / "first.pt", **given)
    _, then = judged_run(17, load=tmp_path / "first.pt", save=tmp_path / "then.pt", **given)
    resumed, last = judged_run(22, load=tmp_path / "then.pt", **given)
    assert any(last)
    for one, other in zip([whole, *heads], [resumed, *first, *then, *last], strict=True):
        if "changed" in how:  # then the steps' own model is made anew, earlier where a run was stopped
            assert all(torch.allclose(a, b, **NEAR) for a, b in zip(one, other, strict=True))
        else:
            assert alike([one], [other])


def test_a_second_head_whose_program_changes_leaves_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_more_(session: Session, model: nn.Module) -> None:
        model.drop.p = 0.3

    weights, heads = judged_run(20, at=drop_more_)  # it says that the prefix goes on
    monkeypatch.setattr(Prefix, "run_on", lambda *how: None)
    plain, others = judged_run(20, at=drop_more_)
    assert any(heads) and all(torch.allclose(a, b, **NEAR) for a, b in zip(weights, plain, strict=True))
    for one, other in zip(heads, others, strict=True):
        assert all(torch.allclose(a, b, **NEAR) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("norm", ["auto", "chosen"])
def test_the_first_steps_find_the_model_that_was_measured(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are back to their statistics before it is made, so it stays valid."""
    built, build = [], InferenceRuntime.build
    monkeypatch.setattr(InferenceRuntime, "build", lambda *how: built.append(1) or build(*how))
    model, batch = Frozen(), (torch.randn(6, 3, 17, 17), torch.randint(0, 4, (6,)))
    model.drop.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = recipes.pliant(time=1.0)
    with Session(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), policy, norm=norm, total_steps=60) as session:
        session.step(batch)
        measured = len(built)
        for _ in range(7):
            session.step(batch)
        assert session.selection.round == 0 and "runtime" not in session.why_not
    assert measured == len(built) > 0
