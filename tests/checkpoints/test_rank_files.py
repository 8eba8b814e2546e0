"""A checkpoint that several ranks write: nothing is sealed before all have, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import stepguard
from stepguard._errors import StoreError
from stepguard.checkpoints import Health, Store
from stepguard.tensors.names import TensorPart

HEALTHY = Health(loss=1.0, level=1.1, steps_watched=50, incidents=0, good=True)
WEIGHT = torch.arange(42.0).reshape(7, 6)
ROWS = {2: [(0, 4), (4, 3)], 4: [(0, 2), (2, 2), (4, 2), (6, 1)], 1: [(0, 7)]}
"""First row and number of rows of every rank, as FSDP2 divides seven of them."""


def part(rank: int, ranks: int) -> TensorPart:
    at, size = ROWS[ranks][rank]
    return TensorPart(whole=(7, 6), offset=(at, 0), size=(size, 6))


def held(rank: int, ranks: int, weight: Tensor = WEIGHT) -> dict[str, Tensor]:
    at, size = ROWS[ranks][rank]
    own = {"model/w": weight[at : at + size], f"rng/{rank}/torch": torch.tensor([rank])}
    return {**own, "optimizer/w/step": torch.tensor(3.0)} if rank == 0 else own


def save(store: Store, ranks: int, step: int = 10, weight: Tensor = WEIGHT) -> Path:
    folder = store.begin(step)
    digests = []
    for rank in range(ranks):
        tensors = held(rank, ranks, weight)
        digests.append(store.write_part(folder, rank, tensors, {"model/w": part(rank, ranks)}))
    return store.finish(folder, step, {"note": "x"}, HEALTHY, digests)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def test_parts_of_all_ranks_open_as_whole_tensors(store: Store) -> None:
    path = save(store, 4)
    opened = store.open()
    assert opened.path == path and opened.step == 10 and opened.facts["note"] == "x"
    assert torch.equal(opened.tensors["model/w"], WEIGHT)
    assert opened.tensors["rng/3/torch"].tolist() == [3]
    assert store.list()[0].good


@pytest.mark.parametrize(("saved", "opened"), [(4, 2), (2, 4), (4, 4), (4, 1), (1, 4)])
def test_every_rank_of_another_number_reads_its_own_part(
    store: Store, saved: int, opened: int
) -> None:
    path = save(store, saved)
    for rank in range(opened):
        wanted = part(rank, opened)

        def select(
            name: str, shape: tuple[int, ...], wanted: TensorPart = wanted
        ) -> TensorPart | None:
            assert name != "model/w" or shape == (7, 6)
            return wanted if name == "model/w" else None

        found = store.open(path, select=select).tensors
        at, size = ROWS[opened][rank]
        assert list(found) == ["model/w"]
        assert torch.equal(found["model/w"], WEIGHT[at : at + size])


def test_copy_that_another_rank_writes_and_an_empty_part_are_left_out(store: Store) -> None:
    folder = store.begin(1)
    ones = torch.ones(2)
    whole = TensorPart(whole=(2,), offset=(0,), size=(2,))
    copy = TensorPart(whole=(2,), offset=(0,), size=(2,), first=False)
    none = TensorPart(whole=(2,), offset=(2,), size=(0,))
    digests = [
        store.write_part(folder, 0, {"model/w": ones}, {"model/w": whole}),
        store.write_part(folder, 1, {"model/w": ones}, {"model/w": copy}),
        store.write_part(folder, 2, {"model/w": torch.empty(0)}, {"model/w": none}),
    ]
    path = store.finish(folder, 1, {}, HEALTHY, digests)
    assert torch.equal(store.open(path).tensors["model/w"], ones)
    assert stepguard.verify(path).ok


def test_nothing_is_sealed_where_a_rank_has_not_written(store: Store) -> None:
    first = save(store, 2, step=5)
    folder = store.begin(6)
    digest = store.write_part(folder, 0, held(0, 2), {"model/w": part(0, 2)})
    with pytest.raises(StoreError, match=r"rank-00001\.json is missing"):
        store.finish(folder, 6, {}, HEALTHY, [digest, digest])
    assert [entry.path for entry in store.list()] == [first]
    store.drop(folder)
    assert store.open().path == first and not folder.exists()


def test_shard_of_another_step_is_refused_and_found(store: Store) -> None:
    old = save(store, 2, step=5, weight=WEIGHT + 1)
    new = save(store, 2, step=6)
    name = "rank-00001-00000.safetensors"
    (new / name).chmod(0o644)
    (new / name).write_bytes((old / name).read_bytes())
    with pytest.raises(StoreError, match="model/w differs"):
        store.open(new)
    opened = store.open("last-good")
    assert opened.path == old and opened.passed_over[0].path == new
    assert {error.kind for error in stepguard.verify(new).errors} == {"checksum"}


def test_missing_shard_is_refused_and_found(store: Store) -> None:
    path = save(store, 2)
    (path / "rank-00001-00000.safetensors").unlink()
    with pytest.raises(StoreError, match=r"rank-00001-00000\.safetensors is missing"):
        store.open(path)
    (error,) = stepguard.verify(path).errors
    assert error.kind == "missing"


def test_seal_of_a_rank_that_was_changed_is_refused_and_found(store: Store) -> None:
    path = save(store, 2)
    seal = path / "rank-00001.json"
    seal.chmod(0o644)
    seal.write_bytes(seal.read_bytes().replace(b"float32", b"float16"))
    with pytest.raises(StoreError, match=r"rank-00001\.json differs"):
        store.open(path)
    assert not stepguard.verify(path).ok


def test_nan_in_one_shard_is_not_written_and_names_the_tensor(store: Store) -> None:
    folder = store.begin(1)
    bad = {"model/w": torch.full((3, 6), torch.nan)}
    with pytest.raises(StoreError, match="model/w holds NaN or Inf"):
        store.write_part(folder, 1, bad, {"model/w": part(1, 2)})


def test_good_checkpoint_verifies_by_parameter_and_shard(store: Store) -> None:
    found = stepguard.verify(save(store, 4))
    assert found.ok and not found.problems, found.problems
    assert found.format == "sealed" and found.step == 10
    assert found.roles["parameter"] == 4 and found.roles["optimizer"] == 1


def added(store: Store) -> Path:
    """Rank 0 writes what all ranks hold, and rank 1 adds its own afterwards."""
    facts = {"rng": {"0": "a"}, "level": 1.0}
    path = store.save(10, {"model/w": WEIGHT, "rng/0/torch": torch.tensor([0])}, facts, HEALTHY)
    tensors = {"rng/1/torch": torch.tensor([1]), "rank/1/model/seen": torch.tensor(2.0)}
    store.write_part(path, 1, tensors, {}, facts={"rng": "b", "ranks": {"has": ["model/seen"]}})
    return path


def test_rank_adds_its_own_to_what_another_has_sealed(store: Store) -> None:
    path = added(store)
    opened = store.open()
    assert torch.equal(opened.tensors["model/w"], WEIGHT)
    assert opened.tensors["rng/1/torch"].tolist() == [1]
    assert opened.facts == {
        "rng": {"0": "a", "1": "b"},
        "level": 1.0,
        "ranks": {"1": {"has": ["model/seen"]}},
    }
    assert stepguard.verify(path).problems == ()


def test_rank_that_was_killed_before_its_seal_has_added_nothing(store: Store) -> None:
    path = added(store)
    (path / "rank-00001.json").unlink()
    opened = store.open()
    assert opened.facts["rng"] == {"0": "a"} and "rng/1/torch" not in opened.tensors
    assert stepguard.verify(path).ok


@pytest.mark.parametrize("name", ["rank-00001.json", "rank-00001-00000.safetensors"])
def test_damage_to_what_a_rank_has_added_is_refused_and_found(store: Store, name: str) -> None:
    path = added(store)
    content = bytearray((path / name).read_bytes())
    content[-3] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(StoreError, match=r"rank-00001|not what was sealed"):
        store.open(path)
    assert not stepguard.verify(path).ok
