"""Modules of torch.nn that run another way while a recorded program is replayed.

Those that lie in a prefix that is skipped are not entered: to follow their calls takes Python longer than small layers take.
After the prefix, chains of convolutions, norms and clippings run as one function (`kernels.chains`). What such modules do
depends on their settings and tensors alone, which are compared; those with hooks run as they are. Code of the user's own
always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pliant.engine.kernels import chains
from pliant.engine.kernels.chains import Link
from pliant.engine.prefix.replay import CacheHit, Replay
from pliant.runtime.torch_internals import GLOBAL_FORWARD_HOOKS, without_function_modes

if TYPE_CHECKING:
    from pliant.engine.prefix.prefix_plan import PrefixPlan
    from pliant.engine.prefix.record import ProgramRecorder

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Forward = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Entered:
    """One call of a module while a program was recorded: one tensor in, one tensor out."""

    module: nn.Module
    first: int  # the position of its first call of a torch function
    end: int  # that of the first one after it
    reads: int  # the value that it was given
    makes: int  # the value that it returned
    is_skipped: bool = False  # whether all of it lies in the prefix, and nothing inside of it is used elsewhere
    is_after: bool = False  # whether nothing of it lies in the prefix


@dataclass(frozen=True, eq=False)
class Replaced:
    """A module that runs another way: skipped, or as a chain."""

    module: nn.Module
    inside: tuple[nn.Module, ...]  # itself and all modules in it
    settings: list[int]
    calls: dict[int, Entered]  # by the position of their first torch function
    links: tuple[Link, ...] | None

    def forward(self, mode: Replay | None, as_chain: bool) -> Forward:
        """How it runs while this program is replayed; None: while nothing is skipped or followed."""
        original = self.module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with without_function_modes():
                out = self._run(mode, as_chain, *args, **kwargs)
            return original(*args, **kwargs) if out is None else out

        return run

    def _run(self, mode: Replay | None, as_chain: bool, input: Any = None, *more: Any, **named: Any) -> Any:
        """The result; None where the module must run as it is."""
        if more or named or not isinstance(input, torch.Tensor) or self.settings != _settings(self.inside):
            return None
        links = self.links if as_chain and self.links is not None and chains.serves(self.links, input) else None
        if isinstance(mode, CacheHit) and not mode.is_past_prefix:
            call = self.calls.get(mode.at)
            if call is None or not mode.was_given(input, call.reads):
                return None
            if call.is_skipped:
                return mode.skip(call.end, call.makes)
            return mode.go_on(call.end, call.makes, chains.run(links, input)) if links is not None and call.is_after else None
        return chains.run(links, input) if links is not None and (mode is None or mode.is_past_prefix) else None


@contextmanager
def entering(model: nn.Module, recorder: ProgramRecorder) -> Iterator[list[Entered]]:
    """Collect the calls of torch's own modules while a forward pass is recorded."""
    entered: list[Entered] = []

    def watched(module: nn.Module) -> Forward:
        original = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            first, reads = len(recorder.calls), recorder.number(args[0]) if args else None
            out = original(*args, **kwargs)
            made, end = recorder.number(out), len(recorder.calls)
            if reads is not None and made is not None and len(args) == 1 and not kwargs and end > first:
                entered.append(Entered(module, first, end, reads, made))
            return out

        return run

    with forwards({module: watched(module) for module in _own_to_torch(model)}):
        yield entered


def find_replaced(entered: list[Entered], plan: PrefixPlan) -> list[Replaced]:
    """The largest of these modules that can be skipped, or run as a chain."""
    found: dict[nn.Module, Replaced] = {}
    covered = 0
    for call in sorted(entered, key=lambda call: (call.first, -call.end)):
        if call.first < covered:
            continue
        module, links = call.module, chains.chain_of(call.module)
        is_skipped = call.reads >= 0 and call.makes >= 0 and _is_skipped_whole(call, plan)
        if is_skipped or links is not None:
            covered = call.end
            if module not in found:
                inside = tuple(module.modules())
                found[module] = Replaced(module, inside, _settings(inside), {}, links)
            is_after = all(plan.calls[at].kind != "prefix" for at in range(call.first, call.end))
            found[module].calls[call.first] = replace(call, is_skipped=is_skipped, is_after=is_after)
    return list(found.values())


def _is_skipped_whole(one: Entered, plan: PrefixPlan) -> bool:
    inside = range(one.first, one.end)
    for at in inside:
        call = plan.calls[at]
        if call.kind not in ("prefix", "constant", "form", "layout") or at in plan.recomputed:
            return False
        for number in (*call.makes, *[number for _, number in call.changes]):
            value = plan.values[number]
            if plan.values[value.first].maker not in inside:  # it changes what it was given
                return False
            is_result = value.first == plan.values[one.makes].first
            if not is_result and (number in plan.keeps or any(reader not in inside for reader in value.readers)):
                return False
    return True


@contextmanager
def forwards(replaced: dict[nn.Module, Forward]) -> Iterator[None]:
    """For a while, these modules run these functions."""
    for module, forward in replaced.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)


def _own_to_torch(model: nn.Module) -> list[nn.Module]:
    """The modules that run no code but torch's, without hooks."""
    if any(GLOBAL_FORWARD_HOOKS):
        return []
    own = {module for module in model.modules() if _is_own(module)}
    return [module for module in own if own.issuperset(module.modules())]


def _is_own(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    cls, held = type(module), module.__dict__
    is_torchs = cls.forward.__module__.startswith("torch.nn.modules.") and cls.__call__ is nn.Module.__call__
    is_bare = "forward" not in held and held.get("_compiled_call_impl") is None and cls.__getattr__ is nn.Module.__getattr__
    return is_torchs and is_bare and not any(held.get(name) for name in _HOOKS)


def _settings(modules: tuple[nn.Module, ...]) -> list[int]:
    """What decides what such modules do, besides the values of their tensors: settings, tensors and children, by identity."""
    parts: list[int] = []
    for one in modules:
        held = one.__dict__
        parts += map(id, held["_parameters"].values())
        parts += map(id, held["_buffers"].values())
        parts += map(id, held["_modules"].values())
        parts += map(id, held.values()) if "forward" not in held else [id(v) for name, v in held.items() if name != "forward"]
    return parts
