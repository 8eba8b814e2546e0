"""The pages refer only to what exists, their commands are taken by the programs (quick ones are
run), and they build as a site, strictly and without a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scripts import check_references, write_reference
from scripts.check_commands import Command, collected, commands, problem
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
from typer.testing import CliRunner

import stepguard
from browser import NO_SITE, started
from report.real_runs import batch, build
from stepguard.cli.app import app

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


EVERY = collected()
RUN_FOR_REAL = ("report", "plot", "compare", "explain", "verify", "quarantine", "doctor")
"""Commands that take a moment on a small run. The others train, wait, or are run by tests/cli."""
MODEL = "from torch import nn\ndef build():\n    return nn.Linear(4, 4)\n"


@cache
def said(words: tuple[str, ...], page: str, whole: bool) -> str:
    return problem(Command(page, 0, words, whole))


def refused(part: str) -> list[str]:
    """Commands of the pages whose first word is this, and what is wrong with them."""
    found = []
    for command in EVERY:
        if command.words[0] == part:
            what = said(command.words, command.page, command.whole)
            if what:
                found.append(f"{command}: {what}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", ["stepguard", "pytest", "make", "pip", "torchrun", "accelerate", "python"]
)
def test_every_command_of_the_pages_is_taken(tool: str) -> None:
    assert [command for command in EVERY if command.words[0] == tool], "no page has such a command"
    assert refused(tool) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("stepguard guess runs/a", "no command guess"),
        ("stepguard report runs/a --colour", "--colour"),
        ("stepguard report", "RUN"),
        ("stepguard live runs/a --steps many", "--steps"),
        ("torchrun --nproc-per-node 2 -m stepguard guess train.py", "no command guess"),
        ("pytest tests/house/test_nothing.py", "does not exist"),
        ("make nothing", "no target nothing"),
        ("pip install '.[nothing]'", "no extra nothing"),
        ("python -m benchmarks.nothing", "no module"),
        ("python -m benchmarks.harmless --nothing", "--nothing"),
        ("python -m benchmarks harmless --nothing", "--nothing"),
        ("python -m benchmarks nothing", "no module"),
        ("python scripts/nothing.py", "does not exist"),
    ],
)
def test_a_command_that_would_be_refused_is_caught(line: str, reason: str) -> None:
    (command,) = commands("docs/page.md", f"```bash\n{line}  # why\n```")
    assert reason in problem(command)


def test_output_of_a_command_and_words_are_no_commands() -> None:
    text = (
        "```\n$ stepguard report a | head\nstepguard report: a\n```\n`make` it, `stepguard: error`"
    )
    (command,) = commands("docs/page.md", text)
    assert command.words == ("stepguard", "report", "a")


def test_a_script_of_a_recipe_has_to_be_there() -> None:
    (command,) = commands("recipes/sft/README.md", "```bash\npython homework/nothing.py a=1\n```")
    assert "nothing.py is neither" in problem(command)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the examples of the pages find what they name: runs, files, a module."""
    folder = tmp_path_factory.mktemp("examples")
    first = folder / "runs" / "a"
    _, guard, loss_fn = build(first)
    for number in range(12):
        guard.step(loss_fn, batch(number, bad=number == 8, rows=slice(2, 3)))
    guard.save()
    guard.close()
    for name in ("runs/b", "runs/demo", "runs/today", "runs/mine", "run"):
        shutil.copytree(first, folder / name)
    for name in ("outputs/mmdit", "outputs/mmdit-stable"):  # the example of a recipe
        shutil.copytree(first, folder / name)
    for name in (
        "model.pt",
        "checkpoint-500/pytorch_model.bin",
        "outputs/mmdit/latest/checkpoint.pt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weight": torch.ones(4, 4)}, folder / name)
    (folder / "train.yaml").write_text("lr: 1.0e-2\n", encoding="utf-8")
    (folder / "project").mkdir()
    (folder / "project" / "model.py").write_text(MODEL, encoding="utf-8")
    with chdir(folder):
        yield folder
    for name in ("project", "project.model"):
        sys.modules.pop(name, None)


def real() -> list[Command]:
    """Commands of fenced blocks that are run, each once."""
    found: dict[tuple[str, ...], Command] = {}
    for command in EVERY:
        words = command.words
        if command.whole and words[0] == "stepguard" and words[1] in RUN_FOR_REAL:
            found.setdefault(words, command)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", real(), ids=str)
def test_an_example_does_what_the_page_says(command: Command, prepared: Path) -> None:
    done = CliRunner().invoke(app, list(command.words[1:]))
    expected = 2 if "nothing" in command.words else 0  # the example of an error
    assert done.exit_code == expected, done.output


ROOT = Path(__file__).parents[2]


def test_configuration_and_options_are_up_to_date() -> None:
    assert write_reference.stale() == [], "python scripts/write_reference.py"


def test_a_changed_option_would_make_the_page_stale() -> None:
    page = write_reference.COMMAND_LINE.read_text(encoding="utf-8")
    assert write_reference.command_line(page.replace("`--once`", "`--twice`")) == page


def test_every_command_is_in_the_table() -> None:
    page = write_reference.command_line("# Command line\n")
    assert "| `stepguard explain [CODE]` |" in page
    assert "`--restore`" in page


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: stepguard\.(\w+)$", page, re.MULTILINE))
    assert named == set(stepguard.__all__) - {"__version__"}


def built(settings: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does. With --quiet mkdocs counts no warning, so never quiet."""
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip(NO_SITE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # a proxy that nobody listens at: a build that asks the network fails
    away = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        [*command, "-f", str(settings), "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, **away, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.documented
def test_a_dead_link_would_fail_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[dead](nothing.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\n", encoding="utf-8")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "nothing.md" in done.stderr


@pytest.mark.documented
def test_site_builds_strictly_with_a_page_for_each_file(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.is_file(), page
    assert (site / "repository" / "CONTRIBUTING.html").is_file()


@pytest.mark.documented
def test_links_between_docs_and_the_repository_lead_to_pages_of_the_site(site: Path) -> None:
    page = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert 'href="repository/CONTRIBUTING.html"' in page
    back = (site / "repository" / "CONTRIBUTING.html").read_text(encoding="utf-8")
    assert 'href="../how-it-works.html"' in back
    recipe = (site / "repository" / "recipes" / "sft" / "index.html").read_text(encoding="utf-8")
    assert 'src="half-adapters.png"' in recipe


@pytest.mark.documented
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:"
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page


@pytest.mark.documented
def test_search_works_in_a_site_that_is_opened_from_disk(site: Path) -> None:
    with started() as browser:
        page = browser.new_page()
        page.goto((site / "tasks" / "loss-is-nan.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("capsule_limit")
        page.wait_for_selector(".md-search-result__item")
        found = page.inner_text(".md-search-result__list")
        assert "Capsules" in found
        assert "Configuration" in found


@pytest.mark.documented
def test_numbered_lists_number(site: Path) -> None:
    """A block of code between two items is part of the first one."""
    for code in ("SG201", "SG204", "SG703"):
        page = (site / "findings" / f"{code}.html").read_text(encoding="utf-8")
        remedies = page.partition('id="what-to-do"')[2].partition("<h2")[0]
        assert remedies.count("<ol>") == 1
        assert remedies.count("<li>") > 1


@pytest.mark.documented
def test_api_page_shows_signatures_and_examples_as_code(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "grad_norm" in text
    members = set(re.findall(r'id="stepguard\.(?:Guard|StepResult|Incident)\.(\w+)"', page))
    assert {"step", "loss", "on_commit", "committed", "findings"} <= members
    # what the package itself calls
    assert not members & {
        "port",
        "in_use",
        "replaced",
        "ended_by",
        "resolve",
        "html_rows",
        "take_over",
    }
    example = re.search(r"<code>[^`]*?result[^`]*?loss_fn", page)
    assert example is not None


@pytest.mark.documented
def test_a_bar_in_the_code_of_a_table_has_no_backslash(site: Path) -> None:
    page = (site / "configuration.html").read_text(encoding="utf-8")
    assert "<code>float | None</code>" in page
    assert "\\|" not in page


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name})" in text, picture.name
