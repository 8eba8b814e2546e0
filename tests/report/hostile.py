"""A journal that somebody wrote to harm whoever looks at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ATTACK = "</script><script>attacked=1</script><img src=x onerror='attacked=1'>{data}<!--"
LONG = 10_000_000


def hostile_run(folder: Path) -> Path:
    """HTML in every text, NaN in odd places, cut lines, a line of 10 MB; 12 good steps."""
    folder.mkdir(parents=True)
    lines = [json.dumps(_header())]
    for step in range(12):
        lines.append(json.dumps(_step(step)))
    lines.append(json.dumps({"v": 1, "type": "incident", "incident": _incident()}))
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


def _header() -> dict[str, Any]:
    config = {"clip_norm": ATTACK, ATTACK: {ATTACK: ATTACK}}
    facts = {"run": ATTACK, "torch": ATTACK, "stepguard": ATTACK, "optimizer": ATTACK, "world": 1}
    return {"v": 1, "type": "run", "time": 1e9, "attempt": 1, **facts, "config": config}


def _step(step: int) -> dict[str, Any]:
    named = {ATTACK: 1.0 + step, "__proto__": 2.0, "constructor": 3.0}
    fields = {"loss": 2.0 - step / 10, "components": named, "followed": named, "lr": [0.1, 0.2]}
    return {"v": 1, "type": "step", "step": step, **fields, "committed": step != 8}


def _incident() -> dict[str, Any]:
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
