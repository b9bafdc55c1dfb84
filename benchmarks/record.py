"""Results of benchmarks: JSON with hardware, versions and date, and the Markdown table made from it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import pliant

os.environ.setdefault("PLIANT_PROFILES", "off")  # what is published measures for itself; set it to on for a second run

RESULTS = Path(__file__).parent / "results"


def options(doc: str | None, *, device: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version that takes a minute or two")
    parser.add_argument("--out", type=Path, default=None, help="the JSON file; its table is written beside it")
    if device:
        parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser


def out(args: argparse.Namespace, name: str) -> Path:
    """The file that these options ask for."""
    return args.out or place(f"{name}_quick" if args.quick else name, getattr(args, "device", "cpu"))


def place(name: str, device: str = "cpu") -> Path:
    """The usual file for a benchmark on this kind of device."""
    return RESULTS / f"{name}_{'h200' if device == 'cuda' and 'H200' in torch.cuda.get_device_name() else device}.json"


def load(path: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of an earlier, interrupted run with the same setting. A file with another setting is an error."""
    if not path.exists():
        return []
    old = json.loads(path.read_text())
    if old["setting"] != setting:
        raise SystemExit(f"{path} holds results of {old['setting']}, not of {setting}: move it away or give --out.")
    return list(old["cells"])


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a result file, whatever its setting."""
    return list(json.loads(path.read_text())["cells"])


def save(path: Path, setting: dict[str, Any], cells: list[dict[str, Any]], table: str) -> None:
    """Write JSON and table to temporary files, then rename them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"setting": setting, "where": where(setting.get("device", "cpu"), setting.get("threads", 1)), "cells": cells}
    for target, text in ((path, dumps(content)), (path.with_suffix(".md"), heading(content) + table)):
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_text(text)
        os.replace(temporary, target)


def dumps(content: dict[str, Any]) -> str:
    """JSON with one cell per line."""
    head = json.dumps({name: part for name, part in content.items() if name != "cells"}, indent=1).removesuffix("\n}")
    return f'{head},\n "cells": [\n' + ",\n".join(json.dumps(cell) for cell in content["cells"]) + "\n ]\n}\n"


def where(device: str = "cpu", threads: int = 1) -> dict[str, Any]:
    """Hardware, versions, date and commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "hardware": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "pliant": pliant.__version__,
        "commit": commit or None,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def heading(content: dict[str, Any]) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in content["where"].items() if value)
    setting = ", ".join(f"{key} {value}" for key, value in content["setting"].items())
    return f"<!-- generated; do not edit -->\n{facts}\n\n{setting}\n\n"
