"""BERT and its variants: RoBERTa, DistilBERT, MPNet, ELECTRA, ALBERT.

They have learned positions and post-norm layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.encoders.config import DistanceBias, EncoderConfig, EncoderNames, read_sizes
from remora.engine.models.families.config_values import (
    RawConfig,
    activation,
    number,
    positive,
    refuse,
    renamed,
)

BERT_NAMES = EncoderNames(
    prefixes=("bert.",),
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_ROBERTA = replace(BERT_NAMES, prefixes=("roberta.",))
_ELECTRA = replace(BERT_NAMES, prefixes=("electra.",))
_MPNET = replace(
    BERT_NAMES,
    prefixes=("mpnet.",),
    types=None,
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    distances="encoder.relative_attention_bias",
)
_DISTILBERT = replace(
    BERT_NAMES,
    prefixes=("distilbert.",),
    types=None,
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_ALBERT = replace(
    BERT_NAMES,
    prefixes=("albert.",),
    projection="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.0.albert_layers.0.",
    qkv=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    up=("ffn",),
    down="ffn_output",
    mlp_norm="full_layer_layer_norm",
)
_DISTILBERT_KEYS: Mapping[str, str] = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "activation": "hidden_act",
}
_MPNET_FIRST = 2  # first position, independent of pad_token_id


def parse_bert(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse BERT."""
    return like_bert(architecture, raw, BERT_NAMES)


def parse_roberta(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse RoBERTa, XLM-R and CamemBERT."""
    return like_bert(architecture, raw, _ROBERTA, offset=int(raw.get("pad_token_id", 1)) + 1)


def parse_mpnet(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse MPNet."""
    bias = DistanceBias()
    reason = f"and only {bias.num_buckets} buckets are supported"
    refuse(raw, "relative_attention_num_buckets", bias.num_buckets, reason)
    return like_bert(architecture, raw, _MPNET, offset=_MPNET_FIRST, distances=bias)


def parse_distilbert(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse DistilBERT, whose checkpoints store sinusoidal positions as a table too."""
    return like_bert(architecture, renamed(raw, _DISTILBERT_KEYS), _DISTILBERT)


def parse_electra(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse ELECTRA's discriminator, whose embeddings may be smaller than its states."""
    size = int(number(raw, "embedding_size", 128))
    is_smaller = size != positive(raw, "hidden_size")
    names = replace(_ELECTRA, projection="embeddings_project" if is_smaller else None)
    return like_bert(architecture, raw, names, embedding_size=size)


def parse_albert(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse ALBERT, whose layers share their weights."""
    for key in ("num_hidden_groups", "inner_group_num"):
        refuse(raw, key, 1, "and only one shared layer is supported")
    raw = {"hidden_act": "gelu_new", **raw}
    size = int(number(raw, "embedding_size", 128))
    return like_bert(architecture, raw, _ALBERT, embedding_size=size, one_layer=True)


def like_bert(
    architecture: str, raw: RawConfig, names: EncoderNames, *, offset: int = 0, **fields: Any
) -> EncoderConfig:
    """Parse the keys that BERT's variants share; `fields` are other fields of EncoderConfig."""
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type in config.json is {kind!r}; only 'absolute' is supported."
        )
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise ConfigError("config.json describes a BERT decoder, which is not supported.")
    fields = {
        "activation": activation(raw, "hidden_act", "gelu"),
        "norm_eps": float(raw.get("layer_norm_eps", 1e-12)),
        "position_offset": offset,
        "num_types": int(raw.get("type_vocab_size", 2)),
        "max_position": positive(raw, "max_position_embeddings") - offset,
        **fields,
    }
    return EncoderConfig(architecture=architecture, names=names, **read_sizes(raw), **fields)
