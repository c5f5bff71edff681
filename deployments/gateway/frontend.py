"""The gateway's HTTP application: answers some requests itself and relays the rest.

/health, /healthz, /ping  the gateway runs
/ready                    each model has a replica, and the gateway is not being stopped
/v1/models and the like   the lists of all models
/autoscaling/explain      the autoscaling policy's last decisions
/, /docs, /playground/... the pages for browsers
/metrics, /load, /flush_cache, /abort_request, /health_generate   sent to every replica, merged
everything else           relayed to the model that the request names
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.configs.errors import Unavailable
from remora.configs.schema import ServeConfig
from remora.deployments.autoscaling.routes import EXPLAIN, explanations
from remora.deployments.gateway.carrier import Incoming
from remora.deployments.gateway.client_side import ClientSide
from remora.deployments.gateway.crashes import fingerprint
from remora.deployments.gateway.merge import EVERYWHERE, LISTS, WholeAnswer, merge, merge_lists
from remora.deployments.gateway.metrics import GatewayMetrics
from remora.deployments.gateway.model import GatewayModel
from remora.deployments.gateway.model_choice import choose_model, wants_stream
from remora.deployments.gateway.relayed_request import plain_scope
from remora.deployments.gateway.shutdown import GatewayShutdown
from remora.deployments.gateway.wait_queue import Phase
from remora.deployments.http.batches.upload import (
    MAX_PARALLEL_UPLOADS,
    MAX_UPLOAD_BYTES,
    UPLOAD_TIMEOUT_S,
)
from remora.deployments.http.core.auth import (
    OPEN_PATHS,
    PING,
    RTP_PROBES,
    Access,
    Gate,
    open_methods,
    require_operator,
)
from remora.deployments.http.core.body_limits import limit
from remora.deployments.http.core.edge import Edge
from remora.deployments.http.core.errors import log_error
from remora.deployments.http.core.sse import while_connected
from remora.deployments.http.core.wire import JSONAnswer, parsed, read_bytes, route_path
from remora.deployments.http.core.wire_formats import Dialect, dialect_of
from remora.deployments.http.integration.cors import cors_middlewares
from remora.deployments.http.integration.short_paths import ShortPaths
from remora.deployments.http.invocations import INVOCATIONS
from remora.deployments.http.playground.page import Playground
from remora.deployments.http.shared_paths import dialect_at_root, dialect_of_body

log = logging.getLogger(__name__)

_UPLOADS = "/v1/files"
# Sent to every replica, some without authorisation, so their bodies are not read.
_WITHOUT_BODY = EVERYWHERE - {"/abort_request"}
_OWN_HEADERS = frozenset({"content-length", "openai-processing-ms"})


def build_front(
    models: Mapping[str, GatewayModel],
    config: Callable[[], ServeConfig],
    access: Callable[[], Access],
    metrics: GatewayMetrics,
    shutdown: GatewayShutdown,
) -> ASGIApp:
    """Return the application.

    config:  returns the configuration whose `api` and `limits` apply now
    access:  returns the access rules that apply now
    """
    guarded = Gate(_Front(models, config, metrics, shutdown), access=access)
    edge = Edge(
        Playground(guarded, settings=lambda: config().api),
        limits=lambda: config().limits,
        dialect_of=partial(dialect_of, generate=config().api.generate_dialect),
        echo_request_id=False,
        count=metrics.count_response,
        count_refusal=metrics.count_refusal,
    )
    outer: ASGIApp = ShortPaths(edge)
    for middleware in cors_middlewares(config().api.cors):
        outer = middleware.cls(outer, *middleware.args, **middleware.kwargs)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        elif scope["type"] == "http":
            await outer(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadRequest:
    """A request that has been read."""

    request: Request
    path: str
    body: bytes
    value: Any  # the body, parsed; None if it is not JSON
    dialect: Dialect


class _Front:
    """The application within access checks and limits."""

    def __init__(
        self,
        models: Mapping[str, GatewayModel],
        config: Callable[[], ServeConfig],
        metrics: GatewayMetrics,
        shutdown: GatewayShutdown,
    ) -> None:
        self._models = models
        self._config = config
        self._metrics = metrics
        self._shutdown = shutdown
        self._uploading = asyncio.Semaphore(MAX_PARALLEL_UPLOADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        path = route_path(scope)
        if path in OPEN_PATHS and scope["method"] not in open_methods(path):
            raise HTTPException(405, headers={"allow": ", ".join(open_methods(path))})
        if path in ("/health", "/healthz", PING):
            await Response()(scope, receive, send)
            return
        if path == "/ready":
            await self._check_ready()
            await Response()(scope, receive, send)
            return
        if path in RTP_PROBES:
            await self._check_ready()
            await JSONAnswer("ok")(scope, receive, send)
            return
        request = Request(scope, receive)
        read = await self._read(request, path)
        if path in LISTS and scope["method"] in ("GET", "HEAD"):
            models = await while_connected(request, self._list(read))
            await JSONAnswer(models)(scope, receive, send)
        elif path in EVERYWHERE:
            answer = await while_connected(request, self._ask_all_replicas(read))
            await answer(scope, receive, send)
        elif path == EXPLAIN and scope["method"] == "GET":
            await require_operator(request)
            deciding = {n: m.handle if m.is_autoscaled else None for n, m in self._models.items()}
            await JSONAnswer(await explanations(deciding))(scope, receive, send)
        else:
            await while_connected(request, self._carry(read, send))

    async def _read(self, request: Request, path: str) -> _ReadRequest:
        api, body, value = self._config().api, b"", None
        is_upload = path == _UPLOADS and request.method == "POST" and api.batch_dir is not None
        if is_upload:
            async with self._uploading:
                body = await read_bytes(request, MAX_UPLOAD_BYTES, UPLOAD_TIMEOUT_S)
        elif path not in _WITHOUT_BODY:
            body = await read_bytes(request, api.max_body_bytes, limit("body_timeout_s"))
        if not is_upload:
            value = await parsed(body)
        if path == INVOCATIONS or (path == "/generate" and api.generate_dialect == "auto"):
            request.state.dialect = dialect_of_body(value)
        elif path == "/":
            request.state.dialect = dialect_at_root(value) or request.state.dialect
        return _ReadRequest(
            request=request, path=path, body=body, value=value, dialect=request.state.dialect
        )

    async def _carry(self, read: _ReadRequest, send: Send) -> None:
        scope, request_id = read.request.scope, read.request.state.request_id
        query, stall_s = scope["query_string"].decode("latin-1"), limit("stream_timeout_s")
        model = self._models[choose_model(tuple(self._models), read.path, query, read.value)]
        incoming = Incoming(
            request_id=request_id,
            scope=plain_scope(scope, request_id),
            body=read.body,
            key=await model.key_of(
                read.path, read.request.headers, read.value, read.request.state.owner
            ),
            fingerprint=fingerprint(read.path, read.body),
        )
        streams = wants_stream(read.path, read.dialect, read.value)
        client = ClientSide(send, read.dialect, streams=streams, stall_s=stall_s)
        try:
            await self._answer(model, incoming, client)
        except TimeoutError:
            log.warning(
                "gateway: closed a client that read nothing for %g s; request_id=%s",
                stall_s,
                request_id,
            )
            self._metrics.count_refusal("stream_timeout_s")

    async def _answer(self, model: GatewayModel, incoming: Incoming, client: ClientSide) -> None:
        """Relay a request; an error after the stream has begun is its last event."""
        try:
            await self._shutdown.before(model.carrier.carry(incoming, client))
        except TimeoutError:
            raise
        except Exception as error:
            # A boundary: once the stream has begun, only an event can carry the error.
            if not client.can_fail_late:
                raise
            log_error(error, incoming.request_id)
            self._metrics.count_late_failure()
            await client.fail(error)

    async def _check_ready(self) -> None:
        self._shutdown.check()
        for name, model in self._models.items():
            if await model.carrier.wait_queue.phase() is not Phase.READY:
                raise Unavailable(f"The model {name!r} has no replica that is ready.")

    async def _list(self, read: _ReadRequest) -> dict[str, Any]:
        scope = self._plain(read)
        bodies = [await model.listing(read.path, scope) for model in self._models.values()]
        return merge_lists(LISTS[read.path], [body for body in bodies if body is not None])

    async def _ask_all_replicas(self, read: _ReadRequest) -> Response:
        scope = self._plain(read)
        several = await asyncio.gather(
            *(model.ask_all(scope, read.body) for model in self._models.values())
        )
        answers = [answer for some in several for answer in some]
        if read.path == "/metrics":
            own = WholeAnswer("", 200, (("content-type", "text/plain"),), self._metrics.render())
            answers = [answer for answer in answers if answer.status == 200] + [own]
        if not answers:
            raise Unavailable("No model has a replica.")
        answer = merge(read.path, answers)
        headers = {name: value for name, value in answer.headers if name not in _OWN_HEADERS}
        return Response(answer.body, answer.status, headers)

    def _plain(self, read: _ReadRequest) -> Mapping[str, Any]:
        """Return the scope for replicas, which accept HEAD at few paths."""
        scope = plain_scope(read.request.scope, read.request.state.request_id)
        return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
