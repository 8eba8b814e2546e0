"""Every private name of torch that the package uses is there, and only one module uses them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms import join
from torch.nn.utils import clip_grad
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.utils.data import dataloader

from stepguard.tensors import torch_private as private

SOURCE = Path(private.__file__).parent.parent
PRIVATE_MODULE = Path(private.__file__)


def _scheduled() -> SGD:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    ConstantLR(optimizer)
    return optimizer


def _schedule() -> ConstantLR:
    return ConstantLR(SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def _sequence() -> SequentialLR:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return SequentialLR(optimizer, [ConstantLR(optimizer), ConstantLR(optimizer)], [2])


def _adamw() -> AdamW:
    return AdamW([nn.Parameter(torch.zeros(1))], fused=True)


def _plain_adamw() -> AdamW:
    return AdamW([nn.Parameter(torch.zeros(1))])


def _workers() -> Any:
    # The class only: an instance would start worker processes.
    return dataloader._MultiProcessingDataLoaderIter


def _wrapper() -> Any:
    # The class only: an instance needs a process group.
    return nn.parallel.DistributedDataParallel


def _sets(function: Any) -> Any:
    """Return an object with the attributes that the source of a function sets on `self`."""
    found = re.findall(r"self\.(_\w+)\b.*=", inspect.getsource(function))
    return SimpleNamespace(**dict.fromkeys(found, True))


def _stepped() -> SGD:
    optimizer = _scheduled()
    optimizer.step()
    return optimizer


def _compiled_function() -> Any:
    return torch.compile(lambda x: x)


EXAMPLES: dict[str, Callable[[], Any]] = {
    "Tensor._version": lambda: torch.zeros(1),
    "Tensor._post_accumulate_grad_hooks": lambda: nn.Parameter(torch.zeros(1)),
    "Tensor._values": lambda: torch.zeros(1),
    "Module._buffers": lambda: nn.Linear(1, 1),
    "Module._modules": lambda: nn.Linear(1, 1),
    "Module._parameters": lambda: nn.Linear(1, 1),
    "Module._call_impl": lambda: nn.Linear(1, 1),
    "Module._compiled_call_impl": lambda: nn.Linear(1, 1),
    "OptimizedModule._orig_mod": lambda: torch.compile(nn.Linear(1, 1)),
    "function._torchdynamo_orig_callable": _compiled_function,
    "Optimizer._step_supports_amp_scaling": _adamw,
    "Optimizer._optimizer_step_pre_hooks": _adamw,
    "Optimizer._zero_grad_profile_name": _adamw,
    "Optimizer._warned_capturable_if_run_uncaptured": _plain_adamw,
    "Optimizer.step._wrapped_by_lr_sched": lambda: _scheduled().step,
    "LRScheduler._last_lr": _schedule,
    "SequentialLR._schedulers": _sequence,
    "DistributedDataParallel._comm_hooks": lambda: _sets(_wrapper().__init__),
    "Joinable._join_config": lambda: _sets(join.Joinable.__init__),
    "OpOverload._schema": lambda: torch.ops.aten.add.Tensor,
    "Optimizer._opt_called": _stepped,
    "GradScaler._get_scale_async": lambda: GradScaler("cpu"),
    "UntypedStorage._cdata": lambda: torch.zeros(1).untyped_storage(),
    "DataLoader._iterator": lambda: dataloader.DataLoader([1]),
    "DataLoaderIter._in_order": lambda: _sets(_workers().__init__),
    "DataLoaderIter._dataset": lambda: iter(dataloader.DataLoader([1])),
    "DataLoaderIter._index_sampler": lambda: iter(dataloader.DataLoader([1])),
    "DataLoaderIter._send_idx": lambda: _sets(_workers()._reset),
    "DataLoaderIter._rcvd_idx": lambda: _sets(_workers()._reset),
    "DataLoaderIter._shutdown_workers": _workers,
}


# importing torch._dynamo warns of parts of torch.jit
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", private.ATTRIBUTES)
def test_private_attribute_is_there(name: str) -> None:
    owner = EXAMPLES[name]()
    attribute = name.rpartition(".")[2]
    assert hasattr(owner, attribute), (
        f"torch {torch.__version__} has no {name} any more. "
        f"The package needs it: {private.ATTRIBUTES[name]}."
    )


@pytest.mark.parametrize("name", private.__all__)
def test_private_name_is_there(name: str) -> None:
    assert getattr(private, name, None) is not None, (
        f"stepguard.tensors.torch_private.{name} is missing under torch {torch.__version__}"
    )


def test_module_calls_look_for_a_compiled_forward_on_the_instance() -> None:
    model = nn.Linear(1, 1)
    assert private.compiled_call(model) is None
    setattr(model, private.COMPILED_CALL, lambda *args: "instead")
    assert model(torch.zeros(1)) == "instead"


def test_every_spelling_of_clipping_calls_the_wrapped_norm() -> None:
    source = inspect.getsource(clip_grad.clip_grad_norm_)
    assert hasattr(clip_grad, private.CLIP_NORM)
    assert private.CLIP_NORM in source, (
        f"torch {torch.__version__}: clip_grad_norm_ no longer calls {private.CLIP_NORM}; "
        "a watched loop's norm before clipping is then not observed"
    )


def test_the_running_node_is_known_in_a_backward_pass_only() -> None:
    seen = []
    value = torch.ones(1, requires_grad=True)
    result = value * 2
    result.register_hook(lambda grad: seen.append(private.current_autograd_node()))
    result.backward()
    assert seen[0] is not None
    assert private.current_autograd_node() is None


def test_a_fused_operation_is_decomposed_and_a_plain_one_is_not() -> None:
    norm = private.decomposition_of(torch.ops.aten.native_layer_norm.default)
    assert norm is not None
    values = torch.randn(2, 3)
    whole = torch.nn.functional.layer_norm(values, (3,))
    torch.testing.assert_close(norm(values, [3], None, None, 1e-5)[0], whole)
    assert private.decomposition_of(torch.ops.aten.mm.default) is None


def test_custom_functions_are_observed_even_where_apply_was_taken_before() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    seen = []

    def around(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        seen.append(cls)
        return apply(*args, **kwargs)

    early = Twice.apply
    undo = private.observe_functions(around)
    out = early(torch.ones(1, requires_grad=True))
    undo()
    assert out.item() == 2.0 and seen == [Twice]
    assert out.grad_fn is not None and out.grad_fn._forward_cls is Twice  # type: ignore[attr-defined]
    assert early(torch.ones(1)).item() == 2.0 and seen == [Twice]


def test_a_scaler_shows_its_tensors_once_it_was_used() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    assert private.scaler_tensors(scaler) is None
    private.start_scaler(scaler, 8.0, 3)
    scaler.scale(torch.ones(1))
    tensors = private.scaler_tensors(scaler)
    assert tensors is not None
    assert [t.item() for t in tensors] == [8.0, 3]


@pytest.mark.slow
def test_no_other_module_names_a_private_part_of_torch() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path == PRIVATE_MODULE:
            continue
        for name in _private_names(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(f"{path.relative_to(SOURCE)}: {name}")
    assert found == [], "move these to tensors/torch_private.py, with the reason and a test"


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [_dotted(node)]
        else:
            continue
        yield from (name for name in names if _is_torch(name) and _has_private_part(name))


def _dotted(node: ast.expr) -> str:
    """`torch.nn.Module`; empty for what is not a dotted name, such as a call in an expression."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""  # type: ignore[attr-defined]


def _is_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "dist")


def _has_private_part(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
