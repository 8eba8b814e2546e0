"""Run by `torchrun`: an accelerate script and a Trainer on two ranks, one of which gets a NaN row.

Each rank writes one JSON file for each of the two: what ranks print at once may end up in one line.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.trainers import bad_tensors, logged, numbers, quiet, regression, trainer
from process_group import part
from stepguard import Incident
from stepguard.integrations.accelerate import SaveRefused, guard
from stepguard.integrations.transformers import guard as guard_trainer


def places(incidents: tuple[Incident, ...]) -> list[dict[str, Any]]:
    found = [(incident.step, incident.origin) for incident in incidents]
    return [
        {
            "step": step,
            "rank": o.rank,
            "micro": o.micro_batch,
            "samples": o.samples,
            "tensor": o.tensor,
        }
        for step, o in found
        if o is not None
    ]


def weights(model: torch.nn.Module) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def script(folder: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rank = accelerator.process_index
    rows = numbers(32, nan_at=21 if rank == 1 else None)
    refused = False
    with guard(accelerator, quiet()) as watching:
        for i in range(0, 32, 4):
            batch = {key: torch.stack([row[key] for row in rows[i : i + 4]]) for key in rows[0]}
            with accelerator.accumulate(model):
                accelerator.backward(watching.loss(lambda given: model(**given)["loss"], batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        state = next(iter(optimizer.optimizer.state.values()))
        if rank == 1:
            state["exp_avg"].fill_(math.nan)  # only this rank's optimizer is spoiled
        try:
            accelerator.save_state(folder)
        except SaveRefused:
            refused = True
        state["exp_avg"].fill_(0.0)
        say(
            "accelerate",
            rank,
            model,
            watching,
            refused=refused,
            schedule=schedule.scheduler.last_epoch,
        )


def train(folder: str) -> None:
    made = trainer(
        Path(folder), regression(), numbers(48, nan_at=21), save_strategy="steps", save_steps=1
    )
    with guard_trainer(made, quiet()) as watching:
        made.train()
    nan_lines = [math.isnan(loss) for loss in logged(made, "loss")]
    say(
        "trainer",
        made.args.process_index,
        made.model,
        watching,
        schedule=made.lr_scheduler.last_epoch,
        nan=nan_lines,
    )


def say(part: str, rank: int, model: torch.nn.Module, watching: Any, **more: Any) -> None:
    common = {"part": part, "rank": rank, "bad": bad_tensors(model), "weights": weights(model)}
    told = json.dumps({**common, "incidents": places(watching.incidents), **more})
    Path(sys.argv[1], f"{part}-{rank}.json").write_text(told)


script(f"{sys.argv[1]}/state")
train(f"{sys.argv[1]}/out")
part()
