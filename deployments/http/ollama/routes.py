"""Ollama's routes under /api."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.core.wire_formats import OLLAMA
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.routes import Route, generation_routes, read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama import info as ollama_info
from remora.deployments.http.ollama.bodies import (
    EmbedBody,
    EmbedPromptBody,
    OllamaChatBody,
    OllamaGenerateBody,
    PullBody,
    ShowBody,
)
from remora.deployments.http.ollama.embed import Embedder
from remora.deployments.http.ollama.generate import prepare_ollama_chat, prepare_ollama_generate

OLLAMA_CHAT = Endpoint(partial(parse, OllamaChatBody), prepare_ollama_chat)
OLLAMA_GENERATE = Endpoint(
    partial(parse, OllamaGenerateBody), prepare_ollama_generate, kind="completion"
)

# Bodies of the paths that `ollama_generation` does not cover, for the OpenAPI description.
OLLAMA_BODIES: Mapping[str, type[Body]] = {"/api/show": ShowBody, "/api/pull": PullBody}


def ollama_generation(embeddings: Endpoint[Any]) -> tuple[Route, ...]:
    """Return the paths that use the engine; `embeddings` is the endpoint of /v1/embeddings."""
    embedder = Embedder(embeddings)
    embed = Endpoint(partial(parse, EmbedBody), embedder.prepare, kind="pooling")
    embed_prompt = Endpoint(
        partial(parse, EmbedPromptBody), embedder.prepare_prompt, kind="pooling"
    )
    return (
        Route("/api/chat", OLLAMA_CHAT, OllamaChatBody),
        Route("/api/generate", OLLAMA_GENERATE, OllamaGenerateBody),
        Route("/api/embed", embed, EmbedBody),
        Route("/api/embeddings", embed_prompt, EmbedPromptBody),
    )


def ollama_routes(server: ServerState, generation: Iterable[Route]) -> APIRouter:
    """Return the router of all paths; `generation` is the result of `ollama_generation`."""
    router = generation_routes(server, generation)

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def alive() -> Response:
        return PlainTextResponse("remora is running")

    @router.get("/api/tags")
    async def tags() -> Response:
        return JSONAnswer(ollama_info.tags(server))

    @router.get("/api/ps")
    async def running() -> Response:
        return JSONAnswer(ollama_info.running(server))

    @router.get("/api/version")
    async def server_version() -> Response:
        return JSONAnswer(ollama_info.server_version())

    @router.post("/api/show")
    async def show(request: Request) -> Response:
        body = parse(ShowBody, await read_body(server, request))
        headers = server.report_ignored(body)
        return JSONAnswer(await ollama_info.show(server, body), headers=headers)

    @router.post("/api/pull")
    async def pull(request: Request) -> Response:
        body = parse(PullBody, await read_body(server, request))
        headers = server.report_ignored(body)
        steps = await ollama_info.pull(server, body)
        if body.stream is False:
            return JSONAnswer(steps[-1], headers=headers)
        lines = b"".join(map(OLLAMA.frame, steps))
        return Response(lines, media_type=OLLAMA.media_type, headers=headers)

    return router
