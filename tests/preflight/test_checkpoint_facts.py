"""Shapes, configuration and versions from checkpoints of every layout, without running them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import save_file

from stepguard.check.inspection import read_checkpoint_facts

WEIGHTS = {"head.weight": torch.ones(3, 2)}


def test_file_with_state_configuration_and_versions_is_read(tmp_path: Path) -> None:
    content = {
        "state_dict": WEIGHTS,
        "hyper_parameters": Namespace(lr=0.1, layers=[1, 2], path=Path("x")),
        "versions": {"torch": "2.0"},
    }
    torch.save(content, tmp_path / "last.ckpt")
    facts = read_checkpoint_facts(tmp_path / "last.ckpt")
    assert facts.shapes == {"head.weight": (3, 2)}
    assert facts.config == {"lr": 0.1, "layers": [1, 2]}
    assert facts.versions == {"torch": "2.0"}


def test_bare_state_is_the_model(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "a.pt")
    assert read_checkpoint_facts(tmp_path / "a.pt").shapes == {"head.weight": (3, 2)}


def test_folder_gives_the_shapes_of_its_model_files_only(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    torch.save({"state": torch.ones(9)}, tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "training_args.json").write_text('{"lr": 0.1}')
    facts = read_checkpoint_facts(tmp_path)
    assert facts.shapes == {"head.weight": (3, 2)}
    assert facts.config == {"lr": 0.1}


def test_sealed_checkpoint_gives_the_model_among_all_tensors(tmp_path: Path) -> None:
    save_file({"model/w": torch.ones(2), "rng/0": torch.ones(4)}, tmp_path / "a.safetensors")
    (tmp_path / "facts.json").write_text(json.dumps({"versions": {"torch": "2.0"}}))
    facts = read_checkpoint_facts(tmp_path)
    assert (facts.shapes, facts.versions) == ({"w": (2,)}, {"torch": "2.0"})


def test_damaged_files_are_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"rubbish")
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 64)
    facts = read_checkpoint_facts(tmp_path)
    assert [line.partition(":")[0] for line in facts.unread] == ["a.pt", "b.safetensors"]


def test_configuration_that_hydra_keeps_beside_a_checkpoint_is_found(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("optim:\n  lr: 0.1\n")
    torch.save(WEIGHTS, tmp_path / "a.pt")
    assert read_checkpoint_facts(tmp_path / "a.pt").config == {"optim": {"lr": 0.1}}
