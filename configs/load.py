"""Reading a configuration: a Serve YAML file, or the `args` of a Serve application.

A file is an ordinary Ray Serve config file; this module checks what belongs to remora and the few
Serve keys it needs itself. The rest of the Serve schema is Ray's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from remora.configs.errors import ConfigError
from remora.configs.messages import KeyPath, describe, shown, unknown_keys
from remora.configs.positions import Document, parse_yaml
from remora.configs.schema import ServeConfig

IMPORT_PATH = "remora.deployments.app:build"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFile:
    """A Serve config file that serves one model by remora.

    raw:      the whole file as plain data, as Ray wants it
    written:  line of each key of `config` that the file holds, by dotted name (`engine.page_size`)
    """

    path: Path
    host: str
    port: int
    app_name: str
    route_prefix: str
    import_path: str
    raw: dict[str, Any]
    config: ServeConfig
    written: Mapping[str, int]


def _check_slash(prefix: str) -> str:
    if not prefix.startswith("/"):
        raise PydanticCustomError("route_prefix", "must begin with /")
    return prefix


class _HttpOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    host: str = DEFAULT_HOST
    port: Annotated[int, Field(ge=0, le=65_535)] = DEFAULT_PORT


class _Application(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str = "default"
    route_prefix: Annotated[str, AfterValidator(_check_slash)] = "/"
    import_path: str
    args: dict[Any, Any] = Field(default_factory=dict)


class _ServeKeys(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    http_options: _HttpOptions = _HttpOptions()
    applications: list[_Application]


def parse_args(args: Mapping[str, Any]) -> ServeConfig:
    """Validate the `args` of a Serve application. Raises ConfigError with one line per fault."""
    return _validate(dict(args), ServeConfig, lambda _path, _at_key: "")


def load_serve_file(path: Path, also: type[BaseModel] | None = None) -> ServeFile:
    """Read and validate a Serve config file. Raises ConfigError with one line per fault.

    also:  another schema that the whole file has to meet, such as Ray Serve's own
    """
    document = parse_yaml(_read_text(path), str(path))
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{document.locate((), False)}expected the keys of a Serve config file, "
            f"applications among them; found {shown(document.data)}"
        )
    if also is not None:
        if unknown := unknown_keys(document.data, also, document.locate):
            raise ConfigError("\n".join(unknown))
        _validate(document.data, also, document.locate)
    keys = _validate(document.data, _ServeKeys, document.locate)
    index = _find_application(keys.applications, document)
    application = keys.applications[index]
    prefix: KeyPath = ("applications", index, "args")
    if "args" not in application.model_fields_set:
        prefix = prefix[:-1]
    return ServeFile(
        path=path,
        host=keys.http_options.host,
        port=keys.http_options.port,
        app_name=application.name,
        route_prefix=application.route_prefix,
        import_path=application.import_path,
        raw=document.data,
        config=_validate(application.args, ServeConfig, document.locate, prefix),
        written=_written_lines(document, prefix),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _validate(
    data: Any, model: type[M], locate: Callable[[KeyPath, bool], str], prefix: KeyPath = ()
) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error.errors(), model, locate, prefix)) from None


def _find_application(applications: list[_Application], document: Document) -> int:
    ours = [i for i, entry in enumerate(applications) if entry.import_path == IMPORT_PATH]
    if len(ours) == 1:
        return ours[0]
    place = document.locate(("applications",), True)
    if ours:
        raise ConfigError(
            f"{place}applications: {len(ours)} entries have import_path {IMPORT_PATH}; "
            "one file serves one model so far"
        )
    found = ", ".join(entry.import_path for entry in applications) or "none"
    raise ConfigError(f"{place}applications: none has import_path {IMPORT_PATH} (found: {found})")


def _written_lines(document: Document, prefix: KeyPath) -> dict[str, int]:
    start = len(prefix)
    return {
        ".".join(str(part) for part in path[start:]): mark[0]
        for path, mark in document.keys.items()
        if path[:start] == prefix and len(path) == start + 2
    }
