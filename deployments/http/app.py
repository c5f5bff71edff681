"""The FastAPI application of one replica, on top of a running engine.

Three tables define its routes: GENERATION has a row for each path that generates text, ROUTERS
has a function for each other family of routes, and BODIES describes the bodies of that family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Match

from remora.configs.errors import InvalidRequest, RemoraError
from remora.deployments.autoscaling.routes import autoscaling_routes
from remora.deployments.http.admin import server as ops
from remora.deployments.http.admin.lora_routes import LORA_BODIES, lora_routes
from remora.deployments.http.admin.pausing import PAUSE_BODIES, pause_routes
from remora.deployments.http.admin.routes import (
    control_routes,
    health_routes,
    information_routes,
)
from remora.deployments.http.anthropic.bodies import CountTokensBody, MessagesBody
from remora.deployments.http.anthropic.messages import anthropic_routes
from remora.deployments.http.anthropic.models import model_routes
from remora.deployments.http.api_docs.openapi import describe_operations
from remora.deployments.http.batches.message_batches import MessageBatchBody
from remora.deployments.http.batches.routes import BatchBody, batch_routes
from remora.deployments.http.cohere.chat_bodies import CohereChatBody
from remora.deployments.http.cohere.embed import CohereEmbedBody
from remora.deployments.http.core.auth import Access, Gate
from remora.deployments.http.core.edge import Edge, error_answer, refused
from remora.deployments.http.core.errors import log_error
from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.wire_formats import ANTHROPIC, Dialect, dialect_of
from remora.deployments.http.endpoints import (
    ANY_RERANK,
    CHAT,
    CHAT_BATCH,
    CLASSIFY,
    COHERE_CHAT,
    COHERE_EMBED,
    COMPACT,
    COMPLETIONS,
    EMBEDDINGS,
    ENCODE,
    GENERATE_TOKENS,
    GENERATIVE_SCORING,
    MESSAGES,
    OLLAMA_ROUTES,
    POOLING,
    RESPONSES,
    RTP_ROUTES,
    SCORE,
    TEI_ROUTES,
    V1_RERANK,
    V2_RERANK,
)
from remora.deployments.http.generation.bodies import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from remora.deployments.http.generation.routes import Route, generation_routes
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.integration.cors import cors_middlewares
from remora.deployments.http.integration.load_report import LoadReport
from remora.deployments.http.integration.short_paths import ShortPaths
from remora.deployments.http.invocations import INVOCATIONS, invocation_routes
from remora.deployments.http.llamacpp.generate import LLAMA_ROUTES
from remora.deployments.http.llamacpp.routes import LLAMA_BODIES, llama_routes
from remora.deployments.http.ollama.routes import OLLAMA_BODIES, ollama_routes
from remora.deployments.http.openai.stored_chats import MetadataBody, stored_chat_routes
from remora.deployments.http.playground.page import Playground
from remora.deployments.http.pooling.classify import ClassifyBody, EncodeBody, PoolingBody
from remora.deployments.http.pooling.embeddings import EmbeddingsBody, answer_vectors
from remora.deployments.http.pooling.rerank import PairScoreBody, RerankBody
from remora.deployments.http.responses.background import answer_response
from remora.deployments.http.responses.bodies import PromptBody, ResponsesBody
from remora.deployments.http.responses.compact import CompactBody
from remora.deployments.http.responses.routes import responses_routes
from remora.deployments.http.rtp_llm.routes import RTP_BODIES, rtp_routes
from remora.deployments.http.sglang.parse_routes import PARSE_BODIES, parse_routes
from remora.deployments.http.sglang.score import ScoreBody
from remora.deployments.http.shared_paths import (
    GENERATE_BODIES,
    generate_routes,
    token_routes,
)
from remora.deployments.http.vllm.scoring import GenerativeScoringBody
from remora.deployments.http.vllm.tokenizer import vllm_routes
from remora.deployments.http.vllm.tokens import GenerateTokensBody
from remora.deployments.http.weights.routes import WEIGHT_BODIES, weight_routes

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
GENERATION: tuple[Route, ...] = (
    Route("/v1/chat/completions", CHAT, ChatBody),
    Route("/v1/chat/completions/batch", CHAT_BATCH, ChatBatchBody),
    Route("/v1/completions", COMPLETIONS, CompletionBody),
    Route("/v1/responses", RESPONSES, ResponsesBody, answer=answer_response),
    Route("/v1/responses/compact", COMPACT, CompactBody),
    Route("/v1/messages", MESSAGES, MessagesBody),
    Route("/v1/score", SCORE, ScoreBody),
    Route("/v1/embeddings", EMBEDDINGS, EmbeddingsBody, answer=answer_vectors),
    Route("/v1/embeddings/dense", EMBEDDINGS, EmbeddingsBody, answer=answer_vectors),
    Route("/v1/rerank", V1_RERANK, RerankBody),
    Route("/v2/rerank", V2_RERANK, RerankBody),
    Route("/rerank", ANY_RERANK, RerankBody),
    Route("/v2/chat", COHERE_CHAT, CohereChatBody),
    Route("/v2/embed", COHERE_EMBED, CohereEmbedBody),
    Route("/score", SCORE, PairScoreBody),
    Route("/classify", CLASSIFY, ClassifyBody),
    Route("/v1/classify", CLASSIFY, ClassifyBody),
    Route("/pooling", POOLING, PoolingBody, answer=answer_vectors),
    Route("/encode", ENCODE, EncodeBody),
    Route("/inference/v1/generate", GENERATE_TOKENS, GenerateTokensBody),
    Route("/generative_scoring", GENERATIVE_SCORING, GenerativeScoringBody),
    *TEI_ROUTES,
    *LLAMA_ROUTES,
    *RTP_ROUTES,
)
ROUTERS: tuple[Callable[[ServerState], APIRouter], ...] = (
    model_routes,  # before the routes of OpenAI's API at the same paths
    token_routes,
    information_routes,
    health_routes,
    control_routes,
    pause_routes,
    autoscaling_routes,
    stored_chat_routes,
    responses_routes,
    anthropic_routes,
    generate_routes,
    invocation_routes,
    partial(ollama_routes, generation=OLLAMA_ROUTES),
    parse_routes,
    llama_routes,
    rtp_routes,
    vllm_routes,
    batch_routes,
    lora_routes,
    weight_routes,
)
BODIES: Mapping[str, type[Body]] = {
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    INVOCATIONS: ChatBody,
    "/abort_request": ops.AbortBody,
    "/start_profile": ops.ProfileBody,
    **PAUSE_BODIES,
    **GENERATE_BODIES,
    **{route.path: route.body for route in OLLAMA_ROUTES},
    **OLLAMA_BODIES,
    **PARSE_BODIES,
    **LLAMA_BODIES,
    **RTP_BODIES,
    **LORA_BODIES,
    **WEIGHT_BODIES,
    "/v1/chat/completions/{chat_id}": MetadataBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/responses/input_tokens": PromptBody,
    "/v1/batches": BatchBody,
    "/v1/messages/batches": MessageBatchBody,
}


def build_http_app(
    server: ServerState, *, access: Callable[[], Access], echo_request_id: bool = True
) -> FastAPI:
    """Return the application.

    access:           returns the current API keys and permissions
    echo_request_id:  False if a proxy in front already returns `x-request-id`
    """
    tenants = server.calls.tenants

    def limit_headers(tenant: str, dialect: Dialect) -> Mapping[str, str]:
        return tenants.headers(tenant, as_anthropic=dialect is ANTHROPIC)

    gate = Middleware(Gate, access=access, limit_headers=limit_headers)
    edge = Middleware(
        Edge,
        limits=lambda: server.config.limits,
        dialect_of=partial(dialect_of, generate=server.config.api.generate_dialect),
        echo_request_id=echo_request_id,
        count=server.metrics.count_response,
        count_refusal=server.metrics.count_refusal,
    )
    playground = Middleware(Playground, settings=lambda: server.config.api)
    load_report = Middleware(LoadReport, stats=server.client.stats)
    cors = cors_middlewares(server.config.api.cors)
    app = FastAPI(
        title="remora",
        summary=f"Serves {server.plan.served_model_name}",
        middleware=[*cors, Middleware(ShortPaths), edge, playground, gate, load_report],
        exception_handlers={
            RemoraError: _answer_error,
            HTTPException: _answer_error,
            RequestValidationError: _answer_error,
        },
        docs_url=None,  # a page of the playground
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(generation_routes(server, GENERATION))
    for make_router in ROUTERS:
        app.include_router(make_router(server))
    bodies = {route.path: route.body for route in GENERATION} | dict(BODIES)
    describe_operations(app, bodies, model=server.plan.served_model_name)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = _url_fault(error)
    if isinstance(error, HTTPException) and error.status_code == 405:
        error = HTTPException(405, error.detail, {"allow": ", ".join(_methods(request))})
    log_error(error, request.state.request_id)
    refused(request.scope, error)
    return error_answer(error, request.state.dialect, request.state.request_id)


def _url_fault(error: RequestValidationError) -> InvalidRequest:
    """Return the refusal of a malformed parameter of the URL, which names it."""
    fault = error.errors()[0]
    name = str(fault["loc"][-1])[:64]
    text = fault["msg"][:1].lower() + fault["msg"][1:200]
    return InvalidRequest(f"The URL's parameter {name}: {text}.", name)


def _methods(request: Request) -> list[str]:
    """Return the methods that the path of a request accepts; a single route knows only its own."""
    return [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
