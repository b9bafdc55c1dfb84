"""The backbones for microcontrollers: their tables, random weights that carry a signal, and weight files there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pliant.apps import models
from pliant.apps.models import FoldedNet, load, load_folded, weights_of
from pliant.apps.models.folded import FoldedBlock

# parameters beside the classifier, features, blocks, residual blocks
SIZES = {
    "mcunet_5fps": (469_224, 160, 14, 7),
    "mobilenet_v2_035": (244_448, 112, 17, 10),
    "proxyless_03": (326_232, 96, 20, 13),
}
SMALL = ((3, 1, 16, 8), (5, 2, 24, 12), (3, 1, 36, 12))


@pytest.mark.parametrize("name", SIZES)
def test_the_tables_are_those_of_the_published_networks(name: str) -> None:
    torch.manual_seed(0)
    model = load(name, classes=7)
    assert isinstance(model, FoldedNet)
    count, features, blocks, residual = SIZES[name]
    assert sum(param.numel() for at, param in model.named_parameters() if not at.startswith("classifier")) == count
    kinds = [block for block in model.blocks if isinstance(block, FoldedBlock)]
    assert (len(kinds), sum(block.residual for block in kinds)) == (blocks, residual)
    assert not any("Norm" in type(module).__name__ for module in model.modules())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        embedded = model.embed(images)
    assert embedded.shape == (2, features) and model(images).shape == (2, 7)
    assert 0.1 < embedded.std() < 10  # random weights neither blow activations up nor let them die


def test_what_a_network_takes_is_said_by_it() -> None:
    assert FoldedNet(SMALL).pixel_stats == models.FOLDED_PIXEL_STATS == (0.5, 0.5)
    assert models.efficientnet_lite0().pixel_stats == models.PIXEL_STATS


def test_a_block_without_expansion_filters_its_input() -> None:
    first, second = FoldedBlock(16, 16, 8, 3, 1), FoldedBlock(8, 24, 8, 3, 1)
    assert first.expand is None and not first.residual
    assert second.expand is not None and second.residual
    x = torch.randn(1, 8, 6, 6)
    for part in second.project.parameters():
        nn.init.zeros_(part)
    assert torch.equal(second(x), x)


def theirs(model: FoldedNet) -> dict[str, torch.Tensor]:
    """Weights as published: int8 with a scale for each output channel, blocks in other words."""
    out = {}
    for name, value in model.state_dict().items():
        name = name.replace("expand", "pw").replace("depthwise", "dw").replace("project", "pl")
        if value.dim() == 1:
            out[name] = value.clone()
            continue
        scale = value.flatten(1).abs().amax(1) / 127
        out[f"{name}.scale"] = scale
        out[name] = (value / scale.reshape(-1, *[1] * (value.dim() - 1))).round().to(torch.int8)
    return out


def test_a_published_file_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = FoldedNet(SMALL, classes=5), tmp_path / "net.safetensors"
    save_file(theirs(model), file, {"arch": json.dumps(model.arch)})
    for found in (load_folded(file), load(str(file))):
        assert isinstance(found, FoldedNet) and found.arch == model.arch
        for name, value in found.state_dict().items():
            step = model.state_dict()[name].abs().max() / 127
            assert (value - model.state_dict()[name]).abs().max() <= step
    other = load(str(file), classes=3)
    assert isinstance(other, FoldedNet) and other.classifier.out_features == 3
    assert torch.equal(other.stem.weight, load_folded(file).stem.weight)


@pytest.mark.parametrize("make", [lambda: FoldedNet(SMALL, 5), lambda: models.efficientnet_lite0(3)], ids=["folded", "lite0"])
def test_a_file_of_ours_gives_the_same_network_back(make: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = make(), tmp_path / "net.safetensors"  # type: ignore[operator]
    file.write_bytes(weights_of(model, {"scale": "7.5"}))
    found = load(str(file))
    assert type(found) is type(model)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())
    assert models.read_weights(file)[1]["scale"] == "7.5"


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        load_folded(tmp_path / "net.safetensors")
    file = tmp_path / "net.safetensors"
    file.write_bytes(b"half of it")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_folded(file)
    model = FoldedNet(SMALL, 5)
    save_file(theirs(model), file)
    with pytest.raises(ValueError, match="no table of blocks"):
        load_folded(file)
    save_file({"stem.bias": torch.zeros(16)}, file, {"arch": json.dumps(model.arch)})
    with pytest.raises(ValueError, match="do not fit"):
        load_folded(file)
    arch = model.arch
    arch["blocks"][2][6] = False  # no residual where we have one
    save_file(theirs(model), file, {"arch": json.dumps(arch)})
    with pytest.raises(ValueError, match="another kind of network"):
        load_folded(file)


def test_no_weights_come_with_the_names() -> None:
    with pytest.raises(ValueError, match="mcunet_5fps comes without weights"):
        load("mcunet_5fps", pretrained=True)
