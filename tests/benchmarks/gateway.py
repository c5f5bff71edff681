"""What a gateway costs: streams straight from the replica, through a gateway, and through a handle.

    python tests/benchmarks/gateway.py [--proxy python haproxy]

No model: a replica that says 128 small events as fast as it can, in the same application each time.
Figures of one run can be compared with each other, and with nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from remora.deployments.cli.haproxy import SWITCH, haproxy_environment, own_folder
from remora.deployments.gateway.call import Call
from remora.deployments.gateway.gateway import Gateway
from remora.deployments.gateway.relay import Relay
from remora.deployments.routing.key import RouteKey

NUM_EVENTS = 128
EVENT = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"text":" one"}]}\n\n'
CONCURRENCY = (1, 8, 32)
NUM_REQUESTS = 64
WAYS = ("direct", "gateway", "handle")
BODY = b'{"model":"stub","prompt":"x","stream":true}'


async def events() -> AsyncGenerator[bytes, None]:
    """Yield the events of one answer."""
    for _ in range(NUM_EVENTS):
        yield EVENT
        await asyncio.sleep(0)


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
        await answer(send, events())


class Stub:
    """A replica: the ingress itself, behind a gateway, or behind a handle."""

    def __init__(self) -> None:
        self._relay = Relay(lambda: stub_app, lambda: None)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        return stub_app

    async def relay(self, call: Call, route: RouteKey | None = None) -> None:
        """Answer a gateway."""
        await self._relay.answer(call)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Answer a handle."""
        async for event in events():
            yield event


class Hop:
    """An ingress that passes on what a handle streams."""

    def __init__(self, stub: Any) -> None:
        self._method = stub.options(method_name="events", stream=True)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if await _begin(scope, receive, send):
                await answer(send, self._chunks())

        return app

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        async for event in self._method.remote():
            yield event


async def ask(port: int, way: str) -> tuple[float, int]:
    """Return the seconds to the first byte of a body, and how many events came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /{way}/v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + BODY)
    received = await reader.readuntil(b"data:")
    first_s = time.perf_counter() - started
    received += await reader.read()
    writer.close()
    return first_s, received.count(b"data:")


async def measure(port: int, way: str, concurrency: int) -> tuple[float, float]:
    """Return events a second, and the median of seconds to the first byte."""
    room = asyncio.Semaphore(concurrency)

    async def one() -> tuple[float, int]:
        async with room:
            return await ask(port, way)

    await asyncio.gather(*(one() for _ in range(concurrency)))
    started = time.perf_counter()
    found = await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))
    total_s = time.perf_counter() - started
    assert all(num == NUM_EVENTS for _, num in found), "events are missing"
    return NUM_REQUESTS * NUM_EVENTS / total_s, statistics.median(first for first, _ in found)


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
        for concurrency in CONCURRENCY:
            runs = [
                {way: asyncio.run(measure(port, way, concurrency)) for way in WAYS}
                for _ in range(2)
            ]
            report(concurrency, {way: max(run[way] for run in runs) for way in WAYS})
    finally:
        serve.shutdown()
        ray.shutdown()


def report(concurrency: int, found: dict[str, tuple[float, float]]) -> None:
    """Write a row for each way."""
    base, base_first = found["direct"]
    for way, (rate, first_s) in found.items():
        sys.stdout.write(
            f"| {concurrency} | {way} | {rate:,.0f} | {rate / base:.2f} | {first_s * 1000:.1f} |"
            f" {first_s / base_first:.1f} |\n"
        )
    sys.stdout.flush()


def main() -> None:
    """Measure under each proxy, each in a process of its own: Serve reads its environment once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", nargs="+", default=["python", "haproxy"])
    parser.add_argument("--here", action="store_true", help="what the processes are started with")
    options = parser.parse_args()
    if options.here:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        run(port)
        return
    for proxy in options.proxy:
        sys.stdout.write(f"\n{proxy}\n\n| streams | way | events/s | of direct | first, ms | ")
        sys.stdout.write("of direct |\n|---|---|---|---|---|---|\n")
        sys.stdout.flush()
        with own_folder() as folder:
            is_on = proxy == "haproxy"
            extra = dict(haproxy_environment(folder)) if is_on else {}
            common = {SWITCH: str(int(is_on)), "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
            environment = os.environ | common | extra
            subprocess.run([sys.executable, __file__, "--here"], env=environment, check=True)


if __name__ == "__main__":
    main()
