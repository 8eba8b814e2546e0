"""What the guard prints while training runs."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import rich
from rich.progress import Progress

from report.literals import BARE, MASKED_ROW, FakeTerminal, masked_row, note
from stepguard.records import Decision, Policy, Reading, Remedy
from stepguard.report.terminal import Terminal

EXIT = "stepguard-exit: step=52"
FULL = """\
stepguard: step 48, non-finite loss ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
 WHAT    loss is nan (text_loss)
         loss nan, text_loss nan, latent_loss 0.4123, grad norm nan, scale 65536, lr 4.92e-04 /
         1.00e-04
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
    assert out.getvalue() == FULL


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


def test_fault_says_that_training_goes_on_unguarded(out: io.StringIO) -> None:
    Terminal(out).note("fault", {"error": "RuntimeError: boom"})
    expected = (
        "stepguard: ERROR: the guard failed and is disarmed; training goes on unguarded: "
        "RuntimeError: boom\n"
    )
    assert out.getvalue() == expected


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


def test_halt_on_damaged_state_does_not_call_the_weights_good(out: io.StringIO) -> None:
    hurt = replace(
        BARE,
        reading=Reading(step=7, bad_state=("param:emb.weight",)),
        decision=Decision(action="stop"),
    )
    Terminal(out).halted(hurt, EXIT)
    assert (
        "the state in memory is damaged (param:emb.weight): restore a good checkpoint"
        in out.getvalue()
    )
    assert "from before the bad step" not in out.getvalue()


def test_halt_shows_the_panel_where_nobody_showed_it_before(out: io.StringIO) -> None:
    Terminal(out).halted(masked_row(52, "stop"), EXIT)
    assert out.getvalue().count(" WHAT ") == 1


def test_refused_save_is_printed_every_time(out: io.StringIO) -> None:
    terminal = Terminal(out)
    for step in range(5):
        terminal.note("note", note("save-refused", "not saved", step))
    assert out.getvalue().count("not saved") == 5


def test_default_stream_is_the_stderr_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().note("note", note("spike", "x", 1))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "stepguard: step 1: x\n"


@pytest.mark.parametrize("setting", [{}, {"FORCE_COLOR": "1"}, {"CLICOLOR_FORCE": "1"}])
def test_pipe_gets_no_ansi(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str]
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    Terminal(out).incident(MASKED_ROW)
    assert "\x1b" not in out.getvalue()


def test_terminal_gets_colour_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, plain = FakeTerminal(), FakeTerminal()
    Terminal(coloured).incident(MASKED_ROW)
    monkeypatch.setenv("NO_COLOR", "1")
    Terminal(plain).incident(MASKED_ROW)
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b" not in plain.getvalue()


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


def test_command_is_never_broken_over_lines(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run = "/a/very/long/folder name/that/does/not/fit/into/sixty/columns/at/all"
    Terminal(out).incident(replace(MASKED_ROW, run=run))
    assert f"stepguard replay '{run}/incidents/000000048-0/capsule'\n" in out.getvalue()


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


def test_context_without_numbers_is_shown_as_it_is(out: io.StringIO) -> None:
    assert MASKED_ROW.origin is not None
    origin = replace(MASKED_ROW.origin, context=("", "def f(x):", "    return x"), source=None)
    Terminal(out).incident(replace(MASKED_ROW, origin=origin))
    assert "│ def f(x):" in out.getvalue() and "│     return x" in out.getvalue()


def test_no_exclamation_mark_and_no_emoji(out: io.StringIO) -> None:
    Terminal(out).halted(masked_row(52, "stop"), EXIT)
    assert "!" not in out.getvalue()
    assert all(ord(character) < 0x2600 for character in out.getvalue())


def test_bars_of_tqdm_are_cleared_while_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with tqdm's documented `external_write_mode`, so that the test needs no tqdm."""
    events: list[str] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            events.append("write")
            return super().write(text)

    class tqdm:  # noqa: N801 (the name it has over there)
        @classmethod
        @contextlib.contextmanager
        def external_write_mode(cls, file: object = None, nolock: bool = False) -> Iterator[None]:
            assert file is screen
            events.append("clear")
            yield
            events.append("redraw")

    module: Any = ModuleType("tqdm")
    module.tqdm = tqdm
    monkeypatch.setitem(sys.modules, "tqdm", module)
    screen = Screen()
    Terminal(screen).note("note", note("spike", "x", 1))
    assert events == ["clear", "write", "redraw"]


def test_real_tqdm_bar_stays_on_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of its own
    screen = FakeTerminal()
    with tqdm(total=3, file=screen, ncols=40, mininterval=0, miniters=1) as bar:
        bar.update()
        Terminal(screen).note("note", note("spike", "x", 1))
        bar.update()
    line = next(line for line in screen.getvalue().split("\n") if "step 1: x" in line)
    assert "it/s" not in line.rpartition("\r")[2]


def test_line_goes_above_a_live_bar_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    console = rich.console.Console(
        file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"}
    )
    monkeypatch.setattr(rich, "_console", console)
    with Progress(
        console=console, auto_refresh=False, redirect_stderr=False, redirect_stdout=False
    ) as progress:
        progress.add_task("epoch", total=3)
        progress.refresh()
        before = screen.tell()
        Terminal(FakeTerminal()).note("note", note("spike", "x", 1))
        written = screen.getvalue()[before:]
    assert written.index("step 1: x") < written.index("epoch")
