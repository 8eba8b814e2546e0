"""SG927: weights that a file was meant to fill, and weights that are no longer tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stepguard
from cli.scripts import HEAD, stepguard_in, write
from stepguard import GuardConfig
from stepguard.journal import read_run

transformers = pytest.importorskip("transformers")


def reported(
    model: nn.Module, folder: Path, load: Callable[[], object], *, ids: bool = False
) -> list[str]:
    """What is reported in eight steps after a load."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    config = GuardConfig(run_dir=folder, terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        load()
        for _ in range(8):
            optimizer.zero_grad()
            if ids:
                batch = torch.randint(0, 40, (4, 6))
                loss = model(input_ids=batch, labels=batch).loss
            else:
                loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            optimizer.step()
    notes = read_run(folder).notes
    return [str(note["summary"]) for note in notes if note.get("kind") == "silent"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def saved(prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in net().state_dict().items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.encoder."])
def test_names_with_another_prefix_load_nothing(tmp_path: Path, prefix: str) -> None:
    model = net()
    (line,) = reported(model, tmp_path, lambda: model.load_state_dict(saved(prefix), strict=False))
    assert "did not fill: 4; the file has" in line
    assert f"the file has `0.weight` as `{prefix}0.weight`" in line


def test_part_of_a_model_that_was_loaded_under_another_name(tmp_path: Path) -> None:
    model = nn.Sequential(net(), nn.Linear(4, 4))
    (line,) = reported(model, tmp_path, lambda: model[0].load_state_dict(saved("0."), strict=False))
    assert "the file has `0.0.weight` as `0.0.weight`" in line


def test_frozen_weights_that_no_file_has_filled(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    head = {name: value for name, value in saved().items() if name.startswith("2.")}
    (line,) = reported(model, tmp_path, lambda: model.load_state_dict(head, strict=False))
    assert "not trained: 2 (0.weight, 0.bias)" in line


HEALTHY: dict[str, Callable[[nn.Module], object]] = {
    "a whole file": lambda model: model.load_state_dict(saved()),
    "a new head": lambda model: model.load_state_dict(
        {name: value for name, value in saved().items() if name.startswith("0.")}, strict=False
    ),
    "a second load that fits": lambda model: (
        model.load_state_dict(saved("module."), strict=False),
        model.load_state_dict(saved()),
    ),
    "weights of another model": lambda model: model.load_state_dict(
        {"encoder.embedding": torch.zeros(3)}, strict=False
    ),
}


@pytest.mark.parametrize("load", HEALTHY.values(), ids=HEALTHY)
def test_healthy_loads_are_not_reported(
    tmp_path: Path, load: Callable[[nn.Module], object]
) -> None:
    model = net()
    assert reported(model, tmp_path, lambda: load(model)) == []


def language_model(*, tied: bool) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    config = transformers.LlamaConfig(num_attention_heads=2, tie_word_embeddings=tied, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_an_output_layer_that_left_its_embedding_is_reported(tmp_path: Path) -> None:
    model = language_model(tied=True)
    model.lm_head = nn.Linear(16, 40, bias=False)
    (line,) = reported(model, tmp_path, lambda: None, ids=True)
    assert "ties `lm_head.weight` to `model.embed_tokens.weight`, but they are two" in line


@pytest.mark.parametrize("tied", [True, False])
def test_models_as_they_are_made_are_not_reported(tmp_path: Path, tied: bool) -> None:
    assert reported(language_model(tied=tied), tmp_path, lambda: None, ids=True) == []


def test_a_script_that_loads_before_it_makes_an_optimizer(tmp_path: Path) -> None:
    script = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
saved = {f"module.{name}": value for name, value in model.state_dict().items()}
model.load_state_dict(saved, strict=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""
    write(tmp_path, HEAD + script)
    done = stepguard_in(tmp_path, "run", "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "SG927 weights that were not loaded, or are not tied" in done.stderr


class Speaker(nn.Module):
    """A language model with an embedding, an output layer and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.classes = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.head(x + self.embedding.weight.mean(0))
        return self.classes(words)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("missing", "count"), [("head", 1), ("classes", 0)])
def test_output_layer_that_the_file_has_only_as_an_embedding(
    tmp_path: Path, missing: str, count: int
) -> None:
    model = Speaker()
    state = {k: v.clone() for k, v in Speaker().state_dict().items() if not k.startswith(missing)}
    found = reported(model, tmp_path, lambda: model.load_state_dict(state, strict=False))
    assert len(found) == count
    if found:
        assert "did not fill `head.weight`; it filled `embedding.weight`" in found[0]
