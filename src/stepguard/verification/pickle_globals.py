"""Decide by name which globals a pickle may refer to; everything that is not needed is reported.

Nothing is imported. A list of dangerous names would never be complete: every installed library
holds some function that runs code. A list of what checkpoints need is short.
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
    set frozenset list dict tuple int float complex bool str bytes bytearray slice range object
    long unicode Ellipsis NotImplemented type reversed enumerate xrange
    """
)
NEEDED = _words(
    """
    collections.OrderedDict collections.defaultdict collections.Counter collections.deque
    torch.Size torch.device torch.Tensor torch.strided torch.sparse_coo
    torch.serialization._get_layout torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2
    torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter
    torch._utils._rebuild_parameter_with_state torch._utils._rebuild_qtensor
    torch._utils._rebuild_sparse_tensor torch._utils._rebuild_meta_tensor_no_storage
    torch._utils._rebuild_device_tensor_from_numpy
    torch._utils._rebuild_device_tensor_from_cpu_tensor torch._utils._rebuild_nested_tensor
    torch._utils._rebuild_wrapper_subclass torch._utils._rebuild_xla_tensor
    torch._tensor._rebuild_from_type_v2 torch.nn.parameter.Parameter
    torch.storage._load_from_bytes torch.storage.TypedStorage torch.storage.UntypedStorage
    torch.per_tensor_affine torch.per_channel_affine torch.per_tensor_symmetric
    torch.per_channel_symmetric torch.per_channel_affine_float_qparams torch.nn.parameter.Buffer
    torch.contiguous_format torch.preserve_format torch.channels_last
    torch.serialization.MAP_LOCATION _codecs.encode copyreg._reconstructor
    copy_reg._reconstructor torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    torch.distributed.checkpoint.metadata.TensorProperties
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.metadata.StorageMeta
    torch.distributed.checkpoint.metadata.TensorStorageMetadata
    torch.distributed.checkpoint.metadata.Metadata
    torch.distributed.checkpoint.metadata.BytesStorageMetadata
    torch.distributed.checkpoint.metadata.MetadataIndex
    torch.distributed.checkpoint.filesystem._StorageInfo
    torch.distributed.checkpoint.filesystem._StoragePrefix
    torch.distributed.checkpoint.filesystem.SerializationFormat
    torch.distributed.checkpoint._extension.ZStandard
    torch.distributed.checkpoint._extension.Extension
    torch.distributed.checkpoint._extension.StreamTransformExtension numpy.ndarray numpy.dtype
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.core.numeric._frombuffer
    numpy._core.numeric._frombuffer numpy.random._pickle.__randomstate_ctor
    numpy.random._pickle.__generator_ctor numpy.random._pickle.__bit_generator_ctor
    numpy.random._mt19937.MT19937 numpy.random._pcg64.PCG64 numpy.random._pcg64.PCG64DXSM
    numpy.random._philox.Philox numpy.random._sfc64.SFC64
    numpy.random.bit_generator.SeedSequence
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence numpy.random.mtrand.RandomState
    numpy.random._generator.Generator numpy.bool_ numpy.bool numpy.str_ numpy.bytes_
    numpy.float16 numpy.float32 numpy.float64 numpy.longdouble numpy.int8 numpy.int16
    numpy.int32 numpy.int64 numpy.uint8 numpy.uint16 numpy.uint32 numpy.uint64 numpy.complex64
    numpy.complex128 numpy.datetime64 numpy.timedelta64 argparse.Namespace types.SimpleNamespace
    pathlib.PosixPath pathlib.WindowsPath pathlib.PurePosixPath pathlib.PureWindowsPath
    pathlib.Path pathlib._local.PosixPath pathlib._local.WindowsPath
    pathlib._local.PurePosixPath pathlib._local.Path datetime.datetime datetime.timedelta
    datetime.date datetime.time datetime.timezone decimal.Decimal fractions.Fraction uuid.UUID
    uuid.SafeUUID typing.Any
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
"""Modules with the classes that these libraries put into checkpoints: settings, states, layers."""
TENSOR_FUNCTIONS = frozenset({"torch.nn.functional", "torch._C._nn"})
"""Functions that a layer may keep, such as its activation: they may be named, not called."""
LIBRARIES = frozenset(sys.stdlib_module_names) | _words(
    """
    commands popen2 imp cPickle urllib2 httplib distutils lib2to3 asyncore asynchat smtpd
    telnetlib xdrlib pipes crypt numpy scipy pandas torch torchgen functorch pip setuptools
    pkg_resources wheel ensurepip dill cloudpickle joblib requests httpx aiohttp urllib3 cffi
    pytest _pytest jinja2 IPython
    """
)
"""Packages that are installed nearly everywhere: of them only what is needed may be named.

The whole standard library is among them, with modules that newer versions of Python dropped.
"""
Trust = Literal["needed", "unknown", "calls", "hostile"]


def trust(name: Global, *, called: bool = False) -> Trust:
    """Classify a name; `called` says that the stream calls it, as it must to run a function.

    `unknown`: a class or value of a user's project, which is rebuilt without a call. `calls`: such
    a class whose constructor is called with arguments from the file. `hostile`: it could run any
    code.
    """
    if _reaches_inside(name):
        return "hostile"
    # eval, exec, getattr and __import__ are builtins: only listed ones are harmless
    if name.module in BUILTINS:
        return "needed" if name.name in HARMLESS_BUILTINS else "hostile"
    if _is_needed(name):
        return "needed"
    if name.module.partition(".")[0] in LIBRARIES and (called or not _may_be_kept(name)):
        return "hostile"
    # a class that is only named is built by __new__ and __setstate__ of its own; a call runs more
    if not called:
        return "unknown"
    return "calls" if _is_class(name.name) else "hostile"


def _reaches_inside(name: Global) -> bool:
    """Find `OrderedDict.__init__.__globals__`, and extension codes, which may mean anything."""
    dunder = any(part.startswith("__") and part.endswith("__") for part in name.name.split("."))
    return dunder or (name.module == "copyreg" and name.name.startswith("extension "))


def _is_needed(name: Global) -> bool:
    return (
        str(name) in NEEDED
        or _is_torchscript(name)
        or _is_torch_type(name)
        or _is_numpy_type(name)
        or _is_framework_class(name)
    )


def _may_be_kept(name: Global) -> bool:
    """Allow a layer to refer to a class of torch, or to a function such as `F.gelu`."""
    if name.module in TENSOR_FUNCTIONS:
        return True
    return name.module.partition(".")[0] == "torch" and _is_class(name.name)


def _is_class(word: str) -> bool:
    """Tell a class by its spelling, as PEP 8 has it."""
    # STACK_GLOBAL follows dots, so every part of `F.torch.os.system` has to be a class
    return all(part.lstrip("_")[:1].isupper() for part in word.split("."))


def _is_framework_class(name: Global) -> bool:
    """Accept classes of the listed modules; their functions and dotted names are not accepted."""
    if "." in name.name or not _is_class(name.name):
        return False
    return f"{name.module}.".startswith(FRAMEWORKS)


def _is_torchscript(name: Global) -> bool:
    """Accept classes of a TorchScript archive, which exist nowhere outside of it."""
    if name.module.startswith("__torch__"):
        return True
    return name.module == "torch.jit._pickle" and name.name in SCRIPTED


def _is_torch_type(name: Global) -> bool:
    if name.name in dtype_names.STORAGES:
        return name.module in ("torch", "torch.cuda", "torch.storage")
    if name.module != "torch":
        return False
    return name.name in dtype_names.SIZES or name.name in dtype_names.ALIASES


def _is_numpy_type(name: Global) -> bool:
    return name.module == "numpy.dtypes" and name.name.endswith("DType") and name.name.isalnum()
