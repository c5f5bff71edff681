"""Divide a model among ranks. Pure arithmetic, for plans and layers.

Tensor-parallel ranks hold parts of each dimension whose sizes differ by at most one, and so do
stages of the layers. Plans use the rank with the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts


def share(size: int, index: int, parts: int) -> range:
    """Return part `index` of range(size), split into `parts` whose sizes differ by at most one."""
    return range(index * size // parts, (index + 1) * size // parts)


def kv_heads_of(num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """Return the KV heads of a rank: an equal part, or one that several ranks share.

    One of num_kv_heads and tp_size must divide the other.
    """
    if num_kv_heads >= tp_size:
        return share(num_kv_heads, tp_rank, tp_size)
    head = tp_rank * num_kv_heads // tp_size
    return range(head, head + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Most parameters of a rank of one pipeline stage.

    table, head:  of the embedding and the output head; a tied head counts in both
    """

    layers: int
    table: int
    head: int


def stage_parameters(model: ModelFacts, *, tp_size: int, pp_size: int) -> list[StageParameters]:
    """Return the most parameters of a rank, for each stage."""
    last_norm = model.hidden_size  # copied to every rank
    in_layers = rank_layers(model, tp_size=tp_size)
    vocabulary = -(-model.vocab_size // tp_size) * model.hidden_size
    return [
        StageParameters(
            layers=sum(in_layers[layer] for layer in share(model.num_layers, stage, pp_size))
            + last_norm,
            table=vocabulary if stage == 0 else 0,
            head=vocabulary if stage == pp_size - 1 else 0,
        )
        for stage in range(pp_size)
    ]


def rank_layers(model: ModelFacts, *, tp_size: int) -> list[int]:
    """Return the most parameters of each layer that a rank holds."""
    in_layers = _layer_parameters(model)
    return in_layers if tp_size == 1 else [_rank_layer(model, n, tp_size) for n in in_layers]


def _layer_parameters(model: ModelFacts) -> list[int]:
    if model.layer_parameters:
        return list(model.layer_parameters)
    tables = (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
    in_layers = model.num_parameters - tables - model.hidden_size
    return [len(share(in_layers, layer, model.num_layers)) for layer in range(model.num_layers)]


def _rank_layer(model: ModelFacts, layer: int, tp_size: int) -> int:
    """Return the most of a layer's parameters that a rank holds.

    Norms are copied to every rank, and KV heads to several ranks if there are fewer heads than
    ranks. Where a dimension does not divide evenly, a rank has one more row of three matrices.
    """
    kv_head = model.kv_vectors * model.head_dim * model.hidden_size
    copied = min(2 * model.hidden_size + model.copied_parameters, layer)
    divided = max(0, layer - model.num_kv_heads * kv_head - copied)
    held_kv_heads = len(kv_heads_of(model.num_kv_heads, 0, tp_size))
    uneven = 3 * model.hidden_size
    return -(-divided // tp_size) + held_kv_heads * kv_head + copied + uneven


def update_elements(
    model: ModelFacts, targets: Iterable[str], *, tp_size: int = 1, pp_size: int = 1
) -> int:
    """Return the most elements of A and B on a rank, for an adapter of rank 1.

    targets:  modules that adapters change, by the last part of their names
    """
    query = -(-model.num_heads // tp_size) * model.head_dim
    kv = len(kv_heads_of(model.num_kv_heads, 0, tp_size)) * model.head_dim
    inner = -(-model.intermediate_size // tp_size)
    hidden, wanted = model.hidden_size, set(targets)
    up = frozenset({"gate_proj", "up_proj"}) if model.gated else frozenset({"up_proj"})
    # A fused module has slots for all of its parts, or for none.
    of_layer = {
        frozenset({"q_proj", "k_proj", "v_proj"}): _blocks(query + 2 * kv) + 3 * hidden,
        frozenset({"o_proj"}): query + _blocks(hidden),
        up: _blocks(len(up) * inner) + len(up) * hidden,
        frozenset({"down_proj"}): inner + _blocks(hidden),
    }
    in_layer = sum(size for parts, size in of_layer.items() if parts & wanted)
    vocabulary = -(-model.vocab_size // tp_size)
    of_ends = {
        "embed_tokens": vocabulary + _blocks(hidden),
        "lm_head": _blocks(vocabulary) + hidden,
    }
    at_ends = sum(size for name, size in of_ends.items() if name in wanted)
    return -(-model.num_layers // pp_size) * in_layer + at_ends


def _blocks(outputs: int) -> int:
    """Round up to the padding of B; see `kernels/lora.py`."""
    return -(-outputs // 64) * 64


def check_divisible(model: ModelFacts, *, tp_size: int, pp_size: int) -> None:
    """Raise ConfigError, with sizes that would work, if the model cannot be divided so."""
    if tp_size > 1 and model.indivisible:
        raise ConfigError(
            f"parallel.tp_size = {tp_size}: {model.architecture} does not support tensor "
            f"parallelism: {model.indivisible}; set it to 1"
        )
    heads, kv_heads = model.num_heads, model.num_kv_heads
    sizes = [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    if tp_size not in sizes:
        raise ConfigError(
            f"parallel.tp_size = {tp_size}: the model's {heads} query heads and {kv_heads} KV "
            f"heads cannot be divided among {tp_size} ranks; set it to one of "
            f"{', '.join(map(str, sizes))}"
        )
    if pp_size > model.num_layers:
        raise ConfigError(
            f"parallel.pp_size = {pp_size}: the model has {model.num_layers} layers, and each "
            f"stage needs one; set it to {model.num_layers} or less"
        )
