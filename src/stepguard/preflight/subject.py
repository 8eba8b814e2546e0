"""The subject of a check: the objects a run would start with, as far as they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.records.settings import GuardConfig
from stepguard.state.rng import kept_rng

WANTED = (
    "return (model, optimizer, loss_fn, loader), a dict, a stepguard.preflight.Subject, the guard "
    "or a transformers Trainer"
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
    """Optimizer steps of the whole run; None looks for it in the configuration."""
    examples: int | None = None
    """Scan at most so many examples; None is a whole dataset, and 1024 of a stream."""

    def with_given(self, **values: Any) -> Subject:
        """Copy the subject; every value that is not None or empty replaces the old one."""
        given = {name: value for name, value in values.items() if value not in (None, {})}
        return replace(self, **given)


FIELDS = tuple(entry.name for entry in fields(Subject))


def subject_of(built: Any, named: str) -> Subject:
    """Make a Subject of whatever a build function returns."""
    if isinstance(built, Subject):
        return built
    if isinstance(built, Mapping):
        return _from_mapping(built, named)
    if isinstance(built, tuple | list) and built and isinstance(built[0], nn.Module):
        return _from_tuple(built, named)
    if _is_guard(built):
        return _from_mapping({"guard": built}, named)
    # A transformers Trainer, told by its parts, so that nothing is imported.
    if isinstance(getattr(built, "model", None), nn.Module) and hasattr(built, "args"):
        return _from_trainer(built)
    raise ConfigError(f"{named} returned {_described(built)}; {WANTED}.")


def _from_tuple(built: Sequence[Any], named: str) -> Subject:
    """The model comes first; each further part is known by what it is."""
    parts: dict[str, Any] = {"model": built[0]}
    for position, value in enumerate(built[1:], start=2):
        if value is None:
            continue
        name = _part(value)
        if not name or name in parts:
            why = f"a second {name}" if name else "which is not a part of a run"
            raise ConfigError(
                f"{named} returned a tuple whose part {position} is {_described(value)}, {why}; "
                f"{WANTED}."
            )
        parts[name] = value
    return _from_mapping(parts, named)


def _part(value: Any) -> str:
    """Name of the Subject's field that an object is meant for; empty if it is none."""
    if _is_guard(value) or isinstance(value, GuardConfig):
        return "guard"
    if isinstance(value, GradScaler):
        return "scaler"
    if hasattr(value, "get_last_lr"):
        return "scheduler"
    # After the guard and the schedule, which hold one as well.
    if isinstance(_unwrapped(value), Optimizer):
        return "optimizer"
    # A loss that is a module can be called as well.
    if callable(value):
        return "loss_fn"
    if isinstance(value, Mapping):
        return "config"
    if hasattr(value, "__iter__") and not isinstance(value, str | bytes | Tensor):
        return "loader"
    if hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Tensor):
        return "dataset"
    return ""


def _is_guard(value: Any) -> bool:
    """A Guard or that of a framework, known by its parts, so that nothing is imported."""
    return hasattr(value, "incidents") and hasattr(value, "close")


def _from_mapping(built: Mapping[Any, Any], named: str) -> Subject:
    for name in built:
        if name not in FIELDS:
            raise ConfigError(
                f"{named} returned the key {str(name)!r}, which is not known; use "
                f"{', '.join(FIELDS)}."
            )
    return _checked(Subject(**dict(built)), named)


def _checked(subject: Subject, named: str) -> Subject:
    """Raise ConfigError for a part of the wrong type; take the optimizer out of its wrapper."""
    for name in ("model", "optimizer", "scheduler", "scaler"):
        # A guard holds what it was made for.
        if getattr(subject, name) is None and getattr(subject.guard, name, None) is not None:
            subject = replace(subject, **{name: getattr(subject.guard, name)})
    subject = replace(subject, optimizer=_unwrapped(subject.optimizer))
    for name, kind in (("model", nn.Module), ("optimizer", Optimizer)):
        value = getattr(subject, name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{named}: {name} is {_described(value)}, not a {kind.__name__}; {WANTED}."
            )
    if subject.loss_fn is not None and not callable(subject.loss_fn):
        raise ConfigError(
            f"{named}: loss_fn is {_described(subject.loss_fn)}; give a function of a batch."
        )
    return subject


def _unwrapped(optimizer: Any) -> Any:
    """accelerate and Lightning wrap the optimizer."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _from_trainer(trainer: Any) -> Subject:
    settings = vars(trainer.args)
    if hasattr(trainer.args, "to_dict"):
        settings = trainer.args.to_dict()
    steps = _steps(trainer)
    optimizer, scheduler = _optimizer(trainer, steps)
    return Subject(
        model=trainer.model,
        optimizer=optimizer,
        scheduler=scheduler,
        steps=steps,
        dataset=getattr(trainer, "train_dataset", None),
        batch=_collated(trainer),
        validation=getattr(trainer, "eval_dataset", None),
        autocast=trainer,
        config=settings,
        run_dir=settings.get("output_dir"),
    )


def _steps(trainer: Any) -> int | None:
    """Optimizer steps as the Trainer counts them: max_steps, or epochs of full accumulations."""
    args = trainer.args
    if getattr(args, "max_steps", 0) > 0:
        return int(args.max_steps)
    dataset = getattr(trainer, "train_dataset", ())
    if not hasattr(dataset, "__len__") or not hasattr(args, "train_batch_size"):
        return None
    examples = args.train_batch_size * max(1, getattr(args, "world_size", 1))
    batches = math.ceil(len(dataset) / examples)
    # The Trainer drops the last accumulation of an epoch if it is not full.
    epoch = max(1, batches // args.gradient_accumulation_steps)
    updates: int = math.ceil(args.num_train_epochs * epoch)
    return updates


def _optimizer(trainer: Any, steps: int | None) -> tuple[Any, Any]:
    """Optimizer and schedule the Trainer will train with."""
    optimizer = trainer.optimizer
    scheduler = getattr(trainer, "lr_scheduler", None)
    before = (optimizer, scheduler)
    # The Trainer makes both when training starts: make them here, and take them back.
    try:
        if optimizer is None and hasattr(trainer, "create_optimizer"):
            optimizer = trainer.create_optimizer()
        wanted = scheduler is None and optimizer is not None and steps
        if wanted and hasattr(trainer, "create_scheduler"):
            scheduler = trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
    finally:
        trainer.optimizer, trainer.lr_scheduler = before
    return _unwrapped(optimizer), scheduler


def _collated(trainer: Any) -> Any:
    """The first examples through the Trainer's own collator, if they go through it as they are."""
    dataset: Any = getattr(trainer, "train_dataset", None)
    collate = getattr(trainer, "data_collator", None)
    if not callable(collate) or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    try:
        with kept_rng():
            return collate([dataset[index] for index in range(min(2, len(dataset)))])
    except Exception:
        # The dataset has columns that the Trainer drops when it trains.
        return None


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
