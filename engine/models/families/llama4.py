"""The text model of Llama 4.

Layers with RoPE have chunked attention and QK norms; the others have full attention and queries
that grow with their position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import (
    BlockConfig,
    DecoderConfig,
    ExpertsConfig,
    HeadNorm,
    QueryGrowth,
    TensorRule,
)
from remora.engine.models.families.config_values import (
    FULL,
    RawConfig,
    biases,
    flag,
    kinds_of_layers,
    number,
    positive,
    rms,
    without_nulls,
)
from remora.engine.models.families.experts import (
    gates_then_ups_transposed,
    of_all_experts,
    read_experts,
    transposed,
    with_experts,
)
from remora.engine.models.families.llama import like_llama
from remora.engine.models.families.tensor_rules import unused

CHUNKED = "chunked_attention"
DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 500_000.0,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "floor_scale": 8192,
}
# Checkpoints with images have a prefix before the names of the text's tensors.
LAYER = r"(?:language_model\.)?(model\.layers\.\d+\.)"


def parse_llama4(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Llama 4, alone or as the text part of a model that sees images."""
    raw = {**raw, **(raw.get("text_config") or {})}
    num_layers = positive(raw, "num_hidden_layers")
    rotates = _rotating_layers(raw, num_layers)
    default = [CHUNKED if is_rotated else FULL for is_rotated in rotates]
    chunked = [kind == CHUNKED for kind in kinds_of_layers(raw, default, windowed=CHUNKED)]
    chunk = None
    if any(chunked):
        chunk = positive({"attention_chunk_size": 8192, **raw}, "attention_chunk_size")
    sparse = raw.get("moe_layers")
    if sparse is None:
        step = raw.get("interleave_moe_layer_step") or 1
        sparse = range(step - 1, num_layers, step)
    raw = {**DEFAULTS, **without_nulls(raw)}
    experts = _experts(raw)
    config = like_llama(
        architecture,
        {**raw, "intermediate_size": positive(raw, "intermediate_size_mlp")},
        attention=_attention(raw),
        windows=[chunk if is_chunked else None for is_chunked in chunked],
        rotates=rotates,
        interleaved=True,
        block=BlockConfig(norm=rms(raw, default=1e-5)),
        rules=_rules(experts),
    )
    layers = zip(config.layers, chunked, strict=True)
    config = replace(
        config, layers=tuple(replace(layer, chunked=is_chunked) for layer, is_chunked in layers)
    )
    return with_experts(config, experts, sparse)


def _rotating_layers(raw: RawConfig, num_layers: int) -> list[bool]:
    """Return which layers rotate; `no_rope_layers` has a 1 for each of these."""
    marks = raw.get("no_rope_layers")
    if marks:
        if len(marks) != num_layers:
            raise ConfigError(
                f"no_rope_layers in config.json has {len(marks)} entries for {num_layers} layers."
            )
        return [bool(mark) for mark in marks]
    period = raw.get("no_rope_layer_interval") or 4
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _attention(raw: RawConfig) -> dict[str, Any]:
    """Return fields of AttentionConfig."""
    growth, norm = None, None
    if flag(raw, "attn_temperature_tuning", True):
        rate, period = number(raw, "attn_scale", 0.1), positive(raw, "floor_scale")
        growth = QueryGrowth(rate=rate, period=period, offset=1, unrotated_only=True)
    if flag(raw, "use_qk_norm", True):
        # After rotation in the model's own code; without a weight that is the same.
        norm = HeadNorm(norm=rms(raw, default=1e-5), weighted=False, rotated_only=True)
    return {**biases(raw), "growth": growth, "head_norm": norm}


def _experts(raw: RawConfig) -> ExpertsConfig:
    """Return the layer of experts, one of which a token goes through."""
    if raw["num_experts_per_tok"] != 1:
        raise ConfigError(
            f"num_experts_per_tok in config.json is {raw['num_experts_per_tok']}; an expert's "
            "weight is a factor on what it reads here, which is known for one expert."
        )
    read = read_experts(
        raw,
        number="num_local_experts",
        size="intermediate_size",
        shared=positive(raw, "intermediate_size"),
        normalised=False,
        routing={"is_sigmoid": True},
    )
    return replace(read, weighs_inputs=True)


def _rules(experts: ExpertsConfig) -> tuple[TensorRule, ...]:
    inside, gate_up = LAYER + r"feed_forward\.", ("gate_proj", "up_proj")
    of_all = rf"{inside}experts\."
    return (
        TensorRule(rf"{inside}router\.weight", (r"\1mlp.gate.weight",)),
        of_all_experts(
            rf"{of_all}gate_up_proj", experts, *gate_up, split=gates_then_ups_transposed
        ),
        of_all_experts(rf"{of_all}down_proj", experts, "down_proj", split=transposed),
        TensorRule(rf"{inside}shared_expert\.(.*)", (r"\1mlp.shared_experts.\2",)),
        TensorRule(rf"{inside}(.*)", (r"\1mlp.\2",)),
        TensorRule(r"language_model\.(.*)", (r"\1",)),
        *unused(r"vision_model\..*", r"multi_modal_projector\..*"),
    )
