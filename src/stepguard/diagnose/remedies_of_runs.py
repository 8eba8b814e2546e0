"""What to do about the optimizer and about stored state, in the user's own words.

Their parameters, slots, groups, rates and steps are named; `optimizer` and `model` in a
snippet are the two every loop has.
"""

from __future__ import annotations

from collections.abc import Callable

from stepguard.diagnose.case import NARROW, Case, plain, rounds_to_zero
from stepguard.diagnose.rule import counts, spell
from stepguard.diagnose.rules.sg500 import runaway_parameter
from stepguard.diagnose.trends import growth, lr_climb, lr_jump, lr_not_a_number
from stepguard.records import Remedy

# --- What to do about the optimizer and about stored state, in the user's own words.


SQUARES_FIT = "1e18"
"""Its square is far within float32."""
FALLBACK_MEMORY = 10
"""Steps of a momentum of 0.9."""


def infinite_norm(case: Case) -> tuple[Remedy, ...]:
    """SG501."""
    largest = f" (the largest element is {case.magnitude:.3g})" if case.magnitude else ""
    clip = case.facts.clip_norm or 1.0
    bound = Remedy(
        title=f"Bound the elements{largest} before the norm is clipped to {clip:g}, so that their "
        f"squares fit",
        snippet=f"torch.nn.utils.clip_grad_value_(model.parameters(), {SQUARES_FIT})",
    )
    part = "the loss"
    if case.reading.components:
        name, value = max(case.reading.components.items(), key=lambda item: abs(item[1]))
        part = f"`{name}` ({spell(value)}, the largest part of the loss)"
    elif case.reading.loss is not None:
        part = f"the loss of {spell(case.reading.loss)}"
    smaller = Remedy(
        title=f"Find what makes {part} so steep: a sum where a mean is meant, or a weight far "
        f"from 1",
        safety="changes-training",
    )
    return bound, smaller


def epsilon_of_optimizer(case: Case) -> tuple[Remedy, ...]:
    """SG502."""
    optimizer = case.facts.optimizer or "the optimizer"
    eps = case.evidence.eps if case.facts.eps is None else case.facts.eps
    dtype = case.dtype or next(iter(case.facts.param_dtypes), "")
    if eps is None:
        return (_no_epsilon(case, optimizer),)
    if dtype in NARROW and rounds_to_zero(eps, dtype):
        return (_wide_weights(case, dtype), _larger(optimizer, eps, dtype))
    if eps == 0:
        return (_larger(optimizer, eps, dtype),)
    title = (
        f"Put the eps of {optimizer} under the root, at {case.place}: added after it, it is lost"
    )
    return (Remedy(title=title, safety="changes-training"),)


def _no_epsilon(case: Case, optimizer: str) -> Remedy:
    title = f"Add an epsilon to what {optimizer} divides {_which(case)} by, at {case.place}"
    return Remedy(title=title, safety="changes-training")


def _which(case: Case) -> str:
    """The parameter of the incident, without the kind that its record name begins with."""
    stored = case.tensor or next(iter(case.reading.bad_state), "")
    name = stored.partition(":")[2]
    return f"`{name}`" if name else "the parameters"


def _wide_weights(case: Case, dtype: str) -> Remedy:
    return Remedy(
        title=f"Keep {_which(case)} in float32 (it is {dtype}) and let autocast choose {dtype} for "
        f"the arithmetic",
        safety="changes-numbers",
    )


def _larger(optimizer: str, eps: float, dtype: str) -> Remedy:
    enough = "1e-4" if dtype in NARROW else "1e-8"
    title = f"Give {optimizer} an epsilon that {dtype} can hold: eps={spell(eps)} is 0 there"
    if eps == 0:
        title = f"Give {optimizer} an epsilon: with eps=0 it divides by 0 where no gradient came"
    return Remedy(
        title=title,
        snippet=f"{optimizer}(..., eps={enough})",
        safety="changes-training",
    )


def optimizer_state(case: Case) -> tuple[Remedy, ...]:
    """SG503."""
    if case.facts.lost_squares:
        return (
            Remedy(
                title=f"Save and load exp_avg_sq in float32: {case.facts.lost_squares} of its "
                f"elements were rounded to 0"
            ),
            _cleared(case),
        )
    slot = case.tensor.partition(":")[2]
    if not slot:
        return (_cleared(case),)
    load = Remedy(
        title=f"Load `{slot}` from where the weights come from, of the same step: this one is bad"
        f"{_held(case)}"
    )
    return load, _cleared(case)


def _cleared(case: Case) -> Remedy:
    name = case.evidence.parameter or ""
    if not name and case.facts.outlier is not None:
        name = case.facts.outlier[1]
    slowest = max(case.facts.betas, default=0.0)
    steps = FALLBACK_MEMORY
    if 0 < slowest < 1:
        steps = round(1 / (1 - slowest))
    if name:
        which = f"the state of `{name}`"
        snippet = f'optimizer.state.pop(model.get_parameter("{name}"), None)'
    else:
        which = "the optimizer's state"
        snippet = "optimizer.state.clear()"
    title = f"Or clear {which}: it is rebuilt within some {steps} steps"
    return Remedy(title=title, snippet=snippet, safety="changes-training")


def rate_jump(case: Case) -> tuple[Remedy, ...]:
    """SG504."""
    group = lr_not_a_number(case)
    if group is not None:
        before = _last_finite(case, group)
        title = (
            f"Correct what sets the lr of group {group} to {case.reading.lr[group]} at step "
            f"{case.reading.step}{before}: a schedule that divides by 0 or runs past its end"
        )
        return (Remedy(title=title),)
    jump = lr_jump(case)
    if jump is None:
        return ()
    back = Remedy(
        title=f"Put the lr of group {jump.group} back: {jump.before:.4g} is what it was, "
        f"{jump.now:.4g} is what it runs with",
        snippet=f'optimizer.param_groups[{jump.group}]["lr"] = {jump.before:.4g}',
    )
    load = "Find what raised it"
    if case.facts.resumed:
        load = "Load optimizer and scheduler together, after both were built"
    return back, Remedy(title=f"{load}: a schedule in another unit, or restarted, does this")


def _last_finite(case: Case, group: int) -> str:
    for rates in reversed(case.facts.lr_history[:-1]):
        if group < len(rates):
            return f" (before, it was {rates[group]:.4g})"
    return ""


def divergence(case: Case) -> tuple[Remedy, ...]:
    """SG505."""
    found = []
    moved = runaway_parameter(case)
    if moved is not None:
        found.append(
            Remedy(
                title=f"Give `{moved[0]}` a learning rate of its own, far lower, or train its "
                f"logarithm",
                safety="changes-training",
            )
        )
    found.extend(_smaller_steps(case))
    return tuple(found)


def _smaller_steps(case: Case) -> list[Remedy]:
    climb = lr_climb(case)
    if climb is not None and climb.runaway:
        first = (
            f"Let the schedule end: the lr of group {climb.group} is {spell(climb.now)}, declared "
            f"was {spell(climb.declared)}"
        )
    else:
        name = case.facts.optimizer or "the optimizer"
        rates = ", ".join(map(spell, case.reading.lr)) or "the present one"
        first = f"Give {name} a lower lr than {rates}, or warm up to it{_last_update(case)}"
    return [Remedy(title=first, safety="changes-training"), *_clipped(case)]


def _last_update(case: Case) -> str:
    ratio = case.facts.update_ratio
    if ratio is None:
        said = (case.verdict.evidence or {}).get("update_ratio")
        ratio = float(said) if isinstance(said, int | float) else None
    if ratio is None:
        return ""
    return f": the last update changed the weights by {ratio:.3g} of their norm, 0.001 is usual"


def _clipped(case: Case) -> list[Remedy]:
    """With SGD the norm of the gradient bounds the step; Adam's step does not depend on it."""
    norms = case.facts.grad_norms
    if case.facts.optimizer != "SGD" or case.facts.clip_norm is not None or growth(norms) <= 1:
        return []
    least = f"{min(norms):.3g}"
    clip = Remedy(
        title=f"Clip the gradient norm: it rose from {least} to {norms[-1]:.3g}",
        snippet=f"GuardConfig(clip_norm={least})",
        safety="changes-training",
    )
    return [clip]


def scale_collapse(case: Case) -> tuple[Remedy, ...]:
    """SG506."""
    grads = ""
    if case.reading.bad_grads:
        grads = f", first in `{case.reading.bad_grads[0]}`"
    find = Remedy(
        title=f"Look for a NaN, not for a scale: at {spell(case.reading.scale)} the gradients are "
        f"still not finite{grads}; the finding beside this one places it"
    )
    leave = Remedy(
        title="Leave GradScaler out if autocast runs in bfloat16, which needs no loss scale",
        safety="changes-numbers",
    )
    if plain(case.evidence.autocast or "") == "float16":
        leave = Remedy(
            title="Autocast to bfloat16 instead of float16, and leave GradScaler out",
            safety="changes-numbers",
        )
    return find, leave


def bad_parameter(case: Case) -> tuple[Remedy, ...]:
    """SG601."""
    stored = case.evidence.huge_parameter or case.tensor
    if not stored:
        stored = next((name for name in case.reading.bad_state if name.startswith("param:")), "")
    name = stored.partition(":")[2]
    if not name:
        return ()
    held = _held(case)
    if case.evidence.huge_parameter is not None:
        held = " (it holds values of 1e15 and more)"
    if case.facts.committed == 0 or case.reading.step == 0:
        return _never_filled(case, name, held)
    return (
        Remedy(
            title=f"Find what wrote into `{name}` between step {case.reading.step - 1} and this "
            f"one{held}"
        ),
    )


def _held(case: Case) -> str:
    """` (3 of 12 elements NaN)`, of the stored tensor that is bad."""
    bad = case.bad_operand
    amount = counts(bad) if bad is not None else ""
    return f" ({amount})" if amount else ""


def _never_filled(case: Case, name: str, held: str) -> tuple[Remedy, ...]:
    fill = Remedy(
        title=f"Fill `{name}` where it is made{held}, for instance so",
        snippet=f'torch.nn.init.normal_(model.get_parameter("{name}"), std=0.02)',
    )
    load = Remedy(
        title=f"If it was loaded: `stepguard verify CHECKPOINT` says whether `{name}` is bad "
        f"there, and load_state_dict(strict=True) whether it is missing"
    )
    bad = case.bad_operand
    huge = case.evidence.huge_parameter is not None
    partly = bad is not None and bad.min is not None and not huge
    # Some elements are fine: it was filled, and then damaged or loaded that way.
    return (load, fill) if partly else (fill, load)


def bad_buffer(case: Case) -> tuple[Remedy, ...]:
    """SG602."""
    attribute = case.evidence.attribute
    if attribute is not None and case.evidence.constant is not None:
        owner, _, name = attribute.rpartition(".")
        return (_registered(owner, name),)
    stored = case.tensor
    if not stored:
        stored = next((name for name in case.reading.bad_state if name.startswith("buffer:")), "")
    path = stored.partition(":")[2]
    if not path:
        return ()
    module, _, name = path.rpartition(".")
    if name.startswith("running_"):
        reset = Remedy(
            title=f"Reset the statistics of `{module or 'the model'}`: no gradient repairs "
            f"`{path}`, and training rebuilds it",
            snippet=f'model.get_submodule("{module}").reset_running_stats()',
            safety="changes-training",
        )
        return (reset,)
    fill = f"Fill `{path}` before its first use{_held(case)}"
    return (Remedy(title=f"{fill}: load it, or compute it from finite numbers"),)


def _registered(owner: str, name: str) -> Remedy:
    which = f"`{owner}`" if owner else "the model"
    return Remedy(
        title=f"Make `self.{name}` of {which} a buffer, and fill it: then it is saved, restored "
        f"and rolled back",
        snippet=f'self.register_buffer("{name}", torch.zeros(...))',
    )


def bad_checkpoint(case: Case) -> tuple[Remedy, ...]:
    """SG603."""
    which = f"`{case.tensor}`" if case.tensor else "its state"
    return (
        Remedy(
            title=f"Load an older checkpoint: {which} of this one is not finite. `stepguard "
            f"verify` tells which are good, guard.restore() takes the newest that is"
        ),
    )


BUILDERS: dict[str, Callable[[Case], tuple[Remedy, ...]]] = {
    "SG501": infinite_norm,
    "SG502": epsilon_of_optimizer,
    "SG503": optimizer_state,
    "SG504": rate_jump,
    "SG505": divergence,
    "SG506": scale_collapse,
    "SG601": bad_parameter,
    "SG602": bad_buffer,
    "SG603": bad_checkpoint,
}
"""By code; empty where an incident has nothing of its own to say."""


# --- What to do about ranks, replays and settings, in the user's own words.


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
    found = (_named_dtype(case), _scaled_loss(case), _remedies_of_settings_wide_weights(case))
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


def _remedies_of_settings_wide_weights(case: Case) -> Remedy | None:
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


SETTINGS_BUILDERS: dict[str, Callable[[Case], tuple[Remedy, ...]]] = {
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
