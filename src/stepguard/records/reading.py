"""What one step looked like from outside: a few numbers, read with at most one host sync."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The agreed numbers of one optimizer step. Non-finite floats are kept as they are."""

    step: int
    """Index of the optimizer step, counted from 0 over the guard's life."""
    loss: float | None = None
    """Sum of the micro-batch losses, not scaled; None where no loss could be seen."""
    micro_losses: tuple[float, ...] = ()
    """The loss of each micro-batch, in order."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the loss, added over the micro-batches."""
    followed: dict[str, float] = field(default_factory=dict)
    """What the user follows with `guard.follow`, by name."""
    grad_norm: float | None = None
    """2-norm of all gradients in fp32, after unscaling and before clipping; of sharded ones that
    of all ranks."""
    least_norm: float | None = None
    """Smallest norm of one parameter's gradient; read under optimizers that are not torch's."""
    grads_finite: bool = True
    """Exact: no gradient element is NaN or Inf."""
    clip_factor: float | None = None
    """What clipping multiplied the gradients by; None where nothing clips."""
    scale: float | None = None
    """GradScaler scale during the step."""
    lr: tuple[float, ...] = ()
    """Learning rate of each parameter group."""
    schedule: str = ""
    """Name and position of the learning-rate schedule during the step: `OneCycleLR at 33 of 100`.
    Filled for every incident whose schedule can be found."""
    climbs: bool = False
    """The optimizer maximises: what is returned as the loss should rise."""
    labels: int | None = None
    """How many targets the step had, where the batch says so."""
    shared_loss: float | None = None
    """Where ranks compare losses, the largest of them, of sharded models their mean: finite
    anomalies are judged by it."""
    seconds: float | None = None
    """Wall-clock time since the previous step was read."""
    bad_state: tuple[str, ...] = ()
    """Stored tensors that are non-finite: `param:NAME`, `buffer:NAME`, `opt:SLOT`."""
    bad_inputs: tuple[str, ...] = ()
    """Batch tensors that hold NaN or Inf (`batch:KEY`); filled only once something is wrong."""
    bad_grads: tuple[str, ...] = ()
    """Parameters whose gradient is non-finite; filled only once something is wrong."""
    unnamed_grads: int = 0
    """How many more there are, where several ranks name only the first ones to each other."""
    state_born: bool = False
    """True when `bad_state` was finite before this step's update: the optimizer made it."""
    missed: str = ""
    """An update that this rank refused alone, in words: its weights are no longer the others'."""
    loss_overflow: bool = False
    """The loss is infinite only because finite values were added up beyond the range of its dtype:
    every gradient is finite."""
    overflow: bool = False
    """Gradients are non-finite only by the loss scale: a replay at scale 1 is finite."""
    repeat_loss: float | None = None
    """Loss of an earlier good batch on the present weights; only measured on suspicion."""
    repeat_before: float | None = None
    """What that same batch gave when it was new, to tell hurt weights from a hard batch."""
    update_ratio: float | None = None
    """Norm of the last update over that of the weights; only measured on suspicion."""
    weights_moved: float | None = None
    """Relative distance of the weights from the last good snapshot; only measured on suspicion."""
    alarm: bool = False
    """Some rank reported a non-finite value."""
    bad_ranks: tuple[int, ...] = ()
    """Ranks whose own loss or gradient was bad before any reduction."""

    @property
    def judged_loss(self) -> float | None:
        """The loss every rank sees alike; turned over where it is to rise, so that lower is always
        better.
        """
        loss = self.loss if self.shared_loss is None else self.shared_loss
        return -loss if self.climbs and loss is not None else loss

    @property
    def bad_micro_batches(self) -> tuple[int, ...]:
        """Indices of the micro-batches whose loss is not finite."""
        return tuple(i for i, value in enumerate(self.micro_losses) if not _finite(value))


def _finite(value: float) -> bool:
    # NaN - NaN and Inf - Inf are NaN, which equals nothing.
    return value - value == 0.0
