"""Several models under one address: `models` instead of `model` among the args.

    args:
      models:
        - model: {path: smollm2-135m-instruct}
        - model: {path: /models/other, served_name: other}
          engine: {kv_memory: 2GiB}
      api: {api_key: env:KEY}

Each entry of `models` is the configuration of one model. Sections next to `models` apply to all of
them, and an entry's own keys override these. Keys that the gateway uses cannot be set per model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from remora.configs.errors import ConfigError
from remora.configs.live_update import DEPLOYMENT
from remora.configs.planning.plan import served_name
from remora.configs.schema import ServeConfig
from remora.configs.validation_messages import KeyPath, Locate, validated
from remora.configs.value_sources import over_sections

MODELS = "models"
# Keys that take effect before the model of a request is known, by section; () = the whole section.
SHARED_KEYS: Mapping[str, tuple[str, ...]] = {
    "api": ("api_key", "admin_api_key", "max_body_bytes", "generate_dialect", "drain_timeout_s"),
    "routing": ("gateway", "num_gateways"),
    "limits": (),
}

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class _Models(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    models: list[dict[Any, Any]] = Field(min_length=1)


def split_models(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return valid args as one complete set per model."""
    if MODELS not in args:
        return [dict(args)]
    common = {key: value for key, value in args.items() if key != MODELS}
    return [over_sections(common, entry) for entry in args[MODELS]]


def validate_models(
    args: dict[str, Any], locate: Locate, prefix: KeyPath = ()
) -> list[ServeConfig]:
    """Return the configuration of each model. Raises ConfigError with one line per fault."""
    if MODELS not in args:
        return [validated(args, ServeConfig, locate, prefix)]
    validated(args, _Models, locate, prefix)
    faults: dict[str, None] = {}
    configs: list[ServeConfig] = []
    for index, merged in enumerate(split_models(args)):
        try:
            place = place_of_model(args, index, locate, prefix)
            configs.append(validated(merged, ServeConfig, place))
        except ConfigError as error:
            faults |= dict.fromkeys(str(error).splitlines())  # reports a common fault once
    if faults:
        raise ConfigError("\n".join(faults))
    _check_together(args, configs, locate, prefix)
    return configs


def place_of_model(
    args: Mapping[str, Any], index: int, locate: Locate, prefix: KeyPath = ()
) -> Locate:
    """Return the Locate of a model's merged args: a key is in its entry, or next to `models`."""
    if MODELS not in args:
        return lambda path, at_key: locate((*prefix, *path), at_key)

    def place(path: KeyPath, at_key: bool) -> str:
        own = _depth(args[MODELS][index], path)
        is_common = _depth({k: v for k, v in args.items() if k != MODELS}, path) > own
        found = (*prefix, *path) if is_common else (*prefix, MODELS, index, *path)
        return locate(found, at_key) or ("" if is_common else f"{MODELS}[{index}]: ")

    return place


def _depth(value: Any, path: KeyPath) -> int:
    """Return how many parts of a path are written in `value`."""
    for depth, part in enumerate(path):
        if not isinstance(value, Mapping) or part not in value:
            return depth
        value = value[part]
    return len(path)


def _check_together(
    args: Mapping[str, Any], configs: list[ServeConfig], locate: Locate, prefix: KeyPath
) -> None:
    names: dict[str, int] = {}
    for index, config in enumerate(configs):
        entry: KeyPath = (*prefix, MODELS, index)
        name = name_of(config)
        if name in names:
            raise ConfigError(
                f"{locate((*entry, 'model'), True)}{MODELS}[{index}].model: the name {name!r} is "
                f"taken by {MODELS}[{names[name]}]; give served_name another value"
            )
        names[name] = index
        for section, keys in SHARED_KEYS.items():
            written = args[MODELS][index].get(section) or {}
            for key in keys or written:
                if key in written:
                    raise ConfigError(
                        f"{locate((*entry, section, key), True)}{MODELS}[{index}].{section}.{key}: "
                        f"applies to all models; write it under {section}, next to {MODELS}"
                    )
        if config.api.batch_dir is not None and len(configs) > 1:
            raise ConfigError(
                f"{locate((*prefix, 'api', 'batch_dir'), True)}api.batch_dir: needs a single model;"
                " leave it out, or serve that model alone"
            )
        if config.routing.gateway == "off":
            raise ConfigError(
                f"{locate((*prefix, 'routing', 'gateway'), False)}routing.gateway = off: several "
                "models need a gateway; set it to auto"
            )


def name_of(config: ServeConfig) -> str:
    """Return the model name that clients use."""
    return served_name(config, Path(config.model.path))


def deployment_names(names: Sequence[str]) -> Mapping[str, str]:
    """Return model name -> deployment name. Raises ConfigError if two would be equal."""
    if len(names) == 1:
        return {names[0]: DEPLOYMENT}
    found = {name: f"{DEPLOYMENT}-{_UNSAFE.sub('-', name)}" for name in names}
    if len(set(found.values())) < len(names):
        raise ConfigError(
            f"model.served_name: {', '.join(names)} differ only in characters that cannot be in a "
            "deployment name; choose other names"
        )
    return found
