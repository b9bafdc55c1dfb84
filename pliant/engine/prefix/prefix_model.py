"""The prefix as a model for an inference runtime: a recorded program becomes a model, once, which runs in later passes.

The model is written as ONNX while one pass runs as plain PyTorch. It is used only if it gives the results of that pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from pliant.engine.kernels.switch import has_small_convolutions
from pliant.engine.prefix import int8, runtimes
from pliant.engine.prefix.call_arguments import split
from pliant.engine.prefix.onnx_nodes import OPSET, TYPES, OnnxGraph, Unsupported, array, supports
from pliant.engine.prefix.prefix_plan import PrefixPlan, Weights
from pliant.engine.prefix.record import Call, name_of
from pliant.engine.prefix.replay import Replay
from pliant.engine.prefix.runtimes import Loaded, OnOnnxRuntime
from pliant.runtime.torch_internals import without_function_modes

TOLERANCE = 1e-4  # of the largest value
_TWO_VALUES = frozenset({"Add", "Div", "Mul", "Sub"})
# What these make of a batch of images are images, one for each, that depend on no other.
_EACH_ALONE = _TWO_VALUES | {
    *("AveragePool", "BatchNormalization", "Clip", "Conv", "Identity", "MaxPool"),
    *("Elu", "Gelu", "HardSigmoid", "LeakyRelu", "Mish", "Relu", "Selu", "Sigmoid", "Tanh"),
}


def runtime_for(model: nn.Module, in_int8: bool = False) -> InferenceRuntime | None:
    """The runtime, where one is installed and steps were measured to be faster with it: networks of pointwise or grouped
    convolutions on CPUs. In int8, it serves wherever it is asked for."""
    kinds = runtimes.installed()
    if not kinds:
        return None
    serves = next(model.parameters()).device.type == "cpu" and has_small_convolutions(model)
    if in_int8:
        return InferenceRuntime(kinds if serves else (OnOnnxRuntime,), int8.Int8(), in_float32=serves)
    return InferenceRuntime(kinds) if serves else None


def why_not(plan: PrefixPlan) -> str | None:
    """Why a prefix cannot become a model, as far as its recorded calls tell."""
    if plan.program.uncacheable is not None:
        return plan.program.uncacheable
    if plan.dtype is not None:
        return "prefix_dtype asks for another type than float32"
    calls = [plan.calls[at] for at in plan.prefix_calls if at not in plan.recomputed]
    for value in [plan.values[number] for call in calls for number in call.makes]:
        if value.dtype not in TYPES or value.device.type != "cpu":
            return f"values of {str(value.dtype).removeprefix('torch.')} on {value.device} are not written as ONNX"
    return next((f"{name} is not written as ONNX" for name in map(_name, calls) if not supports(name)), None)


def _name(call: Call) -> str:
    return name_of(call.func)


@dataclass(frozen=True, eq=False)
class PrefixModel:
    """The prefix of one program as a model, for the weights that it had."""

    loaded: Loaded
    inputs: tuple[int, ...]  # which tensors of the batch it reads, each counted once
    weights: Hashable
    threads: int
    apart: bool  # whether samples may be computed apart
    calibration: int | None = None  # in int8: the number of its calibration
    not_int8: str | None = None  # why it is in float32, where int8 was asked for

    def fits(self, plan: PrefixPlan) -> bool:
        """Whether it is still up to date."""
        return self.weights == plan.signature() and self.threads == torch.get_num_threads()

    def run(self, plan: PrefixPlan, batch: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of the prefix. The model reads the batch where it is, and writes into these tensors."""
        those = int8.distinct(batch)
        given = {_input(number): those[number].detach().contiguous() for number in self.inputs}
        values = {_output(number): plan.values[number] for number in plan.frontier}
        made = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in values.items()}
        self.loaded.run(given, made, self.apart)
        return tuple(made.values())


Models = dict[tuple[Any, ...], tuple[PrefixPlan, PrefixModel]]  # by the key of the program


def _input(number: int) -> str:
    return f"input_{number}"


def _output(number: int) -> str:
    return f"output_{number}"


class Export(Replay):
    """One pass that runs as plain PyTorch, while the calls of the prefix are written as an ONNX graph."""

    def __init__(self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights) -> None:
        super().__init__(plan, batch, weights, checks=True, fuse_norms=False)
        self.refusal: str | None = None  # why there is no model
        self._graph = OnnxGraph()
        self._names: dict[int, str] = {}  # of values and, by ~number, of leaves
        self._inputs: list[int] = []

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        with without_function_modes():
            given, plain = split(args, kwargs)
            if not self.is_as_recorded(call, given, plain):
                self.diverge(f"the program changed: {name_of(call.func)} takes something else")
            writes = call.kind == "prefix" and self.diverged is None and at not in self.plan.recomputed
            if writes and self.refusal is None:
                self._name(call, given)
        out = call.func(*args, **kwargs)
        if call.kind in ("form", "layout") or self.diverged is not None:
            return out
        with without_function_modes():
            self.remember(call, given, out)
            if writes:
                self._write(call, out, args, kwargs)
        return out

    def _name(self, call: Call, given: list[torch.Tensor]) -> None:
        """The names of the tensors that a call reads, with the values that they have before it."""
        graph, values = self._graph, self.plan.values
        try:
            for tensor, number in zip(given, call.reads, strict=True):
                if number not in self._names and (number < 0 or not values[number].depends):
                    self._names[number] = graph.constant(tensor.detach().clone(), f"weight_{number}")
                elif number not in self._names:
                    self._inputs.append(number)
                    self._names[number] = _input(number)
                graph.names[id(tensor)] = self._names[number]
        except Unsupported as why:
            self.refusal = str(why)

    def _write(self, call: Call, out: Any, args: Any, kwargs: Any) -> None:
        made, _ = split(out)
        self.outputs |= {n: (t.detach().clone(), 0) for n, t in zip(call.makes, made, strict=True) if n in self.plan.keeps}
        if self.refusal is not None:
            return
        try:
            names = self._graph.write(name_of(call.func), out, args, kwargs)
            self._names.update(zip(call.makes, [names] if isinstance(names, str) else names, strict=True))
        except Unsupported as why:
            self.refusal = str(why)
        self._graph.names.clear()

    def samples_are_apart(self) -> bool:
        """Whether what the model computes for a sample does not depend on the others."""
        first = {shape[0] if len(shape) == 4 else None for shape in (self.plan.values[n].shape for n in self._inputs)}
        if len(first) != 1 or None in first:
            return False
        for op, given, *_ in self._graph.nodes:
            read = given if op in _TWO_VALUES else given[:1]
            held = [self._graph.constants[name] for name in read if name in self._graph.constants]
            if op not in _EACH_ALONE or len(held) == len(read) or any(one.ndim > 3 and len(one) > 1 for one in held):
                return False
        return True

    def model(self) -> tuple[bytes, tuple[int, ...]]:
        """The written model, and which tensors of the batch it reads."""
        from onnx import helper, numpy_helper

        values = self.plan.values
        for number in self.plan.frontier:
            self._graph.nodes.append(("Identity", [self._names[number]], [_output(number)], {}))

        def described(name: str, number: int) -> Any:
            kind = helper.np_dtype_to_tensor_dtype(array(torch.empty(0, dtype=values[number].dtype)).dtype)
            shape = values[number].shape
            return helper.make_tensor_value_info(name, kind, [None, *shape[1:]] if shape else [])

        graph = helper.make_graph(
            [helper.make_node(op, given, made, **settings) for op, given, made, settings in self._graph.nodes],
            "prefix",
            [described(_input(number), number) for number in self._inputs],
            [described(_output(number), number) for number in self.plan.frontier],
            [numpy_helper.from_array(value, name) for name, value in self._graph.constants.items()],
        )
        whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
        return whole.SerializeToString(), tuple(self._inputs)


class InferenceRuntime:
    """Makes models of prefixes. Equal models, as for batches of different sizes, are loaded once.

    `kinds` are the runtimes of models in float32: the first that can run a model does. `int8` holds what models in int8 are
    calibrated on. `in_float32`: whether models in float32 serve as well.
    """

    def __init__(self, kinds: Sequence[type[Loaded]], int8: int8.Int8 | None = None, in_float32: bool = True) -> None:
        self.kinds, self.int8, self.in_float32 = tuple(kinds), int8, in_float32
        self._loaded: WeakValueDictionary[Hashable, Loaded] = WeakValueDictionary()

    def see(self, batch: list[torch.Tensor]) -> None:
        """A batch that goes through the model."""
        if self.int8 is not None:
            self.int8.see(batch)

    def serves(self, reasons: Mapping[str, str]) -> bool:
        """Whether it runs a prefix of which these reasons are known."""
        return "runtime" not in reasons and (self.in_float32 or "int8" not in reasons)

    def calibration(self, batch: list[torch.Tensor], reasons: Mapping[str, str]) -> int8.Calibration | None:
        """What a prefix is calibrated on, for such batches; None: it is in float32."""
        return None if self.int8 is None or not reasons.keys().isdisjoint(("runtime", "int8")) else self.int8.calibration(batch)

    def build(self, plan: PrefixPlan, export: Export, batch: list[torch.Tensor]) -> PrefixModel | str:
        """The model of a prefix, or why there is none. It is in int8 if that is calibrated, and near enough."""
        if export.refusal is not None:
            return export.refusal
        refusals, written = list[str](), None
        for kind in self.kinds:
            if (why := _why_not_on(kind, plan)) is not None:
                refusals.append(f"{kind.title} cannot run it: {why}")
                continue
            try:
                written = written or export.model()
            except Exception as error:  # PyTorch can still run the prefix
                return f"it cannot be written as ONNX: {error_text(error)}"
            found = self._on(kind, *written, plan, export, batch)
            if not isinstance(found, str):
                return found
            refusals.append(found)
        return "; ".join(refusals)

    def _on(
        self,
        kind: type[Loaded],
        written: bytes,
        inputs: tuple[int, ...],
        plan: PrefixPlan,
        export: Export,
        batch: list[torch.Tensor],
    ) -> PrefixModel | str:
        """The model on one runtime, or why it is not used."""
        try:
            threads = torch.get_num_threads()
            key = kind.title, hashlib.sha256(written).digest(), threads
            loaded = self._load(key, kind, lambda: written)
            model = PrefixModel(loaded, inputs, plan.signature(), threads, export.samples_are_apart())
            found = model.run(plan, batch)
        except Exception as error:  # whatever the runtime raises, PyTorch can still run the prefix
            return f"{kind.title} cannot run it: {error_text(error)}"
        if not export.is_whole() or not all(_is_near(one, other) for one, other in zip(found, export.rows(), strict=True)):
            return f"the results of {kind.title} differ from those of PyTorch by more than {TOLERANCE:g}"
        return self._in_int8(model, plan, batch, found, key, written)

    def _in_int8(
        self,
        model: PrefixModel,
        plan: PrefixPlan,
        batch: list[torch.Tensor],
        wanted: tuple[torch.Tensor, ...],
        key: tuple[str, bytes, int],
        written: bytes,
    ) -> PrefixModel:
        """The model in int8, if it is calibrated; `wanted` is what it gives in float32. Whether that is near enough is decided
        once, for batches of every size."""
        calibration = self.calibration(batch, plan.reasons)
        if calibration is None or not calibration.is_complete:
            return model
        prefix = plan.signature(), len(plan.prefix_calls)
        if (why := calibration.refusals.get(prefix)) is not None:
            return replace(model, not_int8=why)
        seen = calibration.batches(int8.samples(batch))
        named = [{_input(number): tensors[number] for number in model.inputs} for tensors in seen]
        try:
            loaded = self._load((*key, calibration.number), OnOnnxRuntime, lambda: int8.quantised(written, named))
            ours = replace(model, loaded=loaded, calibration=calibration.number)
            off = int8.distance(ours.run(plan, batch), wanted)
        except Exception as error:  # of a prefix that the quantiser or its kernels do not know
            return replace(model, not_int8=f"ONNX Runtime cannot quantise it: {error_text(error)}")
        if prefix not in calibration.refusals:
            near = off <= int8.FARTHEST
            why = None if near else f"it would be off by {off:.0%}, and at most {int8.FARTHEST:.0%} is accepted"
            calibration.refuse(prefix, why)
        return ours if why is None else replace(model, not_int8=why)

    def _load(self, key: Hashable, kind: type[Loaded], model: Callable[[], bytes]) -> Loaded:
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = kind(model(), torch.get_num_threads())
        return loaded


def _why_not_on(kind: type[Loaded], plan: PrefixPlan) -> str | None:
    """Why a runtime cannot run the prefix: it does not compute values of these types, or cannot be imported."""
    calls = [plan.calls[at] for at in plan.prefix_calls]
    if not kind.computes({plan.values[number].dtype for call in calls for number in (*call.reads, *call.makes) if number >= 0}):
        return "its integers are not PyTorch's"
    try:
        kind.prepare()
    except Exception as error:
        return error_text(error)
    return None


def error_text(error: Exception) -> str:
    """Of what it says; OpenVINO begins with where it was raised."""
    lines = (line for line in str(error).splitlines() if not line.startswith("Exception from "))
    return f"{type(error).__name__}: {next(lines, '')}"


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    largest = other.abs().nan_to_num(0, 0, 0).amax().item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True)
