"""The prefix in int8: ONNX Runtime's static quantisation of a float32 model, calibrated on the first batches of a session.

Weights are int8 with one scale per output channel, values between layers are uint8 with one scale per tensor. What leaves the
prefix is float32 again. It is used only if it is near to float32.
"""

from __future__ import annotations

import itertools
import logging
import platform
import tempfile
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SAMPLES = 32  # that activations are calibrated on: as good as 128 for MobileNetV2
FARTHEST = 0.5  # from float32, as a share of its norm: networks that train well in int8 were at 0.3 or less
_KINDS = 8  # shapes of batches that are calibrated apart, and prefixes of each that are known
_NUMBERS = itertools.count()

Kind = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Calibration:
    """The first samples of batches of one shape, copied. With `SAMPLES` of them it is complete."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)  # features of two calibrations differ
        self.refusals: dict[Hashable, str | None] = {}  # by prefix, for every size of batches: why it is not in int8, or None
        self.is_complete = False
        self._batches: list[list[torch.Tensor]] = []

    def see(self, batch: Sequence[torch.Tensor]) -> None:
        """Keep a copy. The same batch again, as in steps that are only measured, counts once; a new one after enough samples
        ends the calibration, so nothing changes while the first batch is measured."""
        if self.is_complete or (self._batches and _begins_with(batch, self._batches[-1])):
            return
        room = SAMPLES - sum(map(samples, self._batches))
        if room <= 0:
            self.is_complete = True
        else:
            has_rows = _have_rows(batch)
            self._batches.append([(tensor[:room] if has_rows else tensor).detach().clone() for tensor in batch])

    def refuse(self, prefix: Hashable, why: str | None) -> None:
        self.refusals[prefix] = why
        while len(self.refusals) > _KINDS:
            del self.refusals[next(iter(self.refusals))]

    def batches(self, size: int) -> list[list[torch.Tensor]]:
        """The samples in batches of this size; some come twice where there are too few."""
        if not all(map(_have_rows, self._batches)):
            return self._batches
        rows = [torch.cat(tensors) for tensors in zip(*self._batches, strict=True)]
        count = max(len(rows[0]) // size, 1)
        return [[tensor[torch.arange(at * size, (at + 1) * size) % len(tensor)] for tensor in rows] for at in range(count)]


class Int8:
    """Calibrations of a session, by the shapes of its batches, and the models that they make."""

    def __init__(self) -> None:
        self._calibrations: OrderedDict[Kind, Calibration] = OrderedDict()

    def see(self, batch: list[torch.Tensor]) -> None:
        """A batch that a step is taken with."""
        self.calibration(batch).see(distinct(batch))

    def calibration(self, batch: list[torch.Tensor]) -> Calibration:
        kind = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in distinct(batch))
        if kind not in self._calibrations:
            self._calibrations[kind] = Calibration()
            while len(self._calibrations) > _KINDS:
                self._calibrations.popitem(last=False)
        return self._calibrations[kind]


def distinct(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a batch, each once."""
    return list({id(tensor): tensor for tensor in batch}.values())


def quantised(model: bytes, batches: Sequence[dict[str, torch.Tensor]]) -> bytes:
    """A float32 model in int8, calibrated on these inputs."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantFormat, QuantType, quant_utils, quantize_static

    with tempfile.TemporaryDirectory(prefix="pliant-int8-") as folder, _no_root_handler():
        folded, out = Path(folder, "folded.onnx"), Path(folder, "int8.onnx")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # norms go into convolutions
        options.optimized_model_filepath, options.log_severity_level = str(folded), 3
        options.intra_op_num_threads = torch.get_num_threads()
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


@contextmanager
def _no_root_handler() -> Iterator[None]:
    """The quantiser logs with the functions of `logging`, which give the root logger a handler for good where it has none."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


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
    off = [_distance(one.double(), other.double()) for one, other in zip(found, wanted, strict=True)]
    return torch.tensor([0.0, *off], dtype=torch.double).max().item()  # NaN if any is


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    off, size = (one - other).norm().item(), other.norm().item()
    return 0.0 if off == 0.0 else off / size if size else float("inf")


def samples(batch: Sequence[torch.Tensor]) -> int:
    return max((len(tensor) for tensor in batch if tensor.dim()), default=0)


def _have_rows(batch: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor has a row for every sample."""
    return all(tensor.dim() and len(tensor) == samples(batch) for tensor in batch)


def _begins_with(batch: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one[: len(other)] if one.dim() else one, other) for one, other in zip(batch, kept, strict=True))


def _saturates() -> bool:
    """Whether sums of two products overflow: on x86-64 without VNNI, where weights then get seven bits."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return True
