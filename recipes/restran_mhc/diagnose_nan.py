"""What is wrong with this run? Configuration, checkpoints, fresh model, forward pass, alphas,
recommendations.

    python diagnose_nan.py                  # in this folder; looks at results/
    python diagnose_nan.py --results elsewhere

Exit code 0: healthy. 1: a checkpoint is corrupt, or another check failed. 2: it could not be looked
at. The same as `stepguard doctor results --config configs/config.py --build train:build`.
Checkpoints are read without running anything that is in them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stepguard import StepguardError
from stepguard.preflight.doctor import examine
from stepguard.report import screen
from stepguard.report.doctor import render_examination

HERE = Path(__file__).resolve().parent
EXITS = {"corrupt": 1, "failed": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder with the checkpoints"
    )
    folder = parser.parse_args(arguments).results.resolve()
    os.chdir(HERE)  # the model is built from this folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = examine(
            folder, config=Path("configs/config.py"), build="train:build", watch=["*alpha*"]
        )
    except (StepguardError, OSError) as fault:
        print(f"diagnose_nan.py: {fault}", file=sys.stderr)
        return 2
    out = sys.stdout
    shape = {"colour": screen.wants_colour(out), "unicode": screen.takes_unicode(out)}
    screen.put(render_examination(found, width=screen.columns(out), **shape), out)
    return EXITS.get(found.status, 0)


if __name__ == "__main__":
    raise SystemExit(main())
