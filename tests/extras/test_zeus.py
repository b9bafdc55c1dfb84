"""The real package zeus, as far as a machine without a meter can show it: `make test-extras`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pliant import energy

device = pytest.importorskip("zeus.device")


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two CPU packages and a zone for the whole platform, as Linux shows them, read by the real zeus."""
    from zeus.device.cpu import rapl

    for number, name in enumerate(("package-0", "package-1", "psys")):
        zone = tmp_path / f"intel-rapl:{number}"
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text("262143328850\n")
        (zone / "energy_uj").write_text("1000000\n")
    monkeypatch.setattr(rapl, "RAPL_DIR", str(tmp_path))
    monkeypatch.setattr("zeus.device.cpu._cpus", None)
    rapl.rapl_is_available.cache_clear()
    yield tmp_path
    for cpu in device.get_cpus().cpus:
        cpu.rapl_file.wraparound_tracker._stop()
    rapl.rapl_is_available.cache_clear()


def test_cpu_packages_are_added_up(counters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meter = energy.required("cpu")
    for number, joules in enumerate((4, 6, 500)):
        (counters / f"intel-rapl:{number}" / "energy_uj").write_text(f"{joules * 10**6}\n")
    assert meter.joules() == pytest.approx(8.0) and meter.name == "RAPL counters of package-0 + package-1"
    assert capsys.readouterr().out == ""


def test_a_gpu_is_read_or_the_reason_told(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        meter = energy.required("cuda")
        first = meter.joules()
        assert 0 <= first <= meter.joules() and torch.cuda.get_device_name() in meter.name
    else:
        assert "there is no energy meter for 'cuda'. zeus found: GPU: " in energy.missing("cuda")
        assert energy.meter("cuda") is None
    assert capsys.readouterr().out == ""
