"""Make every rank see the same step. Three ways, chosen once:

alone       one process.
spread      DistributedDataParallel: its own gradient reduction carries a NaN to every rank, so no
            collective is added. What only one rank can see (its loss, its norm statistics) is put
            into a gradient before the reduction.
collective  anything else: one small MAX reduction a step.

Ranks are those of the wrapper's own process group. Everything beyond the reduction is exchanged
only after all ranks have met in the store of the process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard._errors import ConfigError
from stepguard.tensors.names import is_distributed, wrapped_by_fsdp1
from stepguard.tensors.torch_private import default_store, fsdp1_group, root_mesh
from stepguard.tensors.values import is_finite

# --- Ranks meet before they exchange anything: all of them enter a collective, or none does.


GO = "go"
MOST_ASKED = 64
"""Ranks up to which each asks the store before every reduction; one process answers them all."""
REMEMBERED = 4096
"""Meetings whose names are remembered, so that one after a rewind gets another name."""
SHORTEST, LONGEST = 0.0005, 0.25
"""Seconds between two looks of a waiting rank; the longer it waits, the rarer it looks."""


class RankFault(RuntimeError):  # noqa: N818 (a fault of the guard, told to the other ranks)
    """The guard failed on one rank, so no rank can continue to guard."""


class RankAbsent(RankFault):
    """Not all ranks came to an exchange, so none entered it."""


class Meeting:
    """Where the ranks of one guard meet. `name` is the same on all of them."""

    def __init__(self, name: str, members: Sequence[int], own: int, seconds: float) -> None:
        """`members` are the ranks as the user counts them, `own` is the one of this process."""
        self._name = name
        self._members = tuple(members)
        self._own = own
        self._seconds = seconds
        self._times: Counter[tuple[str, int]] = Counter()
        self.began = False
        """This rank has begun its first step."""
        self._over: list[str] = []
        """Keys of the last meeting, which every rank has read once all are at the next one."""
        self.solo = False
        """The other ranks have no such guard: nothing of it is left in the store."""

    def all_came(self, what: str, step: int, patience: float = 1.0) -> None:
        """Return when every rank is here; raise RankAbsent on all ranks if one is not in time."""
        place = f"{self._name}/{self.arrive(what, step)}"
        store = default_store()
        word = f"{place}/word"
        store.set(f"{place}/{self._own}", "here")
        if store.add(f"{place}/count", 1) == len(self._members):
            store.compare_set(word, "", GO)
        seconds = self._seconds * patience
        ended = [f"{self._name}/left"]
        if not self.began:
            ended.append(f"{self._name}/began")
        self._wait(store, word, ended, time.monotonic() + seconds)
        if not store.check([word]):
            store.compare_set(word, "", self._missing(store, place, ended, seconds))
        said = store.get(word).decode()
        if said != GO:
            raise RankAbsent(f"{said} for {what} of step {step}")
        # everybody is here: what was said before has been read
        store.delete_key(f"{place}/{self._own}")
        if self._own == self._members[0]:
            for key in self._over:
                store.delete_key(key)
            self._over = [f"{place}/word", f"{place}/count"]

    def arrive(self, what: str, step: int) -> str:
        """Count that this rank comes to a meeting; returns its name, the same on all ranks."""
        # Named by step, so that a call that only one rank made does not shift all that follow.
        self._times[what, step] += 1
        if len(self._times) > REMEMBERED:
            del self._times[next(iter(self._times))]
        return f"{what}/{step}/{self._times[what, step]}"

    def times(self, what: str, step: int) -> int:
        """How often this rank has come to a meeting of this name in this step."""
        return self._times[what, step]

    def call_off(self, what: str, step: int, time: int, why: str) -> None:
        """This rank cannot come to that meeting: those who wait there go at once."""
        self._times[what, step] = time
        with contextlib.suppress(Exception):
            word = f"{self._name}/{what}/{step}/{time}/word"
            default_store().compare_set(word, "", f"rank {self._own} has failed ({why})")

    def leave(self, why: str, *, for_good: bool = False) -> None:
        """Let nobody wait for this rank. `for_good`: it takes part in no reduction any more."""
        if self.solo:
            return
        # The group, or the process that holds the store, may be gone: then nobody waits.
        with contextlib.suppress(Exception):
            store = default_store()
            store.set(f"{self._name}/left", f"rank {self._own} {why}, so it did not arrive")
            if for_good:
                store.set(f"{self._name}/closed", str(self._own))

    def begin(self) -> None:
        """A rank that has not begun its first step waits in vain for one that has."""
        self.began = True
        self.tell("began", f"rank {self._own} has begun to train, so it did not arrive")

    def tell(self, about: str, text: str) -> None:
        """Leave a word for all ranks; nobody waits for it. The empty text takes it back."""
        with contextlib.suppress(Exception):
            store = default_store()
            if text:
                store.set(f"{self._name}/{about}", text)
            else:
                store.delete_key(f"{self._name}/{about}")

    def word_of(self, about: str, seconds: float) -> str:
        """What a rank leaves about this, for which it may take its time; empty if nothing."""
        with contextlib.suppress(Exception):
            store = default_store()
            key = f"{self._name}/{about}"
            self._wait(store, key, [], time.monotonic() + seconds)
            if store.check([key]):
                word: str = store.get(key).decode()
                return word.strip()
        return ""

    def nobody_came(self, what: str, step: int) -> None:
        """Leave nothing behind where the other ranks have no such guard, as it seems."""
        store = default_store()
        place = f"{self._name}/{what}/{step}/{self._times[what, step]}"
        if store.check([f"{self._name}/left"]) or int(store.add(f"{place}/count", 0)) > 1:
            return
        self.solo = True
        for key in (str(self._own), "count", "word"):
            store.delete_key(f"{place}/{key}")

    @property
    def left(self) -> bool:
        """Has a rank said that it comes to no meeting any more?"""
        return bool(default_store().check([f"{self._name}/left"]))

    def refuse_if_closed(self, step: int) -> None:
        """Raise RankAbsent if a rank has closed its guard: one question to the store."""
        if len(self._members) > MOST_ASKED:
            return
        store = default_store()
        if store.check([f"{self._name}/closed"]):
            rank = store.get(f"{self._name}/closed").decode()
            raise RankAbsent(f"rank {rank} has closed its guard before step {step}")

    def _wait(self, store: Any, word: str, ended: list[str], deadline: float) -> None:
        """Until something is said, one of the keys `ended` is there, or time is up.

        Not by `store.wait`: a signal is handled only when that returns, and torch prints two lines
        when its time is up.
        """
        pause = SHORTEST
        while not store.check([word]):
            if time.monotonic() >= deadline or any(store.check([key]) for key in ended):
                return
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST)

    def _missing(self, store: Any, place: str, ended: list[str], seconds: float) -> str:
        for key in ended:
            if store.check([key]):
                said: str = store.get(key).decode()
                return said
        missing = [str(rank) for rank in self._members if not store.check([f"{place}/{rank}"])]
        ranks = "rank" if len(missing) == 1 else "ranks"
        return f"{ranks} {', '.join(missing)} did not arrive within {seconds:g} s"


# --- Ranks that do not make every step together cannot decide about one together.


LOCAL_STEP = (
    "a step of DistributedDataParallel reduced no gradients (no_sync, local SGD): its "
    "ranks step independently, which a guard cannot judge collectively; reduce the "
    "gradients of every step, or train without a guard."
)


def refuse_uneven_ranks(model: DistributedDataParallel) -> None:
    """Refuse wrappers under which ranks make steps of their own, or stop before the others."""
    if any(hasattr(state, "start_localSGD_iter") for _, state in model._comm_hooks):
        raise ConfigError(
            "the communication hook post_localSGD_hook lets ranks step independently, "
            "which a guard cannot judge collectively; use DistributedDataParallel without "
            "it."
        )
    if model._join_config.enable:
        raise ConfigError(
            "torch's Join lets a rank run out of data before the others, so the ranks "
            "cannot decide about a step collectively; give every rank the same number of "
            "batches (DistributedSampler(drop_last=True)) and drop the Join."
        )


# --- The ranks that share one model, as its wrapper tells: those of its process group or its
# mesh.


class RankGroup(NamedTuple):
    """Some of the ranks of this run."""

    members: tuple[int, ...]
    """World ranks."""
    group: Any
    """Their process group; None where there is none yet."""


def ranks_of(model: nn.Module) -> RankGroup | None:
    """Return the ranks that share this model; None if these are all, or if nothing tells."""
    found = _of_wrapper(model)
    if found is None or set(found.members) == set(range(dist.get_world_size())):
        return None
    return found


def _of_wrapper(model: Any) -> RankGroup | None:
    if isinstance(model, DistributedDataParallel):
        return _of_group(model.process_group)
    group = fsdp1_group(model) if wrapped_by_fsdp1(model) else None
    if group is not None:
        return _of_group(group)
    for parameter in model.parameters():
        if is_distributed(parameter):
            # a mesh may be cut out of a larger one, whose other ranks hold other stages
            whole = root_mesh(parameter.device_mesh)
            members = tuple(int(rank) for rank in whole.mesh.flatten())
            group = whole.get_group() if whole.ndim == 1 else None
            return RankGroup(members, group)
    return None


def _of_group(group: Any) -> RankGroup:
    return RankGroup(tuple(dist.get_process_group_ranks(group)), group)


# --- Make every rank see the same step. Three ways, chosen once:


__all__ = ["Agreement", "RankAbsent", "RankFault", "world"]

T = TypeVar("T")
Mode = Literal["alone", "spread", "collective"]
CARRIERS = 3
"""Parameters that carry a rank's own trouble into the reduction; one may get no gradient."""
REDUCED = 4
"""Numbers a rank contributes to the reduction of a step."""
RISK = 3
"""Which of the reduced numbers tells that an update may make NaN by itself on some rank."""
AGREE_TIMEOUT = 60.0
"""Seconds that a rank waits for the others."""
PATIENCE = 10.0
"""Times `agree_timeout`, for the first reduction and for the disk of another rank."""
ASKED = 30.0
"""Seconds, `agree_timeout` at most, that ranks wait for each other in a call of the user's own: one
that has not come by then was not asked to.
"""
ASKED_IN_LOCK_STEP = 5.0
"""Seconds that the first rank waits where all ranks train in lock step: if the others were asked,
they come within milliseconds. They may wait longer for it, which evaluates, or logs.
"""
_numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""The next guard's number. Guards of one kind and the same ranks are built in the same order on
each, but for those that never meet the others: these give their number back.
"""


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Agreement:
    """Lets the ranks of one guard come to the same reading."""

    def __init__(self, model: nn.Module, seconds: float = AGREE_TIMEOUT) -> None:
        """`seconds` is how long a rank waits for the others."""
        self.world_rank, self.size = world()
        self.rank = self.world_rank
        """Position among the ranks that decide together; the first one writes."""
        self.members = tuple(range(self.size))
        """World ranks of this guard's group."""
        self._group: Any = None
        """None stands for all ranks: a reference would keep torch's group alive past its end."""
        self._needs_group = False
        """These ranks have no group yet; it is made when all of them have met."""
        ranks = ranks_of(model) if self.size > 1 else None
        if ranks is not None and self.world_rank in ranks.members:
            self.members = ranks.members
            self.rank = self.members.index(self.world_rank)
            self.size = len(self.members)
            self._group = ranks.group
            self._needs_group = ranks.group is None
        self.mode: Mode = "alone"
        if self.size > 1:
            self.mode = "spread" if isinstance(model, DistributedDataParallel) else "collective"
        self.now: Callable[[], int] = lambda: 0
        """The step at hand."""
        self.adds = False
        """Ranks hold parts of one gradient: the reduction adds instead of taking the largest."""
        self._reduced = -1
        self._shared: Tensor | None = None
        """The last reduction, equal on all ranks."""
        self._kind = (f"{self.mode}{_signature(model)}", self.members)
        self._number = _numbers[self._kind]
        _numbers[self._kind] += 1
        # torchrun keeps its store when it starts the ranks again, with all that was said before
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        span = hashlib.blake2b(repr(self.members).encode(), digest_size=4).hexdigest()
        self.name = f"stepguard/{attempt}/{self._kind[0]}/{span}/{self._number}"
        """Key of this guard, equal on all its ranks and unique to it."""
        self._seconds = seconds
        self._meeting = Meeting(self.name, self.members, self.world_rank, seconds)
        self._met: bool | None = None
        """Do all ranks take part in the reductions? None before the first one."""
        self._reduces: bool | None = None
        """Did a backward pass of this step reduce gradients over all ranks? None before any."""
        self._model: weakref.ref[DistributedDataParallel] | None = None
        if self.mode == "spread" and isinstance(model, DistributedDataParallel):
            refuse_uneven_ranks(model)
            self._model = weakref.ref(model)
        self._cell: Tensor | None = None
        self._hooks = self._carry(model) if self.mode == "spread" else []

    def announce(self, local: Sequence[Tensor]) -> None:
        """Before backward: let a non-finite value of this rank reach the others by gradients."""
        model = self._model() if self._model is not None else None
        if model is not None:
            refuse_uneven_ranks(model)
            # not where its forward ran under `no_sync`
            self._reduces = bool(self._reduces) or model.require_forward_param_sync
        if self._cell is None or not local:
            return
        total = torch.stack([v.detach().reshape(()).to(self._cell) for v in local]).sum()
        # 0 * x + 1 keeps NaN (0 * inf is NaN, too) and is exactly 1 otherwise.
        self._cell.copy_(total * 0.0 + 1.0)

    def announced(self) -> None:
        """After backward: the gradients carry it, a later backward must not carry it again."""
        self._meeting.began = True
        if self._cell is not None:
            self._cell.fill_(1.0)
        local = self._reduces is False
        self._reduces = None
        if local:
            raise ConfigError(LOCAL_STEP)

    @torch.no_grad()
    def reduce(
        self,
        values: Tensor,
        step: int,
        risk: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor | None:
        """Return largest finite values and non-finite flags over all ranks; None if not needed.

        Of the last value only the flag is of use; in the place of its number travels `risk`.
        Where the ranks add, `sums` are the numbers, and the flags are counts.
        """
        if self.mode != "collective":
            return None
        self._enter(step)
        self._reduced = step
        flags = (~torch.isfinite(values)).to(values.dtype)
        given = values if sums is None else sums
        numbers = torch.nan_to_num(given, nan=0.0, posinf=0.0, neginf=0.0)
        numbers[RISK] = 0.0 if risk is None else risk
        # Not every backend has MAX for float64; float32 is enough for flags and to compare losses.
        # Squares need its range.
        dtype = torch.float64 if self.adds else torch.float32
        operation = dist.ReduceOp.SUM if self.adds else dist.ReduceOp.MAX
        both = torch.cat([numbers.to(dtype), flags.to(dtype)])
        dist.all_reduce(both, op=operation, group=self._group)
        self._shared = both
        return both

    def _enter(self, step: int) -> None:
        """Raise RankAbsent instead of entering a reduction that not all ranks will join."""
        met = self._met
        self._met = False
        if met is None:
            # A rank without a guard would never come.
            try:
                self._meeting.all_came("the first reduction", step, PATIENCE)
            except RankAbsent:
                self._meeting.nobody_came("the first reduction", step)
                raise
            if self._needs_group:
                # only these ranks make it, and all of them are here
                self._group = dist.new_group(list(self.members), use_local_synchronization=True)
                self._needs_group = False
        elif met:
            # One that has closed its guard did so before its part of these gradients was made.
            self._meeting.refuse_if_closed(step)
        else:
            raise RankAbsent(f"not all ranks take part in the reduction of step {step}")
        self._met = True

    def together(
        self, look: Callable[[], dict[str, Any]], what: str, *, seconds: float = math.inf
    ) -> list[dict[str, Any]]:
        """Return what every rank found, by rank; RankAbsent where not all of them ask.

        A rank whose `look` fails still takes part, so that no rank waits for it; then all raise.
        `what` names the exchange in words. `seconds`: how long to wait for the others, at most
        `Ranks.timeout`.
        """
        if self.size == 1:
            return [look()]
        # Before the look, which may take long on one rank: once all are here, all will answer.
        self._meet(what, seconds)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, _answer(look), group=self._group)
        for rank, (why, _) in zip(self.members, gathered, strict=True):
            if why:
                raise RankFault(f"rank {rank}: {why}")
        return [facts for _, facts in gathered]

    def _meet(self, what: str, seconds: float = math.inf) -> None:
        """Come to the meeting; a rank that cannot calls it off, so that the others do not wait."""
        times = self._meeting.times(what, self.now())
        try:
            self._meeting.all_came(what, self.now(), min(1.0, seconds / self._seconds))
        except RankFault:
            raise
        except Exception as fault:
            self._meeting.call_off(what, self.now(), times + 1, str(fault))
            raise RankFault(f"rank {self.world_rank}: {fault}") from fault

    def any_rank(self, flag: bool, device: torch.device) -> bool:
        """Is it so on any rank? One reduction of one number, which all ranks are known to join."""
        both = torch.tensor([float(flag)], device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        return bool(both.item())

    def from_first(self, look: Callable[[], T]) -> T:
        """Return on all ranks what the first one finds; where its `look` fails, all raise.

        The ranks come from an exchange, and nothing is between.
        """
        if self.size == 1:
            return look()
        told: list[Any] = [_answer(look) if self.rank == 0 else None]
        dist.broadcast_object_list(told, src=self.members[0], group=self._group)
        why, answer = told[0]
        if why:
            raise RankFault(f"rank {self.members[0]}: {why}")
        found: T = answer
        return found

    def begin(self) -> None:
        """This rank begins its first step: nobody waits for it before the training any more."""
        self._meeting.begin()

    def tell(self, about: str, text: str) -> None:
        """Leave a word for all ranks, for which nobody waits; the empty text takes it back."""
        self._meeting.tell(about, text)

    def word_of(self, about: str, seconds: float) -> str:
        """What a rank leaves about this, for which it may take its time; empty if nothing."""
        return self._meeting.word_of(about, seconds)

    def all_here(self, what: str, seconds: float = math.inf) -> bool:
        """Do all ranks ask this now, or within this many seconds?"""
        if self.size == 1:
            return True
        try:
            self._meet(what, seconds)
        except RankAbsent:
            return False
        return True

    @property
    def somebody_left(self) -> bool:
        """Has a rank said that it comes to no meeting any more?"""
        return self._meeting.left

    def broadcast(self, tensor: Tensor, source: int, group: Any = None) -> None:
        """Overwrite a tensor by that of rank `source`; only after all ranks have met for it."""
        dist.broadcast(tensor, src=source, group=self._group if group is None else group)

    def leave(self) -> None:
        """Let the other ranks know that this one is disarmed, so that they do not wait for it."""
        self._remove_hooks()
        if self.size > 1:
            self._meeting.leave("has disarmed itself")

    def stay(self, step: int, parameters: Sequence[Tensor]) -> bool:
        """Take part in a step as a disarmed rank. True if no rank may update.

        The other ranks refuse such a step; a rank that took it would have other weights from then
        on, with NaN in them.
        """
        if self.mode == "alone":
            return False
        bad = not all(p.grad is None or is_finite(p.grad) for p in parameters)
        if self.mode == "spread" or self._met is False:
            # Reduced already: every rank has the same gradients. Or there is nobody to ask.
            return bad
        # After a rewind the last reduced step may be a later one.
        if self._reduced != step:
            own = torch.nan if bad else 0.0
            self.reduce(torch.full((REDUCED,), own, device=parameters[0].device), step)
        return self._shared is not None and bool(self._shared[REDUCED:].any())

    def close(self) -> None:
        """Remove the hooks from the model's parameters, and let no rank wait for this one."""
        self._remove_hooks()
        unused = self._meeting.solo or (self.mode == "collective" and self._met is None)
        if self.size > 1 and not unused:
            self._meeting.leave("has closed its guard", for_good=True)
        if unused and _numbers[self._kind] == self._number + 1:
            _numbers[self._kind] = self._number
        self._group = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _carry(self, model: nn.Module) -> list[Any]:
        trainable = sorted(
            (p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel()
        )
        if not trainable:
            return []
        self._cell = torch.ones((), device=trainable[0].device)
        cell = self._cell

        def carry(grad: Tensor) -> Tensor:
            # Times 1 leaves a healthy gradient bit-identical.
            return grad * cell.to(grad)

        # So that saving the parameter does not warn of the hook.
        carry.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return [p.register_hook(carry) for p in trainable[:CARRIERS]]  # type: ignore[no-untyped-call]


def _signature(model: nn.Module) -> str:
    """Tell models apart where all ranks have the same one; stages of a pipeline are not."""
    if not isinstance(model, DistributedDataParallel):
        return ""
    told = hashlib.blake2b(digest_size=4)
    for name, parameter in model.named_parameters():
        told.update(f"{name}{tuple(parameter.shape)}".encode())
    return f"-{told.hexdigest()}"


def _answer(look: Callable[[], T]) -> tuple[str, T | None]:
    """What was found, or else in words why it was not."""
    try:
        return "", look()
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}", None
