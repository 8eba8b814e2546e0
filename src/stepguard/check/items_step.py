"""Items about the step: precision, loss scale, optimizer, norm layers, learning rate, one pass."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.check.data import as_tensors, target_key
from stepguard.check.inspection import (
    MOST_STEPS,
    Answer,
    Inspection,
    NotApplicable,
    NotGiven,
    Probe,
    TracedStep,
    failed,
    follows_metric,
    gradient_of,
    passed,
    peak_rates,
    warned,
)
from stepguard.check.settings import as_number, wanted
from stepguard.check.subject import default_dtypes
from stepguard.check.verify import other_rate
from stepguard.diagnose.case import FORMATS, rounds_to_zero
from stepguard.diagnose.case import plain as real_format
from stepguard.report.phrases import count, first_few
from stepguard.state.batch import samples_in, subset
from stepguard.state.buffers import keeps_statistics
from stepguard.tensors.names import optimizer_parameter_ids

# --- Precision and loss scale.

NO_DTYPE = "mixed precision without a dtype"


def asked(run: Inspection) -> dict[str, str | None]:
    """Map every place that asks for a precision to its dtype; None is AMP without a dtype."""
    found: dict[str, str | None] = {}
    configured = wanted(run.config)
    if configured is not None:
        found[f"the configuration ({configured.said})"] = configured.dtype
    if run.launcher.dtype is not None:
        found[f"the launcher ({run.launcher.said['mixed_precision']})"] = run.launcher.dtype
    if run.framework.dtype is not None:
        found[f"the code ({run.framework.said})"] = run.framework.dtype
    return found


def precision_configured(run: Inspection) -> Answer:
    configured = wanted(run.config)
    if configured is not None and configured.contradiction:
        return failed(configured.contradiction, fix="Keep one of the two settings.")
    places = asked(run)
    if not places:
        raise NotGiven("give --config FILE or --launcher FILE that names a precision")
    said = [f"{place} asks for {dtype or NO_DTYPE}" for place, dtype in places.items()]
    if len(set(places.values()) - {None}) <= 1 and not run.launcher.conflicts:
        return passed(*said)
    winner = "the code" if run.framework.dtype else "one of them"
    return failed(
        *said,
        *run.launcher.conflicts,
        fix=f"Name the precision in one place only; at present {winner} silently overrides "
        "the others.",
    )


def precision_effective(run: Inspection) -> Answer:
    probe = run.probe
    wrong = {place: one for place, one in asked(run).items() if one not in (None, probe.dtype)}
    if wrong:
        said = [f"{place} asks for {dtype}" for place, dtype in wrong.items()]
        dtype = next(iter(wrong.values()))
        fix = f"Open this around the forward pass: torch.autocast({probe.device!r}, torch.{dtype})."
        if dtype == "float16" and probe.device == "cpu" and probe.dtype == "float32":
            # Both libraries switch autocast off for fp16 on a CPU and say nothing.
            fix = "accelerate and transformers ignore fp16 on a CPU: use bf16 there, or 'no'."
        elif probe.dtype in run.param_dtypes and probe.dtype != "float32":
            fix = f"The weights are {probe.dtype}: load them in float32, or ask for {probe.dtype}."
        return failed(probe.how, *said, fix=fix)
    if emulated(probe):
        return warned(
            probe.how,
            f"this {probe.device} device has no bfloat16 arithmetic and emulates it",
            fix="Use float16 with a GradScaler, or float32: "
            "torch.cuda.is_bf16_supported(including_emulation=False).",
        )
    return passed(probe.how)


def emulated(probe: Probe) -> bool:
    """True for bfloat16 on a CUDA device that has no such arithmetic."""
    if probe.device != "cuda" or probe.dtype != "bfloat16":
        return False
    # By default torch answers yes for an emulated dtype as well.
    return not torch.cuda.is_bf16_supported(including_emulation=False)


def precision_unnamed(run: Inspection) -> Answer:
    fix = (
        "Name the dtype: mixed_precision='bf16' in the Accelerator, or dtype= where autocast is "
        "opened; see `stepguard explain SG801`."
    )
    if run.framework.unnamed:
        said = [run.framework.unnamed, "no GradScaler is made"]
        if run.launcher.dtype:
            said.append(f"the launcher's {run.launcher.said['mixed_precision']} is ignored")
        return failed(*said, fix=fix)
    configured = wanted(run.config)
    if configured is None:
        if run.subject.autocast is None:
            raise NotGiven("give --config FILE, or return `autocast`")
        return passed(f"{run.framework.name} leaves no dtype to the device's default")
    if configured.dtype is not None:
        return passed("a dtype is named")
    why = f"{configured.said} names no dtype"
    if run.subject.model is not None and run.launcher.dtype == run.probe.dtype:
        return passed(f"{why}, the launcher does, and the probe agrees: {run.probe.dtype}")
    return warned(f"{why}: {default_dtypes()}", fix=fix)


def scaler_missing(run: Inspection) -> Answer:
    dtype = run.probe.dtype
    if dtype != "float16":
        raise NotApplicable(f"the step runs in {dtype}, which needs no loss scale")
    if run.scaler is not None:
        return passed(f"float16 with {type(run.scaler).__name__}")
    scale = as_number(getattr(run.subject.guard, "loss_scale", None)) or run.number("loss_scale")
    if scale is not None and scale > 1:
        return passed(f"float16 with a static loss scale of {scale:g}")
    fix = "scaler = torch.amp.GradScaler(device), and return it as `scaler`"
    if "float16" in run.param_dtypes:
        fix = "Keep the weights in float32 under autocast to float16, with a torch.amp.GradScaler"
    # 6e-08 is the smallest number of float16.
    return failed(
        run.probe.how,
        "no GradScaler that is switched on was found: gradients below 6e-08 are 0",
        fix=f"{fix}; or use bfloat16, which needs none.",
    )


# --- Optimizer and norm layers.

MOST_LOST = 0.5
"""Share of weights that no update of size lr can move."""
ADAPTIVE = ("adam", "lion", "adagrad", "rmsprop", "rprop", "adafactor")
"""Optimizers whose step is about lr for every weight, whatever the gradient."""
SMALLEST_EPS = 1e-19
"""Four norms in a row with a smaller eps take a gradient of 1 beyond float32 where rows are 0."""
EPSILONS = ("eps", "variance_epsilon", "epsilon")


def optimizer_eps(run: Inspection) -> Answer:
    checked = 0
    bad = []
    for index, group in enumerate(run.optimizer.param_groups):
        eps = group.get("eps")
        # Adafactor has two, of which one may be None.
        if isinstance(eps, tuple | list):
            eps = min(filter(None, eps), default=None)
        if eps is None:
            continue
        checked += 1
        dtypes = sorted({real_format(str(parameter.dtype)) for parameter in group["params"]})
        lost = [dtype for dtype in dtypes if eps == 0 or rounds_to_zero(float(eps), dtype)]
        # A fused kernel computes in float32 whatever the parameters' dtype is.
        if lost and not group.get("fused"):
            smallest = FORMATS[lost[0]].smallest
            bad.append(f"group {index}: eps={eps:g} is 0 in {lost[0]} (smallest {smallest:.3g})")
    if not checked:
        raise NotApplicable(f"{type(run.optimizer).__name__} has no eps")
    if not bad:
        return passed(f"eps of {count(checked, 'parameter group')} is above 0 in its dtype")
    return failed(
        *bad,
        "a weight whose gradient is 0 becomes NaN at the first update (0 / 0)",
        fix="Keep the weights in float32 under autocast; or eps=1e-4; or fused=True, which "
        "computes in float32; see `stepguard explain SG502`.",
    )


def optimizer_parameters(run: Inspection) -> Answer:
    named = dict(run.model.named_parameters())
    if not named:
        raise NotApplicable("the model has no parameters")
    held = optimizer_parameter_ids(run.optimizer)
    if held.isdisjoint(map(id, named.values())):
        return failed(
            f"none of the model's {count(len(named), 'parameter')} is in the optimizer "
            f"({len(held)} others are)",
            fix="Build the optimizer from this model, after it was moved, wrapped or replaced.",
        )
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    missing = [name for name in trained if id(named[name]) not in held]
    if missing:
        return warned(
            f"{count(len(missing), 'trainable parameter')} not in the optimizer: "
            f"{first_few(missing, 4)}",
            fix="Add them to a group, or set requires_grad=False so that the intent is visible.",
        )
    return passed(
        f"{count(len(trained), 'trainable parameter')} in the optimizer, "
        f"{len(named) - len(trained)} frozen"
    )


def optimizer_stalled(run: Inspection) -> Answer:
    kind = type(run.optimizer).__name__
    if not any(name in kind.lower() for name in ADAPTIVE):
        raise NotApplicable(f"the step size of {kind} is not known in advance")
    weights = 0
    lost = 0
    dtypes: set[str] = set()
    for group, rate in zip(run.optimizer.param_groups, peak_rates(run.optimizer), strict=True):
        for parameter in group["params"]:
            name = real_format(str(parameter.dtype))
            if name in ("bfloat16", "float16"):
                dtypes.add(name)
                weights += parameter.numel()
                value = parameter.detach().abs()
                lost += int((value + rate == value).sum())
    if not weights:
        raise NotApplicable("the weights are kept in float32 or wider")
    said = (
        f"{lost:,} of {weights:,} weights in {', '.join(sorted(dtypes))} are spaced wider than "
        "twice the lr"
    )
    if lost <= MOST_LOST * weights:
        return passed(f"{said}; {count(weights - lost, 'weight')} can move")
    return warned(
        f"{said}: an update of size lr does not change them",
        fix="Keep float32 master weights (autocast instead of a cast model), or round "
        "stochastically.",
    )


def norm_eps(run: Inspection) -> Answer:
    smallest = math.inf
    bad: dict[str, list[str]] = defaultdict(list)
    for name, module in run.model.named_modules():
        title = type(module).__name__
        # A layer whose class is called a norm, however the library spells its eps.
        found = [getattr(module, key) for key in EPSILONS if hasattr(module, key)]
        if "norm" not in title.lower() or not found or not isinstance(found[0], int | float):
            continue
        epsilon = float(found[0])
        smallest = min(smallest, epsilon)
        own = next(module.parameters(recurse=False), torch.zeros(0))
        dtype = real_format(str(own.dtype))
        # torch's own layers compute in float32, whatever the dtype of their weights is.
        ours = not type(module).__module__.startswith("torch.")
        problem = ""
        if epsilon == 0 or (ours and rounds_to_zero(epsilon, dtype)):
            problem = "a row of zeros gives NaN or an infinite gradient"
        elif epsilon < SMALLEST_EPS:
            problem = f"a row of zeros multiplies the gradient by {epsilon**-0.5:.3g}"
        if problem:
            bad[f"{title}(eps={epsilon:g}) in {dtype}: {problem}"].append(name)
    if bad:
        said = [f"{why} ({first_few(names, 2)})" for why, names in bad.items()]
        return failed(*said, fix="eps=1e-6 or above in float32 and bfloat16, 1e-5 in float16.")
    if smallest == math.inf:
        raise NotApplicable("the model has no norm layer with an eps")
    return passed(f"the smallest eps of a norm layer is {smallest:g}")


# --- The learning rate: in the optimizer, over the whole schedule, and after loading a checkpoint.

CLOSE = 1e-3
"""Relative; a rate written with three digits is the same rate."""
FAR_BELOW = 0.1
"""A floor missed by more than a factor of ten is another floor."""
LARGEST_RATE = 5e-5 * 1.001
"""5e-5, with room for a rate that was computed."""
LARGE_MODEL = 100_000_000
"""Parameters. The 5e-5 comes from a model of 892 million; small ones take rates far higher."""
WARMUP_STEPS = 2000
WARMUP_SHARE = 0.01
"""Warmup as a share of the run: 2000 steps suit a run of 200 000."""


def configured_rate(run: Inspection) -> tuple[float, str]:
    """The configured learning rate, and which setting names it."""
    rate = run.number("lr")
    if rate is not None:
        return rate, str(run.setting("lr"))
    raise NotGiven("give --config FILE that names the learning rate")


def lr_config(run: Inspection) -> Answer:
    configured, said = configured_rate(run)
    rates = peak_rates(run.optimizer)
    shown = ", ".join(f"{rate:.3g}" for rate in rates[:4])
    groups = f"{type(run.optimizer).__name__} runs its {count(len(rates), 'group')} up to {shown}"
    if any(math.isclose(rate, configured, rel_tol=CLOSE) for rate in rates):
        return passed(f"{said}; {groups}")
    return failed(
        f"{said}, but {groups}",
        fix="Pass the configured rate to the optimizer (and to OneCycleLR as max_lr); a literal in "
        "the code wins.",
    )


def _peak_step(rates: list[float]) -> int:
    """Rounding may bring a periodic schedule a little above its first peak later."""
    return next(step for step, rate in enumerate(rates) if rate >= max(rates) * (1 - 1e-6))


def lr_schedule(run: Inspection) -> Answer:
    kind = type(run.scheduler).__name__
    if follows_metric(run.scheduler):
        raise NotApplicable(f"{kind} follows a metric, which is not known in advance")
    rates, fault = run.schedule
    peak, last, steps = max(rates), rates[-1], min(run.steps or MOST_STEPS, MOST_STEPS)
    numbers = (
        f"{kind}: starts at {rates[0]:.3g}, peaks at {peak:.3g} in step {_peak_step(rates):,}, "
        f"ends at {last:.3g}; {count(steps, 'step')} tried"
    )
    whole = steps == run.steps
    if not whole:
        numbers += " (the length of the run is not configured)"
    if fault:
        length = len(rates) - 1
        # A schedule as long as the epochs is stepped once an epoch, not once a step.
        if run.steps is None or length == run.number("epochs"):
            return passed(
                numbers, f"it covers {length:,} steps: the whole run, if it is stepped that often"
            )
        return failed(
            numbers,
            f"the schedule fails at step {length + 1:,} of {steps:,}: {fault}",
            fix="Make the schedule at least as long as the run.",
        )
    if not math.isfinite(sum(rates)) or last < 0:
        return failed(numbers, fix="Clamp the schedule's factor to 0 and above.")
    if peak == 0:
        return warned(
            numbers, "the learning rate is 0 throughout", fix="Check the base rate and the factor."
        )
    problem = _missed_rate(run, peak, last) if whole else None
    return problem._replace(evidence=(numbers, *problem.evidence)) if problem else passed(numbers)


def _missed_rate(run: Inspection, peak: float, last: float) -> Answer | None:
    """Compare peak and end of a schedule with the configuration."""
    configured, said = peak, ""
    with suppress(NotGiven):
        configured, said = configured_rate(run)
    if peak > configured * (1 + CLOSE):
        return failed(
            f"{said} is exceeded", fix="Give the schedule the configured peak, not a multiple."
        )
    floor = run.number("min_lr")
    if floor is None or floor >= configured or last >= FAR_BELOW * floor:
        return None
    below = f"the schedule ends at {last:.3g}, {floor / max(last, 1e-45):.3g} times below it"
    return failed(
        f"{run.setting('min_lr')} is meant as a learning rate, but {below}",
        fix="A LambdaLR takes factors: use max(factor, min_lr / lr), or "
        "CosineAnnealingLR(eta_min=min_lr).",
    )


def lr_checkpoint(run: Inspection) -> Answer:
    found = run.verified
    name = found.path.rpartition("/")[2]
    if not found.rates:
        raise NotApplicable(f"{name} holds no readable optimizer or scheduler state")
    try:
        configured, said = configured_rate(run)
    except NotGiven:
        configured = max(peak_rates(run.optimizer))
        said = f"the optimizer has {configured:.3g}"
    other = other_rate(found.rates, configured)
    if not other:
        return passed(f"{name} holds the same rate: {said}")
    return failed(
        f"{name}: {other[0].tensor}: {other[0].detail}",
        said,
        fix="After load_state_dict set lr, initial_lr, max_lr and min_lr of every group and the "
        "scheduler's base_lrs to the configured rate, or keep the old rate in the configuration.",
    )


def checklist_lr(run: Inspection) -> Answer:
    configured = run.number("lr")
    if run.subject.optimizer is None and configured is not None and configured <= LARGEST_RATE:
        return passed(f"{run.setting('lr')} is configured")
    rate = max(peak_rates(run.optimizer))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    said = f"lr {rate:.3g} with {count(parameters, 'parameter')}"
    if rate <= LARGEST_RATE:
        return passed(said)
    if parameters < LARGE_MODEL:
        raise NotApplicable(f"{said}; 5e-5 is meant for models above {LARGE_MODEL:,}")
    return warned(
        said,
        fix="Start at 5e-5 or with a longer warmup, and raise it while the gradient norm "
        "stays steady.",
    )


def checklist_warmup(run: Inspection) -> Answer:
    setting = run.setting("warmup")
    planned = run.number("warmup")
    if run.subject.optimizer is None and planned is not None and planned >= WARMUP_STEPS:
        return passed(f"{setting} is configured")
    kind = type(run.optimizer).__name__
    if "adam" not in kind.lower():
        raise NotApplicable(f"{kind} has no second moment that needs a warmup")
    if follows_metric(run.subject.scheduler):
        raise NotApplicable("the schedule follows a metric and has no warmup")
    needed = min(WARMUP_STEPS, WARMUP_SHARE * (run.steps or math.inf))
    fix = (
        f"Warm up over {needed:.0f} steps or more: LinearLR before the schedule, or "
        "OneCycleLR(pct_start=...)."
    )
    if run.subject.scheduler is None:
        but = f"{setting} is configured, but " if setting else ""
        return warned(f"{but}there is no scheduler: the first step takes the full rate", fix=fix)
    rates, _ = run.schedule
    warm = _peak_step(rates) if rates[0] < 0.5 * max(rates) else 0
    said = f"{count(warm, 'step')} from {rates[0]:.3g} to {max(rates):.3g}"
    if run.steps:
        said += f", {100 * warm / run.steps:.3g} % of {run.steps:,}"
    # a factor of (step + 1) / 2000 reaches the rate in step 1999, one of step / 2000 in step 2000
    if warm and warm + 1 >= needed:
        return passed(said)
    return warned(said, fix=fix)


# --- The model: stored values, one real pass, and limits on single parameters.

SMALL_DIVISOR = 1e-6
LARGEST_DEVIATION = 10.0
"""Largest standard deviation of a regression target; its inverse is the smallest."""


def model_stored_finite(run: Inspection) -> Answer:
    tensors: dict[str, Tensor] = {f"param:{n}": value for n, value in run.model.named_parameters()}
    for prefix, module in run.model.named_modules():
        # Other buffers may hold -inf or NaN on purpose: a mask, a sentinel.
        if keeps_statistics(module):
            for name, value in module.named_buffers(prefix, recurse=False):
                tensors[f"buffer:{name}"] = value
    tensors |= run.optimizer_tensors
    bad = []
    for name, tensor in tensors.items():
        real = tensor.is_floating_point() or tensor.is_complex()
        if real and not tensor.is_meta:
            wrong = int((~torch.isfinite(tensor.detach())).sum())
            if wrong:
                bad.append(f"{name} ({wrong:,} of {tensor.numel():,} values)")
    if not bad:
        return passed(f"{count(len(tensors), 'tensor')} of model and optimizer, all finite")
    return failed(
        f"{count(len(bad), 'tensor')} of {len(tensors):,} not finite: {first_few(bad, 4)}",
        fix="Load the last good checkpoint; torch.empty without an initialisation looks like this "
        "as well.",
    )


def model_fresh_forward(run: Inspection) -> Answer:
    return judge_step(run.traced_step)


def judge_step(step: TracedStep) -> Answer:
    """Judge what one forward and backward pass gave."""
    if step.fault:
        return failed(
            f"the step raised {step.fault}",
            fix="Run this step by itself: the run would fail at its first step.",
        )
    loss = "" if step.loss is None else f"loss {step.loss:.4g}"
    if step.loss is not None and not math.isfinite(step.loss):
        return failed(
            f"{loss} on one batch",
            fix="stepguard.Guard names the operation: guard.step(loss_fn, batch).",
        )
    if step.outputs_bad:
        return failed(
            f"outputs not finite: {first_few(step.outputs_bad, 4)}",
            fix="Check the inputs and the initialisation.",
        )
    if step.grads_bad:
        return failed(
            f"{loss}, {count(len(step.grads_bad), 'parameter')} with bad gradients: "
            f"{first_few(step.grads_bad, 4)}",
            fix="Look for sqrt, norm, log or a division at 0: finite values with infinite slopes.",
        )
    # Also the norm of a loss that reaches no parameter.
    if step.grad_norm == 0:
        return warned(
            f"{loss}, all gradients are 0",
            fix="Nothing is learned: check masks, labels and detach.",
        )
    if step.grad_norm is not None:
        loss += f", gradient norm {step.grad_norm:.4g}"
    return passed(f"one batch: {loss or 'outputs finite'}")


SAME_GRADIENT = 0.02
"""Relative difference of two gradients that rounding may make: 1e-6 in float32, 1e-2 in bfloat16.
"""
OTHER_WEIGHTS = 0.05
"""How far from a half the weight of half of the samples must be to be worth a word."""


def loss_split(run: Inspection) -> Answer:
    """Half of the batch, and the other half: does their mean give the gradient of the whole?"""
    if run.subject.loss_fn is None:
        raise NotGiven("return `loss_fn`")
    rows = samples_in(run.batch)
    if rows is None or rows < 2:
        raise NotApplicable("the batch cannot be cut into halves")
    loss = run.traced_step.loss
    if run.traced_step.fault or loss is None or not math.isfinite(loss):
        raise NotApplicable("the step on the whole batch has no finite loss")
    targets, (whole, one, other) = _gradients_of_halves(run, rows)
    size = float(whole.norm())
    off = float((whole - (one + other) / 2).norm()) / size
    if off <= SAME_GRADIENT:
        return passed(f"the mean gradient of two halves is that of the whole batch, to {off:.1g}")
    if float((whole - one - other).norm()) <= SAME_GRADIENT * size:
        return passed("the loss is a sum over samples: two halves add up to the whole batch")
    # is the whole a mean of the halves with other weights, as one over all targets is?
    apart = one - other
    weight = float((whole - other) @ apart / (apart @ apart).clamp_min(1e-300))
    left = float((whole - weight * one - (1 - weight) * other).norm()) / size
    if left > SAME_GRADIENT or abs(weight - 0.5) < OTHER_WEIGHTS or not 0 < weight < 1:
        raise NotApplicable("the loss of a sample depends on the other samples of its batch")
    said = (
        f"halves of {rows // 2} samples with {targets[0]:,} and {targets[1]:,} targets weigh "
        f"{weight:.2f} and {1 - weight:.2f} in the whole batch; as micro-batches that are averaged "
        f"they weigh 0.50 each, and the gradient is {off:.0%} off"
    )
    if not _splits_steps(run):
        raise NotApplicable(f"one batch is one step; {said}")
    return warned(
        said,
        fix="Sum the loss over targets in each micro-batch, and divide by the number of targets of "
        "all micro-batches (and ranks) of the step.",
    )


def _splits_steps(run: Inspection) -> bool:
    """Do micro-batches, or the batches of several processes, make one step?"""
    facts = run.framework.facts | run.launcher.values
    split = run.number("accumulation") or as_number(facts.get("gradient_accumulation_steps"))
    return max(split or 1, as_number(facts.get("num_processes")) or 1) > 1


def _gradients_of_halves(run: Inspection, rows: int) -> tuple[list[int], list[Tensor]]:
    """Targets in each half, and the gradients of the whole batch and of the two halves.

    The halves differ as much as batches may: rows with few targets, and those with many.
    """
    counts = _targets_of_rows(run, run.batch, rows)
    order = sorted(range(rows), key=lambda row: counts[row])
    halves = [sorted(order[: rows // 2]), sorted(order[rows // 2 : rows // 2 * 2])]
    gradients = [
        gradient_of(run.subject, run.framework, subset(run.batch, part, rows))
        for part in (sorted(halves[0] + halves[1]), *halves)
    ]
    if len(set(map(len, gradients))) > 1 or not bool(gradients[0].any()):
        raise NotApplicable("the halves reach other parameters than the whole batch")
    return [sum(counts[row] for row in half) for half in halves], gradients


def _targets_of_rows(run: Inspection, batch: Any, rows: int) -> list[int]:
    """How many targets each sample has; 1 each where nothing is ignored, or nothing known."""
    tensors = dict(as_tensors(batch))
    labels = tensors.get(target_key(tensors, run.subject.label_key) or "")
    if labels is None or labels.dim() < 2 or len(labels) != rows or labels.is_floating_point():
        return [1] * rows
    counted: list[int] = (labels != run.subject.ignore_index).flatten(1).sum(1).tolist()
    return counted


def floating_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that hold real numbers, by name."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            found[name] = tensor.detach()
    return found


def scalars_limit(run: Inspection) -> Answer:
    if not run.subject.watch:
        raise NotGiven("give --watch PATTERN=LIMIT, for instance --watch '*.alpha=10'")
    tensors = floating_tensors(run.model)
    bad = []
    sizes = {}
    for pattern, limit in run.subject.watch.items():
        matching = [name for name in tensors if fnmatchcase(name, pattern)]
        if not matching:
            bad.append(f"{pattern} matches no parameter and no buffer")
        for name in matching:
            size = float(tensors[name].abs().max())
            sizes[f"{name}: {size:.4g} of {limit:g}"] = size / limit
            # Written so that a NaN is beyond every limit.
            if not size <= limit:
                bad.append(f"{name} reaches {size:.4g}, allowed is {limit:g}")
    if bad:
        return failed(
            first_few(bad, 4),
            fix="Look at what drives them: initialisation, lr of their group, a checkpoint.",
        )
    nearest = max(sizes, key=lambda name: sizes[name])
    return passed(f"{count(len(sizes), 'tensor')}; nearest to its limit is {nearest}")


def checklist_divisions(run: Inspection) -> Answer:
    step = run.traced_step
    if not step.divisions:
        raise NotApplicable("the step contains no division, or raised before one")
    least, dtype, source = step.divisor
    said = [
        f"{count(step.divisions, 'division')}, smallest divisor {least:.3g} ({dtype}, "
        f"{source or 'torch'})"
    ]
    said += [f"the eps {what} has no effect at {place}" for place, what in step.lost_eps.items()]
    fix = (
        "Select before dividing, or clamp the divisor: x / y.clamp_min(1e-6); an eps "
        "below the dtype's resolution is lost."
    )
    if least == 0:
        return failed(*said, fix=fix)
    # A small Python number is a constant of the program, not a value that shrank.
    if least < SMALL_DIVISOR and dtype in FORMATS:
        return warned(*said, fix=fix)
    return passed(*said)


def checklist_latents(run: Inspection) -> Answer:
    if not run.traced_step.squared_errors:
        raise NotApplicable("the step has no squared error")
    mean, deviation = run.traced_step.latent
    said = f"target of the squared error: mean {mean:.3g}, standard deviation {deviation:.3g}"
    largest_ratio = max(deviation, 1 / max(deviation, 1e-30), abs(mean))
    if largest_ratio <= LARGEST_DEVIATION:
        return passed(said)
    return warned(
        said,
        fix="Standardise the data once (subtract its mean, divide by its deviation); normalising "
        "each vector inside the loss loses the scale.",
    )
