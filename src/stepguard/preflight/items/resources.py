"""Resources: space on the disk for checkpoints, and memory for the step."""

from __future__ import annotations

import shutil
from pathlib import Path

from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import (
    Answer,
    NotGiven,
    available_memory,
    failed,
    gradient_bytes,
    model_bytes,
    optimizer_bytes,
    passed,
    warned,
)
from stepguard.report.phrases import size

KEPT_CHECKPOINTS = 2
"""Kept if the configuration does not say how many."""
TIGHT_DISK = 1.5
"""Times what is needed; less free space than that is a warning."""
TIGHT_MEMORY = 0.7
"""Share of the free memory; needing more than that is a warning."""
FOLDERS = ("run_dir", "output_dir", "save_dir", "checkpoint_dir", "results_folder")


@item("disk.space", "the disk holds the checkpoints")
def disk_space(run: Inspection) -> Answer:
    folder = _existing(_run_folder(run))
    weights = model_bytes(run.model)
    state, how = optimizer_bytes(run.model, run.subject.optimizer)
    keep = int(run.number("keep") or KEPT_CHECKPOINTS)
    # A new checkpoint is written beside those that are kept, before the oldest goes.
    needed = (weights + state) * (max(keep, 1) + 1)
    free = shutil.disk_usage(folder).free
    said = (
        f"one checkpoint {size(weights + state)} (weights {size(weights)}, optimizer "
        f"{size(state)}, {how}); {keep} kept and one being written need {size(needed)}",
        f"{size(free)} free",
    )
    fix = (
        "Keep fewer checkpoints, write to another disk, or free space: a full disk ends a run "
        "while it saves."
    )
    if free < needed:
        return failed(*said, fix=fix)
    if free < TIGHT_DISK * needed:
        return warned(*said, fix=fix)
    return passed(*said)


def _run_folder(run: Inspection) -> str | Path:
    if run.subject.run_dir:
        return run.subject.run_dir
    for name in FOLDERS:
        if isinstance(run.config.get(name), str):
            return str(run.config[name])
    raise NotGiven("give --run-dir PATH")


def _existing(folder: str | Path) -> Path:
    """The folder itself, or the nearest above it that exists already."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path


@item("memory.estimate", "the step fits into memory")
def memory_estimate(run: Inspection) -> Answer:
    weights = model_bytes(run.model)
    gradients = gradient_bytes(run.model)
    state, how = optimizer_bytes(run.model, run.subject.optimizer)
    needed = weights + gradients + state
    free = available_memory(run.device)
    if free is None:
        raise NotGiven(f"the free memory of {run.device.type} is not known to torch")
    said = (
        f"{size(needed)} = weights {size(weights)}, gradients {size(gradients)}, optimizer "
        f"{size(state)} ({how}); a snapshot takes {size(weights + state)} more of the host's "
        "memory; activations come on top",
        f"{size(free)} free on {run.device.type}",
    )
    fix = (
        "A smaller model or optimizer state (8-bit, Adafactor), sharding (FSDP), or a larger "
        "device."
    )
    if needed > free:
        return failed(*said, fix=fix)
    if needed > TIGHT_MEMORY * free:
        return warned(*said, fix=fix)
    return passed(*said)
