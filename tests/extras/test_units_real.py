"""Units, heads and channels of models that others wrote. Needs transformers; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pliant import Session, measure, recipes, schedule, units
from pliant.graph.backward import Graph, read

_kept: list[torch.library.Library] = []


def _declare_torchvision() -> None:
    """torchvision's compiled part does not load beside a CPU torch: declare its operators, so that it can be imported."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except OSError:
        if not hasattr(torch.ops.torchvision, "nms"):
            _kept.append(torch.library.Library("torchvision", "FRAGMENT"))
            pairs = [
                (f"{k}", f"_{k}_backward") for k in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
            ]
            for name in ("nms", "qnms", "qroi_align", *(name for pair in pairs for name in pair)):
                _kept[0].define(f"{name}(Tensor x) -> Tensor")


_declare_torchvision()
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours

_SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
_WIDE = {**_SMALL, "intermediate_size": 64, "max_position_embeddings": 64}
_LLAMA = {**_WIDE, "num_key_value_heads": 2, "tie_word_embeddings": True}
_BART = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 3, "attention_heads": 2, "ffn_dim": 64}.items()
}
TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("transformer.h", {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}),
    "LlamaForCausalLM": ("model.layers", _LLAMA),
    "Qwen2ForCausalLM": ("model.layers", _LLAMA),
    "GemmaForCausalLM": ("model.layers", {**_LLAMA, "head_dim": 16}),
    "OPTForCausalLM": (
        "model.decoder.layers",
        {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "BloomForCausalLM": ("transformer.h", {"vocab_size": 99, "hidden_size": 32, "n_layer": 3, "n_head": 2}),
    "BartForConditionalGeneration": (
        "model.decoder.layers",
        {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64, **_BART},
    ),
    "T5ForConditionalGeneration": (
        "decoder.block",
        {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2, "decoder_start_token_id": 0},
    ),
    "BertForMaskedLM": ("bert.encoder.layer", _WIDE),
}  # a class → where its blocks are, and its settings


def build(name: str) -> tuple[Any, Any, torch.Tensor]:
    """A model with random weights, the loss that it computes itself, and a batch of tokens."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **TIED[name][1]}
    model = kind(kind.config_class(**settings)).train()
    return model, lambda m, ids: m(input_ids=ids, labels=ids).loss, torch.randint(3, 99, (4, 16))


def graph_of(name: str) -> Graph:
    return read(*build(name))


@pytest.mark.parametrize("name", TIED)
def test_the_head_of_a_tied_language_model_is_cheap(name: str) -> None:
    model, loss, ids = build(name)
    graph = read(model, loss, ids)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    assert 0 < sum(sizes[param] for param in graph.head) < 99 * 32  # not the embedding
    often = schedule.every(steps=2)
    for policy in (
        replace(recipes.pliant(macs=0.5, when=often, head_first=0), cost=measure.counted),
        recipes.green_trainer(macs=0.5, when=often),
        *(recipes.head(), recipes.lisa(layers=1, steps=2), recipes.badam(steps=2)),
    ):
        with Session(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, policy) as session:
            for _ in range(3):
                session.step(ids)
            if policy.budget.macs is not None:
                assert set(graph.head) < session.selection.params
                assert session.selection.share("macs") <= 0.5


@pytest.mark.parametrize("name", TIED)
def test_every_layer_is_a_block(name: str) -> None:
    found = {unit.name for unit in units.blocks()(graph_of(name))}
    place = TIED[name][0]
    stacks = [place, place.replace("decoder", "encoder")] if name.startswith(("Bart", "T5")) else [place]
    assert {f"{stack}.{i}" for stack in stacks for i in range(3)} <= found


def test_clip_has_the_layers_of_both_encoders_as_blocks() -> None:
    sides = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sides, "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sides, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    batch = torch.randint(3, 99, (2, 8)), torch.randn(2, 3, 32, 32)
    model = transformers.CLIPModel(config)
    graph = read(model, lambda m, b: m(input_ids=b[0], pixel_values=b[1], return_loss=True).loss, batch)
    found = {unit.name for unit in units.blocks()(graph)}
    assert {f"{side}_model.encoder.layers.{i}" for side in ("text", "vision") for i in range(2)} <= found


def test_swin_has_layers_not_stages_as_blocks() -> None:
    config = transformers.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
    model = transformers.SwinForImageClassification(config)
    graph = read(model, lambda m, x: m(x).logits.square().mean(), torch.randn(2, 3, 32, 32))
    found = {unit.name for unit in units.blocks()(graph)}
    assert {f"swin.encoder.layers.{stage}.blocks.{i}" for stage in range(2) for i in range(2)} <= found


@pytest.mark.parametrize("axis", ["out", "in"])
def test_tinytrain_finds_the_channels_of_gpt2(axis: Any) -> None:
    model, loss, ids = build("GPT2LMHeadModel")
    policy = recipes.tinytrain(memory=None, macs=0.5, axis=axis)
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, policy) as session:
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        session.step(ids)
        chosen = session.selection.params
    assert {name.rsplit(".", 2)[1] for name in chosen} & {"c_attn", "c_proj", "c_fc"}
    moved = {name for name, param in model.named_parameters() if not torch.equal(before[name], param)}
    assert moved
    assert moved <= chosen
