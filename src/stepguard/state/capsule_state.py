"""The state of a step as named tensors and plain numbers, and back into freshly built objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.state.step import Step
from stepguard.tensors.dtypes import dtype_and_shape
from stepguard.tensors.names import optimizer_parameters

PLAIN = (int, float, bool, str, type(None))


def state_tensors(step: Step) -> dict[str, Tensor]:
    """`state/ROOT/NAME` for parameters and buffers, `optimizer/INDEX/SLOT` for what the optimizer
    keeps.
    """
    tensors: dict[str, Tensor] = {}
    for prefix, root in step.named_roots().items():
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            tensors[f"state/{prefix}/{name}"] = tensor.detach().clone()
    for index, parameter in enumerate(optimizer_parameters(step.optimizer)):
        for slot, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{slot}"] = value.detach().clone()
    return tensors


def optimizer_facts(optimizer: Optimizer) -> dict[str, Any]:
    """Class, hyperparameters of each group, and slots that are plain numbers."""
    groups = [
        {k: _plain(v) for k, v in group.items() if _is_plain(v)} for group in optimizer.param_groups
    ]
    slots = [
        {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, PLAIN)}
        for p in optimizer_parameters(optimizer)
    ]
    return {"name": type(optimizer).__name__, "groups": groups, "slots": slots}


def resting_modules(step: Step) -> list[str]:
    """`ROOT/NAME` of every module in evaluation mode."""
    roots = step.named_roots().items()
    return [
        f"{prefix}/{name}"
        for prefix, root in roots
        for name, m in root.named_modules()
        if not m.training
    ]


def fill_modules(
    tensors: Mapping[str, Tensor], roots: Mapping[str, nn.Module], *, dry: bool = False
) -> str:
    """Copy every stored parameter and buffer; says in words what does not fit, and with `dry` does
    only that.
    """
    for prefix, root in roots.items():
        key = f"state/{prefix}/"
        stored = {name.removeprefix(key): t for name, t in tensors.items() if name.startswith(key)}
        own: dict[str, Tensor] = dict([*root.named_parameters(), *root.named_buffers()])
        late = {name for name in set(stored) - set(own) if _empty_place(root, name) is not None}
        odd = sorted(set(stored) - set(own) - late) or sorted(set(own) - set(stored))
        if odd:
            return f"{odd[0]!r} is in {'the capsule' if odd[0] in stored else 'the model'} only"
        for name, tensor in stored.items():
            if name in own and (own[name].shape, own[name].dtype) != (tensor.shape, tensor.dtype):
                return f"{name!r} is {dtype_and_shape(own[name])}, in the capsule {dtype_and_shape(tensor)}"
        if not dry:
            _copy(root, stored, own)
    return ""


def fill_optimizer(
    tensors: Mapping[str, Tensor],
    facts: dict[str, Any],
    roots: Mapping[str, nn.Module],
    optimizer: Optimizer,
) -> None:
    """Optimizer state, hyperparameters and the modules' training modes."""
    kept, parameters = facts.get("optimizer", {}), optimizer_parameters(optimizer)
    for name, tensor in tensors.items():
        place, _, rest = name.partition("/")
        index, _, slot = rest.partition("/")
        if place == "optimizer":
            parameter = parameters[int(index)]
            on_device = tensor if tensor.dim() == 0 else tensor.to(parameter.device)
            optimizer.state[parameter][slot] = on_device.clone()
    for parameter, slots in zip(parameters, kept.get("slots", []), strict=False):
        if slots:
            optimizer.state[parameter].update(slots)
    for group, saved in zip(optimizer.param_groups, kept.get("groups", []), strict=False):
        group.update(
            {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in group}
        )
    resting = set(facts.get("resting", []))
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            module.training = f"{prefix}/{name}" not in resting


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, PLAIN) or (isinstance(value, Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _empty_place(root: nn.Module, name: str) -> nn.Module | None:
    """The module that has a buffer of this name registered and not filled yet."""
    path, _, key = name.rpartition(".")
    owner = dict(root.named_modules()).get(path)
    return owner if owner is not None and owner._buffers.get(key, owner) is None else None


@torch.no_grad()
def _copy(root: nn.Module, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name, tensor in stored.items():
        if name in own:
            own[name].copy_(tensor)
            continue
        owner = _empty_place(root, name)
        assert owner is not None
        owner._buffers[name.rpartition(".")[2]] = tensor.clone()
