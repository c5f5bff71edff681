"""Llama-like families with layer norms: StableLM, StarCoder2, Phi 1 and 2, Command R."""

from __future__ import annotations

from dataclasses import replace

from remora.engine.models.config import BlockConfig, DecoderConfig, HeadConfig, HeadNorm
from remora.engine.models.families.config_values import (
    WINDOWED,
    RawConfig,
    biases,
    every,
    flag,
    kinds_of_layers,
    layer_norm,
    number,
    partial_rotary,
    refuse,
    ungated,
    without_nulls,
)
from remora.engine.models.families.llama import like_llama
from remora.engine.models.families.tensor_rules import of_ends, of_layers

LAYERS = r"model\.layers\."


def parse_stablelm(architecture: str, raw: RawConfig) -> DecoderConfig:
    """StableLM 2 and StableLM 3B: RoPE in a quarter of each head."""
    raw = without_nulls(raw)
    norm = layer_norm(raw, "layer_norm_eps")
    of_heads = HeadNorm(
        norm=replace(norm, bias=False),
        span="each",
        query="q_layernorm",
        key="k_layernorm",
        is_list=True,
    )
    is_parallel = flag(raw, "use_parallel_residual")
    return like_llama(
        architecture,
        raw,
        attention={
            "qkv_bias": flag(raw, "use_qkv_bias"),
            "head_norm": of_heads if flag(raw, "qk_layernorm") else None,
        },
        partial=partial_rotary(raw, 0.25),
        block=BlockConfig(
            norm=norm,
            mlp_norm=None if is_parallel else "post_attention_layernorm",
            parallel=is_parallel,
        ),
    )


def parse_starcoder2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """StarCoder2: biases everywhere, no gate."""
    refuse(raw, "norm_type", "layer_norm", "only layer norms are known")
    refuse(raw, "mlp_type", "default", "only feed-forward layers without a gate are known")
    return like_llama(
        architecture,
        {**raw, "tie_word_embeddings": flag(raw, "tie_word_embeddings", True)},
        attention=biases(raw, "use_bias", True),
        mlp=ungated(raw, "gelu_pytorch_tanh", bias=flag(raw, "use_bias", True)),
        windows=raw.get("sliding_window"),
        block=BlockConfig(norm=layer_norm(raw, "norm_epsilon")),
        rules=tuple(of_layers(LAYERS, {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"})),
    )


def parse_phi(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Phi 1, 1.5 and 2: parallel blocks with one norm, RoPE in half of each head."""
    raw = {"num_key_value_heads": raw.get("num_attention_heads"), **without_nulls(raw)}
    norm = layer_norm(raw, "layer_norm_eps")
    of_heads = HeadNorm(norm=norm, query="q_layernorm", key="k_layernorm")
    return like_llama(
        architecture,
        raw,
        attention={
            "qkv_bias": True,
            "out_bias": True,
            "head_norm": of_heads if flag(raw, "qk_layernorm") else None,
        },
        mlp=ungated(raw, "gelu_new"),
        partial=partial_rotary(raw, 0.5),
        block=BlockConfig(norm=norm, mlp_norm=None, parallel=True),
        head=HeadConfig(tied=flag(raw, "tie_word_embeddings"), bias=True),
        rules=(
            *of_layers(
                LAYERS,
                {
                    "self_attn.dense": "self_attn.o_proj",
                    "mlp.fc1": "mlp.up_proj",
                    "mlp.fc2": "mlp.down_proj",
                },
            ),
            *of_ends({r"model\.final_layernorm": "model.norm"}),
        ),
    )


def parse_cohere(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Command R: parallel blocks with one norm, interleaved RoPE."""
    raw = _cohere(raw, theta=500_000.0)
    norm = layer_norm(raw, "layer_norm_eps", bias=False)
    return like_llama(
        architecture,
        raw,
        attention={
            **biases(raw),
            "head_norm": HeadNorm(norm=norm, span="each") if flag(raw, "use_qk_norm") else None,
        },
        interleaved=True,
        block=BlockConfig(norm=norm, mlp_norm=None, parallel=True),
        head=_cohere_head(raw),
    )


def parse_cohere2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Command R7B and A: layers with windows and RoPE, and full attention without RoPE."""
    period = int(number(raw, "sliding_window_pattern", 4))
    window = raw.get("sliding_window", 4096)
    raw = _cohere(raw, theta=10_000.0)
    kinds = kinds_of_layers(raw, every(raw, period))
    norm = layer_norm(raw, "layer_norm_eps", bias=False)
    return like_llama(
        architecture,
        raw,
        attention=biases(raw),
        windows=[window if kind == WINDOWED else None for kind in kinds],
        rotates=[kind == WINDOWED for kind in kinds],
        interleaved=True,
        block=BlockConfig(norm=norm, mlp_norm=None, parallel=True),
        head=_cohere_head(raw),
    )


def _cohere(raw: RawConfig, *, theta: float) -> RawConfig:
    return {
        "num_key_value_heads": raw.get("num_attention_heads"),
        "rope_theta": theta,
        **without_nulls(raw),
    }


def _cohere_head(raw: RawConfig) -> HeadConfig:
    return HeadConfig(
        tied=flag(raw, "tie_word_embeddings", True), scale=number(raw, "logit_scale", 0.0625)
    )
