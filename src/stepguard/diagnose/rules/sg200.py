"""SG201: something was divided by zero."""

from __future__ import annotations

import math

from stepguard.diagnose.case import (
    EVEN,
    EXPONENTIALS,
    NORM_LAYERS,
    SOFTMAXES,
    STATISTICS,
    Case,
    base_name,
    exp_limit,
    has_zero,
    high,
    low,
    reach,
    words,
)
from stepguard.diagnose.rule import (
    DIVISIONS,
    POWERS,
    Proof,
    Rule,
    at_index,
    broken_by,
    call,
    certain,
    counts,
    counts_nothing,
    describe,
    likely,
    log_argument,
    negative_root,
    possible,
    singular_inputs,
    spell,
    zero_divisor,
)
from stepguard.records import Certainty, Operand

# --- SG201: something was divided by zero.


TINY = 1e-30
TINY_NUMBER = 1e-6
SOLVES = words(
    """
    linalg_solve_triangular triangular_solve linalg_solve _linalg_solve_ex linalg_solve_ex
    cholesky_solve linalg_inv linalg_inv_ex inverse linalg_lu_solve cholesky_inverse
    """
)


def recognise_sg201(case: Case) -> Proof | None:
    if case.phase == "optimizer":
        return _own_optimizer(case)
    if not case.forward or case.unselected:
        return None
    divisor = zero_divisor(case)
    if divisor is not None:
        return _by_zero(case, divisor)
    return _no_epsilon(case) or _inside(case) or _singular(case) or _tiny(case)


def _by_zero(case: Case, divisor: Operand) -> Proof:
    sentences = (*_numbers(case, divisor), case.confirmed_samples)
    # a mean over no element is SG102
    if counts_nothing(case, divisor):
        return possible(*sentences)
    # an infinity that the forward swallowed is SG403
    if case.absorbed and case.makes_inf:
        return likely(*sentences)
    return certain(*sentences)


def _own_optimizer(case: Case) -> Proof | None:
    """An update that divides without any epsilon; SG502 says what became of an epsilon."""
    divisor = zero_divisor(case)
    if divisor is None or case.facts.eps is not None or case.narrow:
        return None
    return certain(*_numbers(case, divisor))


def _numbers(case: Case, divisor: Operand) -> tuple[str, str]:
    form = "x / 0 is infinite"
    if case.op == "div" and has_zero(case.argument("self", 0)) and case.makes_nan:
        form = "0 / 0 = NaN"
    made_by = case.evidence.denominator_from
    source = ""
    if made_by:
        source = f"the divisor comes from {made_by}"
    return f"{case.place} divided by zero{at_index(divisor)} ({form}): {describe(divisor)}", source


def _no_epsilon(case: Case) -> Proof | None:
    eps = case.argument("eps", 7)
    if case.op not in NORM_LAYERS or not case.finite_inputs:
        return None
    if eps is None or eps.value is None or eps.value >= TINY:
        return None
    text = (
        f"{case.place} has eps={spell(eps.value)}: where all elements are equal the variance is "
        f"0 and is divided by"
    )
    return likely(text, case.confirmed_samples)


def _inside(case: Case) -> Proof | None:
    """An operator that divides by something it computes itself, as weight norm does by a norm."""
    # the divisor is not among the operands: only locating, which had the tensors, could see it
    if not case.evidence.zero_denominator or case.op in DIVISIONS:
        return None
    what = (case.evidence.denominator_from or "value").removeprefix("aten.")
    text = f"{case.place} divides by a {what} that is 0"
    return certain(text, *map(describe, case.inputs[:2]), case.confirmed_samples)


def _singular(case: Case) -> Proof | None:
    """Solving with a matrix divides by its pivots; of a triangular one, by its diagonal."""
    # solve_triangular calls its matrix `self`, the _ex variants call it `A`
    matrix = case.argument("self", 0) or case.argument("A", 0)
    if case.op not in SOLVES or matrix is None or not case.finite_inputs:
        return None
    text = (
        f"{case.place} divides by the diagonal or pivots of a matrix that is singular: "
        f"{describe(matrix)}"
    )
    return likely(text, case.confirmed_samples)


def _tiny(case: Case) -> Proof | None:
    """A quotient that overflows on a divisor near 0."""
    # in half precision a tiny divisor has been rounded to 0 before: SG302
    if case.short or not case.finite_inputs:
        return None
    found = _divisor(case)
    if found is None:
        return None
    divisor, least = found
    small = divisor.value if divisor.value is not None else low(divisor)
    if math.isnan(small) or not (abs(small) < least or _tiny_number(case, divisor)):
        return None
    text = (
        f"{case.place} divided by {spell(small)}{at_index(divisor)}: so small that the quotient "
        f"overflows"
    )
    return likely(text, case.confirmed_samples)


def _divisor(case: Case) -> tuple[Operand, float] | None:
    """What is divided by, and below which size the quotient overflows."""
    if case.op in POWERS:
        base = case.argument("self", 0)
        exponent = case.argument("exponent", 1)
        if base is None or exponent is None or not low(exponent) < 0:
            return None
        return base, TINY ** (-1 / low(exponent))
    if case.op not in ("div", "reciprocal", "rsqrt"):
        return None
    divisor = case.argument("other", 1) if case.op == "div" else case.argument("self", 0)
    if divisor is None:
        return None
    return (divisor, TINY)


def _tiny_number(case: Case, divisor: Operand) -> bool:
    """A Python number, such as a temperature near 0, that outweighs what it divides."""
    above = case.argument("self", 0)
    if case.op != "div" or above is None:
        return False
    if divisor.shape or divisor.dtype != "float" or not divisor.value:
        return False
    return abs(divisor.value) <= TINY_NUMBER and 1 / abs(divisor.value) >= reach(above)


SG201 = Rule(code="SG201", recognise=recognise_sg201, yields_to=("SG207", "SG301", "SG302"))


# --- SG202: the logarithm of zero or of a negative number.


LOG_NODES = words("Log Log1P Log2 Log10 Logit")
DETERMINANTS = words("_linalg_slogdet linalg_slogdet _linalg_det linalg_det")
LOG_DETERMINANTS = ("_linalg_slogdet", "linalg_slogdet", "logdet")
SATURATING = words(
    "exp erf tanh sigmoid atan clamp clamp_max clamp_min reciprocal div softmax _softmax"
)


def recognise_sg202(case: Case) -> Proof | None:
    if case.unselected:
        return None
    if case.phase == "backward":
        return _gradient(case)
    return _determinant(case) or _logarithm(case)


def _determinant(case: Case) -> Proof | None:
    if case.op in LOG_DETERMINANTS and case.makes_inf:
        return certain(f"{case.place} took the logarithm of a determinant that is 0")
    # logdet answers a negative determinant with a NaN constant, chosen by `where`
    if case.op == "where" and base_name(case.evidence.chosen_by) in DETERMINANTS:
        return certain(f"{case.place}: the determinant is negative and has no logarithm")
    return None


def _logarithm(case: Case) -> Proof | None:
    found = log_argument(case)
    if found is None or not case.computes:
        return None
    operand, least, most = found
    allowed = f"between {spell(least)} and {spell(most)}"
    if math.isinf(most):
        allowed = f"above {spell(least)}"
    numbers = f"{case.place} needs a value {allowed}: {describe(operand)}"
    swallowed = base_name(case.evidence.absorbed_by) in SATURATING
    prove = certain
    if swallowed:
        prove = likely
    return prove(numbers, broken_by(operand), case.confirmed_samples)


def _gradient(case: Case) -> Proof | None:
    # log's backward is grad / x, in which the operand that forward saved is the divisor
    if case.node not in LOG_NODES:
        return None
    for operand in case.inputs:
        if has_zero(operand) or low(operand) < 0:
            numbers = (
                f"{case.place} divides the gradient by the logarithm's argument, which is 0: "
                f"{describe(operand)}"
            )
            return likely(numbers, case.confirmed_samples)
    return None


SG202 = Rule(code="SG202", recognise=recognise_sg202, yields_to=("SG104", "SG301", "SG302"))


# --- SG203: an exponential left the range.


POLYNOMIAL = 4
"""Powers up to here are products: it is the number that is too large, not its exponent."""
REPEATED_PRODUCTS = ("prod", "cumprod", "_linalg_matrix_exp", "linalg_matrix_exp", "matrix_exp")


def recognise_sg203(case: Case) -> Proof | None:
    if case.unselected or not case.makes_inf:
        return None
    exponent = case.argument("self", 0)
    # in any phase: people write exponentials into a backward of their own
    if case.op in EXPONENTIALS and exponent is not None and exponent.finite:
        return _exponential(case, exponent)
    if not case.computes:
        return None
    return _repeated_product(case) or _power(case)


def _exponential(case: Case, exponent: Operand) -> Proof | None:
    limit = exp_limit(case.dtype, case.op)
    largest = reach(exponent) if case.op in EVEN else high(exponent)
    # the limit is that of exact arithmetic, so a rounded operand may show just below it
    if not largest > limit * 0.99:
        return None
    grows = ""
    if case.op in EVEN:
        grows = "which grows as "
    numbers = (
        f"{case.place}: {grows}exp({spell(largest)}){at_index(exponent)} exceeds what "
        f"{case.dtype} can hold"
    )
    bound = f"in {case.dtype} the exponent may be at most {limit:.2f}; {describe(exponent)}"
    prove = certain
    if case.absorbed or case.narrow:
        prove = likely
    return prove(numbers, bound, case.confirmed_samples)


def _repeated_product(case: Case) -> Proof | None:
    base = case.argument("self", 0)
    if case.op not in REPEATED_PRODUCTS or base is None or not base.finite:
        return None
    if not case.wider or case.narrow:
        return None
    text = (
        f"{case.place}: repeated products of numbers up to {spell(reach(base))} exceed what "
        f"{case.dtype} can hold"
    )
    return likely(text, describe(base), case.confirmed_samples)


def _power(case: Case) -> Proof | None:
    base = case.argument("self", 0)
    exponent = case.argument("exponent", 1)
    if case.op not in POWERS or base is None or exponent is None or singular_inputs(case):
        return None
    if case.narrow or reach(exponent) <= POLYNOMIAL or low(exponent) < 0:
        return None
    text = (
        f"{case.place}: {spell(reach(base))} to the power {spell(high(exponent))} exceeds what "
        f"{case.dtype} can hold"
    )
    return likely(text, case.confirmed_samples)


SG203 = Rule(code="SG203", recognise=recognise_sg203, yields_to=("SG301", "SG504", "SG601"))


# --- SG204: a softmax over a row in which everything is masked.


SOFTMAX_NODES = words("Softmax LogSoftmax Logsumexp SafeSoftmax Logcumsumexp")
PAIR_NODES = words("Logaddexp Logaddexp2")
MASKS = ("attn_bias", "attn_mask", "mask", "bias")


def recognise_sg204(case: Case) -> Proof | None:
    if case.op in SOFTMAXES or case.node in SOFTMAX_NODES:
        return _softmax(case)
    if case.node in PAIR_NODES:
        return _pair(case)
    return _row_maximum(case)


def _softmax(case: Case) -> Proof | None:
    scores = _masked(case)
    if case.evidence.masked_rows is None and not _could_be_a_row(scores):
        return None
    return certain(_rows(case, scores), describe(scores), case.confirmed_samples)


def _masked(case: Case) -> Operand | None:
    closed = [operand for operand in case.inputs if operand.neginf]
    named = [operand for operand in closed if operand.name in MASKS]
    return next(iter(named + closed), None)


def _could_be_a_row(scores: Operand | None) -> bool:
    """Are there enough -inf to fill a row, and nothing else that breaks a softmax?"""
    if scores is None or scores.posinf:
        return False
    # which axis was normalised is not known here, so the shortest one is taken as the row
    return scores.neginf >= min(scores.shape, default=1)


def _rows(case: Case, scores: Operand | None) -> str:
    rows = case.evidence.masked_rows
    how_many = "a row"
    if rows is not None:
        how_many = "1 row" if rows == 1 else f"{rows} rows"
        if scores is not None:
            how_many += f" of {case.evidence.rows or math.prod(scores.shape[:-1])}"
    where = ""
    if case.output is not None:
        where = at_index(case.output)
    return (
        f"{case.place}: {how_many} with every entry -inf{where}; exp(-inf) sums to 0 and "
        f"0 / 0 is NaN"
    )


def _pair(case: Case) -> Proof | None:
    """log(exp(a) + exp(b)) with both -inf is -inf, rightly; its slope is exp(-inf - -inf)."""
    both = [operand for operand in case.inputs if operand.neginf]
    if len(both) < 2 or not case.makes_nan:
        return None
    text = (
        f"{case.place}: both terms of a log-sum are -inf{at_index(both[0])}: its value is -inf, "
        f"its slope is 0 / 0"
    )
    return certain(text, *map(describe, both), case.confirmed_samples)


def _row_maximum(case: Case) -> Proof | None:
    """A hand-written softmax: the row's maximum, itself -inf, is subtracted from the row."""
    scores = case.argument("self", 0)
    top = case.argument("other", 1)
    if case.op != "sub" or scores is None or top is None or not case.makes_nan:
        return None
    if not scores.neginf or not top.neginf:
        return None
    if case.evidence.masked_rows is None and not _is_reduced(top, scores):
        return None
    text = (
        f"{case.place}: {top.neginf} row maxima are -inf, so every entry of those rows is "
        f"masked and -inf - -inf is NaN"
    )
    return certain(text, describe(scores), case.confirmed_samples)


def _is_reduced(top: Operand, scores: Operand) -> bool:
    """Does it have the shape of a row maximum that kept its dimension?"""
    if len(top.shape) != len(scores.shape):
        return False
    sizes = zip(top.shape, scores.shape, strict=True)
    return any(small == 1 < size for small, size in sizes)


SG204 = Rule(code="SG204", recognise=recognise_sg204, yields_to=("SG402",))


# --- SG205: the standard deviation or variance of a single element.


STATISTIC_NODES = words("Std Var StdMean VarMean")
SQUARES_OVERFLOW = 1e18


def recognise_sg205(case: Case) -> Proof | None:
    data = case.argument("self", 0)
    if data is None or not data.finite:
        return None
    if case.evidence.reduced_elements == 1:
        return _measured(case, data)
    return _by_shape(case, data)


def _measured(case: Case, data: Operand) -> Proof | None:
    """Locating has counted one element."""
    if case.op not in STATISTICS and case.node not in STATISTIC_NODES:
        return None
    return certain(*_sentences(case, data))


def _by_shape(case: Case, data: Operand) -> Proof | None:
    """NaN from finite elements whose squares do not overflow: n - correction was 0."""
    if case.op not in STATISTICS or not case.makes_nan:
        return None
    if case.magnitude > SQUARES_OVERFLOW or case.wider:
        return None
    if _single(data):
        return certain(*_sentences(case, data))
    return likely(*_sentences(case, data))


def _sentences(case: Case, data: Operand) -> tuple[str, ...]:
    # torch's default is the unbiased statistic, which divides by n - 1
    divisor = case.argument("correction", 2)
    correction = 1.0
    if divisor is not None and divisor.value is not None:
        correction = divisor.value
    numbers = (
        f"{case.place} reduced 1 element with correction={spell(correction)}: it divides by "
        f"n - correction = 0"
    )
    return numbers, describe(data), case.confirmed_samples


def _single(data: Operand) -> bool:
    return not data.shape or 1 in data.shape or 0 in data.shape


SG205 = Rule(code="SG205", recognise=recognise_sg205, yields_to=("SG402",))


# --- SG206: an indeterminate form, inf - inf or 0 * inf.


TIMES = words("mul multiply mm bmm addmm baddbmm matmul dot mv addcmul linear convolution einsum")
SUMS = words(
    "add sub rsub sum mean cumsum lerp addmm logaddexp addcmul nansum index_add scatter_add"
)


def recognise_sg206(case: Case) -> Proof | None:
    if not case.makes_nan or case.unselected or case.phase in ("input", "state"):
        return None
    infinite = _infinite(case)
    if not infinite:
        return None
    form, certainty = _form(case, infinite)
    # the forward swallowed the infinity: SG403
    if case.phase == "backward" and case.absorbed:
        certainty = "possible"
    zero = [operand for operand in case.inputs if operand.finite and has_zero(operand)]
    operands = map(_infinities, (*infinite, *zero[:1]))
    sentences = (f"{case.place}: {form}", *operands, case.confirmed_samples)
    return Proof(certainty=certainty, sentences=sentences)


def _infinite(case: Case) -> list[Operand]:
    """The operands that hold an infinity, where no NaN went in and they are not just a mask."""
    found = [operand for operand in case.inputs if not operand.finite]
    if any(operand.nan for operand in found):
        return []
    # a softmax takes -inf as a mask
    if case.op in SOFTMAXES and not any(operand.posinf for operand in found):
        return []
    return found


def _form(case: Case, infinite: list[Operand]) -> tuple[str, Certainty]:
    if case.op in TIMES and any(map(has_zero, case.inputs)):
        form = "0 * inf is NaN, a mask of 0 does not hide an infinity"
        if case.phase == "backward":
            return form, "likely"
        return form, "certain"
    if case.op in SUMS and _cancels(infinite):
        return "inf - inf is NaN", "certain"
    if case.op == "div" and len(infinite) > 1:
        return "inf / inf is NaN", "certain"
    if case.op in SOFTMAXES:
        return "the maximum of a row is +inf, and inf - inf is NaN", "likely"
    return "an infinity went in and has no value here", "likely"


def _cancels(infinite: list[Operand]) -> bool:
    """Two infinities in one sum, in two operands or in one with both signs."""
    if len(infinite) > 1:
        return True
    return any(operand.posinf and operand.neginf for operand in infinite)


def _infinities(operand: Operand) -> str:
    amount = counts(operand, ("posinf", "neginf", "zeros"))
    if amount:
        return f"{call(operand)} has {amount}"
    return describe(operand)


SG206 = Rule(code="SG206", recognise=recognise_sg206, yields_to=("SG204", "SG301", "SG403"))


# --- SG207: a root or fractional power of a negative number.


ROUNDING = 1e-4
"""A value this little outside is a rounding error of something that should be inside."""


def recognise_sg207(case: Case) -> Proof | None:
    found = negative_root(case)
    if found is None or not case.computes or case.unselected or not case.makes_nan:
        return None
    operand, what = found
    # a variance computed as a difference of means cancels to a small negative number
    near = ""
    if case.op in ("sqrt", "rsqrt") and -ROUNDING < low(operand) < 0:
        near = f"{spell(low(operand))} is a rounding error below 0, as E[x*x] - E[x]*E[x] gives"
    numbers = f"{case.place} asked for the {what}: {describe(operand)}"
    return certain(numbers, broken_by(operand), near, case.confirmed_samples)


SG207 = Rule(code="SG207", recognise=recognise_sg207, yields_to=("SG301", "SG502", "SG602"))


# --- SG208: a kernel that no tracer can look into turned finite values into NaN or Inf.


KINDS = {
    "function": "a custom autograd function",
    "operator": "an operator from outside torch",
    "module": "a module that computes outside torch's operations",
    "code": "code that writes tensors outside torch's operations",
    "fused": "one of torch's fused kernels",
}
FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_", "miopen_")
"""Operations of torch's own that compute many steps in one kernel."""


def recognise_sg208(case: Case) -> Proof | None:
    kind: str | None = case.evidence.opaque
    prove = likely
    if kind is None and case.op.startswith(FUSED) and case.inputs and case.finite_inputs:
        # a row that is masked throughout is SG204, an overflow SG301: those say more
        kind, prove = "fused", possible
    if kind is None or case.origin is None:
        return None
    went_in = "every tensor that went in is finite"
    if not case.inputs:
        went_in = "no bad tensor went in"
    elif not case.finite_inputs:
        went_in = "no NaN went in"
    out = case.output
    made = "what came out is not finite" if out is None else f"what came out holds {counts(out)}"
    return prove(
        f"{case.place} is {KINDS[kind]}: {went_in}, {made}",
        _shapes(case),
        "no operation inside its kernel could be observed",
        case.confirmed_samples,
    )


def _shapes(case: Case) -> str:
    """Which shapes and dtypes the kernel was called with."""
    given = [_shape(operand) for operand in case.inputs if operand.dtype]
    if not given:
        return ""
    way = "with the gradient" if case.phase == "backward" else "with"
    made = "" if case.output is None else f" and returned {_shape(case.output)}"
    return f"it was called {way} {', '.join(given)}{made}"


def _shape(operand: Operand) -> str:
    sizes = ",".join(map(str, operand.shape))
    reaches = "" if operand.max is None else f" from {operand.min:.4g} to {operand.max:.4g}"
    return f"{operand.dtype} [{sizes}]{reaches}"


SG208 = Rule(code="SG208", recognise=recognise_sg208, shown_by="inference")
