"""Vocabulary of `Origin.notes`: facts for the rules that name a cause. One fact a note, `key` or `key=value`.

Numbers are written with `repr` precision of `%.6g`; operators as `aten.name`; a note appears only when it was measured.

Where the value went
    where=unselected         the bad value sits in a branch a `where`, `masked_fill` or boolean index does not select
    absorbed=forward         it vanished in the forward (loss finite) and came back as NaN in the backward
    absorbed_by=aten.erf     the operation that swallowed it
    then=aten._softmax       the operation that first turned a born infinity into NaN
    recomputed               the bad value is seen in a checkpointed block
    inner_grad               born in a gradient that the forward itself computes (gradient penalty, forces)

What the operation did (elements at the bad position)
    denominator=zero         a division by exactly 0         denominator_from=aten.std   who computed it
    numerator=zero           0 / 0                           denominator_value=1e-40     tiny, not zero
    argument=zero|negative   of log, sqrt, pow, rsqrt ...    argument_from=aten._softmax who computed it
    argument_value=-2.5      argument_root=batch:box         the only stored float tensor it was computed from
    out_of_domain=1.02       acos, asin, atanh ...           exponent=104.3 exponent_from=aten.mm
    zero_times_inf           inf_minus_inf                   negative_power (0 ** -1)
    masked_rows=2 rows=8     softmax or logsumexp rows that are -inf throughout
    reduced=0                mean, max ... over no element   one_element  std or var of a single one
    valid_targets=0          every target is ignore_index    targets=8
    target_probability=zero  the chosen class has probability 0 (its logit is -inf)
    target_out_of_domain=1.2 a target outside what the loss allows (a probability below 0 or above 1, a negative rate)
    ctc_infeasible=1         CTC targets longer than their input allows
    upstream_grad=zero       backward: the gradient that came in was 0 at the bad element (0 * inf, 0 / 0)
    singular_at=0            backward: the value at which the derivative is infinite
    bad=3/40                 how many elements of the output are non-finite
    tame_inf                 an infinity written on purpose went in
    uninitialised            torch.empty memory was read before it was written
    constant=nan             a tensor from outside model and batch was already NaN

Precision
    dtype_limit=65504        largest number of the output's dtype
    finite_in=float32        the same operation on the same operands is finite in this wider dtype
    half                     operands or output are float16 or bfloat16
    scale=65536              loss scale of the step          overflow=scale   finite at scale 1
    eps_underflow eps=1e-08  the optimizer's epsilon is 0 in the parameter's dtype
    finite_norm=1e+21        the norm of the gradients in float64 where float32 overflows

Data and state
    batch_max=400            largest finite magnitude in the micro-batch
    sample_max=1e+30 others_max=3.1   the named samples against all others
    bad_elements=3           non-finite elements of the stored tensor      elements=1024
    lr=4 lr_jump             learning rate; a jump needs history and is left to the rules
    repeat_loss=12.5         an earlier batch on the present weights

Replay
    compiled-only            the compiled step is bad, the eager replay is clean
    not-reproduced           the replay is clean
    no-replay=reason         none was possible              replay-error=TypeError: ...  the user's code failed in it
    samples=confounded       leaving samples out does not separate guilty from innocent ones
    collectives=local        collectives of the loss function were replaced by this rank's own values
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
