"""Parse other servers' command lines and environment variables into values by name.

Knows the catalogues' types, and nothing of rules. A leading launch command such as `python -m
sglang.launch_server` is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, takewhile
from typing import Any

from remora.configs.dialects.catalogue import (
    Parameter,
    System,
    catalogue,
    plain,
    spellings,
)
from remora.configs.dialects.faults import Faults
from remora.configs.dialects.values import is_bool_text
from remora.configs.dialects.vllm.options import command_line, options
from remora.configs.errors import ConfigError
from remora.configs.positions import Document, parse_yaml, read_text
from remora.configs.validation_messages import shown

_CONFIG_FILE = "config"  # option of SGLang and vLLM that names a YAML file


def read_command_line(
    system: System,
    tokens: Sequence[str],
    environ: Mapping[str, str],
    documents: dict[str, Document] | None = None,
    faults: Faults | None = None,
) -> dict[str, Any]:
    """Return name -> value of a command line; nested data for the backend config's JSON files.

    environ:    variables that RTP-LLM reads; command-line options override them
    documents:  output: name -> file, for names that come from a file
    faults:     gathers the faults instead of raising them
    Raises ConfigError for malformed options; `translate` reports unknown names.
    """
    gathered = faults if faults is not None else Faults()
    given: dict[str, Any] = {}
    with gathered.gathering():
        given = _read(system, tokens, environ, {} if documents is None else documents, gathered)
    if faults is None:
        gathered.check()
    return given


def _read(
    system: System,
    tokens: Sequence[str],
    environ: Mapping[str, str],
    documents: dict[str, Document],
    faults: Faults,
) -> dict[str, Any]:
    if system == "backend":
        return _read_documents(tokens, documents)
    if system == "ray_serve_llm":
        raise ConfigError("expected a YAML file; Ray Serve LLM has no command line")
    given = _options(
        system,
        options(tokens, faults) if system == "vllm" else _without_launcher(tokens),
        faults,
    )
    if system in ("sglang", "vllm"):
        given = _with_file(system, given, documents, faults)
    if system == "rtp_llm":
        named = {plain(name) for name in given}
        for parameter in catalogue(system).values():
            spelt = {plain(name) for name in (parameter.name, *parameter.aliases)}
            if parameter.env and parameter.env in environ and not spelt & named:
                given[parameter.env] = environ[parameter.env]
    return given


def write_command_line(system: System, values: Mapping[str, Any]) -> list[str]:
    """Return the command line for `values`, by catalogue name."""
    if system == "vllm":
        return command_line(values)
    tokens = []
    for name, value in values.items():
        parameter = catalogue(system)[name]
        if parameter.type == "bool" and system != "rtp_llm":
            tokens += [name] if value else []
        elif isinstance(value, list) and parameter.type != "json":
            tokens += [name, *(_text(item) for item in value)]
        else:
            tokens += [name, _text(value)]
    return tokens


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _without_launcher(tokens: Sequence[str]) -> list[str]:
    """Drop what precedes the first long option, such as `python -m module`."""
    if not tokens or tokens[0].startswith("-"):
        return list(tokens)
    return list(dropwhile(lambda token: not token.startswith("--"), tokens))


def _options(system: System, tokens: list[str], faults: Faults) -> dict[str, Any]:
    given: dict[str, Any] = {}
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("--"):
            faults.add(f"{token}: expected an option that begins with --")
            continue
        name, equals, inline = token.partition("=")
        parameter = _find(system, name)
        following = list(takewhile(lambda each: not each.startswith("--"), tokens[position:]))
        if equals:
            value: Any = inline
        elif parameter is not None and parameter.type == "bool":
            if following and is_bool_text(following[0]):
                value, position = following[0], position + 1
            else:
                value = True
        elif parameter is not None and parameter.type.startswith("list"):
            value, position = following, position + len(following)
        elif following:
            value, position = following[0], position + 1
        else:
            if parameter is not None:
                faults.add(f"{name}: a value is missing; write it after the option")
                continue
            value = True
        # An abbreviation stands for the whole name.
        is_whole = plain(name) in spellings(system)
        shown_name = name if parameter is None or is_whole else parameter.name
        given[shown_name] = _gathered(parameter, given.get(shown_name), value)
    return given


def _gathered(parameter: Parameter | None, before: Any, value: Any) -> Any:
    """Return the value of an option that may be repeated: lists grow, others are replaced."""
    if parameter is None or not parameter.type.startswith("list"):
        return value
    values = value if isinstance(value, list) else [value]
    return [*(before or []), *values]


def _find(system: System, name: str) -> Parameter | None:
    """Return the parameter of a name or, as in argparse, of an unambiguous prefix."""
    known = spellings(system)
    if plain(name) in known:
        return known[plain(name)]
    found = {
        parameter.name: parameter
        for spelt, parameter in known.items()
        if spelt.startswith(plain(name))
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _with_file(
    system: System, given: dict[str, Any], documents: dict[str, Document], faults: Faults
) -> dict[str, Any]:
    """Add the options of the `--config` file, which the command line overrides."""
    written = next((name for name in given if plain(name) == _CONFIG_FILE), None)
    if written is None:
        return given
    path = str(given.pop(written))
    try:
        document = parse_yaml(read_text(path, f"{written} = "), path)
    except ConfigError as error:
        faults.add(str(error))
        return given
    data = document.data
    if not isinstance(data, dict):
        faults.add(
            f"{path}:1:1: expected a mapping of options to values, such as model-path: "
            f"/models/llama; found {shown(data)}"
        )
        return given
    own = {_canonical(system, name) for name in given}
    below = {
        str(name): value for name, value in data.items() if _canonical(system, str(name)) not in own
    }
    documents |= dict.fromkeys(below, document)
    return {**below, **given}


def _canonical(system: System, name: str) -> str:
    parameter = spellings(system).get(plain(name))
    return parameter.name if parameter is not None else name


def _read_documents(tokens: Sequence[str], documents: dict[str, Document]) -> dict[str, Any]:
    """Return the merged content of the backend config's JSON files."""
    merged: dict[str, Any] = {}
    if not tokens:
        raise ConfigError("expected the JSON files of optimisation and pipeline; found none")
    for token in tokens:
        text = read_text(token)
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            place = f"{token}:{error.lineno}:{error.colno}"
            raise ConfigError(f"{place}: not valid JSON: {error.msg.lower()}") from None
        if not isinstance(data, dict):
            raise ConfigError(
                f"{token}:1:1: expected an object with keys such as backend or "
                f"tensor_parallel_size; found {shown(data)}"
            )
        with suppress(ConfigError):  # JSON that is not YAML (with tabs) has no positions
            documents |= dict.fromkeys(data, parse_yaml(text, token))
        for key, value in data.items():
            if key in merged and merged[key] != value:
                raise ConfigError(f"{token}: {key} has another value in another file; remove one")
            merged[key] = value
    return merged
