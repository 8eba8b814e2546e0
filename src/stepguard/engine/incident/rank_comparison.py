"""Compare the ranks now and then: copies of one model have to hold the same weights, bit for bit.

One of the duties between two steps. All ranks of a guard come to it at the same step, or it ends
with a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from stepguard.detect.replicas import (
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
from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.context import Context, bare_step
from stepguard.engine.incident import incident_record
from stepguard.engine.incident.run_facts import run_facts
from stepguard.engine.recover.peer_healing import PeerHealing
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.decision import Action
from stepguard.sentinel.rank_agreement import RankFault
from stepguard.state.batch import named_tensors
from stepguard.state.fingerprint import checksums, combined, read_checksums
from stepguard.state.step import Step
from stepguard.tensors.names import parameter_names
from stepguard.tensors.sharding import shard_of

WHAT = "a comparison of the ranks"
TOLD_ONLY = "finite damage is told; nothing is changed"


class RankComparison:
    """Compares weights, learning rates and data of the ranks every so many steps."""

    def __init__(self, context: Context, healing: PeerHealing) -> None:
        self._context = context
        self._healing = healing
        self._every = context.config.compare_ranks_every
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
            context.gradient_hooks.append(self.before_update)
            context.step_hooks.append(self.committed)

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
        self._tell_data(same_batches(told), odd_samplers(told))

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
            "sampler": _sampler(self._context.feed),
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
        ignored = _left_to_each_rank(context.model)
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
        origin = _origin(self._context, found)
        decision = self._healed(weights, rates)
        self._record("replica_drift", "; ".join(sentences), said, origin, decision)

    def _healed(self, weights: Odd | None, rates: Odd | None) -> Decision | None:
        """Give a minority the weights of the majority, where that is allowed and stays so."""
        context = self._context
        policy = context.config.policy
        allowed = context.config.anomalies == "act" and "heal" in policy.actions
        if not allowed or context.budget.heals >= policy.max_heals or context.sharded:
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

    def _tell_data(self, same: tuple[int, ...], samplers: Odd | None) -> None:
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


def _origin(context: Context, odd: Odd) -> Origin | None:
    """Where the drift is: the one rank that differs, where it is one."""
    step = max(context.step - 1, 0)
    rank = odd.ranks[0] if odd.agree and len(odd.ranks) == 1 else None
    return Origin(step=step, phase="state", rank=rank, method="comparison of the ranks")


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


def _left_to_each_rank(model: Any) -> set[str]:
    """Parameters that DistributedDataParallel was told not to exchange."""
    return set(getattr(model, "parameters_to_ignore", ()))


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
