"""A replica of a model that makes no text, without Ray, behind an HTTP client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments import llm_server
from remora.deployments.llm_server import LLMServer


@asynccontextmanager
async def replica(
    path: Path | str, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, LLMServer], None]:
    """Serve a model; `sections`: of the configuration."""
    monkeypatch.setattr(llm_server, "log_through_serve", lambda: None)
    server = LLMServer.__new__(LLMServer)
    args = {"engine": {"num_threads": 1}, **sections}
    args["model"] = {"path": str(path), **sections.get("model", {})}
    await server.__init__(args)  # type: ignore[misc]
    transport = httpx.ASGITransport(app=server.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://remora") as client:
        yield client, server
    server.client.close()
