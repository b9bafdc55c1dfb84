"""Running statistics of another world: when they are re-estimated, and what that leaves alone."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import differences, snapshot
from torch import nn

from pliant import Budget, Session, recipes
from pliant.runtime.norm_statistics import LOOKS

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two convolutions with batch norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.first(x)).relu()
        return self.head(self.drop(self.norm2(self.second(x)).relu().mean((2, 3))))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(many: int, scale: float = 1.0, offset: float = 0.0, turn: int = 0) -> list[Batch]:
    """Images whose class is the corner that is bright."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for _ in range(many):
        x, y = 0.3 * torch.randn(16, 3, 8, 8, generator=generator).double(), torch.randint(4, (16,), generator=generator)
        for image, label in zip(x, y.tolist(), strict=True):
            image[label % 3, 4 * (label // 3) :] += 2.0
        out.append((scale * x + offset, (y + turn) % 4))
    return out


def trained() -> Net:
    return copy.deepcopy(_trained())


@cache
def _trained() -> Net:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(60):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():  # running statistics lag behind weights that move
        for batch in batches(60):
            loss(model, batch)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def notes(log: Path) -> list[str]:
    return [line["text"] for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "note"]


def test_another_world_is_noticed_and_its_statistics_are_taken(tmp_path: Path) -> None:
    model, log = trained(), tmp_path / "run.jsonl"
    before, dim = statistics(model), batches(LOOKS + 2, scale=0.2, offset=0.4)
    with Session(model, sgd(model), loss, recipes.head(), log=log) as session:
        losses = [float(session.step(batch)) for batch in dim]
        after = statistics(model)
        session.step(dim[0])
        assert all(torch.equal(after[name], now) for name, now in statistics(model).items())  # after the first batches, no more
        session.rollback()
        assert all(torch.equal(before[name], now) for name, now in statistics(model).items())
    assert [note for note in notes(log) if "re-estimated over 5 batches" in note]
    assert losses[-1] < losses[0] and not torch.equal(before["norm1.running_var"], after["norm1.running_var"])
    expected = torch.stack([model.first(x).var((0, 2, 3)) for x, _ in dim[:LOOKS]]).mean(0)
    assert torch.allclose(after["norm1.running_var"], expected.detach())


@pytest.mark.parametrize("how", [{"turn": 1}, {}], ids=["other labels", "nothing else"])
def test_the_same_world_keeps_its_statistics(how: dict[str, int]) -> None:
    model = trained()
    before = statistics(model)
    with Session(model, sgd(model), loss, recipes.head()) as session:
        for batch in batches(LOOKS, **how):
            session.step(batch)
    assert all(torch.equal(before[name], now) for name, now in statistics(model).items())


@pytest.mark.parametrize(("known", "first"), [(0, 0), (2, 2), (9, 0)], ids=["from the start", "later", "never"])
def test_where_statistics_are_replaced_the_first_losses_are_those_after_it(known: int, first: int) -> None:
    """The head's losses are compared with those of the first steps, which must be of the same network."""
    model, seen = trained(), [*batches(9)[:known], *batches(9, scale=0.2, offset=0.4)][:9]
    before = statistics(model)
    with Session(model, sgd(model), loss, recipes.pliant(macs=0.9), total_steps=100) as session:
        losses = [float(session.step(batch)) for batch in seen]
        replaced = [name for name, now in statistics(model).items() if not torch.equal(before[name], now)]
        assert bool(replaced) == (known < 9)
        assert session._loop.beginning.state()["first"] == pytest.approx(losses[first : first + 2])


def test_what_the_network_does_not_know_no_statistics_bring_back(tmp_path: Path) -> None:
    """With labels of no meaning any smaller output lowers the loss. Statistics are kept, however far batches are."""
    model, log = trained(), tmp_path / "run.jsonl"
    before = statistics(model)
    data = [(x, torch.zeros(16, dtype=torch.long)) for x, _ in batches(LOOKS, scale=5.0)]
    losses = []
    for train in (False, True):
        twin = trained().train(train)
        losses.append(float(loss(twin, data[0]).detach()))
    assert losses[1] < 0.9 * losses[0]
    with Session(model, sgd(model), loss, recipes.head(), log=log) as session:
        for batch in data:
            session.step(batch)
    assert [note for note in notes(log) if "norm statistics are kept" in note]
    assert all(torch.equal(before[name], now) for name, now in statistics(model).items())


@pytest.mark.parametrize("norm", ["chosen", "frozen", "as-is"])
def test_other_rules_re_estimate_nothing(norm: str) -> None:
    model = trained().eval()
    before = statistics(model)
    with Session(model, sgd(model), loss, recipes.head(), norm=norm) as session:  # type: ignore[arg-type]
        for batch in batches(LOOKS, scale=0.2, offset=0.4):
            session.step(batch)
    assert all(torch.equal(before[name], now) for name, now in statistics(model).items())


def test_norms_that_the_user_holds_in_eval_mode_keep_theirs() -> None:
    model = trained().eval()
    before = statistics(model)
    with Session(model, sgd(model), loss, recipes.head()) as session:
        for batch in batches(LOOKS, scale=0.2, offset=0.4):
            session.step(batch)
    assert all(torch.equal(before[name], now) for name, now in statistics(model).items())


def test_it_is_saved_and_goes_on(tmp_path: Path) -> None:
    data = batches(LOOKS + 3, scale=0.2, offset=0.4)
    whole, cut, resumed = trained(), trained(), trained()
    torch.manual_seed(1)
    with Session(whole, sgd(whole), loss, recipes.head()) as session:
        for batch in data:
            session.step(batch)
    torch.manual_seed(1)
    with Session(cut, sgd(cut), loss, recipes.head()) as session:
        for batch in data[:2]:
            session.step(batch)
        session.save(tmp_path / "run.pt")
    with Session(resumed, sgd(resumed), loss, recipes.head()) as session:
        session.load(tmp_path / "run.pt")
        for batch in data[2:]:
            session.step(batch)
    assert differences(snapshot(whole), snapshot(resumed)) == []


@pytest.mark.parametrize("engine", ["prefix", "lean", "lean+prefix"])
def test_every_engine_follows(engine: str) -> None:
    models = []
    for mode in ("plain", engine):
        model = trained()
        model.drop.p = 0.0
        with Session(model, sgd(model), loss, recipes.only("second.*", "norm2.*", "head.*"), engine=mode) as session:
            for batch in batches(LOOKS + 3, scale=0.2, offset=0.4):
                session.step(batch)
        models.append(model)
    for (name, a), (_, b) in zip(models[0].state_dict().items(), models[1].state_dict().items(), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-9), name


def test_a_feature_cache_holds_features_of_the_new_statistics() -> None:
    data = batches(3, scale=0.2, offset=0.4)
    models = []
    for room in (None, "1MB"):
        model = trained()
        model.drop.p = 0.0
        with Session(model, sgd(model), loss, recipes.head(), cache=room) as session:
            for number, batch in [*enumerate(data)] * 4:
                session.step(batch, ids=range(100 * number, 100 * number + 16) if room else None)
        models.append(model)
    assert torch.allclose(models[0].head.weight, models[1].head.weight, atol=1e-9)


def test_given_batches_and_models_that_have_nothing_to_estimate() -> None:
    model, dim = trained(), batches(3, scale=0.2)
    with Session(model, sgd(model), loss, recipes.head()) as session:
        session.estimate_norms(dim)
        expected = torch.stack([model.first(x).mean((0, 2, 3)) for x, _ in dim]).mean(0)
        assert torch.allclose(model.norm1.running_mean, expected.detach())
        with pytest.raises(ValueError, match="statistics of this batch cannot be computed"):
            session.estimate_norms([(dim[0][0], None)])
    bare = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).double()
    with Session(bare, sgd(bare), loss, recipes.head()) as session:
        session.step(dim[0])
        with pytest.raises(ValueError, match="no batch norm with statistics"):
            session.estimate_norms(dim)


def test_one_sample_and_norms_without_statistics() -> None:
    model = trained()
    before = statistics(model)
    with Session(model, sgd(model), loss, recipes.head()) as session:
        for x, y in batches(3, scale=0.2, offset=0.4):
            session.step((x[:1], y[:1]))
    assert all(torch.equal(before[name], now) for name, now in statistics(model).items())
    for norm in (model.norm1, model.norm2):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    with Session(model, sgd(model), loss, recipes.head()) as session:
        assert torch.isfinite(session.step(batches(1)[0]))


PART = ("second.*", "norm2.*", "head.*")


def shrink_(model: Net) -> None:
    """Shrink weights, so that running statistics are far behind. Batch statistics do not notice."""
    with torch.no_grad():
        model.second.weight.mul_(0.05)
        model.second.bias.mul_(0.05)


@pytest.mark.parametrize("own_loop", [False, True])
def test_after_the_last_step_statistics_are_those_of_the_weights(own_loop: bool, tmp_path: Path) -> None:
    model, log = trained(), tmp_path / "run.jsonl"
    optimizer = sgd(model)
    with Session(model, optimizer, loss, recipes.only(*PART), log=log, total_steps=16) as session:
        for batch in batches(10):
            session.step(batch)
        shrink_(model)
        for batch in batches(6):
            if own_loop:
                session.before_step(batch)
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            else:
                session.step(batch)
        with torch.no_grad():
            seen = [model.second(F.relu(model.eval().norm1(model.first(x)))) for x, _ in batches(6)[-LOOKS:]]
        expected = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
        assert torch.allclose(model.norm2.running_var, expected)
    assert [note for note in notes(log) if note.startswith("after the last step, norm statistics are re-estimated")]


def test_at_the_end_a_batch_that_fails_is_left_out_and_no_labels_are_needed(tmp_path: Path) -> None:
    def to_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1 and not torch.is_grad_enabled():
            raise RuntimeError("one sample is trained on, but not evaluated")
        return F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))

    model, log = trained(), tmp_path / "run.jsonl"
    with Session(model, sgd(model), to_first, recipes.only(*PART), log=log, total_steps=8) as session:
        for x, _ in batches(3):
            session.step(x)
        shrink_(model)
        for k, (x, _) in enumerate(batches(LOOKS)):
            session.step(x[:1] if k == 2 else x)
    (note,) = [note for note in notes(log) if note.startswith("after the last step")]
    assert note.startswith(f"after the last step, norm statistics are re-estimated over {LOOKS - 1} batches: ")


@pytest.mark.parametrize("why", ["another rule", "a memory limit", "no known length", "an early end", "plain training", "head"])
def test_other_runs_end_with_the_statistics_of_their_last_step(why: str) -> None:
    model = trained()
    policy = {"plain training": recipes.full(), "head": recipes.head()}.get(why, recipes.only(*PART))
    if why == "a memory limit":
        policy = replace(policy, budget=Budget(memory="10MB"))
    rule, length = "chosen" if why == "another rule" else "auto", {"no known length": None, "an early end": 30}.get(why, 6)
    calls = []

    def counted(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(1)
        return loss(model, batch)

    with Session(model, sgd(model), counted, policy, norm=rule, total_steps=length) as session:  # type: ignore[arg-type]
        shrink_(model)
        for batch in batches(5):
            session.step(batch)
        twin = copy.deepcopy(model)
        before = len(calls)
        session.step(batches(6)[5])
        assert len(calls) == before + 1 or why == "a memory limit"  # which measures
    model.zero_grad()
    assert len(calls) == before + 1 or why == "a memory limit"
    if why not in ("head", "a memory limit"):
        twin.norm1.train(why == "plain training")
        twin.norm2.train()
        twin(batches(6)[5][0])
        assert all(torch.equal(twin.state_dict()[name], now) for name, now in statistics(model).items())


def test_statistics_that_fit_stay_as_they_are_at_the_end() -> None:
    model = trained()
    with Session(model, sgd(model), loss, recipes.only(*PART), total_steps=12) as session:
        for batch in batches(11):
            session.step(batch)
        twin = copy.deepcopy(model)
        session.step(batches(12)[11])
    twin.norm1.eval()
    twin(batches(12)[11][0])
    assert all(torch.equal(twin.state_dict()[name], now) for name, now in statistics(model).items())
