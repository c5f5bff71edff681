"""What an encoder is made of. Pure data, as `models/config.py` is for decoders.

A family is a function from its own words in config.json to `EncoderConfig`, and an `EncoderNames`:
how its checkpoints call their tensors. `architectures.py` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import Activation
from remora.engine.models.families.config_values import RawConfig, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names in a checkpoint, without `.weight` and `.bias`. Those of a layer follow `layer`.

    prefixes:     what may stand before all names, where a head is beside the encoder
    layer:        with {} for its number, unless all layers are one
    positions, types, final_norm:  None = there is none
    up:           first what is activated, then, in a gated layer, what it is multiplied by; where
                  one tensor holds both, `activates_last` may say that it is the other way round
    projection:   from the size of embeddings to that of states; None = they are the same
    distances:    the table of distances between tokens, and the norm of its entries
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
    """Scores get a learned summand for each head and bucket of distances (T5, MPNet).

    num_buckets:   for both directions together
    max_distance:  from which on there is but one bucket
    """

    num_buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Disentangled:
    """Scores get what a query makes of a distance, and a distance of a key (DeBERTa-v2).

    Distances have states, of which each layer makes queries and keys as of those of tokens.

    span:          entries of the table for each direction
    num_buckets:   of distances in each direction; 0 = each distance is its own
    max_distance:  which the last bucket ends with
    """

    span: int
    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A bidirectional transformer.

    embedding_size:   of the tables; None = that of the states
    max_position:     most tokens of a row
    position_offset:  entry of the table that the first position has
    rope_thetas:      [num_layers] base of each layer's rotation; () = nothing rotates
    rope_factor:      by which all rotation is slower
    windows:          [num_layers] how far to each side a token sees; None = all of its row
    distances:        what scores get for how far tokens are apart; None = nothing
    one_layer:        whether all layers have the same weights
    norms_first:      whether a norm stands before what it belongs to, and not after the sum
    skips_first_norm: whether the first layer's attention has no norm of its own
    is_gated:         whether the feed-forward layer multiplies two projections
    activates_last:   whether of these the second is activated
    down_bias:        of the projection back; None = as `mlp_bias`, that of those before
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
    """Return the fields of EncoderConfig that all families spell as BERT does."""
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
