"""Parses config.json into a `DecoderConfig`, by the name of the architecture.

Strict: a setting that would change the result and is unknown here is refused, never ignored. One
function per family, in `families/`, translates the family's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import DecoderConfig
from remora.engine.models.families import (
    deepseek,
    ernie,
    experts,
    fused,
    gemma,
    gpt,
    layernorm,
    llama,
    llama4,
    multimodal,
    qwen,
)
from remora.engine.models.families.config_values import RawConfig
from remora.engine.models.families.gemma import BOTH_WAYS

IS_CAUSAL = "is_causal"

Parse = Callable[[str, RawConfig], DecoderConfig]

ARCHITECTURES: dict[str, Parse] = {
    "LlamaForCausalLM": llama.parse_llama,
    "MistralForCausalLM": llama.parse_mistral,
    "Qwen2ForCausalLM": qwen.parse_qwen2,
    "MiMoForCausalLM": qwen.parse_mimo,
    "Qwen3ForCausalLM": qwen.parse_qwen3,
    "MixtralForCausalLM": experts.parse_mixtral,
    "Qwen2MoeForCausalLM": experts.parse_qwen2_moe,
    "Qwen3MoeForCausalLM": experts.parse_qwen3_moe,
    "OlmoeForCausalLM": experts.parse_olmoe,
    "GraniteMoeForCausalLM": experts.parse_granite_moe,
    "GraniteMoeSharedForCausalLM": experts.parse_granite_moe,
    "Llama4ForCausalLM": llama4.parse_llama4,
    "Llama4ForConditionalGeneration": llama4.parse_llama4,
    "GptOssForCausalLM": experts.parse_gpt_oss,
    "DeepseekV2ForCausalLM": deepseek.parse_deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.parse_deepseek_v3,
    "Glm4MoeForCausalLM": deepseek.parse_glm4_moe,
    "Glm4MoeLiteForCausalLM": deepseek.parse_glm4_moe_lite,
    "MinistralForCausalLM": llama.parse_ministral,
    "Ministral3ForCausalLM": llama.parse_ministral3,
    "SmolLM3ForCausalLM": llama.parse_smollm3,
    "GraniteForCausalLM": llama.parse_granite,
    "MiniCPMForCausalLM": llama.parse_minicpm,
    "Olmo2ForCausalLM": llama.parse_olmo2,
    "GemmaForCausalLM": gemma.parse_gemma,
    "Gemma2ForCausalLM": gemma.parse_gemma2,
    "Gemma3ForCausalLM": gemma.parse_gemma3,
    "Gemma3ForConditionalGeneration": multimodal.parse_multimodal_gemma3,
    "Mistral3ForConditionalGeneration": multimodal.parse_multimodal_mistral3,
    "Qwen2VLForConditionalGeneration": multimodal.parse_multimodal_qwen2,
    "Qwen2_5_VLForConditionalGeneration": multimodal.parse_multimodal_qwen2,
    "SeedOssForCausalLM": llama.parse_seed_oss,
    "Ernie4_5ForCausalLM": ernie.parse_ernie4_5,
    "Ernie4_5_MoeForCausalLM": ernie.parse_ernie4_5_moe,
    "Phi3ForCausalLM": fused.parse_phi3,
    "GlmForCausalLM": fused.parse_glm,
    "Glm4ForCausalLM": fused.parse_glm4,
    "ChatGLMModel": fused.parse_chatglm,
    "ChatGLMForConditionalGeneration": fused.parse_chatglm,
    "InternLM2ForCausalLM": fused.parse_internlm2,
    "InternLM3ForCausalLM": fused.parse_internlm3,
    "BaichuanForCausalLM": fused.parse_baichuan,
    "BaiChuanForCausalLM": fused.parse_baichuan,
    "StableLmForCausalLM": layernorm.parse_stablelm,
    "StableLMEpochForCausalLM": layernorm.parse_stablelm,
    "Starcoder2ForCausalLM": layernorm.parse_starcoder2,
    "PhiForCausalLM": layernorm.parse_phi,
    "CohereForCausalLM": layernorm.parse_cohere,
    "Cohere2ForCausalLM": layernorm.parse_cohere2,
    "GPT2LMHeadModel": gpt.parse_gpt2,
    "GPTNeoXForCausalLM": gpt.parse_gpt_neox,
    "FalconForCausalLM": gpt.parse_falcon,
}


def parse_config(raw: RawConfig) -> DecoderConfig:
    """Parse the config.json of a generative model. Raises ConfigError naming the key."""
    config = parse_states(raw)
    if config.attention.both_ways:
        key = BOTH_WAYS if raw.get(BOTH_WAYS) else IS_CAUSAL
        raise ConfigError(
            f"{key} in config.json is {raw[key]}: attention is bidirectional, so the model "
            "generates no text. Set model.task: embed."
        )
    return config


def parse_states(raw: RawConfig) -> DecoderConfig:
    """Parse the config.json of any decoder, also for pooling. Raises ConfigError naming the key."""
    architecture = _architecture(raw)
    check_quantization(raw.get("quantization_config") or {})
    config = ARCHITECTURES[architecture](architecture, raw)
    return config if raw.get(IS_CAUSAL) in (True, None) else _both_ways(config)


def sees_both_ways(raw: RawConfig) -> bool:
    """Return whether a decoder's attention is bidirectional."""
    return raw.get(IS_CAUSAL) not in (True, None) or bool(raw.get(BOTH_WAYS))


def _both_ways(config: DecoderConfig) -> DecoderConfig:
    """Make attention bidirectional; a window then has the size that transformers gives it."""
    shape, is_chunked = config.attention, any(layer.chunked for layer in config.layers)
    if is_chunked or shape.alibi is not None or shape.latent is not None:
        raise ConfigError(
            f"{IS_CAUSAL} in config.json is false: bidirectional attention is not supported with "
            "ALiBi, latent attention or chunked attention."
        )
    layers = tuple(
        layer if layer.window is None else replace(layer, window=layer.window + 1)
        for layer in config.layers
    )
    return replace(config, attention=replace(shape, both_ways=True), layers=layers)


def check_quantization(settings: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of a format that is not read. Raises ConfigError."""
    if settings:
        # It loads torch, which a reader of other configs can do without.
        from remora.engine.weights.formats.registry import check_settings

        check_settings(settings)


def _architecture(raw: RawConfig) -> str:
    named = raw.get("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    if not named:
        raise ConfigError(
            "config.json names no architecture, as in architectures: [LlamaForCausalLM]."
        )
    found = ", ".join(map(str, named))
    near = get_close_matches(str(named[0]), ARCHITECTURES, n=3, cutoff=0.9)
    nearest = f" (the nearest: {', '.join(near)})" if near else ""
    raise ConfigError(
        f"The architecture {found} in config.json is none of the {len(ARCHITECTURES)} of remora's "
        f"own{nearest}; docs/models.md lists them."
    )
