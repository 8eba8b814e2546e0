"""Half of the incidents of the shared zoo, as the locator describes them."""

from __future__ import annotations

from typing import Any

from diagnose.diagnose_literals import (
    BACKWARD,
    INF,
    NAN,
    number,
    origin,
    out,
    tensor,
)
from stepguard.records import Evidence, Operand

HALF = "float16"
SPIKE: dict[str, Any] = {"kind": "spike", "loss": 9e4, "grads_finite": True}
ZEROS = {"zeros": 1, "index": (2, 0), "value": 0.0}

ZOO_OF_OPERATIONS: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
    "mha_all_keys_masked": (
        ("SG204",),
        origin(
            "forward",
            "aten._softmax",
            tensor("self", (8, 5, 5), -1.1, 0.9, neginf=50),
            module="attn",
            samples=(1,),
            output=out((8, 5, 5), nan=50, index=(2, 0, 0), value=NAN),
            evidence=Evidence(intended_inf=True, masked_rows=10, rows=40),
        ),
        {},
    ),
    "mask_finfo_min_plus_score_fp16": (
        ("SG301", "SG204"),
        origin(
            "forward",
            "aten.add",
            tensor("self", (2, 4, 4), -61.0, -30.0, dtype=HALF, index=(0, 0, 0), value=-33.5),
            tensor(
                "other",
                (2, 4, 4),
                -65504.0,
                0.0,
                dtype=HALF,
                zeros=10,
                index=(0, 0, 0),
                value=-65504.0,
            ),
            module="attn",
            samples=(0,),
            output=out((2, 4, 4), dtype=HALF, neginf=4, index=(0, 0, 0), value=-INF),
            evidence=Evidence(
                half_precision=True,
                finite_in="float32",
                absorbed=True,
                turned_nan_by="aten._softmax",
            ),
        ),
        BACKWARD,
    ),
    "masked_mean_no_valid_token": (
        ("SG102",),
        origin(
            "loss",
            "aten.div",
            tensor("self", (), 0.0, 0.0, zeros=1, index=(), value=0.0),
            tensor("other", (), 0.0, 0.0, zeros=1, index=(), value=0.0),
            output=out((), nan=1, index=(), value=NAN),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.sum",
                denominator_root="batch:mask",
                zero_numerator=True,
            ),
        ),
        {},
    ),
    "ce_all_labels_ignored": (
        ("SG102",),
        origin(
            "loss",
            "aten.nll_loss_forward",
            tensor("self", (8, 8), -3.9, -0.7),
            Operand(name="target", dtype="int64", shape=(8,), min=-100.0, max=-100.0),
            number("reduction", 1),
            number("ignore_index", -100),
            output=out((), nan=1),
            evidence=Evidence(valid_targets=0, targets=8),
        ),
        {"grads_finite": True},
    ),
    "dora_zero_weight_row": (
        ("SG201",),
        origin(
            "forward",
            "aten.div",
            tensor("self", (4,), 0.0, 2.3, zeros=1, index=(2,), value=0.0),
            tensor("other", (4,), 0.0, 2.3, zeros=1, index=(2,), value=0.0),
            module="o_proj",
            output=out((4,), nan=1, index=(2,), value=NAN),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.linalg_vector_norm",
                zero_numerator=True,
            ),
        ),
        {},
    ),
    "silent_clip_normalised_by_std": (
        ("SG201",),
        origin(
            "forward",
            "aten.div",
            tensor("self", (4, 1, 32), -2.6, 2.9, zeros=32, index=(2, 0, 0), value=0.0),
            tensor("other", (4, 1, 1), 0.0, 1.1, zeros=1, index=(2, 0, 0), value=0.0),
            module="frontend",
            samples=(2,),
            output=out((4, 1, 32), nan=32),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.std",
                denominator_root="batch:w",
                zero_numerator=True,
            ),
        ),
        {},
    ),
    "bbox_log_of_bad_annotation": (
        ("SG104", "SG202"),
        origin(
            "loss",
            "aten.log",
            tensor("self", (3, 2), -1.0, 1.5, index=(2, 0), value=-1.0),
            samples=(2,),
            output=out((3, 2), nan=1),
            evidence=Evidence(
                argument="negative", argument_from="aten.div", argument_root="batch:box"
            ),
        ),
        {},
    ),
    "log_of_softmax_underflow": (
        ("SG202",),
        origin(
            "loss",
            "aten.log",
            tensor("self", (3, 3), 0.0, 1.0, zeros=6, index=(0, 1), value=0.0),
            output=out((3, 3), neginf=6, index=(0, 1), value=-INF),
            evidence=Evidence(
                absorbed=True,
                absorbed_by="aten.gather",
                argument="zero",
                argument_from="aten._softmax",
            ),
        ),
        {"loss": 0.0, "kind": "nonfinite_gradient"},
    ),
    "spectrogram_sqrt_of_silence": (
        ("SG401",),
        origin(
            "backward",
            "aten.div",
            tensor("self", (3, 9), -0.04, 0.04, index=(1, 0), value=-0.037),
            tensor("other", (3, 9), 0.0, 6.0, zeros=9, index=(1, 0), value=0.0),
            node="SqrtBackward0",
            module="mag",
            samples=(1,),
            output=out((3, 9), neginf=9),
            evidence=Evidence(zero_denominator=True, singular_at=0.0),
        ),
        BACKWARD,
    ),
    "where_sqrt_unselected_branch": (
        ("SG402",),
        origin(
            "backward",
            "aten.div",
            tensor("self", (4, 6), -0.1, 0.1, zeros=12, index=(0, 1), value=0.0),
            tensor("other", (4, 6), 0.5, 2.2, nan=12, index=(0, 1), value=NAN),
            node="SqrtBackward0",
            module="act",
            output=out((4, 6), nan=12),
            evidence=Evidence(unselected=True, zero_upstream_gradient=True),
        ),
        BACKWARD,
    ),
    "where_exp_unselected_branch": (
        ("SG402",),
        origin(
            "backward",
            "aten.mul",
            tensor("self", (4, 4), -0.1, 0.1, zeros=4, index=(2, 0), value=0.0),
            tensor("other", (4, 4), 0.1, 4.0, posinf=3, index=(2, 0), value=INF),
            node="ExpBackward0",
            module="act",
            samples=(2,),
            output=out((4, 4), nan=3),
            evidence=Evidence(unselected=True, zero_upstream_gradient=True),
        ),
        BACKWARD,
    ),
    "focal_loss_pow_gradient": (
        ("SG401",),
        origin(
            "backward",
            "aten.pow",
            tensor("self", (2, 1), 0.0, 0.6, zeros=1, index=(0, 0), value=0.0),
            number("exponent", -0.5),
            node="PowBackward0",
            module="criterion",
            samples=(0,),
            output=out((2, 1), posinf=1),
            evidence=Evidence(singular_at=0.0),
        ),
        BACKWARD,
    ),
    "transient_inf_absorbed_forward": (
        ("SG403",),
        origin(
            "forward",
            "aten.reciprocal",
            tensor("self", (3, 4), 0.0, 3.0, zeros=4, index=(0, 0), value=0.0),
            module="weight",
            samples=(0,),
            output=out((3, 4), posinf=4),
            evidence=Evidence(
                absorbed=True,
                absorbed_by="aten.erf",
                zero_denominator=True,
                denominator_from="aten.sqrt",
            ),
        ),
        BACKWARD,
    ),
    "t5_ffn_fp16_overflow": (
        ("SG301",),
        origin(
            "forward",
            "aten.mm",
            tensor("self", (6, 32), 190.0, 195.0, dtype=HALF),
            tensor("mat2", (32, 8), 12.0, 12.0, dtype=HALF),
            module="block.1.ff.wo",
            output=out((6, 8), dtype=HALF, posinf=48),
            evidence=Evidence(half_precision=True, finite_in="float32", batch_max=5.0),
        ),
        {},
    ),
}
