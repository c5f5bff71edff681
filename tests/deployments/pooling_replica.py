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


@asynccontextmanager
async def running(
    path: Path | str, *, timeout_s: float = 120.0, **sections: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, LLMServer], None]:
    """Run a replica; `sections`: of the configuration."""
    server = LLMServer.__new__(LLMServer)
    model = {"path": str(path), **sections.get("model", {})}
    engine = {"num_threads": 1, **sections.get("engine", {})}
    await server.__init__(sections | {"model": model, "engine": engine})  # type: ignore[misc]
    try:
        async with client_of(server.__serve_build_asgi_app__()) as client:
            client.timeout = timeout_s
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
