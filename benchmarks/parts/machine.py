"""Facts that a number needs to be read by, and strict JSON to keep both in. No path and no host name."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import stepguard

RESULTS = Path(__file__).parents[1] / "results"


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
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep(data: dict[str, Any], path: Path) -> None:
    """Write it whole or not at all; a number that is not finite is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(rounded(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def rounded(data: Any) -> Any:
    """Five digits after the point say all that was measured."""
    if isinstance(data, float):
        return round(data, 5)
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    return data
