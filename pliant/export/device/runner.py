"""Runs an exported program as an app on a device does: load, forward and backward, a step of SGD, save what changed.

Nothing here uses autograd. (The Python bindings of ExecuTorch load torch's libraries; the C++ and Android runtimes do not.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pliant.export.device.errors import ExportError, missing
from pliant.export.device.lower import quiet
from pliant.export.device.step import Trained

Outputs = tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Runner:
    """A loaded program. Gradients and weights are read where the program keeps them, without a copy."""

    def __init__(self, program: bytes | str | os.PathLike[str], trained: Sequence[Trained]) -> None:
        with quiet():
            try:
                from executorch.extension.pybindings import portable_lib
                from executorch.extension.training import get_sgd_optimizer
            except ImportError as error:
                raise missing(error) from error
            loaded = (
                portable_lib._load_for_executorch_from_buffer(program)
                if isinstance(program, bytes)
                else portable_lib._load_for_executorch(os.fspath(program))
            )
        self._module: Any = loaded
        self._make_sgd: Any = get_sgd_optimizer
        self._sgd: Any = None
        self._weights: dict[str, torch.Tensor] = {}
        names = self._module.run_method("__et_training_fqn_forward", ())
        self._order = [{one.program_name: one.name for one in trained}[name] for name in names]
        self._first = int(self._module.run_method("__et_training_gradients_index_forward", ())[0])

    def run(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Outputs (the loss first), gradients and weights. They are the program's own memory: the next run overwrites them."""
        with torch.inference_mode():
            found = self._module.run_method("forward", tuple(inputs), clone_outputs=False)
        count = len(self._order)
        grads = dict(zip(self._order, found[self._first : self._first + count], strict=True))
        weights = dict(zip(self._order, found[self._first + count :], strict=True))
        self._weights = weights
        return found[: self._first], grads, weights

    def step(self, inputs: Sequence[torch.Tensor], sgd: Mapping[str, float]) -> tuple[float, list[torch.Tensor]]:
        """One step of ExecuTorch's SGD. Returns the loss and what the model returned, before the step."""
        outputs, grads, weights = self.run(inputs)
        value, predictions = float(outputs[0]), [output.clone() for output in outputs[1:]]
        if self._sgd is None:
            with quiet():
                self._sgd = self._make_sgd(weights, **sgd)
        self._sgd.step(grads)
        return value, predictions

    def predict(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the model returns. The program has one method, so this computes gradients too and leaves them unused."""
        return [output.clone() for output in self.run(inputs)[0][1:]]

    def weights(self, inputs: Sequence[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copies of the weights that train. A program shows them after its first run, so it needs inputs before that."""
        if not self._weights:
            if inputs is None:
                raise ExportError("a program shows its weights after its first run: give inputs, or take a step first.")
            self.run(inputs)
        return {name: weight.clone() for name, weight in self._weights.items()}

    def load_(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Go on from weights that were trained elsewhere. All of them must train here too."""
        unknown = sorted(set(weights) - set(self._order))
        if unknown:
            raise ExportError(
                f"{unknown[0]!r} is frozen in this program, so it cannot be loaded. Export again from those weights."
            )
        self.weights(inputs)
        for name, value in weights.items():
            if self._weights[name].shape != value.shape:
                raise ExportError(
                    f"{name!r} is {tuple(value.shape)} in the delta and {tuple(self._weights[name].shape)} in this program: "
                    f"they train different channels."
                )
            self._weights[name].copy_(value)
