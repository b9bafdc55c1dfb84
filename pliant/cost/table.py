"""Charges as arrays over a list of units: what solvers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.cost.charge import Charge, Piece


@dataclass(frozen=True)
class PriceTable:
    """The charges of a profile seen from a list of units: charge j is due when a unit of row j of `needed` is chosen.

    Bytes are by moment: at each of them, `standing` and the charges that are due must fit.
    """

    needed: NDArray[np.bool_]  # (charges, units); no two rows are equal
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]  # (moments, charges)
    standing: NDArray[np.float64]  # (moments,): beside the charges, against the peak of the forward pass alone
    macs: NDArray[np.float64]


def tabulate(
    charges: Sequence[Charge],
    counts: Callable[[Charge], bool],
    moments: Sequence[int],
    chosen: Sequence[Mapping[str, Piece]],
) -> PriceTable:
    """These charges over units, where `chosen` says for each unit what it takes of which parameters.

    Equal rows are merged, and rows that no unit needs are left out. A charge that does not count here still makes those due
    that name it.
    """
    whole, cut = _by_param({param for charge in charges for param in charge.params}, chosen)
    rows: list[NDArray[np.bool_]] = [np.zeros(0, bool)] * len(charges)
    merged: dict[bytes, tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]] = {}

    def add(row: NDArray[np.bool_], charge: Charge, share: float = 1.0) -> None:
        if row.any() and counts(charge):
            new = row, np.zeros(2), np.zeros(len(moments))
            _, price, held = merged.setdefault(row.tobytes(), new)
            price += (charge.cost.seconds * share, charge.cost.macs * share)
            held[slice(*(charge.live or (0, None)))] += charge.cost.bytes * share

    for i in range(len(charges) - 1, -1, -1):
        charge, row, own = charges[i], np.zeros(len(chosen), bool), dict[int, list[Piece]]()
        for j in charge.via:
            row |= rows[j]
        for param in charge.params:
            row |= whole[param]
            for k, dim, share in cut.get(param, ()):
                own.setdefault(k, []).append((dim, share))
        behind = bool(row.any())
        for k, pieces in own.items():
            rest = [charge.share_of(dim, 0.0) for dim, _ in pieces if not charge.is_copied(dim)]
            row[k] |= max(rest, default=0.0) == 1.0 or (behind and bool(rest))
            share = charge.share(pieces, bool(row[k])) - row[k]
            if share > 0:  # each pays for its own slice
                add(np.arange(len(chosen)) == k, charge, share)
        add(row, charge)
        rows[i] = row.copy()
        rows[i][list(own)] = True
    needed = np.array([row for row, _, _ in merged.values()], bool).reshape(len(merged), len(chosen))
    prices = np.array([price for _, price, _ in merged.values()], float).reshape(len(merged), 2)
    held = np.array([held for _, _, held in merged.values()], float).reshape(len(merged), len(moments)).T
    standing = np.array(moments, float) - max(moments)
    alone = _highest(held, standing)
    return PriceTable(needed, prices[:, 0], held[alone], standing[alone], prices[:, 1])


def _by_param(
    params: Iterable[str], chosen: Sequence[Mapping[str, Piece]]
) -> tuple[dict[str, NDArray[np.bool_]], dict[str, list[tuple[int, int, float]]]]:
    """For each of these parameters, the units that choose all of it; and those that choose a slice: unit, dimension, share."""
    whole = {param: np.zeros(len(chosen), bool) for param in params}
    cut: dict[str, list[tuple[int, int, float]]] = {}
    for i, pieces in enumerate(chosen):
        for param, (dim, share) in pieces.items():
            if param in whole and dim is None:
                whole[param][i] = True
            elif param in whole and dim is not None:
                cut.setdefault(param, []).append((i, dim, share))
    return whole, cut


def _highest(held: NDArray[np.float64], standing: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions of the moments that some choice may make the highest: one that a neighbour always tops is left out."""
    kept: list[int] = []
    for t in range(len(standing)):
        while kept and standing[kept[-1]] <= standing[t] and (held[kept[-1]] <= held[t]).all():
            kept.pop()
        if not kept or standing[kept[-1]] < standing[t] or not (held[kept[-1]] >= held[t]).all():
            kept.append(t)
    return np.array(kept, dtype=np.intp)
