"""Read the target of a command: a Serve file, a model, or another server's command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import SYSTEMS
from remora.configs.dialects.command_line import read_command_line
from remora.configs.dialects.faults import Faults
from remora.configs.dialects.resolve import ARGS, DIALECT, Resolved, resolve
from remora.configs.dialects.translate import ParameterReport
from remora.configs.errors import ConfigError
from remora.configs.load import FileModel, load_serve_file, parse_args
from remora.configs.multiple_models import name_of
from remora.configs.positions import Document
from remora.configs.serve_file import config_of_args, config_of_model
from remora.configs.validation_messages import KeyPath
from remora.configs.value_sources import Override, over
from remora.deployments.cli.terminal import Failure

_MAX_PORT = 65_535
RAY_SERVE_LLM = "ray_serve_llm"  # its configurations are files only


@dataclass(frozen=True, slots=True)
class Target:
    """What a command is given.

    raw:     a validated Serve config
    lines:   how each parameter of another server was translated
    models:  by name, with the source of each key's value
    """

    raw: dict[str, Any]
    lines: tuple[ParameterReport, ...]
    models: Mapping[str, FileModel]


def read_target(
    target: Sequence[str],
    dialect: str | None,
    overrides: Sequence[Override],
    *,
    skips: bool = False,
    for_ray: bool = True,
) -> Target:
    """Read a target.

    skips:    whether parameters that are refused are left out; their reports say so
    for_ray:  whether Ray Serve's schema checks a file, for which Ray is imported
    Raises ConfigError, Failure.
    """
    if dialect == RAY_SERVE_LLM:
        return _read_file(target, overrides, skips=skips, for_ray=for_ray, is_ray_serve_llm=True)
    if dialect is not None:
        documents: dict[str, Document] = {}
        faults = Faults(skips=skips)
        resolved = _of_command_line(dialect, target, documents, faults)
        is_named = "path" in resolved.args.get("model", {}) or names_model(overrides)
        # One of the faults may be in the parameter that names the model.
        if not faults.lines and not is_named:
            faults.add(_no_model(dialect))
        with faults.gathering():
            _check_port(resolved, documents)
        raw = config_of_args(resolved.args, resolved.http)
        models: dict[str, FileModel] = {}
        with faults.gathering():
            models = _over(raw, resolved, overrides, documents)
        faults.check()
        return Target(raw, resolved.lines, models)
    if len(target) != 1:
        raise Failure(
            f"expected one target, found {' '.join(target) or 'none'}; to pass another server's "
            f"options, add --dialect ({', '.join(SYSTEMS)})"
        )
    (name,) = target
    if name.endswith((".yaml", ".yml")):
        return _read_file(target, overrides, skips=skips, for_ray=for_ray)
    raw = config_of_model(name)
    models = _over(raw, Resolved(args=raw["applications"][0]["args"]), overrides)
    return Target(raw, (), models)


def read_models(
    target: Sequence[str], dialect: str | None, overrides: Sequence[Override]
) -> Mapping[str, FileModel]:
    """Return the models of a target by name. Raises ConfigError, Failure."""
    return read_target(target, dialect, overrides).models


def names_model(overrides: Sequence[Override]) -> bool:
    """Return whether overrides set the model's path."""
    return any((one.section, one.key) == ("model", "path") for one in overrides)


def _read_file(
    target: Sequence[str],
    overrides: Sequence[Override],
    *,
    skips: bool,
    for_ray: bool,
    is_ray_serve_llm: bool = False,
) -> Target:
    if len(target) != 1:
        raise Failure(f"expected one YAML file, found {' '.join(target) or 'none'}")
    file = load_serve_file(
        Path(target[0]),
        also=_serve_schema() if for_ray else None,
        overrides=overrides,
        is_ray_serve_llm=is_ray_serve_llm,
        skips_unsupported=skips,
    )
    return Target(file.raw, file.lines, file.models)


def _serve_schema() -> type[BaseModel]:
    from ray.serve.schema import ServeDeploySchema

    schema: type[BaseModel] = ServeDeploySchema
    return schema


def _check_port(resolved: Resolved, documents: Mapping[str, Document]) -> None:
    port = resolved.http.get("port", 1)
    if not 1 <= port <= _MAX_PORT:
        written = resolved.origins[("http", "port")][1:]
        place = f"{_place_in(documents, written, False)}{written[-1]}"
        raise ConfigError(f"{place}: http_options.port = {port}: must be 1 to {_MAX_PORT}")


def _no_model(dialect: str) -> str:
    rules = DIALECTS[dialect].rules if dialect in SYSTEMS else {}
    options = [name for name, rule in rules.items() if rule.keys == ("model.path",)]
    option = options[0] if options else "--set model.path=PATH"
    return f"model.path: required key is missing; set it with {option}"


def _of_command_line(
    dialect: str, tokens: Sequence[str], documents: dict[str, Document], faults: Faults
) -> Resolved:
    if dialect not in SYSTEMS:
        raise Failure(f"--dialect {dialect}: must be one of {', '.join(SYSTEMS)}")
    given = read_command_line(dialect, tokens, os.environ, documents, faults)

    def locate(path: KeyPath, at_key: bool) -> str:
        return _place_in(documents, path[1:], at_key)

    return resolve({DIALECT: dialect, ARGS: given}, locate, faults=faults)


def _place_in(documents: Mapping[str, Document], path: KeyPath, at_key: bool) -> str:
    found = documents.get(str(path[0])) if path else None
    return "" if found is None else found.locate(path, at_key)


def _over(
    raw: dict[str, Any],
    resolved: Resolved,
    overrides: Sequence[Override],
    documents: Mapping[str, Document] = MappingProxyType({}),
) -> dict[str, FileModel]:
    """Merge the overrides into the args of `raw`, validate them, and return the model by name."""
    (application,) = raw["applications"]
    application["args"] = over(resolved.args, overrides)
    _absolute(application["args"])
    origins = {
        path: f"{_place_in(documents, written[1:], False)}{'.'.join(map(str, written[1:]))}"
        for path, written in resolved.origins.items()
    }
    sources: dict[KeyPath, str] = origins | {(o.section, o.key): o.source for o in overrides}

    def locate(path: KeyPath, _at_key: bool) -> str:
        return f"{sources[path[:2]]}: " if path[:2] in sources else ""

    config = parse_args(application["args"], locate=locate)
    written = {".".join(map(str, path)): source for path, source in sources.items()}
    return {name_of(config): FileModel(config=config, written=written)}


def _absolute(args: dict[str, Any]) -> None:
    """Make the model's path absolute: replicas run in a different working directory."""
    path = (args.get("model") or {}).get("path")
    if isinstance(path, str) and Path(path).exists():
        args["model"] = {**args["model"], "path": str(Path(path).absolute())}
