"""The section `limits`: what one request may ask for, and who shares the engine.

A request over a limit is refused before any of it is copied, and counted under the name of the key
(`remora_refusals_total`). The keys' upper bounds are the capacities of the layers below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from remora.configs.fields import Name, Seconds, Secret, Section

_MANY = 2**20
UNNAMED = "default"


class TenantEntry(Section):
    """One tenant. Its limits count on each replica: with several, it may get as many times more."""

    name: Annotated[Name, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name in errors and metrics. `default` = callers with keys of api.api_key, or without any."""

    api_key: Secret | None = None
    """API keys of the tenant: env:NAME or file:/path, with one key per line. Every tenant but
    `default` needs one."""

    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    """Share of the engine's tokens relative to other tenants, while they have work."""

    max_priority: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Highest `priority` of a request (with engine.low_priority_first: the negative of the lowest);
    others get HTTP 400. Priorities order the tenant's own requests only. Default: any."""

    max_open_requests: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most waiting and running outputs; further requests get HTTP 429. Default, and upper bound:
    engine.max_queued_requests and the running ones, which count for each tenant."""

    requests_per_minute: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Most requests in a minute, on average; as many may come at once. Further ones get HTTP 429.
    Default: no limit."""

    tokens_per_minute: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Most tokens in a minute, on average, of prompts (cached ones too) and outputs. While outputs
    have gone over it, requests get HTTP 429. Default: no limit."""

    max_kv_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the KV cache up to which requests of the tenant start, by the expected length of
    their outputs; others wait. One always starts. Cached prefixes are not counted. Default: no
    limit."""


class LimitsSection(Section):
    """Limits of requests and tenants; one over a limit gets HTTP 400 unless stated otherwise."""

    max_url_bytes: Annotated[int, Field(ge=64, le=64 * 1024)] = 8 * 1024
    """Longest URL, in bytes; longer ones get HTTP 414."""

    max_headers: Annotated[int, Field(ge=16, le=1000)] = 100
    """Most headers; requests with more get HTTP 431."""

    max_header_bytes: Annotated[int, Field(ge=1024, le=64 * 1024)] = 32 * 1024
    """Total size of all headers, in bytes; larger ones get HTTP 431."""

    body_timeout_s: Seconds = 30.0
    """Seconds until a request body must have arrived; later ones get HTTP 408."""

    stream_timeout_s: Seconds = 60.0
    """Seconds after which a stream is closed whose client reads nothing."""

    keep_alive_s: Seconds | None = 15.0
    """Seconds without an event after which a stream gets a comment (Anthropic's: a ping), so that
    proxies keep its connection. null = never."""

    waiting_timeout_s: Seconds | None = None
    """Seconds that a request may wait in the engine's queue, each time that it does: before it
    starts, and after it was preempted; then HTTP 503, or an error at the end of a stream. Default:
    only the first wait is limited, by engine.queue_timeout_s."""

    running_timeout_s: Seconds | None = None
    """Seconds from a request's first step after which it is aborted: HTTP 503, or an error at the
    end of a stream. Default: no limit."""

    max_json_depth: Annotated[int, Field(ge=8, le=512)] = 64
    """Deepest nesting of objects and lists in a body."""

    max_json_digits: Annotated[int, Field(ge=20, le=4096)] = 64
    """Most digits of a number in a body."""

    max_messages: Annotated[int, Field(ge=1, le=_MANY)] = 2048
    """Most messages of a chat."""

    max_parts: Annotated[int, Field(ge=1, le=_MANY)] = 512
    """Most content parts of a message."""

    max_tools: Annotated[int, Field(ge=1, le=_MANY)] = 128
    """Most tools of a request."""

    template_timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """CPU seconds to render the chat template."""

    max_template_chars: Annotated[int, Field(ge=1024, le=2**30)] = 4 * 2**20
    """Most characters of a rendered chat template."""

    max_stops: Annotated[int, Field(ge=1, le=16)] = 16
    """Most stop strings."""

    max_stop_chars: Annotated[int, Field(ge=1, le=256)] = 256
    """Most characters of a stop string."""

    max_logit_biases: Annotated[int, Field(ge=0, le=_MANY)] = 1024
    """Most tokens with a logit bias."""

    max_prompts: Annotated[int, Field(ge=1, le=_MANY)] = 256
    """Most prompts of a request."""

    max_inputs: Annotated[int, Field(ge=1, le=_MANY)] = 2048
    """Most texts of a request for embeddings or scores."""

    max_n: Annotated[int, Field(ge=1, le=16)] = 16
    """Most outputs per prompt (n and best_of)."""

    max_sequences: Annotated[int, Field(ge=1, le=_MANY)] = 256
    """Most outputs of a request: prompts times n."""

    max_hidden_tokens: Annotated[int, Field(ge=1, le=_MANY)] = 4096
    """Most tokens, of prompts and outputs, of a request that returns hidden states."""

    max_top_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    """Most candidates per token whose log-probabilities are returned, for outputs and prompts."""

    tenants: Annotated[list[TenantEntry], Field(max_length=256)] = Field(default_factory=list)
    """Tenants, which have keys of their own and share the engine by weight: one that has little to
    do does not wait for another's queue. engine.max_queued_requests, max_queued_tokens and
    api.max_concurrent_requests count for each of them. Each replica shares and limits by itself.
    Default: all callers are one."""

    @property
    def has_tenant_keys(self) -> bool:
        """Whether tenants have keys, so that every caller needs one."""
        return any(tenant.api_key is not None for tenant in self.tenants)

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        counts = Counter(tenant.name for tenant in self.tenants)
        doubled = [name for name, count in counts.items() if count > 1]
        if doubled:
            yield "tenants", f"two have the name {doubled[0]!r}; names must be unique"
        for tenant in self.tenants:
            if (tenant.api_key is None) != (tenant.name == UNNAMED):
                what = "takes the keys of api.api_key; remove its api_key"
                if tenant.name != UNNAMED:
                    what = f"needs api_key; only {UNNAMED!r} has none"
                yield "tenants", f"{tenant.name!r} {what}"
