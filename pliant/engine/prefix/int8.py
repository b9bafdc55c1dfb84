"""The prefix in int8: ONNX Runtime's static quantisation of a float32 model, calibrated on the first batches of a session.

Weights are int8 with one scale per output channel, values between layers are uint8 with one scale per tensor. What leaves the
prefix is float32 again. It is used only if it is near to float32.
"""

from __future__ import annotations

import itertools
import platform
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SAMPLES = 32  # that activations are calibrated on: as good as 128 for MobileNetV2
FARTHEST = 0.5  # from float32, as a share of its norm: networks that train well in int8 were at 0.3 or less
_KINDS = 8  # shapes of batches that are calibrated apart
_NUMBERS = itertools.count()

Kind = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Calibration:
    """The first batches of one shape: copies of at least `SAMPLES` samples, after which it is complete."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)  # features of two calibrations differ
        self.batches: list[list[torch.Tensor]] = []
        self.is_complete = False

    def see(self, batch: Sequence[torch.Tensor]) -> None:
        """Keep a copy. The same batch again, as in steps that are only measured, counts once; a new one after enough samples
        ends the calibration, so nothing changes while the first batch is measured."""
        if self.is_complete or (self.batches and _are_equal(self.batches[-1], batch)):
            return
        if sum(map(_samples, self.batches)) >= SAMPLES:
            self.is_complete = True
        else:
            self.batches.append([tensor.detach().clone() for tensor in batch])


class Int8:
    """Calibrations of a session, by the shapes of its batches, and the models that they make."""

    def __init__(self) -> None:
        self._calibrations: OrderedDict[Kind, Calibration] = OrderedDict()

    def see(self, batch: list[torch.Tensor]) -> None:
        """A batch that goes through the model."""
        self.calibration(batch).see(distinct(batch))

    def calibration(self, batch: list[torch.Tensor]) -> Calibration:
        kind = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in distinct(batch))
        found = self._calibrations.setdefault(kind, Calibration())
        while len(self._calibrations) > _KINDS:
            self._calibrations.popitem(last=False)
        return found


def distinct(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a batch, each once."""
    return list({id(tensor): tensor for tensor in batch}.values())


def quantised(model: bytes, batches: Sequence[dict[str, torch.Tensor]]) -> bytes:
    """A float32 model in int8, calibrated on these inputs."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantFormat, QuantType, quant_utils, quantize_static

    with tempfile.TemporaryDirectory(prefix="pliant-int8-") as folder:
        folded, out = Path(folder, "folded.onnx"), Path(folder, "int8.onnx")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # norms go into convolutions
        options.optimized_model_filepath, options.log_severity_level = str(folded), 3
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        prepared = onnx.load(folded)
        quant_utils.add_pre_process_metadata(prepared)  # else it would recommend to do what was done here
        quantize_static(
            prepared,
            out,
            _Reader(batches),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=_saturates(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return out.read_bytes()


class _Reader:
    """Hands batches to the calibration, one after another."""

    def __init__(self, batches: Sequence[dict[str, torch.Tensor]]) -> None:
        self._left: Iterator[dict[str, torch.Tensor]] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._left, None)
        return None if batch is None else {name: tensor.contiguous().numpy() for name, tensor in batch.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.get_next, None)


def distance(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference of a tensor from the one that is wanted, as a share of that one's norm.

    >>> distance([torch.tensor([3.0, 4.0, 0.5])], [torch.tensor([3.0, 4.0, 0.0])])
    0.1
    """
    return max((_distance(one.double(), other.double()) for one, other in zip(found, wanted, strict=True)), default=0.0)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    off, size = (one - other).norm().item(), other.norm().item()
    return 0.0 if off == 0.0 else off / size if size else float("inf")


def _samples(batch: Sequence[torch.Tensor]) -> int:
    return max((len(tensor) for tensor in batch if tensor.dim()), default=0)


def _are_equal(kept: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(kept, batch, strict=True))


def _saturates() -> bool:
    """Whether sums of two products overflow: on x86-64 without VNNI, where weights then get seven bits."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return True
