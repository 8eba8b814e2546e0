"""DeepSpeed's ZeRO stages 1 to 3 on two gloo ranks, with engines as people build them."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.launch import of_all, on_ranks
from stepguard import ConfigError, GuardConfig, Policy, SaveRefused, TrainingHalted

KEEPS_GROUP = True
FEATURES, BATCH, STEPS, BAD_STEP, BAD_ROW = 8, 4, 6, 3, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]


def find_deepspeed() -> Any:
    """In the ranks only: accelerate imports it wherever it finds it. `make venv` puts it there."""
    sys.path.append(str(Path(sys.prefix, "deepspeed", "site-packages")))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # or DeepSpeed compiles its reduction over shared memory, which gloo does as well
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Net(nn.Module):
    """Keeps a running mean, which a step that is passed over must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0).to(self.mean.dtype), 0.1)
        return self.last(hidden)


class Training:
    """An engine, its data, and a loop over them."""

    def __init__(self, stage: int, dtype: str, *, parts: int = 1, **more: Any) -> None:
        deepspeed = find_deepspeed()
        deepspeed.init_distributed("gloo")
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": parts,
            "zero_optimization": {"stage": stage, **more.pop("zero", {})},
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            **more,
        }
        if dtype != "fp32":
            settings[dtype] = {"enabled": True, **settings.get(dtype, {})}
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, lr_scheduler=self.schedule
        )
        self.dtype, self.parts = DTYPES[dtype], parts
        self.source = torch.Generator().manual_seed(dist.get_rank())
        self.guard: Any = None

    def guarded(self, **settings: Any) -> Any:
        from stepguard.integrations.deepspeed import guard

        self.guard = guard(self.engine, GuardConfig(terminal="quiet", **settings))
        return self.guard

    def loss_fn(self, batch: dict[str, Tensor]) -> Tensor:
        predicted = self.engine(batch["x"].to(self.dtype)).float()
        distance = (predicted - batch["y"]).square().mean()
        return distance + (predicted - predicted.detach() + batch["gap"]).sqrt().mean()

    def step(self, **changed: Any) -> None:
        """`changed`: what rank 1 writes into row BAD_ROW of the last micro-batch."""
        for part in range(self.parts):
            batch = {
                "x": torch.randn(BATCH, FEATURES, generator=self.source),
                "y": torch.randn(BATCH, 1, generator=self.source),
                "gap": torch.ones(BATCH, 1),
            }
            if dist.get_rank() == 1 and part == self.parts - 1:
                for name, value in changed.items():
                    batch[name][BAD_ROW] = value
            whole = (
                self.loss_fn(batch) if self.guard is None else self.guard.loss(self.loss_fn, batch)
            )
            self.engine.backward(whole)
            self.engine.step()

    def run(self, steps: int = STEPS) -> Training:
        for _ in range(steps):
            self.step()
        return self

    def state(self, *, buffers: bool = True) -> list[Tensor]:
        """Weights, buffers, and this rank's part of masters and moments."""
        from stepguard.integrations.deepspeed import parts_held

        engine, zero = self.engine, self.engine.optimizer
        found = [part.detach().clone() for _, part in parts_held(engine)]
        if buffers:
            found += [buffer.clone() for buffer in engine.module.buffers()]
        for slots in zero.optimizer.state.values():
            found += [value.clone() for value in slots.values() if isinstance(value, Tensor)]
        return found


def equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@on_ranks(2)
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_healthy_run_is_bit_equal(stage: int, dtype: str) -> None:
    bare = Training(stage, dtype, parts=2).run()
    training = Training(stage, dtype, parts=2)
    with training.guarded() as guard:
        training.run()
        assert guard.incidents == ()
    assert equal(bare.state(), training.state())
    assert training.engine.skipped_steps == 0
    assert "step" not in vars(training.engine) and "step" not in vars(training.engine.optimizer)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_bad_row_is_located_and_no_rank_updates(stage: int, dtype: str) -> None:
    training = Training(stage, dtype, parts=2)
    with training.guarded() as guard:
        training.run(BAD_STEP)
        before, rate = training.state(), training.schedule.get_last_lr()
        training.step(x=math.nan)
        assert equal(before, training.state())
        assert training.schedule.get_last_lr() == rate
        (incident,) = guard.incidents
        training.run(2)
        assert not equal(before, training.state()) and len(guard.incidents) == 1
    origin = incident.origin
    assert (incident.step, incident.verdict.kind) == (BAD_STEP, "nonfinite_input")
    assert (origin.module, origin.tensor, origin.rank) == ("first", "batch:x", 1)
    assert (origin.samples, origin.micro_batch) == ((BAD_ROW,), 1)
    assert origin.source is not None and "test_deepspeed.py" in origin.source
    assert incident.findings[0].code == "SG101"
    assert incident.decision.action == "skip"
    assert (
        of_all((incident.verdict, incident.decision)) == [(incident.verdict, incident.decision)] * 2
    )


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradient_that_is_bad_under_a_finite_loss_is_traced_to_its_rank(stage: int) -> None:
    training = Training(stage, "fp32")
    with training.guarded() as guard:
        training.run(1)
        before = training.state()
        training.step(gap=0.0)
        assert equal(before, training.state())
        (incident,) = guard.incidents
    assert incident.verdict.kind == "nonfinite_gradient"
    assert (incident.origin.phase, incident.origin.rank) == ("backward", 1)
    assert incident.findings[0].code == "SG401"
    assert "last.weight" in incident.reading.bad_grads


@on_ranks(2)
def test_bad_step_without_a_loss_function_is_passed_over_too() -> None:
    training = Training(2, "bf16")
    guard, training.guard = training.guarded(), None
    with guard:
        training.run(1)
        before = training.state()
        training.step(x=math.nan)
        assert equal(before, training.state())
        assert guard.incidents[0].reading.bad_ranks == (1,)


def spoil(training: Training) -> None:
    """One NaN in the weights that rank 1 holds."""
    if dist.get_rank() == 1:
        weight = training.engine.module.last.weight
        getattr(weight, "ds_tensor", weight).data.view(-1)[0] = math.nan


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoint_of_a_bad_state_is_refused_on_all_ranks(stage: int, folder: Path) -> None:
    training = Training(stage, "fp32")
    with training.guarded():
        training.run(1)
        training.engine.save_checkpoint(str(folder), tag="good")
        spoil(training)
        with pytest.raises(SaveRefused, match=r"param:last\.weight"):
            training.engine.save_checkpoint(str(folder), tag="bad")
    assert (folder / "latest").read_text() == "good"
    assert not (folder / "bad").exists()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_damaged_weights_are_rewound_to_the_last_checkpoint(stage: int, folder: Path) -> None:
    # stage 3 computes with whole copies of small parameters, unless it is told not to
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    training = Training(stage, "fp32", zero=zero)
    with training.guarded() as guard:
        training.run(2)
        training.engine.save_checkpoint(str(folder))
        saved = training.state(buffers=False)  # DeepSpeed keeps those of the first rank
        training.run(2)
        spoil(training)
        training.step()
        assert equal(saved, training.state(buffers=False))
        (incident,) = guard.incidents
        assert (incident.decision.action, incident.decision.rewound_to) == ("rewind", 2)
        assert training.engine.global_steps == 2
        training.run(1)
        assert len(guard.incidents) == 1


@on_ranks(2)
def test_damaged_weights_without_a_checkpoint_stop_all_ranks() -> None:
    training = Training(1, "fp32")
    with training.guarded():
        training.run(1)
        spoil(training)
        with pytest.raises(TrainingHalted) as halted:
            training.step()
    decision = halted.value.incident.decision
    assert "saved no checkpoint through engine.save_checkpoint" in decision.reason
    assert halted.value.restart == "change-code"


@on_ranks(2)
def test_policy_stops_a_run_of_bad_steps() -> None:
    training = Training(3, "fp32")
    with training.guarded(policy=Policy(max_consecutive=1)) as guard:
        training.step(x=math.nan)
        with pytest.raises(TrainingHalted):
            training.step(x=math.nan)
        assert len(guard.incidents) == 2


@contextmanager
def float16_on_the_cpu() -> Iterator[None]:
    """DeepSpeed asks the processor for AVX512-FP16; torch computes without it, only slower."""
    find_deepspeed()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_overflow_is_calibration_and_a_bad_loss_is_not(stage: int, folder: Path) -> None:
    with float16_on_the_cpu():
        training = Training(stage, "fp16", fp16={"initial_scale_power": 24, "hysteresis": 1})
    with training.guarded(run_dir=folder) as guard:
        while training.engine.skipped_steps == training.engine.global_steps:
            training.step()
        skipped, scale = training.engine.skipped_steps, training.engine.optimizer.loss_scale
        assert skipped and guard.incidents == ()
        training.step(x=math.nan)
        assert training.engine.optimizer.loss_scale == scale
        assert guard.incidents[0].findings[0].code == "SG101"
    notes = [path.read_text() for path in folder.glob("journal*.jsonl")]
    assert all(
        told.count("DeepSpeed skipped the update (skipped_steps: ") == skipped for told in notes
    )


@on_ranks(2)
def test_what_cannot_be_guarded_is_refused() -> None:
    find_deepspeed()
    from stepguard.integrations.deepspeed import guard

    with pytest.raises(ConfigError, match="give the DeepSpeedEngine"):
        guard(Net())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ZeRO stages 1, 2 and 3"):
        guard(Training(0, "fp32").engine)
    with pytest.raises(ConfigError, match="clip_norm"):
        guard(Training(1, "fp32").engine, GuardConfig(clip_norm=1.0))


# --- frameworks that build the engine: two micro-batches a step, of which rank 1 may get a bad row

ROW = 2 * 2 * BATCH + 3 * BATCH + BAD_ROW
"""Of the last micro-batch of rank 1 in step 1."""


def zero(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }


@functools.cache
def find_frameworks() -> None:
    """They look for DeepSpeed once, when they are imported, and this process may be a fork."""
    find_deepspeed()
    for name in list(sys.modules):
        if name.split(".")[0] in ("accelerate", "transformers"):
            del sys.modules[name]


@contextmanager
def own_process() -> Iterator[None]:
    """accelerate and transformers keep the settings of an engine for the whole process."""
    find_frameworks()
    from accelerate.state import AcceleratorState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from integrations.trainers import same_environment

    with same_environment():
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        try:
            PartialState(backend="gloo")  # by itself accelerate takes no ranks without a GPU
            yield
        finally:
            unset_hf_deepspeed_config()
            AcceleratorState._reset_state()
            PartialState._reset_state()


def weights(engine: Any) -> list[Tensor]:
    from stepguard.integrations.deepspeed import parts_held

    return [part.detach().clone() for _, part in parts_held(engine)]


def trained(folder: Path, stage: int, *, bad: bool, guarded: bool) -> tuple[Any, Any, list[Tensor]]:
    """A Trainer after three steps, its guard, and the weights."""
    with own_process():
        from integrations.trainers import numbers, quiet, regression, trainer
        from stepguard.integrations.transformers import guard

        made = trainer(
            folder,
            regression(),
            numbers(3 * 2 * 2 * BATCH, nan_at=ROW if bad else None),
            deepspeed=zero(stage),
            use_cpu=False,  # with it accelerate takes no engine
            accelerator_config={"use_configured_state": True},
            gradient_accumulation_steps=2,
            max_steps=3,
            max_grad_norm=1.0,
            save_strategy="steps" if bad else "no",
            save_steps=1,
        )
        watching = guard(made, quiet()) if guarded else None
        made.train()
        found = weights(made.deepspeed)
        if watching is not None and bad:
            made.deepspeed.module.outer.bias.data.fill_(math.nan)
            with pytest.raises(SaveRefused, match=r"outer\.bias"):
                made.save_model(str(folder / "refused"))
        return made, watching, found


@on_ranks(2)
def test_trainer_hands_its_engine_over(folder: Path) -> None:
    *_, bare = trained(folder, 2, bad=False, guarded=False)
    _, watching, healthy = trained(folder, 2, bad=False, guarded=True)
    assert equal(bare, healthy) and watching.incidents == ()
    made, watching, found = trained(folder, 2, bad=True, guarded=True)
    (incident,) = watching.incidents
    origin = incident.origin
    assert (incident.step, incident.findings[0].code) == (1, "SG101")
    assert (origin.module, origin.tensor, origin.rank) == ("inner", "batch:x", 1)
    assert (origin.samples, origin.micro_batch) == ((BAD_ROW,), 1)
    assert all(bool(torch.isfinite(part).all()) for part in found)
    assert made.deepspeed.skipped_steps == 1
    assert made.lr_scheduler.last_epoch == 2
    saved = {path.name for path in folder.glob("checkpoint-*")}
    assert saved == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert not (folder / "refused").exists()
    assert [math.isnan(line["loss"]) for line in made.state.log_history if "loss" in line] == [
        False,
        True,
        False,
    ]


@on_ranks(2)
def test_accelerate_hands_its_engine_over(folder: Path) -> None:
    with own_process():
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        from integrations.trainers import numbers, quiet, regression
        from stepguard.integrations.accelerate import guard

        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero(3)), gradient_accumulation_steps=2
        )
        model = regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(
            numbers(3 * 2 * 2 * BATCH, nan_at=ROW),  # type: ignore[arg-type]
            batch_size=BATCH,
        )
        engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        skipped = []
        with guard(accelerator, quiet()) as watching:
            for batch in loader:
                with accelerator.accumulate(engine):
                    loss = watching.loss(lambda batch: engine(**batch)["loss"], batch)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                skipped.append(optimizer.step_was_skipped)
            (incident,) = watching.incidents
            assert incident.origin.samples == (BAD_ROW,) and incident.origin.rank == 1
            assert (incident.step, incident.origin.micro_batch) == (1, 1)
            assert skipped == [False, False, False, True, True, False]
            accelerator.save_state(str(folder / "good"))
            if accelerator.process_index == 1:
                engine.module.outer.weight.ds_tensor.data.fill_(math.nan)
            with pytest.raises(SaveRefused, match=r"outer\.weight"):
                accelerator.save_state(str(folder / "bad"))
        assert (folder / "good").exists() and not (folder / "bad").exists()
