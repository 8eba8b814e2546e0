"""One bad step: an Incident only ever gains fields on its way through the pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import Any, Literal, TypeAlias

from stepguard.records.codec import record
from stepguard.records.probes import Look

# --- What the policy chose to do about an incident.


Action = Literal["leave_out", "skip", "retry", "undo", "heal", "rewind", "stop", "note"]
"""`leave_out`: the update was made without the samples that were proven guilty. `undo`: the
optimizer made the bad value; its update was reverted. `heal`: a damaged rank got the state of a
healthy one.
`note`: reported, no action taken.
"""


@record
class Decision:
    """The action that was taken, the reason, and how much of each budget is used."""

    action: Action
    reason: str = ""
    consecutive: int = 0
    """Incidents in a row up to and including this one."""
    total: int = 0
    """Incidents since the run began."""
    lr_factor: float | None = None
    """Multiplies every group's learning rate, with `Policy(on_incident="whatif")`."""
    new_scale: float | None = None
    """The new static loss scale, if the scale was the cause."""
    new_eps: float | None = None
    """The optimizer's new epsilon, with `Policy(on_incident="whatif")`."""
    new_clip: float | None = None
    """The new norm to clip to, with `Policy(on_incident="whatif")`."""
    rewound_to: int | None = None
    """With `rewind`: the optimizer step that the run went back to."""
    left_out: str = ""
    """What was dropped from the update, in words: `sample 5`, `micro-batch 2 of 4`."""
    dropped_micro_batches: tuple[int, ...] = ()
    """With `leave_out`: the micro-batches that were dropped whole, counted from 0."""
    data: str | None = None
    """With `rewind`: `repeat` or `skip` the steps since."""
    not_restored: str = ""
    """What a vetoed update changed and could not be restored, in words; empty if nothing."""


# --- Why it happened, with evidence, and what to do about it.


Safety = Literal["safe", "changes-numbers", "changes-training"]
"""What a remedy changes in healthy steps: nothing, their values, or what is learned."""
Certainty = Literal["certain", "likely", "possible"]
"""How sure a finding is: no other cause fits, others are not excluded, a contributing fact."""


@record
class Edit:
    """Lines of the user's program and their replacement."""

    file: str
    """The source file, as Python knows it."""
    line: int
    """The first of the lines, counted from 1."""
    old: tuple[str, ...]
    """The current lines."""
    new: tuple[str, ...]
    """The new lines."""


@record
class Remedy:
    """One thing the user can do, with a snippet to paste."""

    title: str
    """What to do, in one line."""
    snippet: str = ""
    """Code to paste; may be empty."""
    safety: Safety = "safe"
    """What it changes in healthy steps: nothing, their values, or what is learned."""
    edits: tuple[Edit, ...] = ()
    """The remedy as edits of the program's lines; empty if it is not a code change."""
    needs: tuple[str, ...] = ()
    """Functions of `stepguard.numerics` that the edits call."""
    tried: str = ""
    """Result of running the step with it, or why it was not run; empty without edits."""
    proven: bool = False
    """True if the step was run with it and loss and gradients were finite."""
    loss: float | None = None
    """The loss of the step with it, if it was run."""


@record
class Finding:
    """One cause of an incident, with its evidence and remedies.

    For instance:

        finding = guard.incidents[0].findings[0]
        print(finding.code, finding.title, *finding.evidence)
    """

    code: str
    """Such as `SG204`; `stepguard explain SG204` prints its page."""
    title: str
    """The cause in a few words."""
    evidence: tuple[str, ...] = ()
    """Sentences with numbers: the operand that was 0, the row that was masked."""
    certainty: Certainty = "possible"
    """certain: no other cause fits; likely: others are not excluded; possible: it may contribute.
    """
    remedies: tuple[Remedy, ...] = ()
    """Remedies, the safest first."""


# --- What a Reading means: fine, worth a line, suspicious, or an incident.


VerdictKind = Literal[
    "ok",
    "nonfinite_input",
    "nonfinite_loss",
    "loss_overflow",
    "nonfinite_gradient",
    "nonfinite_parameter",
    "nonfinite_buffer",
    "nonfinite_optimizer_state",
    "infinite_norm",
    "zero_loss",
    "no_labels",
    "scale_calibration",
    "scaler_collapse",
    "spike",
    "drift",
    "lr_mismatch",
    "exception",
    "replica_drift",
    "same_data",
]

FINITE_KINDS: tuple[VerdictKind, ...] = ("spike", "drift")
"""Anomalies of finite numbers: reported, and by default not acted upon."""

Severity = Literal["ok", "note", "suspicion", "incident"]
"""`note` is a journal line; `suspicion` asks for evidence; `incident` is acted upon."""


@record
class Verdict:
    """The judgement of one step: its kind, its severity, and the numbers behind it."""

    kind: VerdictKind = "ok"
    severity: Severity = "ok"
    summary: str = ""
    """One sentence with the value that was wrong."""
    evidence: dict[str, float | int | str] | None = None

    @property
    def bad(self) -> bool:
        """True when the step must not be committed."""
        return self.severity == "incident"

    @property
    def finite_anomaly(self) -> bool:
        """True for a spike or a drift: suspicious, but every number is finite."""
        return self.kind in FINITE_KINDS


OK = Verdict()


# --- The numbers read from one step, with at most one host sync.


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The agreed numbers of one optimizer step. Non-finite floats are kept as they are."""

    # no slots: the defaults are attributes of the class, so that `reading_of` can leave them out

    step: int
    """Index of the optimizer step, counted from 0 over the guard's life."""
    loss: float | None = None
    """Sum of the unscaled micro-batch losses; None if no loss was seen."""
    micro_losses: tuple[float, ...] = ()
    """The loss of each micro-batch, in order."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the loss, added over the micro-batches."""
    followed: dict[str, float] = field(default_factory=dict)
    """Values recorded with `guard.follow`, by name."""
    grad_norm: float | None = None
    """2-norm of all gradients in fp32, after unscaling and before clipping; of sharded ones that
    of all ranks."""
    least_norm: float | None = None
    """Smallest norm of one parameter's gradient; read under optimizers that are not torch's."""
    grads_finite: bool = True
    """Exact: no gradient element is NaN or Inf."""
    clip_factor: float | None = None
    """Factor that clipping applied to the gradients; None without clipping."""
    scale: float | None = None
    """GradScaler scale during the step."""
    lr: tuple[float, ...] = ()
    """Learning rate of each parameter group."""
    schedule: str = ""
    """Name and position of the learning-rate schedule during the step: `OneCycleLR at 33 of 100`.
    Filled for every incident whose schedule can be found."""
    climbs: bool = False
    """The optimizer maximises, so the returned loss should rise."""
    labels: int | None = None
    """Number of targets in the step, if the batch shows it."""
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
    """How many more there are; several ranks exchange only the first names."""
    state_born: bool = False
    """True if `bad_state` was finite before this step's update: the optimizer made it bad."""
    missed: str = ""
    """An update that only this rank refused, in words: its weights now differ from the others'."""
    loss_overflow: bool = False
    """The loss is infinite only because a sum of finite values exceeds its dtype; every gradient is
    finite."""
    overflow: bool = False
    """Gradients are non-finite only because of the loss scale: a replay at scale 1 is finite."""
    repeat_loss: float | None = None
    """Loss of an earlier good batch on the current weights; measured only on suspicion."""
    repeat_before: float | None = None
    """Loss of that batch when it was new: it separates damaged weights from a hard batch."""
    update_ratio: float | None = None
    """Norm of the last update over that of the weights; measured only on suspicion."""
    weights_moved: float | None = None
    """Relative distance of the weights from the last good snapshot; measured only on suspicion."""
    alarm: bool = False
    """Some rank reported a non-finite value."""
    bad_ranks: tuple[int, ...] = ()
    """Ranks whose own loss or gradient was bad before any reduction."""

    @property
    def judged_loss(self) -> float | None:
        """The loss that is equal on every rank, negated where it should rise: lower is better."""
        loss = self.loss if self.shared_loss is None else self.shared_loss
        return -loss if self.climbs and loss is not None else loss

    @property
    def bad_micro_batches(self) -> tuple[int, ...]:
        """Indices of the micro-batches whose loss is not finite."""
        return tuple(i for i, value in enumerate(self.micro_losses) if not math.isfinite(value))


def reading_of(
    *, components: dict[str, float], followed: dict[str, float], **known: Any
) -> Reading:
    """A Reading of what differs from the defaults, in a fifth of the time: one is made every step.

    A frozen dataclass sets each of its thirty fields by a call.
    """
    reading = object.__new__(Reading)
    vars(reading).update(known, components=components, followed=followed)
    return reading


# --- One kernel, run again on the inputs it had by another path.


WitnessPath = Literal[
    "again",
    "reference",
    "math",
    "composite",
    "cpu",
    "eager",
    "unfused",
    "wider",
    "contiguous",
    "slope",
]
"""How the result is computed again: by the kernel once more, the registered function, attention
as matrix products, torch's decomposition, the CPU, eager code, the optimizer's loop, a wider dtype,
contiguous inputs, or as the slope of the kernel's own forward."""
INDEPENDENT: tuple[WitnessPath, ...] = ("reference", "math", "composite", "cpu", "eager", "unfused")
"""Paths that share no code with the kernel."""


@record
class Witness:
    """What another path gave on the inputs on which a kernel gave NaN or Inf."""

    path: WitnessPath
    """Which kind of path."""
    name: str = ""
    """What was run, in words: `math`, `the same kernel in float64`."""
    finite: bool | None = None
    """Everything it gave is finite, within the range of the kernel's dtype; None: not tried."""
    value: float | None = None
    """What it gave at the first element that the kernel got wrong."""
    agrees: bool | None = None
    """It gives the same where the kernel is finite; None: there was nothing to compare."""
    why_not: str = ""
    """Why it was not tried, or why it is not finite, in words."""

    @property
    def independent(self) -> bool:
        return self.path in INDEPENDENT


# --- Facts that were measured around a bad value: locating fills them in, the rules read them.


@record(repr=False)
class Evidence:
    """One record for one origin. `first | second` holds the facts of both."""

    # --- where the value went

    unselected: bool = False
    """The bad value sits in a branch that `where`, `masked_fill` or a boolean index dropped."""
    selected_against: str | None = None
    """The forward operation of that branch, where its value itself was bad."""
    absorbed: bool = False
    """It vanished in the forward (the loss is finite) and came back as NaN in the backward."""
    absorbed_by: str | None = None
    """The operation that turned it into a finite value."""
    discarded_by: str | None = None
    """The selection that left a NaN of the forward out of the loss, but not out of the gradient."""
    turned_nan_by: str | None = None
    """The operation that first turned an infinity into NaN."""
    chosen_by: str | None = None
    """What the condition of a `where` looked at, where that `where` chose a NaN constant."""
    recomputed: bool = False
    """Seen only in the second forward of a checkpointed block."""
    inner_gradient: bool = False
    """Originated in a gradient that the forward itself computes (gradient penalty, forces)."""
    intended_inf: bool = False
    """An infinity that was written on purpose (a mask) went in."""
    as_data: bool = False
    """A stored tensor is bad, but to this guard it is data: a lookup table, another's weights."""

    # --- what the operation did, at the bad element

    zero_denominator: bool = False
    zero_numerator: bool = False
    """0 / 0, where the denominator is zero too."""
    denominator_fractional: bool = False
    """Some divisors are not whole numbers, so they do not count anything."""
    denominator_learned: bool = False
    """The divisor was computed from weights, so it does not count anything."""
    denominator_from: str | None = None
    """The operation that computed the divisor, behind casts and copies."""
    numerator_from: str | None = None
    """The operation that computed what was divided, where that is 0 too."""
    denominator_root: str | None = None
    """The only stored tensor the divisor was computed from, if that is one batch tensor."""
    argument: Literal["zero", "negative"] | None = None
    """Sign of the argument of a logarithm, root, power or variance."""
    argument_from: str | None = None
    argument_root: str | None = None
    negative_power: bool = False
    """0 was raised to a power below 0."""
    zero_times_inf: bool = False
    inf_minus_inf: bool = False
    eps_vanished: float | None = None
    """An epsilon on the way to that operand that its dtype rounds to 0."""
    masked_rows: int | None = None
    """Rows of a softmax, logsumexp or attention that are masked throughout."""
    rows: int | None = None
    """All rows of it."""
    reduced_elements: int | None = None
    """0 for a mean, max ... over no element; 1 for a std or var of a single one."""
    valid_targets: int | None = None
    """Targets that count."""
    targets: int | None = None
    """All targets."""
    zero_target_probability: bool = False
    """The chosen class has probability 0, so its logarithm is -inf."""
    target_out_of_domain: float | None = None
    """A target outside what the loss allows."""
    ctc_infeasible: int | None = None
    """CTC targets that are longer than their input allows."""
    zero_upstream_gradient: bool = False
    """Backward: the gradient that came in was 0 at the bad element (0 * inf, 0 / 0)."""
    singular_at: float | None = None
    """Backward: the finite operand at which the derivative breaks."""
    uninitialised: bool = False
    """Memory of `torch.empty` was read before it was written."""
    opaque: Literal["function", "operator", "module", "code"] | None = None
    """What made the value inside, where no operation is visible: a custom autograd function, an
    operator from outside torch, a module or other code that writes memory by itself.
    """
    witnesses: tuple[Witness, ...] = ()
    """What other paths gave on the inputs of that kernel."""
    constant: Literal["nan", "inf"] | None = None
    """A tensor from outside model and batch was already bad."""
    attribute: str | None = None
    """Path of the module attribute that holds this constant or this number."""
    number_argument: str | None = None
    """The argument for which a bad Python number was given."""
    number: float | None = None
    """The number: NaN, or infinite in a computation."""

    # --- precision

    half_precision: bool = False
    """Operands or output are float16 or bfloat16."""
    dtype_limit: float | None = None
    """The largest number of the output's dtype."""
    finite_in: str | None = None
    """The wider dtype in which the same operation on the same operands is finite."""
    autocast: str | None = None
    """The dtype of the autocast context that the forward pass ran in."""
    scale: float | None = None
    """The loss scale of the step, where it is not 1."""
    scale_overflow: bool = False
    """The step is finite at loss scale 1."""
    eps: float | None = None
    """The optimizer's epsilon."""
    eps_underflow: bool = False
    """The epsilon rounds to 0 in the parameter's dtype."""
    finite_norm: float | None = None
    """Norm of the gradients in float64, where float32 overflows."""

    # --- data and state

    huge_parameter: str | None = None
    """A parameter that is finite, but beyond 1e15, and an operand of what overflowed."""
    huge_buffer: str | None = None
    """A buffer that is finite, but absurdly large, and made what overflowed."""
    batch_max: float | None = None
    """Largest finite magnitude in the micro-batch."""
    sample_max: float | None = None
    """Largest finite magnitude in the guilty samples."""
    others_max: float | None = None
    """Largest finite magnitude in all other samples."""
    loss_with: float | None = None
    """Value of a finite loss that jumped, replayed with all its samples."""
    loss_without: float | None = None
    """Its value replayed without the guilty samples."""
    confounded_samples: bool = False
    """Leaving samples out does not separate guilty from innocent ones."""
    bad_elements: int | None = None
    """Non-finite elements of the stored tensor."""
    elements: int | None = None
    """All elements of the stored tensor."""
    parameter: str | None = None
    """The parameter whose optimizer slot it is."""
    lr: float | None = None
    """The highest learning rate of the step."""
    repeat_loss: float | None = None
    """The loss of an earlier batch on the present weights."""
    weights_ruined: bool = False
    """The repeated loss shows that the weights have diverged, so the update is to blame."""
    surfaced_at: str | None = None
    """The operation in which diverged weights first showed."""

    # --- replay

    no_replay: str | None = None
    """Why no replay was possible."""
    replay_error: str | None = None
    """The exception that the user's code raised in the replay."""
    compiled_only: bool = False
    """The compiled step is bad, the eager replay is clean."""
    same_bits: bool | None = None
    """A clean replay, run several times, gives the same bits each time; None: not tried."""
    different_losses: tuple[float, float] | None = None
    """Finite losses of two replays that are too far apart for rounding."""
    moves: tuple[str, ...] = ()
    """State of the loss function's own that a replay changes, in words."""
    departs: str | None = None
    """How the replay is bad in another way than the step was, in words."""
    untraced: bool = False
    """The replay is bad again, but no operation of the trace explains it."""
    unseen: tuple[str, ...] = ()
    """Operators whose results could not be read."""
    loss_unseen: bool = False
    """A watched loop computed it outside the model, where nothing could be replayed: `guard.loss`
    would have made that possible."""
    local_collectives: bool = False
    """Collectives of the loss function were answered with this rank's own values."""

    def __or__(self, other: Evidence) -> Evidence:
        """The facts of both; where both hold one, that of the left record."""
        return replace(other, **self.stated())

    def __repr__(self) -> str:
        """Only what was measured: there are some sixty fields."""
        facts = ", ".join(f"{name}={value!r}" for name, value in self.stated().items())
        return f"Evidence({facts})"

    def stated(self) -> dict[str, Any]:
        """The facts that were measured, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Write only what was measured: most facts do not apply to one incident."""
        from pydantic_core import core_schema

        schema = handler(source)
        schema["serialization"] = core_schema.plain_serializer_function_ser_schema(cls.stated)
        return schema


NO_EVIDENCE = Evidence()
"""Nothing was measured."""


# --- How records look in a notebook: small HTML without colours of its own, so it fits any theme.


Row: TypeAlias = tuple[str, str]
"""A label, and the lines of text beside it."""
BOX = "border-left:4px solid {color};padding:2px 0 2px 12px;margin:4px 0;line-height:1.4"
LABEL = "text-align:left;vertical-align:top;padding:0 12px 2px 0;opacity:.65;font-weight:600"
VALUE = "text-align:left;vertical-align:top;padding:0 0 2px 0;white-space:pre-wrap"
CODE = f"{VALUE};font-family:monospace"
CODE_ROWS = ("source", "code")
BAD = "#c2410c"
GOOD = "#15803d"


def box(title: str, rows: Iterable[Row], *, bad: bool) -> str:
    """A title and a table of labels and values; rows that say nothing are dropped."""
    table = ""
    for label, said in rows:
        lines = []
        for line in said.splitlines():
            text = escape(line)
            # the line of the source that is meant: `> 5 | ...`
            lines.append(f"<b>{text}</b>" if line.startswith(">") else text)
        if lines:
            style = CODE if label in CODE_ROWS else VALUE
            shown = "\n".join(lines)
            table += f'<tr><th scope="row" style="{LABEL}">{escape(label)}</th>'
            table += f'<td style="{style}">{shown}</td></tr>'
    if table:
        table = f'<table style="border:0">{table}</table>'
    style = BOX.format(color=BAD if bad else GOOD)
    return f'<div style="{style}"><strong>{escape(title)}</strong>{table}</div>'


def number(value: float | None) -> str:
    """Four significant digits, whole numbers in full, or nan, inf, -inf."""
    if value is None:
        return "not read"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"


# --- Where the first harmful value originated.


Phase = Literal["input", "forward", "loss", "backward", "optimizer", "state", "checkpoint"]


@record
class Operand:
    """One tensor or number that went into, or came out of, the operation."""

    name: str = ""
    """Argument name in the operator's schema, or a stored tensor's name."""
    label: str = ""
    """Label for people: the user's expression in the source line, or its role (`the divisor`);
    empty if `name` is clear enough.
    """
    dtype: str = ""
    """Such as `float32`."""
    shape: tuple[int, ...] = ()
    """Sizes, empty for a number."""
    min: float | None = None
    """Smallest finite element."""
    max: float | None = None
    """Largest finite element."""
    nan: int = 0
    """How many elements are NaN."""
    posinf: int = 0
    """How many are +Inf."""
    neginf: int = 0
    """How many are -Inf."""
    zeros: int = 0
    """How many are 0."""
    index: tuple[int, ...] | None = None
    """First non-finite element, or for an operand the element that broke the operation."""
    value: float | None = None
    """The element at `index`, or the number itself for a Python scalar."""
    exponents: tuple[tuple[int, int], ...] = ()
    """Number of elements from 2^n to below 2^(n+1), by n, without zeros and non-finite elements. A
    tensor of more than a million elements is sampled.
    """

    @property
    def finite(self) -> bool:
        return not (self.nan or self.posinf or self.neginf)

    @property
    def called(self) -> str:
        """The label, or else the name."""
        return self.label or self.name

    @property
    def picked(self) -> str:
        """The value that was picked out, and its place."""
        if self.value is None:
            return ""
        at = f" at [{','.join(map(str, self.index))}]" if self.index else ""
        return number(self.value) + at

    @property
    def bad(self) -> str:
        """`3 NaN, 1 +Inf of 8`; empty where all are finite."""
        counted = {"NaN": self.nan, "+Inf": self.posinf, "-Inf": self.neginf}
        bad = ", ".join(f"{n:,} {kind}" for kind, n in counted.items() if n)
        # Of a single number "1 NaN of 1" says nothing more.
        total = math.prod(self.shape)
        if bad and self.shape and total:
            bad += f" of {total:,}"
        return bad

    @property
    def span(self) -> str:
        """From the least to the largest finite value; empty where that is not known."""
        if self.min is None or self.max is None:
            return ""
        return f"{number(self.min)} to {number(self.max)}"

    @property
    def words(self) -> str:
        """dtype, shape, what is wrong in it, and the range of what is not."""
        shape = f" [{','.join(map(str, self.shape))}]" if self.shape else ""
        parts = [f"{self.dtype}{shape}".strip(), self.picked, self.bad]
        if self.zeros:
            parts.append("1 zero" if self.zeros == 1 else f"{self.zeros:,} zeros")
        if self.span and (self.shape or self.value is None):
            parts.append(f"finite {self.span}")
        return "; ".join(filter(None, parts))


@record
class Statement:
    """The user's statement that contains an operation."""

    file: str
    """The source file, as Python knows it."""
    line: int
    """Its first line, counted from 1."""
    text: str
    """Its lines as they are in the file."""
    start: int
    """Where the operation begins in `text`, in bytes of UTF-8."""
    end: int
    """Where it ends."""


@record(repr=False)
class Origin:
    """Where the first harmful value originated, as exactly as it could be confirmed.

    For instance:

        origin = guard.incidents[0].origin
        print(origin.source, origin.op, origin.module, origin.samples)
    """

    step: int
    """Optimizer step, counted from 0."""
    phase: Phase
    """input, forward, loss, backward, optimizer, state or checkpoint. `state`: a parameter, buffer
    or optimizer slot was bad before the step.
    """
    module: str | None = None
    """Dotted path; "" is the root model's own forward, None is outside every module."""
    op: str | None = None
    """The aten packet, for instance `aten._softmax`."""
    node: str | None = None
    """The autograd node, backward only."""
    source: str | None = None
    """`file.py:88` of the user's frame."""
    library: str | None = None
    """`package/file.py:47` of an installed package that the user's line called; None if the
    operation is in the user's line itself.
    """
    context: tuple[str, ...] = ()
    """Source lines around `source`, each with its number."""
    statement: Statement | None = None
    """The statement at `source`, and which part of it the operation is."""
    tensor: str | None = None
    """`batch:x`, `param:NAME`, `buffer:NAME` or `opt:SLOT`, if a stored tensor is the origin."""
    samples: tuple[int, ...] = ()
    """Indices in the batch, each confirmed by dropping it; for a finite loss that jumped, those far
    above all others. Empty if none was found.
    """
    rows: tuple[str, ...] = ()
    """Identities in the order of `samples`: `row 48211` of the data set, `id a.png`; empty if not
    known.
    """
    content: str = ""
    """Content of the first of these samples: dtype, shape and range of its tensors."""
    excerpt: str = field(default="", compare=False)
    """The beginning of its text, if it has any. Shown in this process's terminal only; never
    written to a file or sent to another process.
    """
    micro_batch: int | None = None
    """Micro-batch of the step, counted from 0; None if there is only one or it is unknown."""
    rank: int | None = None
    """Rank where it originated; None if unknown."""
    inputs: tuple[Operand, ...] = ()
    """Inputs of the operation."""
    output: Operand | None = None
    """Output of the operation."""
    method: str = ""
    """How it was found: `replay`, `scan`, `output-gradient`, ..."""
    reproduced: bool | None = None
    """True if a replay reproduces it, False if not (transient), None if no replay was possible."""
    evidence: Evidence = NO_EVIDENCE
    """Facts measured around the bad value, from which the rules name a cause."""
    remarks: tuple[str, ...] = ()
    """Sentences on what was not observed, and what was cut short to save time."""

    @property
    def place(self) -> str:
        """`aten._softmax in layers.3.attn at model.py:88`, as far as it is known."""
        words = [self.tensor or self.op or ""]
        if self.node:
            words.append(f"({self.node})" if words[0] else self.node)
        if self.module is not None:
            words.append(f"in {self.module or 'the model itself'}")
        if self.library:
            words.append(f"at {self.library}")
        if self.source and self.source != self.library:
            words.append(f"called from {self.source}" if self.library else f"at {self.source}")
        return " ".join(words).strip()

    @property
    def culprits(self) -> str:
        """`sample 4 (row 48211)` of the batch; empty where none could be confirmed."""
        said = ""
        if self.samples:
            said = f"sample {', '.join(map(str, self.samples[:8]))}"
        if self.rows:
            said += f" ({', '.join(self.rows[:4])})"
        return said

    def html_rows(self) -> list[Row]:
        """What a notebook shows of it."""
        return [
            ("where", f"{self.phase}: {self.place}" if self.place else self.phase),
            ("sample", self.culprits.partition(" ")[2]),
            ("source", "\n".join(self.context)),
            ("values", "\n".join(f"{one.called or 'input'}: {one.words}" for one in self.inputs)),
            ("note", "\n".join(self.remarks)),
        ]

    def _repr_html_(self) -> str:
        return box(f"Origin of the bad value, step {self.step}", self.html_rows(), bad=True)

    def __repr__(self) -> str:
        said = " ".join(part for part in (self.place, self.culprits) if part)
        return f"<Origin: {self.phase} of step {self.step}, {said or 'place not known'}>"


def with_evidence(origin: Origin, more: Evidence) -> Origin:
    """The origin with further facts; what it states already stays."""
    return replace(origin, evidence=origin.evidence | more)


# --- The place where a bad value originated, in words: the same words in every output.


def place(origin: Origin, what: str = "") -> str:
    """`aten._softmax in layers.3.attn at model.py:88`, as far as it is known.

    `what` names the operation or tensor; by default the stored tensor, or else the operation.
    """
    if not what:
        return origin.place
    return replace(origin, tensor=what).place


def place_and_phase(origin: Origin) -> str:
    """`forward: aten._softmax in layers.3.attn at model.py:88`."""
    where = place(origin)
    return f"{origin.phase}: {where}" if where else origin.phase


# --- One bad step: an Incident only ever gains fields on its way through the pipeline.


@record(repr=False)
class Incident:
    """Everything known about one bad step. Verdict and reading are always there; the rest may be
    empty.

    For instance:

        for incident in guard.incidents:
            print(incident.summary, incident.origin.source, incident.findings[0].code)
    """

    id: str
    """Step and kind, unique in its run: `00000048-nonfinite_loss`."""
    step: int
    """Optimizer step, counted from 0."""
    verdict: Verdict
    """The kind of incident, and a sentence in `verdict.summary`."""
    reading: Reading
    """Measurements of the step: loss, gradient norm, learning rate, bad tensors."""
    origin: Origin | None = None
    """Where the first harmful value originated; None if it was not searched for."""
    findings: tuple[Finding, ...] = ()
    """Causes with evidence, the most certain first."""
    decision: Decision | None = None
    """What was done about it, and why."""
    capsule: str | None = None
    """Folder of the bad step on disk, relative to the run directory."""
    replayable: bool = True
    """The capsule names a script or build function that can run it; a notebook has neither."""
    run: str | None = None
    """Run directory, or None when nothing is written."""
    rank: int = 0
    """Rank that recorded it; `origin.rank` is where it originated."""

    @property
    def stopped(self) -> bool:
        """Whether the policy stopped the run at this incident."""
        # An exception of the user's ends the run by itself, unless their program catches it.
        if self.verdict.kind == "exception" or self.decision is None:
            return False
        return self.decision.action == "stop"

    def html_rows(self) -> list[Row]:
        """What a notebook shows of it."""
        rows = [("what", self.verdict.summary or self.verdict.kind)]
        if self.origin is not None:
            rows += self.origin.html_rows()
        for finding in self.findings[:1]:
            cause = f"{finding.code} {finding.title} ({finding.certainty})"
            rows.append(("why", "\n".join((cause, *finding.evidence))))
        if self.decision is not None:
            rows.append(("done", f"{self.decision.action}: {self.decision.reason}".rstrip(": ")))
        for finding in self.findings[:1]:
            # a notebook shows the first two remedies
            for remedy in finding.remedies[:2]:
                rows.append(("to do", f"{remedy.title}\n{remedy.tried}".strip()))
                rows.append(("code", remedy.snippet))
        return rows

    def _repr_html_(self) -> str:
        return box(f"Incident at step {self.step}", self.html_rows(), bad=True)

    def __repr__(self) -> str:
        return f"<Incident {self.id}: {self.summary}>"

    @property
    def summary(self) -> str:
        """One line: what was wrong, where, why, and what was done."""
        parts = [self.verdict.summary or self.verdict.kind]
        if self.origin is not None:
            where = place_and_phase(self.origin)
            if self.origin.samples or self.origin.rows:
                where += f" {self.origin.culprits}"
            parts.append(where)
        if self.findings:
            parts.append(f"{self.findings[0].code} {self.findings[0].title}")
        if self.decision is not None and self.decision.reason:
            parts.append(f"{self.decision.action} ({self.decision.reason})")
        elif self.decision is not None:
            parts.append(self.decision.action)
        return "; ".join(parts)


# --- What `stepguard doctor` found: sections, each with a status and sentences.


SectionStatus = Literal["fine", "warning", "failed", "corrupt", "not checked"]


@record
class Section:
    """One part of the examination."""

    title: str
    status: SectionStatus
    lines: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    """Exact commands that follow from it."""


@record
class Examination:
    """All sections, in their fixed order."""

    path: str
    sections: tuple[Section, ...]

    @property
    def status(self) -> SectionStatus:
        """The worst of all; what was not checked does not count."""
        found = {section.status for section in self.sections}
        worst = ("corrupt", "failed", "warning")
        for status in worst:
            if status in found:
                return status
        return "fine"


def new_section(title: str, status: SectionStatus, *lines: str, command: str = "") -> Section:
    """A section with these lines, and the command that follows from it."""
    commands = tuple(filter(None, [command]))
    return Section(title=title, status=status, lines=lines, commands=commands)


# --- Where a run's events go: journal, readable log, terminal, TensorBoard, your own loggers.


class Sink:
    """Receives a run's events as they happen. Override the methods you need.

        class Pager(stepguard.Sink):
            def incident(self, incident):
                page(incident.summary)

        guard = stepguard.Guard(model, optimizer, config=GuardConfig(sinks=(Pager(),)))

    Your sink is called on rank 0. If it raises, it is removed and training continues.
    """

    def step(self, reading: Reading, committed: bool) -> None:
        """A step was read; `committed` is False when its update did not happen."""

    def incident(self, incident: Incident) -> None:
        """A step was bad: called once, after it was handled and diagnosed."""

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Any other line of the journal: a note, an internal fault, the end of the run."""

    def look(self, look: Look) -> None:
        """A health probe was taken of a healthy step."""

    def halted(self, incident: Incident, exit_line: str) -> None:
        """The policy stops the run at this incident; `exit_line` is the line for launchers."""

    def close(self) -> None:
        """The guard is closed: flush, and close what this sink opened.

        A sink shared by several guards may receive further events and must reopen itself.
        """

    def __repr__(self) -> str:
        return type(self).__name__
