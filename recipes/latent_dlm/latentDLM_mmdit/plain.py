"""A loop without a guard. It keeps the same records, so that runs can be compared, and saves as the
original does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from latentDLM_mmdit.loop import Done, Loop
from latentDLM_mmdit.pairs import Batch
from latentDLM_mmdit.session import Session
from stepguard import __version__
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.sinks import HumanLog

CHECKPOINT = Path("latest") / "checkpoint.pt"


class PlainLoop(Loop):
    """Counts steps itself; what it does with a bad one is up to `one_step`."""

    def __init__(self, session: Session, folder: Path | None) -> None:
        super().__init__(session, folder)
        self._steps, self._since = 0, time.perf_counter()
        self._journal: Journal | None = None
        self._log: HumanLog | None = None
        if folder is not None and session.ranks.first:
            self._journal = Journal(folder)
            self._journal.write("run", _header(session, self.clip_norm))
            log_dir = session.config.logging.log_dir
            self._log = HumanLog(log_dir) if log_dir is not None else None

    @property
    def step(self) -> int:
        return self._steps

    @property
    def clip_norm(self) -> float:
        """null and 0 clip at a million, as the original has it."""
        return float(self.session.config.optimizer.grad_clip_norm or 1e6)

    def backward(self, micro: list[Batch]) -> tuple[float, dict[str, float]]:
        """Loss and its parts, with their gradients added up, times the loss scale, which nobody
        takes out again.
        """
        total, parts = 0.0, dict[str, float]()
        for batch in micro:
            losses = self.session.loss(batch)
            (sum_of(losses) * self.session.config.loss.loss_scale).backward()
            total += float(sum_of(losses).detach())
            for name, value in losses.items():
                parts[name] = parts.get(name, 0.0) + float(value.detach())
        return total, parts

    def clip(self) -> float:
        return float(
            torch.nn.utils.clip_grad_norm_(self.session.trainer.parameters(), self.clip_norm)
        )

    def counted(self, done: Done) -> Done:
        """The step is over: counters, schedule, records, and a checkpoint where one is due."""
        now = time.perf_counter()
        reading = Reading(
            step=self._steps,
            loss=done.loss,
            components=done.parts,
            grad_norm=done.norm,
            clip_factor=done.clip_factor,
            lr=(self.session.rate,),
            seconds=now - self._since,
        )
        self._since = now
        if self._journal is not None:
            self._journal.step(reading, committed=done.committed)
        if self._log is not None:
            self._log.step(reading, committed=done.committed)
        self._steps += 1
        self.session.set_rate(self._steps)
        if self.folder is not None and self._steps % self.session.config.logging.save_freq == 0:
            self.say(self.save())
        return done

    def warn(self, text: str) -> None:
        """To the terminal and the readable log."""
        self.say(text)
        if self._log is not None:
            self._log.line(text)

    def save(self) -> str:
        """Whatever there is, finite or not: nobody looks."""
        if self.folder is None:
            return "nothing is saved"
        random = _everybody(torch.get_rng_state(), self.session.ranks.world)
        if self.session.ranks.first:
            write_checkpoint(self.folder / CHECKPOINT, self.session, self._steps, random)
        return f"saved {self.folder / CHECKPOINT}"

    def resume(self, which: str) -> str:
        path = (self.folder or Path()) / CHECKPOINT if which == "latest" else Path(which)
        self._steps = load_checkpoint(path, self.session)
        return f"going on from {path} at step {self._steps}, learning rate {self.session.rate:.2e}"

    def close(self) -> None:
        super().close()
        if self._journal is not None:
            self._journal.write("end", {"steps": self._steps, "incidents": 0, "armed": False})
            self._journal.close()
            self._journal = None
        if self._log is not None:
            self._log.close()
            self._log = None


def sum_of(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def write_checkpoint(path: Path, session: Session, step: int, random: list[Tensor]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": session.trainer.state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "state": {"step": step, "position": session.batches.position},
        "random": random,
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(path: Path, session: Session) -> int:
    """The steps done. The learning rate is that of the configuration: the original sets it by hand
    at every step.
    """
    if not path.is_file():
        raise SystemExit(
            f"training.resume: {path} does not exist; remove training.resume to start from scratch."
        )
    state = torch.load(path, weights_only=True)
    session.trainer.load_state_dict(state["model"])
    session.optimizer.load_state_dict(state["optimizer"])
    step = int(state["state"]["step"])
    session.batches.position = int(state["state"]["position"])
    if len(state["random"]) > session.ranks.rank:
        torch.set_rng_state(state["random"][session.ranks.rank])
    session.set_rate(step)
    return step


def _everybody(tensor: Tensor, world: int) -> list[Tensor]:
    if world == 1:
        return [tensor]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, tensor)
    return found


def _header(session: Session, clip_norm: float) -> dict[str, Any]:
    return {
        "time": time.time(),
        "guarded": False,
        "stepguard": __version__,
        "torch": torch.__version__,
        "rank": 0,
        "world": session.ranks.world,
        "optimizer": type(session.optimizer).__name__,
        "parameters": session.parameters,
        "lr": [session.rate],
        "config": {"clip_norm": clip_norm},
    }
