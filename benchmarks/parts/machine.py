"""Facts that a number needs to be read by, and strict JSON to keep both in. No path and no host
name.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import stepguard

RESULTS = Path(__file__).parents[1] / "results"
LINE = 160
"""Characters of a line of results, where a row can be that short."""


TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Parameters of glibc's `mallopt`."""
_kept = False


def keep_memory() -> bool:
    """Have the allocator keep what is freed, for the rest of this process. False where it is not
    glibc's.

    By default glibc gives large blocks back to the system and takes them anew at every step: a good
    part of a bare step is page faults then, how many depends on where blocks happen to lie, and one
    per cent drowns in that. Those who train on CPUs for a living use tcmalloc or jemalloc, which
    keep their memory as well.
    """
    global _kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    wanted = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 1 << 26}
    _kept = mallopt is not None and all(mallopt(name, value) == 1 for name, value in wanted.items())
    return _kept


def facts() -> dict[str, Any]:
    """What was measured on, and when."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "stepguard": stepguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_kept": _kept,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep(data: Any, path: Path, *, details: Sequence[str] = ()) -> None:
    """Write it whole or not at all; a number that is not finite is refused.

    The folder of results holds what README and docs print. `details` are the entries with a row
    for every single case: they go to a file beside it that git does not keep.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if details and path.parent == RESULTS:
        _write(data, path.with_suffix(".full.json"))
        data = {key: value for key, value in data.items() if key not in details}
    _write(data, path)


def _write(data: Any, path: Path) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(laid_out(rounded(data)) + "\n", encoding="utf-8")
    fresh.replace(path)


def laid_out(data: Any, indent: str = "") -> str:
    """JSON in which what fits into a line is one line, and so is a row: numbers and intervals."""
    line = json.dumps(data, allow_nan=False)
    values = list(data.values()) if isinstance(data, dict) else data
    if len(line) <= LINE or not isinstance(values, list) or not any(map(_has_rows, values)):
        return line
    inner = indent + " "
    if isinstance(data, dict):
        lines = [f"{json.dumps(str(k))}: {laid_out(v, inner)}" for k, v in data.items()]
    else:
        lines = [laid_out(value, inner) for value in data]
    begin, end = "{}" if isinstance(data, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{end}"


def _has_rows(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict | list) for item in value)
    return isinstance(value, dict)


def rounded(data: Any) -> Any:
    """Five digits after the point say all that was measured."""
    if isinstance(data, float):
        return round(data, 5)
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    return data
