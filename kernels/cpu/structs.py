"""The native library's structures, field by field as its headers have them.

`library.py` compares the sizes with those that the compiler saw.
"""

from __future__ import annotations

from ctypes import Structure, c_bool, c_float, c_int, c_int64, c_void_p


class BatchStruct(Structure):
    """batch.h: Batch."""

    _fields_ = (
        ("num_tokens", c_int),
        ("num_sequences", c_int),
        ("num_logits", c_int),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("table_rows", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("window_slots", c_void_p),
        ("window_tables", c_void_p),
        ("logit_index", c_void_p),
        ("adapters", c_void_p),
    )


class WeightStruct(Structure):
    """linear.h: Weight."""

    _fields_ = (
        ("format", c_int),
        ("n", c_int),
        ("k", c_int),
        ("num_panels", c_int),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class RowsStruct(Structure):
    """linear.h: Rows."""

    _fields_ = (
        ("values", c_void_p),
        ("stride", c_int),
        ("scales", c_void_p),
        ("sums", c_void_p),
    )


class OutputStruct(Structure):
    """linear.h: Output."""

    _fields_ = (
        ("epilogue", c_int),
        ("activation", c_int),
        ("limit", c_float),
        ("sharpness", c_float),
        ("offset", c_float),
        ("is_bf16", c_bool),
        ("values", c_void_p),
        ("stride", c_int),
    )


class CacheStruct(Structure):
    """attention.h: KvCache."""

    _fields_ = (
        ("data", c_void_p),
        ("is_bf16", c_bool),
        ("is_windowed", c_bool),
        ("num_pages", c_int),
        ("page_size", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
    )


class AttentionStruct(Structure):
    """attention.h: Attention."""

    _fields_ = (
        ("cache", CacheStruct),
        ("layer", c_int),
        ("num_heads", c_int),
        ("window", c_int),
        ("is_chunked", c_bool),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("qkv", c_void_p),
        ("qkv_stride", c_int),
        ("out", c_void_p),
        ("out_stride", c_int),
        ("out_is_bf16", c_bool),
    )


class NormStruct(Structure):
    """norm.h: NormWeights."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int),
        ("span", c_int),
        ("is_centered", c_bool),
        ("epsilon", c_float),
    )


class RotationStruct(Structure):
    """program.h: RotateAndStore::Settings."""

    _fields_ = (
        ("cache", CacheStruct),
        ("layer", c_int),
        ("num_heads", c_int),
        ("qkv", c_void_p),
        ("stride", c_int),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("first", c_int),
        ("num_pairs", c_int),
        ("is_interleaved", c_bool),
        ("query_factors", c_void_p),
        ("query_norm", NormStruct),
        ("key_norm", NormStruct),
        ("keys_are_values", c_bool),
    )


class LowRankStruct(Structure):
    """low_rank.h: LowRank."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("is_bf16", c_bool),
        ("inputs", c_int),
        ("outputs", c_int),
        ("num_parts", c_int),
        ("max_rank", c_int),
        ("ranks", c_void_p),
        ("bounds", c_void_p),
        ("shrunk", c_void_p),
        ("stride", c_int),
    )


class RoutingStruct(Structure):
    """experts.h: Routing."""

    _fields_ = (
        ("num_experts", c_int),
        ("top_k", c_int),
        ("is_sigmoid", c_bool),
        ("by_logits", c_bool),
        ("is_normalised", c_bool),
        ("scaling", c_float),
        ("num_groups", c_int),
        ("top_groups", c_int),
        ("group_best", c_int),
        ("correction", c_void_p),
    )


class ChoicesStruct(Structure):
    """experts.h: Choices."""

    _fields_ = (
        ("num_experts", c_int),
        ("top_k", c_int),
        ("block_rows", c_int),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("tokens", c_void_p),
        ("places", c_void_p),
        ("starts", c_void_p),
        ("blocks", c_void_p),
    )


class WeightedStruct(Structure):
    """experts.h: AddWeighted::Settings."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int),
        ("size", c_int),
        ("weights", c_void_p),
        ("weights_stride", c_int),
        ("top_k", c_int),
        ("places", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int),
    )


class HeadsStruct(Structure):
    """latents.h: MultiplyHeads::Settings."""

    _fields_ = (("num_heads", c_int), ("x_step", c_int), ("out_step", c_int))


class LatentsStruct(Structure):
    """latents.h: JoinLatents::Settings."""

    _fields_ = (
        ("num_heads", c_int),
        ("key_size", c_int),
        ("rotary_size", c_int),
        ("norm", NormStruct),
        ("absorbed", c_void_p),
        ("absorbed_stride", c_int),
        ("absorbed_step", c_int),
        ("query", c_void_p),
        ("query_stride", c_int),
        ("kept", c_void_p),
        ("kept_stride", c_int),
        ("heads", c_void_p),
        ("heads_stride", c_int),
    )


class JoinedStruct(Structure):
    """latents.h: JoinHeads::Settings."""

    _fields_ = (
        ("x", c_void_p),
        ("stride", c_int),
        ("step", c_int),
        ("num_heads", c_int),
        ("size", c_int),
    )


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
