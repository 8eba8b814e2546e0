"""Folders of transformers, accelerate and DeepSpeed: shards, their index, a trainer's state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard.report.phrases import first_few
from stepguard.verification import limits, roles
from stepguard.verification.bounded_file import open_file
from stepguard.verification.damage import Damaged, ProblemList
from stepguard.verification.file_check import check_file
from stepguard.verification.file_formats import has_checkpoint_suffix
from stepguard.verification.file_layout import FileLayout
from stepguard.verification.format_entry import (
    CheckedFolder,
    CheckpointFiles,
    FolderFormat,
    Progress,
)
from stepguard.verification.safetensors_format import parse_json

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
            if source.size > limits.LARGEST_JSON:
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
        is_model = layout.tensors and roles.of_file(layout.path.name) is None
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
