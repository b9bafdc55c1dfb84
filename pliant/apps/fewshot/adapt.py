"""The online stage: choose what to train for this task inside the budget, and train it for a few steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps.data.images import ImageError, ImageSet, PixelStats
from pliant.apps.fewshot.prototypes import SCALE, Prototypes
from pliant.apps.fewshot.rates import as_rate, rate_for
from pliant.apps.fewshot.views import Augment, Views, required_pixel_stats
from pliant.core.budget import Budget
from pliant.core.types import Selection
from pliant.engine.prefix.feature_cache import Features
from pliant.planning import recipes
from pliant.planning.policy import Policy
from pliant.session.session import Session

CLIP = 1.0  # networks without batch norm diverge without it


@dataclass(frozen=True, eq=False)
class Adapted:
    """The result of an adaptation.

    `model` classifies with its final prototypes; its `backbone` is the adapted one. `predictions` are the classes of the query
    images. `selection` is what was trained, with its predicted cost. `memory_bytes` is the measured peak of a step beyond
    inference, if memory was limited. `losses` has one entry per step; `lr` is the learning rate.
    """

    model: Prototypes
    classes: tuple[str, ...]
    selection: Selection | None
    losses: tuple[float, ...]
    memory_bytes: int | None = None
    predictions: Tensor | None = None
    lr: float | None = None

    @property
    def prototypes(self) -> Tensor:
        return self.model.prototypes


def adapt(
    backbone: nn.Module,
    support: ImageSet,
    *,
    budget: Budget | None = None,
    policy: Policy | None = None,
    steps: int = 40,
    lr: float | Literal["auto"] = "auto",
    batch: int = 1,
    augment: Augment | None = None,
    views: int | None = None,
    query: ImageSet | None = None,
    pixel_stats: PixelStats | None = None,
    scale: float = SCALE,
    engine: str = "auto",
    cache: Features | str | int | None = None,
    in_place: bool = False,
    seed: int = 0,
    log: str | os.PathLike[str] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Adapted:
    """Fit a backbone to the classes of a few labelled images, inside a budget.

    Every step computes prototypes of the support set without a gradient, then the loss of an augmented copy of the set
    (`augment`). It takes `batch` images at a time and accumulates their gradients into one update. What to train is chosen
    once, before the first step, from the whole support set: by `policy` (default `recipes.tinytrain(exact=True)`) inside
    `budget` (default: that of the policy). With `steps=0` nothing is trained.

    The default learning rate depends on the task (`rate_for`): low if the features already separate the classes, higher if
    all classes look alike.

    The backbone has a method `embed`, or returns features. It is copied unless `in_place`, and runs in evaluation mode, so
    batch norms keep their running statistics. `pixel_stats` normalise its input if it has no attribute of that name.

    With a `cache` (bytes, or your own `Features`), the outputs of the prefix are computed once per image of the support set.
    `views` limits the number of augmented copies, so that those are cached too. Without `views` the cache helps with a budget
    of memory or MACs and with `engine="prefix"`, but it is not counted when the engine is chosen by its speed.

    A class with a single image is its own prototype. It learns to stay near its augmented copies and away from other classes,
    but it does not show how images of that class differ.
    """
    _check(support)
    lr = as_rate(lr)
    pixel_stats = required_pixel_stats(backbone, pixel_stats)
    if policy is None:
        policy = recipes.tinytrain(exact=True, seed=seed)
    if budget is not None:
        policy = replace(policy, budget=budget)
    model = Prototypes(backbone if in_place else copy.deepcopy(backbone), scale)
    modes = {module: module.training for module in backbone.modules()} if in_place else {}
    device = model.log_scale.device
    model.log_scale.requires_grad_(False)
    plain = Views(support, batch, pixel_stats, device=device)
    augmented = Views(support, batch, pixel_stats, augment or Augment(), seed=seed, device=device)
    model.eval()
    try:
        task = _FewShotTask(model, plain, augmented, views)
        selection: Selection | None = None
        losses: tuple[float, ...] = ()
        memory: int | None = None
        rate: float | None = None
        if steps:
            rate = rate_for(task.features(), len(support.classes)) if lr == "auto" else lr
            optimizer = torch.optim.SGD(model.backbone.parameters(), lr=rate, momentum=0.9)
            with Session(
                model,
                optimizer,
                task.loss,
                policy,
                norm="frozen",
                clip=CLIP,
                accumulate=len(plain),
                probe=augmented,
                undo=False,
                engine=engine,
                cache=cache,
                total_steps=steps,
                log=log,
            ) as session:
                losses = tuple(task.train(session, steps, on_step))
                selection = session.selection
                memory = max((r.measured_bytes for r in session.rounds if r.measured_bytes is not None), default=None)
        task.fit_()
        predictions = predict(model, query, pixel_stats, batch) if query is not None else None
    finally:
        for module, mode in modes.items():
            module.training = mode
    return Adapted(model, support.classes, selection, losses, memory, predictions, rate)


def _check(support: ImageSet) -> None:
    """There must be at least two classes, with images of each."""
    if len(support.classes) < 2:
        raise ImageError(
            f"the support set has {len(support.classes)} class, so there is nothing to tell apart. Give two or more."
        )
    empty = [name for label, name in enumerate(support.classes) if not bool((support.labels == label).any())]
    if empty:
        raise ImageError(f"no image of the class {empty[0]!r} is in the support set. Give one of each class, better several.")


@dataclass(frozen=True, eq=False)
class _FewShotTask:
    """A support set, augmented copies of it, and the model that learns from them."""

    model: Prototypes
    plain: Views
    augmented: Views
    views: int | None

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The loss of a batch against the current prototypes."""
        images, labels, share = batch
        return share * F.cross_entropy(model(images), labels)

    def train(self, session: Session, steps: int, on_step: Callable[[int, float], None] | None) -> Iterator[float]:
        """Take the steps; yields the loss of each."""
        for step in range(steps):
            self.fit_(session if step else None)
            view = step if self.views is None else step % self.views
            augmented, total = replace(self.augmented, view=view), torch.zeros((), device=self.augmented.device)
            for index in augmented.places():
                # Without fixed views, no copy is seen twice.
                ids = [(view, i) for i in index] if self.views is not None else None
                total += session.step(augmented.piece(index), ids=ids)
            loss = float(total) / len(augmented)
            if on_step is not None:
                on_step(step, loss)
            yield loss

    @torch.no_grad()
    def features(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Features of the support set with the current backbone, and its labels."""
        for images, labels, _ in self.plain:
            yield self.model.embed(images), labels

    def fit_(self, session: Session | None = None) -> None:
        """Compute the prototypes with the current backbone; from the cache of the session, if it has one."""
        classes = len(self.plain.images.classes)
        if session is None or not session.caches:
            self.model.fit_(((images, labels) for images, labels, _ in self.plain), classes)
            return

        def features() -> Iterator[tuple[Tensor, Tensor]]:
            for index in self.plain.places():
                piece = self.plain.piece(index)
                yield session.compute(_embedded, piece, ids=[(None, i) for i in index]), piece[1]

        self.model.fit_features_(features(), classes)


def _embedded(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return model.embed(batch[0])


@torch.no_grad()
def predict(model: Prototypes, images: ImageSet, pixel_stats: PixelStats, batch: int = 1) -> Tensor:
    """The class of each image: that of the nearest prototype."""
    views = Views(images, batch, pixel_stats, device=model.log_scale.device)
    return torch.cat([model(piece).argmax(1).cpu() for piece, _, _ in views])
