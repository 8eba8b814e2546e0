"""Everything that is measured about a subject, each thing once and only if an item asks for it."""

from __future__ import annotations

import copy
import inspect
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import default_collate

from stepguard._errors import ConfigError, StepguardError
from stepguard.check.data import (
    DataFacts,
    Progress,
    first_batch,
    held_out,
    is_map,
    scan,
    source_of,
)
from stepguard.check.inert_pickle import PickledObject
from stepguard.check.scan import Damaged
from stepguard.check.settings import (
    Launcher,
    Setting,
    Tracked,
    find,
    number,
    plain,
    read_launcher,
    read_settings,
)
from stepguard.check.subject import (
    FrameworkContext,
    Source,
    Subject,
    files_below,
    program_files,
    read_framework,
    read_source,
)
from stepguard.check.torch_file import read_content
from stepguard.check.verify import check_path as verify
from stepguard.diagnose.case import plain as real_format
from stepguard.diagnose.case import words
from stepguard.records.checks import Status, Verification
from stepguard.state.batch import Step, named_tensors, total_loss, unwrapped
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.rng import kept_rng
from stepguard.tensors.torch_private import TorchDispatchMode, compiled_call, tree_map_only
from stepguard.tensors.values import dense_values, dtype_name, is_finite, versions, written_since

# --- Answers of an item: pass, warn or fail with evidence, or why there is no answer.


class Answer(NamedTuple):
    """What one item found."""

    status: Status
    evidence: tuple[str, ...] = ()
    fix: str = ""


class NotGiven(Exception):  # noqa: N818 (an answer, not a fault)
    """Something the item needs was not given; the text says what to give."""


class NotApplicable(Exception):  # noqa: N818 (an answer, not a fault)
    """The item does not apply to this subject; the text says why."""


def passed(*evidence: str) -> Answer:
    return Answer("pass", evidence)


def warned(*evidence: str, fix: str) -> Answer:
    return Answer("warn", evidence, fix)


def failed(*evidence: str, fix: str) -> Answer:
    return Answer("fail", evidence, fix)


def one_line(fault: Exception, most: int = 120) -> str:
    """Type and text of an exception in one line, the text cut after `most` characters."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:most]}"


# --- Trace one forward and backward pass of the real step, leaving every object as it was.

MATMULS = words(
    """
    mm addmm bmm baddbmm addbmm matmul linear convolution _convolution mkldnn_convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _mkldnn_linear
    """
)
"""The operations autocast is for: their dtype is the effective precision."""
DIVISIONS = words("div div_ true_divide reciprocal")
DELICATE = words("exp log logsumexp _softmax _log_softmax sqrt rsqrt pow cdist_forward")
"""Operations worth naming, because many incidents begin in one."""


class TracedStep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one pass showed. While it is entered, it takes notes of the operations that run.

    Only the forward pass is traced: the backward repeats its dtypes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.loss: float | None = None
        self.outputs_bad: list[str] = []
        self.grads_bad: list[str] = []
        self.grad_norm: float | None = None
        self.dtypes: Counter[str] = Counter()
        """Output dtype of every matrix product and convolution of the forward pass."""
        self.ops: Counter[str] = Counter()
        self.divisions = 0
        self.divisor = (math.inf, "", "")
        """The smallest magnitude something was divided by, its dtype, and where."""
        self.lost_eps: dict[str, str] = {}
        """Small numbers that were added without effect: `loss.py:12` -> `1e-08 in float32`."""
        self.latent = (0.0, 1.0)
        """Mean and standard deviation of the target of a squared error; of several, of the one
        whose deviation is farthest from 1."""
        self.squared_errors = 0
        self.fault = ""
        """The exception of the user's program."""
        self._difference: tuple[Any, Any] = (None, None)
        """The last difference of a prediction and a target, and that target."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in DELICATE:
            self.ops[name.strip("_")] += 1
        if name in MATMULS:
            # Attention returns its output first, and what its backward needs.
            product = out[0] if isinstance(out, tuple) else out
            self.dtypes[dtype_name(product.dtype)] += 1
        elif name in DIVISIONS:
            self._divided(args[0] if name == "reciprocal" else args[1])
        elif name == "add" and len(args) > 1:
            # Note an eps that is below the spacing of what it is added to.
            value, eps = args[:2]
            # A larger number that is added is not an eps
            small = isinstance(eps, float) and 0 < abs(eps) <= 1e-3
            if small and value.is_floating_point() and torch.equal(value, out):
                self.lost_eps[_user_line()] = f"{eps:g} in {dtype_name(value.dtype)}"
        elif name in ("mse_loss", "sub", "pow", "square"):
            self._squared_error(name, args, out)
        return out

    def _divided(self, divisor: Any) -> None:
        dtype = "a Python number"
        if isinstance(divisor, Tensor):
            if not divisor.numel() or divisor.is_complex() or divisor.dtype == torch.bool:
                return
            dtype = dtype_name(divisor.dtype)
            divisor = divisor.detach().abs().min()
        self.divisions += 1
        if abs(float(divisor)) < self.divisor[0]:
            self.divisor = (abs(float(divisor)), dtype, _user_line())

    def _squared_error(self, name: str, args: Any, out: Tensor) -> None:
        """Recognise a squared error, torch's or a difference that is then squared."""
        target = None
        if name == "mse_loss":
            target = args[1]
        elif name == "sub":
            fixed = [one for one in args if isinstance(one, Tensor) and not one.requires_grad]
            self._difference = (out, fixed[0]) if len(fixed) == 1 else (None, None)
        elif args[0] is self._difference[0] and args[1:] in ((), (2,)):
            target = self._difference[1]
        if target is None or target.numel() < 2:
            return
        values = target.detach().float()
        found = (float(values.mean()), float(values.std()))
        self.squared_errors += 1

        def off(latent: tuple[float, float]) -> float:
            """How far the deviation is from 1, up or down."""
            return abs(math.log(max(latent[1], 1e-30)))

        self.latent = max(found, self.latent, key=off)


def _user_line() -> str:
    """`loss.py:12`: the innermost frame that belongs to the user's program."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "stepguard", "contextlib"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def trace_step(subject: Subject, framework: FrameworkContext, batch: Any) -> TracedStep:
    """Run forward in the real context, and backward. The program's exceptions become `fault`."""
    model = subject.model
    assert model is not None
    step = TracedStep()
    eager = nullcontext()
    for module in model.modules():
        # Compiled code runs no dispatch mode: run the model as it was written.
        if "_orig_mod" in module._modules or compiled_call(module) is not None:
            eager = torch.compiler.set_stance("force_eager")
    # A step may write into its batch.
    copied = _copied(batch)
    with left_alone(model, subject.optimizer), eager:
        try:
            with framework.opened(), step:
                if subject.loss_fn is not None:
                    loss: Any = total_loss(subject.loss_fn(copied))
                else:
                    # Call the model on a batch as it comes: keywords, positions, or one tensor.
                    if isinstance(copied, Mapping):
                        output = model(**copied)
                    elif isinstance(copied, tuple | list):
                        output = model(*copied)
                    else:
                        output = model(copied)
                    loss = getattr(output, "loss", None)
                    step.outputs_bad = nonfinite_outputs(output)
            if isinstance(loss, Tensor):
                step.loss = float(loss.detach())
                step.grad_norm = 0.0
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                for name, parameter in model.named_parameters() if loss.requires_grad else ():
                    if parameter.grad is not None:
                        # The gradient of a sparse embedding holds only the rows that were used.
                        grad = dense_values(parameter.grad.detach())
                        norm = float(grad.abs().double().norm())
                        step.grad_norm = math.hypot(step.grad_norm, norm)
                        if not is_finite(grad):
                            step.grads_bad.append(name)
        except Exception as fault:
            step.fault = one_line(fault, 160)
    return step


def _copied(batch: Any) -> Any:
    return tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch
    )


def gradient_of(subject: Subject, framework: FrameworkContext, batch: Any) -> Tensor:
    """The gradient of the loss of a batch as one row, in evaluation mode: what is random or depends
    on the other samples of a batch norm is left out. Leaves every object as it was.
    """
    model, loss_fn = subject.model, subject.loss_fn
    assert model is not None and loss_fn is not None
    copied = _copied(batch)
    with left_alone(model, subject.optimizer), kept_rng():
        model.eval()
        with framework.opened():
            loss = total_loss(loss_fn(copied))
        loss.backward()  # type: ignore[no-untyped-call]
        parts = [p.grad for p in model.parameters() if p.grad is not None]
        rows = [dense_values(part.detach()).double().reshape(-1) for part in parts]
        return torch.cat(rows) if rows else torch.zeros(0)


@contextmanager
def left_alone(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Put parameters, gradients, buffers, modes, hooks and generators back, bit for bit."""
    parameters = list(model.parameters())
    copies = {id(parameter): parameter.detach().clone() for parameter in parameters}
    marks = versions(parameters)
    keeper = BufferKeeper([unwrapped(model)])
    keeper.remember()
    if optimizer is None:
        # `untouched` wants an optimizer, and torch makes none without a parameter.
        optimizer = SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.0)
    step = Step(index=0, model=model, optimizer=optimizer, modules={}, buffers=keeper)
    try:
        with untouched(step):
            yield
    finally:
        with torch.no_grad():
            # A forward pass may write to its own weights, for instance clamp them.
            for parameter in written_since(parameters, marks):
                parameter.copy_(copies[id(parameter)])


def nonfinite_outputs(output: Any) -> list[str]:
    """Names of the tensors in the output of a module that hold a NaN or an Inf."""
    bad = []
    for name, tensor in named_tensors(output):
        if tensor.is_floating_point() and not is_finite(tensor):
            bad.append(name or "output")
    return bad


# --- The effective precision: the dtype a matrix product really has where the model runs.


class Probe(NamedTuple):
    """What was run, where, and what came out."""

    dtype: str
    how: str
    """A sentence with numbers: which operation, how often."""
    device: str
    autocast: str | None = None
    """The dtype autocast has inside the context, None if it is off there."""


def probe_precision(
    model: nn.Module, device: torch.device, framework: FrameworkContext, step: TracedStep | None
) -> Probe:
    """Take the model's products in its real step; without a batch, one small product."""
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    operand = torch.ones(2, 2, device=device, dtype=next(floating, torch.get_default_dtype()))
    autocast = None
    with warnings.catch_warnings(), torch.no_grad():
        # A framework may warn of a context that is opened outside of its training loop.
        warnings.simplefilter("ignore")
        with framework.opened():
            dtype = dtype_name((operand @ operand).dtype)
            if torch.is_autocast_enabled(device.type):
                autocast = dtype_name(torch.get_autocast_dtype(device.type))
    how = f"a matrix product in {framework.name} on {device.type} came out as {dtype}"
    if step is not None and step.dtypes:
        ((dtype, times),) = step.dtypes.most_common(1)
        how = (
            f"{times} of {step.dtypes.total()} matrix products of the real step on {device.type} "
            f"came out as {dtype}"
        )
        autocast = autocast if autocast == dtype else None
    return Probe(dtype, how, device.type, autocast)


# --- The learning rate over the run, from a copy of the schedule.

MOST_STEPS = 20_000


def follows_metric(scheduler: Any) -> bool:
    """True for ReduceLROnPlateau and its like, whose rate cannot be known beforehand."""
    step = getattr(scheduler, "step", None)
    return step is not None and "metrics" in inspect.signature(step).parameters


def peak_rates(optimizer: Optimizer) -> list[float]:
    """What each group is meant to run with."""
    # OneCycleLR keeps its peak in `max_lr`, other schedules their base in `initial_lr`.
    return [
        float(group.get("max_lr", group.get("initial_lr", group["lr"])))
        for group in optimizer.param_groups
    ]


def dry_run(optimizer: Optimizer, scheduler: Any, steps: int) -> tuple[list[float], str]:
    """The first group's rate before each step, from a copy, and the exception that ended it."""
    twin = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    twin.param_groups.clear()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        twin.param_groups.append(
            copy.deepcopy(options) | {"params": [nn.Parameter(torch.zeros(1))]}
        )
    copied = copy.deepcopy(scheduler, {id(optimizer): twin})
    rates = [float(twin.param_groups[0]["lr"])]
    with warnings.catch_warnings():
        # torch warns of a schedule that is stepped before its optimizer.
        warnings.simplefilter("ignore")
        try:
            for _ in range(steps):
                copied.step()
                rates.append(float(twin.param_groups[0]["lr"]))
        except Exception as fault:
            return rates, one_line(fault)
    return rates, ""


# --- Facts a checkpoint on disk holds about the run that wrote it: configuration and versions.

CONFIGS = ("config", "cfg", "hyper_parameters", "hparams", "args", "settings")


class CheckpointFacts(NamedTuple):
    """Empty where the checkpoint holds none."""

    config: dict[str, Any]
    versions: dict[str, str]


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read a file of torch.save, or the facts of a checkpoint of stepguard."""
    content: Any = None
    # What is damaged is reported by `checkpoint.sound`.
    with suppress(Damaged, ConfigError):
        if not path.is_dir():
            content = read_content(path)
        elif (path / "facts.json").exists():
            content = read_settings(path / "facts.json")
    # Only these: states are large, and a pickle can put a list into itself.
    found: list[dict[str, Any]] = [{}, {}]
    for place, names in enumerate((CONFIGS, ("versions",))):
        for name in names if isinstance(content, Mapping) else ():
            value = _plain(content.get(name))
            if isinstance(value, dict):
                found[place] = found[place] or value
    return CheckpointFacts(*found)


def _plain(value: Any) -> Any:
    """Dicts, lists, texts and numbers; an object such as a Namespace is the dict of its attributes.

    Everything else is `...`, and left out of what holds it.
    """
    if isinstance(value, PickledObject):
        value = value.entries or value.state or ...
    if isinstance(value, dict):
        entries = {str(key): _plain(part) for key, part in value.items()}
        return {key: part for key, part in entries.items() if part is not ...}
    if isinstance(value, list | tuple):
        return [part for part in map(_plain, value) if part is not ...]
    return value if value is None or isinstance(value, str | int | float) else ...


# --- Everything that is measured about a subject.

BUILD = "give TARGET as module:function whose function returns"


class Inspection:
    """Lazy facts about a subject. Raises NotGiven, which says what to give, for what is missing."""

    def __init__(
        self,
        subject: Subject,
        progress: Progress | None = None,
        *,
        verified: Verification | None = None,
    ) -> None:
        self.subject = subject
        self._progress = progress
        self._verified = verified

    def _part(self, name: str) -> Any:
        if getattr(self.subject, name) is None:
            raise NotGiven(f"{BUILD} the {name}")
        return getattr(self.subject, name)

    @property
    def model(self) -> nn.Module:
        return cast(nn.Module, self._part("model"))

    @property
    def optimizer(self) -> Optimizer:
        return cast(Optimizer, self._part("optimizer"))

    @property
    def scheduler(self) -> Any:
        return self._part("scheduler")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Empty if there is none."""
        return {} if self.subject.config is None else plain(self.subject.config)

    @property
    def tracked(self) -> Tracked | None:
        """The configuration that knows which of its keys were read."""
        given = (self.subject.tracked, self.subject.config)
        return next((one for one in given if isinstance(one, Tracked)), None)

    def needed_config(self) -> dict[str, Any]:
        if self.subject.config is None:
            raise NotGiven("give --config FILE")
        return self.config

    def setting(self, meaning: str) -> Setting | None:
        return find(self.config, meaning)

    def number(self, meaning: str) -> float | None:
        return number(self.config, meaning)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run, if they are given or configured."""
        found = int(self.subject.steps or self.number("steps") or 0)
        return found if found > 0 else None

    @cached_property
    def launcher(self) -> Launcher:
        return read_launcher(self.subject.launcher or {}, self.subject.launcher_name, os.environ)

    @property
    def guard(self) -> Any:
        """The GuardConfig that the subject gives, by itself or in a Guard."""
        return getattr(self.subject.guard, "config", self.subject.guard)

    @property
    def guarded_at(self) -> str:
        """Where the program starts a guard of stepguard; empty if it does not."""
        if self.guard is not None:
            return "the returned `guard`"
        return self.program.places.get("guard", "")

    @cached_property
    def framework(self) -> FrameworkContext:
        return read_framework(self.subject.autocast)

    @property
    def scaler(self) -> Any:
        """A GradScaler that is switched on, the subject's or the framework's."""
        for given in (self.subject.scaler, self.framework.scaler):
            if given is not None and (not hasattr(given, "is_enabled") or given.is_enabled()):
                return given
        return None

    @cached_property
    def param_dtypes(self) -> dict[str, int]:
        """Elements by dtype, most common first."""
        sizes: Counter[str] = Counter()
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                sizes[real_format(str(parameter.dtype))] += parameter.numel()
        return dict(sizes.most_common())

    @property
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """What the optimizer keeps; empty without one, and before its first step."""
        found = {}
        states = self.subject.optimizer.state.values() if self.subject.optimizer else ()
        for index, state in enumerate(states):
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    found[f"opt:{key} of parameter {index}"] = value
        return found

    @property
    def device(self) -> torch.device:
        for parameter in self.model.parameters():
            return parameter.device
        return torch.device("cpu")

    @cached_property
    def batch(self) -> Any:
        """One batch: given, from the loader, or of the first examples of the dataset."""
        batch, dataset = self.subject.batch, self.subject.dataset
        try:
            with kept_rng():
                if batch is None and self.subject.loader is not None:
                    batch = first_batch(self.subject.loader)
                elif batch is None and is_map(dataset) and len(dataset):
                    size = min(len(dataset), int(self.number("batch_size") or 2))
                    batch = default_collate([dataset[index] for index in range(size)])
        except Exception as fault:
            raise NotGiven(
                f"the first batch could not be made ({one_line(fault, 100)}); return a `batch`"
            ) from fault
        if batch is None:
            raise NotGiven(f"{BUILD} a batch, loader or dataset")
        return batch

    @cached_property
    def traced_step(self) -> TracedStep:
        """A forward and backward pass of the real step."""
        self._needs_weights()
        step = trace_step(self.subject, self.framework, self.batch)
        if step.fault and self.subject.loss_fn is None:
            # How the model is called was a guess, so its exception proves nothing.
            raise NotGiven(
                f"return `loss_fn`; the model cannot be called with a batch directly ({step.fault})"
            )
        return step

    def _needs_weights(self) -> None:
        if self.device.type == "meta":
            raise NotApplicable("the weights are on the meta device: there is nothing to run yet")

    @cached_property
    def probe(self) -> Probe:
        """The dtype arithmetic really has."""
        self._needs_weights()
        step = None
        with suppress(NotGiven):
            step = self.traced_step
        opened = ""
        if self.subject.script is not None and self.subject.autocast is None:
            opened = self.program.places.get("autocast", "")
        if step is None and opened:
            raise NotGiven(
                f"return `loss_fn` and a batch, or `autocast`: the program opens it at {opened}"
            )
        try:
            probe = probe_precision(self.model, self.device, self.framework, step)
        except StepguardError:
            raise
        except Exception as fault:
            raise NotGiven(
                f"{self.framework.name} cannot be opened here ({one_line(fault, 100)}); give the "
                "one that works here"
            ) from fault
        if opened and probe.dtype in self.param_dtypes:
            probe = probe._replace(how=f"{probe.how}; autocast at {opened} did not change it")
        return probe

    @cached_property
    def schedule(self) -> tuple[list[float], str]:
        """The schedule's rates, tried on a copy, and where it failed."""
        return dry_run(self.optimizer, self.scheduler, min(self.steps or MOST_STEPS, MOST_STEPS))

    def _scanned(self, given: Any, give: str) -> DataFacts:
        if given is None:
            raise NotGiven(give)
        with kept_rng():
            return scan(given, self.subject, self._progress)

    @cached_property
    def data(self) -> DataFacts:
        give = f"give --data PATH, or {BUILD.removeprefix('give ')} a dataset, loader or batch"
        return self._scanned(source_of(self.subject), give)

    @cached_property
    def validation(self) -> DataFacts:
        give = "give --validation PATH, or return a `validation` dataset"
        return self._scanned(held_out(self.subject), give)

    @cached_property
    def verified(self) -> Verification:
        """The checkpoint as `stepguard verify` sees it."""
        return self._verified or verify(self._checkpoint_path())

    @cached_property
    def checkpoint(self) -> CheckpointFacts:
        return read_checkpoint_facts(self._checkpoint_path())

    def _checkpoint_path(self) -> Path:
        if self.subject.checkpoint is None:
            raise NotGiven("give --checkpoint PATH")
        path = Path(self.subject.checkpoint)
        if not path.exists():
            raise ConfigError(
                f"checkpoint {path} does not exist; give a checkpoint file or folder."
            )
        return path

    @cached_property
    def project(self) -> Source:
        """The source below the current folder.

        A configuration in Python names all its keys, which is not a use of them.
        """
        own = self.subject.config_file
        files = files_below(Path.cwd())
        return read_source(f for f in files if own is None or f != own.resolve())

    @cached_property
    def program(self) -> Source:
        """The source of the program itself: its script, and what that imports from the folder."""
        if self.subject.script is None:
            raise NotGiven(
                "give TARGET as module:function: the code in this folder may belong to "
                "another program"
            )
        return read_source(program_files(Path.cwd(), self.subject.script))
