"""The offline stage: a backbone practises tasks of few images on one set, so that few images of another suffice later."""

from __future__ import annotations

import io
import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps import models
from pliant.apps.data.images import ImageSet, Norm
from pliant.apps.fewshot.episodes import Episode, Sampling
from pliant.apps.fewshot.prototypes import SCALE, Prototypes, class_means
from pliant.apps.fewshot.views import Views, needed_norm
from pliant.core.errors import PliantError
from pliant.runtime.files import write_aside

CLIP = 1.0
HELD_OUT = 0.2  # of the classes
_LOOKS, _TASKS = 10, 8  # at the classes that are held out, in a run; tasks of each look
_SAVE_SECONDS = 30.0  # so much may be lost where a run is stopped


class ResumeError(PliantError, ValueError):
    """A run that cannot be gone on with."""


@dataclass(frozen=True, eq=False)
class MetaTrained:
    """A backbone that has practised, the scale that it learned, and how each task went: loss and accuracy on its queries.

    `held_out`: (tasks practised so far, accuracy on tasks of classes that are never practised), the first before any practice;
    `remains` is which of them did best: its weights are the backbone's. None where no class was held out.
    """

    backbone: nn.Module
    scale: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...] = ()
    remains: int | None = None


def meta_train(
    backbone: nn.Module,
    source: ImageSet,
    *,
    episodes: int = 1000,
    sampling: Sampling | None = None,
    lr: float = 0.001,
    held_out: float = HELD_OUT,
    norm: Norm | None = None,
    scale: float = SCALE,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    on_episode: Callable[[int, float, float], None] | None = None,
) -> MetaTrained:
    """Train a backbone in place on tasks drawn from `source`: prototypes from the support images, the loss of the query images,
    and the gradient of both.

    Norms keep their statistics: a task of a few classes would teach them its own. The rate falls to nothing along a half
    cosine. A share of the classes is `held_out`: a few times in a run, tasks of those tell how well classes are learned that
    were never practised, and the weights that did best are what remains, be it those of the beginning. Where there are fewer
    classes than three tasks take at least, all are practised, and the last weights remain.

    The weights end up in `out` (safetensors, with the learned scale). With `out`, the state is kept beside it every half
    minute, and with `resume` a run that was stopped goes on there as if it had not been.
    """
    if episodes < 1:
        raise ValueError(f"episodes={episodes}: at least one.")
    if not 0 <= held_out <= 0.5:
        raise ValueError(f"held_out={held_out}: a share of the classes, from 0 to one half.")
    if resume and out is None:
        raise ResumeError("resume=True goes on from the state beside a file: name it with out=….")
    norm = needed_norm(backbone, norm)
    sampling = sampling or Sampling()
    model = Prototypes(backbone, scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, episodes)
    held = {"model": model, "optimizer": optimizer, "falling": falling}
    told = {"episodes": episodes, "seed": seed, "lr": lr, "sampling": asdict(sampling), "images": len(source)}
    told["held_out"] = held_out
    practised, aside = _parted(source, held_out, sampling.ways[0], seed)
    unseen = _Unseen(model, [sampling.draw(aside, seed, number) for number in range(_TASKS)] if aside is not None else [], norm)
    losses: list[float] = []
    accuracies: list[float] = []
    state = Path(f"{os.fspath(out)}.state") if out is not None else None
    if resume and state is not None:
        losses, accuracies = _go_on(state, held, told, unseen)
    if out is not None and not os.access(_nearest_folder(Path(out)), os.W_OK):
        raise ResumeError(f"nothing can be written beside {os.fspath(out)!r}. Choose another place before hours are spent.")
    saved = time.monotonic() - _SAVE_SECONDS  # the first task is kept at once
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for number in range(len(losses), episodes):
            unseen.look(number, episodes)
            loss, hits = practise(model, sampling.draw(practised, seed, number), norm)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            falling.step()
            losses.append(float(loss.detach()))
            accuracies.append(hits)
            if state is not None and time.monotonic() - saved >= _SAVE_SECONDS:
                _keep(state, held, told, losses, accuracies, unseen)
                saved = time.monotonic()
            if on_episode is not None:
                on_episode(number, losses[-1], hits)
        unseen.look(episodes, episodes)
        if unseen.best:
            model.load_state_dict(unseen.best)
    finally:
        for module, flag in was.items():
            module.training = flag
    learned = float(model.scale.detach())
    if out is not None and state is not None:
        write_aside(out, models.weights_of(backbone, {"scale": repr(learned)}))
        state.unlink(missing_ok=True)
    return MetaTrained(backbone, learned, tuple(losses), tuple(accuracies), tuple(unseen.accuracies), unseen.remains)


class _Unseen:
    """Tasks of classes that are never practised, how a model did on them, and its weights when it did best."""

    def __init__(self, model: Prototypes, tasks: list[Episode], norm: Norm) -> None:
        self._model, self._tasks, self._norm = model, tasks, norm
        self.accuracies: list[tuple[int, float]] = []
        self.best: dict[str, Tensor] = {}
        self.remains: int | None = None  # which look was the best
        self.rank: tuple[float, float] | None = None  # of the best: its accuracy and, where that is the same, its loss

    @torch.no_grad()
    def look(self, number: int, episodes: int) -> None:
        """After so many of all tasks, if it is time to look."""
        is_time = number == episodes or number % -(-episodes // _LOOKS) == 0
        if not self._tasks or not is_time or any(number == looked for looked, _ in self.accuracies):
            return
        losses, hits = zip(*(practise(self._model, task, self._norm) for task in self._tasks), strict=True)
        accuracy, loss = sum(hits) / len(hits), float(torch.stack(losses).mean())
        self.accuracies.append((number, accuracy))
        rank = (round(accuracy, 6), -loss) if math.isfinite(loss) else (-1.0, 0.0)  # what is ruined names one class rightly
        if self.rank is None or rank > self.rank:
            self.rank, self.remains = rank, len(self.accuracies) - 1
            self.best = {name: value.clone() for name, value in self._model.state_dict().items()}


def _parted(source: ImageSet, share: float, least: int, seed: int) -> tuple[ImageSet, ImageSet | None]:
    """Images to practise on, and those of classes that are held out: by lot, and as many as a task takes, or none."""
    labels = source.labels.cpu().numpy()
    there = np.flatnonzero(np.bincount(labels, minlength=len(source.classes)) >= 2)
    if not share or len(there) < 3 * least:
        return source, None
    out = np.random.default_rng([seed, len(there)]).permutation(there)[: max(round(share * len(there)), least)]
    is_out = torch.from_numpy(np.isin(labels, out)).to(source.labels.device)
    return source.select(~is_out), source.select(is_out)


def practise(model: Prototypes, episode: Episode, norm: Norm) -> tuple[Tensor, float]:
    """The loss of one task and the share of its queries that were named rightly."""
    device = model.log_scale.device
    (support, learned, _), (query, asked, _) = (
        next(iter(Views(images, len(images), norm, device=device))) for images in (episode.support, episode.query)
    )
    prototypes = class_means([(model.embed(support), learned)], len(episode.support.classes))
    logits = model.logits(model.embed(query), prototypes)
    return F.cross_entropy(logits, asked), float((logits.argmax(1) == asked).float().mean())


def _keep(
    state: Path,
    held: dict[str, Any],
    told: dict[str, Any],
    losses: list[float],
    accuracies: list[float],
    unseen: _Unseen,
) -> None:
    content = io.BytesIO()
    tensors = {name: one.state_dict() for name, one in held.items()}
    so_far = {"losses": losses, "accuracies": accuracies, "unseen": unseen.accuracies}
    so_far |= {"best": unseen.best, "rank": unseen.rank, "remains": unseen.remains}
    torch.save({**tensors, "told": told, **so_far}, content)
    write_aside(state, content.getvalue())


def _nearest_folder(path: Path) -> Path:
    """The folder of a file, or the nearest one above it that is there."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def _go_on(state: Path, held: dict[str, Any], told: dict[str, Any], unseen: _Unseen) -> tuple[list[float], list[float]]:
    if not state.exists():
        raise ResumeError(f"there is no run to go on with: {os.fspath(state)!r} is not there. Leave out resume to begin one.")
    try:
        saved: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, pickle.UnpicklingError) as error:
        raise ResumeError(f"{os.fspath(state)!r} is not the whole state of a run. Remove it to begin anew.") from error
    differ = [key for key in told if saved["told"].get(key) != told[key]]
    if differ:
        was, now = saved["told"].get(differ[0]), told[differ[0]]
        raise ResumeError(
            f"{os.fspath(state)!r} is of a run with {differ[0]}={was}, and this one has {now}. Go on with the same, or remove "
            f"it to begin anew."
        )
    for name, one in held.items():
        one.load_state_dict(saved[name])
    unseen.accuracies, unseen.best = saved["unseen"], saved["best"]
    unseen.rank, unseen.remains = saved["rank"], saved["remains"]
    return saved["losses"], saved["accuracies"]
