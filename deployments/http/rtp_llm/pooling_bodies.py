"""Bodies of RTP-LLM's routes for pooling models: similarity, classifier and reranker."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from remora.deployments.http.core.body_limits import AtMost, check_size
from remora.deployments.http.core.fields import Body, fault, unsupported_part


def _check_classified(value: Any) -> list[str]:
    """Return texts; pairs are refused."""
    if not isinstance(value, list) or not value:
        raise fault("must be a list of texts")
    check_size("max_inputs", value)
    if any(isinstance(item, list) for item in value):
        raise unsupported_part(
            "pairs of texts cannot be classified here; send them to /v1/reranker or /v1/score"
        )
    if not all(isinstance(item, str) for item in value):
        raise fault("must be a list of texts")
    return value


ModelName = Annotated[str, Field(max_length=1024)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True), AtMost("max_inputs")]


class RtpSimilarityBody(Body):
    """Body of /v1/embeddings/similarity: each text of `left` is compared with each of `right`."""

    left: Texts
    right: Texts
    model: ModelName | None = None
    return_response: bool | None = None


class RtpOtherVectorsBody(Body):
    """Body of /v1/embeddings/sparse and /v1/embeddings/colbert, which are refused."""

    input: Any = None
    model: ModelName | None = None


class RtpClassifierBody(Body):
    """Body of /v1/classifier."""

    input: Annotated[
        list[str],
        PlainValidator(_check_classified),
        WithJsonSchema({"type": "array", "items": {"type": "string"}}),
    ]
    model: ModelName | None = None


class RtpRerankerBody(Body):
    """Body of /v1/reranker.

    sorted:      false = in the order of the documents
    truncation:  false = documents that are too long are refused instead of cut
    normalize:   true = probabilities instead of logits
    """

    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    model: ModelName | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    sorted: bool | None = None
    truncation: bool | None = None
    return_documents: bool | None = None
    normalize: bool | None = None
