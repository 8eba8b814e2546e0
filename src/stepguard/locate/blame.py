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
from collections import defaultdict, deque
from dataclasses import dataclass

from stepguard.locate.operands import COPIES, Call, ancestors, earliest, real_maker, walk
from stepguard.locate.tracer import MOST_POSITIONS, Tracer
from stepguard.records.incident import NO_EVIDENCE, Evidence

# --- Bad values of the forward that the loss does not show: deselected, dropped or absorbed.


SELECTING_NODES = ("Where", "MaskedFill", "MaskedSelect", "MaskedScatter")


# --- From the bad loss or gradient back to the operation that made the first harmful value.


SCALES = ("aten.mul", "aten.mul_", "aten.div", "aten.div_")
"""A mask is added to what was learned; an infinity that multiplies it is a weight."""
ABSURD = 1e8
"""Beyond what a parameter or buffer holds; positions, counts and frequencies stay far below."""


@dataclass(slots=True)
class FirstBad:
    """The call that made the first harmful value, and for a stored tensor its first consumer."""

    call: Call
    consumer: Call | None = None
    evidence: Evidence = NO_EVIDENCE


def blame_loss(tracer: Tracer, losses: list[Call]) -> FirstBad | None:
    """Find the origin of a bad loss; `losses` are the calls that wrote it."""
    return _Walk(tracer, losses).origin()


def blame_gradients(tracer: Tracer, gradients: list[Call]) -> FirstBad | None:
    """Find the origin of bad gradients under a finite loss, from the calls that wrote them."""
    return _Walk(tracer, gradients).origin(loss_finite=True)


def first_reader(tracer: Tracer, stored: Call | None) -> Call | None:
    """Return the first operation that read a stored tensor's bad value, whatever became of it."""
    for call in tracer.calls:
        if stored in call.flawed:
            return call
    return None


def huge_operand(call: Call | None) -> FirstBad | None:
    """Follow the largest operands back to a parameter or buffer that is finite and absurdly large.

    None where the magnitude does not come from one: an operation made it of ordinary operands (a
    quotient, an exponential, a factor), or it was built up over many of them.
    """
    consumer = None
    while call is None or call.stage != "stored":
        if call is None:
            return None
        largest = max(call.parents, key=lambda parent: parent.reach, default=None)
        if largest is None or largest.index >= call.index:
            return None
        explained = largest.reach >= ABSURD
        if math.isfinite(call.reach):
            # a square or a cube still comes from its operand
            cube = math.log(call.reach) / 3 if largest.reach > 1 and call.reach else -math.inf
            explained = largest.reach > 1 and math.log(largest.reach) >= cube
        if not explained:
            return None
        if call.op not in COPIES:
            consumer = call
        call = largest
    # The ends of float32 and bfloat16 stand for infinity, in masks for instance
    garbage = ABSURD <= call.reach < 3.38e38
    if consumer is None or not garbage or not call.op.startswith(("param:", "buffer:")):
        return None
    return FirstBad(call, consumer)


class _Walk:
    """Goes back over one trace, from the calls that wrote the bad loss or the bad gradients."""

    def __init__(self, tracer: Tracer, targets: list[Call]) -> None:
        self._tracer = tracer
        self._targets = targets
        self._readers: dict[int, list[Call]] = defaultdict(list)
        """Calls that read a bad value, by its maker."""
        for call in tracer.calls:
            for maker in call.flawed:
                self._readers[id(maker)].append(call)
        reached = {id(call): call for target in targets for call in ancestors(target)}
        self._chain = sorted(reached.values(), key=lambda call: call.index)
        """Every call whose bad values reach a target, in the order in which they ran."""
        self._from_parameters: set[int] | None = None

    def origin(self, *, loss_finite: bool = False) -> FirstBad | None:
        first = self.first_bad()
        if first is None:
            return self.from_intended_inf()
        as_data = self.as_data(first)
        if as_data is not None:
            return as_data
        if loss_finite and first.stage == "backward":
            return self.from_backward(first)
        if loss_finite and first.stage == "forward":
            return self.from_forward(first)
        return self.finish(first, NO_EVIDENCE)

    def first_bad(self, stage: str | None = None) -> Call | None:
        """Return the first call on the way whose bad values no input explains."""
        for call in self._chain:
            if call.first_bad and stage in (None, call.stage):
                return call
        return None

    def from_backward(self, root: Call) -> FirstBad:
        """The gradient went bad in a backward node."""
        owner = self._tracer.owners.get(root.sequence)
        if owner is not None and owner.harmful and _may_be_same_elements(owner, root):
            # The forward operation behind the bad gradient gave a bad value as well.
            first = earliest([call for call in ancestors(owner) if call.first_bad])
            if self.deselected(owner):
                if first is not None and self.made_and_dropped(first):
                    return self.finish(first, self.dropping(first))
                return self.finish(root, Evidence(unselected=True))
            if first is not None:
                return self.finish(first, self.absorption(owner))
        # One autograd node runs several operations: any of them may show the 0 that came in.
        siblings = [call for call in self._chain if call.sequence == root.sequence]
        unselected = any(map(self.upstream_deselected, siblings))
        return self.finish(root, Evidence(unselected=unselected))

    def from_forward(self, root: Call) -> FirstBad:
        """The gradient went bad by a value of the forward that the loss does not show."""
        originals = [self._original(call) for call in self._first_bad_of_forward(root)]
        first = min(originals, key=lambda call: call.index)
        if self.deselected(first):
            if self.made_and_dropped(first):
                return self.finish(first, self.dropping(first))
            found = self._first_unselected(root)
            if found is not None:
                return found
        return self.finish(first, self.absorption(first))

    def _first_unselected(self, root: Call) -> FirstBad | None:
        """Find the block that deselects a bad value and whose gradient went bad first.

        The backward runs from the last block to the first.
        """
        pairs = []
        for call in self._first_bad_of_forward(root):
            original = self._original(call)
            if not self.deselected(original):
                continue
            gradient = self._gradient_of([call.sequence, original.sequence])
            if gradient is not None:
                pairs.append((gradient, original))
        if not pairs:
            return None
        gradient, original = min(pairs, key=lambda pair: pair[0].index)
        new = self.first_bad("backward")
        if new is not None and new.index < gradient.index and new.sequence != gradient.sequence:
            return self.from_backward(new)
        return self.finish(gradient, Evidence(unselected=True, selected_against=original.op))

    def _first_bad_of_forward(self, root: Call) -> list[Call]:
        """List the first bad values of the forward that the bad gradient goes back to."""
        found = [root]
        for call in self._chain:
            if call.first_bad and call.stage == "forward" and call is not root:
                found.append(call)
        # First bad values of the forward whose gradients are compared
        return found[:65]

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

    def _gradient_of(self, sequences: list[int]) -> Call | None:
        """Return the operation that gave the bad gradient of one of these autograd nodes."""
        backward = [call for call in self._chain if call.stage == "backward"]
        # The first of these nodes that was evaluated, else the first that met a bad value.
        evaluated = {call.sequence for call in backward} - {-1}
        known = [one for one in sequences if one in evaluated]
        for call in backward:
            if any(cause.stage == "forward" for cause in call.causes):
                known.append(call.sequence)
                break
        if not known:
            return None
        passed_on = self._passed_on(backward)
        for call in backward:
            if call.sequence == known[0] and id(call) in passed_on:
                return call
        return None

    def _passed_on(self, backward: list[Call]) -> set[int]:
        """Return the calls whose result left their autograd node."""
        passed_on = {id(target) for target in self._targets}
        for call in backward:
            # The engine adds the gradients of several uses of a tensor under the name of the node
            # that the gradients go to.
            adds = call.op in ("aten.add", "aten.add_") and any(
                p.stage == "backward" and p.sequence != call.sequence for p in call.parents
            )
            for cause in call.causes:
                if adds or cause.sequence != call.sequence:
                    passed_on.add(id(cause))
        return passed_on

    def from_intended_inf(self) -> FirstBad | None:
        """The loss is infinite only by a constant: blame what computed with it or reduced it."""
        # The targets and every call whose bad output they read, directly or not.
        calls = list(walk(self._targets, lambda call: call.flawed))
        by_number = [call for call in calls if call.number is not None]
        found = earliest(by_number or [call for call in calls if call.reduces] or calls)
        if found is None:
            return None
        return self.as_data(found) or self.finish(found, Evidence(intended_inf=True))

    def as_data(self, first: Call) -> FirstBad | None:
        """Return the batch tensor or table whose -inf came in as data, not as a mask on scores."""
        seen: set[int] = set()
        stack = [call for call in first.flawed if call.intended_inf]
        while stack:
            call = stack.pop()
            if call.stage == "stored" and call.op.startswith(("batch", "buffer:")):
                consumer: Call | None = first
                if not call.op.startswith("batch"):
                    consumer = None
                    for one in self._tracer.calls:
                        if call in one.flawed and one.op not in COPIES:
                            consumer = one
                            break
                return FirstBad(call, consumer, Evidence(as_data=True))
            if id(call) not in seen and (call.op in SCALES or not self._learned(call)):
                seen.add(id(call))
                stack.extend(call.flawed)
        return None

    def _learned(self, call: Call) -> bool:
        """True if the value was computed from parameters."""
        if self._from_parameters is None:
            found: set[int] = set()
            for one in self._tracer.calls:
                if any(id(p) in found or p.op.startswith("param:") for p in one.parents):
                    found.add(id(one))
            self._from_parameters = found
        return id(call) in self._from_parameters or call.op.startswith("param:")

    def finish(self, first: Call, evidence: Evidence) -> FirstBad:
        """Add what became of the value, and for a stored tensor who used it first."""
        if first.stage == "stored" or first.uninitialised:
            return FirstBad(first, self._consumer(first), evidence)
        made_of_nothing = not first.parents and not first.evidence.opaque
        if made_of_nothing and first.stage == "forward" and first.out.nan:
            # Operations without a result choose a NaN constant by a `where`.
            chooser = self._consumer(first)
            if chooser is not None and chooser.op == "aten.where":
                # The operation that its condition depends on, behind comparisons.
                asked = next(iter(chooser.parents), None)
                while asked is not None and not asked.numeric and asked.parents:
                    asked = real_maker(asked.parents[0])
                if asked is not None and asked.stage != "stored":
                    evidence |= Evidence(chosen_by=asked.op)
                return FirstBad(chooser, None, evidence)
        evidence |= Evidence(turned_nan_by=self._turned_nan(first))
        return FirstBad(first, None, evidence)

    # --- bad values of the forward that the loss does not show: deselected, dropped or absorbed

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

        def behind(call: Call) -> list[Call]:
            if call.numeric:
                return []
            return [real_maker(parent) for parent in call.parents]

        for reader in self.last_readers(first):
            # Computed values that the condition depends on, behind comparisons and logic.
            asked = [parent for parent in reader.parents if not parent.numeric]
            conditions = {id(one) for one in walk(asked, behind) if one.numeric}
            if reader.selects and not argument & conditions:
                return True
        return False

    def dropping(self, first: Call) -> Evidence:
        """Name the operation that left the value out of the loss."""
        for reader in self.last_readers(first):
            return Evidence(discarded_by=reader.op)
        return NO_EVIDENCE

    def absorption(self, call: Call) -> Evidence:
        """Name the operation that read the bad value and gave a finite one, as erf and clamp do."""
        for reader in self.last_readers(call):
            if not reader.selects:
                return Evidence(absorbed=True, absorbed_by=reader.op)
        return Evidence(absorbed=True)

    def upstream_deselected(self, root: Call) -> bool:
        """True if the 0 that met an infinite derivative comes from a condition that left it out."""
        if not root.evidence.zero_upstream_gradient:
            return False
        queue: deque[Call] = deque()
        for parent in root.parents:
            if parent.stage == "backward" and parent.sequence != root.sequence:
                queue.append(parent)
        # Operations of the backward that are searched for a selection
        for _ in range(32):
            if not queue:
                break
            call = queue.popleft()
            # Is it the backward of a selection? Indexing by positions is not one.
            owner = self._tracer.owners.get(call.sequence)
            selects = (call.node or "").startswith(SELECTING_NODES)
            if owner is not None:
                selects = owner.selects
            if selects:
                return True
            queue.extend(parent for parent in call.parents if parent.stage == "backward")
        return False

    # --- what became of the value

    def _turned_nan(self, first: Call) -> str | None:
        """Name the operation that made a NaN of the infinity."""
        if first.out.nan or not first.out.inf:
            return None
        for call in self._chain:
            fresh = call.out.nan and not any(cause.out.nan for cause in call.causes)
            if call is not first and fresh:
                return call.op
        return None

    def _consumer(self, stored: Call) -> Call | None:
        """Return the first operation on the way that used the tensor for more than a copy."""
        copies = {id(stored)}
        for call in self._chain:
            if any(id(cause) in copies for cause in call.causes):
                if call.op not in COPIES:
                    return call
                copies.add(id(call))
        return None


def _may_be_same_elements(owner: Call, root: Call) -> bool:
    """True unless the bad elements of a forward value and of its gradient are known to differ."""
    if owner.shape != root.shape or not owner.bad_positions or not root.bad_positions:
        return True
    # Not all positions are kept: a list that is full may be cut.
    if max(len(owner.bad_positions), len(root.bad_positions)) >= MOST_POSITIONS:
        return True
    return bool(set(owner.bad_positions) & set(root.bad_positions))
