"""How a profile is written down: its fields as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pliant.core import schema
from pliant.core.mode import Mode
from pliant.core.schema import NUMBER, Either
from pliant.core.types import Cost
from pliant.cost.charge import Charge, ChargeKind

_FORMAT = "pliant.profile/7"

_MAYBE_NUMBER = Either(None, NUMBER)
COST = {"seconds": NUMBER, "bytes": int, "macs": int, "joules": _MAYBE_NUMBER}
_CHARGE = {
    "kind": str,
    "cost": {str: NUMBER},
    "params": [str],
    "via": [int],
    "live": Either(None, (int, int)),
    "lean": Either(None, bool),
    "node": Either(None, int),
    "name": str,
}
_PROFILE = {
    "base": COST,
    "charges": [_CHARGE],
    "head": [str],
    "origin": {str: Any},
    "coverage": _MAYBE_NUMBER,
    "uncounted": [str],
    "moments": [int],
    "plain": Either(None, COST),
    "checks": [(NUMBER, NUMBER, NUMBER)],
    "mode": {"lean": bool, "prefix": bool, "graphs": bool, "cached": bool},
    "spared": NUMBER,
    "other_seconds": [NUMBER],
    "shapes": {str: [int]},
    "transposed": [str],
    "watts": _MAYBE_NUMBER,
    "prefix_saves": NUMBER,
}
_ADDED: dict[str, Any] = {"transposed": [], "watts": None, "prefix_saves": 0.0}  # later: an older profile has none


def to_json(profile: Any) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "base": asdict(profile.base),
        "charges": [_charge_to_json(charge) for charge in profile.charges],
        "head": list(profile.head),
        "origin": dict(profile.origin),
        "coverage": profile.coverage,
        "uncounted": list(profile.uncounted),
        "moments": list(profile.moments),
        "plain": None if profile.plain is None else asdict(profile.plain),
        "checks": [list(check) for check in profile.checks],
        "mode": asdict(profile.mode),
        "spared": profile.spared,
        "other_seconds": list(profile.other_seconds),
        "shapes": {name: list(shape) for name, shape in profile.shapes.items()},
        "transposed": list(profile.transposed),
        "watts": profile.watts,
        "prefix_saves": profile.prefix_saves,
    }


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a profile by name, from what `to_json` made of it; another format is an error."""
    found = data.get("format") if isinstance(data, Mapping) else None
    if found != _FORMAT:
        raise ValueError(f"not a Pliant profile: format is {found!r}, expected {_FORMAT!r}")
    data = {**_ADDED, **data}
    schema.check(_PROFILE, data, "profile")
    return {
        "charges": tuple(_charge_of(charge) for charge in data["charges"]),
        "base": Cost(**data["base"]),
        "head": tuple(data["head"]),
        "origin": data["origin"],
        "coverage": data["coverage"],
        "uncounted": tuple(data["uncounted"]),
        "moments": tuple(data["moments"]),
        "plain": Cost(**data["plain"]) if data["plain"] else None,
        "checks": tuple((predicted, fastest, slowest) for predicted, fastest, slowest in data["checks"]),
        "mode": Mode(**data["mode"]),
        "shapes": {name: tuple(shape) for name, shape in data["shapes"].items()},
        "spared": data["spared"],
        "other_seconds": tuple(data["other_seconds"]),
        "transposed": tuple(data["transposed"]),
        "watts": data["watts"],
        "prefix_saves": data["prefix_saves"],
    }


def _charge_to_json(charge: Charge) -> dict[str, Any]:
    return {
        "kind": charge.kind.value,
        "cost": {key: value for key, value in asdict(charge.cost).items() if value},
        "params": list(charge.params),
        "via": list(charge.via),
        "live": None if charge.live is None else list(charge.live),
        "lean": charge.lean,
        "node": charge.node,
        "name": charge.name,
    }


def _charge_of(data: Mapping[str, Any]) -> Charge:
    live = tuple(data["live"]) if data["live"] else None
    kind, cost, params, via = ChargeKind(data["kind"]), Cost(**data["cost"]), tuple(data["params"]), tuple(data["via"])
    return Charge(kind, cost, params, via, live, data["lean"], data["node"], data["name"])
