"""What an encoder is made of: config.json of BERT and its relatives, understood.

Pure and strict, as `models/config.py` is for decoders. A family is a function from its own words to
`EncoderConfig`, and an `EncoderNames`: how its checkpoints call their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import Activation
from remora.engine.models.families.reading import RawConfig, activation, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names in a checkpoint, without `.weight` and `.bias`. Those of a layer follow `layer`.

    prefixes:     what may stand before all names, where a head is beside the encoder
    positions, types, final_norm:  None = there is none
    up:           first what is activated, then, in a gated layer, what it is multiplied by
    """

    prefixes: tuple[str, ...]
    words: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    positions: str | None = None
    types: str | None = None
    final_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A bidirectional transformer.

    max_position:     most tokens of a row
    position_offset:  entry of the table that the first position has
    rope_thetas:      [num_layers] base of each layer's rotation; () = positions are learned
    windows:          [num_layers] how far to each side a token sees; None = all of its row
    norms_first:      whether a norm stands before what it belongs to, and not after the sum
    skips_first_norm: whether the first layer's attention has no norm of its own
    is_gated:         whether the feed-forward layer multiplies two projections
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    norm_eps: float
    activation: Activation
    names: EncoderNames
    position_offset: int = 0
    num_types: int = 0
    rope_thetas: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()
    norms_first: bool = False
    skips_first_norm: bool = False
    norm_bias: bool = True
    is_gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads


_BERT_LAYER: Mapping[str, Any] = {
    "layer": "encoder.layer.{}.",
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": ("intermediate.dense",),
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
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
# As the Hub's NomicBert says it, and as transformers does.
_NOMIC_WORDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}


def _bert(architecture: str, raw: RawConfig) -> EncoderConfig:
    names = EncoderNames(prefixes=("bert.",), **_BERT_LAYER)
    return _table_encoder(architecture, raw, names, offset=0)


def _roberta(architecture: str, raw: RawConfig) -> EncoderConfig:
    names = EncoderNames(prefixes=("roberta.",), **_BERT_LAYER)
    return _table_encoder(architecture, raw, names, offset=int(raw.get("pad_token_id", 1)) + 1)


def _table_encoder(
    architecture: str, raw: RawConfig, names: EncoderNames, *, offset: int
) -> EncoderConfig:
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type in config.json is {kind!r}; only 'absolute' is known."
        )
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise ConfigError("config.json describes a decoder of the BERT kind; it is not known.")
    return EncoderConfig(
        architecture=architecture,
        activation=activation(raw, "hidden_act", "gelu"),
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        position_offset=offset,
        num_types=int(raw.get("type_vocab_size", 2)),
        max_position=positive(raw, "max_position_embeddings") - offset,
        names=names,
        **_sizes(raw),
    )


def _nomic(architecture: str, raw: RawConfig) -> EncoderConfig:
    raw = {_NOMIC_WORDS.get(key, key): value for key, value in raw.items()}
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
        if raw.get(key, plain) not in (plain, None):
            raise ConfigError(f"{key} in config.json is {raw[key]!r}; only {plain!r} is known.")
    gate = raw.get("activation_function", "swiglu")
    if gate != "swiglu":
        raise ConfigError(f"activation_function in config.json is {gate!r}; known is 'swiglu'.")
    theta = float((raw.get("rope_parameters") or raw).get("rope_theta") or 1000.0)
    sizes = _sizes(raw)
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


def _modern(architecture: str, raw: RawConfig) -> EncoderConfig:
    sizes = _sizes(raw)
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
            f"rope_parameters in config.json has the type {rope['rope_type']!r}; encoders know "
            "'default' only."
        )
    return float(rope.get("rope_theta") or raw.get(key) or usual)


Parse = Callable[[str, RawConfig], EncoderConfig]
ENCODERS: Mapping[str, Parse] = {
    f"{family}{head}": parse
    for family, parse in (
        ("Bert", _bert),
        ("Roberta", _roberta),
        ("XLMRoberta", _roberta),
        ("Camembert", _roberta),
        ("NomicBert", _nomic),
        ("ModernBert", _modern),
    )
    for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
CLASSIFIER = "ForSequenceClassification"


def encoder_architecture(raw: RawConfig) -> str | None:
    """Return the architecture that we run as an encoder; None = it is none."""
    return next((name for name in raw.get("architectures") or () if name in ENCODERS), None)


def parse_encoder(raw: RawConfig) -> EncoderConfig:
    """Understand the config.json of an encoder. Raises ConfigError naming the key."""
    architecture = encoder_architecture(raw)
    if architecture is None:
        raise ConfigError(f"config.json names no encoder; known are {', '.join(ENCODERS)}.")
    if raw.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config; encoders are loaded unquantised only. Use the "
            "original checkpoint."
        )
    return ENCODERS[architecture](architecture, raw)


def _sizes(raw: RawConfig) -> dict[str, Any]:
    hidden_size, num_heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size ({hidden_size}) in config.json is not a multiple of num_attention_heads "
            f"({num_heads})."
        )
    return {
        "vocab_size": positive(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(raw, "intermediate_size"),
        "num_layers": positive(raw, "num_hidden_layers"),
        "num_heads": num_heads,
    }
