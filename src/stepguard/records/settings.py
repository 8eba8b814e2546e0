"""What users set: frozen, keyword-only, checked where it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from stepguard._errors import ConfigError
from stepguard.records.codec import documented, number_as_text, read_tables
from stepguard.records.incident import Action, Sink

ACTIONS: tuple[str, ...] = get_args(Action)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be done about an incident, and how much may be lost. The fault decides the rest.

    For instance:

        Policy(actions=("skip", "stop"), max_lost_share=0.1)
    """

    actions: tuple[Action, ...] = ("retry", "leave_out", "skip", "heal", "rewind", "stop")
    """What is allowed. A bad step on good weights is run again if it failed by chance, else what is
    proven guilty is left out, else the step is skipped, in the order given here. Damaged state is
    healed from a rank that holds a copy of it, else rewound. `stop` is always allowed.
    """
    max_consecutive: int | None = None
    """Incidents in a row after which the run stops; None does not count. A committed step resets
    the count.
    """
    max_per_1000: int | None = None
    """Incidents within any 1000 steps after which the run stops; None does not count."""
    max_total: int | None = None
    """Incidents in the whole run after which it stops; None does not count."""
    max_rewinds: int = 3
    """Rewinds in the whole run."""
    max_heals: int = 100
    """Times in the whole run that a damaged rank is given the state of a healthy one."""
    max_lost_share: float = 0.5
    """Share of the samples of the last `lost_window` steps that may be left out because data,
    forward or loss were bad. Beyond it the run stops with the weights it has. It counts once 32
    steps were lost.
    """
    lost_window: int = 200
    """Steps over which `max_lost_share` is counted."""
    bad_start: Literal["stop", "note"] = "stop"
    """When parameters, buffers or optimizer state are non-finite before the first step."""
    on_incident: Literal["decide", "whatif"] = "decide"
    """`whatif` trains recent steps again before a bad step is dropped or rewound, and does the
    cheapest thing that keeps the bad value away: skip, leave out, larger epsilon, harder clipping,
    lower rate. About 60 steps for each of the first 20 incidents, in one process.
    """

    exceptions: Literal["raise", "skip"] = "raise"
    """An exception in the step, under `guard.step`: recorded and raised again, or recorded and the
    step left out, within the budgets above. Ctrl+C, exits and exhausted memory are always raised.
    """

    def __post_init__(self) -> None:
        for action in self.actions:
            _one_of("Policy.actions", action, ACTIONS)
        if not self.actions:
            raise ConfigError(f"Policy.actions is empty; give at least one of {_quoted(ACTIONS)}.")
        for name in ("max_consecutive", "max_per_1000", "max_total"):
            _count_or_none(f"Policy.{name}", getattr(self, name))
        _count("Policy.max_rewinds", self.max_rewinds)
        _count("Policy.max_heals", self.max_heals)
        _number("Policy.max_lost_share", self.max_lost_share)
        if not 0.0 < self.max_lost_share <= 1.0:
            raise ConfigError(
                f"Policy.max_lost_share={self.max_lost_share!r} must lie above 0 and up to 1."
            )
        _count("Policy.lost_window", self.lost_window, least=1)
        _one_of("Policy.bad_start", self.bad_start, ("stop", "note"))
        _one_of("Policy.on_incident", self.on_incident, ("decide", "whatif"))
        _one_of("Policy.exceptions", self.exceptions, ("raise", "skip"))


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """Settings of one guard. A value that cannot be meant raises ConfigError here.

    For instance:

        GuardConfig(run_dir="runs/a", checkpoint_every=500, policy=Policy(max_total=20))
        GuardConfig.from_file("guard.toml")
    """

    clip_norm: float | None = None
    """Clip the gradients to this 2-norm before every update; None leaves them alone. Under `watch`
    and `stepguard run` as if the loop called `clip_grad_norm_` before `optimizer.step()`.
    """
    run_dir: str | PathLike[str] | None = None
    """Where journal, incidents and checkpoints go; None writes nothing."""
    human_log: str | PathLike[str] | None = None
    """Folder for a readable log: `latest.log` (a link to the newest) and `training_log.jsonl`."""
    policy: Policy = field(default_factory=Policy)
    """What may be done about an incident, and how much may be lost."""
    snapshot_every: int | Literal["auto"] = "auto"
    """Steps between in-memory snapshots; `auto` keeps copying under 0.5 % of the time of training.
    """
    snapshots: int = 3
    """Snapshots kept in memory at a time; 0 takes none."""
    snapshot_memory: int | None = None
    """Bytes of host memory that snapshots may take; None is half of what is free when the first one
    is taken.
    """
    probation: int = 20
    """Steps without an incident, and with the loss where it was, after which a snapshot counts as
    good.
    """
    replay_memory: int = 2**28
    """Bytes of batches kept so that steps since a snapshot can be run again exactly; 0 keeps none.
    """
    checkpoint_every: int | None = None
    """Steps between sealed checkpoints; None saves only when asked. Each is written in the
    background, once its probation is over.
    """
    keep: int = 3
    """Newest good checkpoints that stay on disk."""
    keep_every: int | None = None
    """Checkpoints of every so many steps stay for good; None lets all but the newest go."""
    resume_lr: Literal["checkpoint", "config"] = "checkpoint"
    """Where `guard.restore` finds another learning rate than the optimizer was built with: which of
    the two counts.
    """
    on_signal: Literal["save", "off"] = "save"
    """SIGTERM and Ctrl+C: `save` ends the step and saves a good state before they have their effect
    (where there is a `run_dir`); `off` leaves them alone.
    """
    signal_grace: float = 5.0
    """Seconds from a signal until all ranks have to be at the step they agree to stop at, about a
    second and one step later. A rank that is not, because it waits for another, ends by the signal.
    """
    loss_scale: float | None = None
    """A static scale: `guard.step` multiplies the loss by it before backward and divides it out of
    the gradients.

    It is halved when it is what makes the gradients overflow.
    """
    lr: float | None = None
    """The learning rate you mean to run with; None takes what the optimizer has when the guard is
    built.
    """
    labels_key: str | None = None
    """Key of the batch that holds the targets, so that empty targets are counted."""
    ignore_index: int = -100
    """Target value that does not count as a label."""
    spike_window: int = 64
    """Losses remembered for the spike and drift tests."""
    spike_sigmas: float | None = 6.0
    """Robust deviations above the median that make a loss worth a line; None looks for no spikes.
    """
    anomalies: Literal["note", "act", "off"] = "note"
    """What a finite anomaly (a jump or slow rise of the loss) leads to. `note`: it is told, nothing
    is done and none of your code runs again. `act`: a rewind, where independent signs show that the
    weights did it. `off`: nothing.
    """
    outliers: Literal["note"] | None = None
    """Report a parameter's gradient that is far above all it has been, before it enters the
    optimizer's moments. None does not measure them.
    """
    scheduler_every: Literal["step", "epoch"] | None = "step"
    """When `guard.step` advances the scheduler it was given: after each update, when `guard.loader`
    ends a pass, or never (the loop does).
    """
    id_key: str | None = None
    """Key of the batch that holds one id per sample, so that a bad sample is named by it."""
    locate: bool = True
    """Replay a bad step to find where its first harmful value was born."""
    locate_budget: float = 6.0
    """How long placing one incident may take, in steps of the bare run; then what is known by then
    is told.
    """
    look_every: int | Literal["auto"] | None = "auto"
    """Steps between deep looks: statistics of a healthy step, taken while it runs. `auto` takes the
    third step, then ever fewer, with at most 0.1 % of the time of training; None takes none.
    """
    agree_timeout: float = 60.0
    """Seconds that a rank waits for the others once a step is bad, and at most 30 of them in `save`
    and `restore`. Then the step stays vetoed, and the guard says which ranks did not come and ends.
    """
    compare_ranks_every: int | None = None
    """Steps between two comparisons of the ranks: weights of copies of one model, learning rates
    and data. Each costs one pass over the weights and a small exchange; None makes none.
    """
    hang_after: float | None = 300.0
    """With several ranks: seconds without any progress after which a line names the ranks that are
    behind the others, and where. Nothing else is done. None does not look.
    """
    capsule: Literal["full", "no-data", "off"] = "full"
    """What of a bad step is kept on disk; `no-data` leaves the batch out."""
    capsule_limit: int = 2**30
    """Bytes a capsule may take; a larger step is recorded without one, with a note."""
    build: str | None = None
    """`module:function` that returns (model, optimizer, loss_fn), so that a capsule can be run
    again elsewhere.
    """
    terminal: Literal["auto", "quiet", "logging"] = "auto"
    """`quiet` prints nothing; `logging` hands messages to Python's logging instead of stderr.

    Incidents are recorded in any case.
    """
    sinks: tuple[Sink, ...] = ()
    """Loggers that get every step and incident, on rank 0: see stepguard.integrations.sinks."""

    @classmethod
    def from_file(cls, path: str | PathLike[str], **given: Any) -> GuardConfig:
        """Read a TOML, YAML or JSON file; what is `given` beside it comes first.

        Fields of Policy stand below `policy`. Folders are meant from the current directory.
        """
        policy_names = [one.name for one in fields(Policy)]
        table, policy = read_tables(Path(path), [one.name for one in fields(cls)], policy_names)
        try:
            return cls(**{"policy": Policy(**policy), **table, **given})
        except ConfigError as error:
            hint = number_as_text(Path(path), {**policy, **table})
            raise ConfigError(f"{path}: {error}{hint}") from None
        except TypeError as error:
            # A text where a number belongs, and a check compared the two.
            raise ConfigError(f"{path}: a field has a value of the wrong type: {error}.") from None

    def __post_init__(self) -> None:
        self._check_types()
        _positive("GuardConfig.clip_norm", self.clip_norm)
        _positive("GuardConfig.loss_scale", self.loss_scale)
        _positive("GuardConfig.lr", self.lr)
        _positive("GuardConfig.spike_sigmas", self.spike_sigmas)
        _count("GuardConfig.spike_window", self.spike_window, least=8)
        if self.snapshot_every != "auto":
            _count("GuardConfig.snapshot_every", self.snapshot_every, least=1)
        # 0 takes none; a single one could not be on probation beside one that is good.
        if self.snapshots:
            _count("GuardConfig.snapshots", self.snapshots, least=2)
        _count_or_none("GuardConfig.snapshot_memory", self.snapshot_memory)
        _count("GuardConfig.probation", self.probation, least=1)
        _count("GuardConfig.replay_memory", self.replay_memory)
        _count_or_none("GuardConfig.checkpoint_every", self.checkpoint_every, least=1)
        _count("GuardConfig.keep", self.keep, least=1)
        _count_or_none("GuardConfig.keep_every", self.keep_every, least=1)
        _one_of("GuardConfig.resume_lr", self.resume_lr, ("checkpoint", "config"))
        _one_of("GuardConfig.on_signal", self.on_signal, ("save", "off"))
        _positive("GuardConfig.signal_grace", self.signal_grace)
        if not isinstance(self.policy, Policy):
            raise ConfigError(
                f"GuardConfig.policy={self.policy!r} is not a stepguard.Policy; give Policy(...)."
            )
        _count("GuardConfig.capsule_limit", self.capsule_limit)
        _one_of("GuardConfig.anomalies", self.anomalies, ("note", "act", "off"))
        if self.outliers is not None:
            _one_of("GuardConfig.outliers", self.outliers, ("note",))
        if self.scheduler_every is not None:
            _one_of("GuardConfig.scheduler_every", self.scheduler_every, ("step", "epoch"))
        _positive("GuardConfig.locate_budget", self.locate_budget)
        _positive("GuardConfig.agree_timeout", self.agree_timeout)
        _count_or_none("GuardConfig.compare_ranks_every", self.compare_ranks_every, least=1)
        if self.hang_after is not None:
            _positive("GuardConfig.hang_after", self.hang_after)
        if self.look_every not in ("auto", None):
            _count("GuardConfig.look_every", self.look_every, least=1)
        if self.build is not None and self.build.count(":") != 1:
            raise ConfigError(
                f"GuardConfig.build={self.build!r} must look like 'package.module:function'."
            )
        _one_of("GuardConfig.capsule", self.capsule, ("full", "no-data", "off"))
        _one_of("GuardConfig.terminal", self.terminal, ("auto", "quiet", "logging"))
        _sinks(self.sinks)

    def _check_types(self) -> None:
        _path("GuardConfig.run_dir", self.run_dir)
        _path("GuardConfig.human_log", self.human_log)
        _flag("GuardConfig.locate", self.locate)
        for name in ("labels_key", "id_key", "build"):
            _text(f"GuardConfig.{name}", getattr(self, name))
        _whole("GuardConfig.ignore_index", self.ignore_index)


def _sinks(sinks: object) -> None:
    if not isinstance(sinks, tuple) or not all(isinstance(sink, Sink) for sink in sinks):
        raise ConfigError(
            f"GuardConfig.sinks={sinks!r} must be a tuple of stepguard.integrations.sinks.Sink, "
            "for instance (TensorBoardSink('logs'),)."
        )


def _path(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str | PathLike):
        raise ConfigError(f"{name}={value!r} must be the path of a folder, or None.")
    if isinstance(value, str) and not value.strip():
        raise ConfigError(f"{name}={value!r} names no folder; give its path, or None.")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False.")


def _text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name}={value!r} must be a name, or None.")


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r} must be a number.")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be a whole number.")


def _quoted(allowed: tuple[str, ...]) -> str:
    return ", ".join(repr(a) for a in allowed)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not known; use one of {_quoted(allowed)}.")


def _positive(name: str, value: float | None) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a finite number above 0, or None.")


def _count(name: str, value: object, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")


def _count_or_none(name: str, value: object, least: int = 0) -> None:
    if value is not None:
        _count(name, value, least)
