"""How far the peak resident memory of a process rises while it trains: `python benchmarks/memory.py --resident`.

Each cell runs in a process of its own, with one thread. The process imports torch and Pliant, builds the network and its
optimizer (SGD with momentum), takes one training step of a two-layer network, and runs inference on the batch. From there on
the rise of the peak (`VmHWM`) counts, until the session is closed: reading the graph, measuring, probing, solving and training.

| column | meaning |
|---|---|
| asked | `memory=`; "–" is plain full training |
| predicted | bytes of a step of the last selection beyond inference |
| measured | the same, of tensors and copies inside of convolutions, as the session measures it |
| code | bytes of libraries, as in their files, that the process gives back when the session is opened |
| first step, all steps | the rise of the peak after the first step, and until the session is closed |
| hard limit | whether the run survives with `RLIMIT_DATA` at `VmData` at the peak of inference plus what was asked plus 32 MB |

A session knows the number of its steps, so that layers are chosen after the head has trained alone for a few of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MB = 1_000_000
SLACK = 32 * MB  # of a hard limit
FULL = [
    *({"network": "mobilenet_v2", "batch": 48, "asked": asked} for asked in (None, "64MB", "32MB")),
    {"network": "mobilenet_v2", "batch": 48, "asked": "64MB", "time": 0.5},
    *({"network": "mobilenet_v2", "batch": 8, "asked": asked} for asked in (None, "32MB")),
    *({"network": "mcunet", "batch": 1, "asked": asked} for asked in (None, "1MB")),
]
QUICK = [
    *({"network": "mobilenet_v2_0.35", "batch": 16, "asked": asked} for asked in (None, "8MB")),
    *({"network": "mcunet", "batch": 1, "asked": asked} for asked in (None, "1MB")),
]


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:", 1)[1].split(maxsplit=1)[0]) * 1024


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell, in this process."""
    import gc
    import resource
    import time

    import nets
    import torch
    from torch import nn

    from pliant import Session, recipes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, size, pixels = cell["network"], cell["batch"], cell["pixels"]
    model, batch = nets.build(name, pixels), nets.batch(name, size, pixels)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    step(
        small,
        torch.optim.SGD(small.parameters(), lr=1e-4, momentum=0.9),
        nets.loss,
        (torch.randn(2, 3, 8, 8), torch.tensor([0, 1])),
    )
    model.eval()
    before = status("VmPeak")
    with torch.no_grad():
        nets.loss(model, batch)
    model.train()
    gc.collect()
    inference = status("VmPeak") - status("VmSize") if status("VmPeak") > before else 0  # returned again since its peak
    asked, start, out = cell["asked"], status("VmHWM"), dict[str, Any]()
    if cell["hard"]:
        most = status("VmData") + inference + int(float((asked or "32MB").removesuffix("MB")) * MB) + SLACK
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    def note(steps: int) -> None:
        out["all"] = status("VmHWM") - start
        if steps == 1:
            out["first"], out["first_seconds"] = out["all"], time.process_time() - begun

    begun = time.process_time()
    if asked is None:
        for k in range(cell["steps"]):
            step(model, optimizer, nets.loss, batch)
            note(k + 1)
        return out
    recipe = recipes.pliant(memory=asked, time=cell.get("time"))
    code = status("RssFile")
    with Session(model, optimizer, nets.loss, recipe, total_steps=cell["steps"]) as session:
        out["code"] = max(code - status("RssFile"), 0)
        for k in range(cell["steps"]):
            session.step(batch)
            note(k + 1)
        last = session.rounds[-1]
        out |= {"predicted": last.predicted_bytes, "measured": last.measured_bytes}
        out |= {"units": len(session.selection.units), "of_units": len(session.units)}
    note(cell["steps"])
    return out


def step(model: Any, optimizer: Any, loss: Any, batch: Any) -> None:
    """One step of plain training."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def alone(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell, in a process of its own; what it died of, if it did."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PLIANT_PROFILES": "off"}
    command = [sys.executable, __file__, json.dumps(cell)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if not cell["hard"]:
        raise SystemExit(f"{cell}: {last}")
    return {"died": last[:200]}


def measured(cell: dict[str, Any]) -> dict[str, Any]:
    """One row: what the process takes, and whether it survives a hard limit."""
    hard = alone({**cell, "hard": True})
    return {**cell, **alone({**cell, "hard": False}), "died": hard.get("died")}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| network | batch | asked | chosen | predicted | measured | code | first step | all steps | hard limit |",
        "|" + "---|" * 10,
    ]
    for r in rows:
        asked = (r["asked"] or "–") + (f", time {r['time']}" if r.get("time") else "")
        sizes = (r.get(key) for key in ("predicted", "measured", "code", "first", "all"))
        live = ["–" if size is None else f"{size / MB:.1f} MB" for size in sizes]
        chosen = f"{r['units']} of {r['of_units']} layers" if "units" in r else "everything"
        hard = "survives" if r["died"] is None else "dies"
        lines.append(f"| {r['network']} | {r['batch']} | {asked} | {chosen} | {' | '.join(live)} | {hard} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
