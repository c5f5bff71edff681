"""What a request carries besides its body: its id, its caller, labels, and where it resumes.

One object for each request, made where the request arrives and passed to everything that handles
it. A route makes it from the ASGI scope (`of`), a batch and a Python handle from an id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from remora.deployments.http.core.auth import viewer
from remora.deployments.http.core.request_labels import RequestLabels
from remora.deployments.http.generation.resumption import ResumableAnswer

RESUMABLE = "resumable"  # name in the scope's state
_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The circumstances of one request.

    request_id:  the caller's name for the request, or a generated one
    owner:       owner of the objects that the request creates
    tenant:      whose limits and share of the engine count; "" = callers without a tenant's key,
                 None = the server itself, which has no limits
    viewer:      owner of the objects that the request may see; None = all owners
    labels:      values of the operator's metric labels; empty = none are configured
    trace:       W3C headers of the caller's trace
    claims:      names that no other open request may have
    answer:      the answer that another replica may have begun or may continue; None = no other can
    created:     creation time of the answer, in seconds since 1970
    started_ns:  arrival of the request, on the monotonic clock
    timeout_s:   the caller's own limit on the whole request; None = the server's alone
    """

    request_id: str
    owner: str = ""
    tenant: str | None = None
    viewer: str | None = None
    labels: tuple[str, ...] = ()
    trace: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    answer: ResumableAnswer | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    started_ns: int = field(default_factory=time.monotonic_ns)
    timeout_s: float | None = None

    @classmethod
    def of(cls, request: Request, labels: RequestLabels) -> RequestContext:
        """Return the context of an HTTP request."""
        state, given = request.state, dict[str, Any]()
        answer: ResumableAnswer | None = getattr(state, RESUMABLE, None)
        if answer is not None:
            given = {"answer": answer, "created": answer.begun.created}
        return cls(
            request_id=state.request_id,
            owner=state.owner,
            tenant=state.tenant,
            viewer=viewer(request),
            labels=labels.read(request.scope["headers"], state.owner),
            trace={n: request.headers[n] for n in _TRACE_HEADERS if n in request.headers},
            **given,
        )
