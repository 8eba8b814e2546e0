"""`scalars.limit`: watched parameters and buffers lie within their limits."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import chain

from stepguard.preflight.answers import Missing, Seen, count, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    if not seen.subject.watch:
        raise Missing("give --watch PATTERN=LIMIT, for instance --watch '*.alpha=10'")
    values = {
        name: tensor.detach()
        for name, tensor in chain(seen.model.named_parameters(), seen.model.named_buffers())
        if tensor.is_floating_point() and tensor.numel()
    }
    bad, checked, nearest = [], 0, ("", 0.0, 1.0)
    for pattern, limit in seen.subject.watch.items():
        matching = [name for name in values if fnmatchcase(name, pattern)]
        if not matching:
            bad.append(f"{pattern} matches no parameter and no buffer")
        for name in matching:
            checked += 1
            size = float(values[name].abs().max())
            if not size <= limit:  # a NaN is beyond every limit
                bad.append(f"{name} reaches {size:.4g}, allowed is {limit:g}")
            elif size / limit >= nearest[1] / nearest[2]:
                nearest = name, size, limit
    if bad:
        return failed(
            some(bad),
            fix="Look at what drives them: initialisation, lr of their group, a checkpoint.",
        )
    return passed(
        f"{count(checked, 'tensor')}; nearest to its limit is {nearest[0]}: {nearest[1]:.4g} of "
        f"{nearest[2]:g}"
    )


ITEM = Item(id="scalars.limit", title="watched values are within their limits", look=_look)
