"""A gateway with real replicas: two models at one address, and a replica that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import InvalidRequest, UnknownModel
from remora.deployments.app import build
from tests.conftest import TinyCheckpoints
from tests.deployments.conftest import TINY, Cluster, wait_until_running
from tests.lora.adapters import make_adapter

pytestmark = pytest.mark.ray

GATE = "gate"
WAIT = httpx.Timeout(120)
GREEDY = {"prompt": "The quick brown fox", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapter(tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "pirate"
    make_adapter(tiny_checkpoints("llama"), folder, r=4, target_modules="all-linear")
    return folder


@pytest.fixture(scope="module")
def gate(cluster: Cluster, tiny_checkpoints: TinyCheckpoints, adapter: Path) -> Iterator[str]:
    """Yield the address of a gateway for `tiny`, which has two replicas, and `other`."""
    from ray import serve

    path = str(tiny_checkpoints("llama"))
    lora = {"dynamic": True, "roots": [str(adapter.parent)]}
    application = build(
        {
            "models": [
                {"model": {"path": path, "served_name": "tiny"}, "parallel": {"num_replicas": 2}},
                {
                    "model": {"path": path, "served_name": "other", "quantization": "int8"},
                    "lora": lora,
                },
            ],
            "engine": {"kv_tokens": 8192, "num_threads": 1},
            "parallel": {"cpus_per_rank": 0.1},
            "routing": {"resume_on_failure": True},
        }
    )
    serve.run(application, name=GATE, route_prefix=f"/{GATE}", blocking=False)
    try:
        wait_until_running(GATE)
        yield cluster.url(GATE)
    finally:
        serve.delete(GATE)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=GREEDY | body, timeout=WAIT)


def texts_of(response: httpx.Response) -> str:
    """Return the text of a stream, which must be complete."""
    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_answers_are_those_of_a_replica_without_a_gateway(gate: str, cluster: Cluster) -> None:
    direct = post(cluster.url(TINY), model="tiny").json()
    whole = post(gate, model="tiny").json()
    stream = post(gate, model="tiny", stream=True)

    assert whole["choices"] == direct["choices"]
    assert texts_of(stream) == direct["choices"][0]["text"]
    assert len(stream.headers.get_list("x-request-id")) == 1


def test_adapters_of_a_model_come_and_go(gate: str, adapter: Path) -> None:
    from ray import serve

    body = {"lora_name": "pirate", "lora_path": str(adapter)}
    base = post(gate, model="other").json()["choices"][0]["text"]

    loaded = httpx.post(
        f"{gate}/v1/load_lora_adapter", json=body | {"model": "other"}, timeout=WAIT
    )
    assert loaded.status_code == 200, loaded.text
    answer = post(gate, model="other:pirate").json()
    assert answer["model"] == "pirate"
    assert answer["choices"][0]["text"] != base
    assert post(gate, model="tiny:pirate").status_code == 404

    nameless = httpx.post(f"{gate}/v1/load_lora_adapter", json=body, timeout=WAIT)
    fixed = httpx.post(f"{gate}/v1/load_lora_adapter", json=body | {"model": "tiny"}, timeout=WAIT)
    assert [nameless.status_code, fixed.status_code] == [400, 400]

    handle = serve.get_app_handle(GATE)
    listed = handle.list_adapters.remote(model="other").result(timeout_s=60)
    assert [entry["name"] for entry in listed["adapters"]] == ["pirate"]
    handle.unload_adapter.remote("pirate", model="other").result(timeout_s=60)
    assert post(gate, model="other:pirate").status_code == 404


def test_all_models_are_listed_and_others_refused(gate: str) -> None:
    cards = httpx.get(f"{gate}/v1/models", timeout=WAIT).json()["data"]
    other = post(gate, model="other")
    unknown = post(gate, model="third")

    assert [card["id"] for card in cards][:2] == ["tiny", "other"]
    assert other.json()["model"] == "other"
    assert unknown.status_code == 404
    assert "'tiny', 'other'" in unknown.json()["error"]["message"]
    assert httpx.get(f"{gate}/ready", timeout=WAIT).status_code == 200


async def test_python_handles_reach_the_models_through_it(gate: str) -> None:
    from ray import serve

    handle = serve.get_app_handle(GATE)
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": "other", "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = await handle.chat.remote(chat)
    pieces = [piece async for piece in handle.options(stream=True).chat_stream.remote(chat)]

    streamed = await handle.chat.remote(chat, stream=True)
    served = handle.options(stream=True).chat.remote(**chat)

    text = answer["choices"][0]["message"]["content"]
    assert answer["model"] == "other"
    assert text_of(pieces) == text
    for stream in (streamed, served):
        assert text_of([piece async for piece in stream]) == text
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(UnknownModel):
        await handle.chat.remote(chat | {"model": "third"})
    with pytest.raises(InvalidRequest):
        await handle.completions.remote({"model": "tiny", "prompt": {}})


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.observes("routing.resume_on_failure")
def test_a_stream_survives_kill_9_of_its_replica(gate: str) -> None:
    body = GREEDY | {"model": "tiny", "max_tokens": 480, "stream": True}
    undisturbed = httpx.post(f"{gate}/v1/completions", json=body, timeout=WAIT)
    pieces: list[str] = []

    with httpx.stream("POST", f"{gate}/v1/completions", json=body, timeout=WAIT) as response:
        for piece in response.iter_text():
            if not pieces:
                os.kill(_pid_of(_busy_replica(gate)), signal.SIGKILL)
            pieces.append(piece)

    survived = httpx.Response(200, text="".join(pieces))
    assert texts_of(survived) == texts_of(undisturbed)
    assert 'remora_gateway_resumed_total{model_name="tiny"} 1.0' in _metrics(gate)


def _metrics(gate: str) -> list[str]:
    return httpx.get(f"{gate}/metrics", timeout=WAIT).text.splitlines()


def _busy_replica(gate: str) -> str:
    """Return Serve's id of the replica that runs the request."""
    busy = [x for x in _metrics(gate) if x.startswith("remora_num_running{") and x.endswith(" 1.0")]
    return busy[0].partition('replica="')[2].partition('"')[0]


def _pid_of(replica: str) -> int:
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()["applications"][GATE]["deployments"]
    (pid,) = [
        found["pid"]
        for found in details["LLMServer-tiny"]["replicas"]
        if found["replica_id"] == replica
    ]
    return int(pid)
