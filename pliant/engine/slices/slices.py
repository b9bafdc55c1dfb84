"""Train a slice of a parameter: its gradient and its optimizer state are as small as the slice.

A mask on a whole gradient saves nothing. Here a leaf tensor without memory stands for the slice in autograd. Functions that use
the parameter run as usual in the forward pass, and save and compute only what the slice needs. Slices of output channels save
time of the weight gradient; slices of input channels also save memory, since only those channels of the input are kept.
During the optimizer's step, a parameter that holds the slice replaces the whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from pliant.core.types import Part
from pliant.engine.kernels.arm import depthwise
from pliant.engine.slices.checks import check_can_train
from pliant.engine.slices.sliced_gradients import Convolution, Index, Linear, Settings, SlicePlan, as_autocast, spread


class Slices:
    """The parameters of which only a slice is trained.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 6, bias=False)
    >>> slices = Slices({"weight": layer.weight}, [Part("weight", 0, (1, 2))])
    >>> out = slices.call(F.linear, (torch.ones(3, 4), layer.weight))
    >>> out.sum().backward()
    >>> slices.grads()["weight"].shape
    torch.Size([2, 4])
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with slices.swapped_in(optimizer):
    ...     optimizer.step()
    """

    def __init__(self, params: Mapping[str, nn.Parameter], parts: Iterable[Part]) -> None:
        """After all checks, sliced parameters no longer require a gradient, and their gradient is dropped.

        Parts of one parameter are merged. A parameter whose parts cover it is trained as usual.
        """
        self._slices = {name: _Slice(name, params[name], dim, index) for name, (dim, index) in merged(params, parts).items()}
        self._by_id = {id(one.param): one for one in self._slices.values()}
        self._state: dict[str, dict[str, Any]] = {}
        for one in self._slices.values():
            one.param.requires_grad_(False)
            one.param.grad = None

    def __len__(self) -> int:
        return len(self._slices)

    @property
    def parts(self) -> dict[str, Part]:
        """The trained slices, by name of the parameter."""
        return {name: Part(name, one.dim, one.index.at) for name, one in self._slices.items()}

    def grads(self) -> dict[str, torch.Tensor]:
        """Gradients of the slices that have one, in the shape of the slice."""
        return {name: one.leaf.grad for name, one in self._slices.items() if one.leaf.grad is not None}

    def leaves(self) -> dict[str, torch.Tensor]:
        """The leaf of each slice in autograd, which gets its gradient and holds no values."""
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
        """The result of a torch function that uses a sliced parameter, or of a depthwise convolution with a custom kernel; None
        for all others, and if gradients are off.

        A function without a sliced gradient is refused: the parameter would silently not be trained.
        """
        kwargs = kwargs or {}
        used = self._used((*args, *kwargs.values()))
        if used is None or not torch.is_grad_enabled():
            others = func is torch.conv2d and not kwargs and depthwise.passes_on(*args)
            return depthwise.convolve(*args) if others else None
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in (torch.conv1d, torch.conv2d, torch.conv3d):
            return self._convolution(func, *args, **kwargs)
        if func in _PRODUCTS and not kwargs and args[-1].dim() == 2 and all(bias.dim() == 1 for bias in args[:-2]):
            return self._product(*args[-2:], *args[:-2])
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
        tensors = as_autocast(input, *map(_detached, (weight, bias), (of_weight, of_bias)))
        plan = None if of_weight is None else of_weight.plan(1)
        return Linear.apply(*tensors, _leaf(of_weight), _leaf(of_bias), plan, _index(of_bias))

    def _product(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        """input @ weight + bias: a linear layer whose weight is stored as (inputs, outputs)."""
        of_weight, of_bias = self._by_id.get(id(weight)), self._by_id.get(id(bias))
        input, weight, bias = as_autocast(input, *map(_detached, (weight, bias), (of_weight, of_bias)))
        plan, leaf = (None, None) if of_weight is None else (of_weight.transposed_plan(), of_weight.leaf.t())
        return Linear.apply(input, weight.t(), bias, leaf, _leaf(of_bias), plan, _index(of_bias))

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
        stride, dilation = spread(stride, spots), spread(dilation, spots)
        if padding == "same" and max(stride) == 1:
            totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            padding = [total // 2 for total in totals]
            if any(total % 2 for total in totals):  # one more at the end, as PyTorch does
                input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
        elif isinstance(padding, str):
            if padding != "valid":
                return func(input, weight, bias, stride, padding, dilation, groups)  # raises PyTorch's error
            padding = 0
        input, *tensors = as_autocast(input, *map(_detached, (weight, bias), (of_weight, of_bias)))
        plan = None if of_weight is None else of_weight.plan(groups)
        settings = Settings(stride, spread(padding, spots), dilation, groups)
        alone = input.dim() == weight.dim() - 1  # a single sample without a batch dimension
        data = input.unsqueeze(0) if alone else input
        out = Convolution.apply(data, *tensors, _leaf(of_weight), _leaf(of_bias), plan, _index(of_bias), func, settings)
        return out.squeeze(0) if alone else out

    # ------------------------------------------------------------ the optimizer's step

    @contextmanager
    def swapped_in(self, optimizer: optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer holds, for each sliced parameter with a gradient, a parameter that is only the slice.

        Clipping, scaling and stepping go inside. Afterwards the groups and `optimizer.state` are restored, whole parameters
        have the new values, and the optimizer state of the slices is stored here; also if a step raises.
        """
        check_can_train(optimizer)
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
        """Restore a saved state of the same slices."""
        for name, saved in state.items():
            one = self._slices.get(name)
            if one is None or (one.dim, one.index.at) != (saved["dim"], tuple(saved["index"])):
                raise ValueError(f"this state is of another choice: the slice of {name!r} that it knows is not chosen here.")
        self._state = {name: self._slices[name].on_own_device(saved["state"]) for name, saved in state.items()}

    def carry_over(self, old: Slices, optimizer: optim.Optimizer) -> None:
        """Take over the optimizer state of an earlier choice for the channels that stay; new channels start with a fresh state.

        Step counts continue. A parameter that was sliced along another dimension starts with a fresh state.
        """
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for name, one in self._slices.items():
            before, state = old._slices.get(name), old._state.get(name)
            if before is None or state is None or before.dim != one.dim or id(one.param) not in groups:
                continue
            stay = sorted(set(one.index.at) & set(before.index.at))
            here, there = Index(map(one.index.at.index, stay)), Index(map(before.index.at.index, stay))
            mine: dict[str, Any] = {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == before.leaf.shape:
                    start = float(groups[id(one.param)][_START[key]]) if key in _START else 0.0
                    mine[key] = value.new_full(one.leaf.shape, start)
                    here.put_(mine[key], one.dim, there.take(value, one.dim))
                else:
                    mine[key] = value.clone() if isinstance(value, torch.Tensor) else value
            self._state[name] = mine


def merged(params: Mapping[str, nn.Parameter], parts: Iterable[Part]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The union of the parts of each parameter; parameters that are trained whole are left out."""
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


class _Slice:
    """One parameter's slice. `leaf` stands for it in autograd: a single zero, seen as a tensor of the slice's shape."""

    def __init__(self, name: str, param: nn.Parameter, dim: int, index: tuple[int, ...]) -> None:
        self.name, self.param, self.dim, self.index = name, param, dim, Index(index)
        shape = list(param.shape)
        shape[dim] = len(index)
        self.leaf = torch.zeros((), dtype=param.dtype, device=param.device).expand(shape).requires_grad_()
        self._plans: dict[int, SlicePlan] = {}

    def plan(self, groups: int) -> SlicePlan:
        """How a layer with this number of groups computes the slice of its weight's gradient."""
        if groups not in self._plans:
            self._plans[groups] = self._inputs(groups) if self.dim == 1 else self._outputs(groups)
        return self._plans[groups]

    def transposed_plan(self) -> SlicePlan:
        """The same for a matrix that is stored as (inputs, outputs)."""
        inputs, outputs = (None, self.index) if self.dim == 1 else (self.index, None)
        return SlicePlan(inputs, outputs, 1, tuple(self.leaf.t().shape))

    def _inputs(self, groups: int) -> SlicePlan:
        """The chosen channels of each group's input."""
        per = self.param.shape[1]
        inputs = Index(g * per + i for g in range(groups) for i in self.index.at)
        return SlicePlan(inputs, None, groups, tuple(self.leaf.shape))

    def _outputs(self, groups: int) -> SlicePlan:
        """The groups with a chosen output: their inputs, and as many outputs of each, or all where these are not the same."""
        out, per_in = self.param.shape[:2]
        per = out // groups
        counts = Counter(i // per for i in self.index.at)
        inputs = None if len(counts) == groups else Index(g * per_in + i for g in counts for i in range(per_in))
        if len(set(counts.values())) == 1:
            return SlicePlan(inputs, self.index, len(counts), tuple(self.leaf.shape))
        rows = [g * per + i for g in counts for i in range(per)]
        shape = (len(rows), *self.leaf.shape[1:])
        return SlicePlan(inputs, Index(rows), len(counts), shape, Index(map(rows.index, self.index.at)))

    def cut(self) -> nn.Parameter:
        """A parameter that is the slice, with its gradient; it shares memory with the whole one if the slice is contiguous."""
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

    def on_own_device(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of an optimizer state of this slice, on the parameter's device."""
        return {key: self._moved(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.param.device, copy=True) if value.shape == self.leaf.shape else value.clone()


# ---------------------------------------------------------------- optimizer state

_START = {
    "step_size": "lr",
    "sum": "initial_accumulator_value",
}  # state that does not start from zero → the setting that it starts from


def _begin(one: _Slice, optimizer: optim.Optimizer, group: Mapping[str, Any], cut: nn.Parameter) -> dict[str, Any]:
    """The initial state of a slice: its part of the whole parameter's state, if the optimizer has that."""
    whole = optimizer.state.get(one.param)
    if whole:
        same = one.param.shape
        state = {k: one.index.take(v, one.dim) if torch.is_tensor(v) and v.shape == same else v for k, v in whole.items()}
        return {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
    if isinstance(optimizer, optim.Adagrad):  # creates its state when it is built, not at the first step
        settings = {key: value for key, value in group.items() if key in ("initial_accumulator_value", "fused")}
        return dict(optim.Adagrad([cut], **settings).state[cut])
    return {}


def _placed(state: dict[str, Any], group: Mapping[str, Any], cut: nn.Parameter) -> dict[str, Any]:
    """Some optimizers need the whole state on the parameter's device."""
    if not (group.get("capturable") or group.get("fused")):
        return state
    return {key: value.to(cut.device) if torch.is_tensor(value) else value for key, value in state.items()}


def _leaf(one: _Slice | None) -> torch.Tensor | None:
    return None if one is None else one.leaf


def _index(one: _Slice | None) -> Index | None:
    return None if one is None else one.index


def _detached(tensor: torch.Tensor | None, one: _Slice | None) -> torch.Tensor | None:
    """A sliced parameter is detached: its leaf gets the gradient."""
    return tensor if tensor is None or one is None else tensor.detach()


def _is_float(result: Any) -> bool:
    """Whether a result is, or contains, a floating-point tensor."""
    if isinstance(result, (list, tuple)):
        return any(map(_is_float, result))
    return isinstance(result, torch.Tensor) and result.is_floating_point()


_TENSOR: Any = torch.Tensor
_PRODUCTS = frozenset((torch.mm, torch.matmul, _TENSOR.mm, _TENSOR.matmul, _TENSOR.__matmul__, torch.addmm, _TENSOR.addmm))
_HARMLESS: frozenset[Any] = frozenset(  # return a tensor that does not depend on the values through autograd
    (
        *(_TENSOR.data.__get__, _TENSOR.grad.__get__, torch.Tensor.detach, torch.detach, torch.Tensor.requires_grad_),
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
