"""A model in use, with optional packages: text models of transformers, ONNX files, datasets saved to disk."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import pliant
from pliant import PliantError, cli
from pliant.apps import models
from pliant.apps import trained as using
from pliant.apps.data.inputs import TextInputs
from pliant.apps.train import Options, train
from pliant.cost.peaks import Peaks

QUICK: dict[str, Any] = {"batch": 4, "epochs": 2, "device": "cpu", "validation": 0.3}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *["a", "lovely", "dreadful", "film", "number", "evening"], *map(str, range(10))]


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


needs_hf = pytest.mark.skipif(not has("transformers"), reason="pip install 'pliant[hf]'")
needs_onnx = pytest.mark.skipif(not has("onnx", "onnxscript", "onnxruntime"), reason="pip install 'pliant[onnx]'")
needs_datasets = pytest.mark.skipif(not has("datasets"), reason="pip install 'pliant[datasets]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("pliant.cost.peaks.measured", lambda *_: Peaks(4e10, 1e10, "cpu", "float32", 1))


def write_model(folder: str) -> None:
    """A tiny BERT with its tokenizer, as `save_pretrained` writes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)).save_pretrained(
        folder
    )
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def write_sentences(path: str) -> None:
    rows = [(f"{'lovely' if i % 2 else 'dreadful'} film number {i % 10}", "good" if i % 2 else "bad") for i in range(24)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def hits(run: str, name: str) -> tuple[float, torch.Tensor]:
    """The accuracy of an exported ONNX file on the run's validation split, and its outputs."""
    import onnxruntime

    trained = pliant.load(run)
    split, _ = using._own_validation(trained, run)
    out = torch.from_numpy(onnxruntime.InferenceSession(name).run(["logits"], {"input": split.inputs.numpy()})[0])
    return int((out.argmax(1) == split.labels).sum()) / len(split), out


@needs_hf
def test_a_table_of_sentences_with_a_text_model_from_a_folder() -> None:
    write_model("bert")
    write_sentences("reviews.csv")
    result = train(Options(**QUICK, data="reviews.csv", model="hf:bert", recipe="last", time=0.9, lr=3e-3, out="run"))
    assert result.options.optimizer == "adamw"
    shutil.rmtree("bert")  # the weight file holds configuration and tokenizer
    trained = pliant.load("run")
    batch = trained.inputs(["a lovely film", "dreadful"])
    assert batch.tolist()[1][:4] == [2, 6, 3, 0]
    with torch.no_grad():
        plain = trained.model(batch, attention_mask=(batch != 0).long()).logits
        assert torch.equal(plain, trained.logits(batch))
    found = using.evaluate(trained, None, "run")
    assert found.accuracy == result.best.accuracy
    shown = CliRunner().invoke(cli.app, ["predict", "run", "reviews.csv", "--format", "json"])
    assert shown.exit_code == 0 and len(json.loads(shown.stdout)["predictions"]) == 24, shown.output


@needs_hf
def test_a_model_that_is_not_there_or_has_code_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="hf:nowhere cannot be loaded"):
        models.load("hf:nowhere", 2)
    write_model("bert")
    config = json.loads(Path("bert/config.json").read_text())
    Path("bert/config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}))
    Path("bert/evil.py").write_text("from pathlib import Path\nPath('called').touch()\n")
    with pytest.raises(ValueError, match="hf:bert cannot be loaded"):
        models.load("hf:bert", 2)
    assert not Path("called").exists()


@needs_hf
def test_a_damaged_tokenizer_is_told() -> None:
    with pytest.raises(PliantError, match="cannot be read"):
        TextInputs(8, '{"model": 3}')(["a text"])


@needs_hf
@needs_onnx
def test_an_onnx_file_of_a_text_model_gives_the_accuracy_of_the_page() -> None:
    write_model("bert")
    write_sentences("reviews.csv")
    result = train(Options(**QUICK, data="reviews.csv", model="hf:bert", recipe="head", out="run"))
    shown = CliRunner().invoke(cli.app, ["export", "run", "--to", "onnx"])
    assert shown.exit_code == 0 and "differs from PyTorch by" in shown.output, shown.output
    assert hits("run", "run/model.onnx")[0] == result.best.accuracy


@needs_onnx
def test_an_onnx_file_gives_the_accuracy_of_the_page_and_says_how_its_input_is_made() -> None:
    import onnxruntime

    write_sentences("reviews.csv")
    result = train(Options(**QUICK, data="reviews.csv", out="run"))
    shown = CliRunner().invoke(cli.app, ["export", "run", "--to", "onnx", "--out", "m.onnx"])
    assert shown.exit_code == 0, shown.output
    accuracy, out = hits("run", "m.onnx")
    assert accuracy == result.best.accuracy and out.shape[1] == 2
    about = onnxruntime.InferenceSession("m.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["bad", "good"] and json.loads(about["inputs"])["tokenizer"] == "words"
    assert not list(Path().glob(".m.onnx*"))


@needs_datasets
def test_datasets_saved_to_disk_are_read_with_their_splits() -> None:
    import datasets

    texts = [f"{'lovely' if i % 2 else 'dreadful'} {i}" for i in range(12)]
    labels = datasets.ClassLabel(names=["bad", "good"])
    part = datasets.Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(12)]}).cast_column("label", labels)
    datasets.DatasetDict({"train": part, "validation": part.select(range(4))}).save_to_disk("words")
    result = train(Options(**QUICK, data="words", out="run"))
    assert result.options.model == "text_small" and pliant.load("run").classes == ("bad", "good")
    grey = io.BytesIO()
    Image.fromarray(np.full((9, 9), 99, np.uint8)).save(grey, "PNG")
    held = [{"bytes": grey.getvalue(), "path": None}] * 4
    pictures = datasets.Dataset.from_dict({"image": held, "label": ["a", "b"] * 2}).cast_column("image", datasets.Image())
    pictures.save_to_disk("pictures")
    from pliant.apps.data.prepare import Reading, prepare

    found = prepare("pictures", Reading(size=8))
    assert found.samples.shape == (4, 3, 8, 8) and found.classes == ("a", "b") and found.split is None
    Path("pictures/state.json").write_text("{")
    shown = CliRunner().invoke(cli.app, ["train", "--data", "pictures"])
    assert shown.exit_code == 1 and "cannot be read as a saved dataset" in shown.output
