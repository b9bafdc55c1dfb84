"""What a unit is worth: signals, and the probe that reads them off one batch. Public as `pliant.score`."""

from pliant.signals.probe import probe, watch
from pliant.signals.signals import (
    Seen,
    Signal,
    alignment,
    fisher,
    grad_norm,
    nearness,
    random,
    update_gain,
    weight_norm,
)

__all__ = [
    "Seen",
    "Signal",
    "alignment",
    "fisher",
    "grad_norm",
    "nearness",
    "probe",
    "random",
    "update_gain",
    "watch",
    "weight_norm",
]
