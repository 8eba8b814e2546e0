"""The result of verifying a checkpoint: problems with their place, and what the file holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stepguard.records.field_docs import documented

Role = Literal["parameter", "buffer", "optimizer", "ema", "scaler", "scheduler", "rng", "other"]
Weight = Literal["error", "warning"]
ProblemKind = Literal[
    "nan",
    "inf",
    "magnitude",
    "outlier",
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
what checkpoints need, so that loading runs code nobody has checked. `diverged`: whole and finite,
and sealed as not good.
"""
NOT_DAMAGE = ("lr", "diverged")
"""Kinds of errors of a checkpoint that is whole and finite."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, or worth a look, in one file.

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
    """`error`, or `warning` for what is worth a look."""
    role: Role | None = None
    """What the tensor is: a parameter, a buffer, part of the optimizer, ..."""

    def __str__(self) -> str:
        place = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return f"{place}: {self.detail}"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A tensor that was asked for by name, such as a gate, and the range of its values."""

    name: str
    role: Role
    count: int
    low: float
    high: float


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Is it damaged? Another learning rate is no damage, nor that its run had diverged."""
        return any(problem.kind not in NOT_DAMAGE for problem in self.errors)

    @property
    def diverged(self) -> bool:
        """Was it sealed as not good? It is whole and finite, but not one to resume from."""
        return any(problem.kind == "diverged" for problem in self.errors)

    @property
    def leaves(self) -> tuple[Verification, ...]:
        """Return the single checkpoints: the parts of a folder, or this one."""
        if self.parts:
            return self.parts
        return () if self.format == "folder" else (self,)
