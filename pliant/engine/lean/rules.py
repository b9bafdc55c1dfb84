"""What each torch function has to keep for its gradients: one way to run it in place of PyTorch's own, by function."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from pliant.engine.lean import packed_tensors as kept
from pliant.engine.lean.frozen_batchnorm import batch_norm, trains
from pliant.engine.lean.packed_tensors import Pack, Packed
from pliant.engine.slices.sliced_gradients import is_cast

Lean = Any  # the engine itself, which calls what is here

Way = Callable[[Any, Any, Any, Any], Any]  # how a function runs: (engine, function, arguments, named ones) → its result
Rule = Callable[..., Pack | None]  # the arguments of a call → what to do with each tensor that is kept for it; None: keep it


# ---------------------------------------------------------------- layers and norms


def _convolution(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    """The input is for the weight's gradient alone."""
    input, weight, bias, *_ = args if not kwargs and len(args) > 2 else _given_layer(*args, **kwargs)
    if weight.requires_grad or not (input.requires_grad or (bias is not None and bias.requires_grad)):
        return func(*args, **kwargs)

    def pack(tensor: torch.Tensor) -> Packed:  # a hook lives as long as what it packed: nothing else may hang on it
        if tensor is weight:
            return kept.unchanged, tensor, tensor._version
        return kept.whole(tensor) if _is_a_weight(tensor.shape, weight.shape) else kept.shape(tensor)

    return lean.run(pack, func, args, kwargs)


def _given_layer(input: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _is_a_weight(size: torch.Size, own: torch.Size) -> bool:
    return size == own or (len(own) == 3 and size == (*own[:2], 1, own[2]))  # in one dimension it is kept as one of two


def _norm(input: Any, *more: Any, **named: Any) -> Pack | None:
    """The input is for its own gradient and the scale's; the shift's needs none."""
    more = (*more, None, None, None)
    if input.requires_grad or trains(named.get("weight", more[1])) or not trains(named.get("bias", more[2])):
        return None
    own = input.shape
    return lambda tensor: kept.shape(tensor) if tensor.shape == own else kept.whole(tensor)


def _batch_norm(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    out = None if kwargs.get("training") else batch_norm(*args, **kwargs)
    if out is None:
        return func(*args, **kwargs)
    lean.note()
    return out


# ---------------------------------------------------------------- functions of one tensor


def _leaky(*_: Any, **__: Any) -> Pack:
    return kept.mask(0.0, math.inf, nan=False, no=-1.0)


def _hardsigmoid(*_: Any, **__: Any) -> Pack:
    return kept.mask(-3.0, 3.0, nan=False, yes=0.0, no=4.0)


def _pool(*_: Any, **__: Any) -> Pack:
    """Nothing of the input but its shape."""
    return lambda tensor: kept.shape(tensor) if tensor.is_floating_point() else kept.whole(tensor)


def _max_pool(dims: int, input: Any, *_: Any, **__: Any) -> Pack:
    return kept.places(input.shape[-dims:].numel())


def _dropout(input: Any, p: float = 0.5, *_: Any, **__: Any) -> Pack:
    return kept.noise(p)


# ---------------------------------------------------------------- functions that clip


def keeps(func: Any, args: Any, tensor: torch.Tensor) -> bool:
    """Whether a layer is about to keep this tensor, its input, as it is: for the gradient of its weight."""
    if func not in _LAYERS or len(args) < 2 or args[0] is not tensor or not args[1].requires_grad:
        return False
    return not is_cast(tensor) and (func is not F.linear or tensor.is_contiguous())


def _relu(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    input = args[0] if args else kwargs["input"]
    if not input.requires_grad:
        return func(*args, **kwargs)
    if lean.around is not None:
        return lean.run(_ABOVE_0, func, args, kwargs)
    is_kept = lean.next_is_kept(is_exact=True)
    if is_kept:
        return func(*args, **kwargs)
    out, there = lean.run_clipping(func, args, kwargs)
    there += kept.unchanged, out.detach(), out._version
    lean.has_clipped(there, out, _ABOVE_0, is_kept, is_exact=True)
    return out


def _relu6(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    input, inplace = _given_6(*args, **kwargs)
    return _clip(lean, func, args, kwargs, input, 0.0, 6.0, inplace)


def _hardtanh(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    input, low, high, inplace = args if len(args) == 4 and not kwargs else _given(*args, **kwargs)
    if not -math.inf < low < high < math.inf:
        return func(*args, **kwargs)
    return _clip(lean, func, args, kwargs, input, low, high, inplace or func is F.hardtanh_)


def _given_6(input: Any, inplace: bool = False) -> tuple[Any, bool]:
    return input, inplace


def _given(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, min_val, max_val, inplace


def _clip(lean: Lean, func: Any, args: Any, kwargs: Any, input: Any, low: float, high: float, in_place: bool) -> Any:
    """Runs a function that clips: gradients pass where its result, just as its input, lies between the bounds.

    Autograd would copy the input to clip it in place, but not for a ReLU. Where bits cannot stand for the input PyTorch's own
    way of keeping it must do, since what it keeps is not the result, which may be changed later.
    """
    if not input.requires_grad:
        return func(*args, **kwargs)
    pack, is_held = _bounds(input.dtype, low, high)
    if not is_held or lean.around is not None or not kept.becomes_bits(input):
        return lean.run(pack, func, args, kwargs)
    if low == 0 and in_place and not (input.is_leaf or input._is_view()):
        out, there = lean.run_clipping(torch.relu_, (input,), {})
        there += kept.below, out.detach().clamp_max_(high), out._version, high
    else:
        out, there = lean.run_clipping(func, args, kwargs)
        there += kept.unchanged, out.detach(), out._version
    is_kept = lean.next_is_kept(is_exact=False)
    lean.has_clipped(there, out, pack, is_kept and not is_cast(out))  # or the layer keeps a copy, and this may change
    return out


@cache
def _bounds(dtype: torch.dtype, low: float, high: float) -> tuple[Pack, bool]:
    """How to keep what is clipped to these bounds, and whether this type holds them."""
    yes, no = (1.0, 0.0) if low == 0 and high > 1 else ((low + high) / 2, low)
    return kept.mask(low, high, True, yes, no), kept.holds(dtype, low, high, yes, no)


# ---------------------------------------------------------------- the table


def _by(rule: Rule, lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    pack = rule(*args, **kwargs)
    return func(*args, **kwargs) if pack is None else lean.run(pack, func, args, kwargs)


def _of_one(rule: Rule, lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    """By a rule for functions of one tensor."""
    input = args[0] if args else kwargs["input"]
    return _by(rule, lean, func, args, kwargs) if input.requires_grad else func(*args, **kwargs)


def _counted(name: str, lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    return lean.run(partial(lean.count, name), func, args, kwargs)


class _Ways(dict[Any, Way | None]):
    """How each function runs; None: as ever. Those that are neither in here nor known to be exact are counted."""

    def __missing__(self, func: Any) -> Way | None:
        name = getattr(func, "__name__", str(func))
        way = self[func] = None if name.strip("_") in _EXACT else partial(_counted, name)
        return way


_ABOVE_0 = kept.mask(0.0, math.inf, True)
_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
_CONVOLUTIONS += (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_LAYERS: frozenset[Any] = frozenset((*_CONVOLUTIONS, F.linear))
_NORMS: tuple[Any, ...] = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm)
_RULES_OF_ONE: dict[Any, Rule] = {
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky),
    F.hardsigmoid: _hardsigmoid,
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), _pool),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), partial(_max_pool, 1)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), partial(_max_pool, 2)),
    **dict.fromkeys((F.max_pool3d, torch.max_pool3d), partial(_max_pool, 3)),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), _pool),
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
}
WAYS = _Ways(
    {
        **dict.fromkeys(_CONVOLUTIONS, _convolution),
        **dict.fromkeys(_NORMS, partial(_by, _norm)),
        **{func: partial(_of_one, rule) for func, rule in _RULES_OF_ONE.items()},
        **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_), _relu),
        F.relu6: _relu6,
        **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
        F.batch_norm: _batch_norm,
    }
)
# fmt: off
# Functions for which PyTorch keeps what their gradients need and no more.
_EXACT = frozenset((
    "linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "bilinear", "embedding", "multi_head_attention_forward",
    "scaled_dot_product_attention", "gelu", "silu", "hardswish", "mish", "elu", "selu", "celu", "softplus", "sigmoid",
    "logsigmoid", "tanh", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "add", "iadd", "sub", "mul", "imul", "div", "truediv",
    "pow", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "square", "where", "masked_fill", "getitem", "index_select", "gather",
    "prelu", "batch_norm", "normalize", "cosine_similarity", "norm", "clamp",
    # These keep nothing.
    "isub", "neg", "mean", "sum", "cat", "stack", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t",
    "squeeze", "unsqueeze", "expand", "expand_as", "unbind", "chunk", "split", "contiguous", "to", "float", "detach", "clone",
    "dim", "size", "stride", "numel", "len", "get",  # "get" is what properties are called: shape, dtype, T
))
# fmt: on
