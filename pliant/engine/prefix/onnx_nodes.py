"""Writes calls of torch functions as nodes of an ONNX graph, one small function for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch

OPSET = 20
TYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


class Unsupported(Exception):
    """A call that cannot be written."""


class OnnxGraph:
    """Nodes and constants that were written so far. `names` holds those of the tensors that the present call reads, by id."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = []
        self.constants: dict[str, np.ndarray] = {}
        self.names: dict[int, str] = {}

    def add(self, op: str, *inputs: str, outputs: int = 1, **settings: Any) -> Any:
        """A node; returns the names of its outputs, or its one output's."""
        names = [f"{op}_{len(self.nodes)}_{i}" for i in range(outputs)]
        given = {name: value for name, value in settings.items() if value is not None}
        self.nodes.append((op, list(inputs), names, given))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, name: str = "") -> str:
        """A tensor that is part of the model."""
        name = name or f"constant_{len(self.constants)}"
        self.constants[name] = array(value) if isinstance(value, torch.Tensor) else np.asarray(value)
        return name

    def integers(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def of(self, value: Any, out: torch.Tensor) -> str:
        """The name of a tensor, or of a number as a tensor of the result's type."""
        if not isinstance(value, torch.Tensor):
            return self.constant(torch.tensor(value, dtype=out.dtype))
        return self.names[id(value)] if value.dtype == out.dtype else self.cast(self.names[id(value)], out.dtype)

    def __getitem__(self, tensor: torch.Tensor) -> str:
        return self.names[id(tensor)]

    def cast(self, name: str, dtype: torch.dtype) -> str:
        from onnx import helper

        return self.add("Cast", name, to=helper.np_dtype_to_tensor_dtype(array(torch.empty(0, dtype=dtype)).dtype))

    def write(self, name: str, out: Any, args: Any, kwargs: Any) -> Any:
        """The call of the function with this name; returns the names of its results."""
        try:
            return _NODES[name](self, out, *args, **kwargs)
        except (KeyError, TypeError):
            raise Unsupported(f"{name} is not written as ONNX with such arguments") from None


def array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype not in TYPES:
        raise Unsupported(f"values of {str(tensor.dtype).removeprefix('torch.')} are not written as ONNX")
    return tensor.detach().contiguous().numpy()


def supports(name: str) -> bool:
    """Whether calls of the function with this name can be written, with the usual arguments."""
    return name in _NODES


def _refuse(what: bool) -> None:
    if what:
        raise TypeError


# ------------------------------------------------------------ convolutions, norms, pooling


def _convolve(
    g: OnnxGraph, out: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> str:  # fmt: skip
    dims = weight.dim() - 2
    _refuse(isinstance(padding, str) or input.dim() != weight.dim())
    given = [g[one] for one in (input, weight, bias) if one is not None]
    pads = 2 * _each(padding, dims)
    return g.add("Conv", *given, strides=_each(stride, dims), pads=pads, dilations=_each(dilation, dims), group=groups)


def _each(value: Any, dims: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values * dims if len(values) == 1 else values


def _batch_norm(
    g: OnnxGraph, out: Any, input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: Any = 0.1, eps: float = 1e-5,
) -> str:  # fmt: skip
    _refuse(training or mean is None)
    scale = g.constant(torch.ones_like(mean)) if weight is None else g[weight]
    shift = g.constant(torch.zeros_like(mean)) if bias is None else g[bias]
    return g.add("BatchNormalization", g[input], scale, shift, g[mean], g[var], epsilon=eps)


def _layer_norm(
    g: OnnxGraph, out: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> str:
    scale = g.constant(torch.ones(tuple(normalized_shape))) if weight is None else g[weight]
    given = [g[input], scale, *([] if bias is None else [g[bias]])]
    return g.add("LayerNormalization", *given, axis=-len(normalized_shape), epsilon=eps)


def _max_pool(
    g: OnnxGraph, out: Any, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> str:  # fmt: skip
    _refuse(ceil_mode or return_indices or input.dim() != 4)
    size, pads = _each(kernel_size, 2), 2 * _each(padding, 2)
    return g.add(
        "MaxPool", g[input], kernel_shape=size, strides=_each(stride or size, 2), pads=pads, dilations=_each(dilation, 2)
    )


def _average_pool(
    g: OnnxGraph, out: Any, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> str:  # fmt: skip
    _refuse(ceil_mode or divisor_override is not None or input.dim() != 4)
    size, pads = _each(kernel_size, 2), 2 * _each(padding, 2)
    strides = _each(stride or size, 2)
    return g.add(
        "AveragePool", g[input], kernel_shape=size, strides=strides, pads=pads, count_include_pad=int(count_include_pad)
    )


def _adaptive_average_pool(g: OnnxGraph, out: Any, input: Any, output_size: Any) -> str:
    size = [a // b for a, b in zip(input.shape[2:], out.shape[2:], strict=True)]
    _refuse(input.dim() != 4 or any(a % b for a, b in zip(input.shape[2:], out.shape[2:], strict=True)))
    return g.add("AveragePool", g[input], kernel_shape=size, strides=size)


def _pad(g: OnnxGraph, out: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> str:
    _refuse(mode not in ("constant", "reflect"))
    before = [0] * (input.dim() - len(pad) // 2) + list(pad[::2])[::-1]
    after = [0] * (input.dim() - len(pad) // 2) + list(pad[1::2])[::-1]
    return g.add("Pad", g[input], g.integers(before + after), g.of(value or 0, out), mode=mode)


# ------------------------------------------------------------ products and attention


def _linear(g: OnnxGraph, out: Any, input: Any, weight: Any, bias: Any = None) -> str:
    if input.dim() == 2:
        return g.add("Gemm", g[input], g[weight], *([] if bias is None else [g[bias]]), transB=1)
    product = g.add("MatMul", g[input], g.add("Transpose", g[weight], perm=[1, 0]))
    return product if bias is None else g.add("Add", product, g[bias])


def _matmul(g: OnnxGraph, out: Any, one: Any, other: Any) -> str:
    return g.add("MatMul", g[one], g[other])


def _attend(
    g: OnnxGraph, out: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> str:  # fmt: skip
    _refuse(dropout_p > 0 or is_causal or enable_gqa)
    scaled = g.add("Mul", g[query], g.of(1 / math.sqrt(query.shape[-1]) if scale is None else scale, out))
    scores = g.add("MatMul", scaled, g.add("Transpose", g[key], perm=_swapped(key.dim(), -1, -2)))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = g.add("Where", g[attn_mask], scores, g.of(-math.inf, out))
    elif attn_mask is not None:
        scores = g.add("Add", scores, g.of(attn_mask, out))
    return g.add("MatMul", g.add("Softmax", scores, axis=-1), g[value])


def _softmax(g: OnnxGraph, out: Any, input: Any, dim: int, _stacklevel: int = 3, dtype: Any = None) -> str:
    return g.add("Softmax", g.of(input, out), axis=dim)


def _embed(
    g: OnnxGraph, out: Any, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> str:  # fmt: skip
    _refuse(max_norm is not None)
    return g.add("Gather", g[weight], g[input])


# ------------------------------------------------------------ element by element


def _elementwise(op: str, **settings: Any) -> Callable[..., str]:
    def write(g: OnnxGraph, out: Any, input: Any, inplace: bool = False) -> str:
        return g.add(op, g[input], **settings)

    return write


def _clip(g: OnnxGraph, out: Any, input: Any, min: Any = None, max: Any = None) -> str:
    return g.add("Clip", g[input], "" if min is None else g.of(min, out), *([] if max is None else [g.of(max, out)]))


def _hardtanh(g: OnnxGraph, out: Any, input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> str:
    return _clip(g, out, input, min_val, max_val)


def _silu(g: OnnxGraph, out: Any, input: Any, inplace: bool = False) -> str:
    return g.add("Mul", g[input], g.add("Sigmoid", g[input]))


def _hardswish(g: OnnxGraph, out: Any, input: Any, inplace: bool = False) -> str:
    return g.add("Mul", g[input], g.add("HardSigmoid", g[input], alpha=1 / 6, beta=0.5))


def _gelu(g: OnnxGraph, out: Any, input: Any, approximate: str = "none") -> str:
    return g.add("Gelu", g[input], approximate=approximate)


def _leaky_relu(g: OnnxGraph, out: Any, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> str:
    return g.add("LeakyRelu", g[input], alpha=negative_slope)


def _elu(g: OnnxGraph, out: Any, input: Any, alpha: float = 1.0, inplace: bool = False) -> str:
    return g.add("Elu", g[input], alpha=alpha)


def _binary(op: str, swapped: bool = False) -> Callable[..., str]:
    def write(g: OnnxGraph, out: Any, input: Any, other: Any, *, alpha: Any = 1) -> str:
        _refuse(alpha != 1 or (op == "Div" and not out.is_floating_point()))
        one, another = (g.of(value, out) for value in ((other, input) if swapped else (input, other)))
        return g.add(op, one, another)

    return write


def _dropout(g: OnnxGraph, out: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> str:
    _refuse(training and p > 0)
    return g[input]


def _same(g: OnnxGraph, out: Any, input: Any, *how: Any, **more: Any) -> str:
    """Another type or memory format."""
    return g.of(input, out)


# ------------------------------------------------------------ shapes


def _mean(g: OnnxGraph, out: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    dims = range(input.dim()) if dim is None or dim == () else _each(dim, 1)
    return g.add("ReduceMean", g.of(input, out), g.integers(list(dims)), keepdims=int(keepdim))


def _reshape(g: OnnxGraph, out: Any, input: Any, *how: Any, **more: Any) -> str:
    """Any function that only changes the shape. The first dimension is left open: another batch size may come."""
    _refuse(not out.dim() or not out.numel() or isinstance((*how, None)[0], torch.dtype))
    first = 0 if input.dim() and input.shape[0] == out.shape[0] else -1
    return g.add("Reshape", g[input], g.integers([first, *out.shape[1:]]))


def _permute(g: OnnxGraph, out: Any, input: Any, *dims: Any) -> str:
    wanted = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    return g.add("Transpose", g[input], perm=[dim % input.dim() for dim in wanted])


def _transpose(g: OnnxGraph, out: Any, input: Any, dim0: int, dim1: int) -> str:
    return g.add("Transpose", g[input], perm=_swapped(input.dim(), dim0, dim1))


def _swapped(dims: int, one: int, other: int) -> list[int]:
    order = list(range(dims))
    order[one], order[other] = order[other], order[one]
    return order


def _concatenate(g: OnnxGraph, out: Any, tensors: Any, dim: int = 0) -> str:
    return g.add("Concat", *[g.of(tensor, out) for tensor in tensors], axis=dim)


def _unbind(g: OnnxGraph, out: Any, input: Any, dim: int = 0) -> list[str]:
    return [g.add("Gather", g[input], g.constant(np.int64(i)), axis=dim) for i in range(input.shape[dim])]


def _split(g: OnnxGraph, out: Any, input: Any, how: Any, dim: int = 0) -> list[str]:
    sizes = g.integers([one.shape[dim] for one in out])
    names = g.add("Split", g[input], sizes, outputs=len(out), axis=dim)
    return [names] if len(out) == 1 else list(names)


def _index(g: OnnxGraph, out: Any, input: Any, index: Any) -> str:
    """Integers, slices and an ellipsis, as in x[:, 0]."""
    items = list(index) if isinstance(index, tuple) else [index]
    _refuse(any(type(item) not in (int, slice, EllipsisType) for item in items))
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (input.dim() - len(items) + 1)
    name, dim = g[input], 0
    for item in items:
        if isinstance(item, int):
            name = g.add("Gather", name, g.constant(np.int64(item)), axis=dim)
            continue
        if item != slice(None):
            _refuse(item.step is not None and item.step < 1)
            ends = item.start or 0, 2**62 if item.stop is None else item.stop, 1 if item.step is None else item.step
            start, stop, step = (g.integers([end]) for end in ends)
            name = g.add("Slice", name, start, stop, g.integers([dim]), step)
        dim += 1
    return name


_NODES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolve),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "max_pool2d": _max_pool,
    "avg_pool2d": _average_pool,
    "adaptive_avg_pool2d": _adaptive_average_pool,
    "pad": _pad,
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    "scaled_dot_product_attention": _attend,
    "softmax": _softmax,
    "embedding": _embed,
    **dict.fromkeys(("relu", "relu_"), _elementwise("Relu")),
    **dict.fromkeys(("sigmoid", "sigmoid_"), _elementwise("Sigmoid")),
    **dict.fromkeys(("tanh", "tanh_"), _elementwise("Tanh")),
    "selu": _elementwise("Selu"),
    "mish": _elementwise("Mish"),
    "hardsigmoid": _elementwise("HardSigmoid", alpha=1 / 6, beta=0.5),
    "relu6": lambda g, out, input, inplace=False: _clip(g, out, input, 0.0, 6.0),
    **dict.fromkeys(("hardtanh", "hardtanh_"), _hardtanh),
    **dict.fromkeys(("clamp", "clamp_"), _clip),
    "silu": _silu,
    "hardswish": _hardswish,
    "gelu": _gelu,
    **dict.fromkeys(("leaky_relu", "leaky_relu_"), _leaky_relu),
    **dict.fromkeys(("elu", "elu_"), _elu),
    **dict.fromkeys(("add", "add_", "__add__", "__iadd__", "__radd__"), _binary("Add")),
    **dict.fromkeys(("sub", "sub_", "__sub__", "__isub__"), _binary("Sub")),
    "__rsub__": _binary("Sub", swapped=True),
    **dict.fromkeys(("mul", "mul_", "__mul__", "__imul__", "__rmul__"), _binary("Mul")),
    **dict.fromkeys(("div", "div_", "__truediv__", "__itruediv__"), _binary("Div")),
    "dropout": _dropout,
    **dict.fromkeys(("contiguous", "to", "float", "long", "detach", "clone"), _same),
    "mean": _mean,
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape),
    "permute": _permute,
    "transpose": _transpose,
    **dict.fromkeys(("cat", "concat"), _concatenate),
    "unbind": _unbind,
    **dict.fromkeys(("chunk", "split"), _split),
    "__getitem__": _index,
}
