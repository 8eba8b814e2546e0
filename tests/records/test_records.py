"""Settings are checked where they are built; records say in one line what they hold."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepguard import (
    ConfigError,
    GuardConfig,
    Policy,
    Probes,
    Ranks,
    Snapshots,
    TrainingHalted,
)
from stepguard.records import Decision, Finding, Incident, Operand, Origin, Reading, Remedy, Verdict
from stepguard.records.checks import Outcome, Preflight, Problem, Rate, Verification, Watched
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.records.incident import Examination, Section, SectionStatus, new_section, place


@pytest.mark.parametrize(
    ("cls", "setting", "message"),
    [
        (
            Policy,
            {"actions": ("repeat",)},
            "'repeat' is not known; use one of 'leave_out', 'skip', 'retry', 'undo', 'heal', "
            "'rewind', 'stop'",
        ),
        (Policy, {"actions": ()}, "Policy.actions is empty"),
        (
            Policy,
            {"max_consecutive": -1},
            "max_consecutive=-1 must be a whole number of at least 0",
        ),
        (Policy, {"max_total": True}, "max_total=True"),
        (Policy, {"max_rewinds": None}, "max_rewinds=None"),
        (
            Policy,
            {"max_lost_share": 1.5},
            "max_lost_share=1.5 must be a number above 0 and up to 1",
        ),
        (Policy, {"max_lost_share": math.nan}, "max_lost_share=nan"),
        (GuardConfig, {"clip_norm": 0.0}, "clip_norm=0.0 must be a finite number above 0"),
        (GuardConfig, {"clip_norm": math.inf}, "clip_norm=inf"),
        (GuardConfig, {"clip_norm": "1"}, "clip_norm='1'"),
        (GuardConfig, {"loss_scale": -2.0}, "loss_scale=-2.0"),
        (Probes, {"spike_sigmas": math.nan}, "Probes.spike_sigmas=nan"),
        (
            Snapshots,
            {"every": 0},
            "Snapshots.every=0 must be a whole number of at least 1, or 'auto'",
        ),
        (Snapshots, {"every": "often"}, "every='often'"),
        (GuardConfig, {"checkpoint_every": 0}, "checkpoint_every=0"),
        (GuardConfig, {"policy": "skip"}, "policy='skip' is not a stepguard.Policy"),
        (
            GuardConfig,
            {"capsule": "some"},
            "'some' is not known; use one of 'full', 'no-data', 'off'",
        ),
        (GuardConfig, {"terminal": "loud"}, "'loud' is not known"),
        (GuardConfig, {"terminal": None}, "None is not known; use one of 'auto', 'quiet'"),
        (GuardConfig, {"run_dir": 3}, "run_dir=3 must be the path of a folder, or None"),
        (GuardConfig, {"run_dir": " "}, "run_dir=' ' must be the path of a folder, or None"),
        (GuardConfig, {"human_log": True}, "human_log=True must be the path of a folder, or None"),
        (Snapshots, {"count": 1}, "count=1 must be 0 or a whole number of at least 2"),
        (Ranks, {"timeout": 0}, "Ranks.timeout=0 must be a finite number above 0"),
        (
            GuardConfig,
            {"snapshots": 3},
            "snapshots=3 is not a stepguard.Snapshots; give Snapshots(...)",
        ),
        (Probes, {"locate_budget": "6"}, "locate_budget='6' must be a finite number of at least 0"),
        (GuardConfig, {"build": 7}, "build=7 must look like"),
        (
            GuardConfig,
            {"build": "train.py"},
            "build='train.py' must look like 'package.module:function'",
        ),
        (GuardConfig, {"labels_key": 0}, "labels_key=0 must be a name, or None"),
        (GuardConfig, {"sinks": []}, "sinks=[] must be a tuple"),
        (Probes, {"outliers": True}, "True is not known; use one of 'note'"),
        (Policy, {"max_lost_share": "0.5"}, "max_lost_share='0.5' must be a number"),
        (Policy, {"exceptions": "ignore"}, "'ignore' is not known; use one of 'raise', 'skip'"),
    ],
)
def test_wrong_setting_is_refused_with_the_way_out(
    cls: type, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        cls(**setting)
    assert message in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("cls", [Policy, GuardConfig])
def test_settings_are_frozen_and_keyword_only(cls: type) -> None:
    settings = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, dataclasses.fields(settings)[0].name, None)
    with pytest.raises(TypeError):
        cls(None)


def test_default_policy_leaves_out_what_is_bad_and_stops_by_share() -> None:
    assert Policy().actions == ("retry", "leave_out", "skip", "heal", "rewind", "stop")
    assert Policy().max_consecutive is None
    assert Policy().max_lost_share == 0.5


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (
            lambda: GuardConfig(look_every=10),  # type: ignore[call-arg]
            r"look_every is not known. It belongs in GuardConfig\(probes=Probes\(...\)\)",
        ),
        (
            lambda: GuardConfig(rundir="a"),  # type: ignore[call-arg]
            r"rundir is not known. Did you mean run_dir\?",
        ),
        (
            lambda: Policy(clip_norm=1.0),  # type: ignore[call-arg]
            "policy.clip_norm is not known. It belongs in GuardConfig itself",
        ),
    ],
)
def test_setting_that_does_not_exist_says_where_it_belongs(
    make: Callable[[], object], needed: str
) -> None:
    with pytest.raises(ConfigError, match=needed):
        make()


# --- settings from a file


def config(folder: Path, text: str, **given: str) -> GuardConfig:
    (folder / "guard.toml").write_text(text)
    return GuardConfig.from_file(folder / "guard.toml", **given)


def test_fields_of_both_are_taken_from_the_file(tmp_path: Path) -> None:
    text = (
        '[probes]\nanomalies = "act"\n[snapshots]\nprobation = 7\n'
        '[policy]\nactions = ["skip", "stop"]\nmax_lost_share = 0.1\n'
    )
    assert config(tmp_path, text) == GuardConfig(
        probes=Probes(anomalies="act"),
        snapshots=Snapshots(probation=7),
        policy=Policy(actions=("skip", "stop"), max_lost_share=0.1),
    )
    assert config(tmp_path, "") == GuardConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("guard.yaml", "terminal: quiet\npolicy:\n  actions: [skip, stop]\n"),
        ("guard.yml", "{terminal: quiet, policy: {actions: [skip, stop]}}\n"),
        ("guard.json", '{"terminal": "quiet", "policy": {"actions": ["skip", "stop"]}}'),
    ],
)
def test_yaml_and_json_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    wanted = GuardConfig(terminal="quiet", policy=Policy(actions=("skip", "stop")))
    assert GuardConfig.from_file(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("g.yaml", "ranks:\n  timeout: 6e1\n", ("Ranks.timeout='6e1'", "with a point")),
        ("g.yaml", "a: [\n", ("is not valid yaml",)),
        ("g.yaml", "!!python/object/apply:os.getcwd []\n", ("is not valid yaml",)),
        ("g.json", "[1]", ("holds a list",)),
        ("g.json", "{", ("is not valid json",)),
        ("g.ini", "", (".ini is not a configuration file", ".toml, .yaml")),
        ("g.toml", b"\xff\xfe", ("cannot be read as a configuration",)),
        ("g.toml", "a = 1\n" * 200_000, ("1,200,000 bytes",)),
    ],
)
def test_every_kind_of_file_is_told_what_is_wrong(
    tmp_path: Path, name: str, text: str | bytes, words: tuple[str, ...]
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        GuardConfig.from_file(path)
    said = str(caught.value)
    assert "\n" not in said
    assert all(word in said for word in words), said


def test_folders_are_absolute_and_the_command_line_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config(tmp_path, 'run_dir = "a"\n').run_dir == str(tmp_path / "a")
    assert config(tmp_path, 'run_dir = "a"\n', run_dir="/b").run_dir == "/b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("anomalys = 'act'\n", ("anomalys is not known", "mean anomalies, in", "below [probes]?")),
        (
            "[policy]\nmax_totl = 3\n",
            ("policy.max_totl is not known", "Did you mean policy.max_total?"),
        ),
        ("max_total = 3\n", ("max_total is not known", "below [policy]")),
        ("[policy]\nkeep = 3\n", ("policy.keep is not known", "outside of every table")),
        ("zzz = 3\n", ("zzz is not known", "clip_norm, run_dir")),
        ("[probes]\nanomalies = 'no'\n", ("Probes.anomalies", "'no' is not known", "'act'")),
        ("[snapshots]\nprobation = 'many'\n", ("probation='many'", "whole number")),
        ("policy = 'skip'\n", ("must be a table", "[policy]")),
        ("sinks = []\n", ("sinks is a Python object",)),
        ("= 3\n", ("is not valid toml",)),
        ("[policy]\nmax_lost_share = 'x'\n", ("Policy.max_lost_share='x'", "must be a number")),
    ],
)
def test_wrong_file_is_one_clear_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, text)
    said = str(caught.value)
    assert "guard.toml" in said and "\n" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("path", ["nowhere.toml", "folder.toml"])
def test_file_that_is_none_is_told(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read as a configuration"):
        GuardConfig.from_file(path)


# --- incidents


VERDICT = Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan")
FINDING = Finding(code="SG204", title="softmax over a fully masked row")
ORIGIN = Origin(
    step=7, phase="forward", module="attn", op="aten._softmax", source="model.py:88", samples=(3, 5)
)


def _incident(**more: object) -> Incident:
    return Incident(id="i", step=7, verdict=VERDICT, reading=Reading(step=7), **more)  # type: ignore[arg-type]


def test_summary_grows_with_what_is_known() -> None:
    assert _incident().summary == "loss is nan"
    everything = _incident(
        origin=ORIGIN,
        findings=(FINDING,),
        decision=Decision(action="stop", reason="no skip: used up"),
    )
    assert everything.summary == (
        "loss is nan; forward: aten._softmax in attn at model.py:88 sample 3, 5; "
        "SG204 softmax over a fully masked row; stop (no skip: used up)"
    )


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        (Origin(step=0, phase="state", tensor="param:emb.weight"), "state: param:emb.weight"),
        (Origin(step=0, phase="forward", module="fc"), "forward: in fc"),
        (Origin(step=0, phase="loss", source="loss.py:3"), "loss: at loss.py:3"),
        (Origin(step=0, phase="backward"), "backward"),
        (
            Origin(step=0, phase="forward", op="aten.log", module=""),
            "forward: aten.log in the model itself",
        ),
    ],
)
def test_summary_names_the_place_as_far_as_it_is_known(origin: Origin, place: str) -> None:
    assert _incident(origin=origin).summary == f"loss is nan; {place}"


def test_halt_names_step_and_cause_and_carries_the_incident() -> None:
    halt = TrainingHalted(_incident(findings=(FINDING,)))
    assert (
        str(halt) == "training halted at step 7: loss is nan; SG204 softmax over a fully masked row"
    )
    assert halt.incident.findings == (FINDING,)


def test_halt_crosses_a_process_boundary() -> None:
    halt = pickle.loads(pickle.dumps(TrainingHalted(_incident(origin=ORIGIN))))
    assert halt.incident == _incident(origin=ORIGIN)


def test_reading_names_its_bad_micro_batches() -> None:
    reading = Reading(step=0, micro_losses=(1.0, float("nan"), -1e308, float("inf"), float("-inf")))
    assert reading.bad_micro_batches == (1, 3, 4)


def test_rules_can_name_the_operation_rather_than_the_tensor() -> None:
    origin = Origin(step=0, phase="forward", op="aten.log", tensor="param:w", module="fc")
    assert place(origin) == "param:w in fc"
    assert place(origin, "aten.log") == "aten.log in fc"


# --- in a notebook


HOSTILE = "<script>alert(1)</script>"


def shown_incident(text: str) -> Incident:
    operand = Operand(name=text, dtype="float32", shape=(2, 3), min=0.0, max=1.0, nan=1, zeros=2)
    origin = Origin(
        step=3,
        phase="loss",
        op=f"aten.{text}",
        module=text,
        source="cell [3], line 5",
        context=("  4 | x = 1", f"> 5 | {text}"),
        samples=(4,),
        rows=(text,),
        inputs=(operand,),
        remarks=(text,),
    )
    return Incident(
        id="00000003-nonfinite_loss",
        step=3,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary=f"loss is {text}"),
        reading=Reading(step=3),
        origin=origin,
        findings=(
            Finding(
                code="SG201",
                title=text,
                evidence=(text,),
                remedies=(Remedy(title=text, snippet=f"y = safe_{text}"),),
            ),
        ),
        decision=Decision(action="skip", reason=text),
    )


def test_repr_is_one_short_line() -> None:
    found = shown_incident("div")
    assert repr(found.origin) == (
        "<Origin: loss of step 3, aten.div in div at cell [3], line 5 sample 4 (div)>"
    )
    assert repr(found).startswith("<Incident 00000003-nonfinite_loss: loss is div; loss: aten.div")
    assert repr(Origin(step=1, phase="state")) == "<Origin: state of step 1, place not known>"


def test_html_shows_place_line_cause_and_action() -> None:
    shown = shown_incident("div")._repr_html_()
    words = ("Incident at step 3", "cell [3], line 5", "SG201", "skip", "sample", "[2,3]", "0 to 1")
    for word in (*words, "<b>&gt; 5 | div</b>", "to do", "y = safe_div"):
        assert word in shown, word


def test_no_text_of_a_record_becomes_markup() -> None:
    found = shown_incident(HOSTILE)
    assert found.origin is not None
    for shown in (found._repr_html_(), found.origin._repr_html_()):
        assert "<script" not in shown
        assert shown.count("&lt;script&gt;") >= 5


# --- checks


RESULT = Preflight(
    target="train:build",
    outcomes=(
        Outcome(id="lr.config", title="lr", status="warn"),
        Outcome(id="data.finite", title="data", status="fail"),
    ),
)


def test_warning_is_allowed_and_a_failure_is_not() -> None:
    assert not RESULT.ok
    assert Preflight(target="", outcomes=RESULT.outcomes[:1]).ok


def test_outcomes_are_found_by_status_and_by_id() -> None:
    assert [outcome.id for outcome in RESULT.of("fail", "pass")] == ["data.finite"]
    assert RESULT.outcome("lr.config").section == "lr"
    with pytest.raises(KeyError):
        RESULT.outcome("lr.schedule")


BAD = Problem(file="a.pt", kind="nan", tensor="w", detail="1 NaN of 3", role="parameter")
ODD = Problem(file="a.pt", kind="inf", tensor="mask", severity="warning", role="buffer")
OTHER = Problem(file="a.pt", kind="lr", detail="lr is 1")


def test_warnings_leave_a_checkpoint_good() -> None:
    found = Verification(path="a.pt", format="torch zip", problems=(ODD,))
    assert found.ok and not found.corrupt and found.warnings == (ODD,)


def test_other_learning_rate_is_an_error_but_no_corruption() -> None:
    found = Verification(path="a.pt", format="torch zip", problems=(OTHER,))
    assert not found.ok and not found.corrupt


def test_record_survives_json() -> None:
    part = Verification(
        path="a.pt",
        format="torch zip",
        problems=(BAD, ODD),
        rates=(Rate(file="a.pt", name="o/lr", kind="lr", value=0.1),),
        watched=(Watched(name="alpha", role="parameter", count=1, low=0.1, high=0.1),),
        roles={"parameter": 1},
    )
    found = Verification(path=".", format="folder", problems=(BAD, ODD), parts=(part,))
    assert from_jsonable(Verification, to_jsonable(found)) == found
    assert found.corrupt and found.leaves == (part,)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((), "fine"),
        (("fine", "warning"), "warning"),
        (("failed", "warning"), "failed"),
        (("failed", "corrupt", "fine"), "corrupt"),
    ],
)
def test_worst_section_counts(statuses: tuple[SectionStatus, ...], expected: str) -> None:
    sections = [Section(title="made up", status=status) for status in statuses]
    missing = new_section("other", "not checked", "give --config FILE")
    assert Examination(path="run", sections=(*sections, missing)).status == expected
