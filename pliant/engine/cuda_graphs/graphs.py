"""A step on a GPU as one launch: captured once for each kind of step, replayed from then on; or the reason why not."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pliant.engine.cuda_graphs.capture_key import Baked, Refused
from pliant.engine.cuda_graphs.optimizer_scalars import Twins
from pliant.engine.derived_weights import AllMade, Made
from pliant.runtime.batches import Loss, map_tensors, tensors
from pliant.runtime.clock import undisturbed
from pliant.runtime.torch_internals import clear_cublas_workspaces

Work = Callable[[Any], torch.Tensor]  # a batch → its loss, detached; backward and, where due, the optimizer's step are done
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]

_KEPT = 8  # captured steps
_MOST_FAILURES = 3
_WAITS = "called a synchronizing"  # how PyTorch tells of it


class OnCuda:
    """Captures what `work` launches, on a stream of its own, into memory that all captures share: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.renew()

    def renew(self) -> None:
        """What is captured from now on takes other memory: the old one is free once nothing that was captured is left."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        numbers = torch.cuda.default_generators[self._device.index or 0]
        drawn = numbers.clone_state()
        self._stream.wait_stream(current)
        torch.cuda.synchronize(self._device)
        # What cuBLAS once took for a stream it keeps: memory of others that would be baked in, or ours, which it would hold.
        clear_cublas_workspaces()
        with torch.cuda.stream(self._stream), undisturbed():  # an old graph that is freed meanwhile breaks a capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # loaders may pin memory meanwhile
            try:
                value = work()
                graph.capture_end()
            except BaseException:
                self.renew()
                with suppress(RuntimeError):  # it was invalid already
                    graph.capture_end()
                numbers.graphsafe_set_state(drawn)  # else it takes itself to be in the capture still
                raise
            finally:
                clear_cublas_workspaces()
        current.wait_stream(self._stream)
        self._multiply()
        return graph.replay, value

    def _multiply(self) -> None:
        """There and back, so that cuBLAS takes what it needs for eager steps now, and not in one whose memory is measured."""
        with torch.enable_grad(), suppress(RuntimeError):  # where only what is deterministic may run
            one = torch.ones(1, 1, device=self._device, requires_grad=True)
            torch.autograd.grad(one @ one, one)


@dataclass
class _Captured:
    replay: Callable[[], None]
    value: torch.Tensor
    batch: Any  # what the kernels read
    grads: list[tuple[nn.Parameter, torch.Tensor]]
    twins: Twins  # the rates and counts that the kernels read
    writes: list[torch.Tensor]
    at: tuple[int, ...]  # addresses that are baked in
    made: AllMade  # of weights, and read by the kernels


class Graphs:
    """Takes steps: eagerly at first, then captured, each kind of step on its own.

    At small batches a GPU waits for its kernels to be launched one by one. A step that was captured (`torch.cuda.CUDAGraph`)
    launches all of them at once. A replay runs no Python: where Python has something to do in a step (hooks, a loss that
    counts), steps stay eager, and `why_not` tells the reason.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, capture: Capture | None = None) -> None:
        self.why_not: str | None = None  # the last reason for an eager step, other than that it was the first of its kind
        self._optimizer = optimizer
        self._baked = Baked(model, loss, optimizer)
        self._device = next(model.parameters()).device
        self._capture = capture or OnCuda(self._device)
        self._known: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: set[Hashable] = set()  # kinds of steps that may be captured
        self._waited: set[Hashable] = set()
        self._failures: dict[Hashable, str] = {}
        self.captures = self.replays = 0
        self._preparing = 0.0  # seconds of the steps that were not replays

    @property
    def seconds_per_capture(self) -> float:
        """What the first steps of a kind take until it is captured; 0 before anything was."""
        return self._preparing / self.captures if self.captures else 0.0

    def step(
        self,
        batch: Any,
        work: Work,
        *,
        choice: Hashable,
        first: bool = True,
        prepare: Callable[[], Sequence[Made]] = tuple,
        is_tight: bool = False,
    ) -> torch.Tensor:
        """`work(batch)`, by replay where such a step was captured.

        `choice` stands for what trains and for all else that the caller's work hangs on; `first` says that gradients start
        from nothing. `prepare` comes before a capture and gives what the work uses that is made of weights once: the captured
        step holds on to it and sees to it that it is made of the weights as they are. Where memory `is_tight`, no captured
        step is held while an eager one runs.
        """
        key = captured = None
        start, before = time.monotonic(), self.captures
        try:
            key = self._key(batch, choice, first)
            captured = self._known.get(key)
            moved = captured is not None and captured.at != self._baked.addresses(first)  # state was loaded, a weight replaced
            if moved or (captured is None and key in self._seen):
                captured = self._capture_step(batch, work, key, first, prepare)
        except Refused as why:
            captured, self.why_not = None, str(why)
        if captured is None:  # outside of the handler, which would keep the autograd graph of a failed capture alive
            if is_tight and first:
                self.make_room()
            for other in self._known.values():
                other.twins.hold_counts = False
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
            self._baked.refuse()
        except Refused as why:
            return str(why)
        return None

    def forget(self) -> None:
        """Capture anew."""
        self._let_go()
        self._seen.clear()
        self._waited.clear()
        self._failures.clear()

    def make_room(self) -> None:
        """Let go of captured steps and of the memory that they hold; the next one of a kind captures it anew."""
        if self._known:
            self._let_go()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _let_go(self) -> None:
        """Of all captured steps; PyTorch refuses to capture into memory that no graph is left of."""
        self._known.clear()
        if isinstance(self._capture, OnCuda):
            self._capture.renew()

    def _watched(self, batch: Any, work: Work, key: Hashable) -> torch.Tensor:
        """An eager step, the first of its kind, that tells whether Python has a part in it."""
        before = self._baked.python_state()
        there = map_tensors(batch, lambda tensor: tensor.to(self._device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _telling_of_waits(self._device):
                value = work(there)
        after = self._baked.python_state()
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
        at = self._baked.addresses(first)
        static = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device=self._device).copy_(tensor))
        twins = Twins(self._optimizer, self._device)
        torch.clear_autocast_cache()  # casts from before would be baked in
        try:
            with _undone_on_error(self._optimizer):
                with twins.standing_in():
                    replay, value = self._capture(lambda: work(static))
                if self._baked.addresses(first) != at:
                    raise RuntimeError("a step replaces parameters, buffers or optimizer state")
        except (RuntimeError, ValueError, AssertionError) as error:
            self._let_go()  # they draw random numbers from a generator that the failure has left behind
            self._failures[key] = f"capture failed: {str(error).strip().splitlines()[0]}"
            raise Refused(self._failures[key]) from None
        finally:
            torch.clear_autocast_cache()
        twins.keep_used()
        grads = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        captured = self._known[key] = _Captured(replay, value, static, grads, twins, self._baked.writes(), at, AllMade(made))
        self.captures += 1
        while len(self._known) > _KEPT:
            old, _ = self._known.popitem(last=False)
            self._seen.discard(old)
        return captured

    def _replay(self, captured: _Captured, batch: Any) -> torch.Tensor:
        self.why_not = None
        for static, given in zip(tensors(captured.batch), tensors(batch), strict=True):
            static.copy_(given, non_blocking=True)
        captured.twins.refresh_rates()
        if not captured.twins.hold_counts:
            for other in self._known.values():
                other.twins.hold_counts = other is captured
            captured.twins.refresh_counts()
        captured.made.refresh()
        captured.replay()
        torch.autograd.graph.increment_version(captured.writes)  # as eager steps do: others watch for it
        self.replays += 1
        captured.twins.count()
        for param, grad in captured.grads:
            param.grad = grad
        return captured.value.clone()

    def _key(self, batch: Any, choice: Hashable, first: bool) -> Hashable:
        """The kind of this step; refuses what Python would have to do, and what failed before."""
        self._baked.refuse()
        if len(self._failures) >= _MOST_FAILURES:
            raise Refused(next(iter(self._failures.values())))
        key = self._baked.key(batch, choice, first)
        if key in self._failures:
            raise Refused(self._failures[key])
        return key


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
