"""Folders of torch.distributed.checkpoint: a pickled `.metadata`, and files of many small zips."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard._errors import StoreError
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
from stepguard.records.checks import Problem, ProblemKind, Role
from stepguard.report.phrases import first_few
from stepguard.verification import bounded_file, pickle_machine
from stepguard.verification.bounded_file import Damaged, FileSlice, ProblemList, open_file
from stepguard.verification.file_formats import (
    SIGNATURE,
    SUFFIX,
    check_file,
    has_checkpoint_suffix,
    parse,
    parse_json,
    read_safetensors,
    read_zip,
)
from stepguard.verification.pickle_format import names_reported
from stepguard.verification.pickle_globals import PickledObject, TensorRecord
from stepguard.verification.pickle_machine import PickleReader
from stepguard.verification.reading import ChecksumRange, FileLayout
from stepguard.verification.scan import CheckedFolder, CheckpointFiles, FolderFormat, Progress, Read

# --- Folders of torch.distributed.checkpoint: a pickled `.metadata`, and files of many small
# zips.


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
    if (folder / METADATA).is_symlink():
        return _refused(folder, "link", f"{METADATA} is a link; it was not followed")
    if not (folder / METADATA).exists():
        names = first_few(sorted(path.name for path in folder.glob(f"*{DATA_SUFFIX}")), 5)
        detail = (
            f"has no {METADATA}, which is written last: the save of {names} never finished, "
            f"and it cannot be loaded"
        )
        return _refused(folder, "missing", detail)
    items: list[DcpItem] = []
    sealed = _sealed_files(folder, problems)

    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "DCP"
        _compare_with_seal(source, layout, sealed)
        # torch itself loads `.metadata` with plain pickle, so its names matter most
        reader = PickleReader(source)
        with names_reported(layout, reader.seen):
            value = reader.value()
        items.extend(_items(value))
        _check_completeness(value, layout.problems)

    metadata = check_file(folder / METADATA, progress, read=read)
    layouts = _check_files(folder, items, sealed, metadata.problems, progress)
    named = {layout.path.name for layout in layouts}
    # what a library keeps beside it (`common.pt`, the metadata of one rank) is loaded as well
    for path in found.files:
        if path.name.endswith(METADATA) and path.name != METADATA:
            layouts.append(check_file(path, progress, read=_read_metadata))
        elif path.name not in named and has_checkpoint_suffix(path):
            layouts.append(check_file(path, progress))
    if metadata.complete:
        _report_unnamed(folder, items, metadata.problems)
    for name in sorted(sealed):
        if not (folder / name).exists():
            problems.add("missing", f"the seal names {name}, which is not there")
    return CheckedFolder([metadata, *layouts])


def _read_metadata(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    reader = PickleReader(source)
    with names_reported(layout, reader.seen):
        reader.value()


def _sealed_files(folder: Path, problems: ProblemList) -> dict[str, SealedFile]:
    """Return what a seal says of the files; nothing where there is none."""
    if not (folder / SEAL).exists():
        return {}
    try:
        return dict(read_seal(folder).files)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return {}


def _compare_with_seal(
    source: FileSlice, layout: FileLayout, sealed: Mapping[str, SealedFile]
) -> None:
    """Have the bytes of a file compared with the seal; a file of another save differs in them."""
    name = layout.path.name
    if name in sealed:
        digest = sealed[name].digest
        layout.checksums.append(ChecksumRange(0, source.size, name, "xxh3_128", digest))
    elif sealed:
        layout.problems.add("seal", "is not named by the seal")


def _refused(folder: Path, kind: ProblemKind, detail: str) -> CheckedFolder:
    layout = FileLayout(folder / METADATA, "DCP", 0, ProblemList(str(folder)))
    layout.problems.add(kind, detail)
    return CheckedFolder([layout])


def _check_files(
    folder: Path,
    items: Sequence[DcpItem],
    sealed: Mapping[str, SealedFile],
    problems: ProblemList,
    progress: Progress,
) -> list[FileLayout]:
    by_file: dict[str, list[DcpItem]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    layouts = []
    for name, held in sorted(by_file.items()):
        if Path(name).name != name or name in ("", ".", ".."):
            problems.add(
                "hostile",
                f"names the file {name!r}, which lies outside the folder; it was not opened",
            )
        elif not (folder / name).exists():
            lost = first_few((item.name for item in held), 5)
            problems.add("missing", f"names {name}, which is not there; it holds {lost}")
        elif (folder / name).is_symlink():
            problems.add("link", f"{name} is a link; it was not followed")
        else:
            layouts.append(check_file(folder / name, progress, read=_reader(held, sealed)))
    return layouts


def _report_unnamed(folder: Path, items: Sequence[DcpItem], problems: ProblemList) -> None:
    named = {item.file for item in items}
    for path in sorted(folder.glob(f"*{DATA_SUFFIX}")):
        if path.name not in named:
            problems.add("index", f"{path.name} is not named by {METADATA}", severity="warning")


def _reader(items: list[DcpItem], sealed: Mapping[str, SealedFile]) -> Read:
    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "DCP"
        _compare_with_seal(source, layout, sealed)
        end = 0
        for item in sorted(items, key=lambda item: item.offset):
            try:
                if item.offset < end:
                    raise Damaged("hostile", f"{item.name} shares its bytes with another item")
                end = item.offset + item.length
                _read_item(source.part(item.offset, item.length), layout, item)
            except Damaged as damage:
                layout.problems.add(damage.kind, damage.detail, tensor=item.name)
        if source.size > end:
            layout.problems.add(
                "index", f"has {source.size:,} bytes and {METADATA} describes {end:,}: {ANOTHER}"
            )

    return read


def _read_item(source: FileSlice, layout: FileLayout, item: DcpItem) -> None:
    if item.transformed or source.at(0, len(SIGNATURE)) != SIGNATURE:
        # torch unpacks such an item and loads an object in it with pickle
        raise Damaged("format", "is stored in a form that is not read, and torch would load it")
    role = _role(item.name)
    value = read_zip(source, layout, role, prefix=f"{item.name}/").root
    if isinstance(value, TensorRecord) and item.shape not in (None, tuple(value.shape)):
        described = f"{list(value.shape)} here and {list(item.shape or ())} in {METADATA}"
        layout.problems.add("index", f"is {described}: {ANOTHER}", tensor=item.name)
    if isinstance(value, float) and role is not None:
        _add_number(layout, item.name, role, value)


def _role(name: str) -> Role | None:
    """Tell the role by the first part of a name, or by the second (`app.optimizer.state.lr`)."""
    parts = name.split(".")
    role = pickle_machine.named(parts[0])
    if role is None and len(parts) > 2:
        role = pickle_machine.named(parts[1])
    return role


def _add_number(layout: FileLayout, name: str, role: Role, value: float) -> None:
    """Add a float that is an item of its own: DCP flattens states down to their single values."""
    contents = pickle_machine.PickleContents()
    key = name.rpartition(".")[2]
    if not math.isfinite(value):
        contents.numbers.append((name.replace(".", "/"), role, value))
    elif key in pickle_machine.RATES:
        contents.rates.append((name, pickle_machine.RATES[key], value))
    layout.add_contents(contents)


def _items(value: Any) -> list[DcpItem]:
    stored = value.field("storage_data") if isinstance(value, PickledObject) else None
    if not isinstance(stored, dict):
        raise Damaged("malformed", f"{METADATA} holds no storage_data")
    shapes = _shapes(value)
    return [_item(index, info, shapes) for index, info in stored.items()]


def _shapes(value: PickledObject) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the shape of every piece that is described, by its tensor and its place in it."""
    found: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    described = value.field("state_dict_metadata")
    if not isinstance(described, dict):
        return found
    for name, entry in described.items():
        chunks = entry.field("chunks") if isinstance(entry, PickledObject) else None
        for chunk in chunks if isinstance(chunks, list) else ():
            if not isinstance(chunk, PickledObject) or not isinstance(name, str):
                continue
            offsets = chunk.field("offsets")
            sizes = chunk.field("sizes")
            if bounded_file.is_shape(offsets) and bounded_file.is_shape(sizes):
                found[name, tuple(offsets)] = tuple(sizes)
    return found


def _item(
    index: Any, info: Any, shapes: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]]
) -> DcpItem:
    if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
        raise Damaged("malformed", f"{METADATA} names a piece by a {type(index).__name__}")
    name = index.field("fqn")
    file = info.field("relative_path")
    offset = info.field("offset")
    length = info.field("length")
    is_named = isinstance(name, str) and isinstance(file, str)
    if not is_named or type(offset) is not int or type(length) is not int:
        raise Damaged("malformed", f"{METADATA} does not say where a piece lies")
    transformed = bool(info.field("transform_descriptors"))
    at = index.field("offset")
    shape = shapes.get((name, tuple(at))) if bounded_file.is_shape(at) else None
    return DcpItem(name, file, offset, length, transformed, shape)


def _check_completeness(value: Any, problems: ProblemList) -> None:
    """Report tensors whose parts are not all stored, or do not make up the whole tensor."""
    stored = Counter(index.field("fqn") for index in value.field("storage_data"))
    described = value.field("state_dict_metadata")
    if not isinstance(described, dict):
        return
    for name, entry in described.items():
        if not isinstance(name, str) or not isinstance(entry, PickledObject):
            continue
        if name not in stored:
            problems.add("missing", "is described but stored nowhere", tensor=name)
        else:
            _check_parts(name, entry, stored[name], problems)


def _check_parts(name: str, entry: PickledObject, stored: int, problems: ProblemList) -> None:
    chunks = entry.field("chunks")
    size = entry.field("size")
    if not isinstance(chunks, list) or not bounded_file.is_shape(size):
        return
    held = 0
    for chunk in chunks:
        if isinstance(chunk, PickledObject) and bounded_file.is_shape(chunk.field("sizes")):
            held += math.prod(chunk.field("sizes"))
    needed = math.prod(size)
    if held < needed or stored < len(chunks):
        detail = (
            f"its pieces hold {held:,} of {needed:,} elements, {stored} of {len(chunks)} stored"
        )
        problems.add("missing", detail, tensor=name)


def _is_dcp(files: list[Path]) -> bool:
    return any(path.name == METADATA or path.name.endswith(DATA_SUFFIX) for path in files)


DCP = FolderFormat(name="DCP", matches=_is_dcp, check=check_dcp, all_files=True)


# --- Folders of transformers, accelerate and DeepSpeed: shards, their index, a trainer's state.


NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.(safetensors|bin)$")
MOST_SHARDS = 10_000
INDEX_SUFFIX = ".index.json"
TRAINER_STATE = "trainer_state.json"
JSON_FILES = ("config.json", "adapter_config.json", "generation_config.json", TRAINER_STATE)
LOGGED = ("loss", "grad_norm", "eval_loss")
SIDE_FILES = frozenset({
    "trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin",
    "training_args.bin", "adapter_config.json", "config.json", "random_states_0.pkl", "scaler.pt",
})  # fmt: skip
"""Files that make one checkpoint of a folder with weights."""


def check_huggingface(
    found: CheckpointFiles, problems: ProblemList, progress: Progress
) -> CheckedFolder:
    """Check every file of the folder, then indices, shard numbers and JSON files."""
    layouts = [check_file(path, progress) for path in found.files]
    for path in sorted(set(found.path.iterdir()) - set(found.files)):
        # its target inside the folder is checked by itself
        is_member = path.is_symlink() and has_checkpoint_suffix(path) and path.is_file()
        if is_member and not path.resolve().is_relative_to(found.path.resolve()):
            detail = f"{path.name} is a link out of the folder and was not read; verify its target"
            problems.add("link", detail)
    step = check_side_files(found.path, layouts, problems)
    return CheckedFolder(layouts, step, _format_name(found.files, layouts))


def check_deepspeed(
    found: CheckpointFiles, problems: ProblemList, progress: Progress
) -> CheckedFolder:
    checked = check_huggingface(found, problems, progress)
    return CheckedFolder(checked.layouts, checked.step)


def check_side_files(
    folder: Path, layouts: Sequence[FileLayout], problems: ProblemList
) -> int | None:
    """Check what lies beside the weights; returns the step that the trainer's state names."""
    by_name = {layout.path.name: layout for layout in layouts}
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    for path in indices:
        index = _read_index(path, by_name, problems)
        if index is not None:
            index.check()
    if not indices:
        _check_numbers(by_name, problems)
    step = None
    for name in JSON_FILES:
        if (folder / name).exists():
            data = read_json(folder / name, problems)
            if name == TRAINER_STATE:
                step = _check_trainer_state(data, problems)
    return step


def read_json(path: Path, problems: ProblemList) -> Any:
    """Return the content of a JSON file, or None and a problem."""
    try:
        with open_file(path) as source:
            if source.size > bounded_file.LARGEST_JSON:
                raise Damaged("limit", f"{path.name} has {source.size:,} bytes, more than are read")
            return parse_json(source.exactly(0, source.size), path.name)
    except Damaged as damage:
        problems.add_damage(damage)
        return None


@dataclass(slots=True)
class _Index:
    """One index, to be compared with the shards that are there."""

    name: str
    weight_map: dict[str, str]
    """Tensor -> shard."""
    metadata: Any
    layouts: Mapping[str, FileLayout]
    problems: ProblemList

    def check(self) -> None:
        named = sorted(set(self.weight_map.values()))
        present = [shard for shard in named if self._is_present(shard)]
        homes: dict[str, list[str]] = {}
        for shard in present:
            for tensor in self.layouts[shard].tensors:
                homes.setdefault(tensor.name, []).append(shard)
        complete = {shard for shard in present if self.layouts[shard].complete}
        self._check_stored(homes)
        self._check_named(homes, complete)
        self._report_leftover_shards(named)
        if len(complete) == len(named):
            self._check_total(sum(self.layouts[shard].size for shard in named))

    def _is_present(self, shard: str) -> bool:
        if Path(shard).name != shard or shard in ("", ".", ".."):
            self.problems.add(
                "hostile",
                f"{self.name} names {shard!r}, which lies outside the folder; it was not opened",
            )
            return False
        if shard not in self.layouts:
            detail = f"{self.name} names the shard {shard!r}, which is not there"
            self.problems.add("missing", detail)
            return False
        return True

    def _check_stored(self, homes: Mapping[str, list[str]]) -> None:
        """Report tensors in several shards, and those that the index does not name."""
        for name, shards in homes.items():
            if len(shards) > 1:
                self.problems.add("duplicate", f"is in {first_few(shards, 5)}", tensor=name)
            elif name not in self.weight_map:
                detail = f"is in {shards[0]} but not in {self.name}"
                self.problems.add("index", detail, tensor=name, severity="warning")

    def _check_named(self, homes: Mapping[str, list[str]], complete: set[str]) -> None:
        """Report tensors that are not in the shard which the index names."""
        for name, shard in self.weight_map.items():
            stored = homes.get(name, [])
            if shard in complete and shard not in stored:
                detail = f"should be in {shard} by {self.name}, but is not"
                if stored:
                    detail += f"; it is in {stored[0]}"
                self.problems.add("index", detail, tensor=name)

    def _report_leftover_shards(self, named: Sequence[str]) -> None:
        """Report shards of the same family that are not named: an earlier save left them."""
        families = {_family(shard) for shard in named}
        for name in self.layouts:
            family = _family(name)
            if family is not None and family in families and name not in named:
                detail = f"{name} is a shard that {self.name} does not name"
                self.problems.add("index", detail, severity="warning")

    def _check_total(self, size: int) -> None:
        total = self.metadata.get("total_size") if isinstance(self.metadata, dict) else None
        if isinstance(total, int | float) and total > size:
            # not :d, for JSON may hold Infinity
            detail = (
                f"{self.name} says {total:,} bytes of tensors, all shards together have {size:,}"
            )
            self.problems.add("index", detail, severity="warning")


def _read_index(
    path: Path, layouts: Mapping[str, FileLayout], problems: ProblemList
) -> _Index | None:
    """Read an index; None and a problem if it does not say which tensor is in which shard."""
    data = read_json(path, problems)
    if data is None:
        return None
    if isinstance(data, dict):
        found = data.get("weight_map")
        if isinstance(found, dict) and all(isinstance(shard, str) for shard in found.values()):
            return _Index(path.name, found, data.get("metadata"), layouts, problems)
    problems.add("malformed", f"{path.name} has no weight_map of names and shards")
    return None


def _family(shard: str) -> tuple[str, str] | None:
    """Return stem and suffix of a numbered shard, whatever the number of shards."""
    match = NUMBERED.match(shard)
    if match is None:
        return None
    return match["stem"], Path(shard).suffix


def _check_numbers(layouts: Mapping[str, FileLayout], problems: ProblemList) -> None:
    """Report gaps in `model-00002-of-00003` where there is no index."""
    families: dict[tuple[str, int], set[int]] = {}
    for name in layouts:
        match = NUMBERED.match(name)
        if match:
            family = (match["stem"], int(match["total"]))
            families.setdefault(family, set()).add(int(match["number"]))
    for (stem, total), numbers in families.items():
        # some writers count from 0
        first = min(numbers | {1})
        expected = range(first, first + min(total, MOST_SHARDS))
        missing = [str(number) for number in expected if number not in numbers]
        if missing:
            detail = f"of the {total} shards of {stem}, number {first_few(missing, 5)} is not there"
            problems.add("missing", detail)


def _check_trainer_state(data: Any, problems: ProblemList) -> int | None:
    if not isinstance(data, dict):
        return None
    history = data.get("log_history")
    if isinstance(history, list):
        _check_history(history, problems)
    step = data.get("global_step")
    return step if type(step) is int else None


def _check_history(history: list[Any], problems: ProblemList) -> None:
    """Report the first logged value that is not finite; once it is NaN it stays so."""
    for entry in history:
        if not isinstance(entry, dict):
            continue
        bad = [key for key in LOGGED if _is_nonfinite(entry.get(key))]
        if bad:
            detail = f"{TRAINER_STATE}: {first_few(bad, 5)} not finite at step {entry.get('step')}"
            problems.add("loss", detail, severity="warning")
            return


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _format_name(files: Sequence[Path], layouts: Sequence[FileLayout]) -> str:
    """Name the library and the format of its weights: `transformers (safetensors)`."""
    library = "transformers"
    if any(path.name.startswith("random_states") for path in files):
        library = "accelerate"
    weights = set()
    for layout in layouts:
        is_model = layout.tensors and pickle_machine.of_file(layout.path.name) is None
        if is_model and layout.path.suffix in (".safetensors", ".bin"):
            weights.add(layout.path.suffix.removeprefix("."))
    if not weights:
        return library
    return f"{library} ({', '.join(sorted(weights))})"


def _is_huggingface(files: list[Path]) -> bool:
    names = {path.name for path in files}
    if any(name.endswith(INDEX_SUFFIX) or NUMBERED.match(name) for name in names):
        return True
    return not names.isdisjoint(SIDE_FILES) and any(map(has_checkpoint_suffix, files))


def _is_deepspeed(files: list[Path]) -> bool:
    for path in files:
        if "_model_states" in path.name or path.name.startswith("zero_pp_rank_"):
            return True
    return False


DEEPSPEED = FolderFormat(name="DeepSpeed", matches=_is_deepspeed, check=check_deepspeed)
HUGGINGFACE = FolderFormat(name="transformers", matches=_is_huggingface, check=check_huggingface)


# --- Checkpoints of stepguard: every byte compared with the seal, every tensor with its own
# digest.


def check_sealed(
    found: CheckpointFiles, problems: ProblemList, progress: Progress
) -> CheckedFolder:
    """Check all files that the seal names; a file that it does not name is worth a warning."""
    folder = found.path
    try:
        seal = read_seal(folder)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return CheckedFolder([])
    if not seal.health.good:
        why = seal.health.why or "its run was in trouble"
        detail = f"is whole and finite, but not one to resume from: {why}"
        problems.add("diverged", detail)
    owners = _seal_of_each_file(folder, seal, problems)
    layouts = []
    for name in sorted(owners):
        path = folder / name
        if path.is_symlink():
            problems.add("link", f"{name} is a link where the seal has a file; it was not followed")
        elif not path.exists():
            problems.add("missing", f"the seal names {name}, which is not there")
        else:
            sealed = seal.files.get(name) or owners[name].files[name]
            layouts.append(_check_file(path, sealed, owners[name], progress))
    for path in sorted(folder.iterdir()):
        # a rank that has added its own to what another one wrote has a seal that proves itself
        added = not seal.ranks and path.match(RANK_SEALS)
        if path.name not in owners and path.name != SEAL and not added:
            problems.add("seal", f"{path.name} is not named by the seal", severity="warning")
            if path.is_file() and has_checkpoint_suffix(path):
                layouts.append(check_file(path, progress))
    return CheckedFolder(layouts, seal.step)


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


def _check_file(path: Path, sealed: SealedFile, seal: Seal, progress: Progress) -> FileLayout:
    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "sealed"
        layout.checksums.append(ChecksumRange(0, source.size, path.name, "xxh3_128", sealed.digest))
        if source.size != sealed.size:
            raise Damaged("torn", f"has {source.size:,} bytes, {sealed.size:,} were sealed")
        if path.suffix == SUFFIX:
            read_safetensors(source, layout, None)
            _compare(layout, seal)
        # a digest says that nobody changed a pickle, not that it is safe to load
        elif has_checkpoint_suffix(path):
            parse(source, layout, role)

    return check_file(path, progress, read=read, allowed=frozenset(seal.nonfinite))


def _compare(layout: FileLayout, seal: Seal) -> None:
    """Compare the header with the seal, and take the element types from the seal."""
    held = {tensor.name for tensor in layout.tensors}
    for name, sealed in seal.tensors.items():
        is_here = sealed.file == layout.path.name and sealed.same_as is None
        if is_here and name not in held:
            layout.problems.add("missing", "is sealed, but not in the file", tensor=name)
    for tensor in layout.tensors:
        known = seal.tensors.get(tensor.name)
        if known is None:
            layout.problems.add("seal", "is in the file, but not sealed", tensor=tensor.name)
            continue
        layout.checksums.append(
            ChecksumRange(
                tensor.start, tensor.size, tensor.name, "xxh3_128", known.digest, tensor.name
            )
        )
        # safetensors has no name for complex numbers and some 8-bit floats: the seal knows them
        if tensor.segment is not None and known.dtype in bounded_file.SIZES:
            tensor.segment.dtype = known.dtype
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


def _is_sealed(files: list[Path]) -> bool:
    names = {path.name for path in files}
    # a folder of torch.distributed.checkpoint may have a seal, too
    return SEAL in names and METADATA not in names


SEALED = FolderFormat(name="sealed", matches=_is_sealed, check=check_sealed, all_files=True)
