"""Anthropic's message batches: created, run with the batches' executor, and read as JSONL."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments.http.batches import store as batches
from remora.deployments.http.core.auth import Access, Keys
from tests.deployments.fakes import FakeServer, make_client
from tests.deployments.http.batches.jobs import make_line, make_runner, make_server, opened, start
from tests.deployments.http.core.test_auth import make_guarded

PATH = "/v1/messages/batches"
HELLO: Any = [{"role": "user", "content": "Hi"}]
PARAMS: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "messages": HELLO}
FIELDS = {
    *("id", "type", "processing_status", "request_counts", "created_at", "expires_at"),
    *("ended_at", "cancel_initiated_at", "archived_at", "results_url"),
}


@pytest.fixture
async def http(server: FakeServer) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with make_client(server) as client:
        yield client


def requests(*names: str, **params: Any) -> dict[str, Any]:
    return {"requests": [{"custom_id": name, "params": PARAMS | params} for name in names]}


async def create(http: httpx.AsyncClient, *names: str, **params: Any) -> dict[str, Any]:
    response = await http.post(PATH, json=requests(*names, **params))
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    assert made.keys() == FIELDS
    return made


async def results(http: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the results of an ended batch by custom id."""
    ended = (await http.get(f"{PATH}/{batch['id']}")).json()
    response = await http.get(ended["results_url"])
    assert response.headers["content-type"].startswith("application/x-jsonl")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert all(line.keys() == {"custom_id", "result"} for line in lines)
    return {line["custom_id"]: line["result"] for line in lines}


def counts(**numbers: int) -> dict[str, int]:
    kinds = ("processing", "succeeded", "errored", "canceled", "expired")
    return dict.fromkeys(kinds, 0) | numbers


async def test_a_batch_runs_and_its_results_are_anthropics(
    server: FakeServer, http: httpx.AsyncClient
) -> None:
    body = requests("one", "two")
    body["requests"].append({"custom_id": "bad", "params": {"messages": HELLO}})
    made = (await http.post(PATH, json=body)).json()
    early = await http.get(f"{PATH}/{made['id']}/results")
    await make_runner(server)[0].run_next()
    ended = (await http.get(f"{PATH}/{made['id']}")).json()
    found = await results(http, made)

    assert made["id"].startswith("msgbatch_")
    assert (made["type"], made["processing_status"]) == ("message_batch", "in_progress")
    assert made["request_counts"] == counts(processing=3)
    assert (made["ended_at"], made["results_url"], early.status_code) == (None, None, 400)
    assert ended["processing_status"] == "ended"
    assert ended["request_counts"] == counts(succeeded=2, errored=1)
    assert ended["ended_at"].endswith("Z")
    message = found["one"]["message"]
    assert (found["one"]["type"], message["type"]) == ("succeeded", "message")
    assert message["content"] == [{"type": "text", "text": "Par"}]
    assert message["usage"]["output_tokens"] == 3
    error = found["bad"]["error"]
    assert (found["bad"]["type"], error["type"]) == ("errored", "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in error["error"]["message"]
    assert error["request_id"]


async def test_a_cancelled_batch_names_the_requests_that_did_not_run(
    server: FakeServer, http: httpx.AsyncClient
) -> None:
    made = await create(http, "one", "two")
    refused = await http.delete(f"{PATH}/{made['id']}")
    cancelling = (await http.post(f"{PATH}/{made['id']}/cancel")).json()
    await make_runner(server)[0].run_next()
    again = (await http.post(f"{PATH}/{made['id']}/cancel")).json()
    found = await results(http, made)
    deleted = await http.delete(f"{PATH}/{made['id']}")
    gone = await http.get(f"{PATH}/{made['id']}")
    files = (await http.get("/v1/files")).json()["data"]

    assert refused.status_code == 400
    assert cancelling["processing_status"] == "canceling"
    assert cancelling["cancel_initiated_at"].endswith("Z")
    assert (again["processing_status"], again["request_counts"]) == ("ended", counts(canceled=2))
    assert found == {"one": {"type": "canceled"}, "two": {"type": "canceled"}}
    assert deleted.json() == {"id": made["id"], "type": "message_batch_deleted"}
    assert gone.status_code == 404
    assert files == []


async def test_requests_whose_time_is_over_have_expired(
    server: FakeServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", 0)
    made = await create(http, "one")
    await make_runner(server)[0].run_next()
    ended = (await http.get(f"{PATH}/{made['id']}")).json()

    assert ended["request_counts"] == counts(expired=1)
    assert await results(http, made) == {"one": {"type": "expired"}}


async def test_batches_come_in_pages_and_apart_from_openais(
    server: FakeServer, http: httpx.AsyncClient
) -> None:
    async with opened(server) as client:
        other = await start(client, make_line("x"))
        made = [await create(http, "x") for _ in range(3)]
        listed = [batch.id for batch in (await client.batches.list()).data]
    pages = [
        (await http.get(PATH, params=params)).json()
        for params in ({"limit": 2}, {"limit": 1000}, {"limit": 1, "before_id": made[0]["id"]})
    ]
    whole = [batch["id"] for batch in pages[1]["data"]]
    after = (await http.get(PATH, params={"after_id": whole[1]})).json()
    before = (await http.get(PATH, params={"before_id": whole[2], "limit": 1})).json()
    faults = [
        await http.get(PATH, params=params)
        for params in ({"limit": 0}, {"after_id": "x"}, {"after_id": "x", "before_id": "x"})
    ]
    strange = await http.get(f"{PATH}/{other.id.replace('batch_', 'msgbatch_')}")

    assert listed == [other.id]
    assert (len(pages[0]["data"]), pages[0]["has_more"]) == (2, True)
    assert sorted(whole) == sorted(batch["id"] for batch in made)
    assert (pages[1]["first_id"], pages[1]["last_id"]) == (whole[0], whole[2])
    assert [batch["id"] for batch in after["data"]] == whole[2:]
    assert ([batch["id"] for batch in before["data"]], before["has_more"]) == (whole[1:2], True)
    assert [response.status_code for response in faults] == [400] * 3
    assert strange.status_code == 404


BAD: dict[str, tuple[Any, str]] = {
    "nothing": ({"requests": []}, "requests"),
    "no id": ({"requests": [{"params": PARAMS}]}, "custom_id"),
    "bad id": (requests("a b"), "custom_id"),
    "long id": (requests("a" * 65), "custom_id"),
    "twice": (requests("a", "a"), "requests[1].custom_id"),
    "no params": ({"requests": [{"custom_id": "a"}]}, "params"),
    "stream": (requests("a", stream=True), "params.stream"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_malformed_batch_is_refused_at_once(name: str, http: httpx.AsyncClient) -> None:
    body, named = BAD[name]
    response = await http.post(PATH, json=body)
    error = response.json()["error"]

    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert named in error["message"]
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_a_batch_is_its_owners(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    access = Access(keys=Keys(["sk-a", "sk-b"]))
    async with make_guarded(access, "sk-a", server) as http:
        made = await create(http, "one")
        await make_runner(server)[0].run_next()
        strange = {"authorization": "Bearer sk-b"}
        unseen = [
            await http.request(method, f"{PATH}/{made['id']}{end}", headers=strange)
            for method, end in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"))
        ]
        unseen.append(await http.delete(f"{PATH}/{made['id']}", headers=strange))
        listed = (await http.get(PATH, headers=strange)).json()["data"]
        own = await results(http, made)

    assert [response.status_code for response in unseen] == [404] * 4
    assert listed == []
    assert own.keys() == {"one"}


async def test_without_a_folder_there_are_no_batches() -> None:
    async with make_client() as http:
        responses = [await http.post(PATH, json=requests("a")), await http.get(f"{PATH}/x")]
    for response in responses:
        assert response.status_code == 404
        assert "api.batch_dir" in response.json()["error"]["message"]
        assert response.json()["request_id"] == response.headers["request-id"]
