"""Element types by their torch names: sizes, and the names other formats have for them."""

from __future__ import annotations

SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
}  # fmt: skip
ALIASES = {
    "float": "float32", "double": "float64", "half": "float16",
    "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip
STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64",
    "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
SAFETENSORS_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of types that are packed below a byte: their size is checked, their values are not."""
NUMPY = {
    "f8": "float64", "f4": "float32", "f2": "float16", "c16": "complex128", "c8": "complex64",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool",
}  # fmt: skip
LARGEST = {"float64": 1.797e308, "float32": 3.402e38, "bfloat16": 3.389e38, "float16": 65504.0}
"""Types whose values are judged by magnitude; 8-bit floats have a scale stored beside them."""


def is_real(dtype: str) -> bool:
    """Can an element be NaN or infinite?"""
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float4_e2m1fn_x2"
