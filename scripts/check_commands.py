"""Check the commands that the pages tell people to type: each must be one that exists and parses.

    python -m scripts.check_commands      exit 1 and one line for each command that would be refused

Read are the fenced shell blocks of README.md, CONTRIBUTING.md, docs/ and the recipes, and commands
between backticks. Checked is, without running anything:

    stepguard ...               by its own parser: command, options, arguments, values
    python -m MODULE ...        the module is there, and its own parser takes the options
    python scripts/NAME.py ...  the same
    pytest PATH ...             the paths are there
    make TARGET                 the target is there
    pip install '.[EXTRA]'      the extra is there
    python train.py ...         in the page of a recipe: the script is there

Elsewhere other programs are the reader's. What stands between backticks may leave arguments out.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.check_references import References

ROOT = Path(__file__).resolve().parent.parent
SHELL = ("", "bash", "sh", "console", "shell")
"""Languages of a fenced block that holds commands."""
TOOLS = ("stepguard", "python", "pytest", "make", "pip", "torchrun", "accelerate")
SEPARATORS = ("|", ">", ">>", "&&", ";")
SPAN = re.compile(r"`([^`]+)`")
READERS_OWN = ("package.train",)
"""Modules that stand for the reader's own."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page."""

    page: str
    line: int
    words: tuple[str, ...]
    whole: bool
    """From a fenced block: it can be typed as it stands."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def pages(root: Path = ROOT) -> list[Path]:
    """Pages whose commands are checked; the changelog tells of versions that are over."""
    found = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    return sorted([*found, *root.glob("recipes/*/README.md")])


def commands(page: str, text: str) -> Iterator[Command]:
    """Commands of a page, in its order."""
    language: str | None = None
    block: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            if language is None:
                language = line.strip().removeprefix("```").split(" ")[0]
            else:
                yield from _of_block(page, language, block)
                language = None
                block = []
        elif language is not None:
            block.append((number, line))
        else:
            for span in SPAN.findall(line):
                yield from _of_line(page, number, span, whole=False)


def _of_block(page: str, language: str, lines: list[tuple[int, str]]) -> Iterator[Command]:
    if language not in SHELL:
        return
    prompted = any(line.startswith("$ ") for _, line in lines)
    begun = ""
    for number, line in lines:
        if prompted and not line.startswith("$ "):
            continue  # what the command printed
        begun += line.removeprefix("$ ").removesuffix("\\")
        if not line.endswith("\\"):
            yield from _of_line(page, number, begun, whole=True)
            begun = ""


def _of_line(page: str, number: int, line: str, *, whole: bool) -> Iterator[Command]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return  # an apostrophe: words, not a command
    if len(words) < 2 or words[0] not in TOOLS:
        return
    kept: list[str] = []
    for word in words:
        if word in SEPARATORS:
            break
        if word != "...":
            kept.append(word)
    if len(kept) > 1 and not _is_output(kept):
        yield Command(page, number, tuple(kept), whole)


def _is_output(words: Sequence[str]) -> bool:
    """`stepguard: error: ...`, `stepguard report: runs/...` and a usage line are no commands."""
    return words[1].endswith(":") or words[1].startswith(("[", "COMMAND")) or "COMMAND" in words


def problem(command: Command, root: Path = ROOT) -> str:
    """Say why this command would be refused; "" where it would not be."""
    words = _without_launcher(list(command.words))
    if words[0] == "stepguard":
        return _stepguard(words[1:], whole=command.whole)
    if words[0] == "pytest":
        return _missing(words[1:], root)
    if words[0] == "make":
        return _target(words[1], root)
    if words[0] == "pip":
        return _extras(words, root)
    if words[0] == "python" and words[1].startswith(("-m", "scripts/")):
        return _python(words[1:], root)
    if command.page.startswith("recipes/"):
        return _known(root).problem(" ".join(words)) or ""
    return ""


@cache
def _known(root: Path) -> References:
    return References(root)


def _without_launcher(words: list[str]) -> list[str]:
    """`torchrun ... -m stepguard run train.py` -> `stepguard run train.py`."""
    for place, word in enumerate(words):
        if word == "-m" and words[place + 1 : place + 2] == ["stepguard"]:
            return words[place + 1 :]
    return words


def _stepguard(words: list[str], *, whole: bool) -> str:
    from typer.main import get_command

    from stepguard.cli.app import app

    if words[0].startswith("-"):
        return ""
    if not whole:
        return _known(ROOT).problem(" ".join(["stepguard", *words])) or ""
    group: Any = get_command(app)
    command = group.commands.get(words[0])
    if command is None:
        return f"stepguard has no command {words[0]}"
    try:
        command.make_context(words[0], words[1:])
    except Exception as error:
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        return str(said())
    return ""


def _missing(words: Sequence[str], root: Path) -> str:
    for word in words:
        if not word.startswith("-") and not (root / word.partition("::")[0]).exists():
            return f"{word} does not exist"
    return ""


def _target(target: str, root: Path) -> str:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    there = re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
    return "" if there else f"the Makefile has no target {target}"


def _extras(words: Sequence[str], root: Path) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        found = re.fullmatch(r"(?:\.|stepguard)\[([\w,-]+)\]", word)
        for extra in found[1].split(",") if found else ():
            if extra not in project["optional-dependencies"]:
                return f"there is no extra {extra}"
    return ""


def _run_module(module: str) -> None:
    with warnings.catch_warnings():
        # it may have been imported already, which runpy warns of
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(module, run_name="__main__")


def _python(words: list[str], root: Path) -> str:
    if words == ["-m"]:
        return ""  # words about the option itself
    if words[0] == "-m":
        if words[1] == "benchmarks" and len(words) > 2 and words[2].islower():
            words = ["-m", f"benchmarks.{words[2]}", *words[3:]]
        module = words[1]
        if module in READERS_OWN:
            return ""
        folder = root / Path(*module.split("."))
        path = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not path.is_file():
            return f"there is no module {module}"
        return _refused(path, words[2:], partial(_run_module, module))
    path = root / words[0]
    if not path.is_file():
        return f"{words[0]} does not exist"
    return _refused(path, words[1:], lambda: runpy.run_path(str(path), run_name="__main__"))


class ParsedError(Exception):
    """The program's own parser has taken the options; it goes no further."""


def _refused(path: Path, options: list[str], run: Callable[[], object]) -> str:
    """Let a program parse its options, and end it there. One without a parser is not started."""
    text = path.read_text(encoding="utf-8")
    if "parse_args(" not in text and "runner.begin(" not in text:
        return ""
    original = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        raise ParsedError

    placeholders = [word for word in options if not word.isupper()]
    said = StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.object(sys, "argv", [str(path), *placeholders]),
        redirect_stderr(said),
        redirect_stdout(StringIO()),
    ):
        try:
            run()
        except ParsedError:
            return ""
        except SystemExit:
            return said.getvalue().strip().splitlines()[-1]
    return f"{path.name} has run to its end without parsing its options"


def collected(root: Path = ROOT) -> list[Command]:
    """Every command of every page."""
    found = []
    for path in pages(root):
        name = str(path.relative_to(root))
        found += list(commands(name, path.read_text(encoding="utf-8")))
    return found


def main() -> int:
    wrong = 0
    every = collected()
    known: dict[tuple[tuple[str, ...], bool], str] = {}
    for command in every:
        key = (command.words, command.whole)
        if key not in known:
            known[key] = problem(command)
        if known[key]:
            wrong += 1
            print(f"{command}\n    {known[key]}")
    print(f"{len(every)} commands, {wrong} that would be refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
