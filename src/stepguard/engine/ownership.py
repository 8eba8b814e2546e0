"""A guard owns what its optimizer holds; what other guarded optimizers hold below the same model is data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stepguard.engine.context import Context, guarded


@contextmanager
def others_kept(context: Context) -> Iterator[None]:
    """Parameters that another guarded optimizer holds are none of this guard's: whatever happens to them is undone."""
    own = {id(p) for p in context.parameters}
    held = {id(p): p for optimizer in guarded for group in optimizer.param_groups for p in group["params"]}
    kept = [(p, p.detach().clone()) for key, p in held.items() if key not in own]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
