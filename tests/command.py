"""The command `pliant` as tests run it: in this process, or in one of its own; never dependent on the terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import set_num_threads
from typer.testing import CliRunner

import pliant
from pliant import cli

WIDE = {"COLUMNS": "300", "FORCE_COLOR": None}
PROCESS = (sys.executable, "-c", "from pliant.cli import main; main()")


def run(arguments: Sequence[str]) -> Any:
    """The command in this process, with a wide terminal. Commands set the number of threads: it is restored."""
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(cli.app, list(arguments), env=WIDE)
    finally:
        set_num_threads(threads)  # also where a test replaces torch's


def text(shown: Any) -> str:
    """All that was printed, as one line without colors."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", shown.output).split())


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH for a process that imports the package under test, and modules in these folders."""
    return os.pathsep.join([*map(str, folders), str(Path(pliant.__file__).parent.parent)])
