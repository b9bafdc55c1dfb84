"""`Mode`: which mechanisms of the engine run a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """Which mechanisms of the engine run a step; with none of them, plain autograd runs it.

    >>> str(Mode(prefix=True, graphs=True)), str(Mode(prefix=True, cached=True)), str(Mode())
    ('prefix+graphs', 'prefix, cache', 'plain')
    """

    lean: bool = False  # only what the chosen parameters need is kept for backward
    prefix: bool = False  # the frozen part before the first chosen layer runs as inference
    graphs: bool = False  # a step is captured as one CUDA graph
    cached: bool = False  # the output of the prefix is computed once per sample and then read from a cache

    def __str__(self) -> str:
        names = "+".join(name for name in ("lean", "prefix", "graphs") if getattr(self, name)) or "plain"
        return f"{names}, cache" if self.cached else names
