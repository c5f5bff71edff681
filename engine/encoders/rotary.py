"""NomicBERT, GTE and ModernBERT: encoders with RoPE and gated MLPs."""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.engine.encoders.config import EncoderConfig, EncoderNames, read_sizes
from remora.engine.models.families.config_values import (
    RawConfig,
    activation,
    number,
    positive,
    refuse,
    renamed,
)

_NOMIC = EncoderNames(
    prefixes=("nomic_bert.", "bert."),
    words="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)
_GTE = EncoderNames(
    prefixes=("new.", "gte."),
    words="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)
_MODERN = EncoderNames(
    prefixes=("model.",),
    words="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
)
# From keys of the NomicBERT config on the Hub to those of transformers.
_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}


def parse_nomic(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse NomicBERT, with the keys of the Hub or of transformers."""
    raw = renamed(raw, _NOMIC_KEYS)
    for key, plain in (
        ("qkv_proj_bias", False),
        ("mlp_fc1_bias", False),
        ("mlp_fc2_bias", False),
        ("prenorm", False),
        ("rotary_emb_interleaved", False),
        ("rotary_emb_fraction", 1.0),
        ("use_rms_norm", False),
        ("parallel_block", False),
        ("rotary_scaling_factor", None),
        ("moe_every_n_layers", 0),
    ):
        refuse(raw, key, plain, f"and only {plain!r} is supported")
    gate = raw.get("activation_function", "swiglu")
    if gate != "swiglu":
        raise ConfigError(f"activation_function in config.json is {gate!r}; supported: 'swiglu'.")
    theta = float((raw.get("rope_parameters") or raw).get("rope_theta") or 1000.0)
    sizes = read_sizes(raw)
    return EncoderConfig(
        architecture=architecture,
        activation=activation(raw, "hidden_act", "silu"),
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        num_types=int(raw.get("type_vocab_size", 2)),
        max_position=positive(raw, "max_position_embeddings"),
        rope_thetas=(theta,) * sizes["num_layers"],
        is_gated=True,
        attention_bias=False,
        mlp_bias=False,
        names=_NOMIC,
        **sizes,
    )


def parse_gte(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse GTE, as first published (New) or in transformers (Gte)."""
    for key, plain in (
        ("position_embedding_type", "rope"),
        ("layer_norm_type", "layer_norm"),
        ("pack_qkv", True),
        ("logn_attention_scale", False),
    ):
        refuse(raw, key, plain, f"and only {plain!r} is supported")
    usual = 10_000.0 if architecture.startswith("New") else 160_000.0
    sizes = read_sizes(raw)
    theta, factor = _gte_rotation(raw, usual, sizes["hidden_size"] // sizes["num_heads"])
    return EncoderConfig(
        architecture=architecture,
        activation=activation(raw, "hidden_act", "gelu"),
        norm_eps=number(raw, "layer_norm_eps", 1e-12),
        num_types=int(number(raw, "type_vocab_size", 1)),
        max_position=positive(raw, "max_position_embeddings"),
        rope_thetas=(theta,) * sizes["num_layers"],
        rope_factor=factor,
        is_gated=True,
        activates_last=True,
        mlp_bias=False,
        down_bias=True,
        names=_GTE,
        **sizes,
    )


def _gte_rotation(raw: RawConfig, usual: float, dim: int) -> tuple[float, float]:
    """Return RoPE base and factor; `ntk` is that of https://kexue.fm/archives/9706."""
    settings = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta"),
        **(raw.get("rope_scaling") or {}),
    }
    theta = number(settings, "rope_theta", usual)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return theta, 1.0
    factor = number(settings, "factor", 1.0)
    if kind == "linear":
        return theta, factor
    if kind != "ntk" or settings.get("mixed_b") is not None:
        raise ConfigError(
            f"config.json scales RoPE by {dict(settings)}; supported types: default, linear, "
            "and ntk without mixed_b."
        )
    return theta * factor, factor ** (2 / dim)


def parse_modern(architecture: str, raw: RawConfig) -> EncoderConfig:
    """Parse ModernBERT."""
    sizes = read_sizes(raw)
    every = int(raw.get("global_attn_every_n_layers", 3))
    usual = ["sliding_attention" if i % every else "full_attention" for i in range(32768)]
    kinds = raw.get("layer_types") or usual[: sizes["num_layers"]]
    if len(kinds) != sizes["num_layers"]:
        raise ConfigError(
            f"layer_types in config.json has {len(kinds)} entries for {sizes['num_layers']} layers."
        )
    thetas = {
        "full_attention": _modern_theta(raw, "full_attention", "global_rope_theta", 160_000.0),
        "sliding_attention": _modern_theta(raw, "sliding_attention", "local_rope_theta", 10_000.0),
    }
    side = int(raw.get("local_attention", 128)) // 2
    attention_bias = bool(raw.get("attention_bias", False))
    return EncoderConfig(
        architecture=architecture,
        activation=activation(raw, "hidden_activation", "gelu"),
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        max_position=int(raw.get("max_position_embeddings", 8192)),
        rope_thetas=tuple(thetas[kind] for kind in kinds),
        windows=tuple(side if kind == "sliding_attention" else None for kind in kinds),
        norms_first=True,
        skips_first_norm=True,
        norm_bias=bool(raw.get("norm_bias", False)),
        is_gated=True,
        attention_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        names=_MODERN,
        **sizes,
    )


def _modern_theta(raw: RawConfig, kind: str, key: str, usual: float) -> float:
    rope = (raw.get("rope_parameters") or {}).get(kind) or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"rope_parameters in config.json has the type {rope['rope_type']!r}; encoders "
            "support only 'default'."
        )
    return float(rope.get("rope_theta") or raw.get(key) or usual)
