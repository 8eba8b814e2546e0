"""Names a pickle may refer to: which ones are understood, which ones would be dangerous to call."""

from __future__ import annotations

from typing import Literal

from stepguard.state.checking import dtypes
from stepguard.state.checking.inert import Global


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DANGEROUS_MODULES = _words(
    """
    os posix nt posixpath ntpath subprocess _posixsubprocess sys shutil socket _socket ssl pty tty commands popen2
    ctypes _ctypes cffi importlib imp pkgutil zipimport runpy code codeop marshal pickle _pickle cPickle dill
    cloudpickle joblib shelve webbrowser antigravity urllib urllib2 http httplib requests httpx aiohttp ftplib
    telnetlib smtplib xmlrpc asyncio multiprocessing _multiprocessing threading _thread concurrent signal mmap
    resource fcntl select selectors gc inspect ast dis bdb pdb timeit profile cProfile trace doctest unittest pytest
    idlelib lib2to3 distutils setuptools pip ensurepip venv site sysconfig tempfile glob fileinput linecache
    platform atexit faulthandler weakref jinja2 pydoc IPython
    """
)
"""Modules of which nothing belongs into a checkpoint. The first part of the name counts: `os.path` is `os`."""
BUILTINS = frozenset({"builtins", "__builtin__"})
HARMLESS_BUILTINS = _words(
    """
    set frozenset list dict tuple int float complex bool str bytes bytearray slice range object long unicode
    Ellipsis NotImplemented type reversed enumerate xrange
    """
)
DANGEROUS = _words(
    """
    operator.attrgetter operator.methodcaller operator.itemgetter _operator.attrgetter _operator.methodcaller
    _operator.itemgetter types.CodeType types.FunctionType types.LambdaType types.MethodType io.open io.FileIO
    _io.open _io.FileIO io.open_code _io.open_code codecs.open pathlib.Path.write_text torch.load torch.save
    torch.serialization.load torch.serialization._load torch.hub.load torch.hub.load_state_dict_from_url
    torch.jit.load torch.package.PackageImporter torch.compile torch.ops.load_library
    torch._inductor.codecache.compile_file torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline
    torch.utils.collect_env.run torch.utils.bottleneck.__main__.run_cprofile torch.distributed.rpc.rpc_sync
    numpy.load numpy.save numpy.fromfile numpy.memmap numpy.testing._private.utils.runstring
    numpy.testing.runstring numpy.f2py.compile numpy.distutils.exec_command
    """
)
UNDERSTOOD = _words(
    """
    collections.OrderedDict collections.defaultdict collections.Counter collections.deque collections.namedtuple
    torch.Size torch.device torch.Tensor torch.strided torch.sparse_coo torch.serialization._get_layout
    torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3
    torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state torch._utils._rebuild_qtensor
    torch._utils._rebuild_sparse_tensor torch._utils._rebuild_meta_tensor_no_storage
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._rebuild_nested_tensor
    torch._tensor._rebuild_from_type_v2 torch.nn.parameter.Parameter torch.storage._load_from_bytes
    torch.storage.TypedStorage torch.storage.UntypedStorage torch.per_tensor_affine torch.per_channel_affine
    torch.nn.parameter.Buffer torch.contiguous_format torch.preserve_format torch.channels_last
    torch.serialization.MAP_LOCATION _codecs.encode copyreg._reconstructor copy_reg._reconstructor
    numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.core.numeric._frombuffer
    numpy._core.numeric._frombuffer numpy.random._pickle.__randomstate_ctor numpy.random._pickle.__generator_ctor
    numpy.random._pickle.__bit_generator_ctor numpy.random._mt19937.MT19937 numpy.random._pcg64.PCG64
    argparse.Namespace types.SimpleNamespace pathlib.PosixPath pathlib.WindowsPath pathlib.PurePosixPath
    pathlib.PureWindowsPath pathlib.Path pathlib._local.PosixPath datetime.datetime datetime.timedelta datetime.date
    datetime.time datetime.timezone decimal.Decimal fractions.Fraction uuid.UUID typing.Any
    """
)
UNDERSTOOD_MODULES = ("torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem.",
                      "torch.distributed.checkpoint._extension.", "__torch__.", "torch.jit._pickle.")  # fmt: skip
"""DCP's own records, and the made-up classes of a TorchScript archive."""
FRAMEWORKS = (
    "torch.nn.",
    "torch.optim.",
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
)
"""Where the classes live that these libraries put into their own checkpoints: settings, states, layers."""
Trust = Literal["understood", "unknown", "hostile"]


def trust(name: Global) -> Trust:
    """How a name is taken. Nothing is ever imported, so this decides on words only."""
    top, full = name.module.partition(".")[0], str(name)
    if top in BUILTINS:
        return "understood" if name.name in HARMLESS_BUILTINS else "hostile"
    if top in DANGEROUS_MODULES or full in DANGEROUS or _reaches_inside(name):
        return "hostile"
    if full in UNDERSTOOD or full.startswith(UNDERSTOOD_MODULES) or _torch_type(name) or _framework_class(name):
        return "understood"
    return "unknown"


def _reaches_inside(name: Global) -> bool:
    """`OrderedDict.__init__.__globals__`, or an extension code, which means what the reader's registry says."""
    dunder = any(part.startswith("__") and part.endswith("__") for part in name.name.split("."))
    return dunder or (name.module == "copyreg" and name.name.startswith("extension "))


def _framework_class(name: Global) -> bool:
    """A class by its spelling; functions of the same modules are not taken for granted."""
    return name.name[:1].isupper() and f"{name.module}.".startswith(FRAMEWORKS)


def _torch_type(name: Global) -> bool:
    if name.module in ("torch", "torch.cuda", "torch.storage") and name.name in dtypes.STORAGES:
        return True
    return name.module == "torch" and (name.name in dtypes.SIZES or name.name in dtypes.ALIASES)
