"""The list of what a pickle may name and call: exact names, with the arguments they may be given.

Nothing is imported. A list of dangerous names would never be complete: every installed library
holds some function that runs code. A list of what checkpoints need is short. Nothing on it acts on
its own when it is called with the arguments stated here: no function that calls, imports, opens or
unpickles what it is given is listed without a check of that argument.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from stepguard.verification import bounded_file
from stepguard.verification.bounded_file import Damaged

# --- What a pickle stream becomes here: plain containers, and records of what it would have
# built.


NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""Shared by all objects without entries: a file may hold millions of them."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something importable. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object that pickle would have built: class, arguments, state and items, none of it run."""

    what: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: Any = ()
    entries: Any = field(default_factory=lambda: NOTHING)

    def states(self) -> tuple[Any, ...]:
        """Return the parts of the state: a class with slots pickles `(dict, slots)`."""
        if isinstance(self.state, tuple):
            return self.state
        return (self.state,)

    def field(self, name: str) -> Any:
        """Return a field of the state; None if it has no such field."""
        for state in self.states():
            if isinstance(state, dict) and name in state:
                return state[name]
        return None


@dataclass(slots=True, eq=False)
class PickledBytes:
    """A byte string of the stream by its offset in the file; short ones are kept in memory too."""

    start: int
    """In the file, not in the slice; -1 for bytes that do not lie in the file as they are."""
    size: int
    data: bytes | None = None


class PickledSet(list[Any]):
    """The members of a set as a list: they may be values that cannot be hashed."""


@dataclass(slots=True, eq=False)
class StorageRecord:
    """Memory that tensors are views of."""

    key: str
    dtype: str
    elements: int
    nested: PickledBytes | None = None
    """The bytes of the storage, where it is itself a torch.save inside a plain pickle."""


@dataclass(slots=True, eq=False)
class TensorRecord:
    """A tensor as a view of a storage."""

    storage: StorageRecord
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool = False


@dataclass(slots=True, eq=False)
class ArrayRecord:
    """A numpy array whose bytes stand in the stream."""

    raw: PickledBytes | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_filled: bool = False
    """It has its bytes: numpy frees them for another state, and a tensor may still use them."""

    def set_state(self, state: Any) -> None:
        """Take `(version, shape, dtype, is_fortran, bytes)`, as numpy's `__setstate__` does."""
        _, shape, dtype, _, raw = state
        # the elements of an array of objects stand in a list
        is_held = isinstance(dtype, NumpyType) and (
            isinstance(raw, list) if dtype.is_object else isinstance(raw, PickledBytes | str)
        )
        is_sized = bounded_file.is_shape(shape) and min(shape, default=0) >= 0
        if self.is_filled or not is_held or not is_sized:
            raise ValueError("a state that numpy does not write for an array")
        self.is_filled = True
        if isinstance(raw, PickledBytes):
            self.raw = raw
            self.shape = tuple(shape)
            self.dtype = dtype.torch_name


@dataclass(slots=True, eq=False)
class NumpyType:
    """A numpy dtype: its letter code and byte order."""

    code: str
    order: str = "<"
    is_copy: bool = False
    """Made for this pickle; numpy hands out the same object for a type everywhere else."""

    @property
    def is_object(self) -> bool:
        return self.code.startswith("O")

    @property
    def torch_name(self) -> str:
        """Return torch's name; empty if torch has no such type or the bytes are big-endian."""
        if self.order == ">" and not self.code.endswith("1"):
            return ""
        return bounded_file.NUMPY.get(self.code, "")

    def set_state(self, state: Any) -> None:
        """Take the byte order from `(version, order, subtype, names, fields, size, alignment,
        flags[, metadata])`.

        numpy believes all of it. Flags that deny an object turn bytes into pointers, and so does
        a field that lies outside of its element.
        """
        version, order, subtype, names, fields, size, _, flags, *metadata = state
        if subtype is not None or names is not None or fields is not None:
            raise Damaged(
                "format",
                "a structured NumPy type is not read, for NumPy believes the offsets of its "
                "fields; save its columns as arrays of their own",
            )
        letter = self.code[:1]
        width = int(self.code[1:] or 0) if letter in "SUV" else -1
        expected = (width * 4 if letter == "U" else width, {"O": 63, "U": 8}.get(letter, 0))
        dated = letter in "mM" and version == 4 and len(metadata) == 1
        if (
            not self.is_copy
            or (size, flags) != expected
            or order not in ("<", ">", "|", "=")
            or not (dated or (version == 3 and not metadata))
        ):
            raise ValueError(f"a state that numpy does not write for the type {self.code[:20]}")
        self.order = order


# --- The list of what a pickle may name and call: exact names, with the arguments they may be
# given.


PickleMachine = Any
"""The machine that asks for a value; it imports this module."""
Build = Callable[..., Any]
"""Takes the machine and the arguments of a call; returns the record of its value."""
ARGUMENTS = (
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    struct.error,
)
"""What a builder raises when it is given arguments it does not take."""


def _named(text: str) -> Iterator[Global]:
    """Parse lines of `module: name name ...`; a line without a module continues the one above."""
    module = ""
    for word in text.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            yield Global(module, word)


NAMED = frozenset(
    _named(
        """
        builtins: set frozenset list dict tuple int float complex bool str bytes bytearray slice
            range object Ellipsis NotImplemented
        torch: strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged
            per_tensor_affine per_channel_affine per_tensor_symmetric per_channel_symmetric
            per_channel_affine_float_qparams contiguous_format preserve_format channels_last
        torch.storage: TypedStorage
        torch.nn.functional: relu relu6 gelu silu leaky_relu elu selu celu mish sigmoid tanh
            softmax softplus softsign hardswish hardsigmoid hardtanh logsigmoid glu
        torch._C._nn: gelu silu softplus log_sigmoid leaky_relu
        numpy: ndarray bool_ bool str_ bytes_ float16 float32 float64 longdouble int8 int16 int32
            int64 uint8 uint16 uint32 uint64 complex64 complex128 datetime64 timedelta64
        numpy.random._mt19937: MT19937
        numpy.random._pcg64: PCG64 PCG64DXSM
        numpy.random._philox: Philox
        numpy.random._sfc64: SFC64
        numpy.random.bit_generator: SeedSequence
        numpy.random.mtrand: RandomState
        numpy.random._generator: Generator
        typing: Any
        lightning.pytorch.callbacks.early_stopping: EarlyStopping
        lightning.pytorch.callbacks.model_checkpoint: ModelCheckpoint
        pytorch_lightning.callbacks.early_stopping: EarlyStopping
        pytorch_lightning.callbacks.model_checkpoint: ModelCheckpoint
        """
    )
)
"""Types and values that may be referred to, but not called."""
TYPES = frozenset(
    Global(module, name)
    for module in ("torch", "torch.cuda", "torch.storage")
    for name in bounded_file.STORAGES
) | frozenset(Global("torch", name) for name in (*bounded_file.SIZES, *bounded_file.ALIASES))
"""Storages and element types of torch."""
RECORDS = frozenset(
    _named(
        """
        argparse: Namespace
        types: SimpleNamespace
        uuid: UUID
        torch.nn.modules.activation: CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh
            LeakyReLU LogSigmoid LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU
            SiLU Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink
            Threshold
        torch.nn.modules.adaptive: AdaptiveLogSoftmaxWithLoss
        torch.nn.modules.batchnorm: BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm
        torch.nn.modules.channelshuffle: ChannelShuffle
        torch.nn.modules.container: ModuleDict ModuleList ParameterDict ParameterList Sequential
        torch.nn.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
        torch.nn.modules.distance: CosineSimilarity PairwiseDistance
        torch.nn.modules.dropout: AlphaDropout Dropout Dropout1d Dropout2d Dropout3d
            FeatureAlphaDropout
        torch.nn.modules.flatten: Flatten Unflatten
        torch.nn.modules.fold: Fold Unfold
        torch.nn.modules.instancenorm: InstanceNorm1d InstanceNorm2d InstanceNorm3d
        torch.nn.modules.linear: Bilinear Identity Linear NonDynamicallyQuantizableLinear
        torch.nn.modules.loss: BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss
            CrossEntropyLoss GaussianNLLLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MSELoss
            MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss
            PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss
            TripletMarginWithDistanceLoss
        torch.nn.modules.module: Module
        torch.nn.modules.normalization: CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm
        torch.nn.modules.padding: CircularPad1d CircularPad2d CircularPad3d ConstantPad1d
            ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d
            ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d
        torch.nn.modules.pixelshuffle: PixelShuffle PixelUnshuffle
        torch.nn.modules.pooling: AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
            AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d
            FractionalMaxPool2d FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d
            MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d
        torch.nn.modules.rnn: GRU GRUCell LSTM LSTMCell RNN RNNCell
        torch.nn.modules.sparse: Embedding EmbeddingBag
        torch.nn.modules.transformer: Transformer TransformerDecoder TransformerDecoderLayer
            TransformerEncoder TransformerEncoderLayer
        torch.nn.modules.upsampling: Upsample UpsamplingBilinear2d UpsamplingNearest2d
        torch.optim.swa_utils: AveragedModel
        torch.utils.data.sampler: RandomSampler SequentialSampler BatchSampler SubsetRandomSampler
            WeightedRandomSampler
        torch.utils.data.dataset: TensorDataset Subset ConcatDataset
        torch.distributed.checkpoint.metadata: ChunkStorageMetadata TensorProperties StorageMeta
            TensorStorageMetadata Metadata BytesStorageMetadata MetadataIndex
        torch.distributed.checkpoint.filesystem: _StorageInfo _StoragePrefix
        torch.distributed.device_mesh: DeviceMesh
        torch.distributed._mesh_layout: _MeshLayout _FlatLayout
        torch.distributed.tensor._dtensor_spec: DTensorSpec
        torch.distributed.tensor.placement_types: Shard Replicate Partial _StridedShard
        transformers.training_args: TrainingArguments
        transformers.training_args_seq2seq: Seq2SeqTrainingArguments
        transformers.trainer_pt_utils: AcceleratorConfig
        transformers.generation.configuration_utils: GenerationConfig
        trl.trainer.sft_config: SFTConfig
        trl.trainer.dpo_config: DPOConfig
        trl.trainer.grpo_config: GRPOConfig
        trl.trainer.reward_config: RewardConfig
        accelerate.state: PartialState
        accelerate.data_loader: SeedableRandomSampler
        peft.tuners.lora.config: LoraConfig LoraRuntimeConfig
        omegaconf.dictconfig: DictConfig
        omegaconf.listconfig: ListConfig
        omegaconf.base: ContainerMetadata Metadata
        omegaconf.nodes: AnyNode IntegerNode FloatNode BooleanNode StringNode BytesNode PathNode
            EnumNode
        """
    )
)
"""Classes that are made without arguments and given a state, which does not act on it."""
MAPPINGS = frozenset(
    _named(
        """
        lightning.fabric.utilities.data: AttributeDict
        lightning.pytorch.utilities.parsing: AttributeDict
        lightning_fabric.utilities.data: AttributeDict
        pytorch_lightning.utilities.parsing: AttributeDict
        """
    )
)
"""Subclasses of dict, which are made empty and filled."""
ENUMS = frozenset(
    _named(
        """
        uuid: SafeUUID
        torch.distributed.checkpoint.metadata: _MEM_FORMAT_ENCODING
        torch.distributed.checkpoint.filesystem: SerializationFormat
        transformers.trainer_utils: IntervalStrategy SaveStrategy HubStrategy SchedulerType
            EvaluationStrategy FSDPOption
        transformers.training_args: OptimizerNames ParallelMode
        accelerate.utils.dataclasses: DistributedType PrecisionType RNGType
        peft.utils.peft_types: PeftType TaskType
        deepspeed.runtime.zero.config: ZeroStageEnum
        megatron.core.enums: ModelType
        megatron.core.transformer.enums: AttnBackend AttnMaskType AttnType LayerType ModelType
        """
    )
)
"""Enums, which are called with their value."""
SIGNATURES = {
    "torch.device": "text int?",
    "torch._C.Generator": "device",
    "torch.serialization._get_layout": "text",
    "torch._utils._rebuild_sparse_tensor": "layout sparse",
    "torch._utils._rebuild_meta_tensor_no_storage": "dtype shape shape bool",
    "torch._utils._rebuild_device_tensor_from_numpy": "array dtype device bool",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "tensor dtype device bool",
    "torch._utils._rebuild_xla_tensor": "array dtype device bool",
    "torch._utils._rebuild_nested_tensor": "tensor tensor tensor tensor",
    "torch._utils._rebuild_wrapper_subclass":
        "subclass dtype shape shape|none int|none layout device bool",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "shape shape dtype",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry": "int shape",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": "seeds int tuple|none",
    "datetime.datetime": "bytes|text datetime.timezone?",
    "datetime.date": "bytes|text",
    "datetime.time": "bytes|text datetime.timezone?",
    "datetime.timedelta": "int int int",
    "datetime.timezone": "datetime.timedelta text?",
    "decimal.Decimal": "text",
    "fractions.Fraction": "ratio|int int?",
    "types.SimpleNamespace": "",
    "builtins.slice": "plain plain plain",
    "builtins.range": "int int int?",
    "builtins.type": "none",
    "pathlib.PosixPath": "text*",
    "pathlib.WindowsPath": "text*",
    "pathlib.PurePosixPath": "text*",
    "pathlib.PureWindowsPath": "text*",
    "pathlib.Path": "text*",
    "pathlib._local.PosixPath": "text*",
    "pathlib._local.WindowsPath": "text*",
    "pathlib._local.PurePosixPath": "text*",
    "pathlib._local.PureWindowsPath": "text*",
}  # fmt: skip
"""Calls that stay records, with the kinds of their arguments (`?` optional, `*` any number)."""
DTYPES = "Bool Int8 UInt8 Int16 UInt16 Int32 UInt32 Int64 UInt64 Float16 Float32 Float64 LongDouble"
SIGNATURES |= {f"numpy.dtypes.{name}DType": "" for name in DTYPES.split()}
STATEFUL = frozenset(
    _named(
        """
        torch._C: Generator
        torch.distributed.checkpoint.metadata: TensorProperties
        torch.distributed.tensor.placement_types: Shard Replicate Partial _StridedShard
        numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
        numpy.random.bit_generator: __pyx_unpickle_SeedSequence
        """
    )
)
"""What has a state that is not a dict of attributes, read by compiled code or taken apart."""
BIT_GENERATORS = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
REBUILT = frozenset(
    Global("torch._utils", f"_rebuild_{name}")
    for name in ("tensor", "tensor_v2", "tensor_v3", "qtensor", "parameter", "wrapper_subclass")
)
"""Functions that the one function of torch that calls another may call."""
TENSORS = frozenset(
    _named(
        """
        torch: Tensor
        torch.nn.parameter: Parameter Buffer
        torch.distributed.tensor: DTensor
        torch.distributed.tensor._api: DTensor
        """
    )
)
SCRIPTED = frozenset(
    _named(
        "torch.jit._pickle: build_intlist build_tensorlist build_doublelist build_boollist "
        "build_tensor_from_id restore_type_tag"
    )
)
"""The lists of a TorchScript archive, which is read by C++."""
NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
           "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}  # fmt: skip
"""Letter code of a numpy type -> that of `struct`."""
RATIO = re.compile(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?")
ENCODINGS = ("latin1", "latin-1", "utf-8", "ascii")
FACTORIES = ("list", "dict", "int", "float", "set", "str", "tuple", "bool")


def build_value(machine: PickleMachine, what: Global, arguments: tuple[Any, ...]) -> Any:
    """Return the record of `what(*arguments)`; a call that is not listed is noted."""
    build = BUILDERS.get(what)
    try:
        if build is not None:
            return build(machine, *arguments)
        if what in CALLS:
            _check_arguments(CALLS[what], arguments)
        elif what in ENUMS:
            _check_arguments(("text|int",), arguments)
        elif not (what in MAPPINGS and not arguments):
            machine.seen.names[what] = True
        return PickledObject(what, arguments)
    except ARGUMENTS as error:
        raise Damaged("malformed", f"{what} is given arguments it cannot take: {error}") from None


def is_listed(name: Any, *, scripted: bool = False) -> bool:
    """Is the name on the list? Classes of a TorchScript archive exist in that archive only."""
    if name in LISTED:
        return True
    # compiled classes that libraries register have a `__setstate__` of their own
    is_own = name.module.split(".")[0] == "__torch__" and not name.module.startswith(
        "__torch__.torch.classes"
    )
    return scripted and (name in SCRIPTED or is_own)


def takes_state(what: Any, state: Any) -> bool:
    """May what was made by a listed name be given this state?"""
    # their `__setstate__` looks into the values, and a value of omegaconf runs a resolver for it
    if what.module.partition(".")[0] in ("torch", "numpy", "uuid"):
        values = state.values() if isinstance(state, dict) else state
        if any(map(_is_lazy, values if isinstance(values, Iterable) else (state,))):
            return False
    # not a mapping: pickle asks it for `__setstate__`, and its items answer as attributes
    return what in STATEFUL or (isinstance(state, dict) and what in RECORDS)


def is_key(value: PickledObject) -> bool:
    """Is it hashed and compared by code that does nothing else?"""
    if value.what not in RECORDS:
        return not _is_lazy(value)
    fields = value.state.values() if isinstance(value.state, dict) else ()
    return all(KINDS["plain"](each) or bounded_file.is_shape(each) for each in fields)


def _is_lazy(value: Any) -> bool:
    """Tell a value of omegaconf, which resolves `${...}` where it is read, compared or searched."""
    is_named = isinstance(value, PickledObject) and isinstance(value.what, Global)
    return is_named and value.what.module.partition(".")[0] == "omegaconf"


Trust = Literal["needed", "unknown", "calls", "hostile"]
_INSTALLED = """
    __builtin__ commands popen2 imp cPickle urllib2 httplib distutils lib2to3 asyncore asynchat
    smtpd telnetlib xdrlib pipes crypt numpy scipy pandas torch torchgen functorch pip setuptools
    pkg_resources wheel ensurepip dill cloudpickle joblib requests httpx aiohttp urllib3 cffi
    pytest _pytest jinja2 IPython
"""
LIBRARIES = frozenset((*sys.stdlib_module_names, *_INSTALLED.split()))
"""Packages that are installed nearly everywhere: what is not on the list is there to run code.

The whole standard library is among them, with modules that newer versions of Python dropped.
"""


def trust(name: Global, *, called: bool = False, scripted: bool = False) -> Trust:
    """Classify a name; `called` says that the stream uses it in a way that is not on the list.

    `unknown`: a class or value that is rebuilt without a call. `calls`: a class that is called with
    arguments from the file. `hostile`: it could run any code.
    """
    if is_listed(name, scripted=scripted) and (scripted or not called):
        return "needed"
    # STACK_GLOBAL follows dots, so every part of `F.torch.os.system` has to be spelled as a class
    is_class = all(part.lstrip("_")[:1].isupper() for part in name.name.split("."))
    package = name.module.partition(".")[0]
    if package in LIBRARIES and (called or package != "torch" or not is_class):
        return "hostile"
    if any(part.startswith("__") and part.endswith("__") for part in name.name.split(".")):
        return "hostile"
    if not called:
        return "unknown"
    return "calls" if is_class else "hostile"


def brief(value: Any) -> str:
    """Describe a value of any size and depth in a few letters, for a message."""
    # str() of an int with very many digits takes quadratic time, and Python refuses it
    huge = isinstance(value, int) and value.bit_length() > 64
    if isinstance(value, str | int | float | Global) and not huge:
        return str(value)[:80]
    return f"a {type(value).__name__}"


def dtype_of(value: Any) -> str:
    """Return the name of a dtype such as `torch.bfloat16`; empty for anything else."""
    if not isinstance(value, Global) or value.module != "torch":
        return ""
    name = bounded_file.ALIASES.get(value.name, value.name)
    return name if name in bounded_file.SIZES else ""


def _made_by(value: Any, *names: str) -> bool:
    return isinstance(value, PickledObject) and str(value.what) in names


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorRecord) or _made_by(
        value, *(name for name in SIGNATURES if name.startswith("torch._utils._rebuild_"))
    )


KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: type(value) is str,
    "int": lambda value: type(value) is int,
    # not `1e999999999`, which takes all memory there is
    "ratio": lambda value: type(value) is str and bool(RATIO.fullmatch(value)),
    "bool": lambda value: type(value) is bool,
    "none": lambda value: value is None,
    "bytes": lambda value: isinstance(value, PickledBytes),
    "plain": lambda value: value is None or type(value) in (str, int, float, bool),
    "tuple": lambda value: type(value) is tuple,
    "shape": lambda value: bounded_file.is_shape(value),
    "dtype": lambda value: bool(dtype_of(value)),
    "layout": lambda value: _made_by(value, "torch.serialization._get_layout") or value in NAMED,
    "device": lambda value: type(value) is str or _made_by(value, "torch.device"),
    "array": lambda value: isinstance(value, ArrayRecord),
    "tensor": _is_tensor,
    "sparse": lambda value: (
        type(value) is tuple
        and all(
            _is_tensor(part) or type(part) is bool or bounded_file.is_shape(part) for part in value
        )
    ),
    "subclass": lambda value: value in TENSORS,
    "seeds": lambda value: value == Global("numpy.random.bit_generator", "SeedSequence"),
}
"""Kind of an argument -> is this one? Other words are the name of what made the record."""


def _check_arguments(kinds: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
    """Raise ValueError if the arguments are not of these kinds."""
    for place, value in enumerate(arguments):
        kind = kinds[min(place, len(kinds) - 1)] if kinds else ""
        if place >= len(kinds) and not kind.endswith("*"):
            raise ValueError(f"{len(arguments)} of them")
        words = kind.rstrip("?*").split("|")
        if not any(
            KINDS[word](value) if word in KINDS else _made_by(value, word) for word in words
        ):
            raise ValueError(f"{brief(value)} is not of the kind {kind}")
    required = [kind for kind in kinds if kind[-1] not in "?*"]
    if len(arguments) < len(required):
        raise ValueError(f"{len(arguments)} of them, at least {len(required)} are needed")


def _sizes(value: Any) -> tuple[int, ...]:
    if not bounded_file.is_shape(value):
        raise ValueError("sizes that no tensor has")
    return tuple(value)


def _tensor(
    machine: PickleMachine,
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
    *,
    dtype: str = "",
) -> TensorRecord:
    if not isinstance(storage, StorageRecord) or type(offset) is not int:
        raise ValueError(f"a {type(storage).__name__} where a storage belongs")
    # torch writes an empty OrderedDict: hooks are not saved
    if type(requires_grad) is not bool or hooks or not isinstance(metadata, dict | None):
        raise ValueError("hooks or metadata that torch does not write")
    return TensorRecord(storage, dtype or storage.dtype, offset, _sizes(shape), _sizes(stride))


def _tensor_v3(
    machine: PickleMachine,
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRecord:
    """Build a tensor of a type that has no storage class of its own, such as uint16 or float8."""
    name = dtype_of(dtype)
    if not name:
        raise ValueError(f"{brief(dtype)} is not a known element type")
    return _tensor(machine, storage, offset, shape, stride, grad, hooks, metadata, dtype=name)


def _quantized(
    machine: PickleMachine,
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    quantizer: Any,
    grad: Any,
    hooks: Any,
) -> TensorRecord:
    is_known = isinstance(quantizer, tuple) and quantizer[0] in NAMED
    for part in quantizer[1:] if is_known else ():
        listed = part if type(part) is list else [part]
        is_known &= _is_tensor(part) or all(type(number) in (int, float) for number in listed)
    if not is_known:
        raise ValueError("a quantizer that torch does not write")
    return _tensor(machine, storage, offset, shape, stride, grad, hooks)


def _parameter(
    machine: PickleMachine, data: Any, requires_grad: Any, hooks: Any, state: Any = None
) -> Any:
    if not _is_tensor(data) or type(requires_grad) is not bool or hooks:
        raise ValueError(f"{brief(data)} where a tensor belongs")
    _check_attributes(machine, state)
    if isinstance(data, TensorRecord):
        data.parameter = True
    return data


def _check_attributes(machine: PickleMachine, state: Any) -> None:
    """Refuse attributes of a tensor that are not plain dicts: torch sets one after the other."""
    for part in state if isinstance(state, tuple) else (state,):
        if part is not None and type(part) is not dict:
            raise ValueError(f"{brief(part)} where the attributes of a tensor belong")
    machine.check_state(state)


def _tensor_subclass(
    machine: PickleMachine, function: Any, kind: Any, arguments: Any, state: Any
) -> Any:
    """Build the tensor of a subclass, or of one with attributes: torch calls `function` for it."""
    if function not in REBUILT:
        machine.seen.names.update({function: True} if isinstance(function, Global) else {})
        raise Damaged(
            "hostile",
            f"the pickle would call {brief(function)} by way of torch; nothing was run",
        )
    if not isinstance(kind, Global):
        raise ValueError(f"{brief(kind)} where the class of a tensor belongs")
    if kind not in TENSORS:
        machine.seen.names[kind] = True
    _check_attributes(machine, state)
    tensor = machine.call(function, arguments)
    if isinstance(tensor, PickledObject):
        tensor.state = state
    return tensor


def _nested_storage(machine: PickleMachine, raw: Any) -> StorageRecord:
    """Build a storage that a plain pickle holds as a whole torch.save of its own."""
    if not isinstance(raw, PickledBytes):
        raise Damaged(
            "hostile",
            f"the pickle would load {brief(raw)} as another pickle, which does not stand in the "
            "file as bytes; nothing was run",
        )
    machine.seen.nested[id(raw)] = raw
    return StorageRecord("nested", "", 0, nested=raw)


def _dict_of(machine: PickleMachine, items: Any = ()) -> dict[Any, Any]:
    # a copy, as pickle makes one: what is put into `items` later does not belong to it
    machine.seen.spend(8 * len(_container(items)))
    if isinstance(items, dict):
        return dict(items)
    return {machine.key(key): value for key, value in items}


def _counter(machine: PickleMachine, items: Any = ()) -> dict[Any, Any]:
    if items and not isinstance(items, dict):
        raise ValueError(f"{brief(items)} where counts belong")
    return _dict_of(machine, items)


def _default_dict(machine: PickleMachine, factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    names = ("OrderedDict", "defaultdict", "Counter", "deque")
    known = [Global("builtins", name) for name in FACTORIES]
    if factory not in (None, *known, *(Global("collections", name) for name in names)):
        raise ValueError(f"{brief(factory)} where the type of missing values belongs")
    return _dict_of(machine, items)


def _container(items: Any) -> Any:
    if not isinstance(items, list | tuple | dict):
        raise ValueError(f"{brief(items)} where a container belongs")
    return items


def _new_container(machine: PickleMachine, items: Any = (), longest: Any = None) -> list[Any]:
    machine.seen.spend(len(_container(items)))
    return list(items)


def _set_of(machine: PickleMachine, items: Any = ()) -> list[Any]:
    for item in _container(items):
        machine.key(item)
    return _new_container(machine, items)


def _byte_array(machine: PickleMachine, raw: Any = None, encoding: Any = None) -> PickledBytes:
    if raw is None:
        return PickledBytes(-1, 0, b"")
    if isinstance(raw, str):
        return _encode(machine, raw, encoding)
    if not isinstance(raw, PickledBytes):
        raise ValueError(f"{brief(raw)} where bytes belong")
    return raw


def _complex(machine: PickleMachine, real: Any, imaginary: Any) -> tuple[float, float]:
    return (real * 1.0, imaginary * 1.0)


def _numpy_type(machine: PickleMachine, code: Any, *rest: Any) -> NumpyType:
    text = code
    if isinstance(code, PickledBytes) and code.data is not None:
        text = code.data.decode("latin-1")
    if not isinstance(text, str) or not text or not all(type(flag) in (int, bool) for flag in rest):
        raise ValueError(f"{brief(code)} is not a numpy type")
    found = re.fullmatch(r"([<>=|]?)([A-Za-z?][0-9]{0,9})(\[[0-9a-zA-Z]{1,9}\])?", text)
    if found is None or len(rest) > 2:
        raise ValueError(f"{brief(text)} is not a plain numpy type")
    return NumpyType(found[2], ">" if found[1] == ">" else "<", is_copy=len(rest) == 2 and rest[1])


def _numpy_number(machine: PickleMachine, dtype: Any, raw: Any = None) -> Any:
    is_number = isinstance(dtype, NumpyType) and not dtype.is_object
    if not is_number or not isinstance(raw, PickledBytes | str):
        raise ValueError(f"{brief(raw)} where the bytes of a number belong")
    if isinstance(raw, str) or raw.data is None or dtype.code not in NUMBERS:
        return PickledObject(Global("numpy._core.multiarray", "scalar"), (dtype, raw))
    order = ">" if dtype.order == ">" else "<"
    return struct.unpack(order + NUMBERS[dtype.code], raw.data)[0]


def _empty_array(machine: PickleMachine, kind: Any, shape: Any, code: Any) -> ArrayRecord:
    if kind != Global("numpy", "ndarray") or not isinstance(code, PickledBytes | str):
        raise ValueError(f"{brief(kind)} where numpy.ndarray belongs")
    # its state brings the memory; here it could be asked for without a byte in the file
    if any(_sizes(shape)):
        raise ValueError("an array that is made with a size")
    return ArrayRecord(None, "", _sizes(shape))


def _array_from(
    machine: PickleMachine, buffer: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None
) -> ArrayRecord:
    is_typed = isinstance(dtype, NumpyType) and not dtype.is_object
    if not isinstance(buffer, PickledBytes) or not is_typed:
        raise ValueError(f"{brief(buffer)} where the bytes of an array belong")
    return ArrayRecord(buffer, dtype.torch_name, _sizes(shape), is_filled=True)


def _generator(make: str) -> Build:
    """Make the builder of a constructor of numpy that calls the class or function it is given."""
    what = Global("numpy.random._pickle", make)
    inner = Global("numpy.random._pickle", "__bit_generator_ctor")

    def build(machine: PickleMachine, kind: Any = "MT19937", call: Any = inner) -> PickledObject:
        named = kind if type(kind) is str else ""
        if isinstance(kind, Global) and kind in NAMED and kind.module.startswith("numpy.random._"):
            named = kind.name
        is_made = _made_by(kind, str(inner)) and what != inner
        if call != inner or not (named in BIT_GENERATORS or is_made):
            raise Damaged(
                "hostile",
                f"{what} would call {brief(kind)} or {brief(call)}; nothing was run",
            )
        return PickledObject(what, (kind,))

    return build


def _encode(machine: PickleMachine, text: Any, encoding: Any = "utf-8") -> PickledBytes:
    """Build bytes as protocol 2 writes them: as a text that `_codecs.encode` turns into bytes."""
    if not isinstance(text, str) or encoding not in ENCODINGS:
        raise ValueError("a text and a known encoding belong here")
    machine.seen.spend(len(text) // 8)
    data = text.encode(encoding)
    # in the file they are UTF-8, not the bytes themselves, so there is no offset to give
    return PickledBytes(-1, len(data), data)


def _reconstructed(machine: PickleMachine, kind: Any, base: Any, state: Any) -> PickledObject:
    """Build an object as protocol 0 and 1 do, by `base.__new__(kind, state)`."""
    is_object = base == Global("builtins", "object") and state is None
    is_dict = kind in MAPPINGS and base == Global("builtins", "dict") and state == {}
    if not isinstance(kind, Global) or not (is_object or is_dict):
        raise ValueError(f"{brief(kind)} made as a {brief(base)}")
    if is_listed(kind) and kind not in RECORDS and kind not in MAPPINGS:
        machine.seen.names[kind] = True
    return PickledObject(kind)


_BUILDERS: dict[str, Build] = {
    "collections.OrderedDict": _dict_of,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "collections.deque": _new_container,
    "builtins.set": _set_of,
    "builtins.frozenset": lambda machine, items=(): tuple(_set_of(machine, items)),
    "builtins.list": _new_container,
    "builtins.tuple": _new_container,
    "builtins.dict": _dict_of,
    "builtins.bytes": lambda machine: PickledBytes(-1, 0, b""),
    "builtins.bytearray": _byte_array,
    "builtins.complex": _complex,
    "torch.Size": lambda machine, sizes=(): _sizes(sizes),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_subclass,
    "torch.storage._load_from_bytes": _nested_storage,
    "numpy.core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy.core.multiarray.scalar": _numpy_number,
    "numpy._core.multiarray.scalar": _numpy_number,
    "numpy.core.numeric._frombuffer": _array_from,
    "numpy._core.numeric._frombuffer": _array_from,
    "numpy.dtype": _numpy_type,
    "numpy.random._pickle.__randomstate_ctor": _generator("__randomstate_ctor"),
    "numpy.random._pickle.__generator_ctor": _generator("__generator_ctor"),
    "numpy.random._pickle.__bit_generator_ctor": _generator("__bit_generator_ctor"),
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructed,
}


def _global(full: str) -> Global:
    module, _, name = full.rpartition(".")
    return Global(module, name)


BUILDERS = {_global(full): build for full, build in _BUILDERS.items()}
"""What builds the record of a call whose value or arguments matter."""
CALLS = {_global(full): tuple(kinds.split()) for full, kinds in SIGNATURES.items()}
LISTED = NAMED | TYPES | TENSORS | RECORDS | MAPPINGS | ENUMS | BUILDERS.keys() | CALLS.keys()
"""Every name that may be referred to."""


def storage_of(pid: Any) -> StorageRecord:
    """Parse a persistent id of torch.save: `("storage", type, key, location, elements[, view])`."""
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        raise Damaged("malformed", f"a persistent id that torch.save does not write: {brief(pid)}")
    _, kind, key, location, elements = pid[:5]
    dtype = bounded_file.STORAGES.get(kind.name) if isinstance(kind, Global) else None
    is_count = type(elements) is int and elements >= 0
    if dtype is None or type(key) is not str or type(location) is not str or not is_count:
        raise Damaged(
            "malformed",
            f"a storage of {brief(kind)} named {brief(key)} with {brief(elements)} elements",
        )
    # `(key, offset, size)` of a view, where newer versions write None or nothing
    if len(pid) > 5 and pid[5] is not None:
        raise Damaged(
            "format",
            "storages that are views of others (torch before 0.4); save it again with torch.save",
        )
    return StorageRecord(key, dtype, elements)
