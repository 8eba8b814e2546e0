"""Bit flips, zeroed pages, truncations and swapped pages: how many of them each format loads
without a word.

    python -m benchmarks corruption                # 2000 damages of each format, minutes

A damage is missed when the state loads and differs from what was saved; when it hit bytes that
carry no value (padding, a timestamp) and the state is the same bit for bit, it is harmless. Ours
must find every one, harmless or not.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from benchmarks.disk.damage import DAMAGES, victim
from benchmarks.disk.formats import Distributed, Format, Safetensors, Sealed, SingleFile, legacy
from benchmarks.parts import runner

FORMATS: dict[str, Callable[[], Format]] = {
    "stepguard": Sealed,
    "torch zip": lambda: SingleFile("torch.save (zip)", torch.save),
    "torch legacy": lambda: SingleFile("torch.save (legacy)", legacy),
    "safetensors": Safetensors,
    "dcp": Distributed,
}
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
)


def main(arguments: Sequence[str] | None = None) -> int:
    share = {"type": float, "default": 1.0, "help": "of the usual number of damages"}
    run = runner.begin("corruption", __doc__, arguments, {"--share": share})
    options, console = run.options, run.console
    counts = {kind: max(round(options.share * count), 1) for kind, (_, count) in DAMAGES.items()}
    rows = {}
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        for name, make in FORMATS.items():
            task = progress.add_task(make().what, total=sum(counts.values()))
            rows[name] = {
                "what": make().what,
                **damaged(make, counts, lambda t=task: progress.advance(t)),
            }
    console.print(painted(rows, counts))
    run.keep({"counts": counts, "rows": rows})
    return int(
        any(
            outcome["found"] != counts[kind] for kind, outcome in rows["stepguard"]["kinds"].items()
        )
    )


def model_state() -> dict[str, Tensor]:
    """A small model with its optimizer: 30 000 floats that look like weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embedding": (64, 32),
        "attention": (32, 96),
        "mlp": (32, 128),
        "norm": (32,),
        "head": (32, 64),
    }
    state = {}
    for name, shape in shapes.items():
        state[f"model/{name}"] = torch.randn(shape, generator=generator) * 0.02
        state[f"optimizer/{name}/exp_avg"] = torch.randn(shape, generator=generator) * 1e-3
        state[f"optimizer/{name}/exp_avg_sq"] = torch.rand(shape, generator=generator) * 1e-6
        state[f"optimizer/{name}/step"] = torch.tensor(1000.0)
    return state


def damaged(
    make: Callable[[], Format], counts: dict[str, int], progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Damage a fresh copy each time; found, harmless and missed by kind."""
    state, kinds = model_state(), {}
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        make().save(whole, 1, state)
        for kind, count in counts.items():
            rng, outcomes = random.Random(kind), Counter[str]()
            for _ in range(count):
                outcomes[_outcome(make(), whole, Path(place) / "hurt", kind, rng, state)] += 1
                progress()
            kinds[kind] = {
                outcome: outcomes[outcome] for outcome in ("found", "harmless", "missed")
            }
    return {"kinds": kinds}


def _outcome(
    form: Format, whole: Path, hurt: Path, kind: str, rng: random.Random, state: dict[str, Tensor]
) -> str:
    shutil.rmtree(hurt, ignore_errors=True)
    shutil.copytree(whole, hurt)
    path = victim([p for p in sorted(hurt.rglob("*")) if p.is_file() and p.stat().st_size], rng)
    path.write_bytes(DAMAGES[kind][0](bytearray(path.read_bytes()), rng))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = form.load(hurt)
    except Exception:
        return "found"
    if found is None:
        return "found"
    return "harmless" if _same(found, state) else "missed"


def _same(found: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    """Bit for bit, dtypes and shapes too."""
    return found.keys() == state.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(_bits(found[name]), _bits(tensor))
        for name, tensor in state.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def painted(rows: dict[str, Any], counts: dict[str, int]) -> Table:
    """How many of each kind were loaded as if nothing had happened."""
    table = Table(
        title="damaged states that load without a word, as other values", title_justify="left"
    )
    table.add_column("format")
    for kind, count in counts.items():
        table.add_column(f"{kind} (of {count})", justify="right")
    for name, row in rows.items():
        cells = [
            f"{o['missed']} ({100 * o['missed'] / counts[kind]:.0f} %)"
            for kind, o in row["kinds"].items()
        ]
        table.add_row(row["what"], *cells, style="bold" if name == "stepguard" else "")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
