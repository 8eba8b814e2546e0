"""Train the joint text and latent diffusion under stepguard.

    torchrun --nnodes=1 --nproc_per_node=2 latentDLM_mmdit/train_mmdit_stable.py --config-name
    mmdit_stable \
        logging.run_name=mmdit-qwen-32d-l2t-stable training.train_batch_size=4 \
        optimizer.lr=5e-5 optimizer.grad_clip_norm=0.5
    python latentDLM_mmdit/train_mmdit_stable.py training.num_train_steps=100 logging.log_freq=10
    python latentDLM_mmdit/train_mmdit_stable.py training.resume=last_good

`training.loop=stepguard` is the default; `report` is what the source report proposes, kept so that
it can be compared. Ctrl+C ends the step and saves a state that is good (with several processes the
last good checkpoint stays as it is).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run by its path, the package is not yet known

from latentDLM_mmdit import entry
from latentDLM_mmdit.guarded import GuardedLoop, guard_settings
from latentDLM_mmdit.improved_trainer_stable import StableTrainer, stable_terms_of, warnings_of
from latentDLM_mmdit.loop import Loop, run_folder
from latentDLM_mmdit.preflight import look_first
from latentDLM_mmdit.ranks import Ranks
from latentDLM_mmdit.report_loop import ReportLoop
from latentDLM_mmdit.session import Session
from latentDLM_mmdit.settings import Settings

EXIT_CHECK_FAILED = 5


def build_session(config: Settings, ranks: Ranks) -> Session:
    return Session(config, ranks, StableTrainer, stable_terms_of)


def build_loop(config: Settings, ranks: Ranks) -> Loop:
    if config.training.loop not in ("stepguard", "report"):
        raise SystemExit(
            f"training.loop={config.training.loop} is for train_mmdit.py; use stepguard or report."
        )
    session = build_session(config, ranks)
    if ranks.first:
        for warning in warnings_of(session.terms):
            print(f"warning: {warning}", flush=True)
    if config.training.check:
        told, sound = ranks.told(lambda: look_first(session))  # one rank looks, with the bare model
        if ranks.first:
            print(told, flush=True)
        if not sound:
            raise SystemExit(EXIT_CHECK_FAILED)
    folder = run_folder(config, ranks)
    return (
        GuardedLoop(session, folder)
        if config.training.loop == "stepguard"
        else ReportLoop(session, folder)
    )


def build(config: Any) -> dict[str, Any]:
    """For `stepguard check latentDLM_mmdit.train_mmdit_stable:build --config
    configs/mmdit_stable.yaml`.
    """
    session = build_session(config, Ranks())
    return {
        "model": session.trainer,
        "optimizer": session.optimizer,
        "scheduler": session.schedule,
        "loss_fn": session.loss,
        "batch": session.batches.at(0),
        "config": config,
        "guard": guard_settings(session, None),
        "steps": session.total_steps,
    }


def start(config: Settings) -> Loop:
    return entry.train(config, build_loop)


def main(arguments: Sequence[str] | None = None) -> None:
    entry.call(__doc__, "mmdit_stable", start, arguments)


if __name__ == "__main__":
    main()
