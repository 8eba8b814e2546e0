"""Carry a few numbers from the device to the host: one transfer, awaited as late as possible.

On an accelerator the copy goes to pinned memory behind the kernels already queued, with an event
after it, so waiting for it does not wait for later work (tests/device runs that path on a device
that is no GPU).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Packet:
    """Scalars of one step. In a healthy step the host waits for the device in `fetch` only."""

    fetched = 0
    """How many packets this process has waited for; tests count syncs with it."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        device = values[0].device
        # mps has no float64.
        wide = torch.float32 if device.type == "mps" else torch.float64
        scalars = [v.detach().reshape(()) for v in values]
        line = torch.stack([s.to(device=device, dtype=wide, non_blocking=True) for s in scalars])
        self.values = line
        self._event: torch.Event | None = None
        self._host = line
        if device.type != "cpu" and not line.is_meta:
            self._host = torch.empty(line.shape, dtype=line.dtype, pin_memory=True)
            self._host.copy_(line, non_blocking=True)
            self._event = torch.Event(device=device)
            self._event.record(torch.accelerator.current_stream(device))

    def fetch(self) -> list[float]:
        """Return the numbers on the host."""
        Packet.fetched += 1
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers
