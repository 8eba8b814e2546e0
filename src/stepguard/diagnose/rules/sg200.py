"""SG201 to SG209: arithmetic of the forward pass, and kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    Found,
    Proof,
    certain,
    counts_nothing,
    divisor_of,
    likely,
    log_argument,
    negative_root,
    possible,
    rule,
    singular_inputs,
    zero_divisor,
)
from stepguard.records import Operand, Witness

# --- SG201: something was divided by zero.


TINY = 1e-30
SOLVES = words(
    """
    linalg_solve_triangular triangular_solve linalg_solve _linalg_solve_ex linalg_solve_ex
    cholesky_solve linalg_inv linalg_inv_ex inverse linalg_lu_solve cholesky_inverse
    """
)


@rule(yields_to="SG207 SG301 SG302")
def sg201(case: Case) -> Found:
    if case.unselected or not case.computes:
        return None
    divisor = zero_divisor(case)
    if divisor is None:
        return None if case.in_update else _near_zero(case)
    # what became of an optimizer's epsilon is SG502
    if case.in_update and (case.facts.eps is not None or case.narrow):
        return None
    both = case.op == "div" and has_zero(case.argument("self")) and case.makes_nan
    prove = certain
    if case.forward and counts_nothing(case, divisor):
        # a mean over no element is SG102
        prove = possible
    elif case.absorbed and case.makes_inf:
        # an infinity that the forward absorbed is SG403
        prove = likely
    return prove("by zero", divisor=divisor, both=both)


def _near_zero(case: Case) -> Found:
    """Zeros that are not among the operands, and divisors that are next to 0."""
    evidence = case.evidence
    eps = case.argument("eps")
    lost = eps is not None and eps.value is not None and eps.value < TINY
    if case.op in NORM_LAYERS and case.finite_inputs and lost:
        return likely("no epsilon", eps=eps)
    # an operator that divides by something it computes itself, as weight norm does by a norm: only
    # locating, which had the tensors, could see it
    if evidence.zero_denominator and case.op not in DIVISIONS:
        made_by = (evidence.denominator_from or "value").removeprefix("aten.")
        return certain("inside", made_by=made_by)
    # solve_triangular calls its matrix `self`, the _ex variants call it `A`
    matrix = case.argument("self") or case.argument("A")
    if case.op in SOLVES and matrix is not None and case.finite_inputs:
        return likely("singular", matrix=matrix)
    return _tiny(case)


def _tiny(case: Case) -> Found:
    """A quotient that overflows on a divisor near 0."""
    divisor, above = divisor_of(case), case.argument("self")
    # in half precision a tiny divisor has been rounded to 0 before: SG302
    if case.short or not case.finite_inputs or divisor is None or above is None:
        return None
    small = low(divisor) if divisor.value is None else divisor.value
    size = abs(small)
    power = case.argument("exponent")
    least = TINY if power is None else TINY ** (-1 / low(power))
    # a Python number, such as a temperature near 0, that outweighs what it divides
    number = case.op == "div" and not divisor.shape and divisor.dtype == "float"
    outweighs = number and 0 < size <= 1e-6 and 1 / size >= reach(above)
    if size < least or outweighs:
        return likely("tiny", divisor=divisor, small=small)
    return None


# --- SG202: the logarithm of zero or of a negative number.


LOG_NODES = words("Log Log1P Log2 Log10 Logit")
DETERMINANTS = words("_linalg_slogdet linalg_slogdet _linalg_det linalg_det")
LOG_DETERMINANTS = ("_linalg_slogdet", "linalg_slogdet", "logdet")
SATURATING = words(
    "exp erf tanh sigmoid atan clamp clamp_max clamp_min reciprocal div softmax _softmax"
)


@rule(yields_to="SG104 SG301 SG302")
def sg202(case: Case) -> Found:
    if case.unselected:
        return None
    if case.backward:
        # log's backward is grad / x, in which the operand that forward saved is the divisor
        for operand in case.inputs:
            if case.node in LOG_NODES and (has_zero(operand) or low(operand) < 0):
                return likely("gradient", operand=operand)
        return None
    if case.op in LOG_DETERMINANTS and case.makes_inf:
        return certain("determinant")
    # logdet answers a negative determinant with a NaN constant, chosen by `where`
    if case.op == "where" and base_name(case.evidence.chosen_by) in DETERMINANTS:
        return certain("negative determinant")
    found = log_argument(case)
    if found is None or not case.computes:
        return None
    operand, least, most = found
    bounded = None if math.isinf(most) else most
    prove = likely if base_name(case.evidence.absorbed_by) in SATURATING else certain
    return prove("argument", operand=operand, least=least, most=bounded)


# --- SG203: an exponential left the range.


REPEATED_PRODUCTS = ("prod", "cumprod", "_linalg_matrix_exp", "linalg_matrix_exp", "matrix_exp")


@rule(yields_to="SG301 SG504 SG601")
def sg203(case: Case) -> Found:
    base = case.argument("self")
    if case.unselected or not case.makes_inf or base is None:
        return None
    # in any phase: people write exponentials into a backward of their own
    if case.op in EXPONENTIALS and base.finite:
        limit = exp_limit(case.dtype, case.op)
        both_sides = case.op in EVEN
        most = reach(base) if both_sides else high(base)
        # the limit is that of exact arithmetic, so a rounded operand may show just below it
        if not most > limit * 0.99:
            return None
        prove = likely if case.absorbed or case.narrow else certain
        return prove("exponential", base=base, most=most, limit=limit, both_sides=both_sides)
    if case.computes and not case.narrow:
        return _power(case, base)
    return None


def _power(case: Case, base: Operand) -> Found:
    if case.op in REPEATED_PRODUCTS and base.finite and case.wider:
        return likely("product", base=base)
    power = case.argument("exponent")
    if case.op not in POWERS or power is None or singular_inputs(case):
        return None
    # powers up to here are products: it is the number that is too large, not its exponent
    if reach(power) <= 4 or low(power) < 0:
        return None
    return likely("power", base=base, power=power)


# --- SG204: a softmax over a row in which everything is masked.


SOFTMAX_NODES = words("Softmax LogSoftmax Logsumexp SafeSoftmax Logcumsumexp")
PAIR_NODES = words("Logaddexp Logaddexp2")
MASKS = ("attn_bias", "attn_mask", "mask", "bias")


@rule(yields_to="SG402")
def sg204(case: Case) -> Found:
    closed = [operand for operand in case.inputs if operand.neginf]
    if case.op in SOFTMAXES or case.node in SOFTMAX_NODES:
        closed.sort(key=lambda operand: operand.name not in MASKS)
        return _masked_rows(case, closed[0] if closed else None)
    if case.node in PAIR_NODES:
        # log(exp(a) + exp(b)) with both -inf is -inf, rightly; its slope is exp(-inf - -inf)
        both = len(closed) > 1 and case.makes_nan
        if both:
            return certain("pair", terms=tuple(closed))
        return None
    if case.op != "sub" or not case.makes_nan:
        return None
    return _row_maximum(case, case.argument("self"), case.argument("other"))


def _row_maximum(case: Case, scores: Operand | None, top: Operand | None) -> Found:
    """A hand-written softmax: the row's maximum, itself -inf, is subtracted from the row."""
    if scores is None or top is None or not scores.neginf or not top.neginf:
        return None
    # the shape of a row maximum that kept its dimension
    sizes = zip(top.shape, scores.shape, strict=False)
    reduced = any(small == 1 < size for small, size in sizes)
    kept = reduced and len(top.shape) == len(scores.shape)
    if case.evidence.masked_rows is None and not kept:
        return None
    return certain("maximum", scores=scores, top=top)


def _masked_rows(case: Case, scores: Operand | None) -> Found:
    rows = case.evidence.masked_rows
    of = None
    if rows is None:
        # which axis was normalised is not known here, so the shortest one is taken as the row
        if scores is None or scores.posinf or scores.neginf < min(scores.shape, default=1):
            return None
    elif scores is not None:
        of = case.evidence.rows or math.prod(scores.shape[:-1])
    return certain("softmax", scores=scores, rows=rows, one=rows == 1, of=of)


# --- SG205: the standard deviation or variance of a single element.


STATISTIC_NODES = words("Std Var StdMean VarMean")


@rule(yields_to="SG402")
def sg205(case: Case) -> Found:
    data = case.argument("self")
    if data is None or not data.finite:
        return None
    # torch's default is the unbiased statistic, which divides by n - 1
    divisor = case.argument("correction")
    correction = 1.0 if divisor is None or divisor.value is None else divisor.value
    statistic = case.op in STATISTICS
    if case.evidence.reduced_elements == 1:
        # locating has counted one element
        counted = statistic or case.node in STATISTIC_NODES
        if counted:
            return certain(data=data, correction=correction)
        return None
    # NaN from finite elements whose squares do not overflow: n - correction was 0
    if not statistic or not case.makes_nan or case.magnitude > 1e18 or case.wider:
        return None
    single = not data.shape or 1 in data.shape or 0 in data.shape
    prove = certain if single else likely
    return prove(data=data, correction=correction)


# --- SG206: an indeterminate form, inf - inf or 0 * inf.


TIMES = words("mul multiply mm bmm addmm baddbmm matmul dot mv addcmul linear convolution einsum")
SUMS = words(
    "add sub rsub sum mean cumsum lerp addmm logaddexp addcmul nansum index_add scatter_add"
)


@rule(yields_to="SG204 SG301 SG403")
def sg206(case: Case) -> Found:
    if not case.makes_nan or case.unselected or case.phase in ("input", "state"):
        return None
    infinite = [operand for operand in case.inputs if not operand.finite]
    # a softmax takes -inf as a mask
    mask = case.op in SOFTMAXES and not any(operand.posinf for operand in infinite)
    if not infinite or mask or any(operand.nan for operand in infinite):
        return None
    return _indeterminate(case, infinite)


def _indeterminate(case: Case, infinite: list[Operand]) -> Proof:
    form, sure = _form(case, infinite)
    prove = certain if sure else likely
    # the forward absorbed the infinity: SG403
    if case.backward and case.absorbed:
        prove = possible
    zeros = [operand for operand in case.zeros if operand.finite]
    return prove(
        form=form,
        shown=(*infinite, *zeros[:1]),
        infinite=infinite[0],
        zero=zeros[0] if zeros else None,
        product=case.op == "mul" and bool(zeros),
        difference=case.op in ("sub", "rsub") and len(infinite) > 1,
    )


def _form(case: Case, infinite: list[Operand]) -> tuple[str, bool]:
    """What became NaN, and whether that is certain."""
    several = len(infinite) > 1
    if case.op in TIMES and case.zeros:
        return "0 * inf is NaN, a mask of 0 does not hide an infinity", not case.backward
    if case.op in SUMS and (several or any(one.posinf and one.neginf for one in infinite)):
        return "inf - inf is NaN", True
    if case.op == "div" and several:
        return "inf / inf is NaN", True
    if case.op in SOFTMAXES:
        return "the maximum of a row is +inf, and inf - inf is NaN", False
    return "an infinity went in and has no value here", False


# --- SG207: a root or fractional power of a negative number.


@rule(yields_to="SG301 SG502 SG602")
def sg207(case: Case) -> Found:
    found = negative_root(case)
    if found is None or not case.computes or case.unselected or not case.makes_nan:
        return None
    operand, what = found
    # a variance computed as a difference of means cancels to a small negative number
    # A value this little outside is a rounding error of something that should be inside
    near = case.op in ("sqrt", "rsqrt") and -1e-4 < low(operand) < 0
    return certain(operand=operand, what=what, near=near)


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


@rule(shown_by="inference")
def sg208(case: Case) -> Found:
    kind: str | None = case.evidence.opaque
    prove = likely
    if kind is None and case.op.startswith(FUSED) and case.inputs and case.finite_inputs:
        # a row that is masked throughout is SG204, an overflow SG301: those say more
        kind, prove = "fused", possible
    if kind is None:
        return None
    tried = _tried(case)
    # paths that fail alike and share no code with the kernel: then the inputs are to blame
    failing = [] if any(one.finite for one in tried) else tried
    failing = [one for one in failing if one.independent]
    if failing:
        prove = possible

    given = tuple(operand for operand in case.inputs if operand.dtype)
    return prove(
        kind=KINDS[kind],
        given=given,
        nothing=not case.inputs,
        cleared=_listed(failing) or None,
        untried=_untried(case),
    )


def _untried(case: Case) -> str | None:
    """Why no other path was run; None where one was."""
    reasons = [one.why_not for one in case.evidence.witnesses if one.finite is None]
    return reasons[0] if reasons and not _tried(case) else None


# --- SG209: a kernel gives a bad value where another path to the same result is finite.


SAME_CODE = ("again", "wider", "contiguous", "slope")
"""Paths that run the kernel itself, or its own forward; each has its own sentences."""


def _tried(case: Case) -> list[Witness]:
    return [one for one in case.evidence.witnesses if one.finite is not None]


def _listed(witnesses: Sequence[Witness]) -> str:
    return ", ".join(one.name for one in witnesses)


def _failing_alike(case: Case) -> list[Witness]:
    """Runs of the kernel's own code that are not finite either."""
    return [one for one in _tried(case) if one.finite is False and not one.independent]


@rule(yields_to="SG204 SG703")
def sg209(case: Case) -> Found:
    # what differs where the kernel is right computes something else
    finite = [one for one in _tried(case) if one.finite and one.agrees is not False]
    independent = [one for one in finite if one.independent]
    if not finite:
        return None
    best = (independent or finite)[0]
    # a reference that could not be compared anywhere may compute something else
    sure = bool(independent) and (best.agrees is True or best.path != "reference")
    output = case.output
    makes_nan = output is None or output.nan
    fields = {
        "kernel": f"`{case.where.op}`",
        "name": best.name,
        "value": best.value,
        "gives": "NaN" if makes_nan else "Inf",
        "same": best.agrees is True,
        "also": _listed(_failing_alike(case)) or None,
        "math": best.path == "math",
        "unfused": best.path == "unfused",
        "reference": best.path == "reference",
    }
    prove = certain if sure else likely
    return prove(best.path if best.path in SAME_CODE else "", **fields)
