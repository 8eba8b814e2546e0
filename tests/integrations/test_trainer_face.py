"""The face of a guarded Trainer: settings, wraps and their undoing, log keys, several runs,
`stepguard run`.
"""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback

import forked
import stepguard
from integrations.trainers import (
    bad_tensors,
    journal_lines,
    llama,
    logged,
    numbers,
    quiet,
    regression,
    texts,
    trainer,
)
from settings_of import config_of
from stepguard import ConfigError
from stepguard.engine.context import guarded
from stepguard.integrations.transformers import TrueLoss, correct, guard


def test_close_gives_back_the_trainer_as_it_was(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(8), max_steps=2)
    before, callbacks = dict(vars(made)), list(made.callback_handler.callbacks)
    watching = guard(made, quiet())
    assert "training_step" in vars(made)
    watching.close()
    watching.close()
    assert vars(made).keys() == before.keys()
    assert made.callback_handler.callbacks == callbacks
    guard(made, quiet()).close()


def test_after_training_nothing_is_left_on_model_and_optimizer(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(8), max_steps=2)
    with guard(made, quiet()):
        made.train()
        inner = made.optimizer.optimizer
        assert inner not in guarded
        assert not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks
        assert not made.model._forward_pre_hooks and not made.model._forward_hooks
        assert "_compiled_call_impl" not in vars(made.model)
    assert made.optimizer._is_overflow is False


def test_a_second_guard_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(8))
    with guard(made, quiet()), pytest.raises(ConfigError, match="has a guard already"):
        guard(made, quiet())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.5}, r"max_grad_norm=0\.5"),
        ({"loss_scale": 8.0}, "loss_scale=8.0 is for guard.step"),
    ],
)
def test_settings_that_belong_to_the_trainer_are_refused(
    tmp_path: Path, settings: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        guard(trainer(tmp_path, regression(), numbers(8)), config_of(**settings))


def test_what_is_not_a_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got a Regression; give a transformers\.Trainer"):
        guard(regression())  # type: ignore[arg-type]


def test_incidents_of_several_runs_are_kept(tmp_path: Path) -> None:
    made = trainer(tmp_path, regression(), numbers(24, nan_at=9))
    with guard(made, quiet()) as watching:
        made.train()
        made.train()
        assert [incident.step for incident in watching.incidents] == [2, 2]
    assert [incident.step for incident in watching.incidents] == [2, 2]


def test_a_training_step_of_the_users_own_class_is_replayed_too(tmp_path: Path) -> None:
    class Direct(Trainer):
        """Calls backward by itself."""

        def training_step(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            model.train()
            loss = model(**self._prepare_inputs(inputs))["loss"]
            (loss * 3).backward()
            return loss.detach()

    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), kind=Direct)
    with guard(made, quiet()) as watching:
        made.train()
    (incident,) = watching.incidents
    assert incident.origin is not None
    assert (incident.origin.tensor, incident.origin.samples) == ("batch:x", (1,))


def test_user_errors_pass_through_and_leave_the_guard_usable(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        calls = 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the user's own")

    made = trainer(tmp_path, regression(), numbers(24, nan_at=9), extra={"callbacks": [Once()]})
    with guard(made, quiet()) as watching:
        with pytest.raises(RuntimeError, match="the user's own"):
            made.train()
        made.train()
        assert [incident.step for incident in watching.incidents] == [2]


# --- the log
# --------------------------------------------------------------------------------------------------


def test_keys_reach_tensorboard(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        regression(),
        numbers(24, nan_at=9),
        report_to="tensorboard",
        logging_steps=2,
    )
    with guard(made, quiet()):
        made.train()
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    nonfinite = {e.step: e.value for e in events.Scalars("train/stepguard/nonfinite")}
    losses = {e.step: e.value for e in events.Scalars("train/loss")}
    finite = {e.step: e.value for e in events.Scalars("train/stepguard/loss_finite")}
    assert nonfinite == {4: 1.0}
    assert math.isnan(losses[4]) and math.isfinite(losses[2])
    assert math.isfinite(finite[4]) and finite[4] > 0


def test_one_nan_does_not_stay_in_the_log_where_the_filter_is_off(tmp_path: Path) -> None:
    def losses(guarded_run: bool) -> list[float]:
        made = trainer(
            tmp_path,
            regression(),
            numbers(24, nan_at=9),
            logging_nan_inf_filter=False,
            optim="sgd",
            learning_rate=0.0,
        )
        if not guarded_run:
            made.train()
        else:
            with guard(made, quiet()):
                made.train()
        return logged(made, "loss")

    assert [math.isnan(loss) for loss in losses(False)] == [False, False, True, True, True, True]
    assert [math.isnan(loss) for loss in losses(True)] == [False, False, True, False, False, False]


def test_a_window_of_several_steps_has_a_finite_companion() -> None:
    logs: dict[str, Any] = {"loss": 0.75, "grad_norm": 1.0}
    correct(logs, [1.0, math.nan, 2.0, 3.0], steps=2, bad_elsewhere=0)
    assert math.isnan(logs["loss"])
    assert (logs["stepguard/nonfinite"], logs["stepguard/loss_finite"]) == (1, 4.0)


def test_a_loss_that_only_another_rank_saw_is_shown_as_what_it_is() -> None:
    logs: dict[str, Any] = {"loss": 0.5}
    correct(logs, [1.0, 1.0], steps=2, bad_elsewhere=1)
    assert math.isnan(logs["loss"])
    assert (logs["stepguard/nonfinite"], logs["stepguard/loss_finite"]) == (1, 1.0)


def test_a_healthy_line_stays_as_it_is() -> None:
    logs: dict[str, Any] = {"loss": 0.123456789, "grad_norm": 1.0}
    correct(logs, [0.2, 0.1], steps=1, bad_elsewhere=0)
    assert logs == {"loss": 0.123456789, "grad_norm": 1.0}


def test_many_losses_between_two_log_lines_are_all_counted() -> None:
    losses = TrueLoss()
    for value in range(1100):
        losses.add(torch.tensor(float(value)))
    assert losses.take() == [float(value) for value in range(1100)]
    assert losses.take() == []


# --- beside other guards
# -------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from integrations.trainers import numbers, quiet, regression, trainer
from stepguard.integrations.transformers import guard

made = trainer(Path({folder!r}), regression(), numbers(24, nan_at=9))
with guard(made, quiet(run_dir={own!r})) as watching:
    made.train()
print("incidents", len(watching.incidents))
"""


REPLAYED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from integrations.trainers import llama, quiet, texts, trainer
from stepguard.integrations.transformers import guard

made = trainer(Path("out"), llama(), texts(16, lambda row: 8 <= row < 12), max_steps=4)
with guard(made, quiet(run_dir="run")) as watching:
    made.train()
"""


def test_a_capsule_of_a_trainer_is_run_again_with_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(REPLAYED.format(tests=str(Path(__file__).parents[1])))
    path = list(sys.path)
    runpy.run_path(str(script), run_name="__main__")
    (capsule,) = (tmp_path / "run" / "incidents").glob("*/capsule")
    incident = stepguard.replay(str(capsule), script="train.py")
    sys.path[:] = path
    assert incident.origin is not None and incident.origin.reproduced
    assert incident.step == 2
    assert incident.findings[0].code == "SG102"


def test_stepguard_run_does_not_guard_a_guarded_trainer_twice(tmp_path: Path) -> None:
    script, own, other = tmp_path / "train.py", tmp_path / "own", tmp_path / "other"
    tests = str(Path(__file__).parents[1])
    script.write_text(SCRIPT.format(tests=tests, folder=str(tmp_path / "out"), own=str(own)))
    words = ["-m", "stepguard", "run", "--run-dir", str(other), str(script)]
    ran = forked.python(words, seconds=200)
    assert ran.returncode == 0, ran.stderr
    assert "incidents 1" in ran.stdout
    assert len([line for line in journal_lines(own) if line.get("type") == "incident"]) == 1
    assert [line for line in journal_lines(other) if line.get("type") in ("incident", "step")] == []


def test_a_guard_with_a_trainer_that_has_no_incident_reports_the_finite_loss_of_llama(
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path, llama(), texts(8), max_steps=2)
    with guard(made, quiet()) as watching:
        made.train()
    assert watching.incidents == () and watching.refused_saves == 0
    assert bad_tensors(made.model) == 0
    assert logged(made, "stepguard/incidents") == [0, 0]
