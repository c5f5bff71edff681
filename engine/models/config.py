"""The architecture of a decoder as data. Opens no file, loads no torch.

One block serves every family: families differ in values here, and no code in the layers asks which
family it runs. `architectures.py` finds the function of `families/` that parses a checkpoint's
config.json into a `DecoderConfig`.
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

    kind:    rms divides by the root mean square, layer subtracts the mean first
    offset:  added to the weight (1 if checkpoints store the difference from 1)
    bias:    whether it has a bias
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """QK norm: a norm of queries and one of keys, before RoPE.

    span:  head: over each head, with one weight for all; each: over each head, with a weight for
           each; all: over all heads of a token together
    query, key:  names of the two
    is_list:     whether the checkpoint has a tensor for each head, if the span is each
    weighted:    whether there is a weight; without one the span is head
    rotated_only:  whether layers without RoPE have no such norms
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
        """Whether attention backends apply it: an RMS norm with one weight for all heads."""
        return self.span == "head" and self.norm.kind == "rms"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: K and V of all heads from one latent per token (DeepSeek-V2).

    size:         elements of a latent
    rotary_size:  elements of the rotated key, shared by all heads and cached with the latent
    key_size:     elements of a head's key that come from the latent
    value_size:   elements of a head's value
    query_rank:   rank of the queries' low-rank projection; None = a full projection
    """

    size: int
    rotary_size: int
    key_size: int
    value_size: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """A factor 1 + rate * log(1 + (position + offset) // period) on queries.

    unrotated_only:  whether it applies to layers without RoPE only
    """

    rate: float
    period: int
    offset: int = 0
    unrotated_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention, the same in every layer except for the fields of `LayerConfig`.

    scale:     factor on q.k before softmax
    soft_cap:  c, if scores s become c * tanh(s / c)
    qkv_bias, out_bias:  which projections have a bias
    sinks:     whether each head has a learned attention sink
    growth:    of queries with their position
    alibi:     factor on ALiBi's slopes; None = no ALiBi
    latent:    latent attention; there is then one KV head, with the row that is cached per token
    both_ways: whether attention is bidirectional, so that the model generates no text; windows then
               reach equally far to both sides
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
    """Feed-forward layer: down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def weights_per_input(self) -> int:
        """Return the number of weights per element of a token's input."""
        return (3 if self.gated else 2) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Feed-forward layer of gated experts, of which each token uses `routing.top_k`.

    size:           inner size of an expert
    bias:           whether experts have biases
    router_bias:    whether the router's logits have a bias
    correction:     whether there is a bias for the selection only
    shared:         shared experts that every token uses; None = none
    shared_gate:    whether a sigmoid gate scales the shared experts
    weighs_inputs:  whether an expert's weight scales its input instead of its output; for tokens of
                    one expert each
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
        """Return the number of weights per element of a token's input."""
        shared = self.shared.weights_per_input if self.shared else 0
        return self.num_experts + 3 * self.size * self.routing.top_k + shared

    def experts_read(self, num_tokens: int) -> float:
        """Return the expected number of experts that `num_tokens` tokens use together."""
        left_out = (1 - self.routing.top_k / self.num_experts) ** num_tokens
        return self.num_experts * (1 - left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Settings that may differ between layers.

    window:   sliding window in tokens; None = full attention
    chunked:  whether attention is chunked: a query sees its own chunk of `window` tokens, which
              begins at a multiple of that length
    rope:     of its queries and keys
    """

    rope: RopeConfig
    mlp: MLPConfig | ExpertsConfig
    window: int | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The order of a block's parts and norms.

    attention_norm, mlp_norm:            names of the norms before the parts; None = no norm
    attention_out_norm, mlp_out_norm:    names of the norms after the parts
    parallel:        both parts read the block's input; without an `mlp_norm` they share one norm
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
    """Input embedding.

    scale:          factor on token embeddings
    num_positions:  rows of a table of learned positions, added to token embeddings; 0 = none
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
    """Renames a tensor of the checkpoint, or splits it into several of the model's.

    pattern:       regular expression that its whole name matches
    names:         of the model's tensors, as templates of `re.Match.expand`; () = unused
    split:         splits it into them, by views if possible; None = it is not split
    is_transposed: whether a weight is stored as [inputs, outputs]; it is transposed before `split`
    bars_updates:  why an adapter's update cannot be split like the weight; empty = it can
    """

    pattern: str
    names: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    is_transposed: bool = False
    bars_updates: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer.

    max_position:   longest sequence in tokens, including RoPE scaling
    eos_token_ids:  ids that end a sequence, as in config.json
    rules:          for tensors with other names or layouts in checkpoints; the first match applies
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
        """Return the number of layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer; None = full attention."""
        return tuple(layer.window for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """Return the largest number of inner elements of a token in a feed-forward layer."""
        return max(map(_inner_size, (layer.mlp for layer in self.layers)))


def _inner_size(mlp: MLPConfig | ExpertsConfig) -> int:
    if isinstance(mlp, MLPConfig):
        return mlp.size
    return max(mlp.size * mlp.routing.top_k, mlp.shared.size if mlp.shared else 0)
