"""Runs what a wheel installed, in an environment that holds nothing else: `make test-extras`. Not a test of pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import pliant

NET = """
from torch import nn


def net(classes=2):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes))
"""


def run(*arguments: str, place: str) -> str:
    script = Path(sys.executable).with_name("pliant")
    environment = {**os.environ, "PYTHONPATH": place, "PLIANT_CACHE": str(Path(place, "cache"))}
    done = subprocess.run([script, *arguments], cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pliant {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    home = Path(pliant.__file__).parent
    assert home.is_relative_to(sys.prefix), f"{home} is not the package that was installed"
    assert (home / "py.typed").exists()
    with tempfile.TemporaryDirectory() as place:
        Path(place, "small_net.py").write_text(NET)
        random = np.random.default_rng(0)
        bits = np.packbits(random.random((40, 64)) < np.repeat([[0.2], [0.8]], 20, axis=0), axis=1)
        np.savez(Path(place, "dots.npz"), bits=bits, label=np.repeat([0, 1], 20), classes=np.array(["light", "dark"]))
        assert pliant.__version__ in run("--version", place=place) and "meta-train" in run("--help", place=place)
        assert "the library runs here" in run("doctor", "--no-peaks", place=place)
        what = ("--model", "small_net:net", "--data", "dots.npz", "--size", "8", "--batch", "8", "--device", "cpu")
        told = run("train", *what, "--scratch", "--macs", "0.9", "--epochs", "1", "--out", "run", "--json", place=place)
        assert json.loads(told)["evaluations"]
        run("report", "run", place=place)
        page = Path(place, "run", "report.html").read_text(encoding="utf-8")
        assert "Selection map" in page and "color-scheme" in page and '"use strict"' in page
    print(f"pliant {pliant.__version__} was installed from its wheel and runs")


if __name__ == "__main__":
    main()
