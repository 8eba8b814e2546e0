"""Where the first harmful value was born."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.field_docs import documented
from stepguard.records.notebook_html import Row, box, code, stacked

Phase = Literal["input", "forward", "loss", "backward", "optimizer", "state", "checkpoint"]


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One tensor or number that went into, or came out of, the operation."""

    name: str = ""
    """Argument name in the operator's schema, or a stored tensor's name."""
    label: str = ""
    """What to call it: the user's own expression in the source line, or its part (`the divisor`);
    empty where `name` says it.
    """
    dtype: str = ""
    """Such as `float32`."""
    shape: tuple[int, ...] = ()
    """Sizes, empty for a number."""
    min: float | None = None
    """Smallest finite element."""
    max: float | None = None
    """Largest finite element."""
    nan: int = 0
    """How many elements are NaN."""
    posinf: int = 0
    """How many are +Inf."""
    neginf: int = 0
    """How many are -Inf."""
    zeros: int = 0
    """How many are 0."""
    index: tuple[int, ...] | None = None
    """First non-finite element, or for an operand the element that broke the operation."""
    value: float | None = None
    """The element at `index`, or the number itself for a Python scalar."""
    exponents: tuple[tuple[int, int], ...] = ()
    """How many elements lie from 2^n to below 2^(n+1), by n; zeros and non-finite ones are not in
    it. Of a tensor of more than a million elements, a regular part of them.
    """

    @property
    def finite(self) -> bool:
        return not (self.nan or self.posinf or self.neginf)

    @property
    def called(self) -> str:
        """The label, or else the name."""
        return self.label or self.name


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The user's statement that an operation is part of."""

    file: str
    """The source file, as Python knows it."""
    line: int
    """Its first line, counted from 1."""
    text: str
    """Its lines as they are in the file."""
    start: int
    """Where the operation begins in `text`, in bytes of UTF-8."""
    end: int
    """Where it ends."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Origin:
    """The birth of the first harmful value, as exactly as it could be confirmed.

    For instance:

        origin = guard.incidents[0].origin
        print(origin.source, origin.op, origin.module, origin.samples)
    """

    step: int
    """Optimizer step, counted from 0."""
    phase: Phase
    """input, forward, loss, backward, optimizer, state or checkpoint. `state`: a parameter, buffer
    or optimizer slot was bad before the step.
    """
    module: str | None = None
    """Dotted path; "" is the root model's own forward, None is outside every module."""
    op: str | None = None
    """The aten packet, for instance `aten._softmax`."""
    node: str | None = None
    """The autograd node, backward only."""
    source: str | None = None
    """`file.py:88` of the user's frame."""
    library: str | None = None
    """`package/file.py:47` of an installed package that the user's line has called; None where the
    operation is in the user's own line.
    """
    context: tuple[str, ...] = ()
    """Source lines around `source`, each with its number."""
    statement: Statement | None = None
    """The statement at `source`, and which part of it the operation is."""
    tensor: str | None = None
    """`batch:x`, `param:NAME`, `buffer:NAME`, `opt:SLOT` where a stored tensor is the culprit."""
    samples: tuple[int, ...] = ()
    """Indices in the batch, each confirmed by leaving it out, or for a finite loss that jumped far
    larger than all others; empty when none could be found.
    """
    rows: tuple[str, ...] = ()
    """Who the samples are, in the order of `samples`: `row 48211` of the data set, `id a.png`;
    empty: not known.
    """
    content: str = ""
    """What the first of these samples holds: dtype, shape and range of its tensors."""
    excerpt: str = field(default="", compare=False)
    """The beginning of its text, where it has one. For the terminal of this process only: no file
    and no other process gets it.
    """
    micro_batch: int | None = None
    """Which micro-batch of the step, counted from 0; None where there is one, or it is not known.
    """
    rank: int | None = None
    """Rank that made it; None where that is not known."""
    inputs: tuple[Operand, ...] = ()
    """What the operation was given."""
    output: Operand | None = None
    """What it returned."""
    method: str = ""
    """How it was found: `replay`, `scan`, `output-gradient`, ..."""
    reproduced: bool | None = None
    """True: the replay shows it again; False: it does not (transient); None: no replay was
    possible.
    """
    evidence: Evidence = NO_EVIDENCE
    """What was measured around the bad value; the rules that name a cause read it."""
    remarks: tuple[str, ...] = ()
    """Sentences for people: what was not seen, and what was left out for lack of time."""

    @property
    def place(self) -> str:
        """`aten._softmax in layers.3.attn at model.py:88`, as far as it is known."""
        words = [self.tensor or self.op or ""]
        if self.node:
            words.append(f"({self.node})" if words[0] else self.node)
        if self.module is not None:
            words.append(f"in {self.module or 'the model itself'}")
        if self.library:
            words.append(f"at {self.library}")
        if self.source and self.source != self.library:
            words.append(f"called from {self.source}" if self.library else f"at {self.source}")
        return " ".join(words).strip()

    @property
    def culprits(self) -> str:
        """`sample 4 (row 48211)` of the batch; empty where none could be confirmed."""
        said = ""
        if self.samples:
            said = "sample " + ", ".join(map(str, self.samples))
        if self.rows:
            said += f" ({', '.join(self.rows)})"
        return said

    def html_rows(self) -> list[Row]:
        """What a notebook shows of it."""
        return [
            ("where", f"{self.phase}: {self.place}" if self.place else self.phase),
            ("sample", self.culprits.removeprefix("sample ")),
            ("source", code(self.context)),
            ("values", stacked(_in_words(operand) for operand in self.inputs)),
            ("note", stacked(self.remarks)),
        ]

    def _repr_html_(self) -> str:
        return box(f"Origin of the bad value, step {self.step}", self.html_rows(), bad=True)

    def __repr__(self) -> str:
        said = " ".join(part for part in (self.place, self.culprits) if part)
        return f"<Origin: {self.phase} of step {self.step}, {said or 'place not known'}>"


def _in_words(operand: Operand) -> str:
    shape = "x".join(map(str, operand.shape)) or "number"
    said = f"{operand.called or 'input'}: {operand.dtype} {shape}"
    if operand.min is not None and operand.max is not None:
        said += f", {operand.min:.6g} to {operand.max:.6g}"
    counts = (
        ("NaN", operand.nan),
        ("Inf", operand.posinf + operand.neginf),
        ("zero", operand.zeros),
    )
    for name, count in counts:
        if count:
            said += f", {count} {name}"
    return said


def with_evidence(origin: Origin, more: Evidence) -> Origin:
    """The origin with further facts; what it states already stays."""
    return replace(origin, evidence=origin.evidence | more)
