"""Send workloads to an OpenAI-compatible server, and measure the responses.

Knows HTTP and workloads. Knows nothing of how the server was started.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from remora.deployments.bench.drafts import NOTE, DraftTotals, draft_figures
from remora.deployments.bench.http_client import Endpoint, Reply, exchange
from remora.deployments.bench.report.record import Result
from remora.deployments.bench.stats import Slo, Trace, figures_of
from remora.deployments.bench.workloads import (
    SCHEMA,
    Kind,
    Workload,
    chat_messages,
    token_prompts,
    word_prompts,
)
from remora.deployments.cli.terminal import Failure

TIMEOUT_S = 900.0
_PROBE = Workload(name="probe", num_requests=1, input_tokens=8, output_tokens=4)
_USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The request fields that a server accepts, found by probing it.

    takes_ids:  whether prompts may be token ids
    extras:     optional fields for every completion
    refusal:    its error for the request with all fields, if it refused that
    """

    takes_ids: bool
    extras: Mapping[str, Any]
    refusal: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report."""
        notes = []
        if not self.takes_ids:
            notes.append(f"the server refuses token ids ({self.refusal}): prompts are common words")
        if "ignore_eos" not in self.extras:
            notes.append("the server refuses ignore_eos: replies may end early")
        return tuple(notes)


class Server:
    """A running server. `open` probes its capabilities.

    has_drafts:  whether it reports speculative decoding
    """

    def __init__(
        self, endpoint: Endpoint, model: str, capabilities: Capabilities, *, has_drafts: bool
    ) -> None:
        self.endpoint = endpoint
        self.model = model
        self.capabilities = capabilities
        self.has_drafts = has_drafts

    @classmethod
    async def open(cls, endpoint: Endpoint, model: str | None) -> Server:
        """Find the model's name and the server's capabilities. Raises Failure."""
        name = model or await _first_model(endpoint)
        capabilities = await _probe(endpoint, name)
        has_drafts = await _draft_totals(endpoint) is not None
        return cls(endpoint, name, capabilities, has_drafts=has_drafts)

    async def draft_totals(self) -> DraftTotals | None:
        """Return its totals of drafts; None if it has none, or replicas that count their own."""
        return await _draft_totals(self.endpoint) if self.has_drafts else None

    async def run(
        self,
        workload: Workload,
        *,
        seed: int = 0,
        on_finish: Callable[[], object] = lambda: None,
    ) -> tuple[list[Trace], float]:
        """Run the workload; return its traces and the seconds from first send to last end."""
        requests = enumerate(self.bodies(workload, seed))
        traces: list[Trace | None] = [None] * workload.num_requests

        async def send_one_by_one() -> None:
            # The iterator is shared: each task takes the next request.
            for number, (path, body) in requests:
                traces[number] = await self._send(workload, path, body)
                on_finish()

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(workload.num_at_once):
                group.create_task(send_one_by_one())
        return [trace for trace in traces if trace], time.perf_counter() - started

    def bodies(self, workload: Workload, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield path and body of each request."""
        prompts_of = token_prompts if self.capabilities.takes_ids else word_prompts
        prompts: Sequence[Any] = prompts_of(workload, seed=seed)
        for number, prompt in enumerate(prompts):
            if workload.kind is Kind.EMBEDDING:
                yield "/v1/embeddings", {"model": self.model, "input": prompt}
            elif workload.kind is Kind.JSON_SCHEMA:
                yield "/v1/chat/completions", self._json_body(workload, seed, number)
            else:
                num_tokens = workload.output_tokens
                body = completion_body(self.model, prompt, num_tokens, self.capabilities)
                yield "/v1/completions", body

    def _json_body(self, workload: Workload, seed: int, number: int) -> dict[str, Any]:
        schema = {"name": "place", "strict": True, "schema": dict(SCHEMA)}
        return {
            "model": self.model,
            "messages": chat_messages(seed, number),
            "response_format": {"type": "json_schema", "json_schema": schema},
            "max_tokens": workload.output_tokens,
            "temperature": 0,
            "stream": True,
            **_USAGE,
        }

    async def _send(self, workload: Workload, path: str, body: Mapping[str, Any]) -> Trace:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await exchange(self.endpoint, "POST", path, body)
        except TimeoutError:
            return Trace(started_s=started, error=f"no response within {TIMEOUT_S:g} s")
        except OSError as error:
            return Trace(started_s=started, error=f"cannot connect: {error}")
        return trace_of(reply, started, workload)


async def measure(
    server: Server,
    workload: Workload,
    *,
    repeats: int = 1,
    seed: int = 0,
    slo: Slo | None = None,
    on_finish: Callable[[], object] = lambda: None,
) -> Result:
    """Warm up, run the workload `repeats` times and return medians.

    Each run has different prompts, because the server's prefix cache cannot be cleared.
    """
    result = partial(Result, workload=workload.name, shape=workload.shape)
    warm_up = workload.resized(requests=min(workload.num_at_once, 4))
    if workload.output_tokens > 8:
        warm_up = warm_up.resized(outputs=8)
    traces, _ = await server.run(warm_up, seed=-1 - seed)
    if reasons := [trace.error for trace in traces if trace.error]:
        return result(skipped=reasons[0])
    runs, notes = [], dict.fromkeys(server.capabilities.notes)
    for number in range(repeats):
        before = await server.draft_totals()
        traces, seconds = await server.run(
            workload, seed=seed * repeats + number, on_finish=on_finish
        )
        drafts = draft_figures(before, await server.draft_totals())
        if all(trace.error for trace in traces):
            return result(skipped=f"every request failed: {traces[0].error}")
        figures, found = online_figures(workload, traces, seconds, slo)
        runs.append(figures | drafts)
        notes |= dict.fromkeys((*found, NOTE) if drafts else found)
    return Result.of_runs(workload.name, workload.shape, runs, tuple(notes))


def trace_of(reply: Reply, started_s: float, workload: Workload) -> Trace:
    """Return the trace of a reply. The server counts tokens, or its finish reason implies them."""
    error = reply.refusal() or reply.error
    if error is not None:
        return Trace(started_s=started_s, error=error)
    stamps = reply.stamps_s
    usage = reply.usage or {}
    if not reply.is_stream:
        stamps = [time.perf_counter()]
        usage = _as_object(reply.body).get("usage") or {}
    num_output = usage.get("completion_tokens")
    if num_output is None and workload.kind is Kind.EMBEDDING:
        num_output = 0
    if num_output is None and reply.finish_reason == "length":
        num_output = workload.output_tokens
    if num_output is None:
        return Trace(started_s=started_s, error="the server reports no token counts")
    details = usage.get("prompt_tokens_details") or {}
    return Trace(
        started_s=started_s,
        stamps_s=stamps,
        num_prompt_tokens=usage.get("prompt_tokens", workload.input_tokens),
        num_cached_tokens=details.get("cached_tokens") or 0,
        num_output_tokens=num_output,
    )


def completion_body(
    model: str, prompt: str | Sequence[int], max_tokens: int, capabilities: Capabilities
) -> dict[str, Any]:
    """Return a request for a greedy reply of exactly `max_tokens`, if the server supports that."""
    extras = dict(capabilities.extras)
    if "min_tokens" in extras:
        extras["min_tokens"] = max_tokens
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **extras,
    }


def online_figures(
    workload: Workload, traces: Sequence[Trace], seconds: float, slo: Slo | None
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return figures and notes of one run."""
    figures = figures_of(traces, seconds, slo)
    good = [trace for trace in traces if trace.error is None]
    pieces = sum(len(trace.stamps_s) for trace in good)
    notes = []
    if pieces and figures["output_tok_s"] * seconds > 1.05 * pieces:
        per_piece = figures["output_tok_s"] * seconds / pieces
        notes.append(f"{per_piece:.1f} tokens per streamed piece: itl is between pieces")
    short = sum(trace.num_output_tokens < workload.output_tokens for trace in good)
    if short and workload.kind is Kind.COMPLETION:
        notes.append(f"{short} of {len(good)} replies were shorter than requested")
    notes += sorted({f"failed: {trace.error}" for trace in traces if trace.error})[:3]
    return figures, tuple(notes)


async def _first_model(endpoint: Endpoint) -> str:
    reply = await _ask(endpoint, "GET", "/v1/models")
    models = _as_object(reply.body).get("data") or [{}]
    name = models[0].get("id") if isinstance(models[0], dict) else None
    if reply.refusal() or not name:
        where = f"http://{endpoint.host}:{endpoint.port}{endpoint.prefix}"
        raise Failure(
            f"{where}/v1/models lists no model ({reply.refusal() or 'empty list'}); "
            "set it with --model"
        )
    return str(name)


async def _draft_totals(endpoint: Endpoint) -> DraftTotals | None:
    """Return a server's totals of drafts; None if it has none, or several replicas."""
    reply = await _ask(endpoint, "GET", "/server_info")
    info = {} if reply.refusal() or reply.error else _as_object(reply.body)
    config = info.get("config") or {}
    replicas = (config.get("parallel") or {}).get("num_replicas") or 1
    most = (config.get("autoscaling") or {}).get("max_replicas") or replicas
    return None if most > 1 else DraftTotals.of_server(info)


async def _probe(endpoint: Endpoint, model: str) -> Capabilities:
    """Send requests with fewer and fewer optional fields until one succeeds. Raises Failure."""
    refusal: str | None = None
    for takes_ids in (True, False):
        for extras in (
            {"ignore_eos": True, "min_tokens": 0, **_USAGE},
            {"ignore_eos": True, **_USAGE},
            {**_USAGE},
            {},
        ):
            capabilities = Capabilities(takes_ids=takes_ids, extras=extras, refusal=refusal)
            prompts: Sequence[Any] = (token_prompts if takes_ids else word_prompts)(_PROBE, seed=0)
            body = completion_body(model, prompts[0], _PROBE.output_tokens, capabilities)
            reply = await _ask(endpoint, "POST", "/v1/completions", body)
            reason = reply.refusal() or reply.error
            if reason is None:
                return capabilities
            refusal = refusal or reason
            if reply.status in (401, 403, 404):
                break  # not caused by the fields
    raise Failure(f"http://{endpoint.host}:{endpoint.port} refuses completions: {refusal}")


async def _ask(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Reply:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await exchange(endpoint, method, path, body)
    except (OSError, TimeoutError) as error:
        raise Failure(
            f"cannot reach a server at http://{endpoint.host}:{endpoint.port} "
            f"({error or 'timed out'}); start one, or omit --url to measure a new remora server"
        ) from None


def _as_object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
