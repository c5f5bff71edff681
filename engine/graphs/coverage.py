"""Which models the native step program computes: those whose every part it has an operation for."""

from __future__ import annotations

from collections.abc import Iterator

from remora.engine.models.config import DecoderConfig, ExpertsConfig


def not_covered(config: DecoderConfig) -> list[str]:
    """Return what of a model step programs have no operation for; [] = they can run it."""
    return list(_gaps(config))


def _gaps(config: DecoderConfig) -> Iterator[str]:
    block = config.block
    reads_stream = block.attention_norm is None or (block.mlp_norm is None and not block.parallel)
    if block.residual_scale != 1.0 and (reads_stream or config.embedding.num_positions):
        yield "factors on what blocks add, where something reads or makes the stream without a norm"
    experts = [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsConfig)]
    if experts and (block.parallel or block.mlp_norm is None or block.mlp_out_norm is not None):
        yield "experts beside attention, or without a norm before them alone"
