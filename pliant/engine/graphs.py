"""A step on a GPU as one launch.

At small batches a GPU waits for its kernels to be launched one by one. A step that was captured (`torch.cuda.CUDAGraph`)
launches all of them at once. What a capture bakes in is part of its key: which parameters train, the shapes of the batch, the
modes of the modules, autocast, the settings of the optimizer. Learning rates are not: they lie in memory that the kernels read.

A replay runs no Python. Where Python has something to do in a step (hooks, a loss that counts), steps stay eager, and
`why_not` tells the reason.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pliant.batches import Loss, map_tensors, tensors
from pliant.engine.made import Made

Work = Callable[[Any], torch.Tensor]  # a batch → its loss, detached; backward and, where due, the optimizer's step are done
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]

_KEPT = 8  # captured steps
_MOST_FAILURES = 3
_NUMBERS = (int, float, str, bytes, type(None))
_WAITS = "called a synchronizing"  # how PyTorch tells of it
_HOOKS_OF_ALL = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Refused(Exception):
    """Why a step cannot be captured."""


class OnCuda:
    """Captures what `work` launches, on a stream of its own, into memory that all captures share: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        numbers = torch.cuda.default_generators[self._device.index or 0]
        drawn = numbers.clone_state()
        self._stream.wait_stream(current)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # loaders may pin memory meanwhile
            try:
                value = work()
                graph.capture_end()
            except BaseException:
                self._pool = torch.cuda.graph_pool_handle()
                with suppress(RuntimeError):  # it was invalid already
                    graph.capture_end()
                numbers.graphsafe_set_state(drawn)  # else it takes itself to be in the capture still
                raise
        current.wait_stream(self._stream)
        return graph.replay, value


@dataclass
class _Captured:
    replay: Callable[[], None]
    value: torch.Tensor
    batch: Any  # what the kernels read
    grads: list[tuple[nn.Parameter, torch.Tensor]]
    rates: list[torch.Tensor]  # one per group
    given: list[Any]  # what each holds, as the user wrote it
    counts: list[tuple[torch.Tensor, torch.Tensor]]  # Adam's: the user's, on the CPU, and the one that the kernels read
    writes: list[torch.Tensor]  # weights that train, and buffers of modules in training mode
    at: tuple[int, ...]  # addresses that are baked in
    made: Sequence[Made]  # of weights, and read by the kernels
    holds_counts: bool = False  # whether the kernels' counts are the user's


class Graphs:
    """Takes steps: eagerly at first, then captured, each kind of step on its own."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, capture: Capture | None = None) -> None:
        self.why_not: str | None = None  # the last reason for an eager step, other than that it was the first of its kind
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._device = next(model.parameters()).device
        self._capture = capture or OnCuda(self._device)
        self._known: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: set[Hashable] = set()  # kinds of steps that may be captured
        self._waited: set[Hashable] = set()
        self._failures: dict[Hashable, str] = {}
        self._own_hooks = {name: len(getattr(optimizer, name)) for name in _STEP_HOOKS}  # those of the session
        self._modules = list(model.modules())
        self._hooks = [getattr(module, name) for module in self._modules for name in _MODULE_HOOKS]
        self._plain = [
            (module.__dict__, name)
            for module in self._modules
            for name, value in module.__dict__.items()
            if name[0] != "_" and name != "training" and isinstance(value, _NUMBERS)
        ]
        self._held = [held for module in self._modules for held in (module._parameters, module._buffers) if held]
        self.captures = self.replays = 0
        self._preparing = 0.0  # seconds of the steps that were not replays

    @property
    def seconds_per_capture(self) -> float:
        """What the first steps of a kind take until it is captured; 0 before anything was."""
        return self._preparing / self.captures if self.captures else 0.0

    def step(
        self, batch: Any, work: Work, *, choice: Hashable, first: bool = True, prepare: Callable[[], Sequence[Made]] = tuple
    ) -> torch.Tensor:
        """`work(batch)`, by replay where such a step was captured.

        `choice` stands for what trains and for all else that the caller's work hangs on; `first` says that gradients start
        from nothing. `prepare` comes before a capture and gives what the work uses that is made of weights once: the captured
        step holds on to it and sees to it that it is made of the weights as they are.
        """
        key = captured = None
        start, before = time.monotonic(), self.captures
        try:
            key = self._key(batch, choice, first)
            captured = self._known.get(key)
            is_stale = captured is not None and captured.at != self._addresses(first)  # state was loaded, a weight replaced
            if is_stale or (captured is None and key in self._seen):
                captured = self._capture_step(batch, work, key, first, prepare)
        except Refused as why:
            captured, self.why_not = None, str(why)
        if captured is None:  # outside of the handler, which would keep the autograd graph of a failed capture alive
            for other in self._known.values():
                other.holds_counts = False
            value = work(batch) if key is None or key in self._failures else self._watched(batch, work, key)
        else:
            self._known.move_to_end(key)
            value = self._replay(captured, batch)
        if self.captures > before or (captured is None and key is not None and key not in self._failures):
            self._preparing += time.monotonic() - start
        return value

    @property
    def refusal(self) -> str | None:
        """Why no step of any kind can be captured, if that is known before one is tried."""
        try:
            self._refuse()
        except Refused as why:
            return str(why)
        return None

    def forget(self) -> None:
        """Capture anew."""
        self._known.clear()
        self._seen.clear()
        self._waited.clear()
        self._failures.clear()

    def _watched(self, batch: Any, work: Work, key: Hashable) -> torch.Tensor:
        """An eager step, the first of its kind, that tells whether Python has a part in it."""
        before = _python_state(self._modules, self._loss)
        there = map_tensors(batch, lambda tensor: tensor.to(self._device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _telling_of_waits(self._device):
                value = work(there)
        after = _python_state(self._modules, self._loss)
        changed = [name for name in {**before, **after} if before.get(name, self) != after.get(name, self)]
        if changed:
            self._failures[key] = f"a step changes {changed[0]}, which a replay would not"
        waits = [warning for warning in caught if _WAITS in str(warning.message)]
        if not waits:
            self._seen.add(key)
        elif key in self._waited:  # once may be for what is done once
            where = f"{Path(waits[0].filename).name}, line {waits[0].lineno}"
            self._failures[key] = f"a step waits for the GPU (.item(), a copy to the CPU, …) in {where}"
        else:
            self._waited.add(key)
        for warning in caught:
            if warning not in waits and "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return value

    def _capture_step(
        self, batch: Any, work: Work, key: Hashable, first: bool, prepare: Callable[[], Sequence[Made]]
    ) -> _Captured:
        made = prepare()
        groups, at = self._optimizer.param_groups, self._addresses(first)
        static = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device=self._device).copy_(tensor))
        given = [group["lr"] for group in groups]
        rates = [_rate(group, self._device) for group in groups]
        counts = _counts(self._optimizer)
        torch.clear_autocast_cache()  # casts from before would be baked in
        try:
            with _undone_on_error(self._optimizer):
                with _capturable(self._optimizer, rates, counts):
                    replay, value = self._capture(lambda: work(static))
                if self._addresses(first) != at:
                    raise RuntimeError("a step replaces parameters, buffers or optimizer state")
        except (RuntimeError, ValueError, AssertionError) as error:
            self._known.clear()  # they draw random numbers from a generator that the failure has left behind
            self._failures[key] = f"capture failed: {str(error).strip().splitlines()[0]}"
            raise Refused(self._failures[key]) from None
        finally:
            torch.clear_autocast_cache()
        counts = [pair for pair in counts if pair[1]._version]  # none, where the optimizer's step comes with a later batch
        grads = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
        writes = [param for group in groups for param in group["params"] if param.requires_grad]
        for module in self._modules:
            writes += [buffer for buffer in module._buffers.values() if buffer is not None and module.training]
        captured = self._known[key] = _Captured(replay, value, static, grads, rates, given, counts, writes, at, made)
        self.captures += 1
        while len(self._known) > _KEPT:
            old, _ = self._known.popitem(last=False)
            self._seen.discard(old)
        return captured

    def _replay(self, captured: _Captured, batch: Any) -> torch.Tensor:
        self.why_not = None
        for static, given in zip(tensors(captured.batch), tensors(batch), strict=True):
            static.copy_(given, non_blocking=True)
        for i, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                captured.rates[i].copy_(lr)
            elif lr != captured.given[i]:
                captured.rates[i].fill_(lr)
                captured.given[i] = lr
        if not captured.holds_counts:
            for other in self._known.values():
                other.holds_counts = other is captured
            for users, kernels in captured.counts:
                kernels.copy_(users)
        for one in captured.made:
            one.refresh()
        captured.replay()
        torch.autograd.graph.increment_version(captured.writes)  # as eager steps do: others watch for it
        self.replays += 1
        if captured.counts:
            torch._foreach_add_([users for users, _ in captured.counts], 1)
        for param, grad in captured.grads:
            param.grad = grad
        return captured.value.clone()

    # ------------------------------------------------------------ what a capture hangs on

    def _key(self, batch: Any, choice: Hashable, first: bool) -> Hashable:
        """Everything but addresses that a capture bakes in; refuses what Python would have to do."""
        self._refuse()
        if len(self._failures) >= _MOST_FAILURES:
            raise Refused(next(iter(self._failures.values())))
        settings = tuple(
            (name, value)
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr")
        )
        modes = tuple(module.training for module in self._modules)
        device = self._device.type
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        # Python's own numbers are read when a step is captured, and not again.
        numbers = tuple([held.get(name) for held, name in self._plain]), _numbers_of(self._loss)
        key = choice, first, _outline(batch), modes, cast, settings, numbers
        try:
            hash(key)
        except TypeError as error:
            raise Refused(f"settings that cannot be compared: {error}") from None
        if key in self._failures:
            raise Refused(self._failures[key])
        return key

    def _refuse(self) -> None:
        if type(self._optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            raise Refused(f"{type(self._optimizer).__name__} cannot be captured: SGD, Adam and AdamW can")
        if any(group.get("differentiable") for group in self._optimizer.param_groups):
            raise Refused("a differentiable optimizer cannot be captured")
        for name, ours in self._own_hooks.items():
            if len(getattr(self._optimizer, name)) > ours:
                raise Refused("the optimizer has step hooks")
        if any(_HOOKS_OF_ALL):
            raise Refused("there are hooks on all modules or optimizers")
        if any(self._hooks):
            hooked = next(module for module in self._modules if any(getattr(module, name) for name in _MODULE_HOOKS))
            raise Refused(f"a {type(hooked).__name__} has hooks")
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                    raise Refused("a parameter has hooks")

    def _addresses(self, first: bool) -> tuple[int, ...]:
        state = self._optimizer.state
        out = [tensor.data_ptr() for held in self._held for tensor in held.values() if tensor is not None]
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if not param.requires_grad:
                    continue
                out += [value.data_ptr() for value in state.get(param, {}).values() if isinstance(value, torch.Tensor)]
                if not first and param.grad is not None:
                    out.append(param.grad.data_ptr())
        return tuple(out)


def _rate(group: dict[str, Any], device: torch.device) -> torch.Tensor:
    """A learning rate as kernels read it: fused SGD in single precision, Adam in that of its parameters."""
    double = "capturable" in group and any(param.dtype == torch.float64 for param in group["params"])
    return torch.as_tensor(group["lr"], dtype=torch.float64 if double else torch.float32, device=device).clone()


def _counts(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For every count of steps that an optimizer keeps on the CPU for what trains, one on the parameter's device."""
    out = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            count = optimizer.state.get(param, {}).get("step")
            if param.requires_grad and isinstance(count, torch.Tensor) and count.device != param.device:
                out.append((count, count.to(param.device)))
    return out


@contextmanager
def _telling_of_waits(device: torch.device) -> Iterator[None]:
    """Inside, PyTorch warns where the CPU waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    was = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(was)


@contextmanager
def _undone_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A capture that comes to nothing leaves gradients and optimizer state as they were: what it made holds no numbers."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    states = {param: dict(state) for param, state in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for param in [*optimizer.state]:
            if param not in states:
                del optimizer.state[param]
            elif isinstance(optimizer.state[param], dict):
                optimizer.state[param].clear()
                optimizer.state[param].update(states[param])
        raise


@contextmanager
def _capturable(
    optimizer: torch.optim.Optimizer, rates: list[torch.Tensor], counts: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Inside, the optimizer's step reads its learning rates and its counts of steps from the device."""
    twins = {id(users): kernels for users, kernels in counts}
    swapped = [
        (state, state["step"])
        for state in optimizer.state.values()
        if isinstance(state, dict) and id(state.get("step")) in twins
    ]
    was = [dict(group) for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = rate.is_cuda
            elif rate.is_cuda:  # SGD reads a rate from memory in its fused form alone
                group["fused"], group["foreach"] = True, False
        for state, count in swapped:
            state["step"] = twins[id(count)]
        yield
    finally:
        for group, before in zip(optimizer.param_groups, was, strict=True):
            for name in ("lr", "capturable", "fused", "foreach"):
                if name in before:
                    group[name] = before[name]
        for state, count in swapped:
            state["step"] = count


def _outline(batch: Any) -> Hashable:
    """A batch without its numbers: its structure, the shape and kind of each tensor, and all that is no tensor by value."""
    if isinstance(batch, torch.Tensor):
        if batch.layout != torch.strided or type(batch) not in (torch.Tensor, nn.Parameter):
            raise Refused(f"the batch holds a {type(batch).__name__} that is no ordinary tensor")
        return tuple(batch.shape), batch.dtype, batch.stride(), batch.requires_grad
    if batch is None or isinstance(batch, (int, float, str, bytes)):
        return batch
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, _outline(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return type(batch), tuple(_outline(value) for value in batch)
    held = getattr(batch, "__dict__", None)
    if held:
        return type(batch), tuple((name, _outline(value)) for name, value in held.items())
    raise Refused(f"the batch holds a {type(batch).__name__}, which may change unseen")


def _python_state(of: list[nn.Module], loss: Any) -> dict[str, Any]:
    """What modules and the loss hold in Python, as far as it can be compared cheaply: plain values, lengths, which tensors."""
    out: dict[str, Any] = {}

    def note(owner: str, held: Mapping[str, Any]) -> None:
        for name, value in held.items():
            if isinstance(value, _NUMBERS):
                out[f"{owner}.{name}"] = value
            elif isinstance(value, torch.Tensor):
                out[f"{owner}.{name}"] = id(value)
            elif isinstance(value, (list, dict, set)) or type(value).__name__ == "deque":
                out[f"{owner}.{name}"] = len(value)

    for i, module in enumerate(of):
        note(f"{type(module).__name__} {i}", {name: value for name, value in module.__dict__.items() if name[0] != "_"})
    function = getattr(loss, "__func__", loss)
    for owner in (getattr(loss, "__self__", None), loss):
        if owner is not None and not isinstance(owner, nn.Module):
            note("the loss", getattr(owner, "__dict__", {}))
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    note("the loss", {name: _content(cell) for name, cell in zip(names, cells, strict=True)})
    return out


def _numbers_of(loss: Any) -> tuple[Any, ...]:
    """Plain values that a loss reads from around it."""
    cells = getattr(getattr(loss, "__func__", loss), "__closure__", None) or ()
    held = [_content(cell) for cell in cells]
    for owner in (getattr(loss, "__self__", None), loss):
        if owner is not None and not isinstance(owner, nn.Module):
            held += getattr(owner, "__dict__", {}).values()
    return tuple([value for value in held if isinstance(value, _NUMBERS)])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
