"""Models that torch itself shards: FSDP2, FSDP1, tensor parallelism, and meshes of four ranks.

No rank replays anything alone, and one rank's trouble poisons nobody.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stepguard
from distributed.launch import Case, of_all, on_ranks, run_cases
from distributed.matrix import cell
from distributed.runs import LOOPS, Run, clipped, is_finite, local
from distributed.test_ranks import counted
from pairwise import pairwise
from scenes import difference
from stepguard import Guard, GuardConfig
from stepguard.engine.drivers import step as step_end

KEEPS_GROUP = True
FEATURES, CLASSES, RATE = 6, 3, 0.05
STEPS, BAD_STEPS, BAD_RANK = 6, (2, 3), 1
LONG = 40
"""Steps after which the usual level of the loss is known."""
CLIP = 0.7
"""Below the norm of most steps."""
ROWS = {
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "tp": "tensor parallel",
    "hsdp": "HSDP",
    "both": "FSDP2 and tensor parallel",
}
ENGINES = ("fsdp2", "fsdp1", "tp")
NEIGHBOURS = ("offload", "fused", "foreach", "dropout", "accumulate")
"""FSDP2 with another policy, another kernel of the optimizer, or another loop."""
Batch = tuple[Tensor, Tensor, str, bool | None]
"""Inputs, targets, what is wrong with it, and where gradients are accumulated: is it the last?"""


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    model = nn.Sequential(*layers)
    model.register_buffer("level", torch.zeros(1))
    return model


def shard(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for part in model.children():
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def split(model: nn.Module, mesh: Any = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def pairs(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def both() -> nn.Module:
    """Tensor parallel in pairs, FSDP2 over the pairs."""
    mesh = pairs("data", "tensor")
    return shard(split(network(), mesh["tensor"]), mesh["data"])


def meshes() -> nn.Module:
    """Parameters on two meshes and on none: the last layer is FSDP2's, over pairs of ranks."""
    model = network()
    fully_shard(model.get_submodule("0"), mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model.get_submodule("2"), mesh=pairs("copy", "shard"))
    model.register_parameter("plain", nn.Parameter(torch.ones(CLASSES)))
    return model


def mixed() -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(network(), mp_policy=policy)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp1": lambda: FullyShardedDataParallel(network(), device_id=torch.device("cpu")),
    "dropout": lambda: shard(network(dropout=0.3)),
    "tp": lambda: split(network()),
    "mixed": mixed,
    "offload": lambda: shard(network(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp": lambda: shard(network(), pairs("copy", "shard")),
    "both": both,
    "meshes": meshes,
}


def build(engine: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer, the same weights on every rank before they are sharded."""
    model = MODELS.get(engine, lambda: shard(network()))()
    kernel = {engine: True} if engine in ("fused", "foreach") else {}
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, **kernel)


def data_rank(engine: str) -> int:
    """Ranks that compute one batch together share their data."""
    return {"tp": 0, "both": dist.get_rank() // 2}.get(engine, dist.get_rank())


def has_trouble(engine: str) -> bool:
    """The second rank, or the second pair where pairs share their data."""
    return data_rank(engine) == BAD_RANK if engine == "both" else dist.get_rank() == BAD_RANK


def batch(engine: str, step: int, trouble: str, last: bool | None = None) -> Batch:
    source = torch.Generator().manual_seed(100 * step + 10 * bool(last) + data_rank(engine))
    inputs = torch.randn(4, FEATURES, generator=source)
    targets = torch.randint(CLASSES, (4,), generator=source)
    if trouble == "two":
        # each rank has a cause of its own
        trouble = "input" if has_trouble(engine) else "labels"
    elif not has_trouble(engine):
        trouble = ""
    if trouble == "input":
        inputs[2, 0] = torch.nan
    if trouble == "labels":
        targets.fill_(-100)
    return inputs, targets, trouble, last


def batches(engine: str, step: int, trouble: str) -> list[Batch]:
    if engine != "accumulate":
        return [batch(engine, step, trouble)]
    return [batch(engine, step, trouble, last=False), batch(engine, step, "", last=True)]


FIRED = Counter[str]()


def hit_once(grad: Tensor) -> Tensor:
    """What a failing device would do: it does not happen again."""
    FIRED["hits"] += 1
    return grad * torch.nan if FIRED["hits"] == 1 else grad


def loss_of(model: Any, data: Batch) -> Tensor:
    inputs, targets, trouble, last = data
    if last is not None:
        model.set_requires_gradient_sync(last)
    out = model(inputs)
    loss = nn.functional.cross_entropy(out, targets)
    if hasattr(model, "plain"):
        # the same on every rank, as its gradient is not exchanged by anybody
        loss = loss + (model.plain * model.plain).sum() / 10
    if trouble == "backward":
        return loss + torch.sqrt((out * 0.0).sum())
    if trouble == "forward":
        return loss + torch.log(-out.detach().abs().sum() - 1.0)
    if trouble == "buffer":
        for buffer in model.buffers():
            buffer.fill_(torch.nan)
    if trouble == "transient":
        out.register_hook(hit_once)
    return loss + 50.0 if trouble == "spike" else loss


class ShardedRun(Run):
    """Measures the norm as a loop of its engine does, also where it does not clip."""

    def step(self, *given: Any) -> Any:
        if self.loop == "step":
            return super().step(*given)
        self.optimizer.zero_grad()
        total = 0.0
        for part in given:
            loss = loss_of(self.model, part)
            loss.backward()
            total += float(loss.detach())
        self.losses.append(total)
        if self.clip is not None or self.loop == "bare":
            clip = clip_by_hand if hasattr(self.model, "plain") else clipped
            self.norms.append(clip(self.model, math.inf if self.clip is None else self.clip))
        self.optimizer.step()
        return None


def clip_by_hand(model: nn.Module, most: float) -> float:
    """torch refuses to clip gradients of several meshes together."""
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in whole))
    for grad in grads:
        part = grad.to_local() if hasattr(grad, "to_local") else grad
        part.mul_(min(1.0, most / (norm + 1e-6)))
    return norm


@torch.no_grad()
def spoil(kind: str, model: nn.Module, optimizer: Any) -> None:
    """Put a NaN into one rank's shard."""
    if dist.get_rank() != BAD_RANK:
        return
    for parameter in model.parameters():
        held: Any = parameter if kind == "weight" else optimizer.state[parameter]["exp_avg"]
        part = held.to_local() if hasattr(held, "to_local") else held.detach()
        if part.numel():
            part.view(-1)[0] = torch.nan
            return


def trained(
    loop: str,
    engine: str,
    troubles: dict[int, str],
    *,
    skip: bool = True,
    steps: int = STEPS,
    **settings: Any,
) -> Run:
    """Train; a bare loop that skips does not see the troubled steps."""
    model, optimizer = build(engine)
    with ShardedRun(loop, model, optimizer, loss_of, **settings) as run:
        for step in range(steps):
            trouble = troubles.get(step, "")
            if loop == "bare" and skip and trouble:
                if engine == "dropout":
                    # a skipped step has drawn its random numbers all the same
                    model(batch(engine, step, "")[0]).sum().backward()
                continue
            if trouble in ("weight", "slot"):
                spoil(trouble, model, optimizer)
            bad = trouble == "rate" and has_trouble(engine)
            for group in optimizer.param_groups:
                group["lr"] = math.nan if bad else RATE
            run.step(*batches(engine, step, trouble))
    return run


def held(run: Run) -> dict[str, Any]:
    """This rank's part of weights and slots."""
    return {name: value for name, value in run.state().items() if not name.endswith("level")}


@cache
def bare_run(engine: str, skipped: frozenset[int] = frozenset(), clip: float | None = None) -> Run:
    """The unguarded run that never makes these steps."""
    return trained("bare", engine, dict.fromkeys(skipped, "skipped"), clip=clip)


def assert_as_bare(
    run: Run, engine: str, troubles: dict[int, str], clip: float | None = None
) -> None:
    assert difference(held(run), held(bare_run(engine, frozenset(troubles), clip))) == ""


def cases(column: str, rows: list[tuple[str, str, str]]) -> list[Any]:
    """Loop, engine, and what happens; an engine of the table shows its cell."""
    found = []
    for row in rows:
        marks = [cell(ROWS[row[1]], column)] if row[1] in ROWS else []
        found.append(pytest.param(*row, marks=marks, id="-".join(row)))
    return found


TROUBLED = [
    *pairwise(product(LOOPS, ENGINES, ["input", "backward", "labels"])),
    *pairwise(product(LOOPS, ["mixed", *NEIGHBOURS], ["input"])),
    ("step", "fsdp2", "backward"),
]
MESH_TROUBLED = [
    *product(LOOPS, ["hsdp", "both"], ["input"]),
    ("step", "hsdp", "backward"),
    ("step", "meshes", "input"),
]


def vetoed(loop: str, engine: str, trouble: str, action: str = "skip") -> Run:
    """A second bad step in a row asks whether the weights are to blame: they are not."""
    troubles = dict.fromkeys(BAD_STEPS, trouble)
    run = trained(loop, engine, troubles)
    assert run.armed and run.halted is None
    assert_as_bare(run, engine, troubles)
    assert [(told[0], told[3]) for told in run.told] == [(step, action) for step in BAD_STEPS]
    return run


@on_ranks(2)
@pytest.mark.parametrize(("loop", "engine", "trouble"), cases("NaN", TROUBLED))
def test_trouble_of_one_rank_is_vetoed_on_all_and_poisons_none(
    loop: str, engine: str, trouble: str
) -> None:
    run = vetoed(loop, engine, trouble)
    for incident in run.incidents:
        origin = incident.origin
        assert origin is not None
        if trouble == "input" and engine != "tp":
            assert origin.rank == 1 and str(origin.tensor).startswith("batch:")
        if trouble == "backward" and engine == "fsdp2":
            # it was exchanged, and still it is known whose it was
            assert (incident.reading.bad_ranks, origin.rank) == ((1,), 1)
        if trouble == "input" and engine == "fsdp2":
            assert (origin.op, origin.module) == ("aten.addmm", "0")
            assert (origin.samples, origin.reproduced) == ((2,), True)


@on_ranks(4)
@pytest.mark.parametrize(("loop", "engine", "trouble"), cases("NaN", MESH_TROUBLED))
def test_trouble_of_some_ranks_of_a_mesh_is_vetoed_on_all(
    loop: str, engine: str, trouble: str
) -> None:
    run = vetoed(loop, engine, trouble)
    # tensor parallel ranks compute one batch together: both have it
    blamed = (2, 3) if engine == "both" else (1,)
    for incident in run.incidents if trouble == "input" else ():
        assert incident.reading.bad_ranks == blamed
        assert incident.origin is not None and incident.origin.rank == blamed[0]


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "engine", "trouble"),
    [
        *product(["step"], ENGINES, ["forward", "buffer", "rate"]),
        *product(["watch"], ["fsdp2"], ["forward", "buffer", "rate"]),
    ],
)
def test_what_one_rank_alone_makes_or_sets_non_finite_is_refused_by_all(
    loop: str, engine: str, trouble: str
) -> None:
    run = vetoed(loop, engine, trouble, "undo" if trouble == "rate" else "skip")
    for incident in run.incidents:
        assert incident.reading.bad_ranks == (1,)
        assert incident.origin is not None and incident.origin.rank == 1


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "engine"), [("step", "fsdp2"), ("step", "fsdp1"), ("watch", "fsdp2")]
)
def test_two_ranks_with_two_causes_are_both_told(loop: str, engine: str) -> None:
    run = vetoed(loop, engine, "two")
    for incident in run.incidents:
        # the one with the bad input is surer
        assert incident.reading.bad_ranks == (1, 0)
        assert incident.origin is not None and incident.origin.rank == 1
        assert any("rank 0 as well" in remark for remark in incident.origin.remarks)


@on_ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_that_was_hit_once_is_made_again_or_left_out(engine: str) -> None:
    FIRED.clear()
    hit = {BAD_STEPS[0]: "transient"}
    run = trained("step", engine, hit)
    (incident,) = run.incidents
    # the gradients were exchanged, and no rank shows it by itself: none is blamed
    assert incident.reading.bad_ranks == ()
    assert incident.origin is not None and incident.origin.rank is None
    # only a replay shows that it does not happen again
    replayed = engine == "fsdp2"
    assert run.told[0][3] == ("retry" if replayed else "skip")
    assert_as_bare(run, engine, {} if replayed else hit)


@on_ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_jump_of_the_loss_leaves_a_healthy_run_as_it_is(engine: str) -> None:
    jumps = dict.fromkeys((LONG - 5, LONG - 4), "spike")
    run = trained("step", engine, jumps, steps=LONG, anomalies="act")
    bare = trained("bare", engine, jumps, steps=LONG, skip=False)
    assert run.armed and run.losses == bare.losses
    assert difference(held(run), held(bare)) == ""


def assert_healthy(loop: str, engine: str, clipping: str) -> None:
    clip = CLIP if clipping == "clip" else None
    with counted() as collectives:
        run = trained(loop, engine, {}, clip=clip)
    bare = bare_run(engine, clip=clip)
    assert run.armed and run.told == []
    assert difference(held(run), held(bare)) == ""
    if clip is not None:
        # the norm of all ranks, on every rank
        assert (run.losses, run.norms) == (bare.losses, bare.norms)
        assert min(map(float, bare.norms)) < CLIP < float(bare.norms[1])  # type: ignore[arg-type]
    if (loop, engine, clipping) != ("watch", "fsdp1", "clip"):
        # FSDP1 clips without taking torch's norm: what `watch` reads after it is clipped
        norms = list(run.guard._context.history.norms)
        assert of_all(norms) == [norms] * dist.get_world_size()
        assert norms == pytest.approx(bare.norms, rel=1e-5)
    if engine not in ("fsdp1", "hsdp"):
        # these two reduce gradients through the functions that are counted
        assert collectives == {"all_reduce": STEPS}


HEALTHY = [
    *product(LOOPS, ENGINES, ["clip", "unclipped"]),
    *pairwise(product(LOOPS, ["mixed", *NEIGHBOURS], ["clip"])),
]


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "engine", "clipping"),
    [
        *cases("clip", [row for row in HEALTHY if row[2] == "clip"]),
        *cases("healthy", [row for row in HEALTHY if row[2] != "clip"]),
    ],
)
def test_healthy_ranks_are_the_same_as_bare_ones_also_where_the_guard_clips(
    loop: str, engine: str, clipping: str
) -> None:
    assert_healthy(loop, engine, clipping)


@on_ranks(4)
@pytest.mark.parametrize(
    ("loop", "engine"),
    [
        pytest.param(
            loop, engine, marks=[cell(ROWS[engine], "healthy"), cell(ROWS[engine], "clip")]
        )
        for loop, engine in product(LOOPS, ["hsdp", "both"])
    ],
)
def test_healthy_ranks_of_a_mesh_are_the_same_as_bare_ones_also_where_the_guard_clips(
    loop: str, engine: str
) -> None:
    assert_healthy(loop, engine, "clip")


@on_ranks(4)
def test_gradients_of_several_meshes_are_clipped_by_the_norm_of_all_of_them() -> None:
    run, bare = (trained(loop, "meshes", {}, clip=CLIP) for loop in ("step", "bare"))
    assert run.armed and run.told == []
    assert of_all(run.norms) == [run.norms] * 4 and max(map(float, run.norms)) > CLIP  # type: ignore[arg-type]
    # torch itself refuses to mix meshes, so the bare loop adds up whole gradients in float64
    assert run.norms == pytest.approx(bare.norms, rel=1e-6)
    for name, weight in run.weights().items():
        assert torch.allclose(weight, bare.weights()[name], atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_rank_whose_guard_fails_clips_on_with_the_others(engine: str) -> None:
    original, calls = step_end.add_to_history, Counter[str]()

    def failing(*args: Any) -> None:
        calls["committed"] += 1
        if dist.get_rank() == BAD_RANK and calls["committed"] == 2:
            raise OSError("the disk of one rank is full")
        original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_end, "add_to_history", failing)
        run = trained("step", engine, {}, clip=CLIP)
    assert dist.get_rank() != BAD_RANK or not run.armed
    assert_as_bare(run, engine, {}, clip=CLIP)


def assert_back_from(loop: str, engine: str, kind: str, action: str) -> Run:
    run = trained(loop, engine, {BAD_STEPS[0]: kind})
    assert run.armed and run.halted is None
    # a bad slot shows in the parameter after the next update
    step = BAD_STEPS[1] if kind == "slot" else BAD_STEPS[0]
    ((at, _, ranks, done),) = run.told
    assert (at, ranks, done) == (step, (1,), action)
    origin = run.incidents[0].origin
    assert origin is not None and origin.rank == 1
    if loop == "step":
        # the steps since are run again, by all ranks, as they were
        assert_as_bare(run, engine, {})
    return run


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "engine", "kind"),
    cases("rewind", pairwise(product(LOOPS, ENGINES, ["weight", "slot"]))),
)
def test_bad_shard_of_one_rank_is_named_with_its_rank_and_all_go_back(
    loop: str, engine: str, kind: str
) -> None:
    run = assert_back_from(loop, engine, kind, "rewind")
    parameter = "_fsdp_wrapped_module._flat_param" if engine == "fsdp1" else "0.weight"
    origin = run.incidents[0].origin
    assert origin is not None and origin.tensor == f"param:{parameter}"
    assert is_finite(run.weights())


@on_ranks(4)
@pytest.mark.parametrize(
    ("engine", "action"),
    [
        pytest.param("hsdp", "heal", marks=cell("HSDP", "rewind")),
        pytest.param("both", "rewind", marks=cell("FSDP2 and tensor parallel", "rewind")),
    ],
)
def test_bad_shard_of_a_mesh_is_named_with_its_rank_and_all_recover(
    engine: str, action: str
) -> None:
    # of HSDP another pair of ranks holds a copy; else all go back
    assert_back_from("step", engine, "weight", action)


@on_ranks(2)
def test_clipping_that_fsdp1_cannot_do_is_refused_with_the_way_out() -> None:
    parts = [FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")) for _ in "ab"]
    model = nn.Sequential(*parts)
    config = GuardConfig(terminal="quiet", clip_norm=CLIP)
    with pytest.raises(stepguard.ConfigError, match=r"wrap it, or use stepguard\.watch and clip"):
        Guard(model, torch.optim.SGD(model.parameters()), config=config)


@on_ranks(2)
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_guard_attached_while_the_parameters_are_whole_stays_armed(engine: str) -> None:
    """While the model computes, FSDP2 has plain, whole parameters."""
    model, optimizer = build(engine)
    guards: list[Guard] = []

    def attach(*_: Any) -> None:
        if not guards:
            config = GuardConfig(terminal="quiet")
            guards.append(stepguard.watch(model, optimizer, config=config))

    handle = model.get_submodule("0").register_forward_hook(attach)
    run = ShardedRun("bare", model, optimizer, loss_of, clip=CLIP)
    for step in range(STEPS):
        run.step(*batches(engine, step, ""))
    handle.remove()
    with guards[0] as guard:
        assert guard.armed and guard.incidents == ()
    bare = bare_run(engine, clip=CLIP)
    assert (run.losses, run.norms) == (bare.losses, bare.norms)
    assert difference(held(run), held(bare)) == ""


# --- failures of the zoo under FSDP2: the place is that of one process

ZOO = [
    "bbox_log_of_bad_annotation",
    "ce_all_labels_ignored",
    "dora_zero_weight_row",
    "focal_loss_pow_gradient",
    "log_of_softmax_underflow",
    "mha_all_keys_masked",
    "spectrogram_sqrt_of_silence",
    "transient_inf_absorbed_forward",
    # its bad gradient is in the part of the other rank
    "where_exp_unselected_branch",
    # a norm that overflows, and an update that makes NaN: told without a collective of one rank
    "clip_grad_norm_inf_to_nan",
    "adagrad_without_epsilon",
    "nan_rate_under_adam",
    # what the forward wrote, and what it reads
    "batch_norm_variance_overflows",
    "bn_running_var_nan_in_checkpoint",
    # a counter of a module that FSDP2 has given another class
    "temperature_annealed_by_a_counter",
]
PLACE = ("phase", "module", "op", "node", "tensor", "samples", "micro_batch", "source")


def zoo_told(name: str) -> dict[str, Any]:
    """Where the first incident with an origin comes from; sharded where there are several ranks."""
    from zoo.catalogue import load
    from zoo.tools import run_guarded

    scene = load()[name].build(False)
    if dist.get_world_size() > 1:
        before = {id(parameter): key for key, parameter in scene.model.named_parameters()}
        fully_shard(scene.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        after = dict(scene.model.named_parameters())
        for group in scene.optimizer.param_groups:
            group["params"] = [after[before[id(parameter)]] for parameter in group["params"]]
    with tempfile.TemporaryDirectory() as folder:
        incidents, halted = run_guarded(scene, folder)
    located = next(incident for incident in incidents if incident.origin is not None)
    told = {field: getattr(located.origin, field) for field in PLACE}
    told |= {"step": located.step, "code": [finding.code for finding in located.findings][:1]}
    finite = is_finite({key: local(value) for key, value in scene.model.named_parameters()})
    return {"told": told, "bearable": finite or halted}


def test_failure_of_a_sharded_model_is_located_as_on_one_process(tmp_path: Path) -> None:
    """All ranks gather the model by one plan, and the rank to blame replays alone."""
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        out.mkdir()
        cases = [Case(name, "zoo_told", {"name": name}) for name in ZOO]
        ends, said = run_cases("distributed.test_sharded", cases, ranks, out)
        failed = [(name, why) for name, end in zip(ZOO, ends, strict=True) for why, _ in end if why]
        assert not failed, (failed[0], said[-2000:])
        found.append([[told for _, told in end] for end in ends])
    for name, (alone,), sharded in zip(ZOO, *found, strict=True):
        for rank in sharded:
            assert rank["told"] == alone["told"], name
            assert rank["bearable"], name
