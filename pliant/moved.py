"""Public modules that live in a room keep the short names that users import: `from pliant.score import Signal`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ROOM_OF = {
    "pliant.data": "pliant.apps.data",
    "pliant.energy": "pliant.runtime.energy",
    "pliant.fewshot": "pliant.apps.fewshot",
    "pliant.images": "pliant.apps.data.images",
    "pliant.losses": "pliant.runtime.losses",
    "pliant.measure": "pliant.cost.measure",
    "pliant.models": "pliant.apps.models",
    "pliant.recipes": "pliant.planning.recipes",
    "pliant.report": "pliant.apps.report",
    "pliant.roofline": "pliant.cost.roofline",
    "pliant.runlog": "pliant.session.run_log",
    "pliant.schedule": "pliant.core.schedule",
    "pliant.score": "pliant.signals",
    "pliant.solve": "pliant.planning.solve",
    "pliant.train": "pliant.apps.train",
    "pliant.units": "pliant.graph.units",
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in ROOM_OF else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(ROOM_OF[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the module was imported under its real name."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install_short_names() -> None:
    """From now on `import pliant.score` and `from pliant import report` find the room that the module lives in."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before a folder that an older version left behind is taken for a package
