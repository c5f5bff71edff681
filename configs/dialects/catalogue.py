"""The parameters of the servers whose configuration remora accepts: names, types, choices.

Read from `data/*.json`, one line per parameter; `data/releases.json` says from which release those
of vLLM and Ray Serve LLM are, and which release those of SGLang come closest to. Each server's
module and `refusals.py` have their rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

System = Literal["sglang", "lightllm", "rtp_llm", "backend", "vllm", "ray_serve_llm"]
SYSTEMS: tuple[System, ...] = get_args(System)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of one server.

    name:        as that server's documentation spells it
    type:        bool, int, count, float, str, enum, path, json, any, or list[...] of one of these
    default:     of that server, or None
    capability:  name of its subject, shared by all systems
    inverse:     whether it turns the capability off
    env:         equivalent environment variable (RTP-LLM)
    backends:    versions that have it (backend config); None = all
    additional:  not among the parameters that coverage counts
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


_DATA = Path(__file__).with_name("data")
ENGINE = "engine_kwargs."  # prefix of vLLM's arguments in Ray Serve LLM's configuration


@cache
def catalogue(system: System) -> Mapping[str, Parameter]:
    """Return all parameters of `system` by name."""
    text = (_DATA / f"{system}.json").read_text(encoding="utf-8")
    parameters = [Parameter(system=system, **_fields(row)) for row in json.loads(text)]
    if system == "ray_serve_llm":
        parameters += map(_engine_kwarg, catalogue("vllm").values())
    return MappingProxyType({parameter.name: parameter for parameter in parameters})


@cache
def release(system: System) -> str:
    """Return the release that the catalogue describes, or "" for documents without one."""
    found = json.loads((_DATA / "releases.json").read_text(encoding="utf-8"))
    return str(found.get(system, ""))


def engine_kwarg(name: str) -> str:
    """Return the name of an argument of vLLM in Ray Serve LLM's `engine_kwargs`."""
    return f"{ENGINE}{name.removeprefix('--').replace('-', '_')}"


def _engine_kwarg(parameter: Parameter) -> Parameter:
    return replace(
        parameter,
        system="ray_serve_llm",
        name=engine_kwarg(parameter.name),
        aliases=(),
        additional=True,
    )


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return lists as tuples, except in defaults."""
    return {
        key: tuple(value) if isinstance(value, list) and key != "default" else value
        for key, value in row.items()
    }


def plain(name: str) -> str:
    """Normalise a name: no leading dashes, dashes for underscores, lower case."""
    return name.lstrip("-").replace("_", "-").lower()


@cache
def spellings(system: System) -> Mapping[str, Parameter]:
    """Return all parameters of `system` by `plain` name, alias and variable."""
    found = {}
    for parameter in catalogue(system).values():
        for name in (*parameter.aliases, parameter.env, parameter.name):
            if name is not None:
                found[plain(name)] = parameter
    return MappingProxyType(found)
