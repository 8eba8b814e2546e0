"""Saving: a bad state is never written, and rotation leaves the last good checkpoint alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from integrations.trainers import (
    bad_in_checkpoints,
    journal_lines,
    llama,
    numbers,
    quiet,
    regression,
    texts,
    trainer,
)
from stepguard.integrations.transformers import SaveRefused, guard, to_delete


class Spoil(TrainerCallback):
    """Writes a NaN into a weight after one step, unseen by the guard, and heals it later."""

    def __init__(self, spoil: int, heal: int = -1) -> None:
        self._spoil, self._heal = spoil, heal

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self._spoil, self._heal):
            with torch.no_grad():
                kwargs["model"].outer.bias.fill_(
                    math.nan if state.global_step == self._spoil else 0.0
                )


def spoiled(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    return trainer(
        folder,
        regression(),
        numbers(24),
        extra={"callbacks": list(callbacks)},
        save_strategy="steps",
        **settings,
    )


def test_an_unguarded_trainer_writes_the_bad_state(tmp_path: Path) -> None:
    spoiled(tmp_path, Spoil(3), save_steps=1, save_total_limit=2, max_steps=3).train()
    assert bad_in_checkpoints(tmp_path) == {"checkpoint-2": 0, "checkpoint-3": 1}


def test_a_checkpoint_of_a_bad_state_is_refused_and_said(tmp_path: Path) -> None:
    made = spoiled(tmp_path / "out", Spoil(3), save_steps=1, save_total_limit=2, max_steps=3)
    with guard(made, quiet(run_dir=tmp_path / "run")) as watching:
        made.train()
        assert watching.refused_saves == 1
    assert bad_in_checkpoints(tmp_path / "out") == {"checkpoint-1": 0, "checkpoint-2": 0}
    assert watching.last_good == tmp_path / "out" / "checkpoint-2"
    said = [
        line["summary"]
        for line in journal_lines(tmp_path / "run")
        if line.get("kind") == "save-refused"
    ]
    assert len(said) == 1 and "checkpoint-3" in said[0] and "param:outer.bias" in said[0]


def test_save_model_of_a_bad_state_raises_and_writes_nothing(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24), max_steps=2)
    with guard(made, quiet()) as watching:
        made.train()
        made.save_model(str(tmp_path / "good"))
        made.model.outer.bias.data.fill_(math.nan)
        with pytest.raises(SaveRefused, match=r"param:outer\.bias.*last good"):
            made.save_model(str(tmp_path / "bad"))
        assert watching.refused_saves == 1
    assert (tmp_path / "good" / "model.safetensors").is_file()
    assert not (tmp_path / "bad").exists()
    made.save_model(str(tmp_path / "bad"))  # the guard is closed: the user's word counts
    assert (tmp_path / "bad").exists()


def test_save_model_before_any_training_looks_at_the_weights(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24))
    with guard(made, quiet()):
        made.model.inner.weight.data[0, 0] = math.inf
        with pytest.raises(SaveRefused, match=r"param:inner\.weight"):
            made.save_model(str(tmp_path / "bad"))


@pytest.mark.parametrize("limit", [1, 2])
def test_rotation_keeps_the_last_good_checkpoint_where_the_newest_is_ruined(
    tmp_path: Path, limit: int
) -> None:
    """Finite weights that have lost everything are saved before any step has tried them. Nothing is
    done about them unless that was asked for, so that the run goes on with them and saves them
    again.
    """

    class Ruin(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 24:
                with torch.no_grad():
                    kwargs["model"].outer.bias.fill_(1e4)

    settings = {"max_steps": 36, "save_steps": 6, "save_total_limit": limit, "learning_rate": 1e-3}
    made = trainer(
        tmp_path,
        regression(),
        numbers(24),
        extra={"callbacks": [Ruin()]},
        save_strategy="steps",
        **settings,
    )
    unrepaired = quiet(snapshots=0)
    with guard(made, unrepaired) as watching:
        made.train()
    assert list(bad_in_checkpoints(tmp_path)) == ["checkpoint-18", "checkpoint-36"]
    assert watching.last_good == tmp_path / "checkpoint-18"


def test_rotation_keeps_the_checkpoint_a_run_was_resumed_from_until_there_is_a_better_one(
    tmp_path: Path,
) -> None:
    first = trainer(tmp_path, llama(), texts(24), save_strategy="steps", save_steps=2, max_steps=2)
    first.train()
    second = trainer(
        tmp_path, llama(), texts(24), save_strategy="steps", save_total_limit=1, max_steps=4
    )
    with guard(second, quiet()) as watching:
        second.train(resume_from_checkpoint=True)
    assert watching.last_good == tmp_path / "checkpoint-4"
    assert list(bad_in_checkpoints(tmp_path)) == [
        "checkpoint-2",
        "checkpoint-4",
    ]  # the newest is not proven yet


@pytest.mark.parametrize(
    ("keep", "protected", "expected"),
    [
        (2, (), ["a", "b"]),
        (2, ("a",), ["b", "c"]),
        (1, ("a",), ["b", "c"]),
        (1, ("a", "b"), ["c"]),
        (4, ("a",), []),
        (3, ("elsewhere",), ["a"]),
    ],
)
def test_the_oldest_go_first_but_never_what_is_protected_or_newest(
    keep: int, protected: tuple[str, ...], expected: list[str]
) -> None:
    assert to_delete(["a", "b", "c", "d"], keep, {Path(name) for name in protected}) == expected
