"""Every benchmark by name.

python -m benchmarks                     # what there is
python -m benchmarks own_cost --quick    # one of them, with its own arguments
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> dict[str, str]:
    """Name -> the first sentence of its docstring, without importing anything."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = " ".join(doc.split("\n\n")[0].split())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = names()
    if not given or given[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [--help] [arguments of that benchmark]\n")
        for name, summary in known.items():
            print(f"  {name:12} {summary}")
        return 0
    if given[0] not in known:
        print(f"{given[0]} is not a benchmark; use one of {', '.join(known)}.", file=sys.stderr)
        return 2
    sys.argv[1:] = given[1:]
    runpy.run_module(f"benchmarks.{given[0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
