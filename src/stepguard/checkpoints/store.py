"""The store: checkpoints are complete, finite and sealed before anything points to them."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stepguard import __version__
from stepguard._errors import StoreError
from stepguard.checkpoints.entries import (
    LAST_GOOD,
    Entry,
    Known,
    PassedOver,
    checkpoint_name,
    leftovers,
    list_entries,
    pointer_bytes,
    read_pointer,
)
from stepguard.checkpoints.opening import Opened, open_last_good, open_one, read_facts
from stepguard.checkpoints.rank_files import gather_ranks, write_rank
from stepguard.checkpoints.retention import removable, remove, sweep
from stepguard.checkpoints.seal import (
    FACTS,
    PLAIN,
    SCHEMA,
    SEAL,
    Health,
    Seal,
    digest_of,
    first_line,
    read_seal,
    seal_bytes,
)
from stepguard.checkpoints.tensor_files import Select
from stepguard.checkpoints.writer_lock import WriterLock
from stepguard.checkpoints.writing import WrittenFiles, read_back, write_json, write_tensors
from stepguard.records.codec import dumps
from stepguard.state.atomic import DISK, Disk, sibling, write_file
from stepguard.tensors.sharding import TensorPart

MOST_KNOWN = 1000
"""Entries that are remembered, at most."""


class Store:
    """A folder of checkpoints `step-<n>/`, and `last-good`, which only names a sealed good one."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        check: Literal["read-back", "digest"] = "read-back",
        disk: Disk = DISK,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """With `check="read-back"` every file is read from the disk again before it is sealed."""
        if keep < 1:
            raise StoreError(f"keep={keep} would delete the last good checkpoint; use 1 or more.")
        if keep_every is not None and keep_every < 1:
            raise StoreError(
                f"keep_every={keep_every} is not a number of steps; use 1 or more, or None."
            )
        if check not in ("read-back", "digest"):
            raise StoreError(f"check={check!r} is not known; use 'read-back' or 'digest'.")
        self.folder = Path(folder)
        self.keep = keep
        self.keep_every = keep_every
        self.say = say or _warn
        self._check = check
        self._disk = disk
        self._lock: WriterLock | None = None
        self._known: Known = {}

    def save(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> Path:
        """Write, prove and seal one checkpoint; if it is good, move `last-good`; remove old ones.

        StoreError says why it was not written; then nothing of it is left, and everything that was
        there before still is.
        """
        try:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise StoreError(
                    f"step={step!r} is not a number of optimizer steps; use an int from 0 on."
                )
            self._disk.make_folders(self.folder)
            with self._locked().turn():
                return self._save(step, tensors, facts, health)
        except OSError as fault:
            raise StoreError(self._refusal(step, fault)) from fault

    def open(
        self,
        which: str | Path = LAST_GOOD,
        *,
        device: torch.device | str | None = None,
        select: Select | None = None,
        but_not: Sequence[PassedOver] = (),
    ) -> Opened:
        """Read a checkpoint, every byte proven against its seal.

        `"last-good"` falls back over damaged ones and says which (`Opened.passed_over`);
        `"step-100"` or a path means that checkpoint and no other. `select` takes the name and the
        whole shape of a tensor and returns the part of it to read; everything without it.
        `but_not`: those that `"last-good"` passes over in any case.
        """
        if str(which) == LAST_GOOD:
            return open_last_good(self.folder, device, select, but_not)
        path = self._path_of(Path(which))
        try:
            return open_one(path, device, select)
        except StoreError as fault:
            others = [entry.path.name for entry in self.list()[:5] if entry.path != path]
            usable = ", ".join(others) or "none"
            raise StoreError(
                f"{fault} Other sealed checkpoints in {self.folder}: {usable}."
            ) from None

    def list(self) -> list[Entry]:
        """Return the sealed checkpoints, newest first, by their seals alone."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        return list_entries(self.folder, self._known)[0]

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _locked(self) -> WriterLock:
        if self._lock is None or self._lock.lost:
            self._lock = WriterLock(self.folder, self._disk)
        return self._lock

    def _path_of(self, which: Path) -> Path:
        """Return the path of a name: `step-100` is the newest checkpoint of that step."""
        if len(which.parts) > 1:
            return which
        for entry in self.list():
            if checkpoint_name(entry.step) == which.name:
                return entry.path
        return self.folder / which

    # --- by several ranks: one begins and finishes, and every rank writes its part in between

    def begin(self, step: int) -> Path:
        """Make the temporary folder that every rank writes its part into."""
        try:
            self._disk.make_folders(self.folder)
            with self._locked().turn():
                sweep(leftovers(self.folder), self._disk, self.say)
                temporary = sibling(self._free_path(step))
                self._disk.mkdir(temporary)
                return temporary
        except OSError as fault:
            raise StoreError(self._refusal(step, fault)) from fault

    def write_part(
        self,
        folder: Path,
        rank: int,
        tensors: Mapping[str, Tensor],
        parts: Mapping[str, TensorPart],
        may_be_nonfinite: Collection[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> str:
        """Write and prove what one rank holds; returns the digest of its seal.

        Of tensors in `parts` this rank holds a part; `tensors` has those parts only. `facts`: for
        a rank that adds its own to a checkpoint that is sealed already.
        """
        try:
            return write_rank(
                folder,
                rank,
                tensors,
                parts,
                may_be_nonfinite,
                self._disk,
                reads_back=self._check == "read-back",
                facts=facts,
            )
        except OSError as fault:
            raise StoreError(
                f"rank {rank} could not write into {folder} ({fault.strerror or fault})."
            ) from fault

    def finish(
        self,
        folder: Path,
        step: int,
        facts: Mapping[str, Any],
        health: Health,
        digests: Sequence[str],
    ) -> Path:
        """Seal what all ranks have written, whose seals have these digests; then as `save`."""
        try:
            with self._locked().turn():
                written = gather_ranks(folder, digests)
                return self._conclude(self._free_path(step), folder, step, written, facts, health)
        except OSError as fault:
            raise StoreError(self._refusal(step, fault)) from fault

    def contents(self, path: Path) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the digests of a checkpoint's tensors, and its facts, without its tensors."""
        seal = read_seal(path)
        facts = read_facts(path / FACTS, seal.files[FACTS])
        return {name: sealed.digest for name, sealed in seal.tensors.items()}, facts

    def drop(self, folder: Path) -> None:
        """Remove the folder of a save that not every rank could finish."""
        if folder.exists():
            sweep([folder], self._disk, self.say)

    # --- what both have in common

    def _save(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> Path:
        # this process holds the lock, so their writers are dead
        sweep(leftovers(self.folder), self._disk, self.say)
        path = self._free_path(step)
        temporary = sibling(path)
        try:
            # facts that cannot be written are refused before anything is
            _json(dict(facts))
            self._disk.mkdir(temporary)
            allowed = frozenset(facts.get("nonfinite_ok") or ())
            written = write_tensors(temporary, tensors, allowed, self._disk)
            if self._check == "read-back":
                for name, sealed in written.files.items():
                    read_back(temporary / name, sealed)
        except BaseException:
            self.drop(temporary)
            raise
        return self._conclude(path, temporary, step, written, facts, health)

    def _conclude(
        self,
        path: Path,
        temporary: Path,
        step: int,
        written: WrittenFiles,
        facts: Mapping[str, Any],
        health: Health,
    ) -> Path:
        """Write facts and seal, give the folder its name, move `last-good`, remove old ones."""
        try:
            seal_digest = self._seal(temporary, step, written, facts, health)
            self._disk.rename(temporary, path)
        except BaseException:
            self.drop(temporary)
            raise
        self._publish(path, seal_digest, health)
        # the save is done; a folder that cannot be listed must not make it look failed
        with suppress(OSError):
            self._rotate(health.run)
        return path

    def _seal(
        self,
        folder: Path,
        step: int,
        written: WrittenFiles,
        facts: Mapping[str, Any],
        health: Health,
    ) -> str:
        """Write the facts and, last, the seal; returns its digest."""
        written.files[FACTS] = write_json(folder / FACTS, _json(dict(facts)), self._disk)
        if self._check == "read-back":
            read_back(folder / FACTS, written.files[FACTS])
        config = facts.get("config")
        seal = Seal(
            step=step,
            health=health,
            files=written.files,
            tensors=written.tensors,
            serial=1 + max((entry.serial for entry in self.list()), default=0),
            nonfinite=tuple(written.nonfinite),
            config=dict(config) if isinstance(config, Mapping) else {},
            versions={
                "stepguard": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=written.ranks,
            schema=SCHEMA if written.ranks else PLAIN,
        )
        content = seal_bytes(seal)
        write_json(folder / SEAL, content, self._disk)
        # fsync of a file does not make its name durable, that of its folder does
        self._disk.sync_folder(folder)
        return digest_of(content)

    def _publish(self, path: Path, seal_digest: str, health: Health) -> None:
        """Make the name durable, then move the pointer; a failure withdraws the checkpoint."""
        try:
            # before the pointer: after a power cut it must not name a folder that is not there
            self._disk.sync_folder(self.folder)
            if health.good:
                write_file(
                    self.folder / LAST_GOOD, pointer_bytes(path.name, seal_digest), self._disk
                )
        except BaseException as fault:
            # once the pointer names it, removing it would lose the last good checkpoint
            if self._last_good() != path:
                remove(self.folder, [path], self._disk, self.say)
                raise
            if not isinstance(fault, OSError):
                raise
            self.say(
                f"{path} is saved, but may not survive a power cut: the disk refused to sync "
                f"({fault.strerror})."
            )

    def _rotate(self, run: str) -> None:
        """Remove old checkpoints of this run; those of other runs in the folder stay."""
        own = [entry for entry in self.list() if entry.health.run == run]
        old = removable(own, self._last_good(), self.keep, self.keep_every)
        remove(self.folder, [entry.path for entry in old], self._disk, self.say)

    def _last_good(self) -> Path | None:
        try:
            return read_pointer(self.folder)
        except StoreError:
            return None

    def _free_path(self, step: int) -> Path:
        turn = 1
        while os.path.lexists(self.folder / checkpoint_name(step, turn)):
            turn += 1
        return self.folder / checkpoint_name(step, turn)

    def _refusal(self, step: int, fault: OSError) -> str:
        rest = "there is no good checkpoint yet"
        last = self._last_good()
        if last is not None:
            rest = f"the last good checkpoint is still {last.name}"
        why = str(fault.strerror or fault)
        if fault.filename:
            why = f"{fault.strerror}: {fault.filename}"
        return f"the checkpoint of step {step} was not written into {self.folder} ({why}); {rest}."


def _json(facts: dict[str, Any]) -> bytes:
    try:
        return dumps(facts).encode()
    except (TypeError, ValueError, RecursionError) as fault:
        raise StoreError(
            f"the facts of a checkpoint must be plain JSON values: {first_line(fault)}."
        ) from None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
