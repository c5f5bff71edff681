"""Responses made in the background: polled, streamed again, cancelled, seen by other replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from remora.configs.errors import EngineError
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.responses import archive, background
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config
from tests.deployments.http.core.test_auth import make_guarded
from tests.deployments.http.responses.test_types import data_of, unknown_to

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.01)


def gated() -> FakeServer:
    """Return a server whose engine stops after the first token."""
    return FakeServer(FakeEngine(gate=asyncio.Event()))


def go_on(server: FakeServer) -> None:
    assert server.client.gate is not None
    server.client.gate.set()


async def begin(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"input": "Hi", "background": True} | fields
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def read(client: httpx.AsyncClient, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"{PATH}/{id_}")).json()
    assert "status" in found, found
    return found


async def until(client: httpx.AsyncClient, id_: str, *statuses: str) -> dict[str, Any]:
    """Poll a response until it has one of the statuses."""
    async with asyncio.timeout(10):
        while (found := await read(client, id_))["status"] not in statuses:
            await asyncio.sleep(0.001)
    return found


async def test_a_response_is_queued_made_and_kept() -> None:
    server = gated()
    async with make_client(server) as client:
        queued = await begin(client)
        running = await until(client, queued["id"], "in_progress")
        items = (await client.get(f"{PATH}/{queued['id']}/input_items")).json()["data"]
        go_on(server)
        done = await until(client, queued["id"], "completed")

    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    assert running["output"] == []
    assert items[0]["content"][0]["text"] == "Hi"
    assert done["output"][0]["content"][0]["text"] == "Paris."
    assert done["usage"]["output_tokens"] == 6
    for response in (queued, running, done):
        assert unknown_to(Response.model_validate(response)) == []


async def events_of(client: httpx.AsyncClient, id_: str, **params: Any) -> list[dict[str, Any]]:
    response = await client.get(f"{PATH}/{id_}", params={"stream": True} | params)
    assert response.status_code == 200, response.text
    return data_of(response) if response.text else []


@pytest.mark.parametrize("store", ["memory", "file"])
async def test_a_stream_is_resumed_while_it_runs_and_after_its_end(
    store: str, tmp_path: Path
) -> None:
    server = gated()
    where = f"file:{tmp_path / 'r.db'}" if store == "file" else store
    server.config = make_config(response_store=where)
    async with make_client(server) as client:
        streaming = asyncio.create_task(
            client.post(PATH, json={"input": "Hi", "background": True, "stream": True})
        )
        async with asyncio.timeout(10):
            while not server.client.running:
                await asyncio.sleep(0)
        (id_,) = {request.request_id.partition("#")[0] for request in server.client.requests}
        following = asyncio.create_task(events_of(client, id_, starting_after=1))
        go_on(server)
        events = data_of(await streaming)
        followed = await following
        await until(client, id_, "completed")
        again = await events_of(client, id_)
        rest = await events_of(client, id_, starting_after=len(events) - 2)
        nothing = await events_of(client, id_, starting_after=10_000)

    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert unknown_to(EVENT.validate_python(event)) == []
    assert again[-1]["response"]["output"] == events[-1]["response"]["output"]
    assert [event["type"] for event in again] == kinds
    assert [event["sequence_number"] for event in followed] == list(range(2, len(events)))
    assert [event["type"] for event in rest] == kinds[-1:]
    assert nothing == []


async def test_a_client_that_leaves_does_not_end_a_response() -> None:
    server = gated()
    async with make_client(server) as client:
        body = {"input": "Hi", "background": True, "stream": True}
        streaming = asyncio.create_task(client.post(PATH, json=body))
        async with asyncio.timeout(10):
            while not server.client.running:
                await asyncio.sleep(0)
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)
        (id_,) = {request.request_id.partition("#")[0] for request in server.client.requests}
        go_on(server)
        done = await until(client, id_, *ENDED)

    assert done["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_cancelled_while_it_runs_and_again_after_that(stream: bool) -> None:
    server = gated()
    async with make_client(server) as client:
        making = asyncio.create_task(
            client.post(PATH, json={"input": "Hi", "background": True, "stream": stream})
        )
        async with asyncio.timeout(10):
            while not server.client.running:
                await asyncio.sleep(0)
        (id_,) = {request.request_id.partition("#")[0] for request in server.client.requests}
        await until(client, id_, "in_progress")
        cancelled = [(await client.post(f"{PATH}/{id_}/cancel")).json() for _ in range(2)]
        found = await read(client, id_)
        made = await making

    assert [response["status"] for response in (*cancelled, found)] == ["cancelled"] * 3
    assert not server.client.running
    if stream:
        last = data_of(made)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_a_full_server_lets_a_response_wait_in_which_it_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeServer(FakeEngine(limit=0))
    async with make_client(server) as client:
        one, two = await begin(client), await begin(client)
        still = await read(client, one["id"])
        cancelled = (await client.post(f"{PATH}/{two['id']}/cancel")).json()
        monkeypatch.setattr(background, "MAX_RUNS", 1)
        refused = await client.post(PATH, json={"input": "Hi", "background": True})
        deleted = await client.delete(f"{PATH}/{one['id']}")
        gone = await client.get(f"{PATH}/{one['id']}")

    assert still["status"] == "queued"
    assert cancelled["status"] == "cancelled"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert (deleted.status_code, gone.status_code) == (200, 404)


async def test_an_error_is_the_end_of_a_response() -> None:
    server = FakeServer(FakeEngine(error=EngineError("secret"), fail_at=2))
    async with make_client(server) as client:
        failed = await until(client, (await begin(client, stream=False))["id"], *ENDED)

    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "secret" not in failed["error"]["message"]


async def test_a_response_in_progress_cannot_be_continued_yet() -> None:
    server = gated()
    async with make_client(server) as client:
        id_ = (await begin(client))["id"]
        body = {"input": "And?", "previous_response_id": id_}
        early = await client.post(PATH, json=body)
        go_on(server)
        await until(client, id_, "completed")
        later = await client.post(PATH, json=body)

    assert early.status_code == 400
    assert "still being made" in early.json()["error"]["message"]
    assert later.status_code == 200


async def test_a_response_in_progress_is_its_owners() -> None:
    server = gated()
    access = Access(keys=Keys(["sk-a", "sk-b"]))
    async with make_guarded(access, "sk-a", server) as client:
        id_ = (await begin(client, stream=False))["id"]
        strange = {"authorization": "Bearer sk-b"}
        path = f"{PATH}/{id_}"
        unseen = [
            await client.get(path, headers=strange),
            await client.get(path, params={"stream": True}, headers=strange),
            await client.post(f"{path}/cancel", headers=strange),
            await client.delete(path, headers=strange),
        ]
        go_on(server)
        done = await until(client, id_, *ENDED)

    assert [response.status_code for response in unseen] == [404] * 4
    assert done["status"] == "completed"


@pytest.mark.parametrize(
    ("fields", "store", "param"),
    [({"store": False}, "memory", "background"), ({}, "none", "background")],
)
async def test_what_is_not_stored_cannot_be_made_in_the_background(
    fields: dict[str, Any], store: str, param: str
) -> None:
    server = FakeServer(config=make_config(response_store=store))
    async with make_client(server) as client:
        refused = await client.post(PATH, json={"input": "Hi", "background": True} | fields)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_only_a_response_that_was_streamed_is_streamed_again() -> None:
    async with make_client() as client:
        polled = await begin(client)
        await until(client, polled["id"], "completed")
        plain = (await client.post(PATH, json={"input": "Hi"})).json()
        refused = [
            await client.get(f"{PATH}/{id_}", params=params)
            for id_ in (polled["id"], plain["id"])
            for params in ({"stream": True}, {"starting_after": 1})
        ]
        # Names of a store's other records are no ids of responses.
        others = [await client.get(f"{PATH}/{polled['id']}{end}") for end in (":events", ":cancel")]

    params = [response.json()["error"]["param"] for response in refused]
    assert [response.status_code for response in (*refused, *others)] == [400] * 4 + [404] * 2
    assert params == ["stream", "starting_after"] * 2


@asynccontextmanager
async def two_replicas(
    tmp_path: Path,
) -> AsyncGenerator[tuple[FakeServer, httpx.AsyncClient, httpx.AsyncClient], None]:
    """Yield a server with a gate, its client, and a client of a replica with the same store."""
    config = make_config(response_store=f"file:{tmp_path / 'r.db'}")
    server = gated()
    server.config = config
    async with make_client(server) as one, make_client(FakeServer(config=config)) as other:
        yield server, one, other


async def test_another_replica_shows_a_response_and_cancels_it(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (server, one, other):
        id_ = (await begin(one, stream=False))["id"]
        await until(other, id_, "in_progress")
        streamed = await other.get(f"{PATH}/{id_}", params={"stream": True})
        cancelled = (await other.post(f"{PATH}/{id_}/cancel")).json()
        found = await read(one, id_)

    assert streamed.status_code == 503
    assert int(streamed.headers["retry-after"]) >= 1
    assert (cancelled["status"], found["status"]) == ("cancelled", "cancelled")
    assert not server.client.running


async def test_another_replica_streams_a_response_that_has_ended(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (server, one, other):
        go_on(server)
        body = {"input": "Hi", "background": True, "stream": True}
        events = data_of(await one.post(PATH, json=body))
        (id_,) = {request.request_id.partition("#")[0] for request in server.client.requests}
        await until(other, id_, "completed")
        again = await events_of(other, id_)

    assert [event["type"] for event in again] == [event["type"] for event in events]


async def test_a_response_whose_replica_is_gone_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_replicas(tmp_path) as (server, one, other):
        id_ = (await begin(one, stream=False))["id"]
        await until(other, id_, "in_progress")
        monkeypatch.setattr(archive, "STALE_S", 0.0)
        failed = await read(other, id_)
        go_on(server)
        done = await until(one, id_, *ENDED)

    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert done["status"] == "completed"
