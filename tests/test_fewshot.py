"""Learning from few images: tasks as Meta-Dataset draws them, prototypes, practising, adapting, and the two commands."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import command
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny import bars
from torch import nn

from pliant import recipes
from pliant.apps import models
from pliant.apps.data.images import ImageError, ImageSet
from pliant.apps.fewshot import Augment, Episode, Prototypes, Sampling, adapt, meta_train, rate_for, scale_of
from pliant.apps.fewshot.meta import ResumeError, _hold_out
from pliant.apps.fewshot.views import Views
from pliant.apps.models import FoldedNet
from pliant.engine.prefix.feature_cache import Features

SMALL = ((3, 1, 16, 8), (5, 2, 24, 12), (3, 1, 36, 12))
NORM = (0.5, 0.5)


def backbone(seed: int = 0) -> FoldedNet:
    torch.manual_seed(seed)
    return FoldedNet(SMALL, classes=2)


# ---------------------------------------------------------------- tasks


def numbered(sizes: list[int]) -> ImageSet:
    """Image n shows its number, so that it is known again."""
    labels = torch.tensor([label for label, size in enumerate(sizes) for _ in range(size)])
    images = torch.arange(len(labels)).to(torch.uint8)[:, None, None, None].expand(-1, 3, 1, 1)
    return ImageSet(images, labels, tuple(f"c{label}" for label in range(len(sizes))))


def test_tasks_are_of_various_ways_and_shots() -> None:
    source, sampling = numbered([30] * 8), Sampling(ways=(5, 8))
    tasks = [sampling.draw(source, seed=0, number=number) for number in range(60)]
    assert {len(task.support.classes) for task in tasks} == {5, 6, 7, 8}
    shots = [task.support.labels.bincount(minlength=len(task.support.classes)) for task in tasks]
    assert all(int(each.min()) >= 1 and int(each.max()) <= 20 for each in shots)
    assert any(int(each.max()) >= 2 * int(each.min()) for each in shots)  # imbalanced
    assert min(int(each.sum()) for each in shots) < 20 < 90 < max(int(each.sum()) for each in shots)
    for task in tasks:
        assert task.query.labels.bincount().tolist() == [10] * len(task.query.classes)
        seen = {name: set(part.images[:, 0, 0, 0].tolist()) for name, part in (("s", task.support), ("q", task.query))}
        assert not seen["s"] & seen["q"]
        for part in (task.support, task.query):  # labels are new, images are those of the class
            for image, label in zip(part.images[:, 0, 0, 0].tolist(), part.labels.tolist(), strict=True):
                assert part.classes[label] == f"c{image // 30}"


def test_tasks_repeat_and_keep_their_limits() -> None:
    source, sampling = numbered([25] * 10), Sampling(ways=(5, 10), support=12, per_class=3, query=4)
    for number in range(20):
        one, same = sampling.draw(source, 7, number), sampling.draw(source, 7, number)
        assert torch.equal(one.support.images, same.support.images) and one.query.classes == same.query.classes
        assert len(one.support) <= 12 and int(one.support.labels.bincount().max()) <= 3
        assert one.query.labels.bincount().tolist() == [4] * len(one.query.classes)
    assert sampling.draw(source, 7, 0).support.classes != sampling.draw(source, 8, 0).support.classes


def test_small_classes_are_tested_with_half_and_single_images_left_out() -> None:
    task = Sampling(ways=(3, 3)).draw(numbered([2, 5, 5, 1]), 0)
    assert set(task.query.classes) == {"c0", "c1", "c2"} and task.query.labels.bincount().tolist() == [1, 1, 1]
    with pytest.raises(ImageError, match="this set has 3"):
        Sampling(ways=(4, 9)).draw(numbered([2, 5, 5, 1]), 0)
    with pytest.raises(ValueError, match="2 classes or more"):
        Sampling(ways=(1, 9))


# ---------------------------------------------------------------- prototypes


def test_prototypes_are_class_means_however_they_are_streamed() -> None:
    model, few = Prototypes(backbone(), scale=7.0), bars(3, 4)
    images, labels = few.normalised(NORM).images, few.labels
    model.fit_([(images, labels)], 3)
    with torch.no_grad():
        features = model.embed(images)
    for label in range(3):
        assert torch.allclose(model.prototypes[label], features[labels == label].mean(0), atol=1e-5)
    whole, at = model.prototypes.clone(), model.prototypes.data_ptr()
    model.fit_(zip(images.split(5), labels.split(5), strict=True), 3)
    assert torch.allclose(model.prototypes, whole, atol=1e-5) and model.prototypes.data_ptr() == at
    assert not model.prototypes.requires_grad
    expected = 7 * F.cosine_similarity(features[:, None], whole[None], dim=2)
    assert torch.allclose(model(images), expected, atol=1e-4)
    with pytest.raises(ValueError, match="no images"):
        model.fit_([], 3)
    with pytest.raises(ValueError, match="scale=0"):
        Prototypes(backbone(), scale=0)


def test_a_backbone_without_embed_gives_features_itself() -> None:
    model = Prototypes(nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1)))
    model.fit_([(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))], 2)
    assert model.prototypes.shape == (2, 5)


# ---------------------------------------------------------------- views


def test_views_are_normalised_pieces_whose_shares_add_up() -> None:
    few = bars(3, 3)
    views = Views(few, 4, NORM)
    pieces = list(views)
    assert [len(images) for images, _, _ in pieces] == [4, 4, 1] and len(views) == 3
    assert torch.equal(torch.cat([images for images, _, _ in pieces]), few.normalised(NORM).images)
    assert float(sum(share for _, _, share in pieces) / 3) == pytest.approx(1)
    loss = sum(share * images.mean() for images, _, share in pieces) / 3
    assert float(loss) == pytest.approx(float(few.normalised(NORM).images.mean()), abs=1e-5)
    with pytest.raises(ImageError, match="bytes"):
        Views(few.normalised(NORM), 4, NORM)


def test_changed_copies_repeat_whatever_the_batch() -> None:
    few, augment = bars(3, 3), Augment(flip=True)
    one = torch.cat([images for images, _, _ in Views(few, 1, NORM, augment, view=2, seed=5)])
    many = torch.cat([images for images, _, _ in Views(few, 9, NORM, augment, view=2, seed=5)])
    assert torch.allclose(one, many, atol=1e-6)
    other = torch.cat([images for images, _, _ in Views(few, 9, NORM, augment, view=3, seed=5)])
    assert (one - other).abs().mean() > 0.05
    assert one.min() >= -1 and one.max() <= 1


def test_what_augment_does_is_what_it_says() -> None:
    few = bars(2, 1)
    plain = next(iter(Views(few, 2, NORM)))[0]
    still = next(iter(Views(few, 2, NORM, Augment(shift=0, light=0))))[0]
    assert torch.allclose(still, plain, atol=1e-6)
    moved = next(iter(Views(few, 2, NORM, Augment(shift=0.2, light=0))))[0]
    assert not torch.allclose(moved, plain) and moved.mean() == pytest.approx(float(plain.mean()), abs=0.2)
    with pytest.raises(ValueError, match="shift"):
        Augment(shift=0.5)


# ---------------------------------------------------------------- adapting


def accuracy(found: Any, query: ImageSet) -> float:
    return float((found.predictions == query.labels).float().mean())


def test_adapting_learns_and_leaves_the_callers_backbone_alone() -> None:
    net, support, query = backbone().train(), bars(4, 3), bars(4, 8, seed=1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    start = adapt(net, support, steps=0, query=query)
    assert start.selection is None and start.losses == ()
    found = adapt(net, support, steps=60, lr=0.03, batch=12, policy=recipes.tinytrain(memory=None, macs=0.9), query=query)
    assert found.losses[-1] < 0.6 * found.losses[0]
    assert accuracy(found, query) >= accuracy(start, query)
    assert found.prototypes.shape == (4, 12) and found.classes == support.classes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()) and net.training
    assert found.selection is not None
    changed = {name for name, value in found.model.backbone.state_dict().items() if not torch.equal(value, before[name])}
    assert {f"backbone.{name}" for name in changed} <= found.selection.params and changed


def alike(cosine: float, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of so many images of each class: two of different classes have that cosine, two of the same are the same."""
    classes = len(counts)
    directions = torch.linalg.cholesky(torch.full((classes, classes), cosine) + (1 - cosine) * torch.eye(classes))
    labels = torch.repeat_interleave(torch.arange(classes), torch.tensor(counts))
    return directions[labels] * torch.rand(len(labels), 1).add(0.1), labels


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (7, 1, 2, 3), (20, 20, 20, 20)])
def test_the_rate_is_the_larger_the_more_alike_classes_look(counts: tuple[int, ...]) -> None:
    rates = [rate_for([alike(cosine, counts)], 4) for cosine in (0.0, 0.2, 0.25, 0.3, 0.9)]
    assert rates == pytest.approx([0.001, 0.001, 0.004, 0.016, 0.016], rel=1e-3)
    features, labels = alike(0.25, counts)
    assert rate_for(zip(features.split(2), labels.split(2), strict=True), 4) == pytest.approx(0.004, rel=1e-3)


def test_a_rate_is_refused_where_nothing_tells_it() -> None:
    with pytest.raises(ValueError, match="two classes"):
        rate_for([(torch.rand(3, 4), torch.zeros(3, dtype=torch.long))], 2)
    with pytest.raises(ValueError, match="not all finite"):
        rate_for([(torch.full((2, 4), torch.nan), torch.arange(2))], 2)
    for wrong in ("fast", -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="not a learning rate"):
            adapt(backbone(), bars(3, 2), lr=wrong)


def test_a_task_is_trained_at_the_rate_of_its_features_before(monkeypatch: pytest.MonkeyPatch) -> None:
    net, support, seen = backbone(), bars(3, 3), []
    embedded = Prototypes(net).eval().embed(next(iter(Views(support, 9, net.pixel_stats)))[0]).detach()

    def rate(batches: Any, classes: int) -> float:
        seen.append(torch.cat([features for features, _ in batches]))
        return 0.25

    monkeypatch.setitem(adapt.__globals__, "rate_for", rate)
    chosen = adapt(net, support, steps=3, batch=4, policy=recipes.full())
    assert chosen.lr == 0.25 and len(seen) == 1
    torch.testing.assert_close(seen[0], embedded, rtol=1e-4, atol=1e-5)
    given = adapt(net, support, steps=3, batch=4, policy=recipes.full(), lr=0.25)
    assert given.losses == chosen.losses and given.lr == 0.25 and len(seen) == 1
    assert adapt(net, support, steps=0).lr is None


def test_in_place_the_backbone_itself_is_adapted() -> None:
    net = backbone()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = adapt(net, bars(3, 2), steps=1, in_place=True)
    assert found.model.backbone is net
    assert any(not torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(param.requires_grad for param in net.parameters())


def test_one_image_at_a_time_is_the_same_as_all_at_once() -> None:
    runs = [adapt(backbone(), bars(3, 3), steps=2, batch=batch, policy=recipes.full()) for batch in (1, 4, 9)]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-3)
        for one, other in zip(run.model.parameters(), runs[0].model.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-4)
    policy = recipes.tinytrain(memory=None, macs=0.5)
    chosen = [adapt(backbone(), bars(3, 3), steps=1, batch=batch, policy=policy).selection for batch in (1, 9)]
    for selection in chosen:
        assert selection is not None and chosen[0] is not None
        assert dict(selection.values) == pytest.approx(dict(chosen[0].values), rel=1e-3)


def test_a_cache_changes_nothing_but_the_time() -> None:
    policy = recipes.tinytrain(memory=None, macs=0.3)
    plain, cached = (
        adapt(backbone(), bars(3, 3), steps=5, batch=3, views=2, policy=policy, cache=cache, query=bars(3, 2, seed=1))
        for cache in (None, "20MB")
    )
    assert cached.losses == pytest.approx(plain.losses, rel=1e-3)
    assert plain.predictions is not None and cached.predictions is not None
    assert torch.equal(plain.predictions, cached.predictions)


def test_a_cache_serves_prototypes_where_every_copy_is_a_new_one() -> None:
    policy, features = recipes.tinytrain(memory=None, macs=0.2, exact=True), Features("20MB")
    plain, cached = (
        adapt(backbone(), bars(3, 3), steps=5, batch=3, policy=policy, cache=cache, engine="prefix", query=bars(3, 2, seed=1))
        for cache in (None, features)
    )
    assert cached.losses == pytest.approx(plain.losses, rel=1e-3)
    assert plain.predictions is not None and cached.predictions is not None
    assert torch.equal(plain.predictions, cached.predictions)
    assert (features.stored, features.hits) == (9, 6 + 9 + 9)  # what the first piece shows is kept when it comes again


def test_norms_keep_their_statistics() -> None:
    class Normed(nn.Module):
        pixel_stats = NORM

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.bn(self.conv(x))).mean((2, 3))

    torch.manual_seed(0)
    net = Normed().train()
    found = adapt(net, bars(3, 2), steps=2, batch=6, policy=recipes.full())
    assert torch.equal(found.model.backbone.bn.running_mean, torch.zeros(8)) and net.training  # type: ignore[union-attr]
    assert not torch.equal(found.model.backbone.conv.weight, net.conv.weight)  # type: ignore[union-attr]


def test_what_makes_no_task_is_refused() -> None:
    with pytest.raises(ImageError, match="nothing to tell apart"):
        adapt(backbone(), bars(1, 4), steps=1)
    with pytest.raises(ImageError, match="no image of the class 'bar 2'"):
        adapt(backbone(), bars(3, 2).select(torch.arange(4)), steps=1)
    with pytest.raises(ImageError, match="no attribute pixel_stats"):
        adapt(nn.Flatten(), bars(2, 2), steps=0)
    assert adapt(backbone(), bars(3, 1), steps=1).losses  # one image of each class will do


# ---------------------------------------------------------------- practising


def test_practising_makes_tasks_easier() -> None:
    source = bars(8, 6)
    found = meta_train(backbone(), source, episodes=30, lr=0.05, sampling=Sampling(ways=(4, 6), support=12, query=2))
    assert len(found.losses) == 30
    assert sum(found.losses[-8:]) < 0.8 * sum(found.losses[:8])
    assert found.scale != pytest.approx(10.0, abs=1e-4)


def test_classes_that_are_held_out_are_never_practised_and_tell_which_weights_remain() -> None:
    source, sampling, net = bars(9, 6), Sampling(ways=(3, 4), support=8, query=2), backbone()
    start = [param.clone() for param in net.parameters()]
    found = meta_train(net, source, episodes=3, lr=1e3, sampling=sampling)  # ruins it
    assert [number for number, _ in found.held_out] == [0, 1, 2, 3] and found.remains == 0
    assert found.held_out[0][1] > max(accuracy for _, accuracy in found.held_out[1:])
    assert all(torch.equal(one, other) for one, other in zip(start, net.parameters(), strict=True))

    practised, aside = _hold_out(source, 0.2, 3, seed=0)
    assert aside is not None and len(set(aside.labels.tolist())) == 3  # as many as a task takes
    assert set(practised.labels.tolist()) | set(aside.labels.tolist()) == set(range(9))
    assert not set(practised.labels.tolist()) & set(aside.labels.tolist())
    assert _hold_out(bars(8, 6), 0.2, 3, seed=0)[1] is None and _hold_out(source, 0.0, 3, seed=0)[1] is None


def test_without_held_out_classes_the_last_weights_remain() -> None:
    net, start = backbone(), backbone()
    found = meta_train(net, bars(9, 6), episodes=2, sampling=Sampling(ways=(3, 4), support=8, query=2), held_out=0.0)
    assert found.held_out == () and found.remains is None and not torch.equal(net.stem.weight, start.stem.weight)
    with pytest.raises(ValueError, match=r"held_out=0\.9"):
        meta_train(net, bars(9, 6), held_out=0.9)


@pytest.mark.parametrize("classes", [4, 9])  # without and with held-out ones
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pliant.apps.fewshot.meta._SAVE_SECONDS", 0.0)
    how: dict[str, Any] = {"episodes": 5, "lr": 0.05, "sampling": Sampling(ways=(3, 4), support=8, query=2)}
    source, whole, out = bars(classes, 6), backbone(), tmp_path / "net.safetensors"
    straight = meta_train(whole, source, out=tmp_path / "whole.safetensors", **how)

    def stop(number: int, *_: float) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meta_train(backbone(), source, out=out, on_episode=stop, **how)
    assert not out.exists()
    again = backbone(seed=9)  # whatever it was, it is read back
    told: list[int] = []
    found = meta_train(again, source, out=out, resume=True, on_episode=lambda number, *_: told.append(number), **how)
    assert told == [4] and len(found.losses) == 5 and found.held_out == straight.held_out
    assert found.remains == straight.remains
    assert len(found.held_out) == (6 if classes == 9 else 0)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.safetensors", "whole.safetensors"]
    assert scale_of(out) == pytest.approx(found.scale)
    saved = models.load(str(out))
    assert isinstance(saved, FoldedNet) and torch.equal(saved.stem.weight, whole.stem.weight)


def test_another_runs_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.apps.fewshot.meta._SAVE_SECONDS", 0.0)
    source, out, sampling = bars(4, 6), tmp_path / "net.safetensors", Sampling(ways=(3, 4), support=8, query=2)

    def stop(*_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meta_train(backbone(), source, episodes=3, sampling=sampling, out=out, on_episode=stop)
    with pytest.raises(ResumeError, match="episodes=3, and this one has 4"):
        meta_train(backbone(), source, episodes=4, sampling=sampling, out=out, resume=True)
    (tmp_path / "net.safetensors.state").write_bytes(b"half of it")
    with pytest.raises(ResumeError, match="not the whole state"):
        meta_train(backbone(), source, episodes=3, sampling=sampling, out=out, resume=True)
    with pytest.raises(ResumeError, match="out="):
        meta_train(backbone(), source, resume=True)


# ---------------------------------------------------------------- the commands


def written(place: Path, images: ImageSet) -> Path:
    for number, (image, label) in enumerate(zip(images.images, images.labels.tolist(), strict=True)):
        folder = place / images.classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    return place


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "net.safetensors"
    file.write_bytes(models.weights_of(backbone(), {"scale": "12.0"}))
    return str(file)


def test_pliant_adapt_on_plain_folders(tmp_path: Path, net: str) -> None:
    support, query = written(tmp_path / "few", bars(3, 2)), written(tmp_path / "new", bars(3, 2, seed=1))
    out = tmp_path / "adapted.safetensors"
    fixed = ["--backbone", net, "--size", "32", "--steps", "2", "--batch", "3"]
    shown = command.run(["adapt", "--support", str(support), "--query", str(query), *fixed, "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "accuracy:" in command.text(shown) and "MB measured" in command.text(shown)
    assert shown.output.endswith(f"wrote {out}\n")
    refused = command.run(["predict", str(out), str(query)])
    assert refused.exit_code == 1 and "as files of `pliant adapt` and `pliant meta-train` do not" in command.text(refused)
    refused = command.run(["adapt", "--support", str(support), *fixed, "--out", "a.txt"])
    assert refused.exit_code == 2 and "ends with .safetensors" in command.text(refused)
    assert re.search(r"trained groups of channels: blocks\.\d\.\w+ \(\d+\)", shown.output), shown.output
    assert isinstance(models.load(str(out)), FoldedNet) and scale_of(out) == pytest.approx(12.0)

    loose = tmp_path / "loose"
    loose.mkdir()
    (query / "bar 1" / "2.png").rename(loose / "what is it.png")
    shown = command.run(["adapt", "--support", str(support), "--query", str(loose), *fixed, "--json", "--greedy"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert list(told["predictions"]) == ["what is it.png"] and told["macs_share"] <= 0.15 and len(told["losses"]) == 2
    assert told["lr"] == pytest.approx(0.016)  # bars look alike to a network that has learned nothing
    for wrong in ("fast", "-1", "nan"):
        shown = command.run(["adapt", "--support", str(support), *fixed, "--lr", wrong])
        assert shown.exit_code == 2 and "--lr" in command.text(shown) and wrong in command.text(shown)


def test_pliant_adapt_learns_from_no_test_image_and_classifies_those_of_the_query(
    tmp_path: Path, net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, seen = tmp_path / "both", []
    for split, each in (("train", 2), ("val", 1), ("test", 4)):
        written(both / split, bars(3, each))
    options = ["--backbone", net, "--size", "32", "--steps", "0", "--batch", "3"]

    def noted(net: Any, support: ImageSet, **given: Any) -> Any:
        seen.append((len(support), len(given["query"])))
        return adapt(net, support, **given)

    monkeypatch.setattr("pliant.apps.fewshot.adapt", noted)
    for query in (both, both / "val"):
        shown = command.run(["adapt", "--support", str(both), "--query", str(query), *options])
        assert shown.exit_code == 0, shown.output
    assert seen == [(9, 12), (9, 3)]
    for split in ("train", "val"):
        shutil.rmtree(both / split)
    shown = command.run(["adapt", "--support", str(both), *options])
    assert shown.exit_code == 1 and "test images only" in command.text(shown)


def test_pliant_adapt_with_a_cache_takes_the_same_steps(tmp_path: Path, net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    support, caches = written(tmp_path / "few", bars(3, 2)), list[Features | None]()
    start = ["adapt", "--support", str(support), "--backbone", net, "--size", "32", "--steps", "4", "--json"]

    def noted(*args: Any, **given: Any) -> Any:
        caches.append(Features(given["cache"]) if given["cache"] else None)
        return adapt(*args, **{**given, "cache": caches[-1]})

    monkeypatch.setattr("pliant.apps.fewshot.adapt", noted)

    def losses(*more: str) -> list[float]:
        shown = command.run([*start, *more])
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)["losses"]

    fixed = losses("--views", "1")
    assert losses("--views", "1", "--cache", "1MB") == pytest.approx(fixed, rel=1e-4)
    assert losses() != pytest.approx(fixed, rel=1e-4)
    assert caches[0] is None and caches[1] is not None and caches[1].hits > 0
    monkeypatch.undo()
    shown = command.run([*start, "--cache", "much"])
    assert shown.exit_code == 1 and "'much' is not an amount of memory" in command.text(shown)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda few: (few / "bar 1" / "2.png").unlink(), "'bar 1' has one image"),
        (lambda few: (few / "bar 1" / "2.png").write_bytes(b"no image"), "2.png' cannot be read"),
        (lambda few: (few / "bar 9").mkdir(), "'bar 9' is empty"),
    ],
)
def test_pliant_adapt_says_what_is_wrong_with_the_images(spoil: Any, told: str, tmp_path: Path, net: str) -> None:
    support = written(tmp_path / "few", bars(3, 2))
    spoil(support)
    shown = command.run(["adapt", "--support", str(support), "--backbone", net, "--size", "32"])
    assert shown.exit_code == 1 and told in command.text(shown)


def test_pliant_meta_train(tmp_path: Path, net: str) -> None:
    source, out = written(tmp_path / "source", bars(6, 4)), tmp_path / "practised.safetensors"
    options = ["--backbone", net, "--size", "32", "--episodes", "2", "--support", "20", "--out", str(out)]
    shown = command.run(["meta-train", str(source), *options, "--resume"])
    assert shown.exit_code == 1 and "no run to resume" in command.text(shown) and not out.exists()
    shown = command.run(["meta-train", str(source), *options])
    assert shown.exit_code == 0, shown.output
    assert "tasks, scale" in command.text(shown) and isinstance(models.load(str(out)), FoldedNet)
    shown = command.run(["meta-train", str(source), *options])
    assert shown.exit_code == 1 and "is there already" in command.text(shown)
    out.unlink()
    many = written(tmp_path / "many", bars(15, 3))
    shown = command.run(["meta-train", str(many), *options])
    assert shown.exit_code == 0 and "On held-out classes:" in command.text(shown), shown.output


def test_an_episode_is_what_adapt_takes() -> None:
    task = Sampling(ways=(3, 4), query=2).draw(bars(4, 5), 0)
    assert isinstance(task, Episode)
    found = adapt(backbone(), task.support, steps=1, query=task.query)
    assert found.predictions is not None and len(found.predictions) == len(task.query)
