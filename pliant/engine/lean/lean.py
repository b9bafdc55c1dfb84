"""The lean engine: save for backward only what the chosen gradients need, around the user's own forward pass.

PyTorch saves tensors without knowing which gradients are wanted: a frozen convolution saves its input, an activation its whole
output. While `Lean` is active, every torch function is looked up in one table (`rules`). Its rule says for each tensor that
autograd is about to save: save it, save its shape alone, or save one bit for each element (`packed_tensors`).

The operations and their backward kernels are PyTorch's own, so gradients are equal to the last bit. There is one exception: a
batch norm with running statistics and a frozen scale is a product with one number for each channel, and so is its backward.
An activation in place (ReLU6) makes no copy of its input. If the next layer saves the activation's output for a chosen weight,
the activation saves no bits of its own.

Functions without a rule save what they always save. Those that are not known to need it are listed in `not_lean`.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from pliant.engine.lean.lean_pass import LeanPass
from pliant.engine.lean.rules import RULES
from pliant.engine.slices.slices import Slices


class Lean(TorchFunctionMode):
    """A context for one forward pass; backward may come later, outside of it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    >>> for name, param in model.named_parameters():
    ...     _ = param.requires_grad_(name.endswith("bias"))
    >>> with Lean() as lean:
    ...     loss = model(torch.randn(1, 3, 32, 32)).mean()
    >>> loss.backward()
    >>> lean.not_lean
    {}
    """

    def __init__(self, slices: Slices | None = None) -> None:
        """`slices`: the slices of parameters that are trained, if there are any."""
        super().__init__()
        self._slices = slices

    def __enter__(self) -> Lean:
        self._pass = LeanPass()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pass.decide(None, ())

    @property
    def not_lean(self) -> dict[str, int]:
        """Functions without a rule → the bytes that they saved."""
        return self._pass.not_lean

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        current, kwargs = self._pass, kwargs or {}
        if current.undecided is not None:
            current.decide(func, args)
        if self._slices is not None:
            out = self._slices.call(func, args, kwargs)
            if out is not None:
                return out
        rule = RULES[func]
        if rule is None or not current.is_active:
            return func(*args, **kwargs)
        return rule(current, func, args, kwargs)
