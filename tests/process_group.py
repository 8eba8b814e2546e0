"""Process groups that end before Python does.

A thread of gloo that lets go of its last tensor while Python ends aborts the process, once in a
hundred runs or so. The threads end with the last reference to their group: the wrapped models have
to be gone, and torch's own functions must not have taken the group as a default, which they do when
they are imported after it was made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401


@contextmanager
def gloo(seconds: int = 60) -> Iterator[None]:
    """The group of torchrun's processes; whoever leaves by an exception leaves it as it is."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    yield
    part()


def part() -> None:
    """Leave the group that a framework has made, say."""
    gc.collect()
    dist.destroy_process_group()
    assert not threads(), "a reference to the process group is left"


def threads() -> list[str]:
    """Names of the threads that wait for collectives."""
    names = (
        task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    )
    return [name for name in names if name.startswith("pt_gloo")]
