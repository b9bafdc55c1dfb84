"""Profiles in the cache folder: measured once, found again under the same conditions alone, and never a reason to fail."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run, text
from torch import nn

from pliant import Budget, BudgetError, Profile, Session, measure, recipes, runlog
from pliant.cost import kept_profiles
from pliant.runtime.batchnorm import NormRule
from pliant.runtime.sealed import seal_json

POLICY = replace(recipes.full(), cost=measure.timed)  # seconds, and no budget that they could break


def net(width: int = 6, middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU() if middle is None else middle
    return nn.Sequential(*first, nn.Dropout(0.1), nn.Flatten(), nn.Linear(width * 36, 2))


class Own(nn.ReLU):
    """The same operation in a class of another name."""


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def profile_of(
    model: nn.Module | None = None,
    batch: torch.Tensor | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    policy: Any = POLICY,
    *,
    lr: float = 0.1,
    norm: NormRule = "chosen",
    **how: Any,
) -> Profile:
    """What a session measures, or finds, at its first step; `settings` are those of the optimizer."""
    model = net() if model is None else model
    optim = optimizer(model.parameters(), lr=lr, **how.pop("settings", {}))
    with Session(model, optim, mean_square, policy, norm=norm, **how) as session:
        session.step(images() if batch is None else batch)
        return session.profile


def files(cache: Path) -> list[Path]:
    return sorted((cache / "profiles").glob("*"))


def notes(log: Path) -> list[str]:
    return [line["text"] for line in runlog.read(log) if line["event"] == "note"]


def test_a_second_session_measures_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile_of()
    assert "cached" not in first.origin and len(files(cache)) == 1

    def measured(*_: Any) -> None:
        raise AssertionError("it measures again")

    monkeypatch.setattr(measure, "NodeTiming", measured)
    model = net()
    log = tmp_path / "run.jsonl"
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.3), mean_square, POLICY, norm="chosen", log=log) as session:
        assert session.spent["saved"] == 0.0, "nothing is known before the first step"
        session.step(images())
        assert session.spent["saved"] == first.origin["took"] > 0
        found = session.profile
    assert found.origin == {**first.origin, "cached": True}
    assert replace(found, origin=first.origin) == first
    start = next(runlog.read(log))
    assert start["origin"]["cached"] and start["origin"]["took"] == first.origin["took"]
    assert not notes(log)


def test_seconds_that_no_run_could_begin_with_are_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with more repeats; also where they were kept."""
    asked: list[int | None] = []

    def disturbed(*what: Any, repeats: int | None = None, **how: Any) -> Profile:
        asked.append(repeats)
        profile = measure.timed(*what, **how)
        slow = sum(profile.seconds) if repeats is None else 0.0
        return replace(profile, base=replace(profile.base, seconds=slow), plain=None)

    monkeypatch.setattr(kept_profiles, "timed", disturbed)
    policy = replace(recipes.pliant(time=0.5), cost=disturbed)
    found = profile_of(policy=policy)
    assert asked == [None, 2] and found.base.seconds == 0.0
    assert profile_of(policy=policy).base.seconds == 0.0 and len(asked) == 2  # this one was kept
    slow = replace(found, base=replace(found.base, seconds=10.0))
    slow.save(files(cache)[0])
    assert profile_of(policy=policy).base.seconds == 0.0 and asked[2:] == [None, 2]
    with pytest.raises(BudgetError, match="below the floor"):
        profile_of(policy=replace(policy, budget=Budget(time=1e-9)))
    assert asked[4:] == [None, 2]
    profile_of(policy=replace(policy, budget=Budget(time=1.0)))
    assert len(asked) == 6, "what was measured for another budget serves again"


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


OTHERS: dict[str, Callable[[], Profile]] = {
    "a larger batch": lambda: profile_of(batch=images(5)),
    "another width": lambda: profile_of(net(7)),
    "another operation without parameters": lambda: profile_of(net(middle=nn.Tanh())),
    "another class of module": lambda: profile_of(net(middle=Own())),
    "something frozen": lambda: profile_of(frozen()),
    "dropout that is off": lambda: profile_of(net().eval()),
    "another type": lambda: profile_of(net().double(), images().double()),
    "another layout": lambda: profile_of(net().to(memory_format=torch.channels_last)),
    "a batch of another layout": lambda: profile_of(batch=images().to(memory_format=torch.channels_last)),
    "momentum": lambda: profile_of(settings={"momentum": 0.9}),
    "another optimizer": lambda: profile_of(optimizer=torch.optim.Adam),
    "clipping": lambda: profile_of(clip=1.0),
    "a scaler": lambda: profile_of(scaler=torch.amp.GradScaler("cpu")),
    "several batches for a step": lambda: profile_of(accumulate=2),
    "norms that rest": lambda: profile_of(norm="frozen"),
    "norms as they are": lambda: profile_of(norm="as-is"),
    "measured where memory is short": lambda: profile_of(policy=recipes.pliant(time=1.0, memory="1GB")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_conditions_are_measured_for_themselves(other: str, cache: Path) -> None:
    profile_of()
    assert "cached" in profile_of().origin
    assert "cached" not in OTHERS[other]().origin
    assert len(files(cache)) == 2
    assert "cached" in OTHERS[other]().origin


def test_threads_settings_and_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    profile_of()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        assert "cached" not in profile_of().origin
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        assert "cached" not in profile_of().origin
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert "cached" not in profile_of().origin
    assert "cached" in profile_of().origin


def test_what_changes_no_price_changes_nothing() -> None:
    profile_of(settings={"momentum": 0.9, "weight_decay": 1e-4})
    assert "cached" in profile_of(lr=0.7, settings={"momentum": 0.8, "weight_decay": 1e-3}).origin
    assert "cached" in profile_of(on_nan="raise", correct=False, settings={"momentum": 0.9, "weight_decay": 1e-4}).origin


def test_only_what_is_timed_is_kept_and_nothing_else_is_looked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = profile_of(policy=recipes.full())
    assert "key" not in counted.origin
    own = measure.timed(model := net(), torch.optim.SGD(model.parameters(), lr=0.1), mean_square, images(), norm="chosen")
    assert profile_of(profile=own).origin == own.origin
    monkeypatch.setenv("PLIANT_PROFILES", "off")
    assert "key" not in profile_of().origin
    assert not cache.exists()


def test_the_oldest_leave(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_profiles, "_MOST", 2)
    keys = []
    for count in (2, 3, 4):
        keys.append(profile_of(batch=images(count)).origin["key"])
        os.utime(cache / "profiles" / f"{keys[-1]}.json", (count, count))
    assert {path.stem for path in files(cache)} == {*keys[1:]}


# ---------------------------------------------------------------- what can be wrong with the folder


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Writes a file again, changed and with a checksum that matches."""

    def write(path: Path) -> None:
        data = json.loads(path.read_text())
        del data["sha256"]
        change(data)
        path.write_text(json.dumps(seal_json(data)))

    return write


def foreign(path: Path) -> None:
    """A whole profile, of another model."""
    other = profile_of(net(7))
    (path.parent / f"{other.origin['key']}.json").replace(path)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "not a whole Pliant profile"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "not a whole Pliant profile"),
    "a bit": (lambda path: path.write_bytes(path.read_bytes().replace(b"float32", b"float33")), "checksum does not match"),
    "no text": (lambda path: path.write_bytes(b"\xff\x00PK\x03\x04"), "not a whole Pliant profile"),
    "a list": (lambda path: path.write_text("[1, 2]"), "not a whole Pliant profile"),
    "deep": (lambda path: path.write_text("[" * 100_000), "not a whole Pliant profile"),
    "a pickle": (lambda path: torch.save({"base": 1}, path), "not a whole Pliant profile"),
    "another model's": (foreign, "now runs at"),
    "an older format": (edited(lambda data: data.update(format="pliant.profile/1")), "format is"),
    "another key": (edited(lambda data: data["origin"].update(key="0")), "other conditions"),
    "another shape": (edited(lambda data: data["shapes"].update({"0.weight": [1]})), "another model"),
    "no number": (edited(lambda data: data["base"].update(seconds=float("nan"))), "not numbers of 0 or more"),
    "less than nothing": (edited(lambda data: data["base"].update(seconds=-1.0)), "not numbers of 0 or more"),
    "no seconds that it took": (edited(lambda data: data["origin"].pop("took")), "not numbers of 0 or more"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_file_that_is_damaged_or_foreign_is_measured_again(damage: str, cache: Path, tmp_path: Path) -> None:
    spoil, reason = DAMAGED[damage]
    profile_of()
    path = files(cache)[0]
    spoil(path)
    log = tmp_path / "run.jsonl"
    assert "cached" not in profile_of(log=log).origin
    (note,) = notes(log)
    assert note.startswith("the profile in the cache was not used: ") and reason in note
    assert "cached" in profile_of().origin, "the new one took its place"


def test_a_folder_that_cannot_be_used_is_said_once_and_fails_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "full.jsonl"
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("pliant.cost.profile.write_aside", full)
        assert "cached" not in profile_of(log=log).origin
        (note,) = notes(log)
        assert note.startswith("the profile was not kept") and "No space left" in note
    for name, block in (("file", lambda: cache.write_text("in the way")), ("folder", lambda: _folder_in_the_way(cache))):
        with suppress(FileNotFoundError):
            cache.unlink()
        block()
        log = tmp_path / f"{name}.jsonl"
        assert "cached" not in profile_of(log=log).origin
        (note,) = notes(log)
        assert note.startswith("the profile was not kept"), name


def _folder_in_the_way(cache: Path) -> None:
    profile_of()
    (path,) = files(cache)
    path.unlink()
    path.mkdir()


def test_without_a_home_every_run_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("PLIANT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert "key" not in profile_of().origin and "key" not in profile_of().origin
    assert kept_profiles.kept() == [] and kept_profiles.clear() == 0


def test_several_that_write_at_once_leave_a_whole_file(cache: Path) -> None:
    profile = profile_of()
    (path,) = files(cache)

    def write_and_read(_: int) -> Profile:
        profile.save(path)
        return Profile.load(path)

    with ThreadPoolExecutor(4) as pool:
        assert all(found == profile for found in pool.map(write_and_read, range(24)))
    assert files(cache) == [path], "nothing else is left behind"


# ---------------------------------------------------------------- the command


def test_the_command_lists_and_clears(cache: Path) -> None:
    assert "0 profiles" in text(run(["profile", "--cached"]))
    key = profile_of().origin["key"]
    (cache / "profiles" / f"{'0' * 32}.json").write_text("{")
    (cache / "profiles" / "mine.txt").write_text("not ours")
    shown = text(run(["profile", "--cached"]))
    assert "Sequential, batch 4×3×8×8, float32, cpu" in shown and "not usable" in shown and "2 profiles, " in shown
    listed = json.loads(run(["profile", "--cached", "--json"]).output)["profiles"]
    assert {one["file"] for one in listed} == {f"{key}.json", f"{'0' * 32}.json"}
    assert next(one for one in listed if "origin" in one)["full"]["seconds"] > 0
    assert text(run(["profile", "--clear"])) == "2 profiles removed"
    assert [path.name for path in files(cache)] == ["mine.txt"]
    assert json.loads(run(["profile", "--clear", "--json"]).output) == {"removed": 0}
