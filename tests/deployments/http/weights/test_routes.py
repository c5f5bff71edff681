"""Routes of weights and memory over weights that only record calls."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import httpx
import pytest

from remora.configs.errors import InvalidRequest
from remora.deployments.http.generation.weight_update import (
    PART_BYTES,
    InstanceUpdate,
    Mode,
    Update,
    WeightPart,
)
from tests.deployments.fakes import FakeServer, make_client

DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
INSTANCE = "/update_weights_from_instance"
FILE = bytes(range(100))
ALL = frozenset({"weights", "kv_cache", "cuda_graph"})


class RecordingWeights:
    """Weights that record what they are asked for."""

    def __init__(self) -> None:
        self.version, self.num_updates = "first", 0
        self.released: frozenset[str] = frozenset()
        self.calls: list[Any] = []
        self.received = b""

    async def update(self, update: Update) -> None:
        if update.path == "broken":
            raise InvalidRequest("The weights stay as they are.", "model_path")
        self.calls.append(update)
        self.num_updates += 1
        self.version = update.version or self.version

    async def add_part(self, upload: str, offset: int, part: bytes) -> None:
        assert offset == len(self.received)
        self.received += part

    async def update_from_instance(self, order: InstanceUpdate) -> None:
        self.calls.append(order)
        self.version = order.version or self.version

    async def read_part(self, start: int, num_bytes: int, tag: str | None) -> WeightPart:
        self.calls.append((start, num_bytes, tag))
        content = FILE[start : start + num_bytes] if tag in (None, "t") else b""
        return WeightPart(content=content, start=start, total_bytes=len(FILE), tag="t")

    async def relabel(self, version: str) -> None:
        self.version = version

    async def sleep(self, tags: frozenset[str], mode: Mode, *, forgets: bool) -> None:
        self.calls.append((tags, mode, forgets))
        self.released |= tags

    async def wake(self, tags: frozenset[str]) -> None:
        self.released -= tags

    async def save(self, path: str) -> int:
        self.calls.append(path)
        return 7


@pytest.fixture
def weights() -> RecordingWeights:
    return RecordingWeights()


@pytest.fixture
def server(weights: RecordingWeights) -> FakeServer:
    return FakeServer(weights=weights)


async def version(client: httpx.AsyncClient) -> tuple[str, int]:
    """Return the label and the number of updates, once all answers agree."""
    info = (await client.get("/server_info")).json()
    found = {info["weight_version"]}
    for path in ("/get_model_info", "/get_weight_version", "/weight_version"):
        found.add((await client.get(path)).json()["weight_version"])
    for streams in (False, True):
        answer = await client.post("/generate", json={"text": "ab", "stream": streams})
        first = answer.json() if not streams else json.loads(answer.text.split("\n")[0][6:])
        found.add(first["meta_info"]["weight_version"])
    assert len(found) == 1
    return found.pop(), info["weight_updates"]


@pytest.mark.observes("model.weight_version")
async def test_an_update_says_what_is_served_from_then_on(
    server: FakeServer, weights: RecordingWeights
) -> None:
    async with make_client(server) as client:
        assert await version(client) == ("first", 0)
        body = {"model_path": "/step-2", "load_format": "safetensors", "weight_version": "second"}
        answer = await client.post(DISK, json=body)
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert await version(client) == ("second", 1)
        aborting = {"model_path": "/step-3", "abort_all_requests": True}
        assert (await client.post(DISK, json=aborting)).status_code == 200
        assert await version(client) == ("second", 2)
        assert (await client.post(DISK, json={"model_path": "broken"})).status_code == 400
        answer = await client.post("/update_weight_version", json={"new_version": "third"})
        assert answer.json()["new_version"] == "third"
        assert await version(client) == ("third", 2)
    assert weights.calls == [
        Update(path="/step-2", load_format="safetensors", version="second"),
        Update(path="/step-3", aborts=True),
    ]


async def test_tensors_come_as_base64_or_bytes_in_parts(
    server: FakeServer, weights: RecordingWeights
) -> None:
    content = bytes(range(256))
    async with make_client(server) as client:
        first = {"safetensors": b64encode(content[:100]).decode(), "is_last": False}
        answer = await client.post(TENSOR, json=first)
        assert answer.json()["num_bytes"] == 100
        assert weights.calls == []
        answer = await client.post(
            TENSOR,
            params={"offset": 100, "is_last": "true", "weight_version": "v2"},
            content=content[100:],
            headers={"content-type": "application/octet-stream"},
        )
    assert (answer.status_code, answer.json()["weight_version"]) == (200, "v2")
    assert weights.received == content
    assert weights.calls == [Update(upload="default", version="v2")]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors", "not_supported"),
        ({}, "safetensors", None),
        ({"safetensors": "?"}, "safetensors", None),
        ({"safetensors": "aGk=", "load_format": "flattened_bucket"}, "load_format", None),
        ({"safetensors": "aGk=", "upload_id": "../x"}, "upload_id", None),
        ({"safetensors": "aGk=", "offset": -1}, "offset", None),
    ],
)
async def test_other_tensors_are_refused(
    server: FakeServer,
    weights: RecordingWeights,
    body: dict[str, Any],
    param: str,
    code: str | None,
) -> None:
    async with make_client(server) as client:
        answer = await client.post(TENSOR, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert code is None or error["code"] == code
    assert (weights.received, weights.calls) == (b"", [])


@pytest.mark.parametrize("field", [("offset", "x"), ("is_last", "perhaps"), ("upload_id", "a b")])
async def test_parameters_of_bytes_are_checked(server: FakeServer, field: tuple[str, str]) -> None:
    async with make_client(server) as client:
        headers = {"content-type": "application/octet-stream"}
        answer = await client.post(TENSOR, params=dict([field]), content=b"x", headers=headers)
    assert answer.status_code == 400


async def test_memory_is_released_and_taken_by_tags(
    server: FakeServer, weights: RecordingWeights
) -> None:
    async with make_client(server) as client:
        body = {"tags": ["kv_cache"]}
        assert (await client.post("/release_memory_occupation", json=body)).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.post("/release_memory_occupation")).status_code == 200
        assert weights.released == ALL
        assert (await client.post("/resume_memory_occupation", json=body)).status_code == 200
        assert weights.released == ALL - {"kv_cache"}
        answer = await client.post("/wake_up", params={"tags": ["weights", "cuda_graph"]})
        assert answer.status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await client.post("/sleep", params={"level": 2, "mode": "wait"})).status_code == 200
        assert (await client.get("/server_info")).json()["released_memory"] == sorted(ALL)
    assert weights.calls == [
        (frozenset({"kv_cache"}), "idle", False),
        (ALL, "idle", False),
        (ALL, "wait", True),
    ]


@pytest.mark.parametrize(
    ("path", "params", "body"),
    [
        ("/sleep", {"level": "0"}, None),
        ("/sleep", {"mode": "keep"}, None),
        ("/wake_up", {"tags": "lora"}, None),
        ("/release_memory_occupation", {}, {"tags": ["lora"]}),
        ("/save_weights", {}, {}),
        (INSTANCE, {}, {}),
        (INSTANCE, {}, {"url": "ftp://other"}),
        (INSTANCE, {}, {"url": "http://user:word@other"}),
        (INSTANCE, {}, {"url": "http://other/?a=b"}),
        (INSTANCE, {}, {"url": "http://other:port"}),
        (INSTANCE, {}, {"url": "http://other", "api_key": "a\r\nb"}),
        ("/update_weights_from_distributed", {}, {"names": []}),
        ("/init_weight_transfer_engine", {}, {}),
    ],
)
async def test_what_is_not_offered_is_refused(
    server: FakeServer, weights: RecordingWeights, path: str, params: Any, body: Any
) -> None:
    async with make_client(server) as client:
        answer = await client.post(path, params=params, json=body)
    assert answer.status_code == 400
    assert weights.calls == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (DISK, {"model_path": "/a"}),
        (TENSOR, {"safetensors": "aGk="}),
        (INSTANCE, {"url": "http://other"}),
        ("/update_weight_version", {"new_version": "a"}),
        ("/save_weights", {"path": "/a"}),
        ("/sleep", None),
        ("/wake_up", None),
        ("/release_memory_occupation", None),
        ("/resume_memory_occupation", None),
    ],
)
async def test_the_operator_asks_a_server_that_is_configured_for_it(
    server: FakeServer, path: str, body: Any
) -> None:
    async with make_client(FakeServer()) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_enabled")
    async with make_client(server) as client:
        headers = {"origin": "http://elsewhere.example"}
        assert (await client.post(path, json=body, headers=headers)).status_code == 403


async def test_weights_are_saved(server: FakeServer, weights: RecordingWeights) -> None:
    async with make_client(server) as client:
        answer = await client.post("/save_weights", json={"path": "/roots/a"})
    assert (answer.status_code, answer.json()["num_bytes"]) == (200, 7)
    assert weights.calls == ["/roots/a"]


async def test_an_instance_is_named_by_the_normal_form_of_its_url(
    server: FakeServer, weights: RecordingWeights
) -> None:
    body = {"url": "HTTP://Other/path/", "api_key": "secret", "weight_version": "two"}
    async with make_client(server) as client:
        answer = await client.post(INSTANCE, json=body)
    assert (answer.status_code, answer.json()["weight_version"]) == (200, "two")
    expected = InstanceUpdate(url="http://other:80/path", api_key="secret", version="two")
    assert weights.calls == [expected]
    assert "secret" not in repr(expected)


async def test_shared_weights_are_sent_in_parts_with_a_tag(server: FakeServer) -> None:
    async with make_client(server) as client:
        first = await client.get("/weights", headers={"range": "bytes=0-59"})
        tagged = {"range": "bytes=60-", "if-match": first.headers["etag"]}
        second = await client.get("/weights", headers=tagged)
    assert (first.status_code, second.status_code) == (206, 206)
    assert first.content + second.content == FILE
    ranges = [answer.headers["content-range"] for answer in (first, second)]
    assert ranges == ["bytes 0-59/100", "bytes 60-99/100"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 400),
        ({"range": "bytes=5-2"}, 400),
        ({"range": "bytes=0-1,4-5"}, 400),
        ({"range": "bytes=-5"}, 400),
        ({"range": "bytes=100-"}, 416),
        ({"range": "bytes=0-9", "if-match": '"other"'}, 412),
    ],
)
async def test_other_ranges_and_tags_get_no_bytes(
    server: FakeServer, headers: dict[str, str], status: int
) -> None:
    async with make_client(server) as client:
        answer = await client.get("/weights", headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_a_part_has_at_most_a_limit_of_bytes_and_is_for_the_operator(
    server: FakeServer, weights: RecordingWeights
) -> None:
    async with make_client(server) as client:
        whole = {"range": "bytes=0-99999999999"}
        assert (await client.get("/weights", headers=whole)).status_code == 206
        page = {**whole, "origin": "http://elsewhere.example"}
        assert (await client.get("/weights", headers=page)).status_code == 403
    assert weights.calls == [(0, PART_BYTES, None)]
    async with make_client(FakeServer()) as client:
        answer = await client.get("/weights", headers=whole)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_enabled")
