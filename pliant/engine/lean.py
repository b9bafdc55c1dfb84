"""Keep for backward only what this choice needs, around the user's own forward pass.

PyTorch decides what an operation keeps without asking who will want it: a frozen convolution keeps its input, an activation its
whole output. While `Lean` is on, every torch function that runs is looked up in one table, which says what to do with each
tensor that autograd is about to keep on its behalf: keep it, keep its shape alone, or keep one bit per element. The
operations and their backward kernels stay PyTorch's own, so gradients are the same to the last bit. One exception: a norm at
rest is a product with one number per channel, and its backward pass is that of the product. Clipping in place (ReLU6) makes no
copy of its input.

Functions without a rule keep what they always keep; those that are not known to need it are listed in `not_lean`.
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
from pliant.engine.channels import nothing
from pliant.engine.rest import batch_norm, trains
from pliant.engine.slices import Slices
from pliant.recorder import SMALL as _SMALL

Packed = tuple[Any, ...]  # how to give a tensor back, what is kept for it (None: nothing), and what else it takes
Pack = Callable[[torch.Tensor], Packed]
Rule = Callable[..., Pack | None]  # the arguments of a call → what to do with each tensor that is kept for it; None: keep it


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
        self._mode = _Watcher(self)

    def __enter__(self) -> Lean:
        self.around = _hooks()  # of others: what they pack is what is kept
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

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
        if lean.slices is not None:
            out = lean.slices.call(func, args, kwargs)
            if out is not None:
                return out
        kwargs = kwargs or {}
        rule, own = _RULES.get(func), _OWN.get(func)
        name = _inexact(func) if rule is None else None
        needs_nothing = rule is None and name is None and own is None
        if needs_nothing or not torch.is_grad_enabled() or _hooks() != lean.around:
            return func(*args, **kwargs)  # in a checkpoint, or in hooks of the user's, what is kept is theirs
        if own is not None:
            out = own(*args, **kwargs)
            if out is not None or rule is None:
                return func(*args, **kwargs) if out is None else out
        pack = partial(lean.count, name or "") if rule is None else rule(*args, **kwargs)
        if pack is None:
            return func(*args, **kwargs)
        _push(pack if lean.around is None else partial(_inside, lean.around, pack), _give_back)
        try:
            return func(*args, **kwargs)
        finally:
            _pop()


def _hooks() -> Any:
    """The innermost hooks on saved tensors that are on: how to pack and how to unpack, or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


@cache
def _inexact(func: Any) -> str | None:
    """The name of a function that is not known to keep no more than it needs."""
    name = getattr(func, "__name__", str(func))
    return None if name.strip("_") in _EXACT else name


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
    stride = tensor.stride()
    channels_last = len(stride) in (4, 5) and stride[1] <= stride[-1]
    return _of_shape, None, tensor.shape, stride if channels_last else None, tensor.dtype, tensor.device


def _of_shape(_: None, shape: torch.Size, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    _check_once()
    if stride is not None:  # kernels follow the layout of their input
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return nothing(shape, dtype, device)


def _of_bits(kept: torch.Tensor, like: tuple[torch.Size, Any, torch.dtype], yes: float, no: float) -> torch.Tensor:
    """One of two values for each bit."""
    _check_once()
    shape, stride, dtype = like
    return bits.unpack(kept, shape.numel(), dtype, yes, no).as_strided(shape, stride)  # as it lay in memory


def _check_once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("the lean engine keeps too little to differentiate twice (create_graph=True): use engine='plain'.")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without a gap, so that a mask made from them has the same layout."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


@cache
def _mask(low: float, high: float, nan: bool, yes: float = 1.0, no: float = 0.0) -> Pack:
    """Keep whether each element lies between two values; backward sees `yes` where it does and `no` where it does not."""

    def pack(tensor: torch.Tensor) -> Packed:
        if tensor.numel() < _SMALL or not tensor.is_floating_point() or not _is_dense(tensor):
            return _whole(tensor)
        dtype = tensor.dtype
        if not _holds(dtype, low, high, yes, no, yes - no):
            return _whole(tensor)
        like = tensor.shape, tensor.stride(), dtype
        return _of_bits, bits.within(_flat(tensor.detach()), low, high, nan), like, yes, no

    return pack


@cache
def _holds(dtype: torch.dtype, *values: float) -> bool:
    """Whether a dtype has these very values: rounded ones would compare otherwise than in the kernels."""
    return torch.tensor(values, dtype=torch.float64).to(dtype).tolist() == [*values]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


# ---------------------------------------------------------------- rules, by function


def _convolution(input: Any, weight: Any, *_: Any, **__: Any) -> Pack | None:
    """The input is for the weight's gradient alone."""
    if weight.requires_grad:
        return None
    own = weight.shape
    if len(own) == 3:  # in one dimension it is kept as one of two
        flat = torch.Size((*own[:2], 1, *own[2:]))
        return lambda tensor: _whole(tensor) if tensor.shape in (own, flat) else _shape(tensor)
    return lambda tensor: _whole(tensor) if tensor.shape == own else _shape(tensor)


def _norm(input: Any, *more: Any, **named: Any) -> Pack | None:
    """The input is for its own gradient and the scale's; the shift's needs none."""
    if trains(input) or trains(named["weight"] if "weight" in named else (*more, None, None)[1]):
        return None
    return lambda tensor: _shape(tensor) if tensor.shape == input.shape else _whole(tensor)


def _relu(*_: Any, **__: Any) -> Pack:
    return _mask(0.0, math.inf, nan=True)  # what is not a number passes its gradient on


def _leaky(*_: Any, **__: Any) -> Pack:
    return _mask(0.0, math.inf, nan=False, no=-1.0)


def _relu6(*_: Any, **__: Any) -> Pack:
    return _mask(0.0, 6.0, nan=True)


def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, *_: Any, **__: Any) -> Pack | None:
    if not -math.inf < min_val < max_val < math.inf:
        return None
    if min_val == 0 and max_val > 1:
        return _mask(min_val, max_val, nan=True)
    return _mask(min_val, max_val, nan=True, yes=(min_val + max_val) / 2, no=min_val)


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
        if tensor.numel() < _SMALL or not _is_dense(tensor) or p in (0.0, 1.0):
            return _whole(tensor)
        flat, like = _flat(tensor.detach()), (tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.dtype == torch.bool:
            return _of_bits, bits.pack(flat), like, 1.0, 0.0
        if not tensor.is_floating_point():
            return _whole(tensor)
        scale = torch.ones((), dtype=tensor.dtype, device=tensor.device).div_(1 - p)
        return _of_noise, bits.within(flat, 0.0, math.inf, nan=False), like, scale

    return pack


def _of_noise(kept: torch.Tensor, like: tuple[torch.Size, Any, torch.dtype], scale: torch.Tensor) -> torch.Tensor:
    """What dropout multiplies with on the CPU: 0, or 1 over the share that stays."""
    return _of_bits(kept, like, 1.0, 0.0).mul_(scale)


# ---------------------------------------------------------------- clipping in place


def _relu6_(input: Any, inplace: bool = False) -> Any:
    return _hardtanh_(input, 0.0, 6.0, inplace)


def _hardtanh_(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    """Clips in place, for which autograd would copy the input first; None for all else."""
    pack = _hardtanh(input, min_val, max_val) if inplace and trains(input) and not input.is_leaf else None
    if pack is None or input._is_view():
        return None
    packed = pack(input)
    return _Clipped.apply(input, packed[1], packed[2:], min_val, max_val) if packed[0] is _of_bits else None


class _Clipped(torch.autograd.Function):
    """Values between two bounds, in place; what is kept is whether each lay between them."""

    @staticmethod
    def forward(ctx: Any, input: Any, kept: torch.Tensor, more: Any, low: float, high: float) -> torch.Tensor:
        ctx.mark_dirty(input)
        ctx.save_for_backward(kept)
        ctx.more, ctx.bounds = more, (low, high)
        return F.hardtanh_(input, low, high)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mask = _of_bits(*ctx.saved_tensors, *ctx.more)
        return torch.ops.aten.hardtanh_backward(grad, mask, *ctx.bounds), None, None, None, None


_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
_CONVOLUTIONS += (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm), _norm),
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_), _relu),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky),
    F.relu6: _relu6,
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    F.hardsigmoid: _hardsigmoid,
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), _pool),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), partial(_max_pool, 1)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), partial(_max_pool, 2)),
    **dict.fromkeys((F.max_pool3d, torch.max_pool3d), partial(_max_pool, 3)),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), _pool),
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
}
# Functions that have a version of our own, for some of their calls.
_OWN: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    F.relu6: _relu6_,
    F.hardtanh: _hardtanh_,
    F.hardtanh_: partial(_hardtanh_, inplace=True),
}
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
))
# fmt: on
