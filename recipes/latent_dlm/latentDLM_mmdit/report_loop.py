"""The checks that the source report proposes: loss before backward, norm after clipping, and the
batch is left out.

Kept so that it can be compared. It never lowers a loss scale, never looks at the weights, and must
not run on several processes: a rank that leaves its batch out alone pairs its next reduction with
the other's last one.
"""

from __future__ import annotations

import math
from pathlib import Path

from latentDLM_mmdit.loop import Done
from latentDLM_mmdit.pairs import Batch
from latentDLM_mmdit.plain import PlainLoop, sum_of
from latentDLM_mmdit.session import Session


class ReportLoop(PlainLoop):
    """Counters advance for a batch that is left out, or a run of bad batches would never end."""

    def __init__(self, session: Session, folder: Path | None) -> None:
        if session.ranks.world > 1:
            raise SystemExit(
                f"training.loop=report leaves a batch out on one rank alone; {session.ranks.world} "
                f"processes then mix "
                "gradients of different steps and wait for ever. Use training.loop=stepguard."
            )
        super().__init__(session, folder)

    @property
    def clip_norm(self) -> float:
        """Unset is 1.0, not a million."""
        optimizer = self.session.config.optimizer
        return float(optimizer.grad_clip_value or optimizer.grad_clip_norm or 1.0)

    def one_step(self, micro: list[Batch]) -> Done:
        optimizer = self.session.optimizer
        optimizer.zero_grad(set_to_none=True)
        loss, parts = self._checked_backward(micro)
        if not math.isfinite(loss):
            self.warn(f"ERROR: Invalid loss at step {self.step}: {loss}")
            for name in ("text_loss", "latent_loss"):
                self.warn(f"  {name}: {parts.get(name, 0.0)}")
            optimizer.zero_grad(set_to_none=True)
            return self.counted(Done(loss=loss, norm=math.nan, parts=parts, committed=False))
        norm = self.clip()
        if not math.isfinite(norm):
            self.warn(f"ERROR: NaN/Inf gradient norm at step {self.step}")
            self.warn("  Skipping batch and resetting gradients")
            optimizer.zero_grad(set_to_none=True)
            return self.counted(Done(loss=loss, norm=norm, parts=parts, committed=False))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        factor = min(1.0, self.clip_norm / (norm + 1e-6))
        return self.counted(Done(loss=loss, norm=norm, parts=parts, clip_factor=factor))

    def _checked_backward(self, micro: list[Batch]) -> tuple[float, dict[str, float]]:
        """No backward of a loss that is not finite."""
        total, parts = 0.0, dict[str, float]()
        for batch in micro:
            losses = self.session.loss(batch)
            loss = sum_of(losses)
            for name, value in losses.items():
                parts[name] = parts.get(name, 0.0) + float(value.detach())
            total += float(loss.detach())
            if not math.isfinite(total):
                break
            (loss * self.session.config.loss.loss_scale).backward()
        return total, parts
