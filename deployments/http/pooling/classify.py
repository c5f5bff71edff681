"""/classify, /pooling, /encode: outputs of a model's head, in vLLM's and SGLang's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import fault, is_token_list, parse
from remora.deployments.http.generation.bodies import PromptInput, check_inputs
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.embeddings import (
    check_dimensions,
    described,
    encoding_of,
    prompt_text,
)
from remora.deployments.http.pooling.encodings import BinaryAnswer, binary_answer
from remora.deployments.http.pooling.fields import (
    ConversationBody,
    PoolingBaseBody,
    VectorBody,
)
from remora.deployments.http.pooling.requests import (
    SCORING,
    PoolingJob,
    activation_of,
    chat_rows,
    facts_of,
    job_of,
    rows_of,
    usage_of,
)
from remora.engine.pooling.facts import PoolingFacts
from remora.engine.pooling.row import Row
from remora.engine.pooling.vectors import scores_of, vector_of
from remora.engine.types import FloatArray, PoolingParams


class ClassifyBody(ConversationBody):
    """Body of /classify in vLLM's shape: inputs, or a conversation."""


class PoolingBody(VectorBody):
    """Body of /pooling.

    task:  token_embed selects the hidden states of all tokens, token_classify the scores of each;
           other values, the model's own task
    """

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None


_PARAMS = {
    "token_embed": PoolingParams(per_token=True),
    "token_classify": PoolingParams(per_token=True, is_scored=True),
}


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
    activation = activation_of(facts, body)

    def label(index: int, numbers: FloatArray) -> dict[str, Any]:
        scores = scores_of(numbers, activation)
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
    params = _PARAMS.get(body.task or "", PoolingParams())
    if body.task not in _pooling_tasks(facts):
        raise InvalidRequest(
            f"task is {body.task!r}; this server's model is for the task {facts.task}.",
            "task",
            "not_offered",
        )
    is_vector = params.per_token != params.is_scored or facts.task == "embed"
    _check_vector_fields(facts, body, is_vector=is_vector)
    rows = await _rows(server, body)
    if not params.per_token:
        _check_steps(facts, rows, "input" if body.messages is None else "messages")
    encoding = encoding_of(body, rows)

    def meant(numbers: FloatArray) -> FloatArray:
        if not is_vector:
            return scores_of(numbers, activation_of(facts, body))
        usual = facts.normalize and not params.per_token
        normalize = usual if body.normalizes is None else body.normalizes
        return vector_of(numbers, normalize=normalize, dimensions=body.dimensions)

    def tell(results: list[FloatArray]) -> dict[str, Any] | BinaryAnswer:
        arrays = [meant(numbers) for numbers in results]
        if encoding.is_binary:
            return binary_answer(arrays, encoding, described("pool", context, model, rows))
        data = [
            {"index": index, "object": "pooling", "data": encoding.value(array)}
            for index, array in enumerate(arrays)
        ]
        return _listed("pool", context, model, data, rows)

    return job_of(context, body, rows, tell, params=params)


def _check_vector_fields(facts: PoolingFacts, body: PoolingBody, *, is_vector: bool) -> None:
    """Raise InvalidRequest for fields of vectors in a body that asks for scores."""
    if is_vector and body.task != "token_embed":
        check_dimensions(facts, body.dimensions)
        return
    if body.dimensions is not None:
        message = f"dimensions: {'token states' if is_vector else 'scores'} cannot be cut."
        raise unsupported("dimensions", message)
    if not is_vector and body.normalize is not None:
        raise unsupported("normalize", "normalize: scores have no length; see use_activation.")


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
                "embedding": _meant(facts, numbers, body).tolist(),
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
    if facts.task == "embed":
        return (None, "token_embed", "embed")
    tokens = ("token_classify",) if len(facts.methods) == 1 else ()
    return (None, "token_embed", "classify", *tokens, *_scores(facts))


def _scores(facts: PoolingFacts) -> tuple[str, ...]:
    return ("score",) if len(facts.labels) == 1 else ()


async def _rows(server: ServerState, body: ConversationBody) -> list[Row]:
    if body.messages is not None:
        return await chat_rows(server, body, body.messages, param="messages")
    before = "" if server.pooling is None else prompt_text(server.pooling.facts, None)
    return await rows_of(server, body, body.input or [], param="input", before=before)


def _meant(facts: PoolingFacts, numbers: FloatArray, body: EncodeBody) -> FloatArray:
    """Return an embedding, or scores, from the model's result."""
    if facts.task == "embed":
        wanted = body.use_activation
        return vector_of(numbers, normalize=facts.normalize if wanted is None else wanted)
    return scores_of(numbers, activation_of(facts, body))


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
