"""Writes docs/findings/ from the rules, so that the pages and `stepguard explain` never disagree.

python scripts/write_findings.py            write the pages
python scripts/write_findings.py --check    exit 1 and name the pages that are not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from stepguard.diagnose.engine import all_rules, index, page

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "findings"


def pages() -> dict[str, str]:
    """File name -> text."""
    return {"index.md": index()} | {f"{rule.code}.md": page(rule) for rule in all_rules()}


def stale(folder: Path = FOLDER) -> list[str]:
    """Pages that are missing, differ, or have no rule any more."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in folder.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for name in stale():
            print(f"docs/findings/{name} is not up to date; run python scripts/write_findings.py")
        return 1 if stale() else 0
    if arguments:
        print(f"unknown argument {arguments[0]!r}; use --check or nothing")
        return 2
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
