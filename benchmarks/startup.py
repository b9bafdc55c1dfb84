"""CPU seconds until the command answers: help and version, against Python alone. Exits with 1 if help takes too long.

    python benchmarks/startup.py

Every command runs in a process of its own, in turn with the others; the fastest of its runs counts.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import record

MOST = 0.5  # seconds of help beyond Python alone
CALL = "from pliant.cli import main; main()"
CASES = {
    "python -c pass": ["-c", "pass"],
    "pliant --help": ["-c", CALL, "--help"],
    "pliant --version": ["-c", CALL, "--version"],
    "pliant train --help": ["-c", CALL, "train", "--help"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(cells: list[dict[str, Any]]) -> str:
    alone = cells[0]["seconds"]
    rows = ["| command | CPU seconds | beyond Python alone |", "|---|--:|--:|"]
    rows += [f"| `{cell['name']}` | {cell['seconds']:.2f} | {cell['seconds'] - alone:.2f} |" for cell in cells]
    return "\n".join(rows) + "\n"


def main() -> int:
    args = record.options(__doc__, device=False).parse_args()
    out, runs = record.out(args, "startup"), 3 if args.quick else 10
    fastest = dict.fromkeys(CASES, float("inf"))
    for _ in range(runs + 1):  # the first run fills the caches of the disk
        for name, arguments in CASES.items():
            fastest[name] = min(fastest[name], cpu_seconds(arguments))
    cells = [{"name": name, "seconds": seconds} for name, seconds in fastest.items()]
    record.save(out, {"runs": runs, "quick": args.quick}, cells, table(cells))
    print(table(cells))
    taken = fastest["pliant --help"] - fastest["python -c pass"]
    if taken > MOST:
        print(f"MISSED: help takes {taken:.2f} s beyond Python alone, at most {MOST} s")
    return int(taken > MOST)


if __name__ == "__main__":
    sys.exit(main())
