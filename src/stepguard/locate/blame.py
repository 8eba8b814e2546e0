"""From the bad loss or gradient back to the operation that made the first harmful value.

Only bad values that explain bad values are followed, so an infinity that was absorbed is never
blamed. When only the gradient is bad, a bad value of the forward is the origin if it was absorbed
there (erf, clamp, gather) or if it is a NaN that indexing or a mask dropped later on. The backward
node is the origin if the forward had deselected the value by a condition on the function's own
argument, as in `where(x > 0, sqrt(x), 0)`, or if it was only infinite: the forward is right by
intention then, and only the gradient of the unselected branch does harm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from stepguard.locate.operands import COPIES, Call, ancestors, earliest, real_maker
from stepguard.locate.tracer import MOST_POSITIONS, Tracer
from stepguard.records.incident import NO_EVIDENCE, Evidence

# --- Bad values of the forward that the loss does not show: deselected, dropped or absorbed.


SELECTING_NODES = ("Where", "MaskedFill", "MaskedSelect", "MaskedScatter")
MOST_UPSTREAM = 32
"""Operations of the backward that are searched for a selection."""


class DiscardedValues:
    """Where the bad values of one trace end in the forward pass."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._readers: dict[int, list[Call]] = defaultdict(list)
        for call in tracer.calls:
            for maker in call.flawed:
                self._readers[id(maker)].append(call)

    def last_readers(self, call: Call) -> list[Call]:
        """List the forward operations that a bad value reaches and that give a clean result."""
        seen = {id(call)}
        stack = [call]
        ends = []
        while stack:
            one = stack.pop()
            for reader in self._readers[id(one)]:
                if reader.stage != "forward" or id(reader) in seen or not reader.numeric:
                    continue
                if one in reader.causes:
                    seen.add(id(reader))
                    stack.append(reader)
                else:
                    ends.append(reader)
        return ends

    def deselected(self, call: Call) -> bool:
        """True if nothing but selections by a condition kept the bad value out of the loss."""
        ends = self.last_readers(call)
        return bool(ends) and all(reader.selects for reader in ends)

    def made_and_dropped(self, first: Call) -> bool:
        """True for a NaN that the forward made and dropped later on.

        False for a function that a `where` on its own argument keeps from its pole.
        """
        if not first.out.nan or first.stage != "forward":
            return False
        if not first.pointwise:
            return True
        argument = {id(real_maker(parent)) for parent in first.parents}
        for reader in self.last_readers(first):
            if reader.selects and not argument & _conditioned_on(reader):
                return True
        return False

    def dropped_by(self, first: Call) -> str | None:
        """Name the operation that left the value out of the loss."""
        for reader in self.last_readers(first):
            return reader.op
        return None

    def absorbed_by(self, call: Call) -> str | None:
        """Name the operation that read the bad value and gave a finite one, as erf and clamp do."""
        for reader in self.last_readers(call):
            if not reader.selects:
                return reader.op
        return None

    def upstream_deselected(self, root: Call) -> bool:
        """True if the 0 that met an infinite derivative comes from a condition that left it out."""
        if not root.evidence.zero_upstream_gradient:
            return False
        queue = []
        for parent in root.parents:
            if parent.stage == "backward" and parent.sequence != root.sequence:
                queue.append(parent)
        for _ in range(MOST_UPSTREAM):
            if not queue:
                return False
            call = queue.pop(0)
            if self._undoes_selection(call):
                return True
            queue.extend(parent for parent in call.parents if parent.stage == "backward")
        return False

    def _undoes_selection(self, call: Call) -> bool:
        """True for the backward of a selection; indexing by positions is not one."""
        owner = self._tracer.owners.get(call.sequence)
        if owner is not None:
            return owner.selects
        return call.node is not None and call.node.startswith(SELECTING_NODES)


def _conditioned_on(selection: Call) -> set[int]:
    """Return the computed values that the condition depends on, behind comparisons and logic."""
    stack = [parent for parent in selection.parents if not parent.numeric]
    seen: set[int] = set()
    values: set[int] = set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.numeric:
            values.add(id(one))
        else:
            stack.extend(real_maker(parent) for parent in one.parents)
    return values


# --- From the bad loss or gradient back to the operation that made the first harmful value.


SCALES = ("aten.mul", "aten.mul_", "aten.div", "aten.div_")
"""A mask is added to what was learned; an infinity that multiplies it is a weight."""
ABSURD = 1e8
"""Beyond what a parameter or buffer holds; positions, counts and frequencies stay far below."""
SENTINEL = 3.38e38
"""The ends of float32 and bfloat16 stand for infinity, in masks for instance."""
MOST_BLOCKS = 64
"""First bad values of the forward whose gradients are compared."""


@dataclass(slots=True)
class FirstBad:
    """The call that made the first harmful value, and for a stored tensor its first consumer."""

    call: Call
    consumer: Call | None = None
    evidence: Evidence = NO_EVIDENCE


def blame_loss(tracer: Tracer, losses: list[Call]) -> FirstBad | None:
    """Find the origin of a bad loss; `losses` are the calls that wrote it."""
    return _Walk(tracer, losses).from_loss()


def blame_gradients(tracer: Tracer, gradients: list[Call]) -> FirstBad | None:
    """Find the origin of bad gradients under a finite loss, from the calls that wrote them."""
    return _Walk(tracer, gradients).from_gradients()


def first_reader(tracer: Tracer, stored: Call) -> Call | None:
    """Return the first operation that read a stored tensor's bad value, whatever became of it."""
    for call in tracer.calls:
        if stored in call.flawed:
            return call
    return None


def huge_operand(call: Call) -> FirstBad | None:
    """Follow the largest operands back to a parameter or buffer that is finite and absurdly large.

    None where the magnitude does not come from one: an operation made it of ordinary operands (a
    quotient, an exponential, a factor), or it was built up over many of them.
    """
    consumer = None
    while call.stage != "stored":
        largest = max(call.parents, key=lambda parent: parent.reach, default=None)
        # a square or a cube still comes from its operand
        if largest is None or largest.index >= call.index or not _explains(largest, call):
            return None
        if call.op not in COPIES:
            consumer = call
        call = largest
    garbage = ABSURD <= call.reach < SENTINEL
    if consumer is None or not garbage or not call.op.startswith(("param:", "buffer:")):
        return None
    return FirstBad(call, consumer)


def _explains(operand: Call, result: Call) -> bool:
    if not math.isfinite(result.reach):
        return operand.reach >= ABSURD
    return operand.reach > 1 and math.log(operand.reach) >= math.log(result.reach) / 3


class _Walk:
    """Goes back over one trace, from the calls that wrote the bad loss or the bad gradients."""

    def __init__(self, tracer: Tracer, targets: list[Call]) -> None:
        self._tracer = tracer
        self._targets = targets
        self._discarded = DiscardedValues(tracer)
        reached: dict[int, Call] = {}
        for target in targets:
            reached.update((id(call), call) for call in ancestors(target))
        self._chain = sorted(reached.values(), key=lambda call: call.index)
        """Every call whose bad values reach a target, in the order in which they ran."""
        self._from_parameters: set[int] | None = None

    def from_loss(self) -> FirstBad | None:
        first = self._first_bad()
        if first is None:
            return self._from_intended_inf()
        return self._as_data(first) or self._finish(first, NO_EVIDENCE)

    def from_gradients(self) -> FirstBad | None:
        first = self._first_bad()
        if first is None:
            return self._from_intended_inf()
        as_data = self._as_data(first)
        if as_data is not None:
            return as_data
        if first.stage == "backward":
            return self._from_backward(first)
        if first.stage == "forward":
            return self._from_forward(first)
        return self._finish(first, NO_EVIDENCE)

    def _first_bad(self, stage: str | None = None) -> Call | None:
        for call in self._chain:
            if call.first_bad and stage in (None, call.stage):
                return call
        return None

    def _from_backward(self, root: Call) -> FirstBad:
        owner = self._tracer.owners.get(root.sequence)
        if owner is not None and owner.harmful and _may_be_same_elements(owner, root):
            found = self._from_bad_output(root, owner)
            if found is not None:
                return found
        # One autograd node runs several operations: any of them may show the 0 that came in.
        siblings = [call for call in self._chain if call.sequence == root.sequence]
        unselected = any(map(self._discarded.upstream_deselected, siblings))
        return self._finish(root, Evidence(unselected=unselected))

    def _from_bad_output(self, root: Call, owner: Call) -> FirstBad | None:
        """The forward operation behind the bad gradient gave a bad value as well."""
        first = earliest([call for call in ancestors(owner) if call.first_bad])
        if self._discarded.deselected(owner):
            if first is not None and self._discarded.made_and_dropped(first):
                return self._finish(first, self._dropping(first))
            return self._finish(root, Evidence(unselected=True))
        if first is not None:
            return self._finish(first, self._absorption(owner))
        return None

    def _from_forward(self, root: Call) -> FirstBad:
        originals = [self._original(call) for call in self._first_bad_of_forward(root)]
        first = min(originals, key=lambda call: call.index)
        if self._discarded.deselected(first):
            if self._discarded.made_and_dropped(first):
                return self._finish(first, self._dropping(first))
            found = self._first_unselected(root)
            if found is not None:
                return found
        return self._finish(first, self._absorption(first))

    def _first_unselected(self, root: Call) -> FirstBad | None:
        """Of several blocks that deselect a bad value, find the one whose gradient went bad first.

        The backward runs from the last block to the first.
        """
        pairs = []
        for call in self._first_bad_of_forward(root):
            original = self._original(call)
            if not self._discarded.deselected(original):
                continue
            gradient = self._gradient_of([call.sequence, original.sequence])
            if gradient is not None:
                pairs.append((gradient, original))
        if not pairs:
            return None
        gradient, original = min(pairs, key=lambda pair: pair[0].index)
        new = self._first_bad("backward")
        if new is not None and new.index < gradient.index and new.sequence != gradient.sequence:
            return self._from_backward(new)
        evidence = Evidence(unselected=True, selected_against=original.op)
        return self._finish(gradient, evidence)

    def _first_bad_of_forward(self, root: Call) -> list[Call]:
        """List the first bad values of the forward that the bad gradient goes back to."""
        others = []
        for call in self._chain:
            if call.first_bad and call.stage == "forward" and call is not root:
                others.append(call)
        return [root, *others[:MOST_BLOCKS]]

    def _original(self, call: Call) -> Call:
        """Return the same operation of the first forward, where a checkpointed block ran twice."""
        if not call.evidence.recomputed:
            return call
        # Blocks of one class share their lines: the module tells them apart.
        wanted = (call.op, call.line, call.module)
        for other in self._tracer.calls:
            if other.index >= call.index:
                break
            if other.first_bad and (other.op, other.line, other.module) == wanted:
                return other
        return call

    def _dropping(self, first: Call) -> Evidence:
        return Evidence(discarded_by=self._discarded.dropped_by(first))

    def _absorption(self, call: Call) -> Evidence:
        return Evidence(absorbed=True, absorbed_by=self._discarded.absorbed_by(call))

    def _gradient_of(self, sequences: list[int]) -> Call | None:
        """Return the operation that gave the bad gradient of one of these autograd nodes."""
        backward = [call for call in self._chain if call.stage == "backward"]
        sequence = _first_evaluated(sequences, backward)
        if sequence is None:
            return None
        passed_on = self._passed_on(backward)
        for call in backward:
            if call.sequence == sequence and id(call) in passed_on:
                return call
        return None

    def _passed_on(self, backward: list[Call]) -> set[int]:
        """Return the calls whose result left their autograd node."""
        passed_on = {id(target) for target in self._targets}
        for call in backward:
            adds = _adds_gradients(call)
            for cause in call.causes:
                if adds or cause.sequence != call.sequence:
                    passed_on.add(id(cause))
        return passed_on

    def _from_intended_inf(self) -> FirstBad | None:
        """The loss is infinite only by a constant: blame what computed with it or reduced it."""
        calls = _with_bad_inputs(self._targets)
        by_number = [call for call in calls if call.number is not None]
        reducing = [call for call in calls if call.reduces]
        found = earliest(by_number or reducing or calls)
        if found is None:
            return None
        return self._as_data(found) or self._finish(found, Evidence(intended_inf=True))

    def _as_data(self, first: Call) -> FirstBad | None:
        """Return the batch tensor or table whose -inf came in as data, not as a mask on scores."""
        seen: set[int] = set()
        stack = [call for call in first.flawed if call.intended_inf]
        while stack:
            call = stack.pop()
            if call.stage == "stored" and call.op.startswith(("batch", "buffer:")):
                consumer = first if call.op.startswith("batch") else self._first_use(call)
                return FirstBad(call, consumer, Evidence(as_data=True))
            if id(call) not in seen and (call.op in SCALES or not self._learned(call)):
                seen.add(id(call))
                stack.extend(call.flawed)
        return None

    def _first_use(self, stored: Call) -> Call | None:
        for call in self._tracer.calls:
            if stored in call.flawed and call.op not in COPIES:
                return call
        return None

    def _learned(self, call: Call) -> bool:
        """True if the value was computed from parameters."""
        if self._from_parameters is None:
            self._from_parameters = set()
            for one in self._tracer.calls:
                if any(self._is_learned(parent) for parent in one.parents):
                    self._from_parameters.add(id(one))
        return self._is_learned(call)

    def _is_learned(self, call: Call) -> bool:
        assert self._from_parameters is not None
        return id(call) in self._from_parameters or call.op.startswith("param:")

    def _finish(self, first: Call, evidence: Evidence) -> FirstBad:
        if first.stage == "stored" or first.uninitialised:
            return FirstBad(first, self._consumer(first), evidence)
        chooser = self._chosen_constant(first)
        if chooser is not None:
            evidence |= Evidence(chosen_by=_condition_of(chooser))
            return FirstBad(chooser, None, evidence)
        evidence |= Evidence(turned_nan_by=self._turned_nan(first))
        return FirstBad(first, None, evidence)

    def _turned_nan(self, first: Call) -> str | None:
        """Name the operation that made a NaN of the infinity."""
        if first.out.nan or not first.out.inf:
            return None
        for call in self._chain:
            if call is first or not call.out.nan:
                continue
            if not any(cause.out.nan for cause in call.causes):
                return call.op
        return None

    def _chosen_constant(self, first: Call) -> Call | None:
        """Return the `where` that chose a NaN constant, as operations without a result do."""
        if first.parents or first.stage != "forward" or not first.out.nan:
            return None
        if first.evidence.opaque:
            return None
        consumer = self._consumer(first)
        if consumer is None or consumer.op != "aten.where":
            return None
        return consumer

    def _consumer(self, stored: Call) -> Call | None:
        """Return the first operation on the way that used the tensor for more than a copy."""
        copies = {id(stored)}
        for call in self._chain:
            if any(id(cause) in copies for cause in call.causes):
                if call.op not in COPIES:
                    return call
                copies.add(id(call))
        return None


def _with_bad_inputs(calls: list[Call]) -> list[Call]:
    """List the calls and every call whose bad output they read, directly or not."""
    seen: set[int] = set()
    found = []
    stack = list(calls)
    while stack:
        call = stack.pop()
        if id(call) not in seen:
            seen.add(id(call))
            found.append(call)
            stack.extend(call.flawed)
    return found


def _condition_of(choice: Call) -> str | None:
    """Name the operation that the condition of a `where` depends on, behind comparisons."""
    if not choice.parents:
        return None
    asked = choice.parents[0]
    while not asked.numeric and asked.parents:
        asked = real_maker(asked.parents[0])
    return None if asked.stage == "stored" else asked.op


def _first_evaluated(sequences: list[int], backward: list[Call]) -> int | None:
    """Return the first of these nodes that was evaluated, else the first that met a bad value."""
    evaluated = {call.sequence for call in backward}
    for sequence in sequences:
        if sequence >= 0 and sequence in evaluated:
            return sequence
    for call in backward:
        if any(cause.stage == "forward" for cause in call.causes):
            return call.sequence
    return None


def _adds_gradients(call: Call) -> bool:
    """True if the engine adds the gradients of several uses of a tensor here."""
    # It does so under the name of the node that the gradients go to.
    if call.op not in ("aten.add", "aten.add_"):
        return False
    return any(p.stage == "backward" and p.sequence != call.sequence for p in call.parents)


def _may_be_same_elements(owner: Call, root: Call) -> bool:
    """True unless the bad elements of a forward value and of its gradient are known to differ."""
    if owner.shape != root.shape or not owner.bad_positions or not root.bad_positions:
        return True
    # Not all positions are kept: a list that is full may be cut.
    if max(len(owner.bad_positions), len(root.bad_positions)) >= MOST_POSITIONS:
        return True
    return bool(set(owner.bad_positions) & set(root.bad_positions))
