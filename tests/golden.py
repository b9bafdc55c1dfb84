"""Decisions of every recipe on every zoo model, on the simulated device: what was chosen, when, at what cost.

    python tests/golden.py            # writes tests/golden.json anew, after a change that is meant to change decisions

`test_golden.py` compares with that file, so that moving code around cannot change what is chosen.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from test_laws import ROWS, batch_no, policy_for
from zoo import ZOO, adamw

from pliant import Session

FILE = Path(__file__).with_suffix(".json")
LENGTH = 7  # steps of a run


def decisions(recipe: str, model_name: str) -> list[dict[str, Any]]:
    """The rounds and notes that a short run writes to its log, without what depends on a clock or on rounding."""
    case = ZOO[model_name]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        model, loss, _ = case.make()
        policy = policy_for(recipe, case)
        torch.manual_seed(1)
        with Session(model, adamw(model), loss, policy, correct=False, total_steps=LENGTH, log=log) as session:
            for k in range(LENGTH):
                session.step(batch_no(case, k))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [kept(line) for line in lines if line["event"] in ("start", "round")]


def kept(line: dict[str, Any]) -> dict[str, Any]:
    if line["event"] == "start":
        return {key: line[key] for key in ("event", "policy", "when", "signal", "full", "forward", "units", "costs")}
    units = [unit["name"] for unit in line["units"]]
    return {**{key: line[key] for key in ("event", "round", "step", "cost", "limit", "asked", "split")}, "units": units}


if __name__ == "__main__":
    rows = {f"{recipe}-{model}": decisions(recipe, model) for recipe, model in ROWS}
    lines = (f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
