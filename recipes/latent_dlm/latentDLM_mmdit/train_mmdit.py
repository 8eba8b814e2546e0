"""Train the joint text and latent diffusion as the original does.

    torchrun --nnodes=1 --nproc_per_node=2 latentDLM_mmdit/train_mmdit.py --config-name mmdit
    python latentDLM_mmdit/train_mmdit.py training.num_train_steps=100 optimizer.lr=1e-3

`training.loop=original` zeroes the gradients of a step whose norm is NaN and updates all the same;
an infinite norm passes. `bare` looks at nothing. Kept as it is so that it can be compared with
train_mmdit_stable.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run by its path, the package is not yet known

from latentDLM_mmdit import entry
from latentDLM_mmdit.improved_trainer import ImprovedTrainer, terms_of
from latentDLM_mmdit.loop import Done, run_folder
from latentDLM_mmdit.pairs import Batch
from latentDLM_mmdit.plain import PlainLoop
from latentDLM_mmdit.ranks import Ranks
from latentDLM_mmdit.session import Session
from latentDLM_mmdit.settings import Settings


class OriginalLoop(PlainLoop):
    """Backward, clip, `isnan`, zero, step."""

    def one_step(self, micro: list[Batch]) -> Done:
        session = self.session
        session.optimizer.zero_grad(set_to_none=True)
        loss, parts = self.backward(micro)
        norm = self.clip()
        if session.config.training.loop == "original" and torch.isnan(torch.tensor(norm)):
            self.warn(f"Warning: NaN gradient detected at step {self.step}")
            for parameter in session.trainer.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        session.optimizer.step()
        factor = min(1.0, self.clip_norm / (norm + 1e-6))
        return self.counted(Done(loss=loss, norm=norm, parts=parts, clip_factor=factor))


def build_loop(config: Settings, ranks: Ranks) -> OriginalLoop:
    if config.training.loop not in ("original", "bare"):
        raise SystemExit(
            f"training.loop={config.training.loop} is for train_mmdit_stable.py; use original or "
            f"bare."
        )
    session = Session(config, ranks, ImprovedTrainer, terms_of)
    return OriginalLoop(session, run_folder(config, ranks))


def start(config: Settings) -> OriginalLoop:
    return entry.train(config, build_loop)


def main(arguments: Sequence[str] | None = None) -> None:
    entry.call(__doc__, "mmdit", start, arguments)


if __name__ == "__main__":
    main()
