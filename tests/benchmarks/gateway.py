"""What stands before a replica costs: nothing, a routing service, a gateway, a handle.

    python tests/benchmarks/gateway.py [--proxy python haproxy]

No model: a replica that says small events as fast as it can, in the same application each time.
Short answers show what a request costs, long ones what an event does as part of many, paced ones
what it does when it comes alone, as a model's tokens do. Processor time is that of all processes
but the client. Figures of one run can be compared with each other, and with nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.configs.schema import ServeConfig
from remora.deployments.cli.haproxy.choice import HAPROXY_SWITCH, haproxy_environment
from remora.deployments.cli.haproxy.program import install_haproxy_program
from remora.deployments.free_ports import free_port
from remora.deployments.gateway.gateway import Gateway
from remora.deployments.gateway.relay import Relay
from remora.deployments.gateway.relayed_request import RelayedRequest
from remora.deployments.ray_private import with_routing_service
from remora.deployments.routing.haproxy_hook import haproxy_asks
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.options import routing_options
from remora.deployments.routing.routing_service import RoutingService

# Events of an answer, milliseconds between them, and how many answers are asked for.
SHORT, LONG, PACED = (128, 0, 64), (4096, 0, 16), (256, 10, 32)
EVENT = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"text":" one"}]}\n\n'
CONCURRENCY = (1, 8, 32)
BODY = b'{"model":"stub","prompt":"x","stream":true}'


def wanted(scope: Scope) -> tuple[int, int]:
    """Return how many events are asked for, and how far apart: the end of the path."""
    *_, number, pause_ms = scope["path"].split("/")
    return int(number), int(pause_ms)


async def events(number: int, pause_ms: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of one answer."""
    for _ in range(number):
        yield EVENT
        await asyncio.sleep(pause_ms / 1000)


async def answer(send: Send, source: AsyncGenerator[bytes, None]) -> None:
    """Send a stream as remora's handlers do, one message for each event."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async with aclosing(source):
        async for event in source:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _begin(scope: Scope, receive: Receive, send: Send) -> bool:
    """Answer what Serve itself asks; return whether this is a request."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
    return bool(scope["type"] == "http")


async def stub_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the events."""
    if await _begin(scope, receive, send):
        await answer(send, events(*wanted(scope)))


class Stub:
    """A replica: the ingress itself, behind a gateway, or behind a handle."""

    def __init__(self) -> None:
        self._relay = Relay(lambda: stub_app, lambda: None)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        return stub_app

    async def relay(self, call: RelayedRequest, route: RouteKey | None = None) -> None:
        """Answer a gateway."""
        await self._relay.answer(call)

    async def events(self, number: int, pause_ms: int) -> AsyncGenerator[bytes, None]:
        """Answer a handle."""
        async for event in events(number, pause_ms):
            yield event


class Hop:
    """An ingress that passes on what a handle streams."""

    def __init__(self, stub: Any) -> None:
        self._method = stub.options(method_name="events", stream=True)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if await _begin(scope, receive, send):
                await answer(send, self._chunks(*wanted(scope)))

        return app

    async def _chunks(self, number: int, pause_ms: int) -> AsyncGenerator[bytes, None]:
        async for event in self._method.remote(number, pause_ms):
            yield event


async def ask(port: int, way: str, number: int, pause_ms: int) -> tuple[float, int]:
    """Return the seconds to the first byte of a body, and how many events came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /{way}/{number}/{pause_ms} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + BODY)
    received = await reader.readuntil(b"data:")
    first_s = time.perf_counter() - started
    received += await reader.read()
    writer.close()
    return first_s, received.count(b"data:")


class Figures(NamedTuple):
    """Events a second, the median of seconds to the first byte, and processor seconds an event."""

    rate: float
    first_s: float
    cpu_s: float


def cpu_s() -> float:
    """Return the processor time that all servers have used so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def measure(
    port: int, way: str, concurrency: int, number: int, pause_ms: int, num_requests: int
) -> Figures:
    """Ask for so many answers, so many at a time."""
    room = asyncio.Semaphore(concurrency)

    async def one() -> tuple[float, int]:
        async with room:
            return await ask(port, way, number, pause_ms)

    await asyncio.gather(*(one() for _ in range(concurrency)))
    cpu_before_s, started = cpu_s(), time.perf_counter()
    found = await asyncio.gather(*(one() for _ in range(num_requests)))
    total_s = time.perf_counter() - started
    used_s = cpu_s() - cpu_before_s
    assert all(num == number for _, num in found), "events are missing"
    total = num_requests * number
    first_s = statistics.median(first for first, _ in found)
    return Figures(total / total_s, first_s, used_s / total)


async def until_there(port: int, ways: list[str]) -> None:
    """Wait until HAProxy goes to the replicas: Serve's Python proxy answers in its place before."""
    for _ in range(20):
        for way in ways:
            await ask(port, way, 1, 0)
        await asyncio.sleep(0.25)


def run(port: int) -> None:
    """Deploy all ways and measure them in turn, twice; the better figures count."""
    import ray
    from ray import serve

    ray.init(
        address="local",
        namespace="serve",
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"max_ongoing_requests": 1000}
        light = options | {"ray_actor_options": {"num_cpus": 0}}
        stub = serve.deployment(Stub).options(**options)
        args = {"model": {"path": "stub"}}
        gateway = serve.deployment(serve.ingress()(Gateway)).options(**light)
        hop = serve.deployment(serve.ingress()(Hop)).options(**light)
        direct = serve.deployment(serve.ingress()(Stub)).options(**options)
        serve.run(direct.bind(), name="direct", route_prefix="/direct")
        serve.run(gateway.bind(args, {"stub": stub.bind()}), name="g", route_prefix="/gateway")
        serve.run(hop.bind(stub.bind()), name="h", route_prefix="/handle")
        ways = ["direct", "gateway", "handle"]
        if os.environ[HAPROXY_SWITCH] == "1" and haproxy_asks():
            ways.insert(1, "routed")
            chosen = args | {"routing": {"policy": "shortest_queue"}}
            config = ServeConfig.model_validate(chosen)
            replica = direct.options(**routing_options(config, has_routing_service=True)).bind()
            service = serve.deployment(serve.ingress()(RoutingService)).options(**light)
            application = with_routing_service(replica, service.bind(chosen, replica))
            serve.run(application, name="c", route_prefix="/routed")
        asyncio.run(until_there(port, ways))
        for size in (SHORT, LONG, PACED):
            # A handle would take minutes for long answers, and is no faster there.
            measured = ways if size == SHORT else ways[:-1]
            for concurrency in CONCURRENCY if size != PACED else CONCURRENCY[-1:]:
                runs = [
                    {way: asyncio.run(measure(port, way, concurrency, *size)) for way in measured}
                    for _ in range(2)
                ]
                best = {way: max(run[way] for run in runs) for way in measured}
                report("paced" if size == PACED else f"{size[0]:,}", concurrency, best)
    finally:
        serve.shutdown()
        ray.shutdown()


def report(name: str, concurrency: int, found: dict[str, Figures]) -> None:
    """Write a row for each way."""
    base = found["direct"]
    for way, figures in found.items():
        sys.stdout.write(
            f"| {name} | {concurrency} | {way} |"
            f" {figures.rate:,.0f} | {figures.rate / base.rate:.2f} |"
            f" {figures.first_s * 1000:.1f} | {figures.first_s / base.first_s:.1f} |"
            f" {figures.cpu_s * 1e6:.0f} | {figures.cpu_s / base.cpu_s:.1f} |\n"
        )
    sys.stdout.flush()


def main() -> None:
    """Measure under each proxy, each in a process of its own: Serve reads its environment once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", nargs="+", default=["python", "haproxy"])
    parser.add_argument("--here", action="store_true", help="what the processes are started with")
    options = parser.parse_args()
    if options.here:
        port = free_port()
        run(port)
        return
    for proxy in options.proxy:
        sys.stdout.write(
            f"\n{proxy}\n\n| events | streams | way | events/s | of direct | first, ms | "
        )
        sys.stdout.write("of direct | CPU, us an event | of direct |\n" + "|---" * 9 + "|\n")
        sys.stdout.flush()
        with tempfile.TemporaryDirectory(prefix="remora-", dir="/tmp") as name:
            folder = Path(name)
            is_on = proxy == "haproxy"
            extra = dict(haproxy_environment(folder)) if is_on else {}
            if is_on:
                install_haproxy_program(folder, host="127.0.0.1", body_timeout_s=30)
            common = {
                HAPROXY_SWITCH: str(int(is_on)),
                "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            }
            environment = os.environ | common | extra
            subprocess.run([sys.executable, __file__, "--here"], env=environment, check=True)


if __name__ == "__main__":
    main()
