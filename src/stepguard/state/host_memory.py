"""How much memory this process may still take, as far as the system tells."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP, MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def free_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Bytes of host memory that are to be had, within the limit of a container; None where nobody
    tells.
    """
    machine = _machine(meminfo)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if machine is None or not limit.isdigit() or not used.isdigit():
        return machine
    cached = (
        _field(_read(cgroup / "memory.stat"), "inactive_file") or 0
    )  # given back when it is needed
    return max(0, min(machine, int(limit) - int(used) + cached))


def _machine(meminfo: Path) -> int | None:
    available = _field(_read(meminfo), "MemAvailable:")
    if available is not None:
        return available * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _field(text: str, name: str) -> int | None:
    words = next((line.split() for line in text.splitlines() if line.startswith(name)), [])
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
