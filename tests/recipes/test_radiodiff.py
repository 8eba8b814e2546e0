"""RadioDiff: every setting has an effect, runs resume exactly, nothing is made to look finite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_process import TINY, run
from stepguard import verify
from stepguard.check.settings import unread
from stepguard.journal import read_run

SMALL = TINY["radiodiff"].split()


def settings(folder: Path, *overrides: str, file: str = "radio_train_m.yaml") -> Any:
    from denoising_diffusion_pytorch.settings import load_config

    return load_config(folder / "configs" / file, (*SMALL, *overrides))


def started(folder: Path, *overrides: str) -> Any:
    from train_cond_ldm import start

    return start(settings(folder, *overrides))


def test_every_key_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = started(folder, f"trainer.results_folder={tmp_path}")

    # taken only where another key asks for it, as the comment beside it says
    assert set(unread(trainer.config)) <= {"data.folder", "trainer.resume_milestone"}
    said = capsys.readouterr().out
    assert "Configuration is properly aligned" in said
    assert "\nGPU IDs: none\n" in said or torch.accelerator.is_available()


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("guard", ["original", "stable"])
def test_the_log_has_the_losses_of_its_step_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], weight: float, guard: str
) -> None:
    trainer = started(
        folder,
        "trainer.results_folder=null",
        f"model.vlb_weight={weight}",
        f"trainer.guard={guard}",
        "trainer.gradient_accumulate_every=2",
    )
    lines = re.findall(
        r"\[Train Step\] (\d)/6: loss_simple: (\S+), loss_vlb: (\S+), total_loss: (\S+), "
        r"lr: (\S+)",
        capsys.readouterr().out,
    )

    assert [line[0] for line in lines] == ["3", "6"]
    for step, simple, vlb, total, rate in lines:
        assert (float(vlb) > 0.0) == (weight > 0.0)
        assert float(total) == pytest.approx(float(simple) + float(vlb), abs=2e-5)
        assert float(total) == pytest.approx(trainer.history.losses[int(step) - 1], abs=1e-5)
        assert float(rate) == pytest.approx(1e-3 * (1 - (int(step) - 1) / 6) ** 0.96, rel=5e-3)


def test_the_file_that_the_report_names_and_the_reports_values(folder: Path) -> None:
    from denoising_diffusion_pytorch.settings import load_config

    own = load_config(folder / "configs" / "radio_train_m.yaml").trainer
    report = load_config(folder / "configs" / "radio_report.yaml").trainer
    names = ("lr", "min_lr", "amp", "fp16", "grad_clip", "resume_milestone")

    assert [report[name] for name in names] == [1e-5, 1e-6, True, False, 0.5, 10]
    assert [own[name] for name in names] == [1e-3, 1e-6, False, False, 0.5, 10]


def test_the_reports_block_of_settings_is_read_as_numbers(folder: Path, tmp_path: Path) -> None:
    from denoising_diffusion_pytorch.settings import load_config

    block = "trainer:\n  lr: 1e-5\n  min_lr: 1e-6\n  amp: True\n  fp16: False\n"
    (tmp_path / "report.yaml").write_text(f"{block}  resume_milestone: 10\n", encoding="utf-8")
    found = load_config(tmp_path / "report.yaml").trainer

    assert [found[name] for name in found] == [1e-5, 1e-6, True, False, 10]
    assert isinstance(found.lr, float)


def test_the_checklist_knows_that_the_run_will_be_guarded(folder: Path, tmp_path: Path) -> None:
    from stepguard.check.preflight import check
    from stepguard.check.subject import subject_of
    from train_cond_ldm import build

    made = build(settings(folder, f"trainer.results_folder={tmp_path}"))
    found = check(subject_of(made, "train_cond_ldm:build"), only=("checklist",))

    for name in ("loss_checked", "norms", "recovery"):
        outcome = found.outcome(f"checklist.{name}")
        assert outcome.status == "pass"
        assert "the returned `guard`" in outcome.evidence[0]


def test_a_lower_limit_of_the_weights_acts_and_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = started(folder, "trainer.results_folder=null", "model.weight_limit=2.5")

    assert float(trainer.model.largest_weight) == 2.5
    assert re.search(r"model\.weight_limit=2\.5 acted on \d+ samples", capsys.readouterr().out)
    started(folder, "trainer.results_folder=null")
    assert "weight_limit" not in capsys.readouterr().out


@pytest.mark.full
def test_a_run_whose_batches_are_all_bad_stops(folder: Path) -> None:
    from stepguard import TrainingHalted

    often = ("model.eps=0", "model.timesteps=1", "data.batch_size=16")  # half of the times are 0
    with pytest.raises(TrainingHalted):
        started(folder, "trainer.results_folder=null", "trainer.train_num_steps=300", *often)


def test_a_resumed_run_says_what_is_configured_otherwise_and_uses_the_configured_rate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepguard.check.preflight import Subject, check

    started(folder, f"trainer.results_folder={tmp_path}")
    resume = ("trainer.enable_resume=True", "trainer.resume_milestone=1", "trainer.lr=2e-3")
    resumed = started(folder, f"trainer.results_folder={tmp_path}", *resume)

    assert "model-1.pt: step 3; changed: " in (said := capsys.readouterr().out)
    assert "trainer.lr: 0.001 -> 0.002" in said
    assert resumed.rate == pytest.approx(2e-3 * (1 / 6) ** 0.96)
    # the same before a run, by the command of the library
    outcome = check(
        Subject(config=settings(folder, "trainer.lr=2e-3"), checkpoint=tmp_path / "model-1.pt"),
        only=("config.changed",),
    ).outcome("config.changed")
    assert outcome.status == "warn"
    assert any("trainer.lr: 0.001 -> 0.002" in line for line in outcome.evidence)


def test_an_unknown_key_is_refused(folder: Path) -> None:
    with pytest.raises(Exception, match=r"trainer\.learning_rate"):
        settings(folder, "trainer.learning_rate=1")


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    whole = started(folder, f"trainer.results_folder={tmp_path}")
    resumed = started(
        folder,
        f"trainer.results_folder={tmp_path}",
        "trainer.enable_resume=True",
        "trainer.resume_milestone=1",
    )

    assert len(resumed.history.losses) == 3
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    for name, tensor in whole.ema.state_dict().items():
        assert torch.equal(tensor, resumed.ema.state_dict()[name]), name


def test_a_milestone_that_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"model-7\.pt does not exist"):
        started(
            folder,
            f"trainer.results_folder={tmp_path}",
            "trainer.enable_resume=True",
            "trainer.resume_milestone=7",
        )


def test_the_reports_fix_shows_a_finite_loss_over_gradients_that_are_not(folder: Path) -> None:
    from accelerate import Accelerator

    from train_cond_ldm import Trainer

    trainer = Trainer(
        settings(folder, "model.eps=0", "trainer.treatment=seedfix", "trainer.results_folder=null"),
        Accelerator(),
    )
    batch = trainer.next_batch()
    batch["t"][1] = 0.0
    trainer.next_batch = lambda: batch
    loss = trainer.one_step()
    (incident,) = trainer.guard.incidents
    trainer.guard.close()

    assert torch.isfinite(torch.tensor(loss))
    assert incident.verdict.kind == "nonfinite_gradient"
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def test_the_largest_loss_weight_of_each_step_is_in_the_journal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(folder, f"trainer.results_folder={tmp_path}")
    weights = [line["followed"]["weight"] for line in read_run(tmp_path / "run").steps]

    assert len(weights) == 6
    assert all(2.0 <= weight <= 5.44 for weight in weights)
    assert "saved model-2.pt; NMSE of sampled maps " in capsys.readouterr().out


def test_a_poisoned_state_is_not_saved(folder: Path, tmp_path: Path) -> None:
    trainer = started(folder, f"trainer.results_folder={tmp_path}")
    assert verify(tmp_path / "model-2.pt").ok
    with torch.no_grad():
        trainer.model.unet.enter.bias[0] = float("nan")

    assert "NOT saved: param:unet.enter.bias is not finite" in trainer.save("3")
    assert not (tmp_path / "model-3.pt").exists()


def test_ctrl_c_saves_what_there_is(folder: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from train_cond_ldm import Trainer

    trainer = Trainer(settings(folder, f"trainer.results_folder={tmp_path}"), Accelerator())
    batch = trainer.next_batch()

    def interrupted() -> Any:
        if trainer.step == 2:
            raise KeyboardInterrupt
        return batch

    trainer.next_batch = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train(bar=False)

    assert torch.load(tmp_path / "model-interrupted.pt", weights_only=True)["step"] == 2


def test_probes_name_key_count_and_samples(folder: Path) -> None:
    from denoising_diffusion_pytorch.cond_unet import CondUNet
    from denoising_diffusion_pytorch.ddm_const_sde import LatentDiffusion

    said: list[str] = []
    model = LatentDiffusion(CondUNet(3, 8), eps=1e-4, treatment="probe", say=said.append)
    batch = {
        "x_start": torch.zeros(3, 3, 4, 4),
        "noise": torch.zeros(3, 3, 4, 4),
        "condition": torch.zeros(3, 3, 16, 16),
    }
    batch["x_start"][1, 0, 0, 0] = float("nan")
    loss = model({**batch, "t": torch.full((3,), 0.5)})["loss_simple"]

    assert said[0] == "Warning: x_start contains NaN values: 1 of 144, samples [1]"
    assert said[-1] == "Warning: loss_simple contains NaN values: 1 of 3, samples [1]"
    assert bool(torch.isnan(loss))  # a probe only looks


def test_the_floor_of_the_schedule_is_absolute_and_its_end_is_no_complex_number(
    folder: Path,
) -> None:
    from train_cond_ldm import _decay

    rates = [1e-3 * _decay(10, 1e-6 / 1e-3)(step) for step in range(13)]

    assert rates[0] == 1e-3
    assert rates[10:] == pytest.approx([1e-6] * 3)


@pytest.mark.documented
def test_the_command_of_the_report_refuses_its_own_precision_settings(tmp_path: Path) -> None:
    command = [
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "1",
        "--cpu",
        "--mixed_precision",
        "bf16",
    ]
    script = ("train_cond_ldm.py", "--cfg", "configs/radio_report.yaml")
    ended = run("radiodiff", *command, *script, *SMALL, f"trainer.results_folder={tmp_path}")

    assert ended.returncode != 0
    assert "Configuration is NOT aligned" in ended.stdout
    assert "stepguard explain SG801" in ended.stdout


def test_two_processes_leave_out_the_same_steps_and_end_with_the_same_weights(
    tmp_path: Path,
) -> None:
    worker = str(Path(__file__).with_name("radiodiff_ranks.py"))
    often = (
        "model.eps=0",
        "model.timesteps=20",
        f"trainer.results_folder={tmp_path}",
    )  # a time of 0 in 21 draws
    words = (worker, str(tmp_path), *SMALL, *often)
    ended = run("radiodiff", *words, ranks=2, imports=("accelerate",))

    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first == second
    assert int(first.split()[1]) > 0
