"""The load of a replica in response headers, as ORCA (Open Request Cost Aggregation) defines it.

A load balancer such as Envoy asks with `endpoint-load-metrics-format: TEXT`, `JSON` or `BIN`, and
reads `endpoint-load-metrics`, whose value begins with the format. The names of the metrics are
those of vLLM. Any other format is answered without a report.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remora.engine.types import EngineStats

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
# Of `xds.data.orca.v3.OrcaLoadReport`: field 8 is `map<string, double> named_metrics`, whose
# entries have the key as field 1 and the value as field 2.
_NAMED_METRICS, _KEY, _VALUE = b"\x42", b"\x0a", b"\x11"


def named_metrics(stats: EngineStats) -> Mapping[str, float]:
    """Return the metrics of a report."""
    return {
        "kv_cache_usage_perc": stats.kv_usage,
        "num_requests_waiting": stats.num_waiting,
        "num_requests_running": stats.num_running,
    }


def _as_text(metrics: Mapping[str, float]) -> str:
    return ",".join(f"named_metrics.{name}={value}" for name, value in metrics.items())


def _as_json(metrics: Mapping[str, float]) -> str:
    return json.dumps({"named_metrics": dict(metrics)})


def _as_binary(metrics: Mapping[str, float]) -> str:
    """Return the protocol buffer as base64. Names have less than 100 bytes, so lengths fit."""
    report = b""
    for name, value in metrics.items():
        entry = _KEY + bytes([len(name)]) + name.encode() + _VALUE + struct.pack("<d", value)
        report += _NAMED_METRICS + bytes([len(entry)]) + entry
    return base64.b64encode(report).decode()


FORMATS: Mapping[str, Callable[[Mapping[str, float]], str]] = MappingProxyType(
    {"TEXT": _as_text, "JSON": _as_json, "BIN": _as_binary}
)


class LoadReport:
    """ASGI middleware that adds the report to the answers of requests that ask for it.

    stats:  returns the engine's counters
    """

    def __init__(self, app: ASGIApp, *, stats: Callable[[], EngineStats]) -> None:
        self._app = app
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        wanted = Headers(scope=scope).get(FORMAT_HEADER) if scope["type"] == "http" else None
        kind = (wanted or "").strip().upper()
        write = FORMATS.get(kind)
        if write is None:
            await self._app(scope, receive, send)
            return

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                report = write(named_metrics(self._stats()))
                MutableHeaders(scope=message)[REPORT_HEADER] = f"{kind} {report}"
            await send(message)

        await self._app(scope, receive, send_on)
