"""Settings of the reader. Every key has an effect; the command line of train.py overrides some of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The first seven are the report's; the rest is what a run on a CPU needs."""

    MODEL_TYPE: Literal["restran", "restran_mhc"] = "restran_mhc"
    LEARNING_RATE: float = 1e-4
    BATCH_SIZE: int = 32
    GRAD_CLIP: float = 1.0
    MHC_N: int = 2
    AUGMENTATION_LEVEL: Literal["none", "light", "full"] = "light"
    OVERSAMPLE_RARE_CHARS: bool = False

    SINKHORN: Literal["exp", "log", "clamp"] = "log"
    """`exp` is the original and overflows at 88.7; `clamp` is the report's fix; `log` stays finite.
    """
    MIX: Literal["diag", "full"] = "full"
    """`diag` is the original's einsum with a repeated index, which takes the diagonal."""
    STREAMS: Literal["per_block", "persistent"] = "per_block"
    """`per_block` expands and averages at every block, as the original; `persistent` keeps them
    through a stage.
    """
    RMS_EPS: float = 1e-6
    """The original's is 1e-20."""
    USE_STN: bool = True
    FRAMES: int = 2
    HEIGHT: int = 16
    WIDTH: int = 64
    CHANNELS: tuple[int, ...] = (8, 16, 32)
    TRANSFORMER_LAYERS: int = 1
    TRANSFORMER_HEADS: int = 4
    EPOCHS: int = 30
    STEPS_PER_EPOCH: int = 40
    WEIGHT_DECAY: float = 3e-4
    VALIDATION_PLATES: int = 128
    EARLY_STOPPING: int = 15
    DATA: Literal["toy", "real"] = "toy"
    SEED: int = 0
    OUTPUT_DIR: str = "results"
    EXPERIMENT: str = "restran_mhc"
    USE_CUDNN_BENCHMARK: bool = False
    AMP: Literal["off", "fp16"] = "off"
    """`fp16` is the original on a GPU: float16 autocast under a GradScaler. Slow on a CPU."""
    GUARD: Literal["original", "stable"] = "stable"
    RESUME: str = ""
    """A `_last.pth` to go on from; "" starts anew."""
    RESUME_LR: Literal["config", "checkpoint"] = "config"
    """Whose learning rate counts then. The original took the checkpoint's without saying so."""
    ON_NAN: Literal["recover", "stop"] = "recover"
    """With the guard: skip and rewind, or stop at the first bad step."""

    def __post_init__(self) -> None:
        for name in (
            "LEARNING_RATE",
            "BATCH_SIZE",
            "GRAD_CLIP",
            "MHC_N",
            "EPOCHS",
            "STEPS_PER_EPOCH",
            "FRAMES",
        ):
            if not getattr(self, name) > 0:
                raise SystemExit(f"{name}={getattr(self, name)!r} must be above 0.")

    def with_(self, **changed: Any) -> Config:
        """A copy with other values; unknown names are an error that lists the known ones."""
        known = {field.name for field in fields(self)}
        unknown = sorted(set(changed) - known)
        if unknown:
            raise SystemExit(f"{unknown[0]} is no setting; use one of {', '.join(sorted(known))}.")
        return replace(self, **changed)
