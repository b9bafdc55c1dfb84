"""The beginning of a run: the head first, then a selection that may be taken back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import differences, snapshot
from torch import nn

from pliant import Budget, Session, measure, recipes
from pliant.session.beginning import Beginning, length
from pliant.session.second_head import SecondHead

Batch = tuple[torch.Tensor, torch.Tensor]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(many: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(6, 3, generator=generator).double()
    inputs = [torch.randn(16, 6, generator=generator).double() for _ in range(many)]
    return [(x, (x @ truth).argmax(1)) for x in inputs]


def policy(**how: Any) -> Any:
    return replace(recipes.pliant(**how), cost=measure.counted, budget=Budget(macs=1.0))


def optimizer(model: nn.Sequential, body: float = 0.1) -> torch.optim.SGD:
    groups = [{"params": [p for n, p in model.named_parameters() if not n.startswith("4.")], "lr": body}]
    return torch.optim.SGD([*groups, {"params": list(model[4].parameters())}], lr=0.1, momentum=0.9)


def none() -> float:
    """There is no loss of a head that says nothing."""
    return math.nan


def lines(log: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == event]


def names(session: Session) -> list[str]:
    return [unit.name for unit in session.selection.units]


def test_the_head_has_a_tenth_of_the_run_but_ten_steps_or_a_quarter() -> None:
    assert [length(0.1, total) for total in (None, 3, 15, 40, 100, 300)] == [20, 1, 3, 10, 10, 30]
    assert length(0.0, 300) == 0
    with pytest.raises(ValueError, match="head_first=1"):
        recipes.pliant(head_first=1.0)


def test_the_head_trains_first_then_layers_are_chosen(tmp_path: Path) -> None:
    model, log = make(), tmp_path / "run.jsonl"
    start = {name: p.clone() for name, p in model.named_parameters()}
    with Session(model, optimizer(model), loss, policy(), total_steps=60, log=log) as session:
        for batch in batches(10):
            session.step(batch)
            assert names(session) == ["4"]
        assert all(torch.equal(start[n], p) for n, p in model.named_parameters() if not n.startswith("4."))
        for batch in batches(12)[10:]:
            session.step(batch)
        assert set(names(session)) > {"4"}
        assert [line["step"] for line in lines(log, "round")] == [0, 10]


def test_without_it_layers_are_chosen_at_once() -> None:
    model = make()
    with Session(model, optimizer(model), loss, policy(head_first=0), total_steps=60) as session:
        session.step(batches(1)[0])
        assert len(names(session)) == 3


def test_a_selection_that_makes_the_loss_rise_is_taken_back(tmp_path: Path) -> None:
    model, log = make(), tmp_path / "run.jsonl"
    before = {name: p.clone() for name, p in model.named_parameters() if not name.startswith("4.")}
    steps = optimizer(model, body=300.0)
    with Session(model, steps, loss, policy(), total_steps=60, log=log) as session:
        for batch in batches(8) * 5:
            session.step(batch)
        assert names(session) == ["4"]
        notes = [line["text"] for line in lines(log, "note") if "taken back" in line["text"]]
        assert len(notes) == 1 and "the head alone trains" in notes[0], "a quarter of three layers is none"
        assert all(torch.equal(before[name], dict(model.named_parameters())[name]) for name in before)


@pytest.mark.parametrize(
    ("after", "taken_back"),
    [
        ([0.4] * 10, False),
        ([4.0] * 5 + [1.0] * 5, False),  # it rises as features change, and comes back
        ([0.4] * 5 + [1.1] * 5, True),
        ([math.nan] * 10, True),
        ([math.inf] * 10, True),
        ([0.4] * 9 + [math.nan], False),  # one bad batch says nothing
    ],
)
def test_the_loss_must_come_back_to_where_the_head_left_it(after: list[float], taken_back: bool) -> None:
    model = make()
    steps, begins = optimizer(model), Beginning()
    for value in [9.0] * 5 + [2.0] * 5 + [1.0] * 5:  # the last ten count
        begins.see(torch.tensor(value))
    begins.chose(model, steps, dict(model.named_parameters()), length=10, may=True)
    judged = []
    for value in after:
        begins.see(torch.tensor(value))
        judged.append(begins.judge_() is not None)
    assert judged == [False] * 9 + [taken_back]
    if not taken_back:
        watch(begins, [-9.0] * 20)
        assert begins.over


@pytest.mark.parametrize(
    ("losses", "goes_on"),
    [
        ([4.0] * 5 + [1.9] * 5, True),
        ([4.0] * 5 + [1.9] * 5 + [3.0] * 4, True),  # it is asked once in half of the steps
        ([4.0] * 5 + [1.9] * 5 + [1.0] * 5, False),
        ([4.0] * 5 + [2.0] * 5, False),
        ([2.0] * 2 + [4.0] * 8, True),  # it has risen
        ([2.0] * 2 + [4.0] * 24, True),
        ([2.0] * 2 + [4.0] * 28, False),  # for too long
        ([2.0] * 10, False),
        ([2.0] * 2 + [2.1] * 8, True),
        ([2.0] * 2 + [1.9] * 8, False),
        ([-1.0] * 5 + [-2.0] * 5, False),  # of numbers below zero there is no half
        ([math.nan] * 10, False),
        ([4.0] * 5, False),  # a loop that does not tell its losses
    ],
)
def test_while_its_loss_halves_the_head_goes_on_alone(losses: list[float], goes_on: bool) -> None:
    begins = Beginning()
    for number, value in enumerate(losses):
        begins.see(torch.tensor(value))
        if number >= 9:
            begins.goes_on(10, none)
    assert begins.goes_on(10, none) == goes_on


@pytest.mark.parametrize(
    ("losses", "goes_on"),
    [
        ([9.0] * 5 + [8.0] * 5, True),  # it falls, but a guess is better
        ([9.0] * 5 + [8.0] * 20, True),
        ([9.0] * 5 + [8.0] * 25, False),  # for too long
        ([9.0] * 5 + [8.0] * 5 + [2.9] * 5, True),  # it halves
        ([9.0] * 5 + [4.0] * 5 + [2.9] * 5, False),
        ([2.9] * 10, False),
    ],
)
def test_while_it_is_worse_than_a_guess_the_head_goes_on_alone(losses: list[float], goes_on: bool) -> None:
    begins, asked = Beginning(), []
    for number, value in enumerate(losses):
        begins.see(torch.tensor(value))
        if number >= 9:
            last = begins.goes_on(10, lambda: asked.append(3.0) or 3.0)
    assert last == goes_on and asked == [3.0], "it is asked once"


def test_labels_that_were_changed_are_for_the_head_to_learn(tmp_path: Path) -> None:
    """It is sure of the wrong classes. With labels as they were, or a new head, layers are chosen as planned."""
    found, many = {}, batches(4) * 25
    rates = {"the same": 1e-3, "others": 1e-3, "new head": 0.1}
    for labels in ("the same", "others", "new head"):
        model, log = make(), tmp_path / f"{labels}.jsonl"
        tuned = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in many[:40]:
            tuned.zero_grad()
            loss(model, batch).backward()
            tuned.step()
        with torch.no_grad():
            if labels == "new head":
                nn.init.normal_(model[4].weight, std=0.01)
        steps = torch.optim.SGD(model.parameters(), lr=rates[labels])
        with Session(model, steps, loss, policy(), total_steps=100, log=log) as session:
            for inputs, truth in many:
                session.step((inputs, (truth + 1) % 3 if labels == "others" else truth))
        found[labels] = [line["step"] for line in lines(log, "round")][1]
    assert found == {"the same": 10, "others": 30, "new head": 10}


def test_to_ask_what_a_guess_is_worth_leaves_no_trace(tmp_path: Path) -> None:
    """Nothing of the run changes, also where the loss fails on zeros."""

    def fails(model: nn.Module, batch: Batch) -> torch.Tensor:
        if not any(map(bool, model[4].weight.detach().abs().sum(1))):
            raise ValueError("a division by zero")
        return loss(model, batch)

    ends = []
    for used in (loss, fails):
        model = make()
        steps = optimizer(model)
        with Session(model, steps, used, policy(), total_steps=60) as session:
            for number, batch in enumerate(batches(40)):
                if number == 10:
                    before = snapshot(model, steps)
                    value = session._loop._probes.silent(batch, session._loop._of(session.selection))
                    assert math.isnan(value) if used is fails else abs(value - math.log(3)) < 1e-9
                    assert not differences(before, snapshot(model, steps))
                session.step(batch)
        ends.append(snapshot(model, steps))
    assert not differences(*ends)


def test_the_time_of_a_silent_head_counts_as_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with Session(model, optimizer(model), loss, policy(), total_steps=60) as session:
        took = []
        monkeypatch.setattr(session._loop.time, "_now", lambda: 100.0 * len(took))
        silent = session._loop._probes.silent

        def slow(*what: Any) -> float:
            took.append(silent(*what))
            return took[-1]

        monkeypatch.setattr(session._loop._probes, "silent", slow)
        for batch in batches(30):
            session.step(batch)
        assert len(took) == 1 and session.spent["choosing"] == 100.0


@pytest.mark.parametrize(("few", "goes_on"), [(8, True), (7, False)])
def test_of_fewer_than_eight_steps_nothing_is_told(few: int, goes_on: bool) -> None:
    begins = Beginning()
    for value in [4.0] * 4 + [1.9] * 4:
        begins.see(torch.tensor(value))
    assert begins.goes_on(few, none) == goes_on


@pytest.mark.parametrize(("length", "many", "first", "silent"), [(11, 34, 1.0, 9.0), (13, 41, 1.0, 9.0), (11, 30, 3.0, 1.5)])
def test_it_goes_on_the_same_when_it_was_resumed(length: int, many: int, first: float, silent: float) -> None:
    model = make()
    steps, begins = optimizer(model), Beginning()
    for value in [first] * 2 + [2.0] * (many - 2):  # it has risen, or is worse than a guess
        begins.see(torch.tensor(value))
        goes_on = begins.goes_on(length, lambda: silent)
    other = Beginning()
    other.load(begins.state(), model, steps)
    assert other.goes_on(length, none) == goes_on, "what a guess is worth is saved"


@pytest.mark.parametrize(("total", "chosen"), [(60, [0, 30]), (40, [0])], ids=["", "too near the end to be judged"])
def test_a_head_that_learns_fast_has_more_steps(total: int, chosen: list[int], tmp_path: Path) -> None:
    """Its error shrinks by a fifth in each step: for 20 steps. The mean of the next five hides that."""
    model, log = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double(), tmp_path / "run.jsonl"
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    batch = torch.ones(4, 1).double()
    with Session(model, steps, lambda model, x: model(x).square().mean(), policy(), total_steps=total, log=log) as session:
        for number in range(total):
            if number == 20:
                steps.param_groups[0]["lr"] = 1e-6
            session.step(batch)
    assert [line["step"] for line in lines(log, "round")][:2] == chosen  # then it is taken back: there is nothing to gain


@pytest.mark.parametrize("change", ["budget", "frozen", "optimizer"])
def test_another_round_while_the_selection_is_judged_is_judged_with_it(change: str) -> None:
    model = make()
    with Session(model, optimizer(model, body=300.0), loss, policy(), total_steps=60) as session:
        for number, batch in enumerate(batches(8) * 4):
            if number == 10:
                before = {name: p.clone() for name, p in model.named_parameters() if not name.startswith("4.")}
            if number == 15 and change == "budget":
                session.budget = Budget(macs=0.99)
            if number == 15 and change == "frozen":
                model[0].bias.requires_grad_(False)
            if number == 15 and change == "optimizer":
                session.optimizer = optimizer(model, body=300.0)
            session.step(batch)
        assert names(session) == ["4"]
    assert all(torch.equal(before[name], dict(model.named_parameters())[name]) for name in before)


def test_a_head_that_was_frozen_meanwhile_does_not_go_on_alone() -> None:
    model = make()
    with Session(model, optimizer(model, body=300.0), loss, policy(), total_steps=60) as session:
        for number, batch in enumerate(batches(8) * 5):
            if number == 12:
                model[4].requires_grad_(False)
            session.step(batch)
        assert "4" not in names(session) and len(names(session)) == 2


def test_the_scale_of_the_gradients_is_put_back_too() -> None:
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    steps, begins = optimizer(model), Beginning(scaler)
    scaler.scale(torch.zeros(1))  # now it has a scale
    for _ in range(10):
        begins.see(torch.tensor(1.0))
    begins.chose(model, steps, dict(model.named_parameters()), length=10, may=True)
    scaler.update(2.0)
    for _ in range(10):
        begins.see(torch.tensor(3.0))
    assert scaler.get_scale() == 2.0
    assert begins.judge_() is not None and scaler.get_scale() == 64.0


def test_layers_that_join_a_selection_are_put_back_too() -> None:
    model = make()
    params, steps, begins = dict(model.named_parameters()), optimizer(model), Beginning()
    before = {name: param.clone() for name, param in params.items()}
    for _ in range(10):
        begins.see(torch.tensor([1.0]))  # a loss with one element is one
    begins.chose(model, steps, {n: p for n, p in params.items() if not n.startswith("0.")}, length=10, may=True)
    begins.keep(params)
    for _ in range(10):
        torch._foreach_add_([param.data for param in params.values()], 1.0)
        begins.see(torch.tensor([3.0]))
    assert begins.judge_() is not None
    assert all(torch.equal(before[name], param) for name, param in params.items())


def test_statistics_that_were_estimated_while_a_selection_is_judged_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    for inputs, _ in batches(60):  # so that it has statistics
        model(inputs)
    groups = [{"params": list(model[:2].parameters()), "lr": 300.0}, {"params": list(model[3].parameters())}]
    steps = torch.optim.SGD(groups, lr=0.1)
    with Session(model, steps, loss, policy(), norm="frozen", total_steps=60) as session:
        for number, batch in enumerate(batches(40)):
            if number == 15:
                session.estimate_norms(batches(3))
                estimated = norm.running_mean.clone()
            session.step(batch)
        assert names(session) == ["3"] and torch.equal(norm.running_mean, estimated)


class Beside:
    """A second head that knows its losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.took_over = losses, 0

    def train(self, batch: Any, first: bool, last: bool) -> torch.Tensor:
        return torch.tensor(self.losses.pop(0))

    def stop(self) -> None:
        assert not self.losses

    def take_over_(self) -> None:
        self.took_over += 1


@pytest.mark.parametrize(
    ("beside", "after", "next_share"),
    [
        ([0.7] * 10, [0.6] * 10, None),
        ([0.7] * 10, [3.3] * 5 + [0.6] * 5, None),  # it rises as features change, and comes back
        ([0.7] * 10, [3.5] * 5 + [0.6] * 5, 0.25),  # too far: features are lost
        ([0.7] * 10, [0.7] * 10, 0.25),  # the layers do not help
        ([0.79] * 10, [0.79] * 10, 0.25),
        ([0.01] * 10, [0.02] * 10, 0.25),
        ([0.0] * 10, [0.0] * 10, 0.25),
        ([0.2, 1.0] * 5, [0.5] * 10, 0.25),  # so much may be chance
        ([0.4535, 0.6535] * 5, [0.5] * 10, 0.25),  # one and a half standard errors
        ([0.5025, 0.7025] * 5, [0.5] * 10, None),  # two and a half
        ([0.6, 0.8] * 5, [0.5] * 10, None),
        ([0.7] * 10, [math.nan] * 10, 0.25),
    ],
)
def test_where_the_head_learns_most_by_itself_a_selection_must_do_clearly_better(
    beside: list[float], after: list[float], next_share: float | None
) -> None:
    second, said, over = judged(beside, after)
    assert (said, over) == (next_share, next_share is None)
    assert second.took_over == (next_share is not None)


@pytest.mark.parametrize(
    ("beside", "after", "next_share"),
    [
        ([1.5] * 10, [1.5] * 10, None),
        ([0.81] * 10, [0.81] * 10, None),
        ([1.5] * 10, [2.4] * 5 + [1.5] * 5, None),
        ([1.5] * 10, [2.6] * 5 + [1.5] * 5, 0.25),  # it came back, but the features are lost
        ([1.5] * 10, [1.6] * 10, 0.25),  # the head alone is better, though the loss fell
        ([0.5, 2.1] * 5, [1.6] * 10, None),  # so much may be chance
        ([1.2, 1.6] * 5, [1.6] * 10, None),
        ([1.2575, 1.4575] * 5, [1.5] * 10, None),  # two and a half standard errors
        ([1.2085, 1.4085] * 5, [1.5] * 10, 0.25),  # three and a half
        ([0.5, 2.1] * 5, [2.05] * 10, 0.25),  # more than when the run began: it may only guess
        ([1.3, 1.5] * 5, [1.6] * 10, 0.25),
        ([2.9] * 10, [2.0] * 10, None),
        ([2.9] * 10, [2.1] * 10, 0.25),
        ([1.5] * 10, [math.nan] * 10, 0.25),
        ([1.5] * 10, [1.0] * 6 + [math.nan] * 4, 0.25),
        ([1.5] * 10, [1.0] * 8 + [math.inf] * 2, 0.25),
        ([1.5] * 10, [1.0] * 9 + [math.nan], None),  # one bad batch says nothing
        ([1.5] * 10, [0.2] * 6 + [2.5, 3.0, 3.5, 4.0], 0.25),  # it has just begun to explode
        ([3.1] * 10, [1.9] * 10, None),
        ([math.nan] * 10, [1.0] * 10, 0.0),
    ],
)
def test_elsewhere_it_must_not_do_clearly_worse(beside: list[float], after: list[float], next_share: float | None) -> None:
    second, said, over = judged(beside, after)
    assert said == next_share
    assert second.took_over == (next_share == 0.25), "a head whose loss is not finite is put back as it was"
    assert over == (not next_share)


@pytest.mark.parametrize(
    ("beside", "after", "next_share"),
    [
        ([2.5] * 10, [1.9] * 10, 0.0),  # the head has not begun to learn, so it is no measure
        ([1.9] * 10, [2.4] * 10, 0.25),
        ([1.9] * 10, [1.9] * 10, None),
    ],
)
def test_where_the_loss_has_risen_a_network_that_guesses_is_not_taken_for_one_that_learns(
    beside: list[float], after: list[float], next_share: float | None
) -> None:
    """The losses were 2.0 at the start, and 2.6 when layers were chosen. The head goes on as if it had trained alone."""
    second, said, _ = judged(beside, after, head=[2.0] * 2 + [2.6] * 8)
    assert said == next_share
    assert second.took_over == (next_share is not None)


def test_what_the_head_has_learned_is_told_by_the_first_steps() -> None:
    """It hardly learns any more, and scatters: that is no reason to keep a selection that does no better."""
    assert judged([0.4, 0.8] * 5, [0.7] * 10, head=[2.0] * 2 + [0.7] * 8)[1] == 0.25


@pytest.mark.parametrize(
    ("beside", "after", "next_share"),
    [
        ([3.5, 0.5] * 5, [1.9] * 10, 0.25),  # the mean is below 2.0, but not by a standard error
        ([3.5, 0.5] * 5, [0.1] * 10, None),
        ([2.3, 1.1] * 5, [1.7] * 10, None),
    ],
)
def test_to_be_as_good_as_a_head_that_scatters_around_a_guess_says_nothing(
    beside: list[float], after: list[float], next_share: float | None
) -> None:
    assert judged(beside, after, head=[2.0] * 2 + [0.4, 3.4] * 4)[1] == next_share


def test_losses_below_zero_do_not_tell_what_was_learned() -> None:
    assert judged([-3.0] * 10, [-3.0] * 10, head=[-2.0] * 10)[1] is None


def test_a_first_batch_that_is_bad_says_nothing() -> None:
    assert judged([1.0] * 10, [0.9] * 10, head=[math.nan] + [2.0] * 9)[1] is None
    assert judged([1.0] * 10, [0.9] * 10, head=[math.nan] * 2 + [2.0] * 8)[1] is None


@pytest.mark.parametrize(
    ("after", "taken_back"),
    [
        ([1.9] * 20, False),
        ([2.1] * 10, True),
        ([0.5] * 10 + [2.1] * 10, True),
        ([0.5] * 9 + [15.0] + [0.5] * 10, False),
        ([0.5] * 15 + [math.nan] * 5, True),
        ([0.5] * 20 + [9.0] * 30, False),  # it is not watched for ever
    ],
)
def test_a_selection_that_has_passed_must_not_lose_all_that_was_learned(after: list[float], taken_back: bool) -> None:
    """The losses were 2.0 at the start."""
    model, second = make(), Beside([1.5] * 10)
    begins = started(model, optimizer(model), second)
    judge(begins, [1.4] * 10)
    assert begins.judge_() is None
    with torch.no_grad():
        before = model[0].weight.clone()
        model[0].weight.add_(1.0)
    said = watch(begins, after)
    assert [share for _, share in said] == [0.0] * taken_back and begins.over
    assert second.took_over == taken_back
    assert torch.equal(model[0].weight, before) == taken_back


def test_without_a_second_head_a_selection_that_has_passed_is_not_watched() -> None:
    """It may have passed at any loss below that of the head, also above that of the first steps."""
    model = make()
    begins = Beginning()
    for value in [0.1] * 2 + [3.0] * 10:
        begins.see(torch.tensor(value))
    begins.chose(model, optimizer(model), dict(model.named_parameters()), length=10, may=True)
    for value in [2.9] * 10:
        begins.see(torch.tensor(value))
    assert begins.judge_() is None and begins.over


def test_a_rate_that_rises_after_the_test_makes_the_head_go_on_alone(tmp_path: Path) -> None:
    model, log = blocks(norm=False), tmp_path / "run.jsonl"
    steps = torch.optim.SGD([{"params": [*model[0].parameters()]}, {"params": [*model[4].parameters()]}], lr=0.1, momentum=0.9)
    with Session(model, steps, loss, policy(), total_steps=100, log=log) as session:
        for batch in batches(10) * 10:
            if passed := session._loop.beginning._passed:
                steps.param_groups[0]["lr"] = 1e4
            session.step(batch)
        assert passed == 1 and names(session) == ["4"]
    notes = [line["text"] for line in lines(log, "note") if "taken back" in line["text"]]
    assert len(notes) == 1 and "later its loss rose" in notes[0] and "the head alone trains" in notes[0]
    assert float(model[0].weight.detach().abs().max()) < 9


def test_a_quarter_is_only_tried_where_it_can_be_judged() -> None:
    assert [judged([1.5] * 10, [1.9] * 10, left=left)[1] for left in (10, 9)] == [0.25, 0.0]


def test_a_second_try_is_judged_by_its_own_steps() -> None:
    model = make()
    steps, second = optimizer(model), Beside([1.5] * 10 + [1.0] * 10)
    begins = started(model, steps, second)
    for after, share in ((1.9, 0.25), (1.4, 0.0)):
        judge(begins, [after] * 10)
        said = begins.judge_()
        assert said is not None and said[1] == share
    assert begins.over


def test_steps_of_the_callers_own_end_it() -> None:
    model = make()
    begins = started(model, optimizer(model), Beside([]))
    begins.see(None)
    assert begins.over


@pytest.mark.parametrize(
    "recipe", [recipes.full(), recipes.head(), recipes.pliant(macs=1.0, head_first=0)], ids=lambda one: one.name
)
def test_where_no_head_trains_alone_no_losses_are_kept(recipe: Any) -> None:
    model = make()
    with Session(model, optimizer(model), loss, replace(recipe, cost=measure.counted)) as session:
        for batch in batches(3):
            session.step(batch)
        begins = session.state_dict()["beginning"]
    assert begins["over"] and not begins["losses"] and not begins["first"]


def test_a_batch_that_fails_in_the_second_head_is_no_step() -> None:
    model = make()
    with Session(model, optimizer(model), loss, policy(), total_steps=60) as session:
        for number, (inputs, labels) in enumerate(batches(16)):
            if number == 15:
                assert session.selection.round == 1
                with pytest.raises(RuntimeError):
                    session.step((inputs[:, :5], labels))
            session.step((inputs, labels))
        assert session.progress.step == 16


def test_the_loss_may_be_changed_by_the_caller() -> None:
    model = make()
    with Session(model, optimizer(model), loss, policy(), total_steps=60) as session:
        total = session.step(batches(1)[0])
        first = float(total)
        total += 5.0
        assert session.state_dict()["beginning"]["first"] == [pytest.approx(first)]


@pytest.mark.parametrize("limited", [False, True], ids=["", "without a second head"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_run_whose_optimizer_was_replaced_can_be_resumed(late: int, limited: bool) -> None:
    """What was kept of the old one's state is of no use to the new one."""
    budget = Budget(memory="1MB") if limited else Budget(macs=1.0)
    one = make()
    with Session(one, optimizer(one, body=300.0), loss, replace(policy(), budget=budget), total_steps=60) as session:
        for number, batch in enumerate(batches(14 + late)):
            if number == 14:
                session.optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
            session.step(batch)
        if not late:
            session.optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
        state, held = session.state_dict(), session.optimizer.state_dict()
    other = make()
    other.load_state_dict(one.state_dict())
    steps = torch.optim.Adam(other.parameters(), lr=0.01)
    steps.load_state_dict(held)
    with Session(other, steps, loss, replace(policy(), budget=budget), total_steps=60) as session:
        session.load_state_dict(state)
        for batch in batches(24)[14 + late :]:
            session.step(batch)
        assert session.progress.step == 24


def judged(
    beside: list[float], after: list[float], head: Sequence[float] = (2.0,) * 10, left: float = math.inf
) -> tuple[Beside, float | None, bool]:
    """Ten steps of the head, and ten of a selection that is judged; if it passes, twenty more with a low loss. Returns the
    second head, the share to try next, and whether all is over."""
    model = make()
    steps, second = optimizer(model), Beside([*beside])
    begins = started(model, steps, second, head)
    judge(begins, after)
    said = begins.judge_(left)
    if said is None:
        watch(begins, [-9.0] * 20)
    return second, None if said is None else said[1], begins.over


def started(model: nn.Module, steps: torch.optim.Optimizer, second: Beside, head: Sequence[float] = (2.0,) * 10) -> Beginning:
    """A selection is in force, after ten steps of the head."""
    begins = Beginning(second=lambda *_: second)  # type: ignore[arg-type,return-value]
    for value in head:
        begins.see(torch.tensor(value))
    begins.chose(model, steps, dict(model.named_parameters()), length=10, may=True, head=["4.weight"])
    return begins


def judge(begins: Beginning, after: list[float]) -> None:
    for value in after:
        assert begins.judge_() is None
        begins.train_second_head(None, first=True, last=True)
        begins.see(torch.tensor(value))


def watch(begins: Beginning, after: list[float]) -> list[tuple[str, float]]:
    """Further steps of a selection that has passed, without a second head. Returns what is said of them."""
    said = []
    for value in after:
        assert not begins.train_second_head(None, first=True, last=True)
        begins.see(torch.tensor(value))
        said += [one for one in (begins.judge_(),) if one is not None]
    return said


def blocks(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)]
    model = nn.Sequential(*body).double()
    with torch.no_grad():
        model[4].weight.mul_(0.1)  # so that a few steps make it better than a guess
    for inputs, _ in batches(60):  # so that the norm has statistics
        model(inputs)
    return model


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"clip": 0.1}, {"scaler": 64.0}], ids=str)
def test_a_selection_that_is_taken_back_leaves_the_head_as_if_it_had_trained_alone(
    how: dict[str, Any], kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """The same batches, the same random numbers, the same momentum, and rates that change."""
    found = []
    for recipe in (policy(), recipes.head()):
        model, log = blocks(), tmp_path / f"{recipe.name}.jsonl"
        groups = [{"params": [p for n, p in model.named_parameters() if n[0] != "4"]}, {"params": [*model[4].parameters()]}]
        steps = kind(groups, lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        given = {**how, "scaler": torch.amp.GradScaler("cpu", init_scale=how["scaler"])} if "scaler" in how else how
        torch.manual_seed(1)
        with Session(model, steps, loss, recipe, norm="chosen", total_steps=60, log=log, **given) as session:
            for number, batch in enumerate(batches(41 * how.get("accumulate", 1))):
                steps.param_groups[0]["lr"], steps.param_groups[1]["lr"] = 3000.0, 0.1 - 0.001 * number
                session.step(batch)
        state = [steps.state[param] for param in model[4].parameters()]
        found.append({"weights": model.state_dict(), "state": state})
    assert any("taken back" in line["text"] for line in lines(tmp_path / "pliant.jsonl", "note"))
    ours, alone = found
    assert all(torch.equal(value, alone["weights"][name]) for name, value in ours["weights"].items())
    for mine, theirs in zip(ours["state"], alone["state"], strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine if mine[k] is not None)


def test_where_memory_is_limited_there_is_no_second_head(tmp_path: Path) -> None:
    model, log = make(), tmp_path / "run.jsonl"
    limited = replace(policy(), budget=Budget(memory="1MB"))
    with Session(model, optimizer(model, body=300.0), loss, limited, total_steps=60, log=log) as session:
        for batch in batches(21):
            session.step(batch)
    assert any("the head left it at" in line["text"] for line in lines(log, "note"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_second_head_leaves_no_trace(autocast: bool, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of autocast, casts of weights are kept from one pass to another."""
    found = []
    for trains in (True, False):
        if not trains:
            monkeypatch.setattr(SecondHead, "train", lambda *_: torch.tensor(0.0))
        model = blocks().float()
        steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        with Session(model, steps, loss, policy(), norm="chosen", total_steps=60, accumulate=accumulate) as session:
            for inputs, labels in batches(19 * accumulate):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    session.step((inputs.float(), labels))
            assert session.selection.round == 1
        found.append(snapshot(model, steps))
    assert differences(*found) == []


class Cached(nn.Module):
    """Keeps buffers of its own: one is as long as the largest batch, one is expanded, one comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("longest", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("wide", torch.zeros(1, dtype=torch.float64).expand(3))
        self.register_buffer("fleeting", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fleeting = None if self.fleeting is not None else torch.zeros(2)
        if len(self.longest) < len(x):
            self.longest = torch.ones(len(x), dtype=torch.float64)
        return x * self.longest[: len(x), None] + self.wide[0]


def test_a_second_head_trains_beside_models_that_replace_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train = [], SecondHead.train
    monkeypatch.setattr(SecondHead, "train", lambda *how: trained.append(1) or train(*how))
    model = nn.Sequential(Cached(), *blocks(norm=False))
    steps = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(model, steps, loss, policy(), total_steps=60) as session:
        for k, (inputs, labels) in enumerate(batches(21)):
            few = len(inputs) if k > 12 else len(inputs) // 2
            session.step((inputs[:few], labels[:few]))
    assert len(trained) >= 5


@pytest.mark.parametrize("what", ["steps of the caller's own", "limited memory", "estimated norms"])
def test_what_ends_a_second_head(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train = [], SecondHead.train
    monkeypatch.setattr(SecondHead, "train", lambda *how: trained.append(1) or train(*how))
    model, stream = blocks(), batches(20)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, steps, loss, policy(), norm="chosen", total_steps=60) as session:
        for batch in stream[:15]:
            session.step(batch)
        so_far = len(trained)
        assert so_far > 0
        if what == "limited memory":
            session.budget = Budget(memory="1MB")
        elif what == "estimated norms":
            session.estimate_norms(stream[:3])
        for batch in stream[15:]:
            if what == "steps of the caller's own":
                session.before_step(batch)
                steps.zero_grad()
                loss(model, batch).backward()
                steps.step()
            else:
                session.step(batch)
    assert len(trained) == so_far


def test_gradients_of_a_step_that_failed_do_not_reach_the_second_head(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fails in (True, False):
        model, stream = blocks(norm=False), batches(36)
        steps = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        fail = [False]

        def brittle(model: nn.Module, batch: Any, fail: list[bool] = fail) -> torch.Tensor:
            if fail[0] and any(p.requires_grad for p in model[0].parameters()):  # while the selection trains
                raise MemoryError
            return loss(model, batch)

        model[3].p = 0.0  # whoever fails has drawn other random numbers
        with Session(model, steps, brittle, policy(), total_steps=60, accumulate=2) as session:
            for batch in stream[:30]:
                session.step(batch)
            second = session._loop.beginning._second
            assert second is not None
            if fails:
                fail[0] = True
                with pytest.raises(MemoryError):
                    session.step(stream[30])
                fail[0] = False
            for batch in stream[32:34]:
                session.step(batch)
            found.append([own.detach().clone() for own in second._copies.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_after_a_quarter_of_it_the_head_alone_trains() -> None:
    model = make()
    steps, begins, told = optimizer(model), Beginning(), []
    before = [param.clone() for param in model.parameters()]
    for value in [2.0] * 5 + [1.0] * 5:
        begins.see(torch.tensor(value))
    begins.chose(model, steps, dict(model.named_parameters()), length=10, may=True)
    for _ in range(20):
        torch._foreach_add_([param.data for param in model.parameters()], 1.0)
        begins.see(torch.tensor(3.0))
        told.append(begins.judge_())
    said = [one for one in told if one is not None]
    assert [share for _, share in said] == [0.25, 0.0] and [told.index(one) for one in said] == [9, 19] and begins.over
    assert all("the head left it at 1" in why for why, _ in said)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_run_that_is_saved_while_it_is_judged_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    data = batches(8) * 5
    # While the head trains alone, just before the selection, while it is judged, after it was taken back.
    for stop in (5, 10, 14, 24):
        with Session(whole := make(), optimizer(whole, 300.0), loss, policy(), total_steps=60) as session:
            for batch in data:
                session.step(batch)
        with Session(cut := make(), optimizer(cut, 300.0), loss, policy(), total_steps=60) as session:
            for batch in data[:stop]:
                session.step(batch)
            session.save(tmp_path / "run.pt")
        with Session(resumed := make(), optimizer(resumed, 300.0), loss, policy(), total_steps=60) as session:
            session.load(tmp_path / "run.pt")
            for batch in data[stop:]:
                session.step(batch)
        assert differences(snapshot(whole)["weights"], snapshot(resumed)["weights"]) == []


def test_a_second_head_of_another_shape_is_refused() -> None:
    model = make()
    with Session(model, optimizer(model), loss, policy(), total_steps=60) as session:
        for batch in batches(14):
            session.step(batch)
        state = session.state_dict()
        assert state["beginning"]["second"]["params"].keys() == {"4.weight", "4.bias"}
        state["beginning"]["second"]["params"]["4.bias"] = torch.zeros(2)
        with pytest.raises(ValueError, match=r"'4.bias' is \(2,\), not \(3,\)"):
            session.load_state_dict(state)


def test_a_budget_may_change_while_the_head_trains_alone() -> None:
    model = make()
    with Session(model, optimizer(model), loss, policy(), total_steps=60) as session:
        for batch in batches(3):
            session.step(batch)
        session.budget = Budget(macs=0.9)
        for batch in batches(12)[3:]:
            session.step(batch)
        assert session.selection.round == 1 and session.selection.asked["macs"] == pytest.approx(
            0.9 * session.profile.full.macs
        )
