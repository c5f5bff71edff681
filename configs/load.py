"""Read a configuration: a Serve YAML file, or the `args` of a Serve application.

Validates remora's keys and the few Serve keys that remora reads. Ray validates the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from remora.configs.dialects.faults import Faults
from remora.configs.dialects.ray_serve_llm.files import as_our_file
from remora.configs.dialects.resolve import Resolved, nowhere, resolve
from remora.configs.dialects.translate import ParameterReport
from remora.configs.errors import ConfigError
from remora.configs.live_update import GATEWAY, ROUTING_SERVICE, with_user_config
from remora.configs.multiple_models import (
    MODELS,
    deployment_names,
    name_of,
    place_of_model,
    split_models,
    validate_models,
)
from remora.configs.positions import Document, parse_yaml, read_text
from remora.configs.schema import ServeConfig
from remora.configs.validation_messages import KeyPath, Locate, shown, unknown_keys, validated
from remora.configs.value_sources import Override, over

IMPORT_PATH = "remora.deployments.app:build"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileModel:
    """One model of a file.

    written:  dotted key (`engine.page_size`) -> origin ("line 9", "--set engine.page_size"), for
              keys of `config` that do not have their default
    """

    config: ServeConfig
    written: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFile:
    """A Serve config file with a remora application, of one model or several.

    raw:     the whole file as plain data for Ray; args in remora's keys
    models:  by the model names that clients use
    lines:   one report for each parameter of another server
    """

    path: Path
    host: str
    port: int
    app_name: str
    route_prefix: str
    import_path: str
    raw: dict[str, Any]
    models: Mapping[str, FileModel]
    lines: tuple[ParameterReport, ...] = ()

    @property
    def config(self) -> ServeConfig:
        """The configuration of the first model."""
        return next(iter(self.models.values())).config

    @property
    def written(self) -> Mapping[str, str]:
        """The origins of the first model's keys."""
        return next(iter(self.models.values())).written


def _check_slash(prefix: str) -> str:
    if not prefix.startswith("/"):
        raise PydanticCustomError("route_prefix", "must begin with /")
    return prefix


class _Known(BaseModel):
    """Keys that remora reads; Ray validates the others."""

    model_config = ConfigDict(strict=True, extra="allow")


class _HttpOptions(_Known):
    host: str = DEFAULT_HOST
    port: Annotated[int, Field(ge=0, le=65_535)] = DEFAULT_PORT


class _Deployment(_Known):
    name: str
    user_config: dict[Any, Any] | None = None


class _Application(_Known):
    name: str = "default"
    route_prefix: Annotated[str, AfterValidator(_check_slash)] = "/"
    import_path: str
    args: dict[Any, Any] = Field(default_factory=dict)
    deployments: list[_Deployment] = Field(default_factory=list)


class _ServeKeys(_Known):
    http_options: _HttpOptions = _HttpOptions()
    applications: list[_Application]


def parse_args(
    args: Mapping[str, Any],
    user_config: Mapping[str, Any] | None = None,
    locate: Locate = nowhere,
) -> ServeConfig:
    """Validate the `args` of a Serve application. Raises ConfigError with one line per fault.

    user_config:  of the deployment; overrides `args` (`live_update.py`)
    locate:       path of a key -> where it is written
    """
    merged = with_user_config(resolve(args).args, user_config)
    return validated(merged, ServeConfig, locate)


def parse_models(args: Mapping[str, Any]) -> dict[str, ServeConfig]:
    """Validate the `args` of an application, and return the models by name. Raises ConfigError."""
    configs = validate_models(resolve(args).args, nowhere)
    return {name_of(config): config for config in configs}


def load_serve_file(
    path: Path,
    also: type[BaseModel] | None = None,
    overrides: Sequence[Override] = (),
    *,
    is_ray_serve_llm: bool = False,
    skips_unsupported: bool = False,
) -> ServeFile:
    """Read and validate a Serve config file. Raises ConfigError with one line per fault.

    Applications of Ray Serve LLM's builder are taken as this dialect's.

    also:       another schema to validate the whole file against, such as Ray Serve's
    overrides:  values that override the file's (`value_sources.py`)
    is_ray_serve_llm:  whether a file without applications has the arguments of that builder
    skips_unsupported:  whether parameters of other servers that are refused are left out
    """
    document = parse_yaml(read_text(path), str(path))
    document = as_our_file(document, IMPORT_PATH, is_bare=is_ray_serve_llm)
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{document.locate((), False)}expected the keys of a Serve config file, including "
            f"applications; found {shown(document.data)}"
        )
    if also is not None:
        if unknown := unknown_keys(document.data, also, document.locate):
            raise ConfigError("\n".join(unknown))
        validated(document.data, also, document.locate)
    keys = validated(document.data, _ServeKeys, document.locate)
    index = _find_application(keys.applications, document)
    application = keys.applications[index]
    prefix: KeyPath = ("applications", index, "args")
    if "args" not in application.model_fields_set:
        prefix = prefix[:-1]
    faults = Faults(skips=skips_unsupported)
    resolved = resolve(application.args, document.locate, prefix, faults)
    document = _with_resolved(document, resolved, index, keys.http_options)
    if overrides:
        if MODELS in resolved.args:
            raise ConfigError(
                f"{overrides[0].source}: applies to one model, and {path} serves several; edit the "
                "file"
            )
        resolved = replace(resolved, args=over(resolved.args, overrides))
        document = replace(
            document,
            data=_with_args(document.data, index, resolved.args),
            elsewhere={(*prefix, one.section, one.key): one.source for one in overrides},
        )
    http = {"host": DEFAULT_HOST, "port": DEFAULT_PORT, **(document.data.get("http_options") or {})}
    application = application.model_copy(update={"args": resolved.args})
    models: Mapping[str, FileModel] = {}
    with faults.gathering():
        models = _models_of(application, document, prefix)
    faults.check()
    return ServeFile(
        path=path,
        host=http["host"],
        port=http["port"],
        app_name=application.name,
        route_prefix=application.route_prefix,
        import_path=application.import_path,
        raw=document.data,
        models=models,
        lines=resolved.lines,
    )


def _with_resolved(
    document: Document, resolved: Resolved, index: int, http_options: _HttpOptions
) -> Document:
    """Return the document with the args of application `index` in remora's keys.

    Each key is located where the parameter is written that set it. The file's http_options override
    the host and port of another server's parameters.
    """
    if not resolved.origins and not resolved.http:
        return document
    written = http_options.model_dump(exclude_unset=True)
    marks = [
        known | {ours: known[theirs] for ours, theirs in resolved.origins.items()}
        for known in (document.keys, document.values)
    ]
    data = _with_args(document.data, index, resolved.args)
    data["http_options"] = {**resolved.http, **written}
    return replace(document, data=data, keys=marks[0], values=marks[1])


def _with_args(data: Mapping[str, Any], index: int, args: dict[str, Any]) -> dict[str, Any]:
    """Return the file's data with other args of application `index`."""
    applications = list(data["applications"])
    applications[index] = {**applications[index], "args": args}
    return {**data, "applications": applications}


def _models_of(
    application: _Application, document: Document, prefix: KeyPath
) -> dict[str, FileModel]:
    """Return the models of the `args` at `prefix`, with each `user_config` applied."""
    args = application.args
    configs = validate_models(args, document.locate, prefix)
    common = _written(document, prefix)
    names = [name_of(config) for config in configs]
    deployments = deployment_names(names)
    models = {}
    for index, (name, merged) in enumerate(zip(names, split_models(args), strict=True)):
        place = place_of_model(args, index, document.locate, prefix)
        config = _changed(application, deployments[name], merged, document, place, prefix)
        for other in (GATEWAY, ROUTING_SERVICE):  # validates their user_config too
            _changed(application, other, merged, document, place, prefix)
        own = _written(document, (*prefix, MODELS, index)) if MODELS in args else {}
        models[name] = FileModel(config=config, written=common | own)
    return models


def _changed(
    application: _Application,
    deployment: str,
    args: dict[str, Any],
    document: Document,
    place: Locate,
    prefix: KeyPath,
) -> ServeConfig:
    """Validate the args of a model with the `user_config` of a deployment applied.

    place:   locates keys of the args
    prefix:  path of the application's args
    """
    given = [i for i, d in enumerate(application.deployments) if d.name == deployment]
    changes = application.deployments[given[-1]].user_config if given else None
    at: KeyPath = (*prefix[:2], "deployments", *given[-1:], "user_config")

    def locate(path: KeyPath, at_key: bool) -> str:
        section = (changes or {}).get(path[0]) if path else None
        is_changed = section is not None and (
            not isinstance(section, dict) or len(path) < 2 or path[1] in section
        )
        return document.locate((*at, *path), at_key) if is_changed else place(path, at_key)

    merged = with_user_config(
        args, changes, lambda path, at_key: document.locate((*at, *path), at_key)
    )
    return validated(merged, ServeConfig, locate)


def _find_application(applications: list[_Application], document: Document) -> int:
    ours = [i for i, entry in enumerate(applications) if entry.import_path == IMPORT_PATH]
    if len(ours) == 1:
        return ours[0]
    place = document.locate(("applications",), True)
    if ours:
        raise ConfigError(
            f"{place}applications: {len(ours)} entries have import_path {IMPORT_PATH}; one is "
            "allowed, which may serve several models"
        )
    found = ", ".join(entry.import_path for entry in applications) or "none"
    raise ConfigError(f"{place}applications: none has import_path {IMPORT_PATH} (found: {found})")


def _written(document: Document, prefix: KeyPath) -> dict[str, str]:
    start = len(prefix)
    lines = {path: f"line {mark[0]}" for path, mark in document.keys.items()}
    return {
        ".".join(str(part) for part in path[start:]): place
        for path, place in (lines | document.elsewhere).items()
        if path[:start] == prefix and len(path) == start + 2
    }
