"""Who may import whom: every import of every module of the package, held against one table."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pliant

PACKAGE = Path(pliant.__file__).parent

# room → the rooms that it may import, in the order in which a step is decided and run
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "runtime": {"core"},
    "graph": {"core", "runtime"},
    "cost": {"core", "runtime", "graph"},
    "signals": {"core", "runtime", "graph"},
    "planning": {"core", "graph", "cost", "signals"},
    "engine": {"core", "runtime", "graph"},
    "session": {"core", "runtime", "graph", "cost", "signals", "planning", "engine"},
    "integrations": {"core", "runtime", "graph", "cost", "signals", "planning", "engine", "session"},
    "export": {"core", "runtime", "graph", "cost", "signals", "planning", "engine", "session"},
    "apps": {"core", "runtime", "graph", "cost", "signals", "planning", "engine", "session", "export"},
    "cli": {"core", "runtime", "cost", "planning", "session", "export", "apps"},
}
# packages outside the standard library: what every room may import, and what one room may beside it
EVERYWHERE_BUT_CORE = {"torch", "numpy"}
BESIDES = {
    "planning": {"scipy"},
    "cost": {"scipy"},
    "engine": {"triton", "onnx", "onnxruntime", "openvino"},
    "session": {"safetensors"},
    "integrations": {"transformers", "accelerate", "lightning", "pytorch_lightning", "flwr", "safetensors"},
    "export": {"executorch", "onnx", "onnxruntime", "safetensors"},
    "apps": {"safetensors", "rich", "sklearn", "scipy", "PIL", "jinja2"},
    "cli": {"rich", "typer"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    out = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = modules()
FILES = [name for name in MODULES if name.partition(".")[2].partition(".")[0] in MAY_IMPORT]
DOORS = {"pliant", "pliant.moved"}  # they offer what the rooms hold


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of each import, wherever in the file it stands; the standard library is free."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: imports within the package are written in full"
            source = node.module or ""
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner if inner in MODULES else source), node.lineno


def test_every_folder_is_a_room_and_every_module_lives_in_one() -> None:
    assert {path.name for path in PACKAGE.iterdir() if any(path.rglob("*.py"))} == set(MAY_IMPORT)
    assert set(MODULES) - set(FILES) == DOORS


def test_a_module_imports_only_what_its_room_may() -> None:
    wrong = []
    for name in FILES:
        room = name.split(".")[1]
        packages = set() if room == "core" else EVERYWHERE_BUT_CORE | BESIDES.get(room, set())
        for what, line in imports(MODULES[name]):
            first, _, rest = what.partition(".")
            inside = first == "pliant" and (not rest or rest.partition(".")[0] in MAY_IMPORT[room] | {room})
            if not inside and first not in sys.stdlib_module_names and first not in packages:
                wrong.append(f"{name}, line {line}: {what}")
    assert wrong == []


def test_nothing_on_the_right_is_imported_by_anything_on_the_left() -> None:
    rooms = list(MAY_IMPORT)
    assert all(rooms.index(other) < rooms.index(room) for room, others in MAY_IMPORT.items() for other in others)


def test_no_module_imports_itself_by_way_of_others() -> None:
    inside = {name: {what for what, _ in imports(path) if what in MODULES} for name, path in MODULES.items()}
    left = {name: needs - DOORS for name, needs in inside.items() if name not in DOORS}
    while left:
        free = [name for name, needs in left.items() if not needs & set(left)]
        assert free, f"these import each other: {', '.join(sorted(left))}"
        for name in free:
            del left[name]


def test_the_parser_sees_every_way_to_import(tmp_path: Path) -> None:
    file = tmp_path / "room.py"
    file.write_text(
        "import os, numpy as np\nimport torch.nn\nfrom pliant import signals, __version__\n"
        "from pliant.engine.engine import Engine\nimport pliant.core\ndef f():\n    from scipy.optimize import milp\n"
    )
    found = sorted(what for what, _ in imports(file))
    assert found == sorted(
        ["os", "numpy", "torch.nn", "pliant", "pliant.signals", "pliant.engine.engine", "pliant.core", "scipy.optimize"]
    )


HEAVY = ("sklearn", "transformers", "safetensors", "scipy", "rich", "typer", "lightning", "accelerate", "peft", "flwr", "timm")


def test_import_pliant_brings_in_nothing_that_is_optional() -> None:
    code = f"import sys, pliant; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_public_modules_keep_their_short_names() -> None:
    from pliant.data import with_ids
    from pliant.score import Signal

    from pliant import report

    assert with_ids is pliant.with_ids and Signal is pliant.score.Signal and report.__name__ == "pliant.apps.report"
