"""The reference pages refer only to what exists, and name each requirement once."""

from __future__ import annotations

import pytest
from scripts import check_references
from scripts.check_references import (
    References,
    dead,
    rows,
    spans,
    without_test,
    wrong_followers,
    wrong_links,
    wrong_rows,
)

KNOWN = References()
FILE = "`tests/house/test_references.py`"


def table(*lines: str) -> str:
    return "\n".join(["| R | asked for | state | where |", "|---|---|---|---|", *lines])


def test_everything_the_pages_refer_to_exists() -> None:
    assert check_references.problems() == []


@pytest.mark.parametrize(
    "reference",
    [
        "tests/house/test_references.py",
        "tests/house/test_references.py::test_a_live_reference_is_let_through",
        "tests/house",
        "recipes/radiodiff/configs/radio_train_m.yaml::trainer.grad_clip",
        "recipes/restran_mhc/configs/config.py::Config.MHC_N",
        "stepguard live RUN --steps 1000 --stage '0-500: loss<5'",
        "stepguard explain SG204",
        "make verify-recipes",
        "python -m recipes.verify radiodiff --short",
        "python diagnose_nan.py",
        "accelerate launch train_cond_ldm.py --cfg configs/radio_train_m.yaml",
        "SG204",
        "stepguard.numerics.sinkhorn",
        "stepguard.Guard.on_commit",
        "stepguard.integrations.transformers.GradientMonitoringCallback.on_log",
        "Policy.max_rewinds",
        "precision.effective",
    ],
)
def test_a_live_reference_is_let_through(reference: str) -> None:
    assert KNOWN.problem(reference) == ""


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("tests/house/test_nothing.py", "does not exist"),
        ("tests/house/test_references.py::test_nothing", "defines no test_nothing"),
        ("recipes/radiodiff/configs/radio_train_m.yaml::trainer.nothing", "no key trainer.nothing"),
        ("recipes/restran_mhc/configs/config.py::Config.NOTHING", "defines no Config.NOTHING"),
        ("stepguard guess RUN", "no command guess"),
        ("stepguard live RUN --forever", "no option --forever"),
        ("stepguard explain SG999", "SG999 is not a cause code"),
        ("make nothing", "no target nothing"),
        ("python -m recipes.nothing", "no module recipes.nothing"),
        ("python nothing.py", "nothing.py is neither"),
        ("bash nothing.sh", "nothing.sh is neither"),
        (
            "torchrun --nnodes=1 --nproc_per_node=2 nothing.py --config-name a",
            "nothing.py is neither",
        ),
        ("SG999", "not a cause code"),
        ("stepguard.numerics.nothing", "there is no stepguard.numerics.nothing"),
        ("stepguard.Guard.nothing", "there is no stepguard.Guard.nothing"),
        ("Policy.nothing", "there is no Policy.nothing"),
        ("precision.nothing", "no item precision.nothing"),
    ],
)
def test_a_dead_reference_would_be_caught(reference: str, said: str) -> None:
    (found,) = dead("docs/page.md", f"first line\nsecond: `{reference}`", KNOWN)
    assert found.startswith("docs/page.md:2: ")
    assert said in found


@pytest.mark.parametrize(
    "text", ["nan_to_num", "loss.clamp(max=100)", "ERROR: Invalid loss", "Ep 15/80: 45%", "1e-8"]
)
def test_other_code_is_text(text: str) -> None:
    assert KNOWN.problem(text) is None


def test_fenced_blocks_are_not_references() -> None:
    assert list(spans("`a`\n```\n`b`\n```\n`c`")) == [(1, "a"), (5, "c")]


def test_a_range_stands_for_each_of_its_numbers() -> None:
    (row,) = rows(table(f"| R3-R5 | three things | done | {FILE} |"))
    assert (row.numbers, row.state, row.where) == ((3, 4, 5), "done", FILE)


def test_a_missing_a_repeated_and_an_unknown_requirement_would_be_caught() -> None:
    found = wrong_rows(
        table(
            f"| R1-R263 | most | done | {FILE} |",
            f"| R7 | again | done | {FILE} |",
            "| R265 | more | open | - |",
        ),
        KNOWN,
    )
    assert [line.partition(": ")[2] for line in found] == [
        "R7: R7 is there twice",
        "R264 missing",
        "R265 unknown",
    ]


@pytest.mark.parametrize(
    "row", ["| R1 | one | maybe | it is |", "| R1 | one |", "| R1 | one | done | somewhere |"]
)
def test_a_row_that_says_too_little_would_be_caught(row: str) -> None:
    found = wrong_rows(table(row, f"| R2-R264 | rest | done | {FILE} |"), KNOWN)
    assert len(found) == 1
    assert "R1: " in found[0]


def test_an_entry_without_a_test_would_be_caught() -> None:
    page = "# Page\n\n## First\n\n`tests/a.py::test_b`\n\n## Second\n\n`tests/a.py`\n"
    assert without_test(page) == ["docs/why-not.md: 'Second' names no test"]


def test_a_row_that_follows_an_open_or_missing_one_would_be_caught() -> None:
    page = table(
        "| R1 | one | open | - |", "| R2 | two | done | as R1 |", "| R3 | three | done | as R9 |"
    )
    said = [line.partition("as ")[2] for line in wrong_followers(page)]
    assert said == ["R1 leads to a row that is open", "R9 leads to a row that is missing"]
    assert (
        wrong_followers(table(f"| R1 | one | done | {FILE} |", "| R2 | two | done | as R1 |")) == []
    )


def test_a_link_that_leads_nowhere_would_be_caught() -> None:
    assert dead("docs/page.md", "[a](why-not.md), [b](why-not.md#c), [d](https://x.y)", KNOWN) == []
    assert dead("docs/page.md", "[a](nothing.md)", KNOWN) == [
        "docs/page.md:1: the link nothing.md leads nowhere"
    ]


def _pages() -> list[str]:
    folder = check_references.ROOT
    found = [*folder.glob("*.md"), *(folder / "docs").rglob("*.md"), *folder.glob("recipes/*/*.md")]
    return sorted(str(path.relative_to(folder)) for path in found)


def test_every_link_of_every_page_leads_somewhere() -> None:
    texts = {page: (KNOWN.root / page).read_text(encoding="utf-8") for page in _pages()}
    assert len(texts) > 30
    wrong = {page: wrong_links(page, text, KNOWN.root) for page, text in texts.items()}
    assert {page: links for page, links in wrong.items() if links} == {}
