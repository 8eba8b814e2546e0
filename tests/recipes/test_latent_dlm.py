"""The joint diffusion: every setting has an effect, both versions lose the same, runs resume
exactly, nothing is made to look finite, and the report's own commands work.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forked import FULL
from recipe_process import RECIPES, TINY, run, variables
from stepguard import Policy
from stepguard.check.settings import unread
from stepguard.report.story import read_story
from stepguard.report.summary import compare

SMALL = TINY["latent_dlm"].split()


def places(tmp_path: Path) -> tuple[str, ...]:
    return (
        f"data.folder={tmp_path}/data",
        f"logging.save_dir={tmp_path}/out",
        f"logging.log_dir={tmp_path}/logs",
    )


def settings(*overrides: str, name: str = "mmdit_stable") -> Any:
    from latentDLM_mmdit.settings import load_config

    return load_config(name, (*SMALL, *overrides))


def quiet(*overrides: str) -> Any:
    """A stable loop that writes nothing."""
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit_stable import build_loop

    config = settings(
        "data.folder=null", "logging.save_dir=null", "training.check=false", *overrides
    )
    return build_loop(config, Ranks())


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return all(torch.equal(a[name], b[name]) for name in a)


# --- configurations
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mmdit", "mmdit_stable"])
def test_every_key_is_read(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from latentDLM_mmdit import train_mmdit, train_mmdit_stable

    start = (train_mmdit if name == "mmdit" else train_mmdit_stable).start
    left: set[str] | None = None
    for kind in ("unconditional", "sequential", "random"):
        config = settings(*places(tmp_path), f"loss.loss_type={kind}", name=name)
        start(config)
        found = set(unread(config))
        left = found if left is None else left & found

    assert left == set()
    assert "eval at step 3: eval_loss " in capsys.readouterr().out


def test_an_unknown_key_and_an_unknown_word_are_refused(folder: Path) -> None:
    with pytest.raises(Exception, match="learning_rate"):
        settings("optimizer.learning_rate=1")
    with pytest.raises(
        SystemExit, match=r"loss\.loss_type='t2i' is not known; use one of unconditional, l2t"
    ):
        settings("loss.loss_type=t2i")


def test_the_configurations_hold_what_the_report_says(folder: Path) -> None:
    from latentDLM_mmdit.settings import load_config

    stable, original = load_config("mmdit_stable"), load_config("mmdit")

    assert (stable.optimizer.lr, stable.optimizer.grad_clip_norm) == (5e-5, 0.5)
    assert (original.optimizer.lr, original.optimizer.grad_clip_norm) == (1e-4, 1.0)
    assert (stable.training.warmup_steps, stable.training.dtype) == (2000, "bf16")
    assert stable.training.gradient_accumulation_steps == 2
    assert (
        stable.loss.loss_scale,
        stable.loss.text_loss_weight,
        stable.loss.latent_loss_weight,
    ) == (1.0, 1.0, 0.1)
    assert (stable.loss.eps, stable.loss.text_loss_max, stable.loss.latent_loss_max) == (
        1e-8,
        100.0,
        10.0,
    )


@pytest.mark.parametrize(
    "change",
    [
        "training.warmup_share=0.0",
        "training.dtype=fp32",
        "training.gradient_accumulation_steps=1",
        "loss.text_loss_weight=0.5",
        "loss.latent_loss_weight=1.0",
        "loss.normalize_latents=True",
        "optimizer.lr=3e-5",
        "optimizer.grad_clip_norm=0.3",
    ],
)
def test_each_setting_of_the_report_changes_what_is_trained(folder: Path, change: str) -> None:
    def trained(*changed: str) -> Any:
        loop = quiet("training.num_train_steps=20", *changed)
        batches = loop.batches()
        for _ in range(2):
            loop.one_step([next(batches) for _ in range(loop.session.parts)])
        loop.close()
        return torch.nn.utils.parameters_to_vector(loop.session.trainer.parameters())

    assert not trained().equal(trained(change))


def test_a_warm_up_is_as_long_as_configured_and_a_short_run_leaves_it(folder: Path) -> None:
    session, short = (quiet(f"training.num_train_steps={n}").session for n in (30000, 100))

    assert (session.warmup, short.warmup) == (2000, 10)
    assert session.rate_factor(999) == pytest.approx(0.5, rel=0.01)
    assert max(short.rate_factor(step) for step in range(100)) > 0.9


def test_clipping_is_1_where_it_is_unset_and_off_at_0(folder: Path) -> None:
    from latentDLM_mmdit.guarded import clip_norm

    found = [
        clip_norm(quiet(change).session)
        for change in (
            "optimizer.grad_clip_norm=null",
            "optimizer.grad_clip_norm=0",
            "optimizer.grad_clip_value=0.3",
        )
    ]

    assert found == [1.0, None, 0.3]


def test_a_run_ends_with_the_epochs_or_the_steps_whichever_comes_first(folder: Path) -> None:
    assert quiet("training.num_train_steps=100").session.total_steps == 100
    one = quiet("training.num_train_steps=100", "training.num_epochs=1").session

    assert one.total_steps == one.batches.per_epoch // 2 < 100


# --- losses
# --------------------------------------------------------------------------------------------------
def trainers(*overrides: str) -> tuple[Any, Any, Any]:
    """The original and the stable losses over the same network, and a batch."""
    from latentDLM_mmdit.improved_trainer import ImprovedTrainer

    session = quiet("training.precision=pure", "training.dtype=fp32", *overrides).session
    stable = session.trainer
    return (
        ImprovedTrainer(stable.model, stable.noise, stable.terms, stable.mask_id),
        stable,
        session.batches.at(0),
    )


@pytest.mark.parametrize("weighting", ["none", "mdlm"])
def test_both_versions_have_the_same_loss_on_healthy_data(folder: Path, weighting: str) -> None:
    original, stable, batch = trainers(f"loss.weighting={weighting}")
    a, b = original(batch), stable(batch)

    assert a.keys() == b.keys() == {"text_loss", "latent_loss"}
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_an_infinite_logit_under_the_mask_poisons_only_the_original(folder: Path) -> None:
    original, stable, batch = trainers()
    noised = stable.noised(batch, "unconditional")
    logits = torch.zeros(*batch["input_ids"].shape, 12)
    hidden = ~(noised.masked & batch["attention_mask"])
    logits[hidden.nonzero()[0, 0], hidden.nonzero()[0, 1]] = float("inf")

    assert math.isnan(float(original.text_loss(logits, batch, noised)))
    assert math.isfinite(float(stable.text_loss(logits, batch, noised)))


def test_the_reports_clamp_ends_the_gradient_and_a_soft_limit_does_not(folder: Path) -> None:
    gradients = []
    for limit in ("clamp", "soft"):
        _, stable, _ = trainers(f"loss.limit={limit}")
        prediction = torch.full((2, 4), 100.0, requires_grad=True)
        stable.latent_loss(prediction, torch.zeros(2, 4)).backward()
        gradients.append(float(prediction.grad.abs().sum()))

    assert gradients[0] == 0.0
    assert gradients[1] > 0.0


def test_a_time_above_0_998_is_1_in_bfloat16_and_only_there_is_the_schedule_lost(
    folder: Path,
) -> None:
    from latentDLM_mmdit.noise import masking

    t = torch.tensor([0.5, 0.9985])
    cast, _ = masking(t, eps=1e-4, dtype=torch.bfloat16)
    wide, share = masking(t, eps=1e-4, dtype=None)

    assert torch.isfinite(cast).tolist() == [True, False]
    torch.testing.assert_close(wide, 1.0 / t, rtol=1e-3, atol=0.0)  # the ELBO weight is 1 / t
    torch.testing.assert_close(share, (1.0 - 1e-4) * t)


def test_each_loss_type_trains_its_own_modality(folder: Path) -> None:
    _, stable, _ = trainers("training.freeze_unused=true")
    for kind, losses, frozen in (
        ("l2t", {"text_loss"}, "latent_head"),
        ("t2l", {"latent_loss"}, "text_head"),
        ("unconditional", {"text_loss", "latent_loss"}, None),
    ):
        session = quiet(f"loss.loss_type={kind}").session
        found = stable(session.batches.at(0))
        held = {
            name.split(".")[0] for name, p in stable.model.named_parameters() if not p.requires_grad
        }

        assert set(found) == losses
        assert (frozen in held) if frozen else not held


def test_ranks_share_the_loss_type_and_no_sample(folder: Path) -> None:
    from latentDLM_mmdit.pairs import Batches, loss_types

    session = quiet("loss.loss_type=random").session
    types = loss_types(session.config)
    ranks = [Batches(session.pairs, 4, seed=0, types=types, ranks=(rank, 2)) for rank in range(2)]
    kinds = {tuple(r.at(i)["loss_type"] for i in range(20)) for r in ranks}
    seen = [
        torch.cat([r.at(i)["latent"] for i in range(r.per_epoch)])[:, 0].tolist() for r in ranks
    ]

    assert len(kinds) == 1
    assert len(set(*kinds)) == 3
    assert not set(seen[0]) & set(seen[1])


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


def test_the_command_of_the_report_survives_a_bad_sample_with_equal_weights_on_both_ranks(
    tmp_path: Path,
) -> None:
    given = (
        "latentDLM_mmdit/train_mmdit_stable.py --config-name mmdit_stable "
        "logging.run_name=mmdit-qwen-32d-l2t-stable training.train_batch_size=4 "
        "optimizer.lr=5e-5 optimizer.grad_clip_norm=0.5"
    )
    bad = "model.schedule_dtype=model training.train_batch_size=32 training.seed=1"
    words = (*given.split(), *SMALL, *places(tmp_path), *bad.split(), "training.check=false")
    ended = run("latent_dlm", *words, ranks=2)

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


@pytest.mark.documented
def test_one_variable_of_the_script_chooses_the_version(tmp_path: Path) -> None:
    script = RECIPES / "latent_dlm" / "train_qwen_english_l2t_stable.sh"

    def ended(version: str) -> subprocess.CompletedProcess[str]:
        own = {"NPROC_PER_NODE": "1", "LOG_FOLDER": str(tmp_path / "logs")}
        return subprocess.run(
            ["bash", str(script), *SMALL, *places(tmp_path)],
            env={**variables(), **own, "TRAIN_VERSION": version},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    assert script.read_text().count("${TRAIN_VERSION:-stable}") == 1
    names = {"original": "train_mmdit.py", "stable": "train_mmdit_stable.py"}
    for version, name in names.items() if FULL else [("original", names["original"])]:
        done = ended(version)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"version {version}: latentDLM_mmdit/{name}" in done.stdout
        assert "6 steps in " in done.stdout
    assert ended("newest").returncode == 2


WHATIF_STEPS, WRONG_FROM = 24, 20


def spoil_sample(loop: Any, step: int, micro: list[Any]) -> None:
    if step == WRONG_FROM:
        micro[1]["latent"][2] = torch.nan


def raise_rate(loop: Any, step: int, micro: list[Any]) -> None:
    """As a schedule in the wrong unit does: the rate is right, then far too high."""
    if step == WRONG_FROM - 4:
        schedule = loop.session.schedule
        schedule.base_lrs = [1e6 * rate for rate in schedule.base_lrs]
        for group in loop.session.optimizer.param_groups:
            group["lr"] *= 1e6


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (spoil_sample, {"leave out"}),
        (raise_rate, {"keep lr", "lr x0.1"}),
    ],
)
def test_known_fix_is_ranked_first(folder: Path, wrong: Any, right: set[str]) -> None:
    loop = quiet(f"training.num_train_steps={WHATIF_STEPS}", "data.max_samples=320")
    batches = loop.batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(WHATIF_STEPS):
            micro = [next(batches), next(batches)]
            wrong(loop, step, micro)
            loop.one_step(micro)
            if loop.guard.incidents:
                break
        before = [p.detach().clone() for p in loop.session.module.parameters()]
        found = loop.guard.whatif()
    assert found.best is not None and found.best.name in right
    assert all(map(torch.equal, before, loop.session.module.parameters()))
    loop.close()


def test_options_of_the_model_train(folder: Path) -> None:
    def losses(*change: str) -> list[float]:
        loop = quiet("training.num_train_steps=2", *change)
        loop.train(bar=False)
        found: list[float] = loop.history.losses
        return found

    plain = losses()
    for change in (
        "model.num_residual_streams=2",
        "model.latent_parameterization=v",
        "model.latent_beta_schedule=linear",
        "model.latent_beta_schedule=sigmoid",
        "model.dropout=0.1",
        "optimizer.use_fused=true",
    ):
        changed = losses(change)
        assert all(map(math.isfinite, changed))
        assert changed != plain or "fused" in change, change
