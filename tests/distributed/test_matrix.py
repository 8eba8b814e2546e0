"""The table of docs/distributed.md is what the tests of this folder declare."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import forked
from distributed.matrix import COLUMNS, MEANING

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "write_matrix.py"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("write_matrix", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_what_the_tests_say() -> None:
    # in a process of its own: pytest cannot collect while it runs
    done = forked.python([str(SCRIPT), "--check"], imports=("pytest",))
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


def test_cell_without_a_test_is_empty_and_two_outcomes_are_both_told() -> None:
    cells = {"DDP": {"NaN": {"works", "alone"}, "clip": {"works"}}}
    rows, columns = ("DDP", "FSDP2"), ("NaN", "clip", "save")
    head, _, row, empty = _script().table(cells, rows, columns).splitlines()
    assert head == "| | NaN | clip | save |"
    assert row == "| DDP | alone, works | works | - |"
    assert empty == "| FSDP2 | - | - | - |"


def test_cell_of_an_unknown_wrapper_is_refused() -> None:
    with pytest.raises(SystemExit, match="has no row 'other'"):
        _script().table({"other": {"NaN": {"works"}}}, ("DDP",), ("NaN",))


def test_only_the_table_of_a_page_is_replaced() -> None:
    script = _script()
    page = f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n"
    assert script.with_table(page, "new") == (
        f"before\n{script.BEGIN}\n\nnew\n\n{script.END}\nafter\n"
    )


def test_every_outcome_is_explained_on_the_page() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert COLUMNS
    for outcome, meaning in MEANING.items():
        assert f"**{outcome}**: {meaning}" in page
