"""SG922: what the first batches of a language model teach, in plain loops and in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.silent.catalogue import chosen
from zoo.silent.plant import Plant

import stepguard
from stepguard import GuardConfig
from stepguard.diagnose.engine import silent_findings
from stepguard.journal import read_run
from stepguard.records.probes import TargetFacts

PLANTS = chosen(["SG922"])


def told(plant: Plant, folder: Path, *, wrong: bool) -> list[str]:
    torch.manual_seed(0)
    loop = plant.build(0, wrong=wrong)
    config = GuardConfig(run_dir=folder, terminal="quiet")
    with stepguard.watch(loop.model, loop.optimizer, config=config) as guard:
        for step in range(12):
            loop.step(step)
        assert guard.armed
    notes = read_run(folder).notes
    return [str(note["summary"]) for note in notes if note.get("kind") == "silent"]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda one: one.name)
def test_wrong_targets_are_told_with_numbers_and_the_twin_is_not(
    plant: Plant, tmp_path: Path
) -> None:
    (line,) = told(plant, tmp_path / "wrong", wrong=True)
    assert line.startswith("SG922 ") and " of the first batches " in line
    assert told(plant, tmp_path / "twin", wrong=False) == []


HEALTHY: dict[str, dict[str, Any]] = {
    "a masked language model": {"ended": 64, "unlike": 40},
    "another token ends every row": {"ended": 64, "same_last": True},
    "one end among the targets": {"ended": 64, "ends": 1},
    "running text": {"unended": 64},
    "cut answers": {"prompted": 64, "unended": 20},
    "first padding token taught": {"padding": 300, "padding_targets": 64, "padded_rows": 64},
}


@pytest.mark.parametrize("counts", HEALTHY.values(), ids=HEALTHY)
def test_healthy_targets_are_not_told(counts: dict[str, Any]) -> None:
    targets = TargetFacts(rows=64, targets=640, end=1, pad=0, **counts)
    assert silent_findings([], [], targets=targets) == ()


def test_id_zero_is_a_token_like_others() -> None:
    targets = TargetFacts(rows=64, targets=640, end=0, pad=0, ended=64)
    (found,) = silent_findings([], [], targets=targets)
    assert "end token (id 0)" in found.evidence[0]
    assert "same id" in found.evidence[1]


@pytest.mark.slow
def test_labels_are_seen_in_the_trainer(tmp_path: Path) -> None:
    """It hands the batch over by itself: no call of the model is looked at."""
    transformers = pytest.importorskip("transformers")
    from stepguard.integrations.transformers import guard

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=1, vocab_size=40, n_positions=16, eos_token_id=1, pad_token_id=1
    )
    rows = [
        torch.cat([torch.randint(2, 40, (5 + row % 6,)), torch.ones(1).long()]) for row in range(64)
    ]

    def collate(given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=1)
        lengths = torch.tensor([[len(one)] for one in given])
        mask = (torch.arange(ids.shape[1]) < lengths).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 1, -100)}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=12,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=rows,
        data_collator=collate,
    )
    guard(trainer, config=GuardConfig(run_dir=tmp_path / "run", terminal="quiet"))
    trainer.train()
    notes = read_run(tmp_path / "run").notes
    (only,) = [str(note["code"]) for note in notes if note.get("kind") == "silent"]
    assert only == "SG922"
