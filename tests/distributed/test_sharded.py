"""Two real processes over gloo whose model is sharded by torch itself: FSDP2, FSDP1, tensor
parallelism. No rank replays anything alone, and one rank's trouble poisons nobody.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from scenes import difference

WORKER = Path(__file__).with_name("sharded_worker.py")
LOOPS = ["step", "watch"]
ENGINES = ["fsdp2", "fsdp1", "tp"]
NEIGHBOURS = ["offload", "fused", "foreach", "dropout", "accumulate"]
"""FSDP2 with another policy, another kernel of the optimizer, or another loop."""
TROUBLED = [
    "-".join(("trouble", *parts))
    for parts in [
        *product(LOOPS, ENGINES, ["input", "backward", "labels"]),
        *product(LOOPS, ["mixed", *NEIGHBOURS], ["input"]),
    ]
]
HEALTHY = [
    "-".join(("healthy", *parts))
    for parts in [
        *product(LOOPS, [*ENGINES, "mixed"], ["clip", "unclipped"]),
        *product(LOOPS, NEIGHBOURS, ["clip"]),
    ]
]
FAULTS = ["-".join(("fault", "step", engine, "clip")) for engine in ENGINES]
DAMAGED = ["-".join(("damage", *parts)) for parts in product(LOOPS, ENGINES, ["weight", "slot"])]
BORN = [
    "-".join(("trouble", *parts))
    for parts in [
        *product(["step"], ENGINES, ["forward", "buffer", "rate"]),
        *product(["watch"], ["fsdp2"], ["forward", "buffer", "rate"]),
    ]
]
TWO = ["trouble-step-fsdp2-two", "trouble-step-fsdp1-two", "trouble-watch-fsdp2-two"]
TRANSIENT = ["-".join(("transient", "step", engine, "transient")) for engine in ENGINES]
MIDWAY = ["midway-fsdp2", "midway-fsdp1"]
SPIKES = ["-".join(("spike", "step", engine, "act")) for engine in ENGINES]
BAD_STEPS = [2, 3]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every scenario, run by one pair of processes; what each rank ended with."""
    out = tmp_path_factory.mktemp("sharded")
    names = [*HEALTHY, *TROUBLED, *SPIKES, *DAMAGED, *FAULTS, *MIDWAY, "refused"]
    names += [*BORN, *TWO, *TRANSIENT]
    code, log = launch(WORKER, out, names, 300)
    assert code == 0, log[-3000:]
    return {
        name: [torch.load(out / f"{name}.{rank}.pt", weights_only=False) for rank in (0, 1)]
        for name in names
    }


def _parts(run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in ("model", "optimizer")}


@pytest.mark.parametrize("name", TROUBLED)
def test_trouble_of_one_rank_is_vetoed_on_all_and_poisons_none(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        assert guarded["armed"] and guarded["halted"] is None
        assert difference(_parts(guarded), _parts(rank["reference"])) == ""
        told = [(incident["step"], incident["action"]) for incident in guarded["incidents"]]
        assert told == [(step, "skip") for step in BAD_STEPS]


@pytest.mark.parametrize("name", [n for n in TROUBLED if n.endswith("input") and "tp" not in n])
def test_rank_with_the_bad_input_is_named(name: str, outcomes: dict[str, list[Any]]) -> None:
    for rank in outcomes[name]:
        for incident in rank["guarded"]["incidents"]:
            assert incident["rank"] == 1
            assert incident["tensor"].startswith("batch:")


@pytest.mark.parametrize("name", [n for n in TROUBLED if n.endswith("backward") and "fsdp2" in n])
def test_rank_whose_own_gradient_was_bad_is_named_though_it_was_exchanged(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        for incident in rank["guarded"]["incidents"]:
            assert (incident["ranks"], incident["rank"]) == ((1,), 1)


@pytest.mark.parametrize("name", [n for n in TROUBLED if n.endswith("input") and "fsdp2" in n])
def test_sample_of_the_rank_with_the_bad_input_is_named(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        for incident in rank["guarded"]["incidents"]:
            place = incident["place"]
            assert (place["op"], place["module"]) == ("aten.addmm", "0")
            assert (place["samples"], place["reproduced"]) == ((2,), True)


@pytest.mark.parametrize("name", BORN)
def test_what_one_rank_alone_makes_or_sets_non_finite_is_refused_by_all(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    action = "undo" if name.endswith("rate") else "skip"
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        assert guarded["armed"] and guarded["halted"] is None
        assert difference(_parts(guarded), _parts(rank["reference"])) == ""
        told = [(incident["step"], incident["action"]) for incident in guarded["incidents"]]
        assert told == [(step, action) for step in BAD_STEPS]
        for incident in guarded["incidents"]:
            assert (incident["ranks"], incident["rank"]) == ((1,), 1)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_with_two_causes_are_both_told(name: str, outcomes: dict[str, list[Any]]) -> None:
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        assert guarded["armed"]
        assert difference(_parts(guarded), _parts(rank["reference"])) == ""
        for incident in guarded["incidents"]:
            # the one with the bad input is surer
            assert (incident["ranks"], incident["rank"]) == ((1, 0), 1)
            assert any("rank 0 as well" in remark for remark in incident["place"]["remarks"])


@pytest.mark.parametrize("name", TRANSIENT)
def test_gradient_that_was_hit_once_is_made_again_or_left_out(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    # only a replay shows that it does not happen again
    replayed = "fsdp2" in name
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        (incident,) = guarded["incidents"]
        # the gradients were exchanged, and no rank shows it by itself: none is blamed
        assert (incident["ranks"], incident["rank"]) == ((), None)
        assert incident["action"] == ("retry" if replayed else "skip")
        expected = rank["reference"] if replayed else rank["without"]
        assert difference(_parts(guarded), _parts(expected)) == ""


@pytest.mark.parametrize("name", SPIKES)
def test_jump_of_the_loss_leaves_a_healthy_run_as_it_is(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        guarded, bare = rank["guarded"], rank["reference"]
        assert guarded["armed"]
        assert difference(_parts(guarded), _parts(bare)) == ""
        assert [loss for loss, _ in guarded["said"]] == [loss for loss, _ in bare["said"]]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_ranks_are_the_same_as_bare_ones_also_where_the_guard_clips(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        guarded, bare = rank["guarded"], rank["reference"]
        assert guarded["armed"] and guarded["incidents"] == []
        assert difference(_parts(guarded), _parts(bare)) == ""
        if name.endswith("-clip"):
            # the norm of all ranks, on every rank
            assert guarded["said"] == bare["said"]
            assert min(norm for _, norm in bare["said"]) < 0.7 < bare["said"][1][1]


# FSDP1 clips without taking torch's norm: what `watch` reads after it is clipped
@pytest.mark.parametrize("name", [name for name in HEALTHY if name != "healthy-watch-fsdp1-clip"])
def test_every_rank_reads_the_norm_of_all_gradients_also_where_nothing_clips(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    first = outcomes[name][0]["guarded"]["norms"]
    for rank in outcomes[name]:
        assert rank["guarded"]["norms"] == first
        expected = [norm for _, norm in rank["reference"]["said"]]
        assert first == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [n for n in HEALTHY if "fsdp1" not in n])
def test_healthy_step_of_a_sharded_model_adds_one_reduction(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        assert rank["guarded"]["collectives"] == {"all_reduce": 6}


@pytest.mark.parametrize("name", FAULTS)
def test_rank_whose_guard_fails_clips_on_with_the_others(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    assert not outcomes[name][1]["guarded"]["armed"]
    for rank in outcomes[name]:
        assert difference(_parts(rank["guarded"]), _parts(rank["reference"])) == ""


@pytest.mark.parametrize("name", DAMAGED)
def test_bad_shard_of_one_rank_is_named_with_its_rank_and_all_go_back(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    parameter = "_fsdp_wrapped_module._flat_param" if "fsdp1" in name else "0.weight"
    # a bad slot shows in the parameter after the next update
    step = 3 if name.endswith("slot") else 2
    for rank in outcomes[name]:
        guarded = rank["guarded"]
        assert guarded["armed"] and guarded["halted"] is None
        (incident,) = guarded["incidents"]
        assert (incident["step"], incident["action"]) == (step, "rewind")
        assert (incident["rank"], incident["ranks"]) == (1, (1,))
        assert incident["tensor"] == f"param:{parameter}"
        assert all(bool(part.isfinite().all()) for part in guarded["model"])
        if name.startswith("damage-step"):
            # the steps since are run again, by all ranks, as they were
            assert difference(_parts(guarded), _parts(rank["reference"])) == ""


def test_clipping_that_fsdp1_cannot_do_is_refused_with_the_way_out(
    outcomes: dict[str, list[Any]],
) -> None:
    for rank in outcomes["refused"]:
        assert "wrap it, or use stepguard.watch and clip in your loop" in rank["why"]


@pytest.mark.parametrize("name", MIDWAY)
def test_guard_attached_while_the_parameters_are_whole_stays_armed(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        guarded, bare = rank["guarded"], rank["reference"]
        assert guarded["armed"] and guarded["incidents"] == ()
        assert guarded["said"] == bare["said"]
        assert difference(_parts(guarded), _parts(bare)) == ""
