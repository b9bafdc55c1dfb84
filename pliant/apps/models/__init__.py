"""A few small backbones, and functions to load a model by name or from a weight file and to save it.

Each backbone has `embed` (images → features) and `pixel_stats`, the mean and standard deviation that normalise its input.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pliant.apps.models.efficientnet_lite import PIXEL_STATS, EfficientNetLite0, efficientnet_lite0
from pliant.apps.models.folded import (
    FOLDED_PIXEL_STATS,
    FoldedNet,
    folded,
    load_folded,
    mcunet_5fps,
    mobilenet_v2_035,
    proxyless_03,
    read_weights,
)
from pliant.apps.models.packages import PACKAGES, config_of, from_config, from_package, logits, tokenizer_of, versions
from pliant.apps.models.small import SMALL, AudioSmall, TextSmall
from pliant.core.types import nearest
from pliant.runtime.sealed import seal_tensors

__all__ = [
    "BUILT_IN",
    "FOLDED_PIXEL_STATS",
    "PIXEL_STATS",
    "SMALL",
    "AudioSmall",
    "EfficientNetLite0",
    "FoldedNet",
    "TextSmall",
    "efficientnet_lite0",
    "is_code",
    "load",
    "load_folded",
    "logits",
    "mcunet_5fps",
    "mobilenet_v2_035",
    "name_of",
    "proxyless_03",
    "read_weights",
    "tokenizer_of",
    "versions",
    "weights_of",
]

# A model and the file of its weights. What stands before the first @ is a name, never a path.
_MODEL_AND_FILE = re.compile(r"(?P<model>\w[\w.]*(:[\w.-]+)?)@(?P<file>.+\.safetensors)")

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "efficientnet_lite0": efficientnet_lite0,
    "mcunet_5fps": mcunet_5fps,
    "mobilenet_v2_035": mobilenet_v2_035,
    "proxyless_03": proxyless_03,
}
_OWN = {**BUILT_IN, **SMALL}


def load(name: str, classes: int | None = None, pretrained: bool = False) -> nn.Module:
    """A model by name: a built-in one, `timm:NAME`, `torchvision:NAME`, `hf:NAME-OR-FOLDER`, the result of
    `package.module:factory`, or a weight file (.safetensors) of a training run.

    A weight file may name a built-in model or one of these packages, but no code: for the weights of a factory's model, give
    both as `package.module:factory@FILE`. With `classes`, the last layer has that many outputs; a factory needs an argument of
    that name, or `num_classes`, for it. `pretrained` loads weights of all but factories and the two small networks.

    >>> load("efficientnet_lite0", classes=10).classifier.out_features
    10
    """
    both = _MODEL_AND_FILE.fullmatch(name)
    if both is not None:
        return _from_file(both["file"], classes, both["model"])
    if name.endswith(".safetensors"):
        return _from_file(name, classes)
    if name in _OWN:
        return _OWN[name](**({} if classes is None else {"classes": classes}), pretrained=pretrained)
    where, colon, what = name.partition(":")
    if not colon:
        raise ValueError(
            f"no model {name!r}: give one of {', '.join(_OWN)}, timm:NAME, torchvision:NAME, hf:NAME-OR-FOLDER, "
            f"package.module:factory, or a weight file (.safetensors).{nearest(name, _OWN)}"
        )
    return from_package(where, what, classes, pretrained) if where in PACKAGES else _from_factory(where, what, classes)


def is_code(name: str) -> bool:
    """Whether loading a model of this name runs code that the name chooses: a factory, which no file may name."""
    both = _MODEL_AND_FILE.fullmatch(name)
    name = name if both is None else both["model"]
    return ":" in name and name.partition(":")[0] not in PACKAGES and not name.endswith(".safetensors")


def name_of(model: str) -> str:
    """The name that a weight file of this model records: a run that began with a weight file passes its name on."""
    both = _MODEL_AND_FILE.fullmatch(model)
    if both is not None:
        return both["model"]
    return read_weights(model)[1].get("model", "") if model.endswith(".safetensors") else model


def _from_factory(where: str, what: str, classes: int | None) -> nn.Module:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if not where.startswith(str(error.name)):  # the model's own module exists, but imports one that does not
            raise
        raise ValueError(
            f"no module {error.name!r} for the model '{where}:{what}': it is neither in this folder nor on Python's path."
        ) from error
    if not hasattr(module, what):
        raise ValueError(
            f"{where!r} has no {what!r}: name a function or class without required arguments.{nearest(what, vars(module))}"
        )
    factory = getattr(module, what)
    takes = inspect.signature(factory).parameters
    given = {key: classes for key in ("classes", "num_classes") if classes is not None and key in takes}
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    for name, one in takes.items():
        if one.default is one.empty and one.kind not in kinds and name not in given:
            raise ValueError(
                f"'{where}:{what}' needs {name!r}, which is not known here. Give the argument a default: only commands that "
                f"read classes from data fill in `classes`."
            )
    model = factory(**given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"'{where}:{what}' returned {type(model).__name__}, not a torch.nn.Module.")
    return model


def _from_file(path: str, classes: int | None, name: str | None = None) -> nn.Module:
    """The model `name`, or the one that a weight file names, with the weights of the file. With another number of classes,
    tensors of another shape keep their new values."""
    saved, about = read_weights(path)
    if about.get("format") == "pliant.delta/1":
        raise ValueError(
            f"{path!r} holds only what a run changed. Load it into a model with the weights that the run started from: "
            f"model.load_state_dict(load_file(path), strict=False)."
        )
    if name is None and "arch" in about:
        return folded(about["arch"], saved, path, classes)
    given, name = name, name or about.get("model") or next((n for n, make in _OWN.items() if _fits(make, saved)), None)
    if name is None:
        raise ValueError(
            f"{path!r} does not name its model, and it fits none of {', '.join(BUILT_IN)}. Load it into its model yourself."
        )
    if given is None and name not in _OWN and (name.partition(":")[0] not in PACKAGES or "@" in name):
        raise ValueError(
            f"{path!r} is of the model {name!r}, which is not built in, and a file may not choose the code that runs. If you "
            f"trust that code, give both: {name}@{path}"
        )
    saved_classes = _classes(about, saved)
    wanted = classes if classes is not None else saved_classes
    has_config = name.startswith("hf:") and "config" in about  # then its folder or the hub need not be there
    model = from_config(about["config"], wanted, path) if has_config else load(name, wanted)
    here = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if set(here) != set(saved):
        odd = sorted(set(here) ^ set(saved))[0]
        raise ValueError(f"{path!r} does not fit {name}: only one of the two has {odd!r}. Give the weight file of that model.")
    other = [key for key in here if saved[key].shape != here[key]]
    if other and classes in (None, saved_classes):
        raise ValueError(
            f"{path!r} does not fit {name}: {other[0]!r} has shape {tuple(saved[other[0]].shape)} in the file and "
            f"{tuple(here[other[0]])} in the model."
        )
    model.load_state_dict({key: tensor for key, tensor in saved.items() if key not in other}, strict=False)
    return model


def _fits(make: Callable[..., nn.Module], saved: Mapping[str, Tensor]) -> bool:
    with torch.device("meta"):
        return set(make().state_dict()) == set(saved)


def _classes(about: Mapping[str, str], saved: Mapping[str, Tensor]) -> int | None:
    """The number of classes that a weight file names; some tensor of it has as many rows."""
    named = about.get("classes", "")
    rows = {str(tensor.shape[0]) for tensor in saved.values() if tensor.dim()}
    return int(named) if named in rows else None


def weights_of(model: nn.Module, also: Mapping[str, str] | None = None) -> bytes:
    """A weight file (safetensors) as bytes. `load` reads that of a built-in network; `load_state_dict` takes any. `also` goes
    into its metadata."""
    from safetensors.torch import save

    about = dict(also or {})
    if isinstance(model, FoldedNet):
        about["arch"] = json.dumps(model.arch)
    elif (config := config_of(model)) is not None:
        about["config"] = config
    elif isinstance(model, EfficientNetLite0):
        about |= {"model": "efficientnet_lite0", "classes": str(model.classifier.out_features)}
    weights = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    return seal_tensors(save(weights, about))
