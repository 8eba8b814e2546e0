"""A sample of mutants: how many planted mistakes does the suite find?

    python scripts/mutants.py                      60 mutants of engine, state, locate and ranks
    python scripts/mutants.py --count 10 --seed 3  another sample
    python scripts/mutants.py --list               only show them

Each mutant is one change of one line (a comparison turned round, a condition negated, a number off
by one, `and` for `or`), in a copy of src. The tests that execute the changed line run against the
copy until the first failure; a mutant that no test fails for has survived. Which tests execute
which line is measured once (`--map FILE` keeps it). For a mutant of `ranks` that survives, the
tests that start ranks are run too. The sample depends on the seed and on the source only, so two
suites can be compared on one source.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "state", "locate", "ranks")
TESTS = ("engine", "guard", "state", "locate", "ranks", "sentinel", "tensors", "checkpoints")
"""Folders below tests that run in the quick lane."""
STARTING_RANKS = {"ranks": ("distributed", "ranks")}
"""Folders that run whole for a mutant of this package: coverage does not see started processes."""
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line."""

    path: Path
    line: int
    before: str
    after: str
    source: str
    """The whole module with the change."""

    @property
    def package(self) -> str:
        return self.path.relative_to(ROOT / "src" / "stepguard").parts[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before}  ->  {self.after}"


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], None]]:
    """What can be done to a copy of this node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITE:
        yield lambda n: setattr(n, "ops", [OPPOSITE[type(node.ops[0])]()])
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield lambda n: setattr(n, "op", other())
    if isinstance(node, ast.If | ast.While):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda n: setattr(n, "value", node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda n: setattr(n, "value", not node.value)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a module, in order; docstrings and annotations are left alone."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = []
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = {id(node): node for function in inside for node in ast.walk(function)}
    for node in nodes.values():
        number = getattr(node, "lineno", None)
        if number is None:
            continue
        for change in changes(node):
            changed = copy.deepcopy(node)
            change(changed)
            source = _replaced(text, node, ast.unparse(_head(changed)))
            if source is not None and _parses(source):
                before, after = text.splitlines()[number - 1], source.splitlines()[number - 1]
                found.append(Mutant(path, number, before.strip(), after.strip(), source))
    return found


def _head(node: ast.AST) -> ast.AST:
    return node.test if isinstance(node, ast.If | ast.While) else node


def _replaced(text: str, node: ast.AST, new: str) -> str | None:
    """The text with the expression of `node` replaced; None where it spans lines."""
    target = node.test if isinstance(node, ast.If | ast.While) else node
    if not isinstance(target, ast.expr) or target.lineno != target.end_lineno:
        return None
    lines = text.splitlines(keepends=True)
    line = lines[target.lineno - 1].encode()
    begin, end = target.col_offset, target.end_col_offset
    lines[target.lineno - 1] = (line[:begin] + f"({new})".encode() + line[end:]).decode()
    return "".join(lines)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def sample(count: int, seed: int) -> list[Mutant]:
    """The same mutants for the same source, spread over the packages."""
    chosen = random.Random(seed)
    packages = [name for name in PACKAGES if (ROOT / "src" / "stepguard" / name).is_dir()]
    found = []
    for number, package in enumerate(packages):
        share = count // len(packages) + (number < count % len(packages))
        modules = sorted((ROOT / "src" / "stepguard" / package).rglob("*.py"))
        every = [mutant for path in modules for mutant in mutants_of(path)]
        found += chosen.sample(every, min(share, len(every)))
    return found


def statement_lines(mutant: Mutant) -> range:
    """Lines of the innermost statement around the change, up to the change."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    around = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    return range(max(around), mutant.line + 1)


def measure(lane: str, kept: Path) -> None:
    """Run the tests once and write to `kept` which of them execute which line."""
    tests = [f"tests/{name}" for name in TESTS if (ROOT / "tests" / name).is_dir()]
    coverage = ["--cov=stepguard", "--cov-context=test", "--cov-report="]
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", lane, "--timeout=0"]
    subprocess.run(
        [*pytest, *coverage, *tests],
        cwd=ROOT,
        env={**os.environ, "COVERAGE_FILE": str(kept), "PYTHONPATH": str(ROOT / "src")},
        check=True,
    )


def covering(data: CoverageData, mutant: Mutant) -> list[str]:
    """Tests that execute the changed line."""
    contexts = data.contexts_by_lineno(str(mutant.path))
    found = {name for line in statement_lines(mutant) for name in contexts.get(line, ())}
    return sorted({name.rpartition("|")[0] for name in found} - {""})


def survives(mutant: Mutant, data: CoverageData, lane: str, seconds: float) -> bool:
    """Do the tests that execute its line pass? A suite that hangs has noticed."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        (source / mutant.path.relative_to(ROOT / "src")).write_text(mutant.source, encoding="utf-8")
        runs = []
        tests = covering(data, mutant)
        if tests:
            listed = Path(folder) / "tests.txt"
            listed.write_text("\n".join(tests), encoding="utf-8")
            runs.append(["-n", "0", "-m", lane, f"@{listed}"])
        whole = [f"tests/{name}" for name in STARTING_RANKS.get(mutant.package, ())]
        whole = [name for name in whole if (ROOT / name).is_dir()]
        if whole:
            runs.append(["-n", "2", *whole])
        for given in runs:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *given],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(source)},
                    capture_output=True,
                    timeout=seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
            if done.returncode not in (0, 1):
                raise RuntimeError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
            if done.returncode:
                return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lane", default="not process and not slow", help="pytest's -m")
    parser.add_argument("--seconds", type=float, default=900, help="time for one mutant")
    parser.add_argument("--map", type=Path, help="file that keeps which tests execute which line")
    parser.add_argument("--list", action="store_true", help="only show them")
    given = parser.parse_args()
    chosen = sample(given.count, given.seed)
    if given.list:
        print(*chosen, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        kept = (given.map or Path(folder) / "coverage").resolve()
        if not kept.exists():
            measure(given.lane, kept)
        data = CoverageData(str(kept))
        data.read()
        killed = 0
        for number, mutant in enumerate(chosen, 1):
            begun = time.perf_counter()
            alive = survives(mutant, data, given.lane, given.seconds)
            killed += not alive
            state = "SURVIVED" if alive else "killed"
            took = time.perf_counter() - begun
            print(f"{number}/{len(chosen)} {state} in {took:.0f} s  {mutant}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed (seed {given.seed}, lane {given.lane!r})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
