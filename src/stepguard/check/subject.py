"""The subject of a check: the objects a run would start with, as far as they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.check.settings import meant
from stepguard.records.settings import GuardConfig
from stepguard.state.rng import kept_rng
from stepguard.tensors.values import dtype_name

WANTED = (
    "return (model, optimizer, loss_fn, loader), a dict, a stepguard.check.preflight.Subject, the "
    "guard or a transformers Trainer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Everything is optional; an item that misses something says what to give."""

    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    loss_fn: Callable[[Any], Any] | None = None
    """`loss_fn(batch)` gives a scalar or a dict of named scalars, as for `Guard.step`."""
    batch: Any = None
    loader: Iterable[Any] | None = None
    dataset: Any = None
    validation: Any = None
    """A second dataset (or path) that must share no example with the first."""
    data: str | Path | None = None
    """A file or folder to scan instead of a dataset."""
    data_range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Allowed values by key, `{"image": (-1, 1)}`; without it only outliers are reported."""
    autocast: Any = None
    """A callable that opens the model's real context, or an Accelerator, Fabric or Trainer."""
    config: Any = None
    """A mapping, a dataclass or a namespace."""
    launcher: Mapping[str, Any] | None = None
    launcher_name: str = "launcher"
    checkpoint: str | Path | None = None
    run_dir: str | Path | None = None
    guard: Any = None
    """The `stepguard.GuardConfig` (or the Guard) the run will use."""
    watch: Mapping[str, float] = field(default_factory=dict)
    """Pattern of parameter or buffer names -> largest magnitude allowed."""
    label_key: str | None = None
    ignore_index: int = -100
    steps: int | None = None
    """Optimizer steps of the whole run; None takes them from the configuration."""
    examples: int | None = None
    """Scan at most this many examples; None is a whole dataset, and 1024 of a stream."""


# --- Whatever a build function returns becomes a Subject.


def subject_of(built: Any, named: str) -> Subject:
    """Make a Subject of whatever a build function returns; ConfigError says what is wrong."""
    if isinstance(built, Subject):
        return built
    # A transformers Trainer, recognised by its parts, so that nothing is imported.
    if isinstance(getattr(built, "model", None), nn.Module) and hasattr(built, "args"):
        return _from_trainer(built)
    values = _parts(built, named)
    known = [entry.name for entry in fields(Subject)]
    for name in values.keys() - known:
        raise ConfigError(
            f"{named} returned the key {str(name)!r}, which is not known; use {', '.join(known)}."
        )
    for name in ("model", "optimizer", "scheduler", "scaler"):
        # A guard holds what it was made for.
        if values.get(name) is None:
            values[name] = getattr(values.get("guard"), name, None)
    values["optimizer"] = _unwrapped(values["optimizer"])
    for name, kind in (("model", nn.Module), ("optimizer", Optimizer)):
        if not isinstance(values[name], kind | None):
            wrong = _described(values[name])
            raise ConfigError(f"{named}: {name} is {wrong}, not a {kind.__name__}; {WANTED}.")
    loss_fn = values.get("loss_fn")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"{named}: loss_fn is {_described(loss_fn)}; give a function of a batch.")
    return Subject(**values)


def _parts(built: Any, named: str) -> dict[Any, Any]:
    """Of a tuple, the model comes first; each further part is known by what it is."""
    if isinstance(built, Mapping):
        return dict(built)
    if _is_guard(built):
        return {"guard": built}
    if not isinstance(built, tuple | list) or not built or not isinstance(built[0], nn.Module):
        raise ConfigError(f"{named} returned {_described(built)}; {WANTED}.")
    parts = {"model": built[0]}
    for position, value in enumerate(built[1:], start=2):
        if value is None:
            continue
        # The order matters: a guard holds an optimizer, and a loss that is a module is callable.
        kinds = {
            "guard": _is_guard(value) or isinstance(value, GuardConfig),
            "scaler": isinstance(value, GradScaler),
            "scheduler": hasattr(value, "get_last_lr"),
            "optimizer": isinstance(_unwrapped(value), Optimizer),
            "loss_fn": callable(value),
            "config": isinstance(value, Mapping),
            "": isinstance(value, str | bytes | Tensor),
            "loader": hasattr(value, "__iter__"),
            "dataset": hasattr(value, "__getitem__"),
        }
        name = next((name for name, fits in kinds.items() if fits), "")
        if not name or name in parts:
            why = f"a second {name}" if name else "which is not a part of a run"
            raise ConfigError(
                f"{named} returned a tuple whose part {position} is {_described(value)}, {why}; "
                f"{WANTED}."
            )
        parts[name] = value
    return parts


def _is_guard(value: Any) -> bool:
    """A Guard or that of a framework, known by its parts, so that nothing is imported."""
    return hasattr(value, "incidents") and hasattr(value, "close")


def _unwrapped(optimizer: Any) -> Any:
    """accelerate and Lightning wrap the optimizer."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def _from_trainer(trainer: Any) -> Subject:
    args = trainer.args
    settings = args.to_dict() if hasattr(args, "to_dict") else vars(args)
    dataset: Any = getattr(trainer, "train_dataset", None)
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    steps = int(getattr(args, "max_steps", 0))
    if steps <= 0 and length and hasattr(args, "train_batch_size"):
        batches = math.ceil(length / (args.train_batch_size * max(1, args.world_size)))
        # The Trainer drops the last accumulation of an epoch if it is not full.
        epoch = max(1, batches // args.gradient_accumulation_steps)
        steps = math.ceil(args.num_train_epochs * epoch)
    optimizer, scheduler = trainer.optimizer, getattr(trainer, "lr_scheduler", None)
    before = (optimizer, scheduler)
    # The Trainer makes both when training starts: make them here, and take them back.
    try:
        if optimizer is None and hasattr(trainer, "create_optimizer"):
            optimizer = trainer.create_optimizer()
        if scheduler is None and optimizer and steps > 0 and hasattr(trainer, "create_scheduler"):
            scheduler = trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
    finally:
        trainer.optimizer, trainer.lr_scheduler = before
    batch = None
    # The collator may refuse columns that the Trainer drops when it trains.
    with suppress(Exception), kept_rng():
        examples = [dataset[index] for index in range(min(2, length))]
        batch = trainer.data_collator(examples) if examples else None
    return Subject(
        model=trainer.model,
        optimizer=_unwrapped(optimizer),
        scheduler=scheduler,
        steps=steps if steps > 0 else None,
        dataset=dataset,
        batch=batch,
        validation=getattr(trainer, "eval_dataset", None),
        autocast=trainer,
        config=settings,
        run_dir=settings.get("output_dir"),
    )


# --- The framework around a model: the context it opens for the forward pass, and what it declares.

FACTS = {
    "distributed_type": ("distributed_type",),
    "num_processes": ("num_processes", "world_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "lr": ("learning_rate",),
}
"""Fact -> what an Accelerator, a Fabric, a Trainer or TrainingArguments call it."""


@dataclass(frozen=True, slots=True)
class FrameworkContext:
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

    @contextmanager
    def opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            for opener in self.openers:
                stack.enter_context(opener())
            yield


def read_framework(given: Any) -> FrameworkContext:
    """Read what the subject calls `autocast`: a function, or the object of any framework."""
    if given is None:
        return FrameworkContext()
    kind = type(given).__name__
    args = getattr(given, "args", None)
    # A transformers Trainer keeps its Accelerator, Lightning and Fabric keep a precision plugin.
    owner = given if args is None else getattr(given, "accelerator", given)
    plugin = getattr(given, "precision_plugin", getattr(given, "_precision", None))
    opener = getattr(owner, "autocast", getattr(plugin, "forward_context", None))
    if opener is None and callable(given):
        return FrameworkContext("the given context", (given,))
    if not callable(opener):
        raise ConfigError(
            f"autocast is a {kind}; give a function that opens the context, such as lambda: "
            "torch.autocast('cuda', dtype=torch.bfloat16), or an Accelerator, a Fabric or a "
            "Trainer."
        )
    openers = [getattr(given, "compute_loss_context_manager", None), opener]
    found = FrameworkContext(
        f"the context of {kind}",
        tuple(filter(None, openers)),
        scaler=getattr(owner, "scaler", getattr(plugin, "scaler", None)),
    )
    for holder, key in ((owner, "mixed_precision"), (plugin, "precision")):
        word = getattr(holder, key, None)
        if word:
            said = f"{type(owner).__name__}({key}={str(word)!r})"
            found = replace(found, dtype=meant(word), said=said)
    # accelerate then opens torch.autocast without a dtype.
    if getattr(owner, "native_amp", False) and found.dtype == "float32":
        found = replace(found, unnamed=f"native_amp is on with {found.said}: {default_dtypes()}")
    # The Trainer refuses to have both.
    for flag in ("bf16", "fp16"):
        if getattr(args, flag, False):
            found = replace(found, dtype=meant(flag), said=f"TrainingArguments({flag}=True)")
    found.facts.update(_facts_of((owner, given, args)))
    return found


def _facts_of(holders: Iterable[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for holder in holders:
        for fact, names in FACTS.items():
            for name in names:
                if getattr(holder, name, None) is not None:
                    facts.setdefault(fact, getattr(holder, name))
    return facts


def default_dtypes() -> str:
    """Say which dtype autocast takes if none is named."""
    cpu = dtype_name(torch.get_autocast_dtype("cpu"))
    cuda = dtype_name(torch.get_autocast_dtype("cuda"))
    return f"autocast takes the device's default, {cpu} on cpu and {cuda} on cuda"
