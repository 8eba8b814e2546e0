"""What the guard costs by itself, in microseconds per step, by number of tensors and by driver.

    python -m benchmarks own_cost             # three sizes, plain and fused AdamW, about a minute
    python -m benchmarks own_cost --quick     # two sizes, few rounds: only shows that it works

Small layers, so that the step itself is short and the cost of the check is not lost in it. Every
loop takes the same batch in turn, in CPU time; `own` is the median of a loop minus the median of
the unguarded loop beside it. The line below the table fits `a us per step + b ns per tensor` and
says from which step length on that is one per cent. Frameworks' own loops (transformers and
Lightning, without a guard) are printed beside it: what they add to the unguarded step.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import stepguard
from benchmarks.parts import runner

Batch = tuple[Tensor, Tensor]
Loop = Callable[[Batch], Any]

DEPTHS = {6: 1, 40: 18, 400: 198}
"""Tensors of the model -> hidden layers between its first and its last."""
ROUNDS = {6: 1200, 40: 500, 400: 150}
BATCH, WIDTH, CLASSES = 32, 16, 4
OURS = ("guard.step", "guard.step, no clipping", "watch", "watch, no clipping")


def network(tensors: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 32), nn.ReLU()]
    for _ in range(DEPTHS[tensors]):
        layers += [nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def batch() -> Batch:
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(BATCH, WIDTH, generator=source)
    return rows, torch.randint(0, CLASSES, (BATCH,), generator=source)


def loops(tensors: int, *, fused: bool, folder: Path) -> dict[str, Loop]:
    """Every loop by its name, each with a model and an optimizer of its own."""
    names = ("unguarded", "unguarded, no clipping", "isfinite", "GradScaler", "detect_anomaly")
    return {name: _loop(name, tensors, fused, folder) for name in (*names, *OURS)}


def _loop(name: str, tensors: int, fused: bool, folder: Path) -> Loop:
    model = network(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    clips = not name.endswith("no clipping")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if name == "GradScaler" else None

    def loss_of(b: Batch) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    if name in OURS:
        run_dir = folder / name.replace(", ", "-").replace(" ", "-")
        limit = 1.0 if clips and name.startswith("guard.step") else None
        config = stepguard.GuardConfig(terminal="quiet", clip_norm=limit, run_dir=run_dir)
        if name.startswith("guard.step"):
            guard = stepguard.Guard(model, optimizer, config=config)
            return lambda b: guard.step(loss_of, b)
        stepguard.watch(model, optimizer, config=config)

    def plain(b: Batch) -> None:
        optimizer.zero_grad()
        loss = loss_of(b)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        if clips:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if name == "isfinite" and not (torch.isfinite(loss) and torch.isfinite(norm)):
                return
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def under_anomaly_mode(b: Batch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                plain(b)

    return under_anomaly_mode if name == "detect_anomaly" else plain


def measure(tensors: int, *, fused: bool, rounds: int) -> list[dict[str, Any]]:
    """One row for each loop; they take turns, forwards and backwards."""
    with tempfile.TemporaryDirectory(prefix="stepguard-bench-") as folder:
        ours = loops(tensors, fused=fused, folder=Path(folder))
        spent: dict[str, list[float]] = {name: [] for name in ours}
        data, order = batch(), list(ours)
        for _ in range(rounds):
            for name in order:
                began = time.process_time()
                ours[name](data)
                spent[name].append(time.process_time() - began)
            order.reverse()
    kept = {name: times[rounds // 6 :] for name, times in spent.items()}
    rows = []
    for name, times in kept.items():
        base = kept["unguarded, no clipping" if name.endswith("no clipping") else "unguarded"]
        own = 1e6 * (statistics.median(times) - statistics.median(base))
        low, _, high = statistics.quantiles([a - b for a, b in zip(times, base, strict=True)], n=4)
        rows.append(
            {
                "loop": name,
                "tensors": tensors,
                "fused": fused,
                "step_us": round(1e6 * statistics.median(times), 1),
                "own_us": round(own, 1),
                "quartiles_us": [round(1e6 * low, 1), round(1e6 * high, 1)],
                "ratio": round(statistics.median(times) / statistics.median(base), 4),
            }
        )
    return rows


def framework_rows(tensors: int, steps: int) -> list[dict[str, Any]]:
    """What the frameworks' own loops take for a step of the same model, without a guard."""
    rows = []
    for name, run in (("transformers", _transformers), ("Lightning", _lightning)):
        rows.append({"loop": f"{name} Trainer", "step_us": round(run(tensors, steps), 1)})
    return rows


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return BATCH * 4000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows, labels = batch()
        return {"x": rows[index % BATCH], "labels": labels[index % BATCH]}


def _per_step(marks: Sequence[float]) -> float:
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    return 1e6 * statistics.median(gaps[len(gaps) // 6 :])


def _transformers(tensors: int, steps: int) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    marks: list[float] = []
    data = batch()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(tensors)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Mark(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory(prefix="stepguard-bench-") as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=Classifier(),
            args=settings,
            train_dataset=_Rows(),
            data_collator=lambda _: {"x": data[0], "labels": data[1]},
            callbacks=[Mark()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return _per_step(marks)


def _lightning(tensors: int, steps: int) -> float:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    marks: list[float] = []
    data = batch()

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(tensors)

        def training_step(self, rows: Any, index: int) -> Tensor:
            return F.cross_entropy(self.net(rows[0]), rows[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Mark(Callback):
        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.process_time())

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            gradient_clip_val=1.0,
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Mark()],
        )
        loader = DataLoader(_Rows(), batch_size=BATCH, collate_fn=lambda _: data)
        trainer.fit(Classifier(), loader)
    return _per_step(marks)


def fitted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of our loops: `a us per step + b ns per tensor`, from its smallest and largest."""
    found = []
    for name in OURS:
        for fused in (False, True):
            points = {r["tensors"]: r["own_us"] for r in rows if _is(r, name, fused)}
            few, many = min(points), max(points)
            slope = (points[many] - points[few]) / (many - few)
            base = points[few] - slope * few
            found.append(
                {
                    "loop": name,
                    "fused": fused,
                    "us_per_step": round(base, 1),
                    "ns_per_tensor": round(1e3 * slope, 1),
                    "one_per_cent_from_ms": {n: round(points[n] / 10, 1) for n in sorted(points)},
                }
            )
    return found


def _is(row: dict[str, Any], name: str, fused: bool) -> bool:
    return bool(row["loop"] == name and row["fused"] == fused)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    first = rows[0]
    title = f"{first['tensors']} tensors, AdamW{' fused' if first['fused'] else ''}"
    drawn = Table("loop", title=title, title_justify="left", title_style="bold")
    for column in ("step us", "own us", "quartiles", "ratio"):
        drawn.add_column(column, justify="right")
    for row in rows:
        low, high = row["quartiles_us"]
        numbers = (f"{row['step_us']:.0f}", f"{row['own_us']:+.0f}", f"{low:.0f} to {high:.0f}")
        style = "bold" if row["loop"] in OURS else ""
        drawn.add_row(row["loop"], *numbers, f"{row['ratio']:.3f}", style=style)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("own_cost", __doc__, arguments, quick="two sizes and few rounds")
    options, console = run.options, run.console
    sizes = {6: 12, 40: 12} if options.quick else ROUNDS
    rows: list[dict[str, Any]] = []
    for tensors, rounds in sizes.items():
        for fused in (False, True):
            measured = measure(tensors, fused=fused, rounds=rounds)
            console.print(table(measured))
            rows += measured
    frameworks = framework_rows(min(sizes), 12 if options.quick else 400)
    plain = next(row["step_us"] for row in rows if row["loop"] == "unguarded")
    for row in frameworks:
        row["own_us"] = round(row["step_us"] - plain, 1)
        step, own = row["step_us"], row["own_us"]
        console.print(f"{row['loop']}, {min(sizes)} tensors: {step:.0f} us, {own:+.0f} us")
    lines = fitted(rows)
    for line in lines:
        limits = line["one_per_cent_from_ms"]
        ends = ", ".join(f"{ms} ms ({tensors} tensors)" for tensors, ms in limits.items())
        name = f"{line['loop']}{' (fused AdamW)' if line['fused'] else ''}"
        cost = f"{line['us_per_step']:.0f} us per step + {line['ns_per_tensor']:.0f} ns per tensor"
        console.print(f"{name}: {cost}; 1 % from steps of {ends} on")
    run.keep({"rows": rows, "frameworks": frameworks, "fitted": lines})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
