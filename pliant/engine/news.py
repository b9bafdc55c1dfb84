"""What the engine does not do, each reason told once."""

from __future__ import annotations

from collections.abc import Mapping


class News:
    """Remembers what was told. Functions that are not lean are told one by one."""

    def __init__(self) -> None:
        self.not_lean: set[str] = set()
        self._told: dict[str, str] = {}
        self._told_lean: set[str] = set()

    def tell(self, why_not: Mapping[str, str]) -> list[str]:
        """The reasons that are new."""
        names = self.not_lean - self._told_lean
        self._told_lean |= names
        once = {name: why for name, why in why_not.items() if name != "lean" or not self.not_lean}
        fresh = [f"not {name}: {why}" for name, why in once.items() if self._told.get(name) != why]
        self._told.update(why_not)
        return [*fresh, f"not lean: {as_plain(names)}"] if names else fresh


def as_plain(functions: set[str]) -> str:
    return f"{', '.join(sorted(functions))} keep what plain autograd keeps"
