"""CUDA graphs: a step as one launch, captured once for each kind of step and replayed from then on; or the reason why not."""

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

from pliant.core.errors import first_line
from pliant.engine.cuda_graphs.capture_key import CaptureKey, Refused
from pliant.engine.cuda_graphs.optimizer_scalars import OptimizerScalars
from pliant.engine.derived_weights import AllDerived, Derived
from pliant.runtime.batches import Loss, map_tensors, tensors
from pliant.runtime.clock import undisturbed
from pliant.runtime.optimizer_step import Update
from pliant.runtime.torch_internals import clear_cublas_workspaces

Work = Callable[[Any], torch.Tensor]  # a batch → its detached loss, after backward and, if due, the optimizer's step
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]

_KEPT = 8  # captured steps
_MOST_FAILURES = 3
_WAITS = "called a synchronizing"  # from PyTorch's warning


class OnCuda:
    """Captures what `work` launches, on a stream of its own, into memory that all captures share: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.renew()

    def renew(self) -> None:
        """Later captures use new memory; the old memory is freed with the last graph that uses it."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        numbers = torch.cuda.default_generators[self._device.index or 0]
        drawn = numbers.clone_state()
        self._stream.wait_stream(current)
        torch.cuda.synchronize(self._device)
        # cuBLAS keeps a workspace for each stream. The graph would use that memory, or cuBLAS would hold on to the graph's.
        clear_cublas_workspaces()
        with torch.cuda.stream(self._stream), undisturbed():  # freeing an old graph would break the capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # loaders may pin memory meanwhile
            try:
                value = work()
                end_capture(graph)
            except BaseException:
                self.renew()
                with suppress(RuntimeError):  # it was already invalid
                    end_capture(graph)
                numbers.graphsafe_set_state(drawn)  # else the generator stays in capture mode
                raise
            finally:
                clear_cublas_workspaces()
        current.wait_stream(self._stream)
        self._multiply()
        return graph.replay, value

    def _multiply(self) -> None:
        """One product and its gradient: cuBLAS allocates its workspace now, not in a step whose memory is measured."""
        with torch.enable_grad(), suppress(RuntimeError):  # deterministic algorithms may be required
            one = torch.ones(1, 1, device=self._device, requires_grad=True)
            torch.autograd.grad(one @ one, one)


def end_capture(graph: torch.cuda.CUDAGraph) -> None:
    """Where the work failed at once, the graph is empty, and PyTorch warns. `why_not` says more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


@dataclass
class _Captured:
    replay: Callable[[], None]
    value: torch.Tensor
    batch: Any  # what the kernels read
    grads: list[tuple[nn.Parameter, torch.Tensor]]
    scalars: OptimizerScalars  # that the kernels read
    writes: list[torch.Tensor]
    at: tuple[int, ...]  # addresses that the kernels use
    derived: AllDerived  # tensors computed from weights that the kernels read


class Graphs:
    """Runs steps: eagerly at first, then captured, separately for each kind of step.

    With small batches a GPU waits for its kernels to be launched one by one. A captured step (`torch.cuda.CUDAGraph`) launches
    all of them at once. A replay runs no Python: if a step needs Python (hooks, a loss that counts), steps stay eager, and
    `why_not` holds the reason.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, capture: Capture | None = None) -> None:
        self.why_not: str | None = None  # the last reason for an eager step, other than that it was the first of its kind
        self._optimizer = optimizer
        self._capture_key = CaptureKey(model, loss, optimizer)
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
        """How long the first steps of a kind take until it is captured; 0 before the first capture."""
        return self._preparing / self.captures if self.captures else 0.0

    def step(
        self,
        batch: Any,
        work: Work,
        *,
        choice: Hashable,
        first: bool = True,
        prepare: Callable[[], Sequence[Derived]] = tuple,
        is_tight: bool = False,
    ) -> torch.Tensor:
        """`work(batch)`, by replay if such a step was captured.

        `choice` identifies what trains and everything else that the work depends on. `first`: there are no gradients yet.
        `prepare` runs before a capture and gives the derived tensors that the work reads: the captured step refreshes them
        before each replay. If memory `is_tight`, no captured step is held while an eager one runs.
        """
        key = captured = None
        start, before = time.monotonic(), self.captures
        try:
            key = self._key(batch, choice, first)
            captured = self._known.get(key)
            # Where state was loaded, or a weight replaced:
            moved = captured is not None and captured.at != self._capture_key.addresses(first)
            if moved or (captured is None and key in self._seen):
                captured = self._capture_step(batch, work, key, first, prepare)
        except Refused as why:
            captured, self.why_not = None, str(why)
        if captured is None:  # not in the handler, which keeps the autograd graph of a failed capture alive
            if is_tight and first:
                self.make_room()
            for other in self._known.values():
                other.scalars.hold_counts = False
            value = work(batch) if key is None or key in self._failures else self._watched(batch, work, key)
        else:
            self._known.move_to_end(key)
            value = self._replay(captured, batch)
        if self.captures > before or (captured is None and key is not None and key not in self._failures):
            self._preparing += time.monotonic() - start
        return value

    @property
    def refusal(self) -> str | None:
        """Why no step at all can be captured, if that is known in advance."""
        try:
            self._capture_key.refuse()
        except Refused as why:
            return str(why)
        return None

    def forget(self) -> None:
        """Drop everything: steps are captured again."""
        self._release()
        self._seen.clear()
        self._waited.clear()
        self._failures.clear()

    def make_room(self) -> None:
        """Release captured steps and their memory; the next step of a kind is captured again."""
        if self._known:
            self._release()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _release(self) -> None:
        """Release all captured steps. PyTorch cannot capture into the pool of released graphs, so take a new one."""
        self._known.clear()
        if isinstance(self._capture, OnCuda):
            self._capture.renew()

    def _watched(self, batch: Any, work: Work, key: Hashable) -> torch.Tensor:
        """An eager step, the first of its kind, that shows whether the step needs Python."""
        before = self._capture_key.python_state()
        there = map_tensors(batch, lambda tensor: tensor.to(self._device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _warn_of_synchronization(self._device):
                value = work(there)
        after = self._capture_key.python_state()
        changed = [name for name in {**before, **after} if before.get(name, self) != after.get(name, self)]
        if changed:
            self._failures[key] = f"a step changes {changed[0]}, which a replay would not"
        waits = [warning for warning in caught if _WAITS in str(warning.message)]
        if not waits:
            self._seen.add(key)
        elif key in self._waited:  # the first time may be due to initialisation
            where = f"{Path(waits[0].filename).name}, line {waits[0].lineno}"
            self._failures[key] = f"a step waits for the GPU (.item(), a copy to the CPU, …) in {where}"
        else:
            self._waited.add(key)
        for warning in caught:
            if warning not in waits and "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return value

    def _capture_step(
        self, batch: Any, work: Work, key: Hashable, first: bool, prepare: Callable[[], Sequence[Derived]]
    ) -> _Captured:
        derived = prepare()
        at = self._capture_key.addresses(first)
        static = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device=self._device).copy_(tensor))
        scalars = OptimizerScalars(self._optimizer, self._device)
        torch.clear_autocast_cache()  # earlier casts would be captured
        try:
            with _undone_on_error(self._optimizer):
                with scalars.swapped_in():
                    replay, value = self._capture(lambda: work(static))
                if self._capture_key.addresses(first) != at:
                    raise RuntimeError("a step replaces parameters, buffers or optimizer state")
        except (RuntimeError, ValueError, AssertionError) as error:
            self._release()  # their random generator is invalid after the failure
            self._failures[key] = f"capture failed: {first_line(error)}"
            raise Refused(self._failures[key]) from None
        finally:
            torch.clear_autocast_cache()
        scalars.keep_used()
        grads = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        captured = self._known[key] = _Captured(
            replay, value, static, grads, scalars, self._capture_key.writes(), at, AllDerived(derived)
        )
        self.captures += 1
        while len(self._known) > _KEPT:
            old, _ = self._known.popitem(last=False)
            self._seen.discard(old)
        return captured

    def _replay(self, captured: _Captured, batch: Any) -> torch.Tensor:
        self.why_not = None
        for static, given in zip(tensors(captured.batch), tensors(batch), strict=True):
            static.copy_(given, non_blocking=True)
        captured.scalars.refresh_rates()
        if not captured.scalars.hold_counts:
            for other in self._known.values():
                other.scalars.hold_counts = other is captured
            captured.scalars.refresh_counts()
        captured.derived.refresh()
        captured.replay()
        torch.autograd.graph.increment_version(captured.writes)  # as eager steps do: version counters tell of changes
        self.replays += 1
        captured.scalars.count()
        for param, grad in captured.grads:
            param.grad = grad
        return captured.value.clone()

    def _key(self, batch: Any, choice: Hashable, first: bool) -> Hashable:
        """The kind of this step; refuses steps that need Python, and those that failed before."""
        self._capture_key.refuse()
        if len(self._failures) >= _MOST_FAILURES:
            raise Refused(next(iter(self._failures.values())))
        key = self._capture_key.key(batch, choice, first)
        if key in self._failures:
            raise Refused(self._failures[key])
        return key


@contextmanager
def _warn_of_synchronization(device: torch.device) -> Iterator[None]:
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
    """A failed capture leaves gradients and optimizer state unchanged: what it created holds no values."""
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


def why_no_capture(graphs: Graphs | None, update: Update, is_random: bool, is_sliced: bool) -> str | None:
    """Why no step can be captured, as far as is known before one is tried. `is_random`: which layers run may differ from step
    to step; `is_sliced`: channels are chosen."""
    if graphs is None:
        return "there is no CUDA device"
    if update.reads_gradients:
        return f"{'on_nan' if update.scaler is None else 'a GradScaler'} reads every step's gradients"
    if is_random:
        return "which layers run may be random"
    return "channels are chosen" if is_sliced else graphs.refusal
