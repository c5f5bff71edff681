"""Replicas without Ray, behind an HTTP client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments import serve_context
from remora.deployments.llm_server import LLMServer
from tests.deployments.fakes import client_of
from tests.deployments.http.api_docs.described import checking


@asynccontextmanager
async def running(
    path: Path | str, *, timeout_s: float = 120.0, **sections: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, LLMServer], None]:
    """Run a replica, whose responses must be as described; `sections`: of the configuration."""
    server = LLMServer.__new__(LLMServer)
    model = {"path": str(path), **sections.get("model", {})}
    engine = {"num_threads": 1, **sections.get("engine", {})}
    await server.__init__(sections | {"model": model, "engine": engine})  # type: ignore[misc]
    try:
        app = server.__serve_build_asgi_app__()
        async with client_of(app) as client:
            client.timeout = timeout_s
            client.event_hooks = {"response": [checking(app)]}
            yield client, server
    finally:
        server.__del__()


@asynccontextmanager
async def replica(
    path: Path | str, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, LLMServer], None]:
    """Run a replica of a model that makes no text."""
    monkeypatch.setattr(serve_context, "log_through_serve", lambda: None)
    async with running(path, **sections) as (client, server):
        yield client, server
