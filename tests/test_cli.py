"""The command: help, version, a short demo, its errors and exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import pliant
from pliant import cli
from pliant.apps import data, models
from pliant.apps.models import FoldedNet
from pliant.cli import live, progress
from pliant.runtime.files import write_aside

run = CliRunner().invoke


def test_version_and_help() -> None:
    assert run(cli.app, ["--version"]).output.strip() == f"pliant {pliant.__version__}"
    shown = run(cli.app, ["demo", "--help"])
    assert shown.exit_code == 0 and "Example: pliant demo" in shown.output


def test_the_demo_compares_plain_and_elastic(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    shown = run(cli.app, ["demo", "--steps", "2", "--batch", "4", "--size", "32", "--time", "0.8", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    plain, elastic = json.loads(out.read_text())
    assert plain["chosen"] == "everything" and plain["steps"] == elastic["steps"] == 2
    assert 0 < elastic["kept_bytes"] <= plain["kept_bytes"]
    assert 0 <= elastic["accuracy"] <= 1 and elastic["seconds_per_step"] > 0
    assert "test accuracy" in shown.output and "layers, chosen" in shown.output


def test_a_budget_below_the_floor_is_told(tmp_path: Path) -> None:
    shown = run(cli.app, ["demo", "--steps", "2", "--batch", "4", "--size", "32", "--time", "0.01"])
    assert shown.exit_code == 1
    assert "below the floor" in " ".join(shown.output.split())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("Run: pip install 'pliant[demo]'")

    monkeypatch.setattr(data, "digits", missing)
    shown = run(cli.app, ["demo"])
    assert shown.exit_code == 1 and "pliant[demo]" in shown.output
    assert models.PIXEL_STATS  # the library itself is whole without the extra


@pytest.mark.parametrize("wrong", [["--time", "0"], ["--time", "1.5"], ["--steps", "1"], ["--batch", "2"], ["dance"]])
def test_bad_input_is_refused(wrong: list[str]) -> None:
    assert run(cli.app, ["demo", *wrong] if wrong[0].startswith("-") else wrong).exit_code == 2


# ---------------------------------------------------------------- exit codes


@pytest.fixture
def world(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, images of all sorts and what lacks something."""
    monkeypatch.setenv("PLIANT_CACHE", str(place / "cache"))
    write_aside("net.safetensors", models.weights_of(FoldedNet(((3, 1, 16, 8), (5, 2, 24, 12)), classes=2)))
    for folder, names in (("few", "ab"), ("other", "xy"), ("more", "abx")):
        for name in names:
            for i in range(2):
                Path(folder, name).mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (100 * i, 50, 20)).save(Path(folder, name, f"{i}.png"))
    for folder in ("nothing", "words"):
        Path(folder).mkdir()
    Path("words/notes.txt").write_text("no image")
    Path("bad.jsonl").write_text("no log\n")
    Path("cut.npz").write_bytes(b"no archive")
    return place


TINY = ["--data", tiny.DATA, "--size", "8", "--batch", "8", "--scratch", "--device", "cpu"]
TRAIN = ["train", "--model", tiny.MODEL, *TINY, "--epochs", "1", "--out", "run"]
PLAN = ["plan", tiny.MODEL, *TINY]
COMPARE = ["compare", "--model", tiny.MODEL, *TINY, "--seeds", "1", "--out", "compared"]
ADAPT = ["adapt", "--support", "few", "--backbone", "net.safetensors", "--size", "32", "--steps", "1"]
META = ["meta-train", "few", "--backbone", "net.safetensors", "--size", "32", "--out", "out.safetensors"]
MISUSED = [  # an option or argument that is not known, has no such value, or names an input that is not there
    (["dance"], "dance"),
    (["demo", "--time", "1.5"], "--time"),
    ([*TRAIN, "--nonsense"], "--nonsense"),
    ([*TRAIN, "--epochs", "0"], "--epochs"),
    ([*TRAIN, "--recipe", "plaint"], "Did you mean 'pliant'?"),
    ([*TRAIN, "--recipe", "only:nose.*"], "no unit matches 'nose.*'"),
    ([*TRAIN, "--time", "12parsec"], "not an amount"),
    ([*TRAIN, "--device", "gpu"], "not a device"),
    ([*TRAIN, "--engine", "fast"], "engine='fast'"),
    ([*TRAIN, "--model", "no_such_module:net"], "no module 'no_such_module'"),
    ([*TRAIN, "--data", "nowhere"], "no data 'nowhere'"),
    ([*TRAIN, "--data", "nowhere.npz"], "no file 'nowhere.npz'"),
    ([*TRAIN, "--config", "nowhere.toml"], "no file 'nowhere.toml'"),
    ([*TRAIN, "--batch", "1000"], "batch=1000"),
    (["train", "--resume"], "which run"),
    ([*PLAN, "--recipe", "lastt"], "Did you mean 'last'?"),
    ([*PLAN, "--recipe", "only:nose.*"], "no unit matches 'nose.*'"),
    ([*PLAN, "--time", "0"], "neither a share"),
    ([*PLAN, "--lr", "-1"], "learning rate"),
    ([*PLAN, "--engine", "fast"], "engine='fast'"),
    ([*PLAN, "--device", "gpu"], "not a device"),
    ([*PLAN, "--data", "nowhere.npz"], "no file 'nowhere.npz'"),
    (["plan", "no_such_model", *TINY], "no model 'no_such_model'"),
    ([*COMPARE, "--recipe", "plaint"], "Did you mean 'pliant'?"),
    ([*COMPARE, "--recipe", "last", "--time", "half"], "not an amount"),
    ([*COMPARE, "--engine", "fast"], "engine='fast'"),
    ([*COMPARE, "--device", "gpu"], "not a device"),
    ([*COMPARE, "--model", "tiny_net:nett"], "Did you mean 'net'?"),
    ([*COMPARE, "--data", "nowhere"], "no data 'nowhere'"),
    ([*COMPARE, "--data", "nowhere.npz"], "no file 'nowhere.npz'"),
    (["profile", "nonsense"], "MODEL: no model 'nonsense'"),
    (["profile", "no_such_module:net"], "no module 'no_such_module'"),
    (["profile", tiny.MODEL, "--shape", "3x3xbig"], "--shape: '3x3xbig' is not a shape"),
    (["profile", tiny.MODEL, "--device", "gpu"], "device='gpu' is not a device"),
    (["doctor", "--peaks=maybe"], "--peaks"),
    (["report"], "RUN"),
    (["report", "nowhere"], "RUN: there is no 'nowhere'"),
    (["report", "nothing"], "RUN: there is no run.jsonl in the folder 'nothing'"),
    (["report", "bad.jsonl", "--format", "pdf"], "--format"),
    (["watch", "nowhere"], "RUN: there is no 'nowhere'"),
    (["watch", "bad.jsonl", "--port", "99999"], "--port"),
    ([*ADAPT, "--support", "nowhere"], "--support: 'nowhere' is not there"),
    ([*ADAPT, "--query", "nowhere"], "--query: 'nowhere' is not there"),
    ([*ADAPT, "--memory", "lots"], "--memory, --macs: memory='lots' is not an amount"),
    ([*ADAPT, "--device", "gpu"], "device='gpu' is not a device"),
    ([*ADAPT, "--backbone", "no.safetensors"], "--backbone: no file"),
    (["meta-train", "nowhere", *META[2:]], "SOURCE: 'nowhere' is not there"),
    ([*META, "--backbone", "mcunet"], "--backbone: no model 'mcunet'"),
    ([*META, "--support", "3"], "--support"),
]
FAILED = [  # what was asked was understood, and cannot be done
    (["demo", "--steps", "2", "--batch", "4", "--size", "32", "--time", "0.01"], "below the floor"),
    ([*TRAIN, "--macs", "0.001"], "below the floor"),
    ([*TRAIN, "--data", "cut.npz"], "not a whole .npz file"),
    ([*TRAIN, "--out", "few"], "not empty"),
    ([*TRAIN, "--out", "bad.jsonl/run"], "cannot write into"),
    ([*TRAIN, "--resume", "--out", "nothing"], "no run in 'nothing'"),
    ([*PLAN, "--macs", "0.001"], "below the floor"),
    ([*PLAN, "--data", "cut.npz"], "not a whole .npz file"),
    ([*COMPARE, "--out", "bad.jsonl/x"], "cannot write into"),
    (["profile", tiny.MODEL, "--shape", "7"], "pliant: "),
    (["report", "bad.jsonl"], "not a run log"),
    (["watch", "bad.jsonl"], "not a run log"),
    ([*ADAPT, "--macs", "0.00001"], "below the floor"),
    ([*ADAPT, "--query", "nothing"], "--query: 'nothing' holds no image, nor folders of images"),
    ([*ADAPT, "--query", "words"], "--query: 'words' holds no image, nor folders of images"),
    ([*ADAPT, "--query", "other"], "'other' has images of 'x', 'y', which the support set does not know, and none of 'a', 'b'"),
    ([*ADAPT, "--query", "more"], "'more' has images of 'x', which the support set does not know: it has 'a', 'b'"),
    (META, "SOURCE: a task takes 5 classes of two images or more, and 'few' has 2"),
    ([*META, "--resume"], "and 'few' has 2"),
]


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [(*one, 2) for one in MISUSED] + [(*one, 1) for one in FAILED],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("world")
def test_every_command_exits_with_2_where_an_option_is_wrong_and_with_1_where_it_fails(
    arguments: list[str], said: str, code: int
) -> None:
    shown = run(cli.app, arguments, env={"COLUMNS": "200"})
    text = " ".join(shown.output.split())
    assert (shown.exit_code, said in text) == (code, True), shown.output
    assert "Traceback" not in text and "Sampling(" not in text


def test_a_run_of_meta_training_goes_on_with_as_many_images_to_a_task(world: Path) -> None:
    for name in "cdefg":
        (world / "few" / name).mkdir()
        for i in range(2):
            Image.new("RGB", (8, 8), (50 * i, ord(name), 20)).save(world / "few" / name / f"{i}.png")
    stop = "from pliant.apps.fewshot import meta; from pliant.cli import main\nkeep = meta._MetaRun.save\n"
    stop += "def once(*of): keep(*of); raise KeyboardInterrupt\nmeta._MetaRun.save = once; main()"
    cut = subprocess.run([sys.executable, "-c", stop, *META, "--support", "20"], capture_output=True, text=True)
    assert cut.returncode == 130 and "continue with --resume" in cut.stdout, cut.stderr
    shown = run(cli.app, [*META, "--support", "30", "--resume"], env={"COLUMNS": "300"})
    assert shown.exit_code == 2 and "is of a run with 20, and 30 was given. Continue with --support 20." in shown.output


@pytest.mark.parametrize("module", ["pliant.apps.tasks", "pliant.cli.watch", "pliant.apps.train.run"])
def test_ctrl_c_while_modules_are_imported_leaves_no_trace(module: str) -> None:
    """To import torch takes seconds: who stops then sees no traceback."""
    code = f"""
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
import pliant  # what it needs itself comes with it
from pliant.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--no-peaks"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_before_a_command_works_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.set_num_threads", stop)
    for command in ("plan", "profile"):
        shown = run(cli.app, [command])
        assert shown.exit_code == 130 and "Abort" not in shown.output


# ---------------------------------------------------------------- bars


def drawn(error: BaseException | None, terminal: bool) -> str:
    """What is on the screen after a bar that ended with this error."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=90)
    try:
        with progress.bar(console, "working", 5, "first") as show:
            show(2, "second [note]")
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    text = file.getvalue()
    last = text.rpartition("\x1b[1A")[2] if terminal else text  # what follows the last time that the line was wiped
    return last if "working" in last.rpartition("\x1b[2K")[2] else last.rpartition("\x1b[2K")[2]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_stays_where_work_ends_or_is_stopped_and_goes_where_it_fails(terminal: bool) -> None:
    for stays in (None, KeyboardInterrupt()):
        assert "working" in drawn(stays, terminal) and "2/5" in drawn(stays, terminal)
        assert "second [note]" in drawn(stays, terminal)
    assert "working" not in drawn(ValueError("it broke"), terminal)


def test_the_panel_of_a_run_goes_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    screens: list[Any] = []
    for error in (None, KeyboardInterrupt(), ValueError()):
        console = Console(file=io.StringIO(), force_terminal=True, width=90)
        kept: list[Any] = []
        made = live.Live
        monkeypatch.setattr(live, "Live", lambda *a, made=made, kept=kept, **k: kept.append(made(*a, **k)) or kept[-1])
        try:
            with live.shown(console):
                if error is not None:
                    raise error
        except (KeyboardInterrupt, ValueError):
            pass
        screens.append(kept[0].transient)
        monkeypatch.undo()
    assert screens == [False, False, True]
