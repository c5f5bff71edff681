"""Which models the native step program supports: those with an operation for every part."""

from __future__ import annotations

from collections.abc import Iterator

from remora.engine.models.config import DecoderConfig, ExpertsConfig


def not_covered(config: DecoderConfig) -> list[str]:
    """Return the parts of a model without an operation; [] = step programs can run it."""
    return list(_gaps(config))


def _gaps(config: DecoderConfig) -> Iterator[str]:
    block = config.block
    reads_stream = block.attention_norm is None or (block.mlp_norm is None and not block.parallel)
    if block.residual_scale != 1.0 and (reads_stream or config.embedding.num_positions):
        yield "residual scales with parts that read or write the stream without a norm"
    experts = [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsConfig)]
    if experts and (block.parallel or block.mlp_norm is None or block.mlp_out_norm is not None):
        yield "experts parallel to attention, or without a norm of their own before them"
