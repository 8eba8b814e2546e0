"""Before the first step: the state of the run from its live objects, and whether its data can be
learned from.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from stepguard.check.preflight import Subject, check
from stepguard.records.checks import Preflight
from stepguard.state.rng import kept_rng

LOOKED_AT = ("labels", "data", "precision", "scaler", "optimizer")


def subject(trainer: Trainer, config: Any, eos: int) -> Subject:
    """Everything the checks look at; what `build` gives to `stepguard check` too."""
    asked = {**trainer.args.to_dict(), "max_length": config.data.max_length, "eos_token_id": eos}
    if not (trainer.args.fp16 or trainer.args.bf16):
        asked["mixed_precision"] = config.model.torch_dtype  # without autocast the weights decide
    dataset: Any = trainer.train_dataset
    with kept_rng():
        batch = trainer.data_collator([dataset[index] for index in range(min(2, len(dataset)))])
    # the optimizer that the Trainer would make, made here and taken back
    before = trainer.optimizer
    optimizer = before or trainer.create_optimizer()
    trainer.optimizer = before
    return Subject(
        model=trainer.model,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        dataset=dataset,
        batch=batch,
        validation=trainer.eval_dataset,
        autocast=trainer.accelerator,
        label_key="labels",
        config=asked,
    )


def status_report(trainer: Trainer, found: Preflight) -> tuple[str, bool]:
    """What is switched on, read from the Trainer, and what the checks say against it."""
    accelerator, aligned = trainer.accelerator, found.alignment == "aligned"
    facts = dict(found.facts)
    failed, warned = found.of("fail"), found.of("warn")
    lines = [
        "=== Current Configuration ===",
        f"AMP enabled: {facts.get('AMP enabled', 'not probed')}",
        f"FP16 enabled: {facts.get('FP16 enabled', 'not probed')}",
        f"Learning rate: {facts.get('learning rate', trainer.args.learning_rate)}",
        "=== Accelerate Configuration ===",
        f"Mixed precision: {accelerator.mixed_precision}",
        f"Distributed type: {accelerator.distributed_type.value}",
        f"GPU IDs: {', '.join(map(str, range(torch.accelerator.device_count()))) or 'none'}",
        "=== Configuration Status ===",
        "Configuration is properly aligned" if aligned else "Configuration is NOT aligned",
        *(f"   {why}" for why in found.alignment_why),
    ]
    for outcome in (*failed, *warned):
        lines.append(f"   {outcome.status} {outcome.id}: {'; '.join(outcome.evidence)}")
        lines += [f"      {outcome.fix}"] if outcome.fix else []
    return "\n".join(lines), aligned and not failed


def looked_at(trainer: Trainer, config: Any, eos: int) -> tuple[str, bool]:
    """The report, and whether a run may begin."""
    return status_report(trainer, check(subject(trainer, config, eos), only=LOOKED_AT))
