"""Checkpoints that are folders: torch.distributed.checkpoint, Hugging Face, stepguard's own."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepguard._errors import StoreError
from stepguard.check.inert_pickle import PickledObject, PickleReader, TensorRecord
from stepguard.check.scan import (
    LARGEST_INDEX,
    SIZES,
    Checksum,
    Damaged,
    FileLayout,
    FileSlice,
    Progress,
    is_shape,
    open_file,
    parse_json,
    role_of_file,
    role_of_part,
)
from stepguard.check.torch_file import (
    ZIP_START,
    add_number,
    check_file,
    has_checkpoint_suffix,
    parse,
    read_safetensors,
    read_value,
    read_zip,
)
from stepguard.checkpoints.seal import (
    LAST_GOOD,
    RANK_SEALS,
    SEAL,
    Seal,
    SealedFile,
    list_entries,
    read_pointer,
    read_rank_seals,
    read_seal,
)
from stepguard.records.checks import Problem, Role
from stepguard.report.phrases import first_few


class CheckpointFiles(NamedTuple):
    """One checkpoint that was found: a file, or a folder with the files that make it up."""

    path: Path
    files: tuple[Path, ...]
    size: int
    format: str = ""
    """Key of FOLDER_FORMATS; empty for a single file."""


def _is_in_folder(folder: Path, name: str, what: str, whole: FileLayout) -> bool:
    """Can a file that is named in a checkpoint be read? If not, report why."""
    if Path(name).name != name or name in ("", ".", ".."):
        whole.add("hostile", f"{what} {name!r}, which lies outside the folder; it was not opened")
    elif (folder / name).is_symlink():
        whole.add("link", f"{what} {name!r}, which is a link; it was not followed")
    elif not (folder / name).exists():
        whole.add("missing", f"{what} {name!r}, which does not exist")
    else:
        return True
    return False


# --- Folders of torch.distributed.checkpoint: a pickled `.metadata`, files of many small zips.

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
"""Suffix of the files that hold tensors."""
ANOTHER = "the file was written by another save"
Place = tuple[str, tuple[int, ...]]
"""Name of a tensor, and where a piece of it begins."""


class Piece(NamedTuple):
    """A whole tensor, a part of one, or an object, by its place in a file."""

    offset: int
    length: int
    name: str
    is_transformed: bool
    """Compressed or encrypted by an extension of the writer."""
    shape: tuple[int, ...] | None
    """Shape in `.metadata`; None for an object."""


def check_dcp(whole: FileLayout, files: Sequence[Path], progress: Progress) -> list[FileLayout]:
    """Check `.metadata` and every file that it names."""
    folder = whole.path
    whole.format = "DCP"
    if not _is_in_folder(folder, METADATA, "a finished save has", whole):
        return []
    sealed = _sealed_files(folder, whole)
    stored: dict[str, list[Piece]] = {}

    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "DCP"
        name = layout.path.name
        # a file of another save differs from the seal in its bytes
        if name in sealed:
            layout.checksums.append(Checksum(0, source.size, name, sealed[name].digest))
        elif sealed:
            layout.add("seal", "is not named by the seal")
        if name == METADATA:
            _list_pieces(_read_metadata(source, layout, role), layout, stored)
        else:
            _read_pieces(source, layout, stored[name])

    metadata = check_file(folder / METADATA, progress, read=read)
    layouts = [metadata]
    for name, pieces in sorted(stored.items()):
        what = f"places {first_few([piece.name for piece in pieces], 5)} in"
        if _is_in_folder(folder, name, what, metadata):
            layouts.append(check_file(folder / name, progress, read=read))
    # what a library keeps beside it (`common.pt`, the metadata of one rank) is loaded as well
    for path in files:
        if path.name.endswith(METADATA) and path.name != METADATA:
            layouts.append(check_file(path, progress, read=_read_metadata))
        elif path.name not in stored and has_checkpoint_suffix(path):
            layouts.append(check_file(path, progress))
        elif metadata.complete and path.suffix == DATA_SUFFIX and path.name not in stored:
            metadata.add("index", f"{path.name} is not named by {METADATA}", severity="warning")
    return layouts


def _sealed_files(folder: Path, whole: FileLayout) -> Mapping[str, SealedFile]:
    if not (folder / SEAL).exists():
        return {}
    try:
        sealed = read_seal(folder).files
    except StoreError as fault:
        whole.add("seal", str(fault))
        return {}
    for name in sorted(sealed):
        _is_in_folder(folder, name, "the seal names", whole)
    return sealed


def _read_metadata(source: FileSlice, layout: FileLayout, role: Role | None) -> Any:
    """Read a `.metadata`. torch loads it with plain pickle, so its names matter most."""
    reader = PickleReader(source)
    if reader.is_legacy:
        raise Damaged("format", "is an old torch.save, not the metadata of a DCP folder")
    return read_value(reader, layout)


def _field(value: Any, name: str, kind: type) -> Any:
    """Return a field of an object in `.metadata`; Damaged if it is not of this type."""
    found = value.field(name) if isinstance(value, PickledObject) else None
    if type(found) is not kind or (kind is tuple and not is_shape(found)):
        raise Damaged("malformed", f"{METADATA} lacks a valid {name}")
    return found


def _list_pieces(value: Any, metadata: FileLayout, files: dict[str, list[Piece]]) -> None:
    """Fill in the pieces of every file; report tensors that are not stored as a whole."""
    stored = _field(value, "storage_data", dict)
    counts = Counter(_field(index, "fqn", str) for index in stored)
    shapes = {}
    for name, entry in _field(value, "state_dict_metadata", dict).items():
        chunks = []
        held = needed = 0
        # an object has no chunks
        if isinstance(entry, PickledObject) and entry.field("chunks") is not None:
            chunks = _field(entry, "chunks", list)
            needed = math.prod(_field(entry, "size", tuple))
        for chunk in chunks:
            sizes = _field(chunk, "sizes", tuple)
            shapes[name, _field(chunk, "offsets", tuple)] = sizes
            held += math.prod(sizes)
        if name not in counts:
            metadata.add("missing", "is listed, but stored in no file", tensor=str(name))
        elif held < needed or counts[name] < len(chunks):
            detail = f"its pieces hold {held:,} of {needed:,} elements, "
            detail += f"{counts[name]} of {len(chunks)} stored"
            metadata.add("missing", detail, tensor=name)
    for index, info in stored.items():
        place = index.field("offset")
        piece = Piece(
            _field(info, "offset", int),
            _field(info, "length", int),
            _field(index, "fqn", str),
            bool(info.field("transform_descriptors")),
            shapes.get((index.field("fqn"), tuple(place))) if is_shape(place) else None,
        )
        files.setdefault(_field(info, "relative_path", str), []).append(piece)


def _read_pieces(source: FileSlice, layout: FileLayout, pieces: list[Piece]) -> None:
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        try:
            if piece.offset < end:
                raise Damaged("hostile", f"{piece.name} shares its bytes with another item")
            end = piece.offset + piece.length
            _read_piece(source.part(piece.offset, piece.length), layout, piece)
        except Damaged as damage:
            layout.add(damage.kind, damage.detail, tensor=piece.name)
    if source.size > end:
        layout.add(
            "index", f"has {source.size:,} bytes and {METADATA} describes {end:,}: {ANOTHER}"
        )


def _read_piece(source: FileSlice, layout: FileLayout, piece: Piece) -> None:
    if piece.is_transformed or source.at(0, len(ZIP_START)) != ZIP_START:
        # torch unpacks such an item and loads an object in it with pickle
        raise Damaged(
            "format",
            "is stored in a form that stepguard does not read, although torch would load it",
        )
    # the role by the first part of a name, or by the second (`app.optimizer.state.lr`)
    parts = piece.name.split(".")
    role = role_of_part(parts[0])
    if role is None and len(parts) > 2:
        role = role_of_part(parts[1])
    value = read_zip(source, layout, role, prefix=f"{piece.name}/")
    if isinstance(value, TensorRecord) and piece.shape not in (None, value.shape):
        described = f"{list(value.shape)} here and {list(piece.shape or ())} in {METADATA}"
        layout.add("index", f"is {described}: {ANOTHER}", tensor=piece.name)
    # DCP flattens states down to their single values
    if isinstance(value, float) and role is not None:
        add_number(layout, tuple(parts), role, value)


# --- Folders of transformers and accelerate: shards, their index, a trainer's state.

NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.(safetensors|bin)$")
INDEX_SUFFIX = ".index.json"
TRAINER_STATE = "trainer_state.json"
JSON_FILES = ("config.json", "adapter_config.json", "generation_config.json", TRAINER_STATE)
SIDE_FILES = frozenset(
    [
        "trainer_state.json",
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scheduler.bin",
        "training_args.bin",
        "adapter_config.json",
        "config.json",
        "random_states_0.pkl",
        "scaler.pt",
    ]
)
"""Files that make one checkpoint of a folder with weights."""


def check_huggingface(
    whole: FileLayout, files: Sequence[Path], progress: Progress
) -> list[FileLayout]:
    """Check every file of the folder, then indices, shard numbers and JSON files."""
    folder = whole.path
    layouts = {path.name: check_file(path, progress) for path in files}
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    for path in indices:
        _check_index(path, _read_json(path, whole), layouts, whole)
    if not indices:
        _check_shard_numbers(layouts, whole)
    for name in JSON_FILES:
        data = _read_json(folder / name, whole) if (folder / name).exists() else None
        if name == TRAINER_STATE and isinstance(data, dict):
            step = data.get("global_step")
            whole.step = step if type(step) is int else None
            _check_history(data.get("log_history"), whole)
    weights = set()
    whole.format = "transformers"
    for name, layout in layouts.items():
        suffix = layout.path.suffix
        if layout.tensors and role_of_file(name) is None and suffix in (".safetensors", ".bin"):
            weights.add(suffix.removeprefix("."))
        if name.startswith("random_states"):
            whole.format = "accelerate"
    if weights:
        whole.format += f" ({', '.join(sorted(weights))})"
    return list(layouts.values())


def _check_shard_numbers(names: Mapping[str, FileLayout], whole: FileLayout) -> None:
    """Report gaps in `model-00002-of-00003` where there is no index."""
    families: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(NUMBERED.match, names)):
        families.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
    for (stem, total), numbers in families.items():
        # some writers count from 0
        first = min(numbers | {1})
        missing = sorted(set(range(first, first + total)) - numbers)
        if missing:
            detail = f"shard {first_few(missing, 5)} of the {total} shards of {stem} is missing"
            whole.add("missing", detail)


def _check_history(history: Any, whole: FileLayout) -> None:
    """Report the first logged value that is not finite, since it stays so."""
    for entry in history if isinstance(history, list) else ():
        values = entry if isinstance(entry, dict) else {}
        bad = []
        for key in ("loss", "grad_norm", "eval_loss"):
            if isinstance(values.get(key), float) and not math.isfinite(values[key]):
                bad.append(key)
        if bad:
            detail = f"{first_few(bad, 5)} not finite at step {values.get('step')}"
            whole.add("loss", f"{TRAINER_STATE}: {detail}", severity="warning")
            return


def _read_json(path: Path, whole: FileLayout) -> Any:
    """Return the content of a JSON file, or None and a problem."""
    try:
        with open_file(path) as source:
            if source.size > LARGEST_INDEX:
                raise Damaged(
                    "limit",
                    f"{path.name} has {source.size:,} bytes; at most {LARGEST_INDEX:,} are read",
                )
            return parse_json(source.exactly(0, source.size), path.name)
    except Damaged as damage:
        whole.add(damage.kind, damage.detail)
        return None


def _check_index(
    path: Path, data: Any, layouts: Mapping[str, FileLayout], whole: FileLayout
) -> None:
    """Compare an index (tensor -> shard) with the shards that are there."""
    index = path.name
    shards = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(shards, dict) or set(map(type, shards.values())) - {str}:
        if data is not None:
            whole.add("malformed", f"{index} has no weight_map of names and shards")
        return
    named = set(shards.values())
    families = {NUMBERED.sub(r"\g<stem>", shard) for shard in named}
    for shard in sorted(named - layouts.keys()):
        if _is_in_folder(path.parent, shard, f"{index} names the shard", whole):
            whole.add("index", f"{index} names {shard!r}, which is not a checkpoint")
    for name in sorted(layouts.keys() - named):
        # an earlier save with another number of shards left it
        if NUMBERED.match(name) and NUMBERED.sub(r"\g<stem>", name) in families:
            detail = f"{name} is a shard that {index} does not name"
            whole.add("index", detail, severity="warning")
    held = {name: layout for name, layout in layouts.items() if name in named}
    _check_homes(index, shards, held, whole)
    metadata = data.get("metadata")
    if isinstance(metadata, dict) and held.keys() == named:
        _check_total(index, metadata.get("total_size"), held.values(), whole)


def _check_total(index: str, total: Any, shards: Collection[FileLayout], whole: FileLayout) -> None:
    size = sum(shard.size for shard in shards)
    is_more = isinstance(total, int | float) and total > size
    if is_more and all(shard.complete for shard in shards):
        # not :d, for JSON may hold Infinity
        detail = f"{index} declares {total:,} bytes of tensors, but the shards hold {size:,}"
        whole.add("index", detail, severity="warning")


def _check_homes(
    index: str, shards: Mapping[str, str], layouts: Mapping[str, FileLayout], whole: FileLayout
) -> None:
    """Compare the shard that the index names for a tensor with those that hold it."""
    homes: dict[str, list[str]] = {}
    for shard, layout in layouts.items():
        for tensor in layout.tensors:
            homes.setdefault(tensor.name, []).append(shard)
    for name, held in homes.items():
        if len(held) > 1:
            whole.add("duplicate", f"is in {first_few(held, 5)}", tensor=name)
        elif name not in shards:
            detail = f"is in {held[0]} but not in {index}"
            whole.add("index", detail, tensor=name, severity="warning")
    for name, shard in shards.items():
        held = homes.get(name, [])
        if shard not in held and shard in layouts and layouts[shard].complete:
            detail = f"should be in {shard} according to {index}, but is not"
            if held:
                detail += f"; it is in {held[0]}"
            whole.add("index", detail, tensor=name)


# --- Checkpoints of stepguard: every byte compared with the seal, every tensor with its digest.


def check_sealed(whole: FileLayout, files: Sequence[Path], progress: Progress) -> list[FileLayout]:
    """Check all files that the seal names; a file that it does not name is worth a warning."""
    folder = whole.path
    whole.format = "sealed"
    layouts: list[FileLayout] = []
    try:
        seal = read_seal(folder)
    except StoreError as fault:
        whole.add("seal", str(fault))
        return layouts
    whole.step = seal.step
    if not seal.health.good:
        why = seal.health.why or "the run was unhealthy when it was saved"
        whole.add("diverged", f"is complete and finite, but not safe to resume from: {why}")
    owners = _seal_of_each_file(folder, seal, whole)

    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        path = layout.path
        owner = owners[path.name]
        sealed = seal.files.get(path.name) or owner.files[path.name]
        layout.format = "sealed"
        layout.checksums.append(Checksum(0, source.size, path.name, sealed.digest))
        if source.size != sealed.size:
            raise Damaged("torn", f"has {source.size:,} bytes, {sealed.size:,} were sealed")
        if path.suffix == ".safetensors":
            read_safetensors(source, layout, None)
            _compare_with_seal(layout, owner)
        # a digest says that nobody changed a pickle, not that it is safe to load
        elif has_checkpoint_suffix(path):
            parse(source, layout, role)

    for name, owner in sorted(owners.items()):
        if _is_in_folder(folder, name, "the seal names", whole):
            allowed = frozenset(owner.nonfinite)
            layouts.append(check_file(folder / name, progress, read=read, allowed=allowed))
    for path in sorted(folder.iterdir()):
        # a rank that has added its own to what another one wrote has a seal that proves itself
        added = not seal.ranks and path.match(RANK_SEALS)
        if path.name not in owners and path.name != SEAL and not added:
            whole.add("seal", f"{path.name} is not named by the seal", severity="warning")
            if path.is_file() and has_checkpoint_suffix(path):
                layouts.append(check_file(path, progress))
    return layouts


def _seal_of_each_file(folder: Path, seal: Seal, whole: FileLayout) -> dict[str, Seal]:
    """Which seal knows the tensors of a file: where several ranks have written, its rank's own."""
    owners = dict.fromkeys(seal.files, seal)
    try:
        ranks = read_rank_seals(folder, seal)
    except StoreError as fault:
        whole.add("seal", str(fault))
        return owners
    held: Counter[str] = Counter()
    needed = {}
    for own in ranks:
        for file in own.files:
            if file in seal.files or not seal.ranks:
                owners[file] = own
        for name, part in own.parts.items():
            held[name] += math.prod(own.tensors[name].shape) if name in own.tensors else 0
            needed[name] = math.prod(part.whole)
    for name, count in needed.items():
        if held[name] != count:
            whole.add(
                "missing", f"its parts hold {held[name]:,} of {count:,} elements", tensor=name
            )
    return owners


def _compare_with_seal(layout: FileLayout, seal: Seal) -> None:
    """Compare the header with the seal, and take the element types from the seal."""
    held = {tensor.start for tensor in layout.tensors}
    for name, sealed in seal.tensors.items():
        if sealed.file == layout.path.name and sealed.start not in held:
            layout.add("missing", "is sealed, but not in the file", tensor=name)
    for tensor in layout.tensors:
        name = tensor.name
        known = seal.tensors.get(name)
        if known is None:
            layout.add("seal", "is in the file, but not sealed", tensor=name)
            continue
        layout.checksums.append(Checksum(tensor.start, tensor.size, name, known.digest, name))
        # safetensors has no name for complex numbers and some 8-bit floats: the seal knows them
        if tensor.values is not None and known.dtype in SIZES:
            tensor.values.dtype = known.dtype
        tensor.dtype = known.dtype
        tensor.shape = known.shape


def check_store(folder: Path) -> list[Problem]:
    """Check a folder of sealed checkpoints: its pointer, and checkpoints without a seal."""
    problems = []
    try:
        read_pointer(folder)
    except StoreError as fault:
        problems.append(Problem(file=str(folder / LAST_GOOD), kind="seal", detail=str(fault)))
    for damaged in list_entries(folder)[1]:
        if not (damaged.path / SEAL).exists():
            detail = "has no seal: its save never finished"
            problems.append(Problem(file=str(damaged.path), kind="seal", detail=detail))
    return problems


# --- All formats of folders.


def folder_format(files: Sequence[Path]) -> str:
    """Name the format of which the files of a folder are one checkpoint; empty if they are not."""
    names = {path.name for path in files}
    # a folder of torch.distributed.checkpoint may have a seal, too
    if METADATA in names or (SEAL not in names and any(n.endswith(DATA_SUFFIX) for n in names)):
        return "DCP"
    if SEAL in names:
        return "sealed"
    is_sharded = any(name.endswith(INDEX_SUFFIX) or NUMBERED.match(name) for name in names)
    is_trainer = not names.isdisjoint(SIDE_FILES) and any(map(has_checkpoint_suffix, files))
    return "transformers" if is_sharded or is_trainer else ""


FOLDER_FORMATS: dict[str, Callable[[FileLayout, Sequence[Path], Progress], list[FileLayout]]] = {
    "sealed": check_sealed,
    "DCP": check_dcp,
    "transformers": check_huggingface,
}
"""What checks a folder of each format: it sets format and step of the folder itself."""
