"""What of a model `torch.compile` or TorchScript has compiled, and why it runs eagerly."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from pliant.core.mode import Mode
from pliant.runtime.compiled import notices_frozen_parameters
from pliant.runtime.torch_internals import is_compiled, recompile_limit


class CompiledParts:
    """Compiled modules of a model, or a compiled loss. Functions that a loss calls are not seen."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._exist = any(is_compiled(code) for code in (loss, *model.modules()))
        self.goes_stale = self._exist and not notices_frozen_parameters()
        self._selections: set[Hashable] = set()
        self.is_scripted = isinstance(model, torch.jit.ScriptModule)  # it takes no hooks
        self.has_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())

    def run(self, selection: Hashable) -> None:
        """A step trains this selection."""
        if self._exist:
            self._selections.add(selection)

    def why_not(self, mode: Mode, has_slices: bool) -> dict[str, str]:
        """Why compiled code runs eagerly in the coming step, if it does."""
        limit = recompile_limit() if self._exist else 0
        if not self._exist or (mode == Mode() and not has_slices and len(self._selections) <= limit and not self.goes_stale):
            return {}
        why = f"each selection is compiled anew, at most {limit} of them: raise torch._dynamo.config.recompile_limit"
        if mode != Mode():
            why = f"compiled code runs eagerly in {mode} steps: use engine='plain'"
        elif has_slices:
            why = "compiled code runs eagerly where channels are chosen"
        elif self.goes_stale:
            why = "compiled code of this PyTorch does not notice what is frozen: use a later version"
        return {"compile": why}
