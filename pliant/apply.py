"""The only room that decides what of the user's model trains: `apply_`, `restore_`, and the sandbox for probes."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn


def apply_(
    among: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    chosen: Collection[str],
    state: Literal["keep", "drop"] = "keep",
) -> None:
    """Make just the `chosen` parameters trainable. Checks first and changes then: an error leaves everything as it was.

    What is not chosen loses its gradient (an optimizer moves whatever has one, even of zeros) and, with `state="drop"`, its
    optimizer state, whose memory is freed.
    """
    unknown = sorted(set(chosen) - set(among))
    if unknown:
        raise ValueError(f"cannot choose {unknown[0]!r}: the model has no trainable parameter of that name.")
    check_in_groups(among, optimizer, chosen)
    for name, param in among.items():
        param.requires_grad_(name in chosen)
        if name not in chosen:
            param.grad = None
            if state == "drop":
                optimizer.state.pop(param, None)
    torch.clear_autocast_cache()  # it may hold casts of weights made under the old choice


def check_in_groups(among: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, chosen: Collection[str]) -> None:
    """A parameter that is chosen but unknown to the optimizer would be paid for and never move: refuse it."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name in chosen if id(among[name]) not in held]
    if missing:
        raise ValueError(
            f"{missing[0]!r} was chosen but is in no param group of the optimizer ({len(missing)} of {len(chosen)} chosen are "
            f"not). Build the optimizer over all parameters (what is not chosen costs nothing), or leave it "
            f"out: dataclasses.replace(policy, units=units.layers(exclude=…))."
        )


@dataclass(frozen=True)
class Found:
    """How a model was found: which parameters were trainable, and the mode of each module."""

    requires_grad: Mapping[nn.Parameter, bool]
    training: Mapping[nn.Module, bool]


def found(model: nn.Module) -> Found:
    """Remember how the model is now."""
    return Found({p: p.requires_grad for p in model.parameters()}, {m: m.training for m in model.modules()})


def restore_(was: Found) -> None:
    """Make the model as it was found; modes are handled by `Norms.release_`, so that the user's own changes of mode stay."""
    for param, flag in was.requires_grad.items():
        param.requires_grad_(flag)
    torch.clear_autocast_cache()


@contextmanager
def sandbox(model: nn.Module, train: Collection[str] | None = None) -> Iterator[None]:
    """Whatever runs inside leaves no trace: buffers, gradients, random states, modes and trainable flags are put back.

    Inside, gradients start out as None and just the parameters in `train` are trainable (None: as they are). Weights and
    optimizer state are not copied: whoever needs a step takes it on a `scratch` optimizer.
    """
    was = found(model)
    buffers = {module: dict(module._buffers) for module in model.modules()}
    own = {m: [b for b in held.values() if b is not None and not _is_expanded(b)] for m, held in buffers.items()}
    copies = {module: [(b, b.clone(), b._version) for b in several] for module, several in own.items()}
    grads = {param: param.grad for param in model.parameters()}
    rng = rng_states()
    try:
        for name, param in model.named_parameters():
            param.grad = None
            if train is not None:
                param.requires_grad_(name in train)
        torch.clear_autocast_cache()
        yield
    finally:
        restore_(was)
        for module, flag in was.training.items():
            module.training = flag
        for module, held in buffers.items():
            module._buffers.clear()
            module._buffers.update(held)
        with torch.no_grad():
            for several in copies.values():
                # A norm writes to its statistics without saying so, but counts. What nobody wrote to goes on as unwritten.
                is_written = any(buffer._version != version for buffer, _, version in several)
                for buffer, copy, _ in several:
                    (buffer if is_written else buffer.data).copy_(copy)
        for param, grad in grads.items():
            param.grad = grad
        set_rng_states(rng)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory: nothing can be written into such a tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def rng_states() -> dict[str, Any]:
    """Every random state that training may draw from, in plain types and tensors."""
    name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Put the random states back."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


# Every element's update depends on that element's own gradients and state: a piece moves as it would inside the whole.
# fmt: off
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
)
# fmt: on


def scratch(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    dtype: torch.dtype | None = None,
    values: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer like the user's (class, settings of each parameter's group), with fresh state, over copies of `params`, or
    of `values` that stand for them.

    Hooks and schedulers that hang on the user's optimizer do not see it; take its steps with `scratch_step`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS makes its update from a closure, not from a gradient: its update gain is unknown.")
    copies = {
        id(param): nn.Parameter(value.detach().to(dtype or value.dtype, copy=True))
        for param, value in zip(params, params if values is None else values, strict=True)
    }
    like = object.__new__(type(optimizer))
    like.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    like.state = defaultdict(dict)
    like.param_groups = []
    for group in optimizer.param_groups:
        mine = [copies[id(param)] for param in group["params"] if id(param) in copies]
        if mine:
            like.param_groups.append({**group, "params": mine})
            if isinstance(optimizer, torch.optim.Adagrad):  # makes its state when it is built, not at the first step
                start = group["initial_accumulator_value"]
                like.state.update(torch.optim.Adagrad(mine, initial_accumulator_value=start).state)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(like, name, OrderedDict())
    return like, [copies[id(param)] for param in params]


def hide_step_(like: torch.optim.Optimizer) -> None:
    """Make a scratch optimizer's own `step`, which a scaler calls, as unseen as `scratch_step`. Makes no reference cycle."""
    me = weakref.ref(like)

    def step() -> None:
        found = me()
        if found is not None:
            scratch_step(found)

    like.__dict__["step"] = step


def scratch_step(like: torch.optim.Optimizer) -> None:
    """One step of a scratch optimizer, unseen by hooks that torch holds for all optimizers."""
    step: Any = type(like).step
    if getattr(step, "hooked", False):  # torch wraps every optimizer's step to call them
        step = step.__wrapped__
    step(like)
