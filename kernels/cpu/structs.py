"""ctypes mirrors of the native library's structures, field by field.

`library.py` compares their sizes with the compiler's when it loads the library.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_bool, c_float, c_int, c_int64, c_void_p
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

StructT = TypeVar("StructT", bound=Structure)


def struct_of(kind: type[StructT], source: object, **others: object) -> StructT:
    """Return a structure whose fields are the attributes of `source` with their names, and others.

    Tensors and arrays are passed as addresses.
    """
    names = [field[0] for field in kind._fields_ if field[0] not in others]
    return kind(**{name: _native(getattr(source, name)) for name in names}, **others)


def _native(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return value.data_ptr() if isinstance(value, Tensor) else value


def _of(kind: type, *names: str) -> tuple[tuple[str, Any], ...]:
    """Return consecutive fields of one type."""
    return tuple((name, kind) for name in names)


def argument_of(value: Any) -> object:
    """Return an argument of a function of the library: an address of what is not a number."""
    if hasattr(value, "struct"):
        value = value.struct()
    return byref(value) if isinstance(value, Structure) else _native(value)


class BatchStruct(Structure):
    """batch.h: Batch."""

    _fields_ = (
        *_of(c_int, "num_tokens", "num_sequences", "num_logits"),
        *_of(
            c_void_p, "token_ids", "positions", "slots", "starts", "lengths", "table_rows", "tables"
        ),
        ("table_stride", c_int64),
        *_of(c_void_p, "window_slots", "window_tables", "logit_index", "adapters"),
    )


class WeightStruct(Structure):
    """linear.h: Weight."""

    _fields_ = (*_of(c_int, "format", "n", "k", "num_panels"), *_of(c_void_p, "data", "bias"))


class RowsStruct(Structure):
    """linear.h: Rows."""

    _fields_ = (("values", c_void_p), ("stride", c_int), *_of(c_void_p, "scales", "sums"))


class OutputStruct(Structure):
    """linear.h: Output."""

    _fields_ = (
        *_of(c_int, "epilogue", "activation"),
        *_of(c_float, "limit", "sharpness", "offset"),
        ("is_bf16", c_bool),
        ("values", c_void_p),
        ("stride", c_int),
    )


class CacheStruct(Structure):
    """attention.h: KvCache."""

    _fields_ = (
        ("data", c_void_p),
        *_of(c_int, "format", "kv_format"),
        ("is_windowed", c_bool),
        *_of(c_int, "num_pages", "page_size", "num_kv_heads", "head_dim"),
        ("static_scales", c_void_p),
    )


class AttentionStruct(Structure):
    """attention.h: Attention."""

    _fields_ = (
        ("cache", CacheStruct),
        *_of(c_int, "layer", "num_heads", "window"),
        ("is_chunked", c_bool),
        *_of(c_float, "scale", "soft_cap"),
        *_of(c_void_p, "sinks", "slopes", "qkv"),
        ("qkv_stride", c_int),
        ("out", c_void_p),
        ("out_stride", c_int),
        ("out_is_bf16", c_bool),
    )


class NormStruct(Structure):
    """norm.h: NormWeights."""

    _fields_ = (
        *_of(c_void_p, "weight", "bias"),
        *_of(c_int, "size", "span"),
        ("is_centered", c_bool),
        ("epsilon", c_float),
    )


class RotationStruct(Structure):
    """program.h: RotateAndStore::Settings."""

    _fields_ = (
        ("cache", CacheStruct),
        *_of(c_int, "layer", "num_heads"),
        ("qkv", c_void_p),
        ("stride", c_int),
        *_of(c_void_p, "cosines", "sines"),
        *_of(c_int, "first", "num_pairs"),
        ("is_interleaved", c_bool),
        ("query_factors", c_void_p),
        *_of(NormStruct, "query_norm", "key_norm"),
        ("keys_are_values", c_bool),
    )


class LowRankStruct(Structure):
    """low_rank.h: LowRank."""

    _fields_ = (
        *_of(c_void_p, "a", "b"),
        *_of(c_int, "format", "inputs", "outputs", "num_parts", "max_rank", "num_blocks"),
        *_of(c_void_p, "ranks", "bounds", "shrunk"),
        ("stride", c_int),
    )


class RoutingStruct(Structure):
    """experts.h: Routing."""

    _fields_ = (
        *_of(c_int, "num_experts", "top_k"),
        *_of(c_bool, "is_sigmoid", "by_logits", "is_normalised"),
        ("scaling", c_float),
        *_of(c_int, "num_groups", "top_groups", "group_best"),
        ("correction", c_void_p),
    )


class ChoicesStruct(Structure):
    """experts.h: Choices."""

    _fields_ = (
        *_of(c_int, "num_experts", "top_k", "block_rows"),
        *_of(c_void_p, "ids", "weights", "tokens", "places", "starts", "blocks"),
    )


class WeightedStruct(Structure):
    """experts.h: AddWeighted::Settings."""

    _fields_ = (
        ("x", c_void_p),
        *_of(c_int, "x_stride", "size"),
        ("weights", c_void_p),
        *_of(c_int, "weights_stride", "top_k"),
        *_of(c_void_p, "places", "out"),
        ("out_stride", c_int),
    )


class HeadsStruct(Structure):
    """latents.h: MultiplyHeads::Settings."""

    _fields_ = (("num_heads", c_int), ("x_step", c_int), ("out_step", c_int))


class LatentsStruct(Structure):
    """latents.h: JoinLatents::Settings."""

    _fields_ = (
        *_of(c_int, "num_heads", "key_size", "rotary_size"),
        ("norm", NormStruct),
        ("absorbed", c_void_p),
        *_of(c_int, "absorbed_stride", "absorbed_step"),
        ("query", c_void_p),
        ("query_stride", c_int),
        ("kept", c_void_p),
        ("kept_stride", c_int),
        ("heads", c_void_p),
        ("heads_stride", c_int),
    )


class JoinedStruct(Structure):
    """latents.h: JoinHeads::Settings."""

    _fields_ = (("x", c_void_p), *_of(c_int, "stride", "step", "num_heads", "size"))


MIRRORED = (
    BatchStruct,
    WeightStruct,
    RowsStruct,
    OutputStruct,
    CacheStruct,
    AttentionStruct,
    RotationStruct,
    LowRankStruct,
    NormStruct,
    RoutingStruct,
    ChoicesStruct,
    WeightedStruct,
    HeadsStruct,
    LatentsStruct,
    JoinedStruct,
)
