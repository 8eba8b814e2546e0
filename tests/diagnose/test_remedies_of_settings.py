"""Ranks, replays and settings: TO DO names rank, step, state, module, dtype and rate."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import found, origin, traced_in
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Origin


def replayed(evidence: Evidence, **more: Any) -> Origin:
    return origin("loss", "aten.mul", method="replay", reproduced=False, evidence=evidence, **more)


def first(code: str, where: Origin | None, **reading: Any) -> tuple[str, str]:
    remedy = found(code, where, **reading).remedies[0]
    return remedy.title, remedy.snippet


def test_rank_and_step_are_named() -> None:
    facts = RunFacts(world_size=4)
    title, _ = first("SG701", None, bad_ranks=(2,), facts=facts, step=7)
    assert title.startswith("Look at the data and the device of rank 2: step 7 was bad there")


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (
            Evidence(moves=("`self.calls` of the loss",)),
            "Keep `self.calls` of the loss in a buffer",
        ),
        (Evidence(different_losses=(1.0, 2.0)), "two replays gave 1 and 2"),
        (Evidence(same_bits=False), "Make step 1 repeat itself"),
        (Evidence(same_bits=True), "writes into the batch of step 1 after"),
    ],
)
def test_what_a_replay_showed_decides_what_to_do(evidence: Evidence, expected: str) -> None:
    assert expected in first("SG702", replayed(evidence))[0]


def test_module_is_left_out_of_the_compiled_graph() -> None:
    where = replayed(Evidence(compiled_only=True), module="blocks.1")
    title, snippet = first("SG703", where)
    assert "Leave `blocks.1` out of the compiled graph" in title
    assert snippet.startswith('module = model.get_submodule("blocks.1")')


def test_drifted_rank_is_given_the_weights_of_one_that_agrees() -> None:
    said: dict[str, float | int | str] = {
        "ranks": "2",
        "agree": "0, 1",
        "tensor": "fc.weight",
        "parameters": 3,
    }
    title, _ = first("SG704", None, kind="replica_drift", said=said)
    assert title.startswith("Give rank 2 `fc.weight` and the rest from rank 0: Policy with 'heal'")
    rates: dict[str, float | int | str] = {"ranks": "0, 1", "rates": "0.1 and 0.2"}
    title, _ = first("SG704", None, kind="replica_drift", said=rates)
    assert title == "Give ranks 0, 1 the same learning rate: 0.1 and 0.2"


def test_samplers_are_told() -> None:
    said: dict[str, float | int | str] = {"samplers": "seed 1 and seed 2"}
    title, _ = first("SG705", None, kind="same_data", said=said)
    assert title.endswith("on all: now seed 1 and seed 2")


def test_dtype_that_was_asked_for_is_named() -> None:
    facts = RunFacts(configured_dtype="bfloat16", scaling="dynamic", param_dtypes=("float16",))
    finding = found("SG801", traced_in("float16"), facts=facts)
    titles = [remedy.title for remedy in finding.remedies]
    assert titles[0] == "Name bfloat16 where the autocast context is opened: it gives float16"
    assert titles[1].endswith("does not unscale gradients in float16")
    unscaled = found("SG801", traced_in("float16"), facts=RunFacts(scaling="none"))
    assert unscaled.remedies[0].title.startswith("Scale the loss, or autocast to bfloat16")


def test_configured_rate_is_put_back_in_its_group() -> None:
    facts = RunFacts(configured_lr=(0.1, 0.01), resumed=True)
    title, snippet = first("SG802", None, kind="lr_mismatch", lr=(0.1, 0.5), facts=facts)
    assert "0.01 for group 1 (it runs with 0.5)" in title
    assert snippet == 'optimizer.param_groups[1]["lr"] = 0.01'


def test_loss_of_zero_is_told_with_its_numbers() -> None:
    title, _ = first("SG803", None, kind="zero_loss", loss=0.0, grad_norm=0.0)
    assert title.endswith("it is 0 with a gradient of 0")
    title, _ = first("SG803", None, kind="no_labels", loss=0.0, labels=0, step=3)
    assert "none of the targets of step 3 counts" in title
