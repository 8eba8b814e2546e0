"""Counted, not timed: host syncs and new tensors of a healthy step, beside the bare step with the
same optimizer.

    python -m benchmarks counts      # seconds; the same numbers on every machine

A host sync is a read of one element or a shape that depends on data (`.item()`, `bool(t)`,
`nonzero`), or a packet that stepguard waits for. Reads of AdamW's own step counters are in the bare
row too: those tensors live on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.parts import runner
from benchmarks.parts.variants import VARIANTS, Variant
from benchmarks.parts.workloads import QUICK, Workload
from stepguard.sentinel.gradients import Packet

SYNCS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::item",
)
WARMUP, STEPS = 36, 8
"""By then the ring of snapshots has all its memory; one of the counted steps takes one into it."""


class Tally(TorchDispatchMode):
    """Counts reads of values and tensors with memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        self.tensors = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in SYNCS:
            self.syncs[name] += 1
        fresh = {
            _memory(t): t
            for t in tree_leaves(out)
            if isinstance(t, Tensor) and _memory(t) not in known
        }
        self.tensors += len(fresh)
        self.bytes += sum(t.untyped_storage().nbytes() for t in fresh.values())
        return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Count:
    """Of one variant, per step."""

    variant: str
    what: str
    ours: bool
    fused: bool
    reads: float
    """Of single elements, and shapes that depend on data."""
    packets: float
    """That stepguard waited for before the step was over."""
    late_packets: float
    """Read one step later, when the device has long been done."""
    tensors: float
    kibibytes: float


def count(workload: Workload, variant: Variant) -> Count:
    """Average over a few healthy steps after warming up."""
    runner, data = variant.start(workload), torch.Generator().manual_seed(0)
    try:
        before = Packet.fetched
        _run(runner, workload.batch(data))
        late = Packet.fetched == before
        for _ in range(WARMUP):
            _run(runner, workload.batch(data))
        batches = [workload.batch(data) for _ in range(STEPS)]
        before, tally = Packet.fetched, Tally()
        with tally:
            for batch in batches:
                _run(runner, batch)
        packets = (Packet.fetched - before) / STEPS
    finally:
        runner.close()
    return Count(
        variant=variant.name,
        what=variant.what,
        ours=variant.ours,
        fused=variant.fused,
        reads=sum(tally.syncs.values()) / STEPS,
        packets=0.0 if late else packets,
        late_packets=packets if late else 0.0,
        tensors=tally.tensors / STEPS,
        kibibytes=tally.bytes / STEPS / 1024,
    )


def _run(runner: Any, batch: Any) -> None:
    with runner.stage():
        runner.step(batch)


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("counts", __doc__, arguments)
    console, results = run.console, {}
    counted = [v for v in VARIANTS if v.missing is None and v.name != "detect_anomaly"]
    for name, make in QUICK.items():
        workload = make()
        rows = [count(workload, variant) for variant in counted]
        console.print(painted(workload, rows))
        results[name] = {"what": workload.what, "rows": [asdict(row) for row in rows]}
    run.keep({"workloads": results})
    return 0


def painted(workload: Workload, rows: Sequence[Count]) -> Table:
    """Differences to the bare step with the same optimizer."""
    table = Table(
        title=f"{workload.what}: per healthy step, beyond the bare step", title_justify="left"
    )
    table.add_column("step")
    for column in ("reads", "packets", "late packets", "tensors", "KiB"):
        table.add_column(column, justify="right", no_wrap=True)
    bare = {row.fused: row for row in rows if row.variant.startswith("bare")}
    for row in rows:
        own, base = row, bare[row.fused]
        if row is base:
            cells = [f"{own.reads:g}", "", "", f"{own.tensors:g}", f"{own.kibibytes:.1f}"]
            table.add_row(f"{row.what} (in all)", *cells, style="dim")
            continue
        more = [own.reads - base.reads, own.packets, own.late_packets, own.tensors - base.tensors]
        cells = [f"{value:+g}" for value in more] + [f"{own.kibibytes - base.kibibytes:+.1f}"]
        table.add_row(row.what, *cells, style="bold" if row.ours else "")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
