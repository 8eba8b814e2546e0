"""Checkpoints that are folders: torch.distributed.checkpoint, Hugging Face, stepguard's own."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard._errors import StoreError
from stepguard.check.bounded_file import (
    LARGEST_INDEX,
    SIZES,
    Damaged,
    FileSlice,
    ProblemList,
    first_few,
    is_shape,
    open_file,
    parse_json,
    role_of_file,
    role_of_part,
)
from stepguard.check.inert_pickle import PickledObject, PickleReader, TensorRecord
from stepguard.check.scan import Checksum, FileLayout, Progress
from stepguard.check.torch_file import (
    ZIP_START,
    Read,
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


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """One checkpoint that was found: a file, or a folder with the files that make it up."""

    path: Path
    files: tuple[Path, ...]
    size: int
    format: str = ""
    """Key of FOLDER_FORMATS; empty for a single file."""


@dataclass(slots=True)
class CheckedFolder:
    """The files of a checkpoint after reading, and what the checkpoint says about itself."""

    layouts: list[FileLayout]
    format: str
    step: int | None = None


def _lies_in_folder(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..")


# --- Folders of torch.distributed.checkpoint: a pickled `.metadata`, files of many small zips.

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
"""Of the files with the tensors."""
ANOTHER = "the file was written by another save"


@dataclass(frozen=True, slots=True)
class DcpItem:
    """One stored item: a whole tensor, a part of one, or an object."""

    name: str
    file: str
    offset: int
    length: int
    transformed: bool
    """Compressed or encrypted by an extension of the writer."""
    shape: tuple[int, ...] | None = None
    """Of the piece, as `.metadata` describes it; None for an object."""


def check_dcp(found: CheckpointFiles, problems: ProblemList, progress: Progress) -> CheckedFolder:
    """Check `.metadata` and every file that it names."""
    folder = found.path
    checked = CheckedFolder([], "DCP")
    if (folder / METADATA).is_symlink():
        problems.add("link", f"{METADATA} is a link; it was not followed")
        return checked
    if not (folder / METADATA).exists():
        names = first_few(sorted(path.name for path in folder.glob(f"*{DATA_SUFFIX}")))
        problems.add(
            "missing",
            f"has no {METADATA}, which is written last: the save of {names} never finished, "
            f"and it cannot be loaded",
        )
        return checked
    sealed: Mapping[str, SealedFile] = {}
    if (folder / SEAL).exists():
        try:
            sealed = read_seal(folder).files
        except StoreError as fault:
            problems.add("seal", str(fault))
    checked.layouts = _check_dcp_files(found, sealed, progress)
    for name in sorted(sealed):
        if not (folder / name).exists():
            problems.add("missing", f"the seal names {name}, which is not there")
    return checked


def _check_dcp_files(
    found: CheckpointFiles, sealed: Mapping[str, SealedFile], progress: Progress
) -> list[FileLayout]:
    folder = found.path
    items: list[DcpItem] = []

    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        _begin_dcp_file(source, layout, sealed)
        value = read_metadata(source, layout, role)
        stored = value.field("storage_data") if isinstance(value, PickledObject) else None
        if not isinstance(stored, dict):
            raise Damaged("malformed", f"{METADATA} holds no storage_data")
        shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for name, _, chunks in _described(value):
            for offsets, sizes in chunks:
                shapes[name, offsets] = sizes
        dcp_items = []
        for index, info in stored.items():
            if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
                raise Damaged("malformed", f"{METADATA} names a piece by a {type(index).__name__}")
            name = index.field("fqn")
            file = info.field("relative_path")
            offset = info.field("offset")
            length = info.field("length")
            is_named = isinstance(name, str) and isinstance(file, str)
            if not is_named or type(offset) is not int or type(length) is not int:
                raise Damaged("malformed", f"{METADATA} does not say where a piece lies")
            place = index.field("offset")
            shape = shapes.get((name, tuple(place))) if is_shape(place) else None
            transformed = bool(info.field("transform_descriptors"))
            dcp_items.append(DcpItem(name, file, offset, length, transformed, shape))
        items.extend(dcp_items)
        _check_completeness(value, layout.problems)

    metadata = check_file(folder / METADATA, progress, read=read)
    by_file: dict[str, list[DcpItem]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    layouts = [metadata]
    for name, held in sorted(by_file.items()):
        if _is_present(folder, name, held, metadata.problems):
            reader = _dcp_reader(held, sealed)
            layouts.append(check_file(folder / name, progress, read=reader))
    # what a library keeps beside it (`common.pt`, the metadata of one rank) is loaded as well
    for path in found.files:
        if path.name.endswith(METADATA) and path.name != METADATA:
            layouts.append(check_file(path, progress, read=read_metadata))
        elif path.name not in by_file and has_checkpoint_suffix(path):
            layouts.append(check_file(path, progress))
        elif metadata.complete and path.suffix == DATA_SUFFIX and path.name not in by_file:
            detail = f"{path.name} is not named by {METADATA}"
            metadata.problems.add("index", detail, severity="warning")
    return layouts


def _is_present(folder: Path, name: str, held: list[DcpItem], problems: ProblemList) -> bool:
    """Can a file that `.metadata` names be read? If not, report why."""
    if not _lies_in_folder(name):
        detail = f"names the file {name!r}, which lies outside the folder; it was not opened"
        problems.add("hostile", detail)
    elif not (folder / name).exists():
        lost = first_few(item.name for item in held)
        problems.add("missing", f"names {name}, which is not there; it holds {lost}")
    elif (folder / name).is_symlink():
        problems.add("link", f"{name} is a link; it was not followed")
    else:
        return True
    return False


def read_metadata(source: FileSlice, layout: FileLayout, role: Role | None) -> Any:
    """Read a `.metadata`. torch loads it with plain pickle, so its names matter most."""
    reader = PickleReader(source)
    if reader.is_legacy:
        raise Damaged("format", "is an old torch.save, not the metadata of a DCP folder")
    return read_value(reader, layout)


def _begin_dcp_file(
    source: FileSlice, layout: FileLayout, sealed: Mapping[str, SealedFile]
) -> None:
    """Have the bytes compared with the seal; a file of another save differs in them."""
    layout.format = "DCP"
    name = layout.path.name
    if name in sealed:
        layout.checksums.append(Checksum(0, source.size, name, sealed[name].digest))
    elif sealed:
        layout.problems.add("seal", "is not named by the seal")


def _dcp_reader(items: list[DcpItem], sealed: Mapping[str, SealedFile]) -> Read:
    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        _begin_dcp_file(source, layout, sealed)
        end = 0
        for item in sorted(items, key=lambda item: item.offset):
            try:
                if item.offset < end:
                    raise Damaged("hostile", f"{item.name} shares its bytes with another item")
                end = item.offset + item.length
                _read_dcp_item(source.part(item.offset, item.length), layout, item)
            except Damaged as damage:
                layout.problems.add(damage.kind, damage.detail, tensor=item.name)
        if source.size > end:
            detail = f"has {source.size:,} bytes and {METADATA} describes {end:,}: {ANOTHER}"
            layout.problems.add("index", detail)

    return read


def _read_dcp_item(source: FileSlice, layout: FileLayout, item: DcpItem) -> None:
    if item.transformed or source.at(0, len(ZIP_START)) != ZIP_START:
        # torch unpacks such an item and loads an object in it with pickle
        raise Damaged("format", "is stored in a form that is not read, and torch would load it")
    # the role by the first part of a name, or by the second (`app.optimizer.state.lr`)
    parts = item.name.split(".")
    role = role_of_part(parts[0])
    if role is None and len(parts) > 2:
        role = role_of_part(parts[1])
    value = read_zip(source, layout, role, prefix=f"{item.name}/")
    if isinstance(value, TensorRecord) and item.shape not in (None, value.shape):
        described = f"{list(value.shape)} here and {list(item.shape or ())} in {METADATA}"
        layout.problems.add("index", f"is {described}: {ANOTHER}", tensor=item.name)
    # DCP flattens states down to their single values
    if isinstance(value, float) and role is not None:
        add_number(layout, tuple(parts), role, value)


Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _described(value: PickledObject) -> list[tuple[str, Any, Chunks]]:
    """Return name, shape and chunks (offsets and sizes) of everything that is described."""
    found: list[tuple[str, Any, Chunks]] = []
    described = value.field("state_dict_metadata")
    for name, entry in described.items() if isinstance(described, dict) else ():
        if not isinstance(name, str) or not isinstance(entry, PickledObject):
            continue
        listed = entry.field("chunks")
        size = entry.field("size") if isinstance(listed, list) else None
        chunks: Chunks = []
        for chunk in listed if isinstance(listed, list) else ():
            if isinstance(chunk, PickledObject):
                offsets = chunk.field("offsets")
                sizes = chunk.field("sizes")
                if is_shape(offsets) and is_shape(sizes):
                    chunks.append((tuple(offsets), tuple(sizes)))
        found.append((name, size, chunks))
    return found


def _check_completeness(value: PickledObject, problems: ProblemList) -> None:
    """Report tensors whose parts are not all stored, or do not make up the whole tensor."""
    stored = Counter(index.field("fqn") for index in value.field("storage_data"))
    for name, size, chunks in _described(value):
        if name not in stored:
            problems.add("missing", "is described but stored nowhere", tensor=name)
        elif is_shape(size):
            held = sum(math.prod(sizes) for _, sizes in chunks)
            needed = math.prod(size)
            count = stored[name]
            if held < needed or count < len(chunks):
                detail = f"its pieces hold {held:,} of {needed:,} elements"
                detail += f", {count} of {len(chunks)} stored"
                problems.add("missing", detail, tensor=name)


# --- Folders of transformers, accelerate and DeepSpeed: shards, their index, a trainer's state.

NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.(safetensors|bin)$")
INDEX_SUFFIX = ".index.json"
TRAINER_STATE = "trainer_state.json"
JSON_FILES = ("config.json", "adapter_config.json", "generation_config.json", TRAINER_STATE)
SIDE_FILES = frozenset({
    "trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin",
    "training_args.bin", "adapter_config.json", "config.json", "random_states_0.pkl", "scaler.pt",
})  # fmt: skip
"""Files that make one checkpoint of a folder with weights."""


def check_huggingface(
    found: CheckpointFiles, problems: ProblemList, progress: Progress
) -> CheckedFolder:
    """Check every file of the folder, then indices, shard numbers and JSON files."""
    folder = found.path
    layouts = {path.name: check_file(path, progress) for path in found.files}
    for path in sorted(set(folder.iterdir()) - set(found.files)):
        # a target inside the folder is checked by itself
        is_member = path.is_symlink() and has_checkpoint_suffix(path) and path.is_file()
        if is_member and not path.resolve().is_relative_to(folder.resolve()):
            detail = f"{path.name} is a link out of the folder and was not read; verify its target"
            problems.add("link", detail)
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    for path in indices:
        data = _read_json(path, problems)
        if data is not None and _has_weight_map(data):
            _check_index(path.name, data, layouts, problems)
        elif data is not None:
            problems.add("malformed", f"{path.name} has no weight_map of names and shards")
    if not indices:
        _check_shard_numbers(layouts, problems)
    found_json = {
        name: _read_json(folder / name, problems) for name in JSON_FILES if (folder / name).exists()
    }
    step = _check_trainer_state(found_json.get(TRAINER_STATE), problems)
    return CheckedFolder(list(layouts.values()), _format_name(found.files, layouts), step)


def _read_json(path: Path, problems: ProblemList) -> Any:
    """Return the content of a JSON file, or None and a problem."""
    try:
        with open_file(path) as source:
            if source.size > LARGEST_INDEX:
                raise Damaged("limit", f"{path.name} has {source.size:,} bytes, more than are read")
            return parse_json(source.exactly(0, source.size), path.name)
    except Damaged as damage:
        problems.add(damage.kind, damage.detail)
        return None


def _has_weight_map(data: Any) -> bool:
    shards = data.get("weight_map") if isinstance(data, dict) else None
    return isinstance(shards, dict) and not set(map(type, shards.values())) - {str}


def _check_index(
    index: str, data: Any, layouts: Mapping[str, FileLayout], problems: ProblemList
) -> None:
    """Compare an index (tensor -> shard) with the shards that are there."""
    shards = data["weight_map"]
    metadata = data.get("metadata")
    named = sorted(set(shards.values()))
    homes: dict[str, list[str]] = {}
    for shard in named:
        if not _lies_in_folder(shard):
            detail = f"{index} names {shard!r}, which lies outside the folder; it was not opened"
            problems.add("hostile", detail)
        elif shard not in layouts:
            problems.add("missing", f"{index} names the shard {shard!r}, which is not there")
        else:
            for tensor in layouts[shard].tensors:
                homes.setdefault(tensor.name, []).append(shard)
    _report_leftovers(index, named, layouts, problems)
    complete = [name for name in named if name in layouts and layouts[name].complete]
    _check_homes(index, shards, homes, complete, problems)
    size = sum(layouts[name].size for name in complete)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if len(complete) == len(named) and isinstance(total, int | float) and total > size:
        # not :d, for JSON may hold Infinity
        detail = f"{index} says {total:,} bytes of tensors, all shards together have {size:,}"
        problems.add("index", detail, severity="warning")


def _check_homes(
    index: str,
    shards: Mapping[str, str],
    homes: Mapping[str, list[str]],
    complete: list[str],
    problems: ProblemList,
) -> None:
    """Compare the shard that the index names for a tensor with those that hold it."""
    for name, held in homes.items():
        if len(held) > 1:
            problems.add("duplicate", f"is in {first_few(held)}", tensor=name)
        elif name not in shards:
            detail = f"is in {held[0]} but not in {index}"
            problems.add("index", detail, tensor=name, severity="warning")
    for name, shard in shards.items():
        held = homes.get(name, [])
        if shard in complete and shard not in held:
            detail = f"should be in {shard} by {index}, but is not"
            if held:
                detail += f"; it is in {held[0]}"
            problems.add("index", detail, tensor=name)


def _report_leftovers(
    index: str, named: list[str], layouts: Mapping[str, FileLayout], problems: ProblemList
) -> None:
    """Report shards of the same family that are not named: an earlier save left them."""
    families = set(map(_family, named))
    for name in layouts:
        if NUMBERED.match(name) and _family(name) in families and name not in named:
            detail = f"{name} is a shard that {index} does not name"
            problems.add("index", detail, severity="warning")


def _family(shard: str) -> tuple[str, str]:
    """Return stem and suffix of a shard, whatever the number of shards."""
    match = NUMBERED.match(shard)
    return (match["stem"] if match else shard), Path(shard).suffix


def _check_shard_numbers(layouts: Mapping[str, FileLayout], problems: ProblemList) -> None:
    """Report gaps in `model-00002-of-00003` where there is no index."""
    families: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(NUMBERED.match, layouts)):
        family = (match["stem"], int(match["total"]))
        families.setdefault(family, set()).add(int(match["number"]))
    for (stem, total), numbers in families.items():
        # some writers count from 0
        first = min(numbers | {1})
        missing = [number for number in range(first, first + total) if number not in numbers]
        if missing:
            detail = f"of the {total} shards of {stem}, number {first_few(missing)} is not there"
            problems.add("missing", detail)


def _check_trainer_state(data: Any, problems: ProblemList) -> int | None:
    """Report the first logged value that is not finite, since it stays so; returns the step."""
    if not isinstance(data, dict):
        return None
    history = data.get("log_history")
    for entry in history if isinstance(history, list) else ():
        bad = []
        for key in ("loss", "grad_norm", "eval_loss") if isinstance(entry, dict) else ():
            value = entry.get(key)
            if isinstance(value, float) and not math.isfinite(value):
                bad.append(key)
        if bad:
            detail = f"{first_few(bad)} not finite at step {entry.get('step')}"
            problems.add("loss", f"{TRAINER_STATE}: {detail}", severity="warning")
            break
    step = data.get("global_step")
    return step if type(step) is int else None


def _format_name(files: Sequence[Path], layouts: Mapping[str, FileLayout]) -> str:
    """Name the library and the format of its weights: `transformers (safetensors)`."""
    if _is_deepspeed(files):
        return "DeepSpeed"
    library = "transformers"
    if any(path.name.startswith("random_states") for path in files):
        library = "accelerate"
    weights = set()
    for name, layout in layouts.items():
        suffix = layout.path.suffix
        if layout.tensors and role_of_file(name) is None and suffix in (".safetensors", ".bin"):
            weights.add(suffix.removeprefix("."))
    if not weights:
        return library
    return f"{library} ({', '.join(sorted(weights))})"


def _is_deepspeed(files: Sequence[Path]) -> bool:
    return any(
        "_model_states" in path.name or path.name.startswith("zero_pp_rank_") for path in files
    )


def _is_huggingface(files: Sequence[Path]) -> bool:
    names = {path.name for path in files}
    if _is_deepspeed(files) or any(
        name.endswith(INDEX_SUFFIX) or NUMBERED.match(name) for name in names
    ):
        return True
    return not names.isdisjoint(SIDE_FILES) and any(map(has_checkpoint_suffix, files))


# --- Checkpoints of stepguard: every byte compared with the seal, every tensor with its digest.


def check_sealed(
    found: CheckpointFiles, problems: ProblemList, progress: Progress
) -> CheckedFolder:
    """Check all files that the seal names; a file that it does not name is worth a warning."""
    folder = found.path
    checked = CheckedFolder([], "sealed")
    try:
        seal = read_seal(folder)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return checked
    checked.step = seal.step
    if not seal.health.good:
        why = seal.health.why or "its run was in trouble"
        problems.add("diverged", f"is whole and finite, but not one to resume from: {why}")
    owners = _seal_of_each_file(folder, seal, problems)
    for name, owner in sorted(owners.items()):
        path = folder / name
        if path.is_symlink():
            problems.add("link", f"{name} is a link where the seal has a file; it was not followed")
        elif not path.exists():
            problems.add("missing", f"the seal names {name}, which is not there")
        else:
            read = _sealed_reader(seal.files.get(name) or owner.files[name], owner)
            allowed = frozenset(owner.nonfinite)
            checked.layouts.append(check_file(path, progress, read=read, allowed=allowed))
    for path in sorted(folder.iterdir()):
        # a rank that has added its own to what another one wrote has a seal that proves itself
        added = not seal.ranks and path.match(RANK_SEALS)
        if path.name not in owners and path.name != SEAL and not added:
            problems.add("seal", f"{path.name} is not named by the seal", severity="warning")
            if path.is_file() and has_checkpoint_suffix(path):
                checked.layouts.append(check_file(path, progress))
    return checked


def _seal_of_each_file(folder: Path, seal: Seal, problems: ProblemList) -> dict[str, Seal]:
    """Which seal knows the tensors of a file: where several ranks have written, its rank's own."""
    owners = dict.fromkeys(seal.files, seal)
    try:
        ranks = read_rank_seals(folder, seal)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return owners
    held: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for own in ranks:
        named = own.files.keys() & seal.files.keys() if seal.ranks else own.files.keys()
        owners.update(dict.fromkeys(named, own))
        for name, part in own.parts.items():
            held[name] += math.prod(own.tensors[name].shape) if name in own.tensors else 0
            whole[name] = math.prod(part.whole)
    for name, needed in whole.items():
        if held[name] != needed:
            detail = f"its parts hold {held[name]:,} of {needed:,} elements"
            problems.add("missing", detail, tensor=name)
    return owners


def _sealed_reader(sealed: SealedFile, seal: Seal) -> Read:
    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        path = layout.path
        layout.format = "sealed"
        layout.checksums.append(Checksum(0, source.size, path.name, sealed.digest))
        if source.size != sealed.size:
            raise Damaged("torn", f"has {source.size:,} bytes, {sealed.size:,} were sealed")
        if path.suffix == ".safetensors":
            read_safetensors(source, layout, None)
            _compare_with_seal(layout, seal)
        # a digest says that nobody changed a pickle, not that it is safe to load
        elif has_checkpoint_suffix(path):
            parse(source, layout, role)

    return read


def _compare_with_seal(layout: FileLayout, seal: Seal) -> None:
    """Compare the header with the seal, and take the element types from the seal."""
    held = {tensor.name for tensor in layout.tensors}
    for name, sealed in seal.tensors.items():
        is_here = sealed.file == layout.path.name and sealed.same_as is None
        if is_here and name not in held:
            layout.problems.add("missing", "is sealed, but not in the file", tensor=name)
    for tensor in layout.tensors:
        name = tensor.name
        known = seal.tensors.get(name)
        if known is None:
            layout.problems.add("seal", "is in the file, but not sealed", tensor=name)
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
            detail = "has no seal: it was never finished"
            problems.append(Problem(file=str(damaged.path), kind="seal", detail=detail))
    return problems


def folder_format(files: Sequence[Path]) -> str:
    """Name the format of which the files of a folder are one checkpoint; empty if they are not."""
    names = {path.name for path in files}
    # a folder of torch.distributed.checkpoint may have a seal, too
    if METADATA in names or (SEAL not in names and any(n.endswith(DATA_SUFFIX) for n in names)):
        return "DCP"
    if SEAL in names:
        return "sealed"
    return "transformers" if _is_huggingface(files) else ""


FOLDER_FORMATS: dict[str, Callable[[CheckpointFiles, ProblemList, Progress], CheckedFolder]] = {
    "sealed": check_sealed,
    "DCP": check_dcp,
    "transformers": check_huggingface,
}
"""What checks a folder of each format."""
