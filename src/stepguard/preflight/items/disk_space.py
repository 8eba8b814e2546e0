"""`disk.space`: the checkpoints that will be kept fit on the disk, with one more while it is
written.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from stepguard.preflight.answers import Missing, Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.sizes import checkpoint_bytes, gigabytes

KEEP = 2
TIGHT = 1.5


def _look(seen: Inspection) -> Seen:
    folder = _existing(seen.subject.run_dir or _configured(seen))
    one, how = checkpoint_bytes(seen.model, seen.subject.optimizer)
    keep = int(seen.number("keep") or KEEP)
    needed = one * (max(keep, 1) + 1)
    free = shutil.disk_usage(folder).free
    said = (
        f"one checkpoint {gigabytes(one)} ({how}); {keep} kept and one being written need "
        f"{gigabytes(needed)}",
        f"{gigabytes(free)} free",
    )
    fix = (
        "Keep fewer checkpoints, write to another disk, or free space: a full disk ends a run "
        "while it saves."
    )
    if free < needed:
        return failed(*said, fix=fix)
    return warned(*said, fix=fix) if free < TIGHT * needed else passed(*said)


def _configured(seen: Inspection) -> str | None:
    for name in ("run_dir", "output_dir", "save_dir", "checkpoint_dir", "results_folder"):
        if isinstance(seen.config.get(name), str):
            return str(seen.config[name])
    return None


def _existing(folder: str | Path | None) -> Path:
    if folder is None:
        raise Missing("give --run-dir PATH")
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path


ITEM = Item(id="disk.space", title="the disk holds the checkpoints", look=_look)
