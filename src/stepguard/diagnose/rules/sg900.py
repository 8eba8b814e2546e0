"""SG901 to SG933: silent failures, from health probes and readings of a healthy run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from stepguard.diagnose.case import Case, ResumeFacts
from stepguard.diagnose.rule import Found, certain, likely, possible, rule
from stepguard.records.probes import Look, ParameterLook, RouterLook

Looks = Sequence[Look]


def in_all(looks: Looks, names: Callable[[Look], set[str]]) -> list[str]:
    """Names that every one of these probes gives, in alphabetical order."""
    return sorted(set.intersection(*map(names, looks))) if looks else []


def trained(look: Look) -> list[ParameterLook]:
    """Parameters that an optimizer updates and that have a gradient."""
    return [one for one in look.parameters if one.owned and one.gradient is not None]


# --- SG901: updates that rounding loses.


MOST_LOST = 0.5
"""Share of the elements with a gradient that an update may leave as they were."""
NARROW = {"bfloat16", "float16"}


@rule(looks=2)
def sg901(case: Case) -> Found:
    shares = list(map(_lost_share, case.pair))
    # no learning rate of the newest step moves anything
    standing = bool(case.reading.lr) and not any(case.reading.lr)
    if standing or min(shares) < MOST_LOST:
        return None
    rows = [one for one in trained(case.last) if (one.lost or 0.0) > MOST_LOST]
    dtypes = sorted({one.dtype for one in rows})
    fields = {"share": shares[-1], "names": [one.name for one in rows], "dtypes": dtypes}
    if set(dtypes) <= NARROW:
        return certain("narrow", **fields)
    # gradients that are next to 0 themselves leave nothing to round; weights that have moved before
    # have converged: float32 is fine enough
    # root mean square of a gradient below which Adam's epsilon is larger
    if all((one.gradient or 0.0) < 1e-8 for one in rows):
        return None
    return None if _lost_share(case.looks[0]) < MOST_LOST else likely("wide", **fields)


def _lost_share(look: Look) -> float:
    """Share of all weights with a gradient that the update left as they were."""
    rows = [one for one in trained(look) if one.lost is not None]
    elements = sum(one.elements for one in rows)
    return sum((one.lost or 0.0) * one.elements for one in rows) / max(elements, 1)


# --- SG902: gradients that are not zeroed between steps, or at the wrong time.


@rule()
def sg902(case: Case) -> Found:
    if case.paired and all(look.facts.kept_gradients for look in case.pair):
        return certain("kept")
    # what the last 16 updates did with their gradients, without a look: half of them is a habit
    for habit in ("carried", "discarded", "thrown", "foreign"):
        count = case.habits.get(habit, 0)
        if count >= 8:
            return likely(habit, count=count)
    return None


# --- SG903: parameters that get gradients and no update.


@rule()
def sg903(case: Case) -> Found:
    # an optimizer without a guard, or one of copies in float32, may update what looks unowned:
    # nobody updates what holds the same numbers at every look
    unowned = []
    for look in case.pair:
        rows = [one for one in look.parameters if one.trainable and not one.owned and one.gradient]
        unowned.append({(one.name, one.weight) for one in rows})
    outside = sorted(name for name, _ in set.intersection(*unowned)) if case.paired else []
    beside = []
    if len(case.looks) > 2:
        numbers = in_all(case.looks[-3:], lambda look: set(look.facts.outsiders))
        beside = [case.last.facts.outsiders[number] for number in numbers]
    if not outside and not case.frozen and not beside:
        return None
    return likely(outside=outside, beside=beside)


# --- SG904: no gradient below some layer.


ENOUGH, LONG = 8, 32
"""Probes, and steps between the first and the last, after which a gradient would have come."""


@rule()
def sg904(case: Case) -> Found:
    cut = list(map(_first_without_gradient, case.pair))
    if case.paired and all(cut) and cut[0] == cut[-1]:
        return likely("cut", names=cut[-1])
    # parameters that no look has seen with a gradient, wherever they are in the model; without any
    # gradient the loss is at fault (SG908), or there was nothing to learn
    learning = [look for look in case.looks if any(one.gradient for one in trained(look))]
    if len(learning) >= ENOUGH and learning[-1].step - learning[0].step >= LONG:
        names = in_all(learning, lambda look: set(look.facts.without_gradient))
        if names:
            span = {"since": learning[0].step, "until": learning[-1].step, "count": len(learning)}
            return possible("nowhere", names=names, **span)
    if case.unreached:
        return possible("unreached", names=case.unreached, until=case.reading.step)
    return None


def _first_without_gradient(look: Look) -> list[str]:
    """The parameters before the first with a gradient, in the order of the model."""
    rows = [one for one in look.parameters if one.trainable and one.owned]
    found = []
    for one in rows:
        sparse = one.gradient is None and one.name not in look.facts.without_gradient
        if sparse or (one.gradient is not None and one.gradient_zeros < 1.0):
            break
        found.append(one.name)
    # without any gradient the loss is at fault (SG908), not a layer
    return found if 2 <= len(found) < len(rows) else []


# --- SG905: units behind an activation that are dead. SG911: attention on one key only.


@rule(looks=2)
def sg905(case: Case) -> Found:
    def dead(look: Look) -> set[str]:
        # samples and positions that a unit must have been 0 at to be called dead
        rows = [one for one in look.units if one.positions >= 256]
        return {one.module for one in rows if one.dead >= 0.9}

    modules = in_all(case.pair, dead)
    if not modules:
        return None
    rows = [one for one in case.last.units if one.module in modules]
    worst = max(rows, key=lambda one: one.dead)
    operation = worst.op.removeprefix("aten.")
    return likely(worst=worst, operation=operation, modules=modules, several=len(modules) > 1)


@rule(looks=2)
def sg911(case: Case) -> Found:
    def collapsed(look: Look) -> set[str]:
        rows = [one for one in look.attention if one.keys >= 8]
        return {one.module for one in rows if one.collapsed >= 0.95}

    modules = in_all(case.pair, collapsed)
    # one that began like this was made like this
    if case.looks[0] in case.pair or set(modules) <= collapsed(case.looks[0]):
        return None
    rows = [one for one in case.last.attention if one.module in modules]
    worst = max(rows, key=lambda one: one.largest_logit)
    return likely(worst=worst, modules=modules, several=len(modules) > 1)


# --- SG906: almost all targets are ignored.


@rule(looks=2)
def sg906(case: Case) -> Found:
    for look in case.pair:
        facts = look.facts
        if not facts.labels or facts.ignored < 0.99 * facts.labels:
            return None
        # an answer of one token leaves one target of a row, and means to
        if facts.labels - facts.ignored >= 0.9 * facts.samples:
            return None
    return certain()


# --- SG907: the same batch again and again.


@rule()
def sg907(case: Case) -> Found:
    if case.same_batch:
        return likely("host", until=case.same_batch)
    looks = case.looks[-3:]
    batch = looks[0].facts.batch if len(looks) == 3 else ""
    if not batch or any(look.facts.batch != batch for look in looks):
        return None
    # An epoch may be as long as the time between two looks; and who keeps one tensor in memory
    # (all of the data, a graph, a grid) means to.
    if any(look.facts.batch_after != "equal" for look in looks[1:]):
        return None
    return likely("looks", steps=tuple(look.step for look in looks))


# --- SG908: a loss that does not depend on what is trained.


@rule(looks=2)
def sg908(case: Case) -> Found:
    for look in case.pair:
        rows = trained(look)
        if not rows or any(one.gradient_zeros < 1.0 for one in rows):
            # a term may go up and down with the model, which the backward pass takes as constant
            parts = min(look.facts.parts_without_gradient for look in case.pair)
            if parts:
                return likely("part", parts=parts, one=parts == 1)
            return None
    if all(look.facts.single_class for look in case.pair):
        return certain("one class")
    return _flat(case)


def _flat(case: Case) -> Found:
    losses = {reading.step: reading.loss for reading in case.recent}
    seen = [losses.get(look.step) for look in case.pair]
    # of probes further back than the readings that are kept, the newest losses stand for theirs
    known = [loss for loss in seen if loss is not None] or [
        loss for loss in losses.values() if loss is not None
    ]
    # loss, beside that of the first step, that leaves nothing to learn
    if known and min(map(abs, known)) <= 1e-6 * (case.first_loss or 0.0):
        return None  # converged, or nothing happened: the loss is all there is to lose
    return certain("flat", loss=seen[-1])


# --- SG909: training in evaluation mode.


@rule(looks=2)
def sg909(case: Case) -> Found:
    if not any(look.facts.training for look in case.pair):
        facts = case.last.facts
        off = {"dropout": list(facts.dropout), "norms": list(facts.norms_in_eval)}
        # else nothing in the model knows the difference
        if any(off.values()):
            return likely("evaluating", **off)
        return None
    # Dropout that worked when the run began, and does not any more in a model that trains. What was
    # off from the beginning is taken as meant; so are norms, which people freeze on the way.
    begun = case.looks[0]
    now_off = in_all(case.pair, lambda look: set(look.facts.dropout))
    left = [name for name in now_off if name not in begun.facts.dropout]
    if left:
        return likely("left off", names=left, begun=begun.step)
    return None


# --- SG910: an infinity that a norm absorbs.


@rule(looks=1)
def sg910(case: Case) -> Found:
    look = case.last
    # norms whose input is too large to be squared, and whose output is 0
    rows = [one for one in look.norms if one.output_zeros >= 0.99]
    silent = [one.module for one in rows if one.scale >= 255.0]  # whose square overflows float16
    # not one of a backward pass: a GradScaler has left the update out
    half = [one for one in look.tensors if (one.dtype, one.stage) == ("float16", "forward")]
    born = tuple(one for one in half if one.infinities)
    if not silent and not born:
        return None
    prove = certain if silent else likely
    operations = tuple(tensor.op.removeprefix("aten.") for tensor in born)
    return prove(silent=silent, born=born, operations=operations)


# --- SG912: a learning rate that is 0, or whose schedule was never stepped.


SG912_IN_A_ROW = 64


@rule()
def sg912(case: Case) -> Found:
    steps = case.recent[-SG912_IN_A_ROW:]
    zero = all(reading.lr and not any(reading.lr) for reading in steps)
    if len(steps) == SG912_IN_A_ROW and zero:
        return certain("zero", count=len(steps), newest=steps[-1].step)
    if case.schedule_stood_for >= SG912_IN_A_ROW:
        return likely("never stepped")
    # next to nothing for longer than a schedule's end lasts, with gradients that still ask
    now, since = case.reading.step, case.faded_since
    if since is None or now - since < max(LONG, since // 2):
        return None
    norms = [reading.grad_norm for reading in case.recent if reading.grad_norm is not None]
    # gradient norm, beside that of the first step, that leaves something to learn
    if not norms or not case.first_norm or median(norms) < 1e-3 * case.first_norm:
        return None
    return likely("faded", norm=norms[-1])


# --- SG913: an average of weights that does not follow.


AN_EPOCH = 2000
"""Steps after which an average that is updated once an epoch would have moved."""


@rule()
def sg913(case: Case) -> Found:
    looks = case.looks
    if len(looks) < 3 or not any(one.update for one in trained(looks[-1])):
        return None
    if not case.ended:
        looks = tuple(look for look in looks if look.step >= looks[-1].step - 2 * AN_EPOCH)
        if looks[-1].step - looks[0].step < AN_EPOCH:
            return None
    still = []
    for name, digest in looks[-1].facts.averages.items():
        if all(look.facts.averages.get(name) == digest for look in looks):
            still.append(name)
    if still:
        return certain(names=still, since=looks[0].step)
    return None


# --- SG914: probabilities, logits and their logarithms mixed up.


TAKES = {
    "cross_entropy": "logits",
    "binary_cross_entropy_with_logits": "logits",
    "nll_loss": "log-probabilities",
    "kl_div": "log-probabilities",
}


@rule(looks=1)
def sg914(case: Case) -> Found:
    if case.last.facts.softmax_twice:
        return certain("twice")
    names = in_all(case.pair, lambda look: set(look.facts.mixed_up))
    if not case.paired or not names:
        return None
    given = case.last.facts.mixed_up[names[0]]
    logits = given == "logits"
    prove = likely if logits else certain
    return prove("mixed", name=names[0], takes=TAKES[names[0]], given=given, logits=logits)


# --- SG915: shapes that are spread over each other in the loss. SG916: targets out of reach.


@rule(looks=2)
def sg915(case: Case) -> Found:
    if all(look.facts.broadcast for look in case.pair):
        return certain()
    return None


@rule(looks=2)
def sg916(case: Case) -> Found:
    # of the targets a few may lie beyond: noise, and outliers
    if min(look.facts.beyond for look in case.pair) >= 0.1:
        return certain()
    return None


# --- SG917: gradients that float16 rounds to 0 for want of a loss scale.


@rule(looks=2)
def sg917(case: Case) -> Found:
    if any(reading.scale is not None for reading in case.recent):
        return None
    worst = None
    for look in case.pair:
        rows = [one for one in look.tensors if one.stage == "backward" and one.dtype == "float16"]
        worst = max(rows, key=lambda one: one.rounded_away, default=None)
        if worst is None or worst.rounded_away < 0.2:
            return None
    return likely(worst=worst)


# --- SG918: clipping that leaves next to nothing of every gradient.


NOTHING_LEFT = 0.01
"""Share of every gradient that is left."""
CLIPPED_LOOKS = 6
UPDATES = 16


@rule()
def sg918(case: Case) -> Found:
    # after clipping to 1.0 and dividing by the scale every norm is 1.0 over the scale
    norms = []
    for reading in case.recent[-UPDATES:]:
        scale = reading.scale or 0.0
        # loss scale above which a norm that carries it cannot be mistaken for one that does not
        norms.append((reading.grad_norm or 0.0) * scale if scale >= 128.0 else 0.0)
    usual = median(norms) if len(norms) == UPDATES else 0.0
    if NOTHING_LEFT < usual < 1.0 / NOTHING_LEFT and max(norms) - min(norms) <= 1e-3 * usual:
        return likely("scaled", usual=usual, updates=UPDATES, newest=case.recent[-1])
    return _clipped(case)


def _clipped(case: Case) -> Found:
    """The norm that was read before clipping, beside that of the gradients of the update."""
    before = {reading.step: reading.grad_norm for reading in case.recent}
    looks = [look for look in case.looks if before.get(look.step) and not look.left_out]
    looks = looks[-CLIPPED_LOOKS:]
    left = [_norm(look) / (before[look.step] or math.inf) for look in looks]
    if len(looks) < CLIPPED_LOOKS or max(left) > NOTHING_LEFT or min(left) <= 0.0:
        return None
    last = looks[-1]
    fields = {"before": before[last.step], "after": _norm(last), "count": len(looks)}
    return possible("clipped", left=max(left), last=last, **fields)


def _norm(look: Look) -> float:
    squares = 0.0
    for one in look.parameters:
        if one.update is not None and one.gradient is not None:
            squares += one.gradient**2 * one.elements
    return math.sqrt(squares)


# --- SG919: units or outputs that are all alike.


LASTING, LASTING_STEPS = 6, 48
"""Probes and steps after which a model that gives one answer has collapsed."""
NO_SPREAD = 1e-3
"""Deviation of the outputs between samples, beside their size and beside that of the beginning."""


@rule(looks=3)
def sg919(case: Case) -> Found:
    looks = case.looks[-3:]

    def copies(look: Look) -> set[str]:
        return {one.name for one in look.parameters if one.copies and one.owned}

    names = in_all(looks, copies)
    if names:
        return certain("copies", names=names, first=looks[0])
    # outputs that have stayed the same for all samples: for a while they may, on a plateau
    lasting = case.looks[-LASTING:]
    spreads = [look.facts.spread for look in lasting]
    begun = case.looks[0].facts.spread
    if len(lasting) < LASTING or not begun or lasting[-1].step - lasting[0].step < LASTING_STEPS:
        return None
    most = max(math.inf if spread is None else spread for spread in spreads)
    if begun < NO_SPREAD or most > NO_SPREAD * min(1.0, begun):
        return None
    return possible("collapsed", most=most, begun=begun, first=lasting[0])


# --- SG920: weight decay that erases what is learned.


@rule()
def sg920(case: Case) -> Found:
    # a tenth of every weight in each update
    if case.shrinks_by < 0.1 or len(case.recent) < 4:
        return None
    return certain(share=min(case.shrinks_by, 1.0))


# --- SG921: a classifier that knows how frequent the classes are, and nothing else.


TRAINED_LOOKS, TRAINED_STEPS = 8, 96
"""Probes and steps after which something would have been learned."""
BELOW, ABOVE = 0.98, 1.03
"""Mean loss, beside the entropy, of a model that knows no more; one that is trained on noise is a
little above."""
NEARLY_ALL = 0.9


@rule()
def sg921(case: Case) -> Found:
    looks = [look for look in case.looks if look.facts.classes]
    if len(looks) < TRAINED_LOOKS or looks[-1].step < TRAINED_STEPS:
        return None
    size = len(looks[-1].facts.classes)
    rows = [look.facts.classes for look in looks if len(look.facts.classes) == size]
    counts = list(map(sum, zip(*rows, strict=True)))
    total = sum(counts)
    # contrastive losses put the right answer first, always
    if total < 256 or max(counts) == total:
        return None
    return _by_frequency(looks, counts, total)


def _by_frequency(looks: Looks, counts: list[int], total: int) -> Found:
    """Nearly all targets are one class, or the loss is that of their frequencies."""
    shares = [count / total for count in counts if count]
    entropy = -sum(share * math.log(share) for share in shares)
    late = [look.facts.cross_entropy for look in looks[len(looks) // 2 :]]
    losses = [loss for loss in late if loss is not None]
    mean = fmean(losses) if losses else math.inf
    # loss, beside the entropy of the labels, below which something is learned from the inputs
    if max(shares) >= NEARLY_ALL and mean >= 0.8 * entropy:
        most = counts.index(max(counts))
        fields = {"total": total, "count": len(looks), "classes": len(counts)}
        return possible("one class", share=max(shares), most=most, **fields)
    half = len(losses) // 2
    # weights that have hardly moved cannot have learned anything yet
    # least move of the weights, as a share of their size
    if not half or entropy < 0.3 or _distance(looks) < 0.05:
        return None
    # a slow start that still falls is not the end
    falls = fmean(losses[half:]) < BELOW * fmean(losses[:half])
    if falls or not BELOW <= mean / entropy <= ABOVE:
        return None
    return possible("frequencies", mean=mean, entropy=entropy, last=looks[-1])


def _distance(looks: Looks) -> float:
    """How far all weights would have come with every update as large as at the looks."""
    shares = []
    for look in looks:
        rows = trained(look)
        size = sum(one.elements * one.weight**2 for one in rows)
        step = sum(one.elements * (one.update or 0.0) ** 2 for one in rows)
        shares.append(math.sqrt(step / size) if size else 0.0)
    return fmean(shares) * looks[-1].step


# --- SG922: targets that teach the wrong token.


@rule()
def sg922(case: Case) -> Found:
    seen = case.targets
    # a masked language model, or labels that are shifted already, are another matter
    if seen is None or seen.unlike:
        return None
    # who teaches the first padding token as the end has one of them in a row
    if seen.padding_targets > max(seen.padded_rows, NEARLY_ALL * seen.padding):
        return likely("padding", share=seen.padding_targets / max(seen.targets, 1))
    # a token that ends all rows (`<|im_end|>`) is taught in the place of the end token
    if seen.ends or seen.same_last:
        return None
    if seen.ended >= NEARLY_ALL * seen.rows:
        return likely("masked", end=seen.end, shared=seen.pad == seen.end)
    # answers to a prompt that nothing has cut; running text need not end
    if min(seen.prompted, seen.unended) >= NEARLY_ALL * seen.rows:
        return likely("absent", end=seen.end)
    return None


# --- SG923: a resume that did not resume.


@rule()
def sg923(case: Case) -> Found:
    facts = case.resume
    if facts is None:
        return None
    counted = bool(facts.step or facts.updates)
    if not counted:
        # other data would give another loss than those that the run before ended with
        if facts.loss_now is None or not facts.losses:
            return None
        lowest, highest = min(facts.losses), max(facts.losses)
        if facts.loss_now > highest + (highest - lowest) + 0.1 * abs(highest):
            return None
    if not (facts.moments_empty or facts.lr_restarted or facts.batch_again):
        return None
    fields = _left_behind(facts, [one.loss for one in case.recent if one.loss is not None])
    # weights that look like those of the run before may be what a new phase is meant to begin with
    prove = certain if facts.step and facts.moments_empty else likely
    return prove(**fields)


def _left_behind(facts: ResumeFacts, losses: list[float]) -> dict[str, Any]:
    """The strongest sign that an earlier run goes on, and what it left behind."""
    fields = {
        "ended_at": facts.last,
        "optimizer": facts.optimizer,
        "goes_on_at": facts.step or None,
        "counted": None if facts.step else facts.updates,
        "near_step": None if facts.step or facts.updates else facts.near,
        "empty": facts.moments_empty or None,
        "again": facts.batch_again or None,
        **dict.fromkeys(("before", "now", "usual", "jumped")),
    }
    if facts.lr_restarted:
        pairs = zip(facts.lr, facts.lr_now, strict=True)
        before, now = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        fields |= {"before": f"{before:.3g}", "now": f"{now:.3g}"}
    if facts.losses and losses:
        usual = median(facts.losses)
        # loss of the first steps beside that at the end of the run before, which is worth saying
        if usual > 0 and max(losses) > 1.5 * max(usual, max(facts.losses)):
            fields |= {"usual": f"{usual:.4g}", "jumped": f"{max(losses):.4g}"}
    return fields


# --- SG924: a checkpointed block that computes something else the second time.


@rule(looks=2)
def sg924(case: Case) -> Found:
    found = [look for look in case.pair if look.facts.recomputed_otherwise]
    if len(found) < len(case.pair):
        return None
    module, op = found[-1].facts.recomputed_otherwise
    random = any(word in op for word in RANDOM)
    return certain(
        module=module,
        op=op,
        share=found[-1].facts.recomputed_share,
        compared=found[-1].facts.recomputed,
        random=random,
    )


RANDOM = ("dropout", "bernoulli", "rand", "normal_", "uniform_", "exponential_")
"""Parts of the names of operations that draw random numbers."""


# --- SG925: an optimizer whose updates follow another rule than its name says.


PLAIN = 5e-3
"""Share of an update beyond gradient, running mean and weight, up to which it is plain descent."""


def _shares_apart(look: Look, below: float) -> dict[str, float]:
    """Parameters whose update is plain descent up to such a share."""
    shares = {one.name: one.apart for one in look.parameters if one.apart is not None}
    return {name: share for name, share in shares.items() if share < below}


@rule(looks=2)
def sg925(case: Case) -> Found:
    rules = {look.facts.update_rule for look in case.pair}
    if len(rules) > 1 or "" in rules:
        return None
    names = in_all(case.pair, lambda look: set(_shares_apart(look, PLAIN)))
    # of a rule for elements all must agree; Muon leaves some matrices to another optimizer
    measured = max(len(_shares_apart(look, math.inf)) for look in case.pair)
    if not names or ("orthogonal" not in rules and len(names) < measured):
        return None
    shares = _shares_apart(case.last, PLAIN)
    apart = max(shares[name] for name in names)
    return likely(
        next(rule for rule in ("element", "orthogonal", "memory") if rule in rules),
        names=names,
        optimizer=case.last.facts.optimizer,
        share=apart,
    )


# --- SG926: a policy gradient without a signal, or with a wrong one. The names are TRL's.


EQUAL_REWARDS = "frac_reward_zero_std"
"""Followed by every trainer that compares the completions of one prompt."""
ON_POLICY = "clip_ratio/on_policy"
"""Share of tokens clipped in a batch that the weights at hand have sampled: their ratio is 1."""
LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"
CLIPPED = "clip_ratio/region_mean"
MANY_VALUES, FEW_VALUES = 8, 4
MOST_ON_POLICY, MOST_DIFFERENCE, MOST_CLIPPED, MOST_KL = 0.01, 0.2, 0.5, 10.0
"""Kernels of two engines differ by some hundredths in a log-probability; a clipped token has left
the ratios from 0.8 to 1.2; a divergence of 10 per token is one rare token behind an exponential."""


@rule()
def sg926(case: Case) -> Found:
    def values(name: str) -> list[float]:
        found = [one.followed[name] for one in case.recent if name in one.followed]
        return [value for value in found if not math.isnan(value)]

    def lasting(name: str, count: int) -> list[float]:
        newest = values(name)[-count:]
        return newest if len(newest) == count else []

    equal = lasting(EQUAL_REWARDS, MANY_VALUES)
    if not values(EQUAL_REWARDS):
        return None
    if median(lasting(ON_POLICY, FEW_VALUES) or [0.0]) > MOST_ON_POLICY:
        return likely("ratio", share=median(lasting(ON_POLICY, FEW_VALUES)), count=FEW_VALUES)
    if median(lasting(LOGP_DIFFERENCE, FEW_VALUES) or [0.0]) > MOST_DIFFERENCE:
        typical = median(lasting(LOGP_DIFFERENCE, FEW_VALUES))
        return likely("sampler", difference=typical, factor=math.exp(typical), count=FEW_VALUES)
    if equal and min(equal) == 1.0:
        reward = next(reversed(values("reward")), None)
        return likely("equal", count=len(equal), reward=reward)
    kl = lasting("kl", FEW_VALUES)
    if kl and min(kl) > MOST_KL:
        return likely("kl", least=min(kl), most=max(kl), count=len(kl))
    clipped = lasting(CLIPPED, MANY_VALUES)
    if clipped and min(clipped) > MOST_CLIPPED:
        return likely("clipped", share=median(clipped), count=len(clipped))
    entropy, late = values("entropy"), lasting("entropy", FEW_VALUES)
    # entropy in nats, and beside that of the beginning, at which a policy has one answer
    if late and len(entropy) > FEW_VALUES and max(late) < 0.05 * min(1.0, entropy[0]):
        return possible("entropy", begun=entropy[0], most=max(late), count=len(late))
    return None


# --- SG927: weights that were not loaded, or are not tied.


@rule()
def sg927(case: Case) -> Found:
    weights = case.weights
    if weights is None:
        return None
    if weights.untied:
        one, other = weights.untied[0]
        return certain("untied", one=one, other=other)
    # an adapter or a new head is meant to be missing, and is trained
    if weights.renamed and 2 * len(weights.renamed) >= weights.missing:
        name, other = weights.renamed[0]
        # not certain: the tensors may have been filled by other means since
        return likely("renamed", name=name, other=other, missing=weights.missing)
    if weights.frozen:
        return likely("frozen", names=weights.frozen, missing=weights.missing)
    # a new head has the shape of its classes, not of the vocabulary
    if len(weights.heads) == 1:
        name, other = weights.heads[0]
        return likely("head", name=name, other=other)
    return None


# --- SG928: a step that gives other values when it is run again.


@rule()
def sg928(case: Case) -> Found:
    found = case.audit
    if found is None:
        return None
    right, wrong = (*found.values, "", "")[:2]
    numbers = {"rank": found.rank, "count": found.runs, "at_step": found.step}
    return likely(where=found.place, right=right, wrong=wrong, **numbers)


# --- SG929: epochs and workers that draw the same random numbers.


@rule()
def sg929(case: Case) -> Found:
    facts = case.loader
    if facts.twins:
        return certain("workers", source=facts.twins, count=facts.workers)
    if facts.repeats:
        return likely("epochs", source=facts.repeats)
    if facts.sampler:
        return likely("order", sampler=facts.sampler, count=facts.batches)
    return None


# --- SG930: a router that uses few experts, or cannot tell them apart.


LASTING_ROUTERS, ROUTER_STEPS = 3, 48
"""Probes, and steps they span, in which the same half of the experts must be unused: a batch may be
about one thing, and a random gate needs some steps to become balanced."""


@rule(looks=2)
def sg930(case: Case) -> Found:
    for one in case.last.routers:
        ties = [_router_of(look, one.module) for look in case.pair]
        rounded = [row.ties for row in ties if row is not None and row.dtype in NARROW]
        # scores of order 1 in bfloat16 tie in some 2 % of the tokens with 8 experts, 10 % with 64
        if len(rounded) == len(case.pair) and min(rounded) >= 0.25:
            return likely("ties", router=one)
    earlier = [look for look in case.looks if look.step <= case.last.step - ROUTER_STEPS]
    lasting = case.looks[max(len(earlier) - 1, 0) :]
    if not earlier or len(lasting) < LASTING_ROUTERS:
        return None
    for one in case.last.routers:
        rows = [_router_of(look, one.module) for look in lasting]
        unused = set.intersection(*map(_unused, rows))
        if 2 * len(unused) >= one.experts:
            span = {"first": lasting[0], "count": len(lasting), "unused": len(unused)}
            most = max(one.loads)
            return likely("collapsed", router=one, entropy=one.entropy, most=most, **span)
    return None


def _router_of(look: Look, module: str) -> RouterLook | None:
    return next((one for one in look.routers if one.module == module), None)


def _unused(row: RouterLook | None) -> set[int]:
    # choices for each expert that are needed to judge loads: with equal ones none is ever unused
    if row is None or row.tokens * row.chosen < 16 * row.experts:
        return set()
    # share of its fair load that an expert gets at most when the router has given it up. Where a
    # loss balances the loads, one or two of eight experts fall below it for a while, never half of
    # them.
    return {number for number, load in enumerate(row.loads) if load * row.experts < 0.05}


# --- SG931: an evaluation in training mode.


@rule()
def sg931(case: Case) -> Found:
    found = case.evaluation
    if found is None:
        return None
    fields = {"dropout": list(found.dropout), "norms": list(found.norms)}
    return likely(count=found.calls, loss=found.loss, before=found.step, **fields)


# --- SG932: rows that are trained on are evaluated.


@rule()
def sg932(case: Case) -> Found:
    found = case.overlap
    if found is None:
        return None
    # an evaluation of nothing but training rows may be meant to measure just that
    make = possible if found.whole else likely
    return make(shared=found.shared, rows=found.rows, before=found.step, trained=found.trained)


# --- SG933: the gradients of micro-batches are summed, not averaged.


ADAPTIVE = ("ada", "lamb", "lion", "muon", "prodigy", "rms", "shampoo", "sign", "soap", "sophia")
"""Parts of the names of optimizers whose updates do not grow with the gradient."""


@rule()
def sg933(case: Case) -> Found:
    found = case.split
    if found is None:
        return None
    name = case.optimizer.lower()
    adaptive = any(word in name for word in ADAPTIVE)
    if found.given and adaptive:
        return None  # `guard.step` adds losses, as it says it does, and the update hardly differs
    fields = {"count": found.count, "reduction": found.mean, "optimizer": case.optimizer}
    make = likely if found.sure and not adaptive else possible
    return make(adaptive=adaptive, **fields)
