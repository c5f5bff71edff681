"""Cohere's /v2/embed, made by the endpoint of /v1/embeddings: vectors in several number formats.

int8 and uint8 are refused: they need ranges that only Cohere's own models have.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.cohere.chat_bodies import priority_of
from remora.deployments.http.core.body_limits import AtMost
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.core.fields import Body, fault, unsupported_part
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState

_SIDES: Mapping[str, str] = MappingProxyType({"START": "left", "END": "right"})
# Kinds of input -> names of prompts that models of sentence-transformers have for them.
_PROMPTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "search_query": ("search_query", "query"),
        "search_document": ("search_document", "document", "passage"),
        "classification": ("classification", "Classification"),
        "clustering": ("clustering", "Clustering"),
    }
)
_NAMES = renames(
    (r"^input$", "texts"), (r"^dimensions$", "output_dimension"), (r"^truncate_.*", "truncate")
)


def _check_type(value: Any) -> Any:
    if value in ("int8", "uint8"):
        raise unsupported_part(
            "int8 and uint8 need ranges that the model does not have; use float, binary, ubinary "
            "or base64"
        )
    return value


def _check_images(value: Any) -> None:
    if value not in (None, []):
        raise unsupported_part("images cannot be embedded; send texts")


EmbeddingType = Annotated[
    Literal["float", "binary", "ubinary", "base64"], BeforeValidator(_check_type)
]
InputType = Literal["search_query", "search_document", "classification", "clustering"]


class CoherePart(Body):
    """A part of an input: its text."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.type != "text":
            raise unsupported_part("only parts of the type text can be embedded")
        if self.text is None:
            raise fault("is required", param="text")
        return self


class CohereInput(Body):
    """An input of several parts, which are embedded together."""

    content: Annotated[list[CoherePart], Field(min_length=1), AtMost("max_parts")]


class CohereEmbedBody(Body):
    """Body of /v2/embed: texts, or inputs of parts."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    input_type: InputType | None = None
    texts: Annotated[list[str], Field(min_length=1), AtMost("max_inputs")] | None = None
    inputs: Annotated[list[CohereInput], Field(min_length=1), AtMost("max_inputs")] | None = None
    images: Annotated[Any, PlainValidator(_check_images)] = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    output_dimension: Annotated[int, Field(ge=1, le=2**20)] | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=4)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: Annotated[int, Field(ge=0, le=999)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise fault("is required, or inputs in its place; not both", param="texts")
        return self

    @property
    def given(self) -> list[str]:
        """The texts."""
        if self.texts is not None:
            return self.texts
        return ["".join(p.text or "" for p in one.content) for one in self.inputs or ()]


class CohereEmbedder:
    """Prepares the jobs of /v2/embed.

    embeddings:  the endpoint of /v1/embeddings
    """

    def __init__(self, embeddings: Endpoint[Any]) -> None:
        self._embeddings = embeddings

    async def prepare(
        self, server: ServerState, body: CohereEmbedBody, context: RequestContext
    ) -> Job:
        """Return the job of a body. Raises RequestError."""
        if body.max_tokens is not None and body.truncate == "NONE":
            raise InvalidRequest("max_tokens cuts texts; truncate NONE forbids it.", "max_tokens")
        limit = server.plan.max_sequence_tokens
        kept = min(body.max_tokens or limit, limit)
        side = _SIDES.get(body.truncate)
        if side is None and server.config.api.prompt_truncation != "none":
            message = "truncate: this server cuts texts that are too long (api.prompt_truncation)."
            raise unsupported("truncate", message)
        texts, types = body.given, body.embedding_types or ["float"]
        fields = {
            "model": body.model,
            "input": texts,
            "dimensions": body.output_dimension,
            "prompt_name": _prompt_name(server, body.input_type),
            "truncate_prompt_tokens": None if side is None else kept,
            "truncation_side": side,
            "priority": priority_of(body.priority, lowest_first=server.plan.low_priority_first),
        }

        def converted(answer: Any) -> dict[str, Any]:
            vectors = [np.asarray(one["embedding"], np.float32) for one in answer["data"]]
            return {
                "id": f"embd-{context.request_id}",
                "embeddings": {kind: _written(vectors, kind) for kind in types},
                "texts": texts,
                "response_type": "embeddings_by_type",
                "meta": {
                    "api_version": {"version": "2"},
                    "billed_units": {"input_tokens": answer["usage"]["prompt_tokens"]},
                },
            }

        with in_callers_words(_NAMES):
            return await self._embeddings.convert(server, fields, context, converted)


def _prompt_name(server: ServerState, kind: InputType | None) -> str | None:
    """Return the name of the model's prompt for a kind of input; None = its default prompt."""
    if kind is None or server.pooling is None:
        return None
    prompts = server.pooling.facts.prompts
    return next((name for name in _PROMPTS[kind] if name in prompts), None)


def _written(vectors: Sequence[Any], kind: str) -> list[Any]:
    """Return vectors in one of the formats; binary ones hold a bit for each positive number."""
    match kind:
        case "float":
            return [vector.tolist() for vector in vectors]
        case "base64":
            return [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors]
    bits = [np.packbits(vector > 0) for vector in vectors]
    if kind == "ubinary":
        return [row.tolist() for row in bits]
    return [(row.astype(np.int16) - 128).tolist() for row in bits]
