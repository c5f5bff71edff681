"""Which models the native step program computes: those whose every part it has an operation for."""

from __future__ import annotations

from collections.abc import Iterator

from remora.engine.models.config import DecoderConfig, MLPConfig


def not_covered(config: DecoderConfig) -> list[str]:
    """Return what of a model step programs have no operation for; [] = they can run it."""
    return list(_gaps(config))


def _gaps(config: DecoderConfig) -> Iterator[str]:
    block, attention, head = config.block, config.attention, config.head
    if block.norm.kind != "rms":
        yield "layer norms"
    if block.parallel:
        yield "attention and feed-forward side by side"
    if None in (block.attention_norm, block.mlp_norm):
        yield "blocks without a norm at their beginning"
    if block.attention_out_norm is not None or block.mlp_out_norm is not None:
        yield "norms of what a block adds"
    if config.embedding.num_positions:
        yield "learned positions"
    if attention.head_norm is not None and not attention.head_norm.is_plain:
        yield "norms of heads other than Qwen3's"
    if attention.growth is not None:
        yield "queries that grow with their position"
    if any(layer.chunked for layer in config.layers):
        yield "attention in chunks"
    if attention.soft_cap is not None:
        yield "capped scores"
    if attention.sinks:
        yield "attention sinks"
    if attention.alibi is not None:
        yield "ALiBi"
    if attention.latent is not None:
        yield "latent attention"
    elif any(layer.rope.interleaved or layer.rope.rotary_dim for layer in config.layers):
        yield "rotation of neighbours or of a part of each head"
    dense = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MLPConfig)]
    if len(dense) < config.num_layers:
        yield "experts"
    if any(mlp.activation != "silu" or not mlp.gated for mlp in dense):
        yield "feed-forward layers without SiLU and gate"
    if head.soft_cap is not None:
        yield "capped logits"
