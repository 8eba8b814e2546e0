"""The other half of the incidents of the shared zoo, as the locator describes them."""

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
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence

HALF = "float16"
SPIKE: dict[str, Any] = {"kind": "spike", "loss": 9e4, "grads_finite": True}
ZEROS = {"zeros": 1, "index": (2, 0), "value": 0.0}

ZOO_OF_RUNS: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
    "adam_eps_underflow_fp16": (
        ("SG502",),
        origin(
            "optimizer",
            "aten.addcdiv_",
            tensor("self", (6, 4), -1.5, 1.4, dtype=HALF),
            tensor("tensor1", (6, 4), -0.01, 0.01, dtype=HALF, zeros=16, index=(0, 0), value=0.0),
            tensor("tensor2", (6, 4), 0.0, 0.02, dtype=HALF, zeros=16, index=(0, 0), value=0.0),
            number("value", -0.001),
            tensor="param:emb.weight",
            output=out((6, 4), dtype=HALF, nan=16),
            evidence=Evidence(
                zero_denominator=True,
                zero_numerator=True,
                half_precision=True,
                eps_underflow=True,
                eps=1e-08,
            ),
        ),
        {
            "loss": 0.7,
            "grads_finite": True,
            "kind": "nonfinite_parameter",
            "bad_state": ("param:emb.weight",),
            "state_born": True,
            "facts": RunFacts(optimizer="Adam", eps=1e-8, param_dtypes=(HALF,)),
        },
    ),
    "fp16_grad_accumulation_overflow": (
        ("SG301",),
        origin(
            "backward",
            "aten.add_",
            tensor("self", (1, 2), 60000.0, 60000.0, dtype=HALF),
            tensor("other", (1, 2), 30000.0, 30000.0, dtype=HALF),
            node="torch::autograd::AccumulateGrad",
            micro_batch=2,
            output=out((1, 2), dtype=HALF, posinf=2),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        BACKWARD,
    ),
    "scaler_death_spiral": (
        ("SG204",),
        origin(
            "forward",
            "aten._softmax",
            tensor("self", (2, 3, 3), -0.5, 0.4, neginf=9),
            module="attn",
            samples=(1,),
            output=out((2, 3, 3), nan=9),
            evidence=Evidence(masked_rows=3, rows=6, intended_inf=True),
        ),
        {"scale": 0.25},
    ),
    "clip_grad_norm_inf_to_nan": (
        ("SG401",),
        origin(
            "backward",
            "aten.div",
            tensor("self", (1,), 0.8, 0.8, index=(0,), value=0.8),
            tensor("other", (1,), 0.0, 0.0, zeros=1, index=(0,), value=0.0),
            node="SqrtBackward0",
            module="",
            output=out((1,), posinf=1),
            evidence=Evidence(zero_denominator=True, singular_at=0.0),
        ),
        BACKWARD,
    ),
    "clip_norm_overflow_zeroes_all_grads": (
        ("SG501",),
        origin(
            "optimizer",
            "aten._foreach_norm",
            tensor("self[0]", (1, 100), 1e20, 1e20),
            output=out((), posinf=1),
            evidence=Evidence(finite_norm=1e21, finite_in="float64"),
        ),
        {"loss": 3e20, "grads_finite": True, "grad_norm": INF, "kind": "infinite_norm"},
    ),
    "uninitialised_parameter": (
        ("SG601",),
        origin(
            "state",
            "aten.cat",
            tensor("bg", (1, 4), None, None, nan=4, index=(0, 0), value=NAN),
            tensor="param:bg",
            module="",
            step=0,
        ),
        {"step": 0, "kind": "nonfinite_parameter", "bad_state": ("param:bg",)},
    ),
    "bn_running_var_nan_in_checkpoint": (
        ("SG602",),
        origin(
            "state", "aten.native_batch_norm", tensor="buffer:bn.running_var", module="bn", step=0
        ),
        {
            "loss": 0.7,
            "grads_finite": True,
            "kind": "nonfinite_buffer",
            "bad_state": ("buffer:bn.running_var",),
        },
    ),
    "bn_stats_poisoned_by_skipped_batch": (
        ("SG101",),
        origin(
            "input",
            "aten.addmm",
            tensor="batch:x",
            module="lin",
            samples=(4,),
            evidence=Evidence(bad_elements=1),
        ),
        {"kind": "nonfinite_input", "bad_inputs": ("batch:x",)},
    ),
    "adam_state_poisoned_after_weight_restore": (
        ("SG101",),
        origin("input", "aten.addmm", tensor="batch:x", samples=(0,)),
        {"kind": "nonfinite_input", "bad_inputs": ("batch:x",)},
    ),
    "lr_spike_after_resume": (
        ("SG504",),
        origin("optimizer", "aten.add_"),
        SPIKE
        | {
            "lr": (4.0,),
            "facts": RunFacts(lr_history=((0.01,),) * 5 + ((4.0,),) * 2, losses=(9.0, 5.0, 3.0)),
        },
    ),
    "lr_too_high_divergence": (
        ("SG505",),
        origin("optimizer", "aten.add_"),
        SPIKE
        | {"lr": (0.8,), "facts": RunFacts(lr_history=((0.8,),) * 4, losses=(8.0, 60.0, 900.0))},
    ),
    "nan_feature_in_one_sample": (
        ("SG101",),
        origin(
            "input",
            "aten.addmm",
            tensor("x", (5, 4), -1.9, 2.2, nan=1, index=(3, 1), value=NAN),
            tensor="batch:x",
            module="fc1",
            samples=(3,),
        ),
        {"kind": "nonfinite_input", "bad_inputs": ("batch:x",)},
    ),
    "one_rank_poisons_all_reduce": (
        ("SG101", "SG701"),
        origin("input", "aten.addmm", tensor="batch:x", module="", samples=(2,), micro_batch=1),
        {
            "kind": "nonfinite_input",
            "bad_inputs": ("batch:x",),
            "bad_ranks": (1,),
            "facts": RunFacts(world_size=2),
        },
    ),
    "nan_weights_saved_as_checkpoint": (
        ("SG101",),
        origin("input", "aten.addmm", tensor="batch:x", module="a", samples=(0,)),
        {"kind": "nonfinite_input", "bad_inputs": ("batch:x",)},
    ),
}
