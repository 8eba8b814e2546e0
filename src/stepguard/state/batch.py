"""Walk a batch, whatever containers it is made of: name its tensors, rebuild it with others."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections import deque, namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.state.buffers import BufferKeeper
from stepguard.state.python_state import is_array
from stepguard.state.rng import RngState
from stepguard.tensors.names import dotted, is_distributed, optimizer_parameters, sharded_like
from stepguard.tensors.values import is_finite, local_part

# --- Walk a batch, whatever containers it is made of: name its tensors, rebuild it with others.


OUTPUT_GRADIENT = "output gradient"
"""Key beside the arguments of a recorded model call: the gradients that its outputs received.
They are not part of the batch.
"""


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of everything directly inside a container; nothing for a leaf."""
    if isinstance(value, Tensor | nn.Module | type):
        return
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items() if key != OUTPUT_GRADIENT)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from zip(map(str, itertools.count()), value, strict=False)
    elif is_record(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__"):
        # An object of the user's own class: only the tensors on it.
        yield from ((name, item) for name, item in vars(value).items() if isinstance(item, Tensor))


def with_children(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Build the same container with `change(key, child)` in the place of every child."""
    if type(value) is dict:
        return {key: change(str(key), item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # A named tuple takes its items one by one.
        return type(value)(*map(change, value._fields, value))
    if isinstance(value, list | tuple):
        items = [change(str(position), item) for position, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, MutableMapping):
        twin: Any = copy.copy(value)
        for key, item in value.items():
            twin[key] = change(str(key), item)
        return twin
    attributes = list(children(value))
    if not attributes or isinstance(value, Mapping):
        return value
    twin = copy.copy(value)
    for name, item in attributes:
        # A frozen dataclass refuses setattr.
        object.__setattr__(twin, name, change(name, item))
    return twin


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (`x`, tensor) for mappings, (`0`, tensor) for sequences, dotted where nested.

    The name of a batch that is one tensor is "".
    """
    if isinstance(batch, Tensor):
        yield name, batch
        return
    for key, value in children(batch):
        yield from named_tensors(value, dotted(name, key))


def tensors_in(batch: Any) -> list[Tensor]:
    """Every tensor that `named_tensors` yields, in no order that means anything."""
    found: list[Tensor] = []
    waiting = [batch]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif type(item) is tuple or type(item) is list:
            waiting += item
        else:
            waiting += [value for _, value in children(item)]
    return found


def tensor_label(name: str) -> str:
    """Return `batch:x`, or `batch` for a batch that is one tensor."""
    if name:
        return f"batch:{name}"
    return "batch"


def rebuild(batch: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Build the same tree with every tensor passed through `change(label, tensor)`."""
    if isinstance(batch, Tensor):
        return change(tensor_label(name), batch)
    return with_children(batch, lambda key, item: rebuild(item, change, dotted(name, key)))


def bad_batch_tensors(batches: tuple[Any, ...]) -> list[str]:
    """Return `batch:KEY` of every tensor with a non-finite element, each named once."""
    labels: list[str] = []
    for batch in batches:
        for name, tensor in named_tensors(batch):
            label = tensor_label(name)
            if label not in labels and not is_finite(tensor):
                labels.append(label)
    return labels


def is_record(value: Any) -> bool:
    """True for an instance of a dataclass; a dataclass itself is not one."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# --- Count the samples of a batch and cut some of them out. Refuses what might be cut wrongly.


CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    PurePath,
    torch.dtype,
    torch.device,
    type(None),
)
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})

Layout = Literal["parts", "samples", "constant", "unclear"]
"""What the entries of a list are: parts of all samples, samples, or the same for all samples."""


def samples_in(batch: Any) -> int | None:
    """Count the samples; None if the parts do not agree or may not be cut safely."""
    try:
        parts = list(_parts(batch))
        candidates: list[int] = []
        for part in parts:
            if isinstance(part, Tensor) and part.dim():
                if _is_dense(part):
                    candidates.append(int(part.shape[0]))
                break
        for part in parts:
            if isinstance(part, list | tuple) and _holds_tensors(part):
                candidates.append(len(part))
        for count in candidates:
            if _fits(batch, count, root=True):
                return count
    except Exception:
        # a container class of the user's may raise anything
        return None
    return None


def sample_count(batch: Any) -> int:
    """Count the samples: what all parts agree on, else the first leading size, else 0."""
    agreed = samples_in(batch)
    if agreed is not None:
        return agreed
    for _, tensor in named_tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return 0


def subset(batch: Any, keep: Sequence[int], count: int) -> Any:
    """Keep only these samples. Tensors and lists whose leading size is not `count` stay whole."""
    recorded_call = isinstance(batch, Mapping) and OUTPUT_GRADIENT in batch
    if not recorded_call and samples_in(batch) == count:
        return _cut(batch, list(keep), count, root=True)

    def has_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count

    def pick(value: Any, in_dict: bool) -> Any:
        if isinstance(value, Tensor):
            if has_rows(value):
                return _cut_tensor(value, list(keep))
            return value
        in_dict = in_dict and isinstance(value, dict | list)
        # One entry a sample, such as file names or images of different sizes. Where each entry
        # holds all samples, as many tensors as samples is a coincidence.
        if isinstance(value, list):
            if in_dict and len(value) == count and not any(map(has_rows, value)):
                value = [value[sample] for sample in keep]
            in_dict = False
        return with_children(value, lambda _, item: pick(item, in_dict))

    return pick(batch, in_dict=True)


def batch_without(batch: Any, rows: Collection[int]) -> Any | None:
    """The batch without these samples, in new tensors; the given one stays as it is.

    None where it cannot be cut safely: its parts have no common first dimension (a graph, a packed
    sequence, a sparse tensor), a class with unknown parts, a row it does not have, or nothing left.
    """
    count = samples_in(batch)
    bad = set(rows)
    if count is None or not bad or len(bad) == count:
        return None
    if min(bad) < 0 or max(bad) >= count:
        return None
    try:
        keep = [row for row in range(count) if row not in bad]
        return _cut(batch, keep, count, root=True)
    except Exception:
        # a container class of the user's that cannot be copied, or refuses other sizes
        return None


def part_named(batch: Any, key: str) -> Any:
    """Return the part with this name: a key, field or position, dotted where nested; or None."""
    for child, value in children(batch):
        if child == key:
            return value
        if key.startswith(f"{child}."):
            return part_named(value, key[len(child) + 1 :])
    return None


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in ATOMS or isinstance(value, PackedSequence):
        return
    for _, child in children(value):
        if type(child) not in ATOMS:
            yield from _parts(child)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(part, Tensor) for part in _parts(value))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _fits(value: Any, count: int, *, root: bool = False) -> bool:
    """Does every part have one row for each of `count` samples, or not depend on samples?"""
    if isinstance(value, Tensor) and not _is_dense(value):
        return False
    if isinstance(value, Tensor) or is_array(value):
        # A scalar belongs to all samples; else the first dimension counts them.
        return not value.ndim or int(value.shape[0]) == count
    if isinstance(value, PackedSequence):
        return False
    if _is_plain_sequence(value):
        return _layout(value, count, root) != "unclear"
    if isinstance(value, Mapping | tuple) or is_record(value):
        return all(_fits(child, count) for _, child in children(value))
    return isinstance(value, CONSTANTS)


def _layout(value: Sequence[Any], count: int, root: bool) -> Layout:
    length_fits = len(value) == count
    if not any(_holds_tensors(item) or is_array(item) for item in value):
        return "samples" if length_fits else "constant"
    parts_fit = all(_fits(item, count) for item in value)
    if root:
        if parts_fit:
            return "parts"
        # A tuple (inputs, weights) is not a list of samples; a list of dicts or pairs may be one.
        alike = isinstance(value, list) and len({type(item) for item in value}) == 1
        length_fits = length_fits and alike and not isinstance(value[0], Tensor)
    # Both fit: two views of two samples, or two images with two channels.
    if parts_fit == length_fits:
        return "unclear"
    return "parts" if parts_fit else "samples"


def _cut(value: Any, keep: list[int], count: int, *, root: bool = False) -> Any:
    if isinstance(value, Tensor):
        return _cut_tensor(value, keep)
    if is_array(value):
        return value[keep] if value.ndim else value
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        raise TypeError(f"a {type(value).__name__} cannot be changed")
    if not _is_plain_sequence(value):
        return with_children(value, lambda _, item: _cut(item, keep, count))
    layout = _layout(value, count, root)
    if layout == "constant":
        return value
    if layout == "parts":
        items = [_cut(item, keep, count) for item in value]
    else:
        items = [value[row] for row in keep]
    return tuple(items) if type(value) is tuple else items


def _cut_tensor(tensor: Tensor, keep: list[int]) -> Tensor:
    if not tensor.dim():
        return tensor
    chosen = torch.tensor(keep, dtype=torch.long, device=tensor.device)
    return tensor.detach().index_select(0, chosen).requires_grad_(tensor.requires_grad)


# --- What one step was made of, kept just long enough to run it again.


PARALLEL_WRAPPERS = ("DistributedDataParallel", "DataParallel")

WANTED = "return one scalar tensor, for instance loss.mean(), or a dict of named scalar tensors"

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
ModelFn = Callable[[Any], tuple[list[Tensor], list[Tensor | None]]]
"""Runs a watched model on a recorded call; returns its outputs and the gradients they got."""


@dataclass(slots=True)
class Step:
    """One optimizer step with all that a replay needs. Only RNG states are copies."""

    index: int
    model: nn.Module
    optimizer: Optimizer
    modules: dict[str, nn.Module]
    """Further modules by name, such as a criterion."""
    buffers: BufferKeeper
    """Already holds the values from before the step."""
    loss_fn: LossFn | None = None
    """None in `watch` mode, where the guard does not run the step."""
    micro_batches: tuple[Any, ...] = ()
    rng: list[RngState] = field(default_factory=list)
    """State before each micro-batch."""
    began: RngState | None = None
    """State before the whole step, where that is not the first of `rng`."""
    scale: float = 1.0
    """What the loss was multiplied by before backward."""
    clip_norm: float | None = None
    grads_gone: bool = False
    """The loop has dropped or replaced this step's gradients; those present are of another step."""
    model_fn: ModelFn | None = None
    """`watch` mode: the model's part of the step; `micro_batches` are then calls of the model."""
    sharded: bool = False
    """The model's parameters are spread over ranks: no rank can run any of it alone."""
    gathered: bool = False
    """This rank holds all parameters at the moment, by a plan of all ranks."""
    not_gathered: str = ""
    """Why the ranks have agreed on no such plan."""
    summed_in_half: bool = False
    """`watch` mode: the loss was added up in float16."""
    lines: tuple[tuple[Any, ...] | None, ...] = ()
    """`watch` mode: the line that called the model, for each call (`locate.source.Line`)."""
    expressions: Sequence[list[Any]] = ()
    """`watch` mode: what lies between the model and each loss (`locate.loss_graph.Expression`)."""

    @property
    def replayable(self) -> bool:
        """Can the step be run again from batch to loss, by this rank alone?"""
        return self.loss_fn is not None and self._runs_alone

    @property
    def repeatable(self) -> bool:
        """Can the step be run again by all ranks together?"""
        return self.loss_fn is not None

    @property
    def _runs_alone(self) -> bool:
        return self.gathered or not self.sharded

    @property
    def model_only(self) -> bool:
        """Can only the model's part be run again?"""
        if not self._runs_alone or self.loss_fn is not None:
            return False
        return self.model_fn is not None and bool(self.micro_batches)

    @property
    def start(self) -> RngState | None:
        """Random numbers before the step; None if the guard did not run it."""
        if self.began is not None:
            return self.began
        return self.rng[0] if self.rng else None

    def given_gradients(self) -> list[Tensor]:
        """Return what a backward pass by this rank alone leaves gradients in."""
        if self.gathered:
            # The optimizer holds the shards, which get none of it.
            return [p for root in self.named_roots().values() for p in root.parameters()]
        return optimizer_parameters(self.optimizer)

    def named_roots(self) -> dict[str, nn.Module]:
        """Return the root modules by the prefix of their names; the model's is ""."""
        return {"": unwrapped(self.model), **self.modules}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside DistributedDataParallel or torch.compile's wrapper."""
    # a module takes microseconds to say that it lacks an attribute
    inner = model._modules.get("_orig_mod")
    if inner is None and type(model).__name__ in PARALLEL_WRAPPERS:
        inner = getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        return model
    return unwrapped(inner)


def total_loss(output: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the scalar, or the sum of named scalars, that a loss function gave; else raise."""
    parts: Mapping[str, Any] = {"": output}
    if isinstance(output, Mapping):
        parts = output
    if not parts:
        raise ConfigError(f"loss_fn returned an empty dict; {WANTED}.")
    for name, part in parts.items():
        of = ""
        if isinstance(output, Mapping):
            of = f" for {name!r}"
        if not isinstance(part, Tensor):
            raise ConfigError(f"loss_fn returned{of} a {type(part).__name__}; {WANTED}.")
        if part.numel() != 1:
            shape = tuple(part.shape)
            raise ConfigError(f"loss_fn returned{of} a tensor of shape {shape}; {WANTED}.")
    first, *more = parts.values()
    total: Tensor = sum(more, start=first)
    return total


# --- Turn any tree of values into tensors plus JSON, and back: nothing read can execute code.


SCALARS = (str, int, bool, type(None))
"""What stands in JSON as it is."""
DEEPEST_TREE = 64
"""Containers inside containers; deeper ones are refused, in both directions."""


class NotPlainError(ValueError):
    """A value that is neither a tensor, a container, nor a plain scalar."""


class Attributed(dict[str, Any]):
    """Stands for a mapping whose keys are also attributes, as the batches of tokenizers are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(slots=True)
class KnownTensors:
    """Tensors that have a name already: each is kept once and referred to from then on."""

    parameters: Mapping[int, str] = field(default_factory=dict)
    """Names by the id of the parameter."""
    seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """By id. The tensor itself is held, so that no other tensor gets its id."""


def tree_to_json(
    value: Any,
    tensors: dict[str, Tensor],
    name: str,
    depth: int = 0,
    *,
    known: KnownTensors | None = None,
) -> Any:
    """Return the structure as JSON; put each tensor into `tensors`, under the name it refers to.

    Tensors are not copied. Raises NotPlainError for a value that cannot be kept.
    """
    if depth > DEEPEST_TREE:
        raise NotPlainError(f"{name} is nested deeper than {DEEPEST_TREE} levels.")
    if type(value) in SCALARS:
        return value
    if type(value) is float:
        # JSON has neither NaN nor Inf, and repr keeps every bit of a float.
        return {"float": repr(value)}
    known = known or KnownTensors()
    parameters = known.parameters
    if isinstance(value, Tensor):
        if id(value) in parameters:
            return {"parameter": parameters[id(value)]}
        _, name = known.seen.setdefault(id(value), (value, name))
        tensors[name] = value.detach()
        return {"tensor": name, "requires_grad": value.requires_grad, "device": value.device.type}

    def below(key: Any, item: Any) -> Any:
        shown = key
        if isinstance(key, Tensor):
            shown = parameters.get(id(key), "tensor")
        return tree_to_json(item, tensors, f"{name}/{shown}", depth + 1, known=known)

    if isinstance(value, Mapping):
        items = []
        for key, item in value.items():
            _refuse_key(key, name, parameters)
            items.append([tree_to_json(key, tensors, name, known=known), below(key, item)])
        return {"mapping": items, "attributes": type(value) is not dict}
    if isinstance(value, list | tuple | deque) or is_record(value):
        return _sequence_to_json(value, below)
    if hasattr(value, "__array__"):
        array = tree_to_json(torch.as_tensor(value), tensors, name, depth + 1)
        # A number of numpy is an array without a length.
        number = type(value).__module__ == "numpy" and not hasattr(value, "__len__")
        return {"array": array, "number": number}
    raise NotPlainError(
        f"{name} is a {type(value).__name__}; only tensors, containers and plain values can be "
        f"kept."
    )


def _sequence_to_json(value: Any, below: Callable[[Any, Any], Any]) -> Any:
    named = hasattr(value, "_fields")
    if named or is_record(value):
        return {
            "fields": [[key, below(key, item)] for key, item in children(value)],
            "named": named,
        }
    entries = [below(index, item) for index, item in enumerate(value)]
    if isinstance(value, deque):
        return {"deque": entries, "most": value.maxlen}
    return entries if isinstance(value, list) else {"tuple": entries}


def _refuse_key(key: Any, name: str, parameters: Mapping[int, str]) -> None:
    if type(key) not in (*SCALARS, float) and id(key) not in parameters:
        kind = type(key).__name__
        raise NotPlainError(f"{name} has a {kind} as a key; only plain values can be kept.")


def tree_from_json(
    structure: Any, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor] | None = None
) -> Any:
    """Invert `tree_to_json`; ValueError, TypeError or KeyError for what that never writes.

    `parameters`: the live ones by name, for what refers to them.
    """
    return Refill(tensors, parameters or {}).value(None, structure)


class Refill:
    """Puts one saved state back. A tensor that was kept once and referred to twice is made once."""

    def __init__(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._parameters = parameters
        self._made: dict[str, Tensor] = {}

    def value(self, live: Any, structure: Any, like: Tensor | None = None) -> Any:
        """Return the saved value; the live object itself, refilled, if it can hold it.

        `like`: the parameter that the value belongs to; a tensor that is made goes where that is.
        """
        if isinstance(structure, list):
            items = self._items(live, structure, like)
            if type(live) is not list:
                return items
            live[:] = items
            return live
        if not isinstance(structure, dict):
            return structure
        if "float" in structure:
            number = float(structure["float"])
            # The one NaN object of the module: containers compare it by identity.
            return math.nan if math.isnan(number) else number
        if "tensor" in structure:
            return self._tensor(live, structure, like)
        if "parameter" in structure:
            return self._parameters[structure["parameter"]]
        if "array" in structure:
            array = self.value(None, structure["array"]).numpy()
            return array[()] if structure.get("number") else array
        if "mapping" in structure:
            return self._mapping(live, structure, like)
        if "fields" in structure:
            return self._record(live, structure, like)
        if "tuple" in structure:
            return tuple(self._items(live, structure["tuple"], like))
        items = self._items(live, structure["deque"], like)
        if type(live) is not deque or live.maxlen != structure["most"]:
            return deque(items, maxlen=structure["most"])
        live.clear()
        live.extend(items)
        return live

    def _tensor(self, live: Any, structure: Any, like: Tensor | None) -> Tensor:
        name = structure["tensor"]
        kept = self._tensors[name]
        if isinstance(live, Tensor):
            part = local_part(live.detach())
            if (part.shape, part.dtype) == (kept.shape, kept.dtype):
                part.copy_(kept)
                return live
        if name in self._made:
            return self._made[name]
        made = kept.clone()
        if structure.get("device", "cpu") != "cpu" and torch.accelerator.is_available():
            made = made.to(torch.accelerator.current_accelerator())
        made = made.requires_grad_(bool(structure.get("requires_grad")))
        # Counters stay on the host, as torch's own optimizers keep them.
        if like is not None and made.dim():
            made = made.to(like.device)
            if is_distributed(like) and made.shape == local_part(like.detach()).shape:
                made = sharded_like(like, made)
        self._made[name] = made
        return made

    def _mapping(self, live: Any, structure: Any, like: Tensor | None) -> Any:
        saved = {self.value(None, key): item for key, item in structure["mapping"]}
        if not isinstance(live, MutableMapping):
            live = Attributed() if structure.get("attributes") else {}
        for key in live.keys() - saved.keys():
            del live[key]
        for key, item in saved.items():
            live[key] = self.value(live.get(key), item, like)
        return live

    def _record(self, live: Any, structure: Any, like: Tensor | None) -> Any:
        """Return a named tuple or a dataclass: a look-alike where no live one shows the class."""
        fields: dict[str, Any] = {}
        for name, item in structure["fields"]:
            if not str(name).isidentifier() or str(name).startswith("_"):
                raise ValueError(f"{name!r} is not a name of a field")
            fields[str(name)] = self.value(getattr(live, name, None), item, like)
        if structure["named"]:
            if isinstance(live, tuple) and hasattr(live, "_replace"):
                return live._replace(**fields)
            return namedtuple("Batch", list(fields))(*fields.values())
        if is_record(live):
            return dataclasses.replace(live, **fields)
        return dataclasses.make_dataclass("Batch", list(fields))(*fields.values())

    def _items(self, live: Any, saved: list[Any], like: Tensor | None) -> list[Any]:
        before: Sequence[Any] = ()
        if type(live) in (list, tuple, deque):
            before = list(live)
        pairs = itertools.zip_longest(before[: len(saved)], saved)
        return [self.value(one, item, like) for one, item in pairs]


def in_containers_of(live: Any, value: Any) -> Any:
    """Return the value in the containers of the live one: a Counter stays a Counter."""
    if isinstance(live, Mapping) and isinstance(value, Mapping):
        items = {key: in_containers_of(live.get(key), item) for key, item in value.items()}
        if type(live) is dict or not isinstance(live, MutableMapping):
            return items
        # A copy keeps what the class adds, such as the factory of a defaultdict.
        twin = copy.copy(live)
        twin.clear()
        twin.update(items)
        return twin
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        return value.to(live.device)
    if not isinstance(live, list | tuple) or not isinstance(value, list | tuple):
        return value
    if len(live) != len(value):
        return value
    return type(value)(map(in_containers_of, live, value))
