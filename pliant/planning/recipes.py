"""Published methods, baselines and our own, one function each. A method is five choices and a budget (`Policy`).

| | units | signal | cost | solver | when |
|---|---|---|---|---|---|
| `pliant` | layers | update gain | measured | coverage | after the head, then on drift |
| `elastic_trainer` | tensors | update gain | measured seconds | knapsack | every k epochs or steps |
| `elastic_layers` | layers | update gain | measured seconds | knapsack | every k epochs or steps |
| `green_trainer` | tensors | update gain | MACs | knapsack | every k epochs or steps |
| `tinytrain` | channels | Fisher potential | bytes, backward MACs | layers by their score, then channels; or exact | once |
| `freeze_out` | layers | – | MACs (no budget: nothing needs timing) | layers leave, from the input on | every 0.01 of the run |
| `lisa` | blocks | – | as above | a few at random, both ends always | every k steps |
| `badam` | blocks | – | as above | one after another | every k steps |
| `tent` | norms | – | as above | all | once |
| `gala` | tensors | alignment | as above | the best aligned | every step |
| `last` `random` | layers | – | measured seconds | inside the budget | once, or every k steps |
| `full` `head` `bias` `norm` `only` | tensors | – | as above | fixed | once |
"""

from __future__ import annotations

from typing import Literal

from pliant import signals as score
from pliant.core import schedule
from pliant.core.budget import Budget, Limit
from pliant.core.schedule import Schedule
from pliant.core.types import Unit
from pliant.cost.measure import backward, counted, modelled, timed
from pliant.cost.peaks import Peaks
from pliant.graph import units
from pliant.graph.backward import Graph
from pliant.planning import solve
from pliant.planning.policy import Policy


def pliant(
    time: Limit = None,
    memory: Limit = None,
    macs: Limit = None,
    energy: Limit = None,
    *,
    when: Schedule | None = None,
    head_first: float = 0.1,
    seed: int = 0,
) -> Policy:
    """Our own, and the default: the layers that lower the loss most, inside all limits at once.

    The head trains alone for the share `head_first` of the run, and longer while its loss halves, or is above where it began
    or that of a guess. Then layers are chosen. With `head_first=0` they are chosen before the first step. They are chosen again
    when their values have changed, or as `when` says.
    """
    return Policy(
        units.layers(),
        score.update_gain(),
        timed,
        solve.coverage(power=0.5),
        when or schedule.on_drift(0.3, at_least=1000, at_most=5000),
        Budget(time=time, memory=memory, macs=macs, energy=energy),
        seed=seed,
        name="pliant",
        head_first=head_first,
    )


def elastic_trainer(time: Limit = 0.5, *, when: Schedule | None = None, seed: int = 0) -> Policy:
    """Any tensor may enter or leave, by its update gain on one batch. ElasticTrainer, MobiSys 2023, arXiv 2312.14227.

    All batch norms use running statistics, as in the paper's own code, while their weights and biases may train. That needs a
    low learning rate (the paper's is 1e-4), or `clip=`.
    """
    gain = score.update_gain()
    when = when or schedule.every(epochs=3)
    name, budget = "elastic_trainer", Budget(time=time)
    return Policy(units.tensors(), gain, timed, solve.knapsack(), when, budget, seed=seed, name=name, norm="frozen")


def elastic_layers(time: Limit = 0.5, *, when: Schedule | None = None, peaks: Peaks | None = None, seed: int = 0) -> Policy:
    """ElasticTrainer with whole layers, by their measured time on this device. IEEE Access 2025, 10.1109/ACCESS.2025.3591772.

    With `peaks`, times are computed for another device: from its FLOP/s, or from its bandwidth if that limits a layer.
    """
    gain = score.update_gain()
    when = when or schedule.every(epochs=3)
    cost = timed if peaks is None else modelled(peaks)
    return Policy(units.layers(), gain, cost, solve.knapsack(), when, Budget(time=time), seed=seed, name="elastic_layers")


def green_trainer(macs: Limit = 0.5, *, when: Schedule | None = None, seed: int = 0) -> Policy:
    """ElasticTrainer with MACs instead of seconds, for language models. GreenTrainer, ICLR 2024, arXiv 2309.13192."""
    gain = score.update_gain()
    when = when or schedule.every(epochs=1)
    return Policy(units.tensors(), gain, counted, solve.knapsack(), when, Budget(macs=macs), seed=seed, name="green_trainer")


def tinytrain(
    memory: Limit = "1MB",
    macs: Limit = 0.15,
    *,
    axis: Literal["out", "in"] = "out",
    exact: bool = False,
    head: bool = False,
    when: Schedule | None = None,
    seed: int = 0,
) -> Policy:
    """The best layers by Fisher information for their size, and of those the best channels. TinyTrain, arXiv 2307.09988.

    `macs` is a share of a full backward pass. Layers are ranked by the paper's score, which knows the size of a layer but not
    the cost of reaching it. With `exact`, channels of any layer are chosen under their true costs; those of depthwise layers
    are left out, because they would count what the layer before them counts already. `axis` says whether output or input
    channels are chosen. `head` always trains the module nearest the loss: use it for a model with a new classifier.
    """
    solver = solve.milp(gap=1e-3) if exact else solve.within_layers(solve.greedy(by="score"))
    when = when or schedule.once()
    budget = Budget(memory=memory, macs=macs)
    name = "tinytrain_exact" if exact else "tinytrain"
    choice = units.channels(axis, depthwise=not exact)
    return Policy(choice, score.fisher(), backward, solver, when, budget, head=head, seed=seed, name=name)


def freeze_out(start: float = 0.8, *, cubed: bool = True, when: Schedule | None = None) -> Policy:
    """Layers freeze for good, one after another from the input on; the head trains to the end. FreezeOut, arXiv 1706.04983.

    Of L layers below the head, layer i (from 0) freezes when t_i = start + (1 − start)·i/L of the run is done; with `cubed`,
    when t_i³ is. `when` says how often this is checked. Needs `total_steps` or `fit`. Learning rates are not changed: in the
    paper, that of each layer falls to zero by t_i.
    """
    solver, when = solve.freeze(start, cubed), when or schedule.every(share=0.01)
    return Policy(units.layers(), score.nearness(), counted, solver, when, state="drop", name="freeze_out")


def lisa(layers: int = 2, steps: int = 20, *, seed: int = 0) -> Policy:
    """Embedding and head always, and a few random blocks between them, re-drawn every `steps` steps. LISA, arXiv 2403.17919.

    The embedding is the unit furthest from the loss. Name other parts that must never freeze:
    `replace(lisa(), always=("model.norm",))`. A model with fewer than `layers` blocks in between trains all of them.
    """
    solver, when = solve.with_ends(solve.sample(layers)), schedule.every(steps=steps)
    return Policy(units.blocks(), score.nearness(), counted, solver, when, state="drop", seed=seed, name="lisa")


def badam(
    steps: int = 50,
    order: Literal["descending", "ascending", "random"] = "descending",
    *,
    head: bool = False,
    seed: int = 0,
) -> Policy:
    """One block at a time, for `steps` steps; its optimizer state is dropped afterwards. BAdam, arXiv 2404.02827.

    The `order` goes from the loss to the input ("descending"), from the input to the loss ("ascending"), or is "random" and new
    in each cycle. The head is a block like any other; with `head` it always trains.
    """
    solver, when = solve.cycle(order=order), schedule.every(steps=steps)
    return Policy(units.blocks(), score.nearness(), counted, solver, when, head=head, state="drop", seed=seed, name="badam")


def only(*globs: str) -> Policy:
    """Exactly the parameters whose names match ("layer4.*", "*.bias"), in the whole run."""
    if not globs or not all(isinstance(one, str) for one in globs):
        given = ", ".join(map(repr, globs))
        raise ValueError(f"only({given}): name the parameters to train by patterns, like only('head.*', '*.bias').")
    return Policy(units.tensors(), score.nearness(), counted, solve.fixed(*globs), head=False, name=f"only({', '.join(globs)})")


def full() -> Policy:
    """Everything: plain training, bit for bit."""
    return Policy(units.tensors(), score.nearness(), counted, solve.fixed("*"), name="full")


def head() -> Policy:
    """The module nearest the loss, and nothing else.

    If the output matrix is also the embedding (tied weights), the head is the module before it. To train the matrix too, name
    it: `only("*embed*")`.
    """
    return Policy(units.tensors(), score.nearness(), counted, solve.fixed(), name="head")


def bias() -> Policy:
    """Every bias, also of norms, and the head. BitFit, arXiv 2106.10199. A model without biases is refused."""

    def biases(problem: solve.Problem) -> solve.Mask:
        if not any(name.endswith("bias") for name in problem.names):
            raise ValueError(
                f"this model has no bias: the names of its {len(problem.names)} parameters do not end in 'bias', and only the "
                f"head would train. Use recipes.norm() for the weights of its norms, or recipes.head()."
            )
        return solve.fixed("*bias")(problem)

    return Policy(units.tensors(), score.nearness(), counted, biases, name="bias")


def norm() -> Policy:
    """Weight and bias of every norm, and the head."""
    return Policy(units.norms(), score.nearness(), counted, solve.fixed("*"), name="norm")


def tent() -> Policy:
    """Weight and bias of every norm, with batch statistics, without the head: for data without labels. TENT, arXiv 2006.10726.

    Use it with `losses.entropy`. A model without norms is refused.
    """

    def norms(graph: Graph) -> tuple[Unit, ...]:
        found = tuple(unit for unit in units.norms()(graph) if unit.name not in graph.head)
        if not found:
            raise ValueError("this model has no norm with weight and bias: tent() has nothing to train. Use gala() or full().")
        return found

    return Policy(norms, score.nearness(), counted, solve.fixed("*"), head=False, norm="as-is", name="tent")


def gala(window: int = 20) -> Policy:
    """For every batch, the tensor whose step is best aligned with its total change so far. GALA, arXiv 2404.03784.

    Every `window` steps that change is counted from zero again, and all tensors are trained. For losses without labels. Norms
    use batch statistics, as the modules' modes say. Each step scores all tensors first, so it takes as long as two full ones.
    """

    def best(problem: solve.Problem) -> solve.Mask:
        if not problem.values.any():  # nothing has moved yet
            return problem.reached
        reached = [i for i in range(len(problem.names)) if problem.reached[i]]
        return solve.fixed(problem.names[max(reached, key=lambda i: problem.values[i])])(problem)

    signal, when = score.alignment(window), schedule.every(steps=1)
    return Policy(units.tensors(), signal, counted, best, when, head=False, norm="as-is", name="gala")


def last(time: Limit = 0.5) -> Policy:
    """The last layers that fit into the budget: the baseline that other methods must beat."""
    solver = solve.greedy(by="order", stop=True)
    return Policy(units.layers(), score.nearness(), timed, solver, budget=Budget(time=time), name="last")


def random(time: Limit = 0.5, *, when: Schedule | None = None, seed: int = 0) -> Policy:
    """Random layers inside the budget, re-drawn each round: the other baseline."""
    when = when or schedule.every(steps=100)
    return Policy(units.layers(), score.random(), timed, solve.sample(), when, Budget(time=time), seed=seed, name="random")
