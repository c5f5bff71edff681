"""Loads a checkpoint into a model of transformers, and derives its facts before that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from remora.configs.facts import ModelFacts
from remora.engine.fallback.linear import reason_against_shares
from remora.engine.fallback.model import FallbackModel
from remora.engine.fallback.structure import Structure, num_positions, read_structure
from remora.engine.fallback.weights import ConvertedWeights
from remora.engine.parallel.layout import Layout
from remora.engine.protocols import WeightSource
from remora.engine.weights.loader import fill


def structure_of(path: Path, raw: Mapping[str, Any], *, trust_code: bool) -> Structure:
    """Return the structure of a checkpoint; see `read_structure`."""
    return _structure(path, json.dumps(raw, sort_keys=True), trust_code)


@lru_cache(maxsize=4)  # a pass without weights takes a second or two
def _structure(path: Path, raw: str, trust_code: bool) -> Structure:
    return read_structure(path, json.loads(raw), trust_code=trust_code)


def fallback_facts(structure: Structure, *, dtype: str, fingerprint: str) -> ModelFacts:
    """Return the facts of a model that transformers runs, with weights of `dtype`."""
    model, config = structure.outline(), structure.config.get_text_config()
    head = model.get_output_embeddings()
    first = structure.attentions[0]
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
    windows = tuple(each.window for each in structure.attentions)
    return ModelFacts(
        architecture=structure.name,
        num_layers=len(structure.attentions),
        hidden_size=int(head.in_features),
        intermediate_size=inner if isinstance(inner, int) else 4 * int(head.in_features),
        num_heads=max(each.num_heads for each in structure.attentions),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=int(head.out_features),
        max_position=num_positions(structure.config),
        dtype=dtype,
        num_parameters=sum(one.numel() for one in model.parameters()),
        tied_embeddings=head.weight is model.get_input_embeddings().weight,
        fingerprint=fingerprint,
        windows=windows if any(windows) else (),
        implementation="transformers",
        indivisible=reason_against_shares(model, head),
    )


def dummy_shapes(structure: Structure) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights to generate for load_format dummy."""
    return {name: tuple(one.shape) for name, one in structure.outline().named_parameters()}


def load_fallback(
    structure: Structure,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: str,
    layout: Layout,
    show_progress: bool,
    num_threads: int,
) -> FallbackModel:
    """Build a rank's shard and load its weights. Raises ConfigError."""
    model = FallbackModel(structure, dtype=dtype, device=device, layout=layout)
    outline = structure.outline()
    converted = ConvertedWeights(source, outline)
    there, needed = converted.shapes(), dict(outline.named_parameters())
    tensors = {
        name: shard for name, shard in model.tensors().items() if name in needed or name in there
    }
    fill(
        tensors,
        converted,
        unused=frozenset(outline.state_dict().keys() - tensors.keys()),
        show_progress=show_progress,
        num_threads=num_threads,
    )
    model.check()
    return model
