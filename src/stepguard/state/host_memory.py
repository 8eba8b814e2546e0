"""Available host memory of this process."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def free_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Return the available bytes within the limit of a container; None if unknown."""
    machine = _machine(meminfo)
    limit = _read(cgroup / "memory.max")
    used = _read(cgroup / "memory.current")
    # "max" stands for no limit.
    if machine is None or not limit.isdigit() or not used.isdigit():
        return machine
    # The kernel frees cached files when the memory is needed.
    cached = _field(_read(cgroup / "memory.stat"), "inactive_file") or 0
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
    for line in text.splitlines():
        words = line.split()
        if line.startswith(name) and len(words) > 1 and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
