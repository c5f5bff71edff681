"""Surveys the quantised weights of a checkpoint for plans: formats, sizes, and which are native.

A weight of each format is read, the smallest; of the others only shapes are known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from remora.configs.facts import StoredFormat
from remora.engine.protocols import (
    QuantisedSource,
    QuantisedTensor,
    WeightSource,
    quantised_tensors,
)
from remora.kernels.cpu.stored_layout import native_format
from remora.kernels.quantised.device_formats import to_format, to_stackable
from remora.kernels.quantised.weight_kinds import WeightKind

EXPERTS, LATENTS = ".experts.", ".kv_b_proj."
LAYERS, EMBEDDING = "model.layers.", "model.embed_tokens.weight"


def survey(source: WeightSource, *, tied: bool) -> tuple[StoredFormat, ...]:
    """Return the formats of a source with the model's names, the most frequent first.

    tied:  whether the head uses the embedding's weight
    Raises ConfigError if a weight is damaged.
    """
    by_label: dict[str, dict[str, QuantisedTensor]] = defaultdict(dict)
    for name, tensor in quantised_tensors(source).items():
        if tied or name != EMBEDDING:
            by_label[tensor.label][name] = tensor
    found = [_format(source, label, tensors) for label, tensors in by_label.items()]
    return tuple(sorted(found, key=lambda format: -format.number))


def _format(
    source: WeightSource, label: str, tensors: Mapping[str, QuantisedTensor]
) -> StoredFormat:
    assert isinstance(source, QuantisedSource)
    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    smallest = min(sizes, key=sizes.__getitem__)
    ((_, kind),) = source.kinds([smallest])
    in_layers = sum(size for name, size in sizes.items() if name.startswith(LAYERS))
    return StoredFormat(
        label=label,
        number=len(tensors),
        bits=kind.num_bytes * 8 / max(sizes[smallest], 1),
        is_native=native_format(kind) is not None,
        layers=in_layers,
        head=sum(sizes.values()) - in_layers,
        device_layers=_on_device(kind, sizes),
    )


def _on_device(kind: WeightKind, sizes: Mapping[str, int]) -> int:
    """Return how many numbers the layers hold as stored on a GPU."""
    has_layers, has_experts = to_format(kind) is not None, to_stackable(kind) is not None
    return sum(
        size
        for name, size in sizes.items()
        if name.startswith(LAYERS)
        and LATENTS not in name
        and (has_experts if EXPERTS in name else has_layers)
    )
