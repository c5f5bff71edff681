"""/openapi.json: summaries, bodies and responses of all operations.

FastAPI knows paths and parameters only, since handlers parse bodies and write responses. Bodies are
described by their models, the rest by the tables of operations here: a new path needs a row there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from remora.deployments.http.api_docs.generation_operations import GENERATION
from remora.deployments.http.api_docs.operation import JSON, Operation
from remora.deployments.http.api_docs.server_operations import SERVER
from remora.deployments.http.api_docs.shapes import REFERENCE, Answer, answers_in, schema_of
from remora.deployments.http.core.fields import Body

_TURNS = [{"role": "user", "content": "What is the capital of France?"}]
_PROMPT = "The capital of France is"
_PARAMETERS = {"max_new_tokens": 16}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
_CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
# Example bodies, without the name of the model.
_EXAMPLES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "/v1/chat/completions": {"messages": _TURNS, "max_completion_tokens": 16},
        "/v1/completions": {"prompt": _PROMPT, "max_tokens": 16},
        "/v1/responses": {"input": _PROMPT, "max_output_tokens": 16},
        "/v1/responses/compact": {"input": _PROMPT},
        "/v1/responses/input_tokens": {"input": _PROMPT},
        "/v1/messages": {"messages": _TURNS, "max_tokens": 16},
        "/v1/messages/count_tokens": {"messages": _TURNS},
        "/v2/chat": {"messages": _TURNS, "max_tokens": 16},
        "/inference/v1/generate": {"token_ids": [65, 66], "sampling_params": {"max_tokens": 16}},
        "/generative_scoring": {"query": _PROMPT, "items": [" Paris"], "label_token_ids": [65, 66]},
        "/generate": {"text": _PROMPT, "sampling_params": _PARAMETERS},
        "/generate_stream": {"inputs": _PROMPT, "parameters": _PARAMETERS},
        "/": {"inputs": _PROMPT, "parameters": _PARAMETERS},
        "/batch_infer": {"prompt_batch": [_PROMPT], "generate_config": _PARAMETERS},
        "/tokenizer/encode": {"prompt": _PROMPT},
        "/api/chat": {"messages": _TURNS, "options": {"num_predict": 16}},
        "/api/generate": {"prompt": _PROMPT, "options": {"num_predict": 16}},
        "/api/show": {},
        "/completion": {"prompt": _PROMPT, "n_predict": 16},
        "/infill": {"input_prefix": "def f():", "input_suffix": "return 1", "n_predict": 16},
        "/apply-template": {"messages": _TURNS},
        "/tokenize": {"prompt": _PROMPT},
        "/v1/tokenize": {"prompt": _PROMPT},
        "/detokenize": {"tokens": [65, 66]},
        "/v1/detokenize": {"tokens": [65, 66]},
    }
)
_EXAMPLES_WITHOUT_MODEL: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "/tokens": {"text": _PROMPT},
        "/abort_request": {"rid": "my-request"},
        "/parse_function_call": {"text": _CALL, "tools": [_TOOL], "tool_call_parser": "hermes"},
        "/separate_reasoning": {
            "text": "<think>Hm.</think>Paris.",
            "reasoning_parser": "deepseek-r1",
        },
    }
)
_WITH_BODY = frozenset({"post", "put"})
_GROUPS: Mapping[str, tuple[Operation, ...]] = MappingProxyType({**GENERATION, **SERVER})
_OPERATIONS = tuple(operation for group in _GROUPS.values() for operation in group)
_GROUP_OF = {operation.at[0]: name for name, group in _GROUPS.items() for operation in group}


def describe_operations(app: FastAPI, bodies: Mapping[str, type[Body]], *, model: str) -> None:
    """Make the application's OpenAPI description that of remora's operations.

    bodies:  path -> model of its body
    model:   name of the served model
    """
    generate = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generate()
            _, schemas = models_json_schema(
                [(body, "validation") for body in set(bodies.values())], ref_template=REFERENCE
            )
            components = description.setdefault("components", {}).setdefault("schemas", {})
            components |= schemas["$defs"]
            components |= {name: schema_of(answer.shape) for name, answer in _answers().items()}
            described = {at: one for each in _OPERATIONS for at, one in _described(each).items()}
            for path, operations in description["paths"].items():
                for method, operation in operations.items():
                    operation |= described.get((method, path), {})
                    # Parameters that are not valid are errors of the API's own format.
                    operation["responses"].pop("422", None)
                    if method in _WITH_BODY and path in bodies:
                        operation["requestBody"] = _request_body(
                            bodies[path], _example(path, model)
                        )
            for unused in ("HTTPValidationError", "ValidationError"):
                components.pop(unused, None)
            description["tags"] = [{"name": name} for name in _GROUPS]
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _answers() -> dict[str, Answer]:
    """Return all named answers. Raises ValueError for two of one name."""
    found: dict[str, Answer] = {}
    for operation in _OPERATIONS:
        for answer in answers_in(operation.answer) if operation.answer is not None else ():
            if found.setdefault(answer.name, answer) is not answer:
                raise ValueError(f"two answers have the name {answer.name}")
    return found


def _described(operation: Operation) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (method, path) -> what is said of the operation at each of its addresses."""
    found = {}
    usual = operation.at[0]
    for at in operation.at:
        method, path = at.split()
        summary, description = operation.summary, operation.description
        if at != usual:
            summary = f"{summary} ({at})"
            description = f"As {usual}. {description}"
        found[method.lower(), path] = {
            "summary": summary,
            "description": description,
            "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_') or 'root'}",
            "tags": [_GROUP_OF[usual]],
            "responses": _responses(operation),
        }
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    error: dict[str, Any] = {"description": "An error in the format of this API."}
    if operation.is_refused:
        return {"400": {"description": "Refused, with the reason."}}
    content: dict[str, Any] = {
        kind: {"schema": {"type": "string"}} for kind in operation.media_types
    }
    if operation.answer is not None:
        content = {JSON: {"schema": schema_of(operation.answer)}, **content}
    good: dict[str, Any] = {"description": operation.answer.name if operation.answer else "Done"}
    if content:
        good["content"] = content
    return {"200": good, "4XX": error, "5XX": error}


def _example(path: str, model: str) -> dict[str, Any] | None:
    if path in _EXAMPLES:
        return {"model": model, **_EXAMPLES[path]}
    return _EXAMPLES_WITHOUT_MODEL.get(path)


def _request_body(body: type[Body], example: dict[str, Any] | None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}
    if example is not None:
        content["example"] = example
    return {"required": True, "content": {JSON: content}}
