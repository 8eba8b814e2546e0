"""The joint diffusion in runs: loops, resuming, data, and the commands as users type them."""

from __future__ import annotations

import json
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe_latent_dlm import TINY, places, quiet, same, settings
from recipe_process import RECIPES, run
from stepguard import Policy
from stepguard.report.story import read_story
from stepguard.report.summary import compare

# --- loops
# --------------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit_stable import build_loop, start

    given = (*places(tmp_path), "training.check=false", "model.dropout=0.1")
    whole = start(settings(*given))
    first = build_loop(settings(*given), Ranks())
    batches = first.batches()
    for _ in range(3):
        first.one_step([next(batches), next(batches)])
    assert first.guard.save() is not None
    first.close()
    resumed = start(settings(*given, "training.resume=last_good"))

    assert resumed.folder == first.folder != whole.folder
    assert len(resumed.history.losses) == 3
    by_step = build_loop(settings(*given, "training.resume=3"), Ranks())
    assert by_step.resume("3").startswith("going on after 3 steps")
    by_step.close()
    assert same(whole.session.trainer, resumed.session.trainer)


def test_the_original_resumes_too_and_takes_the_configured_learning_rate(
    folder: Path, tmp_path: Path
) -> None:
    from latentDLM_mmdit.train_mmdit import start

    whole = start(settings(*places(tmp_path), name="mmdit"))
    first = start(
        settings(*places(tmp_path), "training.num_train_steps=3", "optimizer.lr=1.0", name="mmdit")
    )
    more = ("training.resume=latest", "training.num_train_steps=6")
    resumed = start(settings(*places(tmp_path), *more, name="mmdit"))

    assert resumed.folder == first.folder
    assert resumed.step == 6
    assert resumed.session.rate == whole.session.rate


def test_the_original_warns_zeroes_and_updates_all_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit import build_loop

    loop = build_loop(settings(*places(tmp_path), name="mmdit"), Ranks())
    batches = loop.batches()
    loop.one_step([next(batches)])
    loop.session.pairs.latents.fill_(float("nan"))
    before = [p.clone() for p in loop.session.trainer.parameters()]
    done = loop.one_step([next(batches)])
    loop.close()

    assert "Warning: NaN gradient detected at step 1" in capsys.readouterr().out
    assert done.committed  # zeroed gradients are still a step: momentum and decay move the weights
    now = list(loop.session.trainer.parameters())
    assert not any(bool(torch.isnan(p).any()) for p in now)
    assert any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_a_poisoned_checkpoint_is_not_resumed_from_nor_written(
    folder: Path, tmp_path: Path
) -> None:
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit import start
    from latentDLM_mmdit.train_mmdit_stable import build_loop

    original = start(settings(*places(tmp_path), name="mmdit"))
    with torch.no_grad():
        original.session.trainer.model.text_head.bias[0] = float("nan")
    original.save()
    stable = build_loop(settings(*places(tmp_path), "training.check=false"), Ranks())
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is not resumed from: .*text_head\.bias"):
        stable.resume(str(original.folder / "latest" / "checkpoint.pt"))
    with torch.no_grad():
        stable.session.trainer.model.text_head.bias[0] = float("nan")

    assert stable.save().startswith("NOT saved")
    stable.close()


def test_the_reports_loop_advances_also_when_every_batch_is_bad(folder: Path) -> None:
    loop = quiet("training.loop=report", "data.max_samples=64")
    loop.session.pairs.latents.fill_(float("nan"))
    history = loop.train(bar=False)

    assert history.refused == len(history.losses) == loop.step == 6


def test_the_reports_loop_is_refused_on_several_processes(folder: Path) -> None:
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.report_loop import ReportLoop

    session = quiet().session
    session.ranks = Ranks(0, 2)
    with pytest.raises(SystemExit, match="mix gradients of different steps"):
        ReportLoop(session, None)


def test_logs_of_both_versions_can_be_read_plotted_and_compared(
    folder: Path, tmp_path: Path
) -> None:
    from latentDLM_mmdit import train_mmdit, train_mmdit_stable

    bad = ("model.schedule_dtype=model", "training.train_batch_size=64", "training.seed=4")
    original = train_mmdit.start(settings(*places(tmp_path), *bad, name="mmdit"))
    stable = train_mmdit_stable.start(settings(*places(tmp_path), *bad))
    lines = [
        json.loads(line)
        for line in (tmp_path / "logs" / "training_log.jsonl").read_text().splitlines()
    ]
    log = (tmp_path / "logs" / "latest.log").read_text()
    runs = [read_story(folder).latest for folder in (original.folder, stable.folder)]
    rows = {row.aspect: row for row in compare(*runs).rows}
    steps = [
        json.loads(line) for line in (stable.folder / "metrics.jsonl").read_text().splitlines()
    ]
    facts = json.loads((stable.folder / "run.json").read_text())

    assert len(lines) == 12
    assert all("loss" in line for line in lines)
    assert "ERROR: Invalid loss at step " in log
    assert "  text_loss: nan" in log
    assert rows["losses judged before the update"].first == "0"
    assert rows["bad steps committed"].first != "0"
    assert rows["bad steps committed"].second == "0"
    assert {
        "text_accuracy",
        "latent_norm",
        "predicted_norm",
        "weight_max",
        "t_max",
        "clip_factor",
    } <= set(next(line for line in steps if "loss" in line))  # the first one is an evaluation
    assert any("update_ratio" in line for line in steps)
    assert facts["seed"] == 4
    assert facts["versions"]["torch"] == torch.__version__


def test_an_incident_says_the_rate_and_the_place_in_the_schedule_of_its_own_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = quiet("training.num_train_steps=40")  # a warm-up of 4 steps
    told: list[str] = []
    monkeypatch.setattr(loop.guard.port, "say", lambda key, text: told.append(text))
    take, batches = loop.session.loss, loop.batches()
    loop.session.loss = lambda batch: {
        name: value * float("nan" if loop.step in (2, 6) else 1.0)
        for name, value in take(batch).items()
    }
    for _ in range(8):
        loop.one_step([next(batches), next(batches)])
    loop.close()
    rate = loop.session.rate_factor

    # the schedule does not move with a step that is skipped: the seventh step has place 5
    assert told == [
        f"learning rate {5e-5 * rate(2):.2e}, LambdaLR step 2 of 40, inside the warm-up of 4",
        f"learning rate {5e-5 * rate(5):.2e}, LambdaLR step 5 of 40, after the warm-up of 4",
    ]


def test_a_run_of_nothing_but_bad_batches_stops_with_the_weights_it_has(folder: Path) -> None:
    from stepguard import TrainingHalted

    loop = quiet("training.max_skips_in_a_row=2")
    loop.session.pairs.latents.fill_(float("nan"))
    before = [p.clone() for p in loop.session.trainer.parameters()]
    with pytest.raises(TrainingHalted):
        loop.train(bar=False)

    assert [incident.decision.action for incident in loop.guard.incidents][-1] == "stop"
    assert not any(one.decision.action == "rewind" for one in loop.guard.incidents)
    now = loop.session.trainer.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_a_short_run_says_where_its_eval_loss_began(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from latentDLM_mmdit.train_mmdit_stable import start

    start(settings(*places(tmp_path), "optimizer.lr=1e-2", "training.num_train_steps=12"))
    said = capsys.readouterr().out
    began, *_, ended = (float(x) for x in re.findall(r"eval at step \d+: eval_loss (\S+),", said))

    assert f"eval_loss was {began:.4f} at the start" in said
    assert ended < began


def test_the_reports_own_commands_work_on_the_files_of_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from latentDLM_mmdit.train_mmdit_stable import start

    whole_steps = partial(
        Policy, actions=("retry", "skip", "rewind", "stop")
    )  # a null in the log, not the rest's loss
    monkeypatch.setattr("latentDLM_mmdit.guarded.Policy", whole_steps)
    bad = ("model.schedule_dtype=model", "training.train_batch_size=64", "training.seed=4")
    loop = start(settings(*places(tmp_path), *bad, "training.gradient_accumulation_steps=1"))
    ckpt = torch.load(loop.folder / "latest" / "checkpoint.pt")
    monkeypatch.chdir(tmp_path)  # where log_dir is, as the recipe's root is beside train_logs
    losses = []
    with open("training_log.jsonl") as f:  # noqa: PTH123 as the report has it
        for line in f:
            losses.append(json.loads(line)["loss"])
    plt.plot(losses)
    plt.yscale("log")
    plt.savefig("loss_curve.png")
    plt.close()

    assert not any(torch.isnan(p).any() for p in ckpt["model"].values())
    assert losses[5] is None
    assert all(loss is not None for loss in losses[:5])
    assert Path("loss_curve.png").stat().st_size > 0


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_saves_a_good_state(folder: Path, tmp_path: Path) -> None:
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit_stable import build_loop

    loop = build_loop(settings(*places(tmp_path), "training.check=false"), Ranks())
    take = loop.one_step

    def interrupted(micro: Any) -> Any:
        if loop.step == 3:
            import signal

            signal.raise_signal(signal.SIGINT)
        return take(micro)

    loop.one_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        loop.train(bar=False)

    assert [path.name for path in sorted((loop.folder / "checkpoints").glob("step-*"))] == [
        "step-3"
    ]


# --- data and preflight
# ----------------------------------------------------------------------------------------------


def test_a_damaged_file_is_zeros_for_the_original_and_refused_by_the_stable(
    folder: Path, tmp_path: Path
) -> None:
    from latentDLM_mmdit.pairs import read_pairs, toy_pairs, write_pairs

    where = (tmp_path / "tokens", tmp_path / "latents")
    made = toy_pairs(4, seed=0, length=8, vocabulary=12, features=4)
    write_pairs(made, *where)
    whole = read_pairs(*where, shape=(8, 4), limit=9, on_unreadable="refuse")
    (where[1] / "000002.npy").write_bytes(b"damaged")
    silent = read_pairs(*where, shape=(8, 4), limit=9, on_unreadable="zero")

    assert torch.equal(whole.tokens, made.tokens)
    assert torch.equal(whole.latents, made.latents)
    assert not silent.real[2].any()
    with pytest.raises(SystemExit, match=r"000002\.npy cannot be used"):
        read_pairs(*where, shape=(8, 4), limit=9, on_unreadable="refuse")


def test_the_preflight_names_a_nan_in_a_file_and_an_epsilon_of_0(
    folder: Path, tmp_path: Path
) -> None:
    from latentDLM_mmdit.preflight import look_first
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit_stable import build_session

    session = build_session(settings(*places(tmp_path)), Ranks())
    assert look_first(session)[1]
    np.save(
        tmp_path / "data" / "toy" / "latents" / "000003.npy", np.full(4, np.nan, dtype=np.float32)
    )
    said, sound = look_first(session)
    assert not sound
    assert "000003.npy" in said

    half = (
        "training.dtype=fp16",
        "training.precision=pure",
        "loss.loss_scale=256",
        "data.folder=null",
    )
    said, sound = look_first(build_session(settings(*half), Ranks()))
    assert not sound
    assert "optimizer.eps" in said


def test_glosses_are_read_chosen_and_scaled(folder: Path, tmp_path: Path) -> None:
    import argparse

    import real_glosses

    head = "  1 This software and database is being provided to you\n"
    entry = '00001740 03 n 01 entity 0 000 | that which is known; "it was there"  \n'
    for part in real_glosses.PARTS:
        (tmp_path / f"data.{part}").write_text(
            head + (entry if part == "noun" else ""), encoding="utf-8"
        )
    options = argparse.Namespace(vocabulary=5, length=6, number=2, seed=0)
    pieces = [[7, 7, 8, 9, 5], [7, 7, 8, 9, 5], [7, 8], [8, 9, 6, 6, 1, 1]]
    kept, known = real_glosses.chosen(["a", "a", "b", "c"], pieces, options)
    latents, share = real_glosses.main_axes(torch.randn(50, 6) * torch.arange(1.0, 7.0), 3)

    assert list(real_glosses.glosses(tmp_path)) == ["that which is known"]
    assert kept == [0]  # one repeats, one is short, one has a rare piece
    assert sorted(known.values()) == list(range(5))
    torch.testing.assert_close(latents.std(dim=0), torch.ones(3))
    assert 0.5 < share < 1.0


# --- as users type it
# ------------------------------------------------------------------------------------------------

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc_per_node=2")


def test_the_command_of_the_report_survives_a_bad_sample_with_equal_weights_on_both_ranks(
    tmp_path: Path,
) -> None:
    command = (
        *("latentDLM_mmdit/train_mmdit_stable.py", "--config-name", "mmdit_stable"),
        *(
            "logging.run_name=mmdit-qwen-32d-l2t-stable",
            "training.train_batch_size=4",
            "optimizer.lr=5e-5",
        ),
        "optimizer.grad_clip_norm=0.5",
    )
    bad = (
        "model.schedule_dtype=model",
        "training.train_batch_size=32",
        "training.seed=1",
        "training.check=false",
    )
    ended = run("latent_dlm", *TORCHRUN, *command, *TINY, *places(tmp_path), *bad)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ERROR: Invalid loss at step " in ended.stdout
    assert "weights of 2 processes are equal bit for bit" in ended.stdout
    assert (tmp_path / "out" / "mmdit-qwen-32d-l2t-stable" / "journal.rank1.jsonl").is_file()


def test_the_launcher_passes_everything_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "--config-name",
        "mmdit_stable",
        "training.num_train_steps=100",
        "logging.log_freq=10",
        "--cfg",
        "job",
    )
    monkeypatch.setattr("sys.argv", ["launch_stable_training.py", *given])
    runpy.run_path(str(folder / "launch_stable_training.py"), run_name="__main__")
    said = capsys.readouterr().out

    assert "num_train_steps: 100" in said
    assert "log_freq: 10" in said


def test_one_variable_of_the_script_chooses_the_version(tmp_path: Path) -> None:
    script = (RECIPES / "latent_dlm" / "train_qwen_english_l2t_stable.sh").read_text()

    assert script.count("${TRAIN_VERSION:-stable}") == 1
    ended = run_script(tmp_path, "original")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "version original: latentDLM_mmdit/train_mmdit.py" in ended.stdout
    assert "6 steps in " in ended.stdout
    assert run_script(tmp_path, "newest").returncode == 2


def run_script(tmp_path: Path, version: str) -> Any:
    import os
    import subprocess
    import sys

    return subprocess.run(
        ["bash", "train_qwen_english_l2t_stable.sh", *TINY, *places(tmp_path)],
        cwd=RECIPES / "latent_dlm",
        env={
            **os.environ,
            "TRAIN_VERSION": version,
            "NPROC_PER_NODE": "1",
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(RECIPES.parent / "src"),
            "LOG_FOLDER": str(tmp_path / "logs"),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
