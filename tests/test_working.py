"""What a long computation says on its way: measuring, scoring, evaluating and reading, with the time that is left."""

from __future__ import annotations

import io
from pathlib import Path

import command
import pytest
import tiny
import torch
from PIL import Image
from rich.console import Console
from runlogs import Blocks, batches, lines, loss

from pliant import Session, recipes
from pliant.apps import tasks
from pliant.apps.data import images
from pliant.cli import progress
from pliant.runtime.working import Listener, listening, note, noting, told


def test_measuring_and_scoring_tell_how_far_they_are() -> None:
    model, heard = Blocks(), list[tuple[str, int, int]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        listening(Listener(lambda *said: heard.append(said))),
        Session(model, optimizer, loss, recipes.pliant(time=1.0, head_first=0)) as session,
    ):
        session.step(batches(1)[0])
    phases = dict.fromkeys(what for what, _, _ in heard)
    assert list(phases) == ["timing layers", "timing steps", "scoring layers"]
    for what in phases:
        counts = [(done, total) for each, done, total in heard if each == what]
        assert counts == [(done, counts[0][1]) for done in range(counts[0][1] + 1)]


def test_nobody_listens_unless_asked_and_notes_are_collected() -> None:
    assert list(told("counting", [1, 2, 3])) == [1, 2, 3]
    note("nobody hears this")
    heard: list[object] = []
    with listening(Listener(lambda *said: heard.append(said), heard.append)), noting() as notes:
        note("left out: 3")
        list(told("counting", range(1)))
    assert notes == ["left out: 3"] and heard == [("counting", 0, 1), ("counting", 1, 1)]


def test_the_rest_takes_as_long_as_what_is_done() -> None:
    now = 0.0
    phase = progress.Phase(lambda: now)
    assert phase.see("timing layers", 0, 4) == ("timing layers: 0 of 4", 0.0)
    now = 30.0
    assert phase.see("timing layers", 1, 4) == ("timing layers: 1 of 4, 1 min 30 s left", 30.0)
    assert phase.see("timing layers", 4, 4)[0] == ""
    assert phase.see("scoring layers", 0, 2) == ("scoring layers: 0 of 2", 0.0)


@pytest.mark.parametrize(("terminal", "kind"), [(True, "xterm"), (True, "dumb"), (False, "xterm")])
def test_a_command_shows_what_takes_long(monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: str) -> None:
    now = 100.0
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress.Phase.__init__, "__defaults__", (lambda: now,))
    file = io.StringIO()
    with progress.working(Console(file=file, force_terminal=terminal, width=80)):
        for part in told("timing layers", range(8)):
            now += 3.0
            if part == 4:
                note("two files were ignored")
    shown = file.getvalue()
    assert "two files were ignored\n" in shown and "timing layers: 1 of 8, 21 s left" in shown
    redraws = terminal and kind != "dumb"
    assert shown.count("timing layers: ") == (9 if redraws else 2)  # as lines: after three seconds, then every ten


def test_ignored_files_and_the_last_images_of_an_epoch_are_mentioned(place: Path) -> None:
    for name in "ab":
        for i in range(7):
            (place / "photos" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (30 * i, 50, 20)).save(place / "photos" / name / f"{i}.png")
    for name in ("a/notes.txt", "readme.md", "a/.hidden"):
        (place / "photos" / name).write_text("no image")
    with noting() as notes:
        images.folder("photos", 8)
    assert notes == ["ignored in 'photos', because no image of a class: 'a/notes.txt', 'readme.md'"]
    ignored = "'a/notes.txt', 'readme.md'"
    flags = ["--size", "8", "--batch", "4", "--scratch", "--device", "cpu", "--epochs", "1", "--recipe", "full"]
    shown = command.run(["train", "--model", tiny.MODEL, "--data", "photos", *flags, "--out", "run"])
    assert shown.exit_code == 0, shown.output
    told_of = [line["text"] for line in lines(place / "run" / "run.jsonl") if line["event"] == "note"]
    assert any(ignored in one for one in told_of) and ignored in command.text(shown)
    assert "are left out" not in command.text(shown)  # twelve images are three whole batches
    shown = command.run(["train", "--model", tiny.MODEL, "--data", "photos", *flags, "--batch", "5", "--out", "five"])
    words = "the last 2 of every epoch, in random order, are left out: 12 to train on, 5 per step"
    assert words in command.text(shown) and words in [one.get("text") for one in lines(place / "five" / "run.jsonl")]


def test_evaluating_tells_how_far_it_is(place: Path) -> None:
    heard: list[str] = []
    task = tasks.load(tiny.MODEL, tiny.DATA, size=8, seed=0, device="cpu", scratch=True)
    with listening(Listener(lambda what, done, total: heard.append(f"{what} {done}/{total}"))):
        tasks.judge(task.model, task.validation)
    assert heard == ["evaluating 0/1", "evaluating 1/1"]
