"""The resident memory of the process while a session is open: how far it has grown, and what is given back."""

from __future__ import annotations

from weakref import finalize

import torch

from pliant.core.budget import Budget
from pliant.runtime import heap
from pliant.runtime.code_pages import forget_code
from pliant.runtime.memory import resident, resident_peak


class Resident:
    """Follows the peak of the process from here on. Other threads of the process count too: nobody can tell them apart."""

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self._start, self._is_cpu = resident_peak(), device.type == "cpu"
        self._release: finalize[..., Resident] | None = None
        self.follow(budget)

    def follow(self, budget: Budget) -> None:
        """While memory is limited, what is freed goes back to the operating system, also where nobody closes the session. So
        does the code of libraries, once: imports have read far more of it than training needs."""
        if self._release is None and budget.memory is not None and self._is_cpu:
            heap.hold()
            forget_code()
            self._release = finalize(self, heap.release)
        elif self._release is not None and budget.memory is None:
            self.close()

    def close(self) -> None:
        """Freed memory may stay with the process again."""
        if self._release is not None:
            self._release()
            self._release = None

    def now(self) -> dict[str, int | None]:
        """What a log says of it: the bytes in memory, and how far the peak has risen."""
        return {"resident": resident(), "growth": self.growth}

    @property
    def growth(self) -> int | None:
        """Bytes by which the peak has risen since the start; None where the system does not say."""
        now = resident_peak()
        return None if now is None or self._start is None else max(now - self._start, 0)
