"""Bad values of the forward that the loss does not show: deselected, dropped or absorbed."""

from __future__ import annotations

from collections import defaultdict

from stepguard.locate.calls import Call, real_maker
from stepguard.locate.tracer import Tracer

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
