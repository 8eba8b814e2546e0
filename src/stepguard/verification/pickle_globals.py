"""Names a pickle may refer to: what a checkpoint of tensors needs is listed here, everything else
is told.

Nothing is ever imported, so this decides on words only. A list of dangerous names would never be
complete: every installed library holds some function that runs code. A list of what checkpoints
need is short.
"""

from __future__ import annotations

import sys
from typing import Literal

from stepguard.verification import dtype_names
from stepguard.verification.pickle_values import Global


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BUILTINS = frozenset({"builtins", "__builtin__"})
HARMLESS_BUILTINS = _words(
    """
    set frozenset list dict tuple int float complex bool str bytes bytearray slice range object long unicode
    Ellipsis NotImplemented type reversed enumerate xrange
    """
)
NEEDED = _words(
    """
    collections.OrderedDict collections.defaultdict collections.Counter collections.deque
    torch.Size torch.device torch.Tensor torch.strided torch.sparse_coo torch.serialization._get_layout
    torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3
    torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state torch._utils._rebuild_qtensor
    torch._utils._rebuild_sparse_tensor torch._utils._rebuild_meta_tensor_no_storage
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._rebuild_device_tensor_from_cpu_tensor
    torch._utils._rebuild_nested_tensor torch._utils._rebuild_wrapper_subclass torch._utils._rebuild_xla_tensor
    torch._tensor._rebuild_from_type_v2 torch.nn.parameter.Parameter torch.storage._load_from_bytes
    torch.storage.TypedStorage torch.storage.UntypedStorage torch.per_tensor_affine torch.per_channel_affine
    torch.per_tensor_symmetric torch.per_channel_symmetric torch.per_channel_affine_float_qparams
    torch.nn.parameter.Buffer torch.contiguous_format torch.preserve_format torch.channels_last
    torch.serialization.MAP_LOCATION _codecs.encode copyreg._reconstructor copy_reg._reconstructor
    torch.distributed.checkpoint.metadata.ChunkStorageMetadata torch.distributed.checkpoint.metadata.TensorProperties
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING torch.distributed.checkpoint.metadata.StorageMeta
    torch.distributed.checkpoint.metadata.TensorStorageMetadata torch.distributed.checkpoint.metadata.Metadata
    torch.distributed.checkpoint.metadata.BytesStorageMetadata torch.distributed.checkpoint.metadata.MetadataIndex
    torch.distributed.checkpoint.filesystem._StorageInfo torch.distributed.checkpoint.filesystem._StoragePrefix
    torch.distributed.checkpoint.filesystem.SerializationFormat torch.distributed.checkpoint._extension.ZStandard
    torch.distributed.checkpoint._extension.Extension
    torch.distributed.checkpoint._extension.StreamTransformExtension
    numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.core.numeric._frombuffer
    numpy._core.numeric._frombuffer numpy.random._pickle.__randomstate_ctor numpy.random._pickle.__generator_ctor
    numpy.random._pickle.__bit_generator_ctor numpy.random._mt19937.MT19937 numpy.random._pcg64.PCG64
    numpy.random._pcg64.PCG64DXSM numpy.random._philox.Philox numpy.random._sfc64.SFC64
    numpy.random.bit_generator.SeedSequence numpy.random.bit_generator.__pyx_unpickle_SeedSequence
    numpy.random.mtrand.RandomState numpy.random._generator.Generator
    numpy.bool_ numpy.bool numpy.str_ numpy.bytes_ numpy.float16 numpy.float32 numpy.float64 numpy.longdouble
    numpy.int8 numpy.int16 numpy.int32 numpy.int64 numpy.uint8 numpy.uint16 numpy.uint32 numpy.uint64
    numpy.complex64 numpy.complex128 numpy.datetime64 numpy.timedelta64
    argparse.Namespace types.SimpleNamespace pathlib.PosixPath pathlib.WindowsPath pathlib.PurePosixPath
    pathlib.PureWindowsPath pathlib.Path pathlib._local.PosixPath pathlib._local.WindowsPath
    pathlib._local.PurePosixPath pathlib._local.Path datetime.datetime datetime.timedelta datetime.date
    datetime.time datetime.timezone decimal.Decimal fractions.Fraction uuid.UUID uuid.SafeUUID typing.Any
    """
)
"""Tensors, storages, arrays, containers, and plain records: none of them acts when it is built."""
SCRIPTED = _words(
    "build_intlist build_tensorlist build_doublelist build_boollist build_tensor_from_id "
    "restore_type_tag"
)
"""Functions of `torch.jit._pickle`: the lists of a TorchScript archive."""
FRAMEWORKS = (
    "torch.nn.",
    "torch.optim.",
    "torch.ao.nn.",
    "torch.ao.quantization.",
    "torch.amp.",
    "torch.distributions.",
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",
    "torch.distributed.device_mesh.",
    "torch.distributed._shard.",
    "torch.utils.data.",
    "transformers.training_args",
    "transformers.trainer_utils",
    "transformers.trainer_pt_utils",
    "accelerate.state",
    "accelerate.utils.dataclasses",
    "lightning.fabric.utilities.data",
    "lightning.pytorch.callbacks",
    "lightning_fabric.utilities.data",
    "pytorch_lightning.callbacks",
    "omegaconf.",
    "peft.utils.peft_types",
    "deepspeed.runtime.zero.config",
    "megatron.core.enums",
    "megatron.core.transformer.enums",
)
"""Where the classes live that these libraries put into their own checkpoints: settings, states,
layers.
"""
TENSOR_FUNCTIONS = frozenset({"torch.nn.functional", "torch._C._nn"})
"""Functions of tensors that a layer may keep, such as its activation. They may be referred to, not
called.
"""
LIBRARIES = frozenset(sys.stdlib_module_names) | _words(
    """
    commands popen2 imp cPickle urllib2 httplib distutils lib2to3 asyncore asynchat smtpd telnetlib xdrlib pipes crypt
    numpy scipy pandas torch torchgen functorch pip setuptools pkg_resources wheel ensurepip dill cloudpickle joblib
    requests httpx aiohttp urllib3 cffi pytest _pytest jinja2 IPython
    """
)
"""Of what everybody has installed, only what is listed as needed belongs into a checkpoint. The
standard library counts whole: also its oldest and newest modules.
"""
Trust = Literal["needed", "unknown", "calls", "hostile"]


def trust(name: Global, *, called: bool = False) -> Trust:
    """How a name is taken.

    `unknown`: a class or value of somebody's own project, which is rebuilt without a call. `calls`:
    such a class whose constructor is called with arguments from the file. `hostile`: it could run
    any code. `called` says that the stream calls it, as it does with every function it wants to
    run.
    """
    full, top = str(name), name.module.partition(".")[0]
    if _reaches_inside(name):
        return "hostile"
    if name.module in BUILTINS:
        return "needed" if name.name in HARMLESS_BUILTINS else "hostile"
    if (
        full in NEEDED
        or _made_up(name)
        or _torch_type(name)
        or _numpy_type(name)
        or _framework_class(name)
    ):
        return "needed"
    is_class = _is_class(name.name)
    may_be_kept = name.module in TENSOR_FUNCTIONS or (top == "torch" and is_class)
    if top in LIBRARIES and (called or not may_be_kept):
        return "hostile"
    if called:
        return "calls" if is_class else "hostile"
    return "unknown"


def _reaches_inside(name: Global) -> bool:
    """`OrderedDict.__init__.__globals__`, or an extension code, which means what the reader's
    registry says.
    """
    dunder = any(part.startswith("__") and part.endswith("__") for part in name.name.split("."))
    return dunder or (name.module == "copyreg" and name.name.startswith("extension "))


def _is_class(word: str) -> bool:
    """By its spelling, as PEP 8 has it. A dotted name (`F.torch.os.system`) walks on from class to
    class only.
    """
    return all(part.lstrip("_")[:1].isupper() for part in word.split("."))


def _framework_class(name: Global) -> bool:
    """Functions of the same modules are not taken for granted, nor is a dotted way into them."""
    return (
        "." not in name.name and _is_class(name.name) and f"{name.module}.".startswith(FRAMEWORKS)
    )


def _made_up(name: Global) -> bool:
    """Classes of a TorchScript archive, which exist nowhere outside of it."""
    return name.module.startswith("__torch__") or (
        name.module == "torch.jit._pickle" and name.name in SCRIPTED
    )


def _torch_type(name: Global) -> bool:
    if (
        name.module in ("torch", "torch.cuda", "torch.storage")
        and name.name in dtype_names.STORAGES
    ):
        return True
    return name.module == "torch" and (
        name.name in dtype_names.SIZES or name.name in dtype_names.ALIASES
    )


def _numpy_type(name: Global) -> bool:
    return name.module == "numpy.dtypes" and name.name.endswith("DType") and name.name.isalnum()
