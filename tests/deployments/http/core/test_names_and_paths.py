"""Names and paths from requests: whatever they hold, the answer is a refusal and not a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.adapters import manager as manager_module
from remora.deployments.http.generation.weight_update import FixedWeights, Update
from remora.engine.live.allowed import AllowedSources
from tests.deployments.adapters.test_manager import make_manager
from tests.deployments.adapters.test_routes import FakeAdapters
from tests.deployments.fakes import FakeServer, make_client, make_server_config

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
UPDATE = {"model_path": "/weights", "load_format": "auto"}
INSTANCE = {"url": "http://other:8000"}
LOAD = {"lora_name": "a", "lora_path": "/weights"}
# (path, body, field that takes the value)
FIELDS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/update_weights_from_disk", UPDATE, "model_path"),
    ("/update_weights_from_disk", UPDATE, "load_format"),
    ("/update_weights_from_disk", UPDATE, "weight_version"),
    ("/update_weights_from_instance", INSTANCE, "url"),
    ("/update_weights_from_instance", INSTANCE, "api_key"),
    ("/update_weights_from_instance", INSTANCE, "model"),
    ("/update_weights_from_instance", INSTANCE, "weight_version"),
    ("/v1/load_lora_adapter", LOAD, "lora_path"),
    ("/v1/load_lora_adapter", LOAD, "lora_name"),
    ("/load_lora_adapter", LOAD, "lora_path"),
    ("/load_lora_adapter", LOAD, "lora_name"),
    ("/v1/unload_lora_adapter", {}, "lora_name"),
    ("/unload_lora_adapter", {}, "lora_name"),
    ("/v1/batches", BATCH, "input_file_id"),
    ("/v1/responses", {"input": "Hi"}, "previous_response_id"),
    ("/v1/chat/completions", CHAT, "model"),
    ("/v1/completions", {"prompt": "Hi"}, "model"),
    ("/v1/messages", CHAT, "model"),
    ("/generate", {"text": "Hi"}, "lora_path"),
    ("/api/chat", CHAT, "model"),
    ("/api/show", {}, "model"),
    ("/tokenize", {"prompt": "Hi"}, "model"),
    ("/completion", {"prompt": "Hi"}, "model"),
    ("/api/pull", {}, "model"),
    ("/", {"prompt": "Hi"}, "model"),
    ("/", {"prompt": "Hi"}, "adapter_name"),
    ("/", {"prompt": "Hi"}, "task_id"),
    ("/tokenizer/encode", {"prompt": "Hi"}, "model"),
)
URLS = (
    ("GET", "/v1/models/{}"),
    ("POST", "/v1/lora_adapters/{}/pin"),
    ("POST", "/v1/lora_adapters/{}/unpin"),
    ("GET", "/v1/files/{}"),
    ("GET", "/v1/files/{}/content"),
    ("DELETE", "/v1/files/{}"),
    ("GET", "/v1/batches/{}"),
    ("POST", "/v1/batches/{}/cancel"),
    ("GET", "/v1/messages/batches/{}"),
    ("GET", "/v1/messages/batches/{}/results"),
    ("DELETE", "/v1/messages/batches/{}"),
    ("GET", "/v1/responses/{}"),
    ("GET", "/v1/responses/{}/input_items"),
    ("DELETE", "/v1/responses/{}"),
    ("POST", "/v1/responses/{}/cancel"),
)
# Bodies are escaped as JSON, so that they may hold half a surrogate pair.
VALUES = (
    "\0",
    "a\0b",
    "\ud800",
    "a\udfff",
    "\x1b[2J",
    "x" * 300,
    "/" + "x" * 5000,
    "../../etc",
    "~",
)


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(manager_module, "log_through_serve", lambda: None)

    class Weights(FixedWeights):
        async def update(self, update: Update) -> None:
            allowed = AllowedSources([str(tmp_path)], [])
            try:
                allowed.source(update.path or "", update.load_format)
            except ConfigError as error:
                raise InvalidRequest(str(error)) from None

    config = make_server_config(
        api={"batch_dir": str(tmp_path / "batches"), "response_store": f"file:{tmp_path / 'r'}"},
        lora={"dynamic": True, "roots": [str(tmp_path)]},
    )
    server = FakeServer(config=config, weights=Weights("default"))
    manager = await make_manager(tmp_path, repo=str(tmp_path))
    server.adapters = FakeAdapters(manager)  # type: ignore[assignment]
    yield server
    manager._watching.cancel()


async def test_in_bodies(server: FakeServer) -> None:
    statuses = {}
    async with make_client(server) as client:
        for path, body, name in FIELDS:
            for value in VALUES:
                content = json.dumps(body | {name: value}).encode()
                headers = {"content-type": "application/json"}
                response = await client.post(path, content=content, headers=headers)
                statuses[path, name, value[:8]] = response.status_code

    assert {key: s for key, s in statuses.items() if s not in (400, 404, 422)} == {}


async def test_in_urls(server: FakeServer) -> None:
    statuses = {}
    async with make_client(server) as client:
        for method, path in URLS:
            for value in VALUES:
                named = path.format(quote(value, safe="", errors="surrogatepass"))
                response = await client.request(method, named)
                statuses[path, value[:8]] = response.status_code

    assert {key: s for key, s in statuses.items() if s not in (400, 404, 405)} == {}


async def test_in_the_name_of_an_uploaded_file(server: FakeServer) -> None:
    async with make_client(server) as client:
        for value in VALUES:
            name = value.encode("utf-8", "surrogatepass").replace(b"\n", b"")
            part = (
                b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
                b'--b\r\ncontent-disposition: form-data; name="file"; filename="'
                + name
                + b'"\r\n\r\n'
                b"{}\r\n--b--\r\n"
            )
            headers = {"content-type": "multipart/form-data; boundary=b"}
            response = await client.post("/v1/files", content=part, headers=headers)
            assert response.status_code in (200, 400), value[:8]
            assert (await client.get("/v1/files")).status_code == 200
