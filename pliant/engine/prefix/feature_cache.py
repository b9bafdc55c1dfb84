"""A cache of the outputs of the frozen prefix by sample id: rows of tensors within a limit of bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pliant.core.budget import Budget
from pliant.core.types import Cost

_FIRST = 4 << 20  # bytes of the first chunk; each further one is seven times all before it: most rows are then in the last


class Features:
    """A feature cache: outputs of the frozen prefix by sample id, in at most `limit` bytes (a number, or text like "2GB").

    When the limit is reached, no more samples are stored, and none is removed: an epoch visits every sample in turn, so the
    oldest one is needed next. `bytes` is the memory of the rows; the table of ids takes about a hundred bytes per sample.
    `stored` counts the samples that were stored, `hits` those that were found, and `misses` all samples of batches with a
    missing one.

    `half=True` keeps floats in bfloat16 and returns them in their own dtype. (In float16, activations above 65504 would become
    infinity.)

    >>> features = Features("1MB")
    >>> features.begin("up to layer 3")
    >>> features.put([7, 8], (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),))
    >>> features.get([8, 7, 8], "cpu")
    (tensor([[3., 4.],
            [1., 2.],
            [3., 4.]]),)
    >>> features.get([7, 9], "cpu") is None
    True
    >>> features.begin("up to layer 4")
    >>> len(features)
    0
    """

    def __init__(self, limit: int | str, *, half: bool = False, device: str | torch.device = "cpu") -> None:
        self.limit = _bytes(limit)
        self.half = half
        self.device = torch.device(device)
        self.bytes = self.stored = self.hits = self.misses = 0
        self._key: Hashable = None
        self._rows: tuple[_Row, ...] = ()
        self._at: dict[Hashable, int] = {}  # id → number of its row, counted through all chunks
        self._chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return len(self._at)

    def begin(self, key: Hashable) -> None:
        """From now on rows belong to this key. A new key drops all rows."""
        if key != self._key:
            self.clear()
            self._key = key

    def clear(self) -> None:
        """Drop all rows and their shapes."""
        self._rows, self._at, self._chunks = (), {}, []
        self.bytes = 0

    def get(self, ids: Sequence[Hashable] | torch.Tensor, device: str | torch.device) -> tuple[torch.Tensor, ...] | None:
        """The rows of these samples in this order, as new tensors on `device`; None if one of them is missing."""
        names = _names(ids)
        try:
            rows = [self._at[name] for name in names]
        except KeyError:
            self.misses += len(names)
            return None
        if not self._chunks:
            return None
        self.hits += len(names)
        device = torch.device(device)
        with torch.inference_mode(False), torch.no_grad():  # autograd may use the results
            return self._gather(rows, device)

    def put(self, ids: Sequence[Hashable] | torch.Tensor, values: tuple[torch.Tensor, ...]) -> None:
        """Store one row per sample of each tensor, as far as they fit. Known ids stay unchanged.

        All rows of a key have the shapes and dtypes of the first; others are a ValueError. They share one memory format
        (channels-last stays channels-last), with the batch as the outermost dimension.
        """
        names = _names(ids)
        if not values or any(value.dim() == 0 or value.shape[0] != len(names) for value in values):
            given = ", ".join(str(tuple(value.shape)) for value in values) or "no tensor"
            raise ValueError(f"{len(names)} ids came with {given}: give each tensor one row per id, along its first dimension.")
        rows = tuple(_Row.of(value, self.half) for value in values)
        if not self._rows:
            self._rows = rows
        elif [row.kind for row in rows] != [row.kind for row in self._rows]:
            raise ValueError(
                f"rows of {', '.join(map(str, rows))} cannot be stored beside rows of {', '.join(map(str, self._rows))}. "
                "Call begin with another key first, or bring samples to one shape (as padding all to one length does)."
            )
        fresh: dict[Hashable, int] = {}
        for place, name in enumerate(names):
            if name not in self._at:
                fresh.setdefault(name, place)
        with torch.inference_mode(False), torch.no_grad():
            self._write(fresh, [row.inward(value.detach()) for row, value in zip(self._rows, values, strict=True)])

    def _write(self, fresh: dict[Hashable, int], values: list[torch.Tensor]) -> None:
        """Append what fits; `fresh` maps new samples to their position in the batch."""
        new, places = list(fresh), list(fresh.values())
        done = 0
        while done < len(new) and (self._room() or self._grow(len(new) - done)):
            start, count = len(self._at), min(len(new) - done, self._room())
            take = places[done : done + count]
            chunk = self._chunks[-1]
            for pool, value in zip(chunk.pools, values, strict=True):
                if take[-1] - take[0] == count - 1:
                    some = value.narrow(0, take[0], count)
                else:
                    some = value.index_select(0, torch.tensor(take, device=value.device))
                pool.narrow(0, start - chunk.start, count).copy_(some)
            self._at.update(zip(new[done : done + count], range(start, start + count), strict=True))
            done += count
        self.stored += done

    def _room(self) -> int:
        """Free rows in the last chunk."""
        return self._chunks[-1].stop - len(self._at) if self._chunks else 0

    def _grow(self, wanted: int) -> bool:
        """Allocate another chunk, if the limit allows one more row. Existing rows are not copied."""
        each = max(sum(row.bytes for row in self._rows), 1)
        held = len(self._at)
        count = min(max(_FIRST // each, 7 * held, wanted), self.limit // each - held)
        if count <= 0:
            return False
        pools = tuple(torch.empty((count, *row.stored), dtype=row.kept, device=self.device) for row in self._rows)
        self._chunks.append(_Chunk(held, held + count, pools))
        self.bytes += sum(pool.numel() * pool.element_size() for pool in pools)
        return True

    def _gather(self, rows: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
        """One index_select per value from the chunk with most rows; then write the rows of other chunks."""
        held = len(self._at)
        main = max(self._chunks, key=lambda chunk: min(chunk.stop, held) - chunk.start)
        start, stop = main.start, main.stop
        index = self._index([row - start if start <= row < stop else 0 for row in rows])
        strays = [place for place, row in enumerate(rows) if not start <= row < stop] if len(self._chunks) > 1 else []
        upload = self.device.type == "cpu" and device.type == "cuda"
        found = []
        for pool in main.pools:
            if upload:  # from pinned memory, so that the copy is asynchronous
                out = torch.empty((len(rows), *pool.shape[1:]), dtype=pool.dtype, device="cpu", pin_memory=True)
                found.append(torch.index_select(pool, 0, index, out=out))
            else:
                found.append(pool.index_select(0, index))
        if strays:
            self._fetch(strays, rows, found)
        return tuple(row.outward(out.to(device, non_blocking=upload)) for row, out in zip(self._rows, found, strict=True))

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self.device)  # twice as fast as torch.tensor

    def _fetch(self, strays: list[int], rows: list[int], into: list[torch.Tensor]) -> None:
        """Write the rows at these positions of the batch. On a CPU as bytes: `index_copy_` is several times slower there."""
        if self.device.type == "cpu":
            raw = [_raw(out) for out in into]
            for place in strays:
                chunk = next(chunk for chunk in self._chunks if rows[place] < chunk.stop)
                for bytes_out, source in zip(raw, chunk.raw, strict=True):
                    bytes_out[place] = source[rows[place] - chunk.start]
            return
        for chunk in self._chunks:
            places = [place for place in strays if chunk.start <= rows[place] < chunk.stop]
            if places:
                here, there = self._index(places), self._index([rows[place] - chunk.start for place in places])
                for out, pool in zip(into, chunk.pools, strict=True):
                    out.index_copy_(0, here, pool.index_select(0, there))


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The rows from `start` to `stop`: one tensor per value."""

    start: int
    stop: int
    pools: tuple[torch.Tensor, ...]

    @cached_property
    def raw(self) -> tuple[np.ndarray, ...]:
        return tuple(_raw(pool) for pool in self.pools)


def _raw(pool: torch.Tensor) -> np.ndarray:
    """The bytes of each row."""
    return pool.unsqueeze(-1).flatten(1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class _Row:
    """One sample's row of a value: its shape and dtype for the user, and how it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype
    order: tuple[int, ...]  # the dimensions of a batch from the outermost in memory to the innermost, the samples first

    @classmethod
    def of(cls, value: torch.Tensor, half: bool) -> _Row:
        wide = value.dtype.is_floating_point and value.dtype.itemsize > 2
        strides = value.stride()
        order = sorted(range(1, value.dim()), key=lambda dim: -strides[dim])
        return cls(tuple(value.shape[1:]), value.dtype, torch.bfloat16 if half and wide else value.dtype, (0, *order))

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape, self.dtype

    @property
    def stored(self) -> Iterator[int]:
        """The shape in memory."""
        return (self.shape[dim - 1] for dim in self.order[1:])

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.kept.itemsize

    def inward(self, value: torch.Tensor) -> torch.Tensor:
        return value.permute(self.order)

    def outward(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.to(self.dtype).permute([self.order.index(dim) for dim in range(kept.dim())])

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def _bytes(limit: int | str) -> int:
    """Bytes from a number of them, or from text with its unit."""
    if isinstance(limit, str):
        try:
            return int(Budget(memory=limit).limits(Cost())["bytes"])  # a share of nothing is refused
        except ValueError:
            raise ValueError(f"limit={limit!r} is not an amount of memory: write it like '64MB' or '2GiB'.") from None
    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise ValueError(
            f"limit={limit!r} is not an amount of memory: give bytes as a whole number above 0, or text like '64MB'."
        )
    return limit


def _names(ids: Sequence[Hashable] | torch.Tensor) -> list[Hashable]:
    """Ids as values: a tensor is hashed by identity, so take its content."""
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        if ids.ndim != 1:
            raise ValueError(f"ids of shape {tuple(ids.shape)}: give one id per sample, in one dimension.")
        return ids.tolist()
    if len(ids) and isinstance(ids[0], torch.Tensor):
        return [name.item() if isinstance(name, torch.Tensor) else name for name in ids]
    return list(ids)
