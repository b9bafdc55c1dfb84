"""Keep for backward only what this choice needs, around the user's own forward pass.

PyTorch decides what an operation keeps without asking who will want it: a frozen convolution keeps its input, an activation its
whole output. While `Lean` is on, every torch function that runs is looked up in one table, which says what to do with each
tensor that autograd is about to keep on its behalf: keep it, keep its shape alone, or keep one bit per element. The
operations and their backward kernels stay PyTorch's own, so gradients are the same to the last bit. One exception: a norm at
rest is a product with one number per channel, and its backward pass is that of the product. Clipping in place (ReLU6) makes no
copy of its input. An activation whose output the next layer keeps whole, for its chosen weight, has no bits of its own.

Functions without a rule keep what they always keep; those that are not known to need it are listed in `not_lean`.

All this runs in Python once per function, and in small networks Python is what takes the time: the common ways are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pliant.engine import bits
from pliant.engine.channels import as_autocast, nothing
from pliant.engine.rest import batch_norm, trains
from pliant.engine.slices import Slices
from pliant.recorder import SMALL as _SMALL

Packed = tuple[Any, ...] | list[Any]  # how to give a tensor back, what is kept for it (None: nothing), and what else it takes
Pack = Callable[[torch.Tensor], Packed]
Rule = Callable[..., Pack | None]  # the arguments of a call → what to do with each tensor that is kept for it; None: keep it
_Clipped = tuple[list[Any], torch.Tensor, Pack]  # what is kept for a function, its result, and how to keep less
Way = Callable[["Lean", Any, Any, Any], Any]  # how a function runs: (engine, function, arguments, named ones) → its result


_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class Lean:
    """A context for one forward pass; backward may come later, outside of it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    >>> for name, param in model.named_parameters():
    ...     _ = param.requires_grad_(name.endswith("bias"))
    >>> with Lean() as lean:
    ...     loss = model(torch.randn(1, 3, 32, 32)).mean()
    >>> loss.backward()
    >>> lean.not_lean
    {}
    """

    def __init__(self, slices: Slices | None = None) -> None:
        """`slices` of parameters that train, if any do."""
        self.slices = slices
        self.not_lean: dict[str, int] = {}  # functions without a rule → bytes that they kept
        self.clipped: _Clipped | None = None  # by the function that ran just now, if it clips
        self._mode = _Watcher(self)

    def __enter__(self) -> Lean:
        self.around = _hooks()  # of others: what they pack is what is kept
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self.settle(None, ())

    @property
    def is_on(self) -> bool:
        """Whether what is kept is ours: in a checkpoint, or in hooks of the user's, it is theirs."""
        return torch.is_grad_enabled() and _hooks() == self.around

    def run(self, pack: Pack, func: Any, args: Any, kwargs: Any) -> Any:
        """A function, with what is kept for it packed so."""
        _push(pack if self.around is None else partial(_inside, self.around, pack), _give_back)
        try:
            return func(*args, **kwargs)
        finally:
            _pop()

    def settle(self, func: Any, args: Any) -> None:
        """Before this function runs: keep less for the one before it, which clips, unless its result is kept anyway."""
        if self.clipped is None:
            return
        (kept, result, pack), self.clipped = self.clipped, None
        if result._version == kept[2] and not (_keeps(func, args, result) and self.is_on):
            packed = pack(kept[1])
            if packed[0] is not _unchanged:
                kept[:] = packed

    def count(self, name: str, tensor: torch.Tensor) -> Packed:
        """Keep a tensor for a function without a rule, and note it."""
        if tensor.numel() > _SMALL and not isinstance(tensor, torch.nn.Parameter):
            self.not_lean[name] = self.not_lean.get(name, 0) + tensor.numel() * tensor.element_size()
        return _whole(tensor)


class _Watcher(TorchFunctionMode):
    """Tells `Lean` which torch function runs."""

    def __init__(self, lean: Lean) -> None:
        super().__init__()
        self._lean = lean

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lean = self._lean
        if lean.clipped is not None:
            lean.settle(func, args)
        if lean.slices is not None:
            out = lean.slices.call(func, args, kwargs)
            if out is not None:
                return out
        way = _WAYS[func]
        if way is None or not lean.is_on:
            return func(*args, **kwargs) if kwargs else func(*args)
        return way(lean, func, args, kwargs or {})


def _hooks() -> Any:
    """The innermost hooks on saved tensors that are on: how to pack and how to unpack, or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def _give_back(packed: Packed) -> torch.Tensor:
    return cast("torch.Tensor", packed[0](*packed[1:]))


def _inside(around: Any, pack: Pack, tensor: torch.Tensor) -> Packed:
    """Hooks of others pack what we keep."""
    give_back, kept, *more = pack(tensor)
    if kept is None:
        return give_back, kept, *more
    return _from_inside, around[1], around[0](kept), give_back, more


def _from_inside(unpack: Any, packed: Any, give_back: Any, more: list[Any]) -> torch.Tensor:
    kept = unpack(packed)
    return cast("torch.Tensor", kept if give_back is _unchanged else give_back(kept, *more))


# ---------------------------------------------------------------- what stands for a tensor


def _whole(tensor: torch.Tensor) -> Packed:
    """The tensor itself."""
    version = tensor._version
    return _unchanged, tensor if tensor.grad_fn is None else tensor.detach(), version  # kept by its own node: a cycle


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:  # autograd notices this where it keeps tensors itself
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}."
        )
    return tensor


def _shape(tensor: torch.Tensor) -> Packed:
    """Nothing but the shape: for backward kernels that do not read the values."""
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if len(stride) in (4, 5) and stride[1] <= stride[-1]:  # channels last: kernels follow the layout of their input
        return _of_layout, None, shape, stride, dtype, device
    return _of_shape, None, nothing(shape, dtype, device)


def _of_shape(_: None, empty: torch.Tensor) -> torch.Tensor:
    _check_once()
    return empty


def _of_layout(_: None, shape: torch.Size, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    _check_once()
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _of_bits(kept: torch.Tensor, shape: torch.Size, stride: Any, dtype: torch.dtype, yes: float, no: float) -> torch.Tensor:
    """One of two values for each bit."""
    _check_once()
    if stride is None:
        return bits.unpack(kept, shape, dtype, yes, no)
    return bits.unpack(kept, torch.Size((shape.numel(),)), dtype, yes, no).as_strided(shape, stride)


def _check_once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("the lean engine keeps too little to differentiate twice (create_graph=True): use engine='plain'.")


def _in_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    """A tensor's elements in the order in which they lie in memory, if without a gap, and their strides, if not as usual."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous():
        return tensor, None
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()
    return None


@cache
def _mask(low: float, high: float, nan: bool, yes: float = 1.0, no: float = 0.0) -> Pack:
    """Keep whether each element lies between two values; backward sees `yes` where it does and `no` where it does not."""

    def pack(tensor: torch.Tensor) -> Packed:
        dtype = tensor.dtype
        if tensor.numel() < _SMALL or not dtype.is_floating_point or not _holds(dtype, low, high, yes, no, yes - no):
            return _whole(tensor)
        there = _in_memory(tensor)
        if there is None:
            return _whole(tensor)
        return _of_bits, bits.within(there[0], low, high, nan), tensor.shape, there[1], dtype, yes, no

    return pack


@cache
def _holds(dtype: torch.dtype, *values: float) -> bool:
    """Whether a dtype has these very values: rounded ones would compare otherwise than in the kernels."""
    return torch.tensor(values, dtype=torch.float64).to(dtype).tolist() == [*values]


# ---------------------------------------------------------------- rules, by function


def _convolution(input: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> Pack | None:
    """The input is for the weight's gradient alone."""
    if weight.requires_grad or not (input.requires_grad or trains(bias)):
        return None
    own = weight.shape
    flat = torch.Size((*own[:2], 1, *own[2:])) if len(own) == 3 else own  # in one dimension it is kept as one of two

    def pack(tensor: torch.Tensor) -> Packed:  # a hook lives as long as what it packed: nothing else may hang on it
        return _whole(tensor) if tensor is weight or tensor.shape in (own, flat) else _shape(tensor)

    return pack


def _norm(input: Any, *more: Any, **named: Any) -> Pack | None:
    """The input is for its own gradient and the scale's; the shift's needs none."""
    more = (*more, None, None, None)
    if input.requires_grad or trains(named.get("weight", more[1])) or not trains(named.get("bias", more[2])):
        return None
    own = input.shape
    return lambda tensor: _shape(tensor) if tensor.shape == own else _whole(tensor)


def _leaky(*_: Any, **__: Any) -> Pack:
    return _mask(0.0, math.inf, nan=False, no=-1.0)


def _hardsigmoid(*_: Any, **__: Any) -> Pack:
    return _mask(-3.0, 3.0, nan=False, yes=0.0, no=4.0)


def _pool(*_: Any, **__: Any) -> Pack:
    """Nothing of the input but its shape."""
    return lambda tensor: _shape(tensor) if tensor.is_floating_point() else _whole(tensor)


def _max_pool(dims: int, input: Any, *_: Any, **__: Any) -> Pack:
    """Which element was the largest, in as few bytes as it takes."""
    most = input.shape[-dims:].numel()
    small = torch.uint8 if most <= 1 << 8 else torch.int16 if most <= 1 << 15 else torch.int32
    return lambda tensor: _shape(tensor) if tensor.is_floating_point() else (_of_places, tensor.detach().to(small))


def _of_places(kept: torch.Tensor) -> torch.Tensor:
    return kept.to(torch.int64)


def _dropout(input: Any, p: float = 0.5, *_: Any, **__: Any) -> Pack:
    """Which elements stay."""

    def pack(tensor: torch.Tensor) -> Packed:
        there = None if tensor.numel() < _SMALL or p in (0.0, 1.0) else _in_memory(tensor)
        if there is None:
            return _whole(tensor)
        inside, stride = there
        if tensor.dtype == torch.bool:
            return _of_bits, bits.pack(inside.view(-1)), tensor.shape, stride, tensor.dtype, 1.0, 0.0
        if not tensor.is_floating_point():
            return _whole(tensor)
        scale = torch.ones((), dtype=tensor.dtype, device=tensor.device).div_(1 - p)
        return _of_noise, bits.within(inside, 0.0, math.inf, nan=False), tensor.shape, stride, tensor.dtype, scale

    return pack


def _of_noise(kept: torch.Tensor, shape: torch.Size, stride: Any, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """What dropout multiplies with on the CPU: 0, or 1 over the share that stays."""
    return _of_bits(kept, shape, stride, dtype, 1.0, 0.0).mul_(scale)


# ---------------------------------------------------------------- functions that clip


def _keeps(func: Any, args: Any, tensor: torch.Tensor) -> bool:
    """Whether a layer is about to keep this tensor, its input, as it is: for the gradient of its weight."""
    if func not in _LAYERS or len(args) < 2 or args[0] is not tensor or not args[1].requires_grad:
        return False
    return as_autocast(tensor)[0] is tensor and (func is not F.linear or tensor.is_contiguous())


def _relu(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    input = args[0] if args else kwargs["input"]
    return _clip(lean, func, args, kwargs, input, _ABOVE_0)


def _relu6(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    input, inplace = _given_6(*args, **kwargs)
    pack = _mask(0.0, 6.0, True)
    if not _becomes_bits(input):
        return lean.run(pack, func, args, kwargs)
    return _clip(lean, func, args, kwargs, input, pack, 6.0 if inplace else None)


def _hardtanh(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    input, low, high, inplace = _given(*args, **kwargs)
    if not -math.inf < low < high < math.inf:
        return func(*args, **kwargs)
    yes, no = (1.0, 0.0) if low == 0 and high > 1 else ((low + high) / 2, low)
    pack = _mask(low, high, True, yes, no)
    if not _becomes_bits(input) or not _holds(input.dtype, low, high, yes, no, yes - no):
        return lean.run(pack, func, args, kwargs)
    return _clip(lean, func, args, kwargs, input, pack, high if low == 0 and (inplace or func is F.hardtanh_) else None)


def _becomes_bits(tensor: torch.Tensor) -> bool:
    """Whether bits can stand for a tensor of this size and layout. Where not, PyTorch's own way of keeping it must do, since
    what it keeps of these functions is not their result, which may be changed later."""
    return tensor.numel() >= _SMALL and tensor.dtype.is_floating_point and _in_memory(tensor) is not None


def _given_6(input: Any, inplace: bool = False) -> tuple[Any, bool]:
    return input, inplace


def _given(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, min_val, max_val, inplace


def _clip(lean: Lean, func: Any, args: Any, kwargs: Any, input: Any, pack: Pack, in_place_to: float | None = None) -> Any:
    """Runs a function that clips: gradients pass where its result, just as its input, lies between the bounds.

    Autograd would copy the input to clip it in place from 0 to a bound, `in_place_to`.
    """
    if not input.requires_grad:
        return func(*args, **kwargs)
    if lean.around is not None:
        return lean.run(pack, func, args, kwargs)
    if in_place_to is not None and (input.is_leaf or input._is_view()):
        in_place_to = None
    kept: list[Any] = []  # the result at first, and what stands for it when that is known
    _push(lambda tensor: kept, _give_back)
    try:
        out = func(*args, **kwargs) if in_place_to is None else torch.relu_(input)  # which takes no copy
    finally:
        _pop()
    if in_place_to is None:
        kept += _unchanged, out.detach(), out._version
    else:
        kept += _below, F.hardtanh_(out.detach(), 0.0, in_place_to), out._version, in_place_to
    lean.clipped = kept, out, pack
    return out


def _below(tensor: torch.Tensor, version: int, bound: float) -> torch.Tensor:
    """For a ReLU to go back by: no gradient passes where the bound above was reached either."""
    return _unchanged(tensor, version).masked_fill(tensor >= bound, 0.0)


# ---------------------------------------------------------------- the table


def _by(rule: Rule, lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    pack = rule(*args, **kwargs)
    return func(*args, **kwargs) if pack is None else lean.run(pack, func, args, kwargs)


def _of_one(rule: Rule, lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    """By a rule for functions of one tensor."""
    input = args[0] if args else kwargs["input"]
    return _by(rule, lean, func, args, kwargs) if input.requires_grad else func(*args, **kwargs)


def _batch_norm(lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    out = batch_norm(*args, **kwargs)
    return func(*args, **kwargs) if out is None else out


def _counted(name: str, lean: Lean, func: Any, args: Any, kwargs: Any) -> Any:
    return lean.run(partial(lean.count, name), func, args, kwargs)


class _Ways(dict[Any, Way | None]):
    """How each function runs; None: as ever. Those that are neither in here nor known to be exact are counted."""

    def __missing__(self, func: Any) -> Way | None:
        name = getattr(func, "__name__", str(func))
        way = self[func] = None if name.strip("_") in _EXACT else partial(_counted, name)
        return way


_ABOVE_0 = _mask(0.0, math.inf, True)
_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
_CONVOLUTIONS += (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_LAYERS: frozenset[Any] = frozenset((*_CONVOLUTIONS, F.linear))
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm), _norm),
}
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
_WAYS = _Ways(
    {
        **{func: partial(_by, rule) for func, rule in _RULES.items()},
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
