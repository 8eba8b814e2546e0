"""From "sample 2" to the row of the data set: named in the incident, written to the ledger,
honoured after a resume.
"""

from __future__ import annotations

import errno
import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stepguard
from engine.parts import origin_of, step_of
from forked import FULL
from pairwise import pairwise
from scenes import quiet
from stepguard import Guard, GuardConfig, Incident, Policy
from stepguard.engine.incident.samples import (
    known_bad,
    name_samples,
    parts_of,
    skip_lost_batches,
    text_of,
)
from stepguard.journal import read_run
from stepguard.ledger import Ledger, ledger_path
from stepguard.locate.samples import outlying_rows
from stepguard.records import Sink
from stepguard.records.checks import BadSamples
from stepguard.report import phrases
from stepguard.state.loader import Delivered, FoundBatch
from stepguard.tensors.torch_private import LoaderIterator

ROWS, BATCH = 48, 8


class Rows(Dataset[dict[str, Any]]):
    """Row k is fixed; the bad ones hold a NaN."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        source = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, 4, generator=source)
        self.y = self.x.sum(1, keepdim=True)
        for row in bad:
            self.x[row, 1] = math.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "file": f"images/{index}.png"}


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (self.rows[i] for i in range(ROWS))


def loader(*bad: int, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Rows(bad), BATCH, shuffle=shuffle)


def config(folder: Path | None, **settings: Any) -> GuardConfig:
    return quiet(
        **{"run_dir": folder, "locate": True, "snapshot_every": 4, "probation": 4, **settings}
    )


def built(
    data: Any, settings: GuardConfig, make: Callable[..., Guard] = Guard, *, fused: bool = False
) -> tuple[Guard, Callable[[Any], Tensor]]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    guard = make(model, optimizer, loader=data, config=settings)
    return guard, lambda batch: (model(batch["x"]) - batch["y"]).pow(2).mean()


def train(
    guard: Guard,
    loss_fn: Callable[[Any], Tensor],
    prepare: Callable[[Any], Any] = lambda batch: [batch],
) -> None:
    for batch in guard.loader:
        guard.step(loss_fn, *prepare(batch))


def moved(batch: Any) -> list[Any]:
    """What a loop does that moves its batch to a device: other tensors, the same rows."""
    return [{"x": batch["x"].clone(), "y": batch["y"].clone()}]


def halves(batch: Any) -> list[Any]:
    return [{"x": batch["x"][rows], "y": batch["y"][rows]} for rows in (slice(0, 4), slice(4, 8))]


def moved_halves(batch: Any) -> list[Any]:
    return [{key: tensor.clone() for key, tensor in half.items()} for half in halves(batch)]


LOOPS = {
    "as delivered": lambda b: [b],
    "moved": moved,
    "halves": halves,
    "moved halves": moved_halves,
}


def test_full_disk_costs_the_ledger_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Ledger, entry: BadSamples) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ledger, "append", full)
    guard, loss_fn = built(loader(3, 17, 30, shuffle=False), config(tmp_path))
    with guard:
        train(guard, loss_fn)
        assert guard.armed and len(guard.incidents) == 3
        assert all(torch.isfinite(p).all() for p in guard.model.parameters())
    said = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "ledger"]
    assert len(said) == 1 and "No space left on device" in said[0]


def shard(
    *, restarts: bool, folder: Path, data: Any, clean: bool = False
) -> tuple[list[Any], list[str], int]:
    """A run that goes on from its first checkpoint; what it saw, what was said of the loader, its
    incidents.
    """
    guard, loss_fn = built(data, config(folder, policy=Policy(actions=("skip", "stop"))))
    seen = []
    with guard:
        if restarts:
            guard.restore()
        for batch in guard.loader:
            seen.append(batch["file"][0])
            guard.step(loss_fn, batch)
            if guard.steps == 1 and not restarts:
                assert guard.save() is not None
        incidents = len(guard.incidents)
    said = [
        n["summary"] for n in read_run(folder).notes if "skipping batch" in str(n.get("summary"))
    ]
    return seen, said, incidents


BAD_SHARD = tuple(range(16, 32))


def test_bad_shard_is_passed_over_after_a_restart(tmp_path: Path) -> None:
    assert shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))[2] == 2
    seen, said, incidents = shard(
        restarts=True, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False)
    )
    assert seen == ["images/8.png", "images/32.png", "images/40.png"] and incidents == 0
    assert said == ["skipping batches 2-3 of pass 0: dropped before as SG101"]


def test_batch_that_holds_other_rows_now_is_delivered(tmp_path: Path) -> None:
    shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    order = [*range(8), *range(32, 48), *range(8, 32)]
    other = DataLoader(Rows(BAD_SHARD), BATCH, sampler=order)
    seen, said, incidents = shard(restarts=True, folder=tmp_path, data=other)
    assert len(seen) == 5 and incidents == 2 and said == []


class TwoRanks:
    """The other rank has only batch 2 on record."""

    size, rank = 2, 0

    def together(
        self, tell: Callable[[], dict[str, Any]], what: str, *, seconds: float
    ) -> list[dict[str, Any]]:
        return [tell(), {"lost": [[1, 2, 0, 2]]}]


def test_ranks_pass_over_only_what_all_of_them_have_on_record(tmp_path: Path) -> None:
    guard, _ = built(loader(shuffle=False), config(tmp_path))
    with guard:
        ledger = Ledger(tmp_path)
        for epoch, number in ((0, 2), (0, 3), (1, 2)):
            ledger.append(
                BadSamples(step=number, epoch=epoch, batch=number, cause="SG101", indices=(99,))
            )
        alone, guard._context.agreement = guard._context.agreement, TwoRanks()  # type: ignore[assignment]
        skip_lost_batches(guard._context)
        guard._context.agreement = alone
        assert [batch["file"][0] for batch in guard.loader] == [
            f"images/{n}.png" for n in (0, 8, 24, 32, 40)
        ]


def test_run_that_stops_at_bad_data_gets_past_it_when_started_again(tmp_path: Path) -> None:
    ends = []
    for start in range(3):
        guard, loss_fn = built(
            loader(*BAD_SHARD, shuffle=False),
            config(tmp_path, policy=Policy(actions=("stop",)), checkpoint_every=1),
        )
        with guard:
            if start:
                guard.restore(next((tmp_path / "checkpoints").glob("step-*1")))
            try:
                for batch in guard.loader:
                    guard.step(loss_fn, batch)
                    if guard.steps == 1 and not start:
                        guard.save()
                ends.append("end")
            except stepguard.TrainingHalted:
                ends.append(f"batch {guard.loader.delivered - 1}")
    assert ends == ["batch 2", "batch 3", "end"]


def test_stored_damage_is_not_held_against_the_batch(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(shuffle=False), config(tmp_path))
    with guard:
        for batch in guard.loader:
            guard.step(loss_fn, batch)
            if guard.steps == 5:
                with torch.no_grad():
                    next(guard.model.parameters())[0, 0] = math.nan
        assert guard.incidents
    assert not ledger_path(tmp_path).exists()


def test_node_of_a_graph_is_not_cut_out_of_it() -> None:
    """Without one node all edges behind it would join others: the whole step is left out."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    x, edges = torch.randn(6, 2), torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    x[4, 0] = math.nan
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def loss_fn(graph: dict[str, Tensor]) -> Tensor:
        hidden = model(graph["x"])
        return (hidden[graph["edges"][0]] - hidden[graph["edges"][1]]).pow(2).mean() + hidden.pow(
            2
        ).mean()

    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config(None)) as guard:
        result = guard.step(loss_fn, {"x": x, "edges": edges, "y": torch.randn(6, 1)})
        assert result.incident is not None and result.incident.decision is not None
        assert not result.committed and result.incident.decision.action == "skip"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_loop_that_trains_on_other_samples_gets_no_rows_named(tmp_path: Path) -> None:
    """A replay buffer, say: as many batches and as many rows as the loader delivers, but others."""
    guard, loss_fn = built(loader(shuffle=False), config(tmp_path))
    other = Rows((5,))
    with guard:
        for number, _ in enumerate(guard.loader):
            rows = slice(BATCH * number, BATCH * (number + 1))
            guard.step(loss_fn, {"x": other.x[rows] + 0.5, "y": other.y[rows] - 1})
        (incident,) = guard.incidents
    assert (
        incident.origin is not None
        and incident.origin.samples == (5,)
        and incident.origin.rows == ()
    )
    assert known_bad(tmp_path)[0].indices is None and known_bad(tmp_path)[0].batch is None


SHUFFLED: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Rows((17,)), BATCH, shuffle=True),
    "workers": lambda: DataLoader(Rows((17,)), BATCH, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(
        Rows((17,)), BATCH, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "stateful": lambda: StatefulDataLoader(Rows((17,)), BATCH, shuffle=True),
    "stateful, workers": lambda: StatefulDataLoader(
        Rows((17,)), BATCH, shuffle=True, num_workers=2
    ),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.slow
@pytest.mark.parametrize("kind", SHUFFLED if FULL else ["plain", "generator", "stateful, workers"])
def test_shuffled_batch_is_known_again_after_a_restart(kind: str, tmp_path: Path) -> None:
    seen: list[str] = []
    for start in range(2):
        guard, loss_fn = built(
            SHUFFLED[kind](), config(tmp_path, policy=Policy(actions=("skip", "stop")))
        )
        torch.manual_seed(6 + start)
        with guard:
            if start:
                guard.restore()
            for batch in guard.loader:
                seen += batch["file"] if start else []
                guard.step(loss_fn, batch)
                if guard.steps == 1 and not start:
                    assert guard.save() is not None
            assert len(guard.incidents) == 1 - start
    del guard
    gc.collect()  # workers end with their loader
    (entry,) = known_bad(tmp_path)
    assert entry.batch and "images/17.png" not in seen and len(seen) == ROWS - 2 * BATCH


# --- rows are named only where loader, values or ids prove which samples they are


def _unit(y: Tensor) -> Tensor:
    return y / y.norm(dim=1)[:, None]


@pytest.mark.parametrize("capsule", ["full", "no-data"])
def test_text_of_the_sample_is_shown_in_the_terminal_and_written_nowhere(
    capsule: Literal["full", "no-data"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4)
    x[2] = 0
    words = "red\x1b[31m fox\n" + "abc " * 40
    batch = {"x": x, "text": ["one", "two", words, "four"]}
    config = stepguard.GuardConfig(run_dir=tmp_path, capsule=capsule)
    with stepguard.Guard(model, optimizer, config=config) as guard:
        guard.step(lambda b: _unit(model(b["x"])).sum(), batch)
    shown = 'its text: "red?[31m fox abc abc' in capsys.readouterr().err
    assert shown is (capsule == "full")
    for file in (tmp_path / "journal.jsonl", *tmp_path.glob("incidents/*/incident.json")):
        assert "abc " * 3 not in file.read_text()
    assert guard.incidents[0].origin is not None


# --- a loss that jumps because of a few rows names them


LONG, SIZE, BAD = 160, 16, 137


class Notes(Sink):
    """Keeps the lines about spikes."""

    def __init__(self) -> None:
        self.spikes: list[str] = []

    def incident(self, incident: Incident) -> None:
        self.spikes.append(incident.verdict.summary)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "note" and fields.get("kind") == "spike":
            self.spikes.append(str(fields["summary"]))


class Table(Dataset[Any]):
    """Samples of one table of tensors, made into the batch's form by `shape`."""

    def __init__(self, x: Tensor, y: Tensor, shape: Callable[[Tensor, Tensor], Any]) -> None:
        self.x, self.y, self.shape = x, y, shape

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.shape(self.x[row], self.y[row])


def as_pair(x: Tensor, y: Tensor) -> Any:
    return x, y


def as_dict(x: Tensor, y: Tensor) -> Any:
    return {"values": x, "target": y}


def table(*shape: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(LONG, *shape, generator=source)
    return x, x.flatten(1).sum(1) + 3.0


def guarded(data: Table, *, watched: bool, told: bool = True, given: bool = True) -> list[str]:
    """Two passes; `told`: the loop calls guard.loss, `given`: the guard is given the loader."""
    torch.manual_seed(0)
    features = data.x[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader(data, SIZE, shuffle=True)
    notes = Notes()
    settings: dict[str, Any] = {"config": quiet(locate=True, sinks=(notes,))}
    if given:
        settings["loader"] = loader

    def loss_fn(batch: Any) -> Tensor:
        x, y = batch.values() if isinstance(batch, dict) else batch
        loss: Tensor = (model(x).squeeze(1) - y).pow(2).mean()
        return loss

    build = stepguard.watch if watched else Guard
    with build(model, optimizer, **settings) as guard:
        for _ in range(2):
            for batch in guard.loader if given else loader:
                if not watched:
                    guard.step(loss_fn, batch)
                    continue
                optimizer.zero_grad()
                (guard.loss(loss_fn, batch) if told else loss_fn(batch)).backward()
                optimizer.step()
    return notes.spikes


def test_incident_after_an_outlier_is_not_put_on_the_learning_rate() -> None:
    torch.manual_seed(0)
    x, y = table(4)
    x[BAD] *= 1e4
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Guard(model, optimizer, config=quiet(locate=True)) as guard:
        for step in range(40):
            rows = slice(step % 10 * SIZE, step % 10 * SIZE + SIZE)
            guard.step(lambda b: (model(b[0]).squeeze(1) - b[1]).pow(2).mean(), (x[rows], y[rows]))
            if guard.incidents:
                break
    first = guard.incidents[0]
    assert first.findings[0].code == "SG103"
    assert first.findings[0].certainty == "likely"
    assert "times the largest other" in first.findings[0].evidence[0]
    assert all(f.certainty == "possible" for f in first.findings if f.code == "SG505")


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("loop", LOOPS)
def test_sample_is_named_by_its_row_of_the_data_set(loop: str, fused: bool, tmp_path: Path) -> None:
    guard, loss_fn = built(loader(17), config(tmp_path), fused=fused)
    with guard:
        train(guard, loss_fn, LOOPS[loop])
        (incident,) = guard.incidents
    assert incident.origin is not None and incident.origin.rows == ("row 17",)
    assert phrases.culprits(incident.origin).startswith(
        f"sample {incident.origin.samples[0]} = row 17 of the data set"
    )
    (entry,) = known_bad(tmp_path)
    assert (entry.indices, entry.samples) == ((17,), incident.origin.samples)
    assert (entry.left_out, entry.count, entry.of, entry.cause) == ("sample", 1, BATCH, "SG101")
    where = (entry.epoch, entry.batch, entry.step, entry.incident)
    assert where == (0, incident.step, incident.step, incident.id)


SKIPS = Policy(actions=("skip", "stop"))
LOST: dict[str, tuple[Any, dict[str, Any], Any, list[dict[str, Any]]]] = {
    "two samples": ((8, 13), {}, None, [{"samples": (0, 5), "indices": (8, 13), "batch": 1}]),
    "the step": (
        range(8, 16),
        {},
        None,
        [{"left_out": "step", "count": 8, "of": 8, "samples": (), "indices": tuple(range(8, 16))}],
    ),
    "a micro-batch": (
        range(12, 16),
        {},
        halves,
        [{"left_out": "micro_batch", "micro_batch": 1, "count": 4, "of": 8}],
    ),
    "innocent with the step": (
        (13,),
        {"policy": SKIPS},
        halves,
        [
            {"innocent": True, "indices": (8, 9, 10, 11), "left_out": "step", "count": 4, "of": 8},
            {"innocent": False, "indices": (13,), "samples": (1,), "count": 4},
        ],
    ),
    "by id, of no known place": (
        (17,),
        {"id_key": "file"},
        "no loader",
        [{"ids": ("images/17.png",), "indices": (17,), "epoch": None, "batch": None}],
    ),
    "of a stream": ((17,), {}, "stream", [{"indices": None, "batch": 2, "samples": (1,)}]),
}


@pytest.mark.parametrize("case", LOST)
def test_ledger_lists_what_was_really_lost(case: str, tmp_path: Path) -> None:
    bad, settings, prepare, expected = LOST[case]
    data: Any = loader(*bad, shuffle=False)
    if prepare == "stream":
        data = DataLoader(Stream(Rows(tuple(bad))), BATCH)
    given = None if prepare == "no loader" else data
    guard, loss_fn = built(given, config(tmp_path, **settings))
    with guard:
        for batch in guard.loader if given is not None else data:
            guard.step(loss_fn, *(prepare(batch) if callable(prepare) else [batch]))
        (incident,) = guard.incidents
    found = known_bad(tmp_path)
    assert len(found) == len(expected)
    for entry, wanted in zip(found, expected, strict=True):
        assert {name: getattr(entry, name) for name in wanted} == wanted
    if "id_key" in settings:
        assert incident.origin is not None
        assert incident.origin.rows == ("row 17 (id images/17.png)",)


@pytest.mark.parametrize("prepare", [LOOPS["as delivered"], moved], ids=["delivered", "moved"])
def test_watched_loop_has_its_losses_on_record_too(prepare: Any, tmp_path: Path) -> None:
    guard, loss_fn = built(loader(17, shuffle=False), config(tmp_path), stepguard.watch)
    with guard:
        for batch in guard.loader:
            guard.optimizer.zero_grad()
            loss_fn(prepare(batch)[0]).backward()
            guard.optimizer.step()
    (entry,) = known_bad(tmp_path)
    assert entry.batch == 2 and entry.indices is not None and 17 in entry.indices


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: re.sub('"run":"[^"]*"', '"run":"another"', text),
        lambda text: text.replace("SG101", "SG505"),  # the weights' fault, not the batch's
        lambda text: '{"v":99}\n',
    ],
    ids=["of another run", "of another cause", "unreadable"],
)
def test_ledger_that_does_not_prove_a_batch_bad_is_not_honoured(
    edit: Callable[[str], str], tmp_path: Path
) -> None:
    shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    path = ledger_path(tmp_path)
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    seen, _, _ = shard(restarts=True, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    assert len(seen) == 5


TOLD = pairwise(product(["input", "target"], [as_pair, as_dict], [False, True]))


@pytest.mark.parametrize(("where", "shape", "watched"), TOLD)
def test_row_of_a_table_is_named(where: str, shape: Any, watched: bool) -> None:
    x, y = table(4)
    if where == "input":
        x[BAD] *= 20000
    else:
        y[BAD] = 3e6
    spikes = guarded(Table(x, y, shape), watched=watched)
    named = [line for line in spikes if "times the largest other" in line]
    assert len(named) == 2
    keys = {"input": ("batch:0", "batch:values"), "target": ("batch:1", "batch:target")}
    for line in named:
        assert f"(row {BAD}) reaches" in line
        assert any(key in line for key in keys[where])


@pytest.mark.parametrize(("watched", "given"), [(True, True), (True, False), (False, False)])
def test_target_that_the_model_never_sees_is_found_in_the_delivered_batch(
    watched: bool, given: bool
) -> None:
    x, y = table(4)
    y[BAD] = 3e6
    plain = dict(vars(LoaderIterator))
    spikes = guarded(Table(x, y, as_pair), watched=watched, told=False, given=given)
    place = " in batch tensor 2 of 2" if given else ""
    assert any(f"(row {BAD}) reaches 3000000{place}" in line for line in spikes)
    assert dict(vars(LoaderIterator)) == plain


def test_heavy_tailed_rows_are_not_outliers() -> None:
    x, y = table(4)
    x[BAD] *= 10
    assert not any("all others" in line for line in guarded(Table(x, y, as_pair), watched=False))


def test_outlying_rows_are_found_and_what_only_looks_like_one_is_not() -> None:
    parts = [torch.ones(1, 4) for _ in range(6)]
    parts[4] = 1e4 * parts[4]
    found = outlying_rows(0, parts)  # all micro-batches are compared
    assert found is not None
    assert (found.micro_batch, found.samples, found.tensor) == (4, (0,), "batch")
    x, _ = table(4)
    x[:, 2] = 1.7e9  # a column of large numbers does not hide the others
    x[5, 0] = 4000.0
    found = outlying_rows(0, [(x, torch.zeros(LONG))])
    assert found is not None
    assert (found.samples, found.evidence.sample_max) == ((5,), 4000.0)
    nodes = torch.ones(40, 3)
    nodes[8] = 1e6
    graph = {"nodes": nodes, "edges": torch.zeros(2, 90, dtype=torch.long)}
    found = outlying_rows(0, [graph])  # whose nodes are not samples
    assert found is not None
    assert (found.tensor, found.samples) == ("batch:nodes", ())
    mask = torch.zeros(8, 1, 5, 5)
    mask[3, ..., 4] = torch.finfo(torch.float32).min
    reward = torch.zeros(32)
    reward[7] = 1.0
    ignored = torch.randint(2, (32,))
    ignored[4] = -100
    halves = torch.cat([torch.ones(4, 3), 1e4 * torch.ones(4, 3)])
    tokens = torch.randint(50_000, (32, 12))
    for batch in (mask, reward, tokens, ignored, halves, torch.tensor([1.0, 1e9])):
        assert outlying_rows(0, [batch]) is None


def test_samples_are_named_only_where_rows_or_ids_prove_which_they_are() -> None:
    whole = torch.arange(24.0).reshape(8, 3)

    class Loader:
        """Recognizes every batch as the one with these rows of the data set."""

        observed = False

        def __init__(self, rows: list[int]) -> None:
            self.rows = rows

        def of_step(self, step: int) -> list[Delivered]:
            return []

        def find(self, batch: Any) -> FoundBatch:
            return FoundBatch(Delivered(2, 5, 0, self.rows, range(99), (weakref.ref(whole),)))

    (part,) = parts_of(step_of({"x": whole, "name": ["a", "b"]}), None, "name")
    assert part.ids is None  # of another count than samples
    guilty, step = origin_of(samples=(1, 6)), step_of((whole,))
    of_batches: Any = Loader([9])
    assert name_samples(guilty, step, of_batches, None).rows == ("row 9", "row 9")
    of_rows: Any = Loader(list(range(40, 48)))
    named = step_of({"x": whole, "name": torch.arange(100, 108)})
    both = name_samples(guilty, named, of_rows, "name")
    assert both.rows == ("row 41 (id 101)", "row 46 (id 106)")
    assert name_samples(guilty, step, None, None).rows == ()
    innocent = origin_of()
    assert name_samples(innocent, step, None, "name") is innocent

    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return " ".join(f"word{one}" for one in ids)

    tokens = step_of({"input_ids": torch.tensor([[1, 2], [3, 4]])})
    assert text_of(tokens, 1, 0, Words()) == "word3 word4"
    assert text_of(tokens, 1, 0, None) == ""
