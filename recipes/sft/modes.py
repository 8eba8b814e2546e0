"""The fine-tuning's natural failures: adapters in float16 under a non-fused AdamW, and answers that
are cut off.
"""

from __future__ import annotations

import copy
import tempfile
import time
from functools import cache
from typing import Any

import transformers

from homework.base_llm import base_model
from homework.settings import CONFIG, load_config
from homework.sft import Run
from recipes.common.expect import Expectation
from recipes.common.experiment import Beforehand, Experiment
from recipes.common.outcome import Mode, Outcome, damage

HALF = ("model.torch_dtype=float16", "args.optim=adamw_torch", "lora.autocast_adapter_dtype=False")
SETTINGS: dict[Mode, tuple[str, ...]] = {
    "healthy": (*HALF[:2], "guard.mode=original"),
    "unguarded": (*HALF, "guard.mode=original"),
    "seedfix": (*HALF, "guard.mode=seedfix"),
    "guarded": (*HALF, "guard.mode=stable", "guard.preflight=warn"),
}
FULL = (
    "model.cache=null",
    "args.max_steps=100",
    "args.warmup_steps=20",
    "args.per_device_train_batch_size=8",
    "args.bf16=False",
    "args.save_strategy=no",
    "args.logging_steps=1",
)
SHORT = (
    *FULL,
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.base_steps=30",
    "args.max_steps=12",
    "args.warmup_steps=2",
    "data.valid=32",
)
CUT = ("data.max_length=40",)


@cache
def _base(settings: tuple[str, ...]) -> Any:
    """The same in every mode."""
    transformers.logging.set_verbosity_error()
    return base_model(load_config(CONFIG, settings), bar=False)


def _run(settings: tuple[str, ...], folder: str) -> Run:
    tokenizer, model = _base(tuple(part for part in settings if part.startswith("model.")))
    config = load_config(CONFIG, (*settings, f"args.output_dir={folder}"))
    return Run(config, base=(tokenizer, copy.deepcopy(model)), bar=False)


def run(mode: Mode, short: bool) -> Outcome:
    """One mode on the toy conversions."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = _run((*(SHORT if short else FULL), *SETTINGS[mode]), folder)
        made.train()
        scores = made.scores(ask=not short)
    parameters, buffers, tensors = damage(made.model)
    return Outcome(
        mode=mode,
        losses=tuple(made.history.losses),
        first_bad=made.history.first_bad,
        metric=scores.loss,
        also={} if short else {"accuracy": scores.accuracy, "answer rate": scores.answer_rate},
        bad_parameters=parameters,
        bad_buffers=buffers,
        tensors=tensors,
        incidents=made.incidents,
        seconds=time.perf_counter() - began,
    )


def look() -> tuple[str, list[str]]:
    """Too short a maximal length, looked at before the first step."""
    with tempfile.TemporaryDirectory() as folder:
        said, fine = _run((*SHORT, *CUT), folder).look()
    wanted = ("fail labels.empty", "SG102")
    wrong = ["the data was called fine"] if fine else []
    return said, wrong + [f"{part!r} is not said" for part in wanted if part not in said]


EXPERIMENTS = (
    Experiment(
        name="half-adapters",
        title="sft: float16 adapters, Adam's eps is 0",
        run=run,
        expected=Expectation(
            metric="val loss",
            ops=("aten.addcdiv_",),
            causes=("SG502",),
            relative=0.02,
            positive=("accuracy", "answer rate"),
        ),
    ),
    Beforehand(
        name="cut-answers", title="sft: max_length cuts the answers off, before step 0", look=look
    ),
)
