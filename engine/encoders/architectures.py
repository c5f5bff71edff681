"""Encoder architectures and the functions that parse their configs. Others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from remora.configs.errors import ConfigError
from remora.engine.encoders import bert, deberta, rotary
from remora.engine.encoders.config import EncoderConfig
from remora.engine.models.families.config_values import RawConfig

CLASSIFIER = "ForSequenceClassification"

Parse = Callable[[str, RawConfig], EncoderConfig]
FAMILIES: Mapping[str, Parse] = {
    "Bert": bert.parse_bert,
    "Roberta": bert.parse_roberta,
    "XLMRoberta": bert.parse_roberta,
    "Camembert": bert.parse_roberta,
    "MPNet": bert.parse_mpnet,
    "DistilBert": bert.parse_distilbert,
    "Electra": bert.parse_electra,
    "Albert": bert.parse_albert,
    "DebertaV2": deberta.parse_deberta,
    "NomicBert": rotary.parse_nomic,
    "New": rotary.parse_gte,
    "Gte": rotary.parse_gte,
    "ModernBert": rotary.parse_modern,
}
ENCODERS: Mapping[str, Parse] = {
    f"{family}{head}": parse
    for family, parse in FAMILIES.items()
    for head in ("Model", "ForMaskedLM", CLASSIFIER)
}


def encoder_architecture(raw: RawConfig) -> str | None:
    """Return the first supported encoder architecture of a config; None if there is none."""
    return next((name for name in raw.get("architectures") or () if name in ENCODERS), None)


def parse_encoder(raw: RawConfig) -> EncoderConfig:
    """Parse the config.json of an encoder. Raises ConfigError, which names the key."""
    architecture = encoder_architecture(raw)
    if architecture is None:
        raise ConfigError(f"config.json names no encoder; supported: {', '.join(FAMILIES)}.")
    if raw.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config, which is not supported for encoders. Use the "
            "original checkpoint."
        )
    return ENCODERS[architecture](architecture, raw)
