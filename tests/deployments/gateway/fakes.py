"""Replicas of scripted engines behind a gateway, in one process: real sockets, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from ray.exceptions import ActorDiedError
from starlette.datastructures import Headers

from remora.deployments.gateway.carrier import Carrier
from remora.deployments.gateway.crashes import CrashCounts
from remora.deployments.gateway.frontend import build_front
from remora.deployments.gateway.merge import WholeAnswer
from remora.deployments.gateway.metrics import GatewayMetrics
from remora.deployments.gateway.model import GatewayModel
from remora.deployments.gateway.relay import Relay
from remora.deployments.gateway.relayed_request import RelayedRequest
from remora.deployments.gateway.shutdown import GatewayShutdown
from remora.deployments.gateway.tunnel import Tunnel
from remora.deployments.gateway.wait_queue import Phase, WaitQueue
from remora.deployments.http.core.auth import Access
from remora.deployments.routing.key import RouteKey
from remora.engine.types import Output, Request, SequenceOutput
from tests.deployments.fakes import FakeEngine, FakeServer, make_server_config, share_app

NODE = "here"


class Replica:
    """A replica of a scripted engine; `kill` ends it abruptly, like kill -9.

    seen:          the route of each request it received
    num_failures:  of its engine, after which it was repaired
    """

    def __init__(self, name: str, server: FakeServer | None = None, *, node_id: str = NODE) -> None:
        self.name = name
        self.server = server or FakeServer()
        self.seen: list[RouteKey] = []
        self._dead = asyncio.Event()
        self.num_failures = 0
        self.relay = Relay(
            lambda: share_app(self.server),
            self.server.client.check_health,
            num_failures=lambda: self.num_failures,
            own_ids=lambda: (node_id, name),
        )

    def kill(self) -> None:
        self._dead.set()

    async def answer(self, call: RelayedRequest, route: RouteKey) -> None:
        self.seen.append(route)
        work = asyncio.ensure_future(self.relay.answer(call))
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise ActorDiedError
            await work
        finally:
            work.cancel()
            death.cancel()
            await asyncio.gather(work, death, return_exceptions=True)


@dataclass
class Replicas:
    """A fake deployment handle: sends each call to the first replica that the route allows.

    open:  calls that have not ended
    """

    all: Sequence[Replica]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None
    open: set[asyncio.Future[None]] = field(default_factory=set)

    def remote(self, call: RelayedRequest, *, route: RouteKey) -> _Response:
        response = _Response(self._answer(call, route))
        self.open.add(response.task)
        response.task.add_done_callback(self.open.discard)
        return response

    async def _answer(self, call: RelayedRequest, route: RouteKey) -> None:
        await self.ready.wait()
        if self.error is not None:
            raise self.error
        may = [replica for replica in self.all if replica.name not in route.avoid]
        await (may or self.all)[0].answer(call, route)

    async def phase(self) -> Phase:
        return Phase.READY if self.ready.is_set() else Phase.LOADING


class _Response:
    def __init__(self, work: Any) -> None:
        self.task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self.task.__await__()

    def cancel(self) -> None:
        self.task.cancel()


class FakeModel:
    """A model as the gateway's front end uses it."""

    def __init__(self, name: str, carrier: Carrier, replicas: Replicas) -> None:
        self.name = name
        self.carrier = carrier
        self._replicas = replicas

    async def key_of(self, _path: str, _headers: Headers, _body: Any, _owner: str) -> RouteKey:
        return RouteKey()

    async def listing(self, path: str, scope: Mapping[str, Any]) -> bytes | None:
        return (await self.ask_all(scope, b""))[0].body

    async def ask_all(self, scope: Mapping[str, Any], body: bytes) -> list[WholeAnswer]:
        return [await replica.relay.whole(scope, body) for replica in self._replicas.all]


@asynccontextmanager
async def gateway(
    *models: Replicas,
    access: Access | None = None,
    max_held: int = 8,
    max_crashes: int = 2,
    resumes: bool = False,
    is_stopping: Callable[[], bool] | None = None,
    drain_s: float = 0.0,
    **sections: Any,
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Serve models named a, b, ... behind a gateway; yield its client.

    sections:  of the configuration
    """
    tunnel = Tunnel(node_id=NODE, host="127.0.0.1")
    await tunnel.open()
    metrics = GatewayMetrics()
    found: dict[str, Any] = {}
    for name, replicas in zip("abc", models, strict=False):
        room = WaitQueue(
            replicas.phase, max_held=max_held, max_wait_s=5.0, patience_s=0.05, look_s=0.01
        )
        crashes = CrashCounts(max_crashes=max_crashes)
        ledger = metrics.failures(name)
        carrier = Carrier(replicas, tunnel, room, crashes, ledger, resumes=resumes)
        found[name] = FakeModel(name, carrier, replicas)
    config = make_server_config(**sections)
    ending = GatewayShutdown(is_stopping, drain_s)
    who = access or Access(is_local=True)
    front = build_front(found, lambda: config, lambda: who, metrics, ending)
    transport = httpx.ASGITransport(app=front, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
    finally:
        tunnel.close()


def ready(*replicas: Replica, error: BaseException | None = None) -> Replicas:
    """Return replicas that accept requests at once."""
    model = Replicas(replicas, error=error)
    model.ready.set()
    return model


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def begin(
    client: httpx.AsyncClient, replica: Replica, **fields: Any
) -> asyncio.Task[httpx.Response]:
    """Send a completion, and wait until the replica runs it."""
    body = {"prompt": "x", **fields}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: replica.server.client.running)
    return asking


async def no_key(*_request: Any) -> RouteKey:
    return RouteKey()


def make_model(handle: Any, **routing: Any) -> GatewayModel:
    """Return the gateway's own model, over a fake handle."""
    tunnel: Any = None
    config = make_server_config(routing=routing)
    return GatewayModel("a", handle, config, tunnel, GatewayMetrics(), key_of=no_key)


class ResumingEngine(FakeEngine):
    """Continues another replica's reply, as the real client does; hangs at output `stop_at`."""

    stop_at: int | None = None

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        resumption = request.resumption
        given = () if resumption is None else resumption.given
        for number, output in enumerate(self._outputs(request)):
            if number == self.stop_at:
                await asyncio.Event().wait()
            if resumption is not None and number >= len(given):
                event = SequenceOutput(
                    request_id=request.request_id,
                    index=0,
                    token_ids=output.token_ids,
                    finish_reason=output.finish_reason,
                )
                resumption.note([event])
            yield output
