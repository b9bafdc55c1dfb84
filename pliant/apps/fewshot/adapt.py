"""The online stage: choose what is worth training for this task inside the budget, and train that for a few steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps.data.images import ImageError, ImageSet, Norm
from pliant.apps.fewshot.prototypes import SCALE, Prototypes
from pliant.apps.fewshot.rates import as_rate, rate_for
from pliant.apps.fewshot.views import Augment, Views, needed_norm
from pliant.core.budget import Budget
from pliant.core.types import Selection
from pliant.engine.prefix.feature_cache import Features
from pliant.planning import recipes
from pliant.planning.policy import Policy
from pliant.session.session import Session

CLIP = 1.0  # networks without norms do not survive long steps


@dataclass(frozen=True, eq=False)
class Adapted:
    """What an adaptation came to.

    `model` classifies by the prototypes that it ended with; its `backbone` is the adapted one. `predictions` are the classes
    of the query images. `selection` says what trained and what that was predicted to cost; `memory_bytes` is the measured peak
    of a step beyond that of inference, where memory was limited. `losses` are those of the steps, `lr` is their rate.
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
    norm: Norm | None = None,
    scale: float = SCALE,
    engine: str = "auto",
    cache: Features | str | int | None = None,
    in_place: bool = False,
    seed: int = 0,
    log: str | os.PathLike[str] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Adapted:
    """Fit a backbone to the classes of a few labelled images, inside a budget.

    Every step makes prototypes of the support set as the backbone is now, without a gradient, and takes the loss of a randomly
    changed copy of it (`augment`), `batch` images at a time: gradients gather, and one update follows. What trains is chosen
    before the first step from the whole support set, by `policy` (`recipes.tinytrain(exact=True)`) inside of `budget` (1 MB
    beyond inference and 0.15 of a full backward pass's MACs, or what the policy says). With `steps=0` nothing trains.

    The learning rate is by default that of the task (`rate_for`): small where the features tell its classes apart as they are,
    and training can but spoil them, larger where all classes look alike to them.

    The backbone has `embed`, or gives features. It is copied unless `in_place`, and runs in evaluation mode, in which the copy
    stays: norms keep their statistics. `norm` is what its input is normalised with, if it has no attribute of that name.

    With a `cache` of so many bytes (or `Features` of your own), what lies before the first chosen layer is computed once for
    each image of the support set; with `views`, just so many changed copies that are taken in turn, once for each of those,
    too. Without `views` that is for a budget of memory or MACs and for `engine="prefix"`: where engines are raced, steps alone
    count, and they find nothing there.

    A class of a single image is its own prototype: what it learns is to keep its changed copy near and those of other classes
    away. That works, but says nothing of how images of that class differ.
    """
    _check(support)
    lr = as_rate(lr)
    norm = needed_norm(backbone, norm)
    if policy is None:
        policy = recipes.tinytrain(exact=True, seed=seed)
    if budget is not None:
        policy = replace(policy, budget=budget)
    model = Prototypes(backbone if in_place else copy.deepcopy(backbone), scale)
    was = {module: module.training for module in backbone.modules()} if in_place else {}
    device = model.log_scale.device
    model.log_scale.requires_grad_(False)
    plain = Views(support, batch, norm, device=device)
    changed = Views(support, batch, norm, augment or Augment(), seed=seed, device=device)
    model.eval()
    try:
        task = _Task(model, plain, changed, views)
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
                probe=changed,
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
        predictions = predict(model, query, norm, batch) if query is not None else None
    finally:
        for module, flag in was.items():
            module.training = flag
    return Adapted(model, support.classes, selection, losses, memory, predictions, rate)


def _check(support: ImageSet) -> None:
    """There must be classes to tell apart, and images of each."""
    if len(support.classes) < 2:
        raise ImageError(f"there is nothing to tell apart: the support set has {len(support.classes)} class. Give two or more.")
    empty = [name for label, name in enumerate(support.classes) if not bool((support.labels == label).any())]
    if empty:
        raise ImageError(f"no image of the class {empty[0]!r} is in the support set. Give one of each class, better several.")


@dataclass(frozen=True, eq=False)
class _Task:
    """A support set as it is, changed copies of it, and the model that learns from the two."""

    model: Prototypes
    plain: Views
    changed: Views
    views: int | None

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Of a piece of a changed copy, against the prototypes as they are."""
        images, labels, share = batch
        return share * F.cross_entropy(model(images), labels)

    def train(self, session: Session, steps: int, on_step: Callable[[int, float], None] | None) -> Iterator[float]:
        """Take the steps; gives the loss of each."""
        for step in range(steps):
            self.fit_(session if step else None)
            view = step if self.views is None else step % self.views
            changed, total = replace(self.changed, view=view), torch.zeros((), device=self.changed.device)
            for index in changed.places():
                ids = [(view, i) for i in index] if self.views is not None else None  # another copy never comes back
                total += session.step(changed.piece(index), ids=ids)
            loss = float(total) / len(changed)
            if on_step is not None:
                on_step(step, loss)
            yield loss

    @torch.no_grad()
    def features(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the support set as the backbone is now, with the labels."""
        for images, labels, _ in self.plain:
            yield self.model.embed(images), labels

    def fit_(self, session: Session | None = None) -> None:
        """Prototypes of the support set as the backbone is now. With a session whose features are cached, from there."""
        classes = len(self.plain.images.classes)
        if session is None or not session.caches:
            self.model.fit_(((images, labels) for images, labels, _ in self.plain), classes)
            return

        def features() -> Iterator[tuple[Tensor, Tensor]]:
            for index in self.plain.places():
                piece = self.plain.piece(index)
                yield session.compute(_embedded, piece, ids=[(None, i) for i in index]), piece[1]

        self.model.take_(features(), classes)


def _embedded(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return model.embed(batch[0])


@torch.no_grad()
def predict(model: Prototypes, images: ImageSet, norm: Norm, batch: int = 1) -> Tensor:
    """The class of each image, by the nearest prototype."""
    views = Views(images, batch, norm, device=model.log_scale.device)
    return torch.cat([model(piece).argmax(1).cpu() for piece, _, _ in views])
