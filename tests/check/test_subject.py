"""What `check` takes: build functions, targets, configurations; and it leaves them as they were."""

from __future__ import annotations

import copy
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stepguard
from check.asking import CONFIG, PROJECT, ask, inside, written
from house.fresh import FRAMEWORKS, HEAVY, run_code
from stepguard import ConfigError
from stepguard.check.inspection import read_checkpoint_facts
from stepguard.check.preflight import Subject, check, resolve, selected
from stepguard.check.settings import (
    Tracked,
    as_number,
    configured_rate,
    find,
    flat,
    number,
    plain,
    read_launcher,
    read_settings,
    unread,
    wanted,
)
from stepguard.check.subject import subject_of

MODEL = nn.Linear(2, 2)
FILE = PROJECT / "config.json"

# --- A Subject from whatever a build function returns.


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, "build returned a NoneType; return a dict, a stepguard.check.preflight.Subject"),
        ((1, 2), "build returned a tuple of 2"),
        ({"modell": MODEL}, "the key 'modell', which is not known; use model, optimizer"),
        ({"model": "x"}, "build: model is a str, not a Module"),
        ((MODEL, abs), "optimizer is a builtin_function_or_method, not a Optimizer"),
        ({"model": MODEL, "optimizer": "x"}, "build: optimizer is a str, not a Optimizer"),
        ({"loss_fn": 3}, "build: loss_fn is a int; give a function of a batch"),
    ],
)
def test_unusable_result_of_a_build_function_is_one_clear_error(built: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        subject_of(built, "build")
    assert message in str(error.value)


def test_a_tuple_is_model_optimizer_loss_and_loader_or_model_and_inputs() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    wrapped = type("AcceleratedOptimizer", (), {"optimizer": optimizer})()
    found = subject_of((MODEL, wrapped, abs), "build")
    assert found == Subject(model=MODEL, optimizer=optimizer, loss_fn=abs)
    inputs = (torch.ones(1, 2),)
    assert subject_of((MODEL, inputs), "build") == Subject(model=MODEL, batch=inputs)
    same = [subject_of(one, "build") for one in (MODEL, {"model": MODEL}, Subject(model=MODEL))]
    assert same == [Subject(model=MODEL)] * 3


@pytest.mark.parametrize("in_a_dict", [False, True])
def test_a_guard_is_taken_with_the_objects_it_was_made_for(in_a_dict: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    settings = stepguard.GuardConfig(clip_norm=0.5, terminal="quiet")
    with stepguard.Guard(model, optimizer, scheduler=schedule, config=settings) as guard:
        subject = subject_of({"model": model, "guard": guard} if in_a_dict else guard, "build")
        assert subject == Subject(model=model, optimizer=optimizer, scheduler=schedule, guard=guard)
        result = check(subject, only=["checklist"])
    judged = {name: result.outcome(f"checklist.{name}") for name in ("clip", "recovery", "norms")}
    assert {outcome.status for outcome in judged.values()} == {"pass"}
    assert judged["clip"].evidence == ("GuardConfig.clip_norm=0.5",)
    assert "the returned `guard`" in judged["norms"].evidence[0]


# --- TARGET.


def test_configuration_alone_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    config = written(tmp_path, warmup_steps=2000, grad_clip=0.5)
    result = ask(str(config), config=None)
    assert result.outcome("config.types").status == "pass"
    assert result.outcome("precision.configured").status == "pass"
    assert result.alignment == "unproven"
    outcome = result.outcome("optimizer.eps")
    assert outcome.status == "not_checked"
    assert outcome.evidence[0].endswith("module:function whose function returns the optimizer")
    points = [o for o in result.outcomes if o.id.startswith("checklist.")]
    judged = {o.id.partition(".")[2]: o.status for o in points if o.status != "not_checked"}
    # Which of the folder's programs it is for cannot be known, so nothing is said of their code.
    assert judged == dict.fromkeys(("lr", "clip", "warmup", "accumulation", "checkpoints"), "pass")
    assert "may belong to another program" in result.outcome("checklist.norms").evidence[0]


def test_data_alone_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1.5\nnan\n")
    result = ask(str(tmp_path), config=None, launcher=None)
    assert [o.id for o in result.of("fail")] == ["data.finite"]


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("nothing", {}, "'nothing' is neither a file nor a folder here, nor 'module:function'"),
        ("a/b:c", {}, "is neither a file"),
        ("json:loads", {}, "json:loads lies outside the current directory"),
        ("no_module:build", {}, "there is no module 'no_module' below the current directory"),
        ("tinychat.training:nothing", {}, "has no function 'nothing'"),
        ("tinychat.training:build", {}, "missing 1 required positional argument: 'config'"),
        ("tinychat.training:loss_of", {"config": FILE}, "returned a function"),
        ("config.json", {"config": FILE}, "is a configuration already; leave --config out"),
        ("config.json", {"launcher": Path("no.yaml")}, "no.yaml cannot be read as a launcher"),
    ],
)
def test_unusable_target_is_one_clear_error(
    target: str, more: dict[str, Any], message: str
) -> None:
    with inside(PROJECT), pytest.raises(ConfigError) as error:
        resolve(target, **more)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_program_changes_is_not_a_change_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"lr": 0.1, "mode": "a"}')
    (tmp_path / "changing_build.py").write_text(
        "def build(config):\n    config.mode = 'b'\n    return {'config': config}\n"
    )
    with inside(tmp_path):
        subject = resolve("changing_build:build", Path("c.json"))
        outcome = check(subject, only=["config.unread"]).outcomes[0]
    assert subject.config == {"lr": 0.1, "mode": "a"}
    assert "1 key of 2 not read" in outcome.evidence[0] and "lr" in outcome.evidence[0]


def test_build_function_that_raises_is_told_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "a.doc").touch()
    (tmp_path / "broken_build.py").write_text(
        "def build():\n    raise RuntimeError('no GPU here')\n"
    )
    with inside(tmp_path):
        with pytest.raises(ConfigError, match=r"files of kind \.doc are not known"):
            resolve("a.doc")
        with pytest.raises(ConfigError, match="broken_build:build raised RuntimeError: no GPU"):
            resolve("broken_build:build")


# --- A check, and what it leaves behind.


def test_items_are_chosen_by_id_section_or_pattern() -> None:
    assert selected(("lr",), ()) == ["lr.config", "lr.schedule", "lr.checkpoint"]
    assert selected(("lr.*",), ("lr.config", "*.checkpoint")) == ["lr.schedule"]
    with pytest.raises(ConfigError, match=r"'lrr' is not an item; use an id such as 'lr\.config'"):
        selected(("lrr",), ())


def test_item_that_raises_does_not_hide_the_others(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("odd model")

    subject = Subject(model=Strange(2, 2), config={"lr": 1.0})
    with inside(tmp_path):
        result = check(subject, only=["model.stored_finite", "config.types"])
    outcome = result.outcome("model.stored_finite")
    assert outcome.status == "warn"
    assert "this check itself failed: LookupError: odd model" in outcome.evidence[0]
    assert result.outcome("config.types").status == "pass"


class Stateful(nn.Module):
    """Moves a buffer, a counter, a weight and every generator in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        random.random()
        np.random.rand()
        return self.linear(nn.functional.dropout(self.norm(x.add_(1.0))))


def test_model_optimizer_batch_loader_and_generators_stay(tmp_path: Path) -> None:
    model = Stateful()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.linear.bias.grad = grad = torch.full((3,), 7.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=50)
    generator = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(4), "y": torch.tensor(index % 3)} for index in range(8)]
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    loss = nn.CrossEntropyLoss()
    subject = Subject(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        loss_fn=lambda batch: loss(model(batch["x"]), batch["y"]),
        run_dir=tmp_path,
    )

    def everything() -> Any:
        states = [each.state_dict() for each in (model, optimizer, scheduler)]
        chance = (generator.get_state(), torch.get_rng_state(), list(np.random.get_state()[1]))
        return copy.deepcopy((states, chance, random.getstate(), data))

    before = everything()
    with inside(tmp_path):
        result = check(subject)
    assert result.outcome("model.fresh_forward").status == "pass"
    assert _equal(before, everything())
    assert model.linear.bias.grad is grad
    assert model.calls == 0


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return _equal(list(first.items()), list(second.items()))
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def test_reading_the_configuration_counts_no_read(tmp_path: Path) -> None:
    tracked = Tracked(CONFIG)
    with inside(tmp_path):
        check(Subject(config=tracked), only=["lr", "config", "precision", "checklist"])
    assert len(unread(tracked)) == 11


# --- Settings by their meaning, whatever their keys are called.


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"trainer": {"lr": 1e-5}}, "trainer.lr"),
        ({"LEARNING_RATE": 1e-5}, "LEARNING_RATE"),
        ({"a": {"b": {"lr": 1.0}}, "optim": {"lr": 1e-5}}, "optim.lr"),
        ({"lr": 1.0, "optimizer": {"learning_rate": 1e-5}}, "optimizer.learning_rate"),
        ({"optim": {"lr": "1e-5"}}, "optim.lr"),
    ],
)
def test_learning_rate_is_found_by_its_meaning(settings: dict[str, object], key: str) -> None:
    found = find(settings, "lr")
    assert found is not None
    assert (found.key, number(settings, "lr")) == (key, 1e-5)


def test_leaves_of_nested_mappings_and_lists_have_dotted_keys() -> None:
    settings = {"a": {"b": 1, "empty": {}}, "stages": [{"lr": 2}, {"lr": 3}], "sizes": [4, 5]}
    leaves = {"a.b": 1, "a.empty": {}, "stages.0.lr": 2, "stages.1.lr": 3, "sizes": [4, 5]}
    assert {leaf.key: leaf.value for leaf in flat(settings)} == leaves


def test_text_that_spells_a_number_is_one() -> None:
    spelled = {"1e-4": 1e-4, "1_000": 1000.0, " 2 ": 2.0, 3: 3.0, "1e-4x": None}
    assert {text: as_number(text) for text in spelled} == spelled
    for value in (True, float("nan"), float("inf"), None, [1]):
        assert as_number(value) is None


def test_environment_of_the_launcher_wins_and_the_conflict_is_told() -> None:
    environment = {"ACCELERATE_MIXED_PRECISION": "fp16", "WORLD_SIZE": "4"}
    found = read_launcher({"mixed_precision": "bf16", "other": 1}, "launch.yaml", environment)
    assert (found.dtype, as_number(found.values["num_processes"])) == ("float16", 4)
    assert found.conflicts == [
        "launch.yaml sets mixed_precision=bf16, the environment ACCELERATE_MIXED_PRECISION=fp16",
    ]
    assert found.said["num_processes"] == "num_processes=4 in WORLD_SIZE"
    assert "other" not in found.values


@pytest.mark.parametrize(
    ("name", "text", "rate"),
    [
        ("a.json", '{"trainer": {"learning_rate": 1e-4}}', 1e-4),
        ("a.toml", "[trainer]\nlearning_rate = 1e-4\n", 1e-4),
        ("a.yaml", "trainer:\n  lr: 1e-4\n  steps: 10\n", 1e-4),
        ("a.py", "import os\nclass Config:\n    LEARNING_RATE: float = 1e-4\n", 1e-4),
        ("a.yaml", "steps: 10\n", "names no learning rate"),
        ("a.yaml", "lr: fast\n", "names no learning rate"),
        ("a.yaml", "lr: 1\nhead:\n  init-lr: 2\n", "several learning rates (lr=1, head.init-lr=2)"),
        ("a.json", "{", "a.json is not valid json"),
        ("a.json", "[1, 2]", "holds a list; a configuration is a mapping"),
        ("a.json", "\udcff", "cannot be read as a configuration"),
        ("a.toml", "a =", "a.toml is not valid toml"),
        ("a.py", "def (:", "a.py is not valid py"),
        ("a.ini", "lr = 1", ".ini is not a configuration file; use one of .json, .toml, .yaml"),
    ],
)
def test_rate_of_a_configuration_is_found_or_one_clear_error(
    tmp_path: Path, name: str, text: str, rate: float | str
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    if isinstance(rate, float):
        assert configured_rate(path) == pytest.approx(rate)
        return
    with pytest.raises(ConfigError) as error:
        configured_rate(path)
    assert rate in str(error.value)


def test_python_file_of_constants_is_parsed_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "config.py"
    path.write_text(
        f"import os\nopen({str(marker)!r}, 'w').close()\nLEARNING_RATE = 1e-4\nWIDTH: int = 8\n"
        "STEPS = 10 * LEARNING_RATE\nclass Train:\n    accum_steps = 2\n"
    )
    assert read_settings(path) == {"LEARNING_RATE": 1e-4, "WIDTH": 8, "Train": {"accum_steps": 2}}
    assert not marker.exists()


def test_yaml_tags_that_would_run_code_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"a: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(ConfigError, match="is not valid yaml"):
        read_settings(path)
    assert not (tmp_path / "made").exists()


def test_reading_a_configuration_imports_no_torch(tmp_path: Path) -> None:
    seen = run_code(tmp_path, "import stepguard.check.settings")
    assert "yaml" in seen.modules
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


@pytest.mark.parametrize(
    ("settings", "dtype", "contradicts"),
    [
        ({"mixed_precision": "bf16"}, "bfloat16", False),
        ({"precision": "16-mixed"}, "float16", False),
        ({"trainer": {"fp16": True}}, "float16", False),
        ({"bf16": True, "fp16": False}, "bfloat16", False),
        ({"amp": True, "fp16": False}, None, False),
        ({"amp": False}, "float32", False),
        ({"mixed_precision": "no"}, "float32", False),
        ({"mixed_precision": "fp16", "fp16": True}, "float16", False),
        ({"mixed_precision": "bf16", "fp16": True}, "bfloat16", True),
        ({"fp16": True, "bf16": True}, "bfloat16", True),
    ],
)
def test_precision_is_understood(
    settings: dict[str, object], dtype: str | None, contradicts: bool
) -> None:
    found = wanted(settings)
    assert found is not None and found.dtype == dtype
    assert found.contradiction.endswith("exclude each other" * contradicts)
    assert bool(found.contradiction) is contradicts
    assert wanted({"lr": 1.0, "precision": "high"}) is None


# --- Which keys of a configuration were read, by every way of reading.

VALUES: dict[str, Any] = {
    "lr": 1.0,
    "model": {"width": 8, "depth": 2},
    "stages": [{"a": 1}, {"a": 2}],
    "empty": {},
}
ALL = ["lr", "model.width", "model.depth", "stages.0.a", "stages.1.a", "empty"]


@pytest.mark.parametrize(
    ("read", "taken"),
    [
        (lambda c: c["lr"], ["lr"]),
        (lambda c: c.lr, ["lr"]),
        (lambda c: c.get("lr"), ["lr"]),
        (lambda c: c.pop("lr"), ["lr"]),
        (lambda c: c.model.width, ["model.width"]),
        (lambda c: c["model"]["width"], ["model.width"]),
        (lambda c: {**c.model}, ["model.width", "model.depth"]),
        (lambda c: dict(c.model), ["model.width", "model.depth"]),
        (lambda c: list(c.model.items()), ["model.width", "model.depth"]),
        (lambda c: list(c.model.values()), ["model.width", "model.depth"]),
        (lambda c: c.stages[1].a, ["stages.1.a"]),
        (lambda c: copy.deepcopy(c).lr, ["lr"]),
        (lambda c: copy.copy(c).model.width, ["model.width"]),
        (lambda c: ("lr" in c, len(c), list(c), c.model.keys(), repr(c)), []),
        (lambda c: c.model, []),
        (lambda c: getattr(c, "nothing", None), []),
    ],
)
def test_reads_are_counted(read: Any, taken: list[str]) -> None:
    config = Tracked(VALUES)
    read(config)
    assert unread(config) == [key for key in ALL if key not in taken]


def test_it_behaves_as_a_mapping_with_attributes() -> None:
    config = Tracked(VALUES)
    config.model.width = 16
    config["new"] = 1
    assert (config.model["width"], config.new, plain(config)["lr"]) == (16, 1, 1.0)
    assert VALUES["model"]["width"] == 8
    with pytest.raises(AttributeError, match=r"the configuration has no model\.nothing"):
        _ = config.model.nothing
    with pytest.raises(KeyError):
        config["nothing"]


# --- Configuration and versions from checkpoints, without running them.


def test_configuration_and_versions_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    content = {
        "state_dict": {"head.weight": torch.ones(3, 2)},
        "hyper_parameters": Namespace(lr=0.1, layers=[1, 2], path=Path("x")),
        "versions": {"torch": "2.0"},
    }
    torch.save(content, tmp_path / "last.ckpt")
    facts = read_checkpoint_facts(tmp_path / "last.ckpt")
    assert (facts.config, facts.versions) == ({"lr": 0.1, "layers": [1, 2]}, {"torch": "2.0"})
    endless: list[Any] = []
    endless.append(endless)
    torch.save({"state": endless, "config": {"lr": 0.2}}, tmp_path / "endless.pt")
    assert read_checkpoint_facts(tmp_path / "endless.pt").config == {"lr": 0.2}
    (tmp_path / "facts.json").write_text(json.dumps({"versions": {"torch": "2.0"}}))
    assert read_checkpoint_facts(tmp_path) == ({}, {"torch": "2.0"})
    (tmp_path / "a.pt").write_bytes(b"rubbish")
    assert read_checkpoint_facts(tmp_path / "a.pt") == ({}, {})
