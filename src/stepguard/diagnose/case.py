"""One bad step as the rules see it: origin, reading, verdict, run, and the usual questions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from stepguard.records import Evidence, Operand, Origin, Reading, Verdict
from stepguard.records.codec import record
from stepguard.records.incident import Phase, place
from stepguard.records.probes import AuditFacts, Look, TargetFacts

# --- Plain numbers about the run that a rule may lean on besides the bad step itself.


Scaling = Literal["dynamic", "static", "none"]


class RunFacts(NamedTuple):
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


class ResumeFacts(NamedTuple):
    """The first steps of a run that goes on from an earlier one, beside the end of that one."""

    step: int = 0
    """Number of the first step of this process."""
    updates: int | None = None
    """Updates that the optimizer's state counted before this step; None: it was empty."""
    near: int | None = None
    """The step of the run before whose weights these are, or nearly so; None: not known."""
    moments_empty: bool = False
    """The optimizer keeps moments, and had none before the first step."""
    optimizer: str = ""
    """Class name."""
    lr_now: tuple[float, ...] = ()
    loss_now: float | None = None
    last: int | None = None
    """The last step of the run before; None where there is no journal of it."""
    losses: tuple[float, ...] = ()
    """Losses of its last steps."""
    lr: tuple[float, ...] = ()
    """Learning rates at the step where this process begins, else at its last step."""
    lr_restarted: bool = False
    """The rates are those that the run before began with, and its last ones were others."""
    batch_again: bool = False
    """The data begins where it began in the run before, in the middle of an epoch."""


class WeightFacts(NamedTuple):
    """Where the weights of the model come from, as far as it was observed."""

    untied: tuple[tuple[str, str], ...] = ()
    """Pairs of parameters that the model's configuration ties, and that are two tensors."""
    missing: int = 0
    """Tensors that `load_state_dict(strict=False)` did not fill."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Unfilled tensor -> the name under which the file has one, with another prefix."""
    frozen: tuple[str, ...] = ()
    """Unfilled ones that are not trained either."""
    heads: tuple[tuple[str, str], ...] = ()
    """Unfilled output layer -> the embedding of the same shape, which the file did fill."""


@dataclass(slots=True, kw_only=True)
class LoaderFacts:
    """Passes over the data and workers that should differ, and do not."""

    sampler: str = ""
    """A sampler that shuffles, and began two passes with the same indices."""
    batches: int = 0
    """Batches at their beginning that were compared."""
    twins: str = ""
    """A source of random numbers that gave all workers of a pass the same ones."""
    workers: int = 0
    """How many workers they were."""
    repeats: str = ""
    """A source that gave the first worker of two passes the same ones, for other examples."""


class EvaluationFacts(NamedTuple):
    """Evaluations in which the model was in training mode."""

    step: int
    """The update before which the newest of them came."""
    calls: int = 0
    """Calls of the model without gradients, in a row, when the loss was seen."""
    loss: str = ""
    """Operation that took what the model had returned."""
    dropout: tuple[str, ...] = ()
    """Layers that drop."""
    norms: tuple[str, ...] = ()
    """Layers that take statistics of the batch, and learn them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFacts:
    """Rows that are evaluated and trained on."""

    shared: int
    """Evaluated rows that had been trained on."""
    rows: int
    """Evaluated rows that were compared."""
    step: int
    """The update before which they were evaluated."""
    trained: int
    """Training rows that they were compared with."""
    whole: bool = False
    """All of them, or nearly so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFacts:
    """Updates whose micro-batches have losses that add up, each of them a mean."""

    count: int
    """Micro-batches of an update."""
    mean: str
    """Autograd node that takes the mean of each, `NllLoss`."""
    given: bool
    """`guard.step` was given the micro-batches."""
    sure: bool
    """Each loss belongs to a batch of its own, as a loader or `guard.step` shows."""


# --- Ranges of the floating-point formats, without torch.


class Format(NamedTuple):
    """Largest finite number, smallest positive one, and bits of precision with the hidden one."""

    largest: float
    smallest: float
    bits: int


FORMATS = {
    "float64": Format(1.7976931348623157e308, 5e-324, 53),
    "float32": Format(3.4028234663852886e38, 1.401298464324817e-45, 24),
    "bfloat16": Format(3.3895313892515355e38, 9.183549615799121e-41, 8),
    "float16": Format(65504.0, 2.0**-24, 11),
    "float8_e5m2": Format(57344.0, 2.0**-16, 3),
    "float8_e4m3fn": Format(448.0, 2.0**-9, 4),
}
SHORT = frozenset(FORMATS) - {"float64", "float32"}
"""Half precision and below."""
NARROW = frozenset(name for name in SHORT if FORMATS[name].largest < 1e5)
"""Formats whose range ordinary activations can leave. bfloat16 is not one of them."""


REAL_FORMATS = {
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
    "half": "float16",
}


def plain(dtype: str) -> str:
    """`torch.float16`, `complex64` -> the name of the real format underneath."""
    name = dtype.removeprefix("torch.")
    return REAL_FORMATS.get(name, name)


def largest(dtype: str) -> float:
    """The limit of this dtype; infinite for an unknown one, so that nothing is claimed about it."""
    known = FORMATS.get(plain(dtype))
    return known.largest if known else math.inf


def rounds_to_zero(value: float, dtype: str) -> bool:
    """True when this positive number is 0 once stored in this dtype."""
    known = FORMATS.get(plain(dtype))
    # exactly half of the smallest number is a tie, which rounds to the even 0
    return known is not None and 0 < abs(value) <= known.smallest / 2


def exp_limit(dtype: str, op: str = "exp") -> float:
    """The largest x whose exp(x), or exp2(x), is still finite."""
    return math.log2(largest(dtype)) if "exp2" in op else math.log(largest(dtype))


# --- Families of operations, by the name of their aten packet.


def words(text: str) -> frozenset[str]:
    """A set of names, written as a line."""
    return frozenset(text.split())


def base_name(op: str | None) -> str:
    """`aten.add_` -> `add`; empty for None."""
    return (op or "").removeprefix("aten.").rstrip("_")


PRODUCTS = words(
    """
    mm bmm addmm addbmm baddbmm matmul linear mv addmv dot vdot addr mul multiply addcmul square
    convolution _convolution mkldnn_convolution conv1d conv2d conv3d add sub rsub sum nansum
    mean cumsum prod cumprod pow float_power lerp mse_loss huber_loss smooth_l1_loss l1_loss
    linalg_vector_norm norm linalg_matrix_norm dist _cdist_forward _pdist_forward einsum
    logaddexp cross_entropy_loss axpy _to_copy copy to _euclidean_dist mkldnn_linear
    _addmm_activation add_relu native_dropout gelu silu elu celu selu softplus index_add
    scatter_add var std var_mean std_mean mse_loss_backward convolution_backward
    native_layer_norm_backward threshold_backward embedding_dense_backward foreach_norm
    _thnn_fused_lstm_cell
    """
)
"""Operations that leave the range only because their operands are large."""
STATISTICS = words("std var std_mean var_mean")
NORM_LAYERS = words(
    """
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _batch_norm_with_update _native_batch_norm_legit_no_training cudnn_batch_norm
    miopen_batch_norm _fused_rms_norm rms_norm layer_norm group_norm batch_norm instance_norm
    """
)
SOFTMAXES = words(
    """
    _softmax softmax _log_softmax log_softmax logsumexp _safe_softmax _logcumsumexp logcumsumexp
    _masked_softmax special_log_softmax special_softmax _sparse_softmax
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention scaled_dot_product_attention
    """
)
EVEN = words(
    "sinh cosh i0 special_i0 special_i1 special_modified_bessel_i0 special_modified_bessel_i1"
)
"""Functions that grow as an exponential does to both sides."""
EXPONENTIALS = words("exp exp2 expm1 special_exp2 special_expm1") | EVEN
NLL = words(
    "nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d nll_loss_nd cross_entropy_loss"
)
"""Cross entropy, by the names it has on its way down."""
COUNTED = words("sum nansum count_nonzero numel len size ne eq gt ge lt le any bincount count")
"""What a divisor that counts something is made by."""
MEASURED = words(
    "std var std_mean var_mean linalg_vector_norm norm amax amin max min abs sub sqrt mul pow prod "
    "clamp"
)
"""What a divisor that measures something is made by."""
CURVED = words(
    """
    log log2 log10 log1p exp exp2 expm1 sqrt rsqrt sin cos tan tanh sigmoid erf atan softplus
    relu div true_divide reciprocal mean _softmax softmax rand randn uniform cumprod lerp
    """
)
"""What never gives a count, whatever it was made from."""


# --- One bad step as the rules see it: origin, reading, verdict, run, and the usual questions.


NOWHERE = Origin(step=0, phase=cast(Phase, ""))


@record
class Case:
    """A bad step. Every question has a harmless answer where nothing is known."""

    reading: Reading
    verdict: Verdict
    origin: Origin | None = None
    facts: RunFacts = field(default_factory=RunFacts)
    looks: tuple[Look, ...] = ()
    """Health probes of the run, oldest first, where a healthy run is examined."""
    recent: tuple[Reading, ...] = ()
    """The newest committed steps, oldest first, where a healthy run is examined."""
    ended: bool = False
    """The run is over: what would have happened once an epoch did not."""
    schedule_stood_for: int = 0
    """Steps of a run that is over and never stepped the schedule it gave to the guard."""
    faded_since: int | None = None
    """Step since which every learning rate is next to nothing beside its highest one."""
    habits: dict[str, int] = field(default_factory=dict)
    """How many of the last updates used gradients of the update before (`carried`), dropped some
    before they were used (`discarded`, `thrown`), or used some of another optimizer's loss
    (`foreign`)."""
    first_norm: float | None = None
    """Gradient norm of the first step."""
    first_loss: float | None = None
    """Size of the loss of the first step."""
    shrinks_by: float = 0.0
    """Share of a weight that weight decay takes in one update: learning rate times decay."""
    same_batch: int = 0
    """Step up to which the batches were the same, each in new memory; 0: they differ."""
    frozen: tuple[str, ...] = ()
    """Parameters of the optimizer that stay frozen beside others of their module that train."""
    unreached: tuple[str, ...] = ()
    """Trainable parameters of the optimizer that have not had a gradient yet."""
    resume: ResumeFacts | None = None
    """What this run goes on from; None where it does not."""
    targets: TargetFacts | None = None
    """What the first batches teach, where they are those of a causal language model."""
    weights: WeightFacts | None = None
    """Where the weights of the model come from."""
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    """Passes and workers that should differ, and do not."""
    evaluation: EvaluationFacts | None = None
    """Evaluations in training mode."""
    optimizer: str = ""
    """Its class, where a healthy run is examined."""
    overlap: OverlapFacts | None = None
    """Evaluations of rows that are trained on."""
    split: SplitFacts | None = None
    """Micro-batches whose means are added up."""
    audit: AuditFacts | None = None
    """A step that gave other values when it was run again."""

    @property
    def where(self) -> Origin:
        """The origin; one that says nothing where it is not known."""
        return self.origin or NOWHERE

    @property
    def phase(self) -> str:
        return self.where.phase

    @property
    def tensor(self) -> str:
        return self.where.tensor or ""

    @property
    def inputs(self) -> tuple[Operand, ...]:
        return self.where.inputs

    @property
    def output(self) -> Operand | None:
        return self.where.output

    @property
    def evidence(self) -> Evidence:
        """What locating measured around the bad value."""
        return self.where.evidence

    @property
    def said(self) -> dict[str, float | int | str]:
        """The numbers that the verdict rests on."""
        return self.verdict.evidence or {}

    @property
    def op(self) -> str:
        """`aten._foreach_addcdiv_` -> `addcdiv`: in-place and foreach do not matter to a cause."""
        # a custom function may be called as an operation is, and do something else
        if self.evidence.opaque is not None:
            return ""
        # `aten.name`, and the overload after it where there is one
        parts = (self.where.op or "").split(".")
        return parts[:2][-1].removeprefix("_foreach_").rstrip("_")

    @property
    def node(self) -> str:
        """`SqrtBackward0` -> `Sqrt`, `torch::autograd::AccumulateGrad` -> `AccumulateGrad`."""
        if self.evidence.opaque is not None:
            return ""
        return (self.where.node or "").rpartition("::")[2].partition("Backward")[0]

    @property
    def operated(self) -> bool:
        """An operation or a stored tensor is known as the origin."""
        return bool(self.where.op or self.where.tensor)

    @property
    def observed(self) -> bool:
        """The first bad value was seen where it was made or stored, with what went in."""
        evidence = self.evidence
        # the step itself may have written what a module keeps outside its buffers
        kept_outside = evidence.attribute is not None and evidence.constant is not None
        if self.where.reproduced is False or evidence.untraced or kept_outside:
            return False
        if self.where.method in ("replay", "live", "graph"):
            return self.operated
        return self.where.tensor is not None and self.bad_operand is not None

    @property
    def impure(self) -> bool:
        """The loss function was seen to depend on more than its batch."""
        return bool(self.evidence.moves) or self.evidence.different_losses is not None

    def argument(self, name: str) -> Operand | None:
        """An operand by its name in the schema."""
        for operand in self.inputs:
            if operand.name == name:
                return operand
        # a list of tensors, as foreach operators take it: `self[0]`, `self[1]`, ...
        listed = [operand for operand in self.inputs if operand.name.startswith(f"{name}[")]
        for operand in listed:
            if not operand.finite or has_zero(operand):
                return operand
        if listed:
            return listed[0]
        return None

    def stored(self, kind: str) -> str:
        """The first bad stored tensor of a kind (`param:`); empty where the origin is another."""
        if self.tensor:
            if self.tensor.startswith(kind):
                return self.tensor
            return ""
        return next((name for name in self.reading.bad_state if name.startswith(kind)), "")

    @property
    def bad_operand(self) -> Operand | None:
        """The first operand, or else the result, that holds NaN or Inf."""
        for operand in (*self.inputs, self.output):
            if operand is not None and not operand.finite:
                return operand
        return None

    @property
    def zeros(self) -> tuple[Operand, ...]:
        """The operands with a zero at the bad position, or anywhere."""
        return tuple(filter(has_zero, self.inputs))

    @property
    def dtype(self) -> str:
        """The floating-point dtype of the result, or of the first operand that has one."""
        for operand in (self.output, *self.inputs):
            if operand is not None and plain(operand.dtype) in FORMATS:
                return plain(operand.dtype)
        return ""

    @property
    def short(self) -> bool:
        """Half precision or below."""
        return self.dtype in SHORT

    @property
    def narrow(self) -> bool:
        """Half precision with a small range: float16 and below, not bfloat16."""
        return self.dtype in NARROW

    @property
    def finite_inputs(self) -> bool:
        return all(operand.finite for operand in self.inputs)

    @property
    def makes_nan(self) -> bool:
        """The result holds NaN; also True where the result was not described."""
        return self.output is None or self.output.nan > 0

    @property
    def makes_inf(self) -> bool:
        """The result holds an infinity; also True where the result was not described."""
        return self.output is None or self.output.posinf + self.output.neginf > 0

    @property
    def magnitude(self) -> float:
        """Largest finite absolute value that went in."""
        return max(map(reach, self.inputs), default=0.0)

    @property
    def loss_finite(self) -> bool:
        losses = (self.reading.loss, *self.reading.micro_losses)
        known = [value for value in losses if value is not None]
        return bool(known) and all(map(math.isfinite, known))

    @property
    def forward(self) -> bool:
        return self.phase in ("forward", "loss", "input")

    @property
    def backward(self) -> bool:
        return self.phase == "backward"

    @property
    def in_update(self) -> bool:
        return self.phase == "optimizer"

    @property
    def computes(self) -> bool:
        """Values are computed here, not their slopes: in a forward, a loss or an optimizer."""
        return self.forward or self.in_update

    @property
    def pair(self) -> tuple[Look, ...]:
        """The newest two probes: what a single one shows may be the start of a run."""
        return self.looks[-2:]

    @property
    def paired(self) -> bool:
        return len(self.looks) > 1

    @property
    def last(self) -> Look:
        return self.looks[-1]

    @property
    def first(self) -> Look:
        """The look before the last one."""
        return self.looks[-2]

    @property
    def unselected(self) -> bool:
        """The bad value sits in a branch that `where` did not take."""
        return self.evidence.unselected

    @property
    def absorbed(self) -> bool:
        """An infinity originated in the forward, yet the loss is finite: something absorbed it."""
        if self.evidence.absorbed:
            return True
        # no function turns NaN into a number, so only an infinity can be absorbed
        only_inf = self.output is not None and self.makes_inf and not self.makes_nan
        return self.forward and only_inf and self.loss_finite and not self.reading.grads_finite

    @property
    def wider(self) -> str:
        """The dtype in which the same operation is finite, where that was tried."""
        return plain(self.evidence.finite_in or "")

    @property
    def place(self) -> str:
        """The operation and where it stands, for a sentence."""
        if self.origin is None:
            return "the step"
        return place(self.origin, self.origin.op or self.tensor or "an operation")

    @property
    def overflows_by_scale(self) -> bool:
        """The gradients are finite at loss scale 1."""
        by_scale = self.reading.overflow or self.evidence.scale_overflow
        return by_scale and not self.reading.grads_finite

    @property
    def confirmed_samples(self) -> str:
        """The guilty samples in words; empty when none was confirmed."""
        if not self.where.samples:
            return ""
        which = ", ".join(map(str, self.where.samples))
        # people count from 1
        number = self.where.micro_batch
        batch = f" of micro-batch {number + 1}" if number else ""
        return f"sample {which}{batch} causes it: without it the step is finite"


def met(operand: Operand) -> tuple[float, float]:
    """What stood at the bad position: that one element where it is known, else the whole range."""
    element = _element(operand)
    return (low(operand), high(operand)) if element is None else (element, element)


def low(operand: Operand) -> float:
    """The smallest finite element; of a Python number, the number."""
    return min(_known(operand), default=math.nan)


def high(operand: Operand) -> float:
    """The largest finite element; of a Python number, the number."""
    return max(_known(operand), default=math.nan)


def reach(operand: Operand) -> float:
    """Largest finite absolute value."""
    return max(map(abs, _known(operand)), default=0.0)


def _known(operand: Operand) -> list[float]:
    stated = (operand.min, operand.max, operand.value)
    return [value for value in stated if value is not None and math.isfinite(value)]


def _element(operand: Operand) -> float | None:
    """The element at the bad position, where it is known and finite."""
    if operand.index is None or operand.value is None or not math.isfinite(operand.value):
        return None
    return operand.value


def has_zero(operand: Operand | None) -> bool:
    """A zero at the bad position where that is known, else a zero anywhere."""
    if operand is None:
        return False
    element = _element(operand)
    if element is not None:
        return element == 0.0
    if operand.zeros > 0 or operand.value == 0.0:
        return True
    return operand.min == 0.0 and operand.max == 0.0


def elements(operand: Operand) -> int:
    """How many elements the operand has."""
    return math.prod(operand.shape)
