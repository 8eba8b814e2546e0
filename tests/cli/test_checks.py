"""Commands that check: verify, quarantine, doctor, check and selftest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepguard
from check import saved
from check.asking import HEALTHY, PROJECT, project_in
from cli.journals import invoke, write_run
from house.fresh import run_cli
from stepguard import Guard, GuardConfig, Snapshots, verify
from stepguard.cli import _results
from stepguard.journal import Journal
from stepguard.ledger import Ledger, ledger_path
from stepguard.records.checks import BadSamples
from stepguard.run import selftest


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return saved.save_zip(tmp_path / "bad.pt", {"w.weight": torch.tensor([1.0, float("nan")])})


verify_of = partial(invoke, "verify")


def test_other_learning_rate_is_exit_code_5(good: Path, tmp_path: Path) -> None:
    assert verify_of(good, "--lr", "5e-4").exit_code == 0
    done = verify_of(good, "--lr", "1e-4")
    assert done.exit_code == 5 and "OneCycleLR" in done.stdout
    config = tmp_path / "train.yaml"
    config.write_text("trainer:\n  lr: 1e-4  # peak\n  min_lr: 1e-6\n")
    assert verify_of(good, "--config", config).exit_code == 5
    assert verify_of(good, "--config", config, "--lr", "1").exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 10\n", "names no learning rate"),
        ("lr: 1\nhead:\n  lr: 2\n", "several"),
        ("", "names no"),
    ],
)
def test_configuration_without_one_rate_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    done = verify_of(tmp_path, "--config", tmp_path / "c.yaml")
    assert done.exit_code == 2 and words in done.stderr


@pytest.mark.slow
def test_diverged_run_is_told_alike_by_seals_verify_doctor_and_live(tmp_path: Path) -> None:
    """A warm-up without an end: what was learned is lost in the middle of the run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    run = tmp_path / "run"
    config = GuardConfig(
        run_dir=run, checkpoint_every=10, snapshots=Snapshots(probation=5), terminal="quiet"
    )
    with Guard(model, optimizer, config=config) as guard:
        for step in range(120):
            optimizer.param_groups[0]["lr"] = 0.02 if step < 60 else 30.0
            x = torch.randn(16, 4)
            guard.step(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), x)
    folder = run / "checkpoints"
    pointer = verify_of(folder / "last-good")
    assert pointer.exit_code == 0 and "last-good -> step-" in pointer.stdout
    last_good = verify(folder / "last-good")
    assert last_good.step is not None and last_good.step <= 60
    diverged = [leaf for leaf in verify(run).leaves if leaf.diverged]
    assert diverged and min(leaf.step or 0 for leaf in diverged) >= 60
    # one judgement: nothing in between is left out, and nothing from after it is good
    done = verify_of(diverged[-1].path)
    assert done.exit_code == 5 and "0 good, 1 diverged" in done.stdout
    doctor = invoke("doctor", str(run))
    assert f"resume from {last_good.path}" in " ".join(doctor.stdout.split())
    live = invoke("live", str(run), "--once")
    assert live.exit_code == 1 and "has diverged" in " ".join(live.stdout.split())
    notes = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert sum(note.get("kind") == "diverged" for note in notes) == 1
    assert not any("refused" in note for note in notes)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return saved.save_zip(tmp_path / "good.pt", saved.trained())


def test_bar_appears_on_a_terminal_after_a_while_and_leaves_no_trace(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_results, "PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    (found,) = _results.verified([good])
    shown = capsys.readouterr()
    assert found.ok and "verifying" in shown.err and shown.out == ""
    monkeypatch.setattr(_results, "PATIENCE", 1e9)
    _results.verified([good])
    monkeypatch.setattr(_results, "PATIENCE", -1.0)
    monkeypatch.delenv("FORCE_COLOR")
    _results.verified([good])
    assert capsys.readouterr().err == "", "neither at once nor into a pipe"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved.run_with_bad_ones(tmp_path / "run")


quarantine_of = partial(invoke, "quarantine")


def test_only_bad_ones_move_and_undo_brings_them_back(run: Path) -> None:
    before = saved.snapshot(run)
    done = quarantine_of(run)
    assert done.exit_code == 0, done.output
    after = saved.snapshot(run)
    moved = {name for name in before if name not in after}
    assert moved == {"bad.pt"} | {name for name in before if name.startswith("checkpoint-40/")}
    assert all(after[f"quarantine/{name}"] == before[name] for name in moved)
    assert all(after[name] == before[name] for name in before if name not in moved)
    assert quarantine_of(run, "--undo").exit_code == 0
    assert saved.snapshot(run) == before
    dry = quarantine_of(run, "--dry-run")
    assert dry.exit_code == 4 and "would be moved" in dry.stdout and saved.snapshot(run) == before
    data = json.loads(quarantine_of(run, "--json").stdout)
    assert {move["original"] for move in data["moved"]} == {"bad.pt", "checkpoint-40"}
    assert [Path(path).name for path in data["not_judged"]] == ["too-large.pt"]
    again = quarantine_of(run)
    assert again.exit_code == 0 and "0 moved" in again.stdout and "too-large.pt" in again.stdout
    back = json.loads(quarantine_of(run, "--undo", "--json").stdout)["moved_back"]
    assert {move["original"] for move in back} == {"bad.pt", "checkpoint-40"}


def test_manifest_says_why_and_from_where(run: Path) -> None:
    quarantine_of(run)
    moves = {
        m["original"]: m
        for m in json.loads((run / "quarantine" / "manifest.json").read_text())["moves"]
    }
    assert moves.keys() == {"bad.pt", "checkpoint-40"}
    assert moves["bad.pt"]["reasons"][0].startswith("nan: w")
    assert len(moves["bad.pt"]["digests"]["bad.pt"]) == 32
    assert set(moves["checkpoint-40"]["digests"]) == {
        p.name for p in (run / "checkpoint-20").iterdir()
    }


def test_same_name_twice_is_numbered_and_both_come_back_in_turn(run: Path) -> None:
    quarantine_of(run)
    saved.save_zip(run / "bad.pt", {"w": torch.tensor([float("inf")])})
    quarantine_of(run)
    assert (run / "quarantine" / "bad.pt").exists() and (run / "quarantine" / "bad.pt.2").exists()
    done = quarantine_of(run, "--undo")
    assert done.exit_code == 2 and "exists again" in done.output
    assert (run / "bad.pt").exists() and (run / "quarantine" / "bad.pt.2").exists()


def test_checkpoint_with_others_below_it_moves_without_them(tmp_path: Path) -> None:
    everything = saved.trained()
    saved.save_trainer(tmp_path / "out", everything)
    saved.save_trainer(tmp_path / "out" / "checkpoint-20", everything)
    broken = {**everything["state_dict"], "outer.bias": torch.tensor([float("nan")])}
    saved.save_safetensors(tmp_path / "out" / "model.safetensors", broken)
    assert quarantine_of(tmp_path).exit_code == 0
    assert (tmp_path / "out" / "checkpoint-20" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "quarantine" / "out" / "model.safetensors").exists()


def test_link_to_a_bad_file_outside_is_never_moved(tmp_path: Path) -> None:
    outside = saved.save_zip(tmp_path / "bad.pt", {"w": torch.tensor([float("nan")])})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bad.pt").symlink_to(outside)
    assert quarantine_of(tmp_path / "run").exit_code == 0
    assert outside.exists() and (tmp_path / "run" / "bad.pt").is_symlink()


def test_quarantine_folder_that_is_a_link_out_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / "quarantine").symlink_to(tmp_path / "elsewhere")
    before = {p.name for p in run.iterdir()}
    assert quarantine_of(run).exit_code == 2
    assert {p.name for p in run.iterdir()} == before and not any((tmp_path / "elsewhere").iterdir())


lost = partial(invoke, "quarantine", "--data")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    Journal(folder).close()
    ledger = Ledger(folder)
    shared: dict[str, Any] = {"of": 4, "epoch": 0, "cause": "SG101", "place": "input: batch:x"}
    ledger.append(
        BadSamples(
            step=3, samples=(1,), count=1, indices=(17,), batch=3, left_out="sample", **shared
        )
    )
    ledger.append(BadSamples(step=4, count=4, indices=(4, 5, 6, 7), batch=4, **shared))
    ledger.append(
        BadSamples(step=9, count=4, indices=(8, 9), batch=9, **{**shared, "cause": "SG505"})
    )
    Ledger(folder, 1).append(
        BadSamples(step=3, count=4, innocent=True, indices=(90,), rank=1, **shared)
    )
    return folder


def test_every_loss_of_every_rank_is_a_line(ledger: Path) -> None:
    done = lost(ledger)
    assert done.exit_code == 0, done.output
    assert "17" in done.stdout and "SG505" in done.stdout and "rank 1" in done.stdout
    assert "13 samples lost in 3 steps, of 16 in them" in done.stdout


def test_json_has_entries_totals_and_samples(ledger: Path) -> None:
    told = json.loads(lost(ledger, "--json").stdout)
    assert len(told["entries"]) == 4 and told["totals"]["lost"] == 13
    assert told["samples"][0] == {
        "index": 17,
        "id": None,
        "times": 1,
        "proven": True,
        "causes": ["SG101"],
    }


def test_list_for_a_sampler_has_the_proven_ones(ledger: Path, tmp_path: Path) -> None:
    out = tmp_path / "bad.txt"
    done = lost(ledger, "--out", out)
    assert done.exit_code == 0 and out.read_text() == "17\n"
    assert "wrote 1 to" in done.stderr and "4 more are in bad batches" in done.stderr
    lost(ledger, "--out", out, "--unproven")
    assert out.read_text().split() == ["17", "4", "5", "6", "7"]
    entry = BadSamples(step=1, samples=(0,), ids=("a b.png",), cause="SG202", left_out="sample")
    Ledger(tmp_path / "named").append(entry)
    lost(tmp_path / "named", "--out", out)
    assert out.read_text() == "a b.png\n"
    Journal(tmp_path / "none").close()
    assert lost(tmp_path / "none").stdout == f"no samples were lost in {tmp_path / 'none'}\n"


def test_reading_the_ledger_starts_without_torch(ledger: Path, tmp_path: Path) -> None:
    seen = run_cli(tmp_path, "quarantine", "--data", str(ledger), "--json")
    assert seen.code == 0 and "SG101" in seen.stdout and "torch" not in seen.modules


def test_example_of_the_page_leaves_the_listed_samples_out(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "bad-samples.md"
    example = page.read_text(encoding="utf-8").split("```python\n")[-1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    lost(ledger, "--out", "bad.txt", "--unproven")
    names: dict[str, Any] = {"dataset": list(range(30))}
    exec(example, names)
    seen = {int(row) for batch in names["loader"] for row in batch}
    assert seen == set(range(30)) - {17, 4, 5, 6, 7}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with project_in(tmp_path) as folder:
        yield folder


doctor_of = partial(invoke, "doctor")


@pytest.mark.slow
def test_a_run_is_examined_by_what_its_folder_holds(project: Path) -> None:
    """Journal, capsules and checkpoints, without a word on what was not given."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = stepguard.GuardConfig(
        run_dir="run",
        checkpoint_every=5,
        terminal="quiet",
        snapshots=stepguard.Snapshots(every=1, probation=1),
    )

    def loss_fn(divisor: torch.Tensor) -> torch.Tensor:
        return model(torch.ones(2, 4)).square().mean() / divisor

    with stepguard.Guard(model, optimizer, config=settings) as guard:
        for step in range(20):
            guard.step(loss_fn, torch.tensor(0.0 if step in (7, 12) else 1.0))
    broken = sorted(Path("run/incidents").glob("*/capsule"))[0] / "tensors.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    done = doctor_of("run", "--json")
    assert done.exit_code == 0, done.output
    found = {part["title"]: part for part in json.loads(done.stdout)["sections"]}
    assert list(found) == ["checkpoints", "journal", "capsules", "recommendations"]
    text = "\n".join(found["journal"]["lines"])
    assert "20 steps, 2 incidents" in text and "SG201" in text and "2 times, steps 7 to 12" in text
    assert "SGD, learning rate 0.1" in text and "checkpoint_every=5" in text
    assert (
        found["capsules"]["lines"][0] == "2 bad steps recorded by all runs here; 1 can be replayed"
    )
    assert "cannot be read" in found["capsules"]["lines"][1]
    assert found["capsules"]["commands"][0].startswith("stepguard replay run/incidents/00000012")
    assert found["checkpoints"]["status"] == "fine"
    assert "not checked" not in done.stdout and "alpha" not in done.stdout


def test_poisoned_run_says_what_to_resume_and_what_to_move(project: Path) -> None:
    everything = saved.trained()
    for step in (10, 20, 30):
        saved.save_zip(Path(f"run/step_{step}.pt"), {**everything, "global_step": step})
    poisoned = {**everything["state_dict"], "outer.bias": torch.tensor([float("nan")])}
    saved.save_zip(
        Path("run/step_30.pt"), {**everything, "state_dict": poisoned, "global_step": 30}
    )
    done = doctor_of("run")
    assert done.exit_code == 4
    assert "outer.bias" in done.stdout
    assert "resume from run/step_20.pt (step 20)" in done.stdout
    assert "$ stepguard quarantine run" in done.stdout
    found = json.loads(doctor_of("run", "--json").stdout)
    assert found["status"] == "corrupt"
    assert found["sections"][-1]["commands"] == ["stepguard quarantine run"]


def test_configuration_that_the_checkpoint_overrides_fails(project: Path) -> None:
    saved.save_zip(Path("run/a.pt"), saved.trained())
    Path("config.py").write_text("LEARNING_RATE = 1e-4\nBATCH_SIZE = 32\n")
    done = doctor_of("run", "--config", "config.py")
    assert done.exit_code == 5
    assert "max_lr: the peak of OneCycleLR (max_lr) is 0.0005" in done.stdout
    assert "LEARNING_RATE=0.0001" in done.stdout


def check_of(*words: str) -> tuple[int, str, str]:
    done = invoke("check", *words, COLUMNS="100")
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.slow
def test_healthy_project_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    code, out, _ = check_of(HEALTHY, "--config", "config.json", "--run-dir", str(tmp_path))
    assert code == 0
    assert "configuration is aligned" in out
    assert " ready: 0 failed, 0 warned" in out


@pytest.mark.slow
def test_failed_item_is_exit_code_5_with_evidence_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    code, out, _ = check_of(
        "tinychat.faults:half_weights", "--config", "config.json", "--only", "optimizer.eps"
    )
    assert code == 5
    assert "FAIL optimizer.eps" in out
    assert "eps=1e-08 is 0 in float16" in out and "fix: " in out
    assert "not ready: 1 failed" in out


def test_warning_fails_only_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    words = ("tinychat.faults:silence", "--config", "config.json", "--only", "data.constant")
    assert check_of(*words)[0] == 0
    assert check_of(*words, "--strict")[0] == 5


def test_json_is_one_object_even_if_the_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud_build.py").write_text(
        "import torch\ndef build():\n    print('hello')\n    return torch.nn.Linear(2, 2), None\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = check_of(
        "loud_build:build", "--json", "--watch", "weight=1e-9", "--only", "scalars"
    )
    found = json.loads(out)
    assert (code, found["ok"]) == (5, False)
    (outcome,) = found["outcomes"]
    assert (outcome["id"], outcome["status"]) == ("scalars.limit", "fail")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "'nothing' is neither a file nor a folder here"),
        (("config.json", "--only", "lrr"), "'lrr' is not an item"),
        (("config.json", "--watch", "alpha"), "--watch 'alpha' must look like PATTERN=LIMIT"),
        (("config.json", "--watch", "alpha=-1"), "must look like PATTERN=LIMIT"),
        (("config.json", "--data", "nowhere"), "data nowhere does not exist"),
        (("config.json", "--checkpoint", "no.pt"), "no.pt does not exist"),
    ],
)
def test_wrong_check_is_exit_code_2_in_one_line(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(PROJECT)
    code, _, err = check_of(*words)
    assert code == 2
    assert err.startswith("stepguard: error: ") and said in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_every_promise_holds_on_the_cpu() -> None:
    done = invoke("selftest", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    holds = {check["name"]: check["holds"] for check in told["checks"]}
    assert told["ok"] is True
    assert holds.pop("a stream of its own") is None
    assert holds.pop("synchronisations") is None
    assert set(holds.values()) == {True}


def test_a_broken_promise_fails_and_the_rest_is_still_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(device: torch.device) -> selftest.Row:
        raise RuntimeError("kernel not implemented")

    monkeypatch.setattr(selftest, "CHECKS", {"broken": broken, "vetoed": selftest.vetoed})
    done = invoke("selftest")
    assert done.exit_code == 5
    assert "RuntimeError: kernel not implemented" in " ".join(done.output.split())
    assert "sample 4, SG202" in " ".join(done.output.split())


def test_results_of_verify_by_exit_code_and_as_json(good: Path, bad: Path, tmp_path: Path) -> None:
    done = verify_of(good)
    assert done.exit_code == 0, done.output
    assert "good.pt" in done.stdout and "torch zip" in done.stdout and "1 good" in done.stdout
    done = verify_of(good, bad)
    assert done.exit_code == 4
    for words in ("w.weight", "parameter", "1 NaN of 2", "1 good, 1 corrupt"):
        assert words in done.stdout
    narrow = invoke("verify", str(bad), COLUMNS="60").stdout
    assert "\x1b" not in narrow
    assert all(len(line) <= 60 for line in narrow.splitlines() if str(bad) not in line)
    data = json.loads(verify_of(good.parent, "--json").stdout, parse_constant=pytest.fail)
    (folder,) = data["paths"]
    assert data["ok"] is False and [part["ok"] for part in folder["parts"]] == [False, True]
    assert folder["parts"][0]["problems"][0]["tensor"] == "w.weight"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no checkpoint")
    for path, said in (("nothing", "does not exist"), ("empty", "nothing to verify in")):
        done = verify_of(tmp_path / path)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
    done = verify_of(good, tmp_path / "empty")
    assert done.exit_code == 2 and "1 good" in done.stdout and "nothing to verify in" in done.stderr
    assert verify_of(bad, tmp_path / "empty").exit_code == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quarantine", "--data", "nothing"), "is not a folder"),
        (("quarantine", "--data", "."), "is not a run folder"),
        (("quarantine", "--data", ".", "--undo"), "exclude each other"),
        (("quarantine", "--data", ".", "--unproven"), "give --out FILE"),
        (("quarantine", ".", "--out", "x"), "need --data"),
        (("quarantine", "--data", "newer"), "schema 99"),
        (("quarantine", "--data", "run", "--out", "no/folder.txt"), "cannot be written"),
        (("quarantine", "checkpoint-20"), "folder above"),
        (("doctor", "empty"), "nothing to examine in empty"),
        (("doctor", "run", "--build", "json:loads"), "outside"),
        (("selftest", "--device", "nonsense"), "device 'nonsense' cannot be used here"),
    ],
)
def test_wrong_use_is_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "newer"):
        Path(name).mkdir()
    ledger_path(Path("newer")).write_text('{"v":99}\n')
    write_run(Path("run"))
    saved.save_trainer(Path("checkpoint-20"), saved.trained())
    done = invoke(*words)
    assert done.exit_code == 2 and said in done.stderr


def test_journal_of_a_run_in_trouble_is_read_and_its_report_named(project: Path) -> None:
    write_run(project / "run")
    done = doctor_of("run")
    assert done.exit_code == 0, done.output
    assert "12 steps, 1 incident; it has not ended" in done.stdout
    assert "$ stepguard report run" in done.stdout
    assert "journal  warning" in done.stdout and "not checked: give" not in done.stdout
