"""Roofline model: the speed limit of a model on a machine, from its bytes and operations.

Pure arithmetic on a model's shape. Decoding one token reads every weight once and is bound by
memory bandwidth; many tokens together are bound by matrix products. For mixtures of experts, only
the experts of a token count. KV reads, norms and sampling are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.planning.kv_format import DTYPE_BYTES
from remora.configs.planning.rounding import ROUNDINGS, Rounding
from remora.engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Measured limits of the machine.

    read_gb_s_1, read_gb_s:  memory reads of one thread and of all, in 10^9 bytes per second
    bf16_gflop_s:            products of bfloat16 matrices, in 10^9 operations per second
    int8_gop_s:              products of int8 matrices; None if torch has no such kernel
    """

    num_threads: int
    read_gb_s_1: float
    read_gb_s: float
    bf16_gflop_s: float
    int8_gop_s: float | None

    def best(self, other: Bounds) -> Bounds:
        """Return the larger of each limit, which is closer to that of an idle machine."""
        ints = [value for value in (self.int8_gop_s, other.int8_gop_s) if value is not None]
        return Bounds(
            num_threads=self.num_threads,
            read_gb_s_1=max(self.read_gb_s_1, other.read_gb_s_1),
            read_gb_s=max(self.read_gb_s, other.read_gb_s),
            bf16_gflop_s=max(self.bf16_gflop_s, other.bf16_gflop_s),
            int8_gop_s=max(ints, default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of a model per token.

    block_parameters, head_parameters:  weights that a token is multiplied with
    step_bytes:                         bytes of weights read for one token
    is_int8:                            whether products use int8 matrices, as for int4 weights
    attention_flops_per_position:       operations of one query per position that it attends to
    windows:                            [num_layers] attention windows in tokens; None = unlimited
    """

    block_parameters: int
    head_parameters: int
    step_bytes: float
    is_int8: bool
    attention_flops_per_position: int
    windows: tuple[int | None, ...]

    def flops(self, num_inputs: int, num_outputs: int, *, num_cached: int = 0) -> float:
        """Return the operations of one request: its prompt, and all but the last output token.

        num_cached:  prompt tokens whose KV is cached
        """
        last = num_inputs + max(num_outputs, 1) - 1
        products = 2 * self.block_parameters * (last - num_cached)
        heads = 2 * self.head_parameters * num_outputs
        seen = sum(_positions_seen(num_cached, last, window) for window in self.windows)
        return float(products + heads + self.attention_flops_per_position * seen)


def model_work(
    config: DecoderConfig,
    *,
    dtype: str,
    quantization: str = "none",
    rounding: Rounding | None = None,
    step_bytes: float | None = None,
) -> ModelWork:
    """Return the work of a model of this shape and storage format.

    rounding:    the plan's; None = that of `quantization` on CPUs without tile registers
    step_bytes:  bytes of weights that a step reads, if known; None = computed
    """
    inner = sum(layer.mlp.weights_per_input for layer in config.layers)
    blocks = config.num_layers * _attention_weights(config) + config.hidden_size * inner
    head = config.vocab_size * config.hidden_size
    each = DTYPE_BYTES[dtype]
    of_layers = of_head = float(each)
    if (rounding := rounding or ROUNDINGS.get(quantization)) is not None:
        parts = _attention_parts(config)
        others = blocks - sum(parts.values())
        numbers, plain = {**parts, "others": others}, 8.0 * each
        of_layers = rounding.bits(numbers, num_layers=config.num_layers, plain=plain) / 8
        of_head = rounding.bits_of(rounding.head, plain=plain) / 8
    return ModelWork(
        block_parameters=blocks,
        head_parameters=head,
        step_bytes=step_bytes or blocks * of_layers + head * of_head,
        is_int8=quantization != "none",
        attention_flops_per_position=_attention_flops(config),
        windows=config.windows,
    )


def _attention_parts(config: DecoderConfig) -> dict[str, int]:
    """Return the weights of the projections of Q, K and V of all layers; none with latents."""
    if config.attention.latent is not None:
        return {}
    of_head = config.num_layers * config.hidden_size * config.head_dim
    of_kv = of_head * config.num_kv_heads
    return {"q_proj": of_head * config.num_heads, "k_proj": of_kv, "v_proj": of_kv}


def _attention_weights(config: DecoderConfig) -> int:
    """Return the number of weights of one layer's attention."""
    heads, hidden, latent = config.num_heads, config.hidden_size, config.attention.latent
    if latent is None:
        return 2 * hidden * config.head_dim * (heads + config.num_kv_heads)
    queries = heads * (latent.key_size + latent.rotary_size)
    rank = latent.query_rank
    from_stream = queries if rank is None else rank
    from_rank = 0 if rank is None else rank * queries
    kept = latent.size + latent.rotary_size
    of_latent = latent.size * heads * (latent.key_size + latent.value_size)
    out = heads * latent.value_size
    return hidden * (from_stream + kept + out) + from_rank + of_latent


def _attention_flops(config: DecoderConfig) -> int:
    """Return a query's operations per attended position, by the cheapest algorithm."""
    latent = config.attention.latent
    if latent is None:
        return 4 * config.num_heads * config.head_dim
    return 2 * config.num_heads * (latent.key_size + latent.rotary_size + latent.value_size)


def decode_bound(work: ModelWork, bounds: Bounds) -> float:
    """Return the maximum tokens per second of one sequence."""
    return bounds.read_gb_s * 1e9 / work.step_bytes


def product_bound_s(work: ModelWork, bounds: Bounds, flops: float) -> float:
    """Return the minimum seconds for `flops` operations in the model's number format."""
    rate = bounds.int8_gop_s if work.is_int8 and bounds.int8_gop_s else bounds.bf16_gflop_s
    return flops / (rate * 1e9)


def bound_share(
    figures: dict[str, float],
    work: ModelWork,
    bounds: Bounds,
    *,
    num_requests: int,
    num_inputs: int,
    num_outputs: int,
) -> float:
    """Return the share (0 to 1) of the machine's bound that a run of equal requests reached.

    The bound of a single request with outputs is memory bandwidth; otherwise it is products.
    """
    if num_requests == 1 and num_outputs > 1:
        return figures["decode_tok_s"] / decode_bound(work, bounds)
    cached = round(figures.get("cached_share", 0.0) * num_inputs)
    flops = num_requests * work.flops(num_inputs, num_outputs, num_cached=cached)
    return product_bound_s(work, bounds, flops) / figures["seconds"]


def _positions_seen(first: int, last: int, window: int | None) -> int:
    """Return the total of attended positions, own included, of queries at [first, last)."""
    if window is None or last <= window:
        return (last * (last + 1) - first * (first + 1)) // 2
    if first >= window:
        return window * (last - first)
    return _positions_seen(first, window, None) + window * (last - window)
