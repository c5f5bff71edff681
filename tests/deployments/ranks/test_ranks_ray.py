"""Replicas of several ranks in a real Ray cluster: what they answer, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from remora.configs.load import parse_args
from remora.deployments.ranks.placement import ACCELERATOR_SHARE
from tests.conftest import TinyCheckpoints
from tests.deployments.applications import deployed
from tests.deployments.conftest import TINY, Cluster
from tests.deployments.lifecycle.leftovers import in_ray, until_gone

pytestmark = pytest.mark.ray

NAME = "ranks"
WAIT = httpx.Timeout(120)
RECOVERY_S = 150.0
MEMORY = 2**20  # Ray counts it only


def make_args(path: Any, **parallel: Any) -> dict[str, Any]:
    common = {
        "tp_size": 2,
        "cpus_per_rank": 0.1,
        "memory_per_rank": MEMORY,
        "placement": "SPREAD",
        "rank_timeout_s": 3.0,
    }
    return {
        "model": {"path": str(path), "served_name": "tiny2", "dtype": "float32"},
        "engine": {"kv_tokens": 2048, "num_threads": 1},
        "parallel": common | parallel,
        "metrics": {"per_rank": True},
        "speculation": {"method": "draft", "draft_model": str(path), "max_drafts": 3},
    }


def make_body(number: int, **fields: Any) -> dict[str, Any]:
    prompt = f"Number {number}: what is the capital of France?"
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def app(cluster: Cluster, tiny_checkpoints: TinyCheckpoints) -> Iterator[str]:
    """Two replicas of two ranks each, beside the applications that all tests share."""
    with deployed(NAME, make_args(tiny_checkpoints("llama"), num_replicas=2)):
        yield cluster.url(NAME)


def ranks() -> dict[str, int]:
    """Return name and process of each rank that is a worker."""
    import ray

    # Connecting to a cluster is this test's business; asking an actor is nobody's.
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in found if actor["name"].startswith("remora:tiny2:")]
    handles = {name: ray.get_actor(name, namespace="serve") for name in names}
    return {
        name: ray.get(handle.facts.remote(), timeout=20).pid for name, handle in handles.items()
    }


def until_two_others(gone: set[str]) -> dict[str, int]:
    """Wait for two workers of which none is among the gone."""
    import ray

    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        try:
            found = ranks()
        except (ray.exceptions.RayError, ValueError):
            found = {}
        if len(found) == 2 and not gone & set(found):
            return found
        time.sleep(0.2)
    pytest.fail(f"no new ranks within {RECOVERY_S} s: {found}")


def placement_groups() -> list[dict[str, Any]]:
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    return [group for group in groups if group["state"] == "CREATED" and len(group["bundles"]) == 2]


def text_of(url: str, body: dict[str, Any]) -> str:
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_two_ranks_answer_as_one_does(cluster: Cluster, app: str) -> None:
    bodies = [make_body(number) for number in range(12)]

    with ThreadPoolExecutor(12) as pool:
        alone = list(pool.map(lambda body: text_of(cluster.url(TINY), body), bodies))
        shared = list(pool.map(lambda body: text_of(app, body), bodies))

    assert len(set(alone)) > 3
    assert shared == alone
    drafts = httpx.get(f"{app}/server_info", timeout=WAIT).json()["speculation"]
    assert drafts["acceptance_rate"] > 0.5


@pytest.mark.observes("metrics.per_rank")
def test_each_rank_tells_what_it_does(app: str) -> None:
    def steps() -> dict[str, float]:
        text_of(app, make_body(1))
        shown = httpx.get(f"{app}/metrics", timeout=WAIT).text
        found = re.findall(r'remora_rank_steps_total\{.*rank="(\d)"\} ([0-9.e+]+)', shown)
        return {rank: float(num) for rank, num in found}

    deadline = time.monotonic() + RECOVERY_S
    while not (found := steps()).get("1") and time.monotonic() < deadline:
        time.sleep(0.2)

    assert found.keys() == {"0", "1"}
    assert min(found.values()) > 0


@pytest.mark.observes("parallel.cpus_per_rank", "parallel.memory_per_rank", "parallel.placement")
def test_workers_have_names_and_places(app: str) -> None:
    names = sorted(ranks())

    assert len(names) == 2
    for name in names:
        replica = name.split(":")[2]
        assert name == f"remora:tiny2:{replica}:rank1"
    groups = placement_groups()
    reserved = {"CPU": 0.1, "memory": MEMORY}
    assert [group["bundles"] for group in groups] == [{0: reserved, 1: reserved}] * 2
    assert {group["strategy"] for group in groups} == {"SPREAD"}


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.lines: list[str] = []
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        body = make_body(0, max_tokens=400, stream=True)
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=WAIT) as answer:
            for line in answer.iter_lines():
                self.lines += [line] if line else []
                self.has_begun.set()

    @property
    def is_complete(self) -> bool:
        return any('"finish_reason":"length"' in line for line in self.lines)

    def errors(self) -> list[str]:
        found = [line for line in self.lines if line.startswith('data: {"error"')]
        return [json.loads(line.removeprefix("data: "))["error"]["code"] for line in found]


def test_a_dead_rank_and_a_stopped_one_are_told_of_and_replaced(app: str) -> None:
    before = ranks()
    (dead, dead_pid), (stopped, stopped_pid) = before.items()
    readers = [Reader(app) for _ in range(8)]
    assert all(reader.has_begun.wait(60) for reader in readers)

    os.kill(dead_pid, signal.SIGKILL)
    os.kill(stopped_pid, signal.SIGSTOP)
    for reader in readers:
        reader.join()

    assert not all(reader.is_complete for reader in readers), "the ranks were not needed any more"
    for reader in readers:
        assert reader.errors() == ([] if reader.is_complete else ["engine_failed"]), reader.lines
    after = until_two_others({dead, stopped})
    assert not {dead_pid, stopped_pid} & set(after.values())
    # Their replicas have gone on.
    assert {name.split(":")[2] for name in after} == {name.split(":")[2] for name in before}
    assert text_of(app, make_body(1))
    assert until_gone(lambda: [str(g) for g in placement_groups()][2:]) == []
    for pid in (dead_pid, stopped_pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_ranks_cannot_share_is_refused_with_what_works(
    cluster: Cluster, tiny_checkpoints: TinyCheckpoints
) -> None:
    from ray import serve

    from remora.deployments.app import deployment_options
    from remora.deployments.llm_server import LLMServer

    args = make_args(tiny_checkpoints("llama"), tp_size=3)
    options = {**deployment_options(parse_args(args)), "max_constructor_retry_count": 1}
    before = in_ray()

    with pytest.raises(RuntimeError):
        serve.run(
            serve.deployment(serve.ingress()(LLMServer)).options(**options).bind(args),
            name="refused",
            route_prefix="/refused",
        )
    said = str(serve.status().applications["refused"])
    serve.delete("refused")

    assert "ConfigError" in said
    assert "tp_size" in said
    assert until_gone(lambda: in_ray() - before) == []


@pytest.mark.slow
@pytest.mark.observes("parallel.num_nodes", "parallel.label_selector", "parallel.accelerator_type")
def test_replicas_are_on_the_nodes_that_are_asked_for(tiny_checkpoints: TinyCheckpoints) -> None:
    path = str(tiny_checkpoints("llama"))
    program = [sys.executable, "-m", "tests.deployments.ranks.two_nodes", path]

    result = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)

    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["strategy"] == "STRICT_SPREAD"
    assert found["bundles"] == {"0": {"CPU": 1.0}, "1": {"CPU": 1.0}}
    assert sorted(found["nodes"]) == ["head", "second"]
    assert found["text"] == found["text after"] == found["text of one rank"]
    assert found["labelled"] == ["second", "second"]
    assert found["accelerators"] == 2 * ACCELERATOR_SHARE
    assert not found["stopped rank lives"]
    assert found["groups left"] == []
