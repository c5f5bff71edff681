"""The constraint on the output of a request, under any of the field names that clients use.

    OpenAI   response_format
    vLLM     structured_outputs, and before that guided_json, guided_regex, ...
    SGLang   regex, ebnf, json_schema, structural_tag

A body has at most one constraint: two are a 400, and so is a constraint that cannot be enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import Field, PlainValidator, WithJsonSchema

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import Body, fault
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.parsers.tools import NO_TOOLS, ToolUse
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.types import Grammar

MAX_CHOICES = 1024
RESPONSE_FORMAT = "response_format"


class OutputConstraint(NamedTuple):
    """The constraint of a request.

    param:           the caller's name of its field
    is_best_effort:  whether any JSON is allowed where the schema cannot be enforced
    """

    constraint: Constraint
    param: str
    is_best_effort: bool = False


_JSON = Constraint(kind=ConstraintKind.JSON_SCHEMA, source="{}")


def _json_text(value: Any, param: str) -> str:
    """Return the JSON text of a value given as an object or as text."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{param} must be a JSON schema: an object or its text.", param)
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidRequest(f"{param} is not JSON: {error}.", param) from None


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a text of at least one character.", param)
    return value


def _schema(value: Any, param: str) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=_json_text(value, param))


def _regex(value: Any, param: str) -> Constraint:
    return Constraint(kind=ConstraintKind.REGEX, source=_text(value, param))


def _ebnf(value: Any, param: str) -> Constraint:
    return Constraint(kind=ConstraintKind.EBNF, source=_text(value, param))


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"{param} must be a list of texts, none of them empty.", param)
    if not 1 <= len(value) <= MAX_CHOICES:
        message = f"{param} has {len(value)} texts; 1 to {MAX_CHOICES} are taken."
        raise InvalidRequest(message, param, limit="max_choices" if value else None)
    return Constraint(kind=ConstraintKind.CHOICE, source=orjson.dumps(value).decode())


def _json_object(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param} must be true or false.", param)
    return Constraint(kind=ConstraintKind.JSON_OBJECT) if value else None


def _structural_tag(value: Any, param: str) -> Constraint:
    if not isinstance(value, dict | str) or not value:
        raise InvalidRequest(f"{param} must be a structural tag: an object or its text.", param)
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, source=_json_text(value, param))


_Reader = Callable[[Any, str], Constraint | None]


def _response_format(value: Any, param: str) -> Constraint | None:
    kind = value.get("type")
    if kind == "text":
        _refuse_beside(value, param, "type")
        return None
    if kind in ("json_object", "json"):
        name = _only_one(value, param, "schema", "value", "json_schema")
        if name is None:
            return Constraint(kind=ConstraintKind.JSON_OBJECT)
        return _any_schema(value[name], f"{param}.{name}")
    if kind == "json_schema":
        name = _only_one(value, param, "json_schema", "value") or "json_schema"
        read = _named_schema if name == "json_schema" else _any_schema
        return read(value.get(name), f"{param}.{name}")
    if kind == "regex":
        _refuse_beside(value, param, "type", "value")
        return _regex(value.get("value"), f"{param}.value")
    if kind == "structural_tag":
        return _structural_tag({k: v for k, v in value.items() if v is not None}, param)
    kinds = "text, json, json_object, json_schema, regex or structural_tag"
    message = f"{param}.type must be {kinds}; {str(kind)[:64]!r} found."
    raise InvalidRequest(message, f"{param}.type")


def _only_one(value: Mapping[str, Any], param: str, *names: str) -> str | None:
    """Return which of some fields is given; None = none is. Raises InvalidRequest for two."""
    _refuse_beside(value, param, "type", *names)
    given = [name for name in names if value.get(name) is not None]
    if len(given) > 1:
        shown = f"{param}.{given[1]}"
        raise InvalidRequest(f"{shown} cannot be combined with {given[0]}; send one.", shown)
    return given[0] if given else None


def _any_schema(value: Any, param: str) -> Constraint:
    """Return the constraint of a schema, given plainly or, as in TGI, with a name."""
    is_named = isinstance(value, dict) and "schema" in value and "name" in value
    return _named_schema(value, param) if is_named else _schema(value, param)


def _refuse_beside(value: Mapping[str, Any], param: str, *known: str) -> None:
    for name, item in value.items():
        if name not in known and item is not None:
            shown = f"{param}.{name[:64]}"
            raise unsupported(shown, f"{shown} is not supported.")


def _named_schema(value: Any, param: str) -> Constraint:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object with a schema.", param)
    _refuse_beside(value, param, "name", "description", "schema", "strict")
    if not isinstance(value.get("strict"), bool | None):
        raise InvalidRequest(f"{param}.strict must be true or false.", f"{param}.strict")
    return _schema(value.get("schema"), f"{param}.schema")


_STRUCTURED: Mapping[str, _Reader] = MappingProxyType(
    {
        "json": _schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _ebnf,
        "json_object": _json_object,
        "structural_tag": _structural_tag,
    }
)


def _structured_outputs(value: Any, param: str) -> Constraint | None:
    # vLLM's backend options: false is their default and needs nothing; any other value is refused.
    _refuse_beside({k: v for k, v in value.items() if v is not False}, param, *_STRUCTURED)
    found = _read(value, _STRUCTURED, f"{param}.")
    return None if found is None else found[0]


_READERS: Mapping[str, _Reader] = MappingProxyType(
    {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
        "guided_json": _schema,
        "guided_regex": _regex,
        "guided_choice": _choice,
        "guided_grammar": _ebnf,
        "guided_json_object": _json_object,
        "json_schema": _schema,
        "regex": _regex,
        "ebnf": _ebnf,
        "grammar": _ebnf,
        "structural_tag": _structural_tag,
    }
)


def _read(
    fields: Mapping[str, Any], readers: Mapping[str, _Reader], prefix: str
) -> tuple[Constraint, str] | None:
    found = None
    for name, reader in readers.items():
        value = fields.get(name)
        constraint = None if value is None else reader(value, prefix + name)
        if constraint is None:
            continue
        if found is not None:
            message = f"{prefix}{name} cannot be combined with {found[1]}; send one constraint."
            raise InvalidRequest(message, prefix + name)
        found = constraint, prefix + name
    return found


def _check_object(value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise fault("must be an object")
    return value


_Object = Annotated[Any, PlainValidator(_check_object), WithJsonSchema({"type": "object"})]
_Texts = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]
_Schema = Annotated[Any, WithJsonSchema({"type": ["object", "string"]})]


class ConstraintBody(Body):
    """Fields that constrain the output."""

    response_format: _Object = None
    structured_outputs: _Object = None
    guided_json: _Schema = None
    guided_regex: str | None = None
    guided_choice: _Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: Annotated[str, Field(max_length=64)] | None = None
    json_schema: _Schema = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: _Schema = None


def constraint_of(body: Body, *, prefix: str = "") -> tuple[Constraint, str] | None:
    """Return the constraint of a body, and the name of its field.

    body:    may lack any of `ConstraintBody`'s fields
    prefix:  precedes the field names in errors

    Raises InvalidRequest.
    """
    return _read({name: getattr(body, name, None) for name in _READERS}, _READERS, prefix)


def output_constraint(
    server: ServerState, body: Body, *, prefix: str = ""
) -> OutputConstraint | None:
    """Return the constraint of a body, checked together with its other fields.

    Arguments as in `constraint_of`. Raises InvalidRequest.
    """
    _check_backend(server, getattr(body, "guided_decoding_backend", None), prefix)
    found = constraint_of(body, prefix=prefix)
    if found is None:
        return None
    _check_alone(body, found[1], prefix)
    return OutputConstraint(*found, _is_best_effort(getattr(body, RESPONSE_FORMAT, None)))


async def compile_constraint(
    server: ServerState,
    found: OutputConstraint | None,
    use: ToolUse = NO_TOOLS,
    *,
    tools_param: str = "tools",
) -> Grammar | None:
    """Return the compiled constraint of a request, or that of its tools, if there is one.

    use:          tools of the request. If calls are optional, the constraint holds for a reply
                  without calls; if calls are forced, it is ignored.
    tools_param:  the caller's name of the tools

    Raises InvalidRequest.
    """
    if found is not None and not use.is_forced:
        try:
            return await _compile(server, found.constraint, found.param, use)
        except InvalidRequest:
            if not found.is_best_effort:
                raise
        return await _compile(server, _JSON, found.param, use)
    of_tools = server.formats.tool_constraint(use)
    if of_tools is None:
        return None
    return await server.grammars.compile(of_tools, param=tools_param)


async def _compile(server: ServerState, answer: Constraint, param: str, use: ToolUse) -> Grammar:
    if not server.formats.calls_are_answers(use):
        return await server.grammars.compile(answer, param=param)
    if server.config.grammar.backend == "outlines":
        raise _cannot_choose(param, "grammar.backend outlines (xgrammar can)")
    try:
        both = server.formats.calls_or(answer, use)
        if both is not None:
            return await server.grammars.compile(both, param="tools")
    except (ConstraintError, InvalidRequest):
        # Compiled alone, a faulty constraint raises an error of its own, which takes precedence.
        await server.grammars.compile(answer, param=param)
        raise
    raise _cannot_choose(param, f"the tool-call format {server.formats.tool_format_name}")


def _cannot_choose(param: str, where: str) -> InvalidRequest:
    return unsupported(
        param,
        f"{param} together with tools that the model is free to call cannot be enforced with "
        f"{where}; send tool_choice none or required.",
    )


def _check_backend(server: ServerState, asked: str | None, prefix: str) -> None:
    backend = server.config.grammar.backend
    if asked not in (None, "auto", backend):
        name = f"{prefix}guided_decoding_backend"
        raise unsupported(name, f"{name}: this server's backend is {backend}.")


def _is_best_effort(response_format: Any) -> bool:
    """Return whether a schema is best effort: OpenAI's `strict: false`."""
    schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return isinstance(schema, dict) and schema.get("strict") is False


_NOT_BESIDE: tuple[tuple[str, str], ...] = (
    ("allowed_token_ids", "limits the tokens in a way of its own"),
    ("bad_words", "forbids tokens that the constraint may need"),
)


def _check_alone(body: Body, param: str, prefix: str) -> None:
    for name, why in _NOT_BESIDE:
        if getattr(body, name, None):
            message = f"{prefix}{name} cannot be combined with {param}: it {why}."
            raise InvalidRequest(message, prefix + name)
