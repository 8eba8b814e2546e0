"""Everything private in torch that the package uses, each with the reason.

No other module names a private part of torch. tests/tensors/test_torch_private.py checks every
name, so that a torch release that drops one fails there and says what depends on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "ATTRIBUTES",
    "CLIP_NORM",
    "COMPILED_CALL",
    "MKLDNN",
    "NEXT_INDEX",
    "LoaderIterator",
    "MapFetcher",
    "TorchDispatchMode",
    "current_autograd_node",
    "decomposition_of",
    "default_store",
    "dispatch_mode_stack",
    "finished_work",
    "flatten",
    "foreach_copy_",
    "foreach_max",
    "foreach_mul_",
    "foreach_norm",
    "fsdp1_group",
    "fsdp2_groups",
    "graphs_compiled",
    "grouped_tensors",
    "next_sequence_number",
    "no_dispatch_modes",
    "observe_functions",
    "pretend_stepped",
    "root_mesh",
    "scaler_tensors",
    "set_grad_enabled",
    "start_scaler",
    "tracing_state",
    "transforms",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
]

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]
"""Layout of opaque CPU tensors, whose values cannot be read; torch gives it no public name."""
NEXT_INDEX = "_next_index"
"""Method of `LoaderIterator`, the iterators of every DataLoader, that asks the sampler: the only
place where the rows of a batch are known, since workers fetch ahead.
"""
COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that `Module.__call__` runs instead of hooks and forward.

torch leaves it out of copies and pickles, so a guard can listen there without being saved.
"""
CLIP_NORM = "_get_total_norm"
"""Function of `torch.nn.utils.clip_grad` that every spelling of clip_grad_norm_ calls."""

# One kernel for all tensors instead of one each; torch's own optimizers and clipping use them, and
# there is no public spelling.
foreach_norm = torch._foreach_norm
foreach_max = torch._foreach_max
flatten: Callable[[list[torch.Tensor]], torch.Tensor] = torch._C._nn.flatten_dense_tensors
"""Copy tensors of one dtype and device into one, element after element."""
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
# Lists of tensors by device and dtype, in C++.
grouped_tensors: Any = torch._C._group_tensors_by_device_and_dtype
# Not None inside `torch.jit.trace` and the old ONNX export, where tensors are symbols.
tracing_state: Any = torch._C._get_tracing_state
# Not None under `torch.func` transforms, where tensors are wrappers without values.
transforms: Any = torch._C._functorch.peek_interpreter_stack
# What `torch.no_grad` calls, without the object that it makes.
set_grad_enabled: Any = torch._C._set_grad_enabled

ATTRIBUTES = {
    "Tensor._version": "count of in-place writes; tells that a tensor changed without reading it",
    "Tensor._post_accumulate_grad_hooks": "no public call removes such hooks for a replay",
    "Tensor._values": "values of an uncoalesced sparse gradient, without coalescing it",
    "Module._buffers": "a buffer is put back as the same object, registered buffers may be None",
    "Module._modules": "Module.modules() takes several times as long, on every step",
    "Module._parameters": "parameters of a half-built module, whose __init__ has not run yet",
    "Module._call_impl": "what Module.__call__ runs if nothing is compiled",
    "Module._compiled_call_impl": "what Module.__call__ runs if something is compiled",
    "OptimizedModule._orig_mod": "the user's module inside torch.compile's wrapper",
    "function._torchdynamo_orig_callable": "tells that a function was compiled",
    "Optimizer._step_supports_amp_scaling": "a fused optimizer that takes found_inf",
    "Optimizer._optimizer_step_pre_hooks": "accelerate's wrapper lacks it, real optimizers have it",
    "Optimizer._zero_grad_profile_name": "torch's own attribute, not a part of the state",
    "Optimizer._warned_capturable_if_run_uncaptured": "torch's own, not a part of the state",
    "Optimizer.step._wrapped_by_lr_sched": "a schedule counts the steps of this optimizer",
    "LRScheduler._last_lr": "the rates that a schedule has set last",
    "SequentialLR._schedulers": "schedules inside a schedule",
    "DistributedDataParallel._comm_hooks": "the hooks of a model, with what they remember",
    "Joinable._join_config": "tells whether a rank may run out of data before the others",
    "OpOverload._schema": "name and arguments of an operation in a dispatch mode",
    "Optimizer._opt_called": "written by schedules, not a part of the state",
    "GradScaler._get_scale_async": "the scale as a tensor: get_scale() waits for the device",
    "UntypedStorage._cdata": "address of a storage: Python makes a new object on every call",
    "DataLoader._iterator": "the one iterator of persistent workers",
    "DataLoaderIter._in_order": "batches come in the order the sampler yielded them",
    "DataLoaderIter._dataset": "a data set that has no rows, or is a part of another",
    "DataLoaderIter._index_sampler": "the sampler that an iterator keeps",
    "DataLoaderIter._send_idx": "batches that were asked of the workers",
    "DataLoaderIter._rcvd_idx": "batches that came back from the workers",
    "DataLoaderIter._shutdown_workers": "ends the workers of a loader after a few batches",
}
"""Attributes that are read where they are needed: a function around them would cost hot loops."""


def current_autograd_node() -> Any:
    """Return the backward node that is running; None outside a backward pass."""
    return torch._C._current_autograd_node()


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """Return torch's own function that computes the same as this operator by simpler ones."""
    # Imported late: it takes a second.
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(operator)
    return found


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def observe_functions(around: Callable[..., Any]) -> Callable[[], None]:
    """Run every custom autograd function as `around(cls, apply, args, kwargs)`; return the undoing.

    `Function.apply` goes on to its base class: there a function is reached whose `apply` the user's
    code took before, as in `kernel = Kernel.apply`.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    earlier = vars(base).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return around(cls, super(base, cls).apply, args, kwargs)

    base.apply = classmethod(apply)

    def undo() -> None:
        if earlier is None:
            del base.apply
        else:
            base.apply = earlier

    return undo


def graphs_compiled() -> bool:
    """True once torch.compile has made a graph in this process."""
    # Not imported here: importing dynamo takes a second.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


def default_store() -> Any:
    """Return the key-value store of the default process group: a message without a collective."""
    return dist.distributed_c10d._get_default_store()


def fsdp2_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers for this module; none for any other.

    Its public calls set whether a group exchanges gradients and stays gathered, and tell of none.
    """
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return []
    groups: list[Any] = state()._fsdp_param_groups
    return groups


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one was cut out of, itself where it is whole."""
    return mesh._get_root_mesh()


def fsdp1_group(module: Any) -> Any:
    """Return the ranks that FSDP1 shards over; None for hybrid sharding, which has a second one."""
    return None if hasattr(module, "_inter_node_pg") else module.process_group


def finished_work() -> Any:
    """Return the handle of a collective that is already over, as a dispatched c10d call does."""
    # Imported late: builds of torch without distributed have no such module.
    from torch._C._distributed_c10d import FakeWork, Work

    return Work.boxed(FakeWork())


def check_scaled_gradients(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Have a scaler look for Inf in gradients that still carry its factor, without a sync."""
    scaler._check_inf_per_device(optimizer)


def scaler_tensors(scaler: GradScaler) -> tuple[Tensor, Tensor] | None:
    """Return scale and growth counter on the device, without a sync; None before the first use."""
    if scaler._scale is None or scaler._growth_tracker is None:
        return None
    return scaler._scale, scaler._growth_tracker


def start_scaler(scaler: GradScaler, scale: float, growth: int) -> None:
    """Set what a scaler that was not used yet makes its tensors from."""
    scaler._init_scale = scale
    scaler._init_growth_tracker = growth


def pretend_stepped(optimizer: Optimizer) -> None:
    """Keep torch from warning of a schedule that moves before the first update."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def compiled_call(module: nn.Module) -> Any:
    """Return what `module.compile()`, or a guard that listens, has put in the way of forward."""
    return vars(module).get(COMPILED_CALL)
