"""Measure how readable the source is: `python scripts/house_numbers.py [PATH ...]`.

Prints one row a package: modules, lines, density of folded code (conditional expressions,
comprehensions, tuple assignments per 1000 non-blank lines), comments, and functions above
complexity 15 as radon counts it, which sees conditional expressions, boolean operators and
comprehension filters. `--over` names those functions, `--tests` the modules without a test at the
mirrored path, `--check` exits with 1 if there is any function above the limit.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from radon.complexity import cc_visit
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIMIT = 15
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Numbers:
    """Counts of one file, or of several added up."""

    modules: int = 0
    lines: int = 0
    filled: int = 0
    comments: int = 0
    conditional: int = 0
    comprehensions: int = 0
    tuples: int = 0
    wide: int = 0
    complex: int = 0

    def add(self, other: Numbers) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def per_thousand(self, count: int) -> str:
        return f"{1000 * count / max(self.filled, 1):.1f}"


def measure(path: Path) -> Numbers:
    """Count what one file holds."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    nodes = list(ast.walk(ast.parse(text)))
    return Numbers(
        modules=1,
        lines=len(lines),
        filled=sum(bool(line.strip()) for line in lines),
        comments=sum(line.lstrip().startswith("#") for line in lines),
        conditional=sum(isinstance(node, ast.IfExp) for node in nodes),
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        tuples=sum(map(_assigns_several, nodes)),
        wide=sum(len(line) > 100 for line in lines),
        complex=len(over_limit(path)),
    )


def over_limit(path: Path) -> list[tuple[str, int, int]]:
    """Name, line and complexity of every function above the limit."""
    found = []
    for block in _functions(cc_visit(path.read_text(encoding="utf-8"))):
        if block.complexity > LIMIT:
            found.append((block.fullname, block.lineno, block.complexity))
    return found


def without_test(package: Path, tests: Path) -> list[Path]:
    """Modules that have no `test_<module>*.py` at the mirrored path."""
    missing = []
    for path in sorted(package.rglob("*.py")):
        if path.name.startswith("__"):
            continue
        folder = tests / path.relative_to(package).parent
        name = path.stem.lstrip("_")
        if not any(folder.glob(f"test_{name}.py")) and not any(folder.glob(f"test_{name}_*.py")):
            missing.append(path)
    return missing


def _functions(blocks: Iterable[Any]) -> Iterator[Any]:
    """Functions and methods, nested ones included; radon lists classes beside their methods."""
    for block in blocks:
        if not hasattr(block, "methods"):
            yield block
            yield from _functions(block.closures)


def _assigns_several(node: ast.AST) -> bool:
    """`a, b = x, y`; swapping and unpacking a call's result are fine."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    return any(_names(target) != _names(node.value) for target in targets)


def _names(values: ast.Tuple) -> set[str]:
    return {ast.unparse(value) for value in values.elts}


def _table(rows: dict[str, Numbers]) -> Table:
    names = ["modules", "lines", "conditional", "comprehensions", "tuples", "comments", "wide"]
    table = Table("package", *names, "complex")
    for name, row in rows.items():
        table.add_row(
            name,
            str(row.modules),
            str(row.lines),
            row.per_thousand(row.conditional),
            row.per_thousand(row.comprehensions),
            row.per_thousand(row.tuples),
            f"{100 * row.comments / max(row.lines, 1):.1f} %",
            str(row.wide),
            str(row.complex),
        )
    return table


def _rows(paths: list[Path]) -> dict[str, Numbers]:
    rows: dict[str, Numbers] = {}
    total = Numbers()
    for root in paths:
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for path in files:
            inside = path.relative_to(root) if root.is_dir() else Path(path.name)
            name = inside.parts[0] if len(inside.parts) > 1 else root.name
            numbers = measure(path)
            rows.setdefault(name, Numbers()).add(numbers)
            total.add(numbers)
    return {**rows, "all": total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "src" / "stepguard"])
    parser.add_argument("--over", action="store_true", help="name functions above the limit")
    parser.add_argument("--tests", action="store_true", help="name modules without a mirrored test")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a function is above the limit"
    )
    given = parser.parse_args()
    if given.over or given.check:
        count = _print_over(given.paths)
        return 1 if given.check and count else 0
    if given.tests:
        missing = without_test(ROOT / "src" / "stepguard", ROOT / "tests")
        print(*missing, f"{len(missing)} modules without a test at the mirrored path", sep="\n")
    else:
        Console(width=120).print(_table(_rows(given.paths)))
    return 0


def _print_over(paths: list[Path]) -> int:
    """Name the functions above the limit, worst first; returns how many there are."""
    over = []
    for path in _files(paths):
        for name, line, complexity in over_limit(path):
            over.append((complexity, f"{path}:{line} {name}"))
    for complexity, place in sorted(over, reverse=True):
        print(f"{place}: complexity {complexity}, more than {LIMIT}")
    return len(over)


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
        else:
            yield from sorted(path.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
