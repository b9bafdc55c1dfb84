"""What server and clients tell each other beside tensors: what a client can do, and what it is asked to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

Choice = Literal["all", "pace", "layers", "tensors", "last", "random"]
_Message = TypeVar("_Message", "Ability", "Task")


@dataclass(frozen=True)
class Ability:
    """What a client can do, by its own measurements.

    `full` are the seconds of a step that trains everything, `steps` those of a whole round. `windows[a][b - a]` are the seconds
    of a step that trains blocks a to b, and ends after block b where the model has an exit there. `backward` are the seconds
    that each block adds to the backward pass. `blocks` and `exits` name the parameters of each block and of its exit.
    """

    full: float
    steps: int
    examples: int
    windows: tuple[tuple[float, ...], ...]
    backward: tuple[float, ...]
    blocks: tuple[tuple[str, ...], ...]
    exits: tuple[tuple[str, ...], ...]
    floor: float = 0.0  # seconds of the cheapest step of the whole model
    device: str = ""

    @property
    def round(self) -> float:
        """Seconds of a round that trains everything."""
        return self.full * self.steps

    def window(self, first: int, last: int) -> float:
        """Seconds of a step that trains these blocks."""
        return self.windows[first][last - first]

    def params(self, first: int, last: int) -> tuple[str, ...]:
        """The parameters of these blocks, and of the exit after them."""
        inside = tuple(name for block in self.blocks[first : last + 1] for name in block)
        return inside + (self.exits[last] if self.exits else ())


@dataclass(frozen=True)
class Task:
    """What a client is asked to do in one round.

    At most `steps` steps, in at most `seconds`. `params` may train (none named: all of them). `exit` is the block after which
    the forward pass ends. `choose` says how the client chooses among them inside its budget:

    - "all": every one of them, in as many steps as fit
    - "pace": the layers of most value in the whole round, by the server's values alone
    - "layers": the layers of most value in each step (exact solver)
    - "tensors": ElasticTrainer's choice
    - "last", "random": baselines

    `importance` is what the server knows of each parameter; local values count `beta`, those of the server the rest. A client
    that does not `stop` at the deadline goes on until its last step. `memory` limits a step as `Budget(memory=…)` does.
    """

    steps: int
    seconds: float | None = None
    exit: int | None = None
    params: tuple[str, ...] = ()
    choose: Choice = "all"
    importance: Mapping[str, float] = field(default_factory=dict)
    beta: float = 1.0
    stop: bool = True
    memory: str | float | None = None
    seed: int = 0


def to_json(message: Ability | Task) -> str:
    """One line of text."""
    return json.dumps(asdict(message))


def from_json(kind: type[_Message], text: str) -> _Message:
    """What `to_json` wrote; anything else is an error that names the field."""
    given = json.loads(text)
    known = {f.name for f in fields(kind)}
    if not isinstance(given, dict) or not set(given) <= known:
        strange = sorted(set(given) - known) if isinstance(given, dict) else given
        raise ValueError(
            f"this is not a {kind.__name__}: unknown {strange!r}. Use one version of Pliant on server and clients."
        )
    try:
        return kind(**{name: _frozen(value) for name, value in given.items()})
    except TypeError as error:
        raise ValueError(f"this is not a {kind.__name__}: {error}.") from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
