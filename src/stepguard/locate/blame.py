"""From the bad loss or gradient back to the operation where the first harmful value was born.

Only bad values that explain bad values are followed, so an infinity that was absorbed is never
blamed. When only the gradient is bad, a value born in the forward pass is the origin if it was
swallowed there (erf, clamp, gather) or if it is a NaN that indexing or a mask dropped later on. The
backward node is the origin if the forward had deselected the value by a condition on the function's
own argument, as in `where(x > 0, sqrt(x), 0)`, or if it was only infinite: the forward is right by
intention then, and it is the gradient of the unselected branch that hurts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stepguard.locate.calls import COPIES, Call, ancestors, real_maker
from stepguard.locate.tracer import MOST_SPOTS, Tracer
from stepguard.records.evidence import NO_EVIDENCE, Evidence

SELECTING_NODES = ("Where", "MaskedFill", "MaskedSelect", "MaskedScatter")
SCALES = ("aten.mul", "aten.mul_", "aten.div", "aten.div_")
"""A mask is added to what was learned; an infinity that multiplies it is a weight."""
MOST_UPSTREAM = 32
MOST_BLOCKS = 64
"""Births whose gradients are compared."""


@dataclass(slots=True)
class Found:
    """The birth, and for a stored tensor the operation that first used it."""

    birth: Call
    consumer: Call | None = None
    evidence: Evidence = NO_EVIDENCE


class Walk:
    """Over one trace, from the calls that wrote the bad loss or the bad gradients."""

    def __init__(self, tracer: Tracer, targets: list[Call]) -> None:
        self._tracer = tracer
        self._targets = targets
        self._chain = {id(call): call for target in targets for call in ancestors(target)}
        self._from_parameters: set[int] | None = None
        self._readers: dict[int, list[Call]] = defaultdict(list)
        for call in tracer.calls:
            for maker in call.flawed:
                self._readers[id(maker)].append(call)

    def from_loss(self) -> Found | None:
        """Origin of a bad loss."""
        root = self._first_born()
        if root is None:
            return self._from_tame_loss()
        return self._as_data(root) or self._finish(root, NO_EVIDENCE)

    def from_gradients(self) -> Found | None:
        """Origin of bad gradients under a finite loss."""
        root = self._first_born()
        if root is None:
            return self._from_tame_loss()
        as_data = self._as_data(root)
        if as_data is not None:
            return as_data
        if root.stage == "backward":
            return self._from_backward(root)
        if root.stage == "forward":
            return self._from_forward(root)
        return self._finish(root, NO_EVIDENCE)

    def _first_born(self) -> Call | None:
        born = [call for call in self._chain.values() if call.born]
        return min(born, key=lambda call: call.index) if born else None

    def _from_backward(self, root: Call) -> Found:
        made = self._tracer.owners.get(root.sequence)
        if made is not None and made.harmful and _same_place(made, root):
            first = min(
                (call for call in ancestors(made) if call.born),
                key=lambda call: call.index,
                default=None,
            )
            if self._deselected(made):
                if first is not None and self._born_to_be_dropped(first):
                    return self._finish(first, self._dropping(first))
                return self._finish(root, Evidence(unselected=True))
            if first is not None:
                return self._finish(first, self._absorption(made))
        siblings = [call for call in self._chain.values() if call.sequence == root.sequence]
        unselected = any(self._upstream_deselected(call) for call in siblings)
        return self._finish(root, Evidence(unselected=unselected))

    def _from_forward(self, root: Call) -> Found:
        first = min(map(self._original, self._forward_births(root)), key=lambda call: call.index)
        if self._deselected(first):
            if self._born_to_be_dropped(first):
                return self._finish(first, self._dropping(first))
            found = self._first_unselected(root)
            if found is not None:
                return found
        return self._finish(first, self._absorption(first))

    def _first_unselected(self, root: Call) -> Found | None:
        """Of several blocks that deselect a bad value, the one whose gradient goes bad first:
        backward, the last.
        """
        pairs = []
        for call in self._forward_births(root):
            first = self._original(call)
            late = (
                self._gradient_of([call.sequence, first.sequence])
                if self._deselected(first)
                else None
            )
            if late is not None:
                pairs.append((late, first))
        if not pairs:
            return None
        late, first = min(pairs, key=lambda pair: pair[0].index)
        born_backward = [
            call for call in self._chain.values() if call.born and call.stage == "backward"
        ]
        earliest = min(born_backward, key=lambda call: call.index, default=late)
        if earliest.index < late.index and earliest.sequence != late.sequence:
            return self._from_backward(earliest)
        return self._finish(late, Evidence(unselected=True, selected_against=first.op))

    def _forward_births(self, root: Call) -> list[Call]:
        """Everything born in the forward that the bad gradient goes back to; of a recomputed block,
        the second run.
        """
        born = [call for call in self._chain.values() if call.born and call.stage == "forward"]
        return [
            root,
            *sorted((call for call in born if call is not root), key=lambda call: call.index)[
                :MOST_BLOCKS
            ],
        ]

    def _original(self, call: Call) -> Call:
        """A checkpointed block runs twice: the first run is what the user means."""
        if not call.evidence.recomputed:
            return call
        place = (call.op, call.line, call.module)  # blocks of one class share their lines
        same = (c for c in self._tracer.calls if (c.op, c.line, c.module) == place)
        return next((c for c in same if c.born and c.index < call.index), call)

    def _frontier(self, call: Call) -> list[Call]:
        """Forward operations that read the bad value, or what it spoiled, and gave something clean."""
        seen, stack, edge = {id(call)}, [call], []
        while stack:
            one = stack.pop()
            for reader in self._readers[id(one)]:
                if reader.stage != "forward" or id(reader) in seen or not reader.numeric:
                    continue
                if one in reader.causes:
                    seen.add(id(reader))
                    stack.append(reader)
                else:
                    edge.append(reader)
        return edge

    def _deselected(self, call: Call) -> bool:
        edge = self._frontier(call)
        return bool(edge) and all(reader.selects for reader in edge)

    def _born_to_be_dropped(self, birth: Call) -> bool:
        """A NaN that the forward made by itself and dropped later: not a function kept from its own
        pole by `where`.
        """
        if not birth.out.nan or birth.stage != "forward":
            return False
        argument = {id(real_maker(parent)) for parent in birth.parents}
        choosing = [reader for reader in self._frontier(birth) if reader.selects]
        kept_from_pole = birth.pointwise and all(
            argument & _asked_by(reader) for reader in choosing
        )
        return not kept_from_pole

    def _dropping(self, birth: Call) -> Evidence:
        """Which operation left the NaN out of the loss?"""
        edge = self._frontier(birth)
        return Evidence(discarded_by=edge[0].op if edge else None)

    def _upstream_deselected(self, root: Call) -> bool:
        """Did the 0 that met an infinite derivative come from a condition that left this element
        out?
        """
        if not root.evidence.zero_upstream_gradient:
            return False
        stack = [p for p in root.parents if p.stage == "backward" and p.sequence != root.sequence]
        for _ in range(MOST_UPSTREAM):
            if not stack:
                return False
            call = stack.pop(0)
            if self._undoes_selection(call):
                return True
            stack.extend(p for p in call.parents if p.stage == "backward")
        return False

    def _undoes_selection(self, call: Call) -> bool:
        """Is it the backward of a selection? Indexing by positions leaves nothing out by a
        condition.
        """
        made = self._tracer.owners.get(call.sequence)
        if made is not None:
            return made.selects
        return call.node is not None and call.node.startswith(SELECTING_NODES)

    def _absorption(self, call: Call) -> Evidence:
        edge = [reader for reader in self._frontier(call) if not reader.selects]
        return Evidence(absorbed=True, absorbed_by=edge[0].op if edge else None)

    def _gradient_of(self, sequences: list[int]) -> Call | None:
        """The backward operation that gave the bad gradient of one of these nodes, or of what first
        met the value.
        """
        late = [c for c in self._chain.values() if c.stage == "backward"]
        meeting = [c for c in late if any(cause.stage == "forward" for cause in c.causes)]
        sequences = [s for s in sequences if s >= 0 and any(c.sequence == s for c in late)]
        sequences += [min(meeting, key=lambda c: c.index).sequence] if meeting else []
        if not sequences:
            return None
        passed_on = {
            id(cause)
            for c in late
            for cause in c.causes
            if cause.sequence != c.sequence or _joins(c)
        }
        passed_on |= {id(target) for target in self._targets}
        finals = [c for c in late if c.sequence == sequences[0] and id(c) in passed_on]
        return min(finals, key=lambda c: c.index) if finals else None

    def _from_tame_loss(self) -> Found | None:
        """The loss is infinite only by a constant: blame the operation that reduced it to a number."""
        seen: set[int] = set()
        stack, tame = list(self._targets), []
        while stack:
            call = stack.pop()
            if id(call) not in seen:
                seen.add(id(call))
                tame.append(call)
                stack.extend(call.flawed)
        by_number = [c for c in tame if c.number is not None]
        reducing = [c for c in tame if c.reduces]
        found = min(by_number or reducing or tame, key=lambda c: c.index, default=None)
        return (
            None
            if found is None
            else self._as_data(found) or self._finish(found, Evidence(intended_inf=True))
        )

    def _as_data(self, birth: Call) -> Found | None:
        """The batch tensor or table behind it, where its -inf came in as data and was not added to
        scores as a mask.
        """
        stack, seen = [c for c in birth.flawed if c.tame], set[int]()
        while stack:
            call = stack.pop()
            if call.stage == "stored" and call.op.startswith(("batch", "buffer:")):
                return Found(
                    call,
                    self._first_use(call) if call.op.startswith("buffer:") else birth,
                    Evidence(as_data=True),
                )
            if id(call) not in seen and (call.op in SCALES or not self._learned(call)):
                seen.add(id(call))
                stack.extend(call.flawed)
        return None

    def _first_use(self, stored: Call) -> Call | None:
        return next(
            (
                call
                for call in self._tracer.calls
                if stored in call.flawed and call.op not in COPIES
            ),
            None,
        )

    def _learned(self, call: Call) -> bool:
        """Was it computed from parameters?"""
        if self._from_parameters is None:
            self._from_parameters = set()
            for one in self._tracer.calls:
                if any(
                    id(p) in self._from_parameters or p.op.startswith("param:") for p in one.parents
                ):
                    self._from_parameters.add(id(one))
        return id(call) in self._from_parameters or call.op.startswith("param:")

    def _finish(self, birth: Call, evidence: Evidence) -> Found:
        if birth.stage == "stored" or birth.blank:
            return Found(birth, self._consumer(birth), evidence)
        chooser = self._chosen_constant(birth)
        if chooser is not None:
            return Found(chooser, None, evidence | Evidence(chosen_by=_condition_of(chooser)))
        if birth.out.inf and not birth.out.nan:
            turned = [
                c
                for c in self._chain.values()
                if c.out.nan and not any(p.out.nan for p in c.causes)
            ]
            later = [c for c in turned if c is not birth]
            if later:
                evidence |= Evidence(turned_nan_by=min(later, key=lambda c: c.index).op)
        return Found(birth, None, evidence)

    def _chosen_constant(self, birth: Call) -> Call | None:
        """The `where` that chose a NaN constant: an operation's own way to say that there is no
        result.
        """
        if birth.parents or birth.stage != "forward" or not birth.out.nan:
            return None
        user = self._consumer(birth)
        return user if user is not None and user.op == "aten.where" else None

    def _consumer(self, stored: Call) -> Call | None:
        """First operation on the way that used the stored tensor for more than a copy."""
        frontier = {id(stored)}
        for call in sorted(self._chain.values(), key=lambda c: c.index):
            if any(id(cause) in frontier for cause in call.causes):
                if call.op not in COPIES:
                    return call
                frontier.add(id(call))
        return None


def first_reader(tracer: Tracer, stored: Call) -> Call | None:
    """First operation that read a stored tensor's bad value, whatever became of it."""
    return next((call for call in tracer.calls if stored in call.flawed), None)


def _condition_of(call: Call) -> str | None:
    """The operation that the condition of a `where` looked at, behind comparisons."""
    asked = call.parents[0] if call.parents else None
    while asked is not None and not asked.numeric and asked.parents:
        asked = real_maker(asked.parents[0])
    return asked.op if asked is not None and asked.stage != "stored" else None


def _asked_by(call: Call) -> set[int]:
    """The computed values that the condition of a selection looked at, behind comparisons and
    logic.
    """
    stack = [parent for parent in call.parents if not parent.numeric]
    seen: set[int] = set()
    asked: set[int] = set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.numeric:
            asked.add(id(one))
        else:
            stack.extend(real_maker(parent) for parent in one.parents)
    return asked


def _joins(call: Call) -> bool:
    """The engine adds the gradients of several uses of a tensor, under the name of the node they go
    to.
    """
    others = [p for p in call.parents if p.stage == "backward" and p.sequence != call.sequence]
    return call.op in ("aten.add", "aten.add_") and bool(others)


def _same_place(made: Call, root: Call) -> bool:
    """Could the bad elements of the forward value and of its gradient be the same ones?"""
    complete = made.spots and root.spots and max(len(made.spots), len(root.spots)) < MOST_SPOTS
    if made.shape != root.shape or not complete:
        return True
    return bool(set(made.spots) & set(root.spots))
