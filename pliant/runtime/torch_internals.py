"""Every private symbol of PyTorch that the library uses, so that one file shows what a new version may break."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as _optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _checkpoint_hook as CheckpointHooks

__all__ = [
    "GLOBAL_FORWARD_HOOKS",
    "GLOBAL_HOOKS",
    "BatchNormBase",
    "CheckpointHooks",
    "NormBase",
    "SavedTensorHooks",
    "TorchDispatchMode",
    "active_ddp",
    "add_to_each_",
    "class_name",
    "clear_cublas_workspaces",
    "is_any_autocast_enabled",
    "is_compiled",
    "is_sharded",
    "is_transformed",
    "next_nodes",
    "next_sequence_number",
    "norms",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "recompile_limit",
    "reshard_",
    "saved_tensor_hooks",
    "tree_leaves",
    "unsharded",
    "uses_onednn",
    "version",
    "without_dynamo",
    "without_function_modes",
    "would_run",
]

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Like the context `torch.autograd.graph.saved_tensors_hooks`, at a tenth of its time.
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = torch._C._autograd._pop_saved_tensors_default_hooks

# A context in which no torch function mode is called.
without_function_modes = torch._C.DisableTorchFunction

# Decorates what `torch.compile` must not look into. Unlike `torch.compiler.disable`, it imports dynamo when it is called.
without_dynamo = _disable_dynamo

# Whether autocast is on for any device; True where PyTorch cannot tell.
is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

# The hooks that are called for every module and every optimizer.
GLOBAL_FORWARD_HOOKS = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
GLOBAL_HOOKS = (
    *GLOBAL_FORWARD_HOOKS,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
    _optimizers._global_optimizer_pre_hooks,
    _optimizers._global_optimizer_post_hooks,
)

# Operations on lists of tensors, one kernel for all.
add_to_each_ = torch._foreach_add_
norms = torch._foreach_norm


def saved_tensor_hooks() -> SavedTensorHooks | None:
    """The innermost hooks on saved tensors; None if there are none, or if PyTorch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def version(tensor: torch.Tensor) -> int:
    """How often it was written in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined,no-any-return]


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a transform of torch.func is active."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def would_run(node: Any) -> bool:
    """Whether the backward pass that runs now will run this autograd node."""
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]


def uses_onednn(convolution: Sequence[Any]) -> bool:
    """Whether oneDNN computes a convolution with these arguments (those of `torch.ops.aten.convolution`)."""
    try:
        return str(torch._C._select_conv_backend(*convolution)).endswith("Mkldnn")
    except (AttributeError, RuntimeError, TypeError):
        return False


def clear_cublas_workspaces() -> None:
    """Free the memory that cuBLAS holds as workspaces."""
    torch._C._cuda_clearCublasWorkspaces()


def is_compiled(code: Any) -> bool:
    """Whether a module or a function is one that `torch.compile` made, or a module was compiled in place."""
    return hasattr(code, "get_compiler_config") or getattr(code, "_compiled_call_impl", None) is not None


def recompile_limit() -> int:
    """How often code is compiled; whatever else comes after that runs as it was written."""
    return int(torch._dynamo.config.recompile_limit)  # type: ignore[attr-defined]


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward pass runs now; None where none does."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over several processes, as `fully_shard` does it. (To import its class takes long.)"""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def class_name(module: nn.Module) -> str:
    """The class of a module as its author named it: `fully_shard` makes another one of it."""
    return type(module).__mro__[2 if hasattr(module, "_get_fsdp_state") else 0].__name__


def reshard_(model: nn.Module) -> None:
    """Let `fully_shard` free whole parameters that it still holds: the next pass gathers them, and sees which are trainable."""
    if any(map(is_sharded, model.parameters())):
        for module in model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()


def next_nodes(node: Any) -> list[Any]:
    """The autograd nodes that a node hands its gradients to; those of `fully_shard`, which only watch, are passed over."""
    found = []
    for following, index in node.next_functions:
        while type(following).__name__.startswith("RegisterPostBackward"):
            following, index = following.next_functions[index]
        found.append(following)
    return found


def unsharded(model: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """These parameters as backward passes see them: of those that `fully_shard` has spread, the whole ones. A forward pass must
    have run."""
    whole = {}
    for module in model.modules() if any(map(is_sharded, params.values())) else ():
        find: Any = getattr(module, "_get_fsdp_state", None)
        state = find() if find is not None else None
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            for one in group.fsdp_params if group is not None else ():
                whole[one.sharded_param] = getattr(one, "_unsharded_param", one.sharded_param)
    return {name: whole.get(param, param) for name, param in params.items()}
