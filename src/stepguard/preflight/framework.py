"""The framework around a model: the context it opens for the forward pass, and what it declares.

Frameworks are told by their parts, never imported: accelerate's Accelerator and Lightning's Fabric
have `autocast`, transformers' Trainer has an `accelerator`, Lightning's Trainer a
`precision_plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stepguard._errors import ConfigError
from stepguard.preflight.settings.wanted_precision import meant
from stepguard.tensors.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class FrameworkFacts:
    """What opens the context, and what its owner declares."""

    name: str = "no context"
    openers: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    dtype: str | None = None
    """Declared by the object (`Accelerator.mixed_precision`, `TrainingArguments.fp16`)."""
    said: str = ""
    unnamed: str = ""
    """Set if autocast is on without a dtype: then the device's default decides."""
    scaler: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    """`distributed_type`, `num_processes`, `gradient_accumulation_steps`, `lr` of the object."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            for opener in self.openers:
                stack.enter_context(opener())
            yield


def read_framework(given: Any) -> FrameworkFacts:
    """Read it from what the subject calls `autocast`."""
    if given is None:
        return FrameworkFacts()
    if hasattr(given, "accelerator") and hasattr(given, "args"):
        return _transformers(given)
    if hasattr(getattr(given, "precision_plugin", None), "forward_context"):
        return _lightning(given)
    if callable(getattr(given, "autocast", None)):
        if hasattr(given, "mixed_precision"):
            return _accelerate(given)
        return _fabric(given)
    if callable(given):
        return FrameworkFacts(name="the given context", openers=(given,))
    raise ConfigError(
        f"autocast is a {type(given).__name__}; give a function that opens the context, such as "
        "lambda: torch.autocast('cuda', dtype=torch.bfloat16), or an Accelerator, a Fabric or a "
        "Trainer."
    )


def _accelerate(given: Any) -> FrameworkFacts:
    precision = str(given.mixed_precision)
    name = type(given).__name__
    unnamed = ""
    # accelerate then opens torch.autocast without a dtype.
    if getattr(given, "native_amp", False) and meant(precision) == "float32":
        unnamed = f"{name}.native_amp is on while mixed_precision={precision!r}: {default_dtypes()}"
    facts = {}
    for key in ("distributed_type", "num_processes", "gradient_accumulation_steps"):
        if getattr(given, key, None) is not None:
            facts[key] = getattr(given, key)
    return FrameworkFacts(
        name=f"{name}.autocast()",
        openers=(given.autocast,),
        dtype=meant(precision),
        said=f"{name}(mixed_precision={precision!r})",
        unnamed=unnamed,
        scaler=getattr(given, "scaler", None),
        facts=facts,
    )


def _transformers(given: Any) -> FrameworkFacts:
    found = replace(_accelerate(given.accelerator), name=f"the context of {type(given).__name__}")
    # The accelerator wraps the model's forward; the Trainer may add a context of its own.
    own = getattr(given, "compute_loss_context_manager", None)
    if callable(own):
        found = replace(found, openers=(own, *found.openers))
    # The Trainer refuses to have both.
    for name in ("bf16", "fp16"):
        if getattr(given.args, name, False):
            said = f"TrainingArguments({name}=True)"
            found = replace(found, dtype=meant(name), said=said)
    rate = getattr(given.args, "learning_rate", None)
    if rate is not None:
        found = replace(found, facts=found.facts | {"lr": rate})
    return found


def _fabric(given: Any) -> FrameworkFacts:
    found = _of_plugin(given, getattr(given, "_precision", None))
    facts = {}
    if hasattr(given, "world_size"):
        facts["num_processes"] = given.world_size
    return replace(
        found, name=f"{type(given).__name__}.autocast()", openers=(given.autocast,), facts=facts
    )


def _lightning(given: Any) -> FrameworkFacts:
    plugin = given.precision_plugin
    found = _of_plugin(given, plugin)
    facts = {}
    if getattr(given, "accumulate_grad_batches", None):
        facts["gradient_accumulation_steps"] = given.accumulate_grad_batches
    name = f"{type(plugin).__name__}.forward_context()"
    return replace(found, name=name, openers=(plugin.forward_context,), facts=facts)


def _of_plugin(given: Any, plugin: Any) -> FrameworkFacts:
    """What the precision plugin of Fabric and of Lightning's Trainer declares."""
    word = str(getattr(plugin, "precision", ""))
    said = ""
    if word:
        said = f"{type(given).__name__}(precision={word!r})"
    return FrameworkFacts(dtype=meant(word), said=said, scaler=getattr(plugin, "scaler", None))


def default_dtypes() -> str:
    """Say which dtype autocast takes if none is named."""
    cpu = dtype_name(torch.get_autocast_dtype("cpu"))
    cuda = dtype_name(torch.get_autocast_dtype("cuda"))
    return f"autocast takes the device's default, {cpu} on cpu and {cuda} on cuda"
