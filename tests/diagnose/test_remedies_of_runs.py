"""Optimizer and stored state: TO DO names the parameter, slot, group, rate and step."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.diagnose_literals import BACKWARD, found, origin, tensor
from diagnose.test_remedies_of_precision import first_finding
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence


@pytest.mark.parametrize(
    ("name", "code", "title", "snippet"),
    [
        ("clip_norm_overflow_zeroes_all_grads", "SG501", "largest element is 1e+20", "1e18"),
        ("adam_eps_underflow_fp16", "SG502", "Keep `emb.weight` in float32 (it is float16)", ""),
        ("rmsprop_without_epsilon", "SG502", "Give RMSprop an epsilon", "RMSprop(..., eps=1e-8)"),
        ("adamp_eps_after_rsqrt", "SG502", "Put the eps of LateEpsilon under the root", ""),
        ("moments_loaded_with_nan", "SG503", "Load `exp_avg` from where the weights come from", ""),
        ("second_moment_saved_in_fp16", "SG503", "52 of its elements were rounded to 0", ""),
        ("rate_of_one_group_in_the_wrong_unit", "SG504", "group 1 back: 0.05", '[1]["lr"] = 0.05'),
        ("schedule_divides_by_zero_warmup", "SG504", "lr of group 0 to nan at step 3", ""),
        ("lr_too_high_divergence", "SG505", "Give SGD a lower lr than 0.8", ""),
        ("uninitialised_parameter", "SG601", "Fill `bg`", 'model.get_parameter("bg")'),
        ("bad_weights_loaded_in_mid_run", "SG601", "wrote into `fc1.weight` between step 1", ""),
        ("biaffine_weight_from_torch_tensor", "SG601", "Fill `biaffine.U`", '"biaffine.U"'),
        ("bn_running_var_nan_in_checkpoint", "SG602", "`bn.running_var`", 'get_submodule("bn")'),
        (
            "position_table_never_filled",
            "SG602",
            "Fill `position` before its first use (3 of 3",
            "",
        ),
        ("centre_that_is_no_buffer", "SG602", "Make `self.centre` of `head` a buffer", '"centre"'),
    ],
)
def test_incident_of_the_zoo_is_answered_in_its_own_words(
    name: str, code: str, title: str, snippet: str, tmp_path: Path
) -> None:
    finding = first_finding(name, tmp_path)
    assert finding.code == code
    first = finding.remedies[0]
    assert title in first.title
    assert snippet in first.snippet


def test_damaged_slot_is_cleared_for_its_parameter() -> None:
    bad = tensor("opt:exp_avg", (4,), 0.0, 1.0, nan=1)
    where = origin("state", None, bad, tensor="opt:exp_avg", evidence=Evidence(parameter="fc.bias"))
    facts = RunFacts(optimizer="Adam", betas=(0.9, 0.99))
    finding = found("SG503", where, kind="nonfinite_optimizer_state", loss=1.0, facts=facts)
    clear = finding.remedies[1]
    assert clear.title == "Or clear the state of `fc.bias`: it is rebuilt within some 100 steps"
    assert clear.snippet == 'optimizer.state.pop(model.get_parameter("fc.bias"), None)'


def test_schedule_that_runs_away_is_to_end() -> None:
    facts = RunFacts(first_lr=(0.1,), initial_lr=(0.1,), committed=90, optimizer="SGD")
    finding = found("SG505", None, kind="spike", loss=9e4, lr=(0.3,), facts=facts)
    said = finding.remedies[0].title
    assert said == "Let the schedule end: the lr of group 0 is 0.3, declared was 0.1"


def test_collapsed_scale_names_the_gradient() -> None:
    reading = {**BACKWARD, "kind": "scaler_collapse", "scale": 0.25, "bad_grads": ("head.weight",)}
    first = found("SG506", None, **reading).remedies[0].title
    assert "at 0.25 the gradients are still not finite, first in `head.weight`" in first


def test_tensor_of_a_bad_checkpoint_is_named() -> None:
    where = origin("checkpoint", None, tensor="param:head.weight")
    first = found("SG603", where).remedies[0].title
    assert "`param:head.weight` of this one is not finite" in first
