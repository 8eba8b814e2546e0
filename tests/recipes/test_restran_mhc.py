"""ResTran with hyper-connections: every setting has an effect, probes speak in causal order, bad
states are found.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stepguard.journal import read_run
from stepguard.numerics import Events
from stepguard.report.health import judge_stages, parse_stage
from stepguard.report.story import read_story

REPORTED = (
    "MODEL_TYPE",
    "LEARNING_RATE",
    "BATCH_SIZE",
    "GRAD_CLIP",
    "MHC_N",
    "AUGMENTATION_LEVEL",
    "OVERSAMPLE_RARE_CHARS",
)
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
    assert [getattr(config, name) for name in REPORTED] == [
        *("restran_mhc", 1e-4, 32, 1.0, 2, "light", False)
    ]


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


def poisoned(place: int) -> Any:
    """A model of which the second hyper-connection is the first to see NaN, at this probe."""
    nan = float("nan")
    if place == 3:
        return overflowing(GUARD="original").model
    model = trainer_with(GUARD="original").model
    with torch.no_grad():
        if place == 0:
            model.enter[1].conv1.weight[0, 0, 0, 0] = nan
        elif place == 1:
            model.mhc[1].alpha_pre.fill_(nan)
        elif place == 2:
            model.blocks[1].conv1.weight[0, 0, 0, 0] = nan
        else:
            model.mhc[1].alpha_post.fill_(nan)
    return model


@pytest.mark.parametrize(
    ("place", "title", "said"),
    [
        (0, "INPUT (pooled)", ("Alpha pre: 0.01", "Alpha post: 0.01", "Alpha res: 0.01", "pooled")),
        (1, "READ-OUT (h_in)", ("H_pre stats: min=nan, max=nan, mean=nan", "h_in")),
        (2, "SUBLAYER OUTPUT (h_out)", ("Sublayer: BasicBlock", "h_in stats: min=", "h_out")),
        (3, "WRITE-IN + RESIDUAL", ("H_res stats: min=nan", "mixed")),
        (4, "FINAL OUTPUT", ("H_post stats: min=nan", "Alpha post: nan", "out")),
    ],
)
def test_each_probe_finds_what_happens_at_its_place_with_the_fields_of_the_report(
    folder: Path, place: int, title: str, said: tuple[str, ...]
) -> None:
    model = poisoned(place)
    model(trainer_with(GUARD="original").plates.draw(2)[0])
    first = str(model.probes.sightings[0])

    assert first.startswith(f"🔴 NaN/Inf in mHC {title}:\n   Module: mhc.1\n   Shape: [")
    *facts, label = said
    for part in (*facts, f"{label} stats (non-nan): ", "NaN count: ", "Inf count: 0"):
        assert part in first
    assert "NaN count: 0\n" not in first


def test_the_check_before_an_epoch_sees_parameters_buffers_and_optimizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_with(GUARD="original")
    trainer.one_step(trainer.plates.draw(2))
    assert trainer.check_parameters(1) == []
    with torch.no_grad():
        trainer.model.head.bias[0] = float("inf")
        trainer.model.blocks[0].bn1.running_var[0] = float("nan")
        next(iter(trainer.optimizer.state.values()))["exp_avg"].fill_(float("nan"))

    assert trainer.check_parameters(2) == [
        "blocks.0.bn1.running_var",
        "head.bias",
        "optimizer.0.exp_avg",
    ]
    assert "🔴 3 tensors are not finite, first blocks.0.bn1.running_var" in capsys.readouterr().out


def test_an_incident_says_epoch_batch_and_rate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_with()
    draw, rates = trainer.plates.draw, []

    def drawn(number: int) -> Any:
        frames, texts = draw(number)
        rates.append(trainer.rate)
        return frames * float("nan" if len(rates) == 5 else 1.0), texts

    trainer.plates.draw = drawn
    trainer.train(bar=False)

    assert f"   epoch 2, batch 2, lr={rates[4]:.2e}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed",
    [
        {"MHC_N": 4, "LEARNING_RATE": 1.5e-4, "BATCH_SIZE": 48},  # the report's scaling up
        {"MHC_N": 1, "LEARNING_RATE": 5e-5, "BATCH_SIZE": 16},  # ... and its way back
        {"STREAMS": "persistent"},
        {"USE_CUDNN_BENCHMARK": True},
    ],
)
def test_the_other_settings_of_the_report_train(folder: Path, changed: dict[str, Any]) -> None:
    trainer = trainer_with(**changed)
    before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).clone()
    loss = trainer.one_step(trainer.plates.draw(trainer.config.BATCH_SIZE))
    trainer.close()
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False

    assert math.isfinite(loss)
    assert not before.equal(torch.nn.utils.parameters_to_vector(trainer.model.parameters()))
    assert benchmark == trainer.config.USE_CUDNN_BENCHMARK


def test_stopping_raises_what_the_probes_saw(folder: Path) -> None:
    from src.models.probes import NonFiniteForward

    trainer = overflowing(ON_NAN="stop")
    with pytest.raises(NonFiniteForward) as raised:
        trainer.train(bar=False)

    said = str(raised.value)
    assert "   Stopping training to prevent corruption..." in said
    assert said.endswith("NaN detected in model predictions - forward pass corrupted")


def test_a_stop_after_a_good_forward_pass_is_not_blamed_on_the_predictions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepguard import TrainingHalted

    trainer = trainer_with(ON_NAN="stop")
    trainer.model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(TrainingHalted) as raised:
        trainer.train(bar=False)

    assert not isinstance(raised.value, ValueError)
    assert raised.value.incident.verdict.kind == "nonfinite_gradient"
    assert "Stopping training to prevent corruption..." in capsys.readouterr().out


@pytest.mark.parametrize("guard", ["original", "stable"])
def test_the_rate_ends_where_its_schedule_ends(folder: Path, guard: str) -> None:
    trainer = trainer_with(GUARD=guard)
    rates = []
    while trainer.step < trainer.total_steps:
        rates.append(trainer.rate)
        trainer.one_step(trainer.plates.draw(4))
    trainer.close()

    assert rates[-1] == min(rates) == trainer.rate
    assert trainer.scheduler.last_epoch == trainer.total_steps - 1


@pytest.mark.parametrize("guard", ["original", "stable"])
def test_float16_runs_under_a_grad_scaler_that_finds_its_scale(
    folder: Path, tmp_path: Path, guard: str
) -> None:
    trainer = trainer_with(tmp_path, GUARD=guard, AMP="fp16")
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0**40})
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    first = trainer.one_step(trainer.plates.draw(4))
    position = trainer.scheduler.last_epoch
    moved = [name for name, p in trainer.model.named_parameters() if not p.equal(before[name])]
    trainer.save("last")
    resumed = trainer_with(tmp_path, GUARD=guard, AMP="fp16")
    resumed.resume(tmp_path / "test_last.pth")
    trainer.close(), resumed.close()

    assert math.isfinite(first)
    assert (
        not moved
    )  # the scaled gradients overflow: no update, the schedule waits, the scale falls
    assert position == 0
    assert trainer.scaler.get_scale() < 2.0**40
    assert resumed.scaler.get_scale() == trainer.scaler.get_scale()
    if trainer.guard is not None:
        assert not trainer.guard.incidents  # a scaler that looks for its scale is no incident


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


def test_a_run_that_is_over_can_be_resumed_and_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from configs.config import Config
    from train import start

    config = Config().with_(**TINY, OUTPUT_DIR=str(tmp_path))
    start(config)
    assert "6 steps, loss " in capsys.readouterr().out
    start(config.with_(RESUME=str(tmp_path / "restran_mhc_last.pth")))

    assert "6 steps are done, none is left" in capsys.readouterr().out


def test_every_gate_has_its_name_in_the_journal_and_can_be_asked_for_by_stages(
    folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_with(tmp_path)
    with torch.no_grad():
        trainer.model.mhc[1].alpha_post.fill_(0.7)
    trainer.train(bar=False)
    record = read_run(tmp_path / "run")
    stages = [
        parse_stage(text)
        for text in (
            "0-2: alpha<0.1, mhc.1.alpha_post>0.6, mhc.1.alpha_pre<0.1, routing<88",
            "3-5: val_acc>=0",
        )
    ]
    outcomes = judge_stages(read_story(tmp_path / "run").latest, stages)

    # the largest gate is too large, and it is this one
    assert [outcome.state for outcome in outcomes] == ["failed", *["passed"] * 4]
    gates = {name for name in record.steps[0]["followed"] if "alpha_" in name}
    assert gates == {f"mhc.{i}.alpha_{kind}" for i in (0, 1) for kind in ("pre", "post", "res")}
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
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diagnose_nan import main

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
    assert "stepguard quarantine" in said


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, "fine", "MHC_N = 2"),
        ({"LEARNING_RATE": 0.3}, "failed", "LEARNING_RATE = 0.3 is above the safe 0.0001"),
        ({"GRAD_CLIP": 500.0}, "failed", "GRAD_CLIP = 500 is above the safe 1"),
        ({"LEARNING_RATE": 1.5e-4}, "warning", "LEARNING_RATE = 0.00015 is above the safe 0.0001"),
        ({"SINKHORN": "exp"}, "warning", "SINKHORN = exp is riskier than log"),
        ({"OVERSAMPLE_RARE_CHARS": True}, "warning", "OVERSAMPLE_RARE_CHARS = True is riskier"),
    ],
)
def test_diagnose_compares_the_configuration_with_safe_settings(
    folder: Path, changed: dict[str, Any], status: str, said: str
) -> None:
    from configs.config import Config
    from diagnose_nan import compared
    from stepguard.records.incident import Section

    found = compared(Config(**changed), Section(title="configuration", status="fine", lines=("",)))

    assert found.status == status
    assert any(said in line for line in found.lines)
    for name in REPORTED:
        assert f"{name} = " in found.lines[0]


def test_a_fault_that_the_examination_found_outlasts_the_comparison(folder: Path) -> None:
    from configs.config import Config
    from diagnose_nan import compared
    from stepguard.records.incident import Section

    fault = Section(title="configuration", status="failed", lines=("", "the rate comes back"))

    assert compared(Config(), fault).status == "failed"
    assert compared(Config(), fault).lines[-1] == "the rate comes back"


def test_diagnose_shows_the_largest_gates_of_every_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diagnose_nan import main

    for name, value in (("first", 0.4), ("second", -0.8)):
        trainer = trainer_with(None, GUARD="original", CHANNELS=(8, 16, 32), TRANSFORMER_HEADS=4)
        with torch.no_grad():
            trainer.model.mhc[1].alpha_res.fill_(value)
        torch.save(trainer.model.state_dict(), tmp_path / f"{name}.pth")
    main(["--results", str(tmp_path)])
    text = " ".join(capsys.readouterr().out.partition("watched values")[2].split())

    first, second = (text.index(f"{name}.pth: mhc.1.alpha_res = ") for name in ("first", "second"))
    assert second < first < text.index("fresh model: ")
    assert "second.pth: mhc.1.alpha_res = -0.8" in text
    assert text.count("alpha_") == 27  # none is left out


def test_diagnose_does_not_take_an_optimizers_step_count_for_a_gate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diagnose_nan import main

    trainer = trainer_with(tmp_path)
    for _ in range(3):
        trainer.one_step(trainer.plates.draw(4))
    assert trainer.guard.save() is not None  # names optimizer state by its parameter
    trainer.close()

    assert main(["--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out.partition("5. ")[2]
    assert said.startswith("watched values  fine")
    assert "/step = " not in said


CLEAN_UP = """
New-Item -ItemType Directory -Force results/corrupted_backup
Move-Item results/*.pth results/corrupted_backup/
"""
"""The report's own lines."""


def test_after_the_reports_clean_up_diagnose_is_clean_and_a_run_starts_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import train
    from diagnose_nan import main

    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    trainer = trainer_with(results, GUARD="original")
    trainer.save("best")
    with torch.no_grad():
        trainer.model.mhc[0].alpha_res.fill_(float("nan"))
    trainer.save("last")
    assert main(["--results", str(results)]) == 1
    make, move = (line.split()[-1] for line in CLEAN_UP.strip().splitlines())
    Path(make).mkdir()
    for path in list(results.glob("*.pth")):
        path.rename(Path(move) / path.name)
    capsys.readouterr()

    assert main(["--results", str(results)]) == 0
    said = capsys.readouterr().out
    assert "pth" not in said.partition("recommendations")[2]
    assert "2 moved to corrupted_backup: not looked at" in " ".join(said.split())

    fresh = train.start(trainer.config.with_(OUTPUT_DIR=str(results), GUARD="stable"))
    begun = capsys.readouterr().out
    assert "Checking model parameters before epoch 1..." in begun
    assert fresh.history.epochs[0]["epoch"] == 1.0
    assert len(fresh.history.losses) == fresh.total_steps
    assert (results / "restran_mhc_last.pth").is_file()


def test_real_plates_are_rendered_in_fonts(folder: Path) -> None:
    frames, texts = trainer_with(DATA="real").plates.draw(3)

    assert frames.shape == (3, 2, 1, 16, 64)
    assert texts.shape == (3, 7)
    assert float(frames.std()) > 0.2


@pytest.mark.usefixtures("folder")
def test_ctc_leaves_out_what_cannot_be_aligned_and_counts_it() -> None:
    from src.training.ctc import ctc_loss

    counted = Events()
    logits = torch.randn(16, 2, 5, requires_grad=True)
    targets = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]])
    lengths = torch.tensor([16, 16]), torch.tensor([10, 10])
    loss = ctc_loss(logits.log_softmax(-1), targets, *lengths, count=counted)
    loss.backward()
    alone = F.ctc_loss(logits.log_softmax(-1)[:, 1:], targets[1:], lengths[0][1:], lengths[1][1:])
    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert counted.counts() == {"ctc_loss.unalignable": 1}
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isinf(F.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction="none")[0])


@pytest.mark.usefixtures("folder")
def test_ctc_of_nothing_that_aligns_is_a_zero_with_a_graph() -> None:
    from src.training.ctc import ctc_loss

    logits = torch.randn(3, 1, 4, requires_grad=True)
    loss = ctc_loss(
        logits.log_softmax(-1), torch.tensor([[1, 1, 1]]), torch.tensor([3]), torch.tensor([3])
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
