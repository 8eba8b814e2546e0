"""Incidents and journals written down as they are, so that outputs are tested without training."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepguard.records import (
    Decision,
    Evidence,
    Finding,
    Incident,
    Operand,
    Origin,
    Reading,
    Remedy,
    Verdict,
)
from stepguard.records.codec import dumps, to_plain
from stepguard.records.incident import Statement
from stepguard.report.story import JournalFile, Run, Story, build_story

NAN, INF = math.nan, math.inf
SOURCE = (
    "86 |         scores = q @ k.transpose(-2, -1) / self.scale",
    "87 |         scores = scores.masked_fill(mask, float('-inf'))",
    "88 |         weights = scores.softmax(dim=-1)",
    "89 |         return self.out(weights @ v)",
)
STATEMENT = Statement(
    file="model.py",
    line=88,
    text="        weights = scores.softmax(dim=-1)",
    start=18,
    end=40,
)
SHAPE = (8, 4, 16, 16)
SCORES = Operand(
    name="self",
    dtype="float32",
    shape=SHAPE,
    min=-3.1,
    max=4.25,
    neginf=1024,
    index=(5, 0),
    value=-INF,
)
MASKED_ROW = Incident(
    id="000000048-0",
    step=48,
    verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan (text_loss)"),
    reading=Reading(
        step=48,
        loss=NAN,
        components={"text_loss": NAN, "latent_loss": 0.4123},
        grad_norm=NAN,
        grads_finite=False,
        scale=65536.0,
        lr=(4.92e-4, 1e-4),
    ),
    origin=Origin(
        step=48,
        phase="forward",
        module="encoder.layers.3.attn",
        op="aten._softmax",
        source="model.py:88",
        context=SOURCE,
        statement=STATEMENT,
        samples=(5,),
        inputs=(SCORES,),
        output=Operand(
            name="out",
            dtype="float32",
            shape=SHAPE,
            min=0.0,
            max=1.0,
            nan=1024,
            index=(5, 0),
            value=NAN,
        ),
        method="replay",
        reproduced=True,
        evidence=Evidence(unselected=True),
        remarks=("the compiled graph was run eagerly",),
    ),
    findings=(
        Finding(
            code="SG204",
            title="softmax over a fully masked row",
            evidence=("row [5, 0, 0] of the scores is -inf in all 16 places",),
            certainty="certain",
            remedies=(
                Remedy(
                    title="Give such rows weight 0",
                    snippet="weights = masked_softmax(scores, mask)",
                ),
                Remedy(
                    title="Drop empty samples",
                    snippet="batch = batch[mask.any(-1)]",
                    safety="changes-training",
                ),
                Remedy(title="A third one that is not shown"),
            ),
        ),
        Finding(code="SG206", title="inf - inf or 0 * inf", certainty="possible"),
    ),
    decision=Decision(action="skip", consecutive=1, total=1),
    capsule="incidents/000000048-0/capsule",
    run="runs/demo",
)
BARE = Incident(
    id="bare",
    step=7,
    verdict=Verdict(
        kind="nonfinite_gradient",
        severity="incident",
        summary="gradient is non-finite (head.weight)",
    ),
    reading=Reading(step=7),
)


def masked_row(
    step: int = 48, action: Any = "skip", in_a_row: int = 1, reason: str = ""
) -> Incident:
    """The same trouble again at another step."""
    decision = Decision(action=action, consecutive=in_a_row, total=in_a_row, reason=reason)
    reading = replace(MASKED_ROW.reading, step=step)
    return replace(MASKED_ROW, id=f"{step:09d}-0", step=step, reading=reading, decision=decision)


def step_line(
    step: int, loss: float | None = 1.0, *, committed: bool = True, **more: Any
) -> dict[str, Any]:
    return {"v": 1, "type": "step", "step": step, "loss": loss, "committed": committed, **more}


@dataclass
class Written:
    """A journal as it is read back."""

    path: str = "runs/demo/journal.jsonl"
    header: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0


def told(record: Any) -> Run:
    """The story of a journal that holds these lines: each incident and note after its step."""
    header = {key: value for key, value in record.header.items() if key not in ("v", "type")}
    lines = [dumps({"v": 1, "type": "run", **header})]
    incidents = list(record.incidents)
    notes = list(record.notes)
    for step in record.steps:
        lines.append(dumps({**step, "v": 1, "type": "step"}))
        for incident in [one for one in incidents if one.step == step["step"]]:
            incidents.remove(incident)
            lines.append(_incident_line(incident, of_last_step=True))
        for note in [one for one in notes if one.get("step") == step["step"]]:
            notes.remove(note)
            lines.append(dumps({"v": 1, **note}))
    lines += map(_incident_line, incidents)
    lines += (dumps({"v": 1, **note}) for note in notes)
    lines += ["{"] * record.torn
    return story_of((line.encode() for line in lines), Path(str(record.path))).latest


def story_of(lines: Iterable[bytes], path: Path = Path("journal.jsonl")) -> Story:
    """The story of the lines of one journal, as if they had been read from `path`."""
    journal = JournalFile(path, 0)
    for line in lines:
        journal.take(line)
    return build_story(path, {0: journal}, 0)


def _incident_line(incident: Incident, **more: bool) -> str:
    return dumps({"v": 1, "type": "incident", **more, "incident": to_plain(incident)})


def troubled_run() -> Written:
    """Calibration, a rising norm, three skips, a rewind, and 8 healthy steps after it."""
    steps = [step_line(s, 3.0, committed=False, scale=65536.0, grad_norm=INF) for s in range(2)]
    steps += [
        step_line(s, 2.0 - s / 100, grad_norm=0.5, clip_factor=1.0, seconds=0.2)
        for s in range(2, 44)
    ]
    steps += [
        step_line(s, 2.0, grad_norm=2.0 * (s - 42), clip_factor=0.25, seconds=0.2)
        for s in range(44, 48)
    ]
    steps += [step_line(s, NAN, committed=False, grad_norm=NAN) for s in range(48, 52)]
    steps += [
        step_line(s, 1.25, grad_norm=0.5, clip_factor=1.0, seconds=0.2) for s in range(52, 60)
    ]
    spent = "no skip: 4 incidents in a row, 3 are allowed"
    return Written(
        header={
            "v": 1,
            "type": "run",
            "time": 0,
            "stepguard": "0.1.0",
            "torch": "2.13.0",
            "world": 2,
            "rank": 0,
            "optimizer": "AdamW",
            "parameters": 1234,
            "lr": [4.92e-4, 1e-4],
            "config": {
                "clip_norm": 1.0,
                "capsule": "full",
                "policy": {"max_rewinds": 5, "max_total": 100},
            },
        },
        steps=steps,
        incidents=[
            *(masked_row(s, "skip", s - 47) for s in (48, 49, 50)),
            masked_row(51, "rewind", 4, spent),
        ],
        notes=[
            *(
                {"type": "note", "step": s, "kind": "scale_calibration", "summary": "calibration"}
                for s in range(2)
            ),
            {"type": "checkpoint", "step": 40, "path": "checkpoints/step-40"},
            {"type": "fault", "step": 55, "error": "RuntimeError: boom"},
            {"type": "end", "steps": 60, "incidents": 4, "armed": False},
        ],
        torn=1,
    )


def as_json(record: object) -> str:
    """What `--json` prints of a record."""
    return dumps(to_plain(record))


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def note(kind: str, summary: str, step: int) -> dict[str, Any]:
    """The fields of a note, as sinks get them."""
    return {"step": step, "kind": kind, "summary": summary}


ATTACK = "</script><script>attacked=1</script><img src=x onerror='attacked=1'>{data}<!--"
LONG = 10_000_000


def hostile_run(folder: Path) -> Path:
    """HTML in every text, NaN in odd places, cut lines, a line of 10 MB; 12 good steps."""
    folder.mkdir(parents=True)
    lines = [json.dumps(_hostile_header())]
    for step in range(12):
        lines.append(json.dumps(_hostile_step(step)))
    lines.append(json.dumps({"v": 1, "type": "incident", "incident": _hostile_incident()}))
    lines.append('{"v":1,"type":"step","step":12,"loss":NaN,"committed":true}')
    lines.append('{"v":1,"type":"step","step":NaN,"loss":1}')
    lines.append('{"v":1,"type":"step","step":"' + ATTACK + '","loss":[],"lr":{"a":1}}')
    lines.append(
        '{"v":1,"type":"step","step":13,"loss":1e999,"components":{"a":NaN},"lr":[-1e999]}'
    )
    lines.append(
        json.dumps({"v": 1, "type": "note", "step": 12, "kind": ATTACK, "summary": ATTACK})
    )
    lines.append(json.dumps({"v": 1, "type": "note", "step": 12, "summary": "x" * LONG}))
    lines.append('{"v":1,"type":"step","st')
    lines.append("[]")
    lines.append(json.dumps({"v": 1, "type": "end", "error": ATTACK}))
    text = "\n".join(lines) + '\n{"v":1,"type":"step","step":14,"lo'
    (folder / "journal.jsonl").write_text(text, encoding="utf-8")
    return folder


def _hostile_header() -> dict[str, Any]:
    config = {"clip_norm": ATTACK, ATTACK: {ATTACK: ATTACK}}
    facts = {"run": ATTACK, "torch": ATTACK, "stepguard": ATTACK, "optimizer": ATTACK, "world": 1}
    return {"v": 1, "type": "run", "time": 1e9, "attempt": 1, **facts, "config": config}


def _hostile_step(step: int) -> dict[str, Any]:
    named = {ATTACK: 1.0 + step, "__proto__": 2.0, "constructor": 3.0}
    fields = {"loss": 2.0 - step / 10, "components": named, "followed": named, "lr": [0.1, 0.2]}
    return {"v": 1, "type": "step", "step": step, **fields, "committed": step != 8}


def _hostile_incident() -> dict[str, Any]:
    origin = {
        "step": 8,
        "phase": "forward",
        "module": ATTACK,
        "op": ATTACK,
        "source": ATTACK,
        "context": [ATTACK],
        "tensor": ATTACK,
        "samples": [1],
        "rows": [ATTACK],
        "inputs": [{"name": ATTACK, "dtype": ATTACK, "shape": [3], "nan": 1}],
        "remarks": [ATTACK],
    }
    finding = {
        "code": ATTACK,
        "title": ATTACK,
        "evidence": [ATTACK],
        "certainty": "certain",
        "remedies": [{"title": ATTACK, "snippet": ATTACK, "safety": "safe"}],
    }
    return {
        "id": ATTACK,
        "step": 8,
        "verdict": {"kind": "nonfinite_loss", "severity": "incident", "summary": ATTACK},
        "reading": {"step": 8, "loss": None, "loss_kind": "nan", "bad_grads": [ATTACK]},
        "origin": origin,
        "findings": [finding],
        "decision": {"action": "skip", "reason": ATTACK, "left_out": ATTACK},
        "capsule": "../../../../etc",
        "run": ATTACK,
        "rank": 0,
    }
