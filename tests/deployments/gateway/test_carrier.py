"""Requests through a gateway: responses are unchanged and survive deaths of replicas."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from ray.exceptions import WorkerCrashedError
from ray.serve.exceptions import BackPressureError

from remora.configs.errors import EngineError
from remora.deployments.gateway import tunnel
from remora.deployments.gateway.relayed_request import RelayedRequest
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.routing.key import RouteKey
from tests.deployments.fakes import FakeEngine, FakeServer, make_client
from tests.deployments.gateway.fakes import Replica, Replicas, begin, gateway, ready, until

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED = {"x-request-id": "same"}
CASES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", HI),
    ("POST", "/v1/chat/completions", HI | {"stream": True}),
    ("POST", "/v1/completions", {"prompt": "Hi", "n": 2, "logprobs": 1}),
    ("POST", "/v1/messages", HI | {"max_tokens": 4, "stream": True}),
    ("POST", "/generate", {"inputs": "Hi"}),
    ("POST", "/generate_stream", {"inputs": "Hi"}),
    ("GET", "/api/version", None),
    ("POST", "/v1/completions", {"prompt": 5}),
    ("POST", "/v1/messages", {"max_tokens": "many"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/nothing", None),
    ("DELETE", "/v1/completions", None),
    ("POST", "/tokenize", {"prompt": "Hi"}),
]


def make_slow(text: str = "Paris.", **fields: Any) -> FakeServer:
    """Return a server whose outputs after the first wait for `client.gate`."""
    return FakeServer(client=FakeEngine(text=text, gate=asyncio.Event(), **fields))


def gate_of(server: FakeServer) -> asyncio.Event:
    assert server.client.gate is not None
    return server.client.gate


@pytest.mark.parametrize(("method", "path", "body"), CASES)
async def test_answers_are_the_same_byte_for_byte(
    method: str, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1e9)
    async with make_client() as direct, gateway(ready(Replica("one"))) as client:
        expected = await direct.request(method, path, json=body, headers=NAMED)
        found = await client.request(method, path, json=body, headers=NAMED)

    assert found.status_code == expected.status_code
    assert found.headers["content-type"] == expected.headers["content-type"]
    assert _ids_out(found.text) == _ids_out(expected.text)


def _ids_out(text: str) -> str:
    return re.sub(r"msg_[0-9a-f]+", "msg", text)


async def test_whoever_has_no_key_gets_no_further_than_the_gateway() -> None:
    replica = Replica("one")
    async with gateway(ready(replica), access=Access(keys=Keys(["secret"]))) as client:
        refused = await client.post("/v1/messages", json=HI)
        health = await client.get("/health")

    assert (refused.status_code, health.status_code) == (401, 200)
    assert refused.json()["error"]["type"] == "authentication_error"
    assert replica.seen == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
async def test_a_body_over_the_limit_is_refused_by_the_gateway(path: str) -> None:
    replica = Replica("one")
    async with gateway(ready(replica)) as client:
        refused = await client.post(path, content=b"x" * (16 * 2**20 + 1))

    assert refused.status_code == 413
    assert replica.seen == []


async def test_the_body_chooses_among_models() -> None:
    first, second = Replica("one"), Replica("two")
    async with gateway(ready(first), ready(second)) as client:
        await client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        unknown = await client.post("/v1/messages", json={"model": "z"})
        listed = await client.get("/v1/models")

    assert (len(first.seen), len(second.seen)) == (0, 1)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == "not_found_error"
    assert len(listed.json()["data"]) == 2


async def test_a_client_that_leaves_ends_its_request_on_the_replica() -> None:
    replica = Replica("one", make_slow())
    async with gateway(ready(replica)) as client:
        asking = await begin(client, replica)
        asking.cancel()
        async with asyncio.timeout(5):
            await replica.server.client.gone.wait()

    assert len(replica.server.client.closed) == 1


@pytest.mark.parametrize("what", ["killed", "engine failed", "engine repaired"])
async def test_a_request_whose_replica_dies_is_answered_by_another(what: str) -> None:
    doomed, other = Replica("one", make_slow()), Replica("two")
    async with gateway(ready(doomed, other)) as client:
        asking = await begin(client, doomed)
        if what == "killed":
            doomed.kill()
        elif what == "engine repaired":
            doomed.num_failures += 1
            gate_of(doomed.server).set()
        else:
            doomed.server.client.health_error = EngineError("the loop is dead")
            gate_of(doomed.server).set()
        answer = await asking

    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "Paris."
    assert other.seen[0].avoid == {"one"}


async def test_a_request_is_given_to_no_third_replica() -> None:
    replicas = [Replica(str(number), make_slow()) for number in range(3)]
    async with gateway(ready(*replicas)) as client:
        asking = await begin(client, replicas[0])
        for replica in replicas[:2]:
            await until(lambda engine=replica.server.client: engine.running)  # type: ignore[misc]
            replica.kill()
        answer = await asking
        again = await client.post("/v1/completions", json={"prompt": "x"})

    assert (answer.status_code, again.status_code) == (500, 500)
    assert "2 replicas died" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert replicas[2].seen == []


async def test_a_stream_whose_replica_dies_ends_with_an_error_event() -> None:
    replica = Replica("one", make_slow())
    async with gateway(ready(replica)) as client:
        asking = await begin(client, replica, stream=True)
        await asyncio.sleep(0.1)  # the first token is on its way
        replica.kill()
        lines = [line for line in (await asking).text.split("\n\n") if line]

    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[0]["choices"][0]["text"] == "P"
    assert events[-1]["error"]["code"] == "unavailable"
    assert lines[-1] == "data: [DONE]"


async def test_a_request_that_was_answered_is_not_blamed_for_earlier_deaths() -> None:
    statuses = []
    model, other = ready(), Replica("other")
    async with gateway(model, max_crashes=2) as client:
        for name in ("one", "two"):
            failing = make_slow()
            model.all = [Replica(name, failing), other]
            asking = await begin(client, model.all[0])
            failing.client.health_error = EngineError("the loop is dead")
            gate_of(failing).set()
            statuses.append((await asking).status_code)

    assert statuses == [200, 200]


async def test_a_replica_that_had_failed_before_costs_a_request_nothing() -> None:
    failed = FakeServer(client=FakeEngine(health_error=EngineError("the loop is dead")))
    doomed, other = Replica("one", failed), Replica("two")
    async with gateway(ready(doomed, other), max_crashes=1) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert answer.status_code == 200


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError()])
async def test_a_replica_that_cannot_reach_the_gateway_costs_a_request_nothing(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, errors = asyncio.open_unix_connection, [error]

    async def try_to_connect(path: str) -> Any:
        if errors:
            raise errors.pop()
        return await connect(path)

    monkeypatch.setattr("asyncio.open_unix_connection", try_to_connect)
    other = Replica("two")
    async with gateway(ready(Replica("one"), other)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert answer.status_code == 200
    assert other.seen[0].avoid == {"one"}


async def test_an_error_that_nobody_expects_ends_a_stream_with_an_event() -> None:
    model = Replicas([Replica("one")], error=ZeroDivisionError("secret"))
    async with gateway(model) as client:
        body = {"prompt": "x", "stream": True}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(0.2)
        model.ready.set()
        answer = await asking

    assert '"code":"internal_error"' in answer.text
    assert "secret" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_what_serve_refuses_is_told_in_the_callers_dialect() -> None:
    full = ready(Replica("one"), error=BackPressureError(9, 9, 503, 2.0))
    async with gateway(full) as client:
        answer = await client.post("/v1/messages", json=HI)

    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["x-should-retry"] == "true"


async def test_a_call_that_somebody_cancels_under_way_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remora.deployments.gateway.tunnel.GRACE_S", 0.01)
    model = ready(Replica("one"), error=asyncio.CancelledError())
    async with gateway(model) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await asyncio.sleep(0.2)
        model.error = None
        answer = await asking

    assert answer.status_code == 200


async def test_an_answer_that_arrives_after_its_call_has_returned_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_hello = tunnel._read_hello

    async def read_late(reader: asyncio.StreamReader) -> bytes:
        await until(lambda: not model.open)  # as in a gateway with much to do
        await asyncio.sleep(0.05)
        return await read_hello(reader)

    monkeypatch.setattr(tunnel, "_read_hello", read_late)
    monkeypatch.setattr(tunnel, "GRACE_S", 0.01)
    model = ready(Replica("one"))
    async with gateway(model) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "Paris."


async def test_an_error_of_ray_itself_is_a_503() -> None:
    async with gateway(ready(Replica("one"), error=WorkerCrashedError())) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_returns_without_an_answer_is_a_503(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Replica):
        async def answer(self, call: RelayedRequest, route: RouteKey) -> None:
            self.seen.append(route)

    monkeypatch.setattr(tunnel, "IN_TRANSIT_S", 0.01)
    silent = Silent("one")
    async with gateway(ready(silent)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})

    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.headers["x-should-retry"] == "true"
    assert len(silent.seen) == 1  # what it did may not be repeatable


async def test_a_stream_is_kept_alive_while_it_waits_for_a_replica() -> None:
    model = Replicas([Replica("one")])
    async with gateway(model) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=HI | {"stream": True}))
        whole = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        good = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "x", "stream": True})
        )
        await asyncio.sleep(0.3)
        model.ready.set()
        refused, answer, stream = await asyncio.gather(asking, whole, good)

    assert answer.json()["choices"][0]["text"] == "Paris."
    assert stream.text.startswith(": waiting for a replica (loading)\n\n")
    assert stream.text.endswith("data: [DONE]\n\n")
    assert refused.status_code == 200  # it was sent before the body was validated
    assert '"param":"prompt"' in refused.text


async def test_more_than_may_be_held_are_refused_at_once() -> None:
    async with gateway(Replicas([Replica("one")]), max_held=0) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"


async def test_a_replica_on_another_machine_is_listened_for_once_it_is_there() -> None:
    async with gateway(ready(Replica("far", node_id="elsewhere"))) as client:
        answers = [await client.post("/v1/completions", json={"prompt": "x"}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]


async def test_every_replica_is_asked_for_its_metrics() -> None:
    async with gateway(ready(Replica("one"), Replica("two"))) as client:
        text = (await client.get("/metrics")).text

    assert 'remora_num_running{replica="one",model_name="tiny"} 0.0' in text
    assert 'remora_num_running{replica="two",model_name="tiny"} 0.0' in text
    assert text.count("# TYPE remora_num_running gauge") == 1
    assert "remora_gateway_responses_total" in text
