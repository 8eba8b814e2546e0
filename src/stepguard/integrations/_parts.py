"""What the guards inside frameworks share: versions, wrapped methods, refused saves, loggers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from stepguard._errors import ConfigError, SaveRefused
from stepguard.guard import Guard
from stepguard.integrations._engine import Closing, EngineGuard
from stepguard.integrations.sinks import ScalarSink
from stepguard.records import GuardConfig, Incident
from stepguard.report.phrases import metric_only
from stepguard.report.sinks import finite_only
from stepguard.tensors.names import wrap
from stepguard.watching import watch_for

# --- The guards inside a framework, and undoing them.


class HostGuard(Closing):
    """The guards inside one object of a framework: one an optimizer, one run after another."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: tuple[Guard | EngineGuard, ...] = ()
        """One an optimizer, of the present or last run."""
        self.running = False
        self._past: tuple[Incident, ...] = ()
        """Incidents of the runs before that one."""
        self._named: set[str] = set()
        """Logged numbers that were reported as non-finite."""
        self._run = ExitStack()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident of every run so far, oldest first; of several optimizers by step."""
        present: list[Incident] = []
        for guard in self.guards:
            present += guard.incidents
        if len(self.guards) > 1:
            present.sort(key=lambda incident: incident.step)
        return (*self._past, *present)

    def begin_run(self) -> None:
        """The guards of the next run come after this."""
        self.end_run()
        self._past = self.incidents
        self.guards = ()

    def watch(
        self, framework: str, model: nn.Module, optimizer: Any, *, done: int = 0, **settings: Any
    ) -> Guard:
        """Guard one optimizer until the run ends; `done` steps were made before."""
        guard = watch_for(framework, model, optimizer, **settings)
        self.adopt(guard)
        if done:
            guard.port.start_at(done)
        if hasattr(optimizer, "step_was_skipped"):
            hold_schedule(optimizer, guard, self._run)
        return guard

    def adopt(self, guard: Guard | EngineGuard) -> None:
        """Close this guard when the run ends."""
        self._run.callback(guard.close)
        self.guards += (guard,)
        self.running = True

    def end_run(self) -> None:
        """Read what is pending and close the guards of this run; their incidents stay."""
        self.running = False
        self._run.close()

    def settle(self) -> None:
        """Read the last step, which a fused update may have left pending."""
        if self.running:
            for guard in self.guards:
                guard.port.settle()

    def logged(self, numbers: Mapping[str, Any], step: int) -> None:
        """Report, once each, logged numbers that are NaN or Inf while the training is unharmed."""
        bad = []
        for name, value in numbers.items():
            known = name in OF_TRAINING or name.startswith("stepguard/") or name in self._named
            single = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
            if single and not known and not math.isfinite(value):
                bad.append(name)
        # a number that is averaged over many steps may come from a bad one
        if not bad or not self.running or self.incidents:
            return
        self._named.update(bad)
        port = self.guards[0].port
        if port.finite():
            port.say("metric", metric_only({name: float(numbers[name]) for name in bad}, step))

    def refusal(self, what: str, *, together: bool) -> SaveRefused | None:
        """Why this state must not be saved, also reported by the first guard; None where it may.

        `together` asks all ranks, which then all take part.
        """
        names = {}
        for guard in self.guards:
            names.update(dict.fromkeys(guard.port.trouble(together=together)))
        if not names:
            return None
        refused = SaveRefused(what, tuple(names))
        self.guards[0].port.say("save-refused", str(refused))
        return refused

    def close(self) -> None:
        """Undo every hook and wrapper. Safe to call twice."""
        try:
            self.end_run()
        finally:
            super().close()


OF_TRAINING = ("loss", "grad_norm", "train_loss")
"""What the guard itself judges."""


def around(undo: ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Make `owner.name(...)` be `call(original, ...)` until `undo` is closed."""

    def make(original: Any) -> Any:
        return functools.wraps(original)(functools.partial(call, original))

    wrap(undo, owner, name, make)


def refuse_settings_of_step(config: GuardConfig, instead: str) -> None:
    """ConfigError for settings that only `guard.step` follows."""
    if config.clip_norm is not None or config.loss_scale is not None:
        raise ConfigError(f"GuardConfig.clip_norm and loss_scale are for guard.step; {instead}.")


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


# --- Refuse a framework that is missing, too old, too new, or lacks a method that a guard wraps.


class Framework(NamedTuple):
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
                f"{self.package} {found} is not supported; this guard works with {self.works}."
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
    numbers = list(map(int, re.findall(r"\d+", release)))
    return tuple(numbers + [0] * (3 - len(numbers)))


LIGHTNING = Framework(
    "lightning", first="2.6", before="2.7", tested="2.6.6", without=("2.6.2", "2.6.3")
)
"""Also of Fabric."""
