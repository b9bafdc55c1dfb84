"""The offline stage: train a backbone on many small tasks from one set, so that few images of another set suffice later."""

from __future__ import annotations

import math
import os
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
from pliant.apps.data.images import ImageSet, PixelStats
from pliant.apps.fewshot.episodes import Episode, Sampling
from pliant.apps.fewshot.prototypes import SCALE, Prototypes, class_means
from pliant.apps.fewshot.views import Views, required_pixel_stats
from pliant.core.errors import PliantError
from pliant.runtime.files import write_aside
from pliant.runtime.sealed import load_archive, save_archive

CLIP = 1.0
HELD_OUT = 0.2  # share of the classes
_CHECKS, _CHECK_TASKS = 10, 8  # evaluations on held-out classes in a run, and the number of tasks in each
_SAVE_SECONDS = 30.0  # the most that a stopped run loses
_STATE_KEYS = frozenset(("model", "optimizer", "scheduler", "settings", "losses", "accuracies", "held_out"))


class ResumeError(PliantError, ValueError):
    """A run that cannot be resumed."""


@dataclass(frozen=True, eq=False)
class MetaTrained:
    """The trained backbone, the learned scale, and the loss and the accuracy of each task on its query images.

    `held_out` has pairs of (tasks so far, accuracy on tasks of held-out classes); the first is from before training. `remains`
    is the position of the best pair, whose weights the backbone now has. It is None if no class was held out.
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
    pixel_stats: PixelStats | None = None,
    scale: float = SCALE,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    on_episode: Callable[[int, float, float], None] | None = None,
) -> MetaTrained:
    """Train a backbone in place on tasks drawn from `source`: prototypes come from the support images, the loss from the query
    images, and the gradient flows through both.

    Batch norms keep their running statistics, because a task of a few classes would distort them. The learning rate decays to
    zero along a cosine. A share of the classes is `held_out`: a few times in a run, tasks of these classes are evaluated, and
    the backbone ends with the weights that did best, even if those are the initial ones. If there are too few classes for
    that, all are used for training and the last weights remain.

    `out` receives the weights (safetensors, with the learned scale). The state is saved beside it every half minute; `resume`
    continues a stopped run from there, with the same result as if it had not been stopped.
    """
    if episodes < 1:
        raise ValueError(f"episodes={episodes}: give at least one.")
    if not 0 <= held_out <= 0.5:
        raise ValueError(f"held_out={held_out}: give a share of the classes, from 0 to 0.5.")
    if resume and out is None:
        raise ResumeError("resume=True needs the file that the run writes: give it with out=….")
    pixel_stats = required_pixel_stats(backbone, pixel_stats)
    sampling = sampling or Sampling()
    state = Path(f"{os.fspath(out)}.state") if out is not None else None
    settings = {"episodes": episodes, "seed": seed, "lr": lr, "sampling": asdict(sampling), "images": len(source)}
    training, aside = _hold_out(source, held_out, sampling.ways[0], seed)
    checks = [sampling.draw(aside, seed, number) for number in range(_CHECK_TASKS)] if aside is not None else []
    run = _MetaRun(Prototypes(backbone, scale), checks, pixel_stats, lr, settings | {"held_out": held_out})
    if resume and state is not None:
        run.load(state)
    if out is not None and not os.access(_nearest_folder(Path(out)), os.W_OK):
        raise ResumeError(f"cannot write beside {os.fspath(out)!r}. Choose another place before the run starts.")
    saved_at = time.monotonic() - _SAVE_SECONDS  # save right after the first task
    modes = {module: module.training for module in run.model.modules()}
    run.model.eval()
    try:
        for number in range(len(run.losses), episodes):
            run.check(number)
            run.step(sampling.draw(training, seed, number))
            if state is not None and time.monotonic() - saved_at >= _SAVE_SECONDS:
                run.save(state)
                saved_at = time.monotonic()
            if on_episode is not None:
                on_episode(number, run.losses[-1], run.accuracies[-1])
        run.check(episodes)
        if run.best.weights:
            run.model.load_state_dict(run.best.weights)
    finally:
        for module, mode in modes.items():
            module.training = mode
    learned = float(run.model.scale.detach())
    if out is not None and state is not None:
        write_aside(out, models.weights_of(backbone, {"scale": repr(learned)}))
        state.unlink(missing_ok=True)
    return MetaTrained(
        backbone, learned, tuple(run.losses), tuple(run.accuracies), tuple(run.best.accuracies), run.best.position
    )


@dataclass
class _Best:
    """Accuracies on held-out classes so far, and the weights that did best."""

    accuracies: list[tuple[int, float]]
    position: int | None = None  # of the best accuracy
    rank: tuple[float, float] | None = None  # its accuracy and, to break ties, its negative loss
    weights: dict[str, Tensor] | None = None


class _MetaRun:
    """The state of one run: model, optimizer, results so far, and the best weights on held-out classes."""

    def __init__(
        self, model: Prototypes, checks: list[Episode], pixel_stats: PixelStats, lr: float, settings: dict[str, Any]
    ) -> None:
        self.model, self._checks, self._pixel_stats, self._settings = model, checks, pixel_stats, settings
        self._optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, settings["episodes"])
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.best = _Best([])

    def step(self, task: Episode) -> None:
        """One optimizer step on one task."""
        loss, accuracy = evaluate(self.model, task, self._pixel_stats)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._scheduler.step()
        self.losses.append(float(loss.detach()))
        self.accuracies.append(accuracy)

    @torch.no_grad()
    def check(self, number: int) -> None:
        """Evaluate on held-out classes after this many tasks, if a check is due."""
        episodes, best = self._settings["episodes"], self.best
        due = number == episodes or number % -(-episodes // _CHECKS) == 0
        if not self._checks or not due or any(number == done for done, _ in best.accuracies):
            return
        losses, hits = zip(*(evaluate(self.model, task, self._pixel_stats) for task in self._checks), strict=True)
        accuracy, loss = sum(hits) / len(hits), float(torch.stack(losses).mean())
        best.accuracies.append((number, accuracy))
        rank = (round(accuracy, 6), -loss) if math.isfinite(loss) else (-1.0, 0.0)  # broken weights still get one class right
        if best.rank is None or rank > best.rank:
            best.rank, best.position = rank, len(best.accuracies) - 1
            best.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self._optimizer, "scheduler": self._scheduler}

    def save(self, state: Path) -> None:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        results = {"losses": self.losses, "accuracies": self.accuracies, "held_out": vars(self.best)}
        save_archive(state, {**parts, "settings": self._settings, **results})

    def load(self, state: Path) -> None:
        saved = read_state(state)
        for name, now in self._settings.items():
            before = saved["settings"].get(name)
            if before != now:
                raise ResumeError(
                    f"{os.fspath(state)!r} is of a run with {name}={before}, and this one has {now}. Continue with the same "
                    f"value, or remove the file to start again."
                )
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])
        self.losses, self.accuracies, self.best = saved["losses"], saved["accuracies"], _Best(**saved["held_out"])


def read_state(state: Path) -> dict[str, Any]:
    """The saved state of a run that was stopped."""
    name = os.fspath(state)
    if not state.exists():
        raise ResumeError(f"there is no run to resume: {name!r} does not exist. Leave out resume to start one.")
    try:
        saved: dict[str, Any] = load_archive(state)
    except (OSError, ValueError) as error:
        raise ResumeError(f"{name!r} is not the whole state of a run: {error}. Remove it to start again.") from error
    if not isinstance(saved, dict) or not saved.keys() >= _STATE_KEYS:
        raise ResumeError(f"{name!r} is not the state of a run of `pliant meta-train`. Remove it to start again.")
    return saved


def _hold_out(source: ImageSet, share: float, least: int, seed: int) -> tuple[ImageSet, ImageSet | None]:
    """Images to train on, and those of randomly held-out classes: at least as many classes as a task needs, or none."""
    labels = source.labels.cpu().numpy()
    usable = np.flatnonzero(np.bincount(labels, minlength=len(source.classes)) >= 2)
    if not share or len(usable) < 3 * least:
        return source, None
    out = np.random.default_rng([seed, len(usable)]).permutation(usable)[: max(round(share * len(usable)), least)]
    is_out = torch.from_numpy(np.isin(labels, out)).to(source.labels.device)
    return source.select(~is_out), source.select(is_out)


def evaluate(model: Prototypes, task: Episode, pixel_stats: PixelStats) -> tuple[Tensor, float]:
    """The loss of one task, and the share of its query images that are classified correctly."""
    device = model.log_scale.device
    (support, support_labels, _), (query, query_labels, _) = (
        next(iter(Views(images, len(images), pixel_stats, device=device))) for images in (task.support, task.query)
    )
    prototypes = class_means([(model.embed(support), support_labels)], len(task.support.classes))
    logits = model.logits(model.embed(query), prototypes)
    return F.cross_entropy(logits, query_labels), float((logits.argmax(1) == query_labels).float().mean())


def _nearest_folder(path: Path) -> Path:
    """The folder of a file, or the nearest existing one above it."""
    return next(folder for folder in path.absolute().parents if folder.exists())
