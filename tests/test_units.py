"""What can be chosen: tensors, layers, blocks and norms of every model of the zoo."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO

from pliant import Part, Unit, units
from pliant.graph.backward import Graph, read


@cache
def graph_of(name: str) -> Graph:
    model, loss, batch = ZOO[name].make()
    return read(model, loss, batch)


def graph_for(model: nn.Module, *shape: int) -> Graph:
    return read(model, lambda m, x: m(x).square().mean(), torch.zeros(*shape))


def names(found: tuple[Unit, ...]) -> list[str]:
    return [unit.name for unit in found]


def members(found: tuple[Unit, ...]) -> dict[str, set[str]]:
    return {unit.name: set(unit.params) for unit in found}


def kinds() -> dict[str, units.Units]:
    return {"tensors": units.tensors(), "layers": units.layers(), "blocks": units.blocks()}


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("case", ZOO)
def test_every_parameter_is_in_one_unit_and_units_come_nearest_the_loss_first(case: str, kind: str) -> None:
    graph = graph_of(case)
    found, order = kinds()[kind](graph), graph.order()
    assert sorted(param for unit in found for param in unit.params) == sorted(graph.params)
    assert not set(ZOO[case].frozen) & {param for unit in found for param in unit.params}
    assert len(set(names(found))) == len(found)
    assert all(part.dim is None and part.index is None for unit in found for part in unit.parts)
    deepest = [max(order.get(param, len(graph.nodes)) for param in unit.params) for unit in found]
    assert deepest == sorted(deepest)
    if kind == "tensors":  # what the loss does not reach comes last
        assert set(names(found)[len(found) - len(graph.unused) :]) == set(graph.unused)


# ---------------------------------------------------------------- tensors


def test_tensors_are_named_like_their_parameter() -> None:
    assert units.tensors("last.*")(graph_of("unused")) == (
        Unit("last.weight", (Part("last.weight"),)),
        Unit("last.bias", (Part("last.bias"),)),
    )


def test_order_is_that_of_running_not_of_registration() -> None:
    assert names(units.layers()(graph_of("misordered"))) == ["a_last", "c_middle", "b_first"]


def test_include_and_exclude() -> None:
    graph = graph_of("branches")
    assert names(units.tensors("*.bias", exclude=["blocks.*", "side.*"])(graph)) == ["head.bias"]
    assert names(units.tensors(["head.*", "side.*"], "*.weight")(graph)) == ["head.bias", "side.bias"]
    assert members(units.layers(exclude="*.bias")(graph))["side"] == {"side.weight"}
    assert names(units.blocks(exclude="head.*")(graph)) == ["side", "blocks.1", "blocks.0"]


@pytest.mark.parametrize("kind", [units.tensors, units.layers])
def test_a_glob_that_matches_nothing_is_an_error(kind: units.Units) -> None:
    with pytest.raises(ValueError, match=r"no parameter matches 'layer1\.\*'\. Parameters here: .*\(4\)"):
        kind("layer1.*")(graph_of("thrice"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter matches 'layer1"):
        kind("*", "layer1.*")(graph_of("thrice"))  # type: ignore[arg-type,call-arg]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing is left to choose from"):
        units.tensors("inner.*", "*")(graph_of("thrice"))


# ---------------------------------------------------------------- layers


def test_a_layer_is_weight_bias_and_the_norm_that_follows() -> None:
    assert members(units.layers()(graph_of("conv_net"))) == {
        "10": {"10.weight", "10.bias"},
        "6": {"6.weight", "6.bias"},
        "3": {"3.weight", "4.weight", "4.bias"},
        "0": {"0.weight", "1.weight", "1.bias"},
    }


def test_a_norm_joins_its_own_branch() -> None:
    found = members(units.layers()(graph_of("branches")))
    assert found["blocks.1.conv"] == {"blocks.1.conv.weight", "blocks.1.norm.weight", "blocks.1.norm.bias"}
    assert found["blocks.1.shortcut"] == {"blocks.1.shortcut.weight", "blocks.1.shortcut.bias"}


def test_a_norm_that_follows_no_layer_stands_alone() -> None:
    found = members(units.layers()(graph_of("transformer")))
    for norm in ("norm", "layers.0.norm1", "layers.0.norm2", "layers.1.norm1"):
        assert found[norm] == {f"{norm}.weight", f"{norm}.bias"}
    assert members(units.layers()(graph_of("tied")))["norm"] == {"norm.weight", "norm.bias"}  # an activation lies between


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), (6, 5)),
        (nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), (6, 3, 5)),  # a view lies between
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)), (6, 3, 4, 4)),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4)), (6, 3, 4, 4)),
        (nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True)), (6, 3, 8)),  # parameters repeated per sample
    ],
    ids=["layer norm", "layer norm on tokens", "group norm", "batch norm", "instance norm"],
)
def test_every_kind_of_norm_joins_its_layer(model: nn.Module, shape: tuple[int, ...]) -> None:
    assert members(units.layers()(graph_for(model, *shape))) == {"0": {"0.weight", "0.bias", "1.weight", "1.bias"}}


def test_bare_parameters_are_layers_by_their_own_name() -> None:
    assert names(units.layers()(graph_of("functional"))) == ["scale", "v", "shift", "w"]
    assert members(units.layers()(graph_of("custom")))["w"] == {"w"}


def test_a_tied_weight_stands_where_it_is_needed_last() -> None:
    assert names(units.layers()(graph_of("tied"))) == ["norm", "mix", "embed"]


# ---------------------------------------------------------------- blocks


def test_repeated_blocks_are_found() -> None:
    found = members(units.blocks()(graph_of("branches")))
    assert list(found) == ["head", "side", "blocks.1", "blocks.0"]
    assert found["blocks.0"] == {name for name in graph_of("branches").params if name.startswith("blocks.0.")}
    assert names(units.blocks()(graph_of("transformer"))) == ["classifier", "norm", "layers.1", "layers.0", "position", "embed"]


def test_blocks_can_be_named() -> None:
    graph = graph_of("transformer")
    found = members(units.blocks("layers.*.attention")(graph))
    assert found["layers.0.attention"] == {name for name in graph.params if name.startswith("layers.0.attention.")}
    assert found["layers.0.up"] == {"layers.0.up.weight", "layers.0.up.bias"}
    outermost = names(units.blocks("layers.?", "layers.*.attention")(graph))
    assert outermost == ["classifier", "norm", "layers.1", "layers.0", "position", "embed"]


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no module matches 'encoder\.\*'"):
        units.blocks("encoder.*")(graph_of("transformer"))


def test_without_repetition_blocks_are_layers() -> None:
    for case in ("conv_net", "misordered", "functional", "checkpointed"):
        assert units.blocks()(graph_of(case)) == units.layers()(graph_of(case))


class Stages(nn.Module):
    """Blocks that are plain containers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.stages(x))


def test_repeated_containers_are_blocks_where_nothing_better_is() -> None:
    assert names(units.blocks()(graph_for(Stages(), 6, 5))) == ["stages.1", "stages.0"]


class Mlp(nn.Module):
    """A block with a first layer of its own kind, as T5's first blocks have; and perhaps experts."""

    def __init__(self, width: int, first: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.Sequential(nn.ReLU()), nn.Linear(2 * width, width)
        self.first = nn.Linear(width, width) if first else None
        self.experts = nn.ModuleList(Mlp(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.first is None else self.first(x)
        return self.down(self.act(self.up(x))) + sum(expert(x) for expert in self.experts)


class Stack(nn.Module):
    def __init__(self, width: int, layers: int, before: int = 0, first: bool = False) -> None:
        super().__init__()
        self.shrink = nn.Linear(before, width) if before else None
        self.layers = nn.ModuleList(Mlp(width, first and i == 0) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.shrink is None else self.shrink(x)
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(4, 2, first=True), Stack(4, 3, first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def test_the_layers_of_an_encoder_and_a_decoder_of_one_class_are_the_blocks() -> None:
    layers = ["decoder.layers.2", "decoder.layers.1", "decoder.layers.0", "encoder.layers.1", "encoder.layers.0"]
    assert names(units.blocks()(graph_for(EncoderDecoder(), 6, 4))) == layers


def test_stages_of_different_widths_are_no_blocks_but_hold_them() -> None:
    stages = nn.Sequential(Stack(8, 1), Stack(4, 2, 8), Stack(2, 2, 4))
    found = names(units.blocks()(graph_for(stages, 6, 8)))
    blocks = [f"{stage}.layers.{i}" for stage, count in ((2, 2), (1, 2), (0, 1)) for i in reversed(range(count))]
    assert [name for name in found if "layers" in name] == blocks
    assert set(found) - set(blocks) == {"1.shrink", "2.shrink"}


def test_a_block_with_experts_is_one_block() -> None:
    assert names(units.blocks()(graph_for(nn.Sequential(*(Mlp(4, experts=2) for _ in range(2))), 6, 4))) == ["1", "0"]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4, 4), 0.1) for _ in range(3))
        self.shifts = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.shifts["a"])
        return x + self.shifts["b"]


@pytest.mark.parametrize("kind", [units.layers, units.blocks])
def test_each_parameter_of_a_list_is_a_unit(kind: Any) -> None:
    graph = graph_for(Listed(), 6, 4)
    expected = {name: {name} for name in ("shifts.b", "weights.2", "weights.1", "weights.0", "shifts.a")}
    assert members(kind()(graph)) == expected
    assert set(graph.head) == {"shifts.b", "weights.2"}


class Around(nn.Module):
    """A block whose halves lie on both sides of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.middle = nn.ModuleDict({"down": nn.Linear(5, 3), "up": nn.Linear(3, 5)}), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer["up"](self.middle(self.outer["down"](x)))


def test_a_unit_stands_where_its_deepest_parameter_does() -> None:
    assert names(units.blocks("outer")(graph_for(Around(), 6, 5))) == ["middle", "outer"]


# ---------------------------------------------------------------- norms


def test_norms_are_scales_and_shifts_beside_the_head() -> None:
    assert set(names(units.norms()(graph_of("conv_net")))) == {
        "1.weight",
        "1.bias",
        "4.weight",
        "4.bias",
        "10.weight",
        "10.bias",
    }
    assert set(names(units.norms()(graph_of("tied")))) == {"norm.weight", "norm.bias"}  # its head is the norm
    assert set(names(units.norms()(graph_of("thrice")))) == {"out.weight", "out.bias"}
    assert all(len(unit.parts) == 1 for unit in units.norms()(graph_of("transformer")))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize("norm", [RMSNorm(), nn.RMSNorm(4)], ids=["written by hand", "of torch"])
def test_norms_are_known_by_class_where_the_operation_does_not_tell(norm: nn.Module) -> None:
    graph = graph_for(nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 4)), 6, 5)
    assert "1.weight" in names(units.norms()(graph))


# ---------------------------------------------------------------- channels


class Mobile(nn.Module):
    """Every kind of weight that has channels, and some that have none to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, bias=False)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 4, 1, groups=2)
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.head(self.grouped(self.norm(self.deep(self.stem(x)))).mean((2, 3)))


def test_channels_of_outputs_are_runs_with_their_piece_of_the_bias() -> None:
    found = units.channels("out", 4)(graph_for(Mobile(), 2, 1, 6, 6))
    assert names(found) == [
        *("head[out 0:4]", "head[out 4:5]", "grouped[out 0:4]"),
        *("deep[out 0:4]", "deep[out 4:6]", "stem[out 0:4]", "stem[out 4:6]"),
    ]
    assert found[1].parts == (Part("head.weight", 0, (4,)), Part("head.bias", 0, (4,)))
    assert found[-1].parts == (Part("stem.weight", 0, (4, 5)),)


def test_channels_of_inputs_are_along_outputs_where_a_group_has_one_input() -> None:
    found = {unit.name: unit.parts for unit in units.channels("in", 3)(graph_for(Mobile(), 2, 1, 6, 6))}
    assert found == {
        "head[in 0:3]": (Part("head.weight", 1, (0, 1, 2)),),
        "head[in 3:4]": (Part("head.weight", 1, (3,)),),
        "grouped[in 0:3]": (Part("grouped.weight", 1, (0, 1, 2)),),
        "deep[out 0:3]": (Part("deep.weight", 0, (0, 1, 2)), Part("deep.bias", 0, (0, 1, 2))),
        "deep[out 3:6]": (Part("deep.weight", 0, (3, 4, 5)), Part("deep.bias", 0, (3, 4, 5))),
        "stem[out 0:3]": (Part("stem.weight", 0, (0, 1, 2)),),
        "stem[out 3:6]": (Part("stem.weight", 0, (3, 4, 5)),),
    }


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("case", ["conv_net", "branches", "transformer", "misordered", "thrice", "unused"])
def test_channels_cover_each_weight_once_and_come_nearest_the_loss_first(case: str, axis: str) -> None:
    graph = graph_of(case)
    found = units.channels(axis, 2)(graph)  # type: ignore[arg-type]
    covered: dict[str, list[int]] = {}
    for unit in found:
        for part in unit.parts:
            assert part.dim is not None and part.index is not None
            assert len(part.index) <= 2
            covered.setdefault(part.param, []).extend(part.index)
    dims = {part.param: part.dim for unit in found for part in unit.parts}
    assert all(index == list(range(graph.shapes[param][dims[param] or 0])) for param, index in covered.items())
    assert {graph.modules[name.rpartition(".")[0]] for name in covered} <= {"Conv1d", "Conv2d", "Conv3d", "Linear"}
    assert len(set(names(found))) == len(found)
    order = graph.order()
    deepest = [max(order.get(param, len(graph.nodes)) for param in unit.params) for unit in found]
    assert deepest == sorted(deepest)


def test_channels_can_be_left_out() -> None:
    graph = graph_for(Mobile(), 2, 1, 6, 6)
    assert names(units.channels(group=8, exclude=["deep.*", "stem.*", "*.bias"])(graph)) == [
        "head[out 0:5]",
        "grouped[out 0:4]",
    ]
    assert all(len(unit.parts) == 1 for unit in units.channels(exclude="*.bias")(graph))
    with pytest.raises(ValueError, match="no convolution or linear layer is among the parameters"):
        units.channels(include=["norm.*", "scale"])(graph)


@pytest.mark.parametrize("axis", ["out", "in"])
def test_depthwise_convolutions_can_be_left_out(axis: Any) -> None:
    """Not so a first layer that sees one channel, nor a linear one."""
    graph = graph_for(nn.Sequential(Mobile(), nn.Linear(5, 1), nn.Linear(1, 3)), 2, 1, 6, 6)
    found = units.channels(axis, depthwise=False)(graph)
    assert {unit.name.split("[")[0] for unit in found} == {"0.stem", "0.grouped", "0.head", "1", "2"}
    with pytest.raises(ValueError, match="but depthwise ones"):
        units.channels(axis, include=["0.deep.*"], depthwise=False)(graph)


class Shared(nn.Module):
    """A linear layer whose weight is an embedding too."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.mix = nn.Linear(4, 9, bias=False), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(F.embedding(ids.long(), self.out.weight)))


def test_a_weight_that_is_used_otherwise_too_has_no_channels() -> None:
    assert names(units.channels()(graph_for(Shared(), 3))) == ["mix[out 0:4]"]


def test_channels_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="axis='both': choose 'out' or 'in'"):
        units.channels("both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group=0: a unit needs at least one channel"):
        units.channels(group=0)
