"""/classify, /pooling, /encode: outputs of a model's head, in vLLM's and SGLang's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.fields import fault, is_token_list, parse
from remora.deployments.http.generation.bodies import PromptInput
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.embeddings import prompt_text
from remora.deployments.http.pooling.requests import (
    SCORING,
    ChatMessage,
    Inputs,
    PoolingBaseBody,
    PoolingJob,
    chat_rows,
    check_inputs,
    encoded,
    facts_of,
    job_of,
    rows_of,
    usage_of,
)
from remora.engine.pooling.facts import PoolingFacts
from remora.engine.pooling.row import Row
from remora.engine.pooling.vectors import scores_of, vector_of
from remora.engine.types import FloatArray

Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=2048)]


class ClassifyBody(PoolingBaseBody):
    """Body of /classify in vLLM's shape: inputs, or a conversation."""

    input: Inputs | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise fault("is required, or messages in its place; not both", param="input")
        return self


class PoolingBody(ClassifyBody):
    """Body of /pooling.

    task:  token_embed selects the hidden states of all tokens; other values, the model's own task
    """

    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    task: Literal["embed", "classify", "score", "token_embed"] | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a body. A single input, not in a list, is answered with one object."""

    items: list[PromptInput]
    is_one: bool


def _check_given(value: Any) -> Given:
    return Given(check_inputs(value), isinstance(value, str) or is_token_list(value))


GivenInputs = Annotated[
    Given, PlainValidator(_check_given), WithJsonSchema({"type": ["string", "array"]})
]


class EncodeBody(PoolingBaseBody):
    """Body of /encode, and of /classify in SGLang's shape: text or input_ids, one or several."""

    text: GivenInputs | None = None
    input_ids: GivenInputs | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise fault("is required, or input_ids in its place", param="text")
        if self.text is not None and not isinstance(self.text.items[0], str):
            raise fault("must be a text or a list of texts", param="text")
        if self.input_ids is not None and isinstance(self.input_ids.items[0], str):
            raise fault("must be a list of token ids, or a list of such lists", param="input_ids")
        return self


def parse_classify(body: Any) -> ClassifyBody | EncodeBody:
    """Parse a body of /classify; its input fields select the shape. Raises InvalidRequest."""
    is_native = isinstance(body, dict) and ("text" in body or "input_ids" in body)
    return parse(EncodeBody, body) if is_native else parse(ClassifyBody, body)


async def prepare_classify(
    server: ServerState, body: ClassifyBody | EncodeBody, context: RequestContext
) -> PoolingJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    facts = facts_of(server, *SCORING)
    if isinstance(body, EncodeBody):
        return await prepare_encode(server, body, context)
    if facts.step_token is not None:
        raise InvalidRequest(
            "This server's model judges every step and gives no label of the whole; ask /pooling "
            "or /encode.",
            code="not_offered",
        )
    model = (await server.model(body.model)).name
    rows = await _rows(server, body)

    def label(index: int, numbers: FloatArray) -> dict[str, Any]:
        scores = scores_of(numbers, facts.activation)
        return {
            "index": index,
            "label": facts.labels[int(scores.argmax())],
            "probs": scores.tolist(),
            "num_classes": len(facts.labels),
        }

    def tell(results: list[FloatArray]) -> dict[str, Any]:
        data = [label(index, numbers) for index, numbers in enumerate(results)]
        return _listed("classify", context, model, data, rows)

    return job_of(context, body, rows, tell)


async def prepare_pooling(
    server: ServerState, body: PoolingBody, context: RequestContext
) -> PoolingJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    facts = facts_of(server, "embed", *SCORING)
    model = (await server.model(body.model)).name
    per_token = body.task == "token_embed"
    if body.task not in _pooling_tasks(facts):
        raise InvalidRequest(
            f"task is {body.task!r}; this server's model is for the task {facts.task}.",
            "task",
            "not_offered",
        )
    rows = await _rows(server, body)
    if not per_token:
        _check_steps(facts, rows, "input" if body.messages is None else "messages")

    def tell(results: list[FloatArray]) -> dict[str, Any]:
        data = [
            {
                "index": index,
                "object": "pooling",
                "data": encoded(
                    _meant(facts, numbers, body.normalize, per_token=per_token),
                    body.encoding_format,
                ),
            }
            for index, numbers in enumerate(results)
        ]
        return _listed("pool", context, model, data, rows)

    return job_of(context, body, rows, tell, per_token=per_token)


async def prepare_encode(
    server: ServerState, body: EncodeBody, context: RequestContext
) -> PoolingJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    facts = facts_of(server, "embed", *SCORING)
    await server.model(body.model)
    given = body.text or body.input_ids
    assert given is not None
    param = "input_ids" if body.text is None else "text"
    before = prompt_text(facts, None)
    rows = await rows_of(server, body, given.items, param=param, before=before)
    _check_steps(facts, rows, param)

    def tell(results: list[FloatArray]) -> Any:
        answers = [
            {
                "embedding": _meant(facts, numbers, None).tolist(),
                "meta_info": {"id": context.request_id, "prompt_tokens": len(row.token_ids)},
            }
            for row, numbers in zip(rows, results, strict=True)
        ]
        return answers[0] if given.is_one else answers

    return job_of(context, body, rows, tell)


def _check_steps(facts: PoolingFacts, rows: list[Row], param: str) -> None:
    """Raise InvalidRequest for a row without a step to judge, if the model judges steps."""
    if facts.step_id is not None and any(facts.step_id not in row.token_ids for row in rows):
        raise InvalidRequest(
            f"An entry of {param} has no {facts.step_token}, which ends each step that this model "
            "judges.",
            param,
        )


def _pooling_tasks(facts: PoolingFacts) -> tuple[str | None, ...]:
    """Return the values of `task` that the model accepts."""
    own = ("embed",) if facts.task == "embed" else ("classify",)
    return (None, "token_embed", *own, *(("score",) if len(facts.labels) == 1 else ()))


async def _rows(server: ServerState, body: ClassifyBody) -> list[Row]:
    if body.messages is not None:
        return await chat_rows(server, body, body.messages, param="messages")
    before = "" if server.pooling is None else prompt_text(server.pooling.facts, None)
    return await rows_of(server, body, body.input or [], param="input", before=before)


def _meant(
    facts: PoolingFacts, numbers: FloatArray, normalize: bool | None, *, per_token: bool = False
) -> FloatArray:
    """Return an embedding, or scores, from the model's result."""
    if facts.task == "embed" or per_token:
        usual = facts.normalize and not per_token
        return vector_of(numbers, normalize=usual if normalize is None else normalize)
    return scores_of(numbers, facts.activation)


def _listed(
    prefix: str, context: RequestContext, model: str, data: list[dict[str, Any]], rows: list[Row]
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{context.request_id}",
        "object": "list",
        "created": context.created,
        "model": model,
        "data": data,
        "usage": usage_of(rows),
    }
