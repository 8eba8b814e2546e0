"""The benchmarks write what they promise, count what they say, and can fail. No time is asserted.

Their `--quick` forms that train for long run at full length only.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.parts import failing_trainings, reading, sound_trainings, timing
from benchmarks.parts.bad_moments import AT, MOMENTS, STEPS, Moment, begin
from benchmarks.parts.forecast_runs import Outcome, first_loss_above, first_norm_above
from benchmarks.parts.framework_loops import QUICK as QUICK_LOOP
from benchmarks.parts.framework_loops import Clock
from benchmarks.parts.strategies import do_nothing, guarded
from benchmarks.parts.variants import VARIANTS
from benchmarks.parts.workloads import FULL as MODELS
from benchmarks.parts.workloads import QUICK
from benchmarks.rank_faults import QUICK as RANK_FAULTS
from benchmarks.soak import KINDS, play
from zoo.incidents import CHECKPOINTS, INCIDENTS, NOT_HERE
from zoo.silent.catalogue import chosen

import forked
from benchmarks import (
    counts,
    forecast,
    frameworks,
    incidents,
    overhead,
    own_cost,
    recovery,
    scale,
    silent,
    snapshot,
    table,
    verify,
    whatif,
)
from forked import FULL
from stepguard.diagnose import all_rules
from stepguard.diagnose.engine import SERIES
from stepguard.sentinel.gradients import Packet

ROOT = Path(__file__).parents[2]


def strict(path: Path) -> Any:
    """JSON without the words that only Python reads."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


# --- cost
# --------------------------------------------------------------------------------------------------


MEASURED = list(QUICK) if FULL else list(QUICK)[:1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("overhead") / "overhead.json"
    words = ["--quick", "--rounds", "2", *([] if FULL else ["--only", MEASURED[0]])]
    assert overhead.main([*words, "--output", str(path)]) == 0
    return path


def test_quick_run_measures_every_variant_and_says_where(measured: Path) -> None:
    data = strict(measured)
    assert list(data["workloads"]) == MEASURED
    for workload in data["workloads"].values():
        assert [row["variant"] for row in workload["rows"]] == [v.name for v in VARIANTS]
        for row in workload["rows"]:
            if row["missing"]:
                assert row["ratio"] is None
                continue
            assert row["ratio"] > 0 and math.isfinite(row["ratio"]) and row["milliseconds"] > 0
            assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
        facts = workload["machine"]
        assert facts["torch"] == torch.__version__ and facts["threads"] == 1 and facts["cpus"] >= 1
    assert "/" not in measured.read_text(encoding="utf-8").replace("isnan/isinf", "")


@pytest.mark.full
def test_one_variant_of_one_model_measured_again_keeps_the_others(
    measured: Path, output: Path
) -> None:
    output.write_text(measured.read_text(encoding="utf-8"), encoding="utf-8")
    first, *others = MEASURED
    words = ["--quick", "--only", first, "--variants", "watch", "--rounds", "3"]
    assert overhead.main([*words, "--output", str(output)]) == 0
    before, after = (strict(path)["workloads"] for path in (measured, output))
    assert all(after[name] == before[name] for name in others)
    old, new = ({row["variant"]: row for row in data[first]["rows"]} for data in (before, after))
    assert new["watch"]["rounds"] == 3
    assert new["step"] == old["step"]
    assert list(new) == list(old)


@pytest.mark.parametrize(
    ("bench", "words", "said"),
    [
        (overhead, ["--variants", "wach"], "watch"),
        (overhead, ["--only", "gpt-9t"], "gpt-7m"),
        (frameworks, ["--only", "keras"], "trainer"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(
    output: Path, capsys: pytest.CaptureFixture[str], bench: Any, words: list[str], said: str
) -> None:
    assert bench.main([*words, "--output", str(output)]) == 2
    assert said in capsys.readouterr().out
    assert not output.exists()


def test_neighbour_of_a_watched_loop_runs_without_its_hooks() -> None:
    workload, plain = QUICK["gpt-tiny"](), torch.Tensor.backward
    pair = next(v for v in VARIANTS if v.name == "watch").pair(workload)
    batch = workload.batch(torch.Generator().manual_seed(0))
    before = Packet.fetched
    with pair.bare.stage():
        pair.bare.step(batch)
        assert torch.Tensor.backward is plain
    assert Packet.fetched == before
    with pair.own.stage():
        assert torch.Tensor.backward is not plain
        pair.own.step(batch)
    assert Packet.fetched == before + 1
    assert torch.Tensor.backward is plain
    pair.own.close()


@pytest.mark.parametrize("name", [*MODELS, *QUICK])
def test_models_have_the_size_their_names_say(name: str) -> None:
    wanted = {"gpt-7m": "7.4M", "gpt-50m": "50.5M", "resnet-18": "11.2M"}
    assert wanted.get(name, "k") in (MODELS | QUICK)[name]().what


def test_interval_of_the_median_holds_the_median_and_repeats() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.02, 0.97]
    low, high = timing.interval_of_median(values)
    assert low <= 1.01 <= high
    assert (low, high) == timing.interval_of_median(values)


@pytest.mark.full
def test_counts_show_at_most_one_awaited_packet_and_no_other_read(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "QUICK", {name: QUICK[name] for name in MEASURED})
    assert counts.main(["--output", str(output)]) == 0
    for workload in strict(output)["workloads"].values():
        rows = {row["variant"]: row for row in workload["rows"]}
        for row in rows.values():
            if row["ours"]:
                bare = rows["bare, fused" if row["fused"] else "bare"]
                assert row["reads"] == bare["reads"]
                assert row["packets"] + row["late_packets"] <= 1
                assert row["kibibytes"] - bare["kibibytes"] < 4
        assert rows["step, fused"]["packets"] == 0
        assert rows["each gradient"]["reads"] > rows["bare"]["reads"]


def test_table_goes_between_the_markers_and_nowhere_else(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, words = tmp_path / "README.md", ["--results", str(measured)]
    page.write_text("# x\n", encoding="utf-8")
    assert table.main([*words, "--page", str(page)]) == 2
    assert table.BEGIN in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "# x\n"
    page.write_text(f"# x\n\n{table.BEGIN}\nSTALE\n{table.END}\n\nafter\n", encoding="utf-8")
    assert table.main([*words, "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# x\n\n{table.BEGIN}\n| step |")
    assert text.endswith(f"{table.END}\n\nafter\n")
    assert "STALE" not in text and "**guard.step**" in text
    assert "nan" not in text.replace("isnan", "")
    assert table.main([*words, "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text
    assert table.main(["--results", str(tmp_path / "none.json")]) == 2
    assert "benchmarks overhead" in capsys.readouterr().err


@pytest.mark.full
def test_kept_memory_is_not_taken_from_the_system_again() -> None:
    """In a process of its own: the allocator stays as it was told."""
    program = (
        "import resource, torch\n"
        "from benchmarks.parts import machine\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(20):\n"
        "        torch.ones(2**24)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "before = faults()\n"
        "print(machine.keep_memory(), machine.facts()['memory_kept'], before, faults())\n"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    kept, told, before, after = said.stdout.split()
    assert kept == told
    assert kept == "False" or int(after) < int(before) / 2


@pytest.mark.full
def test_every_loop_is_measured_at_every_size(output: Path) -> None:
    assert own_cost.main(["--quick", "--output", str(output)]) == 0
    data = strict(output)
    measured = {(row["loop"], row["tensors"], row["fused"]) for row in data["rows"]}
    assert len(measured) == len(data["rows"]) == 9 * 2 * 2
    assert all(row["step_us"] > 0 for row in data["rows"])
    trained = [row["loop"] for row in data["frameworks"]]
    assert trained == ["transformers Trainer", "Lightning Trainer"]
    assert {line["loop"] for line in data["fitted"]} == set(own_cost.OURS)


def test_fit_goes_through_the_smallest_and_the_largest_model() -> None:
    rows = [
        {"loop": name, "tensors": tensors, "fused": fused, "own_us": own}
        for name in own_cost.OURS
        for fused in (False, True)
        for tensors, own in ((6, 106.0), (40, 300.0), (400, 500.0))
    ]
    line = own_cost.fitted(rows)[0]
    assert line["us_per_step"] == 100.0 and line["ns_per_tensor"] == 1000.0
    assert line["one_per_cent_from_ms"] == {6: 10.6, 40: 30.0, 400: 50.0}


@pytest.mark.full
def test_quick_run_measures_a_framework_and_its_control(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frameworks.main(["--quick", "--only", "trainer", "--output", str(output)]) == 0
    rows = strict(output)["loops"]
    assert [(r["loop"], r["control"]) for r in rows] == [("trainer", True), ("trainer", False)]
    for row in rows:
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert row["milliseconds"] > 0
    assert "control" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["trainer", "lightning"])
def test_the_guard_is_gone_when_a_guarded_run_is_over(name: str) -> None:
    loop, backward = frameworks.LOOPS[name](QUICK_LOOP), torch.Tensor.backward
    steps = loop.run(3, guarded=True)
    loop.close()
    assert len(steps) == 2
    assert torch.Tensor.backward is backward


def test_a_clock_gives_every_step_but_the_last() -> None:
    clock = Clock()
    for _ in range(4):
        clock.mark()
    assert len(clock.take()) == 3
    assert clock.take() == []


def test_small_snapshot_measurement_says_what_it_promises(output: Path) -> None:
    assert snapshot.main(["--quick", "--output", str(output)]) == 0
    found = strict(output)
    (row,) = found["sizes"].values()
    assert row["stall_seconds"] > 0 and row["bytes"] > 3 * 4 * row["parameters"]
    assert all(cost["share"] <= found["promise"] for cost in row["amortised"].values())


def test_quick_verification_measures_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what is measured elsewhere is that it runs."""

    def child(name: str, path: Path) -> dict[str, float]:
        capsys.readouterr()
        assert reading.main(name, str(path)) == 0
        seen: dict[str, float] = json.loads(capsys.readouterr().out)
        return seen

    monkeypatch.setattr(verify, "_child", child)
    path = tmp_path / "verify.json"
    words = ["--quick", "--megabytes", "2", "--folder", str(tmp_path), "--output", str(path)]
    assert verify.main(words) == 0
    data = strict(path)
    assert data["files"].keys() == {"torch zip", "safetensors"}
    for rows in (rows for caches in data["files"].values() for rows in caches.values()):
        assert {"read", "stepguard"} < {row["name"] for row in rows}
        assert all(row["seconds"] > 0 and row["of_reading"] > 0 for row in rows)
    assert str(tmp_path) not in path.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]


@pytest.mark.parametrize("name", reading.CONTENDERS)
def test_every_contender_finds_a_nan(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "torch zip" if ".pt" in reading.CONTENDERS[name].suffixes else "safetensors"
    path = verify.make(tmp_path, kind, 2)
    assert reading.main(name, str(path)) == 0
    bad = {"w": torch.tensor([float("nan")])}
    if path.suffix == ".pt":
        torch.save(bad, path)
    else:
        from safetensors.torch import save_file

        save_file(bad, path)
    assert reading.main(name, str(path)) == (0 if name.startswith("read") else 1)


# --- ranks
# --------------------------------------------------------------------------------------------------

SMALL, LARGE = 32, 10**9


def test_modelled_network_behaves_like_one() -> None:
    for formula in scale.FORMULAS.values():
        for ranks in (2, 8, 512):
            assert formula(ranks, SMALL) <= formula(2 * ranks, SMALL)
            assert formula(ranks, SMALL) < formula(ranks, LARGE)
    assert scale.all_reduce(1024, SMALL) == pytest.approx(20 * scale.LATENCY, rel=0.01)
    assert scale.all_reduce(8, LARGE) == pytest.approx(1.75 * LARGE / scale.BANDWIDTH, rel=0.01)
    gathered = {"all_gather": 1, "all_gather bytes": 100}
    reduced = {"all_reduce": 1, "all_reduce bytes": 100}
    assert scale.modelled(gathered, 512, 0.0)["received (bytes)"] == 511 * 100
    assert scale.modelled(reduced, 512, 0.0)["received (bytes)"] == 100


def test_healthy_step_on_record_has_no_collective_under_ddp_and_one_under_fsdp2() -> None:
    found = strict(ROOT / "benchmarks/results/scale.json")["measured"]
    steps = [{name: run["counts"][name]["healthy step"] for name in run["counts"]} for run in found]
    sent = steps[0]["fsdp2"]["all_reduce bytes"]
    for healthy in steps:
        assert healthy["ddp"] == {}
        assert healthy["fsdp2"]["all_reduce"] == 1
        assert healthy["fsdp2"]["all_reduce bytes"] == sent


def test_every_fault_of_a_rank_ends_in_time_with_finite_weights(output: Path) -> None:
    words = ["-m", "benchmarks", "rank_faults", "--quick", "--output", str(output)]
    ran = forked.python(words, folder=ROOT, seconds=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    found = strict(output)["cells"]
    assert len(found) == len(RANK_FAULTS)
    assert all(cell["good"] for cell in found)


@pytest.mark.full
def test_two_ranks_outlast_every_kind_of_fault() -> None:
    """A short soak, unattended."""
    fine = play("no fault", 0, 400, 20)[0]
    ranks = play("guarded", 0, 400, 20)
    for rank in ranks:
        assert set(rank["kinds"]) == set(KINDS)
        assert rank["stopped"] == ""
        assert rank["armed"] and rank["finite"]
        assert {"skip", "retry", "heal", "rewind"} <= set(rank["decisions"])
        assert rank["loss"] < 1.05 * fine["loss"]
    assert ranks[0]["decisions"] == ranks[1]["decisions"]


# --- recovery
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SLICE = (
    "NaN in a running variance",
    "16 bad batches in a row",
    "5 % of the batches bad",
    "NaN in a weight",
)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("name", SLICE if FULL else SLICE[:1])
def test_guarded_run_ends_as_well_as_the_best_remedy(name: str) -> None:
    (moment,) = (one for one in MOMENTS if one.name == name)
    row = recovery.measure(moment, seeds=[0])
    assert row["held"], row["strategies"]


@pytest.mark.usefixtures("_quiet")
def test_every_moment_happens_at_half_way() -> None:
    """A moment that changes nothing would be won by everybody."""
    unchanged = Moment(name="none").harm
    for one in MOMENTS:
        run, clean = begin(one, 0, STEPS), begin(Moment(name="none", kind=one.kind), 0, STEPS)
        pairs = ((run.batch(step), clean.batch(step)) for step in range(AT, AT + 50))
        spoiled = any(
            not bool((a == b).all()) for pair in pairs for a, b in zip(*pair, strict=True)
        )
        assert spoiled or one.harm is not unchanged, one.name


@pytest.mark.usefixtures("_quiet")
def test_nothing_is_changed_where_nothing_happens() -> None:
    calm = Moment(name="nothing happens")
    assert guarded(calm, 0, 60) == (do_nothing(calm, 0, 60)[0], "")


def test_a_lost_row_is_lost() -> None:
    """The bench can fail: a remedy that ends two per cent lower is better."""
    cells = {"stepguard": {"mean": 1.0}, "continue": {"mean": 0.97}}
    assert not recovery.held(cells)
    assert recovery.held({**cells, "continue": {"mean": 0.99}})
    assert not recovery.held({"stepguard": {"mean": math.inf}, "continue": {"mean": 1.0}})
    # nobody saves that run
    assert recovery.held({"stepguard": {"mean": math.inf}, "continue": {"mean": math.inf}})


@pytest.mark.full
@pytest.mark.usefixtures("_quiet")
def test_result_of_recovery_is_strict_json(output: Path) -> None:
    assert recovery.main(["--only", "1 bad", "--quick", "--output", str(output)]) == 0
    (row,) = strict(output)["rows"]
    assert row["strategies"]["do nothing"]["mean"] is None and row["held"]


# --- forecasts, silent failures, remedies
# --------------------------------------------------------------------------------------------------


def told(step: int, place: str = "layer") -> dict[str, object]:
    found = {"place": place, "earliest": 60, "latest": 80}
    return {"step": step, "code": "SG953", "forecast": found}


def test_lead_is_counted_from_the_first_warning_before_the_failure() -> None:
    early = Outcome("a", 0, failed=70, told=[told(40), told(60)])
    late = Outcome("a", 1, failed=50, told=[told(50)])
    row = forecast.failing_row("a", [early, late, Outcome("a", 2)])
    assert row["failed"] == 2
    assert row["rules"]["stepguard"]["leads"] == [30]
    assert row["rules"]["stepguard, no looks"]["foretold"] == 0
    assert row["interval_held"] == 1


def test_every_warning_of_a_healthy_run_counts() -> None:
    row = forecast.sound_row("a", [Outcome("a", 0, steps=100, told=[told(5), told(90)])])
    assert row["warnings"]["stepguard"] == 2
    total = forecast.totals([], [row])
    assert total["rules"]["stepguard"]["false_per_1000_steps"] == pytest.approx(20.0)


def test_simple_rules_warn_once_a_stretch() -> None:
    calm = [1.0 + 0.1 * math.sin(step) for step in range(40)]
    wild = [*calm, 50.0, 60.0, *calm, 50.0]
    outcome = Outcome("a", 0, losses=wild, norms=wild)
    assert first_norm_above(outcome) == [40, 82]
    assert first_loss_above(outcome) == [40]


def test_enough_trainings_are_forecast() -> None:
    assert len(failing_trainings.KINDS) >= 8
    assert len(sound_trainings.KINDS) * forecast.SEEDS >= 100


def test_quick_forecast_foretells_the_failure_and_no_other(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forecast.main(["--quick", "--output", str(output)]) == 0
    content = strict(output)
    rows = {row["kind"]: row for row in content["failing"]}
    assert rows["activations outgrow float16"]["rules"]["stepguard"]["foretold"] == 1
    assert content["totals"]["rules"]["stepguard"]["false_warnings"] == 0
    assert "nothing is foretold of" in capsys.readouterr().out


def test_every_silent_failure_is_planted_in_three_trainings() -> None:
    planted: dict[str, set[str]] = {}
    for plant in chosen():
        planted.setdefault(plant.code, set()).add(plant.training)
    codes = {rule.code for rule in all_rules() if rule.code.startswith(SERIES)}
    # the rest are forecasts; a number that alone is wrong has no code
    assert set(planted) == {"metric"} | {code for code in codes if code < "SG950"}
    assert min(len(trainings) for trainings in planted.values()) >= 3
    assert max(Counter(plant.name for plant in chosen()).values()) == 1
    with pytest.raises(SystemExit, match="no planted mistake fits"):
        chosen(["no_such"])


PLANTS = ["zeroes_the_head_only", "loader_made_in_every_step", "no_master_weights"]


@pytest.mark.parametrize("name", PLANTS if FULL else PLANTS[:1])
def test_mistake_is_told_and_its_twin_is_not(name: str) -> None:
    (plant,) = chosen([name])
    result = silent.judge(plant, 1)
    assert result.found
    assert result.false == []


@pytest.mark.full
def test_quick_form_of_silent_failures_writes_its_result(output: Path) -> None:
    words = ["--quick", "--only", "average_never_updated", "--jobs", "1", "--output", str(output)]
    assert silent.main(words) == 0
    found = strict(output)
    assert (found["mistakes"], found["found"], found["twins"], found["false"]) == (1, 1, 1, 0)


def test_quick_form_ranks_the_right_fix_first(output: Path) -> None:
    assert whatif.main(["--quick", "--output", str(output)]) == 0
    kept = strict(output)
    assert [row["first"] in row["right"] for row in kept["rows"]] == [True] * len(whatif.QUICK)
    assert kept["totals"]["planted"]["always lower the rate"] < 0.5


# --- public incidents
# --------------------------------------------------------------------------------------------------


def test_each_listed_incident_is_reproduced_once_or_has_a_reason() -> None:
    names = [one.name for one in INCIDENTS] + list(CHECKPOINTS)
    names += [name for few in NOT_HERE.values() for name in few.split()]
    assert len(names) == len(set(names)) == 98
    assert all(re.fullmatch(r"I\d{3}", name) and int(name[1:]) % 2 for name in names)


def test_named_stopped_and_nothing_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert incidents.main(["--only", "I117", "I009", "I093", "I023"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 of 4 named (75%), 0 stopped, 1 not noticed" in said
    assert incidents.main(["--only", "I002"]) == 2
