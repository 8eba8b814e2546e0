"""What the guards inside frameworks share: versions, wrapped methods, refused saves, loggers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MethodType
from typing import Any, Self

import torch

from stepguard._errors import ConfigError, SaveRefused
from stepguard.guard import Guard
from stepguard.integrations.sinks.base import ScalarSink
from stepguard.records import GuardConfig
from stepguard.report.sinks import finite_only
from stepguard.tensors.names import wrap

# --- Wrapping a framework, and undoing it.


class HostGuard:
    """A context manager whose end is `close()`."""

    def close(self) -> None:
        """Undo every hook and wrapper. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def around(undo: ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Make `owner.name(...)` be `call(original, ...)` until `undo` is closed."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return method

    wrap(undo, owner, name, make)


def refuse_settings_of_step(config: GuardConfig, instead: str) -> None:
    """ConfigError for settings that only `guard.step` follows."""
    if config.clip_norm is not None or config.loss_scale is not None:
        raise ConfigError(f"GuardConfig.clip_norm and loss_scale are for guard.step; {instead}.")


def refusal(guards: Sequence[Guard], what: str, *, together: bool) -> SaveRefused | None:
    """Why this state must not be saved, also reported by the first guard; None where it may.

    `together` asks all ranks, which then all take part.
    """
    names: dict[str, None] = {}
    for guard in guards:
        names.update(dict.fromkeys(guard.port.trouble(together=together)))
    if not names:
        return None
    refused = SaveRefused(what, tuple(names))
    guards[0].port.say("save-refused", str(refused))
    return refused


def hold_schedule(wrapper: Any, guard: Guard, undo: ExitStack) -> None:
    """Make accelerate's schedulers, and the Trainer, leave the schedule after a vetoed update."""
    # They ask `step_was_skipped`, which reads the private `_is_overflow`. Without a scaler
    # accelerate never resets it, so it is written after every step.

    def make(original: Any) -> Any:
        # wraps() keeps the mark by which torch's schedulers know a step they have wrapped.
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            by_scaler = self.scaler is not None and self._is_overflow
            self._is_overflow = guard.port.dropped or by_scaler
            return out

        # A method, because a scheduler that is made later wraps it once more as one.
        return MethodType(step, wrapper)

    wrap(undo, wrapper, "step", make)
    undo.callback(setattr, wrapper, "_is_overflow", False)


# --- The loggers of a Trainer or a Fabric as a sink, so that both log to the same place.


KEEP_NONFINITE = ("TensorBoardLogger", "CSVLogger")
"""Loggers whose backend stores NaN and Inf as they are; others get finite numbers only."""


class HostLogger(ScalarSink):
    """Logs where and as often as the framework, which opens and closes the loggers."""

    keeps_nonfinite = True

    def __init__(self, loggers: Sequence[Any], *, every: int = 1) -> None:
        super().__init__(every=every)
        self._loggers = tuple(loggers)

    def due(self, step: int) -> bool:
        # As Lightning counts, so that the numbers of both are in one row.
        return (step + 1) % self.every == 0

    def send(self, values: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            keeps = type(logger).__name__ in KEEP_NONFINITE
            logger.log_metrics(values if keeps else finite_only(values), step=step)


# --- Choose the half precision that this machine is fast in.


CPU_SIGNS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def half_precision() -> dict[str, bool]:
    """For `TrainingArguments(**half_precision())`: bf16 in hardware, else fp16 on a GPU, else {}.

    fp16 overflows at 65504 and needs the loss scaling that the Trainer then turns on; bf16 has the
    range of float32 and 8 bits. On a CPU transformers takes bf16 only together with `use_cpu`.
    """
    if torch.cuda.is_available():
        # By default this also says yes where bf16 is only emulated, which is slow.
        in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
        return {"bf16": True} if in_hardware else {"fp16": True}
    if torch.accelerator.is_available():
        return {}  # neither CUDA nor ROCm: nothing is known about its half precision
    for sign in CPU_SIGNS:
        supported = getattr(torch.cpu, sign, None)
        if supported is not None and supported():
            return {"bf16": True, "use_cpu": True}
    return {}


# --- Which checkpoints a framework may delete: shared by all of them.


def to_delete(sorted_checkpoints: Sequence[str], keep: int, protected: set[Path]) -> list[str]:
    """The oldest ones beyond `keep`, never the newest and never a protected one."""
    newest = map(Path, sorted_checkpoints[-1:])
    kept = {path.resolve() for path in (*protected, *newest)}
    others = [path for path in sorted_checkpoints if Path(path).resolve() not in kept]
    room = max(0, keep - (len(sorted_checkpoints) - len(others)))
    return others[: max(0, len(others) - room)]


# --- Refuse a framework that is missing, too old, too new, or lacks a method that a guard wraps.


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework and the versions of it that its guard is made for."""

    package: str
    first: str
    """The oldest version that works."""
    before: str
    """The first version that is not supported yet."""
    tested: str
    without: tuple[str, ...] = ()
    """Versions in between that must not be used."""

    @property
    def works(self) -> str:
        """The versions that work, in words."""
        but = "".join(f", not {bad}" for bad in self.without)
        return (
            f"{self.package} {self.first} up to, not including, {self.before}{but} (tested with "
            f"{self.tested})"
        )

    def require(self) -> None:
        """ConfigError unless a version that works is installed."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            raise ConfigError(
                f"{self.package} is not installed; this guard works with {self.works}."
            ) from None
        if not self.supports(found):
            raise ConfigError(
                f"{self.package} {found} is not known to this guard, which works with {self.works}."
            )

    def supports(self, found: str) -> bool:
        if found in self.without:
            return False
        return _order(self.first) <= _order(found) < _order(self.before)

    def need(self, owner: object, *names: str) -> None:
        """ConfigError when `owner`, perhaps a subclass, lacks a method that the guard wraps."""
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise ConfigError(
                f"{type(owner).__name__} has no {', '.join(missing)}, which stepguard wraps; "
                f"it works with {self.works}."
            )


def _order(text: str) -> tuple[int, ...]:
    """`5.22.2` as numbers, without the marks of release candidates and local builds."""
    release = re.split(r"[a-z+]", text)[0]
    numbers = [int(found) for found in re.findall(r"\d+", release)]
    return tuple(numbers + [0] * (3 - len(numbers)))


LIGHTNING = Framework(
    "lightning", first="2.6", before="2.7", tested="2.6.6", without=("2.6.2", "2.6.3")
)
"""Also of Fabric."""
