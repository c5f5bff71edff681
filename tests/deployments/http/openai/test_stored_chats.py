"""Chats with `store: true`: shown, listed, changed and deleted, by their owners alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionDeleted

from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeServer, client_of, make_client, make_config
from tests.deployments.http.shared_app import share_http_app

PATH = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


async def store(client: httpx.AsyncClient, **fields: Any) -> str:
    """Store a chat; return its id."""
    answer = await client.post(PATH, json={"messages": HELLO, "store": True, **fields})
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return str(answer.json()["id"])
    return answer.text.partition('"id":"')[2].partition('"')[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["memory", "file"])
async def test_a_stored_chat_is_shown_changed_and_deleted(
    place: str, stream: bool, tmp_path: Path
) -> None:
    where = place if place == "memory" else f"file:{tmp_path / 'chats.db'}"
    server = FakeServer(config=make_config(response_store=where))
    async with make_client(server) as client:
        chat_id = await store(client, stream=stream, metadata={"a": "1"}, temperature=0.5)
        shown = await client.get(f"{PATH}/{chat_id}")
        messages = (await client.get(f"{PATH}/{chat_id}/messages")).json()
        changed = await client.post(f"{PATH}/{chat_id}", json={"metadata": {"b": "2"}})
        again = await client.get(f"{PATH}/{chat_id}")
        deleted = await client.delete(f"{PATH}/{chat_id}")
        gone = await client.get(f"{PATH}/{chat_id}")

    found = shown.json()
    ChatCompletion.model_validate(found, strict=True)
    assert found["choices"][0]["message"]["content"] == "Paris."
    assert (found["metadata"], found["temperature"]) == ({"a": "1"}, 0.5)
    assert [message["content"] for message in messages["data"]] == ["Be short.", "Hi"]
    assert [message["role"] for message in messages["data"]] == ["system", "user"]
    assert changed.json()["metadata"] == again.json()["metadata"] == {"b": "2"}
    assert ChatCompletionDeleted.model_validate(deleted.json(), strict=True).deleted
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "chat_completion_not_found"


async def test_lists_have_pages_and_filters() -> None:
    async with make_client() as client:
        ids = [await store(client, rid=name, metadata={"kind": name[0]}) for name in ("a1", "a2")]
        ids.append(await store(client, rid="b1", metadata={"kind": "b"}))
        await client.post(PATH, json={"messages": HELLO})
        first = (await client.get(PATH, params={"limit": 2})).json()
        second = (await client.get(PATH, params={"after": first["last_id"]})).json()
        newest = (await client.get(PATH, params={"order": "desc", "limit": 1})).json()
        of_kind = (await client.get(PATH, params={"metadata[kind]": "b"})).json()
        of_model = (await client.get(PATH, params={"model": "other"})).json()
        tail = (
            await client.get(f"{PATH}/{ids[0]}/messages", params={"after": f"{ids[0]}-0"})
        ).json()
        wrong = [await client.get(f"{PATH}?{query}") for query in ("limit=0", "after=x", "order=z")]

    assert [chat["id"] for chat in first["data"]] == ids[:2]
    assert (first["has_more"], first["first_id"]) == (True, ids[0])
    assert ([chat["id"] for chat in second["data"]], second["has_more"]) == (ids[2:], False)
    assert [chat["id"] for chat in newest["data"]] == ids[2:]
    assert [chat["id"] for chat in of_kind["data"]] == ids[2:]
    assert of_model["data"] == []
    assert [message["content"] for message in tail["data"]] == ["Hi"]
    assert [answer.json()["error"]["param"] for answer in wrong] == ["limit", "after", "order"]
    assert "greater than or equal to 1" in wrong[0].json()["error"]["message"]


async def test_owners_see_their_own_chats_even_under_the_same_id() -> None:
    access = Access(keys=Keys(["alice", "bob"]), admin_keys=Keys(["root"]))
    app = share_http_app(ServerState.over(FakeServer()), access=lambda: access)

    def headers(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async with client_of(app) as client:
        for key in ("alice", "bob"):
            body = {"messages": HELLO, "store": True, "rid": "same", "metadata": {"of": key}}
            await client.post(PATH, json=body, headers=headers(key))
        shown = [
            (await client.get(f"{PATH}/chatcmpl-same", headers=headers(key))).json()["metadata"]
            for key in ("alice", "bob")
        ]
        listed = (await client.get(PATH, headers=headers("alice"))).json()["data"]
        await client.delete(f"{PATH}/chatcmpl-same", headers=headers("alice"))
        gone = await client.get(f"{PATH}/chatcmpl-same", headers=headers("alice"))
        left = await client.get(f"{PATH}/chatcmpl-same", headers=headers("bob"))

    assert shown == [{"of": "alice"}, {"of": "bob"}]
    assert [chat["metadata"] for chat in listed] == [{"of": "alice"}]
    assert (gone.status_code, left.status_code) == (404, 200)


async def test_a_server_that_stores_nothing_says_so() -> None:
    server = FakeServer(config=make_config(response_store="none"))
    async with make_client(server) as client:
        answers = [
            await client.post(PATH, json={"messages": HELLO, "store": True}),
            await client.get(PATH),
        ]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert all("api.response_store" in answer.json()["error"]["message"] for answer in answers)
    assert server.client.requests == []
