"""Which parameters the user wants trainable, whatever a session has set meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from pliant.runtime.trainable import found, restore_


class UserFlags:
    """Notices what the user freezes or unfreezes while a session is open.

    A flag that is not what the session set is what the user wants. To freeze what is frozen already changes no flag, and cannot
    be noticed.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        self._wanted = found(model)
        self._params = params  # that can be chosen
        self._set = dict(self._wanted.requires_grad)
        self._has_chosen = False
        self.frozen: frozenset[str] = frozenset()  # of these, by the user
        self._names = {param: name for name, param in model.named_parameters()}

    def remember(self) -> None:
        """The session has set flags for a selection."""
        self._set = {param: param.requires_grad for param in self._set}
        self._has_chosen = True

    def heed_(self) -> list[str]:
        """Take in what changed since. Returns what to say of it.

        What was unfrozen waits for the next selection, or for the next session if it was frozen when this one began. Until then
        it stays frozen.
        """
        changed = {param: param.requires_grad for param, flag in self._set.items() if param.requires_grad != flag}
        if not changed:
            return []
        before = self.frozen
        self._want(changed)
        for param, flag in changed.items() if self._has_chosen else ():
            if flag:
                param.requires_grad_(False)
        self._set = {param: param.requires_grad for param in self._set}
        late = {self._names[param] for param, flag in changed.items() if flag} - set(self._params)
        texts = [f"you froze {', '.join(sorted(self.frozen)) or 'nothing any more'}"] if self.frozen != before else []
        return texts + ([f"frozen when the session began, so not chosen in it: {', '.join(sorted(late))}"] if late else [])

    def _want(self, flags: Mapping[nn.Parameter, bool]) -> None:
        self._wanted = replace(self._wanted, requires_grad={**self._wanted.requires_grad, **flags})
        self.frozen = frozenset(name for name, param in self._params.items() if not self._wanted.requires_grad[param])

    def load(self, frozen: Collection[str]) -> None:
        """Go on where the user had frozen these."""
        self._want({param: name not in frozen for name, param in self._params.items()})

    def restore_(self) -> None:
        """Every parameter is as the user wants it."""
        restore_(self._wanted)
        self._set = dict(self._wanted.requires_grad)
