"""What goes along with a Trainer: its log lines as the report shows them, the true losses, and a
clean Ctrl+C.
"""

from __future__ import annotations

import functools
import math
import signal
import threading
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

DIGITS = {"loss": 4, "grad_norm": 4, "epoch": 2}


class Progress(ProgressCallback):  # type: ignore[misc]
    """The bar, and `{'loss': 2.27, 'grad_norm': 1.55, 'learning_rate': 0.0002, 'epoch': 0.0}` above
    it.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.write(line_of(logs))


def line_of(logs: dict[str, Any]) -> str:
    """Numbers as numbers, not as text in quotes."""
    return str({key: _rounded(key, value) for key, value in logs.items() if key != "total_flos"})


def _rounded(key: str, value: Any) -> Any:
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value, DIGITS[key]) if key in DIGITS else float(f"{value:.3g}")


def printed_by(trainer: Trainer, *, bar: bool) -> None:
    """Our progress bar in the place of the Trainer's, or nothing at all."""
    for own in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(own)
    if bar:
        trainer.add_callback(Progress())


class History(TrainerCallback):  # type: ignore[misc]
    """Seen with the recipe's own eyes, so that no guard is its own judge."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        """The true loss of every step, not the filtered one."""
        self.lines: list[dict[str, Any]] = []
        self.first_bad: int | None = None
        self._trainer: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Once it is guarded: a step that a guard replays must not be counted again."""
        self._trainer, original = trainer, trainer.training_step
        # before a guard comes and takes a bad update back
        trainer.create_optimizer().register_step_post_hook(self._updated)
        trainer.add_callback(self)

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = original(*args, **kwargs)
            self.losses.append(float(loss) * trainer.args.gradient_accumulation_steps)
            self._bad(math.isfinite(self.losses[-1]))
            return loss

        trainer.training_step = training_step

    def _updated(self, optimizer: Any, *_: Any) -> None:
        self._bad(
            all(
                bool(torch.isfinite(p).all())
                for group in optimizer.param_groups
                for p in group["params"]
            )
        )

    def _bad(self, finite: bool) -> None:
        if not finite and self.first_bad is None:
            self.first_bad = self._trainer.state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.lines.append(dict(logs))


class StopAtStepEnd(TrainerCallback):  # type: ignore[misc]
    """Ctrl+C lets the step end, saves the state if it is finite, and ends training; a second one
    ends it at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.bad: str | None = None
        """The first tensor because of which nothing was saved."""
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._heard)

    def _heard(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if self.asked:
            self.bad = first_bad_tensor(model)
            control.should_training_stop = True
            control.should_save = self.bad is None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.release()

    def release(self) -> None:
        """Give the signal back; a second time does nothing."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def first_bad_tensor(model: nn.Module) -> str | None:
    """Name of a parameter or buffer that is not finite."""
    return next(
        (
            name
            for name, value in model.state_dict().items()
            if not bool(torch.isfinite(value).all())
        ),
        None,
    )
