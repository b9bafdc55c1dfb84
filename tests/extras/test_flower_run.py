"""`flwr run examples/fleet` on Flower's processes: in its simulation, and with SuperNodes of which one is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LONGEST = 600.0  # seconds; a busy machine takes some minutes
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")


class Flower:
    """Processes of Flower with a home folder of their own. All of them, and their children, are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_port()
        here = f"[superlink]\ndefault = 'here'\n\n[superlink.here]\naddress = '127.0.0.1:{self.port}'\ninsecure = true\n"
        (folder / "config.toml").write_text(here)
        shutil.copytree(ROOT / "examples" / "fleet", folder / "fleet", ignore=shutil.ignore_patterns("__pycache__"))
        self.environment = os.environ | {
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PLIANT_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **how: Any) -> subprocess.Popen[str]:
        log = (self.folder / f"{len(self.started)}.log").open("w")
        how = {"stdout": log, "stderr": subprocess.STDOUT} | how
        process = subprocess.Popen(command, env=self.environment, text=True, start_new_session=True, **how)
        log.close()
        self.started.append(process)
        return process

    def link(self, *options: str) -> None:
        """Start a SuperLink, and wait until it answers."""
        command = ("flower-superlink", "--insecure", "--port", str(self.port), "--disable-runtime-dependency-installation")
        process, end = self.start(*command, *options), time.monotonic() + LONGEST
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert process.poll() is None and time.monotonic() < end, self.logs()
                time.sleep(0.2)

    def node(self, number: int, of: int) -> subprocess.Popen[str]:
        options = ("--superlink", f"127.0.0.1:{self.port}", "--port", str(_free_port()))
        config = f"partition-id={number} num-partitions={of}"
        return self.start("flower-supernode", "--insecure", *options, "--node-config", config)

    def run(self, *options: str) -> Iterator[str]:
        """The lines of `flwr run`; it must end well."""
        command = ("timeout", str(LONGEST), "flwr", "run", str(self.folder / "fleet"), "here", "--stream", *options)
        process = self.start(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            yield from process.stdout
        assert process.wait() == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self.started:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill −9 of a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Flower]:
    found = Flower(tmp_path)
    yield found
    found.end()


def rounds(lines: Iterator[str]) -> Iterator[str]:
    return (line.strip() for line in lines if line.startswith("round "))


def test_the_example_runs_in_the_simulation_of_flower(flower: Flower) -> None:
    flower.link("--simulation")
    options = ("--federation-config", "num-supernodes=3", "--run-config", "rounds=2 steps=4 alpha=1.0")
    seen = list(rounds(flower.run(*options)))
    assert len(seen) == 3, seen
    assert all("| 3 clients, 0 refused, 0 late" in line for line in seen[1:])


def test_a_killed_device_is_missed_for_a_round_and_comes_back(flower: Flower) -> None:
    flower.link()
    nodes = [flower.node(number, of=2) for number in range(2)]
    seen = []
    for line in rounds(flower.run("--run-config", "rounds=4 steps=4 alpha=1.0")):
        seen.append(line)
        if len(seen) == 2:  # the first round is over
            kill(nodes[1])
            flower.node(1, of=2)
    assert len(seen) == 5 and "| 2 clients, 0 refused" in seen[1] and "| 2 clients, 0 refused" in seen[-1], seen
