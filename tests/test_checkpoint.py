"""Files that are read back: with a checksum, checked as a whole before anything changes, and whole after every fault."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from oracle import differences, snapshot
from torch import nn
from zoo import adamw

from pliant import Budget, Session, measure, recipes, schedule
from pliant.apps import models
from pliant.apps.fewshot.meta import ResumeError, read_state
from pliant.core.budget import Absolute
from pliant.cost.profile import Profile
from pliant.runtime import files
from pliant.runtime.files import write_aside
from pliant.runtime.sealed import load_archive, save_archive, seal_tensors

Batch = tuple[torch.Tensor, torch.Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(count)]


def session(model: nn.Module, **changes: Any) -> Session:
    """One whose choices depend on no clock."""
    recipe = replace(recipes.elastic_trainer(0.7), budget=Budget(macs=0.7), cost=measure.counted, when=schedule.every(steps=3))
    return Session(model, adamw(model), loss, recipe, correct=False, **changes)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after four steps."""
    path = tmp_path / "run.pt"
    with session(net()) as run:
        for batch in batches(4):
            run.step(batch)
        run.save(path, beside={"epoch": 3})
    return path


def everything(run: Session) -> dict[str, Any]:
    """All that `load` may change."""
    state = {"step": run.progress.step, "selection": run.selection, "python": random.getstate(), "torch": torch.get_rng_state()}
    return {**snapshot(run.model, run.optimizer), "numpy": np.random.get_state()[1].tolist(), **state}


# ---------------------------------------------------------------- checked as a whole, before anything changes


def put(*path: Any) -> Callable[[Any], None]:
    """An edit: the last of these is put at the place that the others name."""
    *where, last, value = path

    def edit(held: Any) -> None:
        for key in where:
            held = held[key]
        held[last] = value

    return edit


def drop(*path: Any) -> Callable[[Any], None]:
    def edit(held: Any) -> None:
        for key in path[:-1]:
            held = held[key]
        del held[path[-1]]

    return edit


EDITS = {
    "a part is missing": drop("random"),
    "a weight of another shape": put("model", "0.bias", torch.zeros(5)),
    "a weight of another type": put("model", "0.bias", torch.zeros(8, dtype=torch.float64)),
    "a weight that is a text": put("model", "0.bias", "0.5"),
    "an unknown weight": put("model", "extra", torch.zeros(1)),
    "no state of the optimizer": drop("optimizer", "state"),
    "optimizer state of another shape": lambda held: next(iter(held["optimizer"]["state"].values())).update(
        exp_avg=torch.zeros(7, 7)
    ),
    "optimizer state of no parameter": put("optimizer", "state", 99, {}),
    "a group without a rate": drop("optimizer", "param_groups", 0, "lr"),
    "a rate that is a text": put("optimizer", "param_groups", 0, "lr", "fast"),
    "one beta": put("optimizer", "param_groups", 0, "betas", (0.9,)),
    "no random state of numpy": drop("random", "numpy"),
    "half a random state": put("random", "cpu", torch.zeros(4, dtype=torch.uint8)),
    "a random state of Python that is none": put("random", "python", [3, [1, 2], None]),
    "no step": drop("session", "step"),
    "a step that is a text": put("session", "step", "4"),
    "laps that are no list": put("session", "unread", 3),
    "a clock without seconds": drop("session", "time", "elapsed"),
    "a unit without parts": drop("session", "units", 0, "parts"),
    "a unit of another model": put("session", "units", 0, "parts", 0, ["away", None, None]),
    "a chosen unit of another model": put("session", "selection", "units", 0, "parts", 0, ["away", None, None]),
    "a slice out of range": put("session", "selection", "units", 0, "parts", 0, ["0.weight", 0, [99]]),
    "a cost that is a text": put("session", "selection", "cost", "seconds", "much"),
    "values of unknown units": put("session", "values", {"away": 1.0}),
    "a profile of nothing": put("session", "profile", {}),
    "a charge of an unknown kind": put("session", "profile", "charges", 0, "kind", "gift"),
    "a charge that points back": put("session", "profile", "charges", 3, "via", [0]),
    "a budget that is none": put("session", "budget", {"time": -3}),
    "a budget of an unknown kind": put("session", "budget", {"love": 1}),
    "no drift": drop("session", "drift", "then"),
    "a round without its number": drop("session", "feedback", "rounds", 0, "number"),
    "a start of another shape": put("session", "undo", "params", "0.bias", torch.zeros(2)),
    "a start of an unknown parameter": put("session", "undo", "state", "away", None),
    "slices that are not chosen": put("session", "slices", {"0.weight": {"dim": 0, "index": [0], "state": {}}}),
    "norms that are no names": put("session", "norms", [3]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_checkpoint_is_refused_before_anything_changes(saved: Path, edit: Callable[[Any], None]) -> None:
    held = load_archive(saved)
    edit(held)
    save_archive(saved, held)
    model = net()
    with session(model) as run:
        for batch in batches(2):
            run.step(batch)
        before = everything(run)
        with pytest.raises(ValueError, match=r"not a whole checkpoint|does not fit|this state|state has|state\.|slice"):
            run.load(saved)
        assert differences(before, everything(run)) == []
        run.step(batches(1)[0])  # and it goes on


def test_an_untouched_one_is_taken(saved: Path) -> None:
    with session(net()) as run:
        assert run.load(saved) == {"epoch": 3} and run.progress.step == 4
        run.step(batches(1)[0])


def test_a_scaler_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with session(net(), scaler=torch.amp.GradScaler("cpu")) as run:
        run.step(batches(1)[0])
        run.save(path)
        held = load_archive(path)
        del held["scaler"]["growth_factor"]
        save_archive(path, held)
        before = everything(run)
        with pytest.raises(ValueError, match="scaler has no 'growth_factor'"):
            run.load(path)
        assert differences(before, everything(run)) == []


def test_what_could_not_be_read_back_is_not_saved(saved: Path) -> None:
    before = saved.read_bytes()
    with session(net()) as run:
        run.step(batches(1)[0])
        with pytest.raises(ValueError, match="could not be read back"):
            run.save(saved, beside=np.float64(3))
    assert saved.read_bytes() == before


def test_a_budget_in_absolute_numbers_survives_a_stop(tmp_path: Path) -> None:
    model = net()
    with session(model) as run:
        run.step(batches(1)[0])
        run.budget = Budget(macs=Absolute(0.8 * run.profile.full.macs))
        run.step(batches(1)[0])
        run.save(tmp_path / "run.pt")
        then = run.budget
    with session(model) as run:
        run.load(tmp_path / "run.pt")
        assert run.budget == then


# ---------------------------------------------------------------- a checksum


def flipped(content: bytes, spread: int) -> list[bytes]:
    """The content with one bit changed, at places all over it."""
    out = []
    for i in range(spread):
        at = (len(content) - 1) * i // (spread - 1)
        out.append(content[:at] + bytes([content[at] ^ (1 << i % 8)]) + content[at + 1 :])
    return out


def test_a_flipped_bit_is_refused_in_a_checkpoint(saved: Path) -> None:
    with session(net()) as run:
        run.step(batches(1)[0])
        before = everything(run)
        for content in flipped(saved.read_bytes(), 60):
            saved.write_bytes(content)
            with pytest.raises(ValueError, match="not a whole checkpoint"):
                run.load(saved)
        assert differences(before, everything(run)) == []


def test_a_checkpoint_of_an_earlier_version_is_told(saved: Path) -> None:
    torch.save(load_archive(saved), saved)
    with session(net()) as run, pytest.raises(ValueError, match=r"no checksum .* earlier version"):
        run.load(saved)


def test_torch_reads_a_sealed_archive_too(saved: Path) -> None:
    assert torch.load(saved, weights_only=True)["session"]["step"] == 4


def test_a_flipped_bit_is_refused_in_weights_and_never_changes_them(tmp_path: Path) -> None:
    model = models.FoldedNet(((3, 1, 16, 8),), classes=2)
    file = tmp_path / "net.safetensors"
    write_aside(file, models.weights_of(model, {"scale": "3"}))
    content = file.read_bytes()
    assert content == models.weights_of(model, {"scale": "3"}) == seal_tensors(content)
    right, about = models.read_weights(file)
    assert about["scale"] == "3"
    for changed in flipped(content, 80):
        file.write_bytes(changed)
        try:
            found, _ = models.read_weights(file)
        except ValueError:
            continue
        assert differences(right, found) == []  # a bit of the checksum's own name
    file.write_bytes(content[:-4] + b"abcd")
    with pytest.raises(ValueError, match="checksum does not match"):
        models.load(str(file))


def test_a_flipped_digit_is_refused_in_a_profile(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "profile.json"
    measure.counted(model, adamw(model), loss, batches(1)[0]).save(file)
    text = file.read_text()
    assert Profile.load(file).full.macs > 0
    file.write_text(text.replace('"macs": 3', '"macs": 4', 1).replace('"macs": 1', '"macs": 2', 1))
    with pytest.raises(ValueError, match="checksum does not match"):
        Profile.load(file)
    held = json.loads(text)
    del held["sha256"]
    held["charges"][0]["cost"] = {"seconds": "long"}
    file.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"profile.charges\[0\].cost.seconds is 'long'"):
        Profile.load(file)


def test_a_flipped_bit_is_refused_in_the_state_of_meta_training(tmp_path: Path) -> None:
    file = tmp_path / "net.state"
    save_archive(file, {"model": {}, "losses": [1.0] * 50})
    for content in flipped(file.read_bytes(), 20):
        file.write_bytes(content)
        with pytest.raises(ResumeError, match="not the whole state"):
            read_state(file)


# ---------------------------------------------------------------- files that are whole or absent


@pytest.mark.skipif(sys.platform == "win32", reason="no links and locks like these")
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder'$"):
        write_aside(tmp_path / "folder", b"one")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_new_version_is_never_written_through_a_link(tmp_path: Path) -> None:
    target, precious = tmp_path / "run.pt", tmp_path / "precious.txt"
    precious.write_bytes(b"mine")
    (tmp_path / f".run.pt.{os.getpid()}.tmp").symlink_to(precious)  # the name that it once had
    seen: list[str] = []
    real = os.replace

    def replace(source: Any, to: Any) -> None:
        seen.append(Path(source).name)
        real(source, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        write_aside(target, b"one")
        write_aside(target, b"two")
    assert precious.read_bytes() == b"mine" and target.read_bytes() == b"two"
    assert len(set(seen)) == 2 and not any(str(os.getpid()) == name.split(".")[-2] for name in seen)


@pytest.mark.skipif(sys.platform == "win32", reason="no links and locks like these")
def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run.pt"
    code = """
import os, runpy, signal, sys
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
runpy.run_path(sys.argv[1])["write_aside"](sys.argv[2], b"new")
"""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, files.__file__, str(target)], check=False)
    left = set(os.listdir(tmp_path))
    assert len(left) == 1, "one of a killed process, which the second one removed, and its own"
    others = {".run.pt.tmp", ".run.pt.12345.tmp", ".other.pt.0123456789abcdef.tmp", "notes.tmp"}
    for name in others:
        (tmp_path / name).touch()
    written: list[set[str]] = []
    real = os.fsync

    def fsync(number: int) -> None:  # while this one is written, another process writes the same file
        real(number)
        if not written:
            written.append(set(os.listdir(tmp_path)))
            write_aside(target, b"other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        write_aside(target, b"mine")
    assert not left & written[0]
    assert target.read_bytes() == b"mine" and set(os.listdir(tmp_path)) == others | {"run.pt"}


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_aside(tmp_path / "one", b"1")
    (tmp_path / "two").touch()
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "two").stat().st_mode


@pytest.mark.parametrize("moment", ["fstat", "fsync", "replace"])
def test_an_interrupted_write_leaves_nothing_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, stop)
        with pytest.raises(KeyboardInterrupt):
            write_aside(tmp_path / "run.pt", b"new")
    assert os.listdir(tmp_path) == []


def test_a_scheduler_that_came_later_is_no_other_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    runs = []
    for _ in range(2):
        model = torch.nn.Linear(4, 2)
        runs.append((model, torch.optim.SGD(model.parameters(), 0.1)))
    (model, optimizer), (other, late) = runs

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with Session(model, optimizer, loss, recipes.full()) as session:
        session.step(torch.randn(3, 4))
        session.save(tmp_path / "run.pt")
    torch.optim.lr_scheduler.ConstantLR(late)  # adds 'initial_lr' to the groups
    with Session(other, late, loss, recipes.full()) as session:
        session.load(tmp_path / "run.pt")
    assert torch.equal(model.weight, other.weight)


def test_an_archive_with_compressed_entries_is_refused(tmp_path: Path) -> None:
    """They could be of any size once they are unpacked."""
    save_archive(tmp_path / "run.pt", {"x": torch.zeros(1000)})
    with zipfile.ZipFile(tmp_path / "run.pt") as plain:
        entries = {entry.filename: plain.read(entry) for entry in plain.infolist()}
        comment = plain.comment
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.comment = comment
    body = packed.getvalue()[: -len(comment) - 2]
    mark = comment[:-64]
    forged = mark + sha256(body).hexdigest().encode()
    (tmp_path / "run.pt").write_bytes(body + len(forged).to_bytes(2, "little") + forged)
    with pytest.raises(ValueError, match="compressed entries"):
        load_archive(tmp_path / "run.pt")


def test_a_weight_file_does_not_name_another_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    about = {"model": f"timm:resnet18@{tmp_path / 'other.safetensors'}"}
    path.write_bytes(seal_tensors(safetensors.torch.save({"x": torch.zeros(2)}, about)))
    with pytest.raises(ValueError, match="a file may not choose the code that runs"):
        models.load(str(path))
