"""The user's settings: frozen, keyword-only, validated when they are built."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stepguard._errors import ConfigError
from stepguard.records.codec import UnquotedNumber, read_table, record
from stepguard.records.incident import Action, Sink

ACTIONS: tuple[str, ...] = get_args(Action)


@record
class Policy:
    """What the guard may do about an incident, and how much a run may lose. The fault decides which
    of the allowed actions is taken.

    For instance:

        Policy(actions=("skip", "stop"), max_lost_share=0.1)
    """

    actions: tuple[Action, ...] = ("retry", "leave_out", "skip", "heal", "rewind", "stop")
    """Allowed actions, tried in this order: retry a transient failure, leave out the samples that
    are proven guilty, skip the step; for damaged state, heal from a rank with a copy, else rewind.
    `stop` is always allowed. A state that is non-finite before the first step stops the run, unless
    `note` is among the actions: then it is reported and training continues.
    """
    max_consecutive: int | None = None
    """Stop the run after this many incidents in a row; None sets no limit."""
    max_total: int | None = None
    """Stop the run after this many incidents altogether; None sets no limit."""
    max_rewinds: int = 3
    """Largest number of rewinds in the whole run."""
    max_lost_share: float = 0.5
    """Stop the run when more than this share of the samples of the last 200 steps was dropped
    because data, forward or loss were bad, and at least 32 steps were lost.
    """
    on_incident: Literal["decide", "whatif"] = "decide"
    """`whatif` repeats recent steps before it drops or rewinds a bad one, and applies the cheapest
    remedy that keeps the bad value away: skip, leave out, larger epsilon, harder clipping, lower
    learning rate. It costs about 60 steps for each of the first 20 incidents; one process only.
    """
    exceptions: Literal["raise", "skip"] = "raise"
    """What happens to an exception in the step, under `guard.step`: `raise` records it and raises
    it again, `skip` records it and drops the step, within the limits above. Ctrl+C, exits and
    out-of-memory errors are always raised.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))
        known = ", ".join(map(repr, ACTIONS))
        for action in self.actions:
            if action not in ACTIONS:
                raise ConfigError(f"Policy.actions: {action!r} is not known; use one of {known}.")
        if not self.actions:
            raise ConfigError(f"Policy.actions is empty; give at least one of {known}.")
        _check(self)


@record
class Snapshots:
    """Copies of the training state in memory, the targets of a rewind."""

    every: int | Literal["auto"] = "auto"
    """Steps between snapshots; `auto` spends at most 0.5 % of the training time on copying."""
    count: int = 3
    """Snapshots kept at a time; 0 turns snapshots off."""
    memory: int | None = None
    """Most bytes of host memory for all snapshots; None allows half of the memory that is free when
    the first one is taken.
    """
    probation: int = 20
    """Healthy steps, with the loss at its usual level, after which a snapshot or checkpoint counts
    as good.
    """

    def __post_init__(self) -> None:
        _check(self)


@record
class Probes:
    """What is measured besides the verdict, and how long locating a cause may take."""

    look_every: int | Literal["auto"] | None = "auto"
    """Steps between health probes, which take statistics of a healthy step while it runs. `auto`
    probes the third step, then less and less often, for at most 0.1 % of the training time; None
    turns probes off.
    """
    locate_budget: float = 6.0
    """How long locating one incident may take, in multiples of an unguarded step; 0 turns replays
    off.
    """
    spike_sigmas: float | None = 6.0
    """Report a loss this many robust standard deviations above the median; None reports no spikes.
    """
    anomalies: Literal["note", "act", "off"] = "note"
    """Response to a jump or slow rise of a finite loss. `note` reports it and runs none of your
    code again; `act` rewinds if independent evidence shows that the weights are the cause; `off`
    ignores it.
    """
    outliers: Literal["note"] | None = None
    """`note` reports a parameter's gradient that is far above its recent norms, before it enters
    the optimizer's moments; None does not measure gradients per parameter.
    """
    audit_every: int | None = None
    """Steps between audits. An audited step runs twice more from the same state, which is put back
    afterwards; a result that differs points at the hardware (SG928). None turns audits off.
    """

    def __post_init__(self) -> None:
        _check(self)


@record
class Ranks:
    """How long ranks wait for each other, and how often they are compared."""

    timeout: float = 60.0
    """Seconds a rank waits for the others at an incident (at most 30 in `save` and `restore`).
    After that the step stays vetoed, and the guard names the missing ranks and ends. After five
    times as long without any progress, one line names the ranks that are behind.
    """
    compare_every: int | None = None
    """Steps between comparisons of the ranks: weights of replicas, learning rates and data. Each
    costs one pass over the weights and a small exchange; None turns them off.
    """

    def __post_init__(self) -> None:
        _check(self)


@record
class GuardConfig:
    """Settings of one guard. An invalid value raises ConfigError as soon as it is given.

    For instance:

        GuardConfig(run_dir="runs/a", checkpoint_every=500, policy=Policy(max_total=20))
        GuardConfig.from_file("guard.toml")
    """

    clip_norm: float | None = None
    """Clip the gradients to this 2-norm before every update; None does not clip. Under `watch` and
    `stepguard run` this works as if the loop called `clip_grad_norm_` before `optimizer.step()`.
    """
    run_dir: str | PathLike[str] | None = None
    """Folder for journal, incidents and checkpoints; None writes nothing."""
    human_log: str | PathLike[str] | None = None
    """Folder for a readable log: `latest.log` (a link to the newest) and `training_log.jsonl`."""
    policy: Policy = field(default_factory=Policy)
    """What the guard may do about an incident, and how much a run may lose."""
    snapshots: Snapshots = field(default_factory=Snapshots)
    """Copies of the training state in memory."""
    probes: Probes = field(default_factory=Probes)
    """What is measured besides the verdict."""
    ranks: Ranks = field(default_factory=Ranks)
    """How long ranks wait for each other, and how often they are compared."""
    checkpoint_every: int | None = None
    """Steps between sealed checkpoints; None saves only when `guard.save()` is called. Each is
    written in the background after its probation.
    """
    keep: int = 3
    """Number of newest good checkpoints kept on disk, besides the best one."""
    resume_lr: Literal["checkpoint", "config"] = "checkpoint"
    """Which learning rate applies if the checkpoint's differs from the one the optimizer was built
    with.
    """
    on_signal: Literal["save", "off"] = "save"
    """On SIGTERM or Ctrl+C, `save` finishes the step and saves a good state first, if there is a
    `run_dir`; `off` does not handle signals.
    """
    loss_scale: float | None = None
    """A static loss scale: `guard.step` multiplies the loss by it before backward and divides the
    gradients by it.

    It is halved when the scale itself makes the gradients overflow.
    """
    labels_key: str | None = None
    """Batch key of the targets, so that targets other than -100 are counted."""
    id_key: str | None = None
    """Batch key of one id per sample, used to name bad samples."""
    capsule: Literal["full", "no-data", "off"] = "full"
    """What is kept of a bad step on disk: everything, everything but the batch, or nothing."""
    capsule_limit: int = 2**30
    """Most bytes of one capsule. For a larger step, parameters, buffers and optimizer state are
    not kept, and a replay takes them from a sealed checkpoint of the run.
    """
    build: str | None = None
    """`module:function` that returns (model, optimizer, loss_fn), so that a capsule can be replayed
    on another machine.
    """
    terminal: Literal["auto", "quiet", "logging"] = "auto"
    """`quiet` prints only the line that names a stop; `logging` sends messages to Python's logging
    instead of stderr.

    Incidents are recorded either way.
    """
    sinks: tuple[Sink, ...] = ()
    """Loggers that receive every step and incident on rank 0; see stepguard.integrations.sinks."""

    @classmethod
    def from_file(cls, path: str | PathLike[str], **given: Any) -> GuardConfig:
        """Read a TOML, YAML or JSON file; settings `given` here override those of the file.

        Each group is a table: `[policy]`, `[snapshots]`, `[probes]`, `[ranks]`. Relative paths
        start at the current directory.
        """
        table = read_table(Path(path))
        written = dict(table)
        try:
            if "sinks" in table:
                raise ConfigError(
                    "sinks is a Python object and cannot be set in a file; set it in code."
                )
            for name in ("run_dir", "human_log"):
                if isinstance(table.get(name), str) and table[name].strip():
                    # Absolute paths: the program may change the current directory.
                    table[name] = str(Path(table[name]).resolve())
            for group, kind in GROUPS.items():
                below = table.get(group, {})
                if not isinstance(below, dict):
                    raise ConfigError(
                        f"{group}={below!r} must be a table; in TOML write [{group}] and its "
                        "fields below it."
                    )
                written |= below
                # YAML also has names that are not text, such as 1.
                table[group] = kind(**{str(name): value for name, value in below.items()})
            return cls(**{**{str(name): value for name, value in table.items()}, **given})
        except ConfigError as error:
            said = str(error)
            for name, value in written.items():
                if isinstance(value, UnquotedNumber):
                    said += f" YAML reads {name}: {value} as text; write it with a point: 1.0e-4."
            # A name or value of the file may hold line breaks; an error is one line.
            raise ConfigError(f"{path}: {' '.join(said.split())}") from None

    @property
    def locates(self) -> bool:
        """May a bad step be replayed to find where its first harmful value originated?"""
        return self.probes.locate_budget > 0

    def __post_init__(self) -> None:
        _check(self)


GROUPS: dict[str, type[Any]] = {
    "policy": Policy,
    "snapshots": Snapshots,
    "probes": Probes,
    "ranks": Ranks,
}

# --- What each setting may be: its annotation, and a rule for what that cannot say, which is a test
# and what a message says that the value must be.


Rule = tuple[Callable[[Any], bool], str]


def _count(least: int) -> Rule:
    return (
        lambda value: type(value) is int and value >= least,
        f"must be a whole number of at least {least}",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_POSITIVE: Rule = (
    lambda value: _is_number(value) and 0 < value < math.inf,
    "must be a finite number above 0",
)
_FOLDER: Rule = (
    lambda value: isinstance(value, PathLike) or (isinstance(value, str) and bool(value.strip())),
    "must be the path of a folder",
)
_NAME: Rule = (lambda value: isinstance(value, str) and bool(value), "must be a name")


def _group(kind: type[Any]) -> Rule:
    name = kind.__name__
    return lambda value: isinstance(value, kind), f"is not a stepguard.{name}; give {name}(...)"


RULES: dict[type[Any], Mapping[str, Rule]] = {
    Policy: {
        "max_consecutive": _count(0),
        "max_total": _count(0),
        "max_rewinds": _count(0),
        "max_lost_share": (
            lambda value: _is_number(value) and 0 < value <= 1,
            "must be a number above 0 and up to 1",
        ),
    },
    Snapshots: {
        "every": _count(1),
        # a single one could not be on probation beside one that is good
        "count": (
            lambda value: type(value) is int and (value == 0 or value >= 2),
            "must be 0 or a whole number of at least 2",
        ),
        "memory": _count(0),
        "probation": _count(1),
    },
    Probes: {
        "look_every": _count(1),
        "locate_budget": (
            lambda value: _is_number(value) and 0 <= value < math.inf,
            "must be a finite number of at least 0",
        ),
        "spike_sigmas": _POSITIVE,
        "audit_every": _count(1),
    },
    Ranks: {"timeout": _POSITIVE, "compare_every": _count(1)},
    GuardConfig: {
        "clip_norm": _POSITIVE,
        "run_dir": _FOLDER,
        "human_log": _FOLDER,
        **{name: _group(kind) for name, kind in GROUPS.items()},
        "checkpoint_every": _count(1),
        "keep": _count(1),
        "loss_scale": _POSITIVE,
        "labels_key": _NAME,
        "id_key": _NAME,
        "capsule_limit": _count(1),
        "build": (
            lambda value: isinstance(value, str) and value.count(":") == 1,
            "must look like 'package.module:function'",
        ),
        "sinks": (
            lambda value: isinstance(value, tuple) and all(isinstance(v, Sink) for v in value),
            "must be a tuple of stepguard.integrations.sinks.Sink, for instance "
            "(TensorBoardSink('logs'),)",
        ),
    },
}
_hints: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)


def _check(settings: Any) -> None:
    kind = type(settings)
    for name, hint in _hints(kind).items():
        value = getattr(settings, name)
        # of `tuple[Action, ...]` the items are checked where it is built
        members = () if get_origin(hint) is tuple else (hint, *get_args(hint))
        words = [word for one in members if get_origin(one) is Literal for word in get_args(one)]
        allows, needed = RULES[kind].get(name, (None, ""))
        more = words
        if allows is None and words:
            needed = f"is not known; use one of {', '.join(map(repr, words))}"
            more = []
        if type(None) in members:
            more = [*more, None]
        if not needed or value in (*words, *more) or (allows is not None and allows(value)):
            continue
        either = "".join(f", or {other!r}" for other in more)
        raise ConfigError(f"{kind.__name__}.{name}={value!r} {needed}{either}.")


def _refuse_unknown(kind: type[Any]) -> None:
    """Let the constructor say where a setting that it does not have belongs."""
    make = kind.__init__

    @functools.wraps(make)
    def init(self: Any, **given: Any) -> None:
        known = [one.name for one in fields(kind)]
        homes = {}
        for one in fields(GuardConfig):
            homes[one.name] = "in GuardConfig itself, in a file outside of every table"
        prefix = ""
        for group, home in GROUPS.items():
            where = f"in GuardConfig({group}={home.__name__}(...)), in a file below [{group}]"
            homes.update({one.name: where for one in fields(home)})
            if home is kind:
                prefix = f"{group}."
        for name in given:
            if name in known:
                continue
            said = f"{prefix}{name if name.isidentifier() else repr(name)} is not known."
            near = get_close_matches(name, known, n=1)
            elsewhere = get_close_matches(name, homes, n=1)
            if name in homes:
                said += f" It belongs {homes[name]}."
            elif near:
                said += f" Did you mean {prefix}{near[0]}?"
            elif elsewhere:
                said += f" Did you mean {elsewhere[0]}, {homes[elsewhere[0]]}?"
            else:
                said += f" Known are {', '.join(known)}."
            raise ConfigError(said)
        make(self, **given)

    kind.__init__ = init


for _kind in RULES:
    _refuse_unknown(_kind)
