"""The benchmarks write what they promise. No time is asserted: that is for a quiet machine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.parts import timing
from benchmarks.parts.variants import VARIANTS
from benchmarks.parts.workloads import FULL, QUICK

from benchmarks import counts, overhead, table
from stepguard.sentinel.gradients import Packet


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("overhead") / "overhead.json"
    assert overhead.main(["--quick", "--rounds", "2", "--output", str(path)]) == 0
    return path


def _strict(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_quick_run_measures_every_variant_on_every_model(measured: Path) -> None:
    data = _strict(measured)
    assert list(data["workloads"]) == list(QUICK)
    for workload in data["workloads"].values():
        assert [row["variant"] for row in workload["rows"]] == [v.name for v in VARIANTS]
        for row in workload["rows"]:
            if row["missing"]:
                assert row["ratio"] is None
                continue
            assert row["ratio"] > 0 and math.isfinite(row["ratio"]) and row["milliseconds"] > 0
            assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]


def test_result_says_what_it_was_measured_on_and_names_no_path(measured: Path) -> None:
    facts = next(iter(_strict(measured)["workloads"].values()))["machine"]
    assert facts["torch"] == torch.__version__ and facts["threads"] == 1 and facts["cpus"] >= 1
    assert "/" not in measured.read_text(encoding="utf-8").replace("isnan/isinf", "")


def test_one_model_measured_again_keeps_the_others(measured: Path, tmp_path: Path) -> None:
    copy = tmp_path / "overhead.json"
    copy.write_text(measured.read_text(encoding="utf-8"), encoding="utf-8")
    first, *others = QUICK
    assert overhead.main(["--quick", "--only", first, "--rounds", "3", "--output", str(copy)]) == 0
    before, after = _strict(measured)["workloads"], _strict(copy)["workloads"]
    assert after[first]["rounds"] == 3
    assert all(after[name] == before[name] for name in others)


def test_one_variant_measured_again_keeps_the_others(measured: Path, tmp_path: Path) -> None:
    copy = tmp_path / "overhead.json"
    copy.write_text(measured.read_text(encoding="utf-8"), encoding="utf-8")
    first = next(iter(QUICK))
    words = [
        "--quick",
        "--only",
        first,
        "--variants",
        "watch",
        "--rounds",
        "3",
        "--output",
        str(copy),
    ]
    assert overhead.main(words) == 0
    before, after = (
        {r["variant"]: r for r in _strict(p)["workloads"][first]["rows"]} for p in (measured, copy)
    )
    assert after["watch"]["rounds"] == 3
    assert after["step"] == before["step"]
    assert list(after) == list(before)


def test_unknown_variant_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--variants", "wach", "--output", str(tmp_path / "x.json")]) == 2
    assert "watch" in capsys.readouterr().out


def test_unknown_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--only", "gpt-9t", "--output", str(tmp_path / "x.json")]) == 2
    assert "gpt-7m" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


def test_watching_guard_does_not_slow_the_other_variants_down() -> None:
    workload = QUICK["gpt-tiny"]()
    runner = next(v for v in VARIANTS if v.name == "watch").start(workload)
    plain = torch.Tensor.backward
    with runner.stage():
        assert torch.Tensor.backward is not plain
    assert torch.Tensor.backward is plain
    runner.close()


def test_bare_neighbour_runs_without_the_hooks_of_its_variant() -> None:
    workload = QUICK["gpt-tiny"]()
    pair = next(v for v in VARIANTS if v.name == "watch").pair(workload)
    batch = workload.batch(torch.Generator().manual_seed(0))
    before = Packet.fetched
    with pair.bare.stage():
        pair.bare.step(batch)
    assert Packet.fetched == before
    with pair.own.stage():
        pair.own.step(batch)
    assert Packet.fetched == before + 1
    pair.own.close()


@pytest.mark.parametrize("name", [*FULL, *QUICK])
def test_models_have_the_size_their_names_say(name: str) -> None:
    what = (FULL | QUICK)[name]().what
    wanted = {"gpt-7m": "7.4M", "gpt-50m": "50.5M", "resnet-18": "11.2M"}
    assert wanted.get(name, "k") in what


def test_interval_of_the_median_holds_the_median_and_repeats() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.02, 0.97]
    low, high = timing.interval_of_median(values)
    assert low <= 1.01 <= high
    assert (low, high) == timing.interval_of_median(values)


def test_counts_show_at_most_one_awaited_packet_and_no_other_read(tmp_path: Path) -> None:
    assert counts.main(["--output", str(tmp_path / "counts.json")]) == 0
    for workload in _strict(tmp_path / "counts.json")["workloads"].values():
        rows = {row["variant"]: row for row in workload["rows"]}
        for row in rows.values():
            if row["ours"]:
                bare = rows["bare, fused" if row["fused"] else "bare"]
                assert row["reads"] == bare["reads"]
                assert row["packets"] + row["late_packets"] <= 1
                assert row["kibibytes"] - bare["kibibytes"] < 4
        assert rows["step, fused"]["packets"] == 0
        assert rows["each gradient"]["reads"] > rows["bare"]["reads"]


def test_table_goes_between_the_markers_and_nowhere_else(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"# x\n\n{table.BEGIN}\nSTALE\n{table.END}\n\nafter\n", encoding="utf-8")
    assert table.main(["--results", str(measured), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# x\n\n{table.BEGIN}\n| step |") and text.endswith(
        f"{table.END}\n\nafter\n"
    )
    assert (
        "STALE" not in text and "**guard.step**" in text and "nan" not in text.replace("isnan", "")
    )
    assert table.main(["--results", str(measured), "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text


def test_readme_without_markers_is_refused_and_left_alone(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("# x\n", encoding="utf-8")
    assert table.main(["--results", str(measured), "--page", str(page)]) == 2
    assert table.BEGIN in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "# x\n"


def test_table_without_results_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main(["--results", str(tmp_path / "none.json")]) == 2
    assert "benchmarks.overhead" in capsys.readouterr().err


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
    run = [sys.executable, "-c", program]
    said = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=overhead.machine.RESULTS.parents[1]
    )
    kept, told, before, after = said.stdout.split()
    assert kept == told
    assert kept == "False" or int(after) < int(before) / 2
