"""Owners of responses, and inputs that name items of earlier responses by id."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments.http.core.auth import Access, Keys
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config
from tests.deployments.http.batches.jobs import make_line, make_runner, opened, start
from tests.deployments.http.core.test_auth import make_guarded
from tests.deployments.http.responses.test_response import (
    ADD,
    REASONING_AND_CALL,
    in_progress,
    make_parsing_server,
)

PATH = "/v1/responses"
KEYS = Keys(["sk-a", "sk-b"])
ACCESSES = {
    "public": Access(keys=KEYS),
    "local": Access(keys=KEYS, is_local=True),
    "with_operator": Access(keys=KEYS, admin_keys=Keys(["sk-operator"])),
}


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


async def attempts(client: httpx.AsyncClient, made: dict[str, Any]) -> dict[str, int]:
    """Return the status of every request that names a response."""
    path, post = f"{PATH}/{made['id']}", client.post
    continued = {"input": "x", "previous_response_id": made["id"]}
    referring = {"input": [reference(made["output"][0])]}
    return {
        "get": (await client.get(path)).status_code,
        "items": (await client.get(f"{path}/input_items")).status_code,
        "cancel": (await post(f"{path}/cancel")).status_code,
        "continue": (await post(PATH, json=continued)).status_code,
        "refer": (await post(PATH, json=referring)).status_code,
        "delete": (await client.delete(path)).status_code,
    }


@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize("store", ["memory", "file"])
async def test_what_one_key_has_stored_another_does_not_see(
    name: str, store: str, tmp_path: Path
) -> None:
    where = f"file:{tmp_path / 'r.db'}" if store == "file" else store
    server = FakeServer(config=make_config(response_store=where))
    access = ACCESSES[name]
    async with make_guarded(access, "sk-a", server) as client:
        made = (await client.post(PATH, json={"input": "Hi"})).json()
        strange = httpx.Headers({"authorization": "Bearer sk-b"})
        own_headers, client.headers = client.headers, strange
        stranger = await attempts(client, made)
        client.headers = own_headers
        owner = await attempts(client, made)

    assert stranger.pop("continue") == 400  # the body is at fault, not the path
    assert set(stranger.values()) == {404}
    assert owner == {
        "get": 200,
        "items": 200,
        "cancel": 400,  # it has ended
        "continue": 200,
        "refer": 200,
        "delete": 200,
    }


async def test_the_operator_sees_the_responses_of_all() -> None:
    access = ACCESSES["with_operator"]
    async with make_guarded(access, "sk-a") as client:
        made = (await client.post(PATH, json={"input": "Hi"})).json()
        client.headers["authorization"] = "Bearer sk-operator"
        assert (await client.get(f"{PATH}/{made['id']}")).status_code == 200


async def test_without_keys_responses_are_everybodys() -> None:
    for access in (Access(), Access(is_local=True), Access(admin_keys=Keys(["sk-operator"]))):
        async with make_guarded(access) as client:
            made = (await client.post(PATH, json={"input": "Hi"})).json()
            client.headers["authorization"] = "Bearer whatever"
            found = await attempts(client, made)
        assert set(found.values()) == {200, 400}


async def test_a_running_response_is_its_owners() -> None:
    server = FakeServer(FakeEngine(gate=asyncio.Event()))
    async with (
        make_guarded(ACCESSES["local"], "sk-a", server) as client,
        in_progress(client, server) as (_, id_),
    ):
        strange = {"authorization": "Bearer sk-b"}
        unseen = await client.get(f"{PATH}/{id_}", headers=strange)
        uncancelled = await client.post(f"{PATH}/{id_}/cancel", headers=strange)
        seen = await client.get(f"{PATH}/{id_}")
        cancelled = await client.post(f"{PATH}/{id_}/cancel")

    assert (unseen.status_code, uncancelled.status_code) == (404, 404)
    assert (seen.json()["status"], cancelled.json()["status"]) == ("in_progress", "cancelled")


async def test_an_input_names_earlier_items_by_id() -> None:
    server = make_parsing_server(REASONING_AND_CALL)
    async with make_client(server) as client:
        made = (await client.post(PATH, json={"input": "1 + 1?", "tools": [ADD]})).json()
        listed = (await client.get(f"{PATH}/{made['id']}/input_items")).json()["data"]
        call = made["output"][2]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        bare = {"id": made["output"][0]["id"]}  # the type is optional
        items = [reference(listed[0]), bare, *map(reference, made["output"][1:]), result]
        again = await client.post(PATH, json={"input": items})
        kept = (await client.get(f"{PATH}/{again.json()['id']}/input_items")).json()["data"]

    assert again.status_code == 200, again.text
    messages = server.tokenizer.rendered[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[0]["content"] == "1 + 1?"
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    # The stored input holds the referenced items under their ids.
    assert [item["id"] for item in kept[::-1]][:-1] == [listed[0]["id"]] + [
        item["id"] for item in made["output"]
    ]
    assert {item["type"] for item in kept} == {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    }


@pytest.mark.parametrize(
    "id_", ["msg_x", f"msg_{'0' * 52}", f"fc_{'f' * 52}", "../../etc/passwd", "m" * 256]
)
async def test_an_item_that_is_not_kept_is_not_found_and_advice_given(id_: str) -> None:
    async with make_client() as client:
        items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": id_}]
        response = await client.post(PATH, json={"input": items, "stream": True})

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "item_not_found")
    assert error["param"] == "input[1].id"
    assert "Send the item itself" in error["message"]
    assert id_[:80] in error["message"]
    assert len(error["message"]) < 250


async def test_an_item_of_a_response_that_was_not_stored_is_not_found() -> None:
    async with make_client() as client:
        made = (await client.post(PATH, json={"input": "Hi", "store": False})).json()
        response = await client.post(PATH, json={"input": [reference(made["output"][0])]})
    assert response.status_code == 404


async def test_a_reference_needs_an_id_and_a_store() -> None:
    server = FakeServer(config=make_config(response_store="none"))
    async with make_client(server) as client:
        body = {"input": [{"type": "item_reference", "id": "msg_x"}]}
        unkept = (await client.post(PATH, json=body)).json()["error"]
        nameless = await client.post(PATH, json={"input": [{"type": "item_reference"}]})

    assert (unkept["code"], unkept["param"]) == ("unsupported", "input[0].id")
    assert "api.response_store" in unkept["message"]
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "input[0].id")


async def test_a_call_that_was_cut_off_cannot_be_referred_to() -> None:
    room = len(REASONING_AND_CALL.removesuffix("1}}\n</tool_call>"))
    async with make_client(make_parsing_server(REASONING_AND_CALL)) as client:
        body: dict[str, Any] = {"input": "x", "tools": [ADD], "max_output_tokens": room}
        made = (await client.post(PATH, json=body)).json()
        response = await client.post(PATH, json={"input": [reference(made["output"][2])]})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input[0].id")
    assert "cut off" in error["message"]


@pytest.mark.parametrize(("key", "num_completed"), [("sk-a", 1), ("sk-b", 0)])
async def test_a_batch_continues_the_responses_of_its_owner_only(
    key: str, num_completed: int, tmp_path: Path
) -> None:
    config = make_config(
        batch_dir=str(tmp_path / "batches"), response_store=f"file:{tmp_path / 'r.db'}"
    )
    server = FakeServer(config=config)
    async with make_guarded(ACCESSES["local"], "sk-a", server) as client:
        made = (await client.post(PATH, json={"input": "Hi"})).json()
    line = make_line("x", PATH, input="And?", previous_response_id=made["id"])
    async with opened(server, ACCESSES["local"], key) as openai_client:
        batch = await start(openai_client, line, endpoint=PATH)
        await make_runner(server)[0].run_next()
        done = await openai_client.batches.retrieve(batch.id)

    assert done.request_counts is not None
    assert done.request_counts.completed == num_completed
