"""Facts that were measured around a bad value: locating fills them in, the rules read them.

Every field may stay at its default: then the fact was not measured, or does not hold. Operations
are named `aten.name`, stored tensors `param:NAME`, `buffer:NAME` or `batch:NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evidence:
    """One record for one origin. `first | second` holds the facts of both."""

    # --- where the value went

    unselected: bool = False
    """The bad value sits in a branch that `where`, `masked_fill` or a boolean index left out."""
    selected_against: str | None = None
    """The forward operation of that branch, where its value itself was bad."""
    absorbed: bool = False
    """It vanished in the forward (the loss is finite) and came back as NaN in the backward."""
    absorbed_by: str | None = None
    """The operation that turned it into a finite value."""
    discarded_by: str | None = None
    """The selection that left a NaN of the forward out of the loss, but not out of the gradient."""
    turned_nan_by: str | None = None
    """The operation that first turned a born infinity into NaN."""
    chosen_by: str | None = None
    """What the condition of a `where` looked at, where that `where` chose a NaN constant."""
    recomputed: bool = False
    """Seen only in the second forward of a checkpointed block."""
    inner_gradient: bool = False
    """Born in a gradient that the forward itself computes (gradient penalty, forces)."""
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
    """Of a logarithm, root, power or variance."""
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
    constant: Literal["nan", "inf"] | None = None
    """A tensor from outside model and batch was already bad."""
    attribute: str | None = None
    """Path of the module attribute that holds this constant or this number."""
    number_argument: str | None = None
    """The argument for which a bad Python number was given."""
    number: float | None = None
    """That number: NaN, or infinite where one computes with it."""

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
    """That epsilon is 0 in the parameter's dtype."""
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
    """A finite loss that jumped, replayed with all its samples."""
    loss_without: float | None = None
    """The same without the guilty ones."""
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
    """That loss shows that the weights are lost, so the update is to blame."""
    surfaced_at: str | None = None
    """The operation in which ruined weights first showed."""

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
