"""SG921: a classifier that knows how frequent the classes are, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from stepguard.diagnose.case import (
    Case,
    in_all,
    last_looks,
    named,
    newest_look,
    rate_is_zero,
    trained,
    unchanged,
)
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.records import Reading
from stepguard.records.probes import Look, ParameterLook, TensorLook

# --- SG901: updates that rounding loses.


MOST_LOST = 0.5
"""Share of the elements with a gradient that an update may leave as they were."""
NARROW = ("bfloat16", "float16")
VANISHED = 1e-8
"""Root mean square of a gradient below which Adam's epsilon is larger."""


def recognise_sg901(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or rate_is_zero(case):
        return None
    shares = [_lost_share(look) for look in looks]
    if min(shares) < MOST_LOST:
        return None
    rows = _losing(looks[-1])
    dtypes = sorted({one.dtype for one in rows})
    sentence = (
        f"{shares[-1]:.0%} of all weights with a gradient are exactly as before the update of step "
        f"{looks[-1].step}: {named([one.name for one in rows])} in {named(dtypes)}"
    )
    if set(dtypes) <= set(NARROW):
        return certain(sentence, "bfloat16 holds 8 bits: a change below 0.4 % of a weight is lost")
    if all((one.gradient or 0.0) < VANISHED for one in rows):
        return None  # there is nothing to round: the gradients are next to 0 themselves
    if _lost_share(case.looks[0]) < MOST_LOST:
        return None  # it has moved before: float32 is fine enough, the run has converged
    return likely(sentence)


def _losing(look: Look) -> list[ParameterLook]:
    return [one for one in trained(look) if (one.lost or 0.0) > MOST_LOST]


def _lost_share(look: Look) -> float:
    """Share of all weights with a gradient that the update left as they were."""
    elements = 0
    lost = 0.0
    for one in trained(look):
        if one.lost is not None:
            elements += one.elements
            lost += one.lost * one.elements
    return lost / elements if elements else 0.0


SG901 = Rule(code="SG901", recognise=recognise_sg901)


# --- SG902: gradients that are not zeroed between steps, or at the wrong time.


MOST = 8
"""Of the last 16 updates: what half of them do is the loop's way."""
SAID = {
    "carried": "the gradients of the update before were still there, and were added to",
    "discarded": "gradients of a backward pass were zeroed before they were used: of several "
    "micro-batches only the last one counts",
    "thrown": "the gradients of the backward pass were gone when the optimizer stepped: nothing "
    "was learned",
    "foreign": "gradients of a loss that another optimizer stepped for were still there, and were "
    "used too",
}


def recognise_sg902(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or not all(look.facts.kept_gradients for look in looks):
        return _habit(case)
    return certain(
        f"the backward passes of steps {looks[0].step} and {looks[-1].step} began with the "
        "gradients of the steps before them: they add up over the whole run"
    )


def _habit(case: Case) -> Proof | None:
    """What most of the last updates did with their gradients, without a look."""
    for habit, said in SAID.items():
        count = case.habits.get(habit, 0)
        if count >= MOST:
            return likely(f"in {count} of the last updates, up to step {case.reading.step}, {said}")
    return None


SG902 = Rule(code="SG902", recognise=recognise_sg902)


# --- SG903: parameters that get gradients and no update.


UNCHANGED_LOOKS = 3
"""Looks at which a tensor beside the model must have been the same."""


def recognise_sg903(case: Case) -> Proof | None:
    looks = last_looks(case)
    still = unchanged(looks) if looks else set()
    # an optimizer without a guard, or one of copies in float32, may update what looks unowned
    outside = [name for name in in_all(looks, _without_optimizer) if name in still]
    frozen = case.frozen
    beside = in_all(last_looks(case, UNCHANGED_LOOKS), lambda look: set(look.facts.outsiders))
    if not outside and not frozen and not beside:
        return None
    sentences = []
    if outside:
        sentences.append(
            f"{named(outside)} get gradients in every step and stay as they are: no guarded "
            "optimizer has them"
        )
    if frozen:
        sentences.append(
            f"{named(frozen)} are in the optimizer and have requires_grad=False, beside others of "
            "the same module that train"
        )
    if beside:
        kinds = [looks[-1].facts.outsiders[number] for number in beside]
        sentences.append(
            f"{named(kinds)} takes part in the loss, gets gradients and stays as it is: it belongs "
            "neither to the model nor to an optimizer"
        )
    return likely(*sentences)


def _without_optimizer(look: Look) -> set[str]:
    found = set()
    for one in look.parameters:
        if one.trainable and not one.owned and one.gradient:
            found.add(one.name)
    return found


SG903 = Rule(code="SG903", recognise=recognise_sg903)


# --- SG904: no gradient below some layer.


FEWEST = 2
"""Parameters in a row without a gradient that make a cut."""
ENOUGH, LONG = 8, 32
"""Looks, and steps between the first and the last, after which a gradient would have come."""


def recognise_sg904(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return _unreached(case)
    cut = [_first_without_gradient(look) for look in looks]
    if not all(cut) or cut[0] != cut[-1]:
        return _nowhere(case)
    names = cut[-1]
    return likely(
        f"the gradient is exactly 0 for {named(names)}, the first parameters of the model, while "
        f"those behind have one (steps {looks[0].step} and {looks[-1].step})"
    )


def _nowhere(case: Case) -> Proof | None:
    """Parameters that no look has seen with a gradient, wherever they are in the model."""
    # without any gradient the loss is at fault (SG908), or there was nothing to learn
    looks = [look for look in case.looks if any(one.gradient for one in trained(look))]
    if len(looks) < ENOUGH or looks[-1].step - looks[0].step < LONG:
        return _unreached(case)
    names = in_all(looks, lambda look: set(look.facts.without_gradient))
    if not names:
        return _unreached(case)
    return possible(
        f"{named(names)} belong to the optimizer and had no gradient at any of the {len(looks)} "
        f"looks from step {looks[0].step} to step {looks[-1].step}: they are as they were made, or "
        "only decay"
    )


def _unreached(case: Case) -> Proof | None:
    if not case.unreached:
        return None
    return possible(
        f"{named(case.unreached)} belong to the optimizer and have had no gradient up to step "
        f"{case.reading.step}, while others have one: they are as they were made"
    )


def _first_without_gradient(look: Look) -> list[str]:
    """The parameters before the first with a gradient, in the order of the model."""
    rows = [one for one in look.parameters if one.trainable and one.owned]
    found: list[str] = []
    for one in rows:
        sparse = one.gradient is None and one.name not in look.facts.without_gradient
        if sparse or (one.gradient is not None and one.gradient_zeros < 1.0):
            break
        found.append(one.name)
    # without any gradient the loss is at fault (SG908), not a layer
    if len(found) < FEWEST or len(found) == len(rows):
        return []
    return found


SG904 = Rule(code="SG904", recognise=recognise_sg904)


# --- SG905: units behind an activation that are dead.


MOST_DEAD = 0.9
LEAST_POSITIONS = 256
"""Samples and positions that a unit must have been 0 at to be called dead."""


def recognise_sg905(case: Case) -> Proof | None:
    looks = last_looks(case)
    dead = in_all(looks, _dead)
    if not dead:
        return None
    worst = max((one for one in looks[-1].units if one.module in dead), key=lambda one: one.dead)
    return likely(
        f"{worst.dead:.0%} of the {worst.units} units behind {worst.op.removeprefix('aten.')} in "
        f"{worst.module or 'the model'} are 0 for all {worst.positions:,} samples and positions of "
        f"step {looks[-1].step}",
        f"the same in {named(dead)}" if len(dead) > 1 else "",
    )


def _dead(look: Look) -> set[str]:
    found = set()
    for one in look.units:
        if one.dead >= MOST_DEAD and one.positions >= LEAST_POSITIONS:
            found.add(one.module)
    return found


SG905 = Rule(code="SG905", recognise=recognise_sg905)


# --- SG906: almost all targets are ignored.


MOST_IGNORED = 0.99
LABELLED = 0.9
"""Targets that count, for each sample, that are enough."""


def recognise_sg906(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    for look in looks:
        facts = look.facts
        if not facts.labels or facts.ignored < MOST_IGNORED * facts.labels:
            return None
        # an answer of one token leaves one target of a row, and means to
        if facts.labels - facts.ignored >= LABELLED * facts.samples:
            return None
    facts = looks[-1].facts
    return certain(
        f"{facts.ignored:,} of the {facts.labels:,} targets of step {looks[-1].step} are "
        f"ignore_index: most of the {facts.samples} samples have none that counts"
    )


SG906 = Rule(code="SG906", recognise=recognise_sg906)


# --- SG907: the same batch again and again.


IN_A_ROW = 3


def recognise_sg907(case: Case) -> Proof | None:
    if case.same_batch:
        return likely(
            f"the batches up to step {case.same_batch} are the same, each time in new memory"
        )
    looks = last_looks(case, IN_A_ROW)
    if not looks or not looks[0].facts.batch:
        return None
    if len({look.facts.batch for look in looks}) > 1:
        return None
    # An epoch may be as long as the time between two looks; and who keeps one tensor in memory
    # (all of the data, a graph, a grid) means to.
    if any(look.facts.batch_after != "equal" for look in looks[1:]):
        return None
    steps = ", ".join(str(look.step) for look in looks)
    return likely(
        f"the batches of steps {steps} and of the steps after them are the same, bit for bit, each "
        "time in new memory"
    )


SG907 = Rule(code="SG907", recognise=recognise_sg907)


# --- SG908: a loss that does not depend on what is trained.


SOLVED = 1e-6
"""Loss, beside that of the first step, that leaves nothing to learn."""


def recognise_sg908(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    for look in looks:
        rows = trained(look)
        if not rows or any(one.gradient_zeros < 1.0 for one in rows):
            return _part_without(looks)
    if all(look.facts.single_class for look in looks):
        return certain(
            f"the loss of steps {looks[0].step} and {looks[-1].step} takes a softmax over one "
            "class, which is always 1: every gradient is exactly 0"
        )
    return _flat(case, looks)


def _flat(case: Case, looks: Sequence[Look]) -> Proof | None:
    losses = {reading.step: reading.loss for reading in case.recent}
    seen = [losses.get(look.step) for look in looks]
    known = [abs(loss) for loss in seen if loss is not None]
    if known and min(known) <= SOLVED * (case.first_loss or 0.0):
        return None  # converged, or nothing happened: the loss is all there is to lose
    return certain(
        f"every gradient is exactly 0 at steps {looks[0].step} and {looks[-1].step}"
        + (f", with a loss of {seen[-1]:.4g}" if seen[-1] is not None else "")
    )


def _part_without(looks: Sequence[Look]) -> Proof | None:
    """A term that goes up and down with the model, and that the backward pass takes as constant."""
    parts = min(look.facts.parts_without_gradient for look in looks)
    if not parts:
        return None
    terms = "a term" if parts == 1 else f"{parts} terms"
    return likely(
        f"{terms} of the loss of steps {looks[0].step} and {looks[-1].step} comes from the model "
        "and has no gradient (requires_grad=False): nothing is learned from it"
    )


SG908 = Rule(code="SG908", recognise=recognise_sg908)


# --- SG909: training in evaluation mode.


def recognise_sg909(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    if any(look.facts.training for look in looks):
        return _left_off(case)
    facts = looks[-1].facts
    if not facts.dropout and not facts.norms_in_eval:
        return None  # nothing in the model knows the difference
    return likely(
        "the model is in evaluation mode while it trains: call model.train() after evaluating",
        f"dropout does nothing in {named(facts.dropout)}" if facts.dropout else "",
        f"{named(facts.norms_in_eval)} keep their statistics" if facts.norms_in_eval else "",
    )


def _left_off(case: Case) -> Proof | None:
    """Dropout that worked when the run began, and does not any more in a model that trains.

    What was off from the beginning is taken as meant; so are norms, which people freeze on the way.
    """
    looks = last_looks(case)
    first = case.looks[0]
    now_off = in_all(looks, lambda look: set(look.facts.dropout))
    left = [name for name in now_off if name not in first.facts.dropout]
    if not left:
        return None
    return likely(
        f"{named(left)} dropped values at step {first.step} and does not any more at steps "
        f"{looks[0].step} and {looks[-1].step}: a part of the model was left in evaluation mode"
    )


SG909 = Rule(code="SG909", recognise=recognise_sg909)


# --- SG910: an infinity that a norm absorbs.


ALL_ZERO = 0.99
SQUARE_OVERFLOWS = 255.0
"""Root mean square from which on squares overflow float16."""


def recognise_sg910(case: Case) -> Proof | None:
    look = newest_look(case)
    if look is None:
        return None
    silent = _switched_off(look)
    born = [one for one in look.tensors if _absorbed(one)]
    if not silent and not born:
        return None
    sentences = [_birth(one, look.step) for one in born[:2]]
    if silent:
        return certain(*sentences, f"the output of {named(silent)} is 0")
    return likely(*sentences)


def _absorbed(row: TensorLook) -> bool:
    """One of a backward pass is not: a GradScaler has left the update out."""
    return bool(row.infinities) and row.dtype == "float16" and row.stage == "forward"


def _switched_off(look: Look) -> list[str]:
    """Norms whose input is too large to be squared, and whose output is 0."""
    found = []
    for one in look.norms:
        if one.output_zeros >= ALL_ZERO and one.scale >= SQUARE_OVERFLOWS:
            found.append(one.module)
    return found


def _birth(row: TensorLook, step: int) -> str:
    return (
        f"{row.op.removeprefix('aten.')} in {row.module or 'the loss function'} made "
        f"{row.infinities:,} infinities of finite {row.dtype} numbers at step {step}, and the loss "
        "was finite all the same"
    )


SG910 = Rule(code="SG910", recognise=recognise_sg910)


# --- SG911: attention that looks at one key only.


COLLAPSED = 0.95
LEAST_KEYS = 8


def recognise_sg911(case: Case) -> Proof | None:
    looks = last_looks(case)
    modules = in_all(looks, _collapsed)
    if not modules:
        return None
    # one that began like this was made like this
    if case.looks[0] in looks or set(modules) <= _collapsed(case.looks[0]):
        return None
    worst = max(
        (one for one in looks[-1].attention if one.module in modules),
        key=lambda one: one.largest_logit,
    )
    return likely(
        f"{worst.collapsed:.0%} of the rows of {worst.module} have all their weight on one key at "
        f"step {looks[-1].step}; the largest logit is {worst.largest_logit:.0f}",
        f"the same in {named(modules)}" if len(modules) > 1 else "",
    )


def _collapsed(look: Look) -> set[str]:
    found = set()
    for one in look.attention:
        if one.collapsed >= COLLAPSED and one.keys >= LEAST_KEYS:
            found.add(one.module)
    return found


SG911 = Rule(code="SG911", recognise=recognise_sg911)


# --- SG912: a learning rate that is 0, or whose schedule was never stepped.


SG912_IN_A_ROW = 64
SG912_LONG = 32
"""Steps with next to no learning rate that are too many."""
STILL = 1e-3
"""Gradient norm, beside that of the first step, that leaves something to learn."""


def recognise_sg912(case: Case) -> Proof | None:
    steps = case.recent[-SG912_IN_A_ROW:]
    if len(steps) == SG912_IN_A_ROW and all(_is_zero(reading.lr) for reading in steps):
        return certain(
            f"every learning rate has been 0 for the last {len(steps)} steps, up to step "
            f"{steps[-1].step}: nothing is learned"
        )
    if case.schedule_stood_for >= SG912_IN_A_ROW:
        return likely(
            f"the schedule that the guard was given was not stepped once in the "
            f"{case.schedule_stood_for:,} steps of this run: the learning rate never moved"
        )
    return _faded(case)


def _faded(case: Case) -> Proof | None:
    """Next to nothing for longer than a schedule's end lasts, with gradients that still ask."""
    now, since = case.reading.step, case.faded_since
    if since is None or now - since < max(SG912_LONG, since // 2):
        return None
    norms = [reading.grad_norm for reading in case.recent if reading.grad_norm is not None]
    if not norms or not case.first_norm or median(norms) < STILL * case.first_norm:
        return None
    return likely(
        f"every learning rate has been below 1/10,000 of its highest since step {since} of "
        f"{now:,}, while the gradient norm is {norms[-1]:.3g} ({case.first_norm:.3g} at the "
        "beginning): a schedule meant for epochs may be stepped with every batch"
    )


def _is_zero(rates: tuple[float, ...] | None) -> bool:
    return bool(rates) and not any(rates or ())


SG912 = Rule(code="SG912", recognise=recognise_sg912)


# --- SG913: an average of weights that does not follow.


SG913_FEWEST = 3
SG913_LONG = 2000
"""Steps after which an average that is updated once an epoch would have moved."""


def recognise_sg913(case: Case) -> Proof | None:
    looks = case.looks
    if len(looks) < SG913_FEWEST or not any(one.update for one in trained(looks[-1])):
        return None
    if not case.ended:
        looks = tuple(look for look in looks if look.step >= looks[-1].step - 2 * SG913_LONG)
        if looks[-1].step - looks[0].step < SG913_LONG:
            return None
    still = []
    for name, digest in looks[-1].facts.averages.items():
        if all(look.facts.averages.get(name) == digest for look in looks):
            still.append(name)
    if not still:
        return None
    return certain(
        f"{named(still)} holds exactly what it held at step {looks[0].step}, while the weights "
        "have moved on"
    )


SG913 = Rule(code="SG913", recognise=recognise_sg913)


# --- SG914: probabilities, logits and their logarithms mixed up.


TAKES = {
    "cross_entropy": "logits",
    "binary_cross_entropy_with_logits": "logits",
    "nll_loss": "log-probabilities",
    "kl_div": "log-probabilities",
}


def recognise_sg914(case: Case) -> Proof | None:
    look = newest_look(case)
    if look is None:
        return None
    if not look.facts.softmax_twice:
        return _mixed_up(case)
    return certain(
        f"every row that goes into the cross entropy of step {look.step} is positive and sums to "
        "1: it has been through a softmax, and cross_entropy takes another one"
    )


def _mixed_up(case: Case) -> Proof | None:
    looks = last_looks(case)
    names = in_all(looks, lambda look: set(look.facts.mixed_up))
    if not names:
        return None
    name = names[0]
    given = looks[-1].facts.mixed_up[name]
    sentence = (
        f"{name} of steps {looks[0].step} and {looks[-1].step} takes {TAKES[name]} and is given "
        f"{given}"
    )
    if given == "logits":
        return likely(f"{sentence}: the exponentials of a row do not sum to 1")
    return certain(sentence)


SG914 = Rule(code="SG914", recognise=recognise_sg914)


# --- SG915: shapes that are spread over each other in the loss.


def recognise_sg915(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or not all(look.facts.broadcast for look in looks):
        return None
    op, one, other = looks[-1].facts.broadcast
    return certain(
        f"{op} of steps {looks[0].step} and {looks[-1].step} is given shapes {one} and {other}, "
        "and compares every output with every target"
    )


SG915 = Rule(code="SG915", recognise=recognise_sg915)


# --- SG916: targets that the output cannot reach.


MOST_BEYOND = 0.1
"""Share of the targets that may lie beyond: noise, and a few outliers."""


def recognise_sg916(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or min(look.facts.beyond for look in looks) < MOST_BEYOND:
        return None
    facts = looks[-1].facts
    return certain(
        f"the output of the model ends in {facts.bound}, and {facts.beyond:.0%} of the targets of "
        f"step {looks[-1].step} lie outside its range"
    )


SG916 = Rule(code="SG916", recognise=recognise_sg916)


# --- SG917: gradients that float16 rounds to 0 for want of a loss scale.


SG917_MOST_LOST = 0.2
"""Share of a gradient's elements that may be rounded to 0."""


def recognise_sg917(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or any(reading.scale is not None for reading in case.recent):
        return None
    worst = [_worst(look) for look in looks]
    if any(one is None or one.rounded_away < SG917_MOST_LOST for one in worst):
        return None
    row = worst[-1]
    assert row is not None
    return likely(
        f"{row.rounded_away:.0%} of the gradient that goes into {row.module or 'the model'} at "
        f"step {looks[-1].step} is not 0 in float32 and 0 in float16, and no GradScaler scales the "
        "loss"
    )


def _worst(look: Look) -> TensorLook | None:
    rows = [one for one in look.tensors if one.stage == "backward" and one.dtype == "float16"]
    return max(rows, key=lambda one: one.rounded_away, default=None)


SG917 = Rule(code="SG917", recognise=recognise_sg917)


# --- SG918: clipping that leaves next to nothing of every gradient.


NOTHING_LEFT = 0.01
"""Share of every gradient that is left."""
ENOUGH_LOOKS = 6
SG918_IN_A_ROW = 16
ALIKE = 1e-3
LEAST_SCALE = 128.0
"""Loss scale from which on a norm that carries it cannot be mistaken for one that does not."""


def recognise_sg918(case: Case) -> Proof | None:
    return _before_unscaling(case) or _clipped(case)


def _before_unscaling(case: Case) -> Proof | None:
    """After clipping to 1.0 and dividing by the scale every norm is 1.0 over the scale."""
    steps = case.recent[-SG918_IN_A_ROW:]
    if len(steps) < SG918_IN_A_ROW:
        return None
    norms = [_scaled_norm(reading) for reading in steps]
    usual = median(norms)
    if not NOTHING_LEFT < usual < 1.0 / NOTHING_LEFT:
        return None
    if max(norms) - min(norms) > ALIKE * usual:
        return None
    newest = steps[-1]
    return likely(
        f"the gradient norm times the loss scale was {usual:.4g} in each of the last "
        f"{SG918_IN_A_ROW} updates: the gradients were clipped to {usual:.4g} while they carried "
        f"the scale of {newest.scale:.0f}, which leaves a norm of {newest.grad_norm:.2g}"
    )


def _scaled_norm(reading: Reading) -> float:
    if reading.scale is None or reading.scale < LEAST_SCALE or not reading.grad_norm:
        return 0.0
    return reading.grad_norm * reading.scale


def _clipped(case: Case) -> Proof | None:
    """The norm that was read before clipping, beside that of the gradients of the update."""
    before = {reading.step: reading.grad_norm for reading in case.recent}
    looks = [look for look in case.looks if before.get(look.step) and not look.left_out]
    looks = looks[-ENOUGH_LOOKS:]
    if len(looks) < ENOUGH_LOOKS:
        return None
    left = [_norm(look) / (before[look.step] or math.inf) for look in looks]
    if max(left) > NOTHING_LEFT or min(left) <= 0.0:
        return None
    return possible(
        f"clipping left {max(left):.1%} or less of the gradient at each of the last {len(looks)} "
        f"looks: its norm was {before[looks[-1].step]:.3g} at step {looks[-1].step} and "
        f"{_norm(looks[-1]):.3g} after clipping"
    )


def _norm(look: Look) -> float:
    squares = 0.0
    for one in look.parameters:
        if one.update is not None and one.gradient is not None:
            squares += one.gradient**2 * one.elements
    return math.sqrt(squares)


SG918 = Rule(code="SG918", recognise=recognise_sg918)


# --- SG919: units or outputs that are all alike.


SG919_ENOUGH_LOOKS = 3
LASTING, SG919_LONG = 6, 48
"""Looks and steps after which a model that gives one answer has collapsed."""
SG919_COLLAPSED = 1e-3
"""Deviation of the outputs between samples, beside their size and beside that of the beginning."""


def recognise_sg919(case: Case) -> Proof | None:
    looks = last_looks(case, SG919_ENOUGH_LOOKS)
    copies = in_all(looks, _copies)
    if copies:
        return certain(
            f"all units of {named(copies)} have the same weights and get the same gradients at "
            f"steps {looks[0].step} to {looks[-1].step}: they stay copies of one unit"
        )
    return _sg919_collapsed(case)


def _sg919_collapsed(case: Case) -> Proof | None:
    """Outputs that have stayed the same for all samples: for a while they may, on a plateau."""
    looks = last_looks(case, LASTING)
    first = case.looks[0].facts.spread if case.looks else None
    spreads = [look.facts.spread for look in looks]
    if not first or not spreads or any(spread is None for spread in spreads):
        return None
    if looks[-1].step - looks[0].step < SG919_LONG:
        return None
    most = max(spread or 0.0 for spread in spreads)
    if first < SG919_COLLAPSED or most > SG919_COLLAPSED * min(1.0, first):
        return None
    return possible(
        f"the outputs of different samples differ by {most:.1g} of their size at steps "
        f"{looks[0].step} to {looks[-1].step} ({first:.1g} at step {case.looks[0].step}): the "
        "model gives every sample the same answer"
    )


def _copies(look: Look) -> set[str]:
    return {one.name for one in look.parameters if one.copies and one.owned}


SG919 = Rule(code="SG919", recognise=recognise_sg919)


# --- SG920: weight decay that erases what is learned.


SG920_MOST = 0.1
"""Share of every weight that an update may take away."""
SG920_FEWEST = 4


def recognise_sg920(case: Case) -> Proof | None:
    if case.shrinks_by < SG920_MOST or len(case.recent) < SG920_FEWEST:
        return None
    return certain(
        f"learning rate times weight decay is {case.shrinks_by:.3g}: every update takes "
        f"{min(case.shrinks_by, 1.0):.0%} of every weight away, before anything is learned"
    )


SG920 = Rule(code="SG920", recognise=recognise_sg920)


# --- SG921: a classifier that knows how frequent the classes are, and nothing else.


SG921_ENOUGH_LOOKS = 8
SG921_LONG = 96
"""Steps after which something would have been learned."""
BELOW, ABOVE = 0.98, 1.03
"""Mean loss, beside the entropy, of a model that knows no more; one that is trained on noise is a
little above."""
LEAST_ENTROPY = 0.3
NEARLY_ALL = 0.9
FEWEST_TARGETS = 256
MOVED = 0.05
"""Of the size of all weights, that they must have moved by."""
LEARNED = 0.8
"""Loss, beside the entropy of the labels, below which something is learned from the inputs."""


def recognise_sg921(case: Case) -> Proof | None:
    looks = [look for look in case.looks if look.facts.classes]
    if len(looks) < SG921_ENOUGH_LOOKS:
        return None
    counts = [sum(column) for column in zip(*_of_one_size(looks), strict=True)]
    total = sum(counts)
    if total < FEWEST_TARGETS:
        return None
    return _answers_by_frequency(looks, counts)


def _answers_by_frequency(looks: list[Look], counts: list[int]) -> Proof | None:
    """Nearly all targets are one class, or the loss is that of their frequencies."""
    total = sum(counts)
    share = max(counts) / total
    entropy = -sum(count / total * math.log(count / total) for count in counts if count)
    late = [look.facts.cross_entropy for look in looks[len(looks) // 2 :]]
    losses = [loss for loss in late if loss is not None]
    learned = bool(losses) and fmean(losses) < LEARNED * entropy
    if share == 1.0 or looks[-1].step < SG921_LONG:
        return None  # contrastive losses put the right answer first, always
    if share >= NEARLY_ALL and not learned:
        return possible(
            f"{share:.0%} of the {total:,} targets seen at {len(looks)} looks are class "
            f"{counts.index(max(counts))} of {len(counts)}: a model that always answers so is "
            "right as often, and the loss is no lower than its"
        )
    # weights that have hardly moved cannot have learned anything yet
    if entropy < LEAST_ENTROPY or _distance(looks) < MOVED or not _stays_at(entropy, losses):
        return None
    return possible(
        f"the cross entropy is {fmean(losses):.4g} up to step {looks[-1].step}, and that of the "
        f"label frequencies alone is {entropy:.4g}: the inputs tell the model nothing about the "
        "labels"
    )


def _distance(looks: list[Look]) -> float:
    """How far all weights would have come with every update as large as at the looks."""
    shares = []
    for look in looks:
        rows = trained(look)
        size = sum(one.elements * one.weight**2 for one in rows)
        step = sum(one.elements * (one.update or 0.0) ** 2 for one in rows)
        shares.append(math.sqrt(step / size) if size else 0.0)
    return fmean(shares) * looks[-1].step


def _stays_at(entropy: float, losses: list[float]) -> bool:
    """A slow start that still falls is not the end."""
    half = len(losses) // 2
    if not half or not BELOW <= fmean(losses) / entropy <= ABOVE:
        return False
    return fmean(losses[half:]) >= BELOW * fmean(losses[:half])


def _of_one_size(looks: list[Look]) -> list[tuple[int, ...]]:
    size = len(looks[-1].facts.classes)
    return [look.facts.classes for look in looks if len(look.facts.classes) == size]


SG921 = Rule(code="SG921", recognise=recognise_sg921)
