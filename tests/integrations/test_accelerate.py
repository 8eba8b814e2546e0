"""An accelerate script under a guard: accumulation, schedule, saves, several optimizers, replay.
Two gloo ranks of a script and of a Trainer skip, name and refuse together.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn

from distributed.launch import launch
from integrations.trainers import (
    HALTING,
    WHOLE_STEPS,
    bad_tensors,
    facts,
    llama,
    numbers,
    quiet,
    regression,
    texts,
)
from stepguard import ConfigError, Guard, GuardConfig, TrainingHalted
from stepguard.integrations.accelerate import SaveRefused, guard


@dataclass
class Script:
    """What people write with accelerate."""

    nan_at: int | None = None
    accumulate: int = 1
    fused: bool = False
    exact: bool = False
    """Computes its loss through `guard.loss`."""
    precision: str = "no"
    folder: Path | None = None
    """Of checkpoints with automatic names."""
    saves: Path | None = None
    """Where a state is saved after every step."""
    model: Any = None
    rows: list[Any] | None = None
    lr: float = 1e-2
    eps: float = 1e-8
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        project = ProjectConfiguration(
            str(self.folder), automatic_checkpoint_naming=True, total_limit=2
        )
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=self.precision,
            gradient_accumulation_steps=self.accumulate,
            project_config=project if self.folder is not None else None,
        )
        model = regression() if self.model is None else self.model
        rates = {"lr": self.lr, "eps": self.eps, "fused": self.fused}
        optimizer = torch.optim.AdamW(model.parameters(), **rates)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        rows = numbers(24, nan_at=self.nan_at) if self.rows is None else self.rows
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def loss_fn(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def train(self, config: GuardConfig | None) -> Any:
        torch.manual_seed(0)
        with guard(self.accelerator, config) if config is not None else nullcontext() as watching:
            self.watching = watching
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    told = self.exact and watching is not None
                    loss = watching.loss(self.loss_fn, batch) if told else self.loss_fn(batch)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(loss.detach()))
                if self.saves is not None:
                    self.accelerator.save_state(str(self.saves / f"step-{len(self.losses)}"))
        return watching

    def bad_saves(self) -> list[int]:
        saved = sorted(self.saves.glob("step-*/model.safetensors")) if self.saves else []
        return [
            sum(not bool(torch.isfinite(t).all()) for t in load_file(path).values())
            for path in saved
        ]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("precision", "exact"), [("no", False), ("bf16", False), ("no", True)])
def test_a_guarded_healthy_script_is_bit_identical(
    accumulate: int, precision: str, exact: bool
) -> None:
    bare = Script(accumulate=accumulate, precision=precision)
    bare.train(None)
    told = Script(accumulate=accumulate, precision=precision, exact=exact)
    assert told.train(quiet()).incidents == ()
    assert told.losses == bare.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(bare.model.parameters(), told.model.parameters(), strict=True)
    )
    assert told.schedule.get_last_lr() == bare.schedule.get_last_lr()


def test_a_nan_row_ruins_an_unguarded_script() -> None:
    script = Script(nan_at=9)
    script.train(None)
    assert bad_tensors(script.model) == 4


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_nan_row_costs_a_guarded_script_one_step(fused: bool, exact: bool) -> None:
    script = Script(nan_at=9, fused=fused, exact=exact)
    watching = script.train(quiet())
    (incident,) = watching.incidents
    assert incident.step == 2
    assert incident.findings[0].code == "SG101"
    assert incident.origin.samples == (1,)
    assert bad_tensors(script.model) == 0
    assert script.schedule.scheduler.last_epoch == 5


def test_of_an_accumulated_step_the_bad_micro_batch_is_named() -> None:
    script = Script(nan_at=5, accumulate=3, exact=True)
    (incident,) = script.train(quiet()).incidents
    assert (incident.step, incident.origin.micro_batch, incident.origin.samples) == (0, 1, (1,))
    assert script.schedule.scheduler.last_epoch == 1
    assert bad_tensors(script.model) == 0


def test_the_incident_is_that_of_the_plain_loop() -> None:
    script = Script(nan_at=9, exact=True)
    watching = script.train(quiet(policy=WHOLE_STEPS))
    model = regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    torch.manual_seed(0)
    with Guard(
        model, optimizer, scheduler=schedule, config=quiet(clip_norm=1.0, policy=WHOLE_STEPS)
    ) as plain:
        for batch in torch.utils.data.DataLoader(numbers(24, nan_at=9), batch_size=4):
            plain.step(lambda given: model(**given)["loss"], batch)
    assert len(plain.incidents) == 1
    assert [facts(i) for i in watching.incidents] == [facts(i) for i in plain.incidents]


def test_a_feature_that_is_always_0_meets_an_epsilon_of_0() -> None:
    rows = numbers(24)
    for row in rows:
        row["x"][2] = 0.0  # the weights of this feature get a gradient of exactly 0
    script = Script(rows=rows, eps=0.0)
    with pytest.raises(TrainingHalted) as halted:
        script.train(quiet(policy=HALTING))
    assert halted.value.incident.origin.phase == "optimizer"
    assert bad_tensors(script.model) == 0


# --- saves
# --------------------------------------------------------------------------------------------------
def test_a_bad_state_is_not_saved_and_nothing_is_rotated_away_for_it(tmp_path: Path) -> None:
    script = Script(folder=tmp_path)
    with guard(script.accelerator, quiet()) as watching:
        script.accelerator.save_state()
        script.accelerator.project_configuration.iteration += 1
        script.accelerator.save_state()
        there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        script.model.outer.bias.data.fill_(math.nan)
        with pytest.raises(SaveRefused, match=r"param:outer\.bias"):
            script.accelerator.save_state()
        with pytest.raises(SaveRefused, match=r"param:outer\.bias"):
            script.accelerator.save_model(script.model, str(tmp_path / "model"))
        assert watching.incidents == ()
        script.model.outer.bias.data.fill_(0.0)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == there
    assert not (tmp_path / "model").exists()


# --- wraps and settings
# --------------------------------------------------------------------------------------------
def test_close_gives_back_accelerator_and_optimizer_as_they_were() -> None:
    script = Script()
    accelerator, optimizer = dict(vars(script.accelerator)), dict(vars(script.optimizer))
    guard(script.accelerator, quiet()).close()
    assert vars(script.accelerator).keys() == accelerator.keys()
    assert vars(script.optimizer).keys() == optimizer.keys()
    assert not script.optimizer.optimizer._optimizer_step_pre_hooks


def test_two_optimizers_get_a_guard_each(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    prepared = accelerator.prepare(
        one, other, torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    )
    one, other, first, second = prepared
    with guard(accelerator, quiet(run_dir=tmp_path)) as watching:
        for x in (torch.ones(3, 2), torch.full((3, 2), math.nan)):
            first.zero_grad(), second.zero_grad()
            accelerator.backward(
                watching.loss(lambda given: one(given).sum(), torch.ones(3, 2), optimizer=first)
            )
            accelerator.backward(
                watching.loss(lambda given: other(given).sum(), x, optimizer=second)
            )
            first.step(), second.step()
        assert [len(each.incidents) for each in watching.guards] == [0, 1]
        assert watching.incidents[0].origin.tensor == "batch"
    assert (tmp_path / "optimizer1" / "journal.jsonl").is_file()
    assert bad_tensors(other) == 0


def test_a_guard_before_prepare_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"after accelerator\.prepare"):
        guard(Accelerator(cpu=True))


def test_an_optimizer_whose_model_was_not_prepared_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1))
    with pytest.raises(ConfigError, match="prepare the model as well"):
        guard(accelerator)


def test_settings_that_belong_to_the_loop_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"accelerator\.clip_grad_norm_"):
        guard(Script().accelerator, GuardConfig(clip_norm=1.0))


# --- what accelerate is told
# ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_a_vetoed_update_counts_as_skipped_for_accelerate_and_a_committed_one_does_not(
    scaled: bool,
) -> None:
    """The private `_is_overflow` is what accelerate's schedulers and the Trainer ask; nobody else
    resets it.
    """
    accelerator = Accelerator(cpu=True)
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert (optimizer.scaler is not None) is scaled
    said = []
    with guard(accelerator, quiet()):
        for x in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            accelerator.backward(model(torch.full((3, 2), x)).sum())
            optimizer.step()
            said.append(accelerator.optimizer_step_was_skipped)
    assert said == [False, True, False]
    assert accelerator.optimizer_step_was_skipped is False


def saving(
    folder: Path, *, half: bool = False, masked: Any = lambda row: False, eps: float = 1e-8
) -> Script:
    """A language model of four steps."""
    model = llama().half() if half else llama()
    kept = {"saves": folder, "lr": 2e-4, "eps": eps, "exact": True}
    return Script(model=model, rows=texts(16, masked), **kept)


OPTIMIZER_FAULTS = {"fp16 weights": {"half": True}, "no epsilon": {"eps": 0.0}}


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_an_optimizer_made_nan_ruins_an_unguarded_script_and_its_saves(
    tmp_path: Path, name: str
) -> None:
    script = saving(tmp_path, **OPTIMIZER_FAULTS[name])
    script.train(None)
    assert math.isfinite(script.losses[0]) and all(math.isnan(loss) for loss in script.losses[1:])
    assert len(script.bad_saves()) == 4 and all(script.bad_saves())


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_an_optimizer_made_nan_is_taken_back_named_and_never_saved(
    tmp_path: Path, name: str
) -> None:
    script = saving(tmp_path, **OPTIMIZER_FAULTS[name])
    with pytest.raises(TrainingHalted):
        script.train(quiet(policy=HALTING))
    first = script.watching.incidents[0]
    assert (first.step, first.origin.phase, first.origin.op) == (0, "optimizer", "aten.addcdiv_")
    assert first.findings[0].code == "SG502"
    done = [i.decision.action for i in script.watching.incidents if i.decision]
    assert done == ["undo", "undo", "undo", "stop"]
    assert bad_tensors(script.model) == 0
    assert set(script.bad_saves()) <= {0}
    assert script.schedule.scheduler.last_epoch == 0


def test_a_batch_without_labels_gives_a_nan_loss_and_is_skipped_under_a_guard(
    tmp_path: Path,
) -> None:
    def masked(row: int) -> bool:
        return 8 <= row < 12

    bare = saving(tmp_path / "bare", masked=masked)
    bare.train(None)
    assert [math.isnan(loss) for loss in bare.losses] == [False, False, True, False]
    assert bare.schedule.scheduler.last_epoch == 4
    script = saving(tmp_path / "guarded", masked=masked)
    (incident,) = script.train(quiet()).incidents
    assert (incident.step, incident.findings[0].code) == (2, "SG102")
    assert incident.origin is not None and incident.origin.reproduced
    assert script.schedule.scheduler.last_epoch == 3
    assert script.bad_saves() == [0, 0, 0, 0]


IMPORTS = ("accelerate", "transformers.trainer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks say, by part, in the order of ranks."""
    script = Path(__file__).with_name("rank_worker.py")
    code, log = launch(script, folder, ["frameworks"], 240, imports=IMPORTS)
    assert code == 0, log[-3000:]
    parts = ("accelerate", "trainer")
    return {
        part: [json.loads((folder / f"{part}-{rank}.json").read_text()) for rank in (0, 1)]
        for part in parts
    }


def test_ranks_of_an_accelerate_script_skip_and_name_together(
    said: dict[str, list[dict[str, Any]]],
) -> None:
    first, second = said["accelerate"]
    expected = [{"step": 2, "rank": 1, "micro": 1, "samples": [1], "tensor": "batch:x"}]
    assert first["incidents"] == second["incidents"] == expected
    assert first["bad"] == second["bad"] == 0
    assert first["weights"] == second["weights"]
    assert first["schedule"] == second["schedule"] == 6  # accelerate steps it once a rank


def test_a_save_is_refused_on_all_ranks_if_one_has_bad_state(
    said: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    assert [line["refused"] for line in said["accelerate"]] == [True, True]
    assert not (folder / "state").exists()


def test_ranks_of_a_trainer_skip_name_and_log_together(
    said: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    first, second = said["trainer"]
    assert len(first["incidents"]) == 1
    assert first["incidents"] == second["incidents"]
    (place,) = first["incidents"]
    assert (place["step"], place["rank"], place["tensor"], place["samples"]) == (
        2,
        1,
        "batch:x",
        [1],
    )
    assert first["bad"] == second["bad"] == 0
    assert first["weights"] == second["weights"]
    assert first["schedule"] == second["schedule"] == 5
    assert first["nan"] == second["nan"] == [False, False, True, False, False, False]
    assert (folder / "out" / "checkpoint-6" / "model.safetensors").is_file()
