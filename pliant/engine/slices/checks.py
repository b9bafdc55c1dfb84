"""What cannot train slices of parameters."""

from __future__ import annotations

from torch import optim

from pliant.runtime.trainable import ELEMENTWISE


def check_can_train(optimizer: optim.Optimizer, differentiates: bool = False) -> None:
    """Refuse an optimizer that is not known to update every element independently, and a loss that differentiates."""
    if type(optimizer) not in ELEMENTWISE:  # a class that inherits from one of them may do anything
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ValueError(
            f"{type(optimizer).__name__} cannot train slices of a parameter: it is not known to update every element "
            f"independently. Use one of {known}, or choose whole parameters: units.layers() instead of units.channels()."
        )
    if differentiates:
        raise ValueError(
            "the loss differentiates, and gradients of slices cannot be differentiated twice: choose whole parameters, "
            "units.layers() instead of units.channels()."
        )
