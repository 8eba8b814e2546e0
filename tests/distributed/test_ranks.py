"""Two real processes: one rank's trouble is everybody's, decided together, and nothing hangs."""

from __future__ import annotations

import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stepguard
from distributed.launch import Case, of_all, on_ranks, run_cases, warned
from distributed.runs import LOOPS, Run, disarmings, is_finite
from pairwise import pairwise
from scenes import difference
from stepguard.engine import transaction
from stepguard.engine.drivers import step as step_end
from stepguard.engine.incident import incident_record, situation
from stepguard.engine.watch import live_tracing
from stepguard.ranks import one_decision

FEATURES, CLASSES, STEPS, BAD_STEP, BAD_RANK = 6, 3, 6, 2, 1
WRAPS, FUSED = ("ddp", "manual"), ("plain", "fused")
BOTH = list(product(LOOPS, WRAPS))
Batch = tuple[Tensor, Tensor, str]


def batch(step: int, trouble: str = "") -> Batch:
    """Each rank has its own data; `trouble` says what is wrong with that of one."""
    rank = dist.get_rank()
    source = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, FEATURES, generator=source)
    targets = torch.randint(CLASSES, (4,), generator=source)
    if rank != BAD_RANK:
        return inputs, targets, ""
    if trouble == "input":
        inputs[0, 0] = torch.nan
    if trouble == "labels":
        targets.fill_(-100)
    if trouble == "statistics":
        inputs *= 1e20
    return inputs, targets, trouble


def loss_of(model: nn.Module, data: Batch) -> Tensor:
    inputs, targets, trouble = data
    out = model(inputs).tanh()
    loss = nn.functional.cross_entropy(out, targets)
    if trouble == "backward":
        return loss + torch.sqrt((out * 0.0).sum())
    return loss + 50.0 if trouble == "spike" else loss


def trained(
    loop: str,
    wrap: str,
    troubles: dict[int, str],
    fused: str = "plain",
    *,
    skip: bool = True,
    jump_at: int = -1,
    before: Callable[[nn.Module, Any], None] | None = None,
    at_step: Callable[[int], None] = lambda step: None,
    **settings: Any,
) -> Run:
    """Train; a bare loop that skips does not see the troubled steps, on any rank."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused == "fused")
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    if before is not None:
        before(model, optimizer)
    settings.setdefault("locate", False)
    run = Run(loop, model, optimizer, loss_of, by_hand=wrap == "manual", **settings)
    with run:
        for step in range(STEPS):
            if loop == "bare" and skip and step in troubles:
                continue
            at_step(step)
            if step == jump_at:
                optimizer.param_groups[0]["lr"] *= 10
            run.step(batch(step, troubles.get(step, "")))
    return run


@cache
def without(skipped: frozenset[int], wrap: str, fused: str) -> dict[str, Any]:
    """Where an unguarded run ends that never makes these steps."""
    return trained("bare", wrap, dict.fromkeys(skipped, ""), fused).state()


def assert_as_bare(run: Run, wrap: str, troubles: dict[int, str], fused: str = "plain") -> None:
    assert difference(run.state(), without(frozenset(troubles), wrap, fused)) == ""


def assert_one_decision(run: Run) -> None:
    """Every rank has been told the same, and has the same weights."""
    first = of_all((run.told, run.halted, run.weights()))[0]
    assert (run.told, run.halted) == first[:2]
    assert difference(run.weights(), first[2]) == ""


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce", "barrier")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives that Python code asks for; those of DistributedDataParallel itself are in C++."""
    seen: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*COLLECTIVES, "broadcast_object_list"):
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        yield seen


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap", "fused"), pairwise(product(LOOPS, WRAPS, FUSED)))
def test_healthy_ranks_are_the_same_as_bare_ones_and_exchange_little(
    loop: str, wrap: str, fused: str
) -> None:
    with counted() as bare:
        expected = trained("bare", wrap, {}, fused)
    with counted() as seen:
        run = trained(loop, wrap, {}, fused)
    assert difference(run.state(), expected.state()) == ""
    assert run.told == [] and run.armed
    if loop == "step":
        bare = Counter({"all_reduce": seen["all_reduce"] - STEPS}) if wrap == "manual" else bare
    assert dict(seen - bare) == ({} if wrap == "ddp" else {"all_reduce": STEPS})


@on_ranks(2)
@pytest.mark.parametrize(
    ("trouble", "loop", "wrap", "fused"),
    pairwise(product(["input", "labels", "backward", "statistics"], LOOPS, WRAPS, FUSED)),
)
def test_trouble_of_one_rank_is_skipped_by_all(
    trouble: str, loop: str, wrap: str, fused: str
) -> None:
    run = trained(loop, wrap, {BAD_STEP: trouble}, fused)
    ((step, _, ranks, action),) = run.told
    assert (step, ranks, action) == (BAD_STEP, (BAD_RANK,), "skip")
    assert run.armed
    assert_as_bare(run, wrap, {BAD_STEP: trouble}, fused)
    assert_one_decision(run)


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap", "why"), pairwise(product(LOOPS, WRAPS, ["data", "rate"])))
def test_jump_of_one_ranks_loss_hangs_nobody(loop: str, wrap: str, why: str) -> None:
    jumps = dict.fromkeys((BAD_STEP, BAD_STEP + 1), "spike")
    jump_at = BAD_STEP - 1 if why == "rate" else -1
    run = trained(loop, wrap, jumps, jump_at=jump_at)
    assert_one_decision(run)
    expected = trained("bare", wrap, jumps, jump_at=jump_at, skip=False)
    if run.told == []:
        assert difference(run.state(), expected.state()) == ""


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_all_ranks_halt_together_with_the_weights_from_before(loop: str, wrap: str) -> None:
    troubles = dict.fromkeys(range(1, STEPS), "input")
    run = trained(loop, wrap, troubles, policy=stepguard.Policy(max_consecutive=3))
    assert run.halted == 4
    assert_as_bare(run, wrap, troubles)


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_bad_state_of_one_rank_stops_all_at_the_first_step(loop: str, wrap: str) -> None:
    def resumed_wrong(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == BAD_RANK:
            optimizer.state[next(iter(model.parameters()))]["exp_avg"].fill_(torch.nan)

    run = trained(loop, wrap, {}, before=resumed_wrong)
    assert run.halted == 0
    assert [told[:2] for told in run.told] == [(0, "nonfinite_optimizer_state")]


# --- something of the guard's own fails on one rank: it costs that, never the veto

WEAK_SPOTS: dict[str, list[tuple[Any, str]]] = {
    "closer_look": [(transaction, "examine")],
    "own_trouble": [(one_decision, "own_trouble")],
    "foreign": [(situation, "mark_foreign_parameter")],
    "causes": [(transaction, "find_causes")],
    "deciding": [(situation, "choose_remedy")],
    "recording": [(incident_record, "note_lost")],
    "locating": [(transaction, "locate"), (live_tracing, "locate")],
}


@on_ranks(2)
@pytest.mark.parametrize(("spot", "loop", "wrap"), pairwise(product(WEAK_SPOTS, LOOPS, WRAPS)))
def test_fault_while_a_bad_step_is_explained_costs_the_explanation_only(
    spot: str, loop: str, wrap: str
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("a fault of one rank")

    # the first rank decides for all
    faulty = 0 if spot == "deciding" else BAD_RANK
    with pytest.MonkeyPatch.context() as patch, warned() as said:
        if dist.get_rank() == faulty:
            for module, function in WEAK_SPOTS[spot]:
                patch.setattr(module, function, fails)
        run = trained(loop, wrap, {BAD_STEP: "input"}, locate=True)
    assert run.armed and disarmings(said) == []
    assert [(told[0], told[3]) for told in run.told] == [(BAD_STEP, "skip")]
    if spot not in ("causes", "locating"):
        assert run.told[0][2] == (BAD_RANK,)
    assert_as_bare(run, wrap, {BAD_STEP: "input"})
    assert_one_decision(run)


@on_ranks(2)
@pytest.mark.parametrize(("how", "loop"), list(product(["full", "gone", "start"], LOOPS)))
def test_folder_of_one_rank_that_cannot_be_written_costs_no_veto(
    how: str, loop: str, folder: Path
) -> None:
    bad = dist.get_rank() == BAD_RANK
    own = folder / str(dist.get_rank())
    if how == "start" and bad:
        own.write_text("a file, where a folder is wanted")

    def spoil(step: int) -> None:
        if step != 1 or not bad:
            return
        if how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        if how == "gone":
            shutil.rmtree(own)

    with warned() as said:
        run = trained(
            loop, "ddp", {BAD_STEP: "input"}, at_step=spoil, locate=True, run_dir=own / "run"
        )
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert run.armed and disarmings(said) == []
    assert [(told[0], told[3]) for told in run.told] == [(BAD_STEP, "skip")]
    assert_as_bare(run, "ddp", {BAD_STEP: "input"})
    assert_one_decision(run)
    if how != "gone":
        assert bad == any("cannot be written" in str(one.message) for one in said)


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "wrap", "later"), pairwise(product(LOOPS, WRAPS, ["healthy", "troubled"]))
)
def test_guard_that_fails_on_one_rank_hangs_nobody_and_no_rank_takes_a_nan(
    loop: str, wrap: str, later: str
) -> None:
    troubles = {BAD_STEP + 2: "input"} if later == "troubled" else {}
    original, calls = step_end.add_to_history, Counter[str]()

    def failing(*args: Any) -> None:
        calls["committed"] += 1
        if dist.get_rank() == BAD_RANK and calls["committed"] == 2:
            raise OSError("the disk of one rank is full")
        original(*args)

    with pytest.MonkeyPatch.context() as patch, warned() as said:
        patch.setattr(step_end, "add_to_history", failing)
        run = trained(loop, wrap, troubles)
    assert run.told == []
    expected, got = trained("bare", wrap, troubles).state(), run.state()
    if dist.get_rank() == BAD_RANK:
        assert ["the disk of one rank is full" in text for text in disarmings(said)] == [True]
        if troubles:
            # nobody puts back the norm statistics of a rank without a guard
            statistics = [name for name in got if "running" in name or "batches" in name]
            for name in statistics:
                del got[name], expected[name]
    elif troubles:
        assert ["rank 1 has disarmed itself" in text for text in disarmings(said)] == [True]
    else:
        assert disarmings(said) == [] and run.armed
    assert difference(got, expected) == ""


@on_ranks(2)
def test_gradient_taken_without_the_guard_after_a_bad_step_is_healthy() -> None:
    run = trained("step", "ddp", {STEPS - 1: "labels"})
    assert len(run.told) == 1
    run.optimizer.zero_grad()
    loss_of(run.model, batch(0)).backward()
    assert is_finite({str(n): p.grad for n, p in enumerate(run.model.parameters())})


def skipping_alone() -> bool:
    """The rank with the bad loss goes on with its next batch, the others know nothing."""
    run = trained("bare", "ddp", {}, skip=False)
    for step in range(STEPS):
        data = batch(step, "input" if step == BAD_STEP else "")
        if torch.isfinite(loss_of(run.model, data)):
            run.step(data)
    weights = of_all(run.weights())
    return difference(weights[0], weights[1]) == "" and is_finite(weights[0])


def test_rank_that_skips_alone_ruins_or_hangs_the_run(tmp_path: Path) -> None:
    """The counter-example: why the guard decides on all ranks."""
    case = Case("alone", "skipping_alone", {})
    (ends,), _ = run_cases("distributed.test_ranks", [case], 2, tmp_path, group_seconds=3)
    assert any(why for why, _ in ends) or ends == [("", False), ("", False)]


# --- what ranks exchange grows neither with them nor with the model


class Counting:
    """Stands before torch's collectives: every Python spelling ends in one of these three."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.size = 0
        for name in ("all_reduce", "all_gather", "broadcast"):
            counting = self._counting(getattr(dist.distributed_c10d, name))
            # functions of torch call each other by the names of their own module
            patch.setattr(dist.distributed_c10d, name, counting)
            patch.setattr(dist, name, counting)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # all_gather puts in its second argument, the others their first
            given = next(one for one in reversed(args[:2]) if isinstance(one, Tensor))
            self.calls += 1
            self.size += given.numel() * given.element_size()
            return original(*args, **kwargs)

        return call

    def taken(self) -> list[int]:
        found = [self.calls, self.size]
        self.calls = self.size = 0
        return found


def exchanged(wrap: str, layers: int, fault: str = "input") -> list[list[int]]:
    """Collectives and bytes of every step of this rank; one of them is bad: a batch of one rank, or
    the weights of all, which takes a rewind.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[list[int]] = []
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, warned():
        counting = Counting(patch)
        with Run("step", model, optimizer) as run:
            for step in range(4):
                inputs = torch.full((2, 2), float(step + rank))
                if step == BAD_STEP and fault == "weights":
                    with torch.no_grad():
                        next(model.parameters()).fill_(torch.nan)
                elif step == BAD_STEP and rank == BAD_RANK:
                    inputs[0, 0] = torch.nan
                run.step(inputs)
                found.append(counting.taken())
    assert run.armed
    decisions = [incident.decision for incident in run.incidents]
    actions = [decision.action for decision in decisions if decision is not None]
    assert actions == ["rewind" if fault == "weights" else "skip"]
    return found


def test_exchanges_of_a_step_grow_neither_with_ranks_nor_with_the_model(tmp_path: Path) -> None:
    kinds = list(product(WRAPS, (2, 60)))
    cases = [Case("", "exchanged", {"wrap": wrap, "layers": layers}) for wrap, layers in kinds]
    of_ranks = []
    for ranks in (2, 4):
        out = tmp_path / str(ranks)
        out.mkdir()
        ends, said = run_cases("distributed.test_ranks", cases, ranks, out)
        assert not any(why for by_rank in ends for why, _ in by_rank), (ends, said)
        of_ranks.append([[steps for _, steps in by_rank] for by_rank in ends])
    for (wrap, _), pair, four in zip(kinds, *of_ranks, strict=True):
        steps = pair[0]
        assert all(other == steps for other in (*pair, *four))
        calls, size = steps.pop(BAD_STEP)
        assert steps == [[0, 0] if wrap == "ddp" else [1, 32]] * 3
        assert calls == (6 if wrap == "ddp" else 7) and size < 4096


def test_rewind_takes_no_exchange_of_its_own(tmp_path: Path) -> None:
    """Where the reading shows that the weights are bad, the offers come with the origins."""
    cases = [Case("", "exchanged", {"wrap": "ddp", "layers": 2, "fault": "weights"})]
    ends, said = run_cases("distributed.test_ranks", cases, 2, tmp_path)
    assert not any(why for by_rank in ends for why, _ in by_rank), (ends, said)
    for _, steps in ends[0]:
        # reading, origins with offers, decision; then the step that is run again is compared. Each
        # is a size and then the content.
        assert steps[BAD_STEP][0] == 8
