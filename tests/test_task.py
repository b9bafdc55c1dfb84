"""From names to what they mean: models, images, recipes, budgets; and back from files of weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import nn

from pliant import PliantError, recipes
from pliant.apps import models
from pliant.apps import tasks as task
from pliant.apps.train import Options, open_session
from pliant.core.budget import Budget
from pliant.runtime.files import write_aside

pytestmark = pytest.mark.usefixtures("place")


def loaded(**other: Any) -> task.Task:
    return task.load(tiny.MODEL, tiny.DATA, **{"size": 8, "seed": 0, "device": "cpu", **other})


# ---------------------------------------------------------------- recipes


def test_every_recipe_has_its_name() -> None:
    assert {"pliant", "full", "head", "last", "only", "elastic_trainer"} <= set(task.RECIPES)
    assert all(task.RECIPES[name] is getattr(recipes, name) for name in task.RECIPES)
    for name in set(task.RECIPES) - {"only"}:
        assert task.policy(name).name == name


def test_budgets_are_those_that_were_given() -> None:
    assert task.policy("pliant", time="0.4", memory="64MB").budget == Budget(time=0.4, memory="64MB")
    assert task.policy("pliant").budget == Budget(time=0.5)
    assert task.policy("pliant", macs=0.3).budget == Budget(macs=0.3)
    assert task.policy("random", time=0.9, seed=7).seed == 7
    assert task.policy("only:head.*,*.bias").name == "only(head.*, *.bias)"
    with pytest.raises(PliantError, match="takes none"):
        task.policy("full", time="0.5")


@pytest.mark.parametrize("name", ["freeze_out", "lisa", "badam"])
def test_published_baselines_come_by_name_and_keep_no_budget(name: str) -> None:
    assert task.RECIPES[name] is getattr(recipes, name) and task.budgets(name) == ()
    with pytest.raises(PliantError, match="takes none"):
        task.policy(name, memory="1MB")
    assert task.policy(name, seed=7).seed == (0 if name == "freeze_out" else 7), "nothing is drawn in freeze_out"
    mine = loaded(scratch=True)
    with open_session(Options(batch=8, lr=0.1, optimizer="sgd", epochs=2, scratch=True), mine, task.policy(name)) as session:
        for epoch in range(2):
            for batch in mine.batches(8, 0, epoch):
                assert torch.isfinite(session.step(batch))
        assert session.progress.step == session.total_steps


def test_the_rate_falls_from_the_start_to_nothing() -> None:
    rates = [task.rate(0.1, step, 10) for step in range(11)]
    assert rates[0] == 0.1 and rates[5] == pytest.approx(0.05) and rates[10] == pytest.approx(0)
    assert rates == sorted(rates, reverse=True)


# ---------------------------------------------------------------- tasks


def test_batches_of_an_epoch_hang_on_nothing_else() -> None:
    mine = loaded()
    first = [labels.tolist() for _, labels in mine.batches(8, 3, 1)]
    list(mine.batches(8, 3, 0))
    assert first == [labels.tolist() for _, labels in mine.batches(8, 3, 1)]
    assert first != [labels.tolist() for _, labels in mine.batches(8, 3, 0)]
    assert first != [labels.tolist() for _, labels in mine.batches(8, 4, 1)]
    assert first != [labels.tolist() for _, labels in mine.batches(8, 2**63 - 1, 1)]  # the largest seed


def test_judging_leaves_no_trace_and_tells_the_truth() -> None:
    mine = loaded()
    mine.model.train()
    mine.model[1].eval()  # type: ignore[index]
    before = {name: value.clone() for name, value in mine.model.state_dict().items()}
    accuracy, loss = task.judge(mine.model, mine.validation)
    assert mine.model.training and not mine.model[1].training  # type: ignore[index]
    assert all(torch.equal(before[name], value) for name, value in mine.model.state_dict().items())
    mine.model.eval()
    logits = mine.model(mine.validation.images).detach()
    assert accuracy == pytest.approx(float((logits.argmax(1) == mine.validation.labels).float().mean()))
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits, mine.validation.labels)))


def test_digits_come_with_their_classes() -> None:
    mine = task.load("tiny_net:net", "digits", size=8, seed=0, device="cpu", scratch=True)
    assert mine.classes == tuple("0123456789") and len(mine.train) == 1000 and len(mine.validation) == 297


def test_a_folder_with_the_name_of_the_digits_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PliantError, match=r"write \./digits for yours"):
        task.load("tiny_net:net", "digits", size=8, seed=0, device="cpu", scratch=True)


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PliantError, match="no CUDA device"):
        loaded(device=device)


@pytest.mark.parametrize("device", ["meta", "vulkan", "fpga"])
def test_a_device_that_torch_only_knows_by_name_is_told(device: str) -> None:
    with pytest.raises(PliantError, match=f"device='{device}' cannot be used here: "):
        loaded(device=device)


# ---------------------------------------------------------------- models by name


def test_a_file_of_weights_is_the_model_again() -> None:
    model = models.load("tiny_net:net", 4)
    write_aside("w.safetensors", models.weights_of(model, {"model": "tiny_net:net", "classes": "4"}))
    again = models.load("tiny_net:net@w.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    other = models.load("tiny_net:net@w.safetensors", classes=6)
    assert other[7].out_features == 6 and torch.equal(other[0].weight, model[0].weight)  # type: ignore[index]


def test_tensors_that_share_memory_can_be_saved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert models.weights_of(model)


def test_files_that_are_of_nothing_known_are_told() -> None:
    save_file({"a": torch.zeros(2)}, "odd.safetensors")
    with pytest.raises(ValueError, match="fits none of"):
        models.load("odd.safetensors")
    Path("broken.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="broken"):
        models.load("broken.safetensors")
    save_file({"a": torch.zeros(2)}, "other.safetensors", {"model": "tiny_net:net"})
    with pytest.raises(ValueError, match="does not fit tiny_net:net"):
        models.load("tiny_net:net@other.safetensors")


CALLED = """
from pathlib import Path
Path("called").touch()


def net(classes=2):
    Path("called").touch()
"""


@pytest.mark.parametrize("name", ["evil:net", "os:abort", "w.safetensors", "evil:net@w.safetensors", "builtins:eval", "a b"])
def test_a_weight_file_runs_no_code_that_it_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("evil.py").write_text(CALLED)
    save_file({"a": torch.zeros(2)}, "w.safetensors", {"model": name, "classes": "2"})
    with pytest.raises(ValueError, match="may not choose the code"):
        models.load("w.safetensors")
    assert not Path("called").exists()


@pytest.mark.parametrize(
    "arch",
    [
        "[]",
        "{}",
        '{"stem": [3, 16, 3, 2], "blocks": [[1]], "feat": 8, "classes": 2}',
        '{"stem": [3, 16, 3, 2], "blocks": [[16, 16, 99999999999, 3, 1, false, false]], "feat": 99999999999, "classes": 2}',
        '{"stem": [3, 16, 3, 2], "blocks": [], "feat": 16, "classes": -2}',
        "[" * 100_000,
    ],
    ids=range(6),
)
def test_a_table_of_blocks_that_is_none_is_told(arch: str) -> None:
    save_file({"a": torch.zeros(2)}, "w.safetensors", {"arch": arch})
    with pytest.raises(ValueError, match=r"w\.safetensors"):
        models.load("w.safetensors")


def test_a_number_of_classes_that_no_tensor_has_is_not_believed() -> None:
    save_file({"a": torch.zeros(2)}, "w.safetensors", {"model": "mcunet_5fps", "classes": str(10**15)})
    with pytest.raises(ValueError, match="does not fit mcunet_5fps"):
        models.load("w.safetensors")


def test_timm_models_come_by_name_with_their_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_net

    def create(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        assert pretrained and name == "resnet18"
        model: nn.Module = tiny_net.net(num_classes)
        model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}  # type: ignore[assignment]
        return model

    timm: Any = SimpleNamespace(list_models=lambda: ["resnet18", "resnet34"], create_model=create)
    monkeypatch.setitem(sys.modules, "timm", timm)
    mine = task.load("timm:resnet18", tiny.DATA, size=8, seed=0, device="cpu")
    assert mine.train.images.unique().tolist() == [-2.0, 2.0]  # (0 − ½) / ¼ and (1 − ½) / ¼
    with pytest.raises(PliantError, match="Did you mean 'resnet18'"):
        task.load("timm:resnet81", tiny.DATA, size=8, seed=0, device="cpu")


def test_what_is_saved_beside_comes_back() -> None:
    mine = loaded(scratch=True)
    policy = task.policy("head")
    with open_session(Options(batch=8, lr=0.1, optimizer="sgd", scratch=True), mine, policy) as session:
        session.step(next(mine.batches(8, 0, 0)))
        session.save("state.pt", {"mine": [1, 2.5, "three"]})
        assert session.load("state.pt") == {"mine": [1, 2.5, "three"]}
        session.save("state.pt")
        assert session.load("state.pt") is None
