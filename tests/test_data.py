"""The digits and their batches: proportions, seeds, and a global random state that stays as it was."""

from __future__ import annotations

import sys
from itertools import islice

import pytest
import torch

from pliant.data import Digits, Split, batches, digits
from pliant.models import NORM


@pytest.fixture(scope="module")
def small() -> Digits:
    return digits(size=16)


def numbered(count: int) -> Split:
    """Samples that carry their own number, so that one can see where each went."""
    numbers = torch.arange(count)
    return Split(numbers.float().reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2).contiguous(), numbers)


def test_shapes_and_types(small: Digits) -> None:
    assert [len(split) for split in (small.train, small.validation, small.test)] == [1000, 297, 500]
    assert small.train.images.shape == (1000, 3, 16, 16)
    assert small.train.images.dtype == torch.float32
    assert small.train.labels.dtype == torch.int64
    assert small.classes == 10


def test_normalised_for_the_backbone(small: Digits) -> None:
    mean, std = NORM
    assert small.train.images.min().item() == pytest.approx((0 - mean) / std)
    assert small.train.images.max().item() <= (1 - mean) / std + 1e-6
    assert torch.equal(small.train.images[:, 0], small.train.images[:, 2])


def test_every_split_holds_every_class_in_proportion(small: Digits) -> None:
    for split in (small.train, small.validation, small.test):
        share = torch.bincount(split.labels, minlength=10) / len(split)
        assert share.min() > 0.085
        assert share.max() < 0.115
    first = torch.bincount(small.train.labels[:50], minlength=10)
    assert first.min() >= 4, "even the first few are balanced"


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


def test_an_epoch_shows_each_sample_at_most_once_in_full_batches() -> None:
    seen = [labels for _, labels in batches(numbered(10), 3, epochs=1)]
    assert [len(labels) for labels in seen] == [3, 3, 3]
    assert len(torch.cat(seen).unique()) == 9


def test_images_stay_with_their_labels() -> None:
    for images, labels in batches(numbered(8), 4, epochs=2):
        assert torch.equal(images[:, 0, 0, 0].long(), labels)


def test_epochs_are_shuffled_anew() -> None:
    orders = [labels.tolist() for _, labels in batches(numbered(32), 32, epochs=3)]
    assert len(orders) == 3
    assert orders[0] != orders[1] != orders[2]


def test_endless_unless_told() -> None:
    assert sum(1 for _ in islice(batches(numbered(4), 2), 100)) == 100
    assert list(batches(numbered(4), 2, epochs=0)) == []


def test_same_seed_same_batches() -> None:
    def labels(seed: int) -> list[list[int]]:
        return [labels.tolist() for _, labels in batches(numbered(20), 5, seed=seed, epochs=2)]

    assert labels(3) == labels(3)
    assert labels(3) != labels(4)


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    digits(size=8, seed=5)
    list(batches(numbered(6), 2, seed=5, epochs=2))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_impossible_batch_sizes_are_refused_at_once(size: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 10"):
        batches(numbered(10), size)
