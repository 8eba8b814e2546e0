"""What `pip install .` brings and how large it is: prints it, and writes it into docs/install.md.

    python scripts/install_size.py            print the table
    python scripts/install_size.py --write    and put it between the marks of docs/install.md

Read from what is installed in this environment, along the requirements without extras. torch and
what only torch requires are counted apart: whoever trains has them already.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).parents[1] / "docs" / "install.md"
BEGIN, END = "<!-- install-size:begin -->", "<!-- install-size:end -->"
OURS = "stepguard"
MIB = 2**20


def requirements(name: str) -> list[str]:
    """Packages that a plain installation of `name` requires here."""
    found: list[str] = []
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(canonicalize_name(requirement.name))
    return found


def closure(roots: list[str], leave_out: frozenset[str] = frozenset()) -> set[str]:
    """The roots and everything they require, directly or not, without going through `leave_out`."""
    found: set[str] = set()
    waiting = [name for name in roots if name not in leave_out]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [other for other in requirements(name) if other not in leave_out]
    return found


def size(name: str) -> int:
    """Bytes of the installed files; compiled Python files are not counted, which pip makes."""
    total = 0
    for file in metadata.files(name) or ():
        path = Path(str(file.locate()))
        if path.suffix != ".pyc" and path.is_file():
            total += path.stat().st_size
    return total


def own_size() -> int:
    """Bytes of stepguard's own files: an editable installation lists none of them."""
    source = Path(__file__).parents[1] / "src" / OURS
    files = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return sum(path.stat().st_size for path in files)


def table() -> str:
    """The rows, largest first, as Markdown."""
    direct = requirements(OURS)
    light = closure(direct, leave_out=frozenset({"torch"}))
    heavy = closure(["torch"]) - light
    rows = [(own_size(), OURS, "this package")]
    for name in light:
        reason = "required" if name in direct else "required by those"
        rows.append((size(name), name, reason))
    rows.sort(reverse=True)
    lines = ["| package | MiB | |", "|---|---|---|"]
    for amount, name, reason in rows:
        version = "" if name == OURS else f" {metadata.version(name)}"
        lines.append(f"| {name}{version} | {amount / MIB:.1f} | {reason} |")
    total = sum(amount for amount, _, _ in rows)
    lines.append(f"| **without torch** | **{total / MIB:.0f}** | {len(rows)} packages |")
    apart = sum(size(name) for name in heavy)
    torch = f"torch {metadata.version('torch')}"
    lines.append(
        f"| {torch} and what only it requires | {apart / MIB:.0f} | {len(heavy)} packages |"
    )
    return "\n".join(lines)


def main() -> int:
    found = table()
    print(found)
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
