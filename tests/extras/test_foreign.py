"""Models of transformers and peft, as their packages build them, from the table of `benchmarks/foreign.py`."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARE_HERE = all(importlib.util.find_spec(name) is not None for name in ("transformers", "peft"))
pytestmark = [
    pytest.mark.skipif(not ARE_HERE, reason="pip install 'pliant[zoo]'"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),  # one package of another
]
NAMES = (
    *("transformers/gpt2", "transformers/t5", "transformers/llama", "transformers/qwen2", "transformers/gemma2"),
    *("transformers/mixtral", "transformers/bert", "transformers/swin", "transformers/whisper", "transformers/wav2vec2"),
    *("transformers/clip", "transformers/mamba", "peft/lora-llama", "peft/input-gradients"),
)
LIMITED = ("transformers/gpt2", "transformers/qwen2", "transformers/clip", "transformers/wav2vec2", "peft/input-gradients")


@pytest.fixture(scope="module")
def foreign() -> Iterator[Any]:
    """The benchmark, and its packages, whose own warnings at import are no matter of ours."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import foreign

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        foreign.declare_torchvision()
        importlib.import_module("transformers")
        importlib.import_module("peft")
    yield foreign
    sys.path.pop(0)


@pytest.fixture
def row(foreign: Any, request: pytest.FixtureRequest) -> Any:
    """Once with plain PyTorch: what the model itself warns of comes here, and whatever comes later is ours."""
    row = foreign.ROWS[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in (row.build(), foreign.in_double(row.build())):
            foreign.plain_step(case, case.model)
    return row


@pytest.mark.parametrize("row", LIMITED, indirect=True)
def test_six_steps_within_a_memory_limit_resume_exactly_and_leave_the_model_as_it_was(foreign: Any, row: Any) -> None:
    assert not any(foreign.limited(row, "memory", {}).values())


@pytest.mark.parametrize("row", NAMES, indirect=True)
def test_the_engines_give_the_gradients_of_plain_autograd(foreign: Any, row: Any) -> None:
    foreign.agrees(row, "lean+prefix", {})


@pytest.mark.parametrize("recipe", ["green_trainer", "lisa", "badam"])
@pytest.mark.parametrize("row", ["transformers/t5"], indirect=True)
def test_recipes_find_their_units_in_an_encoder_and_a_decoder(foreign: Any, row: Any, recipe: str) -> None:
    foreign.follows(row, recipe, {})
