"""Write the tree of the source into docs/project/source-tree.md: one line for each module.

`python scripts/write_tree.py` takes the line from the first sentence of the module's docstring;
`--check` exits with 1 if the page is out of date.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepguard"
PAGE = ROOT / "docs" / "project" / "source-tree.md"
BEGIN = "<!-- tree: written by scripts/write_tree.py -->\n"
END = "<!-- end of the tree -->\n"
WIDTH = 130


def tree(folder: Path, depth: int = 0) -> list[str]:
    """Lines of a folder's modules, then of the folders below it."""
    lines = []
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("__"):
            lines.append(_line("  " * depth + path.name, path))
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").exists():
            lines.append(_line("  " * depth + path.name + "/", path / "__init__.py"))
            lines.extend(tree(path, depth + 1))
    return lines


def _line(name: str, path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = textwrap.shorten(docstring.split("\n\n")[0], WIDTH - 27, placeholder=" ...")
    return f"{name:<26} {sentence}".rstrip()


def page(text: str) -> str:
    """Put the present tree in the place of the one on the page."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return "\n".join([before + BEGIN, "```", *tree(SOURCE), "```", "", END]) + after


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = page(text)
    if sys.argv[1:] == ["--check"]:
        if new != text:
            print("docs/project/source-tree.md is out of date: run python scripts/write_tree.py")
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
