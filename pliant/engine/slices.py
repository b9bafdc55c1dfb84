"""Train a slice of a parameter: its gradient and its optimizer state are as small as the slice.

A mask on a whole gradient saves nothing. Here a leaf tensor without memory of its own stands for the slice in autograd: the
functions that use the parameter run as ever in the forward pass, and compute and keep for backward just what the slice
needs. Slices of output channels save the time of the weight gradient; those of input channels also keep the chosen
channels of the input alone. For the moment of the optimizer's step, a parameter that is the slice takes the whole one's place.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from pliant.apply import ELEMENTWISE
from pliant.types import Part


def check_elementwise(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer that is not known to treat every element by itself."""
    if type(optimizer) not in ELEMENTWISE:  # a class that inherits from one of them may do anything
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ValueError(
            f"{type(optimizer).__name__} cannot train slices of a parameter: it is not known to treat every element by itself. "
            f"Use one of {known}, or choose whole parameters: units.layers() instead of units.channels()."
        )


class Slices:
    """The parameters of which only a slice trains.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 6, bias=False)
    >>> slices = Slices({"weight": layer.weight}, [Part("weight", 0, (1, 2))])
    >>> out = slices.call(F.linear, (torch.ones(3, 4), layer.weight))
    >>> out.sum().backward()
    >>> slices.grads()["weight"].shape
    torch.Size([2, 4])
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with slices.standing_in(optimizer):
    ...     optimizer.step()
    """

    def __init__(self, params: Mapping[str, nn.Parameter], parts: Iterable[Part]) -> None:
        """Checks first and changes then: sliced parameters no longer require a gradient, and lose the one they have.

        Parts of one parameter are merged. One that is whole, or whose parts together are, is left to ordinary training.
        """
        self._slices = {name: _Slice(name, params[name], dim, index) for name, (dim, index) in _merged(params, parts).items()}
        self._by_id = {id(one.param): one for one in self._slices.values()}
        self._state: dict[str, dict[str, Any]] = {}
        for one in self._slices.values():
            one.param.requires_grad_(False)
            one.param.grad = None

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def parts(self) -> dict[str, Part]:
        """The slice that trains, by name of its parameter."""
        return {name: Part(name, one.dim, one.index.at) for name, one in self._slices.items()}

    def grads(self) -> dict[str, torch.Tensor]:
        """Gradients of the slices that have one; each as small as its slice."""
        return {name: one.leaf.grad for name, one in self._slices.items() if one.leaf.grad is not None}

    def leaves(self) -> dict[str, torch.Tensor]:
        """What stands for each slice in autograd: where gradients gather. It holds no values."""
        return {name: one.leaf for name, one in self._slices.items()}

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for one in self._slices.values():
            one.leaf.grad = None

    def forget(self) -> None:
        """Drop the gradients and the optimizer state."""
        self.zero_grad()
        self._state.clear()

    # ------------------------------------------------------------ forward

    def call(self, func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> torch.Tensor | None:
        """The result of a torch function that uses a sliced parameter; None where it uses none, or no gradient is wanted.

        A function that has no sliced gradient is refused: the parameter would silently stay as it is.
        """
        kwargs = kwargs or {}
        used = self._used((*args, *kwargs.values()))
        if used is None or not torch.is_grad_enabled():
            return None
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in (torch.conv1d, torch.conv2d, torch.conv3d):
            return self._convolution(func, *args, **kwargs)
        if func not in _HARMLESS and _is_float(func(*args, **kwargs)):
            raise ValueError(
                f"a slice of {used.name!r} was chosen, and {getattr(func, '__name__', func)!r} uses the parameter: only "
                f"convolutions and linear layers have sliced gradients. Choose it whole, or leave it out: "
                f"units.channels(exclude={used.name!r})."
            )
        return None

    def _used(self, values: Iterable[Any]) -> _Slice | None:
        for value in values:
            found = self._used(value) if isinstance(value, (list, tuple)) else self._by_id.get(id(value))
            if found is not None:
                return found
        return None

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        of_weight, of_bias = self._by_id.get(id(weight)), self._by_id.get(id(bias))
        tensors = _as_autocast(input, *map(_detached, (weight, bias), (of_weight, of_bias)))
        plan = None if of_weight is None else of_weight.plan(1)
        return _Linear.apply(*tensors, _leaf(of_weight), _leaf(of_bias), plan, of_bias)

    def _convolution(
        self,
        func: Any,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        of_weight, of_bias = self._by_id.get(id(weight)), self._by_id.get(id(bias))
        spots = weight.dim() - 2
        stride, dilation = _spread(stride, spots), _spread(dilation, spots)
        if padding == "same" and max(stride) == 1:
            totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            padding = [total // 2 for total in totals]
            if any(total % 2 for total in totals):  # one more behind than in front, as torch does it
                input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
        elif isinstance(padding, str):
            if padding != "valid":
                return func(input, weight, bias, stride, padding, dilation, groups)  # says what is wrong with it
            padding = 0
        input, *tensors = _as_autocast(input, *map(_detached, (weight, bias), (of_weight, of_bias)))
        plan = None if of_weight is None else of_weight.plan(groups)
        settings = _Settings(stride, _spread(padding, spots), dilation, groups)
        alone = input.dim() == weight.dim() - 1  # one sample without a batch
        data = input.unsqueeze(0) if alone else input
        out = _Convolution.apply(data, *tensors, _leaf(of_weight), _leaf(of_bias), plan, of_bias, func, settings)
        return out.squeeze(0) if alone else out

    # ------------------------------------------------------------ the optimizer's step

    @contextmanager
    def standing_in(self, optimizer: optim.Optimizer) -> Iterator[None]:
        """In here the optimizer holds, for each sliced parameter with a gradient, a parameter that is just the slice.

        Clipping, scaling and stepping go inside. Afterwards the groups and `optimizer.state` are as they were, whole
        parameters have the slice's new values, and the slices' own optimizer state is kept here; also if a step raises.
        """
        check_elementwise(optimizer)
        placed: list[tuple[list[Any], int, _Slice, nn.Parameter]] = []
        try:
            for group in optimizer.param_groups:
                for i, param in enumerate(group["params"]):
                    one = self._by_id.get(id(param))
                    if one is not None and one.leaf.grad is not None:
                        cut = one.cut()
                        placed.append((group["params"], i, one, cut))
                        state = self._state.get(one.name) or _begin(one, optimizer, group, cut)
                        if state:
                            optimizer.state[cut] = _placed(state, group, cut)
                        group["params"][i] = cut
            yield
        finally:
            for params, i, one, cut in placed:
                params[i] = one.param
                one.put_back_(cut)
                state = optimizer.state.pop(cut, None)
                if state:
                    self._state[one.name] = state

    def state_dict(self) -> dict[str, Any]:
        """The slices' optimizer state, in plain types and tensors."""
        return {
            name: {"dim": one.dim, "index": list(one.index.at), "state": dict(self._state[name])}
            for name, one in self._slices.items()
            if name in self._state
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same slices."""
        for name, saved in state.items():
            one = self._slices.get(name)
            if one is None or (one.dim, one.index.at) != (saved["dim"], tuple(saved["index"])):
                raise ValueError(f"this state is of another choice: the slice of {name!r} that it knows is not chosen here.")
        self._state = {name: self._slices[name].at_home(saved["state"]) for name, saved in state.items()}

    def carry_over(self, old: Slices, optimizer: optim.Optimizer) -> None:
        """Take on the optimizer state of an earlier choice: that of channels which stay; those that are new start afresh.

        What counts steps goes on counting. A parameter that was cut along another dimension starts afresh.
        """
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for name, one in self._slices.items():
            before, state = old._slices.get(name), old._state.get(name)
            if before is None or state is None or before.dim != one.dim or id(one.param) not in groups:
                continue
            stay = sorted(set(one.index.at) & set(before.index.at))
            here, there = _Index(map(one.index.at.index, stay)), _Index(map(before.index.at.index, stay))
            mine: dict[str, Any] = {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == before.leaf.shape:
                    start = float(groups[id(one.param)][_START[key]]) if key in _START else 0.0
                    mine[key] = value.new_full(one.leaf.shape, start)
                    here.put_(mine[key], one.dim, there.take(value, one.dim))
                else:
                    mine[key] = value.clone() if isinstance(value, torch.Tensor) else value
            self._state[name] = mine


def _merged(params: Mapping[str, nn.Parameter], parts: Iterable[Part]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The one slice of each parameter that its parts make together; parameters that train whole are left out."""
    found: dict[str, dict[int, set[int]]] = {}
    whole = set()
    for part in parts:
        if part.param not in params:
            raise ValueError(f"cannot choose a slice of {part.param!r}: there is no trainable parameter of that name.")
        if part.dim is None or part.index is None:
            whole.add(part.param)
            continue
        shape = params[part.param].shape
        if not 0 <= part.dim < min(len(shape), 2):
            raise ValueError(
                f"cannot slice {part.param!r} of shape {tuple(shape)} along dim {part.dim}: only 0 and 1 are channels."
            )
        if any(not 0 <= i < shape[part.dim] for i in part.index):
            raise ValueError(f"a slice of {part.param!r} of shape {tuple(shape)} goes beyond its dim {part.dim}: {part.index}.")
        found.setdefault(part.param, {}).setdefault(part.dim, set()).update(part.index)
    out = {}
    for name, dims in found.items():
        if name in whole or any(len(index) == params[name].shape[dim] for dim, index in dims.items()):
            continue
        if len(dims) > 1:
            raise ValueError(f"{name!r} is sliced along dims {sorted(dims)}: a parameter has slices along one dim at a time.")
        if not params[name].is_floating_point():
            raise ValueError(f"cannot slice {name!r}, which is {params[name].dtype}: choose it whole.")
        ((dim, index),) = dims.items()
        if index:
            out[name] = dim, tuple(sorted(index))
    return out


class _Index:
    """Positions along a dimension, sorted. One run of neighbours is seen without a copy."""

    def __init__(self, at: Iterable[int]) -> None:
        self.at = tuple(at)
        self.is_run = bool(self.at) and self.at[-1] - self.at[0] == len(self.at) - 1
        self._on: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.at)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What stands at these positions."""
        if self.is_run:
            return tensor.narrow(dim, self.at[0], len(self.at))
        return tensor.index_select(dim, self._tensor(tensor.device))

    def put_(self, tensor: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Write to these positions."""
        if self.is_run:
            tensor.narrow(dim, self.at[0], len(self.at)).copy_(values)
        elif self.at:
            tensor.index_copy_(dim, self._tensor(tensor.device), values)

    def _tensor(self, device: torch.device) -> torch.Tensor:
        if device not in self._on:
            self._on[device] = torch.tensor(self.at, dtype=torch.int64, device=device)
        return self._on[device]


@dataclass(frozen=True)
class _Plan:
    """How the gradient of a weight's slice is computed: a layer of `groups`, from some inputs to some outputs.

    None means all of them. `pick` are the rows of the result that were asked for, where not all of them were.
    """

    inputs: _Index | None
    outputs: _Index | None
    groups: int
    shape: tuple[int, ...]
    pick: _Index | None = None

    def keep(self, input: torch.Tensor, dim: int) -> torch.Tensor:
        """What is to be kept of the input: a copy of some channels, so that the others can go."""
        if self.inputs is None:
            return input
        some = self.inputs.take(input, dim)
        last = torch.channels_last if _is_channels_last(input) else torch.contiguous_format
        return some.clone(memory_format=last) if self.inputs.is_run else some.contiguous(memory_format=last)

    def of(self, grad: torch.Tensor, dim: int) -> torch.Tensor:
        """The gradient of the outputs in question."""
        return grad if self.outputs is None else self.outputs.take(grad, dim)


class _Slice:
    """One parameter's slice. `leaf` stands for it in autograd: a single zero, seen as a tensor of the slice's shape."""

    def __init__(self, name: str, param: nn.Parameter, dim: int, index: tuple[int, ...]) -> None:
        self.name, self.param, self.dim, self.index = name, param, dim, _Index(index)
        shape = list(param.shape)
        shape[dim] = len(index)
        self.leaf = torch.zeros((), dtype=param.dtype, device=param.device).expand(shape).requires_grad_()
        self._plans: dict[int, _Plan] = {}

    def plan(self, groups: int) -> _Plan:
        """How a layer of so many groups computes this slice of its weight's gradient."""
        if groups not in self._plans:
            self._plans[groups] = self._inputs(groups) if self.dim == 1 else self._outputs(groups)
        return self._plans[groups]

    def _inputs(self, groups: int) -> _Plan:
        """The chosen channels of each group's input."""
        per = self.param.shape[1]
        inputs = _Index(g * per + i for g in range(groups) for i in self.index.at)
        return _Plan(inputs, None, groups, tuple(self.leaf.shape))

    def _outputs(self, groups: int) -> _Plan:
        """The groups with a chosen output: their inputs, and as many outputs of each, or all where these are not the same."""
        out, per_in = self.param.shape[:2]
        per = out // groups
        counts = Counter(i // per for i in self.index.at)
        inputs = None if len(counts) == groups else _Index(g * per_in + i for g in counts for i in range(per_in))
        if len(set(counts.values())) == 1:
            return _Plan(inputs, self.index, len(counts), tuple(self.leaf.shape))
        rows = [g * per + i for g in counts for i in range(per)]
        shape = (len(rows), *self.leaf.shape[1:])
        return _Plan(inputs, _Index(rows), len(counts), shape, _Index(map(rows.index, self.index.at)))

    def cut(self) -> nn.Parameter:
        """A parameter that is the slice, with its gradient: in the whole one's memory if it lies there in one piece."""
        values = self.index.take(self.param.detach(), self.dim)
        if not values.is_contiguous():
            values = values.contiguous()
        cut = nn.Parameter(values)
        cut.grad = self.leaf.grad
        return cut

    def put_back_(self, cut: nn.Parameter) -> None:
        """Write the slice's values into the whole parameter."""
        if cut.untyped_storage().data_ptr() != self.param.untyped_storage().data_ptr():
            with torch.no_grad():
                self.index.put_(self.param, self.dim, cut)

    def at_home(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of an optimizer state of this slice, where the parameter is."""
        return {key: self._home(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def _home(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.param.device, copy=True) if value.shape == self.leaf.shape else value.clone()


# ---------------------------------------------------------------- optimizer state

_START = {
    "step_size": "lr",
    "sum": "initial_accumulator_value",
}  # what does not start from zero → the setting that it starts from


def _begin(one: _Slice, optimizer: optim.Optimizer, group: Mapping[str, Any], cut: nn.Parameter) -> dict[str, Any]:
    """The state that a slice starts from: its part of the whole parameter's, where the optimizer has that."""
    whole = optimizer.state.get(one.param)
    if whole:
        same = one.param.shape
        state = {k: one.index.take(v, one.dim) if torch.is_tensor(v) and v.shape == same else v for k, v in whole.items()}
        return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
    if isinstance(optimizer, optim.Adagrad):  # makes its state when it is built, not at the first step
        settings = {key: value for key, value in group.items() if key in ("initial_accumulator_value", "fused")}
        return dict(optim.Adagrad([cut], **settings).state[cut])
    return {}


def _placed(state: dict[str, Any], group: Mapping[str, Any], cut: nn.Parameter) -> dict[str, Any]:
    """Some optimizers want everything on the parameter's device."""
    if not (group.get("capturable") or group.get("fused")):
        return state
    return {key: value.to(cut.device) if torch.is_tensor(value) else value for key, value in state.items()}


# ---------------------------------------------------------------- functions


@dataclass(frozen=True)
class _Settings:
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


class _Convolution(torch.autograd.Function):
    """A convolution whose weight or bias is sliced; the other may be whole."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_leaf: torch.Tensor | None,
        bias_leaf: torch.Tensor | None,
        plan: _Plan | None,
        of_bias: _Slice | None,
        func: Callable[..., torch.Tensor],
        at: _Settings,
    ) -> torch.Tensor:
        ctx.plan, ctx.of_bias, ctx.at, ctx.dtype = plan, of_bias, at, None if weight_leaf is None else weight_leaf.dtype
        ctx.input_shape, ctx.weight_shape = input.shape, weight.shape
        kept = input if ctx.needs_input_grad[1] else None if plan is None else plan.keep(input, 1)
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None)
        return func(input, weight, bias, at.stride, at.padding, at.dilation, at.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        d_input = d_weight = d_bias = d_weight_leaf = d_bias_leaf = None
        wants = tuple(ctx.needs_input_grad[:3])
        if any(wants):
            data = kept if wants[1] else _nothing(grad, ctx.input_shape)
            kernel = _in_layout_of(grad, weight) if wants[0] else _nothing(grad, ctx.weight_shape)
            d_input, d_weight, d_bias = _backward(grad, data, kernel, ctx.at, ctx.at.groups, wants)
        if ctx.plan is not None:
            plan: _Plan = ctx.plan
            d_weight_leaf = _of_weight(plan.of(grad, 1), kept, plan, ctx.at)
            if plan.pick is not None:
                d_weight_leaf = plan.pick.take(d_weight_leaf, 0)
            d_weight_leaf = d_weight_leaf.to(ctx.dtype)
        if ctx.of_bias is not None:
            axes = [dim for dim in range(grad.dim()) if dim != 1]
            d_bias_leaf = ctx.of_bias.index.take(grad, 1).sum(axes).to(ctx.of_bias.leaf.dtype)
        return d_input, d_weight, d_bias, d_weight_leaf, d_bias_leaf, None, None, None, None


def _backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, at: _Settings, groups: int, wants: tuple[bool, ...]
) -> tuple[torch.Tensor, ...]:
    sizes = [weight.shape[0]] if wants[2] else None
    none = [0] * len(at.stride)
    return torch.ops.aten.convolution_backward(
        grad, input, weight, sizes, at.stride, at.padding, at.dilation, False, none, groups, wants
    )


# On ARM processors the kernels for a weight's gradient take longer for few outputs than for many.
_WIDE_KERNELS_BY_PRODUCTS = platform.machine() in ("aarch64", "arm64")


def _of_weight(grad: torch.Tensor, input: torch.Tensor, plan: _Plan, at: _Settings) -> torch.Tensor:
    """The gradient of what the plan says of a weight, in the way that is the faster one here."""
    exact = grad.device.type == "cpu" and grad.dtype in (torch.float32, torch.float64)
    if exact and plan.groups == 1 and (math.prod(plan.shape[2:]) == 1 or (_WIDE_KERNELS_BY_PRODUCTS and plan.outputs)):
        return _by_products(grad, input, plan.shape, at)
    return _backward(grad, input, _nothing(grad, plan.shape), at, plan.groups, (False, True, False))[1]


def _by_products(grad: torch.Tensor, input: torch.Tensor, shape: tuple[int, ...], at: _Settings) -> torch.Tensor:
    """The same by one product of matrices for each place of the kernel."""
    out = grad.new_zeros(shape)
    places = out.movedim((0, 1), (-2, -1))
    is_last = _is_channels_last(input)
    for place in itertools.product(*map(range, shape[2:])):
        here, there = [slice(None)] * 2, [slice(None)] * 2
        for spot, (i, stride, padding, dilation) in enumerate(zip(place, at.stride, at.padding, at.dilation, strict=True), 2):
            first = i * dilation - padding  # where the first output finds its input
            low = max(0, -(first // stride))
            high = max(low, min(grad.shape[spot], (input.shape[spot] - 1 - first) // stride + 1))
            here.append(slice(low, high))
            there.append(slice(first + low * stride, max(first + (high - 1) * stride + 1, 0), stride))
        some, data = grad[tuple(here)], input[tuple(there)]
        if not some.numel():  # nothing but padding lies there
            continue
        if is_last:
            rows, values = (tensor.movedim(1, -1).reshape(-1, tensor.shape[1]) for tensor in (some, data))
            places[place] = rows.t() @ values
        else:
            places[place] = torch.bmm(some.flatten(2), data.flatten(2).transpose(1, 2)).sum(0)
    return out


class _Linear(torch.autograd.Function):
    """A linear layer whose weight or bias is sliced; the other may be whole."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_leaf: torch.Tensor | None,
        bias_leaf: torch.Tensor | None,
        plan: _Plan | None,
        of_bias: _Slice | None,
    ) -> torch.Tensor:
        ctx.plan, ctx.of_bias, ctx.dtype = plan, of_bias, None if weight_leaf is None else weight_leaf.dtype
        kept = input if ctx.needs_input_grad[1] else None if plan is None else plan.keep(input, -1)
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        d_input = d_weight = d_bias = d_weight_leaf = d_bias_leaf = None
        rows = grad.reshape(-1, grad.shape[-1])
        data: Any = None if kept is None else kept.reshape(-1, kept.shape[-1])
        if ctx.needs_input_grad[0]:
            d_input = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            d_weight = rows.t() @ data
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        if ctx.plan is not None:
            d_weight_leaf = (ctx.plan.of(rows, 1).t() @ data).to(ctx.dtype)
        if ctx.of_bias is not None:
            d_bias_leaf = ctx.of_bias.index.take(rows, 1).sum(0).to(ctx.of_bias.leaf.dtype)
        return d_input, d_weight, d_bias, d_weight_leaf, d_bias_leaf, None, None


def _leaf(one: _Slice | None) -> torch.Tensor | None:
    return None if one is None else one.leaf


def _detached(tensor: torch.Tensor | None, one: _Slice | None) -> torch.Tensor | None:
    """A sliced parameter takes part as it is, and its leaf takes the gradient."""
    return tensor if tensor is None or one is None else tensor.detach()


def _as_autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the type that autocast would give them."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _nothing(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without memory of its own, for kernels that do not read the values."""
    return _zero(like.dtype, like.device).expand(shape)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _in_layout_of(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Kernels follow the layout of the input or of the weight; where the input is but a shape, the weight has to tell."""
    if not _is_channels_last(grad) or _is_channels_last(weight):
        return weight
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def _spread(value: Any, count: int) -> list[int]:
    """A setting for each dimension in space."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _is_float(result: Any) -> bool:
    """Whether a result is, or has in it, something that a gradient could flow from."""
    if isinstance(result, (list, tuple)):
        return any(map(_is_float, result))
    return isinstance(result, torch.Tensor) and result.is_floating_point()


_TENSOR: Any = torch.Tensor
_HARMLESS: frozenset[Any] = frozenset(  # give a tensor, but not one that depends on the values by way of autograd
    (
        *(_TENSOR.data.__get__, _TENSOR.grad.__get__, torch.Tensor.detach, torch.detach),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full),
    )
)


class Sliced(TorchFunctionMode):
    """A context for forward passes of plain autograd in which slices train."""

    def __init__(self, slices: Slices) -> None:
        super().__init__()
        self._slices = slices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._slices.call(func, args, kwargs)
        return func(*args, **(kwargs or {})) if result is None else result
