"""Bytes that live are counted once, from the operation that makes them until they are freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

from pliant.runtime.memory import LiveBytes, StandIns, resident, storage, when_freed

CPU = torch.device("cpu")
KB = 256 * 4  # what 256 numbers take


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Memory must not wait for a collector."""
    gc.disable()
    yield
    gc.enable()


def numbers() -> torch.Tensor:
    return torch.ones(256)


# ---------------------------------------------------------------- storages


def test_the_size_of_a_tensor_is_that_of_its_memory() -> None:
    x, sparse = numbers(), torch.eye(8).to_sparse()
    assert storage(x) == storage(x[3:5]) == storage(x.view(16, 16).t()) == storage(x.detach())
    assert storage(x)[1] == KB and storage(x)[0] != storage(x.clone())[0]
    assert storage(torch.ones(1).expand(1000))[1] == 4
    assert storage(sparse) == (id(sparse), 8 * 8 * 4), "without one storage: its numbers"


def test_what_follows_when_memory_is_freed_waits_for_the_last_view() -> None:
    x, freed = numbers(), []
    watched = when_freed(x, lambda: freed.append("now"))
    view = x[:2]
    del x
    assert not freed
    del view
    assert freed == ["now"]
    del watched


def test_a_watch_may_be_dropped_and_may_be_on_a_tensor_without_one_storage() -> None:
    x, sparse, freed = numbers(), torch.eye(3).to_sparse(), []
    dropped, watched = when_freed(x, lambda: freed.append("dropped")), when_freed(sparse, lambda: freed.append("now"))
    del dropped, x, sparse
    assert freed == ["now"] and watched() is None


# ---------------------------------------------------------------- what lives


def test_what_is_made_counts_and_leaves_when_it_is_freed() -> None:
    x = numbers()
    with LiveBytes(CPU) as live:
        assert live.bytes == 0
        y = x + 1
        assert live.bytes == KB
        z = y + 1
        assert live.bytes == 2 * KB
        del y
        assert live.bytes == KB
        del z
        assert live.bytes == 0
    assert live.peak == 2 * KB


def test_what_was_there_before_does_not_count() -> None:
    x = numbers()
    with LiveBytes(CPU) as live:
        x.view(16, 16).t()
        x.add_(1)
        x[3:5].mul_(2)
    assert (live.bytes, live.peak) == (0, 0)
    del x
    assert live.bytes == 0, "nor when it goes"


def test_views_and_in_place_operations_add_nothing() -> None:
    with LiveBytes(CPU) as live:
        y = numbers()
        assert live.bytes == KB
        view = y.view(16, 16)[2:].t()
        y.add_(1)
        view.mul_(2)
        assert (live.bytes, live.peak) == (KB, KB)
        del y
        assert live.bytes == KB, "a view holds all of it"
        del view
        assert live.bytes == 0


def test_an_operation_with_several_results_counts_each() -> None:
    with LiveBytes(CPU) as live:
        values, places = torch.rand(256).sort()
    assert live.bytes == storage(values)[1] + storage(places)[1] == KB + 2 * KB


def test_the_peak_is_looked_for_anew_after_forgetting() -> None:
    with LiveBytes(CPU) as live:
        x = numbers()
        torch.cat([x, x, x])
        assert (live.bytes, live.peak) == (KB, 4 * KB)
        live.forget()
        assert live.peak == KB, "what still lives"
        x + 1
        assert live.peak == 2 * KB


def test_memory_that_is_used_again_counts_again() -> None:
    with LiveBytes(CPU) as live:
        for _ in range(20):
            numbers()
            assert live.bytes == 0
        kept = [numbers() for _ in range(3)]
    assert live.peak == live.bytes == len(kept) * KB


def test_what_runs_outside_is_not_seen_but_what_is_freed_is() -> None:
    live = LiveBytes(CPU)
    before = numbers()
    with live:
        made = before * 2
    after = made * 2
    assert live.bytes == KB and after.numel() == 256
    del made
    assert live.bytes == 0


def test_two_may_watch_at_once_and_each_sees_what_is_made_while_it_looks() -> None:
    with LiveBytes(CPU) as outer:
        x = numbers()
        with LiveBytes(CPU) as inner:
            y = x + 1
            del y
            z = x + 2
        assert (inner.bytes, inner.peak) == (KB, KB)
    assert (outer.bytes, outer.peak) == (2 * KB, 2 * KB)
    del x, z
    assert (inner.bytes, outer.bytes) == (0, 0)


def test_an_error_inside_ends_the_watching() -> None:
    live = LiveBytes(CPU)
    with pytest.raises(RuntimeError, match="must match"), live:
        numbers() + torch.ones(3)
    numbers() + 1
    assert live.bytes == 0


# ---------------------------------------------------------------- with autograd


def test_what_autograd_keeps_lives_as_long_as_its_graph() -> None:
    weight = numbers().requires_grad_()
    with LiveBytes(CPU) as live:
        value = (weight * 2).exp().sum()  # exp keeps its result
        assert live.bytes == KB + 4
        value.backward()
        assert live.bytes == KB + 4, "the gradient came, what was kept went"
        weight.grad = None
        assert live.bytes == 4
        del value
    assert live.bytes == 0
    assert live.peak == 2 * KB + 8, "what is kept and its gradient; the loss and its own"


@pytest.mark.parametrize(("gradients", "kept"), [(True, 5), (False, 1)])
def test_a_graph_keeps_every_result_and_without_gradients_only_the_last_one_lives(gradients: bool, kept: int) -> None:
    value = numbers().requires_grad_()
    with LiveBytes(CPU) as live, torch.set_grad_enabled(gradients):
        for _ in range(5):
            value = value.exp()
        assert live.bytes == kept * KB
        del value
        assert live.bytes == 0
    assert live.peak == max(kept, 2) * KB


def test_what_the_process_takes_is_told_where_the_system_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = resident()
    assert told is None or told > 10_000_000  # Python and PyTorch alone take more
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_: (_ for _ in ()).throw(OSError))
    assert resident() is None


def test_tensors_without_memory_do_not_count() -> None:
    with LiveBytes(torch.device("cpu")) as live:
        shape = torch.empty(1000, device="meta")
        shape = shape * 2
        real = torch.ones(10)
    assert live.peak == real.numel() * 4 and shape.shape == (1000,)


# ---------------------------------------------------------------- what stands in for what is kept


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))


def test_stand_ins_have_the_shape_and_not_the_memory() -> None:
    model, x = stack(), torch.randn(2048, 64)

    def run() -> tuple[int, list[tuple[torch.Size, torch.dtype]]]:
        with LiveBytes(CPU) as live:
            grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        return live.peak, [(grad.shape, grad.dtype) for grad in grads]

    most, shapes = run()
    with StandIns(model):
        least, same = run()
    assert same == shapes
    kept = x.nbytes
    assert most >= 12 * kept and least <= 8 * kept  # four of them are zeros that all share
    assert run() == (most, shapes)


def test_neighbours_in_time_lie_apart() -> None:
    """Else a processor would find each in its cache, where the last one was."""
    model, x = stack(), torch.randn(256, 64)
    kept: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(value)
            return value.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            kept.append(ctx.saved_tensors[0])
            return grad

    with StandIns(model):
        value = x.requires_grad_()
        for _ in range(6):
            value = Keeps.apply(value * 1.0)
        value.sum().backward()
    places = [tensor.data_ptr() for tensor in kept]
    assert len(kept) == 6 and not any(tensor.any() for tensor in kept)
    assert all(a != b for a, b in pairwise(places)) and len(set(places)) == 4
    assert len({storage(tensor)[0] for tensor in kept}) == 1


def test_indices_and_small_or_own_tensors_are_kept() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 64), nn.Linear(16, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.max_pool1d(self.table(ids), 4).mean(1))

    torch.manual_seed(0)
    model, ids, labels = Looks(), torch.randint(0, 50, (16, 12)), torch.randint(0, 3, (16,))

    def grads() -> list[torch.Tensor]:
        value = nn.functional.cross_entropy(model(ids), labels)
        return list(torch.autograd.grad(value, list(model.parameters())))

    plain = grads()
    with StandIns(model):
        mine = grads()
    for a, b in zip(mine, plain, strict=True):  # what is large here is only the table, an own one, and indices
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strides_and_types_are_those_of_what_was_kept(layout: torch.memory_format, dtype: torch.dtype) -> None:
    image = torch.randn(4, 8, 16, 16, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    with StandIns(nn.Identity()):
        out = torch.sigmoid(image)
    kept = out.grad_fn._saved_result  # type: ignore[union-attr]
    assert (kept.shape, kept.stride(), kept.dtype) == (out.shape, out.stride(), dtype) and not kept.any()
