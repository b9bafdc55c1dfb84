"""Captured steps: what is baked in, what is read anew, what keeps a step eager.

Without a GPU, a stand-in captures: it runs the step once, undoes it, and runs it again at each replay on the buffers that it
was captured with, learning rates included. Where there is a GPU the same tests run on it, too.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant.engine.cuda_graphs.graphs import Graphs, OnCuda, end_capture


class Stand:
    """Captures on the CPU."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def _tensors(self) -> list[torch.Tensor]:
        state = [v for s in self._optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [*self._model.parameters(), *self._model.buffers(), *state]

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        params = list(self._model.parameters())
        found = [None if p.grad is None else p.grad.clone() for p in params]
        before, rng = [(t, t.detach().clone()) for t in self._tensors()], torch.get_rng_state()
        baked = [group["lr"] for group in self._optimizer.param_groups]
        value = work().clone()
        for tensor, was in before:
            tensor.data.copy_(was)  # a capture runs nothing, and is not noticed
        for p, was in zip(params, found, strict=True):
            if was is not None:
                p.grad.copy_(was)
        torch.set_rng_state(rng)
        grads = [p.grad for p in params]

        def replay() -> None:
            users = [group["lr"] for group in self._optimizer.param_groups]
            for group, lr in zip(self._optimizer.param_groups, baked, strict=True):
                group["lr"] = lr
            for p, grad, was in zip(params, grads, found, strict=True):
                p.grad = None if was is None else grad
            versions = [(t, t._version) for t in (*params, *self._model.buffers())]
            try:
                value.copy_(work())
            finally:
                for tensor, version in versions:
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # nor is a replay
                for group, lr in zip(self._optimizer.param_groups, users, strict=True):
                    group["lr"] = lr
            with torch.no_grad():
                for p, grad in zip(params, grads, strict=True):
                    if grad is not None and p.grad is not grad:
                        grad.copy_(p.grad)

        return replay, value


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def net(device: str, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers).double().to(device)  # in double precision rounding does not hide what is wrong


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, device: str, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [
        (torch.randn(size, 6, dtype=torch.float64).to(device), torch.randint(0, 3, (size,)).to(device)) for _ in range(count)
    ]


# Rates that single precision holds: the kernels read it.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.125),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=2**-7),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2**-7, weight_decay=0.1),
}


def graphs_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, of: Any = loss) -> Graphs:
    return Graphs(model, of, optimizer, OnCuda(torch.device("cuda", 0)) if device == "cuda" else Stand(model, optimizer))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, of: Any = loss) -> Callable[[Any], torch.Tensor]:
    def work(batch: Any) -> torch.Tensor:
        value = of(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return work


def train(device: str, name: str, steps: int, captured: bool, schedule: bool = False) -> tuple[list[Any], Any, Graphs]:
    model = net(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
    values = []
    for batch in batches(steps, device):
        optimizer.zero_grad(set_to_none=True)
        values.append(graphs.step(batch, work, choice=0) if captured else work(batch))
        if scheduler is not None:
            scheduler.step()
    return [torch.stack(values), *model.state_dict().values()], optimizer.state_dict(), graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_steps_are_eager_steps(device: str, name: str, schedule: bool) -> None:
    mine, my_state, graphs = train(device, name, 12, captured=True, schedule=schedule)
    plain, its_state, _ = train(device, name, 12, captured=False, schedule=schedule)
    assert (graphs.captures, graphs.replays) == (1, 11)
    close = tolerance(device, name)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, **close)
    assert my_state["param_groups"] == its_state["param_groups"]
    for i, state in its_state["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(my_state["state"][i][key], value, **close)  # device included


def tolerance(device: str, name: str) -> dict[str, float]:
    """On a GPU PyTorch's capturable Adam corrects its bias in single precision."""
    return {"rtol": 1e-5, "atol": 1e-6} if device == "cuda" and "adam" in name else {"rtol": 1e-7, "atol": 1e-9}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_gradients_of_several_batches_gather(device: str, name: str) -> None:
    ends = []
    for captured in (True, False):
        model = net(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        graphs, stream = graphs_of(model, optimizer, device), iter(batches(15, device))
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            for k in range(3):
                work = part_of(model, optimizer, last=k == 2)
                batch = next(stream)
                graphs.step(batch, work, choice=k == 2, first=k == 0) if captured else work(batch)
        assert graphs.replays == (12 if captured else 0)
        ends.append(list(model.state_dict().values()))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, **tolerance(device, name))


def part_of(model: nn.Module, optimizer: torch.optim.Optimizer, last: bool) -> Callable[[Any], torch.Tensor]:
    def work(batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        (value / 3).backward()
        if last:
            optimizer.step()
        return value.detach()

    return work


@pytest.mark.parametrize("device", DEVICES)
def test_choices_batches_and_modes_have_captures_of_their_own(device: str) -> None:
    def run(captured: bool) -> tuple[list[torch.Tensor], Graphs]:
        model = net(device)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
        for n, batch in enumerate(batches(30, device)):
            head_only = n % 10 >= 5
            for param in model[0].parameters():
                param.requires_grad_(not head_only)
            if n == 15:
                model[1].eval()
            if n % 7 == 6:  # the last batch of an epoch
                batch = batch[0][:3], batch[1][:3]
            optimizer.zero_grad(set_to_none=True)
            graphs.step(batch, work, choice=head_only) if captured else work(batch)
        return list(model.state_dict().values()), graphs

    (mine, graphs), (plain, _) = run(True), run(False)
    assert graphs.captures >= 4 and graphs.replays > 15
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, **tolerance(device, "adam"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_was_loaded_is_used(device: str) -> None:
    model = net(device)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
    stream = batches(8, device)
    for batch in stream[:4]:
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch, work, choice=0)
    twin = net(device)
    twin.load_state_dict(model.state_dict())
    other = OPTIMIZERS["momentum"](twin.parameters())
    saved = optimizer.state_dict()
    saved["state"] = {i: {k: v * 2 for k, v in s.items()} for i, s in saved["state"].items()}
    other.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(saved)  # makes new tensors
    for batch in stream[4:]:
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch, work, choice=0)
        other.zero_grad(set_to_none=True)
        step_of(twin, other)(batch)
    assert graphs.captures == 2
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_there_after_a_step(device: str) -> None:
    model = net(device)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
    for batch in batches(4, device):
        twin = net(device)
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch, work, choice=0)
        loss(twin, batch).backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_anew(device: str) -> None:
    model = net(device, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
    batch = batches(1, device)[0]
    values = set()
    for _ in range(8):
        optimizer.zero_grad(set_to_none=True)
        values.add(float(graphs.step(batch, work, choice=0)))
    assert graphs.replays == 7 and len(values) > 5


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def refused(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, of: Any = loss, batch: Any = None) -> str:
    """Why four steps of this are not captured."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    graphs, work = graphs_of(model, optimizer, "cpu", of), step_of(model, optimizer, of)
    for mine in batches(4, "cpu"):
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch or (mine[0].to(next(model.parameters()).dtype), mine[1]), work, choice=0)
    assert graphs.replays == 0 and graphs.why_not is not None
    return graphs.why_not


def test_what_python_has_to_do_keeps_steps_eager() -> None:
    seen: list[float] = []

    def counting_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(0.0)
        return loss(model, batch)

    assert "which a replay would not" in refused(Counting())
    assert "the loss.seen" in refused(net("cpu"), of=counting_loss)
    assert len(seen) == 4  # and is not skipped
    hooked = net("cpu")
    hooked[0].register_forward_hook(lambda *_: None)
    assert "Linear has hooks" in refused(hooked)
    hooked = net("cpu")
    hooked[0].weight.register_hook(lambda grad: grad)
    assert "a parameter has hooks" in refused(hooked)
    model = net("cpu")
    assert "RMSprop" in refused(model, torch.optim.RMSprop(model.parameters(), lr=0.1))

    class Opaque:
        __slots__ = ("pair",)

    held = Opaque()
    held.pair = batches(1, "cpu")[0]
    assert "Opaque" in refused(net("cpu"), of=lambda model, batch: loss(model, batch.pair), batch=held)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_python_holds_are_read_anew(device: str) -> None:
    def run(captured: bool) -> list[torch.Tensor]:
        factor = 1.0

        def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
            return factor * loss(model, batch)

        model = net(device)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        graphs, work = graphs_of(model, optimizer, device, scaled), step_of(model, optimizer, scaled)
        for n, batch in enumerate(batches(16, device)):
            if n == 8:
                factor = 3.0
            if n == 12:
                model[1].momentum = 0.5
            optimizer.zero_grad(set_to_none=True)
            graphs.step(batch, work, choice=0) if captured else work(batch)
        assert graphs.captures == (3 if captured else 0)
        return list(model.state_dict().values())

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_hooks_that_come_later_are_called() -> None:
    model = net("cpu")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    graphs, work = graphs_of(model, optimizer, "cpu"), step_of(model, optimizer)
    calls = []
    for n, batch in enumerate(batches(6, "cpu")):
        if n == 3:
            handle = model[0].register_forward_hook(lambda *_: calls.append(1))
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch, work, choice=0)
    assert len(calls) == 3 and graphs.replays == 2
    handle.remove()
    graphs.step(batch, work, choice=0)
    assert graphs.replays == 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nat …"),
            "operation not permitted when stream is capturing",
        ),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_capture_that_fails_leaves_nothing(error: Exception, said: str) -> None:
    model = net("cpu")
    optimizer = OPTIMIZERS["adam"](model.parameters())

    def failing(work: Callable[[], torch.Tensor]) -> Any:
        work_model = [p.detach().clone() for p in model.parameters()]
        work()
        with torch.no_grad():
            for p, was in zip(model.parameters(), work_model, strict=True):
                p.copy_(was)
        raise error

    graphs, work = Graphs(model, loss, optimizer, failing), step_of(model, optimizer)
    stream = batches(3, "cpu")
    for batch in stream:
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch, work, choice=0)
        for param in model.parameters():
            assert param.grad is not None
    assert graphs.why_not == f"capture failed: {said}"
    assert graphs.captures == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_that_waits_stays_eager_and_nothing_breaks() -> None:
    model = net("cuda")
    optimizer = OPTIMIZERS["momentum"](model.parameters())

    def waiting(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        return value * float(value.item() > -1)

    graphs, work = graphs_of(model, optimizer, "cuda", waiting), step_of(model, optimizer, waiting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(5, "cuda"):
            optimizer.zero_grad(set_to_none=True)
            graphs.step(batch, work, choice=0)
    assert "waits for the GPU" in (graphs.why_not or "") and graphs.captures == 0
    with pytest.raises(RuntimeError):  # had it been captured nonetheless
        graphs._capture(lambda: work(batch))
    torch.randn(3, device="cuda")  # random numbers can still be drawn
    optimizer.zero_grad(set_to_none=True)
    good = Graphs(model, loss, optimizer)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        good.step(batch, step_of(model, optimizer), choice=0)
    assert good.replays == 2


@pytest.mark.parametrize("device", DEVICES)
def test_many_choices_leave_memory_flat(device: str) -> None:
    model = net(device)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
    batch, held = batches(1, device)[0], []
    for choice in range(60):
        model[0].weight.requires_grad_(choice % 2 == 0)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            graphs.step(batch, work, choice=choice)
        if device == "cuda":
            gc.collect()  # what waits for it is not held
        held.append(torch.cuda.memory_allocated() if device == "cuda" else len(graphs._known))
    assert max(held[20:]) <= max(held[:20])
    assert graphs.captures == 60


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_where_room_is_made_the_next_step_is_captured_anew(device: str, name: str) -> None:
    ends, reserved = [], []
    for captured in (True, False):
        model = net(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
        for k, batch in enumerate(batches(12, device)):
            optimizer.zero_grad(set_to_none=True)
            if captured and k in (3, 4, 8):
                before = torch.cuda.memory_reserved() if device == "cuda" else len(graphs._known)
                graphs.make_room()
                reserved.append((before, torch.cuda.memory_reserved() if device == "cuda" else len(graphs._known)))
            graphs.step(batch, work, choice=0) if captured else work(batch)
        ends.append(list(model.state_dict().values()))
        assert not captured or (graphs.captures, graphs.replays) == (4, 11)
    assert all(after < before for before, after in reserved)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, **tolerance(device, name))


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_forgotten_is_captured_again(device: str) -> None:
    """PyTorch captures nothing into memory that no graph is left of."""
    model = net(device)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    graphs, work = graphs_of(model, optimizer, device), step_of(model, optimizer)
    for k, batch in enumerate(batches(9, device)):
        if k in (3, 6):
            graphs.forget()
        optimizer.zero_grad(set_to_none=True)
        graphs.step(batch, work, choice=0)
    assert (graphs.captures, graphs.replays) == (3, 6), graphs.why_not


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_old_graph_is_not_freed_while_another_one_is_captured_on_cuda() -> None:
    """It would break the capture."""

    def captured() -> Graphs:
        model = net("cuda")
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        graphs, work = graphs_of(model, optimizer, "cuda"), step_of(model, optimizer)
        for batch in batches(4, "cuda"):
            optimizer.zero_grad(set_to_none=True)
            graphs.step(batch, work, choice="all")
        return graphs

    often = gc.get_threshold()
    gc.collect()
    try:
        for _ in range(5):
            old: list[Any] = [captured()]
            old.append(old)  # garbage that waits for a collector
            del old
            gc.set_threshold(1, 1, 1)
            again = captured()
            gc.set_threshold(*often)
            assert again.captures == 1 and again.why_not is None
    finally:
        gc.set_threshold(*often)


def test_what_a_capture_takes_is_not_what_eager_steps_take() -> None:
    """Refused steps are no captures under way."""
    model = net("cpu")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    graphs, work = graphs_of(model, optimizer, "cpu"), step_of(model, optimizer)
    for batch in batches(4, "cpu"):
        graphs.step(batch, work, choice="all")
    before = graphs.seconds_per_capture
    assert before > 0 and graphs.refusal is None
    model[0].register_forward_hook(lambda *_: None)
    for batch in batches(6, "cpu"):
        graphs.step(batch, work, choice="all")
    assert graphs.seconds_per_capture == before
    assert graphs.refusal == "a Linear has hooks"


def test_an_empty_capture_does_not_warn_the_user() -> None:
    class Empty:
        def capture_end(self) -> None:
            warnings.warn("The CUDA Graph is empty. This usually means that …", UserWarning, stacklevel=2)

    class Odd:
        def capture_end(self) -> None:
            warnings.warn("another warning", UserWarning, stacklevel=2)

    end_capture(Empty())
    with pytest.warns(UserWarning, match="another warning"):
        end_capture(Odd())
