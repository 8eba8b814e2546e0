"""What the guard prints while training runs, in which words, and on streams of every kind."""

from __future__ import annotations

import io
import math
import textwrap
import typing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from rich.progress import Progress
from rich.text import Text
from torch import Tensor, nn
from typer.testing import CliRunner

import stepguard
from check import saved
from cli.journals import write_run
from forked import FULL
from report.literals import BARE, MASKED_ROW, FakeTerminal, masked_row, note
from stepguard import GuardConfig
from stepguard.cli.app import app
from stepguard.records import Decision, Operand, Origin, Policy, Reading, Remedy
from stepguard.records.incident import Action, VerdictKind
from stepguard.report import phrases, screen
from stepguard.report.phrases import budget, effect
from stepguard.report.screen import CUT, fitted, middle
from stepguard.report.terminal import Terminal

EXIT = "stepguard-exit: step=52"
PANEL = """\
stepguard: step 48, non-finite loss ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
 WHAT    loss is nan (text_loss)
         loss nan, text_loss nan, latent_loss 0.4123, grad norm nan, scale 65536, lr 0.000492 /
         0.0001
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
           self    float32 [8,4,16,16]; -inf at [5,0]; 1,024 -Inf of 8,192; finite -3.1 to 4.25
           output  float32 [8,4,16,16]; nan at [5,0]; 1,024 NaN of 8,192; finite 0 to 1
         the replay shows it again
         the compiled graph was run eagerly
 SAMPLE  sample 5
 DONE    skipped: weights, optimizer state and buffers are as before the step
         1 in a row, 1 in this run
 NEXT    stepguard replay runs/demo/incidents/000000048-0/capsule
         stepguard explain SG204
         stepguard report runs/demo
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
"""


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def test_first_incident_of_a_kind_is_a_panel_with_everything_known(out: io.StringIO) -> None:
    Terminal(out, policy=Policy()).incident(MASKED_ROW)
    assert out.getvalue() == PANEL


def test_sections_without_data_are_left_out(out: io.StringIO) -> None:
    Terminal(out).incident(BARE)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1] == " WHAT    gradient is non-finite (head.weight)"


def test_repeats_are_counted_lines_that_become_fewer(out: io.StringIO) -> None:
    terminal = Terminal(out)
    for step in range(100):
        terminal.incident(masked_row(step, in_a_row=step + 1))
    panel, lines = out.getvalue().split("\nstepguard: ", 1)
    assert panel.count(" WHAT ") == 1
    printed = ["stepguard: " + line for line in lines.split("\nstepguard: ")]
    assert [int(line.split()[2]) for line in printed] == [1, 3, 7, 15, 31, 63]
    assert printed[1].startswith(
        "stepguard: step 3 skipped again (4th of this kind, 4 in a row, next shown is the 8th): "
        "loss is nan (text_loss)"
    )
    assert "model.py:88" in printed[1] and printed[1].endswith("sample 5; SG204")


def test_incidents_that_could_not_be_located_are_counted_with_those_that_were(
    out: io.StringIO,
) -> None:
    terminal = Terminal(out)
    for step in range(16):
        located = masked_row(step, in_a_row=step + 1)
        blank = replace(located, origin=None, findings=())
        terminal.incident(located if step % 2 else blank)
    text = out.getvalue()
    assert text.count(" WHAT ") == 2  # the first of all, and the first that was located
    counted = [line for line in text.splitlines() if "of this kind" in line]
    assert [line.partition("(")[2].split()[0] for line in counted] == ["4th", "8th", "16th"]


def test_bad_micro_batch_is_named_once(out: io.StringIO) -> None:
    terminal = Terminal(out)
    reading = Reading(step=1, micro_losses=(math.nan, 0.5))
    first = masked_row(1)
    assert first.origin is not None
    summary = "loss is nan in micro-batch 1 of 2"
    twice = replace(
        first,
        reading=reading,
        origin=replace(first.origin, micro_batch=0),
        verdict=replace(first.verdict, summary=summary),
    )
    terminal.incident(twice)
    terminal.incident(replace(twice, id="again"))
    assert out.getvalue().splitlines()[-1].count("micro-batch 1 of 2") == 1


def test_other_answer_to_the_same_kind_is_no_again_and_says_why(out: io.StringIO) -> None:
    terminal = Terminal(out)
    terminal.incident(masked_row(48))
    terminal.incident(masked_row(49, "rewind", 4, "no skip: 4 incidents in a row, 3 are allowed"))
    last = out.getvalue().splitlines()[-1]
    assert "step 49 rewound (2nd of this kind, 4 in a row)" in last
    assert last.endswith("no skip: 4 incidents in a row, 3 are allowed")


@pytest.mark.parametrize("change", ["module", "op", "source", "code", "verdict"])
def test_other_place_or_cause_is_a_new_kind_with_its_own_panel(
    out: io.StringIO, change: str
) -> None:
    assert MASKED_ROW.origin is not None
    other = {
        "module": replace(MASKED_ROW, origin=replace(MASKED_ROW.origin, module="decoder")),
        "op": replace(MASKED_ROW, origin=replace(MASKED_ROW.origin, op="aten.log")),
        "source": replace(MASKED_ROW, origin=replace(MASKED_ROW.origin, source="model.py:90")),
        "code": replace(MASKED_ROW, findings=MASKED_ROW.findings[1:]),
        "verdict": replace(MASKED_ROW, verdict=replace(MASKED_ROW.verdict, kind="nonfinite_input")),
    }[change]
    terminal = Terminal(out)
    terminal.incident(MASKED_ROW)
    terminal.incident(other)
    assert out.getvalue().count(" WHAT ") == 2


def test_notes_of_a_kind_are_thinned_to_powers_of_two(out: io.StringIO) -> None:
    terminal = Terminal(out)
    for step in range(20):
        terminal.note("note", note("scale_calibration", "gradients overflow", step))
    terminal.note("note", note("no_labels", "no target counts", 20))
    lines = out.getvalue().splitlines()
    assert [int(line.split()[2].rstrip(":")) for line in lines] == [0, 1, 3, 7, 15, 20]
    assert lines[0] == "stepguard: step 0: gradients overflow"
    assert (
        lines[2]
        == "stepguard: step 3: gradients overflow (4th of this kind, next shown is the 8th)"
    )


def test_rise_that_goes_on_is_one_line(out: io.StringIO) -> None:
    terminal = Terminal(out)
    for step in (*range(40, 60), *range(90, 95)):
        terminal.note("note", note("drift", "loss has risen", step))
    steps = [int(line.split()[2].rstrip(":")) for line in out.getvalue().splitlines()]
    assert steps == [40, 90]


def test_spike_within_the_known_tail_is_no_news(out: io.StringIO) -> None:
    terminal = Terminal(out)
    for step, size in enumerate((10.0, 12.0, 9.0, 30.0, 25.0, 31.0)):
        fields = note("spike", "loss is high", step)
        terminal.note("note", {**fields, "evidence": {"deviations": size}})
    explained = {"deviations": 8.0, "outlier": "row 300 reaches 2e6"}
    terminal.note("note", {**note("spike", "loss is high", 6), "evidence": explained})
    terminal.note("note", {**note("spike", "loss is high", 7), "evidence": explained})
    steps = [int(line.split()[2].rstrip(":")) for line in out.getvalue().splitlines()]
    assert steps == [0, 3, 7]


def test_halt_says_why_and_where_the_weights_are(out: io.StringIO) -> None:
    terminal = Terminal(out)
    stopped = masked_row(52, "stop", 4, "no rewind: 3 rewinds used")
    terminal.incident(stopped)
    out.truncate(out.seek(0))
    terminal.halted(stopped, EXIT)
    assert out.getvalue().splitlines() == [
        "stepguard: Stopping training to prevent corruption at step 52: no rewind: 3 rewinds used; "
        "weights are those from before the bad step; next: stepguard report runs/demo",
    ]


def test_default_stream_is_the_stderr_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().note("note", note("spike", "x", 1))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "stepguard: step 1: x\n"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_panel_keeps_within_the_window(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    Terminal(out).incident(MASKED_ROW)
    # commands are the one exception: they stay whole, so that they can be copied
    lines = [line for line in out.getvalue().splitlines() if "stepguard replay" not in line]
    assert max(map(len, lines)) <= min(width, 110)
    assert "> 88 │ weights" in out.getvalue()
    assert "aten._softmax" in out.getvalue(), "no name is broken"


def test_line_of_a_snippet_is_never_broken_or_cut(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    snippet = (
        "low = torch.minimum(box[:, :2], box[:, 2:])  # a line that does not fit into sixty "
        "columns\n\nhigh = low"
    )
    finding = replace(
        MASKED_ROW.findings[0], remedies=(Remedy(title="Order the corners", snippet=snippet),)
    )
    Terminal(out).incident(replace(MASKED_ROW, findings=(finding,)))
    assert textwrap.indent(snippet, " " * 13) + "\n WHERE" in out.getvalue()


def test_stream_that_knows_ascii_only_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    assert MASKED_ROW.origin is not None
    origin = replace(MASKED_ROW.origin, context=("88 | weights = scores.softmax(-1)  # größe",))
    Terminal(stream).incident(replace(MASKED_ROW, origin=origin))
    text = raw.getvalue().decode("ascii")
    assert "> 88 | weights" in text and "-----" in text


def test_context_without_numbers_is_shown_as_it_is(out: io.StringIO) -> None:
    assert MASKED_ROW.origin is not None
    origin = replace(MASKED_ROW.origin, context=("", "def f(x):", "    return x"), source=None)
    Terminal(out).incident(replace(MASKED_ROW, origin=origin))
    assert "│ def f(x):" in out.getvalue() and "│     return x" in out.getvalue()


def test_text_of_the_user_is_no_markup(out: io.StringIO) -> None:
    remedy = Remedy(title="[red]see[/red] :warning: x[0]", snippet="x = y[/b]")
    finding = replace(MASKED_ROW.findings[0], title="[bold]t[/]", remedies=(remedy,))
    Terminal(out).incident(replace(MASKED_ROW, findings=(finding,)))
    for literal in ("[red]see[/red] :warning: x[0]", "x = y[/b]", "[bold]t[/]"):
        assert literal in out.getvalue()


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_stream_that_is_gone_never_ends_the_run(error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    Terminal(Gone()).incident(MASKED_ROW)
    closed = io.StringIO()
    closed.close()
    Terminal(closed).incident(MASKED_ROW)


def test_real_tqdm_bar_stays_on_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of its own
    window = FakeTerminal()
    with tqdm(total=3, file=window, ncols=40, mininterval=0, miniters=1) as bar:
        bar.update()
        Terminal(window).note("note", note("spike", "x", 1))
        bar.update()
    line = next(line for line in window.getvalue().split("\n") if "step 1: x" in line)
    assert "it/s" not in line.rpartition("\r")[2]


def test_line_goes_above_a_live_bar_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    window = FakeTerminal()
    console = rich.console.Console(
        file=window, force_terminal=True, width=80, _environ={"TERM": "xterm"}
    )
    monkeypatch.setattr(rich, "_console", console)
    with Progress(
        console=console, auto_refresh=False, redirect_stderr=False, redirect_stdout=False
    ) as progress:
        progress.add_task("epoch", total=3)
        progress.refresh()
        before = window.tell()
        Terminal(FakeTerminal()).note("note", note("spike", "x", 1))
        written = window.getvalue()[before:]
    assert written.index("step 1: x") < written.index("epoch")


class CalledByAnotherName(nn.Linear):
    """A model whose loop does not call `forward`, so the guard sees no call it could replay."""

    def score(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_step_that_cannot_be_replayed_says_so_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = CalledByAnotherName(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig()) as guard:
        (model.score(torch.ones(2, 4)).sum() * math.nan).backward()
        optimizer.step()
    assert len(guard.incidents) == 1
    shown = capsys.readouterr()
    panel = shown.out + shown.err
    assert "no-replay=" not in panel
    assert "the step could not be replayed" in " ".join(panel.split())


@pytest.mark.parametrize("way", ["watched", "handed over", "step"])
def test_first_incident_outside_the_model_says_how_it_can_be_located(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = stepguard.Guard if way == "step" else stepguard.watch

    def loss_fn(x: Tensor) -> Tensor:
        return torch.log(model(x).exp() - 1e9).mean()

    with made(model, optimizer, config=GuardConfig()) as guard:
        x = torch.ones(2, 4)
        if way == "step":
            guard.step(loss_fn, x)
        else:
            loss = guard.loss(loss_fn, x) if way == "handed over" else loss_fn(x)
            loss.backward()
            optimizer.step()
    panel = " ".join(capsys.readouterr().err.split())
    assert "FIX" in panel
    assert ("guard.loss(loss_fn, batch)" in panel) == (way == "watched")


WIDTHS = [40, 60, 80, 120]
TENSOR = "transformer.encoder.layers.0.self_attention.query_key_value.weight"


@pytest.mark.parametrize("width", [3, 4, 10, 23, 24, 31, 32, 39])
def test_middle_fits_and_keeps_both_ends(width: int) -> None:
    short = middle("/a/long/way/to/model.safetensors", width)
    assert len(short) <= width and short.count(CUT) == (width < 32)
    assert short.endswith("/model.safetensors" if width >= 24 else "s")


@pytest.mark.parametrize("width", [10, 25, 44])
def test_long_word_is_shortened_and_the_others_stay(width: int) -> None:
    text = Text.assemble("see ", (TENSOR, "bold"), " and the rest")
    short = fitted(text, width)
    assert short.plain.startswith("see ") and short.plain.endswith(" and the rest")
    assert max(map(len, short.plain.split())) == width
    assert any(span.style == "bold" for span in short.spans)


def shown(command: str, path: Path, width: int) -> str:
    return CliRunner().invoke(app, [command, str(path)], env={"COLUMNS": str(width)}).stdout


def cells(text: str) -> list[str]:
    """Lines that are neither a whole path nor a command to be copied."""
    return [
        line for line in text.splitlines() if not line.lstrip().startswith(("/", "$ ", "next "))
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["doctor", "report"])
def test_title_keeps_the_end_of_a_long_path(tmp_path: Path, width: int, command: str) -> None:
    run = write_run(tmp_path / ("long" * 30) / "run7")
    saved.save_zip(run / "good.pt", {"w": torch.ones(3)})
    text = shown(command, run, width)
    title = text.splitlines()[0]
    assert f"stepguard {command}:" in title and len(title) <= width
    assert ("run7" if command == "doctor" else ".jsonl") in title
    assert all(len(line) <= width for line in cells(text))


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_tells_runs_of_one_name_apart(tmp_path: Path, width: int) -> None:
    first, second = write_run(tmp_path / "aaa" / "run"), write_run(tmp_path / "bbb" / "run")
    done = CliRunner().invoke(
        app, ["compare", str(first), str(second)], env={"COLUMNS": str(width)}
    )
    heading = done.stdout.splitlines()[0]
    assert "a/run" in heading and "b/run" in heading
    assert all(len(line) <= width for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("decision", "bad_state", "words"),
    [
        (Decision(action="skip"), (), "weights, optimizer state and buffers are as before"),
        (Decision(action="skip", not_restored="m.count moved"), (), "vetoed, but m.count moved"),
        (Decision(action="rewind", rewound_to=40, data="skip"), (), "as it was after 40 steps; "),
        (Decision(action="stop", rewound_to=1), ("param:w",), "those after 1 step, the newest"),
        (Decision(action="stop"), ("param:w",), "damaged (param:w): restore a good checkpoint"),
        (None, (), ""),
    ],
)
def test_effect_says_what_is_in_memory_now(
    decision: Decision | None, bad_state: tuple[str, ...], words: str
) -> None:
    incident = replace(BARE, decision=decision, reading=Reading(step=7, bad_state=bad_state))
    assert words in effect(incident)
    assert bool(effect(incident)) == (decision is not None)


def test_budget_names_its_limits_where_the_policy_has_any() -> None:
    decision = Decision(action="skip", consecutive=2, total=5)
    assert budget(decision) == "2 in a row, 5 in this run"
    limited = Policy(max_consecutive=3, max_total=9)
    assert budget(decision, limited) == "2 of 3 in a row, 5 of 9 in this run"


def test_refused_save_and_fault_are_printed_every_time_and_nothing_shouts(
    out: io.StringIO,
) -> None:
    terminal = Terminal(out)
    for step in range(5):
        terminal.note("note", note("save-refused", "not saved", step))
    assert out.getvalue().count("not saved") == 5
    terminal.note("fault", {"error": "RuntimeError: boom"})
    assert out.getvalue().endswith(
        "stepguard: ERROR: the guard failed and is disarmed; training continues unguarded: "
        "RuntimeError: boom\n"
    )
    terminal.halted(masked_row(52, "stop"), EXIT)
    assert out.getvalue().count(" WHAT ") == 1, "the panel that nobody showed before"
    assert "!" not in out.getvalue()
    assert all(ord(character) < 0x2600 for character in out.getvalue())


def test_halt_on_damaged_state_does_not_call_the_weights_good(out: io.StringIO) -> None:
    reading = Reading(step=7, bad_state=("param:emb.weight",))
    Terminal(out).halted(replace(BARE, reading=reading, decision=Decision(action="stop")), EXIT)
    damaged = "the state in memory is damaged (param:emb.weight): restore a good checkpoint"
    assert damaged in out.getvalue() and "from before the bad step" not in out.getvalue()


@pytest.mark.parametrize("setting", ["", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR"])
def test_only_a_terminal_that_wants_it_gets_colour(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv(setting or "SOME_VARIABLE", "1")
    tty = FakeTerminal()
    for stream in (out, tty):
        Terminal(stream).incident(MASKED_ROW)
    assert "\x1b" not in out.getvalue()
    assert ("\x1b[" in tty.getvalue()) == (setting != "NO_COLOR")


def test_command_is_never_broken_over_lines(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run = "/a/very/long/folder name/that/does/not/fit/into/sixty/columns/at/all"
    Terminal(out).incident(replace(MASKED_ROW, run=run))
    assert f"stepguard replay '{run}/incidents/000000048-0/capsule'\n" in out.getvalue()


def test_streams_of_every_kind_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert screen.columns(io.StringIO()) == screen.PIPE_WIDTH
    for given, used in (("10", screen.NARROWEST), ("77", 77), ("999", screen.WIDEST)):
        monkeypatch.setenv("COLUMNS", given)
        assert screen.columns(io.StringIO()) == used
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    screen.put("a…b é\n", stream)
    assert raw.getvalue() == b"a~b ?\n"
    closed = io.StringIO()
    closed.close()
    assert not screen.is_tty(closed)
    screen.put("x", closed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "length"),
    list(product([40, 60, 80, 120], [1, 2, 3, 30, 90]))[:: 1 if FULL else 4],
)
def test_verify_shows_every_file_name_on_one_line(tmp_path: Path, width: int, length: int) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    saved.save_zip(folder / "good.pt", {"w": torch.ones(3)})
    saved.save_zip(folder / "bad.pt", {TENSOR: torch.tensor([1.0, float("nan")])})
    for path in (folder, folder / "good.pt"):
        text = shown("verify", path, width)
        assert "good.pt" in text and "good" in text
        assert all(len(line) <= width for line in cells(text))


# --- Words.


def test_no_action_and_no_verdict_is_without_words() -> None:
    assert set(phrases.ACTION_WORDS) == set(typing.get_args(Action))
    for words in phrases.ACTION_WORDS.values():
        assert words.done and words.effect and words.log
    assert set(phrases.VERDICT_TITLES) == set(typing.get_args(VerdictKind)) - {"ok"}


def _culprits(**fields: Any) -> str:
    return phrases.culprits(Origin(step=0, phase="input", **fields))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([phrases.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 111)],
         ["1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "111th"]),
        ([phrases.number(n) for n in (None, 65536.0, 0.41234567, math.nan, -math.inf, 1e30)],
         ["-", "65536", "0.4123", "nan", "-inf", "1e+30"]),
        ([phrases.size(n) for n in (12, 1200, 3_400_000, 2.1e9, 5e12)],
         ["12 B", "1.2 kB", "3.4 MB", "2.1 GB", "5 TB"]),
        ([phrases.rates(rates) for rates in ((1e-4, 1e-4), (1e-4, 2e-4), ())],
         ["0.0001", "0.0001 / 0.0002", ""]),
        ([phrases.sparkline(values) for values in ([1.0, 10.0, 100.0, math.nan], [2.0, 2.0], [])],
         ["▁▅█!", "▁▁", ""]),
        ([one.words for one in (
            Operand(name="other", dtype="float32", value=0.0, min=0.0, max=0.0),
            Operand(dtype="float32", nan=1, index=(), value=math.nan),
            Operand(dtype="float16", shape=(2, 3), nan=1, posinf=2, neginf=3, zeros=1,
                    min=-1.0, max=2.0),
        )],
         ["float32; 0", "float32; nan; 1 NaN",
          "float16 [2,3]; 1 NaN, 2 +Inf, 3 -Inf of 6; 1 zero; finite -1 to 2"]),
        ([_culprits(samples=tuple(range(20)), micro_batch=1, rank=3),
          _culprits(samples=(3, 5), rows=("row 17", "row 48211")),
          _culprits(samples=(3, 5), rows=("id a.png", "id b.png"))],
         ["samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more, micro-batch 2, rank 3",
          "samples 3, 5 = row 17, row 48211 of the data set",
          "samples 3, 5 = id a.png, id b.png"]),
        ([phrases.done(Decision(action="leave_out", left_out="sample 5")),
          phrases.done(Decision(action="leave_out")),
          phrases.done_times({"skip": 3, "rewind": 1})],
         ["continued without sample 5", "continued without the bad part", "skipped 3, rewound 1"]),
    ],
)  # fmt: skip
def test_numbers_and_tensors_in_words(said: list[str], expected: list[str]) -> None:
    assert said == expected


def test_long_id_of_a_sample_keeps_both_ends() -> None:
    said = _culprits(samples=(3,), rows=("id s3://" + "x" * 90 + "/0042.png",))
    assert len(said) < 60 and said.startswith("sample 3 = id s3://") and said.endswith("/0042.png")
