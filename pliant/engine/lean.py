"""Keep for backward only what this choice needs, around the user's own forward pass.

PyTorch decides what an operation keeps without asking who will want it: a frozen convolution keeps its input, an activation its
whole output. While `Lean` is on, every torch function that runs is looked up in one table, which says what to do with each
tensor that autograd is about to keep on its behalf: keep it, keep its shape alone, or keep one bit per element. The
operations and their backward kernels stay PyTorch's own, so gradients are the same to the last bit. One exception: a norm at
rest is a product with one number per channel, and its backward pass is written out as that.

Functions without a rule keep what they always keep; those that are not known to need it are listed in `not_lean`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.engine import bits
from pliant.engine.slices import Slices

Pack = Callable[[torch.Tensor], "Packed | None"]  # None: keep the tensor as it is
Rule = Callable[..., Pack | None]  # the arguments of a call → what to do with each tensor that is kept for it

_SMALL = 256  # elements: below this a mask is not worth its while


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
        self.running: Any = None  # the torch function that runs now
        self.pack: Pack | None = None  # and its rule, for this call

    def __enter__(self) -> Lean:
        self._around = _hooks()  # of others: what they pack is what is kept
        self._hooks = saved_tensors_hooks(self._keep, _give_back)
        self._mode = _Watcher(self)
        self._hooks.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._hooks.__exit__(*error)

    @property
    def is_on_top(self) -> bool:
        """Whether what is kept comes to us: inside a checkpoint, or inside hooks of the user's, it does not."""
        top = _hooks()
        return torch.is_grad_enabled() and (top is None or top[0] == self._keep)

    def _keep(self, tensor: torch.Tensor) -> Any:
        running = self.running  # before the lines below run some themselves
        if self.pack is not None:
            packed = self.pack(tensor)
            if packed is not None:
                if self._around is not None and packed.kept is not None:
                    pack, packed.unpack = self._around
                    packed.kept = pack(packed.kept)
                return packed
        elif running not in _RULES and tensor.numel() > _SMALL and not isinstance(tensor, torch.nn.Parameter):
            name = getattr(running, "__name__", str(running))
            if name.strip("_") not in _EXACT:
                self.not_lean[name] = self.not_lean.get(name, 0) + tensor.numel() * tensor.element_size()
        version = tensor._version
        tensor = tensor if tensor.grad_fn is None else tensor.detach()  # kept by its own node, it would be a cycle
        if self._around is not None:
            pack, unpack = self._around
            return partial(unpack, pack(tensor))
        return tensor, version


class _Watcher(TorchFunctionMode):
    """Tells `Lean` which torch function runs."""

    def __init__(self, lean: Lean) -> None:
        super().__init__()
        self._lean = lean

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lean = self._lean
        lean.running = func
        if lean.slices is not None:
            out = lean.slices.call(func, args, kwargs)
            if out is not None:
                return out
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is F.batch_norm and lean.is_on_top:
            out = _batch_norm(*args, **kwargs)
            if out is not None:
                return out
        pack = rule(*args, **kwargs)
        lean.pack = pack
        try:
            return func(*args, **kwargs)
        finally:
            lean.pack = None


def _hooks() -> Any:
    """The innermost hooks on saved tensors that are on: how to pack and how to unpack, or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def _give_back(packed: Any) -> torch.Tensor:
    if not isinstance(packed, tuple):
        return cast("torch.Tensor", packed())
    tensor, version = packed
    if tensor._version != version:  # autograd notices this where it keeps tensors itself
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}."
        )
    return cast("torch.Tensor", tensor)


# ---------------------------------------------------------------- what stands for a tensor


class Packed:
    """Gives the tensor back, or one that serves backward as well."""

    kept: Any = None  # a tensor, or what hooks of others made of it
    unpack: Callable[[Any], torch.Tensor] = staticmethod(lambda kept: kept)

    def __call__(self) -> torch.Tensor:
        raise NotImplementedError


class _Shape(Packed):
    """Nothing but the shape: for backward kernels that do not read the values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        channels_last = tensor.dim() in (4, 5) and tensor.stride(1) <= tensor.stride(-1)
        self._stride = tensor.stride() if channels_last else None

    def __call__(self) -> torch.Tensor:
        _check_once()
        if self._stride is not None:  # kernels follow the layout of their input
            return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)
        return _zero(self._dtype, self._device).expand(self._shape)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class _Bits(Packed):
    """One bit per element, and the two values that backward is to see in their place."""

    def __init__(self, tensor: torch.Tensor, packed: torch.Tensor, yes: float = 1.0, no: float = 0.0) -> None:
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.kept, self._yes, self._no = packed, yes, no

    def __call__(self) -> torch.Tensor:
        _check_once()
        flat = bits.unpack(self.unpack(self.kept), self._shape.numel(), self._dtype)
        if (self._yes, self._no) != (1.0, 0.0):
            flat.mul_(self._yes - self._no).add_(self._no)
        return flat.as_strided(self._shape, self._stride)  # as it lay in memory


def _check_once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("the lean engine keeps too little to differentiate twice (create_graph=True): use engine='plain'.")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without a gap, so that a mask made from them has the same layout."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _mask(low: float, high: float, nan: bool, yes: float = 1.0, no: float = 0.0) -> Pack:
    """Keep whether each element lies between two values; backward sees `yes` where it does and `no` where it does not."""

    def pack(tensor: torch.Tensor) -> Packed | None:
        tensor = tensor.detach()
        if tensor.numel() < _SMALL or not tensor.is_floating_point() or not _is_dense(tensor):
            return None
        if not _holds(tensor.dtype, low, high, yes, no, yes - no):
            return None
        return _Bits(tensor, bits.within(_flat(tensor), low, high, nan), yes, no)

    return pack


@cache
def _holds(dtype: torch.dtype, *values: float) -> bool:
    """Whether a dtype has these very values: rounded ones would compare otherwise than in the kernels."""
    return torch.tensor(values, dtype=torch.float64).to(dtype).tolist() == [*values]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


# ---------------------------------------------------------------- rules, by function


def _trains(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _convolution(input: Any, weight: Any, *_: Any, **__: Any) -> Pack | None:
    """The input is for the weight's gradient alone."""
    if _trains(weight):
        return None
    own = weight.shape, (*weight.shape[:2], 1, *weight.shape[2:])  # in one dimension it is kept as one of two
    return lambda tensor: _Shape(tensor) if tensor.shape not in own else None


def _as_it_is(*_: Any, **__: Any) -> None:
    """Everything that is kept is needed."""


def _norm(input: Any, *more: Any, **named: Any) -> Pack | None:
    """The input is for its own gradient and the scale's; the shift's needs none."""
    if _trains(input) or _trains(named["weight"] if "weight" in named else (*more, None, None)[1]):
        return None
    return lambda tensor: _Shape(tensor) if tensor.shape == input.shape else None


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


def _shape(input: Any, *_: Any, **__: Any) -> Pack:
    """Nothing of the input but its shape."""
    return lambda tensor: _Shape(tensor) if tensor.is_floating_point() else None


def _max_pool(dims: int, input: Any, *_: Any, **__: Any) -> Pack:
    """Which element was the largest, in as few bytes as it takes."""

    def pack(tensor: torch.Tensor) -> Packed | None:
        return _Shape(tensor) if tensor.is_floating_point() else _Places(tensor, input.shape[-dims:].numel())

    return pack


class _Places(Packed):
    """Whole numbers below `most` in as few bytes as it takes."""

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        small = torch.uint8 if most <= 1 << 8 else torch.int16 if most <= 1 << 15 else torch.int32
        self.kept = tensor.detach().to(small)

    def __call__(self) -> torch.Tensor:
        return self.unpack(self.kept).to(torch.int64)


def _dropout(input: Any, p: float = 0.5, *_: Any, **__: Any) -> Pack:
    """Which elements stay."""

    def pack(tensor: torch.Tensor) -> Packed | None:
        tensor = tensor.detach()
        if tensor.numel() < _SMALL or not _is_dense(tensor) or p in (0.0, 1.0):
            return None
        if tensor.dtype == torch.bool:
            return _Bits(tensor, bits.pack(_flat(tensor)))
        return _Noise(tensor, p) if tensor.is_floating_point() else None

    return pack


class _Noise(_Bits):
    """What dropout multiplies with on the CPU: 0, or 1 over the share that stays."""

    def __init__(self, tensor: torch.Tensor, p: float) -> None:
        super().__init__(tensor, bits.within(_flat(tensor), 0.0, math.inf, nan=False))
        self._scale = torch.ones((), dtype=tensor.dtype, device=tensor.device).div_(1 - p)

    def __call__(self) -> torch.Tensor:
        return super().__call__().mul_(self._scale)


# ---------------------------------------------------------------- norms at rest


class _Scaled(torch.autograd.Function):
    """A batch norm on its running statistics whose scale is not chosen: backward is one product."""

    @staticmethod
    def forward(ctx: Any, input: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        ctx.scale, ctx.bias_dtype = _scale(input.dim(), var, weight, eps), None if bias is None else bias.dtype
        return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_input = d_bias = None
        if ctx.needs_input_grad[0]:
            d_input = grad * ctx.scale if grad.dtype == ctx.scale.dtype else (grad * ctx.scale).to(grad.dtype)
        if ctx.needs_input_grad[4]:
            d_bias = grad.sum([d for d in range(grad.dim()) if d != 1], dtype=ctx.bias_dtype)
        return d_input, None, None, None, d_bias, None


def _scale(dims: int, var: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """What a norm at rest multiplies with; computed again when a statistic or the weight was written to."""
    state = dims, eps, *((id(t), t.data_ptr(), t._version) for t in (var, weight) if t is not None)
    known = _SCALES.get(var)
    if known is None or known[0] != state:
        scale = (var.detach() + eps).rsqrt_()
        scale = scale if weight is None else scale * weight.detach()
        known = _SCALES[var] = state, scale.view(1, -1, *[1] * (dims - 2))
    return known[1]


_SCALES: Any = WeakTensorKeyDictionary()


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_var is None or _trains(weight) or not (_trains(input) or _trains(bias)):
        return None
    return _Scaled.apply(input, running_mean, running_var, weight, bias, eps)


_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
_CONVOLUTIONS += (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm), _norm),
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_), _relu),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky),
    F.relu6: _relu6,
    F.batch_norm: _as_it_is,
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    F.hardsigmoid: _hardsigmoid,
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), _shape),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), partial(_max_pool, 1)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), partial(_max_pool, 2)),
    **dict.fromkeys((F.max_pool3d, torch.max_pool3d), partial(_max_pool, 3)),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), _shape),
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
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
    "prelu", "normalize", "cosine_similarity", "norm", "clamp",
))
# fmt: on
