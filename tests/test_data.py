"""The digits and their batches: proportions, seeds, random states that stay as they were; batches that know their samples."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import sys
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from pliant.apps.data.digits import Digits, Split, batches, digits
from pliant.apps.models import PIXEL_STATS
from pliant.runtime import sample_ids
from pliant.runtime.sample_ids import ids_of, with_ids


@pytest.fixture(scope="module")
def small() -> Digits:
    return digits(size=16)


def numbered(count: int) -> Split:
    """Samples that carry their own number, so that one can see where each went."""
    numbers = torch.arange(count)
    return Split(numbers.float().reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2).contiguous(), numbers)


def test_digits_are_split_in_proportion_and_normalised_for_the_backbone(small: Digits) -> None:
    assert [len(split) for split in (small.train, small.validation, small.test)] == [1000, 297, 500]
    images, (mean, std) = small.train.images, PIXEL_STATS
    assert images.shape == (1000, 3, 16, 16) and images.dtype == torch.float32
    assert small.train.labels.dtype == torch.int64 and small.classes == 10
    assert images.min().item() == pytest.approx((0 - mean) / std) and images.max().item() <= (1 - mean) / std + 1e-6
    assert torch.equal(images[:, 0], images[:, 2])
    for split in (small.train, small.validation, small.test):
        share = torch.bincount(split.labels, minlength=10) / len(split)
        assert share.min() > 0.085 and share.max() < 0.115
    assert torch.bincount(small.train.labels[:50], minlength=10).min() >= 4, "even the first few are balanced"


def test_splits_share_no_sample_and_lose_none() -> None:
    data = digits(size=8)  # at 8×8 the images are the originals
    everything = torch.cat([data.train.images, data.validation.images, data.test.images])
    assert len(everything) == 1797
    assert len(everything[:, 0].flatten(1).unique(dim=0)) == 1797


def test_same_seed_same_split(small: Digits) -> None:
    again, other = digits(size=16), digits(size=16, seed=1)
    assert torch.equal(small.test.images, again.test.images)
    assert torch.equal(small.test.labels, again.test.labels)
    assert not torch.equal(small.test.images, other.test.images)


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'pliant\[demo\]'"):
        digits()


def test_an_epoch_shows_each_sample_at_most_once_in_full_batches_and_a_new_order() -> None:
    seen = [labels for _, labels in batches(numbered(10), 3, epochs=1)]
    assert [len(labels) for labels in seen] == [3, 3, 3] and len(torch.cat(seen).unique()) == 9
    for images, labels in batches(numbered(8), 4, epochs=2):
        assert torch.equal(images[:, 0, 0, 0].long(), labels)
    orders = [labels.tolist() for _, labels in batches(numbered(32), 32, epochs=3)]
    assert len(orders) == 3 and orders[0] != orders[1] != orders[2]
    assert sum(1 for _ in islice(batches(numbered(4), 2), 100)) == 100, "endless by default"
    assert list(batches(numbered(4), 2, epochs=0)) == []
    same, again, other = ([y.tolist() for _, y in batches(numbered(20), 5, seed=s, epochs=2)] for s in (3, 3, 4))
    assert same == again != other


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    digits(size=8, seed=5)
    list(batches(numbered(6), 2, seed=5, epochs=2))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_impossible_batch_sizes_are_refused_at_once(size: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 10"):
        batches(numbered(10), size)


class Point(NamedTuple):
    x: torch.Tensor
    ids: int


class Fields(UserDict):  # type: ignore[type-arg]
    pass


class Noisy(Dataset[Any]):
    """Augments with all three global random numbers."""

    classes = ("odd", "even")

    def __init__(self, make: Callable[[torch.Tensor, int], Any] = lambda noise, index: (noise, index)) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(torch.rand(3) + random.random() + np.random.rand() + index, index)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2) + index, index


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2:]


STRUCTURES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "tuple": lambda noise, index: (noise, index),
    "list": lambda noise, index: [noise, index],
    "dict": lambda noise, index: {"x": noise, "y": index},
    "ordered": lambda noise, index: OrderedDict(x=noise, y=index),
    "named": lambda noise, index: Point(noise, index),
    "user_dict": lambda noise, index: Fields(x=noise, y=index),
    "nested": lambda noise, index: {"x": (noise, {"z": noise * 2}), "name": str(index)},
}


def flat(value: Any) -> list[Any]:
    """Structure and content as plain lists, types included but for ours."""
    kind = type(value).__name__.removesuffix("_with_ids")
    if isinstance(value, Mapping):
        return [kind, [(key, flat(part)) for key, part in value.items()]]
    if isinstance(value, (tuple, list)):
        return [kind, [flat(part) for part in value]]
    return [kind, value.tolist() if isinstance(value, torch.Tensor) else value]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_items_and_batches_are_what_they_were_and_carry_ids(structure: str) -> None:
    plain, wrapped = Noisy(STRUCTURES[structure]), with_ids(Noisy(STRUCTURES[structure]))
    items = [wrapped[index] for index in (4, 1)]
    assert isinstance(items[0], type(plain[0]))
    batch = default_collate(items)
    for value, ids in [(items[1], [1]), (batch, [4, 1])]:
        assert [sample.item for sample in ids_of(value) or ()] == ids
        for again in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
            assert flat(again) == flat(value)
            assert ids_of(again) == ids_of(value)
    without = default_collate([sample_ids._plain(item) for item in items])
    assert ids_of(without) is None
    assert isinstance(batch, type(without))
    assert flat(batch) == flat(without) == flat(default_collate([sample_ids._plain(wrapped[index]) for index in (4, 1)]))
    assert ids_of(plain[0]) is None


def test_ids_are_an_attribute_unless_the_name_is_taken() -> None:
    batch = default_collate([with_ids(Noisy())[2]])
    assert batch.ids == ids_of(batch)
    point = with_ids(Noisy(Point))[2]
    assert point.ids == 2
    assert [sample.item for sample in ids_of(point) or ()] == [2]


def test_the_same_id_is_the_same_item_exactly() -> None:
    wrapped = with_ids(Noisy(), views=3, seed=5)
    seen: dict[Any, list[float]] = {}
    for _ in range(40):
        for index in range(len(wrapped)):  # type: ignore[arg-type]
            item = wrapped[index]
            (name,) = ids_of(item) or ()
            assert name.item == item[1] == index
            assert seen.setdefault(name, item[0].tolist()) == item[0].tolist()
    assert len(seen) == 18, "every view of every sample is drawn"
    assert len({tuple(noise) for noise in seen.values()}) == 18, "and no two are the same"
    again = with_ids(Noisy(), views=3, seed=5)
    other = with_ids(Noisy(), views=3, seed=6)
    for wrapped, same in [(again, True), (other, False)]:
        item = wrapped[0]
        (name,) = ids_of(item) or ()
        held = {(known.item, known.view): noise for known, noise in seen.items()}
        assert (held[0, name.view] == item[0].tolist()) == same
        assert name not in seen, "another call of with_ids: other ids"


def test_random_states_go_on_as_if_nothing_had_been_drawn() -> None:
    before = states()
    wrapped = with_ids(Noisy())
    wrapped[3]
    next(iter(DataLoader(wrapped, batch_sampler=[[0, 1]])))
    after = states()
    assert after[1:] == before[1:]
    torch.manual_seed(3)
    before = states()
    wrapped.__getitems__([0, 1, 2])  # type: ignore[attr-defined]
    assert states() == before
    torch.manual_seed(3)
    torch.randint(4, ())
    drawn = states()
    torch.manual_seed(3)
    with_ids(Noisy(), views=4)[0]
    assert states()[0] == drawn[0], "a view is one draw of torch's"


def test_random_states_go_on_after_an_error() -> None:
    def broken(noise: torch.Tensor, index: int) -> Any:
        raise OSError("no such image")

    before = states()
    with pytest.raises(OSError, match="no such image"):
        with_ids(Noisy(broken))[0]
    assert states() == before


WORKERS = [(start, count) for start, count in (("fork", 2), ("spawn", 1)) if start in multiprocessing.get_all_start_methods()]


@pytest.mark.parametrize(("start", "workers"), WORKERS)
def test_workers_make_the_same_items_and_keep_their_ids(start: str, workers: int) -> None:
    wrapped = with_ids(Pairs(), views=2)
    held = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # where there is one core
        for batch in DataLoader(wrapped, batch_size=3, num_workers=workers, multiprocessing_context=start, shuffle=True):
            noise, labels = batch
            for name, row, label in zip(ids_of(batch) or (), noise, labels, strict=True):
                assert name.item == label
                held[name] = row
    assert len(held) == 8
    while held:
        item = wrapped[next(iter(held)).item]
        (name,) = ids_of(item) or ()
        if name in held:
            assert torch.equal(held.pop(name), item[0])


def test_indices_name_the_same_sample_however_they_are_written() -> None:
    wrapped = with_ids(Pairs())
    for index in (7, -1, np.int64(7), torch.tensor(7)):
        assert ids_of(wrapped[index]) == ids_of(wrapped[7])
    assert torch.equal(wrapped[-1][0], wrapped[7][0])


def test_part_of_a_dataset_and_several_in_a_row() -> None:
    pairs = with_ids(Pairs())
    (batch,) = DataLoader(Subset(pairs, [5, 2]), batch_size=2)
    assert [sample.item for sample in ids_of(batch) or ()] == [5, 2]
    both = ConcatDataset([pairs, with_ids(Pairs())])
    (batch,) = DataLoader(both, batch_size=16)
    assert len(set(ids_of(batch) or ())) == 16, "two datasets share no id"
    for mixed in (ConcatDataset([pairs, Pairs()]), ConcatDataset([Pairs(), pairs])):
        (batch,) = DataLoader(mixed, batch_size=16)
        assert ids_of(batch) is None
        assert batch[1].tolist() == [*range(8), *range(8)]


def test_a_collate_function_of_ones_own_sees_the_items_it_knows() -> None:
    def own(items: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        assert all(isinstance(item, tuple) for item in items)
        return torch.stack([noise for noise, _ in items])

    (batch,) = DataLoader(with_ids(Pairs()), batch_size=8, collate_fn=own)
    assert batch.shape == (8, 2)
    assert ids_of(batch) is None


def test_pinning_keeps_type_and_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    for make in STRUCTURES.values():
        batch = default_collate([with_ids(Noisy(make))[index] for index in (1, 0)])
        pinned = pin_memory(batch)
        assert flat(pinned) == flat(batch)
        assert ids_of(pinned) == ids_of(batch) is not None


def test_what_else_the_dataset_has_is_still_there() -> None:
    wrapped = with_ids(Noisy())
    assert len(wrapped) == 6  # type: ignore[arg-type]
    assert wrapped.classes == ("odd", "even")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        wrapped.targets  # type: ignore[attr-defined]  # noqa: B018


def test_a_list_is_a_dataset_too_and_wrapping_twice_is_fine() -> None:
    twice = with_ids(with_ids([(torch.zeros(1), 0), (torch.ones(1), 1)]))
    (batch,) = DataLoader(twice, batch_size=2)
    assert [sample.item for sample in ids_of(batch) or ()] == [0, 1]
    assert batch[1].tolist() == [0, 1]


def test_datasets_without_ids_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="Stream has no items by index"):
        with_ids(Stream())
    with pytest.raises(TypeError, match="Endless has no __len__"):
        with_ids(Endless())
    for views in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="number of fixed views"):
            with_ids(Pairs(), views=views)  # type: ignore[arg-type]


@pytest.mark.parametrize("item", [torch.zeros(2), 3, "text", None])
def test_items_that_cannot_carry_an_id_are_refused(item: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot carry an id.*return a tuple, list or dict"):
        with_ids([item])[0]
