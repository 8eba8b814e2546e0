"""Parameters and buffers of one root module as named tensors, and back into the module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stepguard.tensors.dtypes import dtype_and_shape
from stepguard.tensors.torch_private import foreach_copy_
from stepguard.tensors.values import is_expanded, is_lazy


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
        if live is None:
            if _buffer_owner(root, name) is None:
                return f"{prefix}{name} is in the saved state and not in the model"
            continue
        if is_lazy(live):
            continue
        if live.shape != tensor.shape or live.dtype != tensor.dtype:
            return (
                f"{prefix}{name} is {dtype_and_shape(live)} in the model "
                f"and {dtype_and_shape(tensor)} in the saved state"
            )
    return ""


@torch.no_grad()
def fill_module(root: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy the stored tensors into the module's own; register anew the buffers that do not fit."""
    live = module_tensors(root)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    made_or_resized: list[str] = []
    for name, tensor in stored.items():
        target = live.get(name)
        if target is not None and is_lazy(target):
            target.materialize(tensor.shape)  # type: ignore[attr-defined]
        if target is None or target.shape != tensor.shape:
            made_or_resized.append(name)
            continue
        targets.append(target.detach())
        sources.append(tensor)
    if targets:
        foreach_copy_(targets, sources)
    device = next((tensor.device for tensor in live.values()), None)
    for name in made_or_resized:
        owner = _buffer_owner(root, name)
        if owner is not None:
            owner._buffers[name.rpartition(".")[2]] = stored[name].clone().to(device)


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
