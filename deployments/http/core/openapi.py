"""Request bodies in /openapi.json; FastAPI cannot list them, since handlers parse bodies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

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
_REFERENCE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[Body]], *, model: str) -> None:
    """Add request bodies, with examples, to the application's OpenAPI description.

    bodies:  path -> model of its body
    model:   name of the served model
    """
    generate = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generate()
            _, schemas = models_json_schema(
                [(body, "validation") for body in set(bodies.values())], ref_template=_REFERENCE
            )
            components = description.setdefault("components", {}).setdefault("schemas", {})
            components |= schemas["$defs"]
            for path, body in bodies.items():
                operations = description["paths"].get(path, {})
                for method in _WITH_BODY & operations.keys():
                    operations[method]["requestBody"] = _request_body(body, _example(path, model))
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _example(path: str, model: str) -> dict[str, Any] | None:
    if path in _EXAMPLES:
        return {"model": model, **_EXAMPLES[path]}
    return _EXAMPLES_WITHOUT_MODEL.get(path)


def _request_body(body: type[Body], example: dict[str, Any] | None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": _REFERENCE.format(model=body.__name__)}}
    if example is not None:
        content["example"] = example
    return {"required": True, "content": {"application/json": content}}
