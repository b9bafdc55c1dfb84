"""EfficientNet-Lite0: its shapes, its packaged weights, and what it says when they are missing."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant.apps import models
from pliant.apps.models import PIXEL_STATS, EfficientNetLite0, efficientnet_lite0
from pliant.apps.models.efficientnet_lite import WEIGHTS, imagenet_weights, pad_same


@pytest.fixture(scope="module")
def pretrained() -> EfficientNetLite0:
    return efficientnet_lite0(pretrained=True).eval()


def ramp(size: int = 64) -> torch.Tensor:
    """One fixed image that owes nothing to a random generator."""
    return torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size)


def test_norm_maps_pixels_to_about_minus_one_to_one() -> None:
    mean, std = PIXEL_STATS
    assert [(pixel / 255 - mean) / std for pixel in (0, 127, 255)] == pytest.approx([-127 / 128, 0, 1])


@pytest.mark.parametrize(("size", "classes"), [((32, 32), 10), ((48, 64), 7), ((65, 33), 1000)])
def test_shapes(size: tuple[int, int], classes: int) -> None:
    model = efficientnet_lite0(classes)
    images = torch.zeros(2, 3, *size)
    assert model.embed(images).shape == (2, 1280)
    assert model(images).shape == (2, classes)


def test_size_of_the_model() -> None:
    model = efficientnet_lite0()
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_652_008
    assert len(model.blocks) == 16
    assert sum(block.residual for block in model.blocks) == 9


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 33, 64])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (5, 2)])
def test_same_padding_rounds_up_and_puts_the_odd_pixel_last(size: int, kernel: int, stride: int) -> None:
    padded = pad_same(torch.ones(1, 1, size, size), kernel, stride)
    assert F.max_pool2d(padded, kernel, stride).shape[2:] == (-(-size // stride),) * 2
    filled = padded[0, 0].any(dim=1).nonzero().flatten()
    before, after = int(filled[0]), padded.shape[2] - 1 - int(filled[-1])
    assert after - before in (0, 1)


def test_a_fresh_model_keeps_its_signal() -> None:
    """Random weights neither blow activations up nor let them die, and the new classifier starts near indifference."""
    torch.manual_seed(0)
    model = efficientnet_lite0(10)
    assert 0.1 < model.embed(torch.randn(4, 3, 64, 64)).std() < 10
    assert torch.equal(model.classifier.bias, torch.zeros(10))
    assert model.classifier.weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_packaged_weights_fit_exactly(pretrained: EfficientNetLite0) -> None:
    weights = imagenet_weights()
    assert weights.keys() == pretrained.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in pretrained.state_dict().items())


def test_reading_the_weights_runs_none_of_their_package() -> None:
    imagenet_weights()
    assert WEIGHTS not in sys.modules


def test_known_logits(pretrained: EfficientNetLite0) -> None:
    with torch.no_grad():
        logits = copy.deepcopy(pretrained).double()(ramp().double())[0]
    assert logits[:5].tolist() == pytest.approx([-0.459171, -0.127023, 0.936316, 0.626069, 0.809393], abs=2e-6)
    assert logits.norm().item() == pytest.approx(22.793488, abs=2e-6)
    assert logits.argmax() == 782


def test_same_input_same_logits(pretrained: EfficientNetLite0) -> None:
    with torch.no_grad():
        assert torch.equal(pretrained(ramp()), pretrained(ramp()))
        assert torch.equal(pretrained(ramp()), efficientnet_lite0(pretrained=True).eval()(ramp()))


def test_other_classes_keep_the_backbone_and_get_a_new_classifier(pretrained: EfficientNetLite0) -> None:
    model = efficientnet_lite0(10, pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(model.embed(ramp()), pretrained.embed(ramp()))
    assert model.classifier.weight.shape == (10, 1280)
    assert torch.equal(model.classifier.bias, torch.zeros(10))


def test_every_parameter_gets_a_gradient() -> None:
    model = efficientnet_lite0(10)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'pliant\[demo\]'"):
        efficientnet_lite0(pretrained=True)


def test_package_without_its_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(ImportError, match="holds 0"):
        efficientnet_lite0(pretrained=True)


def test_a_function_that_needs_what_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("from torch import nn\ndef net(classes): return nn.Linear(2, classes)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert models.load("needy:net", classes=3).out_features == 3
    with pytest.raises(ValueError, match=r"'needy:net' needs 'classes', which is not known here"):
        models.load("needy:net")
