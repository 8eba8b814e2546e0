"""Protect a Trainer's checkpoints: no bad state is written, no last good one deleted."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers.trainer
from transformers.trainer_utils import sort_checkpoints

from stepguard._errors import SaveRefused
from stepguard.integrations._parts import to_delete
from stepguard.tensors.names import swapped, wrap

Look = Callable[[bool], tuple[str, ...]]
"""Names of non-finite stored tensors; True asks all ranks, which then all take part."""


class TrainerSaves:
    """Wraps the saving methods of one Trainer."""

    def __init__(
        self, trainer: Any, look: Look, hurt: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._look = look
        self._hurt = hurt
        self._say = say
        self._inside = False
        self.refused = 0
        self._fresh: Path | None = None
        """The newest checkpoint, if the run was healthy when it was written; not proven yet."""
        self._proven: Path | None = None
        """The newest one that healthy steps have followed, or that was resumed from."""

    def last_good(self) -> Path | None:
        """The newest checkpoint that nothing has spoken against."""
        if self._hurt():
            self._fresh = None
        return self._fresh or self._proven

    def resumed_from(self, checkpoint: Path | None) -> None:
        self._fresh = None
        self._proven = checkpoint

    def wrap(self, undo: ExitStack) -> None:
        wrap(undo, self._trainer, "_save_checkpoint", self._checkpoint)
        wrap(undo, self._trainer, "save_model", self._model)

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            where = f"checkpoint-{self._trainer.state.global_step}"
            bad = self._look(True)
            if bad:
                self.refused += 1
                self._say(str(SaveRefused(where, bad)))
                return None
            self._inside = True
            try:
                with swapped(transformers.trainer, "rotate_checkpoints", self._rotate):
                    return original(*args, **kwargs)
            finally:
                self._inside = False

        return save_checkpoint

    def _model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save_model(*args: Any, **kwargs: Any) -> Any:
            bad = () if self._inside else self._look(False)
            if bad:
                self.refused += 1
                raise SaveRefused("the model", bad)
            return original(*args, **kwargs)

        return save_model

    def _rotate(
        self,
        output_dir: str,
        save_total_limit: int | None = None,
        best_model_checkpoint: str | None = None,
        use_mtime: bool = False,
    ) -> None:
        """Replaces transformers' own, which keeps the best checkpoint but not the last good one."""
        checkpoints = sort_checkpoints(output_dir, use_mtime=use_mtime)
        self._judge(Path(output_dir, f"checkpoint-{self._trainer.state.global_step}"))
        if save_total_limit is None or save_total_limit <= 0:
            return
        protected = set()
        if self._proven is not None:
            protected.add(self._proven)
        if best_model_checkpoint is not None:
            protected.add(Path(best_model_checkpoint))
        for checkpoint in to_delete(checkpoints, save_total_limit, protected):
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _judge(self, newest: Path) -> None:
        """Healthy steps since the last checkpoint prove that one; the newest waits for its own."""
        if self._hurt():
            self._fresh = None
            return
        if self._fresh is not None:
            self._proven = self._fresh
        self._fresh = newest
