"""One bad step as the rules see it: origin, reading, verdict, run, and the usual questions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stepguard.diagnose.dtypes import NARROW, SHORT, floating, plain
from stepguard.diagnose.run_facts import RunFacts
from stepguard.records import Evidence, Operand, Origin, Reading, Verdict
from stepguard.records.evidence import NO_EVIDENCE
from stepguard.records.look import Look
from stepguard.records.place import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bad step. Every question has a harmless answer where nothing is known."""

    reading: Reading
    verdict: Verdict
    origin: Origin | None = None
    facts: RunFacts = field(default_factory=RunFacts)
    looks: tuple[Look, ...] = ()
    """Deep looks of the run, oldest first, where a healthy run is examined."""
    recent: tuple[Reading, ...] = ()
    """The newest committed steps, oldest first, where a healthy run is examined."""
    ended: bool = False
    """The run is over: what would have happened once an epoch did not."""
    schedule_stood_for: int = 0
    """Steps of a run that is over and never stepped the schedule it gave to the guard."""
    faded_since: int | None = None
    """Step since which every learning rate is next to nothing beside its highest one."""
    habits: dict[str, int] = field(default_factory=dict)
    """How many of the last updates used gradients of the update before (`carried`), dropped some
    before they were used (`discarded`, `thrown`), or used some of another optimizer's loss
    (`foreign`)."""
    first_norm: float | None = None
    """Gradient norm of the first step."""
    first_loss: float | None = None
    """Size of the loss of the first step."""
    shrinks_by: float = 0.0
    """Share of a weight that weight decay takes in one update: learning rate times decay."""

    @property
    def phase(self) -> str:
        if self.origin:
            return self.origin.phase
        return ""

    @property
    def op(self) -> str:
        """`aten._foreach_addcdiv_` -> `addcdiv`: in-place and foreach do not matter to a cause."""
        packet = ""
        # a custom function may be called as an operation is, and do something else
        if self.origin and self.evidence.opaque is None:
            packet = self.origin.op or ""
        # `aten.name`, and the overload after it where there is one
        parts = packet.split(".")
        name = parts[1] if len(parts) > 1 else parts[0]
        return name.removeprefix("_foreach_").rstrip("_")

    @property
    def node(self) -> str:
        """`SqrtBackward0` -> `Sqrt`, `torch::autograd::AccumulateGrad` -> `AccumulateGrad`."""
        full = ""
        if self.origin and self.evidence.opaque is None:
            full = self.origin.node or ""
        name = full.rpartition("::")[2]
        return name.partition("Backward")[0]

    @property
    def operated(self) -> bool:
        """An operation or a stored tensor is known as the origin."""
        return self.origin is not None and bool(self.origin.op or self.origin.tensor)

    @property
    def observed(self) -> bool:
        """The first bad value was seen where it was made or stored, with what went in."""
        origin = self.origin
        if origin is None or origin.reproduced is False or self.evidence.untraced:
            return False
        if self.evidence.attribute is not None and self.evidence.constant is not None:
            # the step itself may have written what a module keeps outside its buffers
            return False
        if origin.method in ("replay", "live"):
            return self.operated
        return origin.tensor is not None and self.bad_operand is not None

    @property
    def tensor(self) -> str:
        if self.origin:
            return self.origin.tensor or ""
        return ""

    @property
    def inputs(self) -> tuple[Operand, ...]:
        if self.origin:
            return self.origin.inputs
        return ()

    @property
    def output(self) -> Operand | None:
        if self.origin:
            return self.origin.output
        return None

    @property
    def evidence(self) -> Evidence:
        """What locating measured around the bad value."""
        if self.origin:
            return self.origin.evidence
        return NO_EVIDENCE

    @property
    def impure(self) -> bool:
        """The loss function was seen to depend on more than its batch."""
        return bool(self.evidence.moves) or self.evidence.different_losses is not None

    def argument(self, name: str, position: int) -> Operand | None:
        """An operand by its name in the schema, or by position where operands carry no names."""
        for operand in self.inputs:
            if operand.name == name:
                return operand
        # a list of tensors, as foreach operators take it: `self[0]`, `self[1]`, ...
        listed = [operand for operand in self.inputs if operand.name.startswith(f"{name}[")]
        if listed:
            return _most_telling(listed)
        if position < len(self.inputs) and not self.inputs[position].name:
            return self.inputs[position]
        return None

    @property
    def bad_operand(self) -> Operand | None:
        """The first operand, or else the result, that holds NaN or Inf."""
        for operand in (*self.inputs, self.output):
            if operand is not None and not operand.finite:
                return operand
        return None

    @property
    def dtype(self) -> str:
        """The floating-point dtype of the result, or of the first operand that has one."""
        for operand in (self.output, *self.inputs):
            if operand is not None and floating(operand.dtype):
                return plain(operand.dtype)
        return ""

    @property
    def short(self) -> bool:
        """Half precision or below."""
        return self.dtype in SHORT

    @property
    def narrow(self) -> bool:
        """Half precision with a small range: float16 and below, not bfloat16."""
        return self.dtype in NARROW

    @property
    def finite_inputs(self) -> bool:
        return all(operand.finite for operand in self.inputs)

    @property
    def makes_nan(self) -> bool:
        """The result holds NaN; also True where the result was not described."""
        return self.output is None or self.output.nan > 0

    @property
    def makes_inf(self) -> bool:
        """The result holds an infinity; also True where the result was not described."""
        return self.output is None or self.output.posinf + self.output.neginf > 0

    @property
    def magnitude(self) -> float:
        """Largest finite absolute value that went in."""
        return max((reach(operand) for operand in self.inputs), default=0.0)

    @property
    def loss_finite(self) -> bool:
        losses = (self.reading.loss, *self.reading.micro_losses)
        known = [value for value in losses if value is not None]
        return bool(known) and all(math.isfinite(value) for value in known)

    @property
    def forward(self) -> bool:
        return self.phase in ("forward", "loss", "input")

    @property
    def computes(self) -> bool:
        """Values are computed here, not their slopes: in a forward, a loss or an optimizer."""
        return self.forward or self.phase == "optimizer"

    @property
    def unselected(self) -> bool:
        """The bad value sits in a branch that `where` did not take."""
        return self.evidence.unselected

    @property
    def absorbed(self) -> bool:
        """An infinity was born in forward, yet the loss is finite: something swallowed it."""
        if self.evidence.absorbed:
            return True
        # no function turns NaN into a number, so only an infinity can be swallowed
        only_inf = self.output is not None and self.makes_inf and not self.makes_nan
        return self.forward and only_inf and self.loss_finite and not self.reading.grads_finite

    @property
    def wider(self) -> str:
        """The dtype in which the same operation is finite, where that was tried."""
        return plain(self.evidence.finite_in or "")

    @property
    def place(self) -> str:
        """The operation and where it stands, for a sentence."""
        if self.origin is None:
            return "the step"
        return place(self.origin, self.origin.op or self.tensor or "an operation")

    @property
    def overflows_by_scale(self) -> bool:
        """The gradients are finite at loss scale 1."""
        return not self.reading.grads_finite and (
            self.reading.overflow or self.evidence.scale_overflow
        )

    @property
    def confirmed_samples(self) -> str:
        """The guilty samples in words; empty when none was confirmed."""
        if self.origin is None or not self.origin.samples:
            return ""
        which = ", ".join(map(str, self.origin.samples))
        batch = ""
        if self.origin.micro_batch:
            # people count from 1
            batch = f" of micro-batch {self.origin.micro_batch + 1}"
        return f"sample {which}{batch} causes it: without it the step is finite"


def _most_telling(operands: list[Operand]) -> Operand:
    """The first that holds NaN, Inf or 0, else the first."""
    for operand in operands:
        if not operand.finite or has_zero(operand):
            return operand
    return operands[0]


def met(operand: Operand) -> tuple[float, float]:
    """What stood at the bad position: that one element where it is known, else the whole range."""
    element = _element(operand)
    if element is None:
        return _ends(operand)
    return (element, element)


def low(operand: Operand) -> float:
    """The smallest finite element; of a Python number, the number."""
    return _ends(operand)[0]


def high(operand: Operand) -> float:
    """The largest finite element; of a Python number, the number."""
    return _ends(operand)[1]


def _element(operand: Operand) -> float | None:
    """The element at the bad position, where it is known and finite."""
    if operand.index is None or operand.value is None or not math.isfinite(operand.value):
        return None
    return operand.value


def _ends(operand: Operand) -> tuple[float, float]:
    stated = (operand.min, operand.max, operand.value)
    known = [value for value in stated if value is not None and math.isfinite(value)]
    if not known:
        return math.nan, math.nan
    return min(known), max(known)


def reach(operand: Operand) -> float:
    """Largest finite absolute value."""
    small, big = _ends(operand)
    if math.isnan(small):
        return 0.0
    return max(abs(small), abs(big))


def has_zero(operand: Operand | None) -> bool:
    """A zero at the bad position where that is known, else a zero anywhere."""
    if operand is None:
        return False
    element = _element(operand)
    if element is not None:
        return element == 0.0
    if operand.zeros > 0 or operand.value == 0.0:
        return True
    return operand.min == 0.0 and operand.max == 0.0


def elements(operand: Operand) -> int:
    """How many elements the operand has."""
    return math.prod(operand.shape)
