"""The list of what a pickle may name and call, and what is said of everything else."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stepguard.check import allowed_globals
from stepguard.check.allowed_globals import Global, trust
from stepguard.check.inert_pickle import (
    ArrayRecord,
    NumpyType,
    PickledBytes,
    PickledObject,
    PickleReader,
    StorageRecord,
    TensorRecord,
)
from stepguard.check.scan import Damaged, FileSlice

FLOATS = Global("torch", "FloatStorage")
STORAGE = StorageRecord("0", "float32", 12)
FLOAT64 = NumpyType(np.dtype("f8"))


def of(text: str) -> Global:
    module, _, name = text.rpartition(":")
    return Global(module, name)


@pytest.mark.parametrize(
    ("name", "referred", "called"),
    [
        ("collections:OrderedDict", "needed", "hostile"),
        ("torch:bfloat16", "needed", "hostile"),
        ("torch.cuda:HalfStorage", "needed", "hostile"),
        ("torch.nn.modules.linear:Linear", "needed", "hostile"),
        ("torch.nn.modules.linear:Other", "unknown", "hostile"),
        ("torch.nn.functional:gelu", "needed", "hostile"),
        ("torch.nn.functional:boolean_dispatch", "hostile", "hostile"),
        ("torch.utils.data.dataloader:ThreadPool", "unknown", "hostile"),
        ("torch.optim.adam:Adam", "unknown", "hostile"),
        ("__torch__.model:Net", "unknown", "calls"),
        ("builtins:set", "needed", "hostile"),
        ("builtins:eval", "hostile", "hostile"),
        ("os:system", "hostile", "hostile"),
        ("torch.hub:load", "hostile", "hostile"),
        ("torch.nn.modules.linear:torch.os.system", "hostile", "hostile"),
        ("transformers.training_args:TrainingArguments", "needed", "calls"),
        ("transformers.training_args:os.system", "unknown", "hostile"),
        ("mine.model:Settings", "unknown", "calls"),
        ("mine.model:run", "unknown", "hostile"),
        ("collections:OrderedDict.__init__.__globals__", "hostile", "hostile"),
        ("copyreg:extension 7", "hostile", "hostile"),
    ],
)
def test_name_is_judged_by_what_loading_it_would_do(name: str, referred: str, called: str) -> None:
    """`called`: in a way that is not on the list."""
    assert trust(of(name)) == referred
    assert trust(of(name), called=True) == called


def test_classes_of_a_script_are_known_in_its_archive_only() -> None:
    net = Global("__torch__.model", "Net")
    assert trust(net, called=True, scripted=True) == "needed"
    assert trust(Global("os", "system"), scripted=True) == "hostile"


REVIEWED = {
    # each updates a dict, sets attributes of plain values, or is compiled code that takes numbers
    "torch.nn.modules.module.Module", "torch.nn.modules.activation.MultiheadAttention",
    "torch.nn.modules.activation.Softmin", "torch.nn.modules.activation.Softmax",
    "torch.nn.modules.activation.LogSoftmax", "torch.nn.modules.conv._ConvNd",
    "torch.nn.modules.pooling.AvgPool3d", "torch.nn.modules.rnn.RNNBase",
    "torch.nn.modules.transformer.TransformerEncoderLayer",
    "torch.nn.modules.transformer.TransformerDecoderLayer", "torch.nn.modules.upsampling.Upsample",
    "torch.distributed.device_mesh.DeviceMesh", "torch._C._distributed.Shard",
    "torch._C._distributed.Replicate", "torch._C._distributed.Partial",
    "torch._C._distributed.StridedShard", "torch.distributed.tensor.placement_types.Shard",
    "torch.distributed.checkpoint.metadata.TensorProperties", "uuid.UUID",
    "omegaconf.base.Node", "omegaconf.basecontainer.BaseContainer",
}  # fmt: skip
"""Classes on the list, or above one, with a `__setstate__` that was read and found harmless."""
READ = {
    "torch.nn.modules.module.Module", "accelerate.state.PartialState",
    "omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig",
}  # fmt: skip
"""Those with a `__getattr__`, which pickle asks for `__setstate__`: each raises AttributeError."""


@pytest.mark.slow
def test_no_listed_class_acts_when_it_is_made_or_given_its_state() -> None:
    """What gets a `__setstate__`, `__new__` or `__del__` in a new version has to be read."""
    found = 0
    for listed in sorted(allowed_globals.RECORDS, key=str):
        try:
            kind = getattr(importlib.import_module(listed.module), listed.name)
        except (ImportError, AttributeError):
            continue
        assert inspect.isclass(kind), listed
        assert (kind.__module__, kind.__qualname__) == (listed.module, listed.name) or (
            listed.module.startswith("torch.distributed")
        ), f"{listed} is a name that another module exports again"
        found += 1
        for above in kind.__mro__:
            if above in (object, types.SimpleNamespace) or "pybind11" in above.__module__:
                continue
            spelled = f"{above.__module__}.{above.__qualname__}"
            assert "__del__" not in vars(above), spelled
            assert "__setstate__" not in vars(above) or spelled in REVIEWED, spelled
            assert "__getattr__" not in vars(above) or spelled in READ, spelled
            assert "__getattribute__" not in vars(above), spelled
            assert above.__module__ == "typing" or "__new__" not in vars(above), spelled
    assert found > 130


def storage_of(pid: Any) -> StorageRecord:
    found = PickleReader(FileSlice(-1, 0, 0)).persistent_load(pid)
    assert isinstance(found, StorageRecord)
    return found


@pytest.fixture
def call() -> Callable[..., Any]:
    machine = PickleReader(FileSlice(-1, 0, 0))

    def build(name: str, *arguments: Any) -> Any:
        module, _, word = name.rpartition(".")
        return machine.call(Global(module, word), arguments)

    return build


def test_tensor_is_a_view_of_its_storage(call: Callable[..., Any]) -> None:
    storage = storage_of(("storage", FLOATS, "0", "cpu", 12))
    tensor = call("torch._utils._rebuild_tensor_v2", storage, 2, (2, 3), (3, 1), False, {})
    assert isinstance(tensor, TensorRecord) and tensor.storage is storage
    assert (tensor.dtype, tensor.offset, tensor.shape) == ("float32", 2, (2, 3))
    assert call("torch._utils._rebuild_parameter", tensor, True, {}).parameter


def test_unknown_class_stays_a_record(call: Callable[..., Any]) -> None:
    found = call("mine.Settings", 1, 2)
    assert isinstance(found, PickledObject) and found.arguments == (1, 2)


def test_numpy_scalar_is_its_number(call: Callable[..., Any]) -> None:
    raw = PickledBytes(0, 8, b"\x00\x00\x00\x00\x00\x00\xf4\x3f")
    kind = NumpyType(np.dtype("f8"))
    assert call("numpy._core.multiarray.scalar", kind, raw) == 1.25
    array = call("numpy._core.numeric._frombuffer", raw, kind, (1,), "C")
    assert isinstance(array, ArrayRecord) and array.dtype == "float64"
    assert NumpyType(np.dtype(">f8")).torch_name == ""
    assert NumpyType(np.dtype(">u1")).torch_name == "uint8"


SYSTEM = Global("os", "system")
BIT_GENERATOR = "numpy.random._pickle.__bit_generator_ctor"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch._utils._rebuild_tensor_v2", ()),
        ("torch._utils._rebuild_tensor_v2", ("text", 0, (1,), (1,))),
        ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, "ab", (1,))),
        ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, (1 << 8000,), (1,))),
        ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, (1,) * 65, (1,) * 65)),
        ("torch._utils._rebuild_tensor_v2", (STORAGE, 0, (1,), (1,), False, {"hook": SYSTEM})),
        ("torch._utils._rebuild_parameter", (PickledObject(SYSTEM), True, {})),
        ("torch._utils._rebuild_sparse_tensor", ("layout", ())),
        ("torch._utils._rebuild_wrapper_subclass", (SYSTEM, 0, (), (), 0, 0, "cpu", False)),
        ("torch.device", ("cuda", 0, 1)),
        ("torch.device", (SYSTEM,)),
        ("torch.Size", (SYSTEM,)),
        ("collections.OrderedDict", (SYSTEM,)),
        ("collections.defaultdict", (SYSTEM,)),
        ("collections.Counter", ("text",)),
        ("collections.deque", (PickledObject(SYSTEM),)),
        ("builtins.bytes", ([1, 2],)),
        ("builtins.bytearray", ([1, 2],)),
        ("builtins.type", ("name", (), {})),
        ("builtins.list", (PickledObject(SYSTEM),)),
        ("builtins.complex", ("1", "2")),
        ("pathlib.PosixPath", ("a", SYSTEM)),
        ("datetime.timezone", (PickledObject(SYSTEM),)),
        ("numpy.dtype", (SYSTEM,)),
        ("numpy._core.multiarray._reconstruct", (SYSTEM, (0,), "b")),
        ("numpy._core.multiarray.scalar", (NumpyType(np.dtype("O")), PickledObject(SYSTEM))),
        ("numpy._core.numeric._frombuffer", (PickledObject(SYSTEM), FLOAT64, (1,))),
        ("numpy.random.bit_generator.__pyx_unpickle_SeedSequence", (SYSTEM, 1, None)),
        ("copyreg._reconstructor", (Global("argparse", "Namespace"), SYSTEM, "true")),
        ("copyreg._reconstructor", (Global("uuid", "UUID"), Global("builtins", "str"), "")),
        ("_codecs.encode", ("text", "rot13")),
        ("transformers.trainer_utils.IntervalStrategy", (SYSTEM,)),
    ],
)  # fmt: skip
def test_arguments_that_are_not_on_the_list_are_malformed(
    call: Callable[..., Any], name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(Damaged, match="arguments it cannot take") as caught:
        call(name, *arguments)
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (BIT_GENERATOR, (SYSTEM,)),
        (BIT_GENERATOR, (Global("mine", "Thing"),)),
        (BIT_GENERATOR, (Global("numpy", "ndarray"),)),
        (BIT_GENERATOR, ("Unheard",)),
        ("numpy.random._pickle.__generator_ctor", ("PCG64", SYSTEM)),
        ("numpy.random._pickle.__randomstate_ctor", ("MT19937", PickledObject(SYSTEM))),
        ("numpy.random._pickle.__generator_ctor", (PickledObject(SYSTEM),)),
        ("torch.storage._load_from_bytes", (PickledObject(Global("builtins", "bytes")),)),
        ("torch.storage._load_from_bytes", ([1, 2, 3],)),
        ("torch._tensor._rebuild_from_type_v2", (SYSTEM, Global("torch", "Tensor"), ("x",), {})),
        ("torch._tensor._rebuild_from_type_v2",
         (Global("torch.storage", "_load_from_bytes"), Global("torch", "Tensor"), (), {})),
    ],
)  # fmt: skip
def test_function_that_would_call_or_load_its_argument_is_hostile(
    call: Callable[..., Any], name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(Damaged, match="nothing was run") as caught:
        call(name, *arguments)
    assert caught.value.kind == "hostile"


@pytest.mark.parametrize(
    ("pid", "kind"),
    [
        ("text", "malformed"),
        (("storage", FLOATS, "0", "cpu", -1), "malformed"),
        (("storage", Global("torch", "Unknown"), "0", "cpu", 1), "malformed"),
        (("storage", FLOATS, "0", PickledObject("x"), 1), "malformed"),
        (("storage", FLOATS, "0", "cpu", 4, ("1", 0, 4)), "format"),
    ],
)
def test_persistent_id_that_torch_does_not_write_is_refused(pid: Any, kind: str) -> None:
    with pytest.raises(Damaged) as caught:
        storage_of(pid)
    assert caught.value.kind == kind
    assert storage_of(("storage", FLOATS, "0", "cpu", 4, None)).elements == 4
