"""The table of RTP-LLM's own paths. / is shared, and so are its health checks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.routes import Route, read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.rtp_llm import info
from remora.deployments.http.rtp_llm.bodies import RtpBody, TokenizerEncodeBody
from remora.deployments.http.rtp_llm.generate import RTP_BATCH
from remora.deployments.http.rtp_llm.pooling_bodies import (
    RtpClassifierBody,
    RtpOtherVectorsBody,
    RtpRerankerBody,
    RtpSimilarityBody,
)
from remora.deployments.http.rtp_llm.pooling_jobs import RtpPooling, refuse_other_vectors

# Bodies of the paths that `rtp_generation` does not cover, for the OpenAPI description.
RTP_BODIES: Mapping[str, type[Body]] = {"/tokenizer/encode": TokenizerEncodeBody}


def rtp_generation(pooling: RtpPooling) -> tuple[Route, ...]:
    """Return the paths, each with the endpoint that prepares its jobs."""

    def pooled(model: type[Body], prepare: Any) -> Endpoint[Any]:
        return Endpoint(partial(parse, model), prepare, kind="pooling")

    similarity = pooled(RtpSimilarityBody, pooling.similarity)
    classifier = pooled(RtpClassifierBody, pooling.classifier)
    reranker = pooled(RtpRerankerBody, pooling.reranker)
    others = pooled(RtpOtherVectorsBody, refuse_other_vectors)
    return (
        Route("/batch_infer", RTP_BATCH, RtpBody),
        Route("/chat/render", info.RTP_RENDER, ChatBody),
        Route("/v1/chat/render", info.RTP_RENDER, ChatBody),
        Route("/v1/embeddings/sparse", others, RtpOtherVectorsBody),
        Route("/v1/embeddings/colbert", others, RtpOtherVectorsBody),
        Route("/v1/embeddings/similarity", similarity, RtpSimilarityBody),
        Route("/v1/classifier", classifier, RtpClassifierBody),
        Route("/v1/reranker", reranker, RtpRerankerBody),
    )


def rtp_routes(server: ServerState) -> APIRouter:
    """Return the router of the paths that need no engine."""
    router = APIRouter(tags=["information"])

    @router.post("/tokenizer/encode")
    async def tokenizer_encode(request: Request) -> Response:
        body = parse(TokenizerEncodeBody, await read_body(server, request))
        headers = server.report_ignored(body)
        return JSONAnswer(await info.tokenizer_encode(server, body), headers=headers)

    async def worker_status() -> Response:
        return JSONAnswer(info.worker_status(server))

    async def cache_status() -> Response:
        return JSONAnswer(info.cache_status(server))

    for path, handle in (("/worker_status", worker_status), ("/cache_status", cache_status)):
        for prefix in ("", "/rtp_llm"):
            for method in ("GET", "POST"):
                router.add_api_route(f"{prefix}{path}", handle, methods=[method])
    return router
