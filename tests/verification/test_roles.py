"""What a stored value is for, by structure and by name."""

from __future__ import annotations

import pytest

from stepguard.check import scan as names


@pytest.mark.parametrize(
    ("key", "role"),
    [
        ("optimizer_state_dict", "optimizer"),
        ("lr_schedulers", "scheduler"),
        ("grad_scaler", "scaler"),
        ("model_ema.block.weight", "ema"),
        ("torch_rng_state", "rng"),
        ("hyper_parameters", "other"),
        ("model", None),
        ("system.weight", None),
        (3, None),
    ],
)
def test_part_is_told_by_its_name(key: object, role: str | None) -> None:
    assert names.role_of_part(key) == role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("optimizer.pt", "optimizer"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "optimizer"),
        ("rng_state_0.pth", "rng"),
        ("scheduler.bin", "scheduler"),
        ("training_args.bin", "other"),
        ("model.safetensors", None),
    ],
)
def test_file_is_told_by_its_name(name: str, role: str | None) -> None:
    assert names.role_of_file(name) == role


def test_states_are_told_by_their_keys() -> None:
    assert names.structural({"state": {}, "param_groups": []}) == "optimizer"
    assert names.structural({"last_epoch": 1, "_last_lr": [0.1]}) == "scheduler"
    assert names.structural({"growth_factor": 2.0, "backoff_factor": 0.5}) == "scaler"
    assert names.structural({"last_epoch": 1}) is None


def test_tensor_of_a_model_is_a_parameter_unless_it_looks_like_a_buffer() -> None:
    assert names.role_of_tensor(None, "fc.weight", "float32") == "parameter"
    assert names.role_of_tensor(None, "bn.running_var", "float32") == "buffer"
    assert names.role_of_tensor(None, "steps", "int64") == "buffer"
    assert names.role_of_tensor("ema", "bn.running_var", "float32") == "ema"
