"""Adapters that come and go in a real Ray cluster: two replicas of two ranks, against PEFT."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments.ray_private import ray_logs
from tests.conftest import TinyCheckpoints
from tests.deployments.applications import deployed, num_running
from tests.deployments.conftest import Cluster
from tests.lora.adapters import greedy_ids, make_adapter
from tests.lora.broken import BROKEN, MAX_BYTES, Breaker

pytestmark = pytest.mark.ray

NAME = "adapters"
WAIT = httpx.Timeout(120)
PROMPT = [17, 300, 42, 99, 256, 8, 77]
NUM_TOKENS = 16
NUM_ADAPTERS = 6
RANKS = (1, 4, 8, 16, 4, 8)
TARGETS = (["q_proj"], ["v_proj", "o_proj"], "all-linear", ["down_proj"], ["up_proj"], "all-linear")


@dataclass(frozen=True)
class ServerState:
    """An application, adapters' folders below its root, and what PEFT makes of the prompt."""

    url: str
    folder: Path
    expected: dict[str | None, list[int]]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=WAIT)

    def load(self, name: str, source: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(self.folder / source), **fields}
        return self.post("/v1/load_lora_adapter", body)

    def unload(self, name: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name, **fields})

    def ask(self, model: str | None) -> httpx.Response:
        body: dict[str, Any] = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.post("/v1/completions", body | ({"model": model} if model else {}))

    def ids(self, model: str | None) -> list[int]:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def everywhere(self, model: str | None, expected: list[int]) -> None:
        """Ask often enough to reach both replicas, at once and one after the other."""
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(self.ids, [model] * 16))
        assert answers == [expected] * 16

    def listed(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/v1/lora_adapters", timeout=WAIT)
        assert answer.status_code == 200, answer.text
        return {entry["name"]: entry for entry in answer.json()["data"]}


@pytest.fixture(scope="module")
def app(
    cluster: Cluster, tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerState]:
    base, folder = tiny_checkpoints("llama"), tmp_path_factory.mktemp("adapters")
    expected: dict[str | None, list[int]] = {}
    for number, (rank, targets) in enumerate(zip(RANKS, TARGETS, strict=True)):
        settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        adapted = make_adapter(base, folder / f"a{number}", seed=number, **settings)
        expected[f"a{number}"] = greedy_ids(adapted, PROMPT, NUM_TOKENS)
        with adapted.disable_adapter():
            expected[None] = greedy_ids(adapted, PROMPT, NUM_TOKENS)
    assert len({tuple(ids) for ids in expected.values()}) == NUM_ADAPTERS + 1
    (folder / "repo").mkdir()
    args = {
        "model": {"path": str(base), "served_name": "tiny2", "dtype": "float32"},
        "engine": {"kv_tokens": 2048, "num_threads": 1},
        "parallel": {
            "tp_size": 2,
            "cpus_per_rank": 0.1,
            "rank_timeout_s": 5.0,
            "num_replicas": 2,
        },
        "lora": {
            "dynamic": True,
            "max_loras_per_batch": 2,
            "max_loaded_loras": 3,
            "roots": [str(folder)],
            "repo": str(folder / "repo"),
            "repo_period_s": 0.5,
            "load_timeout_s": 60.0,
            "max_adapter_bytes": MAX_BYTES,
        },
    }
    with deployed(NAME, args):
        yield ServerState(cluster.url(NAME), folder, expected)


def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.1)


@pytest.mark.observes("lora.dynamic")
def test_adapters_are_loaded_served_and_unloaded(app: ServerState) -> None:
    for number in range(NUM_ADAPTERS):
        answer = app.load(f"a{number}", f"a{number}")
        assert answer.status_code == 200, answer.text
    names = [None, *(f"a{number}" for number in range(NUM_ADAPTERS))]

    # Two slots and three places in memory for six, at each replica.
    with ThreadPoolExecutor(24) as pool:
        asked = names * 12
        found = list(pool.map(app.ids, asked))
    assert [ids == app.expected[name] for name, ids in zip(asked, found, strict=True)] == (
        [True] * len(asked)
    )

    listed = app.listed()
    assert set(listed) == {name for name in names if name}
    assert all(len(entry["replicas"]) == 2 for entry in listed.values())
    cards = httpx.get(f"{app.url}/v1/models", timeout=WAIT).json()["data"]
    assert {card["id"]: card["parent"] for card in cards} == {
        "tiny2": None,
        **{name: "tiny2" for name in names if name},
    }
    for number in range(1, NUM_ADAPTERS):
        assert app.unload(f"a{number}").status_code == 200
    assert app.ask("a1").status_code == 404
    assert set(app.listed()) == {"a0"}


def test_a_reload_changes_new_requests_and_no_running_ones(app: ServerState) -> None:
    assert app.load("changing", "a1").status_code == 200
    app.everywhere("changing", app.expected["a1"])
    body = {
        "model": "changing",
        "prompt": PROMPT,
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    undisturbed = app.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    has_begun, streams = threading.Semaphore(0), list[list[int]]()

    def read() -> None:
        ids: list[int] = []
        with httpx.stream(
            "POST", f"{app.url}/v1/completions", json=body | {"stream": True}, timeout=WAIT
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    ids += choice.get("token_ids") or []
                    has_begun.release()
        streams.append(ids)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert has_begun.acquire(timeout=60)
    assert app.load("changing", "a2").status_code == 400
    assert app.load("changing", "a2", load_inplace=True).status_code == 200
    app.everywhere("changing", app.expected["a2"])
    for thread in threads:
        thread.join()

    assert streams == [undisturbed] * 4
    assert app.unload("changing").status_code == 200


def num_tracebacks() -> int:
    """Count the tracebacks in the logs of managers and replicas."""
    logs = ray_logs()
    assert logs is not None
    return sum(path.read_text().count("Traceback") for path in Path(logs, "serve").glob("*.log"))


@pytest.mark.parametrize(("spoil", "reason"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_refused_with_the_reason(
    app: ServerState, spoil: Breaker, reason: str, request: pytest.FixtureRequest
) -> None:
    before = app.listed()
    folder = app.folder / request.node.callspec.id.replace(" ", "-")
    shutil.copytree(app.folder / "a0", folder)
    spoil(folder)

    refused = app.load("broken", str(folder))

    expected = 404 if request.node.callspec.id.startswith("missing") else 400
    assert refused.status_code == expected, refused.text
    assert re.search(reason, refused.json()["error"]["message"]), refused.text
    assert app.ask("broken").status_code == 404
    assert app.unload("broken").status_code == 404
    assert app.listed() == before


def test_what_may_not_be_named_is_refused(app: ServerState) -> None:
    before, tracebacks = app.listed(), num_tracebacks()
    refused = [
        app.load("missing", "nowhere"),
        app.load("outside", "../../etc"),
        app.load("../name", "a0"),
        app.load("tiny2", "a0"),
    ]
    found = [answer.status_code for answer in refused]
    assert found == [404, 400, 400, 400], [a.text for a in refused]
    assert refused[0].json()["error"]["code"] == "adapter_not_found"
    assert app.listed() == before
    assert num_tracebacks() == tracebacks


def test_pins_hold_and_leave_a_place(app: ServerState) -> None:
    assert app.load("a1", "a1", pinned=True).status_code == 200
    assert app.listed()["a1"]["pinned"]
    answer = app.post("/v1/lora_adapters/a0/pin", {})
    assert answer.status_code == 400
    assert app.post("/v1/lora_adapters/a1/unpin", {}).json()["pinned"] is False
    assert app.unload("a1").status_code == 200


def test_the_repository_is_served(app: ServerState) -> None:
    shutil.copytree(app.folder / "a3", app.folder / "repo" / "from-repo")
    app.everywhere("from-repo", app.expected["a3"])  # asked for before it is found
    assert app.listed()["from-repo"]["owner"] == "repo"
    shutil.rmtree(app.folder / "repo" / "from-repo")
    until(lambda: "from-repo" not in app.listed())


def test_handles_load_and_unload(app: ServerState) -> None:
    from ray import serve

    handle = serve.get_app_handle(NAME)
    told = handle.load_adapter.remote("handled", str(app.folder / "a4")).result(timeout_s=60)
    assert told["name"] == "handled"
    app.everywhere("tiny2:handled", app.expected["a4"])
    handle.unload_adapter.remote("handled").result(timeout_s=60)
    assert app.ask("handled").status_code == 404


def test_one_batch_of_generate_mixes_adapters(app: ServerState) -> None:
    assert app.load("a2", "a2").status_code == 200
    body = {
        "input_ids": [PROMPT] * 3,
        "lora_path": ["a0", None, "a2"],
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
    }
    answers = app.post("/generate", body).json()
    found = [answer["output_ids"] for answer in answers]
    assert found == [app.expected[name] for name in ("a0", None, "a2")]
    assert app.unload("a2").status_code == 200


def processes(name: str) -> list[int]:
    """Return the processes of a deployment's replicas."""
    import psutil  # type: ignore[import-untyped]

    marks = f"ServeReplica:{NAME}:{name}"
    running = psutil.process_iter(["cmdline"])
    return [p.pid for p in running if marks in " ".join(p.info["cmdline"] or ())]


@contextmanager
def asking(app: ServerState, name: str, expected: list[int]) -> Iterator[None]:
    """Ask for an adapter all the while: it answers rightly or not at all."""
    over, wrong = threading.Event(), list[str]()

    def ask() -> None:
        while not over.wait(0.02):
            answer = app.ask(name)
            if answer.status_code == 200:
                if answer.json()["choices"][0]["token_ids"] != expected:
                    wrong.append(answer.text)
            elif answer.status_code not in (404, 503):
                wrong.append(answer.text)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("title", ["LoRAManager", "LLMServer"])
def test_who_dies_amid_a_load_comes_back_and_nothing_is_half_loaded(
    app: ServerState, title: str
) -> None:
    """A replica stands still, so that the load lasts; then it is killed, or the manager is."""
    name, expected = f"amid-{title}", app.expected["a3"]
    number = num_running(NAME, title)
    victim, slow = processes(title)[0], processes("LLMServer")[0]
    with asking(app, name, expected), ThreadPoolExecutor(1) as pool:
        os.kill(slow, signal.SIGSTOP)
        try:
            loading = pool.submit(app.load, name, "a3")
            time.sleep(1.0)
            assert not loading.done(), loading.result().text
            os.kill(victim, signal.SIGKILL)
        finally:
            with suppress(ProcessLookupError):
                os.kill(slow, signal.SIGCONT)
        answer = loading.result()
        until(lambda: victim not in processes(title) and num_running(NAME, title) == number)
        if answer.status_code != 200:
            assert answer.status_code == 503, answer.text
            until(lambda: app.load(name, "a3", load_inplace=True).status_code == 200)
        until(lambda: all(len(entry["replicas"]) == 2 for entry in app.listed().values()))
        app.everywhere(name, expected)
    assert set(app.listed()) == {"a0", name}
    app.everywhere("a0", app.expected["a0"])
    app.everywhere(None, app.expected[None])
    assert app.unload(name).status_code == 200
