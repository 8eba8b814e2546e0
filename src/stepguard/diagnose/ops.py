"""Families of operations, by the name of their aten packet."""

from __future__ import annotations


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
