"""What each operation saves for backward: the one table of it.

PyTorch saves tensors without knowing which gradients are wanted: a frozen convolution saves its input, an activation its whole
output. `OPERATIONS` lists the operations for which less is enough, and what that is. The lean engine builds its rules from the
table (`engine/lean/rules`), and the prediction of bytes reads it (`lean_saves`, called by `forward_trace`).

The engine sees torch functions, and the prediction sees nodes of the backward graph, so a row names both. How a tensor is
packed is the engine's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F

# What a node saves for backward: (storage, bytes, the input for whose gradient it is saved, or None).
Saves = tuple[tuple[int, int, int | None], ...]

# Products save each factor for the gradient of the other: the inputs that need what is saved, in the order of saving.
SAVED_FOR = {"Mm": (0, 1), "Bmm": (0, 1), "Mul": (0, 1), "Addmm": (2, 1), "Baddbmm": (2, 1)}

MIN_MASK_ELEMENTS = 256  # a smaller tensor is saved whole: a mask would save nothing


class Keeps(Enum):
    """What an operation has to save."""

    INPUT_FOR_WEIGHT = "the input, and only for the gradient of the weight"
    INPUT_UNLESS_BIAS = "the input; its shape if the bias alone is trained (predicted as the input)"
    MASK = "one bit for each element"
    SHAPE = "the shape of the input"
    INDICES = "the position of each maximum"


@dataclass(frozen=True)
class Operation:
    """One operation: what it saves, the torch functions that run it, and its nodes in the backward graph.

    No nodes: the backward graph shows it as another operation, which has a row of its own, or it is predicted as PyTorch
    saves it.
    """

    keeps: Keeps
    functions: tuple[Any, ...]
    nodes: tuple[str, ...] = ()


OPERATIONS: dict[str, Operation] = {
    "convolution": Operation(
        Keeps.INPUT_FOR_WEIGHT,
        (
            *(torch.conv1d, torch.conv2d, torch.conv3d),
            *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        ),
        ("Convolution",),
    ),
    # With running statistics. With batch statistics PyTorch saves what is needed.
    "batch_norm": Operation(Keeps.INPUT_FOR_WEIGHT, (F.batch_norm,), ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")),
    "norm": Operation(
        Keeps.INPUT_UNLESS_BIAS,
        (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, torch.group_norm),
    ),
    "relu": Operation(Keeps.MASK, (F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_), ("Relu",)),
    "relu6": Operation(Keeps.MASK, (F.relu6,)),
    "hardtanh": Operation(Keeps.MASK, (F.hardtanh, F.hardtanh_), ("Hardtanh",)),
    "leaky_relu": Operation(Keeps.MASK, (F.leaky_relu, F.leaky_relu_), ("LeakyRelu",)),
    "hardsigmoid": Operation(Keeps.MASK, (F.hardsigmoid,), ("Hardsigmoid",)),
    "dropout": Operation(Keeps.MASK, (F.dropout, torch.dropout), ("NativeDropout",)),
    "average_pool": Operation(Keeps.SHAPE, (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), ("AvgPool2D", "AvgPool3D")),
    "adaptive_average_pool": Operation(
        Keeps.SHAPE,
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        ("AdaptiveAvgPool2D", "AdaptiveAvgPool3D"),
    ),
    "max_pool1d": Operation(Keeps.INDICES, (F.max_pool1d, torch.max_pool1d)),
    "max_pool2d": Operation(Keeps.INDICES, (F.max_pool2d, torch.max_pool2d), ("MaxPool2DWithIndices",)),
    "max_pool3d": Operation(Keeps.INDICES, (F.max_pool3d, torch.max_pool3d), ("MaxPool3DWithIndices",)),
}
_BY_NODE = {node: operation.keeps for operation in OPERATIONS.values() for node in operation.nodes}
MASKS = frozenset(node for node, keeps in _BY_NODE.items() if keeps is Keeps.MASK)

# Functions for which PyTorch saves what their gradients need and no more, by name.
# fmt: off
EXACT = frozenset((
    "linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "bilinear", "embedding", "multi_head_attention_forward",
    "scaled_dot_product_attention", "gelu", "silu", "hardswish", "mish", "elu", "selu", "celu", "softplus", "sigmoid",
    "logsigmoid", "tanh", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "add", "iadd", "sub", "mul", "imul", "div", "truediv",
    "pow", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "square", "where", "masked_fill", "getitem", "index_select", "gather",
    "prelu", "batch_norm", "normalize", "cosine_similarity", "norm", "clamp",
    # These save nothing.
    "isub", "neg", "mean", "sum", "cat", "stack", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t",
    "squeeze", "unsqueeze", "expand", "expand_as", "unbind", "chunk", "split", "contiguous", "to", "float", "detach", "clone",
    "dim", "size", "stride", "numel", "len", "get",  # "get" is the name of all properties: shape, dtype, T
))
# fmt: on


def op_name(node: Any) -> str:
    """The name of an autograd node without namespace, 'Backward' and version: 'ConvolutionBackward0' → 'Convolution'."""
    name: str = node.name().rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward")


def plain_saves(node: Any, saved: Sequence[tuple[int, int]]) -> Saves:
    """What a node saves under plain autograd, each tensor with the input whose gradient needs it."""
    following = node.next_functions  # a product with a number has one
    needed_by = [i for i in SAVED_FOR.get(op_name(node), ()) if i < len(following) and following[i][0] is not None]
    known = len(needed_by) == len(saved)
    return tuple((key, size, needed_by[k] if known else None) for k, (key, size) in enumerate(saved))


def lean_saves(node: Any, saved: Sequence[tuple[int, int]], outputs: int) -> Saves | None:
    """What a node saves under the lean engine, given what it saves under plain autograd; None: the same.

    `saved` holds (storage, bytes) of what would not be in memory anyway, `outputs` is the number of elements of the result.
    """
    op = op_name(node)
    keeps = _BY_NODE.get(op)
    if keeps is Keeps.INPUT_FOR_WEIGHT and not getattr(node, "_saved_training", op != "Convolution"):
        return tuple((key, size, 1) for key, size in saved)
    if keeps is Keeps.MASK and outputs >= MIN_MASK_ELEMENTS:
        return ((mask_key(node._sequence_nr()), (outputs + 7) // 8, None),)
    if keeps is Keeps.SHAPE:
        return ()
    if keeps is Keeps.INDICES and saved:
        key, size = saved[-1]  # the indices
        return ((key, outputs * (2 if size == outputs * 8 else 8), None),)  # int64 becomes int16 or less
    return None


def mask_key(sequence: int) -> int:
    """The key of the mask that stands for what a node saves: a number that no storage has."""
    return -sequence - 2
