"""Every parameter of the four servers whose configuration remora takes: names, types, choices.

Data only, from `data/*.json`: one line a parameter. What remora makes of them stands in the tables
beside this file (`sglang.py`, `lightllm.py`, `rtp_llm.py`, `backend.py`, `refusals.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

System = Literal["sglang", "lightllm", "rtp_llm", "backend"]
SYSTEMS: tuple[System, ...] = get_args(System)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of one server.

    name:        as that server's documentation spells it
    type:        bool, int, float, str, enum, path, json, or list[...] of one of these
    default:     of that server; None also where it has none
    capability:  what it is about, by a name that all systems share
    inverse:     whether it switches the capability off
    env:         environment variable that means the same (RTP-LLM)
    backends:    versions of the backend that know it (backend); None: all
    additional:  known from the server's own documentation, beyond the 471 that coverage counts
    """

    system: System
    name: str
    aliases: tuple[str, ...]
    type: str
    default: Any
    choices: tuple[Any, ...] | None
    capability: str
    summary: str
    inverse: bool = False
    env: str | None = None
    additional: bool = False
    document: str | None = None
    backends: tuple[str, ...] | None = None
    choices_by_backend: Mapping[str, list[str]] | None = None


@cache
def catalogue(system: System) -> Mapping[str, Parameter]:
    """Return all parameters of `system` by name."""
    text = (Path(__file__).with_name("data") / f"{system}.json").read_text(encoding="utf-8")
    parameters = (Parameter(system=system, **_fields(row)) for row in json.loads(text))
    return MappingProxyType({parameter.name: parameter for parameter in parameters})


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return lists as tuples, defaults apart, which are values."""
    return {
        key: tuple(value) if isinstance(value, list) and key != "default" else value
        for key, value in row.items()
    }


def plain(name: str) -> str:
    """Return a name without what spellings differ in: leading dashes, underscores, case."""
    return name.lstrip("-").replace("_", "-").lower()


@cache
def spellings(system: System) -> Mapping[str, Parameter]:
    """Return all parameters of `system` by `plain` name, aliases and variables among them."""
    found = {}
    for parameter in catalogue(system).values():
        for name in (*parameter.aliases, parameter.env, parameter.name):
            if name is not None:
                found[plain(name)] = parameter
    return MappingProxyType(found)
