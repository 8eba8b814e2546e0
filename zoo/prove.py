"""Proves that a case fails as it claims and that its fix works, without using stepguard.

python -m zoo.prove [NAME ...]
"""

from __future__ import annotations

import math
import sys
import warnings

import torch

from zoo.case import Case, Expected
from zoo.catalogue import chosen
from zoo.plain import Record, run
from zoo.trace import Event

RUNAWAY = 1e3
"""Times a diverging loss must grow."""


def problems(case: Case) -> list[str]:
    """What is wrong with the case's claims; empty when everything is proven."""
    record = run(case.build(False))
    if case.expected is None:
        return _control(case, record)
    found = [
        *_origin(case.expected, record),
        *_sight(case.expected, record),
        *_claims(case.expected, record),
    ]
    if case.expected.sample is not None and case.expected.event != "checkpoint":
        found += _sample(case)
    return found + _fix(case)


def _control(case: Case, record: Record) -> list[str]:
    healthy = {
        "loss": all(map(math.isfinite, record.loss)),
        "gradients": case.transient_grads or all(record.grads_finite),
        "parameters": all(record.params_finite),
    }
    return [f"control with non-finite {what}" for what, fine in healthy.items() if not fine]


def first(events: list[Event], kind: str, step: int) -> Event | None:
    """The first birth of a NaN, or of an infinity, in this step."""
    for event in events:
        if event.step != step:
            continue
        if kind == "nan" and event.nan_out and not event.nan_in:
            return event
        if kind == "inf" and event.inf_out and not event.nan_in and not event.inf_in:
            return event
    return None


def _matches(event: Event | None, want: Expected) -> bool:
    if event is None or (event.op, event.phase, event.module) != (want.op, want.phase, want.module):
        return False
    return want.node in (None, event.node) and want.micro in (None, event.micro)


def _origin(want: Expected, record: Record) -> list[str]:
    kind = want.event.partition(":")[0]
    if kind in ("nan", "inf"):
        event = first(record.events, kind, want.step)
        early = [
            e for step in range(want.step) if (e := first(record.events, "nan", step)) is not None
        ]
        said = [] if _matches(event, want) else [f"the first {kind} of step {want.step} is {event}"]
        return said + [f"an earlier NaN: {e}" for e in early[:1]]
    if kind == "seen":
        seen = any(_matches(e, want) for e in record.events if e.step == want.step)
        return [] if seen else [f"not seen there; events: {_first_few(record, want.step)}"]
    if kind in ("param", "buffer", "batch", "opt"):
        return _stored(want, record, kind)
    if kind == "spike":
        before, last = record.loss[want.step], record.loss[-1]
        grew = not math.isfinite(last) or last > RUNAWAY * before
        return [] if grew else [f"no divergence: {record.loss}"]
    wrong = record.saved_bad != want.proof["bad_entries"]
    return [f"bad entries in what was saved: {record.saved_bad}"] if wrong else []


def _stored(want: Expected, record: Record, kind: str) -> list[str]:
    when = want.step + 1 if want.proof.get("left_behind") else want.step
    said = (
        []
        if want.event in record.bad_before[when]
        else [f"{want.event} was fine: {record.bad_before}"]
    )
    if kind in ("batch", "opt") and any(
        want.event in bad for bad in record.bad_before[: want.step]
    ):
        said.append(f"{want.event} was bad earlier")
    read = any(
        (e.op, e.module) == (want.op, want.module)
        and (e.phase == want.phase or want.phase in ("state", "input"))
        for e in record.events
        if e.step >= want.step
    )
    if want.op is not None and not read:
        said.append(
            f"no {want.op} in {want.module} read it; events: {_first_few(record, want.step)}"
        )
    return said


def _first_few(record: Record, step: int) -> str:
    return "; ".join(
        f"{e.phase}/{e.module}/{e.op}/{e.node}"
        for e in [e for e in record.events if e.step == step][:6]
    )


def _sight(want: Expected, record: Record) -> list[str]:
    """What a user sees at that step."""
    said = []
    if math.isfinite(record.loss[want.step]) != want.loss_finite:
        said.append(f"the loss is {record.loss[want.step]}")
    if record.grads_finite[want.step] != want.grads_finite:
        said.append(f"gradients finite: {record.grads_finite[want.step]}")
    return said


def _claims(want: Expected, record: Record) -> list[str]:
    """The further claims of the case, each with what contradicts it."""
    proof = want.proof
    checks = {
        "then": lambda: not _turns_nan(record, want, *proof["then"]),
        "transient": lambda: not _in_forward(record, want, *proof["transient"]),
        "backward_only": lambda: any(
            e.phase in ("forward", "loss") and e.nan_out for e in _events(record, want)
        ),
        "eval_finite": lambda: record.evaluations_finite[-1] != proof["eval_finite"],
        "poisoned": lambda: record.bad_buffers[-1] != proof["poisoned"],
        "scale_collapse": lambda: not (record.scale[-1] < 1.0 and all(record.params_finite)),
        "zero_grads": lambda: not all(record.zero_grads),
        "param": lambda: record.params_finite[want.step],
    }
    return [
        f"{claim}={proof[claim]} does not hold"
        for claim, wrong in checks.items()
        if claim in proof and wrong()
    ]


def _events(record: Record, want: Expected) -> list[Event]:
    return [event for event in record.events if event.step == want.step]


def _turns_nan(record: Record, want: Expected, op: str, module: str | None) -> bool:
    return any(
        (e.op, e.module) == (op, module) and e.nan_out and not e.nan_in
        for e in _events(record, want)
    )


def _in_forward(record: Record, want: Expected, op: str, module: str | None) -> bool:
    return any((e.op, e.module, e.phase) == (op, module, "forward") for e in _events(record, want))


def _sample(case: Case) -> list[str]:
    """Without the guilty sample the step is finite."""
    want = case.expected
    assert want is not None and want.sample is not None
    try:
        again = run(case.build(False), without=(want.step, want.micro or 0, want.sample))
    except (RuntimeError, ValueError, IndexError) as error:
        return [f"cannot leave sample {want.sample} out: {error!r}"]
    fine = math.isfinite(again.loss[want.step]) and again.grads_finite[want.step]
    return [] if fine else [f"leaving sample {want.sample} out does not help"]


def _fix(case: Case) -> list[str]:
    scene = case.build(True)
    record = run(scene)
    steps = [i for i in range(scene.steps) if i not in scene.tolerated]
    said = []
    if not all(math.isfinite(record.loss[i]) and record.grads_finite[i] for i in steps):
        said.append(f"the fix fails: loss {record.loss}, gradients finite {record.grads_finite}")
    evaluated = record.evaluations_finite[-1] if record.evaluations_finite else True
    if not (record.params_finite[-1] and evaluated and not record.saved_bad):
        said.append("the fix leaves bad state behind")
    return said


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = 0
    for case in chosen(names):
        try:
            said = problems(case)
        except Exception as error:
            said = [f"raised {type(error).__name__}: {error}"]
        wrong += bool(said)
        print(f"{'ok ' if not said else 'BAD'} {case.group:16} {case.name}")
        for line in said:
            print(f"        {line}")
    print(f"{wrong} cases with problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
