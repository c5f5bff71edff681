"""Jobs of RTP-LLM's pooling bodies, made by the endpoints of OpenAI's and vLLM's routes.

Errors name the fields of the body that was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import Renames, in_callers_words, renames
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import Event, OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.rtp_llm.pooling_bodies import (
    RtpClassifierBody,
    RtpRerankerBody,
    RtpSimilarityBody,
)

_LEFT, _RIGHT = (renames((r"^input", side)) for side in ("left", "right"))
_RERANKER = renames(
    (r"^top_n$", "top_k"),
    (r"^use_activation$", "normalize"),
    (r"^truncate_prompt_tokens$", "truncation"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityJob(Job):
    """Embeddings of two lists of texts, to be compared.

    left, right:    jobs of the lists; the requests are those of both, in this order
    shows_vectors:  whether the response has the embeddings, too
    """

    left: Job
    right: Job
    model: str
    shows_vectors: bool

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        events = [event async for event in outputs]
        num_left = len(self.left.requests)
        left = await self.left.result(_again(e for e in events if e[0] < num_left))
        right = await self.right.result(
            _again((prompt - num_left, output) for prompt, output in events if prompt >= num_left)
        )
        near = await asyncio.to_thread(_similarity, left, right)
        shown = {"left_response": left, "right_response": right} if self.shows_vectors else {}
        return {"model": self.model, "similarity": near, **shown}


async def _again(events: Iterable[Event]) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event


def _similarity(left: dict[str, Any], right: dict[str, Any]) -> list[list[float]]:
    """Return the cosine of each vector of an answer with each of the other."""
    sides = [
        np.array([one["embedding"] for one in answer["data"]], np.float32)
        for answer in (left, right)
    ]
    found: list[list[float]] = (sides[0] @ sides[1].T).tolist()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RtpPooling:
    """Prepares the jobs.

    embeddings, rerank, classify:  endpoints of /v1/embeddings, /v1/rerank and /classify
    """

    embeddings: Endpoint[Any]
    rerank: Endpoint[Any]
    classify: Endpoint[Any]

    async def similarity(
        self, server: ServerState, body: RtpSimilarityBody, context: RequestContext
    ) -> SimilarityJob:
        """Return the job of /v1/embeddings/similarity. Raises RequestError."""
        model = await server.model(body.model)

        async def side(texts: list[str], names: Renames) -> Job:
            fields = {"input": texts, "model": body.model, "normalize": True}
            with in_callers_words(names):
                return await self.embeddings.convert(server, fields, context, _unchanged)

        left, right = await side(body.left, _LEFT), await side(body.right, _RIGHT)
        return SimilarityJob(
            context=context,
            requests=(*left.requests, *right.requests),
            left=left,
            right=right,
            model=model.name,
            shows_vectors=bool(body.return_response),
        )

    async def classifier(
        self, server: ServerState, body: RtpClassifierBody, context: RequestContext
    ) -> Job:
        """Return the job of /v1/classifier: logits of all labels. Raises RequestError."""
        fields = {"input": body.input, "model": body.model, "use_activation": False}
        return await self.classify.convert(server, fields, context, _as_scores)

    async def reranker(
        self, server: ServerState, body: RtpRerankerBody, context: RequestContext
    ) -> Job:
        """Return the job of /v1/reranker: scored documents. Raises RequestError."""
        fields: dict[str, Any] = {
            "query": body.query,
            "documents": body.documents,
            "model": body.model,
            "use_activation": bool(body.normalize),
            "truncate_prompt_tokens": None if body.truncation is False else -1,
        }

        def ranked(answer: Any) -> dict[str, Any]:
            found = answer["results"]
            if body.sorted is False:
                found = sorted(found, key=lambda one: int(one["index"]))
            shows = body.return_documents is not False
            results = [
                {
                    "index": one["index"],
                    **({"document": body.documents[one["index"]]} if shows else {}),
                    "relevance_score": one["relevance_score"],
                }
                for one in found[: body.top_k]
            ]
            return {
                "results": results,
                "total_tokens": answer["usage"]["total_tokens"],
                "model": answer["model"],
            }

        with in_callers_words(_RERANKER):
            return await self.rerank.convert(server, fields, context, ranked)


async def refuse_other_vectors(server: ServerState, body: Any, context: RequestContext) -> Job:
    """Refuse sparse and ColBERT vectors. Raises InvalidRequest."""
    message = "No model here gives vectors of this kind; ask /v1/embeddings for dense ones."
    raise unsupported("input", message)


def _unchanged(answer: Any) -> Any:
    return answer


def _as_scores(answer: Any) -> dict[str, Any]:
    return {"object": "list", "score": [one["probs"] for one in answer["data"]]}
