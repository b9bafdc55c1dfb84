"""The command: help, version, a short demo, its errors and exit codes."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from command import python_path, run, text
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import pliant
from pliant import cli
from pliant.apps import data, models
from pliant.apps.fewshot import meta
from pliant.apps.models import FoldedNet
from pliant.cli import live, progress
from pliant.cli.app import COMMANDS
from pliant.runtime.files import write_aside


def test_version_and_an_example_in_the_help_of_every_command() -> None:
    assert run(["--version"]).output.strip() == f"pliant {pliant.__version__}"
    assert {"train", "plan", "demo", "meta-train"} <= set(COMMANDS)
    listed = text(run(["--help"]))
    for name, about in COMMANDS.items():
        assert name in listed and about in listed
        shown = run([name, "--help"])
        assert shown.exit_code == 0 and f"Example: pliant {name}" in text(shown)


def test_the_demo_compares_plain_training_and_pliant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, digits = tmp_path / "demo.json", data.digits(32)
    few = data.Split(digits.test.images[:40], digits.test.labels[:40])
    monkeypatch.setattr(data, "digits", lambda *_: replace(digits, test=few))
    shown = run(["demo", "--steps", "2", "--batch", "4", "--size", "32", "--time", "0.8", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    plain, ours = json.loads(out.read_text())
    assert plain["chosen"] == "everything" and plain["steps"] == ours["steps"] == 2
    assert 0 < ours["kept_bytes"] <= plain["kept_bytes"]
    assert 0 <= ours["accuracy"] <= 1 and ours["seconds_per_step"] > 0
    assert "test accuracy" in text(shown) and "layers, chosen" in text(shown)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("Run: pip install 'pliant[demo]'")

    monkeypatch.setattr(data, "digits", missing)
    shown = run(["demo"])
    assert shown.exit_code == 1 and "pliant[demo]" in text(shown)
    assert models.PIXEL_STATS  # the library itself is whole without the extra


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
    (["demo", "--time", "0"], "--time"),
    (["demo", "--steps", "1"], "--steps"),
    (["demo", "--batch", "2"], "--batch"),
    ([*TRAIN, "--nonsense"], "--nonsense"),
    ([*TRAIN, "--epochs", "0"], "--epochs"),
    ([*TRAIN, "--recipe", "plaint"], "Did you mean 'pliant'?"),
    ([*TRAIN, "--recipe", "only:nose.*"], "no unit matches 'nose.*'"),
    ([*TRAIN, "--time", "12parsec"], "not an amount"),
    ([*TRAIN, "--device", "gpu"], "not a device"),
    ([*TRAIN, "--engine", "fast"], "engine='fast'"),
    ([*TRAIN, "--model", "no_such_module:net"], "no module 'no_such_module'"),
    ([*TRAIN, "--model", "efficientnet_lite"], "Did you mean 'efficientnet_lite0'?"),
    ([*TRAIN, "--model", "tiny_net:nett"], "Did you mean 'net'?"),
    ([*TRAIN, "--model", "tiny_net:not_a_model"], "not a torch.nn.Module"),
    ([*TRAIN, "--model", "tiny_net:ten"], "4 classes need"),
    ([*TRAIN, "--model", "nowhere.safetensors"], "nowhere.safetensors"),
    ([*TRAIN, "--data", "nowhere"], "no data 'nowhere'"),
    ([*TRAIN, "--data", "digit"], "Did you mean 'digits'?"),
    ([*TRAIN, "--data", "nowhere.npz"], "no file 'nowhere.npz'"),
    ([*TRAIN, "--config", "nowhere.toml"], "no file 'nowhere.toml'"),
    ([*TRAIN, "--batch", "1000"], "larger than the"),
    ([*TRAIN, "--batch", "many"], "--batch"),
    ([*TRAIN, "--size", "2"], "--size"),
    ([*TRAIN, "--recipe", "last", "--memory", "4MB"], "has no memory budget"),
    ([*TRAIN, "--recipe", "only"], "needs names"),
    ([*TRAIN, "--lr", "-1"], "learning rate"),
    ([*TRAIN, "--seed", "-1"], "seed"),
    ([*TRAIN, "--seed", str(2**63)], f"seed={2**63}: give a number below 2**63"),
    ([*TRAIN, "--validation", "0.7"], "validation=0.7"),
    ([*TRAIN, "--log-to", "paper"], "tensorboard"),
    ([*TRAIN, "--recipe", "head", "--engine", "prefix+graphs"], "captured on CUDA"),
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
    ([*ADAPT, "--backbone", "mcunet_5fps"], "comes without weights"),
    (["meta-train", "nowhere", *META[2:]], "SOURCE: 'nowhere' is not there"),
    ([*META, "--backbone", "mcunet"], "--backbone: no model 'mcunet'"),
    ([*META, "--support", "3"], "--support"),
    ([*META, "--out", "out.txt"], "--out out.txt: give a name that ends with .safetensors"),
]
FAILED = [  # what was asked was understood, and cannot be done
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
    shown = run(arguments)
    assert (shown.exit_code, said in text(shown)) == (code, True), shown.output
    assert shown.stderr.startswith("pliant: ") and shown.stderr.count("\n") == 1  # one line, where errors belong
    assert "Traceback" not in shown.output and "Sampling(" not in shown.output
    assert not Path("run").exists()


@pytest.mark.usefixtures("world")
def test_an_error_is_one_line_on_a_narrow_screen_too() -> None:
    for arguments in (["report", "nothing"], ["train", "--epochs", "many"], ["tarin"], ["--verson"]):
        shown = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "30", "FORCE_COLOR": None})
        assert shown.exit_code == 2 and shown.stdout == ""
        assert shown.stderr.count("\n") == 1 and len(shown.stderr) > 30 and "\x1b" not in shown.stderr


def test_help_does_not_import_torch() -> None:
    code = "import sys; from pliant.cli import app; app(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "meta-train" in done.stdout
    assert not {"'torch'", "'numpy'", "'scipy'", "'jinja2'"} & set(done.stdout.rpartition("[")[2].rstrip("]\n").split(", "))


def test_every_public_name_is_where_editors_look_for_it() -> None:
    """The table that Python reads and the imports that type checkers read are one list."""
    tree = ast.parse(Path(pliant.__file__).read_text())
    block = next(each for each in tree.body if isinstance(each, ast.If))
    homes = {}
    for each in block.body:
        assert isinstance(each, ast.ImportFrom) and each.module is not None
        for name in each.names:
            found = importlib.import_module(each.module)
            homes[name.asname or name.name] = getattr(found, name.name, None) or importlib.import_module(
                f"{each.module}.{name.name}"
            )
    assert sorted(homes) == pliant.__all__ == sorted(pliant._HOMES)
    assert all(getattr(pliant, name) is found for name, found in homes.items())
    assert set(pliant.__all__) <= set(dir(pliant))
    with pytest.raises(AttributeError, match="has no attribute 'Sesion'"):
        _ = pliant.Sesion
    assert (Path(pliant.__file__).parent / "py.typed").exists()


def test_a_run_of_meta_training_resumes_with_the_same_number_of_images(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "cdefg":
        (world / "few" / name).mkdir()
        for i in range(2):
            Image.new("RGB", (8, 8), (50 * i, ord(name), 20)).save(world / "few" / name / f"{i}.png")
    keep = meta._MetaRun.save

    def keep_and_stop(*of: Any) -> None:
        keep(*of)
        raise KeyboardInterrupt

    monkeypatch.setattr(meta._MetaRun, "save", keep_and_stop)
    cut = run([*META, "--support", "20"])
    assert cut.exit_code == 130 and "continue with --resume" in text(cut)
    shown = run([*META, "--support", "30", "--resume"])
    assert shown.exit_code == 2 and "is of a run with 20, and 30 was given. Continue with --support 20." in text(shown)


def test_ctrl_c_during_imports_prints_no_traceback() -> None:
    """Importing torch takes seconds: a user may stop the command before it begins."""
    code = """
import sys
import pliant

def stopped_at(module):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == module:
                raise KeyboardInterrupt

    for name in [name for name in sys.modules if name.startswith(("pliant.cli", "pliant.apps"))]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder())
    try:
        from pliant.cli import main
        main()
    except SystemExit as ends:
        return ends.code
    finally:
        del sys.meta_path[0]

print([stopped_at(module) for module in ("pliant.apps.doctor", "pliant.cli.doctor", "pliant.apps.models")])
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--no-peaks"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[130, 130, 130]\n", "")


def test_ctrl_c_before_a_command_works_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.set_num_threads", stop)
    for command in ("plan", "profile"):
        shown = run([command])
        assert shown.exit_code == 130 and "Abort" not in text(shown)


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
