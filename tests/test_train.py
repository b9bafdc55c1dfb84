"""`pliant train` and the function behind it: what it writes, how it goes on, what it refuses."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from command import PROCESS, python_path, run, text
from oracle import on_steady_device
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from pliant import BudgetError, PliantError, Session, cli, recipes, roofline, schedule
from pliant.apps import models, report
from pliant.apps import run_folder as folder
from pliant.apps import tasks as task
from pliant.apps.data.errors import Skipped
from pliant.apps.train import Options, Status, open_session, train
from pliant.cli import live
from pliant.core.types import Part, Unit
from pliant.cost.peaks import Peaks
from pliant.session import run_log as runlog

TINY: dict[str, Any] = {"model": tiny.MODEL, "data": tiny.DATA, "size": 8, "batch": 8, "epochs": 3, "device": "cpu"}
TINY |= {"exact": True, "scratch": True, "validation": 0.4}
FLAGS = [f"--{k}={v}" if v is not True else f"--{k}" for k, v in TINY.items()]
PEAKS = Peaks(4e10, 1e10, "cpu", "float32", 1)


@pytest.fixture(autouse=True)
def told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is told of."""
    monkeypatch.setattr("pliant.apps.train.run._STATUS_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def known_peaks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's own cache is read or written, and no device is measured for it."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("pliant.cost.peaks.measured", lambda *_: PEAKS)
    assert roofline.peaks("cpu") == PEAKS


def resumed(out: str | Path) -> Options:
    """The options of a run that goes on; its model is code, which its folder may not name."""
    return Options.of_run(out, {"model": tiny.MODEL})


def at_step(number: int, then: Callable[[], None]) -> Callable[[Status], None]:
    def watch(status: Status) -> None:
        if status.step == number and not status.news:
            then()

    return watch


def power_cut() -> None:
    raise RuntimeError("power cut")


def weights(out: str, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(Path(out) / f"{name}.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run with the recipe `full`, which tests copy."""
    place = tmp_path_factory.mktemp("trained")
    tiny.write(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        tiny.forget()
        train(Options(**TINY, recipe="full", out="run"))
        tiny.forget()
    return place / "run"


@pytest.fixture
def whole(trained: Path) -> Path:
    """That run, as "whole" in the current folder."""
    return Path(shutil.copytree(trained, "whole"))


# ---------------------------------------------------------------- a run


def test_a_run_learns_and_leaves_weights_and_a_log() -> None:
    result = train(Options(**TINY, recipe="full", lr=0.1, out="run"))
    assert result.evaluations[0].step == 0 and result.evaluations[-1].step == 21
    assert result.accuracy > result.evaluations[0].accuracy and not result.rolled_back
    assert result.best.accuracy == max(e.accuracy for e in result.evaluations)
    lines = list(runlog.read("run/run.jsonl"))
    told = [line for line in lines if line["event"] == "evaluated"]
    assert [(line["step"], line["accuracy"]) for line in told] == [(e.step, e.accuracy) for e in result.evaluations]
    assert all(line["split"] == "validation" for line in told)
    assert sum(line["event"] == "step" for line in lines) == 21
    again = models.load(f"{tiny.MODEL}@run/last.safetensors").state_dict()
    assert same(again, weights("run"))
    with safe_open("run/last.safetensors", "pt") as file:
        assert json.loads(file.metadata()["names"]) == ["top", "left", "rows", "columns"]


def test_the_seed_alone_decides_the_weights(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching, evaluating and saving often change nothing."""
    monkeypatch.setattr("pliant.apps.train.run._SAVE_SECONDS", 0.0)
    train(Options(**TINY, recipe="full", out="same", evaluate_every=5), lambda moment: None)
    train(Options(**TINY, recipe="full", out="other", seed=1))
    assert same(weights("same"), weights("whole")) and not same(weights("other"), weights("whole"))


def test_runs_without_a_name_get_folders_of_their_own() -> None:
    outs = [train(Options(**{**TINY, "epochs": 1}, recipe="head")).out for _ in range(2)]
    assert outs == [os.path.join("runs", "shapes-head"), os.path.join("runs", "shapes-head-2")]


def test_a_model_goes_on_from_an_earlier_runs_weights(whole: Path) -> None:
    ends = [line["accuracy"] for line in runlog.read(whole / "run.jsonl") if line["event"] == "evaluated"]
    second = train(Options(**{**TINY, "model": f"{tiny.MODEL}@whole/last.safetensors", "epochs": 1}, recipe="head", out="b"))
    assert second.evaluations[0].accuracy == ends[-1]
    with safe_open("b/last.safetensors", "pt") as file:
        assert file.metadata()["model"] == tiny.MODEL


def test_delta_holds_only_what_changed() -> None:
    options = {**TINY, "scratch": False, "recipe": "only:7.*"}  # norms rest on their statistics, which stay
    train(Options(**options, out="run", delta=True))
    assert set(weights("run")) == {"7.weight", "7.bias"}
    torch.manual_seed(0)
    fresh = models.load(tiny.MODEL, 4)
    whole = train(Options(**options, out="whole"))
    fresh.load_state_dict(weights("run"), strict=False)
    assert same(fresh.state_dict(), weights(whole.out))
    with pytest.raises(PliantError, match="only what a run changed"):
        train(Options(**{**TINY, "model": "run/last.safetensors"}))


def test_memory_is_measured_where_asked() -> None:
    full, head = (
        train(Options(**{**TINY, "epochs": 1}, recipe=recipe, out=recipe, measure_memory=True)).memory_bytes
        for recipe in ("full", "head")
    )
    assert full is not None and head is not None and 0 < head < full


# ---------------------------------------------------------------- stopped, killed, resumed


def test_a_run_that_is_killed_in_mid_epoch_resumes_to_the_same_weights() -> None:
    flags = [*(flag for flag in FLAGS if flag != "--exact"), "--recipe=pliant", "--macs=0.8", "--evaluate-every=5", "--json"]
    environment = {**os.environ, "TINY_KILLED_AFTER": "cut/state.pt", "PYTHONPATH": python_path(os.getcwd())}
    killed = subprocess.run([*PROCESS, "train", *flags, "--out=cut"], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole, resumed = (
        run(["train", *flags, "--out=whole"]),
        run(["train", "--resume", "--model", tiny.MODEL, "--out=cut", "--json"]),
    )
    for name in ("last.safetensors", "best.safetensors"):
        assert Path("cut", name).read_bytes() == Path("whole", name).read_bytes()
    ends = [[(e["step"], e["accuracy"], e["loss"]) for e in json.loads(one.stdout)["evaluations"]] for one in (resumed, whole)]
    assert ends[0] == ends[1]
    (at,) = [line["step"] for line in runlog.read("cut/run.jsonl") if line["event"] == "resume"]
    assert 0 < at < 7


def test_ctrl_c_before_the_first_step_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measuring(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pliant.session.session.Session.fit", measuring)
    shown = run(["train", *FLAGS, "--recipe", "head", "--out", "run"])
    assert shown.exit_code == 130 and "stopped at once" in text(shown) and "is saved" not in text(shown)


def test_images_that_are_not_validated_with_are_trained_on() -> None:
    found = task.load(tiny.MODEL, tiny.DATA, size=8, seed=0, device="cpu", scratch=True, validation=0.25)
    assert (len(found.train), len(found.validation)) == (72, 24)


def test_where_seconds_were_measured_they_are_taken_over() -> None:
    """Two that go on from the same cut choose and end alike, though each would measure otherwise."""
    with pytest.raises(RuntimeError, match="power cut"):
        train(Options(**TINY, recipe="pliant", time="1.0", out="a"), at_step(8, power_cut))
    shutil.copytree("a", "b")
    for out in "ab":
        train(resumed(out))
    assert same(weights("a"), weights("b"))
    rounds = [[line["units"] for line in runlog.read(f"{out}/run.jsonl") if line["event"] == "round"] for out in "ab"]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    ("recipe", "budget", "exact"),
    [
        ("full", {}, False),
        ("pliant", {"macs": "0.8"}, True),
        ("pliant", {"macs": "0.8"}, False),
        ("pliant", {"memory": "0.9"}, False),
    ],
)
def test_where_no_time_is_asked_for_nothing_depends_on_the_clock(recipe: str, budget: dict[str, str], exact: bool) -> None:
    """A run ends alike, cut off and resumed or not; with `exact` or without."""
    options = {**TINY, "scratch": False, "exact": exact, "recipe": recipe, "evaluate_every": 5, **budget}
    train(Options(**options, out="whole"))
    with pytest.raises(RuntimeError, match="power cut"):
        train(Options(**options, out="cut"), at_step(17, power_cut))
    train(resumed("cut"))
    assert same(weights("cut"), weights("whole")) and same(weights("cut", "best"), weights("whole", "best"))


def test_a_resumed_run_measures_no_costs_and_goes_on_with_those_of_the_killed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs, corrections, values and plans, as they were when it was saved; the order of images and the rates come by step."""
    monkeypatch.setattr("pliant.apps.train.run._SAVE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="power cut"):
        train(Options(**{**TINY, "exact": False}, recipe="pliant", time="1.0", out="run"), at_step(13, power_cut))
    held = torch.load("run/state.pt", weights_only=True)
    assert held["session"]["step"] == 13 and held["session"]["feedback"]["rounds"]  # the clock says how many
    loaded: list[dict[str, Any]] = []
    load = Session.load

    def seen(session: Session, path: Any) -> Any:
        beside = load(session, path)
        loaded.append({**session.state_dict(), "torch": torch.get_rng_state()})
        return beside

    monkeypatch.setattr(Session, "load", seen)
    monkeypatch.setattr(recipes, "timed", lambda *_, **__: pytest.fail("costs were measured again"))
    train(resumed("run"))
    now, then = loaded[0], held["session"]
    assert torch.equal(now.pop("torch"), held["random"]["cpu"])
    for key in ("undo", "slices"):  # tensors
        now.pop(key), then.pop(key)
    for part in (now, then):
        part["time"].pop("elapsed")
    assert now == then


@pytest.mark.parametrize(("head_first", "corrects"), [(0.0, True), (0.1, False)])  # the head alone cannot be smaller
def test_with_a_time_budget_a_resumed_run_differs_by_nothing_but_what_steps_take(
    head_first: float, corrects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that takes as long for every step, it ends like one that was not stopped, corrections and all."""

    def steady(time: Any, seed: int) -> Any:
        when = schedule.every(steps=25)
        return on_steady_device(recipes.pliant(time=time, seed=seed, when=when, head_first=head_first))

    monkeypatch.setitem(task.RECIPES, "pliant", steady)
    monkeypatch.setattr("pliant.runtime.clock.Laps.seconds", lambda laps, span: 2e-3)
    monkeypatch.setattr("pliant.runtime.clock.Watch.time", lambda watch, work, lead=0.0: (2.4e-3, work()))  # full steps
    options = {**TINY, "exact": False, "recipe": "pliant", "time": "0.8", "evaluate_every": 5, "epochs": 6}
    whole = train(Options(**options, out="whole"))
    with pytest.raises(RuntimeError, match="power cut"):
        train(Options(**options, out="cut"), at_step(23, power_cut))
    assert train(resumed("cut")).rounds == whole.rounds
    numbers = [one["number"] for one in whole.rounds]
    assert len(set(numbers)) > 1 and (len(numbers) > len(set(numbers))) == corrects  # chosen anew, and corrected in between
    assert same(weights("cut"), weights("whole"))


def test_a_cut_before_the_first_save_resumes_from_the_beginning(whole: Path) -> None:
    (place := Path("cut")).mkdir()
    saved = {name: value for name, value in vars(Options(**TINY, recipe="full")).items() if name not in ("out", "resume")}
    (place / "run.json").write_text(json.dumps({"format": "pliant.run/1", "options": saved}))  # all that was written
    train(resumed("cut"))
    assert same(weights("cut"), weights("whole"))


def test_ctrl_c_saves_after_the_step_and_exits_130(whole: Path) -> None:
    tiny.on_forward(lambda n: signal.raise_signal(signal.SIGINT) if n == 25 else None)  # amid a forward pass
    shown = run(["train", *FLAGS, "--recipe", "full", "--out", "cut"])
    assert shown.exit_code == 130 and "--resume" in text(shown), shown.output
    tiny.on_forward(None)
    shown = run(["train", "--resume", "--model", tiny.MODEL, "--out", "cut"])
    assert shown.exit_code == 0 and "resumed at step" in text(shown), shown.output
    assert same(weights("cut"), weights("whole"))


def test_ctrl_c_before_the_first_step_does_not_wait_and_leaves_nothing() -> None:
    tiny.on_forward(lambda n: signal.raise_signal(signal.SIGINT) if n == 4 else None)
    with pytest.raises(KeyboardInterrupt):
        train(Options(**TINY, recipe="full", out="run"))
    assert not Path("run").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_that_is_over_resumes_to_its_result(whole: Path) -> None:
    before, told = weights("whole"), [line for line in runlog.read(whole / "run.jsonl") if line["event"] == "evaluated"]
    again = train(resumed("whole"))
    assert [(e.step, e.accuracy) for e in again.evaluations] == [(line["step"], line["accuracy"]) for line in told]
    assert same(weights("whole"), before)


def test_a_run_whose_state_is_gone_is_not_begun_again(whole: Path) -> None:
    before = weights("whole")
    (whole / "state.pt").unlink()
    with pytest.raises(folder.FolderError, match=r"cannot be resumed: state\.pt is missing"):
        train(resumed("whole"))
    assert same(weights("whole"), before)


def test_a_torn_log_is_no_obstacle(whole: Path) -> None:
    with pytest.raises(RuntimeError):
        train(Options(**TINY, recipe="full", out="cut"), at_step(9, power_cut))
    log = Path("cut/run.jsonl")
    log.write_bytes(log.read_bytes()[:-20])
    train(resumed("cut"))
    assert same(weights("cut"), weights("whole"))
    assert list(runlog.read(log))[-1]["event"] == "end"


def test_a_damaged_state_is_refused(whole: Path) -> None:
    state = whole / "state.pt"
    good = state.read_bytes()
    cut = [good[:n] for n in (0, 1, 200, len(good) // 2, len(good) - 1)]
    pickled = good.index(b"param_groups")  # names in its index
    spoilt = [good.replace(b"param_groups", b"param_gruops"), good[:pickled] + bytes(40) + good[pickled + 40 :], b"x" * 500]
    for bad in (*cut, *spoilt):
        state.write_bytes(bad)
        with pytest.raises(PliantError, match=r"'whole' cannot be resumed: .*state\.pt' is (not a|damaged)"):
            train(resumed("whole"))


@pytest.mark.parametrize("part", ["model", "optimizer", "session", "random", "beside"])
def test_a_state_with_a_damaged_part_is_refused(part: str, whole: Path) -> None:
    held = torch.load("whole/state.pt", weights_only=True)
    for spoilt in (None, {}, "text", "gone"):
        bad = {**held, part: spoilt} if spoilt != "gone" else {name: value for name, value in held.items() if name != part}
        torch.save(bad, "whole/state.pt")
        with pytest.raises(PliantError, match=r"'whole' cannot be resumed: .*(state\.pt'|not the state of)"):
            train(resumed("whole"))


# ---------------------------------------------------------------- worse than before


def test_what_training_made_worse_is_rolled_back() -> None:
    first = train(Options(**TINY, recipe="full", out="good", lr=0.1))
    assert first.accuracy > 0.8
    bad = {**TINY, "model": f"{tiny.MODEL}@good/last.safetensors", "epochs": 1, "lr": 80.0, "scratch": False, "recipe": "full"}
    shown = run(["train", *[f"--{k}={v}" if v is not True else f"--{k}" for k, v in bad.items() if v], "--out=bad"])
    assert shown.exit_code == 0 and "made it worse" in text(shown) and "rolled back" in text(shown), shown.output
    assert same(weights("bad"), weights("good")) and same(weights("bad", "best"), weights("good"))
    kept = train(Options(**bad, out="kept", keep_anyway=True))
    assert not kept.rolled_back and kept.accuracy < first.accuracy and not same(weights("kept"), weights("good"))


def test_a_loss_that_is_no_number_is_worse_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = iter([(0.25, 1.4), (0.9, float("nan")), (0.9, float("inf")), (0.9, float("nan"))])
    monkeypatch.setattr("pliant.apps.train.run.tasks.judge", lambda model, split: next(judged))
    said: list[str] = []
    result = train(Options(**TINY, recipe="full", out="run"), lambda status: said.append(status.news))
    assert result.rolled_back and result.best.step == 0 and result.accuracy == 0.25
    assert "the loss is nan, not a finite number. Use a lower --lr than" in said[-1] and "25.0%" not in said[-1]
    assert [one["loss"] for one in json.loads(json.dumps(result.to_json(), allow_nan=False))["evaluations"]] == [
        1.4,
        None,
        None,
        None,
    ]


# ---------------------------------------------------------------- folders and disks


def test_two_runs_into_one_folder_are_refused(whole: Path) -> None:
    before = weights("whole")
    shown = run(["train", *FLAGS, "--recipe", "full", "--out", "whole"])
    assert shown.exit_code == 1 and "holds a run already" in text(shown) and "--resume" in text(shown)
    with folder.locked(whole), pytest.raises(PliantError, match="another process is using"):
        train(resumed("whole"))
    assert same(weights("whole"), before)


def test_a_folder_of_other_things_is_left_alone() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("")
    with pytest.raises(PliantError, match=r"not empty .*thesis"):
        train(Options(**TINY, recipe="head", out="mine"))
    assert [entry.name for entry in Path("mine").iterdir() if entry.name != ".lock"] == ["thesis.txt"]


def test_a_full_disk_loses_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, real = 0, os.fsync

    def fsync(number: int) -> None:
        nonlocal saves
        saves += 1
        if saves > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    shown = run(["train", *FLAGS, "--recipe", "full", "--out", "cut"])
    assert shown.exit_code == 1 and "No space left" in text(shown) and "--resume" in text(shown)
    monkeypatch.setattr(os, "fsync", real)
    assert not list(Path("cut").glob("*.tmp")) and not list(Path("cut").glob(".*.tmp"))
    train(resumed("cut"))
    assert same(weights("cut"), weights("whole"))


def test_resuming_needs_a_run_and_the_same_options(whole: Path) -> None:
    shown = run(["train", "--resume", "--out", "nowhere"])
    assert shown.exit_code == 1 and "no run in" in text(shown) and not Path("nowhere").exists()
    shown = run(["train", "--resume", "--model", tiny.MODEL, "--out", "whole", "--recipe", "head"])
    assert shown.exit_code == 2 and "recipe='full'" in text(shown)
    (whole / "run.json").write_text("{}")
    shown = run(["train", "--resume", "--out", "whole"])
    assert shown.exit_code == 1 and "not what a run" in text(shown)


# ---------------------------------------------------------------- bad input


def test_a_budget_just_below_the_floor_is_told_apart_from_it_and_the_floor_works() -> None:
    """However near they are, the two numbers differ as they are printed, shares and amounts."""
    asked = Options(**{**TINY, "epochs": 1}, recipe="pliant")
    loaded = task.load(tiny.MODEL, tiny.DATA, size=8, seed=0, device="cpu", scratch=True, validation=0.4)
    with open_session(
        Options(batch=8, lr=0.1, optimizer="sgd", scratch=True), loaded, task.policy("green_trainer", macs=1.0)
    ) as session:
        session.before_step(next(loaded.batches(8, 0, 0)))
        least = session.profile.cost([Unit("7", (Part("7.weight"), Part("7.bias")))]).macs  # the head, which always trains
    with pytest.raises(BudgetError) as told:
        train(replace(asked, macs=f"{least - 1}MAC", out="run"))
    said = re.findall(r"macs=(\S+) \((\S+) KMAC\) is below the floor of (\S+) \((\S+) KMAC\)", str(told.value))[0]
    assert float(said[0]) < float(said[2]) and float(said[1]) < float(said[3]), said
    for floor in (f"{least}MAC", f"{said[3]}KMAC", said[2]):
        assert train(replace(asked, macs=floor, out=f"run-{floor}")).evaluations[-1].step == 7


def test_classes_without_images_to_validate_with_are_named() -> None:
    for name, grey in (("dark", 20), ("light", 220), ("rare", 120), ("odd", 90)):
        Path("photos", name).mkdir(parents=True)
        for i in range(12 if name in ("dark", "light") else 2):  # a fifth of two is none
            Image.new("L", (9, 7), grey + i).save(Path("photos", name, f"{i}.png"))
    flags = ["train", *FLAGS, "--data", "photos", "--batch", "4", "--recipe", "head", "--validation", "0.2"]
    shown = run([*flags, "--out", "run"])
    assert shown.exit_code == 0, shown.output
    said = "warning: no image to validate with of 'odd', 'rare'"
    assert said in text(shown) and "to train on" not in text(shown)
    assert [line["text"] for line in runlog.read("run/run.jsonl") if line["event"] == "note"] == [said]
    assert said in report.text([report.load("run")])
    shutil.rmtree("photos/odd"), shutil.rmtree("photos/rare")
    assert "warning" not in run([*flags, "--out", "other"]).output


# ---------------------------------------------------------------- the roofline


def test_a_runs_report_has_the_roofline_that_its_log_tells() -> None:
    train(Options(**TINY, recipe="pliant", time="1.0", out="run"))
    told = [line for line in runlog.read("run/run.jsonl") if line["event"] == "roofline"]
    assert len(told) == 1 and told[0]["format"] == "pliant.survey/1"
    found = report.load("run").roof
    assert found is not None and found.peaks == PEAKS
    units = [(unit["name"], unit["seconds"], unit["macs"], unit["moved"]) for unit in told[0]["units"]]
    assert [(row.name, row.seconds, row.macs, row.moved) for row in found.rows] == units
    assert [name for name, *_ in units] == ["7", "3", "0"] and all(macs > 0 for _, _, macs, _ in units)
    start = next(line for line in runlog.read("run/run.jsonl") if line["event"] == "start")
    assert told[0]["full"] == start["full"]  # what the run measured for itself, not once more
    page = report.page([report.load("run")])
    assert "<h3>Roofline</h3>" in page and "not in the log" not in page


def test_a_roofline_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states of random numbers are as without it."""
    states: dict[str, Any] = {}

    def state(out: str) -> Callable[[Status], None]:
        return at_step(9, lambda: states.update({out: torch.get_rng_state()}))

    options = {**TINY, "recipe": "pliant", "macs": "0.9"}
    train(Options(**options, out="with"), state("with"))
    monkeypatch.setattr("pliant.apps.train.run.PendingRoofline.__init__", lambda roof, *_: None)
    monkeypatch.setattr("pliant.apps.train.run.PendingRoofline.event", lambda roof: {"event": "roofline", "why": "left out"})
    train(Options(**options, out="without"), state("without"))
    assert {"units"} <= next(line for line in runlog.read("with/run.jsonl") if line["event"] == "roofline").keys()
    assert same(weights("with"), weights("without")) and torch.equal(states["with"], states["without"])


def test_where_there_is_no_roofline_the_report_says_why(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Roofline: the recipe 'full' needs no seconds, so no layer was timed; `pliant profile` times them."
    assert said in report.text([report.load("whole")])

    def no_peaks(*_: Any) -> None:
        raise ValueError("no clock <here>")

    monkeypatch.setattr("pliant.apps.layer_report.peaks", no_peaks)
    train(Options(**TINY, recipe="pliant", time="1.0", out="run"))
    assert report.load("run").roof is None and "no clock &lt;here&gt;" in report.page([report.load("run")])


def test_folders_of_images_are_read_and_what_is_wrong_with_them_is_told() -> None:
    for name, grey in (("dark", 20), ("light", 220)):
        Path("photos", name).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (9, 7), grey + i).save(Path("photos", name, f"{i}.png"))
    flags = ["train", *FLAGS, "--data", "photos", "--batch", "4", "--recipe", "head"]
    assert run([*flags, "--out", "run"]).exit_code == 0
    Path("photos/light/3.png").write_bytes(b"not an image")
    shown = run([*flags, "--out", "corrupt"])
    assert shown.exit_code == 1 and "cannot be read" in text(shown)
    Path("photos/empty").mkdir()
    shown = run([*flags, "--out", "empty"])
    assert shown.exit_code == 1 and "'empty' is empty" in text(shown)


# ---------------------------------------------------------------- options in a file, displays, other logs


def test_options_may_stand_in_a_file_and_the_command_line_wins() -> None:
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**TINY, "recipe": "full", "evaluate-every": 9}.items())
    Path("options.toml").write_text(toml)
    shown = run(["train", "--config", "options.toml", "--model", tiny.MODEL, "--recipe", "head", "--out", "run", "--json"])
    assert shown.exit_code == 0, shown.output
    options = json.loads(shown.stdout)["options"]
    assert options["recipe"] == "head" and options["evaluate_every"] == 9 and options["batch"] == 8


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("reciepe = 'full'", "Did you mean 'recipe'?"),
        ("recipe = ", "cannot be read as TOML"),
        ("lr = 'fast'", "lr='fast' should be a number"),
        ("exact = 1", "true or false"),
        ("recipe = 3", "should be text"),
    ],
)
def test_a_bad_file_of_options_is_refused(toml: str, said: str) -> None:
    Path("options.toml").write_text(toml)
    shown = run(["train", "--config", "options.toml", "--out", "run"])
    assert shown.exit_code == 2 and said in text(shown), shown.output


def test_lines_tell_of_evaluations_where_there_is_no_terminal() -> None:
    shown = run(["train", *FLAGS, "--recipe", "pliant", "--macs", "0.9", "--out", "run"])
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("step 0/21 · epoch 1/3 · accuracy before training")
    assert [line.split(" · ")[0] for line in lines[1:4]] == ["step 7/21", "step 14/21", "step 21/21"]
    assert "macs asked 0.90, chosen 0." in lines[3] and "of 3 units" in lines[3]


def test_a_terminal_shows_a_panel() -> None:
    console = Console(force_terminal=True, width=70, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    with console.file, live.shown(console) as watch:
        train(Options(**TINY, recipe="head", out="run"), watch)
    text = console.export_text()
    assert "epoch 3/3" in text and "step 21/21" in text and "best" in text and "········██" not in text
    assert "input to output" in text and "█" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_is_not_utf8_shows_a_panel(encoding: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(force_terminal=True, width=70, file=file)
    with live.shown(console) as show:
        show(Status(3, 10, 1, 2, None, 0.5, 0.6, None, "", (True, False, True), 5.0, news="an accuracy"))
    file.flush()
    assert "#.#" in file.buffer.getvalue().decode(encoding)


def test_what_a_terminal_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "argv", ["pliant", "train", *FLAGS, "--recipe", "head", "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    file.flush()
    assert "step 21/21 ? epoch 3/3" in file.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize("words", [["--version"], ["train", *FLAGS, "--recipe", "head", "--out", "run"]])
@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "pliant: the standard output cannot be written: "), (errno.EPIPE, "")]
)
def test_where_the_output_cannot_be_written_the_error_is_one_line(
    words: list[str], number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(number, os.strerror(number))

        def fileno(self) -> int:
            return null

    errors = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["pliant", *words])
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", errors)
    with open(os.devnull, "wb") as file:
        null = file.fileno()
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 1
    assert errors.getvalue().startswith(said) and len(errors.getvalue().splitlines()) == bool(said)
    assert "run" not in errors.getvalue()


def test_tensorboard_is_written_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, path: str) -> None:
            assert path == "run"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def close(self) -> None:
            written.append(("closed", -1))

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train(Options(**TINY, recipe="head", out="run", log_to="tensorboard"))
    assert {("accuracy/validation", 7), ("loss/train", 3), ("step/units_trained", 21)} <= set(written)
    assert written[-1] == ("closed", -1)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    shown = run(["train", *FLAGS, "--recipe", "head", "--out", "other", "--log-to", "tensorboard"])
    assert shown.exit_code == 1 and "pliant[tensorboard]" in text(shown) and not Path("other").exists()


# ---------------------------------------------------------------- no file runs code, and no fault loses a run


def test_a_run_folder_names_no_code(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("tiny_net.net", lambda classes=4: called.append("net"))
    shown = run(["train", "--resume", "--out", "whole"])
    assert shown.exit_code == 2 and f"--model {tiny.MODEL}" in text(shown) and not called
    with pytest.raises(PliantError, match="may not choose the code"):
        Options.of_run("whole")


def test_a_file_of_options_names_no_code() -> None:
    Path("options.toml").write_text('model = "os:abort"')
    shown = run(["train", "--config", "options.toml", "--out", "run"])
    assert shown.exit_code == 2 and "may not choose the code" in text(shown) and not Path("run").exists()


@pytest.mark.parametrize(
    "held", [{}, {"options": None}, {"options": [1]}, {"options": {"epochs": "many"}}, {"options": {"a": 1}}]
)
def test_a_run_folder_with_damaged_options_is_told(whole: Path, held: dict[str, Any]) -> None:
    (whole / "run.json").write_text(json.dumps({"format": "pliant.run/1", **held}))
    shown = run(["train", "--resume", "--out", "whole"])
    assert shown.exit_code in (1, 2) and isinstance(shown.exception, SystemExit), shown.output
    assert "Traceback" not in shown.output


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_is_gone_is_noticed_and_the_run_goes_on_elsewhere(whole: Path, how: str) -> None:
    def away() -> None:
        shutil.rmtree("cut") if how == "removed" else Path("cut").rename("elsewhere")
        if how == "replaced":
            Path("cut").mkdir()
            Path("cut/thesis.txt").write_text("mine")

    options = Options(**TINY, recipe="full", out="cut")
    with pytest.raises(PliantError, match=r"removed, moved or replaced .* up to step") as said:
        train(options, at_step(10, away))
    new = "cut-2" if how == "replaced" else "cut"
    assert f"--resume --out {new}" in str(said.value)
    if how == "replaced":
        assert os.listdir("cut") == ["thesis.txt"]
    for name in ("run.json", "run.jsonl", "state.pt", "last.safetensors"):
        assert Path(new, name).exists()
    train(resumed(new))
    assert same(weights(new), weights("whole"))


def test_a_folder_that_is_gone_ends_the_command_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = models.weights_of

    def gone(*args: Any) -> bytes:  # just before the last weights are written
        if Path("run/state.pt").exists():
            shutil.rmtree("run")
        return real(*args)

    monkeypatch.setattr("pliant.apps.train.run.models.weights_of", gone)
    shown = run(["train", *FLAGS, "--recipe", "full", "--out", "run"])
    assert shown.exit_code == 1 and "removed, moved or replaced" in text(shown), shown.output


def test_what_a_killed_run_left_half_written_is_removed_and_does_not_block_the_folder() -> None:
    Path("run").mkdir()
    stale = [Path("run", f".{name}.0123456789abcdef.tmp") for name in ("run.json", "state.pt", "best.safetensors")]
    for file in stale:
        file.write_bytes(b"half")
    train(Options(**{**TINY, "epochs": 1}, recipe="head", out="run"))
    assert not any(file.exists() for file in stale)


def test_class_names_may_hold_any_character(monkeypatch: pytest.MonkeyPatch) -> None:
    real = task.load
    odd = ("top\nleft", "a,b", "ä", '"')
    monkeypatch.setattr("pliant.apps.train.tasks.load", lambda *a, **k: replace(real(*a, **k), classes=odd))
    train(Options(**{**TINY, "epochs": 1}, recipe="head", out="run"))
    with safe_open("run/best.safetensors", "pt") as file:
        assert tuple(json.loads(file.metadata()["names"])) == odd


def test_names_of_files_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    real, name = task.load, "caf\udce9.png"
    skipped = (Skipped(name, "is no image"),)
    monkeypatch.setattr("pliant.apps.train.tasks.load", lambda *a, **k: replace(real(*a, **k), skipped=skipped))
    monkeypatch.setattr("pliant.apps.train.run.readme", lambda *_: name)
    train(Options(**{**TINY, "epochs": 1}, recipe="head", skip_unreadable=True, out="run"))
    assert b"caf\xe9.png,is no image" in Path("run/skipped.csv").read_bytes()
    assert Path("run/README.md").read_text(encoding="utf-8") == "caf?.png"
