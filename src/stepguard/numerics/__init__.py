"""Losses and layers that stay finite at their singular points, and say when they had to.

None of them hides an error: a value outside a function's domain is still NaN, so that a guard can
name it.
"""

from stepguard.numerics.losses import (
    Events,
    RMSNorm,
    Sinkhorn,
    count_labels,
    ddm_weights,
    events,
    latent_mse,
    masked_cross_entropy,
    masked_mean,
    min_snr_weight,
    mix_streams,
    read_out,
    rms_norm,
    sample_times,
    sinkhorn,
    soft_limit,
    token_share,
    write_in,
)
from stepguard.numerics.safe import (
    lasting_eps,
    safe_acos,
    safe_asin,
    safe_atan2,
    safe_div,
    safe_log,
    safe_norm,
    safe_pow,
    safe_softmax,
    safe_sqrt,
)

__all__ = [
    "Events",
    "RMSNorm",
    "Sinkhorn",
    "count_labels",
    "ddm_weights",
    "events",
    "lasting_eps",
    "latent_mse",
    "masked_cross_entropy",
    "masked_mean",
    "min_snr_weight",
    "mix_streams",
    "read_out",
    "rms_norm",
    "safe_acos",
    "safe_asin",
    "safe_atan2",
    "safe_div",
    "safe_log",
    "safe_norm",
    "safe_pow",
    "safe_softmax",
    "safe_sqrt",
    "sample_times",
    "sinkhorn",
    "soft_limit",
    "token_share",
    "write_in",
]
