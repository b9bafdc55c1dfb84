"""The inference runtimes: each loads an ONNX model, and computes its outputs from tensors where they are.

OpenVINO comes first where both are installed: it was faster wherever both were measured (the notebook has the tables). What it
cannot run, ONNX Runtime may. Models in int8 run on ONNX Runtime, which also quantises them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
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

    @staticmethod
    def prepare() -> None:
        """Import the packages, which takes longer than to load a model."""

    @staticmethod
    def computes(types: Collection[torch.dtype]) -> bool:
        """Whether values of these types come out as in PyTorch."""

    def run(self, given: Tensors, made: Tensors, apart: bool) -> None:
        """Compute from these inputs into these outputs; `apart`: samples do not depend on each other."""


class OnOpenVino:
    """A model on OpenVINO. It holds the tensors of the last run until the next one."""

    title: ClassVar[str] = "OpenVINO"

    def __init__(self, model: bytes, threads: int) -> None:
        package, core, process = _openvino()
        if process != os.getpid():
            raise RuntimeError("it cannot load a model in a process that was forked from one that has used it")
        how = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self._request = core.compile_model(core.read_model(model), "CPU", how).create_infer_request()
        self._wrap = package.Tensor

    @staticmethod
    def prepare() -> None:
        import onnx  # noqa: F401

        _openvino()

    @staticmethod
    def computes(types: Collection[torch.dtype]) -> bool:
        return set(types) <= {torch.float32, torch.bool}  # it cuts integers to 32 bits, and takes any index

    def run(self, given: Tensors, made: Tensors, apart: bool) -> None:
        for name, tensor in {**given, **made}.items():
            self._request.set_tensor(name, self._wrap(tensor.numpy(), shared_memory=True))
        self._request.infer(share_outputs=True)
        if not all(tensor.sum().isfinite() for tensor in given.values()):  # its ReLU makes 0 of NaN
            for tensor in made.values():
                tensor.fill_(float("nan"))


@cache
def _openvino() -> tuple[Any, Any, int]:
    """The package, and what loads models: one for the process, since each has threads of its own.

    Its import would report to a server that it is used. Without the package for that, it does not.
    """
    is_hidden = sys.modules.setdefault("openvino_telemetry", None) is None  # type: ignore[arg-type]
    try:
        import openvino
    finally:
        if is_hidden:
            del sys.modules["openvino_telemetry"]
    return openvino, openvino.Core(), os.getpid()


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

    @staticmethod
    def prepare() -> None:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401

    @staticmethod
    def computes(types: Collection[torch.dtype]) -> bool:
        return True

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


def installed() -> tuple[type[Loaded], ...]:
    """Those that are installed, the faster one first."""
    kinds: tuple[tuple[str, type[Loaded]], ...] = ("openvino", OnOpenVino), ("onnxruntime", OnOnnxRuntime)
    return tuple(kind for name, kind in kinds if _has(name)) if _has("onnx") else ()


def has_int8() -> bool:
    return _has("onnx") and _has("onnxruntime")


def _has(name: str) -> bool:
    return find_spec(name) is not None
