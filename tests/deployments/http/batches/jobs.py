"""Servers, clients and lines of batches."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types import Batch

from remora.deployments.http.app import build_http_app
from remora.deployments.http.batches.runner import BatchRunner
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.http.core.auth import Access
from remora.deployments.http.endpoints import BATCH_ENDPOINTS
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeEngine, FakeServer, make_config, make_plan

URL, FILES = "/v1/chat/completions", "http://remora/v1/files"


Client = openai.AsyncOpenAI


def make_server(folder: Path, engine: FakeEngine | None = None, **plan: Any) -> FakeServer:
    config = make_config(batch_dir=str(folder))
    return FakeServer(engine or FakeEngine(), plan=make_plan(**plan), config=config)


@asynccontextmanager
async def opened(
    server: FakeServer, access: Access | None = None, key: str = "EMPTY"
) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    app = build_http_app(ServerState.over(server), access=lambda: access or Access(is_local=True))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    http: Any = httpx.AsyncClient(transport=transport)
    async with (
        openai.AsyncOpenAI(base_url="http://remora/v1", api_key=key, http_client=http) as client,
    ):
        yield client


def make_runner(server: FakeServer) -> tuple[BatchRunner, BatchStore]:
    store = BatchStore(Path(str(server.config.api.batch_dir)))
    return BatchRunner(ServerState.over(server), store, BATCH_ENDPOINTS), store


def make_line(name: str, url: str = URL, **body: Any) -> dict[str, Any]:
    content = body or {"messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": content}


def make_lines(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def start(client: openai.AsyncOpenAI, *lines: Any, endpoint: Any = URL) -> Any:
    file = await client.files.create(file=("in.jsonl", make_lines(*lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def run(client: openai.AsyncOpenAI, server: FakeServer, *lines: Any, **options: Any) -> Batch:
    """Run a batch of these lines until it ends."""
    made = await start(client, *lines, **options)
    await make_runner(server)[0].run_next()
    return await client.batches.retrieve(made.id)


async def errors_of(client: openai.AsyncOpenAI, server: FakeServer, *lines: Any) -> Any:
    """Run a batch; return its status and the lines of its error file."""
    done = await run(client, server, *lines)
    return done, await read_lines(client, done.error_file_id)


async def read_lines(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return {line["custom_id"]: line for line in map(json.loads, content.text.splitlines())}


def parents_of(folder: Path, prefix: str) -> set[Path]:
    return {path.parent for path in folder.rglob(f"{prefix}*")}
