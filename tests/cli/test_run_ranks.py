"""`stepguard run` under torchrun: two gloo ranks that must stay together."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli.scripts import HEAD, NET, SOURCE, incidents, line_of, origin_of, python, write
from stepguard.journal import read_run

PARALLEL = """
import gc
import torch.distributed as dist
EARLY
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
def say(line):  # in one piece: print writes the line and its end apart, and two ranks mix them
    os.write(1, (line + "\\n").encode())
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
TRIED
model = DDP(model)
torch.manual_seed(rank)
for step in range(6):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    shift = torch.ones(6)
    if BAD and step == 3 and rank == 1:
        shift[2] = -1.0
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, shift), y)
    loss.backward()
    optimizer.step()
    say(f"rank{rank} {step} {loss.item()!r}")
total = sum(p.double().sum() for p in model.parameters()).item()
say(f"rank{rank} end {total!r}")
del model, optimizer, loss  # they hold the group, and its threads should end before Python does
gc.collect()
dist.destroy_process_group()
"""
EARLY = (
    "import torch.distributed.nn.functional  # before there is a group: its functions keep the "
    "one they find"
)
WATCHED_TO_THE_END = """
import atexit, os, sys
@atexit.register  # first, so called last
def count():
    from process_group import threads
    os.write(1, f"threads {len(threads())}\\n".encode())
from stepguard.cli.app import main
sys.argv = ["stepguard", "run", "train.py"]
main()
"""


IN_THE_LOSS = """
    keep = torch.ones(6)
    if step in (2, 4) and rank == 1:
        keep[3] = 0.0
    loss = -torch.log(model(x).softmax(1).gather(1, y[:, None])[:, 0] * keep).mean()  # IN THE LOSS
"""


SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
torch.manual_seed(rank)
for step in range(6):
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    if BAD and step == 3 and rank == 1:
        x[2, 0] = torch.nan
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
total = sum(p.to_local().double().sum() for p in model.parameters()).item()
os.write(1, f"rank{rank} end {total!r}\\n".encode())
dist.destroy_process_group()
"""


def torchrun(
    folder: Path, *words: str, fresh: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Two ranks as torchrun starts them; `fresh` ones by torchrun itself."""
    return python(folder, *words, timeout=280, ranks=2, fresh=fresh, **variables)


def parallel(*, bad: bool = False, tried: str = "", early: str = EARLY) -> str:
    body = PARALLEL.replace("BAD", str(bad)).replace("TRIED", tried)
    return HEAD + NET + body.replace("EARLY", early)


def by_rank(done: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(f"rank{rank} ")]


@pytest.mark.parametrize(
    "tried", ["", "model(torch.randn(2, 4))"], ids=["", "tried out before it became parallel"]
)
def test_a_nan_on_rank_1_is_skipped_by_both_ranks_and_placed_there(
    tmp_path: Path, tried: str
) -> None:
    script = write(tmp_path, parallel(bad=True, tried=tried))
    words = ("-m", "stepguard", "run", "--run-dir", "run", "train.py")
    done = torchrun(tmp_path, *words, fresh=not tried)
    assert done.returncode == 0, done.stderr
    assert by_rank(done, 0)[-1].split()[-1] == by_rank(done, 1)[-1].split()[-1] != "nan"
    for rank in (0, 1):
        record = read_run(tmp_path / "run", rank)
        (incident,) = record.incidents
        assert [line["committed"] for line in record.steps] == [True, True, True, False, True, True]
        origin = origin_of(incident)
        assert (incident.step, incident.reading.bad_ranks, origin.rank) == (3, (1,), 1)
        assert (origin.op, origin.source) == ("aten.log", f"train.py:{line_of(script)}")
        assert record.header["agreement"] == (
            "collective" if tried else "spread"
        )  # of the guard that made way


def test_a_healthy_parallel_script_prints_what_it_prints_alone(tmp_path: Path) -> None:
    write(tmp_path, parallel())
    bare, under_guard = (
        torchrun(tmp_path, "train.py"),
        torchrun(tmp_path, "-m", "stepguard", "run", "train.py"),
    )
    assert bare.returncode == under_guard.returncode == 0, under_guard.stderr
    for rank in (0, 1):
        assert by_rank(under_guard, rank) == by_rank(bare, rank)
    assert under_guard.stderr.count("6 steps guarded, 0 incidents") == 1


def test_the_threads_of_a_process_group_end_before_python_does(tmp_path: Path) -> None:
    write(
        tmp_path,
        parallel(early="").replace("del model, optimizer, loss", "held = model, optimizer, loss"),
    )
    write(tmp_path, WATCHED_TO_THE_END, "under.py")
    paths = os.pathsep.join([SOURCE, str(Path(__file__).parents[1])])
    done = torchrun(tmp_path, "under.py", fresh=True, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("threads")] == [
        "threads 0",
        "threads 0",
    ]


def test_a_rank_that_traces_takes_part_in_every_collective(tmp_path: Path) -> None:
    usual = "    loss = nn.functional.cross_entropy(model(x, shift), y)\n"
    script = write(tmp_path, parallel().replace(usual, IN_THE_LOSS))
    done = torchrun(tmp_path, "-m", "stepguard", "run", "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert by_rank(done, 0)[-1].split()[-1] == by_rank(done, 1)[-1].split()[-1] != "nan"
    first, second = map(origin_of, incidents(tmp_path / "run"))
    assert (first.phase, first.op, first.rank) == ("loss", None, 1)
    assert (second.op, second.rank, second.source) == (
        "aten.log",
        1,
        f"train.py:{line_of(script, '# IN THE LOSS')}",
    )


def test_a_healthy_script_with_fsdp2_stays_guarded_and_prints_what_it_prints_alone(
    tmp_path: Path,
) -> None:
    write(tmp_path, HEAD + SHARDED.replace("BAD", "False"))
    bare = torchrun(tmp_path, "train.py")
    under_guard = torchrun(tmp_path, "-m", "stepguard", "run", "train.py")
    assert under_guard.returncode == 0, under_guard.stderr
    for rank in (0, 1):
        assert by_rank(under_guard, rank) == by_rank(bare, rank) != []
    assert "6 steps guarded, 0 incidents" in under_guard.stderr
    assert "disarmed" not in under_guard.stderr


def test_a_nan_on_one_rank_of_fsdp2_is_skipped_by_both(tmp_path: Path) -> None:
    write(tmp_path, HEAD + SHARDED.replace("BAD", "True"))
    done = torchrun(tmp_path, "-m", "stepguard", "run", "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert by_rank(done, rank)[-1].split()[-1] != "nan"
        record = read_run(tmp_path / "run", rank)
        (incident,) = record.incidents
        assert [line["committed"] for line in record.steps] == [True, True, True, False, True, True]
        assert (incident.step, incident.reading.bad_ranks, origin_of(incident).rank) == (3, (1,), 1)
    assert "disarmed" not in done.stderr
