"""Who may import whom: every import of every module of the package, held against one table."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pliant

PACKAGE = Path(pliant.__file__).parent

LEFT = {
    "types",
    "profile",
    "budget",
    "schedule",
    "solve",
    "policy",
    "batches",
    "graph",
    "units",
    "apply",
    "norms",
    "measure",
    "score",
    "engine",
}
LEFT |= {"memory", "undo", "runlog", "drift", "checkpoint", "choice", "clock", "update", "feedback", "markup", "journal"}
LEFT |= {"stepper", "pricing"}

# room → the rooms and the packages outside the standard library that it may import, wherever in its files the import stands
MAY_IMPORT: dict[str, set[str]] = {
    "markup": set(),
    "types": {"markup"},
    "profile": {"types", "markup", "numpy"},
    "budget": {"types"},
    "schedule": {"budget"},
    "solve": {"types", "numpy", "scipy"},
    "policy": {"types", "profile", "budget", "solve", "schedule", "numpy"},
    "batches": {"torch"},
    "memory": {"torch"},
    "clock": {"torch"},
    "update": {"torch"},
    "energy": {"types", "torch"},
    "recorder": {"batches", "memory", "torch", "numpy"},
    "graph": {"batches", "recorder", "torch"},
    "units": {"types", "graph"},
    "apply": {"torch", "numpy"},
    "norms": {"apply", "torch"},
    "charges": {"types", "profile", "graph", "recorder", "numpy"},
    "passes": {"batches", "graph", "recorder", "charges", "norms", "clock", "memory", "torch", "numpy"},
    "trial": {
        "types",
        "profile",
        "batches",
        "graph",
        "charges",
        "apply",
        "norms",
        "clock",
        "memory",
        "update",
        "torch",
        "numpy",
        "scipy",
    },
    "measure": {
        "profile",
        "graph",
        "charges",
        "passes",
        "trial",
        "apply",
        "norms",
        "batches",
        "clock",
        "memory",
        "update",
        "torch",
    }
    | {"roofline"},
    "roofline": {"types", "profile", "clock", "graph", "torch"},
    "survey": {"types", "profile", "batches", "graph", "measure", "roofline", "units", "apply", "torch", "rich"},
    "score": {"types", "apply", "batches", "torch", "numpy"},
    "engine": {
        "types",
        "batches",
        "graph",
        "apply",
        "budget",
        "clock",
        "recorder",
        "norms",
        "update",
        "torch",
        "numpy",
        "triton",
    },
    "undo": {"torch"},
    "runlog": {"torch"},
    "drift": {"types"},
    "feedback": set(),
    "journal": {"types", "profile", "policy", "feedback", "markup"},
    "checkpoint": {"types", "apply", "torch", "safetensors"},
    "choice": {
        "types",
        "profile",
        "batches",
        "budget",
        "policy",
        "graph",
        "measure",
        "apply",
        "norms",
        "drift",
        "feedback",
        "update",
        "torch",
    },
    "stepper": {"engine", "clock", "memory", "update", "torch"},
    "pricing": {"types", "budget", "choice", "engine"},
    "session": LEFT | {"data", "torch"},
    "recipes": {"policy", "budget", "schedule", "score", "solve", "units", "measure", "roofline", "types"},
    "models": {"types", "torch", "safetensors"},
    "data": {"models", "torch", "numpy", "sklearn"},
    "images": {"types", "data", "torch", "numpy", "PIL"},
    "fewshot": {"types", "batches", "budget", "policy", "engine", "recipes", "session", "images", "models", "torch", "numpy"},
    "report": {"types", "runlog", "roofline", "markup"},
    "watch": {"types", "report"},
    "folder": {"types"},
    "task": {"types", "graph", "budget", "policy", "recipes", "session", "data", "images", "models", "torch"},
    "train": {"types", "budget", "policy", "engine", "measure", "energy", "checkpoint", "runlog", "session", "models", "torch"}
    | {"folder", "task", "survey"},
    "compare": {"types", "folder", "task", "train", "roofline", "torch"},
    "explain": {"types", "session"},
    "doctor": {"clock", "memory", "energy", "roofline", "recipes", "session", "torch"},
    "demo": {"session", "recipes", "measure", "data", "models", "task", "torch", "rich"},
    "cli": {
        "train",
        "compare",
        "doctor",
        "task",
        "explain",
        "demo",
        "survey",
        "data",
        "models",
        "report",
        "watch",
        "torch",
        "rich",
        "typer",
    }  # and what `import pliant` offers
    | {"images", "fewshot"},
    "__init__": LEFT | {"session", "recipes", "energy", "roofline"},
}
ANYONE = {"pliant"}  # `from pliant import __version__`: a name of the package itself, not a room


def rooms() -> dict[str, list[Path]]:
    """Modules of the package by room: a folder is one room."""
    out: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        out.setdefault(inside.parts[0].removesuffix(".py"), []).append(path)
    return out


ROOMS = rooms()
NAMES_OF_ROOMS = set(ROOMS) | set(MAY_IMPORT)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(what, line) of each import: a room by its name, any other package by its first name. The standard library is free."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: imports within the package are written in full"
            source = node.module or ""
            named = [f"pliant.{alias.name}" for alias in node.names if source == "pliant" and alias.name in NAMES_OF_ROOMS]
            found = named if source == "pliant" and named else [source]
        else:
            continue
        for name in found:
            first, _, rest = name.partition(".")
            what = rest.partition(".")[0] if first == "pliant" and rest else first
            if what not in sys.stdlib_module_names or first == "pliant":
                yield what, node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    assert room in MAY_IMPORT, f"pliant/{room} is not in the table: say there what it may import"
    # The command sees the package from outside, so whatever the package itself offers is open to it.
    allowed = MAY_IMPORT[room] | ANYONE | {room} | (MAY_IMPORT["__init__"] & public() if room == "cli" else set())
    strays = [
        f"{path.relative_to(PACKAGE.parent)}, line {line}: {what}"
        for path in ROOMS[room]
        for what, line in imports(path)
        if what not in allowed
    ]
    assert not strays, f"{room} may import {', '.join(sorted(MAY_IMPORT[room]))} only"


def public() -> set[str]:
    return set(pliant.__all__)


def test_nothing_on_the_right_is_imported_by_anything_on_the_left() -> None:
    """The table itself has no way around in a circle."""
    inside = {room: MAY_IMPORT[room] & set(MAY_IMPORT) for room in MAY_IMPORT}
    while inside:
        free = [room for room, needs in inside.items() if not needs & set(inside)]
        assert free, f"these import each other: {', '.join(sorted(inside))}"
        for room in free:
            del inside[room]


def test_the_parser_sees_every_way_to_import(tmp_path: Path) -> None:
    file = tmp_path / "room.py"
    file.write_text(
        "import os, numpy as np\nimport torch.nn\nfrom pliant import score, __version__\nfrom pliant.engine import plain\n"
        "import pliant.solve\ndef f():\n    from scipy.optimize import milp\nfrom types import SimpleNamespace\n"
    )
    found = [what for what, _ in imports(file)]
    assert sorted(found) == ["engine", "numpy", "scipy", "score", "solve", "torch"]


HEAVY = ("sklearn", "transformers", "safetensors", "scipy", "rich", "typer", "lightning", "accelerate", "peft", "flwr", "timm")


def test_import_pliant_brings_in_nothing_that_is_optional() -> None:
    code = f"import sys, pliant; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
