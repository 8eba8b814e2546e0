"""Mistakes in how a guard is put into a loop, reported at once: an error where it cannot be meant,
a warning otherwise.
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepguard._errors import ConfigError, TrainingHalted
from stepguard.engine.context import Context, automatic_guards, guarded, real_optimizer
from stepguard.engine.drivers.scaler import voting_manager
from stepguard.engine.drivers.schedule import calls_of_step, position
from stepguard.engine.protect import borrowing
from stepguard.engine.result import data_parallel_wrapper
from stepguard.records import GuardConfig
from stepguard.report.phrases import count
from stepguard.state.batch import unwrapped
from stepguard.state.loader import ResumableLoader
from stepguard.state.run_state import inner_optimizers
from stepguard.tensors.names import named_parameters, optimizer_parameter_ids

LOOKED_AT = 3
"""Steps of `guard.step` during which calls of `optimizer.step` beside it, and missing gradients,
are looked for.
"""
MOST_NAMED = 3
WITHOUT_STEP = 1000
"""Backward passes without an update that no accumulation of gradients explains."""
OPTIMIZERS = inspect.getfile(Optimizer)
building_for: ContextVar[str] = ContextVar("building_for", default="")
"""The framework that is making a guard; empty when the user is."""


class WiringWarning(UserWarning):
    """The guard and the loop do not fit together; the message says what to change.

    For instance:

        warnings.simplefilter("error", stepguard.WiringWarning)   # to stop at the first one
    """


class Owner(Protocol):
    """A guard, as far as another one for the same optimizer has to know it."""

    def in_use(self, framework: str) -> str: ...
    def replaced(self) -> None: ...


owners: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Owner]] = weakref.WeakKeyDictionary()


# --- at building


def resumable(context: Context, loader: Any, between: Callable[[], None]) -> ResumableLoader:
    """The user's loader in a form that knows its position; `between` is called before a batch."""
    say = partial(context.outputs.note, "loader")
    return ResumableLoader(loader, between, say, lambda: context.step)


def check_config(config: object) -> GuardConfig:
    """A GuardConfig whose settings can have an effect."""
    if config is None:
        return GuardConfig()
    if not isinstance(config, GuardConfig):
        raise ConfigError(f"config is a {type(config).__name__}; give stepguard.GuardConfig(...).")
    if config.checkpoint_every is not None and config.run_dir is None and not borrowing():
        raise ConfigError(
            f"GuardConfig.checkpoint_every={config.checkpoint_every} has no folder to write to; "
            f"give run_dir='runs/a'."
        )
    return config


def check_watched(config: object, optimizer: Any = None) -> None:
    """The loop makes its own update: what the guard would do to the gradients before it has no
    place.
    """
    if voting_manager(optimizer) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} asks its workers whether to commit before a watched step "
            "could be judged; build stepguard.Guard and call guard.step(loss_fn, batch), whose "
            "veto is part of that vote."
        )
    if not isinstance(config, GuardConfig):
        return
    if config.loss_scale is not None:
        raise ConfigError(
            f"GuardConfig.loss_scale={config.loss_scale!r} scales inside guard.step only, and this "
            f"loop makes its own "
            "steps; use torch.amp.GradScaler and give it as scaler=."
        )


def check_optimizer(model: object, optimizer: Any, modules: object) -> None:
    """It is this model's, and no other guard uses it. Objects of other types are refused
    elsewhere.
    """
    optimizer = real_optimizer(optimizer)
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        return
    named = modules if isinstance(modules, dict) else {}
    further = {name: module for name, module in named.items() if isinstance(module, nn.Module)}
    _check_parameters({"": unwrapped(model), **further}, optimizer)
    automatic_guards.pop(optimizer, lambda: None)()
    # A guard that is left from before (a notebook cell that runs again) is replaced; one in use is
    # not.
    reference = owners.get(optimizer)
    owner = reference() if reference is not None else None
    if owner is None:
        return
    why = owner.in_use(building_for.get())
    if why:
        raise ConfigError(
            f"this optimizer has a guard already, {why}; close that one first, or keep using it."
        )
    with suppress(TrainingHalted):  # what is still pending is on record by then
        owner.replaced()


def _check_parameters(roots: dict[str, nn.Module], optimizer: Optimizer) -> None:
    """Refuse the optimizer of another model.

    Parameters that lie in no module (master copies, loose tensors) may be meant.
    """
    given = optimizer_parameter_ids(optimizer)
    known: set[int] = set()
    for root in roots.values():
        known.update(id(parameter) for parameter in root.parameters())
    if not given or not known or given & known:
        return
    other = _module_with(given)
    if other is not None:
        raise ConfigError(
            f"the optimizer holds no parameter of the {type(roots['']).__name__} it is given with, "
            f"but some of another {type(other).__name__}; build it from this model's parameters(), "
            "or give the other model."
        )


def _module_with(parameters: set[int]) -> nn.Module | None:
    """Any module of the process that holds one of these parameters itself."""
    for module in _modules():
        for parameter in list(module.__dict__.get("_parameters", {}).values()):
            if id(parameter) in parameters:
                return module
    return None


def _modules() -> list[nn.Module]:
    # type() and not isinstance: proxies answer isinstance with side effects
    return [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]


# --- while it runs

_wirings: list[weakref.ref[Wiring]] = []
_hook: list[Callable[[], None]] = []
"""Removes the one hook of the process by which wirings observe every optimizer's step."""
keeps_hearing: set[object] = set()
"""Owners that need the hook to stay, with or without a guard."""


def hear_optimizers() -> None:
    """Observe every optimizer's step from now on.

    One hook for all guards: torch goes through its hooks while guards are made, replaced and freed,
    and does not bear it if one comes or goes meanwhile.
    """
    if not _hook:
        outside: Any = torch.compiler.disable
        _hook.append(register_optimizer_step_pre_hook(outside(_optimizer_steps)).remove)


def stop_hearing() -> None:
    """Remove the hook with the last guard, unless an optimizer steps right now."""
    used = keeps_hearing or any(reference() is not None for reference in _wirings)
    if _hook and not used and not _inside_a_step():
        _hook.pop()()


def _optimizer_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for reference in tuple(_wirings):
        wiring = reference()
        if wiring is not None:
            wiring.optimizer_begins(optimizer)


def _inside_a_step() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == OPTIMIZERS:
            return True
    return False


class Wiring:
    """What one guard sees of its loop. Costs a healthy step a few comparisons."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._said: set[str] = set()
        self._stepping = False
        self._steps = 0
        self._outside = 0
        self._without_gradient = 0
        self._backwards = 0
        self._schedule: tuple[int, ...] | None = None
        self._moved = 0
        self._shared = self._parameters_in_model()
        self._missing = 0
        """Parameters of the optimizer that had no gradient in the last step."""
        self.adopt: Callable[[Optimizer], None] | None = None
        """How a watched loop's new optimizer is taken over; None under `guard.step`."""
        self._alone = 0
        """Updates of the guarded optimizer since another one of this model stepped."""
        self._turns = False
        """Optimizers have taken turns: another one is no longer taken for a new one at once."""
        self._left: weakref.ref[Optimizer] | None = None
        """The optimizer that was guarded before the present one."""
        self._beside: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Other optimizers that are left alone, and whether they train parts of this model."""
        self._apart: dict[int, weakref.ref[Optimizer]] = {}
        """Other optimizers, by id, that are no wrapper of the guarded one and not inside it."""
        _wirings.append(weakref.ref(self, _wirings.remove))
        hear_optimizers()
        context.resources.callback(self._hear_no_more)
        # Weakly: a guard that is never closed can still go.
        weakref.finalize(self, stop_hearing).atexit = False
        self._hook = context.optimizer.register_step_pre_hook(self._optimizer_steps)
        context.resources.callback(self.expect_own_steps)

    @property
    def stepping(self) -> bool:
        """Is `guard.step` under way?"""
        return self._stepping

    def _hear_no_more(self) -> None:
        _wirings[:] = [reference for reference in _wirings if reference() is not self]
        stop_hearing()

    def expect_own_steps(self) -> None:
        """From now on the loop may call optimizer.step() itself."""
        self._hook.remove()

    # --- an optimizer steps, whosever it is ---

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        context = self._context
        if optimizer is context.optimizer:
            self._alone += 1
            return
        known = self._apart.get(id(optimizer))
        apart = known is not None and known() is optimizer
        if not apart and not _inside_each_other(optimizer, context.optimizer):
            self._apart[id(optimizer)] = weakref.ref(optimizer)
            apart = True
        if apart:
            context.memory.habits.other_steps += 1
        if optimizer not in guarded and not self._stepping:
            self.follow(optimizer)

    def follow(self, optimizer: Optimizer) -> bool:
        """Guard this optimizer from now on if it takes the place of the guarded one.

        It does so if it updates the same parameters, if the model has none of the old ones any
        more, or if the guarded one had the model to itself until now. One that comes back has never
        been replaced: then the loop uses several, and each needs its own guard.
        """
        context = self._context
        known = self._beside.get(optimizer)
        if known is not None:
            self._alone = 0 if known else self._alone
            return False
        if calls_of_step(context.optimizer) or _inside_each_other(optimizer, context.optimizer):
            return False
        returns = self._left is not None and self._left() is optimizer
        if not returns and not self._takes_over(optimizer):
            return False
        before = context.optimizer
        if not self._adopted(optimizer):
            return False
        self._left = weakref.ref(before)
        self._alone = 0
        self._shared = self._parameters_in_model()
        kinds = f"{type(before).__name__} and {type(optimizer).__name__}"
        if returns:
            self._turns = True
            self._beside[before] = True
            self._say(
                f"{kinds} take turns on this model: the guard stays with the "
                f"{type(optimizer).__name__} it was given; build another guard for the other one"
            )
        else:
            size = count(len(optimizer_parameter_ids(optimizer)), "parameter")
            told = f"the loop has a new optimizer ({type(optimizer).__name__}, {size})"
            context.outputs.note("adopted", f"{told}: it is guarded from its first step")
        return True

    def _takes_over(self, optimizer: Optimizer) -> bool:
        context = self._context
        theirs = optimizer_parameter_ids(optimizer)
        mine = optimizer_parameter_ids(context.optimizer)
        below = {id(p) for root in context.roots.values() for p in root.parameters()}
        trains = bool(theirs & below)
        replaces = bool(theirs & mine) or not mine & below
        if trains and ((replaces and not self._turns) or self._alone >= LOOKED_AT):
            return True
        self._beside[optimizer] = trains
        self._alone = 0 if trains else self._alone
        return False

    def _adopted(self, optimizer: Optimizer) -> bool:
        """Take it over, or say that its updates are not guarded."""
        why = "this guard makes its own steps with guard.step"
        if self.adopt is not None:
            try:
                self.adopt(optimizer)
                self._apart.clear()
                return True
            except TrainingHalted:
                raise  # by the last update of the optimizer before it
            except Exception as fault:
                why = str(fault)
        self._beside[optimizer] = True
        self._warn(
            f"the loop steps another {type(optimizer).__name__} with parameters of this model, and "
            f"its updates are not guarded: {why}; build a guard for it"
        )
        return False

    # --- guard.step ---

    def begin_step(self) -> None:
        """Before anything of a `guard.step`."""
        if self._steps == 0:
            self._check_first()
        elif self._steps == LOOKED_AT:
            self.expect_own_steps()
        # Moved twice in a row since the last `guard.step`: not a jump by hand, but a loop that
        # advances it too.
        scheduler, before = self._context.scheduler, self._schedule
        if not (scheduler is None or before is None or not self._context.declared.advances):
            now = _position(scheduler)
            self._moved = self._moved + 1 if now is not None and now > before else 0
            if self._moved == 2:
                self._warn(
                    "the loop calls scheduler.step() and guard.step does so too: the schedule runs "
                    "twice as fast; take the "
                    "call out of the loop, or give the scheduler as state={'schedule': scheduler}"
                )
        self._stepping = True

    def end_step(self, missing: int | None) -> None:
        """`missing`: parameters without a gradient; None where the step raised, or is not known."""
        self._stepping = False
        self._steps += 1
        scheduler = self._context.scheduler
        self._schedule = _position(scheduler) if scheduler is not None else None
        if missing is not None and missing == len(self._context.memory.ordered):
            self.no_gradient()
        else:
            self._without_gradient = -LOOKED_AT  # they can be reached
            if missing is not None and missing != self._missing:
                self._look_for_replaced_parts(missing)

    def _check_first(self) -> None:
        if self._shared and not self._parameters_in_model():
            raise ConfigError(
                f"{REPLACED}; build optimizer and guard after loading or replacing the weights."
            )
        if self._context.agreement.mode == "collective":
            wrapper = data_parallel_wrapper(self._context.model)
            if wrapper is not None:
                raise ConfigError(
                    "the model was wrapped in DistributedDataParallel after its guard was built; "
                    "wrap it first and give the wrapper to the guard."
                )
        self._look_for_anomaly_mode()

    def _look_for_anomaly_mode(self) -> None:
        if torch.is_anomaly_enabled():
            self._say(
                "torch's anomaly mode is on: it slows every step and raises at a NaN; stepguard "
                "needs neither"
            )

    def _optimizer_steps(self, *_: Any) -> None:
        if self._stepping:
            return
        self._outside += 1
        self._warn(
            "optimizer.step() was called outside of guard.step: that update is not guarded; let "
            "guard.step(loss_fn, "
            "batch) make the update, or use stepguard.watch(model, optimizer) for a loop that "
            "stays as it is"
        )

    # --- both ---

    def no_gradient(self, *, reached: bool = False) -> None:
        """An update is due and none of the optimizer's parameters has a gradient.

        `reached`: a backward pass gave them one, and it is gone.
        """
        if self._shared and not self._parameters_in_model():
            self._warn(
                f"{REPLACED}, so nothing is learned; build optimizer and guard after replacing the "
                f"weights"
            )
            return
        self._without_gradient += 1
        parameters = self._context.parameters
        if self._without_gradient == LOOKED_AT and not any(p.requires_grad for p in parameters):
            self._warn(
                f"the optimizer has no trainable parameter ({len(parameters)} with "
                "requires_grad=False): nothing is learned; set requires_grad on what is to be "
                "trained (an adapter that was loaded for inference is frozen) before the optimizer "
                "is built"
            )
        elif self._without_gradient == LOOKED_AT:
            self._warn(
                f"no parameter of the optimizer got a gradient in {LOOKED_AT} steps: nothing is "
                "learned; "
                + (
                    "the backward pass left some, so call zero_grad() before it and not after it"
                    if reached
                    else "build the optimizer from the parameters of the model that the loss comes "
                    "from"
                )
            )

    def _look_for_replaced_parts(self, missing: int) -> None:
        """Have parameters lost their place in the model, so that they get no gradient any more?"""
        if missing > self._missing and self._parameters_in_model() < self._shared:
            mine = optimizer_parameter_ids(self._context.optimizer)
            named = named_parameters(self._context.roots)
            new = [name for name, p in named if p.requires_grad and id(p) not in mine]
            if new:
                self._warn(
                    f"{', '.join(new[:MOST_NAMED])} of the model replaced what the optimizer "
                    "holds, so nothing updates it; build the optimizer again after replacing parts "
                    "of the model (guard.step needs a new guard, too)"
                )
        self._missing = missing

    def _parameters_in_model(self) -> int:
        given = optimizer_parameter_ids(self._context.optimizer)
        return sum(
            id(p) in given for root in self._context.roots.values() for p in root.parameters()
        )

    # --- a watched loop ---

    def backward(self, reached: bool) -> None:
        """A backward pass is over; `reached`: it left gradients in this guard's parameters."""
        self._backwards += int(reached)
        if reached and self._backwards == WITHOUT_STEP:
            self._warn(
                f"{WITHOUT_STEP} backward passes, and the watched optimizer has made no step; "
                "call its step()"
            )

    def update(self, missing: int) -> None:
        """The watched optimizer steps; this many of its parameters have no gradient."""
        if self._steps == 0:
            self._look_for_anomaly_mode()
        self._steps += 1
        reached = self._backwards > 0
        self._backwards = 0
        if missing == len(self._context.memory.ordered):
            self.no_gradient(reached=reached)
        else:
            self._without_gradient = -LOOKED_AT
            if missing != self._missing:
                self._look_for_replaced_parts(missing)

    def close(self) -> None:
        """The run is over: has the guard seen anything of it?"""
        if self._steps:
            return
        if self._outside:
            self._say(
                f"this guard saw no step: {count(self._outside, 'call')} of optimizer.step() came "
                "outside of guard.step"
            )
        elif self._backwards:
            self._say(
                f"this guard saw no step: {self._backwards} backward passes, and the optimizer "
                "never stepped"
            )

    def _warn(self, summary: str) -> None:
        """Show it once, as Python's warning: tests filter by it, and it names the user's line."""
        if summary not in self._said:
            text = f"stepguard: {summary}."
            self._say(summary, warned=not _hidden(text))
            warnings.warn(text, WiringWarning, stacklevel=5)

    def _say(self, summary: str, *, warned: bool = False) -> None:
        """`warned`: a Python warning shows it, so the terminal need not print it as well."""
        self._said.add(summary)
        self._context.outputs.note("wiring", summary, **({"warned": True} if warned else {}))


REPLACED = (
    "the optimizer holds parameters that are no longer the model's: they were replaced after the "
    "guard was built"
)


def _hidden(text: str) -> bool:
    """Does a filter hide this warning that was made for others, as `filterwarnings("ignore")` is?

    A filter for WiringWarning itself is the user's answer to the message.
    """
    for action, message, category, module, line in warnings.filters:
        matches = message is None or message.match(text)
        if matches and not module and not line and issubclass(WiringWarning, category):
            return action == "ignore" and category is not WiringWarning
    return False


def _inside_each_other(one: Optimizer, other: Optimizer) -> bool:
    """Is one of them a wrapper around the other?"""
    for outer, inner in ((one, other), (other, one)):
        if any(found is inner for _, found in inner_optimizers(outer)):
            return True
    return False


def _position(scheduler: Any) -> tuple[int, ...] | None:
    with suppress(Exception):  # an object of the user's own
        return position(scheduler)
    return None
