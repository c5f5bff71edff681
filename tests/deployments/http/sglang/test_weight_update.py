"""/update_weights_from_disk with an engine that only records calls."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.http.generation.weight_update import UpdateBody, Weights, WeightUpdate
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_server_config
from tests.moments import cancelled, nothing_left, steps

PATH = "/update_weights_from_disk"


class Noting:
    """A loader that loads nothing and records its arguments."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.num_installed = 0
        self.may_load = threading.Event()
        self.may_load.set()

    def prepare(self, source: str, load_format: str | None) -> Callable[[], None]:
        self.may_load.wait(10)
        if source == "broken":
            raise ConfigError("the weights do not fit")
        self.asked.append((source, load_format))
        return self._install

    def _install(self) -> None:
        self.num_installed += 1

    async def run(self, install: Callable[[], None]) -> None:
        install()


def make_server(noting: Noting | None = None, **model: Any) -> FakeServer:
    config = make_server_config(model={"path": "tiny", **model})
    exchange = None if noting is None else WeightUpdate(noting.prepare, noting.run)
    return FakeServer(config=config, exchange=exchange)


async def version(client: httpx.AsyncClient) -> tuple[str, int]:
    info = (await client.get("/server_info")).json()
    assert (await client.get("/get_model_info")).json()["weight_version"] == info["weight_version"]
    for streams in (False, True):
        answer = await client.post("/generate", json={"text": "ab", "stream": streams})
        first = answer.json() if not streams else json.loads(answer.text.split("\n")[0][6:])
        assert first["meta_info"]["weight_version"] == info["weight_version"]
    return info["weight_version"], info["weight_updates"]


@pytest.mark.observes("model.weight_version")
async def test_an_update_says_what_is_served_from_then_on() -> None:
    noting = Noting()
    async with make_client(make_server(noting, weight_version="first")) as client:
        assert await version(client) == ("first", 0)
        body = {"model_path": "/step-2", "load_format": "safetensors", "weight_version": "second"}
        answer = await client.post(PATH, json=body)
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert await version(client) == ("second", 1)
        assert (await client.post(PATH, json={"model_path": "/step-3"})).status_code == 200
        assert await version(client) == ("second", 2)
    assert noting.asked == [("/step-2", "safetensors"), ("/step-3", None)]
    assert noting.num_installed == 2


async def test_weights_that_do_not_fit_change_nothing() -> None:
    noting = Noting()
    async with make_client(make_server(noting)) as client:
        body = {"model_path": "broken", "weight_version": "second"}
        answer = await client.post(PATH, json=body)
        assert answer.status_code == 400
        assert await version(client) == ("default", 0)
    assert noting.num_installed == 0


async def test_one_update_at_a_time() -> None:
    noting = Noting()
    noting.may_load.clear()
    async with make_client(make_server(noting)) as client:
        first = asyncio.create_task(client.post(PATH, json={"model_path": "/a"}))
        await asyncio.sleep(0.05)
        second = await client.post(PATH, json={"model_path": "/b"})
        noting.may_load.set()
        assert (await first).status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (400, "update_running")


async def test_a_server_whose_weights_stay_says_so() -> None:
    async with make_client(make_server()) as client:
        answer = await client.post(PATH, json={"model_path": "/a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_enabled")


@pytest.mark.parametrize("body", [{}, {"model_path": ""}, {"model_path": 3}])
async def test_a_body_without_a_source_is_refused(body: dict[str, Any]) -> None:
    async with make_client(make_server(Noting())) as client:
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 400


@pytest.mark.parametrize("is_asked", [True, False])
async def test_open_requests_are_aborted_where_that_is_asked_for(is_asked: bool) -> None:
    server = make_server(Noting())
    server.client.running = {"one"}
    async with make_client(server) as client:
        body = {"model_path": "/a", "abort_all_requests": is_asked}
        assert (await client.post(PATH, json=body)).status_code == 200
    assert server.client.aborted == ({"one"} if is_asked else set())


async def test_only_the_operator_may_update() -> None:
    headers = {"origin": "http://elsewhere.example"}
    async with make_client(make_server(Noting())) as client:
        answer = await client.post(PATH, json={"model_path": "/a"}, headers=headers)
    assert answer.status_code == 403


async def test_an_update_whose_caller_leaves_at_any_moment_is_whole_or_not_begun() -> None:
    noting, body = Noting(), UpdateBody(model_path="/a")
    weights = Weights("first", WeightUpdate(noting.prepare, noting.run))
    async with nothing_left():
        for moment in range(8):
            await cancelled(weights.update(body, FakeEngine()), moment)
            while weights.num_updates < len(noting.asked):
                await steps(1)
            while (await tried(weights, body)) == "update_running":
                await steps(1)
    assert weights.num_updates == noting.num_installed == len(noting.asked)


async def test_of_two_updates_in_one_step_one_is_refused() -> None:
    noting, body = Noting(), UpdateBody(model_path="/a")
    weights = Weights("first", WeightUpdate(noting.prepare, noting.run))
    found = await asyncio.gather(tried(weights, body), tried(weights, body))
    assert sorted(found) == ["done", "update_running"]


async def tried(weights: Weights, body: UpdateBody) -> str:
    try:
        await weights.update(body, FakeEngine())
    except InvalidRequest as refusal:
        return str(refusal.code)
    return "done"


async def test_an_update_that_fails_when_its_caller_has_left_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noting = Noting()
    noting.may_load.clear()
    weights = Weights("first", WeightUpdate(noting.prepare, noting.run))
    async with nothing_left():
        await cancelled(weights.update(UpdateBody(model_path="broken"), FakeEngine()), 5)
        noting.may_load.set()
        while (await tried(weights, UpdateBody(model_path="/a"))) == "update_running":
            await steps(1)
    assert "The weights stay as they are: the weights do not fit" in caplog.text
