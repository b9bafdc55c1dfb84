"""Pliant inside the real Trainer and Accelerate: tiny random models, a few steps, save and resume."""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import on_steady_device

from pliant import recipes, schedule, units

ARE_HERE = all(importlib.util.find_spec(name) is not None for name in ("transformers", "accelerate"))
pytestmark = [
    pytest.mark.skipif(not ARE_HERE, reason="pip install 'pliant[hf]'"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*pin_memory.*:UserWarning"),
]
OFTEN = schedule.every(steps=3)
POLICIES = {
    "pliant": lambda: on_steady_device(recipes.pliant(time=0.6, when=OFTEN)),
    "elastic_trainer": lambda: on_steady_device(recipes.elastic_trainer(time=0.6, when=OFTEN)),
    "lisa": lambda: recipes.lisa(layers=1, steps=3),
    "only": lambda: recipes.only("*h.1.*"),
}


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    if ARE_HERE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("pliant.integrations.hf")


def gpt2(dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def texts(count: int = 24) -> list[dict[str, torch.Tensor]]:
    several = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text, "labels": text} for text in several]


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    usual = {"per_device_train_batch_size": 2, "max_steps": 8, "use_cpu": True, "report_to": [], "logging_steps": 4}
    quiet = {"disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2}
    return TrainingArguments(output_dir=str(folder), **{**usual, **quiet, **changes})


def trained(folder: Path, policy: Any, model: Any = None, resume: Any = None, session: Any = None, **changes: Any) -> Any:
    """The trainer, after its run."""
    from transformers import Trainer

    from pliant.integrations.hf import PliantTrainer

    model = gpt2() if model is None else model
    options: dict[str, Any] = {"train_dataset": texts(), "eval_dataset": texts(4)}
    if policy is None:
        trainer = Trainer(model, arguments(folder, **changes), **options)
    else:
        session = {"engine": "plain", "correct": False, **(session or {})}
        trainer = PliantTrainer(model, arguments(folder, **changes), **options, policy=policy, session=session)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # PyTorch says so on ARM processors without bfloat16
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3, "max_steps": 7},  # 12 batches: an epoch ends with a whole window
        {"gradient_accumulation_steps": 5, "max_steps": 7},  # and with a short one
        {"bf16": True, "gradient_checkpointing": True, "max_grad_norm": 0.1},
        {"eval_strategy": "steps", "eval_steps": 2, "label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"},
    ],
    ids=["plain", "accumulate", "short window", "bf16", "evaluate"],
)
def test_full_is_trainers_own_training_to_the_last_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = trained(tmp_path / "a", None, **changes)
    ours = trained(tmp_path / "b", recipes.full(), **changes)
    assert same(plain.model, ours.model)
    losses = [[line["loss"] for line in one.state.log_history if "loss" in line] for one in (plain, ours)]
    assert losses[0] == losses[1] and losses[0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_is_freezing_by_hand(accumulate: int, tmp_path: Path) -> None:
    model = gpt2()
    for name, param in model.named_parameters():
        param.requires_grad_("h.1." in name)
    plain = trained(tmp_path / "a", None, model, gradient_accumulation_steps=accumulate)
    ours = trained(tmp_path / "b", recipes.only("*h.1.*"), gradient_accumulation_steps=accumulate)
    assert same(plain.model, ours.model)
    assert all(param.requires_grad for param in ours.model.parameters()), "flags are as they were found"


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_that_was_killed_goes_on_with_the_same_selection(name: str, tmp_path: Path) -> None:
    policy = POLICIES[name]
    whole = trained(tmp_path / "whole", policy(), max_steps=10)
    trained(tmp_path / "cut", policy(), max_steps=10, save_strategy="steps", save_steps=4)
    resumed = trained(tmp_path / "again", policy(), resume=str(tmp_path / "cut" / "checkpoint-4"), max_steps=10)
    assert same(whole.model, resumed.model)
    assert whole.session.selection.units == resumed.session.selection.units
    rounds = {"only": 0}.get(name, 3)
    assert whole.session.selection.round == resumed.session.selection.round == rounds
    found = whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"]
    assert found[0].keys() == found[1].keys()


def test_checkpoints_have_the_keys_of_trainers_own(tmp_path: Path) -> None:
    from safetensors import safe_open

    def keys(policy: Any) -> set[str]:
        folder = tmp_path / ("ours" if policy is not None else "plain")
        trained(folder, policy, max_steps=2, save_strategy="steps", save_steps=2)
        with safe_open(folder / "checkpoint-2" / "model.safetensors", "pt") as file:
            return set(file.keys())

    assert keys(None) == keys(POLICIES["lisa"]())
    assert {path.name for path in (tmp_path / "ours" / "checkpoint-2").iterdir()} - {
        path.name for path in (tmp_path / "plain" / "checkpoint-2").iterdir()
    } == {"pliant.pt"}


def test_a_checkpoint_of_plain_trainer_is_taken_with_a_warning_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    trained(tmp_path / "a", None, max_steps=4, save_strategy="steps", save_steps=2)
    with pytest.warns(UserWarning, match="was written without Pliant"):
        trained(tmp_path / "b", POLICIES["lisa"](), resume=str(tmp_path / "a" / "checkpoint-2"), max_steps=4)
    (tmp_path / "a" / "checkpoint-2" / "pliant.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="does not fit this run"):
        trained(tmp_path / "c", POLICIES["lisa"](), resume=str(tmp_path / "a" / "checkpoint-2"), max_steps=4)


@pytest.mark.parametrize("engine", ["lean", "prefix", "lean+prefix"])
def test_engines_run_inside_of_trainers_steps(engine: str, tmp_path: Path) -> None:
    policy = on_steady_device(recipes.last(time=0.6))
    plain = trained(tmp_path / "a", policy, gpt2(dropout=0.0), max_steps=4)
    ours = trained(tmp_path / "b", policy, gpt2(dropout=0.0), session={"engine": engine}, max_steps=4)
    assert ours.session.engine == engine and "prefix" not in ours.session.why_not
    assert "forward" not in vars(ours.model), "the model is as it was found"
    for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_chosen_is_reported(tmp_path: Path) -> None:
    trainer = trained(tmp_path, POLICIES["pliant"](), session={"log": str(tmp_path / "run.jsonl")})
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert all(line["pliant/chosen"] >= 1 and line["pliant/step_seconds"] > 0 for line in lines)
    assert (tmp_path / "run.jsonl").read_text().count('"round"') >= 2


def test_adapters_of_peft_are_units(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    before = copy.deepcopy(model)
    policy = replace(on_steady_device(recipes.pliant(time=0.8)), units=units.blocks("*.c_attn"), head=False)
    trainer = trained(tmp_path, policy, model)
    chosen = {param for unit in trainer.session.selection.units for param in unit.params}
    assert len(trainer.session.units) == 3 and all(len(unit.parts) == 2 for unit in trainer.session.units), "A and B together"
    assert 0 < len(chosen) < 6 and all("lora" in name for name in chosen)
    for (name, was), now in zip(before.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(was, now) == (name not in chosen), name


# ---------------------------------------------------------------- wrong use


def test_wrong_use_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from pliant.integrations.hf import PliantTrainer

    def trainer(model: Any = None, **changes: Any) -> Any:
        given = {"train_dataset": texts(), "policy": recipes.full(), **changes}
        return PliantTrainer(gpt2() if model is None else model, arguments(tmp_path), **given)

    with pytest.raises(TypeError, match="is not a Policy"):
        trainer(policy="full")
    with pytest.raises(ValueError, match="wrapped by DataParallel"):
        trainer(nn.DataParallel(gpt2()))
    with pytest.raises(ValueError, match=r"TrainingArguments\(gradient_accumulation_steps="):
        trainer(session={"accumulate": 2})
    model, other = gpt2(), gpt2()
    made_before = torch.optim.SGD(other.parameters(), lr=0.1), None
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="was made before the model was"):
        trainer(model, optimizers=made_before).train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------- Accelerate


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accelerated(policy: Any, accumulate: int, frozen: Callable[[str], bool] = lambda name: False) -> nn.Module:
    from accelerate import Accelerator

    from pliant.integrations.hf import PliantAccelerate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    model = net()
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ours = policy and PliantAccelerate(accelerator, model, optimizer, classify, policy, engine="plain", norm="as-is")
    for batch in [batch for _ in range(3) for batch in loader]:
        with accelerator.accumulate(model):
            if ours:
                ours.backward(batch)
            else:
                accelerator.backward(classify(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if ours:
        ours.close()
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_of_accelerate(accumulate: int) -> None:
    def run(policy: Any, **more: Any) -> nn.Module:
        torch.manual_seed(5)
        return accelerated(policy, accumulate, **more)

    assert same(run(None), run(recipes.full()))
    assert same(run(None, frozen=lambda name: name[0] != "5"), run(recipes.only("5.*")))


def test_wrong_use_of_accelerate() -> None:
    from accelerate import Accelerator

    from pliant.integrations.hf import PliantAccelerate

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), net()
    accelerator.gradient_state._set_sync_gradients(True)  # as in a new process: accelerate has one state for all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"not one that accelerator\.prepare returned"):
        PliantAccelerate(accelerator, model, optimizer, classify, recipes.full())
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match="leave accumulate out"):
        PliantAccelerate(accelerator, model, optimizer, classify, recipes.full(), accumulate=3)
    ours = PliantAccelerate(accelerator, model, optimizer, classify, recipes.full())
    with pytest.raises(RuntimeError, match=r"accelerator\.accumulate"):
        ours.backward((torch.randn(4, 4), torch.zeros(4, dtype=torch.long)))
