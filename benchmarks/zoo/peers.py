"""The zoo under stepguard beside what people use today: who notices, at the right step, and who
names the place?

    python -m benchmarks.zoo.peers [--only NAME ...]

Writes benchmarks/results/zoo.json. The peers:

    detect_anomaly   torch.autograd.detect_anomaly: raises in the backward, names an autograd node
    module hooks     the forward hook that everybody copies: NaN in a module's output transformers
    DebugUnderflowOverflow: hooks on every module, NaN and Inf (where transformers is installed)

A place counts as right when the tool names the autograd node (detect_anomaly) or the module (hooks)
in which the first harmful value is born, at that step. None of the peers can name an operation, a
sample or a cause.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.zoo.case import Case, Expected, Scene
from benchmarks.zoo.catalogue import chosen
from benchmarks.zoo.guarded import score
from benchmarks.zoo.plain import autocast, make_scaler

RESULTS = Path(__file__).parents[1] / "results" / "zoo.json"


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a tool said first."""

    step: int
    place: str | None
    """An autograd node or a module path."""


def loop(scene: Scene, before: Callable[[int], None] | None = None) -> None:
    """The plain loop, without any look at what happens."""
    scaler = make_scaler(scene)
    for step in range(scene.steps):
        if before is not None:
            before(step)
        if scene.before_step:
            scene.before_step(step)
        scene.optimizer.zero_grad()
        for batch in scene.micro_batches(step):
            with autocast(scene):
                loss = scene.loss(scene.model, batch)
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(scene.optimizer)
        if scene.clip:
            torch.nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip)
        if scaler:
            scaler.step(scene.optimizer)
            scaler.update()
        else:
            scene.optimizer.step()
        if scene.after_step:
            scene.after_step(step)


def anomaly_mode(scene: Scene) -> Alarm | None:
    """torch.autograd.detect_anomaly."""
    now = {"step": 0}
    try:
        with torch.autograd.set_detect_anomaly(True):
            loop(scene, lambda step: now.update(step=step))
    except RuntimeError as error:
        name = str(error).partition("'")[2].partition("'")[0]
        return Alarm(now["step"], name or None)
    return None


def module_hooks(scene: Scene) -> Alarm | None:
    """The copied forward hook: first module whose output holds NaN."""
    now, alarms = {"step": 0}, []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            floats = (
                t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()
            )
            if any(bool(torch.isnan(t).any()) for t in floats):
                alarms.append(Alarm(now["step"], name))

        return hook

    for name, module in _modules(scene).items():
        module.register_forward_hook(look(name))
    loop(scene, lambda step: now.update(step=step))
    return alarms[0] if alarms else None


def transformers_debug(scene: Scene) -> Alarm | None:
    """transformers' DebugUnderflowOverflow, which prints its frames and raises ValueError."""
    from transformers.debug_utils import DebugUnderflowOverflow

    now, said = {"step": 0}, io.StringIO()
    with redirect_stdout(said):
        DebugUnderflowOverflow(scene.model)
        try:
            loop(scene, lambda step: now.update(step=step))
        except ValueError:
            return Alarm(now["step"], _last_frame(said.getvalue()))
    return None


def _last_frame(printed: str) -> str | None:
    """The dotted path in the last frame header: `encoder.block.2 T5LayerNorm`."""
    frames = [
        line.split()[0]
        for line in printed.splitlines()
        if line and line[0].isalpha() and len(line.split()) == 2
    ]
    return frames[-1] if frames else None


def _modules(scene: Scene) -> dict[str, nn.Module]:
    roots = {"": scene.model} | (
        {"criterion": scene.criterion} if scene.criterion is not None else {}
    )
    return {f"{k}.{n}".strip("."): m for k, root in roots.items() for n, m in root.named_modules()}


def peers() -> dict[str, Callable[[Scene], Alarm | None]]:
    """Those that can be imported here."""
    found: dict[str, Callable[[Scene], Alarm | None]] = {
        "detect_anomaly": anomaly_mode,
        "module hooks": module_hooks,
    }
    try:
        import transformers.debug_utils  # noqa: F401
    except ImportError:
        return found
    return {**found, "transformers": transformers_debug}


def names_place(tool: str, alarm: Alarm | None, want: Expected) -> bool:
    if alarm is None or alarm.step != want.step or alarm.place is None:
        return False
    if tool == "detect_anomaly":
        return want.node is not None and want.node == alarm.place
    return want.phase in ("forward", "loss", "input", "state") and want.module == alarm.place


def compare(
    case: Case, tools: dict[str, Callable[[Scene], Alarm | None]]
) -> dict[str, dict[str, Any]]:
    """For every tool: right step, right place, false alarm."""
    row = score(case)
    said: dict[str, dict[str, Any]] = {
        "stepguard": {
            "step": bool(row.detect) and not case.control,
            "place": bool(row.place),
            "false_alarm": bool(row.false_alarms),
        }
    }
    for name, tool in tools.items():
        alarm = _ask(tool, case)
        if case.expected is None:
            said[name] = {"step": False, "place": False, "false_alarm": alarm is not None}
            continue
        right = alarm is not None and alarm.step == case.expected.step
        said[name] = {
            "step": right,
            "place": names_place(name, alarm, case.expected),
            "false_alarm": False,
        }
    return said


def _ask(tool: Callable[[Scene], Alarm | None], case: Case) -> Alarm | None:
    try:
        return tool(case.build(False))
    except (
        RuntimeError,
        ValueError,
    ):  # the broken run itself ended in an error, as some do after their first NaN
        return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="cases or groups")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases, tools = chosen(args.only), peers()
    shown = track(cases, description="comparing", console=Console(stderr=True), transient=True)
    answers = {case.name: compare(case, tools) for case in shown}
    incidents = [case.name for case in cases if not case.control]
    controls = [case.name for case in cases if case.control]
    table = Table(
        title=f"{len(incidents)} incidents, {len(controls)} healthy controls",
        box=None,
        header_style="bold",
    )
    for heading in ("tool", "right step", "right place", "false alarms"):
        table.add_column(heading, justify="left" if heading == "tool" else "right")
    totals = {}
    for name in ("stepguard", *tools):
        total = {
            "step": sum(answers[case][name]["step"] for case in incidents),
            "place": sum(answers[case][name]["place"] for case in incidents),
            "false_alarms": sum(answers[case][name]["false_alarm"] for case in controls),
        }
        totals[name] = total
        table.add_row(name, *(str(value) for value in total.values()))
    Console(width=100).print(table)
    if not args.only:
        RESULTS.parent.mkdir(exist_ok=True)
        content = {
            "incidents": len(incidents),
            "controls": len(controls),
            "totals": totals,
            "cases": answers,
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
