"""Does a script print the same under the guard? Runs it bare and guarded, and compares every line.

    python scripts/compare_script.py train.py --lr 3e-4
    python scripts/compare_script.py --file out/ckpt.pt train.py     a file it writes, byte by byte

Give it a script that seeds its random numbers. Times (`12.3ms`, `0.52s`, `it/s`) are not compared:
they differ between two bare runs as well. Exit code 0: the same; 1: not, with the first lines that
differ.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

TIMES = re.compile(r"\d+(\.\d+)?(e-?\d+)?\s*(ms|s|sec|seconds|min|it/s|s/it|tok/s)\b")
SHOWN = 5


def printed(command: list[str]) -> tuple[int, list[str]]:
    """Exit code and the lines on stdout, without times."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, [TIMES.sub("TIME", line) for line in done.stdout.splitlines()]


def written(path: Path | None) -> str:
    """What stands in the file, as a digest; the file is removed for the next run."""
    if path is None:
        return ""
    if not path.is_file():
        return "no file"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.unlink()
    return digest


def main(words: list[str]) -> int:
    path = None
    if words[:1] == ["--file"] and len(words) > 1:
        path = Path(words[1])
        words = words[2:]
    if not words:
        print(__doc__)
        return 2
    bare_code, bare = printed([sys.executable, *words])
    bare_file = written(path)
    code, guarded = printed([sys.executable, "-m", "stepguard", "run", *words])
    file = written(path)
    differing = []
    for number, (one, other) in enumerate(zip_longest(bare, guarded), start=1):
        if one != other:
            differing.append(f"line {number}\n  bare    {one}\n  guarded {other}")
    print(f"{len(bare)} lines bare, {len(guarded)} guarded, {len(differing)} differ")
    print(f"exit codes: {bare_code} bare, {code} guarded")
    print("\n".join(differing[:SHOWN]))
    if path is not None:
        same = "the same bytes" if file == bare_file != "no file" else "not the same"
        print(f"{path}: {same} ({bare_file[:12]} bare, {file[:12]} guarded)")
    apart = bool(differing) or code != bare_code or file != bare_file or file == "no file"
    return int(apart)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
