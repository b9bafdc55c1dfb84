"""What the lean engine saves for backward: one rule for each torch function, such as `_convolution`.

A rule runs the function in place of PyTorch: (the pass, the function, its arguments, its keyword arguments) → its result. The
table `graph/saved_tensors` lists the same operations for the prediction of memory. Custom kernels (`engine/kernels`) save their
own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from pliant.engine.lean import packed_tensors
from pliant.engine.lean.frozen_batchnorm import batch_norm, trains
from pliant.engine.lean.lean_pass import LeanPass
from pliant.engine.lean.packed_tensors import Pack, Packed
from pliant.graph.saved_tensors import EXACT, OPERATIONS

Rule = Callable[[LeanPass, Any, Any, Any], Any]
Packing = Callable[..., Pack | None]  # the arguments of a call → how to pack what is saved for it; None: as PyTorch does


# ---------------------------------------------------------------- layers and norms


def _convolution(current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    """Only the gradient of the weight needs the input. If the weight is frozen, the input's shape is saved in its place."""
    input, weight, bias, *_ = args if not kwargs and len(args) > 2 else _layer_arguments(*args, **kwargs)
    if weight.requires_grad or not (input.requires_grad or (bias is not None and bias.requires_grad)):
        return func(*args, **kwargs)

    def pack(tensor: torch.Tensor) -> Packed:  # lives as long as what it packed, so it may refer to nothing else
        if tensor is weight:
            return packed_tensors.unchanged, tensor, tensor._version
        is_weight = _is_weight_shape(tensor.shape, weight.shape)
        return packed_tensors.whole(tensor) if is_weight else packed_tensors.shape(tensor)

    return current.run(pack, func, args, kwargs)


def _layer_arguments(input: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _is_weight_shape(size: torch.Size, own: torch.Size) -> bool:
    return size == own or (len(own) == 3 and size == (*own[:2], 1, own[2]))  # conv1d saves its weight as conv2d would


def _norm(input: Any, *more: Any, **named: Any) -> Pack | None:
    """The input is needed for its own gradient and the scale's, but not for the bias's."""
    more = (*more, None, None, None)
    if input.requires_grad or trains(named.get("weight", more[1])) or not trains(named.get("bias", more[2])):
        return None
    own = input.shape
    return lambda tensor: packed_tensors.shape(tensor) if tensor.shape == own else packed_tensors.whole(tensor)


def _batch_norm(current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    out = None if kwargs.get("training") else batch_norm(*args, **kwargs)
    return func(*args, **kwargs) if out is None else out


# ---------------------------------------------------------------- functions of one tensor


def _leaky_relu(*_: Any, **__: Any) -> Pack:
    return packed_tensors.mask(0.0, math.inf, nan=False, no=-1.0)


def _hardsigmoid(*_: Any, **__: Any) -> Pack:
    return packed_tensors.mask(-3.0, 3.0, nan=False, yes=0.0, no=4.0)


def _average_pool(*_: Any, **__: Any) -> Pack:
    return lambda tensor: packed_tensors.shape(tensor) if tensor.is_floating_point() else packed_tensors.whole(tensor)


def _max_pool(dims: int, input: Any, *_: Any, **__: Any) -> Pack:
    return packed_tensors.indices(input.shape[-dims:].numel())


def _dropout(input: Any, p: float = 0.5, *_: Any, **__: Any) -> Pack:
    return packed_tensors.dropout_mask(p)


# ---------------------------------------------------------------- functions that clip


def _relu(current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    input = args[0] if args else kwargs["input"]
    if not input.requires_grad:
        return func(*args, **kwargs)
    if current.outer_hooks is not None:
        return current.run(_POSITIVE, func, args, kwargs)
    out, saved = current.run_and_fill(func, args, kwargs)
    saved += packed_tensors.unchanged, out.detach(), out._version
    current.decide_later(saved, out, _POSITIVE)
    return out


def _relu6(current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    input, inplace = _relu6_arguments(*args, **kwargs)
    return _clip(current, func, args, kwargs, input, 0.0, 6.0, inplace)


def _hardtanh(current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    input, low, high, inplace = args if len(args) == 4 and not kwargs else _hardtanh_arguments(*args, **kwargs)
    if not -math.inf < low < high < math.inf:
        return func(*args, **kwargs)
    return _clip(current, func, args, kwargs, input, low, high, inplace or func is F.hardtanh_)


def _relu6_arguments(input: Any, inplace: bool = False) -> tuple[Any, bool]:
    return input, inplace


def _hardtanh_arguments(
    input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> tuple[Any, float, float, bool]:
    return input, min_val, max_val, inplace


def _clip(current: LeanPass, func: Any, args: Any, kwargs: Any, input: Any, low: float, high: float, in_place: bool) -> Any:
    """Run a function that clips: gradients pass where its result, like its input, lies between the bounds.

    Autograd would copy the input to clip it in place, but it does not for a ReLU. Where bits cannot stand for the input,
    PyTorch saves the input itself. Saving the result instead would be wrong, since it may be changed later.
    """
    if not input.requires_grad:
        return func(*args, **kwargs)
    pack, is_held = _packing_of_bounds(input.dtype, low, high)
    if not is_held or current.outer_hooks is not None or not packed_tensors.becomes_bits(input):
        return current.run(pack, func, args, kwargs)
    if low == 0 and in_place and not (input.is_leaf or input._is_view()):
        out, saved = current.run_and_fill(torch.relu_, (input,), {})
        saved += packed_tensors.below, out.detach().clamp_max_(high), out._version, high
    else:
        out, saved = current.run_and_fill(func, args, kwargs)
        saved += packed_tensors.unchanged, out.detach(), out._version
    current.decide_later(saved, out, pack)
    return out


@cache
def _packing_of_bounds(dtype: torch.dtype, low: float, high: float) -> tuple[Pack, bool]:
    """How to pack what is clipped to these bounds, and whether this dtype can represent them."""
    yes, no = (1.0, 0.0) if low == 0 and high > 1 else ((low + high) / 2, low)
    return packed_tensors.mask(low, high, True, yes, no), packed_tensors.holds(dtype, low, high, yes, no)


_POSITIVE = packed_tensors.mask(0.0, math.inf, True)


# ---------------------------------------------------------------- the table


def _packed(packing: Packing, current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    pack = packing(*args, **kwargs)
    return func(*args, **kwargs) if pack is None else current.run(pack, func, args, kwargs)


def _packed_if_input_trains(packing: Packing, current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    input = args[0] if args else kwargs["input"]
    return _packed(packing, current, func, args, kwargs) if input.requires_grad else func(*args, **kwargs)


def _counted(name: str, current: LeanPass, func: Any, args: Any, kwargs: Any) -> Any:
    return current.run(partial(current.count, name), func, args, kwargs)


_BY_OPERATION: dict[str, Rule] = {
    "convolution": _convolution,
    "batch_norm": _batch_norm,
    "norm": partial(_packed, _norm),
    "relu": _relu,
    "relu6": _relu6,
    "hardtanh": _hardtanh,
    "leaky_relu": partial(_packed_if_input_trains, _leaky_relu),
    "hardsigmoid": partial(_packed_if_input_trains, _hardsigmoid),
    "dropout": partial(_packed_if_input_trains, _dropout),
    "average_pool": partial(_packed_if_input_trains, _average_pool),
    "adaptive_average_pool": partial(_packed_if_input_trains, _average_pool),
    "max_pool1d": partial(_packed_if_input_trains, partial(_max_pool, 1)),
    "max_pool2d": partial(_packed_if_input_trains, partial(_max_pool, 2)),
    "max_pool3d": partial(_packed_if_input_trains, partial(_max_pool, 3)),
}


class _Rules(dict[Any, Rule | None]):
    """The rule of each function; None: PyTorch runs it. A function that is neither in the table nor exact is counted."""

    def __missing__(self, func: Any) -> Rule | None:
        name = getattr(func, "__name__", str(func))
        rule = self[func] = None if name.strip("_") in EXACT else partial(_counted, name)
        return rule


RULES = _Rules({func: _BY_OPERATION[name] for name, operation in OPERATIONS.items() for func in operation.functions})
