"""The run log: one JSON object per line. A line is whole or absent; a torn last line is cut off on reopening."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pliant import __version__
from pliant.core import text
from pliant.core.budget import RESOURCES, Progress
from pliant.core.json_text import json_text
from pliant.core.mode import Mode
from pliant.core.types import Selection, Unit
from pliant.cost.profile import Profile
from pliant.planning.policy import Policy
from pliant.session.feedback import Round

_FLUSH_EVERY = 20  # steps: reading a loss off a GPU waits for it, so not at every one
_SHOWN = 10  # of the last rounds, in a notebook


class RunLog:
    """Writes the log of one run, steps in bundles; without a path it writes nothing."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = path
        self._has_folder = path is None
        self._lr: float | torch.Tensor | None = None  # of the step under way
        self._total_steps: int | None = None
        self._steps: list[tuple[int, int, torch.Tensor | None, Callable[[], float], float | torch.Tensor | None]] = []

    def note_rate(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> None:
        """A step begins: its learning rate is that of the first group now, and the run may have got a length."""
        lr = next(iter(optimizer.param_groups), {}).get("lr")
        self._lr = lr.clone() if isinstance(lr, torch.Tensor) and self.path is not None else lr
        self._total_steps = total_steps

    def move(self, path: str | os.PathLike[str] | None) -> None:
        """Later lines go to this file, and the steps that no file holds yet."""
        self.path, self._has_folder = path, path is None

    def write(self, event: str, **line: Any) -> None:
        """One line, after the steps that came before it."""
        if self.path is not None:
            self.flush()
            self._append([{"event": event, **line}])

    def step(
        self,
        step: int,
        round: int,
        loss: torch.Tensor | None,
        seconds: Callable[[], float],
    ) -> None:
        """One optimizer step; its loss and its seconds are read later, with those of its neighbours."""
        if self.path is not None:
            self._steps.append((step, round, loss, seconds, self._lr))
            if len(self._steps) >= _FLUSH_EVERY:
                self.flush()

    def flush(self) -> None:
        """Write the steps that the file does not hold yet."""
        steps = self._steps
        if self.path is None or not steps:
            return
        known = [loss.float() for _, _, loss, _, _ in steps if loss is not None]
        values = iter(torch.stack(known).tolist() if known else [])
        self._append(
            {"event": "step", "step": n, "round": r, "loss": None if loss is None else next(values), "seconds": seconds()}
            | ({} if lr is None else {"lr": float(lr)})
            for n, r, loss, seconds, lr in steps
        )
        self._steps = []  # only now: a folder that is gone loses none of them

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """The folder is made for the first line. One that is removed or moved later is an error, not made again."""
        if self.path is None:
            return
        append(self.path, lines, make_folder=not self._has_folder)
        self._has_folder = True

    # ------------------------------------------------------------ what a session writes

    def start(
        self,
        policy: Policy,
        profile: Profile,
        units: tuple[Unit, ...],
        engine: str,
        profiling_seconds: float,
    ) -> None:
        """What a run begins with; the cost of a unit is that of a step with it alone."""
        if self.path is None:
            return
        self.write(
            "start",
            pliant=__version__,
            policy=policy.name,
            when=policy.when.name,
            signal=policy.signal.name,
            engine=engine,
            seed=policy.seed,
            origin=dict(profile.origin),
            full=asdict(profile.full),
            forward=asdict(profile.base),
            units={unit.name: list(unit.params) for unit in units},
            costs={unit.name: asdict(cost) for unit, cost in zip(units, profile.alone(units), strict=True)},
            split=_split(profile.on(Mode()), [profile.everything]),
            checks=[list(check) for check in profile.checks],
            coverage=profile.coverage,
            uncounted=list(profile.uncounted),
            profiling_seconds=profiling_seconds,
            total_steps=self._total_steps,
            at=time.time(),
        )

    def round(
        self,
        selection: Selection,
        profile: Profile,
        engine: str,
        choosing_seconds: float,
        measured_before: float | None,
        resident: Mapping[str, int | None],
    ) -> None:
        """A selection, what the parts of its step cost, what choosing it took, and the memory of the process."""
        if self.path is None:
            return
        self.write(
            "round",
            **selection.to_json(),
            split=_split(profile, selection.units),
            engine=engine,
            choosing_seconds=choosing_seconds,
            measured_before=measured_before,
            **resident,
        )

    def memory(self, step: int, round: Round, measured: int, growth: int | None) -> None:
        """The live bytes of a step that was measured, beside those that its round asked for and predicted; and by how many
        bytes the peak of the process has grown since the session was opened."""
        amounts = {"asked": round.asked_bytes, "predicted": round.predicted_bytes, "measured": measured, "growth": growth}
        self.write("memory", step=step, round=round.number, **amounts)


def described(
    policy: Policy, model: torch.nn.Module, progress: Progress, engine: str, selection: Selection | None, seconds: float | None
) -> str:
    """A session in one line: its recipe and budget, how far it is, what trains now and what that takes."""
    limits = {kind: getattr(policy.budget, kind) for kind in RESOURCES}
    asked = ", ".join(
        f"{kind}={'…' if callable(given) else repr(given)}" for kind, given in limits.items() if given is not None
    )
    of = "" if progress.total_steps is None else f" of {progress.total_steps}"
    parts = [f"{policy.name}({asked}) on {type(model).__name__}", f"step {progress.step}{of}", f"engine {engine}"]
    if selection is None:
        return ", ".join([*parts, "nothing measured or chosen yet"])
    parts.append(f"round {selection.round}: {len(selection.units)} of {len(selection.values)} units")
    if seconds is not None:
        share = f" ({seconds / selection.full.seconds:.2f} of a full step)" if selection.full.seconds else ""
        parts.append(f"{text.seconds(seconds)} per step{share}")
    return ", ".join(parts)


def display(name: str, engine: str, steps: int, rounds: Sequence[Round], selection: Selection | None) -> str:
    """HTML for a notebook: what the last rounds asked, predicted and measured, and what is chosen now."""
    if selection is None:
        return text.tag("p", f"{name}: nothing is chosen yet; the first step chooses.")
    rows = [
        (str(r.number), str(r.step + 1), str(r.steps), *map(text.seconds, (r.asked, r.predicted, r.measured)))
        for r in rounds[-_SHOWN:]
    ]
    title = f"{name}, {steps} steps on the {engine} engine: time per step"
    table = text.Table(title, ("round", "from step", "steps", "asked", "predicted", "measured"), rows)
    return table.html() + selection._repr_html_()


def _split(profile: Profile, units: Sequence[Unit]) -> dict[str, Any]:
    return {part: asdict(cost) for part, cost in profile.split(units).items()}


# ---------------------------------------------------------------- the file


def append(path: str | os.PathLike[str], lines: Iterable[Mapping[str, Any]], *, make_folder: bool = True) -> None:
    """Add lines in one write, after cutting off what an interrupted write left behind."""
    content = "".join(json_text(line) + "\n" for line in lines).encode()
    if not content:
        return
    if make_folder:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        _cut_torn_line(file)
        file.write(content)


def _cut_torn_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; a torn last line is skipped, a broken line elsewhere is an error."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line.decode("utf-8", "replace"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{os.fspath(path)!r}, line {number}: not a line of a run log ({error}).") from error
