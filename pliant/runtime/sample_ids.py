"""Datasets whose batches say which samples they hold."""

from __future__ import annotations

import hashlib
import operator
import random
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory


class SampleId(NamedTuple):
    """Which sample: the index of its item, which of its fixed views, and the call of `with_ids` that it came through."""

    item: Hashable
    view: int
    source: str


def with_ids(dataset: Any, views: int = 1, seed: int = 0) -> Dataset[Any]:
    """The same dataset, whose batches know the ids of their samples: what a feature cache needs. Wrap it before the DataLoader.

    Items are tuples, lists, dicts or the like, and do not change. The default collate function makes the same batches as
    before, and `ids_of(batch)` returns their ids. Your own collate function loses the ids, unless it reads `ids_of(item)`.

    If the dataset augments at random, each access draws one of `views` fixed views of the sample. The global random numbers of
    torch (CPU), Python and numpy are seeded from (seed, index, view) while the item is made, and restored afterwards. So the
    same id is exactly the same item, in every epoch and worker.

    Limits: the dataset must return the same item for the same random numbers, so it may have no generator of its own, nor use
    the GPU's. If you change a batch later (mixup, noise), pass it as a plain tuple or dict without ids. A batch rebuilt by
    hand, like `[part.to(device) for part in batch]`, has no ids: pass `ids=ids_of(batch)`.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> loader = DataLoader(with_ids(TensorDataset(torch.arange(4.0), torch.arange(4))), batch_size=2)
    >>> for batch in loader:
    ...     inputs, labels = batch
    ...     print(inputs, [sample.item for sample in ids_of(batch)])
    tensor([0., 1.]) [0, 1]
    tensor([2., 3.]) [2, 3]
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"a {kind} has no items by index, so its samples have no ids. Give a map-style dataset.")
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"this {kind} has no __len__. Give it one: the number of its samples.")
    if isinstance(views, bool) or not isinstance(views, int) or views < 1:
        raise ValueError(f"views={views!r}: give the number of fixed views of each sample, 1 or more.")
    return _WithIds(dataset, views, seed)


def ids_of(batch: Any) -> list[Any] | None:
    """The ids of the samples in a batch (or the one of an item) that comes from a dataset `with_ids`, else None."""
    return batch._ids if isinstance(batch, _Carrier) else None


class _WithIds(Dataset[Any]):
    def __init__(self, dataset: Any, views: int, seed: int) -> None:
        self.dataset, self.views, self.seed = dataset, views, seed
        self.source = uuid.uuid4().hex[:8]  # two datasets in one run share no id

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The items of a batch: a DataLoader asks for them together, and so do we for the random states."""
        ids = [SampleId(self._index(index), self._view(), self.source) for index in indices]
        with _random_states_kept():
            return [_carry(self._made(sample), [sample]) for sample in ids]

    def _index(self, given: Any) -> Any:
        try:
            index = operator.index(given)
        except TypeError:
            return given  # a sampler of names
        return index + len(self) if index < 0 else index

    def _view(self) -> int:
        return int(torch.randint(self.views, ())) if self.views > 1 else 0

    def _made(self, sample: SampleId) -> Any:
        of = repr((self.seed, sample.item, sample.view)).encode()
        number = int.from_bytes(hashlib.blake2b(of, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        return self.dataset[sample.item]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Global random numbers (CPU) go on afterwards where they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class _Carrier:
    """Mixed into the type of an item or a batch, so that it is what it was and carries ids."""

    __slots__ = ()
    _ids: list[Any] | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _carry, (_plain(self), self._ids)

    def pin_memory(self) -> Any:
        """What a DataLoader calls with pin_memory=True."""
        return _carry(pin_memory(_plain(self)), self._ids)


@cache
def _carrying(kind: type[Any]) -> Any:
    """The type that is `kind` and carries ids, as `.ids` too where that is not taken."""
    own = {} if hasattr(kind, "ids") else {"ids": property(ids_of)}
    return type(f"{kind.__name__}_with_ids", (_Carrier, kind), own)


def _carry(value: Any, ids: list[Any] | None) -> Any:
    """The same value, of a type that is also a `_Carrier`."""
    if isinstance(value, _Carrier):
        value = _plain(value)
    kind: Any = type(value)
    if not isinstance(value, (tuple, list, dict)) and not (isinstance(value, Mapping) and hasattr(value, "__dict__")):
        raise TypeError(
            f"an item of type {kind.__name__} cannot carry an id. Let the dataset return a tuple, list or dict, such as "
            "(item,), or leave it as it is and call session.step(batch, ids=…)."
        )
    out = _rebuilt(value, _carrying(kind))
    out._ids = ids
    return out


def _plain(carrier: Any) -> Any:
    """The value without ids, of its own type."""
    out = _rebuilt(carrier, type(carrier).__mro__[2])
    if hasattr(out, "__dict__"):
        out.__dict__.pop("_ids", None)
    return out


def _rebuilt(value: Any, kind: Any) -> Any:
    """What `value` holds, as a `kind`, past the constructors that take something else."""
    out: Any
    if isinstance(value, tuple):
        out = tuple.__new__(kind, value)
    elif isinstance(value, list):
        out = kind.__new__(kind)
        out.extend(value)
    elif isinstance(value, dict):
        out = kind.__new__(kind)
        out.update(value)
    else:
        out = object.__new__(kind)
    if hasattr(value, "__dict__") and hasattr(out, "__dict__"):
        out.__dict__.update(value.__dict__)
    return out


def _collate(samples: list[Any], *, collate_fn_map: Any = None) -> Any:
    """The batch that these samples would make anyway, with their ids."""
    plain = [_plain(sample) if isinstance(sample, _Carrier) else sample for sample in samples]
    batch = collate(plain, collate_fn_map=collate_fn_map)
    ids = [ids_of(sample) for sample in samples]
    return batch if None in ids else _carry(batch, [one for some in ids for one in some or ()])


default_collate_fn_map[_Carrier] = _collate  # the documented way to teach `default_collate` a type
