"""`session.why_not`: what the engine does not do here, and why. Each reason is reported once."""

from __future__ import annotations

from collections.abc import Mapping

from pliant.core.mode import Mode
from pliant.engine.modes import NAMES, Asked
from pliant.engine.prefix.prefix import Prefix

_OWN_LOOP = "the loop is your own: session.step runs steps that way"
_SHARDED = "parameters are spread over processes (fully_shard), which gathers and frees them around each layer"
_NO_IDS = "the batch does not name its samples: give ids, or wrap the dataset in pliant.with_ids"


def reasons(
    asked: Asked,
    mode: Mode,
    prefix: Prefix,
    no_graphs: str | None,
    not_lean: set[str],
    differentiates: bool,
    cuda: bool,
    short: bool,
    own_loop: bool,
    no_ids: bool,
    shards: bool,
) -> dict[str, str]:
    """What does not serve, and why. `no_graphs` says why no step is captured, `short` that memory is limited."""
    out = prefix.why_not(mode.prefix) if mode.prefix or not own_loop else {}
    if prefix.features is not None and not mode.cached:
        off = _NO_IDS if no_ids and asked.may("prefix") else "the prefix engine is off"
        out["cache"] = _OWN_LOOP if own_loop else prefix.reasons.get("cache", off)
    if asked.may("graphs") and (cuda or not asked.is_auto):
        if no_graphs is None and short and not mode.graphs:
            no_graphs = "the limit on memory leaves no room for what a captured step holds"
        if no_graphs is not None:
            out["graphs"] = no_graphs
        if own_loop and not asked.is_auto:
            out["graphs"] = _OWN_LOOP
    if not_lean:
        out["lean"] = as_plain(not_lean)
    if differentiates and asked.may("lean") and (short or not asked.is_auto):
        out["lean"] = "the lean engine does not support create_graph=True, which the loss uses"
    if shards:
        out |= {name: _SHARDED for name in NAMES if asked.may(name) and not asked.is_auto}
        out |= {"int8": _SHARDED} if prefix.asks_int8 else {}
    return out


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
