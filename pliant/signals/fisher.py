"""The Fisher potential of every module's output, read with hooks during the passes of a probe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from pliant.runtime import batches
from pliant.runtime.batches import Pieces

OnGrad = Callable[[str, torch.Tensor], None]
# Runs a forward and a backward pass on a batch; hands over gradients; backward goes as far as the tensors of the last argument.
Stream = Callable[[Any, OnGrad, Callable[[], list[torch.Tensor]]], None]

# Modules whose output depends on their own parameters: channels second, or channels last.
_CHANNELS_SECOND = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_LAYERS = (*_CHANNELS_SECOND, nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


def potentials(
    model: nn.Module,
    names: Collection[str],
    params: Mapping[str, nn.Parameter],
    pieces: Pieces,
    scale: float,
    stream: Stream,
) -> dict[str, torch.Tensor]:
    """The potential per output channel of each module with parameters among `names`, under the name of its first one.

    One pass per piece squares Σ a·g per sample and channel at the module's output; g is the gradient of the whole set's loss,
    so pieces of any size add up to the same. Gradients of the modules' own parameters are not computed: backward goes as far
    as the smallest parameter of each module that comes first. `params` are those of this window; others are left out.
    """
    share, name_of = 1 / len(pieces), {param: name for name, param in model.named_parameters() if name in names}
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, _LAYERS) or _is_product(module)]
    own = {module: [name_of[p] for p in module._parameters.values() if p in name_of] for module in layers}
    own = {module: mine for module, mine in own.items() if any(name in params for name in mine)}
    sums: dict[nn.Module, torch.Tensor] = {}  # of one piece: (samples, channels), over all uses of the module
    squares: dict[nn.Module, torch.Tensor] = {}  # of all pieces: (channels,)
    counts: dict[nn.Module, int] = {}  # samples in them
    along: dict[str, torch.Tensor] = {}  # w·g, of parameters that no module's output shows
    through_modules: set[str] = set()
    first: set[str] = set()  # parameters of modules with nothing trainable before them
    clean: set[Any] = set()  # autograd nodes with no parameter behind them
    samples = 0

    def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
        out = next(batches.tensors(output), None)
        if out is None or not out.requires_grad or out.dim() < 2:
            return
        if not isinstance(module, _LAYERS) and out.shape[-1] != module._parameters["weight"].shape[1]:  # type: ignore[union-attr]
            return  # not a product with a matrix of inputs × outputs
        through_modules.update(own[module])
        if not any(_depends_on_parameter(given, clean) for given in batches.tensors(inputs)):
            first.add(min((name for name in own[module] if name in params), key=lambda name: params[name].numel()))
        if own[module][0] not in params:  # another window's
            return
        activation = out.detach().clone()  # a copy: what follows may work in place

        def on_out_grad(grad: torch.Tensor) -> None:
            product = (activation.conj() * grad * (share / scale)).real.float().movedim(_channel_dim(module, activation), 1)
            per_channel = product.reshape(product.shape[0], product.shape[1], -1).sum(dim=2)
            sums[module] = sums[module] + per_channel if module in sums else per_channel

        out.register_hook(on_out_grad)

    def on_grad(name: str, grad: torch.Tensor) -> None:
        if name not in through_modules:
            product = (params[name].detach().conj() * grad).real.float().reshape(grad.shape[0] if grad.dim() else 1, -1)
            along[name] = along.get(name, 0) + share * product.sum(dim=1)

    def into() -> list[torch.Tensor]:
        return [param for name, param in params.items() if name in first or name not in through_modules]

    handles = [module.register_forward_hook(on_output) for module in own]
    try:
        for piece in pieces:
            samples += batches.size(piece) or 1
            stream(piece, on_grad, into)
            for module, total in sums.items():
                squares[module] = squares.get(module, 0) + total.square().sum(dim=0)
                counts[module] = counts.get(module, 0) + total.shape[0]
            sums.clear()
            clean.clear()
    finally:
        for handle in handles:
            handle.remove()
    out = {name: product.square() / (2 * samples**2) for name, product in along.items()}
    for module, square in squares.items():
        potential, weight = square / (2 * counts[module]), params[own[module][0]]
        if not isinstance(module, _LAYERS) and weight.dim() == 2:  # outputs are its second dimension
            potential = (potential / weight.shape[0]).expand(weight.shape)
        out[own[module][0]] = potential
    return out


def _depends_on_parameter(tensor: torch.Tensor, clean: set[Any]) -> bool:
    """Whether gradients flow from a tensor to some parameter, and not only to an input that requires one.

    `clean` collects autograd nodes of which it is known that they do not, for the next call.
    """
    if tensor.grad_fn is None:
        return tensor.requires_grad and isinstance(tensor, nn.Parameter)
    stack: list[Any] = [tensor.grad_fn]
    seen = {tensor.grad_fn}
    while stack:
        node = stack.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        following = {one for one, _ in node.next_functions if one is not None} - seen - clean
        seen |= following
        stack += following
    clean |= seen
    return False


def _is_product(module: nn.Module) -> bool:
    """Whether this may be a linear layer of another class: it has a matrix `weight`, and no modules of its own."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not module._modules


def _channel_dim(module: nn.Module, out: torch.Tensor) -> int:
    return 1 if isinstance(module, _CHANNELS_SECOND) else out.dim() - 1
