"""Parameters, buffers and optimizer state: a cheap finite test on the device, and a scan that names the bad ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.sentinel.gradients import dense_real, finite


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> Tensor | None:
    """One number that is NaN or Inf when a tensor holds NaN or +Inf; None for no tensors.

    A maximum is the cheapest pass that carries NaN. A lone -Inf passes it and is caught by the loss or gradient it
    ruins one step later; half-precision groups, where updates overflow in earnest, get the exact test instead.
    """
    plain = [t for t in (dense_real(t.detach()) for t in tensors) if t.numel() and t.is_floating_point()]
    if not plain:
        return None
    if len({(t.device, t.dtype) for t in plain}) == 1:
        return torch.stack(list(torch._foreach_max(plain))).float().max()
    device = plain[0].device
    return torch.stack([t.max().to(device=device, dtype=torch.float32) for t in plain]).max()


def bad_parameters(roots: Mapping[str, nn.Module], optimizer: Optimizer) -> list[str]:
    """`param:NAME` for every parameter with a non-finite element."""
    names = parameter_names(roots, optimizer)
    return [f"param:{name}" for tensor, name in names if not finite(tensor)]


def bad_buffers(roots: Mapping[str, nn.Module], sentinels: frozenset[str] = frozenset()) -> list[str]:
    """`buffer:NAME` for every non-finite buffer, except those that hold Inf or NaN on purpose."""
    return [f"buffer:{name}" for name, buffer in named_buffers(roots) if name not in sentinels and not finite(buffer)]


def bad_slots(optimizer: Optimizer) -> list[str]:
    """`opt:SLOT` for every optimizer slot with a non-finite element."""
    slots = {slot: None for state in optimizer.state.values() for slot, value in _tensors(state) if not finite(value)}
    return [f"opt:{slot}" for slot in slots]


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor the optimizer keeps."""
    return [value for state in optimizer.state.values() for _, value in _tensors(state)]


def parameter_names(roots: Mapping[str, nn.Module], optimizer: Optimizer) -> list[tuple[Tensor, str]]:
    """Each parameter once, with its dotted name; parameters only the optimizer knows are numbered."""
    names: dict[int, tuple[Tensor, str]] = {}
    for prefix, root in roots.items():
        for name, parameter in root.named_parameters():
            names.setdefault(id(parameter), (parameter, _dotted(prefix, name)))
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), (parameter, f"group{g}[{i}]"))
    return list(names.values())


def named_buffers(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, root in roots.items():
        for name, buffer in root.named_buffers():
            yield _dotted(prefix, name), buffer


def norm_statistics(roots: Mapping[str, nn.Module]) -> list[Tensor]:
    """Floating-point running statistics of norm layers: these must always be finite."""
    return [
        buffer
        for root in roots.values()
        for module in root.modules()
        if getattr(module, "track_running_stats", False)
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]


class FirstLook:
    """Which buffers were non-finite when the run began, and so hold Inf or NaN on purpose.

    The device is asked at once and answers only when somebody wants to know. Running statistics of norm layers are
    not looked at: they must always be finite.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        statistics = {id(buffer) for buffer in norm_statistics(roots)}
        self._seen = [(n, b) for n, b in named_buffers(roots) if id(b) not in statistics and _inexact(b)]
        self._flags = [torch.isfinite(dense_real(b.detach())).all() for _, b in self._seen]
        self._bad: list[tuple[str, Tensor]] | None = None

    def names(self) -> frozenset[str]:
        """Waits for the device the first time."""
        if self._bad is None:
            self._bad = [seen for seen, fine in zip(self._seen, self._flags, strict=True) if not bool(fine)]
            self._seen, self._flags = [], []
        return frozenset(name for name, _ in self._bad)

    def known(self, buffer: Tensor) -> bool:
        """Has it already turned out to be one of them? Never waits."""
        return any(buffer is bad for _, bad in self._bad or ())


def _inexact(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one parameter's state, lists of tensors (LBFGS) included."""
    for slot, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor):
            yield slot, value
        elif isinstance(value, list | tuple):
            yield from ((slot, item) for item in value if isinstance(item, Tensor))
