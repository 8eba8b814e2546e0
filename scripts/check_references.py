"""Check that everything the reference pages refer to exists.

    python scripts/check_references.py      exit 1 and one line for each dead reference

The pages are docs/project/source-reports.md, docs/why-not.md and those of MAPS. A reference is a
piece of code between backticks that looks like one of these; all other code is text:

    tests/engine/watch/test_gradient_veto.py::test_name     a file, and what is defined in it
    configs/file.yaml::key.inner            a key of a .yaml file
    stepguard live --steps                  a command and its options
    make verify-recipes, python -m recipes.verify, python train.py, bash file.sh
    stepguard.numerics.losses, Policy.max_rewinds, Reading.lr
    SG204                                   a cause code
    precision.effective                     an item of `stepguard check`
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = "docs/project/source-reports.md"
WHY_NOT = "docs/why-not.md"
MAPS = (
    "docs/how-it-works.md",
    "docs/evidence.md",
    "docs/guarantees.md",
    "docs/stability.md",
    "docs/project/publishing.md",
    "docs/project/source-tree.md",
    "CONTRIBUTING.md",
)
NUMBERS = range(1, 265)
STATES = ("done", "otherwise", "part", "open")
FOLDERS = ("src", "tests", "docs", "recipes", "benchmarks", "zoo", "scripts", "examples")
FILE = re.compile(rf"(?P<path>(?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(?P<name>[\w.]+))?")
LAUNCHED = re.compile(
    r"(?:python|bash|accelerate launch|torchrun(?: --\S+)*) (?P<script>[\w./-]+\.(?:py|sh))(?: .*)?"
)
CODE = re.compile(r"SG\d{3}")
ITEM = re.compile(r"(?P<section>[a-z]+)\.[a-z_]+")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
RECORDS = (
    "Policy",
    "GuardConfig",
    "Reading",
    "Incident",
    "Origin",
    "Finding",
    "Decision",
    "Verdict",
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ROW = re.compile(r"\| (R\d+(?:-R\d+)?) \|(.*)\|")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of source-reports.md."""

    line: int
    numbers: tuple[int, ...]
    state: str
    where: str


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Line number and content of every piece of code between backticks, fenced blocks left out."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line))


def rows(text: str) -> Iterator[Row]:
    """The table's lines: R number or range, what is asked for, state, where."""
    for number, line in enumerate(text.splitlines(), start=1):
        found = ROW.fullmatch(line.strip())
        if found is not None:
            first, _, last = found[1].replace("R", "").partition("-")
            cells = [cell.strip() for cell in found[2].split(" | ")]
            state, where = (cells[1], cells[2]) if len(cells) == 3 else ("", "")
            yield Row(number, tuple(range(int(first), int(last or first) + 1)), state, where)


_parsed = cache(ast.parse)  # many references lead into the same file


def defined(source: str, dotted: str) -> bool:
    """Does a module define `name`, or `Class.name`? Imported names count."""
    body = _parsed(source).body
    for part in dotted.split("."):
        found = next((node for node in _statements(body) if part in _names(node)), None)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.Assign):
        return {
            ast.unparse(name)
            for target in node.targets
            for name in getattr(target, "elts", [target])
        }
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return set()


class References:
    """Knows what exists in a repository."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._kinds: tuple[Callable[[str], str | None], ...] = (
            self._file,
            self._command,
            self._target,
            self._launched,
            self._code,
            self._dotted,
            self._item,
        )

    def problem(self, span: str) -> str | None:
        """What is wrong with a reference; "" when nothing is, None when it is none."""
        return next(
            (said for said in (kind(span) for kind in self._kinds) if said is not None), None
        )

    def _file(self, span: str) -> str | None:
        found = FILE.fullmatch(span)
        if found is None:
            return None
        path, name = self.root / found["path"], found["name"]
        if not path.exists():
            return f"{found['path']} does not exist"
        if name is None:
            return ""
        if path.suffix in (".yaml", ".yml"):
            return "" if _has_key(path, name.split(".")) else f"{found['path']} has no key {name}"
        there = path.suffix == ".py" and defined(path.read_text(encoding="utf-8"), name)
        return "" if there else f"{found['path']} defines no {name}"

    @cached_property
    def commands(self) -> dict[str, set[str]]:
        """Command -> its options, from the application itself."""
        from typer.main import get_command

        from stepguard.cli.app import app

        group: Any = get_command(app)
        return {
            name: {option for parameter in command.params for option in parameter.opts}
            for name, command in group.commands.items()
        }

    def _command(self, span: str) -> str | None:
        tool, *words = span.split()
        if tool != "stepguard" or not words:
            return None
        options = self.commands.get(words[0])
        if options is None:
            return f"stepguard has no command {words[0]}"
        unknown = [
            word
            for word in words[1:]
            if word.startswith("--") and word.partition("=")[0] not in options
        ]
        if unknown:
            return f"stepguard {words[0]} has no option {unknown[0]}"
        return next((said for said in map(self._code, words[1:]) if said), "")

    def _target(self, span: str) -> str | None:
        found = re.fullmatch(r"make ([a-z-]+)", span)
        if found is None:
            return None
        makefile = (self.root / "Makefile").read_text(encoding="utf-8")
        return (
            ""
            if re.search(rf"^{found[1]}:", makefile, re.MULTILINE)
            else f"the Makefile has no target {found[1]}"
        )

    def _launched(self, span: str) -> str | None:
        module = re.fullmatch(r"python -m ([\w.]+)(?: .*)?", span)
        if module is not None:
            path = self.root / Path(*module[1].split("."))
            there = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            return "" if there else f"there is no module {module[1]}"
        script = LAUNCHED.fullmatch(span)
        if script is None:
            return None
        places = (self.root, *(self.root / "recipes").glob("*/"))
        there = any((place / script["script"]).is_file() for place in places)
        return (
            ""
            if there
            else f"{script['script']} is neither in the repository's root nor in a recipe's folder"
        )

    def _code(self, span: str) -> str | None:
        if CODE.fullmatch(span) is None:
            return None
        rule = self.root / "src/stepguard/diagnose/rules" / f"{span.lower()}.md"
        return "" if rule.is_file() else f"{span} is not a cause code"

    def _dotted(self, span: str) -> str | None:
        parts = span.split(".")
        if DOTTED.fullmatch(span) is None or parts[0] not in ("stepguard", *RECORDS):
            return None
        if parts[0] != "stepguard":
            parts = ["stepguard", "records", *parts]
        return "" if self._public(parts) else f"there is no {span}"

    def _public(self, parts: list[str]) -> bool:
        """The longest part that is a module, and the rest of the name in it or where it imports it
        from.
        """
        for length in range(len(parts), 0, -1):
            stem = self.root / "src" / Path(*parts[:length])
            module = next(
                (p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None
            )
            if module is not None:
                rest = parts[length:]
                return not rest or self._inside(module, rest)
        return False

    def _inside(self, module: Path, rest: list[str]) -> bool:
        source = module.read_text(encoding="utf-8")
        for node in _statements(_parsed(source).body):
            if isinstance(node, ast.ImportFrom) and node.module and rest[0] in _names(node):
                return self._public([*node.module.split("."), *rest])
        return defined(source, ".".join(rest))

    @cached_property
    def items(self) -> set[str]:
        """Ids of what `stepguard check` looks at."""
        found = set()
        table = (self.root / "src/stepguard/check/preflight.py").read_text(encoding="utf-8")
        for node in ast.parse(table).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TITLES":
                found |= ast.literal_eval(node.value).keys()
        return found

    def _item(self, span: str) -> str | None:
        found = ITEM.fullmatch(span)
        if found is None or found["section"] not in {item.partition(".")[0] for item in self.items}:
            return None
        return "" if span in self.items else f"stepguard check has no item {span}"


def _has_key(path: Path, keys: list[str]) -> bool:
    import yaml

    value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def dead(name: str, text: str, known: References) -> list[str]:
    """References of a page that lead nowhere."""
    found = []
    for line, span in spans(text):
        said = known.problem(span)
        if said:
            found.append(f"{name}:{line}: {said}")
    return found + wrong_links(name, text, known.root)


def wrong_links(name: str, text: str, root: Path) -> list[str]:
    """Links of a page to files that do not exist; web addresses are left out."""
    folder = (root / name).parent
    found = []
    for line, words in enumerate(text.splitlines(), start=1):
        for link in LINK.findall(words):
            if not (folder / link).exists():
                found.append(f"{name}:{line}: the link {link} leads nowhere")
    return found


def _placed(row: Row, known: References) -> bool:
    return "as R" in row.where or any(known.problem(span) == "" for _, span in spans(row.where))


def wrong_followers(text: str) -> list[str]:
    """Rows that say `as R4` stand or fall with R4: it must be in the page and not be open."""
    every = list(rows(text))
    states = {number: row.state for row in every for number in row.numbers}
    return [
        f"{REPORTS}:{row.line}: as R{other} leads to a row that is "
        f"{states.get(int(other), 'missing')}"
        for row in every
        for other in re.findall(r"\bas R(\d+)", row.where)
        if row.state != "open" and states.get(int(other), "open") == "open"
    ]


def wrong_rows(text: str, known: References) -> list[str]:
    """Requirements that are missing or there twice, and rows without a state or without a place."""
    found, seen = [], set()
    for row in rows(text):
        place = f"{REPORTS}:{row.line}: R{row.numbers[0]}"
        found += [f"{place}: R{number} is there twice" for number in row.numbers if number in seen]
        seen |= set(row.numbers)
        if row.state not in STATES:
            found.append(f"{place}: state {row.state!r} is not one of {', '.join(STATES)}")
        elif row.state != "open" and not _placed(row, known):
            found.append(f"{place}: says {row.state} and names no place that exists")
    missing = [f"R{number}" for number in NUMBERS if number not in seen]
    unknown = [f"R{number}" for number in sorted(seen) if number not in NUMBERS]
    found += [f"{REPORTS}: {', '.join(missing)} missing"] if missing else []
    return found + ([f"{REPORTS}: {', '.join(unknown)} unknown"] if unknown else [])


def without_test(text: str) -> list[str]:
    """Entries of why-not.md that name no test."""
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    named = re.compile(r"`tests/[\w/]+\.py::test_\w+`")
    return [
        f"{WHY_NOT}: {e.splitlines()[0]!r} names no test" for e in entries if not named.search(e)
    ]


def problems(root: Path = ROOT) -> list[str]:
    """Everything that is wrong with the pages."""
    known = References(root)
    texts = {name: (root / name).read_text(encoding="utf-8") for name in (REPORTS, WHY_NOT, *MAPS)}
    found = []
    for name, text in texts.items():
        found += dead(name, text, known)
    reports = texts[REPORTS]
    why_not = texts[WHY_NOT]
    return [
        *found,
        *wrong_rows(reports, known),
        *wrong_followers(reports),
        *without_test(why_not),
    ]


def main() -> int:
    found = problems()
    for line in found:
        print(line)
    states = [
        row.state for row in rows((ROOT / REPORTS).read_text(encoding="utf-8")) for _ in row.numbers
    ]
    print(
        ", ".join(f"{states.count(state)} {state}" for state in STATES) + f"; {len(found)} problems"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
