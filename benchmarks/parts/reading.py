"""One contender of the verify benchmark in a process of its own: prints its seconds and its peak
memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SMALL, LARGE = 1 << 19, 8 << 20
"""Sizes of a reader's buffer: one that stays in the processor's cache, and the one that is often
recommended.
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to read a checkpoint; `start` imports what it needs and returns what is timed."""

    what: str
    start: Callable[[], Callable[[Path], bool]]
    suffixes: tuple[str, ...] = (".pt", ".safetensors")


def _read(size: int) -> Callable[[Path], bool]:
    import torch  # noqa: F401 (the same process as the others)

    buffer = bytearray(size)

    def run(path: Path) -> bool:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while os.readv(descriptor, [buffer]):
                pass
        finally:
            os.close(descriptor)
        return True

    return run


def _stepguard() -> Callable[[Path], bool]:
    import stepguard

    verify = stepguard.verify
    return lambda path: verify(path).ok


def _loop(load: Callable[[Path], dict[str, object]]) -> Callable[[Path], bool]:
    import torch

    def run(path: Path) -> bool:
        good = True
        for value in load(path).values():
            if isinstance(value, torch.Tensor) and (
                torch.isnan(value).any() or torch.isinf(value).any()
            ):
                good = False
        return good

    return run


def _torch_load() -> Callable[[Path], bool]:
    import torch

    return _loop(lambda path: torch.load(path, map_location="cpu", weights_only=True))


def _torch_mmap() -> Callable[[Path], bool]:
    import torch

    return _loop(lambda path: torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def _safetensors() -> Callable[[Path], bool]:
    from safetensors.torch import load_file

    return _loop(load_file)


CONTENDERS: dict[str, Contender] = {
    "read": Contender("reading only, buffer of 512 KB", lambda: _read(SMALL)),
    "read large": Contender("reading only, buffer of 8 MB", lambda: _read(LARGE)),
    "stepguard": Contender("stepguard.verify", _stepguard),
    "torch.load": Contender("torch.load + isnan, isinf", _torch_load, (".pt",)),
    "torch.load mmap": Contender("torch.load(mmap=True) + isnan, isinf", _torch_mmap, (".pt",)),
    "safetensors": Contender(
        "safetensors load_file + isnan, isinf", _safetensors, (".safetensors",)
    ),
}


def _peak() -> int:
    """The most memory this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main(name: str, path: str) -> int:
    run = CONTENDERS[name].start()
    before = _peak()
    began, worked = time.perf_counter(), time.process_time()
    good = run(Path(path))
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": _peak() - before, "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
