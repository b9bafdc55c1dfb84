"""Names for parametrized values, the same in every test process; fixtures that several files share."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from pliant.engine.kernels import channels_last
from pliant.engine.kernels.arm import processor as arm
from pliant.engine.prefix import runtimes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite that was started in the background; tests are about Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)

for device in (torch.cuda, torch.xpu):
    if not device.is_available():  # there is nothing to seed, and to note the call stack at every seed takes half a millisecond
        device.random._lazy_call = lambda *_, **__: None

os.environ["PLIANT_PROFILES"] = "off"  # examples in docstrings keep nothing; every test has a cache of its own


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. Where the garbage collector need not walk through them, tests are faster."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(config: Any, val: Any, argname: str) -> str | None:
    name = getattr(val, "name", None)
    return name if isinstance(name, str) else None


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which does not exist yet, with kept profiles switched on."""
    monkeypatch.delenv("PLIANT_PROFILES", raising=False)
    folder = tmp_path_factory.getbasetemp() / "cache" / secrets.token_hex(8)
    monkeypatch.setenv("PLIANT_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def one_dnn() -> Iterator[None]:
    """On ARM processors without bfloat16, the first product of matrices in it makes PyTorch turn oneDNN off for the whole
    process; from then on its convolutions round otherwise than another process's."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


@pytest.fixture(autouse=True)
def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not depend on whether an inference runtime is installed; those in extras/test_runtimes.py are about them."""
    monkeypatch.setattr(runtimes, "_has", lambda name: False)


@pytest.fixture(autouse=True)
def no_custom_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not depend on the processor: custom kernels round otherwise than PyTorch's. Those in test_channels_last.py are
    about the ones for x86-64, those in test_swapped.py and test_depthwise.py about the ones for ARM."""
    monkeypatch.setattr(channels_last, "PAYS_HERE", False)
    monkeypatch.setattr(arm, "SLOW_HERE", False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own with a tiny model and images in it: files are looked for there, and so is the model's module."""
    tiny.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    tiny.forget()
    yield tmp_path
    tiny.forget()
