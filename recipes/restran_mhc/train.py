"""Train the plate reader.

    python train.py                                                # the settings of
    configs/config.py python train.py --model restran_mhc --mhc-n 2 --lr 0.0001

Guarded by default (`--guard original` runs the loop as it was). Writes results/, the readable log
and the best model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from configs.config import Config
from src.data.plates import Plates
from src.models.restran import ResTran
from src.training.files import Files
from src.training.trainer import Trainer


def settings(arguments: Sequence[str] | None = None) -> Config:
    """The configuration with what the command line changes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--experiment", dest="EXPERIMENT")
    parser.add_argument("-m", "--model", dest="MODEL_TYPE", choices=["restran", "restran_mhc"])
    parser.add_argument("--epochs", dest="EPOCHS", type=int)
    parser.add_argument("--batch-size", dest="BATCH_SIZE", type=int)
    parser.add_argument("--lr", dest="LEARNING_RATE", type=float)
    parser.add_argument("--seed", dest="SEED", type=int)
    parser.add_argument("--transformer-heads", dest="TRANSFORMER_HEADS", type=int)
    parser.add_argument("--transformer-layers", dest="TRANSFORMER_LAYERS", type=int)
    parser.add_argument("--mhc-n", dest="MHC_N", type=int)
    parser.add_argument("--aug-level", dest="AUGMENTATION_LEVEL", choices=["none", "light", "full"])
    parser.add_argument("--data", dest="DATA", choices=["toy", "real"])
    parser.add_argument("--output-dir", dest="OUTPUT_DIR")
    parser.add_argument("--guard", dest="GUARD", choices=["original", "stable"])
    parser.add_argument("--on-nan", dest="ON_NAN", choices=["recover", "stop"])
    parser.add_argument("--resume", dest="RESUME", metavar="FILE", help="a _last.pth")
    parser.add_argument("--resume-lr", dest="RESUME_LR", choices=["config", "checkpoint"])
    parser.add_argument("--no-stn", dest="USE_STN", action="store_false", default=None)
    given = vars(parser.parse_args(arguments))
    return Config().with_(**{name: value for name, value in given.items() if value is not None})


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """A fresh model and frames for it: `stepguard doctor results --build train:build`."""
    config = Config()
    torch.manual_seed(config.SEED)
    return ResTran(config), (Plates(config, seed=1).draw(2)[0],)


def main(arguments: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    try:
        start(settings(arguments))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def start(config: Config) -> Trainer:
    """The whole run."""
    trainer = Trainer(config, files=Files(Path(config.OUTPUT_DIR), config.EXPERIMENT))
    try:
        if config.RESUME:
            rate = config.LEARNING_RATE if config.RESUME_LR == "config" else None
            print(trainer.resume(Path(config.RESUME), rate))
        epochs = trainer.train().epochs
    finally:
        trainer.close()
    if epochs:
        loss, accuracy = epochs[-1]["train_loss"], epochs[-1]["val_acc"]
        print(f"{trainer.step} steps, loss {loss:.3f}, plate accuracy {accuracy:.3f}")
    else:
        print(f"{trainer.step} steps are done, none is left")
    return trainer


if __name__ == "__main__":
    main()
