"""Which mode a step runs in: the one that the user names, or what one static rule picks."""

from __future__ import annotations

from dataclasses import dataclass

from pliant.core.mode import Mode

NAMES = ("lean", "prefix", "graphs")


@dataclass(frozen=True)
class Asked:
    """What `engine=` asks for: "auto", perhaps without some mechanisms ("auto-graphs"), or mechanisms by name."""

    is_auto: bool
    named: frozenset[str]  # left out of "auto", or else forced

    def may(self, name: str) -> bool:
        return name not in self.named if self.is_auto else name in self.named


def parse(engine: str) -> Asked:
    """Read `engine=`.

    >>> parse("auto-graphs").may("graphs"), parse("lean+prefix").may("prefix"), parse("plain").may("lean")
    (False, True, False)
    """
    first, *left_out = engine.split("-")
    names = left_out if first == "auto" else [] if engine == "plain" else engine.split("+")
    if any(name not in NAMES for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"engine={engine!r} is not known. Use 'auto', 'plain', or one or several of {', '.join(NAMES)}, like "
            f"'lean+graphs'. 'auto-graphs' is 'auto' without graphs."
        )
    return Asked(first == "auto", frozenset(names))


def pick(
    asked: Asked,
    *,
    cuda: bool = False,
    caches: bool = False,
    memory_is_limited: bool = False,
    captures: bool = True,
    custom_kernels: bool = False,
    runtime: bool = False,
) -> Mode:
    """The mode of the coming steps. What the user names is taken, captures only where they can be; "auto" follows one rule:

    - a cache is the prefix engine's, wherever one was given;
    - where memory is limited: lean, and on CUDA captured if `captures` says that what a captured step holds fits in;
    - else on CUDA: prefix and graphs, or plain where steps cannot be captured;
    - else on a CPU: prefix where custom kernels or an inference runtime serve this processor and model; plain where none does.

    >>> str(pick(parse("auto"), cuda=True)), str(pick(parse("auto"))), str(pick(parse("auto"), memory_is_limited=True))
    ('prefix+graphs', 'plain', 'lean')
    """
    if not asked.is_auto:
        lean, prefix, graphs = (asked.may(name) for name in NAMES)
        return Mode(lean, prefix, graphs and captures, cached=caches and prefix)
    caches = caches and asked.may("prefix")
    graphs = cuda and captures and asked.may("graphs")
    lean = memory_is_limited and asked.may("lean")
    if memory_is_limited and caches:
        graphs = False
    if memory_is_limited:
        return Mode(lean, prefix=caches or (graphs and asked.may("prefix")), graphs=graphs, cached=caches)
    prefix = asked.may("prefix") and (graphs or custom_kernels or runtime)
    return Mode(False, prefix or caches, graphs, cached=caches)
