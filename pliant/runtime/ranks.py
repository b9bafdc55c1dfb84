"""Several processes that train one model: what each measures is combined, one decides, and all do the same.

Every process runs the same code. Whatever may differ between them (seconds, batches, values) passes through here first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pliant.runtime.torch_internals import active_ddp, is_sharded

T = TypeVar("T")
_ROUNDING = 1e-9  # relative: what sums of equal gradients may differ by
_FOREIGN = {"deepspeed": "DeepSpeed", "fairscale": "FairScale"}  # packages whose wrappers take over the optimizer's step


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The model itself, and the DDP that wraps it, if one does. Other wrappers are refused."""
    if isinstance(model, DistributedDataParallel):
        return unwrapped(model.module)[0], model
    package = type(model).__module__.partition(".")[0]
    if isinstance(model, DataParallel) or package in _FOREIGN or type(model).__name__ == "FullyShardedDataParallel":
        kind = _FOREIGN.get(package, type(model).__name__)
        raise ValueError(
            f"the model is wrapped by {kind}, which does not let a selection change. Give the model itself, or wrap it in "
            f"DistributedDataParallel(model, find_unused_parameters=True), or shard it with fully_shard (FSDP2)."
        )
    return model, None


class Ranks:
    """The processes that train one model together, or this one alone.

    >>> Ranks.of(nn.Linear(2, 2)).is_alone
    True
    """

    def __init__(self, ddp: DistributedDataParallel | None = None, shards: bool = False) -> None:
        """`shards`: parameters are spread over the processes (FSDP2)."""
        self.ddp, self.shards, self.is_checked = ddp, shards, False
        self._group: Any = None  # of this model's processes; messages go through main memory, so that no GPU waits
        self._tensors: Any = None
        if (ddp is not None or shards) and dist.get_world_size(_group_of(ddp)) > 1:
            self._tensors = _group_of(ddp)
            self._group = dist.new_group(dist.get_process_group_ranks(self._tensors), backend="gloo")

    @classmethod
    def of(cls, model: nn.Module, ddp: DistributedDataParallel | None = None) -> Ranks:
        """The processes of a model that may be wrapped by DDP, or sharded."""
        spread: list[Any] = [param for param in model.parameters() if is_sharded(param)]
        if any(param.device_mesh.ndim > 1 or not param.placements[0].is_shard() for param in spread):
            raise ValueError(
                "some parameters are spread in more than one way (tensor parallel, or sharded and replicated): only those of "
                "fully_shard over a mesh of one dimension can be chosen."
            )
        return cls(ddp, bool(spread))

    @property
    def is_alone(self) -> bool:
        return self._group is None

    @property
    def is_first(self) -> bool:
        """Whether this process decides, and writes the log."""
        return self._group is None or dist.get_rank(self._group) == 0

    # ------------------------------------------------------------ messages

    def first(self, make: Callable[[], T]) -> T:
        """What the first process makes of this, for all of them. An error there is raised in all of them."""
        if self._group is None:
            return make()
        message: list[Any] = [None]
        if self.is_first:
            try:
                message = [(make(), None)]
            except Exception as error:
                message = [(None, error)]
        dist.broadcast_object_list(message, group=self._group, group_src=0)
        made, failed = message[0]
        if failed is not None:
            raise failed
        return made

    def each(self, make: Callable[[], T]) -> list[T]:
        """What every process makes of this. An error in any of them is raised in all of them."""
        if self._group is None:
            return [make()]
        try:
            mine: tuple[Any, Exception | None] = make(), None
        except Exception as error:
            mine = None, error
        all_of_them: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(all_of_them, mine, group=self._group)
        for _, failed in all_of_them:
            if failed is not None:
                raise failed
        return [made for made, _ in all_of_them]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The longest of each, over all processes: a step is over when it is over everywhere."""
        if self._group is None:
            return list(seconds)
        return [max(several) for several in zip(*self.each(lambda: list(seconds)), strict=False)]

    def largest(self, number: int) -> int:
        return number if self._group is None else max(self.each(lambda: number))

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of values that each process has a share of, the whole; where all have the whole, that."""
        several = self.each(lambda: dict(values))
        if not self.shards:
            return several[0]
        return {name: sum(one.get(name, 0.0) for one in several) for name in several[0]}

    # ------------------------------------------------------------ tensors

    def average_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, in place."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._tensors)
            tensor /= dist.get_world_size(self._group)
        return tensor

    def average_gradients_(self, tensors: Iterable[torch.Tensor]) -> None:
        """The gradients of these tensors become their mean over all processes."""
        for tensor in tensors if self._group is not None else ():
            tensor.grad = self.average_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def check_gradients(self, params: Mapping[str, nn.Parameter], chosen: Collection[str]) -> None:
        """An error where processes hold different gradients: they were not averaged, and weights would drift apart.

        Once for each selection (`is_checked`), as soon as there are gradients.
        """
        if self._group is None or self.shards or self.is_checked:
            return
        mine = {name: _print_of(params[name].grad) for name in sorted(chosen)}
        for other in self.each(lambda: mine):
            wrong = next((name for name in mine if not _is_alike(other.get(name), mine[name])), None)
            if wrong is not None:
                raise RuntimeError(
                    f"the gradient of {wrong!r} differs between processes: DistributedDataParallel does not average it. Wrap "
                    f"the model while all its parameters are trainable, with find_unused_parameters=True."
                )
        self.is_checked = any(one is not None for one in mine.values())

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        """Around one batch of a step: DDP averages gradients with the `last` one."""
        return nullcontext() if last or self.ddp is None else self.ddp.no_sync()

    # ------------------------------------------------------------ wrong use

    def check_selection(self, everything: bool) -> None:
        """An error where DDP expects a gradient of every parameter, and some are frozen."""
        if self.ddp is None or everything:
            return
        if self.ddp.static_graph:
            raise ValueError(
                "DistributedDataParallel was built with static_graph=True, which does not let a selection change. Leave it "
                "out, and give find_unused_parameters=True."
            )
        if not self.ddp.find_unused_parameters:
            raise ValueError(
                "DistributedDataParallel was built with find_unused_parameters=False: it waits for the gradients of frozen "
                "parameters. Give find_unused_parameters=True (Trainer: ddp_find_unused_parameters=True; Lightning: "
                "strategy='ddp_find_unused_parameters_true')."
            )

    @property
    def may_be_wrapped(self) -> bool:
        """Whether a DDP may run the model that the session was not told of."""
        here = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return here and self.ddp is None and not self.shards

    def check_forward(self) -> None:
        """Called inside a forward pass: an error where a DDP runs it that the session was not told of."""
        if self.ddp is None and active_ddp() is not None:
            raise RuntimeError(
                "DistributedDataParallel runs this model, and the session was opened on the model itself: each process would "
                "choose for itself. Give the session the wrapped model: Session(ddp, …)."
            )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a tensor that is spread over several; any other tensor as it is."""
    spread: Any = tensor
    return spread.to_local() if is_sharded(tensor) else tensor


def _group_of(ddp: DistributedDataParallel | None) -> Any:
    return ddp.process_group if ddp is not None else dist.group.WORLD


def _print_of(grad: torch.Tensor | None) -> list[float] | None:
    """A few numbers that equal gradients share, and others hardly."""
    if grad is None:
        return None
    flat = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
    return [float(flat.double().sum()), float(flat.double().abs().sum())]


def _is_alike(one: list[float] | None, other: list[float] | None) -> bool:
    """Up to rounding, which depends on the number of threads. A gradient that is not finite is so everywhere, or differs."""
    if one is None or other is None:
        return one is other
    if not all(map(math.isfinite, (*one, *other))):
        return math.isfinite(one[1]) == math.isfinite(other[1])
    return all(abs(a - b) <= _ROUNDING * other[1] for a, b in zip(one, other, strict=True))
