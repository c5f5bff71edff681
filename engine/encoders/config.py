"""The structure of an encoder as data; `models/config.py` has that of decoders.

A family is a function from its config.json to `EncoderConfig`, and an `EncoderNames` with the names
of its tensors. `architectures.py` lists the families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import Activation
from remora.engine.models.families.config_values import RawConfig, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Tensor names in a checkpoint, without `.weight` and `.bias`; `layer` prefixes a layer's.

    prefixes:     possible prefixes of all names, in checkpoints with a head
    layer:        with {} for its number, unless all layers share their weights
    positions, types, final_norm:  None = the model has none
    up:           the activated projection, then the gate; see also `activates_last`
    projection:   from embeddings to hidden states; None = both have the same size
    distances:    the table of relative positions; `distance_norm` is the norm of its entries
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
    projection: str | None = None
    distances: str = ""
    distance_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBias:
    """A learned attention bias for each head and bucket of distances (T5, MPNet).

    num_buckets:   total for both directions
    max_distance:  larger distances share one bucket
    """

    num_buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Disentangled:
    """Disentangled attention (DeBERTa-v2): scores between contents and relative positions.

    Relative positions have states, which each layer projects to queries and keys.

    span:          entries of the table for each direction
    num_buckets:   buckets for each direction; 0 = one entry for each distance
    max_distance:  upper end of the last bucket
    """

    span: int
    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A bidirectional transformer.

    embedding_size:   size of the embeddings; None = hidden_size
    max_position:     maximum tokens of a row
    position_offset:  table index of the first position
    rope_thetas:      [num_layers] RoPE base of each layer; () = no RoPE
    rope_factor:      divides positions before RoPE
    windows:          [num_layers] attention window to either side; None = the whole row
    distances:        relative position bias of attention scores; None = none
    one_layer:        whether all layers share their weights
    norms_first:      whether layers are pre-norm instead of post-norm
    skips_first_norm: whether the first layer has no norm before attention
    is_gated:         whether the MLP is gated
    activates_last:   whether the second of the MLP's two projections is the activated one
    down_bias:        whether the down projection has a bias; None = as `mlp_bias`
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
    embedding_size: int | None = None
    position_offset: int = 0
    num_types: int = 0
    rope_thetas: tuple[float, ...] = ()
    rope_factor: float = 1.0
    windows: tuple[int | None, ...] = ()
    distances: DistanceBias | Disentangled | None = None
    one_layer: bool = False
    norms_first: bool = False
    skips_first_norm: bool = False
    norm_bias: bool = True
    is_gated: bool = False
    activates_last: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    down_bias: bool | None = None

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads


def read_sizes(raw: RawConfig) -> dict[str, Any]:
    """Return the fields of EncoderConfig whose keys are BERT's in all families."""
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
