"""The program that is checked: its source, its framework, and the state that it would start in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from check.asking import inside
from stepguard import ConfigError
from stepguard.check.inspection import Inspection, NotGiven, Probe
from stepguard.check.items_step import emulated
from stepguard.check.preflight import Subject, alignment, check, run_item, status_facts
from stepguard.check.subject import files_below, read_framework, read_source
from stepguard.records.checks import Verification

ITEMS = ("checklist.loss_checked", "checklist.norms", "checklist.recovery")
GUARDED = ("pass", "pass", "pass")
UNGUARDED = ("warn", "warn", "warn")
LINEAR = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path) -> Iterator[None]:
    with inside(tmp_path):
        yield


def program(folder: Path, source: str, *, known: bool = True, **parts: Any) -> Inspection:
    """A program of one script."""
    script = folder / "train.py"
    script.write_text(source)
    model = nn.Linear(2, 2)
    return Inspection(Subject(model=model, script=script if known else None, **parts))


def statuses(folder: Path, source: str, *, known: bool = True) -> tuple[str, ...]:
    run = program(folder, source, known=known)
    return tuple(run_item(item, run).status for item in ITEMS)


def inspect(**parts: Any) -> Inspection:
    return Inspection(Subject(**parts))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("loss.backward()\noptimizer.step()\n", UNGUARDED),
        ("if torch.isnan(loss):\n    pass\n", UNGUARDED),
        ("if not torch.isfinite(loss):\n    pass\n", ("pass", "warn", "warn")),
        ("bad = loss.isnan() or loss.isinf()\n", ("pass", "warn", "warn")),
        ("norm = clip_grad_norm_(p, 1.0)\n", ("warn", "pass", "warn")),
        # A norm that nobody looks at is not monitored.
        ("clip_grad_norm_(p, 1.0)\n", UNGUARDED),
        ("import stepguard\nguard = stepguard.watch(model, optimizer)\n", GUARDED),
        ("from stepguard import Guard\nguard = Guard(model, optimizer)\n", GUARDED),
        ("from stepguard import Guard as G\nwith G(model, optimizer):\n    pass\n", GUARDED),
        ("import stepguard as sg\nsg.watch(model, optimizer)\n", GUARDED),
        ("from stepguard.integrations.transformers import guard\nguard(trainer)\n", GUARDED),
        ("import stepguard.integrations.lightning as l\nl.GuardCallback()\n", GUARDED),
        ("from stepguard import *\nwatch(model, optimizer)\n", GUARDED),
        # A name of somebody else's, and an import that nothing uses.
        ("from mine import watch\nimport stepguard\nwatch(model)\n", UNGUARDED),
        ("from stepguard import Guard\nloss.backward()\n", UNGUARDED),
        ("import stepguard\nx = stepguard.numerics.safe_log(x)\n", UNGUARDED),
    ],
)
def test_points_about_code_follow_the_source(
    tmp_path: Path, source: str, expected: tuple[str, ...]
) -> None:
    assert statuses(tmp_path, source) == expected


@pytest.mark.parametrize(
    ("test", "is_of_the_loss"),
    [
        ("assert torch.isfinite(batch['image']).all()", False),
        ("keep = np.isfinite(rows)", False),
        ("torch.isfinite(loss_scale)", False),
        ("if not math.isfinite(loss.item()): raise", True),
        ("total.backward()\nif not torch.isfinite(total): raise", True),
        ("scaler.scale(objective).backward()\ntorch.isfinite(objective)", True),
        ("accelerator.backward(out)\ntorch.isfinite(out)", True),
        ("torch.isfinite(outputs.loss)", True),
        ("torch.isfinite(parts['loss'])", True),
    ],
)
def test_only_a_test_of_the_loss_validates_the_loss(
    tmp_path: Path, test: str, is_of_the_loss: bool
) -> None:
    (tmp_path / "train.py").write_text(test.replace(": raise", ": print(1)"))
    found = read_source([tmp_path / "train.py"])
    assert ("isfinite" in found.places) is is_of_the_loss


def test_another_script_of_the_folder_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import stepguard\nstepguard.watch(model, optimizer)\ntorch.isfinite(loss)\n"
        "clip_grad_norm_(p, 0.5)\n"
    )
    assert statuses(tmp_path, "loss.backward()\n") == UNGUARDED
    # With a configuration alone nobody can say which program it is for.
    assert set(statuses(tmp_path, "loss.backward()\n", known=False)) == {"not_checked"}


def test_modules_that_the_script_imports_belong_to_it(tmp_path: Path) -> None:
    package = tmp_path / "project" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "loop.py").write_text("from . import guarding\n")
    (package / "guarding.py").write_text("import stepguard\nstepguard.Guard(model, opt)\n")
    source = "def main():\n    from project.inner.loop import train\n"
    assert statuses(tmp_path, source) == GUARDED


def test_installed_and_hidden_source_does_not_count(tmp_path: Path) -> None:
    for folder in ("site-packages", ".hidden", "env"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("config.hidden")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "mine.py").write_text("config.lr\n")
    project = read_source(files_below(tmp_path))
    assert (project.files, "hidden" in project.mentions) == (1, False)
    assert "lr" in project.mentions


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("clip_grad_norm_(model.parameters(), 1.0)", "warn", "program clips at train.py:1 to 1"),
        ("clip_grad_norm_(model.parameters(), max_norm=0.5)", "pass", "train.py:1 to 0.5"),
        ("clip_grad_norm_(params, args.clip)", "pass", "not a literal number"),
        ("loss.backward()", "warn", "the program does not clip"),
    ],
)
def test_clipping_of_the_program_counts_and_the_fix_is_what_is_expected(
    tmp_path: Path, source: str, status: str, words: str
) -> None:
    outcome = run_item("checklist.clip", program(tmp_path, source))
    assert outcome.status == status and words in outcome.evidence[0]
    assert status == "pass" or ("0.5" in outcome.fix and "1.0" not in outcome.fix)


def test_precision_of_a_program_that_opens_autocast_is_not_guessed(tmp_path: Path) -> None:
    source = "with torch.autocast('cpu'):\n    loss = f(x)\n"
    unseen = program(tmp_path, source)
    assert run_item("precision.effective", unseen).status == "not_checked"
    assert run_item("scaler.missing", unseen).status == "not_checked"
    seen = program(tmp_path, source, batch=torch.ones(1, 2), loss_fn=lambda x: LINEAR(x).sum())
    (said,) = run_item("precision.effective", seen).evidence
    assert said.endswith("came out as float32; autocast at train.py:1 did not change it")


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The library, with the state it keeps in the process as fresh as at the start."""
    library = pytest.importorskip("accelerate")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "given",
    [half, SimpleNamespace(autocast=half, mixed_precision="bf16")],
    ids=["function", "owner"],
)
def test_probe_runs_in_the_context_that_is_given(given: Any) -> None:
    subject = Subject(model=LINEAR, autocast=given, config={"bf16": True})
    result = check(subject, only=["precision"])
    assert result.outcome("precision.effective").status == "pass"
    assert result.alignment == "aligned"
    assert ("AMP enabled", "yes, autocast to bfloat16") in result.facts
    assert not torch.is_autocast_enabled("cpu")


def test_context_that_cannot_be_opened_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="autocast is a int; give a function"):
        read_framework(7)


@pytest.mark.parametrize(("native", "expected"), [(True, False), (False, True)])
def test_emulated_bfloat16_is_not_taken_for_support(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: bool
) -> None:
    asked = {}

    def supported(including_emulation: bool = True) -> bool:
        asked["emulation"] = including_emulation
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert emulated(Probe("bfloat16", "", "cuda")) is expected
    assert asked == {"emulation": False}
    assert not emulated(Probe("bfloat16", "", "cpu"))


def test_step_that_opens_its_own_context_needs_no_other() -> None:
    model = nn.Linear(4, 2)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with half():
            return model(batch).float().square().mean()

    parts = {"model": model, "loss_fn": loss, "batch": torch.ones(3, 4)}
    outcome = run_item("precision.effective", inspect(**parts, config={"mixed_precision": "no"}))
    assert outcome.status == "fail"
    assert outcome.evidence[0].startswith("1 of 1 matrix products of the real step on cpu came out")


@pytest.mark.parametrize(
    ("precision", "native", "dtype"), [("bf16", True, "bfloat16"), ("no", False, "float32")]
)
def test_real_accelerator_is_understood(
    accelerate: Any, precision: str, native: bool, dtype: str
) -> None:
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    assert read_framework(accelerator).dtype == dtype
    result = check(Subject(model=nn.Linear(2, 2), autocast=accelerator), only=["precision"])
    assert result.alignment == "aligned"
    assert bool(accelerator.native_amp) is native


def test_alignment_needs_a_model_a_wish_and_places_that_agree() -> None:
    disagree = inspect(config={"bf16": True}, launcher={"mixed_precision": "fp16"})
    kind, why = alignment(disagree)
    assert kind == "contradicted"
    assert why[0] == "the configuration (bf16=True) asks for bfloat16"
    assert alignment(inspect(config={"bf16": True}))[0] == "unproven"
    kind, why = alignment(inspect(model=LINEAR))
    assert kind == "unproven"
    assert why[0].endswith("that names a precision") and why[1].endswith("came out as float32")


def test_facts_are_of_the_live_objects() -> None:
    optimizer = torch.optim.SGD(LINEAR.parameters(), lr=0.5)
    run = inspect(model=LINEAR, optimizer=optimizer, autocast=half, launcher={"gpu_ids": "all"})
    facts = dict(status_facts(run))
    assert facts["AMP enabled"] == "yes, autocast to bfloat16"
    assert facts["parameters"] == "6 float32"
    assert facts["learning rate"] == "0.5 now, 0.5 at its peak"
    assert (facts["GradScaler"], facts["GPU IDs"]) == ("none", "all")
    configured = dict(status_facts(inspect(config={"lr": 0.1})))
    assert configured == {"learning rate": "lr=0.1 (configured)"}


@pytest.mark.parametrize(
    ("fact", "give"),
    [
        ("model", "whose function returns the model"),
        ("optimizer", "whose function returns the optimizer"),
        ("scheduler", "whose function returns the scheduler"),
        ("batch", "a batch, loader or dataset"),
        ("data", "give --data PATH"),
        ("validation", "give --validation PATH"),
        ("verified", "give --checkpoint PATH"),
        ("checkpoint", "give --checkpoint PATH"),
        ("probe", "whose function returns the model"),
    ],
)
def test_what_is_missing_says_what_to_give(fact: str, give: str) -> None:
    with pytest.raises(NotGiven, match=give):
        getattr(inspect(), fact)


def test_step_runs_once_for_all_items() -> None:
    calls = []

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        return model(batch).sum()

    model = nn.Linear(2, 1)
    run = inspect(model=model, loss_fn=loss_fn, batch=torch.ones(3, 2))
    assert run.traced_step is run.traced_step
    assert run.probe.dtype == "float32"
    assert len(calls) == 1


def test_exception_of_a_guessed_call_proves_nothing() -> None:
    with pytest.raises(NotGiven, match="return `loss_fn`; the model cannot be called"):
        _ = inspect(model=nn.Linear(2, 1), batch=torch.ones(3, 5)).traced_step


def test_batch_of_a_dataset_has_the_configured_size() -> None:
    rows = [torch.full((2,), float(index)) for index in range(5)]
    assert inspect(dataset=rows, config={"batch_size": 3}).batch.shape == (3, 2)
    assert inspect(dataset=rows).batch.shape == (2, 2)
    assert inspect(loader=DataLoader(rows, batch_size=4)).batch.shape == (4, 2)  # type: ignore[arg-type]


def test_checkpoint_that_does_not_exist_is_an_error_and_a_verified_one_is_not_read() -> None:
    with pytest.raises(ConfigError, match=r"no\.pt does not exist"):
        _ = inspect(checkpoint="no.pt").verified
    known = Verification(path="no.pt", format="made up")
    assert Inspection(Subject(), verified=known).verified is known
