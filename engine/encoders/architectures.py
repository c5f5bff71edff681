"""Which function understands which encoder. Strict: what is not known is refused."""

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
    """Return the architecture that we run as an encoder; None = it is none."""
    return next((name for name in raw.get("architectures") or () if name in ENCODERS), None)


def parse_encoder(raw: RawConfig) -> EncoderConfig:
    """Understand the config.json of an encoder. Raises ConfigError naming the key."""
    architecture = encoder_architecture(raw)
    if architecture is None:
        raise ConfigError(f"config.json names no encoder; known are {', '.join(FAMILIES)}.")
    if raw.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config; encoders are loaded unquantised only. Use the "
            "original checkpoint."
        )
    return ENCODERS[architecture](architecture, raw)
