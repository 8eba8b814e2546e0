"""Plain numbers about the run that a rule may lean on besides the bad step itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scaling = Literal["dynamic", "static", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What was known when the step went bad. A rule rests on the origin where a field is empty."""

    lr_history: tuple[tuple[float, ...], ...] = ()
    """Learning rates by group in recent steps, oldest first; the bad step's own come last."""
    configured_lr: tuple[float, ...] = ()
    """What the user's configuration says each group should run with, at most."""
    first_lr: tuple[float, ...] = ()
    """Learning rate of each group in the first step of the run."""
    initial_lr: tuple[float | None, ...] = ()
    """The highest rate each group's schedule declares (`initial_lr`, `max_lr`), else None."""
    losses: tuple[float, ...] = ()
    """Finite losses of recent committed steps, oldest first."""
    grad_norms: tuple[float, ...] = ()
    """Finite gradient norms of the same steps."""
    update_ratio: float | None = None
    """Norm of the last update over the norm of the weights it changed."""
    moved_most: tuple[str, float] | None = None
    """The parameter that the last update changed most for its size, and by how much of it."""
    lost_squares: int = 0
    """Elements with a first moment but no second one, which no training leaves behind."""
    param_dtypes: tuple[str, ...] = ()
    """Distinct dtypes of the trained parameters, for instance ("float16",)."""
    optimizer: str = ""
    """Class name, for instance "AdamW"."""
    eps: float | None = None
    """The optimizer's epsilon; None where it has none."""
    betas: tuple[float, ...] = ()
    clip_norm: float | None = None
    configured_dtype: str | None = None
    """The precision that the launcher asks for; what the step ran in is `Evidence.autocast`."""
    scaling: Scaling | None = None
    """How the loss is scaled; None where it could not be seen."""
    world_size: int = 1
    committed: int | None = None
    """Steps committed before this one."""
    resumed: bool = False
    """Optimizer or scheduler state was loaded in this process."""
    just_loaded: bool = False
    """No step was made since."""
    outlier: tuple[int, str, float] | None = None
    """The last outlier that went into an update: step, parameter, times its usual largest."""
