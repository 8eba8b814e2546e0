"""The launcher: its file, and the environment it leaves for the script."""

from __future__ import annotations

from stepguard.check.settings import as_number, read_launcher


def test_environment_of_the_launcher_wins_and_the_conflict_is_told() -> None:
    environment = {"ACCELERATE_MIXED_PRECISION": "fp16", "WORLD_SIZE": "4"}
    found = read_launcher({"mixed_precision": "bf16"}, "launch.yaml", environment)
    assert (found.dtype, as_number(found.values["num_processes"])) == ("float16", 4)
    assert found.conflicts == [
        "launch.yaml says mixed_precision=bf16, the environment ACCELERATE_MIXED_PRECISION=fp16",
    ]


def test_value_says_where_it_comes_from() -> None:
    found = read_launcher({"num_processes": 8, "other": 1}, "launch.yaml", {})
    assert found.said["num_processes"] == "num_processes=8 in launch.yaml"
    assert found.dtype is None and "other" not in found.values
    assert not read_launcher({}, "launcher", {"CUDA_VISIBLE_DEVICES": ""}).values
