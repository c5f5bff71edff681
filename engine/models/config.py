"""What a decoder is made of. Pure data: opens no file, loads no torch.

One block serves every family: what families differ in is values here, and no code in the layers
asks which family it runs. `architectures.py` finds the function of `families/` that turns a
checkpoint's config.json into a `DecoderConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from remora.engine.models.rope_config import RopeConfig
from remora.kernels.moe_rules import SILU, Gating, Routing

if TYPE_CHECKING:  # configs are also read where nothing computes
    from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A norm over the last dimension.

    kind:    rms divides by the root mean square, layer subtracts the mean before
    offset:  added to the weight (1 where checkpoints hold the difference to 1)
    bias:    whether there is one beside the weight
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """A norm of queries and one of keys, before rotation.

    span:  head: each head by itself, with one weight for all; each: each head by itself, with a
           weight of its own; all: all heads of a token together
    query, key:  names of the two
    is_list:     whether the checkpoint has a tensor for each head, where the span is each
    weighted:    whether there is a weight; without one the span is head
    rotated_only:  whether layers without rotation have no such norms
    """

    norm: NormConfig
    span: Literal["head", "each", "all"] = "head"
    query: str = "q_norm"
    key: str = "k_norm"
    is_list: bool = False
    weighted: bool = True
    rotated_only: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether attention backends apply it: a weight of one head, and no mean."""
        return self.span == "head" and self.norm.kind == "rms"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """How K and V of all heads are made of one latent for each token (DeepSeek-V2).

    size:         elements of a latent
    rotary_size:  elements of a key that are rotated, the same for all heads and kept beside it
    key_size:     elements of a head's key that are made of the latent
    value_size:   of its value
    query_rank:   elements of what queries are made of; None = they are made of the stream itself
    """

    size: int
    rotary_size: int
    key_size: int
    value_size: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """A factor 1 + rate * log(1 + (position + offset) // period) on queries.

    unrotated_only:  whether it is for layers without rotation alone
    """

    rate: float
    period: int
    offset: int = 0
    unrotated_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention, the same in every layer but for what `LayerConfig` says.

    scale:     factor on q.k before softmax
    soft_cap:  c, if scores s become c * tanh(s / c)
    qkv_bias, out_bias:  which projections have a bias
    sinks:     whether each head has a learned score beside those of its keys
    growth:    of queries with their position
    alibi:     factor on the slopes by which scores fall with distance; None = they do not
    latent:    what K and V are made of; then there is one KV head of what a token keeps, once
    both_ways: whether tokens see those that come later, so that no text is made; windows then
               reach as far to both sides
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: HeadNorm | None = None
    sinks: bool = False
    growth: QueryGrowth | None = None
    alibi: float | None = None
    latent: LatentConfig | None = None
    both_ways: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Feed-forward layer: down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not gated."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def weights_per_input(self) -> int:
        """Return how many weights an element of a token meets on its way in and out."""
        return (3 if self.gated else 2) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Feed-forward layer of gated experts, of which each token goes through a few.

    size:           inner size of an expert
    bias:           whether experts have biases
    router_bias:    added to logits
    correction:     whether there is a bias that counts in the choice alone
    shared:         what all tokens go through beside them; None = nothing
    shared_gate:    whether a sigmoid decides how much of that counts
    weighs_inputs:  an expert's weight is a factor on what it reads, not on what it gives; for
                    tokens of one expert each
    """

    num_experts: int
    size: int
    routing: Routing
    gating: Gating = SILU
    bias: bool = False
    router_bias: bool = False
    correction: bool = False
    shared: MLPConfig | None = None
    shared_gate: bool = False
    weighs_inputs: bool = False

    @property
    def weights_per_input(self) -> int:
        """Return how many weights an element of a token meets on its way in and out."""
        shared = self.shared.weights_per_input if self.shared else 0
        return self.num_experts + 3 * self.size * self.routing.top_k + shared

    def experts_read(self, num_tokens: int) -> float:
        """Return how many experts so many tokens go through together, if chosen at random."""
        left_out = (1 - self.routing.top_k / self.num_experts) ** num_tokens
        return self.num_experts * (1 - left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ between layers.

    window:   sliding window in tokens; None = all positions
    chunked:  whether the window does not slide: it begins at multiples of its length, so that a
              query sees of the last `window` positions those of its own chunk
    rope:     how its queries and keys are rotated
    """

    rope: RopeConfig
    mlp: MLPConfig | ExpertsConfig
    window: int | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """How the parts of a block are joined.

    attention_norm, mlp_norm:            names of the norms before the parts; None = there is none
    attention_out_norm, mlp_out_norm:    names of the norms of what the parts add
    parallel:        both parts read what the block got; without an `mlp_norm` they share one norm
    residual_scale:  factor on what the parts add to the stream
    """

    norm: NormConfig
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_out_norm: str | None = None
    mlp_out_norm: str | None = None
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """What the first layer gets.

    scale:          factor on the rows of the table
    num_positions:  rows of a table of learned positions, added to those of tokens; 0 = none
    """

    scale: float = 1.0
    num_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """From the last norm to logits.

    tied:      whether it uses the embedding's weight
    scale:     factor on logits
    soft_cap:  c, if logits l become c * tanh(l / c), after the factor
    """

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class TensorRule:
    """What of ours a tensor of the checkpoint holds.

    pattern:       regular expression of its whole name
    names:         of our tensors, with groups of the pattern as in `re.Match.expand`; () = of none
    split:         makes them of it, by views where that can be; None = it is the only one
    is_transposed: whether outputs are the columns of a weight; they are rows once it is split
    bars_updates:  why `split` does not divide what belongs to each output, as an update of the
                   weight does; empty = it does
    """

    pattern: str
    names: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    is_transposed: bool = False
    bars_updates: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer.

    max_position:   longest sequence it was made for, in tokens, rope scaling included
    eos_token_ids:  ids that end a sequence, as config.json has them
    rules:          for tensors that the checkpoint names or lays out in another way than we do; the
                    first one that matches counts
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    attention: AttentionConfig
    layers: tuple[LayerConfig, ...]
    block: BlockConfig
    embedding: EmbeddingConfig = EmbeddingConfig()
    head: HeadConfig = HeadConfig()
    eos_token_ids: tuple[int, ...] = ()
    rules: tuple[TensorRule, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        """Return how many layers there are."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Return how many heads queries have."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Return how many heads K and V have."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Return the elements of a head."""
        return self.attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer; None = all positions."""
        return tuple(layer.window for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """Return the most inner elements of a token in a feed-forward layer."""
        return max(map(_inner_size, (layer.mlp for layer in self.layers)))


def _inner_size(mlp: MLPConfig | ExpertsConfig) -> int:
    if isinstance(mlp, MLPConfig):
        return mlp.size
    return max(mlp.size * mlp.routing.top_k, mlp.shared.size if mlp.shared else 0)
