"""The options of LLM: keys of the configuration by their own names, and vLLM's arguments.

An option is a key of the sections `model` and `engine`, a whole section as a mapping, or an
argument of vLLM's engine, which the dialect of vLLM translates. A name that both have is remora's
key, except for values that only vLLM has, such as dtype = "half".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import plain, spellings
from remora.configs.dialects.translate import State, translate
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import EngineSection
from remora.configs.sections.model import ModelSection
from remora.configs.validation_messages import nearest, shown
from remora.configs.value_sources import over_sections

logger = logging.getLogger(__name__)

KEYS: Mapping[str, type[BaseModel]] = {"model": ModelSection, "engine": EngineSection}
SECTIONS = ("speculation", "parallel", "grammar", "pooling", "debug", "offload")
ALL_SECTIONS = frozenset({*KEYS, *SECTIONS})
# Sections that LLM has not; settings of further ones change nothing in a script.
_REFUSED = {
    "http": "it is an option of a server",
    "api": "it is an option of a server",
    "lora": "pass adapting = remora.lora.setup.pooling(...) instead",
}


def config_of(model: str, options: Mapping[str, Any]) -> ServeConfig:
    """Return the configuration of a model with these options. Raises ConfigError.

    Logs each of vLLM's arguments that has another meaning here, or none.
    """
    ours: dict[str, dict[str, Any]] = {}
    theirs: dict[str, Any] = {}
    for name, value in options.items():
        section = _section_of(name, value)
        if section is not None:
            ours.setdefault(section, {})[name] = value
        elif name in SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"LLM: {name} = {shown(value)}: must be a mapping of its keys")
            ours[name] = {**ours.get(name, {}), **value}
        elif plain(name) in spellings("vllm"):
            theirs[name] = value
        else:
            raise ConfigError(_unknown(name, value))
    ours.setdefault("model", {})["path"] = model
    config = parse_args(over_sections(_translated(theirs), ours))
    if config.parallel.num_replicas != 1:
        raise ConfigError(
            f"parallel.num_replicas is {config.parallel.num_replicas}: LLM is one replica; serve "
            "several with `remora serve`"
        )
    return config


def _section_of(name: str, value: Any) -> str | None:
    """Return the section of a key that may have this value, or None."""
    for section, keys in KEYS.items():
        field = keys.model_fields.get(name)
        if field is None:
            continue
        is_choice = get_origin(field.annotation) is Literal
        is_other = is_choice and value not in get_args(field.annotation)
        return None if is_other and plain(name) in spellings("vllm") else section
    return None


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections for vLLM's arguments. Raises ConfigError."""
    found = translate(DIALECTS["vllm"], given)
    for line in found.lines:
        sections = {key.partition(".")[0] for key in line.settings}
        for section in sections & _REFUSED.keys():
            raise ConfigError(
                f"LLM: {line.name} = {shown(line.value)}: refused: {_REFUSED[section]}"
            )
        if sections - ALL_SECTIONS:
            logger.warning("LLM: %s = %s: no effect here", line.name, shown(line.value))
        elif line.state is not State.EXACT:
            logger.warning("LLM: %s", line)
    return {section: keys for section, keys in found.args.items() if section in ALL_SECTIONS}


def _unknown(name: str, value: Any) -> str:
    own = [key for keys in KEYS.values() for key in keys.model_fields if key != "path"]
    vllm = [each.replace("-", "_") for each in spellings("vllm")]
    near = nearest(name, [*own, *SECTIONS, *vllm])
    hint = (
        f"did you mean {near}?"
        if near is not None
        else "options are keys of the sections model and engine (docs/configuration.md), the "
        f"sections {', '.join(SECTIONS)}, and the arguments of vLLM's engine"
    )
    return f"LLM has no option {name} = {shown(value)}; {hint}"
