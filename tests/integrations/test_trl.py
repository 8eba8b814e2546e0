"""TRL's trainers under `guard(trainer)`: healthy runs stay as they are, wrong signals are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from integrations.trainers import arguments, llama, quiet, words
from stepguard.integrations.transformers import guard
from stepguard.journal import read_run

# trl's own imports and trainers warn of what they will change one day
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, STEPS = 32, 4
GROUPS = {"num_generations": 4, "max_completion_length": 4}


def many_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def word(number: int) -> str:
    return f"w{2 + number % 28}"


def rows_of(kind: str) -> Dataset:
    prompts = [f"{word(i)} {word(2 * i)}" for i in range(ROWS)]
    good, bad = ([f"{word(i + shift)} {word(i)}" for i in range(ROWS)] for shift in (3, 11))
    if kind in ("GRPO", "RLOO"):
        return Dataset.from_dict({"prompt": prompts})
    if kind == "KTO":
        labels = [i % 2 == 0 for i in range(ROWS)]
        return Dataset.from_dict({"prompt": prompts, "completion": good, "label": labels})
    if kind == "DPO":
        return Dataset.from_dict({"prompt": prompts, "chosen": good, "rejected": bad})
    if kind == "Reward":
        return Dataset.from_dict({"chosen": good, "rejected": bad})
    return Dataset.from_dict({"text": good})


def made(kind: str, folder: Path, model: Any = None, reward: Any = None, **settings: Any) -> Any:
    """A trainer of TRL on a model that lies in a folder: references are read from there."""
    import trl

    place = folder / "model"
    if model is None:
        model = llama()
    model.save_pretrained(place)
    if kind == "Reward":
        torch.manual_seed(0)
        config = model.config
        config.num_labels, config.pad_token_id = 1, 0
        model = LlamaForSequenceClassification(config)
    else:
        model = LlamaForCausalLM.from_pretrained(place)
    given = arguments(folder / "out", **{"max_steps": STEPS, "bf16": False, **settings})
    more: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        given |= GROUPS
        more = {"reward_funcs": reward or many_words}
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**given),
        train_dataset=rows_of(kind),
        processing_class=words(),
        **more,
    )


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def reported(folder: Path, code: str) -> list[str]:
    notes = read_run(folder / "run").notes
    return [str(note["summary"]) for note in notes if note.get("code") == code]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "RLOO", "GRPO", "Reward"])
def test_healthy_run_is_bit_equal_and_nothing_is_reported(kind: str, tmp_path: Path) -> None:
    beta = {"beta": 0.04} if kind in ("GRPO", "RLOO") else {}
    bare = made(kind, tmp_path / "bare", **beta)
    bare.train()
    trainer = made(kind, tmp_path / "guarded", **beta)
    with guard(trainer, quiet(run_dir=tmp_path / "run")) as watching:
        trainer.train()
        assert watching.incidents == ()
    assert all(map(torch.equal, weights(bare), weights(trainer)))
    assert reported(tmp_path, "SG926") == []
    if beta:
        steps = read_run(tmp_path / "run").steps
        assert "frac_reward_zero_std" in steps[-1]["followed"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RLOO", "GRPO"])
def test_reward_that_is_always_the_same_is_reported(kind: str, tmp_path: Path) -> None:
    trainer = made(kind, tmp_path, reward=always_one, max_steps=9)
    with guard(trainer, quiet(run_dir=tmp_path / "run")):
        trainer.train()
    (line,) = reported(tmp_path, "SG926")
    assert "all completions of a prompt got the same reward in 8 batches in a row" in line
    assert "the mean reward is 1" in line


def with_dropout(share: float) -> LlamaForCausalLM:
    """A policy that is sure of what it says, so that dropout changes its ratios."""
    model = llama(attention_dropout=share)
    with torch.no_grad():
        model.lm_head.weight.mul_(100.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(50.0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("share", "lines"), [(0.0, 0), (0.5, 1)])
def test_ratio_that_is_not_one_before_the_first_update_is_reported(
    share: float, lines: int, tmp_path: Path
) -> None:
    model = with_dropout(share)
    trainer = made("GRPO", tmp_path, model=model, num_iterations=2, max_steps=8, learning_rate=1e-5)
    with guard(trainer, quiet(run_dir=tmp_path / "run")):
        trainer.train()
    found = reported(tmp_path, "SG926")
    assert len(found) == lines
    assert all("clipped before the first update on their batch" in line for line in found)
