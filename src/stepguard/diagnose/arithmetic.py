"""Which operand left the domain of an operation: shared by the rules on division, logarithm, root and overflow."""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case, elements, has_zero, high, low, reach
from stepguard.records import Operand

DIVISIONS = {"div": ("other", 1), "true_divide": ("other", 1), "divide": ("other", 1), "floor_divide": ("other", 1)}
DIVISIONS |= {"remainder": ("other", 1), "fmod": ("other", 1), "addcdiv": ("tensor2", 2)}
DIVISIONS |= {"reciprocal": ("self", 0), "rsqrt": ("self", 0)}
"""Operation -> which argument it divides by."""

STATISTICS = frozenset({"std", "var", "std_mean", "var_mean"})
NORM_LAYERS = frozenset(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "_native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm _fused_rms_norm rms_norm "
    "layer_norm group_norm batch_norm instance_norm".split()
)
SOFTMAXES = frozenset(
    "_softmax softmax _log_softmax log_softmax logsumexp _safe_softmax _logcumsumexp logcumsumexp _masked_softmax "
    "special_log_softmax special_softmax _sparse_softmax _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention scaled_dot_product_attention".split()
)
EXPONENTIALS = frozenset("exp exp2 expm1 sinh cosh special_exp2 special_expm1".split())
PRODUCTS = frozenset(
    "mm bmm addmm addbmm baddbmm matmul linear mv addmv dot vdot addr mul multiply addcmul square convolution "
    "_convolution mkldnn_convolution conv1d conv2d conv3d add sub rsub sum nansum mean cumsum prod cumprod pow "
    "float_power lerp mse_loss huber_loss smooth_l1_loss l1_loss linalg_vector_norm norm linalg_matrix_norm dist "
    "_cdist_forward _pdist_forward einsum logaddexp cross_entropy_loss axpy _to_copy copy to _euclidean_dist "
    "mkldnn_linear _addmm_activation add_relu native_dropout gelu silu elu celu selu softplus index_add scatter_add "
    "var std var_mean std_mean mse_loss_backward convolution_backward native_layer_norm_backward "
    "threshold_backward embedding_dense_backward foreach_norm _thnn_fused_lstm_cell".split()
)
"""Operations that leave the range only because their operands are large."""


def zero_divisor(case: Case) -> Operand | None:
    """The operand with a zero that is divided by."""
    if case.op in DIVISIONS:
        divisor = case.argument(*DIVISIONS[case.op])
        return divisor if has_zero(divisor) else None
    if case.op in ("pow", "float_power"):
        base, exponent = case.argument("self", 0), case.argument("exponent", 1)
        falls = exponent is not None and low(exponent) < 0
        return base if falls and has_zero(base) else None
    return None


LOGS: dict[str, tuple[str, int, float, float]] = {
    "log": ("self", 0, 0.0, math.inf),
    "log2": ("self", 0, 0.0, math.inf),
    "log10": ("self", 0, 0.0, math.inf),
    "log1p": ("self", 0, -1.0, math.inf),
    "xlogy": ("other", 1, 0.0, math.inf),
    "special_xlogy": ("other", 1, 0.0, math.inf),
    "special_xlog1py": ("other", 1, -1.0, math.inf),
    "special_entr": ("self", 0, 0.0, math.inf),
    "logit": ("self", 0, 0.0, 1.0),
    "special_ndtri": ("self", 0, 0.0, 1.0),
    "atanh": ("self", 0, -1.0, 1.0),
    "erfinv": ("self", 0, -1.0, 1.0),
    "lgamma": ("self", 0, 0.0, math.inf),
    "mvlgamma": ("self", 0, 0.0, math.inf),
}
"""Operation -> argument, its position, and the open interval in which it is finite."""


def log_argument(case: Case) -> tuple[Operand, float, float] | None:
    """The operand of a logarithm that is at or beyond its pole, with the open interval it must stay in."""
    if case.op not in LOGS:
        return None
    name, position, least, most = LOGS[case.op]
    operand = case.argument(name, position)
    if operand is None or not (low(operand) <= least or high(operand) >= most):
        return None
    return operand, least, most


def negative_root(case: Case) -> tuple[Operand, str] | None:
    """The operand that has no real root or power, with what was asked of it."""
    operand = case.argument("self", 0)
    if case.op in NORM_LAYERS:
        variance = case.argument("running_var", 4)
        return (variance, "root of a variance") if variance is not None and low(variance) < 0 else None
    if operand is None or operand.nan:
        return None
    if case.op in ("sqrt", "rsqrt") and low(operand) < 0:
        return operand, "square root"
    if case.op in ("pow", "float_power") and low(operand) < 0:
        exponent = case.argument("exponent", 1)
        if exponent is None or fractional(exponent):
            return operand, "power " + ("" if exponent is None else f"{high(exponent):g}")
    if case.op in ("acos", "asin") and reach(operand) > 1:
        return operand, f"{case.op}, which is real on [-1, 1] only: beyond, 1 - x*x is negative and has no root"
    if case.op == "acosh" and low(operand) < 1:
        return operand, "acosh, which is real from 1 on: below, x*x - 1 is negative and has no root"
    return None


def fractional(operand: Operand) -> bool:
    """Some element is no whole number, as far as its range shows."""
    return any(math.isfinite(v) and v != int(v) for v in (low(operand), high(operand)))


def singular_inputs(case: Case) -> bool:
    """The result is non-finite in any precision: a pole, a missing root, an infinity that came in."""
    out_of_domain = zero_divisor(case) or log_argument(case) or negative_root(case)
    return bool(out_of_domain) or not case.finite_inputs


def overflow(case: Case) -> bool:
    """Finite operands, a result out of range, and no pole in between: the numbers were simply too large."""
    if not case.inputs or singular_inputs(case) or case.op in STATISTICS and case.has("one_element"):
        return False
    if any(elements(operand) == 0 for operand in case.inputs if operand.dtype):
        return False
    return case.op in PRODUCTS | NORM_LAYERS or bool(case.wider)


COUNTED = frozenset("sum nansum count_nonzero numel len size ne eq gt ge lt le any bincount count".split())
MEASURED = frozenset(
    "std var std_mean var_mean linalg_vector_norm norm amax amin max min abs sub sqrt mul pow prod clamp".split()
)


def counts_nothing(case: Case, divisor: Operand) -> bool:
    """Is the zero divisor a count or a mask's sum, so that the mean runs over no element?"""
    if divisor.dtype and ("int" in divisor.dtype or "bool" in divisor.dtype) and not case.has("target_out_of_domain"):
        return True
    made_by = (case.note("denominator_from") or "").removeprefix("aten.").rstrip("_")
    numerator = case.argument("self", 0)
    nothing_above = case.op in ("reciprocal", "rsqrt") or has_zero(numerator)
    if made_by in MEASURED:
        return False
    whole = elements(divisor) > 1 and high(divisor) >= 1 and not fractional(divisor) and low(divisor) == 0
    if made_by in COUNTED:
        return (nothing_above or case.phase == "loss") and (whole or reach(divisor) == 0)
    if elements(divisor) == 1:
        return case.phase == "loss" and nothing_above and case.op == "div"
    return whole and nothing_above and case.op == "div"
