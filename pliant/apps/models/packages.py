"""Models of other packages by name: timm, torchvision and transformers. None of them runs code that a file or a name brings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from pliant import __version__
from pliant.apps.optional import needed
from pliant.core.errors import first_line
from pliant.core.types import nearest

PACKAGES = ("timm", "torchvision", "hf")
_AUTO = ("AutoModelForSequenceClassification", "AutoModelForImageClassification", "AutoModelForAudioClassification")


def from_package(package: str, what: str, classes: int | None, pretrained: bool) -> nn.Module:
    """The model `package:what`, with this many classes."""
    return {"timm": _from_timm, "torchvision": _from_torchvision, "hf": _from_hf}[package](what, classes, pretrained)


def _from_timm(what: str, classes: int | None, pretrained: bool) -> nn.Module:
    timm = needed("timm", "timm", f"timm:{what}")
    known = timm.list_models()
    if what.partition(".")[0] not in known:
        raise ValueError(f"timm has no model {what!r}.{nearest(what, known)}")
    model: nn.Module = timm.create_model(what, pretrained=pretrained, **({} if classes is None else {"num_classes": classes}))
    return model


def _from_torchvision(what: str, classes: int | None, pretrained: bool) -> nn.Module:
    """Pretrained weights go wherever they fit: all but the last layer, if it has another number of classes."""
    zoo = needed("torchvision.models", "torchvision", f"torchvision:{what}")
    known = zoo.list_models()
    if what not in known:
        raise ValueError(f"torchvision has no model {what!r}.{nearest(what, known)}")
    model: nn.Module = zoo.get_model(what, weights=None, **({} if classes is None else {"num_classes": classes}))
    if pretrained:
        best = next(iter(zoo.get_model_weights(what)), None)
        if best is not None:
            here = model.state_dict()
            held: Mapping[str, Tensor] = type(best).DEFAULT.get_state_dict(progress=False, check_hash=True)
            fitting = {name: value for name, value in held.items() if name in here and here[name].shape == value.shape}
            model.load_state_dict(fitting, strict=False)
    return model


# ---------------------------------------------------------------- transformers


def _from_hf(what: str, classes: int | None, pretrained: bool) -> nn.Module:
    """A classifier of transformers, from a folder or by its name on the hub. Code that comes with a model is never run."""
    transformers = needed("transformers", "hf", f"hf:{what}")
    try:
        config = transformers.AutoConfig.from_pretrained(what, **({} if classes is None else {"num_labels": classes}))
        if getattr(config, "pad_token_id", 0) is None and getattr(config, "vocab_size", None):
            config.pad_token_id = tokenizer_of(what)[1]
        model = _of_config(transformers, config, what if pretrained else None)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"hf:{what} cannot be loaded: {first_line(error)}") from error
    stats = _pixel_stats(transformers, what)
    if stats is not None:
        model.pixel_stats = stats  # type: ignore[assignment]
    return model


def _of_config(transformers: Any, config: Any, weights: str | None) -> nn.Module:
    """The classifier of a configuration, for whatever it classifies."""
    logging = transformers.utils.logging
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # that the head is new is what was asked for
    logging.disable_progress_bar()
    try:
        for auto in (getattr(transformers, name) for name in _AUTO):
            if type(config) in auto._model_mapping:
                if weights is None:
                    made: nn.Module = auto.from_config(config)
                else:
                    made = auto.from_pretrained(weights, config=config, ignore_mismatched_sizes=True)
                return made.float()
    except ImportError as error:  # transformers imports its parts when they are used
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        raise ImportError(
            f"transformers cannot be used here: {first_line(root)}. Check its packages with pip check."
        ) from error
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
    raise ValueError(f"transformers has no classifier of the type {config.model_type!r} for text, images or sound")


def config_of(model: nn.Module) -> str | None:
    """The configuration of a model of transformers as JSON, for its weight file; None for other models."""
    config: Any = getattr(model, "config", None)
    return config.to_json_string(use_diff=True) if hasattr(config, "to_json_string") and hasattr(config, "model_type") else None


def from_config(text: str, classes: int | None, path: str) -> nn.Module:
    """The model of transformers that a weight file describes, with random weights. It can only be a class of transformers."""
    transformers = needed("transformers", "hf", f"{path!r} holds a model that")
    try:
        held = dict(json.loads(text))
        held.pop("auto_map", None)
        held.pop("transformers_version", None)
        kind = str(held.pop("model_type"))
        if classes is not None:
            held.update(num_labels=classes, id2label=None, label2id=None)
        return _of_config(transformers, transformers.AutoConfig.for_model(kind, **held), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path!r} has no configuration of a model that transformers can read: {first_line(error)}") from error


def tokenizer_of(what: str) -> tuple[str, int]:
    """The tokenizer of a model as JSON text, and the id of its padding."""
    transformers = needed("transformers", "hf", f"hf:{what}")
    try:
        found = transformers.AutoTokenizer.from_pretrained(what)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"hf:{what} has no tokenizer that can be loaded: {first_line(error)}") from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"hf:{what} has only a slow tokenizer ({type(found).__name__}). Save it with a tokenizer.json.")
    pad = next((each for each in (found.pad_token_id, found.eos_token_id) if each is not None), 0)
    return backend.to_str(), int(pad)


def _pixel_stats(transformers: Any, what: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation in the file that image models of transformers come with."""
    try:
        file = transformers.utils.cached_file(what, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
        with open(file, encoding="utf-8") as held:
            about = json.load(held)
        return tuple(map(float, about["image_mean"])), tuple(map(float, about["image_std"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def versions(name: str) -> dict[str, str]:
    """The versions of what a weight file of this model was made with."""
    package = {"hf": "transformers"}.get(name.partition(":")[0], name.partition(":")[0])
    out = {"pliant": __version__, "torch": torch.__version__}
    if package in ("timm", "torchvision", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            out[package] = metadata.version(package)
    return out


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """What a classifier returns for a batch. Those of transformers get a mask of padded tokens, and return more than logits."""
    config: Any = getattr(model, "config", None)
    if not inputs.is_floating_point() and hasattr(config, "pad_token_id"):
        known = inputs.ne(config.pad_token_id or 0)
        out = model(inputs, attention_mask=known.long())
    else:
        out = model(inputs)
    found = getattr(out, "logits", out)
    return found if isinstance(found, torch.Tensor) else out
