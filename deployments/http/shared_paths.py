"""Paths that several APIs share: /generate and / in three formats, /tokenize in two, their routes.

`api.generate_dialect` selects the API of /generate; by default it is detected from each body, as is
always that of /tokenize: llama.cpp's bodies have `content`. A body of / with a `prompt` and without
`inputs` is RTP-LLM's, whatever is configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from remora.deployments.http.admin import server as ops
from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.core.wire_formats import LLAMACPP, OPENAI, RTP_LLM, TGI, Dialect
from remora.deployments.http.endpoints import GENERATE
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.routes import Route, generation_routes, read_body
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.lightllm.bodies import LightBody, TokensBody, parse_light
from remora.deployments.http.lightllm.generate import count_tokens, prepare_light, token_load
from remora.deployments.http.llamacpp import info as llama_info
from remora.deployments.http.llamacpp.bodies import LlamaTokenizeBody
from remora.deployments.http.rtp_llm.bodies import RtpBody, is_rtp
from remora.deployments.http.rtp_llm.generate import RTP
from remora.deployments.http.sglang.bodies import PROMPT_FIELDS, GenerateBody, parse_generate
from remora.deployments.http.sglang.generate import prepare_generate
from remora.deployments.http.tei.info import tei_info
from remora.deployments.http.tgi.bodies import TgiBody, parse_tgi
from remora.deployments.http.tgi.generate import prepare_tgi
from remora.deployments.http.tgi.info import tgi_info


def _tgi(*, stream: bool | None, wraps: bool = False) -> Endpoint[TgiBody]:
    prepare = partial(_prepare_tgi, wraps=wraps)
    return Endpoint(partial(parse_tgi, stream=stream), prepare, kind="completion")


async def _prepare_tgi(
    server: ServerState, body: TgiBody, context: RequestContext, *, wraps: bool
) -> Job:
    return await prepare_tgi(server, body, context, wraps=wraps)


# TGI's answer to a body at a path of no single API.
TGI_ENDPOINT: Endpoint[TgiBody] = replace(_tgi(stream=None, wraps=True), dialect=lambda _: TGI)


def _light(*, stream: bool | None) -> Endpoint[LightBody]:
    return Endpoint(partial(parse_light, stream=stream), prepare_light, kind="completion")


def _or_rtp(other: Endpoint[Any]) -> Endpoint[Any]:
    """Return the endpoint of RTP-LLM's bodies and of another API's."""

    async def prepare_either(server: ServerState, body: Body, context: RequestContext) -> Job:
        endpoint: Endpoint[Any] = RTP if isinstance(body, RtpBody) else other
        return await endpoint.prepare(server, body, context)

    return Endpoint(
        lambda body: (RTP if is_rtp(body) else other).parse(body),
        prepare_either,
        dialect_at_root,
        kind="completion",
    )


def dialect_at_root(body: Any) -> Dialect | None:
    """Return the dialect of the response to a body of /; None = the configured one."""
    return RTP_LLM if is_rtp(body) else None


def _is_tgi(body: Any) -> bool:
    return isinstance(body, dict) and "inputs" in body and not PROMPT_FIELDS & body.keys()


def dialect_of_body(body: Any) -> Dialect:
    """Return the dialect of the response to a body of /generate when none is configured."""
    return TGI if _is_tgi(body) else OPENAI


def _parse_either(body: Any) -> Body:
    return parse_tgi(body, stream=False) if _is_tgi(body) else parse_generate(body)


async def _prepare_either(server: ServerState, body: Body, context: RequestContext) -> Job:
    if isinstance(body, TgiBody):
        return await prepare_tgi(server, body, context)
    assert isinstance(body, GenerateBody)
    return await prepare_generate(server, body, context)


_EITHER: Endpoint[Body] = Endpoint(
    _parse_either, _prepare_either, dialect_of_body, kind="completion"
)
_GENERATE: Mapping[str, Endpoint[Any]] = {
    "auto": _EITHER,
    "sglang": GENERATE,
    "tgi": _tgi(stream=False),
    "lightllm": _light(stream=False),
}


def text_routes(dialect: str) -> tuple[Route, ...]:
    """Return /generate, /generate_stream and / in the configured dialect."""
    is_light = dialect == "lightllm"
    root: Endpoint[Any] = _light(stream=None) if is_light else _tgi(stream=None, wraps=True)
    return (
        Route("/generate", _GENERATE[dialect], GenerateBody, ("GET", "POST", "PUT")),
        Route("/generate_stream", _light(stream=True) if is_light else _tgi(stream=True), TgiBody),
        Route("/", _or_rtp(root), TgiBody),
    )


def generate_routes(server: ServerState) -> APIRouter:
    """Return the router of these paths and of the information routes of their APIs."""
    router = generation_routes(server, text_routes(server.config.api.generate_dialect))
    router.include_router(_tgi_information(server))
    router.include_router(_light_information(server))
    return router


def token_routes(server: ServerState) -> APIRouter:
    """Return the routes that tokenize and detokenize."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(server, request)
        if not (isinstance(body, dict) and "content" in body):
            answer, headers = await ops.tokenize(server, body)
            return JSONAnswer(answer, headers=headers)
        request.state.dialect = LLAMACPP
        parsed = parse(LlamaTokenizeBody, body)
        ignored = server.report_ignored(parsed)
        return JSONAnswer(await llama_info.tokenize(server, parsed), headers=ignored)

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        answer, headers = await ops.detokenize(server, await read_body(server, request))
        return JSONAnswer(answer, headers=headers)

    return router


# Bodies of these paths, for the OpenAPI description.
GENERATE_BODIES: Mapping[str, type[Body]] = {
    "/generate": GenerateBody,
    "/generate_stream": TgiBody,
    "/": TgiBody,
    "/tokens": TokensBody,
}


def _tgi_information(server: ServerState) -> APIRouter:
    router = APIRouter(tags=["information"])

    @router.get("/info")
    async def info() -> Response:
        pooling = server.pooling
        return JSONAnswer(tgi_info(server) if pooling is None else tei_info(server, pooling.facts))

    return router


def _light_information(server: ServerState) -> APIRouter:
    router = APIRouter(tags=["information"])

    @router.get("/get_model_name")
    async def get_model_name() -> Response:
        return JSONAnswer({"model_name": server.plan.served_model_name})

    @router.get("/token_load")
    async def get_token_load() -> Response:
        return JSONAnswer(token_load(server))

    @router.get("/tokens")
    @router.post("/tokens")
    async def tokens(request: Request) -> Response:
        body = parse(TokensBody, await read_body(server, request))
        headers = server.report_ignored(body)
        return JSONAnswer(await count_tokens(server, body), headers=headers)

    return router
