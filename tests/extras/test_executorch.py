"""Programs for devices with the real ExecuTorch: exported, checked, planned, trained, and brought back. `make test-extras`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant import BudgetError, Cost, Part, Selection, Unit, recipes
from pliant.export import ExportError, Facts, apply_delta_, executorch
from pliant.export.device import export as making
from pliant.export.device.export import built, cross_entropy
from pliant.export.device.process import Job, batches, run_device
from pliant.export.device.runner import Runner

pytest.importorskip("executorch")
pytestmark = pytest.mark.filterwarnings("ignore")  # the package warns that it is experimental


class Net(nn.Module):
    """Inverted residual blocks with batch norms: what all the backbones are made of."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.up = nn.Sequential(nn.Conv2d(8, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6())
        self.deep = nn.Sequential(nn.Conv2d(wide, wide, 3, 2, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6())
        self.down = nn.Conv2d(wide, 12, 1)
        self.last = nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 3)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.deep(self.up(self.stem(x))))
        return self.head((x + F.relu(self.last(x))).mean((2, 3)))


def batch_of(size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 3, 16, 16), torch.arange(size) % 3


def selection(*parts: Part | str) -> Selection:
    units = tuple(Unit(str(i), (Part(p) if isinstance(p, str) else p,)) for i, p in enumerate(parts))
    return Selection(units, Cost(), {}, 0.0)


def grads_of(facts: Facts, program: bytes, batch: Any) -> dict[str, torch.Tensor]:
    runner = Runner(program, facts.trains)  # gradients are its memory
    return {name: grad.clone() for name, grad in runner.run(batch)[1].items()}


CHOICES = {
    "head": ("head.weight", "head.bias"),
    "across frozen layers": ("head.weight", "last.bias", "deep.0.weight"),
    "norms": ("up.1.weight", "up.1.bias", "head.weight"),
    "everything": tuple(name for name, _ in Net().named_parameters()),
    "output channels": (Part("last.weight", 0, (1, 2, 7)), Part("last.bias", 0, (1, 2, 7)), Part("deep.0.weight", 0, (0, 5))),
    "input channels": (Part("last.weight", 1, (0, 3)), Part("down.weight", 1, (4, 5, 6)), "head.bias"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_are_those_of_pytorch(name: str) -> None:
    model, batch = Net(), batch_of()
    before = copy.deepcopy(model.state_dict())
    facts, program = built(model, batch, selection(*CHOICES[name]))
    assert facts.difference < 1e-5
    found = grads_of(facts, program, batch)
    cross_entropy(model, batch).backward()
    for one in facts.trains:
        want = model.get_parameter(one.name).grad
        assert want is not None
        want = want if one.dim is None else want.index_select(one.dim, torch.tensor(one.index))
        torch.testing.assert_close(found[one.name], want, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_operators_that_the_runtime_lacks_are_computed_by_others() -> None:
    """The backward kernel of max pooling adds to what lay in memory; that of SiLU makes an empty tensor."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), nn.SiLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(150, 3)
    model = nn.Sequential(*layers).eval()
    facts, _ = built(model, batch_of(), selection(*(name for name, _ in model.named_parameters())))
    assert len(facts.trains) == 6 and facts.difference < 1e-5


def test_exported_trained_and_brought_back(tmp_path: Path) -> None:
    """Forty steps on the device and in PyTorch end in the same weights; the delta gives the same predictions."""
    model, optimizer = Net(), None
    policy = replace(recipes.head(), always=("last.*",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    facts = executorch(model, batch_of(), policy, tmp_path / "out", optimizer=optimizer)
    assert isinstance(facts, Facts) and Facts.read(tmp_path / "out") == facts
    x, y = torch.randn(30, 3, 16, 16), torch.randint(0, 3, (30,))
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    job = Job(str(tmp_path / "out"), str(tmp_path / "data.npz"), str(tmp_path / "data.npz"), steps=40, out=str(tmp_path / "d"))
    trained = run_device(job)
    assert len(trained.losses) == 40 and trained.planned == facts.planned

    plain = copy.deepcopy(model)
    names = {one.name for one in facts.trains}
    for name, param in plain.named_parameters():
        param.requires_grad_(name in names)
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    stream = batches([x, y], 2, 0)
    for _ in range(40):
        sgd.zero_grad()
        cross_entropy(plain, next(stream)).backward()
        sgd.step()
    back = copy.deepcopy(model)
    assert set(apply_delta_(back, tmp_path / "d")) == names
    for name, param in back.named_parameters():
        torch.testing.assert_close(param, plain.get_parameter(name), rtol=1e-3, atol=1e-4, msg=name)
    right = float((back(x).argmax(1) == y).float().mean())
    assert trained.after == pytest.approx(right)


def test_a_memory_limit_is_the_planners(tmp_path: Path) -> None:
    model, batch = Net(wide=64), batch_of(1)
    whole, _ = built(model, batch, recipes.full())
    policy = recipes.tinytrain(memory="1MB", macs=1.0, head=True)
    limit = whole.planned // 2
    facts = executorch(model, batch, policy, tmp_path, memory=f"{limit}B")
    assert isinstance(facts, Facts) and facts.planned <= limit and facts.trains
    assert sum(facts.memory["held"].values()) == facts.planned
    with pytest.raises(BudgetError, match="floor"):
        built(model, batch, policy, memory="2kB")


def test_wide_frozen_layers_are_computed_in_pieces() -> None:
    model, batch = Net(wide=96), batch_of(1)
    head = selection("head.weight", "head.bias")
    whole, _ = built(model, batch, head)
    facts, _ = built(model, batch, head, memory=f"{whole.planned * 2 // 3}B")
    assert facts.planned < whole.planned and facts.pieces and facts.difference < 1e-5


def test_int8_frozen_weights_shrink_the_program() -> None:
    model = Net(wide=256)
    chosen = selection("head.weight", "last.bias")
    plain, small = (built(model, batch_of(), chosen, int8=int8)[0] for int8 in (False, True))
    assert small.program_bytes < plain.program_bytes and small.difference < 1e-4


def test_a_bundle_has_an_index(tmp_path: Path) -> None:
    choices = {"small": selection("head.bias"), "large": selection("head.weight", "head.bias")}
    found = executorch(Net(), batch_of(), choices, tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())["programs"]
    assert isinstance(found, dict) and set(index) == {"small", "large"}
    assert index["small"]["goes_on_in"] == ["large"] and index["large"]["goes_on_in"] == []
    assert (tmp_path / index["small"]["program"]).stat().st_size == index["small"]["program_bytes"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if x.sum() > 0 else -self.head(x)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.conv(x), 2).flatten(1))


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.logcumsumexp(self.conv(x).mean((2, 3)), 1))


REFUSED = {
    "a branch on values": (Branching(), (torch.ones(2, 4), torch.tensor([0, 1])), {}, "cannot be exported"),
    "an operator without kernel": (Sorted().eval(), batch_of(), {}, "logcumsumexp"),
    "a backward pass without kernel": (Pooled().eval(), batch_of(), {}, "adaptive_avg_pool2d_backward"),
    "train-mode norms": (Net().train(), batch_of(), {}, r"'stem.1'.*model.eval\(\)"),
    "AdamW": (Net(), batch_of(), {"optimizer": torch.optim.AdamW(Net().parameters())}, "AdamW"),
    "half precision": (Net().half(), batch_of(), {}, "float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_file_is_written(name: str, tmp_path: Path) -> None:
    model, batch, options, message = REFUSED[name]
    everything = selection(*(name for name, _ in model.named_parameters()))
    with pytest.raises(ExportError, match=message):
        executorch(model, batch, everything, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_wrong_gradients_are_refused_and_the_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = making.lower

    def wrong(graph: Any) -> Any:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
            node.args = (*node.args[:4], *node.args[4:6], [1, 1], *node.args[7:])
            with graph.graph.inserting_after(node.args[0]):
                twice = graph.graph.call_function(torch.ops.aten.mul.Scalar, (node.args[0], 2.0))
                twice.meta = dict(node.args[0].meta)
            node.args = (twice, *node.args[1:])
        graph.graph_module.recompile()
        return real(graph)

    monkeypatch.setattr(making, "lower", wrong)
    with pytest.raises(ExportError, match=r"'last.weight'.*convolution_backward"):
        built(Net(), batch_of(), selection("last.weight", "head.weight"))
