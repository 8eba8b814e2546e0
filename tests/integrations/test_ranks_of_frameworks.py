"""Two gloo ranks under `torchrun`, in accelerate and in a Trainer: they skip, name and refuse
together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.launch import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks say, by part, in the order of ranks."""
    script = Path(__file__).with_name("framework_ranks.py")
    code, log = launch(script, folder, [], 240, imports=("accelerate", "transformers.trainer"))
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
