"""From the joint graph to the bytes of a program: ExecuTorch's passes with our planner, and a check of its kernels."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pliant.core.errors import first_line
from pliant.export.device.arena import Planner, Report
from pliant.export.device.errors import ExportError, missing


@dataclass(frozen=True)
class Lowered:
    """A program as bytes, with what its memory holds and the operators that it calls."""

    program: bytes
    memory: Report
    operators: tuple[str, ...]


def lower(joint: Any) -> Lowered:
    """The program of a joint graph. Operators without a kernel are an error that names them."""
    with quiet():
        try:
            from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
            from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite
            from executorch.exir.passes import MemoryPlanningPass
        except ImportError as error:
            raise missing(error) from error
        planner = Planner()
        config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(MemoryPlanningAlgorithmSuite([planner])))
        try:
            edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
            manager = edge.to_executorch(config)
        except Exception as error:
            raise ExportError(f"ExecuTorch cannot lower this graph: {first_line(error)}") from error
        plan = next(plan for plan in manager.executorch_program.execution_plan if plan.name == "forward")
        used = sorted({f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators})
        _check_kernels(used)
        if planner.report is None:
            raise ExportError("the program holds no tensor that changes: nothing would train.")
        return Lowered(bytes(manager.buffer), planner.report, tuple(used))


def _check_kernels(used: list[str]) -> None:
    from executorch.extension.pybindings.portable_lib import _get_operator_names

    known = set(_get_operator_names())
    absent = [name for name in used if name not in known]
    if absent:
        instead = " (x.mean((2, 3)) for adaptive average pooling)" if any("adaptive" in name for name in absent) else ""
        raise ExportError(
            f"the ExecuTorch runtime has no kernel for {', '.join(absent)}. Use another operator in the model{instead}, or "
            f"choose layers nearer the loss, so that it is not differentiated."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and log lines of experimental packages."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
