"""Families with experts, other than DeepSeek's: Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE,
Granite-MoE, GPT-OSS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import (
    BlockConfig,
    DecoderConfig,
    ExpertsConfig,
    HeadNorm,
    MLPConfig,
    TensorRule,
)
from remora.engine.models.families.config_values import (
    RawConfig,
    activation,
    biases,
    every,
    flag,
    number,
    optional_number,
    positive,
    refuse,
    rms,
    windows_of_layers,
    without_nulls,
)
from remora.engine.models.families.llama import like_llama, parse_granite
from remora.engine.models.families.qwen import qwen_windows
from remora.kernels.moe_rules import SILU, Gating, Routing

if TYPE_CHECKING:  # configs are also read where nothing computes
    from torch import Tensor

LAYER = r"(model\.layers\.\d+\.)"


def parse_mixtral(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Mixtral: Mistral with experts."""
    raw = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **without_nulls(raw)}
    config = like_llama(architecture, raw, windows=raw.get("sliding_window"))
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    inside = LAYER + r"block_sparse_moe\."
    rules = [TensorRule(rf"{inside}gate\.weight", (r"\1mlp.gate.weight",))]
    rules += [
        TensorRule(
            rf"{inside}experts\.(\d+)\.{theirs}\.weight", (rf"\1mlp.experts.\2.{ours}.weight",)
        )
        for theirs, ours in names.items()
    ]
    experts = read_experts(raw, number="num_local_experts", size="intermediate_size")
    return with_experts(replace(config, rules=tuple(rules)), experts)


def parse_qwen2_moe(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert with a sigmoid gate."""
    config = like_llama(
        architecture,
        raw,
        windows=qwen_windows(raw),
        attention={"qkv_bias": flag(raw, "qkv_bias", True)},
    )
    experts = read_experts(
        raw,
        normalised=flag(raw, "norm_topk_prob"),
        shared=positive(raw, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    rule = TensorRule(LAYER + r"mlp\.shared_expert\.(.*)", (r"\1mlp.shared_experts.\2",))
    return with_experts(replace(config, rules=(rule,)), experts, _qwen_layers(raw))


def parse_qwen3_moe(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Qwen3-MoE: Qwen3 with experts only."""
    config = like_llama(
        architecture,
        raw,
        windows=raw.get("sliding_window") if flag(raw, "use_sliding_window") else None,
        attention={**biases(raw), "head_norm": HeadNorm(norm=rms(raw))},
    )
    name = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = read_experts(raw, number=name, normalised=flag(raw, "norm_topk_prob"))
    return with_experts(config, experts, _qwen_layers(raw))


def _qwen_layers(raw: RawConfig) -> list[int]:
    """Return the layers with experts."""
    step, dense = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or []
    layers = range(positive(raw, "num_hidden_layers"))
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def parse_olmoe(architecture: str, raw: RawConfig) -> DecoderConfig:
    """OLMoE: QK norms over all heads together."""
    refuse(raw, "clip_qkv", None, "and values of q, k and v are not clipped here")
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    norm = rms(raw, default=1e-5)
    config = like_llama(
        architecture,
        raw,
        attention={**biases(raw), "head_norm": HeadNorm(norm=norm, span="all")},
        block=BlockConfig(norm=norm),
    )
    experts = read_experts(raw, size="intermediate_size", normalised=flag(raw, "norm_topk_prob"))
    return with_experts(config, experts)


def parse_granite_moe(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Granite-MoE: Granite's factors; one tensor holds a layer's weights of all experts."""
    config = parse_granite(architecture, raw)
    experts = read_experts(
        raw,
        number="num_local_experts",
        size="intermediate_size",
        shared=raw.get("shared_intermediate_size") or 0,
    )
    inside, shared = LAYER + r"block_sparse_moe\.", LAYER + r"shared_mlp\."
    ours, gate_up = r"\1mlp.shared_experts.", ("gate_proj", "up_proj")
    rules = (
        TensorRule(rf"{inside}router\.layer\.weight", (r"\1mlp.gate.weight",)),
        of_all_experts(rf"{inside}input_linear\.weight", experts, *gate_up, split=gates_then_ups),
        of_all_experts(rf"{inside}output_linear\.weight", experts, "down_proj", split=one_by_one),
        TensorRule(
            rf"{shared}input_linear\.weight",
            tuple(f"{ours}{name}.weight" for name in gate_up),
            lambda both: both.chunk(2),
        ),
        TensorRule(rf"{shared}output_linear\.weight", (f"{ours}down_proj.weight",)),
    )
    return with_experts(replace(config, rules=rules), experts)


def parse_gpt_oss(architecture: str, raw: RawConfig) -> DecoderConfig:
    """GPT-OSS: attention sinks, a window in every second layer, experts with biases and limits."""
    raw = {"head_dim": 64, "num_key_value_heads": 8, **without_nulls(raw)}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raise ConfigError("config.json of GPT-OSS has neither rope_scaling nor rope_parameters.")
    config = like_llama(
        architecture,
        raw,
        windows=windows_of_layers(raw, raw.get("sliding_window", 128), every(raw, 2)),
        attention={**biases(raw, default=True), "sinks": True},
        block=BlockConfig(norm=rms(raw, default=1e-5)),
    )
    experts = replace(
        read_experts(raw, number="num_local_experts", size="intermediate_size"),
        gating=Gating(
            sharpness=number(raw, "swiglu_alpha", 1.702),
            offset=1.0,
            limit=optional_number(raw, "swiglu_limit", 7.0),
        ),
        bias=True,
        router_bias=True,
    )
    inside, gate_up = LAYER + r"mlp\.experts\.", ("gate_proj", "up_proj")
    rules = (
        TensorRule(LAYER + r"mlp\.router\.(weight|bias)", (r"\1mlp.gate.\2",)),
        of_all_experts(rf"{inside}gate_up_proj", experts, *gate_up, split=taking_turns_transposed),
        of_all_experts(rf"{inside}down_proj", experts, "down_proj", split=transposed),
        of_all_experts(
            rf"{inside}gate_up_proj_bias", experts, *gate_up, kind="bias", split=taking_turns
        ),
        of_all_experts(
            rf"{inside}down_proj_bias", experts, "down_proj", kind="bias", split=one_by_one
        ),
    )
    return with_experts(replace(config, rules=rules), experts)


def read_experts(
    raw: RawConfig,
    *,
    number: str = "num_experts",
    size: str = "moe_intermediate_size",
    shared: int = 0,
    shared_gate: bool = False,
    normalised: bool = True,
    routing: Mapping[str, Any] | None = None,
) -> ExpertsConfig:
    """Read a layer of experts.

    number, size:  keys of the number of experts and of their inner size
    shared:        inner size of the shared experts; 0 = none
    routing:       further fields of Routing
    """
    if activation(raw) != "silu":
        raise ConfigError(f"hidden_act in config.json is {raw['hidden_act']!r}; experts know silu.")
    num_experts, top_k = positive(raw, number), positive(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(
            f"num_experts_per_tok in config.json is {top_k}, of {num_experts} experts ({number})."
        )
    return ExpertsConfig(
        num_experts=num_experts,
        size=positive(raw, size),
        routing=Routing(top_k=top_k, is_normalised=normalised, **(routing or {})),
        gating=SILU,
        shared=MLPConfig(size=shared) if shared else None,
        shared_gate=shared_gate,
    )


def with_experts(
    config: DecoderConfig, experts: ExpertsConfig, layers: Iterable[int] | None = None
) -> DecoderConfig:
    """Return the model with experts in some layers, by default in all."""
    sparse = set(range(config.num_layers) if layers is None else layers)
    return replace(
        config,
        layers=tuple(
            replace(layer, mlp=experts) if number in sparse else layer
            for number, layer in enumerate(config.layers)
        ),
    )


def of_all_experts(
    pattern: str, experts: ExpertsConfig, *parts: str, split: Any, kind: str = "weight"
) -> TensorRule:
    """Return the rule of a tensor with some projections of all experts of a layer."""
    names = tuple(
        rf"\1mlp.experts.{expert}.{part}.{kind}"
        for expert in range(experts.num_experts)
        for part in parts
    )
    return TensorRule(pattern, names, split, bars_updates="it holds all experts of a layer")


# Splits of tensors [E, ...] into those of each expert.


def one_by_one(whole: Tensor) -> tuple[Tensor, ...]:
    """Split [E, ...] by expert."""
    return tuple(whole)


def transposed(whole: Tensor) -> tuple[Tensor, ...]:
    """Split [E, inputs, outputs] by expert and transpose."""
    return tuple(whole.transpose(1, 2))


def gates_then_ups(whole: Tensor) -> tuple[Tensor, ...]:
    """Split [E, 2 * I, H], gates before ups."""
    return tuple(half for one in whole for half in one.chunk(2))


def gates_then_ups_transposed(whole: Tensor) -> tuple[Tensor, ...]:
    """Split [E, H, 2 * I], gates before ups."""
    return gates_then_ups(whole.transpose(1, 2))


def taking_turns(whole: Tensor) -> tuple[Tensor, ...]:
    """Split [E, 2 * I, ...] with interleaved gates and ups."""
    return tuple(one[first::2] for one in whole for first in (0, 1))


def taking_turns_transposed(whole: Tensor) -> tuple[Tensor, ...]:
    """Split [E, H, 2 * I] with interleaved gates and ups."""
    return taking_turns(whole.transpose(1, 2))
