"""What two ranks do when something of the guard's own fails on one of them.

torchrun --standalone --nproc-per-node 2 fault_worker.py OUT scenario ...
"""

from __future__ import annotations

import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.worker import BAD_RANK, BAD_STEP, LOCATING, guarded, reference
from process_group import gloo
from stepguard import GuardConfig
from stepguard.engine import transaction
from stepguard.engine.incident import incident_record, situation
from stepguard.engine.protect import GuardDisarmed
from stepguard.ranks import one_decision

WEAK_SPOTS: dict[str, tuple[Any, str]] = {
    "closer_look": (transaction, "examine"),
    "own_trouble": (one_decision, "own_trouble"),
    "foreign": (situation, "mark_foreign_parameter"),
    "causes": (transaction, "find_causes"),
    "deciding": (situation, "choose_remedy"),
    "recording": (incident_record, "note_lost"),
}


@contextmanager
def failing(name: str) -> Iterator[None]:
    """On one rank a function of the guard's raises."""
    module, function = WEAK_SPOTS[name]
    original = getattr(module, function)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("a fault of one rank")

    # the first rank decides for all
    faulty = 0 if name == "deciding" else BAD_RANK
    if dist.get_rank() == faulty:
        setattr(module, function, fails)
    try:
        yield
    finally:
        setattr(module, function, original)


def explaining(name: str, loop: str, wrap: str) -> dict[str, Any]:
    """Explaining a bad step fails on the rank that made it."""
    with failing(name):
        return _run(loop, wrap, LOCATING)


def recording(out: Path, how: str, loop: str) -> dict[str, Any]:
    """The folder of one rank cannot be written, from the first step on or from the start."""
    rank = dist.get_rank()
    folder = out / f"{how}-{loop}-{rank}"
    if how == "start" and rank == BAD_RANK:
        folder.write_text("a file, where a folder is wanted")
    config = replace(LOCATING, run_dir=folder / "run")

    def spoil(step: int) -> None:
        if step != 1 or rank != BAD_RANK:
            return
        if how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        if how == "gone":
            shutil.rmtree(folder)

    try:
        return _run(loop, "ddp", config, at_step=spoil)
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def _run(
    loop: str, wrap: str, config: GuardConfig, at_step: Callable[[int], None] = lambda step: None
) -> dict[str, Any]:
    settings = {"wrap": wrap == "ddp", "fused": False}
    troubles = {BAD_STEP: "input"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = guarded(loop, troubles, **settings, config=config, at_step=at_step)
    return {
        "guarded": got,
        "reference": reference(troubles, **settings),
        "disarmed": [str(w.message) for w in said if issubclass(w.category, GuardDisarmed)],
        "said": [str(w.message) for w in said],
    }


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with gloo(60):
        for name in names:
            kind, *arguments = name.split("-")
            found = recording(out, *arguments) if kind == "recording" else explaining(*arguments)
            torch.save(found, out / f"{name}.{dist.get_rank()}.pt")
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
