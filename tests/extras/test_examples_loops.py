"""Every file in `examples/` runs as it is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {"hf_trainer": "transformers", "accelerate_loop": "accelerate", "lightning_fit": "lightning"}
FILES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_and_says_what_it_chose(file: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(file.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    several = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if needed is None else []
    where = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PLIANT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, *several, str(file)], capture_output=True, text=True, env=where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cho") == (1 if needed else 2)
