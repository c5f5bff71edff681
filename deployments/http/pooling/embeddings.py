"""/v1/embeddings, in OpenAI's shape: a vector for each input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.fields import Label
from remora.deployments.http.core.sse import while_connected
from remora.deployments.http.core.wire import JSONAnswer, written
from remora.deployments.http.generation.endpoint import Job, run
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.encodings import (
    BinaryAnswer,
    Encoding,
    binary_answer,
    check_described,
)
from remora.deployments.http.pooling.fields import VectorBody
from remora.deployments.http.pooling.requests import (
    PoolingJob,
    chat_rows,
    facts_of,
    job_of,
    rows_of,
    usage_of,
)
from remora.engine.pooling.facts import PoolingFacts
from remora.engine.pooling.row import Row
from remora.engine.pooling.vectors import vector_of
from remora.engine.types import FloatArray


class EmbeddingsBody(VectorBody):
    """Body of /v1/embeddings: inputs, or a conversation.

    prompt_name:  name of the model's prompt that precedes each text
    """

    prompt_name: Label | None = None


async def prepare_embeddings(
    server: ServerState, body: EmbeddingsBody, context: RequestContext
) -> PoolingJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    facts = facts_of(server, "embed")
    model = (await server.model(body.model)).name
    check_dimensions(facts, body.dimensions)
    if body.messages is not None:
        rows = await chat_rows(server, body, body.messages, param="messages")
    else:
        before = prompt_text(facts, body.prompt_name)
        rows = await rows_of(server, body, body.input or [], param="input", before=before)
    encoding = encoding_of(body, rows)
    normalize = facts.normalize if body.normalizes is None else body.normalizes

    def tell(results: list[FloatArray]) -> dict[str, Any] | BinaryAnswer:
        vectors = [
            vector_of(numbers, normalize=normalize, dimensions=body.dimensions)
            for numbers in results
        ]
        if encoding.is_binary:
            return binary_answer(vectors, encoding, described("embd", context, model, rows))
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encoding.value(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": usage_of(rows),
        }

    return job_of(context, body, rows, tell)


def encoding_of(body: VectorBody, rows: Sequence[Row]) -> Encoding:
    """Return the form of a body's vectors. Raises InvalidRequest if they are too many for it."""
    encoding = Encoding(
        form=body.encoding_format or "float",
        dtype=body.embed_dtype or "float32",
        endianness=body.endianness or "native",
    )
    check_described(len(rows), encoding, "input")
    return encoding


def described(
    prefix: str, context: RequestContext, model: str, rows: Sequence[Row]
) -> dict[str, Any]:
    """Return what the metadata of a binary answer says of the request."""
    return {
        "id": f"{prefix}-{context.request_id}",
        "created": context.created,
        "model": model,
        "usage": usage_of(rows),
    }


async def answer_vectors(
    server: ServerState, request: Request, job: Job, headers: Mapping[str, str]
) -> Response:
    """Run a job for as long as its client is connected; return its response, JSON or bytes."""
    whole = await while_connected(request, run(server, job))
    if isinstance(whole, BinaryAnswer):
        return Response(
            whole.content,
            headers={**headers, **whole.headers},
            media_type="application/octet-stream",
        )
    return JSONAnswer(await written(whole), headers=dict(headers))


def prompt_text(facts: PoolingFacts, name: str | None) -> str:
    """Return the prompt with a name, the default prompt for None. Raises InvalidRequest."""
    name = facts.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in facts.prompts:
        known = ", ".join(facts.prompts) or "none"
        raise InvalidRequest(f"There is no prompt {name!r}; there are: {known}.", "prompt_name")
    return facts.prompts[name]


def check_dimensions(facts: PoolingFacts, wanted: int | None) -> None:
    """Raise InvalidRequest for a size that the model does not support."""
    if wanted is None or wanted == facts.size:
        return
    if facts.dimensions is None:
        raise InvalidRequest(
            f"This model's embeddings have {facts.size} dimensions and cannot be cut: the model "
            "does not say that it was trained for it (pooling.dimensions).",
            "dimensions",
            "unsupported",
        )
    if wanted > facts.size or (facts.dimensions and wanted not in facts.dimensions):
        allowed = ", ".join(map(str, facts.dimensions)) or f"1 to {facts.size}"
        raise InvalidRequest(f"dimensions is {wanted}; allowed: {allowed}.", "dimensions")
