"""A health probe of one healthy step: how far its numbers are from what their dtypes can hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from stepguard.records.codec import documented

# --- A health probe of one healthy step: how far its numbers are from what their dtypes can hold.


Stage = Literal["stored", "forward", "backward"]
NextBatch = Literal["unknown", "other", "equal", "same"]
"""Another batch, equal numbers in new memory, or the very same tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLook:
    """What one module computed in one dtype, in one direction."""

    module: str
    """Dotted name; empty outside every module, as in the loss function."""
    stage: Stage
    """`stored` for parameters, buffers and the batch."""
    dtype: str
    op: str = ""
    """The operation that made the largest value."""
    largest: float = 0.0
    """Largest magnitude of a finite value."""
    smallest: float | None = None
    """Smallest magnitude that is not 0; None where all is 0."""
    headroom: float | None = None
    """Bits between `largest` and the largest number of the dtype."""
    floor: float | None = None
    """Bits between `smallest` and the smallest normal number of the dtype; negative below it."""
    zeros: float = 0.0
    """Share of elements that are exactly 0."""
    subnormal: float = 0.0
    """Share of elements below the smallest normal number, which hold fewer bits."""
    rounded_away: float = 0.0
    """Share of elements of conversions to this dtype that were not 0 and became 0."""
    infinities: int = 0
    """Infinite values that this operation made of finite ones; the step was finite all the same."""
    elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLook:
    """One parameter, its gradient and its update."""

    name: str
    dtype: str
    elements: int = 0
    weight: float = 0.0
    """Root mean square of the values before the update."""
    gradient: float | None = None
    """Root mean square of the gradient; None without one."""
    gradient_zeros: float = 0.0
    """Share of the gradient that is exactly 0."""
    trainable: bool = True
    """`requires_grad`."""
    owned: bool = True
    """An optimizer updates it."""
    update: float | None = None
    """Root mean square of the change by the update; None where another optimizer makes it."""
    lost: float | None = None
    """Share of elements with a gradient that the update left exactly as they were."""
    variance_zeros: float | None = None
    """Share of elements with a gradient whose second moment is exactly 0 (Adam and its like)."""
    variance: float | None = None
    """Smallest second moment that is not 0."""
    epsilon: float | None = None
    """What the optimizer adds to the root of a second moment, in the dtype of the parameter."""
    apart: float | None = None
    """Share of the update that is no multiple of gradient, running mean and weight, where the name
    of the optimizer says it should be; 1 where nothing can be told."""
    copies: bool = False
    """All rows of the weight are equal, and so are all rows of its gradient: every unit does the
    same."""

    @property
    def ratio(self) -> float | None:
        """Size of the update beside that of the weight."""
        if self.update is None or self.weight == 0.0:
            return None
        return self.update / self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLook:
    """One softmax over keys, on a sample of its rows."""

    module: str
    largest_logit: float
    entropy: float
    """Mean entropy of a row over that of the uniform row: 1 looks everywhere, 0 at one key."""
    collapsed: float
    """Share of rows with more than 99 % of their weight on one key."""
    uniform: float = 0.0
    """Share of rows whose entropy is above 99.9 % of the uniform row's."""
    keys: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLook:
    """What goes into one normalisation layer, and whether anything comes out."""

    module: str
    scale: float
    """Root mean square of the input."""
    dtype: str = ""
    output_zeros: float = 0.0
    """Share of the output that is exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLook:
    """Units behind one activation function."""

    module: str
    op: str
    units: int
    dead: float = 0.0
    """Share of units that are 0 for every sample and position of the step."""
    saturated: float = 0.0
    """Share of values in the flat ends of a sigmoid or tanh."""
    positions: int = 0
    """Samples and positions that each unit was seen at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLook:
    """Which experts a router has chosen for the tokens of the step."""

    module: str
    experts: int
    chosen: int
    """For each token."""
    tokens: int
    loads: tuple[float, ...] = ()
    """Share of the choices that each expert got."""
    dtype: str = ""
    """In which the gate computed its scores; empty where that was not seen."""
    ties: float = 0.0
    """Share of the tokens whose last chosen expert scored exactly as the first one left out."""

    @property
    def entropy(self) -> float:
        """Entropy of the loads over that of equal loads: 1 uses all experts alike, 0 uses one."""
        found = -sum(load * math.log(load) for load in self.loads if load > 0.0)
        return found / math.log(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What else the look has seen of the step."""

    batch: str = ""
    """Digest of the batch's tensors."""
    repeats: int = 0
    """Probes before this one with the same batch."""
    batch_after: NextBatch = "unknown"
    """Whether the step after the previous probe was given the probed batch again."""
    training: bool = True
    """The model is in training mode."""
    dropout: tuple[str, ...] = ()
    """Dropout layers with a probability above 0 that are in evaluation mode."""
    norms_in_eval: tuple[str, ...] = ()
    """Batch norms in evaluation mode while the model trains."""
    labels: int = 0
    """Targets of the classification losses."""
    ignored: int = 0
    """Targets among them that do not count."""
    samples: int = 0
    """Rows of the batch: the most common first dimension of its tensors; 0: not known."""
    softmax_twice: bool = False
    """The logits of a cross entropy are probabilities already."""
    kept_gradients: bool = False
    """The step started with the previous step's gradients."""
    mixed_up: dict[str, str] = field(default_factory=dict)
    """Loss function -> what it was given (`probabilities`, `logits`) and does not take."""
    broadcast: tuple[str, ...] = ()
    """Operation of the loss and the two shapes that it spread over each other."""
    bound: str = ""
    """The activation that the output of the model ends in, where it cannot reach its targets."""
    beyond: float = 0.0
    """Share of the targets that it cannot reach."""
    parts_without_gradient: int = 0
    """Terms of the loss that were computed from the model and have no gradient."""
    single_class: bool = False
    """The loss takes a softmax over one class, which is always 1."""
    without_gradient: tuple[str, ...] = ()
    """Trainable parameters of the optimizer that have no gradient, or one of zeros only."""
    outsiders: dict[str, str] = field(default_factory=dict)
    """Tensors that get gradients and belong to no model and no optimizer: number and version of
    each -> what it is."""
    classes: tuple[int, ...] = ()
    """How many targets of the step each class has."""
    cross_entropy: float | None = None
    """Mean loss of those targets."""
    spread: float | None = None
    """Deviation of the loss function's input between samples, beside its size."""
    averages: dict[str, str] = field(default_factory=dict)
    """Average of weights that the guard was given -> digest of what it holds."""
    optimizer: str = ""
    """Class of the optimizer, where its name says how an update must look."""
    update_rule: str = ""
    """`element`: each element by its own size; `orthogonal`: all directions of a matrix alike."""
    recomputed: int = 0
    """Operations of checkpointed blocks whose second forward was compared with the first."""
    recomputed_otherwise: tuple[str, ...] = ()
    """Module and operation of the first that gave another result for the same inputs."""
    recomputed_share: float = 0.0
    """Share of its elements that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What the first batches of a causal language model teach, counted over all of them."""

    rows: int = 0
    """With a target that counts."""
    targets: int = 0
    unlike: int = 0
    """Targets that differ from the input at their place, as those of a masked model do."""
    ended: int = 0
    """Rows whose last token is an end token."""
    ends: int = 0
    """Targets that are end tokens."""
    padding: int = 0
    padding_targets: int = 0
    """Positions of the padding that count as targets."""
    padded_rows: int = 0
    prompted: int = 0
    """Rows whose first token is not a target."""
    unended: int = 0
    """Padded rows, which nothing has cut, without an end token."""
    same_last: bool = False
    """The last target is the same in all rows: that token marks the end."""
    end: int = 0
    """Id of the end token."""
    pad: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFacts:
    """A step that gave other values in one of several runs from the same state."""

    step: int
    rank: int = 0
    runs: int = 0
    op: str = ""
    """The first operation whose values differ."""
    place: str = ""
    """Direction, operation, module, line and the size of the difference, in words."""
    values: tuple[str, ...] = ()
    """Dtype, shape and norm of its result, in the runs that agree and in the other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Everything one health probe has measured."""

    step: int
    seconds: float = 0.0
    """Time that the look itself took."""
    tensors: tuple[TensorLook, ...] = ()
    parameters: tuple[ParameterLook, ...] = ()
    attention: tuple[AttentionLook, ...] = ()
    norms: tuple[NormLook, ...] = ()
    units: tuple[UnitLook, ...] = ()
    routers: tuple[RouterLook, ...] = ()
    facts: StepFacts = field(default_factory=StepFacts)
    left_out: int = 0
    """Rows that were dropped to keep the record small; the worst are kept."""


# --- What a healthy run is heading for.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A quantity that runs towards a limit, and the step at which it gets there."""

    quantity: str
    """What is measured, in words."""
    place: str
    """Module or parameter; empty where it is of the whole run."""
    since: int
    """First step of the trend."""
    first: float
    """What was measured then."""
    now: int
    """Newest step that was measured."""
    value: float
    """What was measured then."""
    limit: float
    step: int
    """Step at which the limit is met if nothing changes."""
    earliest: int
    latest: int

    @property
    def sentence(self) -> str:
        """From where to where it went, and when it gets to its limit."""
        place = f" of {self.place}" if self.place else ""
        return (
            f"{self.quantity}{place} went from {self.first:.3g} at step {self.since} to "
            f"{self.value:.3g} at step {self.now}; it reaches {self.limit:.3g} at about step "
            f"{self.step} ({self.earliest} to {self.latest})"
        )


# --- What would have helped: how each candidate fared on the steps that led to an incident.


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """One candidate, trained on the steps before the incident, the bad step and those after."""

    name: str
    """Short and stable: `skip`, `lr x0.5`, `eps`."""
    label: str
    """What was changed, in words: `learning rate x0.5 (0.001 -> 0.0005)`."""
    cost: int
    """How much it changes a healthy run: less is better among candidates that do as well."""
    works: bool = False
    """The bad value did not come back, and the losses at the end are finite."""
    bad_step: int | None = None
    """The step in which it came back."""
    bad_value: str = ""
    """What was bad then: `loss is nan`."""
    loss: float | None = None
    """Mean loss of batches of the window on the weights at the end."""
    held_out: float | None = None
    """Losses of batches that the trial was not trained on."""
    distance: float | None = None
    """How far its weights ended from the good state that all trials begin with, over their norm."""
    losses: tuple[float, ...] = ()
    """The loss of each step of the trial, in order."""
    steps: int = 0
    """Steps that were run for it, evaluations included as a third."""
    change: str = ""
    """What to change so that the next run has it."""
    value: float | None = None
    """The new epsilon or norm to clip to, where that is what is changed."""
    answers: tuple[str, ...] = ()
    """Codes of the incident's findings whose remedy this is."""
    why_not: str = ""
    """Why it could not be tried."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The candidates for one incident, the best first.

    For instance:

        print(guard.whatif().best.change)
    """

    incident: str
    """Id of the incident."""
    step: int
    """The bad step."""
    summary: str = ""
    """What was wrong with it."""
    first: int = 0
    """The step that the trials began with."""
    window: int = 0
    """Steps before the bad one that were trained again."""
    after: int = 0
    """Steps that were trained after it, to see whether the trouble is over."""
    held_out: int = 0
    """Batches that no trial was trained on."""
    outcomes: tuple[TrialOutcome, ...] = ()
    """The best first."""
    remarks: tuple[str, ...] = ()
    """What to know when reading the table."""

    @property
    def best(self) -> TrialOutcome | None:
        """The first one, if it works."""
        for outcome in self.outcomes[:1]:
            if outcome.works:
                return outcome
        return None

    @property
    def steps(self) -> int:
        """Steps that were run for all of it."""
        return sum(outcome.steps for outcome in self.outcomes)
