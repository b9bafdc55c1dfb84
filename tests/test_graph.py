"""The graph that is read against the backward pass that really runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, Case

from pliant.graph.backward import Graph, Node, read, walk
from pliant.runtime.sandbox import sandbox

every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
VECTORS = (torch.linspace(-1, 1, 30).reshape(6, 5), torch.tensor([0, 1, 2, 3, 0, 1]))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def graph_of(name: str) -> Graph:
    model, loss, batch = ZOO[name].make()
    with sandbox(model):
        return read(model, loss, batch)


def at(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


def all_nodes(value: torch.Tensor) -> list[Any]:
    """Every autograd node behind a value but gradient accumulation, in no order that means anything."""
    found, stack = {value.grad_fn: None}, [value.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in found and not hasattr(node, "variable"):
                found[node] = None
                stack.append(node)
    return sorted(found, key=lambda node: node.name())


def ran(value: torch.Tensor, inputs: list[torch.Tensor] | None = None) -> list[Any]:
    """The nodes of a real backward pass, as they ran; with `inputs`, of one that only those are asked of."""
    order: list[Any] = []
    handles = [node.register_prehook(lambda _, node=node: order.append(node)) for node in all_nodes(value)]
    torch.autograd.backward(value, inputs=inputs, retain_graph=True)
    for handle in handles:
        handle.remove()
    return order


# ---------------------------------------------------------------- every model of the zoo


@every_case
def test_head_unused_and_frozen(case: Case) -> None:
    model, loss, batch = case.make()
    graph = read(model, loss, batch)
    assert graph.head == case.head
    assert graph.unused == case.unused
    assert set(graph.params) == {name for name, _ in model.named_parameters()} - set(case.frozen)
    assert {param for node in graph.nodes for param in node.params} == set(graph.params) - set(case.unused)
    assert all(param.grad is None for param in model.parameters()), "reading runs no backward"


@every_case
def test_edges_point_away_from_the_loss_and_a_parameter_stands_where_it_is_needed_last(case: Case) -> None:
    graph = graph_of(case.name)
    nodes = graph.nodes
    assert all(later > i for i, node in enumerate(nodes) for later in node.data)
    waited_for = {later for node in nodes for later in node.data}
    assert waited_for == {i for i, node in enumerate(nodes) if i and not node.carrier}
    for param, i in graph.order().items():
        assert param in nodes[i].params
        assert not any(param in node.params and not node.carrier for node in nodes[i + 1 :])


@every_case
def test_nodes_stand_in_the_order_in_which_backward_ran(case: Case) -> None:
    model, loss, batch = case.make()
    value = loss(model, batch)
    order = ran(value)
    assert walk(value) == order
    ops = [node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward") for node in order]
    assert [node.op for node in graph_of(case.name).nodes] == ops


@every_case
def test_graph_tells_which_nodes_run_for_each_parameter(case: Case) -> None:
    """Edges and parameters together: ask autograd for one parameter and see what runs."""
    model, loss, batch = case.make()
    with sandbox(model):
        graph = read(model, loss, batch)
        value = loss(model, batch)
        live = walk(value)
        params = dict(model.named_parameters())
        for name in set(graph.params) - set(graph.unused):
            runs = [False] * len(live)
            for i, node in reversed(list(enumerate(graph.nodes))):
                runs[i] = name in node.params or any(runs[j] for j in node.data)
            assert [live[i] for i in range(len(live)) if runs[i]] == ran(value, [params[name]]), name


# ---------------------------------------------------------------- what is adversarial about each


def test_parameters_are_found_through_transposes_slices_casts_and_views() -> None:
    graph = graph_of("functional")
    layers = [(node.op, node.params) for node in graph.nodes if node.params and not node.carrier]
    assert layers == [("Mul", ("scale",)), ("Mm", ("v",)), ("Add", ("shift",)), ("Mm", ("w",))]
    carriers = [(node.op, node.params) for node in graph.nodes if node.carrier]
    assert sorted(carriers) == [("Slice", ("shift",)), ("T", ("w",)), ("T", ("w",)), ("ToCopy", ("v",)), ("View", ("v",))]
    assert not any(node.data for node in graph.nodes if node.carrier)


def test_activations_belong_to_the_module_that_ran_them() -> None:
    modules = {node.op: node.module for node in graph_of("conv_net").nodes}
    assert modules["Relu"] == "2" and modules["Hardtanh"] == "5" and modules["Mean"] == "7" and modules["View"] == "8"
    assert modules["Mul"] == "9"  # dropout
    assert modules["NllLoss"] == modules["LogSoftmax"] == ""
    assert [node.module for node in at(graph_of("branches"), "Relu")] == ["blocks.1", "blocks.0"]
    assert [node.module for node in at(graph_of("branches"), "Add")] == ["blocks.1", "blocks.0"]
    assert [node.module for node in at(graph_of("transformer"), "Gelu")] == ["layers.1", "layers.0"]
    attention = at(graph_of("transformer"), "ScaledDotProductFlashAttentionForCpu")
    assert [node.module for node in attention] == ["layers.1.attention", "layers.0.attention"]


def test_every_other_node_belongs_to_the_owner_of_its_parameters() -> None:
    for node in graph_of("transformer").nodes:
        if node.params:
            assert node.module == node.params[0].rpartition(".")[0]


def test_registration_order_does_not_matter() -> None:
    order = graph_of("misordered").order()
    assert order["a_last.weight"] < order["c_middle.weight"] < order["b_first.weight"]


def test_a_module_that_runs_three_times_has_three_nodes() -> None:
    graph = graph_of("thrice")
    inner = [node for node in at(graph, "Addmm") if node.module == "inner"]
    assert [node.params for node in inner] == [("inner.bias", "inner.weight")] * 3
    assert graph.order()["inner.weight"] == graph.nodes.index(inner[-1])


def test_a_tied_weight_stands_at_both_of_its_nodes() -> None:
    graph = graph_of("tied")
    uses = [node.op for node in graph.nodes if "embed.weight" in node.params and not node.carrier]
    assert uses == ["Mm", "Embedding"]
    assert "out.weight" not in graph.params
    assert graph.nodes[graph.order()["embed.weight"]].op == "Embedding"


def test_branches_meet_again() -> None:
    graph = graph_of("branches")
    joined = [i for i, node in enumerate(graph.nodes) if node.op == "Relu"][1]  # the first block's output
    readers = [node.params for node in graph.nodes if joined in node.data]
    assert sorted(params[0] for params in readers) == ["blocks.1.conv.weight", "blocks.1.shortcut.weight", "side.weight"]
    (cat,) = at(graph, "Cat")
    assert len(cat.data) == 2


def test_a_users_autograd_function_is_a_node_like_any_other() -> None:
    (double,) = at(graph_of("custom"), "Double")
    assert double.params == ("w",)
    assert len(double.data) == 1
    assert (double.macs, double.outputs) == (6 * 6 * 6, 6 * 6)


def test_checkpointed_parts_are_read_like_the_rest() -> None:
    graph = graph_of("checkpointed")
    assert [node.params for node in at(graph, "Addmm")] == [(f"{m}.bias", f"{m}.weight") for m in ("head", "middle", "stem")]
    (gelu,), middle = at(graph, "Gelu"), at(graph, "Addmm")[1]
    assert [save[1:] for save in gelu.saves] == [(6 * 6 * 4, None)], "the input of the region; the rest is recomputed"
    assert {save[:2] for save in middle.saves} == {save[:2] for save in gelu.saves}, "which each of its nodes holds on to"
    assert [save[2] for save in middle.saves] == [2, 1], "for the weight and the input, not for the bias"
    (again,) = graph.again
    assert graph.nodes[again.node] is gelu and gelu.recomputes
    assert [[size for _, size, _ in again.saves[graph.nodes.index(node)]] for node in (gelu, middle)] == [[6 * 6 * 4], [0, 0]]
    assert max(again.inference) == 6 * 6 * 4, "the middle's output; PyTorch stops before it computes gelu's"


class Beside(nn.Module):
    """A checkpoint whose last operation saves its output, and a tensor that is read right after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side, self.middle, self.head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, x = self.side(x), self.stem(x)
        return self.head(checkpoint(lambda t: self.middle(t).exp(), x, use_reentrant=False) + side)


def test_a_checkpoint_saves_its_own_inputs_alone() -> None:
    torch.manual_seed(0)
    graph = read(Beside(), lambda model, batch: model(batch).mean(), torch.randn(6, 6))
    (exp,), by_param = at(graph, "Exp"), {node.params[-1]: node for node in at(graph, "Addmm")}
    assert [save[1] for save in exp.saves] == [6 * 6 * 4]
    assert not by_param["stem.weight"].saves and not by_param["side.weight"].saves, "which read the batch alone"
    assert {save[0] for save in by_param["middle.weight"].saves} == {save[0] for save in exp.saves}


def test_frozen_parts_make_no_node_but_their_work_is_known() -> None:
    graph = graph_of("two_inputs")
    assert [node.module for node in at(graph, "Addmm")] == ["join", "right"]
    assert graph.forward_macs == 6 * (5 * 4 + 3 * 4 + 8 * 2)


def test_modules_are_named_with_their_class() -> None:
    modules = graph_of("branches").modules
    assert modules["blocks.0"] == "Block" and modules["side"] == "Conv2d" and modules[""] == "Branches"


class Scaled(nn.Linear):
    """A frozen layer whose only trainable parameter, a factor, is in a ParameterDict: as adapters of peft are."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.requires_grad_(False)
        self.scales = nn.ParameterDict({"default": torch.ones(5)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales["default"]


def test_the_head_ends_at_a_parameter_in_a_list_of_a_module() -> None:
    model = nn.Sequential(Scaled(), Scaled(), Scaled())
    assert read(model, lambda model, x: model(x).sum(), VECTORS[0]).head == ("2.scales.default",)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.data())
def test_order_on_random_graphs(data: st.DataObject) -> None:
    """Layers that each read a random choice of what came before: joins, forks, dead ends, a weight used again."""
    depth = data.draw(st.integers(1, 7))
    sources = [data.draw(st.sets(st.integers(0, i), min_size=1, max_size=3)) for i in range(depth)]
    which = [data.draw(st.integers(0, 2)) for _ in range(depth)]
    weights = nn.ParameterList(torch.eye(5) for _ in range(3))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for i in range(depth):
            made.append(torch.tanh(sum(made[s] for s in sorted(sources[i])) @ weights[which[i]]))
        return made[-1].sum()

    value = loss(weights, VECTORS[0])
    assert walk(value) == ran(value)
    graph = read(weights, loss, VECTORS[0])
    assert [node.op for node in graph.nodes] == [n.name().rstrip("0123456789").removesuffix("Backward") for n in walk(value)]


# ---------------------------------------------------------------- batches and losses


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (VECTORS[0], lambda model, b: model(b).square().mean()),
        ({"x": VECTORS[0]}, lambda model, b: model(b["x"]).square().mean()),
        (SimpleNamespace(x=VECTORS[0]), lambda model, b: model(b.x).square().mean()),
        (None, lambda model, b: model(VECTORS[0]).square().mean()),
    ],
    ids=["tensor", "dict", "object", "nothing"],
)
def test_a_batch_is_whatever_the_loss_takes(batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
    assert read(nn.Linear(5, 4), loss, batch).head == ("bias", "weight")


def test_a_loss_with_one_element_counts_as_a_scalar() -> None:
    assert read(nn.Linear(5, 1), lambda model, b: model(b[0]).mean(dim=0), VECTORS).nodes[0].op == "Mean"


def test_errors_say_what_is_wrong_and_what_was_given() -> None:
    model = nn.Linear(5, 4)
    with pytest.raises(ValueError, match=r"scalar tensor; it returned a tensor of shape \(6, 4\)"):
        read(model, lambda m, b: m(b[0]), VECTORS)
    with pytest.raises(ValueError, match="scalar tensor; it returned float"):
        read(model, lambda m, b: 1.0, VECTORS)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="no gradient can flow from the loss"):
        read(model, lambda m, b: m(b[0]).sum().detach(), VECTORS)
    with pytest.raises(ValueError, match="the batch is empty"):
        read(model, classify, (VECTORS[0][:0], VECTORS[1][:0]))
    with pytest.raises(ValueError, match="no trainable parameter"):
        read(nn.Linear(5, 4).requires_grad_(False), classify, VECTORS)
    with pytest.raises(ValueError, match="no trainable parameter"):
        read(nn.ReLU(), classify, VECTORS)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.middle, self.stem(x), use_reentrant=True))


def test_a_reentrant_checkpoint_does_not_hide_its_parameters() -> None:
    try:
        graph = read(Reentrant(), classify, VECTORS)
    except ValueError as error:
        assert "use_reentrant=False" in str(error)
    else:
        assert not graph.unused


# ---------------------------------------------------------------- leaves nothing behind


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Watched(nn.Module):
    """Remembers, weakly, every activation that it makes."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.fail = fail
        self.made: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x) * 2
            self.made.append(StorageWeakRef(x.untyped_storage()))
        if self.fail:
            raise RuntimeError("midway")
        return self.linear(x)


def test_reading_keeps_nothing_alive() -> None:
    model = Watched()
    gc.collect()
    gc.disable()  # activations must not wait for a collector
    try:
        graph = read(model, classify, VECTORS)
        assert len(model.made) == 3 and all(memory.expired() for memory in model.made)
    finally:
        gc.enable()
    assert hooks_on(model) == 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and graph.nodes


def test_reading_removes_its_hooks_when_the_loss_raises() -> None:
    model = Watched(fail=True)
    with pytest.raises(RuntimeError, match="midway"):
        read(model, classify, VECTORS)
    assert hooks_on(model) == 0
    x = torch.ones(1, requires_grad=True)
    assert x.pow(3).grad_fn._saved_self is x  # a saved-tensor hook left behind would give another tensor


def test_reading_twice_gives_the_same_graph() -> None:
    def plain(graph: Graph) -> list[Any]:
        return [(n.op, n.module, n.inputs, n.macs, n.outputs, [save[1:] for save in n.saves]) for n in graph.nodes]

    assert all(plain(graph_of(name)) == plain(graph_of(name)) for name in ZOO)


def test_a_users_own_hooks_still_run() -> None:
    model, seen = nn.Linear(5, 4), []
    model.register_forward_hook(lambda *_: seen.append("after"))
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    read(model, classify, VECTORS)
    assert seen == ["before", "after"]
    assert hooks_on(model) == 2


def test_a_product_with_a_number_has_one_input() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.mul.Scalar(self.layer(x), 0.5)

    graph = read(Scaled(), lambda model, x: model(x).sum(), torch.randn(4, 3))
    assert [node.op for node in graph.nodes if node.op == "Mul"] == ["Mul"]


class TiedHead(nn.Module):
    """`kind` says what ends the model: the embedding again, with or without a bias of its own; or a layer used once more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.body, self.last = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift, self.scale = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.body(self.embed(ids)))
        if self.kind == "twice":  # nothing but itself lies between its two uses
            return self.last(torch.tanh(self.last(x))) * self.scale
        if self.kind == "side":  # two outputs, neither behind the other
            return self.last(x) + self.last(torch.tanh(self.body(x)))
        x = F.linear(x if self.kind == "all" else torch.tanh(self.last(x)), self.embed.weight)
        return x + self.shift if self.kind == "bias" else x


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("plain", {"last.weight", "last.bias"}),
        ("bias", {"shift", "last.weight", "last.bias"}),
        ("twice", {"scale", "last.weight", "last.bias"}),
        ("side", {"last.weight", "last.bias"}),
        ("all", {"body.weight", "body.bias"}),
    ],
)
def test_a_tied_output_is_no_head(kind: str, head: set[str]) -> None:
    graph = read(TiedHead(kind), lambda model, ids: model(ids).square().mean(), torch.tensor([[1, 2, 3]]))
    assert set(graph.head) == head


def test_where_every_layer_is_used_again_there_is_no_head() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = self.b(torch.tanh(self.a(x)))
            return x

    assert read(Loop(), lambda model, x: model(x).square().mean(), torch.ones(2, 4)).head == ()
