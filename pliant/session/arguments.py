"""What a session is given: wrong or swapped arguments are found before anything else happens."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sized
from numbers import Integral
from typing import Any

import torch
from torch import nn

from pliant.engine.modes import parse
from pliant.engine.prefix import runtimes
from pliant.engine.prefix.feature_cache import Features
from pliant.graph.backward import trainable
from pliant.planning.policy import Policy
from pliant.runtime.batches import Pieces

_ORDER = "Session(model, optimizer, loss, policy)"
_LOSS = "def loss(model, batch): images, labels = batch; return F.cross_entropy(model(images), labels)"


def check(model: Any, optimizer: Any, loss: Any, policy: Any) -> None:
    """Refuse what cannot be a model, an optimizer, a loss and a policy, in this order."""
    given = {"model": model, "optimizer": optimizer, "loss": loss, "policy": policy}
    fits = {
        "model": isinstance(model, nn.Module),
        "optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "loss": callable(loss) and not isinstance(loss, (torch.optim.Optimizer, Policy)),
        "policy": isinstance(policy, Policy),
    }
    for name, fit in fits.items():
        if not fit:
            raise TypeError(f"{name}={_named(given[name])} is {_wanted(name)} The order is {_ORDER}.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError("SparseAdam takes sparse gradients alone, and costs are measured with dense ones: use SGD or Adagrad.")
    _check_loss(loss)


def _named(given: Any) -> str:
    """A short name of what was given."""
    return f"{type(given).__name__}(…)" if isinstance(given, (nn.Module, torch.optim.Optimizer)) else repr(given)[:80]


def _wanted(name: str) -> str:
    return {
        "model": "not a torch.nn.Module: give the network itself.",
        "optimizer": "not a torch.optim.Optimizer: give one such as torch.optim.SGD(model.parameters(), lr=0.1).",
        "loss": f"not a function of model and batch: write one, like {_LOSS}.",
        "policy": "not a Policy: give what a recipe returns, like recipes.pliant(time=0.5).",
    }[name]


def _check_loss(loss: Any) -> None:
    """A loss takes the model and a batch. PyTorch's own take outputs and labels."""
    of_torch = isinstance(loss, nn.modules.loss._Loss) or getattr(loss, "__module__", None) == "torch.nn.functional"
    name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))
    if of_torch:
        raise TypeError(f"loss={name} takes outputs and labels, and a session's loss takes the model and a batch: {_LOSS}.")
    takes: Any = ""
    try:
        takes = inspect.signature(loss)
        takes.bind(object(), object())
    except TypeError as error:
        raise TypeError(
            f"loss={name}{takes} cannot be called as loss(model, batch): {error}. Write one like {_LOSS}."
        ) from error
    except ValueError:  # a callable without a signature, as some builtins
        return


def features(cache: Any) -> Features | None:
    """A feature cache from what stands for one."""
    if isinstance(cache, (str, int)):
        try:
            return Features(cache)
        except ValueError as error:
            raise ValueError(str(error).replace("limit=", "cache=", 1)) from None
    if cache is not None and not isinstance(cache, Features):
        raise ValueError(f"cache={cache!r} is not a feature cache: give a limit like '2GB', or Features('2GB', half=True).")
    return cache


def pieces(probe: Any) -> Pieces | None:
    """What units are scored on, if it is a list of batches or like one."""
    of_tensors = isinstance(probe, tuple) and any(isinstance(one, torch.Tensor) for one in probe)
    is_one = of_tensors or isinstance(probe, (torch.Tensor, Mapping, str))
    if probe is None or (not is_one and isinstance(probe, Sized) and isinstance(probe, Iterable) and len(probe)):
        return probe  # type: ignore[return-value]
    what = "looks like one batch" if is_one else f"is {repr(probe)[:80]}"
    raise TypeError(f"probe= takes a list of batches, and what was given {what}. Write it like probe=[batch].")


def in_int8(model: nn.Module, prefix: Any, dtype: torch.dtype | None, engine: str) -> bool:
    """Whether the prefix is to run in int8; an error where it cannot."""
    if prefix is None:
        return False
    if prefix != "int8":
        raise ValueError(f"prefix={prefix!r} is not known. Use 'int8', or leave it out.")
    if dtype is not None:
        raise ValueError(f"prefix='int8' and prefix_dtype={dtype} are two types for one part of the model: give one of them.")
    if not parse(engine).may("prefix"):
        raise ValueError(
            f"prefix='int8' needs the prefix engine, and engine={engine!r} does without it. Use 'auto' or 'prefix'."
        )
    device = next(model.parameters()).device.type
    if device != "cpu":
        raise ValueError(f"prefix='int8' runs on CPUs, and this model is on {device!r}. Leave it out.")
    if not runtimes.has_int8():
        raise ImportError("prefix='int8' needs onnxruntime and onnx. Run: pip install 'pliant[ort]'", name="onnxruntime")
    return True


def check_dtype(prefix_dtype: Any) -> None:
    """Refuse what cannot be the type of the frozen layers."""
    if prefix_dtype is not None and not (isinstance(prefix_dtype, torch.dtype) and prefix_dtype.is_floating_point):
        raise ValueError(f"prefix_dtype={prefix_dtype!r} is not a floating-point torch.dtype: give one such as torch.bfloat16.")


def steps(name: str, given: Any) -> int | None:
    """What was given for a number of optimizer steps, None if it is unknown; anything else is an error."""
    if given is not None and not (isinstance(given, Integral) and int(given) > 0):
        raise ValueError(f"{name}={given!r} is not a number of optimizer steps: give a whole number above 0, or None.")
    return None if given is None else int(given)


def check_engine(engine: str) -> None:
    """Refuse an engine that is not known."""
    parse(engine)


def check_hooks(model: nn.Module) -> None:
    """Refuse a model whose parameters have hooks that a probe would run."""
    hooked = next((name for name, param in trainable(model).items() if param._post_accumulate_grad_hooks), None)
    if hooked is not None:
        raise ValueError(
            f"{hooked!r} has a post-accumulate-grad hook (an optimizer inside backward?), which a probe would run. Remove it."
        )


def check_alone(model: nn.Module, others: Iterable[nn.Module]) -> None:
    """Refuse a model that shares parameters with one that an open session trains: each would undo the other's choices."""
    mine = {id(param) for param in model.parameters()}
    for other in others:
        if other is not model and any(id(param) in mine for param in other.parameters()):
            raise ValueError(
                f"{type(model).__name__} shares parameters with a {type(other).__name__} that an open session trains. Close "
                f"that session first: session.close(), or leave its `with` block."
            )
