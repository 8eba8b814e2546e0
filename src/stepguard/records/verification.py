"""The result of verifying a checkpoint: problems with their place, and what the file holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    "loss",
    "lr",
]
"""`hostile`: loading it with pickle could run code. `global`: a class that checkpoints do not need;
an error where pickle would call it, a warning where it would only be imported.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, or worth a look, in one file."""

    file: str
    kind: ProblemKind
    tensor: str | None = None
    """Name inside the file, such as `state_dict/layer.weight`."""
    detail: str = ""
    severity: Weight = "error"
    role: Role | None = None

    def __str__(self) -> str:
        place = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return f"{place}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One learning rate that a checkpoint stores."""

    file: str
    name: str
    """Where it stands, such as `optimizer/param_groups/0/lr`."""
    kind: Literal["lr", "initial_lr", "max_lr", "base_lr", "last_lr"]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A tensor that was asked for by name, such as a gate, and the range of its values."""

    name: str
    role: Role
    count: int
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `stepguard.verify`: one checkpoint, or a folder with several in `parts`."""

    path: str
    format: str
    """Such as `torch zip`, `safetensors`, `sharded safetensors`, `DCP`, `sealed`, `folder`."""
    problems: tuple[Problem, ...] = ()
    """Everything that was found, those of the parts included."""
    tensors: int = 0
    bytes: int = 0
    files: int = 1
    roles: dict[str, int] = field(default_factory=dict)
    """How many tensors there are of each role."""
    step: int | None = None
    """The training step it says it was written at."""
    rates: tuple[Rate, ...] = ()
    watched: tuple[Watched, ...] = ()
    seconds: float = 0.0
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
        """Is there an error in the checkpoint itself, and not only another learning rate?"""
        return any(problem.kind != "lr" for problem in self.errors)

    @property
    def leaves(self) -> tuple[Verification, ...]:
        """Return the single checkpoints: the parts of a folder, or this one."""
        if self.parts:
            return self.parts
        return () if self.format == "folder" else (self,)
