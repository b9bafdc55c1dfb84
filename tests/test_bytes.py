"""Bytes: what is predicted of a lean step against what is measured, and a limit that measured steps correct."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import ENGINES
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from zoo import sgd

from pliant import Budget, BudgetError, Mode, Policy, Profile, Session, measure, schedule, score, solve, units
from pliant.core.types import Cost, Part, Unit
from pliant.graph.backward import read, trainable
from pliant.runtime.batchnorm import BatchNormModes
from pliant.runtime.memory import LiveBytes
from pliant.runtime.trainable import apply_
from pliant.session.feedback import Feedback, Round
from pliant.session.run_log import read as read_log

Batch = tuple[torch.Tensor, torch.Tensor]


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def data(size: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 32, 32, generator=draw), torch.randint(0, 5, (size,), generator=draw)


class Block(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int, clip: bool) -> None:
        super().__init__()
        widths = (inputs, outputs // 2, outputs // 2, outputs)
        sizes = (1, 3, 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, stride if k == 3 else 1, k // 2, bias=False)
            for i, o, k in zip(widths, widths[1:], sizes, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in widths[1:])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        self.act: nn.Module = nn.ReLU6(inplace=True) if clip else nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(y))
            y = self.act(y) if norm is not self.norms[-1] else y
        return self.act(y + self.shortcut(x))


class Residual(nn.Module):
    """Stages as in a ResNet: while one runs, the caller's variable still names what the stage before it gave."""

    def __init__(self, clip: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(3, 32, 1, clip), Block(32, 32, 1, clip))
        self.second = nn.Sequential(Block(32, 32, 2, clip), *(Block(32, 32, 1, clip) for _ in range(5)))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(x)
        return self.head(x.mean((2, 3)))


CHOICES = {
    "head": "head",
    "the second stage": "head second",
    "within the second stage": "head second.2.convs.1 second.3.convs second.5.convs.0",
    "the first stage": "head first.0.convs",
    "norms": "head second.1.norms second.4.norms first.1.norms.0",
    "everything": "head second first",
}


@cache
def residual_profile(clip: bool) -> Profile:
    torch.manual_seed(0)
    model = Residual(clip)
    return measure.timed(model, sgd(model), classify, data(), repeats=1).on(Mode(lean=True))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_peak_of_a_lean_step_is_the_predicted_one(choice: str, clip: bool) -> None:
    torch.manual_seed(0)
    model, batch, profile = Residual(clip), data(), residual_profile(clip)
    optimizer, among = sgd(model), trainable(model)
    chosen = [name for name in among if name.startswith(tuple(CHOICES[choice].split()))]
    apply_(among, optimizer, chosen)
    BatchNormModes(model, "chosen").hold_(among, chosen)
    peak, alone = measure.peak_bytes(model, optimizer, classify, batch, around=ENGINES["lean"])
    predicted = profile.cost([Unit("*", tuple(Part(name) for name in chosen))]).bytes
    assert predicted == pytest.approx(peak - alone, rel=0.03, abs=4096), (predicted, peak - alone)


class Clipped(nn.Module):
    """Without norms, and each convolution of a wide output is followed by one of a small: nothing is as high as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 64, 3, padding=1)
        self.small = nn.Conv2d(64, 4, 3, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardtanh(self.wide(self.narrow(x)), 0.0, 6.0, inplace=True)
        return self.head(self.small(x).mean((2, 3)))


class Checkpointed(nn.Module):
    """Inverted bottlenecks, each computed again in backward: narrow, wide, wide, narrow."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 48, 1), nn.BatchNorm2d(48), act, nn.Conv2d(48, 48, 3, 1, 1, groups=48))
            + nn.Sequential(nn.BatchNorm2d(48), act, nn.Conv2d(48, 8, 1), nn.BatchNorm2d(8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


class Recomputed(nn.Module):
    """Layers of a transformer, computed again in backward: products that keep a factor just for the gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(96, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.transpose(1, 2).flatten(2))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


RECOMPUTED: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Checkpointed(nn.ReLU()),
    "relu6, in place": lambda: Checkpointed(nn.ReLU6(inplace=True)),
    "transformer": Recomputed,
}


@pytest.mark.parametrize(
    ("name", "cost"),
    [*((name, measure.counted) for name in RECOMPUTED), ("transformer", partial(measure.timed, repeats=1))],
    ids=[*RECOMPUTED, "transformer, timed"],
)
def test_a_checkpoint_computes_again_only_what_the_choice_needs(name: str, cost: Callable[..., Profile]) -> None:
    torch.manual_seed(0)
    model, batch = RECOMPUTED[name](), data()
    optimizer, among, norms = sgd(model), trainable(model), BatchNormModes(model, "chosen")
    profile = cost(model, optimizer, classify, batch)
    for chosen in [list(among), *([name] for name in among)]:
        apply_(among, optimizer, chosen)
        norms.hold_(among, chosen)
        peak, _ = measure.peak_bytes(model, optimizer, classify, batch)
        predicted = profile.cost([Unit("*", tuple(Part(name) for name in chosen))]).bytes + max(profile.moments)
        assert predicted == pytest.approx(peak, rel=0.03), chosen


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("choice", ["head", "head small", "head narrow", "head wide"])
def test_a_copy_that_is_made_for_backward_is_not_part_of_inference(choice: str, engine: str) -> None:
    torch.manual_seed(0)
    model, batch = Clipped(), data()
    optimizer, among = sgd(model), trainable(model)
    profile = measure.timed(model, optimizer, classify, batch, repeats=1).on(Mode(lean=engine == "lean"))
    chosen = [name for name in among if name.startswith(tuple(choice.split()))]
    apply_(among, optimizer, chosen)
    peak, alone = measure.peak_bytes(model, optimizer, classify, batch, around=ENGINES[engine])
    assert max(profile.moments) == pytest.approx(alone, rel=0.01)
    predicted = profile.cost([Unit("*", tuple(Part(name) for name in chosen))]).bytes
    assert predicted == pytest.approx(peak - alone, rel=0.03, abs=4096), (predicted, peak - alone)


def test_a_loss_that_differentiates_is_read() -> None:
    """What it wants back is kept for it."""

    def with_penalty(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.Tanh(), nn.Linear(8, 5))
    graph = read(model, with_penalty, data())
    assert {name for node in graph.nodes for name in node.params} == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert max(graph.inference) > 0


# ---------------------------------------------------------------- the closed loop


def chain() -> nn.Module:
    """Many layers whose weights outweigh their activations: selections of almost any number of bytes."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), *layers, nn.Linear(64, 5))


def few(size: int = 16) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 8, generator=draw), torch.randint(0, 5, (size,), generator=draw)


def policy(memory: Any) -> Policy:
    words = units.layers(), score.grad_norm(), measure.counted, solve.milp(), schedule.every(steps=40)
    return Policy(*words, Budget(memory=memory))


def too_low(model: nn.Module, share: float = 0.5, less: int = 0) -> Profile:
    """A profile whose charges are a share of the true ones, and that misses some bytes in every step."""
    profile = measure.counted(model, momentum(model), classify, few())
    charges = [replace(c, cost=replace(c.cost, bytes=int(c.cost.bytes * share))) for c in profile.charges]
    return replace(profile, charges=tuple(charges), base=replace(profile.base, bytes=-less))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def open_session(memory: Any = "200KB", profile: dict[str, Any] | None = None, **more: Any) -> Session:
    model = chain()
    how: dict[str, Any] = {"undo": False, "profile": too_low(model, **(profile or {})), **more}
    return Session(model, momentum(model), classify, policy(memory), **how)


def peak_of(session: Session, batch: Batch) -> int:
    """Bytes that a real step of a session takes beyond inference, as seen from outside."""
    alone = measure.inference_bytes(session.model, session.loss, batch)
    state = sum(t.nbytes for held in session.optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor))
    with LiveBytes(torch.device("cpu")) as live:
        session.step(batch)
    return live.peak + state - alone


@pytest.mark.parametrize("low", [{"share": 0.5}, {"share": 0.8}, {"share": 1.0, "less": 40_000}, {"share": 1.0}])
@pytest.mark.parametrize("memory", ["100KB", "300KB"])
def test_a_limit_is_kept_though_bytes_are_predicted_too_low(memory: str, low: dict[str, Any]) -> None:
    limit = Budget(memory=memory).limits(Cost(bytes=1))["bytes"]
    with open_session(memory, low) as session:
        for _ in range(8):
            session.step(few())
        assert peak_of(session, few()) <= limit
        assert session.selection.asked["bytes"] == limit >= session.selection.limit["bytes"]
        ran = session.rounds
        assert all(r.asked_bytes == limit and r.measured_bytes is not None for r in ran)
        assert [r.measured_bytes > limit for r in ran if r.measured_bytes] == [True] * (len(ran) - 1) + [False]
        assert len(ran) <= 5
        if low["share"] == 0.5:
            assert len(ran) > 1, "nothing had to be corrected"
        if low == {"share": 1.0}:
            assert len(ran) == 1, "nothing was to be corrected"
        assert (ran[-1].measured_bytes or 0) > 0.6 * limit, "there was room for more"


def test_what_a_session_measures_is_what_is_seen_from_outside() -> None:
    with open_session() as session:
        for _ in range(8):
            session.step(few())
        measured = session.rounds[-1].measured_bytes
        assert measured == pytest.approx(peak_of(session, few()), abs=4096)


def test_without_correcting_the_profile_is_believed() -> None:
    with open_session(correct=False) as session:
        for _ in range(4):
            session.step(few())
        assert len(session.rounds) == 1
        assert session.rounds[0].measured_bytes is None
        assert peak_of(session, few()) > 200e3


def test_a_limit_that_nothing_keeps_is_refused_with_the_measured_floor() -> None:
    with open_session("1KB", {"share": 0.2}) as session:
        with pytest.raises(BudgetError, match=r"memory=1 KB is below the floor of \d+ KB: so much was measured") as refused:
            for _ in range(9):
                session.step(few())
        assert session.progress.step >= 1
        with pytest.raises(BudgetError):  # and again, until the budget is another
            session.step(few())
        session.budget = Budget(memory=str(refused.value).rpartition(">=")[2].strip("'."))
        for _ in range(6):
            session.step(few())
        assert peak_of(session, few()) <= session.selection.asked["bytes"]


def test_one_step_of_a_selection_is_measured_and_no_step_that_is_measured_counts_as_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("pliant.session.probes.inference_bytes", lambda *how: seen.append(1) or measure.inference_bytes(*how))
    with open_session() as session:
        for _ in range(10):
            session.step(few())
        corrected = len(session.rounds)
        assert corrected > 1
        assert len(seen) == corrected
        assert sum(r.steps for r in session.rounds) == 10 - corrected
        session.step(few(size=2))
        assert len(seen) == corrected, "a smaller batch takes no more"
        session.step(few(size=24))
        assert len(seen) == corrected + 1, "a larger one may"


@pytest.mark.parametrize("stop", [1, 2, 3, 6])
def test_a_resumed_session_goes_on_with_what_was_measured(stop: int, tmp_path: Path) -> None:
    whole, told = [], []
    with open_session() as session:
        for k in range(8):
            whole.append(float(session.step(few())))
            if k + 1 == stop:
                session.save(tmp_path / "at")
        told.append([(r.predicted_bytes, r.measured_bytes) for r in session.rounds])
    with open_session() as session:
        session.load(tmp_path / "at")
        rest = [float(session.step(few())) for _ in range(8 - stop)]
        told.append([(r.predicted_bytes, r.measured_bytes) for r in session.rounds])
    assert rest == whole[stop:]
    assert told[0] == told[1]


def test_steps_are_the_same_whether_or_not_they_are_measured() -> None:
    """Measured or not, the same numbers: batch norms and random states see nothing of it."""
    losses = []
    for correct in (True, False):
        with open_session("300KB", {"share": 1.0}, correct=correct) as session:
            losses.append([float(session.step(few())) for _ in range(4)])
            assert (session.rounds[0].measured_bytes is not None) == correct
    assert losses[0] == losses[1]


def test_batches_of_one_step_are_measured_together() -> None:
    model = chain()
    with Session(model, momentum(model), classify, policy("300KB"), accumulate=2, undo=False) as session:
        for _ in range(4):
            session.step(few())
        measured, predicted = session.rounds[-1].measured_bytes, session.rounds[-1].predicted_bytes
        assert measured == pytest.approx(predicted, rel=0.1)


def test_a_step_that_fails_is_not_measured_and_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("300KB", {"share": 1.0}) as session:
        with monkeypatch.context() as patch:
            patch.setattr(type(session.update), "backward", fail)
            with pytest.raises(RuntimeError, match="out of luck"):
                session.step(few())
        assert _get_current_dispatch_mode() is None
        assert session.rounds[-1].measured_bytes is None
        session.step(few())
        assert session.rounds[-1].measured_bytes == pytest.approx(session.rounds[-1].predicted_bytes, rel=0.1)


def fail(*_: Any) -> None:
    raise RuntimeError("out of luck")


def test_a_loss_that_needs_gradients_is_measured_against_the_profiles_inference() -> None:
    def steep(model: nn.Module, batch: Batch) -> torch.Tensor:
        value = classify(model, batch)
        if not value.requires_grad:
            fail()
        return value

    model = chain()
    profile = measure.counted(model, momentum(model), classify, few())
    with Session(model, momentum(model), steep, policy("300KB"), profile=profile, undo=False) as session:
        session.step(few())
        assert session.rounds[-1].measured_bytes == pytest.approx(session.rounds[-1].predicted_bytes, rel=0.1)


def test_the_log_tells_what_was_measured(tmp_path: Path) -> None:
    with open_session(log=tmp_path / "log") as session:
        for _ in range(6):
            session.step(few())
        ran = session.rounds
    told = [line for line in read_log(tmp_path / "log") if line["event"] == "memory"]
    assert [(t["asked"], t["predicted"], t["measured"]) for t in told] == [
        (r.asked_bytes, r.predicted_bytes, r.measured_bytes) for r in ran
    ]


def test_in_the_callers_own_loop_nothing_is_followed_on_the_cpu() -> None:
    with open_session() as session:
        for _ in range(3):
            session.before_step(few())
            assert _get_current_dispatch_mode() is None
            session.optimizer.zero_grad()
            classify(session.model, few()).backward()
            session.optimizer.step()
        assert session.rounds[-1].measured_bytes is None


def test_state_of_what_leaves_is_dropped_where_memory_is_limited() -> None:
    with open_session() as session:
        for _ in range(8):
            session.step(few())
        assert len(session.rounds) > 1
        chosen = {id(session.model.get_parameter(name)) for name in session.selection.params}
        assert {id(param) for param in session.optimizer.state} <= chosen


def bytes_of(*peaks: tuple[int, int]) -> Feedback:
    feedback = Feedback()
    for predicted, measured in peaks:
        feedback.begin(Round(0, 0, None, 0.0, 0.0, asked_bytes=100.0, predicted_bytes=predicted))
        feedback.see_bytes(measured, 1)
    return feedback


@pytest.mark.parametrize(
    ("peaks", "within"),
    [
        ([], 100.0),
        ([(90, 95)], 90 * 100 / 95),
        ([(90, 80)], 100.0),  # never more than was asked
        ([(100, 200)], 50.0),
        ([(100, 150), (66, 116)], 50.0),  # so many too many in any case
        ([(100, 200), (60, 120)], 50.0),  # twice as many in any case
        ([(100, 200), (60, 199)], 60 - 99 / (0.5 * 199 / 60)),  # no line is so flat
        ([(100, 110), (80, 120)], 80 - 20 / (0.5 * 1.5)),
        ([(100, 0)], 100.0),
        ([(0, 130)], -30.0),
    ],
)
def test_what_to_plan_for_lies_on_the_line_through_the_last_two_peaks(peaks: list[tuple[int, int]], within: float) -> None:
    assert bytes_of(*peaks).bytes_within(100.0) == pytest.approx(within)
    assert Feedback.of(json.loads(json.dumps(bytes_of(*peaks).state()))) == bytes_of(*peaks)


@pytest.mark.parametrize("fixed", [0, 30, 60])
@pytest.mark.parametrize("times", [1.0, 1.4, 2.5])
def test_a_few_corrections_do(fixed: int, times: float) -> None:
    feedback, limit, tries = Feedback(), 100.0, 0
    while not feedback.rounds or feedback.is_over(100.0):
        predicted = int(limit)
        feedback.begin(Round(0, 0, None, 0.0, 0.0, asked_bytes=100.0, predicted_bytes=predicted))
        feedback.see_bytes(int(fixed + times * predicted), 1)
        limit, tries = feedback.bytes_within(100.0), tries + 1
    assert tries <= 4
    assert (feedback.rounds[-1].measured_bytes or 0) >= 90


def test_a_round_tells_its_bytes() -> None:
    told = str(Round(3, 7, None, 0.002, 0.0, asked_bytes=16e6, predicted_bytes=15_500_000))
    assert told.endswith("memory: asked 16 MB, predicted 15.5 MB, measured –")


# ---------------------------------------------------------------- where time is limited, too


def by_the_clock(memory: Any, time: Any = 0.6) -> Policy:
    return replace(policy(memory), cost=partial(measure.timed, repeats=1), budget=Budget(time=time, memory=memory))


def test_to_measure_seconds_takes_no_full_step_where_memory_is_limited() -> None:
    def first_step(budget: Budget) -> int:
        torch.manual_seed(0)
        model = Residual()
        optimizer, batch = momentum(model), data(8)
        with Session(model, optimizer, classify, replace(by_the_clock(None), budget=budget), undo=False) as session:
            measure.inference_bytes(model, classify, batch)  # what libraries make once
            with LiveBytes(torch.device("cpu")) as live:
                session.before_step(batch)
            return live.peak

    torch.manual_seed(0)
    model = Residual()
    peak, _ = measure.peak_bytes(model, momentum(model), classify, data(8))
    assert first_step(Budget(time="1h")) > peak
    assert first_step(Budget(time="1h", memory=0.3)) < 0.6 * peak


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_captured_steps_and_inference_keep_a_limit_together_on_cuda() -> None:
    """What they hold is reserved, and stands beside whatever else runs."""
    torch.manual_seed(0)
    model = Residual(clip=True).cuda().to(memory_format=torch.channels_last)
    images, labels = (one.cuda() for one in data(256))
    batch = images.contiguous(memory_format=torch.channels_last), labels
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    once = replace(by_the_clock(0.6, "1s"), when=schedule.once())
    with Session(model, optimizer, classify, once, undo=False) as session:
        for _ in range(60):
            session.step(batch)
        assert session._engine.mode.graphs and session.profile.mode.graphs, session.why_not
        room = 0.6 * session.profile.full.bytes - session.profile.inference
        measured = session.rounds[-1].measured_bytes
        assert session.selection.cost.bytes <= room and measured is not None and measured <= room
