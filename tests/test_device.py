"""Programs for devices, as far as PyTorch alone can tell: graphs, memory, deltas and refusals. `tests/extras` has the rest."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pliant import Cost, Part, Policy, Selection, Unit, recipes
from pliant.export import ExportError, Facts, apply_delta_, executorch
from pliant.export.device import check
from pliant.export.device import choose as choosing
from pliant.export.device.arena import Buffer, busiest, place
from pliant.export.device.export import cross_entropy
from pliant.export.device.facts import save_delta
from pliant.export.device.footprint import footprint, split_
from pliant.export.device.joint import joint
from pliant.export.device.lower import lower
from pliant.export.device.prepare import prepared
from pliant.export.device.process import batches
from pliant.export.device.rewrites import shrink_
from pliant.export.device.step import Trained


class Net(nn.Module):
    """A wide frozen block, a padding, a frozen norm, and layers that train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.deep, self.down = nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.Conv2d(16, 6, 1)
        self.mid, self.last, self.head = nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)
        self.double().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.relu6(self.deep(F.relu6(self.norm(self.up(x))))))
        x = F.relu6(self.mid(F.pad(x, (0, 1, 0, 1))))
        return self.head(F.hardtanh(self.last(x)).mean((2, 3)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 3, 12, 12, dtype=torch.float64), torch.tensor([0, 2])


def outputs(program: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The loss and the gradients of a joint graph, run by PyTorch."""
    given, values = iter(inputs), []
    for spec in program.graph_signature.input_specs:
        held = {**program.state_dict, **program.constants}
        values.append(next(given) if spec.kind.name == "USER_INPUT" else held[spec.target])
    found = program.graph_module(*values)
    kinds = program.graph_signature.output_specs
    return found[0], {spec.target: value for spec, value in zip(kinds, found, strict=True) if "GRADIENT" in spec.kind.name}


def test_rewritten_graphs_compute_the_same_in_less_memory() -> None:
    model = Net()
    out = Part("last.weight", 0, (1, 6)), Part("mid.weight", 1, (0, 2)), Part("deep.bias")
    step, trained = prepared(model, cross_entropy, batch(), (*out, Part("head.weight")), int8=False)
    program = joint(step)
    before, (loss, plain) = footprint(program), outputs(program, step.inputs)
    shrink_(program)
    after = footprint(program)
    assert after < before
    same, found = outputs(program, step.inputs)
    cross_entropy(model, batch()).backward()
    torch.testing.assert_close(same, loss)
    for one in trained:
        torch.testing.assert_close(found[one.program_name], plain[one.program_name])
        whole = model.get_parameter(one.name).grad
        assert whole is not None
        want = whole if one.dim is None else whole.index_select(one.dim, torch.tensor(one.index))
        torch.testing.assert_close(found[one.program_name], want)


def test_frozen_wide_layers_in_pieces_compute_the_same() -> None:
    model = Net()
    step, _ = prepared(model, cross_entropy, batch(), (Part("head.weight"),), int8=False)
    program = joint(step)
    shrink_(program)
    before = footprint(program)
    assert list(split_(program, 1).values()) == [8]
    assert footprint(program) < before
    torch.testing.assert_close(outputs(program, step.inputs)[0], cross_entropy(model, batch()).detach())


lives = st.builds(lambda size, start, length: Buffer(16 * size, start, start + length), *[st.integers(1, 30)] * 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(lives, max_size=25))
def test_tensors_that_live_together_do_not_overlap(buffers: list[Buffer]) -> None:
    offsets, total = place(buffers)
    assert total >= busiest(buffers)[1]
    for i, (a, at) in enumerate(zip(buffers, offsets, strict=True)):
        assert 0 <= at <= total - a.size
        for b, other in list(zip(buffers, offsets, strict=True))[:i]:
            apart = at + a.size <= other or other + b.size <= at
            assert apart or a.end < b.start or b.end < a.start


def test_a_selection_is_trimmed_to_its_best_units_until_it_fits() -> None:
    units = tuple(Unit(str(i), (Part(f"p{i}"),)) for i in range(9))
    values = {unit: float(i) for i, unit in enumerate(units)}
    chosen = Selection(units, Cost(), {}, 36.0)
    seen: dict[frozenset[Any], choosing.Candidate] = {}

    def trimmed(limit: int) -> list[str] | None:
        made = choosing._trimmed(chosen, {units[0]}, seen, values, limit, lambda one: (None, 100 * len(one.units)))
        return None if made is None else [unit.name for unit in made.selection.units]

    assert trimmed(450) == ["0", "6", "7", "8"]  # the first stays in any case
    assert trimmed(250) == ["0", "8"] and trimmed(150) == ["0"]
    assert trimmed(50) is None and min(one.bytes for one in seen.values()) == 100


# ---------------------------------------------------------------- the check


class Kinked(nn.Module):
    """A value that lies on the kink of a ReLU where the input is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 2), nn.Linear(2, 2)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
            self.first.bias.copy_(torch.tensor([-1.0, 0.5]))
            self.head.weight.copy_(torch.tensor([[1.0, 0.5], [-0.5, 1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.first(x)))


def checked(monkeypatch: pytest.MonkeyPatch, x: float, wrong: float = 1.0) -> float:
    """Hold a stand-in for a program, which rounds otherwise than PyTorch, against PyTorch."""
    model, trained = Kinked(), [Trained("first.weight", "", (2, 3)), Trained("head.weight", "", (2, 2))]

    class Rounding:
        def __init__(self, program: bytes, trained: Any) -> None: ...

        def run(self, inputs: Any) -> Any:
            given = inputs[0] * (1 + 2e-7), inputs[1]
            loss, grads = check.eager(model, cross_entropy, given, trained)
            return [loss, model(inputs[0]).detach()], {name: grad * wrong for name, grad in grads.items()}, {}

    monkeypatch.setattr(check, "Runner", Rounding)
    monkeypatch.setattr(check, "_operators", lambda *args: ["aten.some"])
    return check.check(b"", None, model, cross_entropy, (torch.tensor([[x, 0.3, 0.2]]), torch.tensor([1])), trained)


def test_gradients_are_compared_where_rounding_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(monkeypatch, x=1.5) < 1e-5
    assert checked(monkeypatch, x=1.0) < 1e-5  # on the kink: another batch decides
    for x in (1.0, 1.5):
        with pytest.raises(ExportError, match=r"differs from PyTorch's.*aten\.some"):
            checked(monkeypatch, x, wrong=1.001)


# ---------------------------------------------------------------- files


FACTS = Facts(
    (Trained("head.weight", "model.head.weight", (3, 8)), Trained("last.weight", "x", (2, 8, 3, 3), 0, (1, 6))),
    (((2, 3, 12, 12), "float32"), ((2,), "int64")),
    ((), (2, 3)),
    {"planned": 10, "operator": "aten.add.out", "held": {"activations": 10}, "largest": []},
    *(5, 9, 100, ("aten::add.out",), {"lr": 0.1}, 1e-7, 2, {}, False),
)


def test_facts_and_deltas_come_back(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_bytes(FACTS.dumps())
    assert Facts.read(tmp_path) == FACTS and FACTS.planned == 10 and "10 bytes" in FACTS.lines()[0]
    weights = {"head.weight": torch.ones(3, 8), "last.weight": torch.full((2, 8, 3, 3), 2.0)}
    save_delta(tmp_path / "d", weights, FACTS)
    model, was = Net().float(), copy.deepcopy(Net().float().state_dict())
    assert apply_delta_(model, tmp_path / "d") == ["head.weight", "last.weight"]
    now = model.state_dict()
    assert torch.equal(now["head.weight"], weights["head.weight"]) and torch.equal(
        now["last.weight"][[1, 6]], weights["last.weight"]
    )
    changed = [name for name in was if not torch.equal(was[name], now[name])]
    assert changed == ["last.weight", "head.weight"] and torch.equal(now["last.weight"][0], was["last.weight"][0])
    with pytest.raises(ExportError, match="Another model"):
        apply_delta_(nn.Linear(2, 2), tmp_path / "d")


@pytest.mark.parametrize("text", ["", "{}", '{"format": "pliant.device/1"}', "[1]"])
def test_files_that_describe_no_program_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ExportError, match="does not describe"):
        Facts.read(tmp_path)
    with pytest.raises(ExportError, match="holds no exported program"):
        Facts.read(tmp_path / "nowhere")
    (tmp_path / "d").write_text(text)
    with pytest.raises(ExportError, match="is not a delta"):
        apply_delta_(Net(), tmp_path / "d")


def test_batches_are_shuffled_by_the_seed() -> None:
    arrays = [torch.arange(5), torch.arange(5)]
    stream: Iterator[tuple[torch.Tensor, ...]] = batches(arrays, 2, 3)
    first = [next(stream)[0].tolist() for _ in range(4)]
    again = batches(arrays, 2, 3)
    assert first == [next(again)[0].tolist() for _ in range(4)]
    assert [one[0].tolist() for one in batches(arrays, 2, None)] == [[0, 1], [2, 3]]


# ---------------------------------------------------------------- refusals


def head() -> Selection:
    return Selection((Unit("head", (Part("head.weight"),)),), Cost(), {}, 0.0)


def timed() -> Policy:
    return recipes.pliant(time=0.5)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "AdamW": (head(), {"optimizer": torch.optim.AdamW(Net().parameters())}, "AdamW cannot run on the device"),
    "several rates": (
        head(),
        {"optimizer": torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": r} for r in (0.1, 0.2)])},
        "one SGD for all",
    ),
    "double": (head(), {}, "float32"),
    "a share of memory": (head(), {"memory": 0.5}, "an amount"),
    "a time": (recipes.pliant(time=0.5), {}, "would be measured here"),
    "a name with a slash": ({"a/b": head()}, {}, "cannot name a program"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    choice, options, message = REFUSED[name]
    model = Net() if name == "double" else Net().float()
    with pytest.raises(ExportError, match=message):
        executorch(model, batch(), choice, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_parameters_that_the_loss_does_not_reach_are_refused() -> None:
    model = Net()
    model.unused = nn.Linear(2, 2).double()
    step, _ = prepared(model, cross_entropy, batch(), (Part("head.weight"), Part("unused.bias")), int8=False)
    with pytest.raises(ExportError, match=r"does not depend on 'unused\.bias'"):
        joint(step)


def test_norms_and_dropout_in_training_mode_are_refused(tmp_path: Path) -> None:
    for model, name in ((Net().float().train(), "norm"), (nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), "0")):
        with pytest.raises(ExportError, match=f"'{name}'.*model.eval"):
            executorch(model, batch(), head(), tmp_path / "out")


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(key for key in sys.modules if key.partition(".")[0] == "executorch"), "executorch"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pliant\[executorch\]"):
        lower(None)
