"""The syntax of vLLM's command line, as options in one form: --name, values as their own tokens.

Knows vLLM's spellings: short names (-tp 2, -O3), --no-x and --disable-x, parts of objects
(--speculative-config.method ngram), the model as the first argument, and launch commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remora.configs.dialects.catalogue import Parameter, catalogue, plain, spellings
from remora.configs.dialects.faults import Faults
from remora.configs.dialects.values import is_bool_text
from remora.configs.validation_messages import shown

_MODULE, _IMAGE = "vllm.entrypoints", "vllm-openai"
_SHORT_LEVEL = "-O"


def options(tokens: Sequence[str], faults: Faults) -> list[str]:
    """Return `--name value` tokens without the launch command."""
    return [*_in_one_form(_without_launcher(tokens), faults)]


def command_line(values: Mapping[str, Any]) -> list[str]:
    """Return the tokens of `vllm serve` for values by catalogue name."""
    model = values.get("--model")
    tokens = ["vllm", "serve", *([model] if model else [])]
    for name, value in values.items():
        parameter = catalogue("vllm")[name]
        if name == "--model":
            continue
        if parameter.type == "bool":
            tokens += [name if value else f"--no-{name[2:]}"]
        elif isinstance(value, list) and parameter.type != "json":
            tokens += [name, *map(_text, value)]
        else:
            tokens += [name, _text(value)]
    return tokens


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _without_launcher(tokens: Sequence[str]) -> list[str]:
    """Drop variables, `docker run ... image`, `vllm serve` or `python -m module` in front."""
    for index, token in enumerate(tokens):
        if token == "serve" and index and tokens[index - 1].rpartition("/")[2] == "vllm":
            return list(tokens[index + 1 :])
        if token.startswith(_MODULE) or (_IMAGE in token and not token.startswith("-")):
            return list(tokens[index + 1 :])
    return list(tokens)


def _in_one_form(tokens: list[str], faults: Faults) -> Iterator[str]:
    objects: dict[str, dict[str, Any]] = {}
    has_model = False
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("-"):
            if has_model:
                faults.add(f"{token}: expected an option that begins with --")
                continue
            has_model = True
            yield from ("--model", token)
            continue
        written, equals, inline = token.partition("=")
        if "." in written:
            if not equals and position < len(tokens):
                inline, position = tokens[position], position + 1
            _add(objects, written, inline)
            continue
        name, parameter, is_off = _find(written, inline if equals else None)
        if name.startswith(_SHORT_LEVEL) and parameter is None:
            level = name[2:].removeprefix("=") or inline
            if not level and position < len(tokens):
                level, position = tokens[position], position + 1
            yield from ("--optimization-level", level)
            continue
        if equals and _is_no_flag(parameter, inline):
            faults.add(f"{written} = {shown(inline)}: expected true or false")
            continue
        values = _values(parameter, tokens[position:]) if not equals else [inline]
        position += 0 if equals else len(values)
        if is_off:
            is_true = not values or values[0].lower() in ("true", "1", "yes", "on")
            values = ["false" if is_true else "true"]
        has_model = has_model or name == "--model"
        yield from (name, *values)
    for name, found in objects.items():
        yield from (name, json.dumps(found))


def _is_no_flag(parameter: Parameter | None, value: str) -> bool:
    return parameter is not None and parameter.type == "bool" and not is_bool_text(value)


def _find(written: str, inline: str | None) -> tuple[str, Parameter | None, bool]:
    """Return the name to write, its parameter, and whether the option turns it off."""
    known = spellings("vllm")
    if written.startswith(_SHORT_LEVEL) and plain(written) not in known:
        return (written if inline is None else f"{written}={inline}"), None, False
    if plain(written) in known:
        parameter = known[plain(written)]
        return (written if written.startswith("--") else parameter.name), parameter, False
    name = plain(written)
    opposites = [name.removeprefix("no-")] if name.startswith("no-") else []
    if name.startswith("disable-"):
        opposites.append(f"enable-{name.removeprefix('disable-')}")
    if name.startswith("enable-"):
        opposites.append(f"disable-{name.removeprefix('enable-')}")
    for opposite in opposites:
        positive = known.get(opposite)
        if positive is not None and positive.type == "bool":
            return positive.name, positive, True
    return written if written.startswith("--") else f"--{name}", None, False


def _values(parameter: Parameter | None, following: Sequence[str]) -> list[str]:
    """Return the tokens that belong to an option; a number may be negative."""
    own: list[str] = []
    for token in following:
        is_number = token[1:2].isdigit()
        if token.startswith("-") and not is_number:
            break
        own.append(token)
    if parameter is None:
        return own[:1]
    if parameter.type == "bool":
        return own[:1] if own and is_bool_text(own[0]) else []
    return own if parameter.type.startswith("list") else own[:1]


def _add(objects: dict[str, dict[str, Any]], written: str, text: str) -> None:
    """Put `--object.part value` into its object; a + behind the name adds to a list."""
    name, *parts = written.split(".")
    known = spellings("vllm").get(plain(name))
    level = objects.setdefault(known.name if known is not None else name, {})
    is_added = parts[-1].endswith("+")
    parts[-1] = parts[-1].removesuffix("+")
    for part in parts[:-1]:
        level = level.setdefault(part, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if is_added:
        level.setdefault(parts[-1], []).extend(str(text).split(","))
    else:
        level[parts[-1]] = value
