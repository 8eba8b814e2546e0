"""Vocabulary of `Origin.notes`: facts for the rules that name a cause. One fact a note, `key` or
`key=value`.

Floats are written as `%.6g`, operators as `aten.name`. A note appears only when it was measured.
`facts_of` reads them back.

Where the value went
    where=unselected         the bad value sits in a branch a `where`, `masked_fill` or boolean
    index does not select
    selected_against=aten.sqrt        the forward operation of that branch, when its value itself
    was bad
    absorbed=forward         it vanished in the forward (loss finite) and came back as NaN in the
    backward
    absorbed_by=aten.erf     the operation that swallowed it
    discarded_by=aten.index  a NaN of the forward was left out of the loss by this selection; its
    gradient was not
    then=aten._softmax       the operation that first turned a born infinity into NaN
    recomputed               only seen in the second forward of a checkpointed block
    inner_grad               born in a gradient that the forward itself computes (gradient penalty,
    forces)
    tame_inf                 an infinity written on purpose (a mask) went in

What the operation did, at the bad element (ROLE is denominator, argument or exponent)
    ROLE_from=aten.std       who computed that operand, behind casts and copies
    ROLE_root=batch:mask     the only stored tensor it was computed from, if that is one batch
    tensor
    eps_vanished=1e-08       an epsilon on the way to that operand is 0 in float16
    denominator=zero         division by exactly 0          numerator=zero    0 / 0
    denominator_fractional   some divisors are no whole numbers           denominator_learned
    computed from weights
    denominator_value=1e-40  tiny, not zero
    argument=zero|negative   of log, sqrt, pow, rsqrt, a variance        argument_value=-2.5
    out_of_domain=1.02       acos, asin, atanh, acosh, erfinv
    negative_power           0 raised to a power below 0
    exponent=104.3           of exp, exp2, expm1, sinh, cosh
    zero_times_inf, inf_minus_inf     with infinities among the operands
    masked_rows=2 rows=8     softmax, logsumexp or attention rows that are masked throughout
    reduced=0                mean, max ... over no element  one_element       std or var of a single
    one
    valid_targets=0 targets=8         targets that count, and all of them
    target_probability=zero  the chosen class has probability 0 (its log is -inf)
    target_out_of_domain=1.2 a target outside what the loss allows
    ctc_infeasible=1         CTC targets longer than their input allows
    upstream_grad=zero       backward: the gradient that came in was 0 at the bad element (0 * inf,
    0 / 0)
    singular_at=0            backward: finite operand at which the derivative breaks
    bad=3/40                 non-finite elements of the output
    uninitialised            torch.empty memory was read before it was written
    constant=nan             a tensor from outside model and batch was already bad
    attribute=head.center    ... and it is this one, kept by a module outside its parameters and
    buffers
    number=other:nan         a Python number given to the operation is NaN, or infinite where one
    computes with it

Precision
    half                     operands or output are float16 or bfloat16
    dtype_limit=65504        largest number of the output's dtype
    finite_in=float32        the same operation on the same operands is finite in this wider dtype
    autocast=float16         the autocast context that the forward pass ran in
    scale=65536              loss scale of the step         overflow=scale    it is finite at scale
    1
    eps=1e-08 eps_underflow  the optimizer's epsilon, and that it is 0 in the parameter's dtype
    finite_norm=1e+21        norm of the gradients in float64, where float32 overflows

Data and state
    huge=param:head.weight   finite, but up to 1e15 and beyond, and an operand of what overflowed
    batch_max=400            largest finite magnitude in the micro-batch
    sample_max=1e+30 others_max=3.1   the named samples against all others
    bad_elements=3 elements=1024      of the stored tensor
    parameter=head.weight    whose optimizer slot it is
    lr=4                     highest learning rate          repeat_loss=12.5  an earlier batch on
    the present weights

Replay
    compiled-only            the compiled step is bad, the eager replay is clean
    not-reproduced           the replay is clean
    transient                ... and run again it gives the same bits each time
    nondeterministic         ... but run again it gives different bits, so the step itself is
    unsteady
    losses=0.31 and 0.74     ... and these finite losses of two replays are too far apart for
    rounding
    moves=the number `n`     state of the loss function's own that a replay changes
    departs=...              the replay is bad in another way than the step was: +inf then, -inf now
    no-replay=reason         none was possible              replay-error=TypeError: ...   the user's
    code failed in it
    untraced                 bad again, but no operation of the trace explains it
    unseen=aten.name         results of this operator could not be looked at
    collectives=local        collectives of the loss function were answered with this rank's own
    values
    samples=confounded       leaving samples out does not separate guilty from innocent ones
"""

from __future__ import annotations

Fact = str


def fact(key: str, value: object = None) -> Fact:
    """One note; floats are shortened."""
    if value is None:
        return key
    return f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"


def facts_of(notes: tuple[str, ...]) -> dict[str, str]:
    """Notes as a mapping; a note without a value maps to the empty string."""
    return {key: value for key, _, value in (note.partition("=") for note in notes)}
