"""One decision on all ranks, and comparing copies of one model now and then.

One of the duties between two steps. All ranks of a guard come to it at the same step, or it ends
with a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.context import Context, bare_step
from stepguard.engine.incident import incident_record
from stepguard.engine.incident.closer_look import examine, presumed_reading
from stepguard.engine.incident.run_facts import run_facts
from stepguard.engine.protect import explain_or_warn, in_words, warn_not_explained
from stepguard.engine.recover.rank_weights import PeerHealing
from stepguard.judge.decide import MOST_HEALS
from stepguard.judge.replicas import (
    NO_GRADIENT,
    Odd,
    Part,
    RankDigest,
    odd_rates,
    odd_samplers,
    odd_weights,
    same_batches,
    shards_that_differ,
)
from stepguard.locate.find_origin import finite_step
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.records.incident import Action
from stepguard.sentinel.rank_agreement import RankAbsent, RankFault
from stepguard.state.batch import Step, named_tensors
from stepguard.state.isolation import gradients_came_back_finite, model_finite, rerun
from stepguard.state.sharded import (
    CollectiveInReplayError,
    checksums,
    combined,
    gathered,
    has_room,
    read_checksums,
    spreads_in_forward,
    why_not_gathered,
)
from stepguard.tensors.names import parameter_names, shard_of

# --- Replay a step of a sharded model: all ranks gather its parameters by one plan, or none does.


NO_ROOM = "there is no room for all parameters and their gradients on the rank that failed"


def agree_on_holders(context: Context, step: Step, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return which of these ranks are to hold all parameters; the same on every rank.

    None where the model is not sharded, cannot be gathered, or where nobody has room for it.
    """
    if not context.sharded:
        return ()
    roots = step.named_roots().values()

    def look() -> dict[str, Any]:
        return {"why": why_not_gathered(roots), "room": has_room(roots)}

    told = context.agreement.together(look, "the plan of a replay")
    for facts in told:
        if facts["why"]:
            step.not_gathered = facts["why"]
            return ()
    places = {rank: place for place, rank in enumerate(context.agreement.members)}
    holders = tuple(rank for rank in wanted if told[places[rank]]["room"])
    if not holders:
        step.not_gathered = NO_ROOM
    return holders


@contextmanager
def gathered_on(context: Context, step: Step, holders: Sequence[int]) -> Iterator[None]:
    """Enter on all ranks at once, as agreed: inside, the holders can run the step alone."""
    if not holders:
        yield
        return
    with gathered(step, hold=context.agreement.world_rank in holders):
        yield


# --- One decision on every rank, whatever fails on one of them.


T = TypeVar("T")

UNDECIDED = "stepguard could not decide by a fault of its own"
DISARMED = (
    "the state itself is damaged, and a fault of stepguard's own keeps it from being repaired"
)


def with_decision(
    context: Context,
    incident: Incident,
    choose: Callable[[], Decision],
    tell: Callable[[str], None],
) -> Incident:
    """Add what all ranks have chosen alike; where one could not choose, all skip the step."""
    before = context.budget
    decision = explain_or_warn(None, tell, tried, context, choose)
    if context.agreement.size == 1 or context.agreement.apart:
        return replace(incident, decision=decision or _undecided(context, incident))

    def own() -> dict[str, Any]:
        return {"chosen": decision and to_jsonable(decision), "id": incident.id}

    told = context.agreement.together(own, "the decision", whatever_failed=True)
    # a number is added where a folder of that name is there already: the same one on all ranks
    name = max((facts["id"] for facts in told), key=lambda one: (len(one), one))
    incident = replace(incident, id=name)
    chosen = [facts["chosen"] for facts in told]
    if decision is None or any(other != chosen[0] for other in chosen):
        context.budget = before
        decision = _undecided(context, incident)
    return replace(incident, decision=decision)


def tried(context: Context, look: Callable[[], T]) -> T:
    """Call what exchanges something with other ranks; a fault here keeps none of them waiting."""
    try:
        return look()
    except RankFault:
        # all ranks have it
        raise
    except Exception as fault:
        context.agreement.give_up(in_words(fault))
        raise


def _undecided(context: Context, incident: Incident) -> Decision:
    """Skip the step within the budget of lost steps; stop where that leaves damaged weights."""
    policy = context.config.policy
    context.budget = context.budget.spend().lose(1.0)
    why = context.budget.exceeded(policy)
    if damaged(incident.reading):
        why = why or "the state itself is damaged"
    return Decision(
        action="stop" if why else "skip",
        reason=f"{UNDECIDED}; {why}" if why else UNDECIDED,
        consecutive=context.budget.consecutive,
        total=context.budget.total,
    )


def last_resort(incident: Incident) -> Incident:
    """Nothing could be decided and the guard is disarmed: never train on with damaged weights."""
    if incident.decision is not None or not damaged(incident.reading):
        return incident
    return replace(incident, decision=Decision(action="stop", reason=DISARMED))


def damaged(reading: Reading) -> bool:
    """Is what the run holds bad, so that leaving a step out does not help?"""
    return bool(reading.missed) or (bool(reading.bad_state) and not reading.state_born)


# --- Agree on one reading among ranks: the one of the rank that is to blame.


EXCHANGED = 1
"""The gradients are bad, and may be another rank's."""
HERE = 2
"""The loss is bad, or a replay on this rank alone is."""
GIVEN = 3
"""An input is bad. A loss can be bad by what a pipeline or a gather brought."""
HELD = 4
"""A stored tensor is bad."""

MOST_NAMES = 16
"""Names of tensors of one kind that ranks tell each other."""
MOST_SAID = 200
"""Characters of an error that ranks tell each other."""

NO_RANK = (
    "the rank it came from is not known: no rank shows it again by itself, and the gradients were "
    "already exchanged"
)


def agreed_reading(
    context: Context, step: Step, reading: Reading, tell: Callable[[str], None]
) -> Reading:
    """Every rank takes its closer look, and all go on with the reading of the worst one.

    Each tells one number; only the worst one tells more. A rank whose look fails is judged by what
    its numbers prove, and `tell` gets a sentence.
    """
    agreement = context.agreement
    own = presumed_reading(context, reading)

    def look() -> dict[str, Any]:
        nonlocal own
        fault = ""
        try:
            own, trouble = _closer_look(context, step, reading)
        except Exception as error:
            # `own_trouble` without running anything.
            if own.bad_state:
                trouble = HELD
            elif _made_here(own):
                trouble = HERE
            else:
                trouble = 0 if own.grads_finite else EXCHANGED
            fault = in_words(error)[:MOST_SAID]
        context.memory.own_reading = own
        part = _own_part(own) if context.sharded else {}
        return {"trouble": trouble, "fault": fault, "needs_others": step.sharded, "part": part}

    told_by_rank = agreement.in_step(look, "the reading")
    for rank, told in zip(agreement.deciding, told_by_rank, strict=True):
        if told["fault"]:
            warn_not_explained(tell, f"rank {rank}: {told['fault']}")
    # all or none: what is decided must not depend on who tried a replay
    step.sharded = any(told["needs_others"] for told in told_by_rank)
    # Places of the ranks that made the bad value, the surest first.
    troubles = [told["trouble"] for told in told_by_rank]
    if context.sharded and max(troubles) == EXCHANGED:
        troubles = _troubles_before_exchange(context, step) or troubles
    spreads = context.sharded and spreads_in_forward(context.roots.values())
    bad = blamed_ranks(troubles, sharded=context.sharded, spreads=spreads)
    leader = agreement.deciding[bad[0] if bad else 0]
    worst = agreement.from_rank(leader, lambda: to_jsonable(_shortened(own)))
    agreed = from_jsonable(Reading, worst)
    if context.sharded:
        agreed = _with_bad_parts(agreed, [told["part"] for told in told_by_rank])
    return replace(agreed, bad_ranks=tuple(agreement.deciding[place] for place in bad))


def _own_part(reading: Reading) -> dict[str, Any]:
    """What this rank has seen in its part of the gradients, where that is bad."""
    if reading.grads_finite or reading.overflow:
        return {}
    short = _shortened(reading)
    # as text: strict JSON has no NaN
    return {"norm": str(reading.grad_norm), "names": list(short.bad_grads)}


def _shortened(reading: Reading) -> Reading:
    """With as many names as anybody reads: what ranks exchange is not to grow with the model."""
    return replace(
        reading,
        bad_state=reading.bad_state[:MOST_NAMES],
        bad_inputs=reading.bad_inputs[:MOST_NAMES],
        bad_grads=reading.bad_grads[:MOST_NAMES],
        unnamed_grads=len(reading.bad_grads[MOST_NAMES:]),
    )


def _closer_look(context: Context, step: Step, reading: Reading) -> tuple[Reading, int]:
    try:
        own = examine(context, step, reading)
        return own, own_trouble(step, own)
    except CollectiveInReplayError:
        # its tokens go to experts on other ranks, say: no rank can run it again by itself
        step.sharded = True
        own = examine(context, step, reading)
        return own, own_trouble(step, own)


def _with_bad_parts(agreed: Reading, parts: Sequence[dict[str, Any]]) -> Reading:
    """Add what others have seen in their parts of the gradients.

    The rank that made a bad gradient may hold a part of it in which all is finite.
    """
    bad = [part for part in parts if part]
    if not agreed.grads_finite or not bad:
        return agreed
    names: dict[str, None] = {}
    for part in bad:
        names.update(dict.fromkeys(part["names"]))
    norm = None if bad[0]["norm"] == "None" else float(bad[0]["norm"])
    return replace(agreed, grads_finite=False, grad_norm=norm, bad_grads=tuple(names))


def _troubles_before_exchange(context: Context, step: Step) -> list[int]:
    """Whose own gradients were bad: all ranks gather the model, then each runs the step alone.

    Empty where not all of them can hold it.
    """
    agreement = context.agreement
    holders = agree_on_holders(context, step, agreement.members)
    if len(holders) < agreement.size:
        return []

    def look() -> dict[str, Any]:
        with gathered_on(context, step, holders):
            clean = _finite_alone(step)
        if clean is None:
            return {"trouble": EXCHANGED}
        return {"trouble": 0 if clean else HERE}

    return [told["trouble"] for told in agreement.together(look, "the gradients of each rank")]


def blamed_ranks(
    troubles: Sequence[int], *, sharded: bool = False, spreads: bool = False
) -> list[int]:
    """The ranks that made the bad value, the surest first; empty where that is not known.

    `sharded`: a bad shard spoils the loss of every rank that gathers it, so only the surest count.
    `spreads`: so does a bad input, where ranks compute one batch together.
    """
    worst = max(troubles)
    if worst == EXCHANGED and (sharded or min(troubles) == worst):
        # averaged gradients are the same everywhere, and tell of no rank; of a sharded gradient the
        # rank whose part is bad need not be the one that made it so
        return []
    least = min(worst, HERE)
    if sharded and (worst == HELD or spreads):
        least = worst
    least = max(least, EXCHANGED)
    bad = [rank for rank, trouble in enumerate(troubles) if trouble >= least]
    return sorted(bad, key=lambda rank: -troubles[rank])


def own_trouble(step: Step, reading: Reading) -> int:
    """How surely this rank made the bad value: in what it holds, by itself, by exchange, not."""
    if reading.missed:
        return HELD
    if reading.bad_state and not reading.state_born:
        # a bad shard spoils the loss of every rank that gathers it, so it outranks a bad loss
        return HELD
    if reading.bad_inputs:
        return GIVEN
    if _made_here(reading):
        return HERE
    if reading.grads_finite or reading.overflow:
        return 0
    clean = _finite_alone(step)
    if clean is None:
        return EXCHANGED
    return 0 if clean else HERE


def _finite_alone(step: Step) -> bool | None:
    """Are this rank's own gradients finite? None if no replay can tell.

    DDP has averaged the gradients already, so only a replay tells whose they were.
    """
    if step.replayable:
        return rerun(step).grads_finite
    if step.model_only:
        return gradients_came_back_finite(step) and model_finite(step)
    return None


def with_rank(origin: Origin, rank: int | None) -> Origin:
    """Name the rank of an origin; where no rank is known, say so."""
    if rank is not None:
        return replace(origin, rank=rank)
    return replace(origin, rank=None, remarks=(*origin.remarks, NO_RANK))


def _made_here(reading: Reading) -> bool:
    if reading.bad_micro_batches or reading.bad_state:
        return True
    return not all(map(math.isfinite, reading.lr))


# --- Find the origin of a bad step with several ranks: each that is to blame looks, then all
# know.


MOST_FINDERS = 8
"""Ranks that look for a cause of their own; more of them say something about all."""

Find = Callable[[Step, Reading], Origin]


def find_together(
    context: Context,
    find: Find,
    step: Step,
    reading: Reading,
    not_explained: Callable[[str], None],
) -> Origin | None:
    """Return the origin on the first rank to blame; what others found is told in its remarks.

    A rank replays alone, which holds no collective. A fault in it costs the origin on all ranks.
    """
    agreement = context.agreement
    if agreement.size == 1:
        return find(step, reading)
    if agreement.apart and not reading.bad_ranks:
        # another rank's doing, and that one tells of it: nothing would be found here
        return None
    finders = reading.bad_ranks[:MOST_FINDERS] or agreement.deciding[:1]

    def look() -> dict[str, Any]:
        # first of all, before anything can fail: the other ranks are entering it too
        with gathered_on(context, step, holders):
            # what this rank finds; nothing where it is not to blame
            rank = context.agreement.world_rank
            if rank not in finders:
                return {}
            known = rank if reading.bad_ranks else None
            own = _own_reading(context, reading, leads=rank == finders[0])
            return to_jsonable(with_rank(_found(find, step, own), known))

    try:
        holders: tuple[int, ...] = ()
        if _asks_for_replay(reading) and not agreement.apart:
            holders = agree_on_holders(context, step, finders)
        told = agreement.in_step(look, "the origin")
    except RankAbsent:
        raise
    except RankFault as fault:
        # told to all ranks alike
        not_explained(f"a bad step is not located: {fault}")
        return None
    # what the first rank to blame has found, with what the others say
    places = [agreement.deciding.index(finder) for finder in finders]
    found = [from_jsonable(Origin, told[place]) for place in places if told[place]]
    if not found:
        return None
    origin = found[0]
    others = found[1:]
    words = tuple(_in_words(other) for other in others)
    return replace(origin, remarks=(*origin.remarks, *words))


def _found(find: Find, step: Step, reading: Reading) -> Origin:
    """Find the origin; without a replay where that would need the other ranks."""
    try:
        return find(step, reading)
    except CollectiveInReplayError:
        return find(replace(step, sharded=True), reading)


def _asks_for_replay(reading: Reading) -> bool:
    """Can running the model again tell something? Not of what an optimizer made or keeps."""
    if reading.state_born:
        return reading.bad_state[0].startswith("buffer:")
    if not finite_step(reading):
        return True
    return bool(reading.bad_state) and not reading.bad_state[0].startswith("opt:")


def _own_reading(context: Context, agreed: Reading, *, leads: bool) -> Reading:
    """The reading of the first rank to blame is the agreed one; another has seen its own."""
    own = context.memory.own_reading
    if leads or own is None or own.step != agreed.step:
        return agreed
    # of a sharded gradient this rank's part may be finite though it made the bad one
    finite = own.grads_finite and agreed.grads_finite
    return replace(own, bad_ranks=agreed.bad_ranks, grads_finite=finite)


def _in_words(origin: Origin) -> str:
    """`rank 1 as well: batch:x, sample 2`."""
    what = origin.tensor or origin.op or origin.phase
    said = f"rank {origin.rank} as well: {what}"
    if origin.module:
        said += f" in {origin.module}"
    if origin.samples:
        count = "samples" if len(origin.samples) > 1 else "sample"
        said += f", {count} {', '.join(map(str, origin.samples))}"
    return said


# --- Compare the ranks now and then: copies of one model have to hold the same weights, bit for
# bit.


WHAT = "a comparison of the ranks"
TOLD_ONLY = "finite damage is told; nothing is changed"


class RankComparison:
    """Compares weights, learning rates and data of the ranks every so many steps."""

    def __init__(self, context: Context, healing: PeerHealing) -> None:
        self._context = context
        self._healing = healing
        self._every = context.config.ranks.compare_every
        if context.agreement.size == 1:
            self._every = None
        self._seen = -1
        """The last step before which ranks were compared."""
        self._committed = -1
        self._gradients: list[Tensor | None] = []
        """On the device: numbers of the last step's gradients, in the order of the parameters."""
        self._batch: list[Tensor | None] = []
        self._batch_before: int | None = None
        self._told: set[str] = set()
        """What has been told and has not been fine since."""
        self._fault: Exception | None = None
        if self._every is not None:
            context.hooks.gradients.append(self.before_update)
            context.hooks.committed.append(self.committed)

    # --- while a step runs

    def before_update(self) -> None:
        """Remember the gradients of a step after which ranks are compared. Waits for nothing."""
        if not self._due_after(self._context.step):
            return
        try:
            self._gradients = checksums([p.grad for p in self._context.parameters])
        except Exception as fault:
            # told where all ranks are, so that none waits for this one
            self._fault = fault

    def committed(self, step: Step) -> None:
        """Remember the batch of such a step. Waits for nothing."""
        if not self._due_after(step.index):
            return
        self._committed = step.index
        self._batch = checksums(tensor for _, tensor in named_tensors(list(step.micro_batches)))

    def _due_after(self, step: int) -> bool:
        if self._every is None:
            return False
        # early once, since a wrong seed, rate or sampler is there from the beginning
        return step == 0 or (step + 1) % self._every == 0

    # --- between two steps

    def due(self) -> bool:
        """Is it time to compare?"""
        step = self._context.step
        return step != self._seen and step > 0 and self._due_after(step - 1)

    def do(self) -> None:
        """Compare with the other ranks; where not all of them come, never again."""
        self._seen = self._context.step
        try:
            self._compare()
        except RankFault as fault:
            self._every = None
            self._context.outputs.note(
                "ranks", f"the ranks are no longer compared: {str(fault).removesuffix('.')}"
            )

    def _compare(self) -> None:
        agreement = self._context.agreement
        facts = agreement.together(self._own_facts, WHAT)
        if not all(told["committed"] for told in facts):
            # gradients of a step that was dropped say nothing
            return
        told = [_digest(each) for each in facts]
        weights: Odd | None = None
        shards = shards_that_differ(told)
        if shards:
            weights = self._by_parameter(shards)
        self._tell_drift(weights, odd_rates(told))
        same = same_batches(told)
        samplers = odd_samplers(told)
        if not same and samplers is None:
            self._told.discard("data")
            return
        if "data" in self._told:
            return
        self._told.add("data")
        said: dict[str, float | int | str] = {}
        if same:
            said["ranks"] = _ranks(same)
            summary = (
                f"{_named(same)} read the same batch at this step and at the comparison before"
            )
        else:
            assert samplers is not None
            said["ranks"] = _ranks(samplers.ranks)
            summary = f"the samplers of the ranks divide the data differently ({samplers.what})"
        if samplers is not None:
            said["samplers"] = samplers.what
        self._record("same_data", summary, said)

    def _own_facts(self) -> dict[str, Any]:
        if self._fault is not None:
            raise self._fault
        weights: dict[str, int] = {}
        gradients: dict[str, int] = {}
        for shard, part in self._parts().items():
            weights[shard] = combined(number for number, _ in part.values())
            gradients[shard] = combined(number for _, number in part.values())
        batch = combined(read_checksums(self._batch)) or None
        before = self._batch_before
        self._batch_before = batch
        return {
            "rank": self._context.agreement.world_rank,
            "committed": self._committed == self._context.step - 1,
            "weights": weights,
            "gradients": gradients,
            "rates": self._context.lr,
            "sharded": self._context.sharded,
            "batch": batch,
            "batch_before": before,
            "sampler": _sampler(self._context.data.feed),
        }

    def _parts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Numbers of values and gradient of each parameter, by the part of the model it is."""
        context = self._context
        names = {id(p): name for p, name in parameter_names(context.roots, context.optimizer)}
        parameters = context.parameters
        values = read_checksums(checksums(parameters))
        gradients = read_checksums(self._gradients)
        if len(gradients) != len(values):
            # parameters were added since
            gradients = [NO_GRADIENT] * len(values)
        ignored = set(getattr(context.model, "parameters_to_ignore", ()))
        parts: dict[str, dict[str, tuple[int, int]]] = {}
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            name = names[id(parameter)]
            if name not in ignored:
                parts.setdefault(shard_of(parameter), {})[name] = (value, gradient)
        # a stage of a pipeline is the same only as the same stage
        return {f"{shard} {combined(map(_number, part))}": part for shard, part in parts.items()}

    def _by_parameter(self, shards: set[str]) -> Odd | None:
        """Ask all ranks for every parameter of the shards that differ, and say which does."""
        agreement = self._context.agreement

        def own() -> dict[str, Any]:
            return {"parts": {s: part for s, part in self._parts().items() if s in shards}}

        asked = agreement.together(own, WHAT)
        parts: dict[int, dict[str, Part]] = {}
        for rank, each in zip(agreement.members, asked, strict=True):
            parts[rank] = each["parts"]
        drifted, own_name = odd_weights(parts)
        if own_name and not self._context.sharded and "own" not in self._told:
            self._told.add("own")
            self._context.outputs.note(
                "ranks",
                f"the ranks have gradients of their own, first of {own_name}: such weights are no "
                "copies of each other and are not compared",
            )
        return drifted

    # --- what is told

    def _tell_drift(self, weights: Odd | None, rates: Odd | None) -> None:
        found = weights or rates
        if found is None:
            self._told.discard("drift")
            return
        if "drift" in self._told:
            return
        self._told.add("drift")
        said: dict[str, float | int | str] = {"ranks": _ranks(found.ranks)}
        if found.agree:
            said["agree"] = _ranks(found.agree)
        sentences = []
        if weights is not None:
            said["parameters"] = weights.count
            said["tensor"] = f"param:{weights.what}"
            sentences.append(_weights_differ(weights))
        if rates is not None:
            said["rates"] = rates.what
            sentences.append(f"the learning rates differ ({rates.what})")
        # where the drift is: the one rank that differs, where it is one
        step = max(self._context.step - 1, 0)
        rank = found.ranks[0] if found.agree and len(found.ranks) == 1 else None
        origin = Origin(step=step, phase="state", rank=rank, method="comparison of the ranks")
        decision = self._healed(weights, rates)
        self._record("replica_drift", "; ".join(sentences), said, origin, decision)

    def _healed(self, weights: Odd | None, rates: Odd | None) -> Decision | None:
        """Give a minority the weights of the majority, where that is allowed and stays so."""
        context = self._context
        policy = context.config.policy
        allowed = context.config.probes.anomalies == "act" and "heal" in policy.actions
        if not allowed or context.budget.heals >= MOST_HEALS or context.sharded:
            return None
        # another learning rate would drive them apart again
        if weights is None or not weights.agree or rates is not None:
            return None
        self._healing.copy_everything(weights.agree[0])
        context.budget = replace(context.budget, heals=context.budget.heals + 1)
        self._told.discard("drift")
        return self._decision("heal", f"by rank {weights.agree[0]}, one of the majority")

    def _decision(self, action: Action, reason: str) -> Decision:
        budget = self._context.budget
        return Decision(
            action=action, reason=reason, consecutive=budget.consecutive, total=budget.total
        )

    def _record(
        self,
        kind: Any,
        summary: str,
        said: dict[str, float | int | str],
        origin: Origin | None = None,
        decision: Decision | None = None,
    ) -> None:
        context = self._context
        step = bare_step(context)
        verdict = Verdict(kind=kind, severity="incident", summary=summary, evidence=said)
        reading = Reading(step=step.index, lr=context.lr, schedule=context.schedule)
        run_dir = context.config.run_dir
        incident = Incident(
            id=incident_record.free_id(context, f"{step.index:08d}-{kind}"),
            step=step.index,
            verdict=verdict,
            reading=reading,
            origin=origin,
            decision=decision or self._decision("note", TOLD_ONLY),
            run=str(run_dir) if run_dir is not None else None,
            rank=context.agreement.world_rank,
        )
        findings = find_causes(incident, run_facts(context, reading))
        incident_record.record(context, replace(incident, findings=findings), step)


def _digest(facts: dict[str, Any]) -> RankDigest:
    fields = {name: value for name, value in facts.items() if name != "committed"}
    return RankDigest(**{**fields, "rates": tuple(facts["rates"])})


def _weights_differ(odd: Odd) -> str:
    what = f"param:{odd.what}"
    if odd.count > 1:
        what += f" and {odd.count - 1} more parameters"
    if odd.agree:
        verb = "holds" if len(odd.ranks) == 1 else "hold"
        return f"{_named(odd.ranks)} {verb} other weights than {_named(odd.agree)}: {what}"
    return (
        f"{_named(odd.ranks)} no longer hold the same weights, so one of them has drifted: {what}"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranks(ranks)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        return f"{shown} and {len(ranks) - 8} more"
    return shown


def _number(name: str) -> int:
    return int.from_bytes(name.encode(), "big")


def _sampler(feed: Any) -> str:
    """Seed, epoch and number of replicas of a sampler that divides the data among ranks."""
    batches = getattr(feed, "batch_sampler", None)
    for sampler in (getattr(feed, "sampler", None), getattr(batches, "sampler", None)):
        replicas = getattr(sampler, "num_replicas", None)
        seed = getattr(sampler, "seed", None)
        if replicas is not None and seed is not None:
            epoch = getattr(sampler, "epoch", None)
            return f"seed {seed}, epoch {epoch}, {replicas} replicas"
    return ""
