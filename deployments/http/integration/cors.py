"""Cross-origin requests of web pages (CORS), for the origins that `api.cors` names.

The middleware is the outermost one: it answers preflight requests, which carry no API key, and
adds its headers to every answer, errors included.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from remora.configs.sections.cors import ANY, CorsSection

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
# Response headers that a page may read, in addition to the few that browsers always allow.
READABLE_HEADERS = (
    "x-request-id",
    "request-id",
    "openai-processing-ms",
    "retry-after",
    "x-should-retry",
    "x-remora-ignored-fields",
    "x-remora-suggested-fields",
    "endpoint-load-metrics",
)


def cors_middlewares(section: CorsSection | None) -> list[Middleware]:
    """Return the middleware as a list of at most one; None = no page of another origin is let in.

    Without it, a preflight request is an ordinary one for a method that no route has.
    """
    if section is None:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=section.origins,
            allow_methods=METHODS if ANY in section.methods else section.methods,
            allow_headers=section.headers,
            allow_credentials=section.credentials,
            expose_headers=READABLE_HEADERS,
            max_age=section.max_age_s,
        )
    ]
