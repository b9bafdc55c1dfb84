"""The roofline: peaks by a clock that is made up, the cache around them, the arithmetic, and the two plots."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from instances import laws
from torch.utils._python_dispatch import TorchDispatchMode

import pliant.cost.peaks as device_peaks
from pliant import roofline
from pliant.cost.roofline import Peaks, RooflineRow, peaks, roof_seconds, svg_plot, text_plot
from pliant.runtime import clock

SVG = "{http://www.w3.org/2000/svg}"
CPU = torch.device("cpu")
HERE = Peaks(flops=1e11, bandwidth=1e10, device="cpu: toy", dtype="float32", threads=2)  # its ridge: 10 FLOP/byte


class Device(TorchDispatchMode):
    """A clock of a device that is made up: it counts the work instead of doing it."""

    def __init__(self, flops: float, bandwidth: float, start: float = 0.0) -> None:
        super().__init__()
        self.flops, self.bandwidth, self.start = flops, bandwidth, start
        self.sizes: list[int] = []
        self.took = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "mm":
            self.sizes.append(args[0].shape[0])
            self.took = self.start + 2 * args[0].shape[0] ** 3 / self.flops
            return kwargs["out"]
        assert name == "copy_"
        self.took = self.start + 2 * args[0].nbytes / self.bandwidth
        return args[0]

    def __call__(self, work: Callable[[], object]) -> float:
        with self:
            work()
        return self.took


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_peaks, "_COPY_BYTES", {"cpu": 2**20, "cuda": 2**20})
    monkeypatch.setattr(device_peaks, "_SIZES", (8, 16, 32, 64, 128))
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Every measurement that was made; each finds a device twice as fast as the last."""
    made: list[torch.device] = []

    def clock(device: torch.device) -> Device:
        made.append(device)
        return Device(2.0 ** len(made) * 1e6, 1e9)

    monkeypatch.setattr(device_peaks, "clock", clock)
    return made


# ---------------------------------------------------------------- measuring


def test_the_peaks_of_a_known_device_are_found() -> None:
    found = device_peaks.measured(Device(1e12, 5e10), CPU, torch.float64)
    assert found.flops == pytest.approx(1e12)
    assert found.bandwidth == pytest.approx(5e10)
    assert (found.dtype, found.threads) == ("float64", torch.get_num_threads())
    assert found.device.startswith("cpu: ")


def test_matmuls_grow_while_the_rate_rises_and_time_allows() -> None:
    flat, rising = Device(1e12, 1e10), Device(1e12, 1e10, start=1e-3)
    slow = Device(2 * 32**3 / 0.02, 1e10, start=1e-3)  # 64 would take 8 × 0.02 s, five times over
    for device, sizes in ((flat, [8, 16]), (rising, [8, 16, 32, 64, 128]), (slow, [8, 16, 32])):
        device_peaks._matmul_peak(device, CPU, torch.float32)
        assert sorted(set(device.sizes)) == sizes


def test_the_best_of_several_counts() -> None:
    times = iter([5.0, 2.0, 3.0, 4.0])
    assert device_peaks._copy_peak(lambda work: next(times), CPU) == 2 * 2**20 / 2.0


def test_a_coarse_clock_that_misses_the_small_ones() -> None:
    device = Device(1e9, 1e10)

    def coarse(work: Callable[[], object]) -> float:
        return 1e-4 * math.floor(device(work) / 1e-4)

    assert device_peaks._matmul_peak(coarse, CPU, torch.float32) >= 1e9
    assert device.sizes[-1] > 32
    with pytest.raises(ValueError, match="positive"):
        device_peaks.measured(lambda work: 0.0, CPU, torch.float32)


def test_short_of_memory_it_copies_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_peaks, "_COPY_BYTES", {"cpu": 2**23})
    ones, asked = torch.ones, []

    def short(*size: int, **kwargs: Any) -> torch.Tensor:
        asked.append(math.prod(size))
        if math.prod(size) > 2**21:
            raise RuntimeError("can't allocate memory")
        return ones(*size, **kwargs)

    monkeypatch.setattr(torch, "ones", short)
    assert device_peaks._copy_peak(Device(1e9, 1e10), CPU) == pytest.approx(1e10)
    assert asked == [2**23, 2**22, 2**21, 2**21]


def test_without_any_memory_the_error_is_the_allocators_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*size: int, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "ones", none)
    with pytest.raises(RuntimeError, match="none left"):
        device_peaks._copy_peak(Device(1e9, 1e10), CPU)
    with pytest.raises(RuntimeError, match="none left"):
        device_peaks._matmul_peak(Device(1e9, 1e10), CPU, torch.float32)


def test_a_matmul_that_does_not_fit_ends_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones

    def short(*size: int, **kwargs: Any) -> torch.Tensor:
        if size[0] > 32:
            raise torch.OutOfMemoryError("none left")
        return ones(*size, **kwargs)

    monkeypatch.setattr(torch, "ones", short)
    rising = Device(1e12, 1e10, start=1e-3)
    assert device_peaks._matmul_peak(rising, CPU, torch.float32) > 0
    assert max(rising.sizes) == 32


def test_the_real_clock_runs_the_work_once_and_leaves_no_trace() -> None:
    ran: list[int] = []
    assert device_peaks.clock(CPU)(lambda: ran.append(1)) >= 0
    assert ran == [1]
    before = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    found = peaks(again=True)
    assert found.flops > 0
    assert found.bandwidth > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before[1:]


@pytest.mark.parametrize("threads", [1, 2])
def test_which_clock_depends_on_the_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(clock.time, "thread_time", iter([1.0, 2.0]).__next__)
    monkeypatch.setattr(clock.time, "perf_counter", iter([1.0, 4.0]).__next__)
    assert device_peaks.clock(CPU)(lambda: None) == {1: 1.0, 2: 3.0}[threads]


def test_cuda_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            told.append(f"record on {stream}")

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append(f"wait for {device}"))
    assert device_peaks.clock(torch.device("cuda:1"))(lambda: told.append("work")) == 0.25
    mark, wait = "record on the stream of cuda:1", "wait for cuda:1"
    assert told == [wait, mark, "work", mark, wait]


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (
            "processor\t: 0\nmodel name\t: Toy 3000 @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Toy 3000 @ 2 GHz\n",
            " Toy 3000 @ 2 GHz",
        ),
        ("processor\t: 0\nCPU part\t: 0xd08\n\nModel\t\t: Toy Pi 4\n", " Toy Pi 4"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", " 0xd0c"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_processor_has_a_name(cpuinfo: str | None, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, errors: str) -> str:
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(device_peaks.Path, "read_text", read)
    monkeypatch.setattr(clock.platform, "machine", lambda: "toy64")
    monkeypatch.setattr(clock.platform, "processor", lambda: "")
    assert clock.device_name(CPU) == f"cpu: toy64{model}"


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.int64), ("cpu", torch.complex64)])
def test_what_cannot_be_measured_is_refused(device: str, dtype: torch.dtype, measurements: list[torch.device]) -> None:
    with pytest.raises(ValueError, match="peaks are"):
        peaks(device, dtype)
    assert measurements == []


# ---------------------------------------------------------------- the cache


def test_peaks_are_measured_once_kept_and_measured_again_on_request(measurements: list[torch.device], tmp_path: Path) -> None:
    first = peaks()
    assert peaks("cpu") == peaks(CPU) == first and len(measurements) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["peaks.json"]
    second = peaks(again=True)
    assert second.flops == pytest.approx(2 * first.flops) and peaks() == second and len(measurements) == 2


def test_what_the_peaks_depend_on_has_a_line_of_its_own(
    measurements: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [peaks(), peaks(dtype=torch.float64)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.append(peaks())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    found.append(peaks())
    monkeypatch.setattr(device_peaks, "device_name", lambda device: "cpu: another")
    found.append(peaks())
    assert len({p.flops for p in found}) == len(measurements) == 5


def test_on_cuda_tf32_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy 1")
    keys = []
    for precision in ("ieee", "tf32"):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
        keys.append(device_peaks._key(torch.device("cuda"), torch.float32))
    assert [key[-10:] for key in keys] == ["tf32 False", " tf32 True"]
    assert all(key.startswith("cuda: Toy 1, ") for key in keys)


BROKEN = [
    b"",
    b"\xff\xfe",
    b"[1, 2]",
    b'{"half',
    b"null",
    {"flops": 1.0},
    {"flops": "fast", "bandwidth": 1, "device": "", "dtype": "", "threads": 1},
    {"flops": math.nan, "bandwidth": 1.0, "device": "", "dtype": "", "threads": 1},
    {"flops": 0, "bandwidth": 1.0, "device": "", "dtype": "", "threads": 1},
    None,
    7,
]


@pytest.mark.parametrize("content", BROKEN, ids=repr)
def test_a_broken_cache_is_measured_anew_and_mended(content: Any, measurements: list[torch.device], tmp_path: Path) -> None:
    file = tmp_path / "cache" / "peaks.json"
    file.parent.mkdir()
    line = json.dumps({device_peaks._key(CPU, torch.float32): content}).encode() if not isinstance(content, bytes) else content
    file.write_bytes(line)
    found = peaks()
    assert peaks() == found
    assert len(measurements) == 1
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, "another device": {"from": "the future"}}))
    peaks(again=True)
    assert json.loads(file.read_text())["another device"] == {"from": "the future"}, "other lines stay"


def test_a_cache_that_cannot_be_written_fails_nothing(
    measurements: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with monkeypatch.context() as patch:
        patch.setenv("PLIANT_CACHE", str(tmp_path / "file" / "cache"))
        assert peaks().flops < peaks().flops
        assert len(measurements) == 2

    def full(path: Path, content: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(device_peaks, "write_aside", full)
    assert peaks().flops > 0


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert device_peaks._cache_file() == tmp_path / "cache" / "peaks.json"
    monkeypatch.delenv("PLIANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert device_peaks._cache_file() == tmp_path / "xdg" / "pliant" / "peaks.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert device_peaks._cache_file() == tmp_path / ".cache" / "pliant" / "peaks.json"


def test_without_a_home_it_measures_each_time(measurements: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("PLIANT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(device_peaks.Path, "home", homeless)
    peaks()
    peaks()
    assert len(measurements) == 2


# ---------------------------------------------------------------- the arithmetic


def test_peaks_come_back_from_json() -> None:
    assert Peaks.from_json(json.loads(json.dumps(HERE.to_json()))) == HERE
    assert HERE.ridge == 10


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan])
def test_a_peak_is_positive(bad: float) -> None:
    with pytest.raises(ValueError, match="flops="):
        Peaks(bad, 1.0, "", "", 1)
    with pytest.raises(ValueError, match="bandwidth="):
        Peaks(1.0, bad, "", "", 1)


def test_a_row_is_bound_by_compute_or_by_memory() -> None:
    conv, norm = (
        RooflineRow("conv", seconds=0.5, macs=10**10, moved=10**8),
        RooflineRow("norm", seconds=0.02, macs=5 * 10**7, moved=10**8),
    )
    assert (conv.flops, conv.intensity, conv.rate) == (2 * 10**10, 200, 4e10)
    assert (conv.bound(HERE), norm.bound(HERE), norm.intensity) == ("compute", "memory", 1)
    assert (conv.share(HERE), norm.share(HERE)) == (pytest.approx(0.4), pytest.approx(0.5))


def test_rows_with_nothing_in_them() -> None:
    still, empty, fast = RooflineRow("a", 1.0, 0, 0), RooflineRow("b", 0.0, 10, 10), RooflineRow("c", 1e-9, 10**6, 1)
    assert (still.intensity, still.rate, still.share(HERE), still.bound(HERE)) == (0, 0, 0, "memory")
    assert (empty.rate, empty.share(HERE)) == (0, 0)
    assert RooflineRow("d", 1.0, 10, 0).bound(HERE) == "compute"
    assert RooflineRow("e", 1.0, 10, 2).bound(HERE) == "compute"  # at the ridge
    assert fast.share(HERE) > 1  # told as it is


def test_the_least_time_and_the_launch() -> None:
    assert roof_seconds(10**11, 0, HERE) == 2.0
    assert roof_seconds(0, 10**10, HERE, launch=0.25) == 1.25
    assert roof_seconds(0, 0, HERE) == 0


positive = st.floats(1e-9, 1e3)
counts = st.integers(0, 10**15)
names = st.text(st.sampled_from("ab.0 <>&\"'\n\t\x00\x07é漢😀\ud800"), max_size=8)
some_rows = st.lists(st.builds(RooflineRow, names, st.just(0.0) | positive, counts, counts), max_size=60)
some_peaks = st.builds(Peaks, st.floats(1e6, 1e16), st.floats(1e6, 1e14), names, st.just("float32"), st.integers(1, 256))


@laws(60)
@given(counts, counts, counts, counts, some_peaks)
def test_the_least_time_never_falls_when_work_is_added(macs: int, moved: int, more: int, bytes: int, at: Peaks) -> None:
    assert roof_seconds(macs + more, moved + bytes, at) >= roof_seconds(macs, moved, at)


@laws(60)
@given(st.builds(RooflineRow, names, positive, counts, counts.filter(bool)), some_peaks)
def test_the_roof_is_the_rate_over_the_share(row: RooflineRow, at: Peaks) -> None:
    chart = roofline._Chart([], at)
    if row.macs:
        assert row.rate / row.share(at) == pytest.approx(chart.roof(row.intensity))
    assert (row.bound(at) == "memory") == (row.flops < row.moved * at.ridge)


@laws(60)
@given(some_peaks, st.floats(1e-6, 1e6), st.floats(1, 1e3))
def test_the_roof_never_falls_and_stays_under_both_peaks(at: Peaks, intensity: float, further: float) -> None:
    roof = roofline._Chart([], at).roof
    assert roof(intensity) <= roof(intensity * further) <= at.flops
    assert roof(intensity) <= intensity * at.bandwidth


# ---------------------------------------------------------------- the plots

ROWS = [
    RooflineRow("stem.weight", 0.01, 4 * 10**8, 10**7),
    RooflineRow("norm.weight", 0.001, 10**6, 10**7),
    RooflineRow("head.weight", 0.02, 5 * 10**8, 10**6),
    RooflineRow("embedding", 0.1, 0, 10**6),
    RooflineRow("unused", 0.0, 10**6, 10**6),
]


def test_the_text_plot_shows_roof_units_and_axes() -> None:
    plot = text_plot(ROWS, HERE)
    lines = plot.splitlines()
    grid = [line.partition("|")[2] for line in lines if "|" in line]
    assert len(grid) == 14
    assert max(map(len, grid)) <= 72 - 9
    assert all(sum(letter in line for line in grid) == 1 for letter in "abc")
    assert any("///" in line or "//" in line for line in grid)
    assert any("---" in line for line in grid)
    assert "GFLOP/s" in lines[1]
    assert "ridge 10 FLOP/byte" in lines[1]
    assert lines[17] == "FLOP/byte".rjust(72)
    assert lines[16].split() == ["0.1", "1", "10", "100", "1000"] and len(lines[16]) == 72
    assert "b norm.weight: 0.2 FLOP/byte, 2 GFLOP/s, 100% of the roof, memory-bound" in lines
    assert lines[-2:] == ["no FLOPs: embedding", "no seconds or no bytes: unused"]


def test_a_unit_at_the_roof_stands_on_it() -> None:
    at_ridge = RooflineRow("x", 1.0, 5 * 10**10, 10**10)
    assert roofline._Chart([at_ridge], HERE).roof(at_ridge.intensity) == pytest.approx(at_ridge.rate)
    line = next(line for line in text_plot([at_ridge], HERE).splitlines() if "|" in line and "a" in line)
    assert "a-----" in line


def test_units_that_meet_and_more_units_than_letters() -> None:
    plot = text_plot([ROWS[0], ROWS[0]], HERE)
    assert all(part in plot for part in ("+", "a stem.weight", "b stem.weight"))
    plot = text_plot([RooflineRow(f"unit{n}", 0.01, 10**6 * (n + 1), 10**6) for n in range(60)], HERE)
    assert all(part in plot for part in ("Z unit51: ", "* unit52: ", "* unit59: "))


def test_plots_without_rows_show_the_roof() -> None:
    assert "---" in text_plot([], HERE)
    root = ET.fromstring(svg_plot([], HERE))
    assert len(root.findall(f"{SVG}path[@class='roof']")) == 1 and root.findall(f"{SVG}circle") == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_plots_of_one_row(row: RooflineRow) -> None:
    assert row.name in text_plot([row], HERE)
    assert row.name in svg_plot([row], HERE)


@pytest.mark.parametrize(("width", "height"), [(28, 18), (72, 7), (0, 0), (-5, 10)])
def test_a_plot_without_room_is_refused(width: int, height: int) -> None:
    assert text_plot(ROWS, HERE, width=29, height=8)
    with pytest.raises(ValueError, match="at least 29 × 8"):
        text_plot(ROWS, HERE, width, height)


def test_many_names_below_are_wrapped() -> None:
    rows = [RooflineRow(f"blocks.{n}.norm-a.weight", 1.0, 0, 8) for n in range(40)]
    below = text_plot(rows, HERE).partition("no FLOPs: ")[2]
    assert below.split() == [f"blocks.{n}.norm-a.weight" + "," * (n < 39) for n in range(40)]
    assert max(map(len, below.splitlines())) <= 72
    root = ET.fromstring(svg_plot(rows, HERE))
    assert max(float(text.attrib["y"]) for text in root.findall(f"{SVG}text")) < float(root.attrib["viewBox"].split()[3])


def test_the_svg_says_what_it_shows() -> None:
    root = ET.fromstring(svg_plot(ROWS, HERE, title="Toy & <model>"))
    assert root.tag == f"{SVG}svg"
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"].startswith("Toy & <model>. cpu: toy, float32, 2 threads. peaks 100 GFLOP/s")
    dots = {dot.findtext(f"{SVG}title"): dot for dot in root.findall(f"{SVG}circle")}
    assert len(dots) == 3
    told = "norm.weight: 0.2 FLOP/byte, 2 GFLOP/s, 100% of the roof, memory-bound"
    assert dots[told].attrib["class"] == "memory"
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"Toy & <model>", "FLOP/byte", "GFLOP/s", "no FLOPs: embedding", "no seconds or no bytes: unused"} <= set(texts)


def test_the_svg_needs_nothing_else_and_follows_the_colour_scheme() -> None:
    plot = svg_plot(ROWS, HERE)
    assert "currentColor" in plot
    assert "prefers-color-scheme: dark" in plot
    assert plot.count("http") == 1  # the namespace
    assert not any(word in plot for word in ("href", "url(", "@import", "<script", "<image"))


@laws(60)
@given(some_rows, some_peaks, names, st.integers(29, 120), st.integers(8, 40))
def test_any_rows_can_be_plotted(rows: list[RooflineRow], at: Peaks, title: str, width: int, height: int) -> None:
    chart = roofline._Chart(rows, at)
    plot = text_plot(rows, at, width, height)
    assert sum(line[8:9] == "|" for line in plot.split("\n")[2 : height - 2]) == height - 4
    root = ET.fromstring(svg_plot(rows, at, title))
    assert len(root.findall(f"{SVG}circle")) == len(chart.rows)
    assert len(chart.rows) + sum(map(len, chart.left_out.values())) == len(rows)
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    for dot in root.findall(f"{SVG}circle"):
        assert 0 < float(dot.attrib["cx"]) < wide
        assert 0 < float(dot.attrib["cy"]) < high
    heights = [float(point.split()[1]) for point in root.find(f"{SVG}path[@class='roof']").attrib["d"][1:].split(" L")]  # type: ignore[union-attr]
    assert heights == sorted(heights, reverse=True)  # the y of an SVG runs downwards
