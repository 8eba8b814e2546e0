"""The right fix is ranked first where the failure was planted together with its cure."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import whatif


def test_quick_form_ranks_the_right_fix_first(tmp_path: Path) -> None:
    assert whatif.main(["--quick", "--output", str(tmp_path / "whatif.json")]) == 0
    kept = json.loads((tmp_path / "whatif.json").read_text(encoding="utf-8"))
    assert [row["first"] in row["right"] for row in kept["rows"]] == [True] * len(whatif.QUICK)
    assert kept["totals"]["planted"]["always lower the rate"] < 0.5
