"""AutoRound: words as GPTQ or AWQ pack them, by the setting packing_format."""

from __future__ import annotations

from collections.abc import Iterator

from remora.configs.errors import ConfigError
from remora.engine.weights.formats import awq, gptq
from remora.engine.weights.formats.stored import Format, Inventory, Settings, StoredWeight

PACKINGS = {
    "auto_round:auto_gptq": gptq.FORMAT,
    "auto_round:auto_awq": awq.FORMAT,
    "auto_round": gptq.FORMAT,
}


def _packing(settings: Settings) -> Format | None:
    return PACKINGS.get(str(settings.get("packing_format", "auto_round:auto_gptq")))


def check(settings: Settings) -> None:
    """Raise ConfigError for other packings."""
    packing = _packing(settings)
    if packing is None:
        raise ConfigError(
            f"config.json: auto-round with packing_format {settings['packing_format']} is not "
            f"read; known are {', '.join(PACKINGS)}. Export the model as one of these."
        )
    packing.check(settings)


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield the weights as the packing's own format does."""
    packing = _packing(settings)
    if packing is not None:
        yield from packing.find(settings, inventory)


FORMAT = Format(
    methods=("auto-round", "intel/auto-round"),
    find=find,
    check=check,
    file="quantization_config.json",
)
