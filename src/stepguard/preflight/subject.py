"""The subject of a check: the objects a run would start with, as far as they are given."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from stepguard._errors import ConfigError
from stepguard.preflight.settings import flat, is_list_of_mappings, meant, names
from stepguard.records.checks import Status
from stepguard.records.settings import GuardConfig
from stepguard.report.phrases import first_few
from stepguard.state.files import free_memory
from stepguard.state.rng import kept_rng
from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import dtype_name

# --- Answers of an item: pass, warn or fail with evidence, or why there is no answer.


@dataclass(frozen=True, slots=True)
class Answer:
    """What one item found."""

    status: Status
    evidence: tuple[str, ...] = ()
    fix: str = ""


class NotGiven(Exception):  # noqa: N818 (an answer, not a fault)
    """Something the item needs was not given; the text says what to give."""


class NotApplicable(Exception):  # noqa: N818 (an answer, not a fault)
    """The item does not apply to this subject; the text says why."""


def passed(*evidence: str) -> Answer:
    return Answer("pass", evidence)


def warned(*evidence: str, fix: str) -> Answer:
    return Answer("warn", evidence, fix)


def failed(*evidence: str, fix: str) -> Answer:
    return Answer("fail", evidence, fix)


def listed(label: str, names: Sequence[str], most: int = 4) -> list[str]:
    """`missing: a, b and 3 more` as the only sentence; no sentence for no names."""
    if not names:
        return []
    return [f"{label}: {first_few(names, most)}"]


def one_line(fault: Exception, most: int) -> str:
    """Type and text of an exception in one line, the text cut after `most` characters."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:most]}"


# --- A configuration that remembers which of its keys were read, by item, by attribute or by
# `**`.


class Tracked(MutableMapping[str, Any]):
    """A nested dict that notes reads: taking a value is one, asking for names (`in`, `len`) is not.

    A nested mapping comes back tracked as well: its keys count one by one. A key that the program
    writes itself counts as read.
    """

    def __init__(
        self, values: Mapping[str, Any], *, _prefix: str = "", _read: set[str] | None = None
    ) -> None:
        # Attributes are keys of the configuration, so our own go around `__setattr__`.
        self.__dict__["_values"] = dict(values)
        self.__dict__["_prefix"] = _prefix
        self.__dict__["_read"] = set() if _read is None else _read
        self.__dict__["_inner"] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        self._read.add(f"{self._prefix}{key}")
        return self._tracked(key, value)

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and inspect ask every object for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {self._prefix}{name}") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._inner.pop(key, None)
        self._read.add(f"{self._prefix}{key}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]
        self._inner.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Tracked({self._values!r})"

    # A copy counts reads for the original: what the program takes from it is a use of the key.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tracked:
        return Tracked(copy.deepcopy(self._values, memo), _prefix=self._prefix, _read=self._read)

    def __copy__(self) -> Tracked:
        return Tracked(self._values, _prefix=self._prefix, _read=self._read)

    def _tracked(self, key: str, value: Any) -> Any:
        if key in self._inner:
            return self._inner[key]
        # Kept, so that a write into a nested mapping is found at the next read.
        inner = _wrap(value, f"{self._prefix}{key}", self._read)
        if inner is not value:
            self._inner[key] = inner
        return inner


def _wrap(value: Any, key: str, read: set[str]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, Tracked):
        return Tracked(value, _prefix=f"{key}.", _read=read)
    if is_list_of_mappings(value):
        return [_wrap(part, f"{key}.{position}", read) for position, part in enumerate(value)]
    return value


def plain(settings: Any) -> dict[str, Any]:
    """Return a mapping, a dataclass or a namespace as a dict, without counting a read."""
    if isinstance(settings, Tracked):
        return dict(settings._values)
    if isinstance(settings, Mapping):
        return dict(settings)
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return dataclasses.asdict(settings)
    if hasattr(settings, "__dict__") and not isinstance(settings, type):
        return dict(vars(settings))
    raise ConfigError(
        f"config is a {type(settings).__name__}; give a mapping, a dataclass or a namespace."
    )


def unread(settings: Tracked) -> list[str]:
    """Dotted keys of the leaves that were not read."""
    return [leaf.key for leaf in flat(plain(settings)) if leaf.key not in settings._read]


# --- The framework around a model: the context it opens for the forward pass, and what it
# declares.


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


# --- A dry run of the learning-rate schedule on a copy: its peak, its end, and where it fails.


MOST_STEPS = 20_000


@dataclass(slots=True)
class DryRun:
    """The first group's learning rate over the run."""

    steps: int
    """Steps that were to be tried."""
    whole: bool
    """False if the run is longer than what was tried."""
    first: float
    peak: float
    peak_step: int = 0
    last: float = 0.0
    fault: str = ""
    fault_step: int = 0


def follows_metric(scheduler: Any) -> bool:
    """True for ReduceLROnPlateau and its like, whose rate cannot be known beforehand."""
    step = getattr(scheduler, "step", None)
    return step is not None and "metrics" in inspect.signature(step).parameters


def peak_rates(optimizer: Optimizer) -> list[float]:
    """What each group is meant to run with."""
    rates = []
    for group in optimizer.param_groups:
        # OneCycleLR keeps its peak in `max_lr`, other schedules their base in `initial_lr`.
        rate = group.get("max_lr", group.get("initial_lr", group["lr"]))
        rates.append(as_rate(rate))
    return rates


def as_rate(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach())
    return float(value)


def dry_run(optimizer: Optimizer, scheduler: Any, steps: int | None) -> DryRun:
    """Step a copy of the schedule on a small optimizer; the real ones are not touched."""
    twin = _twin(optimizer)
    copied = copy.deepcopy(scheduler, {id(optimizer): twin})
    first = as_rate(twin.param_groups[0]["lr"])
    found = DryRun(
        steps=min(steps or MOST_STEPS, MOST_STEPS),
        whole=steps is not None and steps <= MOST_STEPS,
        first=first,
        peak=first,
        last=first,
    )
    with warnings.catch_warnings():
        # torch warns of a schedule that is stepped before its optimizer.
        warnings.simplefilter("ignore")
        for step in range(1, found.steps + 1):
            try:
                copied.step()
                found.last = as_rate(twin.param_groups[0]["lr"])
            except Exception as fault:
                found.fault = one_line(fault, 120)
                found.fault_step = step
                break
            # Rounding may bring a periodic schedule a little above its first peak later.
            if found.last > found.peak * (1 + 1e-6):
                found.peak = found.last
                found.peak_step = step
    return found


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same groups over parameters of one element."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(copy.deepcopy(options) | {"params": [nn.Parameter(torch.zeros(1))]})
    twin = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    twin.param_groups[:] = groups
    return twin


# --- Bytes of weights, gradients and optimizer state, before they exist.


ONE_SLOT = names("lion muon adagrad rmsprop")
TWO_SLOTS = names("adam adamw nadam radam adamax adadelta")
"""Optimizers that keep so many tensors of a parameter's size for each parameter."""


def model_bytes(model: nn.Module) -> int:
    return _bytes(model.parameters()) + _bytes(model.buffers())


def gradient_bytes(model: nn.Module) -> int:
    return _trained_bytes(model.parameters())


def optimizer_bytes(model: nn.Module, optimizer: Optimizer | None) -> tuple[int, str]:
    """What its state takes, or will take after the first step, and how that is known."""
    if optimizer is None:
        return 2 * gradient_bytes(model), "two moments assumed"
    held = 0
    for state in optimizer.state.values():
        if isinstance(state, dict):
            held += _bytes(filter(torch.is_tensor, state.values()))
    if held:
        return held, "as it is"
    slots = _slots(optimizer)
    trained = _trained_bytes(optimizer_parameters(optimizer))
    return slots * trained, f"{slots} slots a parameter"


def _slots(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__.lower()
    if name in TWO_SLOTS:
        return 2
    slots = int(name in ONE_SLOT)
    if name in ("sgd", "rmsprop") and optimizer.param_groups[0].get("momentum"):
        slots += 1
    return slots


def _trained_bytes(parameters: Iterable[Tensor]) -> int:
    return _bytes(parameter for parameter in parameters if parameter.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def available_memory(device: torch.device) -> int | None:
    """Free bytes of an accelerator, or of the host for a CPU; None if unknown."""
    if device.type == "meta":
        # Not placed yet: the model will go to the accelerator, if there is one.
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        return free_memory()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0])


# --- The subject of a check: the objects a run would start with, as far as they are given.


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
