"""The context a model really runs in, and what the framework around it says of itself.

Frameworks are told by their parts, never imported: accelerate's Accelerator and Lightning's Fabric
have `autocast`, transformers' Trainer has an `accelerator`, Lightning's Trainer a
`precision_plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stepguard._errors import ConfigError
from stepguard.preflight.settings.precision import meant
from stepguard.tensors.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What opens the context, and what its owner declares."""

    name: str = "no context"
    openers: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    dtype: str | None = None
    """Declared by the object (`Accelerator.mixed_precision`, `TrainingArguments.fp16`)."""
    said: str = ""
    unnamed: str = ""
    """Set when autocast is switched on without naming a dtype: then the device's default decides.
    """
    scaler: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    """`distributed_type`, `num_processes`, `gradient_accumulation_steps`, `lr` as the object has
    them.
    """

    @contextmanager
    def opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            for opener in self.openers:
                stack.enter_context(opener())
            yield


def surroundings(given: Any) -> Surroundings:
    """Read them from what the subject calls `autocast`."""
    if given is None:
        return Surroundings()
    if hasattr(given, "accelerator") and hasattr(given, "args"):
        return _trainer(given)
    plugin = getattr(given, "precision_plugin", None)
    if plugin is not None and hasattr(plugin, "forward_context"):
        return _lightning(given, plugin)
    if callable(getattr(given, "autocast", None)):
        return _accelerator(given) if hasattr(given, "mixed_precision") else _fabric(given)
    if callable(given):
        return Surroundings(name="the given context", openers=(given,))
    raise ConfigError(
        f"autocast is a {type(given).__name__}; give a function that opens the context, such as "
        "lambda: torch.autocast('cuda', dtype=torch.bfloat16), or an Accelerator, a Fabric or a "
        "Trainer."
    )


def _accelerator(given: Any) -> Surroundings:
    precision = str(given.mixed_precision)
    name = type(given).__name__
    unnamed = ""
    if getattr(given, "native_amp", False) and meant(precision) == "float32":
        unnamed = f"{name}.native_amp is on while mixed_precision={precision!r}: {default_dtypes()}"
    wanted = ("distributed_type", "num_processes", "gradient_accumulation_steps")
    return Surroundings(
        name=f"{name}.autocast()",
        openers=(given.autocast,),
        dtype=meant(precision),
        said=f"{name}(mixed_precision={precision!r})",
        unnamed=unnamed,
        scaler=getattr(given, "scaler", None),
        facts={key: getattr(given, key) for key in wanted if getattr(given, key, None) is not None},
    )


def _trainer(given: Any) -> Surroundings:
    """transformers: the accelerator wraps the model's forward, the Trainer may add a context of its
    own.
    """
    inner = _accelerator(given.accelerator)
    own = getattr(given, "compute_loss_context_manager", None)
    asked = [name for name in ("bf16", "fp16") if getattr(given.args, name, False)]
    said = (
        f"TrainingArguments({', '.join(f'{name}=True' for name in asked)})" if asked else inner.said
    )
    rate = getattr(given.args, "learning_rate", None)
    return Surroundings(
        name=f"the context of {type(given).__name__}",
        openers=(own, *inner.openers) if callable(own) else inner.openers,
        dtype=meant(asked[0]) if asked else inner.dtype,
        said=said,
        unnamed=inner.unnamed,
        scaler=inner.scaler,
        facts=inner.facts | ({"lr": rate} if rate is not None else {}),
    )


def _fabric(given: Any) -> Surroundings:
    plugin = getattr(given, "_precision", None)
    word = str(getattr(plugin, "precision", ""))
    return Surroundings(
        name=f"{type(given).__name__}.autocast()",
        openers=(given.autocast,),
        dtype=meant(word),
        said=f"{type(given).__name__}(precision={word!r})" if word else "",
        scaler=getattr(plugin, "scaler", None),
        facts={"num_processes": given.world_size} if hasattr(given, "world_size") else {},
    )


def _lightning(given: Any, plugin: Any) -> Surroundings:
    word = str(getattr(plugin, "precision", ""))
    accumulation = getattr(given, "accumulate_grad_batches", None)
    return Surroundings(
        name=f"{type(plugin).__name__}.forward_context()",
        openers=(plugin.forward_context,),
        dtype=meant(word),
        said=f"{type(given).__name__}(precision={word!r})" if word else "",
        scaler=getattr(plugin, "scaler", None),
        facts={"gradient_accumulation_steps": accumulation} if accumulation else {},
    )


def default_dtypes() -> str:
    """What autocast takes when nobody names a dtype."""
    cpu = dtype_name(torch.get_autocast_dtype("cpu"))
    cuda = dtype_name(torch.get_autocast_dtype("cuda"))
    return f"autocast takes the device's default, {cpu} on cpu and {cuda} on cuda"
