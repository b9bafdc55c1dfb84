"""With `memory=`, the process itself stays small: freed memory is returned, and no full step of the whole batch is taken."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pliant import Budget, BudgetError, Session, measure, recipes
from pliant.cost import limited
from pliant.cost.node_timing import NodeTiming
from pliant.runtime import batches, code_pages, heap, memory
from pliant.runtime.memory import LiveBytes, kernel_copies, resident_peak
from pliant.session import resident

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.Flatten(), nn.Linear(1024, 5)
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def few(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 3, 16, 16), torch.arange(size) % 5


def session(**how: Any) -> Session:
    model = net()
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, recipes.pliant(**how))


# ---------------------------------------------------------------- code


def mapping(where: str, mode: str, path: str, **amounts: int) -> str:
    """As Linux describes it."""
    return f"{where} {mode} 00000000 08:01 11 {path}\n" + "".join(f"{name}: {kb} kB\n" for name, kb in amounts.items())


SMAPS = (
    mapping("00001000-00003000", "r-xp", "/lib/code.so", Rss=8, Anonymous=0, Swap=0)
    + mapping("00003000-00004000", "r--p", "/lib/code.so", Rss=4, Anonymous=0, Swap=0)
    + mapping("00004000-00005000", "r--p", "/lib/code.so", Rss=4, Anonymous=4, Swap=0)  # written to
    + mapping("00005000-00006000", "r--p", "/lib/code.so", Rss=4, Anonymous=0, Swap=4)  # written to, and swapped out
    + mapping("00006000-00007000", "rw-p", "/lib/code.so", Rss=4, Anonymous=0, Swap=0)
    + mapping("00007000-00008000", "r-xp", "/lib/old code.so (deleted)", Rss=4)
    + mapping("00008000-0000a000", "r--p", "/data/weights.safetensors", Rss=8, Anonymous=0, Swap=0)
    + mapping("0000a000-0000b000", "r-xp", "[vdso]", Rss=4, Anonymous=0, Swap=0)
)


def test_only_what_libraries_have_as_in_their_files_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was written to, what may be written to, what the system does not tell of, data, and what is in no file."""
    advised = []

    def madvise(start: int, size: int, advice: int) -> int:
        advised.append((start, size, advice))
        return 0

    monkeypatch.setattr(Path, "read_text", lambda *_, **__: SMAPS)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    assert code_pages.forget_code() == 12 * 1024
    assert advised == [(0x1000, 0x2000, 4), (0x3000, 0x1000, 4)]


@pytest.mark.parametrize("text", ["", "no such thing\n", "Rss: 4 kB\n"])
def test_elsewhere_nothing_is_forgotten(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert code_pages.forget_code() == 0


def test_forgotten_code_runs_as_before() -> None:
    model, batch = net(), few()
    expected = loss(model, batch)
    code_pages.forget_code()
    assert torch.equal(loss(model, batch), expected)


@pytest.mark.parametrize(("how", "times"), [({"memory": "64MB"}, 1), ({"macs": 0.9}, 0)])
def test_a_session_forgets_code_when_its_memory_is_limited(
    how: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(resident, "forget_code", lambda: calls.append(1))
    with session(**how) as opened:
        for _ in range(3):
            opened.step(few())
    assert len(calls) == times


# ---------------------------------------------------------------- the heap


class Libc:
    """A C library that notes how it is called."""

    def __init__(self) -> None:
        self.set: dict[int, int] = {}
        self.trims = 0

    def mallopt(self, option: int, value: int) -> int:
        self.set[option] = value
        return 1

    def malloc_trim(self, keep: int) -> int:
        self.trims += 1
        return 1


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libc]:
    found = Libc()
    monkeypatch.setattr(heap, "_glibc", lambda: found)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert heap._held == 0
    yield found
    assert heap._held == 0


SMALL = {-1: 1 << 17, -3: 1 << 17}
USUAL = {-1: 1 << 26, -3: 1 << 25}


def test_freed_memory_is_returned_while_anyone_asks_for_it(libc: Libc) -> None:
    heap.give_back()
    assert not libc.trims, "nobody asked"
    heap.hold()
    heap.hold()
    assert libc.set == SMALL and libc.trims == 2
    heap.release()
    assert libc.set == SMALL
    heap.release()
    assert libc.set == USUAL


def test_thresholds_of_the_user_come_back(libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5000")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.mmap_threshold=0x2000")
    heap.hold()
    heap.release()
    assert libc.set == {-1: 5000, -3: 0x2000}
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "much")
    heap.hold()
    heap.release()
    assert libc.set[-1] == USUAL[-1]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: Any) -> Any:
        raise TypeError  # as on Windows

    heap._glibc.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    try:
        heap.hold()
        heap.give_back()
        heap.release()
        assert heap._glibc() is None
    finally:
        heap._glibc.cache_clear()


def test_a_session_with_a_memory_budget_returns_memory_until_it_is_closed(libc: Libc) -> None:
    with session(memory="1MB") as open_session:
        assert libc.set == SMALL
        open_session.budget = Budget()
        assert libc.set == USUAL, "no longer limited"
        open_session.budget = Budget(memory="1MB")
        assert libc.set == SMALL
        open_session.step(few())
        trims = libc.trims
        open_session.step(few())
        assert libc.trims == trims + 2, "before each step, and between its passes"
    assert libc.set == USUAL


def test_other_sessions_leave_the_heap_alone(libc: Libc) -> None:
    with session(macs=0.9) as open_session:
        open_session.step(few())
    assert not libc.set and not libc.trims


def test_a_session_that_nobody_closes_lets_go_of_the_heap(libc: Libc) -> None:
    forgotten = session(memory="1MB")
    forgotten.step(few())
    del forgotten
    gc.collect()
    assert libc.set == USUAL


# ---------------------------------------------------------------- measuring


def test_nothing_is_timed_where_memory_alone_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeTiming, "times", None)
    with session(memory="1MB") as open_session:
        open_session.step(few())
        assert open_session.profile.full.seconds == 0 < open_session.profile.full.bytes
        with pytest.raises(BudgetError, match=r"holds no seconds.*open the session"):
            open_session.budget = Budget(memory="1MB", time=0.5)


def test_seconds_are_measured_on_as_many_samples_as_fit() -> None:
    with session(memory="100KB", time=1.0) as open_session:
        open_session.step(few(32))
        profile = open_session.profile
    assert 2 <= profile.origin["samples"] < 32
    assert profile.full.seconds > 0
    assert profile.origin["batch"].startswith("32×"), "it is a profile of the whole batch"
    model, batch = net(), few(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shapes = measure.spared(model, optimizer, loss, batch, graph=measure.read_graph(model, loss, batch, kernels=True))
    assert profile.full.bytes == shapes.full.bytes, "bytes are those of all samples"
    with session(memory="1GB", time=1.0) as open_session:
        open_session.step(few(32))
        assert "samples" not in open_session.profile.origin, "all of them fit"


def test_a_loss_that_needs_the_whole_batch_is_measured_with_it() -> None:
    def whole(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) != 16:
            raise ValueError("16 samples, please")
        return loss(model, batch)

    model = net()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), whole, recipes.pliant(time=1.0, memory="50KB")) as found:
        found.step(few(16))
        assert "samples" not in found.profile.origin and found.profile.full.seconds > 0


def test_seconds_of_a_part_are_scaled_and_those_of_the_optimizer_are_not() -> None:
    model, batch = net(), few()
    optimizer, graph = torch.optim.SGD(model.parameters(), lr=0.01), measure.read_graph(model, loss, batch)
    passes = NodeTiming(model, loss, batch, graph, dict(model.named_parameters()), measure.BatchNormModes(model, "chosen"))
    times = passes.times(1)[0].with_update(1.0, 2.0, 3.0)
    more = times.of_more(4)
    assert more.forward == 4 * times.forward and (more.inputs == 4 * times.inputs).all()
    assert (more.fixed, more.per_tensor, more.per_byte) == (1.0, 2.0, 3.0)
    part = measure.timed(model, optimizer, loss, batch, repeats=1, samples=2)
    assert part.origin["samples"] == 2 and part.params == measure.counted(model, optimizer, loss, batch).params


def test_a_part_of_a_batch_keeps_its_structure() -> None:
    x, y = few()
    part = batches.part({"x": x, "y": [y, torch.tensor(3.0)], "name": "few"}, 3)
    assert part["x"].shape[0] == len(part["y"][0]) == 3
    assert part["y"][1] == 3.0 and part["name"] == "few"
    assert (
        limited._that_fit(net(), measure.counted(net(), torch.optim.SGD(net().parameters()), loss, few()), None, Budget())
        is None
    )


# ---------------------------------------------------------------- copies inside of convolutions


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if oneDNN ran every convolution, whatever the processor."""
    monkeypatch.setattr(memory, "uses_onednn", lambda convolution: True)


def convolved(x: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    arguments = [x, torch.ones(8, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    return arguments, CONVOLUTION(*arguments)


@pytest.mark.usefixtures("onednn")
def test_a_convolution_copies_what_it_reads_and_writes_unless_it_is_channels_last() -> None:
    x = torch.ones(4, 4, 64, 64)
    arguments, out = convolved(x)
    assert kernel_copies(CONVOLUTION, arguments, out) == (x.nbytes, out.nbytes)
    back = [out, *arguments[:2], None, *arguments[3:], [True, True, False]]
    assert kernel_copies(BACKWARD, back, None) == (x.nbytes, out.nbytes)
    assert kernel_copies(torch.ops.aten.relu.default, [x], x) == (0, 0)
    last, out = convolved(x.to(memory_format=torch.channels_last))
    assert kernel_copies(CONVOLUTION, last, out) == (0, 0)
    small, out = convolved(x[:1, :, :16, :16])
    assert kernel_copies(CONVOLUTION, small, out) == (0, 0), "that is nothing to a process"


@pytest.mark.usefixtures("onednn")
def test_the_price_of_a_step_has_the_copies_that_a_measured_one_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(4)))
    batch = torch.randn(4, 4, 64, 64)
    size = batch.nbytes

    def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    priced, seen, alone = {}, {}, {}
    for kernels in (False, True):
        graph = measure.read_graph(model, mean, batch, "as-is", kernels)
        priced[kernels] = measure.spared(model, optimizer, mean, batch, graph=graph)
        live = LiveBytes(torch.device("cpu"), kernels=kernels)
        with live:
            mean(model, batch).backward()
        seen[kernels] = live.peak
        model.zero_grad()
        alone[kernels] = measure.inference_bytes(model, mean, batch, kernels)
    close = {"abs": size / 10}
    assert alone[True] == pytest.approx(3 * size, **close), "input, output and a copy"
    assert [priced[kernels].inference for kernels in (False, True)] == pytest.approx([alone[False], alone[True]], **close)
    whole = [priced[kernels].full.bytes + priced[kernels].inference for kernels in (False, True)]
    assert seen[True] - seen[False] == pytest.approx(2 * size, **close), "a weight gradient copies both"
    assert whole[1] - whole[0] == pytest.approx(2 * size, **close)


# ---------------------------------------------------------------- a process

SCRIPT = """
import copy
import torch
from torch import nn
from pliant import Session, recipes
from pliant.runtime.memory import resident_peak

torch.set_num_threads(1)
torch.manual_seed(0)
cheap = [nn.BatchNorm2d(8), nn.ReLU()] * 4  # as many bytes as convolutions, in a fraction of the time
layers = [copy.deepcopy(layer) for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), *cheap)]
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
batch = torch.randn(48, 3, 64, 64), torch.arange(48) % 5
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with torch.no_grad():
    loss(model, batch)
start = resident_peak()
with Session(model, optimizer, loss, recipes.pliant(memory="16MB"), total_steps=8) as session:
    for _ in range(4):
        session.step(batch)
    assert session.selection.round == 1 and len(session.selection.units) > 1, "layers were chosen, after the head"
print("rise", resident_peak() - start)
"""


@pytest.mark.skipif(resident_peak() is None or heap._glibc() is None, reason="needs Linux and glibc")
def test_the_peak_of_a_process_rises_by_what_was_asked_and_some_constant(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLIANT_PROFILES": "off", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    rise = int(done.stdout.split("rise")[1])
    assert rise < 50e6, f"{rise / 1e6:.0f} MB"
