"""Everything that is measured about a subject, each thing once and only if an item asks for it."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import default_collate

from stepguard._errors import ConfigError, StepguardError
from stepguard.check.bounded_file import Damaged
from stepguard.check.inert_pickle import PickledObject, TensorRecord
from stepguard.check.torch_file import is_checkpoint_file, read_content
from stepguard.check.verify import check_path as verify
from stepguard.diagnose.case import plain as real_format
from stepguard.diagnose.case import words
from stepguard.preflight.data import (
    DataFacts,
    LabelFacts,
    Progress,
    first_batch,
    gather,
    is_map,
    source_of,
    validation_of,
)
from stepguard.preflight.project import Program, Project, read_program, read_project
from stepguard.preflight.settings import (
    Launcher,
    Setting,
    find,
    number,
    read_launcher,
    read_settings,
)
from stepguard.preflight.subject import (
    Answer,
    DryRun,
    FrameworkFacts,
    NotApplicable,
    NotGiven,
    Subject,
    Tracked,
    dry_run,
    one_line,
    plain,
    read_framework,
)
from stepguard.records.checks import Verification
from stepguard.state.batch import Step, named_tensors, total_loss, unwrapped
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.rng import kept_rng
from stepguard.tensors.torch_private import TorchDispatchMode, compiled_call, tree_map_only
from stepguard.tensors.values import dense_values, dtype_name, is_finite, versions, written_since

# --- Trace one forward and backward pass of the real step, leaving every object as it was.


MATMULS = words(
    """
    mm addmm bmm baddbmm addbmm matmul linear convolution _convolution mkldnn_convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _mkldnn_linear
    """
)
"""The operations autocast is for: their dtype is the effective precision."""
DIVISIONS = frozenset({"div", "div_", "true_divide", "reciprocal"})
CROSS_ENTROPIES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss_nd"})
DELICATE = words("exp log logsumexp _softmax _log_softmax sqrt rsqrt pow cdist_forward")
"""Operations worth naming, because many incidents begin in one."""
LARGEST_EPS = 1e-3
"""A larger number that is added is not an eps."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """The smallest magnitude something was divided by, and where."""

    least: float
    dtype: str
    source: str


@dataclass(slots=True)
class TracedStep:
    """What one pass showed."""

    loss: float | None = None
    outputs_bad: list[str] = field(default_factory=list)
    grads_bad: list[str] = field(default_factory=list)
    grad_norm: float | None = None
    dtypes: Counter[str] = field(default_factory=Counter)
    """Output dtype of every matrix product and convolution of the forward pass."""
    ops: Counter[str] = field(default_factory=Counter)
    divisions: int = 0
    divisor: Divisor | None = None
    lost_eps: dict[str, str] = field(default_factory=dict)
    """Small numbers that were added without effect: `loss.py:12` -> `1e-08 in float32`."""
    classes: int | None = None
    """Number of classes of the cross-entropy, if there is one."""
    latent: tuple[float, float] | None = None
    """Mean and standard deviation of the target of a squared error; of several, of the one whose
    deviation is farthest from 1."""
    fault: str = ""
    """The program's own exception."""


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes notes of the forward pass only: the backward repeats its dtypes."""

    def __init__(self, step: TracedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step
        self._difference: tuple[Any, Any] = (None, None)
        """The last difference of a prediction and a target, and that target."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in DELICATE:
            self._step.ops[name.strip("_")] += 1
        if name in MATMULS:
            self._multiplied(out)
        elif name in DIVISIONS:
            self._divided(args[0] if name == "reciprocal" else args[1])
        elif name == "add" and len(args) > 1:
            self._added(args[0], args[1], out)
        elif name in CROSS_ENTROPIES:
            self._classified(args[0])
        elif name == "mse_loss":
            self._compared(args[1])
        elif name in ("sub", "pow", "square"):
            self._squared_error(name, args, out)
        return out

    def _squared_error(self, name: str, args: Any, out: Any) -> None:
        """A mean squared error written by hand: a difference, then its square."""
        if name == "sub":
            wanted = [one for one in args[:2] if isinstance(one, Tensor) and not one.requires_grad]
            self._difference = (out, wanted[0]) if len(wanted) == 1 else (None, None)
        elif args[0] is self._difference[0] and args[1:] in ((), (2,)):
            self._compared(self._difference[1])

    def _multiplied(self, out: Any) -> None:
        # Attention returns its output first, and what its backward needs.
        if isinstance(out, tuple):
            out = out[0]
        if isinstance(out, Tensor):
            self._step.dtypes[dtype_name(out.dtype)] += 1

    def _divided(self, divisor: Any) -> None:
        least, dtype = _least(divisor)
        if least is None:
            return
        self._step.divisions += 1
        if self._step.divisor is None or least < self._step.divisor.least:
            self._step.divisor = Divisor(least, dtype, _user_line())

    def _added(self, value: Any, eps: Any, out: Any) -> None:
        """Note an eps that is below the spacing of what it is added to."""
        if not isinstance(eps, float) or not 0 < abs(eps) <= LARGEST_EPS:
            return
        if isinstance(value, Tensor) and value.is_floating_point() and torch.equal(value, out):
            self._step.lost_eps[_user_line()] = f"{eps:g} in {dtype_name(value.dtype)}"

    def _classified(self, scores: Tensor) -> None:
        # Classes are the second dimension, behind the batch, if there is a batch.
        if scores.dim() == 1:
            self._step.classes = int(scores.shape[0])
        elif scores.dim() > 1:
            self._step.classes = int(scores.shape[1])

    def _compared(self, target: Tensor) -> None:
        if target.numel() > 1:
            values = target.detach().float()
            found, known = (float(values.mean()), float(values.std())), self._step.latent
            if known is None or _off(found[1]) > _off(known[1]):
                self._step.latent = found


def _off(deviation: float) -> float:
    """How far it is from 1, up or down."""
    return abs(math.log(max(deviation, 1e-30)))


def _least(divisor: Any) -> tuple[float | None, str]:
    if isinstance(divisor, int | float):
        return abs(float(divisor)), "a Python number"
    if not isinstance(divisor, Tensor) or not divisor.numel():
        return None, ""
    if divisor.is_complex() or divisor.dtype == torch.bool:
        return None, ""
    return float(divisor.detach().abs().min()), dtype_name(divisor.dtype)


def _user_line() -> str:
    """`loss.py:12`: the innermost frame that belongs to the user's program."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "stepguard", "contextlib"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def trace_step(subject: Subject, framework: FrameworkFacts, batch: Any) -> TracedStep:
    """Run forward in the real context, and backward. The program's exceptions become `fault`."""
    model = subject.model
    assert model is not None
    step = TracedStep()
    # A step may write into its batch.
    copied = tree_map_only(Tensor, _copied, batch)
    with left_alone(model, subject.optimizer), _eagerly(model):
        try:
            with framework.opened(), _Tracer(step):
                if subject.loss_fn is not None:
                    output = subject.loss_fn(copied)
                else:
                    output = call_model(model, copied)
            loss: Any
            if subject.loss_fn is not None:
                loss = total_loss(output)
            else:
                loss = getattr(output, "loss", None)
                step.outputs_bad = nonfinite_outputs(output)
            if isinstance(loss, Tensor):
                step.loss = float(loss.detach())
                _backward(step, model, loss)
        except Exception as fault:
            step.fault = one_line(fault, 160)
    return step


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Run a compiled model as it was written: compiled code runs no dispatch mode."""
    eager: AbstractContextManager[Any] = nullcontext()
    for module in model.modules():
        if "_orig_mod" in module._modules or compiled_call(module) is not None:
            eager = torch.compiler.set_stance("force_eager")
    return eager


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch as it comes: keywords, positions, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


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


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def nonfinite_outputs(output: Any) -> list[str]:
    """Names of the tensors in the output of a module that hold a NaN or an Inf."""
    bad = []
    for name, tensor in named_tensors(output):
        if tensor.is_floating_point() and not is_finite(tensor):
            bad.append(name or "output")
    return bad


def _backward(step: TracedStep, model: nn.Module, loss: Tensor) -> None:
    if not loss.requires_grad:
        step.grad_norm = 0.0
        return
    loss.backward()  # type: ignore[no-untyped-call]
    squares = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        # The gradient of a sparse embedding holds only the rows that were used.
        grad = dense_values(parameter.grad.detach())
        squares += float(grad.abs().double().square().sum())
        if not is_finite(grad):
            step.grads_bad.append(name)
    step.grad_norm = squares**0.5


# --- Facts a checkpoint on disk holds about the run that wrote it: shapes, configuration,
# versions.


CONFIGS = ("config", "cfg", "hyper_parameters", "hparams", "args", "settings")
MODELS = ("model", "state_dict", "model_state_dict", "net", "module", "weights")
VERSIONS = ("versions", "version", "pytorch-lightning_version", "torch_version")
NOT_THE_MODEL = ("training_args", "rng_state", "random_states", "optimizer", "scheduler")
"""Files of a folder that hold no tensors of the model."""
SETTINGS_FILES = ("args", "hparams", "settings", "run_config", "training_args", "train_config")
"""JSON files that hold the run's settings; `config.json` of transformers is the model's."""
SEALED_FACTS = "facts"
"""The JSON file of a checkpoint of stepguard."""
SEALED_MODEL = "model/"
"""How a checkpoint of stepguard names the model's tensors among all others."""


@dataclass(slots=True)
class CheckpointFacts:
    """As far as the layout was understood."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The model's tensors."""
    versions: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read a file, or a folder of files as transformers, accelerate and stepguard write it."""
    facts = CheckpointFacts(path)
    if path.is_file():
        _read_file(facts, path)
        folder = path.parent
    else:
        folder = path
        for file in sorted(path.iterdir()):
            if file.suffix == ".json":
                _read_json(facts, file)
            elif not file.name.startswith(NOT_THE_MODEL) and is_checkpoint_file(file):
                _read_file(facts, file)
    # Hydra keeps the configuration of a run beside its outputs.
    file = folder / ".hydra" / "config.yaml"
    if not facts.config and file.is_file():
        facts.config = read_settings(file)
    return facts


def _read_file(facts: CheckpointFacts, file: Path) -> None:
    try:
        content = read_content(file)
    except Damaged as fault:
        facts.unread.append(f"{file.name}: {fault.kind}: {fault.detail[:140]}")
        return
    _take(facts, content)


def _take(facts: CheckpointFacts, content: Any) -> None:
    """Take what is known from the top level of a checkpoint."""
    if not isinstance(content, Mapping):
        return
    for name in CONFIGS:
        facts.config = facts.config or _plain_mapping(content.get(name))
    for name in VERSIONS:
        found = content.get(name)
        if isinstance(found, Mapping):
            facts.versions |= dict(found)
        elif found:
            facts.versions[name] = str(found)
    _take_shapes(facts, content)


def _take_shapes(facts: CheckpointFacts, content: Mapping[Any, Any]) -> None:
    tensors = _shapes(content)
    # A file of tensors only may be one shard of several.
    if len(tensors) == len(content):
        facts.shapes |= _model_part(tensors)
        return
    for name in MODELS:
        facts.shapes = facts.shapes or _shapes(content.get(name))
    facts.shapes = facts.shapes or tensors


def _model_part(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The model's tensors of a sealed checkpoint, which names those of the optimizer as well."""
    sealed = {}
    for name, shape in shapes.items():
        if name.startswith(SEALED_MODEL):
            sealed[name.removeprefix(SEALED_MODEL)] = shape
    return sealed or shapes


def _shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    if isinstance(tensors, Mapping):
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorRecord):
                found[str(name)] = tuple(tensor.shape)
    return found


def _plain_mapping(value: Any) -> dict[str, Any]:
    """Plain values of a dict, or of the attributes an object such as a Namespace would have."""
    if isinstance(value, PickledObject):
        value = value.entries or value.state
    if not isinstance(value, dict):
        return {}
    return {str(key): _plain(part) for key, part in value.items() if _is_plain(part)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict | PickledObject):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value if _is_plain(part)]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, PickledObject):
        return isinstance(value.entries or value.state, dict)
    return value is None or isinstance(value, str | int | float | list | tuple | dict)


def _read_json(facts: CheckpointFacts, file: Path) -> None:
    if file.stem not in (*SETTINGS_FILES, SEALED_FACTS):
        return
    try:
        found = read_settings(file)
    except ConfigError as fault:
        facts.unread.append(str(fault))
        return
    if file.stem == SEALED_FACTS:
        _take(facts, found)
    else:
        facts.config = facts.config or found


# --- The effective precision: the dtype a matrix product really has where the model runs.


@dataclass(frozen=True, slots=True)
class Probe:
    """What was run, where, and what came out."""

    dtype: str
    how: str
    """A sentence with numbers: which operation, how often."""
    device: str
    autocast: str | None = None
    """The dtype autocast has inside the context, None if it is off there."""


def probe_precision(
    model: nn.Module, device: torch.device, framework: FrameworkFacts, step: TracedStep | None
) -> Probe:
    """Take the model's own products in its real step; without a batch, one product of ours."""
    dtype, autocast = _one_product(model, device, framework)
    if step is None or not step.dtypes:
        how = f"a matrix product in {framework.name} on {device.type} came out as {dtype}"
        return Probe(dtype, how, device.type, autocast)
    ((dtype, times),) = step.dtypes.most_common(1)
    how = (
        f"{times} of {step.dtypes.total()} matrix products of the real step on {device.type} "
        f"came out as {dtype}"
    )
    if autocast != dtype:
        autocast = None
    return Probe(dtype, how, device.type, autocast)


def _one_product(
    model: nn.Module, device: torch.device, framework: FrameworkFacts
) -> tuple[str, str | None]:
    """Dtype of a small product of the parameters' dtype, and of autocast where it was run."""
    dtype = torch.get_default_dtype()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtype = parameter.dtype
            break
    operand = torch.ones(2, 2, device=device, dtype=dtype)
    autocast = None
    with warnings.catch_warnings(), torch.no_grad():
        # A framework may warn of a context that is opened outside of its training loop.
        warnings.simplefilter("ignore")
        with framework.opened():
            product = operand @ operand
            if torch.is_autocast_enabled(device.type):
                autocast = dtype_name(torch.get_autocast_dtype(device.type))
    return dtype_name(product.dtype), autocast


# --- Everything that is measured about a subject, each thing once and only if an item asks for
# it.


BUILD = "give TARGET as module:function whose function returns"


@dataclass(frozen=True, slots=True)
class CheckContext:
    """How the check was started."""

    folder: Path
    """Where the project's source lies."""
    script: Path | None = None
    """The program that is checked; None where only a configuration or data is given."""
    config_file: Path | None = None
    tracked: Tracked | None = None
    """The configuration the build function was called with."""
    why_untracked: str = (
        "give TARGET as module:function whose function takes the configuration, and --config FILE"
    )


class Inspection:
    """Lazy facts about a subject. Raises NotGiven, which says what to give, for what is missing."""

    def __init__(
        self,
        subject: Subject,
        context: CheckContext,
        progress: Progress | None = None,
        *,
        verified: Verification | None = None,
    ) -> None:
        self.subject = subject
        self.context = context
        self._progress = progress
        self._verified = verified

    @property
    def model(self) -> nn.Module:
        if self.subject.model is None:
            raise NotGiven(f"{BUILD} the model")
        return self.subject.model

    @property
    def optimizer(self) -> Optimizer:
        if self.subject.optimizer is None:
            raise NotGiven(f"{BUILD} the optimizer")
        return self.subject.optimizer

    @property
    def scheduler(self) -> Any:
        if self.subject.scheduler is None:
            raise NotGiven(f"{BUILD} the scheduler")
        return self.subject.scheduler

    @cached_property
    def config(self) -> dict[str, Any]:
        """Empty if there is none."""
        if self.subject.config is None:
            return {}
        return plain(self.subject.config)

    def needed_config(self) -> dict[str, Any]:
        if self.subject.config is None:
            raise NotGiven("give --config FILE")
        return self.config

    def setting(self, meaning: str) -> Setting | None:
        return find(self.config, meaning)

    def number(self, meaning: str) -> float | None:
        return number(self.config, meaning)

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps of the run, if they are given or configured."""
        found: float | None = self.subject.steps
        if found is None:
            found = self.number("steps")
        if found is None or found <= 0:
            return None
        return int(found)

    @cached_property
    def launcher(self) -> Launcher:
        return read_launcher(self.subject.launcher or {}, self.subject.launcher_name, os.environ)

    @cached_property
    def framework(self) -> FrameworkFacts:
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
        sizes: dict[str, int] = {}
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                name = real_format(str(parameter.dtype))
                sizes[name] = sizes.get(name, 0) + parameter.numel()
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    @property
    def device(self) -> torch.device:
        for parameter in self.model.parameters():
            return parameter.device
        return torch.device("cpu")

    @cached_property
    def batch(self) -> Any:
        """One batch: given, from the loader, or of the first examples of the dataset."""
        if self.subject.batch is not None:
            return self.subject.batch
        try:
            with kept_rng():
                batch = self._first_batch()
        except Exception as fault:
            raise NotGiven(
                f"the first batch could not be made ({one_line(fault, 100)}); return a `batch`"
            ) from fault
        if batch is None:
            raise NotGiven(f"{BUILD} a batch, loader or dataset")
        return batch

    def _first_batch(self) -> Any:
        if self.subject.loader is not None:
            return first_batch(self.subject.loader)
        dataset = self.subject.dataset
        if dataset is None or not is_map(dataset) or not len(dataset):
            return None
        size = min(len(dataset), int(self.number("batch_size") or 2))
        return default_collate([dataset[index] for index in range(size)])

    @cached_property
    def traced_step(self) -> TracedStep:
        """A forward and backward pass of the real step."""
        self._needs_weights()
        step = trace_step(self.subject, self.framework, self.batch)
        if step.fault and self.subject.loss_fn is None:
            # How the model is called was a guess, so its exception proves nothing.
            raise NotGiven(
                f"return `loss_fn`; the model alone cannot be called with a batch ({step.fault})"
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
        opened = self.program.autocast if self.context.script is not None else ""
        if step is None and opened and not self.framework.openers:
            raise NotGiven(
                f"return `loss_fn` and a batch, or `autocast`: the program opens it at {opened}"
            )
        try:
            probe = probe_precision(self.model, self.device, self.framework, step)
            if opened and not self.framework.openers and probe.dtype in self.param_dtypes:
                probe = replace(probe, how=f"{probe.how}; autocast at {opened} did not change it")
            return probe
        except StepguardError:
            raise
        except Exception as fault:
            raise NotGiven(
                f"{self.framework.name} cannot be opened here ({one_line(fault, 100)}); give the "
                "one that works here"
            ) from fault

    @cached_property
    def schedule(self) -> DryRun:
        """The schedule, tried on a copy."""
        return dry_run(self.optimizer, self.scheduler, self.steps)

    @cached_property
    def data(self) -> DataFacts:
        source = source_of(self.subject)
        if source is None:
            raise NotGiven(
                f"give --data PATH, or {BUILD.removeprefix('give ')} a dataset, loader or batch"
            )
        labels = LabelFacts(key=self.subject.label_key, ignore_index=self.subject.ignore_index)
        with kept_rng():
            return gather(source, labels, self._progress)

    @cached_property
    def validation(self) -> DataFacts:
        source = validation_of(self.subject)
        if source is None:
            raise NotGiven("give --validation PATH, or return a `validation` dataset")
        with kept_rng():
            return gather(source, LabelFacts(), self._progress)

    @cached_property
    def verified(self) -> Verification:
        """The checkpoint as `stepguard verify` sees it."""
        if self._verified is not None:
            return self._verified
        return verify(self._checkpoint_path())

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
    def project(self) -> Project:
        """The source below the folder the check was started in."""
        leave_out: frozenset[Path] = frozenset()
        if self.context.config_file is not None:
            # A configuration in Python names all its keys, which is not a use of them.
            leave_out = frozenset({self.context.config_file.resolve()})
        return read_project(self.context.folder, leave_out=leave_out)

    @cached_property
    def program(self) -> Program:
        """The source of the program itself: its script, and what that imports from the folder."""
        return read_program(self.context.folder, self.context.script)


# --- Items: a stable id, a title, and a function that looks at the inspection and answers.


Look = Callable[[Inspection], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that is checked."""

    id: str
    """Stable, `section.name`."""
    title: str
    """What is expected."""
    look: Look
    last: bool = False
    """Run after all other items, because any of them may read a key of the configuration."""


def item(id: str, title: str, *, last: bool = False) -> Callable[[Look], Item]:
    """Turn a function of the inspection into an item; `items/__init__.py` collects them."""

    def make(look: Look) -> Item:
        return Item(id=id, title=title, look=look, last=last)

    return make
