"""Whether a run sees its samples for the first time: then the loss on them is that of held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pliant.runtime import batches


class SeenSamples:
    """Knows each sample by a number, the sum of its values. Mirrored samples keep it; those that are cropped count as new."""

    def __init__(self) -> None:
        self._before: list[torch.Tensor] = []
        self._since: list[torch.Tensor] = []

    def add(self, batch: Any) -> None:
        """A batch comes."""
        rows = [tensor.detach() for tensor in batches.tensors(batch) if tensor.dim() > 0]
        if batches.size(batch) is not None and all(map(_can_be_summed, rows)):
            sums = [tensor.reshape(len(tensor), -1).sum(1, dtype=torch.float64).to(rows[0].device) for tensor in rows]
            self._since.append(torch.stack(sums).sum(0).float())  # rounded: the order of a sum may change its last digits

    def mark(self) -> None:
        """What comes from now on is compared with all that came before."""
        self._before += self._since
        self._since = []

    def are_new(self) -> bool:
        """Whether most samples since the mark had not been seen before in the run. False where samples cannot be told apart."""
        if not self._since:
            return False
        since = torch.cat(self._since)
        known = torch.cat([since[:0], *self._before]).unique()
        return 2 * (len(torch.cat([known, since]).unique()) - len(known)) > len(since)

    def state(self) -> dict[str, Any]:
        """In plain types."""
        before, since = ([one.tolist() for one in found] for found in (self._before, self._since))
        return {"before": before, "since": since}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._before, self._since = ([torch.tensor(one, device=device) for one in state[name]] for name in ("before", "since"))


def _can_be_summed(tensor: torch.Tensor) -> bool:
    """By number types and layouts that any device can add up in double precision."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_complex() and tensor.device.type != "mps"
