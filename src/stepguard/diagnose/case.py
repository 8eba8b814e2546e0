"""One bad step as the rules see it: origin, reading, verdict, run, and the usual questions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from stepguard.records import Evidence, Operand, Origin, Reading, Verdict
from stepguard.records.incident import NO_EVIDENCE, place
from stepguard.records.probes import Look, ParameterLook

# --- Where a series of numbers runs to: the step at which it meets a limit, with an interval.


WINDOWS = (64, 32, 16, 8)
"""How many of the newest points are tried, the longest stretch first: the start of a run is often
another movement than its end."""
MOST_POINTS = 16
"""A longer stretch is thinned out: slopes of all pairs are taken."""
SLOWING = 0.5
"""A second half that is slower than this share of the first is levelling off."""
JUMP = 0.5
"""Share of the whole change between two neighbours that makes it a jump."""
LIKELY_SLOPES = (0.1, 0.9)
"""Shares of all pairs that are slower than the ends of the interval."""
FARTHEST_END = 10.0
"""An interval ends at this many times the distance at the latest."""

Points = Sequence[tuple[int, float]]
"""Step and value, oldest first. Values that grow by factors are given as logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clarity:
    """From where on a trend counts."""

    fewest: int = 5
    """Points."""
    agreement: float = 0.8
    """Kendall's tau: 0.8 is nine of ten pairs that agree."""
    farthest: float = 1.0
    """How far ahead a forecast may reach, in lengths of what was seen."""


CLEAR = Clarity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a series meets its limit if it goes on as it did."""

    step: int
    earliest: int
    latest: int
    slope: float
    """Change of the value in one step."""
    since: int
    """First step of the trend."""


def crossing(
    points: Points, limit: float, *, rising: bool, clarity: Clarity = CLEAR
) -> Crossing | None:
    """The step at which the series meets `limit`; None where no trend is clear or it is far."""
    sign = 1.0 if rising else -1.0
    known = [(step, sign * value) for step, value in points if math.isfinite(value)]
    for length in (*WINDOWS, clarity.fewest):
        if clarity.fewest <= length and clarity.fewest <= len(known):
            found = _in_window(known[-length:], sign * limit, clarity)
            if found is not None:
                return Crossing(
                    step=found.step,
                    earliest=found.earliest,
                    latest=found.latest,
                    slope=sign * found.slope,
                    since=found.since,
                )
    return None


def _in_window(known: Points, limit: float, clarity: Clarity) -> Crossing | None:
    began, first = known[0]
    now, newest = known[-1]
    room = limit - newest
    # asked first, since it is cheap and nearly always ends the matter
    if room <= 0.0 or room > 2.0 * clarity.farthest * (newest - first):
        return None
    known = thinned(known)
    slopes = pair_slopes(known)
    slope = median(slopes) if slopes else 0.0
    if slope <= 0.0 or agreement(known) < clarity.agreement:
        return None
    if levelling_off(known) or is_jump(known):
        return None
    ahead = room / slope
    if ahead > clarity.farthest * (now - began):
        return None
    slowest, fastest = likely_slopes(known, slopes)
    latest = FARTHEST_END * ahead
    if slowest > 0.0:
        latest = min(room / slowest, latest)
    return Crossing(
        step=now + math.ceil(ahead),
        earliest=now + math.ceil(room / fastest),
        latest=now + math.ceil(latest),
        slope=slope,
        since=began,
    )


def thinned(points: Points) -> Points:
    """Evenly spread points, the newest one among them."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points[::-stride][::-1]


def pair_slopes(points: Points) -> list[float]:
    """Slope between every two points: their median does not follow single outliers (Theil-Sen)."""
    slopes = []
    for later in range(len(points)):
        for earlier in range(later):
            steps = points[later][0] - points[earlier][0]
            if steps > 0:
                slopes.append((points[later][1] - points[earlier][1]) / steps)
    return slopes


def likely_slopes(points: Points, slopes: Sequence[float]) -> tuple[float, float]:
    """A slow and a fast slope: of single pairs, and of the newer half where the series bends."""
    ordered = sorted(slopes)
    slow = ordered[int(LIKELY_SLOPES[0] * (len(ordered) - 1))]
    fast = ordered[int(LIKELY_SLOPES[1] * (len(ordered) - 1))]
    newer = _mean_slope(points[len(points) // 2 :])
    return min(slow, newer), max(fast, newer)


def agreement(points: Points) -> float:
    """Kendall's tau: 1 where every later value is the larger one."""
    slopes = pair_slopes(points)
    if not slopes:
        return 0.0
    up = sum(slope > 0 for slope in slopes)
    down = sum(slope < 0 for slope in slopes)
    return (up - down) / len(slopes)


def levelling_off(points: Points) -> bool:
    """The second half rises more slowly than the first."""
    middle = len(points) // 2
    first = _mean_slope(points[: middle + 1])
    second = _mean_slope(points[middle:])
    return second < SLOWING * first


def is_jump(points: Points) -> bool:
    """Nearly all of the change came at once, as where harder data begin."""
    changes = [after[1] - before[1] for before, after in itertools.pairwise(points)]
    return max(changes) > JUMP * (points[-1][1] - points[0][1])


def _mean_slope(points: Points) -> float:
    steps = points[-1][0] - points[0][0]
    if steps <= 0:
        return 0.0
    return (points[-1][1] - points[0][1]) / steps


# --- Plain numbers about the run that a rule may lean on besides the bad step itself.


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


# --- Ranges of the floating-point formats, without torch.


@dataclass(frozen=True, slots=True)
class Format:
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


def plain(dtype: str) -> str:
    """`torch.float16`, `complex64` -> the name of the real format underneath."""
    name = dtype.removeprefix("torch.")
    return {
        "complex32": "float16",
        "complex64": "float32",
        "complex128": "float64",
        "half": "float16",
    }.get(name, name)


def floating(dtype: str) -> bool:
    return plain(dtype) in FORMATS


def largest(dtype: str) -> float:
    """The limit of this dtype; infinite for an unknown one, so that nothing is claimed about it."""
    known = FORMATS.get(plain(dtype))
    if known:
        return known.largest
    return math.inf


def rounds_to_zero(value: float, dtype: str) -> bool:
    """True when this positive number is 0 once stored in this dtype."""
    known = FORMATS.get(plain(dtype))
    # exactly half of the smallest number is a tie, which rounds to the even 0
    return known is not None and 0 < abs(value) <= known.smallest / 2


def exp_limit(dtype: str, op: str = "exp") -> float:
    """The largest x whose exp(x), or exp2(x), is still finite."""
    limit = largest(dtype)
    if not math.isfinite(limit):
        return math.inf
    return math.log2(limit) if "exp2" in op else math.log(limit)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bad step. Every question has a harmless answer where nothing is known."""

    reading: Reading
    verdict: Verdict
    origin: Origin | None = None
    facts: RunFacts = field(default_factory=RunFacts)
    looks: tuple[Look, ...] = ()
    """Deep looks of the run, oldest first, where a healthy run is examined."""
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

    @property
    def phase(self) -> str:
        if self.origin:
            return self.origin.phase
        return ""

    @property
    def op(self) -> str:
        """`aten._foreach_addcdiv_` -> `addcdiv`: in-place and foreach do not matter to a cause."""
        packet = ""
        # a custom function may be called as an operation is, and do something else
        if self.origin and self.evidence.opaque is None:
            packet = self.origin.op or ""
        # `aten.name`, and the overload after it where there is one
        parts = packet.split(".")
        name = parts[1] if len(parts) > 1 else parts[0]
        return name.removeprefix("_foreach_").rstrip("_")

    @property
    def node(self) -> str:
        """`SqrtBackward0` -> `Sqrt`, `torch::autograd::AccumulateGrad` -> `AccumulateGrad`."""
        full = ""
        if self.origin and self.evidence.opaque is None:
            full = self.origin.node or ""
        name = full.rpartition("::")[2]
        return name.partition("Backward")[0]

    @property
    def operated(self) -> bool:
        """An operation or a stored tensor is known as the origin."""
        return self.origin is not None and bool(self.origin.op or self.origin.tensor)

    @property
    def observed(self) -> bool:
        """The first bad value was seen where it was made or stored, with what went in."""
        origin = self.origin
        if origin is None or origin.reproduced is False or self.evidence.untraced:
            return False
        if self.evidence.attribute is not None and self.evidence.constant is not None:
            # the step itself may have written what a module keeps outside its buffers
            return False
        if origin.method in ("replay", "live"):
            return self.operated
        return origin.tensor is not None and self.bad_operand is not None

    @property
    def tensor(self) -> str:
        if self.origin:
            return self.origin.tensor or ""
        return ""

    @property
    def inputs(self) -> tuple[Operand, ...]:
        if self.origin:
            return self.origin.inputs
        return ()

    @property
    def output(self) -> Operand | None:
        if self.origin:
            return self.origin.output
        return None

    @property
    def evidence(self) -> Evidence:
        """What locating measured around the bad value."""
        if self.origin:
            return self.origin.evidence
        return NO_EVIDENCE

    @property
    def impure(self) -> bool:
        """The loss function was seen to depend on more than its batch."""
        return bool(self.evidence.moves) or self.evidence.different_losses is not None

    def argument(self, name: str, position: int) -> Operand | None:
        """An operand by its name in the schema, or by position where operands carry no names."""
        for operand in self.inputs:
            if operand.name == name:
                return operand
        # a list of tensors, as foreach operators take it: `self[0]`, `self[1]`, ...
        listed = [operand for operand in self.inputs if operand.name.startswith(f"{name}[")]
        if listed:
            return _most_telling(listed)
        if position < len(self.inputs) and not self.inputs[position].name:
            return self.inputs[position]
        return None

    @property
    def bad_operand(self) -> Operand | None:
        """The first operand, or else the result, that holds NaN or Inf."""
        for operand in (*self.inputs, self.output):
            if operand is not None and not operand.finite:
                return operand
        return None

    @property
    def dtype(self) -> str:
        """The floating-point dtype of the result, or of the first operand that has one."""
        for operand in (self.output, *self.inputs):
            if operand is not None and floating(operand.dtype):
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
        return max((reach(operand) for operand in self.inputs), default=0.0)

    @property
    def loss_finite(self) -> bool:
        losses = (self.reading.loss, *self.reading.micro_losses)
        known = [value for value in losses if value is not None]
        return bool(known) and all(math.isfinite(value) for value in known)

    @property
    def forward(self) -> bool:
        return self.phase in ("forward", "loss", "input")

    @property
    def computes(self) -> bool:
        """Values are computed here, not their slopes: in a forward, a loss or an optimizer."""
        return self.forward or self.phase == "optimizer"

    @property
    def unselected(self) -> bool:
        """The bad value sits in a branch that `where` did not take."""
        return self.evidence.unselected

    @property
    def absorbed(self) -> bool:
        """An infinity was born in forward, yet the loss is finite: something swallowed it."""
        if self.evidence.absorbed:
            return True
        # no function turns NaN into a number, so only an infinity can be swallowed
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
        return not self.reading.grads_finite and (
            self.reading.overflow or self.evidence.scale_overflow
        )

    @property
    def confirmed_samples(self) -> str:
        """The guilty samples in words; empty when none was confirmed."""
        if self.origin is None or not self.origin.samples:
            return ""
        which = ", ".join(map(str, self.origin.samples))
        batch = ""
        if self.origin.micro_batch:
            # people count from 1
            batch = f" of micro-batch {self.origin.micro_batch + 1}"
        return f"sample {which}{batch} causes it: without it the step is finite"


def _most_telling(operands: list[Operand]) -> Operand:
    """The first that holds NaN, Inf or 0, else the first."""
    for operand in operands:
        if not operand.finite or has_zero(operand):
            return operand
    return operands[0]


def met(operand: Operand) -> tuple[float, float]:
    """What stood at the bad position: that one element where it is known, else the whole range."""
    element = _element(operand)
    if element is None:
        return _ends(operand)
    return (element, element)


def low(operand: Operand) -> float:
    """The smallest finite element; of a Python number, the number."""
    return _ends(operand)[0]


def high(operand: Operand) -> float:
    """The largest finite element; of a Python number, the number."""
    return _ends(operand)[1]


def _element(operand: Operand) -> float | None:
    """The element at the bad position, where it is known and finite."""
    if operand.index is None or operand.value is None or not math.isfinite(operand.value):
        return None
    return operand.value


def _ends(operand: Operand) -> tuple[float, float]:
    stated = (operand.min, operand.max, operand.value)
    known = [value for value in stated if value is not None and math.isfinite(value)]
    if not known:
        return math.nan, math.nan
    return min(known), max(known)


def reach(operand: Operand) -> float:
    """Largest finite absolute value."""
    small, big = _ends(operand)
    if math.isnan(small):
        return 0.0
    return max(abs(small), abs(big))


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


# --- Questions that several rules on healthy runs ask of the looks.


ENOUGH_LOOKS = 2
"""Looks in a row that must agree, where one alone may be the start of a run."""


def newest_look(case: Case) -> Look | None:
    """The look that a rule is asked about."""
    if not case.looks:
        return None
    return case.looks[-1]


def last_looks(case: Case, count: int = ENOUGH_LOOKS) -> tuple[Look, ...]:
    """The newest looks; none of them where there are fewer than asked for."""
    if len(case.looks) < count:
        return ()
    return case.looks[-count:]


def in_all(looks: Sequence[Look], names: Callable[[Look], set[str]]) -> list[str]:
    """Names that every one of these looks gives, in the order of the alphabet."""
    if not looks:
        return []
    common = names(looks[0])
    for look in looks[1:]:
        common &= names(look)
    return sorted(common)


def trained(look: Look) -> list[ParameterLook]:
    """Parameters that an optimizer updates and that have a gradient."""
    return [one for one in look.parameters if one.owned and one.gradient is not None]


def unchanged(looks: Sequence[Look]) -> set[str]:
    """Parameters that hold the same numbers at every one of these looks: nobody updates them."""
    found = {one.name for one in looks[-1].parameters}
    newest = {one.name: one.weight for one in looks[-1].parameters}
    for look in looks[:-1]:
        found &= {one.name for one in look.parameters if newest.get(one.name) == one.weight}
    return found


def rate_is_zero(case: Case) -> bool:
    """No learning rate of the newest step moves anything."""
    return bool(case.reading.lr) and not any(case.reading.lr)


def named(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown
