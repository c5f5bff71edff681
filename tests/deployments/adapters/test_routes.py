"""The routes of adapters, and what is asked of the manager behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from remora.configs.errors import AdapterNotFound, InvalidAdapter, Unavailable, UnknownModel
from remora.deployments.adapters.manager_handle import Manager
from tests.deployments.fakes import FakeServer, make_client, make_server_config

TOLD = {"adapters": [{"name": "pirate", "source": "/a", "owner": "api"}], "replicas": {"r": {}}}


@dataclass
class FakeManager:
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    error: Exception | None = None

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((method, *args, *kwargs.items()))
            if self.error is not None:
                raise self.error
            return TOLD if method == "adapters" else {"name": args[0]}

        return call


@dataclass
class FakeAdapters:
    manager: Manager
    names: list[str] = field(default_factory=lambda: ["pirate"])

    async def find(self, name: str) -> int | None:
        return 7 if name in self.names else None

    async def describe(self) -> dict[str, Any]:
        return await self.manager.adapters()

    def resident(self) -> list[str]:
        return self.names

    def stats(self) -> Mapping[str, float]:
        return {"loads_total": 3, "loaded": 1}


class Server(FakeServer):
    """A server whose adapters come and go."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(config=make_server_config(lora={"dynamic": True}))
        self.manager = FakeManager(error=error)
        self.adapters: Any = FakeAdapters(self.manager)


PINNED = {"pinned": True, "load_inplace": True}


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        ("/load_lora_adapter", {}, (("pinned", False), ("replaces", False))),
        ("/load_lora_adapter", PINNED, (("pinned", True), ("replaces", True))),
        ("/unload_lora_adapter", {}, (("ends", False),)),
        ("/unload_lora_adapter", {"lora_int_id": 3}, (("ends", False),)),
        ("/unload_lora_adapter", {"force": True}, (("ends", True),)),
    ],
)
async def test_loading_and_unloading(
    prefix: str, path: str, fields: dict[str, Any], asked: tuple[Any, ...]
) -> None:
    server, loads = Server(), path.startswith("/load")
    source = {"lora_path": "/a"} if loads else {}
    async with make_client(server) as client:
        answer = await client.post(prefix + path, json={"lora_name": "x", **source, **fields})

    assert answer.status_code == 200
    method = ("load", "x", "/a") if loads else ("unload", "x")
    assert server.manager.calls[0] == (*method, *asked)
    if loads and prefix:
        assert answer.text == "Success: LoRA adapter 'x' added successfully."
    elif loads:
        assert answer.json() == {"success": True, "loaded_adapters": {"pirate": "/a"}}


async def test_pins_and_the_list() -> None:
    server = Server()
    async with make_client(server) as client:
        assert (await client.post("/v1/lora_adapters/x/pin")).json() == {"name": "x"}
        assert (await client.post("/v1/lora_adapters/x/unpin")).json() == {"name": "x"}
        listed = (await client.get("/v1/lora_adapters")).json()
        shown = (await client.get("/metrics")).text

    assert server.manager.calls[:2] == [
        ("pin", "x", ("pinned", True)),
        ("pin", "x", ("pinned", False)),
    ]
    assert listed == {"object": "list", "data": TOLD["adapters"], "replicas": {"r": {}}}
    assert 'remora_lora_loads_total{model_name="tiny"} 3.0' in shown


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidAdapter("its rank is 9"), 400, "invalid_adapter"),
        (AdapterNotFound("/a is not there"), 404, "adapter_not_found"),
        (UnknownModel("none of that name"), 404, "model_not_found"),
        (Unavailable("not within 5 s"), 503, "unavailable"),
    ],
)
async def test_refusals_are_told(error: Exception, status: int, code: str) -> None:
    async with make_client(Server(error)) as client:
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == str(error)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_name": "x"},
        {"lora_name": 1, "lora_path": "/a"},
        {"lora_name": "x", "lora_path": ""},
    ],
)
async def test_bodies_that_are_wrong_are_refused(body: dict[str, Any]) -> None:
    server = Server()
    async with make_client(server) as client:
        answer = await client.post("/v1/load_lora_adapter", json=body)

    assert answer.status_code == 400
    assert server.manager.calls == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
        ("POST", "/v1/lora_adapters/x/pin"),
        ("GET", "/v1/lora_adapters"),
    ],
)
async def test_they_are_the_operators(method: str, path: str) -> None:
    server = Server()
    async with make_client(server) as client:
        answer = await client.request(method, path, headers={"origin": "https://else.example"})

    assert answer.status_code == 403
    assert server.manager.calls == []


async def test_fixed_adapters_stay_as_they_are() -> None:
    named = {"adapters": [{"name": n, "path": f"/{n}"} for n in ("a", "b")]}
    async with make_client(FakeServer(config=make_server_config(lora=named))) as client:
        refused = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": "/c"}
        )
        listed = (await client.get("/v1/lora_adapters")).json()

    assert refused.status_code == 400
    assert "lora.dynamic" in refused.json()["error"]["message"]
    assert [entry["name"] for entry in listed["data"]] == ["a", "b"]


async def test_requests_run_with_the_version_that_their_name_means() -> None:
    server = Server()
    async with make_client(server) as client:
        await client.post("/v1/completions", json={"model": "tiny:pirate", "prompt": "a"})
        await client.post(
            "/generate",
            json={"text": ["a", "b"], "lora_path": ["pirate", None]},
        )
        unknown = await client.post("/generate", json={"text": "a", "lora_path": "parrot"})

    assert [request.lora_id for request in server.client.requests] == [7, 7, 0]
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "lora_path"


async def test_places_on_the_servers_disk_are_not_shown() -> None:
    lora = {"dynamic": True, "repo": "/secret/a", "roots": ["/secret/b"], "store": "/secret/c"}
    async with make_client(FakeServer(config=make_server_config(lora=lora))) as client:
        assert "secret" not in (await client.get("/server_info")).text
