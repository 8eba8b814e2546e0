"""A run summed up for terminal, Markdown and JSON, and two runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from report.literals import (
    BARE,
    MASKED_ROW,
    NAN,
    Written,
    as_json,
    masked_row,
    step_line,
    story_of,
    told,
    troubled_run,
)
from stepguard.records import Decision, Finding, Incident, Origin, Policy, Reading, Verdict
from stepguard.report.run_report import render_comparison, render_markdown, render_terminal
from stepguard.report.summary import (
    Event,
    RunComparison,
    RunSummary,
    summarize,
    timeline,
)
from stepguard.report.summary import compare as compare_runs

SCREEN = """\
stepguard report: runs/demo/journal.jsonl ──────────────────────────────────────
 versions   stepguard 0.1.0, torch 2.13.0
 optimizer  AdamW, 1,234 parameters, lr 0.000492 / 0.0001
 ranks      2, this is rank 0
 settings   clip_norm=1, policy.max_rewinds=5, policy.max_total=100
 steps      60 seen, 54 committed, 4 skipped, 2 loss-scale calibrations
 bad steps  4, first 48, last 51, longest stretch 4 in a row
 loss       first 1.98, best 1.25, last 1.25
 clipping   7.4% of 54 steps clipped, on average to 0.25 of their length
 speed      0.2 s a step (median)
 warning: 1 line of the journal could not be read: a crash while writing
incidents by kind ──────────────────────────────────────────────────────────────
 #  kind             first  last  count  in a row
 1  non-finite loss     48    51      4         4

 1. skipped (3), rewound (1)
stepguard: step 48, non-finite loss ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
 WHAT    loss is nan (text_loss)
         loss nan, text_loss nan, latent_loss 0.4123, grad norm nan, scale
         65536, lr 0.000492 / 0.0001
 WHY     SG204 softmax over a fully masked row (certain)
         - row [5, 0, 0] of the scores is -inf in all 16 places
         less likely: SG206 inf - inf or 0 * inf
 FIX     1. Give such rows weight 0
             weights = masked_softmax(scores, mask)
         2. Drop empty samples (changes what is learned)
             batch = batch[mask.any(-1)]
 WHERE   forward: aten._softmax in encoder.layers.3.attn at model.py:88
             86 │ scores = q @ k.transpose(-2, -1) / self.scale
             87 │ scores = scores.masked_fill(mask, float('-inf'))
           > 88 │ weights = scores.softmax(dim=-1)
                │           ^^^^^^^^^^^^^^^^^^^^^^
             89 │ return self.out(weights @ v)
           self    float32 [8,4,16,16]; -inf at [5,0]; 1,024 -Inf of 8,192;
                   finite -3.1 to 4.25
           output  float32 [8,4,16,16]; nan at [5,0]; 1,024 NaN of 8,192; finite
                   0 to 1
         the replay shows it again
         the compiled graph was run eagerly
 SAMPLE  sample 5
 DONE    skipped: weights, optimizer state and buffers are as before the step
         1 in a row, 1 in this run
 NEXT    stepguard replay runs/demo/incidents/000000048-0/capsule
         stepguard explain SG204
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
before the first incident ──────────────────────────────────────────────────────
 grad norm  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▆▇▇█  0.5 to 10 in 32 steps
 loss       ▅▅▅▅▅▅▄▄▄▄▄▄▃▃▃▃▃▃▂▂▂▂▂▂▁▁▁▁████  1.84 to 2 in 32 steps
what led to what ───────────────────────────────────────────────────────────────
 step 0       •  the run began, loss 3
 steps 0-1    ↓  calibration (2 times)
 steps 44-47  ↓  the gradient norm rose from its usual 0.5 to 10
 steps 48-50  ↓  loss is nan (text_loss); originated in forward: aten._softmax
                 in encoder.layers.3.attn at model.py:88, sample 5; SG204
                 softmax over a fully masked row; skipped 3 times
 step 51      ↓  loss is nan (text_loss); rewound (no skip: 4 incidents in a
                 row, 3 are allowed)
 steps 52-59  ↓  8 steps committed since the last incident, the last with loss
                 1.25
 step 55      ↓  the guard failed and was disarmed: RuntimeError: boom
 step 59      ↓  the disarmed guard was closed
"""


def summary_of(run: Written) -> RunSummary:
    return summarize(told(run))


def timeless(run: Written) -> Written:
    """Local time would differ from machine to machine."""
    run.header.pop("time", None)
    return run


def test_screen_of_a_troubled_run() -> None:
    assert render_terminal(summary_of(timeless(troubled_run())), width=80) == SCREEN


def test_calibrations_are_not_counted_as_skipped() -> None:
    summary = summary_of(troubled_run())
    assert (summary.steps, summary.committed, summary.skipped, summary.calibrations) == (
        60,
        54,
        4,
        2,
    )
    assert (summary.first_bad, summary.last_bad, summary.bad_steps, summary.longest_stretch) == (
        48,
        51,
        4,
        4,
    )


def test_step_with_a_scale_and_an_incident_is_no_calibration() -> None:
    run = Written(steps=[step_line(48, NAN, committed=False, scale=2.0)], incidents=[MASKED_ROW])
    assert summary_of(run).calibrations == 0 and summary_of(run).skipped == 1


def test_long_silent_stretch_is_counted_even_without_incidents() -> None:
    run = Written(steps=[step_line(s, NAN, committed=False) for s in range(92261, 92461)])
    summary = summary_of(run)
    assert (summary.first_bad, summary.last_bad, summary.longest_stretch) == (92261, 92460, 200)


def test_incidents_of_one_kind_are_one_group() -> None:
    other = replace(BARE, step=70, decision=Decision(action="note"))
    incidents = [masked_row(3), masked_row(9), other, masked_row(10)]
    groups = summary_of(Written(incidents=incidents)).groups
    assert [(g.verdict, g.first_step, g.last_step, g.count, g.consecutive) for g in groups] == [
        ("nonfinite_loss", 3, 10, 3, 2),
        ("nonfinite_gradient", 70, 70, 1, 1),
    ]
    assert groups[0].incident.reading.lr == (4.92e-4, 1e-4) and groups[0].actions == {"skip": 3}


def test_settings_are_shown_only_where_they_are_not_the_default() -> None:
    header = {
        "config": {
            "clip_norm": 1.0,
            "keep": 3,
            "policy": {"actions": list(Policy().actions)},
        }
    }
    assert summary_of(Written(header=header)).changed_settings == {"clip_norm": 1.0}
    assert summary_of(Written(header={"config": None})).changed_settings == {}


def test_restart_is_counted() -> None:
    lines = [b'{"v":1,"type":"run"}', b'{"v":1,"type":"step","step":0}', b'{"v":1,"type":"run"}']
    story = story_of([*lines, b'{"v":1,"type":"step","step":1}'])
    summary = summarize(story.latest, story)
    assert summary.restarts == 1
    assert "restarts" in render_terminal(summary)


def test_json_is_strict_and_complete() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(as_json(summary_of(troubled_run())), parse_constant=refuse)
    assert value["first_bad"] == 48 and value["groups"][0]["code"] == "SG204"
    assert value["timeline"][0]["step"] == 0 and value["torn"] == 1
    assert value["clip"] == {"steps": 54, "clipped": 4, "mean_factor": 0.25}


def test_markdown_is_the_screen_in_a_fence_that_no_text_ends() -> None:
    page = render_markdown(summary_of(troubled_run()))
    assert page == f"```text\n{render_terminal(summary_of(troubled_run()))}```\n"
    finding = replace(MASKED_ROW.findings[0], title="a ``` b")
    hostile = Written(incidents=[replace(MASKED_ROW, findings=(finding,))])
    page = render_markdown(summary_of(hostile))
    assert "SG204 a ''' b" in page and page.count("```") == 2


def test_empty_journal_is_no_error() -> None:
    summary = summary_of(Written())
    assert "0 seen" in render_terminal(summary) and "none" in render_terminal(summary)
    assert json.loads(as_json(summary))["steps"] == 0


def test_long_chain_is_cut_in_the_middle() -> None:
    incidents: list[Incident] = [masked_row(s) for s in range(0, 200, 2)]
    text = render_terminal(summary_of(Written(incidents=incidents)))
    assert "60 events omitted" in text and "step 0 " in text and "step 198" in text


def _events(
    steps: list[dict[str, Any]],
    incidents: Sequence[Incident] = (),
    notes: Sequence[dict[str, Any]] = (),
) -> tuple[Event, ...]:
    return timeline(told(Written(steps=steps, incidents=list(incidents), notes=list(notes))))


def test_incidents_in_a_row_with_the_same_answer_are_one_event() -> None:
    steps = [step_line(step, 1.0, committed=step not in (5, 6, 7)) for step in range(10)]
    incidents = [masked_row(5), masked_row(6), masked_row(7, "stop")]
    events = [e for e in _events(steps, incidents, []) if e.weight == "incident"]
    assert [event.steps for event in events] == ["steps 5-6", "step 7"]
    assert events[0].text.endswith("skipped 2 times")
    assert "originated in forward" in events[0].text and "originated in" not in events[1].text


def compare(first: Written, second: Written) -> RunComparison:
    return compare_runs(told(first), told(second))


def _ten_steps(bad: int, *, committed: bool) -> list[dict[str, Any]]:
    return [
        {
            "step": n,
            "loss": NAN if n == bad else 2.0 - n / 10,
            "grad_norm": 1.0,
            "committed": n != bad or committed,
        }
        for n in range(10)
    ]


def _log_of_zero() -> Incident:
    return Incident(
        id="5-0",
        step=5,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=Reading(step=5),
        origin=Origin(step=5, phase="forward", module="emb", op="aten.log", source="m.py:3"),
        findings=(Finding(code="SG202", title="log of a non-positive value", certainty="certain"),),
        decision=Decision(action="skip"),
    )


ORIGINAL = Written("runs/original/journal.jsonl", steps=_ten_steps(5, committed=True))
STABLE = Written(
    "runs/stable/journal.jsonl",
    header={"config": {"clip_norm": 0.5}},
    steps=_ten_steps(5, committed=False),
    incidents=[_log_of_zero()],
)


def _row(aspect: str) -> Any:
    return next(row for row in compare(ORIGINAL, STABLE).rows if row.aspect == aspect)


def test_a_bad_step_that_was_committed_is_counted_against_its_run() -> None:
    row = _row("bad steps committed")
    assert (row.first, row.second) == ("1", "0")


def test_what_was_done_and_the_cause_are_named_for_each_run() -> None:
    assert _row("what was done").second == "skipped 1"
    assert "SG202" in _row("first origin and cause").second
    assert _row("first origin and cause").first == "-"


def test_settings_that_differ_are_listed_with_both_values() -> None:
    assert compare(ORIGINAL, STABLE).settings == {"clip_norm": (None, 0.5)}


def test_the_table_carries_both_runs_names_and_every_aspect() -> None:
    comparison = compare(ORIGINAL, STABLE)
    text = render_comparison(comparison)
    assert "original" in text.splitlines()[0]
    assert "stable" in text.splitlines()[0]
    assert all(row.aspect in text for row in comparison.rows)
    assert "default" in text
    assert "0 of 0 committed" in render_comparison(compare(Written("empty"), STABLE))


def test_screen_fits_the_window_the_encoding_and_the_colours() -> None:
    summary = summary_of(troubled_run())
    for width in (60, 80, 110):
        lines = render_terminal(summary, width=width).splitlines()
        # code and commands stay on one line, so that they can be copied
        whole = (" NEXT", "             ", "         stepguard ")
        assert max(len(line) for line in lines if not line.startswith(whole)) <= width
    assert render_terminal(summary, unicode=False).isascii()
    assert "\x1b" not in render_terminal(summary)
    assert "\x1b[" in render_terminal(summary, colour=True)


def test_the_end_of_the_chain_says_how_it_stands() -> None:
    healthy = summary_of(Written(steps=[step_line(s) for s in range(3)])).timeline
    assert (healthy[-1].text, healthy[-1].weight) == ("3 steps committed, no incident", "good")
    assert healthy[0].text == "the run began, loss 1"
    steps = [step_line(0), step_line(1, NAN, committed=False)]
    stopped = summary_of(Written(steps=steps, incidents=[masked_row(1, "stop")])).timeline
    assert stopped[-1].text == "no step was committed after the last incident"
    flat = [step_line(s, grad_norm=0.5) for s in range(48)]
    events = summary_of(Written(steps=flat, incidents=[MASKED_ROW])).timeline
    assert not any("gradient norm" in event.text for event in events)


def test_an_unguarded_loop_has_judged_no_loss_before_the_update() -> None:
    alone = Written("a/journal.jsonl", {"guarded": False}, _ten_steps(5, committed=True))
    guarded = Written("b/journal.jsonl", steps=_ten_steps(5, committed=False))
    rows = {row.aspect: (row.first, row.second) for row in compare(alone, guarded).rows}
    assert rows["losses judged before the update"] == ("0", "10")
