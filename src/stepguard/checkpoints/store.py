"""The store: checkpoints are complete, finite and sealed before anything points to them."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard import __version__
from stepguard._errors import StoreError
from stepguard.checkpoints.files import (
    Select,
    read_back,
    read_tensors,
    write_json,
    write_tensors,
)
from stepguard.checkpoints.seal import (
    FACTS,
    LAST_GOOD,
    SEAL,
    Entry,
    Health,
    PassedOver,
    Seal,
    SealedFile,
    SealedPart,
    checkpoint_name,
    digest_of,
    first_line,
    leftovers,
    list_entries,
    load_json,
    parse_seal,
    rank_seal_name,
    read_added_seals,
    read_pointer,
    read_rank_seals,
    read_seal,
    read_small,
    removable,
    remove,
    seal_bytes,
    sweep,
)
from stepguard.records.codec import dumps, restore_floats
from stepguard.state.files import DISK, Disk, sibling, write_file
from stepguard.tensors.names import TensorPart

# --- Open checkpoints: every byte is proven against the seal; damaged ones are passed over by
# name.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint, proven and in memory."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    health: Health
    passed_over: tuple[PassedOver, ...] = ()
    """Checkpoints that would have been used if they were not damaged."""


def open_last_good(
    folder: Path, select: Select | None = None, but_not: Sequence[PassedOver] = ()
) -> Opened:
    """Open last-good, else the newest good one that is undamaged; StoreError names them all."""
    passed = {each.path: each for each in but_not}
    while (path := _next_candidate(folder, passed)) is not None:
        try:
            return replace(open_one(path, select), passed_over=tuple(passed.values()))
        except StoreError as fault:
            reason = str(fault)
            # by the rotation of a writer that is running
            if not path.is_dir():
                reason = f"{path} was removed while it was being opened."
            passed[path] = PassedOver(path, reason)
    for damaged in list_entries(folder)[1]:
        passed.setdefault(damaged.path, damaged)
    if not folder.is_dir():
        raise StoreError(f"{folder} does not exist; there is no checkpoint to open.")
    if all(path.name == LAST_GOOD and not path.exists() for path in passed):
        raise StoreError(f"{folder} holds no sealed good checkpoint; there is nothing to open.")
    reasons = "\n".join(f"  {path.name}: {each.reason}" for path, each in passed.items())
    raise StoreError(
        f"{folder} holds no good checkpoint that can be used; `stepguard verify` shows the "
        f"details.\n{reasons}"
    )


def open_one(path: Path, select: Select | None = None) -> Opened:
    """Open this checkpoint and no other. `select` says which part of each tensor is wanted."""
    seal = read_seal(path)
    if FACTS not in seal.files:
        raise StoreError(f"{path} has a seal without {FACTS}.")
    try:
        facts = read_facts(path / FACTS, seal.files[FACTS])
        tensors = read_tensors(path, read_rank_seals(path, seal), select)
        for rank, added in read_added_seals(path, seal).items():
            for kind, own in restore_floats(added.facts).items():
                facts.setdefault(kind, {})[str(rank)] = own
    except OSError as fault:
        raise StoreError(f"{path} cannot be read: {fault.strerror}.") from None
    return Opened(path=path, step=seal.step, tensors=tensors, facts=facts, health=seal.health)


def _next_candidate(folder: Path, passed: dict[Path, PassedOver]) -> Path | None:
    """Return what `last-good` names, else the newest good checkpoint that was not passed over."""
    # the folder is listed again for every candidate: a writer may have changed it meanwhile
    candidates: list[Path] = []
    try:
        candidates.append(read_pointer(folder))
    except StoreError as fault:
        passed.setdefault(folder / LAST_GOOD, PassedOver(folder / LAST_GOOD, str(fault)))
    entries, damaged = list_entries(folder)
    candidates += [entry.path for entry in entries if entry.good]
    for path in candidates:
        if path not in passed:
            if passed:
                for each in damaged:
                    passed.setdefault(each.path, each)
            return path
    return None


def read_facts(path: Path, sealed: SealedFile) -> dict[str, Any]:
    """Read the facts of a checkpoint, proven unaltered."""
    content = read_small(path)
    if len(content) != sealed.size or digest_of(content) != sealed.digest:
        raise StoreError(f"{path} is not what was sealed: its digest differs.")
    try:
        facts: dict[str, Any] = restore_floats(load_json(content, path))
    except RecursionError:
        raise StoreError(f"{path} is nested too deeply to be read.") from None
    return facts


# --- One writer per folder: another process gets an error, another thread waits its turn.


LOCK = ".writer.lock"
_NO_LOCKS_HERE = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""Some network filesystems have no locks; there, keeping to one writer is up to the user."""


@dataclass(slots=True)
class _LockedFolder:
    """A folder that this process writes to."""

    descriptor: int
    owners: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None


_LOCKED: dict[Path, _LockedFolder] = {}
# reentrant: the garbage collector can release one lock while this thread is taking another
_TABLE = threading.RLock()


class WriterLock:
    """A store's right to write into its folder, from its first save until it is released."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._pid = 0
        self._folder = folder.resolve()
        with _TABLE:
            if self._folder not in _LOCKED:
                _LOCKED[self._folder] = _LockedFolder(_lock(self._folder, disk))
            _LOCKED[self._folder].owners += 1
        self._pid = os.getpid()

    @property
    def lost(self) -> bool:
        """Was it released, or is this a fork? Locks belong to the process that took them."""
        return self._pid != os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Allow one save at a time; a thread waits for another, but not for itself."""
        locked = _LOCKED[self._folder]
        if locked.thread == threading.get_ident():
            raise StoreError(
                f"{self._folder} is being written by this very thread: a save cannot start inside "
                f"a save."
            )
        with locked.turn:
            locked.thread = threading.get_ident()
            try:
                yield
            finally:
                locked.thread = None

    def release(self) -> None:
        """Let another process write; a second call does nothing."""
        if self.lost:
            return
        self._pid = 0
        with _TABLE:
            locked = _LOCKED[self._folder]
            locked.owners -= 1
            if not locked.owners:
                os.close(locked.descriptor)
                del _LOCKED[self._folder]

    def __del__(self) -> None:
        self.release()


def _lock(folder: Path, disk: Disk) -> int:
    """Lock a folder for this process; returns the descriptor that holds the lock."""
    path = folder / LOCK
    with suppress(FileExistsError), disk.new_file(path):
        pass
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in _NO_LOCKS_HERE:
            return descriptor
        os.close(descriptor)
        if fault.errno not in {errno.EACCES, errno.EAGAIN}:
            raise
        raise StoreError(
            f"another process writes checkpoints into {folder}; end it, or give each run "
            "its own folder."
        ) from None
    return descriptor


def _forget_locks() -> None:
    """Empty the table in a forked child, which has none of the locks."""
    global _TABLE
    # another thread of the parent may have held it at the moment of the fork
    _TABLE = threading.RLock()
    for locked in _LOCKED.values():
        os.close(locked.descriptor)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_forget_locks)


# --- The store: checkpoints are complete, finite and sealed before anything points to them.


class Store:
    """A folder of checkpoints `step-<n>/`, and `last-good`, which only names a sealed good one."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        disk: Disk = DISK,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise StoreError(f"keep={keep} would delete the last good checkpoint; use 1 or more.")
        if keep_every is not None and keep_every < 1:
            raise StoreError(
                f"keep_every={keep_every} is not a number of steps; use 1 or more, or None."
            )
        self.folder = Path(folder)
        self.keep = keep
        self.keep_every = keep_every
        self.say = say or _warn
        self._disk = disk
        self._lock: WriterLock | None = None

    def save(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> Path:
        """Write, prove and seal one checkpoint; if it is good, move `last-good`; remove old ones.

        StoreError says why it was not written; then nothing of it is left, and everything that was
        there before still is.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StoreError(
                f"step={step!r} is not a number of optimizer steps; use an integer of at least 0."
            )
        # facts that cannot be written are refused before anything is
        _json(facts)
        with self._writing(step):
            folder = self._new_folder(step)
            try:
                allowed = frozenset(facts.get("nonfinite_ok") or ())
                written = write_tensors(folder, tensors, allowed, self._disk)
            except BaseException:
                self.drop(folder)
                raise
            return self._conclude(folder, step, written, facts, health)

    def open(
        self,
        which: str | Path = LAST_GOOD,
        *,
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
            return open_last_good(self.folder, select, but_not)
        path = Path(which)
        entries = self.list()
        if len(path.parts) == 1:
            # the newest checkpoint of that step
            of_step = [e.path for e in entries if checkpoint_name(e.step) == path.name]
            path = next(iter(of_step), self.folder / path)
        try:
            return open_one(path, select)
        except StoreError as fault:
            others = [entry.path.name for entry in entries[:5] if entry.path != path]
            usable = ", ".join(others) or "none"
            raise StoreError(
                f"{fault} Other sealed checkpoints in {self.folder}: {usable}."
            ) from None

    def list(self) -> list[Entry]:
        """Return the sealed checkpoints, newest first, by their seals alone."""
        return list_entries(self.folder)[0]

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- by several ranks: one begins and finishes, and every rank writes its part in between

    def begin(self, step: int) -> Path:
        """Make the temporary folder that every rank writes its part into."""
        with self._writing(step):
            return self._new_folder(step)

    def write_part(
        self,
        folder: Path,
        rank: int,
        tensors: Mapping[str, Tensor],
        parts: Mapping[str, TensorPart],
        may_be_nonfinite: Collection[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> str:
        """Write and prove what one rank holds, with a seal of its own; returns that seal's digest.

        Of tensors in `parts` this rank holds a part; one that another rank writes, and one without
        an element, is left out. `facts`: for a rank that adds its own to a checkpoint that is
        sealed already.
        """
        mine: dict[str, Tensor] = {}
        places: dict[str, SealedPart] = {}
        for name, tensor in tensors.items():
            part = parts.get(name)
            if part is not None:
                if not part.first or not part.elements:
                    continue
                places[name] = SealedPart(whole=part.whole, offset=part.offset)
            mine[name] = tensor
        try:
            written = write_tensors(folder, mine, may_be_nonfinite, self._disk, f"rank-{rank:05d}")
            content = seal_bytes(replace(written, parts=places, facts=dict(facts or {})))
            # all of it or nothing: somebody may be opening the checkpoint already
            write_file(folder / rank_seal_name(rank), content, self._disk)
        except OSError as fault:
            raise StoreError(
                f"rank {rank} could not write into {folder} ({fault.strerror or fault})."
            ) from fault
        return digest_of(content)

    def finish(
        self,
        folder: Path,
        step: int,
        facts: Mapping[str, Any],
        health: Health,
        digests: Sequence[str],
    ) -> Path:
        """Seal what all ranks have written, whose seals have these digests; then as `save`."""
        files: dict[str, SealedFile] = {}
        for rank, digest in enumerate(digests):
            name = rank_seal_name(rank)
            content = read_small(folder / name)
            if digest_of(content) != digest:
                raise StoreError(f"{folder / name} is not what rank {rank} has written.")
            files[name] = SealedFile(size=len(content), digest=digest)
            files.update(parse_seal(content, folder, name).files)
        written = Seal(
            step=step, health=health, files=files, tensors={}, serial=0, ranks=len(digests)
        )
        with self._writing(step):
            return self._conclude(folder, step, written, facts, health)

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

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Hold the folder for one save; what the disk refuses is one clear StoreError."""
        try:
            self._disk.make_folders(self.folder)
            if self._lock is None or self._lock.lost:
                self._lock = WriterLock(self.folder, self._disk)
            with self._lock.turn():
                yield
        except OSError as fault:
            rest = "there is no good checkpoint yet"
            last = self._last_good()
            if last is not None:
                rest = f"the last good checkpoint is still {last.name}"
            why = str(fault.strerror or fault)
            if fault.filename:
                why = f"{fault.strerror}: {fault.filename}"
            raise StoreError(
                f"the checkpoint of step {step} was not written into {self.folder} ({why}); {rest}."
            ) from fault

    def _new_folder(self, step: int) -> Path:
        # this process holds the lock, so the writers of what is left over are dead
        sweep(leftovers(self.folder), self._disk, self.say)
        temporary = sibling(self._free_path(step))
        self._disk.mkdir(temporary)
        return temporary

    def _conclude(
        self, temporary: Path, step: int, written: Seal, facts: Mapping[str, Any], health: Health
    ) -> Path:
        """Write facts and seal, give the folder its name, move `last-good`, remove old ones."""
        path = self._free_path(step)
        try:
            sealed_facts = write_json(temporary / FACTS, _json(facts), self._disk)
            read_back(temporary / FACTS, sealed_facts)
            config = facts.get("config")
            seal = replace(
                written,
                step=step,
                health=health,
                files={**written.files, FACTS: sealed_facts},
                serial=1 + max((entry.serial for entry in self.list()), default=0),
                config=dict(config) if isinstance(config, Mapping) else {},
                versions={
                    "stepguard": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                written=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            content = seal_bytes(seal)
            write_json(temporary / SEAL, content, self._disk)
            # fsync of a file does not make its name durable, that of its folder does
            self._disk.sync_folder(temporary)
            self._disk.rename(temporary, path)
        except BaseException:
            self.drop(temporary)
            raise
        try:
            # before the pointer: after a power cut it must not name a folder that is not there
            self._disk.sync_folder(self.folder)
            if health.good:
                pointer = f"{path.name} {digest_of(content)}\n".encode()
                write_file(self.folder / LAST_GOOD, pointer, self._disk)
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
        # the save is done; a folder that cannot be listed must not make it look failed
        with suppress(OSError):
            # checkpoints of other runs in the folder stay
            own = [entry for entry in self.list() if entry.health.run == health.run]
            old = removable(own, self._last_good(), self.keep, self.keep_every)
            remove(self.folder, [entry.path for entry in old], self._disk, self.say)
        return path

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


def _json(facts: Mapping[str, Any]) -> bytes:
    try:
        return dumps(dict(facts)).encode()
    except (TypeError, ValueError, RecursionError) as fault:
        raise StoreError(
            f"the facts of a checkpoint must be plain JSON values: {first_line(fault)}."
        ) from None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


# --- Save while training continues: one writer thread, one save at a time, faults only reported.


NICENESS = 5
"""The writer gets a quarter of a core that training wants too; with less it starves."""


class Background:
    """Runs each save in a thread of its own, for which an interpreter that ends waits."""

    def __init__(
        self,
        store: Store,
        say: Callable[[str], None],
        sealed: Callable[[int, Path, Health], None] | None = None,
    ) -> None:
        self._store = store
        self._say = say
        self._sealed = sealed
        store.say = say
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        self._refused = 0

    def offer(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> bool:
        """Start a save; False if the one before is still being written, for nothing is queued.

        The tensors are not copied; they must not be written to until `idle()`.
        """
        tensors = dict(tensors)
        facts = dict(facts)

        def save() -> Path:
            path = self._store.save(step, tensors, facts, health)
            if self._sealed is not None:
                self._sealed(step, path, health)
            return path

        return self.offer_job(step, save)

    def offer_job(self, step: int, job: Callable[[], Path | None]) -> bool:
        """Start a save of any kind, which returns the path of what it wrote; False as `offer`."""
        if not self.idle():
            self._refused += 1
            return False
        self._saved = None
        self._thread = threading.Thread(
            target=self._save, args=(step, job), name=f"stepguard-save-{step}"
        )
        self._thread.start()
        return True

    def left_out(self) -> None:
        """Count a save that could not begin because one is still being written."""
        self._refused += 1

    def idle(self) -> bool:
        """Is nothing being written?"""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait for the running save; returns the path of the last one, None if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._saved

    def close(self) -> None:
        """Finish the running save."""
        self.wait()

    def _save(self, step: int, job: Callable[[], Path | None]) -> None:
        with suppress(OSError, AttributeError):
            # only on Linux has a thread a priority of its own; elsewhere training would slow down
            if os.uname().sysname == "Linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._saved = job()
        except Exception as fault:
            self._say(f"checkpoint of step {step} NOT saved, training continues: {fault}")
        if self._refused:
            later = "1 later save was"
            if self._refused > 1:
                later = f"{self._refused} later saves were"
            self._say(f"saving step {step} took so long that {later} dropped.")
            self._refused = 0
