"""Does a script print the same under the guard? Runs it bare and guarded, and compares every line.

    python scripts/compare_script.py train.py --lr 3e-4

Give it a script that seeds its random numbers. Times (`12.3ms`, `0.52s`, `it/s`) are not compared:
they differ between two bare runs as well. Exit code 0: the same; 1: not, with the first lines that
differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import zip_longest

TIMES = re.compile(r"\d+(\.\d+)?(e-?\d+)?\s*(ms|s|sec|seconds|min|it/s|s/it|tok/s)\b")
SHOWN = 5


def printed(command: list[str]) -> tuple[int, list[str]]:
    """Exit code and the lines on stdout, without times."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, [TIMES.sub("TIME", line) for line in done.stdout.splitlines()]


def main(words: list[str]) -> int:
    if not words:
        print(__doc__)
        return 2
    bare_code, bare = printed([sys.executable, *words])
    code, guarded = printed([sys.executable, "-m", "stepguard", "run", *words])
    differing = []
    for number, (one, other) in enumerate(zip_longest(bare, guarded), start=1):
        if one != other:
            differing.append(f"line {number}\n  bare    {one}\n  guarded {other}")
    print(f"{len(bare)} lines bare, {len(guarded)} guarded, {len(differing)} differ")
    print(f"exit codes: {bare_code} bare, {code} guarded")
    print("\n".join(differing[:SHOWN]))
    return int(bool(differing) or code != bare_code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
