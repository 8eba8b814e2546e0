"""Are the fixes that a panel prints true? Each is written into the program, and training goes on.

    python -m benchmarks remedies [--only NAME ...] [--json OUT]

For every incident of the zoo whose first finding offers a change of the user's own lines: the
change is applied (in memory, as `stepguard fix` would on disk) and the scene is trained from the
start without a guard, its steps and then batches of them again, 50 steps in all. It holds if every
loss and gradient is finite, and if the losses before the incident are those of the run without it.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from zoo.case import Case, Scene
from zoo.catalogue import chosen
from zoo.plain import autocast, make_scaler
from zoo.tools import run_guarded
from zoo.trace import finite

from benchmarks.parts import runner
from stepguard.locate.source import PatchError, with_edits

STEPS = 50
SAME = 1e-3
"""Losses that differ by less, relative, are the same."""


def losses(scene: Scene, steps: int) -> tuple[list[float], bool]:
    """Train without a guard; the losses, and whether all that was computed is finite."""
    scaler = make_scaler(scene)
    seen: list[float] = []
    for step in range(steps):
        if scene.before_step:
            scene.before_step(step % scene.steps)
        scene.optimizer.zero_grad()
        total = 0.0
        for batch in scene.micro_batches(step % scene.steps):
            with autocast(scene):
                loss = scene.loss(scene.model, batch)
            (scaler.scale(loss) if scaler else loss).backward()
            total += float(loss.detach())
        seen.append(total)
        if scaler:
            scaler.unscale_(scene.optimizer)
        if not torch.isfinite(torch.tensor(total)) or not finite(
            p.grad for p in scene.model.parameters()
        ):
            return seen, False
        if scene.clip:
            torch.nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip)
        if scaler:
            scaler.step(scene.optimizer)
            scaler.update()
        else:
            scene.optimizer.step()
        if scene.after_step:
            scene.after_step(step % scene.steps)
    return seen, True


def judge(case: Case) -> dict[str, Any] | None:
    """What became of the fix of a case; None where none is offered."""
    with tempfile.TemporaryDirectory() as run_dir:
        incidents, _ = run_guarded(case.build(False), run_dir)
    first = next((one for one in incidents if one.findings), None)
    if first is None:
        return None
    remedy = next((one for one in first.findings[0].remedies if one.edits), None)
    if remedy is None:
        return None
    row: dict[str, Any] = {
        "case": case.name,
        "code": first.findings[0].code,
        "tried": remedy.proven,
    }
    row["fix"] = remedy.title
    plain, _ = losses(case.build(False), min(first.step, STEPS))
    try:
        with with_edits(remedy.edits, remedy.needs):
            mended, row["trains"] = losses(case.build(False), STEPS)
    except PatchError as why:
        return {**row, "trains": False, "same": False, "steps": 0, "why": str(why)}
    pairs = zip(plain[: first.step], mended, strict=False)
    row["same"] = all(abs(new - old) <= SAME * max(abs(old), 1e-3) for old, new in pairs)
    row["steps"] = len(mended)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("remedies", __doc__, arguments, {"--only": runner.NAMES})
    args, console = run.options, run.console
    cases = [case for case in chosen(args.only) if not case.control]
    rows = []
    for case in run.track(cases):
        row = judge(case)
        if row is not None:
            rows.append(row)
    counts: Counter[str] = Counter()
    for row in rows:
        kind = "tried" if row["tried"] else "not tried"
        counts[kind] += 1
        counts[f"{kind}, trains on"] += row["trains"]
        counts[f"{kind}, same values before"] += row["same"]
        if not (row["trains"] and row["same"]):
            console.print(f"{row['case']}: {row}", markup=False, soft_wrap=True)
    console.print(f"{len(cases)} incidents, {len(rows)} with a change of the program")
    for name, count in sorted(counts.items()):
        console.print(f"  {name}: {count}")
    run.keep({"counts": dict(counts), "rows": rows}, details=("rows",))
    failed = [row for row in rows if row["tried"] and not (row["trains"] and row["same"])]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
