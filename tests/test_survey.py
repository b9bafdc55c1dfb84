"""A model on this device: units, rows of the roofline, the table, and costs for a device that is not at hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import run, text
from rich.console import Console
from torch import nn
from zoo import fingerprint

from pliant import Unit, measure, recipes, units
from pliant.apps.layer_report import layer_report
from pliant.cost.profile import ChargeKind
from pliant.cost.roofline import Peaks, roof_seconds, rows
from pliant.graph.backward import read
from pliant.runtime.sandbox import sandbox

TOY = Peaks(flops=2e9, bandwidth=1e9, device="cpu: toy", dtype="float32", threads=1)
SLOW_MEMORY = replace(TOY, bandwidth=1e3)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


IMAGES = (5, 3, 6, 6)


def test_a_row_holds_the_work_of_a_layers_own_backward() -> None:
    model, x = net(), torch.randn(*IMAGES)
    with sandbox(model):
        graph = read(model, square, x)
    profile = measure.counted(model, sgd(model), square, x)
    conv, linear = (next(u for u in units.layers()(graph) if u.name == name) for name in ("0", "4"))
    by_name = {row.name: row for row in rows(graph, profile, [linear, conv])}
    product = 5 * 8 * 36 * 4
    assert by_name["4"].macs == 2 * product + 5 * 4, "input gradient, weight gradient, and a sum for the bias"
    touched = 4 * (5 * 8 * 36 + 8 * 36 * 4 + 4 + 5 * 4)
    assert by_name["4"].moved == 2 * touched
    assert by_name["0"].macs > 5 * 8 * 36 * 27, "the first layer needs no input gradient: its weight's alone, and its norm"
    assert by_name["0"].macs < 2 * 5 * 8 * 36 * 27


def test_a_layer_report_leaves_no_trace_and_lists_every_layer() -> None:
    model, x = net(), torch.randn(*IMAGES)
    optimizer = sgd(model)
    before = fingerprint(model, optimizer)
    found = layer_report(model, optimizer, square, x, peaks_of=TOY)
    assert fingerprint(model, optimizer) == before
    assert [unit.name for unit in found.units] == ["4", "0"] == [row.name for row in found.rows]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found.table())
    shown = " ".join(console.export_text().split())  # the name of a processor may be long
    assert "a full step takes" in shown and "ridge 2 FLOP/byte" in shown
    told = json.loads(json.dumps(found.to_json()))
    assert told["units"][0]["name"] == "4" and told["peaks"]["ridge"] == 2.0
    assert told["units"][0]["alone"]["seconds"] <= told["full"]["seconds"]


def test_units_of_another_kind_can_be_asked_for() -> None:
    model, x = net(), torch.randn(*IMAGES)
    found = layer_report(model, sgd(model), square, x, units.tensors(), peaks_of=TOY)
    assert len(found.units) == 6


# ---------------------------------------------------------------- a device that is not at hand


def test_a_modelled_product_takes_what_the_roof_allows() -> None:
    model, x = nn.Sequential(nn.Linear(50, 40, bias=False), nn.Linear(40, 30, bias=False)), torch.randn(20, 50)
    for peaks in (TOY, SLOW_MEMORY):
        profile = measure.modelled(peaks, launch=0.0)(model, sgd(model), square, x)
        charge = next(c for c in profile.charges if c.kind is ChargeKind.WEIGHT_GRAD and c.params == ("1.weight",))
        moved = 4 * (20 * 40 + 40 * 30 + 20 * 30)
        assert charge.cost.seconds == pytest.approx(roof_seconds(20 * 40 * 30, moved, peaks))
        assert profile.full.seconds > profile.cost([Unit("head", units.tensors()(read(model, square, x))[0].parts)]).seconds
        assert profile.origin["device"] == "modelled: cpu: toy"


def test_low_intensity_costs_more_where_memory_is_slow() -> None:
    """The same model on a device with the same arithmetic and slow memory: a norm's share of a step grows."""
    model, x = net(), torch.randn(*IMAGES)
    norm = [Unit("norm", tuple(u.parts[0] for u in units.norms()(read(model, square, x)) if u.name.startswith("1.")))]

    def share(peaks: Peaks) -> float:
        profile = measure.modelled(peaks, launch=0.0)(model, sgd(model), square, x)
        own = sum(c.cost.seconds for c in profile.due(norm) if c.kind is ChargeKind.WEIGHT_GRAD)
        return own / profile.full.seconds

    assert share(SLOW_MEMORY) > share(replace(TOY, bandwidth=1e12))


def test_elastic_layers_can_be_priced_for_another_device() -> None:
    model, x = net(), torch.randn(*IMAGES)
    profile = recipes.elastic_layers(0.9, peaks=TOY).cost(model, sgd(model), square, x)
    assert profile.origin["device"] == "modelled: cpu: toy" and profile.full.seconds > 0


# ---------------------------------------------------------------- the command


@pytest.fixture
def toy_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "toy_net.py").write_text(
        "from torch import nn\n"
        "def images():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))\n"
        "def words():\n    return nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pliant.apps.layer_report.peaks", lambda device, dtype: TOY)


@pytest.mark.usefixtures("toy_model")
def test_the_command_prints_a_table_and_a_roof_and_draws_it(tmp_path: Path) -> None:
    done = run(["profile", "toy_net:images", "--batch", "2", "--size", "8", "--svg", "roof.svg"])
    assert done.exit_code == 0, done.output
    assert "FLOP/B" in text(done) and "GFLOP/s" in text(done)
    assert (tmp_path / "roof.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.usefixtures("toy_model")
def test_the_command_takes_token_ids_and_speaks_json() -> None:
    done = run(["profile", "toy_net:words", "--shape", "7", "--ids", "20", "--json", "--tensors"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert {unit["name"] for unit in told["units"]} == {"0.weight", "1.weight", "1.bias"}
