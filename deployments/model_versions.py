"""Pins the models that a configuration names to versions, so that all replicas load the same one.

A branch of the hub may move between the start of one replica and that of the next. Where an
application is built, each name of a repository gets the commit that it means at that time;
deploying again takes the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remora.configs.model_names import HubModel, parse_model_name
from remora.configs.multiple_models import MODELS
from remora.configs.sections.model import download_folder

# Keys that name a model, by section.
_KEYS = (("model", "path"), ("model", "tokenizer_path"), ("speculation", "draft_model"))


def pin_versions(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the args of an application with a commit for each repository of the hub.

    Names stay as they are if the hub is out of reach and the cache does not know them; the
    replica's error explains why.
    """
    pinned = dict(args)
    model = pinned.get("model")
    folder = download_folder(model.get("download_dir")) if isinstance(model, Mapping) else None
    for section, key in _KEYS:
        values = pinned.get(section)
        if isinstance(values, Mapping) and isinstance(values.get(key), str):
            pinned[section] = {**values, key: _pin(values[key], folder)}
    lora = pinned.get("lora")
    if isinstance(lora, Mapping) and lora.get("adapters"):
        entries = [{**entry, "path": _pin(entry["path"])} for entry in lora["adapters"]]
        pinned["lora"] = {**lora, "adapters": entries}
    if MODELS in pinned:
        pinned[MODELS] = [pin_versions(model) for model in pinned[MODELS]]
    return pinned


def _pin(name: str, folder: Path | None = None) -> str:
    if Path(name).expanduser().exists():
        return name
    model = parse_model_name(name)
    if not isinstance(model, HubModel):
        return name
    from remora.engine.sources.models import pinned

    return f"{'hf://' if name.startswith('hf://') else ''}{pinned(model, folder).text}"
