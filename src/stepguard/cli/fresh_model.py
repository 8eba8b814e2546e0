"""A model built by the user's own function: are its first values and its first answers finite?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from stepguard._errors import ConfigError
from stepguard.records.examination import SectionStatus

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_SHOWN = 8
HOW = "let the build function return (model, inputs), or give the model an `example_input_array`"


@dataclass(slots=True)
class Fresh:
    """The model, what to call it with, and what is wrong with its values."""

    model: nn.Module | None = None
    inputs: Any = None
    fault: str = ""
    summary: str = ""
    bad: tuple[str, ...] = ()

    def values(self, patterns: Sequence[str]) -> Iterator[tuple[str, float, float]]:
        """Range of every tensor with such a name."""
        for name, tensor in _tensors(self.model):
            if (
                any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)
                and tensor.numel()
            ):
                yield name, float(tensor.min()), float(tensor.max())


def build_fresh(build: str) -> Fresh:
    """Import and call it, from below the current directory only; what it raises becomes the
    section's text.
    """
    from stepguard.state.importing import import_function, importable

    with importable():
        function = import_function(build, ConfigError)
        try:
            return _examined(function())
        except Exception as fault:
            return Fresh(fault=f"{build} failed: {type(fault).__name__}: {fault}")


def _examined(built: Any) -> Fresh:
    import torch
    from torch import nn

    parts = built if isinstance(built, tuple) else (built,)
    if not parts or not isinstance(parts[0], nn.Module):
        what = f"a tuple of {len(parts)}" if isinstance(built, tuple) else type(built).__name__
        return Fresh(
            fault=f"the build function returned {what}; return a model, (model, inputs) or what "
            f"replay takes"
        )
    model = parts[0]
    inputs = parts[1] if len(parts) == 2 else None
    if inputs is None:
        inputs = getattr(model, "example_input_array", None)
        inputs = getattr(model, "dummy_inputs", None) if inputs is None else inputs
    fresh = Fresh(model, inputs)
    tensors = list(_tensors(model))
    wrong = [name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())]
    total = sum(tensor.numel() for _, tensor in tensors)
    fresh.summary = (
        f"{type(model).__name__}: {len(tensors)} tensors, {total:,} values, {len(wrong)} not finite"
    )
    fresh.bad = tuple(
        f"{name} holds NaN or Inf before the first step" for name in wrong[:MOST_SHOWN]
    )
    return fresh


def _tensors(model: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    if model is not None:
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and parameter.numel():
                yield name, parameter.detach()
        for name, buffer in model.named_buffers():
            if (
                buffer.is_floating_point()
                and not buffer.is_meta
                and "mask" not in name
                and buffer.numel()
            ):
                yield name, buffer.detach()


def forward(fresh: Fresh) -> tuple[SectionStatus, tuple[str, ...]]:
    """One call without gradients, in evaluation mode; names the first module whose output is not
    finite.
    """
    import torch

    from stepguard.tensors.values import is_finite

    assert fresh.model is not None
    if fresh.inputs is None:
        return "not checked", (f"not checked: {HOW}",)
    first: list[str] = []
    names = {module: name for name, module in fresh.model.named_modules()}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not first and not all(map(is_finite, _inside(output))):
            first.append(names.get(module, "?") or "the model itself")

    handles = [module.register_forward_hook(hook) for module in names]
    was_training = fresh.model.training
    fresh.model.eval()
    try:
        with torch.no_grad():
            output = _call(fresh.model, fresh.inputs)
    except Exception as fault:
        return "failed", (f"the forward pass failed: {type(fault).__name__}: {fault}",)
    finally:
        fresh.model.train(was_training)
        for handle in handles:
            handle.remove()
    found = list(_inside(output))
    shapes = ", ".join(f"{list(tensor.shape)}" for tensor in found[:3])
    if all(map(is_finite, found)):
        ends = [
            f"{float(t.float().min()):.4g} to {float(t.float().max()):.4g}"
            for t in found[:3]
            if t.numel()
        ]
        return "fine", (f"{len(found)} outputs, all finite: {shapes}; {', '.join(ends)}",)
    return "failed", (
        f"the output is not finite; first in {first[0] if first else 'the model itself'}",
    )


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _inside(value: Any) -> Iterator[Tensor]:
    from torch import Tensor

    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "values"):
        for item in value.values():
            yield from _inside(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inside(item)
