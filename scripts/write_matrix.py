"""Writes the table of docs/distributed.md: which wrapper does what, as the tests declare it.

python scripts/write_matrix.py            write the table
python scripts/write_matrix.py --check    exit 1 if the page is not what the tests say
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "distributed.md"
TESTS = ROOT / "tests" / "distributed"
BEGIN, END = "<!-- matrix: written by scripts/write_matrix.py -->", "<!-- end of matrix -->"
NOT_SHOWN = "-"
Cells = dict[str, dict[str, set[str]]]
"""Wrapper -> column -> outcomes that tests show."""


class Collector:
    """Reads what the tests declare; they are not run."""

    def __init__(self) -> None:
        self.cells: Cells = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            for mark in item.iter_markers("matrix"):
                wrapper, column, outcome = mark.args
                self.cells.setdefault(wrapper, {}).setdefault(column, set()).add(outcome)


def collected() -> Cells:
    """The cells of all tests in tests/distributed."""
    collector = Collector()
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--no-header", "-o", "addopts="]
    options += ["--import-mode=importlib", "--rootdir", str(ROOT), str(TESTS)]
    with redirect_stdout(StringIO()):
        code = pytest.main(options, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: pytest ended with {code}")
    return collector.cells


def table(cells: Cells, rows: tuple[str, ...], columns: tuple[str, ...]) -> str:
    """The cells as a table of markdown; wrappers with the same outcomes share a row."""
    unknown = cells.keys() - set(rows)
    if unknown:
        raise SystemExit(f"tests/distributed/matrix.py has no row {min(unknown)!r}")
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    alike: dict[str, list[str]] = {}
    for wrapper in rows:
        row = cells.get(wrapper, {})
        words = [", ".join(sorted(row.get(column, {NOT_SHOWN}))) for column in columns]
        alike.setdefault(" | ".join(words), []).append(wrapper)
    lines += [f"| {'<br>'.join(wrappers)} | {words} |" for words, wrappers in alike.items()]
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """The page with this table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    from distributed.matrix import COLUMNS, ROWS

    page = PAGE.read_text(encoding="utf-8")
    wanted = with_table(page, table(collected(), ROWS, COLUMNS))
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != page:
        raise SystemExit(f"{PAGE} is not what the tests say: run python scripts/write_matrix.py")


if __name__ == "__main__":
    main()
