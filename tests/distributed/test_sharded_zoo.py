"""Failures of the zoo under FSDP2 on two real processes: the place is that of one process.

All ranks gather the model by one plan, and the rank to blame replays alone. Of its failures 13
cannot run under FSDP2 at all; `sharded_zoo_worker.py OUT all` runs the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch

WORKER = Path(__file__).with_name("sharded_zoo_worker.py")
CASES = [
    "bbox_log_of_bad_annotation",
    "ce_all_labels_ignored",
    "dora_zero_weight_row",
    "focal_loss_pow_gradient",
    "log_of_softmax_underflow",
    "mha_all_keys_masked",
    "spectrogram_sqrt_of_silence",
    "transient_inf_absorbed_forward",
    # its bad gradient is in the part of the other rank
    "where_exp_unselected_branch",
    # a norm that overflows, and an update that makes NaN: told without a collective of one rank
    "clip_grad_norm_inf_to_nan",
    "adagrad_without_epsilon",
    "nan_rate_under_adam",
    # what the forward wrote, and what it reads
    "batch_norm_variance_overflows",
    "bn_running_var_nan_in_checkpoint",
    # a counter of a module that FSDP2 has given another class
    "temperature_annealed_by_a_counter",
]
PLACE = ("step", "phase", "module", "op", "node", "tensor", "samples", "micro_batch", "source")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every case, run by one pair of processes; what each rank was told."""
    out = tmp_path_factory.mktemp("zoo")
    code, log = launch(WORKER, out, CASES, 150)
    assert code == 0, log[-3000:]
    return {
        name: [torch.load(out / f"{name}.{rank}.pt", weights_only=False) for rank in (0, 1)]
        for name in CASES
    }


@pytest.mark.parametrize("name", CASES)
def test_failure_of_a_sharded_model_is_located_as_on_one_process(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[name]:
        alone, sharded = rank["alone"], rank["sharded"]
        assert "error" not in alone and "error" not in sharded
        assert alone["told"]["step"] is not None
        for field in PLACE:
            assert sharded["told"][field] == alone["told"][field], field
        assert sharded["told"]["findings"][:1] == alone["told"]["findings"][:1]
        assert sharded["finite"] or alone["halted"]
