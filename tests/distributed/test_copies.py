"""Ranks that hold copies of one model: who has drifted, who heals whom, what differs on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed.launch import of_all, on_ranks
from distributed.runs import LOOPS, Run, average, own_batch
from scenes import difference
from stepguard.ranks import copies
from stepguard.ranks.copies import (
    RankDigest,
    fact_fingerprint,
    fingerprints,
    odd_facts,
    odd_weights,
    same_batches,
    shards_that_differ,
    together,
)
from stepguard.tensors.values import local_part

KEEPS_GROUP = True
FEATURES, STEPS, EVERY, BAD_STEP, BAD_RANK = 4, 13, 4, 6, 1


# --- the comparison itself: in one process


def rank(number: int, weights: int = 5, gradients: int = 7, **more: Any) -> RankDigest:
    digests = (str(weights), str(gradients or ""))
    return RankDigest(rank=number, parts={"model": digests}, **more)


def parts(*of_ranks: dict[str, tuple[int, int]]) -> dict[int, dict[str, Any]]:
    return {number: {"model": part} for number, part in enumerate(of_ranks)}


@pytest.mark.parametrize(
    ("told", "groups"),
    [
        ([rank(0), rank(1), rank(2, gradients=8)], [(0, 1)]),
        # no gradient proves nothing
        ([rank(0, gradients=0), rank(1, gradients=0)], []),
        # shards of one model belong together whatever their gradients are
        ([rank(0, gradients=1, sharded=True), rank(1, gradients=2, sharded=True)], [(0, 1)]),
    ],
)
def test_equal_gradients_make_copies_of_one_model(
    told: list[RankDigest], groups: list[tuple[int, ...]]
) -> None:
    assert together(told) == groups


def test_only_shards_that_differ_are_asked_about() -> None:
    assert shards_that_differ([rank(0), rank(1)]) == set()
    assert shards_that_differ([rank(0), rank(1, weights=6)]) == {"model"}
    # stages are not compared with each other
    first = RankDigest(rank=0, parts={"first": ("1", "1")})
    second = RankDigest(rank=1, parts={"second": ("2", "2")})
    assert shards_that_differ([first, second]) == set()


GOOD = {"a": (1, 7), "b": (2, 8), "c": (3, 9)}
BAD = {"a": (1, 7), "b": (4, 8), "c": (5, 9)}


@pytest.mark.parametrize(
    ("of_ranks", "odd", "own"),
    [
        ([GOOD, GOOD, BAD, GOOD], ((2,), (0, 1, 3), "b", 2), ""),
        # of two ranks one has drifted, nobody knows which
        ([{"a": (1, 7)}, {"a": (2, 7)}], ((0, 1), (), "a", 1), ""),
        # ranks that train apart are named and not compared
        ([{"a": (1, 7)}, {"a": (2, 8)}], None, "a"),
        # experts are compared with the same expert only
        ([{"e": (1, 7)}, {"e": (2, 8)}] * 2, None, ""),
        ([{"e": (1, 7)}, {"e": (2, 8)}, {"e": (3, 7)}, {"e": (2, 8)}], ((0, 2), (), "e", 1), ""),
        # a parameter without a gradient, where all others are copies, and where they are not
        (
            [{"a": (1, 7), "frozen": (2, 0)}, {"a": (1, 7), "frozen": (3, 0)}],
            ((0, 1), (), "frozen", 1),
            "",
        ),
        ([{"a": (1, 7), "frozen": (2, 0)}, {"a": (4, 9), "frozen": (3, 0)}], None, "a"),
        ([{"frozen": (2, 0)}, {"frozen": (3, 0)}], None, "frozen"),
    ],
)
def test_minority_of_copies_has_drifted(
    of_ranks: list[Any], odd: tuple[Any, ...] | None, own: str
) -> None:
    found, apart = odd_weights(parts(*of_ranks))
    told = (found.ranks, found.agree, found.what, found.count) if found else None
    assert (told, apart) == (odd, own)


def test_odd_fact_is_told_with_its_rank() -> None:
    odd = odd_facts([rank(0), rank(1), rank(2)], {0: "0.1", 1: "0.05", 2: "0.1"})
    assert odd is not None
    assert (odd.ranks, odd.what) == ((1,), "rank 1: 0.05, rank 0: 0.1")
    assert odd_facts([rank(0), rank(1, gradients=9)], {0: "0.1", 1: "0.05"}) is None
    told = [rank(0), rank(1)]
    assert odd_facts(told, {0: "seed 0", 1: "seed 0"}) is None
    assert odd_facts(told, {0: "seed 0", 1: ""}) is None


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("21", "21", (0, 1)),
        ("21", "31", ()),
        ("21", "23", ()),
        ("11", "11", ()),
        ("2", "2", ()),
    ],
)
def test_the_same_batch_twice_while_batches_change(
    first: str, second: str, found: tuple[int, ...]
) -> None:
    told = [
        rank(0, batch=first[0], batch_before=first[1:]),
        rank(1, batch=second[0], batch_before=second[1:]),
    ]
    assert same_batches(told) == found
    # ranks that hold shards may read the same
    sharded = [rank(n, batch="2", batch_before="1", sharded=True) for n in range(2)]
    assert same_batches(sharded) == ()


def print_of(tensor: Tensor) -> str:
    return fingerprints({"x": tensor})["x"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.tensor([1j]), torch.tensor([-1j])),
        (torch.zeros(2), torch.full((2,), torch.nan)),
    ],
)
def test_any_other_bit_place_shape_or_dtype_gives_another_fingerprint(
    one: Tensor, other: Tensor
) -> None:
    assert print_of(one) != print_of(other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_copy_has_the_same_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 4).to(dtype)
    assert print_of(tensor) == print_of(tensor.clone())
    assert print_of(tensor.t()) == print_of(tensor.t().contiguous())


def test_every_piece_of_a_large_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE", 4)
    tensor = torch.randn(10)
    seen = {print_of(tensor)}
    for place in range(10):
        changed = tensor.clone()
        changed[place] += 1
        seen.add(print_of(changed))
    assert len(seen) == 11
    assert print_of(torch.empty(0)) == print_of(torch.empty(0))


def test_facts_are_compared_by_value() -> None:
    assert fact_fingerprint({"a": 1, "b": [None]}) == fact_fingerprint({"b": [None], "a": 1})
    assert fact_fingerprint({"a": 1}) != fact_fingerprint({"a": 2})


# --- real ranks


def layers(*, seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    found = [nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)]
    if norm:
        found.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*found)


def by_hand(model: nn.Module) -> nn.Module:
    """Gradients averaged by hooks, with nobody to broadcast the weights."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def hsdp() -> nn.Module:
    """Two copies of a model in two shards each: four ranks."""
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DistributedDataParallel(layers()),
    "zero": lambda: DistributedDataParallel(layers()),
    "constant": lambda: DistributedDataParallel(layers()),
    "batchnorm": lambda: DistributedDataParallel(layers(norm=True)),
    "ownnorm": lambda: DistributedDataParallel(layers(norm=True), broadcast_buffers=False),
    "apart": lambda: layers(seed=dist.get_rank()),
    "seeds": lambda: by_hand(layers(seed=dist.get_rank())),
    "manual": lambda: by_hand(layers()),
    "fsdp2": lambda: fully_shard(layers()),
    "hsdp": hsdp,
}


@torch.no_grad()
def flip_a_bit(model: nn.Module) -> None:
    part = local_part(next(iter(model.parameters()))).data.view(-1)[:1]
    part.view(torch.int32).bitwise_xor_(1 << 20)


def train(
    kind: str,
    loop: str,
    harm: Callable[[Any, Any], None] | None = None,
    *,
    same: bool = False,
    sampler: Callable[[Any], Any] | None = None,
    no_update_at: int = -1,
    **settings: Any,
) -> Run:
    """Train a few steps; `harm` comes over one rank before one step. Ranks draw their dropout."""
    model = MODELS[kind]()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "zero":
        # its import warns
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    torch.manual_seed(50 + dist.get_rank())
    loader: Any = None
    if sampler is not None:
        data = TensorDataset(torch.randn(256, FEATURES, generator=torch.Generator().manual_seed(1)))
        loader = DataLoader(data, batch_size=6, sampler=sampler(data))
    if kind == "constant":
        loader = [[own_batch(0, 6, FEATURES, rank=0)] for _ in range(STEPS)]
    with Run(loop, model, optimizer, loader=loader, **settings) as run:
        fetched = iter(run.guard.loader) if loader is not None else None
        for step in range(STEPS):
            if harm is not None and step == BAD_STEP and dist.get_rank() == BAD_RANK:
                harm(model, optimizer)
            inputs = own_batch(step, 6, FEATURES, rank=0 if same else None)
            if fetched is not None:
                inputs = next(fetched)[0]
            if step == no_update_at:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
            else:
                run.step(inputs)
    return run


def halve_the_rate(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] /= 2


@on_ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("what", ["bitflip", "rate", "seeds"])
def test_ranks_that_drift_apart_are_told_once(what: str, loop: str) -> None:
    harms = {"bitflip": lambda model, _: flip_a_bit(model), "rate": halve_the_rate}
    kind = "seeds" if what == "seeds" else "ddp"
    run = train(kind, loop, harms.get(what), compare_ranks_every=EVERY)
    (told,) = run.incidents
    assert (told.step, told.verdict.kind) == (0 if what == "seeds" else 7, "replica_drift")
    assert [finding.code for finding in told.findings] == ["SG704"]
    assert "param:0.weight" in told.verdict.summary and "ranks 0, 1" in told.verdict.summary
    assert ("rank 1: 0.005" in told.verdict.summary) == (what == "rate")
    assert told.decision is not None and told.decision.action == "note" and run.armed


@on_ranks(2)
@pytest.mark.parametrize("what", ["step", "watch", "samplers"])
def test_ranks_that_read_the_same_data_are_told_once(what: str) -> None:
    if what == "samplers":
        # every rank shuffles with a seed of its own
        run = train(
            "ddp",
            "step",
            sampler=lambda data: DistributedSampler(data, seed=dist.get_rank()),
            compare_ranks_every=EVERY,
        )
    else:
        run = train("ddp", what, same=True, compare_ranks_every=EVERY)
    (told,) = run.incidents
    assert told.verdict.kind == "same_data" and run.armed
    assert [finding.code for finding in told.findings] == ["SG705"]


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        *((kind, loop) for kind in ("ddp", "manual", "fsdp2") for loop in LOOPS),
        ("zero", "step"),
        ("batchnorm", "watch"),
        ("ownnorm", "step"),
        ("apart", "watch"),
        ("constant", "step"),
    ],
)
def test_what_differs_on_purpose_is_not_told_and_comparing_changes_no_bit(
    kind: str, loop: str
) -> None:
    run = train(kind, loop, compare_ranks_every=EVERY)
    assert run.told == [] and run.armed
    if kind in ("ddp", "manual", "fsdp2"):
        assert difference(run.weights(), train(kind, "bare").weights()) == ""


@on_ranks(2)
def test_rank_that_compares_alone_ends_that_and_goes_on() -> None:
    loop = "watch" if dist.get_rank() == BAD_RANK else "bare"
    run = train("ddp", loop, compare_ranks_every=EVERY, agree_timeout=0.5)
    if loop == "watch":
        assert run.armed and run.told == []
    assert difference(run.weights(), of_all(run.weights())[0]) == ""


@on_ranks(4)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_minority_of_four_ranks_is_named(loop: str) -> None:
    harm = halve_the_rate if loop == "step" else lambda model, _: flip_a_bit(model)
    run = train("ddp", loop, harm, compare_ranks_every=EVERY)
    (told,) = run.incidents
    assert told.origin is not None and told.origin.rank == 1
    assert "rank 1 holds different weights from ranks 0, 2, 3" in told.verdict.summary


@on_ranks(4)
@pytest.mark.parametrize("harm", ["flip", "none"])
def test_shards_are_compared_with_their_copies_only(harm: str) -> None:
    flip = (lambda model, _: flip_a_bit(model)) if harm == "flip" else None
    run = train("hsdp", "step", flip, compare_ranks_every=EVERY)
    told = [incident.verdict.summary for incident in run.incidents]
    assert len(told) == (harm == "flip") and all("ranks 1, 3" in words for words in told)


# --- a damaged rank is healed by one that holds a copy, bit for bit, and by no other


@torch.no_grad()
def damage_weight(model: Any, _: Any) -> None:
    local_part(next(iter(model.parameters()))).view(-1)[0] = torch.nan


@torch.no_grad()
def damage_slot(model: Any, optimizer: Any) -> None:
    # ZeroRedundancyOptimizer keeps the moments of its own share only
    state = getattr(optimizer, "optim", optimizer).state
    slots = next(state[p] for p in model.parameters() if state.get(p))
    local_part(slots["exp_avg"]).view(-1)[0] = torch.inf


def assert_healed(kind: str, loop: str, what: str, by: int) -> None:
    harm = damage_slot if what == "slot" else damage_weight
    run = train(kind, loop, harm, snapshot_every=EVERY)
    assert [(told[1], told[3]) for told in run.told] == [("nonfinite_parameter", "heal")]
    (incident,) = run.incidents
    assert incident.decision is not None
    assert incident.decision.reason == f"by rank {by}, which held a copy" and run.armed
    # under `watch` the step that met the damage is lost; a bad moment shows after the update
    lost = -1 if loop == "step" else BAD_STEP + (what == "slot")
    never = train(kind, "bare", no_update_at=lost)
    assert difference(run.weights(), never.weights()) == ""


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "loop", "what"),
    [
        ("ddp", "step", "weight"),
        ("ddp", "watch", "weight"),
        ("ddp", "step", "slot"),
        ("ddp", "watch", "slot"),
        ("zero", "step", "weight"),
        ("zero", "watch", "weight"),
        ("manual", "step", "weight"),
        ("batchnorm", "step", "weight"),
    ],
)
def test_healed_run_ends_as_one_that_was_never_damaged(kind: str, loop: str, what: str) -> None:
    assert_healed(kind, loop, what, by=0)


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "loop", "what"),
    [("hsdp", "step", "weight"), ("hsdp", "watch", "slot"), ("ddp", "step", "weight")],
)
def test_copy_of_the_same_shard_heals(kind: str, loop: str, what: str) -> None:
    assert_healed(kind, loop, what, by=3 if kind == "hsdp" else 0)


@on_ranks(2)
def test_ranks_that_train_apart_do_not_heal_each_other() -> None:
    run = train("apart", "step", damage_weight, snapshot_every=EVERY)
    assert [told[3] for told in run.told] == ["rewind"]
    assert difference(run.weights(), train("apart", "bare").weights()) == ""


@on_ranks(4)
@pytest.mark.parametrize("loop", LOOPS)
def test_drifted_minority_gets_the_weights_of_the_majority(loop: str) -> None:
    run = train(
        "ddp",
        loop,
        lambda model, _: flip_a_bit(model),
        compare_ranks_every=EVERY,
        anomalies="act",
        snapshot_every=EVERY,
    )
    assert [(told[0], told[1], told[3]) for told in run.told] == [(7, "replica_drift", "heal")]
    assert difference(run.weights(), of_all(run.weights())[0]) == ""
