"""The list of what a pickle may name and call: exact names, with the arguments they may be given.

Nothing is imported. A list of dangerous names would never be complete: every installed library
holds some function that runs code. A list of what checkpoints need is short. Nothing on it acts on
its own when it is called with the arguments stated here: no function that calls, imports, opens or
unpickles what it is given is listed without a check of that argument (`inert_pickle.BUILDERS`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from stepguard.check.scan import ALIASES, SIZES, STORAGES
from stepguard.check.settings import named_lists


@dataclass(frozen=True, slots=True, repr=False)
class Global:
    """The name of something importable. It is never imported."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def _named(text: str) -> frozenset[Global]:
    """Parse lines of `module: name name ...`."""
    found: set[Global] = set()
    for module, names in named_lists(text).items():
        found.update(Global(module, name) for name in names)
    return frozenset(found)


NAMED = _named(
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
"""Types and values that may be referred to, but not called."""
RECORDS = _named(
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
"""Classes that are made without arguments and given a state, which does not act on it."""
MAPPINGS = _named(
    """
    lightning.fabric.utilities.data: AttributeDict
    lightning.pytorch.utilities.parsing: AttributeDict
    lightning_fabric.utilities.data: AttributeDict
    pytorch_lightning.utilities.parsing: AttributeDict
    """
)
"""Subclasses of dict, which are made empty and filled."""
ENUMS = _named(
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
"""Enums, which are called with their value."""
STATEFUL = _named(
    """
    torch._C: Generator
    torch.distributed.checkpoint.metadata: TensorProperties
    torch.distributed.tensor.placement_types: Shard Replicate Partial _StridedShard
    numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
    numpy.random.bit_generator: __pyx_unpickle_SeedSequence
    """
)
"""What has a state that is not a dict of attributes, read by compiled code or taken apart."""
TENSORS = _named(
    """
    torch: Tensor
    torch.nn.parameter: Parameter Buffer
    torch.distributed.tensor: DTensor
    torch.distributed.tensor._api: DTensor
    """
)
SCRIPTED = _named(
    "torch.jit._pickle: build_intlist build_tensorlist build_doublelist build_boollist "
    "build_tensor_from_id restore_type_tag"
)
"""The lists of a TorchScript archive, which is read by C++."""
REBUILT = _named(
    "torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_qtensor "
    "_rebuild_parameter _rebuild_wrapper_subclass"
)
"""Functions that the one function of torch that calls another may call."""
_SIGNATURES = """
    collections.OrderedDict: ITEMS?
    collections.defaultdict: FACTORY? ITEMS?
    collections.Counter: dict|empty?
    collections.deque: ITEMS? int|none?
    builtins.set: ITEMS?
    builtins.frozenset: ITEMS?
    builtins.list: ITEMS?
    builtins.tuple: ITEMS?
    builtins.dict: ITEMS?
    builtins.bytes:
    builtins.bytearray: bytes|text? ENCODING?
    builtins.complex: int|float|bool int|float|bool
    builtins.slice: PLAIN PLAIN PLAIN
    builtins.range: int int int?
    builtins.type: none
    _codecs.encode: text ENCODING?
    copyreg._reconstructor: any any any
    torch.Size: shape?
    torch.device: text int?
    torch._C.Generator: DEVICE
    torch.serialization._get_layout: text
    torch.storage._load_from_bytes: !bytes
    torch._tensor._rebuild_from_type_v2: !rebuilt global any attributes
    torch._utils._rebuild_tensor: storage int shape shape bool? empty? dict|none?
    torch._utils._rebuild_tensor_v2: storage int shape shape bool? empty? dict|none?
    torch._utils._rebuild_tensor_v3: storage int shape shape bool empty dtype dict|none?
    torch._utils._rebuild_qtensor: storage int shape shape quantizer bool empty
    torch._utils._rebuild_parameter: tensor bool empty attributes?
    torch._utils._rebuild_parameter_with_state: tensor bool empty attributes?
    torch._utils._rebuild_sparse_tensor: LAYOUT sparse
    torch._utils._rebuild_meta_tensor_no_storage: dtype shape shape bool
    torch._utils._rebuild_device_tensor_from_numpy: array dtype DEVICE bool
    torch._utils._rebuild_device_tensor_from_cpu_tensor: tensor dtype DEVICE bool
    torch._utils._rebuild_xla_tensor: array dtype DEVICE bool
    torch._utils._rebuild_nested_tensor: tensor tensor tensor tensor
    torch._utils._rebuild_wrapper_subclass:
        subclass dtype shape shape|none int|none LAYOUT DEVICE bool
    torch.distributed.tensor._dtensor_spec.TensorMeta: shape shape dtype
    torch.distributed.tensor._dtensor_spec.ShardOrderEntry: int shape
    numpy._core.multiarray._reconstruct: @numpy.ndarray sizeless bytes|text
    numpy._core.multiarray.scalar: number_type bytes|text
    numpy._core.numeric._frombuffer: bytes number_type shape any? any?
    numpy.dtype: bytes|text int|bool? int|bool?
    numpy.random._pickle.__bit_generator_ctor: !GENERATOR?
    numpy.random._pickle.__generator_ctor:
        !GENERATOR|numpy.random._pickle.__bit_generator_ctor?
        !@numpy.random._pickle.__bit_generator_ctor?
    numpy.random._pickle.__randomstate_ctor:
        !GENERATOR|numpy.random._pickle.__bit_generator_ctor?
        !@numpy.random._pickle.__bit_generator_ctor?
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence:
        @numpy.random.bit_generator.SeedSequence int tuple|none
    datetime.datetime: bytes|text datetime.timezone?
    datetime.date: bytes|text
    datetime.time: bytes|text datetime.timezone?
    datetime.timedelta: int int int
    datetime.timezone: datetime.timedelta text?
    decimal.Decimal: text
    fractions.Fraction: ratio|int int?
    types.SimpleNamespace:
    pathlib.PosixPath: text*
    pathlib.WindowsPath: text*
    pathlib.PurePosixPath: text*
    pathlib.PureWindowsPath: text*
    pathlib.Path: text*
    pathlib._local.PosixPath: text*
    pathlib._local.WindowsPath: text*
    pathlib._local.PurePosixPath: text*
    pathlib._local.PureWindowsPath: text*
"""
"""Calls with the kinds of their arguments (`inert_pickle.is_kind`).

`?`: optional. `*`: any number of them. `!`: called or loaded, so that another one is hostile.
"""
_SHORT = {
    "ITEMS": "list|tuple|dict",
    "PLAIN": "none|text|int|float|bool",
    "ENCODING": "=latin1|=latin-1|=utf-8|=ascii",
    "DEVICE": "text|torch.device",
    "LAYOUT": "torch.serialization._get_layout|named",
    "GENERATOR": "=MT19937|=PCG64|=PCG64DXSM|=Philox|=SFC64|@numpy.random._mt19937.MT19937"
    "|@numpy.random._pcg64.PCG64|@numpy.random._pcg64.PCG64DXSM|@numpy.random._philox.Philox"
    "|@numpy.random._sfc64.SFC64",
    "FACTORY": "none|@builtins.list|@builtins.dict|@builtins.int|@builtins.float|@builtins.set"
    "|@builtins.str|@builtins.tuple|@builtins.bool|@collections.OrderedDict|@collections.Counter"
    "|@collections.defaultdict|@collections.deque",
}
"""Kinds of arguments that several calls have."""
_NUMPY_TYPES = _named(
    """
    numpy.dtypes: BoolDType Int8DType UInt8DType Int16DType UInt16DType Int32DType UInt32DType
        Int64DType UInt64DType Float16DType Float32DType Float64DType LongDoubleDType
    """
)


for _short, _kind in _SHORT.items():
    _SIGNATURES = _SIGNATURES.replace(_short, _kind)
CALLS = {
    Global(*name.rsplit(".", 1)): tuple(kinds) for name, kinds in named_lists(_SIGNATURES).items()
}
"""Every call that may be made -> the kinds of its arguments."""
CALLS |= dict.fromkeys(ENUMS, ("text|int",)) | dict.fromkeys(MAPPINGS | _NUMPY_TYPES, ())
STORAGE_TYPES = frozenset(
    Global(module, name) for module in ("torch", "torch.cuda", "torch.storage") for name in STORAGES
)
DTYPES = {Global("torch", name): ALIASES.get(name, name) for name in (*SIZES, *ALIASES)}
"""Names of element types in torch -> the element type."""
LISTED = NAMED | STORAGE_TYPES | DTYPES.keys() | TENSORS | RECORDS | CALLS.keys()
"""Every name that may be referred to."""

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


def is_listed(name: Global, *, scripted: bool = False) -> bool:
    """Is the name on the list? Classes of a TorchScript archive exist in that archive only."""
    if name in LISTED:
        return True
    # compiled classes that libraries register have a `__setstate__` of their own
    is_own = name.package == "__torch__" and not name.module.startswith("__torch__.torch.classes")
    return scripted and (name in SCRIPTED or is_own)


def trust(name: Global, *, called: bool = False, scripted: bool = False) -> Trust:
    """Classify a name; `called` says that the stream uses it in a way that is not on the list.

    `unknown`: a class or value that is rebuilt without a call. `calls`: a class that is called with
    arguments from the file. `hostile`: it could run any code.
    """
    if is_listed(name, scripted=scripted) and (scripted or not called):
        return "needed"
    # STACK_GLOBAL follows dots, so every part of `F.torch.os.system` has to be spelled as a class
    parts = name.name.split(".")
    is_class = all(part.lstrip("_")[:1].isupper() for part in parts)
    if name.package in LIBRARIES and (called or name.package != "torch" or not is_class):
        return "hostile"
    if any(part.startswith("__") and part.endswith("__") for part in parts):
        return "hostile"
    if not called:
        return "unknown"
    return "calls" if is_class else "hostile"
