"""Trained or chosen parts of a model, written for other runtimes. Each module stands on `Session` and the public names."""

from pliant.export.device.errors import ExportError
from pliant.export.device.export import executorch
from pliant.export.device.facts import Facts, apply_delta_

__all__ = ["ExportError", "Facts", "apply_delta_", "executorch"]
