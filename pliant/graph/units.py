"""Graph → units: what can be chosen. Each factory returns a function of a graph; units nearest the loss come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Literal

from pliant.core.types import Part, Unit, match
from pliant.graph.backward import Graph, layer_of, owner

Units = Callable[[Graph], tuple[Unit, ...]]
Globs = str | Iterable[str]

# Layers that can compute the gradient of a slice alone: their module classes, and their operations in the backward graph.
_SLICED_KINDS = frozenset(("Conv1d", "Conv2d", "Conv3d", "Linear"))
_SLICED_OPS = frozenset(("Convolution", "Addmm", "Mm", "Linear", "Add"))


def tensors(include: Globs = "*", exclude: Globs = ()) -> Units:
    """Every parameter is a unit. `include` and `exclude` are globs over parameter names, here and below."""

    def of(graph: Graph) -> tuple[Unit, ...]:
        return tuple(Unit(param, (Part(param),)) for param in _params(graph, include, exclude))

    return of


def layers(include: Globs = "*", exclude: Globs = ()) -> Units:
    """All parameters of one module are a unit, together with the norm that directly follows it.

    A norm that does not directly follow a layer (before a transformer block, for example) is a unit of its own. So is each
    parameter of a ParameterList or ParameterDict.
    """

    def of(graph: Graph) -> tuple[Unit, ...]:
        return _grouped(_params(graph, include, exclude), _layers(graph))

    return of


def blocks(*named: str, include: Globs = "*", exclude: Globs = ()) -> Units:
    """The repeated blocks of a model, or the modules whose names match `named`. Everything else is split by layer.

    A repeated block is the outermost module with submodules whose class occurs at least twice. A stack of blocks (an encoder, a
    decoder, a stage) is not a block. A module is a stack if it holds a ModuleList or Sequential with two modules of one class
    and the same shapes.
    """

    def of(graph: Graph) -> tuple[Unit, ...]:
        if named:
            modules = [name for name in graph.modules if name]
            roots = {modules[i] for i in match(modules, named, "module")}
        else:
            roots = _repeated(graph)
        layer = _layers(graph)

        def group(param: str) -> str:
            inside = [name for name in _ancestors(owner(param)) if name in roots]
            return inside[-1] if inside else layer(param)

        return _grouped(_params(graph, include, exclude), group)

    return of


def norms() -> Units:
    """Weight and bias of every norm, and the parameters of the head. Each tensor is a unit."""

    def of(graph: Graph) -> tuple[Unit, ...]:
        mine = {
            param
            for node in graph.nodes
            for param in node.params
            if _is_norm(node.op, graph.modules.get(owner(param), "")) and not node.carrier
        }
        return tuple(unit for unit in tensors()(graph) if unit.name in mine or unit.name in graph.head)

    return of


def channels(
    axis: Literal["out", "in"] = "out",
    group: int = 8,
    include: Globs = "*",
    exclude: Globs = (),
    *,
    depthwise: bool = True,
) -> Units:
    """Groups of neighbouring channels of every convolution and linear layer, along its outputs ("out") or inputs ("in").

    - With "out" a unit includes its part of the bias. With "in" biases are in no unit.
    - In a grouped convolution, "in" takes the same channels of each group.
    - Depthwise convolutions are always sliced along their outputs. `depthwise=False` leaves them out.
    - A module with a matrix `weight` of inputs × outputs counts as linear, such as `Conv1D` of transformers.
    - Everything else is in no unit: norms, embeddings, layers that the loss does not reach.
    """
    if axis not in ("out", "in"):
        raise ValueError(f"axis={axis!r}: choose 'out' or 'in'.")
    if group < 1:
        raise ValueError(f"group={group}: a unit needs at least one channel.")

    def of(graph: Graph) -> tuple[Unit, ...]:
        params = _params(graph, include, exclude)
        found: list[Unit] = []
        elsewhere = set(graph.unused) | {
            p for node in graph.nodes if not node.carrier and node.op not in _SLICED_OPS for p in node.params
        }
        mine = {p for p in params if graph.modules.get(owner(p)) in _SLICED_KINDS and p not in elsewhere}
        transposed = set(graph.transposed()) - mine  # stored as (inputs, outputs)
        mine |= (transposed | _added(graph)) & set(params)
        for param in params:
            layer, _, kind = param.rpartition(".")
            if param not in mine or kind != "weight":
                continue
            shape, bias, is_transposed = graph.shapes[param], f"{layer}.bias", param in transposed
            if not depthwise and not is_transposed and _is_depthwise(graph, param):
                continue
            way = "in" if axis == "in" and (is_transposed or shape[1] > 1) else "out"
            dim = int((way == "in") != is_transposed)
            for start in range(0, shape[dim], group):
                index = tuple(range(start, min(start + group, shape[dim])))
                parts = [Part(param, dim, index)]
                if way == "out" and bias in mine and graph.shapes[bias] == (shape[dim],):
                    parts.append(Part(bias, 0, index))
                found.append(Unit(f"{layer}[{way} {start}:{index[-1] + 1}]", tuple(parts)))
        if not found:
            kind = "" if depthwise else " but depthwise ones"
            raise ValueError(
                f"nothing is left to choose from: no convolution or linear layer{kind} is among the parameters, or something "
                f"else uses their weights too, such as a penalty in the loss. Use units.layers()."
            )
        return tuple(found)

    return of


def _added(graph: Graph) -> set[str]:
    """Biases that matrix products add, and nothing else uses."""
    added = {node.inputs[0] for node in graph.nodes if node.op == "Addmm" and isinstance(node.inputs[0], str)}
    others = {p for node in graph.nodes for i, p in enumerate(node.inputs) if not node.carrier and (node.op != "Addmm" or i)}
    return {name for name in added if isinstance(name, str) and name not in others}


def _is_depthwise(graph: Graph, weight: str) -> bool:
    """Whether each filter of a convolution reads one channel of the layer before it."""
    shape, is_fed = graph.shapes[weight], any(weight in node.params and node.data for node in graph.nodes)
    return graph.modules[owner(weight)].startswith("Conv") and shape[0] > shape[1] == 1 and is_fed


def _params(graph: Graph, include: Globs, exclude: Globs) -> list[str]:
    """The parameters that the globs select, nearest the loss first; those that the loss does not reach come last."""
    order = graph.order()
    names = sorted(graph.params, key=lambda name: order.get(name, len(graph.nodes)))
    kept = match(names, [include] if isinstance(include, str) else include, "parameter")
    dropped = set(match(names, [exclude] if isinstance(exclude, str) else exclude, "parameter"))
    out = [names[i] for i in kept if i not in dropped]
    if not out:
        raise ValueError(
            f"nothing is left to choose from: include={include!r} and exclude={exclude!r} leave no parameter. Exclude less."
        )
    return out


def _grouped(params: Iterable[str], group: Callable[[str], str]) -> tuple[Unit, ...]:
    """Units by the name of their group, ordered by the parameter of each that is furthest from the loss."""
    found: dict[str, list[str]] = {}
    for param in params:
        name = group(param)
        found[name] = [*found.pop(name, []), param]
    return tuple(Unit(name, tuple(Part(param) for param in members)) for name, members in found.items())


def _layers(graph: Graph) -> Callable[[str], str]:
    """Parameter → the layer that it belongs to; a norm belongs to the layer that it directly follows."""
    leads = _norm_leads(graph)

    def layer(param: str) -> str:
        own = layer_of(param, graph.modules)
        return leads.get(own, own)

    return layer


def _norm_leads(graph: Graph) -> dict[str, str]:
    """For each norm that directly follows a layer, that layer."""
    leads = {}
    for node in graph.nodes:
        if not node.params or node.carrier or not _is_norm(node.op, graph.modules.get(node.module, "")):
            continue
        at = node.data
        while len(at) == 1 and graph.nodes[at[0]].op in ("View", "Transpose", "Permute", "UnsafeView", "Clone", "ToCopy"):
            at = graph.nodes[at[0]].data
        if len(at) == 1:
            before = graph.nodes[at[0]]
            if before.params and before.macs:
                leads[layer_of(node.params[0], graph.modules)] = layer_of(before.params[0], graph.modules)
    return leads


def _is_norm(op: str, kind: str) -> bool:
    return "Norm" in op or "Norm" in kind


def _ancestors(module: str) -> list[str]:
    """A module and the modules that contain it, innermost first."""
    out = []
    while module:
        out.append(module)
        module = module.rpartition(".")[0]
    return out


def _repeated(graph: Graph) -> set[str]:
    """The outermost modules with submodules and parameters whose class occurs more than once, stacks of blocks left out."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # of each module that holds parameters, by their names within it
    for param in graph.params:
        for name in _ancestors(owner(param)):
            shapes.setdefault(name, {})[param.removeprefix(name)] = graph.shapes[param]
    parents = {owner(name) for name in graph.modules if name}
    built = [name for name in graph.modules if name and name in parents and name in shapes]
    named = [name for name in built if graph.modules[name] not in ("Sequential", "ModuleList", "ModuleDict")]
    alike = _alike(named, graph.modules, shapes)
    blocks = {graph.modules[name] for name in alike}
    stacks = {graph.modules[name] for one in alike for name in _ancestors(one)[1:]} - blocks
    kinds = Counter(graph.modules[name] for name in named)
    repeated = {name for name in named if kinds[graph.modules[name]] > 1 and graph.modules[name] not in stacks}
    if not repeated:  # plain containers side by side
        siblings = Counter((owner(name), graph.modules[name]) for name in built)
        repeated = {name for name in built if siblings[owner(name), graph.modules[name]] > 1}
    return {name for name in repeated if not any(outer in repeated for outer in _ancestors(name)[1:])}


def _alike(named: Iterable[str], modules: Mapping[str, str], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> set[str]:
    """The modules that have a neighbour of their class in a numbered list with the same shapes where both have a parameter."""
    lists: dict[tuple[str, str], list[str]] = {}
    for name in named:
        if name.rpartition(".")[2].isdigit():
            lists.setdefault((owner(name), modules[name]), []).append(name)
    found: set[str] = set()
    for members in lists.values():
        for one, other in pairwise(members):
            both = shapes[one].keys() & shapes[other].keys()
            if both and all(shapes[one][param] == shapes[other][param] for param in both):
                found |= {one, other}
    return found
