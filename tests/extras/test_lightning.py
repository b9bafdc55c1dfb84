"""Pliant inside the real Lightning: tiny models, a few steps, save and resume."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import on_steady_device

from pliant import recipes, schedule

IS_HERE = importlib.util.find_spec("lightning") is not None
pytestmark = [
    pytest.mark.skipif(not IS_HERE, reason="pip install 'pliant[lightning]'"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
OFTEN = schedule.every(steps=3)
POLICIES = {
    "pliant": lambda: on_steady_device(recipes.pliant(time=0.6, when=OFTEN)),
    "elastic_trainer": lambda: on_steady_device(recipes.elastic_trainer(time=0.6, when=OFTEN)),
    "lisa": lambda: recipes.lisa(layers=1, steps=3),
}


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    if IS_HERE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("pliant.integrations.lightning")


def module(manual: bool = False) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = [nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Dropout(0.1)]
            self.net = nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Linear(8, 3))
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    return Module()


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(22, 4, generator=generator), torch.randint(0, 3, (22,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)


def fitted(policy: Any, folder: Path, model: Any = None, resume: Any = None, **changes: Any) -> tuple[Any, Any]:
    import lightning.pytorch as pl

    from pliant.integrations.lightning import PliantCallback

    model = module() if model is None else model
    options = {"engine": "plain", "correct": False, "norm": "as-is", **changes.pop("session", {})}
    callback = PliantCallback(policy, **options) if policy is not None else None
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    saves = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    usual = {"max_epochs": 2, "callbacks": [*([callback] if callback else []), saves], "gradient_clip_val": 0.5}
    torch.manual_seed(3)
    trainer = pl.Trainer(**{**usual, **quiet, **changes})
    trainer.fit(model, loader(), ckpt_path=resume)
    return model, callback


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("changes", [{}, {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"}], ids=str)
def test_full_is_lightnings_own_training_to_the_last_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    assert same(fitted(None, tmp_path / "a", **changes)[0], fitted(recipes.full(), tmp_path / "b", **changes)[0])


def test_only_is_freezing_by_hand(tmp_path: Path) -> None:
    model = module()
    for name, param in model.named_parameters():
        param.requires_grad_("net.2" in name)
    ours, _ = fitted(recipes.only("net.2.*"), tmp_path / "b")
    assert same(fitted(None, tmp_path / "a", model)[0], ours)
    assert all(param.requires_grad for param in ours.parameters()), "flags are as they were found"


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_that_was_killed_goes_on_with_the_same_selection(name: str, tmp_path: Path) -> None:
    def without_dropout() -> Any:  # Lightning does not restore random states
        model = module()
        model.net[4].p = 0.0
        return model

    whole, first = fitted(POLICIES[name](), tmp_path / "whole", without_dropout())
    cut = tmp_path / "whole" / "step=6.ckpt"  # between epochs: within one, Lightning starts its batches anew
    again, second = fitted(POLICIES[name](), tmp_path / "again", without_dropout(), resume=str(cut))
    assert same(whole, again)
    assert first.session.selection.units == second.session.selection.units
    rounds = 3
    assert first.session.selection.round == second.session.selection.round == rounds


@pytest.mark.parametrize("engine", ["lean", "prefix"])
def test_engines_run_inside_of_training_step(engine: str, tmp_path: Path) -> None:
    policy = recipes.only("net.6.*")
    plain, _ = fitted(policy, tmp_path / "a", session={"norm": "frozen"})
    ours, callback = fitted(policy, tmp_path / "b", session={"engine": engine, "norm": "frozen"})
    assert callback.session.engine == engine and "training_step" not in vars(ours)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_use_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from pliant.integrations.lightning import PliantCallback

    with pytest.raises(TypeError, match="is not a Policy"):
        PliantCallback("full")
    with pytest.raises(ValueError, match=r"Trainer\(accumulate_grad_batches="):
        PliantCallback(recipes.full(), accumulate=2)
    with pytest.raises(ValueError, match="optimizes by hand"):
        fitted(recipes.full(), tmp_path, module(manual=True), gradient_clip_val=None)
    model = module()
    model.net[0].requires_grad_(False)
    made = model.configure_optimizers()
    model.net[0].requires_grad_(True)
    model.configure_optimizers = lambda: made
    with pytest.raises(ValueError, match=r"does not hold 'net\.0"):
        fitted(recipes.full(), tmp_path, model)
