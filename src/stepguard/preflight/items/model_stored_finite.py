"""`model.stored_finite`: parameters, buffers and optimizer state are finite before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stepguard.preflight.answers import Seen, count, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.state.buffers import keeps_statistics


def _stored(seen: Inspection) -> Iterator[tuple[str, Tensor]]:
    """A buffer that is no statistic may hold -inf or NaN on purpose (a mask, a sentinel), so it
    does not count.
    """
    for name, parameter in seen.model.named_parameters():
        yield f"param:{name}", parameter
    for prefix, module in seen.model.named_modules():
        if keeps_statistics(module):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield f"buffer:{name}", buffer
    if seen.subject.optimizer is not None:
        for index, state in enumerate(seen.subject.optimizer.state.values()):
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    yield f"opt:{key} of parameter {index}", value


def _look(seen: Inspection) -> Seen:
    total, bad = 0, []
    for name, tensor in _stored(seen):
        total += 1
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta":
            missing = int((~torch.isfinite(tensor.detach())).sum())
            if missing:
                bad.append(f"{name} ({missing:,} of {tensor.numel():,} values)")
    if bad:
        return failed(
            f"{count(len(bad), 'tensor')} of {total:,} not finite: {some(bad)}",
            fix="Load the last good checkpoint; torch.empty without an initialisation looks like "
            "this as well.",
        )
    return passed(f"{total:,} tensors of model and optimizer are finite")


ITEM = Item(id="model.stored_finite", title="stored weights and state are finite", look=_look)
