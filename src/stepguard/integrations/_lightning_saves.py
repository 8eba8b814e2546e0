"""Protect Lightning's checkpoints: no non-finite state is written, no last good one deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from stepguard._errors import SaveRefused
from stepguard.tensors.names import wrap

Place = str | Path
Look = Callable[[bool], tuple[str, ...]]
"""Names of non-finite stored tensors; True asks all ranks, which then all take part."""
AUTOMATIC = ("_save_topk_checkpoint", "_save_last_checkpoint")
"""Where ModelCheckpoint saves, books the file and drops older ones."""


class Gate:
    """Checks the state once for each save, at the first of several nested saving functions."""

    def __init__(self, look: Look, say: Callable[[str], None]) -> None:
        self._look = look
        self._say = say
        self._passed = False

    def refusal(self, what: str, *, together: bool) -> SaveRefused | None:
        """What is wrong with the state, said; None when it may be saved."""
        bad = () if self._passed else self._look(together)
        if not bad:
            return None
        refusal = SaveRefused(what, bad)
        self._say(str(refusal))
        return refusal

    @contextmanager
    def passed(self) -> Iterator[None]:
        before = self._passed
        self._passed = True
        try:
            yield
        finally:
            self._passed = before


class GuardedCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """The Trainer's IO that neither writes a non-finite state nor deletes the last good one."""

    def __init__(self, inner: CheckpointIO, gate: Gate) -> None:
        self.inner = inner
        self._gate = gate
        self._good: list[str] = []
        """Checkpoints written here that are still there, oldest first."""
        self._waiting: list[str] = []
        """Rotation asked for their removal, but nothing good would have been left."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Place, storage_options: Any | None = None
    ) -> None:
        # Only one rank writes, so the others cannot be asked here.
        if self._gate.refusal(str(path), together=False):
            return
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        saved = _name(path)
        if saved in self._good:
            self._good.remove(saved)
        self._good.append(saved)
        waiting = self._waiting
        self._waiting = []
        for name in waiting:
            if name != saved:
                self.remove_checkpoint(name)

    def load_checkpoint(self, path: Place, *args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = self.inner.load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Place) -> None:
        name = _name(path)
        if self._good == [name]:
            self._waiting.append(name)
            return
        if name in self._good:
            self._good.remove(name)
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()


def _name(place: Place) -> str:
    return str(Path(place).absolute())


def protect_checkpoints(undo: ExitStack, trainer: Trainer, gate: Gate) -> None:
    """Install the guarded IO; `trainer.save_checkpoint` raises, ModelCheckpoint skips."""
    strategy: Any = trainer.strategy
    before = strategy.checkpoint_io
    ours = GuardedCheckpointIO(before, gate)
    strategy.checkpoint_io = ours

    def put_back() -> None:
        if strategy.checkpoint_io is ours:
            strategy.checkpoint_io = before

    undo.callback(put_back)
    wrap(undo, trainer, "save_checkpoint", lambda original: _explicit(gate, trainer, original))
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            for name in AUTOMATIC:
                wrap(undo, callback, name, lambda original: _automatic(gate, original))


def _automatic(gate: Gate, original: Callable[..., None]) -> Callable[..., None]:
    """Skip the save as a whole: ModelCheckpoint would count a missing file and drop a good one."""

    def save(*args: Any, **kwargs: Any) -> None:
        if gate.refusal("a checkpoint", together=True) is None:
            with gate.passed():
                original(*args, **kwargs)

    return save


def _explicit(gate: Gate, trainer: Trainer, original: Callable[..., None]) -> Callable[..., None]:
    """Raise where a file was asked for by name, unless another exception is on its way already."""

    def save_checkpoint(filepath: Place, *args: Any, **kwargs: Any) -> None:
        refusal = gate.refusal(str(filepath), together=True)
        if refusal is not None and not trainer.interrupted:
            raise refusal
        if refusal is None:
            with gate.passed():
                original(filepath, *args, **kwargs)

    return save_checkpoint
