"""Exports requests as OpenTelemetry spans, over OTLP.

Each request has one span, with children for queue, prefill and decode. A `traceparent` header (W3C)
joins the request to the caller's trace. Spans are made when the request ends, from times that are
recorded anyway; the exporter's thread sends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remora.configs.errors import ConfigError
from remora.deployments.observing.request_trace import RequestTrace

EXPORT_TIMEOUT_S = 5


class Spans:
    """Exports the spans of one replica. Raises ConfigError if the exporter is not installed.

    endpoint:  host:port of a gRPC collector; prefix https:// for TLS
    """

    is_on = True

    def __init__(self, endpoint: str, model: str, replica_id: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        resource = Resource({"service.name": "remora", "service.instance.id": replica_id})
        # Not the process's global provider, which Ray sets.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("remora")

    def begun(self, trace: RequestTrace) -> None:
        """Do nothing: spans are made when the request ends."""

    def ended(self, trace: RequestTrace) -> None:
        """Export the request's spans."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(trace.parent)
        at = _times(trace)
        whole = self._tracer.start_span(
            "llm_request",
            context,
            kind=SpanKind.SERVER,
            attributes=self._attributes(trace),
            start_time=at(0.0),
        )
        within = set_span_in_context(whole)
        first = trace.first_token_s
        if first is not None:
            queue = min(trace.queue_s or 0.0, first)
            ends = (("queued", 0.0, queue), ("prefill", queue, first))
            for name, start, end in (*ends, ("decode", first, trace.whole_s or first)):
                span = self._tracer.start_span(name, within, start_time=at(start))
                span.end(at(end))
        if trace.error is not None:
            whole.set_status(Status(StatusCode.ERROR, trace.error))
        whole.end(at(trace.whole_s or 0.0))

    def _attributes(self, trace: RequestTrace) -> dict[str, Any]:
        sequences = trace.sequences.values()
        sampling = trace.requests[0].sampling if trace.requests else None
        found = {
            "gen_ai.request.id": trace.rid,
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": sampling and sampling.max_tokens,
            "gen_ai.request.temperature": sampling and sampling.temperature,
            "gen_ai.request.top_p": sampling and sampling.top_p,
            "gen_ai.request.n": sum(request.sampling.n for request in trace.requests),
            "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
            "gen_ai.usage.output_tokens": trace.num_output_tokens,
            "gen_ai.response.finish_reasons": [s.finish_reason or "none" for s in sequences],
            "gen_ai.latency.time_in_queue": trace.queue_s,
            "gen_ai.latency.time_to_first_token": trace.first_token_s,
            "gen_ai.latency.e2e": trace.whole_s,
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Send the remaining spans and stop."""
        self._provider.shutdown()


def _times(trace: RequestTrace) -> Callable[[float], int]:
    """Return a function from seconds of the request to nanoseconds since 1970."""
    return lambda seconds: int((trace.started_at + seconds) * 1e9)


def _exporter(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "metrics.trace_endpoint needs the package opentelemetry-exporter-otlp-proto-grpc: "
            "pip install 'remora[otel]'"
        ) from None
    is_insecure = not endpoint.startswith("https://")
    return OTLPSpanExporter(endpoint=endpoint, insecure=is_insecure, timeout=EXPORT_TIMEOUT_S)
