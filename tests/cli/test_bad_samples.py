"""`stepguard quarantine --data RUN`: the ledger as a table, as JSON, and as a sampler's list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from house.fresh import run_cli
from stepguard.cli.app import app
from stepguard.journal import Journal
from stepguard.ledger import Ledger, ledger_path
from stepguard.records.checks import BadSamples


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["quarantine", "--data", *map(str, words)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    Journal(folder).close()
    ledger = Ledger(folder)
    shared: dict[str, Any] = {"of": 4, "epoch": 0, "cause": "SG101", "place": "input: batch:x"}
    ledger.append(
        BadSamples(
            step=3, samples=(1,), count=1, indices=(17,), batch=3, left_out="sample", **shared
        )
    )
    ledger.append(BadSamples(step=4, count=4, indices=(4, 5, 6, 7), batch=4, **shared))
    ledger.append(
        BadSamples(step=9, count=4, indices=(8, 9), batch=9, **{**shared, "cause": "SG505"})
    )
    Ledger(folder, 1).append(
        BadSamples(step=3, count=4, innocent=True, indices=(90,), rank=1, **shared)
    )
    return folder


def test_every_loss_of_every_rank_is_a_line(run: Path) -> None:
    done = invoke(run)
    assert done.exit_code == 0, done.output
    assert "17" in done.stdout and "SG505" in done.stdout and "rank 1" in done.stdout
    assert "13 samples lost in 4 steps, of 16 in them" in done.stdout


def test_json_has_entries_totals_and_samples(run: Path) -> None:
    told = json.loads(invoke(run, "--json").stdout)
    assert len(told["entries"]) == 4 and told["totals"]["lost"] == 13
    assert told["samples"][0] == {
        "index": 17,
        "id": None,
        "times": 1,
        "proven": True,
        "causes": ["SG101"],
    }


def test_list_for_a_sampler_has_the_proven_ones(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "bad.txt"
    done = invoke(run, "--out", out)
    assert done.exit_code == 0 and out.read_text() == "17\n"
    assert "wrote 1 to" in done.stderr and "4 more are in bad batches" in done.stderr
    invoke(run, "--out", out, "--unproven")
    assert out.read_text().split() == ["17", "4", "5", "6", "7"]


def test_ids_are_listed_where_no_index_is_known(tmp_path: Path) -> None:
    entry = BadSamples(step=1, samples=(0,), ids=("a b.png",), cause="SG202", left_out="sample")
    Ledger(tmp_path).append(entry)
    invoke(tmp_path, "--out", tmp_path / "bad.txt")
    assert (tmp_path / "bad.txt").read_text() == "a b.png\n"


def test_run_that_lost_nothing_says_so(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    done = invoke(tmp_path)
    assert done.exit_code == 0 and done.stdout == f"no samples were lost in {tmp_path}\n"


@pytest.mark.parametrize(
    "words", [("nothing",), (".", "--undo"), (".", "--dry-run"), (".", "--unproven")]
)
def test_wrong_use_is_exit_code_2(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(*words).exit_code == 2


def test_folder_that_is_no_run_is_exit_code_2(tmp_path: Path) -> None:
    done = invoke(tmp_path)
    assert done.exit_code == 2 and "is not a run folder" in done.stderr


def test_out_without_data_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quarantine", str(tmp_path), "--out", "x"])
    assert done.exit_code == 2 and "belong to --data" in done.stderr


def test_ledger_of_a_newer_version_is_exit_code_2(tmp_path: Path) -> None:
    ledger_path(tmp_path).write_text('{"v":99}\n')
    assert invoke(tmp_path).exit_code == 2


def test_file_that_cannot_be_written_is_exit_code_2(run: Path, tmp_path: Path) -> None:
    done = invoke(run, "--out", tmp_path / "no" / "folder.txt")
    assert done.exit_code == 2 and "cannot be written" in done.stderr


def test_reading_the_ledger_starts_without_torch(run: Path, tmp_path: Path) -> None:
    seen = run_cli(tmp_path, "quarantine", "--data", str(run), "--json")
    assert seen.code == 0 and "SG101" in seen.stdout and "torch" not in seen.modules


def test_example_of_the_page_leaves_the_listed_samples_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "bad-samples.md"
    example = page.read_text(encoding="utf-8").split("```python\n")[-1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    invoke(run, "--out", "bad.txt", "--unproven")
    names: dict[str, Any] = {"dataset": list(range(30))}
    exec(example, names)
    seen = {int(row) for batch in names["loader"] for row in batch}
    assert seen == set(range(30)) - {17, 4, 5, 6, 7}
