"""The loop under stepguard: one call a step; what is wrong is refused, located, explained and
survived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from latentDLM_mmdit.loop import Done, Loop
from latentDLM_mmdit.pairs import Batch
from latentDLM_mmdit.plain import CHECKPOINT, load_checkpoint, write_checkpoint
from latentDLM_mmdit.session import Session
from stepguard import Guard, GuardConfig, Incident, Policy, verify
from stepguard.report.sinks import error_lines

UNSET_CLIP_NORM = 1.0


class GuardedLoop(Loop):
    """`guard.step` reads loss and gradients on all ranks alike before anything is updated."""

    def __init__(self, session: Session, folder: Path | None) -> None:
        super().__init__(session, folder)
        self.guard = Guard(
            session.module,
            session.optimizer,
            scheduler=session.schedule,
            loader=session.batches,
            config=guard_settings(session, folder),
        )

    @property
    def step(self) -> int:
        return self.guard.steps

    def batches(self) -> Iterator[Batch]:
        return iter(self.guard.loader)

    def one_step(self, micro: list[Batch]) -> Done:
        self._parts: dict[str, float] = {}
        # of this step: the schedule moves on inside guard.step
        self._rate, self._position = self.session.rate, self.session.schedule.last_epoch
        result = self.guard.step(self._loss, *micro)
        incident = result.incident
        if incident is not None:
            self._tell(incident)
            return self._as_it_came(incident, result.committed)
        loss = float(result.loss)
        norm = math.nan if result.grad_norm is None else float(result.grad_norm)
        most = clip_norm(self.session)
        factor = min(1.0, most / (norm + 1e-6)) if most is not None and norm > 0 else None
        return Done(
            loss=loss, norm=norm, parts=self._parts, committed=result.committed, clip_factor=factor
        )

    def _as_it_came(self, incident: Incident, committed: bool) -> Done:
        """The numbers of the whole step, also where the update was made from the rest of it."""
        read = incident.reading
        loss = math.nan if read.loss is None else read.loss
        norm = math.nan if read.grad_norm is None else read.grad_norm
        return Done(loss=loss, norm=norm, parts=read.components, committed=committed)

    def _loss(self, batch: Batch) -> dict[str, object]:
        losses = self.session.loss(batch)
        for name, value in losses.items():
            self._parts[name] = self._parts.get(name, 0.0) + float(value.detach())
        return dict(losses)

    def _tell(self, incident: Incident) -> None:
        """The report's lines, and where in the schedule it happened."""
        for line in takewhile(lambda text: not text.startswith("  origin"), error_lines(incident)):
            self.say(line)
        session = self.session
        place = "inside" if self._position < session.warmup else "after"
        self.guard.port.say(
            "lr",
            f"learning rate {self._rate:.2e}, {type(session.schedule).__name__} step "
            f"{self._position} of {session.total_steps}, {place} the warm-up of {session.warmup}",
        )

    def save(self) -> str:
        """Sealed, and only if it is good; then also the weights in the original's layout."""
        saved = self.guard.save()
        if saved is None or self.folder is None:
            return "NOT saved: the state is not good; the last good checkpoint stays"
        if self.session.ranks.first:
            write_checkpoint(self.folder / CHECKPOINT, self.session, self.step, [])
        return f"saved {saved}"

    def resume(self, which: str) -> str:
        """`last_good`, a step of this run, or the path of a sealed checkpoint or of a
        checkpoint.pt.
        """
        assert self.folder is not None, "training.resume needs logging.save_dir"
        if which.isdigit():
            which = str(self.folder / "checkpoints" / f"step-{which}")
        if which.endswith(".pt"):
            return self._from_original(Path(which))
        done = self.guard.restore("last-good" if which in ("last_good", "last-good") else which)
        return f"going on after {done} steps, learning rate {self.session.rate:.2e}"

    def _from_original(self, path: Path) -> str:
        found = verify(path) if path.is_file() else None
        if found is not None and not found.ok:
            worst = found.problems[0]
            raise SystemExit(
                f"{path} is not resumed from: {worst.tensor or worst.file} "
                f"{worst.detail or worst.kind}."
            )
        done = load_checkpoint(path, self.session)
        self.guard.port.start_at(done)
        return f"going on from {path} after {done} steps, learning rate {self.session.rate:.2e}"

    def close(self) -> None:
        super().close()
        self.guard.close()


def clip_norm(session: Session) -> float | None:
    """Unset is 1.0, 0 turns it off."""
    optimizer = session.config.optimizer
    given = (
        optimizer.grad_clip_norm if optimizer.grad_clip_value is None else optimizer.grad_clip_value
    )
    most = UNSET_CLIP_NORM if given is None else float(given)
    return most or None


def guard_settings(session: Session, folder: Path | None) -> GuardConfig:
    """Skips are bounded: then the run stops, with the weights it has, which are good."""
    training, logging = session.config.training, session.config.logging
    scale = float(session.config.loss.loss_scale)
    policy = Policy(
        max_consecutive=training.max_skips_in_a_row,
        max_lost_share=training.max_skips_per_1000 / 1000,
        max_total=max(100, training.max_skips_per_1000 * session.total_steps // 1000),
    )
    return GuardConfig(
        clip_norm=clip_norm(session),
        loss_scale=scale if scale != 1.0 else None,
        policy=policy,
        run_dir=folder,
        human_log=logging.log_dir if folder is not None else None,
        checkpoint_every=logging.save_freq if folder is not None else None,
        resume_lr=training.resume_lr,
        terminal="auto" if folder is not None else "quiet",
    )
