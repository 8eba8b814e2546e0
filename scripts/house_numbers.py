"""Measure the size and the shape of the source: `python scripts/house_numbers.py [PATH ...]`.

Prints one row for each package, then the figures of the whole beside those of codebases that we
hold up as models (measured the same way, see STYLE.md). `--over` names functions above complexity
15 as radon counts it, `--once` private functions that are used in one place, `--single` modules
with one importer.

`--check` is the gate of `make check`. It fails when a function is above the limit, when private
single-use functions or single-importer modules pass their share, or when the tokens of the source
grow without a new line below "### Added" of the changelog's unreleased section. What was accepted
last stands in `scripts/house_numbers.json`; `--accept` writes the present figures there.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radon.complexity import cc_visit
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepguard"
ACCEPTED = ROOT / "scripts" / "house_numbers.json"
COMPLEXITY = 15
# Shares of all functions and of all modules that are the goal; a tree above them may only fall.
SHARES = {"private functions used once": 0.15, "modules with one importer": 0.10}
# Tokens by which a mended defect may grow the source.
SLACK = 300
SETTINGS = ("GuardConfig", "Policy", "Snapshots", "Probes", "Ranks")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ANCHORS = {
    "memray": ("37", "5.4k", "22k", "8 %", "15", "11"),
    "httpx": ("23", "8.8k", "34k", "5 %", "6", "0"),
    "torchft": ("55", "15.3k", "61k", "7 %", "6", "7"),
    "Fabric": ("89", "17.1k", "62k", "15 %", "17", "1"),
}


@dataclass
class Module:
    """One file: its text, its tree, and the names that it mentions."""

    path: Path
    text: str
    name: str = ""
    tree: ast.Module = field(init=False)
    nodes: list[ast.AST] = field(init=False)
    mentions: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        self.mentions = Counter(re.findall(r"\b_[A-Za-z]\w*", self.text))

    def functions(self) -> list[str]:
        return [node.name for node in self.nodes if isinstance(node, FUNCTIONS)]

    def tokens(self) -> int:
        """Count tokens of code: no comments, no docstrings, no imports, no layout."""
        docstrings = set()
        imports: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstrings.add((node.lineno, node.col_offset))
        count = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type in LAYOUT or token.start[0] in imports:
                continue
            if token.type == tokenize.STRING and token.start in docstrings:
                continue
            count += 1
        return count

    def imported(self) -> set[str]:
        """Names of modules that this one imports; `from a import b` may mean `a` or `a.b`."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found


def modules(paths: Iterable[Path]) -> list[Module]:
    """Read every Python file at or below the paths."""
    found = []
    for root in paths:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            inside = path.relative_to(root.parent).with_suffix("").parts
            name = ".".join(part for part in inside if part != "__init__")
            found.append(Module(path, path.read_text(encoding="utf-8"), name))
    return found


def used_once(found: list[Module]) -> list[tuple[Module, str]]:
    """Private functions that are mentioned in one place beside their definition."""
    mentions: Counter[str] = Counter()
    definitions: Counter[str] = Counter()
    for module in found:
        mentions.update(module.mentions)
        definitions.update(module.functions())
    once = []
    for module in found:
        for name in module.functions():
            if not name.startswith("_") or name.endswith("__"):
                continue
            # Two modules may each have a private function of this name.
            unique = definitions[name] == 1
            count = mentions[name] if unique else module.mentions[name]
            if count == 2:
                once.append((module, name))
    return once


def single_importers(found: list[Module]) -> list[tuple[Module, Module]]:
    """Modules that one other module imports, each with its importer."""
    importers: dict[str, list[Module]] = {module.name: [] for module in found}
    for module in found:
        for name in module.imported() - {module.name}:
            if name in importers:
                importers[name].append(module)
    result = []
    for module in found:
        if module.path.name not in ("__init__.py", "__main__.py"):
            by = importers[module.name]
            if len(by) == 1:
                result.append((module, by[0]))
    return result


def over_limit(path: Path) -> list[tuple[str, int, int]]:
    """Name, line and complexity of every function above the limit."""
    found = []
    for block in _functions(cc_visit(path.read_text(encoding="utf-8"))):
        if block.complexity > COMPLEXITY:
            found.append((block.fullname, block.lineno, block.complexity))
    return found


def _functions(blocks: Iterable[Any]) -> Iterator[Any]:
    """Functions and methods, nested ones included; radon lists classes beside their methods."""
    for block in blocks:
        if not hasattr(block, "methods"):
            yield block
            yield from _functions(block.closures)


def measure(found: list[Module]) -> dict[str, float]:
    """Count what the modules hold."""
    counts: Counter[str] = Counter(modules=len(found))
    for module in found:
        counts["lines"] += len(module.text.splitlines())
        counts["tokens"] += module.tokens()
        counts["functions"] += len(module.functions())
        for node in module.nodes:
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
            counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            if isinstance(node, ast.ClassDef):
                counts["dataclasses"] += _is_dataclass(node)
                if node.name in SETTINGS:
                    counts["settings"] += sum(map(_is_setting, node.body))
        counts["numeric constants"] += sum(map(_is_numeric_constant, module.tree.body))
    lines_in_all = max(counts["lines"], 1)
    return {
        **{name: counts[name] for name in ("modules", "lines", "tokens", "functions")},
        "private functions used once": len(used_once(found)) / max(counts["functions"], 1),
        "modules with one importer": len(single_importers(found)) / max(len(found), 1),
        **{name: counts[name] for name in ("dataclasses", "settings", "numeric constants")},
        "conditional expressions per 1000 lines": 1000
        * counts["conditional expressions"]
        / lines_in_all,
        "comprehensions per 1000 lines": 1000 * counts["comprehensions"] / lines_in_all,
    }


def _is_dataclass(node: ast.ClassDef) -> bool:
    # `record` of records/codec.py makes a frozen dataclass
    written = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("dataclass" in one or one == "record" for one in written)


def _is_setting(node: ast.stmt) -> bool:
    """A field of the settings that is not a group of them."""
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) not in SETTINGS


def _is_numeric_constant(node: ast.stmt) -> bool:
    """`LIMIT = 3`, `LIMIT: Final = 2**20`, at the top of a module."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    if not isinstance(target, ast.Name) or not target.id.isupper():
        return False
    kinds = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
    for part in ast.walk(node.value):
        if not isinstance(part, kinds):
            return False
        if isinstance(part, ast.Constant) and type(part.value) not in (int, float):
            return False
    return True


def _figure(name: str, value: float) -> str:
    if name in SHARES:
        return f"{100 * value:.0f} %"
    return f"{value:.1f}" if name.endswith("lines") and name != "lines" else f"{value:.0f}"


def _tables(found: list[Module]) -> Iterator[Table]:
    packages: dict[str, list[Module]] = {}
    for module in found:
        parts = module.name.split(".")
        packages.setdefault(parts[1] if len(parts) > 2 else parts[0], []).append(module)
    table = Table("package", "modules", "lines", "tokens", "functions", "complex")
    for name, members in sorted(packages.items()):
        numbers = measure(members)
        over = sum(len(over_limit(module.path)) for module in members)
        columns = ("modules", "lines", "tokens", "functions")
        table.add_row(name, *(str(numbers[column]) for column in columns), str(over))
    yield table
    whole = Table("", "here", *ANCHORS)
    shown = ["modules", "lines", "tokens", *SHARES, "dataclasses"]
    for name, value in measure(found).items():
        anchors = [row[shown.index(name)] for row in ANCHORS.values()] if name in shown else []
        whole.add_row(name, _figure(name, value), *anchors)
    yield whole


def problems(found: list[Module], accepted: dict[str, float], added: int) -> list[str]:
    """What the gate refuses, as sentences. `added` counts the new capabilities of the changelog."""
    refused = []
    for module in found:
        for name, line, complexity in over_limit(module.path):
            place = f"{module.path}:{line} {name}"
            refused.append(f"{place}: complexity {complexity}, more than {COMPLEXITY}")
    numbers = measure(found)
    for name, goal in SHARES.items():
        allowed = max(goal, accepted.get(name, goal))
        if numbers[name] > allowed + 0.0005:
            refused.append(f"{name}: {100 * numbers[name]:.1f} %, more than {100 * allowed:.1f} %")
    most = accepted.get("tokens", numbers["tokens"]) + SLACK
    if numbers["tokens"] > most and added <= accepted.get("added", 0):
        refused.append(
            f"tokens: {numbers['tokens']:.0f}, more than {most:.0f}, and no new line below "
            '"### Added" of the changelog says what for'
        )
    return refused


def capabilities(changelog: str) -> int:
    """Count the entries below "### Added" of the unreleased section."""
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0]
    added = unreleased.partition("### Added")[2].partition("\n### ")[0]
    return sum(line.startswith("- ") for line in added.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[SOURCE])
    parser.add_argument("--over", action="store_true", help="functions above complexity 15")
    parser.add_argument("--once", action="store_true", help="private functions used in one place")
    parser.add_argument("--single", action="store_true", help="modules with one importer")
    parser.add_argument("--json", action="store_true", help="the figures of the whole as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the gate refuses")
    parser.add_argument("--accept", action="store_true", help="keep the figures as the new bar")
    given = parser.parse_args()
    found = modules(given.paths)
    added = capabilities((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if given.accept:
        figures = measure(found)
        kept = {name: round(figures[name], 4) for name in ("tokens", *SHARES)}
        ACCEPTED.write_text(json.dumps({**kept, "added": added}, indent=2) + "\n")
    elif given.check or given.over:
        # Figures that were accepted belong to the source of stepguard, not to any other path.
        ours = given.check and given.paths == [SOURCE]
        accepted = json.loads(ACCEPTED.read_text()) if ours else dict.fromkeys(SHARES, 1.0)
        refused = problems(found, accepted, added)
        print(*refused, sep="\n", end="\n" if refused else "")
        return 1 if given.check and refused else 0
    elif given.once:
        for module, name in used_once(found):
            print(f"{module.path}: {name}")
    elif given.single:
        for module, importer in single_importers(found):
            print(f"{module.name}: only {importer.name}")
    elif given.json:
        print(json.dumps(measure(found), indent=2))
    else:
        Console(width=120).print(*_tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
