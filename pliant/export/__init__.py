"""Trained or chosen parts of a model, written for other runtimes. Each module stands on `Session` and the public names."""

from pliant.export.device.errors import ExportError
from pliant.export.device.export import executorch
from pliant.export.device.facts import Facts, apply_delta_
from pliant.export.device.process import Job, run_device

__all__ = ["ExportError", "Facts", "Job", "apply_delta_", "executorch", "run_device"]
