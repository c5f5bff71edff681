"""The text models of multimodal checkpoints: Gemma 3, Mistral 3, Qwen2-VL and Qwen2.5-VL.

Their config.json has the text model's settings in `text_config`, and its tensors have a prefix.
Vision weights are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.models.config import DecoderConfig, TensorRule
from remora.engine.models.families.config_values import RawConfig
from remora.engine.models.families.gemma import parse_gemma3
from remora.engine.models.families.llama import parse_ministral3, parse_mistral
from remora.engine.models.families.qwen import parse_qwen2
from remora.engine.models.families.tensor_rules import unused

# Defaults of transformers' class, which checkpoints of Gemma 3 omit.
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
MISTRALS = {"mistral": parse_mistral, "ministral3": parse_ministral3}
# The second form is that of transformers 5.
RULES = (
    *unused(r"(?:model\.)?(?:vision_tower|multi_modal_projector|visual)\..*"),
    TensorRule(r"language_model\.(.*)", (r"\1",)),
    TensorRule(r"model\.language_model\.(.*)", (r"model.\1",)),
)


def parse_multimodal_gemma3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Gemma 3 from 4B on."""
    return replace(
        parse_gemma3(architecture, {**GEMMA3_DEFAULTS, **text_settings(raw)}), rules=RULES
    )


def parse_multimodal_mistral3(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Mistral Small 3.1 and later, Ministral 3."""
    settings = text_settings(raw)
    kind = settings.get("model_type")
    if kind not in MISTRALS:
        raise ConfigError(
            f"model_type of text_config in config.json is {kind!r}; known are "
            f"{', '.join(MISTRALS)}."
        )
    return replace(MISTRALS[kind](architecture, settings), rules=RULES)


def parse_multimodal_qwen2(architecture: str, raw: RawConfig) -> DecoderConfig:
    """Qwen2-VL and Qwen2.5-VL; of a text, the three positions that rotate a head are the same."""
    settings = text_settings(raw)
    for key in ("rope_scaling", "rope_parameters"):
        if settings.get(key):
            rope = {k: v for k, v in settings[key].items() if k != "mrope_section"}
            kinds = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            settings[key] = rope | kinds
    return replace(parse_qwen2(architecture, settings), rules=RULES)


def text_settings(raw: RawConfig) -> dict[str, Any]:
    """Return the text model's settings; entries outside of `text_config` are its defaults."""
    settings = {**raw, **(raw.get("text_config") or {})}
    # transformers ties the head by the outer key if it exists.
    if "tie_word_embeddings" in raw:
        settings["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return settings
