"""What lies before the first chosen parameter runs as inference, or not at all: every step is still plain freezing's."""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pliant.core.types import Part
from pliant.engine.derived_weights import AllDerived, Derived
from pliant.engine.lean import frozen_batchnorm
from pliant.engine.lean.frozen_batchnorm import fused_norm
from pliant.engine.lean.lean import Lean
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.prefix import Prefix
from pliant.engine.prefix.prefix_plan import _folded, _laid_out, _without_tensors
from pliant.engine.slices.slices import Slices
from pliant.runtime.batches import map_tensors

Loss = Callable[[nn.Module, Any], torch.Tensor]
SAMPLES, SIZE = 6, 12  # of a batch; batches of an epoch are drawn from twice as many


def conv_norm(inputs: int, outputs: int, groups: int = 1, bias: bool = False) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=bias), norm, nn.ReLU6(inplace=True))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 8)
        self.one, self.two, self.three = conv_norm(8, 8, groups=8), conv_norm(8, 8, bias=True), conv_norm(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.one(x)
        x = x + self.two(x)
        x = self.three(x)
        return self.head(x.mean((2, 3)))


class Parallel(nn.Module):
    """A frozen branch beside a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.after = conv_norm(3, 8), conv_norm(8, 8), conv_norm(8, 8), conv_norm(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.after(self.left(x) * self.right(x)).flatten(2).mean(2))


class Text(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))
        self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        x = self.second(self.first(x))
        return self.head(x.mean(1) if mask is None else (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


class Shared(nn.Module):
    """Functional, the same weight used thrice, and changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(6, 6) / 2), nn.Parameter(torch.randn(4, 6))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)[:, :6] @ self.w
        x += self.shift
        x = torch.relu_(x)
        x = F.linear(x, self.w.t()).mul_(0.5)
        x[:, 0] = x[:, 1] + 1
        return F.linear(F.linear(x, self.w), self.v)


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def twice_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + F.mse_loss(model(x * 0.5), model(x.flip(3)))


def text_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])


def images(count: int) -> Any:
    return torch.randn(count, 3, 8, 8).double(), torch.randint(0, 4, (count,))


def texts(count: int) -> Any:
    return {
        "ids": torch.randint(0, 11, (count, 5)),
        "mask": (torch.arange(5) <= torch.randint(1, 5, (count, 1))).double(),
        "labels": torch.randint(0, 4, (count,)),
    }


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    chosen: tuple[str, ...]  # how the names of chosen parameters begin
    loss: Loss = image_loss
    data: Callable[[int], Any] = images


CASES = [
    Case("residual", Residual, ("three", "head")),
    Case("residual_head", Residual, ("head",)),
    Case("middle", Residual, ("one.0",)),
    Case("parallel", Parallel, ("left", "head")),
    Case("parallel_late", Parallel, ("after", "head")),
    Case("twice", Residual, ("three", "head"), twice_loss),
    Case("text", Text, ("second", "head"), text_loss, texts),
    Case("shared", Shared, ("v",)),
]


def rows(data: Any, at: Sequence[int]) -> Any:
    take = list(at)
    return {k: v[take] for k, v in data.items()} if isinstance(data, dict) else tuple(v[take] for v in data)


def choose_(model: nn.Module, chosen: Sequence[str]) -> None:
    """Plain freezing, norms that are not chosen on their running statistics."""
    model.train()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(tuple(chosen)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()


class Trainer:
    """SGD steps of one model, run plainly or by a prefix."""

    def __init__(self, case: Case, model: nn.Module, prefix: Prefix | None = None) -> None:
        self.case, self.model, self.prefix = case, model, prefix
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(self, batch: Any, ids: Sequence[int] | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()

        def forward() -> torch.Tensor:
            return self.case.loss(self.model, batch)

        value = forward() if self.prefix is None else self.prefix.run(forward, batch, ids)
        value.backward()
        self.optimizer.step()
        return value.detach()


def pair(case: Case, features: Features | None = None, dtype: torch.dtype = torch.double) -> tuple[Trainer, Trainer, Any]:
    torch.manual_seed(0)
    model = case.build().to(dtype)
    choose_(model, case.chosen)
    data = map_tensors(case.data(SIZE), lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    twin = copy.deepcopy(model)
    return Trainer(case, model), Trainer(case, twin, Prefix(twin, features)), data


def both(plain: Trainer, ours: Trainer, batch: Any, ids: Sequence[int] | None = None) -> None:
    """One step of each, which must be the same one."""
    state = torch.get_rng_state()
    expected = plain.step(batch)
    torch.set_rng_state(state)
    torch.testing.assert_close(ours.step(batch, ids), expected)
    for (name, one), other in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def epochs(data: Any, steps: int) -> Iterator[tuple[Any, list[int]]]:
    """Batches of samples in a new order each time; the last of an epoch is smaller."""
    order = random.Random(0)
    while True:
        ids = list(range(SIZE))
        order.shuffle(ids)
        for at in range(0, SIZE, 5):
            steps -= 1
            if steps < 0:
                return
            yield rows(data, ids[at : at + 5]), ids[at : at + 5]


class Count(TorchDispatchMode):
    """Counts what really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.products = self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.convolutions += "convolution" in name and "backward" not in name
        self.products += name.startswith(("aten::mm", "aten::addmm", "aten::bmm"))
        self.norms += "batch_norm" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- the same steps


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_plain_freezing(case: Case, cached: bool) -> None:
    features = Features("10MB") if cached else None
    plain, ours, data = pair(case, features)
    for batch, ids in epochs(data, 12):
        both(plain, ours, batch, ids if cached else None)
    assert ours.prefix is not None and not ours.prefix.reasons
    assert features is None or features.hits >= 20


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("around", ["lean", "within"])
def test_goes_with_the_lean_engine(case: Case, around: str) -> None:
    """In single precision, in which the lean engine packs what it keeps."""
    features = Features("10MB")
    plain, ours, data = pair(case, features, torch.float32)
    prefix = ours.prefix
    assert prefix is not None

    def forward(batch: Any) -> torch.Tensor:
        with Lean() if around == "within" else nullcontext():
            return case.loss(ours.model, batch)

    for batch, ids in epochs(data, 7):
        expected = plain.step(batch)
        ours.optimizer.zero_grad()
        with Lean() if around == "lean" else nullcontext():
            value = prefix.run(partial(forward, batch), batch, ids)
        value.backward()
        ours.optimizer.step()
        torch.testing.assert_close(value.detach(), expected, rtol=1e-4, atol=1e-5)
    if around == "lean":
        assert not prefix.reasons and features.hits


@pytest.mark.parametrize("cached", [False, True])
def test_the_choice_may_move(cached: bool) -> None:
    plain, ours, data = pair(CASES[0], Features("10MB") if cached else None)
    for step, (batch, ids) in enumerate(epochs(data, 20)):
        if step % 5 == 0:
            for trainer in (plain, ours):
                choose_(trainer.model, [("three", "head"), ("two", "three"), ("head",), ("one",)][step // 5])
        both(plain, ours, batch, ids if cached else None)


def scale_(name: str, model: nn.Module, batch: Any) -> None:
    model.state_dict(keep_vars=True)[name].mul_(1.5)


def pass_in_training_mode_(model: nn.Module, batch: Any) -> None:
    """Its kernels do not raise the version of the statistics that they write to."""
    model.train()(batch[0] * 3)
    choose_(model, CASES[0].chosen)


def replace_(model: Any, batch: Any) -> None:
    conv = model.stem[0]
    conv.weight = nn.Parameter(conv.weight.detach() * 2, requires_grad=False)


SCALED = ["stem.0.weight", "stem.1.weight", "two.0.bias", "two.1.running_var", "one.1.bias"]
CHANGES = {**{name: partial(scale_, name) for name in SCALED}, "statistics": pass_in_training_mode_, "replaced": replace_}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_frozen_part_is_picked_up(change: str, cached: bool) -> None:
    plain, ours, data = pair(CASES[0], Features("10MB") if cached else None)
    batch, ids = rows(data, range(SAMPLES)), list(range(SAMPLES)) if cached else None
    for step in range(8):
        if step % 3 == 2:
            for trainer in (plain, ours):
                with torch.no_grad():
                    CHANGES[change](trainer.model, batch)
        both(plain, ours, batch, ids)
    assert ours.prefix is not None and not ours.prefix.reasons


def test_slices_train_and_move() -> None:
    torch.manual_seed(0)
    plain = Residual().double().eval()
    choose_(plain, ["two.0.weight"])
    ours, (x, y) = copy.deepcopy(plain), images(SAMPLES)
    prefix, ids = Prefix(ours, Features("10MB")), list(range(SAMPLES))
    for step in range(9):
        name = ("two.0.weight", "one.0.weight")[step // 4 % 2]
        if step % 4 == 0:
            choose_(plain, [name])
            choose_(ours, [name])
            slices = Slices(dict(ours.named_parameters()), [Part(name, 0, (1, 4))])
        slices.zero_grad()
        plain.zero_grad()
        image_loss(plain, (x, y)).backward()
        with Lean(slices):
            value = prefix.run(lambda: image_loss(ours, (x, y)), (x, y), ids, choice=tuple(slices.parts.items()))
        value.backward()
        grad = plain.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(slices.grads()[name], grad[[1, 4]])


# ---------------------------------------------------------------- what runs and what does not


def test_norms_are_folded_and_on_a_hit_nothing_of_the_part_runs() -> None:
    _, ours, data = pair(CASES[0], Features("10MB"))
    batch, ids = rows(data, range(SAMPLES)), list(range(SAMPLES))
    ours.step(batch, ids)
    counts = []
    for _ in range(2):
        with Count() as count:
            ours.step(batch, ids)
        counts.append((count.convolutions, count.norms))
    assert counts == [(4, 1), (1, 1)]


def test_samples_are_found_in_other_batches() -> None:
    features = Features("10MB")
    _, ours, data = pair(CASES[6], features)
    for ids in ([0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [7, 2, 0, 5]):
        ours.step(rows(data, ids), ids)
    assert features.hits == 4


def test_frontier_lies_in_memory_as_it_would_have() -> None:
    torch.manual_seed(0)
    model = Residual().double()
    choose_(model, ["head"])
    prefix, (x, y), seen = Prefix(model, Features("10MB")), images(SAMPLES), []

    class Look(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                seen.append((args[0].stride(), args[0].dtype))
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        with Look():
            prefix.run(lambda: image_loss(model, (x, y)), (x, y), range(SAMPLES))
    assert len(seen) == 3 and len(set(seen)) == 1


def test_views_of_what_is_channels_last_are_the_same() -> None:
    """`view` minds the layout, and writing to a view has to reach what it is a view of."""

    class Views(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.two(self.one(self.stem(x)))
            flat = x.view(len(x), -1)
            flat.mul_(0.5)
            assert x.is_contiguous() and x.stride() == (512, 64, 8, 1)
            return self.head(self.three(x).mean((2, 3)))

    plain, ours, data = pair(Case("views", Views, ("three", "head")))
    for batch, _ in epochs(data, 6):
        both(plain, ours, batch)


def test_bfloat16_is_near() -> None:
    torch.manual_seed(0)
    model, (x, y) = Residual(), images(SAMPLES)
    choose_(model, ["three", "head"])
    prefix, batch = Prefix(model, dtype=torch.bfloat16), (x.float(), y)
    values = [prefix.run(lambda: image_loss(model, batch), batch) for _ in range(2)]
    torch.testing.assert_close(values[1], values[0], rtol=0.05, atol=0.05)
    assert not torch.equal(values[1], values[0]) and values[1].dtype == torch.float32


# ---------------------------------------------------------------- what cannot be kept, and why


class Branching(Residual):
    """Goes one way or the other, as the values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.tanh(self.one(x)) if x.mean() > self.limit else self.two(x)
        return self.head(self.three(x).mean((2, 3)))

    limit = 1.0


class Noise(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand(1).item()) if random.random() > 2 else super().forward(x + torch.rand(3, 8, 8))


class Coin(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.choice((0.5, 2.0)))


class AllTogether(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Keeps(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = self.stem(x)
        return super().forward(x)


class Counts(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.share = (x > 0).float().mean().item()
        return super().forward(x)


class Masked(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x[x > 0].mean())


class Recomputed(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(self.stem(x)))
        return self.head(checkpoint(lambda x: self.three(x * 2), x, use_reentrant=False).mean((2, 3)))


class Into(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        space = torch.zeros_like(self.space).expand(len(x), -1, -1, -1).clone()
        space[:, 1:] = x[:, 1:]
        return super().forward(space)

    space = torch.zeros(1, 3, 8, 8).double()


class Dropped(Residual):
    """Dropout before the head, and what depends on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.three(self.two(self.one(self.stem(x))))
        return self.head(F.relu(F.dropout(x.mean((2, 3)), 0.5, self.training) * 2.0))


class Aside(Dropped):
    """And dropout whose result nobody uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F.dropout(self.stem(x).mean((2, 3)), 0.5, self.training)
        return super().forward(x)


REFUSED = [
    (Case("dropout", lambda: Text(0.5), ("second", "head"), text_loss, texts), "draws random numbers"),
    (Case("noise", Noise, ("three", "head")), "draws random numbers"),
    (Case("coin", Coin, ("three", "head")), "random numbers in Python"),
    (Case("others", AllTogether, ("three", "head")), "depend on the other samples"),
    (Case("keeps", Keeps, ("three", "head")), "still alive"),
    (Case("counts", Counts, ("three", "head")), "item reads a value"),
    (Case("masked", Masked, ("three", "head")), "depends on values"),
    (Case("recomputed", Recomputed, ("three", "head")), "still alive"),
    (Case("into", Into, ("three", "head")), "not made in the prefix"),
]


@pytest.mark.parametrize(("case", "why"), REFUSED, ids=[case.name for case, _ in REFUSED])
def test_what_cannot_be_kept_is_computed(case: Case, why: str) -> None:
    features = Features("10MB")
    plain, ours, data = pair(case, features)
    for batch, ids in epochs(data, 10):
        state = random.getstate()
        seed = torch.get_rng_state()
        value = plain.step(batch)
        random.setstate(state)
        torch.set_rng_state(seed)
        torch.testing.assert_close(ours.step(batch, ids), value)
        if hasattr(plain.model, "features"):
            torch.testing.assert_close(ours.model.features, plain.model.features)
            assert ours.model.features.stride() == plain.model.features.stride()
    assert ours.prefix is not None and why in ours.prefix.reasons["cache"]


@pytest.mark.parametrize("chosen", [("head",), ("three", "head")], ids=str)
@pytest.mark.parametrize("model", [Dropped, Aside])
def test_what_is_before_dropout_is_kept_and_dropout_is_drawn_in_each_step(model: type[nn.Module], chosen: Any) -> None:
    features = Features("10MB")
    plain, ours, data = pair(Case("dropped", model, chosen), features)
    for batch, ids in epochs(data, 10):
        seed = torch.get_rng_state()
        value = plain.step(batch)
        drawn = torch.get_rng_state()
        torch.set_rng_state(seed)
        torch.testing.assert_close(ours.step(batch, ids), value)
        assert torch.equal(torch.get_rng_state(), drawn)
    torch.testing.assert_close(ours.model.state_dict(), plain.model.state_dict())
    assert ours.prefix is not None
    if model is Dropped:
        assert "cache" not in ours.prefix.reasons and features.hits > 0
    else:
        assert "draws random numbers" in ours.prefix.reasons["cache"]


def test_norms_in_training_mode_are_not_kept_and_count_once() -> None:
    plain, ours, data = pair(CASES[0], Features("10MB"))
    for batch, ids in epochs(data, 6):
        for trainer in (plain, ours):
            trainer.model.stem[1].train()
        both(plain, ours, batch, ids)
    torch.testing.assert_close(ours.model.state_dict(), plain.model.state_dict())
    assert ours.prefix is not None and "cache" in ours.prefix.reasons


def test_control_flow_on_values_goes_on_plainly_and_in_the_end_gives_up() -> None:
    plain, ours, data = pair(Case("branching", Branching, ("three", "head")))
    for step in range(12):
        for trainer in (plain, ours):
            trainer.model.limit = (-100.0, 100.0)[step // 2 % 2]
        both(plain, ours, rows(data, range(SAMPLES)))
    assert ours.prefix is not None and "changes from step to step" in ours.prefix.reasons["prefix"]


def test_a_number_that_changes_is_no_hit() -> None:
    class Scaled(Residual):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    plain, ours, data = pair(Case("scaled", Scaled, ("three", "head")), Features("10MB"))
    batch, ids = rows(data, range(SAMPLES)), list(range(SAMPLES))
    for step in range(8):
        for trainer in (plain, ours):
            trainer.model.scale = 1.0 + step // 4
        both(plain, ours, batch, ids)


def test_what_is_stored_now_and_then_is_never_empty() -> None:
    class Sometimes(Residual):
        step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            out = self.stem[0](x)
            self.seen = (out, self.stem(x)) if self.step == 4 else ()
            return super().forward(x)

    for features in (None, Features("10MB")):
        plain, ours, data = pair(Case("sometimes", Sometimes, ("three", "head")), features)
        batch, ids = rows(data, range(SAMPLES)), list(range(SAMPLES))
        for _ in range(6):
            both(plain, ours, batch, ids if features is not None else None)
            for one, other in zip(ours.model.seen, plain.model.seen, strict=False):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("where", ["stem", "stem.0", "stem.1", "two"])
def test_hooks_see_what_they_would_have_seen(where: str) -> None:
    plain, ours, data = pair(CASES[0], Features("10MB"))
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for i, trainer in enumerate((plain, ours)):
        module = trainer.model.get_submodule(where)
        module.register_forward_hook(lambda _, __, out, i=i: seen[i].append(out.detach().clone()))
        module.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))
    for batch, ids in epochs(data, 6):
        both(plain, ours, batch, ids)
    for one, other in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(one, other)
    assert ours.prefix is not None and "hooks" in ours.prefix.reasons["cache"]


# ---------------------------------------------------------------- nothing is left behind


def test_nothing_of_the_part_is_kept_alive() -> None:
    refs: list[weakref.ref[torch.Tensor]] = []

    class Watched(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            refs.append(weakref.ref(x))
            x = self.two(x)
            refs.append(weakref.ref(x))
            return self.head(self.three(x).mean((2, 3)))

    for features in (None, Features("10MB")):
        _, ours, data = pair(Case("watched", Watched, ("three", "head")), features)
        for batch, ids in epochs(data, 6):
            ours.step(batch, ids if features is not None else None)
            del batch
            if any(one() is not None for one in refs):
                gc.collect()
            assert all(one() is None for one in refs)


def test_a_forward_pass_that_raises_leaves_no_mode_on() -> None:
    _, ours, data = pair(CASES[0], Features("10MB"))
    prefix, batch = ours.prefix, rows(data, range(SAMPLES))
    assert prefix is not None

    def failing() -> torch.Tensor:
        image_loss(ours.model, batch)
        raise KeyError("mine")

    for _ in range(4):
        with pytest.raises(KeyError, match="mine"):
            prefix.run(failing, batch, range(SAMPLES))
        assert not _get_current_function_mode_stack()
        ours.step(batch, list(range(SAMPLES)))
    assert not prefix.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("bias", "beta"), [(False, True), (True, True), (True, False)])
def test_what_is_folded_again_is_what_is_folded_anew(dtype: torch.dtype, last: bool, bias: bool, beta: bool) -> None:
    """Bit for bit, in the same memory and layout, whatever type it is kept in."""
    torch.manual_seed(0)
    weight, var = torch.randn(8, 4, 3, 3), torch.rand(8) + 0.5
    sources = (
        weight,
        torch.randn(8) if bias else None,
        torch.randn(8),
        var,
        torch.randn(8),
        torch.randn(8) if beta else None,
        1e-5,
    )
    tensors = [one for one in sources if isinstance(one, torch.Tensor)]

    def fold() -> Derived:
        return Derived(partial(_folded, _without_tensors(sources)), tensors, partial(_laid_out, dtype, last))

    def where(made: Derived) -> list[Any]:
        return [(one.data_ptr(), one.stride(), one.dtype) for one in made.tensors if one is not None]

    made = fold()
    before = where(made)
    weight.mul_(1.7)
    var.add_(0.3)
    made.refresh()
    assert where(made) == before
    assert all(torch.equal(one, new) for one, new in zip(made.tensors, fold().tensors, strict=True))


def test_the_model_is_left_as_it_was() -> None:
    plain, ours, data = pair(CASES[0], Features("10MB"))
    for batch, ids in epochs(data, 8):
        both(plain, ours, batch, ids)
    assert list(ours.model.state_dict()) == list(plain.model.state_dict())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in ours.model.modules())
    assert [param.stride() for param in ours.model.parameters()] == [param.stride() for param in plain.model.parameters()]
    for module, other in zip(ours.model.modules(), plain.model.modules(), strict=True):
        assert module.training == other.training
    with torch.no_grad():
        ours_out, plain_out = ours.model.eval()(data[0]), plain.model.eval()(data[0])
    torch.testing.assert_close(ours_out, plain_out)


def test_what_is_made_of_weights_is_made_again_where_it_is() -> None:
    weight, norm = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.BatchNorm2d(4)

    def make(weight: torch.Tensor, var: torch.Tensor, into: Any = None) -> tuple[torch.Tensor | None, ...]:
        return weight * (var + norm.eps).rsqrt().view(-1, 1, 1, 1), None

    made = Derived(make, [weight, norm.running_var])
    (first, _), at = made.tensors, made.tensors[0].data_ptr()
    before = first.clone()
    made.refresh()
    assert made.is_current and torch.equal(first, before)
    for source in (weight, norm.running_var):
        source.data = source.data.clone()  # lies elsewhere now
        with torch.no_grad():
            source.mul_(2)
        assert not made.is_current
        made.refresh()
        assert made.is_current and made.tensors[0].data_ptr() == at
        torch.testing.assert_close(first, weight.detach() * (norm.running_var + norm.eps).rsqrt().view(-1, 1, 1, 1))
    assert made.is_from([weight, norm.running_var]) and not made.is_from([nn.Parameter(weight.detach()), norm.running_var])


def test_several_that_were_made_are_looked_at_at_once_and_made_again_where_one_has_changed() -> None:
    weights, calls = [nn.Parameter(torch.randn(3)) for _ in range(4)], []

    def make(weight: torch.Tensor, other: torch.Tensor, into: Any = None) -> tuple[torch.Tensor]:
        calls.append(weight)
        return (weight.detach() * other.detach(),)

    made = [Derived(make, [weight, weights[-1]]) for weight in weights[:-1]]
    together = AllDerived(made)
    calls.clear()
    together.refresh()
    assert not calls
    with torch.no_grad():
        weights[1].mul_(2)
    together.refresh()
    together.refresh()
    assert len(calls) == 1 and calls[0] is weights[1]
    weights[-1].data = torch.randn(3)  # lies elsewhere, and tells no one
    together.refresh()
    assert len(calls) == 4
    for one, weight in zip(made, weights, strict=False):
        assert one.is_current and torch.equal(one.tensors[0], weight.detach() * weights[-1].detach())
    del weights[0], one, weight, calls[:]
    gc.collect()
    with torch.no_grad():
        weights[-1].mul_(2)
    together.refresh()
    assert len(calls) == 2  # what is made of something that is gone stays as it is


def test_forgets() -> None:
    features = Features("10MB")
    plain, ours, data = pair(CASES[0], features)
    batch, ids = rows(data, range(SAMPLES)), list(range(SAMPLES))
    for _ in range(3):
        both(plain, ours, batch, ids)
    assert ours.prefix is not None and len(features) == SAMPLES
    for trainer in (plain, ours):
        trainer.model.stem[0].weight.data.mul_(2)  # unseen by versions
    ours.prefix.forget()
    assert not len(features) and not ours.prefix.derived(batch, ids)
    for _ in range(3):
        both(plain, ours, batch, ids)


def test_of_many_shapes_the_first_are_recorded_and_the_others_run_as_written() -> None:
    """Were the oldest program dropped for each, shapes that come in turn would all be recorded again and again."""
    model = conv_norm(3, 4).double().eval().requires_grad_(False)
    scales = [nn.Parameter(torch.tensor(1.5, dtype=torch.float64)) for _ in range(2)]
    prefix, passes = Prefix(model), list[int]()

    def record(forward: Callable[[], torch.Tensor], batch: torch.Tensor, scale: nn.Parameter) -> None:
        prefix.run(forward, batch, choice=id(scale))

    def step(batch: torch.Tensor, scale: nn.Parameter) -> torch.Tensor:
        def forward() -> torch.Tensor:
            passes.append(batch.shape[3])
            return (model(batch) * scale).square().mean()

        return prefix.run(forward, batch, choice=id(scale), rehearse=lambda: record(forward, batch, scale))

    for scale in scales:  # another selection has programs of its own
        passes.clear()
        for size in [*range(8, 18)] * 3:
            batch = torch.randn(2, 3, 8, size, dtype=torch.float64)
            torch.testing.assert_close(step(batch, scale), (model(batch) * scale).square().mean())
            assert ("prefix" in prefix.reasons) == (size >= 16)
        assert len(passes) == 3 * 10 + 8 and len(prefix._programs) == 8


def test_few_programs_are_kept() -> None:
    _, ours, data = pair(CASES[0])
    for count in range(1, SIZE + 1):
        for _ in range(2):
            ours.step(rows(data, range(count)))
    assert ours.prefix is not None and len(ours.prefix._programs) == 8


def test_a_model_that_trains_whole_runs_plainly() -> None:
    plain, ours, data = pair(Case("whole", Residual, ("",)))
    for batch, _ in epochs(data, 4):
        both(plain, ours, batch)
    assert ours.prefix is not None and list(ours.prefix.reasons) == ["prefix"]


def deep(layers: int, activation: Any = nn.ReLU6, bias: bool = False) -> nn.Sequential:
    """Convolutions with norms on statistics of their own and activations, and a layer that trains."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for number in range(layers):
        model += nn.Sequential(nn.Conv2d(16 if number else 3, 16, 1, bias=bias), nn.BatchNorm2d(16), activation())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.uniform_(module.running_mean, -1.0, 1.0)
            nn.init.uniform_(module.running_var, 0.1, 1.0)
    model.requires_grad_(False)
    return model.append(nn.Conv2d(16, 4, 1)).eval()


def test_norms_are_not_folded_into_rounded_weights() -> None:
    """What trains on a frozen part has to see what the model gives later: in half precision, folded weights are others."""
    model, batch = deep(8), torch.randn(4, 3, 6, 6)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    prefix, plain = Prefix(model), forward()
    prefix.run(forward, batch)
    assert torch.equal(prefix.run(forward, batch), plain)
    assert not prefix.reasons
    sizes = {tensor.shape for made in prefix.derived(batch) for tensor in made.tensors if tensor is not None}
    assert torch.Size((16,)) not in sizes  # no bias of a folded norm


def wide(values: torch.Tensor) -> torch.Tensor:
    """Kernels compute in single precision at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class Emulated:
    """Stands for the kernels that need a GPU."""

    def __init__(self) -> None:
        self.clips: list[Any] = []
        self.backs = 0

    def serves(self, values: torch.Tensor) -> bool:
        return values.dim() == 4

    def norm_(self, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Any) -> torch.Tensor:
        self.clips.append(clip)
        return values.copy_(self._normed(values, scale, shift, clip))

    def norm(self, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Any) -> torch.Tensor:
        self.clips.append(clip)
        return self._normed(values, scale, shift, clip).to(values.dtype)

    def back(
        self, grad: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Any
    ) -> torch.Tensor:
        self.backs += 1
        out = (wide(grad) * scale.view(-1, 1, 1)).to(grad.dtype)
        if clip is None:
            return out
        normed = wide(self._normed(values, scale, shift, None).to(values.dtype))
        return out.masked_fill_((normed <= clip[0]) | (normed >= clip[1]), 0.0)

    def _normed(self, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Any) -> torch.Tensor:
        normed = wide(values) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
        return normed if clip is None else normed.clamp(*clip)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    out = Emulated()
    monkeypatch.setattr(frozen_batchnorm, "norm_kernels", lambda kind: out)
    return out


@pytest.mark.parametrize("activation", [nn.ReLU6, nn.ReLU, nn.SiLU, partial(nn.Hardtanh, -0.5, 0.25)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_and_the_clipping_after_it_in_one_kernel_give_what_the_model_gives(
    activation: Any, bias: bool, kernels: Emulated
) -> None:
    """Also after its statistics, its scale and its weights have changed."""
    model, batch = deep(3, activation, bias), torch.randn(4, 3, 6, 6)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    prefix = Prefix(model)
    prefix.run(forward, batch)
    for _ in range(2):
        kernels.clips.clear()
        torch.testing.assert_close(prefix.run(forward, batch), forward(), rtol=0.02, atol=0.02)
        assert len(kernels.clips) == 3
        assert all(clip is None for clip in kernels.clips) == (activation is nn.SiLU)
        with torch.no_grad():
            for tensor in (*model[:-1].parameters(), *(one for one in model.buffers() if one.is_floating_point())):
                tensor.mul_(1.5)


IN_PLACE = partial(nn.ReLU6, inplace=True)


def holed(activation: Any = IN_PLACE) -> nn.Sequential:
    """Of five layers and a head, the second, the fifth and the head train."""
    model = deep(5, activation).double()
    for number in (1, 4):
        model[3 * number].requires_grad_(True)
    return model


def grads_of(model: nn.Module, run: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = run()
    loss.backward()
    return [loss.detach(), *[param.grad.clone() for param in model.parameters() if param.grad is not None]]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("activation", [IN_PLACE, nn.ReLU6, partial(nn.ReLU, inplace=True), nn.SiLU])
def test_frozen_norms_between_what_is_chosen_run_in_one_kernel(activation: Any, cached: bool, kernels: Emulated) -> None:
    """With the clipping after them where that is in place: then nobody can see what it is before. Also after a change."""
    model, batch = holed(activation), torch.randn(SAMPLES, 3, 6, 6).double()
    prefix = Prefix(model, Features("1MB") if cached else None)
    ids = range(SAMPLES) if cached else None
    for step in range(4):
        kernels.clips.clear()
        ours = grads_of(model, lambda: prefix.run(lambda: model(batch).square().mean(), batch, ids, fuse_norms=True))
        if step:
            limits = {"ReLU6": (0.0, 6.0), "ReLU": (0.0, math.inf)}.get(type(model[2]).__name__)
            is_fused = getattr(model[2], "inplace", False) and limits is not None
            assert kernels.clips == [limits if is_fused else None] * 4  # of the second, third, fourth and fifth layer
        plain = grads_of(model, lambda: model(batch).square().mean())
        assert len(ours) == len(plain) == 5
        for mine, its in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, its)
        if step == 2:
            with torch.no_grad():
                for tensor in (model[7].weight, model[10].running_var, model[10].bias):
                    tensor.mul_(1.5)
    assert prefix.reasons == {}


def test_a_frozen_norm_is_left_to_pytorch_where_nobody_asked(kernels: Emulated) -> None:
    model, batch = holed(), inputs()
    model[7].weight.requires_grad_(True)
    prefix = Prefix(model)
    for rests, expected in ((True, 0), (True, 3), (False, 0)):  # a norm that trains is not frozen
        kernels.clips.clear()
        ours = grads_of(model, lambda rests=rests: prefix.run(lambda: model(batch).square().mean(), batch, fuse_norms=rests))
        assert len(kernels.clips) == expected
        for mine, its in zip(ours, grads_of(model, lambda: model(batch).square().mean()), strict=True):
            torch.testing.assert_close(mine, its)


def inputs() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, dtype=torch.double)


class Behind(nn.Module):
    """A convolution in the part, one that trains, and a frozen one between them and the head; then `after`."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.trains, self.rests, self.head = (nn.Conv2d(3 if i == 0 else 8, 8, 1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        for norm in self.norms:
            nn.init.uniform_(norm.running_mean, -1.0, 1.0)
            nn.init.uniform_(norm.running_var, 0.1, 1.0)
        self.after = after
        self.requires_grad_(False)
        self.trains.requires_grad_(True)
        self.head.requires_grad_(True)
        self.double().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.norms[0](self.first(x)))
        x = self.norms[1](self.trains(x))
        return self.head(self.after(self.rests(x), self.norms[2]))


def same_behind(model: nn.Module, batch: torch.Tensor, prefix: Prefix, steps: int = 3) -> None:
    for _ in range(steps):
        ours = grads_of(model, lambda: prefix.run(lambda: model(batch).square().mean(), batch, fuse_norms=True))
        for mine, its in zip(ours, grads_of(model, lambda: model(batch).square().mean()), strict=True):
            torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("change", ["add", "gate", "view", "dropout"])
def test_the_result_of_a_fused_clipping_may_be_changed_in_place(change: str, kernels: Emulated) -> None:
    def after(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        x = F.hardtanh(norm(x), 0.0, 6.0, inplace=True)
        if change == "add":
            x += 1.0
        elif change == "gate":
            x *= x.mean((2, 3), keepdim=True).sigmoid()
        elif change == "view":
            x.view(-1)[::2] = 0.5
        else:
            F.dropout(x, 0.0, training=True, inplace=True)
        return x

    model = Behind(after)
    same_behind(model, inputs(), Prefix(model))
    assert kernels.backs == 4  # of two norms, in two followed steps


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_frozen_norm_in_a_checkpoint_is_pytorchs(reentrant: bool, kernels: Emulated) -> None:
    """It runs again in backward, without us, and what is kept is handed back by its place."""

    def after(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return checkpoint(lambda x: F.relu6(norm(x), inplace=True) * 1.5, x, use_reentrant=reentrant)

    model = Behind(after)
    same_behind(model, inputs(), Prefix(model))
    assert kernels.backs == 2  # of the norm before it


def test_limits_of_a_fused_clipping_may_change(kernels: Emulated) -> None:
    limit = [1.0]
    model, batch = Behind(lambda x, norm: F.hardtanh(norm(x), -limit[0], limit[0], inplace=True)), inputs()
    prefix = Prefix(model)
    for limit[0] in (1.0, 0.3, 0.3, 0.7):
        same_behind(model, batch, prefix, steps=2)


def test_a_norm_on_batch_statistics_is_pytorchs(kernels: Emulated) -> None:
    """Where no module says so."""
    moves = [False]

    def after(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, moves[0])

    model, batch = Behind(after), inputs()
    prefix = Prefix(model)
    for moves[0] in (False, True):
        same_behind(model, batch, prefix, steps=2)


@pytest.mark.parametrize("again", [False, True])
def test_limits_that_a_type_does_not_have(again: bool) -> None:
    """0.7 is 0.69921875 in bfloat16: what is that before it is clipped has a gradient, what becomes that has none."""
    values = torch.tensor([-0.75, -0.69921875, -0.5, 0.0, 0.69921875, 0.703125]).bfloat16().view(1, 1, 2, 3).requires_grad_()
    ours = fused_norm(Emulated(), values, torch.ones(1), torch.zeros(1), (-0.7, 0.7))
    plain = F.hardtanh(values, -0.7, 0.7)
    assert torch.equal(ours, plain)
    mine, its = (torch.autograd.grad(out.float().sum(), values, create_graph=again)[0] for out in (ours, plain))
    assert mine.flatten().tolist() == its.flatten().tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("clips", [False, True])
def test_frozen_norms_may_be_differentiated_twice(clips: bool, kernels: Emulated) -> None:
    model = Behind(lambda x, norm: F.relu6(norm(x), inplace=True).square() if clips else norm(x).square())
    batch, prefix = inputs(), Prefix(model)

    def run() -> torch.Tensor:
        value = model(batch).square().mean()
        (grad,) = torch.autograd.grad(value, model.trains.weight, create_graph=True)
        return value + grad.square().sum()

    for _ in range(3):
        for mine, its in zip(
            grads_of(model, lambda: prefix.run(run, batch, fuse_norms=True)), grads_of(model, run), strict=True
        ):
            torch.testing.assert_close(mine, its)
    assert len(kernels.clips) > 3


def test_frozen_norms_behind_a_first_layer_that_trains(kernels: Emulated) -> None:
    """There is no part then, and something to do all the same."""
    model = Behind(lambda x, norm: F.relu6(norm(x), inplace=True))
    model.first.requires_grad_(True)
    same_behind(model, inputs(), Prefix(model))
    assert kernels.backs == 6


def test_an_interrupt_where_a_clipping_is_due_is_not_lost(kernels: Emulated) -> None:
    interrupts = [False]

    def after(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        x = norm(x)
        if interrupts[0]:
            raise KeyboardInterrupt
        return F.relu6(x, inplace=True)

    model, batch = Behind(after), inputs()
    prefix = Prefix(model)
    same_behind(model, batch, prefix)
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        prefix.run(lambda: model(batch).square().mean(), batch, fuse_norms=True)
    interrupts[0] = False
    same_behind(model, batch, prefix)


def test_what_comes_behind_the_part_may_change_though_a_clipping_is_due(kernels: Emulated) -> None:
    """Other functions than those that were recorded: the pass goes on plainly, and so do those after it."""
    torch.manual_seed(0)
    layers, batch = holed(), inputs()
    skipped: set[int] = set()

    def forward() -> torch.Tensor:
        x = batch
        for number, layer in enumerate(layers):
            x = x if number in skipped else layer(x)
        return x.square().mean()

    prefix = Prefix(layers)
    for skips in (set[int](), set[int](), {8}, {8}, {8, 11}, {6, 7, 8}, set[int](), set[int](), {14, 15}):
        skipped = skips
        ours = grads_of(layers, lambda: prefix.run(forward, batch, fuse_norms=True))
        for mine, its in zip(ours, grads_of(layers, forward), strict=True):
            torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_weights_that_are_put_in_place_of_others_leave_those_as_they_are(kind: torch.dtype) -> None:
    """Such as averaged ones for a while: what is made of weights may be the weights themselves."""
    model = deep(2).to(kind)
    batch = torch.randn(4, 3, 6, 6, dtype=kind)
    prefix, others = Prefix(model), [param.detach() * 2 for param in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        prefix.run(lambda: model(batch), batch)
    for _ in range(2):
        for number, param in enumerate(model.parameters()):
            param.data, others[number] = others[number], param.data
        for _ in range(2):
            torch.testing.assert_close(prefix.run(lambda: model(batch), batch), model(batch), rtol=0.02, atol=0.02)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "part"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_the_part_may_compute_in_a_type_that_its_norms_do_not_take(kind: torch.dtype, part: torch.dtype) -> None:
    model = deep(2).to(kind)
    batch = torch.randn(4, 3, 6, 6, dtype=kind)
    prefix = Prefix(model, dtype=part)
    for _ in range(3):
        torch.testing.assert_close(prefix.run(lambda: model(batch), batch), model(batch), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("inside", [False, True])
def test_a_convolution_keeps_the_autocast_that_it_was_called_in(inside: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                x = self.conv(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                x = self.norm(x)
            types.append(x.dtype)
            return self.head(x.float())

    torch.manual_seed(0)
    types: list[torch.dtype] = []
    model, batch = Mixed().eval(), torch.randn(2, 3, 4, 4)
    model.conv.requires_grad_(False)
    model.norm.requires_grad_(False)
    prefix, plain = Prefix(model), model(batch)
    for _ in range(2):
        torch.testing.assert_close(prefix.run(lambda: model(batch), batch), plain)
    assert len(set(types)) == 1


def test_a_norm_behind_an_unbatched_convolution_is_not_folded() -> None:
    """There the norm's channels are positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 6, 1), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    model[:2].requires_grad_(False)
    nn.init.uniform_(model[1].running_mean)
    prefix, batch = Prefix(model), torch.randn(8, 6)
    for _ in range(3):
        torch.testing.assert_close(prefix.run(lambda: model(batch), batch), model(batch))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_cuda_a_norm_and_the_clipping_after_it_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly and captured, it gives what the model gives."""
    pytest.importorskip("triton")
    kernels, calls = frozen_batchnorm.norm_kernels("cuda"), []
    assert kernels is not None
    norm_ = kernels.norm_
    monkeypatch.setattr(kernels, "norm_", lambda *given: calls.append(given[3]) or norm_(*given))
    model = deep(8).cuda().to(memory_format=torch.channels_last)
    batch = torch.randn(4, 3, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last)

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(batch)

    prefix, plain = Prefix(model), forward()
    prefix.run(forward, batch)
    eager = prefix.run(forward, batch)
    assert calls == [(0.0, 6.0)] * 8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prefix.run(forward, batch)
    graph.replay()
    assert calls == [(0.0, 6.0)] * 16
    for ours in (eager, captured):
        assert (ours != plain).float().mean() < 0.05  # a tie may be rounded the other way
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("activation", [IN_PLACE, nn.SiLU])
def test_on_cuda_frozen_norms_between_what_is_chosen_are_one_kernel_there_and_one_back(
    activation: Any, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    kernels, calls = frozen_batchnorm.norm_kernels("cuda"), []
    assert kernels is not None
    norm = kernels.norm
    monkeypatch.setattr(kernels, "norm", lambda *given: calls.append(given[3]) or norm(*given))
    model = holed(activation).float().cuda().to(memory_format=torch.channels_last)
    batch = torch.randn(4, 3, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last)

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return model(batch).float().square().mean()

    prefix, near = Prefix(model), {"rtol": 0.1, "atol": 0.02} if half else {"rtol": 1e-3, "atol": 1e-4}
    plain = grads_of(model, forward)
    for step in range(3):
        ours = grads_of(model, lambda: prefix.run(forward, batch, fuse_norms=True))
        assert len(calls) == 4 * step
        for mine, its in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, its, **near)
