"""From data of any kind to a model in use: what is trained on, what comes out, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from command import run, text
from PIL import Image
from torch import nn

import pliant
from pliant.apps import augment, models, tasks
from pliant.apps import trained as using
from pliant.apps.data import audio, inputs, samples
from pliant.apps.data.errors import DataError
from pliant.apps.data.inputs import ArrayInputs, AudioInputs, ImageInputs, TextInputs
from pliant.apps.data.prepare import Reading, prepare
from pliant.apps.data.text import word_ids
from pliant.apps.device import TRAIN
from pliant.apps.models.small import BUCKETS
from pliant.apps.optional import needed
from pliant.apps.tasks import TaskError
from pliant.apps.train import Options, Status, train
from pliant.apps.train.outcome import Outcome, confusion, too_short
from pliant.apps.train.readme import readme
from pliant.cli.export import TARGETS
from pliant.cost.peaks import Peaks
from pliant.export import checked, program
from pliant.export.device import process as device
from pliant.export.device.facts import PROGRAM
from pliant.session import run_log

RATE = 4000
QUICK: dict[str, Any] = {"batch": 4, "epochs": 1, "device": "cpu", "validation": 0.3}
FLAGS = [f"--{name}={value}" for name, value in QUICK.items()]


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("pliant.cost.peaks.measured", lambda *_: Peaks(4e10, 1e10, "cpu", "float32", 1))
    return place


def write_wav(path: Path, samples: np.ndarray[Any, Any], rate: int = RATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def float_wav(path: Path, samples: list[float], rate: int = RATE) -> None:
    held = struct.pack(f"<{len(samples)}f", *samples)
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(held), b"WAVE", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32, b"data", len(held)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + held)


def tone(hertz: float, seconds: float = 0.3, rate: int = RATE) -> np.ndarray[Any, Any]:
    return 0.5 * np.sin(2 * math.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write_sounds(root: str = "sounds", each: int = 8) -> None:
    for name, hertz in (("low", 200), ("high", 1200)):
        for i in range(each):
            write_wav(Path(root, name, f"{i}.wav"), tone(hertz + 15 * i))


def write_table(path: str, rows: list[tuple[str, ...]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.endswith(".tsv") else ",").writerows(rows)


def sentences(count: int = 24) -> list[tuple[str, str]]:
    return [(f"{'lovely' if i % 2 else 'dreadful'} film number {i}", "good" if i % 2 else "bad") for i in range(count)]


def write_images(root: str = "photos", each: int = 6) -> None:
    for name, grey in (("dark", 20), ("light", 220)):
        Path(root, name).mkdir(parents=True)
        for i in range(each):
            Image.new("L", (9, 7), grey + i).save(Path(root, name, f"{i}.png"))


# ---------------------------------------------------------------- from data to predictions, with commands


def test_a_folder_of_sounds_is_trained_on_and_new_ones_are_classified() -> None:
    write_sounds()
    shown = run(["train", "--data", "sounds", "--out", "run", *FLAGS, "--epochs", "3"])
    assert shown.exit_code == 0, shown.output
    write_wav(Path("new/a.wav"), tone(230))
    write_wav(Path("new/b.wav"), tone(1270))
    shown = run(["predict", "run", "new", "--format", "json", "--top", "2"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)["predictions"]
    assert [one["classes"][0]["class"] for one in found] == ["low", "high"]
    assert all(sum(each["probability"] for each in one["classes"]) == pytest.approx(1) for one in found)
    assert isinstance(pliant.load("run").model, models.AudioSmall)


def test_a_table_of_sentences_is_trained_on_and_new_ones_are_classified() -> None:
    write_table("reviews.csv", [("text", "label"), *sentences()])
    write_table("new.tsv", [("id", "text"), ("1", "a lovely film"), ("2", 'dreadful, "really"')])
    shown = run(["train", "--data", "reviews.csv", "--out", "run", *FLAGS, "--epochs", "4"])
    assert shown.exit_code == 0, shown.output
    shown = run(["predict", "run", "new.tsv", "--text", "lovely lovely", "--format", "csv"])
    rows = list(csv.DictReader(shown.stdout.splitlines()))
    assert [row["class"] for row in rows] == ["good", "bad", "good"] and rows[1]["input"] == 'dreadful, "really"'
    Path("lines.txt").write_text("lovely film\n\ndreadful film\n")
    assert text(run(["predict", "run", "lines.txt"])).split()[2] == "good"


def test_images_in_a_table_with_splits_and_the_accuracy_of_the_log() -> None:
    write_images()
    rows = [(f"photos/{name}/{i}.png", name, "val" if i > 3 else "train") for name in ("dark", "light") for i in range(6)]
    write_table("list.csv", [("file", "label", "split"), *rows])
    shown = run(
        ["train", "--data", "list.csv", "--model", tiny.MODEL, "--out", "run", *FLAGS, "--size=8", "--scratch", "--recipe=full"]
    )
    assert shown.exit_code == 0, shown.output
    lines = list(run_log.read("run/run.jsonl"))
    summary = next(line for line in lines if line["event"] == "summary")
    classes = next(line for line in lines if line["event"] == "classes")
    best = max(line["accuracy"] for line in lines if line["event"] == "evaluated")
    assert summary["best"]["accuracy"] == classes["accuracy"] == best and classes["samples"] == 4
    shown = run(["evaluate", "run", "--model", tiny.MODEL, "--json"])
    assert json.loads(shown.stdout)["accuracy"] == best, shown.output
    assert [line["weights"] for line in run_log.read("run/run.jsonl") if line["event"] == "classes"] == ["best", "best"]


def test_arrays_and_plain_pytorch() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3, 8, 8)).astype(np.float32)
    y = np.arange(40) % 4
    x[:, 0] += y[:, None, None]
    np.savez("data.npz", x=x, y=y)
    result = train(Options(**QUICK, data="data.npz", model=tiny.MODEL, scratch=True, recipe="full", out="run"))
    trained = pliant.load("run", model=tiny.MODEL)
    assert trained.inputs == ArrayInputs((3, 8, 8)) and trained.classes == ("0", "1", "2", "3")
    split, _ = using._own_validation(trained, "run")
    with torch.no_grad():
        hits = trained.model(split.inputs).argmax(1) == split.labels
    assert float(hits.double().mean()) == pytest.approx(result.best.accuracy)
    np.save("one.npy", x[0])
    assert trained.inputs(["one.npy"]).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("change", ["a sample more", "another text", "another label"])
def test_a_run_knows_the_data_that_it_began_with(change: str) -> None:
    """Other data would be split anew: samples that were trained on would be validated with."""
    rows = [("text", "label"), *sentences()]
    write_table("reviews.csv", rows)
    train(Options(**QUICK, data="reviews.csv", out="run"))
    assert run(["evaluate", "run"]).exit_code == 0
    others = {"another text": [("other words", word) for _, word in rows[1:]], "another label": rows[:0:-1]}
    write_table("reviews.csv", [rows[0], *others.get(change, [*rows[1:], ("more of it", "good")])])
    shown = run(["evaluate", "run"])
    assert shown.exit_code == 2 and "have changed since the run" in text(shown), shown.output
    shown = run(["train", "--resume", "--out", "run"])
    assert shown.exit_code == 2 and "are not those that the run in 'run' began with" in text(shown), shown.output
    write_table("reviews.csv", rows)
    assert run(["evaluate", "run"]).exit_code == run(["train", "--resume", "--out", "run"]).exit_code == 0
    held = json.loads(Path("run/run.json").read_text())
    del held["data"]  # as an earlier version wrote it
    Path("run/run.json").write_text(json.dumps(held))
    write_table("reviews.csv", [*rows, ("more of it", "good")])
    assert run(["evaluate", "run"]).exit_code == 0


# ---------------------------------------------------------------- what a run leaves


@pytest.fixture
def words() -> str:
    """The folder of a run on sentences."""
    write_table("reviews.csv", [("text", "label"), *sentences()])
    train(Options(**QUICK, data="reviews.csv", out="words"))
    return "words"


def test_the_weight_file_says_everything_that_inference_needs(words: str) -> None:
    about = pliant.load(words).about
    assert json.loads(about["inputs"]) == {"kind": "text", "length": 8, "tokenizer": "words", "pad": 0}
    assert json.loads(about["names"]) == ["bad", "good"] and about["model"] == "text_small"
    assert json.loads(about["versions"])["torch"] == torch.__version__
    again = pliant.load(Path(words, "last.safetensors"))
    assert again.predict(["a lovely film"], top=2)[0][0][0] in ("bad", "good")
    read = Path(words, "README.md").read_text()
    assert f"pliant predict {words} new.csv" in read and f"pliant.load({words!r})" in read and "Validation accuracy" in read


@pytest.mark.parametrize(
    ("model", "given"),
    [("at:noon/best.safetensors", ""), ("timm:resnet18", ""), ("mine:net", "mine:net"), ("mine:net@a.safetensors", "mine:net")],
)
def test_the_commands_of_a_readme_name_the_model_only_if_it_is_code(model: str, given: str) -> None:
    read = readme(Options(model=model), "run", ("a", "b"), ImageInputs(8), None)
    assert (f"pliant evaluate run --model {given} " if given else "pliant evaluate run  ") in read
    assert (f"pliant.load('run', model='{given}')" if given else "pliant.load('run')") in read


def test_a_model_of_a_factory_is_given_and_never_chosen_by_the_file() -> None:
    train(Options(**QUICK, data=tiny.DATA, model=tiny.MODEL, size=8, scratch=True, recipe="head", out="run"))
    with pytest.raises(TaskError, match="may not choose the code"):
        pliant.load("run")
    import tiny_net

    mine = tiny_net.net()
    assert pliant.load("run", model=mine).model is mine and not mine.training
    with pytest.raises(using.TrainedError, match="does not fit"):
        pliant.load("run", model=nn.Linear(2, 2))
    for command in (["predict", "run", "x.png"], ["evaluate", "run"], ["export", "run"]):
        Path("x.png").touch()
        shown = run(command)
        assert shown.exit_code == 2 and "--model tiny_net:net" in text(shown), shown.output


def test_a_run_says_whether_it_paid() -> None:
    full = Outcome(100, 12.0, 20.0, 0.2, 20.0, 1_000_000, False, 4_000_000)
    assert "it saved 40% of the time" in full.lines()[0] and "100 steps of 200 ms" in full.lines()[0]
    assert "1 MB predicted; a full step would take 4 MB" in full.lines()[1]
    assert "it took 50% longer" in Outcome(1, 30.0, 30.0, 20.0, 20.0, None, False, None).verdict
    assert "2.5 times as long" in Outcome(1, 50.0, 50.0, 20.0, 20.0, None, False, None).verdict
    assert Outcome(9, 1.0, 2.0, None, None, None, False, None).lines() == ["training took 1 s. With evaluating and saving: 2 s"]


def test_a_run_that_is_too_short_to_pay_is_told_what_would() -> None:
    half = tasks.policy("pliant", time=0.5)
    said = too_short(half, 20, 10, "cpu")
    assert said is not None and "From 24 steps on (--epochs 3)" in said
    assert too_short(half, 24, 10, "cpu") is None and too_short(half, 24, 10, "cuda") is not None
    assert (
        too_short(tasks.policy("full"), 2, 1, "cpu") is None
        and too_short(tasks.policy("pliant", memory="1MB"), 2, 1, "cpu") is None
    )


def test_training_stops_when_evaluations_get_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = iter([(0.25, 1.4), (0.5, 1.3), (0.5, 1.2), (0.5, 1.2), (0.4, 1.2), (0.9, 0.1)])
    monkeypatch.setattr("pliant.apps.train.run.tasks.judge", lambda model, split: next(judged))
    options = Options(
        **{**QUICK, "epochs": 9, "batch": 32},
        data=tiny.DATA,
        model=tiny.MODEL,
        size=8,
        scratch=True,
        recipe="head",
        out="run",
        patience=2,
    )
    told: list[Status] = []
    result = train(options, told.append)
    assert result.stopped_early and len(result.evaluations) == 5 and any("stopped early" in one.news for one in told)
    again = train(Options.of_run("run", {"model": tiny.MODEL}))
    assert again.stopped_early and again.evaluations == result.evaluations


def test_unreadable_files_are_skipped_counted_and_listed() -> None:
    write_images()
    Path("photos/dark/bad.png").write_bytes(b"no image")
    flags = [
        "train",
        "--data",
        "photos",
        "--model",
        tiny.MODEL,
        "--out",
        "run",
        *FLAGS,
        "--size",
        "8",
        "--scratch",
        "--recipe",
        "head",
    ]
    shown = run(flags)
    assert shown.exit_code == 1 and "bad.png" in text(shown) and not Path("run").exists()
    shown = run([*flags, "--skip-unreadable"])
    assert shown.exit_code == 0 and "1 samples cannot be read and were skipped" in text(shown), shown.output
    assert "bad.png" in Path("run/skipped.csv").read_text()


def test_folders_behind_links_are_classified_too_and_each_folder_once() -> None:
    write_images("elsewhere", 1)
    write_images("photos", 1)
    Path("photos/linked").symlink_to(Path("elsewhere").absolute(), target_is_directory=True)
    Path("photos/again").symlink_to(Path("photos/dark").absolute(), target_is_directory=True)
    Path("photos/dark/aside").symlink_to(Path("photos/light").absolute(), target_is_directory=True)
    Path("photos/dark/up").symlink_to(Path("photos").absolute(), target_is_directory=True)
    found = samples.unlabelled(["photos"], "images")
    inside = ["dark/0.png", "light/0.png", "linked/dark/0.png", "linked/light/0.png"]
    assert found.sources == [Path("photos", file) for file in inside]


def test_a_line_ends_where_an_editor_says() -> None:
    Path("lines.txt").write_bytes("one\ftext\u2028\u0085here\r\n\nanother\rthird".encode())
    assert samples.unlabelled(["lines.txt"], "text").sources == ["one\ftext\u2028\u0085here", "another", "third"]


def test_names_of_files_in_a_table_may_stand_between_spaces() -> None:
    write_table("list.csv", [("path", "label"), (" a.png ", "dark"), ("b.png", "light")])
    found = samples.find("list.csv")
    assert found.sources == [Path("a.png"), Path("b.png")] and found.names[0] == "the file 'a.png' (row 2 of 'list.csv')"


# ---------------------------------------------------------------- what is refused


def _break_csv() -> None:
    Path("t.csv").write_bytes(b"text,label\n\xff\xfe,a\n")


def _open_quote() -> None:
    Path("t.csv").write_text('text,label\n"never closed,a\n')


def _mixed_rates() -> None:
    write_sounds("s", 3)
    write_wav(Path("s/low/odd.wav"), tone(200, rate=8000), 8000)


def _not_finite() -> None:
    write_sounds("s", 3)
    float_wav(Path("s/low/odd.wav"), [0.0, float("nan"), 0.1])


def _cut_wav() -> None:
    write_sounds("s", 3)
    Path("s/low/odd.wav").write_bytes(Path("s/low/0.wav").read_bytes()[:30])


def _two_kinds() -> None:
    write_sounds("s", 3)
    Image.new("L", (9, 7)).save("s/low/odd.png")


def _rows(*rows: tuple[str, ...]) -> Callable[[], None]:
    return lambda: write_table("t.csv", list(rows))


def _arrays(**held: Any) -> Callable[[], None]:
    return lambda: np.savez("a.npz", **held)


ARRAYS = ["--data", "a.npz", "--model", tiny.MODEL]
GOOD = [("text", "label"), *sentences(12)]
BAD: dict[str, tuple[Callable[[], None], list[str], int, str]] = {
    "not utf-8": (_break_csv, ["--data", "t.csv"], 1, "UTF-8"),
    "open quote": (_open_quote, ["--data", "t.csv"], 1, "cannot be read as a table"),
    "no rows": (_rows(("text", "label")), ["--data", "t.csv"], 1, "no rows"),
    "no table": (lambda: None, ["--data", "t.csv"], 2, "no data 't.csv'"),
    "more cells": (_rows(*GOOD, ("a", "b", "c")), ["--data", "t.csv"], 1, "row 14: 3 cells"),
    "no label column": (_rows(("text", "mood"), ("a", "b")), ["--data", "t.csv"], 2, "--label-column"),
    "unknown column": (_rows(*GOOD), ["--data", "t.csv", "--input-column", "txt"], 2, "Did you mean 'text'?"),
    "which column": (_rows(("a", "b", "label"), ("x", "y", "z")), ["--data", "t.csv"], 2, "--input-column"),
    "empty text": (_rows(*GOOD, (" ", "good")), ["--data", "t.csv"], 1, "row 14 of 't.csv' is empty"),
    "empty label": (_rows(*GOOD, ("a", "")), ["--data", "t.csv"], 1, "the label is empty"),
    "odd split": (_rows(("text", "label", "split"), ("a", "b", "dev")), ["--data", "t.csv"], 1, "the split is 'dev'"),
    "one class": (_rows(("text", "label"), ("a", "b"), ("c", "b")), ["--data", "t.csv"], 2, "nothing to learn"),
    "missing file": (_rows(("path", "label"), ("gone.png", "a")), ["--data", "t.csv"], 1, "gone.png"),
    "mixed rates": (_mixed_rates, ["--data", "s"], 1, "--rate 4000"),
    "not finite": (_not_finite, ["--data", "s"], 1, "not finite"),
    "cut sound": (_cut_wav, ["--data", "s"], 1, "cannot be read as WAV"),
    "two kinds": (_two_kinds, ["--data", "s"], 1, "both images (1) and WAV files (6)"),
    "arrays without a model": (_arrays(x=np.zeros((4, 2)), y=np.arange(4)), ["--data", "a.npz"], 2, "--model"),
    "arrays not finite": (_arrays(x=np.full((4, 2), np.nan), y=np.arange(4)), [*ARRAYS], 1, "not finite"),
    "arrays of other lengths": (_arrays(x=np.zeros((4, 2)), y=np.arange(3)), [*ARRAYS], 1, "one label per"),
    "text for a network of images": (_rows(*GOOD), ["--data", "t.csv", "--model", "tiny_net:net"], 2, "fails on text"),
    "optimizer": (lambda: None, ["--optimizer", "adam"], 2, "Did you mean 'adamw'?"),
    "features": (lambda: None, ["--features", "mel"], 2, "log-mel"),
    "augment": (lambda: None, ["--augment", "heavy"], 2, "none, light, flip"),
    "seconds": (lambda: None, ["--seconds", "-1"], 2, "above 0"),
    "log": (lambda: None, ["--log-to", "paper"], 2, "'tensorboard' or 'wandb'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_and_the_right_exit_code(case: str) -> None:
    prepare_case, flags, code, said = BAD[case]
    prepare_case()
    shown = run(["train", *FLAGS, "--out", "run", *flags])
    assert shown.exit_code == code, shown.output
    assert said in shown.stderr and len(shown.stderr.splitlines()) == 1 and not Path("run").exists(), shown.output


def test_bad_input_of_the_other_commands(words: str) -> None:
    Path("empty").mkdir()
    write_table("odd.csv", [("text", "label"), ("a film", "great")])
    write_images()
    Path("old.csv").write_text("keep me")
    cases = [
        (["evaluate", words, "odd.csv"], 1, "'great', which the model does not know"),
        (["evaluate", words, "photos"], 1, "holds images, but this model was trained on text"),
        (["evaluate", words, "gone.csv"], 2, "no data 'gone.csv'"),
        (["evaluate", words, "odd.csv", "--label-column", "lable"], 2, "Did you mean 'label'?"),
        (["evaluate", "nowhere"], 2, "'nowhere' is not there"),
        (["evaluate", "empty"], 2, "holds no best.safetensors"),
        (["evaluate", words, "--weights", "worst"], 2, "'best' or 'last'"),
        (["predict", words], 2, "nothing to classify"),
        (["predict", words, "gone.txt"], 2, "gone.txt"),
        (["predict", words, "--text", "  ", "--format", "csv", "--out", "old.csv"], 1, "is empty"),
        (["export", words, "--to", "onyx"], 2, "Did you mean 'onnx'?"),
        (["export", "photos"], 2, "best.safetensors"),
        (["run-device", "empty", "--lr", "nan"], 2, "--lr"),
        (["run-device", "empty", "--lr", "inf"], 2, "--lr inf: the learning rate must be a finite number"),
        (["run-device", "empty", "--seed", "-1"], 2, "--seed"),
    ]
    for arguments, code, said in cases:
        shown = run(arguments)
        assert shown.exit_code == code and said in shown.stderr, (arguments, shown.output)
        assert len(shown.stderr.splitlines()) == 1, shown.output
    assert Path("old.csv").read_text() == "keep me"
    weights = Path(words, "best.safetensors")
    weights.write_bytes(weights.read_bytes()[:-7])
    assert run(["predict", words, "--text", "a"]).exit_code == 1


def test_predictions_keep_names_that_are_not_utf8(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [using.Prediction("caf\udce9.txt", (("good", 0.5),))]
    monkeypatch.setattr(using, "predictions", lambda *_: rows)
    shown = run(["predict", words, "--text", "a", "--format", "csv", "--out", "out.csv"])
    assert shown.exit_code == 0 and Path("out.csv").read_bytes().splitlines()[1] == b"caf\xe9.txt,good,0.5000", shown.output


def test_numbers_that_are_not_finite_are_null_in_json(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = device.Trained((1.0, math.inf), None, 0.5, math.nan, 1, None, None)
    monkeypatch.setattr("pliant.cli.run_device.run_device", lambda job: trained)
    monkeypatch.setattr(tasks, "outputs", lambda model, batch: torch.full((len(batch), 2), math.nan))
    Path("program").mkdir()
    for name in (PROGRAM, TRAIN):
        Path("program", name).touch()

    def read(*arguments: str) -> Any:
        return json.loads(run(arguments).stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    assert read("evaluate", words, "--json")["loss"] is None
    assert read("predict", words, "--text", "a", "--format", "json")["predictions"][0]["classes"][0]["probability"] is None
    assert read("run-device", "program", "--json")["losses"] == [1.0, None]


def test_files_that_describe_impossible_inputs_are_refused() -> None:
    good = TextInputs(8).to_json()
    assert inputs.from_json(good) == TextInputs(8) and inputs.from_json(
        json.loads(json.dumps(ImageInputs(8).to_json()))
    ) == ImageInputs(8)
    for held in (
        None,
        {},
        {"kind": "smell"},
        {**good, "length": "8"},
        {**good, "length": 10**12},
        {**good, "length": 0},
        {**good, "pad": -1},
    ):
        with pytest.raises(ValueError):
            inputs.from_json(held)
    for kind in (
        {"kind": "images", "size": -1},
        {"kind": "audio", "features": "eval"},
        {"kind": "images", "std": [0]},
        {"kind": "arrays", "shape": [2**20, 2**20]},
    ):
        with pytest.raises(ValueError):
            inputs.from_json(kind)


# ---------------------------------------------------------------- parts


def test_sound_keeps_its_pitch_when_it_is_resampled() -> None:
    for rate, to in ((8000, 4000), (4000, 8000), (4410, 4000)):
        sound = torch.from_numpy(tone(500, 1.0, rate)).float()
        out = audio.resampled(sound, rate, to)
        spectrum = torch.fft.rfft(out[: to // 2]).abs()
        assert len(out) == to and int(spectrum.argmax()) * 2 == 500
        wanted = torch.from_numpy(tone(500, 1.0, to)).float()
        assert float((out - wanted)[200:-200].abs().max()) < 0.02
    high = audio.resampled(torch.from_numpy(tone(3000, 1.0, 8000)).float(), 8000, 4000)
    assert float(high[100:-100].abs().max()) < 0.01, "what the new rate cannot hold is gone"


def test_features_show_where_the_sound_is() -> None:
    mel = audio.log_mel(torch.from_numpy(tone(1000, 1.0, 8000)).float(), 8000, 40)
    assert mel.shape == (40, 101) and mel[:, 50].argmax() in range(18, 24)
    assert audio.mfcc(torch.zeros(8000), 8000, 40).shape == (20, 101)
    heard = AudioInputs(8000, 0.5, channels=3)
    assert heard.of_samples(torch.zeros(100), 8000).shape == (3, 40, 51) and heard.example(2).shape == (2, 3, 40, 51)
    waves = AudioInputs(8000, 0.5, "wave").of_samples(torch.from_numpy(tone(100, 0.5, 8000)).float(), 8000)
    assert waves.shape == (4000,) and float(waves.std(correction=0)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_any_width(width: int) -> None:
    with wave.open("a.wav", "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(RATE)
        top = (255).to_bytes(1, "little") if width == 1 else (2 ** (8 * width - 1) - 1).to_bytes(width, "little")
        file.writeframes(top * 20)
    sound, rate = audio.read_wav(Path("a.wav"), "it")
    assert rate == RATE and sound.shape == (10,) and float(sound.max()) == pytest.approx(1, abs=0.01)


def test_words_have_the_same_numbers_everywhere() -> None:
    assert word_ids("A film, a FILM") == [word_ids("a")[0], word_ids("film")[0], word_ids(",")[0], *word_ids("a film")]
    assert word_ids("film") == [1854] and all(0 < each < BUCKETS for each in word_ids("ä ß 漢字 !"))


def test_rates_may_be_mixed_where_one_is_asked_for() -> None:
    _mixed_rates()
    found = prepare("s", Reading(rate=4000))
    assert isinstance(found.inputs, AudioInputs) and found.inputs.rate == 4000 and len(found.labels) == 7
    assert found.inputs.seconds == pytest.approx(0.3)


def test_samples_change_at_random_and_again_alike() -> None:
    picture, sound, words = torch.rand(4, 3, 8, 8), torch.randn(4, 1, 40, 30), torch.randint(1, 99, (4, 40))
    for batch, how in ((picture, ImageInputs(8)), (sound, AudioInputs()), (words, TextInputs(40))):
        once, again, other = (augment.augmented(batch, how, "flip", [0, 0, n]) for n in (1, 1, 2))
        assert (
            torch.equal(once, again)
            and not torch.equal(once, other)
            and once.shape == batch.shape
            and once.dtype == batch.dtype
        )
        assert torch.equal(augment.augmented(batch, how, "none", [0]), batch)
    task = tasks.load(tiny.MODEL, tiny.DATA, size=8, device="cpu", augment="light")
    assert not torch.equal(
        next(task.batches(8, 0, 0))[0], next(tasks.load(tiny.MODEL, tiny.DATA, size=8, device="cpu").batches(8, 0, 0))[0]
    )


def test_class_weights_let_every_class_count_alike() -> None:
    weights = tasks._class_weights(torch.tensor([0, 0, 0, 2]), 3)
    assert weights.tolist() == pytest.approx([2 / 3, 0, 2])
    write_table("t.csv", [("text", "label"), *sentences(12), *[(f"x{i}", "good") for i in range(12)]])
    task = tasks.load("text_small", "t.csv", device="cpu", class_weights=True)
    assert task.class_weights is not None and float(task.class_weights[0]) > float(task.class_weights[1])


def test_options_follow_the_data_and_the_model() -> None:
    write_table("t.csv", GOOD)
    write_sounds("s", 2)
    assert [getattr(Options(data="t.csv").resolved(), name) for name in ("model", "recipe", "optimizer", "lr")] == [
        "text_small",
        "full",
        "adamw",
        0.01,
    ]
    assert Options(data="t.csv", time=0.9).resolved().recipe == "pliant" and Options(data="s").resolved().model == "audio_small"
    plain = Options().resolved()
    assert (plain.model, plain.recipe, plain.optimizer, plain.lr) == ("efficientnet_lite0", "pliant", "sgd", 0.03)
    assert Options(model="hf:x", data="t.csv").resolved().lr == 3e-4 and plain.resolved() == plain
    assert samples.class_folders("s").kind == "audio"


def test_an_exported_program_runs_alone_and_one_that_differs_is_not_written(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(["export", words, "--to", "torch", "--out", "m.pt2"])
    assert shown.exit_code == 0 and "wrote m.pt2" in text(shown), shown.output
    extra = {"pliant.json": ""}
    again = torch.export.load("m.pt2", extra_files=extra).module()
    assert json.loads(json.loads(extra["pliant.json"])["classes"]) == ["bad", "good"]
    trained = pliant.load(words)
    batch = trained.inputs(["a lovely film", "dreadful", "so so"])
    with torch.no_grad():
        assert torch.allclose(again(batch), trained.model(batch)) and set(TARGETS) == {"torch", "onnx"}
    with pytest.raises(checked.ExportError, match="differs from PyTorch by"):
        checked.difference(lambda some: torch.ones(len(some), 2), checked.Logits(trained.model, models.logits), batch, "it")
    with pytest.raises(checked.ExportError, match=r"torch\.export cannot read"):
        program.export(trained.model, batch, "n.pt2", {}, lambda model, x: model(x) if x.sum().item() else x)
    assert not Path("n.pt2").exists()


def test_the_package_that_is_really_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"it needs no_such_package, which is not installed. Run: pip install 'pliant\[x\]'"):
        needed("no_such_package", "x", "it")
    Path("needs_other.py").write_text("import no_such_other\n")
    with pytest.raises(ImportError, match="needs_other, which needs no_such_other"):
        needed("needs_other", "x", "it")
    Path("torn.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    with pytest.raises(ImportError, match="does not load beside this PyTorch: operator"):
        needed("torn", "x", "it")
    for name in ("needs_other", "torn"):
        sys.modules.pop(name, None)


def test_torchvision_models_come_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_net

    class Weights:
        DEFAULT: Any = SimpleNamespace(get_state_dict=lambda **_: tiny_net.ten().state_dict())

        def __init__(self) -> None:
            pass

    made = SimpleNamespace(
        list_models=lambda: ["net"],
        get_model=lambda name, weights, num_classes: tiny_net.net(num_classes),
        get_model_weights=lambda name: [Weights()],
    )
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=made))
    monkeypatch.setitem(sys.modules, "torchvision.models", made)
    net: Any = models.load("torchvision:net", 4, pretrained=True)
    assert net[7].out_features == 4 and not models.is_code("torchvision:net")
    with pytest.raises(ValueError, match="Did you mean 'net'"):
        models.load("torchvision:nets", 4)


def test_wandb_gets_what_tensorboard_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict[str, float], int]] = []
    done: list[bool] = []
    handle = SimpleNamespace(log=lambda values, step: seen.append((values, step)), finish=lambda: done.append(True))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: handle))
    train(Options(**QUICK, data=tiny.DATA, model=tiny.MODEL, size=8, scratch=True, recipe="head", out="run", log_to="wandb"))
    assert (
        done == [True]
        and any("accuracy/validation" in values for values, _ in seen)
        and any("loss/train" in values for values, _ in seen)
    )


def test_confusion_counts_pairs() -> None:
    found = using.Evaluated(
        "d", "all", "best", 4, 0.5, 1.0, ("a", "b"), tuple((x, y, n) for x, y, n in confusion([0, 0, 1, 1], [0, 1, 1, 0]))
    )
    a, b = found.by_class()
    assert (a.samples, a.right, a.predicted, a.recall, b.precision) == (2, 1, 2, 0.5, 0.5)
    with pytest.raises(DataError, match="holds no image"):
        Path("none").mkdir()
        samples.unlabelled(["none"], "images")
