"""The result of verifying a checkpoint: problems with their place, and what the file holds."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from stepguard.records.codec import record

# --- The result of verifying a checkpoint: problems with their place, and what the file holds.


Role = Literal["parameter", "buffer", "optimizer", "ema", "scaler", "scheduler", "rng", "other"]
Weight = Literal["error", "warning"]
ProblemKind = Literal[
    "nan",
    "inf",
    "magnitude",
    "negative",
    "zero",
    "constant",
    "checksum",
    "torn",
    "malformed",
    "missing",
    "duplicate",
    "index",
    "hostile",
    "global",
    "limit",
    "unreadable",
    "format",
    "link",
    "seal",
    "diverged",
    "loss",
    "lr",
]
"""`hostile`: loading it with pickle could run code. `global`: a class that is not on the list of
what checkpoints need, so that loading runs code nobody has checked. `diverged`: complete, finite,
and sealed as not good.
"""
NOT_DAMAGE = ("lr", "diverged")
"""Kinds of errors of a checkpoint that is complete and finite."""


@record
class Problem:
    """One thing that is wrong, or suspicious, in one file.

    For instance:

        for problem in stepguard.verify("runs/a").problems:
            print(problem)
    """

    file: str
    """Path of the file."""
    kind: ProblemKind
    """Such as `nan`, `torn`, `missing`, `hostile`."""
    tensor: str | None = None
    """Name inside the file, such as `state_dict/layer.weight`."""
    detail: str = ""
    """A sentence with the numbers."""
    severity: Weight = "error"
    """`error`, or `warning` for what is suspicious."""
    role: Role | None = None
    """What the tensor is: a parameter, a buffer, part of the optimizer, ..."""

    def __str__(self) -> str:
        place = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return f"{place}: {self.detail}"


@record
class Rate:
    """One learning rate that a checkpoint stores."""

    file: str
    """Path of the file."""
    name: str
    """Where it stands, such as `optimizer/param_groups/0/lr`."""
    kind: Literal["lr", "initial_lr", "max_lr", "base_lr", "last_lr"]
    """Which of the rates of an optimizer or schedule it is."""
    value: float
    """The rate."""


@record
class Watched:
    """A tensor that was asked for by name, such as a gate, and the range of its values."""

    name: str
    role: Role
    count: int
    low: float
    high: float


@record
class Verification:
    """The result of `stepguard.verify`: one checkpoint, or a folder with several in `parts`.

    For instance:

        found = stepguard.verify("runs/a/checkpoints")
        assert found.ok, found.problems
    """

    path: str
    """What was verified."""
    format: str
    """Such as `torch zip`, `safetensors`, `sharded safetensors`, `DCP`, `sealed`, `folder`."""
    problems: tuple[Problem, ...] = ()
    """Everything that was found, those of the parts included."""
    tensors: int = 0
    """How many tensors there are."""
    bytes: int = 0
    """Size on disk."""
    files: int = 1
    """How many files were read."""
    roles: dict[str, int] = field(default_factory=dict)
    """How many tensors there are of each role."""
    step: int | None = None
    """The training step it says it was written at."""
    rates: tuple[Rate, ...] = ()
    """Learning rates it stores."""
    watched: tuple[Watched, ...] = ()
    """Tensors that were asked for by name, with the range of their values."""
    seconds: float = 0.0
    """How long it took."""
    pointer: str = ""
    """The `last-good` that was given and names this checkpoint."""
    parts: tuple[Verification, ...] = ()
    """The checkpoints of a folder, each with its own problems."""

    @property
    def ok(self) -> bool:
        """Is there no error? There may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    @property
    def corrupt(self) -> bool:
        """Is it damaged? Another learning rate or a diverged run does not count as damage."""
        return any(problem.kind not in NOT_DAMAGE for problem in self.errors)

    @property
    def diverged(self) -> bool:
        """Was it sealed as not good? It is complete and finite, but not safe to resume from."""
        return any(problem.kind == "diverged" for problem in self.errors)

    @property
    def leaves(self) -> tuple[Verification, ...]:
        """Return the single checkpoints: the parts of a folder, or this one."""
        if self.parts:
            return self.parts
        return () if self.format == "folder" else (self,)


# --- What a preflight found: one outcome an item, and the state the run would start in.


Status = Literal["pass", "warn", "fail", "not_applicable", "not_checked"]
Alignment = Literal["aligned", "contradicted", "unproven"]
"""`aligned` needs a probe that agrees with everything configured."""


@record
class Outcome:
    """One item, evaluated against the real objects."""

    id: str
    """Stable, `section.name`."""
    title: str
    status: Status
    evidence: tuple[str, ...] = ()
    """Sentences with numbers; why it is `not_applicable`, or what to give if `not_checked`."""
    fix: str = ""

    @property
    def section(self) -> str:
        return self.id.partition(".")[0]


@record
class Preflight:
    """All outcomes in the order of their sections."""

    target: str
    outcomes: tuple[Outcome, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """State the run would start in, from the live objects: (`AMP enabled`, `yes, bfloat16`)."""
    alignment: Alignment = "unproven"
    alignment_why: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No item failed; warnings are allowed."""
        return not self.of("fail")

    def of(self, *statuses: Status) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status in statuses)

    def outcome(self, identity: str) -> Outcome:
        """The outcome of one item; KeyError if it was not run."""
        for outcome in self.outcomes:
            if outcome.id == identity:
                return outcome
        raise KeyError(identity)


# --- One line of the ledger: samples that a step continued without, and why.


Identity = int | str
"""Index of a sample in the data set (or its key there), or the value of `GuardConfig.id_key`."""
Extent = Literal["sample", "micro_batch", "step"]

DATA_CAUSES = ("SG1", "SG2", "SG4")
"""Codes of what originates in data, forward or loss expression: the same samples fail again."""


@record
class BadSamples:
    """Samples of one micro-batch that did not take part in an update."""

    step: int
    run: str | None = None
    """Id of the run; None where runs have none."""
    attempt: int = 1
    """Which process of the run it was."""
    rank: int = 0
    time: float = 0.0
    micro_batch: int | None = None
    """Which micro-batch of the step, from 0; None where the step had one only."""
    samples: tuple[int, ...] = ()
    """Rows of the micro-batch that are proven guilty; empty where none could be proven."""
    count: int = 0
    """Samples lost; 0 where they cannot be counted."""
    of: int = 0
    """Samples of the whole step; 0 where they cannot be counted."""
    indices: tuple[Identity, ...] | None = None
    """Where `samples` (if empty, all rows) are in the data set, in their order; None: not known."""
    ids: tuple[Identity, ...] | None = None
    """Their values of `GuardConfig.id_key`; None: not known."""
    epoch: int | None = None
    """Pass over the data, from 0."""
    batch: int | None = None
    """Number of the batch in that pass, from 0."""
    left_out: Extent = "step"
    """What the update was made without: the samples, the micro-batch, or the whole step."""
    cause: str = ""
    """Code of the first finding, or the kind of the verdict where there is none."""
    innocent: bool = False
    """These samples did nothing: they were lost with the step of others."""
    place: str = ""
    incident: str = ""

    @property
    def would_fail_again(self) -> bool:
        """Did the data cause it, rather than the weights, the scale or the hardware?"""
        return self.cause.startswith(DATA_CAUSES)
