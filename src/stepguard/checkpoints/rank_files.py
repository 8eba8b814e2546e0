"""What one rank writes of a checkpoint that all ranks write together, with a seal of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.seal import (
    SCHEMA,
    Health,
    Seal,
    SealedFile,
    SealedPart,
    digest_of,
    parse_seal,
    rank_seal_name,
    read_small,
    seal_bytes,
)
from stepguard.checkpoints.writing import WrittenFiles, read_back, write_json, write_tensors
from stepguard.state.atomic import Disk, write_file
from stepguard.tensors.sharding import TensorPart

UNKNOWN = Health(loss=None, level=None, steps_watched=0, incidents=0, good=False)
"""One rank cannot say whether the state of all is good."""


def write_rank(
    folder: Path,
    rank: int,
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, TensorPart],
    may_be_nonfinite: Collection[str],
    disk: Disk,
    *,
    reads_back: bool,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """Write the tensors of one rank, then their seal; returns the digest of the seal.

    A part that another rank writes, and one without an element, is left out. `facts`: what this
    rank adds to those of a checkpoint that another one wrote.
    """
    mine: dict[str, Tensor] = {}
    places: dict[str, SealedPart] = {}
    for name, tensor in tensors.items():
        part = parts.get(name)
        if part is None:
            mine[name] = tensor
        elif part.first and part.elements:
            mine[name] = tensor
            places[name] = SealedPart(whole=part.whole, offset=part.offset)
    written = write_tensors(folder, mine, may_be_nonfinite, disk, stem=f"rank-{rank:05d}")
    if reads_back:
        for name, sealed in written.files.items():
            read_back(folder / name, sealed)
    seal = Seal(
        step=0,
        health=UNKNOWN,
        files=written.files,
        tensors=written.tensors,
        serial=0,
        nonfinite=tuple(written.nonfinite),
        parts=places,
        facts=dict(facts or {}),
        schema=SCHEMA,
    )
    content = seal_bytes(seal)
    if facts is None:
        write_json(folder / rank_seal_name(rank), content, disk)
    else:
        # somebody may be opening the checkpoint already: all of this seal is there, or none
        write_file(folder / rank_seal_name(rank), content, disk)
    disk.sync_folder(folder)
    return digest_of(content)


def gather_ranks(folder: Path, digests: Sequence[str]) -> WrittenFiles:
    """Read the seals of all ranks, which must have these digests, and list all their files."""
    found = WrittenFiles(ranks=len(digests))
    for rank, digest in enumerate(digests):
        name = rank_seal_name(rank)
        content = read_small(folder / name)
        if digest_of(content) != digest:
            raise StoreError(f"{folder / name} is not what rank {rank} has written.")
        found.files[name] = SealedFile(size=len(content), digest=digest)
        found.files.update(parse_seal(content, folder, name).files)
    return found
