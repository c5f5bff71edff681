"""DeBERTa-v2 and -v3: BERT with disentangled attention."""

from __future__ import annotations

from dataclasses import replace

from remora.configs.errors import ConfigError
from remora.engine.encoders.bert import BERT_NAMES, like_bert
from remora.engine.encoders.config import Disentangled, EncoderConfig
from remora.engine.models.families.config_values import RawConfig, flag, number, positive, refuse

_NAMES = replace(
    BERT_NAMES,
    prefixes=("deberta.",),
    qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    distances="encoder.rel_embeddings",
)


def parse_deberta(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse DeBERTa-v2 and -v3. Raises ConfigError for settings of no published checkpoint."""
    for key in ("relative_attention", "share_att_key"):
        if not flag(raw, key):
            raise ConfigError(f"{key} in config.json must be true for DeBERTa.")
    kinds = raw.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if {kind.strip() for kind in kinds} != {"c2p", "p2c"}:
        raise ConfigError(f"pos_att_type in config.json is {kinds!r}; supported: ['p2c', 'c2p'].")
    if number(raw, "conv_kernel_size", 0) > 0:
        raise ConfigError(
            f"conv_kernel_size in config.json is {raw['conv_kernel_size']}: convolutions "
            "(DeBERTa-v2 xlarge and xxlarge) are not supported."
        )
    hidden_size, most = positive(raw, "hidden_size"), positive(raw, "max_position_embeddings")
    refuse(raw, "embedding_size", hidden_size, f"and only hidden_size ({hidden_size}) is supported")
    head_size = hidden_size // positive(raw, "num_attention_heads")
    refuse(raw, "attention_head_size", head_size, f"and hidden_size means {head_size}")
    reach = int(number(raw, "max_relative_positions", -1))
    reach = most if reach < 1 else reach
    num_buckets = max(0, int(number(raw, "position_buckets", -1)))
    has_norm = "layer_norm" in str(raw.get("norm_rel_ebd", "none")).lower().split("|")
    num_types = int(raw.get("type_vocab_size", 0))
    names = replace(
        _NAMES,
        positions=_NAMES.positions if flag(raw, "position_biased_input", True) else None,
        types=_NAMES.types if num_types else None,
        distance_norm="encoder.LayerNorm" if has_norm else None,
    )
    return like_bert(
        architecture,
        {"layer_norm_eps": 1e-7, **raw},
        names,
        num_types=num_types,
        distances=Disentangled(
            span=num_buckets or reach,
            num_buckets=num_buckets,
            max_distance=reach,
        ),
    )
