"""Spans of requests, as a collector on this machine receives them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.observing.spans import Spans
from remora.deployments.observing.telemetry import Telemetry
from tests.deployments.fakes import FakeEngine, FakeServer, client_of, make_server_config
from tests.deployments.http.shared_app import share_http_app

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
grpc = pytest.importorskip("grpc")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector: its address, and what it has received."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    received: list[Any] = []

    class Collector(service.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    received.extend(scope.spans)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", received
    server.stop(0).wait()


async def ask(endpoint: str | None, engine: FakeEngine, **headers: str) -> None:
    config = make_server_config(metrics={"trace_endpoint": endpoint})
    server = ServerState.over(FakeServer(engine, config=config))
    telemetry = Telemetry(server, "r1")
    app = share_http_app(server, access=lambda: Access(is_local=True))
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "rid": "mine"}
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=body, headers=headers)
    await asyncio.to_thread(telemetry.close)
    await asyncio.sleep(0)


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.mark.observes("metrics.trace_endpoint")
async def test_a_collector_receives_the_spans_of_a_request(
    collector: tuple[str, list[Any]],
) -> None:
    endpoint, received = collector
    parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    await ask(endpoint, FakeEngine(text="abc"), traceparent=parent)

    spans = {span.name: span for span in received}
    whole = spans["llm_request"]
    assert spans.keys() == {"llm_request", "queued", "prefill", "decode"}
    assert {span.trace_id.hex() for span in received} == {TRACE_ID}
    assert whole.parent_span_id.hex() == PARENT_ID
    assert {spans[name].parent_span_id for name in ("queued", "prefill", "decode")} == {
        whole.span_id
    }
    parts = [spans[name] for name in ("queued", "prefill", "decode")]
    assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
    assert parts[2].end_time_unix_nano == whole.end_time_unix_nano
    assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in pairwise(parts))
    found = attributes(whole)
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.id"] == "mine"


async def test_a_request_that_fails_is_a_span_with_an_error(
    collector: tuple[str, list[Any]],
) -> None:
    endpoint, received = collector
    await ask(endpoint, FakeEngine(error=RuntimeError("x")))

    (span,) = received
    assert (span.name, span.status.message, span.parent_span_id) == ("llm_request", "error", b"")


async def test_without_an_endpoint_nothing_is_sent(collector: tuple[str, list[Any]]) -> None:
    await ask(None, FakeEngine())
    assert collector[1] == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"remora\[otel\]"):
        Spans("localhost:4317", "tiny", "r")
