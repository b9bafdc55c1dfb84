"""The inference runtimes: each loads an ONNX model, and computes its outputs from tensors where they are.

OpenVINO is taken where it is installed, else ONNX Runtime: in each of the steps that were measured it was as fast or faster
(benchmarks/step.py). Models in int8 run on ONNX Runtime, which also quantises them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch

_AT_A_TIME = 4 * 3 * 128 * 128  # values of a batch: so few that what layers hand on stays in the processor's caches

Tensors = Mapping[str, torch.Tensor]


class Loaded(Protocol):
    """A model that is ready to run."""

    title: ClassVar[str]

    def __init__(self, model: bytes, threads: int) -> None: ...

    def run(self, given: Tensors, made: Tensors, apart: bool) -> None:
        """Compute from these inputs into these outputs; `apart`: samples do not depend on each other."""


class OnOpenVino:
    """A model on OpenVINO. It holds the tensors of the last run until the next one."""

    title: ClassVar[str] = "OpenVINO"

    def __init__(self, model: bytes, threads: int) -> None:
        how: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
        how |= {"INFERENCE_PRECISION_HINT": "f32"}
        core = _openvino()
        self._request = core.compile_model(core.read_model(model), "CPU", how).create_infer_request()

    def run(self, given: Tensors, made: Tensors, apart: bool) -> None:
        from openvino import Tensor

        for name, tensor in {**given, **made}.items():
            self._request.set_tensor(name, Tensor(tensor.numpy(), shared_memory=True))
        self._request.infer()


@cache
def _openvino() -> Any:
    """One for the process: each has threads of its own."""
    from openvino import Core

    return Core()


class OnOnnxRuntime:
    """A model on ONNX Runtime."""

    title: ClassVar[str] = "ONNX Runtime"

    def __init__(self, model: bytes, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # PyTorch's threads work in between
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, given: Tensors, made: Tensors, apart: bool) -> None:
        for piece in pieces([*given.values()]) if apart else [...]:
            binding, held = self._session.io_binding(), []
            for bind, tensors in ((binding.bind_input, given), (binding.bind_output, made)):
                for name, tensor in tensors.items():
                    part = tensor[piece]
                    held.append(part)
                    bind(name, "cpu", 0, part.numpy().dtype.type, tuple(part.shape), part.data_ptr())
            self._session.run_with_iobinding(binding)


def pieces(given: list[torch.Tensor]) -> list[Any]:
    """Parts of a batch that run one after the other."""
    size = len(given[0])
    step = max(1, size * _AT_A_TIME // max(sum(tensor.numel() for tensor in given), 1))
    return [slice(at, at + step) for at in range(0, size, step)]


def best() -> type[Loaded] | None:
    """The faster of those that are installed."""
    if not _has("onnx"):
        return None
    return OnOpenVino if _has("openvino") else OnOnnxRuntime if _has("onnxruntime") else None


def has_int8() -> bool:
    return _has("onnx") and _has("onnxruntime")


def _has(name: str) -> bool:
    return find_spec(name) is not None
