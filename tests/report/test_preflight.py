"""The table of a preflight, drawn from a literal."""

from __future__ import annotations

from pathlib import Path

from stepguard.records.checks import Outcome, Preflight
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.report import screen
from stepguard.report.checks import SECTIONS, paint_preflight

RESULT = Preflight(
    target="train:build",
    outcomes=(
        Outcome(
            id="precision.effective",
            title="runs as configured",
            status="pass",
            evidence=("bfloat16",),
        ),
        Outcome(
            id="optimizer.eps",
            title="eps survives",
            status="fail",
            evidence=("eps=1e-8 is 0",),
            fix="eps=1e-4",
        ),
        Outcome(
            id="data.range", title="in range", status="warn", evidence=("x: 1 of 9",), fix="look"
        ),
        Outcome(id="norm.eps", title="norms", status="not_applicable", evidence=("no norm layer",)),
        Outcome(id="lr.config", title="lr", status="not_checked", evidence=("give --config FILE",)),
        Outcome(
            id="config.types", title="types", status="not_checked", evidence=("give --config FILE",)
        ),
    ),
    facts=(("AMP enabled", "no"),),
    alignment="contradicted",
    alignment_why=("fp16 asked for, float32 probed",),
)


def render_preflight(result: Preflight, *, width: int = 100, unicode: bool = True) -> str:
    console = screen.paper(width=width, colour=False)
    paint_preflight(console, result, unicode=unicode)
    return screen.text_on(console)


def test_table_says_what_fails_and_what_to_do() -> None:
    text = render_preflight(RESULT, width=100)
    assert " FAIL optimizer.eps           expected: eps survives\n" in text
    assert "fix: eps=1e-4" in text and "fix: look" in text
    assert " pass precision.effective     bfloat16\n" in text
    assert (
        " not ready: 1 failed (optimizer.eps), 1 warned, 1 passed, 1 not applicable, 2 not "
        "checked\n" in text
    )


def test_what_to_give_is_said_once_for_all_items_that_wait_for_it() -> None:
    text = render_preflight(RESULT, width=100)
    assert " give --config FILE\n    lr.config, config.types\n" in text


def test_alignment_is_claimed_only_when_it_is_so() -> None:
    assert "configuration is NOT aligned" in render_preflight(RESULT)
    assert "configuration is aligned" not in render_preflight(RESULT)


def test_narrow_window_and_plain_stream_get_whole_words() -> None:
    text = render_preflight(RESULT, width=60, unicode=False)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 60


def test_result_survives_strict_json() -> None:
    assert from_jsonable(Preflight, to_jsonable(RESULT)) == RESULT


def test_every_item_has_a_section() -> None:
    from stepguard.check.preflight import TITLES

    parts = {part for names in SECTIONS.values() for part in names}
    assert {name.partition(".")[0] for name in TITLES} <= parts


def test_every_item_is_in_the_docs() -> None:
    from stepguard.check.preflight import TITLES

    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    points = [name for name in TITLES if name.startswith("checklist.")]
    assert len(points) == 10
    assert [name for name in TITLES if name not in points and f"`{name}`" not in page] == []
