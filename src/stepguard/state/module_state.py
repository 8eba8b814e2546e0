"""Parameters and buffers of one root module as named tensors, and back into the module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stepguard.tensors.dtypes import dtype_and_shape
from stepguard.tensors.torch_private import foreach_copy_
from stepguard.tensors.values import is_expanded, is_lazy, local_part


def module_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, also the buffers that `state_dict` leaves out."""
    found: dict[str, Tensor] = dict(root.named_parameters())
    for name, buffer in root.named_buffers():
        if is_lazy(buffer) or not is_expanded(buffer):
            found[name] = buffer
    return found


def module_misfit(
    prefix: str, root: nn.Module, stored: Mapping[str, Tensor], *, may_lack: bool
) -> str:
    """Say why the stored tensors cannot go into the module; empty if they can.

    `may_lack`: the module may have parameters that were not stored.
    """
    parameters = dict(root.named_parameters())
    lacking = [name for name in parameters if name not in stored]
    if lacking and not may_lack:
        return f"{prefix}{lacking[0]} is in the model and not in the saved state"
    for name, tensor in stored.items():
        live = parameters.get(name)
        if live is None and _buffer_owner(root, name) is None:
            return f"{prefix}{name} is in the saved state and not in the model"
        if live is not None and not _takes(live, tensor):
            return (
                f"{prefix}{name} is {dtype_and_shape(local_part(live))} in the model "
                f"and {dtype_and_shape(tensor)} in the saved state"
            )
    return ""


def _takes(live: Tensor, tensor: Tensor) -> bool:
    """A lazy parameter takes any shape."""
    if is_lazy(live):
        return True
    own = local_part(live)
    return own.shape == tensor.shape and own.dtype == tensor.dtype


def why_not_kept(tensor: Tensor) -> str:
    """Say what keeps this tensor from being copied into a snapshot or a file; empty if nothing."""
    if is_lazy(tensor):
        return "has no shape before the model is called for the first time"
    if tensor.is_meta:
        return "is on the meta device and has no data"
    if tensor.is_nested:
        return "is a nested tensor; only dense ones can be kept"
    if tensor.layout is not torch.strided:
        return f"is a {tensor.layout} tensor; only dense ones can be kept"
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}); only plain ones can be kept"
    return ""


@torch.no_grad()
def fill_module(root: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy the stored tensors into the module's own; register buffers that do not fit."""
    live = module_tensors(root)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    made_or_resized: list[str] = []
    for name, tensor in stored.items():
        own = _own_memory(live.get(name), tensor)
        if own is None:
            made_or_resized.append(name)
            continue
        targets.append(own)
        sources.append(tensor)
    if targets:
        foreach_copy_(targets, sources)
    device = next((tensor.device for tensor in live.values()), None)
    for name in made_or_resized:
        owner = _buffer_owner(root, name)
        if owner is not None:
            owner._buffers[name.rpartition(".")[2]] = stored[name].clone().to(device)


def _own_memory(target: Tensor | None, stored: Tensor) -> Tensor | None:
    """Return what this rank holds of a live tensor; None where the stored one has another shape."""
    if target is None:
        return None
    if is_lazy(target):
        target.materialize(stored.shape)  # type: ignore[attr-defined]
    own = local_part(target.detach())
    return own if own.shape == stored.shape else None


def _buffer_owner(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module that has a buffer of this name registered, filled or None."""
    path, _, key = name.rpartition(".")
    try:
        owner = root.get_submodule(path)
    except AttributeError:
        return None
    if key not in owner._buffers:
        return None
    return owner
