"""Rows by sample id: what goes in comes back, in order, in its layout, and never more of it than the limit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from instances import laws

from pliant.engine.prefix import feature_cache as module
from pliant.engine.prefix.feature_cache import Features

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_FIRST", 64)
    yield


def values(count: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100
    return drawn > 0 if dtype == torch.bool else drawn.abs().to(dtype)


@laws(60)
@given(data=st.data())
def test_what_comes_back_is_what_went_in_and_never_more_than_the_limit(data: st.DataObject) -> None:
    kinds = data.draw(
        st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=3)
    )
    limit = data.draw(st.integers(1, 6000))
    features = Features(limit)
    known: dict[int, list[torch.Tensor]] = {}
    first = data.draw(st.sampled_from([1, 64, 1024, 4 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FIRST", first)
        for turn in range(data.draw(st.integers(1, 6))):
            ids = data.draw(st.lists(st.integers(0, 40), max_size=12))
            given = tuple(values(len(ids), tuple(shape), dtype, seed=turn) for shape, dtype in kinds)
            features.put(ids, given)
            for place, name in enumerate(ids):
                known.setdefault(name, [value[place] for value in given])
            assert features.bytes <= limit
            assert features.bytes == sum(
                pool.numel() * pool.element_size() for chunk in features._chunks for pool in chunk.pools
            )
            for name in list(known):
                if features.get([name], "cpu") is None:
                    del known[name]  # left out: may come again, with other values
        held = list(known)
        assert len(features) == len(held)
        if held:
            asked = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=20))
            got = features.get(asked, "cpu")
            assert got is not None
            for value, (tensor, (shape, dtype)) in enumerate(zip(got, kinds, strict=True)):
                assert tensor.dtype == dtype
                assert tensor.shape == (len(asked), *shape)
                assert torch.equal(tensor, torch.stack([known[name][value] for name in asked]))


def test_samples_that_do_not_fit_are_left_out_and_those_that_are_in_stay() -> None:
    features = Features(10 * 4)
    features.put(range(8), (torch.arange(8.0),))
    features.put(range(6, 14), (torch.arange(106.0, 114.0),))
    assert len(features) == 10
    assert features.bytes == 40
    (got,) = features.get([9, 7, 0, 8], "cpu") or ()
    assert got.tolist() == [109.0, 7.0, 0.0, 108.0]
    assert features.get([10], "cpu") is None


@pytest.mark.usefixtures("small_chunks")
def test_growing_moves_nothing() -> None:
    features = Features("1MB")
    where: dict[int, int] = {}
    for start in range(0, 3000, 7):
        features.put(range(start, start + 7), (torch.arange(start, start + 7.0).unsqueeze(1).expand(-1, 5),))
        for number, chunk in enumerate(features._chunks):
            assert where.setdefault(number, chunk.pools[0].data_ptr()) == chunk.pools[0].data_ptr()
    assert 3 <= len(where) <= 6
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    (got,) = features.get(order, "cpu") or ()
    assert torch.equal(got, order.float().unsqueeze(1).expand(-1, 5))


def test_another_key_drops_everything_and_the_same_key_nothing() -> None:
    features = Features("1MB")
    features.begin(("layer3", 5))
    features.put([0], (torch.ones(1, 2),))
    features.begin(("layer3", 5))
    assert len(features) == 1
    features.begin(("layer4", 5))
    assert len(features) == features.bytes == 0
    features.put([0], (torch.ones(1, 3, dtype=torch.int32),))  # rows of another kind are fine now
    features.clear()
    assert len(features) == features.bytes == 0
    assert features.get([0], "cpu") is None


def test_hits_and_misses_count_samples() -> None:
    features = Features("1MB")
    features.put([0, 1], (torch.ones(2),))
    features.get([0, 1, 0], "cpu")
    features.get([0, 2], "cpu")
    assert (features.hits, features.misses) == (3, 2)


@pytest.mark.parametrize(
    "ids", [[3, 1, 2], ["a", "b", "c"], [(0, 1), (0, 2), (1, 1)], torch.tensor([5, 6, 4]), torch.tensor([5, 6, 4]).unbind()]
)
def test_kinds_of_ids(ids: list[Hashable] | torch.Tensor) -> None:
    features = Features("1MB")
    features.put(ids, (torch.arange(3),))
    for same in (ids, [id.item() for id in ids] if isinstance(ids, torch.Tensor) else ids):
        (got,) = features.get(same, "cpu") or ()
        assert got.tolist() == [0, 1, 2]


LAYOUTS = {
    "contiguous": lambda: torch.randn(6, 3, 4, 5),
    "channels_last": lambda: torch.randn(6, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_1x1": lambda: torch.randn(6, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(6, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(6, 4, 3).transpose(1, 2),
    "expanded": lambda: torch.randn(6, 1, 3).expand(6, 2, 3),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_rows_is_kept(layout: str, half: bool) -> None:
    value = LAYOUTS[layout]()
    features = Features("1MB", half=half)
    features.put(range(6), (value,))
    (got,) = features.get(range(6), "cpu") or ()
    assert got.stride() == value.stride() or layout == "expanded"
    assert torch.equal(got, value.bfloat16().float() if half else value)


def test_what_is_given_back_is_the_callers() -> None:
    features = Features("1MB")
    value = torch.ones(3, 2)
    features.put([0, 1, 2], (value,))
    value.zero_()
    for ids in ([0, 1, 2], [1]):
        (got,) = features.get(ids, "cpu") or ()
        assert torch.equal(got, torch.ones_like(got))
        got.zero_()


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_keeps_wide_floats_in_two_bytes(dtype: torch.dtype) -> None:
    value = values(50, (7,), dtype)
    features = Features(10**6, half=True)
    features.put(range(50), (value,))
    (got,) = features.get(range(50), "cpu") or ()
    assert got.dtype == dtype
    if dtype in (torch.float32, torch.float64):
        assert features._chunks[0].pools[0].dtype == torch.bfloat16
        assert torch.all((got - value).abs() <= value.abs() * torch.finfo(torch.bfloat16).eps / 2)
    else:
        assert torch.equal(got, value)


def test_half_holds_twice_as_many() -> None:
    held = {}
    for half in (False, True):
        features = Features(4000, half=half)
        features.put(range(1000), (torch.zeros(1000, 4),))
        held[half] = len(features)
    assert held == {False: 250, True: 500}


def test_gradients_and_inference_mode_leave_no_mark() -> None:
    features = Features("1MB")
    features.put([0, 1], (torch.ones(2, 3, requires_grad=True) * 2,))
    with torch.inference_mode():
        features.put([2, 3], (torch.ones(2, 3),))
        (inside,) = features.get([0, 2], "cpu") or ()
    features.put([4], (torch.ones(1, 3),))
    (got,) = features.get([0, 3, 4], "cpu") or ()
    for tensor in (inside, got):
        assert not tensor.requires_grad
        assert not tensor.is_inference()
        weight = torch.ones(3, requires_grad=True)
        (tensor @ weight).sum().backward()
        assert weight.grad is not None


def test_rows_of_another_kind_are_refused() -> None:
    features = Features("1MB")
    features.put([0], (torch.ones(1, 2, 3), torch.ones(1, dtype=torch.int64)))
    for wrong in [(torch.ones(1, 2, 4), torch.ones(1, dtype=torch.int64)), (torch.ones(1, 2, 3), torch.ones(1))]:
        with pytest.raises(ValueError, match=r"beside rows of float32\[2, 3\], int64\[\]. Call begin with another key"):
            features.put([1], wrong)
    with pytest.raises(ValueError, match="another key"):
        features.put([1], (torch.ones(1, 2, 3),))
    assert len(features) == 1


@pytest.mark.parametrize("given", [(torch.ones(3, 2),), (torch.ones(2), torch.ones(1)), (torch.tensor(1.0),), ()])
def test_ids_and_rows_of_different_number_are_refused(given: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ValueError, match=r"2 ids came with .*one row per id"):
        Features("1MB").put([0, 1], given)
    with pytest.raises(ValueError, match=r"shape \(2, 1\)"):
        Features("1MB").get(torch.zeros(2, 1), "cpu")


@pytest.mark.parametrize("limit", ["much", "0.5", "5ms", 0, -1, 0.5, True])
def test_limits_that_are_none_are_refused(limit: int | str) -> None:
    with pytest.raises(ValueError, match="not an amount of memory"):
        Features(limit)
    assert [Features(text).limit for text in ("64MB", "2GiB", "1.5KB")] == [64_000_000, 2 << 30, 1500]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("lives", ["cpu", "cuda"])
@pytest.mark.usefixtures("small_chunks")
def test_rows_live_and_are_asked_for_anywhere(lives: str, half: bool) -> None:
    features = Features("10MB", half=half, device=lives)
    value = torch.randint(200, (500, 4, 3, 3)).float().cuda().to(memory_format=torch.channels_last)
    for start in range(0, 500, 50):
        features.put(range(start, start + 50), (value[start : start + 50],))
    order = torch.randperm(500)
    for device in ("cpu", "cuda"):
        (got,) = features.get(order, device) or ()
        assert got.device.type == device
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got.cpu(), value.cpu()[order])
