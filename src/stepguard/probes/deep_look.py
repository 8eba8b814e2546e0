"""One health probe: begin before the forward pass, end after the update, and get a record."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import lt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.locate.live_trace import leave
from stepguard.locate.operands import (
    TAKES_INFINITY,
    TESTS,
    UNINITIALISED,
    Operator,
    aten,
    describe,
    numeric,
    plain,
    storage_key,
)
from stepguard.locate.source import ModuleSpans
from stepguard.probes.statistics import (
    SAMPLE,
    Numbers,
    Recomputed,
    Rows,
    SeenBatch,
    Updates,
    bits_between,
    root_mean_square,
    rounded_to_zero,
    sampled,
    share_of,
    statistics_of,
)
from stepguard.records.probes import (
    AttentionLook,
    Look,
    NormLook,
    ParameterLook,
    RouterLook,
    Stage,
    StepFacts,
    TensorLook,
    UnitLook,
)
from stepguard.state import sharded
from stepguard.tensors.names import (
    named_buffers,
    named_modules,
    named_parameters,
    optimizer_parameter_ids,
)
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    transforms,
)
from stepguard.tensors.values import dtype_name, is_lazy

# --- What the look notes of loss functions (are they given what they take, and does all of it
# count?), and of attention, normalisation and activations.


PROBABILITIES = ("SoftmaxBackward0", "SigmoidBackward0", "HardsigmoidBackward0")
RANGES = {
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "HardsigmoidBackward0": ("hardsigmoid", 0.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("relu", 0.0, math.inf),
}
"""Activations that bound the output of a model."""
SHAPES_ONLY = aten(
    "View UnsafeView ReshapeAlias Squeeze Unsqueeze Select Slice Transpose T Permute Expand Clone "
    "ToCopy Alias Split Unbind Index Flatten"
)
"""Operations that leave values as they are."""
LOG_SOFTMAX = aten("_log_softmax")
NLL = aten("nll_loss_forward nll_loss2d_forward")
LOGITS = "aten.binary_cross_entropy_with_logits"
REGRESSION = aten("mse_loss smooth_l1_loss huber_loss")
COMBINES = aten("sub mul add")
SUMS = ("AddBackward0", "SubBackward0")
PASSES = ("NegBackward0", "ToCopyBackward0", "MulBackward0", "DivBackward0", "SumBackward0")
SOFTMAX = aten("_softmax _safe_softmax")
FUSED_ATTENTION = aten(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)
NORMS = aten(
    "native_layer_norm native_batch_norm _native_batch_norm_legit native_group_norm "
    "_native_batch_norm_legit_functional cudnn_batch_norm miopen_batch_norm _fused_rms_norm"
)
RECTIFIERS = aten("relu relu_ threshold clamp_min hardtanh hardtanh_")
SATURATING = {"aten.sigmoid": (0.01, 0.99), "aten.tanh": (-0.99, 0.99)}
OFF_BY = 0.1
"""Logarithm of a sum of probabilities that is not 0 by rounding."""
MOST_ROWS, MOST_QUERIES, MOST_KEYS = 2048, 64, 4096
"""Parts of an attention that are inspected."""
SOFTMAX_TWICE = "softmax_twice"


class StepNotes:
    """Measurements of losses and layers, on the device, and what was seen without any number."""

    def __init__(self, numbers: Numbers, trained: set[int], known: set[int]) -> None:
        """`trained`: identities of the parameters that this guard's optimizer updates, `known`: of
        all tensors that a model or an optimizer of the process has.
        """
        self._numbers = numbers
        self._trained = trained
        self._known = known
        self.outsiders: list[Tensor] = []
        """Tensors with a gradient that are not known, each once, in the order of their use."""
        self._seen: dict[str, Any] = {"single_class": False, "parts_without_gradient": 0}
        self._mixed_up: dict[str, str] = {}
        self._cut: set[int] = set()
        """Memory of results that trained parameters have a part in."""
        self._constant_terms: set[int] = set()
        """Numbers of the autograd nodes that add such a result without a gradient."""
        self._product: tuple[int, Tensor] | None = None
        """Memory of the first factor of the last product, and its second factor: kl_div's target
        and input."""
        self._classes = 0
        self._spread = False

    def before(self, operator: Operator, args: Any, module: str | None) -> None:
        """Note what goes in, which the operation may overwrite."""
        name = operator.name
        given = [value for value in args if isinstance(value, Tensor)]
        self._note_leaves(given, module)
        if name in LOG_SOFTMAX:
            self._note_log_softmax(args[0], args[1], module)
        elif name in NLL:
            self._note_logs(args)
            self._numbers.add(
                "targets", {"labels": args[1].numel()}, ignored=(args[1] == args[4]).sum()
            )
        elif name == LOGITS:
            self._is_probability("binary_cross_entropy_with_logits", args[0])
            self._note_reach(args[0], args[1], logits=True)
            self._note_spread(args[0])
        elif name in REGRESSION:
            self._note_shapes(name, args[0], args[1])
            self._note_reach(args[0], args[1])
            self._note_spread(args[0])
        elif name in COMBINES and not module and len(given) > 1:
            self._note_combined(name, given[0], given[1])
        elif name in ("aten.xlogy", "aten.exp") and self._product is not None and given:
            self._note_divergence(given[0], *self._product)
            self._product = None

    def _note_leaves(self, given: list[Tensor], module: str | None) -> None:
        for one in given:
            if not one.requires_grad or not one.is_leaf or id(one) in self._known:
                continue
            # Elements of a tensor that a loss may learn beside a model: weights of tasks, a
            # temperature
            learns = isinstance(one, nn.Parameter) or (module is None and one.numel() <= 16)
            if module is not None and not isinstance(one, nn.Parameter):
                self._known.add(id(one))  # an input whose gradient is wanted
            elif learns and not any(one is other for other in self.outsiders):
                self.outsiders.append(one)

    def _note_log_softmax(self, logits: Tensor, dim: int, module: str | None) -> None:
        self._is_probability("cross_entropy", logits)
        self._seen["single_class"] |= not module and logits.shape[dim] == 1
        self._note_spread(logits)
        if logits.dim() > 1:
            self._note_log_sums(SOFTMAX_TWICE, logits, dim)

    def _note_divergence(self, given: Tensor, target: int, learned: Tensor) -> None:
        if storage_key(given) == target and not self._is_probability("kl_div", learned):
            logs = _maker(learned) == "LogSoftmaxBackward0"
            if not logs and learned.dim() > 1:
                self._note_log_sums("kl_div", learned, -1)

    def _is_probability(self, loss: str, given: Tensor) -> bool:
        """Probabilities are neither the logits nor the logarithms that a loss takes."""
        found = _maker(given) in PROBABILITIES
        if found:
            self._mixed_up[loss] = "probabilities"
        return found

    def _note_logs(self, args: Any) -> None:
        """Probabilities of one sample sum to 1, so their logarithms do not exceed 0."""
        values, target = args[0], args[1]
        if values.dim() < 2 or values.shape[1] < 2:
            return
        if not self._is_probability("nll_loss", values):
            node = values.grad_fn
            summed = None
            if node is not None and node.name() == "LogSoftmaxBackward0":
                # autograd keeps the axis as an unsigned number
                axis = node._saved_dim
                summed = (axis - 2**64 if axis >= 2**63 else axis) % values.dim()
            if summed not in (None, 1):
                self._mixed_up["nll_loss"] = "a log_softmax over another axis"
            else:
                self._note_log_sums("nll_loss", values, 1)
        classes = values.shape[1]
        # more classes are not counted
        if values.dim() == 2 and classes <= 1024 and args[2] is None:
            counted = torch.where(target == args[4], classes, target).reshape(-1)
            counts = torch.bincount(counted, minlength=classes + 1)[:classes]
            self._numbers.add("classes", {}, counts=counts)
            self._classes += 1

    def _note_log_sums(self, loss: str, given: Tensor, dim: int) -> None:
        """Least and largest logarithm of a row's sum of exponentials; the smallest value; how far
        the sum of a row is from 1 at most.
        """
        wide = given.detach().float()
        if wide.shape[dim] > 1:
            sums = torch.logsumexp(wide, dim)
            off = (wide.sum(dim) - 1.0).abs().amax()
            measured = {"least": sums.amin(), "most": sums.amax(), "lowest": wide.amin()}
            self._numbers.add("logs", {"loss": loss}, **measured, off=off)

    def _note_shapes(self, name: str, output: Tensor, target: Tensor) -> None:
        """Two shapes that were spread over each other: (n, 1) beside (n,) makes (n, n)."""
        shapes = []
        for one in (output, target):
            sizes = zip(one.shape, one.stride(), strict=True)
            shapes.append([1 if stride == 0 else size for size, stride in sizes])
        mine = any(map(lt, shapes[0], output.shape))
        theirs = any(map(lt, shapes[1], output.shape))
        if mine and theirs and output.requires_grad != target.requires_grad:
            self._note_broadcast(name, *shapes)

    def _note_broadcast(self, name: str, one: Sequence[int], other: Sequence[int]) -> None:
        operation = name.removeprefix("aten.")
        self._seen["broadcast"] = (operation, str(list(one)), str(list(other)))

    def _note_combined(self, name: str, one: Tensor, other: Tensor) -> None:
        learned, fixed = (one, other) if one.requires_grad else (other, one)
        if not learned.requires_grad or learned.is_leaf or fixed.requires_grad:
            return
        memory = storage_key(fixed)
        if name != "aten.add" and fixed is one:
            self._product = (memory, learned)
        if one.numel() == 1 and other.numel() == 1:
            # computed from what is trained, and a constant to the backward pass
            computed = memory in self._cut and memory != storage_key(learned)
            if computed and fixed.is_floating_point():
                # the node was made, and numbered, before its operation runs
                self._constant_terms.add(next_sequence_number() - 1)
        elif one.shape == other.shape:
            if any(0 in tensor.stride() for tensor in (one, other)):
                self._note_shapes(name, learned, fixed)
        else:
            self._note_pairs(name, learned, fixed)

    def _note_pairs(self, name: str, learned: Tensor, fixed: Tensor) -> None:
        """(n, 1) beside (n,): who wants all pairs writes the axis out."""
        column, row = (learned, fixed) if learned.dim() == 2 else (fixed, learned)
        if row.dim() == 1 and len(row) > 1 and column.shape == (len(row), 1):
            node = column.grad_fn
            if node is None or not node.name().startswith("Unsqueeze"):
                self._note_broadcast(name, learned.shape, fixed.shape)

    def _note_reach(self, output: Tensor, target: Tensor, *, logits: bool = False) -> None:
        known = RANGES.get(_maker(output))
        if known is None or output.shape != target.shape or target.requires_grad:
            return
        name, low, high = known
        if logits:
            if name != "relu":
                return
            low = 0.5  # the sigmoid of 0
        values = sampled(target.detach()).float()
        # How far beyond the range of an activation a target must be, beside the spread of all
        # targets
        margin = 0.05 * values.std(correction=0)
        beyond = (values < low - margin) | (values > high + margin)
        self._numbers.add("reach", {"bound": name}, beyond=share_of(beyond))

    def _note_spread(self, output: Tensor) -> None:
        # fewer rows say nothing
        if not self._spread and output.dim() > 1 and output.shape[0] >= 8:
            self._spread = True
            some = output.detach().float()
            deviation = some.std(0, correction=0).square().mean().sqrt()
            size = some.square().mean().sqrt().clamp_min(1e-30)
            self._numbers.add("spread", {}, spread=deviation / size)

    def after(
        self, operator: Operator, args: Any, kwargs: Any, results: list[Tensor], module: str | None
    ) -> None:
        """Note what came out."""
        name = operator.name
        place = module or ""
        self._follow(args, results)
        if name in NLL and self._classes and args[3] == 1:
            self._numbers.add("entropy", {}, mean=results[0].detach())
        elif name in SOFTMAX and place:
            logits, dim = args[0].detach(), args[1]
            if logits.dim() > 2 and dim in (-1, logits.dim() - 1):
                self._note_attention(place, logits)
        elif name in FUSED_ATTENTION:
            self._note_fused(place, args, kwargs)
        elif name in NORMS:
            known = {"module": place, "dtype": str(args[0].dtype).removeprefix("torch.")}
            zeros = share_of(sampled(results[0].detach()) == 0)
            scale = root_mean_square(args[0].detach())
            self._numbers.add(NormLook, known, scale=scale, output_zeros=zeros)
        elif (name in RECTIFIERS or name in SATURATING) and results[0].dim() > 1:
            self._note_units(name, place, results[0].detach())

    def _follow(self, args: Any, results: list[Tensor]) -> None:
        """Remember what trained parameters have a part in."""
        own = False
        for value in args:
            if isinstance(value, Tensor):
                learned = not value.is_leaf or id(value) in self._trained
                own |= (value.requires_grad and learned) or storage_key(value) in self._cut
        follow = self._cut.add if own else self._cut.discard
        for result in results:
            follow(storage_key(result))

    def _note_units(self, name: str, module: str, values: Tensor) -> None:
        axis = 1 if values.dim() == 4 else values.dim() - 1
        units = values.shape[axis]
        positions = values.numel() // max(units, 1)
        known = {"module": module, "op": name, "units": units, "positions": positions}
        if name in SATURATING:
            low, high = SATURATING[name]
            sample = sampled(values)
            saturated = share_of((sample < low) | (sample > high))
            self._numbers.add(UnitLook, known, saturated=saturated)
        else:
            others = [dim for dim in range(values.dim()) if dim != axis]
            self._numbers.add(UnitLook, known, dead=share_of(values.amax(others) <= 0))

    def _note_fused(self, module: str, args: Any, kwargs: Any) -> None:
        """A fused attention keeps its logits to itself: compute some of them again."""
        query, key = args[0].detach()[:1], args[1].detach()[:1]
        if query.shape[1] != key.shape[1] or key.shape[-2] > MOST_KEYS:
            return  # grouped heads; too many keys to be cheap
        stride = max(1, query.shape[-2] // MOST_QUERIES)
        positions = torch.arange(0, query.shape[-2], stride, device=query.device)
        scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
        rows = query[:, :, positions].float() @ key.float().transpose(-2, -1) * scale
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            # a mask may have one row for all queries, and one for all heads or samples
            shown = mask.detach()[:1] if mask.dim() == 4 else mask.detach()
            rows = rows + shown.expand(*rows.shape[:2], query.shape[-2], -1)[:, :, positions]
        # `is_causal` stands behind the dropout in every fused attention, or is a keyword
        if kwargs.get("is_causal", any(argument is True for argument in args[3:])):
            keys = torch.arange(key.shape[-2], device=query.device)
            rows = rows.masked_fill(keys[None, :] > positions[:, None], -torch.inf)
        self._note_attention(module, rows)

    def _note_attention(self, module: str, logits: Tensor) -> None:
        rows = logits.reshape(-1, logits.shape[-1])
        wide = rows[:: max(1, math.ceil(len(rows) / MOST_ROWS))].float()
        # Logits below are taken for masked positions
        seen = wide > -1e4
        keys = seen.sum(-1)
        several = keys > 1
        weights = torch.softmax(wide, -1)
        entropy = -(weights * torch.log(weights.clamp_min(1e-30))).sum(-1)
        relative = entropy / torch.log(keys.clamp_min(2).float())
        count = several.sum().clamp_min(1)
        self._numbers.add(
            AttentionLook,
            {"module": module, "keys": logits.shape[-1]},
            largest_logit=torch.where(seen, wide, -torch.inf).amax(),
            entropy=torch.where(several, relative, 0.0).sum() / count,
            collapsed=(several & (weights.amax(-1) > 0.99)).sum() / count,
            uniform=(several & (relative > 0.999)).sum() / count,
        )

    def backward_begins(self, root: Tensor) -> None:
        """Count the terms of this loss that are constants to the backward pass."""
        waiting: list[Any] = [root.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            behind = [one for one, _ in node.next_functions if one is not None]
            if node.name() in SUMS:
                self._seen["parts_without_gradient"] += node._sequence_nr() in self._constant_terms
                waiting += behind
            elif node.name() in PASSES and len(behind) == 1:
                waiting += behind

    def facts(self, values: Rows) -> dict[str, Any]:
        """What was noted of the losses."""
        mixed = dict(self._mixed_up)
        found = {**self._seen, "mixed_up": mixed, "softmax_twice": False}
        for row in values["logs"]:
            if row["loss"] == SOFTMAX_TWICE:
                # rows that are between 0 and 1 and sum to 1 have been through a softmax
                # Probabilities that were rounded to bfloat16 sum to 1 within half of this
                found[SOFTMAX_TWICE] |= max(row["off"], -row["lowest"]) < 4e-3
            elif row["lowest"] >= 0.0 and row["off"] < OFF_BY:
                mixed[row["loss"]] = "probabilities"
            elif min(abs(row["least"]), abs(row["most"])) > OFF_BY and row["most"] > OFF_BY:
                mixed[row["loss"]] = "logits"
        found["labels"] = sum(row["labels"] for row in values["targets"])
        found["ignored"] = int(sum(row["ignored"] for row in values["targets"]))
        reach = [row for row in values["reach"] if row["beyond"] > 0.0]
        if reach:
            found |= max(reach, key=lambda row: row["beyond"])
        if len(values["classes"]) == 1 and len(values["entropy"]) == 1:
            found["classes"] = tuple(map(int, values["classes"][0]["counts"]))
            found["cross_entropy"] = values["entropy"][0]["mean"]
        for row in values["spread"]:
            found |= row
        return found


def _maker(tensor: Tensor) -> str:
    """Name of the autograd node that computed these values, behind views and casts."""
    node: Any = tensor.grad_fn
    while node is not None:
        name: str = node.name()
        if f"aten.{name.partition('Backward')[0]}" not in SHAPES_ONLY:
            return name
        node = node.next_functions[0][0] if node.next_functions else None
    return ""


# --- Routers of a mixture of experts: modules that choose some of several siblings for each token.


FEWEST_EXPERTS, MOST_EXPERTS = 4, 1024
CHOICES = {"aten.topk": 2, "aten.max": 1, "aten.argmax": 1}
"""Operations that choose along a dimension, and the place of that argument."""
GATES = aten("mm addmm bmm baddbmm linear _addmm_activation")


class Routers:
    """Measures what is chosen from scores that are as many as the experts beside them."""

    def __init__(self, numbers: Numbers, roots: Mapping[str, nn.Module]) -> None:
        self._numbers = numbers
        self._experts: dict[str, set[int]] = {}
        """Module -> how many alike parts it has in a list, or matrices in one tensor."""
        for name, module in named_modules(roots):
            counts = set()
            for part in (module, *module.children()):
                kinds = {type(one) for one in part} if isinstance(part, nn.ModuleList) else set()
                counts |= {len(part)} if len(kinds) == 1 else set()  # type: ignore[arg-type]
                own = part._parameters.values()
                counts |= {len(one) for one in own if one is not None and one.dim() == 3}
            counts = {one for one in counts if FEWEST_EXPERTS <= one <= MOST_EXPERTS}
            if counts:
                self._experts[name] = counts
        self._dtypes: dict[tuple[str, int], str] = {}
        """Owner and number of experts -> dtype of the scores."""

    def after(
        self, operator: Operator, args: Any, kwargs: Any, results: list[Tensor], module: str | None
    ) -> None:
        """Note the dtype of scores, and which experts were chosen by them."""
        name = operator.name
        if not self._experts or module is None or not (name in GATES or name in CHOICES):
            return
        scores = results[0] if name in GATES else args[0]
        experts = scores.shape[-1] if scores.dim() > 1 else 0
        # the module itself or the one around it, if it has so many experts
        around = (module, module.rpartition(".")[0])
        owner = next((one for one in around if experts in self._experts.get(one, ())), None)
        if owner is None:
            return
        if name in GATES:
            self._dtypes[owner, experts] = dtype_name(scores.dtype)
            return
        place = CHOICES[name]
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        if dim not in (-1, scores.dim() - 1) or not scores.requires_grad:
            return
        picked = results[-1].detach()
        rows = scores.detach().reshape(-1, experts)
        chosen = picked.numel() // max(len(rows), 1)
        if 0 < chosen < experts:
            best = rows.float().topk(chosen + 1, -1).values
            # a row of padding scores all experts alike
            telling = rows.amax(-1) > rows.amin(-1)
            ties = telling & (best[:, -1] == best[:, -2])
            self._numbers.add(
                RouterLook,
                {
                    "module": module,
                    "experts": experts,
                    "chosen": chosen,
                    "tokens": len(rows),
                    "dtype": self._dtypes.get((owner, experts), ""),
                },
                loads=torch.bincount(picked.reshape(-1), minlength=experts) / picked.numel(),
                ties=ties.sum() / telling.sum().clamp_min(1),
            )


# --- A dispatch mode that watches a healthy step: every operation runs once, as it would have.


CONVERSIONS = aten("_to_copy copy_")


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations between `start` and `stop`. A fault of its own ends the look only."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        trained: Iterable[int] = (),
        owned: Iterable[int] = (),
    ) -> None:
        """`trained`: identities of what this guard's optimizer updates, `owned`: of what any
        optimizer of the process does.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = ModuleSpans(dict(roots))
        self.numbers = Numbers()
        self.results = 0
        """How many results were measured."""
        known = {id(one) for root in roots.values() for one in root.parameters()}
        self.notes = StepNotes(self.numbers, set(trained), known | {*trained, *owned})
        self.routers = Routers(self.numbers, roots)
        self.recomputed = Recomputed(self.numbers)
        self.faults: dict[str, Exception] = {}
        """Why no operation is measured any more ("probe"), nothing noted of losses and layers
        ("notes"), or no checkpointed block compared ("recomputed")."""
        self.paused = False
        """The guard does work of its own, which is not part of the step."""
        self.backward_begins: Callable[[], None] | None = None
        """Called at the first operation of every backward pass."""
        self.seconds = 0.0
        self._in_backward = False
        self._last: dict[int, int] = {}
        """Which result was written to the memory at this address last."""
        self._process = os.getpid()
        self.on_the_stack = False
        """True while torch hands it every operation."""

    def start(self) -> None:
        """Begin to watch, or go on after `stop`."""
        self.paused = False
        self.on_the_stack = True
        self.modules.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Watch no more; what was seen stays. Call it again if it was called inside a backward."""
        self.paused = True
        # The engine puts the modes of its beginning back when a backward pass ends.
        if self.on_the_stack and current_autograd_node() is None:
            self.on_the_stack = False
            leave(self)
            self.modules.__exit__()

    def store(self, name: str, tensor: Tensor) -> None:
        """Make a tensor known that no operation of the step made."""
        known = {"op": name, "module": name, "stage": "stored", "absorbs": True, "parents": ()}
        self._measure(tensor, known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a worker process of a data loader inherits the mode
        elsewhere = os.getpid() != self._process or func.namespace in sharded.NAMESPACES
        # Results that are measured; a validation between two updates must not fill the memory
        full = "probe" in self.faults or self.results >= 20_000
        if self.paused or full or elsewhere:
            return func(*args, **kwargs)
        operator = describe(func)
        before = self._timed(self._before, operator, args, kwargs)
        result = func(*args, **kwargs)
        if before is not None:
            self._timed(self._after, operator, before, args, kwargs, result)
            # What passing one operation through a mode costs, besides the statistics: measured on
            # a CPU
            self.seconds += 5e-6
        return result

    def _timed(self, measure: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        found = self._try("probe", measure, *given)
        self.seconds += time.thread_time() - began
        return found

    def _try(self, part: str, measure: Callable[..., Any], *given: Any) -> Any:
        """A fault ends this part of the measurements, and nothing else."""
        if part in self.faults:
            return None
        try:
            return measure(*given)
        except Exception as fault:
            self.faults[part] = fault
            return None

    def _before(self, operator: Operator, args: Any, kwargs: Any) -> list[Tensor] | None:
        """The tensors that go in; None where the operation makes no values."""
        if operator.views or operator.name in TESTS or operator.name in UNINITIALISED:
            return None
        backward = self._stage() == "backward"
        if backward and not self._in_backward and self.backward_begins is not None:
            self.backward_begins()
        self._in_backward = backward
        entries = operator.entries(args, kwargs)
        # before it runs: an operation in place overwrites what it reads
        if not backward:
            self._try("notes", self.notes.before, operator, args, self.modules.current)
        self._try("recomputed", self.recomputed.before, operator, args, kwargs)
        return [value for _, value in entries if isinstance(value, Tensor)]

    def _after(
        self, operator: Operator, given: list[Tensor], args: Any, kwargs: Any, result: Any
    ) -> None:
        returned = result if isinstance(result, list | tuple) else [result]
        results = [one for one in returned if isinstance(one, Tensor)]
        if not results and operator.written and args:
            # an operation without a result writes its first argument
            results = [one for one in given if one is args[0]]
        stage = self._stage()
        module = self.modules.current
        if stage == "backward":
            module = self.modules.created(current_autograd_node()._sequence_nr())
        known = {
            "op": operator.name,
            "module": module or "",
            "stage": stage,
            "absorbs": operator.name in TAKES_INFINITY,
            "parents": self._parents(given),
        }
        for tensor in results:
            self._measure(tensor, known, given)
        if stage == "forward":
            for part in (self.notes.after, self.routers.after):
                self._try("notes", part, operator, args, kwargs, results, self.modules.current)
        self._try("recomputed", self.recomputed.after, operator, results, module or "")

    def _parents(self, given: list[Tensor]) -> list[int]:
        """The results that an operation was given."""
        parents = []
        for tensor in filter(numeric, given):
            key = storage_key(tensor)
            if key not in self._last:
                self.store("constant", tensor)
            if key in self._last:
                parents.append(self._last[key])
        return parents

    def _measure(self, tensor: Tensor, known: dict[str, Any], given: Sequence[Tensor] = ()) -> None:
        """Keep the statistics of a result; of a conversion, how much of it is rounded to 0."""
        measured = statistics_of(tensor) if numeric(tensor) else {}
        if not measured:
            return
        dtype = plain(tensor).dtype
        count = plain(tensor).numel()
        elements = math.ceil(count / math.ceil(count / SAMPLE))
        known = {**known, "dtype": dtype, "elements": elements}
        for source in given[-1:] if known["op"] in CONVERSIONS else ():
            if numeric(source) and source.shape == tensor.shape:
                narrower = torch.finfo(dtype).tiny > torch.finfo(source.dtype).tiny
                if narrower:
                    measured["rounded"] = rounded_to_zero(source, tensor)
                    known["converted"] = elements
        self.numbers.add("result", known, **measured)
        self._last[storage_key(tensor)] = self.results
        self.results += 1

    def _stage(self) -> Stage:
        if current_autograd_node() is None or self.modules.current is not None:
            return "forward"
        return "backward"


# --- One health probe: begin before the forward pass, end after the update, and get a record.


MOST_ROWS_KEPT = 400
"""Rows of each kind that a record keeps, the worst ones."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules whose parts a model calls one by one, or chooses from."""


class DeepLook:
    """Watches one step. Nothing it does changes the step."""

    def __init__(
        self, step: int, roots: Mapping[str, nn.Module], optimizer: Optimizer, owned: set[int]
    ) -> None:
        self.step = step
        self.batch = SeenBatch()
        self._roots = roots
        self._optimizer = optimizer
        self._owned = owned
        self.observer = Observer(roots, optimizer_parameter_ids(optimizer), owned)
        self.observer.backward_begins = self._backward_begins
        self._updates: Updates | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """The step begins."""
        began = time.thread_time()
        # Inside a transform of functorch the modules hold wrappers, whose memory is not known.
        if transforms() is None:
            for kind, named in (("param", named_parameters), ("buffer", named_buffers)):
                for name, tensor in named(self._roots):
                    if not is_lazy(tensor):
                        self.observer.store(f"{kind}:{name}", tensor)
        self._seconds += time.thread_time() - began
        self.observer.start()

    def _backward_begins(self) -> None:
        """Note how many gradients are there already that are not 0."""
        parts = []
        updated = optimizer_parameter_ids(self._optimizer)
        for _, parameter in named_parameters(self._roots):
            gradient = parameter.grad
            if id(parameter) not in updated:
                continue  # another player's: its own loop zeroes it
            if gradient is not None and gradient.layout is torch.strided and gradient.numel():
                # Elements of each gradient that say whether it is 0
                part = sampled(plain(gradient), 256)
                parts.append((part != 0).any())
        count = torch.stack(parts).sum() if parts else torch.zeros(())
        self.observer.numbers.add("kept gradients", {}, count=count)

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass begins at this loss. One that does not call the model before it goes
        unobserved, and counts.
        """
        self._backward_begins()
        self.observer.notes.backward_begins(root)

    @property
    def outsiders(self) -> list[Tensor]:
        """Tensors that got a gradient and belong to no model and no optimizer."""
        return [one for one in self.observer.notes.outsiders if one.grad is not None]

    def before_update(self) -> None:
        """The optimizer is about to step."""
        began = time.thread_time()
        numbers = self.observer.numbers
        self._updates = Updates(numbers, self._roots, self._optimizer, self._owned)
        self._seconds += time.thread_time() - began

    def finish(self, *, committed: bool) -> Look:
        """The update is over."""
        began = time.thread_time()
        self.observer.stop()
        if self._updates is not None and committed:
            self._updates.committed()
        values = self.observer.numbers.read()
        parameters: list[ParameterLook] = []
        without: Sequence[str] = ()
        if self._updates is not None:
            parameters, without = self._updates.rows(values)
        rule = "" if self._updates is None else self._updates.rule
        tensors = tensor_rows(values["result"])
        counted = (len(tensors), len(parameters))
        if len(parameters) > MOST_ROWS_KEPT:
            # keep the order of the model; drop what moves as it should
            order = sorted(parameters, key=_suspicion, reverse=True)
            kept = {one.name for one in order[:MOST_ROWS_KEPT]}
            parameters = [one for one in parameters if one.name in kept]
        layers: dict[Any, tuple[Any, ...]] = {}
        for kind in (AttentionLook, NormLook, UnitLook):
            layers[kind] = tuple(kind(**row) for row in values[kind][:MOST_ROWS_KEPT])
        # Every backward pass of the step found gradients. The first of an accumulated step finds
        # none; nor does the last one where `zero_grad` stands between a gradient inside the loss
        # and its backward pass.
        kept_gradients = [row["count"] for row in values["kept gradients"]]
        facts = StepFacts(
            batch=self.batch.digest,
            samples=self.batch.samples,
            training=next(iter(self._roots.values())).training,
            dropout=self._evaluating(nn.modules.dropout._DropoutNd),
            norms_in_eval=self._evaluating(nn.modules.batchnorm._NormBase),
            kept_gradients=min(kept_gradients, default=0.0) > 0.0,
            without_gradient=without_unused_parts(self._roots, without),
            optimizer=type(self._optimizer).__name__ if rule else "",
            update_rule=rule,
            **self.observer.notes.facts(values),
            **self.observer.recomputed.facts(values),
        )
        look = Look(
            step=self.step,
            tensors=tuple(tensors[:MOST_ROWS_KEPT]),
            parameters=tuple(parameters),
            attention=layers[AttentionLook],
            norms=layers[NormLook],
            units=layers[UnitLook],
            routers=tuple(_router(row) for row in values[RouterLook][:MOST_ROWS_KEPT]),
            facts=facts,
            left_out=sum(max(0, count - MOST_ROWS_KEPT) for count in counted),
        )
        self._seconds += time.thread_time() - began
        return replace(look, seconds=self._seconds + self.observer.seconds)

    def _evaluating(self, kind: type[nn.Module]) -> tuple[str, ...]:
        """Modules of a kind that are in evaluation mode; not a dropout that never drops."""
        found = []
        for name, module in named_modules(self._roots):
            if isinstance(module, kind) and not module.training and getattr(module, "p", 1.0) > 0:
                found.append(name)
        return tuple(found)


def _router(row: dict[str, Any]) -> RouterLook:
    return RouterLook(**{**row, "loads": tuple(row["loads"])})


def without_unused_parts(roots: Mapping[str, nn.Module], names: Sequence[str]) -> tuple[str, ...]:
    """These parameters, less those of a container of which others have a gradient.

    An expert or the head of a task is used when its turn comes.
    """
    owned = [name for name, parameter in named_parameters(roots) if parameter.requires_grad]
    for prefix, module in named_modules(roots):
        if isinstance(module, CONTAINERS):
            inside = {name for name in owned if name.startswith(f"{prefix}.")}
            if not inside <= set(names):
                names = [name for name in names if name not in inside]
    return tuple(names)


def tensor_rows(results: Sequence[dict[str, Any]]) -> list[TensorLook]:
    """One row for each module, direction and dtype, those with the least headroom first."""
    groups: dict[tuple[str, Stage, torch.dtype], list[dict[str, Any]]] = {}
    for one in results:
        # infinities that come from finite operands
        inherited = any(results[parent]["infinities"] for parent in one["parents"])
        one["new_infinities"] = 0 if one["absorbs"] or inherited else int(one["infinities"])
        groups.setdefault((one["module"], one["stage"], one["dtype"]), []).append(one)
    rows = [_tensor_row(*group, members) for group, members in groups.items()]
    return sorted(rows, key=lambda row: math.inf if row.headroom is None else row.headroom)


def _tensor_row(
    name: str, stage: Stage, dtype: torch.dtype, members: list[dict[str, Any]]
) -> TensorLook:
    def total(field: str) -> float:
        return math.fsum(one.get(field, 0.0) for one in members)

    largest = max(members, key=lambda one: one["largest"])
    smallest = min(one["smallest"] for one in members)
    elements = total("elements")
    limits = torch.finfo(dtype)
    return TensorLook(
        module=name,
        stage=stage,
        dtype=dtype_name(dtype),
        op=largest["op"],
        largest=largest["largest"],
        smallest=smallest if math.isfinite(smallest) else None,
        headroom=bits_between(limits.max, largest["largest"]),
        floor=bits_between(smallest, limits.tiny),
        zeros=total("zeros") / elements,
        subnormal=total("subnormal") / elements,
        rounded_away=total("rounded") / max(total("converted"), 1),
        infinities=int(total("new_infinities")),
        elements=int(elements),
    )


def _suspicion(one: ParameterLook) -> float:
    return (one.lost or 0.0) + one.gradient_zeros + (one.ratio or 0.0)
