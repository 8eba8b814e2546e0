"""Seal a folder that torch.distributed.checkpoint has written, so that no file in it can change.

`.metadata` of such a folder says where every piece lies and nothing of the bytes: a file of another
save with pieces of the same sizes would be loaded without a word.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import torch
import xxhash

from stepguard import __version__
from stepguard._errors import StoreError
from stepguard.checkpoints.seal import SEAL, Health, Seal, SealedFile, open_plain, seal_bytes
from stepguard.state.atomic import write_file
from stepguard.verification.api import verify
from stepguard.verification.dcp_folder import METADATA

PIECE = 1 << 20
"""Bytes that are read at a time."""


def seal_folder(folder: str | Path, *, step: int = 0) -> Path:
    """Verify a DCP folder and seal it; returns the path of the seal.

    Call it on one rank, after `dcp.save` has returned or the future of `dcp.async_save` is done.
    StoreError where the folder is not good: no `.metadata`, a missing file, NaN.
    """
    where = Path(folder)
    if not (where / METADATA).exists():
        raise StoreError(f"{where} is not sealed: its save never finished (no {METADATA}).")
    # an old seal would speak of the files before
    (where / SEAL).unlink(missing_ok=True)
    found = verify(where)
    if not found.ok:
        raise StoreError(f"{where} is not sealed, it is not good: {found.errors[0]}.")
    files: dict[str, SealedFile] = {}
    for path in sorted(where.iterdir()):
        if path.is_file():
            files[path.name] = _digested(path)
    seal = Seal(
        step=step,
        health=Health(loss=None, level=None, steps_watched=0, incidents=0, good=True),
        files=files,
        tensors={},
        serial=0,
        versions={"stepguard": __version__, "torch": torch.__version__},
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_file(where / SEAL, seal_bytes(seal))
    return where / SEAL


def _digested(path: Path) -> SealedFile:
    descriptor, size = open_plain(path)
    digest = xxhash.xxh3_128()
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return SealedFile(size=size, digest=digest.hexdigest())
