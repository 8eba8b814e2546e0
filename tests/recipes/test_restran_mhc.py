"""ResTran with hyper-connections: every setting has an effect, probes speak in causal order, bad
states are found.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from stepguard.journal import read_run
from stepguard.report.stages import judge_stages, parse_stage
from stepguard.report.story import read_story

TINY = {
    "CHANNELS": (4, 8),
    "FRAMES": 2,
    "EPOCHS": 2,
    "STEPS_PER_EPOCH": 3,
    "BATCH_SIZE": 4,
    "VALIDATION_PLATES": 4,
    "TRANSFORMER_HEADS": 2,
}


def trainer_with(tmp_path: Path | None = None, **changed: Any) -> Any:
    from configs.config import Config
    from src.training.files import Files
    from src.training.trainer import Trainer

    files = Files(tmp_path, "test") if tmp_path is not None else None
    return Trainer(Config().with_(**{**TINY, **changed}), files=files)


def test_every_key_is_read(folder: Path, tmp_path: Path) -> None:
    from configs import config
    from train import start

    read: set[str] = set()

    class Recorded(config.Config):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    given = Recorded(**TINY, OUTPUT_DIR=str(tmp_path))
    read.clear()
    start(given)

    # taken only where another key asks for it
    assert {field.name for field in fields(config.Config)} - read <= {"RESUME_LR"}


def test_the_command_of_the_report_is_understood(folder: Path) -> None:
    from train import settings

    config = settings(["--model", "restran_mhc", "--mhc-n", "2", "--lr", "0.0001"])

    assert (config.MODEL_TYPE, config.MHC_N, config.LEARNING_RATE) == ("restran_mhc", 2, 1e-4)
    assert config == settings([])  # which are the defaults


def test_the_lines_of_the_report_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_with().train()

    ended = capsys.readouterr()
    assert "🔍 Checking model parameters before epoch 2...\n✅ Model parameters OK" in ended.out
    assert "Ep 1/2: " in ended.err
    assert "loss=" in ended.err
    assert "lr=" in ended.err


def overflowing(**changed: Any) -> Any:
    trainer = trainer_with(SINKHORN="exp", MIX="diag", **changed)
    with torch.no_grad():
        trainer.model.mhc[1].alpha_res.fill_(1e4)
        trainer.model.mhc[1].phi.bias.fill_(1.0)
    return trainer


def test_probes_speak_in_causal_order_with_their_numbers(folder: Path) -> None:
    trainer = overflowing(GUARD="original")
    trainer.model(trainer.plates.draw(2)[0])
    first, *_, last = map(str, trainer.model.probes.sightings)

    assert first.startswith(
        "🔴 NaN/Inf in mHC WRITE-IN + RESIDUAL:\n   Module: mhc.1\n   Shape: [4, 2, 8, "
    )
    assert "H_res stats: min=nan" in first
    assert "NaN count: " in first
    assert last.startswith(
        "🟡 NaN/Inf detected in MODEL PREDICTIONS:\n   Pred shape: torch.Size([2, "
    )
    assert last.endswith("This indicates NaN originated in forward pass")


@pytest.mark.parametrize(
    ("place", "fields_said"),
    [
        (
            0,
            (
                "INPUT (pooled)",
                "Alpha pre: 0.01",
                "Alpha post: 0.01",
                "Alpha res: 0.01",
                "pooled stats (non-nan): min=0",
            ),
        ),
        (
            1,
            (
                "READ-OUT (h_in)",
                "H_pre stats: min=0.500000, max=0.500000, mean=0.500000",
                "h_in stats (non-nan)",
            ),
        ),
        (
            2,
            (
                "SUBLAYER OUTPUT (h_out)",
                "Sublayer: BasicBlock",
                "h_out stats (non-nan): min=0, max=0",
            ),
        ),
    ],
)
def test_each_probe_has_the_fields_of_the_report(
    folder: Path, place: int, fields_said: tuple[str, ...]
) -> None:
    from src.models.probes import Probes

    probes, half = Probes(), torch.full((2,), 0.5)
    bad = torch.tensor([0.0, float("nan")])
    alpha = torch.tensor([0.01])
    facts: dict[str, Any] = [
        {"Alpha pre": alpha, "Alpha post": alpha, "Alpha res": alpha},
        {"H_pre stats": half},
        {"Sublayer": "BasicBlock"},
    ][place]
    probes.look("mhc.0", place, bad, ("pooled", "h_in", "h_out")[place], **facts)

    (sighting,) = probes.sightings
    for said in (*fields_said, "NaN count: 1", "Inf count: 0"):
        assert said in str(sighting)


def test_stopping_raises_what_the_probes_saw(folder: Path) -> None:
    from src.models.probes import NonFiniteForward

    trainer = overflowing(ON_NAN="stop")
    with pytest.raises(NonFiniteForward) as raised:
        trainer.train(bar=False)

    said = str(raised.value)
    assert "   Stopping training to prevent corruption..." in said
    assert said.endswith("NaN detected in model predictions - forward pass corrupted")


def test_a_resumed_run_goes_on_bit_for_bit_and_says_whose_rate_counts(
    folder: Path, tmp_path: Path
) -> None:
    whole = trainer_with(tmp_path, GUARD="original")
    whole.one_epoch(1, bar=False)
    whole.save("last")
    whole.one_epoch(2, bar=False)
    resumed = trainer_with(GUARD="original", LEARNING_RATE=5e-4)
    said = resumed.resume(tmp_path / "test_last.pth")
    resumed.one_epoch(2, bar=False)

    assert said == "test_last.pth: step 3, its learning rate is 0.0001 at the peak"
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name

    other = trainer_with(GUARD="original", LEARNING_RATE=5e-4)
    assert other.resume(tmp_path / "test_last.pth", 5e-4).endswith("; 0.0005 is used")
    assert other.optimizer.param_groups[0]["max_lr"] == pytest.approx(5e-4)


def test_gates_scores_and_accuracy_can_be_asked_for_by_stages(folder: Path, tmp_path: Path) -> None:
    trainer_with(tmp_path).train(bar=False)
    record = read_run(tmp_path / "run")
    stages = [
        parse_stage(text)
        for text in ("0-2: alpha<0.1, routing<88", "3-5: val_acc>=0", "0-5: alpha>1")
    ]

    assert [
        outcome.state for outcome in judge_stages(read_story(tmp_path / "run").latest, stages)
    ] == [
        "passed",
        "passed",
        "passed",
        "failed",
    ]
    assert "val_acc" not in record.steps[0]["followed"]  # nothing was validated yet


def test_ctrl_c_saves_a_good_state_and_refuses_a_bad_one(folder: Path, tmp_path: Path) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    trainer = trainer_with(tmp_path)
    trainer.plates.draw = lambda number: interrupted()
    with pytest.raises(KeyboardInterrupt):
        trainer.train(bar=False)
    assert (tmp_path / "test_last.pth").is_file()
    with torch.no_grad():
        trainer.model.head.bias[0] = float("inf")

    assert (
        trainer.save("best") == "best NOT saved: head.bias is not finite; the one before it stays"
    )


def test_the_reports_safe_exit_leaves_batchnorm_poisoned(folder: Path) -> None:
    trainer = trainer_with(SINKHORN="clamp", GUARD="original")
    frames, _ = trainer.plates.draw(2)
    block = trainer.model.blocks[0]
    with torch.no_grad():
        block.conv1.weight[0, 0, 0, 0] = float("nan")
    out = trainer.model(frames)

    assert bool(torch.isfinite(out).all())  # it looks healthy
    assert bool(torch.isnan(block.bn1.running_mean).any())  # and is lost


def test_diagnose_finds_bad_parameters_and_buffers(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from diagnose_nan import main

    monkeypatch.chdir(tmp_path)
    assert main(["--results", str(tmp_path / "none")]) == 0
    trainer = trainer_with(tmp_path, GUARD="original")
    trainer.model.blocks[0].bn1.running_mean[0] = float("nan")
    trainer.save("best")

    assert main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    titles = (
        "configuration",
        "checkpoints",
        "fresh model",
        "forward pass",
        "watched values",
        "recommendations",
    )
    for number, title in enumerate(titles, start=1):
        assert f"{number}. {title}" in said
    assert "blocks.0.bn1.running_mean" in said
    assert "LEARNING_RATE = 0.0001" in said
    assert "alpha_res = 0.01" in said
    assert "stepguard quarantine" in said


def test_real_plates_are_rendered_in_fonts(folder: Path) -> None:
    frames, texts = trainer_with(DATA="real").plates.draw(3)

    assert frames.shape == (3, 2, 1, 16, 64)
    assert texts.shape == (3, 7)
    assert float(frames.std()) > 0.2
