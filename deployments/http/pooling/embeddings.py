"""/v1/embeddings, in OpenAI's shape: a vector for each input."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.fields import Label, fault
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.requests import (
    ChatMessage,
    Inputs,
    PoolingBaseBody,
    PoolingJob,
    chat_rows,
    encoded,
    facts_of,
    job_of,
    rows_of,
    usage_of,
)
from remora.engine.pooling.facts import PoolingFacts
from remora.engine.pooling.vectors import vector_of
from remora.engine.types import FloatArray


class EmbeddingsBody(PoolingBaseBody):
    """Body of /v1/embeddings: inputs, or a conversation.

    prompt_name:  name of the model's prompt that precedes each text
    """

    input: Inputs | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2048)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    normalize: bool | None = None
    prompt_name: Label | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise fault("is required, or messages in its place; not both", param="input")
        return self


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
    normalize = facts.normalize if body.normalize is None else body.normalize

    def tell(results: list[FloatArray]) -> dict[str, Any]:
        vectors = (
            vector_of(numbers, normalize=normalize, dimensions=body.dimensions)
            for numbers in results
        )
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": encoded(vector, body.encoding_format),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": usage_of(rows),
        }

    return job_of(context, body, rows, tell)


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
