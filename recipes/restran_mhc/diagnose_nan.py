"""What is wrong with this run? Configuration, checkpoints, fresh model, forward pass, alphas,
recommendations.

    python diagnose_nan.py                  # in this folder; looks at results/
    python diagnose_nan.py --results elsewhere

Exit code 0: healthy. 1: a checkpoint is corrupt, a setting is far from safe, or another check
failed. 2: it could not be looked at. This is `stepguard doctor` for this folder, with the report's
safe settings to compare with. Checkpoints are read without running anything that is in them; those
in results/corrupted_backup, where the report moves bad ones, are not looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.config import Config
from stepguard import StepguardError
from stepguard.check.doctor import examine
from stepguard.records.incident import Section
from stepguard.report import screen
from stepguard.report.checks import journal_section, render_examination

HERE = Path(__file__).resolve().parent
EXITS = {"corrupt": 1, "failed": 1}
BACKUP = "corrupted_backup"
AT_MOST = {"LEARNING_RATE": 1e-4, "BATCH_SIZE": 32, "GRAD_CLIP": 1.0, "MHC_N": 2}
FAR = 10
"""So many times a safe value is no longer a warning."""
ONE_OF = {
    "MODEL_TYPE": ("restran_mhc", "restran"),
    "AUGMENTATION_LEVEL": ("light", "none"),
    "OVERSAMPLE_RARE_CHARS": (False,),
    "SINKHORN": ("log",),
    "MIX": ("full",),
    "RMS_EPS": (1e-6, 1e-5),
    "AMP": ("off",),
    "RESUME_LR": ("config",),
    "GUARD": ("stable",),
}
"""The first is the safe setting, the others are no riskier."""


def compared(config: Config, found: Section) -> Section:
    """The configuration beside the safe settings, and what the examination holds against it."""
    given = {name: getattr(config, name) for name in (*AT_MOST, *ONE_OF)}
    far = [name for name, most in AT_MOST.items() if given[name] > FAR * most]
    lines = [", ".join(f"{name} = {value}" for name, value in given.items())]
    for name, most in AT_MOST.items():
        if given[name] > most:
            lines.append(f"{name} = {given[name]:g} is above the safe {most:g}")
    for name, allowed in ONE_OF.items():
        if given[name] not in allowed:
            lines.append(f"{name} = {given[name]} is riskier than {allowed[0]}")
    status = "failed" if far else "warning" if len(lines) > 1 else "fine"
    if found.status != "fine" and status != "failed":
        status = found.status
    return replace(found, status=status, lines=(*lines, *found.lines[1:]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder with the checkpoints"
    )
    folder = parser.parse_args(arguments).results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.chdir(HERE):  # the model is built from this folder
            found = examine(
                folder,
                config=Path("configs/config.py"),
                build="train:build",
                watch=["*alpha*"],
                exclude=[BACKUP],
                journal=journal_section(folder),
            )
    except (StepguardError, OSError) as fault:
        print(f"diagnose_nan.py: {fault}", file=sys.stderr)
        return 2
    configuration, checkpoints, *rest = found.sections
    moved = sorted((folder / BACKUP).glob("*.pth"))
    if moved:
        said = f"{len(moved)} moved to {BACKUP}: not looked at"
        checkpoints = replace(checkpoints, lines=(*checkpoints.lines, said))
    found = replace(found, sections=(compared(Config(), configuration), checkpoints, *rest))
    out = sys.stdout
    shape = {"colour": screen.wants_colour(out), "unicode": screen.takes_unicode(out)}
    screen.put(render_examination(found, width=screen.columns(out), **shape), out)
    return EXITS.get(found.status, 0)


if __name__ == "__main__":
    raise SystemExit(main())
