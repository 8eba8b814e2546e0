"""Fine-tune a language model with LoRA to answer unit conversions in tags, by the transformers
Trainer.

    python homework/sft.py python homework/sft.py args.max_steps=100 guard.mode=original python
    homework/sft.py --cfg configs/real.yaml          # SmolLM2-135M, after `make recipes-real`

Ctrl+C lets the step end and saves the state if it is good; `resume=last` goes on from there. Exit
codes: 0 all tests of the verdict passed, 1 not, 3 the guard stopped the run, 5 refused before the
first step, 130 stopped by Ctrl+C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is looked up anywhere

import transformers
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

from homework import report_fix
from homework.base_llm import answers, base_model
from homework.conversions import pairs_of, parse_answer, scores
from homework.following import History, StopAtStepEnd, printed_by
from homework.rows import collate, rows_of
from homework.settings import CONFIG, Settings, arguments, load_config, record
from homework.status import looked_at, subject
from homework.verdict import Scores, verdict
from stepguard import GuardConfig, Incident, Policy, TrainingHalted
from stepguard.check.preflight import Subject
from stepguard.integrations.transformers import (
    GradientMonitoringCallback,
    SaveRefused,
    TrainerGuard,
    guard,
    safe_compute_loss,
)

CURED_BY_FLOAT32 = ("SG502",)
"""Skipping does not help: every update of these weights makes NaN again."""
IN_A_ROW = 3
"""Bad steps in a row after which the run stops: so few examples leave nothing to wait for."""


class Run:
    """Model, data and history of one fine-tuning."""

    def __init__(
        self, config: Settings, *, base: tuple[Any, Any] | None = None, bar: bool = True
    ) -> None:
        self.config, self.bar = config, bar
        self.folder = Path(config.args.output_dir)
        self.tokenizer, model = base or base_model(config, bar=bar)
        self.model = adapted(model, config)
        self.pairs = {part: pairs_of(config.data, part) for part in ("train", "valid")}
        self.rows = {
            p: rows_of(self.tokenizer, pairs, config.data.max_length)
            for p, pairs in self.pairs.items()
        }
        self.history, self.stop = History(), StopAtStepEnd()
        self.incidents: tuple[Incident, ...] = ()
        self.warnings = 0
        self.trainer = self.new_trainer()

    def new_trainer(self) -> Trainer:
        made = Trainer(
            model=self.model,
            args=arguments(self.config, bar=self.bar),
            train_dataset=self.rows["train"],
            eval_dataset=self.rows["valid"],
            data_collator=collate,
        )
        printed_by(made, bar=self.bar)
        made.add_callback(self.stop)
        return made

    def look(self) -> tuple[str, bool]:
        """The state of the run before its first step, and whether it may begin."""
        return looked_at(self.trainer, self.config, self.tokenizer.eos_token_id)

    def train(self) -> None:
        """Train until the last step, a stop or Ctrl+C; again in float32 where that is the cure."""
        resume = _checkpoint(self.config.resume, self.folder)
        mode = self.config.guard.mode
        if mode == "stable":
            again = self._guarded(resume)
            if again is not None:
                self.trainer = self.new_trainer()
                self._guarded(again or None)
            return
        if mode == "callback":
            self._called_back(resume)
            return
        fix = report_fix.apply(self.trainer) if mode == "seedfix" else None
        self.history.attach(self.trainer)
        self._fit(resume)
        self.warnings = fix.warnings if fix is not None else 0

    def _called_back(self, resume: str | None) -> None:
        """The two components under the report's names, doing what can work."""
        callback = GradientMonitoringCallback(self._settings())
        self.trainer.add_callback(callback)
        self.trainer.compute_loss = partial(safe_compute_loss, self.trainer)
        self.history.attach(self.trainer)
        try:
            self._fit(resume)
        finally:
            callback.close()
            self.warnings, self.incidents = sum(callback.reported.values()), callback.incidents

    def _guarded(self, resume: str | None) -> str | None:
        """One `train()` under a guard. Gives where to begin again in float32: a checkpoint, or ''
        for these weights.
        """
        cure = self.config.guard.remedy == "float32"
        with guard(self.trainer, self._settings()) as watching:
            self.history.attach(self.trainer)
            if cure:
                self.trainer.add_callback(_UntilCurable(watching))
            try:
                self._fit(resume)
            except TrainingHalted:
                if not (cure and _curable(watching.incidents)):
                    raise
            finally:
                self.incidents += watching.incidents
                self.warnings = len(self.incidents)
            if not (cure and _curable(watching.incidents)):
                return None
            found = str(watching.last_good or "")
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if self.bar:
            print(
                f"the update itself made NaN: adapters are float32 from here on, from "
                f"{found or 'the same weights'}"
            )
        return found

    def _settings(self) -> GuardConfig:
        kept = self.folder / "run" if self.trainer.args.save_strategy != "no" else None
        return GuardConfig(
            run_dir=kept,
            on_signal="off",
            terminal="auto" if self.bar else "quiet",
            policy=Policy(max_consecutive=IN_A_ROW),
        )

    def _fit(self, resume: str | None) -> None:
        try:
            self.trainer.train(resume_from_checkpoint=resume)
        finally:
            self.stop.release()

    def save(self) -> str:
        """The adapters; a state that is not finite is not saved where something guards. Returns
        what to say.
        """
        where = self.folder / "adapter"
        if self.config.guard.mode in ("original", "seedfix"):
            self.trainer.save_model(str(where))
            return f"saved {where}"
        try:
            with guard(self.trainer, self._settings()):
                self.trainer.save_model(str(where))
        except SaveRefused as refused:
            return str(refused)
        return f"saved {where}"

    def scores(self, *, ask: bool = True) -> Scores:
        """Loss on questions never trained on, and what is right of the answers to them."""
        vars(self.trainer).pop("compute_loss", None)  # the true loss, whatever was put in its place
        loss = float(self.trainer.evaluate()["eval_loss"])
        if not ask:
            return Scores(loss=loss, accuracy=0.0, answer_rate=0.0)
        pairs = self.pairs["valid"]
        said = answers(self.model, self.tokenizer, [question for question, _ in pairs])
        accuracy, answer_rate = scores([parse_answer(text) for text in said], pairs)
        return Scores(loss=loss, accuracy=accuracy, answer_rate=answer_rate)


class _UntilCurable(TrainerCallback):  # type: ignore[misc]
    """Ends training at an incident that another dtype cures."""

    def __init__(self, watching: TrainerGuard) -> None:
        self._watching = watching

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if _curable(self._watching.incidents):
            control.should_training_stop = True


def _curable(incidents: Sequence[Incident]) -> bool:
    return any(
        found.code in CURED_BY_FLOAT32 for incident in incidents for found in incident.findings[:1]
    )


def adapted(model: Any, config: Settings) -> Any:
    """LoRA on a frozen base. `autocast_adapter_dtype=False` leaves the adapters in the dtype of the
    base.
    """
    lora = config.lora
    set_seed(config.args.seed)
    made = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            bias="none",
        ),
        autocast_adapter_dtype=lora.autocast_adapter_dtype,
    )
    if config.args.gradient_checkpointing:
        made.enable_input_require_grads()
    return made


def _checkpoint(asked: str | None, folder: Path) -> str | None:
    if asked != "last":
        return asked
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if found is None:
        raise SystemExit(f"resume=last: {folder} holds no checkpoint; resume=null starts anew.")
    return str(found)


def build(config: Settings) -> Subject:
    """For `stepguard check homework.sft:build --config configs/train.yaml`."""
    run = Run(config, bar=False)
    return subject(run.trainer, config, run.tokenizer.eos_token_id)


def train_model(config: Settings) -> Run:
    """The whole run: looked at first, trained, saved."""
    run = Run(config)
    record(config, run.folder)
    report, fine = run.look()
    print(report)
    if (
        config.guard.preflight == "stop"
        and config.guard.mode in ("stable", "callback")
        and not fine
    ):
        raise SystemExit(5)  # the exit code of stepguard check
    run.train()
    if run.stop.asked:
        bad = run.stop.bad
        print(
            f"stopped by Ctrl+C; NOT saved: {bad} is not finite"
            if bad
            else "stopped by Ctrl+C; resume=last goes on"
        )
        raise SystemExit(130)
    print(run.save())
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cfg", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    run = train_model(load_config(options.cfg, options.overrides))
    said, passed = verdict(run.history.lines, run.history.losses, run.scores(), run.warnings)
    print("\n".join([f"=== Verdict after {time.perf_counter() - began:.0f} s ===", *said]))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
