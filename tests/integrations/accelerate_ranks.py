"""Run by `torchrun`: an accelerate script on two ranks, one of which gets a NaN row. Prints one JSON line a rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.trainers import bad_tensors, numbers, quiet, regression
from stepguard.integrations.accelerate import SaveRefused, guard


def main() -> None:
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
            state["exp_avg"].fill_(float("nan"))  # only this rank's optimizer is spoiled
        try:
            accelerator.save_state(sys.argv[1])
        except SaveRefused:
            refused = True
        state["exp_avg"].fill_(0.0)
        found = [
            {
                "step": i.step,
                "rank": i.origin.rank if i.origin else None,
                "micro": i.origin.micro_batch if i.origin else None,
                "samples": i.origin.samples if i.origin else None,
                "tensor": i.origin.tensor if i.origin else None,
            }
            for i in watching.incidents
        ]
    weights = sum(float(p.detach().double().sum()) for p in model.parameters())
    said = {
        "rank": rank,
        "incidents": found,
        "refused": refused,
        "bad": bad_tensors(model),
        "weights": weights,
        "lr_steps": schedule.scheduler.last_epoch,
    }
    print(json.dumps(said), flush=True)
    accelerator.end_training()


main()
