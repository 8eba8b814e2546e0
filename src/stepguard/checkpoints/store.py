"""The store: checkpoints that are whole, finite and sealed before anything points to them."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stepguard import __version__
from stepguard._errors import StoreError
from stepguard.checkpoints.claim import Claim
from stepguard.checkpoints.entries import (
    LAST_GOOD,
    Entry,
    Known,
    checkpoint_name,
    litter,
    look,
    pointed,
    pointer_bytes,
)
from stepguard.checkpoints.opening import Opened, open_last_good, open_one
from stepguard.checkpoints.retention import remove, superfluous, sweep
from stepguard.checkpoints.seal import FACTS, SEAL, Health, Seal, digest_of, first_line, seal_bytes
from stepguard.checkpoints.writing import read_back, write_json, write_tensors
from stepguard.records.codec import dumps
from stepguard.state.atomic import DISK, Disk, sibling, write_file

KNOWN = 1000
"""Entries that are remembered, at most."""


class Store:
    """A folder of checkpoints, `step-<n>/` each, and `last-good`, which only ever names a sealed
    good one.
    """

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
        """`check="read-back"` reads every file again from the disk before it is sealed; `"digest"`
        trusts the disk.
        """
        if keep < 1:
            raise StoreError(f"keep={keep} would delete the last good checkpoint; use 1 or more.")
        if keep_every is not None and keep_every < 1:
            raise StoreError(
                f"keep_every={keep_every} is no number of steps; use 1 or more, or None."
            )
        if check not in ("read-back", "digest"):
            raise StoreError(f"check={check!r} is not known; use 'read-back' or 'digest'.")
        self.folder = Path(folder)
        self.keep, self.keep_every = keep, keep_every
        self.say = say or _warn
        self._check, self._disk = check, disk
        self._claim: Claim | None = None
        self._known: Known = {}

    def save(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> Path:
        """Write, prove and seal one checkpoint, then move `last-good` if it is good, then let old
        ones go.

        StoreError says why it was not written; then nothing of it is left, and what was there
        before still is.
        """
        try:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise StoreError(
                    f"step={step!r} is no number of optimizer steps done; use an int from 0 on."
                )
            self._disk.make_folders(self.folder)
            with self._claimed().turn():
                return self._save(step, tensors, facts, health)
        except OSError as fault:
            raise StoreError(self._refusal(step, fault)) from fault

    def open(
        self, which: str | Path = LAST_GOOD, *, device: torch.device | str | None = None
    ) -> Opened:
        """Read a checkpoint, every byte proven against its seal.

        `"last-good"` falls back over damaged ones and says which (`Opened.passed_over`);
        `"step-100"` or a path means that checkpoint and no other.
        """
        if str(which) == LAST_GOOD:
            return open_last_good(self.folder, device)
        path = Path(which)
        if len(path.parts) == 1:
            path = next(
                (entry.path for entry in self.list() if checkpoint_name(entry.step) == path.name),
                self.folder / path,
            )
        try:
            return open_one(path, device)
        except StoreError as fault:
            usable = (
                ", ".join(entry.path.name for entry in self.list()[:5] if entry.path != path)
                or "none"
            )
            raise StoreError(
                f"{fault} Other sealed checkpoints in {self.folder}: {usable}."
            ) from None

    def list(self) -> list[Entry]:
        """The sealed checkpoints, newest first, by their seals alone."""
        if len(self._known) > KNOWN:
            self._known.clear()
        return look(self.folder, self._known)[0]

    def close(self) -> None:
        """Let another process write here."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _claimed(self) -> Claim:
        if self._claim is None or self._claim.lost:
            self._claim = Claim(self.folder, self._disk)
        return self._claim

    def _save(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> Path:
        sweep(litter(self.folder), self._disk, self.say)
        entries = self.list()
        path = self._free_path(step)
        temporary = sibling(path)
        serial = 1 + max((entry.serial for entry in entries), default=0)
        try:
            self._disk.mkdir(temporary)
            seal_digest = self._fill(temporary, step, tensors, facts, health, serial)
            self._disk.rename(temporary, path)
        except BaseException:
            sweep([temporary] if temporary.exists() else [], self._disk, self.say)
            raise
        self._publish(path, seal_digest, health)
        with suppress(OSError):
            self._rotate(health.run)
        return path

    def _fill(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        health: Health,
        serial: int,
    ) -> str:
        """Everything of a checkpoint, durable, the seal last; returns the digest of the seal."""
        facts_content = _json(dict(facts))
        written = write_tensors(
            folder, tensors, frozenset(facts.get("nonfinite_ok") or ()), self._disk
        )
        written.files[FACTS] = write_json(folder / FACTS, facts_content, self._disk)
        if self._check == "read-back":
            for name, sealed in written.files.items():
                read_back(folder / name, sealed)
        seal = Seal(
            step=step,
            health=health,
            files=written.files,
            tensors=written.tensors,
            serial=serial,
            nonfinite=tuple(written.nonfinite),
            config=dict(config) if isinstance(config := facts.get("config"), Mapping) else {},
            versions={
                "stepguard": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        content = seal_bytes(seal)
        write_json(folder / SEAL, content, self._disk)
        self._disk.sync_folder(folder)
        return digest_of(content)

    def _publish(self, path: Path, seal_digest: str, health: Health) -> None:
        """Make the name durable, then the pointer; if that fails, the checkpoint is withdrawn,
        unless it is named.
        """
        try:
            self._disk.sync_folder(self.folder)
            if health.good:
                write_file(
                    self.folder / LAST_GOOD, pointer_bytes(path.name, seal_digest), self._disk
                )
        except BaseException as fault:
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
        """Of this run's own checkpoints; what another run left in the folder is not ours to remove."""
        own = [entry for entry in self.list() if entry.health.run == run]
        going = superfluous(own, self._last_good(), self.keep, self.keep_every)
        remove(self.folder, [entry.path for entry in going], self._disk, self.say)

    def _last_good(self) -> Path | None:
        try:
            return pointed(self.folder)
        except StoreError:
            return None

    def _free_path(self, step: int) -> Path:
        turn = 1
        while os.path.lexists(self.folder / checkpoint_name(step, turn)):
            turn += 1
        return self.folder / checkpoint_name(step, turn)

    def _refusal(self, step: int, fault: OSError) -> str:
        last = self._last_good()
        rest = (
            f"the last good checkpoint is still {last.name}"
            if last
            else "there is no good checkpoint yet"
        )
        why = (
            f"{fault.strerror}: {fault.filename}"
            if fault.filename
            else str(fault.strerror or fault)
        )
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
