"""What to do about ranks, replays and settings, in the user's own words."""

from __future__ import annotations

from collections.abc import Callable

from stepguard.diagnose.case import Case
from stepguard.diagnose.dtypes import NARROW, plain
from stepguard.diagnose.wording import spell
from stepguard.records import Remedy


def one_rank(case: Case) -> tuple[Remedy, ...]:
    """SG701."""
    ranks = ", ".join(map(str, case.reading.bad_ranks))
    if not ranks:
        return ()
    return (
        Remedy(
            title=f"Look at the data and the device of rank {ranks}: step {case.reading.step} was "
            f"bad there before anything was reduced"
        ),
    )


def transient(case: Case) -> tuple[Remedy, ...]:
    """SG702."""
    evidence = case.evidence
    if evidence.moves:
        moved = ", ".join(evidence.moves)
        title = f"Keep {moved} in a buffer of a module, and change it after the step only"
        return (Remedy(title=title),)
    if evidence.different_losses is not None:
        title = (
            "Draw random numbers from torch's, numpy's or Python's global generator, which a "
            "replay restores: two replays gave "
            f"{spell(evidence.different_losses[0])} and {spell(evidence.different_losses[1])}"
        )
        return (Remedy(title=title),)
    if evidence.same_bits is False:
        title = f"Make step {case.reading.step} repeat itself, then look again"
        return (Remedy(title=title, snippet="torch.use_deterministic_algorithms(True)"),)
    where = ""
    if case.reading.bad_ranks:
        where = f" of rank {', '.join(map(str, case.reading.bad_ranks))}"
    title = (
        f"Test the device{where}, and whether a worker writes into the batch of step "
        f"{case.reading.step} after it was handed over"
    )
    return (Remedy(title=title),)


def compiled_graph(case: Case) -> tuple[Remedy, ...]:
    """SG703."""
    module = case.origin.module if case.origin is not None else None
    if module:
        leave = Remedy(
            title=f"Leave `{module}` out of the compiled graph until the cause is found",
            snippet=f'module = model.get_submodule("{module}")\n'
            f"module.forward = torch.compiler.disable(module.forward)",
        )
    else:
        leave = Remedy(
            title=f"Compile with backend='aot_eager': if step {case.reading.step} is finite then, "
            f"inductor's code makes the bad value"
        )
    rounding = Remedy(
        title="Or let fused kernels round as eager mode does",
        snippet="torch._inductor.config.emulate_precision_casts = True",
        safety="changes-numbers",
    )
    return leave, rounding


def drifted_ranks(case: Case) -> tuple[Remedy, ...]:
    """SG704."""
    said = case.verdict.evidence or {}
    ranks = said.get("ranks", "")
    if "rates" in said:
        title = f"Give ranks {ranks} the same learning rate: {said['rates']}"
        return (Remedy(title=title, safety="changes-training"),)
    tensor = said.get("tensor", "")
    source = str(said.get("agree") or "0").partition(",")[0]
    given = f"`{tensor}` and the rest" if tensor else "their weights"
    back = Remedy(
        title=f"Give rank {ranks} {given} from rank {source}: Policy with 'heal' and "
        f"anomalies='act' does it, or a broadcast before the first step"
    )
    return (back,)


def same_data(case: Case) -> tuple[Remedy, ...]:
    """SG705."""
    said = case.verdict.evidence or {}
    samplers = f": now {said['samplers']}" if "samplers" in said else ""
    return (
        Remedy(
            title=f"Divide the data among the ranks, and call sampler.set_epoch(epoch) on all"
            f"{samplers}",
            snippet="DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=0)",
            safety="changes-training",
        ),
    )


def precision_settings(case: Case) -> tuple[Remedy, ...]:
    """SG801."""
    found = (_named_dtype(case), _scaled_loss(case), _wide_weights(case))
    return tuple(remedy for remedy in found if remedy is not None)


def _named_dtype(case: Case) -> Remedy | None:
    wanted = plain(case.facts.configured_dtype or "")
    real = plain(case.evidence.autocast or "float32")
    if not wanted or wanted == real:
        return None
    return Remedy(
        title=f"Name {wanted} where the autocast context is opened: it gives {real}",
        snippet=f"torch.autocast(device_type, dtype=torch.{wanted})",
    )


def _scaled_loss(case: Case) -> Remedy | None:
    real = plain(case.evidence.autocast or "")
    if real not in NARROW or case.facts.scaling != "none":
        return None
    return Remedy(
        title=f"Scale the loss, or autocast to bfloat16: {real} has no scale here",
        snippet="scaler = torch.amp.GradScaler()",
        safety="changes-numbers",
    )


def _wide_weights(case: Case) -> Remedy | None:
    half = [name for name in case.facts.param_dtypes if plain(name) in NARROW]
    if not half or case.facts.scaling != "dynamic":
        return None
    return Remedy(
        title=f"Keep the weights in float32: GradScaler does not unscale gradients in "
        f"{', '.join(half)}",
        snippet="model.float()",
        safety="changes-numbers",
    )


def restored_rate(case: Case) -> tuple[Remedy, ...]:
    """SG802."""
    pairs = zip(case.facts.configured_lr, case.reading.lr, strict=False)
    lines = []
    changes = []
    for group, (allowed, rate) in enumerate(pairs):
        if rate > allowed:
            lines.append(f'optimizer.param_groups[{group}]["lr"] = {allowed:.4g}')
            changes.append(f"{allowed:.4g} for group {group} (it runs with {rate:.4g})")
    if not lines:
        return ()
    return (
        Remedy(
            title=f"Put the configured rate back after loading: {', '.join(changes)}; where there "
            f"is a scheduler, into its base_lrs too",
            snippet="\n".join(lines),
        ),
    )


def nothing_learned(case: Case) -> tuple[Remedy, ...]:
    """SG803."""
    if case.reading.labels == 0:
        title = (
            f"Truncate the prompt, not the answer: none of the targets of step "
            f"{case.reading.step} counts. Count samples without a label before training"
        )
        return (Remedy(title=title, safety="changes-training"),)
    title = (
        f"Look for a clamp, relu or nan_to_num around the loss: it is {spell(case.reading.loss)} "
        f"with a gradient of {spell(case.reading.grad_norm)}"
    )
    return (Remedy(title=title, safety="changes-training"),)


BUILDERS: dict[str, Callable[[Case], tuple[Remedy, ...]]] = {
    "SG701": one_rank,
    "SG702": transient,
    "SG703": compiled_graph,
    "SG704": drifted_ranks,
    "SG705": same_data,
    "SG801": precision_settings,
    "SG802": restored_rate,
    "SG803": nothing_learned,
}
"""By code; empty where an incident has nothing of its own to say."""
